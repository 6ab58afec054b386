"""A broker over the network: sockets, name servers and background jobs.

- `start` opens the store, loads the tables, opens the port, and registers with the name servers.
- While the broker runs, background jobs register it again, flush, save tables, and expire clients.
- `change_role` closes everything except the port and the metrics, and opens it in another role.
- `close` unregisters the broker, sends held answers, closes connections, and saves everything.

Blocking calls (fsync, files) run on one executor. Changes of topics and groups are announced by
`registration.py`.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final

from sluicemq.acl.guard import Guard
from sluicemq.broker.admin import readonly
from sluicemq.broker.blocking_jobs import BackgroundJob, BlockingJobs, list_saving_jobs
from sluicemq.broker.consume.columns_helper import SealingProcess
from sluicemq.broker.context import BrokerEnvironment
from sluicemq.broker.documents import DocumentWriter
from sluicemq.broker.metrics import (
    BrokerCollector,
    find_health_problems,
    find_readiness_problems,
)
from sluicemq.broker.registration import (
    Announcements,
    Registration,
    choose_advertised_address,
    find_listening_addresses,
    make_unreplicated_error,
    resolve_stored_host,
)
from sluicemq.broker.replication.in_sync import InSyncReplicas, Term
from sluicemq.broker.replication.sides import ConfirmedEnd, MasterSide, SlaveSide, replicated_paths
from sluicemq.broker.replication.state_applier import DiscardingFiles, StateApplier
from sluicemq.broker.replication.state_log import RecordingFiles, StateLog
from sluicemq.broker.replication.state_transfer import ReplicaIdentity
from sluicemq.broker.replication.status import RoleController
from sluicemq.broker.replication.terms import LogTerms
from sluicemq.broker.settings import Settings
from sluicemq.broker.state import BrokerState
from sluicemq.broker.table import make_dispatcher
from sluicemq.clock import SYSTEM_CLOCK, Clock, SteadyClock
from sluicemq.config import BrokerConfig, Change, StoreConfig
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.files import SYSTEM_FILES, Files, SystemFiles, read_text
from sluicemq.files.incarnation import Incarnation
from sluicemq.files.machine import priority
from sluicemq.files.overlay import overlay
from sluicemq.model.addresses import FIXED_FIELD, INTERFACES_FIELD, explain_address, format_address
from sluicemq.model.ids import Host, UniqueIds, encode_host
from sluicemq.net.accept import ListeningSockets, log_protected_mode
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import FairScheduler, ServerLimits
from sluicemq.net.network import (
    SOCKET_NETWORK,
    Listener,
    Network,
    duplicate_sockets,
    with_tls,
)
from sluicemq.net.tls import broker_client_tls
from sluicemq.net.work.background import offload_to_executor
from sluicemq.store.store import Store
from sluicemq.supervision import Supervisor
from sluicemq.telemetry.metrics import serve_metrics
from sluicemq.telemetry.otlp import MetricsPusher
from sluicemq.wire.frames import Command

log = logging.getLogger("sluicemq.broker")

VIP_PORT_BELOW: Final = 2
"""The VIP port is this much below the port (spec/remoting.md §1)."""
SWEEP_S: Final = 0.2
EXPIRY_SWEEP_S: Final = 10.0
CLEAN_S: Final = 1.0
RULES_CHECK_S: Final = 0.5
INDEX_S: Final = 0.1
COLUMNS_S: Final = 0.1
CONFIRMED_S: Final = 1.0
STORE_CHECK_S: Final = 0.2
START_WAIT_S: Final = 1.0
"""How long `start` waits for the first registration."""
CLOSE_WAIT_S: Final = 5.0
"""How long a stop waits for the answers that are held back."""
CLOSE_POLL_S: Final = 0.005
EXECUTOR_THREADS: Final = 3
"""One may wait for the log's fsync while another saves a table and the third reads for slaves."""


class Broker:
    """A broker that stores and delivers messages. Call `start` first and `close` at the end."""

    # These exist after `start`.
    core: BrokerState
    store: Store
    registration: Registration
    _announcements: Announcements
    _confirmed: ConfirmedEnd
    _loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        config: BrokerConfig,
        store_config: StoreConfig,
        *,
        clock: Clock = SYSTEM_CLOCK,
        files: Files = SYSTEM_FILES,
        network: Network = SOCKET_NETWORK,
        executor: Executor | None = None,
        stretch_pause: Callable[[float], float] = float,
        read_only: bool = False,
        term: Term | None = None,
        identity: ReplicaIdentity | None = None,
        propose: Callable[[frozenset[int]], None] | None = None,
        role_controller: RoleController | None = None,
        incarnation: Incarnation | None = None,
        scheduler: FairScheduler | None = None,
    ) -> None:
        """Create a broker that is not started yet.

        - `executor` runs what blocks. By default the broker has three threads of its own.
        - `stretch_pause` returns the pause before a background job runs again, in seconds, from its
          usual pause. Under virtual time, months may pass with nothing to do.
        - `read_only` says that the store is a copy that must not change; see `admin/readonly.py`.
        - `incarnation` is that of the store's directory.
        - `scheduler` shares the loop with other servers of the process.

        With sluiceConsensus: `term` says which replica is the master (None: none yet). `identity`
        identifies this replica. `propose` is called with the ids of another in-sync set;
        `update_term` follows. `role_controller` decides the roles.
        """
        if read_only:
            files = overlay(files)
        self.settings = Settings(config, store_config, is_read_only=read_only)
        self.term = term
        self._propose = propose
        self._role_controller = role_controller
        self.identity = identity or ReplicaIdentity(config.broker_id, "", secrets.token_hex(8))
        self.on_opening: Callable[[Dispatcher], None] = lambda dispatcher: None
        """Called with the dispatcher before the port opens in a role."""
        self.on_role: list[Callable[[bool], None]] = []
        """Called with False when the connections close at the end of a role, and with True when the
        next role serves. For components of the process that send requests without a socket."""
        self.on_store_failure: Callable[[OSError], None] = lambda error: None
        """Called once with the error that makes the store refuse all writes until a restart, if
        `exitOnFatalStoreError` is true. The server commands end the process then."""
        self.in_sync: InSyncReplicas | None = None
        """What a master knows about its slaves."""
        self.replication_side: MasterSide | SlaveSide | None = None
        """What runs here for the other replicas."""
        self.log_terms: LogTerms | None = None
        """Which term wrote which part of the log, with sluiceConsensus."""
        self.address = ""
        """The address that clients get, as "host:port"."""
        self.metrics_port: int | None = None
        self._clock = clock
        self._files = files
        self._incarnation = incarnation or Incarnation(files, store_config.root)
        self._network = network = with_tls(network, broker_client_tls(config), config)
        self._stretch_pause = stretch_pause
        # A new thread inherits the priority of the loop's thread, which may be low at that moment.
        restore_priority = partial(priority().set_low, is_low=False)
        self._executor = executor or ThreadPoolExecutor(
            EXECUTOR_THREADS, "sluice-broker", initializer=restore_priority
        )
        # Filters compute on a thread of their own, so that no fsync has to wait for them.
        self._filter_executor = executor or ThreadPoolExecutor(
            1, "sluice-filters", initializer=restore_priority
        )
        self._jobs = BlockingJobs(self._executor)
        self._servers: list[Listener] = []
        self._scheduler = scheduler
        self._store: Store | None = None  # while it is open
        self._store_failure: OSError | None = None  # the failure that was logged
        self._ha_port = 0
        self._steady_clock = SteadyClock(clock)
        self._supervisor = Supervisor(clock, log)
        self._writer = DocumentWriter(self._jobs.run)
        self._jobs_task: asyncio.Task[None] | None = None
        """Runs the background jobs of the present role. None if the broker does not serve."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._pusher: MetricsPusher | None = None
        self._metrics: asyncio.Future[Callable[[], None] | None] | None = None
        """The function that closes the port for metrics, or None if it could not be opened."""

    @property
    def port(self) -> int:
        """The port at which the broker listens. If the configured port is 0, it is a free one."""
        return self._servers[0].ports[0]

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the present role, for callers that send requests without a socket."""
        return self._servers[0].dispatcher

    # --- start and change of role

    async def start(self) -> None:
        """Open the store and the port, and start to serve clients.

        Raises SluiceError if the store is locked or damaged, the port is in use, or the
        configuration is invalid. The text of the error says how to fix it. Nothing remains open.
        """
        loop = asyncio.get_running_loop()
        config = self.settings.broker
        try:
            if config.is_pushed:
                collect = BrokerCollector(lambda: self.core).collect
                self._pusher = await self._jobs.run(
                    partial(MetricsPusher, collect, config, "broker", config.broker_name)
                )
            await self._open({})
        except BaseException:
            await self._abort()
            raise
        if self._pusher is not None:
            self._pusher.start()
        if config.metrics_enable:  # importing prometheus-client takes a tenth of the start
            self._metrics = loop.run_in_executor(self._executor, self._open_metrics)

    async def change_role(self, term: Term | None) -> None:
        """Close the broker, and open it again as the master or slave that `term` makes of it.

        The listening port stays open, so new connections of clients wait until the broker serves
        again. If the new role cannot start, the broker is closed, and SluiceError or OSError is
        raised. `term` is None if it is not known yet which replica is the master.
        """
        sockets = duplicate_sockets(self._servers)
        try:
            await self._end_role()
            self.term = term
            await self._open(sockets)
        except BaseException:
            await self._abort()
            for sock in sockets.values():
                sock.close()
            raise

    def reread_config(self) -> Change:
        """Apply what was edited in the configuration file, and return the change.

        Raises ConfigurationError, with nothing changed, if the file is invalid.
        """
        path = self.settings.broker.config_path
        return self.settings.reread(read_text(self._files, path) or "")

    def update_term(self, term: Term) -> None:
        """Take over `term`, in which this replica remains the master.

        Its in-sync set has changed, or a proposal failed. Only `change_role` begins a term.
        """
        assert self.in_sync is not None, "a slave becomes the master by `change_role`"
        self.in_sync.set_term(term)
        self.term = term

    def depose(self, reason: str) -> None:
        """Stop confirming and showing messages, because this replica is not the master any more.

        Requests that wait for replicas are answered with an error that contains `reason`.
        `change_role` follows.
        """
        if self.in_sync is not None:
            self.in_sync.depose(reason)
            self.core.group_commit.flush()

    def _report_role(self, is_serving: bool) -> None:
        """Call the listeners of `on_role` with whether the broker serves clients now."""
        for listener in self.on_role:
            listener(is_serving)

    async def _abort(self) -> None:
        """Close what is open after a failed start. Ignore errors: the caller raises the first."""
        for server in self._servers:
            await server.close()
        if self._store is not None:
            with contextlib.suppress(SluiceError, OSError):
                await self._jobs.run(self._store.close)
        self._executor.shutdown(wait=False)
        self._filter_executor.shutdown(wait=False)

    def _open_store(self) -> tuple[Store, Files, ConfirmedEnd, StateLog | None]:
        """Open the store as the present role needs it, and set `self._store`. Blocks.

        Return a tuple of four: the store; the files through which the tables are written; the
        confirmed end, up to which enough replicas have the log; and the state log, in which a
        master records changes of tables for its slaves (None if this broker is not a master).
        """
        settings = self.settings
        files = self._files
        if settings.is_read_only:
            readonly.prepare_settings(settings, files)
        confirmed = ConfirmedEnd(files, settings)
        paths = replicated_paths(settings, files)
        state_log: StateLog | None = None
        if settings.is_slave and not settings.is_failover:
            confirmed.delete()
        if not settings.is_read_only:
            StateApplier(files, paths).finish_snapshot()
        # Tables of a slave come from its master; those of a master are recorded for its slaves.
        if settings.is_slave:
            files = DiscardingFiles(files, paths)
        elif not settings.is_read_only:
            run_id = self.term.run_id if self.term is not None else self.identity.run_id
            state_log = StateLog(paths, run_id=run_id, call_soon=self._loop.call_soon_threadsafe)
            files = RecordingFiles(files, state_log)
        visible_end = None
        if settings.is_slave and settings.is_failover:
            visible_end = confirmed.end or 0
        self._store = store = Store.open(
            settings.store,
            files=files,
            clock=self._clock,
            is_gated=settings.is_gated,
            confirmed=visible_end,
            incarnation=self._incarnation,
        )
        if state_log is not None:
            state_log.log_end = lambda: store.written_offset
            state_log.expired_queues = store.expired_queues
        if settings.is_failover:
            self._open_log_terms(store, files)
        return store, files, confirmed, state_log

    def _open_log_terms(self, store: Store, files: Files) -> None:
        """Load `self.log_terms`, which term wrote which part of the log. A master adds its own."""
        settings = self.settings
        path = settings.broker.epoch_path or f"{settings.store.root}/epochFileCheckpoint"
        self.log_terms = LogTerms(files, path, store.written_offset)
        if self.term is not None and not settings.is_slave:
            self.log_terms.start_term(self.term.number, store.log_start, store.written_offset)

    async def _open(self, sockets: ListeningSockets) -> None:
        """Open the store, components, ports and jobs in the role that `self.term` gives.

        `sockets` are open listening sockets to reuse, by port. Raises SluiceError or OSError.
        """
        self._loop = loop = asyncio.get_running_loop()
        self.settings.clear_listeners()
        if self.settings.is_failover:
            master_id = self.term.master_id if self.term is not None else None
            self.settings.is_slave = master_id != self.settings.broker.broker_id
        self.store, files, self._confirmed, state_log = await self._jobs.run(self._open_store)
        config = self.settings.broker  # `readonly.prepare` may have replaced it
        advertised = choose_advertised_address(config)
        host = resolve_stored_host(advertised.address, config.listen_port)
        core = self._make_core(host, files)
        await self._jobs.run(core.load)
        # Only now: the tables were loaded with all of the log, also what is not confirmed yet.
        self._prepare_store(core)

        self._make_registration(core, is_address_fixed=advertised.is_fixed)
        core.replication_side = self.replication_side = self._make_side(core, files, state_log)
        if config.acting_master and not self.settings.is_failover:
            await self._prepare_acting_master(core)
        if isinstance(self.replication_side, MasterSide):
            self._announcements.wait_for_replicas = self.replication_side.wait_until_replicated

        await self._listen(core, sockets)
        self._report_role(True)
        core.set_host(core.settings.host._replace(port=self.port))
        self.registration.address = self.address = format_address(advertised.address, self.port)
        log.info("%s", explain_address(advertised, self.port))
        if isinstance(self.replication_side, MasterSide):
            await self._open_ha_port(self.replication_side)
        self._sweep_timer = loop.call_later(SWEEP_S, self._sweep)
        self._jobs_task = loop.create_task(self._run_background_jobs())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await self._announcements.first_round_done.wait()
        log.info(
            "Broker %s listens on %s:%d.", config.broker_name, config.listen_address, self.port
        )
        log_protected_mode(config)

    async def _open_ha_port(self, master_side: MasterSide) -> None:
        """Open the port to which slaves connect, and name it in the registration."""
        self._ha_port = await master_side.open(self._ha_port)
        self.registration.ha_port = self._ha_port
        master_side.ha_address = self.registration.ha_address

    def _prepare_store(self, core: BrokerState) -> None:
        """Hide the messages that too few replicas have, and prepare the store to serve clients."""
        confirmed_end = self._confirmed.end
        if confirmed_end is None and self.settings.is_failover:
            confirmed_end = 0  # other replicas may be in sync without what is stored here
        if self.settings.is_gated and confirmed_end is not None:
            self.store.hide_unconfirmed(confirmed_end)
        self.store.columns.loads_on_first_use = False
        if isinstance(self._files, SystemFiles):
            self.store.columns.sealer = SealingProcess()
        if not self.settings.is_read_only:
            core.retention.check_disk()

    def _make_core(self, host: Host, files: Files) -> BrokerState:
        """Create the components of the broker in `self.core`, and return them before they load."""
        loop = self._loop
        settings = self.settings

        # The announcements of this role are created after the components.
        def announce(peer: Peer, answer: bytes) -> None:
            self._announcements.announce(peer, answer)

        def look_up(topic: str, on_answer: Callable[[Command | None], None]) -> None:
            self._announcements.look_up(topic, on_answer)

        self.in_sync = None
        if not (settings.is_slave or settings.is_read_only):
            self.in_sync = self._make_in_sync()
        id_prefix = encode_host(host)[:-4]  # the address without its port
        self.core = BrokerState(
            settings,
            self.store,
            BrokerEnvironment(
                files=files,
                clock=self._clock,
                host=host,
                unique_ids=UniqueIds(self._clock, id_prefix, os.getpid(), secrets.randbits(32)),
                call_soon=loop.call_soon,
                call_later=loop.call_later,
                run_sync=self._run_sync,
                announce=announce,
                look_up=look_up,
                offload=offload_to_executor(self._executor),
                compute=offload_to_executor(self._filter_executor, computes=True),
                scheduler=self._scheduler,
                steady_clock=self._steady_clock,
                supervisor=self._supervisor,
            ),
            in_sync=self.in_sync,
        )
        self._scheduler = self.core.scheduler
        self.core.role_controller = self._role_controller
        return self.core

    def _make_in_sync(self) -> InSyncReplicas:
        """Return a new object that tracks how far each slave of this master has the log."""
        store = self.store
        is_synced_first = self.settings.store.flush_sync
        self._confirmed.limit_to(store.written_offset)
        in_sync = InSyncReplicas(
            self.settings,
            self._clock,
            lambda: store.synced_offset if is_synced_first else store.written_offset,
            confirmed=self._confirmed.end or 0,
            local_id=self.settings.broker.broker_id,
            term=self.term,
            propose=self._propose,
        )
        if self.settings.is_gated:
            in_sync.on_confirmed.append(self._confirmed.set_end)
        return in_sync

    def _make_registration(self, core: BrokerState, *, is_address_fixed: bool) -> None:
        """Set `self.registration` and `self._announcements` for the present role."""
        addresses = find_listening_addresses(self.settings.broker.bind_address)
        fields = {
            FIXED_FIELD: str(is_address_fixed).lower(),
            INTERFACES_FIELD: ",".join(addresses),
        }
        self.registration = Registration(self.settings, core.topics, "", fields)
        self.registration.term_number = 0 if self.term is None else self.term.number
        self._announcements = Announcements(
            self.settings,
            core.topics,
            core.groups,
            core.offsets,
            self.registration,
            clock=self._clock,
            network=self._network,
            in_executor=self._jobs.run,
            save_offsets=self._save_offsets,
        )

    def _run_sync(self, on_end: Callable[[int | BaseException], None]) -> None:
        offload_to_executor(self._executor)(self.store.sync, on_end)

    def _make_side(
        self, core: BrokerState, files: Files, state_log: StateLog | None
    ) -> MasterSide | SlaveSide | None:
        """Return the side of the replication that runs here, or None for a read-only broker."""
        if state_log is not None:
            assert self.in_sync is not None, "a master counts its slaves"
            self.in_sync.last_state_number = lambda: state_log.last_number
            return MasterSide(
                core,
                state_log,
                files,
                self.log_terms,
                self._network,
                call_soon=self._loop.call_soon,
                offload=offload_to_executor(self._executor),
            )
        if not self.settings.is_slave:
            return None
        side = SlaveSide(
            core,
            self.store.start_following(),
            self._files,
            self.log_terms,
            self._confirmed,
            self.term,
            self.identity,
            run_sync=self._run_sync,
            in_executor=self._jobs.run,
            sign=self.registration.sign,
            begin_queue=lambda *unit: self._loop.call_soon_threadsafe(
                self.store.begin_queue, *unit
            ),
        )
        self.registration.on_master = side.set_master_addresses
        core.replica_lag = side.lag
        core.pull.has_master = side.is_connected
        return side

    async def _prepare_acting_master(self, core: BrokerState) -> None:
        """Prepare a slave to act for its master when the master is down.

        A master asks its slaves instead which messages they have delivered while it was down.
        """
        from sluicemq.broker import acting_master  # noqa: PLC0415 - few brokers need it

        config = self.settings.broker
        announcements = self._announcements
        context = acting_master.ActingMasterContext(
            core=core,
            files=self._files,
            pool=announcements.pool,
            name_servers=config.name_server_addresses,
            sign=self.registration.sign,
            look_up=announcements.look_up,
            in_executor=self._jobs.run,
            make_dispatcher=make_dispatcher,
            current_dispatcher=lambda: self.dispatcher,
        )
        if isinstance(self.replication_side, SlaveSide):
            self.replication_side.acting_master = (
                context.make_acting() if config.remote_escape else None
            )
        elif not config.skip_pre_online:
            core.intake.delivered_elsewhere.remaining.update(await context.fetch_escaped())

    async def _listen(self, core: BrokerState, sockets: ListeningSockets) -> None:
        """Listen at the broker's port, and at the VIP port for old clients, which is lower by 2.

        `sockets` are open sockets to reuse. Raises ConfigurationError if the broker's port cannot
        be opened. If the VIP port cannot be opened, a warning is logged.
        """
        config = self.settings.broker
        handlers = make_dispatcher(core)
        self.on_opening(handlers)
        self._servers = []
        port = next(iter(sockets), config.listen_port)
        vip_port = port - VIP_PORT_BELOW
        listen_ports = [port, vip_port] if vip_port > 0 else [port]
        for listen_port in listen_ports:
            server = self._network.listener(
                handlers, on_disconnect=core.on_disconnect, limits=ServerLimits.from_config(config)
            )
            try:
                server.inherited_sockets = sockets
                await server.start(config.listen_address, [listen_port])
                self._servers.append(server)
            except ConfigurationError as error:
                if not self._servers:
                    raise
                log.warning("The VIP port, which only old clients use, is not open: %s", error)

    async def metrics_opened(self) -> int | None:
        """Wait until the metrics are served, and return their port; None if they are not."""
        if self._metrics is not None:
            await asyncio.wait({self._metrics})
        return self.metrics_port

    def _open_metrics(self) -> Callable[[], None] | None:
        """Serve the metrics, and set their port. Return what closes them; None if not served."""
        opened = serve_metrics(
            BrokerCollector(lambda: self.core),
            self.settings.broker,
            health=lambda: find_health_problems(self.core),
            readiness=lambda: find_readiness_problems(self.core, self.registration),
        )
        if opened is not None:
            self.metrics_port = opened[0]
        return opened and opened[1]

    # --- close

    async def close(self) -> None:
        """Stop the broker: unregister it, save all state to disk, and close the store and ports.

        Do nothing if the broker does not serve.
        """
        if self._jobs_task is None:
            return
        if self._pusher is not None:
            await self._jobs.run(self._pusher.close)
        if self._metrics is not None and (close_metrics := await self._metrics) is not None:
            self._executor.submit(close_metrics)  # takes half a second; the executor waits for it
        await self._announcements.unregister()
        try:
            await self._end_role()
        finally:
            self._executor.shutdown(wait=True)
            self._filter_executor.shutdown(wait=False, cancel_futures=True)

    async def _end_role(self) -> None:
        """Stop serving in the present role, and close the store.

        A step that fails is logged, and the next one runs. Do nothing if the broker does not serve.
        """
        jobs_task = self._jobs_task
        if jobs_task is None:
            return
        self._jobs_task = None
        if self.in_sync is not None:
            self.in_sync.propose = None
        jobs_task.cancel()
        (failure,) = await asyncio.gather(jobs_task, return_exceptions=True)
        if isinstance(failure, Exception):
            log.error("Background jobs ended with an error: %s", failure, exc_info=failure)
        # No samples are taken from now on, and that must not look like a loop that hangs.
        self.core.last_sample_s = math.inf
        await self._jobs.wait()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        self.core.delayed.stop()
        self.core.order.stop()
        # If a step fails, the later ones still run, so that the tables are saved.
        for name, step in (
            ("held answers", self._send_held_answers),
            ("connections", self._close_connections),
            ("delivery state", self._save_delivery),
            ("tables", self._save_tables),
        ):
            await self._supervisor.run_async(f"stop, {name}", step, is_last=True)
        await self._jobs.run(self.store.close)
        self._store = None

    async def _send_held_answers(self) -> None:
        """Commit the appended messages, and wait up to `CLOSE_WAIT_S` until answers are sent."""
        group_commit = self.core.group_commit
        group_commit.commit()
        group_commit.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_S):
                while not group_commit.is_idle:
                    # Let the loop run once, because an fsync reports its end in a later iteration.
                    await self._jobs.run(lambda: None)
                    if not group_commit.is_idle:  # answers wait for slaves, up to slaveTimeout
                        await asyncio.sleep(CLOSE_POLL_S)

    async def _close_connections(self) -> None:
        """Send the answers that wait, report that the role ends, and close the ports."""
        is_replica = self.in_sync is not None and self.in_sync.term is not None
        self._announcements.release(make_unreplicated_error() if is_replica else None)
        self._report_role(False)
        for server in self._servers:
            await server.close()
        await self._announcements.close()
        if isinstance(self.replication_side, MasterSide):
            await self.replication_side.close()

    async def _save_delivery(self) -> None:
        """Save how far delayed messages and transactions were delivered. Do nothing on a slave.

        The log is synced first, so that the delivered messages are on disk.
        """
        if self.settings.is_slave:
            return
        with contextlib.suppress(SluiceError, OSError):  # closing the store reports it
            await self._jobs.run(self.store.sync)
            self.core.transactions.stop()
            await self._jobs.run(self.core.delayed.save)

    async def _save_tables(self) -> None:
        """Write all tables (of a slave only the confirmed end), and log what cannot be written."""
        tables = () if self.settings.is_slave else self.core.documents
        await self._writer.write(*tables, self._confirmed.document)
        if self._writer.unwritten_paths:
            paths = ", ".join(self._writer.unwritten_paths)
            log.error("The broker is stopping, but these files could not be saved: %s", paths)

    # --- background jobs

    async def _run_background_jobs(self) -> None:
        """Run the registration and the background jobs of the present role until cancelled."""
        supervisor = self._supervisor
        announcements = self._announcements
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.retry_until_success("registration", announcements.run))
            for name, period_s, job in self._background_jobs():
                pause_s = partial(self._pause_s, period_s)
                group.create_task(supervisor.repeat(name, pause_s, job))
            if isinstance(self.replication_side, SlaveSide):
                side = self.replication_side
                for name, begin in side.background_jobs(self._network, announcements.pool).items():
                    group.create_task(supervisor.retry_until_success(name, begin))

    def _pause_s(self, period_s: Callable[[], float]) -> float:
        """Return the pause in seconds between two runs of a job."""
        return self._stretch_pause(period_s())

    def _background_jobs(self) -> list[BackgroundJob]:
        """Return (name, function of the period in seconds, work) of each job of this role."""
        core = self.core
        settings = self.settings
        run_steps = self._jobs.run_steps
        jobs: list[BackgroundJob] = [
            (
                "flush",
                lambda: settings.store.flush_interval_ms / 1000,
                lambda: run_steps(core.flush()),
            ),
            ("key index", lambda: INDEX_S, lambda: run_steps(core.update_key_index())),
            (
                "property columns",
                lambda: COLUMNS_S,
                lambda: run_steps(core.build_property_columns(), computes=True),
            ),
            ("samples", lambda: 1.0, core.run_every_second),
            (
                "confirmed end",
                lambda: CONFIRMED_S,
                lambda: self._writer.write(self._confirmed.document),
            ),
            ("client expiry", lambda: EXPIRY_SWEEP_S, core.expire_clients),
            ("store check", lambda: STORE_CHECK_S, self._check_store),
        ]
        if core.guard is not None:
            check_rules = partial(self._check_access_rules, core.guard)
            jobs.append(("access rules", lambda: RULES_CHECK_S, check_rules))
        if self.registration.sends_heartbeats:
            heartbeat_s = settings.broker.name_server_heartbeat_ms / 1000
            jobs.append(("heartbeat", lambda: heartbeat_s, self._announcements.send_heartbeats))
        if not settings.is_read_only:
            jobs.append(
                ("retention", lambda: CLEAN_S, lambda: run_steps(core.retention.run_due_jobs()))
            )
        if not settings.is_slave:
            # A slave gets the tables of its master instead.
            jobs += list_saving_jobs(core, self._jobs, self._writer, self._save_offsets)
        return jobs

    async def _check_access_rules(self, guard: Guard) -> None:
        """Apply edits of the rule files, each as a whole and between two requests."""
        guard.apply_checked_files(await self._jobs.run(guard.check_files))
        if isinstance(self.replication_side, MasterSide):
            await self._jobs.run(self.replication_side.record_edits)

    def _check_store(self) -> None:
        """Log once that the store refuses all writes, if it does.

        If the setting exitOnFatalStoreError is true, `on_store_failure` is called as well.
        """
        error = self.store.failure
        if error is None or error is self._store_failure:
            return
        self._store_failure = error
        exits = self.settings.broker.exit_on_store_failure
        log.critical(
            "The store refuses all writes until the broker is restarted: %s. Check the disk.%s",
            error,
            " The process ends now (exitOnFatalStoreError)." if exits else "",
        )
        if exits:
            self.on_store_failure(error)

    async def _save_offsets(self) -> None:
        """Save the committed offsets, their resets, and the state of pops and lanes to disk."""
        offsets = self.core.offsets
        lanes = self.core.lanes
        checkpoints = self.core.checkpoints
        lanes.storage.schedule_write()
        if checkpoints.has_uncommitted_offsets:
            with contextlib.suppress(SluiceError, OSError):  # the store reports it
                await self._jobs.run(self.store.sync)
        await self._writer.write(
            offsets.document,
            offsets.resets_document,
            checkpoints.document,
            self.core.order.document,
        )

    def _sweep(self) -> None:
        """Handle expired deadlines and due messages, and schedule the next sweep."""
        loop = asyncio.get_running_loop()
        self._sweep_timer = loop.call_later(self._stretch_pause(SWEEP_S), self._sweep)
        self.core.sweep()
        if isinstance(self.replication_side, MasterSide):
            self._supervisor.run_unless_pausing("feeding slaves", self.replication_side.tick)
