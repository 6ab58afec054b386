"""The keys of many records at once, and the slots of an index file, as NumPy columns.

`record.codec.hash_keys` finds the keys of one record; this module does the same for thousands.
It examines only the properties, never the bodies. The properties of each record are copied into one
row of a matrix, followed by a separator (0x02) and zeros:

    matrix    a=1 2 UNIQ_KEY=7F00… 2 KEYS=k1 k2 2 0 0 0

The separators of the flat matrix give the beginnings of all properties. The first 8 bytes of each
property tell UNIQ_KEY and KEYS from the others. That gives the intervals of the keys in the matrix;
the value of KEYS is split into words at spaces.

The Java string hash of `topic#key` is computed from the hashes of `topic#` and of the key, which
`record.table.java_hashes` computes. Rows with very long properties or with text beyond ASCII are
*odd*: they are handed to `hash_keys`. A batch that is just being appended may already have the
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
from sluicemq.record.batch_columns import PropertyTable
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
_WORDS: Final = b"KEYS\x01"
_NAMES: Final = (_UNIQUE, _WORDS)
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


def find_record_starts(view: memoryview, index: int, stop: int) -> tuple[Positions, int]:
    """Find the records of a log file that begin from `index` up to, but not including, `stop`.

    `view` contains the bytes of the file. A record must begin at `index`. Indexes count in `view`.

    Return (starts, end): the indexes at which the records begin, and the index at which the next
    call must continue. That is the end of the last record. If a blank record (the filler at the end
    of a full file) or bytes that are no record follow, it is the end of the file. Bytes that are no
    record are logged.
    """
    # Many records at once, up to the first one that is not clearly a record.
    leading_starts = np.empty(0, np.int64)
    if stop - index >= _FAST_BYTES:
        leading_starts = find_leading_starts(np.frombuffer(view[index:stop], np.uint8)) + index
        if len(leading_starts):
            index = int(leading_starts[-1])
            index += _unpack_begin(view, index)[0]

    # The others one by one.
    starts: list[int] = []
    while index < stop:
        size = _read_record_size(view, index)
        if not size:
            index = len(view)
            break
        starts.append(index)
        index += size
    if not starts:
        return leading_starts, index
    return np.append(leading_starts, starts).astype(np.int64), index


def _read_record_size(view: memoryview, index: int) -> int:
    """Return the size of the record at an index of a log file; 0 if the file contains no more.

    The file contains no more records at a blank record (the filler at the end of a full file), and
    at bytes that are no record. Such bytes are logged.
    """
    bytes_left = len(view) - index
    if bytes_left < BLANK_BYTES:
        return 0
    size, magic = _unpack_begin(view, index)
    if magic in MAGICS and RECORD_BYTES_MIN <= size <= bytes_left:
        return int(size)
    if magic != MAGIC_BLANK:
        logger.warning("no record begins at offset %d of a log file; not indexing its rest", index)
    return 0


def read_keys(view: memoryview, start: int, stop: int) -> tuple[KeyColumns, Positions, int]:
    """Read the keys of the records in a log file that begin in [start, stop).

    Return (keys, starts, end). `starts` are the indexes in `view` at which the records begin, and
    `end` is the index at which the next call must continue: the end of the last record, or of the
    file if it contains no more records. The numbers in `keys.records` are indexes into `starts`.

    Uses compiled code if it is installed.
    """
    compiled_result = None
    if engine.keys is not None:
        compiled_result = engine.keys.read(view, start, stop)
    if compiled_result is None:
        starts, end = find_record_starts(view, start, stop)
        return key_columns_at(view, starts), starts, end

    encoded_starts, end, hashes, record_numbers, times_ms = compiled_result
    keys = KeyColumns(
        np.frombuffer(hashes, np.int32),
        np.frombuffer(record_numbers, np.int64),
        np.frombuffer(times_ms, np.int64),
    )
    return keys, np.frombuffer(encoded_starts, np.int64), end


def key_columns_at(view: memoryview, starts: Positions) -> KeyColumns:
    """Return the keys of the records at the indexes `starts` of a log file.

    The records must be complete and valid.
    """
    if len(starts) < ROWS_MIN:
        return scalar_key_columns(view, starts)
    return vectorized_key_columns(view, starts)


def scalar_key_columns(view: memoryview, starts: Positions) -> KeyColumns:
    """Return the keys of the records that begin at the indexes `starts` of a log file.

    `view` contains the bytes of the file. The result has one row for each key, in the order of the
    records. Reads one record at a time: `vectorized_key_columns` is faster for many records.
    """
    hashes: list[int] = []
    record_numbers: list[int] = []
    times_ms: list[int] = []
    for record_number, start in enumerate(starts.tolist()):
        record = hash_keys(view, start)
        key_count = len(record.hashes)
        hashes += record.hashes
        record_numbers += [record_number] * key_count
        times_ms += [record.store_time_ms] * key_count
    return KeyColumns(
        np.array(hashes, np.int32),
        np.array(record_numbers, np.int64),
        np.array(times_ms, np.int64),
    )


def vectorized_key_columns(view: memoryview, starts: Positions) -> KeyColumns:
    """Return the keys of the records that begin at the indexes `starts` of a log file, using NumPy.

    `view` contains the bytes of the file. The records must follow one another, and there must be at
    least one. The result has one row for each key, in the order of the records.

    Odd records, with very long properties or text beyond ASCII, are read one at a time.
    """
    first_start = int(starts[0])
    last_start = int(starts[-1])
    last_end = last_start + _unpack_begin(view, last_start)[0]
    records = Records(np.frombuffer(view[first_start:last_end], np.uint8), starts - first_start)

    # Records of transactions that were rolled back, and records whose lengths disagree, have no
    # keys to index.
    has_keys = records.valid & (records.sys_flag & ROLLBACK != ROLLBACK)
    property_sizes = np.where(has_keys, records.property_lengths, 0)

    # The keys of plain records, in columns. This marks more records as odd in `is_odd`.
    is_odd = property_sizes > PROPERTIES_BYTES_MAX
    plain = np.flatnonzero((property_sizes > 0) & ~is_odd)
    record_numbers, hashes = _hash_plain_records(records, plain, is_odd)
    stored_hashes = _to_stored_hashes(hashes)

    # The keys of odd records, one by one.
    if is_odd.any():
        odd_numbers, odd_hashes = _hash_odd_records(view, starts, np.flatnonzero(is_odd))
        record_numbers = np.concatenate((record_numbers, odd_numbers))
        stored_hashes = np.concatenate((stored_hashes, odd_hashes))
        # Restore the order of the records.
        order = np.argsort(record_numbers, kind="stable")
        record_numbers = record_numbers[order]
        stored_hashes = stored_hashes[order]
    times_ms = records.field("store_time")[record_numbers]
    return KeyColumns(stored_hashes, record_numbers, times_ms)


def _hash_plain_records(
    records: Records, plain: Positions, is_odd: Mask
) -> tuple[Positions, NDArray[np.uint32]]:
    """Hash the keys of the records with the numbers `plain`; mark those that need another method.

    Return (record numbers, hashes), one item of each for each key. A record with text beyond ASCII
    in a key is marked as True in `is_odd`, and has no items in the result.
    """
    if not len(plain):
        return np.empty(0, np.int64), np.empty(0, np.uint32)
    flat, keys = _find_keys(
        records.raw, records.property_starts[plain], records.property_lengths[plain]
    )
    record_numbers = plain[keys.rows]
    topics, topic_indices = records.topics
    prefixes = [_hash_prefix(str(topic, "utf-8", "replace")) for topic in topics]
    prefix_of_key = np.array(prefixes, np.uint32)[topic_indices[record_numbers]]
    hashes, is_bad = _hash_keys_in(flat, keys, prefix_of_key)
    if is_bad.any():
        is_odd[record_numbers[is_bad]] = True
        is_plain = ~is_odd[record_numbers]
        record_numbers = record_numbers[is_plain]
        hashes = hashes[is_plain]
    return record_numbers, hashes


def _hash_odd_records(
    view: memoryview, starts: Positions, odd: Positions
) -> tuple[Positions, Numbers]:
    """Hash the keys of the records with the numbers `odd`, one record at a time.

    The records begin at the indexes `starts` of the log file `view`. Return (record numbers, hashes
    as the index file stores them), one item of each for each key.
    """
    record_numbers: list[int] = []
    hashes: list[int] = []
    for record_number in odd.tolist():
        record = hash_keys(view, int(starts[record_number]))
        hashes += record.hashes
        record_numbers += [record_number] * len(record.hashes)
    return np.array(record_numbers, np.int64), np.array(hashes, np.int64).astype(np.int32)


def key_columns_of_batch(topic: str, batch: Batch, stored_ms: int) -> KeyColumns | None:
    """Return the keys of a batch of messages of `topic` that is appended at `stored_ms`.

    The keys come from the table of properties that the batch was made with, so the log need not be
    read. Return None if that is not possible, and the caller must read the log: the batch has no
    such table, or a key in it is empty, repeated or not ASCII, or a message was rolled back.
    """
    table = batch.table
    if table is None or any(name in batch.properties_suffix for name in _NAMES):
        return None
    if (batch.heads["sys_flag"] & ROLLBACK == ROLLBACK).any():
        return None
    unique_keys = _find_keys_of_column(table, b"UNIQ_KEY")
    word_lists = _find_keys_of_column(table, b"KEYS")
    if unique_keys is None or word_lists is None:
        return None
    keys = unique_keys
    if len(word_lists.rows):
        keys = _merge_keys(unique_keys, _split_words(table.flat, word_lists))
    prefix = np.array([_hash_prefix(topic)], np.uint32)
    hashes, is_bad = _hash_keys_in(table.flat, keys, prefix)
    if is_bad.any():
        return None
    return KeyColumns(_to_stored_hashes(hashes), keys.rows, np.full(len(hashes), stored_ms))


def _find_keys_of_column(table: PropertyTable, name: bytes) -> "_Keys | None":
    """Return where the values of the property `name` are, one for each row of the table.

    If the table has no such column, the result is empty. Return None if a value is the empty text.
    """
    column = table.index_of(name)
    if column is None:
        nothing = np.empty(0, np.int64)
        return _Keys(nothing, nothing, nothing)
    starts, ends = table.value_bounds(column)
    if (starts == ends).any():
        return None
    return _Keys(np.arange(len(table)), starts, ends)


class _Keys(NamedTuple):
    """The intervals of keys in a flat matrix."""

    rows: Positions
    """The row of each key."""
    starts: Positions
    """The index at which each key begins."""
    ends: Positions
    """The index after each key."""


@lru_cache(1 << 14)
def _hash_prefix(topic: str) -> int:
    """Return the Java hash of `topic#`, which precedes a key, as an unsigned number."""
    return java_hash(f"{topic}#") & 0xFFFFFFFF


def _hash_keys_in(
    flat: Bytes, keys: _Keys, prefixes: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], Mask]:
    """Return (hashes, is_odd): the hashes of `topic#key` for each key, and which keys are odd.

    `prefixes` are the hashes of `topic#`, one for each key or one for all. The hash of an odd key
    is not valid: `hash_keys` must compute it.
    """
    sizes = keys.ends - keys.starts
    hashes, is_odd = java_hashes(flat, keys.starts, sizes)
    return hashes + prefixes * POWERS[np.minimum(sizes, len(POWERS) - 1)], is_odd


def _to_stored_hashes(hashes: NDArray[np.uint32]) -> Numbers:
    """Return hashes as the index stores them: their absolute values, as signed numbers."""
    absolute = np.abs(hashes.astype(np.int32))
    absolute[absolute == HASH_MIN] = 0  # -2**31 has no absolute value of 32 bits
    return np.asarray(absolute)


def _find_keys(raw: Bytes, starts_in_raw: Positions, sizes: Positions) -> tuple[Bytes, _Keys]:
    """Return (flat, keys): the properties of all rows as one array, and where their keys are in it.

    The properties of row i are the `sizes[i]` bytes at index `starts_in_raw[i]` of `raw`. The keys
    of a row are the value of UNIQ_KEY, then the words of KEYS. If a property occurs several times
    in a row, its last value counts.
    """
    flat, width = _flatten_properties(raw, starts_in_raw, sizes)

    # Each property ends at a separator (byte 2). It begins behind the separator before it, or with
    # its row.
    ends = np.flatnonzero(flat == 2)
    rows = ends // width
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    first_of_row = np.flatnonzero(rows[1:] != rows[:-1]) + 1
    starts[first_of_row] = rows[first_of_row] * width

    # A property is b"UNIQ_KEY\x01VALUE" or b"KEYS\x01VALUE". Its first 8 bytes, read as one number,
    # tell which one it is.
    names = gather(flat, starts, "<u8")
    value_start = len(_UNIQUE)
    is_unique = names == _UNIQUE_NAME
    # Byte 1 must follow the name, and the value must not be empty.
    is_unique &= (flat[starts + value_start - 1] == 1) & (ends - starts > value_start)
    unique_keys = _keep_last_of_row(
        _Keys(rows[is_unique], starts[is_unique] + value_start, ends[is_unique])
    )
    value_start = len(_WORDS)
    is_words = ((names & _KEYS_MASK) == _KEYS_NAME) & (ends - starts > value_start)
    word_lists = _keep_last_of_row(
        _Keys(rows[is_words], starts[is_words] + value_start, ends[is_words])
    )
    if not len(word_lists.rows):
        return flat, unique_keys
    return flat, _merge_keys(unique_keys, _split_words(flat, word_lists))


def _flatten_properties(
    raw: Bytes, starts_in_raw: Positions, sizes: Positions
) -> tuple[Bytes, int]:
    """Copy the properties of all rows into one array, in which every row has `width` bytes.

    The properties of row i are the `sizes[i]` bytes at index `starts_in_raw[i]` of `raw`. Return
    (flat array, width). In the array, each row is followed by a separator (byte 2), and filled with
    zeros up to `width`. Eight more bytes follow the last row, so that eight bytes can be read from
    any property on.
    """
    width = int(sizes.max()) + 1 + _LOOK_BYTES  # one byte is for the closing separator
    matrix = rows_at(raw, starts_in_raw, width)
    flat = np.zeros(matrix.size + _LOOK_BYTES, np.uint8)
    filled = flat[: matrix.size].reshape(matrix.shape)
    # Multiplying by the mask sets the bytes behind the properties of each row to zero.
    np.multiply(matrix, np.arange(width) < sizes[:, np.newaxis], out=filled)
    filled[np.arange(len(matrix)), sizes] = 2
    return flat, width


def _merge_keys(unique_keys: _Keys, words: _Keys) -> _Keys:
    """Return all keys sorted by row. Within a row, the unique key comes first."""
    rows = np.concatenate((unique_keys.rows, words.rows))
    starts = np.concatenate((unique_keys.starts, words.starts))
    ends = np.concatenate((unique_keys.ends, words.ends))
    order = np.argsort(rows, kind="stable")
    return _Keys(rows[order], starts[order], ends[order])


def _keep_last_of_row(keys: _Keys) -> _Keys:
    """Return only the last key of each row.

    Several keys of a row are values of the same property, and only the last value of a repeated
    property counts.
    """
    rows = keys.rows
    is_last = np.append(rows[1:] != rows[:-1], True)[: len(rows)]
    if is_last.all():
        return keys
    return _Keys(rows[is_last], keys.starts[is_last], keys.ends[is_last])


def _split_words(flat: Bytes, keys: _Keys) -> _Keys:
    """Split each key at its spaces, and return the words in order.

    Empty words are skipped. Each word keeps the row of its key.
    """
    # Find the spaces within keys. The owner of a space is the last key that begins before it; the
    # space is within that key if the key ends after it.
    spaces = np.flatnonzero(flat == 32)
    owners = np.searchsorted(keys.starts, spaces, side="right") - 1
    spaces = spaces[(owners >= 0) & (spaces < keys.ends[owners])]
    if not len(spaces):
        return keys

    # A word begins with its key or behind a space, and ends with its key or before a space. So
    # sorting all begins and all ends makes pairs of them.
    starts = np.sort(np.concatenate((keys.starts, spaces + 1)))
    ends = np.sort(np.concatenate((keys.ends, spaces)))
    rows = keys.rows[np.searchsorted(keys.starts, starts, side="right") - 1]
    is_word = ends > starts
    return _Keys(rows[is_word], starts[is_word], ends[is_word])


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

    def link(self, hashes: Numbers, first_number: int) -> SlotLinks:
        """Compute how new entries with these hashes join the chains of their slots.

        The entries of a slot form a chain: each one names the entry before it, from the newest to
        the oldest. The new entries get consecutive numbers, from `first_number` on.

        Changes nothing. Pass the result to `apply` to change the slots.
        """
        newest_by_slot = self._newest
        slots = hashes % np.int32(len(newest_by_slot))
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order]
        sorted_numbers = order.astype(np.int32) + np.int32(first_number)
        previous_sorted = newest_by_slot[sorted_slots]

        # The first new entry of a slot follows the entry that the slot had; the others follow the
        # new entry before them.
        is_head = np.ones(len(sorted_slots), np.bool_)
        np.not_equal(sorted_slots[1:], sorted_slots[:-1], out=is_head[1:])
        used_count = int(np.count_nonzero(is_head & (previous_sorted == 0)))
        previous_sorted[1:][~is_head[1:]] = sorted_numbers[:-1][~is_head[1:]]
        previous = np.empty_like(previous_sorted)
        previous[order] = previous_sorted

        # The last new entry of a slot becomes its newest one.
        is_last = np.append(is_head[1:], True)
        return SlotLinks(previous, sorted_slots[is_last], sorted_numbers[is_last], used_count)

    def apply(self, links: SlotLinks) -> None:
        """Change the slots to the new values that `link` returned, and note that they changed."""
        self._newest[links.slots] = links.newest
        self._dirty[links.slots // BLOCK_SLOTS] = True

    # --- from and to the file

    def load(self, stored: memoryview, count: int) -> Iterator[None]:
        """Set the slots from their bytes in an index file, step by step while the caller iterates.

        `stored` has one big-endian 32-bit entry number for each slot. Valid numbers are 1 to
        `count` - 1; others count as 0, an empty slot.
        """
        stored_numbers = np.frombuffer(stored, ">i4")
        for start in range(0, len(stored_numbers), STEP_SLOTS):
            numbers = stored_numbers[start : start + STEP_SLOTS]
            if numbers.any():  # else pages of the array would be touched for nothing
                is_valid = (numbers > 0) & (numbers < count)
                self._newest[start : start + STEP_SLOTS] = np.where(is_valid, numbers, 0)
            yield

    def rebuild(self, stored_entries: memoryview) -> Iterator[None]:
        """Set the slots from all entries of a file, step by step while the caller iterates.

        `stored_entries` contains the entries, the first of which has number 1. Each slot gets the
        number of the newest entry whose hash belongs to it. The slots must be empty before.
        Afterwards all slots count as changed.
        """
        hashes = np.frombuffer(stored_entries, ENTRY_TYPE)["hash"]
        for start in range(0, len(hashes), STEP_ENTRIES):
            step_hashes = hashes[start : start + STEP_ENTRIES].astype(np.int32) & np.int32(
                0x7FFFFFFF
            )
            slots = step_hashes % np.int32(len(self._newest))
            # If a slot occurs several times, the last assignment counts, which is the newest entry.
            self._newest[slots] = np.arange(start + 1, start + 1 + len(step_hashes), dtype=np.int32)
            yield
        self._dirty[:] = True

    def count_used(self) -> int:
        """Return how many slots have an entry."""
        return int(np.count_nonzero(self._newest))

    def iter_changed(self) -> Iterator[tuple[int, bytes]]:
        """Yield each run of changed blocks of slots as (first slot, bytes for the file).

        Changes are noted for blocks of BLOCK_SLOTS slots. The bytes may contain slots behind the
        last one of the file, because the last block may be larger than its rest.
        """
        dirty_blocks = np.flatnonzero(self._dirty)
        if not len(dirty_blocks):
            return
        run_begins = np.flatnonzero(np.diff(dirty_blocks) != 1) + 1
        for blocks in np.split(dirty_blocks, run_begins):
            start = int(blocks[0]) * BLOCK_SLOTS
            end = (int(blocks[-1]) + 1) * BLOCK_SLOTS
            yield start, self._newest[start:end].astype(">i4").tobytes()

    def mark_written(self) -> None:
        """Note that everything that `iter_changed` has yielded is written."""
        self._dirty[:] = False


def encode_entries(
    hashes: Numbers, offsets: NDArray[np.int64], seconds: NDArray[np.int64], previous: Numbers
) -> bytes:
    """Return entries of the index as the bytes in the file, 20 bytes for each entry.

    The arrays have one item for each entry: the hash of the key, the position of the record in the
    log, the seconds since the begin of the file, and the number of the previous entry of the slot.
    Seconds are limited to 0 … 2**31 - 1.
    """
    entries = np.empty(len(hashes), ENTRY_TYPE)
    entries["hash"] = hashes
    entries["position"] = offsets
    entries["seconds"] = np.clip(seconds, 0, 0x7FFFFFFF)
    entries["previous"] = previous
    return entries.tobytes()
