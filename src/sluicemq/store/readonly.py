"""The read-only face of a store directory: for offline tools, and for reading without a broker.

Works on any RocketMQ store, ours or Java's, running or not: takes no lock, recovers nothing, and
changes not one byte. File sizes are taken from the files. What a crash left half-written ends the
log. Of a running broker the queues are seen as far as their files go; `open` with `wanted` also
finds what is in the log alone, loads only those queues, and ends each one behind its last message
that is whole: a copy may have its queues from a later moment than its log.

A running broker removes and makes files at any time. A look at the directory that is overtaken by
that is repeated; maps of files that are gone stay readable.
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
from sluicemq.store.dispatch import sweep_records
from sluicemq.store.log import CommitLog, LogRecord, find_next_record
from sluicemq.store.queues import UNIT, ConsumeQueues
from sluicemq.store.read import LogReader, ReadResult
from sluicemq.store.recover import prepare_recovery

if TYPE_CHECKING:
    from sluicemq.store.columns.scan import RangeScan

logger = logging.getLogger(__name__)
OPEN_ATTEMPTS_MAX: Final = 5
"""So often a directory is looked at again when files went or came meanwhile."""
Wanted = Callable[[str, int], bool]


class StoreReader:
    """A store directory, to be looked at. Make one with `StoreReader.open`."""

    def __init__(self, config: StoreConfig, files: Files, wanted: Wanted | None = None) -> None:
        self._log = log = CommitLog(files, config.commit_log_path, config.commit_log_file_bytes)
        self._queues = queues = ConsumeQueues(
            files, config.consume_queue_path, config.consume_queue_file_bytes
        )
        log.segments.load(removes=False)
        queues.load(after_crash=False, removes=False, wanted=wanted, log_start=log.start)
        end = log.segments.end
        if wanted is not None:
            queues.deleted = DeletedTopics.load(files, config.root)
            _add_tail(config.root, log, queues, wanted)
        else:  # behind the last record that a queue knows, and the good ones that follow it
            end = log.start
            for queue in queues:
                unit = queue.unit(queue.next_offset - 1) if queue.next_offset else None
                if unit is not None and not unit.is_blank:
                    end = max(end, unit.end)
            for record in log.scan(end):
                end = record.end
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
        looks = OPEN_ATTEMPTS_MAX
        while True:
            looks -= 1
            try:
                fitting = detect_file_sizes(config, files, option)
                check_directory(files, config)
                return cls(fitting, files, wanted)
            except (OSError, StoreDamagedError) as error:
                if looks and isinstance(error, FileNotFoundError | StoreDamagedError):
                    continue  # files went or came meanwhile
                if isinstance(error, OSError):
                    raise open_error(root, error) from error
                raise

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

    def verified_end(self, topic: str, queue_id: int) -> int:
        """The offset behind the queue's last message that is wholly there, with its CRC.

        Looks back in growing steps, then halves: what is lost lies behind what is not.
        """
        queue = self._queues.by_key.get((topic, queue_id))
        if queue is None:
            return 0

        def is_whole(offset: int) -> bool:
            unit = queue.unit(offset)
            if unit is None or not unit.is_used:
                return False
            return unit.is_blank or self.record_at(unit.physical_offset) is not None

        bad, step = queue.visible_offset, 1
        while bad - step >= queue.offset_min and not is_whole(bad - step):
            bad, step = bad - step, 2 * step
        good = max(bad - step, queue.offset_min - 1)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if is_whole(middle) else (good, middle)
        return bad

    def offset_by_time(self, topic: str, queue_id: int, time_ms: int) -> int:
        """The first message stored at `time_ms` or later, the queue's end without one."""
        return self._reader.offset_by_time(topic, queue_id, time_ms)

    def units(self, topic: str, queue_id: int, start: int, count: int) -> bytes:
        """Consume-queue units of 20 bytes from offset `start`: up to `count`, fewer at a file's
        end; empty when there are none."""
        return bytes(self._reader.units(topic, queue_id, start, count))

    def unflushed_units(self, topic: str, queue_id: int) -> tuple[int, bytes]:
        """What the log alone has: the first offset, and the units; (0, nothing) as a rule."""
        queue = self._queues.by_key.get((topic, queue_id))
        return (0, b"") if queue is None else (queue.tail_start, bytes(queue.tail))

    def add_units(self, topic: str, queue_id: int, offset: int, units: bytes) -> None:
        """What another reader of the store has found by `unfiled_units`."""
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
        """As `LogReader.read`."""
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
        """Records of the queue as places in the log, in columns. With `skips` what is gone or
        damaged is counted instead of an error. A queue that is not there is empty."""
        from sluicemq.store.columns.scan import RangeScan  # noqa: PLC0415 - NumPy and pyarrow

        queue, reader = self._queues.get_unchecked((topic, queue_id)), self._reader
        select = columns = None
        if message_filter is not None:
            select = reader.unit_selector(message_filter)
            columns = reader.column_scan(queue, message_filter)
        return RangeScan(
            self._log, reader.soundness, queue, message_filter, select, columns,
            skips=skips, check_bodies=check_bodies,
        )  # fmt: skip

    def record_at(self, physical_offset: int) -> bytes | None:
        """The record that begins there, wholly checked; None when none does."""
        return self._reader.record_at(physical_offset)

    def scan(self, start: int | None = None) -> Iterator[LogRecord]:
        """Every good record of the log in order, from `start` (where one begins) on."""
        return self._log.scan(self._log.start if start is None else start)

    def close(self) -> None:
        self._queues.close()
        self._log.close()


def check_recovery(
    reader: StoreReader, root: str, *, commit_log_path: str = "", consume_queue_path: str = "",
    files: Files = SYSTEM_FILES, wanted: Wanted = lambda topic, queue_id: True,
) -> None:  # fmt: skip
    """Raise StoreDamagedError if `reader` shows fewer messages of the wanted queues than a broker
    would that starts on the store, or if no broker would start on it.

    The store is recovered in memory (`recover`), which costs what a start costs; nothing on disk
    changes. A log that ends before the checkpoint of a store that was not stopped in order is only
    logged: a copy of a running broker's store, whose log is copied first, is no different. Do not
    call this for the store of a running broker: what its files lack, the broker has in memory.
    """
    config = StoreConfig(
        root=root, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path
    )
    over = overlay(files)
    config = detect_file_sizes(config, over)
    fix = (
        f"Start a broker on the store once, or run `sluice store repair {root} --write`: both build"
        " the queues from the log."
    )

    def refuse() -> None:
        raise StoreDamagedError(
            f"Consume queues in {config.consume_queue_path} are missing or shorter than the"
            " checkpoint says.", fix=fix,
        )  # fmt: skip

    log, queues, checkpoint, after_crash, _, recovery = prepare_recovery(config, over)
    try:
        try:
            recovery.load(after_crash=after_crash)
            recovery.run(refuse)
        except StoreDamagedError as error:
            if not after_crash or not _ends_early(log, checkpoint.latest):
                raise
            logger.warning(
                "%s If this is a copy of a running broker's store, that is nothing unusual: the"
                " messages up to there are read.", error.fact + ".",
            )  # fmt: skip
            return
        for queue in queues:
            if not wanted(*queue.key):
                continue
            low, end = reader.queue_offsets(*queue.key)[0], reader.verified_end(*queue.key)
            if queue.next_offset > end or (low > queue.offset_min and end > queue.offset_min):
                raise StoreDamagedError(
                    f"The files of queue {queue.queue_id} of {queue.topic!r} in {root} show the"
                    f" messages {low} to {end - 1}, and the log has {queue.offset_min} to"
                    f" {queue.next_offset - 1}.", fix=fix,
                )  # fmt: skip
    finally:
        queues.close()
        log.close()


def _ends_early(log: CommitLog, mark: Checkpoint | None) -> bool:
    """Return whether the log is whole up to a place before the mark, and nothing follows there."""
    last = log.segments.last
    if mark is None or last is None:
        return False
    end = last.base
    for record in log.scan(last.base):
        end = record.end
    return end < mark.log_offset and find_next_record(log, end) is None


def _add_tail(root: str, log: CommitLog, queues: ConsumeQueues, wanted: Wanted) -> None:
    """Let the wanted queues end where the log says, in memory: a running broker of ours keeps new
    units there for a second, and one that was killed never wrote them.

    As the next start would find them behind the mark, but only units that directly follow what a
    queue has. Nothing for a store that was stopped in order, and for one without a mark: RocketMQ
    writes its units at once. A young store of ours has no checkpoint yet.
    """
    files, path = log.segments.files, f"{root}/checkpoint"
    mark = read_checkpoint(files, path).latest
    if not files.exists(f"{root}/abort") or (mark is None and files.exists(path)):
        return

    def add(topic: bytes, queue_id: int, offset: int, units: bytes) -> None:
        key = (topic.decode(errors="replace"), queue_id)
        if not wanted(*key) or not queues.deleted.is_live(key[0], UNIT.unpack_from(units)[0]):
            return
        queue = queues.by_key.get(key)
        if queue is None:
            queue = queues.get_unchecked(key)
            queue.reset_to(offset)
        queue.extend(offset, units)

    for found in sweep_records(log, log.start if mark is None else max(mark.log_offset, log.start)):
        if not isinstance(found, LogRecord):
            for group in found.groups:
                if group.is_consecutive:
                    units = group.units.tobytes()
                    add(group.topic, group.queue_id, int(group.offsets[0]), units)
        elif found.is_queued:
            unit = UNIT.pack(found.position, found.size_bytes, found.tag_code())
            add(found.topic, found.queue_id, found.queue_offset, unit)


# --- looks at the directory alone: no queue is opened


def topics_of_store(
    root: str, *, consume_queue_path: str = "", files: Files = SYSTEM_FILES
) -> dict[str, list[int]]:
    """Topic -> ids of its queues, by name; none for one that is declared (topics.json) and has no
    message yet."""
    directory = consume_queue_path or f"{root}/consumequeue"
    found: dict[str, list[int]] = {}
    for topic in text_names(files, directory):
        names = files.names(f"{directory}/{topic}")
        found[topic] = sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def declared(text: str) -> list[str]:
        return list(json.loads(text)["topicConfigTable"])

    with suppress(StoreDamagedError, OSError):  # only the names of empty topics are missed
        for topic in load_text(files, f"{root}/config/topics.json", declared) or ():
            found.setdefault(topic, [])
    return dict(sorted(found.items()))


def has_batch_queues(root: str, topic: str, *, files: Files = SYSTEM_FILES) -> bool:
    """Whether a topic's queues are of the kind that RocketMQ has for batches, which is not read
    here (BatchCQ, spec/store.md §3)."""
    return files.exists(f"{root}/batchconsumequeue/{topic}")
