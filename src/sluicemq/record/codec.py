"""Encode and decode stored messages one at a time, and the bodies of client batches.

`layout` declares the bytes. The response to a pull is a concatenation of records. The store packs
the same layout with faster code of its own; tests check that both are equal.

The CRC in the head of a record covers the body only. With `enabledAppendPropCRC` the properties end
with one more property, the checksum, of 20 bytes (spec/store.md §2.4):

    | __CRC32# 8 | 0x01 | ten digits, the least significant first | 0x02 |

Its value is the CRC-32, of which 31 bits are used, of all earlier bytes of the record, including
offsets and store time. The writer reserves the bytes when it encodes the record
(`reserve_checksum`), and fills them in at the end (`fill_checksum`).

A client batch (§2.5) contains messages of one topic and queue in one request. The broker splits it,
and stores ordinary records with consecutive queue offsets.
"""

import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.model import properties as reserved
from sluicemq.model.bodies import BODY_BYTES_MAX, COMPRESSED, Buffer
from sluicemq.model.ids import CACHED_LENGTH_MAX, HOST_BYTES_IPV6, decode_host, java_hash, tag_code
from sluicemq.model.message import (
    BORN_HOST_IPV6,
    KEYS,
    STORE_HOST_IPV6,
    TAGS,
    UNIQ_KEY,
    StoredMessage,
)
from sluicemq.record import layout
from sluicemq.record.layout import (
    BATCH_HEAD,
    CRC_MASK,
    HOST_BITS,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS,
    PROPERTIES_BYTES_MAX,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
    RECORD_HEADS,
)

NAME_END: Final = chr(layout.NAME_END)
VALUE_END: Final = chr(layout.VALUE_END)


def tag_code_of_properties(properties: bytes) -> int:
    """Return the code (hash) of the tag in encoded properties; 0 if there is no tag. HOT.

    Of several tags the last one counts.
    """
    start = properties.rfind(b"\x02TAGS\x01")
    if start >= 0:
        start += 6
    elif properties.startswith(b"TAGS\x01"):
        start = 5
    else:
        return 0
    end = properties.find(b"\x02", start)
    if end < 0:  # the last 0x02 may be missing
        return tag_code_of_tag(properties[start:])
    return tag_code_of_tag(properties[start:end])


def tag_code_of_text(properties: str) -> int:
    """Return the code (hash) of the tag in properties as text; 0 if there is no tag. HOT.

    The text is the encoded form decoded to str: `name 0x01 value 0x02` for each property. It must
    end with 0x02.
    """
    start = properties.rfind("\x02TAGS\x01")
    if start >= 0:
        return tag_code(properties[start + 6 : properties.find(VALUE_END, start + 6)])
    if properties.startswith("TAGS\x01"):
        return tag_code(properties[5 : properties.find(VALUE_END, 5)])
    return 0


def _compute_tag_code(tag: bytes) -> int:
    """Return the code of an encoded tag. Bytes that are not UTF-8 are replaced."""
    return tag_code(tag.decode("utf-8", "replace"))


_cached_code: Final = lru_cache(maxsize=65_536)(_compute_tag_code)


def tag_code_of_tag(tag: bytes) -> int:
    """Return the code of an encoded tag. The codes of short tags are cached."""
    return _cached_code(tag) if len(tag) <= CACHED_LENGTH_MAX else _compute_tag_code(tag)


def find_property(properties: bytes, name: bytes) -> bytes | None:
    """Return the value of property `name` in encoded properties; None if it is not there. HOT.

    Of several properties with this name the last one counts.
    """
    start = properties.rfind(b"\x02" + name + b"\x01")
    if start >= 0:
        start += len(name) + 2
    elif properties.startswith(name + b"\x01"):
        start = len(name) + 1
    else:
        return None
    end = properties.find(b"\x02", start)
    return properties[start:] if end < 0 else properties[start:end]


def format_property_text(properties: dict[str, str]) -> str:
    """Return the text form of properties: `name 0x01 value 0x02` for each.

    Properties with an empty value are left out, because no receiver reads them. Names and values
    are not checked.
    """
    return "".join(
        [f"{name}{NAME_END}{value}{VALUE_END}" for name, value in properties.items() if value]
    )


def parse_property_text(properties: str) -> dict[str, str]:
    """Parse properties given as text: `name 0x01 value 0x02` for each property.

    Parts without a name or a value are ignored, as by RocketMQ's parser. Of several properties with
    the same name the last one counts.
    """
    parsed: dict[str, str] = {}
    for encoded_property in properties.split(VALUE_END):
        name, _, value = encoded_property.partition(NAME_END)
        if name and value:
            parsed[name] = value
    return parsed


_FIRST: Final = RECORD_HEAD.struct_of("size", "magic", "sys_flag", "born_time").unpack_from
_HEAD_FORMS: Final = {
    kind: (
        head.struct_of(
            *(name for name, _ in head.fields if not name.endswith("_host"))
        ).unpack_from,
        head.at("born_host"),
        head.at("store_time"),
        head.at("store_host"),
        head.at("reconsume_times"),
        head.size,
    )
    for kind, head in RECORD_HEADS.items()
}
"""What `parse_head` needs to read a head, by the host bits of its system flag.

Each entry consists of the function that reads the numbers of the head, where the born host begins
and ends, where the store host begins and ends, and the size of the head.
"""
_FLAGS_AT: Final = RECORD_HEAD.at("sys_flag")
_LENGTH_AT: Final = {kind: head.at("body_length") for kind, head in RECORD_HEADS.items()}
_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
_PLAIN: Final = RECORD_HEAD.struct_of(
    "size", "magic", "queue_offset", "sys_flag", "body_length"
).unpack_from
_ODD: Final = HOST_BITS | COMPRESSED
_BODY_AT: Final = RECORD_HEAD.at("body_length")


class RecordHead(NamedTuple):
    """The numbers of a record, and where its variable parts are.

    The variable parts (hosts, body, topic, properties) are slices: `data[head.body]` is the stored
    body if `data` is the buffer that was parsed.
    """

    size_bytes: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_time_ms: int
    born_host: slice
    store_time_ms: int
    store_host: slice
    reconsume_times: int
    prepared_offset: int
    body: slice
    topic: slice
    properties: slice


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return encoded properties: `name 0x01 value 0x02` for each, in UTF-8.

    Unlike `format_property_text`, this keeps empty values. Raises ProtocolError if a name or value
    contains one of these two characters.
    """
    for name, value in properties.items():
        if NAME_END in name or VALUE_END in name or NAME_END in value or VALUE_END in value:
            raise ProtocolError(
                f"The property {name!r} contains a character 0x01 or 0x02.",
                fix="Remove these characters, which separate properties, from name and value.",
            )
    text = "".join([f"{name}{NAME_END}{value}{VALUE_END}" for name, value in properties.items()])
    return text.encode()


def decode_properties(encoded: Buffer) -> dict[str, str]:
    """Return the dict of encoded properties, as `parse_property_text` does.

    Bytes that are not UTF-8 are replaced.
    """
    return parse_property_text(str(encoded, "utf-8", "replace"))


_V1_TOPIC_BYTES_MAX: Final = 127
"""The most bytes of a topic in the layout V1: its length field is a signed byte."""


def _make_length_error(topic: bytes, properties: Buffer, topic_length_max: int) -> ProtocolError:
    """Make the error for a topic or properties that are too long for their length field."""
    if len(topic) > topic_length_max:
        return ProtocolError(
            f"The topic has {len(topic)} bytes, more than its length field can express."
        )
    return ProtocolError(
        f"The properties have {len(properties)} bytes, the limit is {PROPERTIES_BYTES_MAX}."
    )


def encode_record(
    *,
    topic: str,
    queue_id: int,
    queue_offset: int,
    physical_offset: int,
    body: Buffer,
    properties: Buffer,
    flag: int,
    sys_flag: int,
    born_time_ms: int,
    born_host: Buffer,
    store_time_ms: int,
    store_host: Buffer,
    reconsume_times: int = 0,
    prepared_offset: int = 0,
    version2: bool | None = None,
) -> bytes:
    """Encode a record. This is the reference for faster encoders.

    - `body` and `properties` are bytes as they are stored, `properties` from `encode_properties`.
    - `born_host` and `store_host` are encoded hosts of 8 bytes (IPv4) or 20 (IPv6). They decide the
      host bits of the stored system flag; the host bits of `sys_flag` are ignored.
    - `version2` selects the V2 layout. None means V2 if the topic has more than 127 bytes.

    Raises ProtocolError if the topic or the properties are longer than their length field can
    express, or if a number does not fit into its field.
    """
    encoded_topic = topic.encode()
    if version2 is None:
        version2 = len(encoded_topic) > _V1_TOPIC_BYTES_MAX
    if version2:
        magic = MAGIC_V2
        topic_length_max = PROPERTIES_BYTES_MAX
    else:
        magic = MAGIC_V1
        topic_length_max = _V1_TOPIC_BYTES_MAX
    if len(encoded_topic) > topic_length_max or len(properties) > PROPERTIES_BYTES_MAX:
        raise _make_length_error(encoded_topic, properties, topic_length_max)
    topic_length = _SHORT.pack(len(encoded_topic)) if version2 else bytes([len(encoded_topic)])
    properties_length = _SHORT.pack(len(properties))
    tail = b"".join((body, topic_length, encoded_topic, properties_length, properties))

    host_bits = 0
    if len(born_host) == HOST_BYTES_IPV6:
        host_bits |= BORN_HOST_IPV6
    if len(store_host) == HOST_BYTES_IPV6:
        host_bits |= STORE_HOST_IPV6
    head = RECORD_HEADS[host_bits]
    head_values = (
        head.size + len(tail),
        magic,
        zlib.crc32(body) & CRC_MASK,
        queue_id,
        flag,
        queue_offset,
        physical_offset,
        sys_flag & ~HOST_BITS | host_bits,
        born_time_ms,
        bytes(born_host),
        store_time_ms,
        bytes(store_host),
        reconsume_times,
        prepared_offset,
        len(body),
    )
    try:
        return head.struct.pack(*head_values) + tail
    except struct.error as error:
        misfit = head.describe_misfit(*head_values)
        raise ProtocolError(misfit, fix="Use a number in that range.") from error


def parse_head(data: Buffer, offset: int = 0) -> RecordHead:
    """Parse the head of the record at `offset` in `data`, and locate its parts.

    The result has the numbers of the record, and slices of `data` for hosts, body, topic and
    properties. Raises ProtocolError unless there is a whole record whose lengths agree with its
    size. The CRC of the body is not checked.
    """
    try:
        size_bytes, magic, sys_flag, _ = _FIRST(data, offset)
        if magic not in MAGICS:
            raise ProtocolError(
                f"No record begins at {offset}: its magic number is {magic & 0xFFFFFFFF:#x}."
            )
        if size_bytes < RECORD_BYTES_MIN or offset + size_bytes > len(data):
            raise ProtocolError(
                f"The record at {offset} has a size of {size_bytes} bytes, but fewer are left."
            )
        unpack_head, born_start, born_end, store_start, store_end, head_bytes = _HEAD_FORMS[
            sys_flag & HOST_BITS
        ]
        # The first numbers, up to the birth time, are in the order of RecordHead.
        *first_numbers, store_time, reconsume_times, prepared_offset, body_length = unpack_head(
            data, offset
        )
        body = slice(offset + head_bytes, offset + head_bytes + body_length)
        if magic == MAGIC_V1:
            topic_start = body.stop + 1
            topic_length = data[body.stop]
        else:
            topic_start = body.stop + 2
            topic_length = _SHORT.unpack_from(data, body.stop)[0]
        topic = slice(topic_start, topic_start + topic_length)
        properties_length = _SHORT.unpack_from(data, topic.stop)[0]
        properties = slice(topic.stop + 2, topic.stop + 2 + properties_length)
    except (struct.error, IndexError):
        raise ProtocolError(f"The record at {offset} is incomplete.") from None
    lengths = body_length, topic_length, properties_length
    if properties.stop - offset != size_bytes or min(lengths) < 0:
        raise ProtocolError(
            f"The record at {offset} has a size of {size_bytes} bytes, but its parts have "
            f"{properties.stop - offset}: body, topic and properties have {lengths}."
        )
    born_host = slice(offset + born_start, offset + born_end)
    store_host = slice(offset + store_start, offset + store_end)
    return RecordHead._make(
        (
            *first_numbers,
            born_host,
            store_time,
            store_host,
            reconsume_times,
            prepared_offset,
            body,
            topic,
            properties,
        )
    )


def is_body_intact(data: Buffer, head: RecordHead) -> bool:
    """Return whether the body of a record in `data` matches the CRC in its `head`."""
    return zlib.crc32(memoryview(data)[head.body]) & CRC_MASK == head.body_crc


def decode_record(
    data: Buffer, offset: int = 0, *, broker: str = "", body_bytes_max: int = BODY_BYTES_MAX
) -> StoredMessage:
    """Decode the record at `offset` in `data`.

    The body is decompressed when it is first read; that fails if it grows beyond `body_bytes_max`
    bytes. `broker` is the name of the broker in the message. Raises ProtocolError if there is no
    whole record.
    """
    head = parse_head(data, offset)
    return StoredMessage(
        topic=str(data[head.topic], "utf-8", "replace"),
        queue_id=head.queue_id,
        queue_offset=head.queue_offset,
        physical_offset=head.physical_offset,
        size_bytes=head.size_bytes,
        raw_body=bytes(data[head.body]),
        properties=decode_properties(data[head.properties]),
        flag=head.flag,
        sys_flag=head.sys_flag,
        born_time_ms=head.born_time_ms,
        born_host=decode_host(bytes(data[head.born_host])),
        store_time_ms=head.store_time_ms,
        store_host=decode_host(bytes(data[head.store_host])),
        reconsume_times=head.reconsume_times,
        prepared_offset=head.prepared_offset,
        body_crc=head.body_crc,
        broker=broker,
        body_bytes_max=body_bytes_max,
    )


def decode_records(
    data: Buffer, *, broker: str = "", body_bytes_max: int = BODY_BYTES_MAX
) -> list[StoredMessage]:
    """Decode records that follow each other, such as the body of the response to a pull.

    `broker` is the name of the broker in the messages. A compressed body may grow to
    `body_bytes_max` bytes. Raises ProtocolError if `data` does not consist of whole records.
    """
    messages = []
    offset = 0
    end = len(data)
    while offset < end:
        message = decode_record(data, offset, broker=broker, body_bytes_max=body_bytes_max)
        messages.append(message)
        offset += message.size_bytes
    return messages


def split_records(
    data: Buffer,
    broker: str = "",
    tags: Collection[str] = (),
    body_bytes_max: int = BODY_BYTES_MAX,
) -> list[tuple[int, int, bytes | StoredMessage]]:
    """Split records that follow each other, without decoding plain ones. HOT: for each pull.

    Return (queue offset, size, record) for each record. A plain record is returned as its bytes,
    which `decode_record` decodes later. A record with layout V2, a compressed body or an IPv6 host
    is not plain. It is returned as a message, whose body is not decompressed yet.

    If `tags` is not empty, only records with one of these tags are returned. Raises ProtocolError
    if `data` does not consist of whole records.
    """
    records: list[tuple[int, int, bytes | StoredMessage]] = []
    offset = 0
    end = len(data)
    while offset < end:
        try:
            size_bytes, magic, queue_offset, sys_flag, body_length = _PLAIN(data, offset)
            topic_start = offset + RECORD_HEAD.size + body_length
            properties_start = topic_start + 1 + data[topic_start]
            record_end = properties_start + 2 + _SHORT.unpack_from(data, properties_start)[0]
        except (struct.error, IndexError):
            # Not a plain record. `decode_record` decodes it or raises the error.
            size_bytes = magic = queue_offset = sys_flag = body_length = 0
            properties_start = record_end = 0
        is_whole = record_end - offset == size_bytes and record_end <= end and body_length >= 0
        if magic == MAGIC_V1 and is_whole and not sys_flag & _ODD:
            plain = bytes(data[offset:record_end])
            if not tags or _find_tag(plain, properties_start + 2 - offset) in tags:
                records.append((queue_offset, size_bytes, plain))
        else:
            record = decode_record(data, offset, broker=broker, body_bytes_max=body_bytes_max)
            record_end = offset + record.size_bytes
            if not tags or record.tag in tags:
                records.append((record.queue_offset, record.size_bytes, record))
        offset = record_end
    return records


def _find_tag(record: bytes, begin: int) -> str | None:
    """Return the tag of a record whose properties begin at `begin`; None if it has none. HOT."""
    start = record.rfind(b"\x02TAGS\x01", begin) + 6
    if start < 6:  # `rfind` has returned -1
        if not record.startswith(b"TAGS\x01", begin):
            return None
        start = begin + 5
    end = record.find(b"\x02", start)
    if end < 0:
        end = len(record)
    if end == start:  # an empty tag counts as none, and an earlier one is valid
        return decode_properties(record[begin:]).get(TAGS)
    return str(record[start:end], "utf-8", "replace")


def raw_body_of(record: bytes | StoredMessage) -> bytes:
    """Return the stored body of a record that `split_records` returned.

    If the record is bytes, its stored body is not compressed. If it is a StoredMessage, its stored
    body may be compressed.
    """
    if not isinstance(record, bytes):
        return record.raw_body
    return record[RECORD_HEAD.size : RECORD_HEAD.size + _INT.unpack_from(record, _BODY_AT)[0]]


def tag_of(record: bytes | StoredMessage) -> str | None:
    """Return the tag of a record that `split_records` returned; None if it has none."""
    if not isinstance(record, bytes):
        return record.tag
    return _find_tag(record, properties_slice(record).start)


def properties_slice(data: Buffer, offset: int = 0) -> slice:
    """Return the slice of `data` with the encoded properties of the record at `offset`. HOT.

    Nothing is checked: the record must be valid.
    """
    (sys_flag,) = _INT.unpack_from(data, offset + _FLAGS_AT)
    index = offset + _LENGTH_AT[sys_flag & HOST_BITS]
    index += 4 + _INT.unpack_from(data, index)[0]
    # Byte 7 is the last one of the magic number. It tells how long the length of the topic is.
    if data[offset + 7] == MAGIC_V1 & 0xFF:
        index += 1 + data[index]
    else:
        index += 2 + _SHORT.unpack_from(data, index)[0]
    return slice(index + 2, index + 2 + _SHORT.unpack_from(data, index)[0])


CHECKSUM_NAME: Final = reserved.CHECKSUM
CHECKSUM_BYTES: Final = 20
"""The size of the checksum property."""
CHECKSUM_START: Final = f"{CHECKSUM_NAME}\x01".encode()
_END: Final = VALUE_END.encode()
_DIGITS: Final = 10
_CHECKSUM_PLACE: Final = CHECKSUM_START + b"0" * _DIGITS + _END


def reserve_checksum(properties: bytes) -> bytes:
    """Return encoded properties with a checksum property of zeros added at the end.

    `fill_checksum` later replaces the zeros. A checksum that a client sent is removed.
    """
    if CHECKSUM_START in properties:
        # Without the checksum of a client.
        kept_properties = [
            encoded_property
            for encoded_property in properties.split(_END)
            if not encoded_property.startswith(CHECKSUM_START)
        ]
        properties = _END.join(kept_properties)
    if properties and not properties.endswith(_END):
        properties += _END
    return properties + _CHECKSUM_PLACE


def fill_checksum(record: bytes) -> bytes:
    """Return the record with its checksum filled in.

    All other bytes must be final, and its properties must come from `reserve_checksum`.
    """
    content = record[:-CHECKSUM_BYTES]
    return content + CHECKSUM_START + _encode_checksum(zlib.crc32(content)) + _END


def has_valid_checksum(record: Buffer) -> bool:
    """Return whether `record`, which is exactly one record, ends with a correct checksum.

    Return False if it has no checksum.
    """
    content = memoryview(record)[:-CHECKSUM_BYTES]
    return (
        bytes(record[len(content) :])
        == CHECKSUM_START + _encode_checksum(zlib.crc32(content)) + _END
    )


def _encode_checksum(crc: int) -> bytes:
    """Return the value of the checksum property for a CRC-32.

    It has ten decimal digits, the least significant first, of the CRC's lower 31 bits.
    """
    return f"{crc & CRC_MASK:0{_DIGITS}d}"[::-1].encode()


BATCH_FIXED_BYTES = BATCH_HEAD.size + _SHORT.size
"""The size of a message in a batch without body and properties."""
COPIED_BYTES_MAX = 256 * 1024
"""The bodies of batches up to this size are copied; those of larger batches are views."""
_pack_head = BATCH_HEAD.struct.pack
_unpack_lengths = BATCH_HEAD.struct_of("size", "flag", "body_length").unpack_from


def encode_batch(messages: Iterable[tuple[int, bytes | memoryview, bytes]]) -> bytes:
    """Encode messages as the body of a batch request.

    `messages` yields (flag, body, encoded properties) for each message. Their number is not
    checked. Raises ProtocolError if the properties of a message have more than PROPERTIES_BYTES_MAX
    bytes, or if a number does not fit into its field.
    """
    batch_parts: list[bytes | memoryview] = []
    for flag, body, properties in messages:
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise ProtocolError(
                f"The properties of a message in the batch have {len(properties)} bytes,"
                f" the limit is {PROPERTIES_BYTES_MAX}."
            )
        message_bytes = BATCH_FIXED_BYTES + len(body) + len(properties)
        try:
            batch_parts += (_pack_head(message_bytes, 0, 0, flag, len(body)), body)
        except struct.error as error:
            misfit = BATCH_HEAD.describe_misfit(message_bytes, 0, 0, flag, len(body))
            raise ProtocolError(misfit, fix="Use a number in that range.") from error
        batch_parts += (_SHORT.pack(len(properties)), properties)
    return b"".join(batch_parts)


BATCH_MESSAGES_MAX: Final = 16_384
"""The most messages in a batch, which are stored in one piece. A batch of 1 MiB with messages of 64
bytes has this number."""


def iter_batch(batch: bytes | memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield (flag, body start, body end, message end) of each message in a batch. HOT.

    The last three are offsets in `batch`. The encoded properties begin two bytes behind the body,
    and end with the message.

    Raises ProtocolError at a message whose lengths do not agree with its size, or that extends
    beyond the batch, and if there are more than BATCH_MESSAGES_MAX messages.
    """
    unpack_head = _unpack_lengths
    unpack_length = _SHORT.unpack_from
    head_bytes = BATCH_HEAD.size
    batch_end = len(batch)
    message_start = count = 0
    while message_start < batch_end:
        try:
            message_bytes, flag, body_length = unpack_head(batch, message_start)
            body_start = message_start + head_bytes
            body_end = body_start + body_length
            if body_length < 0:
                raise _make_batch_error(message_start)
            (properties_length,) = unpack_length(batch, body_end)
        except struct.error:
            raise _make_batch_error(message_start) from None
        message_end = body_end + 2 + properties_length
        is_whole = message_end - message_start == message_bytes and message_end <= batch_end
        if properties_length < 0 or not is_whole:
            raise _make_batch_error(message_start)
        count += 1
        if count > BATCH_MESSAGES_MAX:
            raise ProtocolError(
                f"The batch has more than {BATCH_MESSAGES_MAX} messages.",
                fix="Send smaller batches.",
            )
        yield flag, body_start, body_end, message_end
        message_start = message_end


def decode_batch(body: Buffer) -> list[tuple[int, bytes | memoryview, bytes, int]]:
    """Return (flag, body, encoded properties, tag code) for each message in a batch. HOT.

    If the batch has more than COPIED_BYTES_MAX bytes, the bodies are views of it. Otherwise they
    are copies, which take less time. Raises ProtocolError if the batch is malformed or has too many
    messages.
    """
    is_small = len(body) <= COPIED_BYTES_MAX
    batch: bytes | memoryview = bytes(body) if is_small else memoryview(body)
    messages: list[tuple[int, bytes | memoryview, bytes, int]] = []
    for flag, body_start, body_end, message_end in iter_batch(batch):
        properties = batch[body_end + 2 : message_end]
        if not isinstance(properties, bytes):
            properties = bytes(properties)
        tag_code = 0
        if b"TAGS\x01" in properties:
            tag_code = tag_code_of_properties(properties)
        messages.append((flag, batch[body_start:body_end], properties, tag_code))
    return messages


def _make_batch_error(message_start: int) -> ProtocolError:
    """Return the error for the message at offset `message_start` of a batch."""
    return ProtocolError(
        f"The message at byte {message_start} of the batch is incomplete, or its lengths do not "
        "agree."
    )


# The key index (spec/store.md §4) finds a message by its topic together with its unique key
# (UNIQ_KEY), or with a word of its KEYS. The text `topic#key` is hashed. The unique key comes
# first, as in RocketMQ. Rolled-back messages are not indexed. Prepared messages are, under the
# topic in which they are stored. `store.index.columns` does the same for thousands of messages at
# once, and uses these functions for unusual ones.

HASH_MIN: Final = -(1 << 31)
ROLLBACK: Final = 0xC
"""The two bits of the system flag that contain the transaction type. Both are set for a rolled-back
message."""


class RecordKeys(NamedTuple):
    """What the key index needs of a record.

    `unique_key` is its UNIQ_KEY, "" if it has none. `keys` are the words of its KEYS, in order.
    """

    topic: str
    store_time_ms: int
    unique_key: str
    keys: list[str]


def hash_key(topic: str, key: str) -> int:
    """Return the hash by which the key index finds a key of a topic, from 0 to 2^31 - 1."""
    hash_code = java_hash(f"{topic}#{key}")
    return 0 if hash_code == HASH_MIN else abs(hash_code)


def read_keys(data: bytes | memoryview, offset: int = 0) -> RecordKeys:
    """Return the keys of the record at `offset`.

    A rolled-back message has no keys: `unique_key` is "" and `keys` is empty. Raises ProtocolError
    if there is no whole record.
    """
    head = parse_head(data, offset)
    topic = str(data[head.topic], "utf-8", "replace")
    if head.sys_flag & ROLLBACK == ROLLBACK:
        return RecordKeys(topic, head.store_time_ms, "", [])
    properties = decode_properties(data[head.properties])
    unique_key = properties.get(UNIQ_KEY, "")
    keys = [key for key in properties.get(KEYS, "").split(" ") if key]
    return RecordKeys(topic, head.store_time_ms, unique_key, keys)


class RecordKeyHashes(NamedTuple):
    """The hashes of a record's keys, that of the unique key first, and its store time in ms."""

    hashes: list[int]
    store_time_ms: int


def hash_keys(data: bytes | memoryview, offset: int = 0) -> RecordKeyHashes:
    """Return the hashes and the store time that the key index stores for a record.

    The record is at `offset` in `data`. If there is no whole record, the result has no hashes and a
    store time of 0.
    """
    try:
        record = read_keys(data, offset)
    except ProtocolError:
        return RecordKeyHashes([], 0)
    indexed_keys = record.keys
    if record.unique_key:
        indexed_keys = [record.unique_key, *record.keys]
    hashes = [hash_key(record.topic, key) for key in indexed_keys]
    return RecordKeyHashes(hashes, record.store_time_ms)
