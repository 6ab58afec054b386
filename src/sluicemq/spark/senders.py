"""Send the rows of one task to the brokers: directly to their topics, or to the staging topic.

Both senders run in executors. A task makes one producer and one sender, hands each Arrow batch to
the sender as `PreparedRows`, and reports success when the brokers have acknowledged every row.

`DirectSender` implements at-least-once delivery. Rows of one topic and queue travel together in
batch requests. Delayed rows are sent one by one, because RocketMQ does not allow a delay in a
batch.

`StagingSender` implements exactly-once delivery (design/0007). It sends all rows of a task in
batches to the staging topic. A property of each row names the topic, queue and delay that the row
has after its epoch is committed. A batch contains rows for one broker only.

A broker may refuse a row because of its content: the row is larger than the broker accepts, or its
delay is too long. The senders collect such rows in `refused_rows`, and `bad_rows.BadRowHandler`
decides what becomes of them. A missing topic or queue is not the fault of a row. It can be created
while the job is retried, so it is an error of the task.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from sluicemq.client.core.epochs import StagedRangeList
from sluicemq.client.core.messages import BODY_BYTES_MAX, OutgoingMessage, delay_properties
from sluicemq.client.core.names import check_topic_to_send
from sluicemq.client.core.requests import MESSAGE_ILLEGAL, SendResult
from sluicemq.client.core.sending import DEFAULT_PRODUCER_GROUP, choose_by_sharding_key
from sluicemq.client.sync.producer import Producer
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, RequestError, RouteNotFoundError
from sluicemq.model.message import UNIQ_KEY, Message
from sluicemq.model.system_names import STAGING_TOPIC, is_retry_topic
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_batch
from sluicemq.spark.errors import retry_during_outage
from sluicemq.spark.options import Options
from sluicemq.spark.rows import (
    EncodedRows,
    RowError,
    UniqueIdColumns,
    adapt_replayed_columns,
    check_sizes,
    convert_bodies,
    convert_flags,
    encode_delays,
    encode_ids,
    encode_properties,
    encode_rows,
    normalize_column,
    row_errors_for,
    validate_ids,
)
from sluicemq.wire.staging import STAGE_PROPERTY, STAGED_ID, STAGING_QUEUES, Owner

T = TypeVar("T")

BATCH_BYTES_MAX: Final = 1024 * 1024
DEDUP_PROPERTY: Final = "SLUICE_DEDUP_KEY"
_REQUESTS_IN_FLIGHT_MAX: Final = 8
_ID_BYTES: Final = 32
_PROPERTY_OVERHEAD_BYTES: Final = 64
"""Upper bound for the fixed parts of one added property: names, separators, numbers."""


class Destination(NamedTuple):
    """The topic of a row, and optionally its queue id or its sharding key, but not both.

    With neither, any queue of the topic will do. `broker` names the broker of the queue. It is set
    only together with `queue_id`.
    """

    topic: str
    queue_id: int | None = None
    sharding_key: str | None = None
    broker: str | None = None


@dataclass(frozen=True)
class TaskAttempt:
    """One attempt of one Spark task: query id, epoch, partition id and attempt number."""

    query_id: str
    epoch: int
    partition: int
    attempt: int


def current_task_attempt(query_id: str | None, epoch: int = 0) -> TaskAttempt:
    """Return the attempt of the Spark task in which the caller runs.

    A batch write passes its `query_id` and `epoch`. A streaming write passes None as `query_id`.
    Then both are taken from the properties that Spark sets for tasks of a streaming query. Raises
    ConfigurationError outside of a Spark task, and if Spark did not set these properties.
    """
    context = TaskContext.get()
    if context is None:
        raise ConfigurationError(
            "the sink was called outside of a Spark task.", fix="Write with df.write."
        )
    if query_id is None:
        query_id = context.getLocalProperty("sql.streaming.queryId")
        batch_id = context.getLocalProperty("streaming.sql.batchId")
        if not query_id or not batch_id:
            raise ConfigurationError(
                "Spark does not say to which streaming query this task belongs.",
                fix="Use delivery=at-least-once.",
            )
        epoch = int(batch_id)
    return TaskAttempt(query_id, epoch, context.partitionId(), context.attemptNumber())


class PreparedRows:
    """The rows of one Arrow batch as columns that a sender can encode.

    `bodies` and `properties` are binary columns; `properties` does not contain message ids. Every
    other column (`topics`, `queue_ids`, `brokers`, `sharding_keys`, `ids`, `flags`, `delays`) is
    None if the DataFrame has no such column. `topic` is the topic of all rows if the option `topic`
    is given, else None. `row_numbers` are the numbers of the rows in their task, counted from 1; it
    is empty for rows that `BadRowHandler` made itself. `skipped_properties` are the names of
    reserved properties that are not written (see `rows.adapt_replayed_columns`).
    """

    def __init__(
        self,
        batch: Any,
        roles: Mapping[str, str],
        topic: str | None,
        row_numbers: Sequence[int] = (),
    ) -> None:
        """Convert the rows of the Arrow batch `batch` to the form in which they are sent.

        `roles` maps each role, such as "body", to the name of its column. `topic` is the option
        `topic`, which takes precedence over a column. `row_numbers` are the numbers of the rows in
        the task; empty for messages about bad rows. Raises RowError if a row cannot be sent.
        """
        self.batch = batch
        self.row_numbers = row_numbers
        self.row_count = batch.num_rows
        read_columns = {role: normalize_column(batch.column(name)) for role, name in roles.items()}
        columns, self.skipped_properties = adapt_replayed_columns(
            read_columns, SYSTEM_CLOCK.now_ms()
        )
        self.bodies = convert_bodies(columns["body"])
        self.properties = encode_properties(columns, self.row_count)
        self.delays = encode_delays(columns)
        self.ids = None
        if "message_id" in columns:
            self.ids = validate_ids(columns["message_id"])
        self.flags = None
        if "flag" in columns:
            self.flags = convert_flags(columns["flag"])

        # Where the rows go.
        self.topic = topic
        self.topics = columns.get("topic") if topic is None else None
        self.queue_ids = columns.get("queue_id")
        self.brokers = columns.get("broker") if self.queue_ids is not None else None
        self.sharding_keys = columns.get("sharding_key")
        self._check_destinations()

    def _check_destinations(self) -> None:
        """Raise RowError if a row has no valid topic, or a negative queue id."""
        if self.topics is not None:
            if self.topics.null_count:
                fix = "Filter such rows, or fill the column."
                raise RowError("a row has no topic: it is null.", role="topic", fix=fix)
            with row_errors_for("topic"):
                for name in pc.unique(self.topics).to_pylist():
                    check_topic_to_send(name)
        if self.queue_ids is not None:
            lowest_queue_id = pc.min(self.queue_ids).as_py()  # None if all are null
            if lowest_queue_id is not None and lowest_queue_id < 0:
                fix = "Use 0 or more, or null for any queue."
                raise RowError("a row's queue_id is negative.", role="queue_id", fix=fix)

    def check_sizes(self, added_property_bytes: int) -> None:
        """Raise RowError if the body or the properties of a row exceed RocketMQ's limits.

        `added_property_bytes` is the number of bytes of properties that the sender adds to each
        row.
        """
        ids = b"-" * _ID_BYTES if self.ids is None else pc.fill_null(self.ids, "-" * _ID_BYTES)
        check_sizes(self.bodies, self.properties, ids, b"-" * added_property_bytes)

    @property
    def has_single_destination(self) -> bool:
        """Whether all rows go to one topic, and each may go to any of its queues."""
        return self.topics is None and self.queue_ids is None and self.sharding_keys is None

    def list_destinations(self) -> list[Destination]:
        """Return the destination of each row, in the order of the rows.

        A destination is a topic with a queue id, a sharding key, or neither. If a row has both, the
        queue id decides.
        """
        topics = self._to_list(self.topics, default=self.topic)
        queue_ids = self._to_list(self.queue_ids)
        sharding_keys = self._to_list(self.sharding_keys)
        brokers = self._to_list(self.brokers)
        destinations = []
        for topic, queue_id, sharding_key, broker in zip(
            topics, queue_ids, sharding_keys, brokers, strict=True
        ):
            if queue_id is None:
                destination = Destination(topic, sharding_key=sharding_key or None)
            else:
                destination = Destination(topic, queue_id, broker=broker or None)
            destinations.append(destination)
        return destinations

    def _to_list(self, column: Any | None, default: str | None = None) -> list[Any]:
        """Return the values of a column; `default` for each row if there is no such column."""
        return [default] * self.row_count if column is None else column.to_pylist()


class SendThread:
    """A thread that sends requests in the order in which they are submitted.

    While the thread waits for a broker, the task prepares its next rows. Up to
    `_REQUESTS_IN_FLIGHT_MAX` submitted calls may be unfinished; further ones wait.
    """

    def __init__(self) -> None:
        """Create the thread, which starts with the first call that is submitted."""
        self._executor = ThreadPoolExecutor(1, "sluicemq-sink")
        # The submitted calls whose errors have not been raised yet, oldest first.
        self._in_flight: deque[Future[None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        """Submit a call of `work`, to run on the thread after everything submitted before.

        If `_REQUESTS_IN_FLIGHT_MAX` calls are unfinished, first wait for the oldest one; otherwise
        return at once. Raises the error of an earlier call, instead of submitting `work`.
        """
        while len(self._in_flight) >= _REQUESTS_IN_FLIGHT_MAX:
            self._in_flight.popleft().result()
        self._in_flight.append(self._executor.submit(work))

    def flush(self) -> None:
        """Wait until every submitted call has finished.

        Raises the error of the first call that failed. Later calls may still be unfinished then.
        """
        while self._in_flight:
            self._in_flight.popleft().result()

    def close(self) -> None:
        """Cancel calls that have not begun, wait for the running one, and end the thread."""
        self._executor.shutdown(cancel_futures=True)


class RefusedRow(NamedTuple):
    """A row that a broker refused because of its content, such as its size or delay.

    `row_index` is the position of the row in `rows`, counted from 0.
    """

    rows: PreparedRows
    row_index: int
    error: RequestError


class Sender:
    """The common part of the two senders.

    `send` may return before the rows are acknowledged. When `send_thread.flush` has returned, each
    row is acknowledged or listed in `refused_rows`. `topics` are the topics to which rows were
    sent.
    """

    def __init__(self, producer: Producer, batch_messages: int) -> None:
        """Create a sender for the rows of one task.

        `producer` sends its requests. `batch_messages` is the maximum number of messages in one
        request.
        """
        self.refused_rows: list[RefusedRow] = []
        self.send_thread = SendThread()
        self.topics: set[str] = set()
        self._producer = producer
        self._batch_messages = batch_messages
        self._unique_ids = UniqueIdColumns()
        self._queues: dict[Destination, MessageQueue | None] = {}

    def added_property_bytes_max(self, topic: str) -> int:
        """Return the largest number of property bytes that the sender adds to a row of `topic`."""
        raise NotImplementedError

    def send(self, rows: PreparedRows) -> None:
        """Encode the rows and submit them to the send thread.

        Raises the errors of `resolve_queue`, RowError for a row that cannot be encoded, and the
        errors of requests that were submitted earlier.
        """
        raise NotImplementedError

    def resolve_queue(self, destination: Destination) -> MessageQueue | None:
        """Return the queue of a destination, or None if any queue of the topic may be used.

        The result is cached, and the topic is added to `topics`. Raises RouteNotFoundError if the
        topic or queue does not exist, and ConfigurationError for an invalid topic name.
        """
        if destination not in self._queues:
            topic = destination.topic
            if topic not in self.topics:
                self.topics.add(check_topic_to_send(topic))
            queue = None
            if destination.queue_id is not None or destination.sharding_key is not None:
                queues = self.call_with_retries(partial(self._producer.write_queues, topic))
                if destination.sharding_key is not None:
                    queue = choose_by_sharding_key(queues, destination.sharding_key)
                else:
                    queue = select_queue_by_id(queues, destination)
            self._queues[destination] = queue
        return self._queues[destination]

    def send_single(
        self, topic: str, queue: MessageQueue | None, encoded: EncodedRows, index: int
    ) -> SendResult:
        """Send row `index` of `encoded` as a message of its own, and return the broker's result.

        `queue` is None for any queue of `topic`. The call waits for the broker, and retries during
        an outage. Raises RequestError if the broker refuses the message, and the client's errors.
        """
        entry = encoded.request_body(index, index + 1)
        ((flag, body, properties, _),) = decode_batch(entry)
        property_text = properties.decode()
        # The id is the text between `UNIQ_KEY U+0001` and U+0002.
        _, _, from_id = property_text.partition(f"{UNIQ_KEY}\x01")
        message_id, _, _ = from_id.partition("\x02")
        outgoing = OutgoingMessage(topic, bytes(body), property_text, message_id, 0, flag, True)
        return self.call_with_retries(partial(self._producer.send_outgoing, outgoing, queue=queue))

    def call_with_retries(self, work: Callable[[], T]) -> T:
        """Return `work()`. Repeat it during an outage for up to the producer's timeout."""
        return retry_during_outage(work, self._producer.timeout_ms / 1000)

    def send_batches(
        self,
        topic: str,
        queue: MessageQueue | None,
        encoded: EncodedRows,
        rows: PreparedRows,
        indices: Sequence[int],
        on_stored: Callable[[SendResult, int, int], None],
    ) -> None:
        """Submit encoded rows to the send thread, divided into requests.

        Each request respects the limits of message count and bytes. `queue` is None for any queue
        of `topic`. `indices` has the index in `rows` of each encoded row. For each stored request,
        the send thread calls `on_stored(result, start, stop)`. The request contained the encoded
        rows from `start` up to, but not including, `stop`.

        If the broker refuses a request as illegal, each half of the request is sent again, until
        single rows remain. A single row that is refused is added to `refused_rows`.
        """

        def send_slice(start: int, stop: int) -> None:
            """Send the encoded rows [start, stop), on the send thread."""
            try:
                send_result = self._send_request(topic, queue, encoded, start, stop)
            except RequestError as error:
                if error.code != MESSAGE_ILLEGAL:
                    raise
                if stop - start == 1:
                    self.refused_rows.append(RefusedRow(rows, indices[start], error))
                    return
                middle = (start + stop) // 2
                send_slice(start, middle)
                send_slice(middle, stop)
            else:
                on_stored(send_result, start, stop)

        for start, stop in encoded.split_requests(self._batch_messages, BATCH_BYTES_MAX):
            self.send_thread.submit(partial(send_slice, start, stop))

    def _send_request(
        self, topic: str, queue: MessageQueue | None, encoded: EncodedRows, start: int, stop: int
    ) -> SendResult:
        """Send the encoded rows [start, stop) in one request, and return the broker's result.

        The request is repeated during an outage. Raises RequestError if the broker refuses it.
        """
        body = encoded.request_body(start, stop)
        if stop - start == 1 and len(body) > BODY_BYTES_MAX:
            # A broker limits the bytes of a whole batch, but only the body of a single message. So
            # a row with a body near the limit must not be sent as a batch.
            return self.send_single(topic, queue, encoded, start)
        send_batch = partial(self._producer.send_encoded, topic, body, queue=queue)
        return self.call_with_retries(send_batch)


def select_queue_by_id(queues: Sequence[MessageQueue], destination: Destination) -> MessageQueue:
    """Return the queue that has the queue id of `destination`.

    If several brokers have such a queue, the queue at `destination.broker` is chosen, or the first
    one if the destination names no broker. If that broker has no such queue, for example because
    the rows were read from another cluster, the hash of its name chooses a queue. So rows of one
    broker stay together. Raises RouteNotFoundError if no queue has the id.
    """
    candidates = [queue for queue in queues if queue.queue_id == destination.queue_id]
    if not candidates:
        writable_ids = sorted({queue.queue_id for queue in queues})
        listed_ids = ", ".join(map(str, writable_ids)) or "none"
        raise RouteNotFoundError(
            f"the topic {destination.topic!r} has no writable queue {destination.queue_id}.",
            fix=f"Its writable queues are: {listed_ids}.",
        )
    if destination.broker is None:
        return candidates[0]
    for queue in candidates:
        if queue.broker == destination.broker:
            return queue
    return candidates[zlib.crc32(destination.broker.encode()) % len(candidates)]


def _take_rows(columns: Iterable[Any], indices: Sequence[int], row_count: int) -> list[Any]:
    """Return the columns with only the rows at `indices`, in this order.

    The columns have `row_count` rows. An item that is not a column, such as None or a constant for
    all rows, is returned unchanged.
    """
    if len(indices) == row_count:
        return list(columns)
    positions = pa.array(indices, pa.int64())
    return [
        pc.take(column, positions) if isinstance(column, pa.Array) else column for column in columns
    ]


class DirectSender(Sender):
    """Sends rows to their topics with at-least-once delivery.

    `sent_count` is the number of acknowledged rows. If a task attempt is given, each row gets the
    property SLUICE_DEDUP_KEY, by which a reader can recognise a repeated row.
    """

    def __init__(
        self, producer: Producer, batch_messages: int, task: TaskAttempt | None = None
    ) -> None:
        """Create a sender for the rows of one task, which are visible as soon as they are stored.

        `producer` sends the requests, with at most `batch_messages` messages each. `task` is given
        if exactly-once delivery was requested but brokers do not support it. Then each row gets the
        property SLUICE_DEDUP_KEY, by which readers recognise repeated rows.
        """
        super().__init__(producer, batch_messages)
        self.sent_count = 0
        self._added_bytes = _PROPERTY_OVERHEAD_BYTES
        self._dedup_prefix = ""
        if task is not None:
            self._added_bytes += len(task.query_id.encode()) + _PROPERTY_OVERHEAD_BYTES
            self._dedup_prefix = f"{task.query_id}/{task.epoch}/{task.partition}/"
        self._next_row = 0

    def added_property_bytes_max(self, _topic: str) -> int:
        """Return the maximum size of the id and the dedup key, the same for every topic."""
        return self._added_bytes

    def send(self, rows: PreparedRows) -> None:
        """Submit the rows without a delay to the send thread, then send the delayed rows.

        The send thread may send its rows after this method has returned. Each delayed row is stored
        or refused when this method returns. Raises RouteNotFoundError if a topic or queue does not
        exist, and the errors of earlier requests.
        """
        properties = rows.properties
        if self._dedup_prefix:
            dedup_keys = self._make_dedup_keys(rows.row_count)
            properties = pc.binary_join_element_wise(properties, dedup_keys, b"")

        if rows.delays is None and rows.has_single_destination:
            assert rows.topic is not None
            self.resolve_queue(Destination(rows.topic))
            self._send_rows(rows, range(rows.row_count), rows.topic, None, properties)
            return

        delays = [None] * rows.row_count if rows.delays is None else rows.delays.to_pylist()
        destinations = rows.list_destinations()
        indices_by_target = self._group_by_target(destinations, delays)
        for (topic, queue), indices in indices_by_target.items():
            self._send_rows(rows, indices, topic, queue, properties)

        if rows.delays is not None:
            # Delayed rows are sent from the calling thread, so the send thread must be idle.
            self.send_thread.flush()
            for index, delay in enumerate(delays):
                if delay is not None:
                    self._send_delayed(rows, index, destinations[index], delay, properties)

    def _group_by_target(
        self, destinations: Sequence[Destination], delays: Sequence[str | None]
    ) -> dict[tuple[str, MessageQueue | None], list[int]]:
        """Return the indices of the rows without a delay, by (topic, queue).

        The queue is None for rows that may go to any queue. Raises RouteNotFoundError if a topic or
        queue does not exist, and ConfigurationError for an invalid topic name.
        """
        indices_by_target: dict[tuple[str, MessageQueue | None], list[int]] = {}
        for index, (destination, delay) in enumerate(zip(destinations, delays, strict=True)):
            if delay is None:
                target = (destination.topic, self.resolve_queue(destination))
                indices_by_target.setdefault(target, []).append(index)
        return indices_by_target

    def _make_dedup_keys(self, row_count: int) -> Any:
        """Return a binary column with the encoded property SLUICE_DEDUP_KEY of the next rows.

        The attempt number is not part of the key: the key of a row must be the same when Spark
        repeats a task or an epoch.
        """
        rows = range(self._next_row, self._next_row + row_count)
        self._next_row += row_count
        row_numbers = pa.array(rows).cast(pa.string())
        start = f"{DEDUP_PROPERTY}\x01{self._dedup_prefix}"
        return pc.binary_join_element_wise(start, row_numbers, "\x02", "").cast(pa.binary())

    def _send_rows(
        self,
        rows: PreparedRows,
        indices: Sequence[int],
        topic: str,
        queue: MessageQueue | None,
        properties: Any,
    ) -> None:
        """Submit rows without a delay that all go to one topic and queue.

        `indices` are the indices of these rows in `rows`. `queue` is None for any queue.
        `properties` is the column of the encoded properties of all `rows`.
        """
        columns = (rows.bodies, properties, rows.ids, rows.flags)
        bodies, properties, row_ids, flags = _take_rows(columns, indices, rows.row_count)
        ids = encode_ids(row_ids, self._unique_ids, len(bodies))
        encoded = encode_rows(bodies, ids, properties, flags=flags)

        def send_each() -> None:
            """Send each row as a message of its own, on the send thread."""
            for index in range(len(encoded)):
                self.send_single(topic, None, encoded, index)
                self.sent_count += 1

        def count_stored(_: SendResult, start: int, stop: int) -> None:
            self.sent_count += stop - start

        if is_retry_topic(topic):  # brokers refuse batches to retry topics
            self.send_thread.submit(send_each)
        else:
            self.send_batches(topic, queue, encoded, rows, indices, count_stored)

    def _send_delayed(
        self,
        rows: PreparedRows,
        index: int,
        destination: Destination,
        delay: str,
        properties: Any,
    ) -> None:
        """Send row `index` with its delay, and wait until the broker has stored it.

        `delay` is a text such as `L3` (delay level 3), `M500` (500 ms) or `T1700000000000` (at that
        time in ms). `properties` is the column of the encoded properties of all rows. A row that
        the broker refuses as illegal is added to `refused_rows`.
        """
        columns = (rows.bodies, properties, rows.ids, rows.flags)
        bodies, properties, row_ids, flags = _take_rows(columns, [index], rows.row_count)
        ids = encode_ids(row_ids, self._unique_ids, 1)
        delay_property = _encode_delay_properties(destination.topic, delay)
        encoded = encode_rows(bodies, ids, properties, delay_property, flags=flags)
        try:
            self.send_single(destination.topic, self.resolve_queue(destination), encoded, 0)
            self.sent_count += 1
        except RequestError as error:
            if error.code != MESSAGE_ILLEGAL:
                raise
            self.refused_rows.append(RefusedRow(rows, index, error))


def _encode_delay_properties(topic: str, delay: str) -> bytes:
    """Return the encoded properties of a message with a delay.

    `delay` is a text such as `L3` (delay level 3), `M500` (500 ms) or `T1700000000000` (at that
    time in ms).
    """
    letter = delay[0]
    number = int(delay[1:])
    if letter == "L":
        message = Message(topic, b"", delay_level=number)
    elif letter == "M":
        message = Message(topic, b"", delay_ms=number)
    else:
        message = Message(topic, b"", deliver_at_ms=number)
    properties = delay_properties(message)
    return "".join(f"{name}\x01{text}\x02" for name, text in properties.items()).encode()


class StagingSender(Sender):
    """Stages the rows of one task attempt for exactly-once delivery.

    `brokers` are the names of the masters that can stage. `staged_ranges` collects where the rows
    were stored.
    """

    def __init__(
        self,
        producer: Producer,
        batch_messages: int,
        task: TaskAttempt,
        brokers: tuple[str, ...],
    ) -> None:
        """Create a sender for one task attempt, which stages its rows for exactly-once delivery.

        `producer` sends the requests, with at most `batch_messages` messages each. `brokers` are
        the names of the masters that can stage rows, at least one.
        """
        super().__init__(producer, batch_messages)
        self.staged_ranges = StagedRangeList(task.partition, task.attempt)
        self._owner = Owner(task.query_id, task.epoch, task.partition, task.attempt)
        self._brokers = brokers
        # The tasks of a job begin with different brokers.
        self._broker_counter = task.partition

    def added_property_bytes_max(self, topic: str) -> int:
        """Return an upper bound for the stage property, which contains the topic's name."""
        return len(self._owner.prefix.encode()) + len(topic.encode()) + 2 * _PROPERTY_OVERHEAD_BYTES

    def send(self, rows: PreparedRows) -> None:
        """Submit the rows to the staging topic, grouped by broker.

        Staged rows are stored, but not visible before the epoch is committed. A row with a fixed
        queue is staged at the broker of that queue. The other rows of `rows` go to one broker, the
        next in turn.
        """
        if rows.has_single_destination:
            self.resolve_queue(Destination(rows.topic or ""))
            stages = self._stage_properties(rows, [b"-"], [rows.topic])
            self._stage_rows(self._next_broker(rows), rows, range(rows.row_count), stages)
            return
        topics: list[str | None] = []
        queue_ids = []
        indices_by_broker: dict[str, list[int]] = {}
        for index, destination in enumerate(rows.list_destinations()):
            queue = self.resolve_queue(destination)
            topics.append(destination.topic)
            if queue is None:
                queue_ids.append(b"-")
                broker = ""  # any broker
            else:
                queue_ids.append(b"%d" % queue.queue_id)
                broker = queue.broker
            indices_by_broker.setdefault(broker, []).append(index)
        stages = self._stage_properties(rows, queue_ids, topics)
        for broker, indices in indices_by_broker.items():
            self._stage_rows(broker or self._next_broker(rows), rows, indices, stages)

    def send_single(
        self, topic: str, queue: MessageQueue | None, encoded: EncodedRows, index: int
    ) -> SendResult:
        """Stage one row as a message of its own, and return the broker's result.

        A broker gives a single message without UNIQ_KEY an id of its own. So the property with the
        id of the staged row is renamed to UNIQ_KEY before the row is sent. The call waits for the
        broker, and retries during an outage.
        """
        entry = encoded.request_body(index, index + 1)
        ((flag, body, properties, _),) = decode_batch(entry)
        staged_id_start = f"\x02{STAGED_ID}\x01".encode()
        message_id_start = f"\x02{UNIQ_KEY}\x01".encode()
        renamed_properties = bytes(properties).replace(staged_id_start, message_id_start, 1)
        single_row = encode_rows(
            pa.array([bytes(body)]),
            pa.array([renamed_properties]),
            flags=pa.array([flag], pa.int32()),
        )
        return super().send_single(topic, queue, single_row, 0)

    def _next_broker(self, rows: PreparedRows) -> str:
        """Return the next broker in turn, for rows without a fixed queue.

        If all rows have one topic, only brokers with that topic are chosen, unless no staging
        broker has it.
        """
        candidates: Sequence[str] = self._brokers
        if len(candidates) > 1 and rows.topic is not None:
            queues = self._producer.write_queues(rows.topic)
            with_topic = {queue.broker for queue in queues} & set(candidates)
            candidates = sorted(with_topic) or candidates
        self._broker_counter += 1
        return candidates[self._broker_counter % len(candidates)]

    def _stage_properties(
        self, rows: PreparedRows, queue_ids: list[bytes], topics: list[str | None]
    ) -> Any:
        """Return the encoded stage property of the rows, which says where they are published later.

        `queue_ids` and `topics` have one item for each row, or a single item for all rows. A queue
        id is `-` if any queue may be used. The result is a binary column, or bytes if it is the
        same for all rows.
        """
        start = f"{STAGE_PROPERTY}\x01{self._owner.prefix}".encode()
        topic_names = [(topic or "").encode() for topic in topics]
        if rows.delays is None and len(queue_ids) == len(topics) == 1:
            return start + b"%s/-/%s\x02" % (queue_ids[0], topic_names[0])
        if rows.delays is None:
            delays = pa.array([b"-"] * rows.row_count)
        else:
            delays = pc.fill_null(rows.delays, "-").cast(pa.binary())
        return pc.binary_join_element_wise(
            start,
            _column_or_constant(queue_ids),
            b"/",
            delays,
            b"/",
            _column_or_constant(topic_names),
            b"\x02",
            b"",  # the separator of the other arguments
        )

    def _stage_rows(
        self, broker: str, rows: PreparedRows, indices: Sequence[int], stages: Any
    ) -> None:
        """Submit the rows at `indices` to the staging topic of `broker`.

        `stages` has the encoded stage property of all `rows`. When rows are stored, the range of
        their offsets is added to `staged_ranges`.
        """
        columns = (rows.bodies, rows.properties, stages, rows.ids, rows.flags)
        bodies, properties, stages, row_ids, flags = _take_rows(columns, indices, rows.row_count)
        ids = encode_ids(row_ids, self._unique_ids, len(bodies), STAGED_ID)
        encoded = encode_rows(bodies, stages, ids, properties, flags=flags)
        queue = MessageQueue(STAGING_TOPIC, broker, self._owner.partition % STAGING_QUEUES)

        def record_range(result: SendResult, start: int, stop: int) -> None:
            """Add the offsets of the stored rows [start, stop), and their bodies."""
            self.staged_ranges.add(
                result.queue.broker,
                result.queue.queue_id,
                result.queue_offset,
                stop - start,
                encoded.message_bodies(start, stop),
            )

        self.send_batches(STAGING_TOPIC, queue, encoded, rows, indices, record_range)


def _column_or_constant(row_values: Sequence[bytes]) -> Any:
    """Return a binary column of the values, or the value itself if there is one for all rows."""
    return row_values[0] if len(row_values) == 1 else pa.array(row_values, pa.binary())


def create_producer(options: Options) -> Producer:
    """Return the producer that the options describe. The caller closes it.

    Raises ConfigurationError if the name servers or one of two access keys are missing.
    """
    return Producer(
        options.require("nameServers").split(";"),
        group=options["group"] or DEFAULT_PRODUCER_GROUP,
        credentials=options.credentials,
        tls=options.tls or False,
        timeout_ms=options["timeoutMs"],
    )


def send_all(batches: Iterator[PreparedRows], sender: Sender) -> None:
    """Send all batches of rows, and wait until each row is acknowledged or refused.

    At the end, also after an error, the send thread is closed. Raises the errors of `sender.send`
    and of the requests.
    """
    try:
        for rows in batches:
            sender.send(rows)
        sender.send_thread.flush()
    finally:
        sender.send_thread.close()
