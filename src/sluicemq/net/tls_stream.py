"""TLS on the port of plain connections: the first byte of a connection decides.

    socket -> FirstByte -> Connection                    plain: FirstByte has left after one byte
                        -> TlsStream -> Connection       0x16: bytes through OpenSSL in memory

`TlsStream` is a protocol to the socket's transport and a transport to the connection. OpenSSL works
on buffers in memory (`ssl.SSLObject`), so that the bytes that were read already are simply its
first input; asyncio's and uvloop's own upgrade of a transport would have lost them. A plain
connection pays one comparison in its life and holds no object of this module.

Handshakes cost a signature each, on the loop that serves everybody. `TlsAcceptor` bounds them: so
many a turn of the loop, so many unfinished ones, in all and of one address, and so many seconds for
each.
"""

import asyncio
import contextlib
import logging
import ssl
from typing import Final

from sluicemq.errors import ConfigurationError
from sluicemq.net.limits import AddressLimit
from sluicemq.net.peer import Peer
from sluicemq.net.tls import ServerTls
from sluicemq.net.tls_contexts import Watched, self_signed_context, server_contexts
from sluicemq.wire.frames import TLS_HELLO

log = logging.getLogger("sluicemq.tls")

HANDSHAKES_A_TURN: Final = 2
"""An RSA key of 2048 bits signs for 0.7 ms, one of 4096 bits for 4 ms."""
HELLO_BYTES_MAX: Final = 128 * 1024
"""What a client may send before it is through; chains of certificates are a few kB."""
READ_BYTES: Final = 256 * 1024
LOOK_S: Final = 1.0
FATAL: Final = (ssl.SSLError, ConnectionError)


class Inner(asyncio.Protocol):
    """The connection that lies in the stream: see `net.server.Connection`."""

    __slots__ = ()
    peer: Peer

    def carry(self, carrier: "TlsStream") -> None:
        """Bytes go through `carrier` from now on."""
        raise NotImplementedError

    def refuse(self, text: str) -> None:
        """Say why, and close."""
        raise NotImplementedError


class FirstByte(asyncio.Protocol):
    """Stands before a connection until its first byte is there."""

    __slots__ = ("_acceptor", "_inner", "_transport")

    def __init__(self, inner: Inner, acceptor: "TlsAcceptor") -> None:
        self._inner = inner
        self._acceptor = acceptor
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if data[0] == TLS_HELLO:
            self._acceptor.upgrade(self._inner, self._transport, data)
        elif self._acceptor.is_enforcing:
            self._inner.refuse(
                "it speaks plainly, and tls.server.mode is enforcing. Turn TLS on in the client."
            )
        else:
            self._transport.set_protocol(self._inner)
            self._inner.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)


class TlsStream(asyncio.Protocol):
    """One accepted TLS connection, between its socket and its `Connection`."""

    __slots__ = (
        "_acceptor", "_hello_bytes", "_incoming", "_inner", "_outgoing", "_timer", "_tls",
        "_transport", "is_open",
    )  # fmt: skip

    def __init__(self, inner: Inner, transport: asyncio.Transport, acceptor: "TlsAcceptor") -> None:
        self._inner = inner
        self._transport = transport
        self._acceptor = acceptor
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._hello_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_open = False

    # ------------------------------------------------------------------- what the socket tells

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self.is_open:
            self._read()
            return
        self._hello_bytes += len(data)
        if self._hello_bytes > HELLO_BYTES_MAX:
            self.fail(f"its TLS handshake is longer than {HELLO_BYTES_MAX} bytes")
        elif self._tls is not None:
            self._acceptor.wish(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    # ------------------------------------------------------------------------------- handshake

    def wait(self, timeout_s: float) -> None:
        """It has so many seconds from now on."""

        def expire() -> None:
            self._timer = None
            self.fail(f"its TLS handshake was not finished within {timeout_s:g} s")
            self._transport.abort()

        self._timer = asyncio.get_running_loop().call_later(timeout_s, expire)

    def begin(self, context: ssl.SSLContext) -> None:
        """The certificate is there: shake hands with what came in so far."""
        if not self._inner.peer.closed:
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._acceptor.wish(self)

    def step(self) -> None:
        """One step of the handshake, when the loop has a turn for it."""
        if self._tls is None or self.is_open or self._inner.peer.closed:
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except FATAL as error:
            self._flush()  # the alert, so that the client learns it too
            self.fail(f"its TLS handshake failed: {_why(error)}")
        else:
            self.is_open = True
            self._leave()
            self._flush()
            self._read()

    def fail(self, text: str) -> None:
        """Say why, and close."""
        self._acceptor.failures += 1
        self._leave()
        self._inner.refuse(text)

    def _leave(self) -> None:
        """The handshake is over, whatever its end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._acceptor.left(self)

    # ------------------------------------------------------------------------------------ bytes

    def _read(self) -> None:
        """Hands on what can be decrypted, as one piece."""
        tls = self._tls
        assert tls is not None
        parts = []
        is_end = False
        try:
            while self._incoming.pending or tls.pending():
                part = tls.read(READ_BYTES)
                if not part:
                    is_end = True
                    break
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except FATAL as error:
            self._inner.refuse(f"its TLS stream is broken: {_why(error)}")
            return
        if self._outgoing.pending:  # an answer to a change of keys
            self._flush()
        if parts:
            self._inner.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if is_end:
            self._inner.peer.close()

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    # ------------------------------------------------------------- what the connection asks for

    def write(self, data: bytes) -> None:
        """Encrypt and send."""
        tls = self._tls
        if tls is None or not self.is_open:
            return
        try:
            done = tls.write(data)
            while done < len(data):
                done += tls.write(memoryview(data)[done:])
        except ssl.SSLError as error:
            self._inner.refuse(f"its TLS stream is broken: {_why(error)}")
            return
        self._transport.write(self._outgoing.read())

    def close(self) -> None:
        """Close when what was written has left."""
        if self._tls is not None and self.is_open:
            with contextlib.suppress(ssl.SSLError):  # nobody waits for the client's farewell
                self._tls.unwrap()
            self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()


def _why(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the client is refused: {error.verify_message}"
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else str(error) or "closed"


class TlsAcceptor:
    """What the TLS connections of one server share: certificate, limits, counts."""

    def __init__(self, settings: ServerTls) -> None:
        self.settings = settings
        self.is_enforcing = settings.mode == "enforcing"
        self.finished = 0
        self.failures = 0
        self._watched: Watched | None = None
        self._made: ssl.SSLContext | None = None
        self._cannot: str = ""
        self._making: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._look_timer: asyncio.TimerHandle | None = None
        self._unfinished: dict[TlsStream, str] = {}
        self._addresses = AddressLimit(settings.handshakes_per_address_max)
        self._wishes: dict[TlsStream, None] = {}
        self._has_turn = False

    def open(self) -> None:
        """Read the certificate, follow its files. Raises ConfigurationError."""
        self.close()
        self._loop = asyncio.get_running_loop()
        self._watched = server_contexts(self.settings)
        if self._watched is not None:
            self._look_timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Follow the files no more."""
        if self._making is not None:
            self._making.cancel()
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None

    @property
    def unfinished(self) -> int:
        """Handshakes on their way."""
        return len(self._unfinished)

    def upgrade(self, inner: Inner, transport: asyncio.Transport, data: bytes) -> None:
        """The first bytes of a connection are a TLS handshake."""
        settings, address = self.settings, inner.peer.remote.address
        if len(self._unfinished) >= settings.handshakes_max:
            self.failures += 1
            inner.refuse(f"{settings.handshakes_max} TLS handshakes are unfinished, the limit")
            return
        if not self._addresses.enter(address):
            self.failures += 1
            inner.refuse(
                f"{self._addresses.max} TLS handshakes of its address are unfinished, the limit"
            )
            return
        stream = TlsStream(inner, transport, self)
        self._unfinished[stream] = address
        inner.carry(stream)
        transport.set_protocol(stream)
        stream.wait(settings.handshake_timeout_s)
        stream.data_received(data)
        self._begin(stream)

    def _begin(self, stream: TlsStream) -> None:
        context = self._made if self._watched is None else self._watched.context
        if context is not None:
            stream.begin(context)
        elif self._cannot or not self.settings.test_mode:
            stream.fail(
                self._cannot
                or "it speaks TLS, and there is no certificate. Set tls.server.certPath and "
                "tls.server.keyPath, or turn TLS off in the client."
            )
        elif self._making is None:
            self._making = self._loop.create_task(self._make())

    async def _make(self) -> None:
        """A certificate for test mode, for those who wait."""
        try:
            self._made = await asyncio.to_thread(self_signed_context)
        except ConfigurationError as error:
            self._cannot = str(error)
            log.error("%s", error)
        else:
            log.warning(
                "UNSAFE: TLS with a certificate made just now (tls.test.mode.enable): clients "
                "cannot verify it, anybody may stand in between. Set tls.server.certPath and "
                "tls.server.keyPath."
            )
        for stream in tuple(self._unfinished):
            self._begin(stream)

    def left(self, stream: TlsStream) -> None:
        """A handshake is over; a second time nothing happens."""
        address = self._unfinished.pop(stream, None)
        if address is None:
            return
        self.finished += stream.is_open
        self._wishes.pop(stream, None)
        self._addresses.leave(address)

    def wish(self, stream: TlsStream) -> None:
        """It has bytes for a step of its handshake."""
        self._wishes[stream] = None
        if not self._has_turn:
            self._has_turn = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        for stream in tuple(self._wishes)[:HANDSHAKES_A_TURN]:
            self._wishes.pop(stream, None)
            stream.step()
        self._has_turn = bool(self._wishes)
        if self._has_turn:
            self._loop.call_soon(self._turn)

    def _look(self) -> None:
        if self._watched is not None:
            self._watched.look()
        self._look_timer = self._loop.call_later(LOOK_S, self._look)
