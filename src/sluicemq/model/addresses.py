"""Addresses of this machine and of others, as text: what kind they are, and which one to tell.

A broker that listens on every address has to tell its name servers one of them. `choose_address`
decides which and keeps the reason, `explain_address` says both for the start-up log. The name
server may then answer another one to a client that came in by another way
(`nameserver/routes.py`), unless the user fixed it with brokerIP1.

Our broker adds two extFields to its registration (request 103) so that the name server need not
guess; a Java name server ignores them.
"""

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

FIXED_FIELD: Final = "sluiceAddressFixed"
"""extField of request 103: "true" when the user set brokerIP1."""
INTERFACES_FIELD: Final = "sluiceAddresses"
"""extField of request 103: the addresses the broker listens at, separated by commas."""

IPV4_NETWORK_BITS: Final = 24
IPV6_NETWORK_BITS: Final = 64
LOOPBACK: Final = "127.0.0.1"
NAME_SERVER_PORT: Final = 9876
DEFAULT_NAME_SERVER: Final = f"{LOOPBACK}:{NAME_SERVER_PORT}"
"""The name server of a client to which neither an option nor NAMESRV_ADDR gives one."""

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class AdvertisedAddress(NamedTuple):
    """What a broker tells its name servers. `fixed`: the user said so, nobody may replace it."""

    address: str
    fixed: bool
    reason: str


@lru_cache(maxsize=1024)
def parse_address(text: str) -> IPAddress | None:
    """`1.2.3.4`, `::1`, `fe80::1%eth0`, `::ffff:1.2.3.4` -> address; None for a host name."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_loopback(text: str) -> bool:
    address = parse_address(text)
    return text == "localhost" if address is None else address.is_loopback


def is_wildcard(text: str) -> bool:
    """0.0.0.0 or ::, which mean "every address of mine" and are no place to connect to."""
    address = parse_address(text)
    return text == "" if address is None else address.is_unspecified


def is_private(text: str) -> bool:
    """An address of a network that the world does not route to."""
    address = parse_address(text)
    return address is not None and address.is_private


def same_address(one: str, other: str) -> bool:
    first, second = parse_address(one), parse_address(other)
    return one == other if first is None or second is None else first == second


def same_network(one: str, other: str) -> bool:
    """Whether two addresses are most likely neighbours.

    Masks are not known here, so the usual ones count: 24 bits (IPv4), 64 bits (IPv6); all loopback
    addresses are one network.
    """
    first, second = parse_address(one), parse_address(other)
    if first is None or second is None or first.version != second.version:
        return False
    if first.is_loopback or second.is_loopback:
        return first.is_loopback and second.is_loopback
    bits = IPV4_NETWORK_BITS if first.version == 4 else IPV6_NETWORK_BITS
    shift = first.max_prefixlen - bits
    return int(first) >> shift == int(second) >> shift


def choose_address(
    broker_ip1: str | None,
    bind_address: str,
    interfaces: Iterable[str] = (),
    towards_name_server: str | None = None,
) -> AdvertisedAddress:
    """The address that a broker tells its name servers.

    `interfaces` are the addresses of this machine, `towards_name_server` is the local end of a
    connection to a name server, when there is one. brokerIP1 wins, then a bind address that is one
    address, then the way to the name server, then an interface that others can reach.
    """
    if broker_ip1:
        return AdvertisedAddress(broker_ip1, True, "brokerIP1 says so")
    if not is_wildcard(bind_address):
        return AdvertisedAddress(bind_address, False, "it is the only address it listens at")
    if towards_name_server and not is_loopback(towards_name_server):
        return AdvertisedAddress(towards_name_server, False, "the name server is reached from it")
    for address in interfaces:
        parsed = parse_address(address)
        is_local = is_loopback(address) or (parsed is not None and parsed.is_link_local)
        if not is_local and not is_wildcard(address):
            return AdvertisedAddress(
                address, False, "it is this machine's first address that others can reach"
            )
    return AdvertisedAddress(LOOPBACK, False, "this machine has no other address")


def explain_address(advertised: AdvertisedAddress, port: int) -> str:
    """One sentence for the start-up log: which address clients are told, why, and the cure."""
    text = f"Clients are told {join(advertised.address, port)}, because {advertised.reason}."
    if advertised.fixed:
        return text
    if is_loopback(advertised.address):
        return (
            f"{text} Only programs on this machine reach it there; to serve others set "
            "brokerIP1 (and listen on 0.0.0.0)."
        )
    return (
        f"{text} A SluiceMQ name server replaces it for clients that come in by another way; "
        "set brokerIP1 to fix it."
    )


def join(address: str, port: int) -> str:
    """`1.2.3.4:5` or `[::1]:5`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
