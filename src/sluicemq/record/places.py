"""Bytes from many places of one buffer at once (NumPy), whatever their alignment.

All that reads stored records in columns begins here: one step takes a number, or so many bytes, at
each of a thousand places. Bytes side by side are a *matrix*, a row a place. What follows the last
record may be out of reach, so a row that goes on behind the end of the buffer is filled up with
zeros. No pyarrow is loaded for any of it: the broker does without.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]


def view_of(raw: Bytes, kind: Any) -> NDArray[Any]:
    """One value of `kind` at every byte, as far as they lie inside."""
    dtype = np.dtype(kind)
    return np.ndarray((max(len(raw) - dtype.itemsize + 1, 0),), dtype, raw.data, strides=(1,))


def gather(raw: Bytes, starts: Positions, kind: Any) -> NDArray[Any]:
    """One value of `kind` at each start. Starts must be inside."""
    dtype = np.dtype(kind)
    if not len(starts):
        return np.empty(0, dtype)
    plain = np.dtype(f"V{dtype.itemsize}") if dtype.names else dtype  # fields: four times as slow
    found: NDArray[Any] = view_of(raw, plain)[starts].view(dtype)
    return found


def rows_at(raw: Bytes, starts: Positions, width: int) -> Bytes:
    """The `width` bytes from each start on, as the rows of a matrix; zeros behind the end."""
    if not width:
        return np.empty((len(starts), 0), np.uint8)
    if len(raw) < width:
        raw = np.concatenate((raw, np.zeros(width - len(raw), np.uint8)))
    last = len(raw) - width
    inside = starts if starts.max(initial=0) <= last else np.minimum(starts, last)
    rows = gather(raw, inside, f"V{width}").view(np.uint8).reshape(len(starts), width)
    if inside is not starts:
        for row in np.flatnonzero(starts > last).tolist():
            rows[row] = np.frombuffer(raw[starts[row] :].tobytes().ljust(width, b"\0"), np.uint8)
    return rows


def column_of(block: Bytes, at: int, kind: str) -> NDArray[Any]:
    """The value of `kind` that begins at byte `at` of each row of a matrix."""
    return np.ndarray((len(block),), kind, block.data, at, (block.shape[1],))


def equal_rows(block: Bytes, text: bytes) -> NDArray[np.bool_]:
    """Which rows of a matrix begin with these bytes. They are compared as words of 8, 4, 2 or 1
    bytes, the last one overlapping: byte by byte takes several times as long."""
    width = next(size for size in (8, 4, 2, 1) if size <= len(text))
    equal: NDArray[Any] = np.ones(len(block), np.bool_)
    for at in dict.fromkeys((*range(0, len(text) - width, width), len(text) - width)):
        word = np.frombuffer(text, f"u{width}", 1, at)[0]
        equal &= column_of(block, at, f"u{width}") == word
    return equal


def keep_freed_memory(size_bytes: int) -> None:
    """Makes glibc keep the memory of so large columns for the next ones. It gives large blocks back
    to the kernel, which then has to clear each page anew (0.05 µs a message), until it has seen one
    as large freed: see mallopt(3), M_MMAP_THRESHOLD. Elsewhere it does nothing."""
    np.empty(size_bytes, np.uint8)
