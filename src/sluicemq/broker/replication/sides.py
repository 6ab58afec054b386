"""What runs in a broker for its replicas: the master's side or the slave's, created for each role.

    MasterSide   serves the commit log at the HA port (`log_sender.py`) and the state with
                 SLUICE_FOLLOW_STATE (`state_transfer.py`)
    SlaveSide    copies both from one master (`log_receiver.py`, `state_transfer.py`)

`server.py` starts and closes them. `ConfirmedEnd` keeps the confirmed end of the log on disk.
"""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Protocol

from sluicemq.acl.guard import Guard
from sluicemq.broker.documents import Document
from sluicemq.broker.group_commit import GroupCommit, RunSync
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.replication.acting import ActingMaster
from sluicemq.broker.replication.admission import AddressCheck, TicketCheck
from sluicemq.broker.replication.in_sync import InSyncReplicas, Term
from sluicemq.broker.replication.java_state import JavaStateReceiver
from sluicemq.broker.replication.log_receiver import LogReceiver, keep_connected
from sluicemq.broker.replication.log_sender import LogSenders
from sluicemq.broker.replication.state_applier import StateApplier
from sluicemq.broker.replication.state_log import ReplicatedPaths, StateLog
from sluicemq.broker.replication.state_transfer import (
    ReplicaIdentity,
    StateReceiver,
    StateSender,
    reload_tables,
)
from sluicemq.broker.replication.terms import LogTerms
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import Clock
from sluicemq.errors import ConfigurationError, StoreUncertainError
from sluicemq.files import Files, replace_text
from sluicemq.files.machine import priority
from sluicemq.net.channel import ChannelPool
from sluicemq.net.limits import ServerLimits
from sluicemq.net.network import Network, StreamListener
from sluicemq.net.stream import ByteStream, StreamProtocol
from sluicemq.net.work.background import Offload
from sluicemq.store.follow import LogFollower
from sluicemq.store.store import Store
from sluicemq.wire.fastjson import load_object, take_integer
from sluicemq.wire.ha import TICKET_BYTES, ConnectionState

log = logging.getLogger("sluicemq.broker")

INCOMPLETE_NAME: Final = "replica.incomplete"
"""The name of the file that marks a replica whose log was truncated. See `check_complete`."""
NO_MASTER: Final = Term(0, 0)
"""The term of a slave that follows no master."""
CONFIRMED_NAME: Final = "sluiceReplicas.json"
SILENT_S: Final = 10.0
"""Without failover, changes do not wait for a slave that has sent no request for this time, in
seconds."""


class BrokerParts(Protocol):
    """The components of the broker (`state.BrokerState`) that both sides need."""

    settings: Settings
    store: Store
    clock: Clock
    in_sync: InSyncReplicas | None
    guard: Guard | None
    group_commit: GroupCommit
    topics: Topics
    groups: Groups
    offsets: Offsets


def replicated_paths(settings: Settings, files: Files) -> ReplicatedPaths:
    """Return the files of this broker that are copied from master to slaves.

    They are the tables in `config` and, with access control, the access rules.
    """
    rules = settings.broker.acl_files if settings.broker.acl_enable else ()
    return ReplicatedPaths.for_broker(files, settings.store.root, rules)


class ConfirmedEnd:
    """The position up to which this replica knows the log to be confirmed, kept on disk.

    `end` is None if it was never known. A background job saves `document` when it has changed.
    """

    def __init__(self, files: Files, settings: Settings) -> None:
        """Load the position from `config/sluiceReplicas.json` in the store.

        The file contains {"confirmed": position}. Raises StoreDamagedError if its content is
        invalid, and StoreError if it is unreadable.
        """
        self._files = files
        path = f"{settings.store.root}/config/{CONFIRMED_NAME}"
        self.document = Document(files, path, lambda: json.dumps({"confirmed": self.end}))
        self.end: int | None = self.document.load(
            lambda text: take_integer(load_object(text, CONFIRMED_NAME), "confirmed")
        )

    def delete(self) -> None:
        """Set the position to None, and delete its file and the backup. Raises OSError.

        Call this for a slave without failover, which makes all messages visible that it receives.
        If it became master later, an old position would hide messages that consumers have seen.
        """
        self.end = None
        # The backup is removed first: after a crash in between, it must not be loaded.
        for path in (f"{self.document.path}.bak", self.document.path):
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(path)

    def set_end(self, end: int) -> None:
        """Set the position, to be saved by the next run of the background job."""
        self.end = end
        self.document.changed = True

    def limit_to(self, log_end: int) -> None:
        """Lower the position to `log_end` if it is greater.

        Under ASYNC_FLUSH a power failure may remove confirmed messages from a master's log. The
        messages that are then stored at the same positions are not confirmed.
        """
        if self.end is not None and self.end > log_end:
            self.set_end(log_end)


class MasterSide:
    """What a master runs for its slaves: the HA port, and the sender of the state."""

    def __init__(
        self,
        core: BrokerParts,
        state_log: StateLog,
        files: Files,
        log_terms: LogTerms | None,
        network: Network,
        *,
        call_soon: Callable[[Callable[[], None]], object],
        offload: Offload,
    ) -> None:
        """Create the side of a master. It listens for slaves on `network` after `open`.

        - `core` has the components of the broker.
        - `state_log` has the operations on the tables' files that slaves copy. `files` are these
          files.
        - `log_terms` says which term wrote which part of the log. If it is given, slaves use the
          failover protocol. None selects the plain one.
        - `call_soon(function)` calls a function in the next iteration of the event loop.
        - `offload(function, done)` calls `function` on another thread, and then `done(result)`.

        The file that marks the log as incomplete is removed. An operator may have elected this
        replica after it had cut off its log; from now on its log counts. Raises OSError.
        """
        assert core.in_sync is not None, "a master counts its slaves"
        settings = core.settings
        store = core.store
        clock = core.clock
        self._core = core
        self._state_log = state_log
        self._files = files
        self._network = network
        self._settings = settings
        self._clock = clock
        self._listener: StreamListener | None = None
        with contextlib.suppress(FileNotFoundError):
            files.remove(f"{settings.store.root}/{INCOMPLETE_NAME}")
        self.ha_address = ""
        """The HA address that slaves are told, as "host:port"."""
        self._ticket = secrets.token_bytes(TICKET_BYTES) if core.guard is not None else b""
        self.log_senders = LogSenders(
            store,
            core.in_sync,
            log_terms,
            settings,
            clock,
            call_soon=call_soon,
            offload=offload,
            address_check=AddressCheck(settings),
        )
        self.state_sender = StateSender(
            state_log, core.in_sync, files, clock, lambda: store.log_start, self._ticket
        )
        core.in_sync.on_confirmed.append(lambda end: self.log_senders.send_pending())

    async def open(self, previous_port: int) -> int:
        """Listen for slaves, and return the port; 0 if no port could be opened.

        The port is `previous_port` if that is not 0, else `haListenPort`, else the client port plus
        one. If the client port is 0, any free port is used.

        Raises ConfigurationError if the port cannot be opened and is needed: if `haListenPort` or
        `sluiceConsensus` is set, or `inSyncReplicas` is greater than 1.
        """
        config = self._settings.broker
        if previous_port:
            port = previous_port
        elif config.ha_port is not None:
            port = config.ha_port
        elif config.listen_port:
            port = config.listen_port + 1
        else:
            port = 0
        listener = self._network.stream_listener(
            self._accept, limits=ServerLimits.from_config(config)
        )
        try:
            await listener.start(config.listen_address, [port])
        except ConfigurationError as error:
            if config.ha_port is not None or config.consensus or config.in_sync_replicas > 1:
                raise
            log.warning("Slaves cannot connect to this broker: %s", error)
            return 0
        self._listener = listener
        return listener.ports[0]

    def _accept(self, stream: ByteStream) -> StreamProtocol:
        """Return the protocol that handles the new connection of a slave.

        From now on, each group commit sends its bytes to the slaves. The slave must send a ticket,
        a secret, if the broker has access control and does not check the addresses of slaves.
        """
        self._core.group_commit.on_commit = self.log_senders.send_pending
        are_addresses_checked = bool(self._settings.broker.ha_peers)
        ticket = b"" if are_addresses_checked else self._ticket
        return TicketCheck(stream, self.log_senders.accept, ticket)

    def tick(self) -> None:
        """Do the periodic work for the slaves: timeouts, heartbeats and delayed answers.

        The broker calls this a few times a second. If there are no slaves, group commits stop
        calling the log senders, which saves time. The next connection starts that again.
        """
        if not self.log_senders.senders:
            self._core.group_commit.on_commit = None
        self.log_senders.tick()
        self.state_sender.tick(self._clock.monotonic_s())

    async def wait_until_replicated(self) -> None:
        """Wait until the slaves have all changes of tables so far.

        With failover, all other members of the in-sync set must have them. Without it, the SluiceMQ
        slaves that have sent a request in the last SILENT_S seconds must have them. Return at once
        if sends of this broker do not wait for slaves either.

        Raises StoreUncertainError if the slaves do not have the changes after `slaveTimeout`, or if
        this broker is not the master any more.
        """
        in_sync = self._core.in_sync
        state_log = self._state_log
        assert in_sync is not None, "a master counts its slaves"
        if not in_sync.holds_answers or not self._settings.is_gated:
            return

        def get_ids_that_count() -> Collection[int]:
            """Return the ids of the slaves that must have the changes, as of now."""
            if in_sync.term is not None:
                return in_sync.awaited_members() - {in_sync.local_id}
            return state_log.active_slaves(self._clock.monotonic_s(), SILENT_S)

        is_replicated = asyncio.Event()
        state_log.call_when_replicated(get_ids_that_count, is_replicated.set)
        try:
            async with asyncio.timeout(in_sync.timeout_s):
                await is_replicated.wait()
        except TimeoutError:
            raise StoreUncertainError(
                "The change is stored on this broker, but not all slaves that count have it after "
                f"{in_sync.timeout_s:g} s. It is lost if a slave without it becomes master.",
                fix="Check `sluice cluster status`, and send the request again.",
            ) from None

        _check_still_master(in_sync)

    def record_edits(self) -> None:
        """Record changes of access rules that were made outside of this process.

        Called periodically. Blocks. Raises OSError.
        """
        self._state_log.record_edits(self._files)

    async def close(self) -> None:
        """Stop listening, and close the connections of slaves."""
        if self._listener is not None:
            await self._listener.close()


class SlaveSide:
    """What a slave runs to follow its master.

    In failover the term names the master. Otherwise the master's addresses come from name servers
    or from the master itself (`set_master_addresses`); `haMasterAddress` takes precedence over the
    HA address.
    """

    def __init__(
        self,
        core: BrokerParts,
        log_follower: LogFollower,
        files: Files,
        log_terms: LogTerms | None,
        confirmed_end: ConfirmedEnd,
        term: Term | None,
        identity: ReplicaIdentity,
        *,
        run_sync: RunSync,
        in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        sign: Callable[[Any], Any],
        begin_queue: Callable[[str, int, int, bytes], object],
    ) -> None:
        """Create the side of a slave. It connects to the master when its `background_jobs` run.

        - `core` has the components of the broker.
        - `log_follower` appends the master's bytes to the commit log of the store.
        - `files` are the files on disk, which the slave may change.
        - `log_terms` says which term wrote which part of the log. None selects the plain protocol.
        - `confirmed_end` keeps on disk the position up to which enough replicas have the log.
        - `term` names the master to follow; None without failover.
        - `identity` identifies this replica to the master.
        - `run_sync(done)` syncs the commit log on another thread, then calls `done` with the synced
          position or the error.
        - `in_executor(function)` runs a blocking function on another thread and returns its result.
        - `sign(command)` returns a signed request.
        - `begin_queue(topic, queue_id, offset, unit)` sets the first offset of a queue. It may be
          called on any thread.
        """
        self._core = core
        self._term = term
        self._log_follower = log_follower
        self._run_sync = run_sync
        self._is_syncing = False
        self._master_addresses = ("", "")  # for clients, for HA
        core.store.on_visible = core.group_commit.on_follower_append
        self.acting_master: ActingMaster | None = None
        """The component that acts for an unreachable master, if that is configured."""
        self.applier = StateApplier(files, replicated_paths(core.settings, files), begin_queue)
        self.log_receiver = receiver = LogReceiver(
            core.store, log_follower, log_terms, core.settings, core.clock
        )
        receiver.replica_id = identity.replica_id
        receiver.confirmed = confirmed_end.end or 0
        receiver.is_unclean = term is not None and term.is_unclean
        receiver.on_confirmed = confirmed_end.set_end
        receiver.on_appended = self.sync_if_due
        receiver.on_truncation = self.mark_incomplete
        # A slave that catches up leaves the processor to the servers on the same machine.
        receiver.on_catch_up = priority().set_low
        self._files = files
        self._mark_path = f"{core.settings.store.root}/{INCOMPLETE_NAME}"
        self._is_marked = files.exists(self._mark_path)

        self.state_receiver = self._make_state_receiver(
            files, identity, in_executor=in_executor, sign=sign
        )

    def _make_state_receiver(
        self,
        files: Files,
        identity: ReplicaIdentity,
        *,
        in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        sign: Callable[[Any], Any],
    ) -> StateReceiver:
        """Return the component that copies the master's tables and reloads those that have changed.

        It also supports a Java master. The parameters are those of the constructor.
        """
        core = self._core

        def reload_changed(names: set[str]) -> None:
            reload_tables(core.topics, core.groups, core.offsets, names)

        java = JavaStateReceiver(
            files,
            core.settings.store.root,
            in_executor=in_executor,
            on_changed=reload_changed,
            sign=sign,
        )
        return StateReceiver(
            self.applier,
            identity,
            log_end=lambda: self._log_follower.end,
            sync=core.store.sync,
            in_executor=in_executor,
            sign=sign,
            on_changed=reload_changed,
            java=java.follow,
        )

    def check_complete(self) -> bool:
        """Return whether this replica may become master, because its log and tables are complete.

        They are incomplete if the end of the log was cut off and the replica has not caught up
        since. It has caught up when it has the whole confirmed log, and a whole snapshot of the
        master's tables (design/0022). A file on disk marks the log as incomplete across restarts.
        This method removes the file when the replica has caught up. Raises OSError.
        """
        applier = self.applier
        is_state_complete = applier.has_snapshot and applier.next_log_end is None
        if self._is_marked and self.log_receiver.is_caught_up and is_state_complete:
            self._files.remove(self._mark_path)
            self._is_marked = False
        return not self._is_marked

    def mark_incomplete(self) -> None:
        """Write the file that marks the log as incomplete, before its end is cut off.

        Raises OSError.
        """
        self._is_marked = True
        explanation = (
            "The log was truncated. This replica cannot become master until it has caught up.\n"
        )
        replace_text(self._files, self._mark_path, explanation)

    def stop_following(self) -> None:
        """Follow no master from now on, and acknowledge nothing more."""
        self._term = NO_MASTER
        self.log_receiver.stop()

    def set_master_addresses(self, address: str, ha_address: str) -> None:
        """Set the addresses of the master for clients and for HA, as "host:port".

        Ignored if one of them is "".
        """
        if address and ha_address:
            self._master_addresses = address, ha_address

    @property
    def master(self) -> str | None:
        """The master's address for clients, as "host:port"; None if it is unknown."""
        address = self._term.address if self._term is not None else self._master_addresses[0]
        return address or None

    @property
    def ha_master(self) -> str:
        """The address at which the master sends its log to slaves, as "host:port".

        It is "" if the address is unknown, or if it is not known yet whether the master is a
        SluiceMQ or a Java broker, because an empty slave begins at a different position for each.

        Reading this property also changes `log_receiver`: it gets the ticket (the secret of the
        port), and whether the master is a SluiceMQ broker. It needs both before it connects.
        """
        configured_addresses = self._core.settings.broker.ha_master
        is_sluicemq = self.state_receiver.master_log_start >= 0
        self.log_receiver.is_sluicemq_master = is_sluicemq
        self.log_receiver.ticket = self.state_receiver.ticket
        if self._term is not None:
            return self._term.ha_address if is_sluicemq else ""
        if self.master is not None and not (is_sluicemq or self.state_receiver.is_java):
            return ""
        _, registered_address = self._master_addresses
        return configured_addresses[0] if configured_addresses else registered_address

    def background_jobs(
        self, network: Network, pool: ChannelPool
    ) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the background jobs of a slave, functions by name. Each runs until cancelled.

        One copies the log over `network`, and one copies the tables over connections of `pool`. If
        it is configured, a third one acts for the master while it is unreachable.
        """
        jobs: dict[str, Callable[[], Awaitable[None]]] = {
            "following the log": lambda: keep_connected(
                network, self.log_receiver, lambda: self.ha_master
            ),
            "following the state": lambda: self.state_receiver.run(pool, lambda: self.master),
        }
        if self.acting_master is not None:
            jobs["acting master"] = self.acting_master.run
        return jobs

    def is_connected(self) -> bool:
        """Return whether the slave receives the log from a master."""
        return self.log_receiver.state is ConnectionState.TRANSFER

    def lag(self) -> tuple[int | None, int | None]:
        """Return how far the slave is behind its master, in bytes and in ms.

        That is (0, 0) if it has caught up, else (None, None): only the master knows.
        """
        return (0, 0) if self.log_receiver.is_caught_up else (None, None)

    def sync_if_due(self) -> None:
        """Start to sync the log to disk if SYNC_FLUSH is set and the log has grown since.

        When the sync has ended, the synced position is reported to the master, which waits for it.
        Do nothing while a sync runs.
        """
        core = self._core
        if (
            core.settings.store.flush_sync
            and not self._is_syncing
            and core.store.synced_offset < self._log_follower.end
        ):
            self._is_syncing = True
            self._run_sync(self.on_synced)

    def on_synced(self, synced_end: int | BaseException) -> None:
        """Handle the end of a sync: report it to the master, and sync again if the log has grown.

        `synced_end` is the position up to which the log is synced. If the sync failed, it is the
        error, which is logged. Then nothing is reported.
        """
        self._is_syncing = False
        if isinstance(synced_end, BaseException):
            log.error("Cannot sync the commit log: %s", synced_end)
            return
        self.log_receiver.report_synced()
        self.sync_if_due()


def _check_still_master(in_sync: InSyncReplicas) -> None:
    """Raise StoreUncertainError if this broker is not the master any more."""
    # This calls immediately, because nothing has to be confirmed: with an error after `depose`.
    confirmed: list[int | BaseException] = []
    in_sync.wait(0, confirmed.append)
    if isinstance(confirmed[0], BaseException):
        raise confirmed[0]
