"""Check that a store still knows every timed message that waits.

While the commit log is read, each message of the timer queue is noted. It is removed again when
its delivery follows, or its next record after a roll. A message that is left waits: it has to be in
the timer wheel, or behind the checkpoint, where the next start reads it, unless it was recalled.

The wheel is checked as at the start of a broker: by its identity, its checksum, or its chains.
"""

from collections.abc import Iterator
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

    `position` and `offset` are those of its record in the timer queue. It is delivered to `topic`
    at `out_ms`, a time in ms since 1970.
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
        """Prepare the check of the store with these files. `finish` adds to `findings`."""
        self._layout = layout
        self._findings = findings
        self._waiting: dict[bytes, list[_TimedMessage]] = {}
        self._recalls: set[tuple[int, bytes]] = set()

    # --- while walking

    def add_run(self, run: Run) -> None:
        """Note the timed messages and recalls of a run of records.

        Messages whose delivery or next roll the run contains are removed again.
        """
        records = run.records
        data = records.raw.tobytes()
        if _TIMER_OUT_START not in data:
            return
        for row in _rows_with(data, records.starts, records.ends):
            start = int(records.starts[row])
            record = parse_record(data[start : int(records.ends[row])])
            out = find_property(record.properties, TIMER_OUT_KEY) if record is not None else None
            if record is None or out is None or not out.isdigit():
                continue
            if record.topic != _TIMER_TOPIC:
                self._remove_delivered(delivery_key(record))
                continue
            if ROLL_COUNT_KEY + b"\x01" in record.properties:
                self._remove_delivered(delivery_key(record, more_rolls=-1))
            if TIMER_DELETES_KEY in record.properties:
                key = find_property(record.properties, TIMER_DELETES_KEY) or b""
                self._recalls.add((int(out), key))
                continue
            message = _TimedMessage(
                record.physical_offset, record.queue_offset, int(out), target_queue(record)[0]
            )
            self._waiting.setdefault(delivery_key(record), []).append(message)

    def _remove_delivered(self, key: bytes) -> None:
        """Remove the oldest message that waits with a delivery key, if there is one."""
        messages = self._waiting.get(key)
        if messages is not None:
            messages.pop(0)
            if not messages:
                del self._waiting[key]

    # --- at the end

    def finish(self) -> None:
        """Compare the messages that wait with the timer wheel, and add findings.

        The wheel is read as the next start would find it.
        """
        layout = self._layout
        path = f"{layout.root}/config/timercheck"
        found = _TimerFilesOnDisk(layout, read_timer_checkpoint(layout.files, path))
        if not self._waiting and not found.exists:
            return
        if found.is_discarded:
            return  # the next start builds the files, and delivers the messages that wait
        if found.distrust_reason:
            # Without an incarnation in the checkpoint, RocketMQ has written these files last. It
            # trusts its own files, and each message that they lack is a finding of its own.
            severity = WARNING if found.checkpoint.incarnation else NOTE
            self._findings.add(
                severity,
                "timer-files",
                "timerwheel",
                f"timer wheel and timer log cannot be trusted: {found.distrust_reason}; a start of"
                " SluiceMQ builds them again, RocketMQ may lose timed messages",
            )
        listed = found.list_positions()
        for message in sorted(one for many in self._waiting.values() for one in many):
            self._check(message, found, listed)
        for due_ms, position in found.find_expired(layout.log.start):
            self._findings.add(
                ERROR,
                "timer-gone",
                f"{TIMER_TOPIC} commitlog {position}",
                f"a timed message is due at {due_ms} ms, and retention has removed its record: the"
                f" log begins at {layout.log.start}. Set fileReservedTime to more than the longest"
                " delay.",
            )

    def _check(self, message: _TimedMessage, found: "_TimerFilesOnDisk", listed: set[int]) -> None:
        """Add a finding for a message that waits, unless there is a reason why it is not lost.

        Such reasons are that the next start delivers it, that its topic was deleted, or that it was
        recalled. `listed` are the positions of all messages in the wheel.
        """
        checkpoint = found.checkpoint
        will_be_read = message.offset >= found.queue_offset
        is_past = message.out_ms + found.precision_ms <= checkpoint.read_ms
        if message.position in listed or (will_be_read and not is_past):
            return
        if is_past and is_revive_topic(message.topic):
            return
        if will_be_read and 0 <= checkpoint.replay_offset <= message.offset:
            return
        if not found.is_live(message) or self._is_recalled(message):
            return
        will_be_rebuilt = bool(found.distrust_reason)
        consequence = (
            "; a start of SluiceMQ delivers it"
            if will_be_rebuilt
            else ": it is lost. Send it again"
        )
        self._findings.add(
            WARNING if will_be_rebuilt else ERROR,
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
        size = int.from_bytes(self._layout.log.read(message.position, 4))
        record = parse_record(self._layout.log.read(message.position, size))
        return (
            record is not None and (message.out_ms, recall_key(record.properties)) in self._recalls
        )


def _rows_with(data: bytes, starts: np.ndarray, ends: np.ndarray) -> Iterator[int]:
    """Yield the rows whose records name a time in TIMER_OUT_MS."""
    at, last = data.find(_TIMER_OUT_START), -1
    while at >= 0:
        row = int(np.searchsorted(starts, at, side="right")) - 1
        if row > last and at < ends[row]:
            last = row
            yield row
        at = data.find(_TIMER_OUT_START, max(at + 1, int(ends[row]) if row >= 0 else 0))


class _TimerFilesOnDisk:
    """The timer wheel and timer log, as the next start would find them. Changes no file."""

    def __init__(self, layout: StoreLayout, known: TimerCheckpoint | None) -> None:
        files, root, self._layout = layout.files, layout.root, layout
        self.checkpoint = known or TimerCheckpoint()
        self._source = RecordSource(layout.log.start, layout.log.read)
        self._incarnation = read_incarnation(files, root)
        self._identity = IdentityFile(files, f"{root}/timerwheel", self._incarnation)
        sizes = [
            size
            for name in files.names(f"{root}/timerlog")
            if (size := _file_size(layout, f"{root}/timerlog/{name}"))
        ]
        self.exists = bool(sizes) or files.exists(f"{root}/timerwheel")
        self.wheel = TimerWheel(files, f"{root}/timerwheel", PRECISION_MS)
        self.log = TimerLog(files, f"{root}/timerlog", sizes[0] if sizes else UNIT_BYTES * 100)
        self.precision_ms = PRECISION_MS
        self.queue_offset = self.checkpoint.queue_offset
        self._deleted = DeletedTopics.load(files, root)
        self.distrust_reason = self._find_distrust_reason()

    @property
    def is_discarded(self) -> bool:
        """Whether the files are marked as discarded, so that a start has to build them."""
        found = self._identity.identity
        return found is not None and found.state is FileState.DISCARDED

    def _find_distrust_reason(self) -> str:
        """Load and check the files as a start would.

        Return why they cannot be trusted, as a phrase, or "" if they can.
        """
        known, log, wheel = self.checkpoint, self.log, self.wheel
        try:
            wheel.check_size(removes=False)
            log.load(known.log_end, removes=False)
        except StoreDamagedError as error:
            return error.fact.rstrip(".")
        verdict = self._identity.check(
            self._source, lambda: timer_files_checksum(wheel, log, known.log_end)
        )
        found: Identity | None = self._identity.identity
        if found is not None:
            precision_ms = found.details.get("precisionMs")
            if isinstance(precision_ms, int) and precision_ms > 0:
                self.precision_ms = wheel.precision_ms = precision_ms
        if verdict is FileVerdict.UNKNOWN and not (known.incarnation or found):
            if known.log_end and not wheel.exists:
                return "the timer wheel is missing"
            # RocketMQ or an older version has written the files: each message is compared.
            self._load_later_units()
            return ""
        if verdict in DISTRUST_REASONS:
            return DISTRUST_REASONS[verdict]
        if known.incarnation != self._incarnation or not known.matches_log(self._source):
            return "their checkpoint, config/timercheck, is not one that this store wrote"
        if log.end != known.log_end or (known.log_end and not wheel.exists):
            return "files are missing"
        if verdict is FileVerdict.SEALED:
            is_same = found is not None and found.details == identity_details(
                known, self.precision_ms
            )
            return "" if is_same else "config/timercheck is not that of the last orderly stop"
        self._load_later_units()
        return find_disagreement(wheel, log, known.read_ms, self.precision_ms) or ""

    def _load_later_units(self) -> None:
        """Add the units behind the checkpoint to the wheel, in memory, as a start does."""
        found = recover_units(self.wheel, self.log, self.queue_offset, self._layout.log.read)
        self.log.reset_end(max(found.end, self.log.end))
        self.queue_offset = found.queue_offset

    def list_positions(self) -> set[int]:
        """Return the positions in the commit log of all messages in the wheel."""
        return {position for _, position in self._list_live_units()}

    def find_expired(self, log_start: int) -> list[tuple[int, int]]:
        """Return (due time in ms, position) of messages in the wheel whose records are gone.

        Their positions are before `log_start`, where the commit log begins.
        """
        return [one for one in self._list_live_units() if one[1] < log_start]

    def _list_live_units(self) -> list[tuple[int, int]]:
        """Return (due time in ms, position) of the units whose slot in the wheel is occupied.

        Recalls are left out.
        """
        if not self.exists or not self.wheel.exists:
            return []
        first_ms = self.checkpoint.read_ms
        end_ms = first_ms + SLOTS // 2 * self.precision_ms
        chains = set(self.wheel.iter_occupied_ms(first_ms, end_ms))
        found: list[tuple[int, int]] = []
        for _, units in iter_unit_arrays(self.log, self.log.start, self.log.end):
            due_ms = units["write_ms"].astype(np.int64) + units["delay_ms"]
            is_live = (due_ms >= first_ms) & (due_ms < end_ms)
            is_live &= (units["unit_bytes"] == UNIT_BYTES) & ((units["magic"] & MAGIC_DELETE) == 0)
            rows = np.flatnonzero(is_live)
            pairs = zip(due_ms[rows].tolist(), units["position"][rows].tolist(), strict=True)
            found += [pair for pair in pairs if pair[0] in chains]
        return found

    def is_live(self, message: _TimedMessage) -> bool:
        """Return whether a message still counts: its topic was not deleted after it was stored."""
        return self._deleted.is_live(message.topic, message.position)


def _file_size(layout: StoreLayout, path: str) -> int:
    file = layout.files.open(path)
    try:
        return file.size()
    finally:
        file.close()
