"""The production store over crashable files, driven by Hypothesis: append, commit, sync, crash.

A model holds what was committed, in order. After a crash (power loss: each unsynced write kept,
dropped, torn or scattered) the store must hold a prefix of that, with at least everything that was
acknowledged; after a kill, all of it. Every queue must agree with the log, and under SYNC_FLUSH a
reader must never have seen what a crash took away. The last tests plant bugs: they must be found.
"""

import random
import struct
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sluicemq.config import StoreConfig
from sluicemq.errors import SluiceError, StoreError
from sluicemq.record.codec import decode_records
from sluicemq.store import dispatch, segments
from sluicemq.store.log import CommitLog
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
QUEUES = (("A", 0), ("A", 1), ("B", 0))
SEEDS = st.integers(0, 1 << 30)
SETTINGS = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
Key = tuple[str, int]


class StillClock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return self.ms / 1000


def small_config(flush_sync: bool) -> StoreConfig:
    return StoreConfig(
        root="/store",
        commit_log_file_bytes=2048,
        consume_queue_file_bytes=200,
        flush_sync=flush_sync,
    )


def read_queue(store: Store, key: Key) -> list[tuple[int, bytes]]:
    """(physical offset, body) of all visible messages; offsets and names are checked."""
    low, high = store.queue_offsets(*key)
    messages = []
    while low + len(messages) < high:
        result = store.reader.read(*key, low + len(messages), 1000, 1 << 20)
        assert result.count > 0, (key, result)
        messages += decode_records(b"".join(result.data))
    assert [m.queue_offset for m in messages] == list(range(low, high))
    assert {(m.topic, m.queue_id) for m in messages} <= {key}
    return [(m.physical_offset, m.body) for m in messages]


class StoreMachine(RuleBasedStateMachine):
    """One store and the model of it."""

    flush_sync = False

    @initialize(flush_sync=st.booleans())
    def start(self, flush_sync: bool) -> None:
        self.flush_sync = flush_sync
        self.clock = StillClock()
        self.files = self.make_files()
        self.serial = 0
        self.turn: list[tuple[Key, bytes]] = []
        self.written: list[tuple[Key, bytes, int]] = []  # with the end of the turn
        self.synced_end = 0
        self.seen = 0  # how many of `written` a reader could see
        self.open()

    def make_files(self) -> CrashableFiles:
        return CrashableFiles()

    def open(self) -> None:
        self.store = Store.open(small_config(self.flush_sync), files=self.files, clock=self.clock)

    @rule(key=st.sampled_from(QUEUES), size=st.integers(0, 200) | st.integers(1000, 1600))
    def append(self, key: Key, size: int) -> None:
        self.serial += 1
        body = struct.pack(">i", self.serial) + bytes([self.serial % 256]) * size
        self.store.writer.append(*key, body, b"", 0, 0, 0, 1, HOST, HOST)
        self.turn.append((key, body))

    @rule(key=st.sampled_from(QUEUES), count=st.integers(1, 4))
    def append_batch(self, key: Key, count: int) -> None:
        bodies = []
        for _ in range(count):
            self.serial += 1
            bodies.append(struct.pack(">i", self.serial) * 5)
        self.store.writer.append_batch(*key, [(0, b, b"", 0) for b in bodies], 0, 1, HOST, HOST)
        self.turn += [(key, body) for body in bodies]

    @rule()
    def commit(self) -> None:
        end = self.store.commit()
        self.written += [(key, body, end) for key, body in self.turn]
        self.turn.clear()
        if not self.flush_sync:
            self.seen = len(self.written)

    @rule()
    def sync(self) -> None:
        self.synced_end = end = self.store.sync()
        if self.flush_sync:
            self.store.publish(end)
            self.seen = len(self.durable())

    @rule(seconds=st.sampled_from([0, 1, 2, 61]))
    def tick(self, seconds: int) -> None:
        self.clock.ms += seconds * 1000
        self.store.tick()

    @rule(kind=st.sampled_from(["write", "truncate", "create"]), written=st.integers(0, 600))
    def failing_commit(self, kind: str, written: int) -> None:
        """The disk refuses a commit after some bytes: the turn never was."""
        self.files.fail_next(kind, 28, path_part="commitlog", written=written)
        before = self.store.written_offset
        try:
            end = self.store.commit()
        except StoreError:
            assert self.store.written_offset == before
        else:
            self.written += [(key, body, end) for key, body in self.turn]
            if not self.flush_sync:
                self.seen = len(self.written)
        self.turn.clear()
        self.files.clear_faults()

    @rule(seed=SEEDS)
    def crash(self, seed: int) -> None:
        self.files = self.files.crash(random.Random(seed))
        self.recover(at_least=len(self.durable()))

    @rule()
    def kill(self) -> None:
        self.files = self.files.kill()
        self.recover(at_least=len(self.written))

    @rule()
    def close(self) -> None:
        end = self.store.written_offset
        self.store.close()
        assert not self.files.exists("/store/abort")
        if self.turn:  # closing ends the turn
            end = 1 << 60
        self.written += [(key, body, end) for key, body in self.turn]
        self.recover(at_least=len(self.written))
        assert self.store.recovered.units_added == 0, "queues were complete when we stopped"

    @precondition(lambda self: bool(self.written))
    @rule(data=st.data())
    def lose_queue_file(self, data: Any) -> None:
        """Somebody removes a queue's file while the broker is down: it is built again."""
        if data.draw(st.booleans()):
            self.store.close()
            end = 1 << 60 if self.turn else 0
            self.written += [(key, body, end) for key, body in self.turn]
        self.files = self.files.kill()
        topics = self.files.names("/store/consumequeue")
        if topics:
            directory = f"/store/consumequeue/{topics[0]}/0"
            for name in self.files.names(directory):
                self.files.remove(f"{directory}/{name}")
        self.recover(at_least=len(self.written))

    def durable(self) -> list[tuple[Key, bytes, int]]:
        return [entry for entry in self.written if entry[2] <= self.synced_end]

    def recover(self, *, at_least: int) -> None:
        self.turn.clear()
        self.open()
        found = sorted(
            (place, key, body) for key in QUEUES for place, body in read_queue(self.store, key)
        )
        expected = [(key, body) for key, body, _ in self.written[: len(found)]]
        assert [(key, body) for _, key, body in found] == expected, "not a prefix of the commits"
        assert len(found) >= at_least, f"{at_least} were acknowledged, {len(found)} are there"
        if self.flush_sync:
            assert len(found) >= self.seen, "a reader saw what is lost now"
        self.check_log(found)
        self.synced_end = self.store.synced_offset
        self.written = [(key, body, 0) for key, body in expected]
        self.seen = len(self.written)

    def check_log(self, found: list[tuple[int, Key, bytes]]) -> None:
        """The log, walked by itself, holds what the queues hold and nothing else."""
        log = CommitLog(self.files, "/store/commitlog", 2048)
        log.segments.load()
        places = [record.position for record in log.scan(0)]
        assert places == [place for place, _, _ in found]

    @invariant()
    def readers_see_what_is_visible(self) -> None:
        if not hasattr(self, "store"):
            return
        visible = sum(self.store.queue_offsets(*key)[1] for key in QUEUES)
        assert visible == self.seen
        if self.flush_sync:
            assert self.seen <= len(self.durable())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.kill()


TestStoreCrash = StoreMachine.TestCase
TestStoreCrash.settings = SETTINGS


class LyingDisk(StoreMachine):
    """The planted bug: fsync does nothing."""

    def make_files(self) -> CrashableFiles:
        files = CrashableFiles()
        files.syncs_lie = True
        return files


class EarlyPublish(StoreMachine):
    """The planted bug: under SYNC_FLUSH readers are woken before the fsync."""

    @rule()
    def commit(self) -> None:
        super().commit()
        self.store.publish(1 << 60)
        self.seen = len(self.written)


FIND = settings(
    SETTINGS,
    max_examples=300,
    stateful_step_count=30,
    phases=[Phase.generate],
    derandomize=True,
    report_multiple_bugs=False,
)


@pytest.mark.parametrize("machine", [LyingDisk, EarlyPublish])
def test_planted_bug_in_the_order_of_syncs_is_found(machine: type[StoreMachine]) -> None:
    with pytest.raises((AssertionError, SluiceError)):
        run_state_machine_as_test(machine, settings=FIND)


def test_planted_recovery_without_crc_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dispatch, "sweep_records", lambda log, start, *_, **__: log.scan(start, check_crc=False)
    )
    found = 0
    for seed in range(400):  # a body that misses a sector in the middle: one crash in eighty
        machine = StoreMachine()
        machine.start(flush_sync=False)
        machine.append(("A", 0), 1400)
        machine.commit()
        try:
            machine.crash(seed)
        except AssertionError:
            found += 1
    assert found > 0


def test_planted_tail_that_is_not_zeroed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments.Segment, "zero_range", lambda *_: False)
    with pytest.raises((AssertionError, SluiceError)):
        run_state_machine_as_test(StoreMachine, settings=FIND)
