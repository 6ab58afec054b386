"""The loop that leads a broker through its roles, over a broker of twenty lines."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from sluicemq.broker.failover import election
from sluicemq.broker.failover.consensus import Entries
from sluicemq.broker.failover.election import INCOMPLETE, State
from sluicemq.broker.failover.replica import LEASE_S, Replica
from sluicemq.broker.failover.role_executor import LogEnd
from sluicemq.broker.replication.in_sync import Term
from sluicemq.errors import RequestError, StoreError
from sluicemq.files.incarnation import Incarnation
from sluicemq.net.dispatch import Peer
from sluicemq.testing.consensus import MemoryConsensus
from sluicemq.testing.files import CrashableFiles
from sluicemq.testing.virtual import VirtualClock

pytestmark = pytest.mark.slow

PREFIX = election.key_prefix("c", "b")


class FakeInSync:
    """What the set has is what a test says."""

    def __init__(self) -> None:
        self.state_reports: dict[int, Any] = {}
        self.slaves: dict[Any, Any] = {}
        self.propose: Callable[[frozenset[int]], None]
        self.terms: list[Term] = []
        self.deposed = ""
        self.is_settled = True

    def decided(self, term: Term) -> None:
        self.terms.append(term)

    def depose(self, reason: str) -> None:
        self.deposed = reason

    def local_end(self) -> int:
        return 0

    def wait(self, end: int, done: Callable[[Any], None]) -> None:
        if self.is_settled:
            done(end)


class FakeBroker:
    """A `RoleExecutor` that notes what it is told."""

    def __init__(self, number: int, led: list[Term]) -> None:
        self.number = number
        self.led = led  # all terms of this replica as master, in any of its lives
        self.address, self.ha_address = f"h:{number}", f"h:{number}0"
        self.log_end = LogEnd(0, 0)
        self.in_sync: Any = None
        self.has_failed_disk = False
        self.terms: list[Term] = []
        self.failures = 0
        self.is_paused = False
        self.propose: Callable[[frozenset[int]], None]

    @property
    def term(self) -> Term:
        return self.terms[-1]

    @property
    def is_master(self) -> bool:
        return bool(self.terms) and self.term.master_id == self.number and not self.in_sync.deposed

    async def change_role(self, term: Term, run_id: str) -> None:
        await asyncio.sleep(0.05)
        if self.failures:
            self.failures -= 1
            raise StoreError("no space left.")
        self.terms.append(term)
        self.in_sync = FakeInSync() if term.master_id == self.number else None
        self.is_paused = False
        if self.in_sync is not None:
            self.led.append(term)
            self.in_sync.propose = self.propose
            self.log_end = self.log_end._replace(term=term.number)

    def update_term(self, term: Term) -> None:
        assert term.number == self.term.number, "a term begins with a change of the role"
        assert self.in_sync is not None, "a slave is told nothing"
        self.in_sync.decided(term)

    def depose(self, reason: str) -> None:
        if self.in_sync is not None:
            self.in_sync.depose(reason)

    def pause_requests(self, is_paused: bool) -> None:
        self.is_paused = is_paused


class Node:
    """A replica that starts, is killed, and starts again on its disk."""

    def __init__(self, service: MemoryConsensus, number: int) -> None:
        self.service = service
        self.led: list[Term] = []
        self.broker = FakeBroker(number, self.led)
        self.files = CrashableFiles()
        self.runs = 0
        self.start()

    def start(self) -> None:
        number, end = self.broker.number, self.broker.log_end
        self.runs += 1
        self.broker = FakeBroker(number, self.led)
        self.broker.log_end = end
        self.client = self.service.client()
        incarnation = Incarnation(self.files, "/s", boot="b")
        incarnation.open(is_empty=not end.position, is_synced=False)
        self.replica = Replica(
            self.broker, self.client, cluster="c", broker="b", replica_id=number,
            incarnation=incarnation, make_run_id=self._make_run_id,
        )  # fmt: skip
        self.broker.propose = self.replica.propose
        self.task = asyncio.get_running_loop().create_task(self.replica.run())

    def _make_run_id(self) -> str:
        self.runs += 1
        return f"{self.broker.number}.{self.runs}"

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.client.is_disconnected = True
        await self.client.close()
        if self.broker.terms:
            self.broker.terms.append(Term(0, 0))

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.replica.close()


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    clock = VirtualClock()
    clock.drive()
    yield clock
    clock.release()


@pytest.fixture
async def service(clock: VirtualClock) -> MemoryConsensus:
    assert clock.monotonic_s() == 0
    return MemoryConsensus()


@pytest.fixture
async def nodes(service: MemoryConsensus) -> AsyncIterator[list[Node]]:
    nodes = [Node(service, number) for number in (1, 2, 3)]
    yield nodes
    for node in nodes:
        await node.kill()


def state_of(service: MemoryConsensus) -> State:
    state = election.parse_view(PREFIX, service.find(PREFIX)).state
    assert state is not None
    return state


def masters(nodes: list[Node]) -> list[int]:
    return [node.broker.number for node in nodes if node.broker.is_master]


async def all_in_sync(service: MemoryConsensus, nodes: list[Node]) -> None:
    """Everybody has caught up with the master, as its connections would say."""
    await asyncio.sleep(5)
    (master,) = [node for node in nodes if node.broker.is_master]
    in_sync = master.broker.in_sync
    for node in nodes:
        if node is not master:
            in_sync.state_reports[node.broker.number] = node.replica.member
    in_sync.propose(frozenset(node.broker.number for node in nodes))
    await asyncio.sleep(1)
    assert len(state_of(service).in_sync) == len(nodes)


async def test_one_is_master_and_the_others_follow(nodes: list[Node]) -> None:
    await asyncio.sleep(5)
    assert masters(nodes) == [1]
    assert [node.broker.term.address for node in nodes] == ["h:1"] * 3
    assert [node.replica.status()["role"] for node in nodes] == ["master", "slave", "slave"]
    assert nodes[1].replica.status()["members"] == [1, 2, 3]


async def test_the_longest_of_the_set_takes_over(
    service: MemoryConsensus, nodes: list[Node], clock: VirtualClock
) -> None:
    await all_in_sync(service, nodes)
    nodes[1].broker.log_end, nodes[2].broker.log_end = LogEnd(1, 50), LogEnd(1, 70)
    await nodes[0].kill()
    killed_s = clock.monotonic_s()
    while not masters(nodes):
        await asyncio.sleep(0.05)
    assert clock.monotonic_s() - killed_s < 4.5
    assert masters(nodes) == [3]
    state = state_of(service)
    assert (state.term, set(state.in_sync)) == (2, {2, 3})
    nodes[0].start()
    await asyncio.sleep(5)
    assert [node.broker.term.address for node in nodes] == ["h:3"] * 3


async def test_a_master_may_close_while_it_proposes(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    nodes[0].broker.in_sync.propose(frozenset({1, 2}))
    await nodes[0].stop()
    assert set(state_of(service).in_sync) == {2}, "it has handed over and left"


async def test_who_is_not_in_sync_never_takes_over(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await asyncio.sleep(5)
    nodes[1].broker.log_end = LogEnd(1, 1000)
    await nodes[0].kill()
    await asyncio.sleep(600)
    assert not masters(nodes)
    nodes[0].start()
    await asyncio.sleep(1)
    assert masters(nodes) == [1]
    assert state_of(service).term == 2


async def test_a_wiped_master_waits_for_the_set(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    await nodes[0].kill()
    nodes[0].files = CrashableFiles()
    nodes[0].start()
    await asyncio.sleep(10)
    assert masters(nodes) == [2]
    assert 1 not in state_of(service).in_sync


async def test_a_master_that_is_cut_off_is_deposed_when_it_hears(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    old = nodes[0].broker.in_sync
    nodes[0].client.is_disconnected = True
    await asyncio.sleep(10)
    assert masters(nodes) == [1, 2]  # it cannot know, and cannot acknowledge: the set follows 2
    assert nodes[2].broker.term.master_id == 2
    nodes[0].client.is_disconnected = False
    await asyncio.sleep(5)
    assert "replica 2" in old.deposed
    assert masters(nodes) == [2]
    assert nodes[0].broker.term.master_id == 2


async def test_a_dead_slave_leaves_the_set_with_its_lease(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    await nodes[2].kill()
    await asyncio.sleep(6)
    assert set(state_of(service).in_sync) == {1, 2}
    assert set(nodes[0].broker.in_sync.terms[-1].in_sync) == {1, 2}


async def test_a_proposal_is_asked_until_it_is_known(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await asyncio.sleep(5)
    broker, client = nodes[0].broker, nodes[0].client
    broker.in_sync.state_reports[2] = nodes[1].replica.member
    client.loses_responses = True
    broker.in_sync.propose(frozenset({1, 2}))
    await asyncio.sleep(1)
    assert set(state_of(service).in_sync) == {1, 2}  # it happened, and its master does not know
    assert not any(2 in term.in_sync for term in broker.in_sync.terms)
    client.loses_responses = False
    await asyncio.sleep(3)
    assert set(broker.in_sync.terms[-1].in_sync) == {1, 2}


async def test_a_switch_on_purpose(
    service: MemoryConsensus, nodes: list[Node], clock: VirtualClock
) -> None:
    await all_in_sync(service, nodes)
    begun_s = clock.monotonic_s()
    nodes[0].replica.switch(3)
    while masters(nodes) != [3]:
        await asyncio.sleep(0.01)
    assert clock.monotonic_s() - begun_s < 0.5
    await asyncio.sleep(3)
    state = state_of(service)
    assert (state.term, set(state.in_sync)) == (2, {1, 2, 3})
    assert nodes[0].broker.term.master_id == 3
    assert nodes[0].broker.in_sync is None


async def test_a_switch_is_given_up_when_the_slaves_lack_something(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    in_sync = nodes[0].broker.in_sync
    in_sync.is_settled = False
    nodes[0].replica.switch(None)
    await asyncio.sleep(1)
    assert nodes[0].broker.is_paused
    decided = len(in_sync.terms)
    in_sync.propose(frozenset({1, 2}))  # not possible during a switch: the set is decided after it
    await asyncio.sleep(5)
    assert not nodes[0].broker.is_paused
    assert len(in_sync.terms) > decided
    assert masters(nodes) == [1]
    assert state_of(service).term == 1


async def test_what_a_switch_refuses(service: MemoryConsensus, nodes: list[Node]) -> None:
    await all_in_sync(service, nodes)
    for node, to in ((nodes[1], None), (nodes[0], 1), (nodes[0], 9)):
        with pytest.raises(RequestError):
            node.replica.switch(to)
    nodes[1].broker.log_end = nodes[2].broker.log_end = LogEnd(1, INCOMPLETE)
    await asyncio.sleep(10)
    with pytest.raises(RequestError, match="in sync"):
        nodes[0].replica.switch(None)


async def test_a_replica_that_cuts_its_log_during_a_switch_gives_the_role_back(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    nodes[0].replica.switch(2)
    nodes[1].broker.log_end = LogEnd(1, INCOMPLETE)  # its record says otherwise still
    await asyncio.sleep(2)
    assert masters(nodes) in ([1], [3])
    assert state_of(service).term > 2, "it was given the role, and gave it back"
    record = election.parse_view(PREFIX, service.find(PREFIX)).members[2]
    assert record.log_end == INCOMPLETE, "it says so at once"


async def test_a_master_that_stops_in_order_hands_over(
    service: MemoryConsensus, nodes: list[Node], clock: VirtualClock
) -> None:
    await all_in_sync(service, nodes)
    begun_s = clock.monotonic_s()
    await nodes[0].stop()
    assert clock.monotonic_s() - begun_s < 0.5
    await asyncio.sleep(0.2)
    assert masters(nodes[1:]) == [2]
    assert set(state_of(service).in_sync) == {2, 3}
    assert set(election.parse_view(PREFIX, service.find(PREFIX)).members) == {2, 3}


async def test_a_master_whose_disk_fails_resigns(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    nodes[0].broker.has_failed_disk = True
    nodes[0].broker.log_end = LogEnd(1, INCOMPLETE)
    await asyncio.sleep(4)
    assert masters(nodes) == [2]
    assert nodes[0].broker.term.master_id == 2


@pytest.mark.parametrize("seed", range(8))
async def test_an_operator_elects_who_is_left(
    service: MemoryConsensus, nodes: list[Node], seed: int
) -> None:
    """Whether the watch or the answer to the election says first that the record has changed."""
    service.latency_rng = random.Random(seed)
    await asyncio.sleep(5)
    await nodes[0].kill()
    await asyncio.sleep(10)
    nodes[2].replica.elect()
    await asyncio.sleep(3)
    assert masters(nodes) == [3]
    assert nodes[1].broker.term.is_unclean
    with pytest.raises(RequestError, match="is the master"):
        nodes[2].replica.elect()
    assert state_of(service).is_unclean
    assert state_of(service).term == 2, "the service knows all terms: none is left out"


async def test_no_election_deposes_a_master_that_runs(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    with pytest.raises(RequestError, match="replica 1 at h:1 is the master"):
        nodes[1].replica.elect()
    await nodes[0].kill()
    with pytest.raises(RequestError, match="or was a moment ago"):
        nodes[1].replica.elect()


async def test_no_election_is_needed_while_a_replica_of_the_set_runs(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    nodes[0].broker.in_sync.propose(frozenset({1, 2}))
    await asyncio.sleep(1)
    await nodes[0].kill()
    service.end_lease(service.entries[election.member_key(PREFIX, 1)].lease_id)
    await asyncio.sleep(0.01)
    with pytest.raises(RequestError, match=r"replica 2 at h:2 is in sync.*stop it first"):
        nodes[2].replica.elect()
    await asyncio.sleep(5)
    assert masters(nodes) == [2]


async def test_an_election_is_decided_by_the_records_of_now(
    service: MemoryConsensus, nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    """It was asked for while the service was down, and the master has come back with it."""
    await all_in_sync(service, nodes)
    await nodes[0].kill()
    nodes[1].broker.log_end = nodes[2].broker.log_end = LogEnd(1, INCOMPLETE)
    await asyncio.sleep(10)
    service.is_down = True
    nodes[2].replica.elect()
    with pytest.raises(RequestError, match="is being changed"):
        nodes[2].replica.elect()
    nodes[0].start()
    await asyncio.sleep(5)
    service.is_down = False
    nodes[2].client.is_disconnected = True
    await asyncio.sleep(5)
    nodes[2].client.is_disconnected = False
    await asyncio.sleep(5)
    assert masters(nodes) == [1]
    assert "replica 3 is not elected: replica 1 at h:1 is the master" in caplog.text


async def test_an_election_is_given_up_when_the_service_does_not_answer(
    service: MemoryConsensus, nodes: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.sleep(5)
    await nodes[0].kill()
    await asyncio.sleep(10)
    service.is_down = True
    nodes[2].replica.elect()
    await asyncio.sleep(60)
    assert "replica 3 is not elected" in caplog.text
    service.is_down = False
    await asyncio.sleep(10)
    assert masters(nodes) == []


async def test_a_failed_change_of_role_is_tried_again(nodes: list[Node]) -> None:
    nodes[0].broker.failures = nodes[1].broker.failures = 3
    await asyncio.sleep(8)
    assert masters(nodes) == [1]
    assert nodes[1].broker.term.master_id == 1


async def test_two_with_one_id_do_not_live_together(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await asyncio.sleep(5)
    twin = Node(service, 2)
    await asyncio.sleep(30)
    assert not twin.broker.terms
    assert "Replica 2 is also running at" in twin.replica.status()["reason"]
    await nodes[1].kill()
    await asyncio.sleep(10)
    assert twin.broker.term.master_id == 1
    assert not twin.replica.status()["reason"]
    await twin.kill()


async def test_a_service_that_is_down_changes_nothing(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    service.is_down = True
    await asyncio.sleep(300)
    assert masters(nodes) == [1]
    assert all(node.replica.status()["reason"] for node in nodes)
    service.is_down = False
    await asyncio.sleep(10)
    assert masters(nodes) == [1]
    assert not any(node.replica.status()["reason"] for node in nodes)
    assert state_of(service).term == 1


@pytest.mark.parametrize("is_empty", [False, True])
async def test_a_service_that_is_set_back_is_said_and_elects_nobody(
    service: MemoryConsensus, nodes: list[Node], is_empty: bool
) -> None:
    await asyncio.sleep(5)
    old = {} if is_empty else dict(service.entries)
    await all_in_sync(service, nodes)
    newest, revision = dict(service.entries), service.revision
    service.restore(old, service.revision)
    await asyncio.sleep(8)
    assert masters(nodes) == [1]
    assert all("older record" in node.replica.status()["reason"] for node in nodes)
    with pytest.raises(RequestError, match="older record"):
        nodes[0].replica.switch(2)
    service.restore(newest, revision + 100)
    await asyncio.sleep(8)
    assert masters(nodes) == [1]
    assert not any(node.replica.status()["reason"] for node in nodes)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_down", [False, True], ids=["up", "down"])
async def test_after_a_loss_of_all_records_an_operator_elects_the_last_master(
    service: MemoryConsensus, nodes: list[Node], seed: int, is_down: bool
) -> None:
    """Everything was stopped, and the service has lost its data. `is_down`: it still is, when the
    operator asks."""
    service.latency_rng = random.Random(seed)
    await all_in_sync(service, nodes)
    for node in nodes:
        await node.kill()
    service.restore({}, 0)
    for node in nodes:
        node.start()
    await asyncio.sleep(5)
    assert "no record" in nodes[1].replica.status()["reason"]
    service.is_down = is_down
    nodes[0].replica.elect()
    await asyncio.sleep(5)
    service.is_down = False
    await asyncio.sleep(5)
    assert masters(nodes) == [1]
    assert nodes[0].broker.term == nodes[0].led[-1]
    state = state_of(service)
    assert [node.broker.term.number for node in nodes] == [state.term] * 3
    assert (state.is_unclean, set(state.in_sync)) == (True, {1})
    nodes[0].broker.in_sync.state_reports[2] = nodes[1].replica.member
    nodes[0].broker.in_sync.propose(frozenset({1, 2}))
    await asyncio.sleep(1)
    assert set(state_of(service).in_sync) == {1, 2}


@pytest.mark.parametrize("revision", [0, 10_000])
async def test_after_a_loss_of_all_records_the_running_master_is_elected_again(
    service: MemoryConsensus, nodes: list[Node], revision: int
) -> None:
    await all_in_sync(service, nodes)
    old = nodes[0].broker.in_sync
    service.restore({}, revision)
    await asyncio.sleep(5)
    with pytest.raises(RequestError, match="replica 1 at h:1 is the master"):
        nodes[2].replica.elect()
    nodes[0].replica.elect()
    await asyncio.sleep(5)
    assert masters(nodes) == [1]
    assert old.deposed, "its old term has ended"
    assert nodes[0].broker.term.number == state_of(service).term > 2
    assert [node.broker.term.address for node in nodes] == ["h:1"] * 3
    assert not any(node.replica.status()["reason"] for node in nodes)
    with pytest.raises(RequestError, match="is the master"):
        nodes[0].replica.elect()


@pytest.mark.parametrize("revision", [0, 10_000])
async def test_a_master_that_does_not_run_when_the_records_are_lost_is_replaced(
    service: MemoryConsensus, nodes: list[Node], revision: int
) -> None:
    """The others know the last record, and the service has a lower or a higher version by now."""
    await all_in_sync(service, nodes)
    await nodes[0].kill()
    service.restore({}, revision)
    await asyncio.sleep(10)
    assert not masters(nodes)
    nodes[2].replica.elect()
    await asyncio.sleep(5)
    assert masters(nodes) == [3]
    nodes[0].start()
    await asyncio.sleep(5)
    assert [node.broker.term.address for node in nodes] == ["h:3"] * 3
    terms = [term.number for node in nodes for term in node.led]
    assert len(set(terms)) == len(terms)


async def test_a_master_that_was_away_follows_whom_the_restored_service_elected_in_its_term(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    """The copy was older than its election, and those that were elected by it did not know."""
    await all_in_sync(service, nodes)
    old, revision = dict(service.entries), service.revision
    service.revision += 1000
    nodes[0].replica.switch(2)
    await asyncio.sleep(3)
    for node in (nodes[0], nodes[2]):
        await node.kill()
        node.broker.log_end = LogEnd(1, 10)
    away = nodes[1].broker.in_sync
    nodes[1].client.is_disconnected = True
    service.restore(old, revision)
    for node in (nodes[0], nodes[2]):
        node.start()
    await asyncio.sleep(10)
    assert masters(nodes) == [1, 2]
    assert nodes[0].broker.term.number == nodes[1].broker.term.number == 2
    nodes[1].client.is_disconnected = False
    await asyncio.sleep(5)
    assert "replica 1" in away.deposed
    assert masters(nodes) == [1]


async def test_a_record_that_an_old_copy_has_differently_is_written_again(
    service: MemoryConsensus, nodes: list[Node]
) -> None:
    await all_in_sync(service, nodes)
    nodes[2].broker.log_end = LogEnd(1, 50)
    await asyncio.sleep(10)
    newest = dict(service.entries)
    key = election.member_key(PREFIX, 3)
    before = nodes[2].replica.member._replace(log_end=20)
    entry = newest[key]._replace(value=election.encode_member(before))
    service.restore({**newest, key: entry}, service.revision)
    await asyncio.sleep(1)
    assert nodes[0].replica.view.members[3].log_end == 50


async def test_a_lease_that_ends_while_its_record_is_made_is_followed_by_another(
    service: MemoryConsensus, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped for longer than its lease, between two requests."""
    await all_in_sync(service, nodes)
    read = nodes[0].client.read

    async def read_late(prefix: str) -> Entries:
        monkeypatch.undo()
        for lease in {entry.lease_id for entry in service.entries.values()}:
            service.end_lease(lease)
        await asyncio.sleep(2 * LEASE_S)
        return await read(prefix)

    monkeypatch.setattr(nodes[0].client, "read", read_late)
    nodes[0].broker.log_end = LogEnd(1, 70)
    await asyncio.sleep(6 * LEASE_S)
    assert not nodes[0].task.done()
    assert nodes[0].replica.status()["members"] == [1, 2, 3]
    assert len(masters(nodes)) == 1


async def mishap(nodes: list[Node], rng: random.Random) -> None:
    """Something happens to one of them, to the master most often."""
    led = [node for node in nodes if node.broker.is_master]
    node = rng.choice([*nodes, *led, *led])
    match rng.choice(("kill", "cut", "switch", "propose", "wait")):
        case "kill":
            await node.kill()
            await asyncio.sleep(rng.uniform(0, 6))
            node.start()
        case "cut":
            node.client.is_disconnected = True
            await asyncio.sleep(rng.uniform(0, 8))
            node.client.is_disconnected = False
        case "switch":
            with contextlib.suppress(RequestError):
                node.replica.switch(None)
        case "propose" if node.broker.is_master:
            for one in nodes:
                node.broker.in_sync.state_reports[one.broker.number] = one.replica.member
            node.broker.in_sync.propose(frozenset({1, 2, 3}))


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_gets_lost_one_epoch_has_one_master(
    service: MemoryConsensus, nodes: list[Node], seed: int
) -> None:
    rng = random.Random(seed)
    await all_in_sync(service, nodes)
    for _ in range(16):
        for one in nodes:
            one.client.fault_rng = random.Random(rng.random())
        await mishap(nodes, rng)
        await asyncio.sleep(rng.uniform(0, 10))
    led: dict[int, set[str]] = {}
    for term in (term for one in nodes for term in one.led):
        led.setdefault(term.number, set()).add(term.run_id)
    assert len(led) > 1
    assert all(len(lives) == 1 for lives in led.values())
    for one in nodes:
        one.client.fault_rng = None
    await asyncio.sleep(30)
    assert len(masters(nodes)) == 1


class FakeForwarder:
    def __init__(self) -> None:
        self.left: list[Peer] = []

    def disconnected(self, peer: Peer) -> None:
        self.left.append(peer)


@pytest.mark.parametrize("has_forwarder", [True, False])
def test_the_forwarder_learns_of_a_lost_connection(has_forwarder: bool) -> None:
    forwarder = FakeForwarder() if has_forwarder else None
    incarnation = Incarnation(CrashableFiles(), "/store", boot="boot")
    replica = Replica(
        FakeBroker(1, []),
        MemoryConsensus().client(),
        cluster="c",
        broker="b",
        replica_id=1,
        incarnation=incarnation,
        forwarder=cast("Any", forwarder),
    )
    peer = cast("Peer", object())
    replica.disconnected(peer)
    assert forwarder is None or forwarder.left == [peer]
