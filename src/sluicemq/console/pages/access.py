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

TOPICS: Final = "topics"
GROUPS: Final = "groups"
KINDS: Final = (TOPICS, GROUPS)
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


async def fetch_rules(context: Context, address: str) -> Rules:
    """Return the access rules that the broker at `address` reports, without secrets.

    Raises SluiceError if it refuses the request or does not respond.
    """
    reported = await context.admin.accounts(address)
    accounts = map(parse_account, reported.get("plainAccessConfigs") or ())
    accounts_by_key = {account.access_key: account for account in accounts}
    white_list = [
        parse_address_pattern(str(pattern)) for pattern in reported.get("globalWhiteAddrs") or ()
    ]
    return Rules(accounts_by_key, tuple(filter(None, white_list)))


def parse_account(reported: Mapping[str, Any]) -> Account:
    """Return the account that a broker reports as a dictionary with the names of plain_acl.yml.

    The secret is "", because brokers do not report it.
    """
    key = str(reported["accessKey"])
    permissions: dict[str, Permission] = {}
    for field, prefix in (("groupPerms", GROUP_PREFIX), ("topicPerms", "")):
        for line in reported.get(field) or ():  # such as "orders=PUB|SUB"
            name, _, permission = str(line).partition("=")
            permissions[prefix + name.strip()] = parse_permission(permission)
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


def parse_address_pattern(pattern: str) -> AddressPattern | None:
    """Return the pattern of IP addresses in an entry of a white list, None if it is blank.

    A pattern that SluiceMQ rejects is read as RocketMQ reads it. Raises ConfigurationError if that
    fails too.
    """
    if not pattern.strip():
        return None
    try:
        return parse_pattern(pattern)
    except ConfigurationError:
        return parse_pattern_like_rocketmq(pattern)


async def load_rules(context: Context) -> tuple[dict[str, Any], Rules | None]:
    """Fetch the access rules of all brokers.

    Returns (values for the templates, rules of one broker). That is the broker in the query, or the
    first one that reports rules. The rules are None if no broker reports any.
    """
    masters = await context.get_cached("masters", context.admin.masters)
    rules_parts = await fetch_parts(
        {name: fetch_rules(context, address) for name, address in masters.items()}
    )
    rules_by_broker: dict[str, Rules] = {}
    reasons: dict[str, str] = {}  # why a broker has not reported its rules
    for name, fetched in rules_parts.items():
        if fetched.value is not None:
            rules_by_broker[name] = fetched.value
        else:
            reasons[name] = fetched.reason

    broker = context.query.get("broker", "")
    if broker not in rules_by_broker:
        broker = next(iter(rules_by_broker), "")
    rules = rules_by_broker.get(broker)
    values = {
        "brokers": list(rules_by_broker),
        "broker": broker,
        "reasons": reasons,
        "differ": any(other_rules != rules for other_rules in rules_by_broker.values()),
    }
    return values, rules


# ---- pages that show


async def show(context: Context) -> Answer:
    """Return the page with all accounts and the white list of a broker.

    It also shows since when the rules are in force. The query value `q` selects access keys that
    contain it.
    """
    values, rules = await load_rules(context)
    status = await fetch_part(context.admin.access_status())
    search_text = context.query.get("q", "").strip().lower()
    accounts = [] if rules is None else list(rules.accounts.values())
    matching_accounts = [
        account for account in accounts if search_text in account.access_key.lower()
    ]
    return Answer(
        {
            **values,
            "rules": rules,
            "words": PERMISSION_WORDS,
            "standing": status,
            "paged": context.paginate(matching_accounts),
            "entries": {account.access_key: format_permissions(account) for account in accounts},
        }
    )


def format_permissions(account: Account) -> dict[str, list[str]]:
    """Return the permissions of an account as lines such as "orders=PUB|SUB".

    The keys of the result are `TOPICS` and `GROUPS`.
    """
    topic_lines = []
    group_lines = []
    for name, permission in account.permissions.items():
        line = f"{name.removeprefix(GROUP_PREFIX)}={PERMISSION_WORDS[permission]}"
        if name.startswith(GROUP_PREFIX):
            group_lines.append(line)
        else:
            topic_lines.append(line)
    return {TOPICS: topic_lines, GROUPS: group_lines}


async def account(context: Context) -> Answer:
    """Return the page of one account: what it may do with each topic or group.

    Each verdict has the rule that decides it. The query values are `key` (access key), `kind`
    (topics or groups) and `q` (text in the name). Raises ConfigurationError if the account does not
    exist.
    """
    values, rules = await load_rules(context)
    key = context.query.get("key", "")
    shown_account = None if rules is None else rules.accounts.get(key)
    if rules is not None and shown_account is None:
        raise ConfigurationError(
            f"No account has the access key {key!r}.", fix="Choose one from the list."
        )

    kind = context.query.get("kind", TOPICS)
    if kind not in KINDS:
        kind = TOPICS
    search_text = context.query.get("q", "").strip().lower()
    names = await _list_names(context, kind)
    paged = context.paginate([name for name in names if search_text in name.lower()])
    rows = []
    entries = {}
    if shown_account is not None:
        rows = [_make_permission_row(shown_account, kind, name) for name in paged.rows]
        entries = format_permissions(shown_account)
    return Answer(
        {
            **values,
            "key": key,
            "account": shown_account,
            "kind": kind,
            "kinds": KINDS,
            "q": search_text,
            "paged": paged,
            "rows": rows,
            "entries": entries,
            "words": PERMISSION_WORDS,
        }
    )


async def _list_names(context: Context, kind: str) -> list[str]:
    """Return the names of all topics or groups, first those of applications, then system ones."""
    if kind == GROUPS:
        names = list(await context.get_cached(GROUPS, context.admin.groups))
        kind_of = shown.group_kind
    else:
        names = list(await context.get_cached(TOPICS, context.admin.topics))
        kind_of = shown.topic_kind
    return sorted(names, key=lambda name: (kind_of(name) != "normal", name))


def _make_permission_row(
    account: Account, kind: str, name: str
) -> tuple[str, list[tuple[str | None, Verdict]], list[str]]:
    """Return what an account may do with the topic or group `name`.

    Returns (name, [(permission, verdict), …], rules). The rules are those that decide the verdicts,
    without repetitions.
    """
    if kind == GROUPS:
        resource_name = group_resource(name)
        permissions = [Permission.SUB]
    else:
        resource_name = name
        permissions = [Permission.PUB, Permission.SUB]
    verdicts = []
    for permission in permissions:
        verdict = authorize_resource(account, Resource(resource_name, permission))
        verdicts.append((permission.name, verdict))
    rules = list(dict.fromkeys(verdict.rule for _, verdict in verdicts))
    return name, verdicts, rules


async def try_request(context: Context) -> Answer:
    """Return the page that tries a request: whether the rules allow it, and which rule decides.

    The query has the request, the access key, the address of the client, topic and group. An error
    in them is shown on the page.
    """
    values, rules = await load_rules(context)
    fields = {
        name: context.query.get(name, "").strip() for name in ("key", "host", "topic", "group")
    }
    request = context.query.get("request", "")
    verdict = None
    error = None
    if rules is not None and request:
        try:
            verdict = evaluate_request(rules, request, fields)
        except SluiceError as failure:
            error = failure
    needed_permission = ""
    if request in REQUESTS:
        needed_permission = requirement_of(RequestCode[request]).text
    return Answer(
        {
            **values,
            **fields,
            "wanted": request,
            "requests": REQUESTS,
            "alone": ALONE,
            "verdict": verdict,
            "error": error,
            "keys": [] if rules is None else list(rules.accounts),
            "need": needed_permission,
        }
    )


def evaluate_request(rules: Rules, request: str, fields: Mapping[str, str]) -> Verdict:
    """Return whether the rules allow a request, as if its signature were valid.

    `request` is the name of a request code, or one of the permissions in `ALONE`. `fields` has the
    texts `key`, `host`, `topic` and `group`, "" for none. Raises ConfigurationError if the request
    is unknown, or if it needs a topic or group that is missing.
    """
    if request not in (*REQUESTS, *ALONE):
        raise ConfigurationError(
            f"There is no request {request!r}.", fix="Choose one from the list."
        )
    key = fields["key"]
    host = fields["host"]
    if host and not address_numbers(host):
        raise ConfigurationError(f"{host!r} is not an IP address.", fix="Write it as 10.10.103.5.")

    topic = fields["topic"]
    group = fields["group"]
    if request in ALONE:
        if bool(topic) == bool(group):
            raise ConfigurationError(
                "A permission is for one topic or one group.", fix="Enter one of them."
            )
        resource = Resource(topic or group_resource(group), Permission[request])
        return try_without_signature(
            rules, key, host, lambda account: authorize_resource(account, resource)
        )

    _require_names(request, topic, group)
    code = RequestCode[request]
    tried = Request(code, make_fields(topic, group), make_body(topic, group), 0, host)
    return try_without_signature(rules, key, host, lambda account: authorize(account, tried))


def _require_names(request: str, topic: str, group: str) -> None:
    """Raise ConfigurationError if a request needs a topic or group that is "".

    To find out what it needs, a request with the placeholders `ANY` is examined.
    """
    list_resources = requirement_of(RequestCode[request]).resources
    if list_resources is None:
        return
    any_topic, any_group = ANY
    named = {resource.name for resource in list_resources(make_fields(*ANY), make_body(*ANY))}
    if not topic and any_topic in named:
        raise ConfigurationError(f"{request} needs a topic.", fix="Enter a topic.")
    if not group and group_resource(any_group) in named:
        raise ConfigurationError(f"{request} needs a group.", fix="Enter a group.")


def make_fields(topic: str, group: str) -> dict[str, str]:
    """Return header fields with the topic and the group under all names that requests use."""
    topics = dict.fromkeys(("topic", "b", "topics"), topic)
    return topics | dict.fromkeys(("group", "consumerGroup", "compareGroup"), group)


def make_body(topic: str, group: str) -> bytes:
    """Return a request body that has the topic and the group wherever any request has them."""
    subscription = {"topic": topic}
    return fastjson.dumps_strict(
        {
            "group": group,
            "consumerGroup": group,
            "topic": topic,
            "subscriptionData": subscription,
            "mqSet": [subscription],
            "consumerDataSet": [{"groupName": group, "subscriptionDataSet": [subscription]}],
        }
    )


# ---- pages that change something


async def change_all_brokers(context: Context, change: Callable[[str], Awaitable[None]]) -> None:
    """Await `change(address)` for each broker that must get a change of the access rules.

    These are all masters, and the slaves of RocketMQ. Raises ConfigurationError with the brokers
    where it failed, and the reasons.
    """
    addresses = []
    for replica in await context.admin.replicas():
        # Only SluiceMQ's replicas report about themselves.
        is_of_rocketmq = not replica["said"]
        if replica["address"] and (replica["id"] == MASTER_ID or is_of_rocketmq):
            addresses.append(replica["address"])
    outcomes = await fetch_parts({address: change(address) for address in addresses})
    failures = [
        f"{address}: {outcome.reason}" for address, outcome in outcomes.items() if outcome.reason
    ]
    if failures:
        done_count = len(outcomes) - len(failures)
        raise ConfigurationError(
            f"The change was made at {done_count} of {len(outcomes)} brokers. {' '.join(failures)}",
            fix="Remove the cause, then repeat the change; repeating it is safe.",
        )


async def save(context: Context) -> Answer:
    """Create or change an account at all brokers, and redirect to its page.

    A secret or list that is empty in the form is not changed. Raises ConfigurationError if a broker
    fails.
    """
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
    await change_all_brokers(context, lambda address: context.admin.update_account(address, header))
    query = urlencode({"key": header.access_key, "done": "account_saved"})
    return Answer(redirect=f"/access/account?{query}")


def join_lines(lines: str) -> str:
    """Return the entries in the lines of a form, joined by commas as requests have them."""
    # A line may contain several entries, which commas separate.
    entries = map(str.strip, lines.replace(",", "\n").splitlines())
    return ",".join(filter(None, entries))


async def delete(context: Context) -> Answer:
    """Delete an account at all brokers, and redirect to the list.

    The user must type its access key. Raises ConfigurationError if the typed text differs, if this
    session uses that access key, or if a broker fails.
    """
    key = context.form.get("access_key", "")
    if context.form.get("typed", "").strip() != key:
        raise ConfigurationError(
            f"The typed text is not {key!r}.", fix="Type the access key to delete the account."
        )
    own_credentials = Credentials.from_value(context.session.credentials)
    own_credentials = own_credentials or context.mq.cluster.credentials
    if own_credentials is not None and own_credentials.access_key == key:
        raise ConfigurationError(
            f"This session signs its requests with {key!r}.",
            fix="Sign in with another access key to delete it.",
        )
    await change_all_brokers(context, lambda address: context.admin.delete_account(address, key))
    return Answer(redirect="/access?done=account_deleted")


async def set_white(context: Context) -> Answer:
    """Replace the white list at all brokers: the IP addresses that need no account.

    Raises ConfigurationError if a broker fails.
    """
    addresses = join_lines(context.form.get("addresses", ""))
    await change_all_brokers(
        context, lambda broker: context.admin.set_white_addresses(broker, addresses)
    )
    return Answer(redirect="/access?done=white_saved")
