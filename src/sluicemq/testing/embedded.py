"""A real cluster inside a test: name server, broker and client in one process and one loop.

    async with embedded(clock=VirtualClock()) as mq:           # mq is a Sluice
        await mq.send("orders", b"1", delay_level=3)
        await mq.clock.advance(seconds=10)

Nothing here imitates anything: `NameServer`, `Broker`, `Store` and `Sluice` are the production
classes. What differs is below them: frames travel by `net.network` (or over TCP on loopback ports,
`tcp=True`), files lie in memory (or in a directory, `store=PATH`), what would block runs in place,
heartbeats come from the test's own loop, and time may be a `VirtualClock`.

Start and close let virtual time pass when they have to wait; as a rule they do not.
"""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, Unpack

from sluicemq.broker.server import SWEEP_S, Broker
from sluicemq.client.aio.sluice import ClientOptions, Sluice
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.config import NameServerConfig, load_broker_config
from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.hints import with_call_hints, with_hints
from sluicemq.nameserver.server import NameServer
from sluicemq.net.network import SOCKET_NETWORK, MemoryNetwork, Network
from sluicemq.testing.files import CrashableFiles
from sluicemq.testing.virtual import VirtualClock

if TYPE_CHECKING:
    from sluicemq.proxy.server import Proxy

LAZY_S: Final = 120.0
SWEEP_LAZY_S: Final = 10.0
SWEEP_DUE_S: Final = 0.5
POLL_LAZY_S: Final = 300.0
"""On virtual time a pull waits so long at the broker: it is answered as soon as there is something,
and five hours of asking again every 15 s on every queue are the most of what such a test does."""
HOST: Final = "127.0.0.1"
RNG_SEED: Final = 0
MEMORY_ROOT: Final = "/sluicemq"
SMALL: Final = {
    "mappedFileSizeCommitLog": str(8 * 1024 * 1024),
    "mappedFileSizeConsumeQueue": "200000",
    "mappedFileSizeTimerLog": str(1 << 20),
    "brokerIP1": HOST,
    "metricsExporterType": "DISABLE",
}
"""Files of a test's size; the largest message (4 MiB) fits."""
LAZY: Final = {"registerNameServerPeriod": "60000"}
SCAN_LAZY_MS: Final = 30_000
"""How rarely, on virtual time, a broker tells the name server that it lives, and that one looks."""
P = ParamSpec("P")
T = TypeVar("T")


class Calm:
    """How long the chores of a broker rest on virtual time: the longer, the longer nothing was
    stored, up to LAZY_S; sweeps, on which deadlines hang, up to SWEEP_LAZY_S, and SWEEP_DUE_S while
    a transaction is undecided or a timed message is due soon.

    Five hours in which a message is retried sixteen times would else be half a million rounds of
    looking whether there is something to do.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._size = -1
        self._since_s = 0.0
        self._broker: Broker | None = None

    def watch(self, broker: Broker) -> None:
        """The broker whose chores these are, once it has started."""
        self._broker = broker

    def stretch(self, period_s: float) -> float:
        """The pause before a chore of this period comes again."""
        if self._broker is None:
            return period_s
        now_s, size = self._clock.monotonic_s(), self._broker.store.written_offset
        if size != self._size:
            self._size, self._since_s = size, now_s
        longest_s = LAZY_S
        if period_s == SWEEP_S:
            core, now_ms = self._broker.core, self._clock.now_ms()
            wheel = core.delayed.timers.files.wheel
            soon = wheel.iter_occupied_ms(now_ms, now_ms + int(2000 * SWEEP_LAZY_S))
            is_due = core.transactions.table or any(True for _ in soon)
            longest_s = SWEEP_DUE_S if is_due else SWEEP_LAZY_S
        return max(period_s, min((now_s - self._since_s) / 4, longest_s))


class InlineExecutor(Executor):
    """Does the work in place, so that nothing depends on how threads are scheduled."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        return future


@with_hints
class EmbeddedSluice(Sluice):
    """A client of an embedded cluster; `servers` is the cluster, `clock` its time."""

    def __init__(self, servers: "Servers", **options: Unpack[ClientOptions]) -> None:
        super().__init__(
            servers.name_server_address,
            clock=servers.clock,
            network=servers.network,
            heartbeat_thread=False,
            rng=servers.rng,
            **options,
        )
        self.servers = servers
        if isinstance(servers.clock, VirtualClock):
            self.cluster.poll_s = POLL_LAZY_S

    @property
    def clock(self) -> VirtualClock:
        """The virtual clock. Raises ConfigurationError when the cluster runs in real time."""
        clock = self.servers.clock
        if not isinstance(clock, VirtualClock):
            raise ConfigurationError(
                "this cluster runs in real time.", fix="Use embedded(clock=VirtualClock())."
            )
        return clock


@with_hints
class Servers:
    """A name server and brokers by name, to be stopped and started in a test."""

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM_CLOCK,
        network: Network,
        directory: str | None = None,
        settings: Mapping[str, str] | None = None,
        proxy: bool = False,
    ) -> None:
        """`settings`: keys of a broker.conf for every broker. `directory`: None is memory. `proxy`:
        each broker has one beside it."""
        self.clock = clock
        self.network = network
        self.rng: Random = Random(RNG_SEED)
        """Of the clients: tests see the same queues in each run."""
        self.settings: dict[str, str] = dict(settings or {})
        self.brokers: dict[str, Broker] = {}
        self.files: dict[str, Files] = {}
        """What each broker's files lie in; survives the broker."""
        self.proxies: dict[str, Proxy] = {}
        """By the broker that they are of."""
        self._has_proxies = proxy
        self._directory = directory
        self._ports: dict[str, int] = {}
        self._proxy_ports: dict[str, int] = {}
        self._name_port = 0
        self._clients: list[EmbeddedSluice] = []
        self.name_server: NameServer | None = None

    @property
    def name_server_address(self) -> str:
        """host:port of the name server."""
        return f"{HOST}:{self._name_port}"

    @property
    def proxy_address(self) -> str:
        """host:port for clients of gRPC: the proxy of the broker that was started first."""
        return f"{HOST}:{next(iter(self.proxies.values())).port}"

    @property
    def _is_virtual(self) -> bool:
        return isinstance(self.clock, VirtualClock)

    @property
    def broker(self) -> Broker:
        """The broker that was started first."""
        return next(iter(self.brokers.values()))

    async def start(self) -> None:
        """Name server and one broker, `broker-a`."""
        await self.start_name_server()
        await self.start_broker()

    async def start_name_server(self) -> None:
        """At the address it had before. Raises ConfigurationError when it runs already."""
        if self.name_server is not None:
            raise ConfigurationError("the name server runs already.", fix="Stop it first.")
        root = f"{self._directory or MEMORY_ROOT}/names"
        config = NameServerConfig(
            bind_address=HOST,
            listen_port=self._name_port,
            kv_config_path=f"{root}/kvConfig.json",
            config_path=f"{root}/namesrv.properties",
        )
        if self._is_virtual:
            config = dataclasses.replace(config, scan_interval_ms=SCAN_LAZY_MS)
        server = NameServer(
            config, clock=self.clock, files=self._files_of("names"), network=self.network
        )
        await server.start()
        self.name_server, self._name_port = server, server.port

    async def stop_name_server(self) -> None:
        """Brokers and clients lose their connections to it."""
        server, self.name_server = self.name_server, None
        if server is not None:
            await server.close()

    async def start_broker(self, name: str = "broker-a", **settings: str) -> Broker:
        """A broker with the files and the port it had before. `settings`: keys of a broker.conf.

        Raises ConfigurationError for unknown keys and when it runs already.
        """
        if name in self.brokers:
            raise ConfigurationError(f"the broker {name!r} runs already.", fix="Stop it first.")
        keys = {
            **SMALL,
            **(LAZY if self._is_virtual else {}),
            "brokerName": name,
            "bindAddress": HOST,
            "listenPort": str(self._ports.get(name, 0)),
            "namesrvAddr": self.name_server_address,
            "storePathRootDir": f"{self._directory or MEMORY_ROOT}/{name}",
            **self.settings,
            **settings,
        }
        config, store, warnings = load_broker_config("", overrides=keys, environment={})
        if warnings:
            raise ConfigurationError(warnings[0], fix="Give keys of a broker.conf.")
        if config.listen_port == 0:  # else its VIP port is two below, and nobody here needs it
            config = dataclasses.replace(config, bind_address=HOST)
        calm = Calm(self.clock) if isinstance(self.clock, VirtualClock) else None
        broker = Broker(
            config,
            store,
            clock=self.clock,
            files=self._files_of(name),
            network=self.network,
            executor=InlineExecutor() if self._directory is None else None,
            stretch_pause=calm.stretch if calm else float,
        )
        await broker.start()
        if calm is not None:
            calm.watch(broker)
        self.brokers[name] = broker
        self._ports[name] = broker.port
        if self._has_proxies:
            from sluicemq.proxy.local import make_local_proxy  # noqa: PLC0415 - protobuf may be missing

            proxy = self.proxies[name] = make_local_proxy(broker)
            await proxy.start(HOST, self._proxy_ports.get(name, 0))
            self._proxy_ports[name] = proxy.port
        return broker

    async def stop_broker(self, name: str = "broker-a") -> None:
        """Stops it in order, its proxy before it; its files stay."""
        if name in self.proxies:
            await self.proxies.pop(name).close()
        await self.brokers.pop(name).close()

    async def restart_broker(self, name: str = "broker-a", **settings: str) -> Broker:
        """Stops and starts it, with other settings if they are given."""
        await self.stop_broker(name)
        return await self.start_broker(name, **settings)

    def client(self, **options: Unpack[ClientOptions]) -> EmbeddedSluice:
        """Another client (the arguments of `Sluice`), closed with the cluster at the latest."""
        client = EmbeddedSluice(self, **options)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        """Clients, then brokers, then the name server; all of them, whatever fails."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.stop_name_server)
            for name in self.brokers:
                stack.push_async_callback(self.stop_broker, name)
            for client in self._clients:
                stack.push_async_callback(client.close)

    def _files_of(self, name: str) -> Files:
        if self._directory is not None:
            return SYSTEM_FILES
        if name not in self.files:
            files = CrashableFiles()
            files.clock = self.clock
            self.files[name] = files
        return self.files[name]


@with_call_hints
@contextlib.asynccontextmanager
async def embedded(
    *,
    clock: VirtualClock | None = None,
    tcp: bool = False,
    proxy: bool = False,
    store: str | Path | None = None,
    settings: Mapping[str, str] | None = None,
    **client: Unpack[ClientOptions],
) -> AsyncIterator[EmbeddedSluice]:
    """A name server, a broker and a client of them, for the time of the block.

    `clock`: None is real time. `tcp`: free ports on loopback, for other processes and threads
    (`mq.servers.name_server_address`). `proxy`: with `tcp`, a port for clients of gRPC, with TLS or
    without (`mq.servers.proxy_address`). `store`: a directory; None keeps messages in memory.
    `settings`: keys of a broker.conf. `client`: arguments of `Sluice`
    (credentials, trace, producer_group, client_id …).
    Raises ConfigurationError for unknown keys, for a clock in a loop that is not asyncio's, and for
    a proxy that nobody can reach or that lacks its package.
    """
    if clock is not None and not isinstance(clock, VirtualClock):
        raise ConfigurationError(
            f"the clock is {clock!r:.60}.", fix="Give a VirtualClock(), or None for real time."
        )
    if proxy and not tcp:
        raise ConfigurationError(
            "clients of gRPC reach a proxy by TCP alone.",
            fix="Use embedded(tcp=True, proxy=True).",
        )
    network: Network = SOCKET_NETWORK if tcp else MemoryNetwork()
    servers = Servers(
        clock=clock or SYSTEM_CLOCK,
        network=network,
        directory=None if store is None else str(store),
        settings=settings,
        proxy=proxy,
    )
    if clock is not None:
        clock.drive()
    try:
        with _passing(clock):
            await servers.start()
        mq = servers.client(**client)
        try:
            yield mq
        finally:
            with _passing(clock):
                await servers.close()
    finally:
        if clock is not None:
            clock.release()


@contextlib.contextmanager
def _passing(clock: VirtualClock | None) -> Any:
    """Time passes when everybody waits, for the start and the end."""
    if clock is None:
        yield
        return
    stands_still, clock.stands_still = clock.stands_still, False
    try:
        yield
    finally:
        clock.stands_still = stands_still
