"""The broker served: sockets, name servers, chores; the only place here that waits.

    start   store opened and recovered, tables loaded, port open, name servers told
    life    registration, saving tables, flushing, expiring clients, beside the handlers
    close   name servers told, what is held settled, connections closed, everything on disk
    become  the same, but for the port, which stays open, and the metrics: another role begins

Blocking calls (fsync, files) go through one executor. Changes of topics and groups are announced
(`registration.py`).
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from sluicemq.broker.admin import readonly
from sluicemq.broker.consume.columns_helper import SealingProcess
from sluicemq.broker.documents import Document
from sluicemq.broker.metrics import BrokerCollector, serve, unhealthy, unready
from sluicemq.broker.otlp import Push
from sluicemq.broker.registration import (
    Announcements,
    Registration,
    advertised_address,
    listening_addresses,
    stored_host,
)
from sluicemq.broker.replication.epochs import Epochs
from sluicemq.broker.replication.insync import InSync, Term
from sluicemq.broker.replication.mirror import Applier, HeldFiles, Mirror, MirroredFiles
from sluicemq.broker.replication.sides import Confirmed, MasterSide, SlaveSide, places_of
from sluicemq.broker.replication.state import Claim
from sluicemq.broker.replication.status import Steering
from sluicemq.broker.settings import Settings
from sluicemq.broker.state import BrokerState
from sluicemq.broker.table import dispatcher
from sluicemq.clock import SYSTEM_CLOCK, Clock, SteadyClock
from sluicemq.config import BrokerConfig, Change, StoreConfig
from sluicemq.errors import ConfigurationError, SluiceError, StoreUncertainError
from sluicemq.files import SYSTEM_FILES, Files, SystemFiles, read_text
from sluicemq.files.incarnation import Incarnation
from sluicemq.files.machine import priority
from sluicemq.files.overlay import overlay
from sluicemq.model.addresses import FIXED_FIELD, INTERFACES_FIELD, explain_address, join
from sluicemq.model.ids import Host, UniqueIds, encode_host
from sluicemq.net.accept import Kept, warn_of_protection
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import ServerLimits, Shares
from sluicemq.net.network import SOCKETS, Listener, Network, secured
from sluicemq.net.tls import broker_tls
from sluicemq.net.work.background import in_executor, quick_switches
from sluicemq.store.store import Store
from sluicemq.supervision import Supervisor
from sluicemq.wire.frames import Command

log = logging.getLogger("sluicemq.broker")
T = TypeVar("T")
Chore = Callable[[], Awaitable[None] | None]

VIP_PORT_BELOW: Final = 2  # spec/remoting.md §1
SWEEP_S: Final = 0.2
TABLES_S: Final = 0.5
EXPIRY_SWEEP_S: Final = 10.0
FILTERS_PERIOD_S: Final = 10.0  # spec/store.md §11
CLEAN_S: Final = 1.0
LOOK_S: Final = 0.5
INDEX_S: Final = 0.1
COLUMNS_S: Final = 0.1
CONFIRMED_S: Final = 1.0
STORE_CHECK_S: Final = 0.2
START_WAIT_S: Final = 1.0
CLOSE_WAIT_S: Final = 5.0
CLOSE_POLL_S: Final = 0.005
EXECUTOR_THREADS: Final = 3
"""One may wait for the log's fsync while another saves a table and the third reads for slaves."""


def _unkept() -> StoreUncertainError:
    return StoreUncertainError(
        "The change was made here, and this replica is not the master any more before all replicas "
        "had the change: the next master may not know it.",
        fix="Ask the new master.",
    )


class Broker:
    """Keeps messages and hands them out. `start` and `close` bracket its life."""

    def __init__(
        self,
        config: BrokerConfig,
        store_config: StoreConfig,
        *,
        clock: Clock = SYSTEM_CLOCK,
        files: Files = SYSTEM_FILES,
        network: Network = SOCKETS,
        executor: Executor | None = None,
        stretch: Callable[[float], float] = float,
        read_only: bool = False,
        term: Term | None = None,
        claim: Claim | None = None,
        propose: Callable[[frozenset[int]], None] | None = None,
        steering: Steering | None = None,
        incarnation: Incarnation | None = None,
        shares: Shares | None = None,
    ) -> None:
        """`read_only`: the store is a copy that must not change; see `readonly.py`. `executor` does
        what blocks; by default three threads. `stretch`: the pause before a chore comes again, of
        its usual one (s); for virtual time, in which months may pass with nothing to do.

        With sluiceConsensus: `term` says who is master (None: nobody yet), `claim` who this replica
        is, `propose` is asked for another in-sync set, which `decided` answers, and `steering` is
        who decides about roles. `incarnation` is that of the store's directory. `shares` are those
        of other servers on the same loop."""
        if read_only:
            files = overlay(files)
        self.settings = Settings(config, store_config, is_read_only=read_only)
        self.term, self._propose, self._steering = term, propose, steering
        self.claim = claim or Claim(config.broker_id, "", secrets.token_hex(8))
        self.on_opening: Callable[[Dispatcher], None] = lambda dispatcher: None
        """Told before the port opens in a role, with what will answer there."""
        self.on_role: list[Callable[[bool], None]] = []
        """They are told when connections close at the end of a role (False), and when the next one
        serves (True): for who asks without a socket."""
        self.on_store_failure: Callable[[OSError], None] = lambda error: None
        """Called once with the error that makes the store refuse all writes until a restart, if
        `exitOnFatalStoreError` is true. The server commands end the process then."""
        self.in_sync: InSync | None = None
        """What a master knows of its slaves."""
        self.side: MasterSide | SlaveSide | None = None
        self.epochs: Epochs | None = None
        """Who wrote what of the log, with sluiceConsensus."""
        self.address = ""
        """host:port that clients are told."""
        self.metrics_port: int | None = None
        self.core: BrokerState
        self.store: Store
        self.registration: Registration
        self._clock = clock
        self._files = files
        self._incarnation = incarnation or Incarnation(files, store_config.root)
        self._network = network = secured(network, broker_tls(config), config)
        self._stretch = stretch
        # A thread inherits the priority of the loop's, which may be low when it begins.
        as_usual = partial(priority().lower, is_low=False)
        self._executor = executor or ThreadPoolExecutor(
            EXECUTOR_THREADS, "sluice-broker", initializer=as_usual
        )
        # What filters compute, so that no fsync stands in line behind it.
        self._computer = executor or ThreadPoolExecutor(1, "sluice-filters", initializer=as_usual)
        self._servers: list[Listener] = []
        self._jobs: set[asyncio.Future[Any]] = set()  # in the executor
        self._shares = shares
        self._store: Store | None = None
        self._store_failure: OSError | None = None
        self._ha = 0
        self._confirmed: Confirmed
        self._loop: asyncio.AbstractEventLoop
        self._steady = SteadyClock(clock)
        self._supervisor = Supervisor(clock, log)
        self._unwritten: dict[str, str] = {}
        self._life: asyncio.Task[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._push: Push | None = None
        self._metrics: asyncio.Future[Callable[[], None] | None] | None = None
        self._announcements: Announcements

    @property
    def port(self) -> int:
        """The port it listens at: the one that was free when the configured one is 0."""
        return self._servers[0].ports[0]

    @property
    def dispatcher(self) -> Dispatcher:
        """Requests to answers, for whoever serves them without sockets."""
        return self._servers[0].dispatcher

    # --------------------------------------------------------------------------------- start

    async def start(self) -> None:
        """Serve. Raises SluiceError (store locked or damaged, port in use …) with its cure."""
        loop, config = asyncio.get_running_loop(), self.settings.broker
        try:
            if config.is_pushed:
                self._push = await self._in_executor(
                    partial(
                        Push, BrokerCollector(lambda: self.core).collect, config,
                        kind="broker", node=config.broker_name,
                    )
                )  # fmt: skip
            await self._open({})
        except BaseException:
            await self._give_up()
            raise
        if self._push is not None:
            self._push.start()
        if config.metrics_enable:  # its imports are a tenth of a start
            self._metrics = loop.run_in_executor(self._executor, self._open_metrics)

    async def become(self, term: Term | None) -> None:
        """Another role, or another master: what was open closes in order and opens again, while
        clients wait at the port. Raises SluiceError: then the broker is closed."""
        kept = {port: one for server in self._servers for port, one in server.keep().items()}
        try:
            await self._shut()
            self.term = term
            await self._open(kept)
        except BaseException:
            await self._give_up()
            for one in kept.values():
                one.close()
            raise

    def reread_config(self) -> Change:
        """Takes up what was edited in its file. Raises ConfigurationError, and then nothing
        has changed."""
        path = self.settings.broker.config_path
        return self.settings.reread(read_text(self._files, path) or "")

    def decided(self, term: Term) -> None:
        """The consensus has this term now, and this replica is its master as before: the in-sync
        set is another, or a proposal came to nothing."""
        self.term = term
        if self.in_sync is not None:
            self.in_sync.decided(term)

    def depose(self, reason: str) -> None:
        """This replica is not master any more: it answers nothing as safe and shows nothing, until
        `become` says what it is."""
        if self.in_sync is not None:
            self.in_sync.depose(reason)
            self.core.turns.flush()

    def _tell_role(self, serves: bool) -> None:
        for told in self.on_role:
            told(serves)

    async def _give_up(self) -> None:
        for server in self._servers:
            await server.close()
        if self._store is not None:
            with contextlib.suppress(SluiceError, OSError):  # the error that led here counts
                await self._in_executor(self._store.close)
        self._executor.shutdown(wait=False)
        self._computer.shutdown(wait=False)

    def _open_store(self) -> tuple[Store, Files, Confirmed, Mirror | None]:
        """Blocking. The store in the role of now, and the files that its tables are written to."""
        settings, files = self.settings, self._files
        if settings.is_read_only:
            readonly.prepare(settings, files)
        confirmed, mirror, places = Confirmed(files, settings), None, places_of(settings, files)
        if settings.is_slave and not settings.is_failover:
            confirmed.forget()
        if not settings.is_read_only:
            Applier(files, places).settle()
        if settings.is_slave:
            files = HeldFiles(files, places)
        elif not settings.is_read_only:
            life = self.term.life if self.term is not None else self.claim.life
            mirror = Mirror(places, life=life, call_soon=self._loop.call_soon_threadsafe)
            files = MirroredFiles(files, mirror)
        is_hidden = settings.is_slave and settings.is_failover
        self._store = store = Store.open(
            settings.store, files=files, clock=self._clock, is_gated=settings.is_gated,
            confirmed=(confirmed.end or 0) if is_hidden else None, incarnation=self._incarnation,
        )  # fmt: skip
        if mirror is not None:
            mirror.log_end = lambda: store.written_offset
            mirror.units = store.ended_queues
        if settings.is_failover:
            path = settings.broker.epoch_path or f"{settings.store.root}/epochFileCheckpoint"
            self.epochs = Epochs(files, path, store.written_offset)
            if self.term is not None and not settings.is_slave:
                self.epochs.reign(self.term.epoch, store.offset_min, store.written_offset)
        return store, files, confirmed, mirror

    async def _open(self, kept: Kept) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.settings.forget_listeners()
        if self.settings.is_failover:
            master_id = self.term.master_id if self.term is not None else None
            self.settings.is_slave = master_id != self.settings.broker.broker_id
        self.store, files, self._confirmed, mirror = await self._in_executor(self._open_store)
        config = self.settings.broker  # that of a copy is another one by now
        advertised = advertised_address(config)
        core = self._make_core(stored_host(advertised.address, config.listen_port), files)
        await self._in_executor(core.load)
        known = self._confirmed.end
        if known is None and self.settings.is_failover:
            known = 0  # others may be in sync, and lack what is here
        if self.settings.is_gated and known is not None:
            # Tables know all that is in the log, also what has to be confirmed yet.
            self.store.hide(known)
        self.store.columns.loads_at_once = False
        if isinstance(self._files, SystemFiles):
            self.store.columns.sealer = SealingProcess()
        if not self.settings.is_read_only:
            core.cleaning.look()
        fields = {
            FIXED_FIELD: str(advertised.fixed).lower(),
            INTERFACES_FIELD: ",".join(listening_addresses(config.bind_address)),
        }
        self.registration = Registration(self.settings, core.topics, "", fields)
        self.registration.epoch = 0 if self.term is None else self.term.epoch
        self._announcements = Announcements(
            self.settings, core.topics, core.groups, core.offsets, self.registration,
            clock=self._clock, network=self._network, in_executor=self._in_executor,
            save_offsets=self._save_offsets,
        )  # fmt: skip
        core.side = self.side = self._side(core, files, mirror)
        if config.acting_master and not self.settings.is_failover:
            await self._stand_in(core)
        if isinstance(self.side, MasterSide):
            self._announcements.kept = self.side.kept
        await self._listen(core, kept)
        self._tell_role(True)
        core.move(core.settings.host._replace(port=self.port))
        self.registration.address = self.address = join(advertised.address, self.port)
        log.info("%s", explain_address(advertised, self.port))
        if isinstance(self.side, MasterSide):
            self.registration.ha_port = self._ha = await self.side.open(self._ha)
            self.side.ha_address = self.registration.ha_address
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        self._life = loop.create_task(self._live())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await self._announcements.is_known.wait()
        log.info("broker %s listens at %s:%d", config.broker_name, config.listen_address, self.port)
        warn_of_protection(config)

    def _make_core(self, host: Host, files: Files) -> BrokerState:
        """The parts of a broker, not loaded yet."""
        loop, settings, store = self._loop, self.settings, self.store

        def announce(peer: Peer, answer: bytes) -> None:
            self._announcements.hold(peer, answer)

        def look_up(topic: str, done: Callable[[Command | None], None]) -> None:
            self._announcements.look_up(topic, done)

        self.in_sync = None
        if not (settings.is_slave or settings.is_read_only):
            is_sure = settings.store.flush_sync
            self._confirmed.bound(store.written_offset)
            self.in_sync = InSync(
                settings, self._clock,
                lambda: store.synced_offset if is_sure else store.written_offset,
                confirmed=self._confirmed.end or 0, own_id=settings.broker.broker_id,
                term=self.term, propose=self._propose,
            )  # fmt: skip
            if settings.is_gated:
                self.in_sync.on_confirmed.append(self._confirmed.moved)
        self.core = BrokerState(
            settings, store, files=files, clock=self._clock, host=host,
            unique_ids=UniqueIds(
                self._clock, encode_host(host)[:-4], os.getpid(), secrets.randbits(32)
            ),
            call_soon=loop.call_soon, call_later=loop.call_later, run_sync=self._run_sync,
            announce=announce, look_up=look_up, offload=in_executor(self._executor),
            compute=in_executor(self._computer, computes=True), in_sync=self.in_sync,
            shares=self._shares, steady=self._steady, jobs=self._supervisor,
        )  # fmt: skip
        self._shares = self.core.shares
        self.core.steering = self._steering
        return self.core

    def _run_sync(self, done: Callable[[int | BaseException], None]) -> None:
        in_executor(self._executor)(self.store.sync, done)

    def _side(
        self, core: BrokerState, files: Files, mirror: Mirror | None
    ) -> MasterSide | SlaveSide | None:
        """What runs for the other replicas."""
        if mirror is not None:
            assert self.in_sync is not None, "a master counts its slaves"
            self.in_sync.state_number = lambda: mirror.number
            return MasterSide(
                core, mirror, files, self.epochs, self._network, call_soon=self._loop.call_soon,
                offload=in_executor(self._executor),
            )  # fmt: skip
        if not self.settings.is_slave:
            return None
        side = SlaveSide(
            core, self.store.following(), self._files, self.epochs, self._confirmed, self.term,
            self.claim, run_sync=self._run_sync, in_executor=self._in_executor,
            signed=self.registration.signed,
            begin_queue=lambda *unit: self._loop.call_soon_threadsafe(
                self.store.begin_queue, *unit
            ),
        )  # fmt: skip
        self.registration.on_master, core.behind = side.told, side.lag
        core.pull.has_master = side.follows
        return side

    async def _stand_in(self, core: BrokerState) -> None:
        """What a slave has to have ready, and what a master that comes back asks."""
        from sluicemq.broker.standing import Surroundings  # noqa: PLC0415 - few need it

        config, announcements = self.settings.broker, self._announcements
        around = Surroundings(
            core, self._files, announcements.pool, config.name_server_addresses,
            self.registration.signed, announcements.look_up, self._in_executor, dispatcher,
            lambda: self.dispatcher,
        )  # fmt: skip
        if isinstance(self.side, SlaveSide):
            self.side.acting = around.acting() if config.remote_escape else None
        elif not config.skip_pre_online:
            core.intake.elsewhere.left.update(await around.escaped())

    async def _listen(self, core: BrokerState, kept: Kept) -> None:
        """Opens the port, and the VIP port for old clients where it can be had."""
        config, handlers = self.settings.broker, dispatcher(core)
        self.on_opening(handlers)
        self._servers = []
        port = next(iter(kept), config.listen_port)
        vip_port = port - VIP_PORT_BELOW
        for one in (port, *([vip_port] if vip_port > 0 else ())):
            server = self._network.listener(
                handlers, on_disconnect=core.disconnected, limits=ServerLimits.of(config)
            )
            try:
                server.kept = kept
                await server.start(config.listen_address, [one])
                self._servers.append(server)
            except ConfigurationError as error:
                if not self._servers:
                    raise
                log.warning("no VIP port, which only old clients use: %s", error)

    async def metrics_opened(self) -> int | None:
        """Wait until the metrics are served, and return their port; None if they are not."""
        if self._metrics is not None:
            await asyncio.wait({self._metrics})
        return self.metrics_port

    def _open_metrics(self) -> Callable[[], None] | None:
        opened = serve(
            BrokerCollector(lambda: self.core),
            self.settings.broker,
            health=lambda: unhealthy(self.core),
            readiness=lambda: unready(self.core, self.registration),
        )
        if opened is not None:
            self.metrics_port = opened[0]
        return opened and opened[1]

    # --------------------------------------------------------------------------------- close

    async def close(self) -> None:
        """Stop in order; everything is on disk and closed on return."""
        if self._life is None:
            return
        if self._push is not None:
            await self._in_executor(self._push.close)
        if self._metrics is not None and (close_metrics := await self._metrics) is not None:
            self._executor.submit(close_metrics)  # takes half a second; the executor waits for it
        await self._announcements.farewell()
        try:
            await self._shut()
        finally:
            self._executor.shutdown(wait=True)
            self._computer.shutdown(wait=False, cancel_futures=True)

    async def _shut(self) -> None:
        """Ends the role of now."""
        if (life := self._life) is None:
            return
        self._life = None
        if self.in_sync is not None:
            self.in_sync.propose = None
        life.cancel()
        (ended,) = await asyncio.gather(life, return_exceptions=True)
        if isinstance(ended, Exception):
            log.error("Background jobs ended with an error: %s", ended, exc_info=ended)
        self.core.sampled_s = math.inf  # nobody takes samples any more, and the loop turns
        if self._jobs:
            await asyncio.wait(self._jobs)
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.core.delayed.stop()
        self.core.order.stop()
        # Whatever fails from here on, everything after it is done: the tables are saved.
        for name, step in (
            ("held answers", self._let_answers_go),
            ("connections", self._close_connections),
            ("delivery state", self._save_delivery),
            ("tables", self._save_tables),
        ):
            await self._supervisor.run_async(f"stop, {name}", step, is_last=True)
        await self._in_executor(self.store.close)
        self._store = None

    async def _let_answers_go(self) -> None:
        """Answers that are held leave before the connections close."""
        turns = self.core.turns
        turns.commit()
        turns.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_S):
                while not turns.is_idle:  # an fsync says that it ends in a turn of the loop
                    await self._in_executor(lambda: None)
                    if not turns.is_idle:  # answers wait for slaves, up to slaveTimeout
                        await asyncio.sleep(CLOSE_POLL_S)

    async def _close_connections(self) -> None:
        is_replica = self.in_sync is not None and self.in_sync.term is not None
        self._announcements.release(_unkept() if is_replica else None)
        self._tell_role(False)
        for server in self._servers:
            await server.close()
        await self._announcements.close()
        if isinstance(self.side, MasterSide):
            await self.side.close()

    async def _save_delivery(self) -> None:
        """Save how far delivery has come, as far as what was delivered is on disk."""
        if self.settings.is_slave:
            return
        with contextlib.suppress(SluiceError, OSError):  # closing the store says it
            await self._in_executor(self.store.sync)
            self.core.transactions.stop()
            await self._in_executor(self.core.delayed.save)

    async def _save_tables(self) -> None:
        tables = () if self.settings.is_slave else self.core.documents
        await self._save(*tables, self._confirmed.document)
        if self._unwritten:
            log.error(
                "The broker stops, and these files are not saved: %s",
                ", ".join(sorted(self._unwritten)),
            )

    # ---------------------------------------------------------------------------------- chores

    async def _live(self) -> None:
        jobs = self._supervisor
        async with asyncio.TaskGroup() as group:
            group.create_task(jobs.keep("registration", self._announcements.run))
            for name, period_s, chore in self._chores():
                pause_s = partial(self._paused_s, period_s)
                group.create_task(jobs.repeat(name, pause_s, chore))
            if isinstance(self.side, SlaveSide):
                side, pool = self.side, self._announcements.pool
                for name, begin in side.tasks(self._network, pool).items():
                    group.create_task(jobs.keep(name, begin))

    def _paused_s(self, period_s: Callable[[], float]) -> float:
        """The pause between two runs of a chore."""
        return self._stretch(period_s())

    def _chores(self) -> list[tuple[str, Callable[[], float], Chore]]:
        core, settings, save, take = self.core, self.settings, self._save, self._take
        chores: list[tuple[str, Callable[[], float], Chore]] = [
            ("flush", lambda: settings.store.flush_interval_ms / 1000, lambda: take(core.flush())),
            ("key index", lambda: INDEX_S, lambda: take(core.follow_keys())),
            (
                "property columns",
                lambda: COLUMNS_S,
                lambda: take(core.work_at_columns(), computes=True),
            ),
            ("samples", lambda: 1.0, core.second),
            ("confirmed end", lambda: CONFIRMED_S, lambda: save(self._confirmed.document)),
            ("client expiry", lambda: EXPIRY_SWEEP_S, core.expire_clients),
            ("store check", lambda: STORE_CHECK_S, self._check_store),
        ]
        if (guard := core.guard) is not None:

            async def look_at_rules() -> None:
                """An edit of plain_acl.yml is in force as a whole, between two requests."""
                guard.settle(await self._in_executor(guard.look))
                if isinstance(self.side, MasterSide):
                    await self._in_executor(self.side.look)

            chores.append(("access rules", lambda: LOOK_S, look_at_rules))
        if self.registration.beats:
            beat_ms = settings.broker.name_server_heartbeat_ms
            chores.append(("heartbeat", lambda: beat_ms / 1000, self._announcements.beat))
        if not settings.is_read_only:
            chores.append(("retention", lambda: CLEAN_S, lambda: take(core.cleaning.run())))
        return chores if settings.is_slave else chores + self._chores_of_master()

    def _chores_of_master(self) -> list[tuple[str, Callable[[], float], Chore]]:
        """Tables are written; those of a slave are its master's."""
        core, settings, save = self.core, self.settings, self._save
        delayed, filters = core.delayed, core.filters

        def save_delayed() -> Awaitable[None]:
            delayed.clean()
            return save(*delayed.documents, core.epochs.table.document)

        def save_filters() -> Awaitable[None]:
            filters.remove_expired()
            return save(filters.document, core.assignments.document)

        return [
            # RocketMQ's JSON of topics and groups lags by as much.
            ("saving topics", lambda: TABLES_S, lambda: save(*core.journaled, core.locks.document)),
            (
                "saving offsets",
                lambda: settings.broker.consumer_offset_flush_interval_ms / 1000,
                self._save_offsets,
            ),
            ("saving filters", lambda: FILTERS_PERIOD_S, save_filters),
            (
                "saving delay levels",
                lambda: settings.store.delay_offset_flush_interval_ms / 1000,
                save_delayed,
            ),
            (
                "saving timers",
                lambda: settings.store.timer_flush_interval_ms / 1000,
                lambda: self._take(delayed.timers.save()),
            ),
        ]

    def _check_store(self) -> None:
        """Log a failure that makes the store refuse all writes, once, and report it to
        `on_store_failure` if `exitOnFatalStoreError` says so."""
        error = self.store.failure
        if error is None or error is self._store_failure:
            return
        self._store_failure = error
        exits = self.settings.broker.exit_on_store_failure
        log.critical(
            "The store refuses all writes until the broker is restarted: %s. Check the disk.%s",
            error, " The process ends now (exitOnFatalStoreError)." if exits else "",
        )  # fmt: skip
        if exits:
            self.on_store_failure(error)

    async def _save_offsets(self) -> None:
        offsets, lanes, checkpoints = self.core.offsets, self.core.lanes, self.core.checkpoints
        lanes.ground.flush()
        if checkpoints.is_ahead:
            with contextlib.suppress(SluiceError, OSError):  # the store says it
                await self._in_executor(self.store.sync)
        await self._save(
            offsets.document, offsets.resets_document, checkpoints.document,
            self.core.order.document,
        )  # fmt: skip

    async def _take(
        self, steps: Iterator[float | Callable[[], object]], *, computes: bool = False
    ) -> None:
        """Does what blocks in the executor, and pauses."""
        with quick_switches() if computes else contextlib.nullcontext():
            try:
                for step in steps:
                    if callable(step):
                        await self._in_executor(step)
                    else:
                        await asyncio.sleep(step)
            finally:
                if isinstance(steps, Generator):
                    steps.close()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(self._stretch(SWEEP_S), self._sweep)
        self.core.sweep()
        if isinstance(self.side, MasterSide):
            self._supervisor.run_unless_pausing("feeding slaves", self.side.run)

    async def _save(self, *documents: Document) -> None:
        """Write the documents that have changed. A failure is logged, once for each text, keeps
        no other document from being written, and is tried again the next time."""
        for document in documents:
            try:
                write = document.take()
            except Exception as error:  # noqa: BLE001 - the others have to be saved
                self._cannot_save(document, error)
                continue
            if write is None:
                continue
            try:
                with quick_switches():
                    await self._in_executor(write)
                self._unwritten.pop(document.path, None)
            except Exception as error:  # noqa: BLE001 - the others have to be saved
                self._cannot_save(document, error)

    def _cannot_save(self, document: Document, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}"
        if self._unwritten.get(document.path) == said:
            return
        self._unwritten[document.path] = said
        if isinstance(error, OSError):
            log.error(
                "%s cannot be written (%s) and is tried again. Free disk space or correct the "
                "permissions.",
                document.path,
                error,
            )
        else:
            log.error(
                "%s cannot be saved (%s): the file keeps what it had. The other files are saved. "
                "Report this error, which is a bug.",
                document.path,
                said,
                exc_info=error,
            )

    async def _in_executor(self, work: Callable[[], T]) -> T:
        """Whoever waits may be cancelled; what has begun is waited for when the role ends."""
        job = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return await asyncio.shield(job)
