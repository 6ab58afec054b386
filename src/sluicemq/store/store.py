"""The store: one face over log, queues, reading and recovery.

Two threads may use it. One (the broker's loop) does everything; any other may call `sync`, which
waits for the disk. A turn of the loop is: many `writer.append`, one `commit`, then the answers.

    ASYNC_FLUSH   `commit` makes the turn visible at once; `sync` runs on a timer
    SYNC_FLUSH    `commit` makes nothing visible; after `sync` returned an end, `publish(end)` does

So what a reader has seen under SYNC_FLUSH is on disk (design/0002). A
store that is opened `is_gated` waits for replicas in the same way: who knows how far they are calls
`confirm`, and what a start finds behind the confirmed end is hidden until then. `following` is for
a slave, whose log another broker writes (`follow`).

`tick` writes queue files and asks for checkpoints; the checkpoint itself waits for the disk and
therefore is made at the end of a `sync`. A mark says how log and queues were at one moment; the
units before that are written after it, a few queues a tick, and what else gets into the files
meanwhile does no harm: recovery cuts them back to the mark.
"""

import contextlib
import logging
import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.config import StoreConfig
from sluicemq.errors import SluiceError, StoreError, StoreTransientError
from sluicemq.files import FULL_ERRORS, SYSTEM_FILES, TRANSIENT_ERRORS, Files, fix_of
from sluicemq.files.incarnation import Incarnation
from sluicemq.outages import Outages, kind_of
from sluicemq.store.columns.columns import PropertyColumns
from sluicemq.store.directory import (
    DurableMark,
    Mark,
    cannot_open,
    check_directory,
    remove_abort,
    write_abort,
)
from sluicemq.store.dispatch import Dispatcher, sweep_records
from sluicemq.store.follow import Following
from sluicemq.store.identity import RecordSource
from sluicemq.store.index.file import is_index_name
from sluicemq.store.index.index import KeyIndex
from sluicemq.store.queues import UNIT, Queue, Unit, Units, expired_units
from sluicemq.store.read import LogReader
from sluicemq.store.recover import find_store
from sluicemq.store.retain import Retention
from sluicemq.store.segments import Segment, is_segment_name
from sluicemq.store.writer import Writer, warn_clock

logger = logging.getLogger(__name__)

PAGE_BYTES: Final = 4096
SYNC_EACH_MAX: Final = 256  # more files are synced with their whole file system at once
WALK_BYTES: Final = 64 << 20
"""A mark is due when the log is so much longer than at the last one: what a start after a crash
walks depends on this, not on how fast messages came."""
WALK_BYTES_A_FILE: Final = 32 << 10  # ... or for each file that the mark needs, which costs more
_QUEUE_WRITES: Final = "consume queue writes"
_NEXT_FILE: Final = "commit log preallocation"
_CHECKPOINT_WRITES: Final = "checkpoint writes"
FLUSH_EACH: Final = 128  # queues at a time, a millisecond: there may be tens of thousands
Visible = list[tuple[str, int, int]]
"""(topic, queue id, new maximum offset) of the queues that have something new to read."""


class _Turn(NamedTuple):
    """A committed turn that waits for its fsync."""

    end: int
    queues: list[tuple[Queue, int]]


class _CheckpointDue(NamedTuple):
    """What has to be synced before the mark may be written."""

    mark: Mark
    paths: list[str]


class Store:
    """A message store in a directory. Make one with `Store.open`.

    `writer` appends, `reader` reads what is visible, `keys` finds messages by their keys, `columns`
    holds message properties for filters, `retention` deletes. The broker decides when the last
    three work.
    """

    def __init__(
        self,
        config: StoreConfig,
        files: Files,
        clock: Clock,
        unlock: Callable[[], None],
        *,
        is_gated: bool = False,
        confirmed: int | None = None,
        incarnation: Incarnation | None = None,
    ) -> None:
        """Load and recover. The directory is locked."""
        self._config = config
        self._files = files
        self._clock = clock
        self._unlock = unlock
        self._is_closed = False
        self._outages = Outages(clock, logger)
        self._abort_path = f"{config.root}/abort"
        found = find_store(config, files)
        self._log, self._queues, checkpoint, after_crash, was_followed, recovery = found
        log, queues = self._log, self._queues
        recovery.load(after_crash=after_crash)
        write_abort(files, self._abort_path, is_followed=was_followed)
        self._durable = DurableMark(files, f"{config.root}/checkpoint", checkpoint)
        self.recovered = recovery.run(self._durable.distrust_queues)
        self.incarnation = incarnation or Incarnation(files, config.root)
        self.keys = KeyIndex(config, files, clock, log, self._durable, after_crash=after_crash)
        self.writer = Writer(
            log, queues, config, clock, self.recovered.store_time_ms, self.keys.known
        )
        self.columns = PropertyColumns(config, files, clock, log, queues)
        self.reader = LogReader(log, queues, config, clock, self.columns)
        self.retention = Retention(
            log, queues, config, files, clock, self._durable, lambda: self.reader.visible_end
        )
        self.on_visible: Callable[[Visible], None] | None = None
        self.keys.record_at = self.reader.record_at
        self.retention.on_start_moved += [self.keys.start_moved, self.columns.start_moved]
        self._waits = config.flush_sync or is_gated
        self._waiting: deque[_Turn] = deque()
        self._hidden: dict[Queue, int] = {}  # what was found behind `confirmed`: its queues' ends
        self._checkpoint_lock = threading.Lock()
        self._checkpoint_due: _CheckpointDue | None = None
        self._noted: tuple[tuple[int, ...], list[Queue]] | None = None
        """What the next mark says, and the queues that have to be written before."""
        self.is_flushing = False
        """Whether another `tick` would write more of them."""
        self._checkpoint_end = self._seen_end = self.recovered.end
        self._marked: tuple[int, ...] | None = None
        self._start_ms = clock.now_ms()
        self._sync_s = self._queues_flush_s = self._checkpoint_s = clock.monotonic_s()
        self._settle_recovery(after_crash=after_crash, was_followed=was_followed)
        self.incarnation.open(is_empty=log.written_offset <= log.start, is_synced=config.flush_sync)
        if confirmed is not None:
            self.hide(confirmed)

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        *,
        files: Files = SYSTEM_FILES,
        clock: Clock = SYSTEM_CLOCK,
        is_gated: bool = False,
        confirmed: int | None = None,
        incarnation: Incarnation | None = None,
    ) -> "Store":
        """Lock, load and recover the store below `config.root`, made when it is missing.

        `is_gated`: what is committed is visible when it is confirmed. Of what is found there,
        nothing behind the position `confirmed` of the log (None: its end) is visible before.
        `incarnation`: that of this directory, where the caller keeps it over several openings.
        Raises StoreLockedError when a living process has it, StoreDamagedError when files are not
        what they must be, StoreError when it cannot be written.
        """
        unlock: Callable[[], None] | None = None
        try:
            files.make_directory(config.root)
            check_directory(files, config)
            unlock = files.lock(f"{config.root}/lock")
            return cls(
                config, files, clock, unlock, is_gated=is_gated, confirmed=confirmed,
                incarnation=incarnation,
            )  # fmt: skip
        except (SluiceError, OSError) as error:
            if unlock is not None:
                unlock()
            if isinstance(error, OSError):
                raise cannot_open(config.root, error) from error
            raise

    def _settle_recovery(self, *, after_crash: bool, was_followed: bool) -> None:
        recovered, now_ms = self.recovered, self._clock.now_ms()
        if now_ms < recovered.store_time_ms:
            warn_clock(now_ms, recovered.store_time_ms)
        if after_crash or recovered.units_added or recovered.is_rebuilt:
            logger.info(
                "recovered %s: the log ends at %d, %d queue entries were added",
                self._config.root, recovered.end, recovered.units_added,
            )  # fmt: skip
            if not (was_followed or recovered.is_rebuilt or self.keys.has_news):
                self._checkpoint_s = -math.inf  # soon: until then a start does the same again
                return
        elif not self.keys.has_news:
            return
        self._checkpoint_now()
        if was_followed:  # what was written by others is safe now
            write_abort(self._files, self._abort_path)

    # --- turns

    def commit(self) -> int:
        """End the turn: everything appended is written; returns the end of the log.

        Under ASYNC_FLUSH it becomes visible. Raises StoreFullError or StoreError: then the turn
        never was, queue offsets included, and the next one may succeed.
        """
        writer = self.writer
        start = self._log.written_offset
        end = writer.commit()
        if end == start:
            return end
        queues = [(queue, queue.next_offset) for queue in writer.touched]
        self._queues.dirty.update(writer.touched)
        writer.touched.clear()
        if self._waits:
            self._waiting.append(_Turn(end, queues))
        else:
            self.show(end, queues)
        return end

    def sync(self) -> int:
        """Wait until everything that was committed when this began is on disk; returns its end.

        For another thread; several calls at once share the work. Makes the checkpoint when one is
        due. Raises StoreError when the disk fails: the store then takes no more writes.
        """
        end = self._log.sync()
        self.keys.flush_due()
        if self._checkpoint_due is not None:
            self._make_checkpoint()
        return end

    def publish(self, end_offset: int) -> None:
        """SYNC_FLUSH, and behind a gate: make the turns visible that end at `end_offset` or before,
        and what was found at the start as far as it goes."""
        if self._hidden:
            self._reveal(end_offset)
        waiting = self._waiting
        shown: dict[Queue, int] = {}
        end = 0
        while waiting and waiting[0].end <= end_offset:
            turn = waiting.popleft()
            shown.update(turn.queues)
            end = turn.end
        if end:
            self.show(end, list(shown.items()))

    confirm = publish
    """Its name for who asks replicas and not the disk."""

    def hide(self, confirmed: int) -> None:
        """Of what recovery found, show what ends at `confirmed` or before. Before anybody reads."""
        if confirmed >= self._log.written_offset:
            return
        end = self._log.start
        for queue in self._queues:
            shown = queue.end_before(confirmed)
            if shown < queue.next_offset:
                self._hidden[queue] = queue.next_offset
                queue.visible_offset = shown
            unit = queue.unit(shown - 1) if shown > queue.offset_min else None
            if unit is not None and not unit.is_blank:
                end = max(end, unit.end)
        self.reader.visible_end = end

    def _reveal(self, confirmed: int) -> None:
        """Show more of what was hidden."""
        end, shown = self.reader.visible_end, []
        for queue, limit in list(self._hidden.items()):
            low = queue.visible_offset

            def is_hidden(at: int, queue: Queue = queue) -> bool:
                unit = queue.unit(at)
                return unit is None or (unit.end > confirmed and not unit.is_blank)

            offset = low + bisect_left(range(low, limit), True, key=is_hidden)
            if offset == limit:
                del self._hidden[queue]
            if offset > low:
                unit = queue.unit(offset - 1)
                end = max(end, 0 if unit is None or unit.is_blank else unit.end)
                shown.append((queue, offset))
        if not self._hidden:
            end = max(end, min(confirmed, self.recovered.end, self._log.records_end))
        self.show(end, shown)

    def show(self, end: int, queues: list[tuple[Queue, int]]) -> None:
        """Everything before `end` is visible, of these queues up to an offset of theirs."""
        self.reader.visible_end = end
        for queue, offset in queues:
            queue.visible_offset = offset
        if self.on_visible is not None and queues:
            self.on_visible([(queue.topic, queue.queue_id, offset) for queue, offset in queues])

    # --- replicas

    def raw(self, position: int, size_max: int) -> memoryview:
        """The bytes of the log from `position` on, as far as they are written, within one file,
        without copying; none at its end. Raises StoreError for what was never there or is gone."""
        segment, at, stop = self._extent(position, size_max)
        return memoryview(b"") if segment is None else segment.view()[at:stop]

    def fetch(self, position: int, size_max: int) -> bytes:
        """The same by a read, which alone waits when the bytes have to come from the disk. In any
        thread. Raises StoreError and OSError."""
        segment, at, stop = self._extent(position, size_max)
        if segment is None:
            return b""
        with contextlib.closing(self._files.open(segment.path)) as file:  # others release theirs
            return file.pread(stop - at, at)

    @property
    def record_source(self) -> RecordSource:
        """The log as identities of derived files need it. Any thread may read it."""

        def read(position: int, size: int) -> bytes:
            with contextlib.suppress(StoreError):
                return self.fetch(position, size)
            return b""

        return RecordSource(self._log.start, read)

    def _extent(self, position: int, size_max: int) -> tuple[Segment | None, int, int]:
        """A file of the log, and where in it those bytes are."""
        log = self._log
        segment, end = log.segments.at(position), log.written_offset
        if position == end or (segment is None and position == log.segments.end):
            return None, 0, 0
        if segment is None or position > end:
            raise StoreError(
                f"The log in {log.segments.directory} has nothing at {position}: it goes from"
                f" {log.start} to {end}.",
                fix="A replica that is so far behind, or ahead, has to begin anew.",
            )
        at = position - segment.base
        return segment, at, min(at + size_max, segment.size, end - segment.base)

    def following(self) -> Following:
        """From now on a master writes the log: the writer is refused. Raises StoreError."""
        self.commit()
        log, config = self._log, self._config
        try:
            write_abort(self._files, self._abort_path, is_followed=True)
        except OSError as error:
            log.fail(error)
        log.followed_end = log.written_offset
        self.writer.is_following = True
        dispatcher = Dispatcher(
            log, self._queues, check_crc=config.check_crc_on_recover,
            delays_ms=config.delay_levels_ms,
        )  # fmt: skip
        return Following(self, log, self.writer, dispatcher)

    def begin_queue(self, topic: str, queue_id: int, offset: int, unit: bytes) -> None:
        """Let a queue whose messages have all expired go on behind `offset`, the place of `unit`.
        Nothing where it has as many already. Durable with the next mark."""
        queue = self._queues.get((topic, queue_id))
        if queue.next_offset <= offset:
            queue.put(offset, Unit._make(UNIT.unpack(unit)))
            queue.correct_min(self._log.start)
            self._queues.note(queue)
            self._checkpoint_s = -math.inf  # at once: no recovery would find it in the log

    def begin_log(self, position: int) -> None:
        """Let the empty log begin at a file's beginning. Raises StoreError."""
        log = self._log
        try:
            with self._checkpoint_lock:
                self._checkpoint_due = self._marked = None
                self._durable.remove()  # a mark would miss what lies before
                self._durable.index_time_ms = 0
                log.cut(log.start)
                log.add_file(position)
                log.set_end(position)
                log.followed_end = position
            for topic in {topic for topic, _ in self._queues.by_key}:
                self.columns.delete(topic)
            self.reader.forget()
            self._hidden.clear()
            self._queues.remove_all()
            self.keys.begin(position)
            self.show(position, [])
            self._checkpoint_now()
        except OSError as error:
            log.fail(error)

    def cut_log(self, end: int) -> None:
        """Forget what a master wrote from `end` on, durably. Raises StoreError."""
        log = self._log
        if end <= log.start:
            self.begin_log(0)
            return
        if end >= log.records_end:
            log.cut(end)  # no queue knows of it
            return
        try:
            self._checkpoint_now()
            last = self._queues.last_unit(end)
            start = log.start if last is None else max(last.physical_offset, log.start)
            records_end, time_ms = start, 0
            for found in sweep_records(log, start, end, check_crc=False):
                records_end, time_ms = found.end, found.store_time_ms
            if (skipped := log.skip_blank(records_end)) <= end:
                records_end = skipped
            with self._checkpoint_lock:
                state = records_end, *self._queues.totals(end), time_ms
                mark = Mark(0, *state, *self.keys.mark_before(records_end), log.start)
                self._durable.write(mark)
                log.cut(end)
                log.followed_end = records_end
            self.keys.cut(records_end)
            self.writer.last_time_ms = time_ms
            seen = {queue: queue.visible_offset for queue in self._queues}
            self._queues.truncate_log(end)
            self._queues.deleted.cut(end)
            for queue, offset in list(self._hidden.items()):
                self._hidden[queue] = min(offset, queue.next_offset)
            self.reader.visible_end = min(self.reader.visible_end, self._log.records_end)
            taken_back = {
                queue.topic for queue, offset in seen.items() if queue.visible_offset < offset
            }
            if taken_back:
                logger.warning(
                    "the log in %s is cut to %d, below what readers have seen",
                    self._config.root,
                    end,
                )
                self.reader.forget()
                for topic in taken_back:
                    self.columns.delete(topic)
            self._checkpoint_now()
        except OSError as error:
            log.fail(error)

    # --- periodic work

    def tick(self) -> bool:
        """Cheap work for a timer of the loop: queue files, the next log file, checkpoint requests.

        Returns whether a `sync` is due by the rules of ASYNC_FLUSH (spec/store.md §8).
        """
        now, config = self._clock.monotonic_s(), self._config
        self.keys.tick(self.writer.last_time_ms)
        end, self._seen_end = self._seen_end, self._log.records_end
        is_quiet = end == self._seen_end
        if (now - self._queues_flush_s) * 1000 >= config.consume_queue_flush_interval_ms:
            self._queues_flush_s = now
            if len(self._queues.dirty) <= SYNC_EACH_MAX:  # else those that are long are written
                bytes_min = config.consume_queue_flush_pages_min * PAGE_BYTES
                self._flush([q for q in self._queues.dirty if len(q.tail) >= bytes_min])
            self._prepare_next_file()
        files = len(self._queues.unsynced) + len(self._queues.dirty)
        interval_ms = config.flush_thorough_interval_ms
        if not is_quiet and (config.flush_sync or files > SYNC_EACH_MAX):
            # Under SYNC_FLUSH somebody waits for every sync, and many files take long: rarely.
            interval_ms = config.consume_queue_flush_thorough_interval_ms
        grown = self._log.records_end - self._checkpoint_end
        is_long = grown >= max(WALK_BYTES, files * WALK_BYTES_A_FILE)
        is_time = is_long or (now - self._checkpoint_s) * 1000 >= interval_ms
        if is_time and self._checkpoint_due is None and self._noted is None:
            self._checkpoint_s, self._checkpoint_end = now, self._log.records_end
            self._noted = self._state(), list(self._queues.dirty)
        self.is_flushing = False
        if self._noted is not None:
            state, queues = self._noted
            self.is_flushing = self._flush(queues, FLUSH_EACH) and bool(queues)
            if not queues:
                self._noted = None
                self._request_checkpoint(state)
        elapsed_ms = (now - self._sync_s) * 1000
        if elapsed_ms < config.flush_interval_ms:
            return False
        pending = self._log.written_offset - self._log.synced_offset
        is_thorough = elapsed_ms >= config.flush_thorough_interval_ms
        is_due = self._checkpoint_due is not None or (
            pending >= config.flush_pages_min * PAGE_BYTES or bool(pending and is_thorough)
        )
        if is_due:
            self._sync_s = now
        return is_due

    def _prepare_next_file(self) -> None:
        """Create the next file of the commit log ahead of time if the last one is nearly full.

        A failure is only logged: the append that needs the file creates it, or fails."""
        try:
            self._log.prepare_next()
        except OSError as error:
            text = "creating the next commit log file failed: %s"
            self._outages.report_failure(_NEXT_FILE, text, error, kind=kind_of(error))
        else:
            self._outages.report_success(_NEXT_FILE)

    def _flush(self, queues: list[Queue], count: int = 1 << 62) -> bool:
        """Write the last so many of these queues, and take them off the list. False: the disk
        refuses."""
        try:
            for _ in range(min(count, len(queues))):
                self._queues.flush(queues[-1])
                queues.pop()
        except OSError as error:  # nothing is lost: the units stay in memory for the next time
            text = "writing consume queues failed: %s"
            self._outages.report_failure(_QUEUE_WRITES, text, error, kind=kind_of(error))
            return False
        self._outages.report_success(_QUEUE_WRITES)
        return True

    # --- checkpoints

    def _state(self) -> tuple[int, ...]:
        """What a mark says, of now."""
        return (
            self._log.records_end, *self._queues.totals(), self.writer.last_time_ms,
            *self.keys.mark(), self._log.start,
        )  # fmt: skip

    def _request_checkpoint(self, state: tuple[int, ...]) -> None:
        """Note what the mark needs; `sync` makes it, since it waits."""
        if state == self._marked and not self._queues.unsynced and self.keys.is_synced:
            return
        self._marked = state
        paths = sorted(self._queues.unsynced) + self.keys.paths_to_sync()
        self._queues.unsynced.clear()
        self._checkpoint_due = _CheckpointDue(Mark(0, *state), paths)

    def _checkpoint_now(self) -> None:
        """A mark of the present end; waits for the disk. Raises OSError, StoreError."""
        for queue in list(self._queues.dirty):
            self._queues.flush(queue)
        self._make_checkpoint()  # one that was due
        self._noted = None
        self._request_checkpoint(self._state())
        self._make_checkpoint()

    def _make_checkpoint(self) -> None:
        with self._checkpoint_lock:
            due = self._checkpoint_due
            if due is None:
                return
            self._log.check()  # what failed to sync is never tried again
            try:
                if self._log.synced_offset < due.mark.log_offset:
                    self._log.sync()
                roots = (self._config.consume_queue_path, self._config.root)
                # Thousands of queues: a commit of the file system's journal each would take long.
                if len(due.paths) <= SYNC_EACH_MAX or not all(map(self._files.sync_all, roots)):
                    for path in due.paths:
                        self._sync_path(path)
                self._write_mark(due.mark)
            except OSError as error:
                if error.errno in TRANSIENT_ERRORS:  # it is still due
                    raise StoreTransientError(
                        f"The checkpoint in {self._config.root} cannot be made for the moment:"
                        f" {error}.",
                        fix=fix_of(error),
                    ) from error
                self._log.fail(error)
            self._checkpoint_due = None

    def _write_mark(self, mark: Mark) -> None:
        """Write a mark to the checkpoint; on a full disk the mark before stays in force, and
        another is made later. Raises OSError for any other error."""
        try:
            if mark.log_offset:  # from here on a missing log is a loss
                self.incarnation.note_log()
            self._durable.write(mark)
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
            self._marked = None
            text = "writing a new checkpoint failed: %s"
            self._outages.report_failure(_CHECKPOINT_WRITES, text, error, kind=kind_of(error))
        else:
            self._outages.report_success(_CHECKPOINT_WRITES)

    def _sync_path(self, path: str) -> None:
        if not self._files.exists(path):
            return  # its topic was deleted meanwhile
        name = path.rpartition("/")[2]
        if not is_segment_name(name) and not is_index_name(name):
            self._files.sync_directory(path)
            return
        gone = contextlib.suppress(FileNotFoundError)  # retention was faster
        with gone, contextlib.closing(self._files.open(path)) as file:
            file.sync()

    # --- what there is

    def ended_queues(self) -> list[tuple[str, int, int, bytes]]:
        """The queues whose messages have all expired: topic, queue id, offset of the last one, and
        its unit. Nothing else says where they go on. Any thread. Raises OSError."""
        path, size = self._config.consume_queue_path, self._config.consume_queue_file_bytes
        return expired_units(self._files, path, size, self._log.start)

    def queue_offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The first offset and the one after the last visible message; (0, 0) without a queue."""
        queue = self._queues.by_key.get((topic, queue_id))
        return (0, 0) if queue is None else (queue.offset_min, queue.visible_offset)

    def end_offset(self, topic: str, queue_id: int) -> int:
        """The one after the last message that is committed, which may not be visible yet."""
        queue = self._queues.by_key.get((topic, queue_id))
        return 0 if queue is None else queue.committed_offset

    # --- what is committed, visible or not: for derived files, which know all that the log holds

    def committed_units(self, topic: str, queue_id: int, offset: int, count: int) -> Units:
        """Return up to `count` units of a queue from `offset` on as they are stored; none where the
        queue has none. Fewer where a file ends."""
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None or not queue.offset_min <= offset < queue.committed_offset:
            return b""
        return queue.units(offset, min(count, queue.committed_offset - offset))

    def first_offset(self, topic: str, queue_id: int, position: int) -> int:
        """Return the offset of a queue's first record that lies at `position` of the log or behind;
        the queue's end when none does."""
        queue = self._queues.by_key.get((topic, queue_id))
        return 0 if queue is None else max(queue.first_from(position), queue.offset_min)

    def committed_record(self, position: int, size: int) -> memoryview | None:
        """Return the bytes of the record that a unit names, unchecked; None when the log does not
        hold them."""
        if position < self._log.start or position + size > self._log.written_offset or size <= 0:
            return None
        return self._log.record(position, size)

    def committed_record_at(self, position: int) -> memoryview | None:
        """Return what `committed_record` returns, with the size that the record itself states."""
        return self.committed_record(
            position, int.from_bytes(self.committed_record(position, 4) or b"")
        )

    def counts(self, topic: str, position: int) -> bool:
        """Return whether a record of the topic still counts, or its topic was deleted since."""
        return self._queues.deleted.counts(topic, position)

    def queue_exists(self, topic: str, queue_id: int) -> bool:
        return (topic, queue_id) in self._queues.by_key

    def queues(self) -> list[tuple[str, int]]:
        """(topic, queue id) of all queues."""
        return list(self._queues.by_key)

    @property
    def offset_min(self) -> int:
        """Where the log begins."""
        return self._log.start

    @property
    def written_offset(self) -> int:
        """The end of the log as committed."""
        return self._log.written_offset

    @property
    def synced_offset(self) -> int:
        """Everything before is on disk."""
        return self._log.synced_offset

    @property
    def failure(self) -> OSError | None:
        """Why the log takes no more writes until it is opened again."""
        return self._log.failure

    def runtime(self) -> dict[str, str]:
        """The store's part of the broker's runtime information (spec/admin.md §3)."""
        log, now_ms = self._log, self._clock.now_ms()
        total, free = self._files.usage(self._config.root)
        ratio = f"{1 - free / total:.4f}" if total else "0"
        seconds = max(0, now_ms - self._start_ms) // 1000
        days, hours = seconds // 86_400, seconds // 3600 % 24
        minutes, seconds = seconds // 60 % 60, seconds % 60
        return {
            "bootTimestamp": str(self._start_ms),
            "runtime": f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]",
            "commitLogMinOffset": str(log.start),
            "commitLogMaxOffset": str(log.written_offset),
            "commitLogDiskRatio": ratio,
            f"commitLogDiskRatio_{self._config.commit_log_path}": ratio,
            "consumeQueueDiskRatio": ratio,
            "commitLogDirCapacity": f"Total : {_binary(total)}, Free : {_binary(free)}.",
            "earliestMessageTimeStamp": str(self.reader.earliest_time_ms()),
            "dispatchBehindBytes": "0",
            "dispatchMaxBuffer": "0",
            "pageCacheLockTimeMills": "0",
            "remainTransientStoreBufferNumbs": "2147483647",
            "remainHowManyDataToFlush": _binary(log.written_offset - log.synced_offset),
        }

    # --- the end of a topic, the end of all

    def delete_topic(self, topic: str) -> None:
        """Drop the queues of a topic with their files; its records stay in the log.

        Waits for the disk: the mark must not speak of these queues any more.
        """
        self.commit()
        self._make_checkpoint()
        self._log.sync()
        try:
            self._queues.deleted.add(topic, self._log.written_offset, self._log.start)
        except OSError as error:  # nothing has happened yet
            if self._queues.deleted.is_doubtful:
                self._log.fail(error)
            raise StoreError(
                f"The topic {topic} cannot be deleted: {error}.", fix=fix_of(error)
            ) from error
        try:
            self._queues.delete(topic)
            self.columns.delete(topic)
        except OSError as error:  # half of it may be gone: the next start finishes it
            self._log.fail(error)
        self._checkpoint_now()

    def close(self) -> None:
        """Everything to disk, a mark, no `abort`, unlocked. After a disk error, before or now, only
        unlocked: raises StoreError or OSError. Without room for the queues the log is safe all the
        same, and the next start adds the rest.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._log.check()
            self.commit()
            if (end := self._log.records_end) < self._log.written_offset:
                # Of what a master wrote, the beginning of a record goes: it is sent again.
                for found in sweep_records(self._log, end, self._log.written_offset):
                    end = found.end
                self._log.cut(min(self._log.skip_blank(end), self._log.written_offset))
            self.keys.finish(self.writer.last_time_ms)
            self._flush(list(self._queues.dirty))
            self._log.sync()
            self._make_checkpoint()
            if not self._queues.dirty:  # else the next start looks at everything
                self._request_checkpoint(self._state())
                self._make_checkpoint()
                if self._marked is not None:
                    self._end_incarnation()
                    remove_abort(self._files, self._abort_path)
        except (OSError, StoreError) as error:
            logger.error("the store in %s was not closed in order: %s", self._config.root, error)
            raise
        finally:
            self._queues.close()
            self.keys.close()
            self.columns.close()
            self._log.close()
            self._unlock()

    def _end_incarnation(self) -> None:
        """Note that everything is synced. Without room for that, the note of the start stays: after
        a power loss the next start then has a new incarnation, which is safe."""
        try:
            if self._log.written_offset > self._log.start:
                self.incarnation.note_log()
            self.incarnation.note_shutdown()
        except OSError as error:
            if error.errno not in FULL_ERRORS | TRANSIENT_ERRORS:
                raise


def _binary(size: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}"
