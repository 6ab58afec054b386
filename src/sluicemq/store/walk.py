"""Walks over the records of the log: in columns where they are many, and on behind bad places.

`CommitLog.scan` reads a record, `bulk.sweep_piece` a piece of the log at once with NumPy; both
accept exactly the same records. A start after an orderly stop looks at a handful of records and
does without NumPy. Behind a bad place reports and readers that pass over it go on at the next whole
record; the rule is `log.read_scanned`, which `explain` asks clause by clause.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from sluicemq.errors import ProtocolError
from sluicemq.record.codec import body_crc_agrees, parse_head
from sluicemq.record.layout import (
    BLANK,
    CRC_MASK,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    MAGICS,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
)
from sluicemq.store.log import BLANK_BYTES, DELAYS_MS, CommitLog, Scanned, is_blank, read_scanned

if TYPE_CHECKING:
    from sluicemq.store.bulk import Sweep

SINGLES_FIRST: Final = 2000
"""A walk shorter than this is over before NumPy would be imported."""
SINGLES_BETWEEN: Final = 32
"""So many are read one by one where columns do not help, more each time, up to the number above."""
SEARCH_BYTES_MAX: Final = 64 << 20
"""How far behind a bad place the next good record is looked for, for a report."""
RECORD_BYTES_MAX: Final = 1 << 29
_CHUNK_BYTES: Final = 1 << 20
_MAGIC_START: Final = BLANK.struct.pack(0, MAGIC_V1)[4:7]
_MAGIC_BLANK: Final = BLANK.struct.pack(0, MAGIC_BLANK)[4:]
_POSITION_AT: Final = RECORD_HEAD.at("physical_offset")
_SIZE_BYTES: Final = 4


def sweep_records(
    log: CommitLog, start: int, *, check_crc: bool = True, delays_ms: Sequence[int] = DELAYS_MS
) -> "Iterator[Scanned | Sweep]":
    """As `CommitLog.scan`, many records at a time where there are many.

    The first ones come singly: a short walk, the usual one, does without NumPy. `delays_ms` are
    the delays of level 1, 2, … (messageDelayLevel), for the units of delayed messages.
    """
    singles, between = SINGLES_FIRST, SINGLES_BETWEEN
    position = start
    while (segment := log.segments.at(position)) is not None:
        view, base = segment.view(), segment.base
        while segment.end - position >= BLANK_BYTES and not is_blank(view, position - base):
            found: Scanned | Sweep | None
            if singles:
                singles -= 1
                found = log.counted_at(position, check_crc=check_crc)
                if found is None:
                    return
            else:
                from sluicemq.store.bulk import sweep_piece  # noqa: PLC0415 - NumPy: long walks

                found = sweep_piece(
                    view, position - base, base, check_crc=check_crc,
                    requires_checksum=log.requires_checksum, delays_ms=delays_ms,
                )  # fmt: skip
                is_worth_it = found is not None and found.count >= SINGLES_BETWEEN
                between = SINGLES_BETWEEN if is_worth_it else min(2 * between, SINGLES_FIRST)
                singles = 0 if is_worth_it else between
            if found is not None:
                yield found
                position = found.end
        position = segment.end


def next_record(log: CommitLog, position: int) -> Scanned | None:
    """The first whole record behind a bad place, as far as a report looks."""
    segment = log.segments.at(position)
    if segment is None:
        return None
    found = None
    stop = min(segment.end, position + SEARCH_BYTES_MAX)
    place = next_good(segment, position + 1, stop, segment.end, takes_blank=False)
    if place is not None:
        found = read_scanned(segment.view(), place - segment.base, segment.base, check_crc=True)
    while found is None and (segment := log.segments.at(segment.end)) is not None:
        found = read_scanned(segment.view(), 0, segment.base, check_crc=True)
    return found


def records_from(log: CommitLog, start: int) -> Iterator[Scanned]:
    """Every whole record from `start` on, over bad places, as far as a report looks."""
    end = start
    while True:
        for record in log.scan(end):
            yield record
            end = record.end
        found = next_record(log, end)
        if found is None:
            return
        end = found.position


class LogBytes(Protocol):
    """Bytes of a log, by their positions."""

    def read(self, position: int, size: int, /) -> bytes:
        """Fewer where a file ends."""

    def data_start(self, position: int, /) -> int | None:
        """The first position in the same file, from this one on, that may hold other bytes than
        zeros; None when there is none."""


def next_good(
    log: LogBytes, start: int, stop: int, file_end: int, *, takes_blank: bool = True
) -> int | None:
    """Where the next good record begins, from `start` on and before `stop` of a file that ends at
    `file_end`; or (`takes_blank`) the blank record that ends the file. None without one.

    THE answer for recovery, verify and repair: what `read_scanned` takes counts. Read without the
    map: a hole that is read through it may need room on the disk (SIGBUS).
    """
    found = log.data_start(start)
    while found is not None and found < stop:
        place = max(start, found - _SIZE_BYTES)  # a size begins with zeros
        data = log.read(place, min(_CHUNK_BYTES, file_end - place))
        for at in _magics_in(data):
            position = place + at - _SIZE_BYTES
            head = data[at - _SIZE_BYTES : at + RECORD_BYTES_MIN]
            if _is_good(log, head, position, file_end, takes_blank=takes_blank):
                return position
        start = place + len(data) - RECORD_BYTES_MIN
        if len(data) < _CHUNK_BYTES or start >= stop:
            return None
        found = log.data_start(start)
    return None


def _magics_in(data: bytes) -> list[int]:
    """Where the magic number of a record or blank record may stand, in order."""
    places = []
    for magic in (_MAGIC_START, _MAGIC_BLANK):
        found = data.find(magic, _SIZE_BYTES)
        while 0 <= found <= len(data) - len(_MAGIC_BLANK):
            places.append(found)
            found = data.find(magic, found + 1)
    return sorted(places)


def _is_good(
    log: LogBytes, data: bytes, position: int, file_end: int, *, takes_blank: bool
) -> bool:
    """Its position is looked at first: hardly any other bytes have it."""
    size, magic = BLANK.struct.unpack_from(data)
    if magic == MAGIC_BLANK:
        return takes_blank and bool(size == file_end - position)
    if not RECORD_BYTES_MIN <= size <= min(file_end - position, RECORD_BYTES_MAX):
        return False
    if data[_POSITION_AT : _POSITION_AT + 8] != position.to_bytes(8):
        return False
    record = memoryview(log.read(position, size))
    return read_scanned(record, 0, position, check_crc=True) is not None


def explain(view: memoryview, at: int, base: int) -> str:
    """Why no record counts at `at` of a file that begins at `base`."""
    if len(view) - at < BLANK_BYTES:
        return f"only {len(view) - at} bytes are left in the file"
    size, magic = BLANK.struct.unpack_from(view, at)
    head, fault = None, ""
    try:
        head = parse_head(view, at)
    except ProtocolError as error:
        fault = str(error).rstrip(".")
    if not any(view[at : at + RECORD_BYTES_MIN]):
        fault = "there are zeros instead of a record"
    elif magic == MAGIC_BLANK:
        left = len(view) - at
        fault = f"the blank record says that {size} bytes are left in the file: {left} are"
    elif magic not in MAGICS:
        fault = (
            f"the magic number is {magic & 0xFFFFFFFF:#010x}, that of a record is"
            f" {MAGIC_V1 & 0xFFFFFFFF:#010x} or {MAGIC_V2 & 0xFFFFFFFF:#010x}"
        )
    elif head is None:
        pass
    elif head.physical_offset != base + at:
        fault = f"the record says that it lies at {head.physical_offset}, not at {base + at}"
    elif not body_crc_agrees(view, head):
        found, expected = zlib.crc32(view[head.body]) & CRC_MASK, head.body_crc & CRC_MASK
        fault = f"the body's CRC is {found:#010x}, the record says {expected:#010x}"
    elif not head.store_time_ms:
        fault = "the record's store time is 0"
    return fault or "the record's topic or properties hold zeros, or its checksum is wrong"
