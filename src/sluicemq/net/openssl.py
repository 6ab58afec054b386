"""All code that uses OpenSSL: certificates that are reloaded, and TLS on the port of plain clients.

Certificates. A `ReloadingContext` makes an SSL context from files, and makes a new one when they
change. A context is never changed: open connections keep theirs, and new ones get the new context.
Certificate and key are two files, and they are replaced one after the other. So files count as
changed only when they differ from those that were loaded and were the same at the last two checks.
If the new files cannot be used, the old context stays in use, and the reason is logged once for
each state of the files.

TLS on a plain port. The first byte of a connection decides whether it uses TLS:

    socket -> TlsDetector -> connection                  plain: the detector leaves after one byte
                          -> TlsStream -> connection     0x16: bytes pass through OpenSSL in memory

`TlsStream` is a protocol to the socket's transport, and a transport to the connection. OpenSSL
works on buffers in memory (`ssl.SSLObject`), so the bytes that were read already are simply its
first input. (The functions of asyncio and uvloop that upgrade a transport would have lost them.)
A plain connection costs one comparison and holds no object of this module.

Each handshake costs a signature, which is computed in the event loop. `TlsAcceptor` limits
handshakes: their number in one iteration of the loop, the number of open ones in all and of one
address, and the time of each.
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
from sluicemq.net.selfsigned import make_self_signed_pem
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import TLS_HELLO

log = logging.getLogger("sluicemq.tls")

CONTEXTS_MAX: Final = 64
_VERIFY_MODES: Final = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "require": ssl.CERT_REQUIRED,
}
FileState = tuple[int, int, int] | None
"""Modification time (ns), inode and size of a file; None if there is no such file."""


class ReloadingContext:
    """An SSL context that is replaced when the files that it was made from change."""

    def __init__(
        self, make_context: Callable[[], ssl.SSLContext], files: tuple[str, ...], name: str
    ) -> None:
        """Make the context now with `make_context`, which reads `files`.

        `name` appears in the log. Raises ConfigurationError if the files cannot be used.
        """
        self._make_context = make_context
        self._files = files
        self._name = name
        self._loaded_states = self._last_states = _read_states(files)
        self.context = make_context()
        self.loads = 1
        """How often the context was made."""

    def reload_if_changed(self, *, at_once: bool = False) -> ssl.SSLContext:
        """Return the context. If the files have changed, make it again first.

        A changed file may still be written. So unless `at_once`, a change counts only if the files
        have not changed since the previous check. If the files cannot be used, that is logged, and
        the old context stays. The check takes a few microseconds if nothing has changed.
        """
        states = _read_states(self._files)
        is_settled = at_once or states == self._last_states
        self._last_states = states
        if states != self._loaded_states and is_settled:
            self._loaded_states = states
            try:
                self.context = self._make_context()
            except ConfigurationError as error:
                log.error("%s: the previous files stay in use: %s", self._name, error)
            else:
                self.loads += 1
                log.info("%s: reloaded %s", self._name, ", ".join(self._files))
        return self.context


def _read_states(files: tuple[str, ...]) -> tuple[FileState, ...]:
    """Return a value that differs when one of the files was written, replaced or removed."""
    return tuple(_read_state(name) for name in files)


def _read_state(name: str) -> FileState:
    """Return a value that changes when a file is written or replaced; None if it is missing."""
    try:
        stat = Path(name).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


# ---------------------------------------------------------------------------------- clients


def client_context(tls: Tls) -> ssl.SSLContext:
    """Return the context for the next connection of a client.

    Contexts are cached for each value of `tls`, and replaced when their files have changed. Raise
    ConfigurationError if the files of `tls` cannot be used.
    """
    return _make_reloading_client_context(tls).reload_if_changed(at_once=True)


@functools.lru_cache(CONTEXTS_MAX)
def _make_reloading_client_context(tls: Tls) -> ReloadingContext:
    """Make the SSL context of clients with these settings. It is reloaded when its files change."""

    def make_context() -> ssl.SSLContext:
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

    return ReloadingContext(make_context, tls.files, "TLS of the client")


# ---------------------------------------------------------------------------------- servers


def load_server_context(
    config: TlsConfig, protocols: Sequence[str] = ()
) -> ReloadingContext | None:
    """Make the SSL context of a server. Return None if no certificate is configured.

    Without a certificate, connections with TLS are refused; in test mode they get a certificate
    that is made when the first one arrives. `protocols` are offered to clients by ALPN. Raise
    ConfigurationError if a file cannot be used, if clients must show a certificate but no authority
    is set to verify it, or if TLS is enforced without a certificate and without test mode.
    """
    _check_server_settings(config)

    def make_context() -> ssl.SSLContext:
        context = _new_server_context(protocols)
        key = config.tls_key or None
        password = config.tls_key_password
        _load_chain(context, config.tls_certificate, key, password, "tls.server.certPath")
        if config.tls_client_auth != "none":
            _load_ca(context, config.tls_ca, "tls.server.trustCertPath")
            context.verify_mode = _VERIFY_MODES[config.tls_client_auth]
        return context

    if not config.tls_certificate:
        return None
    files = [config.tls_certificate, config.tls_key]
    if config.tls_client_auth != "none":
        files.append(config.tls_ca)
    return ReloadingContext(make_context, tuple(filter(None, files)), "TLS of the server")


def _check_server_settings(config: TlsConfig) -> None:
    """Raise ConfigurationError if a setting requires a file that is not configured."""
    if config.tls_client_auth != "none" and not config.tls_ca:
        raise ConfigurationError(
            f"tls.server.need.client.auth is {config.tls_client_auth}, but without "
            "tls.server.trustCertPath no client can be verified.",
            fix="Set tls.server.trustCertPath to the certificates of the authority that signs the "
            "certificates of clients.",
        )
    if not (config.tls_certificate or config.tls_test_mode or config.tls_mode == "permissive"):
        raise ConfigurationError(
            f"tls.server.mode is {config.tls_mode}, but no certificate is set.",
            fix="Set tls.server.certPath and tls.server.keyPath.",
        )


def _new_server_context(protocols: Sequence[str]) -> ssl.SSLContext:
    """Make a server's SSL context without a certificate. It offers `protocols` by ALPN."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if protocols:
        context.set_alpn_protocols([*protocols])
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A renegotiation would make the server compute another signature.
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def self_signed_context(protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Make a server's SSL context with a new self-signed certificate, for test mode.

    `protocols` are offered to clients by ALPN. The call takes about 10 ms. Raise ConfigurationError
    if no temporary file can be written.
    """
    try:
        # OpenSSL reads certificates only from files. The file exists only until it is loaded, in a
        # directory that only this user can read.
        with tempfile.TemporaryDirectory(prefix="sluice-tls-") as directory:
            path = Path(directory, "server.pem")
            path.write_text(make_self_signed_pem())
            context = _new_server_context(protocols)
            _load_chain(context, str(path), None, "", "test mode")
    except OSError as error:
        raise ConfigurationError(
            f"Cannot make a certificate for TLS in test mode: {error}.",
            fix="Set TMPDIR to a writable directory, or set tls.server.certPath and "
            "tls.server.keyPath.",
        ) from error
    return context


# ------------------------------------------------------------------------------------ files


def _load_chain(
    context: ssl.SSLContext, certificate: str, key: str | None, password: str, name: str
) -> None:
    """Load the certificate chain and private key of this side into `context`.

    `key` None means that the key is in the file `certificate`. `name` is the name of the setting,
    for errors. Raise ConfigurationError if the files cannot be used.
    """
    try:
        # Without a function, OpenSSL would ask for the password on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: password)
    except FileNotFoundError:
        missing = certificate if _read_state(certificate) is None else key
        raise ConfigurationError(
            f"{name}: the file {_absolute(missing)} does not exist.", fix="Correct the path."
        ) from None
    except OSError as error:
        files = f"{certificate} and {key}" if key else certificate
        raise ConfigurationError(
            f"{name}: {files} cannot be used: {_find_reason(error)}.", fix=_find_chain_fix(error)
        ) from None


def _find_chain_fix(error: OSError) -> str:
    """Return what to do if a certificate or its private key cannot be loaded, as a sentence."""
    if isinstance(error, PermissionError):
        return "Give this user permission to read it."
    error_text = str(error)
    if "KEY_VALUES_MISMATCH" in error_text:
        return "The key belongs to another certificate: replace both."
    names_password = "DECRYPT" in error_text.upper() or "password" in error_text.lower()
    if names_password or "[SSL] PEM lib" in error_text:
        return (
            "Check that it is a PEM file with a certificate and its private key, and that the "
            "password of the key is right."
        )
    return "Check that it is a PEM file with a certificate and its private key."


def _load_ca(context: ssl.SSLContext, path: str, name: str) -> None:
    """Load the authorities that sign the certificates of the other side into `context`.

    `name` is the name of the setting, for errors. Raise ConfigurationError if the file cannot be
    used.
    """
    try:
        context.load_verify_locations(path)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{name}: the file {_absolute(path)} does not exist.", fix="Correct the path."
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{name}: {path} cannot be used: {_find_reason(error)}.",
            fix="Use a PEM file with the certificates of authorities.",
        ) from None


def _absolute(path: str | None) -> Path:
    """Return a path as it is looked up: a relative one from the working directory."""
    return Path(path or "").absolute()


def _find_reason(error: OSError) -> str:
    """Return OpenSSL's reason in lower-case words, or the error's text without one."""
    reason = getattr(error, "reason", None)
    return str(reason or error.strerror or error).lower().replace("_", " ")


# ----------------------------------------------------------------------------------- errors

# By OpenSSL's X509_V_ERR_… code.
_VERIFICATION_FIXES: Final = {
    9: "The certificate is not valid yet: compare the clocks of client and server.",
    10: "The certificate has expired: the server needs a new one.",
    18: "The certificate is self-signed (is the server in test mode?): name it as ca (--tls-ca), "
    "or turn verification off (verify=False, --tls-verify none).",
    62: "Connect to a name that is in the certificate, or give one as server_name, or set "
    'verify="ca" (--tls-verify ca).',
    64: "The certificate does not contain that address: give server_name, or set "
    'verify="ca" (--tls-verify ca).',
}
_WRONG_CA: Final = "Set ca (--tls-ca) to the certificate of the authority that signed it."


def tls_connection_error(address: str, error: BaseException) -> ConnectionLostError:
    """Make the error that explains why TLS with `address` failed, with a fix.

    `error` is an error of OpenSSL or of the socket, usually from the handshake.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectionLostError(
            f"The certificate of {address} was rejected: {error.verify_message}.",
            fix=_VERIFICATION_FIXES.get(error.verify_code, _WRONG_CA),
        )
    error_text = str(error)
    if "WRONG_VERSION_NUMBER" in error_text or "RECORD_LAYER_FAILURE" in error_text:
        return ConnectionLostError(
            f"{address} does not use TLS.", fix="Connect to its TLS port, or without tls."
        )
    if "CERTIFICATE_REQUIRED" in error_text or "HANDSHAKE_FAILURE" in error_text:
        return ConnectionLostError(
            f"{address} refused the TLS handshake: {_find_alert(error)}.",
            fix="If it requires a certificate of the client, give certificate and key.",
        )
    if "ALERT" in error_text:
        return ConnectionLostError(
            f"{address} refused the TLS handshake: {_find_alert(error)}.",
            fix="Check that it trusts the authority of the client's certificate.",
        )
    shown_error = f": {error_text}" if error_text else ""
    return ConnectionLostError(
        f"{address} closed the connection during the TLS handshake{shown_error}.",
        fix="Check that it serves TLS (tls.server.mode permissive or enforcing, with a "
        "certificate).",
    )


def _find_alert(error: BaseException) -> str:
    """Return the alert by which the other side has refused, in lower-case words."""
    return str(getattr(error, "reason", None) or error).lower().replace("_", " ")


def is_tls_error(error: BaseException | None) -> bool:
    """Return whether `error` is an error of OpenSSL."""
    return isinstance(error, ssl.SSLError)


# -------------------------------------------------------------------------- accepted connections

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""The timeout of Netty, and so of RocketMQ."""
HANDSHAKES_MAX: Final = 512
HANDSHAKES_PER_ADDRESS_MAX: Final = 128
HANDSHAKES_PER_ITERATION: Final = 2
"""An RSA key of 2048 bits takes 0.7 ms for a signature, one of 4096 bits 4 ms."""
HELLO_BYTES_MAX: Final = 128 * 1024
"""The most bytes of a client's handshake; chains of certificates have a few kB."""
READ_BYTES: Final = 256 * 1024
FILE_CHECK_PERIOD_S: Final = 1.0
_FATAL_ERRORS: Final = (ssl.SSLError, ConnectionError)


class UpgradableConnection(asyncio.Protocol):
    """An accepted connection that may turn out to use TLS; see `net.accept.AcceptedConnection`."""

    __slots__ = ()
    peer: Peer

    def set_transport(self, transport: "TlsStream") -> None:
        """Send all further bytes through `transport`."""
        raise NotImplementedError

    def close_with_reason(self, reason: str) -> None:
        """Log `reason`, and close the connection."""
        raise NotImplementedError


class TlsDetector(asyncio.Protocol):
    """The protocol of an accepted connection until its first byte has shown whether it uses TLS."""

    __slots__ = ("_acceptor", "_connection", "_transport")

    def __init__(self, connection: UpgradableConnection, acceptor: "TlsAcceptor") -> None:
        self._connection = connection
        self._acceptor = acceptor
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._connection.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Find out from the first byte whether the client uses TLS, and continue accordingly.

        A client with TLS begins a handshake. Another client is served without TLS, or refused if
        TLS is enforced.
        """
        if data[0] == TLS_HELLO:
            self._acceptor.begin_handshake(self._connection, self._transport, data)
        elif self._acceptor.is_enforcing:
            self._connection.close_with_reason(
                "the client does not use TLS, and tls.server.mode is enforcing. Turn TLS on in "
                "the client."
            )
        else:
            self._transport.set_protocol(self._connection)
            self._connection.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)


class TlsStream(asyncio.Protocol):
    """TLS between the socket of an accepted connection and the connection itself."""

    __slots__ = (
        "_acceptor",
        "_connection",
        "_handshake_bytes",
        "_incoming",
        "_outgoing",
        "_timer",
        "_tls",
        "_transport",
        "is_open",
    )

    def __init__(
        self,
        connection: UpgradableConnection,
        transport: asyncio.Transport,
        acceptor: "TlsAcceptor",
    ) -> None:
        """Create a TLS stream between `transport` and `connection`, for `acceptor`.

        The handshake begins when `use_context` gives the stream a certificate.
        """
        self._connection = connection
        self._transport = transport
        self._acceptor = acceptor
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None  # None until there is a certificate
        self._handshake_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_open = False
        """Whether the handshake has succeeded."""

    # ---------------------------------------------------------------------- asyncio's protocol

    def data_received(self, data: bytes) -> None:
        """Handle encrypted bytes: decrypt them, or continue the handshake with them."""
        self._incoming.write(data)
        if self.is_open:
            self._decrypt_incoming()
            return
        self._handshake_bytes += len(data)
        if self._handshake_bytes > HELLO_BYTES_MAX:
            self.fail(f"its TLS handshake is longer than {HELLO_BYTES_MAX} bytes")
        elif self._tls is not None:
            self._acceptor.schedule_step(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_handshake()
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    # ------------------------------------------------------------------------------- handshake

    def set_timeout(self, timeout_s: float) -> None:
        """Abort the connection if its handshake has not ended after `timeout_s` seconds."""

        def expire() -> None:
            self._timer = None
            self.fail(f"its TLS handshake was not finished within {timeout_s:g} s")
            self._transport.abort()

        self._timer = asyncio.get_running_loop().call_later(timeout_s, expire)

    def use_context(self, context: ssl.SSLContext) -> None:
        """Begin the handshake with this context, and with the bytes that have arrived so far."""
        if not self._connection.peer.closed:
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._acceptor.schedule_step(self)

    def step(self) -> None:
        """Continue the handshake with the bytes that have arrived. The acceptor calls this.

        If it fails, the connection is closed. If it succeeds, the stream is open.
        """
        if self._tls is None or self.is_open or self._connection.peer.closed:
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except _FATAL_ERRORS as error:
            self._flush()  # send the alert, so that the client learns the reason
            self.fail(f"its TLS handshake failed: {_describe(error)}")
        else:
            self.is_open = True
            self._end_handshake()
            self._flush()
            self._decrypt_incoming()

    def fail(self, reason: str) -> None:
        """End the handshake, log `reason`, and close the connection."""
        self._acceptor.failed_handshakes += 1
        self._end_handshake()
        self._connection.close_with_reason(reason)

    def _end_handshake(self) -> None:
        """Cancel the timeout, and tell the acceptor that the handshake has succeeded or failed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._acceptor.handshake_ended(self)

    # ------------------------------------------------------------------------------------ bytes

    def _decrypt_incoming(self) -> None:
        """Decrypt the bytes that have arrived, and pass them to the connection as one piece.

        Closes the connection if the bytes are not valid, or if the client has ended the stream.
        """
        tls = self._tls
        assert tls is not None
        pieces = []
        is_end = False
        try:
            while self._incoming.pending or tls.pending():
                piece = tls.read(READ_BYTES)
                if not piece:
                    is_end = True
                    break
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except _FATAL_ERRORS as error:
            self._connection.close_with_reason(f"its TLS stream is broken: {_describe(error)}")
            return
        if self._outgoing.pending:  # the answer to a key update
            self._flush()
        if pieces:
            self._connection.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if is_end:
            self._connection.peer.close()

    def _flush(self) -> None:
        """Send the encrypted bytes that OpenSSL has made."""
        encrypted = self._outgoing.read()
        if encrypted and not self._transport.is_closing():
            self._transport.write(encrypted)

    # ------------------------------------------------------------- transport of the connection

    def write(self, data: bytes) -> None:
        """Encrypt `data` and send it. Do nothing before the handshake has succeeded."""
        tls = self._tls
        if tls is None or not self.is_open:
            return
        try:
            written_bytes = tls.write(data)
            while written_bytes < len(data):
                written_bytes += tls.write(memoryview(data)[written_bytes:])
        except ssl.SSLError as error:
            self._connection.close_with_reason(f"its TLS stream is broken: {_describe(error)}")
            return
        self._transport.write(self._outgoing.read())

    def get_write_buffer_size(self) -> int:
        """Return the number of encrypted bytes that the socket has not taken yet."""
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close the connection after everything written before has been sent."""
        if self._tls is not None and self.is_open:
            # `unwrap` sends this side's close_notify. It fails because that of the client has not
            # arrived; the server does not wait for it.
            with contextlib.suppress(ssl.SSLError):
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


def _describe(error: BaseException) -> str:
    """Describe a TLS error of an accepted connection, as a phrase for the log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the client was rejected: {error.verify_message}"
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else str(error) or "closed"


class TlsAcceptor:
    """The TLS state of one server: its certificate, and its open handshakes with their limits."""

    def __init__(self, config: TlsConfig, protocols: Sequence[str] = ()) -> None:
        """Create an acceptor of TLS connections; `start` loads its certificate.

        `protocols` are offered to clients by ALPN.
        """
        self._protocols = protocols
        self.is_enforcing = config.tls_mode == "enforcing"
        self._config = config
        self.completed_handshakes = 0
        self.failed_handshakes = 0
        self._reloading: ReloadingContext | None = None
        self._test_context: ssl.SSLContext | None = None
        self._test_context_error: str = ""
        self._test_context_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop
        self._file_check_timer: asyncio.TimerHandle | None = None
        self._handshakes: dict[TlsStream, str] = {}
        """The open handshakes, and the address of each."""
        self._addresses = AddressLimit(HANDSHAKES_PER_ADDRESS_MAX)
        self._ready_for_step: dict[TlsStream, None] = {}
        self._is_step_scheduled = False

    def start(self) -> None:
        """Load the certificate, and regularly check its files for changes from now on.

        Raise ConfigurationError if the settings are not valid, or a file cannot be used.
        """
        self.close()
        self._loop = asyncio.get_running_loop()
        self._reloading = load_server_context(self._config, self._protocols)
        if self._reloading is not None:
            self._file_check_timer = self._loop.call_later(FILE_CHECK_PERIOD_S, self._check_files)

    def close(self) -> None:
        """Stop checking the files of the certificate."""
        if self._test_context_task is not None:
            self._test_context_task.cancel()
        if self._file_check_timer is not None:
            self._file_check_timer.cancel()
            self._file_check_timer = None

    @property
    def open_handshakes(self) -> int:
        """The number of handshakes that have begun and not ended."""
        return len(self._handshakes)

    def begin_handshake(
        self, connection: UpgradableConnection, transport: asyncio.Transport, data: bytes
    ) -> None:
        """Put TLS between `transport` and `connection`. `data` are the client's first bytes.

        If there are too many unfinished handshakes, close the connection instead.
        """
        address = connection.peer.remote.address
        refusal = ""
        if len(self._handshakes) >= HANDSHAKES_MAX:
            refusal = f"{HANDSHAKES_MAX} TLS handshakes are unfinished, which is the limit"
        elif not self._addresses.acquire(address):
            refusal = (
                f"{self._addresses.count_max} TLS handshakes of its address are unfinished, which "
                "is the limit"
            )
        if refusal:
            self.failed_handshakes += 1
            connection.close_with_reason(refusal)
            return

        stream = TlsStream(connection, transport, self)
        self._handshakes[stream] = address
        connection.set_transport(stream)
        transport.set_protocol(stream)
        stream.set_timeout(HANDSHAKE_TIMEOUT_S)
        stream.data_received(data)
        self._choose_context(stream)

    def _choose_context(self, stream: TlsStream) -> None:
        """Begin a handshake with the server's certificate, if there is one.

        Without a certificate the handshake fails. In test mode the handshake waits until a
        certificate has been made.
        """
        context = self._test_context if self._reloading is None else self._reloading.context
        if context is not None:
            stream.use_context(context)
        elif self._test_context_error or not self._config.tls_test_mode:
            stream.fail(
                self._test_context_error
                or "the client uses TLS, and the server has no certificate. Set "
                "tls.server.certPath and tls.server.keyPath, or turn TLS off in the client."
            )
        elif self._test_context_task is None:
            self._test_context_task = self._loop.create_task(self._make_test_context())

    async def _make_test_context(self) -> None:
        """Make a self-signed certificate for test mode, then continue the waiting handshakes.

        Sets `_test_context`, or `_test_context_error` if the certificate cannot be made; then the
        handshakes fail.
        """
        try:
            # On another thread, because it takes about 10 ms.
            self._test_context = await asyncio.to_thread(self_signed_context, self._protocols)
        except ConfigurationError as error:
            self._test_context_error = str(error)
            log.error("%s", error)
        else:
            log.warning(
                "UNSAFE: TLS uses a certificate that was made just now (tls.test.mode.enable). "
                "Clients cannot verify it, so an attacker may intercept the connection. Set "
                "tls.server.certPath and tls.server.keyPath."
            )

        # A failed handshake removes itself from `_handshakes`.
        waiting_streams = tuple(self._handshakes)
        for stream in waiting_streams:
            self._choose_context(stream)

    def handshake_ended(self, stream: TlsStream) -> None:
        """Forget the unfinished handshake of `stream`, and count it if it has succeeded."""
        address = self._handshakes.pop(stream, None)
        if address is None:
            return
        self.completed_handshakes += stream.is_open
        self._ready_for_step.pop(stream, None)
        self._addresses.release(address)

    def schedule_step(self, stream: TlsStream) -> None:
        """Call `stream.step` in one of the next iterations of the event loop."""
        self._ready_for_step[stream] = None
        if not self._is_step_scheduled:
            self._is_step_scheduled = True
            self._loop.call_soon(self._run_steps)

    def _run_steps(self) -> None:
        """Do the next step of some handshakes. The others follow in later iterations."""
        for stream in tuple(self._ready_for_step)[:HANDSHAKES_PER_ITERATION]:
            self._ready_for_step.pop(stream, None)
            stream.step()
        self._is_step_scheduled = bool(self._ready_for_step)
        if self._is_step_scheduled:
            self._loop.call_soon(self._run_steps)

    def _check_files(self) -> None:
        """Load the certificate again if its files have changed, and schedule the next check."""
        if self._reloading is not None:
            self._reloading.reload_if_changed()
        self._file_check_timer = self._loop.call_later(FILE_CHECK_PERIOD_S, self._check_files)
