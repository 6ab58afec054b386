"""What one HTTP/2 connection may use, and the SETTINGS that tell its client.

These limits are enforced by `http2.Http2Connection`, besides those of `accept.py`:

- Streams. A new stream is refused (REFUSED_STREAM, after which clients retry by themselves) if
  there are STREAMS_MAX, or while the client leaves too many response bytes unread.
- Flow control. The windows limit the bytes of requests in flight, for each stream and for the
  connection. Response bytes that the client has no window for wait here, and are counted.
- Headers. The size of a header block and of the list that it becomes are limited. The lists of all
  open streams count as unfinished bytes, because a block of a few bytes may refer to large entries
  of the HPACK table many times.
- Overhead frames, which cost time and ask for nothing: PING, SETTINGS, WINDOW_UPDATE, empty DATA,
  frames of closed streams, and refused streams. A number of them is free, and some more for each
  useful frame. Beyond that the connection ends with ENHANCE_YOUR_CALM, and so it does after too
  many resets of requests without a response.
- Time. Each frame of any kind is charged to the connection, and so is each message of a frame. A
  connection that has used its share is not read from until the scheduler selects it
  (`limits.FairScheduler`).
"""

from typing import Final

from sluicemq.wire import http2 as h
from sluicemq.wire.hpack import HEADER_LIST_BYTES_MAX

STREAMS_MAX: Final = 1024
"""The most open streams of a connection. The asynchronous sends and long polls of a Java client
share one connection."""
STREAM_WINDOW_BYTES: Final = 1 << 20
CONNECTION_WINDOW_BYTES: Final = 4 << 20
HEADER_BLOCK_BYTES_MAX: Final = HEADER_LIST_BYTES_MAX
OVERHEAD_FRAMES: Final = 1000
"""Overhead frames that every connection may send."""
OVERHEAD_FRAMES_PER_USEFUL: Final = 4
"""Clients that measure the path send a PING, and increase windows, for nearly each DATA frame."""
UNANSWERED_RESETS: Final = 200
"""A connection may reset this many requests more than were answered, because many deadlines may
pass at the same time."""
STALE_RANKS: Final = 64
"""Invalid entries that may stay in the order of stalled streams."""
HALF_CLOSE_WAIT_S: Final = 1.0
"""After a response, the time in which the client may still end its side of the stream."""
DRAIN_PING: Final = b"draining"
DRAIN_PING_TIMEOUT_S: Final = 1.0

SETTINGS: Final = h.encode_settings(
    {
        h.Setting.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
        h.Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        h.Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES_MAX,
    }
) + h.encode_window_update(0, CONNECTION_WINDOW_BYTES - h.WINDOW_BYTES)
"""The frames that a server sends first: its SETTINGS, and the window of the connection."""
