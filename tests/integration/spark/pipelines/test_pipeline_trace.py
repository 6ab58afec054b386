"""The pipeline `trace` on a made history whose every figure is known, written by two kinds of
clients: ours, one record a message, and Java's, one record for a batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from sluicemq.model.trace_records import (
    ConsumeOutcome,
    ConsumeTrace,
    DeliveryTrace,
    MessageKind,
    SendTrace,
    TransactionTrace,
    encode_trace_records,
)
from sluicemq.pipelines.ready import Task, find_ready_pipeline

START_MS = 1_760_000_400_000  # 2025-10-09 09:00 UTC
HOUR_MS = 3_600_000
COUNT = 40


def published(index: int, sent_ms: int, **other: Any) -> SendTrace:
    fields = {
        "time_ms": sent_ms, "region": "r", "group": "shop", "topic": "orders",
        "message_id": f"m{index}", "tags": "AB"[index % 2], "keys": f"k{index}",
        "store_host": "127.0.0.1:10911", "body_length": 10, "cost_ms": 2,
        "kind": MessageKind.NORMAL, "offset_message_id": f"p{index}", "success": True,
    } | other  # fmt: skip
    return SendTrace(**fields)


def delivered(
    index: int, group: str, taken_ms: int, cost_ms: int, outcome: ConsumeOutcome, times: int = 0
) -> list[Any]:
    request = f"{group}-{index}-{times}"
    return [
        DeliveryTrace(taken_ms, "r", group, request, f"m{index}", times, f"k{index}"),
        ConsumeTrace(request, f"m{index}", cost_ms, outcome is ConsumeOutcome.SUCCESS, f"k{index}",
                     outcome, taken_ms + cost_ms, group),
    ]  # fmt: skip


def history() -> list[list[Any]]:
    """Trace messages: 20 sends an hour; `billing` gets all but m7 and m8, after 100 ms and the
    message's number; m3 fails once; `slow` takes tag B alone, 1,500 ms for each; m10 stays in its
    hands. Java's batch b1, b2. A half message that is committed, one that is not, a send that fails
    and a delayed one."""
    events = []
    for index in range(COUNT):
        sent_ms = START_MS + HOUR_MS * (index // 20) + index
        told = [published(index, sent_ms)]
        if index not in (7, 8):
            outcome = ConsumeOutcome.EXCEPTION if index == 3 else ConsumeOutcome.SUCCESS
            told += delivered(index, "billing", sent_ms + 100 + index, 10 + index, outcome)
        if index == 3:
            told += delivered(
                index, "billing", sent_ms + 10_000, 5, ConsumeOutcome.SUCCESS, times=1
            )
        if index % 2:
            told += delivered(index, "slow", sent_ms + 50, 1_500, ConsumeOutcome.SUCCESS)
        events.append(told[:2] if index == 10 else told)
    at_ms = START_MS + HOUR_MS
    events.append([
        published(90, at_ms, message_id="b1,b2", offset_message_id="p1,p2", tags=None),
        DeliveryTrace(at_ms + 500, "r", "billing", "q", "b1", 0, None),
        ConsumeTrace("q", "b1", 3, True, None, ConsumeOutcome.SUCCESS),
        published(91, at_ms, message_id="h1", kind=MessageKind.HALF),
        TransactionTrace(at_ms + 5_000, "r", "shop", "orders", "h1", "A", None, None,
                         MessageKind.COMMITTED, "h1", "COMMIT_MESSAGE", False),
        *delivered_as("h1", at_ms + 5_040),
        published(92, at_ms, message_id="h2", kind=MessageKind.HALF),
        published(93, at_ms, message_id="f1", success=False, offset_message_id=None),
        published(94, at_ms, message_id="d1", kind=MessageKind.DELAYED),
        published(95, at_ms + HOUR_MS, message_id="late"),
    ])  # fmt: skip
    return events


def delivered_as(message_id: str, taken_ms: int) -> list[Any]:
    return [
        DeliveryTrace(taken_ms, "r", "billing", f"r-{message_id}", message_id, 0, None),
        ConsumeTrace(f"r-{message_id}", message_id, 3, True, None, ConsumeOutcome.SUCCESS,
                     taken_ms + 3, "billing"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def traces(admin: Admin, producer: Producer) -> str:
    """A topic of traces; the first message is there twice, as after a send that was repeated."""
    name = "pipeline-traces"
    admin.create_topic(name, queues=2)
    bodies = [encode_trace_records(events) for events in history()]
    for index, body in enumerate([bodies[0], *bodies, b"Nonsense\x01\x02"]):
        queue = producer.write_queues(name)[index % 2]
        producer.send(Message(name, body), queue=queue)
    return name


@pytest.fixture(scope="module")
def ran(
    spark: Any, name_server: str, traces: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, list[str], Path]:
    """Report, lines, output: with CSV, so that both the frames and the files are looked at."""
    pipeline = find_ready_pipeline("trace")
    output = tmp_path_factory.mktemp("trace")
    options = {field.name: field.default for field in pipeline.fields}
    options |= {"output": str(output), "topic": traces, "settle": 60.0, "format": "csv"}
    lines: list[str] = []
    task = Task(spark, options, {"nameServers": name_server}, say=lines.append)
    assert f"{COUNT + 3} trace messages in 2 queues" in pipeline.plan(task)[0]
    assert not list(output.iterdir()), "a plan writes nothing"
    return pipeline.run(task), lines, output


@pytest.fixture(scope="module")
def table(spark: Any, ran: tuple[Any, list[str], Path]) -> Callable[[str], list[dict[str, Any]]]:
    def read(name: str) -> list[dict[str, Any]]:
        options = {"header": "true", "inferSchema": "true"}
        frame = spark.read.options(**options).csv(str(ran[2] / name))
        return [row.asDict() for row in frame.collect()]

    return read


def test_every_record_is_a_row_and_unreadable_ones_are_counted(
    spark: Any, ran: tuple[Any, list[str], Path]
) -> None:
    report = ran[0]
    records = [event for told in [history()[0], *history()] for event in told]
    deliveries = sum(isinstance(event, DeliveryTrace) for event in records)
    assert report.figures["events_Pub"] == sum(isinstance(e, SendTrace) for e in records) + 1
    assert report.figures["events_SubBefore"] == deliveries
    assert report.figures["events_SubAfter"] == deliveries - 1
    assert report.figures["events_Unread"] == 1
    events = spark.read.parquet(str(ran[2] / "events"))
    batch = events.where("message_id in ('b1', 'b2') and kind = 'Pub'")
    assert sorted((r.message_id, r.offset_message_id) for r in batch.collect()) == [
        ("b1", "p1"), ("b2", "p2"),
    ]  # fmt: skip


def test_latency_is_from_the_send_to_the_first_delivery_by_hour(table: Any) -> None:
    found = {(r["group"], r["hour"].hour): r for r in table("latency")}
    first, second = found["billing", 9], found["billing", 10]
    assert first["messages"] == 18, "20 sends without m7 and m8; the retry of m3 is no latency"
    assert (first["p50_ms"], first["max_ms"], first["before_sent"]) == (110, 119, 0)
    assert second["messages"] == 22, "20, the Java message, the half message since its commit"
    assert second["max_ms"] == 500
    assert found["slow", 9]["p99_ms"] == 50


def test_failures_have_their_cause(table: Any) -> None:
    found = {(r["group"], r["cause"]): r["failures"] for r in table("failures")}
    assert found == {
        ("billing", "exception"): 1, ("billing", "no result"): 1, ("shop", "send failed"): 1,
    }  # fmt: skip


@pytest.mark.thorough
def test_slow_handlers_are_listed_first(table: Any, ran: tuple[Any, list[str], Path]) -> None:
    first, second = table("consuming")
    assert (first["group"], first["deliveries"], first["slow"], first["p50_ms"]) == (
        "slow", COUNT // 2, COUNT // 2, 1_500,
    )  # fmt: skip
    assert (second["group"], second["slow"], second["max_ms"]) == ("billing", 0, 49)
    assert ran[0].figures["slow_deliveries"] == COUNT // 2


def test_undelivered_messages_are_counted_and_listed(
    spark: Any, table: Any, ran: tuple[Any, list[str], Path]
) -> None:
    found = {r["group"]: r for r in table("unconsumed")}
    assert found["billing"]["sent"] == COUNT + 3, "no failed, delayed, undecided or late one"
    assert (found["billing"]["never"], found["billing"]["consumed"]) == (3, COUNT - 1)
    missing = spark.read.parquet(str(ran[2] / "missing")).where("`group` = 'billing'")
    assert sorted(row.message_id for row in missing.collect()) == ["b2", "m7", "m8"]


def test_tables_and_a_chart_are_shown(ran: tuple[Any, list[str], Path]) -> None:
    report, lines, output = ran
    assert (output / "latency.png").read_bytes()[:4] == b"\x89PNG"
    assert str(output / "latency.png") in report.files
    assert any(line.startswith("Delivery latency") for line in lines)
