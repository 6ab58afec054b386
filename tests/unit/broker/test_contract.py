"""Members of one group with different subscriptions: strict, lanes, compatible."""

import json
import logging

import pytest

from simulation.lanes import ModelConsumer, Shared, Wanted, balance, read_all
from simulation.stepped import SteppedBroker, SteppedClient, send_fields
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import CONTRACT, GroupConfig, MessageQueue
from sluicemq.wire import bodies

ONE: Wanted = {"T": (TAG, "tag1 || tag2")}
TWO: Wanted = {"T": (TAG, "tag3")}


@pytest.fixture
def shared() -> Shared:
    return Shared("G")


def contract(broker: SteppedBroker, name: str) -> None:
    broker.core.groups.put(GroupConfig("G", attributes={CONTRACT: name}))


def member(
    broker: SteppedBroker, shared: Shared, name: str, wanted: Wanted, version: int = 1
) -> ModelConsumer:
    return ModelConsumer(broker, shared, name, wanted, version)


def produce(client: SteppedClient, count: int, *tags: str, topic: str = "T") -> None:
    for number in range(count):
        for tag in tags:
            name = f"{tag}-{number}"
            fields = send_fields(topic, f"UNIQ_KEY\x01{name}\x02TAGS\x01{tag}\x02", e=number % 4)
            assert client.call(310, fields, name.encode()).code == 0


def read(*consumers: ModelConsumer, rounds: int = 6) -> None:
    read_all(list(consumers), rounds)


@pytest.mark.parametrize("count", [10, 67])
def test_every_message_comes_once_to_the_member_that_wants_it(
    broker: SteppedBroker, client: SteppedClient, shared: Shared, count: int
) -> None:
    one, two = member(broker, shared, "one", ONE, 5), member(broker, shared, "two", TWO, 1)
    produce(client, count, "tag1", "tag2", "tag3")
    read(one, two)
    assert set(shared.deliveries.values()) == {1}
    assert len(shared.deliveries) == 3 * count
    assert all(
        (takers == ["two"]) == name.startswith("tag3") for name, takers in shared.takers.items()
    )


def test_a_lane_sees_its_own_members_and_reads_all_queues(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    consumers = [member(broker, shared, f"a{n}", ONE) for n in range(2)]
    consumers += [member(broker, shared, f"b{n}", TWO) for n in range(2)]
    balance(consumers)
    answer = consumers[0].connection.call(38, {"consumerGroup": "G"})
    assert set(bodies.decode_consumer_list(answer.body)) == {"a0", "a1"}
    for lane in (consumers[:2], consumers[2:]):
        queues = [queue.queue_id for c in lane for queue in c.readings if queue.topic == "T"]
        assert sorted(queues) == [0, 1, 2, 3]
    answer = client.call(38, {"consumerGroup": "G"})
    assert len(bodies.decode_consumer_list(answer.body)) == 4, "tools see all"


def test_another_spelling_of_the_same_expression_is_no_other_lane(
    broker: SteppedBroker, shared: Shared
) -> None:
    member(broker, shared, "one", {"T": (TAG, "b||a")})
    member(broker, shared, "two", {"T": (TAG, " a || b ")})
    assert not broker.core.lanes.table


def test_members_with_different_topics_do_not_harm_each_other(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    broker.core.topics.ensure("U", 4)
    one = member(broker, shared, "one", {"T": (TAG, "*")})
    two = member(broker, shared, "two", {"U": (TAG, "*")})
    produce(client, 5, "t")
    produce(client, 5, "u", topic="U")
    for _ in range(3):
        one.beat()
        two.beat()
        read(one, two)
    assert len(shared.deliveries) == 10
    assert set(shared.deliveries.values()) == {1}


def test_strict_refuses_the_second_subscription_and_says_what_differs(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    contract(broker, "strict")
    one, two = member(broker, shared, "one", ONE), member(broker, shared, "two", TWO)
    assert not one.refusal
    for part in ("Group G", "strict", "one", "two", "T: TAG 'tag1||tag2' -> TAG 'tag3'"):
        assert part in two.refusal
    produce(client, 10, "tag1", "tag2", "tag3")
    read(one)
    assert len(shared.deliveries) == 20
    one.leave(says_so=True)
    two.beat()
    assert not two.refusal


def test_strict_waits_for_a_member_whose_connection_broke(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    """A stalled Java client closes its socket and sends its next heartbeat 30 s later. Meanwhile
    the one that was refused beats: it may not get the group, nor a message."""
    contract(broker, "strict")
    one, two = member(broker, shared, "one", ONE), member(broker, shared, "two", TWO)
    produce(client, 10, "tag1", "tag2", "tag3")
    read(one)
    one.connection.disconnect()
    two.beat()
    read(two)
    assert "may return until 2023-11-14T22:15:20Z" in two.refusal
    assert not two.readings
    broker.advance(30)
    asked = bodies.CheckClientConfig("two", "G", Subscription("T", "n > 3", SQL92))
    assert client.call(46, {}, bodies.encode_check_client_config(asked)).code == 16
    one.connect(broker)
    two.beat()
    assert not one.refusal
    assert "that are online" in two.refusal
    assert set(shared.takers) == {f"tag{tag}-{n}" for tag in (1, 2) for n in range(10)}


def test_strict_waits_no_longer_than_it_would_for_a_member_that_says_nothing(
    broker: SteppedBroker, shared: Shared
) -> None:
    contract(broker, "strict")
    one, two = member(broker, shared, "one", ONE), member(broker, shared, "two", TWO)
    broker.advance(60)
    one.connection.disconnect()
    broker.advance(60)
    two.beat()
    assert two.refusal
    broker.advance(0.1)
    two.beat()
    assert not two.refusal
    one.connect(broker)
    assert "T: TAG 'tag3' -> TAG 'tag1||tag2'" in one.refusal


def test_a_member_that_leaves_over_a_new_connection_is_not_waited_for(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    contract(broker, "strict")
    one, two = member(broker, shared, "one", ONE), member(broker, shared, "two", TWO)
    one.connection.disconnect()
    client.call(35, {"clientID": "one", "consumerGroup": "G"})
    two.beat()
    assert not two.refusal


def test_a_member_that_comes_back_with_another_subscription_is_not_in_its_own_way(
    broker: SteppedBroker, shared: Shared
) -> None:
    contract(broker, "strict")
    one = member(broker, shared, "one", ONE)
    one.connection.disconnect()
    one.wanted = TWO
    one.connect(broker)
    assert not one.refusal


def test_a_group_that_is_no_longer_strict_waits_for_nobody(
    broker: SteppedBroker, shared: Shared
) -> None:
    contract(broker, "strict")
    member(broker, shared, "one", ONE).connection.disconnect()
    contract(broker, "compatible")
    assert not member(broker, shared, "two", TWO).refusal


def test_a_short_heartbeat_with_another_fingerprint_makes_no_member(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    contract(broker, "strict")
    member(broker, shared, "one", ONE)
    data = bodies.ConsumerData("G")
    short = bodies.Heartbeat("two", (), (data,), fingerprint=7, without_subscriptions=True)
    client.call(34, {}, bodies.encode_heartbeat(short))
    answer = client.call(38, {"consumerGroup": "G"})
    assert bodies.decode_consumer_list(answer.body) == ("one",)


def test_strict_refuses_sql92_before_a_java_client_starts(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    contract(broker, "strict")
    member(broker, shared, "one", ONE)
    asked = bodies.CheckClientConfig("two", "G", Subscription("T", "n > 3", SQL92))
    answer = client.call(46, {}, bodies.encode_check_client_config(asked))
    assert answer.code == 16
    assert "n > 3" in (answer.remark or "")


@pytest.mark.parametrize(("name", "warns"), [("compatible", True), ("lanes", False)])
def test_compatible_warns_and_lanes_does_not(
    broker: SteppedBroker, shared: Shared, caplog: pytest.LogCaptureFixture, name: str, warns: bool
) -> None:
    contract(broker, name)
    caplog.set_level(logging.WARNING)
    member(broker, shared, "one", ONE)
    member(broker, shared, "two", TWO)
    assert ("sluice group update G --contract lanes" in caplog.text) is warns


def test_what_a_lane_left_goes_to_those_who_want_it_and_the_rest_waits(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    one = member(broker, shared, "one", ONE)
    two = member(broker, shared, "two", {"T": (TAG, "tag2 || tag3")})
    read(one, two)
    one.leave(says_so=True)
    produce(client, 10, "tag1", "tag2", "tag3")
    read(two)
    assert len(shared.deliveries) == 10, "nobody takes tag2 while one may come back"
    broker.pass_seconds(31)
    read(two)
    assert len(shared.deliveries) == 20
    back = member(broker, shared, "back", ONE)
    read(back, two)
    assert len(shared.deliveries) == 30
    assert set(shared.deliveries.values()) == {1}


def test_a_rolling_upgrade_has_no_gap_and_no_double_and_ends_without_lanes(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    old = [member(broker, shared, f"old{n}", {"T": (TAG, "tag1")}) for n in range(2)]
    new: list[ModelConsumer] = []
    for _ in range(2):
        produce(client, 4, "tag1")
        shared.deliveries.clear()
        read(*old, *new, rounds=1)
        old.pop().leave(says_so=True)
        new.append(member(broker, shared, f"new{len(new)}", {"T": (TAG, "tag1 || tag2")}))
    broker.pass_seconds(31)
    read(*new)
    broker.pass_seconds(1)
    assert not broker.core.lanes.table


def test_a_message_that_is_sent_back_returns_to_its_lane(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    one = member(broker, shared, "one", {"T": (TAG, "*")})
    two = member(broker, shared, "two", TWO)
    balance([one, two])
    produce(client, 1, "tag3")
    queue = next(queue for queue in one.readings if queue.topic == "T" and queue.queue_id == 0)
    one.pull(queue)
    one.send_back(queue)
    broker.run(1.2)
    read(two, one)
    assert shared.takers["tag3-0"] == ["one", "one"]


def test_offsets_of_lanes_survive_and_the_groups_own_is_the_least(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    one, two = member(broker, shared, "one", ONE), member(broker, shared, "two", TWO)
    produce(client, 8, "tag1", "tag3")
    read(one)
    assert broker.core.offsets.committed("G", "T", 0) == 0
    one.leave(says_so=False)
    broker.close()
    again = SteppedBroker(files=broker.files, clock=broker.clock)
    two.connect(again)
    one = member(again, shared, "one", ONE)
    read(one, two)
    assert len(shared.deliveries) == 16
    assert set(shared.deliveries.values()) == {1}
    assert again.core.offsets.committed("G", "T", 0) == 4


def test_a_reset_sends_every_lane_there(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    one, two = member(broker, shared, "one", ONE), member(broker, shared, "two", TWO)
    produce(client, 8, "tag1", "tag3")
    read(one, two)
    client.call(222, {"topic": "T", "group": "G", "timestamp": 0, "isForce": "true"})
    broker.settle()
    read(one, two)
    assert set(shared.deliveries.values()) == {2}


def test_what_nobody_wants_is_counted_and_tools_see_the_lanes(
    broker: SteppedBroker, client: SteppedClient, shared: Shared
) -> None:
    one, two = member(broker, shared, "one", ONE), member(broker, shared, "two", TWO)
    produce(client, 8, "tag1", "tag9")
    read(one, two)
    for _ in range(3):
        broker.pass_seconds(1)
    said = json.loads(bytes(client.call(900133, {"consumerGroup": "G"}).body))
    assert said["unmatched"] == 8
    assert [lane["clientIds"] for lane in said["lanes"]] == [["one"], ["two"]]
    assert said["contract"] == "compatible"


def test_lanes_lock_queues_each_for_itself(broker: SteppedBroker, shared: Shared) -> None:
    """Ordered consumers of two lanes hold the same queue; two of one lane do not."""
    one, two = member(broker, shared, "one", ONE), member(broker, shared, "two", TWO)
    third = member(broker, shared, "third", TWO)
    queue = MessageQueue("T", "broker-a", 0)

    def asks(consumer: ModelConsumer, code: int = 41) -> bytes:
        batch = bodies.LockBatch("G", consumer.client_id, (queue,))
        answer = consumer.connection.call(code, {}, bodies.encode_lock_batch(batch))
        assert answer.code == 0, answer.remark
        return bytes(answer.body)

    def holds(consumer: ModelConsumer) -> bool:
        return bodies.decode_locked_queues(asks(consumer)) == (queue,)

    assert [holds(one), holds(two), holds(third)] == [True, True, False]
    asks(one, 42)
    assert not holds(third), "the lane of one is another"
    asks(two, 42)
    assert holds(third)
    assert not holds(two)
