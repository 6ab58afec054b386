"""The slave of a dead master stands in for it, over real sockets and disks."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from served import NEW_TOPIC, call
from sluicemq.broker.replication.sides import SlaveSide
from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, NameServerConfig, StoreConfig
from sluicemq.nameserver.server import NameServer
from waiting import until

DELAY_S = 3.0


class Cluster:
    """A name server; brokers by name, that can be started again."""

    def __init__(self, path: Path, stack: contextlib.AsyncExitStack) -> None:
        self._path, self._stack = path, stack
        self._ports: dict[str, int] = {}
        self.running: dict[str, Broker] = {}

    async def start(self) -> None:
        config = NameServerConfig(
            bind_address="127.0.0.1", listen_port=0, kv_config_path=str(self._path / "kv.json"),
            acting_master_support=True, notify_smallest_id=True,
        )  # fmt: skip
        self.names = NameServer(config)
        await self.names.start()
        self._stack.push_async_callback(self.names.close)
        self._stack.push_async_callback(self.end)

    async def broker(self, name: str, **changes: object) -> Broker:
        config = {
            "broker_name": "broker-a", "bind_address": "127.0.0.1", "metrics_enable": False,
            "listen_port": self._ports.get(name, 0), "ha_port": 0, "acting_master": True,
            "remote_escape": True,
            "name_server_addresses": (f"127.0.0.1:{self.names.port}",), "ha_heartbeat_ms": 300,
            "members_period_ms": 200,
        } | changes  # fmt: skip
        store = StoreConfig(root=str(self._path / name), commit_log_file_bytes=1 << 20)
        broker = Broker(BrokerConfig(**config), store)  # type: ignore[arg-type]
        await broker.start()
        self._ports[name] = broker.port
        self.running[name] = broker
        return broker

    async def stop(self, name: str) -> None:
        await self.running.pop(name).close()

    async def end(self) -> None:
        for name in list(self.running):
            await self.stop(name)


async def send(broker: Broker, number: int, properties: str = "") -> None:
    fields = {
        "a": "P", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0",
        "i": f"UNIQ_KEY\x01ID{number}\x02{properties}", "j": "0", "k": "false", "m": "false",
    }  # fmt: skip
    assert (await call(broker, 310, fields, b"%d" % number)).code == 0


def stored(broker: Broker) -> int:
    return broker.store.queue_offsets("T", 0)[1]


@pytest.mark.parametrize("is_asked", [True, False])
async def test_what_falls_due_while_the_master_is_away_is_delivered_elsewhere_and_once(
    tmp_path: Path, is_asked: bool
) -> None:
    """Twice where the master does not ask (skipPreOnline)."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        await cluster.start()
        master = await cluster.broker("a-0")
        other = await cluster.broker("b-0", broker_name="broker-b")
        for broker in (master, other):
            assert (await call(broker, 17, NEW_TOPIC)).code == 0
        slave = await cluster.broker("a-1", broker_role="SLAVE", broker_id=1)
        await send(master, 1, f"TIMER_DELAY_MS\x01{DELAY_S * 1000:.0f}\x02")
        await send(master, 2, f"TIMER_DELAY_MS\x01{DELAY_S * 1000:.0f}\x02")
        await send(master, 3, "TIMER_DELAY_MS\x0190000\x02")
        await until(lambda: slave.store.written_offset == master.store.written_offset)
        assert isinstance(slave.replication_side, SlaveSide)
        acting = slave.replication_side.acting_master
        assert acting is not None
        assert acting.broker is None
        await cluster.stop("a-0")
        await until(lambda: acting.broker is not None)
        await until(lambda: stored(other) == 2)
        master = await cluster.broker("a-0", skip_pre_online=not is_asked)
        assert not is_asked or acting.broker is None, "it has handed back"
        await asyncio.sleep(1.0)
        twice = 0 if is_asked else 2
        await until(lambda: (stored(master), stored(other)) == (twice, 2))
        await send(master, 4)
        assert stored(master) == twice + 1
        await until(lambda: slave.store.queue_offsets("T", 0)[1] == twice + 1)
        await until(lambda: acting.broker is None)
