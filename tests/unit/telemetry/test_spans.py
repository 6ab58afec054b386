"""Records of a trace topic become spans."""

import pytest

from sluicemq.model.trace_records import (
    ConsumeOutcome,
    ConsumeTrace,
    DeliveryTrace,
    MessageKind,
    RecallTrace,
    SendTrace,
    TraceRecord,
    TransactionTrace,
)
from sluicemq.telemetry import spans as subject
from sluicemq.telemetry.spans import Span, SpanBuilder, exportable, parse_traceparent

ID = "7F0000010001D41A00000BD5A5F30000"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def published(message_id: str = ID, *, success: bool = True, time_ms: int = 1000) -> SendTrace:
    return SendTrace(
        time_ms, "DefaultRegion", "shop", "orders", message_id, "A", "k-1 k-2", "10.0.0.1:10911",
        120, 7, MessageKind.DELAYED, "0A", success, "10.0.0.9",
    )  # fmt: skip


def taken(request_id: str = "r-1", times: int = 1, time_ms: int = 2000) -> DeliveryTrace:
    return DeliveryTrace(time_ms, "DefaultRegion", "billing", request_id, ID, times, "k-1 k-2")


def finished(
    request_id: str = "r-1",
    outcome: ConsumeOutcome = ConsumeOutcome.SUCCESS,
    time_ms: int | None = 2050,
) -> ConsumeTrace:
    group = None if time_ms is None else "billing"
    done = outcome is ConsumeOutcome.SUCCESS
    return ConsumeTrace(request_id, ID, 50, done, "k-1 k-2", outcome, time_ms, group)


def made(*records: TraceRecord, now_ms: int = 3000, **options: dict[str, str]) -> list[Span]:
    return list(SpanBuilder().spans(records, now_ms, **options))


def test_a_send_and_its_delivery_are_parent_and_child_in_the_trace_of_the_message() -> None:
    send, process = made(published(), taken(), finished())
    assert send.trace_id == process.trace_id == int(ID, 16)
    assert (send.parent_id, process.parent_id) == (0, send.span_id)
    assert (send.service, send.name, send.kind) == ("shop", "send orders", "PRODUCER")
    assert (send.begin_ms, send.end_ms, send.error) == (1000, 1007, None)
    assert send.attributes == {
        "messaging.system": "rocketmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.id": ID,
        "messaging.message.body.size": 120,
        "messaging.rocketmq.message.tag": "A",
        "messaging.rocketmq.message.keys": ["k-1", "k-2"],
        "messaging.rocketmq.message.type": "delay",
        "messaging.rocketmq.client_group": "shop",
        "sluicemq.offset_message_id": "0A",
        "server.address": "10.0.0.1:10911",
        "client.address": "10.0.0.9",
    }
    assert (process.name, process.kind) == ("process orders", "CONSUMER")
    assert (process.begin_ms, process.end_ms, process.error) == (2000, 2050, None)
    attributes = process.attributes
    assert attributes["messaging.operation.type"] == "process"
    assert attributes["messaging.consumer.group.name"] == "billing"
    assert attributes["messaging.rocketmq.message.tag"] == "A", "the send said it"
    assert attributes["sluicemq.reconsume_times"] == 1


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (ConsumeOutcome.EXCEPTION, "exception"),
        (ConsumeOutcome.TIME_OUT, "time_out"),
        (ConsumeOutcome.FAILED, "failed"),
    ],
)
def test_a_failure_is_an_error(outcome: ConsumeOutcome, error: str) -> None:
    (process,) = made(taken(), finished(outcome=outcome))
    assert process.error == process.attributes["error.type"] == error
    (send,) = made(published(success=False))
    assert send.error == "send_failed"


def test_a_send_that_failed_is_another_span_than_the_one_that_succeeds() -> None:
    first, second = made(published(success=False), published(time_ms=5000))
    assert first.span_id != second.span_id
    assert second.span_id == made(taken(), finished())[0].parent_id


def test_the_same_records_make_the_same_ids_whoever_reads_them_in_whatever_pieces() -> None:
    whole = made(published(), taken(), finished())
    pieces = [*made(published()), *made(finished())]
    assert [(it.trace_id, it.span_id, it.parent_id) for it in whole] == [
        (it.trace_id, it.span_id, it.parent_id) for it in pieces
    ]
    alone = pieces[1]
    assert (alone.name, alone.begin_ms, alone.end_ms) == ("process", 2000, 2050)


def test_rounds_of_a_group_are_spans_of_their_own() -> None:
    first, second = made(taken(), finished(), taken("r-2", 2, 9000), finished("r-2", time_ms=9050))
    assert first.span_id != second.span_id
    assert second.begin_ms == 9000


def test_the_end_of_the_cloud_has_time_and_group_of_its_beginning() -> None:
    (process,) = made(taken(), finished(time_ms=None))
    assert (process.begin_ms, process.end_ms, process.service) == (2000, 2050, "billing")
    (alone,) = made(finished(time_ms=None))
    assert alone.begin_ms == 0 <= alone.end_ms


def test_a_delivery_that_never_ends_is_told_after_the_time_that_consumers_have() -> None:
    joiner = SpanBuilder()
    assert list(joiner.spans([taken()], 2000 + subject.BEGUN_MS - 1)) == []
    assert len(joiner) == 1
    (process,) = joiner.spans([], 2000 + subject.BEGUN_MS)
    assert (process.error, process.begin_ms, process.end_ms) == ("no_end_traced", 2000, 2000)
    assert len(joiner) == 0


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "BEGUN_MAX", 2)
    monkeypatch.setattr(subject, "KNOWN_MAX", 1)
    joiner = SpanBuilder()
    told = list(joiner.spans([taken(f"r-{number}") for number in range(5)], 2000))
    assert (len(told), len(joiner)) == (3, 2)
    list(joiner.spans([published(), published("other")], 2000))
    (process,) = joiner.spans([finished("r-4")], 2000)
    assert process.name == "process", "its send is forgotten, its trace is not"
    assert process.trace_id == int(ID, 16)


def test_a_batch_of_java_s_is_a_span_for_each_message() -> None:
    other = ID[:-1] + "1"
    first, second = made(published(f"{ID},{other}"))
    assert (first.trace_id, second.trace_id) == (int(ID, 16), int(other, 16))
    assert second.attributes["messaging.message.id"] == other
    assert second.attributes["messaging.batch.message_count"] == 2


def test_the_end_of_a_transaction_and_a_recall_are_children_of_the_send() -> None:
    ended = TransactionTrace(
        1500, None, "shop", "orders", ID, "A", None, "10.0.0.1:10911", MessageKind.COMMITTED, ID,
        "ROLLBACK_MESSAGE", True,
    )  # fmt: skip
    recalled = RecallTrace(1600, None, "shop", "orders", ID, False)
    send, rollback, recall = made(published(), ended, recalled)
    assert (rollback.name, rollback.kind) == ("rollback orders", "CLIENT")
    assert rollback.attributes["messaging.operation.type"] == "settle"
    assert rollback.attributes["sluicemq.asked"] is True
    assert (recall.name, recall.error) == ("recall orders", "recall_failed")
    assert rollback.parent_id == recall.parent_id == send.span_id


def test_a_traceparent_of_the_message_takes_it_into_that_trace() -> None:
    send, process = made(published(), taken(), finished(), traceparents={ID: PARENT})
    assert send.trace_id == process.trace_id == 0x4BF92F3577B34DA6A3CE929D0E0E4736
    assert send.parent_id == 0x00F067AA0BA902B7
    assert process.parent_id == send.span_id


@pytest.mark.parametrize("text", ["", "x", PARENT[:-3], f"00-{'0' * 32}-{'1' * 16}-01"])
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None
    (send,) = made(published(), traceparents={ID: text})
    assert send.trace_id == int(ID, 16)


def test_an_id_that_is_no_number_has_a_trace_too() -> None:
    (send,) = made(published("order-17"))
    assert 0 < send.trace_id < 2**128
    (zero,) = made(published("0" * 32))
    assert zero.trace_id > 0


def test_spans_for_the_exporter_are_services_by_their_groups() -> None:
    send, process = exportable(made(published(), taken(), finished(outcome=ConsumeOutcome.FAILED)))
    assert send.resource.attributes["service.name"] == "shop"
    assert process.resource.attributes["service.name"] == "billing"
    assert process.parent is not None
    assert process.parent.span_id == send.context.span_id
    assert (process.start_time, process.end_time) == (2_000_000_000, 2_050_000_000)
    assert (send.status.is_unset, process.status.is_ok) == (True, False)
    assert process.status.description == "failed"
