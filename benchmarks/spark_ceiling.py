"""A Python data source that has its rows in memory: the ceiling of every Python source in Spark.

They are the very rows that the others read, decoded beforehand, in an Arrow file that is mapped:
a source whose own work costs nothing. As a stream it is one micro-batch of them all
(Trigger.AvailableNow), or with `rows` 0 micro-batches without rows, one after the other: the floor
of what a micro-batch of a Python source costs.
"""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import StructType


def arrow_schema(schema: StructType) -> Any:
    """The Arrow schema that Spark wants of a Python source for its own one."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


class Ceiling(DataSource):
    """Yields the batches of a file."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> StructType:
        import json

        return StructType.fromJson(json.loads(self.options["schema"]))

    def reader(self, schema: StructType) -> "CeilingReader":
        return CeilingReader(dict(self.options))

    def streamReader(self, schema: StructType) -> "CeilingStream":  # noqa: N802 - Spark's name
        return CeilingStream(dict(self.options))


class CeilingReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.path = options["path"]
        self.partition_count = int(options["partitions"])
        self.rows = int(options["rows"])

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self.partition_count)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return batches(self.path, partition.value, self.partition_count, self.rows)


class CeilingStream(DataSourceStreamReader):
    """Offsets count micro-batches."""

    def __init__(self, options: dict[str, str]) -> None:
        self.path = options["path"]
        self.partition_count = int(options["partitions"])
        self.rows = int(options["rows"])
        self.micro_batches = 0

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"micro_batch": 0}

    def latestOffset(self, *_: Any) -> dict[str, int]:  # noqa: N802 - Spark's name
        self.micro_batches = 1 if self.rows else self.micro_batches + 1
        return {"micro_batch": self.micro_batches}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self.partition_count)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield from batches(self.path, partition.value, self.partition_count, self.rows)


def batches(path: str, number: int, partition_count: int, rows: int) -> Iterator[Any]:
    """One partition's share of the file's batches, none when there are to be no rows."""
    import pyarrow as pa

    if not rows:
        return
    with pa.memory_map(path) as file:
        reader = pa.ipc.open_file(file)
        for at in range(number, reader.num_record_batches, partition_count):
            yield reader.get_batch(at)
