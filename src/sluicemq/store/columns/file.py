"""A sealed block of property columns as a file: Arrow IPC, and the proofs that it is still true.

    columns/TOPIC/QUEUE/00000000000000065536-1f2e3d4c.arrow
                        first queue offset    CRC32 of the file: damage is found before it is read

One record batch, a dictionary array a property, null where a message has none: any Arrow reader
opens it. The schema's metadata, under `sluice`, is JSON: which rows of which queue, what they were
built from, the names left out, the rows to be asked from the log, and figures of each column
(`record.columns`). It stands at the beginning and has a checksum of its own, so that the
figures alone can say that nothing in the file matches (`read_head`).

The columns are derived data, so a file counts only as long as it can be proved to be of these
messages. For every 4,096 rows it names a checksum of their units in the consume queue and of the
record of the last of them, so that a queue that was cut, made again or brought back from a copy
does not go with old columns. Units that retention has removed need no proof: nobody asks for them.

Files are written beside, synced, renamed; the directory is synced last. A crash leaves a file or
none, and at worst one that ends with `.new`, which the next builder removes.

Rows of a queue are made into columns, and columns into a file, beside the store: the thread that
owns it copies the units and takes the views of the log files (`Source`); what follows reads only
those, so it may run in any thread beside appends, deletions and the end of the store. Or in another
process (`broker.consume.columns_helper`), which maps the log's files by itself and needs nothing
but where the records lie (`serve`):

    in       a line of JSON (`Job`), then the units of each slot
    out      a line of JSON: the file's name and size, or what went wrong
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import IO, Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sluicemq import engine
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.record.arrow import ArrowColumns, LogPiece, build_block, merged_arrays
from sluicemq.record.columns import (
    BlockStats,
    Column,
    ColumnBlock,
    ColumnStats,
    Values,
    block_stats,
)
from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import BLANK_SIZE, UNIT_BYTES, Queue
from sluicemq.store.segments import NAME_DIGITS, map_file

VERSION: Final = 2
PROOF_ROWS: Final = 4096
SUFFIX: Final = ".arrow"
UNFINISHED: Final = ".new"
_OFFSET_DIGITS: Final = 20
_METADATA: Final = b"sluice"
_METADATA_CHECKSUM: Final = b"sluice-crc32"
_HEAD_BYTES: Final = 32 * 1024
_MESSAGE: Final = struct.Struct("<8x4xi")
"""How an Arrow file begins: its name, a mark, the length of the schema behind it."""


class UntrueFileError(Exception):
    """The file is damaged, or of another layout, or not of these messages."""


class Sealed(NamedTuple):
    """What a file holds; `proofs` are of every PROOF_ROWS rows in turn, from `first_offset` on."""

    topic: str
    queue_id: int
    block: ColumnBlock
    proofs: Sequence[int]

    @property
    def head(self) -> "Head":
        block = self.block
        rows = (block.first_offset, block.rows)
        return Head(self.topic, self.queue_id, *rows, self.proofs, block_stats(block))


class Head(NamedTuple):
    """What a file says of itself at its beginning."""

    topic: str
    queue_id: int
    first_offset: int
    rows: int
    proofs: Sequence[int]
    stats: BlockStats

    @property
    def end(self) -> int:
        """The queue offset behind the last row."""
        return self.first_offset + self.rows


def file_name(first_offset: int, data: bytes) -> str:
    return f"{first_offset:0{_OFFSET_DIGITS}d}-{zlib.crc32(data):08x}{SUFFIX}"


def first_offset_of(name: str) -> int | None:
    """The first queue offset of the file of that name; None when it is no such file."""
    digits, _, rest = name.partition("-")
    if len(digits) != _OFFSET_DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits) if rest.endswith(SUFFIX) and len(rest) == 8 + len(SUFFIX) else None


def fit_columns(arrays: Mapping[str, Any], bytes_max: int) -> tuple[dict[str, Any], frozenset[str]]:
    """The columns that have room in so many bytes, the small ones first, and the names of those
    that have not."""
    sizes = {name: array.nbytes for name, array in arrays.items()}
    left, dropped = bytes_max, set()
    for name in sorted(arrays, key=lambda name: sizes[name]):
        left -= sizes[name]
        if left < 0:
            dropped.add(name)
    kept = {name: array for name, array in arrays.items() if name not in dropped}
    return kept, frozenset(dropped)


def encode(sealed: Sealed) -> bytes:
    """The whole file. The block's columns must be `ArrowColumns`."""
    block = sealed.block
    assert isinstance(block.columns, ArrowColumns)
    arrays = block.columns.arrays
    about = json.dumps({
        "version": VERSION, "topic": sealed.topic, "queue_id": sealed.queue_id,
        "first_offset": block.first_offset, "rows": block.rows,
        "excluded": sorted(block.excluded), "odd": block.odd.tolist(),
        "proofs": list(sealed.proofs), "stats": sealed.head.stats.columns,
    }).encode()  # fmt: skip
    schema = pa.schema(
        [pa.field(name, array.type) for name, array in arrays.items()],
        metadata={_METADATA: about, _METADATA_CHECKSUM: b"%08x" % zlib.crc32(about)},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        if arrays:
            writer.write_batch(pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode(name: str, data: bytes) -> Sealed:
    """The inverse. Raises UntrueFileError when the bytes are not those that were written."""
    if file_name(first_offset_of(name) or 0, data) != name:
        raise UntrueFileError("its bytes are not those that were written")
    try:
        reader = pa.ipc.open_file(pa.BufferReader(data))
        about = _about(reader.schema)
        arrays: dict[str, Any] = {}
        if reader.num_record_batches:
            batch = reader.get_batch(0)
            arrays = dict(zip(reader.schema.names, batch.columns, strict=True))
        block = ColumnBlock(
            about["first_offset"], about["rows"], ArrowColumns(arrays),
            frozenset(about["excluded"]), np.array(about["odd"], np.int64),
        )  # fmt: skip
        return Sealed(about["topic"], about["queue_id"], block, about["proofs"])
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise UntrueFileError(str(error)) from error


def _about(schema: Any) -> dict[str, Any]:
    data = schema.metadata[_METADATA]
    about: dict[str, Any] = json.loads(data)
    if about["version"] != VERSION:
        raise UntrueFileError(f"it has version {about['version']}, not {VERSION}")
    if schema.metadata[_METADATA_CHECKSUM] != b"%08x" % zlib.crc32(data):
        raise UntrueFileError("its beginning is not what was written")
    return about


def decode_head(data: bytes) -> Head:
    """The head from the first bytes of a file. Raises UntrueFileError."""
    try:
        about = _about(pa.ipc.read_schema(pa.BufferReader(data[8:])))
        columns = {
            name: ColumnStats(has_null, None if values is None else tuple(values), low, high)
            for name, (has_null, values, low, high) in about["stats"].items()
        }
        stats = BlockStats(columns, frozenset(about["excluded"]), bool(about["odd"]))
        place = (about["topic"], about["queue_id"], about["first_offset"], about["rows"])
        return Head(*place, about["proofs"], stats)
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise UntrueFileError(str(error)) from error


def check(
    sealed: Sealed | Head,
    key: tuple[str, int],
    offset_min: int,
    evidence: "Mapping[int, Source | None]",
) -> None:
    """Raises UntrueFileError when the block is not of these messages.

    `evidence` are the messages as they are now, by the first queue offset of each proof; None when
    their units are not all there. Rows below `offset_min` are not asked for any more.
    """
    block = sealed if isinstance(sealed, Head) else sealed.block
    if (sealed.topic, sealed.queue_id) != key:
        raise UntrueFileError(f"it is of {sealed.topic}:{sealed.queue_id}")
    starts = range(block.first_offset, block.end, PROOF_ROWS)
    if len(starts) != len(sealed.proofs):
        raise UntrueFileError("proofs are missing")
    for start, expected in zip(starts, sealed.proofs, strict=True):
        stop = min(start + PROOF_ROWS, block.end)
        source = evidence.get(start)
        if stop > offset_min and (source is None or source.proof() != expected):
            raise UntrueFileError(f"the messages from {start} on are others now")


def write(files: Files, directory: str, first_offset: int, data: bytes) -> str:
    """Put the file there, durably; returns its name. Raises OSError, then nothing is there."""
    name = file_name(first_offset, data)
    beside = f"{directory}/{name}{UNFINISHED}"
    files.make_directory(directory)
    with closing(files.open(beside, create=True)) as file:
        file.truncate(0)
        file.pwrite(data, 0)
        file.sync()
    files.rename(beside, f"{directory}/{name}")
    files.sync_directory(directory)
    return name


def read(files: Files, directory: str, name: str) -> Sealed:
    """Raises UntrueFileError, or OSError when the disk refuses."""
    with closing(files.open(f"{directory}/{name}")) as file:
        data = file.pread(file.size(), 0)
    return decode(name, data)


def read_head(files: Files, directory: str, name: str) -> Head:
    """What the file says of itself, without reading it all. Raises as `read`."""
    with closing(files.open(f"{directory}/{name}")) as file:
        data = file.pread(_HEAD_BYTES, 0)
        if len(data) < _MESSAGE.size:
            raise UntrueFileError("it is cut off")
        size = _MESSAGE.size + _MESSAGE.unpack_from(data)[0]
        if len(data) < size <= file.size():
            data = file.pread(size, 0)
    return decode_head(data)


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

    def block_of(self, names: frozenset[str]) -> ColumnBlock:
        """The columns of these names alone, whatever their values are. Any thread."""
        found = self._compiled(names)
        if found is None:
            places = self.positions, self.sizes, self._pieces
            found = build_block(self.start, *places, names=names)
        return found

    def _compiled(self, names: frozenset[str]) -> ColumnBlock | None:
        """The same by the compiled engine; None where it does not see what Python sees."""
        if engine.reads is None or len(self._pieces) != 1:
            return None
        texts = tuple(names)
        try:
            wanted = tuple(name.encode() for name in texts)
            if any("\ufffd" in name for name in texts):
                return None  # what is not UTF-8 in a record is that
            ((base, data),) = self._pieces
            found = engine.reads.columns(self.units, data.data, base, wanted)
        except (UnicodeEncodeError, OverflowError):
            return None
        arrays, values, is_ascii, odd = found
        rows, column_of = self.stop - self.start, _plain if is_ascii else _numbered
        columns = {
            name: column_of(np.frombuffer(array, np.int32), known)
            for name, array, known in zip(texts, arrays, values, strict=True)
            if known
        }
        return ColumnBlock(self.start, rows, columns, frozenset(), np.array(odd, np.int64))

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
        """The checksum of their units and of the record of the last one, if it is there. Any
        thread."""
        position, size = int(self.positions[-1]), int(self.sizes[-1])
        known = zlib.crc32(self.units)
        for base, data in self._pieces if RECORD_BYTES_MIN <= size < BLANK_SIZE else ():
            if base <= position <= base + len(data) - size:
                return zlib.crc32(data[position - base :][:size].data, known)
        return known


def _plain(codes: NDArray[np.int32], values: Sequence[str]) -> Column:
    return Column(codes, Values(values))


def _numbered(codes: NDArray[np.int32], values: Sequence[str]) -> Column:
    """The column, each of its values once."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    places = [*(numbers[value] for value in values), -1]
    return Column(np.array(places, np.int32)[codes], Values(numbers))


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
    arrays, dropped = fit_columns(block.columns.arrays, bytes_max)
    block = block._replace(columns=ArrowColumns(arrays), excluded=block.excluded | dropped)
    proofs = [source.proof() for source in sources]
    data = encode(Sealed(*key, block, proofs))
    name = write(files, directory, block.first_offset, data)
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
            path = f"{job.log_directory}/{base:0{NAME_DIGITS}d}"
            if path not in self._known:
                try:
                    with closing(SYSTEM_FILES.open(path)) as file:
                        view = map_file(file, file.size())
                except FileNotFoundError:
                    continue
                if len(self._known) >= LOG_FILES_KEPT:
                    del self._known[next(iter(self._known))]
                self._known[path] = view
            found.append(LogPiece(base, np.frombuffer(self._known[path], np.uint8)))
        return found
