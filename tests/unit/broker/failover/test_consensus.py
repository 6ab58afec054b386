"""The port, as every adapter of it behaves: in memory here, over the real etcd in test_etcd.py."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from sluicemq.broker.failover.consensus import Entries, Swap
from sluicemq.errors import ConsensusError
from sluicemq.testing.consensus import MemoryClient, MemoryConsensus
from sluicemq.testing.virtual import VirtualClock


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    clock = VirtualClock()
    clock.drive()
    yield clock
    clock.release()


@pytest.fixture
def service(clock: VirtualClock) -> MemoryConsensus:
    assert clock.monotonic_s() == 0
    return MemoryConsensus()


@pytest.fixture
def mine(service: MemoryConsensus) -> MemoryClient:
    return service.client()


async def test_a_cut_client_knows_nothing_and_changes_nothing(
    service: MemoryConsensus, mine: MemoryClient
) -> None:
    mine.is_disconnected = True
    with pytest.raises(ConsensusError, match="did not respond"):
        await mine.swap([Swap("a", b"1")])
    assert not service.entries


async def test_a_deaf_client_is_heard(service: MemoryConsensus, mine: MemoryClient) -> None:
    mine.loses_responses = True
    with pytest.raises(ConsensusError):
        await mine.swap([Swap("a", b"1", 0)])
    assert service.entries["a"].value == b"1"
    mine.loses_responses = False
    assert not await mine.swap([Swap("a", b"1", 0)])


async def test_a_late_request_is_done_unless_its_version_is_gone(
    service: MemoryConsensus, mine: MemoryClient
) -> None:
    other = service.client()
    done = refused = 0
    for seed in range(200):
        mine.fault_rng = random.Random(seed)
        before = service.entries.get("a")
        expected = before.version if before else 0
        try:
            await mine.swap([Swap("a", b"late", expected)])
        except ConsensusError:
            if service.entries.get("a") == before and seed % 2:
                assert await other.swap([Swap("a", b"in time", expected)])
                refused += 1
            await asyncio.sleep(10)
            done += service.entries["a"].value == b"late" if "a" in service.entries else 0
    assert done
    assert refused


async def test_a_lease_that_is_not_heard_of_ends_on_both_sides(
    service: MemoryConsensus, mine: MemoryClient, clock: VirtualClock
) -> None:
    lost: list[float] = []
    lease = await mine.lease(3, lambda: lost.append(clock.monotonic_s()))
    await mine.swap([Swap("a", b"1", lease_id=lease.id)])
    await asyncio.sleep(30)
    assert "a" in service.entries
    cut_s = clock.monotonic_s()
    mine.is_disconnected = True
    await asyncio.sleep(5)
    assert "a" not in service.entries
    assert 2 < lost[0] - cut_s < 5


async def test_a_service_that_is_down_ends_no_lease(
    service: MemoryConsensus, mine: MemoryClient
) -> None:
    lease = await mine.lease(3, lambda: None)
    await mine.swap([Swap("a", b"1", lease_id=lease.id)])
    service.is_down = True
    await asyncio.sleep(60)
    service.is_down = False
    assert "a" in service.entries
    await lease.close()
    assert "a" not in service.entries


async def test_a_watch_goes_on_after_a_cut(service: MemoryConsensus, mine: MemoryClient) -> None:
    seen: list[Entries] = []
    end = mine.watch("a", seen.append)
    mine.is_disconnected = True
    await service.client().swap([Swap("a", b"1")])
    await asyncio.sleep(1)
    assert not seen
    mine.is_disconnected = False
    await asyncio.sleep(1)
    assert seen[-1]["a"].value == b"1"
    end()
    await service.client().swap([Swap("a", b"2")])
    await asyncio.sleep(1)
    assert seen[-1]["a"].value == b"1"
