"""The log of a slave: the master's bytes come in, and complete records are added to their queues.

    log    ======================|===========|~~~~
           visible, in queues    complete,    the beginning
                                 not yet      of a record
                                 confirmed
                                 ^            ^   ^
                                 records_end      end: the slave reports this position

`append` writes the bytes as they come, wherever the master cuts them. `dispatch` adds complete
records to their queues and makes them visible, up to the confirmed position: another master may
replace what is not confirmed. So `truncate`, which removes such a tail, removes nothing that a
reader has seen. If it has to remove more (in a store that was opened without its confirmed end),
caches of readers are cleared too. The writer refuses messages; to write again, close the store and
open it again.

A truncation is safe at each of its steps. First a checkpoint is written that is valid before and
after: the log up to the new end, with queues and index as they will be. Then the files of the log
are removed, last one first, then what is derived from them. A caller that keeps terms beside the
log truncates these afterwards.

A store whose messages must be on replicas before they are visible, be it a slave's or a master's,
hides what a start finds behind the confirmed end of the log (`HiddenMessages`).

An empty store accepts the first bytes at the beginning of any file, like a RocketMQ slave that
receives the last file only. `truncate(0)` empties a store.
"""

from bisect import bisect_left
from typing import Final, Protocol

from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.files import fix_of
from sluicemq.record.layout import BLANK, MAGIC_BLANK, MAGICS, RECORD_BYTES_MIN
from sluicemq.store.dispatch import Dispatcher, sweep_records
from sluicemq.store.index.index import KeyIndex
from sluicemq.store.log import BLANK_BYTES, CommitLog
from sluicemq.store.queues import ConsumeQueues, Queue
from sluicemq.store.segments import Segment
from sluicemq.store.writer import Writer

SWEEP_BYTES_MIN: Final = 64 << 10
"""At least this many bytes are dispatched in columns; fewer are faster record by record."""
IMMEDIATE_INDEX_BYTES_MIN: Final = 1 << 20
"""After at least this many bytes at once, keys are indexed immediately.

So a slave that catches up catches up with its key index too. Otherwise the index is updated
periodically, as on a master.
"""


class FollowedStore(Protocol):
    """The methods of the store that a follower uses."""

    keys: KeyIndex

    def confirm(self, end_offset: int) -> None:
        """Make held-back messages visible whose records end at `end_offset` or before."""

    def make_visible(self, end: int, queues: list[tuple[Queue, int]]) -> None:
        """Make everything before position `end` visible, in these queues up to these offsets."""

    def begin_log(self, position: int) -> None:
        """Empty the store, and let its log begin at `position`."""

    def cut_log(self, end: int) -> None:
        """Remove everything from position `end` on."""


class HiddenMessages:
    """The messages that a start has found behind the confirmed end of the log.

    Readers must not see them before replicas have them. They are hidden by the visible offsets of
    their queues.
    """

    def __init__(self, queues: ConsumeQueues) -> None:
        """Hide nothing of `queues` yet."""
        self._queues = queues
        self._end_by_queue: dict[Queue, int] = {}
        """The end offsets of the queues that have hidden messages."""

    def __len__(self) -> int:
        """Return the number of queues with hidden messages."""
        return len(self._end_by_queue)

    def hide(self, confirmed: int) -> int:
        """Hide the messages whose records end behind the position `confirmed` of the log.

        Lowers the visible offsets of their queues. Returns the end of the last record that stays
        visible; 0 if no record is visible.
        """
        visible_end = 0
        for queue in self._queues:
            visible_offset = queue.end_offset_before(confirmed)
            if visible_offset < queue.next_offset:
                self._end_by_queue[queue] = queue.next_offset
                queue.visible_offset = visible_offset
            if visible_offset > queue.offset_min:
                visible_end = max(visible_end, _find_record_end(queue, visible_offset - 1))
        return visible_end

    def reveal(self, confirmed: int) -> tuple[int, list[tuple[Queue, int]]]:
        """Return the hidden messages whose records end at position `confirmed` or before.

        They no longer count as hidden; the caller makes them visible. Returns (end, queues).
        `queues` contains each queue with such messages, and the offset behind the last one. `end`
        is the end of the last of their records in the log; 0 if there are none.
        """
        end = 0
        revealed: list[tuple[Queue, int]] = []
        for queue, hidden_end in list(self._end_by_queue.items()):
            visible_offset = _find_hidden_from(queue, hidden_end, confirmed)
            if visible_offset == hidden_end:
                del self._end_by_queue[queue]
            if visible_offset > queue.visible_offset:
                revealed.append((queue, visible_offset))
                end = max(end, _find_record_end(queue, visible_offset - 1))
        return end, revealed

    def drop_removed(self) -> None:
        """Forget the hidden messages that were removed from their queues."""
        for queue, hidden_end in list(self._end_by_queue.items()):
            self._end_by_queue[queue] = min(hidden_end, queue.next_offset)

    def clear(self) -> None:
        """Forget all hidden messages. Call this when the queues were emptied."""
        self._end_by_queue.clear()


def _find_hidden_from(queue: Queue, hidden_end: int, confirmed: int) -> int:
    """Return the first offset of a queue whose record ends behind position `confirmed`.

    The offsets from the queue's visible end to before `hidden_end` are searched. If there is none,
    return `hidden_end`. Blank units count as confirmed.
    """

    def is_hidden(offset: int) -> bool:
        unit = queue.unit(offset)
        return unit is None or (unit.end > confirmed and not unit.is_blank)

    hidden_offsets = range(queue.visible_offset, hidden_end)
    return queue.visible_offset + bisect_left(hidden_offsets, True, key=is_hidden)


def _find_record_end(queue: Queue, offset: int) -> int:
    """Return the position behind the record of a queue offset; 0 if it has no record."""
    unit = queue.unit(offset)
    if unit is None or unit.is_blank:
        return 0
    return unit.end


class LogFollower:
    """Receives the bytes that a master writes to the log of this store."""

    def __init__(
        self, store: FollowedStore, log: CommitLog, writer: Writer, dispatcher: Dispatcher
    ) -> None:
        """Create a receiver of a master's bytes, which continues at the end of `log`.

        `writer` is told when the log grows. `dispatcher` adds the records of `log` to the queues of
        `store`.
        """
        self._store = store
        self._log = log
        self._writer = writer
        self._dispatcher = dispatcher

    @property
    def end(self) -> int:
        """The position behind the last byte, or where an empty log will begin (0 if unknown)."""
        return self._log.written_offset

    @property
    def is_empty(self) -> bool:
        """Whether the log is empty, so that it may begin at any file."""
        return self._log.written_offset == self._log.start

    def append(self, position: int, log_bytes: bytes | bytearray | memoryview) -> None:
        """Write bytes of the master's log at `position`. No message becomes visible by that.

        `position` must be `end`. If the store is empty, it may be the begin of any file: then the
        log begins there. The bytes may begin and end within a record, and may span several files.
        They are not synced. Raises StoreError, or StoreFullError if there is no room; then the log
        has not grown.
        """
        log = self._log
        if position != log.written_offset:
            self._begin_log(position)
        pieces = _split_at_files(position, memoryview(log_bytes), log.segments.file_bytes)
        log.write(pieces, position + len(log_bytes))
        self._writer.continue_at_log_end()

    def _begin_log(self, position: int) -> None:
        """Let the empty log begin at `position`, which must be the begin of a file.

        Raises StoreError if the log is not empty, or if no file can begin there.
        """
        log = self._log
        if not self.is_empty or position % log.segments.file_bytes:
            raise StoreError(
                f"The master sends bytes from {position} on, but the log in"
                f" {log.segments.directory} ends at {log.written_offset}.",
                fix="The two logs differ. Truncate this one to where they diverge, or start"
                " with an empty directory.",
            )
        self._store.begin_log(position)

    def dispatch(self, confirmed: int | None = None) -> None:
        """Add complete records up to position `confirmed` to their queues, and make them visible.

        `confirmed` None means all records. Messages that were hidden at the start become visible
        too, up to this position. `followed_end` of the log becomes the end of the records. After
        many bytes at once, the key index is updated too.

        Raises StoreDamagedError where the master's bytes are not a record; the records before it
        are visible then. Raises StoreError if a queue cannot be written.
        """
        log = self._log
        stop = log.written_offset
        if confirmed is not None:
            stop = min(stop, confirmed)
        self._store.confirm(stop)
        start = log.records_end
        if stop <= start:
            return
        end = self._dispatch_records(start, stop)
        if end > start:
            self._publish(start, end)
        self._check_partial_record(end, stop)

    def _dispatch_records(self, start: int, stop: int) -> int:
        """Add the records in [start, stop) of the log to their queues. Return their end.

        If the rest of the file has no room for a record, or has a blank record, the end of the file
        is returned. Raises StoreError if a queue cannot be written.
        """
        log = self._log
        singles = 0 if stop - start >= SWEEP_BYTES_MIN else None
        try:
            end = self._dispatcher.dispatch_records(start, stop, may_gap=True, singles=singles)
            self._dispatcher.resolve_suspects(is_end=False)
        except OSError as error:
            raise StoreError(
                f"The queues in {log.segments.directory} cannot be written: {error}.",
                fix=fix_of(error),
            ) from error
        assert end is not None  # `may_gap` fills gaps
        segment = log.segments.at(end)
        if segment is None or segment.end > stop:
            return end
        is_file_full = segment.end - end < BLANK_BYTES
        return segment.end if is_file_full else log.skip_blank(end)

    def _publish(self, start: int, end: int) -> None:
        """Make the records in [start, end) of the log visible. They are in their queues already."""
        dispatcher = self._dispatcher
        self._log.followed_end = end
        if dispatcher.last_store_time_ms:
            self._writer.last_time_ms = dispatcher.last_store_time_ms
        grown_queues = [(queue, queue.next_offset) for queue in dispatcher.grown_queues]
        self._store.make_visible(end, grown_queues)
        dispatcher.grown_queues.clear()
        if end - start >= IMMEDIATE_INDEX_BYTES_MIN:
            self._store.keys.catch_up(2 * (end - start))

    def _check_partial_record(self, end: int, stop: int) -> None:
        """Raise StoreDamagedError unless the bytes in [end, stop) of the log begin a valid record.

        A blank record, and fewer bytes than BLANK_BYTES, are accepted. A complete record is an
        error, because it should have been dispatched.
        """
        segment = self._log.segments.at(end)
        if segment is None or stop - end < BLANK_BYTES:
            return
        bytes_left = segment.end - end
        size, magic = BLANK.struct.unpack_from(*segment.safe_view(end, BLANK_BYTES))
        is_record = magic in MAGICS and RECORD_BYTES_MIN <= size <= bytes_left
        is_partial_record = is_record and end + size > stop
        is_blank_record = magic == MAGIC_BLANK and size == bytes_left
        if not is_partial_record and not is_blank_record:
            location = f"{end} (byte {end - segment.base} of {segment.path})"
            raise StoreDamagedError(
                f"The master sent bytes for position {location} that are not a valid record:"
                f" {self._log.explain_bad_record(end)}.",
                fix="Check the master's store with `sluice store verify`, then start this broker"
                " with an empty directory.",
            )

    def truncate(self, end: int) -> None:
        """Remove everything from position `end` on, durably. Do nothing if the log ends before.

        Queues and indexes are cut there too. If `end` is at the log's start or before, the store
        becomes empty. If this raises StoreError, the log accepts no more bytes, and a restart
        finishes or undoes the truncation.
        """
        if end < self.end:
            self._dispatcher.reset()
            self._store.cut_log(end)
            self._writer.continue_at_log_end()


def _split_at_files(
    position: int, log_bytes: memoryview, file_bytes: int
) -> list[tuple[int, memoryview]]:
    """Split bytes of the log into (position, bytes) pieces, each within one file.

    `log_bytes` begin at `position`. Each file of the log has `file_bytes` bytes.
    """
    pieces = []
    while log_bytes:
        bytes_left_in_file = file_bytes - position % file_bytes
        piece = log_bytes[:bytes_left_in_file]
        pieces.append((position, piece))
        log_bytes = log_bytes[len(piece) :]
        position += len(piece)
    return pieces


def find_records_end(log: CommitLog, start: int, end: int) -> tuple[int, int]:
    """Return (records_end, store_time_ms) of the last record that ends at `end` or before.

    The log is read from `start` on, where a record must begin. `records_end` is the end of the last
    record, or of the blank record behind it. If there is no record, it is `start` (or the end of a
    blank record there), and the time is 0.
    """
    records_end = start
    store_time_ms = 0
    for records in sweep_records(log, start, end, check_crc=False):
        records_end = records.end
        store_time_ms = records.store_time_ms
    blank_end = log.skip_blank(records_end)
    if blank_end <= end:
        records_end = blank_end
    return records_end, store_time_ms


def remove_partial_record(log: CommitLog) -> None:
    """Remove an incomplete record from the end of a log that a master writes.

    The master sends that record again.
    """
    end = log.records_end
    for records in sweep_records(log, end, log.written_offset):
        end = records.end
    log.truncate(min(log.skip_blank(end), log.written_offset))


def locate_bytes(log: CommitLog, position: int, size_max: int) -> tuple[Segment | None, int, int]:
    """Return (segment, begin, stop): where bytes of the log from `position` on can be read.

    `segment` is the file that contains `position`, and [begin, stop) is the range in this file. It
    has at most `size_max` bytes, and ends where the log or the file ends. At the end of the log,
    return (None, 0, 0). Raises StoreError if the log does not contain the position.
    """
    segment = log.segments.at(position)
    end = log.written_offset
    if position == end or (segment is None and position == log.segments.end):
        return None, 0, 0
    if segment is None or position > end:
        raise StoreError(
            f"The log in {log.segments.directory} contains the positions {log.start} to {end},"
            f" not {position}.",
            fix="Delete the store of the replica that asked for this position, so that it"
            " copies the log from the beginning.",
        )
    begin = position - segment.base
    stop = min(begin + size_max, segment.size, end - segment.base)
    return segment, begin, stop
