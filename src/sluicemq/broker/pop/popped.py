"""Which messages are in flight: checkpoints with what is not acknowledged of them, in memory.

    opened     in the order of the timer's queue, where each checkpoint stands; so the first one
               says from where that queue has to be read again
    due        at its deadline, earliest first: a heap, from which what is settled is swept
    delivered  the record of a checkpoint stands in its revive queue: another broker would look for
               acknowledgements there

A checkpoint is *settled* when all its messages are done; then it is gone from here.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from sluicemq.wire.popping import NONE, Checkpoint, Key

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
    revive_offset: int = NONE
    is_planned: bool = False
    holder: str = ""

    @property
    def queue(self) -> Queue:
        topic, group, queue_id, *_ = self.checkpoint
        return group, topic, queue_id


class PoppedTable:
    """All checkpoints that are not settled, by key."""

    def __init__(self) -> None:
        self.table: dict[Key, Popped] = {}
        self.counts: Counter[Queue] = Counter()
        """Messages in flight."""
        self._delivered: dict[int, dict[Key, Popped]] = {}
        self._heap: list[tuple[int, int, Popped]] = []
        self._number = 0

    def __iter__(self) -> Iterator[Popped]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)

    def add(self, checkpoint: Checkpoint, timer_offset: int, holder: str = "") -> Popped:
        """A checkpoint is opened. One that has the key already (a reset, and two pops within the
        same ms) becomes part of it."""
        known, revive_offset = self.table.get(checkpoint.key), NONE
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
        if popped.revive_offset == NONE:
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
