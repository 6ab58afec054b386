"""One blocking connection, for scripts and Spark executors: no thread, no loop.

Bulk answers are megabytes. `receive` reads the socket straight into one buffer that grows to the
largest frame and is used again; the body is a memoryview into it, so that the kernel's copy is the
only one. A body is therefore valid until the next `receive` only. At most `READ_AHEAD_BYTES` of the
following frame are read with a frame; they are moved to the front of the buffer.
"""

import socket
import struct
from typing import Final

from sluicemq.errors import ConnectionLostError, RequestTimeoutError
from sluicemq.model.ids import parse_host
from sluicemq.net.tls import TLS_HINT, Tls
from sluicemq.wire.frames import FLAG_ONEWAY, Command, check_total, decode, encode, encode_start

READ_AHEAD_BYTES: Final = 64 * 1024
"""Small answers come many at a time; of a big one's successor no more than this is moved."""
LARGE_BODY_BYTES: Final = 64 * 1024
"""Such a body is not copied behind its header, but sent behind it."""
_MORE: Final = getattr(socket, "MSG_MORE", 0)
_TOTAL: Final = struct.Struct(">I")


class BlockingChannel:
    """A connection for one thread at a time. `timeout_s` bounds connecting and every wait.

    Raises ConnectionLostError and RequestTimeoutError; after either the channel is closed.
    """

    def __init__(self, address: str, timeout_s: float = 5.0, tls: Tls | None = None) -> None:
        self.address = address
        self._is_tls = tls is not None
        self._is_heard = False
        self.timeout_s = timeout_s
        self.closed = False
        self._opaque = 0
        self._buffer = bytearray(READ_AHEAD_BYTES)
        self._start = 0  # of the next frame in the buffer
        self._filled = 0
        host = parse_host(address)
        try:
            self._socket = socket.create_connection((host.address, host.port), timeout_s)
        except OSError as error:
            raise self._failed(error, "connecting to", is_made=False) from error
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
            raise self._failed(error, "shaking hands with") from error
        except BaseException:
            self.close()
            raise

    def call(self, command: Command) -> Command:
        """A request and its answer; the body is valid until the next call."""
        self.send(command)
        answer = self.receive()
        while answer.opaque != command.opaque:
            answer = self.receive()
        return answer

    def send(self, command: Command) -> None:
        """Send a request; it gets its opaque here. With the one-way flag nothing comes back."""
        self._check_open()
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        command.opaque = self._opaque
        try:
            self._socket.settimeout(self.timeout_s)
            if len(command.body) < LARGE_BODY_BYTES or self._is_tls:
                self._socket.sendall(encode(command))
            else:
                self._socket.sendall(encode_start(command), _MORE)
                self._socket.sendall(command.body)
        except OSError as error:
            raise self._failed(error, "sending to") from error

    def oneway(self, command: Command) -> None:
        """A request without an answer."""
        command.flag |= FLAG_ONEWAY
        self.send(command)

    def receive(self) -> Command:
        """The next answer. Requests of the server are passed over: nothing here serves them."""
        self._check_open()
        command = self._receive_frame()
        while not command.is_response:
            command = self._receive_frame()
        return command

    def close(self) -> None:
        """Close; the last body stays readable."""
        self.closed = True
        if hasattr(self, "_socket"):
            self._socket.close()

    # -------------------------------------------------------------------------------- receiving

    def _receive_frame(self) -> Command:
        try:
            self._fill(4)
            total = _TOTAL.unpack_from(self._buffer, self._start)[0]
            check_total(total)
            self._fill(4 + total)
            start = self._start + 4
            command = decode(memoryview(self._buffer)[start : start + total])
        except OSError as error:
            raise self._failed(error, "waiting for") from error
        except BaseException:
            self.close()  # the stream is lost: a bad frame, or an interrupt between two reads
            raise
        self._start += 4 + total
        return command

    def _fill(self, size: int) -> None:
        """Have `size` bytes from `_start` on in the buffer."""
        if self._filled - self._start >= size:
            return
        if self._start == self._filled:
            self._start = self._filled = 0
        if self._start + size > len(self._buffer):  # the buffer begins with the rest afterwards
            rest = bytes(memoryview(self._buffer)[self._start : self._filled])
            if size > len(self._buffer):
                self._buffer = bytearray(max(size + READ_AHEAD_BYTES, 2 * len(self._buffer)))
            self._buffer[: len(rest)] = rest
            self._start, self._filled = 0, len(rest)
        self._socket.settimeout(self.timeout_s)
        view = memoryview(self._buffer)[: self._start + size + READ_AHEAD_BYTES]
        while self._filled - self._start < size:
            count = self._socket.recv_into(view[self._filled :])
            if not count:
                raise ConnectionResetError("the server closed the connection")
            self._is_heard = True
            self._filled += count

    def _check_open(self) -> None:
        if self.closed:
            raise ConnectionLostError(f"The connection to {self.address} is closed.")

    def _failed(
        self, error: OSError, doing: str, *, is_made: bool = True
    ) -> ConnectionLostError | RequestTimeoutError:
        self.close()
        if isinstance(error, TimeoutError):
            return RequestTimeoutError(
                f"{doing} {self.address} took longer than {self.timeout_s:g} s.",
                fix="Is the server overloaded, or the network slow?",
            )
        if self._is_tls and is_made and not self._is_heard:
            from sluicemq.net.openssl import tls_failed  # noqa: PLC0415 - rare

            return tls_failed(self.address, error)
        hint = f" {TLS_HINT}" if is_made and not (self._is_heard or self._is_tls) else ""
        return ConnectionLostError(
            f"{doing} {self.address} failed: {error.strerror or error}.",
            fix=f"Check host and port, and that the server runs.{hint}",
        )

    def __repr__(self) -> str:
        return f"<blocking channel {self.address}{' closed' if self.closed else ''}>"
