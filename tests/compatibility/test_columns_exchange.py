"""Property columns lie beside a store that changes hands: RocketMQ opens it as if they were not
there and leaves them as they are, and back with us they are used for what they still are of."""

import asyncio
import signal
from pathlib import Path

import pytest
from peer import clusters

from conftest import missing_tool_is_a_reason
from sluicemq.client.aio.sluice import Sluice
from sluicemq.model.message import Message
from waiting import limit, until

COUNT = 66_000  # one block of 65,536, and a tail
MATCHES = COUNT // 1000
OURS = {
    "brokerName": "broker-a",
    "mappedFileSizeCommitLog": str(256 << 20),
    "metricsExporterType": "DISABLE",
    "sluicePropertyColumns": "always",
}
WAIT_S = 60.0


async def send(name_server: str, first: int, count: int) -> None:
    async with Sluice(name_server) as mq:
        await mq.admin.create_topic("T", queues=1)
        for start in range(first, first + count, 1000):
            numbers = range(start, min(start + 1000, first + count))
            await mq.send_batch(
                [Message("T", b"x", properties={"n": str(number % 1000)}) for number in numbers]
            )


async def receive(name_server: str, group: str, expected: int) -> list[int]:
    """Offsets of the matches, until there are so many."""
    found: list[int] = []
    async with Sluice(name_server) as mq, asyncio.timeout(limit(WAIT_S)):
        async for message in mq.subscribe("T", group=group, where="n = '7'"):
            found.append(message.queue_offset)
            await message.ack()
            if len(found) == expected:
                break
    return sorted(found)


async def await_files(directory: Path) -> None:
    await until(lambda: list(directory.glob("store/columns/T/0/*.arrow")), WAIT_S)


def columns(directory: Path) -> dict[str, bytes]:
    files = (directory / "store" / "columns").rglob("*")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files if path.is_file()}


@pytest.mark.thorough
def test_a_store_with_columns_goes_to_rocketmq_and_back(tmp_path: Path) -> None:
    expected = [number * 1000 + 7 for number in range(MATCHES)]
    with missing_tool_is_a_reason():
        with clusters.sluice_cluster(tmp_path, **OURS) as ours:
            asyncio.run(send(ours.name_server, 0, COUNT))
            asyncio.run(await_files(tmp_path))
            assert asyncio.run(receive(ours.name_server, "G1", MATCHES)) == expected
        made = columns(tmp_path)
        assert made
        with clusters.rocketmq_cluster(tmp_path, stop=signal.SIGTERM) as theirs:
            assert asyncio.run(receive(theirs.name_server, "G2", MATCHES)) == expected
            asyncio.run(send(theirs.name_server, COUNT, 1000))
        assert columns(tmp_path) == made, "as we left them"
        with clusters.sluice_cluster(tmp_path, **OURS) as ours:
            expected.append(COUNT + 7)
            assert asyncio.run(receive(ours.name_server, "G3", MATCHES + 1)) == expected
        assert columns(tmp_path) == made, "true, and kept"
