"""Blocking access to name servers and brokers: the base of the blocking producer, admin and bulk
reader.

No thread, no loop: a call takes an idle connection of its address (or opens one), sends one request
and waits. So any number of threads may share a `Cluster`, and a forked Spark worker can make its
own at no cost. Nothing here heartbeats; consumers, which must, live in `client.threaded`.
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

IDLE_CHANNELS_MAX = 8
IDLE_S_MAX = 100.0
"""Servers close a connection after 120 s of silence (spec/remoting.md §1): older ones are not
reused."""


class Cluster(BlockingShell):
    """Name servers, routes and connections, for blocking programs. Safe to share among threads."""

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
        """`tls`: True, or a `Tls` with its files; None: as the variable SLUICE_TLS says. `rng`
        chooses the queue that a producer begins with."""
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
        """One request, one answer, whatever its code.

        Raises ConnectionLostError or RequestTimeoutError; the connection is then given up.
        """
        return self.send_request(Call(address, command, timeout_s))

    def send_request(self, call: Call) -> Command:
        """What `call` does, for a Talk."""
        limit = self.timeout_s if call.timeout_s is None else call.timeout_s
        channel = self.take(call.address, limit)
        answer = command = sign_request(call.command, self.credentials)
        call.is_written = True
        try:
            if command.flag & FLAG_ONEWAY:
                channel.send(command)
            else:
                answer = channel.call(command)
                answer.body = bytes(answer.body)  # the channel's buffer is the next caller's
        except BaseException:
            channel.close()
            raise
        self.give(call.address, channel)
        return answer

    def first_queue(self) -> int:
        """A random number for a `QueueChooser` to begin with."""
        return self.rng.getrandbits(FIRST_QUEUE_BITS)

    def sleep(self, seconds: float) -> None:
        """Blocks the caller's thread, but not beyond `close`."""
        self._closing.wait(seconds)

    def take(self, address: str, timeout_s: float) -> BlockingChannel:
        """A connection of one's own until `give`: an idle one, or a new one."""
        if self.affinity.fork_count != ForkCounter.count:
            self.affinity.check_process()
        oldest_s = self.clock.monotonic_s() - IDLE_S_MAX
        with self._lock:
            if self._closing.is_set():
                raise ClosedError("this client is closed.", fix="Make a new one.")
            while self._idle[address]:
                channel, since_s = self._idle[address].pop()
                if since_s >= oldest_s:
                    channel.timeout_s = timeout_s
                    return channel
                channel.close()
        return BlockingChannel(address, timeout_s, self.tls)

    def give(self, address: str, channel: BlockingChannel) -> None:
        """Hands a connection back for the next call."""
        with self._lock:
            idle = self._idle[address]
            if not self._closing.is_set() and len(idle) < IDLE_CHANNELS_MAX:
                idle.append((channel, self.clock.monotonic_s()))
                return
        channel.close()

    def close(self) -> None:
        """Closes every idle connection; further calls raise ClosedError."""
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
