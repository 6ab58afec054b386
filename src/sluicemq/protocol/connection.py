"""A connection without I/O: bytes in any pieces go in, whole commands come out.

`FrameReader` keeps the pieces of an unfinished frame in a list and joins them once, when the last
one is there: a frame of 16 MiB that arrives in pieces of 64 KiB is copied once, not 256 times.
"""

import struct
from typing import Final

from sluicemq.errors import ProtocolError
from sluicemq.protocol.codec import decode_header_bytes
from sluicemq.protocol.command import FRAME_BYTES_MAX, Command

LOOSE_MAX: Final = 1024
"""More pieces than 16 MiB have in reads of 64 KiB, so that honest frames are joined only once."""
_TOTAL: Final = struct.Struct(">I")
_PREFIX: Final = struct.Struct(">II")
TLS_HELLO: Final = 0x16
"""First byte of a TLS connection; a frame never begins with it (its total would be 369 MB)."""


def check_total(total: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
    """Refuse a frame by its total. Raises ProtocolError."""
    if total < 4:
        raise ProtocolError(f"A frame says it has {total} bytes: less than its header length.")
    if total > frame_bytes_max:
        raise ProtocolError(
            f"A frame says it has {total} bytes, above the limit of {frame_bytes_max}.",
            cure="Is that port really spoken to in the remoting protocol?",
        )


def read_frame(data: bytes, start: int, end: int) -> Command:
    """The frame that lies in `data[start:end]`, `start` at its total. Raises ProtocolError."""
    mark = _PREFIX.unpack_from(data, start)[1]
    header_end = start + 8 + (mark & 0xFFFFFF)
    if header_end > end:
        raise ProtocolError(
            f"A header of {mark & 0xFFFFFF} bytes does not fit into a frame of "
            f"{end - start - 4} bytes."
        )
    return decode_header_bytes(mark >> 24, data[start + 8 : header_end], data[header_end:end])


class Pieces:
    """The unfinished end of a stream: joins when a frame can be whole.

    A peer that sends single bytes must not cost an object a byte: after `LOOSE_MAX` pieces the last
    ones become one.
    """

    __slots__ = ("_frame_bytes_max", "_loose", "_needed", "_parts", "_size")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._parts: list[bytes] = []
        self._loose = 0
        self._size = 0
        self._needed = 0

    def __len__(self) -> int:
        return self._size

    def add(self, data: bytes) -> bytes | None:
        """All that is there, beginning at a frame, when the first frame is whole; else None."""
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:
                self._tidy()
                return None
            data = b"".join(self._parts)
            self._parts.clear()
            self._size = self._loose = 0
        return data

    def _tidy(self) -> None:
        self._loose += 1
        if self._loose == LOOSE_MAX:
            self._parts[-LOOSE_MAX:] = [b"".join(self._parts[-LOOSE_MAX:])]
            self._loose = 0

    def keep(self, rest: bytes) -> bytes | None:
        """Keep `rest`, which begins at a frame; returns it instead when that frame is whole.

        Raises ProtocolError for an impossible total.
        """
        self._needed = 4
        if len(rest) >= 4:
            total = _TOTAL.unpack_from(rest)[0]
            check_total(total, self._frame_bytes_max)
            self._needed = 4 + total
            if len(rest) >= self._needed:
                return rest
        self._parts.append(rest)
        self._size = len(rest)
        return None


class FrameReader:
    """Bytes to commands. After a ProtocolError the stream is lost: close the connection."""

    __slots__ = ("_frame_bytes_max", "_pieces")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._pieces = Pieces(frame_bytes_max)

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._pieces)

    def feed(self, data: bytes) -> list[Command]:
        """The commands that became whole, in order. Raises ProtocolError."""
        whole = self._pieces.add(data)
        if not whole:
            return []
        commands: list[Command] = []
        position, size = 0, len(whole)
        while size - position >= 4:
            total = _TOTAL.unpack_from(whole, position)[0]
            check_total(total, self._frame_bytes_max)
            end = position + 4 + total
            if end > size:
                break
            commands.append(read_frame(whole, position, end))
            position = end
        if position < size:
            self._pieces.keep(whole[position:] if position else whole)
        return commands
