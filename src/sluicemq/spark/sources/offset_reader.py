"""What the driver asks of the cluster before reading: bounds, times, SQL92, keys, sizes, types.

Everything here runs where Spark plans; executors only ever see the `QueueRange`s and addresses that
come out. All answers come through `client.sync.Admin`, so it works on a Java cluster as well.

**Keys.** `keys = 'k1 k2'` is true of messages that bear the key `k1` among others, so the broker's
key index gives every candidate, and Spark compares again: the ranges shrink to the places of the
candidates. Only a SluiceMQ broker is asked: it answers after its index has caught up with the log,
and says so when it cannot. The index of a Java broker may have holes after a crash (its index files
newer than the last checkpoint are thrown away), and rows would be missing; there `keys` is a SQL92
condition. A key with as many messages as one answer can hold is read by its queues too.

**Sizes** (the option `maxBytesPerTrigger`). No request of RocketMQ tells the bytes of a range, so
the mean stored size is taken from samples of up to 32 messages: where the micro-batch would begin,
then in the middle and at the end of what that first guess allows, and again while the guess still
shrinks. Sizes that change slowly are met within some per cent; a queue whose messages alternate
between small and large by thousands is not. Each queue moves by one message at least.

**Types** (`prop:NAME:auto`, and `prop:*` for all properties). The newest messages of every queue
are read and every value of a property is tried as int, bigint, double and boolean, as Java reads
them; the narrowest type that all of them have is the column's, else string. Later messages may hold
others: such a text is null and counted, as ever (the option `badProperties`). A stream whose types
must not change between restarts names them.
"""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, Protocol

from sluicemq.client.core import requests
from sluicemq.client.core.answers import QUERY_NOT_FOUND, SUCCESS, PullStatus, pull_answer
from sluicemq.client.core.directory import broker_address
from sluicemq.client.core.operations.messages import COUNT_MAX, TIME_MAX_MS
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import READ_GROUP, BulkReader
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, FilterEvaluationError, RequestError, SluiceError
from sluicemq.filter.evaluate import double_of, integer_of, long_of
from sluicemq.model.subscription import ALL, SQL92, Subscription
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue
from sluicemq.record.codec import decode_records
from sluicemq.spark.filters import Pushed
from sluicemq.spark.options import Options
from sluicemq.spark.schema import AUTO, BASE, EVERY, SET_FOR_ALL, Column
from sluicemq.spark.sources.offsets import Bounds, Offsets, QueueRange, chosen_offsets, topics_of
from sluicemq.wire.bodies import CONSUME_ACTIVELY, ConsumerData, Heartbeat
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

ADMIN_TIMEOUT_S = 5.0
PROBE_SELECTOR = "SluiceProbe IS NULL"
KEYS_MAX: Final = 32
GAP_MAX: Final = 4_096
"""Candidates so near to one another are read in one range: a task costs more than the messages."""
SAMPLE_MESSAGES: Final = 32
SAMPLE_BYTES: Final = 256 * 1024
ROUNDS_MAX: Final = 4
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
"""What a look takes for a number: not 007 (a code), nor Java's 5d and 0x1p3."""
_NUMBERS: Final = (("int", integer_of), ("bigint", long_of), ("double", double_of))
logger = logging.getLogger(__name__)


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


def newest_ranges(bounds: Bounds, count: int) -> dict[MessageQueue, range]:
    """The offsets of about `count` messages: the newest of every queue that has any."""
    filled = {queue: bound for queue, bound in bounds.items() if bound[0] < bound[1]}
    each = -(-count // len(filled)) if filled else 0
    return {queue: range(max(low, high - each), high) for queue, (low, high) in filled.items()}


def starting_offsets(index: TimeIndex, options: Options, bounds: Bounds, default: str) -> Offsets:
    """Where to start: startingTimestamp, else startingOffsets, else `default` (a word)."""
    chosen = options["startingOffsets"] or default
    return _chosen(index, options, chosen, bounds, "startingOffsets", options["startingTimestamp"])


def ending_offsets(index: TimeIndex, options: Options, bounds: Bounds) -> Offsets:
    """Where to end, exclusive: endingTimestamp, else endingOffsets."""
    chosen, time_ms = options["endingOffsets"], options["endingTimestamp"]
    if time_ms is None and chosen == "earliest":
        raise ConfigurationError(
            "the option 'endingOffsets' is 'earliest': nothing would be read.",
            cure="Use latest or JSON by broker and queue.",
        )
    return _chosen(index, options, chosen, bounds, "endingOffsets", time_ms)


def _chosen(
    index: TimeIndex,
    options: Options,
    chosen: str | Mapping[str, Any],
    bounds: Bounds,
    option: str,
    time_ms: int | None,
) -> Offsets:
    if time_ms is not None:
        return {
            queue: low if low == high else min(high, max(low, index.offset_by_time(queue, time_ms)))
            for queue, (low, high) in bounds.items()
        }
    if isinstance(chosen, str):
        return {queue: bound[chosen == "latest"] for queue, bound in bounds.items()}
    fails = options["failOnDataLoss"]
    return chosen_offsets(chosen, bounds, option, index.offset_by_time, fail_on_data_loss=fails)


def narrowed(index: TimeIndex, start: Offsets, end: Offsets, pushed: Pushed) -> list[QueueRange]:
    """The ranges start to end without what the pushed predicates rule out.

    Time bounds keep a margin: of equal times a 4.x broker may find any, and beyond the end it
    answers the last message; so one looks for a millisecond earlier, and later, and one more.
    Spark compares every row's time itself.
    """
    ranges = []
    allowed = (pushed.topics, pushed.brokers, pushed.queue_ids)
    for queue in sorted(start):
        parts = zip(queue, allowed, strict=True)
        if any(values is not None and part not in values for part, values in parts):
            continue
        low, high = max(start[queue], pushed.offset_min), min(end[queue], pushed.offset_end)
        if low < high and pushed.time_min_ms is not None:
            low = max(low, min(high, index.offset_by_time(queue, pushed.time_min_ms - 1)))
        if low < high and pushed.time_max_ms is not None:
            high = min(high, index.offset_by_time(queue, pushed.time_max_ms + 2) + 1)
        if low < high:
            ranges.append(QueueRange(queue, low, high))
    return ranges


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


# ---- keys


def narrowed_by_keys(
    admin: Admin, ranges: list[QueueRange], keys: frozenset[str], addresses: dict[str, str]
) -> list[QueueRange]:
    """The ranges without what cannot bear one of `keys` (whole values of the column)."""
    words = {value.split(" ")[0] for value in keys}
    if len(words) > KEYS_MAX or "" in words:
        return ranges
    found: dict[tuple[str, str], set[tuple[int, int]] | None] = {}
    result: list[QueueRange] = []
    for one in ranges:
        topic, broker, queue_id = one.queue
        if (topic, broker) not in found:
            found[topic, broker] = _places(admin, topic, addresses[broker], words)
        places = found[topic, broker]
        if places is None:
            result.append(one)
            continue
        offsets = [at for queue, at in sorted(places) if queue == queue_id]
        inside = [offset for offset in offsets if one.start <= offset < one.end]
        if inside:
            gaps = [(left, right) for left, right in pairwise(inside) if right - left > GAP_MAX]
            starts = [inside[0], *(right for _, right in gaps)]
            ends = [*(left + 1 for left, _ in gaps), inside[-1] + 1]
            result += [QueueRange(one.queue, *of) for of in zip(starts, ends, strict=True)]
    return result


def _places(admin: Admin, topic: str, address: str, words: set[str]) -> set[tuple[int, int]] | None:
    """(queue id, offset) of every message with one of the keys; None when that is not certain."""
    found: set[tuple[int, int]] = set()
    try:
        if "sluiceVersion" not in admin.runtime(address):
            return None
        config = admin.call(address, Command(RequestCode.GET_BROKER_CONFIG, {})).body
        limit = re.search(rb"^maxMsgsNumBatch=(\d+)", config, re.MULTILINE)
        count_max = min(COUNT_MAX, int(limit[1])) if limit else 0
        for word in words:
            command = requests.messages_by_key(
                topic, word, 0, TIME_MAX_MS, COUNT_MAX, is_unique=False
            )
            answer = admin.call(address, command)
            is_of_index = "indexLastUpdateTimestamp" in (answer.fields or {})
            if answer.code not in (SUCCESS, QUERY_NOT_FOUND) or not is_of_index:
                return None
            messages = decode_records(answer.body, decompress=False)
            places = {(message.queue_id, message.queue_offset) for message in messages}
            if len(places) >= count_max:
                return None
            found |= places
    except SluiceError:
        return None
    return found


# ---- sizes


def admit_bytes(
    admin: Admin, group: str, start: Mapping[MessageQueue, int], latest: Offsets, bytes_max: int
) -> Offsets:
    """The end of the next micro-batch, like `offsets.admit`, with at most `bytes_max` stored
    bytes by sample, in equal shares of the queues that lag."""

    def count_of(mean: float) -> int:
        return max(1, int(allowed / mean)) if mean else 1

    ends = dict(latest)
    lags = {queue: end - start.get(queue, 0) for queue, end in latest.items()}
    lagging = [queue for queue, lag in lags.items() if lag > 0]
    allowed = max(1, bytes_max // max(1, len(lagging)))
    for queue in lagging:
        begin = start.get(queue, 0)
        first = mean_bytes(admin, group, queue, begin)
        count = min(lags[queue], count_of(first))
        for _ in range(ROUNDS_MAX):
            places = {begin + count // 2, begin + count - 1} - {begin}
            sizes = [first, *(mean_bytes(admin, group, queue, place) for place in places)]
            known = [size for size in sizes if size]
            guess, count = count, min(count, count_of(sum(known) / max(1, len(known))))
            if count * 5 >= guess * 4:
                break
        ends[queue] = begin + count
    return ends


def mean_bytes(admin: Admin, group: str, queue: MessageQueue, offset: int) -> float:
    """The mean stored size of the messages from `offset` on; 0.0 when there is none."""
    command = requests.pull(
        group, queue, offset, count_max=SAMPLE_MESSAGES, bytes_max=SAMPLE_BYTES,
        subscription=Subscription(queue.topic, ALL),
    )  # fmt: skip
    address = admin.address(queue)
    answer = pull_answer(admin.call(address, command), address)
    if answer.status is not PullStatus.FOUND:
        return 0.0
    return len(answer.data) / max(1, answer.next_offset - offset)


# ---- types

Look = Callable[[Options], Iterable[Mapping[str, str]]]
"""The properties of the newest messages."""


def settled(columns: tuple[Column, ...], options: Options, look: Look) -> tuple[Column, ...]:
    """The columns with every `auto` replaced by a type, and `prop:*` by the properties that `look`
    sees."""
    if all(column.kind != AUTO for column in columns):
        return columns
    values: dict[str, set[str]] = defaultdict(set)
    for properties in look(options):
        for name, value in properties.items():
            values[name].add(value)
    kinds = {name: kind_of(texts) for name, texts in values.items()}
    taken = {column.name.lower() for column in columns} | {name.lower() for name in BASE}
    result: list[Column] = []
    for column in columns:
        if column.property_name == EVERY:
            for name in sorted(kinds.keys() - SET_FOR_ALL):
                if name.lower() in taken:
                    logger.warning("prop:* leaves out the property %r: a column has that name",
                                   name)  # fmt: skip
                else:
                    taken.add(name.lower())
                    result.append(Column(name, name, kinds[name]))
        elif column.kind == AUTO:
            result.append(replace(column, kind=kinds.get(column.property_name or "", "string")))
        else:
            result.append(column)
    return tuple(result)


def kind_of(values: Iterable[str]) -> str:
    """The narrowest type of which all texts are values."""
    texts = set(values)
    if all(text.lower() in ("true", "false") for text in texts):
        return "boolean"
    if not all(map(_NUMBER.fullmatch, texts)):
        return "string"
    for kind, read in _NUMBERS:
        try:
            for text in texts:
                read(text, "")
        except FilterEvaluationError:
            continue
        return kind
    return "string"


def newest_properties(options: Options) -> Iterator[Mapping[str, str]]:
    """Those of the newest messages at the brokers, as many as the option `inferMessages` says."""
    with open_admin(options) as admin:
        names = topics_of(options).found(admin)
        ranges = newest_ranges(queue_bounds(admin, names), options["inferMessages"])
        addresses = broker_addresses(admin, names)
    for queue, offsets in ranges.items():
        reader = BulkReader(
            addresses[queue.broker], queue.topic, queue.queue_id, offsets.start, offsets.stop,
            broker=queue.broker, group=options["group"] or READ_GROUP,
            credentials=options.credentials, tls=options.tls or False,
            timeout_s=options["timeoutMs"] / 1000,
        )  # fmt: skip
        with reader:
            for chunk in reader:
                for message in decode_records(bytes(chunk), broker=queue.broker):
                    yield message.properties
