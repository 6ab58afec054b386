"""Network addresses as text: their kinds, and the one that a broker advertises.

A broker that listens on every address of its machine must advertise one of them to its name
servers. `choose_address` chooses it with a reason, and `explain_address` describes the choice for
the log. A SluiceMQ name server may give another address of the broker to clients that reach the
name server through another network (`nameserver/reachable.py`), unless the user has set brokerIP1.

For that purpose SluiceMQ's brokers add two extFields to REGISTER_BROKER (103), which RocketMQ's
name servers ignore.
"""

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

FIXED_FIELD: Final = "sluiceAddressFixed"
"""extField of REGISTER_BROKER (103): "true" if the user has set brokerIP1."""
INTERFACES_FIELD: Final = "sluiceAddresses"
"""extField of REGISTER_BROKER (103): where the broker listens: addresses separated by commas."""

IPV4_NETWORK_BITS: Final = 24
IPV6_NETWORK_BITS: Final = 64
LOOPBACK: Final = "127.0.0.1"
NAME_SERVER_PORT: Final = 9876
DEFAULT_NAME_SERVER: Final = f"{LOOPBACK}:{NAME_SERVER_PORT}"
"""The name server of a client to which neither an option nor NAMESRV_ADDR gives one."""

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class AdvertisedAddress(NamedTuple):
    """The address that a broker advertises, and why.

    `is_fixed` says that the user has chosen it, so that name servers must not replace it.
    """

    address: str
    is_fixed: bool
    reason: str


@lru_cache(maxsize=1024)
def parse_address(host: str) -> IPAddress | None:
    """Return the IP address that `host` is, or None for a host name.

    A zone (`fe80::1%eth0`) is dropped. An IPv4-mapped address (`::ffff:1.2.3.4`) becomes IPv4.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_loopback(host: str) -> bool:
    """Return whether only programs on the same machine reach the address. True for `localhost`."""
    address = parse_address(host)
    return host == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """Return whether the host means every address of a machine: `0.0.0.0`, `::` or "".

    A server can listen on it, but clients cannot connect to it.
    """
    address = parse_address(host)
    return host == "" if address is None else address.is_unspecified


def is_private(host: str) -> bool:
    """Return whether the host is an IP address of a private network (`ipaddress.is_private`)."""
    address = parse_address(host)
    return address is not None and address.is_private


def is_same_address(host: str, other_host: str) -> bool:
    """Return whether two hosts are the same IP address, or the same host name."""
    address = parse_address(host)
    other_address = parse_address(other_host)
    if address is None or other_address is None:
        return host == other_host
    return address == other_address


def is_same_network(host: str, other_host: str) -> bool:
    """Return whether two IP addresses are probably in one network. False for host names.

    The real network masks are not known here, so the usual lengths are assumed: 24 bits for IPv4
    and 64 bits for IPv6. All loopback addresses count as one network.
    """
    address = parse_address(host)
    other_address = parse_address(other_host)
    if address is None or other_address is None or address.version != other_address.version:
        return False
    if address.is_loopback or other_address.is_loopback:
        return address.is_loopback and other_address.is_loopback

    network_bits = IPV4_NETWORK_BITS if address.version == 4 else IPV6_NETWORK_BITS
    host_bits = address.max_prefixlen - network_bits
    return int(address) >> host_bits == int(other_address) >> host_bits


def choose_address(
    broker_ip1: str | None,
    bind_address: str,
    interfaces: Iterable[str] = (),
    towards_name_server: str | None = None,
) -> AdvertisedAddress:
    """Choose the address that a broker advertises to its name servers.

    The first of these is chosen:

    - `broker_ip1`, the setting brokerIP1, if it is set
    - `bind_address`, unless it is a wildcard such as 0.0.0.0
    - `towards_name_server`, the local address of a connection to a name server, unless it is
      loopback
    - the first of `interfaces`, the addresses of this machine, that other machines can reach
    - 127.0.0.1
    """
    if broker_ip1:
        return AdvertisedAddress(broker_ip1, True, "it is set as brokerIP1")
    if not is_wildcard(bind_address):
        return AdvertisedAddress(bind_address, False, "the broker listens only there")
    if towards_name_server and not is_loopback(towards_name_server):
        return AdvertisedAddress(towards_name_server, False, "the name server is reached from it")
    for address in interfaces:
        parsed = parse_address(address)
        is_local = is_loopback(address) or (parsed is not None and parsed.is_link_local)
        if not is_local and not is_wildcard(address):
            return AdvertisedAddress(
                address, False, "it is the first address that other machines can reach"
            )
    return AdvertisedAddress(LOOPBACK, False, "this machine has no other address")


def explain_address(advertised: AdvertisedAddress, port: int) -> str:
    """Return a text for the log: the advertised address, the reason, and how to change it."""
    address = format_address(advertised.address, port)
    fact = f"Advertising {address} to clients, because {advertised.reason}."
    if advertised.is_fixed:
        return fact
    if is_loopback(advertised.address):
        return (
            f"{fact} Only programs on this machine can reach it. To serve other machines, set "
            "brokerIP1 (and listen on 0.0.0.0)."
        )
    return (
        f"{fact} A SluiceMQ name server gives clients in other networks another address. "
        "Set brokerIP1 to advertise one address to all clients."
    )


def format_address(address: str, port: int) -> str:
    """Return `1.2.3.4:5`, or `[::1]:5` for an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
