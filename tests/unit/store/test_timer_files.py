"""The files of the timers: timer log, timer wheel and checkpoint (spec/delivery.md §2)."""

import errno
import struct
from pathlib import Path

import pytest

from sluicemq.errors import StoreDamagedError
from sluicemq.files import SYSTEM_FILES
from sluicemq.store.timers.files import (
    MAGIC_DEFAULT,
    MAGIC_DELETE,
    NO_UNIT,
    SLOTS,
    WHEEL_BYTES,
    TimerCheckpoint,
    TimerLog,
    TimerWheel,
    read_timer_checkpoint,
    write_timer_checkpoint,
)
from sluicemq.testing.files import CrashableFiles

NOON_MS = 1_700_000_000_000
FILE_BYTES = 5200  # 99 units and a blank


def log_of(files: CrashableFiles, end: int = 0) -> TimerLog:
    log = TimerLog(files, "/s/timerlog", FILE_BYTES)
    log.load(end)
    return log


def fill(log: TimerLog, count: int, first: int = 0) -> list[int]:
    return [
        log.append(NO_UNIT, MAGIC_DEFAULT, NOON_MS, 5000, 1000 * n, 200, 7)
        for n in range(first, first + count)
    ]


@pytest.fixture
def files() -> CrashableFiles:
    files = CrashableFiles()
    files.make_directory("/s")
    return files


def test_a_unit_has_the_bytes_of_the_real_broker(files: CrashableFiles) -> None:
    log = log_of(files)
    log.append(-1, 1, 1_795_226_591_000, 3_600_000, 849, 244, -1_784_167_150)
    log.write()
    data = files.open("/s/timerlog/00000000000000000000").pread(60, 0)
    assert data[:52] == struct.pack(
        ">iqiqiqiiq", 52, -1, 1, 1_795_226_591_000, 3_600_000, 849, 244, -1_784_167_150, 0
    )
    assert data[52:] == bytes(8)


def test_a_unit_is_read_before_and_after_it_is_written(files: CrashableFiles) -> None:
    log = log_of(files)
    position = fill(log, 3)[2]
    before = log.unit_at(position)
    log.write()
    assert before is not None
    assert before == log.unit_at(position)
    assert before.position == 2000
    assert before.due_ms == NOON_MS + 5000
    assert log.unit_at(position + 52) is None or not log.unit_at(position + 52).is_valid


def test_a_file_without_room_for_a_unit_and_a_blank_is_closed_by_a_blank(
    files: CrashableFiles,
) -> None:
    log = log_of(files)
    positions = fill(log, 100)
    log.write()
    assert positions[98] == 98 * 52
    assert positions[99] == FILE_BYTES
    blank = files.open("/s/timerlog/00000000000000000000").pread(52, 99 * 52)
    assert blank == struct.pack(">iqi", 52, 0, 0xCBD43194 - (1 << 32)).ljust(52, b"\0")


def test_stored_units_are_iterated_across_files_up_to_the_first_invalid_unit(
    files: CrashableFiles,
) -> None:
    log = log_of(files)
    fill(log, 150)
    log.write()
    files.open("/s/timerlog/00000000000000005200").pwrite(b"\xff", 20 * 52)
    found = [unit.position for _, unit in log_of(files).iter_stored_units(0)]
    assert found == [1000 * n for n in range(99 + 20)]


def test_truncated_units_never_come_back(files: CrashableFiles) -> None:
    log = log_of(files)
    fill(log, 150)
    log.write()
    log.truncate(10 * 52)
    assert len(list(log_of(files).iter_stored_units(0))) == 10
    assert fill(log, 1, 500) == [520]
    log.write()
    assert [unit.position for _, unit in log_of(files).iter_stored_units(0)][-1] == 500_000


def test_files_whose_messages_are_deleted_are_removed_except_the_last(
    files: CrashableFiles,
) -> None:
    log = log_of(files)
    fill(log, 250)
    log.write()
    assert log.remove_before(98_000) == 0
    assert log.remove_before(98_001) == 1
    assert log.remove_before(1 << 40) == 1
    assert log.start == 2 * FILE_BYTES
    assert files.names("/s/timerlog") == ["00000000000000010400"]


def test_a_full_disk_keeps_units_in_memory_until_there_is_room(files: CrashableFiles) -> None:
    log = log_of(files)
    fill(log, 5)
    log.write()
    fill(log, 5, 5)
    files.fail_next("write", errno.ENOSPC, path_part="timerlog")
    with pytest.raises(OSError, match="No space"):
        log.write()
    assert log.unit_at(9 * 52) is not None
    log.write()
    assert len(list(log_of(files).iter_stored_units(0))) == 10


# --- the wheel


def test_a_slot_counts_only_in_its_own_turn_of_the_wheel(files: CrashableFiles) -> None:
    wheel = TimerWheel(files, "/s/timerwheel")
    wheel.put(NOON_MS, 0, 52, 2)
    later = NOON_MS + SLOTS * 1000
    assert wheel.get(NOON_MS) == (NOON_MS // 1000, 0, 52, 2, 0)
    assert wheel.get(later) is None
    wheel.put(later, 104, 104, 1)
    assert wheel.get(NOON_MS) is None


def test_slots_are_written_where_rocketmq_reads_them(files: CrashableFiles) -> None:
    wheel = TimerWheel(files, "/s/timerwheel")
    wheel.put(1_795_230_191_000, 0, 0, 1)
    wheel.write(wheel.take_changed_slots())
    wheel.finish_write(is_written=True)
    file = files.open("/s/timerwheel")
    assert file.size() == WHEEL_BYTES == 38_707_200
    assert file.pread(32, 183_791 * 32) == struct.pack(">qqqii", 1_795_230_191, 0, 0, 1, 0)
    assert file.data_start(0) is not None
    assert TimerWheel(files, "/s/timerwheel").get(1_795_230_191_500) is not None


def test_slots_that_could_not_be_written_are_written_by_the_next_write(
    files: CrashableFiles,
) -> None:
    wheel = TimerWheel(files, "/s/timerwheel")
    wheel.put(NOON_MS, 0, 0, 1)
    wheel.take_changed_slots()
    wheel.put(NOON_MS + 1000, 52, 52, 1)
    wheel.finish_write(is_written=False)
    assert len(wheel.take_changed_slots()) == 2
    assert wheel.get(NOON_MS) is not None


def test_slots_are_readable_while_they_are_written_and_newer_ones_win(
    files: CrashableFiles,
) -> None:
    wheel = TimerWheel(files, "/s/timerwheel")
    wheel.put(NOON_MS, 0, 0, 1)
    slots = wheel.take_changed_slots()
    wheel.put(NOON_MS, 0, 52, 2)
    wheel.write(slots)
    assert wheel.get(NOON_MS).message_count == 2
    wheel.finish_write(is_written=True)
    assert wheel.get(NOON_MS).message_count == 2
    assert wheel.has_unsaved_slots


@pytest.mark.parametrize("is_written", [False, True])
def test_occupied_slots_are_in_order_across_the_end_of_a_turn(
    files: CrashableFiles, is_written: bool
) -> None:
    wheel = TimerWheel(files, "/s/timerwheel")
    turn = (NOON_MS // 1000 // SLOTS + 1) * SLOTS * 1000
    times = [turn - 3_000_000, turn - 1000, turn, turn + 1000, turn + 9_000_000]
    for time in reversed(times):
        wheel.put(time, 0, 0, 1)
    if is_written:
        wheel.write(wheel.take_changed_slots())
        wheel.finish_write(is_written=True)
    assert list(wheel.iter_occupied_ms(times[0], times[-1] + 1)) == times
    assert list(wheel.iter_occupied_ms(times[0] + 1000, times[-1])) == times[1:-1]


def test_the_wheel_on_disk_is_sparse(tmp_path: Path) -> None:
    wheel = TimerWheel(SYSTEM_FILES, str(tmp_path / "timerwheel"))
    wheel.put(NOON_MS, 0, 0, 1)
    wheel.write(wheel.take_changed_slots())
    state = (tmp_path / "timerwheel").stat()
    assert state.st_size == WHEEL_BYTES
    assert state.st_blocks * 512 < 100_000
    wheel.close()


def test_a_wheel_of_another_size_is_refused_with_a_fix(files: CrashableFiles) -> None:
    files.open("/s/timerwheel", create=True).truncate(1000)
    with pytest.raises(StoreDamagedError, match="1000 bytes instead of 38707200"):
        TimerWheel(files, "/s/timerwheel").check_size()


def test_the_checkpoint_is_written_in_its_56_bytes(files: CrashableFiles) -> None:
    checkpoint = TimerCheckpoint(1, 2, 3, 3, 0, 6, 7, 8, 9, 10, 11, 12, "0123456789abcdef")
    path = "/s/config/timercheck"
    assert read_timer_checkpoint(files, path) is None
    write_timer_checkpoint(files, path, checkpoint)
    assert files.open(path).size() == 4096
    assert files.open(path).pread(56, 0) == struct.pack(">7q", 1, 2, 3, 3, 0, 6, 7)
    assert read_timer_checkpoint(files, path) == checkpoint
    files.open(path).pwrite(struct.pack(">7q", 1, 2, 3, 3, 0, 9, 8), 0)
    changed = TimerCheckpoint(1, 2, 3, 3, 0, 9, 8)
    assert read_timer_checkpoint(files, path) == changed, "RocketMQ wrote since: ours is void"


def test_a_recall_is_a_valid_unit(files: CrashableFiles) -> None:
    log = log_of(files)
    log.append(NO_UNIT, MAGIC_DEFAULT | MAGIC_DELETE, NOON_MS, 0, 0, 100, 0)
    assert log.unit_at(0).is_valid
    log.append(NO_UNIT, 8, NOON_MS, 0, 0, 100, 0)
    assert not log.unit_at(52).is_valid
