"""The clients of a proxy, by client id.

All connections that use the same client id belong to one client. The client is removed when its
last connection closes. Brokers see it as a member of its groups through its `ClientSession`.
Requests that brokers send to it go to `Clients.on_broker_request` (`telemetry.py`), and reach the
client through a telemetry stream. A client may have several telemetry streams, because it replaces
a broken stream before the proxy notices the end of the old one. Commands go to the stream on which
the client sent its last message.
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
from sluicemq.proxy.backend import Backend, ClientSession, OnRequest
from sluicemq.proxy.limits import Refusal, StatusError
from sluicemq.proxy.messages import Code
from sluicemq.wire import bodies
from sluicemq.wire.frames import LANGUAGES, VERSION, Command

CLIENT_ID: Final = "x-mq-client-id"
"""The metadata key of the client id."""
LANGUAGE: Final = "x-mq-language"
"""The metadata key of the client's programming language."""
VERSION_HEADER: Final = "x-mq-client-version"
"""The metadata key of the client's version."""
CLIENT_ID_MAX: Final = 255
"""The maximum length of a client id, in characters."""
CLIENTS_MAX: Final = 50_000
"""The maximum number of clients of one proxy."""
CLIENTS_PER_CONNECTION_MAX: Final = 1024
"""The maximum number of clients on one connection.

A Java client has its own connection; the clients of a C++ process share theirs.
"""
STREAMS_PER_CLIENT_MAX: Final = 4
"""The number of telemetry streams of a client above which its oldest stream is ended."""
QUEUED_BYTES_MAX: Final = 1 << 20
"""The number of unsent bytes on a connection above which the client gets no more commands."""

_V5_0_0: Final = 413
"""The number of version 5.0.0 in RocketMQ's table of versions (spec/remoting.md §4).

Each patch release has two numbers in it.
"""
_LANGUAGES: Final = {"GOLANG": "GO", "DOT_NET": "DOTNET"}
"""Language names of gRPC clients that the remoting protocol spells differently."""


OK: Final = m.Status(code=Code.OK, message=Code.OK.name)


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """A snapshot of one client, for status pages and tools.

    `kind` is RocketMQ's name of its client type, or "" before its settings have arrived. `topics`
    has the filter expression of each subscribed topic, and "" for the topics that the client sends
    to. `since_ms` is the time of its first call, in milliseconds since 1970.
    """

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
    """One client: all connections that use the same client id."""

    __slots__ = (
        "_streams",
        "access_key",
        "connections",
        "heartbeat",
        "id",
        "language",
        "local",
        "remote",
        "session",
        "settings",
        "since_ms",
        "version",
    )

    def __init__(self, call: Call, backend: Backend, on_request: "OnBrokerRequest") -> None:
        """Create the client that made `call`, and open its session with brokers.

        `on_request` handles the requests that brokers send to the client.
        """
        headers = call.headers
        peer = call.connection.peer
        self.id = headers[CLIENT_ID]
        self.language = headers.get(LANGUAGE, "")
        self.version = headers.get(VERSION_HEADER, "")
        self.remote: Host = peer.remote
        self.local: Host = peer.local
        self.since_ms = backend.clock.now_ms()
        self.access_key = ""
        """The access key of the account that signed the client's last call, or ""."""
        self.connections: set[Peer] = set()
        self.settings: m.Settings | None = None
        """The client's settings, merged with those of the server (`telemetry.merge_settings`)."""
        self.heartbeat: bodies.Heartbeat | None = None
        """The heartbeat by which brokers know the client; None before its settings have arrived."""
        self._streams: list[Call] = []
        handle_request: OnRequest = partial(on_request, self)
        self.session: ClientSession = backend.open_session(peer.remote, peer.local, handle_request)
        """The client's connection to brokers."""

    @property
    def streams(self) -> list[Call]:
        """The open telemetry streams, with the one that the client used last at the end."""
        self._streams = [stream for stream in self._streams if not stream.is_closed]
        return self._streams

    @property
    def command_stream(self) -> Call | None:
        """The telemetry stream to which commands are sent, or None if no stream is open."""
        streams = self.streams
        return streams[-1] if streams else None

    def use_stream(self, stream: Call) -> None:
        """Record that the client uses `stream`, so that commands are sent to it.

        The stream that was used least recently is ended if there are more than
        `STREAMS_PER_CLIENT_MAX`.
        """
        streams = self.streams
        if stream in streams:
            streams.remove(stream)
        streams.append(stream)  # the last stream is the one used most recently
        if len(streams) > STREAMS_PER_CLIENT_MAX:
            streams[0].end(StatusCode.RESOURCE_EXHAUSTED, "The client has newer streams.")

    def send_command(self, command: m.TelemetryCommand) -> bool:
        """Send a command to the client on its current stream, and return True.

        Return False without sending if the client has no open stream, or if more than
        `QUEUED_BYTES_MAX` bytes on its connection have not been read by the client.
        """
        stream = self.command_stream
        if stream is None or stream.connection.queued_bytes > QUEUED_BYTES_MAX:
            return False
        stream.send(command.SerializeToString())
        return True

    @property
    def wire_language(self) -> str:
        """The name of the client's language in the remoting protocol, "OTHER" if it is unknown.

        The language in the client's settings takes precedence over the one in its metadata, because
        the metadata of Node.js clients say HTTP.
        """
        settings_language = ""
        if self.settings is not None:
            settings_language = _language_name(self.settings.user_agent.language)
        for grpc_name in (settings_language, self.language.upper()):
            remoting_name = _LANGUAGES.get(grpc_name, grpc_name)
            if remoting_name in LANGUAGES:
                return remoting_name
        return "OTHER"

    @property
    def wire_version(self) -> int:
        """The client's version as a number of RocketMQ's table of versions.

        A version that is not 5.x.y counts as the version of this proxy.
        """
        match = re.fullmatch(r"[vV]?5\.(\d)\.(\d)", self.version)
        if match is None:
            return VERSION
        minor = int(match[1])
        patch = int(match[2])
        # The table has ten patch releases for each minor version, with two numbers each.
        return _V5_0_0 + 2 * (10 * minor + patch)

    @property
    def info(self) -> ClientInfo:
        """A snapshot of the client; later changes of the client do not change it.

        The kind is "" before the client has sent its settings. The group is that of the first
        consumer in the last heartbeat, and "" without one.
        """
        kind = ""
        if self.settings is not None:
            kind = client_type_name(self.settings)
        group = ""
        if self.heartbeat is not None and self.heartbeat.consumers:
            group = self.heartbeat.consumers[0].group
        addresses = sorted(str(peer.remote) for peer in self.connections)
        return ClientInfo(
            client_id=self.id,
            kind=kind,
            language=self.wire_language,
            version=self.version,
            addresses=tuple(addresses),
            since_ms=self.since_ms,
            group=group,
            topics=self._list_topics(),
            has_stream=self.command_stream is not None,
        )

    def _list_topics(self) -> dict[str, str]:
        """Return the topics of the client, each with its filter expression.

        The expression is "" for a topic to which the client only sends.
        """
        if self.heartbeat is None:
            return {}
        # The producer groups of a gRPC client are the topics to which it sends.
        topics = dict.fromkeys(self.heartbeat.producer_groups, "")
        for consumer in self.heartbeat.consumers:
            for subscription in consumer.subscriptions:
                topics[subscription.topic] = subscription.expression
        return topics


def _language_name(language_number: int) -> str:
    """Return the name of a language of the gRPC protocol, "" for a number without a name."""
    for language in m.Language:
        if language == language_number:
            return language.name
    return ""


def client_type_name(settings: m.Settings) -> str:
    """Return RocketMQ's name of the client type in the settings, or its number if it is unknown."""
    for client_type in m.ClientType:
        if client_type == settings.client_type:
            return client_type.name
    return f"{settings.client_type}"


OnBrokerRequest = Callable[[Client, Command, Callable[[Command], None]], None]
"""A callback with a client, a broker's request to it, and the function that sends the response."""


class Clients:
    """All clients of one proxy."""

    def __init__(self, backend: Backend) -> None:
        """Create an empty table of clients, whose sessions `backend` opens."""
        self._backend = backend
        # The clients of each connection, in the order of their first calls.
        self._by_peer: dict[Peer, dict[Client, None]] = {}
        self._reconnect_count = 0
        self.by_id: dict[str, Client] = {}
        """The clients by client id."""
        self.on_removed: list[Callable[[Client], None]] = []
        """Callbacks that are called with each removed client, before its session is closed."""
        self.on_broker_request: OnBrokerRequest = _ignore_request
        """The handler of requests that brokers send to clients."""

    def identify(self, call: Call, access_key: str) -> Client:
        """Return the client that made the call, and register it at its first call. Hot path.

        `access_key` is the access key of the account that signed the call, or "". On a known
        connection, the key of a client may change. On a new connection, a client id can only be
        used with the same key as before, because the connection would otherwise get commands for
        another client.

        Raises StatusError if the client id is missing, if there are too many clients, or if another
        account uses the client id.
        """
        client = self.by_id.get(call.headers.get(CLIENT_ID, ""))
        peer = call.connection.peer
        if client is None or peer not in client.connections:
            client = self._register(client, call, access_key)
        client.access_key = access_key
        return client

    def _register(self, client: Client | None, call: Call, access_key: str) -> Client:
        """Record that a client uses the connection of `call`, and return the client.

        `client` is the client that already has the client id; None means that a new one is created.

        Raises StatusError, without recording anything, if the client id is missing or too long, if
        there are too many clients, if another account uses the client id, or if the connection is
        closed.
        """
        client_id = call.headers.get(CLIENT_ID, "")
        peer = call.connection.peer
        # The new dict is stored only after all checks, by `setdefault`.
        connection_clients = self._by_peer.get(peer, {})
        if not client_id or len(client_id) > CLIENT_ID_MAX:
            raise StatusError(
                Refusal.CLIENT_ID_MISSING,
                f"set {CLIENT_ID} in the metadata, to at most {CLIENT_ID_MAX} characters.",
            )
        self._check_client_count(len(connection_clients))
        if client is not None and client.access_key != access_key:
            raise StatusError(
                Refusal.CLIENT_OF_ANOTHER_ACCOUNT,
                f"The client id {client_id} is used by another account.",
                fix="Use another client id.",
            )
        if peer.closed:
            raise StatusError(Refusal.CONNECTION_CLOSED, "The connection is closed.")

        if client is None:
            client = Client(call, self._backend, self._handle_broker_request)
            self.by_id[client_id] = client
        client.connections.add(peer)
        self._by_peer.setdefault(peer, connection_clients)[client] = None
        return client

    def _check_client_count(self, connection_count: int) -> None:
        """Raise StatusError if the connection or the whole proxy has as many clients as allowed.

        `connection_count` is the number of clients on the connection.
        """
        if connection_count >= CLIENTS_PER_CONNECTION_MAX or len(self.by_id) >= CLIENTS_MAX:
            raise StatusError(
                Refusal.CLIENTS_TOO_MANY,
                f"There are {connection_count} clients on this connection and "
                f"{len(self.by_id)} in all; "
                f"the limits are {CLIENTS_PER_CONNECTION_MAX} and {CLIENTS_MAX}.",
                fix="Use fewer clients, or another proxy.",
            )

    def connection_lost(self, peer: Peer) -> None:
        """Forget a closed connection, and remove the clients that have no other connection."""
        for client in self._by_peer.pop(peer, ()):
            client.connections.discard(peer)
            if not client.connections:
                self.remove(client)

    def remove(self, client: Client) -> None:
        """Remove a client that has disconnected or terminated. Do nothing if it was removed before.

        The callbacks in `on_removed` are called, and the client's session with brokers is closed.
        Its connections stay open, and a later call with its client id registers a new client.
        """
        if self.by_id.get(client.id) is not client:
            return
        del self.by_id[client.id]
        for peer in client.connections:
            self._by_peer[peer].pop(client, None)
        try:
            for callback in self.on_removed:
                callback(client)
        finally:
            client.session.close()

    def list_clients(self) -> list[ClientInfo]:
        """Return a snapshot of each client, sorted by client id."""
        return [client.info for _, client in sorted(self.by_id.items())]

    def reconnect_all(self) -> None:
        """Ask all clients to open new connections, because this proxy is about to close.

        A client is skipped if it has no open stream, or does not read its stream.
        """
        for client in list(self.by_id.values()):
            self._reconnect_count += 1
            nonce = m.ReconnectEndpointsCommand(nonce=f"{self._reconnect_count}")
            client.send_command(m.TelemetryCommand(reconnect_endpoints_command=nonce))

    def drain(self) -> None:
        """End all telemetry streams. Clients then open them at another proxy."""
        for client in list(self.by_id.values()):
            for stream in client.streams:
                stream.end(StatusCode.UNAVAILABLE, "The proxy is shutting down.")

    def _handle_broker_request(
        self, client: Client, command: Command, respond: Callable[[Command], None]
    ) -> None:
        """Pass a request from a broker to the current handler."""
        self.on_broker_request(client, command, respond)


def _ignore_request(client: Client, command: Command, respond: Any) -> None:
    """Ignore a request from a broker, because no handler is set."""
