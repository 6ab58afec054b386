"""Requests about the registration of brokers at a name server, above all REGISTER_BROKER (103).

The body of REGISTER_BROKER is JSON, or compressed (spec/namesrv.md §2). The compressed form is a
zlib stream. Its content has big-endian integers of four bytes:

    | size | data version JSON | topic count | (size | topic text) ... |
    | size | filter servers JSON | mapping count | (size | mapping JSON) ... |

The mappings are present only from version 413 (V5_0_0) on. They are not decoded. A topic text is
`name read write perm filterType attributesJson`; it has neither sys flag nor order.

A broker may have 100,000 topics, so a name server decodes a registration in a separate thread.
Nothing here holds the interpreter's lock for more than a few milliseconds, not even to free the
topics of a registration that was refused.
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
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import (
    OBJECT_CODECS,
    body,
    boolean,
    int32,
    int64,
    json_field,
    text,
    value_codec,
)
from sluicemq.wire.fastjson import load_object
from sluicemq.wire.frames import VERSION
from sluicemq.wire.headers import request, response
from sluicemq.wire.tables import (
    TopicTable,
    decode_data_version,
    encode_data_version,
    topic_table_object,
)

BARE_VERSION_MAX: Final = 36
"""The last version, before V3_0_11, whose body is only the topic table."""
ZLIB_FIRST_BYTE: Final = 0x78
"""The first byte of a zlib stream."""
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
"""The most bytes of a registration in JSON without its topic table. It is the limit for the whole
registration if the table does not have the layout that the brokers of RocketMQ and SluiceMQ use."""
FILTER_SERVERS_MAX: Final = 4096
"""The most JSON values in the list of filter servers."""
ATTRIBUTES_CACHED_MAX: Final = 1000
TOPICS_PER_CHECK: Final = 1024
"""The number of topics that are decoded between two calls of `is_wanted`."""
OTHER_VALUES_MAX: Final = 262_144
"""The most JSON values in a registration without its topic table."""
_INTEGER: Final = struct.Struct(">i")


@request(Code.UNREGISTER_BROKER, Code.QUERY_DATA_VERSION)
class BrokerRequest:
    broker: str = text("brokerName")
    address: str = text("brokerAddr")
    cluster: str = text("clusterName")
    broker_id: int = int64("brokerId")


@request(Code.REGISTER_BROKER)
class RegisterBrokerRequest(BrokerRequest):
    """The header of REGISTER_BROKER (103).

    `body_crc32` 0 means that the name server does not check the body.
    """

    ha_address: str = text("haServerAddr")
    heartbeat_timeout_ms: int | None = int64("heartbeatTimeoutMillis", default=None)
    acting_master_enable: bool | None = boolean("enableActingMaster", default=None)
    compressed: bool = boolean("compressed", default=False)
    body_crc32: int = int32("bodyCrc32", default=0)
    zone: str | None = text("__ZONE_NAME", default=None)


@response(Code.REGISTER_BROKER)
class RegisterBrokerResponse:
    """The header of the response to REGISTER_BROKER (103).

    Both addresses are those of the master. They are present if the broker is a slave whose master
    is registered.
    """

    ha_address: str | None = text("haServerAddr", default=None)
    master_address: str | None = text("masterAddr", default=None)


@response(Code.QUERY_DATA_VERSION)
class QueryDataVersionResponse:
    changed: bool = boolean("changed")


@body
class RegisterBody:
    """The body of REGISTER_BROKER (103): the topics and the filter servers of a broker.

    SluiceMQ's brokers have no filter servers.
    """

    table: TopicTable = json_field("topicConfigSerializeWrapper", write=topic_table_object)
    filter_servers: tuple[str, ...] = json_field("filterServerList", default=())


def encode_register_body(body: RegisterBody, *, compressed: bool = False) -> bytes:
    """Encode the body with which a broker registers its topics (REGISTER_BROKER, 103).

    The result is JSON, or compressed by zlib in a format of its own if `compressed` is set. The
    version in the header of the request must be 479.
    """
    if not compressed:
        return fastjson.dumps(OBJECT_CODECS[RegisterBody].write(body))
    sections = [_with_size(encode_data_version(body.table.data_version))]
    sections.append(_INTEGER.pack(len(body.table.topics)))
    for topic in body.table.topics.values():
        queues_and_perm = f"{topic.read_queues} {topic.write_queues} {topic.perm}"
        topic_text = f"{topic.name} {queues_and_perm} {topic.filter_type} ".encode()
        attributes_text = fastjson.dumps(dict(topic.attributes))
        sections.append(_with_size(topic_text + attributes_text))
    sections.append(_with_size(fastjson.dumps(list(body.filter_servers))))
    sections.append(_INTEGER.pack(0))  # mappings of static topics
    return zlib.compress(b"".join(sections), 9)


def _with_size(content: bytes) -> bytes:
    """Return `content` behind its size."""
    return _INTEGER.pack(len(content)) + content


def decode_register_body(
    request_body: bytes | memoryview,
    *,
    compressed: bool = False,
    version: int = VERSION,
    bytes_max: int = REGISTRATION_BYTES_MAX,
    is_wanted: Callable[[], bool] = lambda: True,
) -> RegisterBody:
    """Decode the body with which a broker registers its topics (REGISTER_BROKER, 103).

    An empty body has no topics.

    - `compressed` is the flag in the request. A body with the first byte of a zlib stream also
      counts as compressed, because the 5.x Java broker sends such bodies with the flag false
      (spec/namesrv.md §2). JSON cannot begin with that byte.
    - `version` is the version in the header of the request. Up to BARE_VERSION_MAX a body is only
      a topic table, and never compressed.
    - `bytes_max` limits the size after decompression.
    - `is_wanted()` is called about once for every TOPICS_PER_CHECK topics. It returns False to
      cancel the decoding, for example because the connection is closed.

    Raises ProtocolError if the body is invalid or exceeds a limit, or if `is_wanted` returns False.

    The function lets other threads run every few milliseconds, so a thread can decode 100,000
    topics while an event loop runs in another one.
    """
    if not request_body:
        return RegisterBody(TopicTable())
    is_bare = version <= BARE_VERSION_MAX
    is_compressed = compressed or request_body[0] == ZLIB_FIRST_BYTE
    if is_compressed and not is_bare:
        return _decode_compressed(request_body, bytes_max, is_wanted)
    if len(request_body) > bytes_max:
        raise ProtocolError(
            f"The registration has {len(request_body)} bytes; the limit is {bytes_max}."
        )
    return _decode_json(bytes(request_body), is_bare, is_wanted)


def _decode_json(json_body: bytes, is_bare: bool, is_wanted: Callable[[], bool]) -> RegisterBody:
    """Decode a body in JSON, which contains only a topic table if `is_bare` is set.

    `is_wanted()` returns False to cancel the decoding. Raises ProtocolError if the body is invalid
    or exceeds a limit, or if the decoding is cancelled.
    """
    other_json, topics = _cut_out_topics(json_body, is_wanted)
    is_too_long = len(other_json) > PLAIN_BYTES_MAX
    if is_too_long or fastjson.bound_counts(other_json).values > OTHER_VALUES_MAX:
        raise ProtocolError(
            f"The registration has {len(other_json)} bytes of JSON outside of its topic table; the "
            f"limit is {PLAIN_BYTES_MAX} bytes and {OTHER_VALUES_MAX} values. Write the table as "
            "plain JSON."
        )
    json_object = load_object(other_json, "registration")
    if is_bare:
        registration = RegisterBody(OBJECT_CODECS[TopicTable].read(json_object))
    else:
        registration = OBJECT_CODECS[RegisterBody].read(json_object)
    if not topics:
        return registration
    table = TopicTable(topics, registration.table.data_version, registration.table.unknown)
    return RegisterBody(table, registration.filter_servers)


_TEXT: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_FLAT: Final = rb'[^"{}\[\]]*(?:' + _TEXT + rb'[^"{}\[\]]*)*'
_BLANK: Final = rb"[ \t\r\n]*"
_TOPIC_TABLE: Final = re.compile(rb'"topicConfigTable"' + _BLANK + b":" + _BLANK + rb"\{" + _BLANK)
_TOPIC: Final = re.compile(
    b"(" + _TEXT + b")" + _BLANK + b":" + _BLANK
    + rb"(\{" + _FLAT + rb"(?:\{" + _FLAT + rb"\}" + _FLAT + rb")*\})" + _BLANK + b"(,?)" + _BLANK,
    re.DOTALL,
)  # fmt: skip
"""One member of the topic table: the name of the topic, its configuration, and a comma if another
member follows. The attributes in a configuration are objects one level deeper."""


def _cut_out_topics(
    json_body: bytes, is_wanted: Callable[[], bool]
) -> tuple[bytes, dict[str, TopicConfig]]:
    """Decode the topics of a registration in JSON one by one, and remove them from the JSON.

    Return the JSON with an empty topic table, and the topics by name. One by one, because orjson
    would not let another thread run while it decodes 16 MiB.

    Return `json_body` unchanged and no topics if it has at most INFLATE_BYTES, or if it does not
    have the layout that the brokers of RocketMQ and SluiceMQ use. Raises ProtocolError for an
    invalid topic, for too many topics, and if `is_wanted()` returns False.
    """
    table_start = _TOPIC_TABLE.search(json_body)
    if table_start is None or len(json_body) <= INFLATE_BYTES:
        return json_body, {}
    topics: dict[str, TopicConfig] = {}
    members_start = table_start.end()
    is_table_read = False
    try:
        members_end, is_table_read = _read_topics(json_body, members_start, topics, is_wanted)
    finally:
        if not is_table_read:
            _free(topics)
    if not is_table_read:
        return json_body, {}
    return json_body[:members_start] + json_body[members_end:], topics


def _read_topics(
    json_body: bytes, position: int, topics: dict[str, TopicConfig], is_wanted: Callable[[], bool]
) -> tuple[int, bool]:
    """Decode the members of a topic table from `position` on, and add them to `topics`.

    Return the position behind the last decoded member, and whether the table ends there. It does
    not if the next member has an unusual layout. Raises ProtocolError for an invalid topic, for too
    many topics, and if `is_wanted()` returns False.
    """
    read_topic = OBJECT_CODECS[TopicConfig].read
    while (member := _TOPIC.match(json_body, position)) is not None:
        try:
            name = orjson.loads(member[1])
            topic_object = orjson.loads(member[2])
        except orjson.JSONDecodeError:
            return position, False
        if topic_object.get("topicName") is None:
            topic_object["topicName"] = name
        topics[name] = read_topic(topic_object)
        if len(topics) > REGISTRATION_TOPICS_MAX:
            raise _too_many_topics_error()
        if len(topics) % TOPICS_PER_CHECK == 0 and not is_wanted():
            raise _unwanted_error()
        position = member.end()
        if not member[3]:  # no comma follows
            break
    return position, json_body[position : position + 1] == b"}"


class _InflatingReader:
    """Reads the content of a zlib stream, and inflates it piece by piece.

    Only a small part of the content is in memory at a time, and each piece takes about the same
    time. `data` is the stream, and `bytes_max` the most bytes of its content.
    """

    def __init__(self, deflated: bytes | memoryview, bytes_max: int) -> None:
        """Read a zlib stream in small pieces, so that other threads can run.

        `deflated` is the compressed stream. At most `bytes_max` bytes of its content are inflated.
        """
        self._inflater = zlib.decompressobj()
        self._data = memoryview(deflated)  # what the inflater has not got yet
        self._bytes_max = self._bytes_left = bytes_max
        self._buffer = b""  # inflated bytes, which are read up to `_position`
        self._position = 0

    def read_bytes(self, size: int) -> bytes:
        """Return the next `size` bytes of the inflated content.

        Raises ProtocolError if the stream ends before them, is malformed, or inflates to more than
        `bytes_max` bytes.
        """
        if len(self._buffer) - self._position < size:
            self._fill(size)
        start = self._position
        self._position += size
        return self._buffer[start : self._position]

    def read_int32(self) -> int:
        """Return the next four bytes as a signed integer. Raises ProtocolError."""
        return _INTEGER.unpack(self.read_bytes(_INTEGER.size))[0]  # type: ignore[no-any-return]

    def read_sized(self) -> bytes:
        """Read a size of 32 bits, and return that many bytes behind it.

        Raises ProtocolError if the size is negative or above the limit, or if the stream ends early
        or is malformed.
        """
        size = self.read_int32()
        if not 0 <= size <= self._bytes_max:
            raise ProtocolError(
                f"The compressed registration announces {size} bytes; the limit is "
                f"{self._bytes_max}."
            )
        return self.read_bytes(size)

    def _fill(self, size: int) -> None:
        """Inflate pieces until the buffer has `size` unread bytes.

        Raises ProtocolError if the stream ends before, is malformed, or exceeds the limit.
        """
        inflated_pieces = [self._buffer[self._position :]]
        missing = size - len(inflated_pieces[0])
        while missing > 0:
            inflated_piece = self._inflate_piece()
            inflated_pieces.append(inflated_piece)
            missing -= len(inflated_piece)
        self._buffer = b"".join(inflated_pieces)
        self._position = 0

    def _inflate_piece(self) -> bytes:
        """Inflate and return the next piece, of at most INFLATE_BYTES.

        Raises ProtocolError if the stream has ended, is malformed, or exceeds the limit.
        """
        # The input that the inflater did not use because its output reached INFLATE_BYTES.
        deflated: bytes | memoryview = self._inflater.unconsumed_tail
        if not deflated:
            deflated = self._data[:DEFLATED_BYTES]
            self._data = self._data[DEFLATED_BYTES:]
        if self._inflater.eof or not deflated:
            raise ProtocolError("The compressed registration ends early.")
        try:
            inflated = self._inflater.decompress(deflated, INFLATE_BYTES)
        except zlib.error as error:
            raise ProtocolError(f"The compressed registration cannot be read: {error}.") from error
        self._bytes_left -= len(inflated)
        if self._bytes_left < 0:
            raise ProtocolError(
                f"The compressed registration inflates to more than {self._bytes_max} bytes.",
                fix="Raise sluiceRegistrationBytesMax of the name server.",
            )
        return inflated


def _decode_compressed(
    deflated: bytes | memoryview, bytes_max: int, is_wanted: Callable[[], bool]
) -> RegisterBody:
    """Decode a registration compressed by zlib.

    `bytes_max` limits the size after decompression. `is_wanted()` returns False to cancel the
    decoding. Raises ProtocolError if the content is malformed or exceeds a limit, or if the
    decoding is cancelled.
    """
    reader = _InflatingReader(deflated, bytes_max)
    version_json = reader.read_sized()
    topics: dict[str, TopicConfig] = {}
    try:
        servers_json = _read_topics_and_servers(reader, topics, is_wanted)
    except ProtocolError:
        _free(topics)
        raise
    data_version = decode_data_version(version_json) if version_json else DataVersion()
    servers = fastjson.loads(servers_json or b"[]")
    filter_servers = value_codec(tuple[str, ...]).read(servers, "servers")
    return RegisterBody(TopicTable(topics, data_version), filter_servers)


def _free(topics: dict[str, TopicConfig]) -> None:
    """Remove all topics, one by one.

    Python frees a large dict in one step, during which no other thread can run.
    """
    while topics:
        topics.popitem()


def _read_topics_and_servers(
    reader: _InflatingReader, topics: dict[str, TopicConfig], is_wanted: Callable[[], bool]
) -> bytes:
    """Decode the topics of a compressed body, and return the JSON of its filter servers.

    The topics are added to `topics`. `reader` must be behind the data version. Raises ProtocolError
    if the content is malformed or exceeds a limit, or if `is_wanted()` returns False. `topics` may
    then contain some topics.
    """
    attributes_by_text: dict[str, dict[str, str]] = {}
    topic_count = reader.read_int32()
    if topic_count > REGISTRATION_TOPICS_MAX:
        raise _too_many_topics_error()
    for index in range(topic_count):
        if index % TOPICS_PER_CHECK == 0 and not is_wanted():
            raise _unwanted_error()
        topic = _parse_topic(reader.read_sized(), attributes_by_text)
        topics[topic.name] = topic
    servers_json = reader.read_sized()
    if (
        len(servers_json) > PLAIN_BYTES_MAX
        or fastjson.bound_counts(servers_json).values > FILTER_SERVERS_MAX
    ):
        raise ProtocolError(
            f"The list of filter servers has {len(servers_json)} bytes; the limit is "
            f"{PLAIN_BYTES_MAX} bytes and {FILTER_SERVERS_MAX} values."
        )
    return servers_json


def _unwanted_error() -> ProtocolError:
    """Return the error for a registration of which `is_wanted` has returned False."""
    return ProtocolError("The connection of the registration is closed.")


def _too_many_topics_error() -> ProtocolError:
    """Return the error for a registration with more than REGISTRATION_TOPICS_MAX topics."""
    return ProtocolError(
        f"A registration has more than {REGISTRATION_TOPICS_MAX} topics.",
        fix="Delete topics that are not used, or spread them over more brokers.",
    )


def _parse_topic(line: bytes, attributes_by_text: dict[str, dict[str, str]]) -> TopicConfig:
    """Return the topic that a line of a compressed registration describes.

    The line is `name read write perm filterType attributesJson`. `attributes_by_text` is a cache
    that maps attributesJson to the parsed attributes, because most topics have the same ones. New
    ones are added up to ATTRIBUTES_CACHED_MAX. Raises ProtocolError if the line is malformed.
    """
    topic_text = line.decode("utf-8", "replace")
    words = topic_text.split(" ", 5)
    try:
        name, read, write, perm, filter_type = words[:5]
        queues_and_perm = int(read), int(write), int(perm)
    except ValueError as error:
        raise ProtocolError(
            f"The topic text {topic_text[:80]!r} is not "
            "`name read write perm filterType attributesJson`."
        ) from error
    attributes_text = words[5] if len(words) > 5 else ""
    attributes = attributes_by_text.get(attributes_text)
    if attributes is None:
        attributes = _parse_attributes(name, attributes_text)
        if len(attributes_by_text) < ATTRIBUTES_CACHED_MAX:
            attributes_by_text[attributes_text] = attributes
    return TopicConfig(name, *queues_and_perm, filter_type, attributes=attributes)


def _parse_attributes(topic_name: str, attributes_text: str) -> dict[str, str]:
    """Return the attributes of the topic `topic_name` from their JSON text; {} if it is empty.

    Raises ProtocolError if the text is too long, or is not a JSON object.
    """
    try:
        if len(attributes_text) > ATTRIBUTES_BYTES_MAX:
            raise ValueError(f"more than {ATTRIBUTES_BYTES_MAX} characters")  # noqa: TRY301 - one handler adds the topic's name to both errors
        attributes_object = orjson.loads(attributes_text or "{}")
    except ValueError as error:
        raise ProtocolError(
            f"The attributes of the topic {topic_name[:80]!r} cannot be decoded: {error}."
        ) from error
    attributes: dict[str, str] = value_codec(dict[str, str]).read(attributes_object, "attributes")
    return attributes
