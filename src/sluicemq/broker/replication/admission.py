"""Access to the HA port: only slaves that are allowed to copy the log may connect.

The log contains all messages of all topics, and RocketMQ's HA protocol has no authentication. There
are two checks:

- `AddressCheck` compares the address of a slave with `sluiceReplicaPeers`.
- `TicketCheck` requires a ticket if the master has access control and no `sluiceReplicaPeers`. A
  master creates a random ticket each time it becomes master. It sends the ticket to slaves in the
  response to SLUICE_FOLLOW_STATE (900301), a request that must be signed by an administrator. The
  slave sends the ticket as the first frame of its HA connection (`wire.ha`), so the ticket admits
  this connection and not the whole address.

A Java slave has no ticket. Its address must be listed in `sluiceReplicaPeers`.

A ticket is also accepted where none is required. A slave therefore does not have to know whether
its master has access control, which may change when the master restarts.
"""

from collections.abc import Callable
from hmac import compare_digest
from typing import Final

from sluicemq.acl.rules import address_numbers, parse_pattern
from sluicemq.broker.settings import Settings
from sluicemq.errors import ConfigurationError
from sluicemq.model.ids import Host
from sluicemq.net.stream import ByteStream, StreamProtocol
from sluicemq.wire.ha import FIRST_BYTES_MIN, TICKET_BYTES, TICKET_FRAME_BYTES, decode_ticket

NO_TICKET: Final = bytes(TICKET_BYTES)
"""Compared with the required ticket if a slave sent none."""


class AddressCheck:
    """The check of a slave's address against `sluiceReplicaPeers`.

    Without `sluiceReplicaPeers` every address passes. This check comes after that of the listening
    address (design/0011).
    """

    def __init__(self, settings: Settings) -> None:
        """Create the check. `settings` are read for each connection, because they may change."""
        self._settings = settings

    def check(self, host: Host) -> None:
        """Raise ConfigurationError if a slave at `host` may not connect.

        It may connect if its address matches a pattern of the setting sluiceReplicaPeers, or if
        that setting is empty.
        """
        patterns = self._settings.broker.ha_peers
        address = address_numbers(host.address)
        is_listed = any(parse_pattern(pattern).matches(address) for pattern in patterns)
        if patterns and not is_listed:
            raise ConfigurationError(
                f"{host.address} is not listed in sluiceReplicaPeers, so it may not copy the log.",
                fix="Add its address to sluiceReplicaPeers if it is a replica of this broker.",
            )


class TicketCheck:
    """The protocol of a slave's HA connection until the slave has sent the ticket.

    Afterwards it passes everything on to the protocol that `accept` created.
    """

    def __init__(
        self, stream: ByteStream, accept: Callable[[ByteStream], StreamProtocol], ticket: bytes
    ) -> None:
        """Create the check of the connection `stream` of a slave.

        `ticket` is the secret that the slave must send first. If it is b"", none is required.
        `accept(stream)` returns the protocol that receives the bytes after the ticket. It may raise
        ConfigurationError to refuse the slave. It is called when the ticket has been checked, or
        here if none is required.
        """
        self._stream = stream
        self._accept = accept
        self._ticket = ticket
        self._protocol: StreamProtocol | None = None if ticket else accept(stream)
        self._received = b""
        self._is_open = False

    def data_received(self, data: bytes) -> None:
        """Check the ticket at the start of the connection, and pass all other bytes on.

        Bytes are kept until there are enough to decide whether they begin with a ticket. A ticket
        is removed from them, even if none is required. After the check, `accept` is called and gets
        the other bytes.

        Raises ConfigurationError if a ticket is required and is missing or wrong, and what `accept`
        and its protocol raise.
        """
        if not self._is_open:
            data = self._received = self._received + data
            # The first FIRST_BYTES_MIN bytes show whether a ticket follows: every other first
            # frame of a slave has at least this size. A ticket frame must be complete.
            sent_ticket = decode_ticket(data)
            needed_bytes = FIRST_BYTES_MIN if sent_ticket is None else TICKET_FRAME_BYTES
            if len(data) < needed_bytes:
                return
            self._check_ticket(sent_ticket)
            self._is_open = True
            self._received = b""
            if sent_ticket is not None:
                data = data[TICKET_FRAME_BYTES:]

        if self._protocol is None:
            self._protocol = self._accept(self._stream)
        if data:
            self._protocol.data_received(data)

    def _check_ticket(self, sent_ticket: bytes | None) -> None:
        """Raise ConfigurationError if a ticket is required and the sent one is missing or wrong."""
        # An empty `_ticket` means that none is required.
        if self._ticket and not compare_digest(self._ticket, sent_ticket or NO_TICKET):
            raise ConfigurationError(
                f"{self._stream.remote} asks for the commit log without a valid ticket.",
                fix="Configure innerClientAuthenticationCredentials on a SluiceMQ slave, so "
                "that it receives a ticket. Add the address of a Java slave to "
                "sluiceReplicaPeers.",
            )

    def resume_writing(self) -> None:
        """Tell the slave's protocol, if there is one, that the connection accepts more bytes."""
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self) -> None:
        """Tell the slave's protocol, if there is one, that the connection has ended."""
        if self._protocol is not None:
            self._protocol.connection_lost()
