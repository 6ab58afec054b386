"""A real cluster inside a test: name server, broker and client in one process and one event loop.

    async with embedded(clock=VirtualClock()) as mq:           # mq is a Sluice
        await mq.send("orders", b"1", delay_level=3)
        await mq.clock.advance(seconds=10)

`NameServer`, `Broker`, `Store` and `Sluice` are the production classes; none is imitated. Only the
layers below them differ. Frames travel through memory (`net.network`), or over TCP on loopback with
`tcp=True`. Files are in memory, or in a directory with `store=PATH`. Work that would run on threads
runs at once in the event loop, heartbeats are sent from the test's own loop, and the time may be a
`VirtualClock`.

Starting and closing a cluster let virtual time pass if they must wait, which is rare.
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
from sluicemq.config import BrokerConfig, NameServerConfig, StoreConfig, load_broker_config
from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.hints import with_call_hints, with_hints
from sluicemq.nameserver.server import NameServer
from sluicemq.net.network import SOCKET_NETWORK, MemoryNetwork, Network
from sluicemq.testing.files import CrashableFiles
from sluicemq.testing.virtual import VirtualClock

if TYPE_CHECKING:
    from sluicemq.proxy.server import Proxy

PAUSE_MAX_S: Final = 120.0
"""The longest pause of a background job of an idle broker, on virtual time."""
SWEEP_PAUSE_MAX_S: Final = 10.0
"""The same for the sweep, which delivers timed messages and checks transactions."""
SWEEP_PAUSE_DUE_S: Final = 0.5
"""The longest pause of the sweep while it may soon have something to do."""
POLL_S: Final = 300.0
"""How long a pull waits at the broker for messages, on virtual time.

The broker responds as soon as there is a message. Most of the work of a test of five hours would
otherwise be to repeat every pull of every queue each 15 s.
"""
SCAN_INTERVAL_MS: Final = 30_000
"""How often a name server looks for brokers that are silent, on virtual time."""
HOST: Final = "127.0.0.1"
RNG_SEED: Final = 0
MEMORY_ROOT: Final = "/sluicemq"
"""The root of the files in memory."""
SMALL_SETTINGS: Final = {
    "mappedFileSizeCommitLog": str(8 * 1024 * 1024),
    "mappedFileSizeConsumeQueue": "200000",
    "mappedFileSizeTimerLog": str(1 << 20),
    "brokerIP1": HOST,
    "metricsExporterType": "DISABLE",
}
"""The settings of every broker: small files, in which the largest message (4 MiB) fits."""
VIRTUAL_TIME_SETTINGS: Final = {"registerNameServerPeriod": "60000"}
"""Further settings on virtual time: brokers register with the name server less often."""
P = ParamSpec("P")
T = TypeVar("T")


class IdlePauses:
    """The pauses of a broker's background jobs on virtual time.

    The longer the broker has stored nothing, the longer they are: a quarter of that time, up to
    `PAUSE_MAX_S`. For the sweep, on which deadlines depend, the limit is `SWEEP_PAUSE_MAX_S`, or
    `SWEEP_PAUSE_DUE_S` while a transaction is not decided or a timed message is due soon.

    Five virtual hours, in which a message is retried sixteen times, would otherwise take half a
    million rounds in which the jobs find nothing to do.
    """

    def __init__(self, clock: Clock) -> None:
        """Create pauses without a broker, by this clock. `attach` adds the broker."""
        self._clock = clock
        self._log_end = -1
        self._idle_since_s = 0.0
        self._broker: Broker | None = None

    def attach(self, broker: Broker) -> None:
        """Set the broker whose jobs these are. Called when it has started."""
        self._broker = broker

    def stretch(self, period_s: float) -> float:
        """Return how long a background job pauses next. It is longer if the broker is idle.

        `period_s` is the period of the job, and the shortest pause. The pause grows with the time
        since the broker has stored something.
        """
        if self._broker is None:
            return period_s

        # Find out since when the broker has stored nothing: since when its log has this length.
        now_s = self._clock.monotonic_s()
        log_end = self._broker.store.written_offset
        if log_end != self._log_end:
            self._log_end = log_end
            self._idle_since_s = now_s
        idle_s = now_s - self._idle_since_s

        pause_max_s = PAUSE_MAX_S
        if period_s == SWEEP_S:  # a job is known here by its period only
            pause_max_s = SWEEP_PAUSE_DUE_S if self._is_sweep_due_soon() else SWEEP_PAUSE_MAX_S
        return max(period_s, min(idle_s / 4, pause_max_s))

    def _is_sweep_due_soon(self) -> bool:
        """Return whether a transaction is open, or a timed message is due soon.

        Soon means within two of the longest pauses of the sweep. A broker must be attached.
        """
        assert self._broker is not None
        core = self._broker.core
        if core.transactions.table:
            return True
        # The timer wheel finds timed messages by the second in which they are due.
        timer_wheel = core.delayed.timers.files.wheel
        now_ms = self._clock.now_ms()
        horizon_ms = now_ms + int(2 * SWEEP_PAUSE_MAX_S * 1000)
        return any(True for _ in timer_wheel.iter_occupied_ms(now_ms, horizon_ms))


class InlineExecutor(Executor):
    """An executor that runs each function at once, on the caller's thread.

    So no test depends on the scheduling of threads.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `fn` at once, and return a future that is done.

        KeyboardInterrupt, SystemExit and similar errors are also raised.
        """
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
    """A client of an embedded cluster.

    `servers` is the cluster: its name server and brokers, which a test can stop and start.
    """

    def __init__(self, servers: "Servers", **options: Unpack[ClientOptions]) -> None:
        """Make a client of the cluster `servers`, with its clock, network and random numbers.

        `options` are the arguments of `Sluice`. The name server must have been started before,
        because its port is assigned then. If the clock of `servers` is a VirtualClock, the client's
        long polls last `POLL_S`, much longer than in real time. Use `Servers.client` instead of
        this constructor if the client is to be closed with the cluster.
        """
        super().__init__(
            servers.name_server_address,
            clock=servers.clock,
            network=servers.network,
            heartbeat_thread=False,  # a thread would not follow a virtual clock
            rng=servers.rng,
            **options,
        )
        self.servers = servers
        if isinstance(servers.clock, VirtualClock):
            # Virtual hours pass in a moment: with short polls, most work would be to repeat them.
            self.cluster.long_poll_s = POLL_S

    @property
    def clock(self) -> VirtualClock:
        """The virtual clock. Raises ConfigurationError if the cluster runs in real time."""
        clock = self.servers.clock
        if not isinstance(clock, VirtualClock):
            raise ConfigurationError(
                "this cluster runs in real time.", fix="Use embedded(clock=VirtualClock())."
            )
        return clock


@with_hints
class Servers:
    """The servers of an embedded cluster: a name server, and brokers by name.

    A test can stop and start each of them. A server keeps its port and its files meanwhile.

    - `brokers`: the running brokers, by name; `files`: the files of each broker, also while it is
      stopped; `proxies`: the proxies, by the name of their broker.
    - `settings`: the keys of a broker.conf for all brokers that are started from now on.
    - `rng`: the random numbers of all clients. The seed is constant, so tests see the same queues
      in each run.
    - `name_server`: None while it is stopped.
    """

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM_CLOCK,
        network: Network,
        directory: str | None = None,
        settings: Mapping[str, str] | None = None,
        proxy: bool = False,
    ) -> None:
        """Prepare the cluster; `start` starts it.

        `clock` is the time of all servers and clients; on a VirtualClock, servers pause longer
        between their background jobs. `network` carries the frames between them. Files are in
        `directory`, or in memory if that is None. `settings` are keys of a broker.conf for every
        broker. With `proxy`, each broker gets a proxy.
        """
        self.clock = clock
        self.network = network
        self.rng: Random = Random(RNG_SEED)
        self.settings: dict[str, str] = dict(settings or {})
        self.brokers: dict[str, Broker] = {}
        self.files: dict[str, Files] = {}
        self.proxies: dict[str, Proxy] = {}
        self._has_proxies = proxy
        self._directory = directory
        self._ports: dict[str, int] = {}
        self._proxy_ports: dict[str, int] = {}
        self._name_port = 0
        self._clients: list[EmbeddedSluice] = []
        self.name_server: NameServer | None = None

    @property
    def name_server_address(self) -> str:
        """The address of the name server, as "host:port"."""
        return f"{HOST}:{self._name_port}"

    @property
    def proxy_address(self) -> str:
        """The address of the first broker's proxy, for gRPC clients, as "host:port"."""
        return f"{HOST}:{next(iter(self.proxies.values())).port}"

    @property
    def _is_virtual(self) -> bool:
        return isinstance(self.clock, VirtualClock)

    @property
    def broker(self) -> Broker:
        """The running broker that was started first."""
        return next(iter(self.brokers.values()))

    async def start(self) -> None:
        """Start the name server and one broker, `broker-a`."""
        await self.start_name_server()
        await self.start_broker()

    async def start_name_server(self) -> None:
        """Start the name server. A restarted one has the same port and files.

        Raises ConfigurationError if it is running.
        """
        if self.name_server is not None:
            raise ConfigurationError("the name server is running already.", fix="Stop it first.")
        root = f"{self._directory or MEMORY_ROOT}/names"
        config = NameServerConfig(
            bind_address=HOST,
            listen_port=self._name_port,
            kv_config_path=f"{root}/kvConfig.json",
            config_path=f"{root}/namesrv.properties",
        )
        if self._is_virtual:
            config = dataclasses.replace(config, scan_interval_ms=SCAN_INTERVAL_MS)
        server = NameServer(
            config, clock=self.clock, files=self._get_files("names"), network=self.network
        )
        await server.start()
        self.name_server = server
        self._name_port = server.port

    async def stop_name_server(self) -> None:
        """Stop the name server. Brokers and clients lose their connections to it."""
        server = self.name_server
        # It counts as stopped from here on, also if `close` raises or is cancelled.
        self.name_server = None
        if server is not None:
            await server.close()

    async def start_broker(self, name: str = "broker-a", **settings: str) -> Broker:
        """Start a broker, and return it. A restarted one has the same port and files.

        `settings` are keys of a broker.conf, which override those of the cluster. Raises
        ConfigurationError for an unknown key or an invalid value, and if the broker is running.
        """
        if name in self.brokers:
            raise ConfigurationError(
                f"the broker {name!r} is running already.", fix="Stop it first."
            )
        config, store_config = self._make_broker_config(name, settings)
        # In virtual time, background jobs of an idle broker run less often.
        pauses = None
        if isinstance(self.clock, VirtualClock):
            pauses = IdlePauses(self.clock)
        is_in_memory = self._directory is None
        broker = Broker(
            config,
            store_config,
            clock=self.clock,
            files=self._get_files(name),
            network=self.network,
            executor=InlineExecutor() if is_in_memory else None,
            stretch_pause=pauses.stretch if pauses else float,
        )
        await broker.start()
        if pauses is not None:
            pauses.attach(broker)
        self.brokers[name] = broker
        self._ports[name] = broker.port  # the port for the next start
        if self._has_proxies:
            await self._start_proxy(name, broker)
        return broker

    def _make_broker_config(
        self, name: str, settings: Mapping[str, str]
    ) -> tuple[BrokerConfig, StoreConfig]:
        """Make the configuration of the broker `name`, and of its store.

        `settings` override the settings of the cluster, which override the defaults. Raises
        ConfigurationError for an unknown key or an invalid value.
        """
        keys = {
            **SMALL_SETTINGS,
            **(VIRTUAL_TIME_SETTINGS if self._is_virtual else {}),
            "brokerName": name,
            "bindAddress": HOST,
            "listenPort": str(self._ports.get(name, 0)),
            "namesrvAddr": self.name_server_address,
            "storePathRootDir": f"{self._directory or MEMORY_ROOT}/{name}",
            **self.settings,
            **settings,
        }
        config, store_config, warnings = load_broker_config("", overrides=keys, environment={})
        if warnings:
            raise ConfigurationError(warnings[0], fix="Pass keys of a broker.conf.")
        # On a free port, the broker listens on loopback, whatever `settings` say.
        if config.listen_port == 0:
            config = dataclasses.replace(config, bind_address=HOST)
        return config, store_config

    async def _start_proxy(self, name: str, broker: Broker) -> None:
        """Start a proxy for the broker `name`. A restarted one has the same port."""
        from sluicemq.proxy.local import make_local_proxy  # noqa: PLC0415 - protobuf may be missing

        proxy = make_local_proxy(broker)
        # It is registered before it starts, so that `stop_broker` also closes it if that fails.
        self.proxies[name] = proxy
        await proxy.start(HOST, self._proxy_ports.get(name, 0))
        self._proxy_ports[name] = proxy.port

    async def stop_broker(self, name: str = "broker-a") -> None:
        """Stop the proxy of a broker, then the broker, in an orderly way. Its files are kept."""
        if name in self.proxies:
            await self.proxies.pop(name).close()
        await self.brokers.pop(name).close()

    async def restart_broker(self, name: str = "broker-a", **settings: str) -> Broker:
        """Stop a broker and start it again; return the new broker.

        `settings` are keys of broker.conf. They override the settings of the cluster.
        """
        await self.stop_broker(name)
        return await self.start_broker(name, **settings)

    def client(self, **options: Unpack[ClientOptions]) -> EmbeddedSluice:
        """Return another client of the cluster. `options` are the arguments of `Sluice`.

        The client is closed with the cluster, if not before.
        """
        client = EmbeddedSluice(self, **options)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        """Close the clients, then the brokers, then the name server.

        If closing one raises, the others are closed all the same.
        """
        # The stack calls in reverse order, and goes on if one of the calls raises.
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.stop_name_server)
            for name in self.brokers:
                stack.push_async_callback(self.stop_broker, name)
            for client in self._clients:
                stack.push_async_callback(client.close)

    def _get_files(self, name: str) -> Files:
        """Return the files of the server `name`: the system's files, or a disk in memory.

        Each call returns the same disk, so its files survive a restart of the server.
        """
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
    """Run a name server and a broker inside the block, and yield a client of them.

    At the end of the block, the client, the broker and the name server are closed, together with
    all that the test has started by `mq.servers`.

    - `clock`: a `VirtualClock`; None means real time.
    - `tcp`: listen on free loopback ports, for other threads and processes. The address is
      `mq.servers.name_server_address`.
    - `proxy`: run a proxy for gRPC clients as well, with and without TLS, at
      `mq.servers.proxy_address`. It needs `tcp` and the extra `grpc`.
    - `store`: the directory of the files; None means in memory.
    - `settings`: keys of a broker.conf, for every broker.
    - Other keywords (credentials, trace, producer_group, client_id …) are arguments of `Sluice`.

    Raises ConfigurationError for unknown keys, for a clock in an event loop that is not asyncio's,
    and for a proxy without `tcp` or without its package.
    """
    if clock is not None and not isinstance(clock, VirtualClock):
        raise ConfigurationError(
            f"clock must be a VirtualClock, got {clock!r:.60}.",
            fix="Pass VirtualClock(), or None for real time.",
        )
    if proxy and not tcp:
        raise ConfigurationError(
            "gRPC clients can reach a proxy only over TCP.",
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
        clock.drive()  # from here on, the event loop sleeps by this clock
    try:
        with _let_time_pass(clock):
            await servers.start()
        mq = servers.client(**client)
        try:
            yield mq
        finally:
            with _let_time_pass(clock):
                await servers.close()
    finally:
        if clock is not None:
            clock.release()


@contextlib.contextmanager
def _let_time_pass(clock: VirtualClock | None) -> Any:
    """Let virtual time pass inside the block, even if the clock has `stands_still`."""
    if clock is None:
        yield
        return
    previous_stands_still = clock.stands_still
    clock.stands_still = False
    try:
        yield
    finally:
        clock.stands_still = previous_stands_still
