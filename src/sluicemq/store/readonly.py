"""Reading a store directory without changing it: offline tools, reading without a broker.

Works on any RocketMQ store, SluiceMQ's or Java's, running or not. It takes no lock, recovers
nothing, and changes no byte. The sizes of files are taken from the files. A record that a crash has
left half-written ends the log. Of a running broker's queues only the units in their files are
visible. `StoreReader.open` with `is_wanted` also finds messages that only the log contains, loads
only the wanted queues, and ends each one behind its last complete message: a copy may have its
queues from a later moment than its log.

A running broker creates and removes files at any time. Opening is repeated if that interferes. Maps
of files that have been removed stay readable.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError
from sluicemq.files import SYSTEM_FILES, Files, load_text, text_names
from sluicemq.files.overlay import overlay
from sluicemq.model.subscription import MessageFilter
from sluicemq.store.columns.columns import PropertyColumns
from sluicemq.store.directory import (
    Checkpoint,
    DeletedTopics,
    check_directory,
    detect_file_sizes,
    open_error,
    read_checkpoint,
)
from sluicemq.store.dispatch import find_next_record, sweep_records
from sluicemq.store.log import CommitLog, LogRecord
from sluicemq.store.queues import UNIT, ConsumeQueues, Queue
from sluicemq.store.read import LogReader, ReadResult
from sluicemq.store.recover import StoreParts, prepare_recovery

if TYPE_CHECKING:
    from sluicemq.store.columns.ranges import RangeScan

logger = logging.getLogger(__name__)
OPEN_ATTEMPTS_MAX: Final = 5
"""Opening is attempted this many times if files are created or removed in the meantime."""
QueuePredicate = Callable[[str, int], bool]
"""Returns whether a queue is needed, by topic and queue id."""


class StoreReader:
    """A reader of a store directory. Create one with `StoreReader.open`."""

    def __init__(
        self, config: StoreConfig, files: Files, is_wanted: QueuePredicate | None = None
    ) -> None:
        """Load the log and the wanted queues. Callers use `StoreReader.open`.

        `config` must contain the real file sizes. `is_wanted(topic, queue_id)` says which queues
        are needed; for these, units that only the log contains are added in memory. None means all
        queues, without such units.
        """
        self._log = log = CommitLog(files, config.commit_log_path, config.commit_log_file_bytes)
        self._queues = queues = ConsumeQueues(
            files, config.consume_queue_path, config.consume_queue_file_bytes
        )
        log.segments.load(removes=False)
        queues.load(after_crash=False, removes=False, is_wanted=is_wanted, log_start=log.start)
        if is_wanted is not None:
            end = log.segments.end
            queues.deleted = DeletedTopics.load(files, config.root)
            _add_unflushed_units(config.root, log, queues, is_wanted)
        else:
            end = _find_log_end(log, queues)
        columns = PropertyColumns(config, files, SYSTEM_CLOCK, log, queues)
        self._reader = LogReader(log, queues, config, SYSTEM_CLOCK, columns)
        self._reader.visible_end = self._reader.soundness.trusted_from = end

    @classmethod
    def open(
        cls,
        root: str,
        *,
        commit_log_path: str = "",
        consume_queue_path: str = "",
        files: Files = SYSTEM_FILES,
        is_wanted: QueuePredicate | None = None,
        option: str = "--commit-log",
    ) -> "StoreReader":
        """Open a reader of the store in `root`, without locking or changing it.

        `is_wanted(topic, queue id)` says which queues are needed; None means all. Paths that are ""
        are the usual ones below `root`. `option` is the command-line option for the path of the
        log, for errors. Opening is repeated if a running broker interferes.

        Raises StoreError if there is no commit log, or the store has an unsupported format or
        cannot be read, and StoreDamagedError if files are missing or damaged.
        """
        config = StoreConfig(
            root=root, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path
        )
        attempts = OPEN_ATTEMPTS_MAX
        while True:
            attempts -= 1
            try:
                sized_config = detect_file_sizes(config, files, option)
                check_directory(files, config)
                return cls(sized_config, files, is_wanted)
            except (OSError, StoreDamagedError) as error:
                if attempts and isinstance(error, FileNotFoundError | StoreDamagedError):
                    continue  # a running broker created or removed files in the meantime
                if isinstance(error, OSError):
                    raise open_error(root, error) from error
                raise

    @property
    def log_start(self) -> int:
        """The position at which the log begins."""
        return self._log.start

    @property
    def log_end(self) -> int:
        """The position behind the last valid record; with `is_wanted`, the end of the last file."""
        return self._reader.visible_end

    def queues(self) -> list[tuple[str, int]]:
        """Return (topic, queue id) of all queues, sorted."""
        return sorted(self._queues.by_key)

    def queue_offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return a queue's first offset and the offset behind its last message.

        Returns (0, 0) if the queue does not exist.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            return 0, 0
        return queue.offset_min, queue.visible_offset

    def verified_end(self, topic: str, queue_id: int) -> int:
        """Return the offset behind the queue's last valid message. CRCs are checked.

        Returns the queue's first offset if no message is valid, and 0 if the queue does not exist.
        Assumes that all messages before a valid one are valid, because messages are lost at the
        end. So it looks back in growing steps, then bisects.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            return 0

        def is_whole(offset: int) -> bool:
            unit = queue.unit(offset)
            if unit is None or not unit.is_used:
                return False
            return unit.is_blank or self.record_at(unit.physical_offset) is not None

        # Look back for a valid message.
        end_max = queue.visible_offset
        step = 1
        while end_max - step >= queue.offset_min and not is_whole(end_max - step):
            end_max -= step
            step = 2 * step

        # Bisect between it and the first one that is known to be lost.
        last_whole = max(end_max - step, queue.offset_min - 1)
        while end_max - last_whole > 1:
            middle = (last_whole + end_max) // 2
            if is_whole(middle):
                last_whole = middle
            else:
                end_max = middle
        return end_max

    def offset_by_time(self, topic: str, queue_id: int, time_ms: int) -> int:
        """Return the offset of the first message of a queue that was stored at `time_ms` or later.

        Returns the queue's end if there is no such message, and 0 if the queue does not exist.
        """
        return self._reader.offset_by_time(topic, queue_id, time_ms)

    def units(self, topic: str, queue_id: int, start: int, count: int) -> bytes:
        """Return up to `count` units of 20 bytes from offset `start` on.

        Returns fewer units at a file's end, and none if the queue has none at `start`.
        """
        return bytes(self._reader.units(topic, queue_id, start, count))

    def unflushed_units(self, topic: str, queue_id: int) -> tuple[int, bytes]:
        """Return (offset, units): the units of a queue that are in the log, but not in its files.

        Units are 20-byte entries of the queue, joined. The first one has the queue offset `offset`.
        They are b"" for most queues, for readers without `is_wanted`, and if the queue does not
        exist.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            return 0, b""
        return queue.tail_start, bytes(queue.tail)

    def add_units(self, topic: str, queue_id: int, offset: int, units: bytes) -> None:
        """Add units, which another reader returned from `unflushed_units`, to a queue in memory.

        The first unit has the queue offset `offset`. The queue is created if it does not exist.
        Units that do not directly follow the queue's last unit are ignored.
        """
        queue = self._queues.get_unchecked((topic, queue_id))
        if not queue.next_offset:
            queue.reset_to(offset)
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
        """Read messages like `LogReader.read`, as a bulk read that only these numbers limit."""
        return self._reader.read(topic, queue_id, offset, count_max, bytes_max, message_filter)

    def scan_queue(
        self,
        topic: str,
        queue_id: int,
        message_filter: MessageFilter | None = None,
        *,
        skips: bool = False,
        check_bodies: bool = False,
    ) -> "RangeScan":
        """Return a scan that finds the positions of a queue's records in the log, many at once.

        Call `iter_places` of the scan. `message_filter` None means all records. If `skips`, records
        that are deleted or damaged are counted and skipped; otherwise they raise an error. If
        `check_bodies`, the CRCs of bodies are checked. A queue that does not exist is empty.
        """
        from sluicemq.store.columns.ranges import RangeScan  # noqa: PLC0415 - it imports pyarrow

        queue = self._queues.get_unchecked((topic, queue_id))
        reader = self._reader
        select = columns = None
        if message_filter is not None:
            select = reader.unit_selector(message_filter)
            columns = reader.column_scan(queue, message_filter)
        return RangeScan(
            self._log,
            reader.soundness,
            queue,
            message_filter,
            select,
            columns,
            skips=skips,
            check_bodies=check_bodies,
        )

    def record_at(self, physical_offset: int) -> bytes | None:
        """Return the valid record that begins at `physical_offset`; None if there is none."""
        return self._reader.record_at(physical_offset)

    def scan(self, start: int | None = None) -> Iterator[LogRecord]:
        """Yield the valid records of the log in order, from `start` on.

        A record must begin at `start`. None means the beginning of the log.
        """
        if start is None:
            start = self._log.start
        return self._log.scan(start)

    def close(self) -> None:
        """Close all files. Views of the log that were returned stay valid."""
        self._queues.close()
        self._log.close()


def check_recovery(
    reader: StoreReader,
    root: str,
    *,
    commit_log_path: str = "",
    consume_queue_path: str = "",
    files: Files = SYSTEM_FILES,
    is_wanted: QueuePredicate = lambda topic, queue_id: True,
) -> None:
    """Raise StoreDamagedError if a broker that starts on the store would show more messages.

    The store is recovered in memory, as by a start; nothing on disk changes. The queues that
    `is_wanted` selects must not have more messages then than `reader` shows. The error is also
    raised if no broker would start on the store.

    If the store was not shut down cleanly and its log ends before the checkpoint, this is only
    logged: a copy of a running broker's store, whose log is copied first, looks the same. Do not
    call this for the store of a running broker, which has in memory what its files lack.
    """
    config = StoreConfig(
        root=root, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path
    )
    overlay_files = overlay(files)
    config = detect_file_sizes(config, overlay_files)
    fix = (
        f"Start a broker on the store once, or run `sluice store repair {root} --write`. Both"
        " rebuild the queues from the log."
    )

    def refuse_rebuild() -> None:
        """Raise the error for queues that recovery would rebuild."""
        raise StoreDamagedError(
            f"Consume queues in {config.consume_queue_path} are missing or shorter than the"
            " checkpoint says.",
            fix=fix,
        )

    parts = prepare_recovery(config, overlay_files)
    try:
        if _recover_in_memory(parts, refuse_rebuild):
            for queue in parts.queues:
                if is_wanted(*queue.key):
                    _require_no_more_messages(queue, reader, root, fix)
    finally:
        parts.queues.close()
        parts.log.close()


def _recover_in_memory(parts: StoreParts, on_rebuild: Callable[[], None]) -> bool:
    """Recover a store in memory. Return True, or False if its log is only too short.

    `on_rebuild()` is called before queues are rebuilt. The log of a copy of a running broker's
    store may end before the checkpoint; that is logged. Raises StoreDamagedError if a broker would
    not start.
    """
    try:
        parts.recovery.load(after_crash=parts.after_crash)
        parts.recovery.run(on_rebuild)
    except StoreDamagedError as error:
        if not parts.after_crash or not _is_log_short(parts.log, parts.checkpoint.latest):
            raise
        logger.warning(
            "%s This is normal for a copy of a running broker's store: the messages up to that"
            " position are read.",
            error.fact + ".",
        )
        return False
    return True


def _require_no_more_messages(queue: Queue, reader: StoreReader, root: str, fix: str) -> None:
    """Raise StoreDamagedError if a recovered queue has messages that `reader` does not show.

    `fix` is the text of the error that says what to do.
    """
    offset_min, _ = reader.queue_offsets(*queue.key)
    end = reader.verified_end(*queue.key)
    lacks_first = offset_min > queue.offset_min and end > queue.offset_min
    lacks_last = end < queue.next_offset
    if lacks_first or lacks_last:
        raise StoreDamagedError(
            f"The files of queue {queue.queue_id} of {queue.topic!r} in {root} contain the"
            f" messages {offset_min} to {end - 1}, but the log contains"
            f" {queue.offset_min} to {queue.next_offset - 1}.",
            fix=fix,
        )


def _find_log_end(log: CommitLog, queues: ConsumeQueues) -> int:
    """Return the position behind the last record of the log that can be read.

    It is the end of the last record that a queue has, or of the valid records that follow.
    """
    end = log.start
    for queue in queues:
        last_unit = queue.unit(queue.next_offset - 1) if queue.next_offset else None
        if last_unit is not None and not last_unit.is_blank:
            end = max(end, last_unit.end)
    for record in log.scan(end):
        end = record.end
    return end


def _is_log_short(log: CommitLog, checkpoint: Checkpoint | None) -> bool:
    """Return whether the log is intact up to its end, but ends before the checkpoint.

    Only its last file is examined. Returns False without a checkpoint or a log.
    """
    last_segment = log.segments.last
    if checkpoint is None or last_segment is None:
        return False
    end = last_segment.base
    for record in log.scan(last_segment.base):
        end = record.end
    return end < checkpoint.log_offset and find_next_record(log, end) is None


def _add_unflushed_units(
    root: str, log: CommitLog, queues: ConsumeQueues, is_wanted: QueuePredicate
) -> None:
    """Add to the wanted queues, in memory, the units (entries) that only the log contains.

    A running SluiceMQ broker keeps new units in memory for a second, and a killed one never wrote
    them. Their records are behind the checkpoint. Only units that directly follow the last unit of
    their queue are added.

    Does nothing for a store that was shut down cleanly, and for a store of RocketMQ (a checkpoint
    file without SluiceMQ's checkpoint), which writes its units at once. A new store of SluiceMQ has
    no checkpoint file yet.
    """
    files = log.segments.files
    path = f"{root}/checkpoint"
    checkpoint = read_checkpoint(files, path).latest
    was_shut_down = not files.exists(f"{root}/abort")
    is_of_rocketmq = checkpoint is None and files.exists(path)
    if was_shut_down or is_of_rocketmq:
        return

    start = log.start
    if checkpoint is not None:
        start = max(start, checkpoint.log_offset)
    for encoded_topic, queue_id, offset, units in _iter_units_of_log(log, start):
        topic = encoded_topic.decode(errors="replace")
        first_position = UNIT.unpack_from(units)[0]
        # Records from before the topic was deleted belong to no queue.
        if is_wanted(topic, queue_id) and queues.deleted.is_live(topic, first_position):
            _extend_queue(queues, (topic, queue_id), offset, units)


def _iter_units_of_log(log: CommitLog, start: int) -> Iterator[tuple[bytes, int, int, bytes]]:
    """Yield (encoded topic, queue id, offset, units) for the records from position `start` on.

    `units` are 20-byte queue entries, joined, with consecutive offsets from `offset` on. Groups of
    records whose offsets are not consecutive are left out.
    """
    for records in sweep_records(log, start):
        if not isinstance(records, LogRecord):
            for group in records.groups:
                if group.is_consecutive:
                    units = group.units.tobytes()
                    yield group.topic, group.queue_id, int(group.offsets[0]), units
        elif records.is_queued:
            unit = UNIT.pack(records.position, records.size_bytes, records.tag_code())
            yield records.topic, records.queue_id, records.queue_offset, unit


def _extend_queue(queues: ConsumeQueues, key: tuple[str, int], offset: int, units: bytes) -> None:
    """Add units to a queue, the first of them at `offset`. A new queue begins there."""
    queue = queues.by_key.get(key)
    if queue is None:
        queue = queues.get_unchecked(key)
        queue.reset_to(offset)
    queue.extend(offset, units)


# --- reading the directory alone, without opening queues


def topics_of_store(
    root: str, *, consume_queue_path: str = "", files: Files = SYSTEM_FILES
) -> dict[str, list[int]]:
    """Return the queue ids of each topic, sorted by topic, as the directories show them.

    A topic that is declared in topics.json and has no message yet has []. If topics.json cannot be
    read, such topics are missing. `consume_queue_path` "" means consumequeue in `root`.
    """
    directory = consume_queue_path or f"{root}/consumequeue"
    queue_ids_by_topic: dict[str, list[int]] = {}
    for topic in text_names(files, directory):
        queue_names = files.names(f"{directory}/{topic}")
        id_names = [name for name in queue_names if name.isascii() and name.isdigit()]
        queue_ids_by_topic[topic] = sorted(map(int, id_names))

    with suppress(StoreDamagedError, OSError):  # then only the names of empty topics are missing
        declared_topics = load_text(files, f"{root}/config/topics.json", _parse_topic_names)
        for topic in declared_topics or ():
            queue_ids_by_topic.setdefault(topic, [])
    return dict(sorted(queue_ids_by_topic.items()))


def _parse_topic_names(text: str) -> list[str]:
    """Return the names of the topics that are declared in the text of topics.json."""
    return list(json.loads(text)["topicConfigTable"])


def has_batch_queues(root: str, topic: str, *, files: Files = SYSTEM_FILES) -> bool:
    """Return whether a topic has batch queues, which SluiceMQ does not read.

    RocketMQ calls them BatchCQ (spec/store.md §3).
    """
    return files.exists(f"{root}/batchconsumequeue/{topic}")
