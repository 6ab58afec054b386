"""Group commit: one commit for all connections, then their answers, errors included."""

from collections.abc import Callable

import pytest

from simulation.stepped import ManualClock
from sluicemq.broker.group_commit import GroupCommit
from sluicemq.broker.replication.in_sync import InSyncReplicas, Term
from sluicemq.broker.settings import Settings
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import StoreError, StoreFullError, StoreTransientError, StoreUncertainError
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Peer
from sluicemq.wire.frames import FLAG_RESPONSE, Command, FrameReader, encode


class FakeStore:
    def __init__(self) -> None:
        self.on_visible = None
        self.commits = 0
        self.published: list[int] = []
        self.confirmed: list[int] = []
        self.error: Exception | None = None
        self.news: list[tuple[str, int, int]] = []

    def commit(self) -> int:
        self.commits += 1
        if self.error is not None:
            raise self.error
        if self.news and self.on_visible is not None:
            self.on_visible(self.news)
        return self.commits * 100

    def publish(self, end_offset: int) -> None:
        self.published.append(end_offset)

    def confirm(self, end_offset: int) -> None:
        self.confirmed.append(end_offset)


class Wire:
    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes, /) -> None:
        self.writes.append(data)

    def close(self) -> None: ...


class Stage:
    """A group commit with a store, connections and a loop that do nothing by themselves."""

    def __init__(self, *, sync: bool = False, gate: "FakeGate | None" = None) -> None:
        self.store = FakeStore()
        self.clock = ManualClock()
        self.soon: list[object] = []
        self.syncs: list[object] = []
        self.woken: list[tuple[str, int, int]] = []
        self.group_commit = GroupCommit(
            self.store,
            self.clock,
            call_soon=self.soon.append,
            run_sync=self.syncs.append if sync else None,
            sync_timeout_s=5.0,
            gate=gate,
        )
        self.group_commit.wake = lambda *queue: self.woken.append(queue)
        self.wires: dict[Peer, Wire] = {}

    def peer(self) -> Peer:
        wire = Wire()
        peer = Peer(wire, Host("127.0.0.1", 1), Host("127.0.0.1", 2))
        self.wires[peer] = wire
        return peer

    def hold(self, peer: Peer, opaque: int, *, waits: bool = True, oneway: bool = False) -> None:
        answer = encode(Command(0, {"queueOffset": "7"}, opaque=opaque, flag=FLAG_RESPONSE))
        self.group_commit.send_after_commit(peer, b"" if oneway else answer, waits)

    def answers(self, peer: Peer) -> list[Command]:
        return FrameReader().feed(b"".join(self.wires[peer].writes))


def test_answers_are_sent_when_the_last_missing_replica_leaves_the_in_sync_set() -> None:
    stage = Stage()
    settings = Settings(BrokerConfig(broker_role="SYNC_MASTER"), StoreConfig())
    term = Term(1, 1, in_sync={1: "a", 2: "b"})
    gate = InSyncReplicas(settings, stage.clock, lambda: 100, local_id=1, term=term)
    group_commit = GroupCommit(stage.store, stage.clock, call_soon=stage.soon.append, gate=gate)
    peer = stage.peer()
    group_commit.send_after_commit(peer, encode(Command(0, {}, opaque=1, flag=FLAG_RESPONSE)))
    group_commit.commit()
    assert not stage.wires[peer].writes
    gate.set_term(term._replace(in_sync={1: "a"}))
    assert stage.store.confirmed == [100]
    assert len(stage.answers(peer)) == 1


def test_one_commit_serves_all_connections_with_one_write_each() -> None:
    stage = Stage()
    one, two = stage.peer(), stage.peer()
    for opaque in range(3):
        stage.hold(one, opaque)
        stage.hold(two, 10 + opaque)
    assert [wire.writes for wire in stage.wires.values()] == [[], []]
    assert len(stage.soon) == 1

    stage.group_commit.commit()

    assert stage.store.commits == 1
    assert [len(wire.writes) for wire in stage.wires.values()] == [1, 1]
    assert [a.opaque for a in stage.answers(one)] == [0, 1, 2]
    assert [a.opaque for a in stage.answers(two)] == [10, 11, 12]


def test_the_next_group_commit_is_scheduled_again() -> None:
    stage = Stage()
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    stage.hold(peer, 2)
    assert len(stage.soon) == 2


@pytest.mark.parametrize(
    ("error", "code"), [(StoreFullError("no room in /store.", fix="Free space."), 14),
                        (StoreError("broken disk."), 1), (OSError(5, "Input/output error"), 1)],
)  # fmt: skip
def test_a_failed_commit_turns_only_its_own_answers_into_errors(
    error: Exception, code: int
) -> None:
    stage = Stage()
    one, two = stage.peer(), stage.peer()
    stage.hold(one, 1)
    stage.hold(two, 2)
    stage.store.error = error
    stage.group_commit.commit()
    stage.store.error = None
    stage.hold(one, 3)
    stage.group_commit.commit()

    assert [(a.opaque, a.code) for a in stage.answers(one)] == [(1, code), (3, 0)]
    assert [(a.opaque, a.code) for a in stage.answers(two)] == [(2, code)]
    assert str(error) in (stage.answers(two)[0].remark or "")


def test_one_way_sends_are_committed_and_never_answered() -> None:
    stage = Stage()
    peer = stage.peer()
    stage.hold(peer, 1, oneway=True)
    stage.group_commit.commit()
    stage.hold(peer, 2, oneway=True)
    stage.store.error = StoreError("broken")
    stage.group_commit.commit()
    assert stage.store.commits == 2
    assert b"".join(stage.wires[peer].writes) == b""


def test_long_polls_are_woken_by_the_commit_that_makes_messages_visible() -> None:
    stage = Stage()
    stage.store.news = [("T", 0, 5)]
    stage.hold(stage.peer(), 1)
    stage.group_commit.commit()
    assert stage.woken == [("T", 0, 5)]


# ------------------------------------------------------------------------------- SYNC_FLUSH


def test_answers_wait_for_the_fsync() -> None:
    stage = Stage(sync=True)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    assert stage.answers(peer) == []
    assert stage.store.published == []

    stage.syncs.pop()(100)

    assert stage.store.published == [100]
    assert [a.opaque for a in stage.answers(peer)] == [1]
    assert stage.group_commit.is_idle


def test_group_commits_that_end_during_an_fsync_share_the_next_one() -> None:
    stage = Stage(sync=True)
    peer = stage.peer()
    for opaque in range(4):
        stage.hold(peer, opaque)
        stage.group_commit.commit()
    assert len(stage.syncs) == 1
    stage.syncs.pop()(100)
    assert [a.opaque for a in stage.answers(peer)] == [0]
    assert len(stage.syncs) == 1
    stage.syncs.pop()(400)
    assert [a.opaque for a in stage.answers(peer)] == [0, 1, 2, 3]
    assert stage.syncs == []


def test_a_send_that_does_not_wait_is_answered_before_the_fsync_and_visible_after_it() -> None:
    stage = Stage(sync=True)
    peer = stage.peer()
    stage.hold(peer, 1, waits=False)
    stage.group_commit.commit()
    assert [a.code for a in stage.answers(peer)] == [0]
    assert stage.store.published == []
    stage.syncs.pop()(100)
    assert stage.store.published == [100]


def test_a_slow_fsync_is_answered_flush_disk_timeout_once() -> None:
    stage = Stage(sync=True)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    stage.clock.advance(5.1)
    stage.group_commit.expire(stage.clock.monotonic_s())
    stage.group_commit.expire(stage.clock.monotonic_s())
    late = stage.answers(peer)
    assert [(a.code, a.opaque, (a.fields or {})["queueOffset"]) for a in late] == [(10, 1, "7")]
    stage.syncs.pop()(100)
    assert stage.store.published == [100]
    assert len(stage.answers(peer)) == 1


def test_a_failed_fsync_is_an_error_and_publishes_nothing() -> None:
    stage = Stage(sync=True)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    stage.syncs.pop()(StoreError("the disk failed"))
    assert [a.code for a in stage.answers(peer)] == [1]
    assert stage.store.published == []


def test_a_reader_that_fails_when_it_is_woken_does_not_fail_the_sends() -> None:
    stage = Stage()

    def wake(*queue: object) -> None:
        raise OSError(5, "the reader failed")

    stage.group_commit.wake = wake
    stage.store.news = [("T", 0, 1)]
    peer = stage.peer()
    stage.hold(peer, 1)
    with pytest.raises(OSError, match="reader"):
        stage.group_commit.commit()
    stage.group_commit.flush()
    assert [a.code for a in stage.answers(peer)] == [0]


def test_an_unexpected_error_of_the_commit_is_answered_as_well() -> None:
    stage = Stage()
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.store.error = KeyError("a mistake of ours")
    stage.group_commit.commit()
    assert [a.code for a in stage.answers(peer)] == [1]


def test_latency_is_counted_for_each_message() -> None:
    stage = Stage()
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.hold(peer, 2)
    stage.clock.advance(0.003)
    stage.group_commit.commit()
    assert sum(stage.group_commit.latency_counts) == 2
    assert stage.group_commit.latency_sum_s == pytest.approx(0.006)


def test_a_failed_fsync_says_that_the_message_may_come_back() -> None:
    stage = Stage(sync=True)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    stage.hold(peer, 2)
    stage.group_commit.commit()
    for _ in range(2):  # the second is refused by the log, and its message is written too
        stage.syncs.pop(0)(StoreError("Input/output error."))  # type: ignore[operator]
    assert [answer.code for answer in stage.answers(peer)] == [1, 1]
    for answer in stage.answers(peer):
        assert "may come back" in (answer.remark or "")
        assert "not stored" not in (answer.remark or "")


def test_a_failed_commit_that_may_come_back_does_not_say_that_it_was_not_stored() -> None:
    stage = Stage()
    peer = stage.peer()
    stage.store.error = StoreUncertainError("It may come back.")
    stage.hold(peer, 1)
    stage.group_commit.commit()
    assert [answer.remark for answer in stage.answers(peer)] == ["It may come back."]


def test_an_fsync_without_a_descriptor_is_tried_again_and_its_answers_wait() -> None:
    stage = Stage(sync=True)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    stage.hold(peer, 2)
    stage.group_commit.commit()
    stage.syncs.pop()(StoreTransientError("Too many open files."))  # type: ignore[operator]
    assert stage.answers(peer) == []
    assert stage.syncs == []
    stage.group_commit.expire(0.2)
    stage.syncs.pop()(200)  # type: ignore[operator]
    assert [answer.code for answer in stage.answers(peer)] == [0, 0]
    assert stage.store.published == [200]
    assert stage.group_commit.is_idle


def test_sends_behind_a_retried_fsync_time_out_independently() -> None:
    stage = Stage(sync=True)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    stage.clock.advance(6)
    stage.group_commit.expire(6.0)
    stage.syncs.pop()(StoreTransientError("Too many open files."))  # type: ignore[operator]
    stage.hold(peer, 2)
    stage.group_commit.commit()
    stage.group_commit.expire(6.2)
    assert [answer.code for answer in stage.answers(peer)] == [10]
    stage.syncs.pop()(200)  # type: ignore[operator]
    assert [answer.code for answer in stage.answers(peer)] == [10, 0]


# ------------------------------------------------------------------------------------ the gate


class FakeGate:
    """A gate that a test opens."""

    def __init__(self, *, holds: bool = True) -> None:
        self.on_confirmed: list[Callable[[int], None]] = []
        self.holds_answers = holds
        self.is_slave_missing = False
        self.timeout_s = 3.0
        self.waiting: list[tuple[int, Callable[[int | BaseException], None]]] = []

    def wait(self, end: int, done: Callable[[int | BaseException], None]) -> None:
        self.waiting.append((end, done))

    def open(self, end: int) -> None:
        while self.waiting and self.waiting[0][0] <= end:
            self.waiting.pop(0)[1](end)
        for told in self.on_confirmed:
            told(end)


def gated(gate: FakeGate, *, sync: bool = False) -> Stage:
    return Stage(sync=sync, gate=gate)


@pytest.mark.parametrize("sync", [False, True])
def test_answers_leave_when_the_gate_opens_and_not_before(sync: bool) -> None:
    gate = FakeGate()
    stage = gated(gate, sync=sync)
    one, two = stage.peer(), stage.peer()
    stage.hold(one, 1)
    stage.group_commit.commit()
    if sync:
        assert gate.waiting == []
        stage.syncs.pop()(100)  # type: ignore[operator]
    stage.hold(two, 2)
    stage.group_commit.commit()
    if sync:
        stage.syncs.pop()(200)  # type: ignore[operator]
    assert [end for end, _ in gate.waiting] == [100, 200]
    assert not stage.answers(one)
    assert not stage.group_commit.is_idle
    gate.open(100)
    assert [answer.opaque for answer in stage.answers(one)] == [1]
    assert not stage.answers(two)
    gate.open(200)
    assert [answer.opaque for answer in stage.answers(two)] == [2]
    assert stage.store.confirmed == [100, 200]
    assert stage.store.published == []
    assert stage.group_commit.is_idle


def test_a_send_that_does_not_wait_is_answered_before_the_gate_opens() -> None:
    gate = FakeGate()
    stage = gated(gate)
    peer = stage.peer()
    stage.hold(peer, 1, waits=False)
    stage.group_commit.commit()
    assert [answer.opaque for answer in stage.answers(peer)] == [1]
    assert [end for end, _ in gate.waiting] == [100], "others see it when it is safe"


def test_a_gate_that_does_not_hold_answers_delays_only_visibility() -> None:
    gate = FakeGate(holds=False)
    stage = gated(gate)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    assert [answer.code for answer in stage.answers(peer)] == [0]
    gate.open(100)
    assert stage.store.confirmed == [100]


def test_without_a_slave_answers_do_not_wait_and_messages_stay_invisible() -> None:
    gate = FakeGate()
    gate.is_slave_missing = True
    stage = gated(gate)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    assert [answer.code for answer in stage.answers(peer)] == [11]
    assert stage.store.confirmed == []
    gate.open(100)
    assert len(stage.answers(peer)) == 1, "it has been answered"


def test_slow_slaves_are_waited_for_until_slave_timeout() -> None:
    gate = FakeGate()
    stage = gated(gate)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    stage.clock.advance(2.9)
    stage.group_commit.expire(stage.clock.monotonic_s())
    assert not stage.answers(peer)
    stage.clock.advance(0.2)
    stage.group_commit.expire(stage.clock.monotonic_s())
    assert [answer.code for answer in stage.answers(peer)] == [12]
    gate.open(100)
    assert len(stage.answers(peer)) == 1


def test_a_deposed_master_answers_that_the_result_is_uncertain() -> None:
    gate = FakeGate()
    stage = gated(gate)
    peer = stage.peer()
    stage.hold(peer, 1)
    stage.group_commit.commit()
    gate.waiting.pop()[1](StoreUncertainError("replica 2 is master"))
    stage.group_commit.flush()
    assert [answer.code for answer in stage.answers(peer)] == [1]
    assert stage.group_commit.is_idle
