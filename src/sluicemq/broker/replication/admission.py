"""The door of the HA port: who is let in shows a ticket first, where requests need rights.

The log holds all messages of all topics, and RocketMQ's protocol knows no login. So a master with
access control and without sluiceReplicaPeers has a ticket, another one in each role, that it tells
whoever follows its state (900301, which an admin has to sign). A slave of ours shows it as the
first thing it says on its stream (`wire.ha`): the stream itself is let in, and not the address it
comes from. Java's slaves have none and have to be named in sluiceReplicaPeers, by which a whole
address is let in.

A ticket is read wherever one is shown, so that a slave need not know whether its master has just
been started without access control.
"""

import logging
from collections.abc import Callable
from hmac import compare_digest
from typing import Final

from sluicemq.errors import ConfigurationError
from sluicemq.net.stream import ByteStream, StreamProtocol
from sluicemq.wire.ha import FIRST_BYTES_MIN, TICKET_BYTES, TICKET_FRAME_BYTES, decode_ticket

log = logging.getLogger(__name__)

NO_TICKET: Final = bytes(TICKET_BYTES)


class Doorkeeper:
    """The user of a slave's stream: `accept` makes the one behind the door, at once when no
    `ticket` is needed (b"")."""

    def __init__(
        self, stream: ByteStream, accept: Callable[[ByteStream], StreamProtocol], ticket: bytes
    ) -> None:
        """Raises ConfigurationError, of `accept`."""
        self._stream, self._accept, self._ticket = stream, accept, ticket
        self._user: StreamProtocol | None = None if ticket else accept(stream)
        self._said = b""
        self._is_open = False

    def data_received(self, data: bytes) -> None:
        """Raises ConfigurationError for a stranger, and what the user raises."""
        if not self._is_open:
            data = self._said = self._said + data
            shown = decode_ticket(data)
            if len(data) < (FIRST_BYTES_MIN if shown is None else TICKET_FRAME_BYTES):
                return
            if self._ticket and not compare_digest(self._ticket, shown or NO_TICKET):
                raise ConfigurationError(
                    f"{self._stream.remote} asks for the log and has not shown that it may.",
                    fix="A slave of ours signs with innerClientAuthenticationCredentials; name "
                    "the address of a Java one in sluiceReplicaPeers.",
                )
            self._is_open, self._said = True, b""
            data = data if shown is None else data[TICKET_FRAME_BYTES:]
        if self._user is None:
            self._user = self._accept(self._stream)
        if data:
            self._user.data_received(data)

    def resume_writing(self) -> None:
        if self._user is not None:
            self._user.resume_writing()

    def connection_lost(self) -> None:
        if self._user is not None:
            self._user.connection_lost()
