"""An HTTP/2 server (RFC 9113) with the features that gRPC needs.

    socket -> Http2Connection -> Stream.headers_received, .data_received, .cancelled
    Stream.send_response, .send_headers, .send_data, .send_trailers -> frames -> one write

A `Stream` is one request and its response. A subclass (`grpc.Call`) gives it a meaning. There is no
task and no future: the methods of streams are called as frames arrive. Frames that are sent leave
in one write, when the chunk is handled or in the next iteration of the event loop. Everything that
a client may send is supported, except that priorities are ignored. Server push is not supported.

The limits of a connection, and their reasons, are in `http2_limits`.

The work of a frame does not grow with the number of streams. The window of a stream is stored as
its difference from the window that SETTINGS give to all streams, so SETTINGS change one number. The
streams whose bytes wait are ordered by their windows. An increase of the connection's window looks
at the stream with the largest window first; if that is closed, all are.
"""

import asyncio
import contextlib
import heapq
from collections.abc import Callable
from typing import Final, cast

from sluicemq.net import http2_limits as limits
from sluicemq.net.accept import AcceptedConnection, OnPeer, Server
from sluicemq.net.limits import SERVER_LIMITS, UNCOUNTED_BYTES, FairScheduler, ServerLimits
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import HeaderDecoder


class Stream:
    """One stream: a request and its response. A subclass handles the request.

    The `send_*` methods do nothing if the response is complete or the stream is closed.
    """

    __slots__ = (
        "_outgoing",
        "_rank",
        "_trailers",
        "_unreturned_bytes",
        "connection",
        "header_list_bytes",
        "headers",
        "is_closed",
        "is_half_closed",
        "stream_id",
        "window_delta",
    )

    def __init__(
        self, connection: "Http2Connection", stream_id: int, headers: dict[str, str]
    ) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.headers = headers
        """The request headers by lower-case name, with pseudo-headers such as ":path"."""
        self.header_list_bytes = connection.header_list_bytes
        self.is_half_closed = False
        """Whether the client has sent END_STREAM: no data and no trailers follow."""
        self.is_closed = False
        self.window_delta = 0
        """The difference between the stream's send window and `connection.stream_window`."""
        self._rank: int | None = None  # the `window_delta` by which the connection orders it
        self._unreturned_bytes = 0  # received, and not returned by WINDOW_UPDATE
        self._outgoing: bytearray | None = None  # data that waits for a window
        self._trailers: bytes | None = None  # the block that follows `_outgoing`

    # ------------------------------------------------- events, which a subclass implements

    def headers_received(self) -> None:
        """Begin the request. Its headers are in `headers`."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the request. If `is_half_closed`, they are the last, and may be b""."""
        raise NotImplementedError

    def cancelled(self) -> None:
        """Stop the request: the stream was reset, or the connection is gone."""
        raise NotImplementedError

    def resume(self) -> None:
        """Go on after `Http2Connection.resume_later`."""

    @property
    def send_window(self) -> int:
        """The number of bytes that the client accepts on this stream.

        It is negative if SETTINGS have lowered it below the bytes that were sent (RFC 9113
        section 6.9.2).
        """
        return self.connection.stream_window + self.window_delta

    @property
    def is_response_complete(self) -> bool:
        """Whether nothing can be added to the response. Its bytes may still wait for a window."""
        return self.is_closed or self._trailers is not None

    # --------------------------------------------------------------------------- the response

    # Called for each unary call: keep it cheap.
    def send_response(self, headers: bytes, data: bytes, trailers: bytes) -> None:
        """Send a whole response. `headers` and `trailers` are encoded header blocks."""
        connection = self.connection
        stream_id = self.stream_id
        size = len(data)
        if self.is_response_complete:
            return
        window = connection.send_window
        if size > connection.frame_bytes_max or size > self.send_window or size > window:
            self.send_headers(headers)
            self.send_data(data)
            self.send_trailers(trailers)
            return
        connection.send_window -= size
        head = h.encode_frame_header
        end_flags = h.END_HEADERS | h.END_STREAM
        start = head(len(headers), h.HEADERS, h.END_HEADERS, stream_id) + headers
        end = head(len(trailers), h.HEADERS, end_flags, stream_id) + trailers
        connection.write(b"".join((start, head(size, h.DATA, 0, stream_id), data, end)))
        connection.response_completed(self)

    def send_headers(self, headers: bytes) -> None:
        """Begin a response with an encoded header block."""
        if not self.is_response_complete:
            self.connection.write(h.encode_frame(h.HEADERS, h.END_HEADERS, self.stream_id, headers))

    def send_data(self, data: bytes) -> None:
        """Send bytes of the response as far as the windows allow. The rest waits in memory."""
        if self.is_response_complete or not data:
            return
        connection = self.connection
        connection.queued_bytes += len(data)
        if self._outgoing is None:
            self._outgoing = bytearray(data)
            connection.stalled_streams[self.stream_id] = self
        else:
            self._outgoing += data
        self.flush()

    def send_trailers(self, trailers: bytes) -> None:
        """End the response with an encoded header block, when all data has been sent.

        While bytes wait for a window, the block waits behind them.
        """
        if self.is_response_complete:
            return
        if self._outgoing is not None:
            self._trailers = trailers
        else:
            flags = h.END_HEADERS | h.END_STREAM
            self.connection.write(h.encode_frame(h.HEADERS, flags, self.stream_id, trailers))
            self.connection.response_completed(self)

    def flush(self) -> None:
        """Send the waiting bytes that the windows allow."""
        while self.send_data_frame():
            pass
        if self._outgoing is not None and self._rank != self.window_delta:
            self.update_rank()
            self.connection.rank_stream(self)

    def update_rank(self) -> None:
        """Note that the connection orders the stream by its present window."""
        self._rank = self.window_delta

    def send_data_frame(self) -> bool:
        """Send one frame of the waiting bytes. Return False if none wait or a window is closed."""
        connection = self.connection
        outgoing = self._outgoing
        if outgoing is None:
            return False
        size = min(
            len(outgoing), self.send_window, connection.send_window, connection.frame_bytes_max
        )
        if size <= 0:
            return False
        connection.write(h.encode_frame(h.DATA, 0, self.stream_id, bytes(outgoing[:size])))
        del outgoing[:size]
        self.window_delta -= size
        connection.send_window -= size
        connection.queued_bytes -= size
        if not outgoing:
            self._outgoing = self._rank = None
            del connection.stalled_streams[self.stream_id]
            if self._trailers is not None:
                trailers = self._trailers
                self._trailers = None
                self.send_trailers(trailers)
        return True

    def reset(self, code: h.ErrorCode) -> None:
        """Send RST_STREAM with this error code, and cancel the request."""
        if not self.is_closed:
            self.connection.write(h.encode_rst_stream(self.stream_id, code))
            self.connection.remove_stream(self)
            self.cancelled()

    # ------------------------------------------------------------- called by the connection

    def close(self) -> None:
        """Close the stream, and drop the bytes that wait for a window."""
        self.is_closed = True
        if self._outgoing is not None:
            self.connection.queued_bytes -= len(self._outgoing)
            self.connection.stalled_streams.pop(self.stream_id, None)
            self._outgoing = self._trailers = None

    def increase_send_window(self, size: int) -> bool:
        """Add `size` bytes to the send window. Return False if it exceeds 2**31 - 1."""
        self.window_delta += size
        connection = self.connection
        connection.largest_delta = max(connection.largest_delta, self.window_delta)
        return self.send_window <= h.WINDOW_BYTES_MAX

    def count_received(self, size: int) -> bool:
        """Count `size` bytes of DATA against the receive window, and return window to the client.

        Return False if the client has exceeded the window.
        """
        self._unreturned_bytes += size
        if self._unreturned_bytes > limits.STREAM_WINDOW_BYTES:
            return False
        if self._unreturned_bytes > limits.STREAM_WINDOW_BYTES // 2 and not self.is_half_closed:
            self.connection.write(h.encode_window_update(self.stream_id, self._unreturned_bytes))
            self._unreturned_bytes = 0
        return True


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
        super().connection_lost(exc)
        streams = self._streams
        self._streams = {}
        for stream in streams.values():
            if not stream.is_closed:
                stream.close()
                stream.cancelled()

    # ------------------------------------------------------------------------------ bytes in

    def _handle_data(self, data: bytes) -> None:
        """Handle `data` behind the bytes of the frame that was not whole yet."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        self._handle_frames(data)

    def _handle_frames(self, whole: bytes | None) -> None:
        """Handle every whole frame, keep the rest, and send all responses in one write."""
        data = whole or b""
        self._is_handling = True
        try:
            if not self._has_preface:
                data = self._read_preface(data)
            position = self._dispatch_frames(data) if self._has_preface else 0
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
        """Check the client's preface, and send our SETTINGS when it is whole.

        Return the bytes after the preface, or all of `data` if the preface is not whole. Raise
        Http2Error if the client does not speak HTTP/2.
        """
        size = len(h.PREFACE)
        if data[:size] != h.PREFACE[: len(data)]:
            raise h.Http2Error(
                h.ErrorCode.PROTOCOL_ERROR,
                "the client does not speak HTTP/2, which this port serves for gRPC. Clients of the "
                "remoting protocol must connect to the ports of name server and broker.",
            )
        if len(data) < size:
            return data
        self._has_preface = True
        self._outgoing.append(limits.SETTINGS)
        return data[size:]

    # Called for every chunk of every connection: keep it cheap.
    def _dispatch_frames(self, data: bytes) -> int:
        """Handle the frames in `data`. Return where the first frame begins that was not handled.

        That frame is not whole, or waits for a later scheduling round. Raise Http2Error for a
        frame that breaks the protocol or a limit of the connection.
        """
        scheduler = self._scheduler
        peer = self.peer
        unpack = h.unpack_frame_header
        handlers = _HANDLERS
        position = 0
        size = len(data)
        self._measured_s = scheduler.now_s()
        if self._resumed is not None:
            stream = self._resumed
            self._resumed = None
            stream.resume()
        while self._resumed is None and size - position >= h.FRAME_HEADER_BYTES:
            length_and_type, flags, stream_id = unpack(data, position)
            frame_type = length_and_type & 0xFF
            start = position + h.FRAME_HEADER_BYTES
            length = length_and_type >> 8
            end = start + length
            if length > h.FRAME_BYTES_MAX:
                raise h.Http2Error(
                    h.ErrorCode.FRAME_SIZE_ERROR,
                    f"A frame of {length} bytes is above the limit of {h.FRAME_BYTES_MAX}.",
                )
            if end > size or peer.closed:
                return position
            if scheduler.is_tight and scheduler.has_to_wait(peer):
                break
            if self._block_stream_id and (
                frame_type != h.CONTINUATION or stream_id != self._block_stream_id
            ):
                raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "A header block is interrupted.")
            position = end
            if frame_type < len(handlers):
                handlers[frame_type](self, flags, stream_id & h.STREAM_MAX, data[start:end])
            else:
                self._count_overhead()
            self._measured_s = scheduler.spent(peer, self._measured_s)
        else:
            if self._resumed is None:
                return position
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
        """Pass bytes of a request to its stream, and count them against both receive windows.

        Bytes for a closed stream are dropped. Raise Http2Error if the connection's window is
        exceeded; if only the stream's is, the stream is reset.
        """
        size = len(payload)
        self._unreturned_bytes += size
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
        elif not size:
            self._count_overhead()
        if stream.is_closed:
            self._stop_receiving(stream)
        elif stream.count_received(size):
            self._useful_frames += size > 0
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
        """Handle a header block, or keep its first part until CONTINUATION frames complete it."""
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
        """Add to the header block that HEADERS began, and handle the block when it is whole."""
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
        """Handle a whole header block: of a new request, or the trailers of an open one.

        A new stream is refused with REFUSED_STREAM while the connection is drained, has too many
        streams, or has too many response bytes waiting. Raise Http2Error for a block that is
        neither, or a stream id that a client may not use.
        """
        # The block is decoded in any case, because it changes the HPACK table for the next ones.
        headers = self._reader.decode(block)
        stream = self._streams.get(stream_id)
        if stream is not None:
            if stream.is_half_closed or not flags & h.END_STREAM:
                raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "HEADERS that are not trailers.")
            stream.is_half_closed = True
            if stream.is_closed:
                self._stop_receiving(stream)
            else:
                stream.data_received(b"")
        elif stream_id <= self._last_stream_id:
            self._check_was_opened(stream_id)
        else:
            if not stream_id & 1:
                raise h.Http2Error(
                    h.ErrorCode.PROTOCOL_ERROR, f"A client opened stream {stream_id}."
                )
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

    def _on_reset(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Remove a stream, and cancel its request. Raise Http2Error if most requests are reset."""
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
        """Apply the client's SETTINGS and acknowledge them. Wider windows send waiting bytes."""
        if stream_id:
            raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream.")
        self._count_overhead()
        if flags & h.ACK:
            return
        settings = h.read_settings(payload)
        self.frame_bytes_max = settings.get(h.Setting.MAX_FRAME_SIZE, self.frame_bytes_max)
        window = settings.get(h.Setting.INITIAL_WINDOW_SIZE, self.stream_window)
        is_wider = window > self.stream_window
        self.stream_window = window
        if window + self.largest_delta > h.WINDOW_BYTES_MAX:
            # `largest_delta` may be too high since a stream has ended.
            deltas = [stream.window_delta for stream in self._streams.values()]
            self.largest_delta = max(deltas, default=0)
            if window + self.largest_delta > h.WINDOW_BYTES_MAX:
                raise h.Http2Error(h.ErrorCode.FLOW_CONTROL_ERROR, "A window is above 2147483647.")
        self.write(h.encode_frame(h.SETTINGS, h.ACK, 0))
        if is_wider:
            self._send_stalled()

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Answer a PING. The answer to our own PING of a drain begins to refuse new streams."""
        if stream_id or len(payload) != 8:
            raise h.Http2Error(h.ErrorCode.PROTOCOL_ERROR, "PING on a stream, or not of 8 bytes.")
        self._count_overhead()
        if not flags & h.ACK:
            self.write(h.encode_frame(h.PING, h.ACK, 0, payload))
        elif payload == limits.DRAIN_PING:
            self.refuse_new_streams()

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Widen the send window of a stream or (stream 0) the connection; send waiting bytes."""
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
        """Count a frame that asks for nothing. Raise Http2Error if there are too many."""
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
        """Send the written frames. Close the connection if it is drained and has no streams."""
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
        """Add a stalled stream, with its present window, to the order of stalled streams."""
        if len(self._ranks) > 2 * len(self.stalled_streams) + limits.STALE_RANKS:
            # Most entries are invalid: rebuild the heap.
            self._ranks = [(-it.window_delta, key) for key, it in self.stalled_streams.items()]
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
        """Note that all frames of a stream's response are written."""
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
        """Remove an answered stream. If the client has not ended its side, tell it to stop.

        RST_STREAM with NO_ERROR asks a client to stop sending (RFC 9113 section 8.1).
        """
        if not stream.is_half_closed and stream.stream_id in self._streams:
            self.write(h.encode_rst_stream(stream.stream_id, h.ErrorCode.NO_ERROR))
            stream.is_half_closed = True
        if stream.is_half_closed:
            self.remove_stream(stream)

    def remove_stream(self, stream: Stream) -> None:
        """Close a stream and forget it."""
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

        A first GOAWAY names no stream, so that no request in flight is lost. New streams are
        refused after the client's response to a PING, or after DRAIN_PING_TIMEOUT_S. The
        connection closes when all responses are sent.
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
        """Create a server; `make_stream` makes its streams. The rest is as for `Server`."""
        super().__init__(
            limits, scheduler, is_guarded=is_guarded, on_disconnect=on_disconnect, tls=tls
        )
        self._make_stream = make_stream

    def _new_connection(self) -> Http2Connection:
        return Http2Connection(self, self._make_stream)

    async def drain(self, timeout_s: float) -> None:
        """Stop listening, drain all connections, and wait until they are closed.

        Return after `timeout_s` even if some are open. Call `close` afterwards.
        """
        self.stop_listening()
        for connection in self.connections:
            cast(Http2Connection, connection).drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait_disconnected()
