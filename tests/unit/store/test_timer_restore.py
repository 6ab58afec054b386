"""A restored store has the timer wheel and log of the messages that waited at its position."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from simulation.small_wheel import make_wheel_small
from simulation.stepped import SMALL, START_MS, ManualClock, SteppedBroker, send_fields
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.store.timers.files import NO_UNIT, TimerLog, TimerWheel, read_timer_checkpoint
from sluicemq.store.tools.backup import back_up, restore
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.verify import verify
from sluicemq.testing.files import CrashableFiles

CONFIG = dataclasses.replace(SMALL, consume_queue_flush_pages_min=0)


@pytest.fixture(autouse=True)
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel_small(monkeypatch)


def send(broker: SteppedBroker, due_ms: int) -> Any:
    text = f"UNIQ_KEY\x01A{due_ms}\x02TIMER_DELIVER_MS\x01{START_MS + due_ms}\x02"
    return broker.connect().call(310, send_fields(properties=text), b"%d" % due_ms)


def bodies(broker: SteppedBroker) -> list[int]:
    result = broker.store.reader.read("T", 0, 0, 100_000, 1 << 26)
    return [int(message.body) for message in decode_records(b"".join(result.data))]


def begin() -> SteppedBroker:
    broker = SteppedBroker(store_config=CONFIG)
    broker.core.topics.put(TopicConfig("T", 4, 4))
    broker.change(recall_enable=True)
    return broker


def copied(broker: SteppedBroker, **options: Any) -> CrashableFiles:
    """Back up the store of a broker and restore it as `/store` on another disk."""
    broker.store.tick()
    broker.store.sync()
    files = broker.files.kill()
    back_up("/store", "/backup", files=files, clock=broker.clock, shares=())
    result = restore("/backup", "/restored", files=files, clock=broker.clock, shares=(), **options)
    assert result.timed_messages >= 0
    disk = CrashableFiles()
    for path in paths_below(files, "/restored"):
        target = path.replace("/restored", "/store", 1)
        disk.make_directory(target.rpartition("/")[0])
        disk.put(target, files.content(path))
    return disk


def paths_below(files: CrashableFiles, directory: str) -> list[str]:
    found: list[str] = []
    for name in files.names(directory):
        path = f"{directory}/{name}"
        below = paths_below(files, path)
        try:
            files.open(path)
        except IsADirectoryError:
            found += below
        else:
            found.append(path)
    return found


def opened(disk: CrashableFiles, now_ms: int) -> SteppedBroker:
    return SteppedBroker(files=disk, clock=ManualClock(now_ms), store_config=CONFIG)


@pytest.mark.parametrize("saves", [True, False], ids=["fresh state", "old state"])
@pytest.mark.parametrize("is_java", [False, True], ids=["", "rocketmq's checkpoint"])
def test_waiting_messages_wait_and_delivered_ones_are_not_delivered_again(
    saves: bool, is_java: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broker = begin()
    for due_ms in (500, 2500, 3700, 20_000, 30_500):
        send(broker, due_ms)
    handle = send(broker, 25_000).fields["recallHandle"]
    fields = {"producerGroup": "P", "topic": "T", "recallHandle": handle}
    assert broker.connect().call(370, fields).code == 0
    broker.run(1.0)
    broker.core.delayed.save()
    broker.run(3.0)
    if saves:
        broker.core.delayed.save()
    assert bodies(broker) == [500, 2500, 3700]
    check = "/store/config/timercheck"
    if is_java:
        broker.files.put(check, broker.files.content(check)[:56].ljust(4096, b"\0"))
    disk = copied(broker)
    findings = verify(StoreLayout.find("/store", files=disk)).findings
    assert not [one for one in findings.listed if one.kind.startswith("timer")]
    caplog.clear()
    again = opened(disk, broker.clock.now_ms())
    again.run(30.0, step_s=0.25)
    assert bodies(again) == [500, 2500, 3700, 20_000, 30_500]
    assert "built again" not in caplog.text, "the start trusts what was restored"


def test_a_restore_after_everything_was_due_delivers_the_rest() -> None:
    broker = begin()
    for due_ms in (500, 8000, 9000):
        send(broker, due_ms)
    broker.run(1.0)
    broker.core.delayed.save()
    broker.clock.advance(3000)
    again = opened(copied(broker), broker.clock.now_ms())
    again.run(1.0)
    assert sorted(bodies(again)) == [500, 8000, 9000]


def test_a_restore_at_an_earlier_position_has_the_messages_that_waited_there() -> None:
    broker = begin()
    for due_ms in (500, 2500):
        send(broker, due_ms)
    broker.run(1.0)
    broker.core.delayed.save()
    end = broker.store.written_offset
    broker.run(2.0)
    send(broker, 60_000)
    again = opened(copied(broker, at=end), broker.clock.now_ms())
    again.run(1.0)
    assert bodies(again) == [500, 2500], "delivered after that place, so it waits there"
    again.run(60.0, step_s=1.0)
    assert bodies(again) == [500, 2500], "sent after that place"


def test_a_rocketmq_broker_finds_its_files_and_continues_behind_them() -> None:
    """Check what RocketMQ recovers from: wheel, timer log, and the offset in the timer queue."""
    broker = begin()
    for due_ms in (500, 9000, 1500, 700):
        send(broker, due_ms)
    broker.run(2.0)
    broker.core.delayed.save()
    disk = copied(broker)
    known = read_timer_checkpoint(disk, "/store/config/timercheck")
    assert known is not None
    assert known.queue_offset == known.master_queue_offset == 4
    log = TimerLog(disk, "/store/timerlog", CONFIG.timer_log_file_bytes)
    log.load(known.log_end)
    units = list(log.iter_stored_units(0))
    assert len(units) * 52 == known.log_end
    last = log.unit_at(known.log_end - 52)
    assert last is not None
    waiting = broker.store.reader.units("rmq_sys_wheel_timer", 0, 3, 1)
    assert last.position == int.from_bytes(waiting[:8]), "RocketMQ goes on behind this message"
    assert last.due_ms < known.read_ms, "which is not delivered again"
    wheel = TimerWheel(disk, "/store/timerwheel")
    (slot_ms,) = wheel.iter_occupied_ms(known.read_ms, known.read_ms + 3_600_000)
    slot = wheel.get(slot_ms)
    assert slot is not None
    assert (slot_ms, slot.message_count, slot.first_unit) == (START_MS + 8000, 1, slot.last_unit)
    unit = log.unit_at(slot.last_unit)
    assert unit is not None
    assert unit.previous == NO_UNIT


def test_a_store_without_timers_gets_no_files(tmp_path: Path) -> None:
    broker = begin()
    broker.connect().call(310, send_fields(), b"1")
    disk = copied(broker)
    assert not [name for name in disk.names("/store") if name.startswith("timer")]
