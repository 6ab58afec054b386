"""Reading visible messages: by queue offset with a filter, by store time, by position in the log.

`read` examines units from an offset on, lets a filter choose, and returns slices of the mapped log.
No message is copied or decoded, and adjacent records form one slice. A filter has two stages
(`model.subscription.MessageFilter`):

    tag codes    if the filter is a set of tag codes, whole chunks of units are compared at once
                 (`bulk.find_tag_codes`), in growing chunks; else `by_consume_queue` is called for
                 each unit
    properties   if the filter reads properties, those of each remaining record are decoded, or
                 looked up in columns

One call examines at most `scan_max` units (2,000 if it reads records), and runs for a few
milliseconds, so that no reader occupies the event loop. A filter that takes longer is evaluated in
another thread (`PostponedWork`). The next offset of a result is behind everything that was
examined, and never behind a match that was not delivered.

The limits of an ordinary pull are RocketMQ's (spec/store.md §10): 32 messages or 256 KiB of records
that are probably in memory (the newest 40 % of RAM), 8 messages or 64 KiB of records that must come
from the disk. A SluiceMQ client gets up to 256 messages (`sluicePullCountMax`) from memory, in the
same 256 KiB, because each pull costs a round trip. Every other client gets at most RocketMQ's
number, however many messages it requests. A filtered pull also returns no more matches than the
reader can hold (`gather.SpanLimit`), counted from the first match that the reader has not consumed:
a pull names the offset up to which everything is consumed.
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
"""A pull with a filter on tags examines at most this many units."""
PROPERTY_SCAN_MAX: Final = 2000
"""A read that decodes the properties of each record examines at most this many units."""
COLUMN_UNITS_MIN: Final = 256
"""If a filter has to examine this many messages or more, a read waits until columns can be used."""
FIRST_CHUNK_UNITS: Final = 8
"""Number of records that are examined before the clock is read for the first time.

Each further chunk has twice as many, up to `_CHUNK_UNITS_MAX`.
"""
_CHUNK_UNITS_MAX: Final = 256
DAMAGED_RUN_MAX: Final = 256
"""A search by time skips at most this many damaged messages in a row."""
EXTENSION_ADDRESS_MAX: Final = -(1 << 31) - 1
"""Tag codes up to this value are addresses in a ConsumeQueueExt file (spec/store.md §3.2)."""
_unpack_units: Final = UNIT.iter_unpack
_unpack_record: Final = RECORD_HEAD.struct_of("size", "queue_offset").unpack_from
_FLAGS: Final = RECORD_HEAD.struct_of("sys_flag")
_TIMES: Final = {bits: head.struct_of("store_time") for bits, head in RECORD_HEADS.items()}


class ReadStatus(enum.Enum):
    """How a read ended. The broker derives its response codes from this."""

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
    """The result of a read.

    `data` are slices of the log that contain whole records in order; adjacent records are one
    slice. `count` is the number of messages in them and `size_bytes` their size. `units_scanned` is
    the number of units that were examined. The queue has the messages from `offset_min` to before
    `offset_max`, and the next read continues at `next_offset`.

    If `postponed` is set, no unit was examined: run the work, then read again.

    With a span limit, the reader will hold the matches from offset `held_from` on, over a range of
    `span` offsets; `held_from` is -1 if no match is known. `is_out_of_reach` means that there is a
    match at `next_offset` which the reader must request again later. `is_filter_reliable` is true
    only if the filter was evaluated over columns and no evaluation failed.
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
        """Yield (queue offset, record) for each record of `data`, in order. HOT.

        The record is a view of all its bytes.
        """
        for piece in self.data:
            start = 0
            while start < len(piece):
                size, offset = _unpack_record(piece, start)
                yield offset, piece[start : start + size]
                start += size


class LogReader:
    """Reads the visible messages of a store: those before position `visible_end` of the log."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        config: StoreConfig,
        clock: Clock,
        columns: PropertyColumns,
    ) -> None:
        """Create a reader of a store. At first the whole log is visible.

        The store sets `visible_end` when that changes. `columns` evaluates filters on properties
        without reading each record.
        """
        self.log = log
        self._clock = clock
        self._filter_results = FilterResultCache()
        self._by_key = queues.by_key
        self.config = config
        rocketmq_max = config.max_transfer_count_memory
        self.memory_count_max = (rocketmq_max, max(rocketmq_max, config.pull_count_max))
        """Most messages of a pull from memory: for RocketMQ's clients, and for SluiceMQ's."""
        self._memory_bytes = memory_bytes() * config.memory_ratio // 100
        self._has_extension = log.segments.files.exists(f"{config.root}/consumequeue_ext")
        self._tag_hits: TagHits | None = None
        self.visible_end = log.written_offset
        self.soundness = RecordVerifier(log, queues, config.delay_levels_ms)
        """Checks records before they are given to readers."""
        self.columns: PropertyColumns | None = columns

    @property
    def is_all_near(self) -> bool:
        """Whether the whole log is probably in memory."""
        return self.visible_end - self.log.segments.start <= self._memory_bytes

    @property
    def tag_hits(self) -> "TagHits":
        """The cache of units (queue entries) whose tag a filter accepts. HOT."""
        if self._tag_hits is None:
            from sluicemq.store import bulk  # noqa: PLC0415 - imports NumPy

            self._tag_hits = bulk.TagHits()
        return self._tag_hits

    def clear_caches(self) -> None:
        """Clear cached filter results, by records and by tags.

        Call this when the log was truncated below `visible_end`: its positions and offsets get
        other messages.
        """
        self._filter_results = FilterResultCache()
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
        """Read messages of a queue from `offset` on that the filter accepts.

        `message_filter` None accepts all messages. If `bytes_max` is None, the read is an ordinary
        pull: RocketMQ's rules limit it in addition to `count_max`. Otherwise it is a bulk read,
        limited only by `count_max` and `bytes_max`. The first message is always returned, even if
        it is too large. If `offset` is not in the queue, or its record is deleted, nothing is read;
        `status` of the result says so, and `next_offset` is where to continue.

        `scan_max` limits the units (queue entries) that a filter examines; None means the
        configured limit. `span_limit` says how many matches the reader of an ordinary pull can
        hold; None means RocketMQ's default. If `may_postpone`, a slow filter may be left to the
        caller (`ReadResult.postponed`). If `is_sluice_client`, an ordinary pull may return up to
        `pull_count_max` messages from memory.
        """
        queue = self._by_key.get((topic, queue_id))
        if queue is None:
            return ReadResult(ReadStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        offset_min = queue.offset_min
        offset_max = queue.visible_offset
        if not offset_min <= offset < offset_max:
            return _make_result_outside(offset, offset_min, offset_max)
        is_bulk = bytes_max is not None
        if bytes_max is None:
            config = self.config
            if self.is_all_near or self._is_near(queue, offset):
                count_max = min(count_max, self.memory_count_max[is_sluice_client])
                bytes_max = config.max_transfer_bytes_memory
            else:
                count_max = min(count_max, config.max_transfer_count_disk)
                bytes_max = config.max_transfer_bytes_disk

        # Take the records.
        gather = RecordCollector(self.log, self.soundness, queue, count_max, bytes_max, is_bulk)
        if message_filter is None:
            next_offset = gather.take_from(offset)
        else:
            gather.span_limit = None if is_bulk else span_limit or SpanLimit(offset)
            gather.may_postpone = may_postpone
            next_offset = self._read_filtered(queue, offset, gather, message_filter, scan_max)
        gather.close()

        status = ReadStatus.FOUND if gather.count else ReadStatus.NO_MATCHED_MESSAGE
        if not gather.count and gather.is_missing:
            return self._make_result_of_missing(queue, offset)
        is_nothing_read = not gather.count and next_offset == offset
        if gather.postponed is not None and is_nothing_read:
            return ReadResult(status, offset, offset_min, offset_max, postponed=gather.postponed)
        result = ReadResult(
            status,
            next_offset,
            offset_min=offset_min,
            offset_max=offset_max,
            data=gather.data,
            count=gather.count,
            size_bytes=gather.size_bytes,
            units_scanned=next_offset - offset,
            is_filter_reliable=gather.is_filter_reliable,
        )
        if gather.span_limit is not None:
            _set_span(result, gather)
        return result

    def _is_near(self, queue: Queue, offset: int) -> bool:
        """Return whether the record of a queue offset is probably in memory."""
        unit = queue.unit(offset)
        return unit is None or self.visible_end - unit.physical_offset <= self._memory_bytes

    def _make_result_of_missing(self, queue: Queue, offset: int) -> ReadResult:
        """Make the result of a read at an offset whose record retention has deleted.

        The queue still has the entry of `offset`, so its first offset is updated.
        """
        queue.update_offset_min(self.log.start)
        offset_min = queue.offset_min
        offset_max = queue.visible_offset
        if offset_min > offset:
            return ReadResult(ReadStatus.MESSAGE_WAS_REMOVING, offset_min, offset_min, offset_max)
        return ReadResult(ReadStatus.OFFSET_FOUND_NULL, offset, offset_min, offset_max)

    def _read_filtered(
        self,
        queue: Queue,
        offset: int,
        gather: RecordCollector,
        message_filter: MessageFilter,
        scan_max: int | None,
    ) -> int:
        """Collect the messages from `offset` on that match with `gather`. Return where to continue.

        At most `scan_max` units (queue entries) are examined; None means the configured limit. If
        the first message that the reader holds and has not consumed is a match, sets
        `gather.held_from` to it.
        """
        units_max = self.config.filter_scan_units_max if scan_max is None else scan_max
        end = min(queue.visible_offset, offset + units_max)
        consumed = -1 if gather.span_limit is None else gather.span_limit.consumed
        if not queue.offset_min <= consumed < offset:
            consumed = -1  # the reader holds no message that it has not consumed
        codes = self.tag_codes_only(message_filter)
        if codes is None:
            return self._read_by_properties(queue, offset, end, gather, message_filter, consumed)

        if consumed >= 0:
            unit = queue.unit(consumed)
            if unit is not None and unit.tag_code in codes:
                gather.held_from = consumed
        if scan_max is None:
            end = min(end, offset + TAG_SCAN_MAX)
        return self._read_tagged(queue, gather, codes, offset, end)

    def _read_by_properties(
        self,
        queue: Queue,
        offset: int,
        end: int,
        gather: RecordCollector,
        message_filter: MessageFilter,
        consumed: int,
    ) -> int:
        """Collect matches in [offset, end), by columns if possible, else by reading records.

        Returns where the next read continues. `consumed` is the first offset that the reader has
        not consumed, or -1 if it holds no message. If that message is a match, sets
        `gather.held_from` to it. If columns must be loaded first, or the filter takes long, sets
        `gather.postponed`.
        """
        select = self._make_record_selector(message_filter)
        weight = 0  # how long an evaluation of the filter takes, if it may be postponed
        if gather.may_postpone:
            weight = getattr(message_filter, "weight", 0)
        if weight > INLINE_WEIGHT_MAX and not self._has_extension:
            select = partial(
                self._filter_results.select, message_filter, properties_at=self._read_properties
            )
            consumed = -1
        scan = self.column_scan(queue, message_filter)
        if scan is not None:
            vectorised = message_filter.vectorised  # type: ignore[attr-defined] # see `column_scan`
            if consumed >= 0 and scan.is_match(vectorised, queue, consumed, select):
                gather.held_from = consumed
            return scan.collect_matches(vectorised, queue, gather, offset, end, select, weight)

        # Columns are off or not loaded. Load them first if they are worth it.
        columns = self.columns
        is_worth_loading = gather.may_postpone and end - offset >= COLUMN_UNITS_MIN
        if is_worth_loading and columns is not None and not columns.is_loaded:
            gather.postponed = PostponedWork(columns.warm_up, lambda _: None)
            return offset

        # Read the records.
        if consumed >= 0 and any(True for _ in select(queue.units(consumed, 1))):
            gather.held_from = consumed
        end = min(end, offset + PROPERTY_SCAN_MAX)
        return self._read_selected(queue, gather, select, offset, end)

    def _read_selected(
        self, queue: Queue, gather: RecordCollector, select: UnitSelector, offset: int, end: int
    ) -> int:
        """Take the units in [offset, end) that `select` chooses. Return where to continue.

        Ends after `READ_TIME_MAX_S`, but not before the first chunk of units (queue entries). Ends
        early if there is no room for a match, if the queue lacks units (sets `gather.is_missing`),
        or if `select` needs results that another thread must compute (sets `gather.postponed`).
        """
        position = offset
        units_max = FIRST_CHUNK_UNITS
        deadline_s = self._clock.monotonic_s() + READ_TIME_MAX_S
        while position < end:
            is_first_chunk = position == offset
            if not is_first_chunk and self._clock.monotonic_s() >= deadline_s:
                break
            units = queue.units(position, min(units_max, end - position))
            if not len(units):
                gather.is_missing = True
                break
            try:
                first_not_taken = gather.take_indices(units, position, select(units))
            except PostponedError as postponed:
                gather.postponed = postponed.work
                break
            if first_not_taken >= 0:
                return first_not_taken
            position += len(units) // UNIT_BYTES
            units_max = min(2 * units_max, _CHUNK_UNITS_MAX)
        return position

    def _read_tagged(
        self, queue: Queue, gather: RecordCollector, codes: frozenset[int], offset: int, end: int
    ) -> int:
        """Take the units in [offset, end) with one of these tag codes. HOT.

        A unit is a queue entry; its tag code is the hash of the message's tag. Returns where the
        next read continues. Ends early if there is no room for a match, or if the queue or the log
        lacks something (sets `gather.is_missing`).
        """
        from sluicemq.store import bulk  # noqa: PLC0415 - imports NumPy

        tag_hits = self.tag_hits
        position = offset
        chunk_units = bulk.CHUNK_UNITS_MIN
        while position < end:
            hits = tag_hits.at(queue, codes, position, end, chunk_units)
            if hits is None:
                gather.is_missing = True
                break
            # Take the matches in [position, stop), as many as have room. One more match says where
            # the reader continues.
            offsets = hits.offsets
            stop = min(hits.stop, end)
            low_index = bisect_left(offsets, position)
            high_index = min(low_index + gather.messages_left + 1, len(offsets))
            if stop < hits.stop:
                high_index = bisect_left(offsets, stop, low_index, high_index)
            units = hits.units[low_index * UNIT_BYTES : high_index * UNIT_BYTES]
            first_not_taken = gather.take_selected(units, offsets[low_index:high_index])
            if first_not_taken >= 0:
                return first_not_taken
            if gather.is_missing:
                break
            position = stop
            chunk_units = min(4 * chunk_units, bulk.CHUNK_UNITS_MAX)
        return position

    # --- filters

    def tag_codes_only(self, message_filter: MessageFilter) -> frozenset[int] | None:
        """Return the tag codes of a filter that consists of nothing else; None for other filters.

        Returns None for every filter if the store has ConsumeQueueExt files.
        """
        if message_filter.reads_properties or self._has_extension:
            return None
        return message_filter.tag_codes

    def column_scan(self, queue: Queue, message_filter: MessageFilter) -> "ColumnScan | None":
        """Return the scan that evaluates a filter over columns; None if records must be read.

        Records must be read if the filter reads no properties or has no form for columns, or if
        columns are off or not loaded. The call notes that the topic of the queue needs columns.
        """
        if self.columns is None or self._has_extension or not message_filter.reads_properties:
            return None
        if not hasattr(type(message_filter), "vectorised"):
            return None  # the instance's attribute is read only if needed: it compiles the filter
        return self.columns.scan_for(queue.topic)

    def cached_column_scan(self, message_filter: MessageFilter) -> "ColumnScan | None":
        """Return the scan that caches results of a filter, without loading or requesting columns.

        Return None if columns cannot evaluate the filter, or are not loaded.
        """
        if self.columns is None or self._has_extension:
            return None
        if not hasattr(type(message_filter), "vectorised"):
            return None
        return self.columns.scan

    def unit_selector(self, message_filter: MessageFilter) -> UnitSelector:
        """Return a function that returns the indices of the units that a filter accepts.

        The units are queue entries, joined. The function compares tag codes if that suffices;
        otherwise it reads records.
        """
        codes = self.tag_codes_only(message_filter)
        if codes is None:
            return self._make_record_selector(message_filter)
        from sluicemq.store import bulk  # noqa: PLC0415 - imports NumPy

        return lambda units: bulk.find_tag_codes(units, codes).tolist()

    def _make_record_selector(self, message_filter: MessageFilter) -> UnitSelector:
        """Return a function that yields the indices of the units that a filter accepts.

        The units are queue entries, joined, and are examined one by one. The function reads a
        record only if the filter reads properties, or if the unit has the address of an extension
        instead of its tag code.
        """
        by_consume_queue = message_filter.by_consume_queue
        by_commit_log = message_filter.by_commit_log
        reads_properties = message_filter.reads_properties

        def select_by_record(units: Units) -> Iterable[int]:
            for index, (position, size, code) in enumerate(_unpack_units(units)):
                if self._has_extension and code <= EXTENSION_ADDRESS_MAX:
                    tag = self._read_properties(position, size).get(TAGS, "")
                    code = tag_code(tag)  # noqa: PLW2901 - the code at the address
                if size == BLANK_SIZE or not by_consume_queue(code):
                    continue
                if not reads_properties or by_commit_log(self._read_properties(position, size)):
                    yield index

        return select_by_record

    def _read_properties(self, position: int, size: int) -> dict[str, str]:
        """Return the properties of the record at `position`; {} if the record is damaged."""
        record = self._get_valid_record(position, size)
        if record is None:
            return {}
        return decode_properties(record[properties_slice(record)])

    def _get_valid_record(self, position: int, size: int) -> memoryview | None:
        """Return the record at `position`; None if it is damaged. Damage is logged."""
        verifier = self.soundness
        if verifier.is_trusted(position) or verifier.is_valid(position, size, is_whole=True):
            return self.log.record_view(position, size)
        return None

    def is_in_memory(self, topic: str, queue_id: int, offset: int) -> bool:
        """Return whether the message at an offset is probably in the page cache.

        That is assumed of the newest part of the log, of `memory_ratio` percent of RAM. A message
        that does not exist counts as one at position 0.
        """
        units = self.units(topic, queue_id, offset, 1)
        position = 0
        if len(units):
            position = UNIT.unpack_from(units)[0]
        return self.visible_end - position <= self._memory_bytes

    # --- by time

    def offset_by_time(
        self, topic: str, queue_id: int, time_ms: int, boundary: Literal["lower", "upper"] = "lower"
    ) -> int:
        """Search a queue by the times at which its messages were stored (spec/delivery.md §6).

        - "lower": return the offset of the first message that was stored at `time_ms` or later, or
          the queue's end if there is none.
        - "upper": return the offset of the last message that was stored at `time_ms` or earlier, or
          0 if there is none.

        Messages that retention has deleted count as older than any time. So for a queue without
        messages, "lower" returns its end, and "upper" the offset before its end (at least 0). A
        damaged message counts as stored at the time of the next undamaged one. For a queue that
        does not exist, return 0.
        """
        queue = self._by_key.get((topic, queue_id))
        if queue is None:
            return 0
        offset_min = queue.offset_min
        offset_end = queue.visible_offset
        if boundary == "lower":
            return self._find_first_stored_from(queue, time_ms)
        if offset_min >= offset_end:
            return max(offset_end - 1, 0)
        # The last message that was stored at `time_ms` or earlier is before the first later one.
        first_later = self._find_first_stored_from(queue, time_ms + 1)
        return first_later - 1 if first_later > offset_min else 0

    def _find_first_stored_from(self, queue: Queue, time_ms: int) -> int:
        """Return the offset of the first message that was stored at `time_ms` or later.

        Return the queue's visible end if there is none. Damaged messages are skipped.
        """
        low = queue.offset_min
        high = queue.visible_offset
        if low >= high:
            return high
        while low < high:
            middle = (low + high) // 2
            readable = self._find_first_readable(queue, middle, high)
            if readable is not None and self._read_store_time_at(queue, readable) < time_ms:
                low = readable + 1
            else:
                high = middle
        return low

    def _find_first_readable(self, queue: Queue, offset: int, end: int) -> int | None:
        """Return the offset of the first message in [offset, end) that is not damaged.

        A message that retention has deleted is not damaged. Return None if the first
        `DAMAGED_RUN_MAX` messages are all damaged.
        """
        for candidate in range(offset, min(end, offset + DAMAGED_RUN_MAX)):
            unit = queue.unit(candidate)
            is_deleted = unit is None or (unit.is_used and unit.physical_offset < self.log.start)
            if is_deleted or self._read_store_time_at(queue, candidate) >= 0:
                return candidate
        return None

    def _read_store_time_at(self, queue: Queue, offset: int) -> int:
        """Return the store time in ms of a message; -1 if it is deleted or damaged."""
        unit = queue.unit(offset)
        if unit is None:
            return -1
        record = self._get_valid_record(unit.physical_offset, unit.size_bytes)
        if record is None:
            return -1
        # Where the time is depends on whether the hosts before it are IPv4 or IPv6 addresses.
        (sys_flag,) = _FLAGS.unpack_from(record)
        (store_time_ms,) = _TIMES[sys_flag & HOST_BITS].unpack_from(record)
        return int(store_time_ms)

    def store_time_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the store time in ms of a message; -1 if it is not visible, or damaged."""
        queue = self._by_key.get((topic, queue_id))
        if queue is None or not queue.offset_min <= offset < queue.visible_offset:
            return -1
        return self._read_store_time_at(queue, offset)

    def earliest_time_ms(self, topic: str | None = None, queue_id: int | None = None) -> int:
        """Return the store time in ms of the first message of a queue; -1 if there is none.

        Without `topic` or `queue_id`, return the store time of the first visible record of the log.
        """
        if topic is None or queue_id is None:
            start = self.log.start
            if self.visible_end <= start:
                return -1
            first_record = self.log.find_record(start, check_crc=False)
            return -1 if first_record is None else first_record.store_time_ms
        queue = self._by_key.get((topic, queue_id))
        if queue is None:
            return -1
        return self.store_time_ms(topic, queue_id, queue.offset_min)

    def latest_time_ms(self, topic: str | None = None, queue_id: int | None = None) -> int:
        """Return the store time in ms of the last visible message of a queue; -1 if there is none.

        Without `topic` or `queue_id`, return the latest store time in all queues.
        """
        if topic is None or queue_id is None:
            return max((self.latest_time_ms(*key) for key in list(self._by_key)), default=-1)
        queue = self._by_key.get((topic, queue_id))
        if queue is None:
            return -1
        return self.store_time_ms(topic, queue_id, queue.visible_offset - 1)

    # --- units and records without a filter

    def units(self, topic: str, queue_id: int, offset: int, count: int) -> Units:
        """Return up to `count` units (20-byte entries, joined) of a queue from `offset` on.

        Only visible messages are included. Returns fewer units where a file ends; call again with
        the next offset. Returns an empty sequence if the queue does not exist, or has no visible
        message at `offset`.
        """
        queue = self._by_key.get((topic, queue_id))
        if queue is None or not queue.offset_min <= offset < queue.visible_offset:
            return b""
        return queue.units(offset, min(count, queue.visible_offset - offset))

    def valid_units(self, topic: str, queue_id: int, offset: int, count: int) -> Units:
        """Return up to `count` visible units of a queue, each of which locates a valid record.

        Units are 20-byte entries of the queue, joined. A wrong unit is rebuilt from the log. A unit
        whose record is damaged is replaced by a blank unit.
        """
        units = self.units(topic, queue_id, offset, count)
        queue = self._by_key.get((topic, queue_id))
        if queue is None or not len(units):
            return units
        offsets = range(offset, offset + len(units) // UNIT_BYTES)
        return self.soundness.repair_or_blank(units, queue, offsets, is_whole=False)

    def view_at(self, physical_offset: int) -> memoryview | None:
        """Return a view from the position of a record to the end of its file, unchecked.

        Returns None if the visible part of the log does not contain the position.
        """
        if not self.log.start <= physical_offset < self.visible_end:
            return None
        segment = self.log.segments.at(physical_offset)
        if segment is None:
            return None
        return segment.view()[physical_offset - segment.base :]

    # --- by position in the log

    def scan(self, start: int) -> Iterator[LogRecord]:
        """Yield every visible record from `start` on, which must be the position of a record."""
        return self.log.scan(start, self.visible_end)

    def record_at(self, physical_offset: int) -> bytes | None:
        """Return the valid, visible record that begins at `physical_offset`; None without one."""
        if not self.log.start <= physical_offset < self.visible_end:
            return None
        record = self.log.find_record(physical_offset)
        if record is None:
            return None
        view = self.log.record_view(physical_offset, record.size_bytes)
        return None if view is None else bytes(view)


def _set_span(result: ReadResult, gather: RecordCollector) -> None:
    """Copy the fields about the messages that the reader will hold from `gather` to `result`."""
    result.held_from = gather.held_from
    if gather.count:
        result.span = gather.last_offset - gather.held_from
    result.is_out_of_reach = gather.is_out_of_reach


def _make_result_outside(offset: int, offset_min: int, offset_max: int) -> ReadResult:
    """Make the result of a read at an `offset` outside the queue (spec/store.md §10).

    The queue has the offsets [offset_min, offset_max). A reader before them continues at
    `offset_min`. A reader exactly at the end stays there. A reader farther behind continues at
    `offset_max`. For a queue that never had a message it continues at 0.
    """
    if offset_max == 0:
        return ReadResult(ReadStatus.NO_MESSAGE_IN_QUEUE, 0, offset_min, offset_max)
    if offset < offset_min:
        return ReadResult(ReadStatus.OFFSET_TOO_SMALL, offset_min, offset_min, offset_max)
    if offset == offset_max:
        return ReadResult(ReadStatus.OFFSET_OVERFLOW_ONE, offset, offset_min, offset_max)
    return ReadResult(ReadStatus.OFFSET_OVERFLOW_BADLY, offset_max, offset_min, offset_max)
