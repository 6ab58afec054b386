"""Columns that are built only by name are equal to what the scalar codec reads."""

import pyarrow as pa

from sluicemq.model.ids import Host, encode_host
from sluicemq.record.arrow import EXTRA_COLUMNS, RecordDecoder
from sluicemq.record.codec import decode_records, encode_properties, encode_record

HOSTS = [encode_host(Host(f"10.0.0.{number}", 40_000 + number)) for number in range(3)]
WIDE = [encode_host(Host(f"2001:db8::{number}", 50_000)) for number in range(1, 3)]


def record(offset: int) -> bytes:
    wide = offset % 5 == 0
    return encode_record(
        topic="trades", queue_id=1, queue_offset=offset, physical_offset=offset * 1_000,
        body=b"x" * (offset + 1), properties=encode_properties({"n": str(offset)}), flag=offset - 9,
        sys_flag=8 if offset % 2 else 0, born_time_ms=1, born_host=HOSTS[offset % 3],
        store_time_ms=2, store_host=WIDE[offset % 2] if wide else HOSTS[0],
        prepared_offset=offset * 7,
    )  # fmt: skip


def test_extra_columns_are_what_the_scalar_codec_reads() -> None:
    data = b"".join(record(offset) for offset in range(40))
    batches = list(RecordDecoder(("queue_offset", *EXTRA_COLUMNS)).decode(data))
    rows = pa.Table.from_batches(batches).to_pylist()
    for row, stored in zip(rows, decode_records(data), strict=True):
        assert row == {
            "queue_offset": stored.queue_offset, "born_host": str(stored.born_host),
            "store_host": str(stored.store_host), "flag": stored.flag, "sys_flag": stored.sys_flag,
            "physical_offset": stored.physical_offset, "prepared_offset": stored.prepared_offset,
            "body_crc": stored.body_crc, "size_bytes": stored.size_bytes,
        }  # fmt: skip
    assert {row["store_host"] for row in rows} > {"[2001:db8::1]:50000", "10.0.0.0:40000"}


def test_extra_columns_have_the_types_of_the_spark_schema() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    from sluicemq.spark.schema import parse_columns, to_spark_schema

    schema = to_arrow_schema(
        to_spark_schema(parse_columns(",".join(EXTRA_COLUMNS))), timezone="UTC"
    )
    assert {field.name: field.type for field in schema} == EXTRA_COLUMNS
