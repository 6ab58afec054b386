"""What this machine knows of its own addresses (model/addresses.py decides what to do with it)."""

import contextlib
import socket

from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.model.addresses import AdvertisedAddress, choose_address, is_wildcard
from sluicemq.model.ids import Host, encode_host, parse_host

_SOMEWHERE = Host("192.0.2.1", 9)  # of a network for documentation: nothing is sent there


def advertised_address(config: BrokerConfig) -> AdvertisedAddress:
    """The address that name servers and clients are told, and why."""
    towards = None
    for address in config.name_server_addresses:
        towards = towards or address_towards(parse_host(address))
    return choose_address(config.broker_ip1, config.bind_address, interfaces(), towards)


def address_towards(host: Host) -> str | None:
    """The local address of the way to a host; nothing is sent."""
    family = socket.AF_INET6 if ":" in host.address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.address, host.port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interfaces() -> list[str]:
    """Addresses of this machine, as far as the system tells without asking for more."""
    found = dict.fromkeys(filter(None, [address_towards(_SOMEWHERE)]))
    with contextlib.suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found.setdefault(str(entry[4][0]))
    return list(found)


def listening_addresses(bind_address: str) -> list[str]:
    """Where a broker that binds to this address can be reached."""
    if not is_wildcard(bind_address):
        return [bind_address]
    return list(dict.fromkeys([*interfaces(), "127.0.0.1"]))


def stored_host(address: str, port: int) -> Host:
    """The host that stands in records and message ids: an address, also when brokerIP1 is a name.

    Raises ConfigurationError when the name is not known.
    """
    try:
        encode_host(Host(address, port))
    except ValueError:
        try:
            address = socket.gethostbyname(address)
        except OSError as error:
            raise ConfigurationError(
                f"brokerIP1 = {address} is not an address and its name is not known ({error}).",
                cure="Write an IP address of this machine.",
            ) from error
    return Host(address, port)
