"""Identifiers and hashes as RocketMQ computes them.

Facts: spec/remoting.md §12. A host is stored as its packed address (4 or 16 bytes) followed by the
port as a 4-byte integer; an offset message id is the upper-case hex of host + commit-log offset;
a unique id is made by the client: address, process, start, time in this month, counter.
"""

import base64
import binascii
import ipaddress
import re
import struct
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from operator import mul
from typing import Final, NamedTuple

from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError

_PORT = struct.Struct(">i")
_OFFSET = struct.Struct(">q")
PORT_MAX: Final = 65_535
HOST_BYTES_IPV4 = 8
HOST_BYTES_IPV6 = 20
DAY_MS: Final = 86_400_000


class Host(NamedTuple):
    """An address and port; `str(host)` is `1.2.3.4:5` or `[::1]:5`."""

    address: str
    port: int

    def __str__(self) -> str:
        return (
            f"[{self.address}]:{self.port}"
            if ":" in self.address
            else f"{self.address}:{self.port}"
        )


def parse_host(text: str) -> Host:
    """`1.2.3.4:10911` or `[::1]:10911` -> Host. Raises ProtocolError when the port is missing."""
    address, separator, port = text.strip().rpartition(":")
    if not separator or not port.isdigit():
        raise ProtocolError(
            f"{text!r} is not an address.", fix="Write host:port, for example 127.0.0.1:10911."
        )
    if len(port) > 5 or int(port) > PORT_MAX:
        raise ProtocolError(
            f"{text[:100]!r} is not an address: a port is at most {PORT_MAX}.",
            fix="Write host:port, for example 127.0.0.1:10911.",
        )
    return Host(address.removeprefix("[").removesuffix("]"), int(port))


@lru_cache(maxsize=4096)
def encode_host(host: Host) -> bytes:
    """8 bytes for IPv4, 20 for IPv6 (address, then the port in 4 bytes)."""
    return ipaddress.ip_address(host.address.partition("%")[0]).packed + _PORT.pack(host.port)


@lru_cache(maxsize=4096)
def decode_host(data: bytes) -> Host:
    """The inverse of `encode_host`."""
    return Host(str(ipaddress.ip_address(data[:-4])), _PORT.unpack(data[-4:])[0])


def offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """The id that says where a message lies: 32 hex digits for IPv4, 56 for IPv6."""
    return (store_host + _OFFSET.pack(physical_offset)).hex().upper()


def offset_message_ids(prefix: str, offsets: bytes) -> str:
    """Several, joined by commas. `prefix`: the store host as text; `offsets`: eight bytes each."""
    return prefix + offsets.hex(",", 8).upper().replace(",", "," + prefix)


def parse_offset_message_id(text: str) -> tuple[Host, int]:
    """Id -> (store host, commit-log offset). Raises ProtocolError when it is not such an id."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) not in (HOST_BYTES_IPV4 + 8, HOST_BYTES_IPV6 + 8):
        raise ProtocolError(
            f"{text!r} is not an offset message id.", fix="It has 32 or 56 hex digits."
        )
    return decode_host(data[:-8]), _OFFSET.unpack(data[-8:])[0]


HASHED_UNITS: Final = 256
"""UTF-16 units that `java_hash` takes at a time."""
_POWERS: Final = tuple(pow(31, HASHED_UNITS - 1 - at, 1 << 32) for at in range(HASHED_UNITS))
KEPT_LENGTH_MAX: Final = 128
"""Hashes of longer texts are not kept: a client chooses the texts, and their number is bounded, not
their size."""


def java_hash(text: str) -> int:
    """Return String.hashCode of Java: over UTF-16 units, as a signed 32-bit number. A unit takes
    40 ns."""
    value = 0
    data = text.encode("utf-16-be", "surrogatepass")
    for begin in range(0, len(data), 2 * HASHED_UNITS):
        piece = data[begin : begin + 2 * HASHED_UNITS]
        units = struct.unpack(f">{len(piece) // 2}H", piece)
        powers = _POWERS[HASHED_UNITS - len(units) :]
        value = (value * 31 * powers[0] + sum(map(mul, units, powers))) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


_kept_hash: Final = lru_cache(maxsize=65536)(java_hash)


def tag_code(tag: str) -> int:
    """Return the number by which the consume queue knows a tag: 0 without a tag."""
    return _kept_hash(tag) if len(tag) <= KEPT_LENGTH_MAX else java_hash(tag)


class UniqueIds:
    """Makes UNIQ_KEY values: 32 hex digits, different in every process and call. Safe to share
    among threads.

    The time part is the milliseconds since the first of the month (UTC); the counter wraps at
    65,536 a millisecond, as in the Java client.
    """

    __slots__ = ("_begin", "_clock", "_month_ms", "_numbers", "_prefix")

    def __init__(self, clock: Clock, address: bytes, process_id: int, salt: int) -> None:
        self._clock = clock
        self._prefix = (
            (address + struct.pack(">HI", process_id & 0xFFFF, salt & 0xFFFFFFFF)).hex().upper()
        )
        self._numbers = count(1)
        self._month_ms = range(0)
        self._begin = -1, ""
        """The last millisecond, and how its ids begin."""

    def next(self) -> str:
        """The next id. HOT."""
        now_ms = self._clock.now_ms()
        at_ms, begin = self._begin
        if at_ms != now_ms:
            begin = f"{self._prefix}{now_ms - self._month_start_ms(now_ms):08X}"
            self._begin = now_ms, begin
        return f"{begin}{next(self._numbers) & 0xFFFF:04X}"

    def _month_start_ms(self, now_ms: int) -> int:
        month_ms = self._month_ms
        if now_ms not in month_ms:
            start = _month(now_ms)
            end = start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
            month_ms = range(int(start.timestamp()) * 1000, int(end.timestamp()) * 1000)
            self._month_ms = month_ms
        return month_ms.start


def _month(time_ms: int) -> datetime:
    """Its first moment (UTC)."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def unique_id_at(prefix: str, time_ms: int, number: int) -> str:
    """The UNIQ_KEY with this beginning (hex digits) of a time and a number."""
    start_ms = int(_month(time_ms).timestamp()) * 1000
    return f"{prefix[:20].upper()}{time_ms - start_ms:08X}{number & 0xFFFF:04X}"


def unique_time_ms(message_id: str, now_ms: int) -> int:
    """When a UNIQ_KEY was made, in the month that ends now or the one before; 0 for another id."""
    if re.fullmatch("[0-9A-Fa-f]{32}", message_id) is None:
        return 0
    month_ms = int(_month(now_ms).timestamp()) * 1000
    time_ms = month_ms + int(message_id[20:28], 16)
    if time_ms > now_ms + DAY_MS:
        time_ms += int(_month(month_ms - 1).timestamp()) * 1000 - month_ms
    return time_ms if time_ms <= now_ms + DAY_MS else 0


_VERSION: Final = "v1"
_PARTS: Final = 5


class RecallHandle(NamedTuple):
    """By which a timed message is taken back: base64 of `v1 topic broker time id`.

    A broker gives it with the answer to the send; `time_ms` lies in the message's slot of the timer
    wheel, `unique_id` is the UNIQ_KEY (spec/delivery.md §2).
    """

    topic: str
    broker: str
    time_ms: int
    unique_id: str

    def encode(self) -> str:
        """The text of it."""
        plain = f"{_VERSION} {self.topic} {self.broker} {self.time_ms} {self.unique_id}"
        return base64.urlsafe_b64encode(plain.encode()).decode()


def parse_recall_handle(text: str) -> RecallHandle | None:
    """The inverse; None when it is no handle."""
    try:
        plain = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
    parts = plain.split(" ")
    if len(parts) != _PARTS or parts[0] != _VERSION or not all(parts):
        return None
    _, topic, broker, time, unique_id = parts
    if not (time.isascii() and time.isdigit()) or len(time) > 18:
        return None
    return RecallHandle(topic, broker, int(time), unique_id)
