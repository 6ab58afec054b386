"""Metrics that leave by OTLP are those of `/metrics`."""

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from otlp_receiver import Receiver, attributes_of
from simulation.stepped import SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.broker.metrics import BrokerCollector
from sluicemq.config import BrokerConfig, load_broker_config
from sluicemq.errors import ConfigurationError
from sluicemq.telemetry.otlp import MetricsPusher, export
from sluicemq.testing.embedded import embedded
from waiting import limit

Found = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().running() as found:
        yield found


def shown(collector: Any) -> tuple[Found, set[str]]:
    """Values of `/metrics` by name and labels, and the names of its counters."""
    registry = CollectorRegistry()
    registry.register(collector)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    values = {
        (one.name, frozenset(one.labels.items())): one.value
        for family in families
        for one in family.samples
    }
    return values, {f"{family.name}_total" for family in families if family.type == "counter"}


def pushed(request: Any) -> tuple[Found, set[str]]:
    """The same of a request, its histograms as Prometheus lays them out."""
    values: Found = {}
    counters = set()
    (scope,) = request.resource_metrics[0].scope_metrics
    for metric in scope.metrics:
        kind = metric.WhichOneof("data")
        data = getattr(metric, kind)
        if kind == "sum":
            assert data.is_monotonic
            counters.add(metric.name)
        for point in data.data_points:
            labels = attributes_of(point.attributes)
            if kind != "histogram":
                values[metric.name, frozenset(labels.items())] = point.as_double
                continue
            key = frozenset(labels.items())
            values[f"{metric.name}_sum", key] = point.sum
            values[f"{metric.name}_count", key] = point.count
            seen = 0
            bounds = [*map(str, point.explicit_bounds), "+Inf"]
            for bound, count in zip(bounds, point.bucket_counts, strict=True):
                seen += count
                values[f"{metric.name}_bucket", frozenset({*key, ("le", bound)})] = seen
    return values, counters


def test_names_labels_and_values_are_those_of_the_page(
    broker: SteppedBroker, client: SteppedClient, receiver: Receiver
) -> None:
    for number in range(4):
        tag = "AB"[number % 2]
        fields = send_fields(properties=f"UNIQ_KEY\x01X\x02TAGS\x01{tag}\x02")
        client.call(310, fields, b"x" * 1000 * number)
    client.call(11, pull_fields(subscription="A"))
    collector = BrokerCollector(lambda: broker.core)
    config = BrokerConfig(
        otlp_endpoint=receiver.url, otlp_headers="api-key:secret, team:a", otlp_interval_ms=20
    )
    push = MetricsPusher(collector.collect, config, "broker", "broker-a")
    push.start()
    path, headers, request = receiver.take()
    push.close()
    assert path == "/v1/metrics"
    assert (headers["api-key"], headers["team"]) == ("secret", "a")
    values, counters = pushed(request)
    expected, expected_counters = shown(collector)
    assert values.keys() == expected.keys()
    moving = {"rocketmq_storage_message_reserve_time"}
    assert not {key for key in values if values[key] != expected[key] and key[0] not in moving}
    assert counters >= {"rocketmq_messages_in_total", "sluicemq_transactions_checks_total"}
    assert counters == expected_counters & {name for name, _ in values}
    resource = attributes_of(request.resource_metrics[0].resource.attributes)
    assert resource["service.name"] == "sluicemq-broker"
    assert resource["service.instance.id"] == "broker-a"


def test_an_endpoint_that_is_down_is_a_line_once_and_so_is_its_return(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rounds: list[threading.Event] = [threading.Event() for _ in range(4)]
    calls = 0

    def collect() -> Iterator[Any]:
        nonlocal calls
        rounds[min(calls, 3)].set()
        calls += 1
        return iter(())

    receiver.answers[0] = 400  # an error that the exporter does not try again
    config = BrokerConfig(otlp_endpoint=receiver.url, otlp_interval_ms=5)
    push = MetricsPusher(collect, config, "broker", "broker-a")
    push.start()
    assert rounds[3].wait(limit(20)), "it goes on trying"
    receiver.answers[0] = 200
    receiver.take()
    receiver.take()
    push.close()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2
    assert "Pushing metrics by OTLP failed" in said[0]
    assert "400" in said[0]
    assert said[1] == "The OTLP endpoint accepts metrics again."


def test_a_push_that_nobody_takes_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluicemq.telemetry.otlp.CLOSE_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        began = threading.Event()

        def collect() -> Iterator[Any]:
            began.set()
            return iter(())

        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        config = BrokerConfig(otlp_endpoint=url, otlp_interval_ms=1)
        push = MetricsPusher(collect, config, "broker", "broker-a")
        push.start()
        assert began.wait(limit(20))
        push.close()
        push._thread.join(limit(20))
        assert not push._thread.is_alive()


def test_the_reason_is_what_was_logged_first_and_the_log_has_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Exporter:
        def export(self, _: object) -> SimpleNamespace:
            logging.getLogger(__name__).warning("refused, retrying in %d s", 1)
            logging.getLogger(__name__).error("gave up")
            return SimpleNamespace(name="FAILURE")

    assert export(Exporter(), None) == "refused, retrying in 1 s"
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "variables", "words"),
    [
        (BrokerConfig(otlp_endpoint="collector:4318"), {}, "http://HOST:4318"),
        (BrokerConfig(otlp_enable=True, otlp_headers="secret"), {}, "name:value"),
        (BrokerConfig(otlp_enable=True), {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "4318"),
        (BrokerConfig(otlp_enable=True), {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"}, "4318"),
    ],
)
def test_what_cannot_be_pushed_says_what_to_write(
    config: BrokerConfig,
    variables: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=words) as raised:
        MetricsPusher(list, config, "broker", "broker-a")
    assert "secret" not in str(raised.value)


def test_a_missing_package_is_said_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    monkeypatch.delitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", raising=False)
    with pytest.raises(ConfigurationError, match="otlp"):
        MetricsPusher(list, BrokerConfig(otlp_enable=True), "broker", "broker-a")


def test_grpc_is_refused_with_the_setting_to_use_instead() -> None:
    with pytest.raises(ConfigurationError, match="sluiceOtlpEndpoint = http://HOST:4318"):
        load_broker_config("metricsExporterType = OTLP_GRPC\n")
    config, _, _ = load_broker_config(
        "sluiceOtlpEndpoint = http://c:4318\nmetricsGrpcExporterHeader = a:b\n"
        "metricGrpcExporterIntervalInMills = 5000\n"
    )
    assert (config.is_pushed, config.otlp_interval_ms) == (True, 5000)
    assert config.otlp_headers_parsed == {"a": "b"}


async def test_a_broker_pushes_and_says_farewell(receiver: Receiver) -> None:
    settings = {"sluiceOtlpEndpoint": receiver.url, "sluiceOtlpIntervalMs": "3600000"}
    async with embedded(settings=settings) as mq:
        await mq.send("T", b"x")
    _, _, request = receiver.take()
    assert "rocketmq_broker_permission" in {name for name, _ in pushed(request)[0]}
