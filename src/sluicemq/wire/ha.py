"""Frames of both HA protocols, by which a slave follows its master's log; without I/O.

The slave dials and speaks first. All integers are big-endian (spec/ha.md §1, §7).

    plain     slave   | end 8 |                                                  a report
              master  | position 8, size 4 | bytes
    failover  slave   | HANDSHAKE 4 | from last file 2, learner 2 | id 8 |
                      | TRANSFER 4 | end 8 |                                     a report
              master  | HANDSHAKE 4 | size 4 | end 8, epoch 4 | (epoch 4, start 8) …
                      | TRANSFER 4 | size 4 | position 8 | epoch 4, start 8 | confirmed 8 | bytes

A frame of no bytes is a heartbeat: it says where the next one will begin. The bytes of a frame are
handed on as they arrive: neither side waits for a whole frame, which may lie anywhere in a record.

`FROM_START` is ours alone, in a first report to a master that is ours as well: this slave has
nothing and wants the log from its first byte. (RocketMQ takes 0 for "from your last file".) So is
a ticket, before everything else: | TICKET 8 | 16 bytes |, which shows that the slave may come.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from sluicemq.errors import ProtocolError

BODY_BYTES_MAX: Final = 4 * 1024 * 1024 - 64
"""RocketMQ's slave has a buffer of 4 MiB, which must hold a frame (spec/ha.md §1)."""
EPOCHS_MAX: Final = 1000
"""RocketMQ's master has room for so many in its handshake."""
FROM_START: Final = -1
TICKET_BYTES: Final = 16
TICKET_FRAME_BYTES: Final = 8 + TICKET_BYTES
FIRST_BYTES_MIN: Final = 8
"""Of whatever a slave says first."""
_TICKET: Final = (-2).to_bytes(8, signed=True)


class State(IntEnum):
    """Of a connection, and the first number of each frame of failover."""

    READY = 0
    HANDSHAKE = 1
    TRANSFER = 2
    SHUTDOWN = 3


def encode_ticket(ticket: bytes) -> bytes:
    """What comes before the first frame; `ticket` has TICKET_BYTES."""
    return _TICKET + ticket


def decode_ticket(data: bytes) -> bytes | None:
    """The ticket that a stream begins with, perhaps not whole yet; None: it begins with a frame, or
    nobody knows yet."""
    return data[8:TICKET_FRAME_BYTES] if data.startswith(_TICKET) else None


class Epoch(NamedTuple):
    """The reign of one master: what lies from `start` on, up to the next epoch, it wrote."""

    number: int
    start: int


class Greeting(NamedTuple):
    """A slave's handshake. A learner never counts as in sync."""

    replica_id: int
    from_last_file: bool = False
    is_learner: bool = False


class Welcome(NamedTuple):
    """A master's handshake: where its log ends, and who wrote what."""

    end: int
    epoch: int
    epochs: tuple[Epoch, ...]


class Chunk(NamedTuple):
    """Bytes of the log that lie at `position`: a frame's, or a part of them; none: a heartbeat.
    Plain frames know neither `epoch` nor `confirmed`."""

    position: int
    data: bytes | memoryview
    epoch: Epoch | None = None
    confirmed: int | None = None


_REPORT: Final = struct.Struct(">q")
_PLAIN: Final = struct.Struct(">qi")
_STATE: Final = struct.Struct(">i")
_GREETING: Final = struct.Struct(">ihhq")
_STATE_REPORT: Final = struct.Struct(">iq")
_WELCOME: Final = struct.Struct(">iiqi")
_EPOCH: Final = struct.Struct(">iq")
_TRANSFER: Final = struct.Struct(">iiqiqq")

# ------------------------------------------------------------------------------ what is written


def encode_report(end: int, *, failover: bool) -> bytes:
    """What a slave has of the log."""
    return _STATE_REPORT.pack(State.TRANSFER, end) if failover else _REPORT.pack(end)


def encode_greeting(greeting: Greeting) -> bytes:
    last, learner = greeting.from_last_file, greeting.is_learner
    return _GREETING.pack(State.HANDSHAKE, last, learner, greeting.replica_id)


def encode_welcome(welcome: Welcome) -> bytes:
    """Of more epochs than fit, the last ones."""
    epochs = welcome.epochs[-EPOCHS_MAX:]
    size = len(epochs) * _EPOCH.size
    head = _WELCOME.pack(State.HANDSHAKE, size, welcome.end, welcome.epoch)
    return head + b"".join(_EPOCH.pack(*epoch) for epoch in epochs)


def encode_head(position: int, size: int, epoch: Epoch | None = None, confirmed: int = 0) -> bytes:
    """What stands before the bytes of a frame; plain without an epoch. HOT."""
    if epoch is None:
        return _PLAIN.pack(position, size)
    return _TRANSFER.pack(State.TRANSFER, size, position, *epoch, confirmed)


# --------------------------------------------------------------------------------- what is read


class SlaveReader:
    """What a slave sends, as it arrives."""

    def __init__(self, *, failover: bool) -> None:
        self._failover = failover
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Greeting | int]:
        """Greetings, and what is reported; of plain reports only the last one is of interest.
        Raises ProtocolError."""
        data = self._rest + data
        if not self._failover:
            whole = len(data) - len(data) % _REPORT.size
            self._rest = data[whole:]
            if whole:
                yield _REPORT.unpack_from(data, whole - _REPORT.size)[0]
            return
        at = 0
        while len(data) - at >= _STATE.size:
            state = _STATE.unpack_from(data, at)[0]
            if state not in (State.HANDSHAKE, State.TRANSFER):
                raise ProtocolError(
                    f"A slave's frame begins with {state}: 1 is a handshake, 2 a report. "
                    "Is it a slave without failover?"
                )
            kind = _GREETING if state == State.HANDSHAKE else _STATE_REPORT
            if len(data) - at < kind.size:
                break
            fields = kind.unpack_from(data, at)
            at += kind.size
            if state == State.TRANSFER:
                yield fields[1]
            else:
                yield Greeting(fields[3], fields[1] == 1, fields[2] == 1)
        self._rest = data[at:]


class MasterReader:
    """What a master sends, as it arrives: bytes of the log before their frame is whole."""

    def __init__(self, *, failover: bool) -> None:
        self._failover = failover
        self._rest = b""
        self._frame = Chunk(0, b"")  # what comes next of the frame under way
        self._left = 0  # bytes that are still to come of it

    def feed(self, data: bytes) -> Iterator[Welcome | Chunk]:
        """Chunks that follow one another in one epoch come as one. Raises ProtocolError."""
        last, pieces, end = self._frame, list[bytes | memoryview](), -1
        for part in self._parts(data):
            follows = isinstance(part, Chunk) and part.position == end and part.epoch == last.epoch
            if pieces and not follows:
                yield last._replace(position=end - sum(map(len, pieces)), data=b"".join(pieces))
                pieces.clear()
            if isinstance(part, Chunk):
                pieces.append(part.data)
                last, end = part, part.position + len(part.data)
            else:
                yield part
        if pieces:
            yield last._replace(position=end - sum(map(len, pieces)), data=b"".join(pieces))

    def _parts(self, data: bytes) -> Iterator[Welcome | Chunk]:
        if self._rest:
            data, self._rest = self._rest + data, b""
        view, at = memoryview(data), 0
        while at < len(data):
            if self._left:
                part, frame = view[at : at + self._left], self._frame
                yield frame._replace(data=part)
                at += len(part)
                self._left -= len(part)
                self._frame = frame._replace(position=frame.position + len(part))
                continue
            head = self._head(data, at)
            if head is None:
                self._rest = data[at:]
                return
            found, size = head
            at += size
            if isinstance(found, Chunk):
                self._frame = found
            if not self._left:
                yield found

    def _head(self, data: bytes, at: int) -> tuple[Welcome | Chunk, int] | None:
        """The next frame without its bytes, and its size; None: more has to come."""
        room = len(data) - at
        if not self._failover:
            if room < _PLAIN.size:
                return None
            position, self._left = _PLAIN.unpack_from(data, at)
            self._check(position)
            return Chunk(position, b""), _PLAIN.size
        if room < _WELCOME.size:
            return None
        state, size, end, number = _WELCOME.unpack_from(data, at)
        if state == State.TRANSFER:
            if room < _TRANSFER.size:
                return None
            start, confirmed = _TRANSFER.unpack_from(data, at)[4:]
            self._left = size
            self._check(end)
            return Chunk(end, b"", Epoch(number, start), confirmed), _TRANSFER.size
        whole = _WELCOME.size + size
        if state != State.HANDSHAKE or size % _EPOCH.size or not 0 <= size <= BODY_BYTES_MAX:
            raise ProtocolError(
                f"A master's frame begins with {state} and {size}: it is none of failover."
            )
        if room < whole:
            return None
        entries = _EPOCH.iter_unpack(data[at + _WELCOME.size : at + whole])
        return Welcome(end, number, tuple(Epoch(*entry) for entry in entries)), whole

    def _check(self, position: int) -> None:
        if not 0 <= self._left <= BODY_BYTES_MAX or position < -1:
            raise ProtocolError(
                f"A master's frame has {self._left} bytes for {position}: up to {BODY_BYTES_MAX} "
                "are allowed. Is that its HA port (haListenPort)?"
            )


def consistent_end(own: Sequence[Epoch], end: int, other: Sequence[Epoch], other_end: int) -> int:
    """Up to where two logs are the same, by who wrote what: the smaller of the two ends of the
    last epoch that both have. -1 when they have none in common (spec/ha.md §7). Raises
    ProtocolError when it does not begin at one place."""
    theirs = dict(zip(other, ends_of(other, other_end), strict=True))
    numbers = {epoch.number for epoch in other}
    for epoch, stop in reversed([*zip(own, ends_of(own, end), strict=True)]):
        if epoch in theirs:
            return min(stop, theirs[epoch])
        if epoch.number in numbers:
            raise ProtocolError(
                f"Epoch {epoch.number} begins at {epoch.start} here and elsewhere at its master: "
                "one of the two files epochFileCheckpoint is damaged."
            )
    return -1


def ends_of(epochs: Sequence[Epoch], end: int) -> list[int]:
    """Where each of them ends, in a log that ends at `end`."""
    return [*(epoch.start for epoch in epochs[1:]), *([end] if epochs else [])]
