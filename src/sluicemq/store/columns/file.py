"""A sealed block of property columns as an Arrow IPC file, with proofs that it is still valid.

    columns/TOPIC/QUEUE/00000000000000065536-1f2e3d4c.arrow
                        first queue offset    CRC32 of the file, checked before it is used

A file contains one record batch with a dictionary array for each property, null where a message
does not have it. Any Arrow reader can open it. The metadata of the schema contains JSON under
`sluice`: the rows of which queue these are, the proofs, the names that were left out, the rows that
need the record, and statistics of each column (`record.columns`). The schema is at the beginning of
the file and its JSON has a checksum of its own. So the statistics alone can show that nothing in
the file matches (`read_block_head`).

The columns are derived data, so a file counts only if it can be proved that it was made of the
present messages. For every 4,096 rows it contains a checksum of their units in the consume queue
and of the record of the last of them. So old columns are not used for a queue that was truncated,
recreated or restored from a copy. Units that retention has removed need no proof, because their
rows are not read any more.

A file is written under another name, synced and renamed, then its directory is synced. A crash
leaves the complete file or none, and at worst a file that ends with `.new`, which the next builder
removes.

The thread that owns the store copies the units and takes views of the log files (`SourceRows`). All
that follows reads only those: decoding the rows into columns, and writing the columns to a file.
Therefore it may run in any thread, during appends, deletions and the closing of the store. It may
also run in another process (`broker.consume.columns_helper`), which maps the files of the log
itself and only needs the positions of the records (`serve_seal_jobs`):

    input    a line of JSON (`SealJob`), then the units of each slot
    output   a line of JSON: the name and size of the file, or an error
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
from sluicemq.record.arrow import ArrowColumns, LogPiece, build_block, merge_block_arrays
from sluicemq.record.columns import (
    BlockStats,
    Column,
    ColumnBlock,
    ColumnStats,
    Values,
    compute_block_stats,
)
from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.record.table import UNIT_COLUMNS
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import BLANK_SIZE, UNIT_BYTES, Queue
from sluicemq.store.segments import NAME_DIGITS, map_file

VERSION: Final = 2
"""The version of the file format. Files of other versions are not read."""
PROOF_ROWS: Final = 4096
"""The number of rows that one proof covers."""
SUFFIX: Final = ".arrow"
"""The end of the name of a file."""
UNFINISHED: Final = ".new"
"""What is appended to the name of a file until it is complete."""
_OFFSET_DIGITS: Final = 20
_CHECKSUM_DIGITS: Final = 8
_METADATA: Final = b"sluice"
_METADATA_CHECKSUM: Final = b"sluice-crc32"
_HEAD_BYTES: Final = 32 * 1024
"""The number of bytes that are read first; a longer schema needs a second read."""
_MESSAGE: Final = struct.Struct("<8x4xi")
"""The beginning of an Arrow file: magic, continuation marker, length of the schema."""


class UntrueFileError(Exception):
    """A file is damaged, has another format, or was made of other messages."""


class SealedBlock(NamedTuple):
    """The content of a file.

    `proofs` contains one proof for every PROOF_ROWS rows, from the first row of the block on.
    """

    topic: str
    queue_id: int
    block: ColumnBlock
    proofs: Sequence[int]

    @property
    def head(self) -> "BlockHead":
        """The head of the file, computed from the block."""
        block = self.block
        return BlockHead(
            topic=self.topic,
            queue_id=self.queue_id,
            first_offset=block.first_offset,
            rows=block.rows,
            proofs=self.proofs,
            stats=compute_block_stats(block),
        )


class BlockHead(NamedTuple):
    """The description of a block at the beginning of its file: its rows, proofs and statistics."""

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


def file_name(first_offset: int, content: bytes) -> str:
    """Return the name of a file with this content."""
    return f"{first_offset:0{_OFFSET_DIGITS}d}-{zlib.crc32(content):08x}{SUFFIX}"


def parse_first_offset(name: str) -> int | None:
    """Return the first queue offset in the name of a block's file; None for any other name.

    The form is OFFSET-CHECKSUM and SUFFIX, with a fixed number of digits for both.
    """
    digits, _, checksum_and_suffix = name.partition("-")
    if len(digits) != _OFFSET_DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    if not checksum_and_suffix.endswith(SUFFIX):
        return None
    if len(checksum_and_suffix) != _CHECKSUM_DIGITS + len(SUFFIX):
        return None
    return int(digits)


def select_fitting_columns(
    arrays: Mapping[str, Any], bytes_max: int
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return (arrays, dropped): the smallest columns that fit in `bytes_max` bytes together.

    `arrays` maps the names of properties to Arrow arrays. The first result is the part of it that
    fits, in the same order. `dropped` has the names of the other properties.
    """
    sizes = {name: array.nbytes for name, array in arrays.items()}
    bytes_left = bytes_max
    dropped_names = set()
    for name in sorted(arrays, key=lambda name: sizes[name]):  # the smallest first
        bytes_left -= sizes[name]
        if bytes_left < 0:
            dropped_names.add(name)
    fitting = {name: array for name, array in arrays.items() if name not in dropped_names}
    return fitting, frozenset(dropped_names)


def encode_block(sealed: SealedBlock) -> bytes:
    """Return the content of the file of a block, whose columns must be `ArrowColumns`.

    That is an Arrow IPC file. The JSON in its metadata has the keys version, topic, queue_id,
    first_offset, rows, excluded (names of properties without a column), odd (rows that need the
    record), proofs, and stats: property name -> [has_null, values or null, low, high].
    """
    block = sealed.block
    assert isinstance(block.columns, ArrowColumns)
    arrays = block.columns.arrays
    metadata = json.dumps(
        {
            "version": VERSION,
            "topic": sealed.topic,
            "queue_id": sealed.queue_id,
            "first_offset": block.first_offset,
            "rows": block.rows,
            "excluded": sorted(block.excluded),
            "odd": block.odd.tolist(),
            "proofs": list(sealed.proofs),
            "stats": sealed.head.stats.columns,
        }
    ).encode()
    schema = pa.schema(
        [pa.field(name, array.type) for name, array in arrays.items()],
        metadata={_METADATA: metadata, _METADATA_CHECKSUM: b"%08x" % zlib.crc32(metadata)},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        if arrays:
            writer.write_batch(pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode_block(name: str, content: bytes) -> SealedBlock:
    """Return the block in a file with this name and content.

    The name contains a checksum of the content. Raises UntrueFileError if they disagree, or if the
    content has another format.
    """
    if file_name(parse_first_offset(name) or 0, content) != name:
        raise UntrueFileError("its content differs from what was written")
    try:
        reader = pa.ipc.open_file(pa.BufferReader(content))
        metadata = _parse_metadata(reader.schema)
        arrays: dict[str, Any] = {}
        if reader.num_record_batches:
            batch = reader.get_batch(0)
            arrays = dict(zip(reader.schema.names, batch.columns, strict=True))
        block = ColumnBlock(
            first_offset=metadata["first_offset"],
            rows=metadata["rows"],
            columns=ArrowColumns(arrays),
            excluded=frozenset(metadata["excluded"]),
            odd=np.array(metadata["odd"], np.int64),
        )
        return SealedBlock(metadata["topic"], metadata["queue_id"], block, metadata["proofs"])
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise UntrueFileError(str(error)) from error


def _parse_metadata(schema: Any) -> dict[str, Any]:
    """Return the JSON object in the metadata of a schema.

    Raises UntrueFileError for another version or a wrong checksum, and KeyError, TypeError or
    ValueError for other damage.
    """
    encoded = schema.metadata[_METADATA]
    metadata: dict[str, Any] = json.loads(encoded)
    if metadata["version"] != VERSION:
        raise UntrueFileError(f"it has version {metadata['version']} instead of {VERSION}")
    if schema.metadata[_METADATA_CHECKSUM] != b"%08x" % zlib.crc32(encoded):
        raise UntrueFileError("its metadata differs from what was written")
    return metadata


def decode_block_head(beginning: bytes) -> BlockHead:
    """Return the head of a block, given the first bytes of its file.

    The head is the metadata that `encode_block` writes: topic, queue id, first offset, number of
    rows, proofs (checksums of the source messages), and statistics of the columns. `beginning` must
    contain the whole Arrow schema. Raises UntrueFileError if the bytes are damaged or have another
    format.
    """
    schema_start = 8  # behind the magic bytes
    try:
        metadata = _parse_metadata(pa.ipc.read_schema(pa.BufferReader(beginning[schema_start:])))
        columns = {name: _parse_stats(fields) for name, fields in metadata["stats"].items()}
        stats = BlockStats(columns, frozenset(metadata["excluded"]), bool(metadata["odd"]))
        return BlockHead(
            topic=metadata["topic"],
            queue_id=metadata["queue_id"],
            first_offset=metadata["first_offset"],
            rows=metadata["rows"],
            proofs=metadata["proofs"],
            stats=stats,
        )
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise UntrueFileError(str(error)) from error


def _parse_stats(fields: Sequence[Any]) -> ColumnStats:
    """Return the statistics of one column, given its list [has_null, values or None, low, high].

    Raises ValueError or TypeError if `fields` has another form.
    """
    has_null, values, low, high = fields
    if values is not None:
        values = tuple(values)
    return ColumnStats(has_null, values, low, high)


def check_proofs(
    sealed: SealedBlock | BlockHead,
    key: tuple[str, int],
    offset_min: int,
    evidence: "Mapping[int, SourceRows | None]",
) -> None:
    """Raise UntrueFileError if a block does not belong to the messages that the store has now.

    `key` is the expected (topic, queue id). A block has one proof (a checksum) for every PROOF_ROWS
    rows. `evidence` maps the first queue offset of each proof to the present rows, or to None if
    some of them do not exist. Proofs whose rows are all below `offset_min` are not compared,
    because retention has removed the rows.
    """
    block = sealed if isinstance(sealed, BlockHead) else sealed.block
    if (sealed.topic, sealed.queue_id) != key:
        raise UntrueFileError(f"it belongs to {sealed.topic}:{sealed.queue_id}")
    proof_offsets = range(block.first_offset, block.end, PROOF_ROWS)
    if len(proof_offsets) != len(sealed.proofs):
        raise UntrueFileError("proofs are missing")
    for first_offset, proof in zip(proof_offsets, sealed.proofs, strict=True):
        end = min(first_offset + PROOF_ROWS, block.end)
        if end <= offset_min:  # retention has removed all rows of this proof
            continue
        rows = evidence.get(first_offset)
        if rows is None or rows.compute_proof() != proof:
            raise UntrueFileError(f"the messages from offset {first_offset} on have changed")


def write_file(files: Files, directory: str, first_offset: int, content: bytes) -> str:
    """Write the file of a block durably, and return its name.

    The content is written under a temporary name and then renamed. Creates the directory if it does
    not exist. Raises OSError; then there is no complete file.
    """
    name = file_name(first_offset, content)
    unfinished_path = f"{directory}/{name}{UNFINISHED}"
    files.make_directory(directory)
    with closing(files.open(unfinished_path, create=True)) as file:
        file.truncate(0)
        file.pwrite(content, 0)
        file.sync()
    files.rename(unfinished_path, f"{directory}/{name}")
    files.sync_directory(directory)
    return name


def read_block(files: Files, directory: str, name: str) -> SealedBlock:
    """Return the block in a file. Raises UntrueFileError if it is damaged, and OSError."""
    with closing(files.open(f"{directory}/{name}")) as file:
        content = file.pread(file.size(), 0)
    return decode_block(name, content)


def read_block_head(files: Files, directory: str, name: str) -> BlockHead:
    """Return the head of a file without reading its columns.

    Raises UntrueFileError if the head is damaged, and OSError.
    """
    with closing(files.open(f"{directory}/{name}")) as file:
        beginning = file.pread(_HEAD_BYTES, 0)
        if len(beginning) < _MESSAGE.size:
            raise UntrueFileError("it is truncated")
        head_bytes = _MESSAGE.size + _MESSAGE.unpack_from(beginning)[0]
        if len(beginning) < head_bytes <= file.size():
            beginning = file.pread(head_bytes, 0)
    return decode_block_head(beginning)


def read_units(queue: Queue, start: int, stop: int) -> bytes | None:
    """Return the units with the offsets [start, stop) of a queue, None if some do not exist.

    The units are the queue's 20-byte entries, joined.
    """
    pieces = []
    offset = start
    while offset < stop:
        piece = queue.units(offset, stop - offset)
        if not len(piece):
            return None
        pieces.append(bytes(piece))
        offset += len(piece) // UNIT_BYTES
    if len(pieces) == 1:  # the common case, without a copy
        return pieces[0]
    return b"".join(pieces)


def log_file_numbers(units: bytes, file_bytes: int) -> list[int]:
    """Return the sorted numbers of the log's files that contain the records of some units.

    `units` are 20-byte entries of a queue, joined; each names the position of a record. The number
    of a file is its first position divided by `file_bytes`. Units without a record are ignored.
    """
    rows = np.frombuffer(units, UNIT_COLUMNS)
    sizes = rows["size"]
    has_record = (sizes != BLANK_SIZE) & (sizes > 0)
    positions = rows["position"][has_record].astype(np.int64)
    if not len(positions):
        return []
    first_number = int(positions.min()) // file_bytes
    last_number = int(positions.max()) // file_bytes
    if first_number == last_number:  # the common case, without sorting
        return [first_number]
    numbers: list[int] = np.unique(positions // file_bytes).tolist()
    return numbers


class SourceRows:
    """The rows with the offsets [start, stop) of a queue, with views of their records in the log.

    `units` are the queue entries of the rows, joined. `positions` and `sizes` are the positions and
    sizes of their records. The methods that make columns may be called in any thread.
    """

    __slots__ = ("_pieces", "positions", "sizes", "start", "stop", "units")

    def __init__(self, start: int, units: bytes, pieces: Sequence[LogPiece]) -> None:
        """Create the rows of `units`, of which the first one has the queue offset `start`.

        `units` are 20-byte queue entries, joined. `pieces` are the files of the log that contain
        the records. Files that no longer exist are not in it.
        """
        self.start = start
        self.stop = start + len(units) // UNIT_BYTES
        self.units = units
        rows = np.frombuffer(units, UNIT_COLUMNS)
        self.positions = rows["position"].astype(np.int64)
        self.sizes = rows["size"].astype(np.int64)
        self._pieces = pieces

    @classmethod
    def from_queue(cls, log: CommitLog, queue: Queue, start: int, stop: int) -> "SourceRows | None":
        """Return the rows with the offsets [start, stop), None if some of them do not exist."""
        units = read_units(queue, start, stop)
        if units is None:
            return None
        return cls.from_units(log, start, units)

    @classmethod
    def from_units(cls, log: CommitLog, start: int, units: bytes) -> "SourceRows":
        """Return the rows of any units (20-byte entries of a queue), in the order of `units`.

        The rows get the offsets from `start` on, whatever offsets the units have in their queue.
        Files of the log that no longer exist are left out.
        """
        file_bytes = log.segments.file_bytes
        pieces = []
        for number in log_file_numbers(units, file_bytes):
            segment = log.segments.at(number * file_bytes)
            if segment is not None:  # retention has not deleted the file
                view = np.frombuffer(segment.view(), np.uint8)
                pieces.append(LogPiece(segment.base, view))
        return cls(start, units, pieces)

    def all_columns(self, columns_max: int) -> ColumnBlock:
        """Return a block with at most `columns_max` columns of the rows."""
        return build_block(self.start, self.positions, self.sizes, self._pieces, columns_max)

    def columns_of(self, names: frozenset[str]) -> ColumnBlock:
        """Return a block with the columns of the properties `names`.

        Unlike `all_columns`, this does not leave out columns that have too many different values. A
        name without a column is a property that no row has.
        """
        block = self._make_compiled_columns(names)
        if block is None:
            block = build_block(self.start, self.positions, self.sizes, self._pieces, names=names)
        return block

    def _make_compiled_columns(self, names: frozenset[str]) -> ColumnBlock | None:
        """Return the result of `columns_of`, made by the compiled engine.

        Return None if the engine is missing or does not support these rows or names.
        """
        if engine.reads is None or len(self._pieces) != 1:
            return None
        ordered_names = tuple(names)
        if any("\ufffd" in name for name in ordered_names):
            return None  # Python decodes bytes that are not UTF-8 as this character
        ((log_base, log_bytes),) = self._pieces
        try:
            encoded_names = tuple(name.encode() for name in ordered_names)
            decoded = engine.reads.columns(self.units, log_bytes.data, log_base, encoded_names)
        except (UnicodeEncodeError, OverflowError):
            return None

        # For each name: an array with the code of each row, and the values by code.
        code_arrays, value_lists, is_ascii, odd_rows = decoded
        make_column = _make_column if is_ascii else _make_deduplicated_column
        columns = {}
        for name, code_array, values in zip(ordered_names, code_arrays, value_lists, strict=True):
            if values:  # without values, no row has the property
                columns[name] = make_column(np.frombuffer(code_array, np.int32), values)
        row_count = self.stop - self.start
        return ColumnBlock(
            self.start, row_count, columns, frozenset(), np.array(odd_rows, np.int64)
        )

    @property
    def end_position(self) -> int:
        """The commit log position behind the last of the records, 0 if there are none."""
        has_record = (self.sizes != BLANK_SIZE) & (self.sizes > 0)
        if not has_record.any():
            return 0
        return int((self.positions[has_record] + self.sizes[has_record]).max())

    @property
    def log_bytes(self) -> int:
        """The total size of the records of these rows."""
        return int(self.sizes[self.sizes != BLANK_SIZE].sum())

    def compute_proof(self) -> int:
        """Return a checksum of the rows: the CRC-32 of the units and of the last unit's record.

        Two logs may have equal units but different records; the record tells them apart. If the
        last unit has no record, or its file is missing, only the units count.
        """
        crc = zlib.crc32(self.units)
        position = int(self.positions[-1])
        size = int(self.sizes[-1])
        if not RECORD_BYTES_MIN <= size < BLANK_SIZE:  # the last unit is blank or damaged
            return crc
        for base, log_bytes in self._pieces:
            if base <= position <= base + len(log_bytes) - size:
                record = log_bytes[position - base :][:size]
                return zlib.crc32(record.data, crc)
        return crc


def _make_column(codes: NDArray[np.int32], values: Sequence[str]) -> Column:
    """Return a column whose row i has the value `values[codes[i]]`, or none if the code is -1."""
    return Column(codes, Values(values))


def _make_deduplicated_column(codes: NDArray[np.int32], values: Sequence[str]) -> Column:
    """Make a column in which each value occurs once, from `values` that may contain duplicates.

    Row i has the value `values[codes[i]]`, or no value if the code is -1. Duplicates occur because
    different bytes may have been decoded to equal strings.
    """
    new_code_by_value = {value: code for code, value in enumerate(dict.fromkeys(values))}
    # The last one is for the code -1, which means no value: index -1 is the last element.
    new_code_by_code = [*(new_code_by_value[value] for value in values), -1]
    return Column(np.array(new_code_by_code, np.int32)[codes], Values(new_code_by_value))


class SealedFile(NamedTuple):
    """A file that was written. `block` is its content if this process made it, else None."""

    name: str
    size_bytes: int
    rows: int
    block: ColumnBlock | None = None


def seal_pieces(
    files: Files,
    directory: str,
    key: tuple[str, int],
    limits: tuple[int, int],
    blocks: list[ColumnBlock],
    source_rows: list[SourceRows],
) -> SealedFile:
    """Merge consecutive blocks, and write them as one file.

    `key` is the (topic, queue id). `limits` is (maximum number of columns, maximum size of the file
    in percent of the size of the records); columns beyond these limits are left out. `source_rows`
    are the rows that the blocks were made of, PROOF_ROWS in each item.

    Return the written file. Raises OSError; then there is no file.
    """
    columns_max, disk_percent = limits
    block = merge_blocks(blocks, columns_max)

    # Leave out the largest columns if the file would be too large.
    log_bytes = sum(rows.log_bytes for rows in source_rows)
    bytes_max = log_bytes * disk_percent // 100
    assert isinstance(block.columns, ArrowColumns)
    arrays, dropped_names = select_fitting_columns(block.columns.arrays, bytes_max)
    block = block._replace(columns=ArrowColumns(arrays), excluded=block.excluded | dropped_names)

    proofs = [rows.compute_proof() for rows in source_rows]
    content = encode_block(SealedBlock(*key, block, proofs))
    name = write_file(files, directory, block.first_offset, content)
    return SealedFile(name, len(content), block.rows, block)


def merge_blocks(blocks: list[ColumnBlock], columns_max: int) -> ColumnBlock:
    """Merge consecutive blocks into one block with at most `columns_max` columns.

    The columns with the fewest nulls are kept. The names of the others are added to `excluded`.
    """
    arrays, excluded = merge_block_arrays(blocks)

    # Leave out the columns that most rows do not have.
    names = sorted(arrays, key=lambda name: arrays[name].null_count)
    excess_names = frozenset(names[columns_max:])
    columns = {name: array for name, array in arrays.items() if name not in excess_names}

    # The numbers of odd rows count from the first row of the merged block.
    first_offset = blocks[0].first_offset
    odd_rows = np.concatenate([block.odd + (block.first_offset - first_offset) for block in blocks])
    row_count = sum(block.rows for block in blocks)
    return ColumnBlock(
        first_offset, row_count, ArrowColumns(columns), excluded | excess_names, odd_rows
    )


MAPPED_FILES_MAX: Final = 4
"""The maximum number of log files that the other process keeps mapped."""


class SealJob(NamedTuple):
    """A file to be made by another process.

    `directory` is where the file is written, and `columns_max` and `disk_percent` are its limits
    (`seal_pieces`). `starts` contains the first offset of each slot, and `sizes` the bytes of its
    units, which follow the job in the input.
    """

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
    """The interface to another process that makes files."""

    def seal(self, job: SealJob, units: Sequence[bytes]) -> tuple[str, int]:
        """Do a job, whose slots have these units, and return the name and size of the file.

        Any thread may call this. Raises OSError; then there is no file.
        """
        ...

    def release_unused(self, now_s: float) -> None:
        """Release what is not needed at present. The owner calls this regularly, between jobs."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


def serve_seal_jobs(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Do the jobs of an input until it ends: the main function of the process that makes files.

    A job is a line of JSON (`SealJob`), followed by the bytes of its units. For each job, write a
    line of JSON to `answers`: {"name", "size"} of the new file, or {"error"}.
    """
    log_files = _LogFiles()
    for line in jobs:
        job = SealJob(**json.loads(line))
        # The units follow the job. They must be read even if the job fails: a job follows them.
        units_by_slot = [jobs.read(size) for size in job.sizes]
        answer: dict[str, Any]
        try:
            sealed = _do_seal_job(job, units_by_slot, log_files)
            answer = {"name": sealed.name, "size": sealed.size_bytes}
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _do_seal_job(
    job: SealJob, units_by_slot: Sequence[bytes], log_files: "_LogFiles"
) -> SealedFile:
    """Decode the rows of a job, and write its file.

    `units_by_slot` has the units of each slot (group of rows) of the job. Raises OSError and
    ValueError.
    """
    slot_rows = []
    for first_offset, units in zip(job.starts, units_by_slot, strict=True):
        slot_rows.append(SourceRows(first_offset, units, log_files.pieces(job, units)))
    blocks = [rows.all_columns(job.columns_max) for rows in slot_rows]
    key = (job.topic, job.queue_id)
    limits = (job.columns_max, job.disk_percent)
    return seal_pieces(SYSTEM_FILES, job.directory, key, limits, blocks, slot_rows)


class _LogFiles:
    """The files of the log that were mapped last, at most MAPPED_FILES_MAX."""

    def __init__(self) -> None:
        self._view_by_path: dict[str, memoryview] = {}
        """The files that are mapped, the oldest first."""

    def pieces(self, job: SealJob, units: bytes) -> list[LogPiece]:
        """Map the files of the log that contain the records of some units, and return them.

        Files that do not exist are left out. Mappings are kept for the next jobs. If there are too
        many, the oldest ones are dropped.
        """
        log_pieces = []
        for file_number in log_file_numbers(units, job.log_file_bytes):
            base = file_number * job.log_file_bytes
            view = self._map_path(f"{job.log_directory}/{base:0{NAME_DIGITS}d}")
            if view is not None:
                log_pieces.append(LogPiece(base, np.frombuffer(view, np.uint8)))
        return log_pieces

    def _map_path(self, path: str) -> memoryview | None:
        """Return the mapped content of a file, None if the file does not exist."""
        view = self._view_by_path.get(path)
        if view is not None:
            return view
        try:
            with closing(SYSTEM_FILES.open(path)) as file:
                view = map_file(file, file.size())
        except FileNotFoundError:
            return None
        if len(self._view_by_path) >= MAPPED_FILES_MAX:
            oldest_path = next(iter(self._view_by_path))
            del self._view_by_path[oldest_path]
        self._view_by_path[path] = view
        return view
