"""Writing consume queues to their files, and checkpoints of log, queues and key index.

A checkpoint says that everything before a position of the log is on disk: the log itself, the units
of all queues and the key index. It is made in three steps:

    1  `tick` takes the values of a checkpoint at one moment, and the queues that have units in
       memory. It writes a few of those queues in each call. Units that are appended in between may
       reach the files too: recovery cuts the queues back to the checkpoint.
    2  When all of them are written, `tick` requests the checkpoint, with the files to sync.
    3  `write_due` syncs the log and those files, then writes the checkpoint. It waits for the disk,
       so the store calls it at the end of a `sync`, in another thread.

The event loop calls everything but `write_due`, which any thread may call.
"""

import contextlib
import math
import threading
from typing import Final, NamedTuple

from sluicemq.clock import Clock
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreTransientError
from sluicemq.files import FULL_ERRORS, TRANSIENT_ERRORS, Files, fix_of
from sluicemq.files.incarnation import Incarnation
from sluicemq.outages import Outages, kind_of
from sluicemq.store.directory import Checkpoint, CheckpointFile
from sluicemq.store.index.file import is_index_name
from sluicemq.store.index.index import KeyIndex
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import ConsumeQueues, Queue
from sluicemq.store.segments import is_segment_name
from sluicemq.store.writer import Writer

PAGE_BYTES: Final = 4096
SINGLE_SYNCS_MAX: Final = 256
"""If a checkpoint needs more files than this, their whole file system is synced at once."""
CHECKPOINT_LOG_BYTES: Final = 64 << 20
"""A checkpoint is due when the log has grown by this many bytes since the last one.

A start after a crash walks the log from the last checkpoint. This limit bounds the time of that
walk, however fast messages arrive.
"""
CHECKPOINT_LOG_BYTES_PER_FILE: Final = 32 << 10
"""The growth of the log that justifies syncing one queue file for a checkpoint.

With many unsynced files a checkpoint is due after this many bytes for each file, if that is more
than `CHECKPOINT_LOG_BYTES`.
"""
QUEUES_PER_TICK: Final = 128
"""Number of queues that one `tick` writes for a checkpoint, which takes about a millisecond.

A store may have tens of thousands of queues.
"""
_QUEUE_FLUSH: Final = "consume queue writes"
_CHECKPOINT_WRITE: Final = "checkpoint writes"


class _CheckpointRequest(NamedTuple):
    """A checkpoint to write, and the files and directories that must be synced before."""

    checkpoint: Checkpoint
    paths: list[str]


class Checkpointer:
    """Writes the queue files of a store, and its checkpoints."""

    def __init__(
        self,
        config: StoreConfig,
        files: Files,
        clock: Clock,
        outages: Outages,
        *,
        log: CommitLog,
        queues: ConsumeQueues,
        keys: KeyIndex,
        writer: Writer,
        file: CheckpointFile,
        incarnation: Incarnation,
    ) -> None:
        """Create the writer of checkpoints for a store that was just opened.

        `log`, `queues`, `keys` and `writer` have the values that a checkpoint contains, and `file`
        receives it. `outages` logs when writing begins to fail, and when it succeeds again.
        `incarnation` notes that the log has a durable record.
        """
        self._config = config
        self._files = files
        self._outages = outages
        self._log = log
        self._queues = queues
        self._keys = keys
        self._writer = writer
        self._incarnation = incarnation
        self.file = file
        self.lock = threading.Lock()
        """Held while a checkpoint is written. Hold it to change what the due checkpoint covers."""
        self.is_flushing = False
        """Whether queues remain that the next `tick` has to write for a checkpoint."""
        self._due: _CheckpointRequest | None = None
        self._prepared: tuple[tuple[int, ...], list[Queue]] | None = None
        """The values of the next checkpoint, and the queues that must be written before it."""
        self._requested_values: tuple[int, ...] | None = None
        """The values of the last checkpoint that was requested; None if it could not be written."""
        self._last_end = log.records_end
        self._last_s = clock.monotonic_s()

    @property
    def is_due(self) -> bool:
        """Whether `write_due` has a checkpoint to write."""
        return self._due is not None

    @property
    def is_up_to_date(self) -> bool:
        """Whether a checkpoint was requested, and has been or will be written.

        False before the first request, after `discard_request`, and if the disk was full.
        """
        return self._requested_values is not None

    def hasten(self) -> None:
        """Let the next `tick` begin a checkpoint, however short ago the last one was made."""
        self._last_s = -math.inf

    # --- queue files

    def flush_queues(self, queues: list[Queue], count: int = 1 << 62) -> bool:
        """Write the last `count` of these queues to their files, and remove them from `queues`.

        Returns whether that succeeded. At an OSError it stops, reports the error to `outages`, and
        returns False; the other queues stay in the list, and their units in memory.
        """
        try:
            for _ in range(min(count, len(queues))):
                self._queues.flush(queues[-1])
                queues.pop()
        except OSError as error:  # nothing is lost: the units stay in memory and are written later
            message = "writing consume queues failed: %s"
            self._outages.report_failure(_QUEUE_FLUSH, message, error, kind=kind_of(error))
            return False
        self._outages.report_success(_QUEUE_FLUSH)
        return True

    def flush_long_tails(self) -> None:
        """Write the queues that have at least the configured number of pages in memory.

        Does nothing if very many queues have units in memory. Then each queue is written when its
        tail reaches `TAIL_BYTES_MAX`, or for a checkpoint.
        """
        if len(self._queues.dirty) > SINGLE_SYNCS_MAX:
            return
        bytes_min = self._config.consume_queue_flush_pages_min * PAGE_BYTES
        self.flush_queues([queue for queue in self._queues.dirty if len(queue.tail) >= bytes_min])

    # --- requesting checkpoints

    def tick(self, now_s: float, *, is_quiet: bool) -> None:
        """Begin a checkpoint if it is time, and write some queues for one that has begun.

        It is time if the log has grown enough, or if the interval has passed since the last one
        began. No checkpoint begins before the last one was written. When the last queue is written,
        the checkpoint becomes due, and `write_due` writes it. `now_s` is the monotonic clock.
        `is_quiet` means that the log has not grown since the last call.
        """
        is_last_written = self._due is None and self._prepared is None
        if is_last_written and self._is_time_to_begin(now_s, is_quiet=is_quiet):
            self._last_s = now_s
            self._last_end = self._log.records_end
            self._prepared = self._compute_values(), list(self._queues.dirty)

        self.is_flushing = False
        if self._prepared is not None:
            values, queues = self._prepared
            self.is_flushing = self.flush_queues(queues, QUEUES_PER_TICK) and bool(queues)
            if not queues:
                self._prepared = None
                self._request_checkpoint(values)

    def _is_time_to_begin(self, now_s: float, *, is_quiet: bool) -> bool:
        """Return whether it is time for the next checkpoint: after enough growth, or an interval.

        `now_s` is the monotonic clock. `is_quiet` means that the log does not grow at present.
        """
        config = self._config
        file_count = len(self._queues.unsynced) + len(self._queues.dirty)
        growth_bytes = self._log.records_end - self._last_end
        if growth_bytes >= max(CHECKPOINT_LOG_BYTES, file_count * CHECKPOINT_LOG_BYTES_PER_FILE):
            return True

        # While the log grows, checkpoints are made less often under SYNC_FLUSH, where sends wait
        # for each sync, and with many files, which take long to sync.
        interval_ms = config.flush_thorough_interval_ms
        is_costly = config.flush_sync or file_count > SINGLE_SYNCS_MAX
        if is_costly and not is_quiet:
            interval_ms = config.consume_queue_flush_thorough_interval_ms
        return (now_s - self._last_s) * 1000 >= interval_ms

    def request(self) -> None:
        """Request a checkpoint of this moment: it is due, and `write_due` writes it.

        The queues must have been flushed to their files. Does nothing if nothing has changed since
        the last request.
        """
        self._request_checkpoint(self._compute_values())

    def discard_request(self) -> None:
        """Forget the due checkpoint. The caller holds `lock`."""
        self._due = self._requested_values = None

    def _compute_values(self) -> tuple[int, ...]:
        """Return the present values of all fields of a checkpoint except `sequence`."""
        return (
            self._log.records_end,
            *self._queues.digest(),
            self._writer.last_time_ms,
            *self._keys.current_mark(),
            self._log.start,
        )

    def _request_checkpoint(self, values: tuple[int, ...]) -> None:
        """Make a checkpoint with these values due, and collect the paths to sync before it.

        A checkpoint that is due already is replaced. Does nothing if the last request had the same
        values, and no file was written since.
        """
        if values == self._requested_values and not self._queues.unsynced and self._keys.is_synced:
            return
        self._requested_values = values
        paths = sorted(self._queues.unsynced) + self._keys.paths_to_sync()
        self._queues.unsynced.clear()
        self._due = _CheckpointRequest(Checkpoint(0, *values), paths)

    # --- writing checkpoints

    def write_now(self) -> None:
        """Write all queues to their files, then a checkpoint of the present state. Blocks.

        A checkpoint that is due is written first. A checkpoint that `tick` has begun is discarded.
        Raises OSError if a queue cannot be written, and StoreTransientError or StoreError if a
        checkpoint cannot.
        """
        for queue in list(self._queues.dirty):
            self._queues.flush(queue)
        self.write_due()  # `request` would replace it, and with it the list of files to sync
        self._prepared = None
        self.request()
        self.write_due()

    def write_due(self) -> None:
        """Sync what the due checkpoint needs, and write it. Does nothing if none is due.

        Syncs the log, and then the files, one by one or, if they are many, their file systems. Any
        thread may call this. Raises StoreTransientError if the call may be repeated; then the
        checkpoint stays due. Raises StoreError if the disk fails: the store then accepts no more
        writes.
        """
        with self.lock:
            due = self._due
            if due is None:
                return
            self._log.check_writable()  # a sync that failed must never be repeated
            try:
                if self._log.synced_offset < due.checkpoint.log_offset:
                    self._log.sync()
                self._sync_paths(due.paths)
                self._write_checkpoint(due.checkpoint)
            except OSError as error:
                if error.errno in TRANSIENT_ERRORS:  # the checkpoint stays due
                    raise StoreTransientError(
                        f"The checkpoint in {self._config.root} cannot be written at present:"
                        f" {error}.",
                        fix=fix_of(error),
                    ) from error
                self._log.mark_failed(error)
            self._due = None

    def _write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint to its file, and report success or a full disk to `outages`.

        On a full disk the previous checkpoint stays valid, and the next request is not skipped.
        Raises OSError for any other error.
        """
        try:
            if checkpoint.log_offset:  # from here on a missing log means that messages are lost
                self._incarnation.note_log()
            self.file.write(checkpoint)
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
            self._requested_values = None
            message = "writing a new checkpoint failed: %s"
            self._outages.report_failure(_CHECKPOINT_WRITE, message, error, kind=kind_of(error))
        else:
            self._outages.report_success(_CHECKPOINT_WRITE)

    def _sync_paths(self, paths: list[str]) -> None:
        """Sync files and directories, or their file systems if there are many. Raises OSError.

        Each single sync commits the file system's journal, which takes long for thousands of
        queues.
        """
        if len(paths) > SINGLE_SYNCS_MAX:
            roots = (self._config.consume_queue_path, self._config.root)
            if all(map(self._files.sync_all, roots)):
                return
        for path in paths:
            self._sync_path(path)

    def _sync_path(self, path: str) -> None:
        """Sync a queue file, an index file or a directory. Do nothing if it does not exist."""
        if not self._files.exists(path):
            return  # the topic was deleted in the meantime
        name = path.rpartition("/")[2]
        if not is_segment_name(name) and not is_index_name(name):
            self._files.sync_directory(path)
            return
        removed = contextlib.suppress(FileNotFoundError)  # retention may have removed the file
        with removed, contextlib.closing(self._files.open(path)) as file:
            file.sync()
