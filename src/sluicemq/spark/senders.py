"""Where the rows of a task go: to their topics at once, or to the staging topic; and bad rows.

At least once: rows of one topic and queue make a batch; delayed rows are sent one by one, since
RocketMQ takes no delay in a batch. Exactly once (design/0007): all rows of a task make batches
for the staging topic, and a property says where each belongs; only rows of one broker go together.

A row is bad for what it holds: no body, a tag with a bar, properties that are too large, what a
broker calls illegal (larger than it takes, a delay that is too long). That a topic or a queue is
not there is no fault of a row; it may be mended, and the task fails. Batches are checked as
columns; only one that fails, here or at the broker, is halved until its bad rows are found, so good
data costs nothing. What becomes of them says the option `badRows`:

    fail         the first bad row is the error: its number, its keys, the column, the cure
    skip         it is left out, counted and logged
    topic:NAME   it goes to that topic as JSON, with the reason in properties; exactly once too
"""

import base64
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import orjson
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
from sluicemq.spark.errors import ride_out
from sluicemq.spark.options import Options
from sluicemq.spark.rows import (
    Encoded,
    RowError,
    UniqueIdColumns,
    as_new,
    batches_of,
    body_column,
    checked_ids,
    checked_sizes,
    delay_column,
    encoded,
    flag_column,
    id_column,
    of_column,
    plain_column,
    property_column,
)
from sluicemq.wire.staging import STAGE_PROPERTY, STAGED_ID, STAGING_QUEUES, Owner

T = TypeVar("T")


class Place(NamedTuple):
    """Where a row goes: its topic, and a queue or a sharding key. `broker` is the one that has the
    queue; it counts with a queue id only."""

    topic: str
    queue_id: int | None = None
    key: str | None = None
    broker: str | None = None


BATCH_BYTES: Final = 1024 * 1024
DEDUP_PROPERTY: Final = "SLUICE_DEDUP_KEY"
REASON_PROPERTY: Final = "SLUICE_BAD_ROW"
COLUMN_PROPERTY: Final = "SLUICE_BAD_COLUMN"
CUT_PROPERTY: Final = "SLUICE_BAD_ROW_CUT"
FAIL, SKIP, TOPIC = "fail", "skip", "topic:"
_AHEAD: Final = 8
_ID_BYTES: Final = 32
_NAMED_BYTES: Final = 64
"""Names, separators, a queue, a delay, a row's number: at most so many around the values below."""
_NAMED_BY: Final = ("message_id", "keys", "sharding_key")
_DELAYS: Final = ("delay_level", "delay_ms", "deliver_at")
_SHOWN: Final = 100
_LOGGED_MAX: Final = 5
_CUT_LENGTH: Final = 1_000
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """Which task of which epoch of which query sends. Numbers rows too, for de-duplication."""

    query: str
    epoch: int
    partition: int
    attempt: int


def task_now(query: str | None, epoch: int = 0) -> Task:
    """The task that runs here; `epoch` counts where `query` is given. Raises ConfigurationError
    when Spark does not say whose it is."""
    context = TaskContext.get()
    if context is None:
        raise ConfigurationError("this is no task of Spark.", fix="Write with df.write.")
    if query is None:
        query = context.getLocalProperty("sql.streaming.queryId")
        text = context.getLocalProperty("streaming.sql.batchId")
        if not query or not text:
            raise ConfigurationError(
                "Spark does not say to which streaming query this task belongs.",
                fix="Use delivery=at-least-once.",
            )
        epoch = int(text)
    return Task(query, epoch, context.partitionId(), context.attemptNumber())


class Rows:
    """An Arrow batch made ready: `bodies` and `properties` (without ids) are binary columns, the
    others say where rows go, None where no column does. `numbers` are those of its rows in their
    task. Raises RowError when a row is bad."""

    def __init__(
        self,
        batch: Any,
        roles: Mapping[str, str],
        topic: str | None,
        numbers: Sequence[int] = (),
    ) -> None:
        self.batch = batch
        self.numbers = numbers
        given = {role: plain_column(batch.column(name)) for role, name in roles.items()}
        values, self.left_out = as_new(given, SYSTEM_CLOCK.now_ms())
        self.count = batch.num_rows
        self.bodies = body_column(values["body"])
        self.properties = property_column(values, self.count)
        self.delays = delay_column(values)
        self.topic = topic
        self.topics = None if topic is not None else values.get("topic")
        self.ids = None if "message_id" not in values else checked_ids(values["message_id"])
        self.flags = None if "flag" not in values else flag_column(values["flag"])
        self.queue_ids = values.get("queue_id")
        self.brokers = None if self.queue_ids is None else values.get("broker")
        self.sharding_keys = values.get("sharding_key")
        if self.topics is not None:
            if self.topics.null_count:
                fix = "Filter such rows, or fill the column."
                raise RowError("a row has no topic: it is null.", role="topic", fix=fix)
            with of_column("topic"):
                for name in pc.unique(self.topics).to_pylist():
                    check_topic_to_send(name)
        if self.queue_ids is not None and (pc.min(self.queue_ids).as_py() or 0) < 0:
            fix = "Give 0 or more, or null for any."
            raise RowError("a row's queue_id is negative.", role="queue_id", fix=fix)

    def check_sizes(self, added_bytes: int) -> None:
        """Raises RowError; `added_bytes` are those of properties that a sender adds."""
        ids = b"-" * _ID_BYTES if self.ids is None else pc.fill_null(self.ids, "-" * _ID_BYTES)
        checked_sizes(self.bodies, self.properties, ids, b"-" * added_bytes)

    @property
    def is_uniform(self) -> bool:
        """Do all rows go anywhere in one topic?"""
        return self.topics is None and self.queue_ids is None and self.sharding_keys is None

    def places(self) -> list[Place]:
        """Where each row goes; a queue id counts before a sharding key."""
        nothing = [None] * self.count
        topics = [self.topic] * self.count if self.topics is None else self.topics.to_pylist()
        queue_ids, keys, brokers = (
            nothing if column is None else column.to_pylist()
            for column in (self.queue_ids, self.sharding_keys, self.brokers)
        )
        return [
            Place(topic, None, key or None) if queue_id is None else Place(
                topic, queue_id, None, broker or None
            )
            for topic, queue_id, key, broker in zip(topics, queue_ids, keys, brokers, strict=True)
        ]  # fmt: skip


class Lane:
    """Sends in order on a thread of its own, so that the broker works while the next rows are made
    ready. `wait` returns when everything is acknowledged; an error comes out of either method."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sluicemq-sink")
        self._under_way: deque[Future[None]] = deque()

    def send(self, work: Callable[[], None]) -> None:
        while len(self._under_way) >= _AHEAD:
            self._under_way.popleft().result()
        self._under_way.append(self._thread.submit(work))

    def wait(self) -> None:
        while self._under_way:
            self._under_way.popleft().result()

    def close(self) -> None:
        """What has not begun is not sent any more."""
        self._thread.shutdown(cancel_futures=True)


class Refused(NamedTuple):
    """A row that a broker refuses for what it is: too large for it, a delay that is too long."""

    rows: Rows
    at: int
    error: RequestError


class Sender:
    """What both senders share. Every row is acknowledged when `lane.wait` returns."""

    def __init__(self, producer: Producer, batch_messages: int) -> None:
        self.refused: list[Refused] = []
        self.lane = Lane()
        self.topics: set[str] = set()
        self._producer = producer
        self._batch_messages = batch_messages
        self._ids = UniqueIdColumns()
        self._queues: dict[Place, MessageQueue | None] = {}

    def added_bytes(self, topic: str) -> int:
        """At most so many bytes of properties are added to a row of a topic."""
        raise NotImplementedError

    def send(self, rows: Rows) -> None:
        raise NotImplementedError

    def queue_of(self, place: Place) -> MessageQueue | None:
        """Return the queue a row goes to, looked up once for each place; None leaves the choice
        open. Raises RouteNotFoundError, ConfigurationError."""
        if place not in self._queues:
            topic = place.topic
            if topic not in self.topics:
                self.topics.add(check_topic_to_send(topic))
            found = None
            if place.queue_id is not None or place.key is not None:
                queues = self.through(partial(self._producer.write_queues, topic))
                found = (
                    choose_by_sharding_key(queues, place.key) if place.key is not None
                    else queue_with_id(queues, place)
                )  # fmt: skip
            self._queues[place] = found
        return self._queues[place]

    def send_alone(
        self, topic: str, queue: MessageQueue | None, made: Encoded, number: int
    ) -> SendResult:
        """Send one of the encoded rows as a message of its own (310). Raises RequestError."""
        ((flag, body, properties, _),) = decode_batch(made.request(number, number + 1))
        text = properties.decode()
        message_id = text.partition(f"{UNIQ_KEY}\x01")[2].partition("\x02")[0]
        outgoing = OutgoingMessage(topic, bytes(body), text, message_id, 0, flag, True)
        return self.through(partial(self._producer.send_outgoing, outgoing, queue=queue))

    def through(self, work: Callable[[], T]) -> T:
        """Does it, through an outage as long as the producer's own timeout."""
        return ride_out(work, self._producer.timeout_ms / 1000)

    def send_in_runs(
        self,
        topic: str,
        queue: MessageQueue | None,
        made: Encoded,
        rows: Rows,
        indices: Sequence[int],
        done: Callable[[SendResult, int, int], None],
    ) -> None:
        """Sends encoded rows in requests that are not too large. A request that is refused as
        illegal is sent in halves, down to the row."""

        def send(start: int, stop: int) -> None:
            request = made.request(start, stop)
            send_encoded = partial(self._producer.send_encoded, topic, request, queue=queue)
            try:
                if stop - start == 1 and len(request) > BODY_BYTES_MAX:
                    # The limit of a broker counts all of a batch, and the body alone otherwise.
                    result = self.send_alone(topic, queue, made, start)
                else:
                    result = self.through(send_encoded)
            except RequestError as error:
                if error.code != MESSAGE_ILLEGAL:
                    raise
                if stop - start == 1:
                    self.refused.append(Refused(rows, indices[start], error))
                    return
                half = (start + stop) // 2
                send(start, half)
                send(half, stop)
            else:
                done(result, start, stop)

        for start, stop in made.runs(self._batch_messages, BATCH_BYTES):
            self.lane.send(partial(send, start, stop))


def queue_with_id(queues: Sequence[MessageQueue], place: Place) -> MessageQueue:
    """Return the queue that a row names by its id: the one of its broker, or of the first broker if
    it names none. Rows of a broker that does not have that queue, as of another cluster, stay
    together: the name of their broker chooses one of those which have it. Raises
    RouteNotFoundError when no broker has it."""
    having = [queue for queue in queues if queue.queue_id == place.queue_id]
    if not having:
        ids = ", ".join(map(str, sorted({queue.queue_id for queue in queues})))
        raise RouteNotFoundError(
            f"the topic {place.topic!r} has no queue {place.queue_id} that can be written to.",
            fix=f"It has {ids or 'none'}.",
        )
    if place.broker is None:
        return having[0]
    for queue in having:
        if queue.broker == place.broker:
            return queue
    return having[zlib.crc32(place.broker.encode()) % len(having)]


def _chosen(columns: Iterable[Any], indices: Sequence[int], count: int) -> list[Any]:
    """The columns at some of `count` rows; constants as they are."""
    if len(indices) == count:
        return list(columns)
    at = pa.array(indices, pa.int64())
    return [pc.take(one, at) if isinstance(one, pa.Array) else one for one in columns]


class DirectSender(Sender):
    """At least once. `task` adds a property by which a reader can tell a repeated row."""

    def __init__(self, producer: Producer, batch_messages: int, task: Task | None = None) -> None:
        super().__init__(producer, batch_messages)
        self.sent = 0
        self._added_bytes, self._dedup_start = _NAMED_BYTES, ""
        if task is not None:
            self._added_bytes += len(task.query.encode()) + _NAMED_BYTES
            self._dedup_start = f"{task.query}/{task.epoch}/{task.partition}/"
        self._rows = 0

    def added_bytes(self, _: str) -> int:
        return self._added_bytes

    def send(self, rows: Rows) -> None:
        properties, first = rows.properties, self._rows
        if self._dedup_start:  # the same when a task, or an epoch, is run again
            numbers = pa.array(range(first, first + rows.count)).cast(pa.string())
            start = f"{DEDUP_PROPERTY}\x01{self._dedup_start}"
            keys = pc.binary_join_element_wise(start, numbers, "\x02", "").cast(pa.binary())
            properties = pc.binary_join_element_wise(properties, keys, b"")
            self._rows += rows.count
        if rows.delays is None and rows.is_uniform:
            assert rows.topic is not None
            self.queue_of(Place(rows.topic))
            self._send(rows, range(rows.count), rows.topic, None, properties)
            return
        delays = [None] * rows.count if rows.delays is None else rows.delays.to_pylist()
        places = rows.places()
        groups: dict[tuple[str, MessageQueue | None], list[int]] = {}
        for index, (place, delay) in enumerate(zip(places, delays, strict=True)):
            if delay is None:
                groups.setdefault((place.topic, self.queue_of(place)), []).append(index)
        for (topic, queue), indices in groups.items():
            self._send(rows, indices, topic, queue, properties)
        if rows.delays is not None:
            self.lane.wait()
            for index, delay in enumerate(delays):
                if delay is not None:
                    self._send_later(rows, index, places[index], delay, properties)

    def _send(
        self,
        rows: Rows,
        indices: Sequence[int],
        topic: str,
        queue: MessageQueue | None,
        properties: Any,
    ) -> None:
        columns = (rows.bodies, properties, rows.ids, rows.flags)
        bodies, properties, given, flags = _chosen(columns, indices, rows.count)
        ids = id_column(given, self._ids, len(bodies))
        made = encoded(bodies, ids, properties, flags=flags)
        if is_retry_topic(topic):  # brokers take no batch there

            def send_each() -> None:
                for number in range(len(made)):
                    self.send_alone(topic, None, made, number)
                    self.sent += 1

            self.lane.send(send_each)
            return

        def done(_: SendResult, start: int, stop: int) -> None:
            self.sent += stop - start

        self.send_in_runs(topic, queue, made, rows, indices, done)

    def _send_later(
        self, rows: Rows, index: int, place: Place, delay: str, properties: Any
    ) -> None:
        """Send a row that is delivered later, with everything that a batch would carry of it."""
        amount = int(delay[1:])
        when = delay_properties(Message(
            place.topic, b"",
            delay_level=amount if delay[0] == "L" else 0,
            delay_ms=amount if delay[0] == "M" else None,
            deliver_at_ms=amount if delay[0] == "T" else None,
        ))  # fmt: skip
        later = "".join(f"{name}\x01{value}\x02" for name, value in when.items()).encode()
        columns = (rows.bodies, properties, rows.ids, rows.flags)
        bodies, properties, given, flags = _chosen(columns, [index], rows.count)
        made = encoded(bodies, id_column(given, self._ids, 1), properties, later, flags=flags)
        try:
            self.send_alone(place.topic, self.queue_of(place), made, 0)
            self.sent += 1
        except RequestError as error:
            if error.code != MESSAGE_ILLEGAL:
                raise
            self.refused.append(Refused(rows, index, error))


class StagingSender(Sender):
    """Exactly once: one attempt of one task. `brokers` are the masters that can stage."""

    def __init__(
        self, producer: Producer, batch_messages: int, task: Task, brokers: tuple[str, ...]
    ) -> None:
        super().__init__(producer, batch_messages)
        self.staged = StagedRangeList(task.partition, task.attempt)
        self._owner = Owner(task.query, task.epoch, task.partition, task.attempt)
        self._brokers = brokers
        self._turn = task.partition

    def added_bytes(self, topic: str) -> int:
        return len(self._owner.prefix.encode()) + len(topic.encode()) + 2 * _NAMED_BYTES

    def send(self, rows: Rows) -> None:
        if rows.is_uniform:
            self.queue_of(Place(rows.topic or ""))
            stages = self._stages(rows, [b"-"], [rows.topic])
            self._stage(self._any_broker(rows), rows, range(rows.count), stages)
            return
        found = [(place.topic, self.queue_of(place)) for place in rows.places()]
        queue_ids = [b"-" if queue is None else b"%d" % queue.queue_id for _, queue in found]
        stages = self._stages(rows, queue_ids, [topic for topic, _ in found])
        groups: dict[str, list[int]] = {}
        for index, (_, queue) in enumerate(found):
            groups.setdefault("" if queue is None else queue.broker, []).append(index)
        for broker, indices in groups.items():
            self._stage(broker or self._any_broker(rows), rows, indices, stages)

    def send_alone(
        self, topic: str, queue: MessageQueue | None, made: Encoded, number: int
    ) -> SendResult:
        """A broker gives a message without UNIQ_KEY an id of its own, so the row has it by that
        name already."""
        ((flag, body, properties, _),) = decode_batch(made.request(number, number + 1))
        text = properties.decode().replace(f"\x02{STAGED_ID}\x01", f"\x02{UNIQ_KEY}\x01", 1)
        one = encoded(pa.array([bytes(body)]), pa.array([text.encode()]),
                      flags=pa.array([flag], pa.int32()))  # fmt: skip
        return super().send_alone(topic, queue, one, 0)

    def _any_broker(self, rows: Rows) -> str:
        """They take turns; one that has the topic where it is known."""
        having: Sequence[str] = self._brokers
        if len(having) > 1 and rows.topic is not None:
            queues = self._producer.write_queues(rows.topic)
            having = sorted({queue.broker for queue in queues} & set(having)) or having
        self._turn += 1
        return having[self._turn % len(having)]

    def _stages(self, rows: Rows, queue_ids: list[bytes], topics: list[str | None]) -> Any:
        """The stage property of each row (`wire.bodies.epochs.Stage`), or the one of all."""
        start = f"{STAGE_PROPERTY}\x01{self._owner.prefix}".encode()
        names = [(topic or "").encode() for topic in topics]
        if rows.delays is None and len(queue_ids) == len(topics) == 1:
            return start + b"%s/-/%s\x02" % (queue_ids[0], names[0])
        delays = pa.array([b"-"] * rows.count) if rows.delays is None else (
            pc.fill_null(rows.delays, "-").cast(pa.binary())
        )  # fmt: skip
        columns = [
            one[0] if len(one) == 1 else pa.array(one, pa.binary()) for one in (queue_ids, names)
        ]
        return pc.binary_join_element_wise(
            start, columns[0], b"/", delays, b"/", columns[1], b"\x02", b""
        )

    def _stage(self, broker: str, rows: Rows, indices: Sequence[int], stages: Any) -> None:
        columns = (rows.bodies, rows.properties, stages, rows.ids, rows.flags)
        bodies, properties, stages, given, flags = _chosen(columns, indices, rows.count)
        ids = id_column(given, self._ids, len(bodies), STAGED_ID)
        made = encoded(bodies, stages, ids, properties, flags=flags)
        queue = MessageQueue(STAGING_TOPIC, broker, self._owner.partition % STAGING_QUEUES)

        def done(result: SendResult, start: int, stop: int) -> None:
            stored = result.queue
            self.staged.add(stored.broker, stored.queue_id, result.queue_offset, stop - start,
                            made.bodies(start, stop))  # fmt: skip

        self.send_in_runs(STAGING_TOPIC, queue, made, rows, indices, done)


def producer_of(options: Options) -> Producer:
    return Producer(
        options.required("nameServers").split(";"),
        group=options["group"] or DEFAULT_PRODUCER_GROUP,
        credentials=options.credentials,
        tls=options.tls or False,
        timeout_ms=options["timeoutMs"],
    )


def send_all(rows: Iterator[Rows], sender: Sender) -> None:
    """Every row is acknowledged when it returns."""
    try:
        for some in rows:
            sender.send(some)
        sender.lane.wait()
    finally:
        sender.lane.close()


# ---- bad rows


class RowSorter:
    """Sorts the rows of one task. `count` and `bad` are how many it has seen, and how many of them
    were bad. `policy` is the option `badRows`."""

    def __init__(
        self, roles: Mapping[str, str], topic: str | None, policy: str, sender: Sender
    ) -> None:
        self._roles = roles
        self._topic = topic
        self._policy = policy
        self._sender = sender
        self.count = 0
        self.bad = 0
        self._left_out: set[str] = set()

    def rows(self, batches: Iterator[Any]) -> Iterator[Rows]:
        """The good rows of each batch, then bad ones as messages where they are kept. Raises
        RowError under the policy `fail`."""
        for batch in (part for whole in batches for part in batches_of(whole)):
            if not batch.num_rows:
                continue
            numbers = range(self.count + 1, self.count + batch.num_rows + 1)
            try:
                whole = self._checked(batch, numbers)
            except RowError:
                bad = dict(self._bad_rows(batch, 0, batch.num_rows))
                good = [index for index in range(batch.num_rows) if index not in bad]
                if good:
                    chosen = batch.take(pa.array(good, pa.int64()))
                    yield self._checked(chosen, [numbers[index] for index in good])
                yield from self._put_away(batch, numbers, bad)
            else:
                yield whole
            self.count += batch.num_rows
            yield from self._refused()
        self._sender.lane.wait()
        yield from self._refused()

    def _checked(self, batch: Any, numbers: Sequence[int]) -> Rows:
        rows = Rows(batch, self._roles, self._topic, numbers)
        if new := rows.left_out - self._left_out:
            self._left_out |= new
            logger.info(
                "properties that belong to the first delivery of a message are left out: %s",
                ", ".join(sorted(new)),
            )
        topics = [self._topic] if rows.topics is None else pc.unique(rows.topics).to_pylist()
        rows.check_sizes(max(self._sender.added_bytes(topic or "") for topic in topics))
        return rows

    def _bad_rows(self, batch: Any, start: int, stop: int) -> Iterator[tuple[int, RowError]]:
        """Index and reason of each bad row, in their order."""
        try:
            self._checked(batch.slice(start, stop - start), ())
        except RowError as error:
            if stop - start > 1:
                half = (start + stop) // 2
                yield from self._bad_rows(batch, start, half)
                yield from self._bad_rows(batch, half, stop)
            elif self._policy == FAIL:
                raise self._failure(batch, start, self.count + start + 1, error) from None
            else:
                yield start, error

    def _refused(self) -> Iterator[Rows]:
        """What brokers refuse of the rows that were sent."""
        by_batch: dict[int, tuple[Rows, dict[int, RowError]]] = {}
        while self._sender.refused:
            rows, index, error = self._sender.refused.pop(0)
            if not rows.numbers:  # a bad row that was to be kept
                raise error
            delays = [role for role in _DELAYS if role in self._roles and "delay" in error.fact]
            row_error = RowError(f"{error.fact}.", role=(*delays, "body")[0], fix=error.fix)
            by_batch.setdefault(id(rows), (rows, {}))[1][index] = row_error
        for rows, errors in by_batch.values():
            if self._policy == FAIL:
                index = min(errors)
                raise self._failure(rows.batch, index, rows.numbers[index], errors[index])
            yield from self._put_away(rows.batch, rows.numbers, errors)

    def _put_away(
        self, batch: Any, numbers: Sequence[int], errors: Mapping[int, RowError]
    ) -> Iterator[Rows]:
        for index, error in list(errors.items())[: max(0, _LOGGED_MAX - self.bad)]:
            logger.warning("%s", self._told(batch, index, numbers[index], error))
        self.bad += len(errors)
        if self._policy.startswith(TOPIC):
            roles = {"body": "body", "properties": "properties"}
            kept = _kept(batch, errors, self._roles)
            yield Rows(kept, roles, self._policy.removeprefix(TOPIC))

    def _failure(self, batch: Any, index: int, number: int, error: RowError) -> RowError:
        fix = f"{error.fix} Or set badRows=skip, or badRows=topic:NAME to keep such rows."
        return RowError(self._told(batch, index, number, error), role=error.role, fix=fix)

    def _told(self, batch: Any, index: int, number: int, error: RowError) -> str:
        """`row 18 of partition 3 (keys 'k17'), column 'tag': …`."""
        context = TaskContext.get()
        partition = "" if context is None else f" of partition {context.partitionId()}"
        names = [
            f"{role} {str(value)[:_SHOWN]!r}"
            for role in _NAMED_BY
            if role in self._roles and (value := batch.column(self._roles[role])[index].as_py())
        ]
        named = f" ({', '.join(names)})" if names else ""
        column = self._roles.get(error.role, error.role)
        return f"row {number}{partition}{named}, column {column!r}: {error.fact}."


def _kept(batch: Any, bad: Mapping[int, RowError], roles: Mapping[str, str]) -> Any:
    """Bad rows as rows of a sink: JSON as Spark's `to_json` writes it (binary in base64, maps as
    objects), and properties. Of a row that is too large, long values are cut."""

    def text_of(value: Any) -> str:
        return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)

    def plain(text: str) -> str:  # without the two characters that separate properties
        return text.replace("\x01", "\N{SYMBOL FOR START OF HEADING}").replace(
            "\x02", "\N{SYMBOL FOR START OF TEXT}"
        )

    bodies, properties = [], []
    for index, error in bad.items():
        (row,) = batch.slice(index, 1).to_pylist(maps_as_pydicts="strict")
        column = roles.get(error.role, error.role)
        about = {REASON_PROPERTY: str(error)[:_CUT_LENGTH], COLUMN_PROPERTY: column}
        body = orjson.dumps(row, default=text_of)
        if len(body) > BODY_BYTES_MAX:
            body = orjson.dumps(_cut(row), default=text_of)
            about[CUT_PROPERTY] = "true"
        bodies.append(body)
        properties.append([(name, plain(text)) for name, text in about.items()])
    kind = pa.map_(pa.string(), pa.string())
    return pa.record_batch(
        {"body": pa.array(bodies, pa.binary()), "properties": pa.array(properties, kind)}
    )


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cut(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_cut(one) for one in value]
    return value[:_CUT_LENGTH] if isinstance(value, str | bytes) else value
