"""The broker of this process as the proxy's backend, between two roles."""

from types import SimpleNamespace
from typing import Any, cast

from sluicemq.client.core.conversations import Call
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Peer
from sluicemq.proxy.backend import PROXY_HOST
from sluicemq.proxy.local import LocalBackend
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command


class Role:
    """What a broker has in one role; it notes in whose name it is asked."""

    def __init__(self) -> None:
        self.guard = SimpleNamespace(account=None)
        self.clock = None
        self.askers: list[object] = []

    def on_disconnect(self, peer: Peer) -> None: ...

    def handle_command(self, command: Command, peer: Peer) -> bytes:
        self.askers.append(self.guard.account)
        return b""


def ask(backend: LocalBackend, remote: Host) -> None:
    link = backend.open_session(remote, Host("127.0.0.1", 8081), lambda _command, _answer: None)
    link.send(Call("here", Command(RequestCode.HEART_BEAT, {})), lambda _answer: None)


def test_what_was_held_is_asked_in_the_name_of_who_asked() -> None:
    old, new = Role(), Role()
    backend = LocalBackend(cast(Any, old), cast(Any, old), lambda _call: None)
    backend.suspend()
    for name in ("alice", "bob", None):
        old.guard.account = name
        ask(backend, Host("10.0.0.9", 9))
    assert not old.askers
    new.guard.account = "somebody else"
    backend.resume(cast(Any, new), cast(Any, new))
    assert new.askers == ["alice", "bob", None]


def test_what_the_proxy_does_by_itself_is_nobodys_request() -> None:
    role = Role()
    backend = LocalBackend(cast(Any, role), cast(Any, role), lambda _call: None)
    role.guard.account = "alice"
    ask(backend, Host("10.0.0.9", 9))
    ask(backend, PROXY_HOST)
    assert role.askers == ["alice", None]
