"""Who loses what by the deletion of old files, and what the tools may ask for."""

import dataclasses
import logging
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from simulation.stepped import (
    SMALL,
    ManualClock,
    SteppedBroker,
    SteppedClient,
    pull_fields,
    send_fields,
)
from sluicemq.broker.metrics import BrokerCollector
from sluicemq.config import BrokerConfig
from sluicemq.model.topic import MessageQueue, TopicConfig
from sluicemq.store.retain import local_hour
from sluicemq.wire import bodies

NOON_MS = 1_700_049_600_000  # 2023-11-15T12:00:00Z
HOUR_S = 3600
CLEAN_QUEUES, CLEAN_TOPICS, CLEAN_LOG = 306, 316, 329
COMMIT, CONSUME_STATS, CHANGE_CONFIG = 15, 208, 25
SERVICE_NOT_AVAILABLE, OFFSET_MOVED = 14, 21
LOG = "/store/commitlog"
EVERY_HOUR = tuple(map(str, range(24)))


def make(**store: Any) -> SteppedBroker:
    """A broker whose log has five files of 4 KiB, two messages in each of the first four."""
    config = dataclasses.replace(
        SMALL, commit_log_file_bytes=4096, consume_queue_file_bytes=400, delete_hours=EVERY_HOUR,
        **store,
    )  # fmt: skip
    broker = SteppedBroker(
        config=BrokerConfig(broker_name="broker-a", metrics_enable=False),
        store_config=config,
        clock=ManualClock(NOON_MS),
    )
    broker.core.topics.put(TopicConfig("T", 4, 4))
    client = broker.connect()
    for _ in range(9):
        client.call(310, send_fields(), bytes(1500))
    broker.advance(600)
    broker.store.tick()
    broker.store.sync()
    assert len(broker.files.names(LOG)) == 5
    return broker


@pytest.fixture
def old() -> SteppedBroker:
    return make()


@pytest.fixture
def reader(old: SteppedBroker) -> SteppedClient:
    return old.connect()


def commit(client: SteppedClient, group: str, offset: int) -> None:
    client.call(352, {"group": group})  # makes it
    fields = {"consumerGroup": group, "topic": "T", "queueId": 0, "commitOffset": offset}
    assert client.call(COMMIT, fields).code == 0


def fill(broker: SteppedBroker, percent: float) -> None:
    broker.files.total_bytes = 1_000_000
    broker.files.free_bytes = round(1_000_000 - percent * 10_000)


def sample(broker: SteppedBroker, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(BrokerCollector(lambda: broker.core))
    node = {"cluster": "DefaultCluster", "node_type": "broker", "node_id": "broker-a"}
    return registry.get_sample_value(name, node | labels)


def test_groups_with_unread_messages_are_logged_and_counted_before_a_file_goes(
    old: SteppedBroker, reader: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    commit(reader, "slow", 1)
    commit(reader, "middle", 5)
    commit(reader, "done", 9)
    old.advance(73 * HOUR_S)
    old.clean()
    assert old.files.names(LOG) == [f"{4 * 4096:020d}"]
    assert old.core.unread_monitor.deleted_unread_counts == {("T", "slow"): 7, ("T", "middle"): 3}
    lines = [line for line in caplog.messages if "unread messages" in line]
    assert len(lines) == 4 + 2, "a line for each file and group"
    assert lines[0].startswith(
        "group slow loses 1 unread messages of topic T: log file"
        " 00000000000000000000 is being deleted (last written 20"
    )
    assert "deleteWhen = 0;1;2" in lines[0]
    pair = {"topic": "T", "consumer_group": "slow"}
    assert sample(old, "sluicemq_messages_lost_total", **pair) == 7
    assert sample(old, "sluicemq_log_files_deleted_total") == 4
    flags = {"is_retry": "false", "is_system": "false"}
    assert sample(old, "rocketmq_consumer_lag_messages", **pair, **flags) == 1, "what is left"


def test_a_group_that_has_committed_nothing_on_a_queue_loses_nothing_there(
    old: SteppedBroker, reader: SteppedClient
) -> None:
    fields = {"consumerGroup": "other", "topic": "T", "queueId": 1, "commitOffset": 0}
    reader.call(COMMIT, fields)
    old.advance(73 * HOUR_S)
    old.clean()
    assert old.core.unread_monitor.deleted_unread_counts == {}


def test_a_consumer_of_a_deleted_range_is_sent_to_the_new_minimum(
    old: SteppedBroker, reader: SteppedClient
) -> None:
    old.advance(73 * HOUR_S)
    old.clean()
    answer = reader.call(11, pull_fields(offset=3))
    assert answer.code == OFFSET_MOVED
    assert answer.fields is not None
    assert answer.fields["nextBeginOffset"] == answer.fields["minOffset"] == "8"
    assert reader.call(11, pull_fields(offset=8)).code == 0


def test_every_time_in_a_queue_without_messages_is_its_end(
    old: SteppedBroker, reader: SteppedClient
) -> None:
    """Requests 29 and 222, and the figures of request 315 that are found by time."""
    commit(reader, "G", 9)
    for _ in range(9):
        reader.call(310, send_fields(e=1), bytes(1500))
    old.advance(600)
    old.store.tick()
    old.store.sync()
    old.advance(73 * HOUR_S)
    old.clean()
    assert old.store.queue_offsets("T", 0) == (9, 9)
    now_ms = old.clock.now_ms()
    for time_ms in (0, NOON_MS, now_ms, now_ms + 86_400_000):
        place = {"topic": "T", "queueId": 0, "timestamp": time_ms}
        assert reader.call(29, place).fields == {"offset": "9"}, time_ms
        assert reader.call(29, place | {"boundaryType": "upper"}).fields == {"offset": "8"}
        moved = reader.call(
            222, {"topic": "T", "group": "G", "timestamp": time_ms, "isForce": "true"}
        )
        assert bodies.decode_queue_offsets(moved.body)[MessageQueue("T", "broker-a", 0)] == 9
    put = {"statsName": "QUEUE_PUT_NUMS", "statsKey": "T@0"}
    assert orjson.loads(reader.call(315, put).body)["statsDay"]["sum"] == 0


def test_from_80_percent_of_the_time_on_groups_are_warned_of_what_they_will_lose_and_when(
    old: SteppedBroker, reader: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    commit(reader, "slow", 1)
    commit(reader, "done", 9)
    old.advance(57 * HOUR_S)
    old.clean()
    assert old.core.unread_monitor.expiring_unread == {}
    old.advance(HOUR_S)
    old.clean()
    (risk,) = old.core.unread_monitor.expiring_unread.values()
    assert risk.message_count == 7
    assert risk.earliest_deletion_ms == NOON_MS + 72 * HOUR_S * 1000
    (line,) = [line for line in caplog.messages if "deleted from" in line]
    assert line.startswith(
        "group slow will lose 7 unread messages of topic T, which are deleted from 20"
    )
    pair = {"topic": "T", "consumer_group": "slow"}
    assert sample(old, "sluicemq_messages_at_risk", **pair) == 7
    assert sample(old, "sluicemq_loss_time_seconds", **pair) == risk.earliest_deletion_ms / 1000
    old.advance(61)
    old.clean()
    assert sum("deleted from" in line for line in caplog.messages) == 1, "once an hour"
    commit(reader, "slow", 8)
    old.advance(61)
    old.clean()
    assert old.core.unread_monitor.expiring_unread == {}
    assert sample(old, "sluicemq_messages_at_risk", **pair) is None


def test_the_progress_of_a_group_says_what_it_will_lose(
    old: SteppedBroker, reader: SteppedClient
) -> None:
    commit(reader, "slow", 3)

    def progress() -> bodies.QueueProgress:
        body = reader.call(CONSUME_STATS, {"consumerGroup": "slow", "topic": "T"}).body
        return bodies.decode_consume_stats(body).queues[MessageQueue("T", "broker-a", 0)]

    assert (progress().messages_at_risk, progress().loss_time_ms) == (0, 0)
    old.advance(60 * HOUR_S)
    assert progress().messages_at_risk == 5
    assert progress().loss_time_ms == NOON_MS + 72 * HOUR_S * 1000
    commit(reader, "slow", 9)
    assert progress().messages_at_risk == 0


def test_nothing_goes_in_the_first_minute() -> None:
    broker = make(file_reserved_hours=0, clean_interval_ms=1000)
    assert len(broker.files.names(LOG)) == 5
    fresh = SteppedBroker(
        store_config=broker.settings.store, files=broker.files.kill(), clock=broker.clock
    )
    fresh.clean()
    fresh.advance(59)
    fresh.clean()
    assert len(fresh.files.names(LOG)) == 5
    fresh.store.tick()
    fresh.store.sync()
    fresh.advance(1)
    fresh.clean()
    assert len(fresh.files.names(LOG)) == 1


def test_sends_are_refused_while_the_disk_is_too_full_and_taken_again_at_once(
    old: SteppedBroker, reader: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    old.change_store(clean_forcibly=False)
    old.clean()
    fill(old, 91)
    assert reader.call(310, send_fields(), b"before the next look").code == 0
    old.advance(10)
    old.clean()
    for code, fields in ((310, send_fields()), (310, send_fields(properties="DELAY_\x01x\x02"))):
        answer = reader.call(code, fields, b"x")
        assert answer.code == SERVICE_NOT_AVAILABLE
        assert "/store/commitlog is too full: 910000 of 1000000 bytes" in (answer.remark or "")
        assert "limit is 900000" in (answer.remark or "")
        assert "90000 are free" in (answer.remark or "")
    assert reader.call(11, pull_fields()).code == 0, "reading goes on"
    commit(reader, "slow", 1)
    assert sample(old, "sluicemq_sends_refused_disk_full") == 1
    assert sample(old, "sluicemq_disk_used_percent") == 91
    fill(old, 50)
    old.advance(1)
    old.clean()
    assert reader.call(310, send_fields(), b"x").code == 0
    assert sample(old, "sluicemq_sends_refused_disk_full") == 0
    assert sum("sends are now refused" in line for line in caplog.messages) == 1
    assert sum("sends are accepted again" in line for line in caplog.messages) == 1


def test_refused_batches_name_the_disk_too(old: SteppedBroker, reader: SteppedClient) -> None:
    from sluicemq.record.codec import encode_batch

    old.change_store(clean_forcibly=False)
    fill(old, 91)
    old.advance(10)
    old.clean()
    body = encode_batch([(0, b"a", b""), (0, b"b", b"")])
    answer = reader.call(320, send_fields(m="true"), body)
    assert answer.code == SERVICE_NOT_AVAILABLE
    assert "is too full" in (answer.remark or "")


def test_a_tool_deletes_expired_files_at_any_hour(
    old: SteppedBroker, reader: SteppedClient
) -> None:
    old.advance(73 * HOUR_S)
    other = (local_hour(old.clock.now_ms()) + 12) % 24
    old.change_store(delete_hours=(str(other),))
    old.clean()
    assert len(old.files.names(LOG)) == 5
    assert reader.call(CLEAN_LOG).code == 0
    old.advance(10)
    old.clean()
    assert len(old.files.names(LOG)) == 1


def test_a_tool_s_wish_lasts_for_twenty_runs(old: SteppedBroker, reader: SteppedClient) -> None:
    reader.call(CLEAN_LOG)
    for _ in range(20):
        assert old.store.retention.manual_runs > 0
        old.advance(61)
        old.clean()
    assert old.store.retention.manual_runs == 0


def test_a_tool_removes_queues_of_topics_that_do_not_exist(
    old: SteppedBroker, reader: SteppedClient
) -> None:
    for topic in ("gone", "%LMQ%light", "T"):
        old.store.writer.append(topic, 0, b"x", b"", 0, 0, 0, 1, bytes(8), bytes(8))
    old.store.commit()
    assert reader.call(CLEAN_TOPICS).code == 0
    assert sorted(old.store.queues()) == [("%LMQ%light", 0), ("T", 0)]


def test_a_tool_removes_queue_files_behind_the_log() -> None:
    broker = make()
    client = broker.connect()
    for _ in range(50):
        client.call(310, send_fields(), b"x")
    broker.advance(600)
    broker.store.tick()
    broker.store.sync()
    directory = "/store/consumequeue/T/0"
    assert len(broker.files.names(directory)) == 3
    queue = broker.store._queues.by_key["T", 0]
    queue.offset_min = 45  # as after deletions of an earlier life
    assert client.call(CLEAN_QUEUES).code == 0
    assert len(broker.files.names(directory)) == 3, "in the background"
    broker.clean()
    assert broker.files.names(directory) == [f"{800:020d}"]


def test_settings_of_retention_change_while_the_broker_runs(
    old: SteppedBroker, reader: SteppedClient
) -> None:
    old.advance(2 * HOUR_S)
    old.clean()
    assert len(old.files.names(LOG)) == 5
    assert reader.call(CHANGE_CONFIG, {}, b"fileReservedTime=1\n").code == 0
    old.advance(10)
    old.clean()
    assert len(old.files.names(LOG)) == 1
