"""What a broker sends with 103 (spec/namesrv.md §2): JSON, or compressed.

Compressed is a zlib stream; inside, integers of four bytes, big-endian:

    | size | data version JSON | topic count | (size | topic text) ... |
    | size | filter servers JSON | mapping count | (size | mapping JSON) ... |

The mappings are there only from version 413 (V5_0_0) on. A topic text is
`name read write perm filterType attributesJson`; it loses sys flag and order.
"""

import struct
import zlib
from typing import Final

from sluicemq.errors import ProtocolError
from sluicemq.model.topic import DataVersion, TopicConfig
from sluicemq.wire import fastjson
from sluicemq.wire.forms import FORMS, body, json, kind_of, load_object
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
INFLATED_BYTES_MAX: Final = 64 * 1024 * 1024
"""A million topics; a body that inflates to more is refused."""
_INTEGER: Final = struct.Struct(">i")


@body
class RegisterBody:
    """The topics that a broker brings, and its filter servers (always none of ours)."""

    table: TopicTable = json("topicConfigSerializeWrapper", write=topic_table_object)
    filter_servers: tuple[str, ...] = json("filterServerList", default=())


def encode_register_body(body: RegisterBody, *, compressed: bool = False) -> bytes:
    """103's body for a header of version 479."""
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
    data: bytes | memoryview, *, compressed: bool = False, version: int = VERSION
) -> RegisterBody:
    """103's body; empty means no topics. `version` is that of the request's header.

    The 5.x Java broker says `compressed=false` even when it compressed (spec/namesrv.md §2), so
    the first byte counts too: no JSON begins with it.
    """
    if not data:
        return RegisterBody(TopicTable())
    if (compressed or data[0] == ZLIB_FIRST_BYTE) and version > BARE_VERSION_MAX:
        return _decode_compressed(data)
    values = load_object(data, "registration")
    if version <= BARE_VERSION_MAX:
        return RegisterBody(FORMS[TopicTable].read(values))
    read: RegisterBody = FORMS[RegisterBody].read(values)
    return read


def _decode_compressed(data: bytes | memoryview) -> RegisterBody:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, INFLATED_BYTES_MAX)
    except zlib.error as error:
        raise ProtocolError(f"The compressed registration cannot be read: {error}.") from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise ProtocolError(
            f"The compressed registration is cut short, or longer than {INFLATED_BYTES_MAX} bytes."
        )
    version, position = _take(inflated, 0)
    count, position = _count(inflated, position)
    topics: dict[str, TopicConfig] = {}
    for _ in range(count):
        text, position = _take(inflated, position)
        topic = _topic_from(text.decode("utf-8", "replace"))
        topics[topic.name] = topic
    servers, _ = _take(inflated, position)
    return RegisterBody(
        TopicTable(topics, decode_data_version(version) if version else DataVersion()),
        kind_of(tuple[str, ...]).read(fastjson.loads(servers or b"[]"), "servers"),
    )


def _count(data: bytes, position: int) -> tuple[int, int]:
    if position + 4 > len(data):
        raise ProtocolError("The compressed registration ends inside a number.")
    return _INTEGER.unpack_from(data, position)[0], position + 4


def _take(data: bytes, position: int) -> tuple[bytes, int]:
    size, start = _count(data, position)
    if size < 0 or start + size > len(data):
        raise ProtocolError(f"The compressed registration has no room for {size} bytes.")
    return data[start : start + size], start + size


def _topic_from(text: str) -> TopicConfig:
    parts = text.split(" ", 5)
    try:
        name, read, write, perm, filter_type = parts[:5]
        attributes = fastjson.loads(parts[5]) if len(parts) > 5 and parts[5] else {}
        return TopicConfig(
            name,
            int(read),
            int(write),
            int(perm),
            filter_type,
            attributes=kind_of(dict[str, str]).read(attributes, "attributes"),
        )
    except ValueError as error:
        raise ProtocolError(f"The topic text {text[:80]!r} is not `name r w perm type`.") from error
