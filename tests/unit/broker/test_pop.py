"""Pops, peeks and notifications: the order of checks, which messages are found, and the answers."""

import pytest

from simulation.pops import ack, fields_of, fill, handles, numbers, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient, send_fields
from sluicemq.config import BrokerConfig
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.record.codec import decode_records

POP, PEEK, NOTIFY, POLLING = 200050, 200052, 200054, 200055
OK, TIMEOUT = 0, 210
NO_PERMISSION, NO_TOPIC, PARSE_FAILED, NO_GROUP, INVALID = 16, 17, 23, 26, 29
ZEROS = {"popTime": "0", "invisibleTime": "0", "reviveQid": "0", "restNum": "0"}


# ------------------------------------------------------------------------------- what is given


def test_a_pop_returns_the_next_messages_with_their_handles(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 5)
    answer = client.call(POP, pop_fields(broker, maxMsgNums=3))
    assert (answer.code, answer.remark, numbers(answer)) == (OK, "FOUND", [0, 1, 2])
    assert answer.fields == {
        "popTime": str(broker.clock.now_ms()), "invisibleTime": "60000", "restNum": "2",
        "reviveQid": answer.fields["reviveQid"], "startOffsetInfo": "0 0 0",
        "msgOffsetInfo": "0 0 0,1,2",
    }  # fmt: skip
    assert numbers(client.call(POP, pop_fields(broker))) == [3, 4]
    assert client.call(POP, pop_fields(broker)).code == TIMEOUT


def test_a_pop_takes_from_all_queues_or_from_one(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for queue_id in range(4):
        fill(client, 2, queue_id)
    one = client.call(POP, pop_fields(broker, queueId=2))
    assert fields_of(one)["msgOffsetInfo"] == "0 2 0,1"
    others = client.call(POP, pop_fields(broker))
    infos = fields_of(others)["msgOffsetInfo"].split(";")
    assert sorted(infos) == ["0 0 0,1", "0 1 0,1", "0 3 0,1"]
    assert fields_of(others)["restNum"] == "0"


def test_a_pop_begins_at_a_random_queue(broker: SteppedBroker) -> None:
    client = broker.connect()
    broker.core.random.seed(1)
    for queue_id in range(4):
        fill(client, 20, queue_id)
    firsts = [
        fields_of(client.call(POP, pop_fields(broker, maxMsgNums=1)))["msgOffsetInfo"].split()[1]
        for _ in range(30)
    ]
    assert set(firsts) == {"0", "1", "2", "3"}


def test_an_answer_is_no_larger_than_that_of_a_pull(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for queue_id in range(4):
        for _ in range(2):
            client.call(310, send_fields(e=queue_id, properties="n\x011\x02"), bytes(200_000))
    answer = client.call(POP, pop_fields(broker))
    assert len(numbers(answer)) == 2
    assert fields_of(answer)["restNum"] == "6"


@pytest.mark.parametrize(("init_mode", "first"), [(0, 0), (1, 4)])
def test_where_a_group_begins_is_said_by_its_first_pop(
    broker: SteppedBroker, client: SteppedClient, init_mode: int, first: int
) -> None:
    broker.change(pop_from_first_when_near=False)
    fill(client, 5)
    answer = client.call(POP, pop_fields(broker, initMode=init_mode, maxMsgNums=1))
    assert numbers(answer) == [first]


def test_a_short_queue_is_popped_from_its_first_message(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 5)
    assert numbers(client.call(POP, pop_fields(broker, initMode=1))) == [0, 1, 2, 3, 4]


def test_an_offset_behind_the_queue_moves_to_it(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 3)
    broker.core.offsets.put("G", "T", 0, 50)
    assert client.call(POP, pop_fields(broker)).code == TIMEOUT
    fill(client, 1)
    assert numbers(client.call(POP, pop_fields(broker))) == [0]


def test_a_reset_is_where_the_next_pop_begins(broker: SteppedBroker, client: SteppedClient) -> None:
    fill(client, 5)
    client.call(POP, pop_fields(broker))
    client.call(222, {"topic": "T", "group": "G", "timestamp": -1, "isForce": "true",
                      "queueId": 0, "offset": 2})  # fmt: skip
    assert numbers(client.call(POP, pop_fields(broker))) == [2, 3, 4]
    assert not broker.core.offsets.resets


def test_the_answer_waits_for_the_group_commit(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 1)
    request = client.request(POP, pop_fields(broker))
    client.feed(request)
    assert request.opaque not in client.answers
    broker.step()
    assert numbers(client.answers[request.opaque]) == [0]


# --------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(("kind", "expression"), [("TAG", "B || C"), ("SQL92", "TAGS <> 'A'")])
def test_a_filter_is_the_requests(
    broker: SteppedBroker, client: SteppedClient, kind: str, expression: str
) -> None:
    fill(client, 6, tags="ABC")
    client.call(POP, pop_fields(broker, expType=kind, exp=expression))
    broker.settle()
    answer = client.call(POP, pop_fields(broker, expType=kind, exp=expression))
    assert answer.code == TIMEOUT
    assert broker.core.delivered["T", "G"].messages_out == 4


def test_messages_that_the_filter_rejects_are_skipped_in_steps(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change_store(filter_scan_units_max=10)
    fill(client, 45)
    fill(client, 1, tags="B")
    request = client.request(POP, pop_fields(broker, exp="B", expType="TAG", pollTime=1000))
    client.feed(request)
    broker.settle()
    assert numbers(client.answers[request.opaque]) == [0]
    assert fields_of(client.answers[request.opaque])["startOffsetInfo"] == "0 0 45"


def test_a_filter_that_does_not_compile_is_refused(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    request = client.request(POP, pop_fields(broker, expType="SQL92", exp="a = "))
    client.feed(request)
    broker.settle()
    answer = client.answers[request.opaque]
    assert (answer.code, answer.fields) == (PARSE_FAILED, ZEROS)
    assert str(answer.remark).startswith("parse the consumer's subscription failed")


# ---------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("changes", "code", "remark"),
    [
        ({"bornTime": 1}, TIMEOUT, "is timeout too much"),
        ({"maxMsgNums": 33}, INVALID, "num is greater than 32"),
        ({"topic": "U"}, NO_TOPIC, "topic[U] not exist, apply first please! \nSee"),
        ({"queueId": 4}, INVALID, "queueId[4] is illegal, topic:[T]"),
        ({"consumerGroup": "closed"}, NO_PERMISSION, "subscription group no permission, closed"),
        ({"consumerGroup": "%"}, NO_GROUP, "subscription group [%] does not exist"),
    ],
)
def test_an_invalid_pop_is_refused(
    broker: SteppedBroker, client: SteppedClient, changes: dict[str, object], code: int, remark: str
) -> None:
    broker.core.groups.put(GroupConfig("closed", consume_enable=False))
    broker.change(auto_create_group="%" not in str(changes))
    answer = client.call(POP, pop_fields(broker, **changes))
    assert (answer.code, answer.fields) == (code, ZEROS)
    assert remark in str(answer.remark)


def test_permissions_are_checked_before_all_else(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.topics.put(TopicConfig("W", 1, 1, perm=2))
    answer = client.call(POP, pop_fields(broker, topic="W", queueId=9))
    assert (answer.code, answer.remark) == (
        NO_PERMISSION, "the topic[W] peeking message is forbidden"
    )  # fmt: skip
    broker.change_store(timer_enable=False)
    answer = client.call(POP, pop_fields(broker, topic="W"))
    assert (answer.code, "timerWheelEnable" in str(answer.remark)) == (1, True)
    broker.change(broker_permission=2)
    answer = client.call(POP, pop_fields(broker, topic="W", maxMsgNums=99))
    assert (answer.code, answer.remark) == (
        NO_PERMISSION, "the broker[127.0.0.1] pop message is forbidden"
    )  # fmt: skip


def test_a_queue_with_too_many_messages_in_flight_is_not_popped(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(pop_in_flight_limited=True, pop_in_flight_max=2)
    fill(client, 6)
    answer = client.call(POP, pop_fields(broker, maxMsgNums=3))
    full = client.call(POP, pop_fields(broker))
    assert (full.code, fields_of(full)["restNum"]) == (TIMEOUT, "3")
    ack(client, handles(answer)[1])
    assert numbers(client.call(POP, pop_fields(broker))) == [3, 4, 5]


# ------------------------------------------------------------------------- what comes once more


@pytest.mark.parametrize("is_v2", [False, True])
def test_an_unacknowledged_message_is_delivered_again_as_it_was_sent(is_v2: bool) -> None:
    broker = SteppedBroker(
        config=BrokerConfig(broker_name="broker-a", metrics_enable=False, pop_retry_v2=is_v2)
    )
    broker.core.topics.put(TopicConfig("T", 1, 1))
    client = broker.connect()
    fill(client, 3)
    first = client.call(POP, pop_fields(broker))
    ack(client, handles(first)[1])
    broker.run(61)
    again = client.call(POP, pop_fields(broker))
    assert numbers(again) == [0, 2]
    assert {m.topic for m in decode_records(again.body)} == {"T"}
    assert {m.reconsume_times for m in decode_records(again.body)} == {1}
    assert {m.properties["1ST_POP_TIME"] for m in decode_records(again.body)} == {
        fields_of(first)["popTime"]
    }
    kind = 1 + is_v2
    assert fields_of(again)["msgOffsetInfo"] == f"{kind} 0 0,1"
    retry = "%RETRY%G+T" if is_v2 else "%RETRY%G_T"
    for handle in handles(again).values():
        assert (handle.kind, handle.broker) == (kind, "broker-a")
        assert ack(client, handle, topic=retry).code == OK
    broker.run(70)
    assert client.call(POP, pop_fields(broker)).code == TIMEOUT


def test_retries_may_show_their_own_topic(broker: SteppedBroker, client: SteppedClient) -> None:
    broker.change(pop_actual_retry_topic=True)
    fill(client, 1)
    client.call(POP, pop_fields(broker))
    broker.run(61)
    (message,) = decode_records(client.call(POP, pop_fields(broker)).body)
    assert (message.topic, "POP_CK" in message.properties) == ("%RETRY%G_T", False)


@pytest.mark.parametrize(("percent", "first"), [(100, "1"), (0, "0")])
def test_retries_go_first_or_last(
    broker: SteppedBroker, client: SteppedClient, percent: int, first: str
) -> None:
    fill(client, 1)
    client.call(POP, pop_fields(broker))
    broker.run(61)
    broker.change(pop_retry_percent=percent)
    fill(client, 1)
    infos = fields_of(client.call(POP, pop_fields(broker)))["msgOffsetInfo"]
    assert [info[0] for info in infos.split(";")] == sorted("01", reverse=first == "1")


@pytest.mark.parametrize("clears", [True, False])
def test_a_setting_decides_whether_the_retries_of_a_deleted_topic_are_deleted(
    broker: SteppedBroker, client: SteppedClient, clears: bool
) -> None:
    broker.change(clear_pop_retries=clears)
    fill(client, 2)
    first = handles(client.call(POP, pop_fields(broker)))
    broker.run(61)
    client.call(POP, pop_fields(broker, maxMsgNums=1))
    client.call(215, {"topic": "T"})
    assert ("%RETRY%G_T" in broker.core.topics) is not clears
    assert ack(client, first[0]).code == NO_TOPIC
    broker.core.topics.put(TopicConfig("T", 4, 4))
    broker.run(61)
    again = client.call(POP, pop_fields(broker))
    assert again.code == (TIMEOUT if clears else OK)


# ------------------------------------------------------------------------------ looking only


def test_a_peek_takes_no_messages(broker: SteppedBroker, client: SteppedClient) -> None:
    fill(client, 3)
    fields = {"consumerGroup": "G", "topic": "T", "queueId": -1, "maxMsgNums": 2}
    for _ in range(2):
        answer = client.call(PEEK, fields)
        assert (answer.code, answer.remark, numbers(answer)) == (OK, "FOUND", [0, 1])
        assert answer.fields == ZEROS | {"restNum": "3"}
    client.call(POP, pop_fields(broker))
    empty = client.call(PEEK, fields)
    assert (empty.code, empty.remark) == (19, "NO_MESSAGE_IN_QUEUE")


def test_peeks_and_notifications_are_refused_as_pops_are(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for code, empty in ((PEEK, ZEROS), (NOTIFY, {"hasMsg": "false", "pollingFull": "false"}),
                        (POLLING, {"pollingNum": "0"})):  # fmt: skip
        answer = client.call(code, pop_fields(broker, topic="U"))
        assert (answer.code, answer.fields) == (NO_TOPIC, empty)
        assert client.call(code, pop_fields(broker, queueId=4)).code == INVALID


def test_a_notification_says_whether_there_is_something(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    nothing = client.call(NOTIFY, pop_fields(broker))
    assert (nothing.code, nothing.fields) == (OK, {"hasMsg": "false", "pollingFull": "false"})
    fill(client, 1)
    assert fields_of(client.call(NOTIFY, pop_fields(broker)))["hasMsg"] == "true"
    unwanted = pop_fields(broker, expType="TAG", exp="B")
    assert fields_of(client.call(NOTIFY, unwanted))["hasMsg"] == "false"
    client.call(POP, pop_fields(broker))
    assert fields_of(client.call(NOTIFY, pop_fields(broker)))["hasMsg"] == "false"
    broker.run(61)
    assert fields_of(client.call(NOTIFY, pop_fields(broker)))["hasMsg"] == "true"
