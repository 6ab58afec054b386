"""The long walk of recovery: one by one where records are few, in columns where they are many.

`scan` reads a record, `sweep` a piece of the log at once with NumPy; both accept exactly the same
records. A start after an orderly stop looks at a handful of records and does without NumPy.

What is wrong at a place of the commit log, in words, and where good records go on behind it.

Used for reports: by recovery when it refuses to start, by readers that pass over a damaged record.
The rule itself is `scan.read_scanned`; here it is asked clause by clause.

Bad bytes with good records behind them have two causes. A power loss keeps some of the writes that
were not synced and drops others, also earlier ones: what is dropped reads as zeros, up to the end
of a write or in whole sectors (`is_lost_write`). Everything else is damage: a disk changes bits, it
does not remove them.

Units that the log implies and the files of the queues do not hold yet, added in memory alone.

A running broker of ours keeps new units in memory for a second (`consumequeue`), and one that was
killed never wrote them. Its next start would find them in the log behind the mark (`recovery`). So
does this for who only reads: units that directly follow what a queue has are appended to its tail
in memory; nothing else is believed and no file is touched.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from sluicemq.errors import ProtocolError, StoreDamagedError
from sluicemq.files import Files
from sluicemq.record.codec import RecordHead, body_crc_agrees, parse_head
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
from sluicemq.store.directory import read_checkpoint
from sluicemq.store.log import (
    BLANK_BYTES,
    DELAYS_MS,
    CommitLog,
    Scanned,
    is_blank,
    read_counting,
    read_scanned,
    scan_records,
)
from sluicemq.store.queues import UNIT, ConsumeQueues
from sluicemq.store.segments import Segment

if TYPE_CHECKING:
    from sluicemq.store.bulk import Sweep

SINGLES_FIRST: Final = 2000
"""A walk shorter than this is over before NumPy would be imported."""
SINGLES_BETWEEN: Final = 32
"""So many are read one by one where columns do not help, more each time, up to the number above."""


def sweep_records(
    log: CommitLog, start: int, *, check_crc: bool = True, delays_ms: Sequence[int] = DELAYS_MS
) -> "Iterator[Scanned | Sweep]":
    """As `scan_records`, many records at a time where there are many (`sweep`).

    The first ones come singly: a short walk, the usual one, does without NumPy. `delays_ms` are
    the delays of level 1, 2, … (messageDelayLevel), for the units of delayed messages.
    """
    singles, between = SINGLES_FIRST, SINGLES_BETWEEN
    position = start
    while (segment := log.segments.at(position)) is not None:
        view, base, size = segment.view(), segment.base, segment.size
        at = position - base
        while size - at >= BLANK_BYTES and not is_blank(view, at):
            if not singles:
                columns = _sweep(log, view, at, base, check_crc, delays_ms)
                if columns is not None:
                    yield columns
                    at = columns.end - base
                is_worth_it = columns is not None and columns.count >= SINGLES_BETWEEN
                between = SINGLES_BETWEEN if is_worth_it else min(2 * between, SINGLES_FIRST)
                singles = 0 if is_worth_it else between
                continue
            scanned = read_counting(log, view, at, base, check_crc=check_crc)
            if scanned is None:
                return
            yield scanned
            at += scanned.size_bytes
            singles -= 1
        position = segment.end


def _sweep(
    log: CommitLog,
    view: memoryview,
    at: int,
    base: int,
    check_crc: bool,
    delays_ms: Sequence[int],
) -> "Sweep | None":
    from sluicemq.store.bulk import sweep_piece  # noqa: PLC0415 - NumPy for long walks only

    return sweep_piece(
        view, at, base, check_crc=check_crc, requires_checksum=log.requires_checksum,
        delays_ms=delays_ms,
    )  # fmt: skip


SEARCH_BYTES_MAX: Final = 64 << 20
"""How far behind a bad place the next good record is looked for, for a report."""
SECTOR_BYTES: Final = 512
_CHUNK_BYTES: Final = 1 << 20
_MAGIC_START: Final = BLANK.struct.pack(0, MAGIC_V1)[4:7]
_MAGIC_BLANK: Final = BLANK.struct.pack(0, MAGIC_BLANK)[4:]
_POSITION: Final = struct.Struct(">q")
_POSITION_AT: Final = RECORD_HEAD.at("physical_offset")
_SIZE_BYTES: Final = 4
_ZEROS_MIN: Final = 2


def explain(view: memoryview, at: int, base: int) -> str:
    """Why no record counts at `at` of a file that begins at `base`."""
    if len(view) - at < BLANK_BYTES:
        return f"only {len(view) - at} bytes are left in the file"
    size, magic = BLANK.struct.unpack_from(view, at)
    if not any(view[at : at + RECORD_BYTES_MIN]):
        return "there are zeros instead of a record"
    if magic == MAGIC_BLANK:
        return f"the blank record says that {size} bytes are left in the file: {len(view) - at} are"
    if magic not in MAGICS:
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


def _find_record(segment: Segment, at: int) -> Scanned | None:
    """The first whole record that begins at `at` of a file or behind, as far as a report looks.

    Read without the map: a hole that is read through it may need room on the disk (SIGBUS).
    """
    view, file = segment.view(), segment.file()
    place, stop = file.data_start(at), at + SEARCH_BYTES_MAX
    while place is not None and place < stop:
        chunk = file.pread(_CHUNK_BYTES, place)
        for start in _starts(chunk, _MAGIC_START):
            record = _whole(view, place + start, segment.base)
            if record is not None:
                return record
        if len(chunk) < _CHUNK_BYTES:
            return None
        place = file.data_start(place + len(chunk) - BLANK_BYTES)
    return None


def _starts(data: bytes, magic: bytes) -> Iterator[int]:
    """Where a size and this magic number (or its first bytes) may stand."""
    found = data.find(magic, _SIZE_BYTES)
    while found >= 0:
        yield found - _SIZE_BYTES
        found = data.find(magic, found + 1)


def _whole(view: memoryview, at: int, base: int) -> Scanned | None:
    """The record, wholly checked: its position first, which hardly any other bytes have."""
    if at + RECORD_BYTES_MIN > len(view):
        return None
    if _POSITION.unpack_from(view, at + _POSITION_AT)[0] != base + at:
        return None
    return read_scanned(view, at, base, check_crc=True)


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
        for record in scan_records(log, end):
            yield record
            end = record.end
        found = next_record(log, end)
        if found is None:
            return
        end = found.position


def bad_bytes(log: CommitLog, start: int, end: int) -> bytes:
    """What lies between a bad place and the whole record at `end`, as far as its file goes."""
    segment = log.segments.at(start)
    if segment is None:
        return b""
    return segment.read(start, min(end, segment.end, start + SEARCH_BYTES_MAX) - start)


def is_lost_write(data: bytes, start: int, *, ends_file: bool) -> bool:
    """Whether bytes that hold no whole record, though whole ones follow, can be what a power loss
    has left of writes: they lack their end, or a sector.

    `start` is their place in the log; `ends_file`: the record that follows is in the next file.
    """
    if ends_file:  # it ends with a blank record, or else with what is missing
        if _is_bad_blank(data):
            return False
        blanks = _starts(data, _MAGIC_BLANK)
        data = data[: next((b for b in blanks if is_blank(memoryview(data), b)), len(data))]
    return not data or _lacks_end(data) or _lacks_sector(data, start)


def _lacks_end(data: bytes) -> bool:
    """Whether it ends with zeros: a record without properties ends with two by nature."""
    head = _head_of(data)
    is_bare = head is not None and head.properties.start == head.properties.stop
    return not data[head.topic.stop - 1 if head is not None and is_bare else -1]


def _lacks_sector(data: bytes, start: int) -> bool:
    """Whether zeros go from the beginning of a sector, or of a write, to the end of the sector.

    A write begins with a record, so such zeros are no part of one whose beginning is there.
    """
    head = _head_of(data)
    is_begun = data[_SIZE_BYTES:].startswith(_MAGIC_START)
    is_placed = head is not None and head.physical_offset == start
    first_end = len(data) if is_placed else RECORD_BYTES_MIN if is_begun else 0
    for end in range(SECTOR_BYTES - start % SECTOR_BYTES, len(data), SECTOR_BYTES):
        zeros = end - len(data[:end].rstrip(b"\0"))
        if zeros >= SECTOR_BYTES:
            return True
        if zeros == end:  # a size begins with zeros by nature
            if end >= _SIZE_BYTES or int.from_bytes(data[:_SIZE_BYTES]) != len(data):
                return True
        elif zeros >= _ZEROS_MIN and end > first_end:
            return True
    return False


def _head_of(data: bytes) -> RecordHead | None:
    """The head, when these bytes are one record by their sizes."""
    try:
        head = parse_head(data)
    except ProtocolError:
        return None
    return head if head.size_bytes == len(data) else None


def _is_bad_blank(data: bytes) -> bool:
    """Whether the rest of a file is a blank record of which one half is whole, the other wrong."""
    size, magic = data[:_SIZE_BYTES], data[_SIZE_BYTES:BLANK_BYTES]
    if any(data[BLANK_BYTES:]):
        return False
    if magic == _MAGIC_BLANK:
        return any(size)
    return int.from_bytes(size) == len(data) and magic[-1] != 0


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


def require_own_files(log: CommitLog) -> None:
    """Raises StoreDamagedError when a file begins with the first record of another one: their names
    were exchanged. Nothing but the first record of each is read."""
    for segment in log.segments:
        (position,) = _POSITION.unpack(segment.read(segment.base + _POSITION_AT, _POSITION.size))
        segment.release()
        other = log.segments.at(position) if position != segment.base else None
        if other is None or other.base != position:
            continue
        if read_scanned(segment.view(), 0, position, check_crc=True) is not None:
            raise StoreDamagedError(
                f"{segment.path} holds the bytes of another file: its first record says that it"
                f" lies at {position}, not at {segment.base}.",
                cure=f"Its name must be {position:020d}: give the files their names back, or bring"
                " them back from a copy.",
            )


def bad_place(log: CommitLog, position: int) -> int:
    """Where appending or reading would go on behind a blank record: that place is what is bad."""
    segment = log.segments.at(position)
    if segment is None or segment.end - position < BLANK_BYTES:
        return position
    return segment.end if is_blank(segment.view(), position - segment.base) else position


Wanted = Callable[[str, int], bool]


def add_tail(root: str, log: CommitLog, queues: ConsumeQueues, wanted: Wanted) -> None:
    """Let the wanted queues end where the log says. Nothing for a store that was stopped in order,
    and for one without a mark: RocketMQ writes its units at once."""
    files = log.segments.files
    if not files.exists(f"{root}/abort"):
        return
    start = _start(files, f"{root}/checkpoint", log)
    for found in sweep_records(log, start) if start is not None else ():
        if isinstance(found, Scanned):
            if found.is_queued:
                unit = UNIT.pack(found.position, found.size_bytes, found.tag_code())
                key = (found.topic.decode(errors="replace"), found.queue_id)
                _add(queues, key, found.queue_offset, unit, wanted)
            continue
        for group in found.groups:
            if group.is_row:
                key = (group.topic.decode(errors="replace"), group.queue_id)
                _add(queues, key, int(group.offsets[0]), group.units.tobytes(), wanted)


def _start(files: Files, path: str, log: CommitLog) -> int | None:
    """From where on units may be missing; a young store has no checkpoint yet."""
    mark = read_checkpoint(files, path).mark
    if mark is not None:
        return max(mark.log_offset, log.start)
    return None if files.exists(path) else log.start


def _add(
    queues: ConsumeQueues, key: tuple[str, int], offset: int, units: bytes, wanted: Wanted
) -> None:
    position = UNIT.unpack_from(units)[0]
    if not wanted(*key) or not queues.deleted.counts(key[0], position):
        return
    queue = queues.by_key.get(key)
    if queue is None:
        queue = queues.open(key)
        queue.reset(offset)
    queue.extend(offset, units)
