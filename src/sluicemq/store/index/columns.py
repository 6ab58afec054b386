"""The keys of many records at once, and the slots of an index file, as NumPy columns.

`record.codec.keyed_hashes` finds the keys of one record; this module does the same for thousands.
It examines only the properties, never the bodies. The properties of each record are copied into one
row of a matrix, followed by a separator (0x02) and zeros:

    matrix    a=1 2 UNIQ_KEY=7F00… 2 KEYS=k1 k2 2 0 0 0

The separators of the flat matrix give the beginnings of all properties. The first 8 bytes of each
property tell UNIQ_KEY and KEYS from the others. That gives the intervals of the keys in the matrix;
the value of KEYS is split into words at spaces.

The Java string hash of `topic#key` is computed from the hashes of `topic#` and of the key, which
`record.table.java_hashes` computes. Rows with very long properties or with text beyond ASCII are
*odd*: they are handed to `keyed_hashes`. A batch that is just being appended may already have the
table of its properties. Then its keys are found without reading the log (`key_columns_of_batch`).

Slots (slot -> number of its newest entry) are an anonymous array of 4 bytes a slot (20 MB for
RocketMQ's default of 5,000,000). The system provides memory only for the pages that are touched.
The entries of a batch are linked as columns: sorted by slot, the predecessor of an entry is its
neighbour, or the entry that the slot had before. Slots are derived from entries, which have their
hashes, so `Slots.rebuild` restores them whatever a crash has left in the file. Changed blocks of
slots are noted, and written when the index is flushed.
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
"""The size of properties from which on a row is odd, because it would make the matrix too wide."""

ROWS_MIN: Final = 24
"""The number of records from which on columns are faster. Setting them up takes 100 µs."""

_FAST_BYTES: Final = 1 << 14
"""The number of bytes from which on record starts are found with NumPy."""

_LOOK_BYTES: Final = 8
_UNIQUE_NAME: Final = int(np.frombuffer(b"UNIQ_KEY", "<u8")[0])
_KEYS_NAME: Final = struct.unpack("<Q", b"KEYS\x01\0\0\0")[0]
_KEYS_MASK: Final = (1 << 40) - 1
_UNIQUE: Final = b"UNIQ_KEY\x01"
_NAMES: Final = (_UNIQUE, b"KEYS\x01")
_unpack_begin: Final = BLANK.struct.unpack_from
BLOCK_SLOTS: Final = 1024
"""The number of slots in a block, the unit in which changes are noted and written."""

STEP_SLOTS: Final = 1 << 18
"""The number of slots that one step of `Slots.load` reads."""

STEP_ENTRIES: Final = 1 << 16
"""The number of entries that one step of `Slots.rebuild` reads."""

ENTRY_TYPE: Final = INDEX_ENTRY.dtype
Numbers = NDArray[np.int32]


class KeyColumns(NamedTuple):
    """The keys of some records, one row for each key."""

    hashes: Numbers
    """The hash of the topic and key, as the index stores it."""
    records: Positions
    """The number of the key's record among the records. It never decreases from row to row."""
    times_ms: Positions
    """The store time of the key's record."""

    def slice_rows(self, start: int, count: int) -> "KeyColumns":
        """Return `count` rows from `start` on, or fewer at the end."""
        end = start + count
        return KeyColumns(self.hashes[start:end], self.records[start:end], self.times_ms[start:end])


def find_record_starts(view: memoryview, at: int, stop: int) -> tuple[Positions, int]:
    """Return (starts, end): the indexes at which records of a log file begin, and the index after.

    `view` is the file, and a record begins at index `at`. The records that begin before `stop` are
    found. `end` is the index at which the next call must continue: behind the last record, or the
    end of the file if a blank record or bytes that are not a record follow. The latter are logged.
    """
    found = np.empty(0, np.int64)
    if stop - at >= _FAST_BYTES:
        found = find_leading_starts(np.frombuffer(view[at:stop], np.uint8)) + at
        if len(found):
            at = int(found[-1])
            at += _unpack_begin(view, at)[0]
    starts: list[int] = []
    limit = len(view)
    end = 0
    while at < stop and limit - at >= BLANK_BYTES and not end:
        size, magic = _unpack_begin(view, at)
        if magic in MAGICS and RECORD_BYTES_MIN <= size <= limit - at:
            starts.append(at)
            at += size
        else:
            if magic != MAGIC_BLANK:
                logger.warning(
                    "no record begins at offset %d of a log file; not indexing its rest",
                    at,
                )
            end = limit
    end = end or (at if at >= stop else limit)
    return (np.append(found, starts).astype(np.int64) if starts else found), end


def read_keys(view: memoryview, at: int, stop: int) -> tuple[KeyColumns, Positions, int]:
    """Return (keys, starts, end) of the records in a log file that begin in [at, stop).

    `starts` and `end` are those of `find_record_starts`. The numbers in `keys.records` are indices
    in `starts`. Uses compiled code if it is installed.
    """
    found = None if engine.keys is None else engine.keys.read(view, at, stop)
    if found is None:
        starts, end = find_record_starts(view, at, stop)
        return key_columns_at(view, starts), starts, end
    begins, end, hashes, records, times_ms = found
    numbers = (np.frombuffer(column, np.int64) for column in (records, times_ms))
    columns = KeyColumns(np.frombuffer(hashes, np.int32), *numbers)
    return columns, np.frombuffer(begins, np.int64), end


def key_columns_at(view: memoryview, starts: Positions) -> KeyColumns:
    """Return the keys of the records at the indexes `starts` of a log file.

    The records must be complete and valid.
    """
    return (scalar_key_columns if len(starts) < ROWS_MIN else vectorized_key_columns)(view, starts)


def scalar_key_columns(view: memoryview, starts: Positions) -> KeyColumns:
    """Return the keys of records as `key_columns_at` does, one record at a time."""
    found = [hash_keys(view, start) for start in starts.tolist()]
    counts = [len(one.hashes) for one in found]
    return KeyColumns(
        np.array([value for one in found for value in one.hashes], np.int32),
        np.repeat(np.arange(len(found)), counts),
        np.repeat(np.array([one.store_time_ms for one in found], np.int64), counts),
    )


def vectorized_key_columns(view: memoryview, starts: Positions) -> KeyColumns:
    """Return the keys of records as `key_columns_at` does, with columns.

    `starts` must not be empty.
    """
    last = int(starts[-1])
    raw = np.frombuffer(view[int(starts[0]) : last + _unpack_begin(view, last)[0]], np.uint8)
    records = Records(raw, starts - starts[0])
    # Records that were rolled back, and those whose lengths disagree, have no keys to index.
    is_keyed = records.valid & (records.sys_flag & ROLLBACK != ROLLBACK)
    sizes = np.where(is_keyed, records.property_lengths, 0)
    is_odd = sizes > PROPERTIES_BYTES_MAX
    rows = np.flatnonzero((sizes > 0) & ~is_odd)
    numbers = np.empty(0, np.int64)
    hashes = np.empty(0, np.uint32)
    if len(rows):
        flat, keys = _find_keys(raw, records.property_starts[rows], sizes[rows])
        topics, topic_of = records.topics
        prefixes = [_prefix(str(topic, "utf-8", "replace")) for topic in topics]
        numbers = rows[keys.rows]
        hashes, is_bad = _hashes(flat, keys, np.array(prefixes, np.uint32)[topic_of[numbers]])
        if is_bad.any():
            is_odd[numbers[is_bad]] = True
            good = ~is_odd[numbers]
            numbers = numbers[good]
            hashes = hashes[good]
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
        numbers = numbers[order]
        signed = signed[order]
    return KeyColumns(signed, numbers, records.field("store_time")[numbers])


def key_columns_of_batch(topic: str, batch: Batch, stored_ms: int) -> KeyColumns | None:
    """Return the keys of a batch of `topic` that is appended at `stored_ms`.

    Return None if they must be read from the log: the batch has no table of its properties, or the
    keys of a message in it are not plain (empty, repeated, not ASCII, or rolled back).
    """
    table = batch.table
    if table is None or any(name in batch.properties_suffix for name in _NAMES):
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
    return KeyColumns(_signed(hashes), keys.rows, np.full(len(hashes), stored_ms))


class _Keys(NamedTuple):
    """The intervals of keys in a flat matrix."""

    rows: Positions
    """The row of each key."""
    starts: Positions
    """The index at which each key begins."""
    ends: Positions
    """The index after each key."""


@lru_cache(1 << 14)
def _prefix(topic: str) -> int:
    """Return the Java hash of `topic#`, which precedes a key, as an unsigned number."""
    return java_hash(f"{topic}#") & 0xFFFFFFFF


def _hashes(
    flat: Bytes, keys: _Keys, prefixes: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], Mask]:
    """Return (hashes, is_odd): the hashes of `topic#key` for each key, and which keys are odd.

    `prefixes` are the hashes of `topic#`, one for each key or one for all. The hash of an odd key
    is not valid: `hash_keys` must compute it.
    """
    sizes = keys.ends - keys.starts
    hashes, is_odd = java_hashes(flat, keys.starts, sizes)
    return hashes + prefixes * POWERS[np.minimum(sizes, len(POWERS) - 1)], is_odd


def _signed(hashes: NDArray[np.uint32]) -> Numbers:
    """Return hashes as the index stores them: their absolute values, as signed numbers."""
    found = np.abs(hashes.astype(np.int32))
    found[found == HASH_MIN] = 0
    return np.asarray(found)


def _find_keys(raw: Bytes, starts_in_raw: Positions, sizes: Positions) -> tuple[Bytes, _Keys]:
    """Return (flat, keys): the flat matrix of properties, and the intervals of all keys in it.

    The properties of row i are the `sizes[i]` bytes at index `starts_in_raw[i]` of `raw`. The keys
    of a row are its unique key, then the words of KEYS. If a property is repeated in a row, its
    last value counts.
    """
    # One byte for the closing separator, and room to read 8 bytes from the last property on.
    width = int(sizes.max()) + 1 + _LOOK_BYTES
    matrix = rows_at(raw, starts_in_raw, width)
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
    """Return the keys of both, sorted by row. Within a row those of `first` come first."""
    joined = _Keys(*map(np.concatenate, zip(first, rest, strict=True)))
    order = np.argsort(joined.rows, kind="stable")
    return _Keys(joined.rows[order], joined.starts[order], joined.ends[order])


def _last_of_row(keys: _Keys) -> _Keys:
    """Return only the last key of each row. A repeated property counts with its last value."""
    rows = keys.rows
    last = np.append(rows[1:] != rows[:-1], True)[: len(rows)]
    return keys if last.all() else _Keys(rows[last], keys.starts[last], keys.ends[last])


def _split(flat: Bytes, keys: _Keys) -> _Keys:
    """Return the words of each key, which are separated by spaces, in order.

    Empty words are skipped. Each word keeps the row of its key.
    """
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


class SlotLinks(NamedTuple):
    """The links of new entries, and the changes of slots that they cause (`Slots.link`)."""

    previous: Numbers
    """For each new entry, the number of the previous entry of its slot, or 0."""
    slots: Numbers
    """The slots that change."""
    newest: Numbers
    """The new value of each of these slots."""
    used: int
    """The number of slots that had no entry before."""


class Slots:
    """The slots of one index file: for each slot the number of its newest entry, or 0."""

    def __init__(self, count: int) -> None:
        """Create `count` slots without entries."""
        self._newest = np.zeros(count, np.int32)
        self._dirty = np.zeros(-(-count // BLOCK_SLOTS), np.bool_)

    def __getitem__(self, slot: int) -> int:
        """Return the number of the newest entry of a slot; 0 if it has none."""
        return int(self._newest[slot])

    def link(self, hashes: Numbers, first: int) -> SlotLinks:
        """Return the links of new entries with these hashes, whose numbers begin with `first`.

        The slots change only when the result is passed to `apply`.
        """
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
        return SlotLinks(previous, ordered[is_last], numbers[is_last], used)

    def apply(self, links: SlotLinks) -> None:
        """Change the slots to the new values that `link` returned, and note that they changed."""
        self._newest[links.slots] = links.newest
        self._dirty[links.slots // BLOCK_SLOTS] = True

    # --- from and to the file

    def load(self, stored: memoryview, count: int) -> Iterator[None]:
        """Set the slots from the bytes of a file with `count` entries, including entry 0.

        The number of an entry that does not exist counts as 0. The work is done while iterating.
        """
        values = np.frombuffer(stored, ">i4")
        for start in range(0, len(values), STEP_SLOTS):
            part = values[start : start + STEP_SLOTS]
            if part.any():  # else pages of the array would be touched for nothing
                good = (part > 0) & (part < count)
                self._newest[start : start + STEP_SLOTS] = np.where(good, part, 0)
            yield

    def rebuild(self, entries: memoryview) -> Iterator[None]:
        """Set the slots from all entries of a file, the first of which has number 1.

        The slots must be empty. Afterwards all count as changed. The work is done while iterating.
        """
        hashes = np.frombuffer(entries, ENTRY_TYPE)["hash"]
        for start in range(0, len(hashes), STEP_ENTRIES):
            part = hashes[start : start + STEP_ENTRIES].astype(np.int32) & np.int32(0x7FFFFFFF)
            slots = part % np.int32(len(self._newest))
            # If a slot occurs several times, the last assignment counts, which is the newest entry.
            self._newest[slots] = np.arange(start + 1, start + 1 + len(part), dtype=np.int32)
            yield
        self._dirty[:] = True

    def count_used(self) -> int:
        """Return how many slots have an entry."""
        return int(np.count_nonzero(self._newest))

    def iter_changed(self) -> Iterator[tuple[int, bytes]]:
        """Yield each run of changed blocks as (first slot, bytes for the file).

        The last block may have more slots than the file.
        """
        dirty = np.flatnonzero(self._dirty)
        for run in np.split(dirty, np.flatnonzero(np.diff(dirty) != 1) + 1) if len(dirty) else ():
            start = int(run[0]) * BLOCK_SLOTS
            end = (int(run[-1]) + 1) * BLOCK_SLOTS
            yield start, self._newest[start:end].astype(">i4").tobytes()

    def mark_written(self) -> None:
        """Note that everything that `iter_changed` has yielded is written."""
        self._dirty[:] = False


def encode_entries(
    hashes: Numbers, offsets: NDArray[np.int64], seconds: NDArray[np.int64], previous: Numbers
) -> bytes:
    """Return entries as the file stores them, 20 bytes each (see `store.index.file`).

    The arrays have one item for each entry. Seconds are limited to 0 … 2**31 - 1.
    """
    entries = np.empty(len(hashes), ENTRY_TYPE)
    entries["hash"] = hashes
    entries["position"] = offsets
    entries["seconds"] = np.clip(seconds, 0, 0x7FFFFFFF)
    entries["previous"] = previous
    return entries.tobytes()
