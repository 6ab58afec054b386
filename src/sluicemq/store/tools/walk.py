"""Walking over a whole commit log, sound or not: runs of records, and the places between them.

Unlike recovery, which stops at the first bad byte, the walk goes on behind damage: it looks for the
next place that says of itself, in its physical offset, that it lies there, and whose lengths agree
with its size. Bodies are not looked at here.

    Columns   a run of records that follow each other, as long as one piece of reading
    Damage    bytes that are no records, with records or a file's proper end behind them
    Blank     the unused end of a file

What remains at the end is the tail: `LogWalk.end` is where the log ends, `tail` says what lies
behind it.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from sluicemq.errors import ProtocolError
from sluicemq.record.codec import parse_head
from sluicemq.record.layout import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RECORD_BYTES_MIN
from sluicemq.store.tools.columns import Columns
from sluicemq.store.tools.layout import Series, SeriesFile

PIECE_BYTES: Final = 8 << 20
_RECORD_BYTES_MAX: Final = 1 << 27
_TWO: Final = struct.Struct(">ii")
_LONG: Final = struct.Struct(">q")
_PHYSICAL_AT: Final = 28
_MAGIC_START: Final = struct.pack(">i", MAGIC_V1)[:3]
_BLANK: Final = struct.pack(">i", MAGIC_BLANK)
_BLANK_BYTES: Final = 8
_MAGICS: Final = (MAGIC_V1, MAGIC_V2)


class Damage(NamedTuple):
    """The bytes [start, end) are no records; `reason` says what is wrong at `start`."""

    start: int
    end: int
    reason: str
    is_gap: bool = False
    """The bytes are not there at all: a file is missing."""


class Blank(NamedTuple):
    """The bytes [start, end) are unused: a blank record says that the file ends there."""

    start: int
    end: int


class Tail(NamedTuple):
    """What lies behind the end of the log: up to `end` there are bytes that are not zero."""

    start: int
    end: int
    reason: str


class _Piece(NamedTuple):
    """What a look at a piece of a file found: the starts of records, and why they end at `stop`:
    `more`, `blank` (the file's proper end), or what is wrong there."""

    starts: list[int]
    stop: int
    reason: str


MORE: Final = "more"
BLANK: Final = "blank"


class LogWalk:
    """One walk. Iterate once; `end` and `tail` are there after that, `position` meanwhile."""

    def __init__(self, log: Series, start: int | None = None) -> None:
        self._log = log
        self.position = log.start if start is None else start
        self.end = self.position
        self.tail: Tail | None = None

    def __iter__(self) -> Iterator[Columns | Damage | Blank]:
        items = self._log.items
        first = self._log.index_at(self.position)
        for index in range(len(items) if first is None else first, len(items)):
            item = items[index]
            if self.position < item.base:
                yield Damage(self.position, item.base, "a file is missing", is_gap=True)
                self.position = item.base
            yield from self._file(item, index)
            if self.tail is not None or self.position < item.end:
                return

    def _file(self, item: SeriesFile, index: int) -> Iterator[Columns | Damage | Blank]:
        """One file; `position` stays inside it when the log ends there."""
        while item.end - self.position >= _BLANK_BYTES:
            columns, reason = self._run(item)
            if columns is not None:
                yield columns
                self.end = self.position
            if reason == MORE:
                continue
            if reason == BLANK:
                yield Blank(self.position, item.end)
                break
            found = self._next_good(item, self.position + 1)
            if found is None and not self._goes_on(index + 1):
                self._note_tail(index, reason)
                return
            stop = item.end if found is None else found
            yield Damage(self.position, stop, reason)
            self.position = self.end = stop
        self.position = item.end

    def _run(self, item: SeriesFile) -> tuple[Columns | None, str]:
        """The records that begin in the next piece of a file, and why there are no more."""
        base = self.position
        data = self._log.read(base, min(PIECE_BYTES, item.end - base))
        piece = find_starts(data, item.end - base)
        if len(data) < _BLANK_BYTES:
            return None, "the file is shorter than it was"
        if not piece.starts and piece.reason == MORE:  # one record is longer than the piece
            size = _TWO.unpack_from(data)[0]
            data = self._log.read(base, size)
            piece = find_starts(data, item.end - base)
            if len(data) < size:
                return None, "the file ends inside the record"
        if not piece.starts:
            return None, piece.reason
        raw = np.frombuffer(data, np.uint8)
        columns = Columns(raw, base, np.array(piece.starts, np.int64))
        if columns.bad_row is None:
            self.position = base + piece.stop
            return columns, piece.reason
        bad = piece.starts[columns.bad_row]
        self.position = base + bad
        return (columns if len(columns) else None), explain(data, bad, base)

    def _next_good(self, item: SeriesFile, start: int) -> int | None:
        """The next record of the file, or its blank record, from `start` on."""
        position = start
        while (found := self._data_start(position, item)) is not None:
            data = self._log.read(found, min(PIECE_BYTES, item.end - found))
            if not data:
                return None
            for at in _candidates(data, item.end - found):
                if self._is_good(data, at, found, item):
                    return found + at
            if found + len(data) >= item.end:
                return None
            position = found + len(data) - _PHYSICAL_AT - 8
        return None

    def _data_start(self, position: int, item: SeriesFile) -> int | None:
        if position >= item.end:
            return None
        found = self._log.data_start(position)
        # A sound record begins with zeros (its size), which may lie before the data.
        return None if found is None else max(position, found - 4)

    def _is_good(self, data: bytes, at: int, base: int, item: SeriesFile) -> bool:
        size, magic = _TWO.unpack_from(data, at)
        if magic == MAGIC_BLANK:
            return bool(size == item.end - base - at)
        if not RECORD_BYTES_MIN <= size <= item.end - base - at:
            return False
        if _LONG.unpack_from(data, at + _PHYSICAL_AT)[0] != base + at:
            return False
        try:
            return parse_head(self._log.read(base + at, size)).store_time_ms > 0
        except ProtocolError:
            return False

    def _goes_on(self, index: int) -> bool:
        """Whether a later file holds records."""
        return any(self._next_good(item, item.base) is not None for item in self._log.items[index:])

    def _note_tail(self, index: int, reason: str) -> None:
        last = self.position
        for item in self._log.items[index:]:
            last = max(last, self._last_data(max(self.position, item.base), item))
        if last > self.position:
            self.tail = Tail(self.position, last, reason)

    def _last_data(self, position: int, item: SeriesFile) -> int:
        """The end of what is not zero in a file, from `position` on; 0 when all is."""
        last = 0
        while position < item.end and (found := self._log.data_start(position)) is not None:
            data = self._log.read(found, min(PIECE_BYTES, item.end - found))
            if not data:
                break
            used = len(data.rstrip(b"\0"))
            last = found + used if used else last
            position = found + len(data)
        return last


def find_starts(data: bytes, room: int) -> _Piece:
    """Where records begin in `data`, one behind the other; `room` is what the file has from there.

    HOT: a step a record. Only sizes and magics are looked at.
    """
    starts: list[int] = []
    add, unpack = starts.append, _TWO.unpack_from
    at, end = 0, len(data)
    last = end - _BLANK_BYTES
    while at <= last:
        size, magic = unpack(data, at)
        if magic not in _MAGICS:
            is_end = magic == MAGIC_BLANK and size == room - at
            return _Piece(starts, at, BLANK if is_end else explain(data, at, 0))
        if size < RECORD_BYTES_MIN:
            return _Piece(starts, at, _wrong_size(size))
        if size > end - at:
            too_long = size > room - at or size > _RECORD_BYTES_MAX
            return _Piece(starts, at, _wrong_size(size) if too_long else MORE)
        add(at)
        at += size
    return _Piece(starts, at, MORE)


def _wrong_size(size: int) -> str:
    return f"it says that it has {size} bytes"


def explain(data: bytes, at: int, base: int) -> str:
    """Why no good record stands at `at` of a piece that lies at `base`."""
    size, magic = _TWO.unpack_from(data, at)
    if magic not in (MAGIC_V1, MAGIC_V2):
        if not size and not magic:
            return "there are zeros"
        return f"no record begins there (its magic is {magic & 0xFFFFFFFF:#010x})"
    try:
        head = parse_head(data, at)
    except ProtocolError:
        return "its lengths do not agree with its size"
    if head.physical_offset != base + at:
        return f"the record there says that it lies at {head.physical_offset}"
    return f"its store time is {head.store_time_ms}"


def _candidates(data: bytes, room: int) -> Iterator[int]:
    """Places where a record or the blank record may begin, in order."""
    places = [
        at for at in _finds(data, _MAGIC_START)
        if at >= 0 and at + _PHYSICAL_AT + 8 <= len(data)
    ]  # fmt: skip
    places += [at for at in _finds(data, _BLANK) if at >= 0]
    return iter(sorted(places))


def _finds(data: bytes, pattern: bytes) -> Iterator[int]:
    """Where a record would begin whose magic begins with the pattern."""
    found = data.find(pattern)
    while found >= 0:
        yield found - 4
        found = data.find(pattern, found + 1)
