"""What a client finds at the address of a server."""

from enum import StrEnum


class Reachability(StrEnum):
    """How a server, or whatever else is at its address, reacted to a request.

    The values are part of the JSON that `sluice doctor --json` prints.
    """

    RESPONDS = "answers"
    """The server answered the request, successfully or with an error code."""
    UNRESOLVED = "unresolved"
    """The host name could not be resolved."""
    REFUSED = "refused"
    """The machine is reachable, but no program listens on the port."""
    UNREACHABLE = "silent"
    """The connection attempt timed out: no route, a firewall, or a machine that is off."""
    UNRESPONSIVE = "mute"
    """The connection was accepted, but no response of a known protocol came."""
    TLS = "tls"
    """The server requires TLS, and the client connected without TLS."""
    PLAIN = "plain"
    """The server does not speak TLS, and the client connected with TLS."""
    HTTP = "http"
    """An HTTP server answered."""
    GRPC = "grpc"
    """A gRPC server answered."""
    UNTRUSTED = "untrusted"
    """The server's certificate was not signed by a trusted authority."""
    EXPIRED = "expired"
    """The server's certificate has expired."""
    WRONG_NAME = "wrong-name"
    """The server's certificate was issued for another name."""
    CLIENT_CERTIFICATE = "client-certificate"
    """The server requires a client certificate, or rejected the one that it received."""
