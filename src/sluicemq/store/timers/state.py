"""State of the timers on disk: timer wheel, timer log and checkpoint, which are only valid
together.

All three are derived from the queue of rmq_sys_wheel_timer, the timer queue. A save syncs the log,
then the changed slots, then the checkpoint, so the wheel on disk never points behind the log on
disk. The next start begins at the checkpoint. It adds the units that the log holds behind the
checkpoint to the slots, and then reads the timer queue from the message after the last of these
units. A unit is good if its message is in the commit log, behind the message of the unit before.
What lies behind the last good unit is wiped, because a later crash could make it look valid.

A start trusts wheel and log only with the identity of this store (`store.identity`, one file beside
the wheel for both) and with a checkpoint that this store wrote. After a clean shutdown their
checksums have to match; after a crash wheel and log have to agree with each other (`checking`).
Otherwise they are removed and built again from the whole timer queue.

A rebuild knows what was delivered before the checkpoint: the slot of a message follows from its
record alone, and the checkpoint tells which slots were delivered. The exceptions are messages that
came too late for their slot; all of them are at offset `replay_offset` of the timer queue or
behind. What was delivered after the checkpoint is found in the queues of the messages (`overdue`).
If the checkpoint proves nothing, all deliveries are looked up there.

A slave has its master's checkpoint, and neither wheel nor log (`discard_timer_files`).
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from sluicemq.errors import StoreDamagedError
from sluicemq.files import FULL_ERRORS, TRANSIENT_ERRORS, Files
from sluicemq.files.identity import FileState, FileVerdict, IdentityFile
from sluicemq.model.system_names import TIMER_TOPIC
from sluicemq.store.store import Store
from sluicemq.store.timers.checking import disagreement, gone_units, revise
from sluicemq.store.timers.files import (
    DELETE,
    NONE,
    UNIT_BYTES,
    TimerCheckpoint,
    TimerLog,
    TimerUnit,
    TimerWheel,
    read_timer_checkpoint,
    write_timer_checkpoint,
)

log = logging.getLogger(__name__)

_QUIET_MS: Final = 60_000
REASONS: Final = {
    FileVerdict.FOREIGN: "they belong to another store, or to another commit log",
    FileVerdict.CHANGED: "they have changed since the last orderly stop",
    FileVerdict.UNKNOWN: (
        "they have no identity file, because RocketMQ or an older version wrote them"
    ),
    FileVerdict.DISCARDED: (
        "they were discarded: this replica was a slave, or a start was interrupted"
    ),
}


class Start(NamedTuple):
    """The result of `TimerFiles.load`.

    `is_rebuilt`: wheel and log are empty, and the whole timer queue has to be read. `is_exact`: the
    checkpoint tells exactly what was delivered when it was written. `is_settled`: nothing was
    delivered after the checkpoint.
    """

    is_rebuilt: bool
    is_exact: bool
    is_settled: bool


class TimerFiles:
    """The timer wheel, timer log and checkpoint of a store. Slot times are milliseconds since 1970,
    rounded down to the precision."""

    def __init__(
        self, store: Store, files: Files, root: str, *, log_file_bytes: int, precision_ms: int
    ) -> None:
        self._store = store
        self._files = files
        self._root = root
        self._log_file_bytes = log_file_bytes
        self._precision_ms = precision_ms
        self._saving = threading.Lock()
        self._saved = self._begun = 0
        self._is_broken = False
        self._sealed_checksum: int | None = None
        """Of the files as they were found, while they have not changed since."""
        self._check_path = f"{root}/config/timercheck"
        self._identity = IdentityFile(files, f"{root}/timerwheel", store.incarnation.text)
        self.wheel = TimerWheel(files, f"{root}/timerwheel", precision_ms)
        self.log = TimerLog(files, f"{root}/timerlog", log_file_bytes)
        self.checkpoint = TimerCheckpoint()
        """The checkpoint that is on disk. Of the messages before `old_end` in the commit log, those
        due by its `done_ms` were delivered."""
        self.queue_offset = 0
        """The first message of the queue that is not in the files."""
        self.record_position = NONE
        """Where the message before lies in the commit log."""
        self.old_end = 0

    # --- the start

    def load(self) -> Start:
        """Decide whether the files can be trusted, discard them if not, and return how the timers
        start. Blocking. Raises OSError."""
        low, high = self._store.queue_offsets(TIMER_TOPIC, 0)
        known = read_timer_checkpoint(self._files, self._check_path)
        self.checkpoint = known or TimerCheckpoint()
        is_exact = known is not None and known.is_of(self._store.record_source)
        reason, is_settled = self._load_files(self.checkpoint, is_exact=is_exact)
        if high == low and self.log.is_empty and not self.wheel.exists:  # nothing waits
            self.queue_offset, self.old_end = high, self._store.written_offset
            return Start(is_rebuilt=False, is_exact=is_exact, is_settled=True)
        if not reason:
            self.queue_offset = min(max(self.checkpoint.queue_offset, low), high)
            self.old_end = self.position_of(self.queue_offset)
            self.record_position = self.checkpoint.record_position
            if not is_settled:
                self._revise()
                reason = self._disagreement()
            if not reason:
                with suppress_full_disk():
                    self._identity.mark_open()  # before the first unit, and the first delivery
                return Start(is_rebuilt=False, is_exact=True, is_settled=is_settled)
        self.begin_again(reason, is_exact=is_exact)
        return Start(is_rebuilt=True, is_exact=is_exact, is_settled=False)

    def _disagreement(self) -> str:
        from_ms = self.checkpoint.read_ms
        return disagreement(self.wheel, self.log, from_ms, self._precision_ms) or ""

    def _load_files(self, known: TimerCheckpoint, *, is_exact: bool) -> tuple[str, bool]:
        """Load and check wheel and log. Return (reason, is_settled): why they cannot be trusted, ""
        if they can; and whether the last run shut down cleanly with them."""
        try:
            self.wheel.check()
            self.log.load(known.log_end)
        except StoreDamagedError as error:
            return error.fact.rstrip("."), False
        source = self._store.record_source
        verdict = self._identity.check(source, lambda: self._checksum(known.log_end))
        if self.checkpoint.time_ms == 0 and not self.wheel.exists:
            return "there is no checkpoint of them yet", False
        if verdict in REASONS:
            return REASONS[verdict], False
        if not is_exact or known.incarnation != self._store.incarnation.text:
            return "their checkpoint, config/timercheck, is not one that this store wrote", False
        if self.log.end != known.log_end or (known.log_end and not self.wheel.exists):
            return "files are missing", False
        found = self._identity.identity
        is_sealed = verdict is FileVerdict.SEALED
        if is_sealed and found is not None and found.details != self._details(known):
            return "config/timercheck is not that of the last orderly stop", False
        self._sealed_checksum = found.checksum if is_sealed and found is not None else None
        return "", is_sealed

    def begin_again(self, reason: str, *, is_exact: bool = True) -> None:
        """Empty wheel and log, durably, and start again at the beginning of the timer queue. Log
        that with `reason`, a phrase. Log as lost the waiting messages that retention has removed.
        `is_exact`: see `Start`. Raises OSError."""
        found = self._identity.identity
        is_there = self.wheel.exists or not self.log.is_empty
        is_own = self.checkpoint.incarnation == self._store.incarnation.text
        is_discarded = found is not None and found.state is FileState.DISCARDED
        is_new = not self.checkpoint.time_ms and not self.wheel.exists
        is_planned = is_new or is_discarded or not (is_there or is_own)
        log.log(
            logging.INFO if is_planned else logging.WARNING,
            "timer wheel and timer log of %s are built again from the commit log: %s%s",
            self._root, reason,
            "" if is_exact else "; deliveries are looked up in the queues of the messages",
        )  # fmt: skip
        self._name_gone()
        self.discard()
        low = self._store.queue_offsets(TIMER_TOPIC, 0)[0]
        self.queue_offset, self.record_position = low, NONE
        self.old_end = self.position_of(max(self.checkpoint.replay_offset, low))

    def _name_gone(self) -> None:
        """Log as lost the waiting messages of the timer log whose records are no longer in the
        commit log: a rebuild cannot find them."""
        with suppress(OSError):
            gone = gone_units(self.log, self._store.log_start, self.checkpoint.read_ms)
            if gone:
                log.error(
                    "%d timed messages are lost: they are due from %d to %d (ms since 1970), and"
                    " retention has removed their records, at commit log positions %s and later;"
                    " the commit log begins at %d."
                    " Set fileReservedTime to more than the longest delay.",
                    len(gone), min(gone)[0], max(gone)[0],
                    ", ".join(str(position) for _, position in gone[:20]), self._store.log_start,
                )  # fmt: skip

    def position_of(self, queue_offset: int) -> int:
        """Return the commit log position of the message at `queue_offset` of the timer queue; the
        end of the log if there is none yet."""
        units = self._store.committed_units(TIMER_TOPIC, 0, queue_offset, 1)
        return int.from_bytes(units[:8]) if len(units) else self._store.written_offset

    def _revise(self) -> None:
        """Add the units behind the checkpoint to the slots, and wipe the log behind the last good
        one."""
        start = self.log.end
        found = revise(self.wheel, self.log, self.queue_offset, self._store.committed_record)
        self.queue_offset = found.queue_offset
        if found.record_position != NONE:
            self.record_position = found.record_position
        self.log.cut(found.end)
        if found.end != start:
            log.info(
                "recovered %d bytes of the timer log that were written after the last checkpoint",
                found.end - start,
            )

    def discard(self) -> None:
        """Discard wheel and log, durably, so that they have to be built. Change the checkpoint so
        that every broker reads the whole timer queue; what it says about deliveries stays. A full
        disk is no error here. Raises OSError."""
        with suppress_full_disk():  # a file that is missing is not trusted either
            self._identity.mark_discarded()
        with suppress_full_disk():
            if self.checkpoint.time_ms:
                self.checkpoint = self.checkpoint.without_files()
                write_timer_checkpoint(self._files, self._check_path, self.checkpoint)
        self.wheel.remove()
        remove_timer_log(self._files, self._root)
        self.log.close()
        self.log = TimerLog(self._files, f"{self._root}/timerlog", self._log_file_bytes)

    # --- taking in

    def add(
        self, slot_ms: int, magic: int, write_ms: int, position: int, size: int, topic_hash: int
    ) -> None:
        """Append a unit for the record of `size` bytes at commit log position `position` to the
        chain of the slot `slot_ms`. A `magic` with DELETE lowers the count of the slot by one.
        Nothing is written to disk. HOT."""
        slot = self.wheel.get(slot_ms)
        first, last, count = (slot.first, slot.last, slot.messages) if slot else (NONE, NONE, 0)
        unit = self.log.append(
            last, magic, write_ms, slot_ms - write_ms, position, size, topic_hash
        )
        count += -1 if magic & DELETE else 1
        self.wheel.put(slot_ms, unit if first == NONE else first, unit, count)

    @property
    def last_unit(self) -> TimerUnit | None:
        """The last unit of the timer log, None if it is empty."""
        return self.log.unit(self.log.end - UNIT_BYTES) if self.log.end else None

    def count(self, slot_ms: int) -> int:
        """Return how many messages the slot `slot_ms` holds."""
        slot = self.wheel.get(slot_ms)
        return slot.messages if slot is not None else 0

    # --- reading

    def chain(self, slot_ms: int, position: int) -> Iterator[tuple[int, TimerUnit | None]]:
        """Yield (log position, unit) for the units of the slot `slot_ms`, from the one at
        `position` back to the first. At a unit that is damaged or of another slot, yield (log
        position, None) and stop."""
        while position != NONE:
            unit = self.log.unit(position)
            is_sound = unit is not None and unit.is_whole and unit.previous < position
            if unit is None or not is_sound or unit.due_ms != slot_ms:
                yield position, None
                return
            yield position, unit
            position = unit.previous

    # --- saving

    def save(
        self, read_ms: int, now_ms: int, done_ms: int, replay_offset: int, log_position: int,
        *, force: bool,
    ) -> Generator[Callable[[], None]]:  # fmt: skip
        """Write wheel, log and a new checkpoint. Yield a function that does the blocking part; call
        it on any thread, then close the generator. Raises OSError.

        `now_ms` is the time of the checkpoint; the other times and offsets are its fields
        (`store.timers.files`). If log, wheel and queue offset are as in the last checkpoint, write
        nothing, unless `force` is set, or `read_ms` has advanced and that checkpoint is a minute
        old.

        The function raises OSError and StoreError. Saves run one at a time; a function does nothing
        after a later save has finished. After a disk error other than a full disk or a passing
        shortage, nothing is saved any more, because the kernel may have dropped pages. The last
        good checkpoint stays, and the next start begins there.
        """
        if self._is_broken:
            return
        self.log.write()
        old = self.checkpoint
        state = (read_ms, self.log.end, self.queue_offset)
        is_same = state[1:] == old[1:3] and not self.wheel.has_memory
        is_young = not old.time_ms or now_ms - old.time_ms < _QUIET_MS
        if is_same and (is_young or state == old[:3]) and not force:
            return
        source, position = self._store.record_source, self.record_position
        new = TimerCheckpoint(
            *state, self.queue_offset, old.state_version, now_ms, old.counter + 1, done_ms,
            replay_offset, log_position, position, 0, self._store.incarnation.text,
        )  # fmt: skip
        slots, start, end = self.wheel.take(), old.log_end, self.log.end
        if slots or start != end:
            self._sealed_checksum = None
        self._begun += 1
        number = self._begun
        is_written = has_failed = False

        def write() -> None:
            nonlocal has_failed, new
            with self._saving:
                if number <= self._saved:
                    return
                try:
                    self._store.sync()
                    self._identity.mark_open()
                    self.log.sync(start, end)
                    self.wheel.write(slots)
                    crc = source.record_crc(position) if position != NONE else 0
                    new = new._replace(
                        record_position=NONE if crc is None else position, record_crc=crc or 0
                    )
                    write_timer_checkpoint(self._files, self._check_path, new)
                except OSError as error:
                    has_failed = error.errno not in FULL_ERRORS | TRANSIENT_ERRORS
                    raise
                self._saved = number

        try:
            yield write
            is_written = True
        finally:
            if has_failed and not self._is_broken:
                self._is_broken = True
                log.error(
                    "cannot write the timer files of %s: they are not saved until the next start. "
                    "Check the disk and restart the broker.",
                    self._root,
                )
            self.wheel.settle(is_written=is_written)
            if is_written:
                self.checkpoint = new

    def seal(self) -> None:
        """Seal the files after the last save of a clean shutdown, so that the next start trusts
        them at once. Do nothing if there are changes that are not saved, if saving has failed, or
        if the files are discarded. Blocking. Raises OSError."""
        saved, details = self.checkpoint, self._details(self.checkpoint)
        is_there = self.wheel.exists or not self.log.is_empty
        if (
            self._is_broken
            or not is_there
            or self.wheel.has_memory
            or saved.log_end != self.log.end
        ):
            return
        found = self._identity.identity
        if found is None or found.state is FileState.DISCARDED:
            return
        checksum = self._sealed_checksum
        if checksum is None:
            checksum = self._checksum(saved.log_end)
        self._identity.mark_sealed(
            self._store.record_source, saved.record_position, checksum, details
        )

    def _checksum(self, log_end: int) -> int:
        return checksum_of(self.wheel, self.log, log_end)

    def _details(self, checkpoint: TimerCheckpoint) -> dict[str, int | str]:
        return details_of(checkpoint, self._precision_ms)


def checksum_of(wheel: TimerWheel, log: TimerLog, log_end: int) -> int:
    """Return a checksum of the timer wheel and of the timer log before position `log_end`. Raises
    OSError."""
    return wheel.checksum() ^ log.checksum(log_end)


def details_of(checkpoint: TimerCheckpoint, precision_ms: int) -> dict[str, int | str]:
    """Return the `details` of the identity file: facts of the checkpoint by which a start
    recognises that it belongs to wheel and log."""
    return {
        "counter": checkpoint.counter,
        "timeMs": checkpoint.time_ms,
        "logEnd": checkpoint.log_end,
        "precisionMs": precision_ms,
    }


def discard_timer_files(store: Store, files: Files, root: str) -> None:
    """Discard the wheel and the timer log of a store, durably, and remove them. A slave calls this
    before it follows a master, because the master's checkpoint does not belong to them. Raises
    OSError."""
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
    """Remove the files of the timer log, whatever size they have. Raises OSError."""
    for name in files.names(f"{root}/timerlog"):
        files.remove(f"{root}/timerlog/{name}")
    if files.exists(f"{root}/timerlog"):
        files.sync_directory(f"{root}/timerlog")


@contextmanager
def suppress_full_disk() -> Iterator[None]:
    """Suppress an OSError that says that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_ERRORS:
            raise
