"""What is read: topics, ranges of queue offsets, partitions; and what a checkpoint holds.

A pattern of topics is matched against the whole name. It finds what users made: retry and
dead-letter topics only when it says so by its first character (`%DLQ%.*`), system topics never. A
stream asks again at each trigger, so a topic that is made while it runs is read, from its first
message; topics of a list that the checkpoint does not know yet likewise.

The driver asks the cluster through `client.sync.Admin` alone, so it works on a Java cluster as
well. Executors only see what comes out and travels to them, pickled by Spark: `ReadPlan` (how to
read) and `RangePartition` (what). A planning process needs neither NumPy nor the decoder.

**Keys.** `keys = 'k1 k2'` is true of messages that bear the key `k1` among others, so the broker's
key index gives every candidate, and Spark compares again: the ranges shrink to the places of the
candidates. Only a SluiceMQ broker is asked: it answers after its index has caught up with the log,
and says so when it cannot. The index of a Java broker may have holes after a crash (its index files
newer than the last checkpoint are thrown away), and rows would be missing; there `keys` is a SQL92
condition. A key with as many messages as one answer can hold is read by its queues too.

**Checkpoints** of a stream, as JSON (Spark stores it, version 1):

    {"version": 1, "topic": "flights", "filter": "TAG UA||AA", "queues": {"broker-a": {"0": 120}}}

`queues` holds for each queue the offset of the next message to read. The topic is there so that a
checkpoint of another topic is refused instead of read; the filter so that a change is noticed. A
stream of several topics writes version 2: `queues` by topic, and `topic` is the list or pattern.

    {…, "initial": true}              where a new stream starts, not read from a checkpoint
    {…, "from": {"broker-a": {…}}}    where the micro-batch began that ends here
    {…, "seen": {"broker-a": {"0": [119, 1795363635210]}}}    see `identity.TopicIdentity`

`from` is there for queues of which the checkpoint before says nothing: those of a new stream, and
new ones. Spark does not store where a stream started; after a crash in its first micro-batch it
would ask again, and `latest` is another place then. And for queues of a topic that was made anew.
Checkpoints of older versions have no `seen`.
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
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.bodies import BODY_BYTES_MAX
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.system_names import TOOLS_GROUP, is_group_topic, is_system_topic
from sluicemq.model.topic import MessageQueue
from sluicemq.net.tls import Tls
from sluicemq.record.codec import decode_records
from sluicemq.spark.filters import Pushed
from sluicemq.spark.options import Moment, OffsetChoice, Options
from sluicemq.spark.schema import (
    SET_FOR_ALL,
    BodyFormat,
    Column,
    body_format,
    columns_of,
    declared_columns,
)
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

CHECKPOINT_VERSION: Final = 1
CHECKPOINT_VERSION_TOPICS: Final = 2
ADMIN_TIMEOUT_S = 5.0
PROBE_SELECTOR = "SluiceProbe IS NULL"
KEYS_MAX: Final = 32
GAP_MAX: Final = 4_096
"""Candidates so near to one another are read in one range: a task costs more than the messages."""
logger = logging.getLogger(__name__)

Offsets = dict[MessageQueue, int]
Bounds = dict[MessageQueue, tuple[int, int]]
"""The first stored offset of each queue, and the next to be written."""


# ---- topics


@dataclass(frozen=True, slots=True)
class Topics:
    """Names, or (with `pattern`) the names that match. `label` is how messages call them."""

    names: tuple[str, ...] = ()
    pattern: str | None = None

    @property
    def label(self) -> str:
        return ",".join(self.names) if self.pattern is None else f"pattern {self.pattern}"

    def has(self, topic: str) -> bool:
        """Whether a topic of this name is read."""
        if self.pattern is None:
            return topic in self.names
        return re.fullmatch(self.pattern, topic) is not None

    def found(self, admin: Admin, *, may_be_none: bool = False) -> Sequence[str]:
        """The topics there are now; names are taken as they stand. Raises ConfigurationError when
        nothing matches the pattern, unless that `may_be_none`."""
        if self.pattern is None:
            return self.names
        info = admin.cluster_info()
        own_names = {*info.brokers, *info.clusters}
        return self.matching(admin.topics(), own_names, may_be_none=may_be_none)

    def matching(
        self, topics: Iterable[str], own_names: Set[str] = frozenset(), *, may_be_none: bool = False
    ) -> Sequence[str]:
        """Return those of `topics` that the pattern matches, without system topics.

        `own_names` are the names of the clusters and brokers (`is_system_topic`). Retry and
        dead-letter topics match only a pattern that begins with "%". Raises ConfigurationError if
        no topic matches, unless `may_be_none`.
        """
        with_group_topics = (self.pattern or "").startswith("%")
        names = [
            name
            for name in topics
            if (with_group_topics or not is_group_topic(name))
            and not is_system_topic(name, own_names)
        ]
        matching = [name for name in names if self.has(name)]
        if not matching and not may_be_none:
            raise ConfigurationError(
                f"no topic matches the pattern {self.pattern!r}.",
                fix=f"There are: {', '.join(names[:20]) or 'none'}.",
            )
        return matching


def topics_of(options: Options) -> Topics:
    """What the options name. Raises ConfigurationError unless exactly one of the three is given."""
    ways = ("topic", "topics", "topicsPattern")
    given = [name for name in ways if options[name] is not None]
    if not given:
        options.required("topic")
    if len(given) > 1:
        raise ConfigurationError(
            f"the options {' and '.join(given)} are given together.", fix="Give one of them."
        )
    if options["topicsPattern"] is not None:
        return Topics(pattern=options["topicsPattern"])
    return Topics(names=tuple(options["topics"] or (options["topic"],)))


# ---- ranges


@dataclass(frozen=True, slots=True)
class QueueRange:
    """Offsets start <= offset < end of one queue."""

    queue: MessageQueue
    start: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.start)


def place(queue: MessageQueue) -> str:
    """`broker-a:3`, as messages name a queue."""
    return f"{queue.broker}:{queue.queue_id}"


def split_ranges(
    ranges: Sequence[QueueRange], records_max: int, partitions_min: int | None
) -> list[QueueRange]:
    """Cuts ranges into pieces of nearly equal size, none larger than `records_max`.

    When that gives fewer than `partitions_min`, larger ranges are cut further, by their share.
    Empty ranges are dropped.
    """
    some = [one for one in ranges if one.size]
    pieces = [-(-one.size // records_max) for one in some]
    if partitions_min is not None and sum(pieces) < partitions_min:
        total = sum(one.size for one in some)
        pieces = [
            min(one.size, max(count, -(-one.size * partitions_min // total)))
            for one, count in zip(some, pieces, strict=True)
        ]
    found = []
    for one, count in zip(some, pieces, strict=True):
        cuts = [one.start + one.size * turn // count for turn in range(count + 1)]
        found += [QueueRange(one.queue, start, end) for start, end in pairwise(cuts)]
    return found


# ---- bounds


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
            f"the topic {','.join(topics)!r} has no readable queue.", fix="See sluice topic show."
        )
    return bounds


def newest_ranges(bounds: Bounds, count: int) -> dict[MessageQueue, range]:
    """The offsets of about `count` messages: the newest of every queue that has any."""
    filled = {queue: bound for queue, bound in bounds.items() if bound[0] < bound[1]}
    each = -(-count // len(filled)) if filled else 0
    return {queue: range(max(low, high - each), high) for queue, (low, high) in filled.items()}


def newest_properties(options: Options) -> Iterator[Mapping[str, str]]:
    """Those of the newest messages at the brokers, as many as the option `inferMessages` says."""
    with open_admin(options) as admin:
        names = topics_of(options).found(admin)
        ranges = newest_ranges(queue_bounds(admin, names), options["inferMessages"])
        addresses = broker_addresses(admin, names)
    for queue, offsets in ranges.items():
        reader = BulkReader(
            addresses[queue.broker], queue.topic, queue.queue_id, offsets.start, offsets.stop,
            broker=queue.broker, group=options["group"] or TOOLS_GROUP,
            credentials=options.credentials, tls=options.tls or False,
            timeout_s=options["timeoutMs"] / 1000,
        )  # fmt: skip
        with reader:
            for chunk in reader:
                for message in decode_records(bytes(chunk), broker=queue.broker):
                    yield message.properties


def starting_offsets(index: TimeIndex, options: Options, bounds: Bounds, default: str) -> Offsets:
    """Where to start: startingTimestamp, else startingOffsets, else `default` (a word)."""
    return _chosen(index, options, bounds, "starting", options["startingOffsets"] or default)


def ending_offsets(index: TimeIndex, options: Options, bounds: Bounds) -> Offsets:
    """Where to end, exclusive: endingTimestamp, else endingOffsets."""
    chosen = options["endingOffsets"]
    if options["endingTimestamp"] is None and chosen == "earliest":
        raise ConfigurationError(
            "the option 'endingOffsets' is 'earliest': nothing would be read.",
            fix="Use latest or JSON by broker and queue.",
        )
    return _chosen(index, options, bounds, "ending", chosen)


def _chosen(index: TimeIndex, options: Options, bounds: Bounds, side: str, chosen: Any) -> Offsets:
    time_ms = options[f"{side}Timestamp"]
    if time_ms is not None:
        return {
            queue: low if low == high else min(high, max(low, index.offset_by_time(queue, time_ms)))
            for queue, (low, high) in bounds.items()
        }
    if isinstance(chosen, str):
        return {queue: bound[chosen == "latest"] for queue, bound in bounds.items()}
    fails, option = options["failOnDataLoss"], f"{side}Offsets"
    return chosen_offsets(chosen, bounds, option, index.offset_by_time, fail_on_data_loss=fails)


def chosen_offsets(
    table: Mapping[str, Any],
    bounds: Bounds,
    option: str,
    by_time: Callable[[MessageQueue, int], int] | None = None,
    *,
    fail_on_data_loss: bool = True,
) -> Offsets:
    """Offsets that a user gave by broker and queue (and topic, of several), words and times
    resolved; `by_time(queue, time_ms)` finds the first offset stored then or later.

    Raises ConfigurationError when a queue is missing, unknown, or its offset behind its end, and
    OffsetOutOfRangeError for an offset that retention has passed, unless loss is allowed.
    """
    given = _by_queue(table, bounds, option)
    offsets = {}
    for queue, (lowest, highest) in bounds.items():
        choice = given[queue]
        if isinstance(choice, Moment):
            found = lowest
            if by_time is not None and lowest < highest:
                found = min(highest, max(lowest, by_time(queue, choice.time_ms)))
        elif isinstance(choice, str):
            found = lowest if choice == "earliest" else highest
        else:
            found = choice
        asked = (
            f"the option {option!r} asks for offset {found} of {place(queue)}, which holds"
            f" {lowest} to {highest}"
        )
        if found > highest:
            fix = "Choose one that is there, or earliest or latest."
            raise ConfigurationError(f"{asked}.", fix=fix)
        if found < lowest and fail_on_data_loss:
            raise OffsetOutOfRangeError(
                f"{asked}: {lowest - found} messages are gone.",
                fix="Set failOnDataLoss=false to read what is left, or choose earliest.",
            )
        if found < lowest:
            logger.warning("%s: offsets %d to %d of %s are gone and not read", option, found,
                           lowest, place(queue))  # fmt: skip
        offsets[queue] = max(found, lowest)
    return offsets


def _by_queue(
    table: Mapping[str, Any], bounds: Bounds, option: str
) -> dict[MessageQueue, OffsetChoice]:
    """The table with whole queues as keys: exactly those of `bounds`."""
    topics = sorted({queue.topic for queue in bounds})
    inner = [value for one in table.values() for value in one.values()]
    by_topic = any(isinstance(value, Mapping) for value in inner)
    if not by_topic and len(topics) != 1:
        raise ConfigurationError(
            f"the option {option!r} names brokers, and several topics are read.",
            fix='Write {"topic": {"broker": {"0": 120}}}.',
        )
    given = dict(from_table(table if by_topic else {topics[0]: table}))
    several = len({queue.topic for queue in (*given, *bounds)}) > 1
    for wrong, what, fix in (
        (sorted(set(given) - set(bounds)), "names", "It is not in the topic's route."),
        (sorted(set(bounds) - set(given)), "does not name", "Every queue needs an offset."),
    ):
        if wrong:
            listed = ", ".join(f"{one.topic}:" * several + place(one) for one in wrong[:5])
            raise ConfigurationError(f"the option {option!r} {what} {listed}.", fix=fix)
    return given


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
        broker: address
        for route in map(admin.route, topics)
        for broker, address in find_read_addresses(route).items()
    }


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
                fix=f"The selector {expression!r} cannot be evaluated there; a Java broker needs"
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
            messages = decode_records(answer.body)
            places = {(message.queue_id, message.queue_offset) for message in messages}
            if len(places) >= count_max:
                return None
            found |= places
    except SluiceError:
        return None
    return found


# ---- what travels to executors


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How to read, the same for every range. `tags` are compared again by the reader; the topic
    of `subscription` is replaced by each range's own."""

    columns: tuple[Column, ...]
    subscription: Subscription | None
    tags: frozenset[str] | None = None
    group: str = TOOLS_GROUP
    body: BodyFormat | None = None
    bad_body: str = "null"
    body_bytes_max: int = BODY_BYTES_MAX
    credentials: Credentials | None = None
    tls: Tls | None = None
    batch_bytes: int = 4 * 1024 * 1024
    timeout_s: float = 30.0
    fail_on_data_loss: bool = True
    fail_on_bad_property: bool = False
    hidden: frozenset[str] = SET_FOR_ALL


class RangePartition(InputPartition):  # type: ignore[misc]
    """Offsets start <= offset < end of one queue, and its broker's address. None: read nothing.

    `anchor` is a message by which a task knows the queue again (`identity`). `begins`: the first
    partition of its queue in a batch.
    """

    def __init__(self, queue: MessageQueue | None, start: int, end: int, address: str) -> None:
        super().__init__(queue)
        self.queue = queue
        self.start = start
        self.end = end
        self.address = address
        self.anchor: Anchor | None = None
        self.is_batch = False
        self.begins = False


def decoding_plan(options: Options, schema: StructType) -> ReadPlan:
    """The part of a plan that does not depend on where records come from; no subscription yet.
    Raises ConfigurationError, FilterSyntaxError for tags."""
    if options["filter.tags"] is not None:
        subscribe(topics_of(options).label, options["filter.tags"])
    return ReadPlan(
        columns=columns_of(schema, declared_columns(options)),
        body=body_format(options),
        bad_body=options["badBody"],
        body_bytes_max=options["bodyBytesMax"],
        subscription=None,
        fail_on_data_loss=options["failOnDataLoss"],
        fail_on_bad_property=options["badProperties"] == "fail",
        hidden=SET_FOR_ALL if options["properties"] == "own" else frozenset(),
    )


def read_plan(options: Options, schema: StructType) -> ReadPlan:
    """How executors read from brokers; without a subscription yet. Raises ConfigurationError."""
    return replace(
        decoding_plan(options, schema),
        group=options["group"] or TOOLS_GROUP,
        credentials=options.credentials,
        tls=options.tls,
        batch_bytes=options["batchBytes"],
        timeout_s=options["timeoutMs"] / 1000,
    )


def partitions_of(
    options: Options, ranges: list[QueueRange], addresses: Mapping[str, str]
) -> list[InputPartition]:
    """Spark's partitions of queue ranges: large ones split, at least one."""
    pieces = split_ranges(ranges, options["maxRecordsPerPartition"], options["minPartitions"])
    return [
        RangePartition(one.queue, one.start, one.end, addresses[one.queue.broker]) for one in pieces
    ] or nothing()


def nothing() -> list[InputPartition]:
    """One partition without rows: Spark would make one of its own out of none."""
    return [RangePartition(None, 0, 0, "")]


# ---- checkpoints


Anchors = dict[MessageQueue, Anchor]


def to_checkpoint(
    label: str,
    expression: str,
    offsets: Mapping[MessageQueue, int],
    *,
    several: bool = False,
    anchors: Anchors | None = None,
) -> dict[str, Any]:
    """Offsets as the JSON of the module's docstring; `several`: by topic."""
    found = {
        "version": CHECKPOINT_VERSION_TOPICS if several else CHECKPOINT_VERSION,
        "topic": label, "filter": expression, "queues": to_table(offsets, several=several),
    }  # fmt: skip
    seen = {queue: list(anchor[:2]) for queue, anchor in (anchors or {}).items()}
    return found | ({"seen": to_table(seen, several=several)} if seen else {})


def to_table(offsets: Mapping[MessageQueue, Any], *, several: bool) -> dict[str, Any]:
    """{"broker": {"queue id": offset}}, by topic first for several."""
    topics: dict[str, dict[str, dict[str, Any]]] = {}
    for queue, offset in sorted(offsets.items()):
        brokers = topics.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker, {})[str(queue.queue_id)] = offset
    return topics if several else next(iter(topics.values()), {})


def from_table(table: Mapping[str, Any]) -> Iterator[tuple[MessageQueue, Any]]:
    """The inverse of `to_table(…, several=True)`."""
    for topic, brokers in table.items():
        for broker, queues in brokers.items():
            for queue_id, value in queues.items():
                yield MessageQueue(topic, broker, int(queue_id)), value


def from_checkpoint(found: Mapping[str, Any], topic: str | None, part: str = "queues") -> Offsets:
    """The inverse. Raises ConfigurationError for another topic, or what is no such JSON.

    `topic` is None when several are read: the caller knows which may be there.
    """
    version = found.get("version")
    is_known = version in (CHECKPOINT_VERSION, CHECKPOINT_VERSION_TOPICS)
    if not is_known or not isinstance(found.get("queues"), dict):
        raise ConfigurationError(
            f"the checkpoint holds an offset of version {version!r}, not {CHECKPOINT_VERSION}.",
            fix="It is another source's or a newer SluiceMQ's: use another checkpointLocation.",
        )
    if topic is not None and (version != CHECKPOINT_VERSION or found.get("topic") != topic):
        raise other_topic(str(found.get("topic")), topic)
    return {queue: int(offset) for queue, offset in _part(found, part)}


def anchors_of(found: Mapping[str, Any]) -> Anchors:
    """The anchors of a checkpoint that `from_checkpoint` takes; none of an older version's."""
    return {queue: Anchor(offset, time_ms) for queue, (offset, time_ms) in _part(found, "seen")}


def _part(found: Mapping[str, Any], part: str) -> Iterator[tuple[MessageQueue, Any]]:
    table = found.get(part, {})
    is_single = found.get("version") == CHECKPOINT_VERSION
    return from_table({str(found.get("topic")): table} if is_single else table)


def other_topic(found: str, label: str) -> ConfigurationError:
    """The error for a checkpoint of a topic that the stream does not read."""
    return ConfigurationError(
        f"the checkpoint is of the topic {found!r}, the stream reads {label!r}.",
        fix="Use another checkpointLocation for another topic.",
    )
