"""Which files of the log go, when, and what readers and the disk have of it."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreError, StoreFullError
from sluicemq.record.codec import decode_records
from sluicemq.store.read import ReadStatus
from sluicemq.store.retain import (
    HOUR_MS,
    DiskUsage,
    LogFile,
    decide_deletion,
    deletion_ms,
    disk_full_error,
    expiry_ms,
    local_hour,
    warning_ms,
)
from sluicemq.store.store import Store

CONFIG = StoreConfig(root="/store")
NOON_MS = 1_700_049_600_000  # 2023-11-15T12:00:00Z
DAY_MS = 24 * HOUR_MS
LOG = "/store/commitlog"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    zone("UTC")
    yield zone
    monkeypatch.undo()
    time.tzset()


# ------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("percent", "takes"),
    [(75.0, (False, False)), (75.1, (True, False)), (85.0, (True, False)), (85.1, (True, True))],
)
def test_the_disk_frees_expired_files_above_75_and_any_above_85_percent(
    percent: float, takes: tuple[bool, bool]
) -> None:
    assert decide_deletion(CONFIG, percent, NOON_MS)[:2] == takes


@pytest.mark.parametrize(("hour", "takes"), [(3, False), (4, True), (5, False), (16, True)])
def test_the_hours_of_delete_when_free_expired_files(hour: int, takes: bool) -> None:
    config = replace(CONFIG, delete_hours=("04", "16"))
    now_ms = NOON_MS + (hour - 12) * HOUR_MS
    assert decide_deletion(config, 10.0, now_ms)[:2] == (takes, False)
    assert decide_deletion(config, 10.0, now_ms + HOUR_MS - 1)[0] is takes


def test_hours_are_those_of_the_local_time_zone(utc: Callable[[str], None]) -> None:
    assert local_hour(NOON_MS) == 12
    utc("Asia/Kolkata")  # half an hour aside
    assert local_hour(NOON_MS) == 17
    assert local_hour(NOON_MS + HOUR_MS // 2) == 18


def test_an_administrator_frees_expired_files_at_any_hour() -> None:
    assert decide_deletion(CONFIG, 10.0, NOON_MS, is_manual=True)[:2] == (True, False)


def test_force_can_be_forbidden() -> None:
    config = replace(CONFIG, clean_forcibly=False)
    assert decide_deletion(config, 99.0, NOON_MS)[:2] == (True, False)


def test_a_high_used_ratio_keeps_files_until_sends_are_refused() -> None:
    config = replace(CONFIG, disk_used_ratio_max=95)
    assert decide_deletion(config, 88.0, NOON_MS)[:2] == (False, False)
    assert decide_deletion(config, 90.1, NOON_MS)[:2] == (True, True)


def test_a_file_is_kept_and_its_readers_are_warned_by_its_last_write() -> None:
    file = LogFile(0, 4096, NOON_MS)
    config = replace(CONFIG, file_reserved_hours=10)
    assert expiry_ms(file, config) == NOON_MS + 10 * HOUR_MS
    assert warning_ms(file, config) == NOON_MS + 8 * HOUR_MS


def test_the_time_of_a_loss_is_the_next_hour_of_delete_when_after_the_expiry() -> None:
    file = LogFile(0, 4096, NOON_MS + 60_000)
    config = replace(CONFIG, file_reserved_hours=10)  # expires at 22:01
    assert deletion_ms(file, config, 10.0, NOON_MS) == NOON_MS + 16 * HOUR_MS
    assert deletion_ms(file, config, 80.0, NOON_MS) == NOON_MS + 60_000 + 10 * HOUR_MS
    at_22 = replace(config, delete_hours=("22",))
    assert deletion_ms(file, at_22, 10.0, NOON_MS) == NOON_MS + 60_000 + 10 * HOUR_MS
    late_ms = NOON_MS + 15 * HOUR_MS + 7  # expired for five hours, a full hour is next
    assert deletion_ms(file, config, 10.0, late_ms) == NOON_MS + 16 * HOUR_MS


def test_the_time_of_a_loss_follows_a_change_of_the_clocks(utc: Callable[[str], None]) -> None:
    utc("Europe/Berlin")
    evening_ms = 1_698_523_200_000  # 2023-10-28T22:00 there; the night has an hour more
    file = LogFile(0, 4096, evening_ms - CONFIG.file_reserved_hours * HOUR_MS)
    assert deletion_ms(file, CONFIG, 10.0, evening_ms) == evening_ms + 7 * HOUR_MS


def test_a_refusal_names_path_used_limit_free_and_cure() -> None:
    error = disk_full_error(DiskUsage("/data/commitlog", 1000, 50), CONFIG)
    assert str(error) == (
        "The disk of /data/commitlog is too full: 950 of 1000 bytes (95.0 %) are used, the limit"
        " is 900 (diskSpaceWarningLevelRatio = 90 %), 50 are free. Free disk space, or lower"
        " fileReservedTime. Sending then works again without a restart."
    )


# -------------------------------------------------------------------------------- the store


class Told:
    """A watcher that writes down what it hears."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.heard: list[object] = []

    def on_messages_deleted(self, topic: str, queue_id: int, old_min: int, new_min: int) -> None:
        self.heard.append((topic, queue_id, old_min, new_min))

    def on_file_deleted(self, file: LogFile, why: str) -> None:
        assert self.bench.files.exists(f"{LOG}/{file.base:020d}"), "told before it goes"
        self.heard.append(f"file {file.base}: {why}")


@pytest.fixture
def store(bench: Any) -> Any:
    """A log of four files and a bit, three messages in each; marked, ten minutes old."""
    bench.files.clock = bench.clock
    bench.clock.ms = NOON_MS
    opened = bench.open(delete_file_interval_ms=0, delete_queue_file_interval_ms=0)
    bench.watcher = opened.retention.observer = Told(bench)
    for number in range(13):
        bench.send(bytes([number]) * 1200, queue_id=number % 2)
    mark(bench)
    assert len(names(bench)) == 5
    return opened


def mark(bench: Any) -> None:
    bench.clock.ms += 600_000
    bench.store.tick()
    bench.store.sync()


def names(bench: Any) -> list[int]:
    return [int(name) for name in bench.files.names(LOG)]


def clean(bench: Any) -> None:
    for step in bench.store.retention.clean():
        if callable(step):
            step()


def fill(bench: Any, percent: float) -> None:
    bench.files.total_bytes = 1_000_000
    bench.files.free_bytes = round(1_000_000 - percent * 10_000)


def expire(bench: Any, hour: int = 4) -> None:
    """Four days later, at an hour of the day."""
    bench.clock.ms = NOON_MS + 4 * DAY_MS + (hour - 12) * HOUR_MS


def test_expired_files_go_at_the_hour_and_never_the_last(bench: Any, store: Any) -> None:
    expire(bench, hour=3)
    clean(bench)
    assert len(names(bench)) == 5, "not at this hour"
    expire(bench)
    clean(bench)
    assert names(bench) == [4 * 4096]
    assert store.log_start == 4 * 4096
    assert bench.bodies(queue_id=0) == [bytes([12]) * 1200]
    assert bench.bodies(queue_id=1) == []
    assert store.queue_offsets("T", 1) == (6, 6)
    assert store.retention.files_deleted == 4
    assert store.retention.bytes_deleted == 4 * 4096


def test_a_search_by_time_does_not_find_what_retention_has_deleted(bench: Any, store: Any) -> None:
    by_time = store.reader.offset_by_time
    expire(bench)
    clean(bench)
    assert (store.queue_offsets("T", 0), store.queue_offsets("T", 1)) == ((6, 7), (6, 6))
    for time_ms in (0, NOON_MS - 1, NOON_MS, bench.clock.ms, bench.clock.ms + DAY_MS):
        assert by_time("T", 0, time_ms, "lower") == (6 if time_ms <= NOON_MS else 7), time_ms
        assert by_time("T", 0, time_ms, "upper") == (6 if time_ms >= NOON_MS else 0), time_ms
        assert by_time("T", 1, time_ms, "lower") == 6, "the end: no message is there"
        assert by_time("T", 1, time_ms, "upper") == 5, "all were older"
    bench.send(b"new", queue_id=1)
    assert by_time("T", 1, bench.clock.ms, "lower") == 6
    assert by_time("T", 1, bench.clock.ms + 1, "lower") == 7
    assert by_time("T", 1, bench.clock.ms, "upper") == 6


def test_files_stay_until_their_reserved_time_is_over(bench: Any, store: Any) -> None:
    bench.clock.ms = NOON_MS + 40 * HOUR_MS  # four o'clock, after 40 of 72 hours
    clean(bench)
    assert len(names(bench)) == 5


def test_a_younger_file_ends_the_run(bench: Any, store: Any) -> None:
    bench.clock.ms = NOON_MS + 2 * DAY_MS
    file = bench.files.open(f"{LOG}/{2 * 4096:020d}")
    file.pwrite(file.pread(1, 0), 0)  # written again: younger than its neighbours
    expire(bench)
    clean(bench)
    assert names(bench)[0] == 2 * 4096


def test_a_run_takes_a_limited_number_of_files_and_pauses_between_them(
    bench: Any, store: Any
) -> None:
    store.retention.config = replace(bench.config, delete_files_max=2, delete_file_interval_ms=100)
    expire(bench)
    pauses = 0
    for step in store.retention.clean():
        if callable(step):
            step()
        else:
            pauses += step == 0.1
    assert pauses == 2
    assert names(bench) == [2 * 4096, 3 * 4096, 4 * 4096]


def test_a_disk_above_75_percent_needs_no_hour(bench: Any, store: Any) -> None:
    expire(bench, hour=12)
    fill(bench, 78)
    clean(bench)
    assert names(bench) == [4 * 4096]


def test_force_takes_young_files_until_there_is_room(bench: Any, store: Any) -> None:
    fill(bench, 85.5)  # 4096 bytes are 0.4 %
    clean(bench)
    assert names(bench)[0] == 2 * 4096, "two files made room enough"
    assert "85.5 % of the disk are used" in str(bench.watcher.heard)


def test_force_does_not_take_what_is_written(bench: Any, store: Any, caplog: Any) -> None:
    for _ in range(3):
        fill(bench, 89)
        clean(bench)
    assert names(bench) == [4 * 4096]
    assert caplog.text.count("no file of the log may be deleted") == 1
    bench.send(b"on it goes")
    assert bench.bodies()[-1] == b"on it goes"


def test_the_last_file_stays_when_the_next_one_is_there_already(bench: Any) -> None:
    bench.files.clock = bench.clock
    store = bench.open()
    bench.send(b"x" * 3500)
    mark(bench)
    assert names(bench) == [0, 4096], "created ahead of need, and empty"
    for _ in range(3):
        fill(bench, 89)
        clean(bench)
    assert names(bench) == [0, 4096]
    assert store.queue_offsets("T", 0) == (0, 1)


@pytest.mark.parametrize("percent", [10, 89])
def test_only_files_behind_the_durable_mark_go_by_age_or_by_force(
    bench: Any, percent: float
) -> None:
    bench.files.clock = bench.clock
    bench.open()
    for _ in range(13):
        bench.send(b"x" * 1200)
    bench.store.sync()
    expire(bench)
    fill(bench, percent)
    clean(bench)
    assert len(names(bench)) == 5, "no mark was made yet"
    mark(bench)
    clean(bench)
    assert len(names(bench)) == 1


@pytest.mark.parametrize("percent", [10, 89])
def test_files_written_since_the_last_mark_stay(bench: Any, store: Any, percent: float) -> None:
    """The mark lies in the fifth file. What was written since is synced, but the units of its
    messages are not: without its file of the log they could not be built again after a crash."""
    for _ in range(12):
        bench.send(b"y" * 1200)
    store.sync()
    assert names(bench)[-1] == 8 * 4096
    expire(bench)
    for _ in range(3):
        fill(bench, percent)
        clean(bench)
    assert names(bench)[0] == 4 * 4096
    mark(bench)
    clean(bench)
    assert names(bench) == [8 * 4096]


def test_unpublished_records_keep_their_file(bench: Any) -> None:
    bench.files.clock = bench.clock
    store = bench.open(flush_sync=True)
    for _ in range(13):
        bench.send(b"x" * 1200)
    mark(bench)
    fill(bench, 89)
    clean(bench)
    assert len(names(bench)) == 5
    store.publish(store.synced_offset)
    clean(bench)
    assert len(names(bench)) == 1


def test_the_watcher_hears_of_each_queue_and_then_of_the_file(bench: Any, store: Any) -> None:
    fill(bench, 85.1)
    clean(bench)
    assert bench.watcher.heard == [
        ("T", 0, 0, 2),
        ("T", 1, 0, 1),
        "file 0: 85.1 % of the disk are used",
    ]


def test_a_reader_of_what_is_deleted_is_told_the_new_minimum(bench: Any, store: Any) -> None:
    expire(bench)
    clean(bench)
    result = store.reader.read("T", 0, 1, 32)
    assert (result.status, result.next_offset) == (ReadStatus.OFFSET_TOO_SMALL, 6)
    empty = store.reader.read("T", 1, 2, 32)
    assert (empty.status, empty.next_offset) == (ReadStatus.OFFSET_TOO_SMALL, 6)
    assert store.reader.read("T", 1, 6, 32).status is ReadStatus.OFFSET_OVERFLOW_ONE


def test_slices_on_their_way_to_a_socket_outlive_their_file(bench: Any, store: Any) -> None:
    slices = store.reader.read("T", 0, 0, 32, 1 << 20).data
    expire(bench)
    clean(bench)
    found = decode_records(b"".join(slices))
    assert [message.body[0] for message in found] == list(range(0, 13, 2))


def test_a_mapped_file_is_read_to_its_end_after_it_was_removed(tmp_path: Path) -> None:
    """On the real file system, with real maps."""
    config = StoreConfig(
        root=str(tmp_path), commit_log_file_bytes=65_536, delete_file_interval_ms=0,
        delete_hours=tuple(map(str, range(24))), flush_thorough_interval_ms=1,
    )  # fmt: skip
    store = Store.open(config)
    for number in range(10):
        store.writer.append("T", 0, bytes([number]) * 30_000, b"", 0, 0, 0, 1, bytes(8), bytes(8))
        store.commit()
    store.sync()
    store._checkpoints._last_s = store._last_queue_flush_s = 0.0
    store.tick()
    store.sync()
    slices = store.reader.read("T", 0, 0, 32, 1 << 20).data
    files = sorted((tmp_path / "commitlog").iterdir())
    for file in files[:-1]:
        os.utime(file, (1, 1))
    for step in store.retention.clean():
        if callable(step):
            step()
    assert sorted((tmp_path / "commitlog").iterdir()) == files[-2:], "the last is empty still"
    found = decode_records(b"".join(slices))
    assert [message.body for message in found] == [bytes([n]) * 30_000 for n in range(10)]
    store.close()
    again = Store.open(config)
    assert again.queue_offsets("T", 0) == (8, 10)
    again.close()


def test_queues_go_on_counting_after_all_their_messages_are_gone(bench: Any, store: Any) -> None:
    expire(bench)
    clean(bench)
    for kill in (False, True):
        bench.reopen(kill=kill)
        assert bench.store.queue_offsets("T", 1) == (6, 6)
        assert bench.store.queue_offsets("T", 0) == (6, 7)
    assert bench.send(b"next", queue_id=1)[0][1] == 6


def test_queue_files_go_behind_the_log_but_not_the_last(bench: Any) -> None:
    bench.files.clock = bench.clock
    store = bench.open()
    starts: list[int] = []
    store.retention.on_start_moved.append(starts.append)
    for _ in range(70):  # 20 units a file
        bench.send(b"x" * 100)
    bench.send(b"last", queue_id=1)
    mark(bench)
    directory = "/store/consumequeue/T/0"
    assert [int(name) for name in bench.files.names(directory)] == [0, 400, 800, 1200]
    expire(bench)
    clean(bench)
    low, high = store.queue_offsets("T", 0)
    assert high == 70
    assert [int(name) for name in bench.files.names(directory)] == [
        base for base in (0, 400, 800, 1200) if base + 400 > low * 20
    ]
    assert starts == [store.log_start]
    bench.reopen()
    assert bench.store.queue_offsets("T", 0) == (low, 70)


def test_a_file_that_cannot_be_removed_ends_the_run_and_is_tried_again(
    bench: Any, store: Any, caplog: Any
) -> None:
    expire(bench)
    bench.files.fail_next("remove", errno.EACCES)
    clean(bench)
    assert len(names(bench)) == 5
    assert "cannot remove" in caplog.text
    assert store.log_start == 4096, "nobody reads it any more"
    clean(bench)
    assert names(bench) == [4 * 4096]


def test_a_file_that_could_not_be_removed_is_no_gap_after_a_restart(bench: Any, store: Any) -> None:
    expire(bench)
    bench.files.fail_next("remove", errno.EACCES)
    clean(bench)
    bench.reopen()
    assert bench.store.log_start == 0
    assert len(bench.bodies()) == 7, "they are back, for the time being"


def test_questions_about_what_goes_next(bench: Any, store: Any) -> None:
    retention = store.retention
    assert [file.base for file in retention.deletable_files()] == [0, 4096, 8192, 12288]
    assert retention.expiring_files() == []
    bench.clock.ms = NOON_MS + 58 * HOUR_MS  # 80 % of 72 hours are 57.6
    assert len(retention.expiring_files()) == 4
    assert retention.first_offset_from("T", 0, 4096) == 2
    assert retention.first_offset_from("T", 9, 4096) == 0
    assert retention.position_of("T", 0, 0) == 0
    assert retention.position_of("T", 0, 7) == -1
    assert retention.position_of("T", 9, 0) == -1


def test_many_queues_are_handled_in_slices(bench: Any) -> None:
    bench.files.clock = bench.clock
    store = bench.open(commit_log_file_bytes=1 << 16)
    for number in range(600):
        bench.append(b"x", queue_id=number)
    bench.store.commit()
    for _ in range(40):
        bench.send(b"x" * 3000, queue_id=600)
    mark(bench)
    expire(bench)
    steps = list(store.retention.clean())
    assert steps.count(0.0) >= 2


# --------------------------------------------------------------------------------- the disk


def test_sends_are_refused_above_the_limit_and_taken_again_below(bench: Any, store: Any) -> None:
    fill(bench, 90)
    store.retention.check_disk()
    bench.send(b"at the limit")
    fill(bench, 90.1)
    store.retention.check_disk()
    with pytest.raises(StoreFullError, match=r"/store/commitlog .*limit is 900000.*99000 are free"):
        bench.append(b"refused")
    with pytest.raises(StoreFullError):
        bench.append(b"every time")
    assert store.retention.is_refusing_sends
    assert len(bench.bodies()) == 8, "reading goes on"
    assert store.sync() == store.written_offset, "flushing goes on"
    fill(bench, 89)
    store.retention.check_disk()
    bench.send(b"again")
    assert bench.bodies()[-1] == b"again"


def test_the_disk_of_the_queues_counts_too(bench: Any, store: Any) -> None:
    usages = {"/store/commitlog": (1000, 900), "/store/consumequeue": (1000, 50)}
    bench.files.usage = lambda path: usages[path]
    assert store.retention.check_disk() == 95.0
    with pytest.raises(StoreFullError, match="/store/consumequeue is too full"):
        bench.append(b"x")


def test_a_directory_that_is_not_there_yet_is_on_the_disk_of_the_store(bench: Any) -> None:
    store = bench.open()
    assert store.retention.check_disk() == 50.0


def test_a_full_disk_refuses_clearly_loses_nothing_and_serves_again(bench: Any) -> None:
    """No block is free: ENOSPC at the write, before any look at the ratios."""
    bench.files.clock = bench.clock
    store = bench.open(consume_queue_file_bytes=4000)
    kept = [bench.send(bytes([n]) * 1000)[0] for n in range(8)]
    bench.files.free_bytes = 0
    for _ in range(3):
        bench.append(b"z" * 3000)
        with pytest.raises(StoreFullError, match="The disk has no room for the commit log"):
            store.commit()
        mark(bench)  # queue files and checkpoint find no room either: that is no harm
    assert len(bench.bodies()) == len(kept)
    bench.files.free_bytes = None
    assert bench.send(b"again")[0][1] == 8
    mark(bench)
    bench.reopen(kill=True)
    assert len(bench.bodies()) == 9


def test_a_full_disk_during_a_checkpoint_does_not_stop_the_store(bench: Any, caplog: Any) -> None:
    store = bench.open()
    bench.send(b"one")
    bench.files.fail_next("write", errno.ENOSPC, path_part="checkpoint")
    mark(bench)
    assert "writing a new checkpoint failed" in caplog.text
    bench.send(b"two")
    mark(bench)
    bench.reopen(kill=True)
    assert bench.bodies() == [b"one", b"two"]
    assert store.synced_offset > 0


def test_another_error_during_a_checkpoint_is_final(bench: Any) -> None:
    bench.open()
    bench.send(b"one")
    bench.files.fail_next("write", errno.EIO, path_part="checkpoint")
    with pytest.raises(StoreError, match="refuses writes"):
        mark(bench)


def test_queue_file_that_retention_removed_meanwhile_does_not_hurt_a_checkpoint(
    bench: Any,
) -> None:
    store = bench.open()
    bench.send(b"one")
    bench.clock.ms += 600_000
    store.tick()
    bench.files.fail_next("open", errno.ENOENT, path_part="consumequeue")
    store.sync()
    bench.send(b"two")


def test_cleaning_queues_stops_in_time_and_goes_on_in_the_next_run(bench: Any) -> None:
    bench.files.clock = bench.clock
    store = bench.open(delete_queue_file_interval_ms=100)
    for _ in range(70):
        bench.send(b"x" * 100)
    mark(bench)
    expire(bench)
    until_s = bench.clock.monotonic_s() + 0.15
    pauses = set()
    for step in store.retention.clean(until_s):
        if callable(step):
            step()
        else:
            pauses.add(step)
            bench.clock.ms += round(step * 1000)
    assert 0.1 in pauses
    directory = "/store/consumequeue/T/0"
    assert bench.files.names(directory)[0] == f"{400:020d}", "one went, then the time was over"
    clean(bench)
    assert bench.files.names(directory) == [f"{1200:020d}"]
