"""In-sync replicas: confirmed positions, refusals, and members of the in-sync set."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from simulation.stepped import ManualClock
from sluicemq.broker.failover.replica import LEASE_S
from sluicemq.broker.replication.in_sync import NOT_ENOUGH, InSyncReplicas, Term
from sluicemq.broker.settings import Settings
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import StoreUncertainError
from sluicemq.model.ids import Host

REMOTE = Host("192.0.2.7", 1)


@dataclass(eq=False)
class Slave:
    """A slave's connection. A `replica_id` of None means the plain protocol."""

    replica_id: int | None = None
    offset: int = 0
    remote: Host = REMOTE
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Stage:
    """A master with 1,000 bytes of log and, at first, without slaves."""

    keys: dict[str, Any]
    term: Term | None = None
    end: int = 1000
    clock: ManualClock = field(default_factory=ManualClock)
    done: list[int | str] = field(default_factory=list)
    proposed: list[frozenset[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = BrokerConfig(**{"broker_role": "SYNC_MASTER"} | self.keys)
        self.gate = InSyncReplicas(
            Settings(config, StoreConfig()), self.clock, lambda: self.end, local_id=1,
            term=self.term, propose=self.proposed.append,
        )  # fmt: skip

    def wait(self, end: int) -> None:
        def note(result: int | BaseException) -> None:
            self.done.append(result if isinstance(result, int) else str(result))

        self.gate.wait(end, note)

    def slave(self, replica_id: int | None = None, incarnation: str = "a") -> Slave:
        if replica_id is not None:
            self.gate.record_state_report(replica_id, incarnation, "1", 0, 0)
        slave = Slave(replica_id)
        self.gate.add_slave(slave)
        return slave


def test_a_master_that_needs_no_slave_confirms_its_own_log() -> None:
    stage = Stage({"in_sync_written": 1})
    stage.wait(1000)
    assert stage.done == [1000]
    assert stage.gate.refusal is None


def test_the_fastest_slave_confirms() -> None:
    stage = Stage({})
    one, two = stage.slave(), stage.slave()
    stage.wait(400)
    stage.wait(900)
    stage.gate.record_ack(one, 399)
    assert stage.done == []
    stage.gate.record_ack(two, 600)
    assert (stage.done, stage.gate.confirmed) == ([600], 600)
    stage.gate.record_ack(one, 1000)
    assert stage.done == [600, 1000]


def test_waiting_for_a_confirmed_position_ends_immediately() -> None:
    """Functions that wait for a later position do not delay it."""
    stage = Stage({})
    stage.wait(900)
    stage.wait(0)
    assert stage.done == [0]
    stage.gate.record_ack(stage.slave(), 900)
    assert stage.done == [0, 900]


def test_another_thread_may_ask_while_a_slave_connects() -> None:
    stage = Stage({"in_sync_written": 2, "acting_master": True, "gap_bytes_max": 100})
    stage.slave()

    def own_end() -> int:
        stage.slave()
        return stage.end

    stage.gate.local_end = own_end
    assert NOT_ENOUGH in str(stage.gate.refusal)


def test_an_empty_slave_is_awaited_from_its_connection_on() -> None:
    """A slave that has acknowledged nothing counts as having 0 bytes, as in RocketMQ."""
    stage = Stage({"gap_bytes_max": 1000})
    assert stage.gate.is_slave_missing
    slave = stage.slave()
    assert not stage.gate.is_slave_missing
    stage.wait(1000)
    assert stage.done == [], "nothing is confirmed before it has it"
    stage.end = 1001
    assert stage.gate.is_slave_missing, "it is too far behind"
    stage.gate.record_ack(slave, 1)
    assert not stage.gate.is_slave_missing
    stage.gate.record_ack(slave, 1000)
    assert stage.done == [1000]
    stage.gate.remove_slave(slave)
    assert stage.gate.is_slave_missing


def test_with_three_replicas_two_slaves_must_acknowledge() -> None:
    stage = Stage({"in_sync_written": 3})
    one, two = stage.slave(), stage.slave()
    stage.wait(500)
    stage.gate.record_ack(one, 1000)
    assert stage.done == []
    stage.gate.record_ack(two, 500)
    assert stage.done == [500]


def test_the_confirmed_position_never_decreases_nor_exceeds_the_local_log() -> None:
    stage = Stage({})
    one = stage.slave()
    stage.gate.record_ack(one, 2000)
    assert stage.gate.confirmed == 1000
    stage.gate.remove_slave(one)
    assert stage.gate.confirmed == 1000


def test_4_9_reports_immediately_that_no_slave_is_near() -> None:
    stage = Stage({"gap_bytes_max": 100})
    assert stage.gate.is_slave_missing
    slave = stage.slave()
    assert stage.gate.is_slave_missing
    stage.gate.record_ack(slave, 899)
    assert stage.gate.is_slave_missing
    stage.gate.record_ack(slave, 900)
    assert not stage.gate.is_slave_missing
    assert not Stage({"in_sync_written": 2}).gate.is_slave_missing


@pytest.mark.parametrize(
    ("keys", "is_refused"),
    [
        ({"in_sync_written": 2}, False),
        ({"in_sync_written": 2, "acting_master": True}, True),
        ({"in_sync_written": 2, "acting_master": True, "in_sync_auto": True}, False),
        ({"in_sync_written": 2, "acting_master": True, "in_sync_auto": True, "in_sync_min": 2},
         True),
    ],
)  # fmt: skip
def test_5_x_refuses_before_storing(keys: dict[str, Any], is_refused: bool) -> None:
    refusal = Stage(keys).gate.refusal
    assert (refusal is not None) is is_refused
    if refusal is not None:
        assert (refusal.code, refusal.remark) == (1, NOT_ENOUGH)


def test_a_deposed_master_answers_waiting_sends_as_uncertain() -> None:
    stage = Stage({}, Term(3, 1, in_sync={1: "x", 2: "a"}))
    slave = stage.slave(2)
    stage.wait(1000)
    stage.gate.depose("replica 2 is master in term 4")
    stage.gate.record_ack(slave, 1000)
    stage.wait(1000)
    assert stage.gate.confirmed == 0
    assert len(stage.done) == 2
    assert all("term 4" in str(one) for one in stage.done)
    assert stage.gate.refusal is not None
    with pytest.raises(StoreUncertainError):
        raise stage.gate._failure or AssertionError


# ------------------------------------------------------------------------------------ failover


def term(**in_sync: str) -> Term:
    return Term(3, 1, in_sync={1: "x"} | {int(name[1:]): life for name, life in in_sync.items()})


def test_all_members_of_the_set_must_acknowledge() -> None:
    stage = Stage({}, term(r2="a", r3="a"))
    two, three = stage.slave(2), stage.slave(3)
    stage.wait(500)
    stage.gate.record_ack(two, 1000)
    assert stage.done == []
    stage.gate.record_ack(three, 500)
    assert stage.done == [500]


def test_acknowledgements_of_another_incarnation_or_an_older_run_do_not_count() -> None:
    stage = Stage({}, term(r2="a"))
    wiped = stage.slave(2, incarnation="b")
    stage.gate.record_ack(wiped, 1000)
    assert stage.gate.confirmed == 0
    old = stage.slave(2, incarnation="a")
    assert wiped.is_closed is False
    stage.gate.record_state_report(2, "a", "2", 0, 0)
    assert old.is_closed
    stage.gate.record_ack(old, 1000)
    assert stage.gate.confirmed == 0


def test_a_restarted_replica_leaves_the_set_before_its_old_connection_ends() -> None:
    """TCP may take minutes to give up a connection to a machine that lost its power. Sends must not
    wait for it meanwhile."""
    stage = Stage({}, term(r2="a"))
    old = stage.slave(2)
    stage.gate.record_ack(old, 1000)
    stage.end = 2000
    stage.wait(2000)
    stage.gate.record_state_report(2, "a", "2", 1000, 0)
    assert stage.proposed == [frozenset({1})]
    assert stage.done == [], "it counts until the consensus has the smaller set"
    stage.gate.set_term(term())
    assert stage.done == [2000]


def test_a_delayed_report_does_not_restore_acknowledgements_of_an_older_run() -> None:
    """The restarted replica may have lost what its older life had not on its disk yet. A request of
    the older life that is read after one of the new life changes nothing of that."""
    stage = Stage({}, term(r2="a", r3="a"))
    old, other = stage.slave(2), stage.slave(3)
    stage.gate.record_ack(old, 1000)
    stage.gate.record_state_report(2, "a", "2", 0, 0)
    stage.gate.record_state_report(2, "a", "1", 1000, 0)
    stage.gate.record_ack(other, 1000)
    assert stage.gate.confirmed == 0


def test_the_end_of_an_older_connection_does_not_stop_joining() -> None:
    """The connection of the older run ends while the new one is already joining."""
    stage = Stage({}, term())
    stage.gate.last_state_number = lambda: 7
    old = stage.slave(2)
    stage.gate.record_state_report(2, "a", "2", 1000, 0)
    new = Slave(2)
    stage.gate.add_slave(new)
    stage.gate.record_ack(new, 1000)
    stage.gate.tick()
    assert stage.gate.awaited_members() == {1, 2}
    stage.gate.remove_slave(old)
    assert stage.gate.awaited_members() == {1, 2}


def test_a_replica_with_everything_confirmed_in_log_and_state_joins_the_set() -> None:
    stage = Stage({}, term())
    stage.gate.last_state_number = lambda: 7
    stage.wait(1000)
    slave = stage.slave(2)
    stage.gate.record_ack(slave, 999)
    stage.gate.tick()
    stage.gate.record_ack(slave, 1000)
    stage.gate.tick()
    assert stage.proposed == []
    stage.gate.record_state_report(2, "a", "1", 1000, 7)
    stage.gate.tick()
    assert stage.proposed == [frozenset({1, 2})]
    stage.gate.tick()
    assert len(stage.proposed) == 1, "one at a time"


def test_a_replica_that_may_lack_what_an_earlier_master_confirmed_does_not_join() -> None:
    """A new master does not know everything that was confirmed, but its log contains all of it."""
    stage = Stage({}, term=term(_1="a", _2="a"))
    stage.gate.record_state_report(
        2, "a", "1", 0, 0
    )  # a member that has not acknowledged anything yet
    late = stage.slave(3)
    stage.gate.record_ack(late, 999)
    for _ in range(20):
        stage.clock.advance(0.2)
        stage.gate.tick()
    assert stage.gate.confirmed == 0
    assert frozenset({1, 2, 3}) not in stage.proposed
    assert frozenset({1, 3}) not in stage.proposed
    stage.gate.record_ack(late, 1000)
    stage.gate._proposed = None
    stage.gate.tick()
    assert 3 in stage.proposed[-1]


def test_a_near_replica_joins_while_the_log_grows() -> None:
    """A near replica is awaited, and must reach what existed when it started to join."""
    stage, state = Stage({}, term()), iter(range(100, 10_000, 100))
    number = next(state)
    stage.gate.last_state_number = lambda: number
    slave = stage.slave(2)
    for _ in range(12):  # behind by 50 bytes and 50 operations, at all times
        number, stage.end = next(state), stage.end + 100
        stage.wait(stage.end)
        stage.gate.record_state_report(2, "a", "1", 0, number - 50)
        stage.gate.record_ack(slave, stage.end - 50)
        stage.gate.tick()
        stage.clock.advance(0.2)
    assert stage.proposed == [frozenset({1, 2})]
    assert stage.gate.confirmed == stage.end - 50, "who may be in the set is waited for"


def test_a_joining_replica_that_is_too_slow_is_not_awaited_any_longer() -> None:
    stage, number = Stage({}, term()), 7
    stage.gate.last_state_number = lambda: number
    slave = stage.slave(2)
    stage.gate.record_ack(slave, 1000)
    stage.gate.tick()
    assert stage.gate.awaited_members() == {1, 2}
    stage.end = 2000
    stage.wait(2000)
    stage.clock.advance(1.9)
    stage.gate.tick()
    assert stage.done == []
    stage.clock.advance(0.2)
    stage.gate.tick()
    assert (stage.done, stage.proposed) == ([2000], [])
    stage.gate.record_ack(slave, 2000)
    stage.clock.advance(14.0)
    stage.gate.tick()
    assert stage.gate.awaited_members() == {1}, "not again so soon"
    stage.clock.advance(1.1)
    stage.gate.tick()
    assert stage.gate.awaited_members() == {1, 2}
    stage.gate.remove_slave(slave)
    assert stage.gate.awaited_members() == {1}


def test_both_sets_count_while_a_proposal_is_open() -> None:
    stage = Stage({}, term())
    slave = stage.slave(2)
    stage.wait(1000)
    stage.gate.record_ack(slave, 1000)
    stage.gate.tick()
    assert stage.proposed == [frozenset({1, 2})]
    assert stage.gate.awaited_members() == {1, 2}, "for answered changes, too"
    stage.end = 2000
    stage.wait(2000)
    assert stage.done == [1000]
    stage.gate.set_term(term())  # it was not to be
    assert stage.done == [1000, 2000]


def test_a_disconnected_member_is_proposed_to_leave_and_awaited_until_then() -> None:
    stage = Stage({}, term(r2="a"))
    slave = stage.slave(2)
    stage.gate.record_ack(slave, 1000)
    stage.end = 2000
    stage.wait(2000)
    stage.gate.remove_slave(slave)
    assert stage.proposed == [frozenset({1})]
    assert stage.done == []
    stage.gate.set_term(term())
    assert stage.done == [2000]


def test_a_member_that_is_behind_for_too_long_leaves_the_set() -> None:
    stage = Stage({"catch_up_ms": 10_000}, term(r2="a"))
    slave = stage.slave(2)
    stage.gate.record_ack(slave, 1000)
    stage.end = 2000
    stage.gate.tick()
    stage.clock.advance(9.9)
    stage.gate.tick()
    assert stage.proposed == []
    stage.clock.advance(0.2)
    stage.gate.tick()
    assert stage.proposed == [frozenset({1})]


def test_a_silent_slave_leaves_the_set_before_a_send_fails_or_a_lease_ends() -> None:
    """The slave's process is stopped while its connection stays open."""
    stage = Stage({}, term(r2="a"))
    slave = stage.slave(2)
    stage.gate.record_ack(slave, 1000)
    stage.gate.tick()
    stage.end = 2000
    stage.wait(2000)
    begin_s = stage.clock.monotonic_s()
    while not stage.proposed:
        stage.clock.advance(0.2)  # the sweep
        stage.gate.tick()
    assert stage.proposed == [frozenset({1})]
    waited_s = stage.clock.monotonic_s() - begin_s
    assert 2.4 < waited_s < min(stage.gate.timeout_s, LEASE_S)
    stage.gate.set_term(term())
    assert stage.done == [2000]


def test_a_member_that_has_not_connected_yet_has_time() -> None:
    stage = Stage({"catch_up_ms": 10_000}, term(r2="a"))
    stage.gate.tick()
    assert stage.proposed == []
    stage.clock.advance(10.1)
    stage.gate.tick()
    assert stage.proposed == [frozenset({1})]


def test_lag_is_the_age_of_the_first_missing_byte() -> None:
    stage = Stage({})
    slave = stage.slave()
    for end in (1000, 1100, 1200):
        stage.end = end
        stage.gate.tick()
        stage.clock.advance(0.2)
    stage.gate.record_ack(slave, 1100)
    assert stage.gate.lag_ms(stage.gate.slaves[slave]) == 200
    stage.gate.record_ack(slave, 1200)
    assert stage.gate.lag_ms(stage.gate.slaves[slave]) == 0


def test_a_stopping_master_does_not_change_the_set() -> None:
    stage = Stage({}, term(r2="a"))
    slave = stage.slave(2)
    stage.gate.record_ack(slave, 1000)
    stage.gate.propose = None
    stage.gate.remove_slave(slave)
    stage.gate.tick()
    assert stage.proposed == []
