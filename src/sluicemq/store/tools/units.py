"""Read the units of consume queues, in columns.

A unit locates one record: its position and size in the commit log, and a tag code. The units of a
plain queue have 20 bytes (`UNIT_TYPE`); those of RocketMQ's batch queues are longer
(`BATCH_UNIT_TYPE`).

A tag code of at most -2147483649 is not the hash of a tag. It is an address in the queue's
ConsumeQueueExt file, where the tag code is stored as part of an extension unit: size (2 bytes), tag
code (8), store time (8), size of the bitmap (2), bitmap (spec/store.md §3.2).

A queue ends behind its last used unit, even if units before that one are damaged.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.record import layout
from sluicemq.record.table import Mask, Positions
from sluicemq.store.tools.layout import FileSequence

UNIT_TYPE: Final = layout.UNIT.dtype
BATCH_UNIT_TYPE: Final = layout.BATCH_UNIT.dtype
BLANK_SIZE: Final = 0x7FFFFFFF
ADDRESS_MAX: Final = -(1 << 31) - 1
"""Tag codes up to this one are addresses of extension units."""
ADDRESS_BIAS: Final = 1 << 63
"""The position of an extension unit is its address plus this number."""
READ_UNITS: Final = 1 << 16
"""`UnitReader.iter_units` yields at most this many units at once."""
_UNITS_READ_PER_OFFSET_MAX: Final = 64
_EXTENSION: Final = struct.Struct(">hqqh")

UnitArray = NDArray[Any]
"""An array of UNIT_TYPE or BATCH_UNIT_TYPE."""


class Extension(NamedTuple):
    """An extension unit of ConsumeQueueExt.

    `address` is its position in the file. `bitmap` has a bit for each group whose filter matches
    the message.
    """

    address: int
    tag_code: int
    store_time_ms: int
    bitmap: bytes


class UnitReader:
    """Reads the units of one queue.

    The queue has the units with the offsets [first_offset, end_offset). In a plain queue, a unit's
    offset is the queue offset of its message. In a batch queue, a unit has several messages; there
    the offset is the number of the unit.
    """

    def __init__(self, sequence: FileSequence, unit_type: np.dtype[Any] = UNIT_TYPE) -> None:
        """Create a reader of a queue's files, and find the end of the queue.

        The end is behind the last unit that is used. `unit_type` is the layout of a unit. Raises
        OSError.
        """
        self.sequence = sequence
        self.unit_type = unit_type
        self.unit_bytes = unit_type.itemsize
        self.first_offset = sequence.start // self.unit_bytes
        self.end_offset = self.first_offset
        for segment in reversed(sequence.segments):
            for position, piece in sequence.iter_data(segment.base, segment.end, self.unit_bytes):
                used_rows = np.flatnonzero(used_mask(np.frombuffer(piece, unit_type)))
                if len(used_rows):
                    self.end_offset = position // self.unit_bytes + int(used_rows[-1]) + 1
            if self.end_offset > self.first_offset:
                break

    def iter_units(
        self, start: int | None = None, end: int | None = None
    ) -> Iterator[tuple[int, UnitArray]]:
        """Yield (offset of the first unit, units) for the queue offsets [start, end).

        None means the start or the end of the queue. Each item has several units, as an array.
        Offsets in missing files are left out.
        """
        offset_end = self.end_offset if end is None else min(end, self.end_offset)
        offset = max(self.first_offset, start or 0)
        while offset < offset_end:
            units = self.read(offset, min(READ_UNITS, offset_end - offset))
            if len(units):
                yield offset, units
                offset += len(units)
                continue

            # A file is missing: continue with the next one.
            next_base = self._find_next_base(offset * self.unit_bytes)
            if next_base is None:
                return
            offset = max(offset + 1, next_base // self.unit_bytes)

    def _find_next_base(self, position: int) -> int | None:
        """Return the begin of the first file at or behind a position; None if there is none."""
        for segment in self.sequence.segments:
            if segment.base >= position:
                return segment.base
        return None

    def read(self, offset: int, count: int) -> UnitArray:
        """Return `count` units from `offset` on, or fewer before a missing file or the end."""
        piece = self.sequence.read(offset * self.unit_bytes, count * self.unit_bytes)
        return np.frombuffer(piece, self.unit_type, len(piece) // self.unit_bytes)

    def read_at(self, offsets: Positions) -> tuple[UnitArray, Mask]:
        """Return (units, mask): the unit at each of `offsets`, and whether it exists.

        A unit whose mask is False has no meaning.
        """
        units = np.zeros(len(offsets), self.unit_type)
        exists = (offsets >= self.first_offset) & (offsets < self.end_offset)
        existing_offsets = offsets[exists]
        if not len(existing_offsets):
            return units, exists
        offset_min = int(existing_offsets.min())
        offset_max = int(existing_offsets.max())
        if offset_max - offset_min > len(existing_offsets) * _UNITS_READ_PER_OFFSET_MAX + 4096:
            # A record with a damaged offset is among the others: do not read the whole range.
            for row in np.flatnonzero(exists).tolist():
                unit = self.read(int(offsets[row]), 1)
                exists[row] = len(unit) == 1
                units[row : row + 1] = unit
            return units, exists

        # Read all units from the first to the last offset, and select those at `offsets`.
        read_units = self.read(offset_min, offset_max - offset_min + 1)
        exists[exists] = existing_offsets - offset_min < len(read_units)
        units[exists] = read_units[offsets[exists] - offset_min]
        return units, exists

    def find_data_behind_end(self) -> int | None:
        """Return the first byte behind the end of the queue that is not zero; None if all are.

        The result is a byte position in the queue's files.
        """
        for position, piece in self.sequence.iter_data(self.end_offset * self.unit_bytes):
            zero_bytes = len(piece) - len(piece.lstrip(b"\0"))
            if zero_bytes < len(piece):
                return position + zero_bytes
        return None


def used_mask(units: UnitArray) -> Mask:
    """Return which units are used: they locate a record or are blank."""
    return np.asarray((units["size"] > 0) & (units["position"] >= 0))


def blank_mask(units: UnitArray) -> Mask:
    """Return which units are blank: they precede the queue's first message (spec/store.md §3)."""
    return np.asarray((units["size"] == BLANK_SIZE) & (units["position"] == 0))


def is_extension_address(code: int) -> bool:
    """Return whether a unit's tag code is the address of an extension unit."""
    return code <= ADDRESS_MAX


def read_extension(sequence: FileSequence | None, code: int) -> Extension | None:
    """Return the extension unit whose address is the tag code `code`.

    `sequence` has the queue's ConsumeQueueExt files; it is None if there are none. Return None if
    there are no files, or if there is no valid extension unit at the address.
    """
    if sequence is None:
        return None
    address = code + ADDRESS_BIAS
    head = sequence.read(address, _EXTENSION.size)
    if len(head) < _EXTENSION.size:
        return None
    size, tag_code, store_time_ms, bitmap_bytes = _EXTENSION.unpack(head)
    if size != _EXTENSION.size + bitmap_bytes or bitmap_bytes < 0:
        return None
    bitmap = sequence.read(address + _EXTENSION.size, bitmap_bytes)
    return Extension(address, tag_code, store_time_ms, bitmap)
