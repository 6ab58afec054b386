"""Name servers over real sockets: registration by hand-made frames, fail-over, lost connections."""

import asyncio
import contextlib
import json
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sluicemq.config import NameServerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.nameserver.server import NameServer
from waiting import limit

TIMEOUT_S = 10


class RawClient:
    """Speaks the protocol with json and struct alone: our codec cannot agree with itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.opaque = 0

    async def ask(
        self, code: int, fields: dict[str, str] | None = None, body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        self.opaque += 1
        header = {
            "code": code,
            "language": "JAVA",
            "version": 479,
            "opaque": self.opaque,
            "flag": 0,
        }
        if fields is not None:
            header["extFields"] = fields
        text = json.dumps(header).encode()
        size = 4 + len(text) + len(body)
        self.writer.write(struct.pack(">ii", size, len(text)) + text + body)
        async with asyncio.timeout(limit(TIMEOUT_S)):
            (total,) = struct.unpack(">i", await self.reader.readexactly(4))
            data = await self.reader.readexactly(total)
        (length,) = struct.unpack(">i", data[:4])
        answer = json.loads(data[4 : 4 + length])
        assert answer["opaque"] == self.opaque
        return answer, data[4 + length :]

    async def register(self, broker: str, address: str, *topics: str) -> dict[str, Any]:
        table = {
            name: {
                "topicName": name, "readQueueNums": 4, "writeQueueNums": 4, "perm": 6,
                "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False,
            }
            for name in topics
        }  # fmt: skip
        version = {"counter": 1, "timestamp": 1, "stateVersion": 0}
        wrapper = {"dataVersion": version, "topicConfigTable": table}
        body = json.dumps({"topicConfigSerializeWrapper": wrapper, "filterServerList": []}).encode()
        fields = {
            "brokerName": broker, "brokerAddr": address, "clusterName": "c", "brokerId": "0",
            "haServerAddr": "127.0.0.1:1", "compressed": "false",
            "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF),
        }  # fmt: skip
        answer, _ = await self.ask(103, fields, body)
        return answer

    async def route(self, topic: str) -> dict[str, str] | None:
        """Broker name -> address of its master; None when there is no route."""
        answer, body = await self.ask(105, {"topic": topic})
        if answer["code"] == 17:
            return None
        assert answer["code"] == 0
        return {b["brokerName"]: b["brokerAddrs"]["0"] for b in json.loads(body)["brokerDatas"]}

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Network:
    """Name servers and connections that are closed at the end of a test."""

    def __init__(self, stack: contextlib.AsyncExitStack, directory: Path) -> None:
        self.stack, self.directory = stack, directory
        self.started = 0

    async def name_server(self, host: str = "127.0.0.1", port: int = 0) -> NameServer:
        self.started += 1
        path = self.directory / f"{self.started}" / "kvConfig.json"
        server = NameServer(
            NameServerConfig(bind_address=host, listen_port=port, kv_config_path=str(path))
        )
        await server.start()
        self.stack.push_async_callback(server.close)
        return server

    async def connect(self, server: NameServer, host: str = "127.0.0.1") -> RawClient:
        client = RawClient(*await asyncio.open_connection(host, server.port))
        self.stack.push_async_callback(client.close)
        return client


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    async with contextlib.AsyncExitStack() as stack:
        yield Network(stack, tmp_path)


async def test_a_broker_registers_with_two_name_servers_and_clients_fail_over(
    network: Network,
) -> None:
    first, second = await network.name_server(), await network.name_server()
    for server in (first, second):
        broker = await network.connect(server)
        answer = await broker.register("a", "127.0.0.1:10911", "T", "U")
        assert (answer["code"], answer["extFields"]) == (0, {})
    client = await network.connect(first)
    assert await client.route("T") == {"a": "127.0.0.1:10911"}
    await first.close()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await client.route("T")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", first.port)
    other = await network.connect(second)
    assert await other.route("T") == {"a": "127.0.0.1:10911"}


async def test_name_servers_know_nothing_of_each_other(network: Network) -> None:
    first, second = await network.name_server(), await network.name_server()
    broker = await network.connect(first)
    await broker.register("a", "127.0.0.1:10911", "T", "U")
    assert await (await network.connect(second)).route("T") is None


async def test_a_broker_whose_connection_breaks_is_removed_at_once(network: Network) -> None:
    server = await network.name_server()
    broker, client = await network.connect(server), await network.connect(server)
    await broker.register("a", "127.0.0.1:10911", "T", "U")
    assert await client.route("T") is not None
    broker.writer.transport.abort()
    async with asyncio.timeout(limit(TIMEOUT_S)):
        while await client.route("T") is not None:
            await asyncio.sleep(0)


async def test_a_broker_that_listens_everywhere_is_told_by_the_way_the_client_came_in(
    network: Network,
) -> None:
    server = await network.name_server("0.0.0.0")
    broker = await network.connect(server)
    await broker.register("a", "0.0.0.0:10911", "T", "U")
    for way in ("127.0.0.1", "127.0.0.2"):
        client = await network.connect(server, way)
        assert await client.route("T") == {"a": f"{way}:10911"}


async def test_a_port_in_use_is_an_error_that_names_it_and_the_cure(network: Network) -> None:
    server = await network.name_server()
    with pytest.raises(ConfigurationError, match=f"{server.port} is already in use") as caught:
        await network.name_server(port=server.port)
    assert caught.value.fix


async def test_bytes_that_are_not_the_protocol_close_the_connection_and_nothing_else(
    network: Network,
) -> None:
    server = await network.name_server()
    good, bad = await network.connect(server), await network.connect(server)
    bad.writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(limit(TIMEOUT_S)):
        assert await bad.reader.read() == b""
    assert (await good.ask(206))[1] == b'{"topicList":[]}'


async def test_closing_returns_when_all_connections_are_closed(network: Network) -> None:
    server = await network.name_server()
    clients = [await network.connect(server) for _ in range(5)]
    await asyncio.gather(*(client.ask(206) for client in clients))
    await server.close()
    for client in clients:
        async with asyncio.timeout(limit(TIMEOUT_S)):
            assert await client.reader.read() == b""
    await server.close()
