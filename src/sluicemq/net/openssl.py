"""All that touches OpenSSL: certificates in force, and TLS on the port of plain connections.

Contexts are made from files and made again when these change. A context is never changed, it is
replaced: connections that live keep theirs, new ones get the new one. Files count as changed when
they have been different and at rest for one look: certificate and key are two files, and whoever
replaces them writes one after the other. What cannot be read leaves the old context in force and
says why, once for each state of the files.

Errors of OpenSSL are codes of other people's problems; `tls_failed` turns those of a handshake into
a sentence with its cure.

The first byte of a connection decides whether it is TLS:

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
import functools
import logging
import ssl
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sluicemq.config.keys import TlsConfig
from sluicemq.errors import ConfigurationError, ConnectionLostError
from sluicemq.net.dispatch import Peer
from sluicemq.net.limits import AddressLimit
from sluicemq.net.selfsigned import self_signed
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import TLS_HELLO

log = logging.getLogger("sluicemq.tls")

CONTEXTS_MAX: Final = 64
_AUTH: Final = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "require": ssl.CERT_REQUIRED,
}
Signature = tuple[tuple[int, int, int] | None, ...]


class Watched:
    """A context that follows its files."""

    def __init__(
        self, make: Callable[[], ssl.SSLContext], files: tuple[str, ...], what: str
    ) -> None:
        """Raises ConfigurationError when it cannot be made."""
        self._make = make
        self._files = files
        self._what = what
        self._loaded = self._seen = signature(files)
        self.context = make()
        self.loads = 1

    def look(self, *, at_once: bool = False) -> ssl.SSLContext:
        """The context for the next connection; a few microseconds unless the files changed."""
        found = signature(self._files)
        settled = at_once or found == self._seen
        self._seen = found
        if found != self._loaded and settled:
            self._loaded = found
            try:
                self.context = self._make()
            except ConfigurationError as error:
                log.error("%s: the old ones stay in force: %s", self._what, error)
            else:
                self.loads += 1
                log.info("%s: %s read again", self._what, ", ".join(self._files))
        return self.context


def signature(files: tuple[str, ...]) -> Signature:
    """What differs when a file was written or replaced; None: it is not there."""
    return tuple(_one(name) for name in files)


def _one(name: str) -> tuple[int, int, int] | None:
    try:
        found = Path(name).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


# ---------------------------------------------------------------------------------- clients


def client_context(tls: Tls) -> ssl.SSLContext:
    """The context for the next connection of a client. Raises ConfigurationError."""
    return _watched_client(tls).look(at_once=True)


@functools.lru_cache(CONTEXTS_MAX)
def _watched_client(tls: Tls) -> Watched:
    def made() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = tls.verify is True
        context.verify_mode = ssl.CERT_REQUIRED if tls.verify else ssl.CERT_NONE
        if tls.ca is not None:
            _load_ca(context, str(tls.ca), "ca")
        elif tls.verify:
            context.load_default_certs()
        if tls.certificate is not None:
            key = None if tls.key is None else str(tls.key)
            _load_chain(context, str(tls.certificate), key, tls.key_password or "", "certificate")
        return context

    return Watched(made, tls.files, "TLS of the client")


# ---------------------------------------------------------------------------------- servers


def server_contexts(config: TlsConfig, protocols: Sequence[str] = ()) -> Watched | None:
    """The contexts of a server; None when it has no certificate and, in test mode, makes one when
    somebody asks. `protocols` are spoken inside, for clients that ask (ALPN). Raises
    ConfigurationError for files that cannot be used, and for settings that promise more than they
    hold."""
    if config.tls_client_auth != "none" and not config.tls_ca:
        raise ConfigurationError(
            f"tls.server.need.client.auth = {config.tls_client_auth} without "
            "tls.server.trustCertPath: no client could be verified.",
            fix="Set tls.server.trustCertPath to the certificates of the authority that signs "
            "those of clients.",
        )
    if not (config.tls_certificate or config.tls_test_mode or config.tls_mode == "permissive"):
        raise ConfigurationError(
            f"tls.server.mode = {config.tls_mode} without a certificate.",
            fix="Set tls.server.certPath and tls.server.keyPath.",
        )

    def made() -> ssl.SSLContext:
        context = _server_context(protocols)
        key, password = config.tls_key or None, config.tls_key_password
        _load_chain(context, config.tls_certificate, key, password, "tls.server.certPath")
        if config.tls_client_auth != "none":
            _load_ca(context, config.tls_ca, "tls.server.trustCertPath")
            context.verify_mode = _AUTH[config.tls_client_auth]
        return context

    if not config.tls_certificate:
        return None
    ca = config.tls_ca if config.tls_client_auth != "none" else ""
    files = tuple(name for name in (config.tls_certificate, config.tls_key, ca) if name)
    return Watched(made, files, "TLS of the server")


def _server_context(protocols: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if protocols:
        context.set_alpn_protocols([*protocols])
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # a client must not make us sign again and again
    return context


def self_signed_context(protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """A context with a certificate that is made now. OpenSSL reads files alone: it is in one for as
    long as that takes, below a directory of this user. Blocks for some ten milliseconds. Raises
    ConfigurationError."""
    try:
        with tempfile.TemporaryDirectory(prefix="sluice-tls-") as directory:
            path = Path(directory, "server.pem")
            path.write_text(self_signed())
            context = _server_context(protocols)
            _load_chain(context, str(path), None, "", "test mode")
    except OSError as error:
        raise ConfigurationError(
            f"a certificate for TLS in test mode cannot be made: {error}.",
            fix="Name a directory that can be written with TMPDIR, or set tls.server.certPath and "
            "tls.server.keyPath.",
        ) from error
    return context


# ------------------------------------------------------------------------------------ files


def _load_chain(
    context: ssl.SSLContext, certificate: str, key: str | None, password: str, name: str
) -> None:
    # Without a function OpenSSL would ask for the password on the terminal.
    where = f"{certificate} and {key}" if key else certificate
    try:
        context.load_cert_chain(certificate, key, password=lambda: password)
    except FileNotFoundError:
        missing = certificate if _one(certificate) is None else key
        raise ConfigurationError(
            f"{name}: the file {missing} is not there.", fix="Correct the path."
        ) from None
    except OSError as error:
        text = str(error)
        fix = "Is it a PEM file with a certificate and its private key?"
        if isinstance(error, PermissionError):
            fix = "Give this user the right to read it."
        elif "KEY_VALUES_MISMATCH" in text:
            fix = "The key belongs to another certificate: replace both."
        elif "DECRYPT" in text.upper() or "password" in text.lower() or "[SSL] PEM lib" in text:
            fix = f"{fix[:-1]}, and the password of the key right?"
        raise ConfigurationError(
            f"{name}: {where} cannot be used: {_reason(error)}.", fix=fix
        ) from None


def _load_ca(context: ssl.SSLContext, path: str, name: str) -> None:
    try:
        context.load_verify_locations(path)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{name}: the file {path} is not there.", fix="Correct the path."
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{name}: {path} cannot be used: {_reason(error)}.",
            fix="Name a PEM file with the certificates of authorities.",
        ) from None


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error.strerror or error).lower().replace("_", " ")


# ----------------------------------------------------------------------------------- errors

_CHAIN_FIXES: Final = {
    9: "The certificate is not valid yet: compare the clocks.",
    10: "It has expired: the server needs a new one.",
    18: "It is self-signed (test mode?): name it as ca, or trust nobody in particular with "
    "verify=False.",
    62: 'Dial a name that is in the certificate, or give one as server_name, or verify="ca".',
    64: 'The certificate names no such address: give server_name, or verify="ca".',
}
_WRONG_CA: Final = "Give the certificate of the authority that signed it as ca."


def tls_failed(address: str, error: BaseException) -> ConnectionLostError:
    """What a handshake that failed says, with its cure."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectionLostError(
            f"The certificate of {address} is refused: {error.verify_message}.",
            fix=_CHAIN_FIXES.get(error.verify_code, _WRONG_CA),
        )
    text = str(error)
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return ConnectionLostError(
            f"{address} does not speak TLS.", fix="Dial its TLS port, or without tls."
        )
    if "CERTIFICATE_REQUIRED" in text or "HANDSHAKE_FAILURE" in text:
        return ConnectionLostError(
            f"{address} refuses the handshake: {_alert(error)}.",
            fix="Does it want a certificate of the client? Give certificate and key.",
        )
    if "ALERT" in text:
        return ConnectionLostError(
            f"{address} refuses the handshake: {_alert(error)}.",
            fix="Does it trust the authority of the client's certificate?",
        )
    return ConnectionLostError(
        f"{address} closed during the TLS handshake{f': {text}' if text else ''}.",
        fix="Does it serve TLS (tls.server.mode permissive or enforcing, with a certificate)?",
    )


def _alert(error: BaseException) -> str:
    return str(getattr(error, "reason", None) or error).lower().replace("_", " ")


def is_tls_error(error: BaseException | None) -> bool:
    """Whether OpenSSL said it."""
    return isinstance(error, ssl.SSLError)


# ------------------------------------------------------------------------------ accepted streams

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""As long as Netty, and so RocketMQ, waits."""
HANDSHAKES_MAX: Final = 512
HANDSHAKES_PER_ADDRESS_MAX: Final = 128
HANDSHAKES_A_TURN: Final = 2
"""An RSA key of 2048 bits signs for 0.7 ms, one of 4096 bits for 4 ms."""
HELLO_BYTES_MAX: Final = 128 * 1024
"""What a client may send before it is through; chains of certificates are a few kB."""
READ_BYTES: Final = 256 * 1024
LOOK_S: Final = 1.0
FATAL: Final = (ssl.SSLError, ConnectionError)


class Inner(asyncio.Protocol):
    """The connection that lies in the stream: see `net.accept.Accepted`."""

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

    def get_write_buffer_size(self) -> int:
        """Encrypted, as it waits for the socket."""
        return self._transport.get_write_buffer_size()

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

    def __init__(self, config: TlsConfig, protocols: Sequence[str] = ()) -> None:
        """`protocols`: what is spoken inside, for clients that ask (ALPN)."""
        self._protocols = protocols
        self.is_enforcing = config.tls_mode == "enforcing"
        self._config = config
        self.finished = 0
        self.failures = 0
        self._watched: Watched | None = None
        self._made: ssl.SSLContext | None = None
        self._cannot: str = ""
        self._making: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._look_timer: asyncio.TimerHandle | None = None
        self._unfinished: dict[TlsStream, str] = {}
        self._addresses = AddressLimit(HANDSHAKES_PER_ADDRESS_MAX)
        self._wishes: dict[TlsStream, None] = {}
        self._has_turn = False

    def open(self) -> None:
        """Read the certificate, follow its files. Raises ConfigurationError."""
        self.close()
        self._loop = asyncio.get_running_loop()
        self._watched = server_contexts(self._config, self._protocols)
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
        address = inner.peer.remote.address
        if len(self._unfinished) >= HANDSHAKES_MAX:
            self.failures += 1
            inner.refuse(f"{HANDSHAKES_MAX} TLS handshakes are unfinished, the limit")
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
        stream.wait(HANDSHAKE_TIMEOUT_S)
        stream.data_received(data)
        self._begin(stream)

    def _begin(self, stream: TlsStream) -> None:
        context = self._made if self._watched is None else self._watched.context
        if context is not None:
            stream.begin(context)
        elif self._cannot or not self._config.tls_test_mode:
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
            self._made = await asyncio.to_thread(self_signed_context, self._protocols)
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
