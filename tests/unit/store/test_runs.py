"""Records side by side are taken as runs: the same that a look at each unit takes."""

import random
from typing import Any

import pytest

from sluicemq.store import gather
from sluicemq.store.bulk import find_runs
from sluicemq.store.queues import BLANK_UNIT, UNIT
from sluicemq.store.read import ReadResult
from sluicemq.store.store import Store


def filled(bench: Any, rng: random.Random) -> Store:
    """Two queues that lie in each other's way, over several files of the log."""
    store = bench.open()
    for _ in range(rng.randrange(40, 120)):
        bodies = [bytes(rng.randrange(1, 400)) for _ in range(rng.randrange(1, 9))]
        bench.send(*bodies, queue_id=rng.randrange(2))
    return store


def told(result: ReadResult) -> tuple[Any, ...]:
    data = b"".join(result.data)
    return (result.status, result.next_offset, result.count, result.size_bytes, data)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kill", [False, True])
def test_runs_take_what_single_units_take(
    bench: Any, monkeypatch: pytest.MonkeyPatch, seed: int, kill: bool
) -> None:
    rng = random.Random(seed)
    store = filled(bench, rng)
    if kill:  # nothing is trusted then: the heads of records are looked at first
        store = bench.reopen(kill=True)
    for _ in range(60):
        low, high = store.queue_offsets("T", 0)
        asked = (
            "T", 0, rng.randrange(low, high), rng.choice((1, 5, 100, 10_000)),
            rng.choice((1, 300, 2000, 1 << 20)),
        )  # fmt: skip
        found = []
        for least in (0, 1 << 30):
            monkeypatch.setattr(gather, "_RUNS_BYTES_MIN", least)
            found.append(told(store.reader.read(*asked)))
        assert found[0] == found[1], asked


def test_limits_and_gaps() -> None:
    places = [(0, 100), (100, 50), (400, 10), (410, 20)]
    units = b"".join(UNIT.pack(position, size, 7) for position, size in places)
    assert find_runs(units, 9, 1000) == ([(0, 150), (400, 430)], 4, 180)
    assert find_runs(units, 3, 1000) == ([(0, 150), (400, 410)], 3, 160)
    assert find_runs(units, 9, 150) == ([(0, 150)], 2, 150)
    assert find_runs(units, 9, 149) == ([(0, 100)], 1, 100)
    assert find_runs(units, 9, 99) == ([], 0, 0)
    assert find_runs(units, 0, 1000) == ([], 0, 0)


@pytest.mark.parametrize("odd", [BLANK_UNIT, UNIT.pack(5, 0, 1), UNIT.pack(5, -3, 1)])
def test_what_is_no_record_is_for_who_looks_at_each(odd: bytes) -> None:
    assert find_runs(UNIT.pack(0, 100, 7) + odd, 9, 1000) is None
