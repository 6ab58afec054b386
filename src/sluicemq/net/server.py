"""The listening side of the remoting protocol.

    socket -> Connection.data_received -> Pieces -> Dispatcher.feed -> one write

A chunk with forty frames is one pass and one write. What bounds a connection: `accept.py`.
"""

from typing import Final

from sluicemq.errors import ProtocolError
from sluicemq.net.accept import REFUSAL, Accepted, OnPeer, Server
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import PENDING_SMALL, SERVER_LIMITS, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import TLS_HELLO, Command, Pieces, encode_answer


class Refusing(Dispatcher):
    """Refuses every request."""

    def __init__(self) -> None:
        super().__init__({}, frame_bytes_max=1 << 20)

    def _unhandled(self, command: Command, peer: Peer) -> bytes | None:
        if command.is_response:
            raise ProtocolError("An answer without a question.")
        peer.count_refusal()
        return encode_answer(command, ResponseCode.NO_PERMISSION, remark=REFUSAL)


REFUSING: Final = Refusing()


class Connection(Accepted):
    """One accepted socket: bytes in, frames to the dispatcher, answers out."""

    __slots__ = ("_dispatcher", "_has_served", "_pieces")

    def __init__(self, server: "RemotingServer", dispatcher: Dispatcher) -> None:
        super().__init__(server)
        self._dispatcher = dispatcher
        self._pieces = Pieces(dispatcher.frame_bytes_max)
        self._has_served = False  # whether a whole frame has come

    @property
    def unfinished_bytes(self) -> int:
        return len(self._pieces)

    def _received(self, data: bytes) -> None:
        """HOT: a chunk of whole frames that the compiled engine takes is done here."""
        run = self._dispatcher.run
        if run is None or self.is_refused or self._held or len(self._pieces):
            self._serve(self._pieces.add(data))
            return
        used = run(data, 0, self.peer, self._shares)
        if used == len(data):
            self.frame_sweeps = 0
            self._has_served = True
        else:
            self._has_served |= used > 0
            self._serve(data[used:] if used else data, is_tried=True)

    def _serve(self, whole: bytes | None, *, is_tried: bool = False) -> None:
        """`is_tried`: the compiled engine has left the first frame."""
        peer, shares, data = self.peer, self._shares, whole or b""
        dispatcher = REFUSING if self.is_refused else self._dispatcher
        try:
            while whole:
                used, answers = dispatcher.feed(whole, peer, shares, is_tried=is_tried)
                is_tried = False
                if answers and not peer.closed:
                    self._transport.write(answers)
                self.frame_sweeps = 0
                self._has_served |= used > 0
                if used == len(whole):
                    if self._held:
                        self._hold(0)
                    return
                if used:
                    whole = whole[used:]
                if shares.is_tight and shares.has_to_wait(peer):
                    self._wait(whole)
                    return
                data = whole
                whole = self._pieces.keep(data)
        except ProtocolError as error:
            text = str(error)
            if data[:1] == bytes((TLS_HELLO,)):
                text = "it speaks TLS, which this port does not serve. Turn TLS off in the client."
            end = self.refuse_after_answers if self._has_served else self.refuse
            end(text)
            return
        if len(self._pieces) > PENDING_SMALL or self._held:
            self._hold(len(self._pieces))


class RemotingServer(Server):
    """Serves one dispatcher on all its ports."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
        tls: TlsAcceptor | None = None,
    ) -> None:
        """`tls`: None serves plain connections only."""
        super().__init__(
            limits, dispatcher.shares, is_guarded=dispatcher.is_guarded,
            on_disconnect=on_disconnect, tls=tls,
        )  # fmt: skip
        self.dispatcher = dispatcher

    def _accepted(self) -> Connection:
        return Connection(self, self.dispatcher)
