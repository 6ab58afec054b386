"""Pieces of one buffer (NumPy): where each begins, how long it is; copied a thousand at a time.

NumPy moves values of one size. Pieces that are nearly as long as each other are moved as if all had
the size of the longest, so each brings some bytes of what lies behind it. `spread` writes them in
order: what a shorter piece brought too much lies behind it, where the caller writes last.
"""

from typing import Any, Final

import numpy as np

from sluicemq.record.places import Bytes, Positions, gather, rows_at, view_of

_COPIED_BYTES_MAX: Final = 1024
"""Pieces that are larger, on the average, stay views."""
_SPARE_BYTES: Final = 64


class Spans:
    """Pieces of `data`, in its order."""

    __slots__ = ("data", "sizes", "starts")

    def __init__(self, data: bytes, starts: Positions, sizes: Positions) -> None:
        self.data = data
        self.starts = starts
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> bytes:
        start = int(self.starts[index])
        return self.data[start : start + int(self.sizes[index])]

    def slices(self) -> list[Any]:
        """Each piece as bytes, or as a view where that saves copying much."""
        data: Any = self.data
        width = int(self.sizes[0])
        if len(data) > len(self.starts) * _COPIED_BYTES_MAX:
            data = memoryview(data)
        elif width and (self.sizes == width).all():
            found: list[Any] = gather(_raw(data), self.starts, f"V{width}").tolist()
            return found
        return slices(data, self.starts, self.starts + self.sizes)

    def begin_with(self, text: bytes) -> bool:
        """Do all of them?"""
        size = len(text)
        if int(self.sizes.min()) < size:
            return False
        return bool((self.windows(size) == np.frombuffer(text, np.uint8)).all())

    def joined(self) -> Any:
        """All pieces, one behind the other."""
        width = int(self.sizes[0])
        if (self.sizes == width).all():
            return self.windows(width).data
        return b"".join(self.slices())

    def windows(self, width: int) -> Bytes:
        """So many bytes from the start of each piece, one row each; zeros behind the data's end."""
        return rows_at(_raw(self.data), self.starts, width)

    def is_even(self, slack_bytes: int | None = None) -> bool:
        """Are the pieces alike in size, so that `spread` moves little in vain? `slack_bytes`: how
        much longer the longest may be than the shortest."""
        longest = int(self.sizes.max())
        if slack_bytes is not None and longest - int(self.sizes.min()) > slack_bytes:
            return False
        return (longest - _SPARE_BYTES) * len(self.sizes) <= 2 * int(self.sizes.sum())

    def spread(self, target: Bytes, places: Positions) -> None:
        """Copy each piece to its place in `target`; behind a shorter one lies something else."""
        width = int(self.sizes.max())
        if not width:
            return
        raw = _raw(self.data)
        count = _inside(raw, self.starts, width)
        kind = f"V{width}"
        view_of(target, kind)[places[:count]] = gather(raw, self.starts[:count], kind)
        for start, size, place in zip(
            *(column[count:].tolist() for column in (self.starts, self.sizes, places)), strict=True
        ):
            target[place : place + size] = raw[start : start + size]


def slices(data: Any, starts: Positions, ends: Positions) -> list[Any]:
    """The bytes from each start to its end."""
    return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _raw(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _inside(raw: Bytes, starts: Positions, width: int) -> int:
    """How many windows of this width end within the data; the starts rise."""
    return int(np.searchsorted(starts, len(raw) - width, "right"))
