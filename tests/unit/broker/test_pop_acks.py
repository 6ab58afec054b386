"""Acknowledgements of popped messages, single and batched, and changes of their invisible time."""

import base64

import pytest

from simulation.pops import POP, ack, fields_of, fill, handles, numbers, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.record.codec import decode_records
from sluicemq.wire import fastjson
from sluicemq.wire.frames import Command
from sluicemq.wire.popping import ReceiptHandle

BATCH_ACK, CHANGE = 200151, 200053
OK, ILLEGAL, NO_TOPIC, NO_MESSAGE = 0, 13, 17, 208
ZEROS = {"popTime": "0", "invisibleTime": "0", "reviveQid": "0"}


def pop(
    broker: SteppedBroker, client: SteppedClient, **changes: object
) -> dict[int, ReceiptHandle]:
    return handles(client.call(POP, pop_fields(broker, **changes)))


def change(client: SteppedClient, handle: ReceiptHandle, ms: int, **changes: object) -> Command:
    fields: dict[str, object] = {
        "consumerGroup": "G", "topic": "T", "queueId": handle.queue_id, "offset": handle.offset,
        "extraInfo": handle.encode(), "invisibleTime": ms,
    }  # fmt: skip
    return client.call(CHANGE, fields | changes)


def batch(handle: ReceiptHandle, differences: list[int], **changes: object) -> dict[str, object]:
    bits = sum(1 << difference for difference in differences)
    return {
        "b": base64.b64encode(bits.to_bytes(16, "little")).decode(), "c": "G",
        "it": handle.invisible_ms, "pt": handle.pop_ms, "q": handle.queue_id,
        "r": str(handle.kind), "rq": handle.revive_queue, "so": handle.start_offset, "t": "T",
    } | changes  # fmt: skip


def call_batch(
    broker: SteppedBroker, client: SteppedClient, acks: list[dict[str, object]]
) -> Command:
    body = fastjson.dumps({"acks": acks, "brokerName": "broker-a"})
    request = client.request(BATCH_ACK, None, body)
    client.feed(request)
    broker.settle()
    return client.answers[request.opaque]


def test_an_acknowledged_message_is_not_delivered_again(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 3)
    held = pop(broker, client)
    answer = ack(client, held[1])
    assert (answer.code, answer.fields, answer.remark) == (OK, None, None)
    broker.run(61)
    assert sorted(pop(broker, client)) == [0, 2]


def test_an_acknowledgement_is_answered_when_it_is_stored(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 1)
    handle = pop(broker, client)[0]
    fields = {"consumerGroup": "G", "topic": "T", "queueId": 0, "offset": 0,
              "extraInfo": handle.encode()}  # fmt: skip
    request = client.request(200051, fields)
    client.feed(request)
    assert request.opaque not in client.answers
    broker.step()
    assert client.answers[request.opaque].code == OK
    oneway = client.request(200051, fields, flag=2)
    client.feed(oneway)
    broker.step()
    assert oneway.opaque not in client.answers


def test_late_and_second_acknowledgements_are_no_errors(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 2)
    held = pop(broker, client)
    assert [ack(client, held[0]).code for _ in range(2)] == [OK, OK]
    broker.run(61)
    assert ack(client, held[1]).code == OK
    assert sorted(pop(broker, client)) == [1]
    assert ack(client, held[1]._replace(pop_ms=5)).code == OK


@pytest.mark.parametrize(
    ("changes", "code", "remark"),
    [
        ({"topic": "U"}, NO_TOPIC, "topic[U] not exist, apply first please! \nSee"),
        ({"queueId": 4}, ILLEGAL, "queueId[4] is illegal, topic:[T]"),
        ({"queueId": -1}, ILLEGAL, "queueId[-1] is illegal"),
        ({"offset": 3}, NO_MESSAGE, "offset is illegal, key:T@0, commit:3, store:0~2"),
        ({"offset": -1}, NO_MESSAGE, "offset is illegal"),
        ({"extraInfo": "0 1"}, 1, "is not the receipt handle"),
        ({"liteTopic": "L"}, 3, "lite topic L"),
    ],
)
def test_an_invalid_acknowledgement_is_refused(
    broker: SteppedBroker,
    client: SteppedClient,
    changes: dict[str, object],
    code: int,
    remark: str,
) -> None:
    fill(client, 2)
    handle = pop(broker, client)[0]
    answer = ack(client, handle, **changes)
    assert (answer.code, answer.fields) == (code, None)
    assert remark in str(answer.remark)


# ---------------------------------------------------------------------------------------- batches


def test_a_batch_acknowledges_by_bits(broker: SteppedBroker, client: SteppedClient) -> None:
    for queue_id in range(2):
        fill(client, 4, queue_id)
    first = pop(broker, client, queueId=0)[0]
    second = pop(broker, client, queueId=1)[0]
    answer = call_batch(broker, client, [batch(first, [0, 2]), batch(second, [0, 1, 2, 3])])
    assert (answer.code, answer.fields, answer.remark) == (OK, None, None)
    broker.run(61)
    assert sorted(pop(broker, client)) == [1, 3]


def test_a_batch_acknowledges_redelivered_messages(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 2)
    pop(broker, client)
    broker.run(61)
    again = pop(broker, client)[0]
    assert call_batch(broker, client, [batch(again, [0, 1])]).code == OK
    broker.run(61)
    assert pop(broker, client) == {}


def test_a_batch_skips_messages_that_do_not_exist(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 2)
    handle = pop(broker, client)[0]
    acks = [
        batch(handle, [0], t="U"), batch(handle, [0], q=9), batch(handle, [50]), batch(handle, [1]),
    ]  # fmt: skip
    assert call_batch(broker, client, acks).code == OK
    broker.run(61)
    assert sorted(pop(broker, client)) == [0]


def test_an_empty_batch_has_no_message(broker: SteppedBroker, client: SteppedClient) -> None:
    assert client.call(BATCH_ACK).code == NO_MESSAGE
    assert client.call(BATCH_ACK, None, b'{"acks":[]}').code == NO_MESSAGE


def test_a_long_batch_is_done_in_steps(broker: SteppedBroker, client: SteppedClient) -> None:
    fill(client, 150)
    acks = [batch(pop(broker, client, maxMsgNums=1)[n], [0]) for n in range(150)]
    assert call_batch(broker, client, acks).code == OK
    broker.run(61)
    assert pop(broker, client) == {}


# ---------------------------------------------------------------------------------------- changes


def test_a_changed_time_has_a_new_handle(broker: SteppedBroker, client: SteppedClient) -> None:
    fill(client, 2)
    old = pop(broker, client)[1]
    broker.run(10)
    answer = change(client, old, 100_000)
    fields = fields_of(answer)
    assert (answer.code, answer.remark) == (OK, "not set any response code")
    assert fields == {
        "popTime": str(broker.clock.now_ms()), "invisibleTime": "100000",
        "reviveQid": str(old.revive_queue),
    }  # fmt: skip
    new = old._replace(start_offset=1, pop_ms=int(fields["popTime"]), invisible_ms=100_000)
    broker.run(51)
    assert sorted(pop(broker, client)) == [0]
    assert ack(client, old).code == OK  # and does nothing
    broker.run(50)
    assert sorted(pop(broker, client)) == [1]
    assert new.deadline_ms <= broker.clock.now_ms()


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(("suspend", "times"), [("true", 0), ("false", 1)])
def test_a_message_that_is_suspended_was_not_tried(
    broker: SteppedBroker, client: SteppedClient, suspend: str, times: int, is_restarted: bool
) -> None:
    fill(client, 1)
    handle = pop(broker, client)[0]
    broker.run(1)
    assert change(client, handle, 5000, suspend=suspend).code == OK
    if is_restarted:
        broker = SteppedBroker(files=broker.files.kill(), clock=broker.clock)
        client = broker.connect()
    broker.run(6)
    (message,) = decode_records(client.call(POP, pop_fields(broker)).body)
    assert message.reconsume_times == times


def test_the_new_handle_acknowledges(broker: SteppedBroker, client: SteppedClient) -> None:
    fill(client, 1)
    old = pop(broker, client)[0]
    fields = fields_of(change(client, old, 1000))
    new = old._replace(pop_ms=int(fields["popTime"]), invisible_ms=1000)
    assert ack(client, new).code == OK
    broker.run(70)
    assert pop(broker, client) == {}


def test_an_acknowledgement_counts_though_the_slaves_of_a_new_master_do_not_have_it_yet(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """The previous master has answered it; the new one hides it until slaves have it."""
    fill(client, 2)
    held = pop(broker, client)
    broker.run(1)
    confirmed = broker.store.written_offset
    assert ack(client, held[0]).code == OK
    again = SteppedBroker(files=broker.files.kill(), clock=broker.clock, confirmed=confirmed)
    for _ in range(7):
        again.store.publish(again.store.written_offset)
        again.run(10)
    assert sorted(pop(again, again.connect())) == [1]


def test_an_invalid_change_of_the_invisible_time_is_refused(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 2)
    handle = pop(broker, client)[0]
    unset = "not set any response code"
    for changes, code, remark in (
        ({"topic": "U"}, NO_TOPIC, "topic[U] not exist"),
        ({"queueId": 4}, ILLEGAL, "queueId[4] is illegal"),
        ({"offset": 2}, NO_MESSAGE, unset),
        ({"liteTopic": "L"}, 3, "lite topic"),
    ):
        answer = change(client, handle, 1000, **changes)
        assert (answer.code, answer.fields) == (code, ZEROS)
        assert remark in str(answer.remark)


# --------------------------------------------------------------------------------------- in order


def pop_ordered(
    broker: SteppedBroker, client: SteppedClient, **changes: object
) -> tuple[Command, dict[int, ReceiptHandle]]:
    answer = client.call(POP, pop_fields(broker, order="true", **changes))
    return answer, handles(answer)


def test_a_queue_in_order_is_blocked_until_all_is_acknowledged(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 5)
    answer, held = pop_ordered(broker, client, maxMsgNums=2)
    assert fields_of(answer)["reviveQid"] == "999"
    assert fields_of(answer)["orderCountInfo"] == "0 0 0"
    blocked = client.call(POP, pop_fields(broker, order="true"))
    assert (blocked.code, fields_of(blocked)["orderCountInfo"]) == (210, "")
    assert [ack(client, held[n]).code for n in range(2)] == [OK, OK]
    assert numbers(pop_ordered(broker, client)[0]) == [2, 3, 4]
    assert broker.core.offsets.committed("G", "T", 0) == 2


def test_an_attempt_that_is_repeated_gets_the_same(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 3)
    first, _ = pop_ordered(broker, client, attemptId="a", maxMsgNums=2)
    again, _ = pop_ordered(broker, client, attemptId="a", maxMsgNums=2)
    assert numbers(first) == numbers(again) == [0, 1]
    assert client.call(POP, pop_fields(broker, order="true", attemptId="b")).code == 210


def test_an_ordered_pop_returns_the_number_of_earlier_deliveries(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 3)
    _, held = pop_ordered(broker, client, maxMsgNums=2)
    ack(client, held[0])
    broker.run(61)
    again, _ = pop_ordered(broker, client)
    assert numbers(again) == [1, 2]
    assert fields_of(again)["orderCountInfo"] == "0 qo0%1 1;0 0 0"


def test_a_pop_in_order_that_waits_gets_the_queue_when_it_is_free(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 2)
    _, held = pop_ordered(broker, client, maxMsgNums=1)
    other = broker.connect()
    request = other.request(POP, pop_fields(broker, order="true", pollTime=15_000))
    other.feed(request)
    broker.settle()
    assert request.opaque not in other.answers
    ack(client, held[0])
    broker.settle()
    assert numbers(other.answers[request.opaque]) == [1]


def test_changing_the_invisible_time_in_order_keeps_the_pop_time(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 1)
    _, held = pop_ordered(broker, client)
    broker.run(10)
    fields = fields_of(change(client, held[0], 100_000))
    assert fields == {
        "popTime": str(held[0].pop_ms), "invisibleTime": "110000", "reviveQid": "999"
    }  # fmt: skip
    broker.run(99)
    assert client.call(POP, pop_fields(broker, order="true")).code == 210
    broker.run(2)
    assert numbers(pop_ordered(broker, client)[0]) == [0]


def test_a_change_before_the_committed_offset_has_no_effect(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 2)
    _, held = pop_ordered(broker, client)
    for handle in held.values():
        ack(client, handle)
    answer = change(client, held[0], 1000)
    assert (answer.code, answer.fields) == (OK, ZEROS)


def test_a_batch_in_order(broker: SteppedBroker, client: SteppedClient) -> None:
    fill(client, 3)
    _, held = pop_ordered(broker, client)
    assert call_batch(broker, client, [batch(held[0], [0, 1, 2])]).code == OK
    assert broker.core.offsets.committed("G", "T", 0) == 3
