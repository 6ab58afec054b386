"""A replica: a broker whose role follows the records at the consensus service.

    watch ──▶ View ──▶ next_step ──▶ change_role      lead, follow, or neither
      ▲                    │
      └──── swap ◀─────────┘  elect, shrink or grow the in-sync set

One task (`Replica.run`) reads the records and executes one step after the other. The lease is
renewed in another task. A master has at most one *side task*, which changes the record of its own
term: a proposal of a new in-sync set, or the switch to another master. A swap with an unknown
outcome is repeated until there is an answer (`_settle`), before anything that depends on it is done
(design/0022, "What holds, and why", 7).

A replica that stops being the master takes a new run id. The record may still name the replica, but
with the old run id, so the replica cannot lead in that term again and the others may elect.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, NamedTuple, Protocol

from sluicemq.broker.failover import election
from sluicemq.broker.failover.consensus import Consensus, Entries, Lease, Swap
from sluicemq.broker.failover.election import (
    INCOMPLETE,
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
    next_step,
)
from sluicemq.broker.failover.forward import Forwarder
from sluicemq.broker.replication.in_sync import InSyncReplicas, Term
from sluicemq.errors import ConsensusError, RequestError, SluiceError
from sluicemq.files.incarnation import Incarnation
from sluicemq.net.dispatch import Handler, Peer
from sluicemq.wire.codes import ResponseCode

# The name is published: users configure logging by it. So it does not follow the module's name.
log = logging.getLogger("sluicemq.replication")

LEASE_S: Final = 3.0
"""The time to live of a replica's lease. A killed master is noticed after this time, and half a
second in which etcd looks for ended leases. A broker that is suspended for longer may be deposed,
which costs a fraction of a second."""

RECHECK_S: Final = 1.0
"""The longest time between two steps of a replica if no record changes."""

PUBLISH_S: Final = 5.0
"""The shortest time between two updates of a replica's record if only its log has grown."""

RETRY_S: Final = 0.2
"""The pause after an error before the next attempt."""

PAUSE_SETTLE_S: Final = 0.01
"""The time that a master waits after pausing requests, so that requests that it has already read
from its connections are in the log."""

HAND_OVER_TIMEOUT_S: Final = 3.0
"""A switch is cancelled if the slaves do not have the whole log after this time."""

NO_TERM: Final = State(0, 0, "", "", "", {})
"""The state of a replica that is neither master nor slave."""

ROLLED_BACK: Final = (
    "The consensus service has an older record than before: its data was lost, or restored from an "
    "old copy while this replica was running. No replica is elected, and the in-sync set stays as "
    "it is. Restore its newest data, or restart the replicas, the last master first; they then "
    f"report what to do. If no replica becomes master: {election.ELECT_COMMAND}."
)


class BrokerClosedError(SluiceError):
    """The broker could not change its role and is closed. Its process must be restarted.

    When: a replica becomes master or slave, and its store or port fails on the way.
    Then: it serves no clients; acknowledged messages are on the other replicas.
    Fix: read the reason in the text, then start it again.

        the broker could not change its role: Port 10911 is already in use.
    """


class ReplicaBlockedError(SluiceError):
    """The replica needs a decision of an operator. It is logged once and checked again.

    When: a replica may not decide by itself: only replicas that may lack acknowledged messages are
    left, or the records in etcd are older than those that the replica has seen.
    Then: it serves no clients and checks again; nothing is lost by waiting.
    Fix: start the replica that the text names, or accept the loss: `sluice cluster elect`.
    """


class LogEnd(NamedTuple):
    """The end of a replica's log, as its record publishes it."""

    term: int
    """The last term in which the log was written; 0 for none."""
    position: int
    """The position after the last byte of the log, or INCOMPLETE."""


class RoleExecutor(Protocol):
    """What a replica reads from its broker, and the operations that change the broker's role."""

    @property
    def address(self) -> str:
        """The host:port that clients connect to."""
        ...

    @property
    def ha_address(self) -> str:
        """The host:port that slaves connect to."""
        ...

    @property
    def log_end(self) -> LogEnd:
        """The end of the broker's log now."""
        ...

    @property
    def in_sync(self) -> InSyncReplicas | None:
        """The replication gate of a master; None in every other role."""
        ...

    @property
    def has_failed_disk(self) -> bool:
        """Whether the store cannot be written until the broker is restarted."""
        ...

    async def change_role(self, term: Term, run_id: str) -> None:
        """Make the broker the master of `term`, or a slave of its master.

        If `term.master_id` is 0, the broker becomes a slave without a master. When the call
        returns, the broker acknowledges nothing more to the master that it followed before.
        `run_id` is the replica's run id from now on.

        Raises BrokerClosedError if the broker could not take its role. Then it is closed.
        """
        ...

    def update_term(self, term: Term) -> None:
        """Tell the master that its record is now `term`, and that no proposal is in progress."""
        ...

    def depose(self, reason: str) -> None:
        """Make the master stop confirming messages and making messages visible."""
        ...

    def pause_requests(self, is_paused: bool) -> None:
        """Queue requests that need a master while `is_paused`; process them afterwards."""
        ...


class Replica:
    """One replica of a broker name, which gives its broker the role that the records demand.

    The caller starts the broker as a slave without a master, runs `run` until it is cancelled, and
    then awaits `close`.
    """

    def __init__(
        self,
        role_executor: RoleExecutor,
        consensus: Consensus,
        *,
        cluster: str,
        broker: str,
        replica_id: int,
        incarnation: Incarnation,
        forwarder: Forwarder | None = None,
        serves_reads: bool = False,
        lease_s: float = LEASE_S,
        make_run_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """Create replica `replica_id` of broker name `broker` in cluster `cluster`.

        `serves_reads` says whether the broker answers pulls as a slave (slaveReadEnable).
        `lease_s` is explained at LEASE_S. `make_run_id` returns a new unique id at each call.
        """
        self.run_id = make_run_id()
        """The id of this run of the process. It changes when the replica stops being master."""
        self.view = View(None, {})
        """The records as they were last read; the state never goes back to an older version."""
        self.reason = ""
        """Why the replica is waiting or blocked; "" if it is not."""
        self._role_executor = role_executor
        self._consensus = consensus
        self._prefix = election.key_prefix(cluster, broker)
        self._id = replica_id
        self._incarnation = incarnation
        self._forwarder = forwarder
        self._serves_reads = serves_reads
        self._lease_s = lease_s
        self._make_run_id = make_run_id
        self._lease: Lease | None = None
        self._published: Member | None = None
        """The replica's record at the service; None if it is unknown and must be written."""
        self._published_s = 0.0
        self._candidate_term = 0
        self._term = NO_TERM
        """The state whose role the broker has taken."""
        self._situation: tuple[int, bool] = (-1, False)
        """The version of the state record, and whether its master is missing."""
        self._situation_since_s = 0.0
        self._changed = asyncio.Event()
        """Set when the next step must not wait any longer."""
        self._side_task: asyncio.Task[None] | None = None
        self._is_handing_over = False
        self._is_rolled_back = False

    # ----------------------------------------------------------------------------- run and close

    async def run(self) -> None:
        """Execute the steps that the records demand, until cancelled.

        Errors are logged, and the step is tried again. Only BrokerClosedError is raised.
        """
        end_watch = self._consensus.watch(self._prefix, self._on_entries)
        logged = ""
        try:
            while True:
                pause_s = RECHECK_S
                try:
                    await self._publish()
                    if self._is_rolled_back:
                        raise ReplicaBlockedError(self.reason)
                    pause_s = await self._execute_step()
                    logged = ""
                except BrokerClosedError:
                    raise
                except (SluiceError, OSError) as error:
                    if str(error) != logged:
                        logged = str(error)
                        log.error("%s", error)
                    pause_s = RECHECK_S if isinstance(error, ReplicaBlockedError) else RETRY_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            end_watch()

    async def close(self) -> None:
        """Leave the consensus service. Call it after `run`, while the broker is still open.

        A master hands over to another replica of the in-sync set if one is able to lead. The
        replica's record is deleted, or ends with its lease if the service cannot be reached.
        """
        if (side_task := self._side_task) is not None:
            await asyncio.wait({side_task}, timeout=HAND_OVER_TIMEOUT_S)
            side_task.cancel()
        with contextlib.suppress(SluiceError, OSError):
            if self.is_master and (to := election.find_successor(self.view, self._id)) is not None:
                async with asyncio.timeout(2 * HAND_OVER_TIMEOUT_S):
                    await self._hand_over(to, leaves=True)
        if self._lease is not None:
            await self._lease.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._consensus.close()

    @property
    def is_master(self) -> bool:
        """Whether the broker is the master of the term, in this run of the process."""
        return (self._term.master_id, self._term.run_id) == (self._id, self.run_id)

    # ------------------------------------------------------------------------------ the records

    def _on_entries(self, entries: Entries) -> None:
        """Update the view from entries that a watch or a read has returned.

        A watch may be late: an older state record than the known one is ignored, and the record of
        this replica is published again, with a read that shows whether the service was rolled
        back. If the new state names another master, depose the broker at once.
        """
        try:
            view = election.parse_view(self._prefix, entries)
        except ValueError as error:
            log.error("unreadable replica records below %s: %s", self._prefix, error)
            return

        old = self.view.state
        if old is not None and (view.state is None or view.state.version < old.version):
            view = view._replace(state=old)
            self._published = None
        self.view = view

        state = view.state
        if self.is_master and state is not None:
            if (state.master_id, state.run_id) != (self._id, self.run_id):
                self._role_executor.depose(_describe_master(state))
            elif self._side_task is None:
                self._update_term(state)

        situation = (state.version if state else 0, view.master is None)
        if situation != self._situation:
            self._situation, self._situation_since_s = situation, _now_s()
        self._changed.set()

    def _check_for_rollback(self, known: State | None, entries: Entries) -> None:
        """Note whether the consensus service has lost changes of the state record.

        `known` was in the view before the read of `entries` began. A linearizable read that
        returns an older record means that the service was rolled back. If the older version has a
        later term, a replica was elected since the rollback: that record is accepted.
        """
        with contextlib.suppress(ValueError):  # `_on_entries` logs it
            found = election.parse_view(self._prefix, entries).state
            is_rolled_back = known is not None and (found is None or found.version < known.version)
            if is_rolled_back and found and known and found.term > known.term:
                self.view, is_rolled_back = self.view._replace(state=None), False
            if is_rolled_back != self._is_rolled_back:
                self._is_rolled_back = is_rolled_back
                self.reason = ROLLED_BACK if is_rolled_back else ""

    @property
    def member(self) -> Member:
        """The record of this replica as it should be published now."""
        log_term, log_end = self._role_executor.log_end
        return Member(
            id=self._id,
            run_id=self.run_id,
            incarnation=self._incarnation.text,
            address=self._role_executor.address,
            ha_address=self._role_executor.ha_address,
            log_term=log_term,
            log_end=log_end,
            candidate_term=self._candidate_term,
            pid=os.getpid(),
        )

    async def _publish(self, *, now: bool = False) -> None:
        """Write this replica's record if it has changed, and read all records.

        A record that differs only by the growth of the log is written every PUBLISH_S. `now`
        writes the record in any case. Get a lease first if there is none.

        Raises ConsensusError if the service does not answer, or if another replica uses the id.
        """
        if self._lease is None:
            self._published = None
            self._lease = await self._consensus.lease(self._lease_s, self._on_lease_lost)
        # `self._lease` may become None during the awaits below. The swap then names a lease that
        # has ended, and the service refuses it.
        lease = self._lease

        member, old, time_s = self.member, self._published, _now_s()
        is_same_except_log = (
            old is not None
            and old._replace(log_end=member.log_end, log_term=member.log_term) == member
            and (old.log_end == INCOMPLETE) == (member.log_end == INCOMPLETE)
        )
        now = now or self._is_rolled_back
        is_recent = old == member or time_s - self._published_s < PUBLISH_S
        if is_same_except_log and is_recent and not now:
            return

        if member.log_end > 0:
            # The disk must know that it had a log before other replicas rely on that log.
            self._incarnation.note_log()
        self._published = None
        known, entries = self.view.state, await self._consensus.read(self._prefix)
        self._check_for_rollback(known, entries)
        self._on_entries(entries)
        existing = self.view.members.get(self._id)
        if existing is not None and existing.incarnation != member.incarnation:
            raise ConsensusError(
                f"Replica {self._id} is also running at {existing.address}, or was a moment ago.",
                fix="Give each replica its own brokerId.",
            )

        # An earlier swap that is delivered late expects another version, and changes nothing.
        key = election.member_key(self._prefix, self._id)
        version = existing.version if existing else 0
        change = Swap(key, election.encode_member(member), version, lease.id)
        if await self._consensus.swap([change]):
            self._published, self._published_s = member, time_s
        else:
            self._on_lease_lost()

    def _on_lease_lost(self) -> None:
        """Let the next step get another lease."""
        self._lease = None
        self._changed.set()

    async def _settle(self, state: State) -> bool:
        """Swap `state` into the record, and return whether the record now contains it.

        The record must have the version `state.version`. Repeat the swap until there is an answer,
        and read the records afterwards.
        """
        change = Swap(election.state_key(self._prefix), election.encode_state(state), state.version)
        while True:
            try:
                is_done = await self._consensus.swap([change])
                entries = await self._consensus.read(self._prefix)
            except ConsensusError as error:
                log.warning("%s", error)
                await asyncio.sleep(RETRY_S)
                continue
            self._on_entries(entries)
            # If the swap was repeated, the first one may have succeeded without an answer. Then
            # the last one was refused, but the record contains `state`.
            found = self.view.state
            return is_done or (found is not None and found._replace(version=state.version) == state)

    # ---------------------------------------------------------------------------------- acting

    async def _execute_step(self) -> float:
        """Execute the next step. Return the longest time until the one after it, in seconds.

        Raises ReplicaBlockedError, BrokerClosedError, and other errors after which the step is
        tried again.
        """
        if self._is_handing_over:
            return RECHECK_S
        if self.is_master and self._role_executor.has_failed_disk:
            # Its lease would keep the other replicas from electing one of them.
            self._step_down("its disk can no longer be written")
            await self._take_role(NO_TERM._replace(term=self.member.log_term))
            return 0.0

        step = next_step(self.view, self.member, _now_s() - self._situation_since_s)
        self.reason = step.reason if isinstance(step, Blocked | Wait) else ""
        match step:
            case Lead(state) | Follow(state):
                self._candidate_term = 0
                await self._take_role(state)
            case BecomeCandidate(state):
                await self._take_role(NO_TERM._replace(term=state.term))
                self._candidate_term = state.term
                await self._publish(now=True)
                return 0.0
            case Elect(state):
                log.info(
                    "candidate for term %d with a log that ends at %d",
                    state.term,
                    self.member.log_end,
                )
                await self._settle(state)
                return 0.0
            case Decline(state):
                log.warning(
                    "replica %d declines to be master: it has truncated its log and does not have "
                    "all of a master's state yet; replica %d becomes master instead",
                    self._id,
                    state.master_id,
                )
                await self._settle(state)
                return 0.0
            case Blocked(reason):
                await self._take_role(NO_TERM)
                raise ReplicaBlockedError(reason)
            case Wait(seconds):
                return min(seconds, RECHECK_S)
        return RECHECK_S

    async def _take_role(self, state: State) -> None:
        """Give the broker its role in `state`, unless the broker already has that role.

        A master whose term is the same only gets the new in-sync set. Raises BrokerClosedError.
        """
        if self.is_master and (state.term, state.run_id) == (self._term.term, self.run_id):
            if self._side_task is None:
                self._update_term(state)
                self._drop_dead_members()
            return
        if state._replace(in_sync=self._term.in_sync, version=self._term.version) == self._term:
            return

        before, self._term = self._term, NO_TERM
        if before.master_id == self._id:
            self._role_executor.depose(_describe_master(state))
        if self._forwarder is not None:
            self._forwarder.master = "" if state.master_id == self._id else state.address

        if state.master_id == self._id:
            role = "master"
        elif state.master_id:
            role = f"slave of replica {state.master_id}"
        else:
            role = "slave without a master"
        log.info("replica %d: %s in term %d", self._id, role, state.term)

        await self._role_executor.change_role(_term_of(state), self.run_id)
        self._term = state
        if self.is_master:
            self._update_term(state, even_if_same=True)
            if state.ha_address != self._role_executor.ha_address:
                # The HA address is known only when the port is open.
                corrected = state._replace(ha_address=self._role_executor.ha_address)
                self._start_side_task(self._change_record(corrected))

    # ------------------------------------------------------------------------------ as master

    def _update_term(self, state: State, *, even_if_same: bool = False) -> None:
        """Give the broker the state of its term, which ends a proposal.

        Do nothing if the state is the known one, unless `even_if_same`: then a proposal has ended
        without a change.
        """
        if even_if_same or state != self._term:
            self._term = state
            self._role_executor.update_term(_term_of(state))

    def propose(self, ids: frozenset[int]) -> None:
        """Propose that the in-sync set consists of this replica and the replicas `ids`.

        The outcome is reported by `RoleExecutor.update_term`, whether the proposal succeeds or not.
        A proposal is ignored while another change of the record is in progress: that one ends with
        `update_term` too, after which the broker examines the set again. Each new member must have
        sent a state report, which names its incarnation.
        """
        if self._side_task is not None or self._is_handing_over or not self.is_master:
            return
        gate, term = self._role_executor.in_sync, self._term
        reports = gate.state_reports if gate is not None else {}
        in_sync = {
            member: term.in_sync.get(member) or reports[member].incarnation
            for member in sorted(ids | {self._id})
        }
        now, before = (", ".join(map(str, sorted(ids))) for ids in (in_sync, term.in_sync))
        log.info("in sync: replicas %s; before: %s", now, before)
        self._start_side_task(self._change_record(term._replace(in_sync=in_sync)))

    async def _change_record(self, state: State) -> None:
        """Swap `state` into the record, and give the broker the state that results."""
        await self._settle(state)
        self._side_task = None
        found = self.view.state
        # If the record is of another term by now, `_take_role` must see the change.
        if found is not None and (found.master_id, found.run_id) == (self._id, self.run_id):
            self._update_term(found, even_if_same=True)
        self._changed.set()

    def _drop_dead_members(self) -> None:
        """Propose an in-sync set without replicas that have no record and no connection.

        Otherwise sends would wait for their acknowledgements.
        """
        in_sync, members = self._role_executor.in_sync, self.view.members
        if in_sync is None:
            return
        connected = {link.replica_id for link in in_sync.slaves}
        live = {
            member
            for member, incarnation in self._term.in_sync.items()
            if member in connected
            or member == self._id
            or (member in members and members[member].incarnation == incarnation)
        }
        if live != self._term.in_sync.keys():
            self.propose(frozenset(live))

    def _start_side_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._side_task = asyncio.get_running_loop().create_task(work)

    async def _hand_over(self, to: Member, *, leaves: bool = False) -> None:
        """Make `to` the master, after pausing requests until the in-sync set has the whole log.

        With `leaves` this replica also leaves the in-sync set. If the set does not have the log
        after HAND_OVER_TIMEOUT_S, resume requests and remain the master. Otherwise this replica is
        no longer the master, whatever becomes of the swap: it has a new run id.
        """
        self._is_handing_over = True
        executor, state, done = self._role_executor, self._term, asyncio.Event()
        executor.pause_requests(True)
        try:
            await asyncio.sleep(PAUSE_SETTLE_S)
            if (in_sync := executor.in_sync) is not None:
                in_sync.wait(executor.log_end.position, lambda _: done.set())
                async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
                    await done.wait()

            self._step_down(f"it hands over to replica {to.id}")
            after = election.state_after_switch(state, to)
            if leaves:
                remaining = {key: value for key, value in after.in_sync.items() if key != self._id}
                after = after._replace(in_sync=remaining)
            await self._settle(after)
        except TimeoutError:
            executor.pause_requests(False)
            log.warning(
                "switch cancelled: the slaves do not have the whole log after %g s",
                HAND_OVER_TIMEOUT_S,
            )
            self._update_term(self._term, even_if_same=True)
        finally:
            self._is_handing_over, self._side_task = False, None
            self._changed.set()

    def _step_down(self, reason: str) -> None:
        """Depose the broker and take a new run id, so that the record no longer names this run."""
        self._role_executor.depose(reason)
        self._term, self.run_id = NO_TERM, self._make_run_id()

    # --------------------------------------------- administration: methods of `RoleController`

    def status(self) -> dict[str, Any]:
        """Return the fields that this replica adds to the answer of SLUICE_REPLICA_STATUS (900302).

        They are `role` (master, slave or none), `epoch` (the term, or None), `inSync` (ids, or
        None), `members` (ids of live replicas), `incarnation` and `reason`.
        """
        term, state = self._term, self.view.state
        return {
            "role": "master" if self.is_master else "slave" if term.master_id else "none",
            "epoch": term.term or None,
            "inSync": sorted(state.in_sync) if state else None,
            "members": sorted(self.view.members),
            "incarnation": self._incarnation.text,
            "reason": self.reason,
        }

    def switch(self, to: int | None) -> None:
        """Start to hand over to replica `to`, or to the one with the longest log if None.

        Raises RequestError if this replica is not the master, if the record is being changed, or
        if no such replica can take over.
        """
        if not self.is_master:
            raise RequestError(ResponseCode.SYSTEM_ERROR, "this replica is not the master.")
        if self._side_task is not None or self._is_handing_over:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY, "the in-sync set is being changed.", fix="Try again."
            )
        if to == self._id:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER, f"replica {to} is already the master."
            )

        successor = election.find_successor(self.view, self._id, to)
        if successor is None:
            live = sorted(set(self.view.members) & set(self._term.in_sync) - {self._id})
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"{'no replica' if to is None else f'replica {to}'} can take over: only a replica "
                "of the in-sync set with a complete log can.",
                fix=f"Replicas in sync: {', '.join(map(str, live)) or 'none'}.",
            )
        self._start_side_task(self._hand_over(successor))

    def elect(self) -> None:
        """Start to make this replica the master, although it may lack acknowledged messages.

        Raises RequestError if it is the master.
        """
        if self.is_master:
            raise RequestError(ResponseCode.SYSTEM_ERROR, "this replica is the master.")
        members = {**self.view.members, self._id: self.member}
        view = self.view._replace(members=members)
        state = election.state_after_unclean_election(view, self._id)
        log.warning("replica %d is elected by an operator, term %d", self._id, state.term)
        self._start_side_task(self._change_record(state))

    def handlers(self, local: Mapping[int, Handler], *, is_slave: bool) -> dict[int, Handler]:
        """Return the handlers of a replica; `local` are those of the broker in its role."""
        assert self._forwarder is not None, "start_replica passes a forwarder"
        reads = self._serves_reads
        return self._forwarder.handlers(local, is_slave=is_slave, serves_reads=reads)

    def disconnected(self, peer: Peer) -> None:
        """Retire the tunnel of a client whose connection was lost."""
        if self._forwarder is not None:
            self._forwarder.disconnected(peer)


def _now_s() -> float:
    """Return the time of the running loop's monotonic clock, in seconds."""
    return asyncio.get_running_loop().time()


def _describe_master(state: State) -> str:
    """Return the reason for which another master is deposed."""
    return f"term {state.term} has replica {state.master_id} as its master"


def _term_of(state: State) -> Term:
    """Return the state without its version: Term has the same fields in the same order."""
    return Term(*state[:7])
