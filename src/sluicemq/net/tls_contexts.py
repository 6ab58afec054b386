"""Certificates in force: OpenSSL's contexts, made from files and made again when these change.

A context is never changed, it is replaced: connections that live keep theirs, new ones get the new
one. Files count as changed when they have been different and at rest for one look: certificate and
key are two files, and whoever replaces them writes one after the other. What cannot be read leaves
the old context in force and says why, once for each state of the files.

Errors of OpenSSL are codes of other people's problems; `explain` turns those of a handshake into a
sentence with its cure.
"""

import functools
import logging
import ssl
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sluicemq.errors import ConfigurationError, ConnectionLostError
from sluicemq.net.tls import ServerTls, Tls

log = logging.getLogger("sluicemq.tls")

OPENSSL_TIMEOUT_S: Final = 20.0
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
    return Watched(functools.partial(_new_client_context, tls), tls.files, "TLS of the client")


def _new_client_context(tls: Tls) -> ssl.SSLContext:
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


# ---------------------------------------------------------------------------------- servers


def server_contexts(tls: ServerTls) -> Watched | None:
    """The contexts of a server; None when it has no certificate and, in test mode, makes one when
    somebody asks. Raises ConfigurationError for files that cannot be used, and for settings that
    promise more than they hold."""
    if tls.client_auth != "none" and not tls.ca:
        raise ConfigurationError(
            f"tls.server.need.client.auth = {tls.client_auth} without tls.server.trustCertPath: "
            "no client could be verified.",
            cure="Set tls.server.trustCertPath to the certificates of the authority that signs "
            "those of clients.",
        )
    if not (tls.certificate or tls.test_mode or tls.mode == "permissive"):
        raise ConfigurationError(
            f"tls.server.mode = {tls.mode} without a certificate.",
            cure="Set tls.server.certPath and tls.server.keyPath.",
        )

    def made() -> ssl.SSLContext:
        context = _server_context()
        _load_chain(
            context, tls.certificate, tls.key or None, tls.key_password, "tls.server.certPath"
        )
        if tls.client_auth != "none":
            _load_ca(context, tls.ca, "tls.server.trustCertPath")
            context.verify_mode = _AUTH[tls.client_auth]
        return context

    return Watched(made, tls.files, "TLS of the server") if tls.certificate else None


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # a client must not make us sign again and again
    return context


def self_signed_context() -> ssl.SSLContext:
    """A context with a certificate that is made now, by the program openssl, and kept nowhere.
    Blocks for some ten milliseconds. Raises ConfigurationError."""
    with tempfile.TemporaryDirectory(prefix="sluice-tls-") as directory:
        key, certificate = f"{directory}/key.pem", f"{directory}/certificate.pem"
        command = [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-days", "3650", "-subj", "/CN=SluiceMQ test mode",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", key, "-out", certificate,
        ]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=OPENSSL_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigurationError(
                f"a certificate for TLS in test mode cannot be made: {error}.",
                cure="Install the program openssl, or set tls.server.certPath and "
                "tls.server.keyPath.",
            ) from error
        context = _server_context()
        _load_chain(context, certificate, key, "", "test mode")
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
            f"{name}: the file {missing} is not there.", cure="Correct the path."
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{name}: {where} cannot be used: {_reason(error)}.", cure=_chain_cure(error)
        ) from None


def _chain_cure(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "Give this user the right to read it."
    text = str(error)
    if "KEY_VALUES_MISMATCH" in text:
        return "The key belongs to another certificate: replace both."
    if "DECRYPT" in text.upper() or "password" in text.lower() or "[SSL] PEM lib" in text:
        return (
            "Is it a PEM file with a certificate and its private key, and the password of the key "
            "right?"
        )
    return "Is it a PEM file with a certificate and its private key?"


def _load_ca(context: ssl.SSLContext, path: str, name: str) -> None:
    try:
        context.load_verify_locations(path)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{name}: the file {path} is not there.", cure="Correct the path."
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{name}: {path} cannot be used: {_reason(error)}.",
            cure="Name a PEM file with the certificates of authorities.",
        ) from None


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error.strerror or error).lower().replace("_", " ")


# ----------------------------------------------------------------------------------- errors

_CHAIN_CURES: Final = {
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
            cure=_CHAIN_CURES.get(error.verify_code, _WRONG_CA),
        )
    text = str(error)
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return ConnectionLostError(
            f"{address} does not speak TLS.", cure="Dial its TLS port, or without tls."
        )
    if "CERTIFICATE_REQUIRED" in text or "HANDSHAKE_FAILURE" in text:
        return ConnectionLostError(
            f"{address} refuses the handshake: {_alert(error)}.",
            cure="Does it want a certificate of the client? Give certificate and key.",
        )
    if "ALERT" in text:
        return ConnectionLostError(
            f"{address} refuses the handshake: {_alert(error)}.",
            cure="Does it trust the authority of the client's certificate?",
        )
    return ConnectionLostError(
        f"{address} closed during the TLS handshake{f': {text}' if text else ''}.",
        cure="Does it serve TLS (tls.server.mode permissive or enforcing, with a certificate)?",
    )


def _alert(error: BaseException) -> str:
    return str(getattr(error, "reason", None) or error).lower().replace("_", " ")


def is_tls_error(error: BaseException | None) -> bool:
    """Whether OpenSSL said it."""
    return isinstance(error, ssl.SSLError)
