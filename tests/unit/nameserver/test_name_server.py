"""The name server as a whole, without sockets: time and lost connections."""

import asyncio
from pathlib import Path

import pytest

from sluicemq.config import NameServerConfig
from sluicemq.model.ids import Host
from sluicemq.nameserver.server import NameServer
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.network import MemoryNetwork
from sluicemq.wire.frames import FLAG_ONEWAY, Command, decode, encode
from sluicemq.wire.registration import RegisterBody, encode_register_body
from sluicemq.wire.tables import TopicTable


class Wire:
    """What is under a connection: remembers that it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes, /) -> None:
        raise AssertionError(data)

    def close(self) -> None:
        self.closed = True


class HandClock:
    """A wall clock that jumps, and a steady one that is moved by hand."""

    def __init__(self) -> None:
        self.wall_ms = 1_700_000_000_000
        self.steady_s = 1000.0

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_s(self) -> float:
        return self.steady_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def server(tmp_path: Path, clock: HandClock) -> NameServer:
    return NameServer(NameServerConfig(kv_config_path=str(tmp_path / "kv.json")), clock=clock)


def connect() -> tuple[Peer, Wire]:
    wire = Wire()
    return Peer(wire, Host("127.0.0.1", 40000), Host("127.0.0.1", 9876)), wire


def ask(server: NameServer, peer: Peer, command: Command) -> Command:
    used, answer = server.dispatcher.handle_frames(encode(command), peer)
    assert used
    return decode(answer[4:])


def register(server: NameServer, peer: Peer, **changes: str) -> Command:
    fields = {
        "brokerName": "a", "brokerAddr": "127.0.0.1:1", "clusterName": "c", "haServerAddr": "x",
        "brokerId": "0", "heartbeatTimeoutMillis": "10000",
    } | changes  # fmt: skip
    from sluicemq.model.topic import TopicConfig

    body = encode_register_body(RegisterBody(TopicTable({"T": TopicConfig("T")})))
    return ask(server, peer, Command(103, fields, body))


def route_code(server: NameServer) -> int:
    return ask(server, connect()[0], Command(105, {"topic": "T"})).code


def test_a_silent_broker_is_removed_and_its_connection_closed(
    server: NameServer, clock: HandClock
) -> None:
    peer, wire = connect()
    register(server, peer)
    clock.steady_s += 10
    server.remove_expired()
    assert (route_code(server), wire.closed) == (0, False)
    clock.steady_s += 0.002
    server.remove_expired()
    assert (route_code(server), wire.closed) == (17, True)


def test_a_wall_clock_that_jumps_removes_nobody(server: NameServer, clock: HandClock) -> None:
    register(server, connect()[0])
    clock.wall_ms += 10**9
    server.remove_expired()
    assert route_code(server) == 0


def test_a_closed_connection_removes_its_broker_at_once(server: NameServer) -> None:
    peer, _ = connect()
    register(server, peer)
    other, _ = connect()
    register(server, other, brokerName="b", brokerAddr="127.0.0.1:2")
    server.on_disconnect(peer)
    assert [data.broker for data in server.requests.table.list_brokers()] == ["b"]


def test_an_unknown_request_gets_the_standard_answer(server: NameServer) -> None:
    answer = ask(server, connect()[0], Command(9999, opaque=7))
    assert (answer.code, answer.remark) == (3, " request type 9999 not supported")
    assert answer.opaque == 7


def test_a_header_that_lacks_a_field_is_answered_and_the_connection_stays(
    server: NameServer,
) -> None:
    peer, wire = connect()
    answer = ask(server, peer, Command(105, {}))
    assert answer.code == 1
    assert "topic" in (answer.remark or "")
    assert wire.closed is False


def test_a_one_way_heartbeat_gets_no_answer(server: NameServer) -> None:
    fields = {"brokerName": "a", "brokerAddr": "127.0.0.1:1", "clusterName": "c"}
    frame = encode(Command(904, fields, flag=FLAG_ONEWAY))
    assert server.dispatcher.handle_frames(frame, connect()[0]) == (len(frame), b"")


async def test_replicas_are_told_who_is_the_smallest(tmp_path: Path, clock: HandClock) -> None:
    network = MemoryNetwork()
    heard: list[Command] = []
    config = NameServerConfig(
        kv_config_path=str(tmp_path / "kv.json"), bind_address="127.0.0.1", listen_port=0,
        notify_smallest_id=True,
    )  # fmt: skip
    server = NameServer(config, clock=clock, network=network)
    slave = network.listener(Dispatcher({905: lambda command, _peer: heard.append(command)}))
    await server.start()
    await slave.start("127.0.0.1", [7])
    peer, _ = connect()
    register(server, peer, enableActingMaster="true")
    for broker_id, port in (("1", "7"), ("2", "8")):
        acting = {"enableActingMaster": "true", "brokerAddr": f"127.0.0.1:{port}"}
        register(server, connect()[0], brokerId=broker_id, **acting)
    server.on_disconnect(peer)
    for _ in range(20):
        await asyncio.sleep(0)
    said = {
        "minBrokerId": "1", "minBrokerAddr": "127.0.0.1:7", "offlineBrokerAddr": "127.0.0.1:1",
    }  # fmt: skip
    assert [(command.fields, command.is_oneway) for command in heard] == [(said, True)]
    await slave.close()
    await server.close()


def test_a_name_server_that_hangs_is_unhealthy(server: NameServer, clock: HandClock) -> None:
    clock.steady_s += 34  # its loop turns every five seconds at least
    assert server.unhealthy() == []
    clock.steady_s += 2
    assert "has not run for 31 s" in server.unhealthy()[0]


def test_it_is_not_ready_while_routes_are_refused(tmp_path: Path, clock: HandClock) -> None:
    config = NameServerConfig(
        kv_config_path=str(tmp_path / "kv.json"), wait_for_service=True, wait_for_service_s=10
    )
    server = NameServer(config, clock=clock)
    assert "10000 ms" in server.unready()[0]
    assert route_code(server) == 1
    clock.steady_s += 10
    assert server.unready() == []
    assert route_code(server) == 17


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, False),  # protected mode serves this machine alone
        ({"bind_address": "127.0.0.1"}, False),
        ({"bind_address": "0.0.0.0"}, True),
        ({"protected_mode": False}, True),
        ({"bind_address": "10.1.2.3"}, True),
        ({"bind_address": "0.0.0.0", "acl_enable": True}, False),
        (
            {"bind_address": "0.0.0.0", "tls_mode": "enforcing", "tls_client_auth": "require"},
            False,
        ),
        ({"bind_address": "0.0.0.0", "tls_mode": "enforcing"}, True),
    ],
)
async def test_an_unprotected_name_server_that_others_reach_says_so(
    settings: dict[str, object], warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = tmp_path / "plain_acl.yml"
    rules.write_text("accounts:\n- accessKey: account1\n  secretKey: secret-of-it\n")
    config = NameServerConfig(
        kv_config_path=str(tmp_path / "kv.json"), acl_files=(str(rules),), **settings
    )  # type: ignore[arg-type]
    server = NameServer(config, network=MemoryNetwork())
    await server.start()
    await server.close()
    assert ("can register a broker" in caplog.text) is warns


async def test_a_sweep_and_a_look_at_the_rules_that_fail_are_tried_again(
    server: NameServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(server.requests.table, "find_expired", broken)
    for _ in range(3):
        server._sweep()
    assert server._timer is not None
    await server.close()
    assert caplog.text.count("Background job 'broker expiry' failed") == 1
