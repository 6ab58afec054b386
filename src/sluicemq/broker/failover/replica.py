"""A replica: a broker whose role follows the records at the consensus service.

    watch ──▶ View ──▶ next_step ──▶ change_role      lead, follow, or neither
      ▲                    │
      └──── swap ◀─────────┘  elect, shrink or grow the in-sync set

One task (`Replica.run`) reads the records and executes one step after the other. The lease is
renewed in another task. A master has at most one *side task*, which changes the record of its own
term: a proposal of a new in-sync set, or the switch to another master. A swap with an unknown
outcome is repeated until there is an answer (`_swap_until_answered`), before anything that depends
on it is done (design/0022, "What holds, and why", 7).

A replica that stops being the master takes a new run id. The record may still name the replica, but
with the old run id, so the replica cannot lead in that term again and the others may elect.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from sluicemq.broker.failover import election
from sluicemq.broker.failover.consensus import Consensus, Entries, Lease, Swap
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
    next_step,
)
from sluicemq.broker.failover.forward import Forwarder
from sluicemq.broker.failover.role_executor import RoleExecutor
from sluicemq.broker.replication.in_sync import Term
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

_DECLINED: Final = (
    "replica %d declines to be master: it has truncated its log and does not have all of a "
    "master's state yet; replica %d becomes master instead"
)

NO_TERM: Final = State(0, 0, "", "", "", {})
"""The state of a replica that is neither master nor slave."""


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

        `role_executor` changes the broker's role, and `consensus` keeps the records. `incarnation`
        is that of the broker's store. `forwarder` forwards requests of clients to the master; None
        means that no client connects, as in tests. `serves_reads` says whether the broker answers
        pulls as a slave (slaveReadEnable). `lease_s` is explained at LEASE_S. `make_run_id` returns
        a new unique id at each call.
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
        """The monotonic time of the last write of the record."""
        self._candidate_term = 0
        """The term whose master the replica has stopped following, to be elected; 0 for none."""
        self._term = NO_TERM
        """The state whose role the broker has taken."""
        self._situation: tuple[int, bool] = (-1, False)
        """The version of the state record (0: no record), and whether its master is missing."""
        self._situation_since_s = 0.0
        """The monotonic time at which `_situation` last changed. Elections wait from then on."""
        self._changed = asyncio.Event()
        """Set when the next step must not wait any longer."""
        self._side_task: asyncio.Task[None] | None = None
        """The task that changes the record of this master's own term; None if there is none."""
        self._is_handing_over = False
        self._is_rolled_back = False
        """Whether the last read returned an older state than the view had (ROLLED_BACK)."""
        self._logged_error = ""
        """The text of the error that ended the last step; "" if it succeeded."""

    # ----------------------------------------------------------------------------- run and close

    async def run(self) -> None:
        """Execute the steps that the records demand, until cancelled.

        Before each step, publish this replica's record if that is due. A step is executed at the
        latest when the pause that the last one returned is over, and earlier when a record changes
        or the lease is lost. Errors are logged, each text once in a row, and the step is tried
        again after RECHECK_S or RETRY_S. Only BrokerClosedError is raised.
        """
        end_watch = self._consensus.watch(self._prefix, self._on_entries)
        try:
            while True:
                pause_s = await self._publish_and_execute_step()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            end_watch()

    async def _publish_and_execute_step(self) -> float:
        """Publish the record if that is due, and execute one step. Return the pause after it.

        An error other than BrokerClosedError is logged, unless the last step ended with the same
        text.
        """
        try:
            await self._publish()
            if self._is_rolled_back:
                raise ReplicaBlockedError(self.reason)
            pause_s = await self._execute_step()
        except BrokerClosedError:
            raise
        except (SluiceError, OSError) as error:
            error_text = str(error)
            if error_text != self._logged_error:
                self._logged_error = error_text
                log.error("%s", error)
            return RECHECK_S if isinstance(error, ReplicaBlockedError) else RETRY_S

        self._logged_error = ""
        return pause_s

    async def close(self) -> None:
        """Leave the consensus service. Call it after `run`, while the broker is still open.

        First wait up to HAND_OVER_TIMEOUT_S for the side task, then cancel it. A master then hands
        over to another replica of the in-sync set if one is able to lead, and leaves the set. Then
        end the lease, which deletes this replica's record (if the service cannot be reached, the
        record ends with the lease), close all tunnels, and close the connection to the service.
        """
        if (side_task := self._side_task) is not None:
            await asyncio.wait({side_task}, timeout=HAND_OVER_TIMEOUT_S)
            side_task.cancel()
        with contextlib.suppress(SluiceError, OSError):
            successor = election.find_successor(self.view, self._id) if self.is_master else None
            if successor is not None:
                async with asyncio.timeout(2 * HAND_OVER_TIMEOUT_S):
                    await self._hand_over(successor, leave_in_sync_set=True)
        if self._lease is not None:
            await self._lease.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._consensus.close()

    @property
    def is_master(self) -> bool:
        """Whether the broker is the master of the term, in this run of the process."""
        return self._is_named_master(self._term)

    def _is_named_master(self, state: State) -> bool:
        """Return whether `state` names this replica as master, in this run of the process."""
        return (state.master_id, state.run_id) == (self._id, self.run_id)

    # ------------------------------------------------------------------------------ the records

    def _on_entries(self, entries: Entries) -> None:
        """Update the view from entries that a watch or a read has returned, and wake `run`.

        If they cannot be parsed, log an error and change nothing. A watch may be late: a state
        record that is older than the one in the view is ignored. Then the next step publishes this
        replica's record again, because the read that belongs to it shows whether the service was
        rolled back.

        If this replica is the master and the new state names another one, depose the broker at
        once. If the state still names this replica, give the broker its new in-sync set, except
        while a side task is changing the record: the side task does that when it ends.
        """
        try:
            view = election.parse_view(self._prefix, entries)
        except ValueError as error:
            log.error("unreadable replica records below %s: %s", self._prefix, error)
            return

        if election.is_older_state(view.state, self.view.state):
            view = view._replace(state=self.view.state)
            # The next step then publishes, and the read before that shows a rollback, if any.
            self._published = None
        self.view = view

        state = view.state
        if self.is_master and state is not None:
            if not self._is_named_master(state):
                self._role_executor.depose(election.describe_master(state))
            elif self._side_task is None:
                self._update_term(state)

        self._note_situation()
        self._changed.set()

    def _note_situation(self) -> None:
        """Note the time if the version of the state, or whether its master is alive, has changed.

        `_execute_step` measures from then on how long the replica has waited for an election.
        """
        state = self.view.state
        version = 0 if state is None else state.version
        situation = (version, self.view.master is None)
        if situation != self._situation:
            self._situation = situation
            self._situation_since_s = _now_s()

    def _check_for_rollback(self, known_state: State | None, entries: Entries) -> None:
        """Set `_is_rolled_back` and `reason` if the service has lost changes of the state record.

        `known_state` is the state that was in the view before the read of `entries` began. A
        linearizable read that returns an older version, or no state, means that the service was
        rolled back. If the older version has a later term, a replica was elected since the
        rollback. That record is accepted: remove the known state from the view, so that
        `_on_entries` does not ignore the read one. Do nothing if `entries` cannot be parsed.
        """
        try:
            read_state = election.parse_view(self._prefix, entries).state
        except ValueError:
            return  # `_on_entries` logs it

        is_rolled_back = election.is_older_state(read_state, known_state)
        if is_rolled_back and read_state and known_state and read_state.term > known_state.term:
            # A replica was elected since the rollback: accept its record.
            self.view = self.view._replace(state=None)
            is_rolled_back = False
        if is_rolled_back != self._is_rolled_back:
            self._is_rolled_back = is_rolled_back
            self.reason = election.ROLLED_BACK if is_rolled_back else ""

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
        """Write this replica's record if `now` is true or `_is_publish_due`; else do nothing.

        Get a lease first if there is none. Before the write, read all records, update the view
        from them, and check whether the service was rolled back. If the service refuses the swap
        (the lease has ended, or the record has changed since the read), nothing is raised: the
        lease is dropped, and the next step tries again with a new one.

        Raises ConsensusError if the service does not answer, or if a replica with another
        incarnation has published a record under this replica's id.
        """
        if self._lease is None:
            self._published = None
            self._lease = await self._consensus.lease(self._lease_s, self._on_lease_lost)
        # `self._lease` may become None during the awaits below. The swap then names a lease that
        # has ended, and the service refuses it.
        lease = self._lease

        member = self.member
        time_s = _now_s()
        if not now and not self._is_publish_due(member, time_s):
            return

        if member.log_end > 0:
            # The disk must know that it had a log before other replicas rely on that log.
            self._incarnation.note_log()
        self._published = None
        version = await self._read_own_version(member.incarnation)

        # An earlier swap that is delivered late expects another version, and changes nothing.
        key = election.member_key(self._prefix, self._id)
        change = Swap(key, election.encode_member(member), version, lease.id)
        if await self._consensus.swap([change]):
            self._published = member
            self._published_s = time_s
        else:
            self._on_lease_lost()

    async def _read_own_version(self, incarnation: str) -> int:
        """Read all records and update the view. Return the version of this replica's own record.

        0 means that the replica has no record yet. Also check whether the service was rolled back.

        Raises ConsensusError if the record is that of a replica with another incarnation.
        """
        known_state = self.view.state
        entries = await self._consensus.read(self._prefix)
        # The check comes first: `_on_entries` ignores an older state unless the check accepts it.
        self._check_for_rollback(known_state, entries)
        self._on_entries(entries)

        own_record = self.view.members.get(self._id)
        if own_record is None:
            return 0
        if own_record.incarnation != incarnation:
            raise ConsensusError(
                f"Replica {self._id} is also running at {own_record.address}, or was a moment ago.",
                fix="Give each replica its own brokerId.",
            )
        return own_record.version

    def _is_publish_due(self, member: Member, time_s: float) -> bool:
        """Return whether `member`, this replica's record as of `time_s`, must be written now.

        A record that equals the published one is not written. One that differs only in the term
        and the end of the log is written if PUBLISH_S have passed since the last write. Every
        other change is written at once, also that the log becomes complete or incomplete. While
        the service is rolled back a write is always due, because its read shows the recovery.
        """
        published = self._published
        if published is None or self._is_rolled_back:
            return True
        if published == member:
            return False

        if not election.has_only_log_grown(published, member):
            return True
        return time_s - self._published_s >= PUBLISH_S

    def _on_lease_lost(self) -> None:
        """Forget the lease and wake `run`, whose next step gets another lease."""
        self._lease = None
        self._changed.set()

    async def _swap_until_answered(self, state: State) -> bool:
        """Swap `state` into the state record until the service answers, then read all records.

        The record must have the version `state.version`, else the service refuses the swap. A
        ConsensusError of the swap or of the read is logged, and both are repeated after RETRY_S.
        Update the view from the read. Return whether the swap succeeded or the record contains
        `state` now; False means that another replica has changed the record.
        """
        change = Swap(election.state_key(self._prefix), election.encode_state(state), state.version)
        while True:
            try:
                is_swapped = await self._consensus.swap([change])
                entries = await self._consensus.read(self._prefix)
            except ConsensusError as error:
                log.warning("%s", error)
                await asyncio.sleep(RETRY_S)
                continue
            self._on_entries(entries)
            present = self.view.state
            if is_swapped or present is None:
                return is_swapped
            # If the swap was repeated, the first one may have succeeded without an answer. Then
            # the last one was refused, but the record contains `state`.
            return present._replace(version=state.version) == state

    # ---------------------------------------------------------------------------------- acting

    async def _execute_step(self) -> float:
        """Execute what `next_step` decides. Return the pause before the next step, in seconds.

        0.0 means that the step has changed the records or the role, so that there is a next step
        at once. Two cases come before the decision: during a hand-over nothing is done, and a
        master whose disk has failed steps down. Set `reason` to that of a Blocked or Wait step,
        else to "".

        Raises ReplicaBlockedError if an operator must decide, BrokerClosedError if the broker could
        not take its role, and SluiceError or OSError for failures after which the caller repeats
        the step.
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
                await self._swap_until_answered(state)
                return 0.0
            case Decline(state):
                log.warning(_DECLINED, self._id, state.master_id)
                await self._swap_until_answered(state)
                return 0.0
            case Blocked(reason):
                await self._take_role(NO_TERM)
                raise ReplicaBlockedError(reason)
            case Wait(seconds):
                return min(seconds, RECHECK_S)
        return RECHECK_S

    async def _take_role(self, state: State) -> None:
        """Give the broker its role in `state`: master, slave, or slave without a master.

        A broker that remains master of the same term only gets the new in-sync set, and proposes
        a set without dead replicas; while a side task runs, nothing is done. A slave whose term
        differs only in the in-sync set keeps its role. Otherwise depose the broker if it was the
        master, set the forwarder's master, and change the role. A new master whose HA address is
        not the one in the record starts a side task that corrects the record.

        Raises BrokerClosedError if the broker could not change its role. Then `_term` is NO_TERM.
        """
        is_same_term = state.term == self._term.term and state.run_id == self.run_id
        if self.is_master and is_same_term:
            if self._side_task is None:
                self._update_term(state)
                self._drop_dead_members()
            return
        # The role of a slave does not depend on the in-sync set.
        state_with_old_set = state._replace(in_sync=self._term.in_sync, version=self._term.version)
        if state_with_old_set == self._term:
            return

        await self._change_role(state)

    async def _change_role(self, state: State) -> None:
        """Make the broker the master of `state`, or a slave of its master; see `_take_role`."""
        # NO_TERM until the broker has its role: it has none if the change fails.
        previous_term = self._term
        self._term = NO_TERM
        if previous_term.master_id == self._id:
            self._role_executor.depose(election.describe_master(state))
        if self._forwarder is not None:
            self._forwarder.master = "" if state.master_id == self._id else state.address

        log.info("replica %d: %s in term %d", self._id, self._describe_role(state), state.term)
        await self._role_executor.change_role(_term_of(state), self.run_id)
        self._term = state
        if self.is_master:
            self._update_term(state, even_if_same=True)
            if state.ha_address != self._role_executor.ha_address:
                # The HA address is known only when the port is open.
                corrected = state._replace(ha_address=self._role_executor.ha_address)
                self._start_side_task(self._change_record(corrected))

    def _describe_role(self, state: State) -> str:
        """Return the role that this replica has in `state`, for the log."""
        if state.master_id == self._id:
            return "master"
        if state.master_id:
            return f"slave of replica {state.master_id}"
        return "slave without a master"

    # ------------------------------------------------------------------------------ as master

    def _update_term(self, state: State, *, even_if_same: bool = False) -> None:
        """Record `state` as the state of the term and give it to the broker.

        The broker takes that as the end of its proposal, if it has made one. Do nothing if `state`
        equals the recorded state, unless `even_if_same` is true: a proposal that ends without a
        change must be reported too.
        """
        if even_if_same or state != self._term:
            self._term = state
            self._role_executor.update_term(_term_of(state))

    def propose(self, ids: frozenset[int]) -> None:
        """Propose that the in-sync set consists of this replica and the replicas `ids`.

        Start a side task that swaps the new set into the record. Its outcome, success or not, is
        reported by `RoleExecutor.update_term`.

        The proposal is ignored if this replica is not the master, or while another change of the
        record is in progress: that change also ends with `update_term`, after which the broker
        examines the set again. Each new member must have sent a state report, which names its
        incarnation; else KeyError is raised.
        """
        if self._side_task is not None or self._is_handing_over or not self.is_master:
            return
        gate = self._role_executor.in_sync
        reports = gate.state_reports if gate is not None else {}

        # A present member keeps its incarnation in the set; a new one has reported its own.
        present_in_sync = self._term.in_sync
        proposed_in_sync = {
            member_id: present_in_sync.get(member_id) or reports[member_id].incarnation
            for member_id in sorted(ids | {self._id})
        }
        log.info(
            "in sync: replicas %s; before: %s",
            ", ".join(map(str, sorted(proposed_in_sync))),
            ", ".join(map(str, sorted(present_in_sync))),
        )
        proposed = self._term._replace(in_sync=proposed_in_sync)
        self._start_side_task(self._change_record(proposed))

    async def _change_record(self, state: State) -> None:
        """Swap `state` into the record as the side task, and wake `run` afterwards.

        If the record then names this run of this replica as master, give the broker the state in
        the record, whether the swap succeeded or not. Otherwise the broker gets nothing: the next
        step gives it the role that the record demands.
        """
        await self._swap_until_answered(state)
        self._side_task = None
        present = self.view.state
        # If the record is of another term by now, `_take_role` must see the change.
        if present is not None and self._is_named_master(present):
            self._update_term(present, even_if_same=True)
        self._changed.set()

    def _drop_dead_members(self) -> None:
        """Propose an in-sync set without dead replicas, for whose acknowledgements sends wait.

        A replica is dead if it is not connected to this master and has no record at the service
        with the incarnation in the set. Do nothing if no replica of the set is dead, or if the
        broker has no replication gate.
        """
        gate = self._role_executor.in_sync
        if gate is None:
            return

        connected_ids = {link.replica_id for link in gate.slaves}
        live_ids = set()
        for member_id, incarnation in self._term.in_sync.items():
            record = self.view.members.get(member_id)
            is_published = record is not None and record.incarnation == incarnation
            if is_published or member_id in connected_ids or member_id == self._id:
                live_ids.add(member_id)
        if live_ids != self._term.in_sync.keys():
            self.propose(frozenset(live_ids))

    def _start_side_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as the side task. It must set `_side_task` to None when it ends."""
        self._side_task = asyncio.get_running_loop().create_task(work)

    async def _hand_over(self, successor: Member, *, leave_in_sync_set: bool = False) -> None:
        """Make `successor` the master of a new term, without losing requests.

        Pause requests and wait until the in-sync set has the whole log. Then step down, and swap a
        state whose master is `successor` into the record. With `leave_in_sync_set` that state's
        in-sync set does not contain this replica. The swap may be refused because the record has
        changed; this replica has stepped down in any case.

        If the set does not have the whole log after HAND_OVER_TIMEOUT_S, log a warning, resume
        requests and remain the master.
        """
        self._is_handing_over = True
        executor = self._role_executor
        state = self._term
        executor.pause_requests(True)
        try:
            await asyncio.sleep(PAUSE_SETTLE_S)
            await self._wait_until_log_confirmed()

            # Before the swap: two masters of different terms must not both confirm messages.
            self._step_down(f"it hands over to replica {successor.id}")
            next_state = election.state_after_switch(state, successor)
            if leave_in_sync_set:
                next_state = election.state_without_member(next_state, self._id)
            await self._swap_until_answered(next_state)
        except TimeoutError:
            executor.pause_requests(False)
            log.warning(
                "switch cancelled: the slaves do not have the whole log after %g s",
                HAND_OVER_TIMEOUT_S,
            )
            self._update_term(self._term, even_if_same=True)
        finally:
            self._is_handing_over = False
            self._side_task = None
            self._changed.set()

    async def _wait_until_log_confirmed(self) -> None:
        """Wait until the in-sync set has the whole log. Return at once without a replication gate.

        Raises TimeoutError after HAND_OVER_TIMEOUT_S.
        """
        gate = self._role_executor.in_sync
        if gate is None:
            return
        is_confirmed = asyncio.Event()
        gate.wait(self._role_executor.log_end.position, lambda _: is_confirmed.set())
        async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
            await is_confirmed.wait()

    def _step_down(self, reason: str) -> None:
        """Stop being the master: depose the broker, forget the term and take a new run id.

        The record still names this replica, but with the old run id. So it cannot lead in that
        term again, and the other replicas may elect. `reason` says why the broker is deposed.
        """
        self._role_executor.depose(reason)
        self._term = NO_TERM
        self.run_id = self._make_run_id()

    # --------------------------------------------- administration: methods of `RoleController`

    def status(self) -> dict[str, Any]:
        """Return the fields that this replica adds to the answer of SLUICE_REPLICA_STATUS (900302).

        They are `role` (master, slave or none), `epoch` (the term, or None), `inSync` (ids, or
        None), `members` (ids of live replicas), `incarnation` and `reason`.
        """
        state = self.view.state
        if self.is_master:
            role = "master"
        elif self._term.master_id:
            role = "slave"
        else:
            role = "none"
        return {
            "role": role,
            "epoch": self._term.term or None,
            "inSync": sorted(state.in_sync) if state else None,
            "members": sorted(self.view.members),
            "incarnation": self._incarnation.text,
            "reason": self.reason,
        }

    def switch(self, to: int | None) -> None:
        """Start to hand over to replica `to`; return before the hand-over has ended.

        None as `to` chooses the replica of the in-sync set with the longest log.

        Raises RequestError if this replica is not the master, if `to` is this replica, if the
        record is being changed, or if no replica, or not replica `to`, can take over.
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
            raise self._no_successor_error(to)
        self._start_side_task(self._hand_over(successor))

    def _no_successor_error(self, to: int | None) -> RequestError:
        """Return the error that no replica, or not replica `to`, can become the master."""
        in_sync_ids = set(self.view.members) & set(self._term.in_sync) - {self._id}
        shown_ids = ", ".join(map(str, sorted(in_sync_ids))) or "none"
        fact = "no replica can" if to is None else f"replica {to} cannot"
        return RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"{fact} take over: only a replica of the in-sync set with a complete log can.",
            fix=f"Replicas in sync: {shown_ids}.",
        )

    def elect(self) -> None:
        """Start to make this replica the master, although it may lack acknowledged messages.

        Log a warning and start a side task that swaps a state of a new term into the record, in
        which this replica is the master and the whole in-sync set. Return before the swap has
        ended; `run` then takes the role that the record demands.

        Raises RequestError if this replica is already the master.
        """
        if self.is_master:
            raise RequestError(ResponseCode.SYSTEM_ERROR, "this replica is the master.")
        members = {**self.view.members, self._id: self.member}
        view = self.view._replace(members=members)
        state = election.state_after_unclean_election(view, self._id)
        log.warning("replica %d is elected by an operator, term %d", self._id, state.term)
        self._start_side_task(self._change_record(state))

    def handlers(self, local: Mapping[int, Handler], *, is_slave: bool) -> dict[int, Handler]:
        """Return the handlers of the broker by request code, for its role.

        `local` are the broker's own handlers, by request code. See `Forwarder.handlers` for what is
        added to them.
        """
        assert self._forwarder is not None, "start_replica passes a forwarder"
        reads = self._serves_reads
        return self._forwarder.handlers(local, is_slave=is_slave, serves_reads=reads)

    def disconnected(self, peer: Peer) -> None:
        """Retire the tunnel of a client whose connection was lost, and keep its heartbeat."""
        if self._forwarder is not None:
            self._forwarder.disconnected(peer)


def _now_s() -> float:
    """Return the time of the running loop's monotonic clock, in seconds."""
    return asyncio.get_running_loop().time()


def _term_of(state: State) -> Term:
    """Return the state without its version: Term has the same fields in the same order."""
    return Term(*state[:7])
