"""Finding out what is at an address: a RocketMQ server, another server, or nothing.

The error of a failed connection says little ("the server closed the connection"). So the host name
is resolved and connected to separately first. An address that does not respond as RocketMQ is then
tried with TLS and with HTTP.
"""

import contextlib
import socket
import ssl
from dataclasses import dataclass
from typing import Any, Final

from sluicemq.errors import ProtocolError, SluiceError
from sluicemq.model.ids import Host, parse_host
from sluicemq.model.reachability import Reachability
from sluicemq.net.blocking import BlockingChannel
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import Command

PROBE_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found at an address.

    `detail` is the text of the error, "" if there was none. `response` is the server's response to
    the request, None if there was none.
    """

    reachability: Reachability
    detail: str = ""
    response: Command | None = None


def probe_connection(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> ProbeResult:
    """Find out whether a server accepts connections at `address`, which is `host:port`.

    The result is RESPONDS, UNRESOLVED, REFUSED or UNREACHABLE. The connection is closed again.
    `timeout_s` limits the attempt for each IP address of the host.
    """
    try:
        host = parse_host(address)
        resolved = socket.getaddrinfo(host.address, host.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        detail = getattr(error, "strerror", None) or str(error)
        return ProbeResult(Reachability.UNRESOLVED, detail)
    except ProtocolError as error:
        return ProbeResult(Reachability.UNRESOLVED, str(error))
    return _connect_to_any(resolved, timeout_s)


def _connect_to_any(resolved: list[Any], timeout_s: float) -> ProbeResult:
    """Try to connect to one address after the other, until one accepts. Close the connection.

    `resolved` is a result of `socket.getaddrinfo`. `timeout_s` limits each attempt.
    """
    refusal = ""
    last_error = ""
    for family, socket_type, protocol, _, target in resolved:
        with contextlib.closing(socket.socket(family, socket_type, protocol)) as sock:
            sock.settimeout(timeout_s)
            try:
                sock.connect(target)
            except ConnectionRefusedError as error:
                refusal = error.strerror or "refused"
            except OSError as error:
                last_error = error.strerror or f"no response within {timeout_s:g} s"
            else:
                return ProbeResult(Reachability.RESPONDS)
    if refusal:
        return ProbeResult(Reachability.REFUSED, refusal)
    return ProbeResult(Reachability.UNREACHABLE, last_error)


def probe(
    address: str,
    command: Command,
    tls: Tls | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> ProbeResult:
    """Send `command` to `address`, which is `host:port`, and find out why it fails, if it does.

    If `tls` is None, the connection is plain. `timeout_s` limits each wait for the socket.
    """
    connection_result = probe_connection(address, timeout_s)
    if connection_result.reachability is not Reachability.RESPONDS:
        return connection_result

    try:
        with contextlib.closing(BlockingChannel(address, timeout_s, tls)) as channel:
            response = channel.call(command)
            response.body = bytes(response.body)
            return ProbeResult(Reachability.RESPONDS, response=response)
    except SluiceError as error:
        detail = error.fact
        cause = error.__cause__

    if isinstance(cause, ssl.SSLCertVerificationError):
        reachability = _CERTIFICATE_PROBLEMS.get(cause.verify_code, Reachability.UNTRUSTED)
    elif tls is None:
        reachability = _detect_protocol(parse_host(address), timeout_s)
    # TLS failed. Does the server respond without it?
    elif probe(address, command, None, timeout_s).reachability is Reachability.RESPONDS:
        reachability = Reachability.PLAIN
    elif "ALERT" in str(cause) or "REQUIRED" in str(cause):
        reachability = Reachability.CLIENT_CERTIFICATE
    else:
        reachability = Reachability.UNRESPONSIVE
    return ProbeResult(reachability, detail)


_CERTIFICATE_PROBLEMS: Final = {
    10: Reachability.EXPIRED,
    62: Reachability.WRONG_NAME,
    64: Reachability.WRONG_NAME,
}
"""By OpenSSL's X509_V_ERR_…: certificate has expired, host name mismatch, IP address mismatch."""


def _detect_protocol(host: Host, timeout_s: float) -> Reachability:
    """Find out which protocol a server speaks that does not respond as RocketMQ.

    Return TLS, GRPC (HTTP/2 over TLS) or HTTP, or else UNRESPONSIVE.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(OSError):
        plain = socket.create_connection((host.address, host.port), timeout_s)
        with plain, context.wrap_socket(plain, server_hostname=host.address) as secure:
            is_http2 = secure.selected_alpn_protocol() == "h2"
            return Reachability.GRPC if is_http2 else Reachability.TLS
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host.address, host.port), timeout_s) as plain,
    ):
        plain.sendall(b"GET / HTTP/1.0\r\nHost: %b\r\n\r\n" % host.address.encode())
        if plain.recv(16).startswith(b"HTTP/"):
            return Reachability.HTTP
    return Reachability.UNRESPONSIVE
