"""The keys of many records at once, as columns (NumPy): what `index_keys` does, a thousandfold.

Only the properties are looked at, never the bodies. Each row's properties are copied into a row of
a matrix, with a separator 0x02 behind the last one and zeros after it:

    matrix    a=1 2 UNIQ_KEY=7F00… 2 KEYS=k1 k2 2 0 0 0
    separators of the flat matrix -> properties begin behind them -> the first 8 bytes say which
    are UNIQ_KEY or KEYS -> intervals of keys, words of KEYS split at spaces

Java's string hash of `topic#key` is a polynomial in 31 modulo 2^32 over UTF-16 units, which are the
bytes as long as all of them are ASCII. So hash(topic#key) follows from the hashes of topic and key,
each a product of a matrix of bytes with powers of 31; as rows are aligned left, the surplus factor
is divided out (31 is odd, so it has an inverse).

Rows that are not common (very long properties, text beyond ASCII) go the scalar way, alone.

A batch on its way into the log may have the table of its properties already (`columns_of_batch`):
then its keys are found without a look at the log.

The hash slots of one index file, in memory (NumPy): slot -> number of its newest entry.

An anonymous array of 4 bytes a slot (20 MB with RocketMQ's default of 5,000,000), of which the
system provides only the pages that are touched. Entries of a batch are linked in columns: sorted
by slot, each entry's predecessor is its neighbour, or what the slot held before.

Slots are derived: entries say their hashes, so `restore` builds them again, whatever a crash left
in the file. What changed is remembered by blocks, and written when the index is flushed.
"""

import logging
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.model.ids import java_hash
from sluicemq.record.batch_columns import Columns as Batch
from sluicemq.record.layout import BLANK, INDEX_ENTRY, MAGIC_BLANK, MAGICS, RECORD_BYTES_MIN
from sluicemq.record.table import Bytes, Positions, gather, leading_starts
from sluicemq.store.index.hashes import HASH_MIN, ROLLBACK, keyed_hashes
from sluicemq.store.log import BLANK_BYTES

logger = logging.getLogger(__name__)

Hashes = NDArray[np.uint32]

PROPERTIES_BYTES_MAX: Final = 1024
"""Longer properties would make the matrix too wide: such rows go the scalar way."""
ROWS_MIN: Final = 24
"""For fewer records the plain way is faster: setting up columns costs a hundred microseconds."""
_FAST_BYTES: Final = 1 << 14
_PAD_BYTES: Final = 1 << 12
_TOPIC_BYTES_MAX: Final = 255
_SHORT_KEY_BYTES: Final = 40
_ASCII_END: Final = 0x80
_UNIQUE_NAME: Final = int(np.frombuffer(b"UNIQ_KEY", "<u8")[0])
_KEYS_NAME: Final = struct.unpack("<Q", b"KEYS\x01\0\0\0")[0]
_KEYS_MASK: Final = (1 << 40) - 1
_UNIQUE: Final = b"UNIQ_KEY\x01"
_NAMES: Final = (_UNIQUE, b"KEYS\x01")
_POWERS = np.ones(PROPERTIES_BYTES_MAX + 8, np.uint32)
np.cumprod(np.full(PROPERTIES_BYTES_MAX + 7, 31, np.uint32), dtype=np.uint32, out=_POWERS[1:])
_INVERSES = np.ones_like(_POWERS)
np.cumprod(
    np.full(PROPERTIES_BYTES_MAX + 7, pow(31, -1, 1 << 32), np.uint32),
    dtype=np.uint32,
    out=_INVERSES[1:],
)


class Columns(NamedTuple):
    """One row a key: its hash, the number of its record (in `starts`), the record's store time."""

    hashes: NDArray[np.int32]
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
        found = leading_starts(np.frombuffer(view[at:stop], np.uint8)) + at
        if len(found):
            at = int(found[-1])
            at += BLANK.struct.unpack_from(view, at)[0]
    starts, end = _walk_on(view, at, stop)
    return (np.append(found, starts) if starts else found), end


def _walk_on(view: memoryview, at: int, stop: int) -> tuple[list[int], int]:
    starts: list[int] = []
    append, unpack, limit = starts.append, BLANK.struct.unpack_from, len(view)
    while at < stop and limit - at >= BLANK_BYTES:
        size, magic = unpack(view, at)
        if magic in MAGICS and RECORD_BYTES_MIN <= size <= limit - at:
            append(at)
            at += size
        else:
            if magic != MAGIC_BLANK:
                logger.warning("no record begins at %d of a log file: its rest is not indexed", at)
            return starts, limit
    return starts, at if at >= stop else limit


def columns_of(view: memoryview, starts: Positions) -> Columns:
    """The keys of the records at `starts`, in order. The records are whole and checked."""
    if len(starts) < ROWS_MIN:
        return plain_columns(view, starts)
    return key_columns(view, starts)


def key_columns(view: memoryview, starts: Positions) -> Columns:
    """The same in columns, for at least one record."""
    raw = np.frombuffer(view, np.uint8)
    places = starts
    end = int(starts[-1])
    end += BLANK.struct.unpack_from(view, end)[0]
    if end + _PAD_BYTES > len(raw):  # so near the end of the file that rows would reach beyond it
        raw = np.concatenate((raw[starts[0] : end], np.zeros(_PAD_BYTES, np.uint8)))
        places = starts - starts[0]
    heads = _heads(raw, places)
    common = heads.properties_bytes <= PROPERTIES_BYTES_MAX
    found = _common_keys(raw, heads, common)
    return _with_odd(view, starts, heads, found, common)


def plain_columns(view: memoryview, starts: Positions) -> Columns:
    """The same, one record at a time."""
    hashes: list[int] = []
    records: list[int] = []
    times: list[int] = []
    for record, start in enumerate(starts.tolist()):
        found = keyed_hashes(view, start)
        hashes += found.hashes
        records += [record] * len(found.hashes)
        times += [found.store_time_ms] * len(found.hashes)
    return Columns(
        np.array(hashes, np.int32), np.array(records, np.int64), np.array(times, np.int64)
    )


def columns_of_batch(topic: str, batch: Batch, stored_ms: int) -> Columns | None:
    """The keys of a batch that is being stored, None when the log has to say."""
    table = batch.table
    if table is None or any(name in batch.behind for name in _NAMES):
        return None
    if (batch.heads["sys_flag"] & ROLLBACK == ROLLBACK).any():
        return None
    numbers = np.arange(len(table))
    found = []
    for name in _NAMES:
        turn = table.turn_of(name[:-1])
        if turn is not None:
            starts, ends = table.values(turn)
            if (starts == ends).any():
                return None
            found.append(_Keys(numbers, starts, ends))
        elif name == _UNIQUE:
            found.append(_Keys(*[np.empty(0, np.int64)] * 3))
    keys = found[0] if len(found) == 1 else _merged(found[0], _split(table.flat, found[1]))
    bad = np.zeros(len(table), np.bool_)
    hashes = _hashes(table.flat, keys.starts, keys.ends - keys.starts, bad, keys.rows)
    if bad.any():
        return None
    prefix = np.uint32(java_hash(f"{topic}#") & 0xFFFFFFFF)
    signed = _signed(hashes + prefix * _POWERS[keys.ends - keys.starts])
    return Columns(signed, keys.rows, np.full(len(signed), stored_ms))


class _Heads(NamedTuple):
    """Where the variable parts of each record lie in `raw`. Records without keys to index (rolled
    back, no properties, lengths that do not make up its size) have properties of length 0."""

    topics: Positions
    topic_bytes: Positions
    properties: Positions
    properties_bytes: Positions
    times_ms: Positions


def _heads(raw: Bytes, places: Positions) -> _Heads:
    flags = gather(raw, places + 39, "u1")  # the low byte holds all the bits wanted
    born_extra = (flags & 0x10).astype(np.int64) * 12 >> 4
    extra = born_extra + ((flags & 0x20).astype(np.int64) * 12 >> 5)
    times = gather(raw, places + 56 + born_extra, ">i8").astype(np.int64)
    last = places + gather(raw, places, ">i4") - 3  # where the properties' length is at the latest
    at = places + 84 + extra
    body_bytes = gather(raw, np.minimum(at, last), ">i4").astype(np.int64)
    at += 4 + body_bytes
    whole = (body_bytes >= 0) & (at <= last)
    at = np.where(whole, at, last)
    topic_bytes = gather(raw, at, "u1").astype(np.int64)
    is_second = gather(raw, places + 7, "u1") == 0xAB
    if is_second.any():
        topic_bytes[is_second] = gather(raw, at[is_second], ">i2")
        at += is_second
    topics = at + 1
    at = np.clip(topics + topic_bytes, topics, last + 1)
    sizes = gather(raw, at, ">i2").astype(np.int64)
    whole &= (topic_bytes >= 0) & (at + 2 + sizes == last + 3)
    sizes[(flags & ROLLBACK == ROLLBACK) | ~whole] = 0
    return _Heads(topics, topic_bytes, at + 2, sizes, times)


class _Keys(NamedTuple):
    """Intervals of keys in a flat matrix, and whether each is a unique key."""

    rows: Positions
    starts: Positions
    ends: Positions


def _common_keys(raw: Bytes, heads: _Heads, common: NDArray[np.bool_]) -> tuple[Positions, Hashes]:
    """Record numbers and hashes of the keys of the common rows; a row that turns out odd (text
    beyond ASCII) is struck from `common`."""
    rows = np.flatnonzero(common & (heads.properties_bytes > 0))
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.uint32)
    flat, width = _matrix(raw, heads.properties[rows], heads.properties_bytes[rows])
    keys = _find_keys(flat, width)
    bad = np.zeros(len(rows), np.bool_)
    hashes = _hashes(flat, keys.starts, keys.ends - keys.starts, bad, keys.rows)
    topic_bytes = heads.topic_bytes[rows]
    bad |= topic_bytes > _TOPIC_BYTES_MAX
    numbers = np.arange(len(rows))
    topics = _hashes(raw, heads.topics[rows], np.minimum(topic_bytes, 255), bad, numbers)
    prefixes = topics * np.uint32(31) + np.uint32(ord("#"))
    hashes += prefixes[keys.rows] * _POWERS[keys.ends - keys.starts]
    if bad.any():
        common[rows[bad]] = False
        good = ~bad[keys.rows]
        return rows[keys.rows[good]], hashes[good]
    return rows[keys.rows], hashes


def _matrix(raw: Bytes, places: Positions, sizes: Positions) -> tuple[Bytes, int]:
    """The properties as rows of one width, flat: each closed by a separator, zeros behind it."""
    width = int(sizes.max()) + 1 + 8  # the closing separator, and room to look at 8 bytes
    rows = gather(raw, places, f"V{width}").view(np.uint8).reshape(-1, width)
    flat = np.zeros(rows.size + _PAD_BYTES, np.uint8)
    matrix = flat[: rows.size].reshape(rows.shape)
    np.multiply(rows, np.arange(width) < sizes[:, np.newaxis], out=matrix)
    matrix[np.arange(len(rows)), sizes] = 2
    return flat, width


def _find_keys(flat: Bytes, width: int) -> _Keys:
    """The intervals of all keys: of each row the unique key first, then the words of KEYS."""
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
    return _merged(first, _split(flat, rest)) if len(rest.rows) else first


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


def _hashes(
    raw: Bytes, starts: Positions, sizes: Positions, bad: NDArray[np.bool_], rows: Positions
) -> Hashes:
    """Java's hash of the ASCII text at these places; `bad` is set for rows with other bytes."""
    if not len(starts):
        return np.empty(0, np.uint32)
    width = int(sizes.max())
    short = sizes <= _SHORT_KEY_BYTES
    if width > _SHORT_KEY_BYTES and short.any():  # a few long keys must not widen all
        hashes = np.empty(len(starts), np.uint32)
        for part in (short, ~short):
            hashes[part] = _hashes(raw, starts[part], sizes[part], bad, rows[part])
        return hashes
    if not width:
        return np.zeros(len(starts), np.uint32)
    text = gather(raw, starts, f"V{width}").view(np.uint8).reshape(-1, width)
    if (sizes != width).any():
        text = text * (np.arange(width) < sizes[:, np.newaxis])
    if text.max() >= _ASCII_END:
        bad[rows[(text >= _ASCII_END).any(axis=1)]] = True
    weights = _POWERS[width - 1 :: -1] if width > 1 else _POWERS[:1]
    hashes = text.astype(np.uint32) @ np.ascontiguousarray(weights)
    return np.asarray(hashes * _INVERSES[width - sizes])


def _with_odd(
    view: memoryview,
    starts: Positions,
    heads: _Heads,
    found: tuple[Positions, Hashes],
    common: NDArray[np.bool_],
) -> Columns:
    records, raw_hashes = found
    hashes = _signed(raw_hashes)
    if not common.all():
        odd = [
            (record, value)
            for record in map(int, np.flatnonzero(~common))
            for value in keyed_hashes(view, int(starts[record])).hashes
        ]
        added = np.array(odd, np.int64).reshape(-1, 2)
        records = np.concatenate((records, added[:, 0]))
        hashes = np.concatenate((hashes, added[:, 1].astype(np.int32)))
        order = np.argsort(records, kind="stable")
        records, hashes = records[order], hashes[order]
    return Columns(hashes, records, heads.times_ms[records])


def _signed(hashes: Hashes) -> NDArray[np.int32]:
    """As the index has them: never negative."""
    found = np.abs(hashes.astype(np.int32))
    found[found == HASH_MIN] = 0
    return np.asarray(found)


BLOCK_SLOTS: Final = 1024
STEP_SLOTS: Final = 1 << 18
STEP_ENTRIES: Final = 1 << 16
ENTRY_TYPE: Final = INDEX_ENTRY.dtype

Numbers = NDArray[np.int32]


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
