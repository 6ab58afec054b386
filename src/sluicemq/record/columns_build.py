"""Blocks of property columns out of stored records, in columns all the way.

    log      record | record | record …      units of the queue: where its records lie
    places   properties of every record, found with NumPy          (lengths that do not agree: odd)
    shapes   rows with the same names; the j-th value of all rows is one run of places
    columns  an Arrow dictionary array a name, made into a `Column` when somebody reads that name

No Python object is made for a message. Values are exactly those that `codec.decode_properties`
gives: rows that need care (a name twice, separators in a value, bytes that are not UTF-8) are
decoded by it, alone, and their values put among the others. A property test holds both equal.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sluicemq.model.message import KEYS, UNIQ_KEY
from sluicemq.record.codec import CHECKSUM_NAME
from sluicemq.record.columns import Column, ColumnBlock, LazyColumns, Values
from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.record.properties import Properties, read_properties, text_column
from sluicemq.record.table import Bytes, Mask, Positions, Records
from sluicemq.record.texts import variable

NEVER_COLUMNS: Final = frozenset((UNIQ_KEY, KEYS, CHECKSUM_NAME))
"""Properties with another value in every message: a column of them would be the log once more."""
COLUMNS_MAX: Final = 64
UNIQUE_VALUE_BYTES: Final = 16
"""Values longer than this on average are no column when most of them occur once."""
_UNIQUE_ROWS_MIN: Final = 256


class ArrowColumns(LazyColumns):
    """Columns that lie in Arrow dictionary arrays."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        def make(name: str) -> Column:
            values = Values(arrays[name].dictionary.to_pylist())
            codes = _codes(arrays[name]).astype(_code_type(len(values)), copy=False)
            return Column(codes, values)

        super().__init__(arrays.keys(), make)
        self.arrays = arrays


def _codes(array: Any) -> NDArray[Any]:
    """The codes of an Arrow dictionary array, -1 for null."""
    return np.asarray(array.indices.fill_null(-1) if array.null_count else array.indices)


def _code_type(count: int) -> Any:
    """The smallest type that numbers so many values."""
    return np.int8 if count <= 0x80 else np.int16 if count <= 0x8000 else np.int32


# --- from the log


class LogPiece(NamedTuple):
    """The bytes of the log from the position `base` on (of one file, as a rule)."""

    base: int
    data: Bytes


def build_block(
    first_offset: int,
    positions: Positions,
    sizes: Positions,
    pieces: Sequence[LogPiece],
    columns_max: int = COLUMNS_MAX,
) -> ColumnBlock:
    """The block of the records of `sizes` bytes at these positions of the log, row by row.

    A row whose record lies in none of the pieces, or whose lengths do not agree, is odd.
    """
    rows = len(positions)
    found: list[tuple[Bytes, Positions, Positions, Positions]] = []
    for base, raw in pieces:
        mine = np.flatnonzero((positions >= base) & (positions < base + len(raw)))
        starts, lengths, good = _places(raw, positions[mine], base, sizes[mine])
        found.append((raw, starts[good], lengths[good], mine[good]))
    raw, starts, lengths, members = _joined(found)
    properties = read_properties(raw, starts, lengths) if len(members) else None
    arrays, excluded = ({}, frozenset[str]()) if properties is None else _arrays(
        properties, columns_max
    )  # fmt: skip
    odd = np.empty(0, np.int64)
    if len(members) != rows:
        odd = np.setdiff1d(np.arange(rows), members)
        for name, array in arrays.items():
            codes = np.full(rows, -1, np.int32)
            codes[members] = _codes(array)
            arrays[name] = dictionary_array(codes, array.dictionary)
    return ColumnBlock(first_offset, rows, ArrowColumns(arrays), excluded, odd)


def _places(
    raw: Bytes, positions: Positions, base: int, sizes: Positions
) -> tuple[Positions, Positions, Mask]:
    """Where the properties of the records lie in `raw`: starts, lengths; which rows are good."""
    at = positions - base
    good = (at >= 0) & (sizes >= RECORD_BYTES_MIN) & (at + sizes <= len(raw))
    if len(raw) < RECORD_BYTES_MIN:
        return at, sizes, good
    found = Records(raw, at if good.all() else np.where(good, at, 0), base)
    good &= found.good & (found.sizes == sizes) & (found.number("physical_offset") == positions)
    return found.property_starts, found.property_lengths, good


def _joined(
    found: list[tuple[Bytes, Positions, Positions, Positions]],
) -> tuple[Bytes, Positions, Positions, Positions]:
    """The properties of several pieces in one run of bytes, in the order of the rows."""
    found = [part for part in found if len(part[3])]
    if not found:
        nothing = np.empty(0, np.int64)
        return np.empty(0, np.uint8), nothing, nothing, nothing
    if len(found) == 1:
        return found[0]
    runs, starts, filled = [], [], 0
    for raw, places, lengths, _ in found:
        _, offsets, data = variable(raw, places, lengths, pa.binary()).buffers()
        bounds = np.frombuffer(offsets, np.int32, len(places) + 1).astype(np.int64)
        size = int(bounds[-1])
        runs.append(np.frombuffer(data, np.uint8, size) if size else np.empty(0, np.uint8))
        starts.append(bounds[:-1] + filled)
        filled += size
    rows = np.concatenate([part[3] for part in found])
    order = np.argsort(rows, kind="stable")
    all_lengths = np.concatenate([part[2] for part in found])
    # `read_properties` looks a byte behind the last value, whatever it is.
    joined = np.concatenate([*runs, np.zeros(1, np.uint8)])
    return joined, np.concatenate(starts)[order], all_lengths[order], rows[order]


def _arrays(found: Properties, columns_max: int) -> tuple[dict[str, Any], frozenset[str]]:
    """An array a name, and the names that occur and are none."""
    counts: Counter[str] = Counter()
    for shape in found.shapes:
        for raw_name in shape.names:
            counts[raw_name.decode()] += len(shape.starts)
    for row in found.odd:
        counts.update(row.keys())
    excluded = {name for name in counts if name in NEVER_COLUMNS}
    arrays: dict[str, Any] = {}
    for name, _ in counts.most_common():
        if name in excluded:
            continue
        if len(arrays) == columns_max:
            excluded.add(name)
            continue
        array = text_column(found, name).dictionary_encode()
        if _is_unique(array):
            excluded.add(name)
        else:
            arrays[name] = dictionary_array(_codes(array), array.dictionary)
    return arrays, frozenset(excluded)


def _is_unique(array: Any) -> bool:
    """Whether most values are long and occur once: nothing is gained by a column."""
    distinct, rows = len(array.dictionary), len(array) - array.null_count
    if rows < _UNIQUE_ROWS_MIN or 2 * distinct < rows:
        return False
    return bool(array.dictionary.nbytes > (UNIQUE_VALUE_BYTES + 4) * distinct)


def dictionary_array(codes: NDArray[Any], values: Any) -> Any:
    """Codes (-1: null) and values as an Arrow dictionary array of the smallest code type."""
    codes = np.ascontiguousarray(codes, _code_type(len(values)))
    present = codes >= 0
    bitmap = None
    if not present.all():
        bitmap = pa.py_buffer(np.packbits(present, bitorder="little"))
    # Not `pa.array`, which looks for pandas: a quarter of a second when it is installed.
    kind = {1: pa.int8(), 2: pa.int16(), 4: pa.int32()}[codes.itemsize]
    indices = pa.Array.from_buffers(kind, len(codes), [bitmap, pa.py_buffer(codes)])
    return pa.DictionaryArray.from_arrays(indices, values)


# --- several blocks into one


def merged_arrays(blocks: Sequence[ColumnBlock]) -> tuple[dict[str, Any], frozenset[str]]:
    """The columns of consecutive blocks as one array a name, and the names that are none.

    What one of the blocks leaves out is left out. All must have been made by `build_block`.
    """
    excluded = frozenset[str]().union(*(block.excluded for block in blocks))
    names = dict.fromkeys(name for block in blocks for name in block.columns)
    merged = {name: _merged(blocks, name) for name in names if name not in excluded}
    unique = {name for name, array in merged.items() if _is_unique(array)}
    kept = {name: array for name, array in merged.items() if name not in unique}
    return kept, excluded | unique


def _merged(blocks: Sequence[ColumnBlock], name: str) -> Any:
    """One array of all rows: the dictionaries are numbered anew, all together."""
    found = [
        (block.columns.arrays.get(name) if isinstance(block.columns, ArrowColumns) else None)
        for block in blocks
    ]
    joined = pa.concat_arrays([array.dictionary for array in found if array is not None])
    numbered = joined.dictionary_encode()
    numbers = np.asarray(numbered.indices)
    parts, at = [], 0
    for block, array in zip(blocks, found, strict=True):
        if array is None:
            parts.append(np.full(block.rows, -1, np.int32))
            continue
        # One more at the end, for the code -1.
        mine = np.append(numbers[at : at + len(array.dictionary)], -1)
        at += len(array.dictionary)
        parts.append(mine[_codes(array)])
    return dictionary_array(np.concatenate(parts), numbered.dictionary)
