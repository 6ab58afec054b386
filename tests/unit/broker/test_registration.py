"""What name servers are told, and when."""

import logging
import zlib

import pytest

from simulation.stepped import SteppedBroker
from sluicemq.broker.registration import Registration
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConnectionLostError
from sluicemq.model.topic import TopicConfig
from sluicemq.wire import bodies
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.registration import RegisterBrokerRequest, decode_register_body
from sluicemq.wire.replicas import BrokerHeartbeatRequest

LOST = ConnectionLostError("Cannot connect to ns:9876: refused.")


def registering(**changes: object) -> tuple[SteppedBroker, Registration]:
    config = BrokerConfig(
        broker_name="broker-a",
        name_server_addresses=("one:9876", "two:9876"),
        **changes,  # type: ignore[arg-type]
    )
    broker = SteppedBroker(config=config)
    fields = {"sluiceAddressFixed": "true"}
    made = Registration(broker.settings, broker.core.topics, "10.0.0.1:10911", fields)
    return broker, made


def test_the_request_holds_every_topic_its_checksum_and_our_own_fields() -> None:
    broker, told = registering()
    request = told.prepare_registration(told.name_servers[0])()
    header = decode_header(RegisterBrokerRequest, request.fields)
    assert (header.broker, header.address, header.cluster) == (
        "broker-a", "10.0.0.1:10911", "DefaultCluster",
    )  # fmt: skip
    assert (header.ha_address, header.broker_id, header.compressed) == ("10.0.0.1:10912", 0, False)
    assert header.body_crc32 == zlib.crc32(request.body) & 0x7FFFFFFF
    assert (request.fields or {})["sluiceAddressFixed"] == "true"
    assert request.version >= 37
    table = decode_register_body(request.body).table
    assert table == broker.core.topics.snapshot()
    assert len(table.topics) >= 13


def test_a_broker_without_write_permission_says_so_in_its_topics() -> None:
    broker, told = registering()
    broker.core.topics.put(TopicConfig("T", 4, 4))
    broker.change(broker_permission=4)
    topics = decode_register_body(
        told.prepare_registration(told.name_servers[0])().body
    ).table.topics
    assert (topics["T"].perm, topics["TBW102"].perm) == (4, 5)
    assert broker.core.topics.table["T"].config.perm == 6


def test_every_name_server_is_told_at_once_and_then_each_period() -> None:
    _, told = registering()
    assert [server.address for server in told.find_due_servers(0.0)] == ["one:9876", "two:9876"]
    for server in told.name_servers:
        told.on_registered(server, Command(0), 0.0)
    assert told.find_due_servers(29.0) == []
    assert told.seconds_until_due(10.0) == pytest.approx(20.0)
    assert len(told.find_due_servers(30.0)) == 2


def test_a_slave_asks_every_second_until_a_name_server_knows_its_master() -> None:
    _, told = registering(broker_role="SLAVE", broker_id=1)
    found: list[tuple[str, str]] = []
    told.on_master = lambda address, ha_address: found.append((address, ha_address))
    one, two = told.name_servers
    knows = Command(0, {"masterAddr": "m:10911", "haServerAddr": "m:10912"})
    told.on_registered(two, knows, 0.0)
    for second in range(29):
        told.on_registered(one, Command(0, {}), float(second))
        assert told.seconds_until_due(second) == pytest.approx(1.0)
        assert told.find_due_servers(second + 1.0) == [one]
    told.on_registered(one, knows, 29.0)
    assert told.find_due_servers(29.9) == []
    assert told.find_due_servers(58.9) == [two]
    assert found == [("m:10911", "m:10912"), *[("", "")] * 29, ("m:10911", "m:10912")]


@pytest.mark.parametrize(
    "changes", [{}, {"consensus": "etcd://h:2379", "broker_id": 1}], ids=["master", "failover"]
)
def test_only_a_slave_by_its_file_looks_for_its_master(changes: dict[str, object]) -> None:
    _, told = registering(**changes)
    for server in told.name_servers:
        told.on_registered(server, Command(0, {}), 0.0)
    assert told.find_due_servers(29.0) == []


def test_one_that_is_not_there_is_tried_again_with_growing_pauses() -> None:
    _, told = registering()
    one, two = told.name_servers
    told.on_registered(two, Command(0), 1000.0)
    now, pauses = 0.0, []
    for _ in range(7):
        told.on_failure(one, LOST, now)
        pauses.append(told.seconds_until_due(now))
        now += pauses[-1]
        assert told.find_due_servers(now) == [one]
    assert pauses == [0.5, 1, 2, 4, 8, 10, 10]


def test_failure_and_return_are_said_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, told = registering()
    one = told.name_servers[0]
    for now in range(5):
        told.on_failure(one, LOST, now)
    told.on_registered(one, Command(0), 9.0)
    told.on_registered(one, Command(0), 40.0)
    said = [r.message for r in caplog.records if "one:9876" in r.message]
    assert len(said) == 2
    assert "refused" in said[0]
    assert "correct namesrvAddr" in said[0]
    assert "answers again" in said[1]


def test_ordered_topics_come_from_the_name_server() -> None:
    broker, told = registering()
    broker.core.topics.put(TopicConfig("T", 4, 4))
    body = bodies.encode_kv_table({"T": "broker-a:4"})
    told.on_registered(told.name_servers[0], Command(0, body=body), 0.0)
    assert broker.core.topics.table["T"].config.order
    told.on_registered(told.name_servers[0], Command(0, body=bodies.encode_kv_table({})), 1.0)
    assert not broker.core.topics.table["T"].config.order


def test_the_farewell_names_the_broker() -> None:
    _, told = registering()
    assert told.make_unregistration().fields == {
        "brokerName": "broker-a", "brokerAddr": "10.0.0.1:10911", "clusterName": "DefaultCluster",
        "brokerId": "0",
    }  # fmt: skip


def test_with_failover_the_epoch_stands_in_the_version_and_name_servers_hear_signs_of_life() -> (
    None
):
    _, told = registering(consensus="etcd://127.0.0.1:2379", broker_id=2)
    told.term_number = 7
    request = told.prepare_registration(told.name_servers[0])()
    assert decode_register_body(request.body).table.data_version.state_version == 7
    assert decode_header(RegisterBrokerRequest, request.fields).heartbeat_timeout_ms == 10_000
    assert told.sends_heartbeats
    beat = decode_header(BrokerHeartbeatRequest, told.make_heartbeat().fields)
    assert (beat.broker, beat.address, beat.broker_id) == ("broker-a", "10.0.0.1:10911", 0)


def test_without_replicas_that_wait_for_it_a_broker_says_no_more_than_before() -> None:
    _, told = registering()
    request = told.prepare_registration(told.name_servers[0])()
    assert "heartbeatTimeoutMillis" not in (request.fields or {})
    assert not told.sends_heartbeats
