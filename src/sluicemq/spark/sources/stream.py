"""The streaming source: offsets, admission control, recovery.

Spark keeps one process with one reader for a running query and asks it, each trigger:

    latestOffset(start, limit)   where the micro-batch ends: all there is, or `limit` rows of it
    partitions(start, end)       its ranges; asked again after a restart, from the checkpoint
    commit(end)                  everything before `end` is done: committed to the consumer group

The offsets are exact positions in queues, so a micro-batch that is planned again after a failure
reads the same messages. What can go wrong is detected: retention that deleted messages before they
were read, a topic that was deleted and created again, queues and topics that disappeared
(`identity`), a checkpoint of another topic or another filter. Two queries on one checkpoint are
Spark's to notice: the second to write the offsets of a micro-batch fails, or in one session stops
the first. A queue that appears while running is read from its first message; a broker that is away
keeps its queues' offsets until it is back.

Filters do not change offsets: messages that the broker leaves out count as read. Admission control
counts offsets, so with a filter a micro-batch may hold fewer rows.

**Bytes** (the option `maxBytesPerTrigger`). No request of RocketMQ tells the bytes of a range, so
the mean stored size is taken from samples of up to 32 messages: where the micro-batch would begin,
then in the middle and at the end of what that first guess allows, and again while the guess still
shrinks. Sizes that change slowly are met within some per cent; a queue whose messages alternate
between small and large by thousands is not. Each queue moves by one message at least.

An offset that equals the last one is given back as it came: Spark compares texts, and would make
empty micro-batches without end of two texts for one place.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from sluicemq.client.core import requests
from sluicemq.client.core.requests import PullResponse, PullStatus, parse_pull_response
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import (
    ConfigurationError,
    FilterSyntaxError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.filter.subscriptions import tree_of
from sluicemq.model.subscription import ALL, SQL92, Subscription
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue
from sluicemq.spark.errors import plain_errors, ride_out
from sluicemq.spark.filters import Pushed, subscription_of, tried_at_brokers, warn_of_filter
from sluicemq.spark.options import STREAM, Options, parse_options
from sluicemq.spark.sources.identity import (
    TopicIdentity,
    bounds_of,
    gone_queues,
    set_anchors,
)
from sluicemq.spark.sources.offsets import (
    Anchors,
    Bounds,
    Offsets,
    QueueRange,
    RangePartition,
    anchors_of,
    broker_addresses,
    check_selector,
    from_checkpoint,
    open_admin,
    other_topic,
    partitions_of,
    place,
    queue_bounds,
    read_plan,
    starting_offsets,
    to_checkpoint,
    to_table,
    topics_of,
)
from sluicemq.wire.bodies import CONSUME_ACTIVELY, ConsumerData, Heartbeat

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark 4.1: no admission control
    SupportsTriggerAvailableNow = None

logger = logging.getLogger(__name__)
T = TypeVar("T")
SAMPLE_MESSAGES: Final = 32
SAMPLE_BYTES: Final = 256 * 1024
ROUNDS_MAX: Final = 4


def _pulled(
    admin: Admin, group: str, queue: MessageQueue, offset: int, count_max: int, bytes_max: int
) -> PullResponse | None:
    """Messages from `offset` on; None when there are none."""
    command = requests.pull(
        group, queue, offset, count_max=count_max, bytes_max=bytes_max,
        subscription=Subscription(queue.topic, ALL),
    )  # fmt: skip
    address = admin.address(queue)
    answer = parse_pull_response(admin.call(address, command), address)
    return answer if answer.status is PullStatus.FOUND else None


# ---- admission


def admit(start: Mapping[MessageQueue, int], latest: Offsets, rows_max: int | None) -> Offsets:
    """The end of the next micro-batch: `latest`, or as much of it as `rows_max` allows.

    The limit is shared by lag (largest remainders), so every queue with a lag moves over time and
    the sum never exceeds it. A queue never goes back.
    """
    shares = {queue: max(0, end - start.get(queue, 0)) for queue, end in latest.items()}
    total = sum(shares.values())
    if rows_max is not None and total > rows_max:
        lags = shares
        shares = {queue: rows_max * lag // total for queue, lag in lags.items()}
        left = rows_max - sum(shares.values())
        by_remainder = sorted(lags, key=lambda queue: (-(rows_max * lags[queue] % total), queue))
        for queue in by_remainder[:left]:
            shares[queue] += 1
    return {queue: start.get(queue, 0) + share for queue, share in shares.items()}


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
    answer = _pulled(admin, group, queue, offset, SAMPLE_MESSAGES, SAMPLE_BYTES)
    if answer is None:
        return 0.0
    return len(answer.data) / max(1, answer.next_offset - offset)


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


# ---- the readers


def stream_reader(given: Mapping[str, str], schema: StructType) -> Any:
    """The reader for the Spark that runs. Never raises: see `FailedStream`."""
    try:
        options = parse_options(given, STREAM)
        if SupportsTriggerAvailableNow is not None:
            return AdmittingStream(options, schema)
        for name in ("maxOffsetsPerTrigger", "maxBytesPerTrigger"):
            if options[name] is not None:
                raise ConfigurationError(
                    f"the option {name!r} needs Spark 4.2 or later.",
                    fix="Leave it out, or upgrade pyspark.",
                )
        return PlainStream(options, schema)
    except SluiceError as error:
        return FailedStream(error)


class FailedStream(DataSourceStreamReader):  # type: ignore[misc]
    """Stands for a reader that could not be made, and says why when it is first asked.

    pyspark 4.2 stops a reader whose making failed without having one, and reports that
    (python_streaming_source_runner, `finally: reader.stop()`) instead of the reason.
    """

    def __init__(self, error: SluiceError) -> None:
        self.error = error

    def initialOffset(self, *_: Any) -> Any:  # noqa: N802 - Spark's name
        with plain_errors():
            raise self.error

    latestOffset = partitions = read = initialOffset  # noqa: N815


class _Step(NamedTuple):
    """A micro-batch: where its queues begin and end, the anchors then, and which were made anew."""

    begins: Offsets
    ends: Offsets
    anchors: Anchors
    anew: Collection[MessageQueue]


class StreamReader(DataSourceStreamReader):  # type: ignore[misc]
    """What both versions share. `_ask` holds the connections of the driver's process."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.topics = topics_of(options)
        self.several = self.topics.pattern is not None or len(self.topics.names) > 1
        options.required("nameServers")
        self.target: Offsets | None = None
        self._admin: Admin | None = None
        self._selector_checked = False
        self._filter_change_logged = False
        self._announced = False
        self._seen: Offsets = {}
        self._anchors: Anchors = {}
        self._planned_end: dict[str, Any] | None = None
        label = self.topics.label
        found = subscription_of(label, options["filter.tags"], options["filter.sql"], Pushed())
        self.nothing_matches = found is None
        subscription, tags = found or (Subscription(label), None)
        self.plan = replace(read_plan(options, schema), subscription=subscription, tags=tags)
        self.expression = f"{subscription.kind} {subscription.expression}"
        self.identity = TopicIdentity(self.plan.group, fails=options["failOnDataLoss"])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_admin": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        def initial(admin: Admin) -> tuple[Bounds, Offsets]:
            bounds = queue_bounds(admin, self.topics.found(admin))
            return bounds, starting_offsets(admin, self.options, bounds, "latest")

        with plain_errors():
            bounds, offsets = self._ask(initial, is_first=True)
            stored = {queue: (lowest, offsets[queue]) for queue, (lowest, _) in bounds.items()}
            anchors = self._ask(self.identity.renew_anchors, {}, stored)
            return self._checkpoint(offsets, anchors) | {"initial": True}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        def planned(admin: Admin) -> list[InputPartition]:
            bounds, _ = bounds_of(admin, sorted({queue.topic for queue in moved}))
            gone = gone_queues(admin, moved, bounds)
            self.identity.check_gone(gone)
            there = {queue: stop for queue, stop in moved.items() if queue not in gone}
            addresses = broker_addresses(admin, sorted({queue.topic for queue in there}))
            ranges = []
            for queue, stop in sorted(there.items()):
                if queue.broker not in addresses:
                    raise RouteNotFoundError(
                        f"the broker of {place(queue)} is not in the route of {queue.topic!r}.",
                        fix="Start it again; the stream continues where it was.",
                    )
                bound = admin.offsets(queue)
                one = QueueRange(queue, begins.get(queue, bound[0]), stop)
                known = [of.get(queue) for of in anchors]
                ranges.append(self.identity.remaining_range(admin, one, bound, known))
            parts = partitions_of(self.options, ranges, addresses)
            return list(set_anchors(parts, anchors_of(end), is_batch=False))

        with plain_errors():
            begins, ends = self._offsets(start), self._offsets(end)
            new = self._offsets(end, "from")
            begins |= new
            moved = {queue: stop for queue, stop in ends.items() if stop > begins.get(queue, -1)}
            if not moved or self.nothing_matches:
                return []
            before = {queue: one for queue, one in anchors_of(start).items() if queue not in new}
            # What this process has just planned needs no second look.
            anchors = () if end == self._planned_end else (anchors_of(end), before)
            return self._ask(planned)

    def read(self, partition: RangePartition) -> Any:
        from sluicemq.spark.sources.reader import read_range  # noqa: PLC0415 - executors only

        with plain_errors():
            yield from read_range(self.plan, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Tells the consumer group how far the job is, when the option `group` names one."""
        group = self.options["group"]
        if group is None:
            return

        def commit_all(admin: Admin) -> None:
            for queue, offset in offsets.items():
                admin.commit_offset(group, queue, offset)

        try:
            offsets = self._offsets(end)
            if not self._announced:
                self._ask(announce_group, group, sorted({queue.topic for queue in offsets}))
                self._announced = True
            self._ask(commit_all)
        except SluiceError as error:
            logger.warning("offsets are not committed to the group %r: %s", group, error)

    def stop(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _ask(self, work: Callable[..., T], *of: Any, is_first: bool = False) -> T:
        """Does `work(admin, *of)`, through an outage of up to timeoutMs unless the stream has never
        been there; connections are made anew after each failure."""

        def attempt() -> T:
            if self._admin is None:
                self._admin = open_admin(self.options)
            try:
                return work(self._admin, *of)
            except SluiceError:
                self.stop()
                raise

        return attempt() if is_first else ride_out(attempt, self.plan.timeout_s)

    def _offsets(self, found: Mapping[str, Any], part: str = "queues") -> Offsets:
        """Offsets of a checkpoint. Raises ConfigurationError for another topic or filter."""
        label = self.topics.label
        offsets = from_checkpoint(found, None if self.several else label, part)
        for queue in offsets:
            if not self.topics.has(queue.topic):
                raise other_topic(queue.topic, label)
        written = found.get("filter")
        is_same = written == self.expression
        if not is_same and not self._filter_change_logged:
            # Of SQL92 the trees are compared, since texts were joined in another way once.
            parted = [str(one).partition(" ") for one in (written, self.expression)]
            with suppress(FilterSyntaxError):
                trees = [tree_of(Subscription("", text, kind)) for kind, _, text in parted
                         if kind == SQL92]  # fmt: skip
                is_same = len(trees) == 2 and trees[0] == trees[1]
        if not is_same and not self._filter_change_logged:
            if self.options["onFilterChange"] == "fail":
                raise ConfigurationError(
                    f"the checkpoint was written with the filter {written!r}, the stream has"
                    f" {self.expression!r}.",
                    fix="Use another checkpointLocation, or onFilterChange=continue.",
                )
            logger.warning("the filter was %r, it is %r from now on", written, self.expression)
            self._filter_change_logged = True
        return offsets

    def _latest(
        self,
        start: Offsets,
        anchors: Anchors,
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> _Step:
        """The next micro-batch; `start` may lack new queues."""
        bounds, gone = self._ask(self._look_around, start)
        start = {queue: offset for queue, offset in start.items() if queue not in gone}
        anchors = {queue: anchor for queue, anchor in anchors.items() if queue not in gone}
        begins = {queue: lowest for queue, (lowest, _) in bounds.items()}
        for queue in (one for one in start if one in bounds):  # the order of the checkpoint
            begins[queue] = self._ask(
                self.identity.resume_offset, queue, start[queue], bounds[queue], anchors.get(queue)
            )
        self.identity.warn()
        ends = {queue: highest for queue, (_, highest) in bounds.items()}
        if self.target is not None:
            ends = {
                queue: min(ends[queue], stop)
                for queue, stop in self.target.items()
                if queue in ends
            }
        if bytes_max is not None:
            ends = self._ask(admit_bytes, self.plan.group, begins, ends, bytes_max)
        ends = start | admit(begins, ends, rows_max)
        anew = {queue for queue, begin in begins.items() if start.get(queue, begin) != begin}
        moved = {
            queue: (bounds[queue][0], end)
            for queue, end in ends.items()
            if queue in bounds and (queue in anew or start.get(queue) != end)
        }
        kept = {queue: anchor for queue, anchor in anchors.items() if queue not in anew}
        return _Step(begins, ends, self._ask(self.identity.renew_anchors, kept, moved), anew)

    def _look_around(self, admin: Admin, known: Offsets) -> tuple[Bounds, Offsets]:
        """The bounds of every queue that there is, and the queues of `known` that disappeared.
        Raises OffsetOutOfRangeError for these if loss is an error, RouteNotFoundError for a listed
        topic that was never read, and for one whose broker is away."""
        bounds, missing = self._bounds(admin)
        gone = gone_queues(admin, known, bounds)
        self.identity.check_gone(gone)
        for topic in missing:
            queues = {queue for queue in known if queue.topic == topic}
            if not queues <= gone.keys() or (not queues and self.options["failOnDataLoss"]):
                admin.route(topic)  # raises, and says why
        return bounds, gone

    def _bounds(self, admin: Admin) -> tuple[Bounds, list[str]]:
        """The bounds of every queue that there is, and the listed topics that there are not."""
        topics = self.topics.found(admin, may_be_none=True)
        bounds, missing = bounds_of(admin, topics)
        there = [topic for topic in topics if topic not in missing]
        if there and not self._selector_checked and self.plan.subscription is not None:
            if self.plan.subscription.kind == SQL92:
                expression = self.plan.subscription.expression
                check_selector(admin, there, self.plan.group, expression)
            sql = self.options["filter.sql"]
            warn_of_filter(sql, lambda text: tried_at_brokers(admin, there, text))
            self._selector_checked = True
        return bounds, missing

    def _checkpoint(self, offsets: Offsets, anchors: Anchors | None = None) -> dict[str, Any]:
        return to_checkpoint(
            self.topics.label, self.expression, offsets, several=self.several, anchors=anchors
        )

    def _end_of(self, known: Offsets, step: _Step) -> dict[str, Any]:
        """The checkpoint of a micro-batch's end, with `from` where the one before says nothing."""
        unknown = {
            queue: begin
            for queue, begin in step.begins.items()
            if queue in step.ends and (queue not in known or queue in step.anew)
        }
        begins = {"from": to_table(unknown, several=self.several)} if unknown else {}
        return self._checkpoint(step.ends, step.anchors) | begins


class PlainStream(StreamReader):
    """For Spark 4.1: every micro-batch takes all there is.

    Spark does not tell it where the micro-batch begins, so it remembers the queues it has seen.
    """

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        with plain_errors():
            step = self._latest(self._seen, self._anchors)
            self._seen, self._anchors = step.ends, step.anchors
            return self._end_of(step.ends, step)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        with plain_errors():
            self._seen = self._offsets(start) | self._seen
            self._anchors = anchors_of(start) | self._anchors
        return super().partitions(start, end)


if SupportsTriggerAvailableNow is not None:

    class AdmittingStream(StreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
        """For Spark 4.2 and later: admission control, Trigger.AvailableNow, progress."""

        def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
            rows_max = self.options["maxOffsetsPerTrigger"]
            bytes_max = self.options["maxBytesPerTrigger"]
            if rows_max is not None:
                return ReadMaxRows(rows_max)
            return ReadAllAvailable() if bytes_max is None else ReadMaxBytes(bytes_max)

        def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802
            with plain_errors():
                is_limited = not isinstance(limit, ReadAllAvailable)
                rows_max = getattr(limit, "max_rows", None)
                bytes_max = self.options["maxBytesPerTrigger"] if is_limited else None
                known = self._offsets(start)
                step = self._latest(known, anchors_of(start), rows_max, bytes_max)
                if step.ends == known and not step.anew:
                    return start
                self._planned_end = self._end_of({} if start.get("initial") else known, step)
                return self._planned_end

        def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
            with plain_errors():
                bounds, _ = self._ask(self._bounds)
                return self._checkpoint({queue: highest for queue, (_, highest) in bounds.items()})

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
            """From now on nothing that comes later is read."""
            with plain_errors():
                bounds, _ = self._ask(self._bounds)
                self.target = {queue: highest for queue, (_, highest) in bounds.items()}
