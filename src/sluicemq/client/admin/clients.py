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
    """Ask one broker for the members of a consumer group and for the subscriptions of the group.

    `address` is the broker's address. None means the first broker that has the retry topic of the
    group.

    Raises TopicNotFoundError if no broker has the retry topic, RequestError with the code 206 if
    the group has no members.
    """
    if address is None:
        addresses = yield from group_route(directory, group)
        address = next(iter(addresses.values()))
    answer = yield from directory.call(address, requests.consumer_connections(group=group))
    return bodies.decode_consumer_connections(answer.body)


def producer_connections(
    directory: Directory, group: str, topic: str
) -> Conversation[list[bodies.Connection]]:
    """Return the connected producers of a producer group, as one broker of `topic` reports them.

    Raises RequestError if the broker knows no producer of the group.
    """
    route = yield from current_route(directory, topic)
    address = next(iter(find_read_addresses(route).values()))
    answer = yield from directory.call(address, requests.producer_connections(group=group))
    return bodies.decode_producer_connections(answer.body)


def consume_stats(
    directory: Directory, group: str, topic: str | None = None
) -> Conversation[bodies.ConsumeStats]:
    """Return the progress of a group in each queue, and how many messages it consumes per second.

    Every broker that has the retry topic of the group is asked, or every broker of `topic` if no
    broker has the retry topic. `topic` also limits the result to one topic; None means all topics.
    The rate is the sum over the brokers. The queues of the result are sorted.

    Raises TopicNotFoundError if neither topic exists.
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
    only_queue: tuple[str, int, int] | None = None,
) -> Conversation[dict[MessageQueue, int]]:
    """Ask brokers to move a group to the offsets of a point of time in a topic (request code 222).

    Returns queue -> new offset, for the brokers that report it. `time_ms` is in milliseconds since
    1970. `only_queue` is (broker address, queue id, new offset) and resets only that queue. None
    means all queues of every broker of the topic.

    A RocketMQ broker can leave the reset to the consumers of the group. It then reports no offsets
    while no consumer is online, and changes nothing. `group_offsets.reset_offsets` commits the
    offsets in this case too.

    Raises RequestError if a broker refuses.
    """
    if only_queue is not None:
        address, queue_id, offset = only_queue
        command = requests.reset_offsets(group, topic, time_ms, queue_id, offset)
        answer = yield from directory.call(address, command)
        return bodies.decode_queue_offsets(answer.body)
    route = yield from current_route(directory, topic)
    brokers = find_read_addresses(route)
    command = requests.reset_offsets(group, topic, time_ms)
    # While no consumer is online, a broker that leaves the reset to consumers answers this.
    ignored_codes = {int(ResponseCode.CONSUMER_NOT_ONLINE)}
    new_offsets: dict[MessageQueue, int] = {}
    for _, _, answer in (yield from ask_each(brokers, command, ignored_codes=ignored_codes)):
        new_offsets |= bodies.decode_queue_offsets(answer.body)
    return new_offsets


def consume_stats_at(
    directory: Directory, address: str, *, is_ordered: bool = False
) -> Conversation[list[tuple[str, MessageQueue, bodies.QueueProgress]]]:
    """Return (group, queue, progress) for each queue of each group that one broker knows.

    `address` is the broker's. `progress` has the offsets of the group in the queue. With
    `is_ordered`, only groups that consume in order are returned.
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
    """Return `count` entries of a broker's consume queue, beginning at `offset`.

    A consume queue is the index of a queue: each entry has the position, size and tag code of a
    message. With `group`, each entry also says whether the filter of the group matches the message.
    """
    command = requests.queue_units(
        topic=topic, queue_id=queue_id, offset=offset, count=count, group=group
    )
    answer = yield from directory.call(address, command)
    return bodies.decode_queue_units(answer.body)
