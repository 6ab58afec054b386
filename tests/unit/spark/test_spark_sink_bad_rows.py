"""Rows that no message can be made of: found, named, left out or kept."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from sluicemq.client.core.messages import BODY_BYTES_MAX, PROPERTIES_BYTES_MAX
from sluicemq.client.core.requests import SendResult, SendStatus
from sluicemq.errors import RequestError
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_batch
from sluicemq.spark import bad_rows
from sluicemq.spark.bad_rows import BadRowHandler
from sluicemq.spark.options import WRITE, parse_options
from sluicemq.spark.rows import RowError, encode_rows
from sluicemq.spark.senders import (
    DirectSender,
    PreparedRows,
    SendThread,
    StagingSender,
    TaskAttempt,
    send_all,
)

SCHEMA = pa.schema({
    "value": pa.binary(), "tag": pa.string(), "keys": pa.string(), "to": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()), "queue_id": pa.int32(),
    "delay_ms": pa.int64(), "message_id": pa.string(),
})  # fmt: skip
ROLES = {name: name for name in SCHEMA.names} | {"body": "value", "tags": "tag", "topic": "to"}
ROLES = {role: name for role, name in ROLES.items() if role not in ("value", "tag", "to")}
GOOD: dict[str, Any] = {"value": b"x", "to": "T"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"value": None}, "value", "it is null"),
    ({"value": b"x" * (BODY_BYTES_MAX + 1)}, "value", "the limit is 4,194,304"),
    ({"tag": "a|b"}, "tag", "contains '|'"),
    ({"keys": "a\x01b"}, "keys", "U+0001"),
    ({"to": None}, "to", "has no topic"),
    ({"to": "no such name"}, "to", "contains a space"),
    ({"to": "SCHEDULE_TOPIC_XXXX"}, "to", "is reserved for the broker"),
    ({"properties": [("a", "")]}, "properties", "'a' has an empty value"),
    ({"properties": [("DELAY", "3")]}, "properties", "reserved"),
    ({"properties": [("a", "x\x02")]}, "properties", "U+0002"),
    ({"properties": [("a", "x" * PROPERTIES_BYTES_MAX)]}, "properties", "the limit is 32,767"),
    ({"queue_id": -1}, "queue_id", "negative"),
    ({"delay_ms": -1}, "delay_ms", "negative"),
    ({"message_id": "a\x01"}, "message_id", "U+0001"),
]


class Sender:
    """What a sorter asks of one."""

    def __init__(self) -> None:
        self.refused_rows: list[Any] = []
        self.send_thread = SendThread()

    def added_property_bytes_max(self, _: str) -> int:
        return 64


def sorted_rows(
    rows: Sequence[dict[str, Any]], policy: str, sizes: Sequence[int] = ()
) -> tuple[BadRowHandler, list[PreparedRows]]:
    """The rows in batches of these sizes (default: one)."""
    sender: Any = Sender()
    sorter = BadRowHandler(ROLES, None, policy, sender)
    table = pa.Table.from_pylist([GOOD | row for row in rows], SCHEMA)
    batches, start = [], 0
    for size in sizes or (len(rows),):
        batches += table.slice(start, size).combine_chunks().to_batches()
        start += size
    return sorter, list(sorter.prepare_rows(iter(batches)))


def bodies(found: Sequence[PreparedRows]) -> list[bytes]:
    return [body for one in found for body in one.bodies.to_pylist()]


def messages(rows: PreparedRows) -> list[tuple[bytes, dict[str, str]]]:
    made = encode_rows(rows.bodies, rows.properties)
    return [
        (bytes(body), dict(p.split("\x01") for p in bytes(texts).decode().split("\x02") if p))
        for _, body, texts, _ in decode_batch(made.request_body(0, len(made)))
    ]


@pytest.mark.parametrize(("bad", "column", "reason"), BAD)
def test_a_bad_row_is_named_with_its_column_reason_and_cure(
    bad: dict[str, Any], column: str, reason: str
) -> None:
    rows = [{"keys": f"k{index}"} for index in range(40)]
    rows[17] = {"keys": "k17"} | bad
    with pytest.raises(RowError) as caught:
        sorted_rows(rows, "fail", (10, 30))
    text = str(caught.value)
    assert text.startswith("row 18 (")
    assert f", column '{column}': " in text
    assert reason in text
    assert "badRows=skip" in text


def test_random_bad_rows_are_left_out_and_the_others_keep_their_order() -> None:
    draw = random.Random(7)
    for _ in range(20):
        rows: list[dict[str, Any]] = [{"value": b"%d" % index} for index in range(50)]
        bad = draw.sample(range(50), draw.choice((1, 5, 50)))
        for index in bad:
            rows[index] |= draw.choice([row for row, column, _ in BAD if column != "value"])
        sorter, found = sorted_rows(rows, "skip", (20, 30))
        assert bodies(found) == [b"%d" % index for index in range(50) if index not in bad]
        assert (sorter.row_count, sorter.bad_count) == (50, len(bad))


def test_bad_rows_are_in_the_log_the_first_of_them_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sorted_rows([{"tag": "a|b"}] * 30, "skip", (3, 27))
    told = [one.getMessage() for one in caplog.records if one.name == bad_rows.__name__]
    assert [line.partition(",")[0] for line in told] == [f"row {number}" for number in range(1, 6)]


def test_a_bad_row_is_kept_as_json_with_the_reason_in_properties() -> None:
    row = {"value": b"\xff", "tag": "a|b", "properties": [("n", "1")], "keys": "k"}
    _, found = sorted_rows([{}, row], "topic:bad")
    assert [one.topic for one in found] == [None, "bad"]
    ((body, properties),) = messages(found[1])
    assert json.loads(body) == {
        "value": "/w==", "tag": "a|b", "keys": "k", "to": "T", "properties": {"n": "1"},
        "queue_id": None, "delay_ms": None, "message_id": None,
    }  # fmt: skip
    assert properties["SLUICE_BAD_COLUMN"] == "tag"
    assert "contains '|'" in properties["SLUICE_BAD_ROW"]


@pytest.mark.parametrize("bad", [row for row, _, _ in BAD])
def test_whatever_is_bad_can_be_kept(bad: dict[str, Any]) -> None:
    _, (kept,) = sorted_rows([bad], "topic:bad")
    ((body, properties),) = messages(kept)
    assert json.loads(body)["to"] == (GOOD | bad)["to"]
    assert ("SLUICE_BAD_ROW_CUT" in properties) == (len(bad.get("value") or b"") > BODY_BYTES_MAX)


def test_null_is_no_property_and_an_empty_one_is_no_null() -> None:
    _, (rows,) = sorted_rows([{"properties": [("a", None), ("b", "1")]}], "fail")
    ((_, properties),) = messages(rows)
    assert {name: properties[name] for name in properties if name in "ab"} == {"b": "1"}


@pytest.mark.parametrize("wrong", ["maybe", "topic:", "topic:a b", "skip:x", ""])
def test_what_the_option_may_be_is_said(wrong: str) -> None:
    with pytest.raises(Exception, match="'badRows' has an invalid value"):
        parse_options({"badRows": wrong}, WRITE)
    assert parse_options({"badRows": "TOPIC: bad"}, WRITE)["badRows"] == "topic:bad"
    assert parse_options({"badRows": "Skip"}, WRITE)["badRows"] == "skip"
    assert parse_options({}, WRITE)["badRows"] == "fail"


class Picky:
    """A producer whose broker takes neither bodies that begin with `bad` nor 400 bytes at once."""

    timeout_ms = 3_000

    def __init__(self) -> None:
        self.stored: list[tuple[str, bytes]] = []

    def send_encoded(self, topic: str, body: Any, *, queue: MessageQueue | None) -> SendResult:
        found = [(topic, bytes(one)) for _, one, _, _ in decode_batch(body)]
        if len(body) > 400 or any(one.startswith(b"bad") for _, one in found):
            raise RequestError(13, "the message is illegal", address="a:1", fix="Mend it.")
        self.stored += found
        return SendResult(SendStatus.OK, "id", "", queue or MessageQueue(topic, "a", 0), 0, None)


def sent(policy: str, staging: bool) -> tuple[Picky, BadRowHandler]:
    producer: Any = Picky()
    sender = (
        StagingSender(producer, 100, TaskAttempt("q", 1, 0, 0), ("a",)) if staging
        else DirectSender(producer, 100)
    )  # fmt: skip
    roles = {"body": "value", "keys": "keys"}
    sorter = BadRowHandler(roles, "T", policy, sender)
    rows = [GOOD | {"value": b"bad" if n in (3, 17) else b"%d" % n, "keys": f"k{n}"}
            for n in range(20)]  # fmt: skip
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA).select(["value", "keys"])
    send_all(sorter.prepare_rows(iter([batch])), sender)
    return producer, sorter


@pytest.mark.parametrize("staging", [False, True])
def test_what_a_broker_calls_illegal_is_a_bad_row_too(staging: bool) -> None:
    with pytest.raises(RowError, match=r"row 4 \(keys 'k3'\), column 'value': .*13.*Mend it"):
        sent("fail", staging)
    good = [b"%d" % number for number in range(20) if number not in (3, 17)]
    producer, sorter = sent("skip", staging)
    assert [body for _, body in producer.stored] == good, "in order, in smaller requests"
    assert sorter.bad_count == 2


def test_bad_rows_of_a_broker_are_kept_as_well() -> None:
    producer, sorter = sent("topic:kept", staging=False)
    kept = [json.loads(body) for topic, body in producer.stored if topic == "kept"]
    assert kept == [{"value": "YmFk", "keys": "k3"}, {"value": "YmFk", "keys": "k17"}]
    assert (len(producer.stored), sorter.bad_count) == (20, 2)


@pytest.mark.parametrize(
    "error", [ValueError("x"), StopIteration(), GeneratorExit(), SystemExit(1)], ids=repr
)
def test_whatever_ends_the_thread_that_sends_comes_out_of_its_lane(error: BaseException) -> None:
    lane = SendThread()

    def fail() -> None:
        raise error

    lane.submit(fail)
    with pytest.raises(type(error)):
        lane.flush()
    sent: list[int] = []
    lane.submit(lambda: sent.append(1))
    lane.flush()
    assert sent == [1], "the thread is still there"
    lane.close()
