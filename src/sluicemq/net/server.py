"""The server of the remoting protocol.

    socket -> Connection.data_received -> FrameBuffer -> Dispatcher.handle_frames -> one write

All frames that arrive in one chunk are handled in one pass, and their responses are sent with one
write. `accept.py` describes the limits of a connection.
"""

from typing import Final

from sluicemq.errors import ProtocolError
from sluicemq.net.accept import PROTECTED_MODE_REFUSAL, AcceptedConnection, OnPeer, Server
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import SERVER_LIMITS, UNCOUNTED_BYTES, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import TLS_HELLO, Command, FrameBuffer, encode_response


class RefusingDispatcher(Dispatcher):
    """Refuses every request with NO_PERMISSION (16) and explains protected mode."""

    def __init__(self) -> None:
        super().__init__({}, frame_bytes_max=1 << 20)

    def _handle_other(self, command: Command, peer: Peer) -> bytes | None:
        """Return a refusal of a request, for protected mode.

        Raise ProtocolError for a response, because this server has sent no request.
        """
        if command.is_response:
            raise ProtocolError("A response was received, but no request was sent.")
        peer.count_refusal()
        return encode_response(command, ResponseCode.NO_PERMISSION, remark=PROTECTED_MODE_REFUSAL)


REFUSING_DISPATCHER: Final = RefusingDispatcher()


class Connection(AcceptedConnection):
    """One accepted connection that carries frames of the remoting protocol."""

    __slots__ = ("_dispatcher", "_frame_buffer", "_has_received_frame")

    def __init__(self, server: "RemotingServer", dispatcher: Dispatcher) -> None:
        """Create a connection of `server`, whose requests go to `dispatcher`."""
        super().__init__(server)
        self._dispatcher = dispatcher
        self._frame_buffer = FrameBuffer(dispatcher.frame_bytes_max)
        self._has_received_frame = False

    @property
    def unfinished_bytes(self) -> int:
        return len(self._frame_buffer)

    # Called for every chunk: keep it cheap.
    def _handle_data(self, data: bytes) -> None:
        """Handle bytes from the client.

        The compiled engine handles the first frames if it knows them; `_handle_frames` handles the
        rest. The engine is not used for a refused connection, or while bytes of a frame are kept.
        """
        run_engine = self._dispatcher.run_engine
        if run_engine is None or self.is_refused or self._counted_bytes or len(self._frame_buffer):
            self._handle_frames(self._frame_buffer.join(data))
            return
        used_bytes = run_engine(data, 0, self.peer, self._scheduler)
        if used_bytes == len(data):
            self.sweeps_since_frame = 0
            self._has_received_frame = True
        else:
            self._has_received_frame |= used_bytes > 0
            self._handle_frames(data[used_bytes:] if used_bytes else data, skip_engine=True)

    def _handle_frames(self, whole: bytes | None, *, skip_engine: bool = False) -> None:
        """Handle frames, write the responses, and keep the bytes of the last incomplete frame.

        `whole` begins with a whole frame, and may continue with others. None means that no frame is
        whole yet. `skip_engine` means that the compiled engine has declined the first frame. If the
        connection must wait for its turn, the rest is handled in a later scheduling round.
        """
        peer = self.peer
        scheduler = self._scheduler
        data = whole or b""
        dispatcher = REFUSING_DISPATCHER if self.is_refused else self._dispatcher
        try:
            while whole:
                used_bytes, responses = dispatcher.handle_frames(
                    whole, peer, scheduler, skip_engine=skip_engine
                )
                skip_engine = False
                if responses and not peer.closed:
                    self._transport.write(responses)
                self.sweeps_since_frame = 0
                self._has_received_frame |= used_bytes > 0
                if used_bytes == len(whole):
                    if self._counted_bytes:
                        self._count_unfinished(0)
                    return
                if used_bytes:
                    whole = whole[used_bytes:]
                if scheduler.is_tight and scheduler.has_to_wait(peer):
                    self._defer_frames(whole)
                    return
                data = whole
                whole = self._frame_buffer.keep_rest(data)
        except ProtocolError as error:
            self._close_after_bad_frame(data, error)
            return
        if len(self._frame_buffer) > UNCOUNTED_BYTES or self._counted_bytes:
            self._count_unfinished(len(self._frame_buffer))

    def _close_after_bad_frame(self, data: bytes, error: ProtocolError) -> None:
        """Close the connection, because `data` begins with a bad frame. `error` says why.

        If good frames came before, their responses are still sent.
        """
        reason = str(error)
        if data[:1] == bytes((TLS_HELLO,)):
            reason = (
                "the client uses TLS, which this port does not serve. Turn TLS off in the client."
            )
        if self._has_received_frame:
            self.close_after_responses(reason)
        else:
            self.close_with_reason(reason)


class RemotingServer(Server):
    """A server that passes the requests of all its connections to one dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
        tls: TlsAcceptor | None = None,
    ) -> None:
        """Create a server that passes requests to `dispatcher`; `start` opens its ports.

        `on_disconnect` is called with the peer of each connection that has ended. `tls` serves TLS
        on the same ports; None serves plain connections only.
        """
        super().__init__(
            limits,
            dispatcher.scheduler,
            is_guarded=dispatcher.is_guarded,
            on_disconnect=on_disconnect,
            tls=tls,
        )
        self.dispatcher = dispatcher

    def _new_connection(self) -> Connection:
        return Connection(self, self.dispatcher)
