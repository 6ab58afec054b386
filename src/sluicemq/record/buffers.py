"""Arrow arrays from places in a byte buffer, without a Python object a value.

A *place* is a start and a length in bytes. Values of one length are gathered in one NumPy step.
Values of many lengths become Arrow *views* (16 bytes: the length, then the value itself when it
has at most 12 bytes, else its first 4 bytes, a buffer number and an offset), which Arrow copies
into an ordinary binary or string array at memory speed. One trick makes the views cheap: the 16
bytes that begin 4 before a value already hold both its inline form and its prefix, so one gather
writes nearly all of a view.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]

INLINE_BYTES_MAX = 12
"""Longest value that a view holds itself (Arrow columnar format, "Variable-size Binary View")."""
_VIEW_BYTES = 16
_NIBBLES = np.frombuffer(b"0123456789ABCDEF", np.uint8)
HEX_PAIRS = np.stack((_NIBBLES.repeat(16), np.tile(_NIBBLES, 16)), axis=1).copy()
"""Byte value -> its two upper-case hex digits."""


def gather(raw: Bytes, starts: Positions, dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """One value of `dtype` at each start, whatever the alignment. Starts must be inside."""
    kind = np.dtype(dtype)
    if not len(starts):
        return np.empty(0, kind)
    at: NDArray[Any] = np.ndarray(
        (len(raw) - kind.itemsize + 1,), dtype=kind, buffer=raw.data, strides=(1,)
    )
    return at[starts]


def equal_texts(raw: Bytes, starts: Positions, text: bytes) -> NDArray[np.bool_]:
    """Where these bytes stand at a start. They are compared as words of 8, 4, 2 or 1 bytes, the
    last one overlapping: byte by byte takes several times as long. Places must be inside."""
    width = next(size for size in (8, 4, 2, 1) if size <= len(text))
    equal = np.ones(len(starts), np.bool_)
    for at in dict.fromkeys((*range(0, len(text) - width, width), len(text) - width)):
        word = np.frombuffer(text, f"u{width}", 1, at)[0]
        equal &= gather(raw, starts + at, f"u{width}") == word
    return equal


def variable(raw: Bytes, starts: Positions, lengths: Positions, kind: Any) -> Any:
    """An array of pa.binary() or pa.string() of the values at these places."""
    count = len(starts)
    if count and (lengths == lengths[0]).all():
        return _equal_lengths(raw, starts, int(lengths[0]), kind)
    views = _views(raw, starts, lengths)
    form = pa.string_view() if pa.types.is_string(kind) else pa.binary_view()
    buffers = [None, pa.py_buffer(views), pa.py_buffer(raw)]
    return pa.Array.from_buffers(form, count, buffers).cast(kind)


def nullable(raw: Bytes, starts: Positions, lengths: Positions, kind: Any) -> Any:
    """As `variable`, with null where a length is negative."""
    present = lengths >= 0
    if present.all():
        return variable(raw, starts, lengths, kind)
    if not present.any():
        return pa.nulls(len(starts), kind)
    rows = np.cumsum(present, dtype=np.int32) - 1
    values = variable(raw, starts[present], lengths[present], kind)
    return values.take(pa.array(rows, mask=~present))


def _equal_lengths(raw: Bytes, starts: Positions, length: int, kind: Any) -> Any:
    count = len(starts)
    data = gather(raw, starts, f"V{length}") if length else np.empty(0, np.uint8)
    return pa.Array.from_buffers(
        kind, count, [None, even_offsets(count, length), pa.py_buffer(data)]
    )


def even_offsets(count: int, length: int) -> Any:
    """The buffer 0, length, 2*length, … of count + 1 offsets."""
    return pa.py_buffer(
        np.arange(0, (count + 1) * length, length, dtype=np.int32)
        if length
        else np.zeros(count + 1, np.int32)
    )


def _views(raw: Bytes, starts: Positions, lengths: Positions) -> NDArray[np.int32]:
    if len(raw) < _VIEW_BYTES:
        raw = np.concatenate((raw, np.zeros(_VIEW_BYTES, np.uint8)))
    last = len(raw) - _VIEW_BYTES
    begins = starts - 4
    near = np.flatnonzero((begins < 0) | (begins > last))
    if len(near):
        begins = np.clip(begins, 0, last)
    words = gather(raw, begins, f"V{_VIEW_BYTES}").view(np.int32).reshape(-1, 4)
    for row in near:
        _patch(words[row], raw, int(starts[row]), int(lengths[row]))
    words[:, 0] = lengths
    if (lengths > INLINE_BYTES_MAX).any():
        long = np.flatnonzero(lengths > INLINE_BYTES_MAX)
        words[long, 2] = 0
        words[long, 3] = starts[long]
    return words


def _patch(view: NDArray[np.int32], raw: Bytes, start: int, length: int) -> None:
    """The view of a value so near an end of the buffer that 16 bytes cannot be gathered there."""
    piece = raw[start : start + min(length, INLINE_BYTES_MAX)].tobytes()
    view[1:] = np.frombuffer(piece.ljust(INLINE_BYTES_MAX, b"\0"), np.int32)


class Repeated:
    """One text, n times, as an array. Kept and sliced, since blocks of one topic repeat it."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def array(self, text: bytes, count: int) -> Any:
        """pa.string() array with `text` in every row."""
        known = self._known.get(text)
        if known is None or len(known) < count:
            if len(self._known) > 64:
                self._known.clear()
            known = pa.Array.from_buffers(
                pa.string(),
                count,
                [None, even_offsets(count, len(text)), pa.py_buffer(text * count)],
            )
            self._known[text] = known
        return known.slice(0, count)


def hexadecimal(data: Bytes) -> Any:
    """Rows of bytes (2-d) -> pa.string() of upper-case hex digits."""
    count, width = data.shape
    digits = HEX_PAIRS[data].reshape(-1)
    return pa.Array.from_buffers(
        pa.string(), count, [None, even_offsets(count, 2 * width), pa.py_buffer(digits)]
    )
