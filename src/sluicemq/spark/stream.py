"""The streaming source: offsets, admission control, recovery.

Spark keeps one process with one reader for a running query and asks it, each trigger:

    latestOffset(start, limit)   where the micro-batch ends: all there is, or `limit` rows of it
    partitions(start, end)       its ranges; asked again after a restart, from the checkpoint
    commit(end)                  everything before `end` is done: committed to the consumer group

The offsets are exact positions in queues, so a micro-batch that is planned again after a failure
reads the same messages. What can go wrong is detected: retention that deleted messages before they
were read, a topic that was deleted and made anew (`topic_identity`), a checkpoint of another topic
or another filter. Two queries on one checkpoint are Spark's to notice: the second to write
the offsets of a micro-batch fails, or in one session stops the first. A queue that appears while
running is read from its first message; a broker that is away
keeps its queues' offsets until it is back.

Filters do not change offsets: messages that the broker leaves out count as read. Admission control
counts offsets, so with a filter a micro-batch may hold fewer rows.

An offset that equals the last one is given back as it came: Spark compares texts, and would make
empty micro-batches without end of two texts for one place.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from sluicemq.client.sync.admin import Admin
from sluicemq.errors import (
    ConfigurationError,
    FilterSyntaxError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.filter.subscriptions import tree_of
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.spark.cluster import (
    Bounds,
    announce_group,
    broker_addresses,
    check_selector,
    open_admin,
    queue_bounds,
    starting_offsets,
)
from sluicemq.spark.errors import plain_errors
from sluicemq.spark.filter_findings import tried_at_brokers, warn_of_filter
from sluicemq.spark.filters import Pushed, subscription_of
from sluicemq.spark.offsets import (
    Anchors,
    Offsets,
    QueueRange,
    admit,
    anchors_of,
    from_checkpoint,
    other_topic,
    place,
    to_checkpoint,
    to_table,
)
from sluicemq.spark.options import STREAM, Options, parse_options
from sluicemq.spark.outage import ride_out
from sluicemq.spark.plan import RangePartition, ReadPlan, partitions_of, read_plan
from sluicemq.spark.sizes import admit_bytes
from sluicemq.spark.topic_identity import TopicIdentity
from sluicemq.spark.topics import topics_of

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


def stream_reader(given: Mapping[str, str], schema: StructType) -> Any:
    """The reader for the Spark that runs. Never raises: see `FailedStream`."""
    try:
        return _made(parse_options(given, STREAM), schema)
    except SluiceError as error:
        return FailedStream(error)


def _made(options: Options, schema: StructType) -> Any:
    if SupportsTriggerAvailableNow is not None:
        return AdmittingStream(options, schema)
    for name in ("maxOffsetsPerTrigger", "maxBytesPerTrigger"):
        if options[name] is not None:
            raise ConfigurationError(
                f"the option {name!r} needs Spark 4.2 or later.",
                cure="Leave it out, or upgrade pyspark.",
            )
    return PlainStream(options, schema)


class FailedStream(DataSourceStreamReader):  # type: ignore[misc]
    """Stands for a reader that could not be made, and says why when it is first asked.

    pyspark 4.2 stops a reader whose making failed without having one, and reports that
    (python_streaming_source_runner, `finally: reader.stop()`) instead of the reason.
    """

    def __init__(self, error: SluiceError) -> None:
        self.error = error

    def _fail(self, *_: Any) -> Any:
        with plain_errors():
            raise self.error

    initialOffset = latestOffset = partitions = read = _fail  # noqa: N815 - Spark's names


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
        self._filter_change_told = False
        self._announced = False
        self._seen: Offsets = {}
        self._anchors: Anchors = {}
        self._told: dict[str, Any] | None = None
        label = self.topics.label
        found = subscription_of(label, options["filter.tags"], options["filter.sql"], Pushed())
        self.nothing_matches = found is None
        subscription, tags = found or (Subscription(label), None)
        self.plan = _with_subscription(read_plan(options, schema), subscription, tags)
        self.expression = f"{subscription.kind} {subscription.expression}"
        self.identity = TopicIdentity(self.plan.group, fails=options["failOnDataLoss"])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_admin": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        with plain_errors():
            bounds, offsets = self._ask(self._initial, is_first=True)
            stored = {queue: (lowest, offsets[queue]) for queue, (lowest, _) in bounds.items()}
            anchors = self._ask(self.identity.anchored, {}, stored)
            return self._checkpoint(offsets, anchors) | {"initial": True}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        with plain_errors():
            begins, ends = self._offsets(start), self._offsets(end)
            new = self._offsets(end, "from")
            begins |= new
            moved = {queue: stop for queue, stop in ends.items() if stop > begins.get(queue, -1)}
            if not moved or self.nothing_matches:
                return []
            before = {queue: one for queue, one in anchors_of(start).items() if queue not in new}
            # What this process has just told needs no second look.
            anchors = () if end == self._told else (anchors_of(end), before)
            return self._ask(self._planned, begins, moved, anchors)

    def read(self, partition: RangePartition) -> Any:
        from sluicemq.spark.reader import read_range  # noqa: PLC0415 - heavy, executors only

        with plain_errors():
            yield from read_range(self.plan, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Tells the consumer group how far the job is, when the option `group` names one."""
        group = self.options["group"]
        if group is None:
            return
        try:
            offsets = self._offsets(end)
            if not self._announced:
                topics = sorted({queue.topic for queue in offsets})
                self._ask(lambda admin: announce_group(admin, group, topics))
                self._announced = True
            self._ask(lambda admin: _commit(admin, group, offsets))
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

    def _initial(self, admin: Admin) -> tuple[Bounds, Offsets]:
        bounds = queue_bounds(admin, self.topics.found(admin))
        return bounds, starting_offsets(admin, self.options, bounds, "latest")

    def _offsets(self, found: Mapping[str, Any], part: str = "queues") -> Offsets:
        """Offsets of a checkpoint. Raises ConfigurationError for another topic or filter."""
        label = self.topics.label
        offsets = from_checkpoint(found, None if self.several else label, part)
        for queue in offsets:
            if not self.topics.has(queue.topic):
                raise other_topic(queue.topic, label)
        written = found.get("filter")
        if not self._filter_change_told and not _is_same_filter(written, self.expression):
            if self.options["onFilterChange"] == "fail":
                raise ConfigurationError(
                    f"the checkpoint was written with the filter {written!r}, the stream has"
                    f" {self.expression!r}.",
                    cure="Use another checkpointLocation, or onFilterChange=continue.",
                )
            logger.warning("the filter was %r, it is %r from now on", written, self.expression)
            self._filter_change_told = True
        return offsets

    def _latest(
        self,
        start: Offsets,
        anchors: Anchors,
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> "_Step":
        """The next micro-batch; `start` may lack new queues."""
        bounds = self._ask(self._bounds)
        begins = {queue: lowest for queue, (lowest, _) in bounds.items()}
        for queue in set(start) & set(bounds):
            begins[queue] = self._ask(
                self.identity.resumed, queue, start[queue], bounds[queue], anchors.get(queue)
            )
        ends = {queue: highest for queue, (_, highest) in bounds.items()}
        if self.target is not None:
            ends = {
                queue: min(ends[queue], stop)
                for queue, stop in self.target.items()
                if queue in ends
            }
        if bytes_max is not None:
            group, limit = self.plan.group, bytes_max
            ends = self._ask(lambda admin: admit_bytes(admin, group, begins, ends, limit))
        ends = start | admit(begins, ends, rows_max)
        anew = {queue for queue, begin in begins.items() if start.get(queue, begin) != begin}
        moved = {
            queue: (bounds[queue][0], end)
            for queue, end in ends.items()
            if queue in bounds and (queue in anew or start.get(queue) != end)
        }
        kept = {queue: anchor for queue, anchor in anchors.items() if queue not in anew}
        return _Step(begins, ends, self._ask(self.identity.anchored, kept, moved), anew)

    def _bounds(self, admin: Admin) -> Bounds:
        topics = self.topics.found(admin)
        if not self._selector_checked and self.plan.subscription is not None:
            if self.plan.subscription.kind == SQL92:
                expression = self.plan.subscription.expression
                check_selector(admin, topics, self.plan.group, expression)
            sql = self.options["filter.sql"]
            warn_of_filter(sql, lambda text: tried_at_brokers(admin, topics, text))
            self._selector_checked = True
        return queue_bounds(admin, topics)

    def _planned(
        self, admin: Admin, begins: Offsets, ends: Offsets, anchors: Sequence[Anchors]
    ) -> list[InputPartition]:
        addresses = broker_addresses(admin, sorted({queue.topic for queue in ends}))
        ranges = []
        for queue, end in sorted(ends.items()):
            if queue.broker not in addresses:
                raise RouteNotFoundError(
                    f"the broker of {place(queue)} is not in the route of {queue.topic!r}.",
                    cure="Start it again; the stream continues where it was.",
                )
            bound = admin.offsets(queue)
            one = QueueRange(queue, begins.get(queue, bound[0]), end)
            known = [of.get(queue) for of in anchors]
            ranges.append(self.identity.left_of(admin, one, bound, known))
        return partitions_of(self.options, ranges, addresses)

    def _checkpoint(self, offsets: Offsets, anchors: Anchors | None = None) -> dict[str, Any]:
        return to_checkpoint(
            self.topics.label, self.expression, offsets, several=self.several, anchors=anchors
        )

    def _ended(self, known: Offsets, step: "_Step") -> dict[str, Any]:
        """The checkpoint of a micro-batch's end, with `from` where one before does not tell it."""
        untold = {
            queue: begin
            for queue, begin in step.begins.items()
            if queue in step.ends and (queue not in known or queue in step.anew)
        }
        told = {"from": to_table(untold, several=self.several)} if untold else {}
        return self._checkpoint(step.ends, step.anchors) | told


def _is_same_filter(written: Any, now: str) -> bool:
    """Whether two filters of checkpoints mean the same: of SQL92 the trees are compared, since
    texts were joined in another way once."""
    if written == now:
        return True
    parted = [str(one).partition(" ") for one in (written, now)]
    try:
        trees = [tree_of(Subscription("", text, kind)) for kind, _, text in parted if kind == SQL92]
    except FilterSyntaxError:
        return False
    return len(trees) == 2 and trees[0] == trees[1]


class _Step(NamedTuple):
    """A micro-batch: where its queues begin and end, the anchors then, and which were made anew."""

    begins: Offsets
    ends: Offsets
    anchors: Anchors
    anew: Collection[MessageQueue]


def _commit(admin: Admin, group: str, offsets: Offsets) -> None:
    for queue, offset in offsets.items():
        admin.commit_offset(group, queue, offset)


def _with_subscription(
    plan: ReadPlan, subscription: Subscription, tags: frozenset[str] | None
) -> ReadPlan:
    return replace(plan, subscription=subscription, tags=tags)


class PlainStream(StreamReader):
    """For Spark 4.1: every micro-batch takes all there is.

    Spark does not tell it where the micro-batch begins, so it remembers the queues it has seen.
    """

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        with plain_errors():
            step = self._latest(self._seen, self._anchors)
            self._seen, self._anchors = step.ends, step.anchors
            return self._ended(step.ends, step)

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
                self._told = self._ended({} if start.get("initial") else known, step)
                return self._told

        def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
            with plain_errors():
                bounds = self._ask(self._bounds)
                return self._checkpoint({queue: highest for queue, (_, highest) in bounds.items()})

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
            """From now on nothing that comes later is read."""
            with plain_errors():
                bounds = self._ask(self._bounds)
                self.target = {queue: highest for queue, (_, highest) in bounds.items()}
