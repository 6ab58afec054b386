"""The data sources `rocketmq` and `rocketmq_store`: what Spark asks first, batch readers, sinks.

Spark finds them by name through the modules `pyspark_rocketmq` and `pyspark_rocketmq_store` (their
`DefaultSource`). Facts on the Python Data Source API and its limits: spec/spark.md.

A batch read, step by step, with the process it happens in:

    planner   DataSource.schema()          option `columns` or the user's schema
    planner   DataSource.reader()          option `predicates` -> `filters.FilterPushdown`
    planner   BatchReader.partitions()     bounds from brokers or store -> ranges -> partitions
    executor  BatchReader.read()           `reader.read_range`, `reader.read_part`

There is no `pushFilters` on purpose. Spark keeps what it makes of one use of a DataFrame for the
next one, with the predicates of the first (design/0010). Predicates
come as an option of the load that they are for: `references`.

`rocketmq_store` reads messages out of a store directory, without a broker. Driver and executors
have to see it under the same name. Everything but the place is as in `rocketmq` and shared with it:
options, columns, bodies, types of properties, predicates. Its snapshot is taken once, while Spark
plans; what retention removes before a task comes to it is an error of that task, unless
`failOnDataLoss=false`.

**The sink**: `df.write` and `writeStream`, at least once or exactly once. Its columns:

| column | type | |
|---|---|---|
| body, or value | binary or string | required |
| topic | string | where the option `topic` is not given |
| tags, or tag | string | |
| keys | string or array<string> | |
| properties | map<string,string> | names that producer and broker set themselves are left out |
| queue_id | int | of the topic's first broker that has it; otherwise queues take turns |
| broker | string | with queue_id: the broker whose queue it is |
| flag | int | the number that the producer gives a message; null is 0 |
| sharding_key | string | rows with the same key go to the same queue, in order |
| delay_level, delay_ms, deliver_at | int, bigint, timestamp | when it is delivered; one of them |
| message_id | string | its unique id; null, or no column: a new one |
| system_properties | map<string,string> | properties with reserved names, as replays need them |

Further columns of the source (queue_offset, msg_id, times) are ignored, so what was read can be
written; any other column is an error. `rows.as_new` decides what the properties of a row that was
read mean for the message that is written.

At least once: each task sends batches and waits for the broker's answers; the job succeeds when
every batch is stored. A task that Spark runs again sends its rows again.

Exactly once (design/0007): tasks stage, the driver commits the epoch, which is the micro-batch
of a stream, or the whole of a batch. Spark calls from several processes, and what they have to know
travels in the sink and in the commit messages:

    planner    __init__          do the brokers have epochs?
    executor   write             stage (`senders`)               -> `Sent`: ranges, query, epoch
    planner    commit            `client.core.epochs` with all the ranges
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from sluicemq.client.core.epochs import EpochCommitter, is_unknown_request, make_commit_request
from sluicemq.client.core.requests import expect_success
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import (
    ConfigurationError,
    ProtocolError,
    RequestError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.hints import did_you_mean
from sluicemq.model.subscription import SQL92
from sluicemq.spark.errors import keep_imports, plain_errors, ride_out
from sluicemq.spark.filters import (
    MESSAGES_MAX,
    FilterPushdown,
    attribute_of,
    predicates_of,
    report_pushdown,
    subscription_of,
    tried_at_brokers,
    tried_here,
    warn_of_filter,
)
from sluicemq.spark.options import DECLARED, EXACTLY_ONCE, READ, WRITE, Options, parse_options
from sluicemq.spark.schema import BASE, EXTRA, declared_columns, settled, struct_type
from sluicemq.spark.sources.identity import anchors_at_end, existing_topics, set_anchors
from sluicemq.spark.sources.offsets import (
    RangePartition,
    ReadPlan,
    broker_addresses,
    check_selector,
    decoding_plan,
    ending_offsets,
    evaluates_selectors,
    narrowed,
    narrowed_by_keys,
    newest_properties,
    nothing,
    open_admin,
    partitions_of,
    queue_bounds,
    read_plan,
    starting_offsets,
    topics_of,
)
from sluicemq.wire.frames import Command
from sluicemq.wire.staging import StagedRange, check_query

logger = logging.getLogger(__name__)


class RocketSource(DataSource):  # type: ignore[misc]
    """`spark.read.format("rocketmq")`, `readStream`, `df.write` and `writeStream`."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> StructType:
        with plain_errors():
            options = parse_options(self.options)
            return struct_type(settled(declared_columns(options), options, newest_properties))

    def reader(self, schema: StructType) -> DataSourceReader:
        with plain_errors():
            return BatchReader(parse_options(self.options, READ), schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        from sluicemq.spark.sources.stream import stream_reader  # noqa: PLC0415 - streams only

        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        with plain_errors():
            return BatchSink(parse_options(self.options, WRITE), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        with plain_errors():
            return StreamSink(parse_options(self.options, WRITE), schema, overwrite=overwrite)


class StoreSource(DataSource):  # type: ignore[misc]
    """`spark.read.format("rocketmq_store")`; only batch reads."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq_store"

    def schema(self) -> StructType:
        def look(options: Options) -> Iterator[Mapping[str, str]]:
            from sluicemq.spark.sources import reader  # noqa: PLC0415 - heavy

            return reader.newest_properties(options)

        with plain_errors():
            options = parse_options(self.options, READ, DECLARED)
            return struct_type(settled(declared_columns(options), options, look))

    def reader(self, schema: StructType) -> DataSourceReader:
        with plain_errors():
            return StoreBatchReader(parse_options(self.options, READ, DECLARED), schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        from sluicemq.spark.sources.stream import FailedStream  # noqa: PLC0415 - streams only

        return FailedStream(
            ConfigurationError(
                "rocketmq_store reads a directory as it stands; it is no stream.",
                fix='Use spark.read, or readStream.format("rocketmq") at the broker.',
            )
        )

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        with plain_errors():
            raise ConfigurationError(
                "rocketmq_store only reads: a store has one writer, its broker.",
                fix='Use write.format("rocketmq"), which sends to the broker.',
            )

    streamWriter = writer  # noqa: N815 - Spark's name


class BatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads from fixed offsets to fixed offsets. `offered` predicates are at the reader's choice,
    `left` of them are those that it does not decide."""

    decider: ClassVar = "the broker"

    def __init__(self, options: Options, schema: StructType) -> None:
        """All is settled here but the ranges: `partitions` comes when Spark has pickled the reader.
        Asks the brokers when predicates may become a selector."""
        self.options = options
        self.topics = topics_of(options)
        self.plan = self.make_plan(schema)
        self.offered = predicates_of(options["predicates"]) if options["pushFilters"] else []
        pushdown = FilterPushdown(
            self.plan.columns, selectors_allowed=self.selectors_allowed(self.offered)
        )
        self.left = pushdown.take_all(self.offered)
        self.pushed = pushdown.pushed
        if options["reportPushdown"]:
            report_pushdown(self.topics.label, self.pushed, self.offered, self.left, self.decider)
        found = subscription_of(
            self.topics.label, options["filter.tags"], options["filter.sql"], self.pushed
        )
        self.nothing_matches = found is None
        if found is not None:
            self.plan = replace(self.plan, subscription=found[0], tags=found[1])

    def make_plan(self, schema: StructType) -> ReadPlan:
        """How executors read; without a subscription yet. Raises ConfigurationError."""
        return read_plan(self.options, schema)

    def selectors_allowed(self, predicates: list[Any]) -> bool:
        """Asked of the brokers only when there is something to select by."""
        named = {path[0] for one in predicates if (path := attribute_of(one))}
        selectable = {"keys"} | {
            column.name for column in self.plan.columns if column.property_name is not None
        }
        if not named & selectable:
            return False
        with open_admin(self.options) as admin:
            return evaluates_selectors(admin, self.topics.found(admin), self.plan.group)

    def partitions(self) -> list[InputPartition]:
        with plain_errors():
            return nothing() if self.nothing_matches else self.planned()

    def planned(self) -> list[InputPartition]:
        """Where the messages are that a read has to look at."""
        with open_admin(self.options) as admin:
            fails = self.options["failOnDataLoss"]
            topics = existing_topics(admin, self.topics.found(admin), fails=fails)
            subscription = self.plan.subscription
            if subscription is not None and subscription.kind == SQL92:
                check_selector(admin, topics, self.plan.group, subscription.expression)
            sql = self.options["filter.sql"]
            warn_of_filter(sql, lambda text: tried_at_brokers(admin, topics, text))
            bounds = queue_bounds(admin, topics)
            start = starting_offsets(admin, self.options, bounds, "earliest")
            end = ending_offsets(admin, self.options, bounds)
            ranges = narrowed(admin, start, end, self.pushed)
            addresses = broker_addresses(admin, topics)
            if self.pushed.keys:
                ranges = narrowed_by_keys(admin, ranges, self.pushed.keys, addresses)
            anchors = anchors_at_end(admin, self.plan.group, ranges)
            parts = partitions_of(self.options, ranges, addresses)
            return list(set_anchors(parts, anchors, is_batch=True))

    def read(self, partition: RangePartition) -> Iterator[Any]:
        from sluicemq.spark.sources.reader import read_range  # noqa: PLC0415 - executors only

        with plain_errors():
            yield from read_range(self.plan, partition)


class StoreBatchReader(BatchReader):
    """Reads ranges of queues out of a directory."""

    decider = "the reader of the store"

    def make_plan(self, schema: StructType) -> ReadPlan:
        from sluicemq.spark.sources.reader import StorePlace  # noqa: PLC0415 - heavy

        self.place = StorePlace.of(self.options)
        return decoding_plan(self.options, schema)

    def selectors_allowed(self, _predicates: list[Any]) -> bool:
        return True

    def planned(self) -> list[InputPartition]:
        from sluicemq.spark.sources.reader import snapshot  # noqa: PLC0415 - heavy

        place, sql = self.place, self.options["filter.sql"]
        with snapshot(self.options) as seen:
            seen.check_damage(is_fatal=self.options["failOnDataLoss"])
            start = starting_offsets(seen, self.options, seen.bounds, "earliest")
            end = ending_offsets(seen, self.options, seen.bounds)
            ranges = narrowed(seen, start, end, self.pushed)
            newest = seen.newest_properties(MESSAGES_MAX)
            warn_of_filter(sql, lambda text: tried_here(list(newest), text))
            parts = partitions_of(self.options, ranges, {place.broker: place.root})
            return list(map(seen.with_tail, parts))

    def read(self, partition: RangePartition) -> Iterator[Any]:
        from sluicemq.spark.sources.reader import (  # noqa: PLC0415 - heavy
            StorePartition,
            read_part,
        )

        with plain_errors():
            if isinstance(partition, StorePartition):
                check = self.options["checkBodies"]
                yield from read_part(self.place, self.plan, partition, check_bodies=check)


# ---- the sink

_INTEGERS: Final = ("int", "bigint", "smallint", "tinyint")
_TYPES: Final = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "queue_id": _INTEGERS,
    "broker": ("string",),
    "flag": _INTEGERS,
    "sharding_key": ("string",),
    "delay_level": _INTEGERS,
    "delay_ms": _INTEGERS,
    "deliver_at": ("timestamp",),
    "message_id": ("string",),
    "system_properties": ("map<string,string>",),
}
_ROLES: Final = {role: role for role in _TYPES} | {"value": "body", "tag": "tags"}
"""What a column of this name means."""
ROUTE_CHECKS: Final = 100
ROUTE_CHECK_S: Final = 0.05
PROBE: Final = "probe"


@dataclass(frozen=True)
class Sent(WriterCommitMessage):  # type: ignore[misc]
    """What one task reports: messages stored, and rows that were bad; of a task that staged them,
    where, and for what."""

    messages: int
    bad: int = 0
    query: str = ""
    epoch: int = 0
    topics: tuple[str, ...] = ()
    ranges: tuple[StagedRange, ...] = ()


def roles_of(schema: StructType, options: Options) -> dict[str, str]:
    """Role -> column. Raises ConfigurationError naming the column that is missing or wrong."""
    roles: dict[str, str] = {}
    for one in schema.fields:
        name, found = one.name.lower(), one.dataType.simpleString()
        role = _ROLES.get(name)
        if role is None and name in BASE | EXTRA:
            continue
        if role is None:
            raise ConfigurationError(
                f"the column {one.name!r} cannot be written.",
                fix=f"{did_you_mean(name, _ROLES)} A message has {', '.join(_ROLES)}; put further"
                " values into properties.".lstrip(),
            )
        if role in roles:
            raise ConfigurationError(
                f"the columns {roles[role]!r} and {one.name!r} both mean the {role}.",
                fix="Keep one of them.",
            )
        if found not in _TYPES[role]:
            raise ConfigurationError(
                f"the column {one.name!r} has the type {found!r}.",
                fix=f"Cast it to {' or '.join(_TYPES[role])}.",
            )
        roles[role] = one.name
    if "body" not in roles:
        raise ConfigurationError(
            "there is no column 'body' or 'value'.",
            fix="Name the bytes to send, for example to_json(struct(*)) as value.",
        )
    if "topic" not in roles:
        options.required("topic")
    return roles


class _Sink:
    """What both sinks share. Checked on the driver when the query is planned."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise ConfigurationError("a topic cannot be overwritten.", fix='Use mode("append").')
        self.options = options
        self.roles = roles_of(schema, options)
        self.query: str | None = None
        self.brokers: tuple[str, ...] = ()
        self.is_exact = options["delivery"] == EXACTLY_ONCE
        """Asked for; `brokers` says whether it can be had."""
        self.check_topics()

    def check_topics(self) -> None:
        """Reaches the name server now, not first in every task. Sending may create the topics."""
        bad = self.options["badRows"].partition(":")[2] or None
        if bad is not None and bad == self.options["topic"]:
            raise ConfigurationError(
                f"the option 'badRows' names the topic that is written, {bad!r}.",
                fix="Name another topic for bad rows.",
            )
        topics = [topic for topic in (self.options["topic"], bad) if topic is not None]
        if not topics and not self.is_exact:
            return
        with open_admin(self.options) as admin:
            for topic in topics:
                admin.route(topic, create=True)
            if self.is_exact:
                self.brokers = brokers_with_epochs(admin)

    def write(self, iterator: Iterator[Any]) -> Sent:
        """Sends the rows of one task; every batch is acknowledged when it returns."""
        from sluicemq.spark import senders  # noqa: PLC0415 - executors only

        options, size = self.options, self.options["batchMessages"]

        def send(sender: senders.Sender) -> int:
            sorter = senders.RowSorter(self.roles, options["topic"], options["badRows"], sender)
            senders.send_all(sorter.rows(iterator), sender)
            return sorter.bad

        keep_imports()
        with plain_errors(), senders.producer_of(options) as producer:
            task = senders.task_now(self.query, options["queryEpoch"]) if self.is_exact else None
            if task is None or not self.brokers:
                direct = senders.DirectSender(producer, size, task)
                bad = send(direct)
                return Sent(direct.sent, bad)
            staging = senders.StagingSender(producer, size, task, self.brokers)
            bad, staged = send(staging), staging.staged
            topics = tuple(sorted(staging.topics))
            return Sent(staged.message_count, bad, task.query, task.epoch, topics, staged.ranges)

    def _commit(self, messages: list[Sent | None], what: str) -> int:
        """Commits what was staged; logs and returns how many messages the tasks stored."""
        done = [one for one in messages if one is not None]
        staged = [one for one in done if one.ranges]
        if staged:
            ranges = tuple(one for sent in staged for one in sent.ranges)
            topics = {topic for sent in staged for topic in sent.topics}
            timeout_s = self.options["timeoutMs"] / 1000
            with open_admin(self.options) as admin:
                committer = EpochCommitter(
                    _call_master(admin), self.brokers, staged[0].query, topics, pause=_pause,
                    monotonic_s=SYSTEM_CLOCK.monotonic_s, timeout_s=timeout_s,
                )  # fmt: skip
                ride_out(lambda: committer.commit(staged[0].epoch, ranges), timeout_s)
        total = sum(one.messages for one in done)
        logger.info("%s: %d messages of %d tasks are stored", what, total, len(done))
        if bad := sum(one.bad for one in done):
            logger.warning("%s: %d bad rows, badRows=%s", what, bad, self.options["badRows"])
        return total

    def _abort(self, messages: list[Sent | None], what: str) -> None:
        total = sum(one.messages for one in messages if one is not None)
        end = "expire unseen" if self.brokers else "are stored, and not taken back"
        logger.warning("%s failed: %d messages of it %s", what, total, end)


class BatchSink(_Sink, DataSourceArrowWriter):  # type: ignore[misc]
    """`df.write.format("rocketmq").mode("append").save()`."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        if options["queryEpoch"] and options["queryId"] is None:
            raise ConfigurationError(
                "the option 'queryEpoch' is given without 'queryId'.", fix="Name the query too."
            )
        self.query = checked_query(options["queryId"]) or f"batch-{uuid.uuid4()}"

    def commit(self, messages: list[Sent | None]) -> None:
        with plain_errors():
            topic = self.options["topic"]
            if not self._commit(messages, f"{self.query} written") or topic is None:
                return
            # A topic that sending made is in the name server a moment later: read after write waits
            # here, not in every reader.
            with open_admin(self.options) as admin:
                for _ in range(ROUTE_CHECKS):
                    if ride_out(lambda: admin.find_route(topic), admin.timeout_s) is not None:
                        return
                    _pause(ROUTE_CHECK_S)
            logger.warning("the topic %r is written but not in the name server yet", topic)

    def abort(self, messages: list[Sent | None]) -> None:
        self._abort(messages, f"the write {self.query}")


class StreamSink(_Sink, DataSourceStreamArrowWriter):  # type: ignore[misc]
    """`df.writeStream.format("rocketmq")`."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        if options["queryId"] is not None or options["queryEpoch"]:
            raise ConfigurationError(
                "the options 'queryId' and 'queryEpoch' do not go with a stream.",
                fix="A stream's checkpoint holds its id.",
            )

    def check_topics(self) -> None:
        """A stream has been there before: Spark plans a sink for each micro-batch."""
        ride_out(super().check_topics, self.options["timeoutMs"] / 1000)

    def commit(self, messages: list[Sent | None], batchId: int) -> None:  # noqa: N803 - Spark's
        with plain_errors():
            self._commit(messages, f"micro-batch {batchId} written")

    def abort(self, messages: list[Sent | None], batchId: int) -> None:  # noqa: N803 - Spark's
        self._abort(messages, f"micro-batch {batchId}")


def checked_query(query: str | None) -> str | None:
    if query is None:
        return None
    try:
        return check_query(query)
    except ProtocolError as error:
        raise ConfigurationError(str(error), fix="Choose another queryId.") from None


def brokers_with_epochs(admin: Admin) -> tuple[str, ...]:
    """The masters, when all of them know epochs (which makes their staging topics); else none.
    Raises RouteNotFoundError when no broker is registered."""
    masters = admin.masters()
    if not masters:
        raise RouteNotFoundError(
            "no broker is registered with the name servers.", fix="See sluice cluster list."
        )
    for broker, address in sorted(masters.items()):
        try:
            expect_success(admin.call(address, make_commit_request(PROBE, 0)), address)
        except RequestError as error:
            if not is_unknown_request(error):
                raise
            logger.warning(
                "delivery=exactly-once: the broker %r does not know COMMIT_EPOCH (it is no SluiceMQ"
                " broker, or an old one). Rows are written AT LEAST ONCE, each with the property"
                " SLUICE_DEDUP_KEY (query/epoch/partition/row), by which readers can tell those"
                " that a repeated task or micro-batch has sent again.", broker,
            )  # fmt: skip
            return ()
    return tuple(sorted(masters))


def _call_master(admin: Admin) -> Callable[[str, Command], Command]:
    """Asks a broker by its name, wherever it is now."""
    masters: dict[str, str] = {}

    def call(broker: str, request: Command) -> Command:
        if broker not in masters:
            masters.update(admin.masters())
        if broker not in masters:
            raise RouteNotFoundError(
                f"the broker {broker!r} is not in the cluster.", fix="Start it again."
            )
        try:
            return admin.call(masters[broker], request)
        except SluiceError:  # it may come back at another address
            masters.clear()
            raise

    return call


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
