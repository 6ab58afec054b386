"""From bytes to handlers to bytes: the seam `feed(data, peer) -> (used, answers)`.

One call handles every whole frame in `data`: decode, look up the handler by request code, collect
the answers, join them once. No task, no future, no await; a compiled twin can take this place.

A handler is `(command, peer) -> outcome`:

    bytes     an encoded frame, answered now
    Command   answered now, after the dispatcher filled in opaque and flag
    None      no answer (now or ever)
    others    handed to `deferred(outcome, command, peer)`, which answers later by `peer.write`

Before that, a request code may have a *quick* handler: `(header, body, peer) -> taken`. It gets the
header's JSON values as they are (nothing is checked, a field may be of any type) and says False for
whatever is not plain; then the request goes the usual way. When it takes a request it returns the
answer, to be joined with others, or True and sees to it at the end of the turn. An exception of it
is a bug like that of any handler: only a header that cannot be decoded falls back to the usual way.
The compiled engine's `run` stands before both: of a chunk it takes as many frames as are plain.

What goes wrong stays in its frame: an exception becomes an answer with a code and a remark, and is
logged once for each kind; a one-way request gets none. Only bytes that are not the protocol raise
ProtocolError: the connection has to be closed. Frames before the bad one are answered first.

A `Peer` is one connection as a handler sees it, whatever carries it. `labels` is free for handlers
(who it is, which groups it belongs to). `write` takes whole frames in any order; `ask` sends a
request to the client, whose answer carries its opaque and the response flag (spec/remoting.md §4).
"""

import logging
import socket
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

import orjson

from sluicemq.errors import ProtocolError, RequestError, SluiceError, StoreFullError
from sluicemq.model.ids import Host, encode_host
from sluicemq.net.limits import (
    HEADER_BYTES_MAX,
    HEADER_PLAIN_BYTES,
    NOBODY_WAITS,
    REFUSED_MAX,
    Shares,
    check_header,
    check_request,
)
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    FRAME_BYTES_MAX,
    HEADER_MASK,
    JSON,
    SERVER_LANGUAGE,
    Command,
    Pieces,
    check_total,
    command_of,
    decode,
    encode,
    encode_answer,
)

log = logging.getLogger(__name__)

NOWHERE: Final = Host("0.0.0.0", 0)
"""An address that is not known."""
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_ENDED: Final = (7, 8)
"""Linux's TCP_CLOSE and TCP_CLOSE_WAIT, the first byte of `struct tcp_info`."""
_IPV4_IN_IPV6: Final = "::ffff:"


class Carrier(Protocol):
    """What carries the bytes: the part of asyncio's transports that is needed here."""

    def write(self, data: bytes, /) -> None: ...

    def close(self) -> None: ...


def host_of(name: Any) -> Host:
    """A socket name as a host: IPv4 that came in over an IPv6 socket is IPv4."""
    if not isinstance(name, tuple) or len(name) < 2:
        return NOWHERE
    address = str(name[0]).partition("%")[0]
    return Host(address.removeprefix(_IPV4_IN_IPV6), int(name[1]))


class Peer:
    """One accepted connection.

    `remote` is the client's address, `remote_bytes` its stored form; `local` is the address by
    which the client reached us. `idle_sweeps` counts the sweeps since a byte went either way.
    `is_trusted` when access rules have let a request of it pass; `refused` counts those before.
    `has_queues`: it balances queues, and is told who else is in its groups.
    """

    __slots__ = (
        "_asked", "_carrier", "_opaque", "closed", "has_queues", "idle_sweeps", "is_trusted",
        "labels", "local", "refused", "remote", "remote_bytes",
    )  # fmt: skip

    def __init__(self, carrier: Carrier, remote: Host, local: Host) -> None:
        self._carrier = carrier
        self._asked: dict[int, Callable[[Command], None]] = {}
        self._opaque = 0
        self.speak_for(remote)
        self.local = local
        self.labels: dict[str, Any] = {}
        self.closed = False
        self.has_queues = True
        self.idle_sweeps = 0
        self.is_trusted = False
        self.refused = 0

    @property
    def is_gone(self) -> bool:
        """Whether the other end has closed the connection. What it had sent before may wait to be
        read. Any thread may ask; where the system does not tell, only a close that was seen
        counts."""
        if self.closed:
            return True
        about = getattr(self._carrier, "get_extra_info", None)
        connected = None if about is None else about("socket")
        if connected is None or _TCP_INFO is None:
            return False
        try:
            return connected.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] in _ENDED
        except OSError:
            return True

    def speak_for(self, remote: Host) -> None:
        """What comes is from there, whoever passes it on. Raises ValueError for what is no
        address."""
        self.remote_bytes, self.remote = encode_host(remote), remote

    def carry(self, carrier: Carrier) -> None:
        """Bytes go through `carrier` from now on (TLS)."""
        self._carrier = carrier

    def write(self, frame: bytes) -> None:
        """Send whole frames; ignored when the connection is closed."""
        if not self.closed and frame:
            self.idle_sweeps = 0
            self._carrier.write(frame)

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """One frame in pieces that will not change. A socket takes them as they are; a carrier
        without `writelines` gets a copy."""
        write = getattr(self._carrier, "writelines", None)
        if write is None:
            self.write(b"".join(pieces))
        elif not self.closed:
            self.idle_sweeps = 0
            write(pieces)

    @property
    def unsent_bytes(self) -> int:
        """What was written and has not left; for streams (`net.stream`)."""
        return 0 if self.closed else int(self._carrier.get_write_buffer_size())  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close when what was written has left."""
        if not self.closed:
            self.closed = True
            self._carrier.close()

    def count_refusal(self) -> None:
        """A request was refused for want of rights; too many end the connection."""
        self.refused += 1
        if self.refused > REFUSED_MAX:
            self.close()

    def notify(self, command: Command) -> None:
        """A one-way request to the client."""
        command.flag |= FLAG_ONEWAY
        self.write(self._numbered(command))

    def ask(self, command: Command, on_answer: Callable[[Command], None]) -> int:
        """A request to the client without waiting: `on_answer` is called with its answer, if one
        comes. Returns its number, for `give_up`."""
        frame = self._numbered(command)
        self._asked[command.opaque] = on_answer
        self.write(frame)
        return command.opaque

    def give_up(self, number: int) -> None:
        """An answer to that request is not wanted any more."""
        self._asked.pop(number, None)

    def _numbered(self, command: Command) -> bytes:
        """Our own numbers: those of the other direction do not matter (spec/remoting.md §4)."""
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        command.opaque = self._opaque
        command.language = SERVER_LANGUAGE
        return encode(command)

    def answered(self, command: Command) -> None:
        """An answer came in. One that nobody waits for (any more) is dropped."""
        on_answer = self._asked.pop(command.opaque, None)
        if on_answer is not None:
            on_answer(command)

    def lost(self) -> None:
        """The connection is gone; no answer comes any more."""
        self.closed = True
        self._asked.clear()

    def __repr__(self) -> str:
        return f"<peer {self.remote}{' closed' if self.closed else ''}>"


# --------------------------------------------------------------------------------------- requests

Outcome = Any
Handler = Callable[[Command, Peer], Outcome]
Deferred = Callable[[Any, Command, Peer], None]
Before = Callable[[Command, Peer], Outcome]
Quick = Callable[[dict[str, Any], bytes, Peer], bool | bytes]
"""Of a quick handler, and of `admit`."""

Run = Callable[[bytes, int, Peer, Shares], int]
_loads: Final = orjson.loads
_PREFIX: Final = struct.Struct(">II")
LOGGED_MAX: Final = 256
"""Kinds of trouble that are logged; a peer that invents codes cannot fill the disk."""


class Dispatcher:
    """Request codes to handlers.

    `before` sees every request first (access rules): an outcome other than None takes the
    handler's place. `admit` is its quick twin for requests with a quick handler: False sends them
    the usual way, past `before`; without it nothing is quick. `frame_bytes_max` bounds a frame
    without its leading total; only requests in `with_messages` may have bodies that fill one
    (None: all). `shares`: the time of the loop, for transports that can let a connection wait.
    `run`: of the compiled engine.
    """

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        *,
        quick: Mapping[int, Quick] | None = None,
        deferred: Deferred | None = None,
        before: Before | None = None,
        admit: Quick | None = None,
        with_messages: Collection[int] | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        shares: Shares | None = None,
        run: Run | None = None,
    ) -> None:
        self.handlers: dict[int, Handler] = {int(code): it for code, it in handlers.items()}
        # Who looks at requests first has to see all of them.
        is_blind = before is not None and admit is None
        self.quick: dict[int, Quick] = {} if is_blind else dict(quick or {})
        self.frame_bytes_max = frame_bytes_max
        self.shares = shares or NOBODY_WAITS
        self.run = run
        self._deferred = deferred
        self._before = before
        self._admit = admit
        self._with_messages = with_messages
        self._logged: set[tuple[int, str]] = set()

    @property
    def is_guarded(self) -> bool:
        """Do requests need rights?"""
        return self._before is not None

    def feed(
        self, data: bytes, peer: Peer, shares: Shares = NOBODY_WAITS, *, is_tried: bool = False
    ) -> tuple[int, bytes]:
        """Handle every whole frame in `data`. HOT.

        Returns the bytes used and the answers. Raises ProtocolError when the first frame is bad;
        a later bad frame ends the pass and raises when the rest is fed again. With `shares` a
        request that is not quick may have to wait: then the pass ends before it. `is_tried`: the
        compiled engine has left the first frame.
        """
        find_quick, admit, run = self.quick.get, self._admit, None if is_tried else self.run
        frame_bytes_max = self.frame_bytes_max
        unpack = _PREFIX.unpack_from
        answers: list[bytes] = []
        last_s = shares.now_s()
        position, size = 0 if run is None else run(data, 0, peer, shares), len(data)
        while size - position >= 8:
            total, mark = unpack(data, position)
            end = position + 4 + total
            header_end = position + 8 + (mark & HEADER_MASK)
            if end > size and total <= frame_bytes_max:
                break
            is_odd = header_end > end or total > frame_bytes_max or mark > HEADER_PLAIN_BYTES
            values, header, body = None, data[position + 8 : header_end], data[header_end:end]
            try:
                if not is_odd:
                    quick = None
                    try:
                        values = _loads(header)
                        quick = find_quick(values["code"])
                        if (
                            quick is not None
                            and (admit is None or admit(values, body, peer))
                            and (taken := quick(values, body, peer))
                        ):
                            answers += () if taken is True else (taken,)
                            position = end
                            continue
                    except Exception as error:  # noqa: BLE001 -- as in `_answer`
                        if quick is not None:
                            answers.append(self._failure(error, command_of(values, header, body)))
                            position = end
                            continue
                        values = None  # it cannot be decoded: the usual way copes with it
                if shares.is_tight and shares.has_to_wait(peer):
                    shares.spent(peer, last_s)  # decoding the header has taken time too
                    break
                command = (
                    self._read_odd(data, position + 4, end, mark)
                    if is_odd
                    else command_of(values, header, body)
                )
            except ProtocolError:
                shares.spent(peer, last_s)
                if position == 0:
                    raise
                break
            position = end
            answers.append(self._answer(command, peer))
            last_s = shares.spent(peer, last_s, command.code)
        return position, answers[0] if len(answers) == 1 else b"".join(answers)

    def give(self, command: Command, peer: Peer) -> bytes:
        """A request that is no frame, and whose rights were looked at. HOT.

        Returns the answer; nothing when it comes later by `peer.write`, or not at all.
        """
        quick = self.quick.get(command.code)
        if quick is not None:
            header = {
                "code": command.code, "flag": command.flag, "opaque": command.opaque,
                "extFields": command.fields,
            }  # fmt: skip
            try:
                if taken := quick(header, command.body, peer):  # type: ignore[arg-type]
                    return b"" if taken is True else taken
            except Exception as error:  # noqa: BLE001 -- as in `_answer`
                return self._failure(error, command)
        return self._answer(command, peer, is_checked=True)

    def serve(self, pieces: Pieces, peer: Peer, data: bytes) -> None:
        """Handle what came in over a connection that is never made to wait; a bad frame closes it.
        `pieces` keeps what is not whole yet."""
        if peer.closed:
            return
        whole = pieces.add(data)
        try:
            while whole:
                used, answers = self.feed(whole, peer)
                peer.write(answers)
                if used == len(whole):
                    return
                whole = pieces.keep(whole[used:] if used else whole)
        except ProtocolError:
            peer.close()

    def _answer(self, command: Command, peer: Peer, *, is_checked: bool = False) -> bytes:
        """The usual way: what the handler of the code says, empty when nothing is answered now."""
        try:
            outcome: Outcome
            handler = self.handlers.get(command.code)
            if command.flag & FLAG_RESPONSE or handler is None:
                outcome = self._unhandled(command, peer)
            else:
                check_request(command, self._with_messages)
                is_open = is_checked or self._before is None
                outcome = None if is_open else self._checked(command, peer)
                if outcome is None:
                    outcome = handler(command, peer)
            if outcome.__class__ is not bytes and outcome is not None:
                if isinstance(outcome, Command):
                    outcome = finish_answer(outcome, command)
                elif self._deferred is not None:
                    outcome = self._deferred(outcome, command, peer)
                else:
                    kind = type(outcome).__name__
                    raise TypeError(f"a handler returned {kind}, and nobody takes it")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 -- the server's loop: it must go on
            return self._failure(error, command)
        return b"" if outcome is None or command.flag & FLAG_ONEWAY else outcome

    def _read_odd(self, data: bytes, start: int, end: int, mark: int) -> Command:
        """Decode a frame with impossible lengths, with another header than JSON, or with a header
        above HEADER_PLAIN_BYTES. Raises ProtocolError."""
        check_total(end - start, self.frame_bytes_max)
        if mark & HEADER_MASK > HEADER_BYTES_MAX:
            raise ProtocolError(
                f"A header has {mark & HEADER_MASK} bytes, the limit is {HEADER_BYTES_MAX}."
            )
        if mark > HEADER_PLAIN_BYTES and mark >> 24 == JSON:
            check_header(data[start + 4 : start + 4 + mark])
        return decode(data, start, end)

    def _checked(self, command: Command, peer: Peer) -> Outcome:
        """What `before` says to a request; None lets it pass."""
        assert self._before is not None
        outcome = self._before(command, peer)
        if outcome is None:
            peer.is_trusted = True
        elif not peer.is_trusted:
            peer.count_refusal()
        return outcome

    def _unhandled(self, command: Command, peer: Peer) -> bytes | None:
        """An answer to a request of ours, or a code without a handler."""
        if command.is_response:
            peer.answered(command)
            return None
        if self._is_new(command.code, "unsupported"):
            log.warning("request code %d from %s is not supported", command.code, peer.remote)
        return encode_answer(
            command,
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
            remark=f" request type {command.code} not supported",
        )

    def _failure(self, error: Exception, command: Command) -> bytes:
        """An exception as an answer: a code and a sentence, never a traceback."""
        code, kind = int(ResponseCode.SYSTEM_ERROR), type(error).__name__
        if isinstance(error, RequestError):
            code, remark = error.code, error.remark
        elif isinstance(error, SluiceError):
            remark = str(error)
            if isinstance(error, StoreFullError):
                code = ResponseCode.SERVICE_NOT_AVAILABLE
            if self._is_new(command.code, kind):
                log.warning("request code %d failed: %s", command.code, remark)
        else:
            remark = f"{kind}: {error}"
            if self._is_new(command.code, kind):
                log.error("request code %d failed", command.code, exc_info=error)
        return b"" if command.flag & FLAG_ONEWAY else encode_answer(command, code, remark=remark)

    def _is_new(self, code: int, kind: str) -> bool:
        key = (code, kind)
        if key in self._logged or len(self._logged) >= LOGGED_MAX:
            return False
        self._logged.add(key)
        return True


def finish_answer(answer: Command, request: Command) -> bytes:
    """Encode `answer` as the answer to `request`: its opaque, the response flag, JSON."""
    answer.opaque = request.opaque
    answer.flag |= FLAG_RESPONSE
    answer.language = SERVER_LANGUAGE
    answer.serialization = JSON
    return encode(answer)
