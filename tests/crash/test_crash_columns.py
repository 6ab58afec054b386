"""After any crash, a filter agrees with the log, whatever happened to the files of its columns.

Power losses and kills occur at any moment, also while files are written. Lost messages are sent
again with the same sizes and other properties. A failure names its seed. The mutant shows that
these tests can fail.
"""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from simulation.stepped import ManualClock
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreError
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.record.codec import decode_records, encode_properties
from sluicemq.store.columns import blocks as columns_blocks
from sluicemq.store.columns import file as columns_file
from sluicemq.store.columns import scan as columns_scan
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles, PowerLost

SEEDS = int(os.environ.get("SLUICEMQ_EXAMPLES", "60"))
HOST = bytes(8)
EXPRESSION = "n = '7' OR n = '3'"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_blocks, "BLOCK_ROWS", 16)
    monkeypatch.setattr(columns_blocks, "SLOT_ROWS", 4)
    monkeypatch.setattr(columns_file, "PROOF_ROWS", 4)
    monkeypatch.setattr(columns_scan, "ROWS_MIN", 1)


class Machine:
    """A store on a simulated disk that loses power."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.files = CrashableFiles()
        self.clock = ManualClock()
        self.config = StoreConfig(
            root="/store", commit_log_file_bytes=4096, consume_queue_file_bytes=400,
            flush_sync=self.rng.random() < 0.3, index_enable=False,
        )  # fmt: skip
        self.store = self.open()

    def open(self) -> Store:
        return Store.open(self.config, files=self.files, clock=self.clock)

    def live(self) -> None:
        """Append, seal and read some times. Raises PowerLost when the disk loses power."""
        for _ in range(self.rng.randint(1, 8)):
            for _ in range(self.rng.randint(1, 20)):
                digit = str(self.rng.randrange(10))
                properties = encode_properties({"n": digit, "m": digit})
                self.store.writer.append("T", 0, b"body", properties, 0, 0, 0, 1, HOST, HOST)
            self.store.commit()
            self.clock.advance(self.rng.choice([0.0, 2.0]))
            if self.rng.random() < 0.6:
                self.store.publish(self.store.sync())
            self.store.tick()
            if self.rng.random() < 0.6:
                self.seal()

    def seal(self) -> None:
        self.store.columns.scan_for("T")
        for step in self.store.columns.seal_blocks():
            if callable(step):
                step()

    def crash(self) -> None:
        self.files.power_fails_after = None
        self.files = self.files.crash(self.rng) if self.rng.random() < 0.7 else self.files.kill()
        self.store = self.open()

    def check(self) -> None:
        """Check that the filter delivers exactly the messages that match."""
        low, high = self.store.queue_offsets("T", 0)
        message_filter = compile_sql92(EXPRESSION)
        assert self.read(low, high, message_filter) == [
            (offset, n) for offset, n in self.read(low, high, None) if n in "73"
        ]

    def read(self, offset: int, end: int, message_filter: Any) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        while offset < end:
            result = self.store.reader.read("T", 0, offset, 100, 1 << 20, message_filter)
            messages = decode_records(b"".join(result.data))
            found += [(message.queue_offset, message.properties["n"]) for message in messages]
            offset = result.next_offset
        return found


def run(seed: int) -> Iterator[Machine]:
    machine = Machine(seed)
    for _ in range(4):
        if machine.rng.random() < 0.7:
            machine.files.power_fails_after = machine.rng.randrange(300)
        with contextlib.suppress(PowerLost, StoreError, OSError):
            machine.live()
        machine.crash()
        machine.check()
        yield machine


@pytest.mark.parametrize("seed", range(SEEDS))
def test_filters_are_correct_after_a_crash(seed: int) -> None:
    for machine in run(seed):
        machine.seal()
        machine.check()
        left = machine.files.names("/store/columns/T/0")
        assert all(columns_file.parse_first_offset(name) is not None for name in left), left
    machine.store.close()


def test_blocks_that_are_sealed_before_they_are_durable_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant seals what a crash can undo, and does not check proofs."""
    monkeypatch.setattr(columns_file.SourceRows, "end_position", 0)
    monkeypatch.setattr(columns_file, "check_proofs", lambda *args: None)

    def runs() -> None:
        for seed in range(200):
            for _ in run(seed):
                pass

    with pytest.raises(AssertionError):
        runs()
