"""The pages of consumer groups: the list with lag, one group, and resetting its offsets."""

import asyncio
from typing import Any, Final
from urllib.parse import quote

from sluicemq.client.admin.diagnose.findings import GroupExplained
from sluicemq.client.admin.group_offsets import EARLIEST_MS, LATEST_MS
from sluicemq.client.admin.groups import (
    GroupContract,
    QueueLag,
    TopicMatching,
)
from sluicemq.console import shown
from sluicemq.console.context import Answer, Context
from sluicemq.console.history import LAG, MATCHING, TimeSeries, summarize_lag
from sluicemq.console.pages.topics import select_names
from sluicemq.console.parts import Part, fetch_parts
from sluicemq.errors import ConfigurationError, GroupNotFoundError
from sluicemq.model.topic import CONTRACT, DLQ_PREFIX, GroupConfig
from sluicemq.proxy import fetch_proxy_status
from sluicemq.wire.bodies import ConsumerConnections, GroupMatching

CHART_S: Final = 3600.0
"""The time that the chart of a group covers."""
PLACES: Final = {"first": EARLIEST_MS, "last": LATEST_MS}


async def show_all(context: Context) -> Answer:
    """Return a page of groups with their settings.

    Lag and members are added only to the live part of the page, which it loads by itself
    afterwards.
    """
    config_by_group = await context.get_cached("groups", context.admin.groups)
    paged, values = select_names(context, list(config_by_group), shown.group_kind)
    # The page loads these afterwards, because each group needs two requests.
    details: dict[str, dict[str, Any]] = {}
    if context.is_live:
        lags = await fetch_parts({name: context.admin.lag(name) for name in paged.rows})
        members = await fetch_parts({name: context.admin.members(name) for name in paged.rows})
        for name in paged.rows:
            details[name] = summarize_lag(lags[name].value)
            details[name]["members"] = len(members[name].value or [])
            details[name]["reason"] = lags[name].reason or members[name].reason
    configs = {name: config_by_group[name] for name in paged.rows}
    return Answer({"paged": paged, "configs": configs, "details": details, **values})


async def show(context: Context) -> Answer:
    """Return the page of one group: members, lag, subscriptions and what is wrong.

    What a broker refuses to report is left out. Raises GroupNotFoundError if no broker knows the
    group.
    """
    group = context.path["group"]
    admin = context.admin
    config_by_group = await context.get_cached("groups", admin.groups)
    if group not in config_by_group:
        raise GroupNotFoundError(
            26, f"No broker knows the group {group!r}.", fix="Choose one from the list."
        )
    parts: dict[str, Part[Any]] = await fetch_parts(
        {
            "consumers": admin.consumers(group),
            "lag": admin.lag(group),
            "matching": admin.matching(group),
            "contract": admin.contract(group),
            "explained": admin.explain_group(group),
        }
    )
    connections = await _fetch_connections(context, group)
    by_grpc, silent = await fetch_proxy_clients(context, group)
    lags: list[QueueLag] | None = parts["lag"].value
    contracts: list[GroupContract] = parts["contract"].value or []
    explained: GroupExplained | None = parts["explained"].value
    # A user who may not read the lag does not see its history either.
    series = TimeSeries() if lags is None else context.history.watch(group, lags)
    since_s = context.history.now_s - CHART_S
    return Answer(
        {
            "group": group,
            "kind": shown.group_kind(group),
            "has_letters": DLQ_PREFIX + group in await context.get_cached("topics", admin.topics),
            "config": config_by_group[group],
            "contract": _find_contract(config_by_group[group], contracts),
            "told": parts,
            "by_grpc": by_grpc,
            "silent": silent,
            "proxies": context.proxies,
            "lags": lags or [],
            "total": summarize_lag(lags),
            "subscriptions": list_subscriptions(
                parts["matching"].value or [], contracts, connections
            ),
            "refused": _list_refused(contracts),
            "findings": explained.findings if explained else (),
            "chart": series.chart_data(LAG, MATCHING, since_s=since_s),
        }
    )


async def _fetch_connections(context: Context, group: str) -> list[ConsumerConnections]:
    """Return the connected members of a group, as each master reports them.

    Masters that fail are left out.
    """
    masters = await context.get_cached("masters", context.admin.masters)
    connection_parts = await fetch_parts(
        {address: context.admin.group_connections(group, address) for address in masters.values()}
    )
    return [part.value for part in connection_parts.values() if part.value is not None]


def _find_contract(config: GroupConfig, contracts: list[GroupContract]) -> str | None:
    """Return the contract of a group: the one in its settings, else of the first broker, else None.

    The contract says what happens if members have different filters. `contracts` are what the
    brokers report.
    """
    configured_contract = config.attributes.get(CONTRACT)
    if configured_contract:
        return configured_contract
    return contracts[0].contract if contracts else None


def _list_refused(contracts: list[GroupContract]) -> dict[str, str]:
    """Return client id -> reason why a broker refuses this member of a group."""
    reason_by_client: dict[str, str] = {}
    for contract in contracts:
        reason_by_client |= contract.refused
    return reason_by_client


async def fetch_proxy_clients(
    context: Context, group: str
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the members of a group that are connected to proxies, and the proxies that failed.

    The first result is client id -> what the proxy reports, with the proxy's address as "proxy".
    The second is proxy address -> reason.
    """
    credentials = context.mq.cluster.credentials
    statuses = await fetch_parts(
        {
            address: asyncio.to_thread(fetch_proxy_status, address, credentials)
            for address in context.proxies
        }
    )
    clients_by_id = {}
    failures = {}
    for address, part in statuses.items():
        if part.value is None:
            failures[address] = part.reason
            continue
        for client in part.value.get("clients", ()):
            if client["group"] == group:
                clients_by_id[client["client_id"]] = client | {"proxy": address}
    return clients_by_id, failures


async def preview(context: Context) -> Answer:
    """Return the page that shows what a reset of the group would change, without changing it.

    The query has the topic and the time. Without a topic, the page lets the user choose one.
    """
    group = context.path["group"]
    topic = context.query.get("topic", "")
    progress = await context.admin.progress(group)
    topics = {queue_progress.queue.topic for queue_progress in progress}
    changes = None
    if topic:
        topics.add(topic)
        changes = await context.admin.plan_reset(group, topic, _parse_reset_time(context))
    return Answer(
        {
            "group": group,
            "topics": sorted(topics),
            "topic": topic,
            "place": context.query.get("place", "time"),
            "time_ms": context.parse_time("time", context.clock.now_ms() - int(CHART_S) * 1000),
            "changes": changes,
        }
    )


async def reset(context: Context) -> Answer:
    """Reset the offsets of a group in a topic, and redirect to the page of the group.

    Raises the errors of `Admin.reset_offsets`, and ConfigurationError without a time.
    """
    group = context.path["group"]
    topic = context.form.get("topic", "")
    await context.admin.reset_offsets(group, topic, _parse_reset_time(context))
    return Answer(redirect=f"/groups/{quote(group, safe='')}?done=reset")


def _parse_reset_time(context: Context) -> int:
    """Return the time to which the user wants to reset, in milliseconds since 1970.

    It is EARLIEST_MS or LATEST_MS for "first" or "last". Raises ConfigurationError if the user has
    chosen neither of them and entered no time.
    """
    place = context.form.get("place") or context.query.get("place") or "time"
    if place in PLACES:
        return PLACES[place]
    time_ms = context.parse_time("time", LATEST_MS)
    if time_ms == LATEST_MS:
        raise ConfigurationError("The time is missing.", fix="Enter one, or choose first or last.")
    return time_ms


def list_subscriptions(
    matching: list[TopicMatching],
    contracts: list[GroupContract],
    connected: list[ConsumerConnections],
) -> list[dict[str, Any]]:
    """Return the subscriptions of a group, one row for each topic, lane and filter expression.

    A lane is a subgroup of members with the same filter. Rows from `matching` have the numbers of
    messages that matched, were filtered out, and failed. Subscriptions that only `contracts` or
    `connected` contain have None instead.
    """
    # The key of a row is (topic, lane, expression).
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for broker_matching in matching:
        for counts in broker_matching.topics:
            _add_counts(rows, counts)

    # Pop subscriptions are in the contracts. A RocketMQ broker does not report how much matched,
    # but it has the subscription of the newest heartbeat.
    uncounted: set[tuple[str, str, str]] = set()  # topic, kind, expression
    for contract in contracts:
        uncounted |= {(topic, *pop) for topic, pop in contract.pops.items()}
    if not matching:
        uncounted |= _list_heartbeat_subscriptions(connected)
    for topic, kind, expression in sorted(uncounted):
        row = {"topic": topic, "lane": "", "kind": kind, "expression": expression}
        rows.setdefault(
            (topic, "", expression), row | {"matched": None, "filtered": None, "errors": None}
        )
    return [rows[key] for key in sorted(rows)]


def _list_heartbeat_subscriptions(
    connected: list[ConsumerConnections],
) -> set[tuple[str, str, str]]:
    """Return the set of (topic, kind, expression) that members sent to brokers in heartbeats."""
    subscriptions = set()
    for connections in connected:
        for subscription in connections.subscriptions.values():
            kind = subscription.kind or "TAG"
            subscriptions.add((subscription.topic, kind, subscription.expression))
    return subscriptions


def _add_counts(rows: dict[tuple[str, str, str], dict[str, Any]], counts: GroupMatching) -> None:
    """Add the counts of one broker for one topic to the rows, which are changed in place.

    The key of a row is (topic, lane, expression). The topic has a row for each lane, or a single
    one without lanes. Missing rows are added.
    """
    lanes = [(lane.lane, lane.kind, lane.expression) for lane in counts.lanes]
    if not lanes:
        lanes = [("", counts.kind, counts.expression or "")]
    for lane, kind, expression in lanes:
        row = rows.setdefault(
            (counts.topic, lane, expression),
            {
                "topic": counts.topic,
                "lane": lane,
                "kind": kind,
                "expression": expression,
                "matched": 0,
                "filtered": 0,
                "errors": 0,
            },
        )
        row["matched"] += counts.matched
        row["filtered"] += counts.filtered
        row["errors"] += sum(counts.errors.values())
