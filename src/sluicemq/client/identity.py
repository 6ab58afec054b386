"""Who this client is: its id in consumer groups, and the maker of unique message ids.

A client id is `address@process#time` as Java makes it in clustering mode (spec/remoting.md §15):
two clients with one id would take the same share of the queues, so it differs for each `Sluice`. A
message id holds address, process, a salt, milliseconds of this month and a counter
(spec/remoting.md §12).
"""

import ipaddress
import os
import secrets
import socket
import threading
from datetime import UTC, datetime

from sluicemq.clock import Clock
from sluicemq.model.ids import UniqueIds


def local_address() -> str:
    """The address by which this machine goes out, 127.0.0.1 without a network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def make_client_id(clock: Clock, *, stream: bool = False) -> str:
    """An id that no other client has; `stream` marks pull clients, as Java does."""
    unique = f"{os.getpid()}#{clock.now_ms()}{secrets.randbelow(1_000_000):06d}"
    return f"{local_address()}@{unique}{'@STREAM' if stream else ''}"


class MessageIds:
    """Unique message ids of one producer. Safe to share among threads."""

    __slots__ = ("_clock", "_ids", "_lock", "_month", "_month_ends_ms", "_month_start_ms")

    def __init__(self, clock: Clock) -> None:
        address = ipaddress.ip_address(local_address()).packed
        self._clock = clock
        self._ids = UniqueIds(address, os.getpid(), secrets.randbits(31))
        self._lock = threading.Lock()
        self._month_start_ms = self._month_ends_ms = 0

    def next(self) -> str:
        """The next id."""
        now_ms = self._clock.now_ms()
        with self._lock:
            if not self._month_start_ms <= now_ms < self._month_ends_ms:
                self._month_start_ms, self._month_ends_ms = _month(now_ms)
            return self._ids.next(now_ms - self._month_start_ms)


def _month(now_ms: int) -> tuple[int, int]:
    start = datetime.fromtimestamp(now_ms / 1000, UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    following = start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
    return int(start.timestamp() * 1000), int(following.timestamp() * 1000)
