"""Heartbeats: who is a member, whose subscription wins, who hears of it."""

import logging

import pytest

from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.broker.consume.filters import CompiledSubscription
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import GroupConfig
from sluicemq.wire import bodies
from sluicemq.wire.frames import Command

NOTICE, HEARTBEAT, UNREGISTER, MEMBERS, CHECK = 40, 34, 35, 38, 46


def beat(
    client: SteppedClient,
    *subscriptions: tuple[str, str, int],
    name: str = "c",
    group: str = "G",
    fingerprint: int = 0,
    short: bool = False,
    producers: tuple[str, ...] = (),
    **rest: object,
) -> Command:
    """A heartbeat; subscriptions are (topic, tag expression, version)."""
    data = bodies.ConsumerData(
        group,
        subscriptions=tuple(
            Subscription(topic, text, codes=frozenset(map(ord, text)), version=version)
            for topic, text, version in subscriptions
        ),
        **rest,  # type: ignore[arg-type]
    )
    heartbeat = bodies.Heartbeat(name, producers, (data,) if group else (), fingerprint, short)
    return client.call(HEARTBEAT, {}, bodies.encode_heartbeat(heartbeat))


def notices(client: SteppedClient) -> int:
    found = [command for command in client.requests if command.code == NOTICE]
    assert all(command.is_oneway for command in found)
    client.requests.clear()
    return len(found)


def members(client: SteppedClient, group: str = "G") -> set[str] | int:
    answer = client.call(MEMBERS, {"consumerGroup": group})
    if answer.code:
        return answer.code
    return set(bodies.decode_consumer_list(answer.body))


def test_a_heartbeat_makes_members_groups_and_retry_topics(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert members(client) == 1
    answer = beat(client, ("T", "A", 1))
    assert answer.fields == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}
    asked = broker.connect().call(34, {"sluiceLanes": "true"}, b"{}")
    assert asked.fields == answer.fields | {"sluiceLanes": "true"}
    assert answer.version >= 232
    assert members(client) == {"c"}
    assert broker.core.groups.table["G"] == GroupConfig("G")
    retry = broker.core.topics.table["%RETRY%G"].config
    assert (retry.read_queues, retry.write_queues, retry.perm) == (1, 1, 6)


def test_without_auto_creation_an_unknown_group_stays_unknown(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(auto_create_group=False)
    assert beat(client, ("T", "A", 1)).code == 0
    assert members(client) == 1
    assert "%RETRY%G" not in broker.core.topics


def test_members_hear_of_joins_leaves_and_topic_changes_and_of_nothing_else(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    beat(client, ("T", "A", 1))
    assert notices(client) == 1
    beat(client, ("T", "A", 1))
    assert notices(client) == 0
    other = broker.connect()
    beat(other, ("T", "A", 1), name="d")
    assert (notices(client), notices(other)) == (1, 1)
    beat(client, ("T", "A", 1), ("U", "*", 1))
    assert (notices(client), notices(other)) == (1, 1)
    beat(other, ("T", "A", 1), ("U", "*", 1), name="d")
    assert (notices(client), notices(other)) == (1, 1)
    other.call(UNREGISTER, {"clientID": "d", "consumerGroup": "G"})
    assert (notices(client), notices(other)) == (1, 0)
    beat(other, ("T", "A", 1), ("U", "*", 1), name="d")
    notices(client)
    other.disconnect()
    assert notices(client) == 1
    assert members(client) == {"c"}


def test_the_notice_comes_before_the_answer_that_caused_it(client: SteppedClient) -> None:
    beat(client, ("T", "A", 1))
    assert [command.code for command in client.log] == [NOTICE, 0]


def test_a_client_without_queues_is_not_notified(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    client.peer.can_rebalance = False
    beat(client, ("T", "A", 1))
    beat(broker.connect(), ("T", "A", 1), name="d")
    assert notices(client) == 0


def test_broadcasting_groups_are_not_notified(client: SteppedClient) -> None:
    beat(client, ("T", "A", 1), message_model="BROADCASTING")
    assert notices(client) == 0


@pytest.mark.parametrize("where", ["broker", "group"])
def test_notices_can_be_switched_off(
    broker: SteppedBroker, client: SteppedClient, where: str
) -> None:
    if where == "broker":
        broker.change(notify_consumer_changes=False)
    else:
        broker.core.groups.put(GroupConfig("G", notify_changes_enable=False))
    beat(client, ("T", "A", 1))
    assert notices(client) == 0


def expression(broker: SteppedBroker, topic: str = "T") -> str | None:
    watch = broker.core.consumers.groups["G"].subscriptions.get(topic)
    return watch.subscription.expression if watch else None


def test_what_the_only_member_says_last_holds_whatever_its_clock_says(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    beat(client, ("T", "A", 5))
    assert expression(broker) == "A"
    beat(client, ("T", "B", 4))
    assert expression(broker) == "B"


def test_a_topic_missing_in_a_heartbeat_of_the_only_member_is_dropped(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    beat(client, ("T", "A", 1), ("U", "*", 1))
    beat(client, ("T", "A", 1))
    assert expression(broker, "U") is None
    assert notices(client) == 2


def test_members_with_different_subscriptions_are_named_in_the_log_once(
    broker: SteppedBroker, client: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    other = broker.connect()
    for version in range(3):
        beat(client, ("T", "A", version), name="first")
        beat(other, ("T", "B", version), name="second")
    (record,) = [r for r in caplog.records if "the subscription of" in r.message]
    for part in ("group G", "first", "second", "T: TAG 'A' -> TAG 'B'"):
        assert part in record.message


def test_text_that_a_filter_ignores_is_served_as_in_rocketmq_and_named_in_the_log(
    client: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert check(client, "n > 5 ) garbage", SQL92).code == 0
    CompiledSubscription(Subscription("T", "n > 5 ) garbage", SQL92))
    assert "') garbage' is ignored at the end of 'n > 5 ) garbage'" in caplog.text


def test_clients_that_agree_are_not_in_the_log(
    broker: SteppedBroker, client: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    beat(client, ("T", "A", 1))
    beat(broker.connect(), ("T", "A", 2), name="d")
    assert "the subscription of" not in caplog.text


# -------------------------------------------------------------------------- heartbeat version 2


def sub_change(answer: Command) -> bool:
    assert answer.fields is not None
    return answer.fields["IS_SUB_CHANGE"] == "true"


def test_short_heartbeats_keep_the_subscriptions(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert not sub_change(beat(client, ("T", "A", 1), fingerprint=7))
    assert not sub_change(beat(client, fingerprint=7, short=True))
    assert expression(broker) == "A"
    assert sub_change(beat(client, ("T", "A", 2), fingerprint=8))
    assert not sub_change(beat(client, fingerprint=8, short=True))


def test_a_short_heartbeat_to_a_broker_that_knows_nothing_asks_for_all(
    client: SteppedClient,
) -> None:
    assert sub_change(beat(client, fingerprint=7, short=True))
    assert members(client) == 1


def test_a_short_heartbeat_of_another_connection_joins(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    beat(client, ("T", "A", 1), fingerprint=7)
    assert not sub_change(beat(broker.connect(), name="d", fingerprint=7, short=True))
    assert members(client) == {"c", "d"}


# ------------------------------------------------------------------------------------- expiry


def test_clients_without_heartbeats_are_dropped_after_two_minutes(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    other = broker.connect()
    beat(client, ("T", "A", 1), producers=("P",))
    beat(other, ("T", "A", 1), name="d")
    broker.advance(100)
    beat(client, ("T", "A", 1), producers=("P",))
    broker.advance(30)
    broker.core.expire_clients()
    assert members(client) == {"c"}
    assert (client.is_closed, other.is_closed) == (False, True)
    broker.advance(121)
    broker.core.expire_clients()
    assert broker.core.producers.groups == {}


def test_producers_come_and_go(broker: SteppedBroker, client: SteppedClient) -> None:
    beat(client, group="", producers=("P", "Q"))
    assert set(broker.core.producers.groups) == {"P", "Q"}
    client.call(UNREGISTER, {"clientID": "c", "producerGroup": "P"})
    assert set(broker.core.producers.groups) == {"Q"}
    client.disconnect()
    assert broker.core.producers.groups == {}


# -------------------------------------------------------------------------------------- checks


def check(client: SteppedClient, text: str, kind: str) -> Command:
    body = bodies.encode_check_client_config(
        bodies.CheckClientConfig("c", "G", Subscription("T", text, kind))
    )
    return client.call(CHECK, None, body)


def test_a_subscription_is_checked_before_a_consumer_starts(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert check(client, "A || B", "TAG").code == 0
    assert check(client, "a BETWEEN 1 AND 2", SQL92).code == 0
    wrong = check(client, "a >> 5 AND", SQL92)
    assert wrong.code == 23
    assert wrong.remark
    assert check(client, "x", "XPATH").code == 23
    broker.change(enable_property_filter=False)
    off = check(client, "a > 5", SQL92)
    assert off.code == 1
    assert (off.remark or "").startswith(
        "The broker does not support consumer to filter message by SQL92"
    )
    assert "enablePropertyFilter=true" in (off.remark or "")


def test_a_heartbeat_that_is_not_json_is_an_error_and_no_more(client: SteppedClient) -> None:
    assert client.call(HEARTBEAT, {}, b"{nonsense").code == 1
    assert beat(client, ("T", "A", 1)).code == 0
