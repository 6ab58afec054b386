"""Arrow arrays from places in a byte buffer, without a Python object a value.

A *place* is a start and a length in bytes. Values of one length are gathered in one NumPy step.
Values of many lengths become Arrow *views* (16 bytes: the length, then the value itself when it
has at most 12 bytes, else its first 4 bytes, a buffer number and an offset), which Arrow copies
into an ordinary binary or string array at memory speed. One trick makes the views cheap: the 16
bytes that begin 4 before a value already hold both its inline form and its prefix, so one gather
writes nearly all of a view.

Bytes from many places side by side are a *matrix*, a row a place (`places.rows_at`).
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sluicemq.record.places import Bytes, Positions, gather, rows_at

INLINE_BYTES_MAX = 12
"""Longest value that a view holds itself (Arrow columnar format, "Variable-size Binary View")."""
_VIEW_BYTES = 16
_PIECE_BYTES = 256 * 1024
_NIBBLES = np.frombuffer(b"0123456789ABCDEF", np.uint8)
HEX_PAIRS = (
    np.stack((_NIBBLES.repeat(16), np.tile(_NIBBLES, 16)), axis=1).reshape(-1).view(np.uint16)
)
"""Byte value -> its two upper-case hex digits, as one number."""


def words_at(raw: Bytes, starts: Positions) -> NDArray[np.uint64]:
    """The 8 bytes from each start on as a number, the first one lowest; zeros behind the end."""
    return rows_at(raw, starts, 8).reshape(-1).view("<u8")


def everywhere(raw: Bytes, starts: Positions, text: bytes) -> bool:
    """Whether these bytes stand at all of the starts. Looked at in pieces that stay in the
    processor's cache; in a piece, the first row is the text and each is as the one before."""
    width = len(text)
    step = max(1, _PIECE_BYTES // width)
    for begin in range(0, len(starts), step):
        flat = rows_at(raw, starts[begin : begin + step], width).reshape(-1)
        if flat[:width].tobytes() != text or not (flat[width:] == flat[:-width]).all():
            return False
    return True


def variable(raw: Bytes, starts: Positions, lengths: Positions, kind: Any) -> Any:
    """An array of pa.binary() or pa.string() of the values at these places."""
    count = len(starts)
    if count and (lengths == lengths[0]).all():
        return _equal_lengths(raw, starts, int(lengths[0]), kind)
    views = _views(raw, starts, lengths)
    form = pa.string_view() if pa.types.is_string(kind) else pa.binary_view()
    buffers = [None, pa.py_buffer(views), pa.py_buffer(raw)]
    return pa.Array.from_buffers(form, count, buffers).cast(kind)


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
    digits = HEX_PAIRS[data]
    return pa.Array.from_buffers(
        pa.string(), count, [None, even_offsets(count, 2 * width), pa.py_buffer(digits)]
    )
