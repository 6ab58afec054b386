"""A SluiceMQ slave copies the tables of a RocketMQ master."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simulation.stepped import SMALL, SteppedBroker
from sluicemq.broker.replication import java_state
from sluicemq.broker.replication.java_state import TABLE_REQUESTS, JavaStateReceiver
from sluicemq.errors import ProtocolError, RequestError
from sluicemq.model.topic import TopicConfig
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.network import MemoryNetwork
from sluicemq.store.timers.files import read_timer_checkpoint
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

ADDRESS = "127.0.0.1:10911"
HERE = replace(SMALL, root="/s")


async def in_place(work: Callable[[], Any]) -> Any:
    return work()


class Rounds:
    """A master with responses that the test sets, and a slave that requests them in rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files, self.changed = CrashableFiles(), list[set[str]]()
        self.state = JavaStateReceiver(
            self.files, "/s", in_executor=in_place, on_changed=self.changed.append
        )
        self.answers: dict[int, Command] = {}
        self.asked: list[int] = []
        self.ticks = 1
        monkeypatch.setattr(java_state, "asyncio", self)

    async def sleep(self, seconds: float) -> None:
        """End a round, in place of asyncio.sleep."""
        self.ticks -= 1
        if not self.ticks:
            raise asyncio.CancelledError

    async def run(self, broker: SteppedBroker | None = None, ticks: int = 1) -> None:
        self.ticks = ticks
        network = MemoryNetwork()

        def handle(command: Command, peer: Peer) -> Command:
            self.asked.append(command.code)
            if command.code in self.answers:
                answer = self.answers[command.code]
                return Command(answer.code, {}, answer.body, remark=answer.remark)
            assert broker is not None
            return broker.connect().call(command.code, command.fields)

        dispatcher = Dispatcher({int(table.code): handle for table in TABLE_REQUESTS})
        await network.listener(dispatcher).start("127.0.0.1", [10911])
        with pytest.raises(asyncio.CancelledError):
            await self.state.follow(await network.dial(ADDRESS))


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    return Rounds(monkeypatch)


async def test_all_tables_are_copied(rounds: Rounds) -> None:
    master = SteppedBroker()
    core = master.core
    core.topics.put(TopicConfig("T", 4, 4))
    core.offsets.put("G", "T", 0, 7)
    await rounds.run(master)
    slave = SteppedBroker(files=rounds.files, store_config=HERE)
    assert slave.core.topics.table.keys() >= {"T"}
    assert slave.core.groups.table.keys() == core.groups.table.keys()
    assert slave.core.offsets.committed("G", "T", 0) == 7
    assert {table.name for table in TABLE_REQUESTS} <= {*rounds.files.names("/s/config")}


async def test_unchanged_tables_are_not_written(rounds: Rounds) -> None:
    master = SteppedBroker()
    await rounds.run(master)
    assert rounds.changed
    rounds.changed.clear()
    await rounds.run(master, ticks=21)
    assert not rounds.changed
    assert rounds.asked.count(RequestCode.GET_ALL_TOPIC_CONFIG) == 3
    master.core.topics.put(TopicConfig("T", 4, 4))
    await rounds.run(master)
    assert rounds.changed == [{"config/topics.json"}]


async def test_offsets_are_merged(rounds: Rounds) -> None:
    rounds.files.make_directory("/s/config")
    master = SteppedBroker()
    for topic, offset in (("old", 1), ("T", 2)):
        master.core.offsets.put("G", topic, 0, offset)
    await rounds.run(master)
    del master.core.offsets.table["old@G"]
    master.core.offsets.put("G", "T", 0, 3)
    await rounds.run(master)
    slave = SteppedBroker(files=rounds.files, store_config=HERE)
    assert slave.core.offsets.table == {"old@G": {0: 1}, "T@G": {0: 3}}


async def test_the_timer_checkpoint_is_written_in_place(rounds: Rounds) -> None:
    fields = b"".join(number.to_bytes(8) for number in (1000, 52, 3, 4, 0, 1234, 5))
    master = SteppedBroker()
    rounds.answers[RequestCode.GET_TIMER_CHECK_POINT] = Command(0, {}, fields)
    await rounds.run(master)
    found = read_timer_checkpoint(rounds.files, "/s/config/timercheck")
    assert found is not None
    assert found[:7] == (1000, 52, 3, 4, 0, 1234, 5)
    assert found.done_ms == 0
    rounds.answers[RequestCode.GET_TIMER_CHECK_POINT] = Command(0, {}, b"short")
    with pytest.raises(ProtocolError, match="5 bytes"):
        rounds.state._write(TABLE_REQUESTS[-1], b"short")


async def test_an_unsupported_table_is_not_requested_again(rounds: Rounds) -> None:
    master = SteppedBroker()
    for code in (402, 61):
        rounds.answers[code] = Command(3, {}, remark="request type not supported")
    rounds.answers[60] = Command(1, {}, remark="The timer message store is null")
    await rounds.run(master, ticks=21)
    assert [rounds.asked.count(code) for code in (402, 61, 60)] == [1, 1, 1]


async def test_an_error_response_ends_the_round(rounds: Rounds) -> None:
    rounds.answers[RequestCode.GET_ALL_TOPIC_CONFIG] = Command(16, {}, remark="no permission")
    network = MemoryNetwork()
    dispatcher = Dispatcher({21: lambda command, peer: Command(16, {}, remark="no permission")})
    await network.listener(dispatcher).start("127.0.0.1", [10911])
    with pytest.raises(RequestError, match="no permission"):
        await rounds.state.follow(await network.dial(ADDRESS))


@pytest.mark.parametrize("body", [b"\xff", b"[]", b"{"])
def test_an_invalid_table_is_refused(rounds: Rounds, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        rounds.state._write(TABLE_REQUESTS[0], body)
    assert not rounds.files.exists("/s/config/topics.json")
