"""Retention: which files of the log go, when, and what the disk has to say about it.

Every `cleanResourceInterval` the broker runs `clean`. The rules are RocketMQ's (spec/store.md §9):

    by age      the oldest file first, when it was last written fileReservedTime ago; only in the
                hours of deleteWhen, or when the disk is above diskMaxUsedSpaceRatio, or by hand
    by force    whatever its age, when the disk is above diskSpaceCleanForciblyRatio
    refusal     sends are refused while the disk is above diskSpaceWarningLevelRatio

Never the file that holds the log's last record, at most deleteFileBatchMax a run. Unlike RocketMQ a
forced run looks at the disk again after each file and stops as soon as there is room.

One file goes in this order, and whatever the moment of a crash is, recovery finds no unit missing
for a record that is there:

    1  the minimum of every queue moves behind the file: readers there get OFFSET_TOO_SMALL
    2  `Watcher` hears of it: unread messages are logged and counted
    3  the log forgets the file, the checkpoint says so (else the file would be missed), then it is
       removed, and its directory synced: no slice of it that is on its way to a socket is touched,
       the map lives as long as the slice
    4  only then files of queues and index that lie wholly behind the log's start

A file also waits for the durable mark to pass it, by age and by force: the units of its messages
are then on disk, so that no queue counts anew after a crash, and recovery begins at the mark. A
file that cannot be removed stops the run: files go in order or not at all, a gap would be damage.

`clean` is a generator: it yields a pause in seconds (0: let others run), or blocking work that the
caller does in another thread while the loop goes on.
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
SLICE_S: Final = 0.003
SLICE_QUEUES: Final = 256
MANUAL_ROUNDS: Final = 20
"""So many runs that request 329 sets free of the hours (spec/store.md §9)."""

Step = float | Callable[[], None]
"""What `clean` waits for: seconds, or work that blocks."""


class LogFile(NamedTuple):
    """A file of the log: the bytes [base, end), last written at `modified_ms`."""

    base: int
    end: int
    modified_ms: int


class DiskUsage(NamedTuple):
    """The file system that holds a path."""

    path: str
    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    @property
    def percent(self) -> float:
        return 100 * self.used_bytes / self.total_bytes if self.total_bytes else 0.0


class DeletionDecision(NamedTuple):
    """What may be deleted now: expired files, or any; `why` in words, for the log."""

    may_delete_expired: bool
    may_delete_any: bool
    reason: str


class DeletionObserver(Protocol):
    """Hears of it before a file is deleted."""

    def on_messages_deleted(self, topic: str, queue_id: int, old_min: int, new_min: int) -> None:
        """The messages [old_min, new_min) of a queue go with the file."""
        ...

    def on_file_deleted(self, file: LogFile, why: str) -> None:
        """`queue_moves` was called for all its queues; it is deleted now."""
        ...


# --- decisions: no disk, no clock


def local_hour(time_ms: int) -> int:
    """The hour of the day (0 to 23) in this machine's time zone."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).astimezone().hour


def decide_deletion(
    config: StoreConfig, fullest_percent: float, now_ms: int, *, is_manual: bool = False
) -> DeletionDecision:
    """By the disk, by hand, by the hour; above a ratio means above, equal is not.

    Force needs one of the three as well, as in RocketMQ: diskMaxUsedSpaceRatio above
    diskSpaceCleanForciblyRatio keeps files until sends are refused.
    """
    if fullest_percent > min(config.disk_used_ratio_max, config.disk_warning_ratio):
        why = f"{fullest_percent:.1f} % of the disk are used"
    elif is_manual:
        why = "an administrator asked for it"
    elif local_hour(now_ms) in map(int, config.delete_hours):
        why = f"deleteWhen = {';'.join(config.delete_hours)}"
    else:
        return DeletionDecision(False, False, "")
    limit = min(config.disk_forced_ratio, config.disk_warning_ratio)
    return DeletionDecision(True, config.clean_forcibly and fullest_percent > limit, why)


def expiry_ms(file: LogFile, config: StoreConfig) -> int:
    """When the file has been kept for fileReservedTime."""
    return file.modified_ms + config.file_reserved_hours * HOUR_MS


def warning_ms(file: LogFile, config: StoreConfig) -> int:
    """From when on its readers are warned."""
    reserved = config.file_reserved_hours * HOUR_MS
    return file.modified_ms + reserved * config.retention_warning_percent // 100


def deletion_ms(file: LogFile, config: StoreConfig, fullest_percent: float, now_ms: int) -> int:
    """When the file will be deleted at the earliest: expired, and in an hour of deleteWhen unless
    the disk makes every hour good."""
    earliest = max(expiry_ms(file, config), now_ms)
    if fullest_percent > min(config.disk_used_ratio_max, config.disk_warning_ratio):
        return earliest
    hours = {int(hour) for hour in config.delete_hours}
    moment = datetime.fromtimestamp(earliest / 1000, UTC).astimezone()
    if moment.hour in hours:
        return earliest
    hour = moment.replace(minute=0, second=0, microsecond=0).astimezone(UTC)
    for _ in range(26):  # a day, and what a change of the clocks adds
        hour += timedelta(hours=1)
        if hour.astimezone().hour in hours:
            break
    return int(hour.timestamp() * 1000)


def disk_full_error(usage: DiskUsage, config: StoreConfig) -> StoreFullError:
    """Why nothing is written: path, used, limit, free."""
    limit = usage.total_bytes * config.disk_warning_ratio // 100
    return StoreFullError(
        f"The disk of {usage.path} is too full: {usage.used_bytes} of {usage.total_bytes} bytes"
        f" ({usage.percent:.1f} %) are used, the limit is {limit}"
        f" (diskSpaceWarningLevelRatio = {config.disk_warning_ratio} %), {usage.free_bytes} are"
        " free.",
        fix="Make room, or lower fileReservedTime; sending works again by itself.",
    )


# --- and what they lead to


class Retention:
    """The clean-up of one store. Files may go that readers see beyond and the mark is behind."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        config: StoreConfig,
        files: Files,
        clock: Clock,
        durable: CheckpointFile,
        visible_end: Callable[[], int],
    ) -> None:
        self._log = log
        self._queues = queues
        self._files = files
        self._clock = clock
        self._durable = durable
        self._visible_end = visible_end
        self._to_remove: list[str] = []  # from the disk, in order; forgotten already
        self._is_stuck = False
        self._queues_behind = -1  # the log's start for which queue files were cleaned
        self.config = config
        """May be exchanged while the broker runs."""
        self.observer: DeletionObserver | None = None
        self.on_start_moved: list[Callable[[int], None]] = []
        """Called with the new start of the log when that is durable."""
        self.manual_rounds = 0
        self.files_deleted = 0
        self.bytes_deleted = 0

    # --- the disk

    def disk_usages(self) -> list[DiskUsage]:
        """Of the log's and of the queues' file system. Raises OSError."""
        config = self.config
        found: list[DiskUsage] = []
        for path in (config.commit_log_path, config.consume_queue_path):
            there = path if self._files.exists(path) else config.root
            usage = DiskUsage(path, *self._files.usage(there))
            if usage[1:] not in [other[1:] for other in found]:
                found.append(usage)
        return found

    def check_disk(self) -> float:
        """How full the fullest disk is, in percent; refuses sends above the limit, or takes them
        again. Cheap. Raises OSError."""
        fullest = max(self.disk_usages(), key=lambda usage: usage.percent)
        before, self._log.refusal = self._log.refusal, None
        if fullest.percent > self.config.disk_warning_ratio:
            self._log.refusal = disk_full_error(fullest, self.config)
            if before is None:
                logger.error("sends are refused from now on: %s", self._log.refusal)
        elif before is not None:
            logger.warning(
                "sends are taken again: %.1f %% of the disk of %s are used",
                fullest.percent, fullest.path,
            )  # fmt: skip
        return fullest.percent

    @property
    def is_refusing_sends(self) -> bool:
        """Are sends refused because the disk is too full?"""
        return self._log.refusal is not None

    # --- questions

    def removable_end(self) -> int:
        """Files that end before it may go: readers see beyond them, the durable mark is behind."""
        mark = self._durable.written
        return 0 if mark is None else min(self._visible_end(), mark.log_offset)

    def deletable_files(self) -> Iterator[LogFile]:
        """The files that may go when their time comes, oldest first."""
        end = self.removable_end()
        for segment in self._log.segments:
            if segment.end >= end:
                return
            modified_ms = self._files.modified_ms(segment.path)
            yield LogFile(segment.base, segment.end, modified_ms)

    def expiring_files(self) -> list[LogFile]:
        """Files of whose loss readers have to be warned."""
        now_ms, found = self._clock.now_ms(), []
        for file in self.deletable_files():
            if warning_ms(file, self.config) > now_ms:
                break
            found.append(file)
        return found

    def first_offset_from(self, topic: str, queue_id: int, position: int) -> int:
        """The first message of a queue whose record lies at `position` of the log or behind."""
        queue = self._queues.by_key.get((topic, queue_id))
        return 0 if queue is None else queue.first_offset_from(position)

    def position_of(self, topic: str, queue_id: int, offset: int) -> int:
        """Where the record of a message lies in the log; -1 when there is none."""
        queue = self._queues.by_key.get((topic, queue_id))
        return -1 if queue is None else queue.position_of(offset)

    # --- the run

    def request_manual_run(self) -> None:
        """By hand (329): the next runs delete expired files at any hour."""
        self.manual_rounds = MANUAL_ROUNDS

    def clean(self, until_s: float = float("inf")) -> Iterator[Step]:
        """One run. What is left to do for queues at the time `until_s` is for the next one. Raises
        OSError when the disk cannot be asked or read."""
        if self._to_remove:
            yield self._remove_files
        is_manual = self.manual_rounds > 0
        self.manual_rounds = max(0, self.manual_rounds - 1)
        for number in range(self.config.delete_files_max):
            if self._to_remove:
                return
            decision = decide_deletion(
                self.config, self.check_disk(), self._clock.now_ms(), is_manual=is_manual
            )
            file = next(self.deletable_files(), None) if decision.may_delete_expired else None
            if file is None or not (
                decision.may_delete_any or expiry_ms(file, self.config) <= self._clock.now_ms()
            ):
                is_stuck = decision.may_delete_any and not number
                if is_stuck and not self._is_stuck:  # said once, until it is otherwise
                    logger.warning(
                        "%s, and no file of the log may be deleted: the newest stays, and so does"
                        " what the last checkpoint does not cover yet", decision.reason,
                    )  # fmt: skip
                self._is_stuck = is_stuck
                break
            yield from self._delete(file, decision.reason)
            yield self.config.delete_file_interval_ms / 1000
        yield from self._clean_queues(until_s)

    def clean_queues(self, until_s: float = float("inf")) -> Iterator[Step]:
        """Only the files of queues (306), whether the log's start has moved or not."""
        self._queues_behind = -1
        if self._to_remove:
            yield self._remove_files
        yield from self._clean_queues(until_s)

    def _delete(self, file: LogFile, why: str) -> Iterator[Step]:
        for queue in self._sliced():
            if queue is None:
                yield 0.0
                continue
            old = queue.offset_min
            if old == queue.next_offset:
                continue
            queue.update_offset_min(file.end)
            if queue.offset_min > old and self.observer is not None:
                self.observer.on_messages_deleted(
                    queue.topic, queue.queue_id, old, queue.offset_min
                )
        if self._log.start != file.base:
            return  # another run was faster
        if self.observer is not None:
            self.observer.on_file_deleted(file, why)
        path = self._log.segments.detach_first()
        self.files_deleted += 1
        self.bytes_deleted += file.end - file.base
        logger.info("log file %s goes: %s; the log begins at %d", path, why, file.end)
        self._to_remove.append(path)
        yield self._remove_files

    def _clean_queues(self, until_s: float) -> Iterator[Step]:
        start = self._log.start
        if self._to_remove or self._queues_behind == start:
            return
        for queue in self._sliced():
            if queue is None:
                yield 0.0
                continue
            segments = queue.segments
            limit = queue.offset_min * UNIT_BYTES
            while len(segments) > 1 and segments.start + segments.file_bytes <= limit:
                self._to_remove.append(segments.detach_first())
                yield self._remove_files
                if self._to_remove or self._clock.monotonic_s() >= until_s:
                    return
                yield self.config.delete_queue_file_interval_ms / 1000
        for tell in self.on_start_moved:
            tell(start)
        self._queues_behind = start

    def _sliced(self) -> Iterator[Queue | None]:
        """All queues, and None whenever the loop has waited long enough."""
        end_s = self._clock.monotonic_s() + SLICE_S
        for count, key in enumerate(list(self._queues.by_key), 1):
            queue = self._queues.by_key.get(key)  # its topic may be deleted meanwhile
            if queue is not None:
                yield queue
            if count % SLICE_QUEUES == 0 or self._clock.monotonic_s() > end_s:
                yield None
                end_s = self._clock.monotonic_s() + SLICE_S

    # --- the disk again: in another thread

    def _remove_files(self) -> None:
        """In order, each durably before the next; what fails is tried again in the next run."""
        while self._to_remove:
            path = self._to_remove[0]
            directory = path.rpartition("/")[0]
            try:
                if directory == self._log.segments.directory:
                    self._durable.set_log_start(self._log.start)
                if self._files.exists(path):
                    self._files.remove(path)
                if self._files.exists(directory):
                    self._files.sync_directory(directory)
            except OSError as error:
                logger.error(
                    "%s cannot be removed (%s): it is tried again, and no other file goes before."
                    " Correct the rights of its directory.", path, error,
                )  # fmt: skip
                return
            del self._to_remove[0]
