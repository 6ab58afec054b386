"""Rows of a queue made into columns, and columns into the file of a sealed block.

The thread that owns the store copies the units and takes the views of the log files (`Source`);
what follows reads only those, so it may run in any thread beside appends, deletions and the end of
the store. Or in another process (`broker.consume.columns_helper`), which maps the log's files by
itself and needs nothing but where the records lie (`serve`):

    in       a line of JSON (`Job`), then the units of each slot
    out      a line of JSON: the file's name and size, or what went wrong
"""

import json
from collections.abc import Sequence
from typing import IO, Any, Final, NamedTuple, Protocol

import numpy as np

from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.record.arrow import ArrowColumns, LogPiece, build_block, merged_arrays
from sluicemq.record.columns import ColumnBlock
from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.columns import file as columns_file
from sluicemq.store.columns.file import Sealed, proof
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import BLANK_SIZE, UNIT, UNIT_BYTES, Queue
from sluicemq.store.segments import NAME_DIGITS, map_file


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
    """What the proof of some rows is reckoned from (`file`)."""

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
        """See `file`. Any thread."""
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


class Made(NamedTuple):
    """A file that was made, and its block where it was made in this process."""

    name: str
    size_bytes: int
    rows: int
    block: ColumnBlock | None = None


def seal(
    files: Files,
    directory: str,
    key: tuple[str, int],
    limits: tuple[int, int],
    pieces: list[ColumnBlock],
    sources: list[Source],
) -> Made:
    """Pieces into one file, with as many columns as the first of the limits says, and no more of
    the disk than the second, in percent of the records. Raises OSError; then there is no file."""
    columns_max, disk_percent = limits
    block = merged(pieces, columns_max)
    bytes_max = sum(source.log_bytes for source in sources) * disk_percent // 100
    assert isinstance(block.columns, ArrowColumns)
    arrays, dropped = columns_file.fit_columns(block.columns.arrays, bytes_max)
    block = block._replace(columns=ArrowColumns(arrays), excluded=block.excluded | dropped)
    proofs = [source.proof() for source in sources]
    data = columns_file.encode(Sealed(*key, block, proofs))
    name = columns_file.write(files, directory, block.first_offset, data)
    return Made(name, len(data), block.rows, block)


def merged(pieces: list[ColumnBlock], columns_max: int) -> ColumnBlock:
    """Consecutive blocks as one."""
    arrays, excluded = merged_arrays(pieces)
    names = sorted(arrays, key=lambda name: arrays[name].null_count)
    over = frozenset(names[columns_max:])
    first = pieces[0].first_offset
    odd = np.concatenate([piece.odd + (piece.first_offset - first) for piece in pieces])
    kept = {name: array for name, array in arrays.items() if name not in over}
    return ColumnBlock(
        first, sum(piece.rows for piece in pieces), ArrowColumns(kept), excluded | over, odd
    )


LOG_FILES_KEPT: Final = 4


class Job(NamedTuple):
    """One file to be made: of which queue, where to, and the slots' first offsets and sizes."""

    directory: str
    topic: str
    queue_id: int
    columns_max: int
    disk_percent: int
    log_directory: str
    log_file_bytes: int
    starts: Sequence[int]
    sizes: Sequence[int]


class Sealer(Protocol):
    """Does jobs in another process."""

    def seal(self, job: Job, units: Sequence[bytes]) -> tuple[str, int]:
        """The file's name and size. Any thread. Raises OSError; then there is no file."""
        ...

    def rest(self, now_s: float) -> None:
        """Asked now and then, between jobs: it may give up what it does not need."""
        ...

    def close(self) -> None: ...


def serve(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Do one job after the other until there is none."""
    log_files = _LogFiles()
    for line in jobs:
        job = Job(**json.loads(line))
        units = [jobs.read(size) for size in job.sizes]
        answer: dict[str, Any]
        try:
            sources = [
                Source(start, part, log_files.pieces(job, part))
                for start, part in zip(job.starts, units, strict=True)
            ]
            pieces = [source.block(job.columns_max) for source in sources]
            key, limits = (job.topic, job.queue_id), (job.columns_max, job.disk_percent)
            made = seal(SYSTEM_FILES, job.directory, key, limits, pieces, sources)
            answer = {"name": made.name, "size": made.size_bytes}
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


class _LogFiles:
    """Mapped files of the log, the last few."""

    def __init__(self) -> None:
        self._known: dict[str, memoryview] = {}

    def pieces(self, job: Job, units: bytes) -> list[LogPiece]:
        """Those that the units point into, as far as they are there."""
        found = []
        for number in files_of(units, job.log_file_bytes):
            base = number * job.log_file_bytes
            data = self._mapped(f"{job.log_directory}/{base:0{NAME_DIGITS}d}")
            if data is not None:
                found.append(LogPiece(base, np.frombuffer(data, np.uint8)))
        return found

    def _mapped(self, path: str) -> memoryview | None:
        known = self._known.get(path)
        if known is None:
            try:
                file = SYSTEM_FILES.open(path)
            except FileNotFoundError:
                return None
            try:
                known = map_file(file, file.size())
            finally:
                file.close()
            if len(self._known) >= LOG_FILES_KEPT:
                del self._known[next(iter(self._known))]
            self._known[path] = known
        return known
