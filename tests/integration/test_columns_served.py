"""A broker makes property columns of the topics that are filtered, off the way of sends."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from simulation.stepped import pull_fields, send_fields
from sluicemq.broker.metrics import BrokerCollector
from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.net.channel import Channel, dial
from sluicemq.record.codec import decode_records
from sluicemq.store.columns import blocks as columns_blocks
from sluicemq.store.columns import file as columns_file
from sluicemq.wire.frames import Command
from waiting import until

BROKER = BrokerConfig(
    broker_name="broker-a", bind_address="127.0.0.1", listen_port=0, metrics_enable=False
)
SQL: dict[str, object] = {"expressionType": "SQL92", "subscription": "n = '3'", "sysFlag": 4}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_blocks, "BLOCK_ROWS", 512)
    monkeypatch.setattr(columns_blocks, "SLOT_ROWS", 256)
    monkeypatch.setattr(columns_file, "PROOF_ROWS", 256)


def store_config(path: Path, **changes: object) -> StoreConfig:
    made = StoreConfig(root=str(path / "store"), commit_log_file_bytes=1 << 20)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


async def call(
    channel: Channel, code: int, fields: dict[str, object], body: bytes = b""
) -> Command:
    texts = {name: str(value) for name, value in fields.items()}
    return await channel.call(Command(code, texts, body), 10.0)


async def send(channel: Channel, count: int) -> None:
    for number in range(count):
        fields = send_fields("T", properties=f"n\x01{number % 10}\x02")
        assert (await call(channel, 310, fields, b"x")).code == 0


async def drain(channel: Channel, end: int) -> list[int]:
    found: list[int] = []
    offset = 0
    while offset < end:
        fields = pull_fields("T", offset, **SQL)
        answer = await call(channel, 11, fields)
        assert answer.fields is not None
        if answer.code == 0:
            found += [message.queue_offset for message in decode_records(answer.body)]
        offset = int(answer.fields["nextBeginOffset"])
    return found


def metric(broker: Broker, name: str, kind: str) -> float:
    for family in BrokerCollector(lambda: broker.core).collect():
        for sample in family.samples:
            if sample.name == name and sample.labels.get("kind", "") == kind:
                return sample.value
    raise AssertionError(name)


async def test_the_first_filter_starts_it_and_a_restart_finds_the_files(tmp_path: Path) -> None:
    broker = Broker(BROKER, store_config(tmp_path))
    await broker.start()
    channel = await dial(broker.address)
    await send(channel, 1100)
    assert not (tmp_path / "store" / "columns").exists()
    assert await drain(channel, 1100) == list(range(3, 1100, 10))
    directory = tmp_path / "store" / "columns" / "T" / "0"
    await until(lambda: broker.store.columns.rows_sealed == 1024)
    files = sorted(path.name for path in directory.iterdir())
    assert len(files) == 2
    assert await drain(channel, 1100) == list(range(3, 1100, 10))
    assert metric(broker, "sluicemq_property_columns_messages_total", "file") == 1024
    assert metric(broker, "sluicemq_property_columns_bytes", "") == sum(
        path.stat().st_size for path in directory.iterdir()
    )
    await channel.close()
    await broker.close()

    broker = Broker(BROKER, store_config(tmp_path))
    await broker.start()
    channel = await dial(broker.address)
    await drain(channel, 1100)
    await until(lambda: broker.store.columns.is_loaded)
    assert await drain(channel, 1100) == list(range(3, 1100, 10))
    assert broker.store.columns.rows_decoded <= 76
    assert sorted(path.name for path in directory.iterdir()) == files
    await channel.close()
    await broker.close()


async def test_a_read_only_broker_filters_by_columns_and_writes_none(tmp_path: Path) -> None:
    broker = Broker(BROKER, store_config(tmp_path))
    await broker.start()
    channel = await dial(broker.address)
    await send(channel, 600)
    await channel.close()
    await broker.close()
    broker = Broker(BROKER, store_config(tmp_path), read_only=True)
    await broker.start()
    channel = await dial(broker.address)
    await drain(channel, 600)
    await until(lambda: broker.store.columns.is_loaded)
    assert await drain(channel, 600) == list(range(3, 600, 10))
    await asyncio.sleep(0.3)
    assert broker.store.columns.rows_decoded >= 512
    assert broker.store.columns.rows_sealed == 0
    await channel.close()
    await broker.close()
    assert not (tmp_path / "store" / "columns").exists()


async def test_a_long_poll_with_a_filter_wakes_for_its_match(tmp_path: Path) -> None:
    broker = Broker(BROKER, store_config(tmp_path))
    await broker.start()
    channel, sender = await dial(broker.address), await dial(broker.address)
    await send(sender, 300)
    await drain(channel, 300)
    await until(lambda: broker.store.columns.is_loaded)
    fields = pull_fields("T", 300, suspendTimeoutMillis=8000, **SQL) | {"sysFlag": 6}
    waiting = asyncio.create_task(call(channel, 11, fields))
    await asyncio.sleep(0.1)
    await send(sender, 3)
    await asyncio.sleep(0.1)
    assert not waiting.done(), "0, 1 and 2 do not match"
    await send(sender, 4)
    answer = await waiting
    assert [message.queue_offset for message in decode_records(answer.body)] == [306]
    for one in (channel, sender):
        await one.close()
    await broker.close()
