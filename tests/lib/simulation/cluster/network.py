"""A network in memory that fails as networks do.

    latency    every chunk takes its time; at bad times seconds (`slow`), always in order
    hold       a paused process, or two that cannot reach each other, perhaps in one direction
               alone: chunks wait, dials time out
    cut        the connection breaks: what is under way is lost, of the next chunk the first half
               may still arrive, and the two ends learn it at different times
    silence    nothing arrives any more and nobody is told, for a long time
    death      a process is gone: its peers are told (killed), or not for long (its power failed)

`Channel`, `Peer` and `Dispatcher` are the production classes. What a process is told runs in its
own context (`processes`). Nothing is duplicated or reordered within a connection: that is TCP's
promise. Requests come twice all the same, when a client repeats them over a new connection.
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence

from simulation.cluster.processes import Process
from sluicemq.clock import Clock
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    RequestTimeoutError,
)
from sluicemq.model.ids import Host, parse_host
from sluicemq.net.accept import ListeningSockets
from sluicemq.net.channel import DIAL_TIMEOUT_S, Channel, OnClose, OnRequest
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import SERVER_LIMITS, ServerLimits
from sluicemq.net.network import OnPeer
from sluicemq.net.stream import ByteStream, StreamProtocol, StreamProtocolFactory, deliver
from sluicemq.wire.frames import FrameBuffer


def refuse(stream: ByteStream) -> StreamProtocol:
    """No stream is served here."""
    raise ConfigurationError("Requests are served here, no streams.", fix="Dial another port.")


USUAL_S = 0.002
SILENCE_S = (5.0, 90.0)


class Way:
    """One direction of a connection. `deliver(None)` is its end."""

    def __init__(self, link: "Link", receiver: Process, deliver: Callable[[bytes | None], None]):
        self._link = link
        self._receiver = receiver
        one, other = link.ends
        self._ends = (other, one) if receiver is one else (one, other)
        self._deliver = deliver
        self._under_way: deque[tuple[float, bytes | None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = 0.0
        self.closed = False
        self.on_closed: Callable[[], None] = lambda: None
        self.on_arrived: Callable[[], None] = lambda: None

    def get_write_buffer_size(self) -> int:
        """Bytes under way."""
        return sum(len(data) for _, data in self._under_way if data)

    def write(self, data: bytes, /) -> None:
        if not self.closed:
            self._put(bytes(data))

    def close(self) -> None:
        """By the sender: what was written still arrives."""
        if not self.closed:
            self._put(None)
            self.closed = True
            asyncio.get_running_loop().call_soon(self.on_closed)

    def _put(self, data: bytes | None) -> None:
        network = self._link.network
        if self._link.is_silent or not self._link.are_both_alive:
            return
        self._last_s = max(self._last_s, network.now_s() + network.latency_s())
        self._under_way.append((self._last_s, data))
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._under_way:
            network = self._link.network
            due_s = max(self._under_way[0][0], network.held_until_s(self._ends))
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                max(due_s - network.now_s(), 0.0), self._arrive, context=self._receiver.context
            )

    def _arrive(self) -> None:
        self._timer = None
        network = self._link.network
        if network.held_until_s(self._ends) <= network.now_s():
            while self._under_way and self._under_way[0][0] <= network.now_s() + 1e-6:
                self._deliver(self._under_way.popleft()[1])
            self.on_arrived()
        self._arm()

    def cut(self, first_bytes: float) -> None:
        """Nothing more arrives, except so much of what comes next (0 to 1)."""
        under_way, self._under_way = self._under_way, deque()
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        data = under_way[0][1] if under_way else None
        if data and first_bytes:
            half = data[: int(len(data) * first_bytes)]
            asyncio.get_running_loop().call_soon(
                self._deliver, half, context=self._receiver.context
            )

    def end(self, after_s: float) -> None:
        """The receiver learns that the connection is gone."""
        loop = asyncio.get_running_loop()
        loop.call_later(after_s, self._deliver, None, context=self._receiver.context)


class Link:
    """A connection between two processes; what is spoken there: `Call` and `StreamLink`."""

    def __init__(
        self, network: "FaultyNetwork", client: Process, endpoint: "Listener", remote: Host,
        local: Host,
    ) -> None:  # fmt: skip
        self.network = network
        self.client, self.server = client, endpoint.process
        self.ends = (client, endpoint.process)
        self.is_silent = False
        self._has_server = True
        self.to_server = Way(self, endpoint.process, self._at_server)
        self.to_client = Way(self, client, self._at_client)
        self.to_server.on_closed = lambda: self._at_client(None)
        self.to_client.on_closed = lambda: self._at_server(None)
        self.peer = Peer(self.to_client, remote, local)

    def tell_client(self, data: bytes | None) -> None:
        """Bytes, or the end."""
        raise NotImplementedError

    def tell_server(self, data: bytes | None) -> None:
        """Bytes, or the end."""
        raise NotImplementedError

    @property
    def are_both_alive(self) -> bool:
        return self.client.is_alive and self.server.is_alive

    def _at_client(self, data: bytes | None) -> None:
        if not self.client.is_alive:
            return
        if data is None:
            self.to_server.closed = True
            self.network.links.discard(self)
        self.tell_client(data)

    def _at_server(self, data: bytes | None) -> None:
        if not (self._has_server and self.server.is_alive):
            return
        if data is None:
            self._has_server = False
            self.to_client.closed = True
            self.peer.connection_lost()
        self.tell_server(data)

    def cut(self, rng: random.Random) -> None:
        """It breaks now."""
        self.network.links.discard(self)
        self.to_server.cut(rng.choice((0, rng.random())))
        self.to_client.cut(rng.choice((0, rng.random())))
        self.to_server.end(rng.choice((0.001, rng.uniform(0, 5))))
        self.to_client.end(rng.choice((0.001, rng.uniform(0, 5))))

    def fall_silent(self, rng: random.Random) -> None:
        """It is dead, and nobody is told for long."""
        self.is_silent = True
        self.network.links.discard(self)
        for way in (self.to_server, self.to_client):
            way.cut(0)
            way.closed = False
            way.end(rng.uniform(*SILENCE_S))


class Call(Link):
    """Requests and answers."""

    def __init__(
        self, network: "FaultyNetwork", client: Process, channel: Channel,
        endpoint: "Listener", remote: Host, local: Host,
    ) -> None:  # fmt: skip
        super().__init__(network, client, endpoint, remote, local)
        self._endpoint = endpoint
        self._channel = channel
        self._pieces = FrameBuffer(endpoint.dispatcher.frame_bytes_max)
        channel.connection_made(self.to_server, remote)

    def tell_client(self, data: bytes | None) -> None:
        if data is None:
            self._channel.connection_lost(None)
        elif not self._channel.closed:
            self._channel.data_received(data)

    def tell_server(self, data: bytes | None) -> None:
        endpoint = self._endpoint
        if data is not None:
            endpoint.dispatcher.handle_data(self._pieces, self.peer, data)
        elif endpoint.on_disconnect is not None:
            endpoint.on_disconnect(self.peer)


class StreamLink(Link):
    """Plain bytes."""

    def __init__(
        self, network: "FaultyNetwork", client: Process, user: StreamProtocol, endpoint: "Listener",
        remote: Host, local: Host,
    ) -> None:  # fmt: skip
        super().__init__(network, client, endpoint, remote, local)
        self._accept = endpoint.accept
        self._user = user
        self._served: StreamProtocol | None = None
        self.stream = Peer(self.to_server, local, remote)
        self.to_server.on_arrived = user.resume_writing
        self.to_client.on_arrived = self._writable

    def tell_client(self, data: bytes | None) -> None:
        if data is None:
            self.stream.connection_lost()
            self._user.connection_lost()
        else:
            deliver(self.stream, data, self._user.data_received)

    def tell_server(self, data: bytes | None) -> None:
        if data is not None:
            deliver(self.peer, data, self._serve)
        elif self._served is not None:
            self._served.connection_lost()

    def _writable(self) -> None:
        if self._served is not None:
            self._served.resume_writing()

    def _serve(self, data: bytes) -> None:
        if self._served is None:
            self._served = self._accept(self.peer)
        self._served.data_received(data)


class Listener:
    """The face of `net.network.Listener`."""

    def __init__(
        self, network: "FaultyNetwork", process: Process, dispatcher: Dispatcher,
        on_disconnect: OnPeer | None = None, accept: StreamProtocolFactory = refuse,
    ) -> None:  # fmt: skip
        self.dispatcher = dispatcher
        self.inherited_sockets: ListeningSockets = {}
        self.accept = accept
        self.process = process
        self.on_disconnect = on_disconnect
        self.ports: tuple[int, ...] = ()
        self._network = network
        self._addresses: list[str] = []

    def duplicate_sockets(self) -> ListeningSockets:
        return {}

    async def start(self, host: str | None, ports: Sequence[int]) -> None:
        self.ports = tuple(ports)
        for port in ports:
            address = f"{host or '127.0.0.1'}:{port}"
            other = self._network.listeners.get(address)
            if other is not None and other.process.is_alive:
                raise ConfigurationError(f"{address} is in use.", fix="Stop what serves it.")
            self._network.listeners[address] = self
            self._addresses.append(address)

    async def close(self) -> None:
        """Connections end when what was written has arrived."""
        for address in self._addresses:
            self._network.listeners.pop(address, None)
        for link in tuple(self._network.links):
            if link.server is self.process and link.peer.closed is False:
                link.peer.close()
        await asyncio.sleep(0)


class ProcessNetwork:
    """The network as one process sees it: `net.network.Network`."""

    def __init__(self, network: "FaultyNetwork", process: Process) -> None:
        self._network = network
        self._process = process

    async def dial(
        self,
        address: str,
        *,
        timeout_s: float = DIAL_TIMEOUT_S,
        on_request: OnRequest | None = None,
        on_close: OnClose | None = None,
    ) -> Channel:
        network, process = self._network, self._process
        listener = await self._reach(address, timeout_s)
        channel = Channel(address, on_request=on_request, on_close=on_close)
        remote = Host("127.0.0.1", next(network.ports))
        network.links[Call(network, process, channel, listener, remote, parse_host(address))] = None
        return channel

    async def dial_stream(
        self, address: str, user: StreamProtocol, *, timeout_s: float = DIAL_TIMEOUT_S
    ) -> ByteStream:
        network = self._network
        listener = await self._reach(address, timeout_s)
        remote = Host("127.0.0.1", next(network.ports))
        link = StreamLink(network, self._process, user, listener, remote, parse_host(address))
        network.links[link] = None
        return link.stream

    async def _reach(self, address: str, timeout_s: float) -> Listener:
        """Who listens there, after the time that it takes."""
        network, process = self._network, self._process
        await asyncio.sleep(network.latency_s())
        listener = network.listeners.get(address)
        if listener is not None and listener.process.is_alive:
            ends = (process, listener.process)  # there, and back: a handshake
            held_s = max(network.held_until_s(ends), network.held_until_s(ends[::-1]))
            wait_s = held_s - network.now_s()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, timeout_s))
            if wait_s > timeout_s:
                raise RequestTimeoutError(f"{address} did not accept within {timeout_s:g} s.")
            listener = network.listeners.get(address)
        if listener is None or not (listener.process.is_alive and process.is_alive):
            raise ConnectionLostError(f"Cannot connect to {address}: refused.")
        return listener

    def stream_listener(
        self, accept: StreamProtocolFactory, *, limits: ServerLimits = SERVER_LIMITS
    ) -> Listener:
        del limits
        return Listener(self._network, self._process, Dispatcher({}), accept=accept)

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> Listener:
        del limits
        return Listener(self._network, self._process, dispatcher, on_disconnect)


class Links(dict[Link, None]):
    """A set that keeps its order, so that a seed is a history."""

    def discard(self, link: Link) -> None:
        self.pop(link, None)


class FaultyNetwork:
    """Connections between processes, and what befalls them."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self.listeners: dict[str, Listener] = {}
        self.links = Links()
        self.ports = itertools.count(40_000)
        self._slow_until_s = 0.0
        self._slow_max_s = 0.0
        self._paused: dict[Process, float] = {}
        self._parted: dict[frozenset[str], float] = {}
        self._deaf: dict[tuple[str, str], float] = {}

    def of(self, process: Process) -> ProcessNetwork:
        """For the constructor of what runs in that process."""
        return ProcessNetwork(self, process)

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    def latency_s(self) -> float:
        """Of the next chunk."""
        usual_s = self._rng.uniform(0.0001, USUAL_S)
        if self.now_s() < self._slow_until_s and self._rng.random() < 0.3:
            return usual_s + self._rng.uniform(0, self._slow_max_s)
        return usual_s

    def held_until_s(self, ends: tuple[Process, Process]) -> float:
        """When chunks from the one to the other move again."""
        one, other = ends
        if not (self._paused or self._parted or self._deaf):
            return 0.0
        return max(
            self._paused.get(one, 0.0),
            self._paused.get(other, 0.0),
            self._parted.get(frozenset((one.name, other.name)), 0.0),
            self._deaf.get((one.name, other.name), 0.0),
        )

    # --- faults

    def slow(self, for_s: float, latency_max_s: float) -> None:
        self._slow_until_s, self._slow_max_s = self.now_s() + for_s, latency_max_s

    def pause(self, process: Process, for_s: float) -> None:
        """Nothing goes in or out."""
        self._paused[process] = self.now_s() + for_s

    def part(self, one: str, other: str, for_s: float) -> None:
        """The two do not reach each other."""
        self._parted[frozenset((one, other))] = self.now_s() + for_s

    def deafen(self, one: str, other: str, for_s: float) -> None:
        """What the one sends does not reach the other; what the other sends arrives."""
        self._deaf[one, other] = self.now_s() + for_s

    def heal(self) -> None:
        """From now on nothing new befalls anybody; what is held stays held until its time."""
        self._slow_until_s = 0.0

    @property
    def rests_at_s(self) -> float:
        """When everything that is held has moved."""
        return max([0.0, *self._paused.values(), *self._parted.values(), *self._deaf.values()])

    def died(self, process: Process, rng: random.Random, *, is_silent: bool) -> None:
        """The connections of a process that is gone."""
        for link in tuple(self.links):
            if process in link.ends:
                if is_silent:
                    link.fall_silent(rng)
                else:
                    link.cut(rng)
