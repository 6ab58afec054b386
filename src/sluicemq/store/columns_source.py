"""Rows of a queue, taken hold of so that any thread can make columns of them.

The thread that owns the store copies the units and takes the views of the log files; what follows
reads only those, so it may run beside appends, deletions and the end of the store.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sluicemq.record.columns import ColumnBlock
from sluicemq.record.columns_build import LogPiece, build_block
from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.columns_file import proof
from sluicemq.store.commitlog import CommitLog
from sluicemq.store.consumequeue import BLANK_SIZE, UNIT, UNIT_BYTES, Queue


def units_of(queue: Queue, start: int, stop: int) -> bytes | None:
    """The units of [start, stop), None when some are not there."""
    parts = []
    while start < stop:
        units = queue.units(start, stop - start)
        if not len(units):
            return None
        parts.append(bytes(units))
        start += len(units) // UNIT_BYTES
    return parts[0] if len(parts) == 1 else b"".join(parts)


def files_of(units: bytes, file_bytes: int) -> list[int]:
    """The numbers of the log's files that hold the records of some units."""
    rows = np.frombuffer(units, UNIT_COLUMNS)
    sizes = rows["size"]
    used = rows["position"][(sizes != BLANK_SIZE) & (sizes > 0)].astype(np.int64)
    if not len(used):
        return []
    first, last = int(used.min()) // file_bytes, int(used.max()) // file_bytes
    return [first] if first == last else np.unique(used // file_bytes).tolist()


class Evidence(NamedTuple):
    """What the proof of some rows is reckoned from (`columns_file`)."""

    units: bytes
    last_record: memoryview | bytes

    @classmethod
    def take(cls, log: CommitLog, queue: Queue, start: int, stop: int) -> "Evidence | None":
        """Of the rows [start, stop); None when the units are not all there."""
        units = units_of(queue, start, stop)
        if units is None:
            return None
        position, size, _ = UNIT.unpack_from(units, len(units) - UNIT_BYTES)
        record: memoryview | bytes = b""
        segment = log.segments.at(position)
        if segment is not None and RECORD_BYTES_MIN <= size < BLANK_SIZE:
            at = position - segment.base
            view = segment.view()
            if at <= len(view) - size:
                record = view[at : at + size]
        return cls(units, record)

    def proof(self) -> int:
        """Any thread."""
        return proof(self.units, self.last_record)


class Source:
    """The rows [start, stop) of a queue, and the log as far as they lie in it: `take` gets them."""

    __slots__ = ("_pieces", "positions", "sizes", "start", "stop", "units")

    def __init__(self, start: int, units: bytes, pieces: Sequence[LogPiece]) -> None:
        self.start = start
        self.stop = start + len(units) // UNIT_BYTES
        self.units = units
        rows = np.frombuffer(units, UNIT_COLUMNS)
        self.positions = rows["position"].astype(np.int64)
        self.sizes = rows["size"].astype(np.int64)
        self._pieces = pieces

    @classmethod
    def take(cls, log: CommitLog, queue: Queue, start: int, stop: int) -> "Source | None":
        """None when the units are not all there."""
        units = units_of(queue, start, stop)
        return None if units is None else cls.of_units(log, start, units)

    @classmethod
    def of_units(cls, log: CommitLog, start: int, units: bytes) -> "Source":
        """Of any units, as if they stood side by side."""
        size = log.segments.file_bytes
        found = [log.segments.at(number * size) for number in files_of(units, size)]
        pieces = [
            LogPiece(segment.base, np.frombuffer(segment.view(), np.uint8))
            for segment in found
            if segment is not None
        ]
        return cls(start, units, pieces)

    def block(self, columns_max: int) -> ColumnBlock:
        """The columns. Any thread."""
        return build_block(self.start, self.positions, self.sizes, self._pieces, columns_max)

    @property
    def end_position(self) -> int:
        """Behind the last record in the log."""
        used = (self.sizes != BLANK_SIZE) & (self.sizes > 0)
        return int((self.positions[used] + self.sizes[used]).max()) if used.any() else 0

    @property
    def log_bytes(self) -> int:
        """Of the log, that these rows take."""
        return int(self.sizes[self.sizes != BLANK_SIZE].sum())

    def proof(self) -> int:
        """See `columns_file`. Any thread."""
        return proof(self.units, self._last_record())

    def _last_record(self) -> memoryview | bytes:
        position, size = int(self.positions[-1]), int(self.sizes[-1])
        if not RECORD_BYTES_MIN <= size < BLANK_SIZE:
            return b""
        for base, data in self._pieces:
            at = position - base
            if 0 <= at <= len(data) - size:
                return data[at : at + size].data
        return b""
