"""A store whose log a master writes: bytes in, queues out.

    log    ======================|===========|~~~~
           visible, in queues    whole, not   the beginning
                                 confirmed    of a record
                                 ^            ^   ^
                                 records_end      end: what is reported

`append` takes the bytes as they come, wherever a master cuts them. `dispatch` puts whole records
into their queues up to what is confirmed, and shows them: what was not confirmed may be another
master's tomorrow. So `truncate`, which takes such a tail away, takes back nothing that a reader has
seen; and when it has to go further (a store that was opened without its confirmed end), readers go
with it. The writer is refused: who wants to write closes the store and opens it again.

A truncation is safe at each of its steps. First a mark says, durably, what is true before and
after: the log up to there, with the queues and the index as they are when they are cut. Then the
files of the log go, last one first, then what is derived. Who keeps epochs beside the log cuts them
after this.

An empty store takes the first bytes at the beginning of any file, as a slave of RocketMQ's that is
sent the last file only. `truncate(0)` makes a store empty.
"""

from typing import Final, Protocol

from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.files import fix_of
from sluicemq.record.layout import BLANK, MAGIC_BLANK, MAGICS, RECORD_BYTES_MIN
from sluicemq.store.dispatch import Dispatcher
from sluicemq.store.index.index import KeyIndex
from sluicemq.store.log import BLANK_BYTES, CommitLog
from sluicemq.store.queues import Queue
from sluicemq.store.writer import Writer

COLUMNS_BYTES_MIN: Final = 64 << 10
"""So much is dispatched many records at a time; less is faster one by one."""
INDEX_BYTES_MIN: Final = 1 << 20
"""After so much at a time the keys are indexed at once: a slave that catches up does with its index
too. Else that is done now and then, as a master's."""


class FollowedStore(Protocol):
    """What a follower needs of the store around it."""

    keys: KeyIndex

    def confirm(self, end_offset: int) -> None: ...

    def make_visible(self, end: int, queues: list[tuple[Queue, int]]) -> None: ...

    def begin_log(self, position: int) -> None: ...

    def cut_log(self, end: int) -> None: ...


class LogFollower:
    """The face of a store for whoever brings the master's bytes. See the module."""

    def __init__(
        self, store: FollowedStore, log: CommitLog, writer: Writer, dispatcher: Dispatcher
    ) -> None:
        self._store = store
        self._log = log
        self._writer = writer
        self._dispatcher = dispatcher

    @property
    def end(self) -> int:
        """Behind the last byte; 0 in an empty store, or where it is to begin."""
        return self._log.written_offset

    @property
    def is_empty(self) -> bool:
        """Whether the log may begin anywhere."""
        return self._log.written_offset == self._log.start

    def append(self, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes of the master's log. Nothing is visible by that.

        `position` has to be `end`, or the beginning of any file when the store is empty. Raises
        StoreError, and StoreFullError when there is no room; then nothing was written.
        """
        log = self._log
        file_bytes = log.segments.file_bytes
        if position != log.written_offset:
            if not self.is_empty or position % file_bytes:
                raise StoreError(
                    f"The master sends bytes from {position} on, the log in"
                    f" {log.segments.directory} ends at {log.written_offset}.",
                    fix="Its log and this one are not the same: truncate this one to where they"
                    " part, or begin with an empty directory.",
                )
            self._store.begin_log(position)
        view, end = memoryview(data), position + len(data)
        pieces = []
        while position < end:
            size = min(end - position, file_bytes - position % file_bytes)
            pieces.append((position, view[:size]))
            view, position = view[size:], position + size
        log.write(pieces, end)
        self._writer.continue_at_log_end()

    def dispatch(self, confirmed: int | None = None) -> None:
        """Put whole records, up to `confirmed` (None: all there are), into their queues, and show
        them.

        Raises StoreDamagedError where the master's bytes are no record, StoreError when a queue
        cannot be written; what was dispatched before stays.
        """
        log, dispatcher = self._log, self._dispatcher
        stop = log.written_offset if confirmed is None else min(confirmed, log.written_offset)
        self._store.confirm(stop)
        start = log.records_end
        if stop <= start:
            return
        singles = 0 if stop - start >= COLUMNS_BYTES_MIN else None
        try:
            end = dispatcher.dispatch_records(start, stop, may_gap=True, singles=singles)
            dispatcher.resolve_suspects(is_end=False)
        except OSError as error:
            raise StoreError(
                f"The queues in {log.segments.directory} cannot be written: {error}.",
                fix=fix_of(error),
            ) from error
        assert end is not None  # gaps are filled
        segment = log.segments.at(end)
        if segment is not None and segment.end <= stop:
            is_over = segment.end - end < BLANK_BYTES
            end = segment.end if is_over else log.skip_blank(end)
        if end > start:
            log.followed_end = end
            self._writer.last_time_ms = dispatcher.last_store_time_ms or self._writer.last_time_ms
            self._store.make_visible(
                end, [(queue, queue.next_offset) for queue in dispatcher.grown_queues]
            )
            dispatcher.grown_queues.clear()
            if end - start >= INDEX_BYTES_MIN:
                self._store.keys.catch_up(2 * (end - start))
        self._check_rest(end, stop)

    def _check_rest(self, end: int, stop: int) -> None:
        """What was not dispatched has to be the beginning of a record, or of a blank one."""
        segment = self._log.segments.at(end)
        if segment is None or stop - end < BLANK_BYTES:
            return
        room = segment.end - end
        size, magic = BLANK.struct.unpack_from(*segment.safe_view(end, BLANK_BYTES))
        is_record = magic in MAGICS and RECORD_BYTES_MIN <= size <= room
        is_begun = is_record and end + size > stop
        if not is_begun and not (magic == MAGIC_BLANK and size == room):
            place = f"{end} (byte {end - segment.base} of {segment.path})"
            raise StoreDamagedError(
                f"What the master sent for {place} is no record:"
                f" {self._log.explain_bad_record(end)}.",
                fix="Check the master's store with `sluice store verify`; then begin here with an"
                " empty directory.",
            )

    def truncate(self, end: int) -> None:
        """Forget everything from `end` on, durably; nothing when the log ends before.

        At the log's start or before it the store is empty then. Raises StoreError: the log then
        takes no more, and a restart finishes what was begun, or undoes it.
        """
        if end < self.end:
            self._dispatcher.reset()
            self._store.cut_log(end)
            self._writer.continue_at_log_end()
