"""What travels from driver to executor: how to read (`ReadPlan`) and what (`RangePartition`).

Both are pickled by Spark. Light to import: a planning process needs neither NumPy nor the decoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from sluicemq.client.core.names import Credentials
from sluicemq.client.sync.bulk import READ_GROUP
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.net.tls import Tls
from sluicemq.spark.bodies import BodyFormat, body_format
from sluicemq.spark.offsets import QueueRange, split_ranges
from sluicemq.spark.options import Options
from sluicemq.spark.schema import SET_FOR_ALL, Column, columns_of, declared_columns
from sluicemq.spark.topics import topics_of


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How to read, the same for every range. `tags` are compared again by the reader; the topic
    of `subscription` is replaced by each range's own."""

    columns: tuple[Column, ...]
    subscription: Subscription | None
    tags: frozenset[str] | None = None
    group: str = READ_GROUP
    body: BodyFormat | None = None
    credentials: Credentials | None = None
    tls: Tls | None = None
    batch_bytes: int = 4 * 1024 * 1024
    timeout_s: float = 30.0
    fail_on_data_loss: bool = True
    fail_on_bad_property: bool = False
    hidden: frozenset[str] = SET_FOR_ALL


class RangePartition(InputPartition):  # type: ignore[misc]
    """Offsets start <= offset < end of one queue, and its broker's address. None: read nothing."""

    def __init__(self, queue: MessageQueue | None, start: int, end: int, address: str) -> None:
        super().__init__(queue)
        self.queue = queue
        self.start = start
        self.end = end
        self.address = address


def read_plan(options: Options, schema: StructType) -> ReadPlan:
    """How executors read; without a subscription yet. Raises ConfigurationError."""
    return replace(
        decoding_plan(options, schema),
        group=options["group"] or READ_GROUP,
        credentials=options.credentials,
        tls=options.tls,
        batch_bytes=options["batchBytes"],
        timeout_s=options["timeoutMs"] / 1000,
    )


def decoding_plan(options: Options, schema: StructType) -> ReadPlan:
    """The part of a plan that does not depend on where records come from; no subscription yet.
    Raises ConfigurationError, FilterSyntaxError for tags."""
    if options["filter.tags"] is not None:
        subscribe(topics_of(options).label, options["filter.tags"])
    return ReadPlan(
        columns=columns_of(schema, declared_columns(options)),
        body=body_format(options),
        subscription=None,
        fail_on_data_loss=options["failOnDataLoss"],
        fail_on_bad_property=options["badProperties"] == "fail",
        hidden=SET_FOR_ALL if options["properties"] == "own" else frozenset(),
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
