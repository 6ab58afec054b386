"""Repair a damaged store: `sluice store repair`.

All valid records stay at their positions, and brokers and clients can read on behind the damage:

    1. walk      the whole log, past damaged parts (`LogWalk`): valid records and invalid ranges
    2. count     find out which messages were in the invalid ranges (`LostMessageFinder`)
    3. replace   fill each invalid range with records that brokers accept and readers skip
                 (`build_replacement`); create missing files, and extend short ones
    4. queues    walk over the log again, and make the queues agree with it (`QueueRepair`)
    5. finish    write a new checkpoint, up to the end of the log

Without `write`, only the first two steps are done, and nothing is changed. Every byte that is
overwritten is saved first (`RepairWriter`). If a repair is interrupted, another run completes it.

The log of a repaired replica is no longer the one that the other replicas know. Therefore the files
that say which replica it is, and what it has, are moved to the backup (REPLICA_FILES). The replica
is then in no in-sync set, and does not follow a master as if it had the master's bytes.

Invalid bytes behind the last valid record are damage only up to the position at which the
checkpoint says that the log was durable. Behind it they are the torn tail of a crash, which the
next start removes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any, Final, NamedTuple

import orjson

from sluicemq.errors import StoreError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.store.directory import (
    Checkpoint,
    CheckpointContent,
    read_checkpoint,
    write_checkpoint,
)
from sluicemq.store.log import DELAYS_MS
from sluicemq.store.queues import ConsumeQueues
from sluicemq.store.tools.checks import read_topic_names
from sluicemq.store.tools.edits import RepairWriter
from sluicemq.store.tools.layout import StoreLayout, find_usual_file_bytes
from sluicemq.store.tools.lost import LostMessage, LostMessageFinder
from sluicemq.store.tools.queue_repair import QueueRepair
from sluicemq.store.tools.replacement import Piece, build_replacement
from sluicemq.store.tools.walk import Blank, InvalidRange, LogWalk, Run, find_data_end


class LostRange(NamedTuple):
    """Messages of a queue that are lost: those with offsets `first` to `last`, both included."""

    topic: str
    queue_id: int
    first: int
    last: int

    @property
    def messages(self) -> int:
        """The number of lost messages."""
        return self.last - self.first + 1


class DamagedRange(NamedTuple):
    """Bytes [start, end) of the log that contain no valid record.

    `file` is the path of the file, `reason` a phrase that says what is wrong at `start`, and
    `messages_lost` the number of messages that were in the range.
    """

    file: str
    start: int
    end: int
    reason: str
    messages_lost: int


@dataclass(slots=True)
class RepairReport:
    """What `repair` has found, and what it has done if `is_written` is set.

    The names of the fields are keys of the JSON output.
    """

    root: str
    records: int = 0
    """The number of valid records."""
    log_end: int = 0
    """The position behind the last record."""
    damaged: list[DamagedRange] = field(default_factory=list)
    lost: list[LostRange] = field(default_factory=list)
    not_placed: list[LostRange] = field(default_factory=list)
    """Lost messages for whose placeholders there was no room. If a broker builds the queues again,
    the offsets of the messages behind them change."""
    tail_bytes: int = 0
    """The number of bytes behind the end of the log that were never durable. The next start removes
    them."""
    bad_files: list[str] = field(default_factory=list)
    """Sentences about files that are missing or have another size than the others."""
    mended: int = 0
    """The number of records that are valid except for their queue offset, which a unit of the queue
    contains."""
    wrong_units: int = 0
    """The number of units that do not agree with the log."""
    missing_queues: int = 0
    """The number of queues that have records, but no files."""
    is_written: bool = False
    backup: str = ""
    """The directory that contains the overwritten bytes."""
    bytes_changed: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether nothing has to be repaired. A torn tail does not count."""
        return not (
            self.damaged or self.bad_files or self.mended or self.wrong_units or self.missing_queues
        )

    @property
    def messages_lost(self) -> int:
        """The number of lost messages, of all queues."""
        return sum(lost.messages for lost in self.lost)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON, including `is_sound` and `messages_lost`."""
        fields = asdict(self)
        for name in ("damaged", "lost", "not_placed"):
            fields[name] = [log_range._asdict() for log_range in getattr(self, name)]
        return fields | {"is_sound": self.is_sound, "messages_lost": self.messages_lost}


Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and approximately the bytes in total."""
QUEUE_FILE_BYTES: Final = 6_000_000
"""The size of new queue files if the store has no queue files."""
REPLICA_FILES: Final = ("replica.json", "epochFileCheckpoint", "config/sluiceReplicas.json")
"""The incarnation of the store, the terms of its log, and the confirmed position."""
QUEUE_OFFSET_AT: Final = 20
"""The index of the queue offset in a record (spec/store.md §2.1)."""
_PROGRESS_BYTES: Final = 1 << 22
"""Progress is reported after this many bytes of the log."""


@dataclass(slots=True)
class _RepairPlan:
    """What the first walk has found, and what has to be written.

    `damaged_ranges` are the invalid ranges to fill. `lost_messages` and `times_ms` have an item for
    each of them: the messages that were in it, and the store time of the last valid record before
    it. `tail` are the invalid ranges at the end of the log that were never durable. `log_end` is
    the position behind the last valid record, and `last_time_ms` its store time.

    `offset_fixes` maps the positions of records to their right queue offset. `doubtful_positions`
    are those of records that no queue gets.
    """

    damaged_ranges: list[InvalidRange]
    tail: list[InvalidRange]
    lost_messages: list[list[LostMessage]]
    log_end: int
    times_ms: list[int]
    last_time_ms: int
    offset_fixes: dict[int, int] = field(default_factory=dict)
    doubtful_positions: set[int] = field(default_factory=set)


def repair(
    root: str,
    *,
    write: bool = False,
    stamp: str = "",
    commit_log_path: str = "",
    consume_queue_path: str = "",
    log_file_bytes: int | None = None,
    queue_file_bytes: int | None = None,
    delay_levels_ms: Sequence[int] = DELAYS_MS,
    files: Files = SYSTEM_FILES,
    progress: Progress | None = None,
) -> RepairReport:
    """Find the damage of the store in the directory `root`. Repair it if `write` is set.

    The overwritten bytes go to the directory `repair-<stamp>` in the store. `log_file_bytes` and
    `queue_file_bytes` are the sizes of the files; None means the most frequent size of the existing
    files. `delay_levels_ms` are the delays of messageDelayLevel, from which the due times in
    missing units of delayed messages are computed; existing due times stay. `progress` is called
    with (bytes done, bytes in total).

    Raises StoreError if there is no store or it cannot be repaired as it is, StoreLockedError if
    `write` is set and a broker uses the store, and OSError.
    """
    with ExitStack() as stack:
        if write:
            stack.callback(files.lock(f"{root.rstrip('/')}/lock"))

        def find_layout() -> StoreLayout:
            return StoreLayout.find(
                root,
                commit_log_path=commit_log_path,
                consume_queue_path=consume_queue_path,
                files=files,
            )

        store_repair = _Repair(
            find_layout,
            log_file_bytes,
            queue_file_bytes,
            delay_levels_ms,
            progress or (lambda *_: None),
        )
        stack.callback(store_repair.close)
        store_repair.find_damage()
        if write and not store_repair.report.is_sound:
            store_repair.write(f"{store_repair.layout.root}/repair-{stamp or 'backup'}")
        return store_repair.report


class _Repair:
    """One repair: call `find_damage`, then `write`. `report` is the result."""

    def __init__(
        self,
        find_layout: Callable[[], StoreLayout],
        log_file_bytes: int | None,
        queue_file_bytes: int | None,
        delays_ms: Sequence[int],
        progress: Progress,
    ) -> None:
        """Find the files of the store and their sizes.

        `find_layout` lists the files each time it is called. A size of None means the most frequent
        size of the existing files. `delays_ms` are the delays of the delay levels.

        Raises StoreError if the log is in several directories, or has files that do not fit its
        file size.
        """
        self._delays_ms = delays_ms
        self._find_layout = find_layout
        self._progress = progress
        layout = find_layout()
        self.layout = layout
        if len(layout.log_paths) > 1:
            raise StoreError(
                f"The commit log is in {len(layout.log_paths)} directories.",
                fix="Copy its files into one directory, and repair that.",
            )
        self._files = layout.files
        self._log_file_bytes = log_file_bytes or layout.log.usual_file_bytes
        self._queue_file_bytes = (
            queue_file_bytes or find_usual_file_bytes(layout.queues.values()) or QUEUE_FILE_BYTES
        )
        self._checkpoint = _read_checkpoint(layout)
        self._log = layout.log
        self._require_fitting_log_files()
        self._plan = _RepairPlan([], [], [], 0, [], 0)
        self.report = RepairReport(layout.root)

    def _require_fitting_log_files(self) -> None:
        """Raise StoreError if a file of the log is too large, or begins at a wrong position."""
        for segment in self._log.segments:
            if segment.base % self._log_file_bytes or segment.size > self._log_file_bytes:
                raise StoreError(
                    f"{segment.path} has {segment.size} bytes, files of this log should have"
                    f" {self._log_file_bytes}.",
                    fix="Specify the size with --log-file-bytes (mappedFileSizeCommitLog), or move"
                    " the file away if it does not belong here.",
                )

    def close(self) -> None:
        """Close the files of the store."""
        self.layout.close()

    @property
    def _durable_end(self) -> int:
        """The position up to which the checkpoint says that the log was durable, or 0."""
        newest = self._checkpoint.latest
        return newest.log_offset if newest is not None else 0

    # --- finding damage

    def find_damage(self) -> None:
        """Walk over the log, compare the queues with it, and set `report` and `_plan`.

        Nothing is changed in the store. Adjacent invalid ranges of a file count as one. Raises
        OSError.
        """
        report = self.report
        layout = self.layout
        self._check_file_sizes()
        finder = LostMessageFinder(self._log.start, layout.queues)
        # After a crash, units behind the durable end may be missing.
        durable_end = self._durable_end if layout.was_interrupted else None
        comparison = QueueRepair(
            queues=layout.queues,
            directory=layout.queue_path,
            file_bytes=self._queue_file_bytes,
            topics=read_topic_names(layout),
            writer=None,
            durable_end=durable_end,
        )

        # The invalid ranges, and the store time of the last record before each of them.
        invalid_ranges: list[InvalidRange] = []
        times_ms: list[int] = []
        last_time_ms = 0
        walk = self._start_walk()
        for log_part in self._iter_with_progress(walk):
            if isinstance(log_part, Run):
                finder.add_run(log_part)
                comparison.add_run(log_part)
                last_time_ms = log_part.store_time_ms
            elif invalid_ranges and self._continues_range(invalid_ranges[-1], log_part):
                invalid_ranges[-1] = invalid_ranges[-1]._replace(end=log_part.end)
            else:
                invalid_ranges.append(log_part)
                times_ms.append(last_time_ms)
        comparison.finish(walk.valid_end)
        finder.finish(layout.queues)

        # Records with impossible offsets are valid for the walk, but invalid for a queue.
        for invalid in finder.contradicted:
            index = bisect_left(invalid_ranges, invalid)
            invalid_ranges.insert(index, invalid)
            previous_time_ms = times_ms[index - 1] if index else last_time_ms
            times_ms.insert(index, previous_time_ms)

        self._make_plan(walk.valid_end, invalid_ranges, times_ms, last_time_ms, finder)
        report.log_end = walk.valid_end
        report.wrong_units = comparison.wrong_unit_count
        report.missing_queues = len(comparison.missing_queues)

    def _continues_range(self, previous: InvalidRange, invalid: InvalidRange) -> bool:
        """Return whether an invalid range follows the previous one in the same file."""
        is_start_of_file = invalid.start % self._log_file_bytes == 0
        return previous.end == invalid.start and not is_start_of_file

    def _start_walk(self) -> LogWalk:
        """Return a walk over the log, up to the end of its last file or its durable end.

        Files that are missing or too short are walked as if they had zeros there.
        """
        file_bytes = self._log_file_bytes
        walk_end = max(self._log.segments[-1].base + 1, self._durable_end)
        bases = range(self._log.start, walk_end, file_bytes)
        # Each file is walked as if it had its full size: missing bytes are damage.
        extents = [(base, base + file_bytes) for base in bases]
        return LogWalk(self._log, extents, self._delays_ms, is_forgiving=True)

    def _iter_with_progress(self, walk: LogWalk) -> Iterator[Run | InvalidRange]:
        """Yield the runs and invalid ranges that a walk finds, and report its progress."""
        start = walk.position
        last_reported = start
        # Where the log ends is not known: of the last file, the part up to the durable end counts.
        end = max(self._log.segments[-1].base, self._durable_end)
        total_bytes = max(end - start, 1)
        for log_part in walk:
            if not isinstance(log_part, Blank):
                yield log_part
            if walk.position - last_reported > _PROGRESS_BYTES:
                last_reported = walk.position
                self._progress(min(last_reported - start, total_bytes), total_bytes)
        self._progress(total_bytes, total_bytes)

    def _check_file_sizes(self) -> None:
        """Add a text to `report.bad_files` for each file that is missing or has a wrong size."""
        bad_files = self.report.bad_files
        segments = self._log.segments
        newest = self._checkpoint.latest
        if newest is not None and 0 <= newest.log_start < segments[0].base:
            bad_files.append(
                f"{self._log_file_path(newest.log_start)} and the files behind it, up to"
                f" {segments[0].base:020d}, are missing"
            )

        # Files of the log.
        expected_base = segments[0].base
        for segment in segments:
            while expected_base < segment.base:
                bad_files.append(f"{self._log_file_path(expected_base)} is missing")
                expected_base += self._log_file_bytes
            if segment.size != self._log_file_bytes:
                bad_files.append(
                    f"{segment.path} has {segment.size} of {self._log_file_bytes} bytes"
                )
            expected_base += self._log_file_bytes

        # Files of consume queues.
        for sequence in self.layout.queues.values():
            for segment in sequence.segments:
                if segment.size != self._queue_file_bytes:
                    bad_files.append(
                        f"{segment.path} has {segment.size} of {self._queue_file_bytes} bytes"
                    )

    def _make_plan(
        self,
        log_end: int,
        invalid_ranges: list[InvalidRange],
        times_ms: list[int],
        last_time_ms: int,
        finder: LostMessageFinder,
    ) -> None:
        """Decide what a repair must write: set `_plan`, and most fields of `report`.

        Invalid ranges behind the last valid record and the durable end are a torn tail, the rest of
        an interrupted write; other ranges are damage. `log_end` is the position behind the last
        valid record, and `last_time_ms` its store time. `times_ms` has the store time of the last
        record before each of `invalid_ranges`. `finder` has seen all records.
        """
        # Invalid ranges behind the damage are the tail. The ranges are in the order of the log.
        damage_end = max(log_end, self._durable_end)
        damaged_count = sum(invalid.start < damage_end for invalid in invalid_ranges)
        ranges = invalid_ranges[:damaged_count]
        times_ms = times_ms[:damaged_count]
        tail = invalid_ranges[damaged_count:]
        tail_end = find_data_end(self._log, tail[0].start) if tail else None
        if tail_end is not None:
            self.report.tail_bytes = max(tail_end - damage_end, 0)

        # Records that are valid except for their offset get the right one if a unit has it.
        lost = finder.find_lost(ranges, self.layout.queues)
        offset_fixes = _find_offset_fixes(finder, lost)
        lost = [message for message in lost if message.position not in offset_fixes]
        is_unfixed = [invalid.start not in offset_fixes for invalid in ranges]
        ranges = list(compress(ranges, is_unfixed))
        times_ms = list(compress(times_ms, is_unfixed))
        self.report.mended = len(offset_fixes)
        self.report.records = finder.record_count - len(finder.contradicted) + len(offset_fixes)

        # Distribute the lost messages to the ranges that contain them.
        if ranges and ranges[-1].start >= log_end:
            # At the end of the log, only messages count that were durable.
            lost = [message for message in lost if message.position < damage_end]
        lost_by_range = _assign_to_ranges(lost, ranges, log_end)

        self._plan = _RepairPlan(
            damaged_ranges=ranges,
            tail=tail,
            lost_messages=lost_by_range,
            log_end=log_end,
            times_ms=times_ms,
            last_time_ms=last_time_ms,
            offset_fixes=offset_fixes,
            doubtful_positions=finder.doubtful_positions,
        )
        self._report_damaged_ranges(damage_end)
        self.report.lost = _group_into_ranges(lost)

    def _report_damaged_ranges(self, damage_end: int) -> None:
        """Add each damaged range of the plan to the report, cut at position `damage_end`."""
        plan = self._plan
        for invalid, messages in zip(plan.damaged_ranges, plan.lost_messages, strict=True):
            path = self._log_file_path(invalid.start - invalid.start % self._log_file_bytes)
            shown_end = min(invalid.end, damage_end)
            damaged = DamagedRange(path, invalid.start, shown_end, invalid.reason, len(messages))
            self.report.damaged.append(damaged)

    def _log_file_path(self, base: int) -> str:
        """Return the path of the file of the log that begins at position `base`."""
        return f"{self.layout.log_paths[0]}/{base:020d}"

    # --- writing

    def write(self, backup: str) -> None:
        """Repair the store as planned, and complete the report.

        The directory `backup` gets the overwritten bytes, the replica files, and the report as
        `report.json`. Everything is durable on return. Raises StoreError if the log is still
        damaged afterwards, and OSError.
        """
        self._progress(0, 1)
        report = self.report
        if report.damaged or report.mended or report.bad_files:
            self._move_replica_files(backup)
        writer = RepairWriter(self._files, self.layout.root, backup)
        without_room, log_end, last_time_ms = self._write_replacements(writer)

        # List the files again, because files of the log were created.
        self._log.close()
        self.layout.close()
        self.layout = self._find_layout()
        self._log = self.layout.log
        self._repair_queues(writer, log_end)
        writer.close()
        # The checkpoint says that the queues are complete, so it is written after them.
        self._write_checkpoint(log_end, last_time_ms)

        report.not_placed = _group_into_ranges(without_room)
        report.log_end = log_end
        report.is_written = True
        report.backup = backup
        report.bytes_changed = writer.changed_bytes
        self._write_report(backup)

    def _write_report(self, backup: str) -> None:
        """Write the report into the directory `backup`, durably."""
        report_json = orjson.dumps(self.report.to_json(), option=orjson.OPT_INDENT_2)
        self._files.make_directory(backup)
        with closing(self._files.open(f"{backup}/report.json", create=True)) as file:
            file.truncate(len(report_json))
            file.pwrite(report_json, 0)
            file.sync()
        self._files.sync_directory(backup)

    def _write_checkpoint(self, log_end: int, time_ms: int) -> None:
        """Write a checkpoint that says: log and queues are durable and complete up to `log_end`.

        `time_ms` is the store time of the last record.
        """
        queues = ConsumeQueues(self._files, self.layout.queue_path, self._queue_file_bytes)
        queues.load(after_crash=False, removes=False)
        previous = self._checkpoint.latest or Checkpoint(
            sequence=0, log_offset=0, queues=0, units=0, store_time_ms=0
        )
        queue_count, unit_sum = queues.digest()
        queues.close()
        checkpoint = previous._replace(
            sequence=previous.sequence + 1,
            log_offset=log_end,
            queues=queue_count,
            units=unit_sum,
            store_time_ms=time_ms,
            log_start=self._log.start,
        )
        if checkpoint.index_offset > log_end:
            # The index has entries for records that are gone: do not vouch for it.
            checkpoint = Checkpoint(*checkpoint[:5], log_start=checkpoint.log_start)
        write_checkpoint(
            self._files,
            self.layout.checkpoint_path,
            checkpoint,
            index_time_ms=self._checkpoint.index_time_ms,
        )

    def _move_replica_files(self, backup: str) -> None:
        """Move REPLICA_FILES to the backup, durably, before the first byte of the log changes."""
        files = self._files
        root = self.layout.root
        for name in REPLICA_FILES:
            path = f"{root}/{name}"
            if files.exists(path):
                files.make_directory(backup)
                files.rename(path, f"{backup}/{name.rpartition('/')[2]}")
                files.sync_directory(backup)
                files.sync_directory(path.rpartition("/")[0])

    def _write_replacements(self, writer: RepairWriter) -> tuple[list[LostMessage], int, int]:
        """Fill the damaged ranges with records, fix queue offsets, and zero the torn tail.

        Return (lost messages for whose placeholders there is no room, end of the log, store time of
        its last record).
        """
        plan = self._plan
        self._complete_log_files(writer)
        without_room, log_end = self._fill_damaged_ranges(writer)

        # Fix queue offsets.
        for position, offset in plan.offset_fixes.items():
            base = position - position % self._log_file_bytes
            offset_index = position - base + QUEUE_OFFSET_AT
            writer.write(self._log_file_path(base), offset_index, offset.to_bytes(8))

        # Clear the tail: without pieces, its bytes become zeros.
        for invalid in plan.tail:
            self._write_pieces(writer, invalid, [])
        writer.flush()
        return without_room, log_end, plan.last_time_ms

    def _fill_damaged_ranges(self, writer: RepairWriter) -> tuple[list[LostMessage], int]:
        """Write placeholders for the lost messages, and fillers, into the damaged ranges.

        A placeholder is a record that takes the queue offset of a lost message. A filler is a
        record without a message. Return (lost messages for whose placeholders there is no room, end
        of the log).
        """
        plan = self._plan
        log_end = plan.log_end
        without_room: list[LostMessage] = []
        ranges = zip(plan.damaged_ranges, plan.lost_messages, plan.times_ms, strict=True)
        for invalid, lost, previous_time_ms in ranges:
            is_last = invalid.start >= plan.log_end
            base = invalid.start - invalid.start % self._log_file_bytes
            # The first record of the log has none before it, and a log may have no record.
            time_ms = previous_time_ms or plan.last_time_ms or 1
            replacement = build_replacement(
                invalid, base + self._log_file_bytes, lost, time_ms, is_last=is_last
            )
            without_room += replacement.without_room
            self._write_pieces(writer, invalid, replacement.pieces)
            if replacement.placed or not is_last:
                log_end = max(log_end, replacement.end)
        return without_room, log_end

    def _complete_log_files(self, writer: RepairWriter) -> None:
        """Create the missing files of the log, and extend files that are too short."""
        sizes = {segment.base: segment.size for segment in self._log.segments}
        last_base = max([*sizes, *(invalid.start for invalid in self._plan.damaged_ranges)])
        for base in range(self._log.start, last_base + 1, self._log_file_bytes):
            if sizes.get(base) != self._log_file_bytes:
                writer.resize_file(self._log_file_path(base), self._log_file_bytes)

    def _write_pieces(
        self, writer: RepairWriter, invalid: InvalidRange, pieces: list[Piece]
    ) -> None:
        """Write new records into an invalid range, and zeros everywhere else in it.

        `pieces` are (position, bytes of the record), in the order of the log.
        """
        base = invalid.start - invalid.start % self._log_file_bytes
        path = self._log_file_path(base)
        written_end = invalid.start
        for position, record in pieces:
            writer.write_zeros(path, written_end - base, position - base)
            writer.write(path, position - base, record)
            written_end = position + len(record)
        writer.write_zeros(path, written_end - base, invalid.end - base)

    def _repair_queues(self, writer: RepairWriter, log_end: int) -> None:
        """Give each queue file its right size, then make the queues agree with the repaired log.

        `log_end` is the end of the log. Raises StoreError if the log is still damaged before it.
        """
        layout = self.layout
        for sequence in layout.queues.values():
            for segment in sequence.segments:
                if segment.size != self._queue_file_bytes:
                    writer.resize_file(segment.path, self._queue_file_bytes)

        # List the files again, because their sizes have changed.
        layout.close()
        layout = self._find_layout()
        self.layout = layout
        self._log = layout.log
        queue_repair = QueueRepair(
            queues=layout.queues,
            directory=layout.queue_path,
            file_bytes=self._queue_file_bytes,
            topics=read_topic_names(layout),
            writer=writer,
        )
        queue_repair.skipped_positions = self._plan.doubtful_positions
        walk = self._start_walk()
        for log_part in self._iter_with_progress(walk):
            if isinstance(log_part, InvalidRange):
                if log_part.start < log_end:
                    raise StoreError(
                        f"The log is still damaged at {log_part.start} after its repair:"
                        f" {log_part.reason}.",
                        fix="The disk may be failing: copy the store to another one and repair"
                        " it there.",
                    )
                continue
            queue_repair.add_run(log_part)
        queue_repair.finish(log_end)


def _read_checkpoint(layout: StoreLayout) -> CheckpointContent:
    """Return the content of the checkpoint; an empty one if the disk cannot read it."""
    try:
        return read_checkpoint(layout.files, layout.checkpoint_path)
    except OSError:
        return CheckpointContent(0, None)


def _group_into_ranges(lost: list[LostMessage]) -> list[LostRange]:
    """Group lost messages into ranges of consecutive offsets, sorted by topic and queue."""
    ranges: list[LostRange] = []
    for (topic, queue_id), offset in sorted((message.key, message.offset) for message in lost):
        previous = ranges[-1] if ranges else None
        is_next = previous is not None and (
            (previous.topic, previous.queue_id, previous.last) == (topic, queue_id, offset - 1)
        )
        if previous is not None and is_next:
            ranges[-1] = previous._replace(last=offset)
        else:
            ranges.append(LostRange(topic, queue_id, offset, offset))
    return ranges


def _find_offset_fixes(finder: LostMessageFinder, lost: list[LostMessage]) -> dict[int, int]:
    """Find the right offsets of contradicted records. Return position -> offset.

    A contradicted record is valid except for its queue offset. If a unit of its queue locates a
    message at the same position, the unit's offset is right.
    """
    contradicted_keys = {invalid.start: key for invalid, key in finder.contradicted.items()}
    offset_fixes: dict[int, int] = {}
    for message in lost:
        if contradicted_keys.get(message.position) == message.key:
            offset_fixes[message.position] = message.offset
    return offset_fixes


def _assign_to_ranges(
    lost: list[LostMessage], ranges: list[InvalidRange], log_end: int
) -> list[list[LostMessage]]:
    """Return for each of `ranges` the lost messages for which it gets placeholders.

    A message belongs to the range that contains its position. But the first range at or behind
    `log_end` gets the messages of all later ranges too, because the log continues there.
    """
    lost_by_range: list[list[LostMessage]] = []
    for invalid in ranges:
        lost_in_range = [
            message for message in lost if invalid.start <= message.position < invalid.end
        ]
        lost_by_range.append(lost_in_range)
    end_indexes = [index for index, invalid in enumerate(ranges) if invalid.start >= log_end]
    for index in end_indexes[1:]:
        lost_by_range[end_indexes[0]] += lost_by_range[index]
        lost_by_range[index] = []
    return lost_by_range
