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
    """Return (page of the selected names, values for the template).

    The query value `kind` selects the names for which `kind_of(name)` is that kind, and `q` those
    that contain a text, in any case.
    """
    shown_kind = context.query.get("kind", KINDS[0])
    search_text = context.query.get("q", "").strip()
    count_by_kind = dict.fromkeys(KINDS, 0)
    selected_names = []
    for name in names:
        if search_text.lower() not in name.lower():
            continue
        kind = kind_of(name)
        count_by_kind[kind] += 1
        count_by_kind["all"] += 1
        if shown_kind in (kind, "all"):
            selected_names.append(name)
    values = {"kind": shown_kind, "q": search_text, "counts": count_by_kind}
    return context.paginate(selected_names), values


async def show_all(context: Context) -> Answer:
    """Return a page of topics.

    Types and queues are added only to the live part of the page, which it loads by itself
    afterwards.
    """
    names = await context.get_cached("topics", context.admin.topics)
    topic_kind = partial(shown.topic_kind, own_names=await _fetch_server_names(context))
    paged, values = select_names(context, names, topic_kind)
    details = {}
    if context.is_live:
        config_parts = await fetch_parts(
            {name: context.admin.topic_configs(name) for name in paged.rows}
        )
        details = {
            name: _summarize(configs.value)
            for name, configs in config_parts.items()
            if configs.value
        }
    return Answer({"paged": paged, "details": details, "types": MESSAGE_TYPES, **values})


async def _fetch_server_names(context: Context) -> set[str]:
    """Return the names of brokers and clusters, which are also names of system topics."""
    cluster_info = await context.get_cached("cluster", context.admin.cluster_info)
    return {*cluster_info.brokers, *cluster_info.clusters}


async def fetch_retention_ms(context: Context, route: TopicRoute) -> int:
    """Return how long the topic's brokers keep messages, in ms: the shortest, 0 if unknown.

    A broker keeps messages of all topics equally long, fileReservedTime hours, because they share
    its commit log.
    """
    retentions_ms = []
    for broker in route.brokers:
        address = broker.addresses.get(MASTER_ID)
        if address is None:
            continue
        request = partial(context.admin.broker_settings, address)
        settings = await fetch_part(context.get_cached(f"settings {address}", request))
        hours = (settings.value or {}).get("fileReservedTime", "")
        if hours.isdigit():
            retentions_ms.append(int(hours) * HOUR_MS)
    return min(retentions_ms, default=0)


def _summarize(configs: dict[str, TopicConfig]) -> dict[str, Any]:
    """Return the type, read queues, permission and number of brokers of a topic.

    `configs` maps broker names to configurations; there is at least one.
    """
    first_config = next(iter(configs.values()))
    return {
        "type": first_config.attributes.get(MESSAGE_TYPE, "NORMAL"),
        "queues": sum(config.read_queues for config in configs.values()),
        "perm": first_config.perm,
        "brokers": len(configs),
    }


async def show(context: Context) -> Answer:
    """Return the page of one topic: its queues, configuration, groups and retention.

    What a broker refuses to report is left out. Raises RouteNotFoundError if the topic does not
    exist.
    """
    topic = context.path["topic"]
    admin = context.admin
    parts: dict[str, Part[Any]] = await fetch_parts(
        {
            "offsets": admin.topic_offsets(topic),
            "configs": admin.topic_configs(topic),
            "groups": admin.groups_of_topic(topic),
            "route": admin.route(topic),
        }
    )
    if parts["route"].value is None:
        await admin.route(topic)  # raises the error again, with its fix
        raise RouteNotFoundError(f"No broker serves {topic}.", fix="Choose one from the list.")

    stats_by_queue = parts["offsets"].value or {}
    configs = parts["configs"].value or {}
    all_stats = stats_by_queue.values()
    return Answer(
        {
            "topic": topic,
            "kind": shown.topic_kind(topic, await _fetch_server_names(context)),
            "queues": list(stats_by_queue.items()),
            "stored": sum(stats.offset_max - stats.offset_min for stats in all_stats),
            "newest_ms": max((stats.last_time_ms for stats in all_stats), default=0),
            "configs": configs,
            "type": _summarize(configs)["type"] if configs else None,
            "told": parts,
            "groups": parts["groups"].value or [],
            "retention_ms": await fetch_retention_ms(context, parts["route"].value),
        }
    )


# ---- pages that change something


async def create(context: Context) -> Answer:
    """Create a topic from the fields of the form, and redirect to its page.

    Raises ConfigurationError if it exists already, and the errors of `Admin.create_topic`.
    """
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
    """Change the permission and the number of queues of a topic, and redirect to its page.

    A field that is empty leaves the present value.
    """
    topic = context.path["topic"]
    configs = await context.admin.topic_configs(topic)
    current = next(iter(configs.values()), TopicConfig(topic))
    queues = context.parse_number("queues", current.read_queues)
    await context.admin.create_topic(
        topic,
        queues=queues,
        write_queues=queues,
        perm=context.parse_number("perm", current.perm),
        order=current.order or None,
    )
    return Answer(redirect=f"/topics/{quote(topic, safe='')}?done=changed")


async def delete(context: Context) -> Answer:
    """Delete a topic, and redirect to the list.

    The user must type its name. Raises ConfigurationError if the typed text differs.
    """
    topic = context.path["topic"]
    if context.form.get("typed", "").strip() != topic:
        raise ConfigurationError(
            f"The typed text is not {topic!r}.", fix="Type the name of the topic to delete it."
        )
    await context.admin.delete_topic(topic)
    return Answer(redirect="/topics?done=deleted")
