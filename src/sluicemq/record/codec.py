"""Bytes of a stored message <-> values, one message at a time; and the body of a client batch.

`layout` declares the bytes. A pull's answer is a concatenation of records. The store's hot path
packs the same layout by itself; the tests hold both equal.

The CRC in a record's head covers the body alone. With `enabledAppendPropCRC` the properties end
with one more of 20 bytes (spec/store.md §2.4):

    | __CRC32# 8 | 0x01 | ten digits, the least significant first | 0x02 |

Its value is the CRC32 (31 bits of it) of all the bytes of the record before it, offsets and store
time included. The writer leaves its place while it lays the record out, then seals it.

A client batch (§2.5) carries messages of one topic and queue in one request; the broker takes it
apart and stores ordinary records with consecutive queue offsets.
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


def tag_code_of(properties: bytes) -> int:
    """The code of the tag in encoded properties, 0 without one. HOT: each message of a batch."""
    start = properties.rfind(b"\x02TAGS\x01")
    if start >= 0:
        start += 6
    elif properties.startswith(b"TAGS\x01"):
        start = 5
    else:
        return 0
    end = properties.find(b"\x02", start)
    return tag_code_of_value(properties[start:] if end < 0 else properties[start:end])


def tag_code_in(properties: str) -> int:
    """The same for the text, whose last property is ended. HOT."""
    start = properties.rfind("\x02TAGS\x01")
    if start >= 0:
        return tag_code(properties[start + 6 : properties.find(VALUE_END, start + 6)])
    if properties.startswith("TAGS\x01"):
        return tag_code(properties[5 : properties.find(VALUE_END, 5)])
    return 0


def _code_of(tag: bytes) -> int:
    return tag_code(tag.decode("utf-8", "replace"))


_kept_code: Final = lru_cache(maxsize=65_536)(_code_of)


def tag_code_of_value(tag: bytes) -> int:
    """Return the code of a tag as it is encoded. Codes of short tags are kept."""
    return _kept_code(tag) if len(tag) <= CACHED_LENGTH_MAX else _code_of(tag)


def value_of(properties: bytes, name: bytes) -> bytes | None:
    """The value of a name in encoded properties, None without one. HOT: each delayed message."""
    start = properties.rfind(b"\x02" + name + b"\x01")
    if start >= 0:
        start += len(name) + 2
    elif properties.startswith(name + b"\x01"):
        start = len(name) + 1
    else:
        return None
    end = properties.find(b"\x02", start)
    return properties[start:] if end < 0 else properties[start:end]


def as_text(properties: dict[str, str]) -> str:
    """The text form of properties; empty values are left out, as no peer reads them."""
    return "".join(
        [f"{name}{NAME_END}{value}{VALUE_END}" for name, value in properties.items() if value]
    )


def as_dict(properties: str) -> dict[str, str]:
    """Text -> dict; parts without a name or a value are dropped, as RocketMQ's parser does."""
    found: dict[str, str] = {}
    for part in properties.split(VALUE_END):
        name, _, value = part.partition(NAME_END)
        if name and value:
            found[name] = value
    return found


_FIRST: Final = RECORD_HEAD.only("size", "magic", "sys_flag", "born_time").unpack_from
_FORMS: Final = {
    kind: (
        head.only(*(name for name, _ in head.fields if not name.endswith("_host"))).unpack_from,
        head.at("born_host"), head.at("store_time"),
        head.at("store_host"), head.at("reconsume_times"), head.size,
    )
    for kind, head in RECORD_HEADS.items()
}  # fmt: skip
"""By the host bits: what reads the numbers, where the hosts lie, where the body begins."""
_FLAGS_AT: Final = RECORD_HEAD.at("sys_flag")
_LENGTH_AT: Final = {kind: head.at("body_length") for kind, head in RECORD_HEADS.items()}
_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
_PLAIN: Final = RECORD_HEAD.only(
    "size", "magic", "queue_offset", "sys_flag", "body_length"
).unpack_from
_ODD: Final = HOST_BITS | COMPRESSED
_BODY_AT: Final = RECORD_HEAD.at("body_length")


class RecordHead(NamedTuple):
    """The fixed numbers of a record and where its variable parts lie (positions in the buffer)."""

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
    """`name 0x01 value 0x02` for each. Raises ProtocolError when a text holds one of the two."""
    for name, value in properties.items():
        if NAME_END in name or VALUE_END in name or NAME_END in value or VALUE_END in value:
            raise ProtocolError(
                f"The property {name!r} holds a character 0x01 or 0x02.",
                fix="These two separate properties: take them out of the name and the value.",
            )
    return "".join([f"{n}{NAME_END}{v}{VALUE_END}" for n, v in properties.items()]).encode()


def decode_properties(data: Buffer) -> dict[str, str]:
    """The inverse. As in Java, pieces without a name or with an empty value are left out."""
    return as_dict(str(data, "utf-8", "replace"))


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
    """The reference encoder: any hosts, V1 or V2 (None: V2 when the topic needs it).

    The host bits of `sys_flag` are set from the lengths of the hosts. Raises ProtocolError when a
    part is longer than its length field can say, or a number does not fit its field.
    """
    name = topic.encode()
    if version2 is None:
        version2 = len(name) > 127
    if len(name) > (PROPERTIES_BYTES_MAX if version2 else 127):
        raise ProtocolError(f"The topic has {len(name)} bytes, more than its length field holds.")
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise ProtocolError(
            f"The properties have {len(properties)} bytes, the limit is {PROPERTIES_BYTES_MAX}."
        )
    born_bit = BORN_HOST_IPV6 if len(born_host) == HOST_BYTES_IPV6 else 0
    store_bit = STORE_HOST_IPV6 if len(store_host) == HOST_BYTES_IPV6 else 0
    head = RECORD_HEADS[born_bit | store_bit]
    topic_length = _SHORT.pack(len(name)) if version2 else bytes([len(name)])
    tail = b"".join((body, topic_length, name, _SHORT.pack(len(properties)), properties))
    values = (
        head.size + len(tail),
        MAGIC_V2 if version2 else MAGIC_V1,
        zlib.crc32(body) & CRC_MASK,
        queue_id,
        flag,
        queue_offset,
        physical_offset,
        sys_flag & ~HOST_BITS | born_bit | store_bit,
        born_time_ms,
        bytes(born_host),
        store_time_ms,
        bytes(store_host),
        reconsume_times,
        prepared_offset,
        len(body),
    )
    try:
        return head.struct.pack(*values) + tail
    except struct.error as error:
        raise ProtocolError(head.misfit(*values), fix="Use a number in that range.") from error


def parse_head(data: Buffer, offset: int = 0) -> RecordHead:
    """The numbers of the record at `offset`, and where its parts lie.

    Raises ProtocolError unless a whole record stands there whose lengths agree with its size.
    The body's CRC is not checked (see `body_crc_agrees`).
    """
    try:
        size, magic, sys_flag, _ = _FIRST(data, offset)
        if magic not in MAGICS:
            raise ProtocolError(
                f"No record begins at {offset}: its magic is {magic & 0xFFFFFFFF:#x}."
            )
        if size < RECORD_BYTES_MIN or offset + size > len(data):
            raise ProtocolError(f"The record at {offset} says {size} bytes, more than there are.")
        unpack, born, born_end, store, store_end, end = _FORMS[sys_flag & HOST_BITS]
        *begin, store_time, reconsume_times, prepared_offset, length = unpack(data, offset)
        body = slice(offset + end, offset + end + length)
        if magic == MAGIC_V1:
            topic_at, topic_length = body.stop + 1, data[body.stop]
        else:
            topic_at, topic_length = body.stop + 2, _SHORT.unpack_from(data, body.stop)[0]
        topic = slice(topic_at, topic_at + topic_length)
        properties_length = _SHORT.unpack_from(data, topic.stop)[0]
        properties = slice(topic.stop + 2, topic.stop + 2 + properties_length)
    except (struct.error, IndexError):
        raise ProtocolError(f"The record at {offset} is cut off.") from None
    lengths = length, topic_length, properties_length
    if properties.stop - offset != size or min(lengths) < 0:
        raise ProtocolError(
            f"The record at {offset} says {size} bytes, its parts have {properties.stop - offset}:"
            f" body, topic and properties {lengths}."
        )
    hosts = (slice(offset + born, offset + born_end), slice(offset + store, offset + store_end))
    times = (reconsume_times, prepared_offset)
    return RecordHead._make(
        (*begin, hosts[0], store_time, hosts[1], *times, body, topic, properties)
    )


def body_crc_agrees(data: Buffer, head: RecordHead) -> bool:
    """Whether the body is what its CRC says."""
    return zlib.crc32(memoryview(data)[head.body]) & CRC_MASK == head.body_crc


def decode_record(
    data: Buffer, offset: int = 0, *, broker: str = "", body_bytes_max: int = BODY_BYTES_MAX
) -> StoredMessage:
    """Return the message at `offset`. Its body is decompressed when it is first read.

    Raises ProtocolError when no whole record is there.
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
    """Every message of concatenated records: the body of a pull's answer."""
    messages = []
    offset, end = 0, len(data)
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
    """Split concatenated records without looking into plain ones. HOT.

    Return the queue offset, the size and the bytes of each record, for `decode_record`; with `tags`
    only of records that have one of them. A record with a compressed body or an IPv6 host is
    decoded already, its body is not.

    Raises ProtocolError as `decode_records` does.
    """
    found: list[tuple[int, int, bytes | StoredMessage]] = []
    offset, end = 0, len(data)
    while offset < end:
        try:
            size, magic, queue_offset, sys_flag, length = _PLAIN(data, offset)
            topic = offset + RECORD_HEAD.size + length
            properties = topic + 1 + data[topic]
            stop = properties + 2 + _SHORT.unpack_from(data, properties)[0]
        except (struct.error, IndexError):
            size = magic = queue_offset = sys_flag = length = properties = stop = 0
        is_whole = stop - offset == size and stop <= end and length >= 0
        if magic == MAGIC_V1 and is_whole and not sys_flag & _ODD:
            plain = bytes(data[offset:stop])
            if not tags or _tag(plain, properties + 2 - offset) in tags:
                found.append((queue_offset, size, plain))
        else:
            record = decode_record(data, offset, broker=broker, body_bytes_max=body_bytes_max)
            stop = offset + record.size_bytes
            if not tags or record.tag in tags:
                found.append((record.queue_offset, record.size_bytes, record))
        offset = stop
    return found


def _tag(record: bytes, begin: int) -> str | None:
    """Of a record whose properties begin there. HOT."""
    start = record.rfind(b"\x02TAGS\x01", begin) + 6
    if start < 6:
        if not record.startswith(b"TAGS\x01", begin):
            return None
        start = begin + 5
    end = record.find(b"\x02", start)
    if end < 0:
        end = len(record)
    if end == start:  # counts as none, and does not hide an earlier one
        return decode_properties(record[begin:]).get(TAGS)
    return str(record[start:end], "utf-8", "replace")


def raw_body_of(record: bytes | StoredMessage) -> bytes:
    """Return the stored body of what `split_records` has found; in bytes it is not compressed."""
    if not isinstance(record, bytes):
        return record.raw_body
    return record[RECORD_HEAD.size : RECORD_HEAD.size + _INT.unpack_from(record, _BODY_AT)[0]]


def tag_of(record: bytes | StoredMessage) -> str | None:
    """The tag of what `split_records` has found."""
    if not isinstance(record, bytes):
        return record.tag
    return _tag(record, properties_slice(record).start)


def properties_slice(data: Buffer, offset: int = 0) -> slice:
    """Where the properties of the record at `offset` lie, found without decoding the rest.

    HOT for property filters; trusts the record (the store checked it when it was written).
    """
    (sys_flag,) = _INT.unpack_from(data, offset + _FLAGS_AT)
    at = offset + _LENGTH_AT[sys_flag & HOST_BITS]
    at += 4 + _INT.unpack_from(data, at)[0]
    if data[offset + 7] == MAGIC_V1 & 0xFF:
        at += 1 + data[at]
    else:
        at += 2 + _SHORT.unpack_from(data, at)[0]
    return slice(at + 2, at + 2 + _SHORT.unpack_from(data, at)[0])


CHECKSUM_NAME: Final = reserved.CHECKSUM
CHECKSUM_BYTES: Final = 20
CHECKSUM_START: Final = f"{CHECKSUM_NAME}\x01".encode()
_END: Final = VALUE_END.encode()
_DIGITS: Final = 10
_CHECKSUM_PLACE: Final = CHECKSUM_START + b"0" * _DIGITS + _END


def with_place(properties: bytes) -> bytes:
    """The properties with a place for the checksum behind them; one that a client sent is gone."""
    if CHECKSUM_START in properties:
        pieces = properties.split(_END)
        properties = _END.join(piece for piece in pieces if not piece.startswith(CHECKSUM_START))
    if properties and not properties.endswith(_END):
        properties += _END
    return properties + _CHECKSUM_PLACE


def seal(record: bytes) -> bytes:
    """The record with its checksum filled in; its properties have come from `with_place`."""
    content = record[:-CHECKSUM_BYTES]
    return content + CHECKSUM_START + _digits(zlib.crc32(content)) + _END


def is_sealed(record: Buffer) -> bool:
    """Whether the record (all of it, nothing else) ends with a checksum that agrees."""
    content = memoryview(record)[:-CHECKSUM_BYTES]
    return bytes(record[len(content) :]) == CHECKSUM_START + _digits(zlib.crc32(content)) + _END


def _digits(crc: int) -> bytes:
    return f"{crc & CRC_MASK:0{_DIGITS}d}"[::-1].encode()


BATCH_FIXED_BYTES = BATCH_HEAD.size + _SHORT.size
COPIED_BYTES_MAX = 256 * 1024
_pack_head = BATCH_HEAD.struct.pack
_unpack_lengths = BATCH_HEAD.only("size", "flag", "body_length").unpack_from


def encode_batch(messages: Iterable[tuple[int, bytes | memoryview, bytes]]) -> bytes:
    """(flag, body, encoded properties) of each -> the request's body."""
    parts: list[bytes | memoryview] = []
    for flag, body, properties in messages:
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise ProtocolError(
                f"The properties of a message in the batch have {len(properties)} bytes,"
                f" the limit is {PROPERTIES_BYTES_MAX}."
            )
        size = BATCH_FIXED_BYTES + len(body) + len(properties)
        try:
            parts += (_pack_head(size, 0, 0, flag, len(body)), body)
        except struct.error as error:
            said = BATCH_HEAD.misfit(size, 0, 0, flag, len(body))
            raise ProtocolError(said, fix="Use a number in that range.") from error
        parts += (_SHORT.pack(len(properties)), properties)
    return b"".join(parts)


BATCH_MESSAGES_MAX: Final = 16_384
"""The most messages of a batch, which are stored in one piece. 1 MiB of messages of 64 bytes are as
many."""


def batch_entries(source: bytes | memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield (flag, start of the body, end of the body, end of the message) of each message of a
    batch. The encoded properties lie between the two bytes behind the body and the end. HOT.

    Raises ProtocolError when the lengths do not agree with each other or with the whole, and when
    there are more than BATCH_MESSAGES_MAX messages.
    """
    unpack_head, unpack_length = _unpack_lengths, _SHORT.unpack_from
    head_bytes = BATCH_HEAD.size
    end = len(source)
    at = count = 0
    while at < end:
        try:
            size, flag, body_length = unpack_head(source, at)
            start = at + head_bytes
            body_end = start + body_length
            if body_length < 0:
                raise _bad(at)
            (properties_length,) = unpack_length(source, body_end)
        except struct.error:
            raise _bad(at) from None
        next_at = body_end + 2 + properties_length
        if properties_length < 0 or next_at - at != size or next_at > end:
            raise _bad(at)
        count += 1
        if count > BATCH_MESSAGES_MAX:
            raise ProtocolError(
                f"The batch has more than {BATCH_MESSAGES_MAX} messages.", fix="Send smaller ones."
            )
        yield flag, start, body_end, next_at
        at = next_at


def decode_batch(body: Buffer) -> list[tuple[int, bytes | memoryview, bytes, int]]:
    """Return (flag, body, encoded properties, tag code) of each message of a batch. HOT.

    Bodies of a large request are views of it; those of a small one are copies, which cost less
    than views do. Raises ProtocolError as `batch_entries`.
    """
    is_small = len(body) <= COPIED_BYTES_MAX
    source: bytes | memoryview = bytes(body) if is_small else memoryview(body)
    messages: list[tuple[int, bytes | memoryview, bytes, int]] = []
    for flag, start, body_end, end in batch_entries(source):
        own = source[body_end + 2 : end]
        if not isinstance(own, bytes):
            own = bytes(own)
        tag_code = tag_code_of(own) if b"TAGS\x01" in own else 0
        messages.append((flag, source[start:body_end], own, tag_code))
    return messages


def _bad(at: int) -> ProtocolError:
    return ProtocolError(f"The message at byte {at} of the batch is cut off or its lengths differ.")


# The key index (spec/store.md §4): a message is found by its unique key (UNIQ_KEY) and by each word
# of its KEYS, always together with its topic. What is hashed is the text `topic#key`. The order is
# RocketMQ's: unique key first. Rolled-back messages are not indexed, prepared ones are, under the
# topic in which they lie. This is the plain form; `store.index.columns` does the same for thousands
# at once, and leaves to this one what is not common.

HASH_MIN: Final = -(1 << 31)
ROLLBACK: Final = 0xC
"""The two bits of the sys flag that say what kind of transactional message it is; both: this."""


class Keyed(NamedTuple):
    """What a record says for the index: its topic, its store time (ms) and its keys in order."""

    topic: str
    store_time_ms: int
    unique_key: str
    keys: list[str]


def key_hash(topic: str, key: str) -> int:
    """0 to 2^31 - 1."""
    value = java_hash(f"{topic}#{key}")
    return 0 if value == HASH_MIN else abs(value)


def keys_of(data: bytes | memoryview, offset: int = 0) -> Keyed:
    """The keys of the record at `offset`. Raises ProtocolError when no whole record is there."""
    head = parse_head(data, offset)
    topic = str(data[head.topic], "utf-8", "replace")
    if head.sys_flag & ROLLBACK == ROLLBACK:
        return Keyed(topic, head.store_time_ms, "", [])
    properties = decode_properties(data[head.properties])
    unique_key = properties.get(UNIQ_KEY, "")
    words = [word for word in properties.get(KEYS, "").split(" ") if word]
    return Keyed(topic, head.store_time_ms, unique_key, words)


class KeyedHashes(NamedTuple):
    """The hashes of a record in the order in which they are indexed, and its store time (ms)."""

    hashes: list[int]
    store_time_ms: int


def keyed_hashes(data: bytes | memoryview, offset: int = 0) -> KeyedHashes:
    """What the index keeps of the record at `offset`: nothing when its lengths do not make up its
    size."""
    try:
        found = keys_of(data, offset)
    except ProtocolError:
        return KeyedHashes([], 0)
    keys = [found.unique_key, *found.keys] if found.unique_key else found.keys
    return KeyedHashes([key_hash(found.topic, key) for key in keys], found.store_time_ms)
