"""Topics: the list, and one with its queues, settings and groups."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from sluicemq.console import shown
from sluicemq.console.context import Answer, Context, Paged
from sluicemq.console.parts import Part, part, parts
from sluicemq.errors import ConfigurationError, RouteNotFoundError
from sluicemq.model.topic import MASTER_ID, MESSAGE_TYPE, MESSAGE_TYPES, TopicConfig, TopicRoute

HOUR_MS: Final = 3_600_000
KINDS = "normal", "retry", "dead", "system", "all"


def selected(
    context: Context, names: list[str], kind_of: Callable[[str], str]
) -> tuple[Paged[str], dict[str, Any]]:
    """Return the page of names that the query selects, and what its template needs.

    The query's `kind` selects names by `kind_of`, and its `q` those that contain the text.
    """
    kind, wanted = context.query.get("kind", KINDS[0]), context.query.get("q", "").strip()
    counts = dict.fromkeys(KINDS, 0)
    found = []
    for name in names:
        if wanted.lower() not in name.lower():
            continue
        own = kind_of(name)
        counts[own] += 1
        counts["all"] += 1
        if kind in (own, "all"):
            found.append(name)
    return context.paged(found), {"kind": kind, "q": wanted, "counts": counts}


async def show_all(context: Context) -> Answer:
    """A page of names; what each topic is comes with the live part."""
    names = await context.listed("topics", context.admin.topics)
    info = await context.listed("cluster", context.admin.cluster_info)
    own_names = {*info.brokers, *info.clusters}
    paged, values = selected(context, names, partial(shown.topic_kind, own_names=own_names))
    details = {}
    if context.is_live:
        told = await parts({name: context.admin.topic_configs(name) for name in paged.rows})
        details = {name: _in_short(one.value) for name, one in told.items() if one.value}
    return Answer({"paged": paged, "details": details, "types": MESSAGE_TYPES, **values})


async def retention_ms(context: Context, route: TopicRoute) -> int:
    """The least of its brokers (fileReservedTime); 0 when none tells. A broker deletes by age what
    its log holds of all topics."""
    found = []
    for broker in route.brokers:
        address = broker.addresses.get(MASTER_ID)
        if address is not None:
            ask = partial(context.admin.broker_settings, address)
            told = await part(context.listed(f"settings {address}", ask))
            hours = (told.value or {}).get("fileReservedTime", "")
            found += [int(hours) * HOUR_MS] if hours.isdigit() else []
    return min(found, default=0)


def _in_short(configs: dict[str, TopicConfig]) -> dict[str, Any]:
    first = next(iter(configs.values()))
    return {
        "type": first.attributes.get(MESSAGE_TYPE, "NORMAL"),
        "queues": sum(one.read_queues for one in configs.values()),
        "perm": first.perm,
        "brokers": len(configs),
    }


async def show(context: Context) -> Answer:
    """One topic. Raises RouteNotFoundError."""
    topic, admin = context.path["topic"], context.admin
    told: dict[str, Part[Any]] = await parts(
        {
            "offsets": admin.topic_offsets(topic),
            "configs": admin.topic_configs(topic),
            "groups": admin.groups_of_topic(topic),
            "route": admin.route(topic),
        }
    )
    if told["route"].value is None:
        await admin.route(topic)  # raises, with its cure
        raise RouteNotFoundError(f"no broker serves {topic}.", fix="See the list of topics.")
    offsets = told["offsets"].value or {}
    configs = told["configs"].value or {}
    info = await context.listed("cluster", admin.cluster_info)
    return Answer(
        {
            "topic": topic,
            "kind": shown.topic_kind(topic, {*info.brokers, *info.clusters}),
            "queues": [(queue, stats) for queue, stats in offsets.items()],
            "stored": sum(one.offset_max - one.offset_min for one in offsets.values()),
            "newest_ms": max((one.last_time_ms for one in offsets.values()), default=0),
            "configs": configs,
            "type": next((_in_short(configs)["type"] for _ in configs), None),
            "told": told,
            "groups": told["groups"].value or [],
            "retention_ms": await retention_ms(context, told["route"].value),
        }
    )


# --------------------------------------------------------------------------------- changes


async def create(context: Context) -> Answer:
    """A new topic. Raises ConfigurationError for one that is there."""
    name = context.form.get("topic", "").strip()
    if name in await context.admin.topics():
        raise ConfigurationError(
            f"there is a topic {name!r} already.", fix="Change it on its own page."
        )
    await context.admin.create_topic(
        name,
        queues=context.number("queues", 8),
        perm=context.number("perm", 6),
        type=context.form.get("type") or None,
    )
    return Answer(redirect=f"/topics/{quote(name, safe='')}?done=created")


async def change(context: Context) -> Answer:
    """Its permission and its queues."""
    topic = context.path["topic"]
    configs = await context.admin.topic_configs(topic)
    known = next(iter(configs.values()), TopicConfig(topic))
    queues = context.number("queues", known.read_queues)
    await context.admin.create_topic(
        topic,
        queues=queues,
        write_queues=queues,
        perm=context.number("perm", known.perm),
        order=known.order or None,
    )
    return Answer(redirect=f"/topics/{quote(topic, safe='')}?done=changed")


async def delete(context: Context) -> Answer:
    """Only for who has typed its name. Raises ConfigurationError."""
    topic = context.path["topic"]
    if context.form.get("typed", "").strip() != topic:
        raise ConfigurationError(
            f"what was typed is not {topic!r}.", fix="Type the name of the topic to delete it."
        )
    await context.admin.delete_topic(topic)
    return Answer(redirect="/topics?done=deleted")
