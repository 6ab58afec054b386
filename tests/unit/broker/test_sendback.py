"""36, deliver it again later; the retry topic, the dead letters, and consumers that send by
themselves."""

import dataclasses

import pytest

from simulation.stepped import SMALL, SteppedBroker, pull_fields, send_fields
from sluicemq.broker.metrics import BrokerCollector
from sluicemq.errors import StoreFullError
from sluicemq.model.ids import offset_message_id
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import GroupConfig, MessageQueue, TopicConfig
from sluicemq.record.codec import decode_records, format_property_text
from sluicemq.wire.frames import Command

LADDER_S = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
RETRY, DEAD = "%RETRY%G", "%DLQ%G"


@pytest.fixture(autouse=True)
def group(broker):
    broker.core.groups.put(GroupConfig("G"))


def read(client, topic: str, offset: int = 0, queue_id: int = 0) -> list[StoredMessage]:
    """What a topic's queue shows now from `offset` on."""
    answer = client.call(11, pull_fields(topic, offset, queueId=queue_id))
    return list(decode_records(answer.body, broker="broker-a")) if answer.code == 0 else []


def send(client, properties: str = "UNIQ_KEY\x01AB12\x02", body: bytes = b"x", **letters) -> None:
    assert client.call(310, send_fields("T", properties, **letters), body).code == 0


def give_back(client, message: StoredMessage, level: int = 0, **fields: object) -> Command:
    own = {
        "offset": message.physical_offset, "group": "G", "delayLevel": level,
        "originMsgId": message.message_id, "originTopic": message.topic, "unitMode": "false",
    }  # fmt: skip
    return client.call(36, own | fields)


def pass_time(broker, seconds: float) -> None:
    broker.advance(seconds)
    for _ in range(3):
        broker.step()


def sent(broker, client, **properties: str) -> StoredMessage:
    """One message of T, as a consumer gets it."""
    send(client, format_property_text({"UNIQ_KEY": "AB12", **properties}))
    return read(client, "T")[-1]


def test_a_message_that_always_fails_climbs_the_sixteen_steps_and_becomes_a_dead_letter(
    broker, client
):
    send(client, "UNIQ_KEY\x01AB12\x02TAGS\x01a\x02KEYS\x01k\x02", b"body", h=7)
    (first,) = read(client, "T")
    message = first
    for times, wait_s in enumerate(LADDER_S):
        assert give_back(client, message).code == 0
        pass_time(broker, wait_s - 0.1)
        assert read(client, RETRY, times) == [], f"retry {times + 1} comes too early"
        pass_time(broker, 0.2)
        (message,) = read(client, RETRY, times)
        assert message.reconsume_times == times + 1
        assert message.properties["RETRY_TOPIC"] == "T"
    assert give_back(client, message).code == 0
    (dead,) = read(client, DEAD)
    assert read(client, RETRY, len(LADDER_S)) == []
    assert dead.reconsume_times == 17
    assert (dead.body, dead.flag, dead.tag, dead.keys) == (b"body", 7, "a", ("k",))
    assert (dead.born_time_ms, dead.born_host) == (first.born_time_ms, first.born_host)
    assert dead.message_id == "AB12"
    assert dead.properties["ORIGIN_MESSAGE_ID"] == first.offset_message_id
    assert "DELAY" not in dead.properties
    assert broker.core.retries.dead_letter_counts == {"G": 1}
    assert broker.core.retries.retry_counts == {"G": 16}


def test_the_record_of_a_retry_is_the_one_that_the_real_broker_writes(broker, client):
    """Properties as recorded of broker 5.3.3 (tests/golden/traffic/java53-dlq)."""
    message = sent(broker, client, TAGS="A", WAIT="true")
    give_back(client, message, level=1)
    pass_time(broker, 1.1)
    (retry,) = read(client, RETRY)
    origin = offset_message_id(broker.core.send.store_host, message.physical_offset)
    assert dict(retry.properties) == {
        "ORIGIN_MESSAGE_ID": origin, "RETRY_TOPIC": "T", "MSG_REGION": "DefaultRegion",
        "UNIQ_KEY": "AB12", "CLUSTER": "DefaultCluster", "DELAY": "1", "TAGS": "A",
        "WAIT": "false", "TRACE_ON": "true", "REAL_TOPIC": RETRY, "REAL_QID": "0",
    }  # fmt: skip
    assert retry.sys_flag == message.sys_flag


def test_the_answer_has_no_fields(broker, client):
    answer = give_back(client, sent(broker, client))
    assert (answer.code, answer.fields) == (0, None)


@pytest.mark.parametrize(("level", "wait_s"), [(1, 1), (5, 60), (18, 7200), (40, 7200)])
def test_a_consumer_may_ask_for_a_level(broker, client, level, wait_s):
    give_back(client, sent(broker, client), level=level)
    pass_time(broker, wait_s - 0.1)
    assert read(client, RETRY) == []
    pass_time(broker, 0.2)
    assert len(read(client, RETRY)) == 1


def test_a_level_below_zero_gives_up_at_once(broker, client):
    give_back(client, sent(broker, client), level=-1)
    (dead,) = read(client, DEAD)
    assert dead.reconsume_times == 1


@pytest.mark.parametrize(
    ("said", "version", "group_max", "is_dead"),
    [
        (1, 479, 16, True),
        (2, 479, 16, False),
        (0, 479, 16, True),
        (1, 120, 16, False),
        (None, 479, 1, True),
        (None, 479, 16, False),
    ],
)  # fmt: skip
def test_who_says_how_often(broker, client, said, version, group_max, is_dead):
    broker.core.groups.put(GroupConfig("G", retry_times_max=group_max))
    message = sent(broker, client)
    if said != 0:
        give_back(client, message, level=1)
        pass_time(broker, 1.1)
        (message,) = read(client, RETRY)
    fields = {} if said is None else {"maxReconsumeTimes": said}
    own = {"offset": message.physical_offset, "group": "G", "delayLevel": 1, **fields}
    assert client.call(36, own, version=version).code == 0
    pass_time(broker, 1.1)
    assert bool(read(client, DEAD)) is is_dead


def test_the_dead_letter_topic_has_one_queue_and_a_group_may_read_and_write_it(broker, client):
    give_back(client, sent(broker, client), level=-1)
    config = broker.core.topics.table[DEAD].config
    assert (config.read_queues, config.write_queues, config.perm) == (1, 1, 6)


def test_the_retry_topic_has_as_many_queues_as_the_group_says_and_all_are_used(broker, client):
    broker.core.groups.put(GroupConfig("G", retry_queues=3))
    message = sent(broker, client)
    for _ in range(6):
        give_back(client, message, level=1)
    pass_time(broker, 1.1)
    assert broker.core.topics.table[RETRY].queues == 3
    assert [len(read(client, RETRY, queue_id=queue)) for queue in range(3)] == [2, 2, 2]


def test_a_group_without_retry_queues_wants_no_retries(broker, client):
    broker.core.groups.put(GroupConfig("G", retry_queues=0))
    message = sent(broker, client)
    before = broker.store.written_offset
    assert give_back(client, message).code == 0
    assert broker.store.written_offset == before
    assert RETRY not in broker.core.topics


def test_what_is_not_stored_is_refused_and_nothing_is_written(broker, client):
    message = sent(broker, client)
    before = broker.store.written_offset
    missing = give_back(client, message, offset=before + 999)
    assert (missing.code, missing.remark) == (1, f"look message by offset failed, {before + 999}")
    broker.change(auto_create_group=False)
    assert give_back(client, message, group="nobody").code == 26
    broker.core.topics.put(TopicConfig(RETRY, 1, 1, 4))
    assert give_back(client, message).code == 16
    broker.change(broker_permission=4)
    assert give_back(client, message).code == 16
    assert broker.store.written_offset == before


def test_under_sync_flush_the_answer_waits_for_the_fsync():
    broker = SteppedBroker(store_config=dataclasses.replace(SMALL, flush_sync=True))
    broker.core.topics.put(TopicConfig("T", 4, 4))
    broker.core.groups.put(GroupConfig("G"))
    client = broker.connect()
    client.feed(client.request(310, send_fields("T"), b"x"))
    broker.step()
    broker.finish_sync()
    (message,) = read(client, "T")
    request = client.request(36, {"offset": message.physical_offset, "group": "G", "delayLevel": 0})
    client.feed(request)
    broker.step()
    assert request.opaque not in client.answers
    broker.finish_sync()
    assert client.answers[request.opaque].code == 0


def test_a_new_dead_letter_topic_is_announced_before_the_consumer_hears_of_it():
    broker = SteppedBroker(holds_announcements=True)
    broker.core.topics.put(TopicConfig("T", 4, 4))
    broker.core.groups.put(GroupConfig("G"))
    client = broker.connect()
    send(client)
    (message,) = read(client, "T")
    request = client.request(
        36, {"offset": message.physical_offset, "group": "G", "delayLevel": -1}
    )
    client.feed(request)
    broker.step()
    assert request.opaque not in client.answers
    broker.finish_announcements()
    assert client.answers[request.opaque].code == 0
    assert DEAD in broker.core.topics


def test_a_full_store_refuses_and_the_consumer_keeps_the_message(broker, client, monkeypatch):
    message = sent(broker, client)
    before = broker.store.written_offset

    def full(draft):
        raise StoreFullError("the disk is full.")

    monkeypatch.setattr(broker.core.intake, "rewrite_and_append", full)
    answer = give_back(client, message)
    assert answer.code == 14
    assert "disk is full" in answer.remark
    assert broker.store.written_offset == before


# --- a group that reads dead letters


def test_failures_of_a_group_that_reads_dead_letters_climb_its_own_ladder_to_its_own_dead_letters(
    broker, client
):
    give_back(client, sent(broker, client), level=-1)
    (message,) = read(client, DEAD)
    for times, wait_s in enumerate(LADDER_S):
        assert give_back(client, message, group="undertaker").code == 0
        pass_time(broker, wait_s + 0.1)
        (message,) = read(client, "%RETRY%undertaker", times)
        assert message.reconsume_times == times + 1
        assert message.properties["RETRY_TOPIC"] == DEAD
    give_back(client, message, group="undertaker")
    (dead,) = read(client, "%DLQ%undertaker")
    assert dead.body == b"x"
    assert len(read(client, DEAD)) == 1, "the first dead letter stays where it is"


def test_a_group_may_retry_its_own_dead_letters(broker, client):
    give_back(client, sent(broker, client), level=-1)
    (dead,) = read(client, DEAD)
    give_back(client, dead)
    pass_time(broker, 10.1)
    (again,) = read(client, RETRY)
    assert (again.reconsume_times, again.properties["RETRY_TOPIC"]) == (1, DEAD)


# --- the way of consumers that send by themselves


def plain(client, times: int, times_max: int | None = None, **properties: str) -> Command:
    """What a 5.x consumer sends when 36 fails, and an orderly one when it gives up."""
    own = format_property_text({
        "UNIQ_KEY": "AB12", "RETRY_TOPIC": "T", "ORIGIN_MESSAGE_ID": "0" * 32,
        "DELAY": str(3 + times), **properties,
    })  # fmt: skip
    fields = send_fields(RETRY, own, j=times, a="CLIENT_INNER_PRODUCER")
    if times_max is not None:
        fields["l"] = times_max
    return client.call(310, fields, b"x")


def test_a_consumer_that_sends_by_itself_gets_the_same_delays(broker, client):
    assert plain(client, 1, 16).code == 0
    pass_time(broker, 29.9)
    assert read(client, RETRY) == []
    pass_time(broker, 0.2)
    (retry,) = read(client, RETRY)
    assert (retry.reconsume_times, retry.properties["RETRY_TOPIC"]) == (1, "T")


def test_one_more_than_allowed_is_a_dead_letter_without_delay(broker, client):
    plain(client, 2, 2)
    assert read(client, DEAD) == []
    plain(client, 3, 2)
    (dead,) = read(client, DEAD)
    assert (dead.reconsume_times, dead.queue_id) == (3, 0)
    assert "DELAY" not in dead.properties
    pass_time(broker, 3600)
    assert len(read(client, DEAD)) == 1


def test_what_a_group_with_queue_locks_gives_up_is_a_dead_letter(broker, client):
    broker.core.locks.lock("G", "c1", [MessageQueue("T", "broker-a", 0)])
    plain(client, 0, 2**31 - 1)
    assert len(read(client, DEAD)) == 1
    broker.advance(61)
    plain(client, 0, 2**31 - 1)
    assert len(read(client, DEAD)) == 1, "the leases have expired: a retry"


def test_without_autocreation_an_unknown_group_gets_26(broker, client):
    broker.change(auto_create_group=False)
    fields = send_fields("%RETRY%nobody", "UNIQ_KEY\x01AB12\x02", j=1)
    assert client.call(310, fields, b"x").code == 26


def test_beyond_the_last_step_of_a_short_ladder_every_retry_waits_as_long_as_the_last():
    short = dataclasses.replace(SMALL, delay_levels="1s 2s 5s 7s")
    broker = SteppedBroker(store_config=short)
    broker.core.groups.put(GroupConfig("G"))
    client = broker.connect()
    message = sent(broker, client)
    for times, wait_s in enumerate((5, 7, 7, 7)):
        assert give_back(client, message).code == 0
        pass_time(broker, wait_s - 0.1)
        assert read(client, RETRY, times) == []
        pass_time(broker, 0.2)
        (message,) = read(client, RETRY, times)


def test_retries_survive_a_restart(broker, client):
    give_back(client, sent(broker, client))
    broker.close()
    again = SteppedBroker(files=broker.files, clock=broker.clock)
    pass_time(again, 10.1)
    (retry,) = read(again.connect(), RETRY)
    assert retry.reconsume_times == 1


def test_retries_and_dead_letters_are_counted_by_group(broker, client):
    message = sent(broker, client)
    give_back(client, message)
    give_back(client, message, level=-1)
    plain(client, 17)
    counted = {
        (sample.name, sample.labels.get("consumer_group")): sample.value
        for metric in BrokerCollector(lambda: broker.core).collect()
        for sample in metric.samples
    }
    assert counted["sluicemq_messages_retried_total", "G"] == 1
    assert counted["rocketmq_send_to_dlq_messages_total", "G"] == 2
