"""The keys of many records at once, and the slots of an index file, as columns (NumPy).

What `hashes` does singly, a thousandfold: only the properties are looked at, never the bodies. Each
row's properties are copied into a row of a matrix, with a separator 0x02 behind the last one and
zeros after it:

    matrix    a=1 2 UNIQ_KEY=7F00… 2 KEYS=k1 k2 2 0 0 0
    separators of the flat matrix -> properties begin behind them -> the first 8 bytes say which
    are UNIQ_KEY or KEYS -> intervals of keys, words of KEYS split at spaces

Java's string hash of `topic#key` follows from the hashes of `topic#` and of the key, which
`record.table.java_hashes` finds. Rows that are not common (very long properties, text beyond ASCII)
go the scalar way, alone. A batch on its way into the log may have the table of its properties
already (`columns_of_batch`): then its keys are found without a look at the log.

Slots (slot -> number of its newest entry) are an anonymous array of 4 bytes a slot (20 MB with
RocketMQ's default of 5,000,000), of which the system provides only the pages that are touched.
Entries of a batch are linked in columns: sorted by slot, each entry's predecessor is its neighbour,
or what the slot held before. Slots are derived: entries say their hashes, so `restore` builds them
again, whatever a crash left in the file. What changed is remembered by blocks, and written when the
index is flushed.
"""

import logging
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq import engine
from sluicemq.model.ids import java_hash
from sluicemq.record.batch_columns import BatchColumns as Batch
from sluicemq.record.codec import HASH_MIN, ROLLBACK, hash_keys
from sluicemq.record.layout import BLANK, INDEX_ENTRY, MAGIC_BLANK, MAGICS, RECORD_BYTES_MIN
from sluicemq.record.table import (
    POWERS,
    Bytes,
    Mask,
    Positions,
    Records,
    find_leading_starts,
    gather,
    java_hashes,
    rows_at,
)
from sluicemq.store.log import BLANK_BYTES

logger = logging.getLogger(__name__)

PROPERTIES_BYTES_MAX: Final = 1024
"""Longer properties would make the matrix too wide: such rows go the scalar way."""
ROWS_MIN: Final = 24
"""For fewer records the plain way is faster: setting up columns costs a hundred microseconds."""
_FAST_BYTES: Final = 1 << 14
_LOOK_BYTES: Final = 8
_UNIQUE_NAME: Final = int(np.frombuffer(b"UNIQ_KEY", "<u8")[0])
_KEYS_NAME: Final = struct.unpack("<Q", b"KEYS\x01\0\0\0")[0]
_KEYS_MASK: Final = (1 << 40) - 1
_UNIQUE: Final = b"UNIQ_KEY\x01"
_NAMES: Final = (_UNIQUE, b"KEYS\x01")
_unpack_begin: Final = BLANK.struct.unpack_from
BLOCK_SLOTS: Final = 1024
STEP_SLOTS: Final = 1 << 18
STEP_ENTRIES: Final = 1 << 16
ENTRY_TYPE: Final = INDEX_ENTRY.dtype
Numbers = NDArray[np.int32]


class Columns(NamedTuple):
    """One row a key: its hash, the number of its record (in `starts`), the record's store time."""

    hashes: Numbers
    records: Positions
    times_ms: Positions

    def part(self, start: int, count: int) -> "Columns":
        """`count` rows from `start` on, fewer at the end."""
        end = start + count
        return Columns(self.hashes[start:end], self.records[start:end], self.times_ms[start:end])


def walk(view: memoryview, at: int, stop: int) -> tuple[Positions, int]:
    """Starts of the records in a log file from `at` on, up to the first that begins at `stop` or
    behind; and where the walk ended: the end of the file behind its blank record."""
    found = np.empty(0, np.int64)
    if stop - at >= _FAST_BYTES:
        found = find_leading_starts(np.frombuffer(view[at:stop], np.uint8)) + at
        if len(found):
            at = int(found[-1])
            at += _unpack_begin(view, at)[0]
    starts: list[int] = []
    limit, end = len(view), 0
    while at < stop and limit - at >= BLANK_BYTES and not end:
        size, magic = _unpack_begin(view, at)
        if magic in MAGICS and RECORD_BYTES_MIN <= size <= limit - at:
            starts.append(at)
            at += size
        else:
            if magic != MAGIC_BLANK:
                logger.warning("no record begins at %d of a log file: its rest is not indexed", at)
            end = limit
    end = end or (at if at >= stop else limit)
    return (np.append(found, starts).astype(np.int64) if starts else found), end


def read(view: memoryview, at: int, stop: int) -> tuple[Columns, Positions, int]:
    """The keys of the records in a log file from `at` on, where those begin, and where it ended:
    see `walk`."""
    found = None if engine.keys is None else engine.keys.read(view, at, stop)
    if found is None:
        starts, end = walk(view, at, stop)
        return columns_of(view, starts), starts, end
    begins, end, hashes, records, times_ms = found
    numbers = (np.frombuffer(column, np.int64) for column in (records, times_ms))
    columns = Columns(np.frombuffer(hashes, np.int32), *numbers)
    return columns, np.frombuffer(begins, np.int64), end


def columns_of(view: memoryview, starts: Positions) -> Columns:
    """The keys of the records at `starts`, in order. The records are whole and checked."""
    return (plain_columns if len(starts) < ROWS_MIN else key_columns)(view, starts)


def plain_columns(view: memoryview, starts: Positions) -> Columns:
    """One record at a time."""
    found = [hash_keys(view, start) for start in starts.tolist()]
    counts = [len(one.hashes) for one in found]
    return Columns(
        np.array([value for one in found for value in one.hashes], np.int32),
        np.repeat(np.arange(len(found)), counts),
        np.repeat(np.array([one.store_time_ms for one in found], np.int64), counts),
    )


def key_columns(view: memoryview, starts: Positions) -> Columns:
    """The same in columns, for at least one record."""
    last = int(starts[-1])
    raw = np.frombuffer(view[int(starts[0]) : last + _unpack_begin(view, last)[0]], np.uint8)
    records = Records(raw, starts - starts[0])
    # Without keys to index are those that were rolled back, and whose lengths do not agree.
    is_keyed = records.valid & (records.sys_flag & ROLLBACK != ROLLBACK)
    sizes = np.where(is_keyed, records.property_lengths, 0)
    is_odd = sizes > PROPERTIES_BYTES_MAX
    rows = np.flatnonzero((sizes > 0) & ~is_odd)
    numbers, hashes = np.empty(0, np.int64), np.empty(0, np.uint32)
    if len(rows):
        flat, keys = _find_keys(raw, records.property_starts[rows], sizes[rows])
        topics, topic_of = records.topics
        prefixes = [_prefix(str(topic, "utf-8", "replace")) for topic in topics]
        numbers = rows[keys.rows]
        hashes, is_bad = _hashes(flat, keys, np.array(prefixes, np.uint32)[topic_of[numbers]])
        if is_bad.any():
            is_odd[numbers[is_bad]] = True
            good = ~is_odd[numbers]
            numbers, hashes = numbers[good], hashes[good]
    signed = _signed(hashes)
    if is_odd.any():
        odd = [
            (record, value)
            for record in np.flatnonzero(is_odd).tolist()
            for value in hash_keys(view, int(starts[record])).hashes
        ]
        added = np.array(odd, np.int64).reshape(-1, 2)
        numbers = np.concatenate((numbers, added[:, 0]))
        signed = np.concatenate((signed, added[:, 1].astype(np.int32)))
        order = np.argsort(numbers, kind="stable")
        numbers, signed = numbers[order], signed[order]
    return Columns(signed, numbers, records.field("store_time")[numbers])


def columns_of_batch(topic: str, batch: Batch, stored_ms: int) -> Columns | None:
    """The keys of a batch that is being stored, None when the log has to say."""
    table = batch.table
    if table is None or any(name in batch.behind for name in _NAMES):
        return None
    if (batch.heads["sys_flag"] & ROLLBACK == ROLLBACK).any():
        return None
    rows = np.arange(len(table))
    found = []
    for name in _NAMES:
        turn = table.index_of(name[:-1])
        if turn is not None:
            starts, ends = table.value_bounds(turn)
            if (starts == ends).any():
                return None
            found.append(_Keys(rows, starts, ends))
        elif name == _UNIQUE:
            found.append(_Keys(*[np.empty(0, np.int64)] * 3))
    keys = found[0] if len(found) == 1 else _merged(found[0], _split(table.flat, found[1]))
    prefix = np.array([_prefix(topic)], np.uint32)
    hashes, is_bad = _hashes(table.flat, keys, prefix)
    if is_bad.any():
        return None
    return Columns(_signed(hashes), keys.rows, np.full(len(hashes), stored_ms))


class _Keys(NamedTuple):
    """Intervals of keys in a flat matrix, and the row of each."""

    rows: Positions
    starts: Positions
    ends: Positions


@lru_cache(1 << 14)
def _prefix(topic: str) -> int:
    """The hash of what stands before a key, as an unsigned number."""
    return java_hash(f"{topic}#") & 0xFFFFFFFF


def _hashes(
    flat: Bytes, keys: _Keys, prefixes: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], Mask]:
    """The hashes of keys behind their prefixes, and which of them the scalar way has to find."""
    sizes = keys.ends - keys.starts
    hashes, is_odd = java_hashes(flat, keys.starts, sizes)
    return hashes + prefixes * POWERS[np.minimum(sizes, len(POWERS) - 1)], is_odd


def _signed(hashes: NDArray[np.uint32]) -> Numbers:
    """As the index has them: never negative."""
    found = np.abs(hashes.astype(np.int32))
    found[found == HASH_MIN] = 0
    return np.asarray(found)


def _find_keys(raw: Bytes, places: Positions, sizes: Positions) -> tuple[Bytes, _Keys]:
    """The properties as rows of one width, flat, each closed by a separator with zeros behind it;
    and the intervals of all keys: of each row the unique key first, then the words of KEYS."""
    width = int(sizes.max()) + 1 + _LOOK_BYTES  # the closing separator, and room to look
    matrix = rows_at(raw, places, width)
    flat = np.zeros(matrix.size + _LOOK_BYTES, np.uint8)
    filled = flat[: matrix.size].reshape(matrix.shape)
    np.multiply(matrix, np.arange(width) < sizes[:, np.newaxis], out=filled)
    filled[np.arange(len(matrix)), sizes] = 2
    ends = np.flatnonzero(flat == 2)
    rows = ends // width
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    firsts = np.flatnonzero(rows[1:] != rows[:-1]) + 1
    starts[firsts] = rows[firsts] * width
    names = gather(flat, starts, "<u8")
    unique = (names == _UNIQUE_NAME) & (flat[starts + 8] == 1) & (ends - starts > 9)
    words = ((names & _KEYS_MASK) == _KEYS_NAME) & (ends - starts > 5)
    first = _last_of_row(_Keys(rows[unique], starts[unique] + 9, ends[unique]))
    rest = _last_of_row(_Keys(rows[words], starts[words] + 5, ends[words]))
    return flat, _merged(first, _split(flat, rest)) if len(rest.rows) else first


def _merged(first: _Keys, rest: _Keys) -> _Keys:
    """Both, by rows."""
    joined = _Keys(*map(np.concatenate, zip(first, rest, strict=True)))
    order = np.argsort(joined.rows, kind="stable")
    return _Keys(joined.rows[order], joined.starts[order], joined.ends[order])


def _last_of_row(keys: _Keys) -> _Keys:
    """Of a property that stands twice the last one counts, as in a map that is filled in turn."""
    rows = keys.rows
    last = np.append(rows[1:] != rows[:-1], True)[: len(rows)]
    return keys if last.all() else _Keys(rows[last], keys.starts[last], keys.ends[last])


def _split(flat: Bytes, keys: _Keys) -> _Keys:
    """Words between spaces; two spaces in a row make none."""
    spaces = np.flatnonzero(flat == 32)
    at = np.searchsorted(keys.starts, spaces, side="right") - 1
    spaces = spaces[(at >= 0) & (spaces < keys.ends[at])]
    if not len(spaces):
        return keys
    starts = np.sort(np.concatenate((keys.starts, spaces + 1)))
    ends = np.sort(np.concatenate((keys.ends, spaces)))
    rows = keys.rows[np.searchsorted(keys.starts, starts, side="right") - 1]
    whole = ends > starts
    return _Keys(rows[whole], starts[whole], ends[whole])


# --- slots


class Linked(NamedTuple):
    """What a batch of entries would change: see `Slots.link`."""

    previous: Numbers
    slots: Numbers
    newest: Numbers
    used: int


class Slots:
    """The slots of one file. Values are entry numbers, 0 where there is none."""

    def __init__(self, count: int) -> None:
        self._newest = np.zeros(count, np.int32)
        self._dirty = np.zeros(-(-count // BLOCK_SLOTS), np.bool_)

    def __getitem__(self, slot: int) -> int:
        return int(self._newest[slot])

    def link(self, hashes: Numbers, first: int) -> Linked:
        """Entries `first`, `first` + 1, … with these hashes: their predecessors, and what the slots
        will say. Changes nothing before `take`."""
        newest = self._newest
        slots = hashes % np.int32(len(newest))
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        numbers = order.astype(np.int32) + np.int32(first)
        before = newest[ordered]
        is_head = np.ones(len(ordered), np.bool_)
        np.not_equal(ordered[1:], ordered[:-1], out=is_head[1:])
        used = int(np.count_nonzero(is_head & (before == 0)))
        before[1:][~is_head[1:]] = numbers[:-1][~is_head[1:]]
        previous = np.empty_like(before)
        previous[order] = before
        is_last = np.append(is_head[1:], True)
        return Linked(previous, ordered[is_last], numbers[is_last], used)

    def take(self, linked: Linked) -> None:
        """Make what `link` found true."""
        self._newest[linked.slots] = linked.newest
        self._dirty[linked.slots // BLOCK_SLOTS] = True

    # --- from and to the file

    def load(self, stored: memoryview, count: int) -> Iterator[None]:
        """Take the slots as a file says, in steps; a number that no entry has counts as none."""
        values = np.frombuffer(stored, ">i4")
        for start in range(0, len(values), STEP_SLOTS):
            part = values[start : start + STEP_SLOTS]
            if part.any():  # untouched pages of the array stay untouched
                good = (part > 0) & (part < count)
                self._newest[start : start + STEP_SLOTS] = np.where(good, part, 0)
            yield

    def restore(self, entries: memoryview) -> Iterator[None]:
        """Build the slots from all entries (the first of them has number 1), in steps."""
        hashes = np.frombuffer(entries, ENTRY_TYPE)["hash"]
        for start in range(0, len(hashes), STEP_ENTRIES):
            part = hashes[start : start + STEP_ENTRIES].astype(np.int32) & np.int32(0x7FFFFFFF)
            slots = part % np.int32(len(self._newest))
            # Of equal slots the last assignment stays: the newest entry.
            self._newest[slots] = np.arange(start + 1, start + 1 + len(part), dtype=np.int32)
            yield
        self._dirty[:] = True

    def used(self) -> int:
        """How many slots have an entry."""
        return int(np.count_nonzero(self._newest))

    def changed(self) -> Iterator[tuple[int, bytes]]:
        """(first slot, bytes for the file) of each run of changed blocks."""
        dirty = np.flatnonzero(self._dirty)
        for run in np.split(dirty, np.flatnonzero(np.diff(dirty) != 1) + 1) if len(dirty) else ():
            start, end = int(run[0]) * BLOCK_SLOTS, (int(run[-1]) + 1) * BLOCK_SLOTS
            yield start, self._newest[start:end].astype(">i4").tobytes()

    def written(self) -> None:
        """All that `changed` gave is in the file."""
        self._dirty[:] = False


def entries_bytes(
    hashes: Numbers, offsets: NDArray[np.int64], seconds: NDArray[np.int64], previous: Numbers
) -> bytes:
    """Entries as they stand in the file."""
    entries = np.empty(len(hashes), ENTRY_TYPE)
    entries["hash"] = hashes
    entries["position"] = offsets
    entries["seconds"] = np.clip(seconds, 0, 0x7FFFFFFF)
    entries["previous"] = previous
    return entries.tobytes()
