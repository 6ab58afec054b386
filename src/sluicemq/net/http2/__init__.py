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

from sluicemq.net.http2.connection import Http2Connection, Http2Server
from sluicemq.net.http2.stream import Stream

__all__ = ["Http2Connection", "Http2Server", "Stream"]
