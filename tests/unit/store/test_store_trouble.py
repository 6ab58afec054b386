"""Start-up trouble gets a sentence with its cure (issue 3, section 4); ticks; runtime figures."""

import errno
from pathlib import Path
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError, StoreError, StoreLockedError
from sluicemq.store.store import Store


def test_store_of_a_living_process_is_refused(tmp_path: Path) -> None:
    config = StoreConfig(root=str(tmp_path), commit_log_file_bytes=4096)
    store = Store.open(config)
    with pytest.raises(StoreLockedError, match=r"locked by process \d+.*storePathRootDir"):
        Store.open(config)
    store.close()
    Store.open(config).close()


def test_failed_start_gives_the_lock_back(bench: Any) -> None:
    bench.open()
    bench.send(b"x")
    bench.store.close()
    with pytest.raises(StoreDamagedError):
        bench.open(commit_log_file_bytes=8192)
    bench.open(commit_log_file_bytes=4096)
    assert bench.bodies() == [b"x"]


@pytest.mark.parametrize("kill", [True, False])
def test_files_of_another_size_than_configured_name_both_and_the_key(
    bench: Any, kill: bool
) -> None:
    bench.open()
    bench.send(b"x")
    bench.store.close()
    if kill:
        bench.files.put("/store/abort", b"1")
    with pytest.raises(
        StoreDamagedError,
        match=r"/store/commitlog/00000000000000000000 has 4096 bytes, but mappedFileSizeCommitLog"
        " is 8192. Set mappedFileSizeCommitLog=4096",
    ):
        bench.open(commit_log_file_bytes=8192)
    with pytest.raises(
        StoreDamagedError,
        match=r"/consumequeue/T/0/00000000000000000000 has 400 bytes, but"
        " mappedFileSizeConsumeQueue is 800. Set mappedFileSizeConsumeQueue=400",
    ):
        bench.open(commit_log_file_bytes=4096, consume_queue_file_bytes=800)
    assert bench.files.exists("/store/abort") is kill, "a refused start changes nothing"
    bench.open(consume_queue_file_bytes=400)
    assert bench.bodies() == [b"x"]


def test_missing_file_in_the_middle_of_the_log_is_named(bench: Any) -> None:
    bench.open()
    bench.send(*[b"x" * 1000] * 12)
    bench.store.close()
    bench.files.remove(f"/store/commitlog/{4096:020d}")
    with pytest.raises(StoreDamagedError, match=f"lacks the file {4096:020d}.*from a copy"):
        bench.open()


def test_missing_last_file_of_the_log_is_damage(bench: Any) -> None:
    bench.open()
    bench.send(*[b"x" * 1000] * 12)
    bench.store.close()
    bench.files.remove(f"/store/commitlog/{bench.files.names('/store/commitlog')[-1]}")
    with pytest.raises(StoreDamagedError, match="was safely on disk"):
        bench.open()


def test_empty_last_file_is_the_trace_of_a_crash_and_removed(bench: Any) -> None:
    bench.open()
    bench.send(b"x")
    bench.files.put(f"/store/commitlog/{4096:020d}", b"")
    bench.reopen(kill=True)
    assert bench.bodies() == [b"x"]
    assert bench.files.names("/store/commitlog") == ["0" * 20]


def test_foreign_files_in_the_directories_are_left_alone(bench: Any) -> None:
    bench.open()
    bench.send(b"x")
    bench.store.close()
    bench.files.put("/store/commitlog/notes.txt", b"mine")
    bench.files.put("/store/consumequeue/T/notes.txt", b"mine")
    bench.files.put("/store/consumequeue/T/0/notes.txt", b"mine")
    bench.open()
    assert bench.bodies() == [b"x"]
    assert bench.files.content("/store/commitlog/notes.txt") == b"mine"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_directory_that_cannot_be_written_says_so(bench: Any, number: int) -> None:
    bench.files.fail_next("create", number)
    with pytest.raises(StoreError, match=r"/store cannot be opened: .*permission to write there"):
        bench.open()


def test_write_error_at_the_start_is_told_and_the_lock_given_back(bench: Any) -> None:
    bench.files.fail_next("create", errno.ENOSPC, path_part="abort")
    with pytest.raises(StoreError, match="cannot be opened: No space left"):
        bench.open()
    bench.open()


def test_clock_that_went_back_is_told_at_the_start_with_both_times(bench: Any, caplog: Any) -> None:
    bench.open()
    bench.send(b"x")
    newest = bench.clock.ms
    bench.store.close()
    bench.clock.ms -= 3_600_000
    bench.open()
    assert (
        f"went back to {bench.clock.ms} ms, but the newest message was stored at {newest} ms"
        in caplog.text
    )


@pytest.mark.parametrize("kill", [True, False])
def test_clock_that_went_on_is_not_mentioned(bench: Any, caplog: Any, kill: bool) -> None:
    bench.open()
    bench.send(b"x")
    bench.clock.ms += 5
    bench.reopen(kill=kill)
    assert "clock" not in caplog.text


# --- ticks


def test_queue_files_are_written_by_the_clock(bench: Any) -> None:
    store = bench.open()
    bench.send(b"x")
    bench.clock.ms += 999
    store.tick()
    assert bench.files.names("/store/consumequeue") == []
    bench.clock.ms += 1
    store.tick()
    assert bench.files.names("/store/consumequeue/T/0") == ["0" * 20]


def test_long_tail_is_written_at_once(bench: Any) -> None:
    bench.open(commit_log_file_bytes=1 << 20, consume_queue_file_bytes=1 << 20)
    bench.send(*[b""] * 4095)
    assert bench.files.names("/store/consumequeue") == []
    bench.send(b"")
    assert bench.files.names("/store/consumequeue/T/0") == ["0" * 20]
    assert len(bench.bodies()) == 4096


def test_tick_says_when_a_sync_is_due(bench: Any) -> None:
    """By the rules of ASYNC_FLUSH: 500 ms and four dirty pages, or 10 s and anything."""
    store = bench.open(commit_log_file_bytes=1 << 20)
    bench.send(b"x")
    bench.clock.ms += 1000
    assert store.tick() is False
    bench.send(b"x" * 4 * 4096)
    assert store.tick() is True
    assert store.tick() is False, "told once in an interval"
    store.sync()
    bench.send(b"x")
    bench.clock.ms += 5000
    assert store.tick() is False
    bench.clock.ms += 5000
    assert store.tick() is True


def test_failed_writing_of_queues_is_tried_again(bench: Any, caplog: Any) -> None:
    store = bench.open()
    bench.send(b"x")
    bench.files.fail_next("write", errno.ENOSPC, path_part="consumequeue")
    bench.clock.ms += 1000
    store.tick()
    assert "writing consume queues failed" in caplog.text
    assert bench.bodies() == [b"x"]
    bench.clock.ms += 1000
    store.tick()
    bench.reopen()
    assert bench.bodies() == [b"x"]


def test_an_outage_of_queue_writes_is_logged_when_it_begins_and_when_it_ends(
    bench: Any, caplog: Any
) -> None:
    store = bench.open()
    for topic in ("A", "B"):
        bench.send(b"x", topic=topic)
    for _ in range(50):
        bench.files.fail_next("write", errno.EROFS, path_part="consumequeue")
    for _ in range(60):
        bench.clock.ms += 1000
        store.tick()
    lines = [text for text in caplog.messages if "consume queue" in text]
    assert len(lines) == 2
    assert "writing consume queues failed" in lines[0]
    assert "the outage of consume queue writes is over" in lines[1]
    assert "49 more failures" in lines[1]


def test_failed_sync_of_a_queue_file_is_final_too(bench: Any) -> None:
    store = bench.open()
    bench.send(b"x")
    bench.clock.ms += 20_000
    store.tick()
    bench.files.fail_next("sync", errno.EIO, path_part="consumequeue")
    with pytest.raises(StoreError, match="refuses writes"):
        store.sync()
    with pytest.raises(StoreError, match="refuses writes"):
        bench.append()


def test_error_while_closing_is_told_and_leaves_the_abort_file(bench: Any) -> None:
    store = bench.open()
    bench.send(b"x")
    bench.files.fail_next("sync", errno.EIO, path_part="commitlog")
    with pytest.raises(StoreError):
        store.close()
    assert bench.files.exists("/store/abort")
    bench.open()
    assert bench.bodies() == [b"x"]


def test_stop_without_room_for_the_mark_is_followed_by_a_start_as_after_a_crash(
    bench: Any, caplog: Any
) -> None:
    """Only a mark tells that queues are missing."""
    store = bench.open()
    bench.send(b"x")
    bench.send(b"y", queue_id=1)
    bench.files.fail_next("write", errno.ENOSPC, path_part="checkpoint", after=1, written=1)
    store.close()
    assert "writing a new checkpoint failed" in caplog.text
    assert bench.files.exists("/store/abort")
    for name in bench.files.names("/store/consumequeue/T/1"):
        bench.files.remove(f"/store/consumequeue/T/1/{name}")
    bench.files.remove("/store/consumequeue/T/1")
    bench.open()
    assert bench.bodies(queue_id=1) == [b"y"]


def test_runtime_figures(bench: Any) -> None:
    store = bench.open()
    start = bench.clock.ms
    bench.send(b"x")
    bench.clock.ms += 90_061_000
    runtime = store.runtime_info()
    assert runtime["bootTimestamp"] == str(start)
    assert runtime["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert runtime["commitLogMinOffset"] == "0"
    assert runtime["commitLogMaxOffset"] == str(store.written_offset) == "93"
    assert runtime["commitLogDiskRatio"] == "0.5000"
    assert runtime["commitLogDirCapacity"] == "Total : 1.0 TiB, Free : 512.0 GiB."
    assert runtime["remainHowManyDataToFlush"] == "93.0 B"
    assert runtime["earliestMessageTimeStamp"] == str(start)
    assert all(isinstance(value, str) for value in runtime.values())


def test_queues_are_listed(bench: Any) -> None:
    store = bench.open()
    bench.send(b"x", topic="B")
    bench.send(b"x", topic="A", queue_id=3)
    assert sorted(store.queues()) == [("A", 3), ("B", 0)]
    assert store.queue_exists("A", 3)
    assert not store.queue_exists("A", 0)
    assert store.log_start == 0
