"""Verdicts on requests: what each request code requires, and whether an account satisfies it.

`REQUIREMENTS` has a row for each request code that a server answers:

    ANY_ACCOUNT       a known account and a valid signature are enough
    ADMIN_ONLY        the account must be an admin
    with `resources`  a function returns the topics and groups that the request uses, and the
                      permission that each of them requires

RocketMQ checks ten codes for topics and groups and eight for admin, and lets every other signed
request pass. Here every code has a requirement (spec/acl; the page on security lists the
differences): reading the data of a topic or group requires its permission, and changing or showing
the broker itself requires admin. VIEW_MESSAGE_BY_ID (33), CONSUMER_SEND_MSG_BACK (36) and the
END_TRANSACTION (37) of old clients may not name the topic; their handlers check it again once they
have read the message (`guard.Access`).

A request is checked in these steps, in RocketMQ's order (spec/acl):

    1  the address is in the global white list          allowed, to do everything
    2  no access key, or an unknown one                 refused
    3  the address is in the account's white list       allowed, without a signature
    4  the signature is wrong                           refused; compared in constant time
    5  a send to the trace or the staging topic         allowed: clients write there on their own
    6  the account is an admin                          allowed
    7  the request requires admin                       refused
    8  each topic and group: its entry, or the default of the account

The body is parsed only in step 8, so a request that is allowed before may have any body. `identify`
does steps 1 to 4, which find the account of a request; `authorize` does steps 5 to 8, which examine
what the account may do. Step 5 is decided for each topic of a request (`authorize_resource`), after
steps 6 and 7, with the same result: a send never requires admin, and an admin may send everywhere.
"""

import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sluicemq.acl.rules import (
    GROUP_PREFIX,
    PERMISSION_WORDS,
    Account,
    Permission,
    Rules,
    address_numbers,
)
from sluicemq.errors import ProtocolError
from sluicemq.model.system_names import STAGING_TOPIC, TRACE_TOPIC
from sluicemq.model.topic import DEFAULT_TOPIC, pop_origin
from sluicemq.wire import fastjson
from sluicemq.wire.codes import RequestCode as R
from sluicemq.wire.popping import decode_pop_acks
from sluicemq.wire.signature import ACCESS_KEY, CALL_SCHEME, SIGNATURE, parse_call_date, sign

PUB = Permission.PUB
SUB = Permission.SUB
ANY = Permission.ANY
Fields = Mapping[str, str]


class Resource(NamedTuple):
    """A topic, or the group g as `%RETRY%g`, and the permission that a request requires for it."""

    name: str
    permission: Permission


Resources = tuple[Resource, ...]
FindResources = Callable[[Fields, bytes], Resources]
BODY_NAMES_MAX: Final = 10_000


class Requirement(NamedTuple):
    """What a request code requires of the account: a row of `REQUIREMENTS`."""

    is_admin: bool = False
    resources: FindResources | None = None
    text: str = ""
    """The requirement in words, for the table of the page on security."""


ANY_ACCOUNT: Final = Requirement(text="an account")
ADMIN_ONLY: Final = Requirement(is_admin=True, text="admin")


_WORDS: Final = {PUB: "PUB", SUB: "SUB", ANY: "PUB or SUB"}


def group_resource(name: str) -> str:
    """Return the resource name of a group. The prefix is added to any name, as in RocketMQ."""
    return GROUP_PREFIX + name


def _header_requirement(*, free: str = "", **names: Permission) -> Requirement:
    """Make the requirement of a request whose header fields name topics and groups.

    `names` maps a field to the permission that is required for its value. A field called `group` or
    `…Group` holds a group, others a topic. An absent field requires nothing, because the handler
    refuses the request. `free` is a value that every account may use.
    """

    def find_resources(fields: Fields, body: bytes) -> Resources:
        resources = []
        for field_name, need in names.items():
            resource_name = fields.get(field_name)
            if not resource_name or resource_name == free:
                continue
            if "roup" in field_name:  # `group` or `…Group`
                resource_name = group_resource(resource_name)
            resources.append(Resource(resource_name, need))
        return tuple(resources)

    descriptions = [f"{_WORDS[need]} {field_name}" for field_name, need in names.items()]
    return Requirement(resources=find_resources, text=", ".join(descriptions))


def _send_requirement(name: str) -> Requirement:
    """Make the requirement of a send whose topic is in the header field `name`.

    A send requires PUB on the topic. A send to a retry topic requires SUB on the group instead,
    because consumers send there. A request without the field requires nothing, because the handler
    refuses it.
    """

    def find_resources(fields: Fields, body: bytes) -> Resources:
        topic = fields.get(name)
        if topic is None:
            return ()
        return (Resource(topic, SUB if topic.startswith(GROUP_PREFIX) else PUB),)

    return Requirement(resources=find_resources, text="PUB topic; of a retry topic SUB group")


def _body_requirement(text: str, *, is_needed: bool = False, **paths: str) -> Requirement:
    """Make the requirement of a request whose JSON body names groups and topics: SUB on each.

    `paths` maps `group` or `topic` to a path in the body. For example, `consumers[].groupName` is
    the field `groupName` of each object in the list `consumers`. An empty body requires nothing
    unless `is_needed`, because the handler refuses it. `text` describes the requirement.
    """

    def find_resources(fields: Fields, body: bytes) -> Resources:
        if not body and not is_needed:
            return ()
        document = fastjson.loads(body)
        resources: dict[Resource, None] = {}  # as keys, so that each one is there once
        for kind, path in paths.items():
            for name in _iter_values_at(document, path.split(".")):
                resource_name = group_resource(name) if kind == "group" else name
                resources[Resource(resource_name, SUB)] = None
        return tuple(resources)

    return Requirement(resources=find_resources, text=text)


def _iter_values_at(node: Any, path: list[str]) -> Iterator[str]:
    """Yield the values at a path of a decoded JSON body, as strings.

    `path` are keys, such as `["consumers[]", "groupName"]`: the field `groupName` of each item in
    the list `consumers`. An absent list counts as empty. `node` is the body, or the part of it at
    which the path begins.

    Raises ProtocolError if the body has another structure, or a list of more than `BODY_NAMES_MAX`
    items.
    """
    if not isinstance(node, dict):
        raise ProtocolError("The body has another value where an object is required.")
    key = path[0]
    remaining_path = path[1:]
    if not remaining_path:
        yield str(node.get(key))
        return
    if not key.endswith("[]"):
        yield from _iter_values_at(node.get(key), remaining_path)
        return

    list_key = key.removesuffix("[]")
    list_items = node.get(list_key, [])
    if not isinstance(list_items, list) or len(list_items) > BODY_NAMES_MAX:
        raise ProtocolError(
            f"The body must have a list of at most {BODY_NAMES_MAX} items at {list_key}."
        )
    for list_item in list_items:
        yield from _iter_values_at(list_item, remaining_path)


def _ack_resources(fields: Fields, body: bytes) -> Resources:
    """Return the resources of an acknowledgement.

    A redelivered message has its retry topic in the request. The permission to consume the original
    topic covers it.
    """
    name = fields.get("consumerGroup", "")
    topic = fields.get("topic", "")
    return _resources_of_pairs([(name, pop_origin(topic, name))])


def _resources_of_pairs(pairs: Iterable[tuple[str, str]]) -> Resources:
    """Return SUB on the group and on the topic of each pair (group, topic).

    Each name occurs once in the result. An empty group or topic is left out.
    """
    names = dict[str, None]()
    for group, topic in pairs:
        if topic:
            names[topic] = None
        if group:
            names[group_resource(group)] = None
    return tuple(Resource(name, SUB) for name in names)


_LOCK = _body_requirement("SUB group, SUB topics", group="consumerGroup", topic="mqSet[].topic")
_PULL = _header_requirement(topic=SUB, consumerGroup=SUB)
_ACK = Requirement(
    resources=_ack_resources, text="SUB topic, which is the origin of a retry topic, SUB group"
)
_TOPIC = _header_requirement(topic=ANY)
_GROUP = _header_requirement(group=SUB, consumerGroup=SUB)

REQUIREMENTS: Final[dict[int, Requirement]] = {
    # producers
    R.SEND_MESSAGE: _send_requirement("topic"),
    R.SEND_MESSAGE_V2: _send_requirement("b"),
    R.SEND_BATCH_MESSAGE: _send_requirement("b"),
    R.SEND_REPLY_MESSAGE: _send_requirement("topic"),
    R.SEND_REPLY_MESSAGE_V2: _send_requirement("b"),
    R.RECALL_MESSAGE: _header_requirement(topic=PUB),
    R.END_TRANSACTION: _header_requirement(topic=PUB),
    R.SLUICE_COMMIT_EPOCH: Requirement(  # `topics` that its rows go to, separated by commas
        resources=lambda fields, _body: tuple(
            Resource(name, PUB) for name in fields.get("topics", "").split(",") if name
        ),
        text="PUB topics",
    ),
    # consumers
    R.PULL_MESSAGE: _PULL,
    R.LITE_PULL_MESSAGE: _PULL,
    R.CONSUMER_SEND_MSG_BACK: _header_requirement(group=SUB),
    R.QUERY_CONSUMER_OFFSET: _PULL,
    R.UPDATE_CONSUMER_OFFSET: _PULL,
    R.GET_CONSUMER_LIST_BY_GROUP: _header_requirement(consumerGroup=SUB),
    R.HEART_BEAT: _body_requirement(
        "SUB consumer groups, SUB subscribed topics",
        is_needed=True,
        group="consumerDataSet[].groupName",
        topic="consumerDataSet[].subscriptionDataSet[].topic",
    ),
    R.UNREGISTER_CLIENT: _header_requirement(consumerGroup=SUB),
    R.CHECK_CLIENT_CONFIG: _body_requirement(
        "SUB group, SUB topic", group="group", topic="subscriptionData.topic"
    ),
    R.LOCK_BATCH_MQ: _LOCK,
    R.UNLOCK_BATCH_MQ: _LOCK,
    R.QUERY_ASSIGNMENT: _body_requirement(
        "SUB group, SUB topic", group="consumerGroup", topic="topic"
    ),
    R.POP_MESSAGE: _PULL,
    R.ACK_MESSAGE: _ACK,
    R.PEEK_MESSAGE: _PULL,
    R.CHANGE_MESSAGE_INVISIBLETIME: _ACK,
    R.NOTIFICATION: _PULL,
    R.POLLING_INFO: _PULL,
    R.POP_ROLLBACK: _PULL,
    R.BATCH_ACK_MESSAGE: Requirement(
        resources=lambda _fields, body: _resources_of_pairs(
            [(ack.group, ack.topic) for ack in decode_pop_acks(body)] if body else []
        ),
        text="SUB topics, SUB groups",
    ),
    # both, and tools
    R.QUERY_MESSAGE: _header_requirement(topic=SUB),
    R.VIEW_MESSAGE_BY_ID: _header_requirement(topic=SUB),
    R.SEARCH_OFFSET_BY_TIMESTAMP: _TOPIC,
    R.GET_MAX_OFFSET: _TOPIC,
    R.GET_MIN_OFFSET: _TOPIC,
    R.GET_EARLIEST_MSG_STORETIME: _TOPIC,
    R.GET_TOPIC_STATS_INFO: _TOPIC,
    R.GET_TOPIC_CONFIG: _TOPIC,
    R.QUERY_TOPIC_CONSUME_BY_WHO: _TOPIC,
    R.QUERY_CONSUME_QUEUE: _header_requirement(topic=SUB, consumerGroup=SUB),
    R.QUERY_CONSUME_TIME_SPAN: _header_requirement(topic=SUB, group=SUB),
    R.QUERY_CORRECTION_OFFSET: _header_requirement(compareGroup=SUB, topic=SUB),
    R.GET_CONSUMER_CONNECTION_LIST: _GROUP,
    R.GET_CONSUME_STATS: _header_requirement(consumerGroup=SUB, topic=SUB),
    R.SLUICE_FILTERED_LAG: _header_requirement(consumerGroup=SUB, topic=SUB),
    R.SLUICE_IN_FLIGHT: _header_requirement(consumerGroup=SUB, topic=SUB),
    R.SLUICE_TRY_FILTER: _header_requirement(topic=SUB, consumerGroup=SUB),
    R.QUERY_TOPICS_BY_CONSUMER: _GROUP,
    R.QUERY_SUBSCRIPTION_BY_CONSUMER: _header_requirement(group=SUB, topic=SUB),
    R.GET_SUBSCRIPTIONGROUP_CONFIG: _GROUP,
    R.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: ANY_ACCOUNT,
    # name server
    # The route of TBW102 only names the brokers that auto-create topics: all producers ask for it.
    R.GET_ROUTEINFO_BY_TOPIC: _header_requirement(free=DEFAULT_TOPIC, topic=ANY),
    R.GET_KV_CONFIG: ANY_ACCOUNT,
    R.GET_KVLIST_BY_NAMESPACE: ANY_ACCOUNT,
    R.GET_BROKER_CLUSTER_INFO: ANY_ACCOUNT,
    R.GET_SYSTEM_TOPIC_LIST_FROM_NS: ANY_ACCOUNT,
    R.GET_BROKER_MEMBER_GROUP: ANY_ACCOUNT,
    R.QUERY_DATA_VERSION: ADMIN_ONLY,
}
"""The requirement by request code; `requirement_of` has the default for other codes."""


def requirement_of(code: int) -> Requirement:
    """Return the requirement of a request code: that of the table, or else admin."""
    return REQUIREMENTS.get(code, ADMIN_ONLY)


WRITABLE_BY_ALL: Final = (TRACE_TOPIC, STAGING_TOPIC)
"""Topics that every account may write to, because clients do it on their own.

Staged messages are invisible until a commit, which requires PUB on the topics of destination.
"""


class Verdict(NamedTuple):
    """Whether a request is allowed, and why."""

    is_allowed: bool
    reason: str
    """Why it is refused, as a sentence for the client; "" if it is allowed."""
    rule: str
    """The rule that decided, with file and line, for `sluice acl check`."""
    account: Account | None = None
    """The account of the request; None if its address alone decided."""


class Request(NamedTuple):
    """The parts of a request that a verdict depends on.

    `host` is the client's address without port.
    """

    code: int
    fields: Mapping[str, str]
    body: bytes
    version: int
    host: str


def identify(rules: Rules, request: Request) -> Verdict:
    """Decide by address, access key and signature whether a request comes from a known account.

    The verdict of an accepted request names the account, or no account if the address alone allows
    the client everything. What the account may do is not decided here.
    """

    def is_signed(secret_key: str) -> bool:
        expected = sign(request.fields, request.body, secret_key, version=request.version)
        signature = request.fields.get(SIGNATURE, "").encode("utf-8", "replace")
        return hmac.compare_digest(expected.encode(), signature)

    return _identify(rules, request.host, request.fields.get(ACCESS_KEY), is_signed)


def identify_call(
    rules: Rules, authorization: str, date_time: str, host: str, *, now_ms: int, age_s_max: int
) -> Verdict:
    """Decide by address, access key and signature whether a gRPC call comes from a known account.

    `authorization` and `date_time` are headers of the call, and `host` is the client's address. The
    signature covers only the date (spec/grpc.md §1), so anyone who has read these headers can send
    other calls with them. `age_s_max` limits for how long: the call is refused if its date is
    invalid or differs from `now_ms` by more seconds. 0 means no limit.
    """
    scheme, parameters = _parse_authorization(authorization)
    access_key = parameters.get("Credential", "").partition("/")[0] or None

    signature = parameters.get("Signature", "")

    def is_signed(secret_key: str) -> bool:
        return scheme == CALL_SCHEME and _is_date_signed(date_time, signature, secret_key)

    verdict = _identify(rules, host, access_key, is_signed)
    # Without an account the address alone has decided, or the call is refused already.
    if verdict.account is None or not age_s_max:
        return verdict

    problem = _find_date_problem(date_time, now_ms, age_s_max)
    if not problem:
        return verdict
    return Verdict(
        False,
        f"The date of the signature for accessKey={access_key} {problem}. It is {date_time!r:.80}.",
        "sluiceGrpcDateSeconds",
    )


def _parse_authorization(authorization: str) -> tuple[str, dict[str, str]]:
    """Parse a header `authorization`: `SCHEME Credential=KEY/…, SignedHeaders=…, Signature=HEX`.

    Return (scheme, parameters by name).
    """
    scheme, _, parameter_list = authorization.partition(" ")
    parameters: dict[str, str] = {}
    for parameter in parameter_list.split(","):
        name, _, content = parameter.strip().partition("=")
        parameters[name] = content
    return scheme, parameters


def _is_date_signed(date_time: str, signature: str, secret_key: str) -> bool:
    """Return whether `signature` is the HMAC of the date with the secret key, in hexadecimal."""
    expected = hmac.new(secret_key.encode(), date_time.encode("utf-8", "replace"), "sha1")
    sent = signature.lower().encode("utf-8", "replace")
    return hmac.compare_digest(expected.hexdigest().encode(), sent)


def _find_date_problem(date_time: str, now_ms: int, age_s_max: int) -> str:
    """Return why the date of a signature is refused; "" if it is accepted.

    The reason is a predicate for the remark, such as "is not a date: …".
    """
    date_ms = parse_call_date(date_time)
    if date_ms is None:
        return "is not a date: write it as 20261128T094500Z"
    difference_ms = abs(now_ms - date_ms)
    if difference_ms <= age_s_max * 1000:
        return ""
    return (
        f"differs by {difference_ms / 1000:.3f} s from the proxy's clock, the limit "
        f"is {age_s_max} s (sluiceGrpcDateSeconds): correct the client's clock"
    )


def try_without_signature(
    rules: Rules, access_key: str | None, host: str, judge: Callable[[Account], Verdict]
) -> Verdict:
    """Decide about an account as if its signature were right, for `sluice acl check`.

    If its address and access key are accepted, return `judge(account)`, and raise what that raises.
    If `host` is "", the white lists are ignored.
    """
    if not host:
        accounts_without_white_lists = {
            name: replace(account, white_addresses=None) for name, account in rules.accounts.items()
        }
        rules = Rules(accounts_without_white_lists)
    verdict = _identify(rules, host, access_key or None, lambda _secret: True)
    return verdict if verdict.account is None else judge(verdict.account)


def _identify(
    rules: Rules, host: str, access_key: str | None, is_signed: Callable[[str], bool]
) -> Verdict:
    """Decide by address, access key and signature whether a request comes from a known account.

    `access_key` is None if the request has none. `is_signed(secret_key)` returns whether the
    request has the signature that this secret key makes. The verdict says whether the request is
    allowed, and names the account. The account is None if the address alone allows the request.
    """
    # 1: the address is in the global white list
    address = address_numbers(host)
    for pattern in rules.white_addresses:
        if pattern.matches(address):
            return Verdict(True, "", f"globalWhiteRemoteAddresses {pattern.text}")

    # 2: no access key, or an unknown one
    if access_key is None:
        return Verdict(False, "No accessKey is configured", "no AccessKey in the request")
    account = rules.accounts.get(access_key)
    if account is None:
        return Verdict(False, f"No acl config for {access_key}", "no such account")

    # 3: the address is in the account's white list
    if account.white_addresses is not None and account.white_addresses.matches(address):
        rule = f"{account.origin} whiteRemoteAddress {account.white_addresses.text}"
        return Verdict(True, "", rule, None)

    # 4: the signature
    if not is_signed(account.secret_key):
        return Verdict(
            False,
            f"Check signature failed for accessKey={access_key}",
            f"{account.origin} secretKey",
        )
    return Verdict(True, "", f"{account.origin} secretKey", account)


def authorize(account: Account, request: Request) -> Verdict:
    """Decide whether an account whose signature is right may make a request.

    - An admin may make every request.
    - Other accounts may not make a request whose code requires admin.
    - Otherwise the account needs the required permission for each topic and group that the request
      uses. The first one that it lacks decides.

    Raises ProtocolError if the body, which may name topics and groups, cannot be parsed.
    """
    code = request.code
    requirement = requirement_of(code)
    if account.is_admin:
        return Verdict(True, "", f"{account.origin} admin: true", account)
    if requirement.is_admin:
        return Verdict(
            False,
            f"Need admin permission for request code={code}, but accessKey={account.access_key}"
            " is not",
            f"{account.origin} admin: false",
            account,
        )
    if requirement.resources is None:
        return Verdict(True, "", f"request code {code} only needs an account", account)

    last_rule = ""
    for resource in requirement.resources(request.fields, request.body):
        verdict = authorize_resource(account, resource)
        if not verdict.is_allowed:
            return verdict
        last_rule = verdict.rule
    rule = last_rule or f"request code {code} names no topic or group"
    return Verdict(True, "", rule, account)


def authorize_resource(account: Account, resource: Resource) -> Verdict:
    """Decide whether an account has the permission that is required for one topic or group.

    An admin has every permission. Every account may send to the topics of WRITABLE_BY_ALL. For
    others, the account's entry for the topic or group decides, or its default if it has no entry.
    """
    name, need = resource
    if account.is_admin:
        return Verdict(True, "", f"{account.origin} admin: true", account)
    if name in WRITABLE_BY_ALL and need & Permission.PUB:
        return Verdict(True, "", f"every account may write to {name}", account)

    permission, is_explicit = account.permission(name)
    kind = "group" if name.startswith(GROUP_PREFIX) else "topic"
    shown_name = name.removeprefix(GROUP_PREFIX)
    if is_explicit:
        entry = f"{kind}Perms {shown_name}"
        lacking = "permission"
    else:
        entry = f"default{kind.capitalize()}Perm for {shown_name}"
        lacking = "default permission"
    rule = f"{account.origin} {entry}={PERMISSION_WORDS[permission]}"
    if permission & need:
        return Verdict(True, "", rule, account)
    return Verdict(False, f"No {lacking} for {kind}:{shown_name}", rule, account)
