"""Consumer groups: the list with lag, and one with members, subscriptions and what is before it."""

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
from sluicemq.console.history import LAG, MATCHING, Ring, lag_of
from sluicemq.console.pages.topics import selected
from sluicemq.console.parts import Part, parts
from sluicemq.errors import ConfigurationError, GroupNotFoundError
from sluicemq.model.topic import CONTRACT, DLQ_PREFIX
from sluicemq.proxy import fetch_proxy_status
from sluicemq.wire.bodies import ConsumerConnections

CHART_S: Final = 3600.0
PLACES: Final = {"first": EARLIEST_MS, "last": LATEST_MS}


async def show_all(context: Context) -> Answer:
    """A page of names with their settings; lag and members come with the live part."""
    known = await context.listed("groups", context.admin.groups)
    paged, values = selected(context, list(known), shown.group_kind)
    details: dict[str, dict[str, Any]] = {}
    if context.is_live:
        lags = await parts({name: context.admin.lag(name) for name in paged.rows})
        online = await parts({name: context.admin.members(name) for name in paged.rows})
        for name in paged.rows:
            details[name] = lag_of(lags[name].value)
            details[name]["members"] = len(online[name].value or [])
            details[name]["reason"] = lags[name].reason or online[name].reason
    configs = {name: known[name] for name in paged.rows}
    return Answer({"paged": paged, "configs": configs, "details": details, **values})


async def show(context: Context) -> Answer:
    """One group. Raises GroupNotFoundError."""
    group, admin = context.path["group"], context.admin
    known = await context.listed("groups", admin.groups)
    if group not in known:
        raise GroupNotFoundError(26, f"no broker knows the group {group!r}.", fix="See the list.")
    told: dict[str, Part[Any]] = await parts(
        {
            "consumers": admin.consumers(group),
            "lag": admin.lag(group),
            "matching": admin.matching(group),
            "contract": admin.contract(group),
            "explained": admin.explain_group(group),
        }
    )
    masters = (await context.listed("masters", admin.masters)).values()
    connected = await parts({at: admin.group_connections(group, at) for at in masters})
    by_grpc, silent = await clients_of_proxies(context, group)
    lags: list[QueueLag] | None = told["lag"].value
    contracts: list[GroupContract] = told["contract"].value or []
    # Who is refused the lag sees none of before either; a question that fails leaves a gap.
    ring = Ring() if lags is None else context.history.watch(group, lags)
    since_s = context.history.now_s - CHART_S
    return Answer(
        {
            "group": group,
            "kind": shown.group_kind(group),
            "has_letters": DLQ_PREFIX + group in await context.listed("topics", admin.topics),
            "config": known[group],
            "contract": known[group].attributes.get(CONTRACT)
            or next((one.contract for one in contracts), None),
            "told": told,
            "by_grpc": by_grpc,
            "silent": silent,
            "proxies": context.proxies,
            "lags": lags or [],
            "total": lag_of(lags),
            "subscriptions": subscriptions(
                told["matching"].value or [],
                contracts,
                [one.value for one in connected.values() if one.value is not None],
            ),
            "refused": {who: why for one in contracts for who, why in one.refused.items()},
            "findings": told["explained"].value.findings if told["explained"].value else (),
            "chart": ring.chart(LAG, MATCHING, since_s=since_s),
        }
    )


async def clients_of_proxies(
    context: Context, group: str
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Members of the group that came to a proxy, by client id, and why a proxy does not say."""
    credentials = context.mq.cluster.credentials
    told = await parts(
        {at: asyncio.to_thread(fetch_proxy_status, at, credentials) for at in context.proxies}
    )
    found = {
        client["client_id"]: client | {"proxy": at}
        for at, one in told.items()
        for client in (one.value or {}).get("clients", ())
        if client["group"] == group
    }
    return found, {at: one.reason for at, one in told.items() if one.value is None}


async def preview(context: Context) -> Answer:
    """What a reset would change: nothing is changed."""
    group, topic = context.path["group"], context.query.get("topic", "")
    reached = await context.admin.progress(group)
    changes = None
    if topic:
        changes = await context.admin.plan_reset(group, topic, _reset_time(context))
    return Answer(
        {
            "group": group,
            "topics": sorted({one.queue.topic for one in reached} | ({topic} if topic else set())),
            "topic": topic,
            "place": context.query.get("place", "time"),
            "time_ms": context.time("time", context.clock.now_ms() - int(CHART_S) * 1000),
            "changes": changes,
        }
    )


async def reset(context: Context) -> Answer:
    """Sends the group there."""
    group, topic = context.path["group"], context.form.get("topic", "")
    await context.admin.reset_offsets(group, topic, _reset_time(context))
    return Answer(redirect=f"/groups/{quote(group, safe='')}?done=reset")


def _reset_time(context: Context) -> int:
    """The oldest message, behind the last one, or a time. Raises ConfigurationError."""
    place = context.form.get("place") or context.query.get("place") or "time"
    if place in PLACES:
        return PLACES[place]
    time_ms = context.time("time", LATEST_MS)
    if time_ms == LATEST_MS:
        raise ConfigurationError("there is no time.", fix="Give one, or choose first or last.")
    return time_ms


def subscriptions(
    matching: list[TopicMatching],
    contracts: list[GroupContract],
    connected: list[ConsumerConnections],
) -> list[dict[str, Any]]:
    """What the group wants of each topic, a row a lane, with what the filter did."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for broker in matching:
        for one in broker.topics:
            wants = [(lane.lane, lane.kind, lane.expression) for lane in one.lanes]
            for lane, kind, expression in wants or [("", one.kind, one.expression or "")]:
                row = found.setdefault(
                    (one.topic, lane, expression),
                    {"topic": one.topic, "lane": lane, "kind": kind, "expression": expression,
                     "matched": 0, "filtered": 0, "errors": 0},
                )  # fmt: skip
                row["matched"] += one.matched
                row["filtered"] += one.filtered
                row["errors"] += sum(one.errors.values())
    # What RocketMQ's brokers tell: the last member's word; and what is popped.
    told = {(topic, *wish) for one in contracts for topic, wish in one.pops.items()}
    if not matching:
        told |= {
            (one.topic, one.kind or "TAG", one.expression)
            for connections in connected
            for one in connections.subscriptions.values()
        }
    for topic, kind, expression in sorted(told):
        found.setdefault(
            (topic, "", expression),
            {"topic": topic, "lane": "", "kind": kind, "expression": expression,
             "matched": None, "filtered": None, "errors": None},
        )  # fmt: skip
    return [found[key] for key in sorted(found)]
