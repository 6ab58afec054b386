"""Which sent messages wait, in which topic, and which are refused (spec/delivery.md §1, §2)."""

from typing import Any

import pytest

from simulation.stepped import START_MS, SteppedBroker, SteppedClient, send_fields
from sluicemq.broker.produce.intake import MessageToStore
from sluicemq.broker.waiting.rewrite import DelayRewriter
from sluicemq.model.ids import parse_recall_handle
from sluicemq.model.system_names import SCHEDULE_TOPIC, TIMER_TOPIC
from sluicemq.model.topic import GroupConfig
from sluicemq.record.codec import decode_records, encode_batch
from sluicemq.store.timers.placing import slot_for_due_time

DAY_MS = 86_400_000


def send(client: SteppedClient, topic: str = "T", **properties: object) -> Any:
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    fields = send_fields(topic, f"UNIQ_KEY\x01A1\x02{text}", e=2 if topic == "T" else 0)
    return client.call(310, fields, b"body")


def waiting(broker: SteppedBroker, topic: str, queue_id: int = 0) -> list[Any]:
    result = broker.store.reader.read(topic, queue_id, 0, 100, 1 << 20)
    return decode_records(b"".join(result.data))


def test_a_level_sends_the_message_to_its_queue_and_says_where_it_belongs(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    answer = send(client, DELAY=3, TAGS="x")
    (message,) = waiting(broker, SCHEDULE_TOPIC, 2)
    assert answer.code == 0
    assert answer.fields["queueId"] == "2"
    assert "recallHandle" not in answer.fields
    assert message.properties["DELAY"] == "3"
    assert (message.properties["REAL_TOPIC"], message.properties["REAL_QID"]) == ("T", "2")
    assert broker.store.queue_offsets("T", 2) == (0, 0)


def test_the_unit_of_a_delayed_message_says_when_it_is_due(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, DELAY=3, TAGS="x")
    unit = bytes(broker.store.reader.units(SCHEDULE_TOPIC, 2, 0, 1))
    assert int.from_bytes(unit[12:]) == START_MS + 10_000


def test_a_level_above_the_last_is_taken_as_the_last(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert send(client, DELAY=99).code == 0
    assert waiting(broker, SCHEDULE_TOPIC, 17)[0].properties["DELAY"] == "18"


@pytest.mark.parametrize("level", ["0", "-1", ""])
def test_level_zero_and_less_are_no_delay(
    broker: SteppedBroker, client: SteppedClient, level: str
) -> None:
    assert send(client, DELAY=level).code == 0
    assert broker.store.queue_offsets("T", 2) == (0, 1)


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
@pytest.mark.parametrize("value", ["soon", "1.5", "\u0661", "1" * 30])
def test_a_value_that_is_not_a_number_is_refused(
    broker: SteppedBroker, client: SteppedClient, name: str, value: str
) -> None:
    answer = send(client, **{name: value})
    assert answer.code == 13
    assert name in answer.remark
    assert not list(broker.store.queues())


def test_a_level_wins_over_a_time(broker: SteppedBroker, client: SteppedClient) -> None:
    send(client, DELAY=1, TIMER_DELAY_SEC=100, TIMER_DELIVER_MS=5)
    (message,) = waiting(broker, SCHEDULE_TOPIC, 0)
    assert not [name for name in message.properties if name.startswith("TIMER_")]


@pytest.mark.parametrize(
    ("properties", "slot_ms"),
    [
        ({"TIMER_DELAY_SEC": 3}, START_MS + 2000),  # a multiple of a second: one less
        ({"TIMER_DELAY_MS": 3001}, START_MS + 3000),
        ({"TIMER_DELIVER_MS": START_MS + 4999}, START_MS + 4000),
        ({"TIMER_DELAY_SEC": 3, "TIMER_DELAY_MS": 9000, "TIMER_DELIVER_MS": 1}, START_MS + 2000),
        ({"TIMER_DELAY_MS": 9000, "TIMER_DELIVER_MS": 1}, START_MS + 8000),
    ],
)
def test_a_time_is_put_into_the_slot_of_its_second(
    broker: SteppedBroker, client: SteppedClient, properties: dict[str, int], slot_ms: int
) -> None:
    answer = send(client, **properties)
    (message,) = waiting(broker, TIMER_TOPIC)
    assert message.properties["TIMER_OUT_MS"] == str(slot_ms)
    assert (message.properties["REAL_TOPIC"], message.properties["REAL_QID"]) == ("T", "2")
    handle = parse_recall_handle(answer.fields["recallHandle"])
    assert handle == ("T", "broker-a", slot_ms + 1, "A1")
    assert slot_for_due_time(handle.time_ms, 1000) == slot_ms, (
        "what takes it back falls into the same slot"
    )


@pytest.mark.parametrize(
    "properties", [{"TIMER_DELAY_SEC": 0}, {"TIMER_DELAY_MS": -5}, {"TIMER_DELIVER_MS": START_MS}]
)
def test_a_time_that_is_over_means_at_once(
    broker: SteppedBroker, client: SteppedClient, properties: dict[str, int]
) -> None:
    answer = send(client, **properties)
    assert answer.code == 0
    assert "recallHandle" not in answer.fields
    assert broker.store.queue_offsets("T", 2) == (0, 1)


def test_more_than_the_maximum_is_refused_with_the_limit(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert send(client, TIMER_DELIVER_MS=START_MS + 3 * DAY_MS).code == 0
    answer = send(client, TIMER_DELIVER_MS=START_MS + 3 * DAY_MS + 1)
    assert answer.code == 13
    assert answer.remark == (
        "the message is due in 259,200,001 ms, the delay must not be more than 259,200,000 ms "
        "(timerMaxDelaySec = 259200). It was not stored."
    )
    assert broker.store.queue_offsets(TIMER_TOPIC, 0) == (0, 1)


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"TIMER_DELAY_SEC": 2**63 - 1}, "must not be more than"),
        ({"TIMER_DELAY_MS": 2**63 - 1}, "must not be more than"),
        ({"TIMER_DELIVER_MS": 2**63 - 1}, "must not be more than"),
        ({"TIMER_DELAY_SEC": 2**63}, "beyond the range of 64-bit numbers"),
        ({"TIMER_DELAY_MS": -(2**63) - 1}, "beyond the range of 64-bit numbers"),
        ({"TIMER_DELIVER_MS": "9" * 5000}, "beyond the range of 64-bit numbers"),
        ({"TIMER_DELAY_SEC": "soon"}, "'soon', not a number"),
        ({"TIMER_DELAY_SEC": "1e3"}, "'1e3', not a number"),
        ({"TIMER_DELAY_SEC": "٣"}, "not a number"),
    ],
)
def test_an_invalid_delay_is_refused(
    broker: SteppedBroker, client: SteppedClient, properties: dict[str, object], words: str
) -> None:
    answer = send(client, **properties)
    assert answer.code == 13
    assert words in answer.remark
    assert len(answer.remark) < 300
    assert broker.store.queue_offsets(TIMER_TOPIC, 0) == (0, 0)


@pytest.mark.parametrize("text", ["0" * 5000 + "3", "+3", "0003"])
def test_zeros_before_a_number_do_not_count(
    broker: SteppedBroker, client: SteppedClient, text: str
) -> None:
    assert send(client, TIMER_DELAY_SEC=text).code == 0
    assert len(waiting(broker, TIMER_TOPIC)) == 1


def test_timed_messages_can_be_disabled_without_delay_levels(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change_store(timer_enable=False)
    refused = send(client, TIMER_DELAY_SEC=3)
    assert refused.code == 1
    assert "timerWheelEnable = false" in refused.remark
    assert send(client, DELAY=1).code == 0


def test_a_slot_that_is_full_refuses(broker: SteppedBroker, client: SteppedClient) -> None:
    broker.change_store(timer_slot_messages_max=2)
    codes = []
    for _ in range(3):
        codes.append(send(client, TIMER_DELAY_SEC=60).code)
        broker.advance(0)
        broker.settle()
    assert codes == [0, 0, 1]
    assert send(client, TIMER_DELAY_SEC=61).code == 0


def test_a_mark_that_takes_back_needs_a_time_to_come(client: SteppedClient) -> None:
    assert send(client, TIMER_DEL_UNIQKEY="T+A1").code == 13
    assert send(client, TIMER_DEL_UNIQKEY="T+A1", TIMER_DELIVER_MS=START_MS).code == 13


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"])
def test_a_batch_is_not_delayed(broker: SteppedBroker, client: SteppedClient, name: str) -> None:
    body = encode_batch([(0, b"a", b""), (0, b"b", f"{name}\x011\x02".encode())])
    answer = client.call(320, send_fields(m="true"), body)
    assert answer.code == 13
    assert name in answer.remark
    assert not list(broker.store.queues())


def test_a_retry_message_gets_no_handle(broker: SteppedBroker, client: SteppedClient) -> None:
    broker.core.groups.put(GroupConfig("G"))
    broker.core.topics.ensure("%RETRY%G", 1)
    answer = send(client, "%RETRY%G", TIMER_DELAY_SEC=3)
    assert answer.code == 0
    assert "recallHandle" not in answer.fields


def draft(**changes: Any) -> MessageToStore:
    properties = {"DELAY": "1", "TRAN_MSG": "true", **changes.pop("properties", {})}
    return MessageToStore("T", 1, b"x", properties, 0, b"", b"", **changes)


@pytest.mark.parametrize("sys_flag", [0, 4, 12])
def test_a_half_message_waits_for_its_commit_first(broker: SteppedBroker, sys_flag: int) -> None:
    half = draft(sys_flag=sys_flag)
    DelayRewriter(broker.settings, broker.clock, lambda _: 0).rewrite(half)
    assert half.topic == "T"


def test_a_committed_message_is_delayed_and_keeps_its_properties(broker: SteppedBroker) -> None:
    message = draft(sys_flag=8, properties={"REAL_TOPIC": "old", "PGROUP": "P"})
    DelayRewriter(broker.settings, broker.clock, lambda _: 0).rewrite(message)
    assert (message.topic, message.queue_id, message.delay_ms) == (SCHEDULE_TOPIC, 0, 1000)
    assert message.properties == {
        "DELAY": "1", "TRAN_MSG": "true", "REAL_TOPIC": "T", "PGROUP": "P", "REAL_QID": "1",
    }  # fmt: skip
