"""The design of replication as a program of a few hundred lines, its rules as switches.

Nothing of the product is in here. A run is a seed; it makes the world, the faults and the history
that the checker judges. What each of `Rules` stands for is in docs/design/0022-replication.md,
"What holds, and why". With all of them every seed must be fine (so the design is); with any one
switched off some seed must not be (so the checker sees, and the rule is needed).

A log is a list of entries, a position an index in it. A disk outlives its process: killed, it keeps
everything; without power, what was synced; wiped, nothing. Time is spent in messages alone.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from histories.history import Change, History, Outcome, Queue, Send
from histories.world import LATER, LEASE_S, QUEUE, Disk, Entry, Record, Rules, Session, World

TICK_S = 0.25
BEHIND_S = 3.0
STANDING_S = 0.6
SYNC_S = 0.02
STATE_COMES = 0.8
"""How likely an operation is there with the bytes: it comes by another connection."""


class Node:
    """A replica: a disk, and a process while it is up."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.rules, self.id = world, world.rules, number
        self.disk = Disk(f"disk-{number}-0")
        self.wiped = self.started = 0
        self.is_up = False
        self.pauses_until_s = 0.0
        self._forget()
        self.start()

    def _forget(self) -> None:
        self.life = f"life-{self.id}-{self.started}"
        self.seen = Record(-1)
        self.is_master = self.is_standing = self.serves = False
        self.epoch = 0
        self.start_at = 0
        self.following: tuple[int, str, int] | None = None
        self.dialled_s = -10.0
        self.heard_s = -10.0
        self.sessions: dict[int, Session] = {}
        self.proposals: dict[int, list[Record]] = {}
        self.waiting: list[tuple[int, int, Callable[[], None]]] = []
        """(end of the log, number of the state), answer."""
        self.states: list[tuple[int, int, int, frozenset[str]]] = []
        """Operations to come: number, end of the log, mark, changes."""
        self.state = 0
        self.has_snapshot = False

    # --- life

    def start(self) -> None:
        if self.is_up:
            return
        self.started += 1
        self._forget()
        self.is_up = True
        if not self.rules.epoch_of_a_life:
            self.life = f"life-{self.id}"
        self.disk.lines = [line for line in self.disk.lines if line[1] <= len(self.disk.log)]
        self.disk.confirmed = min(self.disk.confirmed, len(self.disk.log))
        self.disk.synced = len(self.disk.log)
        life = self.life, self.started
        self.world.at(0.0, lambda: self.tick(life))

    def die(self, kind: str) -> None:
        self.is_up = False
        disk, rng = self.disk, self.world.rng
        if kind == "power":
            if self.world.is_sync_flush:
                del disk.log[rng.randint(min(disk.synced, len(disk.log)), len(disk.log)) :]
            else:
                if self.rules.incarnations:
                    self.wiped += 1
                    disk.incarnation = f"disk-{self.id}-{self.wiped}"
                if rng.random() < 0.5:
                    del disk.log[rng.randint(len(disk.log) // 2, len(disk.log)) :]
        if kind == "wipe":
            if self.rules.incarnations:
                self.wiped += 1
            self.disk = Disk(f"disk-{self.id}-{self.wiped}")

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Only in this life, and not while it is paused."""
        started = self.started

        def do() -> None:
            if not self.is_up or self.started != started:
                return
            if self.pauses_until_s > self.world.now_s:
                self.world.at(self.pauses_until_s - self.world.now_s, do)
            else:
                work()

        self.world.at(delay_s, do)

    def tell(self, target: int, work: Callable[["Node"], None]) -> None:
        """To another replica's process."""
        node = self.world.nodes[target - 1]
        self.world.carry(self.id, target, lambda: node.later(0.0, lambda: work(node)))

    def tick(self, life: tuple[str, int]) -> None:
        """What comes again and again: lease, record, roles, feeds."""
        if not self.is_up or life[1] != self.started:
            return
        self.later(TICK_S, lambda: self.tick(life))
        self.ask(self._renew_and_read, self._saw)
        if self.is_master:
            self._work()
        elif self.following and self.world.now_s - max(self.heard_s, self.dialled_s) > 1.0:
            self._dial()

    def ask(self, question: Callable[[], Any], answer: Callable[..., None]) -> None:
        """A request to the consensus; it or its answer may be lost, or be late."""
        world, started = self.world, self.started

        def arrived() -> None:
            result = question()

            def back() -> None:
                if self.started == started and self.is_up:
                    self.later(0.0, lambda: answer(*result))

            world.carry(-1, self.id, back)

        world.carry(self.id, -1, arrived)

    def _renew_and_read(self) -> tuple[Record, dict[int, tuple[str, str, float]]]:
        world = self.world
        if self.is_up:
            world.lives[self.id] = (self.life, self.disk.incarnation, world.now_s + LEASE_S)
        return world.record, {i: own for i, own in world.lives.items() if own[2] > world.now_s}

    # --- roles

    def _saw(self, record: Record, lives: dict[int, tuple[str, str, float]]) -> None:
        if record.version < self.seen.version:
            return
        is_news = record.version > self.seen.version
        self.seen = record
        if is_news:
            self.proposals = {v: p for v, p in self.proposals.items() if v >= record.version}
            self.is_standing = False
        if not self.rules.settles_proposals:
            self.proposals.clear()
        is_mine = record.master == self.id and record.life == self.life
        if is_mine and self.epoch != record.epoch:
            self._become_master(record)
        elif self.is_master and not is_mine and self.rules.deposed_is_silent:
            self._depose()
        if self.is_master:
            return
        master = lives.get(record.master)
        if master is not None and master[0] == record.life and record.master != self.id:
            follows = (record.master, record.life, record.epoch)
            if self.following != follows and not (self.is_standing and self.proposals):
                self.is_standing = False
                self.following = follows
                self.has_snapshot = False
                self.states.clear()
                self._dial()
        elif self._may_stand(record):
            self._stand(record)

    def _may_stand(self, record: Record) -> bool:
        member = record.members.get(self.id)
        is_member = member == self.disk.incarnation or not self.rules.only_members
        return is_member and self.disk.is_whole

    def _stand(self, record: Record) -> None:
        if self.is_standing:
            return
        self.is_standing = True
        self.following = None
        last = self.disk.lines[-1][0] if self.disk.lines else 0
        mine = ((last, len(self.disk.log), -self.id), self.disk.incarnation)
        version, published = record.version, self.world.published

        def publish() -> tuple[()]:
            published[version, self.id] = mine
            return ()

        def look() -> tuple[dict[int, tuple[tuple[int, int, int], str]]]:
            return ({i: end for (v, i), end in published.items() if v == version},)

        def choose(ends: dict[int, tuple[tuple[int, int, int], str]]) -> None:
            if self.seen.version != version or not self.is_standing or self.is_master:
                return
            self.is_standing = False
            if not self._may_stand(self.seen) or max(ends.values(), default=mine)[0] > mine[0]:
                return
            chosen = {i: inc for i, (_, inc) in ends.items() if record.members.get(i) == inc}
            chosen[self.id] = self.disk.incarnation
            epoch = record.epoch + 1
            self._propose(replace(record, epoch=epoch, master=self.id, life=self.life,
                                  in_sync=tuple(sorted(chosen.items()))))  # fmt: skip
            self.is_standing = True

        def again() -> None:
            if self.seen.version == version and self.is_standing:
                self.is_standing = False

        self.ask(publish, lambda: None)
        self.later(STANDING_S, lambda: self.ask(look, choose))
        self.later(4 * STANDING_S, again)

    def _propose(self, record: Record) -> None:
        version = record.version
        self.proposals.setdefault(version, []).append(record)
        world = self.world
        self.ask(lambda: (world.swap(version, record), world.record), self._proposed)

    def _proposed(self, _done: bool, record: Record) -> None:
        if record.version > self.seen.version:
            self._saw(record, {self.id: (self.life, self.disk.incarnation, 0.0)})

    def _become_master(self, record: Record) -> None:
        self.following = None
        self.is_master, self.epoch = True, record.epoch
        self.sessions.clear()
        self.is_standing = False
        disk = self.disk
        self.start_at = len(disk.log)
        disk.synced = len(disk.log)
        self.states.clear()
        if self.rules.line_before_bytes:
            disk.lines.append((self.epoch, self.start_at))
        else:
            line = (self.epoch, self.start_at)
            self.later(3.0, lambda: disk.lines.append(line) if self.epoch == line[0] else None)
        self.serves = not self.rules.serves_when_confirmed
        self._confirm()

    def _depose(self) -> None:
        self.is_master = self.serves = False
        self.waiting.clear()
        self.sessions.clear()

    # --- a master

    def take(self, value: str, queue: Queue, answer: Callable[[int, int], None]) -> None:
        """A send."""
        if not (self.is_up and self.is_master and self.serves):
            return
        if self.pauses_until_s > self.world.now_s:
            self.later(0.0, lambda: self.take(value, queue, answer))
            return
        offset, epoch = self._append(queue, value), self.epoch
        self.waiting.append((len(self.disk.log), 0, lambda: answer(offset, epoch)))
        self._feed()

    def _append(self, queue: Queue, value: str, of: str = "") -> int:
        log = self.disk.log
        offset = sum(entry.queue == queue for entry in log)
        log.append(Entry(self.epoch, queue, offset, value, of))
        if self.world.is_sync_flush:
            end = len(log)
            self.later(SYNC_S, lambda: self._synced(end))
        else:
            self.disk.synced = len(log)
        return offset

    def _synced(self, end: int) -> None:
        self.disk.synced = max(self.disk.synced, min(end, len(self.disk.log)))
        if self.is_master:
            self._confirm()
        elif self.following is not None:
            self._report()

    def change(self, value: str, answer: Callable[[], None]) -> None:
        """A topic, say: answered when the set has it."""
        if self.is_up and self.is_master and self.serves:
            self.disk.changes |= {value}
            self.state += 1
            self.waiting.append((len(self.disk.log), self.state, answer))
            if not self.rules.answers_after_state:
                self.waiting[-1] = (len(self.disk.log), 0, answer)
            self._feed()

    def _member(self, replica: int, incarnation: str) -> Session | None:
        session = self.sessions.get(replica)
        if session is None or (session.incarnation != incarnation and self.rules.claims_bind):
            return None
        return session

    def _confirm(self) -> None:
        """What all of the set have, and of each set that is proposed."""
        sets = [self.seen.members]
        if self.rules.counts_proposals:
            sets += [record.members for all_ in self.proposals.values() for record in all_]
        log_end, state_end = self.disk.synced, self.state
        acks = []
        for replica, incarnation in {pair for members in sets for pair in members.items()}:
            if replica == self.id:
                continue
            session = self._member(replica, incarnation)
            acks.append((session.acked, session.state) if session else (-1, -1))
        if acks and self.rules.waits_for_all:
            log_end = min(log_end, *(ack for ack, _ in acks))
            state_end = min(state_end, *(ack for _, ack in acks))
        elif acks:
            log_end, state_end = min(log_end, max(acks)[0]), min(state_end, max(acks)[1])
        before, self.disk.confirmed = self.disk.confirmed, max(self.disk.confirmed, log_end)
        if log_end >= self.start_at:
            self.serves = True
        ready = [w for w in self.waiting if w[0] <= log_end and w[1] <= state_end]
        self.waiting = [w for w in self.waiting if w not in ready]
        for _, _, answer in ready:
            answer()
        if self.disk.confirmed > before:
            self._feed()

    def shown(self) -> int:
        """What readers see ends here."""
        if not self.rules.shows_confirmed:
            return len(self.disk.log)
        return min(self.disk.confirmed, len(self.disk.log))

    def _work(self) -> None:
        """Each tick: deliveries, the set, the feeds."""
        self._deliver()
        world, record = self.world, self.seen
        for replica, session in list(self.sessions.items()):
            if world.now_s - session.heard_s > 2.0:
                del self.sessions[replica]
            if session.acked >= len(self.disk.log):
                session.caught_up_s = world.now_s
        self._change_set(record)
        self._feed()
        self._confirm()

    def _deliver(self) -> None:
        """A delayed message moves once it is visible; then the mark moves, and is saved."""
        if not self.serves:
            return
        delayed = [e for e in self.disk.log[: self.shown()] if e.queue == LATER]
        if len(delayed) > self.disk.mark:
            for entry in delayed[self.disk.mark :]:
                self.world.history.sends.append(Send(f"late-{entry.value}-{self.life}-{self.world.now_s}",
                                                     QUEUE, self.world.now_s))  # fmt: skip
                self._append(QUEUE, self.world.history.sends[-1].value, entry.value)
            self.disk.mark = len(delayed)
            self.state += 1

    def _change_set(self, record: Record) -> None:
        open_ = self.proposals.get(record.version)
        if open_:
            if self.world.rng.random() < 0.3:
                self._propose(replace(record))  # the same set once more: the version moves on
            return
        members, now_s = record.members, self.world.now_s
        for replica, incarnation in record.in_sync:
            session = self._member(replica, incarnation)
            if replica != self.id and (session is None or now_s - session.caught_up_s > BEHIND_S):
                if session is None and now_s - self.dialled_s < 1.0:
                    continue  # it has just begun
                del members[replica]
                self._propose(replace(record, in_sync=tuple(members.items())))
                return
        for replica, session in self.sessions.items():
            if members.get(replica) == session.incarnation:
                continue
            # All that masters before this one confirmed lies in the log it began with.
            needed = max(self.disk.confirmed, self.start_at)
            is_there = session.acked >= needed and session.state >= self.state
            if is_there or not self.rules.joins_caught_up:
                members[replica] = session.incarnation
                self._propose(replace(record, in_sync=tuple(members.items())))
                return

    def _feed(self) -> None:
        for session in self.sessions.values():
            if session.is_compared:
                self._feed_one(session)

    def _feed_one(self, session: Session) -> None:
        log = self.disk.log
        entries = log[session.sent : session.sent + 20]
        start, session.sent = session.sent, session.sent + len(entries)
        confirmed, lines = self.disk.confirmed, list(self.disk.lines)
        state = (self.state, len(log), self.disk.mark, self.disk.changes)
        life = session.life
        self.tell(
            session.replica, lambda node: node.fed(life, start, entries, lines, confirmed, state)
        )

    def joined(self, replica: int, incarnation: str, life: str, end: int) -> None:
        """A slave dials, with its claim."""
        if not self.is_master:
            return
        old = self.sessions.get(replica)
        session = Session(replica, incarnation, life, heard_s=self.world.now_s,
                          caught_up_s=self.world.now_s)  # fmt: skip
        if old is not None and not self.rules.claims_bind:
            session.acked, session.state = old.acked, old.state
        self.sessions[replica] = session
        lines, log_end, epoch, own = (
            list(self.disk.lines),
            len(self.disk.log),
            self.epoch,
            self.life,
        )
        self.tell(replica, lambda node: node.compared(life, own, epoch, lines, log_end))

    def reported(self, replica: int, life: str, end: int, state: int, *, first: bool) -> None:
        """A slave's log ends there, and it has the state up to that number."""
        session = self.sessions.get(replica)
        if not self.is_master or session is None or session.life != life:
            return
        session.heard_s = self.world.now_s
        if end > len(self.disk.log):
            del self.sessions[replica]
            return
        if first:
            session.is_compared, session.sent = True, end
        if session.is_compared:
            session.acked = max(session.acked, end) if not first else end
            session.state = max(session.state, state)
            if end >= len(self.disk.log):
                session.caught_up_s = self.world.now_s
            if session.sent > end and self.world.rng.random() < 0.05:
                session.sent = end  # something was lost on the way: TCP would say it again
        self._confirm()
        if session.sent < len(self.disk.log):
            self._feed()

    # --- a follower

    def _dial(self) -> None:
        assert self.following is not None
        self.dialled_s = self.world.now_s
        life, incarnation, end = self._session_life(), self.disk.incarnation, len(self.disk.log)
        self.tell(self.following[0], lambda node: node.joined(self.id, incarnation, life, end))

    def _session_life(self) -> str:
        """A connection's name: of this life, and this attempt."""
        self.session = f"{self.life}-{self.started}-{self.world.now_s}"
        return self.session

    def compared(
        self, session: str, life: str, epoch: int, lines: list[tuple[int, int]], end: int
    ) -> None:
        """The master's epochs have come: where do our logs part?"""
        if self.following is None or self.session != session or self.following[1:] != (life, epoch):
            return
        disk = self.disk
        point = self._common(lines, end)
        if point < len(disk.log) and self.rules.truncates:
            disk.is_whole = False
            del disk.log[point:]
            disk.lines = [line for line in disk.lines if line[1] < point]
            disk.synced = min(disk.synced, point)
        if not self.has_snapshot and (disk.mark or disk.changes):
            disk.is_whole = False
        self.heard_s = self.world.now_s
        self._report(first=True)

    def _common(self, lines: list[tuple[int, int]], end: int) -> int:
        def ends(of: list[tuple[int, int]], last: int) -> dict[int, int]:
            following = [*(start for _, start in of[1:]), last][: len(of)]
            return {epoch: stop for (epoch, _), stop in zip(of, following, strict=True)}

        mine, theirs = ends(self.disk.lines, len(self.disk.log)), ends(lines, end)
        both = [epoch for epoch in mine if epoch in theirs]
        return min(mine[max(both)], theirs[max(both)]) if both else 0

    def fed(
        self,
        session: str,
        start: int,
        entries: list[Entry],
        lines: list[tuple[int, int]],
        confirmed: int,
        state: tuple[int, int, int, frozenset[str]],
    ) -> None:
        """Bytes, confirmed offset, state."""
        if self.following is None or self.session != session or self.is_master:
            return
        disk = self.disk
        self.heard_s = self.world.now_s
        known = len(disk.log) - start
        if known < 0 and not entries:
            return
        if known >= 0:
            for entry in entries[known:]:
                reached = [x for x in lines if x[1] <= len(disk.log) and x[0] <= entry.epoch]
                disk.lines += [line for line in reached if line not in disk.lines]
                disk.log.append(entry)
        disk.confirmed = max(disk.confirmed, min(confirmed, len(disk.log)))
        if self.world.rng.random() < STATE_COMES:
            self.states.append(state)
        self._apply()
        if self.has_snapshot and len(disk.log) >= confirmed:
            disk.is_whole = True
        if self.world.is_sync_flush:
            end = len(disk.log)
            self.later(SYNC_S, lambda: self._synced(end))
        else:
            disk.synced = len(disk.log)
        self._report()

    def _apply(self) -> None:
        """Operations whose place the log has reached."""
        disk = self.disk
        for number, end, mark, changes in self.states:
            if end <= len(disk.log) and (number >= self.state or not self.has_snapshot):
                self.state, disk.mark, disk.changes = number, mark, changes
                self.has_snapshot = True
        self.states = [state for state in self.states if state[1] > len(disk.log)][-3:]

    def _report(self, *, first: bool = False) -> None:
        if self.following is None:
            return
        if first:
            self.disk.synced = len(self.disk.log)
        session, end = self.session, min(self.disk.synced, len(self.disk.log))
        state = self.state if self.has_snapshot else -1
        own = self.id

        def report(node: "Node") -> None:
            node.reported(own, session, end, state, first=first)

        self.tell(self.following[0], report)


def run(seed: int, rules: Rules | None = None) -> History:
    """One history of the model."""
    world = World(seed, rules or Rules(), Node)
    for _ in range(world.rng.choice((1, 2, 4))):
        world.live(world.rng.uniform(5, 25))
        if world.rng.random() < 0.3:
            world.settle()
            world.is_calm = False
    world.settle()
    world.leave()
    _check_deliveries(world.history, world.nodes)
    return world.history


def _check_deliveries(history: History, nodes: list[Node]) -> None:
    """The delivery of an acknowledged delayed message is promised as well."""
    for left in history.left[:1]:
        disk = next(node.disk for node in nodes if f"replica {node.id}" == left.name)
        delivered = {entry.of for entry in disk.log}
        for send in history.sends:
            if send.queue == LATER and send.outcome is Outcome.OK and send.value not in delivered:
                history.changes.append(Change(f"delivery of {send.value}", Outcome.OK))
