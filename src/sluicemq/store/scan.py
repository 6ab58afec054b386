"""Walking over the records of the commit log, checking each: for recovery.

A record counts only when everything agrees: magic, its size with its parts, its stored physical
offset with its position (so that stale bytes of an earlier life of the file never come back), and
the body with its CRC. The walk ends at the first that does not (spec/store.md §7); a blank
record leads to the next file.

The CRC covers the body alone, and a torn write leaves zeros behind what arrived. A record can
therefore look whole while its topic or properties are lost: neither may hold such zeros (`is_torn`;
the writer refuses properties that would look so). With `forceVerifyPropCRC` a record also needs the
checksum of its whole, see `record.checksum`.

The common record (V1, IPv4) is read with one `struct` call, any other with the record codec.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from sluicemq.config.delays import DEFAULT_LEVELS, parse_delay_levels
from sluicemq.errors import ProtocolError
from sluicemq.model.ids import tag_code
from sluicemq.model.message import (
    DELAY,
    TAGS,
    UNQUEUED,
)
from sluicemq.record.codec import body_crc_agrees, decode_properties, is_sealed, parse_head
from sluicemq.record.layout import (
    BLANK,
    CRC_MASK,
    HOST_BITS,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGICS,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
)
from sluicemq.store.commitlog import BLANK_BYTES, CommitLog

MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
MULTI_OFFSETS: Final = "INNER_MULTI_QUEUE_OFFSET"
LIGHT_PREFIX: Final = "%LMQ%"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
DELAYS_MS: Final = parse_delay_levels(DEFAULT_LEVELS)
"""What a delayed message of level 1, 2, … waits for where messageDelayLevel is not known."""
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TAGS_START: Final = TAGS.encode() + b"\x01"
_MULTI_START: Final = MULTI_DISPATCH.encode() + b"\x01"
_PROPERTY_END: Final = 2
ZEROS_NEVER_STORED: Final = bytes(16)
"""Properties hold no run of zeros as long as this, and do not end with a zero."""
LOST_NAME: Final = "SLUICE_LOST"
LOST_CODE: Final = int.from_bytes(b"LOST") << 32
"""The tag code of a place holder (`offline.repair`): our readers pass over it. Its lower half, all
that RocketMQ compares, is that of a message without a tag."""
LOST_MARK: Final = int.from_bytes(b"SLUICELO")
"""What a place holder has for the offset of its prepared message, which no ordinary one has."""
_unpack_head: Final = RECORD_HEAD.struct.unpack_from
_unpack_begin: Final = BLANK.struct.unpack_from
_SHORT: Final = struct.Struct(">h")


class Scanned(NamedTuple):
    """A record that stands where it says. `topic` and `properties` are the encoded bytes."""

    position: int
    size_bytes: int
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_time_ms: int
    topic: bytes
    properties: bytes
    prepared_offset: int = 0

    @property
    def end(self) -> int:
        return self.position + self.size_bytes

    @property
    def is_queued(self) -> bool:
        """Prepared and rolled-back messages stand in no queue (spec/store.md §3)."""
        return not self.sys_flag & UNQUEUED

    @property
    def is_lost(self) -> bool:
        """Only the place holder of a message that a repair could not save (`offline.repair`)."""
        return self.prepared_offset == LOST_MARK

    def tag_code(self, delays_ms: Sequence[int] = DELAYS_MS) -> int:
        """What its queue's unit says: the hash of the tag, or a delayed message's time (ms).

        `delays_ms` are the delays of level 1, 2, … (messageDelayLevel).
        """
        properties = self.properties
        if self.is_lost:
            return LOST_CODE
        if self.topic == _SCHEDULE_TOPIC:
            return self._delayed_code(delays_ms)
        at = properties.find(_TAGS_START)
        if at < 0:
            return 0
        if (at and properties[at - 1] != _PROPERTY_END) or properties.count(_TAGS_START) > 1:
            return tag_code(decode_properties(properties).get(TAGS, ""))
        end = properties.find(_PROPERTY_END, at)
        return _code_of(properties[at + len(_TAGS_START) : end if end >= 0 else len(properties)])

    def _delayed_code(self, delays_ms: Sequence[int]) -> int:
        properties = decode_properties(self.properties)
        delay = properties.get(DELAY, "")
        if delay.isdecimal() and int(delay) > 0:
            return self.store_time_ms + delays_ms[min(int(delay), len(delays_ms)) - 1]
        return tag_code(properties.get(TAGS, ""))

    def stands_in(self, key: tuple[str, int], offset: int | None = None) -> bool:
        """Whether a queue holds it, at this offset; None: at any."""
        own = (self.topic.decode(errors="replace"), self.queue_id)
        places = [(own, self.queue_offset), *self.other_queues()]
        return any(found == key and offset in (None, at) for found, at in places)

    def other_queues(self) -> list[tuple[tuple[str, int], int]]:
        """Further queues that the record stands in, with its offset there (spec/store.md §3.1)."""
        if _MULTI_START not in self.properties:
            return []
        properties = decode_properties(self.properties)
        names = properties.get(MULTI_DISPATCH, "").split(",")
        offsets = properties.get(MULTI_OFFSETS, "").split(",")
        return [
            ((name, 0 if name.startswith(LIGHT_PREFIX) else self.queue_id), int(offset))
            for name, offset in zip(names, offsets, strict=False)
            if name and "/" not in name and offset.isdecimal()
        ]


@lru_cache(maxsize=4096)
def _code_of(tag: bytes) -> int:
    return tag_code(tag.decode(errors="replace"))


def scan_records(log: CommitLog, start: int, *, check_crc: bool = True) -> Iterator[Scanned]:
    """Every good record from `start` on, up to the first place where there is none."""
    position = start
    while (segment := log.segments.at(position)) is not None:
        view, base, size = segment.view(), segment.base, segment.size
        at = position - base
        while size - at >= BLANK_BYTES and not is_blank(view, at):
            scanned = read_counting(log, view, at, base, check_crc=check_crc)
            if scanned is None:
                return
            yield scanned
            at += scanned.size_bytes
        position = segment.end


def read_counting(
    log: CommitLog, view: memoryview, at: int, base: int, *, check_crc: bool
) -> Scanned | None:
    """The record, if it counts: with its checksum where the log requires one."""
    scanned = read_scanned(view, at, base, check_crc=check_crc)
    if scanned is None or not (check_crc and log.requires_checksum):
        return scanned
    return scanned if is_sealed(view[at : at + scanned.size_bytes]) else None


def scan_end(log: CommitLog, end: int) -> int:
    """Where appending goes on after the last good record ends at `end`: behind a blank record."""
    segment = log.segments.at(end)
    if segment is None or segment.end - end < BLANK_BYTES:
        return end
    return segment.end if is_blank(segment.view(), end - segment.base) else end


def is_blank(view: memoryview, at: int) -> bool:
    """Whether a blank record at `at` says that the rest of the file holds nothing."""
    size, magic = _unpack_begin(view, at)
    return bool(magic == MAGIC_BLANK and size == len(view) - at)


def read_scanned(view: memoryview, at: int, base: int, *, check_crc: bool) -> Scanned | None:
    """The record at `at` of a file that begins at `base`; None when it is not wholly good."""
    if len(view) - at < RECORD_BYTES_MIN:
        return None
    (
        size,
        magic,
        crc,
        queue_id,
        _,
        offset,
        position,
        flag,
        _,
        _,
        time,
        _,
        _,
        prepared,
        body_bytes,
    ) = _unpack_head(view, at)
    if magic != MAGIC_V1 or flag & HOST_BITS:
        return _read_other(view, at, base, check_crc=check_crc) if magic in MAGICS else None
    body = at + RECORD_HEAD.size
    topic = body + body_bytes + 1
    if position != base + at or body_bytes < 0 or topic + 2 > len(view) or not time:
        return None
    properties = topic + view[topic - 1] + 2
    if properties > len(view):
        return None
    end = properties + _SHORT.unpack_from(view, properties - 2)[0]
    if end != at + size or end < properties or end > len(view):
        return None
    if check_crc and zlib.crc32(view[body : topic - 1]) & CRC_MASK != crc:
        return None
    name, rest = bytes(view[topic : properties - 2]), bytes(view[properties:end])
    if check_crc and is_torn(name, rest):
        return None
    return Scanned(position, size, queue_id, offset, flag, time, name, rest, prepared)


def is_torn(topic: bytes, properties: bytes) -> bool:
    """Whether a lost end (of any length) or a lost sector shows in them."""
    return (
        b"\0" in topic or not topic or properties[-1:] == b"\0" or ZEROS_NEVER_STORED in properties
    )


def _read_other(view: memoryview, at: int, base: int, *, check_crc: bool) -> Scanned | None:
    try:
        head = parse_head(view, at)
    except ProtocolError:
        return None
    if head.physical_offset != base + at or not head.store_time_ms:
        return None
    topic, properties = bytes(view[head.topic]), bytes(view[head.properties])
    if check_crc and (not body_crc_agrees(view, head) or is_torn(topic, properties)):
        return None
    return Scanned(
        head.physical_offset,
        head.size_bytes,
        head.queue_id,
        head.queue_offset,
        head.sys_flag,
        head.store_time_ms,
        topic,
        properties,
        head.prepared_offset,
    )
