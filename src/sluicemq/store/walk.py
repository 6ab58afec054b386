"""Walks over the records of the log: in columns where they are many, and on behind bad places.

`CommitLog.scan` reads a record, `bulk.sweep_piece` a piece of the log at once with NumPy; both
accept exactly the same records. A start after an orderly stop looks at a handful of records and
does without NumPy. Behind a bad place reports and readers that pass over it go on at the next whole
record; the rule is `log.read_scanned`, which `explain` asks clause by clause.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

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
from sluicemq.store.segments import Segment

if TYPE_CHECKING:
    from sluicemq.store.bulk import Sweep

SINGLES_FIRST: Final = 2000
"""A walk shorter than this is over before NumPy would be imported."""
SINGLES_BETWEEN: Final = 32
"""So many are read one by one where columns do not help, more each time, up to the number above."""
SEARCH_BYTES_MAX: Final = 64 << 20
"""How far behind a bad place the next good record is looked for, for a report."""
_CHUNK_BYTES: Final = 1 << 20
_MAGIC_START: Final = BLANK.struct.pack(0, MAGIC_V1)[4:7]
_POSITION: Final = struct.Struct(">q")
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
    found = _find_record(segment, position - segment.base + 1)
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


def _find_record(segment: Segment, at: int) -> Scanned | None:
    """The first whole record that begins at `at` of a file or behind.

    Read without the map: a hole that is read through it may need room on the disk (SIGBUS).
    """
    view, file = segment.view(), segment.file()
    place, stop = file.data_start(at), at + SEARCH_BYTES_MAX
    while place is not None and place < stop:
        chunk = file.pread(_CHUNK_BYTES, place)
        found = chunk.find(_MAGIC_START, _SIZE_BYTES)
        while found >= 0:
            begin = place + found - _SIZE_BYTES
            # Its position comes first, which hardly any other bytes have.
            if (
                begin + RECORD_BYTES_MIN <= len(view)
                and _POSITION.unpack_from(view, begin + _POSITION_AT)[0] == segment.base + begin
            ):
                record = read_scanned(view, begin, segment.base, check_crc=True)
                if record is not None:
                    return record
            found = chunk.find(_MAGIC_START, found + 1)
        if len(chunk) < _CHUNK_BYTES:
            return None
        place = file.data_start(place + len(chunk) - BLANK_BYTES)
    return None


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
