"""Kinds of addresses, and which one a broker tells."""

import pytest

from sluicemq.model.addresses import (
    AdvertisedAddress,
    choose_address,
    explain_address,
    is_loopback,
    is_private,
    is_same_address,
    is_same_network,
    is_wildcard,
)


@pytest.mark.parametrize("text", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_loopback_addresses_are_known(text: str) -> None:
    assert is_loopback(text)


@pytest.mark.parametrize("text", ["10.0.0.1", "0.0.0.0", "broker.example", ""])
def test_others_are_no_loopback(text: str) -> None:
    assert not is_loopback(text)


def test_every_address_of_mine_is_no_place_to_connect_to() -> None:
    assert [is_wildcard(text) for text in ("0.0.0.0", "::", "", "1.2.3.4", "host")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_private_networks_are_known() -> None:
    assert is_private("172.17.0.2")
    assert not is_private("8.8.8.8")
    assert not is_private("broker.example")


@pytest.mark.parametrize(
    ("one", "other", "neighbours"),
    [
        ("192.168.1.5", "192.168.1.200", True),
        ("192.168.1.5", "192.168.2.5", False),
        ("127.0.0.1", "127.9.9.9", True),
        ("127.0.0.1", "192.168.1.5", False),
        ("fe80::1", "fe80::2%eth0", True),
        ("2001:db8:1::1", "2001:db8:2::1", False),
        ("::ffff:10.0.0.1", "10.0.0.2", True),
        ("10.0.0.1", "2001:db8::1", False),
        ("host", "host", False),
    ],
)
def test_neighbours_share_a_network(one: str, other: str, neighbours: bool) -> None:
    assert is_same_network(one, other) is neighbours
    assert is_same_network(other, one) is neighbours


def test_an_address_is_the_same_in_all_its_spellings() -> None:
    assert is_same_address("::ffff:10.0.0.1", "10.0.0.1")
    assert is_same_address("fe80::1%eth0", "fe80::1")
    assert is_same_address("host", "host")
    assert not is_same_address("host", "10.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "address", "fixed"),
    [
        (("10.0.0.9", "127.0.0.1", ["10.0.0.1"], "10.0.0.2"), "10.0.0.9", True),
        ((None, "127.0.0.1", ["10.0.0.1"], "10.0.0.2"), "127.0.0.1", False),
        ((None, "0.0.0.0", ["10.0.0.1"], "10.0.0.2"), "10.0.0.2", False),
        ((None, "0.0.0.0", ["127.0.0.1", "169.254.1.1", "10.0.0.1"], None), "10.0.0.1", False),
        ((None, "0.0.0.0", ["127.0.0.1", "10.0.0.1"], "127.0.0.1"), "10.0.0.1", False),
        ((None, "::", ["::1", "fe80::1", "2001:db8::1"], None), "2001:db8::1", False),
        ((None, "0.0.0.0", ["127.0.0.1"], "127.0.0.1"), "127.0.0.1", False),
        ((None, "", [], None), "127.0.0.1", False),
    ],
)
def test_a_broker_tells_the_address_that_others_reach(
    arguments: tuple[str | None, str, list[str], str | None], address: str, fixed: bool
) -> None:
    advertised = choose_address(*arguments)
    assert (advertised.address, advertised.is_fixed) == (address, fixed)


def test_the_log_says_which_address_why_and_the_cure() -> None:
    fixed = explain_address(AdvertisedAddress("10.0.0.9", True, "it is set as brokerIP1"), 10911)
    assert fixed == "Advertising 10.0.0.9:10911 to clients, because it is set as brokerIP1."
    loopback = explain_address(choose_address(None, "127.0.0.1"), 1)
    assert "127.0.0.1:1" in loopback
    assert "Only programs on this machine" in loopback
    assert "brokerIP1" in loopback
    assert "[2001:db8::1]:2" in explain_address(choose_address(None, "2001:db8::1"), 2)
