"""Access rules: accounts, what each of them may do, trying a request, and changes.

A broker reports its rules without the secrets (GET_BROKER_CLUSTER_ACL_CONFIG (54)). The code of
SluiceMQ's brokers evaluates them here, as if every signature were valid. A broker without access
rules, or a RocketMQ broker that has users instead, reports none, and the page shows the reason. A
change is sent to all masters, and to the slaves of RocketMQ. A slave of SluiceMQ takes the rules of
its master.
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
from sluicemq.console.parts import fetch_part, fetch_parts
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.model.topic import MASTER_ID
from sluicemq.wire import fastjson
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.headers import UpdateAccountRequest

KINDS: Final = "topics", "groups"
ALONE: Final = "PUB", "SUB"
"""The permissions that can be tried for one topic or group, as `sluice acl check` does."""
ANY: Final = "topic", "group"
"""Placeholder names, to find out whether a request names a topic or a group."""
_BATCH_ACKNOWLEDGE: Final = RequestCode.BATCH_ACK_MESSAGE
"""Not offered, because its topics are in receipt handles; ACK_MESSAGE needs the same permission."""
REQUESTS: Final = sorted(
    {code.name for code in RequestCode if code in REQUIREMENTS and code != _BATCH_ACKNOWLEDGE}
    | {"UPDATE_AND_CREATE_TOPIC", "DELETE_TOPIC_IN_BROKER", "INVOKE_BROKER_TO_RESET_OFFSET"}
)
"""The requests that can be tried; the added ones are examples of those for admins only."""


# ---- the rules


async def rules_at(context: Context, address: str) -> Rules:
    """Return the rules that a broker reports, without the secrets. Raises SluiceError."""
    reported = await context.admin.accounts(address)
    accounts = [parse_account(one) for one in reported.get("plainAccessConfigs") or ()]
    white = [parse_address_pattern(str(text)) for text in reported.get("globalWhiteAddrs") or ()]
    return Rules({one.access_key: one for one in accounts}, tuple(filter(None, white)))


def parse_account(reported: Mapping[str, Any]) -> Account:
    """Return an account as a broker reports it, with the names of plain_acl.yml."""
    key = str(reported["accessKey"])
    permissions: dict[str, Permission] = {}
    for field, prefix in (("groupPerms", GROUP_PREFIX), ("topicPerms", "")):
        for entry in reported.get(field) or ():
            name, _, word = str(entry).partition("=")
            permissions[prefix + name.strip()] = parse_permission(word)
    return Account(
        key,
        "",
        parse_address_pattern(reported.get("whiteRemoteAddress") or ""),
        bool(reported.get("admin")),
        parse_permission(reported.get("defaultTopicPerm") or "DENY"),
        parse_permission(reported.get("defaultGroupPerm") or "DENY"),
        permissions,
        f"{key}:",
    )


def parse_address_pattern(text: str) -> AddressPattern | None:
    """Return an entry of a white list as brokers read it, or None if `text` is empty.

    If SluiceMQ rejects the text, it is read as RocketMQ does. Raises ConfigurationError if that
    fails too.
    """
    try:
        return parse_pattern(text) if text.strip() else None
    except ConfigurationError:
        return parse_pattern_like_rocketmq(text)


async def load_rules(context: Context) -> tuple[dict[str, Any], Rules | None]:
    """Return the values that all these pages show, and the rules of one broker.

    It is the broker that the query names, or else the first that reports rules. The rules are None
    if no broker reports any.
    """
    masters = await context.get_cached("masters", context.admin.masters)
    reported = await fetch_parts(
        {name: rules_at(context, address) for name, address in masters.items()}
    )
    found = {name: one.value for name, one in reported.items() if one.value is not None}
    wanted = context.query.get("broker", "")
    broker = wanted if wanted in found else next(iter(found), "")
    values = {
        "brokers": list(found),
        "broker": broker,
        "reasons": {name: one.reason for name, one in reported.items() if one.value is None},
        "differ": any(one != found[broker] for one in found.values()),
    }
    return values, found.get(broker)


# ---- pages that show


async def show(context: Context) -> Answer:
    """Return the page with all accounts, the white list, and since when the rules are in force."""
    values, rules = await load_rules(context)
    status = await fetch_part(context.admin.access_status())
    wanted = context.query.get("q", "").strip().lower()
    accounts = [] if rules is None else list(rules.accounts.values())
    return Answer(
        {
            **values,
            "rules": rules,
            "words": PERMISSION_WORDS,
            "standing": status,
            "paged": context.paginate(
                [one for one in accounts if wanted in one.access_key.lower()]
            ),
            "entries": {one.access_key: format_permissions(one) for one in accounts},
        }
    )


def format_permissions(account: Account) -> dict[str, list[str]]:
    """Return the permissions of an account as lines of the file, for topics and for groups."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, permission in account.permissions.items():
        is_group = name.startswith(GROUP_PREFIX)
        line = f"{name.removeprefix(GROUP_PREFIX)}={PERMISSION_WORDS[permission]}"
        found[KINDS[is_group]].append(line)
    return found


async def account(context: Context) -> Answer:
    """Return the page with what one account may do with each topic or group, and by which rule.

    Raises ConfigurationError if the account does not exist.
    """
    values, rules = await load_rules(context)
    key = context.query.get("key", "")
    known = None if rules is None else rules.accounts.get(key)
    if rules is not None and known is None:
        raise ConfigurationError(
            f"No account has the access key {key!r}.", fix="Choose one from the list."
        )
    kind = context.query.get("kind", KINDS[0])
    kind = kind if kind in KINDS else KINDS[0]
    wanted = context.query.get("q", "").strip().lower()
    names = list(await context.get_cached(kind, getattr(context.admin, kind)))
    kind_of = shown.group_kind if kind == "groups" else shown.topic_kind
    names.sort(key=lambda name: (kind_of(name) != "normal", name))
    paged = context.paginate([name for name in names if wanted in name.lower()])
    rows = []
    for name in paged.rows if known else ():
        needs = (Permission.SUB,) if kind == "groups" else (Permission.PUB, Permission.SUB)
        resource = group_resource(name) if kind == "groups" else name
        assert known is not None
        verdicts = [
            (need.name, authorize_resource(known, Resource(resource, need))) for need in needs
        ]
        rows.append((name, verdicts, list(dict.fromkeys(one.rule for _, one in verdicts))))
    return Answer(
        {
            **values,
            "key": key,
            "account": known,
            "kind": kind,
            "kinds": KINDS,
            "q": wanted,
            "paged": paged,
            "rows": rows,
            "entries": format_permissions(known) if known else {},
            "words": PERMISSION_WORDS,
        }
    )


async def try_request(context: Context) -> Answer:
    """Return the page that tries a request: whether it is allowed, and by which rule."""
    values, rules = await load_rules(context)
    given = {
        name: context.query.get(name, "").strip() for name in ("key", "host", "topic", "group")
    }
    request = context.query.get("request", "")
    verdict = None
    error = None
    if rules is not None and request:
        try:
            verdict = evaluate_request(rules, request, given)
        except SluiceError as failure:
            error = failure
    return Answer(
        {
            **values,
            **given,
            "wanted": request,
            "requests": REQUESTS,
            "alone": ALONE,
            "verdict": verdict,
            "error": error,
            "keys": [] if rules is None else list(rules.accounts),
            "need": requirement_of(RequestCode[request]).text if request in REQUESTS else "",
        }
    )


def evaluate_request(rules: Rules, request: str, given: Mapping[str, str]) -> Verdict:
    """Return whether the rules allow a request, as if its signature were valid.

    `request` is the name of a request code, or a permission in `ALONE`. `given` has the texts of
    key, host, topic and group, "" for none. Raises ConfigurationError if the request is unknown, or
    names a topic or group that is not given.
    """
    if request not in (*REQUESTS, *ALONE):
        raise ConfigurationError(
            f"There is no request {request!r}.", fix="Choose one from the list."
        )
    host = given["host"]
    if host and not address_numbers(host):
        raise ConfigurationError(f"{host!r} is not an IP address.", fix="Write it as 10.10.103.5.")
    topic = given["topic"]
    name = given["group"]
    if request in ALONE:
        if bool(topic) == bool(name):
            raise ConfigurationError(
                "A permission is for one topic or one group.", fix="Enter one of them."
            )
        resource = Resource(topic or group_resource(name), Permission[request])
        return try_without_signature(
            rules, given["key"], host, lambda account: authorize_resource(account, resource)
        )
    code = RequestCode[request]
    resources_of = requirement_of(code).resources
    resources = resources_of(fields_of(*ANY), body_of(*ANY)) if resources_of is not None else ()
    needed = (ANY[0], topic, ANY[0]), (ANY[1], name, group_resource(ANY[1]))
    for what, value, placeholder in needed:
        if not value and placeholder in [one.name for one in resources]:
            raise ConfigurationError(f"{request} needs a {what}.", fix=f"Enter a {what}.")
    tried = Request(code, fields_of(topic, name), body_of(topic, name), 0, host)
    return try_without_signature(
        rules, given["key"], host, lambda account: authorize(account, tried)
    )


def fields_of(topic: str, name: str) -> dict[str, str]:
    """Return header fields with the topic and the group under all names that requests use."""
    topics = dict.fromkeys(("topic", "b", "topics"), topic)
    return topics | dict.fromkeys(("group", "consumerGroup", "compareGroup"), name)


def body_of(topic: str, name: str) -> bytes:
    """Return a body with the topic and the group in all places that requests use."""
    subscription = {"topic": topic}
    return fastjson.dumps_strict(
        {
            "group": name,
            "consumerGroup": name,
            "topic": topic,
            "subscriptionData": subscription,
            "mqSet": [subscription],
            "consumerDataSet": [{"groupName": name, "subscriptionDataSet": [subscription]}],
        }
    )


# ---- pages that change something


async def change_all_brokers(context: Context, change: Callable[[str], Awaitable[None]]) -> None:
    """Await `change(address)` for all masters, and for slaves of RocketMQ.

    Raises ConfigurationError that names the brokers where it failed, and the reasons.
    """
    addresses = [
        row["address"]
        for row in await context.admin.replicas()
        if row["address"] and (row["id"] == MASTER_ID or not row["said"])
    ]
    results = await fetch_parts({address: change(address) for address in addresses})
    failed = [f"{address}: {one.reason}" for address, one in results.items() if one.reason]
    if failed:
        done_count = len(results) - len(failed)
        raise ConfigurationError(
            f"The change was made at {done_count} of {len(results)} brokers. {' '.join(failed)}",
            fix="Remove the cause, then repeat the change; repeating it is safe.",
        )


async def save(context: Context) -> Answer:
    """Create an account, or change one. A secret or list that is left empty is not changed."""
    form = {name: text.strip() for name, text in context.form.items()}
    header = UpdateAccountRequest(
        access_key=form.get("access_key", ""),
        secret_key=form.get("secret_key") or None,
        white_address=form.get("white_address", ""),
        admin=form.get("admin") == "true",
        topic_default=form.get("topic_default") or None,
        group_default=form.get("group_default") or None,
        topic_permissions=join_lines(form.get("topic_permissions", "")) or None,
        group_permissions=join_lines(form.get("group_permissions", "")) or None,
    )
    await change_all_brokers(context, lambda at: context.admin.update_account(at, header))
    query = urlencode({"key": header.access_key, "done": "account_saved"})
    return Answer(redirect=f"/access/account?{query}")


def join_lines(lines: str) -> str:
    """Return the lines of a form joined by commas, as requests have them."""
    return ",".join(line.strip() for line in lines.replace(",", "\n").splitlines() if line.strip())


async def delete(context: Context) -> Answer:
    """Delete an account. The user must type its access key to confirm.

    Raises ConfigurationError if the typed text differs, or the console uses that access key.
    """
    key = context.form.get("access_key", "")
    if context.form.get("typed", "").strip() != key:
        raise ConfigurationError(
            f"The typed text is not {key!r}.", fix="Type the access key to delete the account."
        )
    own = Credentials.from_value(context.session.credentials) or context.mq.cluster.credentials
    if own is not None and own.access_key == key:
        raise ConfigurationError(
            f"This session signs its requests with {key!r}.",
            fix="Sign in with another access key to delete it.",
        )
    await change_all_brokers(context, lambda at: context.admin.delete_account(at, key))
    return Answer(redirect="/access?done=account_deleted")


async def set_white(context: Context) -> Answer:
    """Replace the white list: the addresses that need no account."""
    addresses = join_lines(context.form.get("addresses", ""))
    await change_all_brokers(context, lambda at: context.admin.set_white_addresses(at, addresses))
    return Answer(redirect="/access?done=white_saved")
