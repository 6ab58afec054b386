"""Trace records, the notes a client takes, and the timeline made of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq import ConfigurationError, Message
from sluicemq.cli.message import timeline_lines
from sluicemq.client.admin.traces import GroupTrace, timeline
from sluicemq.client.core.messages import join_batch, make_outgoing
from sluicemq.client.core.requests import SendResult, SendStatus
from sluicemq.client.core.tracing import BYTES_MAX, RECORDS_MAX, Tracing, parse_trace_option
from sluicemq.model.ids import Host
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue
from sluicemq.model.trace_records import (
    ConsumeOutcome,
    ConsumeTrace,
    DeliveryTrace,
    MessageKind,
    RecallTrace,
    SendTrace,
    TransactionTrace,
    decode_trace_records,
    encode_trace_records,
    record_of_message,
)
from sluicemq.wire.frames import Command

text = st.none() | st.text(
    st.characters(exclude_characters="\x01\x02", codec="utf-8"), min_size=1, max_size=20
).filter(lambda value: value != "null")
number = st.integers(0, 2**53)
kind = st.sampled_from(MessageKind)
records = st.one_of(
    st.builds(
        SendTrace, number, text, text, text, text, text, text, text, number, number, kind, text,
        st.booleans(), text,
    ),
    st.builds(DeliveryTrace, number, text, text, text, text, number, text),
    st.builds(
        ConsumeTrace, text, text, number, st.booleans(), text, st.sampled_from(ConsumeOutcome),
        number, text
    ),
    st.builds(
        TransactionTrace, number, text, text, text, text, text, text, text, kind, text, text,
        st.booleans()
    ),
    st.builds(RecallTrace, number, text, text, text, text, st.booleans()),
)  # fmt: skip


# ---- the body


@settings(max_examples=100)
@given(st.lists(records, max_size=5))
def test_what_is_written_is_read(told):
    assert decode_trace_records(encode_trace_records(told)) == (told, 0)


def test_separators_in_names_do_not_shift_fields():
    odd = DeliveryTrace(1, "r", "a\x01b", "q", "id\x02", 0, None)
    (read,), unread = decode_trace_records(encode_trace_records([odd]))
    assert unread == 0
    assert (read.group, read.message_id, read.retry_times) == ("a b", "id ", 0)


def test_older_shorter_and_longer_records_are_understood():
    body = (
        "Pub\x011\x01r\x01g\x01t\x01id\x01null\x01\x01h\x015\x016\x010\x01true\x02"
        "SubAfter\x01q\x01id\x017\x01false\x01k\x014\x01\x02"
        "SubAfter\x01q\x01id\x017\x01true\x01k\x02"
        "SubBefore\x011\x01r\x01g\x01q\x01id\x012\x02"
    )
    (old, cloud, short, before), unread = decode_trace_records(body.encode())
    assert unread == 0
    assert (old.tags, old.keys, old.offset_message_id, old.success) == (None, None, None, True)
    assert (cloud.outcome, cloud.time_ms, cloud.group) == (ConsumeOutcome.FAILED, None, None)
    assert short.outcome is ConsumeOutcome.SUCCESS
    assert (before.retry_times, before.keys) == (2, None)


def test_what_cannot_be_understood_is_counted_and_hides_nothing():
    good = encode_trace_records([RecallTrace(1, "r", "g", "t", "id", True)])
    body = (
        b"Fly\x01me\x02Pub\x01x\x02" + good + b"Recall\x011\x01r\x01g\x01t\x01id\x01maybe\x02\xff"
    )
    assert decode_trace_records(body) == ([RecallTrace(1, "r", "g", "t", "id", True)], 4)


# ---- notes


class Clock:
    def __init__(self):
        self.seconds = 5.0

    def now_ms(self):
        return round(self.seconds * 1000)

    def monotonic_s(self):
        return self.seconds


@pytest.fixture
def tracing():
    ids = iter(range(100_000))
    return Tracing("traces", Clock(), lambda: f"request-{next(ids)}", count_max=250)


def result(message_id: str) -> SendResult:
    return SendResult(SendStatus.OK, message_id, f"at-{message_id}", MessageQueue("t", "b", 0), 3)


def outgoing(message: Message):
    return make_outgoing(message, message_id="id-0")


def told(tracing: Tracing):
    found = []
    while (message := tracing.next_message()) is not None:
        assert message.message.topic == "traces"
        found += decode_trace_records(message.message.body)[0]
    return found


ANSWER = Command(0, fields={"MSG_REGION": "here", "TRACE_ON": "true"})


def test_a_send_is_one_record_and_found_by_id_and_keys(tracing):
    message = Message("orders", b"12345", tag="A", keys=("k1", "k2"))
    tracing.record_send("g", outgoing(message), [result("id-0")], "1.2.3.4:5", ANSWER, 0.25)
    written = tracing.next_message()
    assert set(written.message.keys) == {"id-0", "k1", "k2"}
    assert decode_trace_records(written.message.body)[0] == [
        SendTrace(
            4750, "here", "g", "orders", "id-0", "A", "k1 k2", "1.2.3.4:5", 5, 250,
            MessageKind.NORMAL, "at-id-0", True,
        )
    ]  # fmt: skip
    assert tracing.next_message() is None


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"delay_level": 3}, MessageKind.DELAYED),
        ({"delay": 5}, MessageKind.DELAYED),
        ({"sharding_key": "s"}, MessageKind.ORDERED),
    ],
)
def test_the_kind_of_a_message_is_told(tracing, options, kind):
    from sluicemq.client.core.messages import make_message

    message = make_message("orders", b"1", **options)
    tracing.record_send("g", outgoing(message), [result("id-0")], "a:1", ANSWER, 0)
    assert told(tracing)[0].kind is kind


def test_each_message_of_a_batch_has_its_record(tracing):
    parts = [make_outgoing(Message("t", b"x" * n, keys=(f"k{n}",)), f"id-{n}") for n in (1, 2, 3)]
    results = [result(f"id-{n}") for n in (1, 2, 3)]
    tracing.record_send("g", join_batch(parts, "id-b"), results, "a:1", ANSWER, 0, batch=True)
    assert [(r.message_id, r.keys, r.body_length, r.offset_message_id) for r in told(tracing)] == [
        ("id-1", "k1", 1, "at-id-1"), ("id-2", "k2", 2, "at-id-2"), ("id-3", "k3", 3, "at-id-3")
    ]  # fmt: skip


def test_a_send_that_was_given_up_is_told(tracing):
    tracing.record_failed_send("g", outgoing(Message("t", b"1")), ["id-0"], 3.0, batch=False)
    (record,) = told(tracing)
    assert (record.success, record.store_host, record.cost_ms) == (False, None, 3000)


def test_traces_are_not_traced_nor_what_the_broker_has_switched_off(tracing):
    off = Command(0, fields={"TRACE_ON": "false"})
    tracing.record_send("g", outgoing(Message("traces", b"1")), [result("id-0")], "a:1", ANSWER, 0)
    tracing.record_failed_send("g", outgoing(Message("traces", b"1")), ["id-0"], 0, batch=False)
    tracing.record_send("g", outgoing(Message("t", b"1")), [result("id-0")], "a:1", off, 0)
    assert tracing.next_message() is None


def test_what_there_is_no_room_for_is_dropped_and_counted(tracing):
    for _ in range(300):
        tracing.record_recall("g", "t", "id", success=True)
    assert (len(tracing), tracing.dropped_count) == (250, 50)
    assert len(told(tracing)) == 250


def test_trace_messages_have_bounds(tracing):
    for index in range(RECORDS_MAX + 1):
        tracing.record_recall("g", "t", f"id-{index}", success=True)
    assert [tracing.next_message().record_count, tracing.next_message().record_count] == [
        RECORDS_MAX,
        1,
    ]
    for index in range(8):
        tracing.record_recall("g" * (BYTES_MAX // 4), "t", f"id-{index}", success=True)
    sizes = []
    while (message := tracing.next_message()) is not None:
        sizes.append(len(message.message.body))
    assert len(sizes) == 3
    assert max(sizes) <= BYTES_MAX


def test_one_record_beyond_the_bound_is_still_written(tracing):
    tracing.record_recall("g" * (BYTES_MAX + 1), "t", "id", success=True)
    assert tracing.next_message().record_count == 1


@pytest.mark.parametrize(
    ("given", "topic"), [(True, "RMQ_SYS_TRACE_TOPIC"), (False, None), (None, None), ("T", "T")]
)
def test_the_argument_trace(given, topic):
    assert parse_trace_option(given) == topic


def test_an_empty_topic_is_an_error():
    with pytest.raises(ConfigurationError, match="trace is an empty string"):
        parse_trace_option("")


# ---- the timeline


def test_deliveries_are_paired_by_request_and_rounds_are_told():
    found = timeline("id", [
        ConsumeTrace("q2", "id", 9, True, None, ConsumeOutcome.SUCCESS, 1309, "g"),
        DeliveryTrace(1300, "r", "g", "q2", "id", 1, None),
        DeliveryTrace(200, "r", "g", "q1", "id", 0, None),
        ConsumeTrace("q1", "id", 5, False, None, ConsumeOutcome.EXCEPTION, 205, "g"),
        DeliveryTrace(210, "r", "h", "q3", "id", 0, None),
        SendTrace(100, "r", "p", "t", "id", "A", "k", "h:1", 3, 20, MessageKind.NORMAL, "o", True),
    ], None)  # fmt: skip
    assert [(s.time_ms, s.kind, s.group, s.round, s.result, s.cost_ms) for s in found.steps] == [
        (100, "send", "p", None, "success", 20),
        (200, "deliver", "g", 0, "exception", 5),
        (210, "deliver", "h", 0, None, None),
        (1300, "deliver", "g", 1, "success", 9),
    ]
    assert found.groups == [
        GroupTrace("g", 2, True, ["exception", "success"]), GroupTrace("h", 1, False, ["unknown"])
    ]  # fmt: skip
    lines = timeline_lines(found)
    assert "to g (retry 1) -> success in 9 ms" in lines[5]
    assert "to h -> no result yet" in lines[4]
    assert lines[-2:] == [
        "Group g consumed it: 2 deliveries, exception, success.",
        "Group h has not consumed it: 1 delivery, unknown.",
    ]


def test_a_delivery_of_which_only_the_end_is_there_is_told():
    found = timeline(
        "id", [ConsumeTrace("q", "id", 5, True, "k", ConsumeOutcome.SUCCESS, 1205, "g")], None
    )
    (step,) = found.steps
    assert (step.time_ms, step.group, step.result, step.round) == (1200, "g", "success", None)
    assert found.keys == "k"


def test_a_message_that_nobody_received_and_groups_that_are_silent_are_said():
    sent = SendTrace(1, "r", "p", "t", "id", None, None, None, 3, 2, MessageKind.HALF, None, False)
    found = timeline("id", [sent], None, unread=2)
    assert timeline_lines(found)[-2:] == [
        "No consumer group has traced a delivery of this message.",
        "2 trace records were unreadable.",
    ]
    found.groups.extend([GroupTrace("late", is_past=False), GroupTrace("mute", is_past=True)])
    assert timeline_lines(found)[-3:-1] == [
        "Group late has not received it.",
        "Group mute has committed a later offset, and no client has traced a delivery.",
    ]


def stored_at(time_ms: int) -> StoredMessage:
    here = Host("127.0.0.1", 1)
    return StoredMessage(
        "t",
        0,
        0,
        0,
        10,
        b"1",
        {"UNIQ_KEY": "id"},
        0,
        0,
        0,
        here,
        time_ms,
        here,
        0,
        0,
        0,
        broker="b",
    )


def test_a_message_is_stored_after_it_was_sent_whatever_the_clocks_say():
    sent = SendTrace(
        500, "r", "p", "t", "id", None, None, "h:1", 1, 2, MessageKind.NORMAL, "o", True
    )
    found = timeline("id", [sent, DeliveryTrace(600, "r", "g", "q", "id", 0, None)], stored_at(400))
    assert [step.kind for step in found.steps] == ["send", "store", "deliver"]


def test_a_message_of_javas_batch_is_known_by_its_id_or_its_place():
    batch = SendTrace(
        1, "r", "p", "t", "a,b,c", None, None, "h:1", 9, 2, MessageKind.NORMAL, "x,y,z", True
    )
    own = record_of_message(batch, "b", None)
    assert (own.message_id, own.offset_message_id) == ("b", "y")
    own = record_of_message(batch, "id of the batch", "z")
    assert (own.message_id, own.offset_message_id) == ("id of the batch", "z")
    assert record_of_message(batch, "a,b,c", None) == batch
    assert record_of_message(batch, "d", "w") is None
    assert record_of_message(batch, "d", None) is None
