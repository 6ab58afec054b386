"""What answers at an address: a server that understands the request, or what else is there.

A connection that fails says little ("the server closed the connection"). So the address is resolved
and dialled by itself first, and one that does not answer as RocketMQ is asked as TLS and as HTTP.
"""

import contextlib
import socket
import ssl
from dataclasses import dataclass
from typing import Final

from sluicemq.errors import ProtocolError, SluiceError
from sluicemq.model.ids import Host, parse_host
from sluicemq.model.reachability import Reachability
from sluicemq.net.blocking import BlockingChannel
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import Command

PROBE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Met:
    """What is at an address: the answer, or else what was said there in `detail`."""

    reach: Reachability
    detail: str = ""
    answer: Command | None = None


def listens(address: str, timeout_s: float = PROBE_S) -> Met:
    """Is a connection taken there?"""
    try:
        host = parse_host(address)
        known = socket.getaddrinfo(host.address, host.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Met(Reachability.UNRESOLVED, getattr(error, "strerror", None) or str(error))
    except ProtocolError as error:
        return Met(Reachability.UNRESOLVED, str(error))
    refused = detail = ""
    for family, kind, protocol, _, target in known:
        with contextlib.closing(socket.socket(family, kind, protocol)) as channel:
            channel.settimeout(timeout_s)
            try:
                channel.connect(target)
            except ConnectionRefusedError as error:
                refused = error.strerror or "refused"
            except OSError as error:
                detail = error.strerror or f"nothing within {timeout_s:g} s"
            else:
                return Met(Reachability.ANSWERS)
    return Met(Reachability.REFUSED, refused) if refused else Met(Reachability.SILENT, detail)


def probe(
    address: str, command: Command, tls: Tls | None = None, timeout_s: float = PROBE_S
) -> Met:
    """Asks one question there, and finds out why there is no answer."""
    met = listens(address, timeout_s)
    if met.reach is not Reachability.ANSWERS:
        return met
    try:
        with contextlib.closing(BlockingChannel(address, timeout_s, tls)) as channel:
            answer = channel.call(command)
            answer.body = bytes(answer.body)
            return Met(Reachability.ANSWERS, answer=answer)
    except SluiceError as error:
        detail, cause = error.fact, error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Met(_OF_CERTIFICATE.get(cause.verify_code, Reachability.UNTRUSTED), detail)
    host = parse_host(address)
    if tls is not None:
        if probe(address, command, None, timeout_s).reach is Reachability.ANSWERS:
            return Met(Reachability.PLAIN, detail)
        is_closed = "ALERT" in str(cause) or "REQUIRED" in str(cause)
        return Met(Reachability.CLIENT_CERTIFICATE if is_closed else Reachability.MUTE, detail)
    return Met(_speech(host, timeout_s), detail)


_OF_CERTIFICATE: Final = {
    10: Reachability.EXPIRED,
    62: Reachability.WRONG_NAME,
    64: Reachability.WRONG_NAME,
}
"""OpenSSL's X509_V_ERR_…: has expired, host name mismatch, address mismatch."""


def _speech(host: Host, timeout_s: float) -> Reachability:
    """TLS, gRPC below it, or HTTP: of whom does not speak RocketMQ's protocol."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(OSError):
        plain = socket.create_connection((host.address, host.port), timeout_s)
        with plain, context.wrap_socket(plain, server_hostname=host.address) as channel:
            return (
                Reachability.GRPC if channel.selected_alpn_protocol() == "h2" else Reachability.TLS
            )
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host.address, host.port), timeout_s) as web,
    ):
        web.sendall(b"GET / HTTP/1.0\r\nHost: %b\r\n\r\n" % host.address.encode())
        if web.recv(16).startswith(b"HTTP/"):
            return Reachability.HTTP
    return Reachability.MUTE
