"""The one walk over a commit log, sound or not: good records, and the bytes between them.

A record counts as at recovery (`log.read_scanned`: place, lengths, CRC of the body, no lost
sector). Recovery stops at the first that does not; this walk goes on behind it, at the next place
that `store.walk.next_good` accepts. Verify, repair and dump all walk here, so they cannot disagree.

    Run     good records that follow each other
    Hole    bytes of one file that are no good record: a record whose lengths alone are right, or
            anything else up to the next good one
    Blank   the unused end of a file

Holes with nothing good behind them are the tail: `LogWalk.end` is where good records end.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from sluicemq.errors import ProtocolError
from sluicemq.record.codec import parse_head
from sluicemq.record.layout import BLANK, MAGIC_BLANK, MAGICS, RECORD_BYTES_MIN
from sluicemq.record.table import UNIT_COLUMNS, Records
from sluicemq.store.bulk import Group, Sweep, sweep_piece
from sluicemq.store.log import DELAYS_MS, Scanned, read_scanned
from sluicemq.store.tools.layout import Series, read_or_zeros
from sluicemq.store.walk import RECORD_BYTES_MAX, explain, next_good

WINDOW_BYTES: Final = 8 << 20
_LOOK_BYTES_MAX: Final = 1 << 26
_SINGLES: Final = 256
"""So many records are read one by one where columns do not help."""


class Run:
    """Good records that follow each other."""

    def __init__(self, found: Sweep | Scanned, records: Records, groups: list[Group]) -> None:
        self.records = records
        self.groups = groups
        """The units of the queues in which they stand, by queue."""
        self.end = found.end
        self.store_time_ms = found.store_time_ms
        """Of the last one."""

    def __len__(self) -> int:
        return len(self.records)


class Hole(NamedTuple):
    """The bytes [start, end) of one file; `reason` says what is wrong at `start`."""

    start: int
    end: int
    reason: str
    is_record: bool = False
    """The lengths and the place of one record are right."""
    is_missing: bool = False
    """There are no such bytes: a file is missing."""


class Blank(NamedTuple):
    """The bytes [start, end) are unused: a blank record says that the file ends there."""

    start: int
    end: int


class LogWalk:
    """One walk; iterate once. `position` tells how far it is, `end` is behind the last good record
    (or the blank record that closes its file), `whole_end` behind the last with right lengths."""

    def __init__(
        self,
        log: Series,
        extents: Iterable[tuple[int, int]] | None = None,
        delays_ms: Sequence[int] = DELAYS_MS,
        *,
        is_forgiving: bool = False,
    ) -> None:
        """`extents`: where each file begins and ends, or should; as they do without it.
        `delays_ms`: see `Scanned.tag_code`. `is_forgiving`: blocks that the disk cannot read and
        bytes that a file lacks count as zeros, else the first raise OSError."""
        self._log = log
        self._extents = _extents(log) if extents is None else list(extents)
        self._delays_ms = delays_ms
        self._is_forgiving = is_forgiving
        self.position = self.end = self.whole_end = log.start

    @property
    def stop(self) -> int:
        """Where the last file ends."""
        return self._extents[-1][1] if self._extents else 0

    def __iter__(self) -> Iterator[Run | Hole | Blank]:
        for start, end in self._extents:
            self.position = start
            if self._log.index_at(start) is None:
                yield Hole(start, end, "the file is missing", is_missing=True)
            else:
                yield from self._file(end)
            self.position = end

    def _file(self, file_end: int) -> Iterator[Run | Hole | Blank]:
        while self.position < file_end:
            base, view = self.position, self._window(self.position, file_end)
            for found in self._runs(view, base):
                yield found
                self.position = self.end = self.whole_end = found.end
            at, room = self.position - base, file_end - self.position
            if base + len(view) < file_end and self._is_cut(view, at, room):
                continue  # the record goes on behind the window: look again from its beginning
            begin = view[at : at + BLANK.size]
            is_blank = len(begin) == BLANK.size and (
                BLANK.struct.unpack(begin) == (room, MAGIC_BLANK)
            )
            if is_blank or room < BLANK.size:
                if is_blank:
                    yield Blank(self.position, file_end)
                self.position = self.end = self.whole_end = file_end
                return
            yield self._hole(view, at, file_end)

    def _runs(self, view: memoryview, base: int) -> Iterator[Run]:
        """The good records from `position` on that lie wholly in the window."""
        singles = 0
        while (at := self.position - base) < len(view):
            if not singles:
                swept = sweep_piece(view, at, base, check_crc=True, delays_ms=self._delays_ms)
                if swept is not None:
                    yield Run(swept, swept.records, swept.groups)
                    continue
            singles = (singles or _SINGLES) - 1
            found = read_scanned(view, at, base, check_crc=True)
            if found is None:
                return
            raw = np.frombuffer(view, np.uint8, found.size_bytes, at)
            records = Records(raw, np.zeros(1, np.int64), found.position)
            yield Run(found, records, self._groups(found))

    def _groups(self, found: Scanned) -> list[Group]:
        """The units of one record: it may stand in several queues."""
        if not found.is_queued:
            return []
        unit = (found.position, found.size_bytes, found.tag_code(self._delays_ms))
        own = (found.topic, found.queue_id, found.queue_offset)
        others = [(key[0].encode(), key[1], offset) for key, offset in found.other_queues()]
        return [
            Group(topic, queue_id, np.array([offset]), np.array([unit], UNIT_COLUMNS))
            for topic, queue_id, offset in (own, *others)
        ]

    def _hole(self, view: memoryview, at: int, file_end: int) -> Hole:
        start = self.position
        if self._log.index_at(start) is None:
            self.position = file_end
            return Hole(start, file_end, "the file is too short")
        reason = explain(view, at, start - at)
        try:
            head = parse_head(view, at)
        except ProtocolError:
            head = None
        if head is not None and head.physical_offset == start and head.store_time_ms > 0:
            self.position = self.whole_end = start + head.size_bytes
            return Hole(start, self.position, reason, is_record=True)
        found = next_good(self, start + 1, file_end, file_end)
        self.position = file_end if found is None else found
        return Hole(start, self.position, reason)

    def _is_cut(self, view: memoryview, at: int, room: int) -> bool:
        """Whether a record may begin at `at` that the window does not wholly hold."""
        if len(view) - at < RECORD_BYTES_MIN:
            return at > 0
        size, magic = BLANK.struct.unpack_from(view, at)
        is_plausible = magic in MAGICS and RECORD_BYTES_MIN <= size <= room
        return bool(is_plausible and at > 0 and at + size > len(view))

    def _window(self, position: int, file_end: int) -> memoryview:
        """The next bytes; more of them when one record is longer."""
        size = min(WINDOW_BYTES, file_end - position)
        data = self.read(position, size)
        claimed, magic = BLANK.struct.unpack_from(data) if len(data) >= BLANK.size else (0, 0)
        if magic in MAGICS and size < claimed <= min(file_end - position, RECORD_BYTES_MAX):
            data = self.read(position, claimed)
        return memoryview(data)

    def read(self, position: int, size: int) -> bytes:
        """Bytes of the log."""
        if not self._is_forgiving:
            return self._log.read(position, size)
        return read_or_zeros(self._log.read, position, size).ljust(size, b"\0")

    def data_start(self, position: int) -> int | None:
        """See `Series.data_start`; None where there is no file."""
        return self._log.data_start(position)


def _extents(log: Series) -> list[tuple[int, int]]:
    """The files, and the gaps between them."""
    found: list[tuple[int, int]] = []
    end = log.start
    for item in log.items:
        if end < item.base:
            found.append((end, item.base))
        if end < item.end:
            found.append((max(end, item.base), item.end))
            end = item.end
    return found


def record_at(log: Series, position: int, size_max: int = _LOOK_BYTES_MAX) -> Records | None:
    """The record at a place, by itself, when its lengths are right."""
    head = log.read(position, BLANK.size)
    size = BLANK.struct.unpack(head)[0] if len(head) == BLANK.size else 0
    raw = np.frombuffer(log.read(position, min(size, size_max)), np.uint8)
    if len(raw) < RECORD_BYTES_MIN:
        return None
    found = Records(raw, np.zeros(1, np.int64), position)
    return found if found.good[0] and found.sizes[0] == len(raw) else None


def last_data(log: Series, start: int) -> int | None:
    """Behind the last byte of the log, from `start` on, that is not zero; None without one."""
    last = None
    for at, data in log.data(start):
        used = len(data.rstrip(b"\0"))
        last = at + used if used else last
    return last
