"""Around the replicas of the model: time, a network, the record of the consensus, clients, faults.

See `histories.model`. Events are on a heap, chance is the seed's; each seed draws a few kinds of
faults, how many, and how often messages are late.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from histories.history import Change, End, History, Left, Outcome, Queue, Seen, Send, TermSeen

if TYPE_CHECKING:
    from histories.model import Node

QUEUE: Queue = ("t", 0)
LATER: Queue = ("later", 0)
LEASE_S = 2.0
CALM_S = 60.0
FAULTS = (
    "kill",
    "kill",
    "kill",
    "power",
    "wipe",
    "pause",
    "cut",
    "one-way",
    "consensus",
    "away",
    "loss",
)


@dataclass(frozen=True)
class Rules:
    """Each True is a rule of the design."""

    epoch_of_a_life: bool = True
    truncates: bool = True
    line_before_bytes: bool = True
    claims_bind: bool = True
    joins_caught_up: bool = True
    counts_proposals: bool = True
    settles_proposals: bool = True
    serves_when_confirmed: bool = True
    waits_for_all: bool = True
    shows_confirmed: bool = True
    only_members: bool = True
    incarnations: bool = True
    deposed_is_silent: bool = True
    answers_after_state: bool = True


@dataclass(frozen=True)
class Record:
    """The consensus' `state`."""

    version: int = 0
    epoch: int = 0
    master: int = -1
    life: str = ""
    in_sync: tuple[tuple[int, str], ...] = ()

    @property
    def members(self) -> dict[int, str]:
        return dict(self.in_sync)


@dataclass(frozen=True)
class Entry:
    """A record of the log. `of`: the delayed value that a delivery is of."""

    epoch: int
    queue: Queue
    offset: int
    value: str
    of: str = ""


@dataclass
class Disk:
    """What a process leaves. `mark` is a delay offset: so many entries of LATER are delivered."""

    incarnation: str
    log: list[Entry] = field(default_factory=list)
    synced: int = 0
    lines: list[tuple[int, int]] = field(default_factory=list)
    confirmed: int = 0
    is_whole: bool = True
    mark: int = 0
    changes: frozenset[str] = frozenset()


@dataclass
class Session:
    """A slave, seen by its master."""

    replica: int
    incarnation: str
    life: str
    acked: int = -1
    state: int = -1
    sent: int = 0
    heard_s: float = 0.0
    caught_up_s: float = 0.0
    is_compared: bool = False


class World:
    """Time, network, consensus, replicas, clients, faults of one seed."""

    def __init__(self, seed: int, rules: Rules, make: "Callable[[World, int], Node]") -> None:
        self.rng = random.Random(seed)
        self.rules = rules
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.history = History()
        self.record = Record()
        self.lives: dict[int, tuple[str, str, float]] = {}
        """id -> life, incarnation, until when."""
        self.published: dict[tuple[int, int], tuple[tuple[int, int, int], str]] = {}
        """(version of the record, id) -> (last epoch, end, -id), incarnation."""
        self.cuts: dict[tuple[int, int], float] = {}
        self.loss = 0.0
        self.latency_s = 0.01
        self.is_calm = False
        self.kinds = self.rng.choices(FAULTS, k=self.rng.choice((1, 2, 4, 12)))
        """A few kinds make what all of them together drown."""
        self.faults = self.rng.choice((0.2, 0.6, 2.0))
        self.lateness = self.rng.choice((0.0, 0.02, 0.2))
        count = self.rng.choice((2, 3, 3))
        self.is_sync_flush = self.rng.random() < 0.5
        self.nodes = [make(self, index) for index in range(1, count + 1)]
        self.values = 0
        members = tuple((node.id, node.disk.incarnation) for node in self.nodes)
        self.decide(Record(1, 0, -1, "", members))

    # --- time and network

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, work))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, work = heapq.heappop(self._events)
            work()
        self.now_s = until_s

    def carry(self, source: int, target: int, work: Callable[[], None]) -> None:
        """A message; -1 is the consensus, 0 a client. Lost in a cut, of one direction or both."""
        if self.cuts.get((source, target), 0.0) > self.now_s or self.rng.random() < self.loss:
            return
        delay_s = self.latency_s * self.rng.uniform(0.2, 2)
        if self.rng.random() < self.lateness and not self.is_calm:
            delay_s += self.rng.uniform(0, 3 if -1 in (source, target) else 0.5)
        self.at(delay_s, work)

    # --- consensus

    def decide(self, record: Record) -> None:
        self.record = record
        self.history.terms.append(
            TermSeen(record.epoch, record.master, record.life, record.members)
        )

    def swap(self, expected: int, record: Record) -> bool:
        if self.record.version != expected:
            return False
        self.decide(replace(record, version=expected + 1))
        return True

    # --- what happens

    def live(self, seconds: float) -> None:
        """Clients and faults at random."""
        rng, end_s = self.rng, self.now_s + seconds
        while self.now_s < end_s:
            rng.choices(
                (self.send, self.look, self.look_at_end, self.change, self.fault),
                (8, 4, 8, 1, self.faults),
            )[0]()
            self.run(self.now_s + rng.expovariate(12))

    def any_node(self) -> "Node":
        """The master by yesterday's route, or anybody."""
        masters = [node for node in self.nodes if node.is_up and node.is_master]
        return self.rng.choice(masters if masters and self.rng.random() < 0.9 else self.nodes)

    def send(self) -> None:
        self.values += 1
        queue = LATER if self.rng.random() < 0.1 else QUEUE
        send, node = Send(f"v{self.values}", queue, self.now_s), self.any_node()
        self.history.sends.append(send)

        def told(offset: int, epoch: int) -> None:
            if send.outcome is Outcome.UNSURE:
                send.acknowledge(queue, offset, self.now_s, epoch)

        def answer(offset: int, epoch: int) -> None:
            self.carry(node.id, 0, lambda: told(offset, epoch))

        self.carry(0, node.id, lambda: node.take(send.value, queue, answer))

    def look(self) -> None:
        node = self.rng.choice(self.nodes)
        shown = node.shown() if node.is_up else 0
        for entry in node.disk.log[max(shown - self.rng.choice((1, 3)), 0) : shown]:
            seen = Seen(entry.queue, entry.offset, entry.value, self.now_s, f"{node.id}")
            self.history.seen.append(seen)

    def look_at_end(self) -> None:
        node = self.any_node()
        if node.is_up and node.is_master and node.serves:
            entries = node.disk.log[: node.shown()]
            end = sum(entry.queue == QUEUE for entry in entries)
            self.history.ends.append(End(QUEUE, end, self.now_s, self.now_s, node.epoch))

    def change(self) -> None:
        self.values += 1
        node, value = self.any_node(), f"c{self.values}"

        def answer() -> None:
            self.history.changes.append(Change(value, Outcome.OK))

        self.carry(0, node.id, lambda: node.change(value, answer))

    # --- faults

    def fault(self) -> None:
        rng = self.rng
        node = rng.choice(self.nodes)
        if rng.random() < 0.4:
            node = next((other for other in self.nodes if other.id == self.record.master), node)
        kind = rng.choice(self.kinds)
        for_s = rng.choice((0.05, 0.5, 2.0, 5.0, rng.uniform(0, 15)))
        if kind in ("kill", "power", "wipe"):
            if kind == "wipe" and self.record.master == node.id and len(self.record.in_sync) < 2:
                kind = "kill"  # the only disk that has everything
            node.die(kind)
            self.at(for_s, node.start)
        elif kind == "pause":
            node.pauses_until_s = self.now_s + for_s
        elif kind == "loss":
            self.loss, self.latency_s = rng.choice(((0.0, 0.01), (0.05, 0.1), (0.0, 0.6)))
        else:
            others = [-1] if kind == "consensus" else [other.id for other in self.nodes]
            if kind == "away":
                others.append(-1)
            for other in others:
                self.cuts[node.id, other] = self.now_s + for_s
                if kind != "one-way":
                    self.cuts[other, node.id] = self.now_s + for_s

    def settle(self) -> None:
        """All faults end, everybody is there; then what is left."""
        self.cuts.clear()
        self.loss, self.latency_s, self.is_calm = 0.0, 0.01, True
        for node in self.nodes:
            node.pauses_until_s = 0.0
            node.start()
        self.run(self.now_s + CALM_S)

    def leave(self) -> None:
        """What the elected master has, then the others of the set."""
        members = self.record.members
        nodes = [
            node for node in self.nodes
            if members.get(node.id) == node.disk.incarnation and node.disk.is_whole
        ]  # fmt: skip
        nodes.sort(
            key=lambda node: (not node.is_master or node.epoch != self.record.epoch, node.id)
        )
        if nodes and not (nodes[0].is_master and nodes[0].serves):
            nodes = []  # nobody may take over: what was acknowledged waits for its disk
        for node in nodes:
            left = Left(f"replica {node.id}", changes=node.disk.changes, log=tuple(node.disk.log))
            for entry in node.disk.log:
                left.queues.setdefault(entry.queue, {})[entry.offset] = entry.value
            self.history.left.append(left)
