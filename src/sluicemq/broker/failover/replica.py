"""A replica: a broker whose role follows the records at the consensus service.

    watch ──▶ View ──▶ next_step ──▶ change_role      lead, follow, or neither
      ▲                    │
      └──── swap ◀─────────┘  elect, shrink or grow the in-sync set

One task (`Replica.run`) reads the records and executes one step after the other. The lease is
renewed in another task. There is at most one *side task*, which changes the record: a proposal of a
new in-sync set, the switch to another master, or an election by an operator. A swap with an unknown
outcome is repeated until there is an answer (`StateRecord`), before anything that depends on it is
done.

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
from sluicemq.broker.failover.consensus import Consensus, Entries
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
from sluicemq.broker.failover.own_record import OwnRecord
from sluicemq.broker.failover.role_executor import RoleExecutor
from sluicemq.broker.failover.state_record import RETRY_S, StateRecord
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

        `role_executor` changes the broker's role. `consensus` is the service that keeps the
        records. `incarnation` identifies the content of the store's disk. `forwarder` forwards
        requests of clients to the master; None means that no client connects, as in tests.
        `serves_reads` says whether a slave answers pulls (slaveReadEnable). `lease_s` is the time
        in seconds after which a killed master is noticed. `make_run_id` returns a new unique id.
        """
        self.run_id = make_run_id()
        """The id of this run of the process. It changes when the replica stops being master."""
        self.view = View(None, {})
        """The records as they were last read; the state never goes back to an older version."""
        self.reason = ""
        """Why the replica is waiting or blocked, or what ended its last step; "" if nothing did."""
        self._role_executor = role_executor
        self._consensus = consensus
        self._prefix = election.key_prefix(cluster, broker)
        self._id = replica_id
        self._incarnation = incarnation
        self._forwarder = forwarder
        self._serves_reads = serves_reads
        self._make_run_id = make_run_id
        self._candidate_term = 0
        """The term whose master the replica has stopped following, to be elected; 0 for none."""
        self._term = NO_TERM
        """The state whose role the broker has taken. Only `_change_role` begins a new term, and
        `_update_term` replaces the state within the term."""
        self._situation: tuple[int, bool] = (-1, False)
        """The version of the state record (0: no record), and whether its master is missing."""
        self._situation_since_s = 0.0
        """The monotonic time at which `_situation` last changed. Elections wait from then on."""
        self._changed = asyncio.Event()
        """Set when the next step must not wait any longer."""
        self._state_record = StateRecord(consensus, self._prefix, self._on_entries)
        own_key = election.member_key(self._prefix, replica_id)
        self._own_record = OwnRecord(
            consensus, own_key, lease_s, read=self._read_records, wake=self._changed.set
        )
        self._side_task: asyncio.Task[None] | None = None
        """The task that changes the record of this master's own term; None if there is none."""
        self._is_handing_over = False
        self._is_rolled_back = False
        """Whether the last read returned an older state than the view had (ROLLED_BACK)."""
        self._logged_error = ""
        """The text of the error that ended the last step; "" if it succeeded."""

    # ----------------------------------------------------------------------------- run and close

    async def run(self) -> None:
        """Give the broker the role that the records at the consensus service demand, repeatedly.

        Each round publishes this replica's record if that is due, and executes one step. The next
        round starts when a record changes, the lease is lost, or the pause of the step is over. An
        error is logged unless the last round had the same, and the next round starts after
        RECHECK_S or RETRY_S seconds. Only BrokerClosedError is raised. Run until cancelled.
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
        """Publish this replica's record if that is due, and execute one step.

        Return the longest pause until the next step, in seconds. An error is logged, unless the
        last step ended with the same text, and becomes `reason`. Only BrokerClosedError is raised.
        """
        try:
            await self._publish()
            if self._is_rolled_back:
                raise ReplicaBlockedError(election.ROLLED_BACK)
            pause_s = await self._execute_step()
        except BrokerClosedError:
            raise
        except (SluiceError, OSError) as error:
            error_text = self.reason = str(error)
            if error_text != self._logged_error:
                self._logged_error = error_text
                log.error("%s", error)
            return RECHECK_S if isinstance(error, ReplicaBlockedError) else RETRY_S

        self._logged_error = ""
        return pause_s

    async def close(self) -> None:
        """Leave the consensus service. Call it after `run`, while the broker is still open.

        A running change of the state record is awaited for up to HAND_OVER_TIMEOUT_S seconds, then
        cancelled. A master hands over to another replica of the in-sync set, if one can lead. The
        lease is ended, which deletes this replica's record. All connections are closed.
        """
        if (side_task := self._side_task) is not None:
            await asyncio.wait({side_task}, timeout=HAND_OVER_TIMEOUT_S)
            side_task.cancel()
        with contextlib.suppress(SluiceError, OSError):
            successor = election.find_successor(self.view, self._id) if self.is_master else None
            if successor is not None:
                async with asyncio.timeout(2 * HAND_OVER_TIMEOUT_S):
                    await self._hand_over(successor, leave_in_sync_set=True)
        await self._own_record.close()
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

    def _is_master_in(self, state: State) -> bool:
        """Return whether the broker has taken the role of master in the term of `state`.

        The record may name this run of the replica as master of a term in which the broker is a
        slave still, or of a later term than the one in which the broker is the master.
        """
        return self.is_master and self._is_named_master(state) and state.term == self._term.term

    # ------------------------------------------------------------------------------ the records

    def _on_entries(self, entries: Entries) -> State | None:
        """Replace the view by the records in `entries`, wake `run`, and return the newest state.

        If a record cannot be parsed, an error is logged, and nothing changes. A watch may be late,
        so a state record older than the one in the view is ignored. The next step then publishes
        this replica's record again. Its read shows whether the service was rolled back, that is
        restored from an old copy.

        If this replica is the master and the new state names another one, the broker stops
        confirming messages at once. If the state is of the same term, the broker gets the new
        in-sync set, unless a side task is changing the record: that task does it at its end.
        """
        try:
            view = election.parse_view(self._prefix, entries)
        except ValueError as error:
            log.error("unreadable replica records below %s: %s", self._prefix, error)
            return self.view.state

        if election.is_older_state(view.state, self.view.state):
            view = view._replace(state=self.view.state)
            # The next step then publishes, and the read before that shows a rollback, if any.
            self._own_record.doubt()
        self._own_record.note_read(view.members.get(self._id))
        self.view = view

        state = view.state
        if self.is_master and state is not None:
            if not self._is_named_master(state):
                self._role_executor.depose(election.describe_master(state))
            elif self._side_task is None:
                self._update_term(state)

        self._note_situation()
        self._changed.set()
        return state

    def _note_situation(self) -> None:
        """Note the time if the version of the state, or whether its master is running, has changed.

        An election waits until the situation has been the same for some time.
        """
        state = self.view.state
        version = 0 if state is None else state.version
        situation = (version, self.view.master is None)
        if situation != self._situation:
            self._situation = situation
            self._situation_since_s = _now_s()

    def _check_for_rollback(self, known_state: State | None, entries: Entries) -> None:
        """Set `_is_rolled_back` by whether the service has lost changes of the state record.

        `known_state` is the state in the view before `entries` were read. The service has lost
        changes, because its data was lost or restored from an old copy, if the read state is
        missing or older. Do nothing if `entries` cannot be parsed.
        """
        try:
            read_state = election.parse_view(self._prefix, entries).state
        except ValueError:
            return  # `_on_entries` logs it
        self._is_rolled_back = election.is_older_state(read_state, known_state)

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
        """Write this replica's record to the consensus service, if `now` is true or it is due.

        After the service has lost changes, that is always due, because the read before the write
        shows when the service is all right again.

        Raises ConsensusError if the service does not answer, or if a replica with another
        incarnation (another disk content) has published a record under this replica's id.
        """
        member = self.member
        if member.log_end > 0:
            # The disk must know that it had a log before other replicas rely on that log.
            self._incarnation.note_log()
        await self._own_record.publish(member, now=now or self._is_rolled_back)

    async def _read_records(self) -> Entries:
        """Read all records and update the view. Also check whether the service has lost changes.

        Raises ConsensusError if the service does not answer, or if this replica's own record
        belongs to a replica with another incarnation.
        """
        entries = await self._consensus.read(self._prefix)
        self._check_for_rollback(self.view.state, entries)
        self._on_entries(entries)

        own_record = self.view.members.get(self._id)
        if own_record is not None and own_record.incarnation != self._incarnation.text:
            raise ConsensusError(
                f"Replica {self._id} is also running at {own_record.address}, or was a moment ago.",
                fix="Give each replica its own brokerId.",
            )
        return entries

    # ---------------------------------------------------------------------------------- acting

    async def _execute_step(self) -> float:
        """Execute the step that `next_step` chooses, and return the pause until the next one.

        The pause is in seconds. 0.0 means that the step has changed the records or the role, so
        another step follows at once. During a hand-over nothing is done. A master whose disk has
        failed stops being the master. `reason` is set to the reason of a Blocked or Wait step, else
        to "".

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
                await self._state_record.swap_until_answered(state)
                return 0.0
            case Decline(state):
                log.warning(_DECLINED, self._id, state.master_id)
                await self._state_record.swap_until_answered(state)
                return 0.0
            case Blocked(reason):
                await self._take_role(NO_TERM)
                raise ReplicaBlockedError(reason)
            case Wait(seconds):
                return min(seconds, RECHECK_S)
        return RECHECK_S

    async def _take_role(self, state: State) -> None:
        """Give the broker its role in `state`: master, slave, or slave without a master.

        If the broker remains master of the same term, it only gets the new in-sync set, the HA
        address in the record is corrected, and dead replicas are removed from the set. While a side
        task is changing the record, nothing is done. If the broker remains slave of the same
        master, nothing is done. In all other cases its role changes.

        Raises BrokerClosedError if the broker could not change its role. Then `_term` is NO_TERM.
        """
        if self._is_master_in(state):
            if self._side_task is None:
                self._update_term(state)
                self._correct_ha_address()
                self._drop_dead_members()
            return
        # The role of a slave does not depend on the in-sync set.
        state_with_old_set = state._replace(in_sync=self._term.in_sync, version=self._term.version)
        if state_with_old_set == self._term:
            return

        await self._change_role(state)

    async def _change_role(self, state: State) -> None:
        """Make the broker the master of `state`, or a slave of its master.

        A broker that was the master stops confirming messages first. The forwarder gets the address
        of the new master. Raises BrokerClosedError.
        """
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
            self._correct_ha_address()

    def _correct_ha_address(self) -> None:
        """Start to correct the HA address of this master in the record, if it is another one.

        The address is known only when the port is open. Do nothing while a side task is running:
        the next step corrects the address.
        """
        ha_address = self._role_executor.ha_address
        if self._side_task is None and self._term.ha_address != ha_address:
            corrected = self._term._replace(ha_address=ha_address)
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

        Do nothing if the broker is not the master in the term of `state`. A new term needs a change
        of the role, which `_take_role` makes: recorded here, it would never be made.
        """
        if not self._is_master_in(state):
            return
        if even_if_same or state != self._term:
            self._term = state
            self._role_executor.update_term(_term_of(state))

    def propose(self, ids: frozenset[int]) -> None:
        """Start to change the in-sync set in the state record to `ids` and this replica.

        Return at once. When the record has been written, or the service has refused it,
        `RoleExecutor.update_term` is called with the present record.

        The call is ignored if this replica is not the master, or while another change of the record
        is in progress. Raises KeyError if a new member has not told this master its incarnation (it
        is in the state report that each slave sends).
        """
        if self._side_task is not None or self._is_handing_over or not self.is_master:
            return
        if self._is_rolled_back:
            # The service would refuse the change. The proposal ends with the present set.
            self._update_term(self._term, even_if_same=True)
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
        """Replace the state record by `state`, end the side task, and wake `run`.

        If the broker is the master in the term of the present record, it gets the state in the
        record, whether the change succeeded or not.
        """
        await self._state_record.swap_until_answered(state)
        self._end_side_task()

    def _end_side_task(self) -> None:
        """End the side task, give the broker the state of its term, and wake `run`.

        If the record is of another term by now, the broker gets nothing here: the next step gives
        it the role that the record demands.
        """
        self._side_task = None
        present = self.view.state
        if present is not None:
            self._update_term(present, even_if_same=True)
        self._changed.set()

    def _drop_dead_members(self) -> None:
        """Start to remove dead replicas from the in-sync set, because sends wait for them.

        A replica is dead if it is not connected to this master, and has no record at the service
        with the incarnation in the set. Do nothing if no replica of the set is dead, or if sends of
        this broker do not wait for replicas.
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
        """Run `work` as the side task. It must set `_side_task` to None when it ends.

        There must be no side task. The end of one tells the broker that its proposal is decided,
        which must not happen while another one is changing the record.
        """
        assert self._side_task is None, "at most one task changes the record"
        self._side_task = asyncio.get_running_loop().create_task(work)

    async def _hand_over(self, successor: Member, *, leave_in_sync_set: bool = False) -> None:
        """Make `successor` the master of a new term in place of this replica.

        Requests are queued until the in-sync set has the whole log. Then this replica stops being
        the master, and a state whose master is `successor` is written to the record. With
        `leave_in_sync_set`, its in-sync set does not contain this replica. If the service refuses
        the record, because it has changed, this replica has still stopped being the master.

        If the set does not have the whole log after HAND_OVER_TIMEOUT_S seconds, a warning is
        logged, the queued requests are handled, and this replica remains the master.
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
            await self._state_record.swap_until_answered(next_state)
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
        """Wait until all replicas of the in-sync set have the whole log.

        Return at once if sends of this broker do not wait for replicas. Raises TimeoutError after
        HAND_OVER_TIMEOUT_S seconds.
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

        They are "role" (master, slave or none), "epoch" (the number of the term, or None), "inSync"
        (the sorted ids of the in-sync set, or None without a state record), "members" (the sorted
        ids of running replicas), "incarnation" (the id of this disk content) and "reason" (why the
        replica waits, is blocked or has failed in its last step, or "").
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
        record is being changed, if the service has lost the record, or if no replica, or not
        replica `to`, can take over.
        """
        if not self.is_master:
            raise RequestError(ResponseCode.SYSTEM_ERROR, "this replica is not the master.")
        self._refuse_during_change()
        if self._is_rolled_back:
            # A master steps down first. The service would then refuse the record of the next one.
            raise RequestError(ResponseCode.SYSTEM_ERROR, election.ROLLED_BACK)
        if to == self._id:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER, f"replica {to} is already the master."
            )

        successor = election.find_successor(self.view, self._id, to)
        if successor is None:
            raise self._no_successor_error(to)
        self._start_side_task(self._hand_over(successor))

    def _no_successor_error(self, to: int | None) -> RequestError:
        """Return the error of `switch` if there is no replica that can take over.

        `to` is the replica that was asked for; None if any replica was.
        """
        in_sync_ids = set(self.view.members) & set(self._term.in_sync) - {self._id}
        shown_ids = ", ".join(map(str, sorted(in_sync_ids))) or "none"
        fact = "no replica can" if to is None else f"replica {to} cannot"
        return RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"{fact} take over: only a replica of the in-sync set with a complete log can.",
            fix=f"Replicas in sync: {shown_ids}.",
        )

    def _refuse_during_change(self) -> None:
        """Raise RequestError if a side task of this replica is changing the record."""
        if self._side_task is not None or self._is_handing_over:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY, "the record is being changed.", fix="Try again."
            )

    def elect(self) -> None:
        """Start to make this replica the master, although it may lack acknowledged messages.

        A side task replaces the state record by one of a new term, in which this replica is the
        master and the only member of the in-sync set. Return before that is done. `run` then gives
        the broker the role that the record demands.

        If the consensus service has lost the record while the master was running, the master itself
        can be elected. Nothing is lost then.

        Raises RequestError if this replica is already the master, if another replica is the master
        or can become it without a loss, or if this replica is changing the record.
        """
        if self.is_master and not self._is_rolled_back:
            raise RequestError(ResponseCode.SYSTEM_ERROR, "this replica is the master.")
        self._refuse_during_change()
        unnecessary = election.explain_unnecessary(self.view, self.member)
        if unnecessary:
            raise RequestError(ResponseCode.SYSTEM_ERROR, unnecessary)
        self._start_side_task(self._elect())

    async def _elect(self) -> None:
        """Make this replica the master in the state record, and end the side task.

        An error is logged if the replica is not elected.
        """
        try:
            problem = await self._swap_in_unclean_state()
        except ConsensusError as error:
            problem = str(error)
        finally:
            self._end_side_task()
        if problem:
            log.error("replica %d is not elected: %s", self._id, problem)

    async def _swap_in_unclean_state(self) -> str:
        """Read the records, and replace the state record by one with this replica as its master.

        The view may be old, and the service may have lost what is in it. So whether the election is
        necessary is decided again, by the records that were read, and the change expects the record
        that was read.

        Return "", or why the replica was not elected: the election is unnecessary, another replica
        has changed the record, or the records are not valid. Raises ConsensusError if they cannot
        be read for ELECT_TIMEOUT_S seconds.
        """
        entries = await self._state_record.read_for_election()
        try:
            read_state = election.parse_view(self._prefix, entries).state
        except ValueError as error:
            return str(error)
        self._on_entries(entries)
        is_lost = election.is_older_state(read_state, self.view.state)
        if self.is_master and not is_lost:
            return "it is the master."

        me = self.member
        unnecessary = election.explain_unnecessary(self.view, me)
        if unnecessary:
            return unnecessary
        view = self.view._replace(members={**self.view.members, self._id: me})
        state = election.state_after_unclean_election(view, self._id, read_state)
        log.warning("replica %d is elected by an operator, term %d", self._id, state.term)
        is_elected = await self._state_record.swap_until_answered(state)
        return "" if is_elected else "another replica has changed the record. Try again."

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
