"""The data sources `rocketmq` and `rocketmq_store`: entry points for Spark, and sinks.

Spark finds the sources by name through the modules `pyspark_rocketmq` and `pyspark_rocketmq_store`
(their `DefaultSource`). spec/spark.md describes the Python Data Source API and its limits.

The steps of a batch read, with the process in which each happens:

    planner   DataSource.schema()          option `columns` or the user's schema
    planner   DataSource.reader()          option `predicates` -> `filters.FilterPushdown`
    planner   BatchReader.partitions()     bounds from brokers or store -> ranges -> partitions
    executor  BatchReader.read()           `reader.read_range`, `reader.read_store_partition`

The readers have no `pushFilters`, on purpose. Spark keeps the read that it plans for one use of a
DataFrame for the next use, with the predicates of the first (design/0010). Instead, predicates are
an option of the load that they belong to; see `references`.

`rocketmq_store` reads messages out of a store directory, without a broker. Driver and executors
must see the directory under the same path. Its options, columns, body formats, property types and
predicates are those of `rocketmq`. It takes its snapshot of the directory once, while Spark plans.
If retention removes messages before a task reads them, the task fails, unless
`failOnDataLoss=false`.

**The sink** is used by `df.write` and `writeStream`, with at-least-once or exactly-once delivery.
Its columns:

| column | type | |
|---|---|---|
| body, or value | binary or string | required |
| topic | string | required if the option `topic` is not given |
| tags, or tag | string | |
| keys | string or array<string> | |
| properties | map<string,string> | names that producer and broker set themselves are left out |
| queue_id | int | a queue of the topic's first broker that has it; without it, queues take turns |
| broker | string | with queue_id: the broker whose queue it is |
| flag | int | the number that the producer gives a message; null is 0 |
| sharding_key | string | rows with the same key go to the same queue, in order |
| delay_level, delay_ms, deliver_at | int, bigint, timestamp | when it is delivered; one of them |
| message_id | string | its unique id; without it, or if null, a new one |
| system_properties | map<string,string> | properties with reserved names, as replays need them |

Further columns of the source (queue_offset, msg_id, times) are ignored, so that what was read can
be written; any other column is an error. `rows.adapt_replayed_columns` decides what the properties
of a row that was read mean for the message that is written.

At least once: each task sends batches and waits for the broker's acknowledgements. The job succeeds
when every batch is stored. A task that Spark repeats sends its rows again.

Exactly once (design/0007): tasks stage their rows, and the driver commits the epoch. The epoch is
the micro-batch of a stream, or the whole of a batch write. Spark calls the sink in several
processes; what these need to know travels in the pickled sink and in the commit messages:

    planner    __init__          do all brokers support epochs?
    executor   write             stage (`senders`) -> `SinkCommitMessage`: ranges, query id, epoch
    planner    commit            `client.core.epochs` with the ranges of all tasks
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
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
from sluicemq.spark.errors import (
    errors_without_traceback,
    freeze_imports,
    retry_during_outage,
)
from sluicemq.spark.options import (
    EXACTLY_ONCE,
    READ,
    STORE_OPTIONS_BY_NAME,
    WRITE,
    Options,
    parse_options,
)
from sluicemq.spark.schema import (
    BASE_TYPES,
    EXTRA_TYPES,
    declared_columns,
    infer_types,
    to_spark_schema,
)
from sluicemq.spark.sources.batch import BatchReader, StoreBatchReader
from sluicemq.spark.sources.offsets import (
    open_admin,
    read_newest_properties,
)
from sluicemq.wire.frames import Command
from sluicemq.wire.staging import StagedRange, check_query

if TYPE_CHECKING:
    from sluicemq.spark.senders import Sender

logger = logging.getLogger(__name__)


class RocketSource(DataSource):  # type: ignore[misc]
    """The data source `rocketmq`: `spark.read`, `readStream`, `df.write` and `writeStream`.

    Spark creates it for `format("rocketmq")` and calls its methods. They raise ConfigurationError
    for wrong options, and the client's errors if brokers or name servers do not respond.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return "rocketmq"

    def schema(self) -> StructType:
        """Return the schema that the options ask for.

        If a property has the type `auto`, read the newest messages to find its type.
        """
        with errors_without_traceback():
            options = parse_options(self.options)
            columns = infer_types(declared_columns(options), options, read_newest_properties)
            return to_spark_schema(columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch with the columns of `schema`."""
        with errors_without_traceback():
            return BatchReader(parse_options(self.options, READ), schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        """Return the reader of a stream with the columns of `schema`.

        If the options are wrong, the reader raises the error later, when Spark uses it.
        """
        from sluicemq.spark.sources.stream import (  # noqa: PLC0415 - needed for streams only
            create_stream_reader,
        )

        return create_stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Return the sink of a batch write for rows of `schema`. `overwrite` is an error."""
        with errors_without_traceback():
            return BatchSink(parse_options(self.options, WRITE), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink of a streaming write for rows of `schema`. `overwrite` is an error."""
        with errors_without_traceback():
            return StreamSink(parse_options(self.options, WRITE), schema, overwrite=overwrite)


class StoreSource(DataSource):  # type: ignore[misc]
    """The data source `rocketmq_store`: batch reads of a store directory.

    Spark creates it for `format("rocketmq_store")` and calls its methods. They raise
    ConfigurationError for wrong options, and StoreError for a directory that is not a store.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return "rocketmq_store"

    def schema(self) -> StructType:
        """Return the schema that the options ask for.

        If a property has the type `auto`, read the newest messages to find its type.
        """

        def read_newest(options: Options) -> Iterator[Mapping[str, str]]:
            """Yield the properties of the newest messages of the store."""
            from sluicemq.spark.sources import reader  # noqa: PLC0415 - heavy

            return reader.read_newest_properties(options)

        with errors_without_traceback():
            options = parse_options(self.options, READ, STORE_OPTIONS_BY_NAME)
            columns = infer_types(declared_columns(options), options, read_newest)
            return to_spark_schema(columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch with the columns of `schema`."""
        with errors_without_traceback():
            options = parse_options(self.options, READ, STORE_OPTIONS_BY_NAME)
            return StoreBatchReader(options, schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        """Return a reader that raises ConfigurationError, because a store is not a stream."""
        from sluicemq.spark.sources.stream import (  # noqa: PLC0415 - needed for streams only
            FailedStreamReader,
        )

        return FailedStreamReader(
            ConfigurationError(
                "rocketmq_store reads a snapshot of a directory and does not support streams.",
                fix='Use spark.read, or readStream.format("rocketmq") at the broker.',
            )
        )

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Raise ConfigurationError, because only the broker of a store writes to it."""
        with errors_without_traceback():
            raise ConfigurationError(
                "rocketmq_store is read-only: the broker is the only writer of a store.",
                fix='Use write.format("rocketmq"), which sends to the broker.',
            )

    streamWriter = writer  # noqa: N815 - Spark's name


# ---- the sink

_INTEGER_TYPES: Final = ("int", "bigint", "smallint", "tinyint")
_TYPES_BY_ROLE: Final = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "queue_id": _INTEGER_TYPES,
    "broker": ("string",),
    "flag": _INTEGER_TYPES,
    "sharding_key": ("string",),
    "delay_level": _INTEGER_TYPES,
    "delay_ms": _INTEGER_TYPES,
    "deliver_at": ("timestamp",),
    "message_id": ("string",),
    "system_properties": ("map<string,string>",),
}
_ROLE_BY_COLUMN: Final = {role: role for role in _TYPES_BY_ROLE} | {"value": "body", "tag": "tags"}
"""The role of a column, by the column's name in lower case."""
ROUTE_CHECKS_MAX: Final = 100
ROUTE_CHECK_INTERVAL_S: Final = 0.05
PROBE_QUERY_ID: Final = "probe"


@dataclass(frozen=True)
class SinkCommitMessage(WriterCommitMessage):  # type: ignore[misc]
    """The result of one task of a write, which Spark passes to `commit` on the driver.

    `messages` counts the messages that the task stored or staged, and `bad` its bad rows. The other
    fields have values only if the task staged rows for exactly-once delivery: `query` and `epoch`
    are its query id and epoch, `topics` are the topics of the rows, and `ranges` are the ranges of
    the staging topic that contain the rows. `ranges` is empty if the rows were sent directly.
    """

    messages: int
    bad: int = 0
    query: str = ""
    epoch: int = 0
    topics: tuple[str, ...] = ()
    ranges: tuple[StagedRange, ...] = ()


def resolve_roles(schema: StructType, options: Options) -> dict[str, str]:
    """Return which column of a DataFrame has which role, as a dict from role to column name.

    A role is a part of a message, such as "body" or "tags". The columns `value` and `tag` have the
    roles `body` and `tags`. Columns that only reading produces, such as `queue_offset`, have no
    role and are ignored, so that a DataFrame that was read can be written. Names are compared
    without case.

    Raises ConfigurationError for an unknown column, a column of a wrong type, and two columns of
    one role. Also raises it if there is no column for the body, or neither a column nor the option
    for the topic.
    """
    roles: dict[str, str] = {}
    for field in schema.fields:
        role = _find_role(field.name)
        if role is None:
            continue
        if role in roles:
            raise ConfigurationError(
                f"the columns {roles[role]!r} and {field.name!r} both contain the {role}.",
                fix="Keep one of them.",
            )
        type_name = field.dataType.simpleString()
        if type_name not in _TYPES_BY_ROLE[role]:
            raise ConfigurationError(
                f"the column {field.name!r} has the type {type_name!r}.",
                fix=f"Cast it to {' or '.join(_TYPES_BY_ROLE[role])}.",
            )
        roles[role] = field.name
    if "body" not in roles:
        raise ConfigurationError(
            "the column 'body' or 'value' is missing.",
            fix="Name the bytes to send, for example to_json(struct(*)) as value.",
        )
    if "topic" not in roles:
        options.require("topic")
    return roles


def _find_role(column_name: str) -> str | None:
    """Return the role of a column of a DataFrame; None if only reading produces such a column.

    Raises ConfigurationError for an unknown column.
    """
    name = column_name.lower()
    if name in _ROLE_BY_COLUMN:
        return _ROLE_BY_COLUMN[name]
    if name in BASE_TYPES or name in EXTRA_TYPES:
        return None
    raise ConfigurationError(
        f"the column {column_name!r} cannot be written.",
        fix=f"{did_you_mean(name, _ROLE_BY_COLUMN)} The columns of a message are"
        f" {', '.join(_ROLE_BY_COLUMN)}; put other values into properties.".lstrip(),
    )


class _Sink:
    """The common part of the batch sink and the stream sink.

    Spark's planner creates it on the driver, pickles it for the executors, and calls `commit` or
    `abort` on the driver at the end.
    """

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        """Check the options and the schema, and check the topics on the brokers.

        `overwrite` is Spark's save mode. It is always an error, because a topic cannot be
        overwritten. Raises ConfigurationError, and the client's errors.
        """
        if overwrite:
            raise ConfigurationError("a topic cannot be overwritten.", fix='Use mode("append").')
        self.options = options
        self.roles = resolve_roles(schema, options)
        self.query_id: str | None = None
        self.brokers: tuple[str, ...] = ()
        """The masters that can stage rows; empty if delivery is at least once."""
        self.is_exactly_once_requested = options["delivery"] == EXACTLY_ONCE
        self.check_topics()

    def check_topics(self) -> None:
        """Check that the option `topic` and the topic for bad rows can be written to.

        Without this check on the driver, each task would fail by itself. A topic that does not
        exist is accepted if the brokers will create it at the first send. For exactly-once
        delivery, the names of the brokers that support it are stored in `brokers`.

        Raises ConfigurationError if both topics are the same, and the client's errors.
        """
        topic = self.options["topic"]
        _, _, bad_rows_topic = self.options["badRows"].partition(":")
        if bad_rows_topic and bad_rows_topic == topic:
            raise ConfigurationError(
                f"the option 'badRows' names the topic that is written, {bad_rows_topic!r}.",
                fix="Name another topic for bad rows.",
            )
        topics = []
        if topic is not None:
            topics.append(topic)
        if bad_rows_topic:
            topics.append(bad_rows_topic)
        if not topics and not self.is_exactly_once_requested:
            return
        with open_admin(self.options) as admin:
            for written_topic in topics:
                admin.route(written_topic, create=True)
            if self.is_exactly_once_requested:
                self.brokers = find_staging_brokers(admin)

    def write(self, iterator: Iterator[Any]) -> SinkCommitMessage:
        """Send the rows of one task, given as Arrow batches, and return the result of the task.

        With exactly-once delivery, the rows are only staged: stored, but not visible before the
        commit. Spark calls this in an executor, and passes the result to `commit` on the driver.
        When this method returns, every row is acknowledged, or was a bad row. Raises RowError for a
        bad row under badRows=fail, and the client's errors.
        """
        from sluicemq.spark import senders  # noqa: PLC0415 - executors only

        options = self.options
        batch_messages = options["batchMessages"]
        freeze_imports()
        with errors_without_traceback(), senders.create_producer(options) as producer:
            task = None
            if self.is_exactly_once_requested:
                task = senders.current_task_attempt(self.query_id, options["queryEpoch"])
            if task is None or not self.brokers:
                direct_sender = senders.DirectSender(producer, batch_messages, task)
                bad_count = self._send_rows(iterator, direct_sender)
                return SinkCommitMessage(direct_sender.sent_count, bad_count)

            staging_sender = senders.StagingSender(producer, batch_messages, task, self.brokers)
            bad_count = self._send_rows(iterator, staging_sender)
            return SinkCommitMessage(
                staging_sender.staged_ranges.message_count,
                bad_count,
                query=task.query_id,
                epoch=task.epoch,
                topics=tuple(sorted(staging_sender.topics)),
                ranges=staging_sender.staged_ranges.ranges,
            )

    def _send_rows(self, batches: Iterator[Any], sender: "Sender") -> int:
        """Send all rows of the task with `sender`, and return the number of bad rows.

        Raises RowError for a bad row under badRows=fail, and the client's errors.
        """
        from sluicemq.spark import bad_rows, senders  # noqa: PLC0415 - executors only

        handler = bad_rows.BadRowHandler(
            self.roles, self.options["topic"], self.options["badRows"], sender
        )
        senders.send_all(handler.prepare_rows(batches), sender)
        return handler.bad_count

    def _commit(self, messages: list[SinkCommitMessage | None], label: str) -> int:
        """Make the staged rows of all tasks visible, and return how many messages all tasks wrote.

        `messages` are the results of the tasks; Spark passes None for a task without a result. Rows
        that were sent directly need no commit. The numbers of messages and of bad rows are logged
        in lines that begin with `label`. Raises the client's errors if the commit fails.
        """
        results = [message for message in messages if message is not None]
        staged_results = [result for result in results if result.ranges]
        if staged_results:
            self._commit_epoch(staged_results)
        message_count = sum(result.messages for result in results)
        logger.info("%s: %d messages of %d tasks are stored", label, message_count, len(results))
        bad_count = sum(result.bad for result in results)
        if bad_count:
            logger.warning("%s: %d bad rows, badRows=%s", label, bad_count, self.options["badRows"])
        return message_count

    def _commit_epoch(self, staged_results: Sequence[SinkCommitMessage]) -> None:
        """Commit the epoch of tasks that staged rows: make their rows visible at all brokers.

        An epoch is one write of a query. All `staged_results` have the same query and epoch. If the
        brokers have committed it before with other rows, a warning is logged, and the rows stay
        invisible. Raises the client's errors if the epoch cannot be committed within the option
        timeoutMs.
        """
        query = staged_results[0].query
        epoch = staged_results[0].epoch
        ranges: list[StagedRange] = []
        topics: set[str] = set()
        for result in staged_results:
            ranges.extend(result.ranges)
            topics.update(result.topics)
        timeout_s = self.options["timeoutMs"] / 1000
        with open_admin(self.options) as admin:
            committer = EpochCommitter(
                _make_master_call(admin),
                self.brokers,
                query,
                topics,
                pause=_wait,
                monotonic_s=SYSTEM_CLOCK.monotonic_s,
                timeout_s=timeout_s,
            )
            published_ranges = retry_during_outage(
                lambda: committer.commit(epoch, tuple(ranges)), timeout_s
            )
        if set(published_ranges) != set(ranges):
            logger.warning(
                "query %r, epoch %d was written already (or a later epoch was): the %d rows of this"
                " write are not written again",
                query,
                epoch,
                sum(result.messages for result in staged_results),
            )

    def _abort(self, messages: list[SinkCommitMessage | None], label: str) -> None:
        """Log that a write failed, and what happens to the messages that its tasks have sent.

        Nothing else is done. Messages that were sent directly stay stored, and staged messages
        expire. The log line begins with `label`.
        """
        results = [message for message in messages if message is not None]
        message_count = sum(result.messages for result in results)
        if self.brokers:
            outcome = "staged messages expire without becoming visible"
        else:
            outcome = "messages are stored and not removed"
        logger.warning("%s failed: %d %s", label, message_count, outcome)


class BatchSink(_Sink, DataSourceArrowWriter):  # type: ignore[misc]
    """The sink of `df.write.format("rocketmq").mode("append").save()`."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        """Create the sink of a batch write, and check its options, schema and topics.

        The query's id is the option `queryId`, or a new one. Raises ConfigurationError for a wrong
        option or schema, and for an epoch without an id, and the client's errors.
        """
        super().__init__(options, schema, overwrite=overwrite)
        if options["queryEpoch"] and options["queryId"] is None:
            raise ConfigurationError(
                "the option 'queryEpoch' is given without 'queryId'.", fix="Set queryId too."
            )
        self.query_id = validate_query_id(options["queryId"]) or f"batch-{uuid.uuid4()}"

    def commit(self, messages: list[SinkCommitMessage | None]) -> None:
        """Commit the write, and wait until the name servers know its topic.

        The wait takes up to 5 seconds. It is left out if no message was written or the topic is a
        column. If the topic is still unknown at its end, that is only logged, because the messages
        are stored.
        """
        with errors_without_traceback():
            topic = self.options["topic"]
            if not self._commit(messages, f"{self.query_id} written") or topic is None:
                return
            # A topic that sending has created reaches the name server a moment later. Waiting here
            # lets a program read what it has just written.
            with open_admin(self.options) as admin:
                for _ in range(ROUTE_CHECKS_MAX):
                    route = retry_during_outage(lambda: admin.find_route(topic), admin.timeout_s)
                    if route is not None:
                        return
                    _wait(ROUTE_CHECK_INTERVAL_S)
            logger.warning(
                "the topic %r is written, but the name server does not know it yet", topic
            )

    def abort(self, messages: list[SinkCommitMessage | None]) -> None:
        """Log that the write failed."""
        self._abort(messages, f"the write {self.query_id}")


class StreamSink(_Sink, DataSourceStreamArrowWriter):  # type: ignore[misc]
    """The sink of `df.writeStream.format("rocketmq")`."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        """Create the sink of a stream, and check its options, schema and topics.

        Raises ConfigurationError for a wrong option or schema, and if the options have an id or
        epoch of the query, and the client's errors.
        """
        super().__init__(options, schema, overwrite=overwrite)
        if options["queryId"] is not None or options["queryEpoch"]:
            raise ConfigurationError(
                "the options 'queryId' and 'queryEpoch' are not supported for a stream.",
                fix="Remove them; the checkpoint contains the query's id.",
            )

    def check_topics(self) -> None:
        """Check the topics as `_Sink.check_topics` does, and retry during an outage.

        Spark creates a sink for each micro-batch. The brokers have usually been reachable before,
        so an outage of up to timeoutMs should not end the query.
        """
        retry_during_outage(super().check_topics, self.options["timeoutMs"] / 1000)

    def commit(
        self,
        messages: list[SinkCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's name
    ) -> None:
        """Commit the micro-batch `batchId`."""
        with errors_without_traceback():
            self._commit(messages, f"micro-batch {batchId} written")

    def abort(
        self,
        messages: list[SinkCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's name
    ) -> None:
        """Log that the micro-batch `batchId` failed."""
        self._abort(messages, f"micro-batch {batchId}")


def validate_query_id(query_id: str | None) -> str | None:
    """Return the option `queryId` unchanged. Raises ConfigurationError if it is invalid."""
    if query_id is None:
        return None
    try:
        return check_query(query_id)
    except ProtocolError as error:
        raise ConfigurationError(str(error), fix="Choose another queryId.") from None


def find_staging_brokers(admin: Admin) -> tuple[str, ...]:
    """Return the sorted names of all masters if each supports exactly-once delivery.

    Otherwise log a warning that rows are written at least once, and return an empty tuple. To find
    out, each master gets a request to commit epoch 0 of a query that does not exist. This also
    creates the master's staging topic. Raises RouteNotFoundError if no broker is registered, and
    the client's errors.
    """
    masters = admin.masters()
    if not masters:
        raise RouteNotFoundError(
            "no broker is registered with the name servers.", fix="Check sluice cluster list."
        )
    for broker, address in sorted(masters.items()):
        try:
            expect_success(admin.call(address, make_commit_request(PROBE_QUERY_ID, 0)), address)
        except RequestError as error:
            if not is_unknown_request(error):
                raise
            logger.warning(
                "delivery=exactly-once: the broker %r does not support COMMIT_EPOCH (it is not a"
                " SluiceMQ broker, or an old one). Rows are written AT LEAST ONCE, each with the"
                " property SLUICE_DEDUP_KEY (query/epoch/partition/row), by which readers can"
                " recognise rows that a repeated task or micro-batch has sent again.",
                broker,
            )
            return ()
    return tuple(sorted(masters))


def _make_master_call(admin: Admin) -> Callable[[str, Command], Command]:
    """Return a function that sends a request to a broker's master, by the broker's name.

    The function takes the broker's name and the request, and returns the response. It remembers the
    addresses of the masters. After an error it asks the name server for them again at the next
    call, because the master may return at another address. It raises RouteNotFoundError for a
    broker that is not registered, and the client's errors.
    """
    masters: dict[str, str] = {}

    def call(broker: str, request: Command) -> Command:
        """Send `request` to the master of `broker`, and return the response."""
        if broker not in masters:
            masters.update(admin.masters())
        if broker not in masters:
            raise RouteNotFoundError(
                f"the broker {broker!r} is not in the cluster.", fix="Start it again."
            )
        try:
            return admin.call(masters[broker], request)
        except SluiceError:
            masters.clear()
            raise

    return call


def _wait(seconds: float) -> None:
    """Block the thread for `seconds`."""
    threading.Event().wait(seconds)
