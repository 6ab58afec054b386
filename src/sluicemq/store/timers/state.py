"""State of the timers on disk: wheel, timer log and checkpoint as one thing.

All three are derived from the queue of rmq_sys_wheel_timer. A save syncs the log, then the changed
slots, then the checkpoint: the next start begins there, puts what the log holds behind it into the
slots, and takes in the queue from the message after the last of these on. So the wheel on disk
never points behind the log on disk. What a crash left behind the last good unit is wiped, or a
later crash might take it for its own. A unit is good when its message stands in the commit log,
behind the one before.

A start trusts wheel and log only with the identity of this store (`store.identity`, beside the
wheel, for both) and with a checkpoint that this store wrote. After an orderly stop their checksums
have to be right, after a crash they have to agree with each other (`checking`). Otherwise they are
removed, and the whole queue is taken in again. What was delivered before is known exactly: the
second of a message follows from its record alone, but for those that came too late for it, and the
checkpoint says behind which place of the queue there are such (`replay_offset`). What was delivered
after the checkpoint is found in the log (`overdue`); so is everything, if the checkpoint proves
nothing.

A slave has its master's checkpoint, and neither wheel nor log (`discard_timer_files`).
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from sluicemq.errors import StoreDamagedError
from sluicemq.files import FULL_ERRORS, PASSING_ERRORS, Files
from sluicemq.store.identity import IdentityFile, State, Verdict
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
from sluicemq.store.timers.placing import TIMER_TOPIC

log = logging.getLogger(__name__)

_QUIET_MS: Final = 60_000
REASONS: Final = {
    Verdict.FOREIGN: "they belong to another store, or to another commit log",
    Verdict.CHANGED: "they have changed since the last orderly stop",
    Verdict.UNKNOWN: "they have no identity, as those of RocketMQ and of older versions",
    Verdict.DISCARDED: "this replica was a slave, or a start did not get to its end",
}


class Start(NamedTuple):
    """How the timers begin.

    `is_rebuilt`: wheel and log are empty, and the whole queue is taken in. `is_exact`: the
    checkpoint says what was delivered when it was written. `is_settled`: nothing was delivered
    since.
    """

    is_rebuilt: bool
    is_exact: bool
    is_settled: bool


class TimerFiles:
    """Wheel, log and checkpoint as one thing. Times are ms, cut down to the precision."""

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
        """The one that is on disk. Everything due by its `done_ms` was delivered, of what lies
        before `old_end` in the commit log."""
        self.queue_offset = 0
        """The first message of the queue that is not in the files."""
        self.record_position = NONE
        """Where the message before lies in the commit log."""
        self.old_end = 0

    # --- the start

    def load(self) -> Start:
        """Blocking: find out whether the files can be trusted, and discard them if not. Raises
        OSError."""
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
                with full_disk_allowed():
                    self._identity.open()  # before the first unit, and the first delivery
                return Start(is_rebuilt=False, is_exact=True, is_settled=is_settled)
        self.begin_again(reason, is_exact=is_exact)
        return Start(is_rebuilt=True, is_exact=is_exact, is_settled=False)

    def _disagreement(self) -> str:
        from_ms = self.checkpoint.read_ms
        return disagreement(self.wheel, self.log, from_ms, self._precision_ms) or ""

    def _load_files(self, known: TimerCheckpoint, *, is_exact: bool) -> tuple[str, bool]:
        """Return why the files cannot be trusted, "" when they may be; and whether the store was
        closed in order with them."""
        try:
            self.wheel.check()
            self.log.load(known.log_end)
        except StoreDamagedError as error:
            return error.fact.rstrip("."), False
        source = self._store.record_source
        verdict = self._identity.judge(source, lambda: self._checksum(known.log_end))
        if self.checkpoint.time_ms == 0 and not self.wheel.exists:
            return "there is no checkpoint of them yet", False
        if verdict in REASONS:
            return REASONS[verdict], False
        if not is_exact or known.incarnation != self._store.incarnation.text:
            return "their checkpoint, config/timercheck, is not one that this store wrote", False
        if self.log.end != known.log_end or (known.log_end and not self.wheel.exists):
            return "files are missing", False
        found = self._identity.found
        is_sealed = verdict is Verdict.SEALED
        if is_sealed and found is not None and found.details != self._details(known):
            return "config/timercheck is not that of the last orderly stop", False
        self._sealed_checksum = found.checksum if is_sealed and found is not None else None
        return "", is_sealed

    def begin_again(self, reason: str, *, is_exact: bool = True) -> None:
        """Empty wheel and log, durably; the queue is taken in from its beginning. `reason` is a
        phrase for the log. Raises OSError."""
        found = self._identity.found
        is_there = self.wheel.exists or not self.log.is_empty
        is_own = self.checkpoint.incarnation == self._store.incarnation.text
        is_discarded = found is not None and found.state is State.DISCARDED
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
        """Log the timed messages that wait according to the timer log, and whose records the commit
        log does not hold any more: they cannot be taken in again."""
        with suppress(OSError):
            gone = gone_units(self.log, self._store.offset_min, self.checkpoint.read_ms)
            if gone:
                log.error(
                    "%d timed messages are lost: they are due from %d to %d, and retention has"
                    " removed their records, which lay at %s and on; the commit log begins at %d."
                    " Set fileReservedTime to more than the longest delay.",
                    len(gone), min(gone)[0], max(gone)[0],
                    ", ".join(str(position) for _, position in gone[:20]), self._store.offset_min,
                )  # fmt: skip

    def position_of(self, queue_offset: int) -> int:
        """Return where a message of the queue lies in the commit log; the log's end when there is
        none yet."""
        units = self._store.committed_units(TIMER_TOPIC, 0, queue_offset, 1)
        return int.from_bytes(units[:8]) if len(units) else self._store.written_offset

    def _revise(self) -> None:
        """Put what the log holds behind the checkpoint into the slots, and wipe the rest of it."""
        start = self.log.end
        found = revise(self.wheel, self.log, self.queue_offset, self._store.committed_record)
        self.queue_offset = found.queue_offset
        if found.record_position != NONE:
            self.record_position = found.record_position
        self.log.cut(found.end)
        if found.end != start:
            log.info("%d bytes of the timer log behind its checkpoint are used", found.end - start)

    def discard(self) -> None:
        """Give wheel and log up, durably: they have to be built. The checkpoint keeps what it says
        of deliveries, and lets any broker take in the whole queue. Raises OSError."""
        with full_disk_allowed():  # a file that is missing is not trusted either
            self._identity.discard()
        with full_disk_allowed():
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
        """A message belongs to a slot. HOT."""
        slot = self.wheel.get(slot_ms)
        first, last, count = (slot.first, slot.last, slot.messages) if slot else (NONE, NONE, 0)
        unit = self.log.append(
            last, magic, write_ms, slot_ms - write_ms, position, size, topic_hash
        )
        count += -1 if magic & DELETE else 1
        self.wheel.put(slot_ms, unit if first == NONE else first, unit, count)

    @property
    def last_unit(self) -> TimerUnit | None:
        """The unit at the end of the timer log."""
        return self.log.unit(self.log.end - UNIT_BYTES) if self.log.end else None

    def count(self, slot_ms: int) -> int:
        """How many messages a slot holds."""
        slot = self.wheel.get(slot_ms)
        return slot.messages if slot is not None else 0

    # --- reading

    def chain(self, slot_ms: int, position: int) -> Iterator[tuple[int, TimerUnit | None]]:
        """The units of a slot from one on, the last first, each with its place in the log; None for
        one where the chain is broken."""
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
        *, must: bool,
    ) -> Generator[Callable[[], None]]:  # fmt: skip
        """Writes a new checkpoint and what it stands for; nothing when only the time has changed,
        unless it `must` be or the last one is a minute old. Raises OSError.

        What it yields waits for the disk (raises OSError, StoreError) and may be called in another
        thread; close the iterator when it is done. Savings go through one by one; one that was
        given up before it began does nothing any more. After a disk error nothing is saved: the
        kernel may have thrown pages away. The last good checkpoint stays, and the next start begins
        there.
        """
        if self._is_broken:
            return
        self.log.write()
        old = self.checkpoint
        state = (read_ms, self.log.end, self.queue_offset)
        is_same = state[1:] == old[1:3] and not self.wheel.has_memory
        is_young = not old.time_ms or now_ms - old.time_ms < _QUIET_MS
        if is_same and (is_young or state == old[:3]) and not must:
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
                    self._identity.open()
                    self.log.sync(start, end)
                    self.wheel.write(slots)
                    crc = source.record_crc(position) if position != NONE else 0
                    new = new._replace(
                        record_position=NONE if crc is None else position, record_crc=crc or 0
                    )
                    write_timer_checkpoint(self._files, self._check_path, new)
                except OSError as error:
                    has_failed = error.errno not in FULL_ERRORS | PASSING_ERRORS
                    raise
                self._saved = number

        try:
            yield write
            is_written = True
        finally:
            if has_failed and not self._is_broken:
                self._is_broken = True
                log.error(
                    "the disk fails: timer files are saved no more. Check it, and start again."
                )
            self.wheel.settle(is_written=is_written)
            if is_written:
                self.checkpoint = new

    def seal(self) -> None:
        """Note, after the last save of an orderly stop, that the files are complete, and their
        checksum: the next start trusts them at once. Blocking. Raises OSError."""
        saved, details = self.checkpoint, self._details(self.checkpoint)
        is_there = self.wheel.exists or not self.log.is_empty
        if (
            self._is_broken
            or not is_there
            or self.wheel.has_memory
            or saved.log_end != self.log.end
        ):
            return
        found = self._identity.found
        if found is None or found.state is State.DISCARDED:
            return
        checksum = self._sealed_checksum
        if checksum is None:
            checksum = self._checksum(saved.log_end)
        self._identity.seal(self._store.record_source, saved.record_position, checksum, details)

    def _checksum(self, log_end: int) -> int:
        return checksum_of(self.wheel, self.log, log_end)

    def _details(self, checkpoint: TimerCheckpoint) -> dict[str, int | str]:
        return details_of(checkpoint, self._precision_ms)


def checksum_of(wheel: TimerWheel, log: TimerLog, log_end: int) -> int:
    """Return the checksum of both, of the timer log before `log_end`. Raises OSError."""
    return wheel.checksum() ^ log.checksum(log_end)


def details_of(checkpoint: TimerCheckpoint, precision_ms: int) -> dict[str, int | str]:
    """Return what belongs to the files, and is not in them."""
    return {
        "counter": checkpoint.counter,
        "timeMs": checkpoint.time_ms,
        "logEnd": checkpoint.log_end,
        "precisionMs": precision_ms,
    }


def discard_timer_files(store: Store, files: Files, root: str) -> None:
    """Give the wheel and the timer log of a store up, durably: a slave calls this before it follows
    a master, whose checkpoint must never meet them. Raises OSError."""
    names = files.names(root)
    if "timerwheel" not in names and "timerlog" not in names:
        return
    identity = IdentityFile(files, f"{root}/timerwheel", store.incarnation.text)
    with full_disk_allowed():
        identity.discard()
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
def full_disk_allowed() -> Iterator[None]:
    """Pass over errors that say that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_ERRORS:
            raise
