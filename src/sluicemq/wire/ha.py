"""Frames of both HA protocols, by which a slave copies its master's log. Nothing here does I/O.

RocketMQ has one protocol for plain pairs of master and slave, and another one for failover. The
slave connects, and sends the first frame. All integers are big-endian (spec/ha.md §1, §7).

    plain     slave   | end 8 |                                                  a report
              master  | position 8, size 4 | bytes
    failover  slave   | HANDSHAKE 4 | from last file 2, learner 2 | id 8 |
                      | TRANSFER 4 | end 8 |                                     a report
              master  | HANDSHAKE 4 | size 4 | end 8, epoch 4 | (epoch 4, start 8) …
                      | TRANSFER 4 | size 4 | position 8 | epoch 4, start 8 | confirmed 8 | bytes

A report contains the position up to which the slave has the log. A master's frame without log bytes
is a heartbeat: its position is where the next frame will begin. `confirmed` is the position up to
which the in-sync replicas have the log. What RocketMQ calls an epoch is a term here.

The readers return the log bytes of a frame as they arrive. They do not wait for the whole frame,
and a frame may begin and end within a record.

SluiceMQ adds two things between its own brokers. A first report of `FROM_START` means that the
slave has no log and needs it from its first byte (RocketMQ reads 0 as "from your last file"). A
ticket, | TICKET 8 | 16 bytes |, may precede all frames; it proves that the slave may connect.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from sluicemq.errors import ProtocolError

BODY_BYTES_MAX: Final = 4 * 1024 * 1024 - 64
"""The most log bytes in a frame. A frame must fit into the buffer of RocketMQ's slave, which has
4 MiB (spec/ha.md §1)."""
TERMS_MAX: Final = 1000
"""The most terms in a master's handshake, as in RocketMQ."""
FROM_START: Final = -1
"""The first report of a slave that needs the log from its first byte."""
TICKET_BYTES: Final = 16
TICKET_FRAME_BYTES: Final = 8 + TICKET_BYTES
FIRST_BYTES_MIN: Final = 8
"""The size of the smallest first frame of a slave, in bytes."""
_TICKET: Final = (-2).to_bytes(8, signed=True)


class ConnectionState(IntEnum):
    """The state of an HA connection. In the failover protocol each frame begins with it."""

    READY = 0
    HANDSHAKE = 1
    TRANSFER = 2
    SHUTDOWN = 3


def encode_ticket(ticket: bytes) -> bytes:
    """Encode a ticket of TICKET_BYTES bytes, which a slave sends before its first frame."""
    return _TICKET + ticket


def decode_ticket(received: bytes) -> bytes | None:
    """Return the ticket at the start of a slave's bytes, which may be incomplete.

    The ticket is shorter than TICKET_BYTES if it has not arrived completely. Return None if the
    bytes do not begin with a ticket, or are too few to know.
    """
    return received[8:TICKET_FRAME_BYTES] if received.startswith(_TICKET) else None


class LogTerm(NamedTuple):
    """A term of the log: one master wrote the log from position `start` up to the next term."""

    number: int
    start: int


class SlaveHandshake(NamedTuple):
    """A slave's first frame in the failover protocol.

    With `from_last_file` the slave asks for the log from the start of the master's last file. A
    learner never becomes part of the in-sync set.
    """

    replica_id: int
    from_last_file: bool = False
    is_learner: bool = False


class MasterHandshake(NamedTuple):
    """A master's first frame in the failover protocol.

    `end` is the end of its log, `term_number` its current term, and `terms` all terms of its log.
    """

    end: int
    term_number: int
    terms: tuple[LogTerm, ...]


class LogChunk(NamedTuple):
    """Bytes of the log at `position`, which are all or some of the bytes of a frame.

    A chunk without bytes is a heartbeat. `term` and `confirmed` are None in the plain protocol.
    """

    position: int
    data: bytes | memoryview
    term: LogTerm | None = None
    confirmed: int | None = None


_PLAIN_REPORT: Final = struct.Struct(">q")
_PLAIN_HEADER: Final = struct.Struct(">qi")
_STATE: Final = struct.Struct(">i")
_SLAVE_HANDSHAKE: Final = struct.Struct(">ihhq")
_FAILOVER_REPORT: Final = struct.Struct(">iq")
_MASTER_HANDSHAKE: Final = struct.Struct(">iiqi")
_TERM: Final = struct.Struct(">iq")
_FAILOVER_HEADER: Final = struct.Struct(">iiqiqq")

# ------------------------------------------------------------------------------------- encoding


def encode_slave_report(end: int, *, failover: bool) -> bytes:
    """Encode the report of a slave that has the log up to position `end`.

    The report belongs to the failover protocol if `failover` is set, else to the plain one.
    """
    if failover:
        return _FAILOVER_REPORT.pack(ConnectionState.TRANSFER, end)
    return _PLAIN_REPORT.pack(end)


def encode_slave_handshake(handshake: SlaveHandshake) -> bytes:
    """Return the bytes of the handshake frame that a slave sends first."""
    from_last_file = handshake.from_last_file
    is_learner = handshake.is_learner
    return _SLAVE_HANDSHAKE.pack(
        ConnectionState.HANDSHAKE, from_last_file, is_learner, handshake.replica_id
    )


def encode_master_handshake(handshake: MasterHandshake) -> bytes:
    """Return the bytes of the handshake frame with which a master responds to a slave.

    If the handshake has more than TERMS_MAX terms, only the last TERMS_MAX are sent.
    """
    terms = handshake.terms[-TERMS_MAX:]
    size = len(terms) * _TERM.size
    head = _MASTER_HANDSHAKE.pack(
        ConnectionState.HANDSHAKE, size, handshake.end, handshake.term_number
    )
    return head + b"".join(_TERM.pack(*term) for term in terms)


def encode_log_header(
    position: int, size: int, term: LogTerm | None = None, confirmed: int = 0
) -> bytes:
    """Encode the header of a frame with `size` log bytes from `position` on.

    The frame belongs to the plain protocol if `term` is None. This runs for every frame sent.
    """
    if term is None:
        return _PLAIN_HEADER.pack(position, size)
    return _FAILOVER_HEADER.pack(ConnectionState.TRANSFER, size, position, *term, confirmed)


# ------------------------------------------------------------------------------------- decoding


class SlaveFrameReader:
    """Decodes the bytes that a slave sends, behind its ticket."""

    def __init__(self, *, failover: bool) -> None:
        self._failover = failover
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[SlaveHandshake | int]:
        """Yield the frames from a slave that `received` completes, in order.

        A handshake is a SlaveHandshake. A report is an int: the position up to which the slave has
        the log. Bytes of an incomplete frame are stored for the next call.

        The plain protocol, without failover, has only reports. Then only the last report is
        yielded, because it replaces the earlier ones. Raises ProtocolError if a frame begins with
        an unknown state.
        """
        unread = self._rest + received
        if not self._failover:
            yield from self._read_last_plain_report(unread)
            return

        offset = 0
        while len(unread) - offset >= _STATE.size:
            state = _STATE.unpack_from(unread, offset)[0]
            if state not in (ConnectionState.HANDSHAKE, ConnectionState.TRANSFER):
                raise ProtocolError(
                    f"A slave's frame begins with {state}, not with 1 (handshake) or 2 (report). "
                    "Check that failover is enabled on the slave."
                )
            is_handshake = state == ConnectionState.HANDSHAKE
            layout = _SLAVE_HANDSHAKE if is_handshake else _FAILOVER_REPORT
            if len(unread) - offset < layout.size:
                break
            if is_handshake:
                _, from_last_file, learner, replica_id = layout.unpack_from(unread, offset)
                yield SlaveHandshake(replica_id, from_last_file == 1, learner == 1)
            else:
                _, position = layout.unpack_from(unread, offset)
                yield position
            offset += layout.size
        self._rest = unread[offset:]

    def _read_last_plain_report(self, unread: bytes) -> Iterator[int]:
        """Yield the position in the last complete report of `unread`, or nothing if there is none.

        The bytes of an incomplete report at the end are stored for the next call.
        """
        complete_bytes = len(unread) - len(unread) % _PLAIN_REPORT.size
        self._rest = unread[complete_bytes:]
        if complete_bytes:
            last_report_offset = complete_bytes - _PLAIN_REPORT.size
            yield _PLAIN_REPORT.unpack_from(unread, last_report_offset)[0]


class MasterFrameReader:
    """Decodes the bytes that a master sends.

    The log bytes of a frame are returned as they arrive, before their frame is complete.
    """

    def __init__(self, *, failover: bool) -> None:
        """Create a reader of a master's frames, without data.

        With `failover`, frames have terms, and the first one is a handshake.
        """
        self._failover = failover
        self._rest = b""
        """The bytes of a header or handshake that has not arrived completely."""
        self._next_chunk = LogChunk(0, b"")
        """The position, term and confirmed position of the next log bytes, without the bytes."""
        self._bytes_left = 0
        """The number of log bytes of the current frame that have not arrived."""

    def feed(self, received: bytes) -> Iterator[MasterHandshake | LogChunk]:
        """Yield the handshakes and chunks of the log that are in `received`, in order.

        A chunk need not be a whole frame: log bytes are yielded as soon as they arrive. Chunks of
        one term that follow one another in the log are joined to one, which has the confirmed
        position of the last. A heartbeat is a frame without log bytes. It is yielded as an empty
        chunk, unless it is joined to another one. Raises ProtocolError if a frame is malformed.
        """
        # The chunks that are joined to one: their bytes, the last chunk, and where it ends.
        joined_bytes = list[bytes | memoryview]()
        last_chunk = self._next_chunk
        end = -1  # the position behind `last_chunk`; -1 before the first chunk
        for frame in self._split_frames(received):
            follows_last_chunk = (
                isinstance(frame, LogChunk)
                and frame.position == end
                and frame.term == last_chunk.term
            )
            if joined_bytes and not follows_last_chunk:
                yield _join_chunk(last_chunk, joined_bytes, end)
                joined_bytes.clear()
            if isinstance(frame, LogChunk):
                joined_bytes.append(frame.data)
                last_chunk = frame
                end = frame.position + len(frame.data)
            else:
                yield frame
        if joined_bytes:
            yield _join_chunk(last_chunk, joined_bytes, end)

    def _split_frames(self, received: bytes) -> Iterator[MasterHandshake | LogChunk]:
        """Yield each handshake and each chunk of log bytes in `received`, without joining chunks.

        A frame whose bytes have arrived only in part gives a chunk with this part. A frame without
        log bytes gives an empty chunk. The bytes of an incomplete header are stored for the next
        call.
        """
        if self._rest:
            received = self._rest + received
            self._rest = b""
        view = memoryview(received)
        offset = 0
        while offset < len(received):
            if self._bytes_left:  # inside a frame, behind its header
                log_bytes = view[offset : offset + self._bytes_left]
                chunk = self._next_chunk
                yield chunk._replace(data=log_bytes)
                offset += len(log_bytes)
                self._bytes_left -= len(log_bytes)
                self._next_chunk = chunk._replace(position=chunk.position + len(log_bytes))
                continue

            frame_and_size = self._read_frame_header(received, offset)
            if frame_and_size is None:
                self._rest = received[offset:]
                return
            frame, header_size = frame_and_size
            offset += header_size
            if isinstance(frame, LogChunk):
                self._next_chunk = frame
            if not self._bytes_left:  # a handshake or a heartbeat
                yield frame

    def _read_frame_header(
        self, received: bytes, offset: int
    ) -> tuple[MasterHandshake | LogChunk, int] | None:
        """Return (handshake or empty chunk, size in bytes) for the header at `offset`.

        A handshake is read as a whole. Of a frame with log bytes only the header is read, and
        `_bytes_left` is set to the number of log bytes. Return None if the header or handshake is
        incomplete. Raises ProtocolError if it is malformed.
        """
        available_bytes = len(received) - offset
        if not self._failover:
            if available_bytes < _PLAIN_HEADER.size:
                return None
            position, self._bytes_left = _PLAIN_HEADER.unpack_from(received, offset)
            _check_log_header(position, self._bytes_left)
            return LogChunk(position, b""), _PLAIN_HEADER.size

        if available_bytes < _MASTER_HANDSHAKE.size:
            return None
        state = _STATE.unpack_from(received, offset)[0]
        if state != ConnectionState.TRANSFER:
            return _read_master_handshake(received, offset)
        if available_bytes < _FAILOVER_HEADER.size:
            return None
        _, self._bytes_left, position, term_number, term_start, confirmed = (
            _FAILOVER_HEADER.unpack_from(received, offset)
        )
        _check_log_header(position, self._bytes_left)
        term = LogTerm(term_number, term_start)
        return LogChunk(position, b"", term, confirmed), _FAILOVER_HEADER.size


def _join_chunk(last_chunk: LogChunk, joined_bytes: list[bytes | memoryview], end: int) -> LogChunk:
    """Return a chunk with all `joined_bytes`, which end at `end`, and the terms of `last_chunk`."""
    start = end - sum(map(len, joined_bytes))
    return last_chunk._replace(position=start, data=b"".join(joined_bytes))


def _read_master_handshake(received: bytes, offset: int) -> tuple[MasterHandshake, int] | None:
    """Return the handshake at `offset` and its size, or None if it is incomplete.

    `received` must contain at least the fields before the terms. Raises ProtocolError if the frame
    is not a handshake, or its size is invalid.
    """
    state, terms_size, end, term_number = _MASTER_HANDSHAKE.unpack_from(received, offset)
    if (
        state != ConnectionState.HANDSHAKE
        or terms_size % _TERM.size
        or not 0 <= terms_size <= BODY_BYTES_MAX
    ):
        raise ProtocolError(
            f"A master's frame begins with {state} and {terms_size}; this is not a failover frame."
        )
    handshake_size = _MASTER_HANDSHAKE.size + terms_size
    if len(received) - offset < handshake_size:
        return None
    terms_bytes = received[offset + _MASTER_HANDSHAKE.size : offset + handshake_size]
    terms = tuple(LogTerm(*fields) for fields in _TERM.iter_unpack(terms_bytes))
    return MasterHandshake(end, term_number, terms), handshake_size


def _check_log_header(position: int, size: int) -> None:
    """Raise ProtocolError if a master's frame has an invalid size or position.

    `size`, the number of log bytes, must be from 0 to BODY_BYTES_MAX, and `position` at least -1.
    """
    if not 0 <= size <= BODY_BYTES_MAX or position < -1:
        raise ProtocolError(
            f"A master's frame has {size} bytes for position {position}; up to "
            f"{BODY_BYTES_MAX} are allowed. Check that the address is the master's HA port "
            "(haListenPort)."
        )


def common_end(
    own_terms: Sequence[LogTerm], own_end: int, other_terms: Sequence[LogTerm], other_end: int
) -> int:
    """Return the position up to which two logs are identical, or -1 if they share no term.

    A term is a section of a log, written by one master. It has a number and a start position.
    `own_terms` and `other_terms` are the terms of the two logs, which end at `own_end` and
    `other_end`. The function searches the last term that is in both logs. It may end earlier in one
    of them, and the result is the earlier end (spec/ha.md §7).

    Raises ProtocolError if a term number occurs in both logs with different start positions.
    """
    other_end_by_term = dict(zip(other_terms, term_ends(other_terms, other_end), strict=True))
    other_numbers = {term.number for term in other_terms}
    for term, term_end in reversed([*zip(own_terms, term_ends(own_terms, own_end), strict=True)]):
        if term in other_end_by_term:
            return min(term_end, other_end_by_term[term])
        if term.number in other_numbers:
            raise ProtocolError(
                f"Term {term.number} begins at {term.start} here and elsewhere at its master: "
                "one of the two files epochFileCheckpoint is damaged."
            )
    return -1


def term_ends(terms: Sequence[LogTerm], end: int) -> list[int]:
    """Return the end position of each term in a log that ends at `end`, in order.

    A term ends where the next one begins, and the last one at `end`.
    """
    return [*(term.start for term in terms[1:]), *([end] if terms else [])]
