"""All members of a group pop a topic by one filter, so that none takes another one's messages."""

import pytest

from simulation.lanes import ModelConsumer, Shared, Wanted, read_all
from simulation.pops import fill, numbers, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import CONTRACT, GroupConfig, TopicConfig
from sluicemq.wire.frames import Command

POP = 200050
OK, NO_PERMISSION, TIMEOUT = 0, 16, 210
A: Wanted = {"T": (TAG, "A")}
B: Wanted = {"T": (TAG, "B")}


def member(broker: SteppedBroker, name: str, wanted: Wanted) -> ModelConsumer:
    return ModelConsumer(broker, Shared("G"), name, wanted, 1)


def pop(one: ModelConsumer, **changes: object) -> Command:
    """Pop by the filter of the consumer."""
    topic = str(changes.get("topic", "T"))
    kind, expression = one.wanted.get(topic, (TAG, "*"))
    filtering = {"expType": kind, "exp": expression, "invisibleTime": 1000}
    return one.connection.call(POP, pop_fields(one.broker, **filtering | changes))


@pytest.mark.parametrize("contract", ["compatible", "lanes", "strict"])
def test_a_pop_with_another_filter_is_refused_and_takes_no_messages(
    broker: SteppedBroker, client: SteppedClient, contract: str
) -> None:
    broker.core.groups.put(GroupConfig("G", attributes={CONTRACT: contract}))
    one, two = member(broker, "one", A), member(broker, "two", B)
    fill(client, 4, tags="AB")
    assert numbers(pop(one, maxMsgNums=1)) == [0]
    refused = pop(two)
    assert refused.code == NO_PERMISSION
    for word in ("one", "two", "'A'", "'B'"):
        assert word in (refused.remark or "")
    assert numbers(pop(one)) == [2]
    assert "two" in str(client.call(900133, {"consumerGroup": "G"}).body)


def test_a_stranger_is_refused_too(broker: SteppedBroker, client: SteppedClient) -> None:
    one = member(broker, "one", A)
    fill(client, 2, tags="AB")
    pop(one, maxMsgNums=1)
    assert client.call(POP, pop_fields(broker, expType=TAG, exp="B")).code == NO_PERMISSION
    assert client.call(POP, pop_fields(broker)).code == NO_PERMISSION
    assert client.call(POP, pop_fields(broker, expType=TAG, exp=" A ")).code == TIMEOUT


def test_another_spelling_is_the_same_filter(broker: SteppedBroker, client: SteppedClient) -> None:
    one = member(broker, "one", {"T": (SQL92, "n > 0 AND n < 9")})
    two = member(broker, "two", {"T": (SQL92, "n>0 and (n<9)")})
    fill(client, 3)
    assert len(numbers(pop(one, maxMsgNums=1))) == 1
    assert pop(two).code in (OK, TIMEOUT)


def test_members_may_pop_different_topics(broker: SteppedBroker, client: SteppedClient) -> None:
    broker.core.topics.put(TopicConfig("U", 4, 4))
    one, two = member(broker, "one", A), member(broker, "two", {"U": (TAG, "B")})
    assert pop(one).code == TIMEOUT
    assert pop(two, topic="U").code == TIMEOUT
    assert broker.core.contracts.refusals == {}


def test_a_member_alone_may_change_its_mind(broker: SteppedBroker, client: SteppedClient) -> None:
    one = member(broker, "one", A)
    fill(client, 2, tags="AB")
    assert numbers(pop(one)) == [0]
    one.wanted = B  # the heartbeat that says so is still to come
    fill(client, 2, tags="AB")
    assert numbers(pop(one)) == [1]


def test_the_next_filter_is_valid_when_no_member_subscribes_to_the_first(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    one, two = member(broker, "one", A), member(broker, "two", B)
    pop(one)
    assert pop(two).code == NO_PERMISSION
    fill(client, 2, tags="AB")
    one.change(B, 2)
    assert numbers(pop(two)) == [1]
    assert not broker.core.contracts.refusals


@pytest.mark.parametrize("way", ["said", "broken"])
def test_a_member_that_has_left_does_not_block_another_filter(
    broker: SteppedBroker, client: SteppedClient, way: str
) -> None:
    """A program that is stopped and started with another filter is served at once."""
    one, two = member(broker, "one", A), member(broker, "two", B)
    pop(one)
    fill(client, 2, tags="AB")
    if way == "said":
        one.connection.call(35, {"clientID": "one", "consumerGroup": "G"})
    one.connection.disconnect()
    assert numbers(pop(two)) == [1]


def test_a_pop_that_waits_is_asked_again(broker: SteppedBroker, client: SteppedClient) -> None:
    stranger = broker.connect()
    waiting = pop_fields(broker, pollTime=15_000, expType=TAG, exp="B")
    request = stranger.request(POP, waiting)
    stranger.feed(request)
    broker.step()
    one = member(broker, "one", A)
    assert pop(one).code == TIMEOUT
    fill(client, 2, tags="AB")
    broker.step()
    assert [answer.code for answer in stranger.log] == [NO_PERMISSION]
    assert numbers(pop(one)) == [0]


def test_a_group_that_pops_has_no_lanes(broker: SteppedBroker, client: SteppedClient) -> None:
    one, two = member(broker, "one", A), member(broker, "two", B)
    assert "G" in broker.core.lanes.table
    fill(client, 4, tags="AB")
    pop(one, maxMsgNums=1)
    one.beat()
    two.beat()
    assert "G" not in broker.core.lanes.table
    broker.clock.advance(60)
    broker.core.lanes.run_periodic_work()
    assert broker.core.checkpoints.get_next_offset("G", "T", 0) > 0, (
        "no lane has taken the group back"
    )


def test_a_topic_that_is_pulled_in_lanes_cannot_be_popped(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    one, two = member(broker, "one", A), member(broker, "two", B)
    fill(client, 4, tags="AB")
    read_all([one, two], 2)
    refused = pop(two)
    assert refused.code == NO_PERMISSION
    assert "lanes" in (refused.remark or "")


def test_the_filter_of_a_deleted_topic_is_forgotten(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    one = member(broker, "one", A)
    pop(one)
    assert broker.core.contracts.pop_filters
    broker.core.offsets.forget(topic="T")
    assert not broker.core.contracts.pop_filters
