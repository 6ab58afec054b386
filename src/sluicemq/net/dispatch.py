"""Decode request frames, call their handlers, and encode the responses.

`Dispatcher.handle_frames(data, peer)` is the boundary between a transport and the requests: it
handles every whole frame in `data` and returns the number of bytes used and the encoded responses.
It creates no task and no future and awaits nothing, so the compiled engine can replace parts of it.

A handler is a function `(command, peer) -> outcome`. The outcome is one of:

    bytes     an encoded frame, which is sent now
    Command   a response, which is completed (opaque, response flag), encoded and sent now
    None      no response
    other     a value for `handle_outcome(outcome, command, peer)`, which responds later with
              `peer.write`

A request code may also have a fast handler `(header, body, peer) -> bool | bytes`. It is tried
first. Its `header` contains the JSON values of the frame without any check: a field may be missing
or of any type. A fast handler returns False for every request that is not of the common form, and
the request then takes the general path. Otherwise it returns the encoded response, or True if it
responds itself after the group commit. The compiled engine (`run_engine`) is tried before both: it
handles the frames at the start of a chunk that are of the common form.

An error affects only its own frame. An exception becomes a response with a code and a remark (a
one-way request gets none), and is logged once for each request code and exception type. Only bytes
that do not follow the protocol raise ProtocolError. The connection must then be closed; frames
before the bad one are answered first.
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
    HEADER_UNCHECKED_BYTES,
    NULL_SCHEDULER,
    REFUSALS_MAX,
    FairScheduler,
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
    FrameBuffer,
    build_command,
    check_frame_size,
    decode,
    encode,
    encode_response,
)

log = logging.getLogger(__name__)

UNKNOWN_HOST: Final = Host("0.0.0.0", 0)
"""The host of a connection whose address is unknown, for example of a Unix socket."""
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_TCP_CLOSED_STATES: Final = (7, 8)
"""TCP_CLOSE and TCP_CLOSE_WAIT of Linux, as the first byte of `struct tcp_info` contains them."""
_IPV4_MAPPED_PREFIX: Final = "::ffff:"


class Transport(Protocol):
    """The methods of asyncio's transports that every transport of a `Peer` or `Channel` has."""

    def write(self, data: bytes, /) -> None: ...

    def close(self) -> None: ...


def host_from_socket_name(name: Any) -> Host:
    """Convert `name`, a result of `getsockname()` or `getpeername()`, to a Host.

    An IPv4 address that is mapped into IPv6 becomes an IPv4 address, and a scope id is removed.
    Return UNKNOWN_HOST if `name` is not a tuple of address and port.
    """
    if not isinstance(name, tuple) or len(name) < 2:
        return UNKNOWN_HOST
    address = str(name[0]).partition("%")[0]
    return Host(address.removeprefix(_IPV4_MAPPED_PREFIX), int(name[1]))


class Peer:
    """The client at the other end of one accepted connection, as request handlers see it.

    Peers are used in the thread of the event loop, except `is_disconnected`.
    """

    __slots__ = (
        "_opaque",
        "_pending_requests",
        "_transport",
        "attributes",
        "can_rebalance",
        "closed",
        "idle_sweeps",
        "is_trusted",
        "local",
        "refusal_count",
        "remote",
        "remote_bytes",
    )

    def __init__(self, transport: Transport, remote: Host, local: Host) -> None:
        """Create the peer: the client at the other end of a connection.

        `transport` sends bytes to it. `remote` is the client's address, and `local` the address at
        which it reached the server. Raise ValueError if `remote` has no IP address.
        """
        self._transport = transport
        self._pending_requests: dict[int, Callable[[Command], None]] = {}
        self._opaque = 0
        # `remote_bytes` is the address as records contain it; the compiled engine reads it.
        self.set_remote(remote)
        self.local = local
        self.attributes: dict[str, Any] = {}
        """Values that request handlers keep for this connection, by names of their own."""
        self.closed = False
        self.can_rebalance = True
        """Whether the client distributes queues, and is told when members join or leave."""
        self.idle_sweeps = 0
        """The number of sweeps since a byte was sent or received (`net.accept`)."""
        self.is_trusted = False
        """Whether access control has allowed a request of this connection."""
        self.refusal_count = 0

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has closed the connection, even if bytes from it are still unread.

        On Linux the operating system is asked. Elsewhere only a close that the event loop has
        noticed counts. Any thread may read this property.
        """
        if self.closed:
            return True
        get_extra_info = getattr(self._transport, "get_extra_info", None)
        sock = None if get_extra_info is None else get_extra_info("socket")
        if sock is None or _TCP_INFO is None:
            return False
        try:
            return sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] in _TCP_CLOSED_STATES
        except OSError:
            return True

    def set_remote(self, remote: Host) -> None:
        """Use `remote` as the client's address from now on.

        A broker that forwards requests of a client calls this with the address of that client.
        Raise ValueError if `remote` has no IP address.
        """
        self.remote_bytes = encode_host(remote)
        self.remote = remote

    def set_transport(self, transport: Transport) -> None:
        """Send all further bytes through `transport`, for example a TLS stream."""
        self._transport = transport

    def write(self, frame: bytes) -> None:
        """Send one or several whole frames. Do nothing if the connection is closed."""
        if not self.closed and frame:
            self.idle_sweeps = 0
            self._transport.write(frame)

    def write_buffers(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send one frame that is split over several buffers, without copying them.

        The buffers must not change afterwards, because a socket transport keeps them. A transport
        without `writelines` receives them joined. Does nothing if the connection is closed.
        """
        write = getattr(self._transport, "writelines", None)
        if write is None:
            self.write(b"".join(buffers))
        elif not self.closed:
            self.idle_sweeps = 0
            write(buffers)

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that were written and not sent yet.

        Only for transports with `get_write_buffer_size`, such as those of `net.stream`.
        """
        return 0 if self.closed else int(self._transport.get_write_buffer_size())  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the connection after everything written before has been sent."""
        if not self.closed:
            self.closed = True
            self._transport.close()

    def count_refusal(self) -> None:
        """Count a request that access control refused; close the connection after REFUSALS_MAX."""
        self.refusal_count += 1
        if self.refusal_count > REFUSALS_MAX:
            self.close()

    def send_oneway(self, command: Command) -> None:
        """Send a one-way request to the client. Set its one-way flag, opaque and language."""
        command.flag |= FLAG_ONEWAY
        self.write(self._encode_request(command))

    def send_request(self, command: Command, on_response: Callable[[Command], None]) -> int:
        """Send a request to the client, and return its opaque (request number), without waiting.

        `on_response` is called with the client's response. It is never called if the client does
        not respond, or after `forget_request(opaque)`.
        """
        frame = self._encode_request(command)
        self._pending_requests[command.opaque] = on_response
        self.write(frame)
        return command.opaque

    def forget_request(self, opaque: int) -> None:
        """Drop the response to the request with this opaque, if it arrives later."""
        self._pending_requests.pop(opaque, None)

    def _encode_request(self, command: Command) -> bytes:
        """Encode a request to the client as a frame. Set its opaque (number) and language."""
        # Server and client number their requests independently (spec/remoting.md §4).
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        command.opaque = self._opaque
        command.language = SERVER_LANGUAGE
        return encode(command)

    def handle_response(self, command: Command) -> None:
        """Pass a response of the client to the callback of its request, or drop it without one."""
        on_response = self._pending_requests.pop(command.opaque, None)
        if on_response is not None:
            on_response(command)

    def connection_lost(self) -> None:
        """Mark the connection as closed, and drop the callbacks of requests to the client."""
        self.closed = True
        self._pending_requests.clear()

    def __repr__(self) -> str:
        return f"<peer {self.remote}{' closed' if self.closed else ''}>"


# --------------------------------------------------------------------------------------- requests

Outcome = Any
"""What a handler returns: bytes, a Command, None, or a value for the dispatcher's handler."""

Handler = Callable[[Command, Peer], Outcome]
OutcomeHandler = Callable[[Any, Command, Peer], None]
"""Deals with an outcome that is not a response, and responds to the request later."""

Authorize = Callable[[Command, Peer], Outcome]
"""Return None if the request is allowed, else the outcome with which it is refused."""

FastHandler = Callable[[dict[str, Any], bytes, Peer], bool | bytes]
"""Return False to use the general path, else the response, or True if the response comes later."""

RunEngine = Callable[[bytes, int, Peer, FairScheduler], int]
"""Handle the frames at `data[position:]` that the engine knows; return where the first other one
begins."""

_loads: Final = orjson.loads
_PREFIX: Final = struct.Struct(">II")
LOGGED_MAX: Final = 256
"""Failures that are logged, so that a client with invented request codes cannot fill the disk."""


class Dispatcher:
    """Calls the handler of each request by its request code.

    `handlers`, `fast_handlers` and `run_engine` may be replaced while the server runs.
    """

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        *,
        fast_handlers: Mapping[int, FastHandler] | None = None,
        handle_outcome: OutcomeHandler | None = None,
        authorize: Authorize | None = None,
        authorize_fast: FastHandler | None = None,
        codes_with_messages: Collection[int] | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        scheduler: FairScheduler | None = None,
        run_engine: RunEngine | None = None,
    ) -> None:
        """Create a dispatcher, which passes each request to the handler of its code.

        `handlers` and `fast_handlers` are the handlers by request code; a fast handler is tried
        first. `handle_outcome` receives results of handlers that are not bytes, a Command or None.

        `authorize` is called before each handler. `authorize_fast` does the same before each fast
        handler; if it returns False, the request goes to `authorize` and the ordinary handler. If
        there is an `authorize` but no `authorize_fast`, the fast handlers are not used.

        `frame_bytes_max` limits the bytes of a frame without its leading length. Only requests in
        `codes_with_messages` may have a body as large as a frame; None means all requests.

        `scheduler` shares the time of the event loop between connections; None means that no
        connection waits. `run_engine` is the entry point of the compiled engine.
        """
        self.handlers: dict[int, Handler] = {
            int(code): handler for code, handler in handlers.items()
        }
        must_authorize_all = authorize is not None and authorize_fast is None
        self.fast_handlers: dict[int, FastHandler] = {}
        if fast_handlers is not None and not must_authorize_all:
            self.fast_handlers.update(fast_handlers)
        self.frame_bytes_max = frame_bytes_max
        self.scheduler = scheduler or NULL_SCHEDULER
        self.run_engine = run_engine
        self._handle_outcome = handle_outcome
        self._authorize = authorize
        self._authorize_fast = authorize_fast
        self._codes_with_messages = codes_with_messages
        self._logged: set[tuple[int, str]] = set()

    @property
    def is_guarded(self) -> bool:
        """Whether access control decides about requests."""
        return self._authorize is not None

    # Called for every chunk of every connection: keep it cheap.
    def handle_frames(
        self,
        data: bytes,
        peer: Peer,
        scheduler: FairScheduler = NULL_SCHEDULER,
        *,
        skip_engine: bool = False,
    ) -> tuple[int, bytes]:
        """Handle every whole frame in `data`. Return the bytes used and the encoded responses.

        Fewer bytes are used than there are whole frames in two cases: `scheduler` makes the next
        request wait, or a frame after the first one is bad. Raise ProtocolError if the first frame
        is bad. So a later bad frame raises when the rest of `data` is passed again.

        `skip_engine` says that the compiled engine has already declined the first frame.
        """
        find_fast_handler = self.fast_handlers.get
        authorize_fast = self._authorize_fast
        run_engine = None if skip_engine else self.run_engine
        frame_bytes_max = self.frame_bytes_max
        unpack = _PREFIX.unpack_from
        responses: list[bytes] = []
        last_s = scheduler.now_s()
        position = 0 if run_engine is None else run_engine(data, 0, peer, scheduler)
        data_bytes = len(data)
        while data_bytes - position >= 8:
            # The frame is: total length, then serialization type (1 byte) and header length (3
            # bytes), header, body. The type of JSON is 0.
            frame_bytes, header_mark = unpack(data, position)
            end = position + 4 + frame_bytes
            header_end = position + 8 + (header_mark & HEADER_MASK)
            if end > data_bytes and frame_bytes <= frame_bytes_max:
                break  # the frame is not whole
            is_unusual = (
                header_end > end
                or frame_bytes > frame_bytes_max
                or header_mark > HEADER_UNCHECKED_BYTES
            )
            header_fields = None
            header = data[position + 8 : header_end]
            body = data[header_end:end]
            try:
                if not is_unusual:
                    # The fast path: a handler that takes the decoded header as it is.
                    fast_handler = None
                    try:
                        header_fields = _loads(header)
                        fast_handler = find_fast_handler(header_fields["code"])
                        if (
                            fast_handler is not None
                            and (
                                authorize_fast is None or authorize_fast(header_fields, body, peer)
                            )
                            and (response := fast_handler(header_fields, body, peer))
                        ):
                            # True means that the response comes later.
                            responses += () if response is True else (response,)
                            position = end
                            continue
                    except Exception as error:  # noqa: BLE001 - it becomes the response
                        if fast_handler is not None:
                            failed = build_command(header_fields, header, body)
                            responses.append(self._encode_failure(error, failed))
                            position = end
                            continue
                        header_fields = None  # the header is not a JSON object with a code

                # The general path.
                if scheduler.is_tight and scheduler.has_to_wait(peer):
                    scheduler.spent(peer, last_s)  # decoding the header has taken time too
                    break
                command = (
                    self._decode_unusual_frame(data, position + 4, end, header_mark)
                    if is_unusual
                    else build_command(header_fields, header, body)
                )
            except ProtocolError:
                scheduler.spent(peer, last_s)
                if position == 0:
                    raise
                break
            position = end
            responses.append(self._handle_request(command, peer))
            last_s = scheduler.spent(peer, last_s, command.code)
        return position, responses[0] if len(responses) == 1 else b"".join(responses)

    # Called for each send over gRPC: keep it cheap.
    def handle_command(self, command: Command, peer: Peer) -> bytes:
        """Handle a request that did not arrive as a frame and is authorized already.

        Return the encoded response. Return b"" if there is none, or if a handler writes it to
        `peer` later.
        """
        fast_handler = self.fast_handlers.get(command.code)
        if fast_handler is not None:
            header = {
                "code": command.code,
                "flag": command.flag,
                "opaque": command.opaque,
                "extFields": command.fields,
            }
            try:
                response = fast_handler(header, command.body, peer)  # type: ignore[arg-type]
                if response:
                    # True means that the response comes later.
                    return b"" if response is True else response
            except Exception as error:  # noqa: BLE001 - it becomes the response
                return self._encode_failure(error, command)
        return self._handle_request(command, peer, is_authorized=True)

    def handle_data(self, frame_buffer: FrameBuffer, peer: Peer, data: bytes) -> None:
        """Handle bytes of a connection that the scheduler never makes wait. Write the responses.

        `frame_buffer` keeps the bytes of the frame that is not complete yet. A bad frame closes the
        connection.
        """
        if peer.closed:
            return
        frames = frame_buffer.join(data)
        try:
            while frames:
                used_bytes, responses = self.handle_frames(frames, peer)
                peer.write(responses)
                if used_bytes == len(frames):
                    return
                frames = frame_buffer.keep_rest(frames[used_bytes:] if used_bytes else frames)
        except ProtocolError:
            peer.close()

    def _handle_request(
        self, command: Command, peer: Peer, *, is_authorized: bool = False
    ) -> bytes:
        """Handle a request with its ordinary handler. Return the encoded response, b"" if none.

        The request is authorized first unless `is_authorized`. An exception becomes a response too.
        """
        try:
            outcome: Outcome
            handler = self.handlers.get(command.code)
            if command.flag & FLAG_RESPONSE or handler is None:
                outcome = self._handle_other(command, peer)
            else:
                check_request(command, self._codes_with_messages)
                outcome = None
                if not is_authorized and self._authorize is not None:
                    outcome = self._check_access(command, peer)
                if outcome is None:
                    outcome = handler(command, peer)

            # Bytes are an encoded response already.
            if outcome.__class__ is not bytes and outcome is not None:
                if isinstance(outcome, Command):
                    outcome = encode_response_to(outcome, command)
                elif self._handle_outcome is not None:
                    outcome = self._handle_outcome(outcome, command, peer)
                else:
                    outcome_type = type(outcome).__name__
                    raise TypeError(  # noqa: TRY301 - logged and reported below
                        f"unsupported handler result: {outcome_type}"
                    )
        except Exception as error:  # noqa: BLE001 - it becomes the response
            return self._encode_failure(error, command)
        return b"" if outcome is None or command.flag & FLAG_ONEWAY else outcome

    def _decode_unusual_frame(self, data: bytes, start: int, end: int, header_mark: int) -> Command:
        """Decode the frame `data[start:end]`, which may have wrong lengths or a large header.

        `header_mark` has the encoding of the header in its first byte, and the length in the other
        three. Raise ProtocolError if a length is impossible or above its limit, or if the header
        would take too long to decode.
        """
        check_frame_size(end - start, self.frame_bytes_max)
        header_bytes = header_mark & HEADER_MASK
        if header_bytes > HEADER_BYTES_MAX:
            raise ProtocolError(
                f"A header has {header_bytes} bytes, the limit is {HEADER_BYTES_MAX}."
            )
        if header_mark > HEADER_UNCHECKED_BYTES and header_mark >> 24 == JSON:
            check_header(data[start + 4 : start + 4 + header_mark])
        return decode(data, start, end)

    def _check_access(self, command: Command, peer: Peer) -> Outcome:
        """Return None if the request is allowed, else the result that refuses it.

        The first allowed request makes the peer trusted. Before that, refusals are counted.
        """
        assert self._authorize is not None
        outcome = self._authorize(command, peer)
        if outcome is None:
            peer.is_trusted = True
        elif not peer.is_trusted:
            peer.count_refusal()
        return outcome

    def _handle_other(self, command: Command, peer: Peer) -> bytes | None:
        """Handle a response of the client, or refuse a request whose code has no handler.

        Return the encoded refusal; None for a response.
        """
        if command.is_response:
            peer.handle_response(command)
            return None
        if self._note_if_new(command.code, "unsupported"):
            log.warning("request code %d from %s is not supported", command.code, peer.remote)
        return encode_response(
            command,
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
            remark=f" request type {command.code} not supported",
        )

    def _encode_failure(self, error: Exception, command: Command) -> bytes:
        """Return the response that reports `error` to the client: a code and a one-line remark.

        Return b"" for a one-way request. The first error of each type and request code is logged,
        except a RequestError, which is expected.
        """
        code = int(ResponseCode.SYSTEM_ERROR)
        error_type = type(error).__name__
        if isinstance(error, RequestError):
            code = error.code
            remark = error.remark
        elif isinstance(error, SluiceError):
            remark = str(error)
            if isinstance(error, StoreFullError):
                code = ResponseCode.SERVICE_NOT_AVAILABLE
            if self._note_if_new(command.code, error_type):
                log.warning("request code %d failed: %s", command.code, remark)
        else:
            remark = f"{error_type}: {error}"
            if self._note_if_new(command.code, error_type):
                log.error("request code %d failed", command.code, exc_info=error)
        if command.flag & FLAG_ONEWAY:
            return b""
        return encode_response(command, code, remark=remark)

    def _note_if_new(self, code: int, failure: str) -> bool:
        """Note a failure of a request code. Return whether it is new, so that it must be logged.

        `failure` is the type of the error, or another name of the failure. After LOGGED_MAX kinds,
        nothing is new.
        """
        noted = (code, failure)
        if noted in self._logged or len(self._logged) >= LOGGED_MAX:
            return False
        self._logged.add(noted)
        return True


def encode_response_to(response: Command, request: Command) -> bytes:
    """Encode `response` as the response to `request`, in JSON.

    Sets the opaque (request number), the response flag, the language and the encoding of
    `response`.
    """
    response.opaque = request.opaque
    response.flag |= FLAG_RESPONSE
    response.language = SERVER_LANGUAGE
    response.serialization = JSON
    return encode(response)
