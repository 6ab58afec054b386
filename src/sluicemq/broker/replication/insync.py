"""Who has what of the log, and so what may be seen and answered: the gate of `group_commit.py`.

Each connection of a slave (`feed.py`) says how far the slave has the log. From that follows
`confirmed`, the end of what as many replicas have as have to; nothing behind it is visible. It
never goes back. There are two rules:

    plain      roles of the file: the master and `in_sync_replicas` - 1 slaves, whichever they are
    failover   a term of the consensus: all members of its in-sync set, each in its incarnation

In failover the set changes by `propose`. While a proposal is under way both sets count, until
`decided` says what stands. Who is to come in has to have all that is confirmed at that moment, in
log and state, and a busy master never stands still. So who is near is waited for like a member, for
JOIN_S at most (`Joining`): then it only has to come to where everything was at the beginning.

An acknowledgement is one of the incarnation that the slave has claimed (request 900301), and a
claim of another life of its process ends the older connections (design/0022, "What holds, and
why").

What plain sends are told, by the settings in the file (spec/ha.md §2):

    inSyncReplicas not written   4.9: SLAVE_NOT_AVAILABLE at once, when no slave is near
    written                      5.x: FLUSH_SLAVE_TIMEOUT; with enableSlaveActingMaster
                                 IN_SYNC_REPLICAS_NOT_ENOUGH, before anything is stored

No I/O and no timer here: `run` is called a few times a second.
"""

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.errors import RequestError, StoreUncertainError
from sluicemq.model.ids import Host
from sluicemq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

SAMPLES_MAX: Final = 512  # ends of the log with their times: a hundred seconds of them
NEAR_S: Final = 1.0
"""Who has what was there so long ago is near."""
JOIN_S: Final = 2.0
REST_S: Final = 15.0
"""The time for which a replica that was waited for in vain is not waited for again."""
NOT_MASTER: Final = "this replica is not master any more, try again."
NOT_ENOUGH: Final = "in-sync replicas not enough"
"""RocketMQ's words for it."""

Done = Callable[[int | BaseException], None]


class Term(NamedTuple):
    """Who is master. `life` is that of its process, `in_sync` each member's id with its
    incarnation. `is_unclean`: a person has put up with a loss."""

    epoch: int
    master_id: int
    life: str = ""
    address: str = ""
    ha_address: str = ""
    in_sync: Mapping[int, str] = {}
    is_unclean: bool = False


class Link(Protocol):
    """What is asked of a slave's connection. `replica_id` is None of a plain one."""

    @property
    def replica_id(self) -> int | None: ...

    @property
    def remote(self) -> Host: ...

    def close(self) -> None: ...


class Word(NamedTuple):
    """What a slave has said by 900301: who it is, and how far its state is the master's."""

    incarnation: str
    life: str
    state_number: int


@dataclass(slots=True, eq=False)
class Replica:
    """A slave as its connection shows it. `life` is the claimed one when it was opened."""

    link: Link
    life: str | None
    joined_s: float
    acknowledged: int = -1


class Joining(NamedTuple):
    """A replica that is waited for, and not proposed yet: how long, and what the state's number was
    at the beginning. All that was confirmed since, it has."""

    until_s: float
    state_number: int


@dataclass(slots=True, eq=False)
class InSync:
    """`own_end` is how far this broker itself has the log: under SYNC_FLUSH on its disk.

    `on_confirmed` are told of each new `confirmed`.
    """

    settings: Settings
    clock: Clock
    own_end: Callable[[], int]
    confirmed: int = 0
    own_id: int = 0
    term: Term | None = None
    propose: Callable[[frozenset[int]], None] | None = None
    on_confirmed: list[Callable[[int], None]] = field(default_factory=list)
    state_number: Callable[[], int] = int
    """The number of the state's last operation, which a new member has to have."""
    replicas: dict[Link, Replica] = field(default_factory=dict)
    claims: dict[int, Word] = field(default_factory=dict)
    _proposed: frozenset[int] | None = None
    _joining: dict[int, Joining] = field(default_factory=dict)
    _rests_until_s: dict[int, float] = field(default_factory=dict)
    """Whose joining came to nothing holds up nobody again too soon."""
    _waiting: deque[tuple[int, Done]] = field(default_factory=deque)
    _failure: StoreUncertainError | None = None
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    _begun_s: float = 0.0
    _begin_end: int = 0
    """The end of this broker's log when its term began. Everything that earlier masters confirmed
    lies before it, including what this broker does not know to be confirmed yet."""

    def __post_init__(self) -> None:
        self._begun_s = self.clock.monotonic_s()
        self._begin_end = self.own_end()

    # ------------------------------------------------------------------------- what slaves say

    def joined(self, link: Link) -> None:
        """A slave has connected; in failover it has been through the handshake."""
        claim = self.claims.get(link.replica_id) if link.replica_id is not None else None
        life = claim.life if claim is not None else None
        self.replicas[link] = Replica(link, life, self.clock.monotonic_s())

    def left(self, link: Link) -> None:
        """Its connection is gone."""
        if self.replicas.pop(link, None) is not None:
            if link.replica_id is not None:
                self._joining.pop(link.replica_id, None)
            self._advance()
            self._arrange()

    def acknowledged(self, link: Link, offset: int) -> None:
        """The slave has everything before `offset`. HOT."""
        replica = self.replicas.get(link)
        if replica is None:
            return
        replica.acknowledged = offset
        self._advance()

    def claimed(
        self, replica_id: int, incarnation: str, life: str, log_end: int, state_number: int
    ) -> None:
        """900301: who asks, and what it has. Another life ends the older connections of its id."""
        before = self.claims.get(replica_id)
        self.claims[replica_id] = Word(incarnation, life, state_number)
        if before is not None and before.life == life:
            return
        self._joining.pop(replica_id, None)
        for link in [link for link in self.replicas if link.replica_id == replica_id]:
            link.close()
            self.left(link)

    # --------------------------------------------------------------------------------- the gate

    def wait(self, end: int, done: Done) -> None:
        """`done(confirmed)` when everything before `end` is confirmed; at once if it is, or with
        an error when this broker is no longer master. HOT."""
        if self._failure is not None:
            done(self._failure)
            return
        if end <= self.confirmed:  # whoever waits already waits for more
            done(self.confirmed)
            return
        self._waiting.append((end, done))
        self._advance()

    @property
    def refusal(self) -> RequestError | None:
        """Why nothing may be stored now; None: it may."""
        broker = self.settings.broker
        if self._failure is not None:
            return RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, NOT_MASTER)
        if self.term is not None:
            enough = len(self.term.in_sync) >= broker.in_sync_min
        else:
            enough = not broker.acting_master or self._need() <= 1 + self._near()
        return None if enough else RequestError(ResponseCode.SYSTEM_ERROR, NOT_ENOUGH)

    @property
    def holds_answers(self) -> bool:
        """Are sends answered when they are confirmed? Else when they are written."""
        return self.settings.broker.broker_role == "SYNC_MASTER"

    @property
    def timeout_s(self) -> float:
        return self.settings.broker.slave_timeout_ms / 1000

    @property
    def is_slave_missing(self) -> bool:
        """4.9: no slave could acknowledge, so nobody waits (SLAVE_NOT_AVAILABLE)."""
        return (
            self.term is None
            and self.settings.broker.in_sync_written is None
            and self._need() > 1
            and not self._near()
        )

    def _need(self) -> int:
        """Plain: how many replicas have to have a message."""
        broker = self.settings.broker
        need = broker.in_sync_replicas
        if broker.acting_master and broker.in_sync_auto:
            need = max(broker.in_sync_min, min(need, 1 + self._near()))
        return need

    def is_in_sync(self, link: Link) -> bool:
        """Does this slave count: as a member of the set, else as one that is near enough?"""
        replica = self.replicas.get(link)
        if self.term is not None:
            return link.replica_id in self.term.in_sync and replica is not None
        least = self.own_end() - self.settings.broker.gap_bytes_max
        # An empty slave acknowledges nothing before its first byte; until then it has 0 bytes.
        return replica is not None and max(replica.acknowledged, 0) >= least

    def _near(self) -> int:
        """Slaves that are no further behind than haMaxGapNotInSync."""
        return sum(map(self.is_in_sync, self.replicas.copy()))  # /ready asks in another thread

    def _advance(self) -> None:
        """What is confirmed by now, and who waited for it. HOT."""
        own = self.own_end()
        if self.term is None:
            ends = sorted([one.acknowledged for one in self.replicas.values()], reverse=True)
            slaves = self._need() - 1
            end = own if slaves < 1 else ends[slaves - 1] if len(ends) >= slaves else -1
        else:
            end = min((self.end_of(member) for member in self.members()), default=-1)
        end = min(end, own)
        is_more = end > self.confirmed and self._failure is None
        if is_more:
            self.confirmed = end
        waiting = self._waiting
        while waiting and waiting[0][0] <= self.confirmed:
            waiting.popleft()[1](self.confirmed)
        if is_more:  # last: it lets go what those who waited have to say
            for told in self.on_confirmed:
                told(end)

    def members(self) -> frozenset[int]:
        """Who is waited for, this replica among them: the set, the one that is proposed, which may
        stand already, and who is about to be."""
        assert self.term is not None, "members are those of a term"
        return frozenset().union(self.term.in_sync, self._joining, self._proposed or ())

    def end_of(self, member: int) -> int:
        """How far a member of the set has the log, as far as its word counts; -1: it has none."""
        if member == self.own_id:
            return self.own_end()
        assert self.term is not None, "members are those of a term"
        claim = self.claims.get(member)
        incarnation = self.term.in_sync.get(member)
        if claim is None or (incarnation is not None and claim.incarnation != incarnation):
            return -1
        return max(
            (one.acknowledged for link, one in self.replicas.items()
             if link.replica_id == member and one.life == claim.life), default=-1,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------- the set

    def decided(self, term: Term) -> None:
        """This is what the consensus has now, and no proposal is under way any more."""
        self.term, self._proposed = term, None
        self._advance()

    def depose(self, reason: str) -> None:
        """This broker is no longer master: whatever waits is unsure, and nothing more is shown."""
        self._failure = StoreUncertainError(
            f"this broker is not the master any more ({reason}); the message was written here, and "
            "the new master may have it or not."
        )
        waiting, self._waiting = self._waiting, deque()
        for _, done in waiting:
            done(self._failure)

    def run(self) -> None:
        """A few times a second: samples for the lag, and who goes into the set or out of it."""
        self._samples.append((self.clock.monotonic_s(), self.own_end()))
        self._advance()
        self._arrange()

    def _arrange(self) -> None:
        """Proposes another set, when it should be another."""
        term = self.term
        propose = self.propose
        if term is None or propose is None or self._proposed is not None or self._failure:
            return
        wanted = frozenset(
            member for member in term.in_sync.keys() | self.claims.keys()
            if member == self.own_id or self._belongs(member, term.in_sync.get(member))
        )  # fmt: skip
        if wanted != term.in_sync.keys():
            self._proposed = wanted
            self._joining.clear()  # who is not proposed begins again
            propose(wanted)

    def _belongs(self, member: int, incarnation: str | None) -> bool:
        """`incarnation`: that of a member of the set, which it has to be still."""
        links = [one for link, one in self.replicas.items() if link.replica_id == member]
        claim, end = self.claims.get(member), self.end_of(member)
        if incarnation is None:
            return self._has_joined(member, claim, end)
        if claim is not None and (claim.incarnation != incarnation or not links):
            return False  # its disk is another one, or its connection has ended
        # At the beginning it may not have come yet.
        missing_ms = round((self.clock.monotonic_s() - self._begun_s) * 1000)
        late_ms = min(map(self.lag_ms, links), default=missing_ms)
        return late_ms < self.settings.broker.catch_up_ms

    def _has_joined(self, member: int, claim: Word | None, end: int) -> bool:
        """Return whether `member` has everything that this master, or one before it, has confirmed.
        A member that is near and lacks some of it is waited for from now on."""
        now_s, joining = self.clock.monotonic_s(), self._joining.get(member)
        needed = max(self.confirmed, self._begin_end)
        if claim is None or claim.state_number < 0:
            return False
        if joining is None:
            old = (at for at_s, at in reversed(self._samples) if now_s - at_s >= NEAR_S)
            is_near = end >= min(next(old, self.own_end()), needed)
            if not is_near or now_s < self._rests_until_s.get(member, 0.0):
                return False
            joining = self._joining[member] = Joining(now_s + JOIN_S, self.state_number())
        if claim.state_number >= joining.state_number and end >= needed:
            return True
        if now_s >= joining.until_s:
            del self._joining[member]
            self._rests_until_s[member] = now_s + REST_S
            self._advance()
        return False

    # ------------------------------------------------------------------------------- who watches

    def lag_ms(self, replica: Replica) -> int:
        """For how long there has been something that the slave, which was there, did not have."""
        samples = self._samples.copy()  # metrics ask in another thread
        if not samples or replica.acknowledged >= samples[-1][1]:
            return 0
        at = bisect_right([end for _, end in samples], replica.acknowledged)
        since_s = max(samples[at][0], replica.joined_s)
        return round((self.clock.monotonic_s() - since_s) * 1000)

    @property
    def is_settled(self) -> bool:
        """Is the whole log confirmed? A new master serves when it is."""
        return self.confirmed >= self.own_end()
