"""Protected mode: a server that nobody has opened answers its own machine alone.

Whoever connects from elsewhere is not met by silence: every request is answered with a sentence
that names what to do, until the connection is closed for having asked too often. The reasons:
docs/design/0011-listening.md.
"""

import logging

from sluicemq.config.values import ServerConfig
from sluicemq.errors import ProtocolError
from sluicemq.model.addresses import is_loopback
from sluicemq.net.dispatch import Dispatcher
from sluicemq.net.limits import REFUSED_MAX
from sluicemq.net.peer import NOWHERE, Peer
from sluicemq.protocol.codec import encode_answer
from sluicemq.protocol.codes import ResponseCode
from sluicemq.protocol.command import Command

log = logging.getLogger(__name__)

CURES = (
    "Set bindAddress (or --host) there, 0.0.0.0 for all addresses, to serve everybody who reaches "
    "it; aclEnable = true to serve those who have an account; or sluiceProtectedMode = false"
)
REFUSAL = (
    "This server answers clients on its own machine alone (protected mode), because neither an "
    f"address to listen at nor access control is configured. {CURES}."
)


def warn_of_protection(config: ServerConfig) -> None:
    """Says at the start what refused clients will be told: nobody shall look for it in vain."""
    if config.is_protected:
        log.warning(
            "protected mode: only clients on this machine are served, others (in a container all "
            "of outside) are refused. %s", CURES.replace(" there", ""),
        )  # fmt: skip


def is_local(peer: Peer) -> bool:
    """Is the other end on this machine? Who calls an address of its own comes from that."""
    if peer.remote == NOWHERE:  # a Unix socket
        return True
    return is_loopback(peer.remote.address) or peer.remote.address == peer.local.address


class Refusing(Dispatcher):
    """Refuses every request."""

    def __init__(self) -> None:
        super().__init__({}, frame_bytes_max=1 << 20)

    def _unhandled(self, command: Command, peer: Peer) -> bytes | None:
        if command.is_response:
            raise ProtocolError("An answer without a question.")
        peer.refused += 1
        if peer.refused > REFUSED_MAX:
            peer.close()
        return encode_answer(command, ResponseCode.NO_PERMISSION, remark=REFUSAL)


REFUSING = Refusing()
