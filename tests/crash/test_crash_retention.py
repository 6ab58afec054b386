"""Deletion of old files under crashes: the production store over crashable files, seeded.

The model holds every message with its place in the log. The log's start only moves to file ends;
whatever the moment of a power loss or kill (also between the steps of one clean-up), afterwards

    every queue holds exactly the model's messages from the log's start on, in order
    what was synced and lies behind the start is there; a file whose removal is durable is gone
    no queue begins to count anew: an offset is never given twice
"""

import os
import random
import struct
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.errors import SluiceError, StoreError
from sluicemq.record.codec import decode_records
from sluicemq.store import retain as retention
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
KEYS = (("A", 0), ("A", 1), ("B", 0))
FILE_BYTES = 2048
HOUR_MS = 3_600_000
SEEDS = int(os.environ.get("SLUICEMQ_EXAMPLES", "150"))
START_MS = 1_700_049_600_000
Key = tuple[str, int]


class StillClock:
    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return self.ms / 1000


class Life:
    """One store through many deletions and crashes."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = StillClock()
        self.files = CrashableFiles()
        self.files.clock = self.clock
        self.flush_sync = rng.random() < 0.5
        self.serial = 0
        self.turn: list[tuple[Key, int, int, bytes]] = []
        self.written: list[tuple[Key, int, int, bytes, int]] = []  # key, offset, place, body, end
        self.safe_end = 0
        self.gone = 0  # the log began here when its directory was last synced
        self.ends = dict.fromkeys(KEYS, 0)  # of what is safe, or was ever recovered
        self.open()

    def open(self) -> None:
        config = StoreConfig(
            root="/store",
            commit_log_file_bytes=FILE_BYTES,
            consume_queue_file_bytes=200,
            flush_sync=self.flush_sync,
            file_reserved_hours=1,
            delete_hours=tuple(f"{hour:02d}" for hour in range(24)),
        )
        self.store = Store.open(config, files=self.files, clock=self.clock)

    # --- what happens

    def step(self) -> None:
        act = self.rng.choices(
            [self.send, self.sync, self.mark, self.clean, self.power_loss, self.kill, self.close],
            [12, 4, 3, 4, 1, 1, 1],
        )[0]
        act()

    def send(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.serial += 1
            key = self.rng.choices(KEYS, [9, 4, 1])[0]
            body = struct.pack(">i", self.serial) + b"x" * self.rng.randint(0, 700)
            place, offset = self.store.writer.append(*key, body, b"", 0, 0, 0, 1, HOST, HOST)
            self.turn.append((key, offset, place, body))
        end = self.store.commit()
        self.written += [(*entry, end) for entry in self.turn]
        self.turn.clear()

    def sync(self) -> None:
        end = self.store.sync()
        if self.flush_sync:
            self.store.publish(end)
        self.safe_end = max(self.safe_end, end)
        self.note_ends()

    def note_ends(self) -> None:
        for key, offset, _, _, end in self.written:
            if end <= self.safe_end:
                self.ends[key] = max(self.ends[key], offset + 1)

    def mark(self) -> None:
        """The timer comes by; as a rule there is a new mark after it."""
        self.clock.ms += self.rng.choice([1_000, 11_000, 61_000])
        self.store.tick()
        if self.rng.random() < 0.7:
            self.sync()

    def clean(self) -> None:
        """A run, by age or by force, which may be cut off between two of its steps."""
        self.clock.ms += self.rng.choice([0, HOUR_MS // 2, 2 * HOUR_MS])
        self.files.total_bytes = 1_000_000
        self.files.free_bytes = self.rng.choice([500_000, 500_000, 110_000])
        if self.rng.random() < 0.1:
            self.files.fail_next("remove", 13)
        stop = self.rng.random() < 0.3
        for step in self.store.retention.clean():
            if stop and self.rng.random() < 0.3:
                break
            if callable(step):
                step()
                if self.removed_all():
                    self.gone = self.store.log_start
        self.files.free_bytes = None
        self.files.clear_faults()

    def removed_all(self) -> bool:
        names = self.files.names("/store/commitlog")
        return not names or names[0] == f"{self.store.log_start:020d}"

    # --- what survives

    def power_loss(self) -> None:
        self.files = self.files.crash(self.rng)
        self.recover()

    def kill(self) -> None:
        self.safe_end = self.store.written_offset
        self.files = self.files.kill()
        self.recover()

    def close(self) -> None:
        self.safe_end = self.store.written_offset
        self.store.close()
        self.recover()

    def recover(self) -> None:
        self.note_ends()
        self.open()
        start = self.store.log_start
        assert start % FILE_BYTES == 0
        assert start >= self.gone, "a file is back that was gone for good"
        end = self.store.written_offset
        assert end >= self.safe_end, "what was synced is lost"
        self.written = [entry for entry in self.written if entry[2] < end]
        for key in KEYS:
            self.check_queue(key, start)
        self.safe_end = self.store.synced_offset
        self.note_ends()

    def check_queue(self, key: Key, start: int) -> None:
        own = [entry for entry in self.written if entry[0] == key]
        there = [(offset, place, body) for _, offset, place, body, _ in own if place >= start]
        low, high = self.store.queue_offsets(*key)
        found: list[Any] = []
        while low + len(found) < high:
            result = self.store.reader.read(*key, low + len(found), 1000, 1 << 20)
            assert result.count, (key, result)
            found += decode_records(b"".join(result.data))
        assert [(m.queue_offset, m.physical_offset, m.body) for m in found] == there
        assert high >= self.ends[key], f"{key} ends at {high}, it was at {self.ends[key]}"


def live(seed: int, steps: int = 60) -> Life:
    life = Life(seed)
    for _ in range(steps):
        life.step()
    life.kill()
    return life


def test_no_crash_during_deletion_breaks_the_store() -> None:
    deleted = 0
    for seed in range(SEEDS):
        try:
            deleted += live(seed).store.log_start > 0
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert deleted > SEEDS // 2, "most lives saw deletions"


def test_planted_removal_of_queue_files_before_the_log_s_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queue files go while the log's file may still come back: records without units."""
    original = retention.Retention._delete_file

    def hasty(self: Any, file: Any, why: str) -> Any:
        for queue in list(self._queues):
            queue.update_offset_min(file.end)
            while (
                len(queue.segments) > 1
                and queue.segments.start + queue.segments.file_bytes <= queue.offset_min * 20
            ):
                path = queue.segments.detach_first()
                self._files.remove(path)
                self._files.sync_directory(path.rpartition("/")[0])
        yield 0.0
        yield from original(self, file, why)

    monkeypatch.setattr(retention.Retention, "_delete_file", hasty)
    found_by_a_seed()


def test_planted_removal_without_a_sync_of_the_directory_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(self: Any) -> None:
        while self._paths_to_remove:
            self._files.remove(self._paths_to_remove.pop(0))

    monkeypatch.setattr(retention.Retention, "_remove_files", hasty)
    found_by_a_seed()


def test_planted_deletion_of_what_is_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        retention.Retention, "removable_end", lambda self: self._log.written_offset + 1
    )
    found_by_a_seed()


def found_by_a_seed() -> None:
    for seed in range(150):
        try:
            live(seed)
        except (AssertionError, SluiceError, StoreError, OSError):
            return
    pytest.fail("no seed found it")
