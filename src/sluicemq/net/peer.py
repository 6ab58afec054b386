"""One connection as a handler sees it, whatever carries it: a socket or `memory.py`.

`labels` is free for handlers (who it is, which groups it belongs to). `write` takes whole frames in
any order; `ask` sends a request to the client, whose answer carries its opaque and the response
flag (spec/remoting.md §4).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from sluicemq.model.ids import Host, encode_host
from sluicemq.wire.frames import FLAG_ONEWAY, SERVER_LANGUAGE, Command, encode

NOWHERE: Final = Host("0.0.0.0", 0)
"""An address that is not known."""
_IPV4_IN_IPV6: Final = "::ffff:"


class Carrier(Protocol):
    """What carries the bytes: the part of asyncio's transports that is needed here."""

    def write(self, data: bytes, /) -> None: ...

    def close(self) -> None: ...


def host_of(name: Any) -> Host:
    """A socket name as a host: IPv4 that came in over an IPv6 socket is IPv4."""
    if not isinstance(name, tuple) or len(name) < 2:
        return NOWHERE
    address = str(name[0]).partition("%")[0]
    return Host(address.removeprefix(_IPV4_IN_IPV6), int(name[1]))


class Peer:
    """One accepted connection.

    `remote` is the client's address, `remote_bytes` its stored form; `local` is the address by
    which the client reached us. `idle_sweeps` counts the sweeps since a byte went either way.
    `is_trusted` when access rules have let a request of it pass; `refused` counts those before.
    """

    __slots__ = (
        "_asked", "_carrier", "_opaque", "closed", "idle_sweeps", "is_trusted", "labels", "local",
        "refused", "remote", "remote_bytes",
    )  # fmt: skip

    def __init__(self, carrier: Carrier, remote: Host, local: Host) -> None:
        self._carrier = carrier
        self._asked: dict[int, Callable[[Command], None]] = {}
        self._opaque = 0
        self.remote = remote
        self.remote_bytes = encode_host(remote)
        self.local = local
        self.labels: dict[str, Any] = {}
        self.closed = False
        self.idle_sweeps = 0
        self.is_trusted = False
        self.refused = 0

    def carry(self, carrier: Carrier) -> None:
        """Bytes go through `carrier` from now on (TLS)."""
        self._carrier = carrier

    def write(self, frame: bytes) -> None:
        """Send whole frames; ignored when the connection is closed."""
        if not self.closed and frame:
            self.idle_sweeps = 0
            self._carrier.write(frame)

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """One frame in pieces that will not change. A socket takes them as they are; a carrier
        without `writelines` gets a copy."""
        write = getattr(self._carrier, "writelines", None)
        if write is None:
            self.write(b"".join(pieces))
        elif not self.closed:
            self.idle_sweeps = 0
            write(pieces)

    def close(self) -> None:
        """Close when what was written has left."""
        if not self.closed:
            self.closed = True
            self._carrier.close()

    def notify(self, command: Command) -> None:
        """A one-way request to the client."""
        command.flag |= FLAG_ONEWAY
        self.write(self._numbered(command))

    def ask(self, command: Command, on_answer: Callable[[Command], None]) -> int:
        """A request to the client without waiting: `on_answer` is called with its answer, if one
        comes. Returns its number, for `give_up`."""
        frame = self._numbered(command)
        self._asked[command.opaque] = on_answer
        self.write(frame)
        return command.opaque

    def give_up(self, number: int) -> None:
        """An answer to that request is not wanted any more."""
        self._asked.pop(number, None)

    def _numbered(self, command: Command) -> bytes:
        """Our own numbers: those of the other direction do not matter (spec/remoting.md §4)."""
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        command.opaque = self._opaque
        command.language = SERVER_LANGUAGE
        return encode(command)

    def answered(self, command: Command) -> None:
        """An answer came in. One that nobody waits for (any more) is dropped."""
        on_answer = self._asked.pop(command.opaque, None)
        if on_answer is not None:
            on_answer(command)

    def lost(self) -> None:
        """The connection is gone; no answer comes any more."""
        self.closed = True
        self._asked.clear()

    def __repr__(self) -> str:
        return f"<peer {self.remote}{' closed' if self.closed else ''}>"
