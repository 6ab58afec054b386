"""The pages of topics: the list, one topic with queues, settings and groups, and changes."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from sluicemq.console import shown
from sluicemq.console.context import Answer, Context, Paged
from sluicemq.console.parts import Part, fetch_part, fetch_parts
from sluicemq.errors import ConfigurationError, RouteNotFoundError
from sluicemq.model.topic import MASTER_ID, MESSAGE_TYPE, MESSAGE_TYPES, TopicConfig, TopicRoute

HOUR_MS: Final = 3_600_000
KINDS = "normal", "retry", "dead", "system", "all"


def select_names(
    context: Context, names: list[str], kind_of: Callable[[str], str]
) -> tuple[Paged[str], dict[str, Any]]:
    """Return the page of names that the query selects, and what its template needs.

    The query's `kind` selects names by `kind_of`, and its `q` those that contain the text.
    """
    kind = context.query.get("kind", KINDS[0])
    wanted = context.query.get("q", "").strip()
    counts = dict.fromkeys(KINDS, 0)
    found = []
    for name in names:
        if wanted.lower() not in name.lower():
            continue
        kind_of_name = kind_of(name)
        counts[kind_of_name] += 1
        counts["all"] += 1
        if kind in (kind_of_name, "all"):
            found.append(name)
    return context.paginate(found), {"kind": kind, "q": wanted, "counts": counts}


async def show_all(context: Context) -> Answer:
    """Return a page of topics. Their types and queues are only in the live part."""
    names = await context.get_cached("topics", context.admin.topics)
    info = await context.get_cached("cluster", context.admin.cluster_info)
    own_names = {*info.brokers, *info.clusters}
    paged, values = select_names(context, names, partial(shown.topic_kind, own_names=own_names))
    details = {}
    if context.is_live:
        configs = await fetch_parts(
            {name: context.admin.topic_configs(name) for name in paged.rows}
        )
        details = {name: _summarize(one.value) for name, one in configs.items() if one.value}
    return Answer({"paged": paged, "details": details, "types": MESSAGE_TYPES, **values})


async def retention_ms(context: Context, route: TopicRoute) -> int:
    """Return the shortest retention of the topic's brokers (fileReservedTime), or 0 if unknown.

    A broker has one retention for all topics, because they share its commit log.
    """
    found = []
    for broker in route.brokers:
        address = broker.addresses.get(MASTER_ID)
        if address is not None:
            request = partial(context.admin.broker_settings, address)
            settings = await fetch_part(context.get_cached(f"settings {address}", request))
            hours = (settings.value or {}).get("fileReservedTime", "")
            found += [int(hours) * HOUR_MS] if hours.isdigit() else []
    return min(found, default=0)


def _summarize(configs: dict[str, TopicConfig]) -> dict[str, Any]:
    """Return the type, read queues, permission and number of brokers of a topic."""
    first = next(iter(configs.values()))
    return {
        "type": first.attributes.get(MESSAGE_TYPE, "NORMAL"),
        "queues": sum(one.read_queues for one in configs.values()),
        "perm": first.perm,
        "brokers": len(configs),
    }


async def show(context: Context) -> Answer:
    """Return the page of one topic. Raises RouteNotFoundError."""
    topic = context.path["topic"]
    admin = context.admin
    found: dict[str, Part[Any]] = await fetch_parts(
        {
            "offsets": admin.topic_offsets(topic),
            "configs": admin.topic_configs(topic),
            "groups": admin.groups_of_topic(topic),
            "route": admin.route(topic),
        }
    )
    if found["route"].value is None:
        await admin.route(topic)  # raises the error again, with its fix
        raise RouteNotFoundError(f"No broker serves {topic}.", fix="Choose one from the list.")
    offsets = found["offsets"].value or {}
    configs = found["configs"].value or {}
    info = await context.get_cached("cluster", admin.cluster_info)
    return Answer(
        {
            "topic": topic,
            "kind": shown.topic_kind(topic, {*info.brokers, *info.clusters}),
            "queues": [(queue, stats) for queue, stats in offsets.items()],
            "stored": sum(one.offset_max - one.offset_min for one in offsets.values()),
            "newest_ms": max((one.last_time_ms for one in offsets.values()), default=0),
            "configs": configs,
            "type": next((_summarize(configs)["type"] for _ in configs), None),
            "told": found,
            "groups": found["groups"].value or [],
            "retention_ms": await retention_ms(context, found["route"].value),
        }
    )


# ---- pages that change something


async def create(context: Context) -> Answer:
    """Create a topic. Raises ConfigurationError if it exists."""
    name = context.form.get("topic", "").strip()
    if name in await context.admin.topics():
        raise ConfigurationError(
            f"The topic {name!r} exists already.", fix="Change it on its page."
        )
    await context.admin.create_topic(
        name,
        queues=context.parse_number("queues", 8),
        perm=context.parse_number("perm", 6),
        type=context.form.get("type") or None,
    )
    return Answer(redirect=f"/topics/{quote(name, safe='')}?done=created")


async def change(context: Context) -> Answer:
    """Change the permission and the number of queues of a topic."""
    topic = context.path["topic"]
    configs = await context.admin.topic_configs(topic)
    known = next(iter(configs.values()), TopicConfig(topic))
    queues = context.parse_number("queues", known.read_queues)
    await context.admin.create_topic(
        topic,
        queues=queues,
        write_queues=queues,
        perm=context.parse_number("perm", known.perm),
        order=known.order or None,
    )
    return Answer(redirect=f"/topics/{quote(topic, safe='')}?done=changed")


async def delete(context: Context) -> Answer:
    """Delete a topic. The user must type its name to confirm.

    Raises ConfigurationError if the typed text differs.
    """
    topic = context.path["topic"]
    if context.form.get("typed", "").strip() != topic:
        raise ConfigurationError(
            f"The typed text is not {topic!r}.", fix="Type the name of the topic to delete it."
        )
    await context.admin.delete_topic(topic)
    return Answer(redirect="/topics?done=deleted")
