"""Finding the end of the log at start-up, and making the queues agree with it.

    stopped in order (no `abort`)   the queues are complete: the log ends behind the record of the
                                    last unit; a few reads, however large the store is
    crashed, our mark is there      queues are cut back to the mark, the log is walked from there
    crashed, no mark (Java's store) the walk begins at the newest file that the checkpoint's time
                                    vouches for (spec/store.md §7), else at the first
    queues missing or too short     everything is walked, all queues are built anew

Queues are found missing by the digest in the mark (how many, and the sum of their ends), by files
that are missing or have a size of their own, by a first or last unit that does not lead to its
record, by records in the log that lie before the first file's, or by a gap in offsets during a
walk. The end of the log is the end of the last good record. What follows is a torn tail: later
files are removed, the rest of the file is zeroed, both are synced before the first append, and
units that point there are dropped. Bad bytes before the mark are damage, and the start stops with a
report before anything is changed; in a store without a mark it is damage when a record behind the
bad bytes is older than the checkpoint, which says that it and everything before was on disk.

Bad bytes behind the mark with good records behind them have two causes. A power loss keeps some of
the writes that were not synced and drops others, also earlier ones: what is dropped reads as zeros,
up to the end of a write or in whole sectors (`is_lost_write`). Everything else is damage: a disk
changes bits, it does not remove them.

How records get into their queues is in `dispatch`.
"""

import logging
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
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
from sluicemq.store.dispatch import Dispatcher, sweep_records
from sluicemq.store.log import (
    BLANK_BYTES,
    DELAYS_MS,
    SEARCH_BYTES_MAX,
    CommitLog,
    LogRecord,
    find_next_record,
    iter_whole_records,
    parse_log_record,
)
from sluicemq.store.queues import UNIT_BYTES, ConsumeQueues, Queue, Unit
from sluicemq.store.segments import fill_holes

logger = logging.getLogger(__name__)

CLEAN_TAIL_BYTES: Final = 16 << 20
SECTOR_BYTES: Final = 512
_ZEROS_MIN: Final = 2
_SIZE_BYTES: Final = 4
_MAGIC_START: Final = BLANK.struct.pack(0, MAGIC_V1)[4:7]
_MAGIC_BLANK: Final = BLANK.struct.pack(0, MAGIC_BLANK)[4:]
_POSITION: Final = struct.Struct(">q")
_POSITION_AT: Final = RECORD_HEAD.at("physical_offset")


class RecoveryResult(NamedTuple):
    """Where the log ends, the last record's store time (0: none), how many units were added."""

    end: int
    store_time_ms: int
    units_added: int
    is_rebuilt: bool


class StoreParts(NamedTuple):
    """What a start finds in a store's directory, and the recovery that is to be run over it."""

    log: CommitLog
    queues: ConsumeQueues
    checkpoint: CheckpointContent
    after_crash: bool
    was_followed: bool
    recovery: "Recovery"


def prepare_recovery(config: StoreConfig, files: Files) -> StoreParts:
    """Return the parts of the store in `config.root` that its recovery needs, with nothing loaded.
    Raises StoreDamagedError, OSError."""
    abort_path = f"{config.root}/abort"
    log = CommitLog(
        files, config.commit_log_path, config.commit_log_file_bytes,
        requires_checksum=config.checksum_property_required,
    )  # fmt: skip
    queues = ConsumeQueues(
        files, config.consume_queue_path, config.consume_queue_file_bytes,
        long_topics=config.version_by_topic_length,
        deleted=DeletedTopics.load(files, config.root),
    )  # fmt: skip
    checkpoint = read_checkpoint(files, f"{config.root}/checkpoint")
    was_followed = was_slave(files, abort_path)
    recovery = Recovery(
        log, queues, checkpoint, check_crc=config.check_crc_on_recover, root=config.root,
        delays_ms=config.delay_levels_ms, was_followed=was_followed,
    )  # fmt: skip
    return StoreParts(log, queues, checkpoint, files.exists(abort_path), was_followed, recovery)


class Recovery:
    """One start-up: `load`, then `run`; log and queues are ready for use after that."""

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
        """`delays_ms`: messageDelayLevel, for units of delayed messages that are built anew.
        `was_followed`: the log is a slave's, written in pieces that begin and end anywhere."""
        self._dispatcher = Dispatcher(log, queues, check_crc=check_crc, delays_ms=delays_ms)
        self._root = root or log.segments.directory.rpartition("/")[0]
        self._log = log
        self._queues = queues
        self._checkpoint = checkpoint
        self._check_crc = check_crc
        self._mark: Checkpoint | None = None
        self._was_followed = was_followed
        self._after_crash = False
        self._start = 0
        self._is_incomplete = False
        self._wrong: list[Queue] = []
        """They do not begin as they must; topics that are being deleted may be among them."""

    def load(self, *, after_crash: bool) -> None:
        """Find the files; after an orderly stop this changes nothing.

        Raises StoreDamagedError when files are missing, exchanged, or of another size.
        """
        log, before = self._log, None
        log.segments.load()
        for segment in log.segments:  # were the names of files exchanged?
            fill_holes(segment)
            data = segment.read(segment.base + _POSITION_AT, _POSITION.size)
            segment.release()
            (position,) = _POSITION.unpack(data)
            other = log.segments.at(position) if position != segment.base else None
            if other is None or other.base != position:
                continue
            if (  # with a record of its own in the other file, these are old bytes behind the end
                log.find_record(position, check_crc=True) is None
                and parse_log_record(segment.data_view(segment.end), 0, position, check_crc=True)
                is not None
            ):
                raise StoreDamagedError(
                    f"{segment.path} holds the bytes of another file: its first record says that"
                    f" it lies at {position}, not at {segment.base}.",
                    fix=f"Its name must be {position:020d}: give the files their names back, or"
                    " bring them back from a copy.",
                )
        self._after_crash = after_crash
        self._mark = self._usable_mark()
        if after_crash and self._mark is not None:
            before = self._start = self._mark.log_offset
        elif after_crash:
            before = self._start = log.start
            for segment in reversed(list(log.segments)):
                first = log.find_record(segment.base, check_crc=self._check_crc)
                if first is not None and first.store_time_ms <= self._checkpoint.java_time_ms:
                    before = self._start = segment.base
                    break
        try:
            self._queues.load(
                after_crash=after_crash, before=before, log_start=log.start, inspect=self._look
            )
        except StoreDamagedError as error:
            if self._queues.may_have_other_file_size():
                raise  # the setting is wrong, not the files
            logger.warning("%s", error.fact)
            self._is_incomplete = True

    def run(self, on_rebuild: Callable[[], None]) -> RecoveryResult:
        """Find the end and make the queues agree. `abort` must exist by now.

        `on_rebuild` has to make sure, durably, that no later start trusts the queues: it is called
        before all are built anew. Raises StoreDamagedError when bytes before the mark are not what
        they must be.
        """
        log, queues = self._log, self._queues
        queues.finish_deletions()
        if not self._is_incomplete:
            self._is_incomplete = any(queue in queues for queue in self._wrong)
        start = None
        if not self._is_incomplete:
            start = self._walk_start()
        end = None if start is None else self._walk(start, may_gap=start == log.start)
        is_rebuilt = end is None
        if end is None:
            mark, good = self._mark, log.start
            if mark is not None:  # damage is said before the queues go: they tell what was lost
                for found in sweep_records(log, good, check_crc=self._check_crc):
                    good = found.end
                    if good >= mark.log_offset:
                        break
                else:
                    self._require_mark(log.skip_blank(good))
            on_rebuild()
            logger.warning("consume queues are missing or too short: building all from the log")
            queues.remove_all()
            self._dispatcher.reset()
            end = self._walk(log.start, may_gap=True)
            end = log.start if end is None else end
        self._require_mark(end)
        self._finish(end)
        time_ms = self._dispatcher.last_store_time_ms
        if not time_ms:
            unit = self._queues.find_last_unit()
            last = self._record_of(unit) if unit is not None else None
            time_ms = last.store_time_ms if last is not None else 0
        return RecoveryResult(end, time_ms, self._dispatcher.units_added, is_rebuilt)

    def _usable_mark(self) -> Checkpoint | None:
        mark, segments = self._checkpoint.latest, self._log.segments
        if mark is not None and mark.log_offset and not len(segments):
            raise StoreDamagedError(
                f"There is no file in {segments.directory}, and the checkpoint says that"
                f" {mark.log_offset} bytes of the log were safely on disk.",
                fix="Bring the files back (is the disk mounted?). To begin anew and lose all"
                f" messages, remove checkpoint and consumequeue from {self._root}.",
            )
        if mark is not None and 0 <= mark.log_start < segments.start:
            fact = (
                f"{segments.directory} begins at {segments.start:020d}, and no retention has"
                f" deleted what lies before: the log began at {mark.log_start} at the last"
                " checkpoint."
            )
            if self._checkpoint.is_checkpoint_current:
                raise StoreDamagedError(
                    fact,
                    fix="Bring the files back from a copy. If you removed them on purpose,"
                    f" `sluice store repair {self._root} --write` lets the log begin there.",
                )
            logger.warning("%s RocketMQ has written here since: its retention may have.", fact)
        if mark is None or mark.log_offset < segments.start:
            return None
        if mark.log_offset > segments.end:
            raise self._damage(segments.end, mark)
        return mark

    # --- where the walk begins; None: build everything anew

    def _walk_start(self) -> int | None:
        log, mark = self._log, self._mark
        if self._after_crash and mark is not None:
            last = self._queues.find_last_unit()  # looked at again: the mark vouches for its record
            is_there = last is not None and last.physical_offset >= log.start
            # Queue or log may be damaged: building anew finds out. What lies between that record
            # and the mark stands in no queue: topics that were deleted.
            is_bad = self._queues.digest() != (mark.queues, mark.units) or (
                last is not None
                and is_there
                and not self._record_of(last, check_crc=self._check_crc)
            )
            return None if is_bad else mark.log_offset
        if self._after_crash:
            return self._start
        for queue in self._queues:
            self._trim(queue)
        if self._is_incomplete:
            return None
        if mark is not None:
            goes_on = next(log.scan(mark.log_offset, check_crc=False), None) is not None
            if not goes_on and self._queues.digest() != (mark.queues, mark.units):
                return None
        last = self._queues.find_last_unit()
        return max(log.start, last.end if last else 0, mark.log_offset if mark else 0)

    def _trim(self, queue: Queue) -> None:
        """Drop units at the end whose records are not there (any more: files may be deleted)."""
        end, mark, log_start = queue.next_offset, self._mark, self._log.start
        while end > queue.offset_min:
            unit = queue.unit(end - 1)
            if unit is not None:
                if unit.is_blank or 0 <= unit.physical_offset < log_start:
                    break
                record = self._record_of(unit)
                if record is not None and (
                    record.is_placeholder or record.belongs_to(queue.key, end - 1)
                ):
                    break
                if mark is not None and unit.physical_offset < mark.log_offset:
                    self._is_incomplete = True  # the mark vouches for it: queue or log are damaged
                    return
            end -= 1
        if end < queue.next_offset:
            logger.warning(
                "queue %s/%d ends at %d instead of %d: the log does not hold the rest",
                queue.topic, queue.queue_id, end, queue.next_offset,
            )  # fmt: skip
            queue.truncate(end)

    def _look(self, queue: Queue) -> None:
        if not (self._begins_right(queue) and self._ends_right(queue)):
            self._wrong.append(queue)

    def _ends_right(self, queue: Queue) -> bool:
        """Return whether the last unit before the mark, after a crash, leads to its record: a file
        of another store, or an older copy of another queue, does not. After an orderly stop
        `_trim` finds out."""
        mark, last = self._mark, queue.next_offset - 1
        if mark is None or not self._after_crash or last < queue.segments.start // UNIT_BYTES:
            return True
        unit = queue.read_unit(last)
        if unit is None or unit.is_blank or not self._log.start <= unit.physical_offset:
            return True
        record = self._record_of(unit)
        return record is not None and (record.is_placeholder or record.belongs_to(queue.key, last))

    def _begins_right(self, queue: Queue) -> bool:
        """Whether the first unit of the first file leads to no other queue's record, and no record
        of the queue lies before that one's: retention removes such files of the log first."""
        log, counts = self._log, self._queues.deleted.is_live
        first = queue.segments.start // UNIT_BYTES
        unit = queue.read_unit(first) if first < queue.next_offset else None
        end = self._start or log.segments.end
        if unit is not None:
            if unit.is_blank or unit.physical_offset < log.start:
                return True
            record = self._record_of(unit)
            if (
                record is not None
                and not record.is_placeholder
                and not record.belongs_to(queue.key, first)
            ):
                return False
            end = unit.physical_offset
        is_cut = first > 0 and first * UNIT_BYTES % queue.segments.file_bytes == 0
        if not is_cut or not counts(queue.topic, end):
            return True
        records = log.scan(log.start, check_crc=False)
        return not any(
            record.is_queued
            and record.belongs_to(queue.key)
            and counts(queue.topic, record.position)
            for record in takewhile(lambda record: record.position < end, records)
        )

    def _record_of(self, unit: Unit, *, check_crc: bool = False) -> LogRecord | None:
        scanned = self._log.find_record(unit.physical_offset, check_crc=check_crc)
        return scanned if scanned is not None and scanned.size_bytes == unit.size_bytes else None

    def _walk(self, start: int, *, may_gap: bool) -> int | None:
        """Put every record from `start` on into its queue; the end, or None at a gap: the queue
        lacks units before this one."""
        end = self._dispatcher.dispatch_records(start, may_gap=may_gap)
        if end is None:
            return None
        self._dispatcher.resolve_suspects()
        return self._log.skip_blank(end)

    # --- the end

    def _finish(self, end: int) -> None:
        log, segments = self._log, self._log.segments
        segment = segments.at(end)
        if not self._after_crash and self._mark is not None and end == self._mark.log_offset:
            # After an orderly stop zeros follow, unless others wrote there: a little is looked at,
            # or a torn write over it could later mix old and new to one record.
            is_changed = segment is not None and segment.zero_range(
                end, min(end + CLEAN_TAIL_BYTES, segment.end)
            )
        else:
            is_changed = segments.truncate(end)
        if is_changed:
            self._sync_log(end - 1)
            segments.files.sync_directory(segments.directory)
        if self._after_crash:
            # A killed process leaves written records that are not on disk: readers see them now.
            self._sync_log(self._start)
        self._queues.truncate_to_log(end)
        self._queues.deleted.cut(end)
        log.set_end(end)

    def _sync_log(self, start: int) -> None:
        for segment in self._log.segments:
            if segment.end > start:
                segment.file().sync()
                segment.release()

    # --- damage

    def _require_mark(self, end: int) -> None:
        """Raise for damage before the end that the checkpoint vouches for, and behind it."""
        log, mark = self._log, self._mark
        if mark is not None and end < mark.log_offset:
            raise self._damage(end, mark)
        found = find_next_record(log, end) if self._after_crash else None
        if found is None:
            if self._after_crash and any(_bytes_between(log, end, end + RECORD_BYTES_MIN)):
                logger.warning("the log ends at %d: a torn record behind it is cut off", end)
            return
        if self._was_followed:  # what is lost of its pieces may be of any size, and is sent again
            logger.warning("the log ends at %d: what a master sent behind it is cut off", end)
            return
        known_ms = self._checkpoint.java_time_ms if mark is None else 0
        if found.store_time_ms <= known_ms:
            reason = f"everything stored until {known_ms} ms was safely on disk."
            raise self._damage_error(end, f"The checkpoint says that {reason}")
        if found.store_time_ms < self._dispatcher.last_store_time_ms:
            return  # RocketMQ does not wipe what it cuts off: of an earlier life of the file
        data = _bytes_between(log, end, found.position)
        ends_file = (end + len(data)) % log.segments.file_bytes == 0
        if not may_be_lost_write(data, end, ends_file=ends_file):
            reason = "No power loss leaves that: writes that are lost read as zeros."
            raise self._damage_error(end, reason)
        logger.error(
            "the log ends at %d: a power loss has taken what was written there, and %d messages"
            " behind it, which were not synced either, are cut off",
            end, sum(1 for _ in iter_whole_records(log, found.position)),
        )  # fmt: skip

    def _damage(self, end: int, mark: Checkpoint) -> StoreDamagedError:
        return self._damage_error(
            end, f"The checkpoint says that everything before {mark.log_offset} was safely on disk."
        )

    def _damage_error(self, position: int, reason: str) -> StoreDamagedError:
        """What the start stops with: the place, what is there, what is lost, the cure."""
        segment = self._log.segments.at(position)
        lost = "No good record was found behind it."
        if segment is None:
            directory = self._log.segments.directory
            where = f"The commit log in {directory} is damaged at {position}: it ends there"
        else:
            at = position - segment.base
            what = self._log.explain_bad_record(position)
            where = f"The commit log is damaged at {position} (byte {at} of {segment.path}): {what}"
            found = find_next_record(self._log, position)
            if found is not None:
                lost = (
                    f"Good records go on at {found.position}: the {found.position - position} bytes"
                    f" from {position} on hold no whole record."
                )
        return StoreDamagedError(
            f"{where}. {reason} {lost}",
            fix=f"Nothing was changed. `sluice store repair {self._root}` shows what can be saved,"
            " with --write it saves it; or bring the files back from a copy.",
        )


# --- what a power loss leaves


def _bytes_between(log: CommitLog, start: int, end: int) -> bytes:
    """What lies between a bad place and the whole record at `end`, as far as its file goes."""
    segment = log.segments.at(start)
    if segment is None:
        return b""
    return segment.read(start, min(end, segment.end, start + SEARCH_BYTES_MAX) - start)


def may_be_lost_write(data: bytes, start: int, *, ends_file: bool) -> bool:
    """Whether bytes that hold no whole record, though whole ones follow, can be what a power loss
    has left of writes: they lack their end, or a sector.

    `start` is their place in the log; `ends_file`: the record that follows is in the next file.
    """
    if ends_file:  # it ends with a blank record, or else with what is missing
        size, magic = data[:_SIZE_BYTES], data[_SIZE_BYTES:BLANK_BYTES]
        if not any(data[BLANK_BYTES:]) and (
            any(size)
            if magic == _MAGIC_BLANK
            else int.from_bytes(size) == len(data) and magic[-1] != 0
        ):
            return False  # a blank record of which one half is whole, the other wrong
        at = data.find(_MAGIC_BLANK, _SIZE_BYTES)
        while at >= 0:
            if int.from_bytes(data[at - _SIZE_BYTES : at]) == len(data) - at + _SIZE_BYTES:
                data = data[: at - _SIZE_BYTES]
                break
            at = data.find(_MAGIC_BLANK, at + 1)
    if not data:
        return True
    head = None
    with suppress(ProtocolError):
        head = parse_head(data)
    if head is not None and head.size_bytes != len(data):
        head = None  # not one record, by its sizes
    # A record without properties ends with two zeros by nature.
    is_bare = head is not None and head.properties.start == head.properties.stop
    lacks_end = not data[head.topic.stop - 1 if head is not None and is_bare else -1]
    return lacks_end or _lacks_sector(data, start, head)


def _lacks_sector(data: bytes, start: int, head: RecordHead | None) -> bool:
    """Whether zeros go from the beginning of a sector, or of a write, to the end of the sector.

    A write begins with a record, so such zeros are no part of one whose beginning is there.
    """
    is_begun = data[_SIZE_BYTES:].startswith(_MAGIC_START)
    is_placed = head is not None and head.physical_offset == start
    first_end = len(data) if is_placed else RECORD_BYTES_MIN if is_begun else 0
    for end in range(SECTOR_BYTES - start % SECTOR_BYTES, len(data), SECTOR_BYTES):
        zeros = end - len(data[:end].rstrip(b"\0"))
        if zeros >= SECTOR_BYTES:
            return True
        if zeros == end:  # a size begins with zeros by nature
            if end >= _SIZE_BYTES or int.from_bytes(data[:_SIZE_BYTES]) != len(data):
                return True
        elif zeros >= _ZEROS_MIN and end > first_end:
            return True
    return False
