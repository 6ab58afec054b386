"""Replicas that elect by `failover.election`, as a model: logs are lists, messages are choices.

Whatever may happen happens in any order: views are old, swaps are lost, unheard or late, processes
are killed, disks wiped, power is lost with a part of the log, leases end though their owner lives,
a deposed master goes on. `World.step` does one thing; `World.check` looks at what must hold:

- an epoch has one master, and it stood in the set before, in its incarnation;
- what was confirmed is in the log of every member of the set, in its incarnation, in order.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sluicemq.broker.failover import election
from sluicemq.broker.failover.election import (
    BecomeCandidate,
    Blocked,
    Decline,
    Elect,
    Follow,
    Lead,
    Member,
    State,
    View,
    Wait,
)

Record = tuple[int, int]  # epoch, number
NOBODY: Final = State(0, 0, "", "", "", {})


@dataclass
class Replica:
    """One process with its disk."""

    id: int
    incarnation: str
    life: str
    log: list[Record] = field(default_factory=list)
    view: View = field(default_factory=lambda: View(None, {}))
    role: str = "none"  # none, lead, follow, stand
    term: State = NOBODY
    acknowledged: dict[tuple[int, str], int] = field(default_factory=dict)
    confirmed: int = 0
    began: int = 0
    """How long its log was when it began to lead."""
    unsettled: State | None = None
    is_alive: bool = True

    @property
    def member(self) -> Member:
        epoch = self.log[-1][0] if self.log else 0
        standing = self.term.term if self.role == "stand" else 0
        return Member(
            self.id, self.life, self.incarnation, "a", "h", epoch, len(self.log), standing
        )


class World:
    """Some replicas and one record."""

    def __init__(self, rng: random.Random, replicas: int = 3) -> None:
        self.rng = rng
        self.state: State | None = None
        self.version = 0
        self.members: dict[int, Member] = {}
        self.late: list[State] = []
        self.confirmed: list[Record] = []
        self.masters: dict[int, tuple[int, str]] = {}
        self.elections = 0
        self._names = 0
        self._numbers = 0
        self.replicas = [Replica(i + 1, self.name(), self.name()) for i in range(replicas)]

    def name(self) -> str:
        self._names += 1
        return f"n{self._names}"

    def step(self) -> None:
        replica = self.rng.choice(self.replicas)
        other = self.rng.choice(self.replicas)
        actions: list[Callable[[Replica], None]] = (
            [self.look] * 6 + [self.act] * 10 + [self.append] * 3 + [self.confirm] * 4
        )
        actions += [self.leave_out, self.expire, self.be_late]
        actions += [self.kill] * (1 if replica.is_alive else 6)
        choice = self.rng.randrange(len(actions) + 12)
        if choice < len(actions):
            actions[choice](replica)
        elif choice == len(actions):
            self.take_in(replica, other)
        elif choice == len(actions) + 1 and self.rng.random() < 0.5:
            self.damage(replica)
        else:
            self.replicate(replica, other)

    # ------------------------------------------------------------------------------ the service

    def swap(self, state: State) -> bool:
        if state.version != (self.state.version if self.state else 0):
            return False
        before, self.version = self.state, self.version + 1
        self.state = state._replace(version=self.version)
        if before is None or before.term != state.term:
            assert before is None or state.term > before.term, "epochs go back"
            master = (state.master_id, state.run_id)
            assert self.masters.setdefault(state.term, master) == master, "two masters"
            assert before is None or state.is_unclean or state.master_id in before.in_sync
            self.elections += 1
        return True

    def propose(self, replica: Replica, state: State) -> None:
        """A swap whose request or answer may be lost; then nobody knows."""
        fate = self.rng.choice(("well", "well", "well", "lost", "late", "unheard"))
        replica.unsettled = state
        if fate == "late":
            self.late.append(state)
        elif fate != "lost":
            self.swap(state)
            if fate == "well":
                self.settle(replica)

    def settle(self, replica: Replica) -> None:
        """It reads what came of it, and only then forgets what it has proposed."""
        self.look(replica)
        state = replica.view.state
        if replica.role == "lead" and state is not None:
            if (state.term, state.run_id) == (replica.term.term, replica.life):
                replica.term = state
            else:
                replica.role = "none"
        replica.unsettled = None

    def be_late(self, _replica: Replica) -> None:
        if self.late:
            self.swap(self.late.pop(self.rng.randrange(len(self.late))))

    # ------------------------------------------------------------------------------ a replica

    def look(self, replica: Replica) -> None:
        if replica.is_alive:
            replica.view = View(self.state, dict(self.members))

    def act(self, replica: Replica) -> None:
        if replica.is_alive and replica.unsettled is not None:
            self.propose(replica, replica.unsettled)
        elif replica.is_alive:
            if self.rng.random() < 0.5:
                self.members[replica.id] = replica.member
            self.decide(replica)

    def decide(self, replica: Replica) -> None:
        step = election.next_step(replica.view, replica.member, self.rng.choice((0.0, 1.5, 9.0)))
        match step:
            case Lead(state):
                if replica.role != "lead" or replica.term.term != state.term:
                    replica.acknowledged = {}
                    replica.confirmed, replica.began = 0, len(replica.log)
                replica.role, replica.term = "lead", state
            case Follow(state):
                replica.role, replica.term = "follow", state
            case BecomeCandidate(state):
                replica.role, replica.term = "stand", state
                self.members[replica.id] = replica.member
            case Elect(state) | Decline(state):
                self.propose(replica, state)
            case Blocked():
                replica.role = "none"
            case Wait():
                pass

    def append(self, replica: Replica) -> None:
        if replica.is_alive and replica.role == "lead":
            self._numbers += 1
            replica.log.append((replica.term.term, self._numbers))

    def replicate(self, master: Replica, slave: Replica) -> None:
        """Some of the log, or an acknowledgement, or both."""
        term = slave.term
        if not (master.is_alive and slave.is_alive and master is not slave):
            return
        if (master.role, slave.role, term.term) != ("lead", "follow", master.term.term):
            return
        same = 0
        for mine, its in zip(slave.log, master.log, strict=False):
            if mine != its:
                break
            same += 1
        del slave.log[same:]
        slave.log += master.log[same : same + self.rng.randrange(1, 4)]
        if self.rng.random() < 0.8:
            master.acknowledged[slave.id, slave.incarnation] = len(slave.log)

    def confirm(self, master: Replica) -> None:
        if not (master.is_alive and master.role == "lead"):
            return
        needed = dict(master.term.in_sync)
        ends = [len(master.log)]
        sets = [needed, master.unsettled.in_sync] if master.unsettled else [needed]
        for waited_for in sets:
            ends += [
                master.acknowledged.get(member, 0)
                for member in waited_for.items()
                if member[0] != master.id
            ]
        master.confirmed = max(master.confirmed, min(ends))
        found = master.log[: master.confirmed]
        known = min(len(found), len(self.confirmed))
        assert found[:known] == self.confirmed[:known], "another log was confirmed"
        if len(found) > known:
            self.confirmed = found

    def leave_out(self, master: Replica) -> None:
        if master.is_alive and master.role == "lead" and master.unsettled is None:
            in_sync = dict(master.term.in_sync)
            if (left := self.rng.choice(sorted(in_sync))) != master.term.master_id:
                del in_sync[left]
            self.propose(master, master.term._replace(in_sync=in_sync))

    def take_in(self, master: Replica, slave: Replica) -> None:
        """By what its connection has claimed and acknowledged, not by an older view. All that was
        confirmed before lies in the log with which the master began."""
        if not (master.is_alive and master.role == "lead") or master.unsettled is not None:
            return
        key = (slave.id, slave.incarnation)
        needed = max(master.confirmed, master.began)
        if master.acknowledged.get(key, -1) >= needed and slave.id != master.id:
            in_sync = {**master.term.in_sync, slave.id: slave.incarnation}
            self.propose(master, master.term._replace(in_sync=in_sync))

    # --------------------------------------------------------------------------------- mishaps

    def expire(self, replica: Replica) -> None:
        self.members.pop(replica.id, None)

    def kill(self, replica: Replica) -> None:
        replica.is_alive = not replica.is_alive
        replica.life = self.name()
        replica.role, replica.term, replica.unsettled = "none", NOBODY, None
        replica.acknowledged, replica.confirmed = {}, 0

    def damage(self, replica: Replica) -> None:
        """The disk is wiped, or power is lost with what was not synced."""
        replica.is_alive = True
        self.kill(replica)
        replica.incarnation = self.name()
        del replica.log[self.rng.randrange(len(replica.log) + 1) :]

    # --------------------------------------------------------------------------------- what holds

    def check(self) -> None:
        if self.state is None:
            return
        for replica in self.replicas:
            if self.state.in_sync.get(replica.id) == replica.incarnation:
                assert replica.log[: len(self.confirmed)] == self.confirmed, "confirmed, not there"


def run(seed: int | random.Random, steps: int = 600) -> World:
    """One history. Raises AssertionError for what must not be."""
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    world = World(rng, rng.choice((2, 3, 3, 5)))
    for _ in range(steps):
        world.step()
        world.check()
    return world


def run_all(seeds: int) -> None:
    """Histories until one of them shows what must not be."""
    for seed in range(seeds):
        run(seed)
