"""Who is connected, and how far groups are, by the word of the brokers of a route.

RocketMQ's tools ask where the retry topic of a group is: it is there once the group has connected.
"""

from collections.abc import Mapping
from typing import Any

from sluicemq.client.admin.definitions import known_route
from sluicemq.client.admin.topics import ask_each
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import Directory, find_read_addresses
from sluicemq.client.core.requests import int_field
from sluicemq.errors import TopicNotFoundError
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue
from sluicemq.wire import bodies, fastjson
from sluicemq.wire.codes import ResponseCode


def group_route(
    directory: Directory, group: str, topic: str | None = None
) -> Conversation[Mapping[str, str]]:
    """Broker name -> address, where a group has its retry topic, else where the topic is. Raises
    TopicNotFoundError."""
    try:
        route = yield from known_route(directory, RETRY_PREFIX + group)
    except TopicNotFoundError:
        if topic is None:
            raise
        route = yield from known_route(directory, topic)
    return find_read_addresses(route)


def group_connections(
    directory: Directory, group: str, address: str | None = None
) -> Conversation[bodies.ConsumerConnections]:
    """The members of a group and what they subscribe, as one broker sees them; None: a broker of
    the group's route. Raises TopicNotFoundError, RequestError with code 206 without members."""
    if address is None:
        address = next(iter((yield from group_route(directory, group)).values()))
    answer = yield from directory.call(address, requests.consumer_connections(group=group))
    return bodies.decode_consumer_connections(answer.body)


def producer_connections(
    directory: Directory, group: str, topic: str
) -> Conversation[list[bodies.Connection]]:
    """The producers of a group, as a broker of their topic sees them. Raises RequestError without
    any."""
    addresses = find_read_addresses((yield from known_route(directory, topic)))
    address = next(iter(addresses.values()))
    answer = yield from directory.call(address, requests.producer_connections(group=group))
    return bodies.decode_producer_connections(answer.body)


def consume_stats(
    directory: Directory, group: str, topic: str | None = None
) -> Conversation[bodies.ConsumeStats]:
    """How far a group is, over the brokers of its route, and how fast. Raises
    TopicNotFoundError."""
    brokers = yield from group_route(directory, group, topic)
    command = requests.consume_stats(group=group, topic=topic)
    queues: dict[MessageQueue, bodies.QueueProgress] = {}
    rate = 0.0
    for _, _, answer in (yield from ask_each(brokers, command)):
        found = bodies.decode_consume_stats(answer.body)
        queues |= found.queues
        rate += found.consumes_per_second
    return bodies.ConsumeStats(dict(sorted(queues.items())), rate)


def move_group(
    directory: Directory,
    group: str,
    topic: str,
    time_ms: int,
    place: tuple[str, int, int] | None = None,
) -> Conversation[dict[MessageQueue, int]]:
    """Asks each broker of a topic to send a group to a time, as it can by itself (222); `place`:
    one broker's address, a queue and an offset there. The new offsets; none of a broker that leaves
    it to its consumers, while none is online. Raises RequestError."""
    if place is not None:
        address, queue_id, offset = place
        command = requests.reset_offsets(group, topic, time_ms, queue_id, offset)
        answer = yield from directory.call(address, command)
        return bodies.decode_queue_offsets(answer.body)
    brokers = find_read_addresses((yield from known_route(directory, topic)))
    command = requests.reset_offsets(group, topic, time_ms)
    absent = {int(ResponseCode.CONSUMER_NOT_ONLINE)}
    found: dict[MessageQueue, int] = {}
    for _, _, answer in (yield from ask_each(brokers, command, absent=absent)):
        found |= bodies.decode_queue_offsets(answer.body)
    return found


def consume_stats_of(
    directory: Directory, address: str, *, is_ordered: bool = False
) -> Conversation[list[tuple[str, MessageQueue, bodies.QueueProgress]]]:
    """How far every group is at one broker: group, queue, progress; of all groups, or of those that
    read in order."""
    command = requests.consume_stats_of_broker(ordered=is_ordered)
    answer = yield from directory.call(address, command)
    return [
        (group, queue, stats.queues[queue])
        for groups in bodies.decode_consume_stats_list(answer.body)
        for group, found in groups.items()
        for stats in found
        for queue in sorted(stats.queues)
    ]


def producers(
    directory: Directory, address: str
) -> Conversation[Mapping[str, list[dict[str, Any]]]]:
    """Group -> its producers at one broker, as that says them (spec/admin.md §4, 328)."""
    answer = yield from directory.call(address, requests.producers())
    found: dict[str, list[dict[str, Any]]] = fastjson.loads(answer.body)["data"]
    return found


def offset_at(
    directory: Directory, address: str, topic: str, queue_id: int, time_ms: int
) -> Conversation[int]:
    """The first offset stored at `time_ms` or later in a queue of a broker."""
    command = requests.offset_by_time(MessageQueue(topic, "", queue_id), time_ms)
    return int_field((yield from directory.call(address, command)), "offset")


def queue_units(
    directory: Directory, address: str, topic: str, queue_id: int, offset: int, count: int,
    group: str | None = None,
) -> Conversation[bodies.QueueUnits]:  # fmt: skip
    """Entries of a queue of a broker, and whether a group's filter wants them."""
    command = requests.queue_units(
        topic=topic, queue_id=queue_id, offset=offset, count=count, group=group
    )
    return bodies.decode_queue_units((yield from directory.call(address, command)).body)
