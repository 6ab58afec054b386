"""Which address of a broker a client is told: one that it can reach the way it came in.

A broker that knows itself as 127.0.0.1, as 0.0.0.0, or by the address of another network (docker,
NAT, a second interface) is RocketMQ's classic trap: clients connect to the name server and then
hang on the broker. Two facts help: from where the broker's registration came (`Origin.source`),
and at which of our addresses the client reached us. Cases, the first that fits:

| the broker registered                   | and                                         | told    |
|-----------------------------------------|---------------------------------------------|---------|
| with brokerIP1 (our broker), or a name  |                                             | that    |
| and listens on loopback alone           |                                             | that    |
| loopback, from this host                | the client is on this host                  | that    |
| loopback or 0.0.0.0, from this host     |                                             | our own |
| loopback or 0.0.0.0, from elsewhere     |                                             | source  |
| a neighbour of the client               |                                             | that    |
| another network, from this host         | it listens where the client reached us      | our own |
| another private network, from elsewhere | the client comes from the same address      | that    |
| another private network, from elsewhere | the source is the client's neighbour, or    | source  |
|                                         | the source is none of its addresses (NAT)   |         |
| anything else                           |                                             | that    |

The port is kept. What cannot be known here (ports published by docker under another number, a NAT
between the client and us) is what brokerIP1 is for.
"""

from typing import NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.model.addresses import (
    is_loopback,
    is_private,
    is_wildcard,
    join,
    parse_address,
    same_address,
    same_network,
)
from sluicemq.model.ids import parse_host


class Origin(NamedTuple):
    """What a registration tells about an address besides the address."""

    source: str
    """The address it came from."""
    reached: str
    """The address of ours it came to."""
    fixed: bool = False
    interfaces: tuple[str, ...] = ()
    """Where our broker says that it listens; empty for others."""

    @property
    def on_this_host(self) -> bool:
        return is_loopback(self.source) or same_address(self.source, self.reached)

    def listens_at(self, address: str) -> bool:
        return any(same_address(address, own) for own in self.interfaces)

    @property
    def on_loopback_alone(self) -> bool:
        return bool(self.interfaces) and all(is_loopback(own) for own in self.interfaces)

    @property
    def behind_nat(self) -> bool:
        """The way to us changed its address: it has none like the source."""
        return bool(self.interfaces) and not self.listens_at(self.source)


class Way(NamedTuple):
    """How a client came in."""

    remote: str
    local: str

    @property
    def on_this_host(self) -> bool:
        return is_loopback(self.remote) or same_address(self.remote, self.local)


def reachable_address(registered: str, origin: Origin | None, way: Way) -> tuple[str, str]:
    """`host:port` as registered -> (`host:port` for this client, why; "" when it stays)."""
    try:
        host = parse_host(registered)
    except ProtocolError:
        return registered, ""
    if origin is None or origin.fixed or origin.on_loopback_alone:
        return registered, ""
    is_local = is_loopback(host.address) or is_wildcard(host.address)
    instead = _instead_of_local if is_local else _instead_of_foreign
    address, reason = instead(host.address, origin, way)
    if same_address(address, host.address):
        return registered, ""
    return join(str(parse_address(address) or address), host.port), reason


def _instead_of_local(address: str, origin: Origin, way: Way) -> tuple[str, str]:
    if not origin.on_this_host:
        return origin.source, "the broker's registration came from there"
    if is_loopback(address) and way.on_this_host:
        return address, ""
    return way.local, "the broker is on the name server's machine, which the client reached there"


def _instead_of_foreign(address: str, origin: Origin, way: Way) -> tuple[str, str]:
    if parse_address(address) is None or same_network(address, way.remote):
        return address, ""
    if origin.on_this_host:
        if origin.listens_at(way.local):
            return way.local, "the broker listens where the client reached the name server"
        return address, ""
    if not is_private(address) or same_address(origin.source, way.remote):
        return address, ""
    if same_network(origin.source, way.remote):
        return origin.source, "the broker's registration came from the client's own network"
    if origin.behind_nat:
        return origin.source, "the broker is behind an address translation"
    return address, ""
