"""Retention: which files of the log are deleted, when, and when sends are refused.

The broker runs `clean` every `cleanResourceInterval`. The rules are RocketMQ's (spec/store.md §9):

    by age      the oldest file is deleted when it was last written fileReservedTime ago, but only
                in the hours of deleteWhen, or if the disk is above diskMaxUsedSpaceRatio, or on an
                administrator's request
    by force    the oldest file is deleted at any age if the disk is above
                diskSpaceCleanForciblyRatio
    refusal     sends are refused while the disk is above diskSpaceWarningLevelRatio

The file with the log's last record is never deleted, and one run deletes at most deleteFileBatchMax
files. Unlike RocketMQ, a forced run checks the disk again after each file, and stops as soon as
there is room.

A file is deleted in this order. Recovery finds the units of all remaining records, at whatever
moment a crash comes:

    1  the first offset of each queue moves behind the file; reads before it get OFFSET_TOO_SMALL
    2  the `DeletionObserver` is called: unread messages are logged and counted
    3  the log forgets the file; the checkpoint says so (otherwise a start would miss the file);
       then the file is removed and its directory synced; slices of it that are on their way to a
       socket stay valid, because the map lives as long as a slice
    4  only then are files of queues and index deleted that lie completely before the log's start

A file is only deleted, by age or by force, when the durable checkpoint is behind it. Then the units
of its messages are on disk, so that no queue's offsets start again after a crash, and recovery
begins at the checkpoint. A file that cannot be removed stops the run: a gap in the log would be
damage.

`clean` is a generator. It yields pauses in seconds (0 lets other tasks run), or blocking work that
the caller runs in another thread while the event loop continues.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Protocol

from sluicemq.clock import Clock
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreFullError
from sluicemq.files import Files
from sluicemq.store.directory import CheckpointFile
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import UNIT_BYTES, ConsumeQueues, Queue

logger = logging.getLogger(__name__)

HOUR_MS: Final = 3_600_000
SLICE_TIME_S: Final = 0.003
"""After this time a run lets other tasks of the event loop run."""
SLICE_QUEUES_MAX: Final = 256
"""After this many queues a run lets other tasks of the event loop run."""
MANUAL_RUNS: Final = 20
"""Number of runs that delete expired files at any hour after an administrator's request.

The request is DELETE_EXPIRED_COMMITLOG (329, spec/store.md §9).
"""

Step = float | Callable[[], None]
"""What `clean` waits for: a number of seconds, or work that blocks."""


class LogFile(NamedTuple):
    """A file of the log: the bytes [base, end), last written at `modified_ms`."""

    base: int
    end: int
    modified_ms: int


class DiskUsage(NamedTuple):
    """The usage of the file system that contains `path`."""

    path: str
    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    @property
    def percent(self) -> float:
        """The used share of the file system, 0 to 100; 0 if its size is unknown."""
        if not self.total_bytes:
            return 0.0
        return 100 * self.used_bytes / self.total_bytes


class DeletionDecision(NamedTuple):
    """Which files may be deleted now.

    `may_delete_expired` allows files that have been kept for fileReservedTime, and
    `may_delete_any` allows files of any age. `reason` is a phrase for the log, "" if no file may be
    deleted.
    """

    may_delete_expired: bool
    may_delete_any: bool
    reason: str


class DeletionObserver(Protocol):
    """Is notified before a file is deleted."""

    def on_messages_deleted(self, topic: str, queue_id: int, old_min: int, new_min: int) -> None:
        """Note that the messages [old_min, new_min) of a queue will be deleted with the file.

        The queue already begins at `new_min`.
        """
        ...

    def on_file_deleted(self, file: LogFile, why: str) -> None:
        """Note that the file will be deleted now. `why` is the phrase of `DeletionDecision.reason`.

        `on_messages_deleted` was called before, for each queue that has messages in the file.
        """
        ...


# --- decisions, without access to disk or clock


def local_hour(time_ms: int) -> int:
    """Return the hour of the day (0 to 23) in this machine's time zone."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).astimezone().hour


def decide_deletion(
    config: StoreConfig, fullest_percent: float, now_ms: int, *, is_manual: bool = False
) -> DeletionDecision:
    """Decide by disk usage, request and hour which files may be deleted.

    `fullest_percent` is the usage of the fullest disk. `is_manual` means that an administrator has
    requested the deletion.

    Expired files may be deleted if the usage is above diskMaxUsedSpaceRatio, if it was requested,
    or in an hour of deleteWhen. Unexpired files may be deleted too (`may_delete_any`) if the usage
    is above diskSpaceCleanForciblyRatio and one of these reasons holds, as in RocketMQ. A usage
    equal to a ratio is not above it.
    """
    if fullest_percent > min(config.disk_used_ratio_max, config.disk_warning_ratio):
        reason = f"{fullest_percent:.1f} % of the disk are used"
    elif is_manual:
        reason = "an administrator asked for it"
    elif local_hour(now_ms) in map(int, config.delete_hours):
        reason = f"deleteWhen = {';'.join(config.delete_hours)}"
    else:
        return DeletionDecision(False, False, "")
    forced_percent = min(config.disk_forced_ratio, config.disk_warning_ratio)
    may_delete_any = config.clean_forcibly and fullest_percent > forced_percent
    return DeletionDecision(True, may_delete_any, reason)


def expiry_ms(file: LogFile, config: StoreConfig) -> int:
    """Return the time in ms at which the file has been kept for fileReservedTime."""
    return file.modified_ms + config.file_reserved_hours * HOUR_MS


def warning_ms(file: LogFile, config: StoreConfig) -> int:
    """Return the time in ms from which on readers of the file are warned.

    Then `retention_warning_percent` of fileReservedTime have passed.
    """
    reserved_ms = config.file_reserved_hours * HOUR_MS
    return file.modified_ms + reserved_ms * config.retention_warning_percent // 100


def deletion_ms(file: LogFile, config: StoreConfig, fullest_percent: float, now_ms: int) -> int:
    """Return the earliest time in ms at which the file will be deleted because of its age.

    It is the time at which the file expires, or `now_ms` if it has expired. Files are deleted only
    in the hours of deleteWhen. So if the time is in another hour, the begin of the next allowed
    hour is returned. If `fullest_percent`, the usage of the fullest disk, is above
    diskMaxUsedSpaceRatio, every hour is allowed.
    """
    earliest_ms = max(expiry_ms(file, config), now_ms)
    if fullest_percent > min(config.disk_used_ratio_max, config.disk_warning_ratio):
        return earliest_ms
    allowed_hours = set(map(int, config.delete_hours))
    earliest = datetime.fromtimestamp(earliest_ms / 1000, UTC).astimezone()
    if earliest.hour in allowed_hours:
        return earliest_ms

    return int(_next_hour_start(earliest, allowed_hours).timestamp() * 1000)


def _next_hour_start(moment: datetime, allowed_hours: set[int]) -> datetime:
    """Return the begin of the next hour after `moment` that is allowed.

    `allowed_hours` are numbers from 0 to 23, in this machine's time zone.
    """
    # Try the following hours one by one, in UTC, which has no daylight saving time.
    hour_start = moment.replace(minute=0, second=0, microsecond=0).astimezone(UTC)
    for _ in range(26):  # a day, and the hours that a change of daylight saving time may add
        hour_start += timedelta(hours=1)
        if hour_start.astimezone().hour in allowed_hours:
            break
    return hour_start


def disk_full_error(usage: DiskUsage, config: StoreConfig) -> StoreFullError:
    """Make the error with which sends are refused. It names path, used bytes, limit, free bytes."""
    bytes_max = usage.total_bytes * config.disk_warning_ratio // 100
    return StoreFullError(
        f"The disk of {usage.path} is too full: {usage.used_bytes} of {usage.total_bytes} bytes"
        f" ({usage.percent:.1f} %) are used, the limit is {bytes_max}"
        f" (diskSpaceWarningLevelRatio = {config.disk_warning_ratio} %), {usage.free_bytes} are"
        " free.",
        fix="Free disk space, or lower fileReservedTime. Sending then works again without a"
        " restart.",
    )


# --- the clean-up


class Retention:
    """The clean-up of one store.

    Deletes only files that lie before both the visible end of the log and the durable checkpoint.
    """

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        config: StoreConfig,
        files: Files,
        clock: Clock,
        checkpoint_file: CheckpointFile,
        visible_end: Callable[[], int],
    ) -> None:
        """Create the deletion of old files of a store. Nothing is deleted yet.

        `log` and `queues` belong to the store. `checkpoint_file` says up to which position it is
        durable, and receives the log's new start. `visible_end()` returns the position at which the
        visible part of the log ends.
        """
        self._log = log
        self._queues = queues
        self._files = files
        self._clock = clock
        self._checkpoint_file = checkpoint_file
        self._visible_end = visible_end
        self._paths_to_remove: list[str] = []
        """Paths of files to remove from the disk, in order. Nothing uses them any more."""
        self._is_stuck_logged = False
        """Whether the log says that the disk is full and no file may be deleted."""
        self._queues_cleaned_for = -1
        """The log's start at the last clean-up of queue files; -1 if it must be repeated."""
        self.config = config
        """The configuration, which may be replaced while the broker runs."""
        self.observer: DeletionObserver | None = None
        """Is notified before files are deleted; None if nothing is."""
        self.on_start_moved: list[Callable[[int], None]] = []
        """Functions that are called with the log's new start when that is durable."""
        self.manual_runs = 0
        """Number of further runs that delete expired files at any hour."""
        self.files_deleted = 0
        self.bytes_deleted = 0

    # --- the disk

    def disk_usages(self) -> list[DiskUsage]:
        """Return the usage of the file systems that contain log and queues.

        The list has one item if log and queues are on the same file system, else two. Raises
        OSError.
        """
        log_usage = self._measure_usage(self.config.commit_log_path)
        queue_usage = self._measure_usage(self.config.consume_queue_path)
        # File systems with equal sizes and free bytes are taken for the same one.
        is_same = (log_usage.total_bytes, log_usage.free_bytes) == (
            queue_usage.total_bytes,
            queue_usage.free_bytes,
        )
        return [log_usage] if is_same else [log_usage, queue_usage]

    def _measure_usage(self, path: str) -> DiskUsage:
        """Return the usage of the file system that contains `path`.

        If `path` does not exist, the store's root is measured instead.
        """
        existing_path = path
        if not self._files.exists(path):
            existing_path = self.config.root
        total_bytes, free_bytes = self._files.usage(existing_path)
        return DiskUsage(path, total_bytes, free_bytes)

    def check_disk(self) -> float:
        """Refuse or accept sends, depending on how full the fullest disk is.

        If it is fuller than diskSpaceWarningLevelRatio, `refusal` of the log is set, else cleared.
        Each change is logged. Returns the usage of the fullest disk in percent. Raises OSError.
        """
        fullest = max(self.disk_usages(), key=lambda usage: usage.percent)
        previous_refusal = self._log.refusal
        self._log.refusal = None
        if fullest.percent > self.config.disk_warning_ratio:
            self._log.refusal = disk_full_error(fullest, self.config)
            if previous_refusal is None:
                logger.error("sends are now refused: %s", self._log.refusal)
        elif previous_refusal is not None:
            logger.warning(
                "sends are accepted again: %.1f %% of the disk of %s are used",
                fullest.percent,
                fullest.path,
            )
        return fullest.percent

    @property
    def is_refusing_sends(self) -> bool:
        """Whether sends are refused because the disk is too full."""
        return self._log.refusal is not None

    # --- files and positions

    def removable_end(self) -> int:
        """Return the position before which files may be deleted; 0 if there is no checkpoint yet.

        It is the end of the visible log, or the position of the last checkpoint that this process
        has written if that is smaller.
        """
        checkpoint = self._checkpoint_file.written
        if checkpoint is None:
            return 0
        return min(self._visible_end(), checkpoint.log_offset)

    def deletable_files(self) -> Iterator[LogFile]:
        """Yield the files of the log that may be deleted when they expire, oldest first.

        They end before `removable_end`, so the newest file is never one of them. Raises OSError.
        """
        end = self.removable_end()
        for segment in self._log.segments:
            if segment.end >= end:
                return
            modified_ms = self._files.modified_ms(segment.path)
            yield LogFile(segment.base, segment.end, modified_ms)

    def expiring_files(self) -> list[LogFile]:
        """Return the files whose deletion is so near that readers must be warned, oldest first.

        Raises OSError.
        """
        now_ms = self._clock.now_ms()
        files = []
        for file in self.deletable_files():
            if warning_ms(file, self.config) > now_ms:
                break
            files.append(file)
        return files

    def first_offset_from(self, topic: str, queue_id: int, position: int) -> int:
        """Return the offset of a queue's first message at or behind `position` of the log.

        Returns the queue's end if there is no such message, and 0 if the queue does not exist.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            return 0
        return queue.first_offset_from(position)

    def position_of(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the position in the log of a message's record; -1 if there is none."""
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            return -1
        return queue.position_of(offset)

    # --- the run

    def request_manual_run(self) -> None:
        """Let the next 20 runs delete expired files at any hour (DELETE_EXPIRED_COMMITLOG, 329)."""
        self.manual_runs = MANUAL_RUNS

    def clean(self, until_s: float = float("inf")) -> Iterator[Step]:
        """Delete old files, in steps. The generator yields what the caller must wait for.

        First removes files whose removal failed in the last run. Then deletes the oldest files of
        the log while `decide_deletion` allows it, at most `delete_files_max`, and notifies the
        observer. Also refuses or accepts sends, depending on the disk's usage. At the end deletes
        files of queues, and calls `on_start_moved`. Stops early if a file cannot be removed, and
        leaves work on queues for the next run when the monotonic clock reaches `until_s`. Raises
        OSError if the disk cannot be read.
        """
        if self._paths_to_remove:
            yield self._remove_files
        is_manual = self.manual_runs > 0
        self.manual_runs = max(0, self.manual_runs - 1)
        for deleted_count in range(self.config.delete_files_max):
            if self._paths_to_remove:
                return
            decision = decide_deletion(
                self.config, self.check_disk(), self._clock.now_ms(), is_manual=is_manual
            )
            file = self._choose_file(decision)
            if file is None:
                # The disk is too full, but even the first file of this run must stay.
                is_stuck = decision.may_delete_any and deleted_count == 0
                self._log_if_stuck(decision.reason, is_stuck=is_stuck)
                break
            yield from self._delete_file(file, decision.reason)
            yield self.config.delete_file_interval_ms / 1000
        yield from self._clean_queues(until_s)

    def _choose_file(self, decision: DeletionDecision) -> LogFile | None:
        """Return the oldest file of the log if the decision allows to delete it, else None.

        Raises OSError.
        """
        if not decision.may_delete_expired:
            return None
        file = next(self.deletable_files(), None)
        if file is None or decision.may_delete_any:
            return file
        is_expired = expiry_ms(file, self.config) <= self._clock.now_ms()
        return file if is_expired else None

    def _log_if_stuck(self, reason: str, *, is_stuck: bool) -> None:
        """Log once that the disk is too full and no file may be deleted, if `is_stuck`.

        It is logged again only after a call with `is_stuck` False. `reason` says how full the disk
        is.
        """
        if is_stuck and not self._is_stuck_logged:
            logger.warning(
                "%s, but no file of the log may be deleted: the newest file and files that"
                " the last checkpoint does not cover must stay",
                reason,
            )
        self._is_stuck_logged = is_stuck

    def clean_queues(self, until_s: float = float("inf")) -> Iterator[Step]:
        """Delete only old files of queues, even if the log's start has not moved.

        The generator yields what the caller must wait for, and stops when the monotonic clock
        reaches `until_s`. The request CLEAN_EXPIRED_CONSUMEQUEUE (306) needs this.
        """
        self._queues_cleaned_for = -1
        if self._paths_to_remove:
            yield self._remove_files
        yield from self._clean_queues(until_s)

    def _delete_file(self, file: LogFile, reason: str) -> Iterator[Step]:
        """Delete the first file of the log. The generator yields what the caller must wait for.

        Moves the first offsets of the queues, notifies the observer, updates log and counters, then
        removes the file. Does not remove it if another run has deleted it meanwhile.
        """
        for queue in self._iter_queues_in_slices():
            if queue is None:
                yield 0.0
            else:
                self._move_queue_start(queue, file.end)
        if self._log.start != file.base:
            return  # another run has deleted the file
        if self.observer is not None:
            self.observer.on_file_deleted(file, reason)
        path = self._log.segments.detach_first()
        self.files_deleted += 1
        self.bytes_deleted += file.end - file.base
        logger.info("deleting log file %s (%s); the log now begins at %d", path, reason, file.end)
        self._paths_to_remove.append(path)
        yield self._remove_files

    def _move_queue_start(self, queue: Queue, log_start: int) -> None:
        """Set the first offset of a queue to its first record at or behind `log_start`.

        Notifies the observer of the messages that are no longer in the queue.
        """
        old_min = queue.offset_min
        if old_min == queue.next_offset:  # the queue is empty
            return
        queue.update_offset_min(log_start)
        if queue.offset_min > old_min and self.observer is not None:
            self.observer.on_messages_deleted(
                queue.topic, queue.queue_id, old_min, queue.offset_min
            )

    def _clean_queues(self, until_s: float) -> Iterator[Step]:
        """Delete files of queues, then call the functions in `on_start_moved`.

        The generator yields what the caller must wait for. A queue's file is deleted if all its
        units are before the queue's first offset. Its last file always stays. Does nothing if this
        was done for the log's present start, or while a file waits for its removal. Stops at the
        time `until_s`, or if a file cannot be removed; the next run then continues.
        """
        start = self._log.start
        if self._paths_to_remove or self._queues_cleaned_for == start:
            return
        for queue in self._iter_queues_in_slices():
            if queue is None:
                yield 0.0
                continue
            segments = queue.segments
            kept_from = queue.offset_min * UNIT_BYTES  # the position of the first unit that is read
            while len(segments) > 1 and segments.start + segments.file_bytes <= kept_from:
                self._paths_to_remove.append(segments.detach_first())
                yield self._remove_files
                if self._paths_to_remove or self._clock.monotonic_s() >= until_s:
                    return
                yield self.config.delete_queue_file_interval_ms / 1000
        for notify in self.on_start_moved:
            notify(start)
        self._queues_cleaned_for = start

    def _iter_queues_in_slices(self) -> Iterator[Queue | None]:
        """Yield all queues, and None after SLICE_QUEUES_MAX queues or SLICE_TIME_S.

        At None the consumer must let the event loop run. Queues may be created and deleted
        meanwhile.
        """
        end_s = self._clock.monotonic_s() + SLICE_TIME_S
        for count, key in enumerate(list(self._queues.by_key), 1):
            queue = self._queues.by_key.get(key)  # None if its topic was deleted in the meantime
            if queue is not None:
                yield queue
            if count % SLICE_QUEUES_MAX == 0 or self._clock.monotonic_s() > end_s:
                yield None
                end_s = self._clock.monotonic_s() + SLICE_TIME_S

    # --- blocking work, in another thread

    def _remove_files(self) -> None:
        """Remove the files in `_paths_to_remove` from the disk, each durably before the next.

        Before a file of the log is removed, the log's start is written to the checkpoint file. If a
        removal fails, that is logged, and the remaining paths stay in the list for the next run.
        """
        while self._paths_to_remove:
            path = self._paths_to_remove[0]
            directory = path.rpartition("/")[0]
            try:
                if directory == self._log.segments.directory:
                    self._checkpoint_file.set_log_start(self._log.start)
                if self._files.exists(path):
                    self._files.remove(path)
                if self._files.exists(directory):
                    self._files.sync_directory(directory)
            except OSError as error:
                logger.error(
                    "cannot remove %s: %s; retrying, and removing no later file before it; fix the"
                    " permissions of its directory",
                    path,
                    error,
                )
                return
            del self._paths_to_remove[0]
