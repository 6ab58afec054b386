"""Which messages are in flight: checkpoints with what is not acknowledged of them, in memory.

    opened     in the order of the timer's queue, where each checkpoint stands; so the first one
               says from where that queue has to be read again
    due        at its deadline, earliest first: a heap, from which what is settled is swept
    delivered  the record of a checkpoint stands in its revive queue: another broker would look for
               acknowledgements there

A checkpoint is *settled* when all its messages are done; then it is gone from here.

A start reads it back, from our own file and the log (design/0020). The file,
`config/sluicePop.json`, says for a moment at which everything was on disk:

    open      checkpoints that were open, those of old pops, so that these hold nothing else up
    timer     from where on the timer's queue has the others
    revive    where each revive queue ended: from there on it is read beside the timer's queue
    covered   the table of offsets on disk knows of all checkpoints of the timer's queue before

A checkpoint is open unless all its messages are acknowledged, in either place, or a revive queue
has it before the place up to which RocketMQ's scan is done: then another broker has given its
messages back. Checkpoints of ours say where their group goes on; those that the table of offsets
does not cover move it there, or what is acknowledged would come again after a kill.

Without the file another broker has left the store. Then all checkpoints of the timer's queue count
whose slot the timer has not passed, and of the revive queues those that are not scanned.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from sluicemq.broker.offsets import Offsets
from sluicemq.broker.produce.intake import Record, read_record
from sluicemq.errors import ProtocolError
from sluicemq.model import properties as reserved
from sluicemq.model.ids import tag_code
from sluicemq.model.message import REAL_QUEUE, REAL_TOPIC, TAGS
from sluicemq.model.system_names import REVIVE_GROUP, TIMER_TOPIC
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.store.timers.placing import TIMER_OUT
from sluicemq.wire import fastjson
from sluicemq.wire.declare import as_integer, as_object, load_object, take_list, take_object
from sluicemq.wire.declare import take_integer as integer
from sluicemq.wire.popping import (
    ACKNOWLEDGEMENT,
    ACKNOWLEDGEMENTS,
    CHECKPOINT,
    NO_OFFSET,
    Acknowledgement,
    Checkpoint,
    PopKey,
    decode_acknowledgement,
    decode_checkpoint,
)

log = logging.getLogger(__name__)

NEXT: Final = reserved.POP_NEXT_OFFSET
"""Property of a checkpoint of ours: where its group goes on, 0 when it does not move."""
_ROLLED: Final = b"TIMER_ROLL_TIMES\x01"
_CHUNK_UNITS: Final = 256
_CODES: Final = frozenset(map(tag_code, (CHECKPOINT, ACKNOWLEDGEMENT, ACKNOWLEDGEMENTS)))
SWEEP_MIN: Final = 1000
Queue = tuple[str, str, int]
"""Group, topic, queue id: as offsets have it."""


@dataclass(slots=True, eq=False)
class Popped:
    """A checkpoint that is not settled. `waiting` are the offsets of its messages that are not
    done; `timer_offset` is where it stands in the timer's queue, NONE when that is not known;
    `revive_offset` where in its revive queue, NONE before it is delivered; `holder` who popped it,
    "" when that was before the broker's start."""

    checkpoint: Checkpoint
    waiting: tuple[int, ...]
    timer_offset: int
    revive_offset: int = NO_OFFSET
    is_planned: bool = False
    holder: str = ""

    @property
    def queue(self) -> Queue:
        topic, group, queue_id, *_ = self.checkpoint
        return group, topic, queue_id


class PoppedTable:
    """All checkpoints that are not settled, by key."""

    def __init__(self) -> None:
        self.table: dict[PopKey, Popped] = {}
        self.counts: Counter[Queue] = Counter()
        """Messages in flight."""
        self._delivered: dict[int, dict[PopKey, Popped]] = {}
        self._heap: list[tuple[int, int, Popped]] = []
        self._number = 0

    def __iter__(self) -> Iterator[Popped]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)

    def add(self, checkpoint: Checkpoint, timer_offset: int, holder: str = "") -> Popped:
        """A checkpoint is opened. One that has the key already (a reset, and two pops within the
        same ms) becomes part of it."""
        known, revive_offset = self.table.get(checkpoint.key), NO_OFFSET
        if known is not None:
            offsets = tuple(sorted({*known.waiting, *checkpoint.offsets}))
            checkpoint = checkpoint._replace(offsets=offsets)
            timer_offset, revive_offset = known.timer_offset, known.revive_offset
            self.counts[known.queue] -= len(known.waiting)
            known.waiting = ()
        popped = Popped(checkpoint, checkpoint.offsets, timer_offset, revive_offset, holder=holder)
        self.table[checkpoint.key] = popped
        self.counts[popped.queue] += len(popped.waiting)
        self.plan(popped)
        return popped

    def done(self, popped: Popped, offsets: Iterable[int]) -> None:
        """These of its messages are done."""
        left = tuple([offset for offset in popped.waiting if offset not in offsets])
        queue = popped.queue
        self.counts[queue] -= len(popped.waiting) - len(left)
        if self.counts[queue] <= 0:
            del self.counts[queue]
        popped.waiting = left
        if not left:
            checkpoint = popped.checkpoint
            self.table.pop(checkpoint.key, None)
            self._delivered.get(checkpoint.revive_queue, {}).pop(checkpoint.key, None)

    def reopen(self, popped: Popped, offsets: Iterable[int]) -> None:
        """`done` was not stored."""
        known, waiting = len(popped.waiting), {*popped.waiting, *offsets}
        popped.waiting = tuple(sorted(waiting))
        self.counts[popped.queue] += len(waiting) - known
        if not known:
            self.table[popped.checkpoint.key] = popped
            ordered = sorted(self.table.items(), key=lambda item: item[1].timer_offset)
            self.table = dict(ordered)
        self.plan(popped)

    # --- the revive queues

    def delivered(self, popped: Popped, offset: int) -> None:
        """Its record stands in its revive queue; the first counts, when a timer that crashed has
        delivered it again."""
        if popped.revive_offset == NO_OFFSET:
            popped.revive_offset = offset
            checkpoint = popped.checkpoint
            self._delivered.setdefault(checkpoint.revive_queue, {})[checkpoint.key] = popped

    def revive_start(self, queue_id: int, end: int) -> int:
        """The first record of a revive queue, which ends at `end`, that is not settled."""
        first = next(iter(self._delivered.get(queue_id, {}).values()), None)
        return end if first is None else min(first.revive_offset, end)

    # --- deadlines

    def plan(self, popped: Popped) -> None:
        """It is due at its deadline."""
        if popped.is_planned:
            return
        popped.is_planned = True
        if len(self._heap) > 2 * len(self.table) + SWEEP_MIN:
            for _, _, settled in self._heap:
                settled.is_planned = bool(settled.waiting)
            self._heap = [item for item in self._heap if item[2].waiting]
            heapq.heapify(self._heap)
        self._number += 1
        heapq.heappush(self._heap, (popped.checkpoint.deadline_ms, self._number, popped))

    @property
    def next_ms(self) -> int | None:
        """The next deadline."""
        heap = self._heap
        while heap and not heap[0][2].waiting:
            heapq.heappop(heap)[2].is_planned = False
        return heap[0][0] if heap else None

    def take(self, now_ms: int) -> Popped | None:
        """The next that is due; `plan` gives it back."""
        next_ms = self.next_ms
        if next_ms is None or next_ms > now_ms:
            return None
        popped = heapq.heappop(self._heap)[2]
        popped.is_planned = False
        return popped


# --------------------------------------------------------------------------------- at a start


class Saved(NamedTuple):
    """What the file says."""

    timer: int
    covered: int
    revive: Mapping[int, int]
    open: list[Checkpoint]

    def text(self) -> str:
        """The file."""
        opened = [one.to_json() | {"rq": one.revive_queue} for one in self.open]
        revive = {str(queue_id): offset for queue_id, offset in sorted(self.revive.items())}
        values = {
            "covered": self.covered, "open": opened, "revive": revive, "timer": self.timer
        }  # fmt: skip
        return fastjson.dumps_file(values)

    @classmethod
    def parse(cls, text: str) -> "Saved":
        """The inverse. Raises ProtocolError."""
        values = load_object(text, "sluicePop.json")
        opened = [as_object(one, "A checkpoint") for one in take_list(values, "open")]
        return cls(
            integer(values, "timer"),
            integer(values, "covered"),
            {int(q): as_integer(at, "revive") for q, at in take_object(values, "revive").items()},
            [Checkpoint.from_json(one, integer(one, "rq"), "") for one in opened],
        )


class Found(NamedTuple):
    """A record of POP at an offset of a queue."""

    offset: int
    record: Record
    what: Checkpoint | Acknowledgement


def decode_record(record: Record, queue_id: int, broker: str) -> Checkpoint | Acknowledgement:
    """What a record of `broker` says, which is for revive queue `queue_id` unless it says for
    which. Raises ProtocolError."""
    if record.get_text(TAGS) != CHECKPOINT:
        return decode_acknowledgement(record.body, broker)
    revive_queue = record.get_number(REAL_QUEUE)
    return decode_checkpoint(
        record.body, queue_id if revive_queue is None else revive_queue, broker
    )


class Start:
    """Reads back into a table. `topic` is that of the revive queues."""

    def __init__(
        self, table: PoppedTable, store: Store, offsets: Offsets, topic: str, broker: str
    ) -> None:
        self._table = table
        self._store = store
        self._offsets = offsets
        self._topic = topic
        self._broker = broker
        self._delivered: dict[PopKey, int] = {}
        self._given_back: set[PopKey] = set()
        self._done: list[Acknowledgement] = []
        self._moved: dict[Queue, int] = {}

    def read_own(self, saved: Saved) -> None:
        """What this broker has left, or another one that has had the store after it."""
        for checkpoint in saved.open:
            self._table.add(checkpoint, NO_OFFSET)
        for queue_id in self._revive_queues:
            self._read_revive(queue_id, saved.revive.get(queue_id, 0), is_own=True)
        for found in self._records(TIMER_TOPIC, 0, min(saved.timer, saved.covered)):
            if isinstance(found.what, Acknowledgement):
                self._acknowledge(found.what)
                continue
            if found.offset >= saved.timer:
                self._table.add(found.what, found.offset)
            if found.offset >= saved.covered:
                self._note_move(found.what, found.record.get_number(NEXT))
        self._settle()

    def read_foreign(self, passed_ms: int) -> None:
        """Read back what another broker has left in flight, from the log alone.

        `passed_ms`: its timer is known to have delivered all slots before this time to the revive
        queues (ms). If that is not known (0), the whole revive queues are read: a checkpoint that
        is not in them is still in flight, however long ago it was due.
        """
        for queue_id in self._revive_queues:
            scanned = self._offsets.committed(REVIVE_GROUP, self._topic, queue_id)
            self._read_revive(queue_id, scanned + 1 if passed_ms else 0, is_own=False)
        for found in self._records(TIMER_TOPIC, 0, 0):
            if isinstance(found.what, Acknowledgement):
                self._acknowledge(found.what)
            elif (found.record.get_number(TIMER_OUT) or 0) >= passed_ms:
                self._table.add(found.what, NO_OFFSET)
        self._settle()

    @property
    def _revive_queues(self) -> list[int]:
        return [queue_id for topic, queue_id in self._store.queues() if topic == self._topic]

    def _read_revive(self, queue_id: int, begin: int, *, is_own: bool) -> None:
        """A revive queue. Checkpoints of our own have stood in the timer's queue before."""
        scanned = self._offsets.committed(REVIVE_GROUP, self._topic, queue_id)
        for found in self._records(self._topic, queue_id, begin):
            if isinstance(found.what, Acknowledgement):
                self._done.append(found.what)
            elif found.offset <= scanned:
                self._given_back.add(found.what.key)
            else:
                self._delivered.setdefault(found.what.key, found.offset)
                if not is_own or found.record.get_number(TIMER_OUT) is None:
                    self._table.add(found.what, NO_OFFSET)

    def _settle(self) -> None:
        """Everything is read: what is done in the revive queues, and where groups go on."""
        table = self._table
        for acknowledgement in self._done:
            self._acknowledge(acknowledgement)
        for key in self._given_back & table.table.keys():
            table.done(table.table[key], table.table[key].waiting)
        for key, offset in self._delivered.items():  # in the order in which they stand there
            if key in table.table:
                table.delivered(table.table[key], offset)
        for queue, next_offset in self._moved.items():
            if next_offset > self._offsets.committed(*queue):
                self._offsets.commit(*queue, next_offset)

    def _acknowledge(self, acknowledgement: Acknowledgement) -> None:
        popped = self._table.table.get(acknowledgement.key)
        if popped is not None:
            self._table.done(popped, acknowledgement.offsets)

    def _note_move(self, checkpoint: Checkpoint, next_offset: int | None) -> None:
        """One of ours moves its group; one of another broker says that our last ones are history:
        that broker has moved it in its own way."""
        queue = checkpoint.group, checkpoint.topic, checkpoint.queue_id
        if next_offset is None:
            self._moved.pop(queue, None)
        else:
            self._moved[queue] = max(self._moved.get(queue, 0), next_offset)

    def _records(self, topic: str, queue_id: int, offset: int) -> Iterator[Found]:
        """Yield the records of POP in a queue from `offset` on, without those that the timer has
        stored again. Records that a new master hides until its slaves have them are included,
        because the master before has answered for them."""
        store, broker = self._store, self._broker
        offset = max(offset, store.queue_offsets(topic, queue_id)[0])
        while len(units := store.committed_units(topic, queue_id, offset, _CHUNK_UNITS)):
            for position, size, code in UNIT.iter_unpack(units):
                if code in _CODES and size != BLANK_SIZE:
                    record = read_record(store.committed_record(position, size))
                    if record is not None and self._is_of_pop(topic, record):
                        try:
                            yield Found(offset, record, decode_record(record, queue_id, broker))
                        except ProtocolError as error:
                            log.error("record %d of %s: %s", offset, topic, error)
                offset += 1

    def _is_of_pop(self, topic: str, record: Record) -> bool:
        return (record.get_text(REAL_TOPIC) or topic) == self._topic and (
            _ROLLED not in record.properties
        )
