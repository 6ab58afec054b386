"""Decide what is read: topics, ranges of queue offsets, and partitions.

A pattern of topics is matched against the whole name. It selects topics that users created. Retry
and dead-letter topics are selected only if the pattern begins with `%` (`%DLQ%.*`), and system
topics never. A stream resolves the pattern again at each trigger. So a topic that is created while
the stream runs is read, from its first message. The same holds for topics of a list that the
checkpoint does not contain yet.

The driver asks the cluster through `client.sync.Admin` only, so this works with RocketMQ brokers as
well. Executors receive the results, pickled by Spark: `ReadPlan` (how to read) and `RangePartition`
(what to read). The planner's process needs neither NumPy nor the decoder.

**Keys.** `keys = 'k1 k2'` is true only for messages that have the key `k1` (among others). So the
broker's key index gives every candidate, and Spark compares again: the ranges shrink to the
candidates. Only a SluiceMQ broker is asked. It responds when its index has caught up with the log,
and says if it cannot. The index of a RocketMQ broker may have holes after a crash, because index
files newer than the last checkpoint are deleted; rows would be missing. For these brokers `keys`
becomes a SQL92 condition. A key with as many messages as one response can hold is not looked up:
its queues are read completely.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Protocol

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from sluicemq.client.admin.messages import COUNT_MAX, TIME_MAX_MS
from sluicemq.client.core import requests
from sluicemq.client.core.directory import find_read_addresses
from sluicemq.client.core.identity import Anchor
from sluicemq.client.core.names import Credentials
from sluicemq.client.core.requests import QUERY_NOT_FOUND, SUCCESS
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import (
    ConfigurationError,
    OffsetOutOfRangeError,
    RequestError,
    SluiceError,
)
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.bodies import BODY_BYTES_MAX
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.system_names import TOOLS_GROUP, is_group_topic, is_system_topic
from sluicemq.model.topic import MessageQueue
from sluicemq.net.tls import Tls
from sluicemq.record.codec import decode_records
from sluicemq.spark.filters import PushedFilters
from sluicemq.spark.options import OffsetChoice, Options, StoreTimestamp
from sluicemq.spark.schema import (
    AUTOMATIC_PROPERTIES,
    BodyFormat,
    Column,
    declared_columns,
    parse_body_format,
    resolve_schema,
)
from sluicemq.spark.sources.checkpoints import Offsets, iterate_table
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

ADMIN_TIMEOUT_S = 5.0
PROBE_SELECTOR = "SluiceProbe IS NULL"
INDEX_KEYS_MAX: Final = 32
CANDIDATE_GAP_MAX: Final = 4_096
"""Candidates at most this many offsets apart are read in one range. The messages between them cost
less than another task."""
logger = logging.getLogger(__name__)

Bounds = dict[MessageQueue, tuple[int, int]]
"""For each queue, its first stored offset and the next offset to be written."""


# ---- topics


@dataclass(frozen=True, slots=True)
class TopicSelection:
    """The topics of a load: a list of names, or a pattern that names must match."""

    names: tuple[str, ...] = ()
    pattern: str | None = None

    @property
    def label(self) -> str:
        """The text by which logs, errors and checkpoints name the topics."""
        return ",".join(self.names) if self.pattern is None else f"pattern {self.pattern}"

    def includes(self, topic: str) -> bool:
        """Return whether a topic of this name is listed or matches the pattern."""
        if self.pattern is None:
            return topic in self.names
        return re.fullmatch(self.pattern, topic) is not None

    def resolve(self, admin: Admin, *, allow_empty: bool = False) -> Sequence[str]:
        """Return the topics to read: the listed names, or the topics that match the pattern.

        Listed names are returned without asking whether the topics exist. Raises ConfigurationError
        if no topic matches the pattern and `allow_empty` is False, and the client's errors.
        """
        if self.pattern is None:
            return self.names
        cluster_info = admin.cluster_info()
        cluster_names = {*cluster_info.brokers, *cluster_info.clusters}
        return self.match(admin.topics(), cluster_names, allow_empty=allow_empty)

    def match(
        self,
        topics: Iterable[str],
        cluster_names: Set[str] = frozenset(),
        *,
        allow_empty: bool = False,
    ) -> Sequence[str]:
        """Return the selected names among `topics`, without system topics.

        Retry and dead-letter topics are selected only if the pattern begins with `%`.
        `cluster_names` are the names of brokers and clusters, each of which has a system topic of
        the same name. Raises ConfigurationError if no topic is selected and `allow_empty` is False.
        """
        with_group_topics = (self.pattern or "").startswith("%")
        selectable = []
        for topic in topics:
            is_hidden = is_group_topic(topic) and not with_group_topics
            if not is_hidden and not is_system_topic(topic, cluster_names):
                selectable.append(topic)
        selected = [topic for topic in selectable if self.includes(topic)]
        if not selected and not allow_empty:
            raise ConfigurationError(
                f"no topic matches the pattern {self.pattern!r}.",
                fix=f"The topics are: {', '.join(selectable[:20]) or 'none'}.",
            )
        return selected


def parse_topics(options: Options) -> TopicSelection:
    """Return the topics that the options select.

    Exactly one of the options `topic`, `topics` and `topicsPattern` must be given. Otherwise
    ConfigurationError is raised.
    """
    option_names = ("topic", "topics", "topicsPattern")
    given_names = [name for name in option_names if options[name] is not None]
    if not given_names:
        options.require("topic")
    if len(given_names) > 1:
        raise ConfigurationError(
            f"the options {' and '.join(given_names)} are given together.", fix="Use one of them."
        )
    if options["topicsPattern"] is not None:
        return TopicSelection(pattern=options["topicsPattern"])
    return TopicSelection(names=tuple(options["topics"] or (options["topic"],)))


# ---- ranges


@dataclass(frozen=True, slots=True)
class QueueRange:
    """The offsets of one queue from `start`, inclusive, to `end`, exclusive."""

    queue: MessageQueue
    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of offsets in the range."""
        return max(0, self.end - self.start)


def queue_label(queue: MessageQueue) -> str:
    """Return broker and queue id as logs and errors name a queue, such as `broker-a:3`."""
    return f"{queue.broker}:{queue.queue_id}"


def split_ranges(
    ranges: Sequence[QueueRange], records_max: int, partitions_min: int | None
) -> list[QueueRange]:
    """Cut ranges of offsets into pieces of at most `records_max` offsets, and return the pieces.

    The pieces of one range have nearly equal sizes. If there are fewer than `partitions_min`
    pieces, more cuts are made, in proportion to the sizes of the ranges. Empty ranges are dropped.
    """
    filled = [queue_range for queue_range in ranges if queue_range.size]
    piece_counts = [-(-queue_range.size // records_max) for queue_range in filled]  # rounded up
    if partitions_min is not None and sum(piece_counts) < partitions_min:
        all_records = sum(queue_range.size for queue_range in filled)
        for index, queue_range in enumerate(filled):
            share = -(-queue_range.size * partitions_min // all_records)  # rounded up
            # A piece has at least one offset.
            piece_counts[index] = min(queue_range.size, max(piece_counts[index], share))

    pieces = []
    for queue_range, piece_count in zip(filled, piece_counts, strict=True):
        pieces += _cut_range(queue_range, piece_count)
    return pieces


def _cut_range(queue_range: QueueRange, piece_count: int) -> list[QueueRange]:
    """Return a range cut into `piece_count` ranges of nearly equal size, in order.

    A range with fewer messages than `piece_count` gives some empty ranges.
    """
    cuts = [
        queue_range.start + queue_range.size * number // piece_count
        for number in range(piece_count + 1)
    ]
    return [QueueRange(queue_range.queue, start, end) for start, end in pairwise(cuts)]


# ---- bounds


class TimestampIndex(Protocol):
    """An object that finds offsets by store time: the cluster's Admin, or a store's snapshot."""

    def offset_by_time(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message stored at `time_ms` or later.

        `time_ms` is in milliseconds since 1970. The result for a time after the last message
        differs between implementations: it may be the end of the queue, or its last message.
        """
        ...


def open_admin(options: Options) -> Admin:
    """Return an Admin client with the connection options. The caller closes it.

    Raises ConfigurationError if no name server is given.
    """
    return Admin(
        options.require("nameServers").split(";"),
        credentials=options.credentials,
        tls=options.tls or False,
        timeout_s=min(ADMIN_TIMEOUT_S, options["timeoutMs"] / 1000),
    )


def fetch_bounds(admin: Admin, topics: Sequence[str]) -> Bounds:
    """Return (first offset, end offset) of every readable queue of the topics.

    The end offset is exclusive. Raises RouteNotFoundError for a topic that does not exist,
    ConfigurationError if none of the topics has a readable queue, and the client's errors.
    """
    bounds = {queue: admin.offsets(queue) for topic in topics for queue in admin.queues(topic)}
    if not bounds:
        raise ConfigurationError(
            f"the topic {','.join(topics)!r} has no readable queue.", fix="Check sluice topic show."
        )
    return bounds


def select_newest_ranges(bounds: Bounds, count: int) -> dict[MessageQueue, range]:
    """Return the newest offsets of each queue: about `count` in all queues together.

    Each queue that is not empty has the same share of `count`, or all its offsets if it has fewer.
    Empty queues are left out.
    """
    filled = {queue: (low, high) for queue, (low, high) in bounds.items() if low < high}
    per_queue = -(-count // len(filled)) if filled else 0  # rounded up
    return {queue: range(max(low, high - per_queue), high) for queue, (low, high) in filled.items()}


def read_newest_properties(options: Options) -> Iterator[Mapping[str, str]]:
    """Yield the properties of the newest messages at the brokers.

    The option `inferMessages` says how many messages are read. Raises SluiceError.
    """
    with open_admin(options) as admin:
        topics = parse_topics(options).resolve(admin)
        ranges = select_newest_ranges(fetch_bounds(admin, topics), options["inferMessages"])
        addresses = find_broker_addresses(admin, topics)
    for queue, offsets in ranges.items():
        yield from _read_properties(options, addresses[queue.broker], queue, offsets)


def _read_properties(
    options: Options, address: str, queue: MessageQueue, offsets: range
) -> Iterator[Mapping[str, str]]:
    """Yield the properties of the messages at `offsets` of a queue, read from its broker.

    `address` is the address of the broker. Raises the client's errors.
    """
    reader = BulkReader(
        address,
        queue.topic,
        queue.queue_id,
        offsets.start,
        offsets.stop,
        broker=queue.broker,
        group=options["group"] or TOOLS_GROUP,
        credentials=options.credentials,
        tls=options.tls or False,
        timeout_s=options["timeoutMs"] / 1000,
    )
    with reader:
        for chunk in reader:
            for message in decode_records(bytes(chunk), broker=queue.broker):
                yield message.properties


def resolve_starting_offsets(
    index: TimestampIndex, options: Options, bounds: Bounds, default: str
) -> Offsets:
    """Return the offset at which to start reading each queue.

    It is given by `startingTimestamp`, else by `startingOffsets`, else by `default` (`earliest` or
    `latest`). Raises the errors of `resolve_offset_table`.
    """
    chosen = options["startingOffsets"] or default
    return _resolve_offsets(index, options, bounds, "starting", chosen)


def resolve_ending_offsets(index: TimestampIndex, options: Options, bounds: Bounds) -> Offsets:
    """Return the offset at which to stop reading each queue, exclusive.

    The option `endingTimestamp` decides if it is given, else `endingOffsets`. Raises
    ConfigurationError for the word `earliest` and for a wrong table of offsets, and
    OffsetOutOfRangeError for an offset whose message was deleted.
    """
    chosen = options["endingOffsets"]
    if options["endingTimestamp"] is None and chosen == "earliest":
        raise ConfigurationError(
            "the option 'endingOffsets' is 'earliest': nothing would be read.",
            fix="Use latest or JSON by broker and queue.",
        )
    return _resolve_offsets(index, options, bounds, "ending", chosen)


def _resolve_offsets(
    index: TimestampIndex, options: Options, bounds: Bounds, side: str, chosen: Any
) -> Offsets:
    """Return the offset of each queue at one end of the read: `side` is "starting" or "ending".

    The option `startingTimestamp` or `endingTimestamp` decides if it is given. Otherwise `chosen`
    decides, the value of the option for offsets: "earliest", "latest" or a table.
    """
    time_ms = options[f"{side}Timestamp"]
    if time_ms is not None:
        return {
            queue: _resolve_time(index.offset_by_time, queue, time_ms, queue_bounds)
            for queue, queue_bounds in bounds.items()
        }
    if chosen == "latest":
        return {queue: highest for queue, (_, highest) in bounds.items()}
    if chosen == "earliest":
        return {queue: lowest for queue, (lowest, _) in bounds.items()}
    return resolve_offset_table(
        chosen,
        bounds,
        f"{side}Offsets",
        index.offset_by_time,
        fail_on_data_loss=options["failOnDataLoss"],
    )


def _resolve_time(
    offset_by_time: Callable[[MessageQueue, int], int],
    queue: MessageQueue,
    time_ms: int,
    bounds: tuple[int, int],
) -> int:
    """Return the offset of the first message of a queue that was stored at a time or later.

    It is limited to the `bounds` of the queue. `offset_by_time(queue, time_ms)` asks for it. An
    empty queue has only one possible offset, so its broker is not asked.
    """
    lowest, highest = bounds
    if lowest == highest:
        return lowest
    return min(highest, max(lowest, offset_by_time(queue, time_ms)))


def resolve_offset_table(
    table: Mapping[str, Any],
    bounds: Bounds,
    option: str,
    offset_by_time: Callable[[MessageQueue, int], int] | None = None,
    *,
    fail_on_data_loss: bool = True,
) -> Offsets:
    """Return the offset of each queue in a table that a user gave.

    `table` is the value of the option named `option`: {broker: {queue id: choice}}, or {topic:
    {broker: …}}. A choice is an offset, "earliest", "latest" or a time. `offset_by_time(queue,
    time_ms)` returns the offset of the first message stored at that time or later. If it is None, a
    time selects the first stored offset.

    Raises ConfigurationError if a queue is missing or unknown, or if its offset is greater than its
    end. Raises OffsetOutOfRangeError for an offset whose message was deleted by retention. If
    `fail_on_data_loss` is False, that is logged instead, and the first stored offset is returned.
    """
    choices = _flatten_offset_table(table, bounds, option)
    offsets = {}
    for queue, queue_bounds in bounds.items():
        lowest, highest = queue_bounds
        choice = choices[queue]
        if isinstance(choice, StoreTimestamp):
            offset = lowest
            if offset_by_time is not None:
                offset = _resolve_time(offset_by_time, queue, choice.time_ms, queue_bounds)
        elif isinstance(choice, str):
            offset = lowest if choice == "earliest" else highest
        else:
            offset = choice
        _check_offset(offset, queue, queue_bounds, option, fail_on_data_loss=fail_on_data_loss)
        offsets[queue] = max(offset, lowest)
    return offsets


def _check_offset(
    offset: int,
    queue: MessageQueue,
    bounds: tuple[int, int],
    option: str,
    *,
    fail_on_data_loss: bool,
) -> None:
    """Raise an error if a queue does not have the message at an offset.

    It is ConfigurationError if the offset is greater than the end of `bounds`. It is
    OffsetOutOfRangeError if the message was deleted, and `fail_on_data_loss` is True. If that is
    False, the loss is only logged.
    """
    lowest, highest = bounds
    problem = (
        f"the option {option!r} asks for offset {offset} of {queue_label(queue)}, which holds"
        f" {lowest} to {highest}"
    )
    if offset > highest:
        fix = "Choose an existing offset, or earliest or latest."
        raise ConfigurationError(f"{problem}.", fix=fix)
    if offset >= lowest:
        return
    if fail_on_data_loss:
        raise OffsetOutOfRangeError(
            f"{problem}: {lowest - offset} messages are gone.",
            fix="Set failOnDataLoss=false to read what is left, or choose earliest.",
        )
    logger.warning(
        "%s: offsets %d to %d of %s are gone and not read",
        option,
        offset,
        lowest,
        queue_label(queue),
    )


def _flatten_offset_table(
    table: Mapping[str, Any], bounds: Bounds, option: str
) -> dict[MessageQueue, OffsetChoice]:
    """Return the choice for each queue in a table of offsets that a user gave.

    `table` is the value of the option named `option`: {broker: {queue id: choice}}, or {topic:
    {broker: …}}. Raises ConfigurationError if the table contains other queues than `bounds`, lacks
    a queue, or is not by topic although several topics are read.
    """
    topics = sorted({queue.topic for queue in bounds})
    if _is_by_topic(table):
        choices = dict(iterate_table(table))
    elif len(topics) == 1:
        choices = dict(iterate_table({topics[0]: table}))
    else:
        raise ConfigurationError(
            f"the option {option!r} names brokers, but several topics are read.",
            fix='Write {"topic": {"broker": {"0": 120}}}.',
        )

    unknown = choices.keys() - bounds.keys()
    if unknown:
        listed = _list_queues(unknown, {*choices, *bounds})
        fix = "It is not in the topic's route."
        raise ConfigurationError(f"the option {option!r} names {listed}.", fix=fix)
    missing = bounds.keys() - choices.keys()
    if missing:
        listed = _list_queues(missing, {*choices, *bounds})
        fix = "Every queue needs an offset."
        raise ConfigurationError(f"the option {option!r} does not name {listed}.", fix=fix)
    return choices


def _is_by_topic(table: Mapping[str, Any]) -> bool:
    """Return whether a table has the form {topic: {broker: {queue id: choice}}}.

    Its other form is {broker: {queue id: choice}}.
    """
    for by_broker_or_queue in table.values():
        for queues_or_choice in by_broker_or_queue.values():
            if isinstance(queues_or_choice, Mapping):
                return True
    return False


def _list_queues(queues: Iterable[MessageQueue], all_queues: Iterable[MessageQueue]) -> str:
    """Return the first five of `queues` as a text, with topics if `all_queues` have several."""
    has_several_topics = len({queue.topic for queue in all_queues}) > 1
    labels = []
    for queue in sorted(queues)[:5]:
        label = queue_label(queue)
        labels.append(f"{queue.topic}:{label}" if has_several_topics else label)
    return ", ".join(labels)


def narrow_ranges(
    index: TimestampIndex, start: Offsets, end: Offsets, pushed: PushedFilters
) -> list[QueueRange]:
    """Return the ranges from `start` to `end`, without offsets that pushed predicates exclude.

    Ranges that become empty are left out. Limits of the store time are only approximate, and Spark
    compares the time of each row again. A RocketMQ 4.x broker may return any of several messages
    with the same time, so each limit has a margin.
    """
    ranges = []
    for queue in sorted(start):
        if not _is_queue_allowed(queue, pushed):
            continue
        low = max(start[queue], pushed.offset_min)
        high = min(end[queue], pushed.offset_end)
        if low < high and pushed.time_min_ms is not None:
            low = max(low, min(high, index.offset_by_time(queue, pushed.time_min_ms - 1)))
        if low < high and pushed.time_max_ms is not None:
            high = min(high, index.offset_by_time(queue, pushed.time_max_ms + 2) + 1)
        if low < high:
            ranges.append(QueueRange(queue, low, high))
    return ranges


def _is_queue_allowed(queue: MessageQueue, pushed: PushedFilters) -> bool:
    """Return whether messages of a queue can match the pushed predicates on its name."""
    if pushed.topics is not None and queue.topic not in pushed.topics:
        return False
    if pushed.brokers is not None and queue.broker not in pushed.brokers:
        return False
    return pushed.queue_ids is None or queue.queue_id in pushed.queue_ids


def find_broker_addresses(admin: Admin, topics: Sequence[str]) -> dict[str, str]:
    """Return the address to read from for each broker that has one of the topics, by broker name.

    Raises RouteNotFoundError for a topic that does not exist, and the client's errors.
    """
    addresses: dict[str, str] = {}
    for topic in topics:
        addresses |= find_read_addresses(admin.route(topic))
    return addresses


def check_selector(admin: Admin, topics: Sequence[str], group: str, expression: str) -> None:
    """Ask every broker of the topics whether it can evaluate a SQL92 expression.

    Raises RequestError with the broker's remark if one cannot. The code is
    SUBSCRIPTION_PARSE_FAILED (23) if the expression does not compile, and SYSTEM_ERROR (1) if SQL92
    is switched off.
    """
    now_ms = SYSTEM_CLOCK.now_ms()
    # A broker with several of the topics is asked once.
    topic_by_address = {}
    for topic in topics:
        for address in find_broker_addresses(admin, [topic]).values():
            topic_by_address[address] = topic
    for address, topic in topic_by_address.items():
        subscription = Subscription(topic, expression, SQL92, version=now_ms)
        request = requests.check_subscription(f"spark@{os.getpid()}", group, subscription)
        response = admin.call(address, request)
        if response.code != SUCCESS:
            raise RequestError(
                response.code,
                response.remark or "",
                address=address,
                fix=f"The broker cannot evaluate the selector {expression!r}. A RocketMQ broker"
                " needs enablePropertyFilter=true.",
            )


def can_evaluate_selectors(admin: Admin, topics: Sequence[str], group: str) -> bool:
    """Return whether all brokers of the topics evaluate SQL92.

    Return False if a server does not respond.
    """
    try:
        check_selector(admin, topics, group, PROBE_SELECTOR)
    except SluiceError:
        return False
    return True


# ---- keys


def narrow_ranges_by_keys(
    admin: Admin, ranges: list[QueueRange], keys: frozenset[str], addresses: dict[str, str]
) -> list[QueueRange]:
    """Return the parts of the ranges that may contain messages with one of the keys.

    `keys` are whole values of the column `keys`. The first word of each value is looked up in the
    key index of each broker. `addresses` has each broker's address by name.

    A range is returned unchanged if the key index of its broker cannot be used. All ranges are
    returned unchanged if there are more than `INDEX_KEYS_MAX` words, or if a value has no word.
    """
    lookup_keys = {column_value.split(" ")[0] for column_value in keys}
    if len(lookup_keys) > INDEX_KEYS_MAX or "" in lookup_keys:
        return ranges
    # The result of `_find_key_offsets` by topic and broker.
    candidates_by_broker: dict[tuple[str, str], set[tuple[int, int]] | None] = {}
    narrowed: list[QueueRange] = []
    for queue_range in ranges:
        topic, broker, queue_id = queue_range.queue
        if (topic, broker) not in candidates_by_broker:
            candidates_by_broker[topic, broker] = _find_key_offsets(
                admin, topic, addresses[broker], lookup_keys
            )
        candidates = candidates_by_broker[topic, broker]
        if candidates is None:
            narrowed.append(queue_range)
        else:
            queue_offsets = {offset for queue, offset in candidates if queue == queue_id}
            narrowed += _split_at_gaps(queue_range, queue_offsets)
    return narrowed


def _split_at_gaps(queue_range: QueueRange, candidates: set[int]) -> list[QueueRange]:
    """Return ranges that contain all candidates in `queue_range`, and few other offsets.

    `candidates` are offsets. Candidates that are at most `CANDIDATE_GAP_MAX` offsets apart are in
    one range.
    """
    pieces: list[QueueRange] = []
    for offset in sorted(candidates):
        if not queue_range.start <= offset < queue_range.end:
            continue
        piece = QueueRange(queue_range.queue, offset, offset + 1)
        if pieces:
            last_candidate = pieces[-1].end - 1
            if offset - last_candidate <= CANDIDATE_GAP_MAX:
                piece = replace(pieces.pop(), end=offset + 1)
        pieces.append(piece)
    return pieces


def _find_key_offsets(
    admin: Admin, topic: str, address: str, keys: set[str]
) -> set[tuple[int, int]] | None:
    """Return (queue id, offset) of every message of a topic that has one of `keys`.

    Return None if the broker at `address` cannot say that with certainty, because it is not a
    SluiceMQ broker, does not respond, or a key has too many messages for one response.
    """
    key_offsets: set[tuple[int, int]] = set()
    try:
        if "sluiceVersion" not in admin.runtime(address):
            return None
        count_max = _fetch_response_limit(admin, address)
        for key in keys:
            command = requests.messages_by_key(
                topic, key, 0, TIME_MAX_MS, COUNT_MAX, is_unique=False
            )
            response = admin.call(address, command)
            is_from_index = "indexLastUpdateTimestamp" in (response.fields or {})
            if response.code not in (SUCCESS, QUERY_NOT_FOUND) or not is_from_index:
                return None
            messages = decode_records(response.body)
            offsets = {(message.queue_id, message.queue_offset) for message in messages}
            if len(offsets) >= count_max:  # there may be more messages than the response has
                return None
            key_offsets |= offsets
    except SluiceError:
        return None
    return key_offsets


def _fetch_response_limit(admin: Admin, address: str) -> int:
    """Return a broker's limit for messages of a key: 0 if unknown, else at most COUNT_MAX."""
    config = admin.call(address, Command(RequestCode.GET_BROKER_CONFIG, {})).body
    limit = re.search(rb"^maxMsgsNumBatch=(\d+)", config, re.MULTILINE)
    return min(COUNT_MAX, int(limit[1])) if limit else 0


# ---- what travels to executors


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How executors read; it is the same for every range.

    `subscription` is None if every message is read; its topic is replaced by the topic of each
    range. `exact_tags` are the tags that the reader compares again, or None. `body_format` is None
    if bodies stay bytes, `bad_body` is the option `badBody`, and `hidden_properties` are left out
    of the column `properties`. The other attributes have the values of options.
    """

    columns: tuple[Column, ...]
    subscription: Subscription | None
    exact_tags: frozenset[str] | None = None
    group: str = TOOLS_GROUP
    body_format: BodyFormat | None = None
    bad_body: str = "null"
    body_bytes_max: int = BODY_BYTES_MAX
    credentials: Credentials | None = None
    tls: Tls | None = None
    batch_bytes: int = 4 * 1024 * 1024
    timeout_s: float = 30.0
    fail_on_data_loss: bool = True
    fail_on_bad_property: bool = False
    hidden_properties: frozenset[str] = AUTOMATIC_PROPERTIES


class RangePartition(InputPartition):  # type: ignore[misc]
    """A Spark partition: the offsets from `start` to `end`, exclusive, of one queue.

    `address` is that of the queue's broker. `queue` is None for the partition of a load without
    messages. `anchor` is a message by which a task recognises the queue (see `identity`), or None.
    `is_first_of_queue` marks the first partition of its queue in a batch.
    """

    def __init__(self, queue: MessageQueue | None, start: int, end: int, address: str) -> None:
        """Create a partition of the offsets [start, end) of a queue.

        `address` is where its messages are read: the address of the broker, or the directory of the
        store. `queue` is None for a partition without messages.
        """
        super().__init__(queue)
        self.queue = queue
        self.start = start
        self.end = end
        self.address = address
        self.anchor: Anchor | None = None
        self.is_batch = False
        self.is_first_of_queue = False


def make_decoding_plan(options: Options, schema: StructType) -> ReadPlan:
    """Return the part of a read plan that does not depend on the place of the messages.

    It has no subscription yet. Raises ConfigurationError for wrong options or a schema that does
    not fit, and FilterSyntaxError for wrong tags.
    """
    if options["filter.tags"] is not None:
        # Only a validation: the caller builds the subscription later, with pushed predicates.
        parse_subscription(parse_topics(options).label, options["filter.tags"])
    shows_own_only = options["properties"] == "own"
    return ReadPlan(
        columns=resolve_schema(schema, declared_columns(options)),
        body_format=parse_body_format(options),
        bad_body=options["badBody"],
        body_bytes_max=options["bodyBytesMax"],
        subscription=None,
        fail_on_data_loss=options["failOnDataLoss"],
        fail_on_bad_property=options["badProperties"] == "fail",
        hidden_properties=AUTOMATIC_PROPERTIES if shows_own_only else frozenset(),
    )


def make_read_plan(options: Options, schema: StructType) -> ReadPlan:
    """Return the plan for reading from brokers, with the connection and the group.

    It has no subscription yet. Raises ConfigurationError for wrong options or a schema that does
    not fit, and FilterSyntaxError for wrong tags.
    """
    return replace(
        make_decoding_plan(options, schema),
        group=options["group"] or TOOLS_GROUP,
        credentials=options.credentials,
        tls=options.tls,
        batch_bytes=options["batchBytes"],
        timeout_s=options["timeoutMs"] / 1000,
    )


def make_partitions(
    options: Options, ranges: list[QueueRange], addresses: Mapping[str, str]
) -> list[InputPartition]:
    """Return the Spark partitions for ranges of queues. Large ranges are split.

    `addresses` has each broker's address by name. If all ranges are empty, return one partition
    without messages.
    """
    split = split_ranges(ranges, options["maxRecordsPerPartition"], options["minPartitions"])
    partitions = []
    for queue_range in split:
        queue = queue_range.queue
        address = addresses[queue.broker]
        partitions.append(RangePartition(queue, queue_range.start, queue_range.end, address))
    return partitions or make_empty_partitions()


def make_empty_partitions() -> list[InputPartition]:
    """Return a list with one partition without messages.

    For an empty list, Spark would create a partition of its own.
    """
    return [RangePartition(None, 0, 0, "")]
