"""Access rules: the accounts of each broker without their secrets, what one of them may do and the
rule that says so, a request tried against them, and changes.

A broker tells its rules (code 54); here the broker's own code judges by them, with every signature
taken as right. A broker without access rules, or a RocketMQ that keeps users instead,
tells none: the page is grey, with its reason. A change goes to each broker, and to the slaves of
RocketMQ's; a slave of ours has its master's rules.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from sluicemq.acl.rules import (
    GROUP_PREFIX,
    PERMISSION_WORDS,
    Account,
    AddressPattern,
    Permission,
    Rules,
    address_numbers,
    parse_pattern,
    parse_pattern_like_rocketmq,
    parse_permission,
)
from sluicemq.acl.verdict import (
    REQUIREMENTS,
    Request,
    Resource,
    Verdict,
    authorize,
    authorize_resource,
    group_resource,
    requirement_of,
    try_without_signature,
)
from sluicemq.client.core.names import Credentials
from sluicemq.console import shown
from sluicemq.console.context import Answer, Context
from sluicemq.console.parts import part, parts
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.model.topic import MASTER_ID
from sluicemq.wire import fastjson
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.headers import UpdateAccountRequest

KINDS: Final = "topics", "groups"
ALONE: Final = "PUB", "SUB"
"""What is tried of a topic or group by itself, as `sluice acl check` does."""
ANY: Final = "topic", "group"
"""Stand for a topic and a group where only what a request names is wanted."""
_ACKNOWLEDGED: Final = RequestCode.BATCH_ACK_MESSAGE
"""It names its topics in handles; ACK_MESSAGE needs the same."""
REQUESTS: Final = sorted(
    {code.name for code in RequestCode if code in REQUIREMENTS and code != _ACKNOWLEDGED}
    | {"UPDATE_AND_CREATE_TOPIC", "DELETE_TOPIC_IN_BROKER", "INVOKE_BROKER_TO_RESET_OFFSET"}
)
"""The last ones stand for all that only an admin may ask."""


# ------------------------------------------------------------------------------- the rules


async def rules_at(context: Context, address: str) -> Rules:
    """What a broker tells, without the secrets. Raises SluiceError."""
    told = await context.admin.accounts(address)
    accounts = [account_of(one) for one in told.get("plainAccessConfigs") or ()]
    white = [pattern_of(str(text)) for text in told.get("globalWhiteAddrs") or ()]
    return Rules({one.access_key: one for one in accounts}, tuple(filter(None, white)))


def account_of(told: Mapping[str, Any]) -> Account:
    """One account of the answer: names as in plain_acl.yml."""
    key = str(told["accessKey"])
    permissions: dict[str, Permission] = {}
    for field, prefix in (("groupPerms", GROUP_PREFIX), ("topicPerms", "")):
        for entry in told.get(field) or ():
            name, _, word = str(entry).partition("=")
            permissions[prefix + name.strip()] = parse_permission(word)
    return Account(
        key,
        "",
        pattern_of(told.get("whiteRemoteAddress") or ""),
        bool(told.get("admin")),
        parse_permission(told.get("defaultTopicPerm") or "DENY"),
        parse_permission(told.get("defaultGroupPerm") or "DENY"),
        permissions,
        f"{key}:",
    )


def pattern_of(text: str) -> AddressPattern | None:
    """Of a white list, as ours or RocketMQ's brokers read it. Raises ConfigurationError."""
    try:
        return parse_pattern(text) if text.strip() else None
    except ConfigurationError:
        return parse_pattern_like_rocketmq(text)


async def asked(context: Context) -> tuple[dict[str, Any], Rules | None]:
    """What all these pages show, and the rules of the broker that the query names or of the first
    that has some. None: no broker tells rules."""
    masters = await context.listed("masters", context.admin.masters)
    told = await parts({name: rules_at(context, at) for name, at in masters.items()})
    found = {name: one.value for name, one in told.items() if one.value is not None}
    wanted = context.query.get("broker", "")
    broker = wanted if wanted in found else next(iter(found), "")
    values = {
        "brokers": list(found),
        "broker": broker,
        "reasons": {name: one.reason for name, one in told.items() if one.value is None},
        "differ": any(one != found[broker] for one in found.values()),
    }
    return values, found.get(broker)


# ------------------------------------------------------------------------------- what is shown


async def show(context: Context) -> Answer:
    """All accounts, who needs none, and since when the rules are in force."""
    values, rules = await asked(context)
    standing = await part(context.admin.access_status())
    wanted = context.query.get("q", "").strip().lower()
    accounts = [] if rules is None else list(rules.accounts.values())
    return Answer({
        **values,
        "rules": rules, "words": PERMISSION_WORDS,
        "standing": standing,
        "paged": context.paged([one for one in accounts if wanted in one.access_key.lower()]),
        "entries": {one.access_key: entries(one) for one in accounts},
    })  # fmt: skip


def entries(account: Account) -> dict[str, list[str]]:
    """Its permissions as lines of the file: of topics and of groups."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, permission in account.permissions.items():
        is_group = name.startswith(GROUP_PREFIX)
        line = f"{name.removeprefix(GROUP_PREFIX)}={PERMISSION_WORDS[permission]}"
        found[KINDS[is_group]].append(line)
    return found


async def account(context: Context) -> Answer:
    """What one account may do with each topic or group, and why. Raises ConfigurationError for one
    that is not there."""
    values, rules = await asked(context)
    key = context.query.get("key", "")
    known = None if rules is None else rules.accounts.get(key)
    if rules is not None and known is None:
        raise ConfigurationError(f"no account has the key {key!r}.", fix="See the list.")
    kind = context.query.get("kind", KINDS[0])
    kind = kind if kind in KINDS else KINDS[0]
    wanted = context.query.get("q", "").strip().lower()
    names = list(await context.listed(kind, getattr(context.admin, kind)))
    kind_of = shown.group_kind if kind == "groups" else shown.topic_kind
    names.sort(key=lambda name: (kind_of(name) != "normal", name))
    paged = context.paged([name for name in names if wanted in name.lower()])
    rows = []
    for name in paged.rows if known else ():
        needs = (Permission.SUB,) if kind == "groups" else (Permission.PUB, Permission.SUB)
        resource = group_resource(name) if kind == "groups" else name
        assert known is not None
        verdicts = [
            (need.name, authorize_resource(known, Resource(resource, need))) for need in needs
        ]
        rows.append((name, verdicts, list(dict.fromkeys(one.rule for _, one in verdicts))))
    return Answer({
        **values, "key": key, "account": known, "kind": kind, "kinds": KINDS, "q": wanted,
        "paged": paged, "rows": rows, "entries": entries(known) if known else {},
        "words": PERMISSION_WORDS,
    })  # fmt: skip


async def attempt(context: Context) -> Answer:
    """A request tried against the rules: allowed or not, and by which rule."""
    values, rules = await asked(context)
    given = {
        name: context.query.get(name, "").strip() for name in ("key", "host", "topic", "group")
    }
    request = context.query.get("request", "")
    verdict, error = None, None
    if rules is not None and request:
        try:
            verdict = tried_request(rules, request, given)
        except SluiceError as wrong:
            error = wrong
    return Answer({
        **values, **given, "wanted": request, "requests": REQUESTS, "alone": ALONE,
        "verdict": verdict, "error": error, "keys": [] if rules is None else list(rules.accounts),
        "need": requirement_of(RequestCode[request]).text if request in REQUESTS else "",
    })  # fmt: skip


def tried_request(rules: Rules, request: str, given: Mapping[str, str]) -> Verdict:
    """`given`: key, host, topic and group, "" for none. Raises ConfigurationError for a request
    that is not known, or one that names what is not given."""
    if request not in (*REQUESTS, *ALONE):
        raise ConfigurationError(f"{request!r} is no request.", fix="Choose one of the list.")
    host = given["host"]
    if host and not address_numbers(host):
        raise ConfigurationError(f"{host!r} is no IP address.", fix="Write it as 10.10.103.5.")
    topic, name = given["topic"], given["group"]
    if request in ALONE:
        if bool(topic) == bool(name):
            raise ConfigurationError("that is one topic or one group.", fix="Give either of them.")
        resource = Resource(topic or group_resource(name), Permission[request])
        return try_without_signature(
            rules, given["key"], host, lambda account: authorize_resource(account, resource)
        )
    code = RequestCode[request]
    asks = requirement_of(code).resources
    named = asks(fields_of(*ANY), body_of(*ANY)) if asks is not None else ()
    places = (ANY[0], topic, ANY[0]), (ANY[1], name, group_resource(ANY[1]))
    for what, value, probe in places:
        if not value and probe in [one.name for one in named]:
            raise ConfigurationError(f"{request} names a {what}.", fix=f"Give a {what}.")
    made = Request(code, fields_of(topic, name), body_of(topic, name), 0, host)
    return try_without_signature(
        rules, given["key"], host, lambda account: authorize(account, made)
    )


def fields_of(topic: str, name: str) -> dict[str, str]:
    """Under every name that a header has for a topic or a group."""
    topics = dict.fromkeys(("topic", "b", "topics"), topic)
    return topics | dict.fromkeys(("group", "consumerGroup", "compareGroup"), name)


def body_of(topic: str, name: str) -> bytes:
    """The same in a body, wherever one of them has it."""
    wish = {"topic": topic}
    return fastjson.dumps_strict({
        "group": name, "consumerGroup": name, "topic": topic, "subscriptionData": wish,
        "mqSet": [wish],
        "consumerDataSet": [{"groupName": name, "subscriptionDataSet": [wish]}],
    })  # fmt: skip


# ------------------------------------------------------------------------------- changes


async def everywhere(context: Context, change: Callable[[str], Awaitable[None]]) -> None:
    """A change at each broker. Raises ConfigurationError that names where it is not done."""
    addresses = [
        row["address"]
        for row in await context.admin.replicas()
        if row["address"] and (row["id"] == MASTER_ID or not row["said"])
    ]
    told = await parts({at: change(at) for at in addresses})
    failed = [f"{at}: {one.reason}" for at, one in told.items() if one.reason]
    if failed:
        done = len(told) - len(failed)
        raise ConfigurationError(
            f"it is done at {done} of {len(told)} brokers. {' '.join(failed)}",
            fix="Once the reason is gone, do it again: what is done is done again.",
        )


async def save(context: Context) -> Answer:
    """A new account, or what of one is changed: a secret or list that is not given stays."""
    form = {name: text.strip() for name, text in context.form.items()}
    header = UpdateAccountRequest(
        access_key=form.get("access_key", ""),
        secret_key=form.get("secret_key") or None,
        white_address=form.get("white_address", ""),
        admin=form.get("admin") == "true",
        topic_default=form.get("topic_default") or None,
        group_default=form.get("group_default") or None,
        topic_permissions=joined(form.get("topic_permissions", "")) or None,
        group_permissions=joined(form.get("group_permissions", "")) or None,
    )
    await everywhere(context, lambda at: context.admin.update_account(at, header))
    query = urlencode({"key": header.access_key, "done": "account_saved"})
    return Answer(redirect=f"/access/account?{query}")


def joined(lines: str) -> str:
    """Lines of a form as a request has them: with commas."""
    return ",".join(line.strip() for line in lines.replace(",", "\n").splitlines() if line.strip())


async def delete(context: Context) -> Answer:
    """Only for who has typed its key. Raises ConfigurationError."""
    key = context.form.get("access_key", "")
    if context.form.get("typed", "").strip() != key:
        raise ConfigurationError(f"what was typed is not {key!r}.", fix="Type the key.")
    mine = Credentials.from_value(context.session.credentials) or context.mq.cluster.credentials
    if mine is not None and mine.access_key == key:
        raise ConfigurationError(
            f"this console asks with {key!r}.", fix="Sign in with another key to delete it."
        )
    await everywhere(context, lambda at: context.admin.delete_account(at, key))
    return Answer(redirect="/access?done=account_deleted")


async def set_white(context: Context) -> Answer:
    """Who needs no account."""
    addresses = joined(context.form.get("addresses", ""))
    await everywhere(context, lambda at: context.admin.set_white_addresses(at, addresses))
    return Answer(redirect="/access?done=white_saved")
