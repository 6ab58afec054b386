"""What each replica has of the log, and from that: what is confirmed, and which are in sync.

`InSyncReplicas` is the replication gate of `group_commit.py`. Each connection of a slave
(`log_sender.py`) reports the position up to which the slave has the log. From these positions
follows `confirmed`, the position up to which enough replicas have the log. Nothing behind it is
visible. It never decreases. There are two rules for "enough":

    plain      roles from the configuration: the master and `inSyncReplicas` - 1 slaves, any of them
    failover   a term of the consensus service: all members of its in-sync set, each with the
               incarnation that the term names

In failover the in-sync set changes by proposals: this module calls `propose`, and `set_term` says
what the consensus service has stored. Until then, the members of both the old and the proposed set
are awaited.

A slave that wants to become a member must have everything that is confirmed, in log and state, at
the moment of the proposal. On a busy master that moment would never come, because the log always
grows. A slave that is near the end is therefore *joining*: it is awaited like a member, for JOIN_S
seconds at most (`JoiningReplica`). Meanwhile it only has to reach what existed when it started to
join.

An acknowledgement counts only for the incarnation and the run id that the slave reported with its
SLUICE_FOLLOW_STATE request (900301). A report with another run id closes the older connections of
the same replica (design/0022, "What holds, and why").

If no slave can confirm a message in the plain case, the answer to a send depends on the
configuration (spec/ha.md §2):

    inSyncReplicas not set   as RocketMQ 4.9: SLAVE_NOT_AVAILABLE at once if no slave is near
    set                      as RocketMQ 5.x: FLUSH_SLAVE_TIMEOUT; with enableSlaveActingMaster
                             IN_SYNC_REPLICAS_NOT_ENOUGH, before the message is stored

There is no I/O and no timer here. The broker calls `tick` a few times a second.
"""

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

SAMPLES_MAX: Final = 512
"""The number of samples of the log's end that are kept: those of about a hundred seconds."""
NEAR_S: Final = 1.0
"""A slave may join if it has what the log contained this many seconds ago."""
JOIN_S: Final = 2.0
"""The longest time for which a joining replica is awaited, in seconds."""
REST_S: Final = 15.0
"""The pause before a replica that failed to join may try again, in seconds."""
NOT_MASTER: Final = "this replica is not master any more, try again."
NOT_ENOUGH: Final = "in-sync replicas not enough"
"""The remark of RocketMQ."""

OnConfirmed = Callable[[int | BaseException], None]
"""Called with the confirmed position, or with an error if nothing will be confirmed any more."""


class Term(NamedTuple):
    """A term as the consensus service has stored it: the master and its in-sync set.

    - `number` increases from term to term. RocketMQ calls it epoch.
    - `run_id` is that of the master's process.
    - `address` and `ha_address` are the master's, as "host:port".
    - `in_sync` maps the ids of the members of the in-sync set to their incarnations.
    - `is_unclean` says that an operator has accepted the loss of messages.
    """

    number: int
    master_id: int
    run_id: str = ""
    address: str = ""
    ha_address: str = ""
    in_sync: Mapping[int, str] = {}
    is_unclean: bool = False


class SlaveLink(Protocol):
    """The connection of a slave. `replica_id` is None in the plain protocol."""

    @property
    def replica_id(self) -> int | None: ...

    @property
    def remote(self) -> Host: ...

    def close(self) -> None: ...


class StateReport(NamedTuple):
    """What a slave said with its last SLUICE_FOLLOW_STATE request (900301).

    `state_number` is the number of the last operation of the state log that the slave has applied;
    -1 means that it has not applied a whole snapshot of this master.
    """

    incarnation: str
    run_id: str
    state_number: int


@dataclass(slots=True, eq=False)
class ConnectedSlave:
    """A slave with a connection.

    `run_id` is the one that the slave had reported when the connection was opened; None if it had
    not reported any. `acked_end` is the position up to which it has the log; -1 means that it has
    not reported a position.
    """

    link: SlaveLink
    run_id: str | None
    joined_s: float
    acked_end: int = -1


class JoiningReplica(NamedTuple):
    """A replica that is awaited, and that may become a member of the in-sync set.

    It is awaited until `deadline_s`. `state_number` is the number of the last operation of the
    state log when it started to join. Everything that was confirmed since then, the replica has.
    """

    deadline_s: float
    state_number: int


@dataclass(slots=True, eq=False)
class InSyncReplicas:
    """What a master knows about its slaves, and the replication gate.

    `local_end` returns the position up to which this broker itself has the log; under SYNC_FLUSH,
    up to which the log is synced. Each function in `on_confirmed` is called with each new value of
    `confirmed`.
    """

    settings: Settings
    clock: Clock
    local_end: Callable[[], int]
    confirmed: int = 0
    local_id: int = 0
    term: Term | None = None
    """The term in which this broker is master; None in the plain case."""
    propose: Callable[[frozenset[int]], None] | None = None
    """Called with the ids of a new in-sync set. `set_term` must be called when it is decided."""
    on_confirmed: list[Callable[[int], None]] = field(default_factory=list)
    last_state_number: Callable[[], int] = int
    """Returns the number of the last operation of the state log, which a new member must have."""
    slaves: dict[SlaveLink, ConnectedSlave] = field(default_factory=dict)
    state_reports: dict[int, StateReport] = field(default_factory=dict)
    """The last report of each replica id."""
    _proposed: frozenset[int] | None = None
    """The set that is proposed and not decided yet."""
    _joining: dict[int, JoiningReplica] = field(default_factory=dict)
    _rests_until_s: dict[int, float] = field(default_factory=dict)
    """When a replica that failed to join may try again, so that it does not delay sends all the
    time."""
    _waiting: deque[tuple[int, OnConfirmed]] = field(default_factory=deque)
    _failure: StoreUncertainError | None = None
    """The error for everything that waits, after `depose`."""
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    """Times and ends of the log at these times."""
    _started_s: float = 0.0
    _start_end: int = 0
    """The end of this broker's log when its term began. Everything that earlier masters confirmed
    is before it, including what this broker does not know to be confirmed yet."""

    def __post_init__(self) -> None:
        """Record the time and the end of the log, as those at the start of the term."""
        self._started_s = self.clock.monotonic_s()
        self._start_end = self.local_end()

    # ------------------------------------------------------------------------ what slaves report

    def add_slave(self, link: SlaveLink) -> None:
        """Count a slave that has connected, in failover after its handshake.

        In failover its acknowledgements count only if its last state report named its present run.
        """
        report = self.state_reports.get(link.replica_id) if link.replica_id is not None else None
        run_id = report.run_id if report is not None else None
        self.slaves[link] = ConnectedSlave(link, run_id, self.clock.monotonic_s())

    def remove_slave(self, link: SlaveLink) -> None:
        """Forget the slave whose connection `link` has ended.

        The confirmed position (up to which enough replicas have the log) is computed without it. If
        the slave was about to join the in-sync set, that is cancelled. A new in-sync set may be
        proposed. Do nothing if the connection is unknown.
        """
        if self.slaves.pop(link, None) is not None:
            if link.replica_id is not None:
                self._joining.pop(link.replica_id, None)
            self._update_confirmed()
            self._propose_changes()

    def record_ack(self, link: SlaveLink, position: int) -> None:
        """Record that the slave with the connection `link` has the log up to `position`.

        If enough replicas have more of the log now, the functions that wait for that are called.
        Do nothing if the connection is unknown. Called for every report: keep it cheap.
        """
        slave = self.slaves.get(link)
        if slave is None:
            return
        slave.acked_end = position
        self._update_confirmed()

    def record_state_report(
        self, replica_id: int, incarnation: str, run_id: str, log_end: int, state_number: int
    ) -> None:
        """Record the report that a slave sends with each SLUICE_FOLLOW_STATE request (900301).

        The report says: the id of the replica, the incarnation (the id of its disk content), the
        run id of its process, and the number of the last state operation that it has. `log_end` is
        not used, because the connections for the log report it.

        If this is the first report of a process, the connections that an earlier process of the
        replica has are closed and no longer counted.
        """
        before = self.state_reports.get(replica_id)
        self.state_reports[replica_id] = StateReport(incarnation, run_id, state_number)
        if before is not None and before.run_id == run_id:
            return
        self._joining.pop(replica_id, None)
        links = [link for link in self.slaves if link.replica_id == replica_id]
        for link in links:
            link.close()
            self.remove_slave(link)

    # ------------------------------------------------------------------------ the replication gate

    def wait(self, end: int, callback: OnConfirmed) -> None:
        """Call `callback(position)` when enough replicas have the log up to `end`.

        `position` is the end of the part that enough replicas have. The function is called
        immediately if they have it already. If this broker is not the master any more, now or
        later, `callback` is called with a StoreUncertainError. Successive calls must have ascending
        values of `end`. Called for every group commit: keep it cheap.
        """
        if self._failure is not None:
            callback(self._failure)
            return
        if end <= self.confirmed:  # all calls that wait have a greater `end`
            callback(self.confirmed)
            return
        self._waiting.append((end, callback))
        self._update_confirmed()

    @property
    def refusal(self) -> RequestError | None:
        """The error for requests that store messages, or None if they are accepted.

        They are refused in three cases:

        - This broker is not the master any more.
        - A consensus service decides the roles, and the in-sync set has fewer than
          `minInSyncReplicas` members.
        - The configuration decides the roles, `enableSlaveActingMaster` is set, and fewer slaves
          are in sync than must have a message.
        """
        broker = self.settings.broker
        if self._failure is not None:
            return RequestError(ResponseCode.SERVICE_NOT_AVAILABLE, NOT_MASTER)
        if self.term is not None:
            is_enough = len(self.term.in_sync) >= broker.in_sync_min
        else:
            is_enough = (
                not broker.acting_master or self._required_copies() <= 1 + self._near_slaves()
            )
        return None if is_enough else RequestError(ResponseCode.SYSTEM_ERROR, NOT_ENOUGH)

    @property
    def holds_answers(self) -> bool:
        """Whether sends are answered when they are confirmed (SYNC_MASTER), not when written."""
        return self.settings.broker.broker_role == "SYNC_MASTER"

    @property
    def timeout_s(self) -> float:
        """The longest time for which an answer waits for slaves, in seconds (`slaveTimeout`)."""
        return self.settings.broker.slave_timeout_ms / 1000

    @property
    def is_slave_missing(self) -> bool:
        """Whether answers need not wait for slaves, because no slave is in sync.

        Sends are then answered with SLAVE_NOT_AVAILABLE, as by RocketMQ 4.9. It is false if a
        consensus service decides the roles, and if `inSyncReplicas` is configured.
        """
        return (
            self.term is None
            and self.settings.broker.in_sync_written is None
            and self._required_copies() > 1
            and not self._near_slaves()
        )

    def _required_copies(self) -> int:
        """Return how many replicas, including this one, must have a message (without failover).

        It is the setting `inSyncReplicas`. If slaves may act for the master, and the number may be
        adapted automatically, it is lowered to the number of replicas that are in sync, but not
        below `minInSyncReplicas`.
        """
        broker = self.settings.broker
        required = broker.in_sync_replicas
        if broker.acting_master and broker.in_sync_auto:
            required = max(broker.in_sync_min, min(required, 1 + self._near_slaves()))
        return required

    def is_in_sync(self, link: SlaveLink) -> bool:
        """Return whether the slave with the connection `link` is in sync.

        If a consensus service decides the roles, the slave must be a member of the in-sync set.
        Otherwise it must not lack more than `haMaxGapNotInSync` bytes of the log. The result is
        False for an unknown connection.
        """
        slave = self.slaves.get(link)
        if self.term is not None:
            return link.replica_id in self.term.in_sync and slave is not None
        required_end = self.local_end() - self.settings.broker.gap_bytes_max
        # An empty slave acknowledges nothing before its first byte; until then it has 0 bytes.
        return slave is not None and max(slave.acked_end, 0) >= required_end

    def _near_slaves(self) -> int:
        """Return the number of slaves in sync. Also called on the thread that answers /ready."""
        return sum(map(self.is_in_sync, self.slaves.copy()))

    def _update_confirmed(self) -> None:
        """Compute `confirmed`, the position up to which enough replicas have the log.

        Without failover, enough means the required number of replicas. With failover, it means all
        members of the in-sync set and those about to join it. `confirmed` never decreases, and does
        not increase after `depose`.

        Then the functions that wait for a position up to `confirmed` are called. If `confirmed` has
        increased, the functions in `on_confirmed` are called last. Called for every report and
        commit: keep it cheap.
        """
        local_end = self.local_end()
        if self.term is None:
            acked_ends = sorted([slave.acked_end for slave in self.slaves.values()], reverse=True)
            required_slaves = self._required_copies() - 1
            if required_slaves < 1:
                end = local_end
            elif required_slaves <= len(acked_ends):
                end = acked_ends[required_slaves - 1]  # this many slaves have the log up to here
            else:
                end = -1
        else:
            end = min((self.log_end_of(member) for member in self.awaited_members()), default=-1)

        end = min(end, local_end)
        has_advanced = end > self.confirmed and self._failure is None
        if has_advanced:
            self.confirmed = end
        waiting = self._waiting
        while waiting and waiting[0][0] <= self.confirmed:
            _awaited_end, callback = waiting.popleft()
            callback(self.confirmed)
        if has_advanced:  # last, because it sends the answers that the calls above have released
            for listener in self.on_confirmed:
                listener(end)

    def awaited_members(self) -> frozenset[int]:
        """Return the ids of the replicas that must have a message before it is confirmed.

        They are the members of the in-sync set, with this replica; those of a proposed set, which
        may be stored already; and the joining ones. Only for failover.
        """
        assert self.term is not None, "members are those of a term"
        return frozenset().union(self.term.in_sync, self._joining, self._proposed or ())

    def log_end_of(self, member: int) -> int:
        """Return the position up to which replica `member` has the log, or -1 if it is unknown.

        For this broker itself it is the end of its log. For another replica it is the position that
        it has acknowledged over a connection of its present process. It is -1 if the replica is in
        the in-sync set with another incarnation, that is another disk content, than it has
        reported. Only for failover.
        """
        if member == self.local_id:
            return self.local_end()
        assert self.term is not None, "members are those of a term"
        report = self.state_reports.get(member)
        incarnation = self.term.in_sync.get(member)
        if report is None or (incarnation is not None and report.incarnation != incarnation):
            return -1
        acked_ends = [
            slave.acked_end
            for link, slave in self.slaves.items()
            if link.replica_id == member and slave.run_id == report.run_id
        ]
        return max(acked_ends, default=-1)

    # -------------------------------------------------------------------------- the in-sync set

    def set_term(self, term: Term) -> None:
        """Apply the term that the consensus service has stored, and confirm what follows from it.

        It is the term in which this broker has become the master, perhaps with another in-sync set.
        No proposal is open any more, whether the set in `term` is the proposed one or not.
        """
        assert self.term is not None, "only in failover there are terms"
        assert term.number == self.term.number, "a new term begins with a change of the role"
        self.term = term
        self._proposed = None
        self._update_confirmed()

    def depose(self, reason: str) -> None:
        """Stop confirming messages, because this broker is not the master any more.

        The functions that wait are called with a StoreUncertainError that contains `reason`. The
        functions of later calls to `wait` get the same error at once.
        """
        self._failure = StoreUncertainError(
            f"This broker is not the master any more ({reason}). The message was written here, but "
            "the new master may not have it."
        )
        waiting = self._waiting
        self._waiting = deque()
        for _, callback in waiting:
            callback(self._failure)

    def tick(self) -> None:
        """Take a sample of the log's end, and propose a new in-sync set if it should change.

        Also compute `confirmed`, because joining replicas may have failed. The broker calls this a
        few times a second.
        """
        self._samples.append((self.clock.monotonic_s(), self.local_end()))
        self._update_confirmed()
        self._propose_changes()

    def _propose_changes(self) -> None:
        """Propose a new in-sync set to the consensus service, if the present one is out of date.

        The new set contains this broker and each known replica for which `_should_be_member`
        returns True. If it equals the present set, nothing is proposed. Do nothing without
        failover, while a proposal has no outcome yet, or after `depose`.
        """
        term = self.term
        propose = self.propose
        if term is None or propose is None or self._proposed is not None or self._failure:
            return
        new_members = set()
        for member in term.in_sync.keys() | self.state_reports.keys():
            incarnation = term.in_sync.get(member)
            if member == self.local_id or self._should_be_member(member, incarnation):
                new_members.add(member)
        if new_members != term.in_sync.keys():
            self._proposed = frozenset(new_members)
            # The members of the proposed set are awaited from now on. A replica that was joining
            # and is not proposed has to start again.
            self._joining.clear()
            propose(self._proposed)

    def _should_be_member(self, member: int, incarnation: str | None) -> bool:
        """Return whether replica `member` should be in the in-sync set.

        `incarnation` is the id of the replica's disk content in the present set. None means that
        the replica is not in the set.

        A member stays unless it has reported another incarnation, its connection has ended, or it
        has lacked bytes of the log for `haMaxTimeSlaveNotCatchup`. A replica outside the set first
        has to catch up; this call may start that (see `_advance_joining`).
        """
        slaves = [slave for link, slave in self.slaves.items() if link.replica_id == member]
        report = self.state_reports.get(member)
        end = self.log_end_of(member)
        if incarnation is None:
            return self._advance_joining(member, report, end)

        if report is not None:
            has_other_store = report.incarnation != incarnation
            if has_other_store or not slaves:
                return False
        # At the beginning of the term a member may not have connected yet.
        missing_ms = round((self.clock.monotonic_s() - self._started_s) * 1000)
        lag_ms = min(map(self.lag_ms, slaves), default=missing_ms)
        return lag_ms < self.settings.broker.catch_up_ms

    def _advance_joining(self, member: int, report: StateReport | None, end: int) -> bool:
        """Return whether replica `member` has caught up, so that it may join the in-sync set now.

        `report` is the last state report of the replica, and `end` the position up to which it has
        the log. Joining has two steps:

        1. When the replica has a snapshot of the tables, and the log that existed NEAR_S seconds
           ago, it starts to join. From now on messages are confirmed only when it has them, too.
        2. When it also has everything that was confirmed, and the changes of tables that existed at
           the first step, the result is True.

        If the second step takes longer than JOIN_S seconds, the replica is not waited for any more,
        and may start again after REST_S seconds.
        """
        if report is None or report.state_number < 0:
            return False
        now_s = self.clock.monotonic_s()
        # What earlier masters confirmed is before `_start_end`.
        needed_end = max(self.confirmed, self._start_end)

        joining = self._joining.get(member)
        if joining is None:
            is_near = end >= min(self._find_near_end(now_s), needed_end)
            if not is_near or now_s < self._rests_until_s.get(member, 0.0):
                return False
            joining = JoiningReplica(now_s + JOIN_S, self.last_state_number())
            self._joining[member] = joining  # `awaited_members` contains it from now on

        if report.state_number >= joining.state_number and end >= needed_end:
            return True
        if now_s >= joining.deadline_s:
            del self._joining[member]
            self._rests_until_s[member] = now_s + REST_S
            self._update_confirmed()
        return False

    def _find_near_end(self, now_s: float) -> int:
        """Return the end of the log NEAR_S ago, or its end now if there is no sample so old."""
        for sampled_s, log_end in reversed(self._samples):
            if now_s - sampled_s >= NEAR_S:
                return log_end
        return self.local_end()

    # -------------------------------------------------------------------------------- monitoring

    def lag_ms(self, slave: ConnectedSlave) -> int:
        """Return for how long, in ms, the log has had bytes that the connected slave lacks.

        The time is counted from the connection of the slave at the earliest. 0 means that the slave
        has everything up to the last sample of the log's end. May be called on another thread.
        """
        samples = self._samples.copy()
        if not samples or slave.acked_end >= samples[-1][1]:
            return 0
        # The first sample in which the log was longer than what the slave has.
        index = bisect_right([end for _, end in samples], slave.acked_end)
        since_s = max(samples[index][0], slave.joined_s)
        return round((self.clock.monotonic_s() - since_s) * 1000)
