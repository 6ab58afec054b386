"""Finding tag codes in a block of consume-queue units, all at once with NumPy.

A unit has 20 bytes and its tag code in the last 8 (big-endian, a 32-bit hash with its sign
extended). So the low words stand 20 bytes apart, aligned to 4 in a mapped file: they are compared
in the machine's own order with a code whose bytes are swapped. Hits are then checked with the high
words, which differ only for other kinds of numbers (times of delayed messages).

A pull takes 32 of the hits of a chunk, and the next one goes on behind them: the hits of a reader's
chunk are kept for it (`TagHits`), so no unit is looked at twice.

NumPy is imported with this module, and this module at the first filtered read: an idle broker
does without it.
"""

import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection
from typing import Final, NamedTuple

import numpy as np

from sluicemq.store.consumequeue import UNIT_BYTES, Queue

CHUNK_UNITS_MIN: Final = 1024
CHUNK_UNITS_MAX: Final = 16 * 1024
"""Chunks grow: 16 k at once cost twice as much when one message in ten matches (bench/README)."""
KEPT: Final = 256
_LOW_WORD: Final = 16
_HIGH_WORD: Final = 12


def find_codes(units: memoryview | bytearray, codes: Collection[int]) -> list[int]:
    """Indices of the units whose tag code is one of `codes`, ascending."""
    count = len(units) // UNIT_BYTES
    if not count or not codes:
        return []
    low = _words(units, count, _LOW_WORD)
    hits: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None
    for code in codes:
        found = low == _as_stored(code)
        hits = found if hits is None else np.logical_or(hits, found, out=hits)
    if hits is None:
        return []
    indices = np.flatnonzero(hits)
    if not len(indices):
        return []
    # The sign extension: all ones for a negative hash, all zeros for another.
    high = _words(units, count, _HIGH_WORD)[indices]
    negative = (low[indices] & _SIGN) != 0
    result: list[int] = indices[high == np.where(negative, 0xFFFFFFFF, 0)].tolist()
    return result


class _Chunk(NamedTuple):
    queue: Queue
    start: int
    stop: int
    indices: list[int]
    """From `start` on, ascending."""


class TagHits:
    """The last chunk of each queue and filter. Stored codes do not change; a queue that was made
    again is another one."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[str, int, frozenset[int]], _Chunk] = OrderedDict()

    def chunk(
        self, queue: Queue, codes: frozenset[int], position: int, end: int, grown: int
    ) -> tuple[int, int, list[int]]:
        """Where a chunk begins that holds `position`, the offset behind it, and the indices of its
        hits from `position` up to `end`. The offset is `position` when there are no units. HOT.

        `grown`: how many units to look at where nothing is known.
        """
        key = (queue.topic, queue.queue_id, codes)
        known = self._chunks.get(key)
        if known is None or known.queue is not queue or not known.start <= position < known.stop:
            if known is not None and known.queue is queue and known.stop == position:
                grown = min(max(grown, 4 * (known.stop - known.start)), CHUNK_UNITS_MAX)
            units = queue.units(position, min(grown, end - position))
            stop = position + len(units) // UNIT_BYTES
            known = _Chunk(queue, position, stop, find_codes(units, codes))
            self._chunks[key] = known
            if len(self._chunks) > KEPT:
                self._chunks.popitem(last=False)
        _, start, stop, indices = known
        if position > start or stop > end:
            low = bisect_left(indices, position - start)
            indices = indices[low : bisect_left(indices, end - start, low)]
        return start, min(stop, end), indices


def _words(
    units: memoryview | bytearray, count: int, offset: int
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """One 32-bit word of each unit, as it lies there, without copying."""
    return np.ndarray((count,), np.uint32, buffer=units, offset=offset, strides=(UNIT_BYTES,))


def _as_stored(code: int) -> int:
    """The low word of a code as this machine reads it from big-endian bytes."""
    return int.from_bytes((code & 0xFFFFFFFF).to_bytes(4, "big"), sys.byteorder)


_SIGN: Final = _as_stored(0x80000000)
