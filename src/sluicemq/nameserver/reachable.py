"""The address of a broker that a name server tells a client.

A broker that knows its address as 127.0.0.1, as 0.0.0.0, or as an address in another network
(docker, NAT, a second interface) is a common problem of RocketMQ: clients connect to the name
server, and then cannot connect to the broker. Two facts help: the address from which the broker
registered (its *source*, `Origin.source_address`), and the local address at which the client
reached the name server. The first case that matches applies:

| the broker registered                   | and                                       | result     |
|-----------------------------------------|-------------------------------------------|------------|
| with brokerIP1 (SluiceMQ), or a name    |                                           | registered |
| and listens on loopback only            |                                           | registered |
| loopback, from this host                | the client is on this host                | registered |
| loopback or 0.0.0.0, from this host     |                                           | local      |
| loopback or 0.0.0.0, from elsewhere     |                                           | source     |
| an address in the client's network      |                                           | registered |
| another network, from this host         | it listens on the local address           | local      |
| another private network, from elsewhere | the client has the same source address    | registered |
| another private network, from elsewhere | the source is in the client's network, or | source     |
|                                         | is not an address of the broker (NAT)     |            |
| anything else                           |                                           | registered |

The port never changes. What the name server cannot know must be configured by brokerIP1: ports that
docker publishes under another number, and a NAT between clients and name server.
"""

from typing import NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.model.addresses import (
    format_address,
    is_loopback,
    is_private,
    is_same_address,
    is_same_network,
    is_wildcard,
    parse_address,
)
from sluicemq.model.ids import parse_host


class Origin(NamedTuple):
    """Where a registration came from, and what it says about the broker's address."""

    source_address: str
    """The address from which the broker connected."""
    local_address: str
    """The address of the name server to which the broker connected."""
    is_fixed: bool = False
    """Whether the broker's address is configured by brokerIP1, so that it must not be changed."""
    interfaces: tuple[str, ...] = ()
    """The addresses on which a SluiceMQ broker listens; empty for RocketMQ's brokers."""

    @property
    def is_on_this_host(self) -> bool:
        """Whether the broker runs on the name server's host.

        This is so if it connected from a loopback address, or from the address to which it
        connected.
        """
        return is_loopback(self.source_address) or is_same_address(
            self.source_address, self.local_address
        )

    def listens_on(self, address: str) -> bool:
        """Return whether `address` is one of the `interfaces` on which the broker listens.

        The result is False for RocketMQ's brokers, which do not register their interfaces.
        """
        return any(is_same_address(address, interface) for interface in self.interfaces)


class ClientConnection(NamedTuple):
    """The two addresses of a client's connection to the name server."""

    remote_address: str
    """The client's address."""
    local_address: str
    """The address of the name server to which the client connected."""

    @property
    def is_on_this_host(self) -> bool:
        """Whether the client runs on the name server's host.

        This is so if it connected from a loopback address, or from the address to which it
        connected.
        """
        return is_loopback(self.remote_address) or is_same_address(
            self.remote_address, self.local_address
        )


def reachable_address(
    registered: str, origin: Origin | None, client: ClientConnection
) -> tuple[str, str]:
    """Return the host:port at which a client should connect to a broker, and a reason.

    `registered` is the host:port that the broker has registered. `origin` says where the
    registration came from. If it is None, `registered` is returned. `client` is the client's
    connection to the name server.

    The reason is a clause for log lines, such as "the broker is behind an address translation". It
    is "" if `registered` is returned.
    """
    try:
        host = parse_host(registered)
    except ProtocolError:
        return registered, ""
    if origin is None or origin.is_fixed:
        return registered, ""
    if origin.interfaces and all(map(is_loopback, origin.interfaces)):
        return registered, ""

    if is_loopback(host.address) or is_wildcard(host.address):
        address, reason = _replace_local_address(host.address, origin, client)
    else:
        address, reason = _replace_foreign_address(host.address, origin, client)
    if is_same_address(address, host.address):
        return registered, ""
    plain_address = str(parse_address(address) or address)  # without a zone
    return format_address(plain_address, host.port), reason


def _replace_local_address(
    address: str, origin: Origin, client: ClientConnection
) -> tuple[str, str]:
    """Return the address for a client if the broker has registered a loopback or wildcard address.

    `address` is the registered address. The second item is the reason for another address; "" if
    `address` is returned.
    """
    if not origin.is_on_this_host:
        return origin.source_address, "the broker's registration came from there"
    if is_loopback(address) and client.is_on_this_host:
        return address, ""
    return (
        client.local_address,
        "the broker is on the name server's machine, which the client reached there",
    )


def _replace_foreign_address(
    address: str, origin: Origin, client: ClientConnection
) -> tuple[str, str]:
    """Return the address for a client if the broker has registered any other address or a name.

    `address` is the registered address. The second item is the reason for another address; "" if
    `address` is returned.
    """
    if parse_address(address) is None or is_same_network(address, client.remote_address):
        return address, ""
    if origin.is_on_this_host:
        if origin.listens_on(client.local_address):
            return (
                client.local_address,
                "the broker listens where the client reached the name server",
            )
        return address, ""
    if not is_private(address) or is_same_address(origin.source_address, client.remote_address):
        return address, ""
    if is_same_network(origin.source_address, client.remote_address):
        return origin.source_address, "the broker's registration came from the client's own network"
    if origin.interfaces and not origin.listens_on(origin.source_address):
        return origin.source_address, "the broker is behind an address translation"
    return address, ""
