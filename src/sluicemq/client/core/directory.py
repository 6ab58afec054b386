"""Which broker and queue: what follows from a route.

`Routes` remembers the last route of each topic and when it was learnt; the shells ask the name
servers and hand the answers in. A route that the name server no longer knows is kept
(spec/namesrv.md §8), because a broker that restarts is away for a moment only.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from sluicemq.errors import RouteNotFoundError
from sluicemq.model.topic import (
    MASTER_ID,
    PERM_READ,
    PERM_WRITE,
    MessageQueue,
    TopicRoute,
)

ROUTE_PERIOD_S: Final = 30.0
NEW_TOPIC_QUEUES: Final = 4
"""Queues of a topic that the broker creates on our first send (defaultTopicQueueNums)."""


def write_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """The queues a producer may choose from: writable, and their broker's master is known."""
    masters = {data.broker for data in route.brokers if MASTER_ID in data.addresses}
    if route.order_topic_config:
        return _ordered_queues(topic, route.order_topic_config, masters)
    return [
        MessageQueue(topic, data.broker, queue_id)
        for data in sorted(route.queues, key=lambda data: data.broker)
        if data.perm & PERM_WRITE and data.broker in masters
        for queue_id in range(data.write_queues)
    ]


def _ordered_queues(topic: str, config: str, masters: Iterable[str]) -> list[MessageQueue]:
    """Strict order keeps the count even when a broker is down, so `masters` does not matter."""
    del masters
    pairs = [part.partition(":") for part in config.split(";") if part]
    return [
        MessageQueue(topic, broker, queue_id)
        for broker, _, count in pairs
        for queue_id in range(int(count))
    ]


def read_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """The queues a consumer group shares, sorted as all clients sort them."""
    return sorted(
        MessageQueue(topic, data.broker, queue_id)
        for data in route.queues
        if data.perm & PERM_READ
        for queue_id in range(data.read_queues)
    )


def broker_address(route: TopicRoute, broker: str, broker_id: int = MASTER_ID) -> str | None:
    """The address of a broker by id; for reading, any other one when that id is away."""
    for data in route.brokers:
        if data.broker == broker and data.addresses:
            return data.addresses.get(broker_id) or data.addresses[min(data.addresses)]
    return None


def master_address(route: TopicRoute, broker: str) -> str | None:
    """The address of the master alone: messages are written nowhere else."""
    return next(
        (data.addresses.get(MASTER_ID) for data in route.brokers if data.broker == broker), None
    )


def as_created(default: TopicRoute) -> TopicRoute:
    """The route that a topic will have once a broker made it from TBW102's: at most as many queues
    as our send requests ask for, as the Java client counts them."""
    return replace(
        default,
        queues=tuple(
            replace(
                data,
                read_queues=min(data.read_queues, NEW_TOPIC_QUEUES),
                write_queues=min(data.write_queues, NEW_TOPIC_QUEUES),
            )
            for data in default.queues
        ),
    )


class Routes:
    """The last known route of each topic. Times are monotonic seconds, passed in."""

    __slots__ = ("_learnt_s", "_routes", "_writers")

    def __init__(self) -> None:
        self._routes: dict[str, TopicRoute] = {}
        self._learnt_s: dict[str, float] = {}
        self._writers: dict[str, list[MessageQueue]] = {}

    def get(self, topic: str) -> TopicRoute | None:
        """The route as last learnt, however old."""
        return self._routes.get(topic)

    def is_fresh(self, topic: str, now_s: float) -> bool:
        """Whether the route was learnt (or looked for) less than 30 s ago."""
        return now_s - self._learnt_s.get(topic, -1e9) < ROUTE_PERIOD_S

    def put(self, topic: str, route: TopicRoute | None, now_s: float) -> bool:
        """Remembers a route; None (unknown there) keeps the old one. True when it changed."""
        self._learnt_s[topic] = now_s
        if route is None or route == self._routes.get(topic):
            return False
        self._routes[topic] = route
        self._writers[topic] = write_queues(topic, route)
        return True

    def forget(self, topic: str) -> None:
        """The next use asks again (after a topic or connection error)."""
        self._learnt_s.pop(topic, None)

    def drop(self, topic: str) -> None:
        """The topic was deleted."""
        for table in (self._routes, self._learnt_s, self._writers):
            table.pop(topic, None)

    def writers(self, topic: str) -> list[MessageQueue]:
        """Write queues of a known topic; [] when there is none."""
        return self._writers.get(topic, [])

    def topics(self) -> list[str]:
        """Every topic with a route."""
        return list(self._routes)

    def addresses(self, topics: Iterable[str]) -> set[str]:
        """All broker addresses, slaves too, that serve the topics."""
        return {
            address
            for topic in topics
            if (route := self._routes.get(topic))
            for data in route.brokers
            for address in data.addresses.values()
        }


def no_route(
    topic: str, servers: Iterable[str], brokers: Iterable[str] | None, *, auto_create_tried: bool
) -> RouteNotFoundError:
    """The error for a topic without a route: which of the usual causes are excluded, and the cure.

    RocketMQ has one text for five causes (design/product.md): name server not reachable, no broker
    registered with it (or the wrong name server), topic missing, automatic creation off, topic
    misspelt. This is raised only after a name server answered, so the first is excluded; `brokers`
    (None: could not be asked) tells about the second, TBW102's route about automatic creation.
    """
    found = None if brokers is None else sorted(brokers)
    answer = f"The name servers ({', '.join(servers)}) answer, so the network to them is fine"
    if found == []:
        return RouteNotFoundError(
            f"no broker serves the topic {topic!r}. {answer}, but no broker is registered there.",
            cure="Start a broker (sluice broker), or name the name servers that it registers with.",
        )
    there = f", and brokers are registered there ({', '.join(found)})" if found else ""
    create = (
        "they know no such topic and automatic creation is off (no broker offers TBW102)"
        if auto_create_tried
        else "they know no such topic, and consumers do not create topics"
    )
    return RouteNotFoundError(
        f"no broker serves the topic {topic!r}. {answer}{there}; {create}.",
        cure="Check the spelling (sluice topic list), then create it: "
        f"sluice topic create {topic}.",
    )


def no_writable_queue(topic: str) -> RouteNotFoundError:
    """The error for a topic that is known but cannot be written to."""
    return RouteNotFoundError(
        f"the topic {topic!r} exists, but none of its queues can be written to: read-only, or the "
        "master of its broker is away.",
        cure=f"See sluice topic show {topic} and sluice cluster list.",
    )
