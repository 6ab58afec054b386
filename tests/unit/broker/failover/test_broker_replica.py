"""A broker as a replica: which requests are queued while none may be answered."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluicemq.broker.failover.broker_replica import BrokerRoleExecutor
from sluicemq.broker.failover.election import INCOMPLETE
from sluicemq.broker.failover.replica import BrokerClosedError
from sluicemq.broker.failover.role_executor import LogEnd
from sluicemq.broker.replication.in_sync import Term
from sluicemq.broker.replication.state_transfer import ReplicaIdentity
from sluicemq.errors import StoreError
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.frames import Command, FrameReader, encode


class Carrier:
    def __init__(self) -> None:
        self.reader = FrameReader()
        self.answers: list[Command] = []

    def write(self, data: bytes, /) -> None:
        self.answers += self.reader.feed(data)

    def close(self) -> None: ...


class FakeInSync:
    def __init__(self) -> None:
        self.waiting: list[Callable[[int | BaseException], None]] = []

    def local_end(self) -> int:
        return 100

    def wait(self, end: int, done: Callable[[int | BaseException], None]) -> None:
        self.waiting.append(done)


class FakeBroker:
    """A dispatcher, and a store of 100 bytes."""

    def __init__(self) -> None:
        self.log_terms = SimpleNamespace(last=SimpleNamespace(number=-1))
        self.store = SimpleNamespace(written_offset=100, failure=None)
        self.replication_side: Any = None
        self.identity = ReplicaIdentity(1, "disk", "life")
        self.in_sync: FakeInSync | None = None
        self.core = SimpleNamespace(guard=SimpleNamespace(account=None))
        self.askers: list[object] = []
        self.error: Exception | None = None
        self.handled: list[int] = []
        self.role_executor = BrokerRoleExecutor()
        self.role_executor.broker = cast(Any, self)

    async def change_role(self, term: Term | None) -> None:
        if self.error is not None:
            raise self.error

        def handle(command: Command, peer: Peer) -> Command:
            self.handled.append(command.opaque)
            self.askers.append(self.core.guard.account)
            return Command(0)

        self.in_sync = FakeInSync() if term is not None and term.master_id == 1 else None
        codes = Code.SEND_MESSAGE_V2, Code.PULL_MESSAGE, Code.SLUICE_REPLICA_STATUS
        self.dispatcher = Dispatcher(dict.fromkeys(map(int, codes), handle))
        self.role_executor.on_role_opening(self.dispatcher)


class Stage:
    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.role_executor = self.broker.role_executor
        self.carrier = Carrier()
        self.peer = Peer(self.carrier, Host("10.0.0.9", 9), Host("10.0.0.1", 1))
        self.opaque = 0

    def ask(self, code: Code) -> list[int]:
        """The numbers of all requests that are answered by now."""
        self.opaque += 1
        data = encode(Command(code, {}, opaque=self.opaque))
        used, answers = self.broker.dispatcher.handle_frames(data, self.peer)
        assert used == len(data)
        self.peer.write(answers)
        return [answer.opaque for answer in self.carrier.answers]


async def test_a_new_master_gives_nothing_away_before_its_log_is_confirmed() -> None:
    stage = Stage()
    await stage.role_executor.change_role(Term(2, 1), "another life")
    assert stage.broker.identity == ReplicaIdentity(1, "disk", "another life")
    stage.ask(Code.PULL_MESSAGE)
    stage.ask(Code.SEND_MESSAGE_V2)
    assert stage.ask(Code.SLUICE_REPLICA_STATUS) == [3]
    assert stage.broker.in_sync is not None
    stage.broker.in_sync.waiting[0](100)
    assert stage.ask(Code.SLUICE_REPLICA_STATUS) == [3, 4], "the log is not visible yet"
    await asyncio.sleep(0)
    assert stage.ask(Code.SEND_MESSAGE_V2) == [3, 4, 1, 2, 5]


async def test_what_rested_is_handled_in_the_name_of_who_asked() -> None:
    stage = Stage()
    await stage.role_executor.change_role(Term(2, 2), "life")
    stage.role_executor.pause_requests(True)
    for name in ("alice", "bob", None):
        stage.broker.core.guard.account = name
        stage.ask(Code.SEND_MESSAGE_V2)
    stage.role_executor.pause_requests(False)
    assert stage.broker.askers == ["alice", "bob", None]


async def test_what_rests_ends_with_the_role() -> None:
    stage = Stage()
    await stage.role_executor.change_role(Term(2, 1), "life")
    stage.ask(Code.PULL_MESSAGE)
    assert stage.broker.in_sync is not None
    stage.broker.in_sync.waiting[0](StoreError("deposed."))
    assert not stage.broker.handled, "it goes on resting until the next role"
    await stage.role_executor.change_role(Term(3, 2), "life")
    assert stage.ask(Code.PULL_MESSAGE) == [2]
    assert stage.broker.handled == [2]


async def test_a_switch_holds_what_needs_a_master() -> None:
    stage = Stage()
    await stage.role_executor.change_role(Term(2, 2), "life")
    assert stage.ask(Code.SEND_MESSAGE_V2) == [1]
    stage.role_executor.pause_requests(True)
    stage.role_executor.pause_requests(True)
    assert stage.ask(Code.SEND_MESSAGE_V2) == [1]
    stage.role_executor.pause_requests(False)
    stage.role_executor.pause_requests(False)
    assert stage.ask(Code.SEND_MESSAGE_V2) == [1, 2, 3]


async def test_a_role_that_cannot_be_taken_ends_the_replica() -> None:
    stage = Stage()
    stage.broker.error = StoreError("no space left.")
    with pytest.raises(BrokerClosedError, match="no space left"):
        await stage.role_executor.change_role(Term(2, 1), "life")


def test_the_record_says_where_the_log_ends_unless_the_disk_has_failed() -> None:
    stage = Stage()
    assert stage.role_executor.log_end == LogEnd(0, 100)
    stage.broker.store.failure = OSError()
    assert stage.role_executor.has_failed_disk
    assert stage.role_executor.log_end == LogEnd(0, INCOMPLETE)
