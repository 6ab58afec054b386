"""The compiled reads find what Python finds, of good records and of damaged ones."""

import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from sluicemq import engine
from sluicemq.record.arrow import LogPiece
from sluicemq.record.codec import encode_record
from sluicemq.record.columns import ColumnBlock
from sluicemq.store.columns.file import SourceRows
from sluicemq.store.queues import BLANK_UNIT, UNIT

pytestmark = pytest.mark.skipif(engine.reads is None, reason="`make native` has not built it")

NAMES = ["a", "city", "seven77", "eight888", "a_rather_long_name", "名", "", "\ufffd"]
WANTED = st.frozensets(st.sampled_from([name for name in NAMES if name]), min_size=1)
TEXTS = st.sampled_from([
    b"", b"1", b"hz", b"12345678", b"123456789", b"x" * 16, b"x" * 17, b"y" * 40, b"\xff", b"\xfe",
    "杭州".encode(), b"\xe6\x9d", b"1\x011",
]) | st.binary(max_size=20).map(lambda text: text.replace(b"\2", b""))  # fmt: skip
PIECES = st.tuples(
    st.sampled_from([name.encode() for name in NAMES]) | st.binary(max_size=3), TEXTS
)
PROPERTIES = st.lists(PIECES, max_size=6).map(
    lambda pieces: b"".join(name + b"\1" + text + b"\2" for name, text in pieces)
) | st.binary(max_size=40)


def log_of(records: list[tuple[bytes, int]], base: int) -> tuple[bytearray, bytes]:
    """A piece of the log that begins at `base`, and the units of its records."""
    log, units = bytearray(), b""
    for number, (properties, kind) in enumerate(records):
        record = encode_record(
            topic="T" * (200 if kind == 1 else 3), queue_id=0, queue_offset=number,
            physical_offset=base + len(log), body=bytes(kind * 7), properties=properties, flag=0,
            sys_flag=0, born_time_ms=1, born_host=bytes(20 if kind == 2 else 8), store_time_ms=2,
            store_host=bytes(20 if kind == 3 else 8), reconsume_times=0,
        )  # fmt: skip
        units += UNIT.pack(base + len(log), len(record), 0)
        log += record
    return log, units


def rows_of(block: ColumnBlock, names: frozenset[str]) -> list[Any]:
    """What a filter sees of each row."""
    assert not block.excluded
    odd, rows = set(block.odd.tolist()), []
    for row in range(block.rows):
        seen = {}
        for name in names:
            column = block.columns.get(name)
            code = -1 if column is None else int(column.codes[row])
            seen[name] = None if column is None or code < 0 else column.values[code]
        rows.append("odd" if row in odd else seen)
    return rows


def both(units: bytes, log: bytes, base: int, names: frozenset[str]) -> None:
    source = SourceRows(5, units, [LogPiece(base, np.frombuffer(log, np.uint8))])
    compiled = source.columns_of(names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "reads", None)
        reference = source.columns_of(names)
    assert (compiled.first_offset, compiled.rows) == (reference.first_offset, reference.rows)
    assert rows_of(compiled, names) == rows_of(reference, names)
    for column in compiled.columns.values():
        assert len(set(column.values)) == len(column.values)


RECORDS = st.lists(st.tuples(PROPERTIES, st.integers(0, 3)), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(RECORDS, WANTED)
def test_the_columns_of_a_filter_are_those_of_the_reference(
    records: list[tuple[bytes, int]], names: frozenset[str]
) -> None:
    log, units = log_of(records, 1000)
    both(units, bytes(log), 1000, names)


@settings(max_examples=300, deadline=None)
@given(RECORDS, WANTED, st.randoms(use_true_random=False))
def test_damage_is_odd_where_the_reference_says_so(
    records: list[tuple[bytes, int]], names: frozenset[str], chance: random.Random
) -> None:
    log, units = log_of(records, 64)
    for _ in range(chance.randrange(1, 5)):
        log[chance.randrange(len(log))] = chance.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
    spoilt = bytearray(units)
    if chance.random() < 0.5:
        at = 20 * chance.randrange(len(units) // 20)
        spoilt[at : at + 20] = chance.choice((
            BLANK_UNIT, bytes(20), UNIT.pack(0, 91, 0), UNIT.pack(-1 << 63, 200, 0),
            UNIT.pack((1 << 63) - 1, (1 << 31) - 2, 0), UNIT.pack(64, -5, 0),
        ))  # fmt: skip
    if chance.random() < 0.3:
        del log[chance.randrange(len(log)) :]
    both(bytes(spoilt), bytes(log), 64, names)
