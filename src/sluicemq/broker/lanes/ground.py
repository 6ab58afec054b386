"""What the lanes of all groups stand on: queues of messages, the groups' offsets, and their file.

Beside the offsets stands where each group was a while ago, its *floor*: a new lane begins there, so
that what nobody wanted in the last half minute is not lost for it.

Who gets which messages of a group is on disk before anybody reads by it (`is_unsaved`): a reader
may not be ahead of rules that a crash has undone.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Final

from sluicemq.broker.background import Offload
from sluicemq.broker.documents import Document
from sluicemq.broker.lanes.filters import rule_filter
from sluicemq.broker.lanes.places import Queue
from sluicemq.broker.lanes.rules import Rule, parse_key
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.record.layout import RECORD_BEGIN
from sluicemq.store.read import ReadStatus
from sluicemq.store.store import Store

log = logging.getLogger(__name__)

FLOOR_MS: Final = 30_000
_SIZE_AND_OFFSET: Final = RECORD_BEGIN.only("size", "queue_offset")


class Floor:
    """Where a group was a while ago, queue by queue."""

    __slots__ = ("first", "now", "time_ms")

    def __init__(self, offsets: dict[Queue, int], time_ms: int) -> None:
        self.first = self.now = offsets
        self.time_ms = time_ms


class Ground:
    """Queues, offsets and the file of lanes; `render` makes its text, `look_again(topic, queue id)`
    lets the pulls that wait there look."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        offsets: Offsets,
        store: Store,
        files: Files,
        clock: Clock,
        look_again: Callable[[str, int], None],
        call_soon: Callable[[Callable[[], None]], object],
        offload: Offload,
        render: Callable[[], str],
        on_saved: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._store = store
        self._look_again = look_again
        self._call_soon = call_soon
        self._offload = offload
        self._on_saved = on_saved
        self._is_saving = False
        self._changes = 0
        self._unsaved: dict[str, int] = {}
        """Groups whose rules are not on disk yet -> their last change."""
        self._rests_until_s = 0.0
        self._floors: dict[str, Floor] = {}
        self.offsets = offsets
        self.clock = clock
        self.document = Document(files, f"{settings.store.root}/config/sluiceLanes.json", render)

    @property
    def kept_ms(self) -> int:
        """How long what an idle lane has not read is kept for it."""
        return self._settings.broker.filter_kept_ms

    # ------------------------------------------------------------------------------- the file

    def changed(self) -> None:
        self.document.changed = True

    def save(self, group: str) -> None:
        """Who gets which messages of a group has changed. All changes of a turn are one write,
        elsewhere."""
        self._changes += 1
        self._unsaved[group] = self._changes
        self.flush()

    def is_unsaved(self, group: str) -> bool:
        """Are the group's rules not on disk yet? Then its pulls wait."""
        return group in self._unsaved

    def flush(self) -> None:
        """Writes what has changed, soon; a large file once a second, however many come."""
        is_due = self.clock.monotonic_s() >= self._rests_until_s
        if not self._is_saving and is_due and (self._unsaved or self.document.changed):
            self._is_saving = True
            self._call_soon(self._write)

    def flush_unsaved(self) -> None:
        """Once a second: what had to wait."""
        if self._unsaved:
            self.flush()

    def _write(self) -> None:
        self.document.changed = True
        write, last = self.document.take(), self._changes

        def written(outcome: object) -> None:
            if isinstance(outcome, Exception):
                log.error("%s cannot be written: %s", self.document.path, outcome)
            self._is_saving = False
            for group in [group for group, change in self._unsaved.items() if change <= last]:
                del self._unsaved[group]
                self._on_saved(group)
            if self._unsaved:
                self.flush()

        if write is not None:
            self._offload(write, written)

    def rest(self) -> None:
        """The file is large: the next write is not before a second has passed."""
        self._rests_until_s = self.clock.monotonic_s() + 1

    # --------------------------------------------------------------------------------- queues

    def end(self, queue: Queue) -> int:
        return self._store.queue_offsets(*queue)[1]

    def queues(self, group: str, key: str) -> Iterator[Queue]:
        """The queues of the topics of a subscription, with the retry topic's."""
        for name in (*parse_key(key), RETRY_PREFIX + group):
            topic = self._topics.get(name)
            if topic is not None:
                for queue_id in range(topic.config.read_queues):
                    yield name, queue_id

    def look_again(self, queue: Queue) -> None:
        self._look_again(*queue)

    def next_match(
        self, queue: Queue, offset: int, rule: Rule, until: int | None
    ) -> tuple[int, bool]:
        """The first message from `offset` on that a rule wants, or how far it was looked for;
        `until`: not beyond."""
        if not rule:
            return (self.end(queue) if until is None else until), False
        room = None if until is None else until - offset
        found = self._store.reader.read(*queue, offset, 1, None, rule_filter(rule), room)
        if found.status is ReadStatus.FOUND:
            return _SIZE_AND_OFFSET.unpack_from(found.data[0])[1], True
        return max(found.next_offset, offset), False

    def count(self, queue: Queue, offset: int, rule: Rule, until: int) -> tuple[int, int]:
        """How many messages a rule wants, in a slice of the queue: (where it ends, count)."""
        room = until - offset
        result = self._store.reader.read(*queue, offset, room, 1 << 16, rule_filter(rule), room)
        if result.status in {ReadStatus.FOUND, ReadStatus.NO_MATCHED_MESSAGE}:
            return max(result.next_offset, offset + 1), result.count
        return until, 0

    # ----------------------------------------------------------------------------- the floors

    def floor(self, group: str, queue: Queue) -> int:
        """Where a new lane begins: the place of the group a while ago, -1 where it has none."""
        floor = self._floors.get(group)
        found = floor.first.get(queue, -1) if floor is not None else -1
        return found if found >= 0 else self.offsets.committed(group, *queue)

    def first_member(self, group: str, key: str, *, from_first: bool) -> None:
        """A group is online, or wants something else than before."""
        offsets = {}
        for queue in self.queues(group, key):
            low, high = self._store.queue_offsets(*queue)
            fetched = min(self.offsets.fetched(group, *queue), high)
            known = max(self.offsets.committed(group, *queue), fetched)
            unknown = low if from_first or low == 0 else high
            offsets[queue] = min(known, high) if known >= 0 else unknown
        self._floors[group] = Floor(offsets, self.clock.now_ms())

    def last_member_left(self, group: str) -> None:
        self._floors.pop(group, None)

    def lift_floors(self) -> None:
        """Once a second."""
        now = self.clock.now_ms()
        for group, floor in self._floors.items():
            if now - floor.time_ms >= FLOOR_MS:
                floor.first, floor.time_ms = floor.now, now
                floor.now = {
                    queue: max(self.offsets.committed(group, *queue), old)
                    for queue, old in floor.first.items()
                }


def end_of(data: list[memoryview]) -> int:
    """Behind the last of the records, which lie one after another in each piece."""
    piece, at = data[-1], 0
    while True:
        size, offset = _SIZE_AND_OFFSET.unpack_from(piece, at)
        if at + size >= len(piece) or not size:
            return int(offset) + 1
        at += size
