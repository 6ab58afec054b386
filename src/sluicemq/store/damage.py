"""What is wrong at a place of the commit log, in words, and where good records go on behind it.

Used for reports: by recovery when it refuses to start, by readers that pass over a damaged record.
The rule itself is `scan.read_scanned`; here it is asked clause by clause.
"""

import struct
import zlib
from typing import Final

from sluicemq.errors import ProtocolError, StoreDamagedError
from sluicemq.record.codec import (
    CRC_MASK,
    FIXED_BYTES,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    body_crc_agrees,
    parse_head,
)
from sluicemq.store.commitlog import BLANK_BYTES, CommitLog
from sluicemq.store.scan import Scanned, is_blank, read_scanned

SEARCH_BYTES_MAX: Final = 64 << 20
"""How far behind a bad place the next good record is looked for, for a report."""
_CHUNK_BYTES: Final = 1 << 20
_MAGIC_START: Final = struct.pack(">i", MAGIC_V1)[:3]
_BEGIN: Final = struct.Struct(">ii")
_POSITION: Final = struct.Struct(">q")
_POSITION_AT: Final = 28


def explain(view: memoryview, at: int, base: int) -> str:
    """Why no record counts at `at` of a file that begins at `base`."""
    if len(view) - at < BLANK_BYTES:
        return f"only {len(view) - at} bytes are left in the file"
    size, magic = _BEGIN.unpack_from(view, at)
    if not any(view[at : at + FIXED_BYTES]):
        return "there are zeros instead of a record"
    if magic == MAGIC_BLANK:
        return f"the blank record says that {size} bytes are left in the file: {len(view) - at} are"
    if magic not in (MAGIC_V1, MAGIC_V2):
        return (
            f"the magic number is {magic & 0xFFFFFFFF:#010x}, that of a record is"
            f" {MAGIC_V1 & 0xFFFFFFFF:#010x} or {MAGIC_V2 & 0xFFFFFFFF:#010x}"
        )
    return _explain_record(view, at, base)


def _explain_record(view: memoryview, at: int, base: int) -> str:
    try:
        head = parse_head(view, at)
    except ProtocolError as error:
        return str(error).rstrip(".")
    if head.physical_offset != base + at:
        return f"the record says that it lies at {head.physical_offset}, not at {base + at}"
    if not body_crc_agrees(view, head):
        found = zlib.crc32(view[head.body]) & CRC_MASK
        return f"the body's CRC is {found:#010x}, the record says {head.body_crc & CRC_MASK:#010x}"
    if not head.store_time_ms:
        return "the record's store time is 0"
    return "the record's topic or properties hold zeros, or its checksum is wrong"


def find_record(view: memoryview, at: int, base: int, stop: int) -> Scanned | None:
    """The first whole record that begins in [at, stop) of a file that begins at `base`."""
    end = min(stop + 8, len(view))
    while at < end:
        chunk = bytes(view[at : min(at + _CHUNK_BYTES, end)])
        found = chunk.find(_MAGIC_START)
        while found >= 0:
            if at + found >= 4:
                record = _whole(view, at + found - 4, base)
                if record is not None:
                    return record
            found = chunk.find(_MAGIC_START, found + 1)
        if at + len(chunk) >= end:
            return None
        at += len(chunk) - len(_MAGIC_START) + 1
    return None


def _whole(view: memoryview, at: int, base: int) -> Scanned | None:
    """The record, wholly checked: its position first, which hardly any other bytes have."""
    if at + FIXED_BYTES > len(view):
        return None
    if _POSITION.unpack_from(view, at + _POSITION_AT)[0] != base + at:
        return None
    return read_scanned(view, at, base, check_crc=True)


def next_record(log: CommitLog, position: int) -> Scanned | None:
    """The first whole record behind a bad place, as far as a report looks."""
    segment = log.segments.at(position)
    if segment is None:
        return None
    at = position - segment.base + 1
    found = find_record(segment.view(), at, segment.base, at + SEARCH_BYTES_MAX)
    while found is None and (segment := log.segments.at(segment.end)) is not None:
        found = read_scanned(segment.view(), 0, segment.base, check_crc=True)
    return found


def damage_error(log: CommitLog, position: int, reason: str, root: str) -> StoreDamagedError:
    """The report that the start stops with: the place, what is there, what is lost, the cure."""
    segments = log.segments
    segment = segments.at(position)
    if segment is None:
        where = f"The commit log in {segments.directory} is damaged at {position}: it ends there"
        found = None
    else:
        view, at = segment.view(), position - segment.base
        what = explain(view, at, segment.base)
        where = f"The commit log is damaged at {position} (byte {at} of {segment.path}): {what}"
        found = next_record(log, position)
    if found is not None:
        lost = (
            f"Good records go on at {found.position}: the {found.position - position} bytes from"
            f" {position} on hold no whole record."
        )
    else:
        lost = "No good record was found behind it."
    return StoreDamagedError(
        f"{where}. {reason} {lost}",
        cure=f"Nothing was changed. `sluice store repair {root}` shows what can be saved, with"
        " --write it saves it; or bring the files back from a copy.",
    )


def bad_place(log: CommitLog, position: int) -> int:
    """Where appending or reading would go on behind a blank record: that place is what is bad."""
    segment = log.segments.at(position)
    if segment is None or segment.end - position < BLANK_BYTES:
        return position
    return segment.end if is_blank(segment.view(), position - segment.base) else position
