"""One stream of an HTTP/2 connection: a request and its response."""

from typing import Protocol

from sluicemq.net import http2_limits as limits
from sluicemq.wire import http2 as h


class StreamConnection(Protocol):
    """What a stream uses of its connection: `connection.Http2Connection`."""

    stream_window: int
    """The send window that the client's SETTINGS give to each stream."""
    send_window: int
    """The number of bytes that the client accepts on all streams together."""
    frame_bytes_max: int
    """The largest payload of a frame that the client accepts."""
    queued_bytes: int
    """Response bytes of all streams that wait for a window."""
    stalled_streams: "dict[int, Stream]"
    """Streams whose response bytes wait for a window, by id."""
    largest_delta: int
    """An upper bound of the `window_delta` of all streams."""

    @property
    def header_list_bytes(self) -> int:
        """The size of the header list that was read last."""
        ...

    def write(self, data: bytes) -> None:
        """Send whole frames."""
        ...

    def rank_stream(self, stream: "Stream") -> None:
        """Add a stalled stream, with its present window, to the order of stalled streams."""
        ...

    def response_completed(self, stream: "Stream") -> None:
        """Note that all frames of a stream's response are written."""
        ...

    def remove_stream(self, stream: "Stream") -> None:
        """Close a stream and forget it."""
        ...


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
        self, connection: StreamConnection, stream_id: int, headers: dict[str, str]
    ) -> None:
        """Create the stream that a request with `headers` has opened on a connection.

        `stream_id` is its number in the frames.
        """
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
        """Send a whole response. `headers` and `trailers` are encoded header blocks.

        If the flow-control windows have no room for `data`, the rest of it and the trailers wait.
        """
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

        # The whole response fits the windows: three frames in one write.
        connection.send_window -= size
        encode_header = h.encode_frame_header
        last_flags = h.END_HEADERS | h.END_STREAM
        first_frame = encode_header(len(headers), h.HEADERS, h.END_HEADERS, stream_id) + headers
        data_header = encode_header(size, h.DATA, 0, stream_id)
        last_frame = encode_header(len(trailers), h.HEADERS, last_flags, stream_id) + trailers
        connection.write(b"".join((first_frame, data_header, data, last_frame)))
        connection.response_completed(self)

    def send_headers(self, headers: bytes) -> None:
        """Begin a response with an encoded header block."""
        if not self.is_response_complete:
            self.connection.write(h.encode_frame(h.HEADERS, h.END_HEADERS, self.stream_id, headers))

    def send_data(self, data: bytes) -> None:
        """Send bytes of the response, as far as the flow-control windows allow. The rest waits."""
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
        """End the response with trailers, an encoded header block, after all data.

        If data waits for a window, the trailers wait behind it.
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
        """Send the waiting bytes, as far as the flow-control windows allow.

        If some are left, update the stream's place in the order of waiting streams.
        """
        while self.send_data_frame():
            pass
        if self._outgoing is not None and self._rank != self.window_delta:
            self.update_rank()
            self.connection.rank_stream(self)

    def update_rank(self) -> None:
        """Note that the connection orders the stream by its present window."""
        self._rank = self.window_delta

    def send_data_frame(self) -> bool:
        """Send one frame of the waiting bytes. Return whether a frame was sent.

        No frame is sent if no bytes wait, or if a window is used up. After the last bytes, the
        trailers are sent, if there are any.
        """
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
        """End the stream with this error code (RST_STREAM), and cancel the request."""
        if not self.is_closed:
            self.connection.write(h.encode_rst_stream(self.stream_id, code))
            self.connection.remove_stream(self)
            self.cancelled()

    # ------------------------------------------------------------- called by the connection

    def close(self) -> None:
        """Close the stream, and drop the bytes of the response that wait."""
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
        """Count `size` bytes of DATA in the receive window. Return False if it is exceeded.

        When half of the window is used, the client is allowed to send these bytes again.
        """
        self._unreturned_bytes += size
        if self._unreturned_bytes > limits.STREAM_WINDOW_BYTES:
            return False
        if self._unreturned_bytes > limits.STREAM_WINDOW_BYTES // 2 and not self.is_half_closed:
            self.connection.write(h.encode_window_update(self.stream_id, self._unreturned_bytes))
            self._unreturned_bytes = 0
        return True
