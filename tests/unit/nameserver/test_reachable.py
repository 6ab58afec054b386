"""Which address of a broker a client is told: every case of the table in routes.py."""

import pytest

from sluicemq.nameserver.reachable import ClientConnection, Origin, reachable_address

HERE = "192.168.1.5"
"""The name server's machine as the office sees it."""
ALL_HERE = ("127.0.0.1", HERE, "172.17.0.1")

LOCAL_CLIENT = ClientConnection("127.0.0.1", "127.0.0.1")
SAME_HOST_CLIENT = ClientConnection(HERE, HERE)
OFFICE_CLIENT = ClientConnection("192.168.1.77", HERE)
FAR_CLIENT = ClientConnection("10.9.9.9", HERE)
CLIENT_6 = ClientConnection("2001:db8::9", "2001:db8::5")
CONTAINER_CLIENT = ClientConnection("172.17.0.3", "172.17.0.1")

JAVA_HERE = Origin("127.0.0.1", "127.0.0.1")
JAVA_HERE_BY_NAME = Origin(HERE, HERE)
JAVA_THERE = Origin("192.168.1.20", HERE)
OURS_HERE = Origin("127.0.0.1", "127.0.0.1", interfaces=ALL_HERE)
OURS_HERE_LOOPBACK_ONLY = Origin("127.0.0.1", "127.0.0.1", interfaces=("127.0.0.1",))
OURS_THERE = Origin("192.168.1.20", HERE, interfaces=("127.0.0.1", "192.168.1.20", "172.17.0.1"))
OURS_BEHIND_NAT = Origin("192.168.1.20", HERE, interfaces=("127.0.0.1", "172.18.0.2"))

CASES = {
    # registered as loopback on the name server's machine
    "loopback here, local client": ("127.0.0.1", JAVA_HERE, LOCAL_CLIENT, "127.0.0.1"),
    "loopback here, client here by name": ("127.0.0.1", JAVA_HERE, SAME_HOST_CLIENT, "127.0.0.1"),
    "loopback here, office client": ("127.0.0.1", JAVA_HERE, OFFICE_CLIENT, HERE),
    "loopback here by name, office": ("127.0.0.1", JAVA_HERE_BY_NAME, OFFICE_CLIENT, HERE),
    "loopback here, container client": ("127.0.0.1", OURS_HERE, CONTAINER_CLIENT, "172.17.0.1"),
    "listens on loopback alone": ("127.0.0.1", OURS_HERE_LOOPBACK_ONLY, OFFICE_CLIENT, "127.0.0.1"),
    # registered as loopback elsewhere
    "loopback there, office client": ("127.0.0.1", JAVA_THERE, OFFICE_CLIENT, "192.168.1.20"),
    "loopback there, local client": ("127.0.0.1", JAVA_THERE, LOCAL_CLIENT, "192.168.1.20"),
    "loopback there, client there": (
        "127.0.0.1", JAVA_THERE, ClientConnection("192.168.1.20", HERE), "192.168.1.20",
    ),
    # registered as 0.0.0.0
    "wildcard here, local client": ("0.0.0.0", JAVA_HERE, LOCAL_CLIENT, "127.0.0.1"),
    "wildcard here, client here by name": ("0.0.0.0", JAVA_HERE, SAME_HOST_CLIENT, HERE),
    "wildcard here, office client": ("0.0.0.0", OURS_HERE, OFFICE_CLIENT, HERE),
    "wildcard there, office client": ("0.0.0.0", JAVA_THERE, OFFICE_CLIENT, "192.168.1.20"),
    # registered as a real address
    "neighbour of the client": (HERE, OURS_HERE, OFFICE_CLIENT, HERE),
    "other network, it listens where the client came": (
        "172.17.0.1", OURS_HERE, OFFICE_CLIENT, HERE,
    ),
    "other network, local client, it listens on loopback": (
        HERE, OURS_HERE, LOCAL_CLIENT, "127.0.0.1",
    ),
    "other network, local client, Java": (HERE, JAVA_HERE_BY_NAME, LOCAL_CLIENT, HERE),
    "other network, Java broker here": ("172.17.0.1", JAVA_HERE, OFFICE_CLIENT, "172.17.0.1"),
    "far client, it listens where the client came": (
        "192.168.1.6", OURS_HERE, FAR_CLIENT, HERE,
    ),
    "far client keeps the neighbour of our address": (HERE, OURS_HERE, FAR_CLIENT, HERE),
    "docker address, source is the client's neighbour": (
        "172.18.0.2", JAVA_THERE, OFFICE_CLIENT, "192.168.1.20",
    ),
    "docker address, far client, Java tells nothing": (
        "172.18.0.2", JAVA_THERE, FAR_CLIENT, "172.18.0.2",
    ),
    "docker address, far client, behind NAT": (
        "172.18.0.2", OURS_BEHIND_NAT, FAR_CLIENT, "192.168.1.20",
    ),
    "docker address, client behind the same NAT": (
        "172.18.0.2", OURS_BEHIND_NAT, ClientConnection("192.168.1.20", HERE), "172.18.0.2",
    ),
    "another docker0 of the same numbers is not this one": (
        "192.168.1.20", OURS_THERE, CONTAINER_CLIENT, "192.168.1.20",
    ),
    "a public address was meant": ("8.8.4.4", JAVA_THERE, OFFICE_CLIENT, "8.8.4.4"),
    # never replaced
    "brokerIP1": (
        "127.0.0.1", Origin("127.0.0.1", "127.0.0.1", is_fixed=True), OFFICE_CLIENT, "127.0.0.1",
    ),
    "a host name": ("broker.example", OURS_HERE, OFFICE_CLIENT, "broker.example"),
    "nothing is known": ("127.0.0.1", None, OFFICE_CLIENT, "127.0.0.1"),
    # IPv6
    "loopback 6 here, office client": (
        "[::1]", Origin("::1", "::1"), CLIENT_6, "[2001:db8::5]",
    ),
    "wildcard 6 there": (
        "[::]", Origin("2001:db8::7", "2001:db8::5"), CLIENT_6, "[2001:db8::7]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_client_is_told_an_address_it_reaches(
    case: tuple[str, Origin | None, ClientConnection, str],
) -> None:
    registered, origin, client, told = case
    address, reason = reachable_address(f"{registered}:10911", origin, client)
    assert address == f"{told}:10911"
    assert bool(reason) is (told != registered)


def test_what_is_no_address_stays_as_it_is() -> None:
    assert reachable_address("nonsense", JAVA_HERE, OFFICE_CLIENT) == ("nonsense", "")
