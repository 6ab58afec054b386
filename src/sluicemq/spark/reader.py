"""What an executor does: pull one range of one queue and yield Arrow batches of it.

    BulkReader  pulls in flight, whole records as they came off the socket
    gathered    small answers (a Java broker gives 32 messages a pull) joined to larger blocks
    RecordDecoder, typed_column   columns

Heavy to import (NumPy, pyarrow): only executors do.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from sluicemq.client.core import requests
from sluicemq.client.core.answers import expect_success, number
from sluicemq.client.core.names import signed
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
)
from sluicemq.model.topic import MessageQueue
from sluicemq.net.blocking import BlockingChannel
from sluicemq.record.arrow import RecordDecoder
from sluicemq.spark.bodies import ERROR, BodyFormat
from sluicemq.spark.outage import Outage
from sluicemq.spark.plan import RangePartition, ReadPlan
from sluicemq.spark.schema import Column
from sluicemq.spark.typed import typed_column
from sluicemq.spark.worker import keep_imports

logger = logging.getLogger(__name__)

BLOCK_BYTES_MIN: Final = 1024 * 1024
"""Answers are joined until a block has so many bytes: batches of 10 k rows and more cost the least
a row in Spark (spec/spark.md)."""


@dataclass(slots=True)
class Tally:
    """What one partition's read saw; logged at its end when something was odd."""

    rows: int = 0
    bytes_read: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    bad_bodies: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    lost: int = 0
    damaged: int = 0


def read_range(plan: ReadPlan, partition: RangePartition) -> Iterator[Any]:
    """Arrow batches of a range, columns in the plan's order.

    Raises OffsetOutOfRangeError when messages of the range are gone (and failOnDataLoss is on),
    ConfigurationError for a bad property under badProperties=fail, and the client's errors.
    """
    if partition.queue is None:
        return
    tally = Tally()
    decoder = decoder_of(plan, partition.queue.broker)
    for block in gathered(_chunks(plan, partition, tally)):
        for batch in decoder.decode(block):
            yield finished(batch, plan, partition.queue, tally)
    report_tally(partition.queue, tally)


def decoder_of(plan: ReadPlan, broker: str) -> RecordDecoder:
    """Decodes records into what `finished` takes."""
    keep_imports()
    return RecordDecoder(
        _decoded_names(plan),
        promoted={
            column.name: column.property_name
            for column in plan.columns
            if column.property_name is not None
        },
        broker=broker,
        tags=plan.tags,
        hidden=plan.hidden,
    )


def finished(batch: Any, plan: ReadPlan, queue: MessageQueue, tally: Tally) -> Any:
    """A decoded batch as Spark gets it: bodies read, properties typed, columns in order."""
    tally.rows += batch.num_rows
    return arranged(with_bodies(batch, plan.body, queue, tally), plan, tally)


def _decoded_names(plan: ReadPlan) -> list[str]:
    """The base columns that are decoded; with a body format also what an error's place needs."""
    names = [column.name for column in plan.columns if column.property_name is None]
    if plan.body is None or not {"body", ERROR} & set(names):
        return names
    wanted = dict.fromkeys((*names, "body", "queue_offset"))
    return [name for name in wanted if name != ERROR]


def with_bodies(batch: Any, how: BodyFormat | None, queue: MessageQueue, tally: Tally) -> Any:
    """The batch with `body` as texts or structs, and the column `_error`."""
    if how is None or "body" not in batch.schema.names:
        return batch
    from sluicemq.spark.decoding import decoded_bodies  # noqa: PLC0415 - bodies only

    found = decoded_bodies(batch.column("body"), how)
    if found.first_bad is not None:
        row, reason = found.first_bad
        place = f"{queue.broker}:{queue.queue_id} of {queue.topic!r}"
        offset = batch.column("queue_offset")[row].as_py()
        if how.must_be_good:
            raise ConfigurationError(
                f"the body at offset {offset} of {place} is {reason}.",
                cure="Set badBody=null to have the reason in the column _error.",
            )
        tally.bad_bodies += len(found.errors) - found.errors.null_count
        tally.examples.setdefault(ERROR, f"offset {offset}: {reason}")
    kept = [name for name in batch.schema.names if name != "body"]
    arrays = [*(batch.column(name) for name in kept), found.bodies, found.errors]
    return pa.RecordBatch.from_arrays(arrays, names=[*kept, "body", ERROR])


def gathered(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """The same bytes in blocks of at least BLOCK_BYTES_MIN, the last one excepted.

    A large chunk is handed on as it is; small ones are copied together.
    """
    held = bytearray()
    for chunk in chunks:
        if not held and len(chunk) >= BLOCK_BYTES_MIN:
            yield chunk
            continue
        held += chunk
        if len(held) >= BLOCK_BYTES_MIN:
            yield held
            held = bytearray()
    if held:
        yield held


def arranged(batch: Any, plan: ReadPlan, tally: Tally) -> Any:
    """The batch with typed property columns, in the order of the plan."""
    arrays = []
    for column in plan.columns:
        array = batch.column(column.name)
        if column.property_name is not None:
            array, bad, example = typed_column(array, column.kind, column.property_name)
            if bad:
                _note_bad(column, bad, example, plan, tally)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, names=[column.name for column in plan.columns])


def _note_bad(column: Column, bad: int, example: str, plan: ReadPlan, tally: Tally) -> None:
    if plan.fail_on_bad_property:
        raise ConfigurationError(
            f"the property {column.property_name!r} has the value {example!r}, which is no"
            f" {column.kind}.",
            cure="Choose another type, or badProperties=null.",
        )
    tally.bad[column.name] = tally.bad.get(column.name, 0) + bad
    tally.examples.setdefault(column.name, example)


def _chunks(
    plan: ReadPlan, partition: RangePartition, tally: Tally
) -> Iterator[bytes | memoryview]:
    """Raw records of the range; past what is lost when that is allowed."""
    start = partition.start
    outage = Outage(plan.timeout_s)
    while start < partition.end:
        reader = _open(plan, partition, start)
        try:
            with reader:
                for chunk in reader:
                    outage.over()
                    yield chunk
            start = partition.end
        except OffsetOutOfRangeError as error:
            if plan.fail_on_data_loss:
                raise OffsetOutOfRangeError(
                    str(error), cure="Set failOnDataLoss=false to read what is left."
                ) from None
            start = _first_left(plan, partition, reader.position)
            tally.lost += start - reader.position
        except (ConnectionLostError, RequestTimeoutError) as error:
            start = reader.position
            outage.pause(error)
        finally:
            tally.bytes_read += reader.bytes_read


def _open(plan: ReadPlan, partition: RangePartition, start: int) -> BulkReader:
    assert partition.queue is not None
    topic, broker, queue_id = partition.queue
    return BulkReader(
        partition.address,
        topic,
        queue_id,
        start,
        partition.end,
        None if plan.subscription is None else replace(plan.subscription, topic=topic),
        broker=broker,
        group=plan.group,
        credentials=plan.credentials,
        tls=plan.tls or False,
        batch_bytes=plan.batch_bytes,
        timeout_s=plan.timeout_s,
    )


def _first_left(plan: ReadPlan, partition: RangePartition, position: int) -> int:
    """The first offset of the range that is still stored; its end when there is none."""
    assert partition.queue is not None
    channel = BlockingChannel(partition.address, plan.timeout_s, plan.tls)
    try:
        answer = channel.call(signed(requests.offset_min(partition.queue), plan.credentials))
        first = number(expect_success(answer, partition.address), "offset")
    finally:
        channel.close()
    return min(first, partition.end) if first > position else partition.end


def report_tally(queue: MessageQueue, tally: Tally) -> None:
    """Logs what was odd about a read that is over."""
    where = f"{queue.broker}:{queue.queue_id} of {queue.topic!r}"
    if tally.lost:
        logger.warning("%d offsets of %s are gone and were not read", tally.lost, where)
    if tally.damaged:
        logger.warning("%d damaged messages of %s were not read", tally.damaged, where)
    if tally.bad_bodies:
        logger.warning(
            "%d bodies of %s are null, the reasons in _error; %s",
            tally.bad_bodies, where, tally.examples[ERROR],
        )  # fmt: skip
    for name, count in tally.bad.items():
        logger.warning(
            "%d values of the property column %r are null in %s: not of its type, for example %r",
            count, name, where, tally.examples[name],
        )  # fmt: skip
