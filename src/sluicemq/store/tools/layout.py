"""What lies where in a store directory, found from the files themselves.

Offline tools look at stores of any kind and any state, so nothing here believes a setting: sizes of
files are those of the files, a file that is missing or has another size is a fact to report and not
an error, and names that do not belong are passed over (spec/store.md §1). Everything is read with
pread: a bad sector of a failing disk is then an OSError with a path, where a map would kill the
process.

    Series        the files of one directory (or several, storePathCommitLog=a,b), each named by
                  the position of its first byte, as one sequence with possible gaps
    UnitFile      the units of one queue, in columns (`record.layout.UNIT`, `BATCH_UNIT`)
    StoreLayout   the log, the queues by kind, index files, documents

A unit's code at or below -2147483649 is an address in ConsumeQueueExt, where the code lies: size 2,
code 8, store time 8, bitmap size 2, bitmap. The end of a queue is behind its last used unit,
wherever a damaged one lies before it.

`LogWalk` is the one walk over a commit log, sound or not: good records, and the bytes between them.
A record counts as at recovery (`log.parse_log_record`: place, lengths, CRC of the body, no lost
sector). Recovery stops at the first that does not; this walk goes on behind it, at the next place
that `store.log.find_next_record_start` accepts. Verify, repair and dump all walk here, so they
cannot disagree.

    Run     good records that follow each other
    Hole    bytes of one file that are no good record: a record whose lengths alone are right, or
            anything else up to the next good one
    Blank   the unused end of a file

Holes with nothing good behind them are the tail: `LogWalk.end` is where good records end.
"""

import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.errors import ProtocolError
from sluicemq.files import SYSTEM_FILES, File, Files
from sluicemq.record import layout
from sluicemq.record.codec import parse_head
from sluicemq.record.layout import BLANK, MAGIC_BLANK, MAGICS, RECORD_BYTES_MIN
from sluicemq.record.table import UNIT_COLUMNS, Mask, Positions, Records
from sluicemq.store.bulk import QueueUnits, Sweep, sweep_piece
from sluicemq.store.directory import LOG_DIRECTORY, not_a_store_error
from sluicemq.store.log import (
    DELAYS_MS,
    RECORD_BYTES_MAX,
    LogRecord,
    explain_bad_record,
    find_next_record_start,
    parse_log_record,
)
from sluicemq.store.segments import is_segment_name

QueueKey = tuple[str, int]

QUEUES: Final = "consumequeue"
EXTENSIONS: Final = "consumequeue_ext"
BATCH_QUEUES: Final = "batchconsumequeue"
INDEX: Final = "index"
CONFIG: Final = "config"
CHECKPOINT: Final = "checkpoint"
ABORT: Final = "abort"
_INDEX_NAME_DIGITS: Final = 17
_BLOCK_BYTES: Final = 4096


class SeriesFile(NamedTuple):
    """One file: the bytes [base, base + size) of its series."""

    path: str
    base: int
    size: int

    @property
    def end(self) -> int:
        return self.base + self.size


class Series:
    """Files that together are one long byte sequence, or should be."""

    def __init__(self, files: Files, items: Iterable[SeriesFile]) -> None:
        self._files = files
        self.items = sorted(items, key=lambda item: item.base)
        self._bases = [item.base for item in self.items]
        self._open: tuple[str, File] | None = None
        self.is_used = False  # lately, for the pool of descriptors

    @classmethod
    def load(cls, files: Files, directories: Iterable[str]) -> "Series":
        """The files of one directory or several. A file of no bytes is the trace of a crash at
        its creation and is left out.
        """
        found = []
        for directory in directories:
            for name in files.names(directory):
                if is_segment_name(name):
                    path = f"{directory}/{name}"
                    size = file_size(files, path)
                    if size:
                        found.append(SeriesFile(path, int(name), size))
        return cls(files, found)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def start(self) -> int:
        return self.items[0].base if self.items else 0

    @property
    def end(self) -> int:
        """The end of the last file, not of what is written in it."""
        return self.items[-1].end if self.items else 0

    @property
    def size_bytes(self) -> int:
        return sum(item.size for item in self.items)

    @property
    def file_bytes(self) -> int:
        """The size that most files have; 0 without files."""
        return usual_size([self])

    def index_at(self, position: int) -> int | None:
        """Which file holds the position."""
        index = bisect_right(self._bases, position) - 1
        return index if index >= 0 and position < self.items[index].end else None

    def read(self, position: int, size: int) -> bytes:
        """Up to `size` bytes; fewer where the sequence has a gap or ends."""
        pieces = []
        while size > 0 and (index := self.index_at(position)) is not None:
            item = self.items[index]
            data = self._file(item.path).pread(min(size, item.end - position), position - item.base)
            if not data:
                break
            pieces.append(data)
            position += len(data)
            size -= len(data)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def data_start(self, position: int) -> int | None:
        """The first position in the same file, from this one on, that may hold other bytes than
        zeros; None when there is none.
        """
        index = self.index_at(position)
        if index is None:
            return None
        item = self.items[index]
        found = self._file(item.path).data_start(position - item.base)
        return item.base + found if found is not None and found < item.size else None

    def data(
        self, start: int = 0, end: int | None = None, align: int = 1
    ) -> Iterator[tuple[int, bytes]]:
        """(position, bytes) of the pieces in [start, end) that may hold other bytes than zeros;
        they begin at multiples of `align`, and have as many bytes.
        """
        for item in self.items:
            at, stop = max(item.base, start), item.end if end is None else min(item.end, end)
            while at < stop and (found := self.data_start(at)) is not None and found < stop:
                at = max(at, found - found % align)
                piece = self.read(at, min(READ_BYTES, stop - at))
                if len(piece) < align:
                    break
                yield at, piece[: len(piece) // align * align]
                at += len(piece) // align * align

    def _file(self, path: str) -> File:
        self.is_used = True
        if self._open is None or self._open[0] != path:
            self.release_descriptor()
            self._open = (path, self._files.open(path))
            self._files.pool.add(self)
        return self._open[1]

    def close(self) -> None:
        self._files.pool.remove(self)
        self.release_descriptor()

    def release_descriptor(self) -> None:
        """Close the file; the next read opens it again."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


class StoreLayout:
    """One store directory. Make one with `StoreLayout.find`."""

    def __init__(self, files: Files, root: str, log_paths: list[str], queue_path: str) -> None:
        self.files = files
        self.root = root
        self.log_paths = log_paths
        self.queue_path = queue_path
        self.log = Series.load(files, log_paths)
        self.queues = dict(_queues(files, queue_path))
        self.extensions = dict(_queues(files, f"{root}/{EXTENSIONS}"))
        self.batch_queues = dict(_queues(files, f"{root}/{BATCH_QUEUES}"))
        self.indexes = [
            f"{root}/{INDEX}/{name}"
            for name in files.names(f"{root}/{INDEX}")
            if len(name) == _INDEX_NAME_DIGITS and name.isascii() and name.isdigit()
        ]

    @classmethod
    def find(
        cls,
        root: str,
        *,
        commit_log_path: str = "",
        consume_queue_path: str = "",
        files: Files = SYSTEM_FILES,
    ) -> "StoreLayout":
        """`commit_log_path` may name several directories, separated by commas, as RocketMQ's
        storePathCommitLog. Raises StoreError, with the cure, when this is no store.
        """
        root = root.rstrip("/") or "/"
        logs = [path.rstrip("/") for path in commit_log_path.split(",") if path]
        layout = cls(
            files,
            root,
            logs or [f"{root}/{LOG_DIRECTORY}"],
            consume_queue_path.rstrip("/") or f"{root}/{QUEUES}",
        )
        if not len(layout.log):
            raise not_a_store_error(files, root, ", ".join(layout.log_paths), "--commit-log")
        return layout

    @property
    def was_interrupted(self) -> bool:
        """The file `abort` is there: a broker is running, or ended without an orderly stop."""
        return self.files.exists(f"{self.root}/{ABORT}")

    @property
    def checkpoint_path(self) -> str:
        return f"{self.root}/{CHECKPOINT}"

    def documents(self) -> list[str]:
        """Paths of what lies in config/, without the previous editions."""
        directory = f"{self.root}/{CONFIG}"
        return [
            f"{directory}/{name}"
            for name in self.files.names(directory)
            if not name.endswith((".bak", ".tmp"))
        ]

    def name_of(self, path: str) -> str:
        """A path as it is shown: relative to the store where it lies inside."""
        return path.removeprefix(self.root + "/")

    def close(self) -> None:
        for series in (self.log, *self.queues.values(), *self.extensions.values()):
            series.close()
        for series in self.batch_queues.values():
            series.close()


def usual_size(every: Iterable[Series]) -> int:
    """The size that most files have; 0 without files."""
    counted = Counter(item.size for series in every for item in series.items)
    return max(counted, key=lambda size: (counted[size], size), default=0)


def _queues(files: Files, directory: str) -> Iterator[tuple[QueueKey, Series]]:
    for topic in files.names(directory):
        for name in files.names(f"{directory}/{topic}"):
            if name.isascii() and name.isdigit():
                shown = topic.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                yield (shown, int(name)), Series.load(files, [f"{directory}/{topic}/{name}"])


def read_or_zeros(read: Callable[[int, int], bytes], position: int, size: int) -> bytes:
    """`read(position, size)`; zeros for blocks that the disk cannot read any more."""
    try:
        return read(position, size)
    except OSError:
        if size <= _BLOCK_BYTES:
            return bytes(size)
        half = max(_BLOCK_BYTES, size // 2 // _BLOCK_BYTES * _BLOCK_BYTES)
        rest = read_or_zeros(read, position + half, size - half)
        return read_or_zeros(read, position, half).ljust(half, b"\0") + rest


def file_size(files: Files, path: str) -> int:
    """The size of a file; 0 when it is not there (any more)."""
    try:
        with closing(files.open(path)) as file:
            return file.size()
    except (FileNotFoundError, IsADirectoryError):
        return 0


def read_file(files: Files, path: str, size_max: int | None = None) -> bytes | None:
    """The bytes of a whole file, or its first `size_max`; None when it is not there."""
    try:
        with closing(files.open(path)) as file:
            size = file.size()
            return file.pread(size if size_max is None else min(size, size_max), 0)
    except (FileNotFoundError, IsADirectoryError):
        return None


UNIT: Final = layout.UNIT.dtype
BATCH_UNIT: Final = layout.BATCH_UNIT.dtype
BLANK_SIZE: Final = 0x7FFFFFFF
ADDRESS_MAX: Final = -(1 << 31) - 1
ADDRESS_BIAS: Final = 1 << 63
READ_UNITS: Final = 1 << 16
_SPARSE: Final = 64
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
    count units.
    """

    def __init__(self, series: Series, kind: np.dtype[Any] = UNIT) -> None:
        self.series = series
        self.kind = kind
        self.unit_bytes = kind.itemsize
        self.first = series.start // self.unit_bytes
        self.room = series.end // self.unit_bytes
        self.end = self.first
        for item in reversed(series.items):
            for at, data in series.data(item.base, item.end, self.unit_bytes):
                used = np.flatnonzero(is_used(np.frombuffer(data, kind)))
                if len(used):
                    self.end = at // self.unit_bytes + int(used[-1]) + 1
            if self.end > self.first:
                break

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

    def read(self, offset: int, count: int) -> UnitArray:
        """Up to `count` units from an offset; fewer where files end."""
        data = self.series.read(offset * self.unit_bytes, count * self.unit_bytes)
        return np.frombuffer(data, self.kind, len(data) // self.unit_bytes)

    def at(self, offsets: Positions) -> tuple[UnitArray, Mask]:
        """The unit at each offset, and whether there is one (else the unit is nonsense)."""
        found = np.zeros(len(offsets), self.kind)
        there = (offsets >= self.first) & (offsets < self.end)
        inside = offsets[there]
        if not len(inside):
            return found, there
        low, high = int(inside.min()), int(inside.max())
        if high - low > len(inside) * _SPARSE + 4096:  # a damaged offset among good ones
            for row in np.flatnonzero(there).tolist():
                one = self.read(int(offsets[row]), 1)
                there[row] = len(one) == 1
                found[row : row + 1] = one
            return found, there
        read = self.read(low, high - low + 1)
        there[there] = inside - low < len(read)
        found[there] = read[offsets[there] - low]
        return found, there

    def data_behind(self) -> int | None:
        """Where bytes that are not zero lie behind the end; None when there are none."""
        for at, data in self.series.data(self.end * self.unit_bytes):
            zeros = len(data) - len(data.lstrip(b"\0"))
            if zeros < len(data):
                return at + zeros
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


WINDOW_BYTES: Final = 8 << 20
_LOOK_BYTES_MAX: Final = 1 << 26
_SINGLES: Final = 256
"""So many records are read one by one where columns do not help."""


class Run:
    """Good records that follow each other."""

    def __init__(
        self, found: Sweep | LogRecord, records: Records, groups: list[QueueUnits]
    ) -> None:
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
    (or the blank record that closes its file), `whole_end` behind the last with right lengths.
    """

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
        bytes that a file lacks count as zeros, else the first raise OSError.
        """
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
            base, size = self.position, min(WINDOW_BYTES, file_end - self.position)
            view = memoryview(self.read(base, size))
            claimed, magic = _begin_of(view, 0)
            if magic in MAGICS and size < claimed <= min(file_end - base, RECORD_BYTES_MAX):
                view = memoryview(self.read(base, claimed))  # one record is longer than a window
            for found in self._runs(view, base):
                yield found
                self.position = self.end = self.whole_end = found.end
            at, room = self.position - base, file_end - self.position
            size, magic = _begin_of(view, at)
            is_record = magic in MAGICS and RECORD_BYTES_MIN <= size <= room
            is_cut = len(view) - at < (size if is_record else RECORD_BYTES_MIN)
            if is_cut and at and base + len(view) < file_end:
                continue  # it may go on behind the window: look again from its beginning
            is_blank = (size, magic) == (room, MAGIC_BLANK)
            if is_blank or room < BLANK.size:
                if is_blank:
                    yield Blank(self.position, file_end)
                self.position = self.end = self.whole_end = file_end
                return
            start = self.position
            if self._log.index_at(start) is None:
                self.position = file_end
                yield Hole(start, file_end, "the file is too short")
                continue
            head, reason = None, explain_bad_record(view, at, base, room)
            with suppress(ProtocolError):
                head = parse_head(view, at)
            if head is not None and head.physical_offset == start and head.store_time_ms > 0:
                self.position = self.whole_end = start + head.size_bytes
                yield Hole(start, self.position, reason, is_record=True)
                continue
            found_at = find_next_record_start(self, start + 1, file_end, file_end)
            self.position = file_end if found_at is None else found_at
            yield Hole(start, self.position, reason)

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
            found = parse_log_record(view, at, base, check_crc=True)
            if found is None:
                return
            raw = np.frombuffer(view, np.uint8, found.size_bytes, at)
            records = Records(raw, np.zeros(1, np.int64), found.position)
            # It may stand in several queues.
            own = (found.topic, found.queue_id, found.queue_offset)
            others = [(key[0].encode(), key[1], offset) for key, offset in found.extra_queues()]
            unit = (found.position, found.size_bytes, found.tag_code(self._delays_ms))
            groups = [
                QueueUnits(topic, queue_id, np.array([offset]), np.array([unit], UNIT_COLUMNS))
                for topic, queue_id, offset in ((own, *others) if found.is_queued else ())
            ]
            yield Run(found, records, groups)

    def read(self, position: int, size: int) -> bytes:
        """Bytes of the log."""
        if not self._is_forgiving:
            return self._log.read(position, size)
        return read_or_zeros(self._log.read, position, size).ljust(size, b"\0")

    def data_start(self, position: int) -> int | None:
        """See `Series.data_start`; None where there is no file."""
        return self._log.data_start(position)


def _begin_of(view: memoryview, at: int) -> tuple[int, int]:
    """Size and magic number of what begins there; zeros when it does not hold both."""
    return BLANK.struct.unpack_from(view, at) if len(view) - at >= BLANK.size else (0, 0)


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
    return found if found.valid[0] and found.sizes[0] == len(raw) else None


def last_data(log: Series, start: int) -> int | None:
    """Behind the last byte of the log, from `start` on, that is not zero; None without one."""
    last = None
    for at, data in log.data(start):
        used = len(data.rstrip(b"\0"))
        last = at + used if used else last
    return last
