"""What the driver asks of the cluster before reading: queues, bounds, offsets by time, SQL92.

Everything here runs where Spark plans; executors only ever see the `QueueRange`s and addresses that
come out. All answers come through `client.sync.Admin`, so it works on a Java cluster as well.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sluicemq.client.core import requests
from sluicemq.client.core.answers import SUCCESS
from sluicemq.client.core.directory import broker_address
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, RequestError, SluiceError
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue
from sluicemq.spark.filters import Pushed
from sluicemq.spark.offsets import Offsets, QueueRange, chosen_offsets
from sluicemq.spark.options import Options
from sluicemq.wire.bodies.clients import CONSUME_ACTIVELY, ConsumerData, Heartbeat

ADMIN_TIMEOUT_S = 5.0
PROBE_SELECTOR = "SluiceProbe IS NULL"

Bounds = dict[MessageQueue, tuple[int, int]]


class TimeIndex(Protocol):
    """Who finds the first offset of a queue that was stored at `time_ms` or later."""

    def offset_by_time(self, queue: MessageQueue, time_ms: int) -> int: ...


def open_admin(options: Options) -> Admin:
    """Connections for planning. Raises ConfigurationError when no name server is given."""
    return Admin(
        options.required("nameServers").split(";"),
        credentials=options.credentials,
        tls=options.tls or False,
        timeout_s=min(ADMIN_TIMEOUT_S, options["timeoutMs"] / 1000),
    )


def queue_bounds(admin: Admin, topics: Sequence[str]) -> Bounds:
    """Every readable queue of the topics with its first stored offset and the next to be written.

    Raises RouteNotFoundError for a topic that does not exist, NameServerUnreachableError, and
    ConfigurationError when there is no readable queue.
    """
    bounds = {queue: admin.offsets(queue) for topic in topics for queue in admin.queues(topic)}
    if not bounds:
        raise ConfigurationError(
            f"the topic {','.join(topics)!r} has no readable queue.", cure="See sluice topic show."
        )
    return bounds


def starting_offsets(admin: TimeIndex, options: Options, bounds: Bounds, default: str) -> Offsets:
    """Where to start: startingTimestamp, else startingOffsets, else `default` (a word)."""
    time_ms = options["startingTimestamp"]
    if time_ms is not None:
        return offsets_by_time(admin, bounds, time_ms)
    chosen = options["startingOffsets"] or default
    return _by_option(admin, options, chosen, bounds, "startingOffsets")


def ending_offsets(admin: TimeIndex, options: Options, bounds: Bounds) -> Offsets:
    """Where to end, exclusive: endingTimestamp, else endingOffsets."""
    time_ms = options["endingTimestamp"]
    if time_ms is not None:
        return offsets_by_time(admin, bounds, time_ms)
    if options["endingOffsets"] == "earliest":
        raise ConfigurationError(
            "the option 'endingOffsets' is 'earliest': nothing would be read.",
            cure="Use latest or JSON by broker and queue.",
        )
    return _by_option(admin, options, options["endingOffsets"], bounds, "endingOffsets")


def _by_option(
    admin: TimeIndex,
    options: Options,
    chosen: str | Mapping[str, Any],
    bounds: Bounds,
    option: str,
) -> Offsets:
    if chosen == "earliest":
        return {queue: lowest for queue, (lowest, _) in bounds.items()}
    if chosen == "latest":
        return {queue: highest for queue, (_, highest) in bounds.items()}
    assert not isinstance(chosen, str)
    fails = options["failOnDataLoss"]
    return chosen_offsets(chosen, bounds, option, admin.offset_by_time, fail_on_data_loss=fails)


def offsets_by_time(admin: TimeIndex, bounds: Bounds, time_ms: int) -> Offsets:
    """The first offset of each queue that was stored at `time_ms` or later, within the queue."""
    return {
        queue: lowest
        if lowest == highest
        else min(highest, max(lowest, admin.offset_by_time(queue, time_ms)))
        for queue, (lowest, highest) in bounds.items()
    }


def narrowed(admin: TimeIndex, start: Offsets, end: Offsets, pushed: Pushed) -> list[QueueRange]:
    """The ranges start to end without what the pushed predicates rule out.

    Time bounds keep a margin: of equal times a 4.x broker may find any, and beyond the end it
    answers the last message; so one looks for a millisecond earlier, and later, and one more.
    Spark compares every row's time itself.
    """
    ranges = []
    for queue in sorted(start):
        if not _is_wanted(queue, pushed):
            continue
        low, high = max(start[queue], pushed.offset_min), min(end[queue], pushed.offset_end)
        if low < high and pushed.time_min_ms is not None:
            low = max(low, min(high, admin.offset_by_time(queue, pushed.time_min_ms - 1)))
        if low < high and pushed.time_max_ms is not None:
            high = min(high, admin.offset_by_time(queue, pushed.time_max_ms + 2) + 1)
        if low < high:
            ranges.append(QueueRange(queue, low, high))
    return ranges


def _is_wanted(queue: MessageQueue, pushed: Pushed) -> bool:
    return (
        (pushed.topics is None or queue.topic in pushed.topics)
        and (pushed.brokers is None or queue.broker in pushed.brokers)
        and (pushed.queue_ids is None or queue.queue_id in pushed.queue_ids)
    )


def broker_addresses(admin: Admin, topics: Sequence[str]) -> dict[str, str]:
    """Broker name -> the address to read from."""
    return {
        data.broker: address
        for route in map(admin.route, topics)
        for data in route.brokers
        if (address := broker_address(route, data.broker)) is not None
    }


def announce_group(admin: Admin, group: str, topics: Sequence[str]) -> None:
    """Makes a group that never had a consumer one that mqadmin finds.

    mqadmin looks for a group's brokers by its retry topic, which a broker makes at the first
    heartbeat. So there is one, of a client that leaves at once: a member that stays would be given
    queues by consumers of the group. Nothing happens where the retry topic exists.
    """
    if admin.find_route(RETRY_PREFIX + group) is not None:
        return
    client_id = f"spark@{os.getpid()}"
    consumer = ConsumerData(group, CONSUME_ACTIVELY)
    for address in broker_addresses(admin, topics).values():
        admin.call(address, requests.heartbeat(Heartbeat(client_id, consumers=(consumer,))))
        admin.call(address, requests.unregister(client_id, consumer=group))


def check_selector(admin: Admin, topics: Sequence[str], group: str, expression: str) -> None:
    """Asks every broker of the topics whether it compiles and evaluates a selector.

    Raises RequestError with the broker's own words: 23 does not compile, 1 SQL92 is switched off.
    """
    now_ms = SYSTEM_CLOCK.now_ms()
    addresses = {
        address: topic for topic in topics for address in broker_addresses(admin, [topic]).values()
    }
    for address, topic in addresses.items():
        subscription = Subscription(topic, expression, SQL92, version=now_ms)
        request = requests.check_subscription(f"spark@{os.getpid()}", group, subscription)
        answer = admin.call(address, request)
        if answer.code != SUCCESS:
            raise RequestError(
                answer.code,
                answer.remark or "",
                address=address,
                cure=f"The selector {expression!r} cannot be evaluated there; a Java broker needs"
                " enablePropertyFilter=true.",
            )


def evaluates_selectors(admin: Admin, topics: Sequence[str], group: str) -> bool:
    """Whether all brokers of the topics evaluate SQL92: predicates may be pushed to them."""
    try:
        check_selector(admin, topics, group, PROBE_SELECTOR)
    except SluiceError:
        return False
    return True
