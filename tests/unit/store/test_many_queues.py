"""Many queues: what a store holds open is bounded, however many queues and files are read."""

import os
from pathlib import Path
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.files import SystemFiles
from sluicemq.files.overlay import OverlayFiles
from sluicemq.store import checkpoints
from sluicemq.store.directory import read_checkpoint
from sluicemq.store.segments import Segment
from sluicemq.store.store import Store
from sluicemq.store.tools.layout import StoreLayout

QUEUES = 100
HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def send(store: Store, queue_id: int, body: bytes) -> None:
    store.writer.append("T", queue_id, body, b"", 0, 0, 0, 1, HOST, HOST)


def read_all(store: Store, rounds: int) -> None:
    for number in range(rounds):
        for queue_id in range(QUEUES):
            result = store.reader.read("T", queue_id, number, 1, 1 << 20)
            assert b"%d/%d" % (queue_id, number) in b"".join(result.data)


@pytest.mark.parametrize("is_killed", [False, True])
def test_descriptors_do_not_grow_with_the_queues(tmp_path: Path, is_killed: bool) -> None:
    config = StoreConfig(
        root=str(tmp_path), commit_log_file_bytes=1 << 14, consume_queue_file_bytes=40
    )
    files = SystemFiles()
    files.pool.limit = 8
    before = descriptors()
    store = Store.open(config, files=files)
    for number in range(3):
        for queue_id in range(QUEUES):
            send(store, queue_id, b"%d/%d" % (queue_id, number))
        store.commit()
    store._checkpoints.flush_queues(list(store._queues.dirty))
    read_all(store, 3)
    assert descriptors() - before < 16
    store.close()
    assert descriptors() <= before  # others of the process may close theirs meanwhile
    if is_killed:
        (tmp_path / "abort").touch()
    store = Store.open(config, files=files)
    assert descriptors() - before < 16
    read_all(store, 3)
    assert descriptors() - before < 16
    store.close()
    assert descriptors() <= before  # others of the process may close theirs meanwhile


def test_queues_are_whole_after_each_end_with_fewer_maps_than_queues(bench: Any) -> None:
    store = bench.open()
    for rounds in range(1, 6):
        for queue_id in range(QUEUES):
            bench.append(b"%d/%d" % (queue_id, rounds - 1), queue_id=queue_id)
        store.commit()
        store._checkpoints.flush_queues(list(store._queues.dirty))
        read_all(store, rounds)
        assert len(bench.files.pool) <= bench.files.pool.limit < QUEUES
        store = bench.reopen(kill=rounds % 2 == 0)
        assert not store.recovered.is_rebuilt
        read_all(store, rounds)


def test_copy_and_offline_tools_get_by_with_few_descriptors_too(tmp_path: Path) -> None:
    store = Store.open(StoreConfig(root=str(tmp_path), commit_log_file_bytes=1 << 14))
    for queue_id in range(QUEUES):
        send(store, queue_id, b"%d/0" % queue_id)
    store.commit()
    store.close()
    before = descriptors()
    files = OverlayFiles()
    files.pool.limit = 8
    store = Store.open(StoreConfig(root=str(tmp_path), commit_log_file_bytes=1 << 14), files=files)
    read_all(store, 1)
    assert descriptors() - before < 16
    for queue_id in range(QUEUES):
        send(store, queue_id, b"%d/1" % queue_id)
    store.commit()
    store._checkpoints.flush_queues(list(store._queues.dirty))
    read_all(store, 2)
    store.close()
    disk = SystemFiles()
    disk.pool.limit = 8
    before = descriptors()
    layout = StoreLayout.find(str(tmp_path), files=disk)
    for series in layout.queues.values():
        assert series.read(0, 20)
        assert descriptors() - before < 16
    layout.close()


def test_slice_outlives_the_map_that_others_have_pushed_out(tmp_path: Path) -> None:
    files = SystemFiles()
    files.pool.limit = 1
    config = StoreConfig(root=str(tmp_path), commit_log_file_bytes=4096)
    store = Store.open(config, files=files)
    for number in range(100):
        send(store, 0, b"%d" % number * 40)
        store.commit()
    slices = [b for n in range(100) for b in store.reader.read("T", 0, n, 1, 1 << 20).data]
    assert len(files.pool) == 1
    assert all(b"%d" % number * 40 in bytes(part) for number, part in enumerate(slices))
    store.close()


def test_start_after_a_crash_reads_and_writes_only_what_may_have_changed(bench: Any) -> None:
    store = bench.open(consume_queue_file_bytes=400_000)
    for queue_id in range(QUEUES):
        bench.send(b"old", queue_id=queue_id)
    bench.reopen()
    bench.send(b"new", queue_id=7)
    bench.files.operations.clear()
    store = bench.reopen(kill=True)
    assert store.recovered.units_added == 1
    store.tick()
    store.sync()
    written = {o.path for o in bench.files.operations if o.kind in ("write", "truncate", "sync")}
    assert {path for path in written if "consumequeue" in path} == {
        "/store/consumequeue/T/7/00000000000000000000"
    }


def count_opens(bench: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """The files of queues, each time that one is opened from now on."""
    opened: list[str] = []
    raise_fault = bench.files.raise_fault

    def counted(kind: str, path: str, *rest: Any) -> Any:
        if kind == "open" and "consumequeue/" in path:
            opened.append(path)
        return raise_fault(kind, path, *rest)

    patch.setattr(bench.files, "raise_fault", counted)
    return opened


@pytest.mark.parametrize("kill", [False, True])
def test_start_opens_each_small_queue_once(
    bench: Any, monkeypatch: pytest.MonkeyPatch, kill: bool
) -> None:
    store = bench.open()
    for number in range(3):
        for queue_id in range(QUEUES):
            bench.send(b"%d" % number, queue_id=queue_id)
        if number == 1:
            store._checkpoints.write_now()
    if kill:
        bench.files = bench.files.kill()
    else:
        store.close()
    opened = count_opens(bench, monkeypatch)
    bench.open()
    assert bench.store.recovered.units_added == kill * QUEUES
    assert sorted(opened) == sorted(set(opened))
    assert len(opened) == QUEUES
    assert all(bench.bodies(queue_id=queue_id) == [b"0", b"1", b"2"] for queue_id in range(QUEUES))


def test_small_queue_is_mapped_for_who_comes_again(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.open()
    for queue_id in range(QUEUES):
        bench.send(b"%d/0" % queue_id, b"%d/1" % queue_id, queue_id=queue_id)
    store._checkpoints.write_now()
    mapped: list[str] = []
    view = Segment.view

    def seen(segment: Segment) -> memoryview:
        if "consumequeue" in segment.path:
            mapped.append(segment.path)
        return view(segment)

    monkeypatch.setattr(Segment, "view", seen)
    read_all(store, 2)  # by the time that a queue's turn comes again there were many others
    assert mapped == []
    for _ in range(3):
        store.reader.read("T", 5, 0, 1, 1 << 20)
    assert set(mapped) == {"/store/consumequeue/T/5/00000000000000000000"}


def ticked(store: Store, seconds: float, bench: Any) -> None:
    bench.clock.ms += int(seconds * 1000)
    store.tick()


def test_many_queues_are_written_a_few_a_tick_and_the_mark_says_when_they_were_counted(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "QUEUES_PER_TICK", 10)
    store = bench.open(consume_queue_flush_pages_min=2)
    for queue_id in range(QUEUES):
        bench.send(b"a", queue_id=queue_id)
    end = store.written_offset
    ticks, written = 0, []
    ticked(store, 10, bench)
    while store.is_flushing:
        ticks += 1
        bench.send(b"b", queue_id=QUEUES - ticks)
        before = len(bench.files.operations)
        store.tick()
        new = bench.files.operations[before:]
        written.append(sum(o.kind == "write" and "consumequeue" in o.path for o in new))
    assert ticks == QUEUES // 10 - 1
    assert max(written) <= 10
    store.sync()
    mark = read_checkpoint(bench.files, "/store/checkpoint").latest
    assert mark is not None
    assert (mark.log_offset, mark.queues, mark.units) == (end, QUEUES, QUEUES)
    store = bench.reopen(kill=True)
    assert not store.recovered.is_rebuilt
    assert store.recovered.units_added == ticks
    for queue_id in range(QUEUES):
        bodies = [b"a", b"b"] if queue_id >= QUEUES - ticks else [b"a"]
        assert bench.bodies(queue_id=queue_id) == bodies


def test_full_disk_stops_the_slices_and_the_next_tick_goes_on(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "QUEUES_PER_TICK", 10)
    store = bench.open(consume_queue_flush_pages_min=2)
    for queue_id in range(QUEUES):
        bench.send(b"a", queue_id=queue_id)
    bench.files.fail_next("write", path_part="consumequeue")
    ticked(store, 10, bench)
    assert not store.is_flushing, "nobody may try again and again"
    store.tick()
    assert store.is_flushing
    while store.is_flushing:
        store.tick()
    store.sync()
    mark = read_checkpoint(bench.files, "/store/checkpoint").latest
    assert mark is not None
    assert mark.units == QUEUES


def test_mark_follows_the_log_however_fast_it_grows(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "CHECKPOINT_LOG_BYTES", 2000)
    monkeypatch.setattr(checkpoints, "CHECKPOINT_LOG_BYTES_PER_FILE", 0)
    store = bench.open()
    for _ in range(20):
        bench.send(b"x" * 400)
        ticked(store, 0.5, bench)
        store.sync()
    store = bench.reopen(kill=True)
    assert store.recovered.units_added <= 5


def test_mark_of_many_files_comes_seldom(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SINGLE_SYNCS_MAX", 50)
    store = bench.open(consume_queue_flush_pages_min=2)
    for queue_id in range(QUEUES):
        bench.send(b"a", queue_id=queue_id)
    ticked(store, 30, bench)
    assert len(store._queues.dirty) == QUEUES, "in memory: no file is written for a message"
    bench.send(b"b")
    ticked(store, 31, bench)
    assert not store._queues.dirty


def test_a_mark_that_is_due_comes_as_soon_as_the_one_before_is_made(bench: Any) -> None:
    store = bench.open()
    for _ in range(2):
        bench.send(b"a")
        ticked(store, 10, bench)  # the disk is slow: nobody has made the first one yet
    store.sync()
    store.tick()
    store.sync()
    mark = read_checkpoint(bench.files, "/store/checkpoint").latest
    assert mark is not None
    assert mark.units == 2


def test_many_files_are_written_when_nothing_comes(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SINGLE_SYNCS_MAX", 50)
    store = bench.open(consume_queue_flush_pages_min=2)
    for queue_id in range(QUEUES):
        bench.send(b"a", queue_id=queue_id)
    ticked(store, 10, bench)
    assert len(store._queues.dirty) == QUEUES
    ticked(store, 1, bench)
    assert not store._queues.dirty
    store.sync()
    mark = read_checkpoint(bench.files, "/store/checkpoint").latest
    assert mark is not None
    assert mark.units == QUEUES


def test_queue_files_are_written_in_the_order_in_which_their_messages_arrived(bench: Any) -> None:
    """A simulation that cuts the power after n changes needs the same n changes in each run."""
    store = bench.open()
    order = [(queue_id * 37) % QUEUES for queue_id in range(QUEUES)]
    for queue_id in order:
        bench.append(b"x", queue_id=queue_id)
    store.commit()
    before = len(bench.files.operations)
    store._checkpoints.write_now()
    written = [
        int(done.path.split("/")[-2])
        for done in bench.files.operations[before:]
        if done.kind == "write" and "/consumequeue/" in done.path
    ]
    assert written == order
