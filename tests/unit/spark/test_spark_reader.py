"""What an executor does with a range: joins answers, types columns, notices what is gone."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    OffsetOutOfRangeError,
    RequestError,
    SluiceError,
)
from sluicemq.model.ids import Host, encode_host
from sluicemq.model.topic import MessageQueue
from sluicemq.record import arrow
from sluicemq.record.codec import encode_properties, encode_record
from sluicemq.spark.options import parse_options
from sluicemq.spark.schema import (
    BASE_TYPES,
    EXTRA_TYPES,
    declared_columns,
    parse_columns,
    to_spark_schema,
)
from sluicemq.spark.sources import reader
from sluicemq.spark.sources.offsets import RangePartition, ReadPlan, make_decoding_plan
from stored_bodies import BAD, GOOD, LIMIT

HOST = encode_host(Host("127.0.0.1", 10911))
TOPIC_NOT_EXIST = 17


def record(offset: int, **properties: str) -> bytes:
    return encode_record(
        topic="t", queue_id=0, queue_offset=offset, physical_offset=offset, body=b"x",
        properties=encode_properties(properties), flag=0, sys_flag=0, born_time_ms=1,
        born_host=HOST, store_time_ms=2, store_host=HOST,
    )  # fmt: skip


class FakeBulk:
    """Gives records one by one, and raises `error` once when it comes to the offset `fails_at`."""

    fails_at: int | None = None
    error: SluiceError

    def __init__(self, _address: str, _topic: str, _queue: int, start: int, end: int, *_: Any,
                 **__: Any) -> None:  # fmt: skip
        self.position, self.end, self.bytes_read = start, end, 0

    def __enter__(self) -> "FakeBulk":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[bytes]:
        while self.position < self.end:
            if FakeBulk.fails_at == self.position:
                FakeBulk.fails_at = None
                raise FakeBulk.error
            yield record(self.position, n=str(self.position))
            self.position += 1


@pytest.fixture(autouse=True)
def bulk(monkeypatch: pytest.MonkeyPatch) -> type[FakeBulk]:
    monkeypatch.setattr(reader, "BulkReader", FakeBulk)
    monkeypatch.setattr(FakeBulk, "fails_at", None)
    gone = OffsetOutOfRangeError("offsets are gone.", fix="Somewhere else.")
    monkeypatch.setattr(FakeBulk, "error", gone, raising=False)
    return FakeBulk


def partition(start: int, end: int) -> RangePartition:
    return RangePartition(MessageQueue("t", "b", 0), start, end, "b:1")


def offsets(plan: ReadPlan, one: RangePartition) -> list[int]:
    batches = list(reader.read_range(plan, one))
    return [offset for batch in batches for offset in batch.column("queue_offset").to_pylist()]


def plan(columns: str = "queue_offset", **changes: Any) -> ReadPlan:
    return ReadPlan(columns=parse_columns(columns), subscription=None, **changes)


def test_small_answers_are_joined_into_one_batch() -> None:
    batches = list(reader.read_range(plan(), partition(5, 105)))
    assert [batch.num_rows for batch in batches] == [100]


def test_joining_keeps_every_byte_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES_MIN", 4)
    chunks = [b"abcd", b"e", b"f", memoryview(b"ghijk"), b"", b"l"]
    assert [bytes(block) for block in reader.join_chunks(chunks)] == [b"abcd", b"efghijk", b"l"]
    assert list(reader.join_chunks([])) == []


def test_no_partition_no_rows() -> None:
    assert list(reader.read_range(plan(), RangePartition(None, 0, 0, ""))) == []


def test_columns_come_in_the_order_of_the_plan() -> None:
    (batch,) = reader.read_range(plan("prop:n:int,queue_offset,broker"), partition(3, 5))
    assert batch.to_pydict() == {"n": [3, 4], "queue_offset": [3, 4], "broker": ["b", "b"]}
    assert batch.schema.types == [pa.int32(), pa.int64(), pa.string()]


def test_messages_that_are_gone_are_an_error(bulk: type[FakeBulk]) -> None:
    bulk.fails_at = 7
    with pytest.raises(OffsetOutOfRangeError, match="failOnDataLoss=false"):
        offsets(plan(), partition(5, 10))


def test_messages_that_are_gone_may_be_skipped(
    bulk: type[FakeBulk], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bulk.fails_at = 7
    monkeypatch.setattr(reader, "_fetch_first_offset", lambda *_: 9)
    assert offsets(plan(fail_on_data_loss=False), partition(5, 12)) == [5, 6, 9, 10, 11]
    assert "2 offsets of b:0 of 't' are gone" in caplog.text


@pytest.mark.parametrize("fails_at", [5, 7, 11])
def test_a_read_whose_connection_breaks_goes_on_at_the_offset_it_came_to(
    bulk: type[FakeBulk], monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    monkeypatch.setattr("sluicemq.spark.errors.PAUSE_FIRST_S", 0.0)
    bulk.fails_at, bulk.error = fails_at, ConnectionLostError("The connection broke.")
    assert offsets(plan(), partition(5, 12)) == list(range(5, 12))


def test_a_queue_that_disappears_while_it_is_read_is_an_error(bulk: type[FakeBulk]) -> None:
    bulk.fails_at, bulk.error = 7, RequestError(TOPIC_NOT_EXIST, "topic[t] not exist")
    with pytest.raises(OffsetOutOfRangeError, match=r"disappeared .* offsets 7 to 12 .*not exist"):
        offsets(plan(), partition(5, 12))


def test_a_queue_that_disappears_may_be_skipped_and_what_it_had_is_counted(
    bulk: type[FakeBulk], caplog: pytest.LogCaptureFixture
) -> None:
    bulk.fails_at, bulk.error = 7, RequestError(TOPIC_NOT_EXIST, "topic[t] not exist")
    assert offsets(plan(fail_on_data_loss=False), partition(5, 12)) == [5, 6]
    assert "5 offsets of b:0 of 't' are gone" in caplog.text


def test_values_that_are_not_of_their_type_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    (batch,) = reader.read_range(plan("prop:n:boolean"), partition(0, 3))
    assert batch.column("n").to_pylist() == [None, None, None]
    assert "3 values of the property column 'n' are null" in caplog.text


def test_values_that_are_not_of_their_type_may_be_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match="'n' has the value '0', which is not a valid boolean"
    ):
        list(reader.read_range(plan("prop:n:boolean", fail_on_bad_property=True), partition(0, 3)))


def calls_of(work: Callable[[], object]) -> int:
    """Calls of Python and C functions made by `work`."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_no_work_a_message_between_socket_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = {count: b"".join(record(n, n=str(n)) for n in range(count)) for count in (1000, 9000)}

    class OneChunk(FakeBulk):
        def __iter__(self) -> Iterator[bytes]:
            yield chunks[self.end]

    monkeypatch.setattr(reader, "BulkReader", OneChunk)
    everything = ",".join((*BASE_TYPES, "prop:n:int", "prop:n:double as x", "prop:none"))
    wanted = plan(everything, exact_tags=None)

    def read(count: int) -> int:
        return sum(batch.num_rows for batch in reader.read_range(wanted, partition(0, count)))

    assert (read(1000), read(9000)) == (1000, 9000)
    more = calls_of(lambda: read(9000)) - calls_of(lambda: read(1000))
    assert more < 8000 * 0.2, f"{more} more calls for 8,000 more messages"


# ---- bodies that cannot be decompressed

MIXED = [*GOOD.values(), *BAD.values()]


def stored_batch(columns: str, **options: str) -> tuple[Any, reader.ReadStatistics]:
    """What Spark gets of `MIXED` under the options."""
    parsed = parse_options(
        {"nameServers": "n:1", "topic": "t", "columns": columns, "bodyBytesMax": str(LIMIT)}
        | options
    )
    how = make_decoding_plan(parsed, to_spark_schema(declared_columns(parsed)))
    data = b"".join(
        encode_record(
            topic="t", queue_id=0, queue_offset=offset, physical_offset=offset, body=one.raw,
            properties=b"TAGS\x01A\x02", flag=0, sys_flag=one.sys_flag, born_time_ms=1,
            born_host=HOST, store_time_ms=2, store_host=HOST,
        )
        for offset, one in enumerate(MIXED)
    )  # fmt: skip
    tally = reader.ReadStatistics()
    decoder = reader.make_decoder(how, "b")
    queue = MessageQueue("t", "b", 0)
    batches = [reader.finish_batch(one, how, queue, tally) for one in decoder.decode(data)]
    return pa.Table.from_batches(batches), tally


@pytest.mark.parametrize("columns", ["body", "body,_error", "_error,queue_offset,body"])
@pytest.mark.parametrize("rule", ["null", "raw"])
def test_undecodable_bodies_are_null_or_raw_with_the_reason(columns: str, rule: str) -> None:
    table, tally = stored_batch(columns, badBody=rule)
    assert table.column_names == columns.split(",")
    wanted = [one.body or (one.raw if rule == "raw" else one.body) for one in MIXED]
    assert table["body"].to_pylist() == wanted
    assert tally.bad_bodies == len(BAD)
    if "_error" in columns:
        errors = table["_error"].to_pylist()
        assert [one is None for one in errors] == [one.body is not None for one in MIXED]
        assert all(one is None or one.startswith("not decodable: it") for one in errors)


@pytest.mark.parametrize("columns", ["body", "_error", "tags,body"])
def test_undecodable_bodies_are_an_error_when_that_is_asked_for(columns: str) -> None:
    with pytest.raises(ConfigurationError, match=r"offset \d+ of .* is not decodable: it"):
        stored_batch(columns, badBody="fail")


def test_texts_and_json_have_one_reason_for_both_kinds_of_bad_bodies() -> None:
    for options in ({"bodyFormat": "utf-8"}, {"bodyFormat": "json", "bodySchema": "a int"}):
        table, _ = stored_batch("body", **options)
        bodies, errors = table["body"].to_pylist(), table["_error"].to_pylist()
        for one, body, error in zip(MIXED, bodies, errors, strict=True):
            if one.body is None:
                assert body is None
                assert error.startswith("not decodable: it")
            elif options["bodyFormat"] == "json":
                assert error.startswith(("not JSON", "not UTF-8"))
            else:
                assert (body is None) == (error is not None)
    with pytest.raises(ConfigurationError, match="'badBody' is 'raw'"):
        stored_batch("body", bodyFormat="utf-8", badBody="raw")


def test_reads_without_bodies_decode_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "decode_body", None)
    for columns in (
        "tags",
        "queue_offset,prop:a",
        ",".join({*BASE_TYPES, *EXTRA_TYPES} - {"body"}),
    ):
        for rule in ("null", "fail", "raw"):
            table, _ = stored_batch(columns, badBody=rule)
            assert table.num_rows == len(MIXED)
