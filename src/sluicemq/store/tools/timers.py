"""Check that a store still knows every timed message that waits.

The timer wheel has a slot for each second (or other precision) of the coming days. A slot leads to
a chain of units in the timer log: entries that locate the records of the messages due then.

While the commit log is read, each message of the timer queue is noted. It is removed again when
its delivery follows, or its next record after a roll. A message that is left waits: it has to be in
the timer wheel, or behind the checkpoint, where the next start reads it, unless it was recalled.

The wheel is checked as at the start of a broker: by its identity, its checksum, or its chains.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from sluicemq.errors import StoreDamagedError
from sluicemq.files.identity import FileState, FileVerdict, Identity, IdentityFile, RecordSource
from sluicemq.files.incarnation import read_incarnation
from sluicemq.model.system_names import TIMER_TOPIC, is_revive_topic
from sluicemq.record.codec import find_property
from sluicemq.store.directory import DeletedTopics
from sluicemq.store.timers.checking import find_disagreement, iter_unit_arrays, recover_units
from sluicemq.store.timers.files import (
    MAGIC_DELETE,
    SLOTS,
    UNIT_BYTES,
    TimerCheckpoint,
    TimerLog,
    TimerWheel,
    read_timer_checkpoint,
)
from sluicemq.store.timers.overdue import delivery_key, target_queue
from sluicemq.store.timers.placing import (
    ROLL_COUNT_KEY,
    TIMER_DELETES_KEY,
    TIMER_OUT_KEY,
    ParsedRecord,
    parse_record,
    recall_key,
)
from sluicemq.store.timers.state import DISTRUST_REASONS, identity_details, timer_files_checksum
from sluicemq.store.tools.checks import ERROR, NOTE, WARNING, Findings
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.walk import Run

PRECISION_MS: Final = 1000
"""timerPrecisionMs of a wheel without identity file."""
_TIMER_TOPIC: Final = TIMER_TOPIC.encode()
_TIMER_OUT_START: Final = TIMER_OUT_KEY + b"\x01"


class _TimedMessage(NamedTuple):
    """A timed message whose delivery has not been found in the log yet.

    `offset` is the offset of its record in the timer queue, and `position` is where the log has the
    record. The message is delivered to `topic` at `out_ms`, a time in ms since 1970.
    """

    position: int
    offset: int
    out_ms: int
    topic: str


class TimerCheck:
    """The check of the timed messages of one store.

    Call `add_run` with each run of records in the order of the log, then `finish`.
    """

    def __init__(self, layout: StoreLayout, findings: Findings) -> None:
        """Prepare the check of the timed messages of a store. `finish` adds to `findings`."""
        self._layout = layout
        self._findings = findings
        # The messages that wait by their delivery key, oldest first.
        self._waiting: dict[bytes, list[_TimedMessage]] = {}
        # The recalls, as (due time in ms, key of the recalled message).
        self._recalls: set[tuple[int, bytes]] = set()

    # --- while walking

    def add_run(self, run: Run) -> None:
        """Note the timed messages and recalls in a run of records, and forget delivered messages.

        A run is a table of records that follow each other in the log. If it contains the delivery
        of a message, or the next record of a message that rolled (was stored again because it is
        due far in the future), the earlier record is forgotten.
        """
        records = run.records
        record_bytes = records.raw.tobytes()
        if _TIMER_OUT_START not in record_bytes:
            return
        for row in _iter_rows_with_due_time(record_bytes, records.starts, records.ends):
            start = int(records.starts[row])
            record = parse_record(record_bytes[start : int(records.ends[row])])
            if record is None:
                continue
            out_digits = find_property(record.properties, TIMER_OUT_KEY)
            if out_digits is None or not out_digits.isdigit():
                continue
            self._note_record(record, int(out_digits))

    def _note_record(self, record: ParsedRecord, out_ms: int) -> None:
        """Note one record with the due time `out_ms`: a delivery, a recall, or a waiting message.

        A recall cancels a message. A message rolls if it is due later than the wheel reaches: it is
        stored again, and the record before no longer waits.
        """
        if record.topic != _TIMER_TOPIC:
            self._remove_oldest_waiting(delivery_key(record))
            return
        is_roll = ROLL_COUNT_KEY + b"\x01" in record.properties
        if is_roll:
            # The record before this one, which counts one roll fewer, waits no longer.
            self._remove_oldest_waiting(delivery_key(record, more_rolls=-1))
        if TIMER_DELETES_KEY in record.properties:
            key_of_recalled = find_property(record.properties, TIMER_DELETES_KEY) or b""
            self._recalls.add((out_ms, key_of_recalled))
            return
        topic = target_queue(record)[0]
        message = _TimedMessage(record.physical_offset, record.queue_offset, out_ms, topic)
        self._waiting.setdefault(delivery_key(record), []).append(message)

    def _remove_oldest_waiting(self, key: bytes) -> None:
        """Forget the oldest message that waits with this delivery key, if there is one."""
        messages = self._waiting.get(key)
        if messages is None:
            return
        messages.pop(0)
        if not messages:
            del self._waiting[key]

    # --- at the end

    def finish(self) -> None:
        """Compare the waiting messages with the timer wheel, and add findings for lost ones.

        Messages in the wheel whose records retention has removed are findings too. The wheel is
        read as the next start would find it.
        """
        layout = self._layout
        path = f"{layout.root}/config/timercheck"
        timer_files = _TimerFilesOnDisk(layout, read_timer_checkpoint(layout.files, path))
        if not self._waiting and not timer_files.exists:
            return
        if timer_files.is_discarded:
            return  # the next start builds the files, and delivers the messages that wait

        if timer_files.distrust_reason:
            self._report_distrust(timer_files)
        wheel_positions = timer_files.list_positions()
        for message in sorted(chain.from_iterable(self._waiting.values())):
            self._check_waiting(message, timer_files, wheel_positions)

        for due_ms, position in timer_files.find_expired(layout.log.start):
            self._findings.add(
                ERROR,
                "timer-gone",
                f"{TIMER_TOPIC} commitlog {position}",
                f"a timed message is due at {due_ms} ms, and retention has removed its record: the"
                f" log begins at {layout.log.start}. Set fileReservedTime to more than the longest"
                " delay.",
            )

    def _report_distrust(self, timer_files: "_TimerFilesOnDisk") -> None:
        """Add a finding that says why the timer wheel and the timer log cannot be trusted."""
        # Without an incarnation in the checkpoint, RocketMQ has written these files last. It
        # trusts its own files, and each message that they lack is a finding of its own.
        severity = WARNING if timer_files.checkpoint.incarnation else NOTE
        self._findings.add(
            severity,
            "timer-files",
            "timerwheel",
            f"timer wheel and timer log cannot be trusted: {timer_files.distrust_reason}; a"
            " start of SluiceMQ builds them again, RocketMQ may lose timed messages",
        )

    def _check_waiting(
        self,
        message: _TimedMessage,
        timer_files: "_TimerFilesOnDisk",
        wheel_positions: set[int],
    ) -> None:
        """Add a finding for a waiting message that is not in the wheel and will not be delivered.

        No finding is added if the next start delivers the message, if its topic was deleted, or if
        it was recalled. `wheel_positions` are the log positions of all messages in the wheel.
        """
        if message.position in wheel_positions:
            return

        # The next start reads the timer queue from the checkpoint on. Messages that are due later
        # get into the wheel, and those that were due before are delivered from the checkpoint's
        # `replay_offset` on.
        checkpoint = timer_files.checkpoint
        will_be_read = message.offset >= timer_files.queue_offset
        is_past = message.out_ms + timer_files.precision_ms <= checkpoint.read_ms
        if will_be_read and not is_past:
            return
        if is_past and is_revive_topic(message.topic):
            return
        if will_be_read and 0 <= checkpoint.replay_offset <= message.offset:
            return

        if not timer_files.is_live(message) or self._is_recalled(message):
            return
        will_be_rebuilt = bool(timer_files.distrust_reason)
        if will_be_rebuilt:
            severity = WARNING
            consequence = "; a start of SluiceMQ delivers it"
        else:
            severity = ERROR
            consequence = ": it is lost. Send it again"
        self._findings.add(
            severity,
            "timer-missing",
            f"{TIMER_TOPIC}/0 offset {message.offset}",
            f"the timed message at commit log position {message.position}, due at"
            f" {message.out_ms} ms for {message.topic}, is neither in the timer wheel nor delivered"
            + consequence,
        )

    def _is_recalled(self, message: _TimedMessage) -> bool:
        """Return whether the log contains a recall of a message."""
        if not self._recalls:
            return False
        log = self._layout.log
        record_bytes = int.from_bytes(log.read(message.position, 4))
        record = parse_record(log.read(message.position, record_bytes))
        if record is None:
            return False
        return (message.out_ms, recall_key(record.properties)) in self._recalls


def _iter_rows_with_due_time(data: bytes, starts: np.ndarray, ends: np.ndarray) -> Iterator[int]:
    """Yield the numbers of the records that contain the property TIMER_OUT_MS.

    Record i is `data[starts[i]:ends[i]]`. The starts ascend. Each number is yielded once.
    """
    last_row = -1
    match_index = data.find(_TIMER_OUT_START)
    while match_index >= 0:
        row = int(np.searchsorted(starts, match_index, side="right")) - 1
        is_in_record = row >= 0 and match_index < ends[row]
        if is_in_record and row > last_row:
            last_row = row
            yield row
        # Continue behind this record, since one match is enough.
        record_end = int(ends[row]) if row >= 0 else 0
        match_index = data.find(_TIMER_OUT_START, max(match_index + 1, record_end))


class _TimerFilesOnDisk:
    """The timer wheel and timer log, as the next start would find them. Changes no file."""

    def __init__(self, layout: StoreLayout, checkpoint: TimerCheckpoint | None) -> None:
        """Load wheel and timer log of the store, and check them without changing anything.

        `checkpoint` is the content of config/timercheck, or None if there is none.
        """
        self._layout = layout
        files = layout.files
        root = layout.root
        self.checkpoint = checkpoint or TimerCheckpoint()
        self._source = RecordSource(layout.log.start, layout.log.read)
        self._incarnation = read_incarnation(files, root)
        self._identity = IdentityFile(files, f"{root}/timerwheel", self._incarnation)

        log_file_bytes = _find_log_file_bytes(layout)
        self.exists = log_file_bytes > 0 or files.exists(f"{root}/timerwheel")
        self.wheel = TimerWheel(files, f"{root}/timerwheel", PRECISION_MS)
        self.log = TimerLog(files, f"{root}/timerlog", log_file_bytes or UNIT_BYTES * 100)

        self.precision_ms = PRECISION_MS
        self.queue_offset = self.checkpoint.queue_offset
        self._deleted_topics = DeletedTopics.load(files, root)
        # Last, because the check may change the precision and the offset.
        self.distrust_reason = self._find_distrust_reason()

    @property
    def is_discarded(self) -> bool:
        """Whether the files are marked as discarded, so that a start has to build them."""
        identity = self._identity.identity
        return identity is not None and identity.state is FileState.DISCARDED

    def _find_distrust_reason(self) -> str:
        """Load and check the files as a start would. Return why they cannot be trusted.

        The reason is a phrase; it is "" if the files can be trusted. Uses the slot width
        (precision) in the identity file if there is one. Adds units of the timer log that are
        behind the checkpoint to the wheel, in memory.
        """
        checkpoint = self.checkpoint
        log = self.log
        wheel = self.wheel
        try:
            wheel.check_size(removes=False)
            log.load(checkpoint.log_end, removes=False)
        except StoreDamagedError as error:
            return error.fact.rstrip(".")
        verdict = self._identity.check(
            self._source, lambda: timer_files_checksum(wheel, log, checkpoint.log_end)
        )
        # `check` has loaded the identity.
        identity: Identity | None = self._identity.identity
        self._apply_precision_of(identity)

        is_wheel_missing = bool(checkpoint.log_end) and not wheel.exists
        was_written_by_sluicemq = bool(checkpoint.incarnation or identity)
        if verdict is FileVerdict.UNKNOWN and not was_written_by_sluicemq:
            if is_wheel_missing:
                return "the timer wheel is missing"
            # RocketMQ or an older version has written the files: each message is compared.
            self._load_later_units()
            return ""

        if verdict in DISTRUST_REASONS:
            return DISTRUST_REASONS[verdict]
        is_own_checkpoint = checkpoint.incarnation == self._incarnation
        if not is_own_checkpoint or not checkpoint.matches_log(self._source):
            return "their checkpoint, config/timercheck, is not one that this store wrote"
        if log.end != checkpoint.log_end or is_wheel_missing:
            return "files are missing"
        if verdict is FileVerdict.SEALED:
            return self._compare_with_orderly_stop(identity)

        # After a crash, the chains of the wheel are compared with the units.
        self._load_later_units()
        return find_disagreement(wheel, log, checkpoint.read_ms, self.precision_ms) or ""

    def _apply_precision_of(self, identity: Identity | None) -> None:
        """Use the slot width (precision) in the identity file, if it contains a valid one."""
        if identity is None:
            return
        precision_ms = identity.details.get("precisionMs")
        if isinstance(precision_ms, int) and precision_ms > 0:
            self.precision_ms = precision_ms
            self.wheel.precision_ms = precision_ms

    def _compare_with_orderly_stop(self, identity: Identity | None) -> str:
        """Return "" if the checkpoint is from the last orderly stop, else a phrase that denies it.

        The identity file has noted fields of that checkpoint.
        """
        expected_details = identity_details(self.checkpoint, self.precision_ms)
        if identity is None or identity.details != expected_details:
            return "config/timercheck is not that of the last orderly stop"
        return ""

    def _load_later_units(self) -> None:
        """Add the units behind the checkpoint to the wheel, in memory, as a start does."""
        recovered = recover_units(self.wheel, self.log, self.queue_offset, self._layout.log.read)
        self.log.reset_end(max(recovered.end, self.log.end))
        self.queue_offset = recovered.queue_offset

    def list_positions(self) -> set[int]:
        """Return the positions in the commit log of all messages in the wheel."""
        return {position for _, position in self._list_messages_in_wheel()}

    def find_expired(self, log_start: int) -> list[tuple[int, int]]:
        """Return (due time in ms, position) of the messages in the wheel whose records are gone.

        Their positions are before `log_start`, the begin of the commit log.
        """
        return [
            (due_ms, position)
            for due_ms, position in self._list_messages_in_wheel()
            if position < log_start
        ]

    def _list_messages_in_wheel(self) -> list[tuple[int, int]]:
        """Return (due time in ms, position in the commit log) of the messages in the wheel.

        They are in the order of the timer log. Recalls, which cancel messages, are left out.
        Without a wheel the list is empty.
        """
        if not self.exists or not self.wheel.exists:
            return []
        # The wheel is a ring: half of it is the future, from the time up to which it was read.
        first_ms = self.checkpoint.read_ms
        end_ms = first_ms + SLOTS // 2 * self.precision_ms
        occupied_ms = set(self.wheel.iter_occupied_ms(first_ms, end_ms))

        messages: list[tuple[int, int]] = []
        for _, units in iter_unit_arrays(self.log, self.log.start, self.log.end):
            for due_ms, position in _iter_due_messages(units, first_ms, end_ms):
                if due_ms in occupied_ms:
                    messages.append((due_ms, position))
        return messages

    def is_live(self, message: _TimedMessage) -> bool:
        """Return whether a message still counts: its topic was not deleted after it was stored."""
        return self._deleted_topics.is_live(message.topic, message.position)


def _iter_due_messages(units: np.ndarray, first_ms: int, end_ms: int) -> Iterator[tuple[int, int]]:
    """Yield (due time in ms, position in the commit log) of messages due in [first_ms, end_ms).

    `units` are entries of the timer log, each of which locates one message or recall. Recalls and
    incomplete units are left out.
    """
    due_times_ms = units["write_ms"].astype(np.int64) + units["delay_ms"]
    is_due = (due_times_ms >= first_ms) & (due_times_ms < end_ms)
    is_whole_unit = units["unit_bytes"] == UNIT_BYTES
    is_recall = (units["magic"] & MAGIC_DELETE) != 0
    rows = np.flatnonzero(is_due & is_whole_unit & ~is_recall)
    yield from zip(due_times_ms[rows].tolist(), units["position"][rows].tolist(), strict=True)


def _find_log_file_bytes(layout: StoreLayout) -> int:
    """Return the size of the timer log's first file that is not empty; 0 if there is none.

    All files have this size.
    """
    directory = f"{layout.root}/timerlog"
    for name in layout.files.names(directory):
        file_bytes = _read_file_size(layout, f"{directory}/{name}")
        if file_bytes:
            return file_bytes
    return 0


def _read_file_size(layout: StoreLayout, path: str) -> int:
    """Return the size of a file in bytes."""
    file = layout.files.open(path)
    try:
        return file.size()
    finally:
        file.close()
