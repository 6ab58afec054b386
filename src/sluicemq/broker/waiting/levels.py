"""Messages that wait for a delay level, in the queues of SCHEDULE_TOPIC_XXXX.

Each level has a queue, whose messages are delivered in its order. The unit of a message contains
the time when it is due in place of a tag code. All messages of a level wait equally long, so the
first message of the queue is due first, and `DelayLevels` examines one unit of each level to find
when the next message is due.

`config/delayOffset.json` contains the offset up to which each level is delivered, as in RocketMQ.
After a crash, a level continues at the last offset that was durable, or behind the messages that
the log shows to be delivered since then (`logged_deliveries`).

A unit may contain a time that is later than the level allows, because the clock was set back or the
level has a shorter delay now. Then the message is due at once. A time that is less than a minute
too late is respected: the store itself lets messages wait so after the clock was set back.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

from sluicemq.broker.background import Progress, TimeSlice
from sluicemq.broker.documents import Document
from sluicemq.broker.produce.intake import DueMessageDelivery, iter_queue, read_record
from sluicemq.broker.settings import Settings
from sluicemq.broker.waiting.listing import WaitingEntry
from sluicemq.broker.waiting.logged_deliveries import (
    CHUNK_MESSAGES,
    DueLevelMessage,
    LoggedDeliveries,
)
from sluicemq.clock import SteadyClock
from sluicemq.config.settings import DEFAULT_LEVELS, parse_delay_levels
from sluicemq.errors import ProtocolError, StoreError
from sluicemq.files import Files
from sluicemq.files.identity import FileVerdict
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.supervision import Supervisor
from sluicemq.wire import fastjson

log = logging.getLogger(__name__)

CLOCK_STEP_BACK_MAX_MS: Final = 60_000
"""A due time that is later than the level allows by at most this is respected."""
LEVEL_PAUSE_MS: Final = 1000
"""A level whose delivery has failed is tried again after this time."""
_CHUNK_UNITS: Final = 256
_SAVES_PER_VERSION: Final = 200
"""The file's version is incremented after this many saves (spec/store.md §11)."""
_unpack_units: Final = UNIT.iter_unpack


@dataclass(slots=True, eq=False)
class DelayLevel:
    """The state of one delay level."""

    queue_id: int
    """The queue of its messages; the number of the level is one higher."""
    delay_ms: int
    progress: Progress
    """The offset up to which its messages are delivered."""
    next_offset: int
    """The offset of the next message to deliver. It is ahead of `progress` until the messages that
    were appended in this slice are stored."""
    saved_offset: int
    """The offset in the file, or the one that is about to be written."""
    due_ms: int | None = None
    """When the next message is due, in ms since 1970; None if no message waits."""
    cancelled_offsets: set[int] = field(default_factory=set)
    """The offsets of messages that must never be delivered."""


class DelayLevels:
    """All delay levels of a broker. It is one of the sources of `DelayedDelivery`."""

    name: Final = "delay levels"

    def __init__(
        self,
        settings: Settings,
        store: Store,
        redelivery: DueMessageDelivery,
        files: Files,
        clock: SteadyClock,
        jobs: Supervisor,
    ) -> None:
        """Create an empty table of delay levels for `store`. No file is read before `load`.

        `redelivery` appends due messages to their own topics. `jobs` supervises each level
        separately, so a level that fails does not keep the others from delivering.
        """
        self._jobs = jobs
        self._settings = settings
        self._store = store
        self._redelivery = redelivery
        self._clock = clock
        self._levels: dict[int, DelayLevel] = {}
        """By queue id: the levels that have a queue."""
        self._save_count = 0
        self._unused_offsets: dict[int, int] = {}
        """The offsets in the file of levels that have no queue, by number of the level."""
        self._version: dict[str, Any] = {"counter": 0, "stateVersion": 0, "timestamp": 0}
        self._has_default_delays = True
        """Whether the delays are RocketMQ's defaults. If so, due times are those in the units."""
        root = settings.store.root
        self.document = Document(files, f"{root}/config/delayOffset.json", self._render)

        self.cancellations = Document(
            files, f"{root}/config/sluiceDelayCancelled.json", self._render_cancelled
        )

    # --- the files

    def load(self) -> None:
        """Load the files, and find the offset at which each level continues. Blocking.

        It is the offset of the level in delayOffset.json, or 0 if the file does not have the level.
        The offset is then corrected by what the commit log shows:

        - It is moved back over messages that were due only after the last record was stored,
          because they cannot have been delivered.
        - It is moved forward over messages whose deliveries are in the log.

        If the newest message of a level was stored later than the steady clock shows, the clock is
        set to that time. A warning is logged for a file that this broker did not write last. Raises
        StoreDamagedError if a file cannot be parsed.
        """
        config = self._settings.store
        self._has_default_delays = config.delay_levels_ms == parse_delay_levels(DEFAULT_LEVELS)

        self._unused_offsets = self.document.load(self._parse_offsets) or {}
        if self.document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last: it was removed, is an older copy, belongs"
                " to another store, or RocketMQ has used the store since. Delayed messages that are"
                " undelivered according to the log are delivered; others may be delivered again. No"
                " action is needed.",
                self.document.path,
            )
        levels: list[DelayLevel] = []
        for topic, queue_id in self._store.queues():
            if topic == SCHEDULE_TOPIC:
                saved_offset = self._unused_offsets.pop(queue_id + 1, 0)
                levels.append(self._get_level(queue_id, saved_offset))
        for level in levels:
            self._rewind_to_undelivered(level)
        self._load_cancelled()
        self._skip_delivered(levels)
        for level in levels:
            self._raise_clock(level)

    def _parse_offsets(self, file_text: str) -> dict[int, int]:
        """Parse the text of delayOffset.json, and return the offset of each level by its number.

        `_version` is set to the version in the file. Raises ProtocolError or ValueError if the text
        is invalid.
        """
        document = fastjson.loads(file_text)
        offset_table = document.get("offsetTable") if isinstance(document, dict) else None
        if not isinstance(offset_table, dict):
            raise ProtocolError("The file has no object offsetTable.")
        version = document.get("dataVersion") or {}
        self._version |= {str(name): int(number) for name, number in version.items()}
        return {int(level): int(offset) for level, offset in offset_table.items()}

    def _load_cancelled(self) -> None:
        """Add the offsets in sluiceDelayCancelled.json to `cancelled_offsets` of the levels.

        If this broker did not write the file last, the file is ignored, and a warning is logged:
        the offsets could belong to other messages. Blocking. Raises StoreDamagedError if the file
        cannot be parsed.
        """
        cancelled_by_queue = self.cancellations.load(_parse_cancelled) or {}
        if self.cancellations.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last (removed, an older copy, or from another"
                " store). It is ignored, and cancelled messages are delivered. Cancel them again.",
                self.cancellations.path,
            )
            cancelled_by_queue = {}
            self.cancellations.changed = True
        for queue_id, cancelled in cancelled_by_queue.items():
            self._get_level(queue_id).cancelled_offsets |= cancelled

    def _skip_delivered(self, levels: list[DelayLevel]) -> None:
        """Let each level continue after the messages whose deliveries are in the commit log.

        A broker that was killed has delivered more messages than its file says. Each level with
        such messages is advanced, and their offsets are logged. The file is marked as changed.
        """
        deliveries = LoggedDeliveries(self._store, self._clock.lead_ms)
        for level in levels:
            offset = self._find_undelivered_offset(level, deliveries)
            if offset > level.next_offset:
                log.info(
                    "messages %d to %d of delay level %d were delivered before the broker was"
                    " killed; they are not delivered again",
                    level.next_offset,
                    offset - 1,
                    level.queue_id + 1,
                )
                # Not saved before the deliveries are on disk: the power may fail now.
                level.progress.advance(offset, self._store.written_offset)
                level.next_offset = offset
                self.document.changed = True
                self._update_due_ms(level)

    def _find_undelivered_offset(self, level: DelayLevel, deliveries: LoggedDeliveries) -> int:
        """Return the offset of the level's first message whose delivery is not in the log.

        The search begins at `next_offset` of the level.
        """
        offset = level.next_offset
        messages = self._take_due_before_log_end(level, offset, CHUNK_MESSAGES)
        if messages:
            # Two messages may be alike. The deliveries of the messages that the file says to be
            # delivered must not be taken for deliveries of the later ones.
            first_offset, _ = self._store.queue_offsets(SCHEDULE_TOPIC, level.queue_id)
            start = max(first_offset, offset - CHUNK_MESSAGES)
            deliveries.use_up(self._take_due_before_log_end(level, start, offset - start))

        while messages:
            delivered_count = deliveries.count_delivered(messages)
            offset += delivered_count
            if delivered_count < len(messages):
                break  # A level delivers in order, so all later messages are undelivered.
            messages = self._take_due_before_log_end(level, offset, CHUNK_MESSAGES)
        return offset

    def _take_due_before_log_end(
        self, level: DelayLevel, offset: int, count_max: int
    ) -> list[DueLevelMessage]:
        """Return the first `count_max` messages of `_iter_due_before_log_end`."""
        return list(islice(self._iter_due_before_log_end(level, offset), count_max))

    def _iter_due_before_log_end(self, level: DelayLevel, offset: int) -> Iterator[DueLevelMessage]:
        """Yield the messages of a level, from `offset` on, that may have been delivered.

        These are the messages that were due when the last record of the commit log was stored. They
        are consecutive. A message that is cancelled or whose record is missing has no record.
        """
        log_end_ms = self._store.recovered.store_time_ms + self._clock.lead_ms
        reader = self._store.reader
        while True:
            units = reader.valid_units(SCHEDULE_TOPIC, level.queue_id, offset, _CHUNK_UNITS)
            if not len(units):
                return
            for position, size, code in _unpack_units(units):
                due_ms = self._find_due_ms(level, position, size, code)
                if due_ms > log_end_ms:
                    return
                record = None
                if size != BLANK_SIZE and offset not in level.cancelled_offsets:
                    record = read_record(reader.view_at(position))
                yield DueLevelMessage(due_ms, record)
                offset += 1

    def _rewind_to_undelivered(self, level: DelayLevel) -> None:
        """Move a level back to its first message that cannot have been delivered.

        A message that was due after the last record of the log was stored cannot have been
        delivered, because its delivery would have stored a later record. If the file counts such
        messages as delivered, the level is set to the first of them, a warning is logged, and the
        file is marked as changed. Do nothing if this broker wrote the file last (its verdict is
        SEALED), because it is correct then.
        """
        if self.document.verdict is FileVerdict.SEALED:
            return
        offset = self._find_first_due_after_log_end(level)
        if offset < level.next_offset:
            log.warning(
                "%s says that the messages from %d on of delay level %d are delivered, but the log"
                " ends before they were due; delivery continues there",
                self.document.path,
                offset,
                level.queue_id + 1,
            )
            level.progress = Progress(offset)
            level.next_offset = offset
            level.saved_offset = offset
            self.document.changed = True
            self._update_due_ms(level)

    def _find_first_due_after_log_end(self, level: DelayLevel) -> int:
        """Return the offset of the level's first message that was due after the log ended.

        The log ended when its last record was stored. Only messages before `next_offset` of the
        level are examined, from the last one backwards. Return `next_offset` if there is none.
        """
        first_offset, _ = self._store.queue_offsets(SCHEDULE_TOPIC, level.queue_id)
        log_end_ms = self._store.recovered.store_time_ms + self._clock.lead_ms
        offset = level.next_offset
        while offset > first_offset:
            # The unit, the 20-byte entry of the consume queue, of the message before `offset`.
            unit = self._store.reader.valid_units(SCHEDULE_TOPIC, level.queue_id, offset - 1, 1)
            if not len(unit):
                break
            due_ms = self._find_due_ms(level, *UNIT.unpack_from(unit))
            if due_ms <= log_end_ms:
                break
            offset -= 1
        return offset

    def _raise_clock(self, level: DelayLevel) -> None:
        """Set the steady clock to the store time of the level's newest message, if it is behind.

        The clock is behind if the wall clock was set back while the broker was stopped. The
        messages would then wait too long. The store time is computed as the due time minus the
        delay of the level. This needs RocketMQ's default delays, because configured delays may have
        changed since. Do nothing with configured delays, and if no message of the level waits.
        """
        _, end_offset = self._store.queue_offsets(SCHEDULE_TOPIC, level.queue_id)
        if level.next_offset >= end_offset or not self._has_default_delays:
            return
        newest_unit = self._store.reader.valid_units(
            SCHEDULE_TOPIC, level.queue_id, end_offset - 1, 1
        )
        if len(newest_unit):
            _, size, due_ms = UNIT.unpack_from(newest_unit)
            if size != BLANK_SIZE:
                self._clock.raise_to(due_ms - level.delay_ms)
                self._update_due_ms(level)

    def _get_level(self, queue_id: int, offset: int = 0) -> DelayLevel:
        """Return the delay level of a queue. Create it first if the queue has none yet.

        The first message that a new level delivers is the one at `offset`, or at the nearest offset
        that the queue contains. Its delay is the configured one of level `queue_id` + 1.
        """
        level = self._levels.get(queue_id)
        if level is None:
            delays_ms = self._settings.store.delay_levels_ms
            first_offset, end_offset = self._store.queue_offsets(SCHEDULE_TOPIC, queue_id)
            delay_ms = delays_ms[min(queue_id, len(delays_ms) - 1)]
            start = min(max(offset, first_offset), end_offset)
            level = DelayLevel(queue_id, delay_ms, Progress(start), start, start)
            self._levels[queue_id] = level
            self._update_due_ms(level)
        return level

    def _render(self) -> str:
        """Prepare a save of delayOffset.json, and return the new text of the file.

        The text has for each level the offset up to which the deliveries are synced to disk.
        `saved_offset` of the level is set to it. If some deliveries of a level are not synced yet,
        the document stays marked as changed, so that a later save writes them. Cancellations of
        messages before the previous saved offset are removed.
        """
        self._save_count += 1
        if self._save_count % _SAVES_PER_VERSION == 0:
            self._version["counter"] += 1
            self._version["timestamp"] = self._clock.now_ms()
        synced = self._store.synced_offset
        for level in self._levels.values():
            # The file on disk is already beyond these offsets. Not even a crash can make them due
            # again, so their cancellations are not needed.
            passed = {offset for offset in level.cancelled_offsets if offset < level.saved_offset}
            level.cancelled_offsets -= passed
            self.cancellations.changed |= bool(passed)
            level.saved_offset = level.progress.durable_value(synced)
            self.document.changed |= level.saved_offset != level.progress.value
        return self.encode_offsets()

    def _render_cancelled(self) -> str:
        """Return the offsets of cancelled messages as JSON: `{"<queue id>": [offset, …]}`."""
        offsets_by_queue = {
            str(queue_id): sorted(level.cancelled_offsets)
            for queue_id, level in self._levels.items()
            if level.cancelled_offsets
        }
        return fastjson.dumps_file(offsets_by_queue)

    def encode_offsets(self) -> str:
        """Return the text of delayOffset.json with `saved_offset` of each level.

        The text is RocketMQ's `{"dataVersion": {…}, "offsetTable": {"<level>": offset, …}}`. Levels
        in the loaded file that have no queue keep their offsets.
        """
        offsets = {queue_id + 1: self._levels[queue_id].saved_offset for queue_id in self.queue_ids}
        all_offsets = self._unused_offsets | offsets
        return fastjson.dumps_pretty(
            {
                "dataVersion": self._version,
                "offsetTable": dict(sorted(all_offsets.items())),
            }
        )

    # --- due times

    def note_new_messages(self, queue_id: int) -> None:
        """Set the due time of a level whose queue has new visible messages.

        If messages of the level waited already, the first of them is still due first, and nothing
        changes. The queue may be the first of its level: then the level is created.
        """
        level = self._get_level(queue_id)
        if level.due_ms is None:
            self._update_due_ms(level)

    @property
    def next_due_ms(self) -> int | None:
        """The time when the next message is due, in ms since 1970; None if no message waits."""
        due_times_ms = [level.due_ms for level in self._levels.values() if level.due_ms is not None]
        return min(due_times_ms, default=None)

    def _update_due_ms(self, level: DelayLevel) -> None:
        """Set `due_ms` of a level to the due time of its next message, or None if none waits.

        The due time is read from the message's unit, its 20-byte entry in the consume queue. If
        retention has deleted the next messages, an error with their offsets is logged, and the
        level continues at the first message that the queue still contains.
        """
        offset = level.next_offset
        next_unit = self._store.reader.valid_units(SCHEDULE_TOPIC, level.queue_id, offset, 1)
        if len(next_unit):
            position, size, code = UNIT.unpack_from(next_unit)
            level.due_ms = self._find_due_ms(level, position, size, code)
            return

        first_offset, end_offset = self._store.queue_offsets(SCHEDULE_TOPIC, level.queue_id)
        is_removed = offset < first_offset < end_offset
        if not is_removed:
            level.due_ms = None
            return
        log.error(
            "delayed messages %d to %d of delay level %d were deleted before their delivery",
            offset,
            first_offset - 1,
            level.queue_id + 1,
        )
        level.next_offset = first_offset
        level.progress.advance(first_offset, 0)
        self._update_due_ms(level)

    def _find_due_ms(self, level: DelayLevel, position: int, size: int, code: int) -> int:
        """Return when a message of the level is due, in ms since 1970. 0 means at once.

        `position`, `size` and `code` are the fields of the message's unit, its entry in the consume
        queue. `code` is the due time that was computed when the message was stored.

        With RocketMQ's default delays, the result is `code`. With configured delays, it is the
        store time in the record plus the present delay of the level, because the delay may have
        changed. But if the steady clock is ahead of the wall clock, `code` is used here as well.

        The result is 0 if `code` is later than the level allows, and for a blank unit or a missing
        record, which have nothing to deliver.
        """
        if size == BLANK_SIZE:
            return 0
        if not self._has_default_delays and not self._clock.lead_ms:
            record = read_record(self._store.reader.view_at(position))
            return record.store_time_ms + level.delay_ms if record is not None else 0
        latest_ms = self._clock.now_ms() + level.delay_ms + CLOCK_STEP_BACK_MAX_MS
        return code if code <= latest_ms else 0

    # --- delivering

    def deliver(self, work: TimeSlice) -> None:
        """Append due messages of all levels to their topics, until the slice `work` is over.

        The messages count as delivered when `confirm_deliveries` is called. An unexpected error of
        a level is logged. That level is tried again after LEVEL_PAUSE_MS, and the other levels
        continue. Raises StoreError if the store accepts no messages.
        """
        store_error: StoreError | None = None

        def deliver(level: DelayLevel) -> None:
            # A StoreError concerns all levels. It must not count as a failure of this one.
            nonlocal store_error
            try:
                while level.due_ms is not None and level.due_ms <= work.now_ms and not work.is_over:
                    self._deliver_chunk(level, work)
            except StoreError as error:
                store_error = error

        for level in self._levels.values():
            if level.due_ms is None or level.due_ms > work.now_ms or work.is_over:
                continue
            if not self._jobs.run_now(f"delay level {level.queue_id + 1}", partial(deliver, level)):
                level.due_ms = work.now_ms + LEVEL_PAUSE_MS
            if store_error is not None:
                raise store_error

    def _deliver_chunk(self, level: DelayLevel, work: TimeSlice) -> None:
        """Append the next due messages of one level to their topics, at most _CHUNK_UNITS.

        `next_offset` of the level is advanced over them, and `due_ms` is set to the due time of the
        message that follows. Cancelled messages are skipped. A message whose record is missing is
        skipped, and an error is logged. Raises StoreError if the store accepts no messages.
        """
        units = self._store.reader.valid_units(
            SCHEDULE_TOPIC, level.queue_id, level.next_offset, min(work.remaining, _CHUNK_UNITS)
        )
        now_ms = work.now_ms
        for position, size, code in _unpack_units(units):
            if work.is_over:
                return
            level.due_ms = self._find_due_ms(level, position, size, code)
            if level.due_ms > now_ms:
                return
            if size != BLANK_SIZE and level.next_offset not in level.cancelled_offsets:
                record = read_record(self._store.reader.view_at(position))
                if record is not None:
                    self._redelivery.deliver(record)
                else:
                    log.error(
                        "cannot deliver message %d of delay level %d: its record is missing",
                        level.next_offset,
                        level.queue_id + 1,
                    )
            level.next_offset += 1
            work.count_done()
        self._update_due_ms(level)

    def confirm_deliveries(self, *, is_stored: bool) -> None:
        """Record whether the messages that `deliver` appended were stored by the group commit.

        If they were, the levels have advanced over these messages, and delayOffset.json is marked
        as changed. If not, the levels go back to the first of these messages, which is due at once.
        Levels that appended nothing do not change.
        """
        end = self._store.written_offset
        for level in self._levels.values():
            has_appended = level.next_offset != level.progress.value
            if not has_appended:
                continue
            if not is_stored:
                level.next_offset = level.progress.value
                level.due_ms = 0
                continue
            level.progress.advance(level.next_offset, end)
            self.document.changed = True

    # --- lists and cancellations

    def iter_waiting(self, queue_id: int, offset: int) -> Iterator[WaitingEntry]:
        """Yield an entry for each waiting message of a level's queue, from `offset` on.

        The entry has the record of the message, its due time and the cursor after it. The entry of
        a cancelled or missing message has no record. Yield nothing if the queue `queue_id` does not
        belong to a level.
        """
        level = self._levels.get(queue_id)
        if level is None:
            return
        units = self._store.reader.valid_units
        offset = max(offset, level.next_offset)
        for queued in iter_queue(self._store, SCHEDULE_TOPIC, queue_id, offset, units):
            record = queued.record
            due_ms = 0
            if record is not None:
                due_ms = self._find_due_ms(
                    level, queued.position, record.size_bytes, queued.tag_code
                )
            if queued.offset in level.cancelled_offsets:
                record = None
            cursor = f"L:{queue_id}:{queued.offset + 1}"
            yield WaitingEntry(record, due_ms, cursor, queue_id + 1, queued.offset)

    def find_waiting(self, queue_id: int, offset: int) -> WaitingEntry | None:
        """Return the entry of the waiting message at `offset` of a level's queue.

        Return None if the message is delivered, cancelled or missing, or if the queue does not
        belong to a level.
        """
        if queue_id not in self._levels or offset < self._levels[queue_id].next_offset:
            return None
        first_entry = next(self.iter_waiting(queue_id, offset), None)
        return first_entry if first_entry is not None and first_entry.record is not None else None

    def cancel(self, queue_id: int, offset: int) -> None:
        """Cancel the message at `offset` of a level, so that it is never delivered. Blocking.

        The cancellation is durable when this method returns. The queue must belong to a level; the
        caller checks the offset (`find_waiting`).

        Raises OSError if the cancellation cannot be saved. Then the message is not cancelled.
        """
        level = self._levels[queue_id]
        level.cancelled_offsets.add(offset)
        self.cancellations.changed = True
        try:
            self.cancellations.save()
        except OSError:
            level.cancelled_offsets.discard(offset)
            raise

    @property
    def queue_ids(self) -> list[int]:
        """The queue ids of the levels that have been used, ascending."""
        return sorted(self._levels)

    @property
    def waiting_count(self) -> int:
        """The number of messages of all levels that wait, without cancelled ones."""
        count = 0
        for queue_id, level in self._levels.items():
            _, end_offset = self._store.queue_offsets(SCHEDULE_TOPIC, queue_id)
            count += max(end_offset - level.next_offset, 0)
            count -= sum(offset >= level.next_offset for offset in level.cancelled_offsets)
        return count

    def get_runtime_info(self) -> dict[str, str]:
        """Return the fields of GET_BROKER_RUNTIME_INFO (28) about delay levels.

        `scheduleMessageOffset_<level>` is the delivered offset and the end of the queue, separated
        by a comma.
        """
        fields: dict[str, str] = {}
        for queue_id, level in sorted(self._levels.items()):
            _, end_offset = self._store.queue_offsets(SCHEDULE_TOPIC, queue_id)
            delivered_offset = level.progress.value
            fields[f"scheduleMessageOffset_{queue_id + 1}"] = f"{delivered_offset},{end_offset}"
        return fields


def _parse_cancelled(file_text: str) -> dict[int, set[int]]:
    """Return the offsets of cancelled messages in sluiceDelayCancelled.json, by queue id."""
    offsets_by_queue = fastjson.loads(file_text)
    return {int(queue_id): {*map(int, offsets)} for queue_id, offsets in offsets_by_queue.items()}
