"""The connections of an HTTP/2 server: they read frames, apply limits and order what is sent.

The package's docstring explains the design. The limits, and their reasons, are in `http2_limits`.
"""

import asyncio
import contextlib
import heapq
from collections.abc import Callable
from typing import Final, cast

from sluicemq.net import http2_limits as limits
from sluicemq.net.accept import AcceptedConnection, OnPeer, Server
from sluicemq.net.http2.stream import Stream
from sluicemq.net.limits import SERVER_LIMITS, UNCOUNTED_BYTES, FairScheduler, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import HeaderDecoder

StreamFactory = Callable[["Http2Connection", int, dict[str, str]], Stream]
"""Return the stream for a new request: `(connection, stream_id, headers)`."""


class Http2Connection(AcceptedConnection):
    """One accepted HTTP/2 connection with its streams."""

    __slots__ = (
        "_answered_count",
        "_block",
        "_block_flags",
        "_block_stream_id",
        "_has_preface",
        "_headers_bytes",
        "_is_draining",
        "_is_handling",
        "_last_stream_id",
        "_make_stream",
        "_measured_s",
        "_outgoing",
        "_overhead_frames",
        "_ranks",
        "_reader",
        "_resets",
        "_rest",
        "_resumed",
        "_streams",
        "_unreturned_bytes",
        "_useful_frames",
        "buffered_bytes",
        "frame_bytes_max",
        "largest_delta",
        "queued_bytes",
        "send_window",
        "stalled_streams",
        "stream_window",
    )

    def __init__(self, server: "Http2Server", make_stream: StreamFactory) -> None:
        """Create a connection of `server`. `make_stream` creates a stream for each request."""
        super().__init__(server)
        self._make_stream = make_stream
        self._reader = HeaderDecoder()
        self._streams: dict[int, Stream] = {}
        self._last_stream_id = 0  # of the newest stream that the client has opened
        self._rest = b""  # the bytes of a frame that is not whole
        # A header block that CONTINUATION frames continue; stream id 0 means none.
        self._block = bytearray()
        self._block_stream_id = self._block_flags = 0
        self._has_preface = False  # the client has sent the preface
        self._is_handling = False  # frames are being handled; written frames leave afterwards
        self._is_draining = False
        self._outgoing: list[bytes] = []  # frames that leave with the next write
        self._unreturned_bytes = 0  # of DATA, received and not returned by WINDOW_UPDATE
        self._answered_count = self._resets = 0
        self._overhead_frames = self._useful_frames = 0
        self._headers_bytes = 0  # of the header lists of all streams
        self.buffered_bytes = 0
        """Bytes that streams keep of request messages that are not whole."""
        self.stalled_streams: dict[int, Stream] = {}
        """Streams whose response bytes wait for a window, by id."""
        self._ranks: list[tuple[int, int]] = []
        """A heap of (-window_delta, stream id) of the stalled streams, the widest window first. An
        entry is invalid if its stream is not stalled any more or has another `window_delta`."""
        self.largest_delta = 0
        """An upper bound of the `window_delta` of all streams."""
        self._measured_s = 0.0  # the time until which the scheduler has charged this connection
        self._resumed: Stream | None = None  # a stream with messages left for a later round
        self.queued_bytes = 0
        """Response bytes of all streams that wait for a window."""
        self.send_window = self.stream_window = h.WINDOW_BYTES
        self.frame_bytes_max = h.FRAME_BYTES_MAX

    @property
    def unfinished_bytes(self) -> int:
        """The bytes of an unfinished frame, header block, and messages that are not whole."""
        return len(self._rest) + len(self._block) + self.buffered_bytes

    @property
    def header_list_bytes(self) -> int:
        """The size of the header list that was read last."""
        return self._reader.list_bytes

    @property
    def is_waiting_for_client(self) -> bool:
        """Whether the server can go on only when the client sends more or widens a window."""
        return super().is_waiting_for_client or bool(self.stalled_streams)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams whose response is not complete."""
        return tuple(stream for stream in self._streams.values() if not stream.is_closed)

    @property
    def now_s(self) -> float:
        """The time on the scheduler's clock."""
        return self._scheduler.now_s()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close all streams and cancel their requests, because the connection has ended."""
        super().connection_lost(exc)
        streams = self._streams
        self._streams = {}
        for stream in streams.values():
            if not stream.is_closed:
                stream.close()
                stream.cancelled()

    # ------------------------------------------------------------------------------ bytes in

    def _handle_data(self, data: bytes) -> None:
        """Handle bytes from the client, together with the incomplete frame received before."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        self._handle_frames(data)

    def _handle_frames(self, whole: bytes | None) -> None:
        """Handle every whole frame, keep the rest, and send all responses in one write.

        `whole` are bytes of frames; None counts as none. A frame that breaks the protocol closes
        the connection.
        """
        data = whole or b""
        position = 0
        self._is_handling = True
        try:
            if not self._has_preface:
                data = self._read_preface(data)
            if self._has_preface:
                position = self._dispatch_frames(data)
        except h.Http2Error as error:
            self.close_with_reason(str(error), error.code)
            return
        finally:
            self._is_handling = False
        if self._deferred_frames is None and position < len(data):
            self._rest = data[position:]
        if self._unreturned_bytes > limits.CONNECTION_WINDOW_BYTES // 2:
            self._outgoing.append(h.encode_window_update(0, self._unreturned_bytes))
            self._unreturned_bytes = 0
        self._flush()

    def _read_preface(self, data: bytes) -> bytes:
        """Check the client's preface, the fixed bytes with which HTTP/2 begins.

        When it is whole, send our SETTINGS, and return the bytes behind it. Until then, return all
        of `data`. Raise Http2Error if the client does not speak HTTP/2.
        """
        preface_bytes = len(h.PREFACE)
        if data[:preface_bytes] != h.PREFACE[: len(data)]:
            raise h.Http2Error(
                h.ErrorCode.PROTOCOL_ERROR,
                "the client does not speak HTTP/2, which this port serves for gRPC. Clients of the "
                "remoting protocol must connect to the ports of name server and broker.",
            )
        if len(data) < preface_bytes:
            return data
        self._has_preface = True
        self._outgoing.append(limits.SETTINGS)
        return data[preface_bytes:]

    # Called for every chunk of every connection: keep it cheap.
    def _dispatch_frames(self, data: bytes) -> int:
        """Pass each whole frame in `data` to its handler. Return the index of the first one left.

        That frame is incomplete, or waits for a later scheduling round. Raise Http2Error for a
        frame that breaks the protocol or a limit of the connection.
        """
        scheduler = self._scheduler
        peer = self.peer
        unpack = h.unpack_frame_header
        handlers = _HANDLERS
        position = 0
        data_bytes = len(data)
        self._measured_s = scheduler.now_s()

        if self._resumed is not None:
            resumed_stream = self._resumed
            self._resumed = None
            resumed_stream.resume()
        # A stream that calls `resume_later` ends the loop: its messages come before other frames.
        while self._resumed is None and data_bytes - position >= h.FRAME_HEADER_BYTES:
            length_and_type, flags, stream_id = unpack(data, position)
            frame_type = length_and_type & 0xFF
            payload_start = position + h.FRAME_HEADER_BYTES
            payload_bytes = length_and_type >> 8
            frame_end = payload_start + payload_bytes
            if payload_bytes > h.FRAME_BYTES_MAX:
                raise _make_frame_size_error(payload_bytes)
            if frame_end > data_bytes or peer.closed:
                return position
            if scheduler.is_tight and scheduler.has_to_wait(peer):
                break
            # Only CONTINUATION frames of the same stream may follow the first part of a block.
            if self._block_stream_id and (
                frame_type != h.CONTINUATION or stream_id != self._block_stream_id
            ):
                raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "A header block is interrupted.")

            position = frame_end
            if frame_type < len(handlers):
                payload = data[payload_start:frame_end]
                handlers[frame_type](self, flags, stream_id & h.STREAM_MAX, payload)
            else:
                self._count_overhead()
            self._measured_s = scheduler.spent(peer, self._measured_s)
        else:  # the loop has ended without a break
            if self._resumed is None:
                return position

        # The rest waits for a later scheduling round.
        self._defer_frames(data[position:])
        return position

    def has_to_pause(self) -> bool:
        """Charge the time until now. Return whether the rest of the work must wait.

        A stream that must wait calls `resume_later`.
        """
        self._measured_s = self._scheduler.spent(self.peer, self._measured_s)
        return self._scheduler.is_tight and self._scheduler.has_to_wait(self.peer)

    def resume_later(self, stream: Stream) -> None:
        """Call `stream.resume` in a later scheduling round, before the connection's next frame."""
        self._resumed = stream

    # ------------------------------------------------------- frames: (flags, stream id, payload)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle DATA: pass bytes of a request to its stream, and count them in both windows.

        A window is the number of bytes that the client may send before it must wait. Bytes for a
        closed stream are dropped. Raise Http2Error if the window of the connection is exceeded. If
        only the window of the stream is exceeded, the stream is reset.
        """
        # The padding counts, too: the client has taken it from the windows.
        counted_bytes = len(payload)
        self._unreturned_bytes += counted_bytes
        if self._unreturned_bytes > limits.CONNECTION_WINDOW_BYTES:
            raise h.Http2Error(
                h.ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the connection's window."
            )
        if flags & h.PADDED:
            payload = h.remove_padding(flags, payload)
        stream = self._streams.get(stream_id)
        if stream is None or stream.is_half_closed:
            self._check_was_opened(stream_id)
            return

        if flags & h.END_STREAM:
            stream.is_half_closed = True
        elif not counted_bytes:
            self._count_overhead()
        if stream.is_closed:
            self._stop_receiving(stream)
        elif stream.count_received(counted_bytes):
            self._useful_frames += counted_bytes > 0
            stream.data_received(payload)
        else:
            stream.reset(h.ErrorCode.FLOW_CONTROL_ERROR)

    def _check_was_opened(self, stream_id: int) -> None:
        """Ignore a frame of a closed stream, which may have been in flight when it was closed.

        Raise Http2Error if the client never opened the stream.
        """
        if stream_id > self._last_stream_id or not stream_id & 1:
            raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, f"Stream {stream_id} was never opened.")
        self._count_overhead()

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle HEADERS: a whole header block, or the first part of one.

        A first part is kept until CONTINUATION frames complete it. Raise Http2Error for stream 0.
        """
        if flags & (h.PADDED | h.HAS_PRIORITY):
            payload = h.remove_padding(flags, payload, priority=True)
        if not stream_id:
            raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "HEADERS on stream 0.")
        if flags & h.END_HEADERS:
            self._handle_header_block(stream_id, payload, flags)
        else:
            self._block_stream_id = stream_id
            self._block_flags = flags
            self._block += payload

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle CONTINUATION: add to the header block that HEADERS began.

        When the block is whole, it is handled. Raise Http2Error if there is no block, or if it gets
        too large.
        """
        if not self._block_stream_id:
            raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS.")
        self._count_overhead()
        self._block += payload
        if len(self._block) > limits.HEADER_BLOCK_BYTES_MAX or not payload:
            raise h.Http2Error(
                h.ErrorCode.ENHANCE_YOUR_CALM,
                f"A header block is above the limit of {limits.HEADER_BLOCK_BYTES_MAX} bytes, or "
                "has an empty CONTINUATION.",
            )
        if flags & h.END_HEADERS:
            block = bytes(self._block)
            self._block = bytearray()
            self._block_stream_id = 0
            self._handle_header_block(stream_id, block, self._block_flags)

    def _handle_header_block(self, stream_id: int, block: bytes, flags: int) -> None:
        """Handle a whole header block: the headers of a new request, or trailers of an open one.

        A new stream is refused while the connection is being drained, if there are too many
        streams, or if too many response bytes wait. Raise Http2Error if the block is neither, or if
        a client may not use the stream id.
        """
        # The block is decoded in any case, because it changes the HPACK table for the next ones.
        headers = self._reader.decode(block)
        open_stream = self._streams.get(stream_id)
        if open_stream is not None:
            self._handle_trailers(open_stream, flags)
            return
        if stream_id <= self._last_stream_id:
            self._check_was_opened(stream_id)
            return

        # Clients open streams with odd ids.
        if not stream_id & 1:
            raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, f"A client opened stream {stream_id}.")
        self._last_stream_id = stream_id
        is_full = self.queued_bytes > self._server.write_buffer_bytes_max
        if self._is_draining or is_full or len(self._streams) >= limits.STREAMS_MAX:
            self._count_overhead()
            self.write(h.encode_rst_stream(stream_id, h.ErrorCode.REFUSED_STREAM))
            return

        self._useful_frames += 1
        stream = self._streams[stream_id] = self._make_stream(self, stream_id, headers)
        self._headers_bytes += stream.header_list_bytes
        stream.is_half_closed = bool(flags & h.END_STREAM)
        stream.headers_received()

    def _handle_trailers(self, stream: Stream, flags: int) -> None:
        """End a request because its trailers have arrived. Their content is ignored.

        Raise Http2Error if the block does not end the stream, or if it was ended before.
        """
        if stream.is_half_closed or not flags & h.END_STREAM:
            raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "HEADERS that are not trailers.")
        stream.is_half_closed = True
        if stream.is_closed:
            self._stop_receiving(stream)
        else:
            stream.data_received(b"")

    def _on_reset(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Handle RST_STREAM: remove the stream, and cancel its request.

        Raise Http2Error if the client resets most of its requests.
        """
        h.read_integer(payload, "RST_STREAM")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_was_opened(stream_id)
            return
        self._resets += 1
        if self._resets > limits.UNANSWERED_RESETS + self._answered_count:
            raise h.Http2Error(
                h.ErrorCode.ENHANCE_YOUR_CALM,
                f"{self._resets} requests were reset, and only {self._answered_count} answered.",
            )
        is_answered = stream.is_closed
        self.remove_stream(stream)
        if not is_answered:
            stream.cancelled()

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle SETTINGS of the client: apply and acknowledge them.

        If they widen the send windows of streams, waiting bytes are sent. Raise Http2Error if they
        are not valid.
        """
        if stream_id:
            raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream.")
        self._count_overhead()
        if flags & h.ACK:
            return
        settings = h.read_settings(payload)
        self.frame_bytes_max = settings.get(h.Setting.MAX_FRAME_SIZE, self.frame_bytes_max)
        new_window = settings.get(h.Setting.INITIAL_WINDOW_SIZE, self.stream_window)
        is_wider = new_window > self.stream_window
        self.stream_window = new_window
        self._check_stream_windows()
        self.write(h.encode_frame(h.SETTINGS, h.ACK, 0))
        if is_wider:
            self._send_stalled()

    def _check_stream_windows(self) -> None:
        """Raise Http2Error if the new `stream_window` makes a stream's window exceed 2**31 - 1."""
        if self.stream_window + self.largest_delta <= h.WINDOW_BYTES_MAX:
            return
        # `largest_delta` may be too high since a stream has ended.
        deltas = [stream.window_delta for stream in self._streams.values()]
        self.largest_delta = max(deltas, default=0)
        if self.stream_window + self.largest_delta > h.WINDOW_BYTES_MAX:
            raise h.Http2Error(h.ErrorCode.FLOW_CONTROL_ERROR, "A window is above 2147483647.")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle PING: answer it. The answer to our own PING, sent by `drain`, ends new streams.

        Raise Http2Error if it is malformed.
        """
        if stream_id or len(payload) != 8:
            raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "PING on a stream, or not of 8 bytes.")
        self._count_overhead()
        if not flags & h.ACK:
            self.write(h.encode_frame(h.PING, h.ACK, 0, payload))
        elif payload == limits.DRAIN_PING:
            self.refuse_new_streams()

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Handle WINDOW_UPDATE: the client allows more bytes. Send bytes that waited for that.

        Stream 0 means the window of the whole connection. Raise Http2Error if that becomes too
        large; a stream whose window becomes too large is reset.
        """
        increment = h.read_integer(payload, "WINDOW_UPDATE")
        self._count_overhead()
        self.sweeps_since_frame = 0
        if stream_id == 0:
            self.send_window += increment
            if not increment or self.send_window > h.WINDOW_BYTES_MAX:
                raise h.Http2Error(
                    h.ErrorCode.FLOW_CONTROL_ERROR, "WINDOW_UPDATE by 0 or too much."
                )
            self._send_stalled()
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_was_opened(stream_id)
        elif not increment or not stream.increase_send_window(increment):
            stream.reset(h.ErrorCode.FLOW_CONTROL_ERROR)
        else:
            stream.flush()

    def _ignore(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        """Do nothing but count the frame, for frame types without effect here."""
        self._count_overhead()

    def _on_push_promise(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        """Raise Http2Error: only servers may send this frame."""
        raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "A client may not send PUSH_PROMISE.")

    def _count_overhead(self) -> None:
        """Count a frame that requests nothing. Raise Http2Error if there are too many of them."""
        self._overhead_frames += 1
        frames_max = (
            limits.OVERHEAD_FRAMES + limits.OVERHEAD_FRAMES_PER_USEFUL * self._useful_frames
        )
        if self._overhead_frames > frames_max:
            raise h.Http2Error(
                h.ErrorCode.ENHANCE_YOUR_CALM,
                f"{self._overhead_frames} frames asked for nothing, {self._useful_frames} for "
                "something.",
            )

    # ------------------------------------------------------------------------------ bytes out

    def write(self, data: bytes) -> None:
        """Send whole frames, together with others that are written in the same iteration."""
        if not self._outgoing and not self._is_handling:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        """Send the frames that were collected. If the connection is drained, close it.

        It is drained when it accepts no new streams and all others have ended. Also counts the
        bytes of unfinished requests.
        """
        outgoing = self._outgoing
        self._outgoing = []
        if outgoing:
            self.peer.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
        if self._is_draining and not self._streams:
            self.peer.close()
        unfinished = self.unfinished_bytes + self._headers_bytes
        if self._counted_bytes or unfinished > UNCOUNTED_BYTES:
            self._count_unfinished(unfinished)

    def rank_stream(self, stream: Stream) -> None:
        """Put a stream whose bytes wait for a window into the order by its present window."""
        if len(self._ranks) > 2 * len(self.stalled_streams) + limits.STALE_RANKS:
            # Most entries are invalid: rebuild the heap.
            self._ranks = [
                (-stalled.window_delta, stream_id)
                for stream_id, stalled in self.stalled_streams.items()
            ]
            heapq.heapify(self._ranks)
        else:
            heapq.heappush(self._ranks, (-stream.window_delta, stream.stream_id))

    def _send_stalled(self) -> None:
        """Send waiting bytes of all streams, as far as the connection's window allows.

        Each frame is taken from the stream with the widest window, so that streams with equal
        windows take turns.
        """
        while self._ranks and self.send_window > 0:
            ranks = self._ranks
            negative_delta, stream_id = ranks[0]
            stream = self.stalled_streams.get(stream_id)
            if stream is None or stream.window_delta != -negative_delta:
                heapq.heappop(ranks)
            elif not stream.send_data_frame():
                break  # no other stream has a wider window
            elif stream_id in self.stalled_streams:
                stream.update_rank()
                heapq.heapreplace(ranks, (-stream.window_delta, stream_id))
            else:
                heapq.heappop(ranks)

    # Called for each unary call: keep it cheap.
    def response_completed(self, stream: Stream) -> None:
        """Note that all frames of a stream's response are written, and close the stream.

        If the client has ended its request, the stream is removed now. Otherwise it is removed a
        little later.
        """
        self._useful_frames += 1
        self._answered_count += 1
        self.sweeps_since_frame = 0
        if stream.is_half_closed:
            self.remove_stream(stream)
        else:
            # Some clients send END_STREAM later, in a frame of its own.
            stream.close()
            self._loop.call_later(limits.HALF_CLOSE_WAIT_S, self._stop_receiving, stream)

    def _stop_receiving(self, stream: Stream) -> None:
        """Remove a stream that was answered. If the client still sends, ask it to stop.

        RST_STREAM with NO_ERROR asks for that (RFC 9113 section 8.1).
        """
        if not stream.is_half_closed and stream.stream_id in self._streams:
            self.write(h.encode_rst_stream(stream.stream_id, h.ErrorCode.NO_ERROR))
            stream.is_half_closed = True
        if stream.is_half_closed:
            self.remove_stream(stream)

    def remove_stream(self, stream: Stream) -> None:
        """Close a stream and forget it. A drained connection without streams is then closed."""
        stream.close()
        if self._streams.pop(stream.stream_id, None) is not None:
            self._headers_bytes -= stream.header_list_bytes
        if self._is_draining and not self._streams:
            self._loop.call_soon(self._flush)

    # --------------------------------------------------------------------------------- closing

    def close_with_reason(
        self, reason: str, code: h.ErrorCode = h.ErrorCode.PROTOCOL_ERROR
    ) -> None:
        """Log `reason`, send it to the client in a GOAWAY with `code`, and close the connection."""
        if self._has_preface:
            self._outgoing.append(h.encode_goaway(self._last_stream_id, code, reason))
            self._flush()
        super().close_with_reason(reason)

    def drain(self) -> None:
        """Shut the connection down gracefully (RFC 9113 section 6.8).

        A first GOAWAY names no stream, so that no request on its way is lost. New streams are
        refused after the client's answer to a PING, or after DRAIN_PING_TIMEOUT_S. The connection
        closes when all responses are sent.
        """
        if not self._has_preface:
            self.peer.close()
            return
        self.write(
            h.encode_goaway(h.STREAM_MAX, h.ErrorCode.NO_ERROR)
            + h.encode_frame(h.PING, 0, 0, limits.DRAIN_PING)
        )
        self._loop.call_later(limits.DRAIN_PING_TIMEOUT_S, self.refuse_new_streams)

    def refuse_new_streams(self) -> None:
        """Serve the streams that the client has opened, and refuse further ones."""
        if not self._is_draining and not self.peer.closed:
            self._is_draining = True
            self.write(h.encode_goaway(self._last_stream_id, h.ErrorCode.NO_ERROR))


def _make_frame_size_error(payload_bytes: int) -> h.Http2Error:
    """Make the error for a frame whose payload of `payload_bytes` exceeds the limit."""
    return h.Http2Error(
        h.ErrorCode.FRAME_SIZE_ERROR,
        f"A frame of {payload_bytes} bytes is above the limit of {h.FRAME_BYTES_MAX}.",
    )


_FrameHandler = Callable[[Http2Connection, int, int, bytes], None]
_HANDLERS: Final[tuple[_FrameHandler, ...]] = (
    Http2Connection._on_data,
    Http2Connection._on_headers,
    Http2Connection._ignore,  # PRIORITY
    Http2Connection._on_reset,
    Http2Connection._on_settings,
    Http2Connection._on_push_promise,
    Http2Connection._on_ping,
    Http2Connection._ignore,  # GOAWAY: the client opens no more streams; open ones go on
    Http2Connection._on_window_update,
    Http2Connection._on_continuation,
)
"""The handlers by frame type."""


class Http2Server(Server):
    """A server whose connections speak HTTP/2 and whose streams are all of one class."""

    def __init__(
        self,
        make_stream: StreamFactory,
        scheduler: FairScheduler,
        *,
        is_guarded: bool = False,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
        tls: TlsAcceptor | None = None,
    ) -> None:
        """Create a server whose requests become the streams that `make_stream` creates.

        `scheduler` shares the time of the event loop between connections. `is_guarded` means that
        access control decides about requests. `on_disconnect` is called with the peer of each
        connection that has ended. `tls` serves TLS on the same ports; None serves plain connections
        only.
        """
        super().__init__(
            limits, scheduler, is_guarded=is_guarded, on_disconnect=on_disconnect, tls=tls
        )
        self._make_stream = make_stream

    def _new_connection(self) -> Http2Connection:
        return Http2Connection(self, self._make_stream)

    async def drain(self, timeout_s: float) -> None:
        """Stop listening, and shut all connections down gracefully. Wait until they are closed.

        Return after `timeout_s` even if some are open. Call `close` afterwards.
        """
        self.stop_listening()
        for connection in self.connections:
            cast(Http2Connection, connection).drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait_disconnected()
