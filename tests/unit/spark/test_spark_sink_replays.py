"""What replays give the sink besides: ids, properties with reserved names, numbered writes."""

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from sluicemq.errors import ConfigurationError
from sluicemq.spark.options import WRITE, parse_options
from sluicemq.spark.rows import UniqueIdColumns, encode_ids, encode_properties
from sluicemq.spark.source import BatchSink, resolve_roles

MAP = pa.map_(pa.string(), pa.string())


def test_a_row_keeps_the_id_it_is_given_and_gets_one_where_there_is_none() -> None:
    given = pa.array(["AA", None, ""], pa.string())
    first, *rest = encode_ids(given, UniqueIdColumns(), 3).to_pylist()
    assert first == b"UNIQ_KEY\x01AA\x02"
    assert all(len(one) == len(b"UNIQ_KEY\x01\x02") + 32 for one in rest)
    assert len(set(rest)) == 2
    assert encode_ids(given.slice(0, 1), UniqueIdColumns(), 1, "X").to_pylist() == [b"X\x01AA\x02"]
    with pytest.raises(ConfigurationError, match=r"U\+0001"):
        encode_ids(pa.array(["A\x02B"]), UniqueIdColumns(), 1)


def test_system_properties_may_have_reserved_names() -> None:
    rows = [[("RETRY_TOPIC", "orders"), ("UNIQ_KEY", "left out"), ("none", None)], None]
    found = encode_properties({"system_properties": pa.array(rows, MAP)}, 2).to_pylist()
    assert found == [b"WAIT\x01true\x02RETRY_TOPIC\x01orders\x02", b"WAIT\x01true\x02"]
    with pytest.raises(ConfigurationError, match="separate properties"):
        encode_properties({"system_properties": pa.array([[("a", "b\x02c")]], MAP)}, 1)


def test_columns_of_an_archive_can_be_written() -> None:
    options = parse_options({"topic": "t"}, WRITE)
    names = ("body", "born_host", "message_id")
    schema = StructType([StructField(name, StringType()) for name in names])
    assert resolve_roles(schema, options) == {"body": "body", "message_id": "message_id"}


def test_numbers_of_writes_need_a_name() -> None:
    options = parse_options({"nameServers": "127.0.0.1:1", "queryEpoch": "3"}, WRITE)
    schema = StructType([StructField("body", StringType()), StructField("topic", StringType())])
    with pytest.raises(ConfigurationError, match="without 'queryId'"):
        BatchSink(options, schema, overwrite=False)
