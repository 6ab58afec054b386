"""Build the records that `sluice store repair` writes into invalid ranges of the log.

Recovery, RocketMQ's too, ends the log at the first byte that does not belong to a valid record.
Therefore an invalid range is filled from its start to its end with records that both brokers
accept:

    placeholder    for each lost message: a record with its topic, queue and offset, an empty body
                   and, if there is room, the property SLUICE_LOST. So the offsets of the queue stay
                   the same, even if the queues are built again from the log. SluiceMQ's readers
                   skip placeholders (`log.PLACEHOLDER_CODE`)
    filler         a rolled-back message, which is in no queue and in no index
    blank record   if the range reaches the end of its file

The bytes between the heads and the ends of these records are zeros. A range at the end of the log
gets only its placeholders, and the log continues behind them.
"""

from typing import Final, NamedTuple

from sluicemq.model.message import PREPARED
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.model.topic import TOPIC_LENGTH_MAX
from sluicemq.record.codec import encode_record
from sluicemq.record.layout import BLANK, MAGIC_BLANK, RECORD_BYTES_MIN
from sluicemq.store.log import PLACEHOLDER_NAME, PLACEHOLDER_PREPARED_OFFSET
from sluicemq.store.tools.lost import LostMessage
from sluicemq.store.tools.walk import InvalidRange

FILLER_BYTES_MAX: Final = 1 << 20
FILLER_BYTES_MIN: Final = RECORD_BYTES_MIN + 1
_FIRST_FILLER_BYTES: Final = RECORD_BYTES_MIN + len(PLACEHOLDER_NAME)
_ROLLBACK: Final = PREPARED | 8
_HOST: Final = bytes((127, 0, 0, 1, 0, 0, 0, 0))
_HEAD_BYTES: Final = 88
_PROPERTIES: Final = f"{PLACEHOLDER_NAME}\x011\x02".encode()
_DELAYED_PROPERTIES: Final = f"REAL_TOPIC\x01{PLACEHOLDER_NAME}\x02REAL_QID\x010\x02".encode()
"""The topic and queue to which a broker delivers the placeholder of a delayed message."""

Piece = tuple[int, bytes]
"""A position of the log, and the bytes to write there."""


class Replacement(NamedTuple):
    """What to write into an invalid range.

    `pieces` are in the order of their positions; the bytes between them must be zeros. `end` is the
    position at which the log continues. `placed` are the messages that have a placeholder among the
    pieces, `without_room` those for which the range has no room.
    """

    pieces: list[Piece]
    end: int
    placed: list[LostMessage]
    without_room: list[LostMessage]


def build_replacement(
    invalid: InvalidRange, file_end: int, lost: list[LostMessage], time_ms: int, *, is_last: bool
) -> Replacement:
    """Make the records that fill an invalid range of the log.

    `lost` are the messages that need a placeholder, `file_end` is the end of the file that contains
    the range, and `time_ms` is the store time of the new records. If `is_last`, the range is at the
    end of the log, and its rest may stay empty. Otherwise valid records follow, and the rest is
    filled with fillers: records without a message.

    If the room is too small, placeholders get no properties. Messages whose placeholders still do
    not fit are in `without_room` of the result.
    """
    is_end_of_file = invalid.end == file_end
    placeholders_end = invalid.end
    if is_end_of_file:
        placeholders_end -= BLANK.size  # kept free for the blank record
    bytes_with_properties = sum(
        _compute_placeholder_size(message, has_properties=True) for message in lost
    )
    has_properties = bytes_with_properties <= placeholders_end - invalid.start
    replacement = _place_messages(
        lost, invalid.start, placeholders_end, time_ms, has_properties=has_properties
    )
    if is_last:
        return replacement

    # The rest of the range must not stay empty, because valid records follow.
    pieces = replacement.pieces
    bytes_left = invalid.end - replacement.end
    if is_end_of_file:
        pieces += _encode_end_of_file(replacement.end, file_end, time_ms)
    elif 0 < bytes_left < FILLER_BYTES_MIN and pieces:
        # The rest is too small for a filler: extend the last placeholder by a body of zeros.
        last_position, _ = pieces.pop()
        last_message = replacement.placed[-1]
        record = _encode_placeholder(
            last_message, last_position, time_ms, bytes(bytes_left), has_properties=has_properties
        )
        pieces.append((last_position, record))
    else:
        pieces += _encode_fillers(replacement.end, invalid.end, time_ms)
    return replacement._replace(end=invalid.end)


def _place_messages(
    lost: list[LostMessage], start: int, end: int, time_ms: int, *, has_properties: bool
) -> Replacement:
    """Make placeholders for the lost messages, one behind the other, within [start, end).

    Messages for which there is no room go to `without_room` of the result. Its `end` is the
    position behind the last placeholder.
    """
    pieces: list[Piece] = []
    placed: list[LostMessage] = []
    without_room: list[LostMessage] = []
    position = start
    for message in lost:
        placeholder_bytes = _compute_placeholder_size(message, has_properties=has_properties)
        if position + placeholder_bytes > end:
            without_room.append(message)
            continue
        record = _encode_placeholder(message, position, time_ms, has_properties=has_properties)
        pieces.append((position, record))
        placed.append(message)
        position += placeholder_bytes
    return Replacement(pieces, position, placed, without_room)


def _encode_end_of_file(start: int, file_end: int, time_ms: int) -> list[Piece]:
    """Fill the bytes [start, file_end) with a blank record, which marks the end of a file.

    A filler precedes it if there is room, because a file must not begin with a blank record:
    brokers read the age of a file from its first record.
    """
    pieces: list[Piece] = []
    position = start
    if file_end - position >= _FIRST_FILLER_BYTES + BLANK.size:
        pieces += _encode_filler(position, _FIRST_FILLER_BYTES, time_ms)
        position += _FIRST_FILLER_BYTES
    if position < file_end:
        pieces.append((position, BLANK.struct.pack(file_end - position, MAGIC_BLANK)))
    return pieces


def _encode_fillers(start: int, end: int, time_ms: int) -> list[Piece]:
    """Fill the bytes [start, end) with fillers of at most FILLER_BYTES_MAX each."""
    pieces: list[Piece] = []
    position = start
    while position < end:
        size = min(end - position, FILLER_BYTES_MAX)
        bytes_left = end - position - size
        if 0 < bytes_left < FILLER_BYTES_MIN:
            # Leave enough for the next filler.
            size -= FILLER_BYTES_MIN
        pieces += _encode_filler(position, size, time_ms)
        position += size
    return pieces


def _encode_placeholder_properties(message: LostMessage, *, has_properties: bool) -> bytes:
    """Return the encoded properties of a placeholder, or b"" unless `has_properties`."""
    if not has_properties:
        return b""
    is_delayed = message.key[0] == SCHEDULE_TOPIC
    return _PROPERTIES + _DELAYED_PROPERTIES if is_delayed else _PROPERTIES


def _compute_placeholder_size(message: LostMessage, *, has_properties: bool) -> int:
    """Return the size in bytes of a placeholder without a body."""
    topic = message.key[0].encode()
    # A record with a longer topic is a V2 record, whose topic length has two bytes.
    extra_bytes = 1 if len(topic) > TOPIC_LENGTH_MAX else 0
    properties = _encode_placeholder_properties(message, has_properties=has_properties)
    return RECORD_BYTES_MIN + extra_bytes + len(topic) + len(properties)


def _encode_placeholder(
    message: LostMessage, position: int, time_ms: int, body: bytes = b"", *, has_properties: bool
) -> bytes:
    """Encode the placeholder of a lost message, which begins at `position` of the log."""
    topic, queue_id = message.key
    return _encode(
        topic=topic,
        queue_id=queue_id,
        offset=message.offset,
        position=position,
        body=body,
        properties=_encode_placeholder_properties(message, has_properties=has_properties),
        sys_flag=0,
        time_ms=time_ms,
        prepared_offset=PLACEHOLDER_PREPARED_OFFSET,
    )


def _encode_filler(position: int, size: int, time_ms: int) -> list[Piece]:
    """Encode a filler of `size` bytes, as two pieces: its head and its end.

    The body between them is zeros, and is not included.
    """
    topic = PLACEHOLDER_NAME[: max(1, size - RECORD_BYTES_MIN)]
    record = _encode(
        topic=topic,
        queue_id=0,
        offset=0,
        position=position,
        body=bytes(size - RECORD_BYTES_MIN - len(topic)),
        properties=b"",
        sys_flag=_ROLLBACK,
        time_ms=time_ms,
    )
    # The end consists of the topic with its length (1 byte) and the length of the properties (2).
    end_bytes = len(topic) + 3
    return [(position, record[:_HEAD_BYTES]), (position + size - end_bytes, record[-end_bytes:])]


def _encode(
    *,
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
    """Encode a record with these fields, born and stored at `time_ms` on 127.0.0.1."""
    return encode_record(
        topic=topic,
        queue_id=queue_id,
        queue_offset=offset,
        physical_offset=position,
        body=body,
        properties=properties,
        flag=0,
        sys_flag=sys_flag,
        born_time_ms=time_ms,
        born_host=_HOST,
        store_time_ms=time_ms,
        store_host=_HOST,
        prepared_offset=prepared_offset,
    )
