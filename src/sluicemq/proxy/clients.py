"""Who is connected: clients by their id, what they have said of themselves, and their end."""

from typing import Final

from sluicemq.errors import SluiceError
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Peer
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, Link
from sluicemq.proxy.messages import Code
from sluicemq.wire.frames import Command

CLIENT_ID: Final = "x-mq-client-id"
LANGUAGE: Final = "x-mq-language"
VERSION: Final = "x-mq-client-version"


class StatusError(SluiceError):
    """A call is answered with this status."""

    def __init__(self, code: Code, text: str, *, cure: str = "") -> None:
        super().__init__(text, cure=cure)
        self.code = code


class Client:
    """One client: everything that says the same client id."""

    __slots__ = (
        "connections", "id", "language", "link", "local", "remote", "settings", "telemetry",
        "version",
    )  # fmt: skip

    def __init__(self, call: Call, backend: Backend) -> None:
        headers, peer = call.headers, call.connection.peer
        self.id = headers[CLIENT_ID]
        self.language = headers.get(LANGUAGE, "")
        self.version = headers.get(VERSION, "")
        self.remote: Host = peer.remote
        self.local: Host = peer.local
        self.connections: set[Peer] = set()
        self.settings: m.Settings | None = None
        self.telemetry: Call | None = None
        self.link: Link = backend.link(peer.remote, peer.local, self._asked)

    def _asked(self, command: Command, answer: object) -> None:
        """What a broker asks."""


class Clients:
    """All clients of one proxy."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.by_id: dict[str, Client] = {}

    def of(self, call: Call) -> Client:
        """Whose call it is. Raises StatusError (CLIENT_ID_REQUIRED)."""
        client = self.by_id.get(call.headers.get(CLIENT_ID, ""))
        if client is None:
            if not call.headers.get(CLIENT_ID):
                raise StatusError(Code.CLIENT_ID_REQUIRED, f"The metadata lack {CLIENT_ID}.")
            client = self.by_id[call.headers[CLIENT_ID]] = Client(call, self._backend)
        client.connections.add(call.connection.peer)
        return client

    def disconnected(self, peer: Peer) -> None:
        """A connection is gone, and with their last one the clients that it was of."""
        for client in [it for it in self.by_id.values() if peer in it.connections]:
            client.connections.discard(peer)
            if not client.connections:
                del self.by_id[client.id]
                client.link.close()
