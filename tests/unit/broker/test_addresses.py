"""What a broker says its address is."""

import pytest

from sluicemq.broker.registration import (
    choose_advertised_address,
    find_listening_addresses,
    find_local_address,
    resolve_stored_host,
)
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.model.ids import Host


def test_broker_ip1_wins_and_is_fixed() -> None:
    config = BrokerConfig(broker_ip1="10.1.2.3", name_server_addresses=("127.0.0.1:9876",))
    found = choose_advertised_address(config)
    assert (found.address, found.is_fixed) == ("10.1.2.3", True)


def test_a_broker_on_loopback_says_loopback() -> None:
    found = choose_advertised_address(BrokerConfig(bind_address="127.0.0.1"))
    assert (found.address, found.is_fixed) == ("127.0.0.1", False)
    assert find_listening_addresses("127.0.0.1") == ["127.0.0.1"]


def test_a_broker_on_all_addresses_lists_them_with_loopback() -> None:
    assert "127.0.0.1" in find_listening_addresses("0.0.0.0")


def test_the_way_to_a_host_has_a_local_address_and_nothing_is_sent() -> None:
    assert find_local_address(Host("127.0.0.1", 9)) == "127.0.0.1"
    assert find_local_address(Host("no.such.host.invalid", 9)) is None


def test_records_hold_an_address_also_when_broker_ip1_is_a_name() -> None:
    assert resolve_stored_host("10.1.2.3", 5) == Host("10.1.2.3", 5)
    assert resolve_stored_host("::1", 5) == Host("::1", 5)
    assert resolve_stored_host("localhost", 5) == Host("127.0.0.1", 5)
    with pytest.raises(ConfigurationError, match="brokerIP1"):
        resolve_stored_host("no.such.host.invalid", 5)
