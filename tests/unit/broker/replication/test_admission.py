"""Access to the HA port: tickets that arrive in any pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.broker.replication.admission import TicketCheck
from sluicemq.errors import ConfigurationError
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Peer
from sluicemq.wire.ha import (
    TICKET_BYTES,
    SlaveHandshake,
    encode_slave_handshake,
    encode_slave_report,
    encode_ticket,
)

TICKET = bytes(range(TICKET_BYTES))
GREETINGS = [
    encode_slave_report(0, failover=False), encode_slave_report(-1, failover=False),
    encode_slave_handshake(SlaveHandshake(7)),
]  # fmt: skip


class Nowhere:
    def write(self, data: bytes, /) -> None: ...

    def close(self) -> None: ...


class User:
    """Record what the ticket check passes on."""

    def __init__(self) -> None:
        self.heard, self.told = b"", list[str]()

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def resume_writing(self) -> None:
        self.told.append("writable")

    def connection_lost(self) -> None:
        self.told.append("lost")


def stream() -> Peer:
    return Peer(Nowhere(), Host("10.0.0.7", 1), Host("10.0.0.1", 10912))


@given(
    first=st.sampled_from(GREETINGS), needed=st.booleans(), shown=st.booleans(),
    cuts=st.lists(st.integers(1, 60), max_size=5),
)  # fmt: skip
def test_bytes_behind_a_ticket_are_passed_on_in_any_pieces(
    first: bytes, needed: bool, shown: bool, cuts: list[int]
) -> None:
    user, said = User(), first + b"and more"
    door = TicketCheck(stream(), lambda _: user, TICKET if needed else b"")
    data = (encode_ticket(TICKET) if shown else b"") + said
    ends = sorted({*cuts, len(data)})
    pieces = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def say() -> None:
        for piece in pieces:
            door.data_received(piece)

    if needed and not shown:
        with pytest.raises(ConfigurationError, match="sluiceReplicaPeers"):
            say()
        assert not user.heard
    else:
        say()
        assert user.heard == said


@pytest.mark.parametrize("shown", [bytes(TICKET_BYTES), TICKET[::-1]])
def test_a_wrong_ticket_is_refused(shown: bytes) -> None:
    user = User()
    door = TicketCheck(stream(), lambda _: user, TICKET)
    with pytest.raises(ConfigurationError):
        door.data_received(encode_ticket(shown) + GREETINGS[0])
    door.resume_writing()
    door.connection_lost()
    assert (user.heard, user.told) == (b"", [])


def test_events_are_passed_on_to_the_protocol() -> None:
    user = User()
    door = TicketCheck(stream(), lambda _: user, TICKET)
    door.data_received(encode_ticket(TICKET) + GREETINGS[0])
    door.resume_writing()
    door.connection_lost()
    assert user.told == ["writable", "lost"]
