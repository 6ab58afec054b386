"""A sealed block of property columns as a file: Arrow IPC, and the proofs that it is still true.

    columns/TOPIC/QUEUE/00000000000000065536-1f2e3d4c.arrow
                        first queue offset    CRC32 of the file: damage is found before it is read

One record batch, a dictionary array a property, null where a message has none: any Arrow reader
opens it. The schema's metadata, under `sluice`, is JSON: which rows of which queue, what they were
built from, the names left out, the rows to be asked from the log, and figures of each column
(`record.column_stats`). It stands at the beginning and has a checksum of its own, so that the
figures alone can say that nothing in the file matches (`read_head`).

The columns are derived data, so a file counts only as long as it can be proved to be of these
messages. For every 4,096 rows it names a checksum of their units in the consume queue and of the
record of the last of them, so that a queue that was cut, made again or brought back from a copy
does not go with old columns. Units that retention has removed need no proof: nobody asks for them.

Files are written beside, synced, renamed; the directory is synced last. A crash leaves a file or
none, and at worst one that ends with `.new`, which the next builder removes.
"""

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from sluicemq.files import Files
from sluicemq.record.arrow import ArrowColumns
from sluicemq.record.columns import BlockStats, ColumnBlock, ColumnStats, block_stats

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


def proof(units: bytes | memoryview, last_record: bytes | memoryview) -> int:
    """The checksum of some rows: their units, and the record of the last one (may be empty)."""
    return zlib.crc32(last_record, zlib.crc32(units))


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
        columns = {name: _stats(*figures) for name, figures in about["stats"].items()}
        stats = BlockStats(columns, frozenset(about["excluded"]), bool(about["odd"]))
        place = (about["topic"], about["queue_id"], about["first_offset"], about["rows"])
        return Head(*place, about["proofs"], stats)
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise UntrueFileError(str(error)) from error


def _stats(
    has_null: bool, values: list[str] | None, low: float | None, high: float | None
) -> ColumnStats:
    return ColumnStats(has_null, None if values is None else tuple(values), low, high)


def check(
    sealed: Sealed | Head,
    key: tuple[str, int],
    offset_min: int,
    proof_of: Callable[[int, int], int | None],
) -> None:
    """Raises UntrueFileError when the block is not of these messages.

    `proof_of` gives the proof of the queue offsets [start, stop) as they are now, or None when
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
        if stop > offset_min and proof_of(start, stop) != expected:
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
