"""The broker put together: its parts, its life, and the only place here that waits.

    start   store opened and recovered, tables loaded, port open, name servers told
    life    chores beside the handlers: registration, saving tables, flushing, expiring clients
    close   name servers told, connections closed, what is held settled, everything on disk

Blocking calls (fsync, files) go through one executor. A change of topics or groups is an
announcement: it is saved, then the name servers are told, then its answer leaves.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from sluicemq.broker.admin import Admin
from sluicemq.broker.clients import Consumers, Producers
from sluicemq.broker.documents import Document
from sluicemq.broker.groups import Groups
from sluicemq.broker.heartbeat import Heartbeats
from sluicemq.broker.locks import QueueLocks
from sluicemq.broker.longpoll import LongPolls
from sluicemq.broker.metadata import Metadata
from sluicemq.broker.metrics import BrokerCollector, Parts, serve
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.outcomes import Announced, Durable, Parked
from sluicemq.broker.pull import Pull
from sluicemq.broker.queries import Queries
from sluicemq.broker.rates import Days, Rates
from sluicemq.broker.registration import NameServer, Registration
from sluicemq.broker.runtime import RuntimeInfo
from sluicemq.broker.send import Send
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.broker.turns import Turns
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import ConfigurationError, RequestError, SluiceError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.model.addresses import (
    FIXED_FIELD,
    INTERFACES_FIELD,
    AdvertisedAddress,
    choose_address,
    explain_address,
    is_wildcard,
    join,
)
from sluicemq.model.ids import Host, UniqueIds, encode_host, parse_host
from sluicemq.net.dialer import Channel, ChannelPool
from sluicemq.net.dispatch import Dispatcher, finish_answer
from sluicemq.net.server import Peer, RemotingServer
from sluicemq.protocol.command import Command
from sluicemq.store.store import Store

log = logging.getLogger("sluicemq.broker")
T = TypeVar("T")

VIP_PORT_BELOW: Final = 2  # spec/remoting.md §1
SWEEP_S: Final = 0.2
EXPIRY_SWEEP_S: Final = 10.0
REGISTER_WAIT_S: Final = 3.0
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
    ) -> None:
        self.settings = Settings(config, store_config)
        self.address = ""
        """host:port that clients are told."""
        self._clock = clock
        self._files = files
        self._executor = ThreadPoolExecutor(EXECUTOR_THREADS, "sluice-broker")
        self.topics = Topics(self.settings, files, clock)
        self.groups = Groups(self.settings, files, clock)
        self.offsets = Offsets(self.settings, files, clock)
        self.consumers = Consumers(clock)
        self.producers = Producers(clock)
        self.locks = QueueLocks(clock)
        self.rates = Rates()
        self.days = Days()
        self.dispatcher = Dispatcher({}, deferred=self._deferred)
        self._server = RemotingServer(
            self.dispatcher,
            on_disconnect=self._disconnected,
            idle_timeout_s=config.idle_timeout_s,
            connections_max=config.connections_max,
            write_buffer_bytes_max=config.write_buffer_bytes_max,
        )
        self._vip_server: RemotingServer | None = None
        self._announced: list[tuple[Peer, bytes]] = []
        self._changed: asyncio.Event = asyncio.Event()
        self._tables_changed = False
        self._life: asyncio.Task[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._close_metrics: Callable[[], None] | None = None
        self.metrics_port: int | None = None
        self.store: Store
        self.turns: Turns
        self.polls: LongPolls
        self.registration: Registration

    @property
    def port(self) -> int:
        """The port it listens at: the one that was free when the configured one is 0."""
        return self._server.ports[0]

    # --------------------------------------------------------------------------------- start

    async def start(self) -> None:
        """Serve. Raises SluiceError (store locked or damaged, port in use …) with its cure."""
        try:
            self.store = await self._in_executor(self._open_store)
            await self._open()
        except BaseException:
            await self._abandon()
            raise

    def _open_store(self) -> Store:
        store = Store.open(self.settings.store, files=self._files, clock=self._clock)
        try:
            self.topics.load()
            self.groups.load()
            self.offsets.load()
            for document in (self.topics.document, self.groups.document):
                document.save()
        except BaseException:
            store.close()
            raise
        return store

    async def _open(self) -> None:
        config = self.settings.broker
        if config.listen_port:
            self._assemble(config.listen_port)
        await self._server.start(config.bind_address, [config.listen_port])
        if not config.listen_port:
            self._assemble(self.port)
        await self._open_vip_port()
        if config.metrics_enable:
            self._open_metrics()
        self.topics.on_change = self.groups.on_change = self._table_changed
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        self._life = loop.create_task(self._live())
        self._changed.set()
        registered = loop.create_future()
        self._first_round = registered
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await registered
        log.info("broker %s listens at %s:%d", config.broker_name, config.bind_address, self.port)

    def _assemble(self, port: int) -> None:
        """Makes the parts that need the store and the broker's own address."""
        advertised = self._choose_address()
        self.address = join(advertised.address, port)
        log.info("%s", explain_address(advertised, port))
        loop = asyncio.get_running_loop()
        settings, store, clock = self.settings, self.store, self._clock
        self.polls = LongPolls(self._write, settings.broker.parked_pulls_max)
        self.turns = Turns(
            store,
            clock,
            call_soon=loop.call_soon,
            wake=self.polls.wake,
            run_sync=self._run_sync if settings.store.flush_sync else None,
            announce=self._announce,
            sync_timeout_s=settings.store.sync_flush_timeout_ms / 1000,
        )
        host = _stored_host(advertised.address, port)
        unique_ids = UniqueIds(
            encode_host(host)[:-4], os.getpid(), int.from_bytes(secrets.token_bytes(4))
        )
        send = Send(settings, self.topics, self.groups, self.locks, store, clock, host, unique_ids)
        pull = Pull(
            settings, self.topics, self.groups, self.offsets, self.consumers, self.polls, store,
            clock, loop.call_soon,
        )  # fmt: skip
        self._runtime = RuntimeInfo(
            settings, self.topics, send, pull, self.polls, self.turns, store, self.rates, self.days
        )
        families = (
            send,
            pull,
            Heartbeats(
                settings, self.topics, self.groups, self.consumers, self.producers, clock
            ),
            Queries(settings, self.topics, self.groups, self.offsets, self.locks, store),
            Metadata(
                settings, self.topics, self.groups, self.offsets, store, self.turns.end
            ),
            Admin(
                settings, self.topics, self.groups, self.offsets, self.consumers, self.producers,
                store, self._runtime, self.rates, self._files, clock,
            ),
        )  # fmt: skip
        for family in families:
            for code, handler in family.handlers().items():
                self.dispatcher.handlers[int(code)] = handler
        self.collector = BrokerCollector(
            Parts(
                settings, self.topics, self.groups, self.offsets, self.consumers, self.producers,
                self.polls, send, pull, self.turns, store, clock,
            )
        )  # fmt: skip
        fields = {
            FIXED_FIELD: str(advertised.fixed).lower(),
            INTERFACES_FIELD: ",".join(_listening_addresses(settings.broker.bind_address)),
        }
        self.registration = Registration(settings, self.topics, self.address, fields)
        self._pool = ChannelPool(on_close=self._name_server_lost, clock=clock)

    def _choose_address(self) -> AdvertisedAddress:
        config = self.settings.broker
        towards = None
        for address in config.name_server_addresses:
            towards = towards or _address_towards(parse_host(address))
        return choose_address(
            config.broker_ip1, config.bind_address, _interfaces(), towards_name_server=towards
        )

    async def _open_vip_port(self) -> None:
        """Old clients use a second port; a broker lives without it."""
        port = self.settings.broker.listen_port - VIP_PORT_BELOW
        if port <= 0:
            return
        config = self.settings.broker
        server = RemotingServer(
            self.dispatcher,
            on_disconnect=self._disconnected,
            idle_timeout_s=config.idle_timeout_s,
            connections_max=config.connections_max,
            write_buffer_bytes_max=config.write_buffer_bytes_max,
        )
        try:
            await server.start(config.bind_address, [port])
            self._vip_server = server
        except ConfigurationError as error:
            log.warning("no VIP port, which only old clients use: %s", error)

    def _open_metrics(self) -> None:
        config = self.settings.broker
        host = config.metrics_host or config.bind_address
        opened = serve(self.collector, host, config.metrics_port)
        if opened is not None:
            self.metrics_port, self._close_metrics = opened
            log.info("metrics at http://%s/metrics", join(host, self.metrics_port))

    async def _abandon(self) -> None:
        """The start failed: leave nothing open."""
        await self._server.close()
        if hasattr(self, "store"):
            await self._in_executor(self.store.close)
        self._executor.shutdown(wait=False)

    # --------------------------------------------------------------------------------- close

    async def close(self) -> None:
        """Stop in order; everything is on disk and closed on return."""
        if self._life is None:
            return
        await self._say_goodbye()
        life, self._life = self._life, None
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._settle()
        for server in (self._server, self._vip_server):
            if server is not None:
                await server.close()
        if self._close_metrics is not None:
            await self._in_executor(self._close_metrics)
        await self._pool.close()
        await self._save(self.topics.document, self.groups.document, self.offsets.document)
        try:
            await self._in_executor(self.store.close)
        finally:
            self._executor.shutdown(wait=True)

    async def _say_goodbye(self) -> None:
        async def farewell(server: NameServer) -> None:
            with contextlib.suppress(SluiceError, OSError):
                channel = await self._pool.get(server.address)
                await channel.call(self.registration.farewell(), START_WAIT_S)

        known = [server for server in self.registration.name_servers if server.is_known]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await asyncio.gather(*(farewell(server) for server in known))

    async def _settle(self) -> None:
        """Answers that are held leave before the connections close."""
        self.turns.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_S):
                while not self.turns.is_idle:  # its callback comes from the executor
                    await self._in_executor(lambda: None)
        self._release_announced()

    # ---------------------------------------------------------------------- answers for later

    def _deferred(self, outcome: object, command: Command, peer: Peer) -> None:
        """What handlers return besides answers. HOT for sends."""
        if outcome.__class__ is Durable:
            self.turns.hold(outcome, command, peer)
        elif isinstance(outcome, Parked):
            if not self.polls.park(outcome, peer):
                peer.write(outcome.look(outcome, True) or b"")
        elif isinstance(outcome, Announced):
            answer = b"" if command.is_oneway else finish_answer(outcome.answer, command)
            self._announce(peer, answer)

    def _write(self, peer: Peer, frame: bytes) -> None:
        self.turns.write(peer, frame)

    def _announce(self, peer: Peer, answer: bytes) -> None:
        self._announced.append((peer, answer))
        self._changed.set()

    def _table_changed(self, name: str) -> None:
        self._tables_changed = True
        self._changed.set()

    def _release_announced(self) -> None:
        announced, self._announced = self._announced, []
        for peer, answer in announced:
            peer.write(answer)

    def _run_sync(self, done: Callable[[int | BaseException], None]) -> None:
        """Starts an fsync in the executor; `done` is called in this thread."""

        def finished(future: asyncio.Future[int]) -> None:
            if not future.cancelled():
                error = future.exception()
                done(error if error is not None else future.result())

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._executor, self.store.sync).add_done_callback(finished)

    def _disconnected(self, peer: Peer) -> None:
        self.polls.disconnect(peer)
        self.consumers.disconnect(peer)
        self.producers.disconnect(peer)

    # ---------------------------------------------------------------------------------- chores

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._announce_changes())
            group.create_task(self._each(self._offsets_period_s, self._save_offsets))
            group.create_task(self._each(lambda: 1.0, self._second))
            group.create_task(self._each(self._flush_period_s, self._flush))
            group.create_task(self._each(lambda: EXPIRY_SWEEP_S, self._expire_clients))

    async def _each(
        self, period_s: Callable[[], float], chore: Callable[[], Awaitable[None]]
    ) -> None:
        """Does a chore again and again; a failure is logged, once for each text."""
        said = ""
        while True:
            await asyncio.sleep(period_s())
            try:
                await chore()
                said = ""
            except Exception as error:
                if str(error) != said:
                    said = str(error)
                    log.error("%s", error, exc_info=not isinstance(error, SluiceError))

    def _offsets_period_s(self) -> float:
        return self.settings.broker.consumer_offset_flush_interval_ms / 1000

    def _flush_period_s(self) -> float:
        return self.settings.store.flush_interval_ms / 1000

    async def _save_offsets(self) -> None:
        await self._save(self.offsets.document)

    async def _second(self) -> None:
        counters = self._runtime.counters()
        self.rates.sample(self._clock.monotonic_s(), counters)
        self.days.sample(self._clock.now_ms(), counters)

    async def _flush(self) -> None:
        if self.store.tick():
            await self._in_executor(self.store.sync)

    async def _expire_clients(self) -> None:
        age_ms = self.settings.broker.client_expiry_ms
        for peer in {*self.consumers.expire(age_ms), *self.producers.expire(age_ms)}:
            peer.close()

    def _sweep(self) -> None:
        """Long polls and fsyncs whose time is over."""
        now = self._clock.monotonic_s()
        self.polls.expire(now)
        self.turns.expire(now)
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    async def _save(self, *documents: Document) -> None:
        """Writes what changed. A failure is logged and tried again the next time."""
        for document in documents:
            text = document.take()
            if text is None:
                continue
            try:
                await self._in_executor(lambda d=document, t=text: d.write(t))  # type: ignore[misc]
            except OSError as error:
                log.error(
                    "%s cannot be written (%s): its changes live in memory only. Free space or "
                    "correct the rights.", document.path, error,
                )  # fmt: skip

    # ---------------------------------------------------------------------------- name servers

    async def _announce_changes(self) -> None:
        """Saves changed tables, tells the name servers, lets the answers go."""
        while True:
            wait_s = self.registration.wait_s(self._clock.monotonic_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._one_round()
            except Exception:
                log.exception("telling the name servers failed")
            if not self._first_round.done():
                self._first_round.set_result(None)

    async def _one_round(self) -> None:
        announced, self._announced = self._announced, []
        changed, self._tables_changed = self._tables_changed, False
        now = self._clock.monotonic_s()
        servers = self.registration.due(now)
        if changed:
            await self._save(self.topics.document, self.groups.document)
            servers = [s for s in self.registration.name_servers if not s.failures or s in servers]
        await asyncio.gather(*(self._register(server) for server in servers))
        for peer, answer in announced:
            peer.write(answer)

    async def _register(self, server: NameServer) -> None:
        try:
            channel = await self._pool.get(server.address)
            answer = await channel.call(self.registration.request(), REGISTER_WAIT_S)
            if answer.code != 0:
                raise RequestError(answer.code, answer.remark or "", address=server.address)
            self.registration.answered(server, answer, self._clock.monotonic_s())
        except (SluiceError, OSError) as error:
            self.registration.failed(server, error, self._clock.monotonic_s())

    def _name_server_lost(self, channel: Channel) -> None:
        """It forgets us with the connection: tell it again as soon as it is back."""
        for server in self.registration.name_servers:
            if server.address == channel.address:
                server.next_try_s = 0.0
                self._changed.set()

    async def _in_executor(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


# -------------------------------------------------------------------------- addresses of here


def _address_towards(host: Host) -> str | None:
    """The local address of the way to a host; nothing is sent."""
    family = socket.AF_INET6 if ":" in host.address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.address, host.port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interfaces() -> list[str]:
    """Addresses of this machine, as far as the system tells without asking for more."""
    found = dict.fromkeys(filter(None, [_address_towards(Host("192.0.2.1", 9))]))
    with contextlib.suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found.setdefault(str(entry[4][0]))
    return list(found)


def _listening_addresses(bind_address: str) -> list[str]:
    if not is_wildcard(bind_address):
        return [bind_address]
    return list(dict.fromkeys([*_interfaces(), "127.0.0.1"]))


def _stored_host(address: str, port: int) -> Host:
    """The host that stands in records and message ids: an address, also when brokerIP1 is a name.

    Raises ConfigurationError when the name is not known.
    """
    try:
        encode_host(Host(address, port))
    except ValueError:
        try:
            address = socket.gethostbyname(address)
        except OSError as error:
            raise ConfigurationError(
                f"brokerIP1 = {address} is not an address and its name is not known ({error}).",
                cure="Write an IP address of this machine.",
            ) from error
    return Host(address, port)
