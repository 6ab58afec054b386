"""Compress message bodies, and decode stored ones as their producers sent them.

A record says in its sys flag whether its body is compressed and with what (spec/remoting.md §10).
Consumers, the CLI, Spark, archives and the console all decode bodies with this module.

    type 0, 3   zlib; gzip too, which a gRPC client may have sent through RocketMQ's proxy
    type 1      LZ4 frames
    type 2      Zstandard frames

Bytes after the first frame are treated as RocketMQ's Java client treats them: after zlib data they
are ignored, further LZ4 or Zstandard frames are decompressed and appended, and any other bytes are
an error.
An empty body is never decompressed.

A body that cannot be decoded is a value (`Undecodable`), not an exception: one bad message must not
stop the decoding of others.

Memory: a body is decompressed in pieces, and decoding stops as soon as it exceeds its limit, so the
output exceeds the limit by one piece at most. The decoder's own buffers come on top of that: up to
8 MiB for LZ4, and for Zstandard the window of the frame. The library limits a window to 128 MiB,
and the system allocates only the part of it that is written to.
"""

import importlib
import io
import zlib
from typing import Any, Final, NamedTuple

Buffer = bytes | bytearray | memoryview

COMPRESSED: Final = 0x1
COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300
COMPRESSION_BITS: Final = COMPRESSED | COMPRESSION_MASK
"""The bits of a sys flag that say whether and how the body is compressed."""

BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Default limit of a decompressed body: 16 times what a broker stores by default."""
FRAMES_MAX: Final = 1024
"""LZ4 or Zstandard frames in one body. Producers write one; setting up a decoder costs more than
decoding an empty frame, so a body of half a million empty frames would take seconds."""
_PIECE_BYTES: Final = 256 * 1024
_INPUT_BYTES: Final = 64 * 1024
_ZSTD_BLOCK_BYTES: Final = 128 * 1024
_ZSTD_BLOCK_INPUT_BYTES: Final = 4
"""The shortest block, one repeated byte, takes this much input and yields a whole block."""
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
_FROM_RAW: Final = "message.raw_body has the stored bytes."


class Undecodable(NamedTuple):
    """The reason why a body cannot be decoded, and what can be done about it."""

    reason: str
    fix: str


class _UndecodableError(Exception):
    """Ends a decoder. `decode_body` catches it and returns `found`."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.found = Undecodable(reason, fix)


def compress(body: Buffer, sys_flag: int) -> bytes:
    """Return `body` compressed by the algorithm that the compression bits of `sys_flag` choose.

    They choose LZ4 or Zstandard. Every other value, 0 included, means zlib. Raises ImportError if
    the package of the algorithm is not installed.
    """
    algorithm = sys_flag & COMPRESSION_MASK
    if algorithm == COMPRESSION_LZ4:
        return bytes(importlib.import_module("lz4.frame").compress(bytes(body)))
    if algorithm == COMPRESSION_ZSTD:
        package = importlib.import_module("zstandard")
        return bytes(package.ZstdCompressor().compress(bytes(body)))
    return zlib.compress(body, 5)


def decode_body(raw: Buffer, sys_flag: int, bytes_max: int = BODY_BYTES_MAX) -> bytes | Undecodable:
    """Return the body that the producer sent, or the reason why it cannot be decoded.

    `raw` is the stored body, and `sys_flag` the flag of its record, which says how it is
    compressed. A compressed body that becomes larger than `bytes_max` bytes cannot be decoded. A
    body that is not compressed is returned whatever its size.
    """
    if not sys_flag & COMPRESSED or not raw:
        return bytes(raw)
    algorithm = sys_flag & COMPRESSION_MASK
    try:
        if algorithm == COMPRESSION_LZ4:
            return _decompress_lz4(bytes(raw), bytes_max)
        if algorithm == COMPRESSION_ZSTD:
            return _decompress_zstd(bytes(raw), bytes_max)
        if algorithm in (0, COMPRESSION_ZLIB):
            return _decompress_zlib(bytes(raw), bytes_max)
    except _UndecodableError as error:
        return error.found
    except MemoryError:
        return Undecodable("there is not enough memory to decompress it", "Add memory.")
    return Undecodable(
        f"its compression type {algorithm >> 8} is unknown (known: 0 to 3)",
        f"Update SluiceMQ if a newer client wrote it; {_FROM_RAW}",
    )


class _Output:
    """Collects decompressed bytes, up to `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        """Create an empty output for at most `bytes_max` decompressed bytes."""
        self.size: int = 0
        self._bytes_max = bytes_max
        self._first = b""
        self._all: io.BytesIO | None = None

    @property
    def room(self) -> int:
        """The largest size in bytes that the next piece may have.

        It is one byte more than the limit leaves, so that exceeding the limit is noticed.
        """
        return min(_PIECE_BYTES, self._bytes_max + 1 - self.size)

    def add(self, piece: bytes) -> None:
        """Append a piece of the decompressed body.

        Raises _UndecodableError if the body becomes larger than the limit.
        """
        self.size += len(piece)
        if self.size > self._bytes_max:
            raise _too_large_error(self._bytes_max)
        if self._all is None:
            if not self._first:  # usually the only piece
                self._first = piece
                return
            self._all = io.BytesIO()
            self._all.write(self._first)
        self._all.write(piece)

    def whole(self) -> bytes:
        """Return all bytes that were added."""
        return self._first if self._all is None else self._all.getvalue()


def _too_large_error(bytes_max: int) -> _UndecodableError:
    """Return the error for a body that is larger than `bytes_max` bytes when decompressed."""
    return _UndecodableError(
        f"it decompresses to more than {bytes_max:,} bytes",
        f"Raise body_bytes_max (bodyBytesMax in Spark) if the message is genuine; {_FROM_RAW}",
    )


def _damaged_error(name: str, reason: object) -> _UndecodableError:
    """Return the error for data that the format `name` does not allow; `reason` says why."""
    return _UndecodableError(
        f"it is not valid {name} data: {reason}", f"Have its producer send it again; {_FROM_RAW}"
    )


def _cut_off_error(name: str) -> _UndecodableError:
    """Return the error for data of the format `name` whose end is missing."""
    return _damaged_error(name, "the data ends too early")


def _import_package(name: str) -> Any:
    """Import and return the package `name`. Raises _UndecodableError if that fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise _UndecodableError(
            f"it is compressed with {package}, which cannot be imported ({error})",
            f"Install it: pip install {package}. Or let producers compress with zlib.",
        ) from None


def _decompress_zlib(raw: bytes, bytes_max: int) -> bytes:
    """Return decompressed zlib or gzip data; bytes after its end are ignored.

    Raises _UndecodableError for invalid or incomplete data, and above `bytes_max` bytes.
    """
    output = _Output(bytes_max)
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    position = 0
    unconsumed = b""
    try:
        while not inflater.eof:
            chunk = unconsumed
            if not unconsumed:
                chunk = raw[position : position + _INPUT_BYTES]
                position += len(chunk)
            piece = inflater.decompress(chunk, output.room)
            unconsumed = inflater.unconsumed_tail
            if not piece and not chunk and not inflater.eof:
                raise _cut_off_error("zlib")
            output.add(piece)
    except zlib.error as error:
        raise _damaged_error("zlib", error) from None
    return output.whole()


def _decompress_lz4(raw: bytes, bytes_max: int) -> bytes:
    """Return the joined contents of all LZ4 frames in the data.

    Raises _UndecodableError if lz4 is not installed, for invalid or incomplete data, and above
    `bytes_max` bytes or FRAMES_MAX frames.
    """
    package = _import_package("lz4.frame")
    output = _Output(bytes_max)
    position = 0
    frame_count = 0
    try:
        while position < len(raw):
            frame_count = _count_frame(frame_count, "LZ4")
            position = _read_lz4_frame(package.LZ4FrameDecompressor(), raw, position, output)
    except (RuntimeError, ValueError, EOFError) as error:
        raise _damaged_error("LZ4", error) from None
    return output.whole()


def _read_lz4_frame(decompressor: Any, raw: bytes, position: int, output: _Output) -> int:
    """Add the content of the LZ4 frame at `position` to the output. Return where the frame ends.

    `decompressor` is a new decompressor of the package lz4. Raises _UndecodableError if the frame
    is incomplete or too large, and the errors of lz4 if it is damaged.
    """
    while not decompressor.eof:
        chunk = b""
        if decompressor.needs_input:
            chunk = raw[position : position + _INPUT_BYTES]
            position += len(chunk)
        piece = decompressor.decompress(chunk, output.room)
        if not piece and not chunk and not decompressor.eof:
            raise _cut_off_error("LZ4")
        output.add(piece)
    return position - len(decompressor.unused_data or b"")


def _decompress_zstd(raw: bytes, bytes_max: int) -> bytes:
    """Return the joined contents of all Zstandard frames in the data.

    Raises _UndecodableError if zstandard is not installed, for invalid or incomplete data, and
    above `bytes_max` bytes or FRAMES_MAX frames.
    """
    package = _import_package("zstandard")
    output = _Output(bytes_max)
    position = 0
    frame_count = 0
    try:
        while position < len(raw):
            frame_count = _count_frame(frame_count, "Zstandard")
            decompressor = package.ZstdDecompressor().decompressobj()
            while not decompressor.eof:
                # The decoder cannot limit its output, and joins it, so there are two copies for a
                # moment. The input is therefore limited: even if it consists of the shortest
                # blocks, both copies of its output stay within the limit.
                blocks_max = max(1, (bytes_max - output.size) // (2 * _ZSTD_BLOCK_BYTES))
                chunk_bytes_max = min(blocks_max * _ZSTD_BLOCK_INPUT_BYTES, _INPUT_BYTES)
                chunk = raw[position : position + chunk_bytes_max]
                if not chunk:
                    raise _cut_off_error("Zstandard")
                position += len(chunk)
                output.add(decompressor.decompress(chunk))
            position -= len(decompressor.unused_data)
    except package.ZstdError as error:
        raise _damaged_error("Zstandard", error) from None
    return output.whole()


def _count_frame(frame_count: int, name: str) -> int:
    """Count the next frame of a body: return `frame_count` + 1.

    Raises _UndecodableError if the body has FRAMES_MAX frames already.
    """
    if frame_count == FRAMES_MAX:
        raise _damaged_error(name, f"more than {FRAMES_MAX:,} frames")
    return frame_count + 1
