"""The pages of consumer groups: the list with lag, one group, and resetting its offsets."""

import asyncio
from typing import Any, Final
from urllib.parse import quote

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
from sluicemq.model.topic import CONTRACT, DLQ_PREFIX
from sluicemq.proxy import fetch_proxy_status
from sluicemq.wire.bodies import ConsumerConnections

CHART_S: Final = 3600.0
"""The time that the chart of a group covers."""
PLACES: Final = {"first": EARLIEST_MS, "last": LATEST_MS}


async def show_all(context: Context) -> Answer:
    """Return a page of groups with their settings. Lag and members are only in the live part."""
    known = await context.get_cached("groups", context.admin.groups)
    paged, values = select_names(context, list(known), shown.group_kind)
    details: dict[str, dict[str, Any]] = {}
    if context.is_live:
        lags = await fetch_parts({name: context.admin.lag(name) for name in paged.rows})
        online = await fetch_parts({name: context.admin.members(name) for name in paged.rows})
        for name in paged.rows:
            details[name] = summarize_lag(lags[name].value)
            details[name]["members"] = len(online[name].value or [])
            details[name]["reason"] = lags[name].reason or online[name].reason
    configs = {name: known[name] for name in paged.rows}
    return Answer({"paged": paged, "configs": configs, "details": details, **values})


async def show(context: Context) -> Answer:
    """Return the page of one group. Raises GroupNotFoundError."""
    group = context.path["group"]
    admin = context.admin
    known = await context.get_cached("groups", admin.groups)
    if group not in known:
        raise GroupNotFoundError(
            26, f"No broker knows the group {group!r}.", fix="Choose one from the list."
        )
    found: dict[str, Part[Any]] = await fetch_parts(
        {
            "consumers": admin.consumers(group),
            "lag": admin.lag(group),
            "matching": admin.matching(group),
            "contract": admin.contract(group),
            "explained": admin.explain_group(group),
        }
    )
    masters = (await context.get_cached("masters", admin.masters)).values()
    connected = await fetch_parts(
        {address: admin.group_connections(group, address) for address in masters}
    )
    by_grpc, silent = await fetch_proxy_clients(context, group)
    lags: list[QueueLag] | None = found["lag"].value
    contracts: list[GroupContract] = found["contract"].value or []
    # A user who may not read the lag does not see its history either.
    series = TimeSeries() if lags is None else context.history.watch(group, lags)
    since_s = context.history.now_s - CHART_S
    return Answer(
        {
            "group": group,
            "kind": shown.group_kind(group),
            "has_letters": DLQ_PREFIX + group in await context.get_cached("topics", admin.topics),
            "config": known[group],
            "contract": known[group].attributes.get(CONTRACT)
            or next((one.contract for one in contracts), None),
            "told": found,
            "by_grpc": by_grpc,
            "silent": silent,
            "proxies": context.proxies,
            "lags": lags or [],
            "total": summarize_lag(lags),
            "subscriptions": list_subscriptions(
                found["matching"].value or [],
                contracts,
                [one.value for one in connected.values() if one.value is not None],
            ),
            "refused": {
                client_id: reason for one in contracts for client_id, reason in one.refused.items()
            },
            "findings": found["explained"].value.findings if found["explained"].value else (),
            "chart": series.chart_data(LAG, MATCHING, since_s=since_s),
        }
    )


async def fetch_proxy_clients(
    context: Context, group: str
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the members of a group that are connected to a proxy, and the proxies that failed.

    The first mapping is by client id; each value has the address of the proxy as "proxy". The
    second maps the address of a proxy to the reason why it did not answer.
    """
    credentials = context.mq.cluster.credentials
    statuses = await fetch_parts(
        {
            address: asyncio.to_thread(fetch_proxy_status, address, credentials)
            for address in context.proxies
        }
    )
    found = {
        client["client_id"]: client | {"proxy": address}
        for address, one in statuses.items()
        for client in (one.value or {}).get("clients", ())
        if client["group"] == group
    }
    failed = {address: one.reason for address, one in statuses.items() if one.value is None}
    return found, failed


async def preview(context: Context) -> Answer:
    """Return the page with what a reset would change. Nothing is changed."""
    group = context.path["group"]
    topic = context.query.get("topic", "")
    progress = await context.admin.progress(group)
    changes = None
    if topic:
        changes = await context.admin.plan_reset(group, topic, _reset_time(context))
    return Answer(
        {
            "group": group,
            "topics": sorted({one.queue.topic for one in progress} | ({topic} if topic else set())),
            "topic": topic,
            "place": context.query.get("place", "time"),
            "time_ms": context.parse_time("time", context.clock.now_ms() - int(CHART_S) * 1000),
            "changes": changes,
        }
    )


async def reset(context: Context) -> Answer:
    """Reset the offsets of a group."""
    group = context.path["group"]
    topic = context.form.get("topic", "")
    await context.admin.reset_offsets(group, topic, _reset_time(context))
    return Answer(redirect=f"/groups/{quote(group, safe='')}?done=reset")


def _reset_time(context: Context) -> int:
    """Return the time to reset to: `EARLIEST_MS`, `LATEST_MS` or milliseconds since 1970.

    Raises ConfigurationError if there is neither a place nor a time.
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
    """Return the subscriptions of a group: one row for each topic, lane and expression.

    Rows from `matching` have the numbers of messages that matched, were filtered, and failed. Rows
    of subscriptions that only `contracts` or the members report have None instead.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for broker in matching:
        for one in broker.topics:
            lanes = [(lane.lane, lane.kind, lane.expression) for lane in one.lanes]
            for lane, kind, expression in lanes or [("", one.kind, one.expression or "")]:
                row = found.setdefault(
                    (one.topic, lane, expression),
                    {
                        "topic": one.topic,
                        "lane": lane,
                        "kind": kind,
                        "expression": expression,
                        "matched": 0,
                        "filtered": 0,
                        "errors": 0,
                    },
                )
                row["matched"] += one.matched
                row["filtered"] += one.filtered
                row["errors"] += sum(one.errors.values())
    # Pop subscriptions are in the contracts. A RocketMQ broker does not report how much matched,
    # but it has the subscription of the newest heartbeat.
    others = {(topic, *pop) for one in contracts for topic, pop in one.pops.items()}
    if not matching:
        others |= {
            (one.topic, one.kind or "TAG", one.expression)
            for connections in connected
            for one in connections.subscriptions.values()
        }
    for topic, kind, expression in sorted(others):
        found.setdefault(
            (topic, "", expression),
            {
                "topic": topic,
                "lane": "",
                "kind": kind,
                "expression": expression,
                "matched": None,
                "filtered": None,
                "errors": None,
            },
        )
    return [found[key] for key in sorted(found)]
