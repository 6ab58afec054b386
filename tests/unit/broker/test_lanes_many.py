"""A group with very many subscriptions: members are served, and idle lanes are merged."""

import logging
import os
from collections.abc import Iterator

import orjson
import pytest

from simulation.lanes import ModelConsumer, Shared, Wanted, balance, read_all
from simulation.stepped import SteppedBroker, send_fields
from sluicemq.broker.lanes import idle_lanes as idle_lanes_module
from sluicemq.broker.lanes.filters import RuleFilter
from sluicemq.broker.lanes.group import GroupLanes
from sluicemq.broker.lanes.lanes_file import encode_group
from sluicemq.broker.lanes.rules import (
    Atom,
    compute_rules,
    create_rule,
    extend_chain,
    intersect_rules,
    merge_keys,
    split_key,
)
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import CONTRACT, GroupConfig, MessageQueue, TopicConfig

LANES = int(os.environ.get("SLUICEMQ_LANES", "150"))
QUEUE = MessageQueue("T", "broker-a", 0)


@pytest.fixture
def broker() -> Iterator[SteppedBroker]:
    made = SteppedBroker()
    made.core.topics.put(TopicConfig("T", 1, 1))
    made.core.groups.put(GroupConfig("G", attributes={CONTRACT: "lanes"}))
    yield made
    made.close()


def wants(number: int) -> Wanted:
    return {"T": (TAG, f"t{number}") if number % 10 else (SQL92, f"TAGS = 't{number}'")}


def key(*tags: str) -> str:
    return orjson.dumps([["T", TAG, "||".join(tags)]]).decode()


def produce(broker: SteppedBroker, *numbers: int) -> None:
    client = broker.connect()
    for number in numbers:
        properties = f"UNIQ_KEY\x01m{number}\x02TAGS\x01t{number}\x02"
        assert client.call(310, send_fields("T", properties), b"m%d" % number).code == 0


def lanes_of(broker: SteppedBroker) -> GroupLanes:
    return broker.core.lanes.table["G"]


def come(broker: SteppedBroker, shared: Shared, *numbers: int) -> list[ModelConsumer]:
    made = [ModelConsumer(broker, shared, f"c{n}", wants(n), 1) for n in numbers]
    assert [one.refusal for one in made if one.refusal] == []
    return made


def test_very_many_subscriptions_and_the_next_one_are_served_each_with_its_own_messages(
    broker: SteppedBroker,
) -> None:
    shared = Shared("G")
    consumers = come(broker, shared, *range(LANES + 1))
    assert len(lanes_of(broker).lanes) == LANES + 1
    produce(broker, *range(0, LANES + 1, 7), LANES)
    read_all(consumers, 2)
    wanted = {f"m{n}": [f"c{n}"] for n in [*range(0, LANES + 1, 7), LANES]}
    assert shared.takers == wanted
    bytes_a_lane = len(orjson.dumps(encode_group(lanes_of(broker)))) / LANES
    assert bytes_a_lane < 600, "what older lanes want is in the file once"
    broker.core.lanes.document.save()
    broker.close()
    again = SteppedBroker(files=broker.files, clock=broker.clock)
    assert len(again.core.lanes.table["G"].lanes) == LANES + 1
    again.close()


def test_a_merged_lane_is_split_off_with_all_its_messages(
    broker: SteppedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_lanes_module, "IDLE_LANES_MAX", 2)
    shared = Shared("G")
    stays, *others = come(broker, shared, *range(12))
    balance([stays, *others])
    for one in others:
        one.leave(says_so=True)
    broker.pass_seconds(31)
    produce(broker, *range(12))
    broker.pass_seconds(12)
    idle = lanes_of(broker).get_idle_lanes()
    assert len(idle) == 2
    assert sum(len(split_key(lane.key)) for lane in idle) == 11
    back = come(broker, shared, 7, 3)
    read_all([stays, *back], 4)
    assert shared.takers == {"m0": ["c0"], "m7": ["c7"], "m3": ["c3"]}
    assert sum(len(split_key(lane.key)) for lane in lanes_of(broker).get_idle_lanes()) == 9


def test_forgotten_subscriptions_are_reported(
    broker: SteppedBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(idle_lanes_module, "IDLE_LANES_MAX", 2)
    monkeypatch.setattr(idle_lanes_module, "IDLE_SUBSCRIPTIONS_MAX", 4)
    shared = Shared("G")
    stays, *others = come(broker, shared, *range(7))
    balance([stays, *others])
    for one in others:
        one.leave(says_so=True)
        broker.pass_seconds(31)
        produce(broker, int(one.client_id[1:]))
    with caplog.at_level(logging.WARNING):
        broker.pass_seconds(8)
    assert "more than 4 subscriptions left the group within a day" in caplog.text
    answer = broker.connect().call(900133, {"consumerGroup": "G"})
    forgotten = orjson.loads(bytes(answer.body))["forgotten"]
    assert forgotten[0]["subscription"] == key("t1")
    assert forgotten[0]["messagesMax"] >= 1
    assert sum(len(split_key(lane.key)) for lane in lanes_of(broker).get_idle_lanes()) <= 4


def test_equal_chains_are_one_object_and_shared_indexes_stay_separate() -> None:
    tags = [Atom(TAG, f"t{number}") for number in range(4)]
    order = extend_chain(None, *tags[:2])
    assert extend_chain(None, *tags[:2]) is order
    longer, other = extend_chain(order, tags[2]), extend_chain(order, tags[3])
    assert order is not None
    assert longer is not None
    assert other is not None
    assert [tags[2] in one for one in (order, longer, other)] == [False, True, False]
    assert order.is_prefix_of(longer)
    assert not longer.is_prefix_of(other)
    assert [order.matches_any({"TAGS": f"t{n}"}) for n in range(4)] == [True, True, False, False]
    assert longer.matches_any({"TAGS": "t2"})
    assert not other.matches_any({"TAGS": "t2"})


def test_rules_of_disjoint_tags_need_no_chains() -> None:
    made = compute_rules("T", [key("a"), key("b", "c"), key("c", "d"), key("*"), key("a")], [])
    assert made[key("b", "c")] == create_rule([Atom(TAG, "b||c")])
    assert len(next(iter(made[key("c", "d")])).excluded) == 1
    rule = RuleFilter(made[key("*")])
    assert rule.by_commit_log({"TAGS": "e"})
    assert not rule.by_commit_log({"TAGS": "d"})
    assert not intersect_rules(made[key("b", "c")], create_rule([Atom(TAG, "x")]))


def test_a_key_that_several_share_cannot_be_a_clients() -> None:
    made = merge_keys([key("a"), key("b")])
    assert split_key(made) == (key("a"), key("b"))
    assert not made.startswith("[")
