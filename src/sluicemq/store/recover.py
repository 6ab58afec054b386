"""Recovery: find the end of the log when a store is opened, and make the queues agree with it.

What a start does depends on how the store was closed:

    clean shutdown (no `abort`)    the queues are complete, and the log ends behind the record of
                                   the last unit; this takes a few reads, however large the store is
    crash, SluiceMQ's checkpoint   the queues are cut back to the checkpoint, and the log is walked
                                   from there
    crash, other checkpoint        the walk begins at the newest file that was on disk according to
    (a store of RocketMQ)          the time in RocketMQ's checkpoint (spec/store.md §7), else at the
                                   first file
    queues missing or too short    the whole log is walked, and all queues are rebuilt

Queues are missing or wrong if the checkpoint's digest (number of queues, sum of their ends) does
not match; if a file is missing or has another size; if a first or last unit does not lead to its
record; if the log has records of a queue before those of its first file; or if a walk finds a gap
in the offsets of a queue.

The end of the log is the end of the last valid record. What follows is a torn tail: later files are
removed, the rest of the file is zeroed, both are synced before the first append, and units that
point there are dropped. Invalid bytes before the checkpoint are damage: the start fails with a
report before anything is changed. In a store without a checkpoint they are damage if a record
behind them is older than the time up to which, says RocketMQ's checkpoint, everything was on disk.

Invalid bytes behind the checkpoint with valid records behind them have two causes. A power loss
keeps some of the writes that were not synced and loses others, possibly earlier ones. A lost write
reads as zeros, up to its end or in whole sectors (`may_be_lost_write`). Everything else is damage:
a disk changes bits, it does not remove them.

`dispatch` adds the records to their queues.
"""

import logging
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from sluicemq.config import StoreConfig
from sluicemq.errors import ProtocolError, StoreDamagedError
from sluicemq.files import Files
from sluicemq.record.codec import RecordHead, parse_head
from sluicemq.record.layout import BLANK, MAGIC_BLANK, MAGIC_V1, RECORD_BYTES_MIN, RECORD_HEAD
from sluicemq.store.directory import (
    Checkpoint,
    CheckpointContent,
    DeletedTopics,
    read_checkpoint,
    was_slave,
)
from sluicemq.store.dispatch import (
    Dispatcher,
    find_next_record,
    iter_whole_records,
    sweep_records,
)
from sluicemq.store.log import (
    BLANK_BYTES,
    DELAYS_MS,
    SEARCH_BYTES_MAX,
    CommitLog,
    LogRecord,
    parse_log_record,
)
from sluicemq.store.queues import UNIT_BYTES, ConsumeQueues, Queue, Unit
from sluicemq.store.segments import Segment, fill_holes

logger = logging.getLogger(__name__)

CLEAN_TAIL_BYTES: Final = 16 << 20
"""After a clean shutdown this many bytes behind the log's end are checked to be zeros."""
SECTOR_BYTES: Final = 512
_ZEROS_MIN: Final = 2
_SIZE_BYTES: Final = 4
_MAGIC_START: Final = BLANK.struct.pack(0, MAGIC_V1)[4:7]
_MAGIC_BLANK: Final = BLANK.struct.pack(0, MAGIC_BLANK)[4:]
_POSITION: Final = struct.Struct(">q")
_POSITION_AT: Final = RECORD_HEAD.at("physical_offset")


class RecoveryResult(NamedTuple):
    """The result of a recovery.

    `end` is the position at which the log ends, `store_time_ms` the store time of its last record
    (0 if there is none), and `units_added` the number of units that the queues lacked. `is_rebuilt`
    says that all queues were rebuilt.
    """

    end: int
    store_time_ms: int
    units_added: int
    is_rebuilt: bool


class StoreParts(NamedTuple):
    """The parts of a store that recovery needs, before it has run.

    `after_crash` says that `abort` was found. `was_followed` says that the store was then a
    slave's.
    """

    log: CommitLog
    queues: ConsumeQueues
    checkpoint: CheckpointContent
    after_crash: bool
    was_followed: bool
    recovery: "Recovery"


def prepare_recovery(config: StoreConfig, files: Files) -> StoreParts:
    """Read the small files of the store in `config.root`: checkpoint, `abort`, deleted topics.

    Returns them with log and queues, which are empty: `Recovery.load` loads them. Nothing is
    changed. Raises OSError.
    """
    abort_path = f"{config.root}/abort"
    log = CommitLog(
        files,
        config.commit_log_path,
        config.commit_log_file_bytes,
        requires_checksum=config.checksum_property_required,
    )
    queues = ConsumeQueues(
        files,
        config.consume_queue_path,
        config.consume_queue_file_bytes,
        long_topics=config.version_by_topic_length,
        deleted=DeletedTopics.load(files, config.root),
    )
    checkpoint = read_checkpoint(files, f"{config.root}/checkpoint")
    was_followed = was_slave(files, abort_path)
    recovery = Recovery(
        log,
        queues,
        checkpoint,
        check_crc=config.check_crc_on_recover,
        root=config.root,
        delays_ms=config.delay_levels_ms,
        was_followed=was_followed,
    )
    return StoreParts(log, queues, checkpoint, files.exists(abort_path), was_followed, recovery)


class Recovery:
    """The recovery of one start: call `load`, then `run`. Log and queues can be used after that."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        checkpoint: CheckpointContent,
        *,
        check_crc: bool,
        root: str = "",
        delays_ms: Sequence[int] = DELAYS_MS,
        was_followed: bool = False,
    ) -> None:
        """Create the recovery of a log and queues that are not loaded yet.

        `checkpoint` is the content of the file `checkpoint`. `check_crc` checks the CRCs of records
        (checkCRCOnRecover). `root` is the store's directory, which errors name. `delays_ms` are the
        delays of level 1, 2, … (messageDelayLevel), for rebuilt units. `was_followed` means that a
        master wrote the log, in pieces that begin and end anywhere.
        """
        self._dispatcher = Dispatcher(log, queues, check_crc=check_crc, delays_ms=delays_ms)
        self._root = root or log.segments.directory.rpartition("/")[0]
        self._log = log
        self._queues = queues
        self._checkpoint = checkpoint
        self._check_crc = check_crc
        self._latest: Checkpoint | None = None
        """SluiceMQ's checkpoint if it can be used, else None."""
        self._was_followed = was_followed
        self._after_crash = False
        self._crash_start = 0
        """The position at which the walk begins after a crash; 0 after a clean shutdown."""
        self._is_incomplete = False
        """Whether queues are missing or wrong, so that all queues must be rebuilt."""
        self._wrong_queues: list[Queue] = []
        """Queues whose first or last unit is wrong, possibly of topics that are being deleted."""

    def load(self, *, after_crash: bool) -> None:
        """Load log and queues from their files, and find out which files can be trusted.

        `after_crash` means that `abort` was found. Then the queues are cut back to the checkpoint.
        After a clean shutdown only empty files are removed. Queues that are wrong are noted, and
        `run` rebuilds them. Raises StoreDamagedError if files of the log are missing, exchanged or
        of another size, or if the setting of the queues' file size seems wrong. Raises OSError.
        """
        log = self._log
        log.segments.load()
        for segment in log.segments:
            fill_holes(segment)
            self._require_own_bytes(segment)

        self._after_crash = after_crash
        self._latest = self._find_usable_checkpoint()
        before = None
        if after_crash:
            before = self._crash_start = self._find_crash_start()
        try:
            self._queues.load(
                after_crash=after_crash,
                before=before,
                log_start=log.start,
                inspect=self._note_if_wrong,
            )
        except StoreDamagedError as error:
            if self._queues.may_have_other_file_size():
                raise  # probably the setting is wrong, not the files
            logger.warning("%s", error.fact)
            self._is_incomplete = True

    def run(self, on_rebuild: Callable[[], None]) -> RecoveryResult:
        """Find the log's end and make the queues agree with it. `abort` must exist by now.

        Adds the units (entries) that the queues lack, or rebuilds all queues. Removes what is
        behind the end from log and queues, and syncs the log. `on_rebuild()` is called before all
        queues are rebuilt; it must make sure, durably, that no later start trusts the queues.
        Raises StoreDamagedError if the log is damaged rather than torn by a crash; then the log was
        not changed. Raises OSError.
        """
        # Topics that were being deleted may have wrong queues, so they are removed first.
        self._queues.finish_deletions()
        if any(queue in self._queues for queue in self._wrong_queues):
            self._is_incomplete = True

        end = self._complete_queues()
        is_rebuilt = end is None
        if end is None:
            end = self._rebuild_queues(on_rebuild)

        # Damage must be reported before anything behind the end is removed.
        self._raise_if_damaged(end)
        self._set_end(end)
        store_time_ms = self._find_last_store_time_ms()
        return RecoveryResult(end, store_time_ms, self._dispatcher.units_added, is_rebuilt)

    # --- steps of `load`

    def _require_own_bytes(self, segment: Segment) -> None:
        """Raise StoreDamagedError if `segment` and another file of the log have exchanged names.

        They have if the first record of `segment` is valid at the begin of the other file, and the
        other file has no valid record there.
        """
        log = self._log
        encoded_position = segment.read(segment.base + _POSITION_AT, _POSITION.size)
        segment.release()
        (position,) = _POSITION.unpack(encoded_position)
        if position == segment.base:
            return
        other_segment = log.segments.at(position)
        if other_segment is None or other_segment.base != position:
            return
        if log.find_record(position, check_crc=True) is not None:
            return  # the other file has its record: these bytes are old ones behind the log's end
        view = segment.data_view(segment.end)
        if parse_log_record(view, 0, position, check_crc=True) is None:
            return
        raise StoreDamagedError(
            f"{segment.path} contains the bytes of another file: the stored position of its"
            f" first record is {position}, not {segment.base}.",
            fix=f"Rename the file to {position:020d} and the other files accordingly, or"
            " restore them from a copy.",
        )

    def _find_crash_start(self) -> int:
        """Return the position from which the log must be read after a crash.

        It is the position of SluiceMQ's checkpoint. Without one, it is the begin of the newest file
        whose first record was on disk according to RocketMQ's checkpoint, or else the log's start.
        """
        if self._latest is not None:
            return self._latest.log_offset
        for segment in reversed(list(self._log.segments)):
            first_record = self._log.find_record(segment.base, check_crc=self._check_crc)
            if (
                first_record is not None
                and first_record.store_time_ms <= self._checkpoint.java_time_ms
            ):
                return segment.base
        return self._log.start

    def _find_usable_checkpoint(self) -> Checkpoint | None:
        """Return SluiceMQ's checkpoint; None if there is none, or the log begins behind it.

        Raises StoreDamagedError if files of the log that the checkpoint covers are missing. If
        first files are missing but RocketMQ has used the store since, only a warning is logged.
        """
        checkpoint = self._checkpoint.latest
        if checkpoint is None:
            return None
        segments = self._log.segments
        if checkpoint.log_offset and not len(segments):
            raise StoreDamagedError(
                f"There is no file in {segments.directory}, but the checkpoint says that"
                f" {checkpoint.log_offset} bytes of the log were safely on disk.",
                fix="Restore the files (is the disk mounted?). To start with an empty store and"
                f" lose all messages, remove checkpoint and consumequeue from {self._root}.",
            )
        if 0 <= checkpoint.log_start < segments.start:
            self._report_missing_first_files(checkpoint)
        if checkpoint.log_offset < segments.start:
            return None
        if checkpoint.log_offset > segments.end:
            raise self._make_early_end_error(segments.end, checkpoint)
        return checkpoint

    def _report_missing_first_files(self, checkpoint: Checkpoint) -> None:
        """Raise StoreDamagedError: the first files of the log are missing since the checkpoint.

        If RocketMQ has used the store since, its retention may have deleted them: then only log a
        warning.
        """
        segments = self._log.segments
        fact = (
            f"{segments.directory} begins at {segments.start:020d}, but the log began at"
            f" {checkpoint.log_start} at the last checkpoint, and retention has not deleted"
            " the files before."
        )
        if self._checkpoint.is_checkpoint_current:
            raise StoreDamagedError(
                fact,
                fix="Restore the files from a copy. If you removed them on purpose,"
                f" `sluice store repair {self._root} --write` lets the log begin there.",
            )
        logger.warning(
            "%s RocketMQ has used the store since; its retention may have deleted them.", fact
        )

    # --- steps of `run`

    def _complete_queues(self) -> int | None:
        """Add the units (entries) that the queues lack. Return the end of the valid log.

        Returns None if all queues must be rebuilt: some are missing or wrong, or lack early units.
        """
        if self._is_incomplete:
            return None
        start = self._find_walk_start()
        if start is None:
            return None
        return self._dispatch_from(start, may_gap=start == self._log.start)

    def _rebuild_queues(self, on_rebuild: Callable[[], None]) -> int:
        """Remove all queues, build them again from the whole log, and return its valid end.

        `on_rebuild()` is called before that. Raises StoreDamagedError, with nothing changed, if the
        log ends before the checkpoint.
        """
        # Damage must be reported before the queues are removed: they tell what was lost.
        self._require_log_to_checkpoint()
        on_rebuild()
        logger.warning("consume queues are missing or too short; rebuilding all from the log")
        self._queues.remove_all()
        self._dispatcher.reset()
        end = self._dispatch_from(self._log.start, may_gap=True)
        return self._log.start if end is None else end

    def _require_log_to_checkpoint(self) -> None:
        """Raise StoreDamagedError if the valid records end before the checkpoint's position.

        Reads the log without changing anything. Does nothing without a usable checkpoint.
        """
        log = self._log
        checkpoint = self._latest
        if checkpoint is None:
            return
        valid_end = log.start
        for records in sweep_records(log, log.start, check_crc=self._check_crc):
            valid_end = records.end
            if valid_end >= checkpoint.log_offset:
                return
        self._raise_if_damaged(log.skip_blank(valid_end))

    def _find_last_store_time_ms(self) -> int:
        """Return the store time of the log's last record; 0 if there is none.

        If this run has read no record, the last unit of all queues locates the last record.
        """
        if self._dispatcher.last_store_time_ms:
            return self._dispatcher.last_store_time_ms
        unit = self._queues.find_last_unit()
        record = None if unit is None else self._find_record_of(unit)
        return 0 if record is None else record.store_time_ms

    def _find_walk_start(self) -> int | None:
        """Return the position from which to read the log; None if all queues must be rebuilt."""
        if self._after_crash:
            checkpoint = self._latest
            if checkpoint is not None and not self._do_queues_match(checkpoint):
                return None
            return self._crash_start
        return self._find_walk_start_after_shutdown()

    def _do_queues_match(self, checkpoint: Checkpoint) -> bool:
        """Return whether the queues, cut back to a checkpoint, are the queues that it describes.

        The number of queues and the sum of their offsets must be equal to the numbers in the
        checkpoint, and the last of all units (20-byte entries) must locate a record. If not, queues
        or log are damaged, and rebuilding the queues finds out which. Between the last unit's
        record and the checkpoint there may be records of deleted topics.
        """
        if self._queues.digest() != (checkpoint.queues, checkpoint.units):
            return False
        last_unit = self._queues.find_last_unit()
        if last_unit is None or last_unit.physical_offset < self._log.start:
            return True
        return self._find_record_of(last_unit, check_crc=self._check_crc) is not None

    def _find_walk_start_after_shutdown(self) -> int | None:
        """Return the position from which to read the log after a clean shutdown.

        It is the end of the last unit's record, or the checkpoint's position if that is greater.
        First removes units whose records the log does not have. Returns None if all queues must be
        rebuilt.
        """
        log = self._log
        checkpoint = self._latest
        for queue in self._queues:
            self._drop_units_without_records(queue)
        if self._is_incomplete:
            return None
        start = log.start
        if checkpoint is not None:
            # With records behind the checkpoint, the queues may have grown since.
            has_more = next(log.scan(checkpoint.log_offset, check_crc=False), None) is not None
            is_digest_right = self._queues.digest() == (checkpoint.queues, checkpoint.units)
            if not has_more and not is_digest_right:
                return None
            start = max(start, checkpoint.log_offset)
        last_unit = self._queues.find_last_unit()
        if last_unit is not None:
            start = max(start, last_unit.end)
        return start

    def _drop_units_without_records(self, queue: Queue) -> None:
        """Remove the last units (entries) of a queue if the log does not have their records.

        Stops at a unit that has its record, is blank, or is before the log's start. A removal is
        logged. If the checkpoint covers a missing record, queue or log is damaged: then removes
        nothing, and sets `_is_incomplete`.
        """
        checkpoint = self._latest
        end = queue.next_offset
        while end > queue.offset_min:
            unit = queue.unit(end - 1)
            if unit is not None:
                if unit.is_blank or 0 <= unit.physical_offset < self._log.start:
                    break
                if self._leads_to_record(unit, queue, end - 1):
                    break
                if checkpoint is not None and unit.physical_offset < checkpoint.log_offset:
                    # The checkpoint says that the record exists: queue or log is damaged.
                    self._is_incomplete = True
                    return
            end -= 1
        if end < queue.next_offset:
            logger.warning(
                "queue %s/%d now ends at %d instead of %d: the log does not contain the rest",
                queue.topic,
                queue.queue_id,
                end,
                queue.next_offset,
            )
            queue.truncate(end)

    def _note_if_wrong(self, queue: Queue) -> None:
        """Add a queue to `_wrong_queues` if its first or last unit is wrong.

        `Queue.load` calls this while the last units are in memory.
        """
        if not (self._has_valid_first_unit(queue) and self._has_valid_last_unit(queue)):
            self._wrong_queues.append(queue)

    def _has_valid_last_unit(self, queue: Queue) -> bool:
        """Return whether, after a crash, the last unit of a queue locates its record.

        It does not in a file of another store or queue, or in an older copy. Returns True if there
        is nothing to check: without a checkpoint, after a clean shutdown, without units, and for a
        unit that is blank or before the log's start.
        """
        if self._latest is None or not self._after_crash:
            return True
        first_offset = queue.segments.start // UNIT_BYTES
        last_offset = queue.next_offset - 1
        if last_offset < first_offset:
            return True
        unit = queue.read_unit(last_offset)
        if unit is None or unit.is_blank or unit.physical_offset < self._log.start:
            return True
        return self._leads_to_record(unit, queue, last_offset)

    def _has_valid_first_unit(self, queue: Queue) -> bool:
        """Return whether the first unit in a queue's files is the first one that must be there.

        The unit must not locate another queue's record. If the first files of the queue are
        missing, the log must not have an earlier record of the queue, because retention removes
        files of the log before files of queues. Finding that out reads the log up to the first
        unit's record.
        """
        first_offset = queue.segments.start // UNIT_BYTES
        unit = queue.read_unit(first_offset) if first_offset < queue.next_offset else None
        if unit is None:
            search_end = self._crash_start or self._log.segments.end
        else:
            if unit.is_blank or unit.physical_offset < self._log.start:
                return True
            if self._leads_to_other_record(unit, queue, first_offset):
                return False
            search_end = unit.physical_offset

        # Only a queue whose first files are missing begins at the beginning of a later file.
        begins_with_file = first_offset * UNIT_BYTES % queue.segments.file_bytes == 0
        lacks_first_files = first_offset > 0 and begins_with_file
        if not lacks_first_files or not self._queues.deleted.is_live(queue.topic, search_end):
            return True
        return not self._has_record_before(queue, search_end)

    def _has_record_before(self, queue: Queue, end: int) -> bool:
        """Return whether the log has a record of a queue before position `end`.

        Records from before the topic was deleted do not count.
        """
        is_live = self._queues.deleted.is_live
        for record in self._log.scan(self._log.start, check_crc=False):
            if record.position >= end:
                return False
            if not record.is_queued or not record.belongs_to(queue.key):
                continue
            if is_live(queue.topic, record.position):
                return True
        return False

    def _leads_to_record(self, unit: Unit, queue: Queue, offset: int) -> bool:
        """Return whether a unit locates the record with this offset of the queue.

        A placeholder, which a repair has written in place of a lost message, counts as well.
        """
        record = self._find_record_of(unit)
        if record is None:
            return False
        return record.is_placeholder or record.belongs_to(queue.key, offset)

    def _leads_to_other_record(self, unit: Unit, queue: Queue, offset: int) -> bool:
        """Return whether a unit leads to the record of another queue or offset.

        A unit without a record does not: the log may end before it after a crash.
        """
        has_record = self._find_record_of(unit) is not None
        return has_record and not self._leads_to_record(unit, queue, offset)

    def _find_record_of(self, unit: Unit, *, check_crc: bool = False) -> LogRecord | None:
        """Return the valid record with the position and size in a unit; None if there is none."""
        record = self._log.find_record(unit.physical_offset, check_crc=check_crc)
        if record is None or record.size_bytes != unit.size_bytes:
            return None
        return record

    def _dispatch_from(self, start: int, *, may_gap: bool) -> int | None:
        """Add the records from `start` on to their queues. Return the end of the valid log.

        That is behind the last valid record and the blank record that may follow. Unless `may_gap`,
        returns None where a queue lacks the units before a record.
        """
        end = self._dispatcher.dispatch_records(start, may_gap=may_gap)
        if end is None:
            return None
        self._dispatcher.resolve_suspects()
        return self._log.skip_blank(end)

    # --- setting the end

    def _set_end(self, end: int) -> None:
        """Remove everything behind position `end` from log and queues. The log then ends there.

        Changes of the log are synced. After a crash, all files that were read are synced too.
        """
        segments = self._log.segments
        if self._clear_log_behind(end):
            self._sync_log(end - 1)
            segments.files.sync_directory(segments.directory)
        if self._after_crash:
            # A killed process leaves records that are written but not on disk. Readers will see
            # them, so they must be durable.
            self._sync_log(self._crash_start)
        self._queues.truncate_to_log(end)
        self._queues.deleted.cut(end)
        self._log.set_end(end)

    def _clear_log_behind(self, end: int) -> bool:
        """Remove the bytes behind position `end` from the log. Return whether bytes were changed.

        After a clean shutdown zeros follow, unless other software wrote there. Then only the next
        CLEAN_TAIL_BYTES are zeroed: a torn write over old bytes could make both one valid record.
        """
        segments = self._log.segments
        is_at_checkpoint = self._latest is not None and end == self._latest.log_offset
        if self._after_crash or not is_at_checkpoint:
            return segments.truncate(end)
        segment = segments.at(end)
        if segment is None:
            return False
        return segment.zero_range(end, min(end + CLEAN_TAIL_BYTES, segment.end))

    def _sync_log(self, start: int) -> None:
        """Sync the files of the log that contain bytes behind `start`."""
        for segment in self._log.segments:
            if segment.end > start:
                segment.file().sync()
                segment.release()

    # --- damage

    def _raise_if_damaged(self, end: int) -> None:
        """Raise StoreDamagedError if the log is damaged at `end`, rather than torn by a crash.

        `end` is the position behind the last valid record. The log is damaged if `end` is before
        the checkpoint, or if valid records follow that a lost write cannot explain. If it is not
        damaged, logs what will be removed behind `end`, if anything.
        """
        log = self._log
        checkpoint = self._latest
        if checkpoint is not None and end < checkpoint.log_offset:
            raise self._make_early_end_error(end, checkpoint)
        if not self._after_crash:
            return
        following = find_next_record(log, end)
        if following is None:
            # Nothing valid follows. Bytes that are not zero are a record that was not written
            # completely.
            if any(_read_between(log, end, end + RECORD_BYTES_MIN)):
                logger.warning("the log ends at %d: a torn record behind it is removed", end)
        elif self._was_followed:
            # A slave writes pieces that begin and end anywhere. The master sends them again.
            logger.warning("the log ends at %d: the bytes from a master behind it are removed", end)
        else:
            self._explain_following(end, following)

    def _explain_following(self, end: int, following: LogRecord) -> None:
        """Raise StoreDamagedError if a power loss cannot explain a gap between valid records.

        `end` is the position behind the last valid record before the gap, and `following` the
        record after the gap. If a power loss explains the gap, logs that what follows is removed.
        """
        log = self._log
        # With SluiceMQ's checkpoint, its position says more than RocketMQ's time.
        durable_ms = self._checkpoint.java_time_ms if self._latest is None else 0
        if following.store_time_ms <= durable_ms:
            reason = f"everything stored until {durable_ms} ms was safely on disk."
            raise self._make_damage_error(end, f"The checkpoint says that {reason}")
        if following.store_time_ms < self._dispatcher.last_store_time_ms:
            return  # an old record: RocketMQ does not zero the bytes that it removes
        gap = _read_between(log, end, following.position)
        ends_file = (end + len(gap)) % log.segments.file_bytes == 0
        if not may_be_lost_write(gap, end, ends_file=ends_file):
            reason = "A power loss cannot be the cause: lost writes read as zeros."
            raise self._make_damage_error(end, reason)
        logger.error(
            "the log ends at %d: a power loss has destroyed what was written there; %d messages"
            " behind it, which were not synced either, are removed",
            end,
            sum(1 for _ in iter_whole_records(log, following.position)),
        )

    def _make_early_end_error(self, end: int, checkpoint: Checkpoint) -> StoreDamagedError:
        """Return the error for a log that ends before the checkpoint."""
        covered = f"everything before {checkpoint.log_offset} was safely on disk."
        return self._make_damage_error(end, f"The checkpoint says that {covered}")

    def _make_damage_error(self, position: int, reason: str) -> StoreDamagedError:
        """Make the error for a log that is damaged at `position`: what is lost, and a fix.

        `reason` is a sentence that says why this is damage.
        """
        segment = self._log.segments.at(position)
        if segment is None:
            directory = self._log.segments.directory
            damage = f"The commit log in {directory} is damaged at {position}: it ends there"
            following = None
        else:
            index = position - segment.base
            fault = self._log.explain_bad_record(position)
            damage = (
                f"The commit log is damaged at {position} (byte {index} of {segment.path}): {fault}"
            )
            following = find_next_record(self._log, position)
        if following is None:
            lost = "No valid record was found behind it."
        else:
            lost = (
                f"Valid records continue at {following.position}: the"
                f" {following.position - position} bytes from {position} on contain no valid"
                " record."
            )
        return StoreDamagedError(
            f"{damage}. {reason} {lost}",
            fix=f"Nothing was changed. Run `sluice store repair {self._root}` to see what can be"
            " saved, and again with --write to save it; or restore the files from a copy.",
        )


# --- recognizing lost writes


def _read_between(log: CommitLog, start: int, end: int) -> bytes:
    """Return the bytes of the log from `start` to `end`, at most to the end of their file.

    Returns at most `SEARCH_BYTES_MAX` bytes, and b"" if no file contains `start`.
    """
    segment = log.segments.at(start)
    if segment is None:
        return b""
    return segment.read(start, min(end, segment.end, start + SEARCH_BYTES_MAX) - start)


def may_be_lost_write(gap: bytes, start: int, *, ends_file: bool) -> bool:
    """Return whether a power loss can explain bytes without a valid record before valid records.

    `gap` contains these bytes, and `start` is their position in the log. `ends_file` means that the
    next valid record is in the next file. A power loss can explain an empty gap, and one in which
    the end of a write or a whole sector is zero.
    """
    if ends_file:  # the bytes end with a blank record, unless that is lost as well
        if _is_damaged_blank(gap):
            return False
        gap = _strip_blank_at_end(gap)
    if not gap:
        return True

    # The head of the record, if the bytes are exactly one record according to their sizes.
    head = None
    with suppress(ProtocolError):
        head = parse_head(gap)
    if head is not None and head.size_bytes != len(gap):
        head = None

    last_byte = gap[-1]
    if head is not None and head.properties.start == head.properties.stop:
        # An intact record without properties ends with two zero bytes: their length.
        last_byte = gap[head.topic.stop - 1]
    if last_byte == 0:  # the end of the write is lost
        return True
    return _lacks_sector(gap, start, head)


def _is_damaged_blank(gap: bytes) -> bool:
    """Return whether bytes up to the end of a file are a blank record with one wrong half.

    A blank record fills the end of a file: its size, its magic number, then zeros. A lost write
    leaves zeros in one half, so another wrong value there is damage.
    """
    size = gap[:_SIZE_BYTES]
    magic = gap[_SIZE_BYTES:BLANK_BYTES]
    if any(gap[BLANK_BYTES:]):
        return False
    if magic == _MAGIC_BLANK:
        return any(size)
    return int.from_bytes(size) == len(gap) and magic[-1] != 0


def _strip_blank_at_end(gap: bytes) -> bytes:
    """Return `gap`, which ends where its file ends, without the blank record at its end, if any."""
    magic_start = gap.find(_MAGIC_BLANK, _SIZE_BYTES)
    while magic_start >= 0:
        blank_start = magic_start - _SIZE_BYTES
        if int.from_bytes(gap[blank_start:magic_start]) == len(gap) - blank_start:
            return gap[:blank_start]
        magic_start = gap.find(_MAGIC_BLANK, magic_start + 1)
    return gap


def _lacks_sector(gap: bytes, start: int, head: RecordHead | None) -> bool:
    """Return whether `gap` has the zeros that a lost sector of the disk leaves.

    These are zeros in a whole sector, or from the begin of a write to the end of its sector. `gap`
    are bytes at position `start` of the log. `head` is the head of the record that has exactly
    these bytes, or None. A write begins with a record. So zeros within a record whose beginning is
    intact do not begin a write.
    """
    # Up to where the bytes are certainly one record, whose beginning is intact.
    record_end = 0
    if head is not None and head.physical_offset == start:
        record_end = len(gap)
    elif gap[_SIZE_BYTES:].startswith(_MAGIC_START):
        record_end = RECORD_BYTES_MIN
    for sector_end in range(SECTOR_BYTES - start % SECTOR_BYTES, len(gap), SECTOR_BYTES):
        zero_count = sector_end - len(gap[:sector_end].rstrip(b"\0"))
        if zero_count >= SECTOR_BYTES:
            return True
        if zero_count == sector_end:
            # The size at the beginning of an intact record begins with zeros.
            if sector_end >= _SIZE_BYTES or int.from_bytes(gap[:_SIZE_BYTES]) != len(gap):
                return True
        elif zero_count >= _ZEROS_MIN and sector_end > record_end:
            return True
    return False
