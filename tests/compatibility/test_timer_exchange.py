"""Pending messages change hands: one broker wrote them, the other delivers, both ways round.

One store, opened by one broker after the other; the first one is stopped in order. Each message is
delivered exactly once, none before its time.
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from peer import clusters
from peer.beside import side_by_side

from conftest import missing_tool_is_a_reason
from sluicemq.client.aio.sluice import Sluice
from sluicemq.store.tools.backup import back_up, restore
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.verify import verify
from thorough import ALL
from waiting import limit

LATER_S = 40.0  # time for the first to stop and the second to start
GIVE_UP_S = 60.0
OURS = {
    "brokerName": "broker-a",
    "mappedFileSizeCommitLog": str(256 << 20),
    "metricsExporterType": "DISABLE",
}


async def send_some(name_server: str, due_ms: int) -> dict[bytes, int]:
    """Five timed messages, one of which is taken back, and two that wait 30 s by their level."""
    expected: dict[bytes, int] = {}
    async with Sluice(name_server) as mq:
        await mq.admin.create_topic("T", queues=1)
        for number in range(5):
            at_ms = due_ms + number * 700
            result = await mq.send("T", f"timed {number}", deliver_at=at_ms)
            if number == 3:
                assert result.recall_handle is not None
                await mq.recall(result.recall_handle)
            else:
                expected[f"timed {number}".encode()] = at_ms
        for number in range(2):
            now_ms = round(time.time() * 1000)
            await mq.send("T", f"delayed {number}", delay_level=4)
            expected[f"delayed {number}".encode()] = now_ms + 30_000
        await asyncio.sleep(3)  # the real broker takes in and saves once a second
    return expected


async def receive(name_server: str, count: int) -> list[tuple[bytes, int]]:
    """Body and store time of what arrives, until there are so many, and a little longer."""
    found: list[tuple[bytes, int]] = []

    async def consume(mq: Sluice) -> None:
        async for message in mq.subscribe("T", group="G"):
            found.append((message.body, message.store_time_ms))
            await message.ack()

    async with Sluice(name_server) as mq:
        task = asyncio.create_task(consume(mq))
        end = time.monotonic() + limit(GIVE_UP_S)
        while len(found) < count and time.monotonic() < end:
            await asyncio.sleep(0.2)
        await asyncio.sleep(3)
        task.cancel()
    return found


def start(kind: str, directory: Path) -> AbstractContextManager[clusters.Cluster]:
    if kind == "sluicemq":
        return clusters.sluice_cluster(directory, **OURS, recallMessageEnable="true")
    return clusters.rocketmq_cluster(
        directory, stop=signal.SIGTERM, recallMessageEnable="true", timerFlushIntervalMs="1000"
    )


WAYS = {
    "sluicemq-rocketmq": ("sluicemq", "rocketmq"),
    "rocketmq-sluicemq": ("rocketmq", "sluicemq"),
    "sluicemq-restored-rocketmq": ("sluicemq", "rocketmq", True),
    "rocketmq-restored-rocketmq": ("rocketmq", "rocketmq", True),
    "rocketmq-restored-sluicemq": ("rocketmq", "sluicemq", True),
}
"""The first broker, the second, and whether it gets a store that was restored from a backup."""
if not ALL:
    WAYS = {name: WAYS[name] for name in ("sluicemq-restored-rocketmq", "rocketmq-sluicemq")}


@pytest.fixture(scope="module")
def handovers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    with side_by_side({
        name: partial(hand_over, tmp_path_factory, *kinds) for name, kinds in WAYS.items()
    }) as found:  # fmt: skip
        yield found


@pytest.mark.parametrize("name", WAYS)
def test_pending_messages_change_hands(handovers: Callable[[str], None], name: str) -> None:
    with missing_tool_is_a_reason():
        handovers(name)


def restored(directory: Path, target: Path) -> Path:
    """Back the store up, restore it in another directory, and return that."""
    back_up(str(directory / "store"), str(target / "backup"))
    result = restore(str(target / "backup"), str(target / "store"))
    assert result.timed_messages == 4, "five were sent, and one was taken back"
    found = verify(StoreLayout.find(str(target / "store"))).findings
    assert not [finding for finding in found.listed if finding.kind.startswith("timer")]
    return target


def hand_over(
    paths: pytest.TempPathFactory, first: str, second: str, is_restored: bool = False
) -> None:
    directory = paths.mktemp("pending")
    with start(first, directory) as one:
        due_ms = round((time.time() + LATER_S) * 1000)
        expected = asyncio.run(send_some(one.name_server, due_ms))
    if is_restored:
        directory = restored(directory, paths.mktemp("restored"))
    with start(second, directory) as other:
        found = asyncio.run(receive(other.name_server, len(expected)))
    counts = Counter(body for body, _ in found)
    assert counts == Counter(expected.keys())
    # The real broker cuts times down to seconds and delivers when the second is over: never early.
    early = [(body, at_ms - expected[body]) for body, at_ms in found if at_ms < expected[body] - 1]
    assert not early
