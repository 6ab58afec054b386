"""Every whole record of a log, sound or not, and the holes between them: what a repair works on.

As strict as recovery (`scan.read_scanned`: place, lengths, CRC), but behind bad bytes it goes on:
at the next place that holds a whole record which says that it lies there, or a file's blank record.

    Sweep | Scanned   good records, many or one
    Hole              bytes of one file that are neither records nor its unused end

Holes end at the end of their file at the latest. Files are read with pread; blocks that the disk
cannot read any more count as zeros. A file that is missing or too short is read as zeros as well.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from sluicemq.record.layout import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RECORD_BYTES_MIN
from sluicemq.store.bulk import Sweep, sweep_piece
from sluicemq.store.log import DELAYS_MS, Scanned, read_scanned
from sluicemq.store.tools.layout import Series
from sluicemq.store.walk import explain

WINDOW_BYTES: Final = 8 << 20
BLANK_BYTES: Final = 8
_RECORD_BYTES_MAX: Final = 1 << 29
_BLOCK_BYTES: Final = 4096
_TWO: Final = struct.Struct(">ii")
_POSITION: Final = struct.Struct(">q")
_POSITION_AT: Final = 28
_MAGICS: Final = (MAGIC_V1, MAGIC_V2)
_MAGIC_START: Final = struct.pack(">i", MAGIC_V1)[:3]
_BLANK_MAGIC: Final = struct.pack(">i", MAGIC_BLANK)
_SINGLES_MAX: Final = 256


class Hole(NamedTuple):
    """The bytes [start, end) of one file are no records. `reason` says what is wrong at `start`."""

    start: int
    end: int
    reason: str

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


class Salvage:
    """One walk over a log of files of `file_bytes`, from `start` to where the last file ends.

    Iterate once. `position` tells how far it is; `end` is behind the last good record (or behind
    the blank record that closes its file), so holes from there on have nothing behind them.
    """

    def __init__(self, log: Series, file_bytes: int, delays_ms: Sequence[int] = DELAYS_MS) -> None:
        self._delays_ms = delays_ms
        self._log = log
        self._file_bytes = file_bytes
        self.position = self.end = log.start
        last = log.items[-1].base if len(log) else 0
        self.stop = last + file_bytes if len(log) else 0

    def __iter__(self) -> Iterator[Sweep | Scanned | Hole]:
        while self.position < self.stop:
            file_end = self.position - self.position % self._file_bytes + self._file_bytes
            yield from self._file(file_end)
            self.position = file_end

    def _file(self, file_end: int) -> Iterator[Sweep | Scanned | Hole]:
        while self.position < file_end:
            window = self._window(self.position, file_end)
            yield from self._records(window, file_end)
            if self.position >= file_end:
                return
            at = self.position - window.base
            if window.end < file_end and self._is_cut(window, at, file_end):
                continue  # the record goes on behind the window: look again from its beginning
            if _is_blank(window.data, at, file_end - self.position):
                self.position = self.end = file_end
                return
            reason = self._reason(window, at)
            stop = self._next_good(self.position + 1, file_end)
            yield Hole(self.position, stop, reason)
            self.position = stop

    def _records(self, window: "_Window", file_end: int) -> Iterator[Sweep | Scanned]:
        """The good records from `position` on that lie wholly in the window."""
        view = window.data
        singles = 0
        while (at := self.position - window.base) < len(view):
            swept = None if singles else self._sweep(view, at, window.base)
            found: Sweep | Scanned | None = swept
            if swept is None:
                singles = (singles or _SINGLES_MAX) - 1
                found = read_scanned(view, at, window.base, check_crc=True)
            if found is None or found.end > file_end:
                return
            yield found
            self.position = self.end = found.end

    def _sweep(self, view: memoryview, at: int, base: int) -> Sweep | None:
        return sweep_piece(view, at, base, check_crc=True, delays_ms=self._delays_ms)

    def _is_cut(self, window: "_Window", at: int, file_end: int) -> bool:
        """Whether a record may begin at `at` that the window does not wholly hold."""
        if len(window.data) - at < RECORD_BYTES_MIN:
            return at > 0
        size, magic = _TWO.unpack_from(window.data, at)
        is_plausible = magic in _MAGICS and RECORD_BYTES_MIN <= size <= file_end - self.position
        return bool(is_plausible and at > 0 and at + size > len(window.data))

    def _window(self, position: int, file_end: int) -> "_Window":
        """The next bytes; more of them when one record is longer."""
        size = min(WINDOW_BYTES, file_end - position)
        data = self._read(position, size)
        claimed, magic = _TWO.unpack_from(data) if len(data) >= BLANK_BYTES else (0, 0)
        if magic in _MAGICS and size < claimed <= min(file_end - position, _RECORD_BYTES_MAX):
            data = self._read(position, claimed)
        return _Window(memoryview(data), position)

    def _reason(self, window: "_Window", at: int) -> str:
        index = self._log.index_at(self.position)
        if index is None:
            missing = self.position - self.position % self._file_bytes
            is_short = self._log.index_at(missing) is not None
            return "the file is too short" if is_short else "the file is missing"
        return explain(window.data, at, window.base)

    def _read(self, position: int, size: int) -> bytes:
        """Exactly `size` bytes: zeros where the disk or a file fails."""
        try:
            data = self._log.read(position, size)
        except OSError:
            if size <= _BLOCK_BYTES:
                return bytes(size)
            half = max(_BLOCK_BYTES, size // 2 // _BLOCK_BYTES * _BLOCK_BYTES)
            return self._read(position, half) + self._read(position + half, size - half)
        return data if len(data) == size else data + bytes(size - len(data))

    # --- behind a hole

    def _next_good(self, start: int, file_end: int) -> int:
        """The next whole record of the file, or its blank record; the file's end without one."""
        position = start
        while position < file_end:
            found = self._data_start(position, file_end)
            if found is None:
                return file_end
            size = min(WINDOW_BYTES, file_end - found)
            data = self._read(found, size)
            for at in _candidates(data):
                if found + at >= start and self._is_good(data, at, found, file_end):
                    return found + at
            if found + size >= file_end:
                return file_end
            position = found + size - RECORD_BYTES_MIN
        return file_end

    def _data_start(self, position: int, file_end: int) -> int | None:
        if self._log.index_at(position) is None:
            return None  # the rest of the file is not there
        found = self._log.data_start(position)
        # A record begins with zeros (of its size): they may lie in the block before.
        return None if found is None or found >= file_end else max(position, found - 4)

    def _is_good(self, data: bytes, at: int, base: int, file_end: int) -> bool:
        position = base + at
        size, magic = _TWO.unpack_from(data, at)
        if magic == MAGIC_BLANK:
            return bool(size == file_end - position)
        if not RECORD_BYTES_MIN <= size <= min(file_end - position, _RECORD_BYTES_MAX):
            return False
        if at + _POSITION_AT + 8 > len(data):
            return False
        if _POSITION.unpack_from(data, at + _POSITION_AT)[0] != position:
            return False
        record = memoryview(self._read(position, size))
        return read_scanned(record, 0, position, check_crc=True) is not None


class _Window(NamedTuple):
    data: memoryview
    base: int

    @property
    def end(self) -> int:
        return self.base + len(self.data)


def _is_blank(data: memoryview, at: int, room: int) -> bool:
    if len(data) - at < BLANK_BYTES:
        return room < BLANK_BYTES
    size, magic = _TWO.unpack_from(data, at)
    return bool(magic == MAGIC_BLANK and size == room)


def _candidates(data: bytes) -> Iterator[int]:
    """Places where a record or a blank record may begin, in order."""
    record, blank = data.find(_MAGIC_START), data.find(_BLANK_MAGIC)
    while record >= 0 or blank >= 0:
        if blank < 0 or 0 <= record < blank:
            at, record = record, data.find(_MAGIC_START, record + 1)
        else:
            at, blank = blank, data.find(_BLANK_MAGIC, blank + 1)
        if at >= 4:
            yield at - 4
