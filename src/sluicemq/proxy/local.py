"""The broker in this process as the proxy's backend.

Requests go to the dispatcher's table as they are: a command is not encoded on its way in, and a
plain send takes the quick way. Answers come as for everybody, as frames, mostly at the end of a
turn. They are handed on in the next iteration of the loop, all together, so that no answer makes
the next request while the turn is still ending.

A replica changes its role in place, and the proxy stays with its connections: what is asked
meanwhile waits for the next role (`Broker.on_role`), in which a slave forwards it to the master.
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
from sluicemq.proxy.backend import ITSELF, Answered, OnRequest
from sluicemq.proxy.server import Proxy, ProxyCollector
from sluicemq.wire.frames import FLAG_ONEWAY, FLAG_RESPONSE, Command, FrameReader

log = logging.getLogger(__name__)

HERE: Final = "here"
"""The address of the broker, to a Call."""
ROUTES_MAX: Final = 10_000
CallSoon = Callable[[Callable[[], None]], object]


class Served(Protocol):
    """The broker beside it: `broker.server.Broker`."""

    core: BrokerState
    on_role: list[Callable[[bool], None]]

    @property
    def dispatcher(self) -> Dispatcher: ...


def proxy_of(
    broker: Served,
    config: ServerConfig | None = None,
    limits: ProxyLimits = ProxyLimits(),  # noqa: B008 - frozen
) -> Proxy:
    """Return the proxy of a broker in this loop, in whatever role the broker is.

    It has the broker's rights, a share of its time and a place in its metrics. `config` says where
    and with which TLS it is served, None as the broker; `limits` what its calls may ask for.
    """
    core = broker.core
    backend = LocalBackend(core, broker.dispatcher, asyncio.get_running_loop().call_soon)
    proxy = Proxy(backend, core.guard, core.scheduler, config or core.settings.broker, limits)
    collector = ProxyCollector(proxy)
    core.metric_collectors.append(collector.collect)

    def on_role(serves: bool) -> None:
        if not serves:
            backend.rest()
            return
        proxy.service.guard = broker.core.guard
        broker.core.metric_collectors.append(collector.collect)
        backend.serve(broker.core, broker.dispatcher)

    broker.on_role.append(on_role)
    return proxy


class LocalBackend:
    """One broker, and nothing else of its cluster."""

    def __init__(self, state: BrokerState, dispatcher: Dispatcher, call_soon: CallSoon) -> None:
        self.state = state
        self.clock = state.clock
        self.dispatcher: Dispatcher | None = dispatcher
        """None between two roles."""
        self.links: set[LocalLink] = set()
        self.held: list[tuple[LocalLink, Call, Answered, Account | None]] = []
        """What was asked then, and by whom."""
        self._call_soon = call_soon
        self._arrived: list[tuple[LocalLink, bytes]] = []
        self._routes: dict[str, tuple[TopicConfig, BrokerConfig, TopicRoute]] = {}
        """What each was made of, and the route: the same one while nothing changes."""

    def link(self, remote: Host, local: Host, on_request: OnRequest) -> "LocalLink":
        link = LocalLink(self, remote, local, on_request)
        self.links.add(link)
        return link

    def rest(self) -> None:
        """A role has ended: nothing that was asked in it is answered any more."""
        self._deliver()
        self.dispatcher = None
        for link in tuple(self.links):
            link.lost()

    def serve(self, state: BrokerState, dispatcher: Dispatcher) -> None:
        """The next role has begun."""
        self.state, self.dispatcher = state, dispatcher
        self._routes.clear()
        held, self.held = self.held, []
        for link, call, answered, account in held:
            if state.guard is not None:
                state.guard.account = account
            link.ask(call, answered)

    def route(self, topic: str) -> Conversation[TopicRoute]:
        yield from ()
        found = self.state.topics.get(topic)
        if found is None:
            raise RouteNotFoundError(
                f"The topic {topic} does not exist.", fix=f"Create it: sluice topic create {topic}"
            )
        config, broker = found.config, self.state.settings.broker
        known = self._routes.get(topic)
        if known is not None and known[0] is config and known[1] is broker:
            return known[2]
        route = TopicRoute(
            (BrokerData(broker.broker_name, broker.cluster_name, {MASTER_ID: HERE}),),
            (
                QueueData(
                    broker.broker_name, config.read_queues, config.write_queues, config.perm,
                    config.sys_flag,
                ),
            ),
        )  # fmt: skip
        if len(self._routes) >= ROUTES_MAX:
            self._routes.clear()
        self._routes[topic] = config, broker, route
        return route

    def topic(self, name: str) -> Conversation[TopicConfig | None]:
        yield from ()
        return self.state.topics.config_of(name)

    def group(self, name: str) -> Conversation[GroupConfig | None]:
        yield from ()
        return self.state.groups.table.get(name)

    def warnings(self) -> list[str]:
        return []

    def arrived(self, link: "LocalLink", data: bytes) -> None:
        """Frames for a client, which it gets when this turn is over."""
        if not self._arrived:
            self._call_soon(self._deliver)
        self._arrived.append((link, data))

    def _deliver(self) -> None:
        arrived, self._arrived = self._arrived, []
        for link, data in arrived:
            try:  # a bug in one call must not keep the others from their answers
                link.received(data)
            except Exception:
                log.exception("an answer for the client at %s was lost", link.peer.remote)


class _Carrier(NamedTuple):
    """What the broker has in place of a socket."""

    link: "LocalLink"

    def write(self, data: bytes, /) -> None:
        self.link.wrote(data)

    def close(self) -> None:
        self.link.lost()


class LocalLink:
    """A client of the proxy as the broker's peer. A broker that closes it, as it does with who is
    silent for too long, sees a new peer with the next request, as of a client that connects again.
    """

    def __init__(
        self, backend: LocalBackend, remote: Host, local: Host, on_request: OnRequest
    ) -> None:
        self.peer = self._peer(remote, local)
        self._is_closed = False
        self._backend = backend
        self._on_request = on_request
        self._reader = FrameReader()
        self._waiting: dict[int, Answered] = {}
        self._opaque = 0

    def ask(self, call: Call, answered: Answered) -> None:
        if self._is_closed:
            answered(ConnectionLostError("The client is gone."))
            return
        guard, dispatcher = self._backend.state.guard, self._backend.dispatcher
        if guard is not None and self.peer.remote == ITSELF:
            guard.account = None  # it is still that of the request before
        if dispatcher is None:
            account = None if guard is None else guard.account
            self._backend.held.append((self, call, answered, account))
            return
        if self.peer.closed:
            self.peer = self._peer(self.peer.remote, self.peer.local)
        command = call.command
        opaque = self._opaque = command.opaque = (self._opaque + 1) & 0x7FFFFFFF
        call.is_written = True
        if command.flag & FLAG_ONEWAY:
            dispatcher.handle_command(command, self.peer)
            answered(command)
            return
        self._waiting[opaque] = answered
        frame = dispatcher.handle_command(command, self.peer)
        if frame:
            self.received(frame)

    def _peer(self, remote: Host, local: Host) -> Peer:
        """It is not told who else is in its groups: a thousand that come would hear it a million
        times, and receive from all of the broker anyway."""
        peer = Peer(_Carrier(self), remote, local)
        peer.can_rebalance = False
        return peer

    def close(self) -> None:
        self._is_closed = True
        self._backend.links.discard(self)
        self.lost()

    def lost(self) -> None:
        """The broker's side of it is closed."""
        self.peer.connection_lost()
        self._backend.state.on_disconnect(self.peer)
        waiting, self._waiting = self._waiting, {}
        for answered in waiting.values():
            answered(ConnectionLostError("The broker has closed the connection; try again."))

    def wrote(self, data: bytes) -> None:
        """Frames of the broker."""
        self._backend.arrived(self, data)

    def received(self, data: bytes) -> None:
        """What they say: answers, and what it asks."""
        for command in self._reader.feed(data):
            if command.flag & FLAG_RESPONSE:
                answered = self._waiting.pop(command.opaque, None)
                if answered is not None:
                    answered(command)
            else:
                self._on_request(command, self._answerer(command))

    def _answerer(self, request: Command) -> Callable[[Command], None]:
        peer = self.peer

        def answer(command: Command) -> None:
            command.opaque = request.opaque
            command.flag |= FLAG_RESPONSE
            peer.handle_response(command)

        return answer
