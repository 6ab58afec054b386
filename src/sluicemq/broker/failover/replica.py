"""One replica among others: a broker, led through its roles by what the consensus service says.

    watch ──▶ View ──▶ next_step ──▶ become      lead, follow, or neither
      ▲                    │
      └──── swap ◀─────────┘  elect, shrink, grow

One task looks at the records and acts, one step after the other; beside it the lease is kept alive,
and as master a second task carries proposals of the in-sync set to the record. What is under way
and unsure is asked again until there is an answer (`_settle`), before anything else is done that
depends on it (design/0022, "What holds, and why", 7).

A replica's life is renewed when it gives up being master: the record may name it still, but nobody
is what he was in another life, so the others elect.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final, NamedTuple, Protocol

from sluicemq.acl.rules import Account
from sluicemq.broker.failover import election
from sluicemq.broker.failover.consensus import Consensus, Entries, Lease, Swap
from sluicemq.broker.failover.election import (
    INCOMPLETE,
    Blocked,
    Decline,
    Elect,
    Follow,
    Lead,
    Member,
    Stand,
    State,
    View,
    Wait,
    next_step,
)
from sluicemq.broker.failover.forward import FORWARDED, READS, Forwarder
from sluicemq.broker.replication.in_sync import InSyncReplicas, Term
from sluicemq.broker.replication.sides import SlaveSide
from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import ConsensusError, RequestError, SluiceError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.files.incarnation import Incarnation
from sluicemq.net.dispatch import Dispatcher, FastHandler, Handler, Peer, RunEngine
from sluicemq.net.network import SOCKET_NETWORK, Network, with_tls
from sluicemq.net.tls import broker_client_tls
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

log = logging.getLogger("sluicemq.broker.failover")

LEASE_S: Final = 3.0
"""A killed master is missed after so long, and half a second in which etcd looks for ended leases.
A broker that stands still for longer may be deposed, which costs a fraction of a second."""
LOOK_S: Final = 1.0
PUBLISH_S: Final = 5.0
RETRY_S: Final = 0.2
TURN_S: Final = 0.01
SETTLED_S: Final = 3.0
"""A switch is given up when the slaves do not have everything after so long."""
NOBODY: Final = State(0, 0, "", "", "", {})
SET_BACK: Final = (
    "the consensus service has an older record than it had: its data was lost or restored from an "
    "old copy while this replica ran. Nobody is elected, and the in-sync set stays as it is. Bring "
    "its newest data back; or start the replicas again, the last master first, which say then what "
    f"is to be done. If nobody becomes master: {election.ELECT}."
)


class BrokerClosedError(SluiceError):
    """The broker could not take its role, and is closed: the process has to start anew.

    When: a replica becomes master or slave and its store or port fails on the way.
    Then: it serves nobody; what was acknowledged is with the other replicas.
    Fix: read the reason in the text, then start it again.

        the broker could not change its role: Port 10911 is already in use.
    """


class ReplicaBlockedError(SluiceError):
    """A person has to act; said once, and looked at again.

    When: a replica may not decide by itself: only replicas that may lack acknowledged messages are
    left, or the records in etcd are older than those it has seen.
    Then: it serves nobody and looks again; nothing is lost by waiting.
    Fix: start the replica that the text names, or accept the loss by hand: `sluice cluster elect`.
    """


class LogEnd(NamedTuple):
    """A log as a record tells it: the epoch that wrote last, and where it ends (INCOMPLETE)."""

    epoch: int
    end: int


class Seat(Protocol):
    """The broker, as far as roles go."""

    @property
    def address(self) -> str:
        """host:port that clients are told."""
        ...

    @property
    def ha_address(self) -> str:
        """host:port at which slaves connect."""
        ...

    @property
    def log_end(self) -> LogEnd: ...

    @property
    def in_sync(self) -> InSyncReplicas | None:
        """Of a master."""
        ...

    @property
    def is_broken(self) -> bool:
        """Its disk takes no more writes until it is started again."""
        ...

    async def become(self, term: Term, life: str) -> None:
        """Master, slave of another, or (`master_id` 0) slave of nobody: on return no more is
        acknowledged to whom it followed. Raises BrokerClosedError."""
        ...

    def decided(self, term: Term) -> None:
        """A master: the term has this in-sync set, and no proposal is under way."""
        ...

    def depose(self, reason: str) -> None:
        """A master: from now on nothing is answered as safe, and nothing shown."""
        ...

    def rest(self, is_resting: bool) -> None:
        """A master takes no writes; they wait."""
        ...


class Replica:
    """`run` until it is cancelled; then `close`. The broker is started before, following nobody."""

    def __init__(
        self,
        seat: Seat,
        consensus: Consensus,
        *,
        cluster: str,
        broker: str,
        replica_id: int,
        incarnation: Incarnation,
        forwarder: Forwarder | None = None,
        serves_reads: bool = False,
        lease_s: float = LEASE_S,
        make_life: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self.life = make_life()
        self.view = View(None, {})
        self.reason = ""
        """Why it is neither master nor slave."""
        self._seat = seat
        self._consensus = consensus
        self._prefix = election.directory(cluster, broker)
        self._id = replica_id
        self._incarnation = incarnation
        self._forwarder = forwarder
        self._serves_reads = serves_reads
        self._lease_s = lease_s
        self._make_life = make_life
        self._lease: Lease | None = None
        self._published: Member | None = None
        self._published_s = 0.0
        self._standing = 0
        self._term = NOBODY  # what the broker has become
        self._situation: tuple[int, bool] = (-1, False)
        self._since_s = 0.0
        self._news = asyncio.Event()
        self._side: asyncio.Task[None] | None = None  # a proposal, a switch
        self._is_handing_over = False
        self._is_set_back = False

    # ----------------------------------------------------------------------------------- life

    async def run(self) -> None:
        """Follows the records until it is cancelled. Failures are logged and tried again, but for
        BrokerClosedError."""
        stop = self._consensus.watch(self._prefix, self._see)
        said = ""
        try:
            while True:
                pause_s = LOOK_S
                try:
                    await self._publish()
                    if self._is_set_back:
                        raise ReplicaBlockedError(self.reason)
                    pause_s = await self._act()
                    said = ""
                except BrokerClosedError:
                    raise
                except (SluiceError, OSError) as error:
                    if str(error) != said:
                        said = str(error)
                        log.error("%s", error)
                    pause_s = LOOK_S if isinstance(error, ReplicaBlockedError) else RETRY_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._news.wait()
                self._news.clear()
        finally:
            stop()

    async def close(self) -> None:
        """After `run` and with the broker still open: a master hands over if another one can have
        it; the record goes. What cannot be told to the consensus service ends by itself."""
        if (side := self._side) is not None:
            await asyncio.wait({side}, timeout=SETTLED_S)
            side.cancel()
        with contextlib.suppress(SluiceError, OSError):
            if self.is_master and (to := election.successor(self.view, self._id)) is not None:
                async with asyncio.timeout(2 * SETTLED_S):
                    await self._hand_over(to, leaves=True)
        if self._lease is not None:
            await self._lease.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._consensus.close()

    @property
    def is_master(self) -> bool:
        return (self._term.master_id, self._term.life) == (self._id, self.life)

    # ------------------------------------------------------------------------------ the records

    def _see(self, entries: Entries) -> None:
        """What the records say now, or said before: the state never goes back."""
        try:
            view = election.parse(self._prefix, entries)
        except ValueError as error:
            log.error("the records below %s are no replicas': %s", self._prefix, error)
            return
        old = self.view.state
        if old is not None and (view.state is None or view.state.version < old.version):
            view = view._replace(state=old)
            self._published = None  # a look of its own is due: is this late, or set back?
        self.view = view
        state = view.state
        if self.is_master and state is not None:
            if (state.master_id, state.life) != (self._id, self.life):
                self._seat.depose(f"epoch {state.epoch} is of replica {state.master_id}")
            elif self._side is None:
                self._decided(state)
        situation = (state.version if state else 0, view.master is None)
        if situation != self._situation:
            self._situation, self._since_s = situation, _now_s()
        self._news.set()

    def _look_back(self, known: State | None, entries: Entries) -> None:
        """A read that was begun after `known` had been seen: nothing older comes of it, unless the
        service has been set back. A later epoch counts all the same: somebody was elected there."""
        with contextlib.suppress(ValueError):  # `_see` says it
            found = election.parse(self._prefix, entries).state
            is_set_back = known is not None and (found is None or found.version < known.version)
            if is_set_back and found and known and found.epoch > known.epoch:
                self.view, is_set_back = self.view._replace(state=None), False
            if is_set_back != self._is_set_back:
                self._is_set_back, self.reason = is_set_back, SET_BACK if is_set_back else ""

    @property
    def member(self) -> Member:
        """The own record, as it should be."""
        epoch, end = self._seat.log_end
        return Member(
            self._id, self.life, self._incarnation.text, self._seat.address, self._seat.ha_address,
            epoch, end, self._standing, os.getpid(),
        )  # fmt: skip

    async def _publish(self, *, now: bool = False) -> None:
        """The own record under a lease. The end of the log alone is news once in a while."""
        if self._lease is None:
            self._published = None
            self._lease = await self._consensus.lease(self._lease_s, self._lost)
        lease = self._lease  # it may be lost meanwhile: then the swap is refused
        member, old, time_s = self.member, self._published, _now_s()
        is_same = (
            old is not None
            and old._replace(end=member.end, epoch=member.epoch) == member
            and (old.end == INCOMPLETE) == (member.end == INCOMPLETE)
        )
        now = now or self._is_set_back
        if is_same and (old == member or time_s - self._published_s < PUBLISH_S) and not now:
            return
        if member.end > 0:  # before others hear of it, and the set counts on it
            self._incarnation.note_log()
        self._published = None
        known, entries = self.view.state, await self._consensus.read(self._prefix)
        self._look_back(known, entries)
        self._see(entries)
        there = self.view.members.get(self._id)
        if there is not None and there.incarnation != member.incarnation:
            raise ConsensusError(
                f"replica {self._id} lives at {there.address}, too, or did a moment ago.",
                fix="Give each replica a brokerId of its own.",
            )
        # A record that was written before and comes late finds another version, and is nothing.
        key, version = election.member_key(self._prefix, self._id), there.version if there else 0
        change = Swap(key, election.encode_member(member), version, lease.id)
        if await self._consensus.swap([change]):
            self._published, self._published_s = member, time_s
        else:
            self._lost()

    def _lost(self) -> None:
        self._lease = None
        self._news.set()

    async def _settle(self, state: State) -> bool:
        """Swaps the record until it is known whether it happened, and reads what stands."""
        change = Swap(election.state_key(self._prefix), election.encode_state(state), state.version)
        while True:
            try:
                is_done = await self._consensus.swap([change])
                entries = await self._consensus.read(self._prefix)
            except ConsensusError as error:
                log.warning("%s", error)
                await asyncio.sleep(RETRY_S)
                continue
            self._see(entries)
            # The first of two tries may have been the one.
            found = self.view.state
            return is_done or (found is not None and found._replace(version=state.version) == state)

    # ---------------------------------------------------------------------------------- acting

    async def _act(self) -> float:
        """One step; how long to wait for news before the next."""
        if self._is_handing_over:
            return LOOK_S
        if self.is_master and self._seat.is_broken:
            self._step_down("its disk takes no more writes")
            await self._become(NOBODY._replace(epoch=self.member.epoch))
            return 0.0
        step = next_step(self.view, self.member, _now_s() - self._since_s)
        self.reason = step.reason if isinstance(step, Blocked | Wait) else ""
        match step:
            case Lead(state) | Follow(state):
                self._standing = 0
                await self._become(state)
            case Stand(state):
                await self._become(NOBODY._replace(epoch=state.epoch))
                self._standing = state.epoch
                await self._publish(now=True)
                return 0.0
            case Elect(state):
                log.info("standing for epoch %d with a log of %d", state.epoch, self.member.end)
                await self._settle(state)
                return 0.0
            case Decline(state):
                log.warning(
                    "replica %d does not take the role of the master: it has cut its log and does "
                    "not have all of a master's state yet; replica %d takes it",
                    self._id, state.master_id,
                )  # fmt: skip
                await self._settle(state)
                return 0.0
            case Blocked(reason):
                await self._become(NOBODY)
                raise ReplicaBlockedError(reason)
            case Wait(seconds):
                return min(seconds, LOOK_S)
        return LOOK_S

    async def _become(self, state: State) -> None:
        """The broker takes a role, if it has not got it: another epoch, another address."""
        if self.is_master and (state.epoch, state.life) == (self._term.epoch, self.life):
            if self._side is None:
                self._decided(state)
                self._leave_out_the_dead()
            return
        if state._replace(in_sync=self._term.in_sync, version=self._term.version) == self._term:
            return
        before, self._term = self._term, NOBODY
        if before.master_id == self._id:
            self._seat.depose(f"epoch {state.epoch} is of replica {state.master_id}")
        if self._forwarder is not None:
            self._forwarder.master = "" if state.master_id == self._id else state.address
        role = (
            "master" if state.master_id == self._id
            else f"slave of replica {state.master_id}" if state.master_id else "slave of nobody"
        )  # fmt: skip
        log.info("replica %d: %s in epoch %d", self._id, role, state.epoch)
        await self._seat.become(Term(*state[:7]), self.life)
        self._term = state
        if self.is_master:
            self._decided(state, anyway=True)
            if state.ha_address != self._seat.ha_address:  # it was not known before the port
                self._begin(self._carry(state._replace(ha_address=self._seat.ha_address)))

    # ------------------------------------------------------------------------------ as master

    def _decided(self, state: State, *, anyway: bool = False) -> None:
        """The record of this term has another version, or what was proposed has come to an end."""
        if anyway or state != self._term:
            self._term = state
            self._seat.decided(Term(*state[:7]))

    def propose(self, ids: frozenset[int]) -> None:
        """The in-sync set should be this one. `decided` follows in any case."""
        if self._side is not None or self._is_handing_over or not self.is_master:
            return  # what is under way ends with `decided`, and the set is looked at again
        claims = self._seat.in_sync.state_reports if self._seat.in_sync is not None else {}
        term = self._term
        in_sync = {
            member: term.in_sync.get(member) or claims[member].incarnation
            for member in sorted(ids | {self._id})
        }
        now, before = (", ".join(map(str, sorted(ids))) for ids in (in_sync, term.in_sync))
        log.info("in sync: replicas %s; before: %s", now, before)
        self._begin(self._carry(term._replace(in_sync=in_sync)))

    async def _carry(self, state: State) -> None:
        """A swap beside the loop; what came of it is decided."""
        await self._settle(state)
        self._side = None
        found = self.view.state
        if found is not None and (found.master_id, found.life) == (self._id, self.life):
            self._decided(found, anyway=True)  # of another's term `_become` has to see the change
        self._news.set()

    def _leave_out_the_dead(self) -> None:
        """Members that neither live by the records nor are connected: nobody waits for them."""
        in_sync, members = self._seat.in_sync, self.view.members
        if in_sync is None:
            return
        linked = {link.replica_id for link in in_sync.slaves}
        there = {
            member for member, incarnation in self._term.in_sync.items()
            if member in linked or member == self._id
            or (member in members and members[member].incarnation == incarnation)
        }  # fmt: skip
        if there != self._term.in_sync.keys():
            self.propose(frozenset(there))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._side = asyncio.get_running_loop().create_task(work)

    async def _hand_over(self, to: Member, *, leaves: bool = False) -> None:
        """Stops, waits until the set has everything, and puts another one into the record. From
        then on this replica is no master, whatever the answer: it has another life."""
        self._is_handing_over = True
        seat, state, done = self._seat, self._term, asyncio.Event()
        seat.rest(True)
        try:
            await asyncio.sleep(TURN_S)  # what has been read is in the log
            if (in_sync := seat.in_sync) is not None:
                in_sync.wait(seat.log_end.end, lambda _: done.set())
                async with asyncio.timeout(SETTLED_S):
                    await done.wait()
            self._step_down(f"it hands over to replica {to.id}")
            after = election.switched(state, to)
            if leaves:
                left = {key: value for key, value in after.in_sync.items() if key != self._id}
                after = after._replace(in_sync=left)
            await self._settle(after)
        except TimeoutError:
            seat.rest(False)
            log.warning("no switch: the slaves do not have everything after %g s", SETTLED_S)
            self._decided(self._term, anyway=True)
        finally:
            self._is_handing_over, self._side = False, None
            self._news.set()

    def _step_down(self, reason: str) -> None:
        self._seat.depose(reason)
        self._term, self.life = NOBODY, self._make_life()

    # --------------------------------------------------------------- what tools ask (Steering)

    def status(self) -> dict[str, Any]:
        """`role` (master, slave, none), `epoch`, `inSync` (ids), `members`, `reason`."""
        term, state = self._term, self.view.state
        return {
            "role": "master" if self.is_master else "slave" if term.master_id else "none",
            "epoch": term.epoch or None,
            "inSync": sorted(state.in_sync) if state else None,
            "members": sorted(self.view.members),
            "incarnation": self._incarnation.text,
            "reason": self.reason,
        }

    def switch(self, to: int | None) -> None:
        """Begins to hand over, to a replica or to whoever has most. Raises RequestError."""
        if not self.is_master:
            raise RequestError(ResponseCode.SYSTEM_ERROR, "this replica is not the master.")
        if self._side is not None or self._is_handing_over:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY, "the in-sync set is being changed.", fix="Try again."
            )
        if to == self._id:
            raise RequestError(ResponseCode.INVALID_PARAMETER, f"replica {to} is master.")
        successor = election.successor(self.view, self._id, to)
        if successor is None:
            living = sorted(set(self.view.members) & set(self._term.in_sync) - {self._id})
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"replica {'' if to is None else to} could not take over: it has to be in sync.",
                fix=f"In sync are: {', '.join(map(str, living)) or 'none'}.",
            )
        self._begin(self._hand_over(successor))

    def elect(self) -> None:
        """Begins to make this replica master though it may lack messages. Raises RequestError."""
        if self.is_master:
            raise RequestError(ResponseCode.SYSTEM_ERROR, "this replica is the master.")
        members = {**self.view.members, self._id: self.member}
        state = election.elected_unclean(self.view._replace(members=members), self._id)
        log.warning("replica %d is elected by hand, epoch %d", self._id, state.epoch)
        self._begin(self._carry(state))

    def handlers(self, local: Mapping[int, Handler], *, is_slave: bool) -> dict[int, Handler]:
        """Those of a replica in its role, made of the broker's."""
        assert self._forwarder is not None, "the composition root gives one"
        reads = self._serves_reads
        return self._forwarder.handlers(local, is_slave=is_slave, serves_reads=reads)

    def disconnected(self, peer: Peer) -> None:
        """A client is gone."""
        if self._forwarder is not None:
            self._forwarder.disconnected(peer)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------------------------ composition


class BrokerSeat:
    """The `Seat` that a broker is.

    Two times nothing may be answered though the port is open: a master that hands over takes no
    writes any more, and a new one gives nothing away before its whole log is confirmed, since a
    consumer could see a queue end before the offset it has. Requests that need a master rest then:
    they are held, in their order, and handled when it is over, or end with their connections when
    the role does.
    """

    broker: Broker

    def __init__(self) -> None:
        self._dispatcher: Dispatcher
        self._before: tuple[dict[int, Handler], dict[int, FastHandler], RunEngine | None] | None = (
            None
        )
        self._held: list[tuple[Command, Peer, Account | None]] = []

    def opening(self, dispatcher: Dispatcher) -> None:
        """The broker is about to open its port in a new role."""
        self._dispatcher, self._before, self._held = dispatcher, None, []
        if (in_sync := self.broker.in_sync) is not None:
            self.rest(True)

            def told(found: int | BaseException) -> None:  # it is visible a turn later
                asyncio.get_running_loop().call_soon(self.settled, dispatcher, found)

            in_sync.wait(in_sync.local_end(), told)

    def settled(self, dispatcher: Dispatcher, result: int | BaseException) -> None:
        """A new master's log is confirmed, or it is none any more."""
        if dispatcher is self._dispatcher and not isinstance(result, BaseException):
            self.rest(False)

    @property
    def address(self) -> str:
        return self.broker.address

    @property
    def ha_address(self) -> str:
        return self.broker.registration.ha_address

    @property
    def log_end(self) -> LogEnd:
        epochs, side = self.broker.log_terms, self.broker.replication_side
        epoch = max(epochs.last.number, 0) if epochs is not None else 0
        is_whole = not self.is_broken and (not isinstance(side, SlaveSide) or side.check_complete())
        return LogEnd(epoch, self.broker.store.written_offset if is_whole else INCOMPLETE)

    @property
    def in_sync(self) -> InSyncReplicas | None:
        return self.broker.in_sync

    @property
    def is_broken(self) -> bool:
        return self.broker.store.failure is not None

    async def become(self, term: Term, life: str) -> None:
        side = self.broker.replication_side
        if not term.master_id and isinstance(side, SlaveSide):
            side.stop_following()
            return
        self.broker.identity = self.broker.identity._replace(run_id=life)
        try:
            await self.broker.change_role(term if term.master_id else None)
        except (SluiceError, OSError) as error:
            raise BrokerClosedError(f"the broker could not change its role: {error}") from error

    def decided(self, term: Term) -> None:
        self.broker.update_term(term)

    def depose(self, reason: str) -> None:
        self.broker.depose(reason)

    def rest(self, is_resting: bool) -> None:
        dispatcher = self._dispatcher
        if is_resting and self._before is None:
            self._before = dispatcher.handlers, dispatcher.fast_handlers, dispatcher.run_engine
            held = dict.fromkeys(map(int, FORWARDED | READS), self.hold)
            dispatcher.handlers = {**dispatcher.handlers, **held}
            dispatcher.fast_handlers, dispatcher.run_engine = {}, None
        elif not is_resting and self._before is not None:
            dispatcher.handlers, dispatcher.fast_handlers, dispatcher.run_engine = self._before
            self._before, held_requests, self._held = None, self._held, []
            for command, peer, account in held_requests:
                if not peer.closed:
                    if (guard := self.broker.core.guard) is not None:
                        guard.account = account
                    peer.write(dispatcher.handle_command(command, peer))

    def hold(self, command: Command, peer: Peer) -> None:
        """The handler of what rests."""
        guard = self.broker.core.guard
        self._held.append((command, peer, None if guard is None else guard.account))

    def give(self, command: Command, peer: Peer) -> None:
        """Handles a request that nobody waits for, in the role of now."""
        self._dispatcher.handle_command(command, peer)


async def start_replica(
    config: BrokerConfig,
    store_config: StoreConfig,
    consensus: Consensus,
    *,
    seat: BrokerSeat | None = None,
    files: Files = SYSTEM_FILES,
    network: Network = SOCKET_NETWORK,
    boot: str | None = None,
    lease_s: float = LEASE_S,
    make_life: Callable[[], str] | None = None,
    **parts: Any,
) -> tuple[Replica, Broker]:
    """Start a broker with sluiceConsensus. Return its replica and the broker.

    The broker follows nobody until the caller runs `Replica.run`. `parts` are passed on to the
    broker. Raises SluiceError when the broker cannot start.
    """
    incarnation = Incarnation(files, store_config.root, boot=boot)
    seat = seat or BrokerSeat()
    forwarder = Forwarder(with_tls(network, broker_client_tls(config), config).dial)
    replica = Replica(
        seat, consensus, cluster=config.cluster_name, broker=config.broker_name,
        replica_id=config.broker_id, incarnation=incarnation, forwarder=forwarder,
        serves_reads=config.slave_read, lease_s=lease_s,
        **({} if make_life is None else {"make_life": make_life}),
    )  # fmt: skip
    broker = seat.broker = Broker(
        config, store_config, files=files, network=network, propose=replica.propose,
        role_controller=replica, incarnation=incarnation, **parts,
    )  # fmt: skip
    broker.on_opening, forwarder.give = seat.opening, seat.give
    await broker.start()
    forwarder.signed = broker.registration.sign  # with the credentials of the file, in any role
    forwarder.guard = lambda: broker.core.guard
    broker.identity = broker.identity._replace(incarnation=incarnation.text, run_id=replica.life)
    return replica, broker


@contextlib.asynccontextmanager
async def replicated(
    config: BrokerConfig, store_config: StoreConfig, consensus: Consensus, **parts: Any
) -> AsyncIterator[tuple[Replica, Broker]]:
    """Run a broker with sluiceConsensus from its start to its orderly end.

    `parts` are the arguments of `start_replica`. Raises SluiceError when the broker cannot start,
    and, into the block, when it cannot go on.
    """
    replica, broker = await start_replica(config, store_config, consensus, **parts)
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(replica.run())
            yield replica, broker
            task.cancel()
    except* SluiceError as errors:
        raise errors.exceptions[0] from None
    finally:
        await replica.close()
        await broker.close()
