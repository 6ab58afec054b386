"""What a slave knows when its master is gone: every promise that is not only in the log.

Here is what tests of restarts do not show already: those of `tests/unit/broker` that kill a broker
are run as failovers too (`tests/lib/simulation/failover.py`).
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from simulation.failover import Slave, failovers, slave_of
from simulation.stepped import (
    SMALL,
    START_MS,
    ManualClock,
    SteppedBroker,
    SteppedClient,
    send_fields,
)
from sluicemq.broker.background import TimeSlice
from sluicemq.config import StoreConfig
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records


@pytest.fixture(autouse=True)
def slaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every broker has a slave."""
    failovers(monkeypatch)


def begin(store_config: StoreConfig = SMALL, **options: Any) -> SteppedBroker:
    broker = SteppedBroker(store_config=store_config, **options)
    broker.core.topics.put(TopicConfig("T", 4, 4))
    return broker


def fail_over(broker: SteppedBroker) -> SteppedBroker:
    """The slave, which has everything by then, is master."""
    return SteppedBroker(
        files=broker.files.kill(), clock=ManualClock(broker.clock.now_ms()),
        store_config=broker.settings.store, config=broker.settings.broker,
    )  # fmt: skip


def bodies(broker: SteppedBroker, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    result = broker.store.reader.read(topic, queue_id, 0, 100_000, 1 << 26)
    return [message.body for message in decode_records(b"".join(result.data))]


# ------------------------------------------------------------------------------------- timers


def send_timed(client: SteppedClient, due_ms: int) -> None:
    text = f"UNIQ_KEY\x01A{due_ms}\x02TIMER_DELIVER_MS\x01{START_MS + due_ms}\x02"
    answer = client.call(310, send_fields(properties=text), b"%d" % due_ms)
    assert answer.code == 0, answer.remark


def test_timed_messages_come_once_each_when_the_checkpoint_is_fresh() -> None:
    """A slave has the checkpoint and neither wheel nor log of the timer: what is built again of the
    queue is exactly what was there, late messages and those that roll among it."""
    for seed in range(16):
        rng = random.Random(seed)
        broker = begin(replace(SMALL, timer_roll_window_slots=20))
        sent: list[int] = []
        for _ in range(rng.randint(1, 3)):
            client = broker.connect()
            for _ in range(rng.randint(1, 8)):
                due_ms = (
                    broker.clock.now_ms() - START_MS + rng.choice([50, 900, 3000, 25_000, 70_000])
                )
                due_ms += rng.randrange(1000)
                if due_ms not in sent:
                    send_timed(client, due_ms)
                    sent.append(due_ms)
                if rng.random() < 0.2:
                    broker.clock.advance(rng.random() * 10)  # nobody sweeps meanwhile
                broker.run(rng.random() * 3, step_s=0.2)
            broker.core.delayed.save()
            broker = fail_over(broker)
        broker.run(120, step_s=1.0)
        assert sorted(map(int, bodies(broker))) == sorted(sent), seed


def test_a_timed_message_that_was_too_late_for_its_second_is_not_taken_for_delivered() -> None:
    broker = begin()
    broker.run(2.0)
    send_timed(broker.connect(), 2050)
    broker.clock.advance(5)  # nobody sweeps meanwhile
    broker.core.delayed.timers.prepare(TimeSlice(broker.clock, 1.0, 1000))
    assert broker.core.delayed.timers.unindexed_count == 0
    broker.core.delayed.save()
    broker = fail_over(broker)
    broker.run(1.0)
    assert bodies(broker) == [b"2050"]


# ------------------------------------------------------------------------------------ offsets


def test_offsets_are_never_behind_the_log_after_a_failover_that_lost_some() -> None:
    broker = begin()
    client, core = broker.connect(), broker.core
    for number in range(3):
        client.call(310, send_fields(), b"%d" % number)
    core.offsets.put("G", "T", 0, 2)
    core.offsets.document.save()
    slave = slave_of(broker.files)
    slave.pump()
    slave.is_cut_off = True
    for number in range(3, 9):
        client.call(310, send_fields(), b"%d" % number)
    core.offsets.put("G", "T", 0, 9)
    core.offsets.document.save()
    slave.pump_state()
    assert slave.applier.next_log_end is not None, (
        "it is said of a log that the slave does not have"
    )
    after = fail_over(broker)
    assert after.core.offsets.committed("G", "T", 0) == 2
    assert bodies(after) == [b"0", b"1", b"2"]


def test_a_master_cuts_offsets_that_are_behind_its_log() -> None:
    """As a master of RocketMQ's has told them, which does not say how far its log was."""
    broker = begin()
    broker.connect().call(310, send_fields(), b"0")
    broker.core.offsets.put("G", "T", 0, 9)
    broker.core.offsets.put("G", "unknown", 0, 9)
    broker.core.offsets.document.save()
    after = fail_over(broker)
    assert after.core.offsets.table == {"T@G": {0: 1}, "unknown@G": {0: 9}}


def test_resets_that_consumers_have_not_heard_of_are_still_pending() -> None:
    broker = begin()
    client = broker.connect()
    for number in range(3):
        client.call(310, send_fields(), b"%d" % number)
    broker.core.offsets.reset("G", "T", 0, 1)
    for document in (broker.core.offsets.document, broker.core.offsets.resets_document):
        document.save()
    after = fail_over(broker)
    assert after.core.offsets.committed("G", "T", 0) == 1
    assert after.core.offsets.resets.blocks_commits("G", "T", 0)


# ------------------------------------------------------------------------------------- topics


def test_a_topic_that_is_deleted_and_made_again_begins_anew_on_the_slave_too() -> None:
    broker = begin()
    client = broker.connect()
    for number in range(3):
        client.call(310, send_fields(), b"old %d" % number)
    assert client.call(215, {"topic": "T"}).code == 0
    broker.core.topics.put(TopicConfig("T", 4, 4))
    for number in range(2):
        client.call(310, send_fields(), b"new %d" % number)
    slave = slave_of(broker.files)
    after = fail_over(broker)
    assert bodies(after) == [b"new 0", b"new 1"] == bodies(broker)
    assert slave.store is not None
    assert slave.store.queue_offsets("T", 0) == broker.store.queue_offsets("T", 0)
    client = after.connect()
    answer = client.call(310, send_fields(), b"newer")
    assert (answer.fields or {})["queueOffset"] == "2"


def test_a_slave_that_gets_the_log_first_copes_with_a_topic_that_begins_anew() -> None:
    broker = begin()
    client = broker.connect()
    slave = slave_of(broker.files)
    slave.pump()
    slave.is_cut_off = True
    for number in range(3):
        client.call(310, send_fields(), b"old %d" % number)
    slave.pump_log()
    assert client.call(215, {"topic": "T"}).code == 0
    broker.core.topics.put(TopicConfig("T", 4, 4))
    for number in range(2):
        client.call(310, send_fields(), b"new %d" % number)
    slave.pump_log()
    slave.pump()
    after = fail_over(broker)
    assert bodies(after) == [b"new 0", b"new 1"]


def test_a_queue_whose_messages_have_expired_goes_on_where_it_was() -> None:
    """On a slave that came later, and whose log has none of them."""
    config = replace(
        SMALL, commit_log_file_bytes=1 << 14, file_reserved_hours=0,
        delete_hours=tuple(map(str, range(24))),
    )  # fmt: skip
    broker = begin(config)
    client = broker.connect()
    for number in range(3):
        client.call(310, send_fields(), b"%d" % number)
    for _ in range(100):
        client.call(310, send_fields(e=1), b"x" * 500)
    for _ in range(3):
        broker.advance(3600)
        broker.store.tick()
        broker.store.sync()
        broker.clean()
    assert broker.store.log_start > 0
    assert broker.store.queue_offsets("T", 0) == (3, 3)
    late = Slave(broker.files, config)
    late.state_log = slave_of(broker.files).state_log
    late.follow(broker)
    assert late.store is not None
    assert late.store.log_start == broker.store.log_start
    assert late.store.queue_offsets("T", 0) == (3, 3)
    late.store.tick()
    late.store.sync()
    after = SteppedBroker(
        files=late.kill(), clock=ManualClock(broker.clock.now_ms()), store_config=config
    )
    answer = after.connect().call(310, send_fields(), b"3")
    assert (answer.fields or {})["queueOffset"] == "3", "no offset is given twice"


# ------------------------------------------------------------------------------ all small files


def test_every_table_is_among_what_is_mirrored_and_is_the_same_there() -> None:
    broker = begin()
    client, core = broker.connect(), broker.core
    for number in range(3):
        client.call(310, send_fields(), b"%d" % number)
    core.offsets.reset("G", "T", 0, 1)
    for document in core.documents:
        document.changed = True
        document.save()
    core.delayed.save()
    slave = slave_of(broker.files)
    slave.pump()
    for document in core.documents:
        assert slave.places.name_of(document.path) is not None, document.path
        assert slave.disk.content(document.path) == broker.files.content(document.path)
    names = dict(slave.places.find_files(broker.files))
    assert names.keys() == dict(slave.places.find_files(slave.disk)).keys()
    for path in names.values():
        assert slave.disk.content(path) == broker.files.content(path), path
