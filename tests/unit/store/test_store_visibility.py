"""What is visible is safe: commit, sync and publish in both flush modes, and disk errors."""

import errno
import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreError
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFile

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)


def watch(store: Store) -> list[list[tuple[str, int, int]]]:
    woken: list[list[tuple[str, int, int]]] = []
    store.on_visible = woken.append
    return woken


def test_nothing_is_visible_before_the_commit(bench: Any) -> None:
    store = bench.open()
    woken = watch(store)
    place, _ = bench.append()
    assert store.queue_offsets("T", 0) == (0, 0)
    assert store.reader.record_at(place) is None
    assert store.reader.read("T", 0, 0, 32).count == 0
    assert woken == []


def test_asynchronous_commit_shows_the_turn_and_wakes_readers(bench: Any) -> None:
    store = bench.open()
    woken = watch(store)
    bench.append(b"1")
    bench.append(b"2")
    bench.append(b"3", topic="A", queue_id=4)
    store.commit()
    assert woken == [[("T", 0, 2), ("A", 4, 1)]]
    bench.send(b"4")
    assert woken[1:] == [[("T", 0, 3)]]
    assert bench.bodies() == [b"1", b"2", b"4"]


def test_synchronous_commit_shows_nothing_before_the_publish(bench: Any) -> None:
    store = bench.open(flush_sync=True)
    woken = watch(store)
    place, _ = bench.send(b"1", b"2")[0]
    assert store.reader.read("T", 0, 0, 32).count == 0
    assert store.reader.record_at(place) is None
    assert store.reader.earliest_time_ms() == -1
    end = store.sync()
    assert woken == []
    assert store.queue_offsets("T", 0) == (0, 0)
    store.publish(end)
    assert woken == [[("T", 0, 2)]]
    assert bench.bodies() == [b"1", b"2"]
    assert store.reader.record_at(place) is not None


def test_publish_shows_only_turns_that_end_before(bench: Any) -> None:
    store = bench.open(flush_sync=True)
    woken = watch(store)
    bench.send(b"1")
    end = store.sync()
    bench.send(b"2")
    store.publish(end)
    store.publish(end)
    assert woken == [[("T", 0, 1)]]
    assert bench.bodies() == [b"1"]
    store.publish(store.sync())
    assert bench.bodies() == [b"1", b"2"]


def test_one_sync_covers_all_that_was_committed_when_it_began(bench: Any) -> None:
    store = bench.open(flush_sync=True)
    for body in (b"1", b"2", b"3"):
        bench.send(body)
    bench.files.operations.clear()
    assert store.sync() == store.written_offset == store.synced_offset
    assert [op.kind for op in bench.files.operations] == ["sync"]
    bench.files.operations.clear()
    assert store.sync() == store.written_offset
    assert bench.files.operations == [], "nothing new, nothing to wait for"


def test_a_sync_does_not_cover_what_is_committed_while_it_runs(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.open(flush_sync=True)
    bench.send(b"1")
    end = store.written_offset

    def sync_and_commit_a_turn(file: CrashableFile) -> None:
        monkeypatch.undo()
        file.sync()
        bench.send(b"2")

    monkeypatch.setattr(CrashableFile, "sync", sync_and_commit_a_turn)
    assert store.sync() == store.synced_offset == end < store.written_offset
    store.publish(store.synced_offset)
    assert bench.bodies() == [b"1"]
    store.publish(store.sync())
    assert bench.bodies() == [b"1", b"2"]
    running = bench.files
    for seed in range(10):  # what a power loss leaves is a matter of chance
        bench.files = running.crash(random.Random(seed))
        bench.open()
        assert bench.bodies() == [b"1", b"2"], seed


def test_sync_covers_every_file_of_the_range_in_order(bench: Any) -> None:
    store = bench.open(commit_log_file_bytes=1000)
    bench.send(*[b"x" * 200] * 8)
    bench.files.operations.clear()
    store.sync()
    assert [op.path[-4:] for op in bench.files.operations] == ["0000", "1000", "2000"]
    bench.files.operations.clear()
    bench.send(b"x")
    store.sync()
    assert [op.path[-4:] for op in bench.files.operations if op.kind == "sync"] == ["2000"]


def test_fsync_comes_before_the_answer_and_before_the_reader(bench: Any) -> None:
    """The evidence of issue 3, 5.5: the order of operations over the recording port."""
    store = bench.open(flush_sync=True)
    store.on_visible = lambda _: bench.files.mark("visible")
    bench.send(b"x")
    bench.files.mark("commit returned")
    end = store.sync()
    bench.files.mark("answer")
    store.publish(end)
    kinds = [
        op.kind for op in bench.files.operations if op.kind in MARKS or "commitlog/" in op.path
    ]
    assert kinds[-5:] == ["write", "commit returned", "sync", "answer", "visible"]


MARKS = ("visible", "commit returned", "answer")


def test_failed_fsync_is_final(bench: Any) -> None:
    store = bench.open(flush_sync=True)
    bench.send(b"lost")
    bench.files.fail_next("sync", errno.EIO, path_part="commitlog")
    with pytest.raises(StoreError, match="refuses writes"):
        store.sync()
    with pytest.raises(StoreError, match="refuses writes"):
        store.sync()  # though the disk would say yes now: the pages may be gone
    with pytest.raises(StoreError, match="refuses writes"):
        bench.append(b"later")
    assert store.queue_offsets("T", 0) == (0, 0)
    with pytest.raises(StoreError, match="refuses writes"):
        store.close()  # who stops it hears that it is not in order
    assert bench.files.exists("/store/abort"), "the next start has to recover"
    bench.open()
    bench.send(b"again")


def test_turn_that_was_open_when_the_disk_failed_is_refused(bench: Any) -> None:
    store = bench.open()
    bench.send(b"1")
    bench.append(b"2")
    bench.files.fail_next("sync", errno.EIO)
    with pytest.raises(StoreError):
        store.sync()
    with pytest.raises(StoreError, match="refuses writes"):
        store.commit()
    assert bench.bodies() == [b"1"]


def test_syncs_in_other_threads_go_on_beside_appends(tmp_path: Path) -> None:
    store = Store.open(
        StoreConfig(root=str(tmp_path), commit_log_file_bytes=1 << 16, flush_sync=True)
    )
    done = threading.Event()
    failures: list[BaseException] = []

    def sync() -> None:
        try:
            while not done.is_set():
                before = store.written_offset
                assert store.sync() >= before
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=sync) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1000):
        store.writer.append("T", 0, b"%d" % number, b"x" * 300, 0, 0, 0, 1, HOST, HOST)
        if number % 10 == 9:
            store.commit()
            store.publish(store.synced_offset)
            store.tick()
    done.set()
    for thread in threads:
        thread.join()
    store.publish(store.sync())
    assert not failures
    assert store.queue_offsets("T", 0) == (0, 1000)
    store.close()
    store = Store.open(StoreConfig(root=str(tmp_path), commit_log_file_bytes=1 << 16))
    assert store.queue_offsets("T", 0) == (0, 1000)
    store.close()
