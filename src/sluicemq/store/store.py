"""The message store of a broker: commit log, consume queues, readers and recovery behind one class.

Two threads may use a store. The broker's event loop does everything. Any other thread may call
`sync`, which waits for the disk. In each iteration the loop calls `writer.append` for any number of
messages, then `commit` once (a group commit), and then sends the responses:

    ASYNC_FLUSH   `commit` makes the messages visible at once; `sync` runs on a timer
    SYNC_FLUSH    `commit` makes nothing visible; after `sync` has returned a position, `publish`
                  makes everything before that position visible

So under SYNC_FLUSH a reader never sees a message that is not on disk (design/0002). A store that is
opened with `is_gated` makes messages visible only after replicas have them: replication calls
`confirm`, and messages that a start finds behind the confirmed end stay hidden until then. A slave
calls `start_following`, because its log is written by the master.

`tick` writes queue files and requests checkpoints. Writing a checkpoint waits for the disk, so
`sync` does it. A checkpoint describes log and queues at one moment. The units from before that
moment are written after it, a few queues in each tick. Units from after that moment may reach the
files too, which does no harm: recovery cuts the queues back to the checkpoint.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.config import StoreConfig
from sluicemq.errors import SluiceError, StoreError
from sluicemq.files import FULL_ERRORS, SYSTEM_FILES, TRANSIENT_ERRORS, Files, fix_of
from sluicemq.files.identity import RecordSource
from sluicemq.files.incarnation import Incarnation
from sluicemq.outages import Outages, kind_of
from sluicemq.store.checkpoints import PAGE_BYTES, Checkpointer
from sluicemq.store.columns.columns import PropertyColumns
from sluicemq.store.directory import (
    Checkpoint,
    CheckpointFile,
    check_directory,
    format_bytes,
    format_uptime,
    open_error,
    remove_abort,
    write_abort,
)
from sluicemq.store.dispatch import Dispatcher
from sluicemq.store.follow import (
    HiddenMessages,
    LogFollower,
    find_records_end,
    locate_bytes,
    remove_partial_record,
)
from sluicemq.store.index.index import KeyIndex
from sluicemq.store.queues import UNIT, Queue, Unit, Units, expired_units
from sluicemq.store.read import LogReader
from sluicemq.store.recover import prepare_recovery
from sluicemq.store.retain import Retention
from sluicemq.store.writer import Writer, warn_clock_went_back

logger = logging.getLogger(__name__)

_NEXT_LOG_FILE: Final = "commit log preallocation"
VisibleOffsets = list[tuple[str, int, int]]
"""(topic, queue id, new maximum offset) of each queue that has new visible messages."""


class _CommittedGroup(NamedTuple):
    """A committed group of messages that waits for its sync, or for its confirmation by replicas.

    `log_end` is the position at which its records end in the log. `queues` contains each queue that
    has messages in the group, with the offset behind its last one.
    """

    log_end: int
    queues: list[tuple[Queue, int]]


class Store:
    """A message store in a directory. Create one with `Store.open`.

    `writer` appends messages, `reader` reads visible ones, `keys` finds messages by their keys,
    `columns` holds message properties for filters, and `retention` deletes old files. The broker
    decides when the last three do their background work.
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
        """Load and recover the store, and create `abort`, which marks it as open.

        Use `Store.open`, which locks the directory before. `unlock()` is called when the store is
        closed. If `is_gated`, messages become visible only when `confirm` is called. Messages
        behind the position `confirmed` stay hidden until then; None means that none are hidden.
        `incarnation` identifies the store; None means that it is read from the directory. Raises
        StoreError and OSError.
        """
        self._config = config
        self._files = files
        self._clock = clock
        self._unlock = unlock
        self._is_closed = False
        self._outages = Outages(clock, logger)
        self._abort_path = f"{config.root}/abort"

        # Recover log and queues. `abort` must exist before recovery changes anything.
        parts = prepare_recovery(config, files)
        self._log = log = parts.log
        self._queues = queues = parts.queues
        after_crash = parts.after_crash
        was_followed = parts.was_followed
        parts.recovery.load(after_crash=after_crash)
        write_abort(files, self._abort_path, is_followed=was_followed)
        checkpoint_file = CheckpointFile(files, f"{config.root}/checkpoint", parts.checkpoint)
        self.recovered = parts.recovery.run(checkpoint_file.distrust_queues)

        # Create what works on them.
        self.incarnation = incarnation or Incarnation(files, config.root)
        self.keys = KeyIndex(config, files, clock, log, checkpoint_file, after_crash=after_crash)
        self.writer = Writer(
            log, queues, config, clock, self.recovered.store_time_ms, self.keys.known_keys
        )
        self.columns = PropertyColumns(config, files, clock, log, queues)
        self.reader = LogReader(log, queues, config, clock, self.columns)
        self.retention = Retention(
            log,
            queues,
            config,
            files,
            clock,
            checkpoint_file,
            lambda: self.reader.visible_end,
        )
        self.on_visible: Callable[[VisibleOffsets], None] | None = None
        """Called with the queues that have new visible messages, in the event loop."""
        self.keys.read_visible_record = self.reader.record_at
        self.retention.on_start_moved += [self.keys.drop_files_before, self.columns.start_moved]
        self._publishes_later = config.flush_sync or is_gated
        self._unpublished: deque[_CommittedGroup] = deque()
        self._hidden_messages = HiddenMessages(queues)
        self._last_tick_end = self.recovered.end
        self._start_ms = clock.now_ms()
        self._last_sync_s = self._last_queue_flush_s = clock.monotonic_s()
        self._checkpoints = Checkpointer(
            config,
            files,
            clock,
            self._outages,
            log=log,
            queues=queues,
            keys=self.keys,
            writer=self.writer,
            file=checkpoint_file,
            incarnation=self.incarnation,
        )

        # Only now can a checkpoint be written for what recovery has changed.
        self._finish_recovery(after_crash=after_crash, was_followed=was_followed)
        self.incarnation.open(is_empty=log.written_offset <= log.start, is_synced=config.flush_sync)
        if confirmed is not None:
            self.hide_unconfirmed(confirmed)

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
        """Lock, load and recover the store in `config.root`, and create it if it does not exist.

        If `is_gated`, committed messages become visible only when `confirm` is called. `confirmed`
        is the position up to which replicas have the log: messages behind it stay hidden until they
        are confirmed. None means the whole log. Pass `incarnation` if the caller keeps one for this
        directory while the store is opened several times.

        Raises StoreLockedError if a living process uses the store, StoreDamagedError if files are
        missing, exchanged or damaged, StoreError if the directory cannot be opened or has an
        unsupported format.
        """
        unlock: Callable[[], None] | None = None
        try:
            files.make_directory(config.root)
            check_directory(files, config)
            unlock = files.lock(f"{config.root}/lock")
            return cls(
                config,
                files,
                clock,
                unlock,
                is_gated=is_gated,
                confirmed=confirmed,
                incarnation=incarnation,
            )
        except (SluiceError, OSError) as error:
            if unlock is not None:
                unlock()
            if isinstance(error, OSError):
                raise open_error(config.root, error) from error
            raise

    def _finish_recovery(self, *, after_crash: bool, was_followed: bool) -> None:
        """Log what recovery did, and write a checkpoint if a later start depends on it.

        It is written now for a slave's log, rebuilt queues, or a newer index. After other crashes,
        the next `tick` begins it. After a clean shutdown it is not needed. `after_crash` means that
        the start found the file `abort`, and `was_followed` that a master wrote the log then.
        """
        recovered = self.recovered
        now_ms = self._clock.now_ms()
        if now_ms < recovered.store_time_ms:
            warn_clock_went_back(now_ms, recovered.store_time_ms)

        has_recovered = after_crash or recovered.units_added > 0 or recovered.is_rebuilt
        if has_recovered:
            logger.info(
                "recovered %s: the log ends at %d, %d queue entries were added",
                self._config.root,
                recovered.end,
                recovered.units_added,
            )

        must_not_wait = has_recovered and (was_followed or recovered.is_rebuilt)
        if must_not_wait or self.keys.has_newer_index_time:
            self._checkpoints.write_now()
            # Only after the checkpoint: everything that the master had sent is durable now.
            if was_followed:
                write_abort(self._files, self._abort_path)
        elif has_recovered:
            # The next tick begins a checkpoint. Until it is written, a start repeats the recovery.
            self._checkpoints.hasten()

    # --- committing and publishing

    def commit(self) -> int:
        """Write the messages that were appended since the last commit. Return the log's end.

        Under ASYNC_FLUSH and if not gated, they become visible at once. Otherwise `publish` makes
        them visible. If nothing was appended, nothing is written.

        Raises StoreFullError or StoreError if the write fails. Then the messages and their queue
        offsets do not exist, and the next commit may succeed.
        """
        writer = self.writer
        start = self._log.written_offset
        end = writer.commit()
        if end == start:
            return end
        queues = [(queue, queue.next_offset) for queue in writer.touched]
        self._queues.dirty.update(dict.fromkeys(writer.touched))
        writer.touched.clear()
        if self._publishes_later:
            self._unpublished.append(_CommittedGroup(end, queues))
        else:
            self.make_visible(end, queues)
        return end

    def sync(self) -> int:
        """Wait until everything that was committed before is on disk. Return its end in the log.

        Also writes the checkpoint if one is due. Any thread may call this; concurrent calls share
        one sync. Raises StoreError if the disk fails: the store then accepts no more writes. Raises
        StoreTransientError if the call may be repeated.
        """
        end = self._log.sync()
        self.keys.flush_due()
        if self._checkpoints.is_due:
            self._checkpoints.write_due()
        return end

    def publish(self, end_offset: int) -> None:
        """Make all committed messages visible whose records end at `end_offset` or before.

        A group of messages that was committed together becomes visible as a whole. `on_visible` is
        called once for all groups, and not if no group is complete. `end_offset` is a position that
        `sync` returned, or, if the store is gated, up to which replicas have the log. Messages that
        were hidden at the start become visible too, up to the same position.
        """
        if self._hidden_messages:
            self._publish_hidden(end_offset)
        waiting = self._unpublished
        offset_by_queue: dict[Queue, int] = {}
        end = 0
        while waiting and waiting[0].log_end <= end_offset:
            group = waiting.popleft()
            offset_by_queue.update(group.queues)
            end = group.log_end
        if end:
            self.make_visible(end, list(offset_by_queue.items()))

    confirm = publish
    """`publish` under the name that replication uses: replicas, not the disk, have confirmed."""

    def hide_unconfirmed(self, confirmed: int) -> None:
        """Hide the messages that recovery found behind the position `confirmed` of the log.

        Lowers the visible offsets of their queues, and the visible end of the log. Does nothing if
        the log ends at `confirmed` or before. Call this before any reader uses the store. `confirm`
        makes the messages visible.
        """
        if confirmed < self._log.written_offset:
            visible_end = self._hidden_messages.hide(confirmed)
            self.reader.visible_end = max(visible_end, self._log.start)

    def _publish_hidden(self, confirmed: int) -> None:
        """Make the hidden messages visible whose records end at position `confirmed` or before."""
        revealed_end, revealed = self._hidden_messages.reveal(confirmed)
        visible_end = max(self.reader.visible_end, revealed_end)
        if not self._hidden_messages:  # then records that are in no queue are visible as well
            recovered_end = min(confirmed, self.recovered.end, self._log.records_end)
            visible_end = max(visible_end, recovered_end)
        self.make_visible(visible_end, revealed)

    def make_visible(self, end: int, queues: list[tuple[Queue, int]]) -> None:
        """Make everything before position `end` of the log visible, and call `on_visible`.

        `queues` contains each queue with new messages, and the offset behind its last visible one.
        `on_visible` is not called if `queues` is empty.
        """
        self.reader.visible_end = end
        for queue, offset in queues:
            queue.visible_offset = offset
        if self.on_visible is not None and queues:
            self.on_visible([(queue.topic, queue.queue_id, offset) for queue, offset in queues])

    # --- replication

    def view_log(self, position: int, size_max: int) -> memoryview:
        """Return up to `size_max` bytes of the log from `position` on, as a view without copying.

        The view ends where the log, or the file that contains `position`, ends. It is empty at the
        end of the log. Raises StoreError if the log does not contain the position (deleted, or not
        written yet).
        """
        segment, begin, stop = locate_bytes(self._log, position, size_max)
        if segment is None:
            return memoryview(b"")
        return segment.view()[begin:stop]

    def read_log(self, position: int, size_max: int) -> bytes:
        """Read up to `size_max` bytes of the log from `position` on, with pread, in any thread.

        Use this in a thread for bytes that may have to come from the disk: reading them through a
        view would block the event loop. Raises StoreError like `view_log`, and OSError.
        """
        segment, begin, stop = locate_bytes(self._log, position, size_max)
        if segment is None:
            return b""
        # Another thread may close the segment's own descriptor at any time.
        with contextlib.closing(self._files.open(segment.path)) as file:
            return file.pread(stop - begin, begin)

    @property
    def record_source(self) -> RecordSource:
        """The log as `files.identity` reads it, to check whether derived files are still valid.

        Any thread may read from it. It returns b"" for positions that the log does not have.
        """

        def read(position: int, size: int) -> bytes:
            with contextlib.suppress(StoreError):
                return self.read_log(position, size)
            return b""

        return RecordSource(self._log.start, read)

    def start_following(self) -> LogFollower:
        """Let a master write the log from now on. Return the receiver of the master's bytes.

        Commits what was appended before. The writer then refuses messages until the store is
        closed, and the file `abort` notes that a master writes the log. Raises StoreError if the
        disk fails.
        """
        self.commit()
        log = self._log
        config = self._config
        try:
            write_abort(self._files, self._abort_path, is_followed=True)
        except OSError as error:
            log.mark_failed(error)
        log.followed_end = log.written_offset
        self.writer.is_following = True
        dispatcher = Dispatcher(
            log,
            self._queues,
            check_crc=config.check_crc_on_recover,
            delays_ms=config.delay_levels_ms,
        )
        return LogFollower(self, log, self.writer, dispatcher)

    def begin_queue(self, topic: str, queue_id: int, offset: int, unit: bytes) -> None:
        """Let a queue without existing messages continue behind `offset`.

        `unit` is the queue's entry (20 bytes) for its last message, which has this offset. The
        queue is created if necessary. Does nothing if it already has that offset. The next
        checkpoint, which the next `tick` begins, makes the change durable. Raises
        MessageIllegalError if the topic or queue id is invalid, and OSError.
        """
        queue = self._queues.get_or_create((topic, queue_id))
        if queue.next_offset <= offset:
            queue.put(offset, Unit._make(UNIT.unpack(unit)))
            queue.update_offset_min(self._log.start)
            self._queues.mark_dirty(queue)
            # The next tick begins a checkpoint: no recovery would find this unit in the log.
            self._checkpoints.hasten()

    def begin_log(self, position: int) -> None:
        """Remove all messages. The empty log then begins at `position`, where a file begins.

        A master must be writing the log. Removes the files of log, queues, key index and columns,
        and clears the caches of readers. Then writes a checkpoint, so that the change is durable.
        Raises StoreError; the log then accepts no more writes.
        """
        log = self._log
        try:
            with self._checkpoints.lock:
                self._checkpoints.discard_request()
                # The old checkpoint would claim that the log begins before `position`.
                self._checkpoints.file.remove()
                self._checkpoints.file.index_time_ms = 0
                log.truncate(log.start)
                log.add_file(position)
                log.set_end(position)
                log.followed_end = position
            for topic in {topic for topic, _ in self._queues.by_key}:
                self.columns.delete_topic(topic)
            self.reader.clear_caches()
            self._hidden_messages.clear()
            self._queues.remove_all()
            self.keys.restart_at(position)
            self.make_visible(position, [])
            self._checkpoints.write_now()
        except OSError as error:
            log.mark_failed(error)

    def cut_log(self, end: int) -> None:
        """Remove everything from position `end` on from log, queues and indexes, durably.

        A master must be writing the log. If `end` is at the log's start or before, the store
        becomes empty. If readers could see messages behind `end`, their caches are cleared, the
        columns of the topics are removed, and a warning is logged. Raises StoreError; the log then
        accepts no more writes.
        """
        log = self._log
        if end <= log.start:
            self.begin_log(0)
            return
        if end >= log.records_end:
            log.truncate(end)  # the bytes behind `records_end` are in no queue
            return
        try:
            self._checkpoints.write_now()
            records_end, store_time_ms = self._truncate_log(end)
            self.keys.truncate(records_end)
            self.writer.last_time_ms = store_time_ms
            topics = self._truncate_queues(end)
            if topics:
                self._forget_removed(topics, end)
            self._checkpoints.write_now()
        except OSError as error:
            log.mark_failed(error)

    def _truncate_log(self, end: int) -> tuple[int, int]:
        """Remove everything from position `end` on from the log, after writing a checkpoint.

        Returns (end of the last whole record that stays, its store time in ms). Raises StoreError
        and OSError.
        """
        log = self._log
        last_unit = self._queues.find_last_unit(end)
        search_start = log.start if last_unit is None else last_unit.physical_offset
        records_end, store_time_ms = find_records_end(log, max(search_start, log.start), end)
        # A start may trust this checkpoint whether or not the truncation has happened.
        with self._checkpoints.lock:
            log_values = records_end, *self._queues.digest(end), store_time_ms
            index_values = self.keys.mark_after_truncation(records_end)
            self._checkpoints.file.write(Checkpoint(0, *log_values, *index_values, log.start))
            log.truncate(end)
            log.followed_end = records_end
        return records_end, store_time_ms

    def _truncate_queues(self, end: int) -> set[str]:
        """Remove the units (queue entries) whose records were behind position `end` of the log.

        Returns the topics of which readers could see a removed message. Raises OSError.
        """
        old_visible_offsets = {queue: queue.visible_offset for queue in self._queues}
        self._queues.truncate_to_log(end)
        self._queues.deleted.cut(end)
        self._hidden_messages.drop_removed()
        self.reader.visible_end = min(self.reader.visible_end, self._log.records_end)
        topics = set()
        for queue, old_visible_offset in old_visible_offsets.items():
            if queue.visible_offset < old_visible_offset:
                topics.add(queue.topic)
        return topics

    def _forget_removed(self, topics: set[str], end: int) -> None:
        """Clear the caches of readers, remove the columns of these topics, and log a warning.

        Visible messages of the topics were removed, because the log was truncated at `end`.
        """
        logger.warning(
            "the log in %s is truncated to %d: messages that were visible to readers are removed",
            self._config.root,
            end,
        )
        self.reader.clear_caches()
        for topic in topics:
            self.columns.delete_topic(topic)

    # --- periodic work

    @property
    def is_flushing(self) -> bool:
        """Whether queues remain that the next `tick` has to write for a checkpoint."""
        return self._checkpoints.is_flushing

    def tick(self) -> bool:
        """Do the periodic work that is due: queue files, the next log file, checkpoints, index.

        The broker calls this on a timer. Returns whether the caller must call `sync` now. That is
        so if `flush_interval_ms` have passed since the last time, and a checkpoint is due, or
        enough pages are not synced, or any bytes are not synced for `flush_thorough_interval_ms`
        (the rules of ASYNC_FLUSH, spec/store.md §8).
        """
        config = self._config
        now_s = self._clock.monotonic_s()
        self.keys.tick(self.writer.last_time_ms)

        queue_flush_age_ms = (now_s - self._last_queue_flush_s) * 1000
        if queue_flush_age_ms >= config.consume_queue_flush_interval_ms:
            self._last_queue_flush_s = now_s
            self._checkpoints.flush_long_tails()
            self._prepare_next_file()

        log_end = self._log.records_end
        is_quiet = log_end == self._last_tick_end
        self._last_tick_end = log_end
        self._checkpoints.tick(now_s, is_quiet=is_quiet)

        is_due = self._is_sync_due((now_s - self._last_sync_s) * 1000)
        if is_due:
            self._last_sync_s = now_s
        return is_due

    def _is_sync_due(self, elapsed_ms: float) -> bool:
        """Return whether the log must be synced now, `elapsed_ms` after the last time."""
        config = self._config
        if elapsed_ms < config.flush_interval_ms:
            return False
        if self._checkpoints.is_due:
            return True
        unsynced_bytes = self._log.written_offset - self._log.synced_offset
        if unsynced_bytes >= config.flush_pages_min * PAGE_BYTES:
            return True
        return unsynced_bytes > 0 and elapsed_ms >= config.flush_thorough_interval_ms

    def _prepare_next_file(self) -> None:
        """Create the next file of the commit log if the last one is nearly full.

        A failure is only logged: the append that needs the file creates it, or fails.
        """
        try:
            self._log.prepare_next_file()
        except OSError as error:
            message = "creating the next commit log file failed: %s"
            self._outages.report_failure(_NEXT_LOG_FILE, message, error, kind=kind_of(error))
        else:
            self._outages.report_success(_NEXT_LOG_FILE)

    # --- offsets and positions

    def expired_queues(self) -> list[tuple[str, int, int, bytes]]:
        """Return the queues whose messages have all expired, with the unit of their last message.

        Each item is (topic, queue id, offset of the last message, its stored unit of 20 bytes).
        Only the files of such a queue say at which offset it continues. They are read from disk.
        Any thread may call this. Raises OSError.
        """
        path = self._config.consume_queue_path
        file_bytes = self._config.consume_queue_file_bytes
        return expired_units(self._files, path, file_bytes, self._log.start)

    def queue_offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return a queue's first offset and the offset after its last visible message.

        Returns (0, 0) if the queue does not exist.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            return 0, 0
        return queue.offset_min, queue.visible_offset

    def committed_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset after a queue's last committed message, which may not be visible yet.

        Returns 0 if the queue does not exist.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        return 0 if queue is None else queue.committed_offset

    # --- committed messages, visible or not: derived files cover everything that the log holds

    def committed_units(self, topic: str, queue_id: int, offset: int, count: int) -> Units:
        """Return up to `count` units (20-byte entries, joined) of a queue from `offset` on.

        Includes messages that are not visible yet. Returns fewer units where a file ends; call
        again with the next offset. Returns an empty sequence if the queue does not exist, or has no
        committed message at `offset`.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None or not queue.offset_min <= offset < queue.committed_offset:
            return b""
        return queue.units(offset, min(count, queue.committed_offset - offset))

    def first_offset_from(self, topic: str, queue_id: int, position: int) -> int:
        """Return the offset of a queue's first record at or behind `position` of the log.

        Returns the queue's end if there is no such record, and 0 if the queue does not exist.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            return 0
        return max(queue.first_offset_from(position), queue.offset_min)

    def committed_record(self, position: int, size: int) -> memoryview | None:
        """Return the bytes of the record that a unit locates, without checking them.

        Returns None if the log does not contain these bytes.
        """
        if position < self._log.start or position + size > self._log.written_offset or size <= 0:
            return None
        return self._log.record_view(position, size)

    def committed_record_at(self, position: int) -> memoryview | None:
        """Return the bytes of the committed record at `position`, whatever its size.

        Returns None if there is none.
        """
        size_field = self.committed_record(position, 4)  # a record begins with its size
        if size_field is None:
            return None
        return self.committed_record(position, int.from_bytes(size_field))

    def is_record_live(self, topic: str, position: int) -> bool:
        """Return whether the record of `topic` at `position` belongs to the topic as it exists now.

        It does not if the topic was deleted after the record was stored.
        """
        return self._queues.deleted.is_live(topic, position)

    def queue_exists(self, topic: str, queue_id: int) -> bool:
        return (topic, queue_id) in self._queues.by_key

    def queues(self) -> list[tuple[str, int]]:
        """Return (topic, queue id) of all queues, in no particular order."""
        return list(self._queues.by_key)

    @property
    def log_start(self) -> int:
        """The position at which the log begins."""
        return self._log.start

    @property
    def written_offset(self) -> int:
        """The position at which the committed part of the log ends."""
        return self._log.written_offset

    @property
    def synced_offset(self) -> int:
        """The position before which the log is on disk."""
        return self._log.synced_offset

    @property
    def failure(self) -> OSError | None:
        """The error after which the log refuses writes until it is opened again; else None."""
        return self._log.failure

    def runtime_info(self) -> dict[str, str]:
        """Return the store's part of RocketMQ's runtime information: names to texts."""
        log = self._log
        total_bytes, free_bytes = self._files.usage(self._config.root)
        used_ratio = f"{1 - free_bytes / total_bytes:.4f}" if total_bytes else "0"
        uptime_ms = max(0, self._clock.now_ms() - self._start_ms)
        return {
            "bootTimestamp": str(self._start_ms),
            "runtime": format_uptime(uptime_ms // 1000),
            "commitLogMinOffset": str(log.start),
            "commitLogMaxOffset": str(log.written_offset),
            "commitLogDiskRatio": used_ratio,
            f"commitLogDiskRatio_{self._config.commit_log_path}": used_ratio,
            "consumeQueueDiskRatio": used_ratio,
            "commitLogDirCapacity": (
                f"Total : {format_bytes(total_bytes)}, Free : {format_bytes(free_bytes)}."
            ),
            "earliestMessageTimeStamp": str(self.reader.earliest_time_ms()),
            "dispatchBehindBytes": "0",
            "dispatchMaxBuffer": "0",
            "pageCacheLockTimeMills": "0",
            "remainTransientStoreBufferNumbs": "2147483647",
            "remainHowManyDataToFlush": format_bytes(log.written_offset - log.synced_offset),
        }

    # --- deleting topics, closing

    def delete_topic(self, topic: str) -> None:
        """Remove the queues of a topic and their files. The records of the topic stay in the log.

        Waits for the disk, because a checkpoint must not describe these queues any more. Raises
        StoreError.
        """
        self.commit()
        self._checkpoints.write_due()
        self._log.sync()
        try:
            self._queues.deleted.add(topic, self._log.written_offset, self._log.start)
        except OSError as error:  # nothing has been deleted yet
            if self._queues.deleted.is_doubtful:
                self._log.mark_failed(error)
            raise StoreError(
                f"Topic {topic} cannot be deleted: {error}.", fix=fix_of(error)
            ) from error
        try:
            self._queues.delete_topic(topic)
            self.columns.delete_topic(topic)
        except OSError as error:  # some files may be gone: the next start removes the rest
            self._log.mark_failed(error)
        self._checkpoints.write_now()

    def close(self) -> None:
        """Commit, sync, write a checkpoint, remove `abort`, and release the lock.

        A second call does nothing. If the disk fails, or failed before, only close the files and
        release the lock, and raise StoreError or OSError. If the disk has no room for the queue
        files, the log is safe nevertheless, and the next start adds what the queues lack.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._log.check_writable()
            self.commit()
            if self._log.records_end < self._log.written_offset:
                remove_partial_record(self._log)
            self.keys.finish(self.writer.last_time_ms)
            self._checkpoints.flush_queues(list(self._queues.dirty))
            self._log.sync()
            self._checkpoints.write_due()
            # Without this checkpoint, and with `abort` in place, the next start recovers the rest.
            if not self._queues.dirty:
                self._checkpoints.request()
                self._checkpoints.write_due()
                if self._checkpoints.is_up_to_date:
                    self._end_incarnation()
                    remove_abort(self._files, self._abort_path)
        except (OSError, StoreError) as error:
            logger.error("closing the store in %s failed: %s", self._config.root, error)
            raise
        finally:
            self._queues.close()
            self.keys.close()
            self.columns.close()
            self._log.close()
            self._unlock()

    def _end_incarnation(self) -> None:
        """Note durably that this run ended with everything synced, so that the next continues it.

        If the disk is full, nothing is noted. After a power loss the next start then begins a new
        incarnation, which is safe.
        """
        try:
            if self._log.written_offset > self._log.start:
                self.incarnation.note_log()
            self.incarnation.note_shutdown()
        except OSError as error:
            if error.errno not in FULL_ERRORS | TRANSIENT_ERRORS:
                raise
