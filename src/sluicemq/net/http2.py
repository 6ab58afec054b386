"""The listening side of HTTP/2 (RFC 9113), as far as gRPC needs it.

    socket -> Http2Connection -> Stream.begun, .received, .lost
    Stream.respond, .start, .write, .finish -> frames -> one write a turn

A stream is one request and its answer; what it means is up to a subclass (`grpc.Call`). There is no
task and no future: methods are called as frames come in, and what is sent leaves when the chunk is
done, or with the next iteration of the loop.

Of the protocol all is here that a client may send: settings, windows in both directions, padding,
trailers, resets, pings, blocks in pieces. Not here: push, and priorities, which are passed over.

What bounds a client, beside `accept.py`:

- streams at once; one more, or any while it does not take the answers it has, is refused, which
  clients repeat by themselves;
- windows: of a stream and of the connection so many bytes may be on their way to us. What answers
  a client has no window for waits here, and is counted;
- headers: bytes of a block and of the list it becomes; those of the streams that are open count
  as pending, for a block of a few bytes may name a table's entries again and again;
- frames that cost and do nothing (PING, SETTINGS, empty DATA, resets of what was just asked): so
  many, and a few for each frame that is of use, then the connection ends with ENHANCE_YOUR_CALM;
- time: each frame of any kind is charged to the connection, and so is each message of a frame. A
  connection that has used its share is not read from until its turn comes (`limits.Shares`).

The work of a frame does not grow with the number of streams. A stream's window is kept as its
difference from the window that SETTINGS give to all streams, so SETTINGS change one number. The
streams whose bytes wait are ordered by their windows: a grant for the connection looks at the one
with the largest window, and if that is closed, all are.

A server that closes tells its clients first (`drain`): GOAWAY names no stream yet, so that nothing
on its way is lost; a PING later it names the last one, and the connection closes when all streams
have their answers.
"""

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Callable
from typing import Final, cast

from sluicemq.net.accept import Accepted, OnPeer, Server
from sluicemq.net.limits import PENDING_SMALL, SERVER_LIMITS, ServerLimits, Shares
from sluicemq.net.openssl import TlsAcceptor
from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import LIST_BYTES_MAX, HeaderReader

log = logging.getLogger(__name__)

STREAMS_MAX: Final = 1024
"""At once, of a connection. A Java client's asynchronous sends and long polls share one."""
STREAM_WINDOW_BYTES: Final = 1 << 20
CONNECTION_WINDOW_BYTES: Final = 4 << 20
BLOCK_BYTES_MAX: Final = LIST_BYTES_MAX
COSTLY_FRAMES: Final = 1000
COSTLY_PER_USE: Final = 4
"""Clients that measure the path send a PING, and grant windows, for nearly each frame of data."""
RESETS: Final = 200
"""More than the requests that were answered: deadlines that pass together."""
RANKS_LOOSE: Final = 64
"""Entries that mean nothing and may stay in the order of stalled streams."""
LINGER_S: Final = 1.0
DRAIN_PING: Final = b"draining"
DRAIN_STEP_S: Final = 1.0

_SETTINGS: Final = h.settings(
    {
        h.Setting.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
        h.Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        h.Setting.MAX_HEADER_LIST_SIZE: LIST_BYTES_MAX,
    }
) + h.window_update(0, CONNECTION_WINDOW_BYTES - h.WINDOW_BYTES)


class Stream:
    """One request and its answer. What is sent on a stream that is over goes nowhere."""

    __slots__ = (
        "_end", "_outgoing", "_ranked", "_received_bytes", "connection", "headers", "headers_bytes",
        "is_half", "is_over", "number", "window_delta",
    )  # fmt: skip

    def __init__(self, connection: "Http2Connection", number: int, headers: dict[str, str]) -> None:
        self.connection = connection
        self.number = number
        self.headers = headers
        self.headers_bytes = connection.list_bytes
        self.is_half = False
        """The client has sent all it wants to."""
        self.is_over = False
        self.window_delta = 0
        """By how many bytes its window is larger than `connection.stream_window`."""
        self._ranked: int | None = None  # the difference by which the connection orders it
        self._received_bytes = 0  # that it has not been given back
        self._outgoing: bytearray | None = None  # what there is no window for
        self._end: bytes | None = None  # the trailers behind it

    # ------------------------------------------------------------------- what the client does

    def begun(self) -> None:
        """The headers are here."""
        raise NotImplementedError

    def received(self, data: bytes) -> None:
        """Bytes are here; with `is_half` they are the last ones."""
        raise NotImplementedError

    def lost(self) -> None:
        """The client has given up, or is gone; nothing that is sent reaches it."""
        raise NotImplementedError

    def go_on(self) -> None:
        """The connection's turn has come after `Http2Connection.resume_later`."""

    @property
    def window(self) -> int:
        """How many bytes the client takes on this stream; below 0 after SETTINGS that lower it."""
        return self.connection.stream_window + self.window_delta

    @property
    def is_ended(self) -> bool:
        """The answer is whole, though its end may still wait for a window."""
        return self.is_over or self._end is not None

    # ------------------------------------------------------------------------- what is sent

    def respond(self, headers: bytes, data: bytes, trailers: bytes) -> None:
        """A whole answer, two encoded blocks around its bytes. HOT."""
        connection, number, size = self.connection, self.number, len(data)
        if self.is_ended:
            return
        if size > connection.frame_bytes_max or size > self.window or size > connection.window:
            self.start(headers)
            self.write(data)
            self.finish(trailers)
            return
        connection.window -= size
        parts = (
            h.head(len(headers), h.HEADERS, h.END_HEADERS, number), headers,
            h.head(size, h.DATA, 0, number), data,
            h.head(len(trailers), h.HEADERS, h.END_HEADERS | h.END_STREAM, number), trailers,
        )  # fmt: skip
        connection.write(b"".join(parts))
        connection.ended(self)

    def start(self, headers: bytes) -> None:
        """The headers of an answer, an encoded block."""
        if not self.is_ended:
            self.connection.write(h.frame(h.HEADERS, h.END_HEADERS, self.number, headers))

    def write(self, data: bytes) -> None:
        """Bytes of an answer, as fast as the client takes them."""
        if self.is_ended or not data:
            return
        connection = self.connection
        connection.queued_bytes += len(data)
        if self._outgoing is None:
            self._outgoing = bytearray(data)
            connection.stalled[self.number] = self
        else:
            self._outgoing += data
        self.send_frames()

    def finish(self, trailers: bytes) -> None:
        """The end of an answer, an encoded block, behind all that was sent."""
        if self.is_ended:
            return
        if self._outgoing is not None:
            self._end = trailers
        else:
            flags = h.END_HEADERS | h.END_STREAM
            self.connection.write(h.frame(h.HEADERS, flags, self.number, trailers))
            self.connection.ended(self)

    def send_frames(self) -> None:
        """Send all of what waits that the windows let through."""
        while self.send_frame():
            pass
        if self._outgoing is not None and self._ranked != self.window_delta:
            self.note_rank()
            self.connection.rank(self)

    def note_rank(self) -> None:
        """The connection orders the stream by the window that it has now."""
        self._ranked = self.window_delta

    def send_frame(self) -> bool:
        """Send a frame of what waits. Return whether the windows let it through."""
        connection, waiting = self.connection, self._outgoing
        if waiting is None:
            return False
        size = min(len(waiting), self.window, connection.window, connection.frame_bytes_max)
        if size <= 0:
            return False
        connection.write(h.frame(h.DATA, 0, self.number, bytes(waiting[:size])))
        del waiting[:size]
        self.window_delta -= size
        connection.window -= size
        connection.queued_bytes -= size
        if not waiting:
            self._outgoing = self._ranked = None
            del connection.stalled[self.number]
            if self._end is not None:
                end, self._end = self._end, None
                self.finish(end)
        return True

    def reset(self, code: h.Code) -> None:
        """Break it off: the client has broken a rule."""
        if not self.is_over:
            self.connection.write(h.reset(self.number, code))
            self.connection.forget(self)
            self.lost()

    # ------------------------------------------------------- what the connection does with it

    def close(self) -> None:
        """It is over: what waits is dropped."""
        self.is_over = True
        if self._outgoing is not None:
            self.connection.queued_bytes -= len(self._outgoing)
            self.connection.stalled.pop(self.number, None)
            self._outgoing = self._end = None

    def granted(self, more: int) -> bool:
        """Widen the window by `more` bytes. Return False when it is above the protocol's limit."""
        self.window_delta += more
        connection = self.connection
        connection.largest_delta = max(connection.largest_delta, self.window_delta)
        return self.window <= h.WINDOW_BYTES_MAX

    def take(self, size: int) -> bool:
        """So many bytes came in. False: more than it was given."""
        self._received_bytes += size
        if self._received_bytes > STREAM_WINDOW_BYTES:
            return False
        if self._received_bytes > STREAM_WINDOW_BYTES // 2 and not self.is_half:
            self.connection.write(h.window_update(self.number, self._received_bytes))
            self._received_bytes = 0
        return True


MakeStream = Callable[["Http2Connection", int, dict[str, str]], Stream]


class Http2Connection(Accepted):
    """One accepted socket: frames in, streams, frames out."""

    __slots__ = (
        "_answered", "_block", "_block_flags", "_block_of", "_costly", "_has_begun",
        "_headers_bytes", "_is_draining", "_is_serving", "_last", "_make", "_measured_s",
        "_outgoing", "_ranks", "_reader", "_received_bytes", "_resets", "_rest", "_resumed",
        "_streams", "_useful", "buffered_bytes", "frame_bytes_max", "largest_delta",
        "queued_bytes", "stalled", "stream_window", "window",
    )  # fmt: skip

    def __init__(self, server: "Http2Server", make: MakeStream) -> None:
        super().__init__(server)
        self._make = make
        self._reader = HeaderReader()
        self._streams: dict[int, Stream] = {}
        self._last = 0  # the newest stream
        self._rest = b""  # of a frame
        self._block = bytearray()  # of headers
        self._block_of = self._block_flags = 0
        self._has_begun = False
        self._is_serving = False  # frames are being looked at; what is written leaves afterwards
        self._is_draining = False
        self._outgoing: list[bytes] = []
        self._received_bytes = 0  # that the connection has not been given back
        self._answered = self._resets = self._costly = self._useful = 0
        self._headers_bytes = 0  # of all streams
        self.buffered_bytes = 0
        """What streams hold of requests that are not whole."""
        self.stalled: dict[int, Stream] = {}
        """Streams whose bytes wait for windows."""
        self._ranks: list[tuple[int, int]] = []
        """A heap of (-difference, number) of those streams, the widest window first. An entry whose
        stream is not stalled, or has another difference by now, means nothing."""
        self.largest_delta = 0
        """No stream has a larger difference; after the end of a stream it may be too high."""
        self._measured_s = 0.0  # until when the time is charged
        self._resumed: Stream | None = None  # it has messages left for a later turn
        self.queued_bytes = 0
        self.window = self.stream_window = h.WINDOW_BYTES
        self.frame_bytes_max = h.FRAME_BYTES_MAX

    @property
    def unfinished_bytes(self) -> int:
        return len(self._rest) + len(self._block) + self.buffered_bytes

    @property
    def list_bytes(self) -> int:
        """Of the headers that came last."""
        return self._reader.list_bytes

    @property
    def is_late(self) -> bool:
        """Also when it has not taken a byte of what waits for it."""
        return super().is_late or bool(self.stalled)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Those that have no whole answer yet."""
        return tuple(stream for stream in self._streams.values() if not stream.is_over)

    @property
    def now_s(self) -> float:
        """By the clock that shares out the time."""
        return self._shares.now_s()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if not stream.is_over:
                stream.close()
                stream.lost()

    # ------------------------------------------------------------------------------ bytes in

    def _received(self, data: bytes) -> None:
        if self._rest:
            data, self._rest = self._rest + data, b""
        self._serve(data)

    def _serve(self, whole: bytes | None) -> None:
        """Handle every whole frame, and write once."""
        data = whole or b""
        self._is_serving = True
        try:
            if not self._has_begun:
                data = self._begin(data)
            position = self._feed(data) if self._has_begun else 0
        except h.Http2Error as error:
            self.refuse(str(error), error.code)
            return
        finally:
            self._is_serving = False
        if self._waiting is None and position < len(data):
            self._rest = data[position:]
        if self._received_bytes > CONNECTION_WINDOW_BYTES // 2:
            self._outgoing.append(h.window_update(0, self._received_bytes))
            self._received_bytes = 0
        self._flush()

    def _begin(self, data: bytes) -> bytes:
        """What comes behind the preface, when that is whole. Raises Http2Error when the client
        speaks something else."""
        size = len(h.PREFACE)
        if data[:size] != h.PREFACE[: len(data)]:
            raise h.Http2Error(
                h.Code.PROTOCOL_ERROR,
                "it does not speak HTTP/2, which this port serves for gRPC. Clients of the remoting"
                " protocol are served at the ports of name server and broker.",
            )
        if len(data) < size:
            return data
        self._has_begun = True
        self._outgoing.append(_SETTINGS)
        return data[size:]

    def _feed(self, data: bytes) -> int:
        """Handle the frames in `data`. Return where the first frame begins that is not whole, or
        has to wait for another turn. HOT."""
        shares, peer, unpack, handlers = self._shares, self.peer, h.unpack_head, _HANDLERS
        position, size = 0, len(data)
        self._measured_s = shares.now_s()
        if self._resumed is not None:
            stream, self._resumed = self._resumed, None
            stream.go_on()
        while self._resumed is None and size - position >= h.HEAD_BYTES:
            mark, flags, number = unpack(data, position)
            kind, start = mark & 0xFF, position + h.HEAD_BYTES
            end = start + (mark >> 8)
            if mark >> 8 > h.FRAME_BYTES_MAX:
                raise h.Http2Error(
                    h.Code.FRAME_SIZE_ERROR,
                    f"A frame of {mark >> 8} bytes is above the limit of {h.FRAME_BYTES_MAX}.",
                )
            if end > size or peer.closed:
                return position
            if shares.is_tight and shares.has_to_wait(peer):
                break
            if self._block_of and (kind != h.CONTINUATION or number != self._block_of):
                raise h.Http2Error(h.Code.PROTOCOL_ERROR, "A header block is interrupted.")
            position = end
            if kind < len(handlers):
                handlers[kind](self, flags, number & h.STREAM_MAX, data[start:end])
            else:
                self._count_costly()
            self._measured_s = shares.spent(peer, self._measured_s)
        else:
            if self._resumed is None:
                return position
        self._wait(data[position:])
        return position

    def has_to_pause(self) -> bool:
        """Charge the time until now. Return whether the rest of the work has to wait."""
        self._measured_s = self._shares.spent(self.peer, self._measured_s)
        return self._shares.is_tight and self._shares.has_to_wait(self.peer)

    def resume_later(self, stream: Stream) -> None:
        """Call `stream.go_on` when it is this connection's turn again, before its next frame."""
        self._resumed = stream

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._received_bytes += size
        if self._received_bytes > CONNECTION_WINDOW_BYTES:
            raise h.Http2Error(h.Code.FLOW_CONTROL_ERROR, "More data than the window has room for.")
        if flags & h.PADDED:
            payload = h.unpadded(flags, payload)
        stream = self._streams.get(number)
        if stream is None or stream.is_half:
            self._stray(number)
            return
        if flags & h.END_STREAM:
            stream.is_half = True
        elif not size:
            self._count_costly()
        if stream.is_over:
            self._linger(stream)
        elif stream.take(size):
            self._useful += size > 0
            stream.received(payload)
        else:
            stream.reset(h.Code.FLOW_CONTROL_ERROR)

    def _stray(self, number: int) -> None:
        """A frame of a stream that is over: it may have been on its way. Raises Http2Error for one
        that never was."""
        if number > self._last or not number & 1:
            raise h.Http2Error(h.Code.PROTOCOL_ERROR, f"There is no stream {number}.")
        self._count_costly()

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & (h.PADDED | h.HAS_PRIORITY):
            payload = h.unpadded(flags, payload, priority=True)
        if not number:
            raise h.Http2Error(h.Code.PROTOCOL_ERROR, "HEADERS of no stream.")
        if flags & h.END_HEADERS:
            self._headers(number, payload, flags)
        else:
            self._block_of, self._block_flags = number, flags
            self._block += payload

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if not self._block_of:
            raise h.Http2Error(h.Code.PROTOCOL_ERROR, "A CONTINUATION of nothing.")
        self._count_costly()
        self._block += payload
        if len(self._block) > BLOCK_BYTES_MAX or not payload:
            raise h.Http2Error(
                h.Code.ENHANCE_YOUR_CALM,
                f"A header block is above the limit of {BLOCK_BYTES_MAX} bytes, or grows by none.",
            )
        if flags & h.END_HEADERS:
            block, self._block, self._block_of = bytes(self._block), bytearray(), 0
            self._headers(number, block, self._block_flags)

    def _headers(self, number: int, block: bytes, flags: int) -> None:
        """A whole header block: of a request, or its trailers. It is read in any case, because the
        next ones build on it."""
        headers = self._reader.read(block)
        stream = self._streams.get(number)
        if stream is not None:
            if stream.is_half or not flags & h.END_STREAM:
                raise h.Http2Error(h.Code.PROTOCOL_ERROR, "Headers that are no trailers.")
            stream.is_half = True
            if stream.is_over:
                self._linger(stream)
            else:
                stream.received(b"")
        elif number <= self._last:
            self._stray(number)
        else:
            if not number & 1:
                raise h.Http2Error(h.Code.PROTOCOL_ERROR, f"A client opens no stream {number}.")
            self._last = number
            is_full = self.queued_bytes > self._server.write_buffer_bytes_max
            if self._is_draining or is_full or len(self._streams) >= STREAMS_MAX:
                self._count_costly()
                self.write(h.reset(number, h.Code.REFUSED_STREAM))
                return
            self._useful += 1
            stream = self._streams[number] = self._make(self, number, headers)
            self._headers_bytes += stream.headers_bytes
            stream.is_half = bool(flags & h.END_STREAM)
            stream.begun()

    def _on_reset(self, _flags: int, number: int, payload: bytes) -> None:
        h.read_number(payload, "RST_STREAM")
        stream = self._streams.get(number)
        if stream is None:
            self._stray(number)
            return
        self._resets += 1
        if self._resets > RESETS + self._answered:
            raise h.Http2Error(
                h.Code.ENHANCE_YOUR_CALM, f"{self._resets} requests were reset without an answer."
            )
        is_answered = stream.is_over
        self.forget(stream)
        if not is_answered:
            stream.lost()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise h.Http2Error(h.Code.PROTOCOL_ERROR, "SETTINGS of a stream.")
        self._count_costly()
        if flags & h.ACK:
            return
        found = h.read_settings(payload)
        self.frame_bytes_max = found.get(h.Setting.MAX_FRAME_SIZE, self.frame_bytes_max)
        window = found.get(h.Setting.INITIAL_WINDOW_SIZE, self.stream_window)
        is_wider, self.stream_window = window > self.stream_window, window
        if window + self.largest_delta > h.WINDOW_BYTES_MAX:
            deltas = [stream.window_delta for stream in self._streams.values()]
            self.largest_delta = max(deltas, default=0)
            if window + self.largest_delta > h.WINDOW_BYTES_MAX:
                raise h.Http2Error(h.Code.FLOW_CONTROL_ERROR, "A window is above 2147483647.")
        self.write(h.frame(h.SETTINGS, h.ACK, 0))
        if is_wider:
            self._send_stalled()

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise h.Http2Error(h.Code.PROTOCOL_ERROR, "A PING of a stream, or not of 8 bytes.")
        self._count_costly()
        if not flags & h.ACK:
            self.write(h.frame(h.PING, h.ACK, 0, payload))
        elif payload == DRAIN_PING:
            self.refuse_streams()

    def _on_window(self, _flags: int, number: int, payload: bytes) -> None:
        more = h.read_number(payload, "WINDOW_UPDATE")
        self._count_costly()
        self.frame_sweeps = 0
        if number == 0:
            self.window += more
            if not more or self.window > h.WINDOW_BYTES_MAX:
                raise h.Http2Error(h.Code.FLOW_CONTROL_ERROR, "The window grows by 0 or too much.")
            self._send_stalled()
            return
        stream = self._streams.get(number)
        if stream is None:
            self._stray(number)
        elif not more or not stream.granted(more):
            stream.reset(h.Code.FLOW_CONTROL_ERROR)
        else:
            stream.send_frames()

    def _pass_over(self, _flags: int, _number: int, _payload: bytes) -> None:
        self._count_costly()

    def _on_push(self, _flags: int, _number: int, _payload: bytes) -> None:
        raise h.Http2Error(h.Code.PROTOCOL_ERROR, "Clients do not push.")

    def _count_costly(self) -> None:
        self._costly += 1
        if self._costly > COSTLY_FRAMES + COSTLY_PER_USE * self._useful:
            raise h.Http2Error(
                h.Code.ENHANCE_YOUR_CALM,
                f"{self._costly} frames ask for nothing, {self._useful} for something.",
            )

    # ------------------------------------------------------------------------------ bytes out

    def write(self, data: bytes) -> None:
        """Whole frames, which leave together with others."""
        if not self._outgoing and not self._is_serving:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing:
            self.peer.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
        if self._is_draining and not self._streams:
            self.peer.close()
        held = self.unfinished_bytes + self._headers_bytes
        if self._held or held > PENDING_SMALL:
            self._hold(held)

    def rank(self, stream: Stream) -> None:
        """Note the window of a stream whose bytes wait."""
        if len(self._ranks) > 2 * len(self.stalled) + RANKS_LOOSE:  # most mean nothing any more
            self._ranks = [(-it.window_delta, number) for number, it in self.stalled.items()]
            heapq.heapify(self._ranks)
        else:
            heapq.heappush(self._ranks, (-stream.window_delta, stream.number))

    def _send_stalled(self) -> None:
        """Send frames of the streams whose bytes wait, each from the stream with the widest window,
        so that streams with equal windows take turns, as long as the connection has room."""
        while self._ranks and self.window > 0:
            ranks = self._ranks
            delta, number = ranks[0]
            stream = self.stalled.get(number)
            if stream is None or stream.window_delta != -delta:
                heapq.heappop(ranks)
            elif not stream.send_frame():
                break  # no window is wider
            elif number in self.stalled:
                stream.note_rank()
                heapq.heapreplace(ranks, (-stream.window_delta, number))
            else:
                heapq.heappop(ranks)

    def ended(self, stream: Stream) -> None:
        """The answer is complete. HOT."""
        self._useful += 1
        self._answered += 1
        self.frame_sweeps = 0
        if stream.is_half:
            self.forget(stream)
        else:  # some say in a frame of its own that they have said all
            stream.close()
            self._loop.call_later(LINGER_S, self._linger, stream)

    def _linger(self, stream: Stream) -> None:
        """A client had more to say on a stream that is answered; in the end nobody listens."""
        if not stream.is_half and stream.number in self._streams:
            self.write(h.reset(stream.number, h.Code.NO_ERROR))
            stream.is_half = True
        if stream.is_half:
            self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """A stream is over, however it ended."""
        stream.close()
        if self._streams.pop(stream.number, None) is not None:
            self._headers_bytes -= stream.headers_bytes
        if self._is_draining and not self._streams:
            self._loop.call_soon(self._flush)

    # ------------------------------------------------------------------------------- its end

    def refuse(self, text: str, code: h.Code = h.Code.PROTOCOL_ERROR) -> None:
        """Say why, to the client too, and close."""
        if self._has_begun:
            self._outgoing.append(h.goaway(self._last, code, text))
            self._flush()
        super().refuse(text)

    def drain(self) -> None:
        """Tell the client to go; it is closed when it has all its answers."""
        if not self._has_begun:
            self.peer.close()
            return
        self.write(h.goaway(h.STREAM_MAX, h.Code.NO_ERROR) + h.frame(h.PING, 0, 0, DRAIN_PING))
        self._loop.call_later(DRAIN_STEP_S, self.refuse_streams)

    def refuse_streams(self) -> None:
        """What the client has asked until now is served, and no more."""
        if not self._is_draining and not self.peer.closed:
            self._is_draining = True
            self.write(h.goaway(self._last, h.Code.NO_ERROR))


_Handler = Callable[[Http2Connection, int, int, bytes], None]
_HANDLERS: Final[tuple[_Handler, ...]] = (
    Http2Connection._on_data,
    Http2Connection._on_headers,
    Http2Connection._pass_over,  # PRIORITY
    Http2Connection._on_reset,
    Http2Connection._on_settings,
    Http2Connection._on_push,
    Http2Connection._on_ping,
    Http2Connection._pass_over,  # GOAWAY: it opens no more streams; those that there are go on
    Http2Connection._on_window,
    Http2Connection._on_continuation,
)
"""By kind."""


class Http2Server(Server):
    """Serves streams of one kind on all its ports."""

    def __init__(
        self,
        make: MakeStream,
        shares: Shares,
        *,
        is_guarded: bool = False,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
        tls: TlsAcceptor | None = None,
    ) -> None:
        """`tls`: None serves plain connections only."""
        super().__init__(
            limits, shares, is_guarded=is_guarded, on_disconnect=on_disconnect, tls=tls
        )
        self._make = make

    def _accepted(self) -> Http2Connection:
        return Http2Connection(self, self._make)

    async def drain(self, timeout_s: float) -> None:
        """Tell all clients to go, and wait until they have their answers, at most so long. New
        connections are not accepted any more; `close` comes next."""
        self.stop_listening()
        for connection in self.connections:
            cast(Http2Connection, connection).drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.gone()
