"""Bugs that the simulator found (tests/crash/test_simulation.py), each as a test of its own."""

import contextlib
import errno
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from sluicemq.errors import StoreError
from sluicemq.store.directory import read_checkpoint
from sluicemq.testing.files import PowerLost


def crash(bench: Any, seed: int) -> None:
    bench.files = bench.files.crash(random.Random(seed))
    bench.open()


def crashes(bench: Any, count: int) -> Iterator[int]:
    """The same power loss, with so many outcomes."""
    files = bench.files
    for seed in range(count):
        bench.files = files.crash(random.Random(seed))
        bench.open()
        yield seed


@pytest.mark.parametrize("end", ["power loss", "kill", "stop"])
def test_topic_deleted_last_does_not_come_back(bench: Any, end: str) -> None:
    """The log was walked from the last unit on, and found the deleted topic's records there."""
    bench.open()
    bench.send(b"kept", topic="A")
    bench.send(b"gone")
    bench.store.delete_topic("T")
    if end == "power loss":
        crash(bench, 1)
    else:
        bench.reopen(kill=end == "kill")
    assert bench.store.queue_offsets("T", 0) == (0, 0)
    assert bench.bodies(topic="A") == [b"kept"]


def test_topics_stay_deleted_when_all_queues_are_built_anew(bench: Any) -> None:
    bench.open()
    bench.send(b"old", b"old")
    bench.send(b"kept", topic="A")
    bench.store.delete_topic("T")
    bench.send(b"new")
    bench.files = bench.files.kill()
    bench.files.remove("/store/checkpoint")
    for name in bench.files.names("/store/consumequeue/A/0"):
        bench.files.remove(f"/store/consumequeue/A/0/{name}")
    bench.open()
    assert bench.bodies() == [b"new"]
    assert bench.bodies(topic="A") == [b"kept"]


@pytest.mark.parametrize("after", range(30))
def test_deletion_that_the_power_interrupts_brings_no_other_topic_back(
    bench: Any, after: int
) -> None:
    bench.open()
    bench.send(b"gone", topic="A")
    bench.send(b"gone", b"gone")
    bench.store.delete_topic("A")
    bench.files.power_fails_after = after
    with contextlib.suppress(PowerLost):
        bench.store.delete_topic("T")
    for _ in crashes(bench, 5):
        assert bench.store.queue_offsets("A", 0) == (0, 0)
        assert bench.bodies() in ([], [b"gone", b"gone"])


def test_made_again_topic_counts_though_the_log_lost_its_end(bench: Any) -> None:
    """The deletion must not speak of a place in the log that a power loss takes back."""
    bench.open()
    bench.send(b"gone" * 20)
    bench.files.power_fails_after = 12
    with pytest.raises(PowerLost):
        bench.store.delete_topic("T")
    crash(bench, 3)
    bench.send(b"new")
    bench.reopen(kill=True)
    assert bench.bodies()[-1] == b"new"


@pytest.mark.parametrize("step", ["write", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("is_doubtful", [False, True])
def test_deletion_that_was_refused_does_not_happen_at_the_next_start(
    bench: Any, step: str, is_doubtful: bool
) -> None:
    """The entry was in the table, and in the file when the name alone could not be synced."""
    store = bench.open()
    bench.send(b"kept")
    for _ in range(1 + is_doubtful):
        bench.files.fail_next(step, errno.EIO, path_part="deletedTopics")
        bench.files.fail_next(step, errno.EIO, path_part="/store/config")
    with pytest.raises(StoreError):
        store.delete_topic("T")
    bench.files.clear_faults()
    if step == "sync_directory" and is_doubtful:
        with pytest.raises(StoreError):  # nobody knows what the next start finds
            bench.send(b"refused")
        return
    store.delete_topic("U")
    assert bench.bodies() == [b"kept"]
    for _ in crashes(bench, 10):
        assert bench.bodies() == [b"kept"]


def test_broken_list_of_deleted_topics_is_told_and_no_reason_not_to_start(
    bench: Any, caplog: Any
) -> None:
    bench.open()
    bench.send(b"x")
    bench.store.close()
    bench.files.put("/store/config/deletedTopics.json", b"[]")
    bench.open()
    assert bench.bodies() == [b"x"]
    assert "deletedTopics.json cannot be read" in caplog.text


def test_entries_go_with_the_log_that_they_speak_of(bench: Any) -> None:
    store = bench.open()
    bench.send(b"x")
    store.delete_topic("T")
    end = store.written_offset
    store._queues.deleted.add("U", end + 5, end)
    table = json.loads(bench.files.content("/store/config/deletedTopics.json"))
    assert table == {"U": end + 5}


def test_file_of_the_log_whose_name_could_not_be_synced_is_not_used(bench: Any) -> None:
    """The commit failed, and the next one wrote into the same file: it was gone with the power."""
    store = bench.open()
    bench.files.fail_next("sync_directory", errno.EIO, path_part="commitlog")
    bench.append(b"refused")
    with pytest.raises(StoreError):
        store.commit()
    bench.send(b"stored")
    store.sync()
    for _ in crashes(bench, 20):
        assert bench.bodies() == [b"stored"]


def test_units_cut_at_a_start_do_not_come_back_after_an_orderly_stop(bench: Any) -> None:
    """The zeros were not synced before `abort` went."""
    bench.open()
    bench.send(b"x")
    bench.reopen(kill=True)  # the mark is behind x
    bench.send(b"y")
    bench.clock.ms += 2000
    bench.store.tick()  # the unit of y is in its file
    bench.files = bench.files.kill()
    log = bench.files.open("/store/commitlog/00000000000000000000")
    log.pwrite(bytes(200), 94)  # the second record
    bench.open()
    assert bench.bodies() == [b"x"]
    bench.send(b"z", topic="Z")  # at the place of y
    bench.store.close()
    done = [(operation.kind, operation.path) for operation in bench.files.operations]
    path = "/store/consumequeue/T/0/00000000000000000000"
    assert ("write", path) in done, "zeros, where the unit of y was"
    assert ("sync", path) in done[done.index(("write", path)) :]
    for _ in crashes(bench, 20):
        assert bench.bodies() == [b"x"]


def test_checkpoint_whose_fsync_failed_is_not_written_later(bench: Any) -> None:
    """The next fsync says yes, and has saved nothing of what the failed one was to save."""
    store = bench.open()
    bench.send(b"x")
    bench.clock.ms += 20_000
    store.tick()
    bench.files.fail_next("sync", errno.EIO, path_part="consumequeue")
    with pytest.raises(StoreError):
        store.sync()
    with pytest.raises(StoreError, match="refuses writes"):
        store.delete_topic("T")
    mark = read_checkpoint(bench.files, "/store/checkpoint").latest
    assert mark is None or mark.log_offset == 0


def test_index_file_without_any_size_is_the_trace_of_a_crash(bench: Any) -> None:
    bench.open()
    bench.send(b"x", properties={"KEYS": "k"})
    bench.store.close()
    bench.files.put("/store/index/20301231235959999", b"")
    bench.open()
    assert len(bench.store.keys.find("T", "k", 10, 0, 1 << 60).records) == 1


def test_old_bytes_behind_the_mark_are_no_exchanged_file(bench: Any) -> None:
    """A file that was never used held a copy of the first one's record where it begins."""
    bench.open()
    bench.send(b"x")
    first = bench.files.content("/store/commitlog/00000000000000000000")
    bench.files = bench.files.kill()
    bench.files.put(f"/store/commitlog/{len(first):020d}", first)
    bench.open()
    assert bench.bodies() == [b"x"]
    bench.send(b"y" * 3000, b"z" * 3000)
    bench.reopen()
    assert [body[:1] for body in bench.bodies()] == [b"x", b"y", b"z"]
