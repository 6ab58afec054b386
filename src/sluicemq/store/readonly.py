"""The read-only face of a store directory: for offline tools, and for reading without a broker.

Works on any RocketMQ store, ours or Java's, running or not: takes no lock, recovers nothing, and
changes not one byte. File sizes are taken from the files. What a crash left half-written ends the
log. Of a running broker the queues are seen as far as their files go; `open` with `wanted` also
finds what is in the log alone (`tail`), loads only those queues, and ends each one behind its last
message that is whole: a copy may have its queues from a later moment than its log.

A running broker removes and makes files at any time. A look at the directory that is overtaken by
that is repeated; maps of files that are gone stay readable.
"""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError
from sluicemq.files import SYSTEM_FILES, Files, load_text
from sluicemq.model.subscription import MessageFilter
from sluicemq.store.columns.columns import PropertyColumns
from sluicemq.store.directory import DeletedTopics, cannot_open, check_directory, no_store
from sluicemq.store.log import CommitLog, Scanned, scan_records
from sluicemq.store.queues import ConsumeQueues, Queue
from sluicemq.store.read import LogReader, ReadResult
from sluicemq.store.segments import is_segment_name
from sluicemq.store.walk import Wanted, add_tail

if TYPE_CHECKING:
    from sluicemq.store.ranges import RangeScan

__all__ = ["Scanned", "StoreReader", "has_batch_queues", "topics_of_store"]

T = TypeVar("T")
LOOKS_MAX: Final = 5
"""So often a directory is looked at again when files went or came meanwhile."""


class StoreReader:
    """A store directory, to be looked at. Make one with `StoreReader.open`."""

    def __init__(self, config: StoreConfig, files: Files, wanted: Wanted | None = None) -> None:
        self._log = CommitLog(files, config.commit_log_path, config.commit_log_file_bytes)
        self._queues = ConsumeQueues(
            files, config.consume_queue_path, config.consume_queue_file_bytes
        )
        self._queues.deleted = DeletedTopics(files, f"{config.root}/config/deletedTopics.json")
        self._log.segments.load(removes=False)
        self._queues.load(
            after_crash=False, removes=False, wanted=wanted, log_start=self._log.start
        )
        if wanted is not None:
            self._queues.deleted.load()
            add_tail(config.root, self._log, self._queues, wanted)
        self._reader = LogReader(self._log, self._queues, config, SYSTEM_CLOCK)
        self._reader.columns = PropertyColumns(config, files, SYSTEM_CLOCK, self._log, self._queues)
        end = self._log.segments.end if wanted is not None else self._find_end()
        self._reader.visible_end = self._reader.soundness.trusted_from = end

    @classmethod
    def open(
        cls,
        root: str,
        *,
        commit_log_path: str = "",
        consume_queue_path: str = "",
        files: Files = SYSTEM_FILES,
        wanted: Wanted | None = None,
        option: str = "--commit-log",
    ) -> "StoreReader":
        """`wanted(topic, queue id)` says which queues are needed; `option` is how the user says
        where the log lies.

        Raises StoreError when there is no commit log, or it is of a kind that is not read here;
        StoreDamagedError as `Store.open`.
        """
        config = StoreConfig(
            root=root, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path
        )
        try:
            return _look(lambda: cls(_sized(files, config, option), files, wanted))
        except OSError as error:
            raise cannot_open(root, error) from error

    def _find_end(self) -> int:
        """Behind the last record that a queue knows, and the good ones that follow it."""
        end = self._log.start
        for queue in self._queues:
            unit = queue.unit(queue.next_offset - 1) if queue.next_offset else None
            if unit is not None and not unit.is_blank:
                end = max(end, unit.physical_offset + unit.size_bytes)
        for record in scan_records(self._log, end):
            end = record.end
        return end

    @property
    def log_start(self) -> int:
        return self._log.start

    @property
    def log_end(self) -> int:
        """Behind the last good record; the end of the last file with `wanted`."""
        return self._reader.visible_end

    def queues(self) -> list[tuple[str, int]]:
        """(topic, queue id), sorted."""
        return sorted(self._queues.by_key)

    def queue_offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The first offset and the one after the last; (0, 0) without a queue."""
        queue = self._queues.by_key.get((topic, queue_id))
        return (0, 0) if queue is None else (queue.offset_min, queue.visible_offset)

    def sound_end(self, topic: str, queue_id: int) -> int:
        """The offset behind the queue's last message that is wholly there, with its CRC."""
        queue = self._queues.by_key.get((topic, queue_id))
        return 0 if queue is None else self._sound_end(queue)

    def _sound_end(self, queue: Queue) -> int:
        """Looks back in growing steps, then halves: what is lost lies behind what is not."""
        bad, step = queue.visible_offset, 1
        while bad - step >= queue.offset_min and not self._is_whole(queue, bad - step):
            bad, step = bad - step, 2 * step
        good = max(bad - step, queue.offset_min - 1)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._is_whole(queue, middle) else (good, middle)
        return bad

    def _is_whole(self, queue: Queue, offset: int) -> bool:
        unit = queue.unit(offset)
        if unit is None or not unit.is_used:
            return False
        return unit.is_blank or self.record_at(unit.physical_offset) is not None

    def offset_by_time(self, topic: str, queue_id: int, time_ms: int) -> int:
        """The first message stored at `time_ms` or later, the queue's end without one."""
        return self._reader.offset_by_time(topic, queue_id, time_ms)

    def units(self, topic: str, queue_id: int, start: int, count: int) -> bytes:
        """Consume-queue units of 20 bytes from offset `start`: up to `count`, fewer at a file's
        end; empty when there are none."""
        return bytes(self._reader.units(topic, queue_id, start, count))

    def unfiled_units(self, topic: str, queue_id: int) -> tuple[int, bytes]:
        """What `tail` found: the first offset, and the units; (0, nothing) as a rule."""
        queue = self._queues.by_key.get((topic, queue_id))
        return (0, b"") if queue is None else (queue.tail_start, bytes(queue.tail))

    def add_units(self, topic: str, queue_id: int, offset: int, units: bytes) -> None:
        """What another reader of the store has found by `unfiled_units`."""
        queue = self._queues.open((topic, queue_id))
        if not queue.next_offset:
            queue.reset(offset)
        queue.extend(offset, units)

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        count_max: int,
        bytes_max: int,
        message_filter: MessageFilter | None = None,
    ) -> ReadResult:
        """As `Store.read`."""
        return self._reader.read(topic, queue_id, offset, count_max, bytes_max, message_filter)

    def range(
        self,
        topic: str,
        queue_id: int,
        message_filter: MessageFilter | None = None,
        *,
        skips: bool = False,
        check_bodies: bool = False,
    ) -> "RangeScan":
        """Records of the queue as places in the log, in columns: see `ranges`. With `skips` what
        is gone or damaged is counted instead of an error. A queue that is not there is empty."""
        from sluicemq.store.ranges import RangeScan  # noqa: PLC0415 - NumPy and pyarrow

        queue = self._queues.open((topic, queue_id))
        return RangeScan(
            self._log, self._reader, queue, message_filter, skips=skips, check_bodies=check_bodies
        )

    def record_at(self, physical_offset: int) -> bytes | None:
        """The record that begins there, wholly checked; None when none does."""
        return self._reader.record_at(physical_offset)

    def scan(self, start: int | None = None) -> Iterator[Scanned]:
        """Every good record of the log in order, from `start` (where one begins) on."""
        return scan_records(self._log, self._log.start if start is None else start)

    def close(self) -> None:
        self._queues.close()
        self._log.close()


def topics_of_store(
    root: str, *, consume_queue_path: str = "", files: Files = SYSTEM_FILES
) -> dict[str, list[int]]:
    """Topic -> ids of its queues, by name; none for one that is declared (topics.json) and has no
    message yet. Light: no queue is opened."""
    directory = consume_queue_path or f"{root}/consumequeue"
    found: dict[str, list[int]] = {}
    for topic in files.names(directory):
        names = files.names(f"{directory}/{topic}")
        found[topic] = sorted(int(name) for name in names if name.isascii() and name.isdigit())
    for topic in _declared(files, f"{root}/config/topics.json"):
        found.setdefault(topic, [])
    return dict(sorted(found.items()))


def has_batch_queues(root: str, topic: str, *, files: Files = SYSTEM_FILES) -> bool:
    """Whether a topic's queues are of the kind that RocketMQ has for batches, which no one here
    reads (BatchCQ, spec/store.md §3)."""
    return files.exists(f"{root}/batchconsumequeue/{topic}")


def _declared(files: Files, path: str) -> list[str]:
    try:
        return load_text(files, path, lambda text: list(json.loads(text)["topicConfigTable"])) or []
    except (StoreDamagedError, OSError):
        return []  # only the names of empty topics are missed


def _look(work: Callable[[], T]) -> T:
    """Again when files vanished meanwhile. Raises what the last look raised."""
    for _ in range(LOOKS_MAX - 1):
        try:
            return work()
        except (FileNotFoundError, StoreDamagedError):
            continue
    return work()


def _sized(files: Files, config: StoreConfig, option: str) -> StoreConfig:
    """The configuration with the sizes that the files have. Raises StoreError."""
    log_path, queue_path, root = config.commit_log_path, config.consume_queue_path, config.root
    log_bytes = _file_bytes(files, log_path)
    if log_bytes is None:
        raise no_store(files, root, log_path, option)
    check_directory(files, config)
    return StoreConfig(
        root=root,
        commit_log_path=log_path,
        consume_queue_path=queue_path,
        commit_log_file_bytes=log_bytes,
        consume_queue_file_bytes=_queue_file_bytes(files, queue_path)
        or config.consume_queue_file_bytes,
    )


def _file_bytes(files: Files, directory: str) -> int | None:
    """The size of the first file that is not empty."""
    for name in files.names(directory):
        if is_segment_name(name):
            file = files.open(f"{directory}/{name}")
            try:
                size = file.size()
            finally:
                file.close()
            if size:
                return size
    return None


def _queue_file_bytes(files: Files, directory: str) -> int | None:
    for topic in files.names(directory):
        for queue_id in files.names(f"{directory}/{topic}"):
            size = _file_bytes(files, f"{directory}/{topic}/{queue_id}")
            if size:
                return size
    return None
