"""Choosing messages by their columns: what a filtered read does where there are blocks.

A block of which the figures alone say that nothing in it matches is passed over and not even read
(`pruned_to`). A filter's verdicts on a block are found once and kept for the next pulls of the same
filter: of a block with many matches a pull takes 32 and the next one goes on behind them. Rows that
columns cannot decide (a property that is none, a record that could not be decoded) are asked from
the log, one by one, when it is their turn, and so many of them end the call.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from itertools import compress, islice
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from sluicemq.model.subscription import BlockFilter
from sluicemq.record.columns import ColumnBlock
from sluicemq.record.columns_build import ArrowColumns, build_block, merged_arrays
from sluicemq.store.columns.blocks import ColumnBlocks
from sluicemq.store.columns.file import Head
from sluicemq.store.gather import RECORDS_S, Gather, Judgement, PostponedError, Select
from sluicemq.store.queues import UNIT_BYTES, Queue

if TYPE_CHECKING:
    from sluicemq.clock import Clock

ROWS_MIN: Final = 128
"""For fewer rows looking at the records is faster than making columns of them."""
RECORDS_MAX: Final = 2000
"""So many records are read to decide in one call."""
SCAN_S: Final = 0.004
"""After so long a call ends: a block more may take as long again."""
_SINGLES_MIN: Final = 8
_SINGLES: Final = 256
"""So many records are looked at before the next look at the clock, at first few."""
_WEIGHT_ROWS_INLINE: Final = 64 * 8192
"""Of filters (their weight) on blocks: some milliseconds, when all rows differ."""
_KEPT: Final = 48
_RULED_KEPT: Final = 1024
_TRUE: Final = 1
_NEEDS_RECORD: Final = 4


class Candidates(NamedTuple):
    """Rows of a block that match or may match, ascending; `asks`: whether the record decides, None
    where it never does."""

    rows: list[int]
    asks: list[bool] | None

    def between(self, low: int, high: int) -> "tuple[list[int], list[bool] | None]":
        """Those of the rows [low, high), reckoned from `low` on."""
        first = bisect_left(self.rows, low)
        last = bisect_left(self.rows, high, first)
        rows = [row - low for row in self.rows[first:last]]
        return rows, None if self.asks is None else self.asks[first:last]


class ColumnScan:
    """Filtered reads of one store, by columns."""

    def __init__(self, blocks: ColumnBlocks, clock: "Clock") -> None:
        self.blocks = blocks
        self._clock = clock
        self._ruled: OrderedDict[tuple[int, int], tuple[BlockFilter, Head, bool]] = OrderedDict()
        self._known: OrderedDict[tuple[int, int], tuple[BlockFilter, ColumnBlock, Candidates]] = (
            OrderedDict()
        )

    def run(
        self,
        block_filter: BlockFilter,
        queue: Queue,
        gather: Gather,
        offset: int,
        end: int,
        select: Select,
        weight: int = 0,
    ) -> int:
        """Take matches among the queue offsets [offset, end); returns where to go on.

        `select` chooses among units by their records. `weight` is the filter's where verdicts that
        take long may be postponed (`judging`), 0 where they may not.
        """
        begin_s = self._clock.monotonic_s()
        deadline_s = begin_s + SCAN_S
        records, few = RECORDS_MAX, _SINGLES_MIN
        position = offset
        while position < end and records > 0:
            if position > offset and self._clock.monotonic_s() >= deadline_s:
                break
            passed = self.pruned_to(block_filter, queue, position)
            if passed:
                position = min(passed, end)
                continue
            block = self.blocks.block_at(queue, position, ROWS_MIN)
            few, at_once = min(2 * few, _SINGLES), min(few, records)
            stop = position + at_once if block is None else block.end
            units = queue.units(position, min(end, stop) - position)
            if not len(units):
                gather.is_missing = True
                break
            try:
                if block is None:
                    chosen = select(units)
                    asked = len(units) // UNIT_BYTES
                else:
                    candidates = self.candidates(block_filter, block, weight)
                    first = position - block.first_offset
                    chosen, units, asked = _choose(
                        candidates, first, units, gather.room, at_once, select
                    )
            except PostponedError as postponed:
                gather.judgement = postponed.judgement
                break
            if asked:
                records -= asked
                deadline_s = begin_s + RECORDS_S
            left = gather.take_some(units, position, chosen)
            if left >= 0:
                return position + left
            position += len(units) // UNIT_BYTES
        return position

    def holds(self, block_filter: BlockFilter, queue: Queue, offset: int, select: Select) -> bool:
        """Does the message at an offset match? Of a block that a reader has just left it is known
        without a look at the record. HOT."""
        block = self.blocks.at_hand(queue, offset)
        known = None if block is None else self._known.get((id(block_filter), id(block)))
        if block is None or known is None or known[2].asks is not None:
            return any(True for _ in select(queue.units(offset, 1)))
        rows, row = known[2].rows, offset - block.first_offset
        at = bisect_left(rows, row)
        return at < len(rows) and rows[at] == row

    def pruned_to(
        self, block_filter: BlockFilter, queue: Queue, offset: int, *, only_known: bool = False
    ) -> int:
        """The end of the sealed block that holds an offset, when it has no match; else 0.
        `only_known`: no file is read to know it."""
        head = self.blocks.head_at(queue, offset, only_known=only_known)
        if head is None:
            return 0
        key = (id(block_filter), id(head))
        known = self._ruled.get(key)
        if known is None:
            known = (block_filter, head, block_filter.can_match(head.stats))
            self._ruled[key] = known  # what is kept cannot have given its id to another
            if len(self._ruled) > _RULED_KEPT:
                self._ruled.popitem(last=False)
        return 0 if known[2] else head.end

    def candidates(
        self, block_filter: BlockFilter, block: ColumnBlock, weight: int = 0
    ) -> Candidates:
        """The rows of a block that a filter has to look at, or not even that.

        Raises PostponedError when a filter of this weight takes long to say so.
        """
        key = (id(block_filter), id(block))
        known = self._known.get(key)
        if known is not None:  # what is kept cannot have given its id to another
            self._known.move_to_end(key)
            return known[2]
        keep = partial(self._keep, key, block_filter, block)
        if weight * block.rows > _WEIGHT_ROWS_INLINE:
            raise PostponedError(Judgement(partial(_candidates, block_filter, block), keep))
        return keep(_candidates(block_filter, block))

    def _keep(
        self,
        key: tuple[int, int],
        block_filter: BlockFilter,
        block: ColumnBlock,
        found: Candidates,
    ) -> Candidates:
        self._known[key] = (block_filter, block, found)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found


def _candidates(block_filter: BlockFilter, block: ColumnBlock) -> Candidates:
    verdicts = block_filter.verdicts(block)
    asks = verdicts == _NEEDS_RECORD
    if not asks.any():
        return Candidates(np.flatnonzero(verdicts == _TRUE).tolist(), None)
    rows = np.flatnonzero((verdicts == _TRUE) | asks)
    return Candidates(rows.tolist(), asks[rows].tolist())


def _choose(
    candidates: Candidates,
    first: int,
    units: memoryview | bytearray,
    room: int,
    records: int,
    select: Select,
) -> tuple[Iterable[int], memoryview | bytearray, int]:
    """Which of the units, the first one of row `first`, are chosen; the units that were dealt with;
    and how many records that reads at most. HOT."""
    end = first + len(units) // UNIT_BYTES
    if candidates.asks is None:
        low = bisect_left(candidates.rows, first)
        some = candidates.rows[low : low + room + 1]  # one more says where to go on
        return [row - first for row in some if row < end], units, 0
    rows, asks = candidates.between(first, end)
    assert asks is not None
    last = next(islice((at for at, needs in enumerate(asks) if needs), records, None), None)
    if last is not None:
        units, rows, asks = units[: rows[last] * UNIT_BYTES], rows[:last], asks[:last]
    return _asked(rows, asks, units, select), units, sum(asks)


def _asked(
    rows: list[int], asks: list[bool], units: memoryview | bytearray, select: Select
) -> list[int]:
    """Without the rows whose records say that they do not match."""
    asked = list(compress(rows, asks))
    found = select(b"".join([units[row * UNIT_BYTES : (row + 1) * UNIT_BYTES] for row in asked]))
    wanted = {asked[index] for index in found}
    return [row for row, needs in zip(rows, asks, strict=True) if not needs or row in wanted]


def warm_up() -> None:
    """Use everything once, on nothing: pyarrow loads parts of itself when they are needed."""
    nothing = np.zeros(2, np.int64)
    block = build_block(0, nothing, nothing, ())
    merged_arrays([block, block._replace(columns=ArrowColumns({}))])
    # Where pandas is installed Arrow loads it here, for a quarter of a second.
    _ = ArrowColumns({"": pa.array([""]).dictionary_encode()})[""]
