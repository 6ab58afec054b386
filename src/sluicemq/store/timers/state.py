"""The state of the timers on disk: timer wheel, timer log and checkpoint.

The three files are valid only together. All of them are derived from the timer queue, which is
queue 0 of rmq_sys_wheel_timer. A save syncs the log, then the changed slots, then the checkpoint.
Therefore the wheel on disk never refers to units that are not on disk. The next start continues
from the checkpoint. It adds the units behind the checkpoint's end of the log to the slots. Then it
reads the timer queue from the message after the last of these units. A unit is good if its message
is in the commit log, behind the message of the unit before. The log behind the last good unit is
zeroed, because a later crash could make it look valid.

A start trusts wheel and log only with the identity of this store (`files.identity`, one file beside
the wheel for both) and with a checkpoint that this store wrote. After a clean shutdown, their
checksums must match. After a crash, wheel and log must agree with each other (`checking`).
Otherwise they are removed and rebuilt from the whole timer queue.

A rebuild knows what was delivered before the checkpoint, because the slot of a message follows from
its record and the checkpoint says which slots were delivered. The exceptions are messages that came
too late for their slot. All of them are at offset `replay_offset` of the timer queue or behind it.
What was delivered after the checkpoint is found in the queues of the messages (`overdue`). If the
checkpoint proves nothing, all deliveries are looked up there.

A slave has its master's checkpoint, but neither wheel nor log (`discard_timer_files`).
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from sluicemq.errors import StoreDamagedError
from sluicemq.files import FULL_ERRORS, TRANSIENT_ERRORS, Files
from sluicemq.files.identity import FileState, FileVerdict, IdentityFile, RecordSource
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.store.store import Store
from sluicemq.store.timers.checking import find_disagreement, find_removed_units, recover_units
from sluicemq.store.timers.files import (
    MAGIC_DELETE,
    NO_UNIT,
    UNIT_BYTES,
    Slot,
    TimerCheckpoint,
    TimerLog,
    TimerUnit,
    TimerWheel,
    read_timer_checkpoint,
    write_timer_checkpoint,
)

log = logging.getLogger(__name__)

_IDLE_SAVE_MS: Final = 60_000
"""A checkpoint that changes only `read_ms` is written at most once in this time."""
DISTRUST_REASONS: Final = {
    FileVerdict.FOREIGN: "they belong to another store, or to another commit log",
    FileVerdict.CHANGED: "they have changed since the last orderly stop",
    FileVerdict.UNKNOWN: (
        "they have no identity file, because RocketMQ or an older version wrote them"
    ),
    FileVerdict.DISCARDED: (
        "they were discarded: this replica was a slave, or a start was interrupted"
    ),
}
"""Why the wheel and the log are not trusted, for each result of the identity check; for the log."""


class TimerStart(NamedTuple):
    """The result of `TimerFiles.load`.

    If `is_rebuilt`, wheel and log are empty, and the whole timer queue must be read. If `is_exact`,
    the checkpoint says exactly what had been delivered when it was written. If `is_settled`,
    nothing was delivered after the checkpoint.
    """

    is_rebuilt: bool
    is_exact: bool
    is_settled: bool


@dataclass
class _Save:
    """One save of the timer files: what is written, and whether that has failed for good.

    `number` counts the saves of this process. The units of the log from `log_start` on, up to the
    end in the checkpoint, were added since the last save.
    """

    number: int
    checkpoint: TimerCheckpoint
    record_source: RecordSource
    changed_slots: Mapping[int, Slot]
    log_start: int
    has_failed: bool = False


class TimerFiles:
    """The timer wheel, timer log and checkpoint of a store.

    Slot times are milliseconds since 1970, rounded down to the precision.
    """

    def __init__(
        self, store: Store, files: Files, root: str, *, log_file_bytes: int, precision_ms: int
    ) -> None:
        """Create the state of the store in `root`; `load` reads its files.

        `log_file_bytes` is the size of the timer log's files, and `precision_ms` the width of a
        slot of the wheel.
        """
        self._store = store
        self._files = files
        self._root = root
        self._log_file_bytes = log_file_bytes
        self._precision_ms = precision_ms
        self._saving = threading.Lock()
        self._saved = self._started = 0  # numbers of the last finished and the last started save
        self._is_broken = False
        self._sealed_checksum: int | None = None
        """The checksum of the files at the start, None once they have changed."""
        self._check_path = f"{root}/config/timercheck"
        self._identity = IdentityFile(files, f"{root}/timerwheel", store.incarnation.text)
        self.wheel = TimerWheel(files, f"{root}/timerwheel", precision_ms)
        self.log = TimerLog(files, f"{root}/timerlog", log_file_bytes)
        self.checkpoint = TimerCheckpoint()
        """The checkpoint that is on disk.

        The messages before `log_end_at_start` in the commit log that are due by its `done_ms` were
        delivered.
        """
        self.queue_offset = 0
        """The offset of the first message of the timer queue that is not in the files."""
        self.record_position = NO_UNIT
        """The commit log position of the last message that is in the files, NO_UNIT if unknown."""
        self.log_end_at_start = 0
        """The commit log position up to which the checkpoint describes deliveries."""

    # --- Start

    def load(self) -> TimerStart:
        """Load wheel, timer log and checkpoint, and return how the timers start.

        If the files can be trusted, they are marked as open. After a crash, units that were written
        after the checkpoint are added to the wheel. If the files cannot be trusted, they are
        discarded with `start_rebuild`, and the result has `is_rebuilt`.

        Sets `checkpoint`, `queue_offset`, `record_position` and `log_end_at_start`. The call
        blocks. Raises OSError.
        """
        checkpoint = read_timer_checkpoint(self._files, self._check_path)
        self.checkpoint = checkpoint or TimerCheckpoint()
        is_exact = checkpoint is not None and checkpoint.matches_log(self._store.record_source)
        distrust_reason, is_settled = self._load_files(self.checkpoint, is_exact=is_exact)

        first_offset, end_offset = self._store.queue_offsets(TIMER_TOPIC, 0)
        has_no_messages = first_offset == end_offset
        if has_no_messages and self.log.is_empty and not self.wheel.exists:
            self.queue_offset = end_offset
            self.log_end_at_start = self._store.written_offset
            return TimerStart(is_rebuilt=False, is_exact=is_exact, is_settled=True)

        if not distrust_reason:
            self._continue_from_checkpoint(first_offset, end_offset)
            if not is_settled:
                self._recover_units()
                distrust_reason = self._explain_disagreement()
        if distrust_reason:
            self.start_rebuild(distrust_reason, is_exact=is_exact)
            return TimerStart(is_rebuilt=True, is_exact=is_exact, is_settled=False)

        with suppress_full_disk():
            self._identity.mark_open()  # before the first unit, and the first delivery
        return TimerStart(is_rebuilt=False, is_exact=True, is_settled=is_settled)

    def _continue_from_checkpoint(self, first_offset: int, end_offset: int) -> None:
        """Set the progress to the values in the checkpoint, and `log_end_at_start`.

        The timer queue contains the offsets [first_offset, end_offset). An offset in the checkpoint
        that is outside is moved to the nearer end.
        """
        self.queue_offset = min(max(self.checkpoint.queue_offset, first_offset), end_offset)
        self.log_end_at_start = self.log_position_of(self.queue_offset)
        self.record_position = self.checkpoint.record_position

    def _explain_disagreement(self) -> str:
        """Return how wheel and log disagree, as a phrase; "" if they agree."""
        from_ms = self.checkpoint.read_ms
        return find_disagreement(self.wheel, self.log, from_ms, self._precision_ms) or ""

    def _load_files(self, checkpoint: TimerCheckpoint, *, is_exact: bool) -> tuple[str, bool]:
        """Load wheel and log, and check them against the identity file and the checkpoint.

        The identity file says which store wrote the files, and whether they were closed cleanly.
        `is_exact` says whether `checkpoint` belongs to this commit log.

        Return (reason, is_settled). `reason` says why the files cannot be trusted, as a phrase for
        the log; it is "" if they can. `is_settled` is True if the last run stopped cleanly with
        these files.
        """
        try:
            self.wheel.check_size()
            self.log.load(checkpoint.log_end)
        except StoreDamagedError as error:
            return error.fact.rstrip("."), False
        source = self._store.record_source
        verdict = self._identity.check(source, lambda: self._compute_checksum(checkpoint.log_end))
        if self.checkpoint.time_ms == 0 and not self.wheel.exists:
            return "there is no checkpoint of them yet", False
        if verdict in DISTRUST_REASONS:
            return DISTRUST_REASONS[verdict], False
        is_of_this_store = checkpoint.incarnation == self._store.incarnation.text
        if not is_exact or not is_of_this_store:
            return "their checkpoint, config/timercheck, is not one that this store wrote", False
        lacks_wheel = checkpoint.log_end and not self.wheel.exists
        if self.log.end != checkpoint.log_end or lacks_wheel:
            return "files are missing", False

        # Sealed files are those of an orderly stop, which also notes the checkpoint's values.
        self._sealed_checksum = None
        is_sealed = verdict is FileVerdict.SEALED
        identity = self._identity.identity
        if is_sealed and identity is not None:
            if identity.details != self._make_details(checkpoint):
                return "config/timercheck is not that of the last orderly stop", False
            self._sealed_checksum = identity.checksum
        return "", is_sealed

    def start_rebuild(self, reason: str, *, is_exact: bool = True) -> None:
        """Empty wheel and log, durably, and set `queue_offset` to the beginning of the timer queue.

        The caller then reads the timer queue from there. `reason` is a phrase for the log that says
        why. Messages that still wait but whose records retention has removed are logged as lost.
        `is_exact` says whether the checkpoint tells which messages were delivered. Raises OSError.
        """
        consequence = ""
        if not is_exact:
            consequence = "; deliveries are looked up in the queues of the messages"
        level = logging.INFO if self._is_rebuild_expected() else logging.WARNING
        log.log(
            level,
            "timer wheel and timer log of %s are rebuilt from the commit log: %s%s",
            self._root,
            reason,
            consequence,
        )
        self._log_lost_messages()  # before the timer log, which names them, is removed
        self.discard()
        first_offset, _ = self._store.queue_offsets(TIMER_TOPIC, 0)
        self.queue_offset = first_offset
        self.record_position = NO_UNIT
        replay_offset = max(self.checkpoint.replay_offset, first_offset)
        self.log_end_at_start = self.log_position_of(replay_offset)

    def _is_rebuild_expected(self) -> bool:
        """Return whether a rebuild of the files is normal, so that it is not logged as a warning.

        It is normal for a new store, after the files were discarded on purpose, and if the store
        has neither files nor a checkpoint of its own.
        """
        identity = self._identity.identity
        if identity is not None and identity.state is FileState.DISCARDED:
            return True
        is_new = not self.checkpoint.time_ms and not self.wheel.exists
        has_files = self.wheel.exists or not self.log.is_empty
        has_own_checkpoint = self.checkpoint.incarnation == self._store.incarnation.text
        return is_new or not (has_files or has_own_checkpoint)

    def _log_lost_messages(self) -> None:
        """Log the waiting messages whose records are no longer in the commit log as lost.

        A rebuild cannot find them. Only the timer log still names them.
        """
        with suppress(OSError):
            removed_units = find_removed_units(
                self.log, self._store.log_start, self.checkpoint.read_ms
            )
            if not removed_units:
                return
            due_times_ms = [due_ms for due_ms, _ in removed_units]
            log.error(
                "%d timed messages are lost: they are due from %d to %d (ms since 1970), and"
                " retention has removed their records, at commit log positions %s and later;"
                " the commit log begins at %d."
                " Set fileReservedTime to more than the longest delay.",
                len(removed_units),
                min(due_times_ms),
                max(due_times_ms),
                ", ".join(str(position) for _, position in removed_units[:20]),
                self._store.log_start,
            )

    def log_position_of(self, queue_offset: int) -> int:
        """Return the commit log position of the message at `queue_offset` of the timer queue.

        Return the end of the commit log if there is no such message yet.
        """
        units = self._store.committed_units(TIMER_TOPIC, 0, queue_offset, 1)
        if not len(units):
            return self._store.written_offset
        return int.from_bytes(units[:8])  # a unit begins with the position

    def _recover_units(self) -> None:
        """Add the good units behind the checkpoint to the slots, and zero the log behind them.

        A unit is an entry of the timer log, for one timed message. It is good if its message is in
        the commit log, behind the message of the unit before. A slot is an entry of the timer
        wheel: it locates the units that are due in one interval. The slots change in memory.

        If a unit is good, sets `queue_offset` and `record_position` to the values after the last
        good unit. Logs how many bytes were recovered, if any. Raises OSError.
        """
        checkpoint_end = self.log.end
        recovered = recover_units(
            self.wheel, self.log, self.queue_offset, self._store.committed_record
        )
        self.queue_offset = recovered.queue_offset
        if recovered.record_position != NO_UNIT:  # at least one unit was good
            self.record_position = recovered.record_position
        # A later crash could make the bytes behind the good units look valid.
        self.log.truncate(recovered.end)
        if recovered.end != checkpoint_end:
            log.info(
                "recovered %d bytes of the timer log that were written after the last checkpoint",
                recovered.end - checkpoint_end,
            )

    def discard(self) -> None:
        """Remove wheel and log, durably, so that they must be rebuilt. Both are empty afterwards.

        Before that, the identity file is marked as discarded, and the checkpoint gets values with
        which every broker reads the whole timer queue. Its fields about deliveries stay. A full
        disk is ignored while these two files are written. Raises OSError for other errors.
        """
        with suppress_full_disk():  # without an identity file, the files are not trusted either
            self._identity.mark_discarded()
        with suppress_full_disk():
            if self.checkpoint.time_ms:
                self.checkpoint = self.checkpoint.without_timer_files()
                write_timer_checkpoint(self._files, self._check_path, self.checkpoint)
        self.wheel.remove()
        remove_timer_log(self._files, self._root)
        self.log.close()
        self.log = TimerLog(self._files, f"{self._root}/timerlog", self._log_file_bytes)

    # --- Adding units

    def add_unit(
        self, slot_ms: int, magic: int, write_ms: int, position: int, size: int, topic_hash: int
    ) -> None:
        """Append a unit to the timer log and to its slot, in memory. HOT: for every timed message.

        `slot_ms` is the begin of the slot, and `magic` contains the flags of the unit. `write_ms`
        is the time at which the message was read from the timer queue. Its record has `size` bytes
        at `position` of the commit log. `topic_hash` is the hash of the topic to which it is
        delivered.

        The count of messages in the slot grows by one. For a recall (MAGIC_DELETE), which cancels a
        message, it shrinks by one.
        """
        slot = self.wheel.get(slot_ms)
        previous_unit = NO_UNIT if slot is None else slot.last_unit
        unit = self.log.append(
            previous_unit, magic, write_ms, slot_ms - write_ms, position, size, topic_hash
        )
        count_change = -1 if magic & MAGIC_DELETE else 1  # a recall cancels a message
        if slot is None:
            self.wheel.put(slot_ms, unit, unit, count_change)
        else:
            first_unit = unit if slot.first_unit == NO_UNIT else slot.first_unit
            self.wheel.put(slot_ms, first_unit, unit, slot.message_count + count_change)

    @property
    def last_unit(self) -> TimerUnit | None:
        """The last unit of the timer log, None if the log is empty."""
        if not self.log.end:
            return None
        return self.log.unit_at(self.log.end - UNIT_BYTES)

    def message_count(self, slot_ms: int) -> int:
        """Return the number of messages in the slot `slot_ms`, less the number of recalls."""
        slot = self.wheel.get(slot_ms)
        return slot.message_count if slot is not None else 0

    # --- Reading

    def iter_chain(self, slot_ms: int, position: int) -> Iterator[tuple[int, TimerUnit | None]]:
        """Yield (position, unit) for the units of a slot, from `position` back to the first one.

        Each unit names the position of the one before it in the timer log. At a unit that is
        damaged or belongs to another slot, yield (position, None) and stop.
        """
        while position != NO_UNIT:
            unit = self.log.unit_at(position)
            is_sound = unit is not None and unit.is_valid and unit.previous < position
            if unit is None or not is_sound or unit.due_ms != slot_ms:
                yield position, None
                return
            yield position, unit
            position = unit.previous

    # --- Saving

    def save(
        self,
        read_ms: int,
        now_ms: int,
        done_ms: int,
        replay_offset: int,
        log_position: int,
        *,
        force: bool,
    ) -> Generator[Callable[[], None]]:
        """Write log, wheel and a new checkpoint, in two parts: the generator yields a function.

        Writing the log comes first, and raises OSError. Then the generator yields at most one
        function, which does the blocking part. Call it in any thread, then resume the generator. If
        the generator is closed or gets an exception instead, the save counts as failed, and the
        next one repeats it.

        `now_ms` is the time of the checkpoint. The other times and offsets become fields of the
        checkpoint. If nothing has changed since the last checkpoint, nothing is written, unless
        `force`. If only `read_ms` has changed, a checkpoint is written once the last one is a
        minute old.

        The function raises OSError and StoreError. Saves run one at a time; a function does nothing
        if a later save has finished before. After a disk error other than a full disk or a
        temporary shortage, nothing is saved any more, because the kernel may have dropped pages.
        The last good checkpoint remains, and the next start continues from it.
        """
        if self._is_broken:
            return
        self.log.write()
        old_checkpoint = self.checkpoint
        if not force and not self._has_changes_to_save(read_ms, now_ms):
            return
        # Fixed now: the event loop may add units while another thread writes.
        changed_slots = self.wheel.take_changed_slots()
        self._started += 1
        save = _Save(
            number=self._started,
            checkpoint=TimerCheckpoint(
                read_ms=read_ms,
                log_end=self.log.end,
                queue_offset=self.queue_offset,
                master_queue_offset=self.queue_offset,
                state_version=old_checkpoint.state_version,
                time_ms=now_ms,
                counter=old_checkpoint.counter + 1,
                done_ms=done_ms,
                replay_offset=replay_offset,
                log_position=log_position,
                record_position=self.record_position,
                incarnation=self._store.incarnation.text,
            ),
            record_source=self._store.record_source,
            changed_slots=changed_slots,
            log_start=old_checkpoint.log_end,
        )
        if changed_slots or self.log.end != old_checkpoint.log_end:
            self._sealed_checksum = None

        is_written = False
        try:
            yield partial(self._write, save)
            is_written = True
        finally:
            if save.has_failed:
                self._stop_saving()
            self.wheel.finish_write(is_written=is_written)
            if is_written:
                self.checkpoint = save.checkpoint

    def _write(self, save: "_Save") -> None:
        """Write log, wheel and checkpoint of `save`, unless a later save has finished already.

        Puts the CRC of the last record into the checkpoint of `save`. Raises OSError and
        StoreError. If the error is final, sets `save.has_failed`.
        """
        with self._saving:
            if save.number <= self._saved:
                return
            try:
                # In this order: the wheel on disk must not refer to units that are not on disk, and
                # the checkpoint must not describe files that are not.
                self._store.sync()
                self._identity.mark_open()
                self.log.sync(save.log_start, save.checkpoint.log_end)
                self.wheel.write(save.changed_slots)
                save.checkpoint = _add_record_crc(save.checkpoint, save.record_source)
                write_timer_checkpoint(self._files, self._check_path, save.checkpoint)
            except OSError as error:
                save.has_failed = error.errno not in FULL_ERRORS | TRANSIENT_ERRORS
                raise
            self._saved = save.number

    def _stop_saving(self) -> None:
        """Note that nothing is saved any more, because of a disk error. Log that once."""
        if not self._is_broken:
            self._is_broken = True
            log.error(
                "cannot write the timer files of %s: they are not saved until the next start. "
                "Check the disk and restart the broker.",
                self._root,
            )

    def _has_changes_to_save(self, read_ms: int, now_ms: int) -> bool:
        """Return whether a new checkpoint must be written.

        That is so if slots, log or queue offset have changed. It is also so if only `read_ms` has
        changed and the checkpoint is at least `_IDLE_SAVE_MS` old.
        """
        checkpoint = self.checkpoint
        if self.wheel.has_unsaved_slots:
            return True
        if self.log.end != checkpoint.log_end or self.queue_offset != checkpoint.queue_offset:
            return True
        is_young = not checkpoint.time_ms or now_ms - checkpoint.time_ms < _IDLE_SAVE_MS
        return read_ms != checkpoint.read_ms and not is_young

    def seal(self) -> None:
        """Mark the files as complete after the last save of a clean shutdown.

        The next start then trusts them without comparing wheel and log. Does nothing if there are
        unsaved changes, if saving has failed, or if the files are discarded. The call blocks.
        Raises OSError.
        """
        checkpoint = self.checkpoint
        has_files = self.wheel.exists or not self.log.is_empty
        if self._is_broken or not has_files:
            return
        if self.wheel.has_unsaved_slots or self.log.end != checkpoint.log_end:
            return
        identity = self._identity.identity
        if identity is None or identity.state is FileState.DISCARDED:
            return
        checksum = self._sealed_checksum
        if checksum is None:
            checksum = self._compute_checksum(checkpoint.log_end)
        self._identity.mark_sealed(
            self._store.record_source,
            checkpoint.record_position,
            checksum,
            self._make_details(checkpoint),
        )

    def _compute_checksum(self, log_end: int) -> int:
        """Return the checksum of the wheel, and of the log before position `log_end`."""
        return timer_files_checksum(self.wheel, self.log, log_end)

    def _make_details(self, checkpoint: TimerCheckpoint) -> dict[str, int | str]:
        """Return the fields of a checkpoint, and the precision, that the identity file notes."""
        return identity_details(checkpoint, self._precision_ms)


def _add_record_crc(checkpoint: TimerCheckpoint, source: RecordSource) -> TimerCheckpoint:
    """Return the checkpoint with the CRC of its last record, which is at `record_position`.

    If the log does not have the record, the result has NO_UNIT as `record_position`.
    """
    if checkpoint.record_position == NO_UNIT:
        return checkpoint
    crc = source.record_crc(checkpoint.record_position)
    if crc is None:
        return checkpoint._replace(record_position=NO_UNIT)
    return checkpoint._replace(record_crc=crc)


def timer_files_checksum(wheel: TimerWheel, log: TimerLog, log_end: int) -> int:
    """Return a checksum of the timer wheel and of the timer log before position `log_end`.

    Raises OSError.
    """
    return wheel.checksum() ^ log.checksum(log_end)


def identity_details(checkpoint: TimerCheckpoint, precision_ms: int) -> dict[str, int | str]:
    """Return the values that the identity file notes when the timers are closed cleanly.

    They are fields of the checkpoint, and the precision. At a start they must agree with the
    checkpoint file. If they do not, the file is not the checkpoint of the last clean stop.
    """
    return {
        "counter": checkpoint.counter,
        "timeMs": checkpoint.time_ms,
        "logEnd": checkpoint.log_end,
        "precisionMs": precision_ms,
    }


def discard_timer_files(store: Store, files: Files, root: str) -> None:
    """Mark wheel and timer log of a store as discarded, and remove them, durably.

    A slave calls this before it follows a master, because the master's checkpoint does not belong
    to these files. Does nothing if they do not exist. Raises OSError.
    """
    names = files.names(root)
    if "timerwheel" not in names and "timerlog" not in names:
        return
    identity = IdentityFile(files, f"{root}/timerwheel", store.incarnation.text)
    with suppress_full_disk():
        identity.mark_discarded()
    if "timerwheel" in names:
        files.remove(f"{root}/timerwheel")
    remove_timer_log(files, root)
    files.sync_directory(root)


def remove_timer_log(files: Files, root: str) -> None:
    """Remove the files of the timer log, whatever their size. Raises OSError."""
    for name in files.names(f"{root}/timerlog"):
        files.remove(f"{root}/timerlog/{name}")
    if files.exists(f"{root}/timerlog"):
        files.sync_directory(f"{root}/timerlog")


@contextmanager
def suppress_full_disk() -> Iterator[None]:
    """Suppress an OSError that means that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_ERRORS:
            raise
