"""Choosing messages by their columns: what a filtered read does where there are blocks.

A block of which the figures alone say that nothing in it matches is passed over and not even read
(`pruned_to`). A filter's verdicts on a block are found once and kept for the next pulls of the same
filter: of a block with many matches a pull takes 32 and the next one goes on behind them. Rows that
columns cannot decide (a property that is none, a record that could not be decoded) are asked from
the log, one by one, when it is their turn, and so many of them end the call.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.model.subscription import BlockFilter
from sluicemq.record.columns import ColumnBlock
from sluicemq.record.columns_build import ArrowColumns, build_block, merged_arrays
from sluicemq.store.columns_blocks import ColumnBlocks
from sluicemq.store.columns_file import Head
from sluicemq.store.consumequeue import UNIT_BYTES, Queue

if TYPE_CHECKING:
    from sluicemq.clock import Clock
    from sluicemq.store.gather import Gather

ROWS_MIN: Final = 128
"""For fewer rows looking at the records is faster than making columns of them."""
RECORDS_MAX: Final = 2000
"""So many records are read to decide in one call."""
SCAN_S: Final = 0.004
"""After so long a call ends: a block more may take as long again."""
_SINGLES: Final = 256
_KEPT: Final = 48
_RULED_KEPT: Final = 1024
_TRUE: Final = 1
_NEEDS_RECORD: Final = 4
Select = Callable[[memoryview | bytearray], Iterable[int]]


class Candidates(NamedTuple):
    """Rows of a block that match or may match, ascending; `asks`: whether the record decides."""

    rows: NDArray[np.int64]
    asks: NDArray[np.bool_]


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
        gather: "Gather",
        offset: int,
        end: int,
        select: Select,
    ) -> int:
        """Take matches among the queue offsets [offset, end); returns where to go on.

        `select` chooses among units by their records.
        """
        deadline_s = self._clock.monotonic_s() + SCAN_S
        records = RECORDS_MAX
        position = offset
        while position < end and records > 0:
            if position > offset and self._clock.monotonic_s() >= deadline_s:
                break
            passed = self.pruned_to(block_filter, queue, position)
            if passed:
                position = min(passed, end)
                continue
            block = self.blocks.block_at(queue, position, ROWS_MIN)
            stop = position + min(_SINGLES, records) if block is None else block.end
            units = queue.units(position, min(end, stop) - position)
            if not len(units):
                gather.is_missing = True
                break
            if block is None:
                chosen = select(units)
                records -= len(units) // UNIT_BYTES
            else:
                candidates = self.candidates(block_filter, block)
                first = position - block.first_offset
                chosen, units, asked = _choose(
                    candidates, first, units, gather.room, records, select
                )
                records -= asked
            left = gather.take_some(units, position, chosen)
            if left >= 0:
                return position + left
            position += len(units) // UNIT_BYTES
        return position

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

    def candidates(self, block_filter: BlockFilter, block: ColumnBlock) -> Candidates:
        """The rows of a block that a filter has to look at, or not even that."""
        key = (id(block_filter), id(block))
        known = self._known.get(key)
        if known is not None:  # what is kept cannot have given its id to another
            self._known.move_to_end(key)
            return known[2]
        found = _candidates(block_filter, block)
        self._known[key] = (block_filter, block, found)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found


def _candidates(block_filter: BlockFilter, block: ColumnBlock) -> Candidates:
    verdicts = block_filter.verdicts(block)
    asks = verdicts == _NEEDS_RECORD
    if not asks.any():
        rows = np.flatnonzero(verdicts == _TRUE)
        return Candidates(rows, np.zeros(len(rows), np.bool_))
    rows = np.flatnonzero((verdicts == _TRUE) | asks)
    return Candidates(rows, asks[rows])


def _choose(
    candidates: Candidates,
    first: int,
    units: memoryview | bytearray,
    room: int,
    records: int,
    select: Select,
) -> tuple[Iterable[int], memoryview | bytearray, int]:
    """Which of the units, the first one of row `first`, are chosen; the units that were dealt with;
    and how many records that reads at most."""
    low, high = np.searchsorted(candidates.rows, (first, first + len(units) // UNIT_BYTES))
    rows, asks = candidates.rows[low:high] - first, candidates.asks[low:high]
    if not asks.any():
        return rows[: room + 1].tolist(), units, 0  # one more says where to go on
    places = np.flatnonzero(asks)
    if len(places) > records:
        last = places[records]
        units = units[: int(rows[last]) * UNIT_BYTES]
        rows, asks, places = rows[:last], asks[:last], places[:records]
    return _asked(rows, asks, units, select), units, len(places)


def _asked(
    rows: NDArray[np.int64],
    asks: NDArray[np.bool_],
    units: memoryview | bytearray,
    select: Select,
) -> Iterator[int]:
    for row, needs_record in zip(rows.tolist(), asks.tolist(), strict=True):
        unit = units[row * UNIT_BYTES : (row + 1) * UNIT_BYTES]
        if not needs_record or any(True for _ in select(unit)):
            yield row


def warm_up() -> None:
    """Use everything once, on nothing: pyarrow loads parts of itself when they are needed."""
    nothing = np.zeros(2, np.int64)
    block = build_block(0, nothing, nothing, ())
    merged_arrays([block, block._replace(columns=ArrowColumns({}))])
