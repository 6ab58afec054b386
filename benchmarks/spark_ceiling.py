"""A Python data source that has its rows in memory: the ceiling of every Python source in Spark."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType


def arrow_schema(schema: StructType) -> Any:
    """The Arrow schema that Spark wants of a Python source for its own one."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


class Ceiling(DataSource):
    """Yields one batch from a file again and again."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> StructType:
        import json

        return StructType.fromJson(json.loads(self.options["schema"]))

    def reader(self, schema: StructType) -> "CeilingReader":
        return CeilingReader(dict(self.options))


class CeilingReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.path = options["path"]
        self.partition_count = int(options["partitions"])
        self.rows = int(options["rows"])

    def partitions(self) -> list[InputPartition]:
        share = self.rows // self.partition_count
        return [InputPartition(share) for _ in range(self.partition_count)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import pyarrow as pa

        with pa.OSFile(self.path) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
        left = partition.value
        while left > 0:
            yield batch if left >= batch.num_rows else batch.slice(0, left)
            left -= batch.num_rows
