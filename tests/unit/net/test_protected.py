"""Protected mode: which clients are local or refused, and which settings open a server."""

import asyncio
import logging
import socket
import struct

import pytest

from sluicemq.broker.registration import find_interface_addresses
from sluicemq.config import BrokerConfig, NameServerConfig, load_broker_config
from sluicemq.model.ids import Host
from sluicemq.net.accept import is_on_this_machine, log_protected_mode
from sluicemq.net.dispatch import UNKNOWN_HOST, Dispatcher, Peer
from sluicemq.net.limits import REFUSALS_MAX, ServerLimits
from sluicemq.net.server import RemotingServer
from sluicemq.wire.frames import FLAG_ONEWAY, Command, decode, encode


def ask(source: str, port: int, count: int = 1) -> list[Command]:
    """Send `count` requests at once, and read responses until there is one for each or the end."""
    with socket.create_connection(("127.0.0.1", port), 10, (source, 0)) as connection:
        connection.sendall(encode(Command(1, body=b"x")) * count)
        stream, answers = connection.makefile("rb"), []
        while len(answers) < count and (head := stream.read(4)):
            answers.append(decode(stream.read(struct.unpack(">i", head)[0])))
        return answers


async def served(limits: ServerLimits, source: str, count: int = 1) -> list[Command]:
    server = RemotingServer(Dispatcher({1: lambda *_: Command(0)}), limits=limits)
    await server.start("0.0.0.0", [0])
    try:
        return await asyncio.to_thread(ask, source, server.ports[0], count)
    finally:
        await server.close()


def outside() -> str:
    """An address that is not loopback: to a server at 127.0.0.1 it looks like another machine."""
    found = [
        one for one in find_interface_addresses() if not one.startswith("127.") and ":" not in one
    ]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


PROTECTED = ServerLimits(is_protected=True)


def test_a_stranger_is_told_what_to_do_and_this_machine_is_served() -> None:
    assert asyncio.run(served(PROTECTED, "127.0.0.1"))[0].code == 0
    answer = asyncio.run(served(PROTECTED, outside()))[0]
    assert answer.code == 16
    for fix in ("bindAddress", "--host", "aclEnable = true", "sluiceProtectedMode = false"):
        assert fix in (answer.remark or "")
    assert asyncio.run(served(ServerLimits(), outside()))[0].code == 0


def test_a_stranger_who_goes_on_asking_is_closed() -> None:
    assert len(asyncio.run(served(PROTECTED, outside(), REFUSALS_MAX))) == REFUSALS_MAX
    assert len(asyncio.run(served(PROTECTED, outside(), REFUSALS_MAX + 1))) == 0


def test_refusals_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def twice() -> None:
        server = RemotingServer(Dispatcher({}), limits=PROTECTED)
        await server.start("0.0.0.0", [0])
        for _ in range(2):
            await asyncio.to_thread(ask, outside(), server.ports[0])
        await server.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(twice())
    assert len([text for text in caplog.messages if "refusing the requests of" in text]) == 1


@pytest.mark.parametrize(
    ("remote", "local", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.6", "10.0.0.5", False),
        ("172.17.0.1", "172.17.0.2", False),
        ("fe80::1", "fe80::2", False),
    ],
)
def test_local_is_who_comes_from_an_address_of_this_machine(
    remote: str, local: str, expected: bool
) -> None:
    class Nothing:
        def write(self, data: bytes) -> None: ...
        def close(self) -> None: ...

    assert is_on_this_machine(Peer(Nothing(), Host(remote, 1), Host(local, 2))) is expected
    assert is_on_this_machine(Peer(Nothing(), UNKNOWN_HOST, UNKNOWN_HOST))


@pytest.mark.parametrize(
    ("text", "is_protected"),
    [
        ("", True),
        ("brokerIP1=10.0.0.5", True),
        ("tls.server.mode=enforcing", True),
        ("tls.server.need.client.auth=require", True),  # plain connections need no certificate
        ("bindAddress=0.0.0.0", False),
        ("bindAddress=127.0.0.1", False),
        ("aclEnable=true", False),
        ("sluiceProtectedMode=false", False),
        ("tls.server.mode=enforcing\ntls.server.need.client.auth=require", False),
    ],
)
def test_protected_is_what_nobody_has_opened(
    text: str, is_protected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config, _, _ = load_broker_config(text, environment={})
    assert config.is_protected is is_protected
    assert ServerLimits.from_config(config).is_protected is is_protected
    log_protected_mode(config)
    assert len(caplog.messages) == is_protected


def test_limits_are_those_of_the_settings() -> None:
    assert NameServerConfig().listen_address == BrokerConfig().listen_address == "0.0.0.0"
    config = BrokerConfig(connections_max=7, pending_bytes_max=8, write_buffer_bytes_max=9)
    limits = ServerLimits.from_config(config)
    assert (limits.connections_max, limits.pending_bytes_max) == (7, 8)
    assert limits.write_buffer_bytes_max == 9
    assert ServerLimits.from_config(NameServerConfig(frame_timeout_s=5)).frame_timeout_s == 5


def test_one_way_requests_of_strangers_get_no_answer() -> None:
    async def run() -> None:
        server = RemotingServer(Dispatcher({}), limits=PROTECTED)
        await server.start("0.0.0.0", [0])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.ports[0], local_addr=(outside(), 0)
        )
        writer.write(encode(Command(1, flag=FLAG_ONEWAY)) + encode(Command(1, opaque=7)))
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        assert decode(await reader.readexactly(size)).opaque == 7
        writer.close()
        await server.close()

    asyncio.run(run())
