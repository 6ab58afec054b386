"""What Prometheus reads."""

import errno
import logging
import socket
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from simulation.lanes import ModelConsumer, Shared, balance
from simulation.pops import POP, ack, fill, handles, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.broker.admin.status import CounterHistory, MidnightCounters
from sluicemq.broker.metrics import (
    BrokerCollector,
    find_health_problems,
    find_readiness_problems,
)
from sluicemq.broker.registration import NameServerState
from sluicemq.config import BrokerConfig
from sluicemq.errors import StoreError
from sluicemq.model.subscription import TAG
from sluicemq.telemetry.metrics import serve_metrics
from sluicemq.testing.embedded import embedded
from waiting import limit

NODE = {"cluster": "DefaultCluster", "node_type": "broker", "node_id": "broker-a"}


def samples(broker: SteppedBroker) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    registry = CollectorRegistry()
    registry.register(BrokerCollector(lambda: broker.core))
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(broker: SteppedBroker, name: str, **labels: str) -> float:
    return samples(broker)[name, frozenset((NODE | labels).items())]


def test_traffic_is_counted_under_rocketmqs_names(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    for number in range(4):
        tag = "AB"[number % 2]
        client.call(310, send_fields(properties=f"UNIQ_KEY\x01X\x02TAGS\x01{tag}\x02"), b"x")
    client.call(310, send_fields(properties="UNIQ_KEY\x01X\x02__SHARDINGKEY\x01k\x02"), b"x")
    client.call(11, pull_fields(subscription="A"))
    flags = {"topic": "T", "is_retry": "false", "is_system": "false"}
    assert value(broker, "rocketmq_messages_in_total", message_type="normal", **flags) == 4
    assert value(broker, "rocketmq_messages_in_total", message_type="fifo", **flags) == 1
    assert value(broker, "rocketmq_throughput_in_total", message_type="normal", **flags) == (
        broker.store.written_offset
    )
    assert value(broker, "rocketmq_messages_out_total", consumer_group="G", **flags) == 2
    assert value(broker, "rocketmq_throughput_out_total", consumer_group="G", **flags) > 200
    assert value(broker, "sluicemq_messages_filtered_total", consumer_group="G", **flags) == 3


def test_pops_are_counted_under_rocketmqs_names(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 3)
    held = handles(client.call(POP, pop_fields(broker)))
    ack(client, held[0])
    pair = {"topic": "T", "consumer_group": "G"}
    flags = {"is_retry": "false", "is_system": "false"}
    stored = "rocketmq_pop_revive_in_message_total"
    for kind in ("CK", "ACK"):
        labels = pair | {"revive_message_type": kind, "put_status": "PUT_OK"}
        assert value(broker, stored, **labels) == 1
    assert value(broker, "rocketmq_consumer_inflight_messages", **pair, **flags) == 2
    assert value(broker, "rocketmq_consumer_lag_messages", **pair, **flags) == 2
    assert value(broker, "rocketmq_messages_out_total", **pair, **flags) == 3
    assert value(broker, "rocketmq_pop_checkpoint_buffer_size") == 1
    broker.run(61)
    revived = "rocketmq_pop_revive_retry_messages_total"
    assert value(broker, revived, **pair, put_status="PUT_OK") == 2
    assert value(broker, "rocketmq_pop_checkpoint_buffer_size") == 0


def test_what_is_pulled_and_not_committed_is_in_flight(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 3)
    client.call(11, pull_fields(commitOffset=1, sysFlag=5))
    labels = {"topic": "T", "consumer_group": "G", "is_retry": "false", "is_system": "false"}
    assert value(broker, "rocketmq_consumer_inflight_messages", **labels) == 2


def test_lag_is_what_was_not_committed(broker: SteppedBroker, client: SteppedClient) -> None:
    for _ in range(5):
        client.call(310, send_fields(), b"x")
    client.call(11, pull_fields(commitOffset=2, sysFlag=5))
    labels = {"topic": "T", "consumer_group": "G", "is_retry": "false", "is_system": "false"}
    assert value(broker, "rocketmq_consumer_lag_messages", **labels) == 3


def test_lanes_are_counted_and_what_none_of_them_wants(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    shared = Shared("G")
    consumers = [
        ModelConsumer(broker, shared, tag, {"T": (TAG, tag)}, 1) for tag in ("tag1", "tag2")
    ]
    balance(consumers)
    for tag in ("tag1", "tag2", "tag3", "tag3"):
        client.call(310, send_fields(properties=f"UNIQ_KEY\x01{tag}\x02TAGS\x01{tag}\x02"), b"x")
    for consumer in consumers:
        for queue in list(consumer.readings):
            consumer.pull(queue)
            consumer.finish(queue, len(consumer.readings[queue].in_hand))
            consumer.pull(queue)
        consumer.commit()
    for _ in range(3):
        broker.pass_seconds(1)
    assert value(broker, "sluicemq_group_lanes", consumer_group="G") == 2
    assert value(broker, "sluicemq_lane_messages_unmatched_total", consumer_group="G") == 2


def test_state_is_shown(broker: SteppedBroker, client: SteppedClient) -> None:
    client.call(310, send_fields(), bytes(2000))
    client.feed(client.request(11, pull_fields(offset=1, sysFlag=6)))
    assert value(broker, "rocketmq_storage_size") == broker.store.written_offset
    assert value(broker, "rocketmq_broker_permission") == 6
    assert value(broker, "rocketmq_topic_number") == len(broker.core.topics)
    assert value(broker, "rocketmq_processor_watermark", processor="pull") == 1
    assert value(broker, "rocketmq_message_size_bucket", le="1024.0") == 0
    assert value(broker, "rocketmq_message_size_bucket", le="4096.0") == 1
    assert value(broker, "rocketmq_message_size_count") == 1
    assert value(broker, "sluicemq_send_latency_seconds_count") == 1


def test_the_port_serves_and_closes(broker: SteppedBroker) -> None:
    opened = serve_metrics(BrokerCollector(lambda: broker.core), BrokerConfig(metrics_port=0))
    assert opened is not None
    port, close = opened
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=limit(5)) as answer:
        assert b"rocketmq_topic_number" in answer.read()
    close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_in_the_place_of_a_port_in_use_a_free_one_is_taken_and_said(
    broker: SteppedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        caplog.set_level(logging.WARNING)
        opened = serve_metrics(
            BrokerCollector(lambda: broker.core), BrokerConfig(metrics_port=port)
        )
    assert opened is not None
    found, close = opened
    close()
    assert found not in (0, port)
    assert f"port {port} is in use: serving metrics on the free port {found}. " in caplog.text
    assert "--metrics-port" in caplog.text


def test_without_an_address_of_this_machine_there_are_no_metrics(
    broker: SteppedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    config = BrokerConfig(metrics_host="192.0.2.1", metrics_port=0)
    assert serve_metrics(BrokerCollector(lambda: broker.core), config) is None
    assert "not serving metrics: cannot open port 0" in caplog.text


def test_rates_are_differences_of_samples() -> None:
    rates = CounterHistory()
    assert rates.compute_rate("put", 10) == 0.0
    for second in range(100):
        rates.sample(second, {"put": second * 5 if second < 90 else 450 + (second - 90) * 100})
    assert rates.compute_rate("put", 10) == pytest.approx(95, abs=6)
    assert 0 < rates.compute_rate("put", 600) < 20
    assert rates.compute_rate("unknown", 10) == 0.0


def test_the_first_day_has_no_morning_before_it() -> None:
    days = MidnightCounters()
    days.sample(0, {"put": 5})
    assert (days.today_start, days.yesterday_start) == ({}, {})
    days.sample(86_400_000, {"put": 9})
    assert days.today_start == {"put": 9}


def test_probes_say_what_is_amiss(broker: SteppedBroker) -> None:
    amiss: list[str] = []
    config = BrokerConfig(metrics_port=0)
    opened = serve_metrics(BrokerCollector(lambda: broker.core), config, readiness=lambda: amiss)
    assert opened is not None
    port, close = opened

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}{path}", timeout=limit(5)
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    assert get("/health") == get("/ready") == (200, "ok\n")
    amiss.append("the disk is full.")
    assert get("/ready") == (503, "the disk is full.\n")
    assert get("/health")[0] == 200
    close()


def test_a_loop_that_hangs_is_unhealthy(broker: SteppedBroker) -> None:
    broker.core.run_every_second()
    assert find_health_problems(broker.core) == []
    broker.clock.advance(31)
    assert "31 s" in find_health_problems(broker.core)[0]


def test_a_store_that_refuses_all_writes_fails_both_probes_and_the_metric(
    broker: SteppedBroker,
) -> None:
    registration = SimpleNamespace(name_servers=[])
    broker.core.run_every_second()
    assert (
        find_health_problems(broker.core)
        == find_readiness_problems(broker.core, registration)
        == []
    )  # type: ignore[arg-type]
    assert value(broker, "sluicemq_store_failed") == 0
    broker.connect().call(310, send_fields(), b"x")
    broker.files.fail_next("sync", errno.EIO, path_part="commitlog")
    with pytest.raises(StoreError):
        broker.store.sync()
    for reasons in (
        find_health_problems(broker.core),
        find_readiness_problems(broker.core, registration),
    ):  # type: ignore[arg-type]
        assert "refuses all writes" in reasons[0]
        assert "Input/output error" in reasons[0]
        assert "restart the broker" in reasons[0]
    assert value(broker, "sluicemq_store_failed") == 1


async def test_a_broker_between_two_roles_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluicemq.telemetry.health.LOOP_STALL_S", -1.0)
    async with embedded() as mq:
        broker = mq.servers.broker
        broker.core.run_every_second()
        assert find_health_problems(broker.core)
        await broker.close()
        assert find_health_problems(broker.core) == []


def test_a_broker_that_clients_cannot_find_or_use_is_not_ready(
    broker: SteppedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = NameServerState("one:1", is_registered=True)
    registration = SimpleNamespace(name_servers=[known, NameServerState("two:2", failures=3)])
    assert find_readiness_problems(broker.core, registration) == []  # type: ignore[arg-type]
    known.failures = 1
    assert "registration" in find_readiness_problems(broker.core, registration)[0]  # type: ignore[arg-type]
    monkeypatch.setattr(type(broker.store.retention), "is_refusing_sends", True)
    assert "disk is full" in find_readiness_problems(broker.core, registration)[0]  # type: ignore[arg-type]


def test_slow_requests_are_logged_as_long_as_the_setting_says(
    broker: SteppedBroker, client: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    shares, peer = broker.core.scheduler, client.peer
    begin_s = broker.clock.monotonic_s()
    broker.clock.advance(1.5)
    with caplog.at_level(logging.WARNING, "sluicemq.slow"):
        shares.spent(peer, begin_s, 11)
        assert f"request 11 of {peer!r}: 1500 ms" in caplog.text
        caplog.clear()
        broker.change(slow_request_ms=2000)
        shares.spent(peer, begin_s, 11)
        broker.change(slow_request_ms=0)
        broker.clock.advance(100)
        shares.spent(peer, begin_s, 11)
    assert not caplog.text
