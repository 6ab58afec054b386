"""Body of REGISTER_BROKER (103), by which a broker registers with a name server: JSON or compressed
(spec/namesrv.md §2).

The compressed form is a zlib stream; inside, integers have four bytes, big-endian:

    | size | data version JSON | topic count | (size | topic text) ... |
    | size | filter servers JSON | mapping count | (size | mapping JSON) ... |

The mappings are present only from version 413 (V5_0_0) on; they are not decoded. A topic text is
`name read write perm filterType attributesJson`, without sys flag and order.

A broker may have a hundred thousand topics, so a name server decodes them in another thread.
Nothing here runs for more than a few milliseconds without letting other threads run, not even the
freeing of what was decoded.
"""

import re
import struct
import zlib
from collections.abc import Callable
from typing import Final

import orjson

from sluicemq.errors import ProtocolError
from sluicemq.model.topic import DataVersion, TopicConfig
from sluicemq.wire import fastjson
from sluicemq.wire.declare import FORMS, body, json, kind_of, load_object
from sluicemq.wire.frames import VERSION
from sluicemq.wire.tables import (
    TopicTable,
    decode_data_version,
    encode_data_version,
    topic_table_object,
)

BARE_VERSION_MAX: Final = 36
"""Up to here (before V3_0_11) the body is the topic table alone."""
ZLIB_FIRST_BYTE: Final = 0x78
REGISTRATION_BYTES_MAX: Final = 32 * 1024 * 1024
"""The most bytes of a registration after decompression. A topic takes 40 to 200 bytes there, so a
broker may have 150,000 topics with the longest names, and 500,000 with usual ones."""
REGISTRATION_TOPICS_MAX: Final = 500_000
"""The most topics of a registration."""
INFLATE_BYTES: Final = 64 * 1024
"""The most bytes of a registration that are inflated at a time."""
DEFLATED_BYTES: Final = 16 * 1024
"""The most bytes that are given to the inflater at a time: it copies those that it has not used."""
ATTRIBUTES_BYTES_MAX: Final = 4096
"""The most characters of a topic's attributes in a compressed registration."""
PLAIN_BYTES_MAX: Final = 1024 * 1024
"""The most bytes of a registration in JSON beside its table of topics, and of the whole where that
table is not laid out as Java's and our brokers write it."""
FILTER_SERVERS_MAX: Final = 4096
KNOWN_MAX: Final = 1000
ASKED_EVERY: Final = 1024
"""Topics of a registration that are decoded before it is asked whether it is still wanted."""
ODD_VALUES_MAX: Final = 262_144
"""The most JSON values of a registration beside its table of topics."""
_INTEGER: Final = struct.Struct(">i")


@body
class RegisterBody:
    """The body of REGISTER_BROKER (103): the topics of a broker and its filter servers. A SluiceMQ
    broker has no filter servers."""

    table: TopicTable = json("topicConfigSerializeWrapper", write=topic_table_object)
    filter_servers: tuple[str, ...] = json("filterServerList", default=())


def encode_register_body(body: RegisterBody, *, compressed: bool = False) -> bytes:
    """Encode the body of REGISTER_BROKER (103) for a request header of version 479, as JSON, or
    compressed if `compressed` is set."""
    if not compressed:
        return fastjson.dumps(FORMS[RegisterBody].write(body))
    parts = [_sized(encode_data_version(body.table.data_version))]
    parts.append(_INTEGER.pack(len(body.table.topics)))
    for topic in body.table.topics.values():
        numbers = f"{topic.read_queues} {topic.write_queues} {topic.perm}"
        text = f"{topic.name} {numbers} {topic.filter_type} ".encode()
        parts.append(_sized(text + fastjson.dumps(dict(topic.attributes))))
    parts.append(_sized(fastjson.dumps(list(body.filter_servers))))
    parts.append(_INTEGER.pack(0))  # mappings of static topics
    return zlib.compress(b"".join(parts), 9)


def _sized(data: bytes) -> bytes:
    return _INTEGER.pack(len(data)) + data


def decode_register_body(
    data: bytes | memoryview,
    *,
    compressed: bool = False,
    version: int = VERSION,
    bytes_max: int = REGISTRATION_BYTES_MAX,
    is_wanted: Callable[[], bool] = lambda: True,
) -> RegisterBody:
    """Decode the body of REGISTER_BROKER (103); an empty body has no topics.

    `compressed` is the flag of the request. A body whose first byte is that of a zlib stream counts
    as compressed, too, because the 5.x Java broker sets the flag to false even then
    (spec/namesrv.md §2); JSON cannot begin with that byte. `version` is that of the request's
    header; up to BARE_VERSION_MAX a body is never compressed. `bytes_max` limits the size in bytes,
    after decompression. `is_wanted` is called now and then; decoding ends with an error when it
    returns False. Raises ProtocolError.

    No call here takes more than a few milliseconds without letting other threads run, so another
    thread may decode 100,000 topics beside an event loop.
    """
    if not data:
        return RegisterBody(TopicTable())
    if (compressed or data[0] == ZLIB_FIRST_BYTE) and version > BARE_VERSION_MAX:
        return _decode_compressed(data, bytes_max, is_wanted)
    if len(data) > bytes_max:
        raise ProtocolError(f"The registration has {len(data)} bytes, the limit is {bytes_max}.")
    data, topics = _cut_out_topics(bytes(data), is_wanted)
    if len(data) > PLAIN_BYTES_MAX or fastjson.weigh(data).values > ODD_VALUES_MAX:
        raise ProtocolError(
            f"The registration has {len(data)} bytes of JSON outside of its topic table; the limit "
            f"is {PLAIN_BYTES_MAX} bytes and {ODD_VALUES_MAX} values. Write the table as plain "
            "JSON."
        )
    values = load_object(data, "registration")
    if version <= BARE_VERSION_MAX:
        found = RegisterBody(FORMS[TopicTable].read(values))
    else:
        found = FORMS[RegisterBody].read(values)
    if not topics:
        return found
    table = TopicTable(topics, found.table.data_version, found.table.unknown)
    return RegisterBody(table, found.filter_servers)


_TEXT: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_FLAT: Final = rb'[^"{}\[\]]*(?:' + _TEXT + rb'[^"{}\[\]]*)*'
_BLANK: Final = rb"[ \t\r\n]*"
_TOPIC_TABLE: Final = re.compile(rb'"topicConfigTable"' + _BLANK + b":" + _BLANK + rb"\{" + _BLANK)
_TOPIC: Final = re.compile(
    b"(" + _TEXT + b")" + _BLANK + b":" + _BLANK
    + rb"(\{" + _FLAT + rb"(?:\{" + _FLAT + rb"\}" + _FLAT + rb")*\})" + _BLANK + b"(,?)" + _BLANK,
    re.DOTALL,
)  # fmt: skip
"""A member of the table: the topic's name, its configuration, whose attributes are one level below,
and whether another one follows."""


def _cut_out_topics(
    data: bytes, is_wanted: Callable[[], bool]
) -> tuple[bytes, dict[str, TopicConfig]]:
    """Decode the topics of a registration in JSON one by one, because orjson would not let another
    thread run while it reads 16 MiB. Return the JSON with an empty table, and the topics.

    Return `data` unchanged and no topics if it has at most INFLATE_BYTES, or is not laid out as
    Java's and our brokers write it. Raises ProtocolError for an invalid topic, for too many topics,
    and if the registration is not wanted any more.
    """
    found = _TOPIC_TABLE.search(data)
    if found is None or len(data) <= INFLATE_BYTES:
        return data, {}
    topics: dict[str, TopicConfig] = {}
    begin, is_whole = found.end(), False
    try:
        end, is_whole = _read_topics(data, begin, topics, is_wanted)
    finally:
        if not is_whole:
            _free(topics)
    return (data[:begin] + data[end:], topics) if is_whole else (data, {})


def _read_topics(
    data: bytes, position: int, topics: dict[str, TopicConfig], is_wanted: Callable[[], bool]
) -> tuple[int, bool]:
    """Decode the members of a topic table from `position` on into `topics`. Return the position
    behind the last one, and whether the table ends there. Raises as `_cut_out_topics` does."""
    read = FORMS[TopicConfig].read
    while (member := _TOPIC.match(data, position)) is not None:
        try:
            name, values = orjson.loads(member[1]), orjson.loads(member[2])
        except orjson.JSONDecodeError:
            return position, False
        if values.get("topicName") is None:
            values["topicName"] = name
        topics[name] = read(values)
        if len(topics) > REGISTRATION_TOPICS_MAX:
            raise _too_many_topics()
        if len(topics) % ASKED_EVERY == 0 and not is_wanted():
            raise _unwanted()
        position = member.end()
        if not member[3]:
            break
    return position, data[position : position + 1] == b"}"


class _Inflated:
    """The content of a zlib stream, inflated piece by piece, so that little of it is in memory at a
    time and each piece takes about the same time."""

    def __init__(self, data: bytes | memoryview, bytes_max: int) -> None:
        self._inflater = zlib.decompressobj()
        self._data = memoryview(data)
        self._bytes_max = self._left = bytes_max
        self._buffer = b""
        self._position = 0

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes. Raises ProtocolError if the stream ends before, or if it
        has inflated to more than `bytes_max` bytes."""
        if len(self._buffer) - self._position < size:
            self._fill(size)
        begin, self._position = self._position, self._position + size
        return self._buffer[begin : self._position]

    def number(self) -> int:
        """Return the next four bytes as a signed integer. Raises ProtocolError."""
        return _INTEGER.unpack(self.take(_INTEGER.size))[0]  # type: ignore[no-any-return]

    def sized(self) -> bytes:
        """Return the next byte string, which follows its size. Raises ProtocolError."""
        size = self.number()
        if not 0 <= size <= self._bytes_max:
            raise ProtocolError(
                f"The compressed registration announces {size} bytes, the limit is "
                f"{self._bytes_max}."
            )
        return self.take(size)

    def _fill(self, size: int) -> None:
        """Inflate until `size` bytes are there."""
        pieces = [self._buffer[self._position :]]
        missing = size - len(pieces[0])
        while missing > 0:
            piece = self._piece()
            pieces.append(piece)
            missing -= len(piece)
        self._buffer, self._position = b"".join(pieces), 0

    def _piece(self) -> bytes:
        rest: bytes | memoryview = self._inflater.unconsumed_tail
        if not rest:
            rest, self._data = self._data[:DEFLATED_BYTES], self._data[DEFLATED_BYTES:]
        if self._inflater.eof or not rest:
            raise ProtocolError("The compressed registration is cut short.")
        try:
            piece = self._inflater.decompress(rest, INFLATE_BYTES)
        except zlib.error as error:
            raise ProtocolError(f"The compressed registration cannot be read: {error}.") from error
        self._left -= len(piece)
        if self._left < 0:
            raise ProtocolError(
                f"The compressed registration inflates to more than {self._bytes_max} bytes.",
                fix="Raise sluiceRegistrationBytesMax of the name server.",
            )
        return piece


def _decode_compressed(
    data: bytes | memoryview, bytes_max: int, is_wanted: Callable[[], bool]
) -> RegisterBody:
    inflated = _Inflated(data, bytes_max)
    version = inflated.sized()
    topics: dict[str, TopicConfig] = {}
    try:
        servers = _take_topics(inflated, topics, is_wanted)
    except ProtocolError:
        _free(topics)
        raise
    return RegisterBody(
        TopicTable(topics, decode_data_version(version) if version else DataVersion()),
        kind_of(tuple[str, ...]).read(fastjson.loads(servers or b"[]"), "servers"),
    )


def _free(topics: dict[str, TopicConfig]) -> None:
    """Free topics one by one, so that other threads can run between two of them."""
    while topics:
        topics.popitem()


def _take_topics(
    inflated: _Inflated, topics: dict[str, TopicConfig], is_wanted: Callable[[], bool]
) -> bytes:
    """Decode the topics into `topics`, and return the JSON of the filter servers, which follows
    them. Raises ProtocolError."""
    known: dict[str, dict[str, str]] = {}
    count = inflated.number()
    if count > REGISTRATION_TOPICS_MAX:
        raise _too_many_topics()
    for number in range(count):
        if number % ASKED_EVERY == 0 and not is_wanted():
            raise _unwanted()
        topic = _topic_of(inflated.sized(), known)
        topics[topic.name] = topic
    servers = inflated.sized()
    if len(servers) > PLAIN_BYTES_MAX or fastjson.weigh(servers).values > FILTER_SERVERS_MAX:
        raise ProtocolError(
            f"The list of filter servers has {len(servers)} bytes; the limit is "
            f"{PLAIN_BYTES_MAX} bytes and {FILTER_SERVERS_MAX} values."
        )
    return servers


def _unwanted() -> ProtocolError:
    return ProtocolError("The connection of the registration is closed.")


def _too_many_topics() -> ProtocolError:
    return ProtocolError(
        f"A registration has more than {REGISTRATION_TOPICS_MAX} topics.",
        fix="Delete topics that are not used, or spread them over more brokers.",
    )


def _topic_of(line: bytes, known: dict[str, dict[str, str]]) -> TopicConfig:
    """Return the topic of a text `name read write perm filterType attributesJson`. `known` keeps
    attributes by their text: most topics have the same."""
    text = line.decode("utf-8", "replace")
    parts = text.split(" ", 5)
    try:
        name, read, write, perm, filter_type = parts[:5]
        numbers = int(read), int(write), int(perm)
    except ValueError as error:
        raise ProtocolError(
            f"The topic text {text[:80]!r} is not `name read write perm filterType attributesJson`."
        ) from error
    written = parts[5] if len(parts) > 5 else ""
    attributes = known.get(written)
    if attributes is None:
        attributes = _attributes_of(name, written)
        if len(known) < KNOWN_MAX:
            known[written] = attributes
    return TopicConfig(name, *numbers, filter_type, attributes=attributes)


def _attributes_of(name: str, written: str) -> dict[str, str]:
    try:
        if len(written) > ATTRIBUTES_BYTES_MAX:
            raise ValueError(f"more than {ATTRIBUTES_BYTES_MAX} characters")  # noqa: TRY301
        values = orjson.loads(written or "{}")
    except ValueError as error:
        raise ProtocolError(
            f"The attributes of the topic {name[:80]!r} cannot be decoded: {error}."
        ) from error
    read: dict[str, str] = kind_of(dict[str, str]).read(values, "attributes")
    return read
