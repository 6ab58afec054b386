"""The broker over real sockets, with real name servers and a real disk."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

import served
from simulation.stepped import pull_fields, send_fields
from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, NameServerConfig, StoreConfig
from sluicemq.errors import ConfigurationError, SluiceError, StoreDamagedError, StoreLockedError
from sluicemq.nameserver.server import NameServer
from sluicemq.net.channel import Channel, dial
from sluicemq.record.codec import decode_records
from sluicemq.wire.frames import Command
from waiting import limit, until


def store_config(path: Path, **changes: object) -> StoreConfig:
    made = StoreConfig(root=str(path / "store"), commit_log_file_bytes=1 << 20)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def broker_config(*name_servers: str, **changes: object) -> BrokerConfig:
    made = BrokerConfig(
        broker_name="broker-a",
        bind_address="127.0.0.1",
        listen_port=0,
        name_server_addresses=name_servers,
        metrics_enable=False,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def name_server(path: Path, port: int = 0) -> AsyncIterator[str]:
    server = NameServer(
        NameServerConfig(
            bind_address="127.0.0.1", listen_port=port, kv_config_path=str(path / "kv.json")
        )
    )
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.close()


def running(config: BrokerConfig, store: StoreConfig) -> AbstractAsyncContextManager[Broker]:
    return served.running(Broker(config, store))


async def call(
    channel: Channel, code: int, fields: dict[str, object] | None = None, body: bytes = b""
) -> Command:
    texts = None if fields is None else {name: str(value) for name, value in fields.items()}
    return await channel.call(Command(code, texts, body), 10.0)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Channel]:
    channel = await dial(address)
    try:
        yield channel
    finally:
        await channel.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


NEW = {
    "topic": "New", "defaultTopic": "TBW102", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6,
    "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false",
}  # fmt: skip


async def test_a_created_topic_is_routable_when_its_creation_is_answered(tmp_path: Path) -> None:
    async with (
        name_server(tmp_path) as names,
        running(broker_config(names), store_config(tmp_path)) as broker,
        connected(broker.address) as channel,
        connected(names) as asking,
    ):
        for number in range(20):
            topic = {"topic": f"New{number}"}
            assert (await call(channel, 17, NEW | topic)).code == 0
            assert (await call(asking, 105, dict(topic))).code == 0
        assert (await call(channel, 310, send_fields("ByItself"), b"x")).code == 0
        assert (await call(asking, 105, {"topic": "ByItself"})).code == 0
        table = tmp_path / "store/config/topics.json"
        await until(lambda: "New19" in table.read_text() and "ByItself" in table.read_text())


@pytest.mark.parametrize("sync", [False, True])
async def test_messages_go_round_and_survive_a_restart(tmp_path: Path, sync: bool) -> None:
    store = store_config(tmp_path, flush_sync=sync)
    async with (
        running(broker_config(), store) as broker,
        connected(broker.address) as producer,
        connected(broker.address) as consumer,
    ):
        await call(producer, 17, NEW)
        waiting = asyncio.ensure_future(call(consumer, 11, pull_fields("New", sysFlag=6)))
        await asyncio.sleep(0.05)
        sent = await asyncio.gather(
            *(call(producer, 310, send_fields("New"), f"{n}".encode()) for n in range(100))
        )
        assert [int((a.fields or {})["queueOffset"]) for a in sent] == list(range(100))
        first = decode_records((await waiting).body)
        assert first[0].body == b"0"
        await call(consumer, 11, pull_fields("New", offset=50, commitOffset=50, sysFlag=5))
    assert not (tmp_path / "store/abort").exists()
    async with running(broker_config(), store) as broker, connected(broker.address) as channel:
        answer = await call(channel, 11, pull_fields("New", offset=90))
        assert [m.body for m in decode_records(answer.body)] == [b"%d" % n for n in range(90, 100)]
        queue = {"consumerGroup": "G", "topic": "New", "queueId": 0}
        assert (await call(channel, 14, dict(queue))).fields == {"offset": "50"}


async def test_a_name_server_that_comes_later_hears_of_the_broker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = free_port()
    async with running(broker_config(f"127.0.0.1:{port}"), store_config(tmp_path)) as broker:
        assert broker.registration.name_servers[0].failures >= 1
        assert "correct namesrvAddr" in caplog.text
        async with name_server(tmp_path, port) as names:
            await until(lambda: broker.registration.name_servers[0].is_registered)
            async with connected(names) as asking:
                assert (await call(asking, 105, {"topic": "TBW102"})).code == 0
    assert "answers again" in caplog.text


async def test_a_name_server_that_restarts_is_told_again_at_once(tmp_path: Path) -> None:
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        async with name_server(tmp_path, port) as names:
            broker = await stack.enter_async_context(
                running(broker_config(names), store_config(tmp_path))
            )
        server = broker.registration.name_servers[0]
        await until(lambda: server.failures > 0)
        async with name_server(tmp_path, port) as names:
            await until(lambda: server.failures == 0)
            async with connected(names) as asking:
                assert (await call(asking, 105, {"topic": "TBW102"})).code == 0


async def test_a_broker_that_closes_leaves_the_routes_at_once(tmp_path: Path) -> None:
    async with name_server(tmp_path) as names, connected(names) as asking:
        async with running(broker_config(names), store_config(tmp_path)):
            assert (await call(asking, 105, {"topic": "TBW102"})).code == 0
        assert (await call(asking, 105, {"topic": "TBW102"})).code == 17


async def test_the_vip_port_serves_the_same_and_may_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with socket.socket() as taken:
        config = broker_config(listen_port=port)
        async with running(config, store_config(tmp_path)) as broker:
            async with connected(f"127.0.0.1:{port - 2}") as channel:
                assert (await call(channel, 28)).code == 0
            assert broker.address == f"127.0.0.1:{port}"
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port - 2))
        taken.listen()
        async with running(config, store_config(tmp_path)):
            assert "The VIP port" in caplog.text


async def test_metrics_are_served(tmp_path: Path) -> None:
    config = broker_config(metrics_enable=True, metrics_port=0)
    async with running(config, store_config(tmp_path)) as broker:
        await until(lambda: broker.metrics_port is not None)
        url = f"http://127.0.0.1:{broker.metrics_port}/metrics"

        def read() -> bytes:
            with urllib.request.urlopen(url, timeout=limit(5)) as answer:
                return bytes(answer.read())

        assert b"rocketmq_topic_number" in await asyncio.to_thread(read)


# ----------------------------------------------------------------------------- trouble at start


async def refused(config: BrokerConfig, store: StoreConfig) -> SluiceError:
    broker = Broker(config, store)
    with pytest.raises(SluiceError) as caught:
        await broker.start()
    assert caught.value.fix
    return caught.value


async def test_a_port_in_use_is_named_and_the_store_is_free_again(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = await refused(broker_config(listen_port=port), store_config(tmp_path))
        assert isinstance(error, ConfigurationError)
        assert str(port) in str(error)
    async with running(broker_config(), store_config(tmp_path)):
        pass


async def test_a_store_in_use_is_named(tmp_path: Path) -> None:
    async with running(broker_config(), store_config(tmp_path)):
        error = await refused(broker_config(), store_config(tmp_path))
        assert isinstance(error, StoreLockedError)
        assert str(tmp_path / "store") in str(error)


async def test_files_of_another_size_are_named(tmp_path: Path) -> None:
    store = store_config(tmp_path)
    async with running(broker_config(), store) as broker, connected(broker.address) as channel:
        await call(channel, 310, send_fields("BenchmarkTest"), b"x")
    changed = dataclasses.replace(store, commit_log_file_bytes=1 << 21)
    error = await refused(broker_config(), changed)
    assert isinstance(error, StoreDamagedError)
    assert "mappedFileSizeCommitLog" in str(error)


async def test_broken_tables_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "store/config"
    directory.mkdir(parents=True)
    (directory / "topics.json").write_text("{broken")
    assert "topics.json" in str(await refused(broker_config(), store_config(tmp_path)))


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = StoreConfig(root=str(tmp_path / "file/store"))
    assert str(tmp_path / "file") in str(await refused(broker_config(), store))


async def test_garbage_on_the_port_closes_that_connection_alone(tmp_path: Path) -> None:
    async with running(broker_config(), store_config(tmp_path)) as broker:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        async with connected(broker.address) as channel:
            assert (await call(channel, 28)).code == 0


async def test_what_a_broker_makes_is_its_owners_and_its_groups_alone(tmp_path: Path) -> None:
    """Messages are not for everybody on the machine. What was there keeps its mode."""
    before = os.umask(0)
    try:
        old = tmp_path / "store" / "config"
        old.mkdir(parents=True, mode=0o755)
        (old / "topics.json").write_text('{"topicConfigTable":{}}')
        (old / "topics.json").chmod(0o644)
        async with (
            name_server(tmp_path / "names") as address,
            running(broker_config(address), store_config(tmp_path)) as broker,
            connected(broker.address) as channel,
        ):
            fields = send_fields("t")
            assert (await call(channel, 310, fields, b"body")).code == 0
            await call(channel, 15, {"topic": "t", "queueId": 0, "consumerGroup": "g"})
    finally:
        os.umask(before)
    kept = {tmp_path / "store", old, old / "topics.json", old / "topics.json.bak"}
    made = [path for path in tmp_path.rglob("*") if path not in kept]
    assert len(made) > 10
    modes = {path: oct(path.stat().st_mode & 0o777) for path in made}
    wide = {path: mode for path, mode in modes.items() if mode not in ("0o640", "0o750", "0o600")}
    assert not wide
    assert (old / "topics.json").stat().st_mode & 0o777 == 0o644
