"""A group with very many subscriptions: who is there is served, who left waits in a wider lane."""

import dataclasses
import logging
from collections.abc import Iterator

import orjson
import pytest

from sluicemq.broker import lane_departed
from sluicemq.broker.lane_rules import after, atoms_of, both, claims, clause, merged_key, parts_of
from sluicemq.broker.lane_rules import Atom, rule_matches
from sluicemq.broker.lanes import GroupLanes
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import CONTRACT, GroupConfig, MessageQueue, TopicConfig
from sluicemq.testing.broker import SteppedBroker, send_fields
from sluicemq.testing.lane_model import ModelConsumer, Shared, Wanted, balance, read_all

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


def produce(broker: SteppedBroker, *numbers: int) -> None:
    client = broker.connect()
    for number in numbers:
        properties = f"UNIQ_KEY\x01m{number}\x02TAGS\x01t{number}\x02"
        assert client.call(310, send_fields("T", properties), b"m%d" % number).code == 0


def lanes_of(broker: SteppedBroker) -> GroupLanes:
    return broker.core.lanes.table["G"]


def test_a_thousand_subscriptions_and_the_next_are_served_each_its_own_after_a_restart_too(
    broker: SteppedBroker,
) -> None:
    """They are in the file that a broker starts with; the next one joins them there."""
    keys = [orjson.dumps([["T", *wants(number)["T"]]]).decode() for number in range(1000)]
    shared = Shared("G")
    first = [ModelConsumer(broker, shared, f"c{n}", wants(n), 1) for n in range(2)]
    assert all(not one.refusal for one in first)
    made = lanes_of(broker)
    known = orjson.loads(broker.core.lanes.document.take() or b"{}")
    assert [lane["subscription"] for lane in known["groups"][0]["lanes"]] == keys[:2]
    monkey = made.rebase
    made.rebase = lambda: None  # type: ignore[method-assign] - once is enough here
    for number, key in enumerate(keys[2:], 2):
        made.enter(key, f"c{number}")
    made.rebase = monkey  # type: ignore[method-assign]
    made.rebase()
    assert not any(lane.is_idle for lane in made.lanes.values())
