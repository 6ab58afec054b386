"""The read-only face of a store directory: for offline tools, and for reading without a broker.

Works on any RocketMQ store, ours or Java's, running or not: takes no lock, recovers nothing, and
changes not one byte. File sizes are taken from the files. What a running broker has not yet
written to the queue files is not seen; what a crash left half-written ends the log.
"""

from collections.abc import Iterator

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.model.subscription import MessageFilter
from sluicemq.store.commitlog import CommitLog
from sluicemq.store.consumequeue import ConsumeQueues
from sluicemq.store.reading import LogReader, ReadResult
from sluicemq.store.scan import Scanned, scan_records
from sluicemq.store.segments import is_segment_name

__all__ = ["Scanned", "StoreReader"]


class StoreReader:
    """A store directory, to be looked at. Make one with `StoreReader.open`."""

    def __init__(self, config: StoreConfig, files: Files) -> None:
        self._log = CommitLog(files, config.commit_log_path, config.commit_log_file_bytes)
        self._queues = ConsumeQueues(
            files, config.consume_queue_path, config.consume_queue_file_bytes
        )
        self._log.segments.load(removes=False)
        self._queues.load(after_crash=False, removes=False)
        for queue in self._queues:
            queue.correct_min(self._log.start)
        self._reader = LogReader(self._log, self._queues, config)
        self._reader.visible_end = self._reader.soundness.trusted_from = self._find_end()

    @classmethod
    def open(
        cls,
        root: str,
        *,
        commit_log_path: str = "",
        consume_queue_path: str = "",
        files: Files = SYSTEM_FILES,
    ) -> "StoreReader":
        """Raises StoreError when there is no commit log, StoreDamagedError as `Store.open`."""
        config = StoreConfig(
            root=root, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path
        )
        log_bytes = _file_bytes(files, config.commit_log_path)
        if log_bytes is None:
            raise StoreError(
                f"{config.commit_log_path} holds no commit log.",
                cure="Name the directory that storePathRootDir says (it holds commitlog).",
            )
        queue_bytes = _queue_file_bytes(files, config.consume_queue_path)
        return cls(
            StoreConfig(
                root=root,
                commit_log_path=commit_log_path,
                consume_queue_path=consume_queue_path,
                commit_log_file_bytes=log_bytes,
                consume_queue_file_bytes=queue_bytes or config.consume_queue_file_bytes,
            ),
            files,
        )

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
        """Behind the last good record."""
        return self._reader.visible_end

    def queues(self) -> list[tuple[str, int]]:
        """(topic, queue id), sorted."""
        return sorted(self._queues.by_key)

    def queue_offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The first offset and the one after the last; (0, 0) without a queue."""
        queue = self._queues.by_key.get((topic, queue_id))
        return (0, 0) if queue is None else (queue.offset_min, queue.visible_offset)

    def units(self, topic: str, queue_id: int, start: int, count: int) -> bytes:
        """Consume-queue units of 20 bytes from offset `start`: up to `count`, fewer at a file's
        end; empty when there are none."""
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None or not queue.offset_min <= start < queue.visible_offset:
            return b""
        return bytes(queue.units(start, min(count, queue.visible_offset - start)))

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

    def record_at(self, physical_offset: int) -> bytes | None:
        """The record that begins there, wholly checked; None when none does."""
        return self._reader.record_at(physical_offset)

    def scan(self, start: int | None = None) -> Iterator[Scanned]:
        """Every good record of the log in order, from `start` (where one begins) on."""
        return scan_records(self._log, self._log.start if start is None else start)

    def close(self) -> None:
        self._queues.close()
        self._log.close()


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
