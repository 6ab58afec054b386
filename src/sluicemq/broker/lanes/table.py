"""How many messages no lane of a group wants: counted a slice at a time, behind the last lane.

Only what every lane has passed is counted, so that a lane which comes meanwhile and wants it is
heard. What no lane matches is lost to the group as it is in RocketMQ, but here somebody can see it.

The groups that have lanes, and their file (config/sluiceLanes.json).

Beside the lanes themselves (`lanes.py`) stands where each group was a while ago, its *floor*: a
new lane begins there, so that what nobody wanted in the last half minute is not lost for it.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from sluicemq.broker.background import Elsewhere, in_place
from sluicemq.broker.documents import Document
from sluicemq.broker.lanes import file as lane_file
from sluicemq.broker.lanes.filters import rule_filter
from sluicemq.broker.lanes.group import IDLE_MS, GroupLanes, Lane, Queue
from sluicemq.broker.lanes.places import Place, whole
from sluicemq.broker.lanes.rules import Rule, atoms_of, claimed, clause, own_claim, parse_key
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.record.layout import RECORD_HEAD
from sluicemq.store.store import ReadStatus, Store

EVALUATIONS_MAX: Final = 4096
"""Of expressions, for a queue each second: what is counted may lag behind."""


def count_unmatched(lanes: GroupLanes) -> None:
    """Messages that every lane has passed and none wants, a slice of each queue."""
    live, idle = lanes.ordered()
    for topic in {topic for key in (*live, *idle) for topic in atoms_of(key)}:
        orders = [order for keys in (live, idle) for order in claimed(topic, keys) if order]
        rule = clause([], *orders)
        room = EVALUATIONS_MAX // (1 + sum(1 for order in orders for _ in order.others())) + 1
        queues = {q for lane in lanes.lanes.values() for q in lane.places if q[0] == topic}
        for queue in sorted(queues):
            _count(lanes, queue, rule, room)


def _count(lanes: GroupLanes, queue: Queue, rule: Rule, room: int) -> None:
    places = [lane.places[queue] for lane in lanes.lanes.values() if queue in lane.places]
    least = min(place.position for place in places)
    here = lanes.counted.setdefault(queue, least)
    if here < least:
        if rule:
            here, found = lanes.parts.count(queue, here, rule, min(least, here + room))
            lanes.unmatched += found
        else:
            here = least
        lanes.counted[queue] = here


log = logging.getLogger(__name__)

PLACES_QUICK: Final = 2000
"""So many places of lanes are made a text in a few milliseconds."""


class _Floor:
    """Where a group was a while ago, queue by queue."""

    __slots__ = ("first", "now", "time_ms")

    def __init__(self, offsets: dict[Queue, int], time_ms: int) -> None:
        self.first = self.now = offsets
        self.time_ms = time_ms


class Lanes:
    """The groups that have lanes, and their file (config/sluiceLanes.json)."""

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
        elsewhere: Elsewhere = in_place,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._store = store
        self._look_again = look_again
        self._call_soon = call_soon
        self._elsewhere = elsewhere
        self._is_saving = False
        self._changes = 0
        self._unsaved: dict[str, int] = {}
        """Groups whose rules are not on disk yet -> their last change."""
        self._rests_until_s = 0.0
        self.offsets = offsets
        self.clock = clock
        self.table: dict[str, GroupLanes] = {}
        self._floors: dict[str, _Floor] = {}
        self.document = Document(
            files, f"{settings.store.root}/config/sluiceLanes.json", self._render
        )

    # ---------------------------------------------------------------- what the lanes ask for

    @property
    def kept_ms(self) -> int:
        return self._settings.broker.filter_kept_ms

    def changed(self) -> None:
        self.document.changed = True

    def save(self, group: str) -> None:
        """Who gets which messages of a group has changed. It is on disk before anybody reads by it
        (`is_unsaved`): a reader may not be ahead of rules that a crash has undone. All changes of
        a turn are one write, elsewhere."""
        self._changes += 1
        self._unsaved[group] = self._changes
        self.flush()

    def is_unsaved(self, group: str) -> bool:
        """Are the group's rules not on disk yet? Then its pulls wait."""
        return group in self._unsaved

    def flush(self) -> None:
        """Writes what has changed, soon; a large file once a second, however many come."""
        if (
            not self._is_saving
            and (self._unsaved or self.document.changed)
            and self.clock.monotonic_s() >= self._rests_until_s
        ):
            self._is_saving = True
            self._call_soon(self._write)

    def _write(self) -> None:
        places = sum(len(n.places) for made in self.table.values() for n in made.lanes.values())
        if places > PLACES_QUICK:
            self._rests_until_s = self.clock.monotonic_s() + 1
        self.document.changed = True
        write, last = self.document.take(), self._changes

        def written(outcome: object) -> None:
            if isinstance(outcome, Exception):
                log.error("%s cannot be written: %s", self.document.path, outcome)
            self._is_saving = False
            groups = [group for group, change in self._unsaved.items() if change <= last]
            for group in groups:
                del self._unsaved[group]
                self._read_on(group)
            if self._unsaved:
                self.flush()

        if write is not None:
            self._elsewhere(write, written)

    def _read_on(self, group: str) -> None:
        """Pulls that waited for the rules to be on disk."""
        made = self.table.get(group)
        for queue in {q for lane in made.lanes.values() for q in lane.places} if made else ():
            self.look_again(queue)

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
        found = self._read(queue, offset, rule, until)
        if found is None:
            return (self.end(queue) if until is None else until), False
        if found.status is ReadStatus.FOUND:
            return _offset_of(found.data[0]), True
        return max(found.next_offset, offset), False

    def _read(self, queue: Queue, offset: int, rule: Rule, until: int | None) -> Any:
        """None when nothing can match."""
        if not rule:
            return None
        room = None if until is None else until - offset
        return self._store.reader.read(*queue, offset, 1, None, rule_filter(rule), room)

    def count(self, queue: Queue, offset: int, rule: Rule, until: int) -> tuple[int, int]:
        """How many messages a rule wants, in a slice of the queue: (where it ends, count)."""
        result = self._store.reader.read(
            *queue, offset, until - offset, 1 << 16, rule_filter(rule), until - offset
        )
        if result.status in {ReadStatus.FOUND, ReadStatus.NO_MATCHED_MESSAGE}:
            return max(result.next_offset, offset + 1), result.count
        return until, 0

    # ---------------------------------------------------------------------------- the floors

    def floor(self, group: str, queue: Queue) -> int:
        """Where a new lane begins: the place of the group a while ago, -1 where it has none."""
        floor = self._floors.get(group)
        found = floor.first.get(queue, -1) if floor is not None else -1
        if found < 0:
            found = self.offsets.committed(group, *queue)
        return found

    def first_member(self, group: str, key: str, *, from_first: bool) -> None:
        """A group is online, or wants something else than before."""
        self._floors[group] = _Floor(
            {queue: self._base(group, queue, from_first) for queue in self.queues(group, key)},
            self.clock.now_ms(),
        )

    def _base(self, group: str, queue: Queue, from_first: bool) -> int:
        known = max(
            self.offsets.committed(group, *queue),
            min(self.offsets.fetched(group, *queue), self.end(queue)),
        )
        low, high = self._store.queue_offsets(*queue)
        if known >= 0:
            return min(known, high)
        return low if from_first or low == 0 else high

    def last_member_left(self, group: str) -> None:
        self._floors.pop(group, None)

    def _lift_floors(self) -> None:
        now = self.clock.now_ms()
        for group, floor in self._floors.items():
            if now - floor.time_ms >= IDLE_MS:
                floor.first, floor.time_ms = floor.now, now
                floor.now = {
                    queue: max(self.offsets.committed(group, *queue), old)
                    for queue, old in floor.first.items()
                }

    # --------------------------------------------------------------------------------- groups

    def begin(self, group: str, key: str) -> GroupLanes:
        """A group gets lanes: the first one is everything that it was."""
        made = GroupLanes(group, self)
        lane = made.lanes[key] = Lane(key, made.next_number())
        for queue in self.queues(group, key):
            known = self.offsets.committed(group, *queue)
            rule = own_claim(queue[0], key)
            start = known if known >= 0 else max(self.floor(group, queue), 0)
            made.counted[queue] = start
            fetched = self.offsets.fetched(group, *queue)
            lane.places[queue] = Place(known, start, whole(start, rule), fetched)
        self.table[group] = made
        self.changed()
        return made

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """False: the group has no lanes."""
        made = self.table.get(group)
        if made is None:
            return False
        made.reset(topic, queue_id, offset)
        self.offsets.put(group, topic, queue_id, offset)
        return True

    def forget_group(self, group: str) -> None:
        if self.table.pop(group, None) is not None:
            self.changed()

    def run(self) -> None:
        """Once a second."""
        if self._unsaved:
            self.flush()
        self._lift_floors()
        for made in list(self.table.values()):
            made.run()
            count_unmatched(made)
            if made.is_over:
                self._end(made)

    def _end(self, made: GroupLanes) -> None:
        log.info("group %s has one subscription again: its lanes end", made.name)
        del self.table[made.name]
        self.changed()

    # ------------------------------------------------------------------------------ the file

    def _render(self) -> str:
        return orjson.dumps(
            {"groups": [lane_file.to_object(made) for made in self.table.values()]}
        ).decode()

    def load(self) -> None:
        """After the offsets. Raises StoreDamagedError."""

        def parse(text: str) -> dict[str, GroupLanes]:
            try:
                found = {}
                for item in orjson.loads(text)["groups"]:
                    made = found[str(item["group"])] = GroupLanes(str(item["group"]), self)
                    lane_file.load(made, item)
            except (KeyError, TypeError) as error:
                raise ValueError(f"a lane lacks a field: {error}") from error
            return found

        self.table.update(self.document.load(parse) or {})


_QUEUE_OFFSET: Final = RECORD_HEAD.only("queue_offset")


def _offset_of(record: memoryview) -> int:
    offset: int = _QUEUE_OFFSET.unpack_from(record)[0]
    return offset


def end_of(data: list[memoryview]) -> int:
    """Behind the last of the records, which lie one after another in each piece."""
    piece = data[-1]
    at = 0
    while True:
        size = int.from_bytes(piece[at : at + 4], "big")
        if at + size >= len(piece) or not size:
            return _offset_of(piece[at:]) + 1
        at += size
