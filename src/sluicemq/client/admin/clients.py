"""Connections, progress and offsets, as single brokers of a route report them.

The brokers of a group are found as RocketMQ's tools find them: they have the retry topic of the
group, which a broker creates when the first member of the group connects.
"""

from collections.abc import Mapping
from typing import Any

from sluicemq.client.admin.definitions import current_route
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
    """Return broker name -> address of the brokers that have the retry topic of a group.

    If the group has no retry topic, return the brokers of `topic`. Raises TopicNotFoundError if
    neither topic has a route.
    """
    try:
        route = yield from current_route(directory, RETRY_PREFIX + group)
    except TopicNotFoundError:
        if topic is None:
            raise
        route = yield from current_route(directory, topic)
    return find_read_addresses(route)


def group_connections(
    directory: Directory, group: str, address: str | None = None
) -> Conversation[bodies.ConsumerConnections]:
    """Return the members of a group and its subscriptions, as one broker reports them.

    `address` is that of the broker; None means any broker of the group's route. Raises
    TopicNotFoundError if the group has no route, RequestError with the code 206 if the group has no
    members.
    """
    if address is None:
        address = next(iter((yield from group_route(directory, group)).values()))
    answer = yield from directory.call(address, requests.consumer_connections(group=group))
    return bodies.decode_consumer_connections(answer.body)


def producer_connections(
    directory: Directory, group: str, topic: str
) -> Conversation[list[bodies.Connection]]:
    """Return the producers of a group, as one broker of the topic reports them.

    Raises RequestError if there are none.
    """
    addresses = find_read_addresses((yield from current_route(directory, topic)))
    address = next(iter(addresses.values()))
    answer = yield from directory.call(address, requests.producer_connections(group=group))
    return bodies.decode_producer_connections(answer.body)


def consume_stats(
    directory: Directory, group: str, topic: str | None = None
) -> Conversation[bodies.ConsumeStats]:
    """Return the progress and the rate of a group, over all brokers of its route.

    Raises TopicNotFoundError if the group has no route.
    """
    brokers = yield from group_route(directory, group, topic)
    command = requests.consume_stats(group=group, topic=topic)
    progress_by_queue: dict[MessageQueue, bodies.QueueProgress] = {}
    rate = 0.0
    for _, _, answer in (yield from ask_each(brokers, command)):
        stats = bodies.decode_consume_stats(answer.body)
        progress_by_queue |= stats.queues
        rate += stats.consumes_per_second
    return bodies.ConsumeStats(dict(sorted(progress_by_queue.items())), rate)


def request_offset_reset(
    directory: Directory,
    group: str,
    topic: str,
    time_ms: int,
    place: tuple[str, int, int] | None = None,
) -> Conversation[dict[MessageQueue, int]]:
    """Ask brokers to reset a group to a time of a topic (222). Return queue -> new offset.

    With `place`, which is (address, queue id, offset), only that queue of one broker is reset.
    Otherwise every broker of the topic is asked. A broker that leaves the reset to its consumers
    does not report offsets while none of them is online. `group_offsets.reset_offsets` commits the
    offsets in this case. Raises RequestError.
    """
    if place is not None:
        address, queue_id, offset = place
        command = requests.reset_offsets(group, topic, time_ms, queue_id, offset)
        answer = yield from directory.call(address, command)
        return bodies.decode_queue_offsets(answer.body)
    brokers = find_read_addresses((yield from current_route(directory, topic)))
    command = requests.reset_offsets(group, topic, time_ms)
    absent = {int(ResponseCode.CONSUMER_NOT_ONLINE)}
    new_offsets: dict[MessageQueue, int] = {}
    for _, _, answer in (yield from ask_each(brokers, command, absent=absent)):
        new_offsets |= bodies.decode_queue_offsets(answer.body)
    return new_offsets


def consume_stats_at(
    directory: Directory, address: str, *, is_ordered: bool = False
) -> Conversation[list[tuple[str, MessageQueue, bodies.QueueProgress]]]:
    """Return (group, queue, progress) of every group at one broker.

    With `is_ordered`, return only groups that consume in order.
    """
    command = requests.consume_stats_of_broker(ordered=is_ordered)
    answer = yield from directory.call(address, command)
    progress_of_groups = []
    for stats_by_group in bodies.decode_consume_stats_list(answer.body):
        for group, stats_of_topics in stats_by_group.items():
            for stats in stats_of_topics:
                for queue, progress in sorted(stats.queues.items()):
                    progress_of_groups.append((group, queue, progress))
    return progress_of_groups


def producers(
    directory: Directory, address: str
) -> Conversation[Mapping[str, list[dict[str, Any]]]]:
    """Return group -> its producers at one broker, as the broker reports them.

    The fields of a producer are those of the response (328; spec/admin.md §4).
    """
    answer = yield from directory.call(address, requests.producers())
    producers_by_group: dict[str, list[dict[str, Any]]] = fastjson.loads(answer.body)["data"]
    return producers_by_group


def offset_by_time_at(
    directory: Directory, address: str, topic: str, queue_id: int, time_ms: int
) -> Conversation[int]:
    """Return the first offset of a queue whose message was stored at `time_ms` or later."""
    command = requests.offset_by_time(MessageQueue(topic, "", queue_id), time_ms)
    return int_field((yield from directory.call(address, command)), "offset")


def queue_units(
    directory: Directory,
    address: str,
    topic: str,
    queue_id: int,
    offset: int,
    count: int,
    group: str | None = None,
) -> Conversation[bodies.QueueUnits]:
    """Return `count` units of a broker's consume queue from an offset on.

    With `group`, each unit also says whether the group's filter matches it.
    """
    command = requests.queue_units(
        topic=topic, queue_id=queue_id, offset=offset, count=count, group=group
    )
    return bodies.decode_queue_units((yield from directory.call(address, command)).body)
