"""Who is connected: clients by their id, what they have said of themselves, and their end.

A client is everything that says one client id, over one connection or several; it is gone with the
last of them. To brokers it is a member by its `Link`: what they ask of it comes to `on_asked`
(`telemetry.py`), and reaches it over its telemetry streams. It may have several of those, since a
stream that broke is replaced before its end is noticed: the one that it spoke on last counts.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Peer
from sluicemq.net.grpc import Call, StatusCode
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, Link, OnRequest
from sluicemq.proxy.limits import Refusal, StatusError
from sluicemq.proxy.messages import Code
from sluicemq.wire import bodies
from sluicemq.wire.frames import LANGUAGES, VERSION, Command

CLIENT_ID: Final = "x-mq-client-id"
LANGUAGE: Final = "x-mq-language"
VERSION_HEADER: Final = "x-mq-client-version"
CLIENT_ID_MAX: Final = 255
CLIENTS_MAX: Final = 50_000
CLIENTS_A_CONNECTION_MAX: Final = 1024
"""Java's clients have a connection each; those of a C++ process share theirs."""
STREAMS_MAX: Final = 4
QUEUED_BYTES_MAX: Final = 1 << 20
"""A client that does not take what waits for it is sent no more commands."""

_V5_0_0: Final = 413
"""In RocketMQ's table of versions (spec/remoting.md §4), where each patch has two numbers."""
_LANGUAGES: Final = {"GOLANG": "GO", "DOT_NET": "DOTNET"}


OK: Final = m.Status(code=Code.OK, message=Code.OK.name)


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """One client for whoever looks. `kind` is RocketMQ's name of its client type, "" while it has
    said nothing; `topics` have their expressions, "" for those that it sends to."""

    client_id: str
    kind: str
    language: str
    version: str
    addresses: tuple[str, ...]
    since_ms: int
    group: str
    topics: dict[str, str]
    has_stream: bool


class Client:
    """One client: everything that says the same client id."""

    __slots__ = (
        "_streams", "access_key", "connections", "id", "language", "link", "local", "member",
        "remote", "settings", "since_ms", "version",
    )  # fmt: skip

    def __init__(self, call: Call, backend: Backend, on_request: "OnAsked") -> None:
        headers, peer = call.headers, call.connection.peer
        self.id = headers[CLIENT_ID]
        self.language = headers.get(LANGUAGE, "")
        self.version = headers.get(VERSION_HEADER, "")
        self.remote: Host = peer.remote
        self.local: Host = peer.local
        self.since_ms = backend.clock.now_ms()
        self.access_key = ""
        """Of the account that signed its last call."""
        self.connections: set[Peer] = set()
        self.settings: m.Settings | None = None
        """What it has said of itself, with what it was told (`telemetry.merged`)."""
        self.member: bodies.Heartbeat | None = None
        """The same as brokers are told it; None without settings."""
        self._streams: list[Call] = []
        asked: OnRequest = partial(on_request, self)
        self.link: Link = backend.link(peer.remote, peer.local, asked)

    @property
    def streams(self) -> list[Call]:
        """Its telemetry streams, the one that it spoke on last behind the others."""
        self._streams = [it for it in self._streams if not it.is_closed]
        return self._streams

    @property
    def telemetry(self) -> Call | None:
        """Where commands for it go."""
        streams = self.streams
        return streams[-1] if streams else None

    def spoke(self, stream: Call) -> None:
        """A message came on a telemetry stream."""
        streams = self.streams
        if stream in streams:
            streams.remove(stream)
        streams.append(stream)
        if len(streams) > STREAMS_MAX:
            streams[0].end(StatusCode.RESOURCE_EXHAUSTED, "The client has newer streams.")

    def tell(self, command: m.TelemetryCommand) -> bool:
        """Sends it a command. False when it has no stream, or does not take what waits there."""
        stream = self.telemetry
        if stream is None or stream.connection.queued_bytes > QUEUED_BYTES_MAX:
            return False
        stream.send(command.SerializeToString())
        return True

    @property
    def wire_language(self) -> str:
        """As heartbeats name it. Settings come first: Node's metadata say HTTP."""
        said = self.settings.user_agent.language if self.settings is not None else 0
        names = next((it.name for it in m.Language if it == said), ""), self.language.upper()
        known = (_LANGUAGES.get(it, it) for it in names)
        return next((it for it in known if it in LANGUAGES), "OTHER")

    @property
    def wire_version(self) -> int:
        """Its version as a number of RocketMQ's table; that of this proxy if it is no 5.x.y."""
        found = re.fullmatch(r"[vV]?5\.(\d)\.(\d)", self.version)
        return VERSION if found is None else _V5_0_0 + 2 * (10 * int(found[1]) + int(found[2]))

    @property
    def info(self) -> ClientInfo:
        settings, member = self.settings, self.member
        topics = dict.fromkeys(member.producer_groups if member is not None else (), "")
        consumers = member.consumers if member is not None else ()
        for consumer in consumers:
            topics |= {it.topic: it.expression for it in consumer.subscriptions}
        return ClientInfo(
            self.id,
            kind_of(settings) if settings is not None else "",
            self.wire_language,
            self.version,
            tuple(sorted(str(it.remote) for it in self.connections)),
            self.since_ms,
            consumers[0].group if consumers else "",
            topics,
            self.telemetry is not None,
        )


def kind_of(settings: m.Settings) -> str:
    """RocketMQ's name of a client type; of a newer one its number."""
    number = settings.client_type
    return next((it.name for it in m.ClientType if it == number), f"{number}")


OnAsked = Callable[[Client, Command, Callable[[Command], None]], None]


class Clients:
    """All clients of one proxy."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._by_peer: dict[Peer, dict[Client, None]] = {}
        self._number = 0
        self.by_id: dict[str, Client] = {}
        self.on_gone: list[Callable[[Client], None]] = []
        """Told of each client that is gone, as long as its link is there."""
        self.on_asked: OnAsked = _ignore
        """What a broker asks of a client."""

    def of(self, call: Call, access_key: str) -> Client:
        """Whose call it is. An account may change its key, but not join another one's client over
        a new connection: it would be told what is for that one. Raises StatusError
        (CLIENT_ID_REQUIRED, TOO_MANY_REQUESTS, FORBIDDEN). HOT."""
        client, peer = self.by_id.get(call.headers.get(CLIENT_ID, "")), call.connection.peer
        if client is None or peer not in client.connections:
            client = self._connected(client, call, access_key)
        client.access_key = access_key
        return client

    def _connected(self, client: Client | None, call: Call, access_key: str) -> Client:
        """The first call of a client over a connection."""
        client_id, peer = call.headers.get(CLIENT_ID, ""), call.connection.peer
        mine = self._by_peer.get(peer, {})
        if not client_id or len(client_id) > CLIENT_ID_MAX:
            raise StatusError(
                Refusal.CLIENT_ID_MISSING,
                f"the metadata lack {CLIENT_ID}, or it is longer than {CLIENT_ID_MAX} characters.",
            )
        if len(mine) >= CLIENTS_A_CONNECTION_MAX or len(self.by_id) >= CLIENTS_MAX:
            raise StatusError(
                Refusal.CLIENTS_TOO_MANY,
                f"There are {len(mine)} clients on this connection and {len(self.by_id)} in all, "
                f"the limits are {CLIENTS_A_CONNECTION_MAX} and {CLIENTS_MAX}.",
                fix="Use fewer clients, or another proxy.",
            )
        if client is not None and client.access_key != access_key:
            raise StatusError(
                Refusal.CLIENT_OF_ANOTHER_ACCOUNT,
                f"The client id {client_id} is another account's.",
                fix="Give each client an id of its own.",
            )  # fmt: skip
        if peer.closed:
            raise StatusError(Refusal.CONNECTION_CLOSED, "The connection is gone.")
        if client is None:
            client = self.by_id[client_id] = Client(call, self._backend, self._asked)
        client.connections.add(peer)
        self._by_peer.setdefault(peer, mine)[client] = None
        return client

    def disconnected(self, peer: Peer) -> None:
        """A connection is gone, and with their last one the clients that it was of."""
        for client in self._by_peer.pop(peer, ()):
            client.connections.discard(peer)
            if not client.connections:
                self.end(client)

    def end(self, client: Client) -> None:
        """A client is gone, or says so: what it may still say makes another one of it, so that
        connections outlive the clients they were of."""
        if self.by_id.get(client.id) is not client:
            return
        del self.by_id[client.id]
        for peer in client.connections:
            self._by_peer[peer].pop(client, None)
        try:
            for callback in self.on_gone:
                callback(client)
        finally:
            client.link.close()

    def inventory(self) -> list[ClientInfo]:
        """All clients, by id."""
        return [client.info for _, client in sorted(self.by_id.items())]

    def reconnect_all(self) -> None:
        """Tells clients to open other connections: this proxy is about to end."""
        for client in list(self.by_id.values()):
            self._number += 1
            nonce = m.ReconnectEndpointsCommand(nonce=f"{self._number}")
            client.tell(m.TelemetryCommand(reconnect_endpoints_command=nonce))

    def drain(self) -> None:
        """Ends the telemetry streams, which else end last: the client opens them elsewhere."""
        for client in list(self.by_id.values()):
            for stream in client.streams:
                stream.end(StatusCode.UNAVAILABLE, "The proxy shuts down.")

    def _asked(self, client: Client, command: Command, answer: Callable[[Command], None]) -> None:
        self.on_asked(client, command, answer)


def _ignore(client: Client, command: Command, answer: Any) -> None:
    """Nobody is there to pass it on."""
