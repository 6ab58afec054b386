"""Copying state with SLUICE_FOLLOW_STATE (900301) over a network in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from sluicemq.broker.group_commit import Postponed
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.replication.state_applier import DiscardingFiles, StateApplier
from sluicemq.broker.replication.state_log import RecordingFiles, ReplicatedPaths, StateLog
from sluicemq.broker.replication.state_transfer import (
    ReplicaIdentity,
    StateReceiver,
    StateSender,
    reload_tables,
)
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import RequestError
from sluicemq.files import replace_text
from sluicemq.model.topic import TopicConfig
from sluicemq.net.channel import Channel, ChannelPool
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import FairScheduler
from sluicemq.net.network import MemoryNetwork
from sluicemq.net.work.background import Background
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.replicas import FollowStateRequest
from waiting import limit

FOLLOW = 900301
ADDRESS = "127.0.0.1:10911"
MASTER = ReplicatedPaths({"config": "/m/config"})
SLAVE = ReplicatedPaths({"config": "/s/config"})


class World:
    """A master that serves its state, and a slave whose log has the length that the test sets."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.state_reports: list[tuple[int, str, str, int, int]] = []
        self.master, self.slave = CrashableFiles(), CrashableFiles()
        self.master.make_directory("/m/config")
        self.log_end = 0
        self.changed: list[set[str]] = []
        self.listeners: list[Any] = []
        self.pool = ChannelPool(connect=self.network.dial)
        self.tasks: list[asyncio.Task[None]] = []

    def record_state_report(
        self, replica_id: int, incarnation: str, run_id: str, log_end: int, state_number: int
    ) -> None:
        self.state_reports.append((replica_id, incarnation, run_id, log_end, state_number))

    async def serve(self, life: str = "one", *, is_java: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.state_log = StateLog(MASTER, run_id=life, call_soon=loop.call_soon)
        self.files = RecordingFiles(self.master, self.state_log)
        self.requests = requests = StateSender(
            self.state_log, self, self.master, SYSTEM_CLOCK, lambda: 4096
        )
        background = Background(
            SYSTEM_CLOCK, FairScheduler(SYSTEM_CLOCK.monotonic_s, loop.call_soon)
        )

        def handle(command: Command, peer: Peer) -> Any:
            return requests.follow_state(
                decode_header(FollowStateRequest, command.fields), command, peer
            )

        def deferred(outcome: Any, command: Command, peer: Peer) -> None:
            assert isinstance(outcome, Postponed)
            background.run_request(outcome.steps, command, peer)

        dispatcher = Dispatcher({} if is_java else {FOLLOW: handle}, handle_outcome=deferred)
        listener = self.network.listener(dispatcher)
        await listener.start("127.0.0.1", [10911])
        self.listeners.append(listener)

    def follow(self, java: Callable[[Channel], Awaitable[None]] | None = None) -> None:
        async def in_executor(work: Callable[[], Any]) -> Any:
            await asyncio.sleep(0)
            return work()

        self.applier = StateApplier(self.slave, SLAVE)
        self.receiver = StateReceiver(
            self.applier, ReplicaIdentity(2, "disk", "life"), log_end=lambda: self.log_end,
            sync=lambda: self.log_end, in_executor=in_executor, on_changed=self.changed.append,
            java=java,
        )  # fmt: skip
        run = self.receiver.run(self.pool, lambda: ADDRESS)
        self.tasks.append(asyncio.get_running_loop().create_task(run))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(limit(5)):
            while not condition():
                await asyncio.sleep(0.001)

    def content(self, name: str) -> bytes | None:
        path = SLAVE.path_of(name)
        return self.slave.content(path) if self.slave.exists(path) else None


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)
    await made.pool.close()


async def test_a_snapshot_and_later_operations_are_copied(world: World) -> None:
    await world.serve()
    replace_text(world.files, "/m/config/topics.json", "one")
    world.follow()
    await world.until(lambda: world.content("config/topics.json") == b"one")
    assert world.state_reports[0] == (2, "disk", "life", 0, -1)
    assert world.receiver.master_log_start == 4096
    replace_text(world.files, "/m/config/topics.json", "two")
    await world.until(lambda: world.content("config/topics.json") == b"two")
    await world.until(lambda: world.state_reports[-1][4] == world.state_log.last_number)
    assert world.changed[0] == {"config/topics.json"}


async def test_an_operation_that_waits_for_the_log_is_not_acknowledged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluicemq.broker.replication.state_transfer.REPORT_S", 0.01)
    await world.serve()
    world.state_log.log_end = lambda: 100
    replace_text(world.files, "/m/config/topics.json", "one")
    world.follow()
    await world.until(lambda: len(world.state_reports) > 3)
    assert world.content("config/topics.json") is None
    assert {report[4] for report in world.state_reports} == {-1}
    world.log_end = 100
    await world.until(lambda: world.content("config/topics.json") == b"one")
    await world.until(lambda: world.state_reports[-1][3:] == (100, world.state_log.last_number))


async def test_a_parked_request_is_answered_without_operations(world: World) -> None:
    await world.serve()
    world.follow()
    await world.until(lambda: world.requests._parked)
    asked = len(world.state_reports)
    world.requests.tick(SYSTEM_CLOCK.monotonic_s() + 6)
    await world.until(lambda: len(world.state_reports) > asked)


async def test_a_restarted_master_has_another_run_id(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluicemq.broker.replication.state_transfer.PAUSE_S", 0.01)
    await world.serve()
    world.follow()
    await world.until(lambda: world.applier.has_snapshot)
    await world.listeners.pop().close()
    await world.serve("two")
    replace_text(world.files, "/m/config/topics.json", "two")
    await world.until(lambda: world.content("config/topics.json") == b"two")
    assert world.applier.run_id == "two"


async def test_a_java_master_is_followed_with_its_own_requests(world: World) -> None:
    await world.serve(is_java=True)
    asked = asyncio.Event()

    async def java(channel: Channel) -> None:
        asked.set()
        await asyncio.sleep(10)

    world.follow(java)
    await asyncio.wait_for(asked.wait(), limit(5))
    assert world.receiver.is_java


async def test_a_java_master_is_an_error_if_it_cannot_be_followed(world: World) -> None:
    await world.serve(is_java=True)
    world.follow()
    channel = await world.pool.get(ADDRESS)
    with pytest.raises(RequestError, match="not supported"):
        await world.receiver.follow(channel)


async def test_a_slave_tries_again_after_a_disk_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluicemq.broker.replication.state_transfer.PAUSE_S", 0.01)
    await world.serve()
    replace_text(world.files, "/m/config/topics.json", "one")
    world.slave.fail_next("write")
    world.follow()
    await world.until(lambda: world.content("config/topics.json") == b"one")


# ------------------------------------------------------------------- what a slave serves from


def _tables(files: Any) -> tuple[Topics, Groups, Offsets]:
    settings = Settings(BrokerConfig(), StoreConfig(root="/s"))
    made = (
        Topics(settings, files, SYSTEM_CLOCK),
        Groups(settings, files, SYSTEM_CLOCK),
        Offsets(settings, files, SYSTEM_CLOCK),
    )
    for table in made:
        table.load()
    return made


def test_a_slave_writes_none_of_its_masters_files() -> None:
    files = CrashableFiles()
    files.make_directory("/s/config")
    topics, groups, offsets = _tables(DiscardingFiles(files, SLAVE))
    topics.put(TopicConfig("T", 4, 4))
    assert "T" in topics
    for document in (topics.document, groups.document, offsets.document):
        document.save()
        sync = document.prepare_sync()
        if sync is not None:
            sync()
    assert files.names("/s/config") == []
    with pytest.raises(FileNotFoundError):
        DiscardingFiles(files, SLAVE).open("/s/config/none.json")


def test_tables_are_reloaded_when_their_files_have_changed() -> None:
    files = CrashableFiles()
    topics, _, offsets = _tables(files)
    topics.put(TopicConfig("T", 4, 4), TopicConfig("gone", 1, 1))
    offsets.put("G", "T", 0, 7)
    for document in (topics.document, offsets.document):
        document.save()
    slave = _tables(DiscardingFiles(files, SLAVE))
    told: list[str] = []
    slave[0].on_change = told.append
    assert slave[2].committed("G", "T", 0) == 7
    topics.remove("gone")
    topics.put(TopicConfig("T", 8, 8), TopicConfig("new", 1, 1))
    offsets.put("G", "T", 0, 9)
    offsets.document.save()
    reload_tables(*slave, {"config/topics.json.journal-2"})
    assert sorted(told) == ["T", "gone", "new"]
    assert "gone" not in slave[0]
    assert slave[0].table["T"].config.read_queues == 8
    assert slave[2].committed("G", "T", 0) == 7
    reload_tables(*slave, {"config/consumerOffset.json"})
    assert slave[2].committed("G", "T", 0) == 9
