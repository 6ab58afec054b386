"""The backend of a proxy that runs in the process of its broker.

Requests go directly to the broker's dispatcher: they are not encoded, and a plain send takes the
fast path. Responses come as frames, as for every client, mostly at the end of a group commit.
`LocalBackend` collects them and delivers them together in the next iteration of the event loop, so
that a response does not cause the next request while the group commit is still ending.

A replica changes its role in place, and the proxy keeps its connections. Requests that arrive
between two roles wait for the next one (`Broker.on_role`), in which a slave forwards them to the
master.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from sluicemq.acl.rules import Account
from sluicemq.broker.state import BrokerState
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.config import BrokerConfig
from sluicemq.config.keys import ServerConfig
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import ConnectionLostError, RouteNotFoundError
from sluicemq.model.ids import Host
from sluicemq.model.topic import (
    MASTER_ID,
    BrokerData,
    GroupConfig,
    QueueData,
    TopicConfig,
    TopicRoute,
)
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.proxy.backend import PROXY_HOST, OnRequest, OnResponse
from sluicemq.proxy.server import Proxy, ProxyCollector
from sluicemq.wire.frames import FLAG_ONEWAY, FLAG_RESPONSE, Command, FrameReader

log = logging.getLogger(__name__)

LOCAL_ADDRESS: Final = "here"
"""The address of the broker in a `Call`."""
CACHED_ROUTES_MAX: Final = 10_000
"""The number of cached routes at which the cache is cleared."""
CallSoon = Callable[[Callable[[], None]], object]
"""A function that runs a callback in the next iteration of the event loop: `loop.call_soon`."""


class EmbeddingBroker(Protocol):
    """The broker that a local proxy belongs to: `broker.server.Broker`."""

    core: BrokerState
    on_role: list[Callable[[bool], None]]

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the current role."""
        ...


def make_local_proxy(
    broker: EmbeddingBroker,
    config: ServerConfig | None = None,
    limits: ProxyLimits = ProxyLimits(),  # noqa: B008 - frozen
) -> Proxy:
    """Return a proxy for a broker that runs in this event loop.

    The proxy follows the broker when its role changes between master and slave. It uses the
    broker's access control, scheduler and metrics. `config` has the address and TLS settings of the
    gRPC port; None means the settings of the broker. `limits` are the limits of calls.
    """
    core = broker.core
    backend = LocalBackend(core, broker.dispatcher, asyncio.get_running_loop().call_soon)
    proxy = Proxy(backend, core.guard, core.scheduler, config or core.settings.broker, limits)
    collector = ProxyCollector(proxy)
    core.metric_collectors.append(collector.collect)

    def on_role(serves: bool) -> None:
        """Suspend the proxy at the end of a role, and resume it when the broker `serves` again."""
        if not serves:
            backend.suspend()
            return
        proxy.dispatcher.guard = broker.core.guard
        broker.core.metric_collectors.append(collector.collect)
        backend.resume(broker.core, broker.dispatcher)

    broker.on_role.append(on_role)
    return proxy


class LocalBackend:
    """A backend with one broker, which runs in the same process."""

    def __init__(self, state: BrokerState, dispatcher: Dispatcher, call_soon: CallSoon) -> None:
        """Create the backend of a broker with this state and dispatcher, until its role changes.

        `call_soon(function)` calls a function in the next iteration of the event loop.
        """
        self.state = state
        self.clock = state.clock
        self.dispatcher: Dispatcher | None = dispatcher
        """The dispatcher of the current role; None between two roles."""
        self.sessions: dict[LocalClientSession, None] = {}  # in the order of opening
        self.pending_requests: list[
            tuple[LocalClientSession, Call, OnResponse, Account | None]
        ] = []
        """Requests that arrived between two roles, each with the account that signed it."""
        self._call_soon = call_soon
        # Frames from the broker that `_deliver_frames` has not delivered yet.
        self._received_frames: list[tuple[LocalClientSession, bytes]] = []
        self._route_cache: dict[str, tuple[TopicConfig, BrokerConfig, TopicRoute]] = {}
        """The route of each topic with the settings from which it was built.

        `fetch_route` returns the same object until these settings change.
        """

    def open_session(
        self, remote: Host, local: Host, on_request: OnRequest
    ) -> "LocalClientSession":
        """Return a new session with the broker for a client, and add it to the sessions.

        The client is at `remote`, and reached the proxy at `local`. `on_request` is called with
        each request that the broker sends to the client.
        """
        session = LocalClientSession(self, remote, local, on_request)
        self.sessions[session] = None
        return session

    def suspend(self) -> None:
        """End the current role of the broker: fail all open requests.

        New requests are queued until `resume` is called.
        """
        self._deliver_frames()
        self.dispatcher = None
        for session in tuple(self.sessions):
            session.connection_lost()

    def resume(self, state: BrokerState, dispatcher: Dispatcher) -> None:
        """Begin the next role of the broker, with a new state and dispatcher.

        The queued requests are sent.
        """
        self.state = state
        self.dispatcher = dispatcher
        self._route_cache.clear()
        pending_requests = self.pending_requests
        self.pending_requests = []
        for session, call, on_response, account in pending_requests:
            # The broker takes the account of a request from its guard.
            if state.guard is not None:
                state.guard.account = account
            session.send(call, on_response)

    def fetch_route(self, topic: str) -> Conversation[TopicRoute]:
        """Return the route of a topic, which contains only this broker.

        The same object is returned until the settings of the topic or broker change. Raises
        RouteNotFoundError if the topic does not exist.
        """
        yield from ()  # the method is a generator, although it sends no request
        topic_entry = self.state.topics.get(topic)
        if topic_entry is None:
            raise RouteNotFoundError(
                f"The topic {topic} does not exist.", fix=f"Create it: sluice topic create {topic}"
            )
        config = topic_entry.config
        broker = self.state.settings.broker
        cached = self._route_cache.get(topic)
        if cached is not None:
            cached_config, cached_broker, cached_route = cached
            # Settings are replaced as a whole when they change.
            if cached_config is config and cached_broker is broker:
                return cached_route

        route = _build_route(config, broker)
        if len(self._route_cache) >= CACHED_ROUTES_MAX:
            self._route_cache.clear()
        self._route_cache[topic] = config, broker, route
        return route

    def fetch_topic_config(self, name: str) -> Conversation[TopicConfig | None]:
        """Return the broker's settings of a topic, or None if it does not exist."""
        yield from ()
        return self.state.topics.config_of(name)

    def fetch_group_config(self, name: str) -> Conversation[GroupConfig | None]:
        """Return the broker's settings of a consumer group, or None if it does not exist."""
        yield from ()
        return self.state.groups.table.get(name)

    def list_warnings(self) -> list[str]:
        """Return no warnings: the broker checks subscriptions itself."""
        return []

    def schedule_delivery(self, session: "LocalClientSession", frames: bytes) -> None:
        """Deliver frames to a session in the next iteration of the event loop.

        All frames that arrive until then are delivered together.
        """
        if not self._received_frames:
            self._call_soon(self._deliver_frames)
        self._received_frames.append((session, frames))

    def _deliver_frames(self) -> None:
        """Pass all frames that the broker has sent to the sessions of their clients, in order.

        An exception in a session is logged, and the other frames are delivered all the same.
        """
        received_frames = self._received_frames
        self._received_frames = []
        for session, frames in received_frames:
            try:
                session.handle_frames(frames)
            except Exception:
                # A bug in one call must not prevent the delivery of other responses.
                log.exception("A response for the client at %s was lost.", session.peer.remote)


def _build_route(config: TopicConfig, broker: BrokerConfig) -> TopicRoute:
    """Return the route of a topic that only `broker` has; `config` has the topic's settings."""
    broker_data = BrokerData(broker.broker_name, broker.cluster_name, {MASTER_ID: LOCAL_ADDRESS})
    queue_data = QueueData(
        broker.broker_name, config.read_queues, config.write_queues, config.perm, config.sys_flag
    )
    return TopicRoute((broker_data,), (queue_data,))


class _SessionTransport(NamedTuple):
    """The transport of the broker's peer object, in place of a socket."""

    session: "LocalClientSession"

    def write(self, data: bytes, /) -> None:
        """Pass frames from the broker to the session."""
        self.session.write(data)

    def close(self) -> None:
        """Disconnect the session's peer, because the broker closes the connection."""
        self.session.connection_lost()


class LocalClientSession:
    """A client of the proxy, which the broker sees as one of its peers.

    The broker closes a peer that is silent for too long. The next request then creates a new peer,
    as if the client had connected again.
    """

    def __init__(
        self, backend: LocalBackend, remote: Host, local: Host, on_request: OnRequest
    ) -> None:
        """Create the session of a client with the broker in this process.

        `remote` is the address of the client, and `local` the address where it has reached the
        proxy. `on_request` handles the requests of the broker to the client.
        """
        self.peer = self._new_peer(remote, local)
        self._is_closed = False
        self._backend = backend
        self._on_request = on_request
        self._reader = FrameReader()
        # The callbacks of open requests by opaque, the number that identifies a request.
        self._pending: dict[int, OnResponse] = {}
        self._opaque = 0

    def send(self, call: Call, on_response: OnResponse) -> None:
        """Pass a request to the broker, and call `on_response` with the response or an error.

        If the broker is changing its role, the request is queued. If the session is closed,
        `on_response` is called at once with ConnectionLostError. For a one-way request, it is
        called with the request.
        """
        if self._is_closed:
            on_response(ConnectionLostError("The client has disconnected."))
            return
        guard = self._backend.state.guard
        dispatcher = self._backend.dispatcher
        if guard is not None and self.peer.remote == PROXY_HOST:
            guard.account = None  # the proxy itself; the guard still has the previous account
        if dispatcher is None:  # the broker is between two roles
            account = None if guard is None else guard.account
            self._backend.pending_requests.append((self, call, on_response, account))
            return

        if self.peer.closed:
            self.peer = self._new_peer(self.peer.remote, self.peer.local)
        command = call.command
        opaque = self._opaque = command.opaque = (self._opaque + 1) & 0x7FFFFFFF
        call.is_written = True
        if command.flag & FLAG_ONEWAY:
            dispatcher.handle_command(command, self.peer)
            on_response(command)
            return
        self._pending[opaque] = on_response
        frame = dispatcher.handle_command(command, self.peer)
        if frame:
            self.handle_frames(frame)

    def _new_peer(self, remote: Host, local: Host) -> Peer:
        """Return a peer of the broker for this session.

        The broker does not notify it of changes in its groups: each of a thousand new members would
        cause a notification to all others, and gRPC clients receive from all queues of the broker
        anyway.
        """
        peer = Peer(_SessionTransport(self), remote, local)
        peer.can_rebalance = False
        return peer

    def close(self) -> None:
        """End the session because the client has disconnected.

        Its peer is disconnected from the broker, and its open requests fail.
        """
        self._is_closed = True
        self._backend.sessions.pop(self, None)
        self.connection_lost()

    def connection_lost(self) -> None:
        """Disconnect the peer from the broker, and fail the requests without a response."""
        self.peer.connection_lost()
        self._backend.state.on_disconnect(self.peer)
        pending = self._pending
        self._pending = {}
        for on_response in pending.values():
            on_response(ConnectionLostError("The broker closed the connection. Try again."))

    def write(self, frames: bytes) -> None:
        """Accept frames from the broker, for delivery in the next iteration of the event loop."""
        self._backend.schedule_delivery(self, frames)

    def handle_frames(self, frames: bytes) -> None:
        """Decode frames from the broker, and call the callbacks of their responses and requests.

        A response to a request that is no longer open is ignored.
        """
        for command in self._reader.feed(frames):
            if command.flag & FLAG_RESPONSE:
                on_response = self._pending.pop(command.opaque, None)
                if on_response is not None:
                    on_response(command)
            else:
                self._on_request(command, self._make_responder(command))

    def _make_responder(self, request: Command) -> Callable[[Command], None]:
        """Return a function that sends the client's response to a request of the broker."""
        peer = self.peer

        def respond(command: Command) -> None:
            """Pass `command` to the broker as the response to `request`."""
            command.opaque = request.opaque
            command.flag |= FLAG_RESPONSE
            peer.handle_response(command)

        return respond
