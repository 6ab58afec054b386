"""Our own name servers and brokers, the production classes on real sockets, on a thread."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluicemq.broker.server import Broker
from sluicemq.config import NameServerConfig, load_broker_config
from sluicemq.nameserver.server import NameServer
from waiting import limit


class Servers:
    """Name servers and brokers, started and stopped from the test's thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.name_servers: list[NameServer] = []
        self.brokers: dict[str, Broker] = {}

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(limit(20))

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{server.port}" for server in self.name_servers]

    def add_name_server(self) -> None:
        index = len(self.name_servers)
        root = self._directory / f"names-{index}"
        config = NameServerConfig(
            bind_address="127.0.0.1",
            listen_port=0,
            kv_config_path=str(root / "kv.json"),
            config_path=str(root / "names.properties"),
        )
        server = NameServer(config)
        self.run(server.start())
        self.name_servers.append(server)

    def start_broker(self, name: str = "broker-a", port: int = 0, **keys: str) -> Broker:
        settings = {
            "brokerName": name,
            "bindAddress": "127.0.0.1",
            "listenPort": str(port),
            "namesrvAddr": ";".join(self.addresses),
            "storePathRootDir": str(self._directory / name),
            "mapedFileSizeCommitLog": str(16 * 1024 * 1024),
            "mapedFileSizeConsumeQueue": "200000",
            **keys,
        }
        config, store, _ = load_broker_config("", overrides=settings)
        broker = Broker(config, store)
        self.run(broker.start())
        self.brokers[name] = broker
        return broker

    def stop_broker(self, name: str = "broker-a") -> int:
        """Stops it in order; the port it had."""
        broker = self.brokers.pop(name)
        port = broker.port
        self.run(broker.close())
        return port

    def close(self) -> None:
        for name in list(self.brokers):
            self.stop_broker(name)
        for server in self.name_servers:
            self.run(server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(limit(10))
        self._loop.close()


@pytest.fixture
def empty_cluster(tmp_path: Path) -> Iterator[Servers]:
    """One name server, no broker yet."""
    servers = Servers(tmp_path)
    servers.add_name_server()
    yield servers
    servers.close()


@pytest.fixture
def cluster(empty_cluster: Servers) -> Servers:
    """One name server, one broker."""
    empty_cluster.start_broker()
    return empty_cluster
