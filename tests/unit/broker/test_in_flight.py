"""The exact lag of groups that pop, and the list of messages in flight (208, 900131, 900134)."""

from simulation.lanes import ModelConsumer, Shared
from simulation.pops import ack, fill, handles, numbers, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.model.subscription import TAG
from sluicemq.model.topic import GroupConfig
from sluicemq.wire import bodies

POP, CHANGE = 200050, 200053
RETRY = "%RETRY%G_T"


def lag(client: SteppedClient, topic: str = "T") -> int:
    """Return the lag of queue 0, in which requests 208 and 900131 agree."""
    stats = bodies.decode_consume_stats(client.call(208, {"consumerGroup": "G"}).body)
    one = {(q.topic, q.queue_id): it for q, it in stats.queues.items()}[topic, 0]
    counted = matched(client, topic)
    behind = one.broker_offset - one.consumer_offset + one.extra
    assert counted.offset_max - max(counted.committed, 0) + counted.extra == behind
    assert counted.in_flight == one.in_flight
    return behind


def matched(client: SteppedClient, topic: str = "T") -> bodies.QueueMatching:
    answer = client.call(900131, {"consumerGroup": "G", "topic": topic})
    return bodies.decode_group_matching(answer.body)[0].queues[0]


def held(client: SteppedClient, **fields: object) -> list[bodies.InFlightMessage]:
    answer = client.call(900134, {"consumerGroup": "G", **fields})
    assert answer.code == 0, answer.remark
    return bodies.decode_in_flight(answer.body)


def test_a_popped_message_counts_until_it_is_acknowledged(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 5)
    answer = client.call(POP, pop_fields(broker, maxMsgNums=3))
    for _ in range(2):  # before the offset is on disk, and then
        assert lag(client) == 5
        assert matched(client).in_flight == 3
        broker.pass_seconds(1)
    ack(client, handles(answer)[1])
    assert lag(client) == 4
    assert [(one.queue_offset, one.delivery_count) for one in held(client)] == [(0, 1), (2, 1)]


def test_a_redelivered_message_counts_once(broker: SteppedBroker, client: SteppedClient) -> None:
    fill(client, 2)
    client.call(POP, pop_fields(broker))
    broker.pass_seconds(61)
    assert (lag(client), lag(client, RETRY)) == (0, 2)
    again = client.call(POP, pop_fields(broker, maxMsgNums=1))
    assert lag(client, RETRY) == 2
    (one,) = held(client, topic=RETRY)
    assert (one.queue_offset, one.delivery_count) == (0, 2)
    ack(client, next(iter(handles(again).values())), topic=RETRY)
    assert lag(client, RETRY) == 1


def test_the_list_names_the_client_and_the_visible_time(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    one = ModelConsumer(broker, Shared("G"), "one", {"T": (TAG, "*")}, 1)
    fill(client, 2)
    now_ms = broker.clock.now_ms()
    answer = one.connection.call(POP, pop_fields(broker))
    found = held(client, topic="T", queueId=0, queueOffset=1)
    assert [(it.client_id, it.popped_ms, it.visible_ms) for it in found] == [
        ("one", now_ms, now_ms + 60_000)
    ]
    broker.clock.advance(1)
    handle = handles(answer)[1]
    one.connection.call(
        CHANGE,
        {"consumerGroup": "G", "topic": "T", "queueId": 0, "offset": 1,
         "extraInfo": handle.encode(), "invisibleTime": 90_000},
    )  # fmt: skip
    (changed,) = held(client, topic="T", queueId=0, queueOffset=1)
    assert (changed.client_id, changed.visible_ms) == ("one", now_ms + 91_000)
    assert held(client, topic="T", queueId=1) == held(client, topic="other") == []
    assert len(held(client, maxMsgNums=1)) == 1


def test_acknowledged_messages_behind_the_offset_do_not_count_in_order(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 4)
    answer = client.call(POP, pop_fields(broker, queueId=0, order="true", maxMsgNums=3))
    assert (lag(client), matched(client).in_flight) == (4, 3)
    ack(client, handles(answer)[1])
    assert (lag(client), matched(client).in_flight) == (3, 2)
    assert [one.queue_offset for one in held(client)] == [0, 2]
    broker.clock.advance(61)
    assert (lag(client), matched(client).in_flight) == (3, 0)
    assert held(client) == []
    client.call(POP, pop_fields(broker, queueId=0, order="true", maxMsgNums=1))
    assert [(one.queue_offset, one.delivery_count) for one in held(client)] == [(0, 2)]


def test_matching_messages_in_flight_are_counted(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    one = ModelConsumer(broker, Shared("G"), "one", {"T": (TAG, "A")}, 1)
    fill(client, 6, tags="AB")
    wanted = {"expType": TAG, "exp": "A"}
    assert matched(client).matching == 3
    answer = one.connection.call(POP, pop_fields(broker, maxMsgNums=2, **wanted))
    assert numbers(answer) == [0, 2]
    assert (matched(client).matching, matched(client).in_flight) == (3, 2)
    ack(client, handles(answer)[0])
    assert matched(client).matching == 2
    broker.pass_seconds(61)
    assert (matched(client).matching, matched(client, RETRY).matching) == (1, 1)


def test_a_pulling_group_has_no_messages_in_flight(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.groups.put(GroupConfig("G"))
    fill(client, 3)
    broker.core.offsets.put("G", "T", 0, 1)
    assert lag(client) == 2
    assert held(client) == []


def test_after_a_restart_the_client_of_a_message_is_unknown(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 1)
    client.call(POP, pop_fields(broker))
    again = SteppedBroker(files=broker.files.kill(), clock=broker.clock)
    (one,) = held(again.connect())
    assert one.client_id == ""


def test_an_unknown_group_is_refused(client: SteppedClient) -> None:
    assert client.call(900134, {"consumerGroup": "none"}).code == 26
