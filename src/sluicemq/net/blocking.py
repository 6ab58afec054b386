"""A blocking connection of the remoting protocol, without threads and without an event loop.

Scripts and Spark executors use it. The responses to bulk pulls have megabytes. `receive` reads from
the socket straight into one buffer, which grows to the largest frame and is reused, and the body of
a response is a memoryview of that buffer. So the only copy is the kernel's, and a body is valid
only until the next `receive`. Up to `READ_AHEAD_BYTES` of the next frame are read together with a
frame, and are moved to the front of the buffer when that is necessary.
"""

import socket
import struct
from typing import Final

from sluicemq.errors import ConnectionLostError, RequestTimeoutError
from sluicemq.model.ids import parse_host
from sluicemq.net.tls import TLS_HINT, Tls
from sluicemq.wire.frames import (
    FLAG_ONEWAY,
    Command,
    check_frame_size,
    decode,
    encode,
    encode_start,
)

READ_AHEAD_BYTES: Final = 64 * 1024
"""Reading ahead fetches many small responses at once; of a large one only this much is moved."""
LARGE_BODY_BYTES: Final = 64 * 1024
"""A body of at least this size is sent after its header, without copying both together."""
_MSG_MORE: Final = getattr(socket, "MSG_MORE", 0)
_TOTAL: Final = struct.Struct(">I")


class BlockingChannel:
    """A blocking connection to a server, for one thread at a time.

    `timeout_s`, in seconds, limits connecting and every wait for the socket. Every method raises
    ConnectionLostError or RequestTimeoutError if the connection fails; the channel is then closed.
    """

    def __init__(self, address: str, timeout_s: float = 5.0, tls: Tls | None = None) -> None:
        """Connect to `address`, which is `host:port`. If `tls` is None, the connection is plain.

        `timeout_s` limits each wait for the socket. Raise ProtocolError if `address` is malformed,
        ConfigurationError if the files of `tls` cannot be used, and ConnectionLostError or
        RequestTimeoutError if connecting fails.
        """
        self.address = address
        self._is_tls = tls is not None
        self._has_received = False
        self.timeout_s = timeout_s
        self.closed = False
        self._opaque = 0
        self._buffer = bytearray(READ_AHEAD_BYTES)
        # The bytes from `_start` to `_filled` are received and not consumed yet.
        self._start = 0
        self._filled = 0
        host = parse_host(address)
        try:
            self._socket = socket.create_connection((host.address, host.port), timeout_s)
        except OSError as error:
            raise self._close_and_make_error("connecting to", error, is_connected=False) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return
        from sluicemq.net.openssl import client_context  # noqa: PLC0415 - OpenSSL, on demand

        plain = self._socket
        try:
            self._socket = client_context(tls).wrap_socket(
                plain, server_hostname=tls.server_name or host.address
            )
        except OSError as error:
            plain.close()
            raise self._close_and_make_error("TLS handshake with", error) from error
        except BaseException:
            self.close()
            raise

    def call(self, command: Command) -> Command:
        """Send a request, wait for its response, and return it.

        Sets `command.opaque`, the number by which the response is recognised. Other responses are
        dropped. The body of the response is valid until the next call.
        """
        self.send(command)
        response = self.receive()
        while response.opaque != command.opaque:
            response = self.receive()
        return response

    def send(self, command: Command) -> None:
        """Send a request without waiting for its response. Set `command.opaque` to its number."""
        self._check_open()
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        command.opaque = self._opaque
        try:
            self._socket.settimeout(self.timeout_s)
            if len(command.body) < LARGE_BODY_BYTES or self._is_tls:
                self._socket.sendall(encode(command))
            else:
                # Send a large body without copying it into one buffer with the header.
                self._socket.sendall(encode_start(command), _MSG_MORE)
                self._socket.sendall(command.body)
        except OSError as error:
            raise self._close_and_make_error("sending to", error) from error

    def send_oneway(self, command: Command) -> None:
        """Send a request that has no response. Set its one-way flag and opaque."""
        command.flag |= FLAG_ONEWAY
        self.send(command)

    def receive(self) -> Command:
        """Wait for the next response of the server, and return it.

        Its body is valid until the next call. Requests of the server are dropped, because a
        blocking channel cannot serve them. Raise ProtocolError if the server sends a bad frame; the
        channel is then closed.
        """
        self._check_open()
        command = self._receive_frame()
        while not command.is_response:
            command = self._receive_frame()
        return command

    def close(self) -> None:
        """Close the connection. The body of the last response stays valid."""
        self.closed = True
        if hasattr(self, "_socket"):
            self._socket.close()

    # -------------------------------------------------------------------------------- receiving

    def _receive_frame(self) -> Command:
        """Wait for the next frame of the server, and decode it without copying.

        At any error, also a timeout, the channel is closed.
        """
        try:
            self._fill(4)
            (frame_bytes,) = _TOTAL.unpack_from(self._buffer, self._start)
            check_frame_size(frame_bytes)
            self._fill(4 + frame_bytes)
            start = self._start + 4
            command = decode(memoryview(self._buffer)[start : start + frame_bytes])
        except OSError as error:
            raise self._close_and_make_error("waiting for", error) from error
        except BaseException:
            # After a bad frame, or an interrupt between two reads, the position in the stream of
            # frames is unknown.
            self.close()
            raise
        self._start += 4 + frame_bytes
        return command

    def _fill(self, size: int) -> None:
        """Read from the socket until the buffer has `size` unread bytes, from index `_start` on.

        If they do not fit behind `_start`, they are moved to the front of the buffer, or to a
        larger buffer. Raise OSError, also if the server closes the connection.
        """
        if self._filled - self._start >= size:
            return
        if self._start == self._filled:
            self._start = self._filled = 0
        if self._start + size > len(self._buffer):
            self._move_to_front(size)
        self._socket.settimeout(self.timeout_s)
        view = memoryview(self._buffer)[: self._start + size + READ_AHEAD_BYTES]
        while self._filled - self._start < size:
            count = self._socket.recv_into(view[self._filled :])
            if not count:
                raise ConnectionResetError("the server closed the connection")
            self._has_received = True
            self._filled += count

    def _move_to_front(self, size: int) -> None:
        """Move the unread bytes to the front of the buffer, so that it has room for `size` bytes.

        If it is too small, it is replaced by a larger one.
        """
        unread = bytes(memoryview(self._buffer)[self._start : self._filled])
        if size > len(self._buffer):
            self._buffer = bytearray(max(size + READ_AHEAD_BYTES, 2 * len(self._buffer)))
        self._buffer[: len(unread)] = unread
        self._start = 0
        self._filled = len(unread)

    def _check_open(self) -> None:
        """Raise ConnectionLostError if the channel is closed."""
        if self.closed:
            raise ConnectionLostError(f"The connection to {self.address} is closed.")

    def _close_and_make_error(
        self, activity: str, error: OSError, *, is_connected: bool = True
    ) -> ConnectionLostError | RequestTimeoutError:
        """Close the channel, and return the error to raise for an OSError.

        `activity` says what failed, and precedes the address: for example "sending to".
        `is_connected` means that the TCP connection was made.
        """
        self.close()
        if isinstance(error, TimeoutError):
            return RequestTimeoutError(
                f"{activity} {self.address} took longer than {self.timeout_s:g} s.",
                fix="Check whether the server is overloaded or the network is slow.",
            )
        if self._is_tls and is_connected and not self._has_received:
            from sluicemq.net.openssl import tls_connection_error  # noqa: PLC0415 - rare

            return tls_connection_error(self.address, error)

        fact = f"Cannot connect to {self.address}"
        if is_connected:
            fact = f"{activity} {self.address} failed"
        fix = "Check host and port, and that the server runs."
        may_need_tls = is_connected and not (self._has_received or self._is_tls)
        if may_need_tls:
            fix += f" {TLS_HINT}"
        return ConnectionLostError(f"{fact}: {error.strerror or error}.", fix=fix)

    def __repr__(self) -> str:
        return f"<blocking channel {self.address}{' closed' if self.closed else ''}>"
