"""Many queues: what a store holds open is bounded, however many queues and files are read."""

import os
from pathlib import Path
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.files import SystemFiles
from sluicemq.files.overlay import OverlayFiles
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
    store._queues.flush()
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
        store._queues.flush()
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
    store._queues.flush()
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
    written = {o.path for o in bench.files.operations if o.kind in ("write", "truncate", "sync")}
    assert {path for path in written if "consumequeue" in path} == {
        "/store/consumequeue/T/7/00000000000000000000"
    }
