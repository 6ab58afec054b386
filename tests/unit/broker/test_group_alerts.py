"""Each group that is behind or stuck has an alert: the rules of deploy/, on a broker's metrics."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from promql import Sample, evaluate
from simulation.lanes import ModelConsumer, Shared, balance
from simulation.pops import POP, fill, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient, pull_fields
from sluicemq.broker.metrics import BrokerCollector
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import GroupConfig
from sluicemq.wire import bodies

RULES = yaml.safe_load(
    (Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yml").read_text()
)["groups"][0]["rules"]
EXPRESSIONS = {
    rule["alert"]: rule["expr"]
    for rule in RULES
    if rule["alert"] in ("ConsumersBehind", "NobodyConsumes")
}
ETA = "sluicemq_consumer_lag_eta_seconds"


def scrape(broker: SteppedBroker) -> list[Sample]:
    registry = CollectorRegistry()
    registry.register(BrokerCollector(lambda: broker.core))
    return [
        Sample(sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    ]


def values(broker: SteppedBroker, name: str, topic: str = "T", group: str = "G") -> list[float]:
    return [
        sample.value
        for sample in scrape(broker)
        if sample.name == name
        and (sample.labels["topic"], sample.labels["consumer_group"]) == (topic, group)
    ]


def alerts(broker: SteppedBroker) -> set[str]:
    samples = scrape(broker)
    return {name for name, expression in EXPRESSIONS.items() if evaluate(expression, samples)}


def join(
    client: SteppedClient, topic: str = "T", expression: str = "*", kind: str = TAG,
    model: str = "CLUSTERING", version: int = 1,
) -> None:  # fmt: skip
    subscription = Subscription(topic, expression, kind, version=version)
    data = bodies.ConsumerData(
        "G", "CONSUME_PASSIVELY", model, "CONSUME_FROM_FIRST_OFFSET", (subscription,)
    )
    assert (
        client.call(34, {}, bodies.encode_heartbeat(bodies.Heartbeat("c", (), (data,)))).code == 0
    )


def pass_minutes(broker: SteppedBroker, client: SteppedClient, minutes: float, **beat: Any) -> None:
    """Time passes, and the client sends heartbeats."""
    for _ in range(round(minutes * 4)):
        broker.pass_seconds(15)
        join(client, **beat)


@pytest.fixture
def filled(broker: SteppedBroker, client: SteppedClient) -> SteppedClient:
    """A group that has an offset, and ten messages after it; their tags are A and B in turn."""
    broker.core.groups.put(GroupConfig("G"))
    broker.core.offsets.commit("G", "T", 0, 0)
    fill(client, 10, tags="AB")
    return client


def test_a_stuck_group_with_a_member_is_behind(
    broker: SteppedBroker, filled: SteppedClient
) -> None:
    pass_minutes(broker, filled, 14)
    assert not alerts(broker)
    pass_minutes(broker, filled, 2)
    assert alerts(broker) == {"ConsumersBehind"}
    assert not values(broker, ETA), "nothing was consumed"
    broker.core.offsets.commit("G", "T", 0, 10)
    assert not alerts(broker)


def test_a_slow_group_is_behind_and_its_time_to_catch_up_is_known(
    broker: SteppedBroker, filled: SteppedClient
) -> None:
    for minute in range(8):
        pass_minutes(broker, filled, 2.5)
        broker.core.offsets.commit("G", "T", 0, minute + 1)
        pass_minutes(broker, filled, 0.5)
    assert alerts(broker) == {"ConsumersBehind"}
    (eta_s,) = values(broker, ETA)
    assert 180 < eta_s < 480, "two messages are left, and each takes three minutes"


def test_a_group_without_a_member_is_stuck_and_its_last_message_counts(
    broker: SteppedBroker, filled: SteppedClient
) -> None:
    broker.core.offsets.commit("G", "T", 0, 9)
    broker.pass_seconds(901)
    assert alerts(broker) == {"NobodyConsumes"}


def test_a_group_that_has_nothing_to_consume_is_not_behind(
    broker: SteppedBroker, filled: SteppedClient
) -> None:
    broker.core.offsets.commit("G", "T", 0, 10)
    pass_minutes(broker, filled, 20)
    assert not alerts(broker)
    assert values(broker, "rocketmq_consumer_lag_latency") == [0]
    assert values(broker, "sluicemq_consumer_lag_matching_messages") == [0]
    assert values(broker, ETA) == [0]


def test_messages_that_the_filter_drops_do_not_make_a_group_late(
    broker: SteppedBroker, filled: SteppedClient
) -> None:
    pass_minutes(broker, filled, 20, expression="C")
    assert not alerts(broker)
    pass_minutes(broker, filled, 1, expression="n > 8", kind=SQL92, version=2)
    assert alerts(broker) == {"ConsumersBehind"}


def test_a_topic_that_the_group_has_left_does_not_make_it_late(
    broker: SteppedBroker, filled: SteppedClient
) -> None:
    pass_minutes(broker, filled, 20, topic="Other")
    assert not alerts(broker)
    assert not values(broker, "rocketmq_consumer_lag_latency")


def test_a_group_that_is_stuck_from_its_first_message_on_is_behind(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.groups.put(GroupConfig("G"))
    fill(client, 10)
    join(client)
    client.call(11, pull_fields(maxMsgNums=3))
    assert values(broker, "rocketmq_consumer_lag_messages") == [7]
    pass_minutes(broker, client, 16)
    assert alerts(broker) == {"ConsumersBehind"}


def test_members_of_a_broadcast_group_keep_their_offsets_themselves(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.groups.put(GroupConfig("G"))
    fill(client, 10)
    join(client, model="BROADCASTING")
    client.call(11, pull_fields(maxMsgNums=3))
    pass_minutes(broker, client, 20, model="BROADCASTING")
    assert not alerts(broker)
    assert not values(broker, "sluicemq_consumer_lag_matching_messages")


def test_a_popped_message_that_is_not_acknowledged_waits(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 3)
    client.call(POP, pop_fields(broker, invisibleTime=3_600_000))
    pass_minutes(broker, client, 16)
    assert alerts(broker) == {"ConsumersBehind"}


def test_a_group_with_lanes_is_behind_if_one_of_them_is(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    shared = Shared("G")
    consumers = [ModelConsumer(broker, shared, tag, {"T": (TAG, tag)}, 1) for tag in ("A", "B")]
    balance(consumers)
    fill(client, 4, tags="AB")
    for _ in range(16 * 4):
        broker.pass_seconds(15)
        for consumer in consumers:
            consumer.beat()
        for queue in list(consumers[0].readings):
            consumers[0].pull(queue)
            consumers[0].finish(queue, len(consumers[0].readings[queue].in_hand))
        consumers[0].commit()
    assert alerts(broker) == {"ConsumersBehind"}
    assert values(broker, "sluicemq_consumer_lag_matching_messages") == [2]
