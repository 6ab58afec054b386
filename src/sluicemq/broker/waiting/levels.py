"""Delay levels: one queue of SCHEDULE_TOPIC_XXXX a level, each in the order of its times.

The unit of a message says when it is due instead of a tag code. All messages of a level wait
equally long, so the first of its queue is due first: one look a level tells when to wake. What is
delivered is an offset for each level, kept in `config/delayOffset.json` as RocketMQ writes it:
after a crash, delivery begins at the last offset that is safe, and what came after it comes again.

A unit that says a time later than a level can mean (the clock has gone back, or the level means
less now) is due at once; less than a minute too late is the store's own wait for a clock that went
back, and stays.
"""

import logging
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from sluicemq.broker.background import Progress, Slice
from sluicemq.broker.documents import Document
from sluicemq.broker.produce.redelivery import Record, Redelivery, entries, read_record
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import SCHEDULE_TOPIC
from sluicemq.clock import Clock
from sluicemq.config.settings import DEFAULT_LEVELS, parse_delay_levels
from sluicemq.errors import ProtocolError
from sluicemq.files import Files
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.wire import fastjson

log = logging.getLogger(__name__)

CLOCK_STEP_BACK_MAX_MS: Final = 60_000
_CHUNK_UNITS: Final = 256
_SAVES_PER_VERSION: Final = 200  # spec/store.md §11
_unpack_units: Final = UNIT.iter_unpack


class Level:
    """One level: how far it is delivered, and when its next message is due (None: nothing is)."""

    __slots__ = ("cancelled", "coming", "delay_ms", "due_ms", "progress", "queue_id", "saved")

    def __init__(self, queue_id: int, delay_ms: int, offset: int) -> None:
        self.queue_id = queue_id
        self.delay_ms = delay_ms
        self.progress = Progress(offset)
        self.coming = offset  # behind what this slice has put
        self.saved = offset  # what the file says, or is about to
        self.due_ms: int | None = None
        self.cancelled: set[int] = set()


class Waiting(NamedTuple):
    """A delayed message that is not delivered yet."""

    queue_id: int
    queue_offset: int
    due_ms: int
    record: Record | None
    """None: cancelled, or gone."""


class DelayLevels:
    """All levels. `arrived` says that a queue has grown, `deliver` and `settle` deliver."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        redelivery: Redelivery,
        files: Files,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._store = store
        self._redelivery = redelivery
        self._clock = clock
        self._levels: dict[int, Level] = {}
        self._saves = 0
        self._kept: dict[int, int] = {}  # of levels without a queue: as found
        self._version: dict[str, Any] = {"counter": 0, "stateVersion": 0, "timestamp": 0}
        self._is_default = True
        self.delivered = 0
        self.lost = 0
        """Messages whose records were gone when they were due."""
        root = settings.store.root
        self.document = Document(files, f"{root}/config/delayOffset.json", self._render)
        self.cancellations = Document(
            files, f"{root}/config/sluiceDelayCancelled.json", self._render_cancelled
        )

    # --- the files

    def load(self) -> None:
        """Blocking. Raises StoreDamagedError."""
        config = self._settings.store
        self._is_default = config.delay_levels_ms == parse_delay_levels(DEFAULT_LEVELS)
        offsets = self.document.load(_parse_offsets)
        if offsets is not None:
            self._version |= offsets[1]
            self._kept = offsets[0]
        for topic, queue_id in self._store.queues():
            if topic == SCHEDULE_TOPIC:
                self._level(queue_id, self._kept.pop(queue_id + 1, 0))
        for queue_id, cancelled in (self.cancellations.load(_parse_cancelled) or {}).items():
            self._level(queue_id).cancelled.update(cancelled)

    def _level(self, queue_id: int, offset: int = 0) -> Level:
        level = self._levels.get(queue_id)
        if level is None:
            delays_ms = self._settings.store.delay_levels_ms
            low, high = self._store.queue_offsets(SCHEDULE_TOPIC, queue_id)
            delay_ms = delays_ms[min(queue_id, len(delays_ms) - 1)]
            level = self._levels[queue_id] = Level(queue_id, delay_ms, min(max(offset, low), high))
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
            level.saved = level.progress.safe(synced)
            # What is not safe yet is written the next time.
            self.document.changed |= level.saved != level.progress.value
        return self.table()

    def _render_cancelled(self) -> str:
        return fastjson.dumps_file({
            str(level.queue_id): sorted(level.cancelled)
            for level in self._levels.values()
            if level.cancelled
        })  # fmt: skip

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
        units = self._store.reader.sound_units(SCHEDULE_TOPIC, level.queue_id, offset, 1)
        if not len(units):
            low, high = self._store.queue_offsets(SCHEDULE_TOPIC, level.queue_id)
            if offset >= low or low >= high:
                level.due_ms = None
                return
            log.error(
                "delayed messages %d to %d of level %d are deleted, undelivered",
                offset, low - 1, level.queue_id + 1,
            )  # fmt: skip
            self.lost += low - offset
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
        if not self._is_default:
            record = read_record(self._store.reader.view_at(position))
            return record.store_time_ms + level.delay_ms if record is not None else 0
        latest_ms = self._clock.now_ms() + level.delay_ms + CLOCK_STEP_BACK_MAX_MS
        return code if code <= latest_ms else 0

    # --- delivering

    def deliver(self, work: Slice) -> None:
        """Append what is due to its topics, as long as the slice lasts. Raises StoreError."""
        for level in self._levels.values():
            while level.due_ms is not None and level.due_ms <= work.now_ms and not work.is_over:
                self._deliver_some(level, work)

    def _deliver_some(self, level: Level, work: Slice) -> None:
        units = self._store.reader.sound_units(
            SCHEDULE_TOPIC, level.queue_id, level.coming, min(work.left, _CHUNK_UNITS)
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
                    self._redelivery.put(record)
                else:
                    self.lost += 1
                    log.error(
                        "the delayed message %d of level %d is gone: it cannot be delivered",
                        level.coming, level.queue_id + 1,
                    )  # fmt: skip
            level.coming += 1
            work.done()
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
            self.delivered += level.coming - level.progress.value
            level.progress.advance(level.coming, end)
            self.document.changed = True

    # --- what waits

    def pending(self, queue_id: int, offset: int) -> Iterator[Waiting]:
        """The messages of a level from an offset on that wait."""
        level = self._levels.get(queue_id)
        if level is None:
            return
        units = self._store.reader.sound_units
        offset = max(offset, level.coming)
        for entry in entries(self._store, SCHEDULE_TOPIC, queue_id, offset, units):
            record, due_ms = entry.record, 0
            if record is not None:
                due_ms = self._due_ms(level, entry.position, record.size_bytes, entry.code)
            if entry.offset in level.cancelled:
                record = None
            yield Waiting(queue_id, entry.offset, due_ms, record)

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


def _parse_offsets(text: str) -> tuple[dict[int, int], dict[str, int]]:
    """Level -> offset, and the version. Raises ProtocolError, ValueError, TypeError."""
    values = fastjson.loads(text)
    if not isinstance(values, dict) or not isinstance(values.get("offsetTable"), dict):
        raise ProtocolError("there is no offsetTable in it.")
    version = values.get("dataVersion")
    return (
        {int(level): int(offset) for level, offset in values["offsetTable"].items()},
        {str(name): int(value) for name, value in (version or {}).items()},
    )


def _parse_cancelled(text: str) -> dict[int, list[int]]:
    values = fastjson.loads(text)
    return {int(queue): [int(offset) for offset in offsets] for queue, offsets in values.items()}
