"""Planners and tasks of Spark against a broker whose topic is deleted and created again, between
any two steps and with any length. No JVM: Spark's calls are made here."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from pyspark_rocketmq import DefaultSource
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.errors import OffsetOutOfRangeError
from sluicemq.spark import errors
from sluicemq.spark.schema import BASE_COLUMNS, to_spark_schema
from sluicemq.spark.sources import stream
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from waiting import limit

pytestmark = pytest.mark.slow

T = TypeVar("T")
OLD, SCHEMA = 50, to_spark_schema(BASE_COLUMNS)
LENGTHS = (0, 1, OLD - 1, OLD, OLD + 1, 2 * OLD)


@pytest.fixture(autouse=True)
def no_hidden_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.os, "environ", {})


class Cluster:
    """A broker on sockets; `old` and `new` are the bodies of the topic's two lives."""

    def __init__(self, mq: EmbeddedSluice) -> None:
        self.mq = mq
        self.old = [b"old %d" % n for n in range(OLD)]
        self.new: list[bytes] = []

    async def create(self, topic: str, bodies: list[bytes], queues: int = 1) -> None:
        await self.mq.admin.create_topic(topic, queues=queues)
        self.mq.cluster.routes.expire(topic)
        for body in bodies:
            await self.mq.send(topic, body)

    async def recreate(self, length: int) -> None:
        self.new = [b"new %d" % n for n in range(length)]
        await self.mq.admin.delete_topic("t")
        await self.create("t", self.new)

    def options(self, **more: str) -> dict[str, str]:
        return {
            "topic": "t", "nameServers": self.mq.servers.name_server_address, "timeoutMs": "3000",
            "startingOffsets": "earliest",
        } | more  # fmt: skip


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Streams are stopped, as Spark does it."""
    made: list[Any] = []
    make = stream.create_stream_reader
    monkeypatch.setattr(
        stream, "create_stream_reader", lambda *of: made.append(make(*of)) or made[-1]
    )
    yield
    for reader in made:
        reader.stop()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with embedded(tcp=True) as mq:
        found = Cluster(mq)
        await found.create("t", found.old)
        yield found


async def blocking(work: Callable[..., T], *of: Any) -> T:
    return await asyncio.to_thread(work, *of)


def bodies(reader: Any, parts: list[Any]) -> list[bytes]:
    batches = [batch for part in parts for batch in reader.read(part)]
    return [body for batch in batches for body in batch.column("body").to_pylist()]


def raises(work: Callable[..., T], *of: Any) -> str:
    with pytest.raises(OffsetOutOfRangeError) as caught:
        work(*of)
    return str(caught.value)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("length", LENGTHS)
async def test_a_batch_whose_topic_is_created_again_before_it_is_read(
    cluster: Cluster, length: int, pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = cluster.options(minPartitions=str(pieces))
    strict = DefaultSource(options).reader(SCHEMA)
    loose = DefaultSource(options | {"failOnDataLoss": "false"}).reader(SCHEMA)
    planned = await blocking(strict.partitions)
    assert len(planned) == pieces
    assert await blocking(bodies, strict, planned) == cluster.old
    await cluster.recreate(length)
    for part in planned:
        text = await blocking(raises, bodies, strict, [part])
        assert "the topic 't' was deleted and created again" in text or "which ends at" in text
        assert "broker-a:0" in text
        assert f"{part.end}" in text
        assert "failOnDataLoss=false" in text
    assert await blocking(bodies, loose, planned) == cluster.new[:OLD]


@pytest.mark.parametrize("length", [OLD, 2 * OLD])
async def test_a_batch_from_the_middle_reads_the_new_topic_from_its_beginning(
    cluster: Cluster, length: int
) -> None:
    options = cluster.options(
        failOnDataLoss="false", startingOffsets='{"broker-a": {"0": 30}}', minPartitions="2"
    )
    reader = DefaultSource(options).reader(SCHEMA)
    planned = await blocking(reader.partitions)
    await cluster.recreate(length)
    assert await blocking(bodies, reader, planned) == cluster.new[:OLD]


async def test_a_batch_whose_topic_is_created_again_while_it_is_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, chunks = asyncio.get_running_loop(), BulkReader.__iter__

    def read(reader: BulkReader) -> Iterator[Any]:
        asyncio.run_coroutine_threadsafe(cluster.recreate(OLD), loop).result(limit(10))
        return iter(chunks(reader))

    strict = DefaultSource(cluster.options()).reader(SCHEMA)
    planned = await blocking(strict.partitions)
    monkeypatch.setattr(BulkReader, "__iter__", read)
    text = await blocking(raises, bodies, strict, planned)
    assert "the topic 't' was deleted and created again" in text
    loose = DefaultSource(cluster.options(failOnDataLoss="false")).reader(SCHEMA)
    planned = await blocking(loose.partitions)
    assert await blocking(bodies, loose, planned) == cluster.new
    assert "while broker-a:0 was read" in caplog.text


async def test_a_batch_whose_topic_disappears_before_it_is_read(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.create("u", [b"other"])
    more = {"topics": "t,u"}
    options = {name: text for name, text in cluster.options(**more).items() if name != "topic"}
    strict = DefaultSource(options).reader(SCHEMA)
    loose = DefaultSource(options | {"failOnDataLoss": "false"}).reader(SCHEMA)
    planned = await blocking(strict.partitions)
    await cluster.mq.admin.delete_topic("t")
    assert "disappeared" in await blocking(raises, bodies, strict, planned)
    assert await blocking(bodies, loose, planned) == [b"other"]


def advanced(reader: Any, start: dict[str, Any]) -> dict[str, Any]:
    """The end of the next micro-batch, as it is read back from the checkpoint."""
    found: dict[str, Any] = json.loads(json.dumps(reader.latestOffset(start, ReadAllAvailable())))
    return found


def micro_batch(reader: Any, start: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    end = advanced(reader, start)
    return end, [] if end == start else bodies(reader, reader.partitions(start, end))


@pytest.mark.parametrize("is_restarted", [True, False], ids=["restarted", "running"])
@pytest.mark.parametrize("length", LENGTHS)
async def test_a_stream_whose_topic_is_created_again(
    cluster: Cluster,
    length: int,
    is_restarted: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluicemq.spark.sources.identity.CHECK_PERIOD_S", 0.0)

    def made(**more: str) -> Any:
        return stream.create_stream_reader(cluster.options(**more), SCHEMA)

    strict, loose = made(), made(failOnDataLoss="false")
    begin = await blocking(strict.initialOffset)
    end, read = await blocking(micro_batch, strict, begin)
    assert (await blocking(micro_batch, loose, begin))[1] == read == cluster.old
    await cluster.recreate(length)
    if is_restarted:
        strict, loose = made(), made(failOnDataLoss="false")
    text = await blocking(raises, micro_batch, strict, end)
    assert "'t'" in text
    assert "deleted and created again" in text
    assert "broker-a:0" in text
    assert f"{OLD}" in text
    assert "failOnDataLoss=false" in text
    with caplog.at_level(logging.WARNING):
        end, read = await blocking(micro_batch, loose, end)
        assert read == cluster.new
        await cluster.mq.send("t", b"later")
        for _ in range(2):
            end, read = await blocking(micro_batch, loose, end)
            assert read in ([b"later"], [])
    assert caplog.text.count("was deleted and created again") == 1
    assert (await blocking(micro_batch, strict, end))[1] == []


async def test_a_micro_batch_whose_topic_is_created_again_before_it_is_read(
    cluster: Cluster,
) -> None:
    strict = stream.create_stream_reader(cluster.options(), SCHEMA)
    loose = stream.create_stream_reader(cluster.options(failOnDataLoss="false"), SCHEMA)
    begin = await blocking(strict.initialOffset)
    end = await blocking(advanced, loose, begin)
    planned = await blocking(loose.partitions, begin, end)
    await cluster.recreate(2 * OLD)
    assert "created again" in await blocking(raises, bodies, strict, planned)
    assert await blocking(bodies, loose, planned) == []
    assert (await blocking(micro_batch, loose, end))[1] == cluster.new, "each message once"


async def test_a_group_of_the_job_that_has_a_reset_before_it_does_not_stop_the_job(
    cluster: Cluster,
) -> None:
    """A SluiceMQ broker resets groups with offsets when a topic is created again; what a batch
    reads is given by its plan."""
    options = cluster.options(group="job")
    reader = stream.create_stream_reader(options, SCHEMA)
    end, _ = await blocking(micro_batch, reader, await blocking(reader.initialOffset))
    await blocking(reader.commit, end)
    await cluster.recreate(OLD)
    resets = cluster.mq.servers.broker.core.offsets.resets
    assert resets.blocks_commits("job", "t", 0)
    batch = DefaultSource(options | {"startingOffsets": '{"broker-a": {"0": 20}}'}).reader(SCHEMA)
    planned = await blocking(batch.partitions)
    assert await blocking(bodies, batch, planned) == cluster.new[20:]


async def test_the_bulk_reader_gives_up_on_a_broker_that_resets_for_ever(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = cluster.mq.servers.broker.core
    core.offsets.resets.add("job", "t", 0, 5)
    monkeypatch.setattr(core.offsets.resets.__class__, "redirect", lambda *_, **__: 5)
    reader = BulkReader(
        cluster.mq.servers.broker.address, "t", 0, 20, 30, group="job", timeout_s=5.0
    )

    def read() -> None:
        with reader:
            list(reader)

    with pytest.raises(OffsetOutOfRangeError, match="offsets from 20 to 30"):
        await blocking(read)
