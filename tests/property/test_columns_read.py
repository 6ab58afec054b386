"""A filtered read by columns returns the same messages and next offset as a read by records.

This is checked from every offset on, in random stores that are written, sealed and reopened in any
order.
"""

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.stepped import ManualClock
from sluicemq.config import StoreConfig
from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.selector import Selector
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.model.ids import tag_code
from sluicemq.record.codec import encode_properties
from sluicemq.store.columns import blocks as columns_blocks
from sluicemq.store.columns import file as columns_file
from sluicemq.store.columns import scan as columns_scan
from sluicemq.store.gather import SpanLimit
from sluicemq.store.queues import UNIT
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles

pytestmark = pytest.mark.slow

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
TEXTS = ["5", "-5", "5.0", "007", "abc", "true", "NaN", "杭州", "it's", "1e3", "2147483648", " 5"]
ATOMS = [
    "a > 5", "a >= 5.5", "a = 5", "a = '5'", "a <> 'abc'", "a IS NULL", "b IS NOT NULL", "a = b",
    "a BETWEEN -5 AND 7", "b IN ('abc', '5')", "b NOT IN ('abc')", "a CONTAINS '5'", "c = TRUE",
    "TAGS = 't1'", "KEYS = 'k1'", "UNIQ_KEY IS NOT NULL", "a < b", "missing IS NULL", "b", "-a > 1",
    "c STARTSWITH 't'", "b = '杭州'",
]  # fmt: skip
expressions = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=4,
)


class Records:
    """A filter without an engine for columns, which reads every record."""

    tag_codes = None
    reads_properties = True

    def __init__(self, expression: str) -> None:
        self.by_commit_log = compile_sql92(expression).matches

    def by_consume_queue(self, tag_code: int) -> bool:
        return True


@contextmanager
def small_blocks(rows_min: int, records_max: int) -> Iterator[None]:
    with (
        mock.patch.object(columns_blocks, "BLOCK_ROWS", 16),
        mock.patch.object(columns_blocks, "SLOT_ROWS", 4),
        mock.patch.object(columns_file, "PROOF_ROWS", 4),
        mock.patch.object(columns_scan, "ROWS_MIN", rows_min),
        mock.patch.object(columns_scan, "CHUNK_ROWS_MIN", 3),
        mock.patch.object(columns_scan, "PART_ROWS", 10),
        mock.patch.object(columns_scan, "RECORDS_MAX", records_max),
    ):
        yield


class World:
    """A store that receives messages. The seed determines all random choices."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.files = CrashableFiles()
        self.clock = ManualClock()
        self.config = StoreConfig(
            root="/store", commit_log_file_bytes=self.rng.choice([4096, 1 << 16]),
            consume_queue_file_bytes=200, columns_max=self.rng.choice([2, 64]),
            columns_disk_percent=self.rng.choice([1, 10, 100]),
        )  # fmt: skip
        self.store = self.open()

    def open(self) -> Store:
        return Store.open(self.config, files=self.files, clock=self.clock)

    def live(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.send()
            if self.rng.random() < 0.4:
                self.store.sync()
            if self.rng.random() < 0.5:
                self.seal()
            if self.rng.random() < 0.3:
                self.store.close()
                self.store = self.open()

    def send(self) -> None:
        rng = self.rng
        for number in range(rng.randint(1, 25)):
            properties = {name: rng.choice(TEXTS) for name in "abc" if rng.random() < 0.7}
            properties["UNIQ_KEY"] = f"{number:032d}"
            if rng.random() < 0.3:
                properties["KEYS"] = rng.choice(["k1", "k2"])
            tag = rng.choice(["", "t1", "t2"])
            if tag:
                properties["TAGS"] = tag
            data = encode_properties(properties)
            if rng.random() < 0.1:
                data = rng.choice([b"", data[:-1], data + data, b"a\xff\x015\x02", b"\x02a\x015"])
            topic, queue_id = rng.choice([("T", 0), ("T", 0), ("T", 1), ("U", 0)])
            body = bytes(rng.randrange(60))
            self.store.writer.append(
                topic, queue_id, body, data, tag_code(tag), 0, 0, 1, HOST, HOST
            )
        self.store.commit()

    def seal(self) -> None:
        self.store.columns.scan_for("T")
        for step in self.store.columns.seal_blocks():
            if callable(step):
                step()


def fails(store: Store, queue_id: int, offset: int, selector: Selector) -> bool:
    """Return whether the evaluation of the expression fails for a message."""
    position, size, _ = UNIT.unpack(store.reader.units("T", queue_id, offset, 1))
    try:
        selector.evaluate(store.reader._read_properties(position, size))
    except FilterEvaluationError:
        return True
    return False


@given(
    st.integers(0, 2**32), expressions, st.integers(1, 9), st.sampled_from([1, 3]), st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_a_read_by_columns_equals_the_read_by_records(
    seed: int, expression: str, count: int, rows_min: int, is_bulk: bool
) -> None:
    with small_blocks(rows_min, 2000):
        world = World(seed)
        world.live()
        fast, slow = compile_sql92(expression), Records(expression)
        for queue_id in (0, 1):
            low, high = world.store.queue_offsets("T", queue_id)
            for offset in range(low, high + 1):
                size = 400 if is_bulk else None
                consumed = world.rng.choice([None, low, max(low, offset - 3), offset])
                limits = (offset, count, size)
                reach = None
                if consumed is not None:
                    patient = world.rng.random() < 0.5
                    reach = SpanLimit(consumed, world.rng.choice([3, 2000]), is_patient=patient)
                ours = world.store.reader.read("T", queue_id, *limits, fast, None, reach)
                theirs = world.store.reader.read("T", queue_id, *limits, slow, None, reach)
                ours.data = [memoryview(b"".join(ours.data))]
                theirs.data = [memoryview(b"".join(theirs.data))]
                is_sure, ours.is_filter_reliable = (
                    ours.is_filter_reliable,
                    False,
                )  # it is of columns alone
                assert ours == theirs, (offset, queue_id)
                for at in range(offset, ours.next_offset if is_sure else offset):
                    assert not fails(world.store, queue_id, at, fast), (at, queue_id)
        world.store.close()


@given(st.integers(0, 2**32), expressions, st.integers(1, 9), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_calls_that_end_early_neither_lose_nor_repeat_messages(
    seed: int, expression: str, scan_max: int, records_max: int
) -> None:
    with small_blocks(1, records_max):
        world = World(seed)
        world.live()
        found = []
        for message_filter in (compile_sql92(expression), Records(expression)):
            offset, data = 0, b""
            while offset < world.store.queue_offsets("T", 0)[1]:
                result = world.store.reader.read(
                    "T", 0, offset, 4, 1 << 20, message_filter, scan_max
                )
                assert result.next_offset > offset
                data += b"".join(result.data)
                offset = result.next_offset
            found.append(data)
        assert found[0] == found[1]
        world.store.close()
