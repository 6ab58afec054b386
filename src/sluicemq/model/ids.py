"""Message ids, recall handles and hashes in RocketMQ's formats (spec/remoting.md §12).

- A host is stored as its packed address (4 or 16 bytes), then the port (4 bytes).
- An *offset message id* says where a message is stored: the host of the broker, then the position
  in its commit log (8 bytes), in upper-case hexadecimal digits.
- A *unique id* is made by the client that sends the message (property UNIQ_KEY): its address,
  process id and a salt, then the time since the start of the month and a counter.
- A *recall handle* names a timed message, so that it can be cancelled.
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
    """An IP address and a port. `str(host)` is `1.2.3.4:5` or `[::1]:5`."""

    address: str
    port: int

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"


def parse_host(host_and_port: str) -> Host:
    """Return the host and port in a text such as `1.2.3.4:10911` or `[::1]:10911`.

    The brackets of an IPv6 address are removed. The address itself is not checked; it may be a host
    name. Raises ProtocolError if the port is missing, not a number, or larger than PORT_MAX.
    """
    address, separator, port = host_and_port.strip().rpartition(":")
    if not separator or not port.isdigit():
        raise ProtocolError(
            f"{host_and_port!r} is not an address.",
            fix="Write host:port, for example 127.0.0.1:10911.",
        )
    if len(port) > 5 or int(port) > PORT_MAX:
        raise ProtocolError(
            f"{host_and_port[:100]!r} is not an address: a port is at most {PORT_MAX}.",
            fix="Write host:port, for example 127.0.0.1:10911.",
        )
    return Host(address.removeprefix("[").removesuffix("]"), int(port))


@lru_cache(maxsize=4096)
def encode_host(host: Host) -> bytes:
    """Return the stored form of a host: 8 bytes for IPv4, 20 bytes for IPv6.

    Raises ValueError if the address is a host name.
    """
    return ipaddress.ip_address(host.address.partition("%")[0]).packed + _PORT.pack(host.port)


@lru_cache(maxsize=4096)
def decode_host(encoded: bytes) -> Host:
    """Return the host that `encode_host` has encoded.

    `encoded` is the address, of 4 bytes (IPv4) or 16 bytes (IPv6), and the port in 4 bytes.
    """
    address = ipaddress.ip_address(encoded[:-4])
    (port,) = _PORT.unpack(encoded[-4:])
    return Host(str(address), port)


def offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """Return the offset message id of the message at a position in the commit log.

    `store_host` is the encoded host of the broker. The id has 32 digits for IPv4, 56 for IPv6.
    """
    return (store_host + _OFFSET.pack(physical_offset)).hex().upper()


def offset_message_ids(prefix: str, offsets: bytes) -> str:
    """Return the offset message ids of several messages of one broker, separated by commas.

    `prefix` is the encoded host of the broker in hexadecimal digits, and `offsets` has the
    positions, 8 bytes each.
    """
    return prefix + offsets.hex(",", 8).upper().replace(",", "," + prefix)


def parse_offset_message_id(message_id: str) -> tuple[Host, int]:
    """Return the host of the broker and the position in its commit log that an id contains.

    Raises ProtocolError if the text is not an offset message id.
    """
    try:
        decoded = bytes.fromhex(message_id)
    except ValueError:
        decoded = b""
    if len(decoded) not in (HOST_BYTES_IPV4 + 8, HOST_BYTES_IPV6 + 8):
        raise ProtocolError(
            f"{message_id!r} is not an offset message id.", fix="It has 32 or 56 hex digits."
        )
    (position,) = _OFFSET.unpack(decoded[-8:])
    return decode_host(decoded[:-8]), position


HASHED_UNITS: Final = 256
"""The number of UTF-16 units that `java_hash` processes at a time."""
_POWERS: Final = tuple(pow(31, HASHED_UNITS - 1 - n, 1 << 32) for n in range(HASHED_UNITS))
CACHED_LENGTH_MAX: Final = 128
"""Results for longer texts are not cached. Clients choose the texts, and a cache bounds the number
of its entries, not their size."""


def java_hash(text: str) -> int:
    """Return the hash of a string as Java's String.hashCode computes it, a signed 32-bit number.

    Java hashes UTF-16 units. One unit takes about 40 ns here.
    """
    hash_code = 0
    encoded = text.encode("utf-16-be", "surrogatepass")
    for start in range(0, len(encoded), 2 * HASHED_UNITS):
        chunk = encoded[start : start + 2 * HASHED_UNITS]
        units = struct.unpack(f">{len(chunk) // 2}H", chunk)
        # Java multiplies the hash by 31 for each unit: here for all units of the chunk at once.
        powers = _POWERS[HASHED_UNITS - len(units) :]
        hash_code = (hash_code * 31 * powers[0] + sum(map(mul, units, powers))) & 0xFFFFFFFF
    is_negative = hash_code & 0x80000000
    return hash_code - (1 << 32) if is_negative else hash_code


_cached_hash: Final = lru_cache(maxsize=65536)(java_hash)


def tag_code(tag: str) -> int:
    """Return the number by which consume queues find a tag: its hash, or 0 for the empty tag."""
    return _cached_hash(tag) if len(tag) <= CACHED_LENGTH_MAX else java_hash(tag)


class UniqueIds:
    """A generator of unique ids (UNIQ_KEY): 32 hexadecimal digits that differ in every call.

    Ids of different processes differ by their address, process id and salt. The time part is the
    number of milliseconds since the start of the month (UTC). The counter has 16 bits, as in the
    Java client, so more than 65,536 ids in one millisecond repeat. Safe to share between threads.
    """

    __slots__ = ("_begin", "_clock", "_month_ms", "_numbers", "_prefix")

    def __init__(self, clock: Clock, address: bytes, process_id: int, salt: int) -> None:
        """Create a generator of unique ids.

        Each id contains `address`, `process_id` and `salt`. `address` is the packed IP address of
        this process, 4 bytes for IPv4. `salt` is any number.
        """
        self._clock = clock
        process_part = struct.pack(">HI", process_id & 0xFFFF, salt & 0xFFFFFFFF)
        self._prefix = (address + process_part).hex().upper()
        self._numbers = count(1)
        self._month_ms = range(0)
        self._begin = -1, ""
        """The last millisecond in which an id was made, and the first 28 digits of its ids."""

    def make_id(self) -> str:
        """Return a new id for the present millisecond. Called for every message that is sent.

        Its hex digits are the address, process id, salt, milliseconds since the start of the month,
        and a counter.
        """
        now_ms = self._clock.now_ms()
        made_ms, first_digits = self._begin
        if made_ms != now_ms:
            first_digits = f"{self._prefix}{now_ms - self._month_start_ms(now_ms):08X}"
            self._begin = now_ms, first_digits
        return f"{first_digits}{next(self._numbers) & 0xFFFF:04X}"

    def _month_start_ms(self, now_ms: int) -> int:
        """Return the start of the month of a time, in ms since 1970.

        The month is cached, because successive calls are usually in the same month.
        """
        month_ms = self._month_ms
        if now_ms not in month_ms:
            start = _month(now_ms)
            end = start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
            month_ms = range(int(start.timestamp()) * 1000, int(end.timestamp()) * 1000)
            self._month_ms = month_ms
        return month_ms.start


def _month(time_ms: int) -> datetime:
    """Return the start of the month (UTC) that contains a time."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def make_unique_id(prefix: str, time_ms: int, counter: int) -> str:
    """Return a unique id: 32 hex digits in upper case.

    They are the first 20 digits of `prefix`, 8 digits for the ms since the start of the month of
    `time_ms`, and 4 for the lowest 16 bits of `counter`.
    """
    start_ms = int(_month(time_ms).timestamp()) * 1000
    return f"{prefix[:20].upper()}{time_ms - start_ms:08X}{counter & 0xFFFF:04X}"


def unique_id_time_ms(message_id: str, now_ms: int) -> int:
    """Return the time in ms since 1970 at which a unique id was made, or 0 if it is unknown.

    An id contains only the time since the start of its month. So the month is assumed to be the
    current month or the one before it, at the time `now_ms`. The result is at most a day after
    `now_ms`. It is 0 if there is no such time, or if the text is not a unique id.
    """
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
    """What recalls a timed message, that is, cancels it before it is delivered.

    The broker returns its encoded form, base64 of `v1 topic broker time id`, in the response to the
    send. `time_ms` is a time in the slot of the timer wheel that contains the message, and
    `unique_id` is the message's UNIQ_KEY (spec/delivery.md §2).
    """

    topic: str
    broker: str
    time_ms: int
    unique_id: str

    def encode(self) -> str:
        """Return the handle as text: version, topic, broker, time and id in URL-safe base64."""
        plain = f"{_VERSION} {self.topic} {self.broker} {self.time_ms} {self.unique_id}"
        return base64.urlsafe_b64encode(plain.encode()).decode()


def parse_recall_handle(handle: str) -> RecallHandle | None:
    """Return the fields of a recall handle, by which a delayed message can be cancelled.

    Return None if the text is not a recall handle: five fields separated by spaces, in base64.
    """
    try:
        plain = base64.b64decode(handle.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
    fields = plain.split(" ")
    if len(fields) != _PARTS or not all(fields):
        return None
    version, topic, broker, time_text, unique_id = fields
    is_time = time_text.isascii() and time_text.isdigit() and len(time_text) <= 18
    if version != _VERSION or not is_time:
        return None
    return RecallHandle(topic, broker, int(time_text), unique_id)
