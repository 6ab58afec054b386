"""An embedded broker with the proxy's methods in front of it, called without sockets.

    async with proxied(clock) as proxy:
        answer = await proxy.ask("QueryRoute", m.QueryRouteRequest(...))

A `Speaker` is one connection of one client; several may be open. Its calls are those of `net.grpc`,
but that bytes go nowhere: what is answered is decoded and kept.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from sluicemq.client.core.names import Credentials
from sluicemq.config.proxying import ProxyLimits
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Peer
from sluicemq.net.grpc import CallError, StatusCode
from sluicemq.net.limits import NULL_SCHEDULER
from sluicemq.proxy import messages as m
from sluicemq.proxy.clients import CLIENT_ID
from sluicemq.proxy.cluster import ClusterBackend
from sluicemq.proxy.local import make_local_proxy
from sluicemq.proxy.server import Proxy
from sluicemq.proxy.service import PATH
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.virtual import VirtualClock


class Nothing:
    """A carrier of a connection over which nothing goes."""

    def write(self, data: bytes, /) -> None: ...

    def close(self) -> None: ...


class Connection:
    """The part of a connection that a call has."""

    queued_bytes = 0

    def __init__(self, peer: Peer) -> None:
        self.peer = peer


class FakeCall:
    """A call of `net.grpc`, as methods use it."""

    def __init__(
        self, peer: Peer, headers: dict[str, str], response: Any, timeout_s: float | None
    ) -> None:
        self.connection = Connection(peer)
        self.headers = headers
        self.remaining_s = timeout_s
        self.age_s = 0.0
        self.is_half_closed = False
        self.on_message: Callable[[bytes, Any], bytes | None]
        self.on_half_close: Callable[[], None] | None = None
        self.on_cancelled: Callable[[], None] | None = None
        self.answers: list[Any] = []
        self.ended: asyncio.Future[tuple[StatusCode, str]] = (
            asyncio.get_running_loop().create_future()
        )
        self.arrived = asyncio.Event()
        self._response = response

    @property
    def is_closed(self) -> bool:
        return self.ended.done()

    def reply(self, message: bytes) -> None:
        self.send(message)
        self.end()

    def send(self, message: bytes) -> None:
        if not self.is_closed:
            self.answers.append(self._response.FromString(message))
            self.arrived.set()

    def reply_all(self, messages: list[bytes]) -> None:
        for message in messages:
            self.send(message)
        self.end()

    def end(self, code: StatusCode = StatusCode.OK, text: str = "") -> None:
        if not self.is_closed:
            self.ended.set_result((code, text))
            self.arrived.set()

    def half_close(self) -> None:
        """The client has said all."""
        self.is_half_closed = True
        if self.on_half_close is not None and not self.is_closed:
            self.on_half_close()

    def lose(self) -> None:
        """The client gives up."""
        if not self.is_closed:
            self.end(StatusCode.CANCELLED)
            if self.on_cancelled is not None:
                self.on_cancelled()


class Speaker:
    """One connection of one client."""

    def __init__(
        self, proxy: "Proxied", client_id: str, headers: dict[str, str], port: int
    ) -> None:
        self._proxy = proxy
        self.peer = Peer(Nothing(), Host("127.0.0.1", port), Host("127.0.0.1", 8081))
        self.headers = {CLIENT_ID: client_id, "x-mq-language": "JAVA", **headers}
        self.calls: list[FakeCall] = []

    def call(self, name: str, request: Any, timeout_s: float | None = 10.0) -> FakeCall:
        """Begins a call; its answers come into `answers`."""
        path = PATH + name
        response = TelemetryCommand if name == "Telemetry" else getattr(m, f"{name}Response")
        call = FakeCall(self.peer, {":path": path, **self.headers}, response, timeout_s)
        call.on_message = self._proxy.methods[path]
        self.calls.append(call)
        self.say(call, request)
        return call

    def say(self, call: FakeCall, request: Any) -> None:
        """One more message of a call that streams."""
        try:
            answer = call.on_message(request.SerializeToString(), call)
        except CallError as error:
            call.end(error.code, str(error))
        else:
            if answer is not None:
                call.reply(answer)

    async def ask(self, name: str, request: Any, timeout_s: float | None = 10.0) -> Any:
        """The answer to a call, a list for those that stream. Raises CallError."""
        call = self.call(name, request, timeout_s)
        code, text = await call.ended
        if code != StatusCode.OK:
            raise CallError(code, text)
        return call.answers if name in ("ReceiveMessage", "PullMessage") else call.answers[0]

    def close(self) -> None:
        """The connection breaks."""
        for call in self.calls:
            call.lose()
        self._proxy.dispatcher.clients.connection_lost(self.peer)


TelemetryCommand = m.TelemetryCommand


class Proxied:
    """A cluster (`mq`, its client) and the proxy's methods."""

    def __init__(self, mq: EmbeddedSluice, proxy: Proxy) -> None:
        self.mq = mq
        self.proxy = proxy
        self.backend = proxy.backend
        self.dispatcher, self.methods = proxy.dispatcher, proxy.methods
        self._ports = 50_000

    def speaker(self, client_id: str = "c", **headers: str) -> Speaker:
        """Another connection."""
        self._ports += 1
        return Speaker(self, client_id, headers, self._ports)


@contextlib.asynccontextmanager
async def proxied(
    clock: VirtualClock | None = None,
    limits: ProxyLimits = ProxyLimits(),  # noqa: B008 - frozen
    *,
    store: Path | None = None,
    **settings: str,
) -> AsyncIterator[Proxied]:
    """`settings`: keys of a broker.conf."""
    async with embedded(clock=clock, store=store, settings=settings) as mq:
        yield Proxied(mq, make_local_proxy(mq.servers.broker, limits=limits))


@contextlib.asynccontextmanager
async def proxied_cluster(
    clock: VirtualClock | None = None,
    *,
    proxies: int = 1,
    credentials: Credentials | None = None,
    store: Path | None = None,
    **settings: str,
) -> AsyncIterator[list[Proxied]]:
    """Proxies side by side before the brokers broker-a and broker-b."""
    async with embedded(clock=clock, store=store, settings=settings, credentials=credentials) as mq:
        servers = mq.servers
        await servers.start_broker("broker-b")
        backends = [
            ClusterBackend(
                servers.name_server_address, credentials, servers.clock, servers.network.dial
            )
            for _ in range(proxies)
        ]
        try:
            yield [Proxied(mq, Proxy(backend, None, NULL_SCHEDULER)) for backend in backends]
        finally:
            for backend in backends:
                await backend.close()
