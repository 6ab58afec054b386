"""Properties of many messages at once: `name 0x01 value 0x02 …` (spec/store.md §2.3).

Messages of one topic nearly always carry the same names in the same order, or one of a few such
sequences. So rows are sorted into *shapes*: all rows of a shape have exactly the same names at the
same turn, which is proved by comparing the bytes; then the j-th value of every row is one column of
places, and the names need no work a row. A row that fits no shape (a name without a value, a
separator inside a value, a name twice, bytes that are not UTF-8, or one shape too many) is *odd*:
it is decoded by `codec.decode_properties`, alone, so that the meaning is the scalar codec's.

    shape = names (k0, k1, …)   rows [r0, r1, …]   value starts and ends: a matrix rows x names
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sluicemq.record.buffers import Bytes, Positions, equal_texts, gather, variable
from sluicemq.record.codec import decode_properties

SHAPES_MAX = 64
"""Each shape costs a fixed 30 to 60 µs a block; rows of further shapes go the odd way."""
_NAME_VALUE, _PROPERTY = 1, 2
_ASCII_END = 0x80


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows with the same names. `rows` is None for all rows of the block, in order."""

    names: tuple[bytes, ...]
    rows: Positions | None
    starts: Positions
    lengths: Positions


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a block: `text` holds those of all rows, the shapes point into it."""

    text: Bytes
    count: int
    shapes: list[Shape]
    odd_rows: Positions
    odd: list[dict[str, str]]


def read_properties(raw: Bytes, starts: Positions, lengths: Positions) -> Properties:
    """Sorts the rows whose properties lie at these places into shapes."""
    text, offsets = _compact(raw, starts, lengths)
    count = len(starts)
    separators = np.flatnonzero((text - np.uint8(1)) < 2)
    good = _utf8_rows(text, offsets)
    shapes: list[Shape] = []
    odd: list[Positions] = []
    for rows, matrix in _by_count(separators, offsets, good):
        odd.append(_shapes_of(text, offsets, rows, matrix, shapes))
    if good is not None:
        odd.append(np.flatnonzero(~good))
    odd_rows = np.sort(np.concatenate(odd)) if odd else np.empty(0, np.int64)
    decoded = [decode_properties(text[offsets[r] : offsets[r + 1]].data) for r in odd_rows]
    return Properties(text, count, shapes, odd_rows, decoded)


def _compact(raw: Bytes, starts: Positions, lengths: Positions) -> tuple[Bytes, Positions]:
    """The properties of all rows in one run, each ending with a separator, and their offsets.

    The last separator may be missing (spec/store.md §2.3): then one byte more is copied, whatever
    it is, and written over.
    """
    last = gather(raw, np.maximum(starts + lengths - 1, 0), "u1")
    open_rows = np.flatnonzero((last != _PROPERTY) & (lengths > 0))
    if len(open_rows):
        lengths = lengths.copy()
        lengths[open_rows] += 1
        if starts[-1] + lengths[-1] > len(raw):
            raw = np.append(raw, np.uint8(_PROPERTY))
    joined = variable(raw, starts, lengths, pa.binary())
    _, offsets, data = joined.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(starts) + 1).astype(np.int64)
    text = np.frombuffer(data, np.uint8, int(bounds[-1])) if data else np.empty(0, np.uint8)
    if len(open_rows):
        text = text.copy()
        text[bounds[open_rows + 1] - 1] = _PROPERTY
    return text, bounds


def _utf8_rows(text: Bytes, offsets: Positions) -> NDArray[np.bool_] | None:
    """Which rows are UTF-8; None when all are. Separators are ASCII: parts are when the row is."""
    if not len(text) or text.max() < _ASCII_END or _is_utf8(text):
        return None
    good = np.ones(len(offsets) - 1, np.bool_)
    high = np.flatnonzero(text >= _ASCII_END)
    for row in np.unique(np.searchsorted(offsets, high, side="right") - 1):
        good[row] = _is_utf8(text[offsets[row] : offsets[row + 1]])
    return good


def _is_utf8(data: Bytes) -> bool:
    try:
        str(data.data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _by_count(
    separators: Positions, offsets: Positions, good: NDArray[np.bool_] | None
) -> Iterator[tuple[Positions | None, Positions]]:
    """Rows with equally many separators, and a matrix of where these stand."""
    count = len(offsets) - 1
    if good is None and count and len(separators) % count == 0:
        matrix = separators.reshape(count, -1)
        if matrix.shape[1] and (matrix[:, -1] == offsets[1:] - 1).all():
            yield None, matrix
            return
    firsts = np.searchsorted(separators, offsets)
    counts = np.diff(firsts)
    if good is not None:
        counts[~good] = -1
    for width in np.unique(counts):
        if width >= 0:
            rows = np.flatnonzero(counts == width)
            yield rows, separators[firsts[rows][:, np.newaxis] + np.arange(width)]


def _shapes_of(
    text: Bytes, offsets: Positions, rows: Positions | None, matrix: Positions, shapes: list[Shape]
) -> Positions:
    """Adds the shapes found among rows of equally many separators; returns the odd rows."""
    count, width = matrix.shape
    everything = np.arange(count) if rows is None else rows
    starts = offsets[:-1] if rows is None else offsets[rows]
    if width == 0:
        shapes.append(Shape((), rows, matrix, matrix))
        return np.empty(0, np.int64)
    if width % 2:
        return everything
    left: Positions | None = None  # indices into matrix; None is all
    while len(shapes) < SHAPES_MAX:
        part = matrix if left is None else matrix[left]
        names, fits = _fitting(text, starts if left is None else starts[left], part)
        if names is None:
            break
        shapes.append(_shape(names, part, fits, rows, left))
        if fits.all():
            return np.empty(0, np.int64)
        left = np.flatnonzero(~fits) if left is None else left[~fits]
    return everything if left is None else everything[left]


def _shape(
    names: tuple[bytes, ...],
    part: Positions,
    fits: NDArray[np.bool_],
    rows: Positions | None,
    left: Positions | None,
) -> Shape:
    whole = bool(fits.all())
    member = part if whole else part[fits]
    starts = member[:, 0::2] + 1
    if whole and left is None:
        return Shape(names, rows, starts, member[:, 1::2] - starts)
    inside = np.flatnonzero(fits) if left is None else left[fits]
    return Shape(names, inside if rows is None else rows[inside], starts, member[:, 1::2] - starts)


def _fitting(
    text: Bytes, starts: Positions, matrix: Positions
) -> tuple[tuple[bytes, ...] | None, NDArray[np.bool_]]:
    """The names of the first regular row, and which rows have the same; None when none is regular.

    Regular: name, 0x01, value, 0x02 in turn, neither empty, no name twice.
    """
    name_ends = matrix[:, 0::2]
    name_starts = np.concatenate((starts[:, np.newaxis], matrix[:, 1:-1:2] + 1), axis=1)
    turns = np.tile(np.array((_NAME_VALUE, _PROPERTY), np.uint8), matrix.shape[1] // 2)
    regular = _rows(text[matrix] == turns)
    regular &= _rows(name_ends > name_starts)
    regular &= _rows(matrix[:, 1::2] > name_ends + 1)
    for row in np.flatnonzero(regular):
        names = tuple(
            text[start:end].tobytes()
            for start, end in zip(name_starts[row], name_ends[row], strict=True)
        )
        if len(set(names)) == len(names):
            return names, _same_names(text, names, name_starts, name_ends, regular)
        regular[row] = False
    return None, regular


def _same_names(
    text: Bytes,
    names: tuple[bytes, ...],
    starts: Positions,
    ends: Positions,
    regular: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Which regular rows have exactly these names, by their bytes."""
    fits = regular & _rows(ends - starts == [len(name) for name in names])
    rows = None if fits.all() else np.flatnonzero(fits)
    for turn, name in enumerate(names):
        column = starts[:, turn] if rows is None else starts[rows, turn]
        same = equal_texts(text, column, name)
        if rows is None:
            fits &= same
        else:
            fits[rows] &= same
    return fits


def _rows(matrix: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows are true throughout. The whole is looked at first: fast, and the usual case."""
    if matrix.all():
        return np.ones(len(matrix), np.bool_)
    return np.asarray(matrix.all(axis=1))


def shape_arrays(found: Properties, column: Any, odd_column: Any) -> Any:
    """`column(shape)` of every shape and `odd_column(dicts)`, put back into the order of rows."""
    parts = [column(shape) for shape in found.shapes]
    if len(parts) == 1 and found.shapes[0].rows is None:
        return parts[0]
    rows = [shape.rows for shape in found.shapes if shape.rows is not None]
    if found.odd:
        parts.append(odd_column(found.odd))
        rows.append(found.odd_rows)
    if not parts:
        return odd_column([])
    order = np.empty(found.count, np.int64)
    order[np.concatenate(rows)] = np.arange(found.count)
    return pa.concat_arrays(parts).take(pa.array(order))


def value_places(shape: Shape, name: bytes) -> tuple[Positions, Positions] | None:
    """Starts and lengths of the values of one name in a shape's rows; None when it has none."""
    if name not in shape.names:
        return None
    turn = shape.names.index(name)
    return shape.starts[:, turn], shape.lengths[:, turn]


def text_column(found: Properties, name: str) -> Any:
    """The values of one property as a pa.string() array, null where a message has none."""
    wanted = name.encode()

    def column(shape: Shape) -> Any:
        places = value_places(shape, wanted)
        if places is None:
            return pa.nulls(len(shape.starts), pa.string())
        return variable(found.text, *places, pa.string())

    def odd_column(rows: list[dict[str, str]]) -> Any:
        return pa.array([row.get(name) for row in rows], pa.string())

    return shape_arrays(found, column, odd_column)
