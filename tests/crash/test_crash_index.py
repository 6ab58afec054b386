"""After any crash the key index is what the log says: no entry lost, none too many, the same bytes
as if nothing had happened. Power losses at any moment, also while the index is restored or built.

A failure names its seed. The planted bugs at the end show that these tests can fail.
"""

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from simulation.index_model import IndexModel
from simulation.stepped import ManualClock
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreError
from sluicemq.record.codec import encode_properties
from sluicemq.store.index import file as index_file
from sluicemq.store.index.index import KeyIndex
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles

SEEDS = int(os.environ.get("SLUICEMQ_EXAMPLES", "60"))
HOST = bytes(8)
WORDS = ["Aa", "BB", "k1", "k2", "日本", "order-1"]


class Machine:
    """A store on a disk that crashes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.files = CrashableFiles()
        self.clock = ManualClock()
        self.config = StoreConfig(
            root="/store", commit_log_file_bytes=2048, consume_queue_file_bytes=400,
            index_slots=self.rng.choice([1, 7, 50]), index_entries=self.rng.choice([5, 40, 400]),
            flush_sync=self.rng.random() < 0.3,
        )  # fmt: skip
        self.sent: list[tuple[int, str, int, dict[str, str]]] = []
        self.store = self.open()

    def open(self) -> Store:
        return Store.open(self.config, files=self.files, clock=self.clock)

    def send(self) -> None:
        for _ in range(self.rng.randint(1, 30)):
            properties = {"UNIQ_KEY": f"{self.rng.randrange(10**6):06d}"}
            if self.rng.random() < 0.5:
                properties["KEYS"] = " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, 3)))
            if self.rng.random() < 0.1:
                properties = {}
            topic = self.rng.choice("TU")
            place, _ = self.store.writer.append(
                topic, 0, b"body", encode_properties(properties), 0, 0, 0, 1, HOST, HOST
            )
            self.sent.append((place, topic, self.clock.now_ms(), properties))
        self.store.commit()

    def step(self) -> None:
        match self.rng.choice(["send", "send", "send", "tick", "tick", "index", "sync", "stop"]):
            case "send":
                self.send()
            case "tick":
                self.clock.advance(self.rng.choice([0.3, 11, 61]))
                if self.store.tick() or self.rng.random() < 0.7:
                    self.store.sync()
            case "index":
                self.store.keys.catch_up(self.rng.choice([0, 300, 5000, 1 << 20]))
            case "sync":
                self.store.sync()
            case "stop":
                self.store.close()
                self.store = self.open()

    def crash(self) -> None:
        self.files = self.files.kill() if self.rng.random() < 0.2 else self.files.crash(self.rng)
        self.store = self.open()
        self.sent = [record for record in self.sent if record[0] < self.store.written_offset]

    def model(self) -> list[bytes]:
        model = IndexModel(self.config.index_slots, self.config.index_entries)
        for record in self.sent:
            model.add(*record)
        return model.files()

    def index(self) -> list[bytes]:
        """The files after an orderly stop."""
        self.store.close()
        self.store = self.open()
        names = self.files.names("/store/index")
        return [self.files.content(f"/store/index/{name}") for name in names]


def run(seed: int) -> None:
    machine = Machine(seed)
    for _ in range(machine.rng.randint(1, 4)):
        for _ in range(machine.rng.randint(0, 14)):
            machine.step()
        machine.crash()
        if machine.rng.random() < 0.5:
            machine.store.keys.catch_up(machine.rng.choice([0, 600, 1 << 21]))
    expected, ours = machine.model(), machine.index()
    assert len(ours) == len(expected), f"seed {seed}: {len(ours)} files, not {len(expected)}"
    for ours_data, model in zip(ours, expected, strict=True):
        assert ours_data[: len(model)] == model, f"seed {seed}"


def test_after_any_crash_the_index_is_what_the_log_says() -> None:
    for seed in range(SEEDS):
        run(seed)


def test_a_disk_that_refuses_an_index_file_only_delays_it() -> None:
    machine = Machine(1)
    machine.files.fail_next("create", path_part="/index/")
    machine.send()
    machine.store.tick()
    assert machine.store.keys.backlog_bytes > 0
    machine.send()
    machine.store.tick()
    assert machine.store.keys.backlog_bytes == 0
    expected, ours = machine.model(), machine.index()
    assert [data[: len(model)] for data, model in zip(ours, expected, strict=True)] == expected


@pytest.mark.parametrize("after", range(8))
def test_a_write_that_fails_in_the_middle_adds_no_key_twice(after: int) -> None:
    machine = Machine(3)
    machine.config = StoreConfig(
        root="/s", commit_log_file_bytes=4096, index_slots=3, index_entries=6
    )
    machine.store = machine.open()
    machine.send()
    writes = 0
    original = machine.files.take_fault

    def fault(kind: str, path: str) -> Any:
        nonlocal writes
        if kind == "write" and "/index/" in path:
            writes += 1
            if writes == after + 1:
                machine.files.fail_next("write", path_part="/index/")
        return original(kind, path)

    machine.files.take_fault = fault  # type: ignore[method-assign]
    machine.store.keys.catch_up(1 << 20)
    machine.store.keys.catch_up(1 << 20)
    machine.send()
    machine.store.close()
    names = machine.files.names("/s/index")
    ours = [machine.files.content(f"/s/index/{name}") for name in names]
    expected = machine.model()
    assert [data[: len(model)] for data, model in zip(ours, expected, strict=True)] == expected


# --- planted bugs: each has to be found


def no_restore(self: index_file.IndexFile, count: int, end_ms: int) -> Iterator[None]:
    yield from self.load_slots()


def sync_nothing(self: KeyIndex) -> list[str]:
    self._unsynced.clear()
    return []


def one_entry_more(self: KeyIndex) -> Any:
    mark = original_mark(self)
    return mark._replace(entries=mark.entries + 1)


original_mark = KeyIndex.current_mark


@pytest.mark.parametrize(
    ("target", "name", "bug"),
    [
        (index_file.IndexFile, "rebuild_slots", no_restore),
        (KeyIndex, "paths_to_sync", sync_nothing),
        (KeyIndex, "current_mark", one_entry_more),
    ],
    ids=["slots as the crash left them", "the mark before the fsync", "a mark too far"],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, target: type, name: str, bug: Any
) -> None:
    monkeypatch.setattr(target, name, bug)
    for seed in range(400):
        try:
            run(seed)
        except (AssertionError, StoreError, IndexError, ValueError, OSError):
            return
    pytest.fail("no seed finds the bug")
