"""Blocking access to name servers and brokers: the base of the blocking producer and admin.

There is no thread and no event loop. A call takes an idle connection to its address, or opens one,
sends one request and waits for the response. So any number of threads may share a `Cluster`, and a
forked Spark worker can cheaply create its own.

Nothing here sends heartbeats. Consumers need them and are in `client.threaded`.
"""

import threading
from collections import defaultdict, deque
from random import Random
from typing import Final, Self

from sluicemq.client.affinity import ClientAffinity, ForkCounter
from sluicemq.client.core.conversations import CALL_TIMEOUT_S, BlockingShell, Call, operation
from sluicemq.client.core.directory import Directory, RouteCache
from sluicemq.client.core.names import Credentials, sign_request
from sluicemq.client.core.sending import FIRST_QUEUE_BITS
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ClosedError
from sluicemq.net.blocking import BlockingChannel
from sluicemq.net.tls import Tls
from sluicemq.wire.frames import FLAG_ONEWAY, Command

IDLE_CHANNELS_MAX: Final = 8
"""The maximum number of idle connections that are kept for each address."""
IDLE_S_MAX: Final = 100.0
"""A connection that was idle for longer is not used again.

Servers close a connection after 120 s without a request (spec/remoting.md §1).
"""


class Cluster(BlockingShell):
    """Name servers, routes and connections, for blocking calls. Threads may share it.

    Use it in a `with` statement, or call `close`. After a fork, every call raises
    ConfigurationError in the child process.
    """

    directory: Directory

    def __init__(
        self,
        name_servers: str | list[str] | tuple[str, ...],
        *,
        credentials: Credentials | tuple[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
        tls: Tls | bool | None = None,
        rng: Random | None = None,
    ) -> None:
        """Prepare the client. Nothing is connected before the first call.

        - `name_servers` is "host:port;host:port" or a list.
        - `credentials`, a pair (access key, secret key), sign each request; None means unsigned.
        - `timeout_s` limits connecting, and each wait for a response.
        - `tls` is True, or a `Tls` with its files; None means what the environment variable
          SLUICE_TLS says.
        - `rng` chooses the first queue to which a producer sends.

        Raises ConfigurationError for an invalid value.
        """
        self.affinity: ClientAffinity = ClientAffinity()
        self.rng: Random = rng or Random()
        self.tls: Tls | None = Tls.resolve(tls)
        self.directory = Directory(name_servers, clock)
        self.name_servers: tuple[str, ...] = self.directory.name_servers
        self.routes: RouteCache = self.directory.routes
        self.credentials: Credentials | None = Credentials.from_value(credentials)
        self.timeout_s = timeout_s
        self.clock = clock
        self._idle: dict[str, deque[tuple[BlockingChannel, float]]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._closing = threading.Event()

    find_route: Final = operation(Directory.fetch_route)
    route: Final = operation(Directory.get_route)
    write_queues: Final = operation(Directory.get_write_queues)
    address: Final = operation(Directory.get_read_address)
    ask: Final = operation(Directory.call)

    def call(self, address: str, command: Command, timeout_s: float | None = None) -> Command:
        """Send one request to a server, and return its response, whatever its code.

        `timeout_s` is the time limit in seconds; None means that of this client. Raises
        ConnectionLostError and RequestTimeoutError, which close the connection, and ClosedError.
        """
        return self.send_request(Call(address, command, timeout_s))

    def send_request(self, call: Call) -> Command:
        """Send one request, and return its response, whatever its code.

        A one-way request has no response; the request itself is returned. Raises
        ConnectionLostError, RequestTimeoutError, ClosedError after `close`, and ConfigurationError
        after a fork. The connection is closed after an error.
        """
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        channel = self.acquire_channel(call.address, timeout_s)
        response = command = sign_request(call.command, self.credentials)
        call.is_written = True
        try:
            if command.flag & FLAG_ONEWAY:
                channel.send(command)
            else:
                response = channel.call(command)
                # The body is a view of the channel's buffer, which the next call overwrites.
                response.body = bytes(response.body)
        except BaseException:
            channel.close()
            raise
        self.release_channel(call.address, channel)
        return response

    def first_queue(self) -> int:
        """Return a random number, from which a `QueueChooser` derives its first queue."""
        return self.rng.getrandbits(FIRST_QUEUE_BITS)

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for `seconds` seconds, or until `close` is called."""
        self._closing.wait(seconds)

    def acquire_channel(self, address: str, timeout_s: float) -> BlockingChannel:
        """Return an idle connection to `address`, or a new one, for use by the caller alone.

        The caller returns it with `release_channel`. `timeout_s` becomes its time limit. Raises
        ConnectionLostError if a new one cannot be opened, ClosedError after `close`, and
        ConfigurationError after a fork.
        """
        if self.affinity.fork_count != ForkCounter.count:
            self.affinity.check_process()
        oldest_s = self.clock.monotonic_s() - IDLE_S_MAX
        with self._lock:
            if self._closing.is_set():
                raise ClosedError("this client is closed.", fix="Create a new client.")
            while self._idle[address]:
                channel, since_s = self._idle[address].pop()
                if since_s >= oldest_s:
                    channel.timeout_s = timeout_s
                    return channel
                channel.close()
        return BlockingChannel(address, timeout_s, self.tls)

    def release_channel(self, address: str, channel: BlockingChannel) -> None:
        """Keep the connection `channel` to `address` as idle for a later call, or close it.

        It is closed if `IDLE_CHANNELS_MAX` others are idle, or after `close`.
        """
        with self._lock:
            idle = self._idle[address]
            if not self._closing.is_set() and len(idle) < IDLE_CHANNELS_MAX:
                idle.append((channel, self.clock.monotonic_s()))
                return
        channel.close()

    def close(self) -> None:
        """Close all idle connections. Further calls raise ClosedError. Safe to call twice."""
        with self._lock:
            self._closing.set()
            channels = [channel for idle in self._idle.values() for channel, _ in idle]
            self._idle.clear()
        for channel in channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {';'.join(self.name_servers)}>"
