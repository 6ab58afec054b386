"""Collecting the records of a read within its limits, as slices of the log, without damaged ones.

No message is copied or decoded: `RecordCollector` receives units, and adjacent records become one
slice. A filtered, ordinary pull also gets no more matches than its reader can hold (`SpanLimit`),
counted from the first match that the reader has not consumed.

Evaluating seven hundred conditions on two thousand messages takes a quarter of a second, and no
reader may occupy the event loop for that time. A read that needs results of such a filter ends with
`PostponedWork`. The caller runs the work in any thread, stores its result, and reads again. If the
read has found messages before, it ends with these, as a read whose time is over.

An ordinary start does not read the whole store, so old records may be damaged unnoticed. Readers
never see damage (`RecordVerifier`). Records that this process has written are trusted. Older
records are checked when they are read:

    ordinary pull   the whole record with its CRC, and whether it belongs to the queue; a pull
                    carries 32 messages
    bulk read       size, magic number, position, queue id and offset, in columns for many units

A mismatch has one of three causes:

    wrong unit       the log has the message between the records of the neighbouring units: the
                     unit is rebuilt
    wrong queue      the units, and those around them, lead to records of other queues: reading the
                     queue fails, and the next start rebuilds all queues (`is_doubtful`)
    damaged record   the unit becomes a blank one, and the reader continues behind it

Each case is logged once, with its fix. Placeholders of a repair (`log.PLACEHOLDER_CODE`) are
skipped silently. One kind of damage goes unnoticed: a changed tag code in a unit whose message the
tag filter therefore rejects. Only `sluice store verify` compares tag codes.
"""

import contextlib
import logging
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import Any, Final, NamedTuple
from zlib import crc32

from sluicemq import engine
from sluicemq.errors import StoreDamagedError
from sluicemq.model.subscription import MessageFilter
from sluicemq.record.layout import (
    CRC_MASK,
    HOST_BITS,
    MAGIC_V1,
    MAGICS,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
)
from sluicemq.store.dispatch import iter_whole_records
from sluicemq.store.log import PLACEHOLDER_CODE, CommitLog, LogRecord
from sluicemq.store.queues import (
    BLANK_SIZE,
    BLANK_UNIT,
    GAP_MAX,
    UNIT,
    UNIT_BYTES,
    ConsumeQueues,
    Queue,
    Unit,
    Units,
)
from sluicemq.store.segments import Segment

logger = logging.getLogger(__name__)

PULL_SPAN_MAX: Final = 2000
"""How many offsets apart the matches may be that a client has received and not consumed.

This is the default for clients whose span is not known otherwise (`broker.consume.delivery`). The
Java push consumer pauses for 50 ms when its messages span more (consumeConcurrentlyMaxSpan), so an
answer with 32 matches of a rare tag would slow it down.
"""
UNLIMITED: Final = 1 << 62
INLINE_WEIGHT_MAX: Final = 512
"""Filters up to this weight are evaluated in the read, which takes about 20 µs for each record."""
READ_TIME_MAX_S: Final = 0.002
"""A read that examines records ends after this time."""
CACHED_FILTERS_MAX: Final = 64
"""Number of filters whose results are cached."""
CACHED_RECORDS_MAX: Final = 1024
"""Number of records for which the results of one filter are cached. One read asks for about 256."""
_READ_UNITS_MAX: Final = 4096
_RUNS_BYTES_MIN: Final = 512 * UNIT_BYTES
"""Fewer units than this are collected faster one by one. An ordinary pull never has as many."""
UnitSelector = Callable[[Units], Iterable[int]]
"""A function that returns the indices of the wanted units, in ascending order."""
REPORTS_MAX: Final = 1000
"""At most this many damaged records are logged; further ones are only counted."""
VECTORISED_UNITS_MIN: Final = 256
"""The heads of at least this many records are checked in columns."""
UNIT_SEARCH_BYTES_MAX: Final = 16 << 20
"""At most this many bytes of the log are searched for the message of a wrong unit."""
_HEAD_FIELDS: Final = RECORD_HEAD.struct_of(
    "size", "magic", "queue_id", "queue_offset", "physical_offset"
)
_unpack_whole: Final = RECORD_HEAD.struct_of(
    "size",
    "magic",
    "body_crc",
    "queue_id",
    "queue_offset",
    "physical_offset",
    "sys_flag",
    "store_time",
    "body_length",
).unpack_from
_EMPTY: Final = memoryview(b"")
_unpack_units: Final = UNIT.iter_unpack
_first_position: Final = struct.Struct(">q").unpack_from


def are_whole(
    units: Units, offsets: Sequence[int], segment: Segment, queue: Queue, lost_code: int
) -> bool:
    """Return whether all records of the units are common (V1, IPv4), valid, and in `segment`. HOT.

    The units are the 20-byte entries of `queue` at these `offsets`. Placeholders, whose tag code is
    `lost_code`, are not accepted. False does not mean that a record is damaged, but that the caller
    must check each of them: other forms of records, and zeros in properties, give False too. The
    compiled engine has the same function.
    """
    base = segment.base
    topic = queue.topic_part
    queue_id = queue.queue_id
    view = segment.data_view(end_of_last(units))
    position_max = base + len(view) - RECORD_BYTES_MIN
    for (position, size, code), offset in zip(_unpack_units(units), offsets, strict=True):
        if code == lost_code or not base <= position <= position_max or size < RECORD_BYTES_MIN:
            return False
        start = position - base
        (
            stored_size,
            magic,
            crc,
            stored_queue_id,
            stored_offset,
            stored_position,
            flags,
            time_ms,
            body_length,
        ) = _unpack_whole(view, start)
        body_start = start + RECORD_HEAD.size
        body_end = body_start + body_length
        # Behind the body: the topic with its length, the length of the properties, the properties.
        behind_body = bytes(view[body_end : start + size])
        properties_start = len(topic) + 2
        # Each line is one rule. The body comes late, because its CRC takes longest.
        if (
            (stored_size, magic, stored_queue_id) != (size, MAGIC_V1, queue_id)
            or stored_offset != offset
            or stored_position != position
            or flags & HOST_BITS
            or not time_ms
            or not 0 <= body_length <= size - RECORD_BYTES_MIN
            or crc32(view[body_start:body_end]) & CRC_MASK != crc
            or start + size > len(view)
            or not behind_body.startswith(topic)
            or int.from_bytes(behind_body[properties_start - 2 : properties_start], "big")
            != len(behind_body) - properties_start
            or b"\0" in behind_body[properties_start:]
        ):
            return False
    return True


def end_of_last(units: Units) -> int:
    """Return the position behind the record of the last unit, as that unit says."""
    position, size, _ = UNIT.unpack_from(units, len(units) - UNIT_BYTES)
    return int(position) + int(size)


@cache
def _positions_and_sizes(count: int) -> Callable[[Units], tuple[int, ...]]:
    """Return a function that unpacks `count` units to (position, size, position, size, …)."""
    return struct.Struct(">" + count * "qi8x").unpack


class RecordVerifier:
    """Checks records that were written before `trusted_from`, and logs each damaged one once."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues, delays_ms: Sequence[int]) -> None:
        """Create a verifier. It does not trust the records that are in the log now.

        If a whole queue turns out to be wrong, `queues.is_doubtful` is set. `delays_ms` are the
        delays of level 1, 2, … (messageDelayLevel), from which units of delayed messages are
        rebuilt.
        """
        self._log = log
        self._queues = queues
        self._delays_ms = delays_ms
        self._damaged_positions: set[int] = set()
        """The positions of the damaged records that were found."""
        self.trusted_from = log.written_offset
        """The position from which on this process has written the log itself."""

    def is_trusted(self, position: int) -> bool:
        """Return whether this process has written the record at `position`."""
        return self.trusted_from <= position < self._log.written_offset

    def is_valid(self, position: int, size: int, *, is_whole: bool) -> bool:
        """Return whether the record of `size` bytes at `position` may be given to a reader.

        If `is_whole`, the whole record is checked, else only its head. Damage is logged. A record
        that retention has deleted counts as valid; the caller finds out that it is missing.
        """
        reason = self._find_fault(Unit(position, size, 0), None, is_whole=is_whole)
        if reason:
            self._report_damage(position, reason)
        return reason is None

    def repair_or_blank(
        self, units: Units, queue: Queue, offsets: Sequence[int], *, is_whole: bool
    ) -> Units:
        """Check the records of units. Return the units, in which wrong ones are replaced.

        `units` are 20-byte entries of `queue`, joined, and `offsets` their queue offsets. If
        `is_whole`, whole records are checked, else only their heads.

        - A unit that locates no record of this queue and offset is rebuilt from the log; it is also
          written to the queue, and logged.
        - A unit whose record is damaged becomes a blank unit; that is logged. Placeholders become
          blank too.
        - A unit whose record retention has removed stays.

        If nothing is wrong, `units` itself is returned. Raises StoreDamagedError if the whole queue
        is wrong.
        """
        segment = self._log.segments.at(UNIT.unpack_from(units)[0])
        # In most cases all records are common and valid, which one call finds out.
        if is_whole and segment is not None and not self._log.requires_checksum:
            check = are_whole if engine.pulls is None else engine.pulls.are_whole
            if check(units, offsets, segment, queue, PLACEHOLDER_CODE):
                return units
        # Otherwise each record is checked. If heads suffice, NumPy finds the few that need it.
        suspect_indices: Sequence[int] = range(len(units) // UNIT_BYTES)
        if not is_whole and segment is not None and len(suspect_indices) >= VECTORISED_UNITS_MIN:
            suspect_indices = _find_unverified_heads(units, offsets, segment, queue)
        repaired: bytearray | None = None  # a copy of the units, as soon as one is wrong
        for index in suspect_indices:
            unit = Unit._make(UNIT.unpack_from(units, index * UNIT_BYTES))
            position, size, code = unit
            if self.is_trusted(position) and code != PLACEHOLDER_CODE and size > 0:
                continue
            reason = self._find_fault(unit, (queue, offsets[index]), is_whole=is_whole)
            if reason is None:  # the record may be read
                continue
            replacement = BLANK_UNIT
            if reason:  # else there is no record to rebuild the unit from
                replacement = self._rebuild_or_report(unit, queue, offsets[index], reason)
            if repaired is None:
                repaired = bytearray(units)
            repaired[index * UNIT_BYTES : (index + 1) * UNIT_BYTES] = replacement
        return units if repaired is None else repaired

    def _rebuild_or_report(self, unit: Unit, queue: Queue, offset: int, reason: str) -> bytes:
        """Return the right unit for an offset, or a blank unit if it cannot be rebuilt.

        In the second case the record is reported as damaged, for `reason`. Raises StoreDamagedError
        if the whole queue is wrong.
        """
        rebuilt = self._rebuild_unit(unit, queue, offset)
        if rebuilt is None:
            self._report_damage(unit.physical_offset, reason)
            return BLANK_UNIT
        return rebuilt

    def _find_fault(
        self, unit: Unit, expected: tuple[Queue, int] | None, *, is_whole: bool
    ) -> str | None:
        """Return why the record of a unit may not be given to a reader; None if it may.

        A unit is the entry of a queue that locates the record. The reason is a phrase. It is "" if
        there never was a record: the unit is blank, or of a placeholder.

        `expected` is the (queue, offset) to which the record must belong; None allows any. If
        `is_whole`, the whole record is checked. Otherwise a right head suffices, and the whole
        record is checked only if the head is wrong.
        """
        position, size, code = unit
        if code == PLACEHOLDER_CODE or size == BLANK_SIZE:
            return ""
        if 0 <= position < self._log.start:
            return None  # retention has deleted the file: this is not damage
        segment = self._log.segments.at(position)
        if segment is None:
            return f"no file of the log holds byte {position}"
        if size < RECORD_BYTES_MIN or position + size > segment.end:
            return f"a record of {size} bytes does not fit there"
        if not is_whole and _has_right_head(unit, segment, expected):
            return None
        record = self._log.find_valid_record(position)
        if record is None or record.size_bytes != size:
            return f"{self._log.explain_bad_record(position)} ({segment.path})"
        if expected is not None:
            queue, offset = expected
            if not record.belongs_to(queue.key, offset):
                return "the record belongs to another queue or offset"
        return None

    def _rebuild_unit(self, unit: Unit, queue: Queue, offset: int) -> bytes | None:
        """Search the log for the message of a wrong unit. Write the right unit, and return it.

        The log is searched between the records of the nearest right units before and behind, if
        these are at most `UNIT_SEARCH_BYTES_MAX` apart. A rebuilt unit is logged. Returns None if
        the record is not found. If all units around are wrong too, but locate records, the files
        belong to another queue: then sets `is_doubtful` of the queues, and raises
        StoreDamagedError.
        """
        # Search between the records of the neighbours.
        search_start = self._log.start
        unit_before = self._find_nearest_valid_unit(queue, offset, -1)
        if unit_before is not None:
            search_start = unit_before.end
        search_end = self._log.written_offset
        unit_behind = self._find_nearest_valid_unit(queue, offset, 1)
        if unit_behind is not None:
            search_end = unit_behind.physical_offset
        record = None
        if search_end - search_start <= UNIT_SEARCH_BYTES_MAX:
            record = self._find_record(queue, offset, search_start, search_end)
        if record is not None:
            return self._write_rebuilt_unit(record, queue, offset)

        all_near_are_wrong = unit_before is None and unit_behind is None
        if all_near_are_wrong and self._log.find_valid_record(unit.physical_offset):
            self._queues.is_doubtful = True
            raise StoreDamagedError(
                f"The queue {queue.topic}/{queue.queue_id} in {queue.segments.directory} is damaged"
                f" at {offset}: its units lead to records of other queues.",
                fix="Restart the broker: it rebuilds the queues from the log.",
            )
        return None

    def _write_rebuilt_unit(self, record: LogRecord, queue: Queue, offset: int) -> bytes:
        """Write the unit of `record` at its offset in the queue, log that, and return the unit."""
        code = record.tag_code(self._delays_ms)
        rebuilt = UNIT.pack(record.position, record.size_bytes, code)
        logger.warning(
            "queue %s/%d: the unit of message %d was damaged, and has been rebuilt from the log",
            queue.topic,
            queue.queue_id,
            offset,
        )
        # If the unit cannot be written, the next reader rebuilds it again.
        with contextlib.suppress(OSError):
            queue.overwrite_unit(offset, rebuilt)
        return rebuilt

    def _find_record(self, queue: Queue, offset: int, start: int, end: int) -> LogRecord | None:
        """Return the record with this queue offset that begins in [start, end) of the log.

        Return None if there is none.
        """
        for record in iter_whole_records(self._log, start):
            if record.position >= end:
                return None
            if record.is_queued and record.belongs_to(queue.key, offset):
                return record
        return None

    def _find_nearest_valid_unit(self, queue: Queue, offset: int, step: int) -> Unit | None:
        """Return the nearest unit before or behind `offset` that locates its record.

        `step` is 1 to search behind, and -1 to search before. Returns None if there is none within
        `GAP_MAX` offsets and the visible part of the queue.
        """
        for other_offset in range(offset + step, offset + step * GAP_MAX, step):
            if not queue.offset_min <= other_offset < queue.visible_offset:
                return None
            unit = queue.unit(other_offset)
            if unit is None:
                return None
            if not unit.is_used:
                continue
            if self._find_fault(unit, (queue, other_offset), is_whole=False) is None:
                return unit
        return None

    def _report_damage(self, position: int, reason: str) -> None:
        """Remember that the record at `position` is damaged, and log `reason` the first time.

        At most `REPORTS_MAX` records are logged.
        """
        if position not in self._damaged_positions and len(self._damaged_positions) < REPORTS_MAX:
            logger.error(
                "the record at position %d of the log is damaged and is skipped: %s; stop the"
                " broker and run `sluice store repair`",
                position,
                reason,
            )
        self._damaged_positions.add(position)


def _find_unverified_heads(
    units: Units, offsets: Sequence[int], segment: Segment, queue: Queue
) -> list[int]:
    """Return the indices of the units whose records' heads in `segment` are not right.

    `units` are entries of `queue` at these `offsets`. A record outside `segment` counts too.
    """
    from sluicemq.store.bulk import unverified_heads  # noqa: PLC0415 - imports NumPy

    view = segment.data_view(end_of_last(units))
    return unverified_heads(view, segment.base, units, queue.queue_id, offsets)


def _has_right_head(unit: Unit, segment: Segment, expected: tuple[Queue, int] | None) -> bool:
    """Return whether the record of a unit in `segment` begins with the right head.

    The head must have the size and position in the unit. If `expected`, a (queue, offset), is
    given, it must also have that queue id and offset.
    """
    view, start = segment.safe_view(unit.physical_offset, RECORD_BYTES_MIN)
    size, magic, queue_id, queue_offset, position = _HEAD_FIELDS.unpack_from(view, start)
    if size != unit.size_bytes or magic not in MAGICS or position != unit.physical_offset:
        return False
    if expected is None:
        return True
    queue, offset = expected
    return bool(queue_id == queue.queue_id and queue_offset == offset)


class PostponedWork(NamedTuple):
    """Work that must be done before a read can continue: `store_result(run())`.

    `run` may be called in any thread, `store_result` in the event loop.
    """

    run: Callable[[], Any]
    store_result: Callable[[Any], object]


class PostponedError(Exception):
    """Raised when a read cannot continue before `work` is done."""

    def __init__(self, work: PostponedWork) -> None:
        super().__init__("the filter must be evaluated first")
        self.work = work


class FilterResultCache:
    """Caches whether filters match records, by the positions of the records."""

    def __init__(self) -> None:
        self._results: OrderedDict[int, tuple[MessageFilter, dict[int, bool]]] = OrderedDict()

    def select(
        self,
        message_filter: MessageFilter,
        units: Units,
        properties_at: Callable[[int, int], Mapping[str, str]],
    ) -> Sequence[int]:
        """Return the indices of the units that the filter selects, in ascending order.

        `units` are 20-byte entries of a queue, joined. `properties_at(position, size)` returns the
        properties of a record. Blank units are not selected. Raises PostponedError if a result is
        not in the cache: another thread must then evaluate the filter for the missing records, and
        the work in the error puts the results into the cache.
        """
        _, cached = self._results.get(id(message_filter), (None, {}))
        candidates = _select_by_codes(message_filter, units)
        missing = [
            (position, properties_at(position, size))
            for _, position, size in candidates
            if position not in cached
        ]
        if not missing:
            return [index for index, position, _ in candidates if cached[position]]

        def evaluate() -> dict[int, bool]:
            matches = message_filter.by_commit_log
            return {position: matches(properties) for position, properties in missing}

        store_result = partial(self._store_results, message_filter)
        raise PostponedError(PostponedWork(evaluate, store_result))

    def _store_results(self, message_filter: MessageFilter, results: dict[int, bool]) -> None:
        """Cache results of a filter. `results` maps positions of records to whether they match.

        The filter whose results are oldest is dropped if there are too many.
        """
        # Removing the entry and adding it again makes it the newest of the cache.
        _, cached = self._results.pop(id(message_filter), (None, {}))
        if len(cached) > CACHED_RECORDS_MAX - len(results):
            cached = {}
        cached.update(results)
        # The entry keeps the filter alive, so that no other filter can get the same id.
        self._results[id(message_filter)] = (message_filter, cached)
        if len(self._results) > CACHED_FILTERS_MAX:
            self._results.popitem(last=False)


def _select_by_codes(message_filter: MessageFilter, units: Units) -> list[tuple[int, int, int]]:
    """Return (index, position, size) of the units whose tag code the filter may accept.

    Blank units are left out.
    """
    may_match = message_filter.by_consume_queue
    return [
        (index, position, size)
        for index, (position, size, code) in enumerate(_unpack_units(units))
        if size != BLANK_SIZE and may_match(code)
    ]


class SpanLimit(NamedTuple):
    """Limits the messages that the reader of ordinary pulls holds.

    The reader has consumed everything before offset `consumed`. The matches that it has received
    and not consumed may span `span_max` offsets. If the next match is beyond that, a reader that
    `is_patient` gets no message, and any other reader gets as many as if it held none.
    """

    consumed: int
    span_max: int = PULL_SPAN_MAX
    is_patient: bool = False


@dataclass(slots=True, eq=False)
class RecordCollector:
    """Collects records within limits, as slices of the log.

    The limits are `count_max` messages and `bytes_max` bytes. `is_bulk` selects how records are
    checked: see the module. `span_limit` None means that the reader may hold any number of
    messages. `may_postpone` allows that a read ends with `postponed`. Call `close` after the last
    unit.

    Results are `data` with `count` messages of `size_bytes`. `is_missing` says that the log does
    not have a record that a unit locates. `held_from` is the first match that the reader holds (-1
    if none is known), and `last_offset` the last one that it is given. `postponed` is work without
    which the read cannot continue. `is_out_of_reach` says that there is a match which the reader
    must request again. `is_filter_reliable` says that no evaluation of the filter over columns has
    failed.
    """

    log: CommitLog
    verifier: RecordVerifier
    queue: Queue
    count_max: int
    bytes_max: int
    is_bulk: bool
    span_limit: SpanLimit | None = None
    may_postpone: bool = False
    data: list[memoryview] = field(default_factory=list)
    count: int = 0
    size_bytes: int = 0
    is_missing: bool = False
    is_out_of_reach: bool = False
    is_filter_reliable: bool = False
    held_from: int = -1
    last_offset: int = -1
    postponed: PostponedWork | None = None
    # The positions of a run of adjacent records that is not in `data` yet.
    _run_start: int = -1
    _run_end: int = -1
    # The log file of the run, which contains the positions [_base, _limit).
    _view: memoryview = _EMPTY
    _base: int = 0
    _limit: int = 0

    @property
    def messages_left(self) -> int:
        """The number of messages that may still be taken."""
        return 0 if self.is_missing else self.count_max - self.count

    def take_from(self, offset: int) -> int:
        """Take the messages of the queue from `offset` on, as many as have room. HOT.

        Returns the offset behind the last unit that was taken or skipped. Sets `is_missing` if the
        queue or the log lacks something that should be there.
        """
        queue = self.queue
        end = queue.visible_offset
        while offset < end and not self.is_missing and self.count < self.count_max:
            units_max = min(end - offset, self.count_max - self.count, _READ_UNITS_MAX)
            units = queue.units(offset, units_max)
            if not len(units):
                self.is_missing = True
                break
            processed = self.take_all(units, range(offset, offset + len(units) // UNIT_BYTES))
            offset += processed
            if processed * UNIT_BYTES < len(units):  # a limit is reached, or a record is missing
                break
        return offset

    def take_all(self, units: Units, offsets: Sequence[int]) -> int:
        """Take units in order while there is room. Return how many were taken or skipped. HOT.

        `units` are 20-byte entries of the queue, joined, and `offsets` their queue offsets. Records
        that another process has written are verified first. Blank units, also those in place of
        damaged records, are skipped. If the result is less than the number of units, a limit is
        reached or `is_missing` is set.
        """
        if len(units) and not self.verifier.is_trusted(_first_position(units)[0]):
            is_whole = not self.is_bulk
            units = self.verifier.repair_or_blank(units, self.queue, offsets, is_whole=is_whole)
        processed = 0
        if len(units) >= _RUNS_BYTES_MIN:
            processed = self._take_runs(units)
        elif self._run_start < 0:  # `_take_plain` would add its slices before an unfinished run
            processed = self._take_plain(units)
        return processed or self._take_singly(units)

    def _take_plain(self, units: Units) -> int:
        """Take all of the units if nothing prevents it. Return their number. HOT.

        This is the fast path of `take_all` for the few units of an ordinary pull. There must be
        room for all, one log file must contain all records, and no unit may be blank. Otherwise no
        unit is taken, and 0 is returned.
        """
        count = len(units) // UNIT_BYTES
        if not 0 < count <= self.messages_left:
            return 0

        # Continue in the file of the first record, unless it is the file of the last read.
        first_start = _first_position(units)[0]
        if not self._base <= first_start < self._limit:
            segment = self.log.segments.at(first_start)
            if segment is None:
                return 0
            self._view = segment.view()
            self._base = segment.base
            self._limit = segment.end
        view = self._view
        base = self._base

        # The records must fit into the limit of bytes and lie in this file.
        positions_and_sizes = _positions_and_sizes(count)(units)
        starts = positions_and_sizes[::2]
        sizes = positions_and_sizes[1::2]
        total_bytes = sum(sizes)
        last_end = starts[-1] + sizes[-1]
        bytes_left = self.bytes_max - self.size_bytes
        if max(sizes) == BLANK_SIZE or total_bytes > bytes_left or last_end > self._limit:
            return 0

        # Adjacent records are one slice of the log.
        if last_end - first_start == total_bytes:
            self.data.append(view[first_start - base : last_end - base])
        else:
            self.data += [
                view[start - base : start - base + size]
                for start, size in zip(starts, sizes, strict=True)
            ]
        self.count += count
        self.size_bytes += total_bytes
        return count

    def _take_singly(self, units: Units) -> int:
        """Take units one by one while there is room. Return how many were taken or skipped.

        Adjacent records extend an unfinished run, a slice of the log that is added to `data` when
        another run begins. The first message of a read is taken even if it exceeds `bytes_max`.
        Stops at a record that the log does not have, and sets `is_missing`.
        """
        messages_left = 0 if self.is_missing else self.count_max - self.count
        total_bytes = self.size_bytes
        run_start = self._run_start
        run_end = self._run_end
        bytes_max = self.bytes_max if self.count else UNLIMITED  # the first message always fits
        processed = taken = 0
        for position, size, _ in _unpack_units(units):
            if size == BLANK_SIZE:
                processed += 1
                continue
            if taken >= messages_left or total_bytes + size > bytes_max:
                break
            if position != run_end:  # the record is not adjacent: another run begins
                if run_start >= 0:
                    self.data.append(self._view[run_start - self._base : run_end - self._base])
                run_start = position
                is_in_file = self._base <= position <= self._limit - size
                if not is_in_file and not self._switch_to_file_of(position, size):
                    run_start = -1
                    break
            run_end = position + size
            total_bytes += size
            taken += 1
            processed += 1
            bytes_max = self.bytes_max
        self._run_start = run_start
        self._run_end = run_end
        self.count += taken
        self.size_bytes = total_bytes
        return processed

    def _take_runs(self, units: Units) -> int:
        """Take as many units as there is room for, in runs of adjacent records.

        A run becomes one slice of the log. Returns the number of units that were taken. Returns 0,
        with nothing changed, if the units must be taken one by one: `find_runs` does not apply, or
        a run is not completely in one file of the log.
        """
        from sluicemq.store.bulk import find_runs  # noqa: PLC0415 - imports NumPy

        bytes_left = self.bytes_max - self.size_bytes
        runs = find_runs(units, self.messages_left, bytes_left)
        if runs is None:
            return 0
        for start, end in runs.ranges:
            segment = self.log.segments.at(start)
            if segment is None or end > segment.end:  # each run must lie in one file of the log
                return 0
        for start, end in runs.ranges:
            if start != self._run_end:  # not adjacent to the unfinished run: begin another one
                self.close()
                self._switch_to_file_of(start, end - start)
                self._run_start = start
            self._run_end = end
        self.count += runs.message_count
        self.size_bytes += runs.size_bytes
        return runs.message_count

    def take_indices(self, units: Units, first_offset: int, indices: Iterable[int]) -> int:
        """Take the units at `indices`. Return the offset of the first one not taken, or -1.

        `first_offset` is the queue offset of the first of `units`. At most one index more than
        there is room for is consumed; it says where the reader continues.
        """
        # Joining the chosen units allows one call of `take_all` for all of them.
        chosen = list(islice(indices, self.messages_left + 1))
        begins = [index * UNIT_BYTES for index in chosen]
        chosen_units = b"".join([units[begin : begin + UNIT_BYTES] for begin in begins])
        chosen_offsets = [first_offset + index for index in chosen]
        return self.take_selected(chosen_units, chosen_offsets)

    def take_selected(self, units: Units, offsets: Sequence[int]) -> int:
        """Take units of matches. Return the offset of the first one not taken, or -1. HOT.

        `offsets` are the queue offsets of the units, in ascending order. Skipped ones count as
        taken. Sets `last_offset`. With a span limit, the reader can hold messages of a limited
        range of offsets: matches beyond it are not taken, `held_from` is set to the first match
        that it will hold, and `is_out_of_reach` if a reader that `is_patient` gets no message for
        this reason.
        """
        count = min(len(offsets), self.messages_left)  # how many of the units are taken
        if self.span_limit is not None and count:
            count = self._apply_span_limit(self.span_limit, offsets, count)
        if count < len(offsets):
            processed = self.take_all(units[: count * UNIT_BYTES], offsets[:count])
        else:
            processed = self.take_all(units, offsets)
        if processed:
            self.last_offset = offsets[processed - 1]
        return offsets[processed] if processed < len(offsets) else -1

    def _apply_span_limit(self, limit: SpanLimit, offsets: Sequence[int], count: int) -> int:
        """Return how many of the first `count` matches the reader can hold. HOT.

        The reader holds matches from `held_from` on, within `limit.span_max` offsets. `offsets` are
        the queue offsets of the matches. Sets `held_from` and `is_out_of_reach`.
        """
        first_offset = offsets[0]
        held_from = self.held_from
        # A match beyond the span is withheld from a patient reader only. Any other reader either
        # holds nothing any more, or does not limit its span as Java's client does.
        is_beyond = held_from >= 0 and first_offset - held_from > limit.span_max and not self.count
        self.is_out_of_reach = is_beyond and limit.is_patient
        if self.is_out_of_reach:
            return 0
        if held_from < 0 or is_beyond:
            self.held_from = held_from = first_offset
        last_allowed = held_from + limit.span_max
        if offsets[count - 1] <= last_allowed:
            return count
        return bisect_right(offsets, last_allowed, 0, count)

    def _switch_to_file_of(self, position: int, size: int) -> bool:
        """Use the log file that contains the record of `size` bytes at `position` from now on.

        Returns False, and sets `is_missing`, if no file contains the whole record.
        """
        segment = self.log.segments.at(position)
        end = 0 if segment is None else segment.base + segment.size
        if segment is None or position + size > end:
            self.is_missing = True
            return False
        self._view = segment.view()
        self._base = segment.base
        self._limit = end
        return True

    def close(self) -> None:
        """Add the unfinished run of adjacent records to `data`."""
        if self._run_start >= 0:
            # A run never crosses files, because a blank record ends each file.
            start = self._run_start - self._base
            end = self._run_end - self._base
            self.data.append(self._view[start:end])
            self._run_start = self._run_end = -1
