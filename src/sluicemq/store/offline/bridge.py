"""Records that close a hole in the log, so that every broker reads on behind it (pure).

Recovery, RocketMQ's too, ends the log at the first byte that is no record. So a hole is filled from
its beginning to its end with records that both brokers accept:

    place holder   for each message known to be lost: its topic, queue and offset, an empty body
                   and, where there is room, the property SLUICE_LOST. Offsets stay what they
                   were, also when somebody builds the queues anew from the log; our readers
                   pass over it (`scan.LOST_CODE`)
    filler         a rolled-back message: it stands in no queue and in no index
    blank record   where the hole reaches the end of its file

The bytes between are zeros. A hole at the very end of the log gets its place holders only: what
follows them is free.
"""

from typing import Final, NamedTuple

from sluicemq.model.message import PREPARED
from sluicemq.model.topic import TOPIC_LENGTH_MAX
from sluicemq.record.codec import encode_record
from sluicemq.record.layout import MAGIC_BLANK, RECORD_BYTES_MIN
from sluicemq.store.offline.lost import Lost
from sluicemq.store.offline.salvage import BLANK_BYTES, Hole
from sluicemq.store.scan import LOST_MARK, LOST_NAME, SCHEDULE_TOPIC

FILLER_BYTES_MAX: Final = 1 << 20
FILLER_BYTES_MIN: Final = RECORD_BYTES_MIN + 1
_FILLER_BYTES: Final = RECORD_BYTES_MIN + len(LOST_NAME)
_ROLLBACK: Final = PREPARED | 8
_HOST: Final = bytes((127, 0, 0, 1, 0, 0, 0, 0))
_HEAD_BYTES: Final = 88
_PROPERTIES: Final = f"{LOST_NAME}\x011\x02".encode()
_DELAYED: Final = f"REAL_TOPIC\x01{LOST_NAME}\x02REAL_QID\x010\x02".encode()
"""Where a broker's delayed delivery sends the place holder of a delayed message."""

Piece = tuple[int, bytes]


class Bridge(NamedTuple):
    """What to write into a hole: pieces by position, zeros between; where the log goes on."""

    pieces: list[Piece]
    end: int
    placed: list[Lost]
    left_out: list[Lost]


def build_bridge(
    hole: Hole, file_end: int, lost: list[Lost], time_ms: int, *, is_last: bool
) -> Bridge:
    """Fill the hole. `time_ms` is the store time that its records bear; it is at the log's end
    (`is_last`) or has good records behind it. What finds no room is `left_out`."""
    room_end = hole.end - (BLANK_BYTES if hole.end == file_end else 0)
    is_marked = sum(_size(item, True) for item in lost) <= room_end - hole.start
    pieces: list[Piece] = []
    placed: list[Lost] = []
    left_out: list[Lost] = []
    at = hole.start
    for item in lost:
        size = _size(item, is_marked)
        if at + size > room_end:
            left_out.append(item)
            continue
        pieces.append((at, _place_holder(item, at, time_ms, is_marked=is_marked)))
        placed.append(item)
        at += size
    if is_last:
        return Bridge(pieces, at, placed, left_out)
    if hole.end == file_end:
        pieces += _close_file(at, file_end, time_ms)
    elif 0 < hole.end - at < FILLER_BYTES_MIN and placed:
        at, _ = pieces.pop()
        body = bytes(hole.end - at - _size(placed[-1], is_marked))
        pieces.append((at, _place_holder(placed[-1], at, time_ms, body, is_marked=is_marked)))
    else:
        pieces += _fill(at, hole.end, time_ms)
    return Bridge(pieces, hole.end, placed, left_out)


def _properties(item: Lost, is_marked: bool) -> bytes:
    if not is_marked:
        return b""
    return _PROPERTIES + _DELAYED if item.key[0] == SCHEDULE_TOPIC else _PROPERTIES


def _size(item: Lost, is_marked: bool) -> int:
    name = item.key[0].encode()
    extra = 1 if len(name) > TOPIC_LENGTH_MAX else 0
    return RECORD_BYTES_MIN + extra + len(name) + len(_properties(item, is_marked))


def _place_holder(
    item: Lost, position: int, time_ms: int, body: bytes = b"", *, is_marked: bool
) -> bytes:
    (topic, queue_id), offset = item.key, item.offset
    properties = _properties(item, is_marked)
    return _record(topic, queue_id, offset, position, body, properties, 0, time_ms, LOST_MARK)


def _fill(at: int, end: int, time_ms: int) -> list[Piece]:
    """Fillers for [at, end): the heads and the ends of the records, their bodies are zeros."""
    pieces: list[Piece] = []
    while at < end:
        size = min(end - at, FILLER_BYTES_MAX)
        if 0 < end - at - size < FILLER_BYTES_MIN:
            size -= FILLER_BYTES_MIN
        pieces += _filler(at, size, time_ms)
        at += size
    return pieces


def _filler(at: int, size: int, time_ms: int) -> list[Piece]:
    topic = LOST_NAME[: max(1, size - RECORD_BYTES_MIN)]
    body = bytes(size - RECORD_BYTES_MIN - len(topic))
    record = _record(topic, 0, 0, at, body, b"", _ROLLBACK, time_ms)
    tail = len(topic) + 3
    return [(at, record[:_HEAD_BYTES]), (at + size - tail, record[-tail:])]


def _close_file(at: int, file_end: int, time_ms: int) -> list[Piece]:
    """A blank record. One more record before it: a file must not begin with a blank one, since
    brokers look at the first record of a file to see how old it is."""
    pieces: list[Piece] = []
    if file_end - at >= _FILLER_BYTES + BLANK_BYTES:
        pieces += _filler(at, _FILLER_BYTES, time_ms)
        at += _FILLER_BYTES
    if file_end > at:
        blank = (file_end - at).to_bytes(4) + MAGIC_BLANK.to_bytes(4, signed=True)
        pieces.append((at, blank))
    return pieces


def _record(
    topic: str,
    queue_id: int,
    offset: int,
    position: int,
    body: bytes,
    properties: bytes,
    sys_flag: int,
    time_ms: int,
    prepared_offset: int = 0,
) -> bytes:
    return encode_record(
        topic=topic, queue_id=queue_id, queue_offset=offset, physical_offset=position, body=body,
        properties=properties, flag=0, sys_flag=sys_flag, born_time_ms=time_ms, born_host=_HOST,
        store_time_ms=time_ms, store_host=_HOST, prepared_offset=prepared_offset,
    )  # fmt: skip
