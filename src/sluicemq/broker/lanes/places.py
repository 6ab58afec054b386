"""Where a lane stands in a queue: an offset, and from there on which messages are its own.

    offset     everything of the lane's before it is done; -1: nothing is committed yet
    start      where it begins while nothing is committed
    spans      clauses with the offsets for which they hold. What holds at the place holds for
               everything before it too
    delivered  the end of what was given and may not be committed: a lane is *at rest* in a queue
               when everything it was given is committed
    reader     the client that pulled last, NOBODY when that one reads for another lane now; "":
               nobody since the lanes began
    scanned    where its reader goes on; None: it has not read since the broker started

A member that subscribes to something else is in another lane from its next heartbeat on, and does
not know it: it still has messages of the old lane in hand, commits them, and pulls from an offset
that says how far the *old* lane has come. So what counts is not the lane it is in, but the lane it
reads the queue for (`Readers`; design/0009, "Changing a subscription while running").
That changes when

    it asks for its offset (14)      whoever does that begins anew: it has nothing in hand any more
    it pulls, with nothing in hand   everything that it was given is committed. If its new lane is
                                     at another offset it is told so (21) until it has heard
    it is waited for too long        half a minute after it changed

Until then its commits count for the old lane, and its pulls wait. A queue that it left behind is
*abandoned* in the old lane: whoever takes it over there waits as long, commits of it only go
forward (the newcomer's say where it wanted to begin), and it is sent to where the one before it
came to.

What the lanes of all groups stand on is the `Ground`: queues of messages, the groups' offsets, and
the file of lanes. Beside the offsets stands where each group was a while ago, its *floor*: a new
lane begins there, so that what nobody wanted in the last half minute is not lost for it. Who gets
which messages of a group is on disk before anybody reads by it (`is_unsaved`): a reader may not be
ahead of rules that a crash has undone.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sluicemq.broker.documents import Document
from sluicemq.broker.lanes.filters import rule_filter
from sluicemq.broker.lanes.rules import Clause, Rule, both, parse_key
from sluicemq.broker.offsets import Offsets, Resets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.net.work.background import Offload
from sluicemq.record.layout import RECORD_BEGIN
from sluicemq.store.read import ReadStatus
from sluicemq.store.store import Store

log = logging.getLogger(__name__)

NOBODY: Final = "-"


class Span(NamedTuple):
    """A clause holds for the offsets [first, end); None: for ever."""

    first: int
    end: int | None
    clause: Clause


@dataclass(slots=True)
class Place:
    """One lane in one queue."""

    offset: int = -1
    start: int = 0
    spans: list[Span] = field(default_factory=list)
    delivered: int = -1
    scanned: int | None = None
    reader: str = ""

    @property
    def position(self) -> int:
        """Everything of the lane's before it is done."""
        return self.offset if self.offset >= 0 else self.start

    @property
    def is_at_rest(self) -> bool:
        return self.delivered <= self.position

    def read_by(self, client_id: str, places: "Iterable[Place]") -> None:
        """A client reads the queue for this lane from now on, and for no other of its places."""
        for place in places:
            if place.reader == client_id:
                place.reader = NOBODY
        self.reader = client_id

    def can_take(self, here: int) -> bool:
        """May the lane get messages from `here` on? Its reader has not come so far, or it has
        nothing in hand, so that it can be sent back. Where the reader is has to be known."""
        if self.scanned is None:
            return False
        return max(self.scanned, self.position) <= here or self.is_at_rest

    def rule_at(self, offset: int) -> tuple[Rule, int | None]:
        """The rule for a message, and the offset from which another one holds."""
        at = max(offset, self.position)
        found, until = [], None
        for first, end, clause in self.spans:
            if first > at:
                until = first if until is None else min(first, until)
            elif end is None:
                found.append(clause)
            elif end > at:
                found.append(clause)
                until = end if until is None else min(end, until)
        return frozenset(found), until

    def commit(self, offset: int) -> None:
        """Everything before `offset` is done: what held before it alone is forgotten."""
        self._stretch(offset)
        self.offset = offset
        self.spans = [span for span in self.spans if span.end is None or span.end > offset]

    def _stretch(self, offset: int) -> None:
        """Its reader goes back by itself: what is known first holds for all before it."""
        oldest = min((span.first for span in self.spans), default=offset)
        if offset < oldest <= self.position:
            self.spans = [
                Span(offset if first == oldest else first, end, clause)
                for first, end, clause in self.spans
            ]

    def change_from(self, offset: int, rule: Rule) -> None:
        """Another rule from an offset on, for ever."""
        if len(self.spans) == len(rule) and all(
            span.end is None and span.first <= offset and span.clause in rule for span in self.spans
        ):
            return
        self.spans = joined([*self.cut(0, offset), *whole(offset, rule)])

    def cut(self, first: int, end: int | None = None) -> list[Span]:
        """What lies in [first, end)."""
        found = []
        for low, high, clause in self.spans:
            start = max(low, first)
            stop = high if end is None else end if high is None else min(high, end)
            if stop is None or start < stop:
                found.append(Span(start, stop, clause))
        return found

    def keep_from(self, offset: int, rule: Rule) -> None:
        """From an offset on only what a rule wants too, and nothing that no atom asks for."""
        after = [
            Span(low, high, clause)
            for low, high, own in self.cut(offset)
            if own.must
            for clause in both(frozenset([own]), rule)
        ]
        self.spans = joined([*self.cut(0, offset), *after])

    def shared(self, first: int, end: int, rule: Rule) -> list[Span]:
        """What a lane with this rule gets of the messages [first, end). What another lane asks for
        is not for the clause without an atom."""
        with_atoms = frozenset(item for item in rule if item.must)
        return [
            Span(low, high, clause)
            for low, high, own in self.cut(first, end)
            for clause in both(frozenset([own]), with_atoms if own.must else rule)
        ]

    def take_up(self, gained: list[Span]) -> None:
        """These messages are the lane's too. Before its position nothing else is, so its position
        goes back when they begin before it."""
        if gained:
            here, first = self.position, min(span.first for span in gained)
            self.spans = joined([*self.cut(here), *gained])
            if first < here:
                self.go_back(first)

    def go_back(self, offset: int) -> None:
        """Nothing from `offset` on is done; the reader is to be told."""
        self.start = offset
        self.offset = offset if self.offset >= 0 else -1
        self.delivered = -1
        self.scanned = offset

    def pulls(self, offset: int) -> None:
        """A reader asks for what follows; it has nothing in hand when all before is done."""
        if self.offset < 0 and self.delivered < 0:
            self._stretch(offset)
            self.start = offset
        if offset <= self.position:
            self.delivered = min(self.delivered, offset)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same clause on adjacent or overlapping offsets is one span."""
    found: dict[Clause, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.first):
        known = found.setdefault(span.clause, [])
        if known and (known[-1].end is None or known[-1].end >= span.first):
            first, end, clause = known[-1]
            end = None if end is None or span.end is None else max(end, span.end)
            known[-1] = Span(first, end, clause)
        else:
            known.append(span)
    return [span for group in found.values() for span in group]


def whole(first: int, rule: Rule) -> list[Span]:
    """A rule that holds from an offset on."""
    return [Span(first, None, clause) for clause in rule]


MOVE_MS: Final = 30_000
"""A member that changes lanes may finish what it has in hand for so long."""

Queue = tuple[str, int]
"""(topic, queue id)"""


class Readers:
    """Of one group: client and queue -> the subscription of the lane it reads for."""

    __slots__ = ("_clock", "_reads", "_told", "_until_ms")

    def __init__(self, clock: Clock, changed: Callable[[], None]) -> None:
        self._clock = clock
        self._reads: dict[tuple[str, Queue], str] = {}
        self._until_ms: dict[str, int] = {}
        self._told = Resets(changed)

    def reads(self, client_id: str, queue: Queue, key: str) -> str:
        """The lane that a member of the lane `key` reads for."""
        return self._reads.get((client_id, queue), key)

    def begins(self, client_id: str, queue: Queue, key: str) -> None:
        """It has nothing in hand of another lane."""
        self._reads[client_id, queue] = key
        if self._told:
            self._told.discard(client_id, *queue)

    def knows(self, client_id: str, queue: Queue) -> bool:
        """Has it asked for its offset, or pulled, since it is a member? If not, its offset may be
        from before: from another lane, or the group's own."""
        return (client_id, queue) in self._reads

    def sent_to(self, client_id: str, queue: Queue, key: str, offset: int) -> None:
        """It begins at an offset that it has to be told."""
        self.begins(client_id, queue, key)
        self._told.add(client_id, *queue, offset)

    def tell(self, client_id: str, queue: Queue, offset: int) -> int | None:
        """It pulls from `offset`: where it was sent to, until it has heard of it."""
        return self._told.redirect(client_id, *queue, offset) if self._told else None

    def is_unaware(self, client_id: str, queue: Queue) -> bool:
        """Was it sent elsewhere and does not know yet? Then what it commits is void."""
        return bool(self._told) and self._told.blocks_commits(client_id, *queue)

    def comes(self, client_id: str, queues: Iterable[tuple[Queue, str]]) -> None:
        """It becomes a member, after it read these queues for these lanes: it may have them still,
        and has to begin anew in another one."""
        for queue, key in queues:
            self._reads.setdefault((client_id, queue), key)

    def moves(self, client_id: str, key: str, queues: Iterable[Queue]) -> None:
        """It leaves the lane `key` for another one, and may have these queues in hand."""
        self._until_ms[client_id] = self._clock.now_ms() + MOVE_MS
        for queue in queues:
            self._reads.setdefault((client_id, queue), key)

    def has_time(self, client_id: str) -> bool:
        """Is it waited for until it has finished what it has in hand?"""
        return self._clock.now_ms() < self._until_ms.get(client_id, 0)

    def queues_read(self) -> dict[str, set[Queue]]:
        """Of each lane the queues that somebody reads for it, who may be in another one."""
        found: dict[str, set[Queue]] = {}
        for (_, queue), key in self._reads.items():
            found.setdefault(key, set()).add(queue)
        return found

    def of(self, queue: Queue, key: str) -> Iterator[str]:
        """The clients that read the queue for the lane."""
        return (c for (c, q), lane in self._reads.items() if q == queue and lane == key)

    def forget(self, key: str) -> None:
        """The lane is forgotten: who read for it has nothing in hand of another one that may have
        the same subscription later."""
        for entry in [entry for entry, lane in self._reads.items() if lane == key]:
            self._reads[entry] = ""

    def leave(self, client_id: str) -> None:
        """It is gone: nobody waits for what it has in hand."""
        self._until_ms.pop(client_id, None)
        self._told.forget(group=client_id)
        for entry in [entry for entry in self._reads if entry[0] == client_id]:
            del self._reads[entry]

    def objects(self, members: Mapping[str, Collection[str]]) -> list[list[Any]]:
        """For the file: those that read for a lane that they are not in; `members` by lane."""
        return [
            [client_id, *queue, key]
            for (client_id, queue), key in self._reads.items()
            if client_id in self._until_ms and client_id not in members.get(key, ())
        ]

    def load(self, objects: Iterable[Any]) -> None:
        """The inverse. Raises TypeError, ValueError."""
        for client_id, topic, queue_id, key in objects:
            self.moves(str(client_id), str(key), [(str(topic), int(queue_id))])


FLOOR_MS: Final = 30_000
_SIZE_AND_OFFSET: Final = RECORD_BEGIN.only("size", "queue_offset")


@dataclass(slots=True)
class Floor:
    """Where a group was a while ago, queue by queue."""

    first: dict[Queue, int]
    now: dict[Queue, int]
    time_ms: int


@dataclass(slots=True, eq=False)
class Ground:
    """Queues, offsets and the file of lanes; `render` makes its text, `wake(topic, queue id)` lets
    the pulls that wait there look."""

    settings: Settings
    topics: Topics
    offsets: Offsets
    store: Store
    files: Files
    clock: Clock
    wake: Callable[[str, int], None]
    call_soon: Callable[[Callable[[], None]], object]
    offload: Offload
    render: Callable[[], str]
    document: Document = field(init=False)
    _is_saving: bool = False
    _changes: int = 0
    _unsaved: dict[str, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    """Groups whose rules are not on disk yet -> their last change, and what comes then."""
    _rests_until_s: float = 0.0
    _floors: dict[str, Floor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path = f"{self.settings.store.root}/config/sluiceLanes.json"
        self.document = Document(self.files, path, self.render)

    @property
    def kept_ms(self) -> int:
        """How long what an idle lane has not read is kept for it."""
        return self.settings.broker.filter_kept_ms

    # ------------------------------------------------------------------------------- the file

    def changed(self) -> None:
        self.document.changed = True

    def save(self, group: str, on_saved: Callable[[], None]) -> None:
        """Who gets which messages of a group has changed. All changes of a turn are one write,
        elsewhere."""
        self._changes += 1
        self._unsaved[group] = self._changes, on_saved
        self.flush()

    def is_unsaved(self, group: str) -> bool:
        """Are the group's rules not on disk yet? Then its pulls wait."""
        return group in self._unsaved

    def flush(self) -> None:
        """Writes what has changed, soon; a large file once a second, however many come."""
        is_due = self.clock.monotonic_s() >= self._rests_until_s
        if self._is_saving or not is_due or not (self._unsaved or self.document.changed):
            return

        def write() -> None:
            self.document.changed = True
            work, last = self.document.prepare_write(), self._changes

            def written(outcome: object) -> None:
                if isinstance(outcome, Exception):
                    log.error("%s cannot be written: %s", self.document.path, outcome)
                self._is_saving = False
                for group, (change, on_saved) in list(self._unsaved.items()):
                    if change <= last:
                        del self._unsaved[group]
                        on_saved()
                if self._unsaved:
                    self.flush()

            if work is not None:
                self.offload(work, written)

        self._is_saving = True
        self.call_soon(write)

    def flush_unsaved(self) -> None:
        """Once a second: what had to wait."""
        if self._unsaved:
            self.flush()

    def rest(self) -> None:
        """The file is large: the next write is not before a second has passed."""
        self._rests_until_s = self.clock.monotonic_s() + 1

    # --------------------------------------------------------------------------------- queues

    def end(self, queue: Queue) -> int:
        return self.store.queue_offsets(*queue)[1]

    def queues(self, group: str, key: str) -> Iterator[Queue]:
        """The queues of the topics of a subscription, with the retry topic's."""
        for name in (*parse_key(key), RETRY_PREFIX + group):
            topic = self.topics.get(name)
            if topic is not None:
                for queue_id in range(topic.config.read_queues):
                    yield name, queue_id

    def look_again(self, queue: Queue) -> None:
        self.wake(*queue)

    def next_match(
        self, queue: Queue, offset: int, rule: Rule, until: int | None
    ) -> tuple[int, bool]:
        """The first message from `offset` on that a rule wants, or how far it was looked for;
        `until`: not beyond."""
        if not rule:
            return (self.end(queue) if until is None else until), False
        room = None if until is None else until - offset
        found = self.store.reader.read(*queue, offset, 1, None, rule_filter(rule), room)
        if found.status is ReadStatus.FOUND:
            return _SIZE_AND_OFFSET.unpack_from(found.data[0])[1], True
        return max(found.next_offset, offset), False

    def count(self, queue: Queue, offset: int, rule: Rule, until: int) -> tuple[int, int]:
        """How many messages a rule wants, in a slice of the queue: (where it ends, count)."""
        room = until - offset
        result = self.store.reader.read(*queue, offset, room, 1 << 16, rule_filter(rule), room)
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
            low, high = self.store.queue_offsets(*queue)
            fetched = min(self.offsets.fetched(group, *queue), high)
            known = max(self.offsets.committed(group, *queue), fetched)
            unknown = low if from_first or low == 0 else high
            offsets[queue] = min(known, high) if known >= 0 else unknown
        self._floors[group] = Floor(offsets, offsets, self.clock.now_ms())

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
