"""Test the plan of ports of `sluice up`, and the settings that its proxy inherits."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.cli.servers.inherited import VARIABLE, inherited_environment, inherited_settings
from sluicemq.cli.servers.ports import PORT_MAX, PortPlan, broker_ports
from sluicemq.cli.servers.processes import are_replicas, broker_names
from sluicemq.config import BrokerConfig, load_broker_config, load_proxy_config
from sluicemq.errors import ConfigurationError


def plan(
    brokers: int | None = None,
    replicas: int | None = None,
    *,
    name_server: int = 9876,
    proxy: bool | None = True,
    **settings: Any,
) -> PortPlan:
    names = broker_names(brokers, replicas)
    config = BrokerConfig(**{"bind_address": "127.0.0.1", **settings})
    return PortPlan.create(
        config, names, name_server, proxy=proxy, are_replicas=are_replicas(names)
    )


def test_broker_ports_leave_room_for_the_ports_beside_them() -> None:
    assert broker_ports(10911, 3) == [10911, 10921, 10931]
    assert broker_ports(0, 3) == [0, 0, 0]
    assert broker_ports(65514, 3)[-1] + 1 == 65535
    with pytest.raises(
        ConfigurationError, match=r"65536; the highest port is 65535.*--broker-port 65514"
    ):
        broker_ports(65515, 3)


def test_each_process_has_the_next_metrics_port() -> None:
    found = plan(3, metrics_port=6000)
    assert found.metrics == 6000
    assert [ports.metrics for ports in found.brokers] == [6001, 6002, 6003]
    assert found.proxy == (8081, 6004)


def test_metrics_ports_are_consecutive_with_free_broker_ports_too() -> None:
    found = plan(None, 2, listen_port=0, metrics_port=6000, proxy=None).with_proxy_ports()
    assert [ports.metrics for ports in found.brokers] == [6001, 6002]
    assert found.proxy is not None
    assert found.proxy.metrics == 6003


def test_a_single_process_has_one_metrics_port() -> None:
    found = plan(metrics_port=6000)
    assert (found.broker, found.brokers, found.metrics) == (10911, (), 6000)


def all_ports(found: PortPlan) -> list[int]:
    brokers = [port for ports in found.brokers for port in ports]
    proxy = list(found.proxy or ())
    return [found.name_server, found.metrics, found.etcd, found.console, *brokers, *proxy]


def settle(found: PortPlan) -> PortPlan:
    return found.with_broker_ports().with_proxy_ports().with_console_port()


def test_free_ports_of_children_differ_and_leave_room() -> None:
    found = plan(4, name_server=9876, listen_port=0, metrics_port=0, proxy_port=0)
    assert 0 in all_ports(found)
    settled = settle(found)
    ports = sorted(port for port in all_ports(settled) if port)
    assert len(ports) == len(all_ports(settled)) - 1, "this process listens at 0 by itself"
    assert all(after - before > 1 for before, after in pairwise(ports))
    assert settle(settled) == settled


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"name_server": 10911},
            "the port 10911 would be used by both the name server and the broker. "
            "Choose another --nameserver-port or --broker-port",
        ),
        ({"brokers": 2, "name_server": 10921}, "both the name server and broker-b"),
        ({"replicas": 2, "name_server": 10912}, "broker-1 (its port for slaves)"),
        ({"proxy_port": 9876}, "Choose another --nameserver-port or --proxy-port"),
        ({"brokers": 2, "proxy_port": 10921}, "both broker-b and the proxy"),
    ],
)
def test_two_servers_at_one_port_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        plan(**options)
    assert said in str(error.value)


def test_a_metrics_port_that_a_server_needs_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    found = plan(2, metrics_port=10910)
    assert found.metrics == 10910
    assert [ports.metrics for ports in found.brokers] == [0, 10912]
    assert "port 10911 cannot be used for the metrics of broker-a: it is used by broker-a." in (
        caplog.text
    )
    assert "--metrics-port" in caplog.text
    caplog.clear()
    assert plan(2, metrics_port=10910, metrics_enable=False).metrics == 10910
    assert not caplog.text


def test_no_metrics_port_exceeds_65535(caplog: pytest.LogCaptureFixture) -> None:
    found = plan(2, metrics_port=PORT_MAX - 1)
    assert [ports.metrics for ports in found.brokers] == [PORT_MAX, 0]
    assert "the highest port is 65535" in caplog.text


PORT = st.one_of(st.just(0), st.integers(8070, 8100))


@given(PORT, PORT, PORT, PORT, st.integers(1, 4), st.booleans())
def test_a_plan_has_no_port_twice(
    name_server: int, broker: int, proxy: int, metrics: int, count: int, replicas: bool
) -> None:
    kind = {"replicas": count + 1} if replicas else {"brokers": count}
    try:
        found = plan(
            **kind,
            name_server=name_server,
            listen_port=broker,
            proxy_port=proxy,
            metrics_port=metrics,
        )
    except ConfigurationError:
        return
    ports = [port for port in all_ports(found) if port]
    assert len(set(ports)) == len(ports)
    settled = [port for port in all_ports(settle(found)) if port]
    assert len(set(settled)) == len(settled)
    assert set(ports) <= set(settled)


# ----------------------------------------------- what the proxy takes from the broker's file

FILE = """
metricsExporterType = DISABLE
metricsPromExporterHost = 127.0.0.2
sluiceOtlpEndpoint = http://collector:4318
sluiceOtlpHeaders = key:secret
tls.server.mode = enforcing
tls.server.certPath = /etc/cert.pem
sluiceConnectionsMax = 77
sluiceProtectedMode = false
"""


def test_a_proxy_process_inherits_the_settings_of_its_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, _, warnings = load_broker_config(FILE)
    assert not [text for text in warnings if "not a known key" in text]
    for name, value in inherited_environment(config).items():
        monkeypatch.setenv(name, value)
    settings = inherited_settings()
    assert inherited_settings() == {}, "they are removed from the environment"
    proxy, _ = load_proxy_config("", overrides=settings)
    for name in (
        "metrics_enable",
        "metrics_host",
        "otlp_endpoint",
        "otlp_headers",
        "tls_mode",
        "tls_certificate",
        "connections_max",
        "protected_mode",
    ):
        assert getattr(proxy, name) == getattr(config, name), name
        assert getattr(proxy, name) != getattr(BrokerConfig(), name), name


def test_defaults_and_options_of_the_command_are_not_inherited() -> None:
    assert inherited_environment(BrokerConfig()) == {}
    config = replace(BrokerConfig(), bind_address="::1", listen_port=1, acl_enable=True)
    assert inherited_environment(config) == {}


def test_an_invalid_environment_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "[1]")
    with pytest.raises(ConfigurationError, match=VARIABLE):
        inherited_settings()
