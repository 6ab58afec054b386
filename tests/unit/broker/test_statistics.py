"""Lists and counts over the whole broker, and what is refused with a sentence."""

import pytest

from simulation.stepped import SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.broker.admin.refused import ALTERNATIVES
from sluicemq.broker.admin.statistics import UNMEASURED_REASONS
from sluicemq.broker.admin.status import PeriodCounters
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.wire import bodies, fastjson
from sluicemq.wire.popping import ReceiptHandle

STATISTICS, OF_BROKER, PRODUCERS, TOPICS, SUBSCRIPTION, FORBIDDEN = 315, 317, 328, 343, 345, 353
PULL, COMMIT, DELETE_TOPIC, UNITS = 11, 15, 215, 321


def join(client: SteppedClient) -> None:
    subscription = Subscription("T", "*", version=3)
    data = bodies.ConsumerData("G", subscriptions=(subscription,))
    beat = bodies.Heartbeat("the client", ("P",), (data,))
    client.call(34, {}, bodies.encode_heartbeat(beat))


def commit(client: SteppedClient, offset: int) -> None:
    fields = {"consumerGroup": "G", "topic": "T", "queueId": "0", "commitOffset": str(offset)}
    assert client.call(COMMIT, fields).code == 0


def pass_s(broker: SteppedBroker, seconds: int) -> None:
    for _ in range(seconds):
        broker.clock.advance(1)
        broker.core.run_every_second()


def counted(client: SteppedClient, name: str, key: str) -> dict[str, dict[str, float]]:
    answer = client.call(STATISTICS, {"statsName": name, "statsKey": key})
    assert answer.code == 0, answer.remark
    found: dict[str, dict[str, float]] = fastjson.loads(answer.body)
    return found


def test_spans_forget_what_is_past_and_ask_for_counters_when_a_sample_is_due() -> None:
    spans, asked, value = PeriodCounters(), [0], 0

    def counters() -> dict[str, int]:
        asked[0] += 1
        return {"n": value}

    for second in range(2 * 86_400):
        value = second
        spans.sample(float(second), counters)
    found = spans.count_by_period("n")
    assert found is not None
    assert asked[0] == 2 * 8640
    assert [found[span][0] for span in ("statsMinute", "statsHour", "statsDay")] == [
        60, 4190, 89990,
    ]  # fmt: skip
    assert found["statsMinute"][1] == pytest.approx(1)
    assert spans.count_by_period("other") is None


def test_messages_are_counted_by_minute_hour_and_day(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    pass_s(broker, 1)
    for _ in range(5):
        client.call(310, send_fields(), b"x" * 10)
    pass_s(broker, 10)
    found = counted(client, "TOPIC_PUT_NUMS", "T")
    assert [found[span]["sum"] for span in ("statsMinute", "statsHour", "statsDay")] == [5, 5, 5]
    assert found["statsMinute"]["tps"] == pytest.approx(0.5)
    assert found["statsMinute"]["avgpt"] == 1
    size = counted(client, "TOPIC_PUT_SIZE", "T")["statsDay"]
    assert size["sum"] == size["avgpt"] * 5
    pass_s(broker, 120)
    found = counted(client, "TOPIC_PUT_NUMS", "T")
    assert (found["statsMinute"]["sum"], found["statsHour"]["sum"]) == (0, 5)
    assert counted(client, "BROKER_PUT_NUMS", broker.settings.broker.cluster_name)


def test_messages_of_a_queue_are_counted_by_their_times(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for _ in range(3):
        client.call(310, send_fields(), b"x")
    pass_s(broker, 120)
    client.call(310, send_fields(), b"x")
    found = counted(client, "QUEUE_PUT_NUMS", "T@0")
    assert [found[span]["sum"] for span in ("statsMinute", "statsHour", "statsDay")] == [1, 4, 4]
    assert found["statsMinute"]["avgpt"] == 1
    for key in ("T@99", "T", "U@0", "@"):
        fields = {"statsName": "QUEUE_PUT_NUMS", "statsKey": key}
        assert client.call(STATISTICS, fields).code == 1


def test_what_is_sent_back_and_acknowledged_is_counted(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    pass_s(broker, 1)
    sent = client.call(310, send_fields(), b"x")
    join(client)
    place = int((sent.fields or {})["msgId"][16:], 16)
    back = {"offset": str(place), "group": "G", "delayLevel": "1", "originTopic": "T"}
    assert client.call(36, back).code == 0
    pop = {
        "consumerGroup": "G", "topic": "T", "queueId": "0", "maxMsgNums": "8",
        "invisibleTime": "60000", "pollTime": "0", "initMode": "0", "order": "false",
    }  # fmt: skip
    answer = client.call(200050, pop)
    fields = answer.fields or {}
    handle = ReceiptHandle(
        0, int(fields["popTime"]), int(fields["invisibleTime"]), int(fields["reviveQid"]), 0,
        "broker-a", 0, 0,
    )  # fmt: skip
    done = {
        "consumerGroup": "G", "topic": "T", "queueId": "0", "offset": "0",
        "extraInfo": handle.encode(),
    }  # fmt: skip
    assert client.call(200051, done).code == 0
    pass_s(broker, 11)
    for name in ("SNDBCK_PUT_NUMS", "GROUP_ACK_NUMS"):
        assert counted(client, name, "T@G")["statsDay"]["sum"] == 1
    cluster = broker.settings.broker.cluster_name
    assert counted(client, "BROKER_ACK_NUMS", cluster)["statsDay"]["sum"] == 1


@pytest.mark.parametrize("name", UNMEASURED_REASONS)
def test_what_nobody_counts_is_told_with_what_tells_it(client: SteppedClient, name: str) -> None:
    answer = client.call(STATISTICS, {"statsName": name, "statsKey": "T@G"})
    assert (answer.code, answer.remark) == (
        1, f"The stats <{name}> <T@G> not exist: {UNMEASURED_REASONS[name]}",
    )  # fmt: skip


def test_what_came_into_a_deleted_topic_still_counts_for_the_broker(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    pass_s(broker, 1)
    for _ in range(5):
        client.call(310, send_fields(), b"x")
    pass_s(broker, 120)
    put = broker.core.runtime.collect_counters()["put"]
    assert client.call(DELETE_TOPIC, {"topic": "T"}).code == 0
    broker.core.topics.put(TopicConfig("T", 4, 4))
    client.call(310, send_fields(), b"x")
    pass_s(broker, 10)
    found = counted(client, "BROKER_PUT_NUMS", broker.settings.broker.cluster_name)
    assert (found["statsMinute"]["sum"], found["statsDay"]["sum"]) == (1, 6)
    assert broker.core.runtime.collect_counters()["put"] == put + 1
    assert counted(client, "TOPIC_PUT_NUMS", "T")["statsMinute"]["sum"] == 0


def test_what_a_group_gets_is_counted(broker: SteppedBroker, client: SteppedClient) -> None:
    join(client)
    pass_s(broker, 1)
    client.call(310, send_fields(), b"x")
    client.call(PULL, pull_fields())
    pass_s(broker, 11)
    assert counted(client, "GROUP_GET_NUMS", "T@G")["statsMinute"]["sum"] == 1


def test_a_count_that_nobody_knows_is_refused_as_by_rocketmq(client: SteppedClient) -> None:
    answer = client.call(STATISTICS, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "nowhere"})
    assert (answer.code, answer.remark) == (1, "The stats <TOPIC_PUT_NUMS> <nowhere> not exist")


def test_how_far_all_groups_are(client: SteppedClient) -> None:
    join(client)
    for _ in range(3):
        client.call(310, send_fields(), b"x")
    commit(client, 1)
    answer = client.call(OF_BROKER, {"isOrder": "false"})
    (groups,) = bodies.decode_consume_stats_list(answer.body)
    (stats,) = groups["G"]
    assert {queue.topic for queue in stats.queues} == {"T"}
    assert b'"totalDiff":2' in answer.body
    answer = client.call(OF_BROKER, {"isOrder": "true"})
    assert bodies.decode_consume_stats_list(answer.body) == []


def test_producers_of_all_groups(client: SteppedClient) -> None:
    join(client)
    (member,) = fastjson.loads(client.call(PRODUCERS).body)["data"]["P"]
    assert member["clientId"] == "the client"
    assert member["remoteIP"].startswith("/")


def test_topics_and_subscription_of_a_group(client: SteppedClient) -> None:
    join(client)
    commit(client, 0)
    assert fastjson.loads(client.call(TOPICS, {"group": "G"}).body)["topicList"] == ["T"]
    fields = {"group": "G", "topic": "T"}
    found = fastjson.loads(client.call(SUBSCRIPTION, fields).body)
    assert found["subscriptionData"]["subString"] == "*"
    nothing = fastjson.loads(client.call(SUBSCRIPTION, {**fields, "group": "other"}).body)
    assert nothing == {"group": "other", "topic": "T"}


def test_a_group_is_kept_from_a_topic_and_let_again(client: SteppedClient) -> None:
    join(client)
    client.call(310, send_fields(), b"x")
    fields = {"group": "G", "topic": "T"}

    def ask(**more: str) -> bool:
        return bool(fastjson.loads(client.call(FORBIDDEN, {**fields, **more}).body)["readable"])

    assert ask()
    assert not ask(readable="false")
    assert not ask(), "asking changes nothing"
    assert client.call(PULL, pull_fields()).code == 16
    assert b'"forbiddenTable":{"G":{"T":4}}' in client.call(201).body
    assert ask(readable="true")
    assert client.call(PULL, pull_fields()).code == 0


def test_what_keeps_a_group_from_a_topic_is_on_disk_when_it_is_answered(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.groups.put(GroupConfig("G"))
    fields = {"group": "G", "topic": "T", "readable": "false"}
    assert client.call(FORBIDDEN, fields).code == 0
    after = SteppedBroker(files=broker.files.kill())
    assert after.core.groups.forbidden == {"G": {"T": 4}}


def test_only_a_group_and_a_topic_that_exist_are_kept_apart(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(auto_create_group=False)
    fields = {"group": "G", "topic": "T", "readable": "false"}
    assert client.call(FORBIDDEN, fields).code == 26
    broker.core.groups.put(GroupConfig("G"))
    assert client.call(FORBIDDEN, {**fields, "topic": "nowhere"}).code == 17
    assert broker.core.groups.forbidden == {}
    assert client.call(FORBIDDEN, fields).code == 0
    broker.core.groups.remove("G")
    assert client.call(FORBIDDEN, {**fields, "readable": "true"}).code == 0
    assert broker.core.groups.forbidden == {}


def test_units_say_what_became_of_the_filter(client: SteppedClient) -> None:
    client.call(310, send_fields(), b"x")
    fields = {"topic": "T", "queueId": "0", "index": "0", "count": "1", "consumerGroup": "G"}
    found = bodies.decode_queue_units(client.call(UNITS, fields).body)
    assert (found.filter_text, found.units[0].is_wanted) == ("G@T is not online!", True)
    join(client)
    assert bodies.decode_queue_units(client.call(UNITS, fields).body).filter_text == "null"


@pytest.mark.parametrize("code", sorted(ALTERNATIVES))
def test_what_only_other_brokers_have_is_refused_with_a_sentence(
    client: SteppedClient, code: int
) -> None:
    answer = client.call(code)
    assert (answer.code, answer.remark) == (3, ALTERNATIVES[code])


def test_there_is_nothing_to_move_out_of_rocksdb(client: SteppedClient) -> None:
    assert client.call(200056).code == 0


def test_no_configuration_answer_shows_the_environment(
    client: SteppedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """26 shows settings; a value that a request brings is taken as it is written."""
    monkeypatch.setenv("SLUICE_TEST_SECRET", "hunter2")
    assert b"hunter2" not in client.call(26).body
    for value in ("$SLUICE_TEST_SECRET", "${SLUICE_TEST_SECRET}", "~/x"):
        assert client.call(25, None, f"brokerName={value}\n".encode()).code == 1
        assert b"hunter2" not in client.call(26).body
