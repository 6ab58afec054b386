"""What each request needs: a table with a line for every code that a server answers.

    OPEN        a known account and its signature are enough
    ADMIN       an admin account
    a function  (fields, body) -> the topics and groups it touches, and what it does to them

RocketMQ checks ten codes for topics and groups and eight for admin; whatever else is signed passes.
Here every code has its decision (spec/acl; the page on security has the differences): who asks for
a topic's or group's data needs its permission; what changes or shows the broker itself needs admin.
A request that names no topic where it must (33, 36, and 37 of old clients) is decided once more by
its handler, which knows the message.

The check of one request, in RocketMQ's order (spec/acl):

    1  the address is in the global white list          allowed, whoever it is
    2  no AccessKey, or one that no account has         refused
    3  the address is in the account's white list       allowed, without signature
    4  the signature                                    compared in constant time
    5  a send to the trace or the staging topic         allowed: clients write there by themselves
    6  an admin account                                 allowed everything
    7  the request needs admin                          refused
    8  each topic and group: its entry, or the default

Requests are read only after the first three steps: who may do all needs no well-formed body here.
"""

import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sluicemq.acl.rules import GROUP_PREFIX, WORD_OF, Account, Permission, Rules, numbers_of
from sluicemq.errors import ProtocolError
from sluicemq.model.system_names import STAGING_TOPIC, TRACE_TOPIC
from sluicemq.model.topic import DEFAULT_TOPIC, pop_origin
from sluicemq.wire import fastjson
from sluicemq.wire.codes import RequestCode as R
from sluicemq.wire.popping import decode_pop_acks
from sluicemq.wire.signature import ACCESS_KEY, CALL_SCHEME, SIGNATURE, call_date_ms, sign

PUB, SUB, ANY = Permission.PUB, Permission.SUB, Permission.ANY
Fields = Mapping[str, str]


class Resource(NamedTuple):
    """A topic, or the group g as `%RETRY%g`, and what the request does with it."""

    name: str
    need: Permission


Resources = tuple[Resource, ...]
Asks = Callable[[Fields, bytes], Resources]
BODY_NAMES_MAX: Final = 10_000


class Need(NamedTuple):
    """A line of the table."""

    is_admin: bool = False
    asks: Asks | None = None
    text: str = ""
    """What it asks for, in words; the page on security lists them."""


OPEN: Final = Need(text="an account")
ADMIN: Final = Need(is_admin=True, text="admin")


_WORDS: Final = {PUB: "PUB", SUB: "SUB", ANY: "PUB or SUB"}


def group(name: str) -> str:
    """A group as a resource. The prefix is added to any name, as in RocketMQ."""
    return GROUP_PREFIX + name


def _fields(*, free: str = "", **names: Permission) -> Need:
    """Resources in header fields: `group…` and `consumerGroup` are groups. An absent field asks for
    nothing: its handler refuses the request. `free` is a name that everybody may use."""

    def ask(fields: Fields, body: bytes) -> Resources:
        found = []
        for name, need in names.items():
            value = fields.get(name)
            if value and value != free:
                is_group = "roup" in name
                found.append(Resource(group(value) if is_group else value, need))
        return tuple(found)

    words = (f"{_WORDS[need]} {name}" for name, need in names.items())
    return Need(asks=ask, text=", ".join(words))


def _send(name: str) -> Need:
    def ask(fields: Fields, body: bytes) -> Resources:
        topic = fields.get(name)
        if topic is None:
            return ()
        return (Resource(topic, SUB if topic.startswith(GROUP_PREFIX) else PUB),)

    return Need(asks=ask, text="PUB topic; of a retry topic SUB group")


def _in_body(text: str, *, is_needed: bool = False, **paths: str) -> Need:
    """Groups and topics in a JSON body: `consumers[].groupName` is that name in each object of the
    list. An empty body, unless it `is_needed`, names nothing, as an absent field: the handler
    refuses it."""

    def ask(fields: Fields, body: bytes) -> Resources:
        if not body and not is_needed:
            return ()
        value = fastjson.loads(body)
        names = [
            group(name) if kind == "group" else name
            for kind, path in paths.items()
            for name in _names(value, path.split("."))
        ]
        return tuple(Resource(name, SUB) for name in dict.fromkeys(names))

    return Need(asks=ask, text=text)


def _names(value: Any, path: list[str]) -> Iterator[str]:
    """What stands at a path. An absent list is empty, null is none."""
    if not isinstance(value, dict):
        raise ProtocolError("The body has something else where an object must be.")
    step, rest = path[0], path[1:]
    if not rest:
        yield str(value.get(step))
    elif not step.endswith("[]"):
        yield from _names(value.get(step), rest)
    else:
        items = value.get(step[:-2], [])
        if not isinstance(items, list) or len(items) > BODY_NAMES_MAX:
            raise ProtocolError("The body has no list where one must be, or one too long.")
        for item in items:
            yield from _names(item, rest)


def _acknowledged(fields: Fields, body: bytes) -> Resources:
    """The topic is that of retries for messages that came again: who may read the one they were
    sent to may read them."""
    name, topic = fields.get("consumerGroup", ""), fields.get("topic", "")
    return _popped([(name, pop_origin(topic, name))])


def _popped(pairs: Iterable[tuple[str, str]]) -> Resources:
    names = dict.fromkeys(name for g, topic in pairs for name in (topic, g and group(g)) if name)
    return tuple(Resource(name, SUB) for name in names)


_LOCK = _in_body("SUB group, SUB topics", group="consumerGroup", topic="mqSet[].topic")
_PULL = _fields(topic=SUB, consumerGroup=SUB)
_ACK = Need(asks=_acknowledged, text="SUB topic, which is the origin of a retry topic, SUB group")
_TOPIC = _fields(topic=ANY)
_GROUP = _fields(group=SUB, consumerGroup=SUB)

NEEDS: Final[dict[int, Need]] = {
    # producers
    R.SEND_MESSAGE: _send("topic"),
    R.SEND_MESSAGE_V2: _send("b"),
    R.SEND_BATCH_MESSAGE: _send("b"),
    R.SEND_REPLY_MESSAGE: _send("topic"),
    R.SEND_REPLY_MESSAGE_V2: _send("b"),
    R.RECALL_MESSAGE: _fields(topic=PUB),
    R.END_TRANSACTION: _fields(topic=PUB),
    R.SLUICE_COMMIT_EPOCH: Need(  # `topics` that its rows go to, separated by commas
        asks=lambda fields, _body: tuple(
            Resource(name, PUB) for name in fields.get("topics", "").split(",") if name
        ),
        text="PUB topics",
    ),
    # consumers
    R.PULL_MESSAGE: _PULL,
    R.LITE_PULL_MESSAGE: _PULL,
    R.CONSUMER_SEND_MSG_BACK: _fields(group=SUB),
    R.QUERY_CONSUMER_OFFSET: _PULL,
    R.UPDATE_CONSUMER_OFFSET: _PULL,
    R.GET_CONSUMER_LIST_BY_GROUP: _fields(consumerGroup=SUB),
    R.HEART_BEAT: _in_body(
        "SUB consumer groups, SUB subscribed topics",
        is_needed=True,
        group="consumerDataSet[].groupName",
        topic="consumerDataSet[].subscriptionDataSet[].topic",
    ),
    R.UNREGISTER_CLIENT: _fields(consumerGroup=SUB),
    R.CHECK_CLIENT_CONFIG: _in_body(
        "SUB group, SUB topic", group="group", topic="subscriptionData.topic"
    ),
    R.LOCK_BATCH_MQ: _LOCK,
    R.UNLOCK_BATCH_MQ: _LOCK,
    R.QUERY_ASSIGNMENT: _in_body("SUB group, SUB topic", group="consumerGroup", topic="topic"),
    R.POP_MESSAGE: _PULL,
    R.ACK_MESSAGE: _ACK,
    R.PEEK_MESSAGE: _PULL,
    R.CHANGE_MESSAGE_INVISIBLETIME: _ACK,
    R.NOTIFICATION: _PULL,
    R.POLLING_INFO: _PULL,
    R.POP_ROLLBACK: _PULL,
    R.BATCH_ACK_MESSAGE: Need(
        asks=lambda _fields, body: _popped(
            [(ack.group, ack.topic) for ack in decode_pop_acks(body)] if body else []
        ),
        text="SUB topics, SUB groups",
    ),
    # both, and who looks
    R.QUERY_MESSAGE: _fields(topic=SUB),
    R.VIEW_MESSAGE_BY_ID: _fields(topic=SUB),
    R.SEARCH_OFFSET_BY_TIMESTAMP: _TOPIC,
    R.GET_MAX_OFFSET: _TOPIC,
    R.GET_MIN_OFFSET: _TOPIC,
    R.GET_EARLIEST_MSG_STORETIME: _TOPIC,
    R.GET_TOPIC_STATS_INFO: _TOPIC,
    R.GET_TOPIC_CONFIG: _TOPIC,
    R.QUERY_TOPIC_CONSUME_BY_WHO: _TOPIC,
    R.QUERY_CONSUME_QUEUE: _fields(topic=SUB, consumerGroup=SUB),
    R.QUERY_CONSUME_TIME_SPAN: _fields(topic=SUB, group=SUB),
    R.QUERY_CORRECTION_OFFSET: _fields(compareGroup=SUB, topic=SUB),
    R.GET_CONSUMER_CONNECTION_LIST: _GROUP,
    R.GET_CONSUME_STATS: _fields(consumerGroup=SUB, topic=SUB),
    R.SLUICE_FILTERED_LAG: _fields(consumerGroup=SUB, topic=SUB),
    R.SLUICE_IN_FLIGHT: _fields(consumerGroup=SUB, topic=SUB),
    R.SLUICE_TRY_FILTER: _fields(topic=SUB, consumerGroup=SUB),
    R.QUERY_TOPICS_BY_CONSUMER: _GROUP,
    R.QUERY_SUBSCRIPTION_BY_CONSUMER: _fields(group=SUB, topic=SUB),
    R.GET_SUBSCRIPTIONGROUP_CONFIG: _GROUP,
    R.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: OPEN,
    # name server
    # TBW102 only says which brokers make topics by themselves: every producer may ask for it.
    R.GET_ROUTEINFO_BY_TOPIC: _fields(free=DEFAULT_TOPIC, topic=ANY),
    R.GET_KV_CONFIG: OPEN,
    R.GET_KVLIST_BY_NAMESPACE: OPEN,
    R.GET_BROKER_CLUSTER_INFO: OPEN,
    R.GET_SYSTEM_TOPIC_LIST_FROM_NS: OPEN,
    R.GET_BROKER_MEMBER_GROUP: OPEN,
    R.QUERY_DATA_VERSION: ADMIN,
}
"""All others that a server answers: see `need_of`."""


def need_of(code: int) -> Need:
    """What a code needs; what is not in the table needs admin."""
    return NEEDS.get(code, ADMIN)


FREE_TO_WRITE: Final = (TRACE_TOPIC, STAGING_TOPIC)
"""Topics that clients write to by themselves. What is staged is seen by nobody until a commit,
which needs PUB for the topics it goes to."""


class Verdict(NamedTuple):
    """`reason` is "" when allowed, else a sentence for the caller; `rule` is what decided, with the
    file and line, for `sluice acl check`. `account` is who asked, None for an address."""

    is_allowed: bool
    reason: str
    rule: str
    account: Account | None = None


class Request(NamedTuple):
    """What a verdict is about; `host` is the caller's address without port."""

    code: int
    fields: Mapping[str, str]
    body: bytes
    version: int
    host: str


def identify(rules: Rules, request: Request) -> Verdict:
    """Steps 1 to 4: who is it? Allowed without an account: by address, to do anything."""

    def is_signed(secret_key: str) -> bool:
        expected = sign(request.fields, request.body, secret_key, version=request.version)
        given = request.fields.get(SIGNATURE, "").encode("utf-8", "replace")
        return hmac.compare_digest(expected.encode(), given)

    return _identify(rules, request.host, request.fields.get(ACCESS_KEY), is_signed)


def identify_call(
    rules: Rules, authorization: str, date_time: str, host: str, *, now_ms: int, age_s_max: int
) -> Verdict:
    """Return the account of a gRPC call with these two headers, of which the second is all that is
    signed (spec/grpc.md §1).

    So whoever has read the headers of a call can send others with them. `age_s_max` bounds for how
    long: a date that is farther from `now_ms`, or is none, is refused; 0 is no bound.
    """
    scheme, _, rest = authorization.partition(" ")
    parts = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    access_key = parts.get("Credential", "").partition("/")[0] or None

    def is_signed(secret_key: str) -> bool:
        expected = hmac.new(secret_key.encode(), date_time.encode("utf-8", "replace"), "sha1")
        given = parts.get("Signature", "").lower().encode("utf-8", "replace")
        return scheme == CALL_SCHEME and hmac.compare_digest(expected.hexdigest().encode(), given)

    verdict = _identify(rules, host, access_key, is_signed)
    if verdict.account is None or not age_s_max:
        return verdict
    date_ms = call_date_ms(date_time)
    if date_ms is not None and abs(now_ms - date_ms) <= age_s_max * 1000:
        return verdict
    far = (
        "is not a date: write it as 20261128T094500Z"
        if date_ms is None
        else f"is {abs(now_ms - date_ms) / 1000:.3f} s from the proxy's clock, the limit is "
        f"{age_s_max} s (sluiceGrpcDateSeconds): set the clock of the client"
    )
    return Verdict(
        False,
        f"The date of the signature for accessKey={access_key} {far}. It is {date_time!r:.80}.",
        "sluiceGrpcDateSeconds",
    )


def tried(
    rules: Rules, access_key: str | None, host: str, judge: Callable[[Account], Verdict]
) -> Verdict:
    """Steps 1 to 3, then what `judge` says of the account, as if the signature were right; without
    a `host` no white list. Raises what `judge` raises."""
    if not host:
        known = {name: replace(one, white=None) for name, one in rules.accounts.items()}
        rules = Rules(known)
    verdict = _identify(rules, host, access_key or None, lambda _secret: True)
    return verdict if verdict.account is None else judge(verdict.account)


def _identify(
    rules: Rules, host: str, access_key: str | None, is_signed: Callable[[str], bool]
) -> Verdict:
    numbers = numbers_of(host)
    for pattern in rules.white:
        if pattern.matches(numbers):
            return Verdict(True, "", f"globalWhiteRemoteAddresses {pattern.text}")
    if access_key is None:
        return Verdict(False, "No accessKey is configured", "no AccessKey in the request")
    account = rules.accounts.get(access_key)
    if account is None:
        return Verdict(False, f"No acl config for {access_key}", "no such account")
    if account.white is not None and account.white.matches(numbers):
        rule = f"{account.origin} whiteRemoteAddress {account.white.text}"
        return Verdict(True, "", rule, None)
    if not is_signed(account.secret_key):
        return Verdict(
            False,
            f"Check signature failed for accessKey={access_key}",
            f"{account.origin} secretKey",
        )
    return Verdict(True, "", f"{account.origin} secretKey", account)


def authorize(account: Account, request: Request) -> Verdict:
    """Steps 5 to 8, for an account whose signature is right. Raises ProtocolError when the body,
    which names topics and groups, cannot be read."""
    code, need = request.code, need_of(request.code)
    if account.is_admin:
        return Verdict(True, "", f"{account.origin} admin: true", account)
    if need.is_admin:
        return Verdict(
            False,
            f"Need admin permission for request code={code}, but accessKey={account.access_key}"
            " is not",
            f"{account.origin} admin: false",
            account,
        )
    if need.asks is None:
        return Verdict(True, "", f"request code {code} needs an account alone", account)
    rule = ""
    for resource in need.asks(request.fields, request.body):
        verdict = decide(account, resource)
        if not verdict.is_allowed:
            return verdict
        rule = verdict.rule
    return Verdict(True, "", rule or f"request code {code} names no topic or group", account)


def decide(account: Account, resource: Resource) -> Verdict:
    """One topic or group."""
    name, need = resource
    if account.is_admin:
        return Verdict(True, "", f"{account.origin} admin: true", account)
    if name in FREE_TO_WRITE and need & Permission.PUB:
        return Verdict(True, "", f"every account may write to {name}", account)
    owned, is_explicit = account.permission(name)
    kind = "group" if name.startswith(GROUP_PREFIX) else "topic"
    shown = name.removeprefix(GROUP_PREFIX)
    default = f"default{kind.capitalize()}Perm"
    entry = f"{kind}Perms {shown}" if is_explicit else f"{default} for {shown}"
    rule = f"{account.origin} {entry}={WORD_OF[owned]}"
    if owned & need:
        return Verdict(True, "", rule, account)
    what = "permission" if is_explicit else "default permission"
    return Verdict(False, f"No {what} for {kind}:{shown}", rule, account)
