"""The keys of many records in columns are those of the records one by one, whatever stands in them,
damaged ones included."""

import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq import engine
from sluicemq.record.codec import encode_record
from sluicemq.store.index.columns import (
    find_record_starts,
    key_columns_at,
    read_keys,
    scalar_key_columns,
    vectorized_key_columns,
)

TOPICS = ["T", "Topic", "%RETRY%" + "g" * 190, "日本", "TopicLonger_" + "x" * 50]
NAMES = ["UNIQ_KEY", "KEYS", "KEYS", "TAGS", "a", "UNIQ_KEYS", "XKEYS", "é", "KEY"]
VALUES = [
    "", "a", "k1 k2", " x  y ", "7F000001000118B4AAC2000000000001", "é", "日本 k", "q\x01r", " ",
    "v" * 100, "w" * 1500, "Aa",
]  # fmt: skip


def a_record(rng: random.Random, position: int) -> bytes:
    pairs = [f"{rng.choice(NAMES)}\x01{rng.choice(VALUES)}\x02" for _ in range(rng.randint(0, 6))]
    properties = "".join(pairs).encode()
    if rng.random() < 0.2:
        properties = properties.rstrip(b"\x02")
    return encode_record(
        topic=rng.choice(TOPICS), queue_id=0, queue_offset=0, physical_offset=position,
        body=bytes([2]) * rng.randint(0, 300), properties=properties, flag=0,
        sys_flag=rng.choice([0, 4, 8, 12]), born_time_ms=1, born_host=bytes(rng.choice([8, 20])),
        store_time_ms=rng.randint(1, 1 << 41), store_host=bytes(rng.choice([8, 20])),
    )  # fmt: skip


def a_log(rng: random.Random) -> tuple[bytearray, list[int]]:
    """Records with something before and behind them, and where they begin."""
    data, starts = bytearray(rng.randint(0, 50)), []
    for _ in range(rng.randint(1, 60)):
        starts.append(len(data))
        data += a_record(rng, len(data))
    return data + bytes(rng.choice([0, 10, 8000])), starts


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_columns_say_what_single_records_say(seed: int) -> None:
    data, starts = a_log(random.Random(seed))
    places = np.array(starts, np.int64)
    columns, plain = (
        made(memoryview(data), places) for made in (vectorized_key_columns, scalar_key_columns)
    )
    for ours, expected in zip(columns, plain, strict=True):
        assert ours.tolist() == expected.tolist()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_damaged_lengths_lead_nowhere(seed: int) -> None:
    """Any byte behind size and magic may be wrong: the others' keys are found as if nothing was."""
    rng = random.Random(seed)
    data, starts = a_log(rng)
    places = np.array(starts, np.int64)
    before = scalar_key_columns(memoryview(bytes(data)), places)
    damaged = rng.sample(range(len(starts)), min(3, len(starts)))
    for number in damaged:
        end = starts[number + 1] if number + 1 < len(starts) else starts[number] + 91
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(starts[number] + 8, end)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
    columns = vectorized_key_columns(memoryview(data), places)
    untouched = [list(zip(*found, strict=True)) for found in (columns, before)]
    found, expected = ([row for row in rows if row[1] not in damaged] for rows in untouched)
    assert found == expected


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), piece=st.integers(1, 60_000))
def test_a_walk_in_pieces_finds_every_record(seed: int, piece: int) -> None:
    rng = random.Random(seed)
    data, starts = bytearray(), []
    equal = a_record(rng, 0)
    for _ in range(rng.randint(0, 300)):
        starts.append(len(data))
        data += equal if rng.random() < 0.9 else a_record(rng, len(data))
    data += (40).to_bytes(4) + (0xCBD43194).to_bytes(4) + bytes(32)
    found: list[int] = []
    at, steps = 0, 0
    while at < len(data):
        places, at = find_record_starts(memoryview(data), at, min(at + piece, len(data)))
        found += places.tolist()
        steps += 1
        assert steps <= len(data) + 1
    assert found == starts


@pytest.mark.skipif(
    engine.keys is None and (engine.PURE or os.environ.get("CI") != "true"),
    reason="the engine is not compiled: make native",
)
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_compiled_walk_says_what_the_reference_says(seed: int) -> None:
    """Whole logs, and damaged ones, where it may also leave all to the reference."""
    rng = random.Random(seed)
    data, starts = a_log(rng)
    data += (40).to_bytes(4) + (0xCBD43194).to_bytes(4) + bytes(32)
    is_damaged = rng.random() < 0.5
    for _ in range(rng.randint(1, 8) if is_damaged else 0):
        data[rng.randrange(starts[0] + 8, len(data))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
    view, stop = memoryview(data), rng.randint(starts[0] + 1, len(data))
    assert engine.keys is not None
    if not is_damaged and stop <= starts[-1]:
        assert engine.keys.read(view, starts[0], stop) is not None
    columns, begins, end = read_keys(view, starts[0], stop)
    expected, last = find_record_starts(view, starts[0], stop)
    assert (begins.tolist(), end) == (expected.tolist(), last)
    if len(begins):
        for ours, theirs in zip(columns, key_columns_at(view, expected), strict=True):
            assert ours.tolist() == theirs.tolist()
