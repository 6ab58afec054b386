"""Properties of many messages at once: `name 0x01 value 0x02 …` (spec/store.md §2.3).

Messages of one topic nearly always carry the same names in the same order, or one of a few such
sequences. So rows are sorted into *shapes*: all rows of a shape have exactly the same names at the
same turn (`template` proves it byte by byte), and the j-th value of every row is one column of
places; names need no work a row. The first row that has no shape yet is the template of the next
one, and rows that do not fit it wait for another. A row that fits no shape (a name without a value,
a name twice, names that are not UTF-8, or one shape too many) is *odd*: it is decoded by
`codec.decode_properties`, alone, so that the meaning is the scalar codec's.

    shape = names (k0, k1, …)   rows [r0, r1, …]   values: of each name, where they lie
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sluicemq.record.codec import decode_properties
from sluicemq.record.places import Bytes, Positions
from sluicemq.record.template import SAMPLE_ROWS, Follower, Pairs, guesses, pairs_of
from sluicemq.record.values import ValuePlaces, texts

SHAPES_MAX = 64
"""Each shape costs a fixed 100 to 200 µs a block; rows of further shapes go the odd way."""

_SCATTER = 40_503
"""Rows of a sample are so far from each other (modulo their number): not in step with what recurs
every few rows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows with the same names. `rows` is None for all rows of the block, in order; `starts` is
    where the properties of each row begin."""

    names: tuple[bytes, ...]
    rows: Positions | None
    starts: Positions
    values: tuple[ValuePlaces, ...]


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a block of `count` rows."""

    count: int
    shapes: list[Shape]
    odd_rows: Positions
    odd: list[dict[str, str]]


def read_properties(raw: Bytes, starts: Positions, lengths: Positions) -> Properties:
    """Sorts the rows whose properties lie at these places into shapes. What is found refers to
    `raw`; arrays made of it do not."""
    ends = starts + lengths
    shapes: list[Shape] = []
    odd: list[int] = []
    left = np.arange(len(starts))
    while len(left) and len(shapes) < SHAPES_MAX:
        first = int(left[0])
        pairs = pairs_of(raw[starts[first] : ends[first]].tobytes())
        if pairs is None:
            odd.append(first)
            left = left[1:]
        else:
            shape, left = _shape_of(pairs, raw, starts, ends, left)
            shapes.append(shape)
    odd_rows = np.sort(np.array([*odd, *left.tolist()], np.int64))
    decoded = [decode_properties(raw[starts[row] : ends[row]].data) for row in odd_rows.tolist()]
    return Properties(len(starts), shapes, odd_rows, decoded)


def _shape_of(
    pairs: Pairs, raw: Bytes, starts: Positions, ends: Positions, left: Positions
) -> tuple[Shape, Positions]:
    """The shape of the first row that is left, which has these names; and the rows that are left
    then."""
    chosen = left[np.arange(SAMPLE_ROWS) * _SCATTER % len(left)].tolist()
    sample = [raw[starts[row] : ends[row]].tobytes() for row in chosen]
    whole = len(left) == len(starts)
    if not whole:
        starts, ends = starts[left], ends[left]
    names = tuple(name for name, _ in pairs)
    follower = Follower(raw, starts, ends)
    follower.follow(names, guesses(pairs, sample))
    values = tuple(follower.values)
    if follower.rows is None:
        return Shape(names, None if whole else left, starts, values), left[:0]
    inside = follower.rows
    return Shape(names, left[inside], starts[inside], values), np.delete(left, inside)


def shape_arrays(
    found: Properties,
    column: Callable[[Shape], Any],
    odd_column: Callable[[list[dict[str, str]]], Any],
) -> Any:
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


def text_column(found: Properties, name: str) -> Any:
    """The values of one property as a pa.string() array, null where a message has none."""
    wanted = name.encode()

    def column(shape: Shape) -> Any:
        if wanted not in shape.names:
            return pa.nulls(len(shape.starts), pa.string())
        return texts([shape.values[shape.names.index(wanted)]], len(shape.starts))

    def odd_column(rows: list[dict[str, str]]) -> Any:
        return pa.array([row.get(name) for row in rows], pa.string())

    return shape_arrays(found, column, odd_column)
