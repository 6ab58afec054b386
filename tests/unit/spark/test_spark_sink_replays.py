"""What replays give the sink besides: ids, properties with reserved names, numbered writes."""

import logging
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from sluicemq.errors import ConfigurationError
from sluicemq.spark import source
from sluicemq.spark.options import WRITE, parse_options
from sluicemq.spark.rows import UniqueIdColumns, encode_ids, encode_properties
from sluicemq.spark.source import BatchSink, SinkCommitMessage, resolve_roles
from sluicemq.wire.frames import Command
from sluicemq.wire.staging import StagedRange, encode_staged_ranges

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


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_write_that_was_written_already_logs_a_warning(
    is_repeated: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    staged = (StagedRange("a", 0, 100, 3, 7, 0, 0), StagedRange("a", 1, 50, 2, 9, 1, 0))
    recorded = (StagedRange("a", 0, 90, 4, 8, 0, 0),) if is_repeated else staged[::-1]

    def answer(broker: str, request: Command) -> Command:
        return Command(0, {"state": "published", "published": "4", "stagingQueues": "2"},
                       body=encode_staged_ranges(recorded))  # fmt: skip

    sink: Any = BatchSink.__new__(BatchSink)  # its checks ask brokers
    sink.options = parse_options({"topic": "t"}, WRITE)
    sink.brokers = ("a",)
    monkeypatch.setattr(source, "open_admin", lambda options: nullcontext())
    monkeypatch.setattr(source, "_make_master_call", lambda admin: answer)
    results = [SinkCommitMessage(one.count, 0, "job", 4, ("t",), (one,)) for one in staged]
    with caplog.at_level(logging.WARNING):
        sink._commit_epoch(results)
    assert ("query 'job', epoch 4 was written already" in caplog.text) == is_repeated
    assert ("the 5 rows" in caplog.text) == is_repeated
