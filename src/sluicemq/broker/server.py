"""The broker served: sockets, name servers, chores; the only place here that waits.

    start   store opened and recovered, tables loaded, port open, name servers told
    life    registration, saving tables, flushing, expiring clients, beside the handlers
    close   name servers told, what is held settled, connections closed, everything on disk

Blocking calls (fsync, files) go through one executor. Changes of topics and groups are announced
(`registration.py`).
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final, TypeVar

from sluicemq.broker.admin import readonly
from sluicemq.broker.background import in_executor, quick_switches
from sluicemq.broker.consume.columns_helper import SealingProcess
from sluicemq.broker.documents import Document
from sluicemq.broker.metrics import BrokerCollector, serve
from sluicemq.broker.registration import (
    Announcements,
    Registration,
    advertised_address,
    listening_addresses,
    stored_host,
)
from sluicemq.broker.settings import Settings
from sluicemq.broker.state import BrokerState
from sluicemq.broker.table import dispatcher
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.files import SYSTEM_FILES, Files, SystemFiles
from sluicemq.model.addresses import FIXED_FIELD, INTERFACES_FIELD, explain_address, join
from sluicemq.model.ids import UniqueIds, encode_host
from sluicemq.net.accept import warn_of_protection
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import ServerLimits
from sluicemq.net.network import SOCKETS, Listener, Network, secured
from sluicemq.net.tls import broker_tls
from sluicemq.store.store import Store
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
START_WAIT_S: Final = 1.0
CLOSE_WAIT_S: Final = 5.0
EXECUTOR_THREADS: Final = 2  # one may wait for the log's fsync while the other saves a table


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
    ) -> None:
        """`read_only`: the store is a copy that must not change; see `readonly.py`. `executor` does
        what blocks; by default two threads. `stretch`: the pause before a chore comes again, of
        its usual one (s); for virtual time, in which months may pass with nothing to do."""
        if read_only:
            files = readonly.overlay(files)
        self.settings = Settings(config, store_config, is_read_only=read_only)
        self.address = ""
        """host:port that clients are told."""
        self.metrics_port: int | None = None
        self.core: BrokerState
        self.store: Store
        self.registration: Registration
        self._clock = clock
        self._files = files
        self._network = network = secured(network, broker_tls(config), config)
        self._stretch = stretch
        self._executor = executor or ThreadPoolExecutor(EXECUTOR_THREADS, "sluice-broker")
        # What filters compute, so that no fsync stands in line behind it.
        self._computer = executor or ThreadPoolExecutor(1, "sluice-filters")
        self._servers: list[Listener] = []
        self._unwritten: dict[str, str] = {}
        self._life: asyncio.Task[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
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

        def open_store() -> Store:
            if self.settings.is_read_only:
                readonly.prepare(self.settings, self._files)
            return Store.open(self.settings.store, files=self._files, clock=self._clock)

        try:
            self.store = await self._in_executor(open_store)
            await self._open()
        except BaseException:
            for server in self._servers:
                await server.close()
            if hasattr(self, "store"):
                with contextlib.suppress(SluiceError, OSError):  # the start's own error counts
                    await self._in_executor(self.store.close)
            self._executor.shutdown(wait=False)
            self._computer.shutdown(wait=False)
            raise

    async def _open(self) -> None:
        config = self.settings.broker
        loop = asyncio.get_running_loop()
        advertised = advertised_address(config)
        host = stored_host(advertised.address, config.listen_port)

        def announce(peer: Peer, answer: bytes) -> None:
            self._announcements.hold(peer, answer)

        def look_up(topic: str, done: Callable[[Command | None], None]) -> None:
            self._announcements.look_up(topic, done)

        core = self.core = BrokerState(
            self.settings,
            self.store,
            files=self._files,
            clock=self._clock,
            host=host,
            unique_ids=UniqueIds(
                self._clock, encode_host(host)[:-4], os.getpid(), secrets.randbits(32)
            ),
            call_soon=loop.call_soon,
            call_later=loop.call_later,
            run_sync=lambda done: in_executor(self._executor)(self.store.sync, done),
            announce=announce,
            look_up=look_up,
            offload=in_executor(self._executor),
            compute=in_executor(self._computer, computes=True),
        )
        await self._in_executor(core.load)
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
        self._announcements = Announcements(
            self.settings, core.topics, core.groups, core.offsets, self.registration,
            clock=self._clock, network=self._network, in_executor=self._in_executor,
            save_offsets=self._save_offsets,
        )  # fmt: skip
        handlers, vip_port = dispatcher(core), config.listen_port - VIP_PORT_BELOW
        for port in (config.listen_port, *([vip_port] if vip_port > 0 else ())):
            server = self._network.listener(
                handlers, on_disconnect=core.disconnected, limits=ServerLimits.of(config)
            )
            try:
                await server.start(config.listen_address, [port])
                self._servers.append(server)
            except ConfigurationError as error:
                if not self._servers:
                    raise
                log.warning("no VIP port, which only old clients use: %s", error)
        core.move(host._replace(port=self.port))
        self.registration.address = self.address = join(advertised.address, self.port)
        log.info("%s", explain_address(advertised, self.port))
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        self._life = loop.create_task(self._live())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await self._announcements.is_known.wait()
        if config.metrics_enable:  # its imports are a tenth of a start, and nobody waits for it
            self._metrics = loop.run_in_executor(self._executor, self._open_metrics)
        log.info("broker %s listens at %s:%d", config.broker_name, config.listen_address, self.port)
        warn_of_protection(config)

    def _open_metrics(self) -> Callable[[], None] | None:
        opened = serve(BrokerCollector(self.core), self.settings.broker)
        if opened is not None:
            self.metrics_port = opened[0]
        return opened and opened[1]

    # --------------------------------------------------------------------------------- close

    async def close(self) -> None:
        """Stop in order; everything is on disk and closed on return."""
        if self._life is None:
            return
        if self._metrics is not None and (close_metrics := await self._metrics) is not None:
            self._executor.submit(close_metrics)  # takes half a second; the executor waits for it
        await self._announcements.farewell()
        life, self._life = self._life, None
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.core.delayed.stop()
        self.core.order.stop()
        # Answers that are held leave before the connections close.
        turns = self.core.turns
        turns.end()
        turns.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_S):
                while not turns.is_idle:  # an fsync says that it ends in a turn of the loop
                    await self._in_executor(lambda: None)
        self._announcements.release()
        for server in self._servers:
            await server.close()
        await self._announcements.close()
        with contextlib.suppress(SluiceError, OSError):  # closing the store says it
            await self._in_executor(self.store.sync)  # what was delivered is safe: so it is saved
            self.core.transactions.stop()
            await self._in_executor(self.core.delayed.save)
        await self._save(*self.core.documents)
        try:
            await self._in_executor(self.store.close)
        finally:
            self._executor.shutdown(wait=True)
            self._computer.shutdown(wait=False, cancel_futures=True)

    # ---------------------------------------------------------------------------------- chores

    async def _live(self) -> None:
        core = self.core
        settings, save, take = self.settings, self._save, self._take
        delayed, filters = core.delayed, core.filters

        def save_delayed() -> Awaitable[None]:
            delayed.clean()
            return save(*delayed.documents, core.epochs.table.document)

        def save_filters() -> Awaitable[None]:
            filters.clean()
            return save(filters.document, core.assignments.document)

        chores: list[tuple[Callable[[], float], Chore]] = [
            # RocketMQ's JSON of topics and groups lags by as much.
            (lambda: TABLES_S, lambda: save(*core.journaled)),
            (lambda: settings.broker.consumer_offset_flush_interval_ms / 1000, self._save_offsets),
            (lambda: FILTERS_PERIOD_S, save_filters),
            (lambda: settings.store.flush_interval_ms / 1000, lambda: take(core.flush())),
            (lambda: settings.store.delay_offset_flush_interval_ms / 1000, save_delayed),
            (lambda: settings.store.timer_flush_interval_ms / 1000,
             lambda: take(delayed.timers.save())),
            (lambda: INDEX_S, lambda: take(core.follow_keys())),
            (lambda: COLUMNS_S, lambda: take(core.work_at_columns(), computes=True)),
            (lambda: 1.0, core.second),
            (lambda: EXPIRY_SWEEP_S, core.expire_clients),
        ]  # fmt: skip
        if (guard := core.guard) is not None:

            async def look_at_rules() -> None:
                """An edit of plain_acl.yml is in force as a whole, between two requests."""
                guard.settle(await self._in_executor(guard.look))

            chores.append((lambda: LOOK_S, look_at_rules))
        if not settings.is_read_only:
            chores.append((lambda: CLEAN_S, lambda: take(core.cleaning.run())))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._announcements.run())
            for period_s, chore in chores:
                group.create_task(self._each(period_s, chore))

    async def _each(self, period_s: Callable[[], float], chore: Chore) -> None:
        """Does a chore again and again; a failure is logged, once for each text."""
        said = ""
        while True:
            await asyncio.sleep(self._stretch(period_s()))
            try:
                if (work := chore()) is not None:
                    await work
                said = ""
            except Exception as error:
                if str(error) != said:
                    said = str(error)
                    log.error("%s", error, exc_info=not isinstance(error, SluiceError))

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
        self.core.sweep()
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(self._stretch(SWEEP_S), self._sweep)

    async def _save(self, *documents: Document) -> None:
        """Writes what changed. A failure is logged, once for each text, and tried again the next
        time."""
        for document in documents:
            write = document.take()
            if write is None:
                continue
            try:
                with quick_switches():
                    await self._in_executor(write)
                self._unwritten.pop(document.path, None)
            except OSError as error:
                if self._unwritten.get(document.path) != str(error):
                    self._unwritten[document.path] = str(error)
                    log.error(
                        "%s cannot be written (%s) and is tried again. Free space or correct the "
                        "rights.", document.path, error,
                    )  # fmt: skip

    async def _in_executor(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
