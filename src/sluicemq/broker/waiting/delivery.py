"""Delay levels and timers together: one alarm, slices of work that leave others their turn.

`run` delivers what is due and prepares what comes, for a few milliseconds; when there is more it
asks for the loop's next turn, else for a call at the time at which the next message is due, to the
millisecond. The sweep calls it as well: it loads the near future, and it is what drives everything
under a clock that a test moves.

What a slice has put is in the log when its turn has ended; a turn that failed is put again after a
tenth of a second, until it succeeds.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol

from sluicemq.broker.background import Progress, SliceWorker, TimeSlice
from sluicemq.broker.documents import Document
from sluicemq.broker.group_commit import GroupCommit
from sluicemq.broker.produce.intake import (
    DueMessageDelivery,
    MessageIntake,
    iter_queue,
    read_record,
)
from sluicemq.broker.settings import Settings
from sluicemq.broker.waiting.kept_clock import KeptClock
from sluicemq.broker.waiting.logged_deliveries import CHUNK, Due, LoggedDeliveries
from sluicemq.broker.waiting.rewrite import DelayRewrite
from sluicemq.broker.waiting.timers import Timers, Waiting
from sluicemq.clock import SteadyClock
from sluicemq.config.settings import DEFAULT_LEVELS, parse_delay_levels
from sluicemq.errors import ProtocolError, StoreError
from sluicemq.files import Files
from sluicemq.files.identity import FileVerdict
from sluicemq.model.system_names import SCHEDULE_TOPIC, TIMER_TOPIC
from sluicemq.net.work.background import CallLater, TimerHandle
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.supervision import Supervisor
from sluicemq.wire import fastjson

log = logging.getLogger(__name__)

SLICE_S: Final = 0.004
SLICE_MESSAGES: Final = 2048
CLOCK_STEP_BACK_MAX_MS: Final = 60_000
PREPARE: Final = "timer files"
"""The job that takes timed messages in and loads the near future."""
LEVEL_PAUSE_MS: Final = 1000
_CHUNK_UNITS: Final = 256
_SAVES_PER_VERSION: Final = 200  # spec/store.md §11
_unpack_units: Final = UNIT.iter_unpack


@dataclass(slots=True, eq=False)
class Level:
    """One level: how far it is delivered, behind what this slice has put (`coming`), what the file
    says, or is about to, and when its next message is due (None: nothing is)."""

    queue_id: int
    delay_ms: int
    progress: Progress
    coming: int
    saved: int
    due_ms: int | None = None
    cancelled: set[int] = field(default_factory=set)


class DelayLevels:
    """One queue of SCHEDULE_TOPIC_XXXX a level, each in the order of its times.

    The unit of a message says when it is due instead of a tag code. All messages of a level wait
    equally long, so the first of its queue is due first: one look a level tells when to wake. What
    is delivered is an offset for each level, kept in `config/delayOffset.json` as RocketMQ writes
    it. After a crash, delivery begins at the last offset that is safe, or behind what the log shows
    to be delivered since (`logged_deliveries`).

    A unit that says a time later than a level can mean (the clock has gone back, or the level means
    less now) is due at once; less than a minute too late is the store's own wait for a clock that
    went back, and stays.
    """

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
        self._jobs = jobs
        self._settings = settings
        self._store = store
        self._redelivery = redelivery
        self._clock = clock
        self._levels: dict[int, Level] = {}
        self._saves = 0
        self._kept: dict[int, int] = {}  # of levels without a queue: as found
        self._version: dict[str, Any] = {"counter": 0, "stateVersion": 0, "timestamp": 0}
        self._is_default = True
        root = settings.store.root
        self.document = Document(files, f"{root}/config/delayOffset.json", self._render)

        def render_cancelled() -> str:
            levels = self._levels.items()
            cancelled = {str(number): sorted(level.cancelled) for number, level in levels}
            return fastjson.dumps_file({name: found for name, found in cancelled.items() if found})

        self.cancellations = Document(
            files, f"{root}/config/sluiceDelayCancelled.json", render_cancelled
        )

    # --- the files

    def load(self) -> None:
        """Blocking. Raises StoreDamagedError."""
        config = self._settings.store
        self._is_default = config.delay_levels_ms == parse_delay_levels(DEFAULT_LEVELS)

        def parse_offsets(text: str) -> dict[int, int]:
            values = fastjson.loads(text)
            if not isinstance(values, dict) or not isinstance(values.get("offsetTable"), dict):
                raise ProtocolError("there is no offsetTable in it.")
            version = values.get("dataVersion") or {}
            self._version |= {str(name): int(value) for name, value in version.items()}
            return {int(level): int(offset) for level, offset in values["offsetTable"].items()}

        self._kept = self.document.load(parse_offsets) or {}
        if self.document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last: it was removed, is an older copy or of"
                " another store, or RocketMQ has had the store meanwhile. Delayed messages that the"
                " log shows to be undelivered are delivered, others may come again. Nothing has to"
                " be done.", self.document.path,
            )  # fmt: skip
        levels = [
            self._level(queue_id, self._kept.pop(queue_id + 1, 0))
            for topic, queue_id in self._store.queues()
            if topic == SCHEDULE_TOPIC
        ]
        for level in levels:
            self._go_back(level)
        self._load_cancelled()
        self._skip_delivered(levels)
        for level in levels:
            self._go_on_from(level)

    def _load_cancelled(self) -> None:
        """Blocking. Raises StoreDamagedError."""

        def parse_cancelled(text: str) -> dict[int, set[int]]:
            return {int(queue): {*map(int, found)} for queue, found in fastjson.loads(text).items()}

        known = self.cancellations.load(parse_cancelled) or {}
        if self.cancellations.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last (removed, an older copy, or of another"
                " store): it is ignored, and messages that were cancelled are delivered. Cancel"
                " them again.", self.cancellations.path,
            )  # fmt: skip
            known = {}
            self.cancellations.changed = True
        for queue_id, cancelled in known.items():
            self._level(queue_id).cancelled |= cancelled

    def _skip_delivered(self, levels: list[Level]) -> None:
        """Let each level go on behind the messages that the log shows to be delivered: a broker
        that was killed has delivered more than its file says."""
        deliveries = LoggedDeliveries(self._store, self._clock.lead_ms)
        for level in levels:
            offset = level.coming
            if next(self._due_at_end(level, offset), None) is not None:
                low, _ = self._store.queue_offsets(SCHEDULE_TOPIC, level.queue_id)
                start = max(low, offset - CHUNK)
                deliveries.use_up(list(islice(self._due_at_end(level, start), offset - start)))
            while chunk := list(islice(self._due_at_end(level, offset), CHUNK)):
                count = deliveries.count(chunk)
                offset += count
                if count < len(chunk):
                    break
            if offset > level.coming:
                log.info(
                    "messages %d to %d of level %d were delivered before the broker was killed",
                    level.coming, offset - 1, level.queue_id + 1,
                )  # fmt: skip
                # Not saved before the deliveries are on disk: the power may fail now.
                level.progress.advance(offset, self._store.written_offset)
                level.coming = offset
                self.document.changed = True
                self._look(level)

    def _due_at_end(self, level: Level, offset: int) -> Iterator[Due]:
        """Yield the messages of a level, from `offset` on, that were due before the last record of
        the log was stored."""
        stored_ms = self._store.recovered.store_time_ms + self._clock.lead_ms
        while len(
            units := self._store.reader.valid_units(
                SCHEDULE_TOPIC, level.queue_id, offset, _CHUNK_UNITS
            )
        ):
            for position, size, code in _unpack_units(units):
                due_ms = self._due_ms(level, position, size, code)
                if due_ms > stored_ms:
                    return
                is_kept = size != BLANK_SIZE and offset not in level.cancelled
                view = self._store.reader.view_at(position) if is_kept else None
                yield Due(due_ms, read_record(view))
                offset += 1

    def _go_back(self, level: Level) -> None:
        """Let a level that does not prove itself go back to the first message that the log shows
        to be undelivered: it is due later than the last record of the log was stored, and its
        delivery would have stored a later one."""
        if self.document.verdict is FileVerdict.SEALED:
            return
        low, _ = self._store.queue_offsets(SCHEDULE_TOPIC, level.queue_id)
        stored_ms = self._store.recovered.store_time_ms + self._clock.lead_ms
        offset = level.coming
        while offset > low:
            units = self._store.reader.valid_units(SCHEDULE_TOPIC, level.queue_id, offset - 1, 1)
            if not len(units) or self._due_ms(level, *UNIT.unpack_from(units)) <= stored_ms:
                break
            offset -= 1
        if offset < level.coming:
            log.warning(
                "%s says that the messages from %d of level %d are delivered, but the log has not"
                " yet come to their time: delivery goes on there",
                self.document.path, offset, level.queue_id + 1,
            )  # fmt: skip
            level.progress, level.coming, level.saved = Progress(offset), offset, offset
            self.document.changed = True
            self._look(level)

    def _go_on_from(self, level: Level) -> None:
        """Let the clock go on from when the newest message that waits was stored."""
        end = self._store.queue_offsets(SCHEDULE_TOPIC, level.queue_id)[1]
        if level.coming >= end or not self._is_default:
            return
        units = self._store.reader.valid_units(SCHEDULE_TOPIC, level.queue_id, end - 1, 1)
        if len(units):
            _, size, due_ms = UNIT.unpack_from(units)
            if size != BLANK_SIZE:
                self._clock.raise_to(due_ms - level.delay_ms)
                self._look(level)

    def _level(self, queue_id: int, offset: int = 0) -> Level:
        level = self._levels.get(queue_id)
        if level is None:
            delays_ms = self._settings.store.delay_levels_ms
            low, high = self._store.queue_offsets(SCHEDULE_TOPIC, queue_id)
            delay_ms = delays_ms[min(queue_id, len(delays_ms) - 1)]
            start = min(max(offset, low), high)
            level = Level(queue_id, delay_ms, Progress(start), start, start)
            self._levels[queue_id] = level
            self._look(level)
        return level

    def _render(self) -> str:
        self._saves += 1
        if self._saves % _SAVES_PER_VERSION == 0:
            self._version["counter"] += 1
            self._version["timestamp"] = self._clock.now_ms()
        synced = self._store.synced_offset
        for level in self._levels.values():
            # Cancelled ones that even a crash cannot bring back are forgotten.
            gone = {offset for offset in level.cancelled if offset < level.saved}
            level.cancelled -= gone
            self.cancellations.changed |= bool(gone)
            level.saved = level.progress.durable_value(synced)
            # What is not safe yet is written the next time.
            self.document.changed |= level.saved != level.progress.value
        return self.table()

    def table(self) -> str:
        """The file's text, which request 45 answers too."""
        own = {queue_id + 1: self._levels[queue_id].saved for queue_id in self.queue_ids}
        offsets = dict(sorted((self._kept | own).items()))
        return fastjson.dumps_pretty({"dataVersion": self._version, "offsetTable": offsets})

    # --- what is due

    def arrived(self, queue_id: int) -> None:
        """A level has new messages."""
        level = self._level(queue_id)
        if level.due_ms is None:
            self._look(level)

    @property
    def next_ms(self) -> int | None:
        """When the next message is due; None when there is none."""
        return min(
            (level.due_ms for level in self._levels.values() if level.due_ms is not None),
            default=None,
        )

    def _look(self, level: Level) -> None:
        """Find out when the first message of a level is due."""
        offset = level.coming
        units = self._store.reader.valid_units(SCHEDULE_TOPIC, level.queue_id, offset, 1)
        if not len(units):
            low, high = self._store.queue_offsets(SCHEDULE_TOPIC, level.queue_id)
            if offset >= low or low >= high:
                level.due_ms = None
                return
            log.error(
                "delayed messages %d to %d of level %d are deleted, undelivered",
                offset, low - 1, level.queue_id + 1,
            )  # fmt: skip
            level.coming = low
            level.progress.advance(low, 0)
            self._look(level)
            return
        position, size, code = UNIT.unpack_from(units)
        level.due_ms = self._due_ms(level, position, size, code)

    def _due_ms(self, level: Level, position: int, size: int, code: int) -> int:
        """By the unit, which says it as RocketMQ would; with levels of our own by the record."""
        if size == BLANK_SIZE:
            return 0
        if not self._is_default and not self._clock.lead_ms:
            record = read_record(self._store.reader.view_at(position))
            return record.store_time_ms + level.delay_ms if record is not None else 0
        latest_ms = self._clock.now_ms() + level.delay_ms + CLOCK_STEP_BACK_MAX_MS
        return code if code <= latest_ms else 0

    # --- delivering

    def deliver(self, work: TimeSlice) -> None:
        """Append what is due to its topics, as long as the slice lasts. Raises StoreError.

        A level that fails otherwise is tried again after `LEVEL_PAUSE_MS`; the others go on.
        """
        stopped: StoreError | None = None

        def deliver(level: Level) -> None:
            nonlocal stopped
            try:
                while level.due_ms is not None and level.due_ms <= work.now_ms and not work.is_over:
                    self._deliver_some(level, work)
            except StoreError as error:
                stopped = error

        for level in self._levels.values():
            if level.due_ms is None or level.due_ms > work.now_ms or work.is_over:
                continue
            if not self._jobs.run_now(f"delay level {level.queue_id + 1}", partial(deliver, level)):
                level.due_ms = work.now_ms + LEVEL_PAUSE_MS
            if stopped is not None:
                raise stopped

    def _deliver_some(self, level: Level, work: TimeSlice) -> None:
        units = self._store.reader.valid_units(
            SCHEDULE_TOPIC, level.queue_id, level.coming, min(work.remaining, _CHUNK_UNITS)
        )
        now_ms = work.now_ms
        for position, size, code in _unpack_units(units):
            if work.is_over:
                return
            level.due_ms = self._due_ms(level, position, size, code)
            if level.due_ms > now_ms:
                return
            if size != BLANK_SIZE and level.coming not in level.cancelled:
                record = read_record(self._store.reader.view_at(position))
                if record is not None:
                    self._redelivery.deliver(record)
                else:
                    log.error(
                        "the delayed message %d of level %d is gone: it cannot be delivered",
                        level.coming, level.queue_id + 1,
                    )  # fmt: skip
            level.coming += 1
            work.count_done()
        self._look(level)

    def settle(self, *, is_stored: bool) -> None:
        """What `deliver` put is stored, or has to be put again."""
        end = self._store.written_offset
        for level in self._levels.values():
            if level.coming == level.progress.value:
                continue
            if not is_stored:
                level.coming = level.progress.value
                level.due_ms = 0
                continue
            level.progress.advance(level.coming, end)
            self.document.changed = True

    # --- what waits

    def pending(self, queue_id: int, offset: int) -> Iterator[Waiting]:
        """The messages of a level from an offset on that wait."""
        level = self._levels.get(queue_id)
        if level is None:
            return
        units = self._store.reader.valid_units
        offset = max(offset, level.coming)
        for entry in iter_queue(self._store, SCHEDULE_TOPIC, queue_id, offset, units):
            record, due_ms = entry.record, 0
            if record is not None:
                due_ms = self._due_ms(level, entry.position, record.size_bytes, entry.tag_code)
            if entry.offset in level.cancelled:
                record = None
            cursor = f"L:{queue_id}:{entry.offset + 1}"
            yield Waiting(record, due_ms, cursor, queue_id + 1, entry.offset)

    def find(self, queue_id: int, offset: int) -> Waiting | None:
        """The message if it waits."""
        if queue_id not in self._levels or offset < self._levels[queue_id].coming:
            return None
        waiting = next(self.pending(queue_id, offset), None)
        return waiting if waiting is not None and waiting.record is not None else None

    def cancel(self, queue_id: int, offset: int) -> None:
        """Never deliver this one. Durable on return; raises OSError."""
        level = self._levels[queue_id]
        level.cancelled.add(offset)
        self.cancellations.changed = True
        try:
            self.cancellations.save()
        except OSError:
            level.cancelled.discard(offset)
            raise

    @property
    def queue_ids(self) -> list[int]:
        """Of the levels that have been used, in order."""
        return sorted(self._levels)

    @property
    def count(self) -> int:
        """How many messages wait."""
        return sum(
            max(self._store.queue_offsets(SCHEDULE_TOPIC, queue_id)[1] - level.coming, 0)
            - sum(offset >= level.coming for offset in level.cancelled)
            for queue_id, level in self._levels.items()
        )

    def runtime(self) -> dict[str, str]:
        """For request 28: `scheduleMessageOffset_<level>` = delivered,end."""
        return {
            f"scheduleMessageOffset_{queue_id + 1}": f"{level.progress.value},"
            f"{self._store.queue_offsets(SCHEDULE_TOPIC, queue_id)[1]}"
            for queue_id, level in sorted(self._levels.items())
        }


class TimerMetrics:
    """`config/timermetrics`: how many timed messages wait, by topic (spec/store.md §11).

    For tools alone: nothing relies on it. After a crash the numbers may differ from the truth by
    what was stored and delivered since the file was written.
    """

    def __init__(self, files: Files, root: str, clock: SteadyClock) -> None:
        self._clock = clock
        self.counts: dict[str, int] = {}
        self._changed_ms: dict[str, int] = {}
        self._has_news = False
        self._version: dict[str, Any] = {"counter": 0, "stateVersion": 0, "timestamp": 0}

        def render() -> str:
            if self._has_news:
                self._has_news = False
                now_ms = self._clock.now_ms()
                self._version |= {"counter": self._version["counter"] + 1, "timestamp": now_ms}
                self._changed_ms |= dict.fromkeys(self.counts, now_ms)
            return self.text()

        self.document = Document(files, f"{root}/config/timermetrics", render)

    def load(self) -> None:
        """Raises StoreDamagedError."""
        values = self.document.load(fastjson.loads)
        if not isinstance(values, dict):
            return
        self._version |= values.get("dataVersion") or {}
        for topic, item in (values.get("timingCount") or {}).items():
            self.counts[topic] = int(item.get("count", 0))
            self._changed_ms[topic] = int(item.get("timeStamp", 0))

    def add(self, topic: str, count: int) -> None:
        """So many more wait, or fewer. HOT."""
        self.counts[topic] = self.counts.get(topic, 0) + count
        self.document.changed = self._has_news = True

    @property
    def total(self) -> int:
        """Of all topics."""
        return max(sum(self.counts.values()), 0)

    def text(self) -> str:
        """The file's text in one line, which request 61 answers too."""
        now_ms = self._clock.now_ms()
        counting = {
            topic: {"count": max(count, 0), "timeStamp": self._changed_ms.get(topic, now_ms)}
            for topic, count in sorted(self.counts.items())
        }
        return fastjson.dumps({"dataVersion": self._version, "timingCount": counting}).decode()


class Part(Protocol):
    """What has messages that are due some time."""

    @property
    def name(self) -> str:
        """Of its background job, for log and metrics."""

    @property
    def next_ms(self) -> int | None:
        """When the next one that is known of is due; None without one."""

    def deliver(self, work: TimeSlice) -> None:
        """Append what is due, as long as the slice lasts. Raises StoreError."""

    def settle(self, *, is_stored: bool) -> None:
        """What `deliver` put is stored, or has to be put again."""


class Delayed:
    """The broker's part for everything that is delivered later: `parts`, in their order."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        intake: MessageIntake,
        group_commit: GroupCommit,
        *,
        files: Files,
        clock: SteadyClock,
        call_soon: Callable[[Callable[[], None]], object],
        call_later: CallLater | None = None,
        jobs: Supervisor,
    ) -> None:
        """Without `call_later` the sweep alone drives. `jobs` supervises the parts: one that fails
        does not keep the others from delivering."""
        self._jobs = jobs
        self._settings = settings
        self._store = store
        self._clock = clock
        self._worker = SliceWorker(self.run, clock, call_soon)
        self.kept_clock = KeptClock(files, settings.store.root, clock)
        self.call_later = call_later
        self.redelivery = DueMessageDelivery(store, group_commit, intake.delivered_elsewhere)
        self.levels = DelayLevels(settings, store, self.redelivery, files, clock, jobs)
        self.metrics = TimerMetrics(files, settings.store.root, clock)
        self.timers = Timers(
            settings, store, self.redelivery, intake, files, clock, self.metrics.add,
            self.metrics.counts.clear,
        )  # fmt: skip
        self.parts: list[Part] = [self.levels, self.timers]
        intake.rewrites.append(
            DelayRewrite(settings, clock, self.timers.files.message_count).rewrite
        )
        self._alarm: TimerHandle | None = None
        self._alarm_s = 0.0

        def level_arrived(queue_id: int) -> None:
            self.levels.arrived(queue_id)
            self.plan()

        group_commit.topic_listeners[SCHEDULE_TOPIC] = level_arrived
        group_commit.topic_listeners[TIMER_TOPIC] = lambda queue_id: self._worker.schedule()

    def load(self) -> None:
        """Blocking; delivery may begin after it. Raises StoreDamagedError, OSError."""
        self.kept_clock.load()
        self.levels.load()
        self.metrics.load()  # first: timers that are built again are counted again
        self.timers.load()
        self._worker.is_enabled = not self._settings.is_read_only

    @property
    def documents(self) -> tuple[Document, ...]:
        return (
            self.levels.document, self.levels.cancellations, self.metrics.document,
            self.kept_clock.document,
        )  # fmt: skip

    # --- when

    @property
    def next_ms(self) -> int | None:
        """When the next message that is known of is due; None without one."""
        times = [part.next_ms for part in self.parts]
        return min((time for time in times if time is not None), default=None)

    def plan(self) -> None:
        """Come again: at once when there is work, else when the next message is due."""
        if not self._worker.is_enabled:
            return
        now_s = self._clock.monotonic_s()
        if self._worker.is_paused:
            self._wake_at(self._worker.paused_until_s, now_s)
            return
        now_ms, wakes_s = self._clock.now_ms(), []
        for part in self.parts:
            next_ms = self.timers.wakes_ms if part is self.timers else part.next_ms
            if next_ms is not None:
                due_s = now_s + (next_ms - now_ms) / 1000
                wakes_s.append(max(due_s, self._jobs.resume_s(part.name)))
        if self.timers.is_behind:
            wakes_s.append(max(now_s, self._jobs.resume_s(PREPARE)))
        first_s = min(wakes_s, default=math.inf)
        if first_s <= now_s:
            self._worker.schedule()
        elif first_s < math.inf:
            self._wake_at(first_s, now_s)

    def _wake_at(self, time_s: float, now_s: float) -> None:
        if self.call_later is None:
            return
        if self._alarm is not None:
            if self._alarm_s <= time_s:
                return  # it rings in time, and plans anew
            self._alarm.cancel()

        def ring() -> None:
            self._alarm = None
            self.run()

        self._alarm_s = time_s
        self._alarm = self.call_later(max(time_s - now_s, 0.0), ring)

    # --- the work

    def run(self) -> None:
        """One slice."""
        if not self._worker.is_enabled:
            return
        if not self._worker.is_paused:
            self._jobs.run_unless_pausing("delivery", self._deliver)
        self._jobs.run_unless_pausing(PREPARE, self._prepare)
        self._jobs.run_unless_pausing("delivery alarm", self.plan)

    def _deliver(self) -> None:
        """Deliver one slice of what is due."""
        work = TimeSlice(self._clock, SLICE_S, SLICE_MESSAGES)
        stopped: StoreError | None = None

        def deliver(part: Part) -> None:
            nonlocal stopped
            try:
                part.deliver(work)
            except StoreError as error:
                stopped = error

        are_well = True
        for part in self.parts:
            if stopped is None:
                are_well &= self._jobs.run_unless_pausing(part.name, partial(deliver, part))
        is_idle = work.remaining == SLICE_MESSAGES and stopped is None and are_well
        is_stored = is_idle or self.redelivery.commit()
        if stopped is not None or not is_stored:
            why = stopped or "the turn failed"
            self._worker.pause_after_failure(f"delayed messages wait longer: {why}")
        else:
            self._worker.clear_failure()
        for part in self.parts:
            settle = partial(part.settle, is_stored=is_stored)
            self._jobs.run_now(f"{part.name}, settling", settle)

    def _prepare(self) -> None:
        try:
            self.timers.prepare(TimeSlice(self._clock, SLICE_S, SLICE_MESSAGES))
        except OSError as error:
            self._worker.pause_after_failure(f"the timer log cannot be written: {error}")

    def stop(self) -> None:
        """Deliver no more; how the clocks differ now is saved with the documents."""
        self.kept_clock.document.changed = True
        self._worker.is_enabled = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def save(self) -> None:
        """Blocking, at the end or for who has no other thread: wheel, log and checkpoint."""
        with closing(self.timers.save(is_last=True)) as steps:
            for step in steps:
                step()
        if not self._worker.is_enabled:  # nothing is delivered, or taken in, any more
            self.timers.seal()

    def clean(self) -> None:
        """Now and then: timer log files that nothing needs any more. Raises OSError."""
        self.timers.files.log.remove_before(self._store.log_start)

    def runtime(self) -> dict[str, str]:
        """For request 28 (spec/admin.md §3)."""
        timers = self.timers
        behind_ms = max(self._clock.now_ms() - timers.read_ms - 1000, 0)
        return {
            "timerReadBehind": str(behind_ms // 1000),
            "timerOffsetBehind": str(timers.queue_behind),
            "timerCongestNum": str(self.metrics.total),
            **self.levels.runtime(),
        }
