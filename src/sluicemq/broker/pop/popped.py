"""The popped messages that are in flight, in memory, and how they are recovered at a start.

A checkpoint is *open* while one of its messages is in flight: neither acknowledged nor put into the
retry topic. `OpenCheckpoints` contains the open checkpoints of all groups:

- in the order of the timer queue, in which their records are stored. A start has to read the timer
  queue from the record of the first one;
- in a heap, by deadline. Closed checkpoints stay in the heap until it is cleaned;
- by revive queue, if the timer has delivered their record there. RocketMQ looks for their
  acknowledgements in the revive queue.

`PopRecovery` fills the table when a broker starts (design/0020). It reads the log, and the
file `config/sluicePop.json`, which describes a moment at which everything was on disk:

    open      the oldest open checkpoints, so that the timer queue need not be read from there
    timer     the offset of the timer queue from which the other checkpoints are read
    revive    the offset at which each revive queue ended; it is read from there, too
    covered   the saved table of offsets includes all checkpoints of the timer queue before here

A checkpoint is closed if all its messages are acknowledged, in the timer queue or a revive queue.
It is also closed if its record is in a revive queue at or before the committed offset of RocketMQ's
scan (REVIVE_GROUP): then another broker has put its messages into the retry topic.

A checkpoint that this broker wrote contains the offset from which its group continues. A start
moves groups to the offsets in the checkpoints that the saved table of offsets does not include.
Otherwise, acknowledged messages would be delivered again after a kill.

Without the file, RocketMQ was the last to run on the store. Then all checkpoints of the timer queue
count whose slot the timer has not passed, and those of the revive queues that RocketMQ has not
scanned.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
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
from sluicemq.wire.fastjson import as_integer, as_object, load_object, take_list, take_object
from sluicemq.wire.fastjson import take_integer as integer
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

NEXT_OFFSET_PROPERTY: Final = reserved.POP_NEXT_OFFSET
"""The property of this broker's checkpoint records with the offset from which the group continues.

It is 0 if the checkpoint does not move the group.
"""
SWEEP_MIN: Final = 1000
"""The heap of deadlines is cleaned if it has this many more entries than twice the table's."""
_ROLLED: Final = b"TIMER_ROLL_TIMES\x01"
"""What the properties of a record contain that the timer has stored again on its way."""
_CHUNK_UNITS: Final = 256
"""The number of units of a queue that are read at once."""
_TAG_CODES: Final = frozenset(map(tag_code, (CHECKPOINT, ACKNOWLEDGEMENT, ACKNOWLEDGEMENTS)))
"""The hash codes of the tags that checkpoints and acknowledgements have."""

GroupQueue = tuple[str, str, int]
"""Group, topic and queue id: the key of a committed offset."""


@dataclass(slots=True, eq=False)
class OpenCheckpoint:
    """A checkpoint with messages in flight."""

    checkpoint: Checkpoint
    """The checkpoint as it was written, with the offsets of all its messages."""
    pending_offsets: tuple[int, ...]
    """The offsets of the messages that are in flight, ascending. It is () once it is closed."""
    timer_offset: int
    """The offset of its record in the timer queue, NO_OFFSET if that is unknown."""
    revive_offset: int = NO_OFFSET
    """The offset of its record in its revive queue, NO_OFFSET before it is delivered there."""
    is_scheduled: bool = False
    """Whether the heap of deadlines contains it."""
    popped_by: str = ""
    """The client id or address of the consumer that popped; "" if that was before the start."""

    @property
    def queue(self) -> GroupQueue:
        """The group, topic and queue of the messages."""
        topic, group, queue_id, *_ = self.checkpoint
        return group, topic, queue_id


class OpenCheckpoints:
    """The open checkpoints of all groups, by key and by deadline, and their numbers of messages."""

    def __init__(self) -> None:
        self.by_key: dict[PopKey, OpenCheckpoint] = {}
        """By key, in the order of the timer queue. Those with an unknown timer offset are first."""
        self.in_flight_counts: Counter[GroupQueue] = Counter()
        """The number of messages in flight of each group and queue, if it is not 0."""
        self._in_revive_queue: dict[int, dict[PopKey, OpenCheckpoint]] = {}
        """By revive queue, in its order: the checkpoints whose record was delivered there."""
        self._deadlines: list[tuple[int, int, OpenCheckpoint]] = []
        """A heap of deadline in ms, number of the entry, and checkpoint."""
        self._entry_number = 0
        """The number of the newest entry of the heap. It orders entries with equal deadlines."""

    def __iter__(self) -> Iterator[OpenCheckpoint]:
        return iter(self.by_key.values())

    def __len__(self) -> int:
        return len(self.by_key)

    def add(self, checkpoint: Checkpoint, timer_offset: int, popped_by: str = "") -> OpenCheckpoint:
        """Add a checkpoint, the record of a pop, and return its entry in the table.

        All its messages are in flight. `timer_offset` is the offset of the record in the timer
        queue. `popped_by` is the client id or address of the consumer, or "" if it is not known.
        The entry is also put into the heap of deadlines.

        If the table has an entry with the same key, the new entry replaces it and has the messages
        of both. That happens if the group was reset and popped twice within a millisecond.
        """
        existing = self.by_key.get(checkpoint.key)
        revive_offset = NO_OFFSET
        if existing is not None:
            offsets = tuple(sorted({*existing.pending_offsets, *checkpoint.offsets}))
            checkpoint = checkpoint._replace(offsets=offsets)
            timer_offset = existing.timer_offset
            revive_offset = existing.revive_offset
            self.in_flight_counts[existing.queue] -= len(existing.pending_offsets)
            existing.pending_offsets = ()

        added = OpenCheckpoint(
            checkpoint, checkpoint.offsets, timer_offset, revive_offset, popped_by=popped_by
        )
        self.by_key[checkpoint.key] = added
        self.in_flight_counts[added.queue] += len(added.pending_offsets)
        self.schedule(added)
        return added

    def remove_messages(self, open_checkpoint: OpenCheckpoint, offsets: Iterable[int]) -> None:
        """Remove the messages at `offsets` from a checkpoint, because they are not in flight now.

        Offsets that are not in flight are ignored. If no message is left, the checkpoint is removed
        from the table. It stays in the heap of deadlines until it comes first there.
        """
        remaining = tuple(
            [offset for offset in open_checkpoint.pending_offsets if offset not in offsets]
        )
        queue = open_checkpoint.queue
        self.in_flight_counts[queue] -= len(open_checkpoint.pending_offsets) - len(remaining)
        if self.in_flight_counts[queue] <= 0:
            del self.in_flight_counts[queue]
        open_checkpoint.pending_offsets = remaining
        if not remaining:
            # Closed. In the heap it stays until it comes first, or until the heap is cleaned.
            checkpoint = open_checkpoint.checkpoint
            self.by_key.pop(checkpoint.key, None)
            self._in_revive_queue.get(checkpoint.revive_queue, {}).pop(checkpoint.key, None)

    def restore_messages(self, open_checkpoint: OpenCheckpoint, offsets: Iterable[int]) -> None:
        """Add the messages at `offsets` to a checkpoint again, to undo `remove_messages`.

        This is necessary if their acknowledgement could not be stored. A checkpoint that was
        removed is added to the table again, at the position that its timer offset demands. It is no
        longer listed among those that are in a revive queue.
        """
        count_before = len(open_checkpoint.pending_offsets)
        pending = {*open_checkpoint.pending_offsets, *offsets}
        open_checkpoint.pending_offsets = tuple(sorted(pending))
        self.in_flight_counts[open_checkpoint.queue] += len(pending) - count_before
        if not count_before:
            self.by_key[open_checkpoint.checkpoint.key] = open_checkpoint
            in_order = sorted(self.by_key.values(), key=attrgetter("timer_offset"))
            self.by_key = {reopened.checkpoint.key: reopened for reopened in in_order}
        self.schedule(open_checkpoint)

    # --- the revive queues

    def note_revive_offset(self, open_checkpoint: OpenCheckpoint, offset: int) -> None:
        """Record that the checkpoint's record was appended to its revive queue at `offset`.

        Only the first call counts: after a crash, the timer may deliver the record again.
        """
        if open_checkpoint.revive_offset == NO_OFFSET:
            open_checkpoint.revive_offset = offset
            checkpoint = open_checkpoint.checkpoint
            delivered = self._in_revive_queue.setdefault(checkpoint.revive_queue, {})
            delivered[checkpoint.key] = open_checkpoint

    def first_open_revive_offset(self, queue_id: int, end: int) -> int:
        """Return the lowest offset of an open checkpoint in the revive queue `queue_id`.

        Return `end`, the end offset of the queue, if there is no open checkpoint in it.
        """
        delivered = self._in_revive_queue.get(queue_id, {})
        # Entries were added in the order of the revive queue, so the first has the lowest offset.
        first_entry = next(iter(delivered.values()), None)
        if first_entry is None:
            return end
        return min(first_entry.revive_offset, end)

    # --- deadlines

    def schedule(self, open_checkpoint: OpenCheckpoint) -> None:
        """Put the checkpoint into the heap of deadlines, unless it is there already.

        If the heap is longer than twice the table plus SWEEP_MIN, the entries of closed checkpoints
        are removed from it first.
        """
        if open_checkpoint.is_scheduled:
            return
        open_checkpoint.is_scheduled = True
        if len(self._deadlines) > 2 * len(self.by_key) + SWEEP_MIN:
            self._remove_closed_from_heap()
        self._entry_number += 1
        deadline_ms = open_checkpoint.checkpoint.deadline_ms
        heapq.heappush(self._deadlines, (deadline_ms, self._entry_number, open_checkpoint))

    def _remove_closed_from_heap(self) -> None:
        """Remove the closed checkpoints from the heap of deadlines.

        They count as not scheduled, because a closed checkpoint may be reopened.
        """
        remaining_deadlines = []
        for deadline in self._deadlines:
            _, _, scheduled = deadline
            if scheduled.pending_offsets:
                remaining_deadlines.append(deadline)
            else:
                scheduled.is_scheduled = False
        self._deadlines = remaining_deadlines
        heapq.heapify(self._deadlines)

    @property
    def next_deadline_ms(self) -> int | None:
        """The earliest deadline of an open checkpoint in ms since 1970; None without one.

        Closed checkpoints at the top of the heap are removed from it.
        """
        deadlines = self._deadlines
        # An entry is (deadline, number, checkpoint). A closed checkpoint has no pending offsets.
        while deadlines and not deadlines[0][2].pending_offsets:
            heapq.heappop(deadlines)[2].is_scheduled = False
        return deadlines[0][0] if deadlines else None

    def take_due(self, now_ms: int) -> OpenCheckpoint | None:
        """Remove the checkpoint with the earliest deadline from the heap, and return it.

        Return None if no deadline is at or before `now_ms`. The checkpoint stays in the table. The
        caller puts it into the heap again with `schedule`.
        """
        next_ms = self.next_deadline_ms
        if next_ms is None or next_ms > now_ms:
            return None
        due_checkpoint = heapq.heappop(self._deadlines)[2]
        due_checkpoint.is_scheduled = False
        return due_checkpoint


# --------------------------------------------------------------------------------- at a start


class SavedPops(NamedTuple):
    """The content of `config/sluicePop.json`."""

    timer_start: int
    """The offset of the timer queue from which checkpoints that are not listed are read."""
    covered_end: int
    """The saved table of offsets includes the checkpoints of the timer queue before this offset."""
    revive_starts: Mapping[int, int]
    """By queue id: the offset from which each revive queue is read."""
    open_checkpoints: list[Checkpoint]
    """The listed checkpoints, each with the offsets of the messages that were in flight."""

    def encode(self) -> str:
        """Return the text of the file, a JSON object.

        "timer" and "covered" are offsets of the timer queue (`timer_start` and `covered_end`).
        "open" is a list of checkpoints as RocketMQ writes them, each with its revive queue as "rq".
        "revive" is an object with an offset for each queue id, which is a string.
        """
        open_values = [
            checkpoint.to_json() | {"rq": checkpoint.revive_queue}
            for checkpoint in self.open_checkpoints
        ]
        revive_values = {
            str(queue_id): offset for queue_id, offset in sorted(self.revive_starts.items())
        }
        return fastjson.dumps_file(
            {
                "covered": self.covered_end,
                "open": open_values,
                "revive": revive_values,
                "timer": self.timer_start,
            }
        )

    @classmethod
    def parse(cls, content: str) -> "SavedPops":
        """Return the content of a file whose text is `content`, the inverse of `encode`.

        Raises ProtocolError if the text is not JSON, or if a value is missing or has another type.
        Raises ValueError if a queue id in `revive` is not a number.
        """
        document = load_object(content, "sluicePop.json")
        revive_starts = {}
        for queue_id, offset in take_object(document, "revive").items():
            revive_starts[int(queue_id)] = as_integer(offset, "revive")
        open_checkpoints = []
        for json_value in take_list(document, "open"):
            fields = as_object(json_value, "A checkpoint")
            open_checkpoints.append(Checkpoint.from_json(fields, integer(fields, "rq"), ""))
        return cls(
            timer_start=integer(document, "timer"),
            covered_end=integer(document, "covered"),
            revive_starts=revive_starts,
            open_checkpoints=open_checkpoints,
        )


class PopRecord(NamedTuple):
    """A stored record of a checkpoint or an acknowledgement."""

    offset: int
    """The offset of the record in the queue from which it was read."""
    record: Record
    content: Checkpoint | Acknowledgement


def decode_record(record: Record, queue_id: int, broker: str) -> Checkpoint | Acknowledgement:
    """Return the content of a stored record of a checkpoint or an acknowledgement.

    A record is a checkpoint if its tag is CHECKPOINT, otherwise an acknowledgement. `queue_id` is
    used as the revive queue of a checkpoint whose record does not contain one, and `broker` as the
    broker name if the record contains none.

    Raises ProtocolError if the body cannot be decoded.
    """
    if record.get_text(TAGS) != CHECKPOINT:
        return decode_acknowledgement(record.body, broker)
    revive_queue = record.get_number(REAL_QUEUE)
    return decode_checkpoint(
        record.body, queue_id if revive_queue is None else revive_queue, broker
    )


class PopRecovery:
    """Recovers the open checkpoints when a broker starts. It is used for one start."""

    def __init__(
        self, table: OpenCheckpoints, store: Store, offsets: Offsets, topic: str, broker: str
    ) -> None:
        """Create a recovery, which fills the empty `table` with the pops that are in flight.

        Call either `recover_from_file` or `recover_from_log`. They read the queues of `store`, and
        advance committed offsets in `offsets`. `topic` is the revive topic, and `broker` the name
        of this broker.
        """
        self._table = table
        self._store = store
        self._offsets = offsets
        self._topic = topic
        self._broker = broker
        self._revive_offsets: dict[PopKey, int] = {}
        """Offsets in the revive queues of checkpoints that RocketMQ has not scanned."""
        self._scanned_keys: set[PopKey] = set()
        """The checkpoints that RocketMQ has scanned."""
        self._revive_acknowledgements: list[Acknowledgement] = []
        """The acknowledgements in the revive queues."""
        self._next_offsets: dict[GroupQueue, int] = {}
        """The offsets from which groups continue, according to their checkpoints."""

    def recover_from_file(self, saved: SavedPops) -> None:
        """Fill the table from the content of the file, and from what was stored since then.

        The table gets the open checkpoints: records of pops whose messages are in flight. These are
        the checkpoints in the file, those in the timer queue from `saved.timer_start` on, and those
        that another broker has put into revive queues since. The checkpoints in the timer queue
        from `saved.covered_end` on also advance the committed offsets of groups. This broker must
        have written the file last.
        """
        for checkpoint in saved.open_checkpoints:
            self._table.add(checkpoint, NO_OFFSET)
        for queue_id in self._revive_queue_ids:
            start = saved.revive_starts.get(queue_id, 0)
            self._read_revive_queue(queue_id, start, is_from_this_broker=True)
        timer_start = min(saved.timer_start, saved.covered_end)
        for stored in self._iter_pop_records(TIMER_TOPIC, 0, timer_start):
            if isinstance(stored.content, Acknowledgement):
                self._apply_acknowledgement(stored.content)
                continue
            if stored.offset >= saved.timer_start:
                self._table.add(stored.content, stored.offset)
            if stored.offset >= saved.covered_end:
                next_offset = stored.record.get_number(NEXT_OFFSET_PROPERTY)
                self._note_next_offset(stored.content, next_offset)
        self._apply_revive_queues()

    def recover_from_log(self, passed_ms: int) -> None:
        """Fill the table from the log alone, because another broker has used the store last.

        The table gets the open checkpoints: records of pops whose messages are not acknowledged.
        Committed offsets do not change, because that broker has saved them itself.

        Records that were due before `passed_ms` (ms since 1970) are in the revive queues. So from
        the timer queue, only records with a later time are added. In the revive queues, only
        records that RocketMQ has not scanned are read. If `passed_ms` is 0, it is unknown what is
        in the revive queues. Then all records of both are read, and a checkpoint that RocketMQ has
        scanned counts as closed.
        """
        for queue_id in self._revive_queue_ids:
            scanned = self._offsets.committed(REVIVE_GROUP, self._topic, queue_id)
            start = scanned + 1 if passed_ms else 0
            self._read_revive_queue(queue_id, start, is_from_this_broker=False)
        for stored in self._iter_pop_records(TIMER_TOPIC, 0, 0):
            if isinstance(stored.content, Acknowledgement):
                self._apply_acknowledgement(stored.content)
            elif (stored.record.get_number(TIMER_OUT) or 0) >= passed_ms:
                self._table.add(stored.content, NO_OFFSET)
        self._apply_revive_queues()

    @property
    def _revive_queue_ids(self) -> list[int]:
        """The ids of the revive topic's queues that the store contains."""
        return [queue_id for topic, queue_id in self._store.queues() if topic == self._topic]

    def _read_revive_queue(self, queue_id: int, start: int, *, is_from_this_broker: bool) -> None:
        """Collect the records of a revive queue from offset `start` on.

        Three collections are filled, which `_apply_revive_queues` uses: acknowledgements, keys of
        checkpoints that RocketMQ has scanned, and offsets of the other checkpoints. The other
        checkpoints are also added to the table.

        `is_from_this_broker` says that this broker has written the file. Then the checkpoints that
        its own timer has delivered (they have the property TIMER_OUT) are not added to the table,
        because the file or the timer queue has them.
        """
        scanned_offset = self._offsets.committed(REVIVE_GROUP, self._topic, queue_id)
        for stored in self._iter_pop_records(self._topic, queue_id, start):
            if isinstance(stored.content, Acknowledgement):
                self._revive_acknowledgements.append(stored.content)
            elif stored.offset <= scanned_offset:
                self._scanned_keys.add(stored.content.key)
            else:
                self._revive_offsets.setdefault(stored.content.key, stored.offset)
                was_in_timer_queue = stored.record.get_number(TIMER_OUT) is not None
                if not (is_from_this_broker and was_in_timer_queue):
                    self._table.add(stored.content, NO_OFFSET)

    def _apply_revive_queues(self) -> None:
        """Apply the collected records of the revive queues to the table.

        Acknowledged messages are removed. Checkpoints that RocketMQ has scanned are closed. The
        other checkpoints get their offset in the revive queue. The committed offsets of groups are
        advanced to the collected next offsets. All queues must have been read before, because an
        acknowledgement may be found before its checkpoint.
        """
        table = self._table
        for acknowledgement in self._revive_acknowledgements:
            self._apply_acknowledgement(acknowledgement)
        for key in self._scanned_keys & table.by_key.keys():
            scanned_entry = table.by_key[key]
            table.remove_messages(scanned_entry, scanned_entry.pending_offsets)
        # After both, so that only open checkpoints get an offset. In the order of their queue.
        for key, revive_offset in self._revive_offsets.items():
            if key in table.by_key:
                table.note_revive_offset(table.by_key[key], revive_offset)
        for queue, next_offset in self._next_offsets.items():
            if next_offset > self._offsets.committed(*queue):
                self._offsets.commit(*queue, next_offset)

    def _apply_acknowledgement(self, acknowledgement: Acknowledgement) -> None:
        """Remove the acknowledged messages from their checkpoint.

        Do nothing if the table does not contain the checkpoint: it is closed already.
        """
        open_checkpoint = self._table.by_key.get(acknowledgement.key)
        if open_checkpoint is not None:
            self._table.remove_messages(open_checkpoint, acknowledgement.offsets)

    def _note_next_offset(self, checkpoint: Checkpoint, next_offset: int | None) -> None:
        """Record the offset from which the group continues after the pop of `checkpoint`.

        `next_offset` was read from the record of the checkpoint. It is None if another broker has
        written the record. That broker has saved the offset of the group itself, so the offsets in
        earlier checkpoints are dropped.
        """
        queue = checkpoint.group, checkpoint.topic, checkpoint.queue_id
        if next_offset is None:
            self._next_offsets.pop(queue, None)
        else:
            self._next_offsets[queue] = max(self._next_offsets.get(queue, 0), next_offset)

    def _iter_pop_records(self, topic: str, queue_id: int, offset: int) -> Iterator[PopRecord]:
        """Yield the checkpoints and acknowledgements in a queue from `offset` on.

        Records that cannot be decoded are logged and skipped. Records that the timer has stored a
        second time, because they were due too late for it, are skipped. Records that a new master
        hides until its slaves have them are included, because the previous master has answered the
        requests that wrote them.
        """
        first_offset, _ = self._store.queue_offsets(topic, queue_id)
        offset = max(offset, first_offset)
        while True:
            # A unit is the 20-byte entry of a queue: position and size of a record, and tag code.
            units = self._store.committed_units(topic, queue_id, offset, _CHUNK_UNITS)
            if not len(units):
                return
            for position, size, record_tag_code in UNIT.iter_unpack(units):
                if record_tag_code in _TAG_CODES and size != BLANK_SIZE:
                    record = read_record(self._store.committed_record(position, size))
                    if record is not None and self._is_pop_record(topic, record):
                        content = self._decode_or_log(record, topic, queue_id, offset)
                        if content is not None:
                            yield PopRecord(offset, record, content)
                offset += 1

    def _decode_or_log(
        self, record: Record, topic: str, queue_id: int, offset: int
    ) -> Checkpoint | Acknowledgement | None:
        """Return the content of the record at `offset` of a queue.

        If it cannot be decoded, log that and return None.
        """
        try:
            return decode_record(record, queue_id, self._broker)
        except ProtocolError as error:
            log.error("cannot decode record %d of %s: %s", offset, topic, error)
            return None

    def _is_pop_record(self, topic: str, record: Record) -> bool:
        """Return whether a record of `topic` is for the revive topic and was not stored again."""
        real_topic = record.get_text(REAL_TOPIC) or topic
        return real_topic == self._topic and _ROLLED not in record.properties
