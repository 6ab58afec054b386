"""Mutation tests: each bug is planted into the production classes and a seed has to find it.

The histories are those of tests/crash/test_simulation.py, unchanged: what is missing, invented or
out of order is found by what a client or a reader sees after a restart, not by looking inside. The
number beside a bug is a seed that finds it; any other that does will do.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from simulation.crashes.broker_world import BROKER
from simulation.crashes.plan import Kind, run_steps, steps_of
from simulation.crashes.pop_world import POP
from simulation.crashes.runs import LENGTH
from simulation.crashes.store_world import STORE, STORM
from sluicemq.broker import documents
from sluicemq.broker.group_commit import GroupCommit
from sluicemq.broker.pop.checkpoints import PopCheckpoints
from sluicemq.broker.pop.popped import OpenCheckpoints, PopRecovery
from sluicemq.broker.table import TABLE
from sluicemq.files import Files
from sluicemq.net.dispatch import Peer
from sluicemq.store import dispatch, segments
from sluicemq.store import log as scan
from sluicemq.store.checkpoints import Checkpointer
from sluicemq.store.directory import DeletedTopics
from sluicemq.store.log import CommitLog, LogRecord
from sluicemq.store.queues import ConsumeQueues, Queue
from sluicemq.store.segments import Segment, SegmentFiles
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFile
from sluicemq.wire.codes import RequestCode

SEEDS = 2500
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def goes_wrong(kind: Kind, seed: int) -> bool:
    try:
        run_steps(kind, seed, steps_of(kind, seed, LENGTH))
    except Exception:
        return True
    return False


# --- names


def no_fsync_of_the_log_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_file(log: CommitLog, position: int) -> Segment:
        files = log.segments
        if not files.files.exists(files.directory):
            files.files.make_directory(files.directory, durable=False)
        segment = files.add(position - position % files.file_bytes)
        segment.file().sync()
        return segment

    monkeypatch.setattr(CommitLog, "add_file", add_file)


def no_fsync_of_the_queue_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Checkpointer._sync_path

    def sync_path(checkpoints: Checkpointer, path: str) -> None:
        if segments.is_segment_name(path.rpartition("/")[2]):
            original(checkpoints, path)

    monkeypatch.setattr(Checkpointer, "_sync_path", sync_path)


def no_fsync_of_the_directory_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace_text(files: Files, path: str, text: str) -> None:
        files.make_directory(path.rpartition("/")[0])
        file = files.open(path + ".tmp", create=True)
        file.truncate(len(text.encode()))
        file.pwrite(text.encode(), 0)
        file.sync()
        if files.exists(path):
            files.rename(path, path + ".bak")
        files.rename(path + ".tmp", path)

    monkeypatch.setattr(documents, "replace_text", replace_text)


def no_fsync_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace_text(files: Files, path: str, text: str) -> None:
        files.make_directory(path.rpartition("/")[0])
        file = files.open(path + ".tmp", create=True)
        file.truncate(len(text.encode()))
        file.pwrite(text.encode(), 0)
        if files.exists(path):
            files.rename(path, path + ".bak")
        files.rename(path + ".tmp", path)
        files.sync_directory(path.rpartition("/")[0])

    monkeypatch.setattr(documents, "replace_text", replace_text)


# --- the order of writing and syncing


def a_disk_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CrashableFile, "sync", lambda _file: None)


def answering_before_the_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GroupCommit.send_after_commit

    def hold(
        group_commit: GroupCommit, peer: Peer, answer: bytes, waits: bool = True, *rest: Any
    ) -> None:
        original(group_commit, peer, answer, False, *rest)

    monkeypatch.setattr(GroupCommit, "send_after_commit", hold)
    plain = TABLE[RequestCode.SEND_MESSAGE_V2]._replace(fast_path=None)
    monkeypatch.setitem(TABLE, RequestCode.SEND_MESSAGE_V2, plain)


def waking_readers_before_the_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Store.commit

    def commit(store: Store) -> int:
        end = original(store)
        store.publish(end)
        return end

    monkeypatch.setattr(Store, "commit", commit)


def queue_written_beyond_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a turn that is not committed yet."""
    original = Queue.flush

    def flush(queue: Queue) -> list[str]:
        queue.committed_offset, committed = queue.next_offset, queue.committed_offset
        try:
            return original(queue)
        finally:
            queue.committed_offset = committed

    original_flush = ConsumeQueues.flush

    def flush_all(queues: ConsumeQueues, queue: Queue) -> None:
        for one in [queue, *queues]:
            queues.dirty[one] = None
            original_flush(queues, one)

    monkeypatch.setattr(Queue, "flush", flush)
    monkeypatch.setattr(ConsumeQueues, "flush", flush_all)


def queue_kept_beyond_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Queue.load

    def load(queue: Queue, *, before: int | None = None, **rest: bool) -> None:
        original(queue, before=None, **rest)

    monkeypatch.setattr(Queue, "load", load)
    monkeypatch.setattr(ConsumeQueues, "truncate_to_log", lambda _queues, _end: None)


def mark_written_before_the_fsync_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Checkpointer._request_checkpoint

    def request(checkpoints: Checkpointer, values: tuple[int, ...]) -> None:
        original(checkpoints, values)
        log: Any = checkpoints._log
        log.sync = lambda: log.written_offset
        try:
            checkpoints.write_due()
        finally:
            del log.sync

    monkeypatch.setattr(Checkpointer, "_request_checkpoint", request)


def mark_written_before_the_fsync_of_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointer, "_sync_path", lambda _checkpoints, _path: None)


def failed_checkpoint_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync that failed is called again, and says yes."""
    monkeypatch.setattr(CommitLog, "check_writable", lambda _log: None)


# --- recovery


def no_crc_check_on_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dispatch.sweep_records
    monkeypatch.setattr(
        dispatch, "sweep_records", lambda *args, **kw: original(*args, **{**kw, "check_crc": False})
    )


def tail_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "zero_range", lambda *_: False)


def stale_offset_check_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = scan.parse_log_record

    def parse_log_record(view: memoryview, at: int, base: int, **rest: bool) -> LogRecord | None:
        if len(view) - at < 36:
            return None
        stored = int.from_bytes(view[at + 28 : at + 36], "big")
        found = original(view, at, stored - at, **rest)
        return None if found is None else found._replace(position=base + at)

    monkeypatch.setattr(scan, "parse_log_record", parse_log_record)


def later_files_cut_without_order(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SegmentFiles.truncate

    def cut(files: SegmentFiles, offset: int) -> bool:
        files._cuts_in_order = False
        return original(files, offset)

    monkeypatch.setattr(SegmentFiles, "truncate", cut)


def file_kept_whose_name_could_not_be_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentFiles, "drop_last", lambda _files: None)


def failed_turn_not_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommitLog, "_zero_failed_writes", lambda _log: None)


def deleted_topics_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeletedTopics, "is_live", lambda *_: True)


# --- pops


def offset_committed_before_the_checkpoint_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def record_pop(
        checkpoints: PopCheckpoints,
        group: str,
        topic: str,
        queue_id: int,
        offsets: Sequence[int],
        next_offset: int,
        *rest: Any,
        **named: Any,
    ) -> int:
        revive_queue = original(
            checkpoints, group, topic, queue_id, offsets, next_offset, *rest, **named
        )
        checkpoints._offsets.put(group, topic, queue_id, next_offset)
        return revive_queue

    original = PopCheckpoints.record_pop
    monkeypatch.setattr(PopCheckpoints, "record_pop", record_pop)


def groups_not_moved_by_checkpoints_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PopRecovery, "_note_next_offset", lambda *_: None)


def acknowledgements_of_the_revive_topic_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PopRecovery, "_read_revive_queue", lambda *_, **__: None)


def given_back_without_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PopCheckpoints.deliver

    def deliver(checkpoints: PopCheckpoints, work: Any) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(PopCheckpoints, "_append", lambda *_: None)
            original(checkpoints, work)

    monkeypatch.setattr(PopCheckpoints, "deliver", deliver)


def a_second_late(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = OpenCheckpoints.next_deadline_ms

    def next_deadline_ms(table: OpenCheckpoints) -> int | None:
        found = original.fget(table)
        return None if found is None else found + 1000

    monkeypatch.setattr(OpenCheckpoints, "next_deadline_ms", property(next_deadline_ms))


@pytest.mark.timeout(400)  # only where a change of the code has made the known seed another history
@pytest.mark.parametrize(
    ("kind", "plant", "known"),
    [
        (STORE, no_fsync_of_the_log_directory, 2),
        (STORE, no_fsync_of_the_queue_directories, 7),
        (BROKER, no_fsync_of_the_directory_of_a_table, 4),
        (BROKER, no_fsync_of_a_table, 0),
        (STORE, a_disk_that_lies, 0),
        (BROKER, a_disk_that_lies, 0),
        (BROKER, answering_before_the_fsync, 6),
        (STORE, waking_readers_before_the_fsync, 0),
        (BROKER, waking_readers_before_the_fsync, 6),
        (STORM, queue_written_beyond_the_log, 1840),
        (STORM, queue_kept_beyond_the_log, 74),
        (STORE, mark_written_before_the_fsync_of_the_log, 19),
        (STORE, mark_written_before_the_fsync_of_queues, 2),
        (STORE, failed_checkpoint_tried_again, 123),
        (STORE, no_crc_check_on_recovery, 50),
        (STORE, tail_not_zeroed, 79),
        (STORE, stale_offset_check_removed, 8),
        (STORM, later_files_cut_without_order, 0),
        (STORM, file_kept_whose_name_could_not_be_synced, 861),
        (STORE, failed_turn_not_wiped, 79),
        (STORE, deleted_topics_forgotten, 493),
        (POP, offset_committed_before_the_checkpoint_is_on_disk, 46),
        (POP, groups_not_moved_by_checkpoints_at_the_start, 2),
        (POP, acknowledgements_of_the_revive_topic_not_read, 5),
        (POP, given_back_without_an_acknowledgement, 5),
        (POP, a_second_late, 13),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", "")),
)
def test_planted_bug_is_found_by_a_seed(
    kind: Kind, plant: Plant, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    seeds = (seed for seed in (known, *range(SEEDS)) if goes_wrong(kind, seed))
    seed = next(seeds, None)
    assert seed is not None, f"{SEEDS} histories of the {kind.name} world do not notice it"
    monkeypatch.undo()
    assert not goes_wrong(kind, seed), "it is the bug that went wrong, not the product"
    if seed != known:
        print(f"{plant.__name__} is found by seed {seed} first: write it into this file")
