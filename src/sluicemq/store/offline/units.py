"""Units of consume queues as they lie in the files, in columns (spec/store.md §3).

    SimpleCQ   | physical offset 8 | size 4 | code 8 |                        20 bytes
    BatchCQ    | physical offset 8 | size 4 | code 8 | store time 8 | first offset 8 | count 2
               | compaction 4 | reserved 4 |                                  46 bytes
    extension  | size 2 | code 8 | store time 8 | bitmap size 2 | bitmap |    at an address

A code at or below -2147483649 is no code but an address in ConsumeQueueExt, where the code lies.
The end of a queue is behind its last used unit, wherever a damaged one lies before it.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.record import layout
from sluicemq.store.offline.columns import Mask
from sluicemq.store.offline.layout import Series

UNIT: Final = layout.UNIT.dtype
BATCH_UNIT: Final = layout.BATCH_UNIT.dtype
BLANK_SIZE: Final = 0x7FFFFFFF
ADDRESS_MAX: Final = -(1 << 31) - 1
ADDRESS_BIAS: Final = 1 << 63
READ_UNITS: Final = 1 << 16
READ_BYTES: Final = 1 << 20
_EXTENSION: Final = struct.Struct(">hqqh")

UnitArray = NDArray[Any]


class Extension(NamedTuple):
    """What a unit's address leads to. `bitmap` is that of the groups whose filters match."""

    address: int
    tag_code: int
    store_time_ms: int
    bitmap: bytes


class UnitFile:
    """The units of one queue. Offsets are those of the queue for 20-byte units; for batches they
    count units."""

    def __init__(self, series: Series, kind: np.dtype[Any] = UNIT) -> None:
        self.series = series
        self.kind = kind
        self.unit_bytes = kind.itemsize
        self.first = series.start // self.unit_bytes
        self.room = series.end // self.unit_bytes
        self.end = self._find_end()

    def _find_end(self) -> int:
        """Behind the last used unit, found from the back."""
        for item in reversed(self.series.items):
            end = 0
            for start, units in self._pieces(item.base // self.unit_bytes, item.end):
                used = np.flatnonzero(is_used(units))
                end = start + int(used[-1]) + 1 if len(used) else end
            if end:
                return end
        return self.first

    def pieces(self, start: int | None = None, end: int | None = None) -> Iterator[tuple[int, Any]]:
        """(first offset, units) up to the queue's end, or `end`; what is missing is left out."""
        stop = self.end if end is None else min(end, self.end)
        offset = max(self.first, start or 0)
        while offset < stop:
            units = self.read(offset, min(READ_UNITS, stop - offset))
            if not len(units):
                index = next(
                    (n.base for n in self.series.items if n.base >= offset * self.unit_bytes), None
                )
                if index is None:
                    return
                offset = max(offset + 1, index // self.unit_bytes)
                continue
            yield offset, units
            offset += len(units)

    def _pieces(self, offset: int, end_bytes: int) -> Iterator[tuple[int, UnitArray]]:
        """The units of a file that may hold something."""
        size = self.unit_bytes
        while offset * size < end_bytes:
            found = self.series.data_start(offset * size)
            if found is None:
                return
            offset = max(offset, found // size)
            units = self.read(offset, min(READ_UNITS, end_bytes // size - offset))
            if not len(units):
                return
            yield offset, units
            offset += len(units)

    def read(self, offset: int, count: int) -> UnitArray:
        """Up to `count` units from an offset; fewer where files end."""
        data = self.series.read(offset * self.unit_bytes, count * self.unit_bytes)
        return np.frombuffer(data, self.kind, len(data) // self.unit_bytes)

    def data_behind(self) -> int | None:
        """Where bytes that are not zero lie behind the end; None when there are none."""
        for item in self.series.items:
            at = max(self.end * self.unit_bytes, item.base)
            while at < item.end and (found := self.series.data_start(at)) is not None:
                data = self.series.read(found, min(READ_BYTES, item.end - found))
                zeros = len(data) - len(data.lstrip(b"\0"))
                if zeros < len(data):
                    return found + zeros
                at = found + max(len(data), 1)
        return None


def is_used(units: UnitArray) -> Mask:
    """Which units say where a message lies, or that they are blank."""
    return np.asarray((units["size"] > 0) & (units["position"] >= 0))


def is_blank(units: UnitArray) -> Mask:
    """Which stand before a queue's first message (spec/store.md §3)."""
    return np.asarray((units["size"] == BLANK_SIZE) & (units["position"] == 0))


def is_address(code: int) -> bool:
    return code <= ADDRESS_MAX


def read_extension(series: Series | None, code: int) -> Extension | None:
    """The unit at an address; None when there is none, or none that can be."""
    if series is None:
        return None
    address = code + ADDRESS_BIAS
    head = series.read(address, _EXTENSION.size)
    if len(head) < _EXTENSION.size:
        return None
    size, tag_code, store_time_ms, bitmap_bytes = _EXTENSION.unpack(head)
    if size != _EXTENSION.size + bitmap_bytes or bitmap_bytes < 0:
        return None
    bitmap = series.read(address + _EXTENSION.size, bitmap_bytes)
    return Extension(address, tag_code, store_time_ms, bitmap)
