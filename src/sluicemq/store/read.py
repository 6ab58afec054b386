"""Reading what is visible: by queue offset with a filter, by time, by place in the log.

`read` looks at units from an offset on, lets a filter choose, and gives slices of the mapped log:
no message is copied or decoded, adjacent ones are one slice. The filter's two stages
(`model.subscription.MessageFilter`):

    a set of tag codes    whole chunks of units at once (`bulk.find_codes`), chunks growing
    else                  `by_consume_queue` for each unit
    then, if it reads     the properties of each candidate are cut out of its record and decoded
    properties

A call looks at `scan_max` units at most (2,000 when records are read for it) and for a few
milliseconds, so that no reader holds the loop; verdicts that take longer are left to a judgement
(`gather`). The next offset it returns is behind everything it has looked at, and never behind a
match that it did not deliver.

How much an ordinary pull gets is RocketMQ's rule (spec/store.md §10): 32 messages or 256 KiB
of what is likely in memory (the newest 40 % of RAM), 8 or 64 KiB of what has to come from the disk.
Only a SluiceMQ client gets up to 256 (`sluicePullCountMax`) from memory, in the same 256 KiB: each
pull costs a round trip, however little it brings. Every other client gets at most RocketMQ's count,
however many messages it asks for.
With a filter it is also no more than the reader can hold (`gather.Reach`), reckoned from the first
match it has not consumed: a pull names the offset up to which everything is consumed.
"""

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from sluicemq.clock import Clock
from sluicemq.config import StoreConfig
from sluicemq.files import memory_bytes
from sluicemq.model.ids import tag_code
from sluicemq.model.message import TAGS
from sluicemq.model.subscription import MessageFilter
from sluicemq.record.codec import decode_properties, properties_slice
from sluicemq.record.layout import HOST_BITS, RECORD_HEAD, RECORD_HEADS
from sluicemq.store.columns.columns import PropertyColumns
from sluicemq.store.gather import (
    INLINE_WEIGHT_MAX,
    READ_TIME_MAX_S,
    FilterResultCache,
    PostponedError,
    PostponedWork,
    RecordCollector,
    RecordVerifier,
    SpanLimit,
    UnitSelector,
)
from sluicemq.store.log import CommitLog, LogRecord
from sluicemq.store.queues import BLANK_SIZE, UNIT, UNIT_BYTES, ConsumeQueues, Queue, Units

if TYPE_CHECKING:
    from sluicemq.store.bulk import TagHits
    from sluicemq.store.columns.scan import ColumnScan

TAG_SCAN_MAX: Final = 1 << 17
PROPERTY_SCAN_MAX: Final = 2000
"""Units of a filtered read: long misses cost little, a property filter reads the log for each."""
WARMED_FOR: Final = 256
"""A filter on so many messages waits for what makes columns of them, rather than to read each."""
CHUNK_MIN: Final = 8
"""So many records are looked at before the first look at the clock, then twice as many."""
_CHUNK_UNITS: Final = 256
UNREADABLE_MAX: Final = 256
"""Damaged messages in a row over which a search by time looks for a message that can be read."""
EXTENSION_ADDRESS_MAX: Final = -(1 << 31) - 1
"""Tag codes up to this are addresses in a ConsumeQueueExt file (spec/store.md §3.2)."""
_unpack_units: Final = UNIT.iter_unpack
_unpack_record: Final = RECORD_HEAD.only("size", "queue_offset").unpack_from
_FLAGS: Final = RECORD_HEAD.only("sys_flag")
_TIMES: Final = {bits: head.only("store_time") for bits, head in RECORD_HEADS.items()}


class ReadStatus(enum.Enum):
    """How a read ended; the broker's answer codes follow from it."""

    FOUND = enum.auto()
    NO_MATCHED_MESSAGE = enum.auto()
    MESSAGE_WAS_REMOVING = enum.auto()
    OFFSET_FOUND_NULL = enum.auto()
    OFFSET_OVERFLOW_BADLY = enum.auto()
    OFFSET_OVERFLOW_ONE = enum.auto()
    OFFSET_TOO_SMALL = enum.auto()
    NO_MATCHED_LOGIC_QUEUE = enum.auto()
    NO_MESSAGE_IN_QUEUE = enum.auto()


@dataclass(slots=True)
class ReadResult:
    """What a read found.

    `data` are slices of the log, whole records in order, adjacent ones merged; `count` is the
    number of messages in them, `size_bytes` their size; `scanned` how many units were looked at.
    `judgement`: nothing was looked at, because something has to be found out first (`gather`).
    With a reach the messages from `held_from` on, `span` offsets apart, are what the reader holds
    then; `is_out_of_reach`: there is a match at `next_offset`, to be asked for once more.
    `is_sure`: no evaluation of the filter has failed on what was looked at.
    """

    status: ReadStatus
    next_offset: int
    offset_min: int
    offset_max: int
    data: list[memoryview] = field(default_factory=list)
    count: int = 0
    size_bytes: int = 0
    units_scanned: int = 0
    held_from: int = -1
    span: int = 0
    is_out_of_reach: bool = False
    is_filter_reliable: bool = False
    postponed: PostponedWork | None = None

    def records(self) -> Iterator[tuple[int, memoryview]]:
        """Each record of `data`, with its queue offset. HOT."""
        for piece in self.data:
            at = 0
            while at < len(piece):
                size, offset = _unpack_record(piece, at)
                yield offset, piece[at : at + size]
                at += size


class LogReader:
    """The reading half of a store, up to `visible_end` of the log.

    `columns`: what filters over properties are decided by, instead of reading each record.
    """

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        config: StoreConfig,
        clock: Clock,
        columns: PropertyColumns,
    ) -> None:
        self.log = log
        self._clock = clock
        self._judged = FilterResultCache()
        self._by_key = queues.by_key
        self.config = config
        few = config.max_transfer_count_memory
        self.memory_count_max = (few, max(few, config.pull_count_max))
        """Messages of an answer from memory, by `is_ours`: to RocketMQ's clients, to our own."""
        self._memory_bytes = memory_bytes() * config.memory_ratio // 100
        self._has_extension = log.segments.files.exists(f"{config.root}/consumequeue_ext")
        self._tag_hits: TagHits | None = None
        self.visible_end = log.written_offset
        self.soundness = RecordVerifier(log, queues, config.delay_levels_ms)
        self.columns: PropertyColumns | None = columns

    @property
    def is_all_near(self) -> bool:
        """Is all of the log likely in memory?"""
        return self.visible_end - self.log.segments.start <= self._memory_bytes

    @property
    def tag_hits(self) -> "TagHits":
        """Units by their tag codes. HOT."""
        if self._tag_hits is None:
            from sluicemq.store import bulk  # noqa: PLC0415 - NumPy only when somebody filters

            self._tag_hits = bulk.TagHits()
        return self._tag_hits

    def clear_caches(self) -> None:
        """The log was cut below what readers have seen."""
        self._judged = FilterResultCache()
        self._tag_hits = None

    # --- by queue offset

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        count_max: int,
        bytes_max: int | None = None,
        message_filter: MessageFilter | None = None,
        scan_max: int | None = None,
        span_limit: SpanLimit | None = None,
        *,
        may_postpone: bool = False,
        is_sluice_client: bool = False,
    ) -> ReadResult:
        """Messages of a queue from `offset` on that the filter lets through.

        `bytes_max` None is an ordinary pull, limited by RocketMQ's rule on top of `count_max`; a
        number is a bulk read, limited by what the caller says. The first message always passes.
        `reach` is what the reader of an ordinary pull can hold: RocketMQ's default without it.
        `may_postpone`: verdicts that take long may be left to a judgement. `is_ours`: an ordinary
        pull of a SluiceMQ client may take up to `pull_count_max` messages from memory.
        """
        queue = self._by_key.get((topic, queue_id))
        if queue is None:
            return ReadResult(ReadStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        low, high = queue.offset_min, queue.visible_offset
        if not low <= offset < high:
            return _outside(offset, low, high)
        is_bulk = bytes_max is not None
        if bytes_max is None:
            config, end, memory = self.config, self.visible_end, self._memory_bytes
            # Usually all of it is near: no look-up then.
            unit = None if self.is_all_near else queue.unit(offset)
            if unit is None or end - unit.physical_offset <= memory:
                count_max = min(count_max, self.memory_count_max[is_sluice_client])
                bytes_max = config.max_transfer_bytes_memory
            else:
                count_max = min(count_max, config.max_transfer_count_disk)
                bytes_max = config.max_transfer_bytes_disk
        gather = RecordCollector(self.log, self.soundness, queue, count_max, bytes_max, is_bulk)
        if message_filter is None:
            next_offset = gather.take_from(offset)
        else:
            gather.span_limit = None if is_bulk else span_limit or SpanLimit(offset)
            gather.may_postpone = may_postpone
            next_offset = self._read_some(queue, offset, gather, message_filter, scan_max)
        gather.close()
        status = ReadStatus.FOUND if gather.count else ReadStatus.NO_MATCHED_MESSAGE
        if not gather.count and gather.is_missing:
            # The unit is there and its record is not: it was deleted with the log's first files.
            queue.update_offset_min(self.log.start)
            low, high = queue.offset_min, queue.visible_offset
            if low > offset:
                return ReadResult(ReadStatus.MESSAGE_WAS_REMOVING, low, low, high)
            return ReadResult(ReadStatus.OFFSET_FOUND_NULL, offset, low, high)
        if gather.postponed is not None and not gather.count and next_offset == offset:
            found = ReadResult(status, offset, low, high)
            found.postponed = gather.postponed
            return found
        found = ReadResult(
            status, next_offset, low, high, gather.data, gather.count, gather.size_bytes,
            next_offset - offset,
        )  # fmt: skip
        found.is_filter_reliable = gather.is_filter_reliable
        if gather.span_limit is not None:
            found.held_from = gather.held_from
            found.span = gather.last_offset - gather.held_from if gather.count else 0
            found.is_out_of_reach = gather.is_out_of_reach
        return found

    def _read_some(
        self,
        queue: Queue,
        offset: int,
        gather: RecordCollector,
        message_filter: MessageFilter,
        scan_max: int | None,
    ) -> int:
        """The next offset."""
        limit = self.config.filter_scan_units_max if scan_max is None else scan_max
        end = min(queue.visible_offset, offset + limit)
        consumed = -1 if gather.span_limit is None else gather.span_limit.consumed
        if not queue.offset_min <= consumed < offset:
            consumed = -1  # nothing that the reader may have still
        codes = self.tag_codes_only(message_filter)
        if codes is not None:
            if consumed >= 0:
                unit = queue.unit(consumed)
                if unit is not None and unit.tag_code in codes:
                    gather.held_from = consumed
            if scan_max is None:
                end = min(end, offset + TAG_SCAN_MAX)
            return self._read_tagged(queue, gather, codes, offset, end)
        return self._read_by_properties(queue, offset, end, gather, message_filter, consumed)

    def _read_by_properties(
        self,
        queue: Queue,
        offset: int,
        end: int,
        gather: RecordCollector,
        message_filter: MessageFilter,
        consumed: int,
    ) -> int:
        """By columns where they can be had, else by the records; returns where to go on."""
        select = self._slow_selection(message_filter)
        weight = getattr(message_filter, "weight", 0) if gather.may_postpone else 0
        if weight > INLINE_WEIGHT_MAX and not self._has_extension:
            select = partial(self._judged.select, message_filter, properties_at=self._properties)
            consumed = -1
        scan = self.column_scan(queue, message_filter)
        if scan is None:
            columns = self.columns
            is_many = gather.may_postpone and end - offset >= WARMED_FOR
            if is_many and columns is not None and not columns.is_warm:
                gather.postponed = PostponedWork(columns.warm_up, lambda _: None)
                return offset
            if consumed >= 0 and any(True for _ in select(queue.units(consumed, 1))):
                gather.held_from = consumed
            end = min(end, offset + PROPERTY_SCAN_MAX)
            return self._read_selected(queue, gather, select, offset, end)
        vectorised = message_filter.vectorised  # type: ignore[attr-defined] # `column_scan` looked
        if consumed >= 0 and scan.holds(vectorised, queue, consumed, select):
            gather.held_from = consumed
        return scan.run(vectorised, queue, gather, offset, end, select, weight)

    def _read_selected(
        self, queue: Queue, gather: RecordCollector, select: UnitSelector, offset: int, end: int
    ) -> int:
        """Take what is selected by the records; returns where to go on."""
        position, chunk = offset, CHUNK_MIN
        deadline_s = self._clock.monotonic_s() + READ_TIME_MAX_S
        while position < end and (position == offset or self._clock.monotonic_s() < deadline_s):
            units = queue.units(position, min(chunk, end - position))
            if not len(units):
                gather.is_missing = True
                break
            try:
                left = gather.take_indices(units, position, select(units))
            except PostponedError as postponed:
                gather.postponed = postponed.work
                break
            if left >= 0:
                return left
            position += len(units) // UNIT_BYTES
            chunk = min(2 * chunk, _CHUNK_UNITS)
        return position

    def _read_tagged(
        self, queue: Queue, gather: RecordCollector, codes: frozenset[int], offset: int, end: int
    ) -> int:
        """Take what has one of the codes; returns where to go on. HOT."""
        from sluicemq.store import bulk  # noqa: PLC0415 - NumPy only when somebody filters

        tag_hits = self.tag_hits
        position, chunk = offset, bulk.CHUNK_UNITS_MIN
        while position < end:
            hits = tag_hits.at(queue, codes, position, end, chunk)
            if hits is None:
                gather.is_missing = True
                break
            offsets, stop = hits.offsets, min(hits.stop, end)
            low = bisect_left(offsets, position)
            high = min(low + gather.room + 1, len(offsets))
            if stop < hits.stop:
                high = bisect_left(offsets, stop, low, high)
            units = hits.units[low * UNIT_BYTES : high * UNIT_BYTES]
            left = gather.take_selected(units, offsets[low:high])
            if left >= 0:
                return left
            if gather.is_missing:
                break
            position = stop
            chunk = min(4 * chunk, bulk.CHUNK_UNITS_MAX)
        return position

    # --- filters

    def tag_codes_only(self, message_filter: MessageFilter) -> frozenset[int] | None:
        """The codes, where they say everything."""
        if message_filter.reads_properties or self._has_extension:
            return None
        return message_filter.tag_codes

    def column_scan(self, queue: Queue, message_filter: MessageFilter) -> "ColumnScan | None":
        """How to read by columns; None where that cannot be."""
        if self.columns is None or self._has_extension or not message_filter.reads_properties:
            return None
        if not hasattr(type(message_filter), "vectorised"):
            return None  # the instance's is asked only with columns: it may have to be compiled
        return self.columns.ready_for(queue.topic)

    def cached_column_scan(self, message_filter: MessageFilter) -> "ColumnScan | None":
        """Where verdicts of a filter by columns are found again; None where there are none."""
        has_columns = hasattr(type(message_filter), "vectorised") and not self._has_extension
        return self.columns.scan if has_columns and self.columns is not None else None

    def unit_selector(self, message_filter: MessageFilter) -> UnitSelector:
        """How a filter chooses among units: by their codes, or by the records."""
        codes = self.tag_codes_only(message_filter)
        if codes is None:
            return self._slow_selection(message_filter)
        from sluicemq.store import bulk  # noqa: PLC0415 - NumPy only when somebody filters

        return lambda units: bulk.find_tag_codes(units, codes).tolist()

    def _slow_selection(self, message_filter: MessageFilter) -> UnitSelector:
        by_consume_queue = message_filter.by_consume_queue
        by_commit_log = message_filter.by_commit_log
        reads_properties = message_filter.reads_properties

        def by_record(units: Units) -> Iterable[int]:
            for index, (position, size, code) in enumerate(_unpack_units(units)):
                if self._has_extension and code <= EXTENSION_ADDRESS_MAX:
                    code = tag_code(self._properties(position, size).get(TAGS, ""))  # noqa: PLW2901
                if size == BLANK_SIZE or not by_consume_queue(code):
                    continue
                if not reads_properties or by_commit_log(self._properties(position, size)):
                    yield index

        return by_record

    def _properties(self, position: int, size: int) -> dict[str, str]:
        record = self._sound_record(position, size)
        return {} if record is None else decode_properties(record[properties_slice(record)])

    def _sound_record(self, position: int, size: int) -> memoryview | None:
        sound = self.soundness
        if sound.is_trusted(position) or sound.is_valid(position, size, is_whole=True):
            return self.log.record_view(position, size)
        return None

    def is_in_memory(self, topic: str, queue_id: int, offset: int) -> bool:
        """Is the message likely in memory?"""
        units = self.units(topic, queue_id, offset, 1)
        position: int = UNIT.unpack_from(units)[0] if len(units) else 0
        return self.visible_end - position <= self._memory_bytes

    # --- by time

    def offset_by_time(
        self, topic: str, queue_id: int, time_ms: int, boundary: Literal["lower", "upper"] = "lower"
    ) -> int:
        """Search a queue by the times at which its messages were stored (spec/delivery.md §6).

        Return the offset of the first message stored at `time_ms` or later, or the queue's end if
        there is none (`lower`); or the offset of the last message stored at `time_ms` or earlier,
        or 0 if there is none (`upper`). Messages that retention has deleted count as older than
        any time, so the answers for a queue without messages are its end and the offset before it.
        Messages that cannot be read count as stored with the next one that can. Return 0 for a
        queue that does not exist.
        """
        queue = self._by_key.get((topic, queue_id))
        if queue is None:
            return 0
        begin, end = queue.offset_min, queue.visible_offset
        if begin >= end:
            return end if boundary == "lower" else max(end - 1, 0)
        limit = time_ms if boundary == "lower" else time_ms + 1
        low, high = begin, end
        while low < high:
            middle = (low + high) // 2
            found = self._first_readable(queue, middle, high)
            if found is not None and self._time_at(queue, found) < limit:
                low = found + 1
            else:
                high = middle
        if boundary == "lower":
            return low
        return low - 1 if low > begin else 0

    def _first_readable(self, queue: Queue, offset: int, end: int) -> int | None:
        """Return the offset of the first message from `offset` to before `end` that is not damaged.
        A deleted message is not damaged: it is known to be old. Return None if there is none, or
        none within UNREADABLE_MAX messages."""
        for at in range(offset, min(end, offset + UNREADABLE_MAX)):
            unit = queue.unit(at)
            is_deleted = unit is None or (unit.is_used and unit.physical_offset < self.log.start)
            if is_deleted or self._time_at(queue, at) >= 0:
                return at
        return None

    def _time_at(self, queue: Queue, offset: int) -> int:
        """Of a message that is not there: -1, as if it were old."""
        unit = queue.unit(offset)
        record = None if unit is None else self._sound_record(*unit[:2])
        if record is None:
            return -1
        time: int = _TIMES[_FLAGS.unpack_from(record)[0] & HOST_BITS].unpack_from(record)[0]
        return time

    def store_time_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """When the message was stored (ms since 1970); -1 when there is no such message."""
        queue = self._by_key.get((topic, queue_id))
        if queue is None or not queue.offset_min <= offset < queue.visible_offset:
            return -1
        return self._time_at(queue, offset)

    def earliest_time_ms(self, topic: str | None = None, queue_id: int | None = None) -> int:
        """The store time of the first message of a queue, or of the whole log; -1 without one."""
        if topic is None or queue_id is None:
            start = self.log.start
            first = (
                self.log.find_record(start, check_crc=False) if self.visible_end > start else None
            )
            return -1 if first is None else first.store_time_ms
        queue = self._by_key.get((topic, queue_id))
        return -1 if queue is None else self.store_time_ms(topic, queue_id, queue.offset_min)

    def latest_time_ms(self, topic: str | None = None, queue_id: int | None = None) -> int:
        """The store time of the last message of a queue, or of all queues; -1 without one."""
        if topic is None or queue_id is None:
            return max((self.latest_time_ms(*key) for key in list(self._by_key)), default=-1)
        queue = self._by_key.get((topic, queue_id))
        if queue is None:
            return -1
        return self.store_time_ms(topic, queue_id, queue.visible_offset - 1)

    # --- for the broker's own queues

    def units(self, topic: str, queue_id: int, offset: int, count: int) -> Units:
        """Visible units of a queue from `offset` on as they are stored: at most `count`, empty when
        there is none. Fewer where a file ends."""
        queue = self._by_key.get((topic, queue_id))
        if queue is None or not queue.offset_min <= offset < queue.visible_offset:
            return b""
        return queue.units(offset, min(count, queue.visible_offset - offset))

    def valid_units(self, topic: str, queue_id: int, offset: int, count: int) -> Units:
        """As `units`, to go by them to the records: wrong ones are mended from the log, and blank
        where that is damaged."""
        units = self.units(topic, queue_id, offset, count)
        queue = self._by_key.get((topic, queue_id))
        if queue is None or not len(units):
            return units
        offsets = range(offset, offset + len(units) // UNIT_BYTES)
        return self.soundness.repair_or_blank(units, queue, offsets, is_whole=False)

    def view_at(self, physical_offset: int) -> memoryview | None:
        """The log from `physical_offset`, the place of a record by its unit, to its file's end,
        unchecked. None when the log does not hold it."""
        if not self.log.start <= physical_offset < self.visible_end:
            return None
        segment = self.log.segments.at(physical_offset)
        return None if segment is None else segment.view()[physical_offset - segment.base :]

    # --- by place

    def scan(self, start: int) -> Iterator[LogRecord]:
        """Every record from `start`, the place of one, on, as far as is visible now."""
        return self.log.scan(start, self.visible_end)

    def record_at(self, physical_offset: int) -> bytes | None:
        """The record that begins there, wholly checked; None when none does."""
        if not self.log.start <= physical_offset < self.visible_end:
            return None
        scanned = self.log.find_record(physical_offset)
        record = self.log.record_view(physical_offset, scanned.size_bytes) if scanned else None
        return None if record is None else bytes(record)


def _outside(offset: int, low: int, high: int) -> ReadResult:
    """The queue has no message at `offset` (spec/store.md §10)."""
    if high == 0:
        return ReadResult(ReadStatus.NO_MESSAGE_IN_QUEUE, 0, low, high)
    if offset < low:
        return ReadResult(ReadStatus.OFFSET_TOO_SMALL, low, low, high)
    if offset == high:
        return ReadResult(ReadStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
    return ReadResult(ReadStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
