"""Delay levels: delivered when due, in order, and after a restart (spec/delivery.md §1)."""

from typing import Any

import pytest

from simulation.stepped import (
    SMALL,
    START_MS,
    ManualClock,
    SteppedBroker,
    SteppedClient,
    send_fields,
)
from sluicemq.config import StoreConfig
from sluicemq.errors import ConfigurationError
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.record.codec import decode_records
from sluicemq.testing.files import CrashableFiles

LEVELS_S = (1, 5, 10, 30, *range(60, 660, 60), 1200, 1800, 3600, 7200)


def send(client: SteppedClient, level: int, body: bytes = b"x", **more: object) -> Any:
    text = "".join(f"{name}\x01{value}\x02" for name, value in more.items())
    properties = f"UNIQ_KEY\x01{body.hex().upper()}\x02DELAY\x01{level}\x02{text}"
    return client.call(310, send_fields(properties=properties), body)


def delivered(broker: SteppedBroker, topic: str = "T") -> list[Any]:
    result = broker.store.reader.read(topic, 0, 0, 10_000, 1 << 24)
    return decode_records(b"".join(result.data))


def lateness(broker: SteppedBroker) -> list[int]:
    """Return how late each message was delivered; its body is the time in ms when it was due."""
    return [message.store_time_ms - int(message.body) for message in delivered(broker)]


@pytest.mark.parametrize("level", range(1, 19))
def test_each_level_waits_exactly_as_long_as_it_says(
    broker: SteppedBroker, client: SteppedClient, level: int
) -> None:
    send(client, level)
    broker.advance(LEVELS_S[level - 1] - 0.001)
    broker.settle()
    assert delivered(broker) == []
    broker.advance(0.001)
    broker.settle()
    (message,) = delivered(broker)
    assert message.store_time_ms == START_MS + 1000 * LEVELS_S[level - 1]


def test_the_next_wake_is_when_the_next_message_is_due(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 3)
    assert broker.core.delayed.next_due_ms == START_MS + 10_000
    broker.run(1.0)
    send(client, 1)
    assert broker.core.delayed.next_due_ms == START_MS + 2000
    broker.run(1.0)
    assert broker.core.delayed.next_due_ms == START_MS + 10_000


def test_the_timer_is_set_and_moved_for_an_earlier_message(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    alarms: list[tuple[float, bool]] = []

    class Alarm:
        def __init__(self, seconds: float) -> None:
            self.index = len(alarms)
            alarms.append((seconds, False))

        def cancel(self) -> None:
            alarms[self.index] = (alarms[self.index][0], True)

    broker.core.delayed.call_later = lambda seconds, _: Alarm(seconds)
    send(client, 3)
    send(client, 4)
    send(client, 1)
    assert alarms == [(10.0, True), (1.0, False)]


def test_a_delivered_message_is_the_one_that_was_sent(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 1, b"body", TAGS="x", KEYS="k", own="v")
    broker.run(1.1)
    (message,) = delivered(broker)
    assert (message.body, message.queue_id) == (b"body", 0)
    assert message.born_time_ms == START_MS
    assert message.born_host.port == client.peer.remote.port
    # RocketMQ's delivered record keeps these three [golden].
    assert message.properties["DELAY"] == "1"
    assert message.properties["REAL_TOPIC"] == "T"
    assert message.properties["own"] == "v"
    unit = bytes(broker.store.reader.units("T", 0, 0, 1))
    assert int.from_bytes(unit[12:], signed=True) == ord("x"), "the tag's code is back"


def test_thousands_due_together_are_delivered_in_slices_and_in_order(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for number in range(3000):
        client.feed(client.request(310, send_fields(properties="UNIQ_KEY\x01A\x02DELAY\x011\x02"),
                                   b"%d" % number))  # fmt: skip
    broker.step()
    broker.advance(1.0)
    assert 0 < len(delivered(broker)) < 3000, "one slice lets other work run"
    broker.settle()
    assert [int(message.body) for message in delivered(broker)] == list(range(3000))


def test_a_message_that_is_not_durable_yet_is_delivered_when_it_is() -> None:
    config = StoreConfig(
        root="/store", commit_log_file_bytes=1 << 20, consume_queue_file_bytes=20_000,
        flush_sync=True,
    )  # fmt: skip
    broker = SteppedBroker(store_config=config)
    client = broker.connect()
    client.feed(client.request(310, send_fields(properties="DELAY\x011\x02"), b"x"))
    broker.step()
    broker.advance(2.0)
    broker.step()
    assert delivered(broker) == []
    broker.finish_sync()
    broker.advance(0.2)
    broker.step()
    assert delivered(broker) == [], "written, and not on disk"
    broker.settle()
    assert len(delivered(broker)) == 1, "no other answer was needed to make it visible"


# --- restarts


def restarted(broker: SteppedBroker, files: CrashableFiles | None = None) -> SteppedBroker:
    clock = ManualClock(broker.clock.now_ms())
    return SteppedBroker(
        files=files or broker.files, clock=clock, store_config=broker.settings.store
    )


def test_after_an_orderly_stop_no_message_is_lost_or_repeated(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for number in range(10):
        send(client, 1 + number % 2, b"%d" % number)
    broker.run(1.1)
    broker.close()
    broker = restarted(broker)
    broker.run(6.0)
    assert sorted(int(m.body) for m in delivered(broker)) == list(range(10))


def test_messages_that_became_due_while_the_broker_was_down_are_delivered_at_once(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 2)
    broker.close()
    broker.clock.advance(3600)
    broker = restarted(broker)
    broker.advance(0)
    broker.settle()
    assert len(delivered(broker)) == 1


def test_the_file_contains_only_durable_offsets(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    document = broker.core.delayed.levels.document
    send(client, 1)
    broker.store.sync()
    broker.run(1.1)
    document.save()
    assert b"1:0" in broker.files.content(document.path), "delivered, and not synced"
    assert document.changed
    broker.store.sync()
    document.save()
    assert b'"offsetTable":{1:1\n\t}' in broker.files.content(document.path)
    assert not document.changed


def test_an_offset_outside_of_the_queue_is_brought_back_into_it(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 2)
    broker.run(6.0)
    broker.close()
    path = "/store/config/delayOffset.json"
    text = b'{"dataVersion":{"counter":3},"offsetTable":{1:5,2:77}}'
    file = broker.files.open(path, create=True)
    file.truncate(len(text))
    file.pwrite(text, 0)
    broker = restarted(broker)
    assert broker.core.delayed.levels.get_runtime_info() == {"scheduleMessageOffset_2": "1,1"}


def test_a_level_goes_back_to_messages_that_are_undelivered_by_the_log(
    broker: SteppedBroker, client: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The file of another store says that messages are delivered that are not due."""
    send(client, 2)
    broker.run(6.0)
    send(client, 2)
    broker.close()
    path = "/store/config/delayOffset.json"
    broker.files.put(path, b'{"dataVersion":{"counter":3},"offsetTable":{2:2}}')
    broker = restarted(broker)
    assert broker.core.delayed.levels.get_runtime_info() == {"scheduleMessageOffset_2": "1,2"}
    assert any(path in text and "delivery continues there" in text for text in caplog.messages)
    broker.run(6.0)
    assert broker.core.delayed.levels.get_runtime_info() == {"scheduleMessageOffset_2": "2,2"}


# --- trouble


def test_a_full_disk_delays_messages_and_loses_none(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for number in range(5):
        send(client, 1, b"%d" % number)
    broker.files.fail_next("write", 28, path_part="commitlog")
    broker.run(1.05)
    assert delivered(broker) == []
    broker.run(0.2)
    assert [int(m.body) for m in delivered(broker)] == list(range(5))


def test_a_clock_that_is_set_back_a_little_makes_no_message_early(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 1)
    broker.clock._start_ms -= 500
    send(client, 1)
    broker.run(1.4)
    assert delivered(broker) == []
    broker.run(0.2)
    assert len(delivered(broker)) == 2


def test_a_clock_that_is_set_back_a_lot_blocks_no_message_forever(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 1)
    broker.clock._start_ms -= 7_200_000
    broker.close()
    broker = restarted(broker)
    broker.run(0.9)
    assert len(delivered(broker)) == 0
    broker.run(0.2)
    assert len(delivered(broker)) == 1


def test_a_topic_that_was_deleted_meanwhile_gets_its_message_all_the_same(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    send(client, 1)
    broker.core.topics.remove("T")
    broker.run(1.1)
    assert len(delivered(broker)) == 1


# --- levels of our own


def own_levels(text: str) -> StoreConfig:
    return StoreConfig(
        root="/store", commit_log_file_bytes=1 << 20, consume_queue_file_bytes=20_000,
        delay_levels=text,
    )  # fmt: skip


def test_levels_can_be_set() -> None:
    broker = SteppedBroker(store_config=own_levels("2s 1m 1d"))
    client = broker.connect()
    for level in (1, 2, 3, 4):
        assert send(client, level).code == 0
    broker.run(2.0)
    assert len(delivered(broker)) == 1
    broker.advance(58)
    broker.settle()
    assert len(delivered(broker)) == 2
    broker.advance(86_340)
    broker.settle()
    assert len(delivered(broker)) == 4, "level 4 counts as 3"


def test_custom_delay_levels_count_after_the_queues_were_rebuilt() -> None:
    broker = SteppedBroker(store_config=own_levels("30s"))
    send(broker.connect(), 1)
    broker.store.sync()
    broker = restarted(broker, broker.files.kill())
    broker.advance(29.9)
    broker.settle()
    assert delivered(broker) == []
    broker.advance(0.1)
    broker.settle()
    assert len(delivered(broker)) == 1


def test_messages_of_a_level_that_is_gone_are_delivered_by_the_last_one() -> None:
    broker = SteppedBroker(store_config=own_levels("1s 2s 3s"))
    send(broker.connect(), 3)
    broker.close()
    config = own_levels("1s")
    clock = ManualClock(broker.clock.now_ms())
    broker = SteppedBroker(files=broker.files, clock=clock, store_config=config)
    broker.run(1.1)
    assert len(delivered(broker)) == 1


@pytest.mark.parametrize("text", ["", "1x", "s", "-1s", "1.5m", "1s 2", "99d"])
def test_levels_that_make_no_sense_are_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigurationError, match="messageDelayLevel"):
        own_levels(text)


def test_the_small_configuration_keeps_rocketmqs_levels() -> None:
    assert [ms // 1000 for ms in SMALL.delay_levels_ms] == list(LEVELS_S)
    assert SCHEDULE_TOPIC == "SCHEDULE_TOPIC_XXXX"
