"""What is popped and not acknowledged: kept in the log, decided in memory (design/0020).

    open         a pop gives messages away: their checkpoint is appended, due a second before its
                 deadline; the group's next pop begins behind them
    acknowledge  some of them are done: appended, due at the deadline
    change       another time for one of them: a new checkpoint, and the old one acknowledged
    deliver      at the deadline, to the ms: what is left goes to the retry topic, acknowledged
                 behind it in the same commit. So it comes back once, whatever crashes

The records are RocketMQ's and take its way, as timed messages for the revive topic
(spec/delivery.md §7). When the timer delivers one, the table is asked (`_gate`): what belongs to a
settled checkpoint goes nowhere, since nobody would read it. A checkpoint that is delivered is
followed by its acknowledgements there at once, and the last of them names all its messages: so a
revive queue alone says what of it is settled, and the group of RocketMQ's scan goes on behind that.

A group's offset is put into the table of offsets when the log is on disk up to the checkpoint: a
power loss must not take the one and leave the other. Until then the next pop goes on from a place
in memory.

The file is what a start needs besides the log: the checkpoints that have been open for long, from
where on the timer's queue and the revive queues have to be read for all others, and from where on
checkpoints may be ahead of the table of offsets. Each part is written when all it says is on disk.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from sluicemq.broker.background import Progress, TimeSlice
from sluicemq.broker.documents import Document
from sluicemq.broker.group_commit import GroupCommit
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.pop.popped import NEXT, Popped, PoppedTable, Queue, Saved, Start, decode_record
from sluicemq.broker.produce.intake import (
    AppendResult,
    MessageIntake,
    MessageToStore,
    Record,
    read_record,
)
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import REVIVE_QUEUES, Topics
from sluicemq.broker.waiting.delivery import Delayed
from sluicemq.clock import SteadyClock
from sluicemq.errors import ProtocolError, RequestError
from sluicemq.files import Files
from sluicemq.model.message import (
    FIRST_POP_TIME,
    RECONSUME_TIMES_MAX,
    TAGS,
    TIMER_PROPERTIES,
    UNIQ_KEY,
)
from sluicemq.model.system_names import REVIVE_GROUP, TIMER_TOPIC, revive_topic
from sluicemq.model.topic import POP_NORMAL, pop_kind, pop_retry_topic
from sluicemq.store.queues import BLANK_SIZE, UNIT
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.popping import CHECKPOINT, NO_OFFSET, Acknowledgement, Checkpoint, ReceiptHandle

log = logging.getLogger(__name__)

BEFORE_MS: Final = 1000
"""So long before its deadline a checkpoint is delivered."""
LISTED_MAX: Final = 500
"""So many open checkpoints stand in the file themselves; from the first other one on the log is
read at the start."""
_DELIVER: Final = TIMER_PROPERTIES[-1]


class Pending(NamedTuple):
    """Where a group goes on once the log is on disk beyond `position`, that of a checkpoint which
    stands at `timer_offset` of the timer's queue."""

    next_offset: int
    position: int
    timer_offset: int


class Checkpoints:
    """The messages in flight of all groups. Part of what `Delayed` drives."""

    name: Final = "POP revival"

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        offsets: Offsets,
        store: Store,
        intake: MessageIntake,
        group_commit: GroupCommit,
        delayed: Delayed,
        files: Files,
        clock: SteadyClock,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._offsets = offsets
        self._store = store
        self._intake = intake
        self._group_commit = group_commit
        self._delayed = delayed
        self._clock = clock
        self.topic = revive_topic(settings.broker.cluster_name)
        self.table = PoppedTable()
        self._pending: dict[Queue, deque[Pending]] = {}
        self._progress: dict[int, Progress] = {}
        self._looked_at = (0, 0)
        self._saved = self._loaded = Saved(0, 0, {}, [])
        self._loaded_end = 0  # where the timer's queue ended then
        self._snapshot: tuple[int, Saved] | None = None  # good when the log is on disk up to there
        self._covering = (0, 0)  # an edition of the offsets, and what it covers
        path = f"{settings.store.root}/config/sluicePop.json"
        self.document = Document(files, path, self._render)
        self.stored: Counter[tuple[str, str, str]] = Counter()
        """Records, since the start, by topic, group and what RocketMQ's metrics call them."""
        self.revived: Counter[tuple[str, str]] = Counter()
        """Messages that have come back, by topic and group."""
        offsets.on_save = self._note_offsets
        delayed.parts.insert(0, self)  # what is settled hereby, the timer need not deliver
        delayed.redelivery.gates[self.topic] = self._gate

    # ------------------------------------------------------------------------------- requests

    def next_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Where the group's next pop from a queue begins; NONE when nothing is known. A reset that
        no consumer was told of is heard hereby."""
        queue = group, topic, queue_id
        if queue in self._offsets.resets.table:
            self._offsets.resets.discard(*queue)
            self._pending.pop(queue, None)
        return self.place(*queue)

    def place(self, group: str, topic: str, queue_id: int) -> int:
        """How far the group has popped a queue; NONE when nothing is known."""
        pending = self._pending.get((group, topic, queue_id))
        committed = self._offsets.committed(group, topic, queue_id)
        return max(pending[-1].next_offset, committed) if pending else committed

    def ahead(self) -> dict[Queue, int]:
        """How far groups have popped beyond their offsets; a copy, for other threads."""
        found = [(queue, tuple(pending)) for queue, pending in self._pending.copy().items()]
        return {queue: pending[-1].next_offset for queue, pending in found if pending}

    def open(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offsets: Sequence[int],
        next_offset: int,
        pop_ms: int,
        invisible_ms: int,
        holder: str = "",
    ) -> int:
        """A pop of `holder` gives these messages away, and the next one begins at `next_offset`.
        The turn's end makes it so; returns the revive queue, the same for all queues of one pop.
        The checkpoint's first offset is that of the first message. Raises StoreError,
        RequestError."""
        revive_queue = pop_ms % self._queues
        broker = self._settings.broker.broker_name
        checkpoint = Checkpoint(
            topic, group, queue_id, broker, offsets[0], pop_ms, invisible_ms, tuple(offsets),
            revive_queue,
        )  # fmt: skip
        stored = self._open(checkpoint, next_offset, holder)
        pending = self._pending.setdefault((group, topic, queue_id), deque())
        pending.append(Pending(next_offset, stored.physical_offset, stored.queue_offset))
        self._group_commit.commit_internal(pending.pop)
        return revive_queue

    def skip(self, group: str, topic: str, queue_id: int, next_offset: int) -> None:
        """A pop has found that the group wants nothing of what lies before `next_offset`, or this
        is where it begins at all."""
        queue = group, topic, queue_id
        pending = self._pending.get(queue)
        if pending:
            pending.append(pending[-1]._replace(next_offset=next_offset))
            self._group_commit.commit_internal(pending.pop)
        else:
            self._offsets.commit(*queue, next_offset)

    def acknowledge(
        self, group: str, topic: str, handle: ReceiptHandle, offsets: Collection[int]
    ) -> None:
        """These messages are done, when the turn has ended. What is not in flight any more is let
        be. Raises StoreError, RequestError."""
        popped = self._of(group, topic, handle)
        done = [one for one in popped.waiting if one in offsets] if popped is not None else ()
        if popped is not None and done:
            self._finish(popped, done)

    def change(
        self,
        group: str,
        topic: str,
        handle: ReceiptHandle,
        invisible_ms: int,
        *,
        is_suspended: bool = False,
    ) -> ReceiptHandle:
        """From now on the handle's message is invisible for so long; the handle that counts then.
        `is_suspended`: when it comes again, that is no further attempt.

        Raises RequestError when the message is not in flight any more, StoreError.
        """
        popped, offset = self._of(group, topic, handle), handle.offset
        if popped is None or offset not in popped.waiting:
            raise RequestError(
                ResponseCode.NO_MESSAGE,
                f"message {offset} of {topic}:{handle.queue_id} is not in flight any more with the "
                f"handle {handle.encode()!r}: it is acknowledged, or it came back. Use the newest "
                "handle of a message.",
            )
        old = popped.checkpoint
        # Another time than the old one's, or both had the same key.
        pop_ms = max(self._clock.now_ms(), old.pop_ms + 1)
        changed = old._replace(
            start_offset=offset, pop_ms=pop_ms, invisible_ms=invisible_ms, offsets=(offset,),
            is_suspended=is_suspended,
        )  # fmt: skip
        self._open(changed, 0, popped.holder)
        self._finish(popped, [offset])
        return handle._replace(
            start_offset=offset, pop_ms=pop_ms, invisible_ms=invisible_ms,
            revive_queue=old.revive_queue,
        )  # fmt: skip

    def in_flight(self, group: str, topic: str, queue_id: int | None = None) -> int:
        """How many messages of a queue, or of all, are popped and neither acknowledged nor due."""
        counts = self.table.counts
        if queue_id is not None:
            return counts.get((group, topic, queue_id), 0)
        return sum(count for queue, count in counts.items() if queue[:2] == (group, topic))

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """The topic, or the group, is deleted."""
        for popped in [*self.table]:
            if popped.checkpoint.topic == topic or popped.checkpoint.group == group:
                self.table.done(popped, popped.waiting)
        for queue in [queue for queue in self._pending if queue[0] == group or queue[1] == topic]:
            del self._pending[queue]
        self.document.changed = True

    def _of(self, group: str, topic: str, handle: ReceiptHandle) -> Popped | None:
        key = topic, group, handle.queue_id, handle.start_offset, handle.pop_ms, handle.broker
        return self.table.table.get(key)

    # -------------------------------------------------------------------------------- records

    @property
    def _queues(self) -> int:
        return max(self._topics.ensure(self.topic, REVIVE_QUEUES).config.write_queues, 1)

    def _open(self, checkpoint: Checkpoint, next_offset: int, holder: str) -> AppendResult:
        """Append a checkpoint, which says where the group goes on, 0 when it does not move."""
        known = self.table.table.get(checkpoint.key)
        held = known.waiting if known is not None else ()
        # Always later than now: so each stands in the timer's queue.
        due_ms = max(checkpoint.deadline_ms - BEFORE_MS, self._clock.now_ms() + 1)
        stored = self._append(
            checkpoint, CHECKPOINT, checkpoint.revive_queue, due_ms, {NEXT: str(next_offset)}
        )
        popped = self.table.add(checkpoint, stored.queue_offset, holder)
        new = [offset for offset in checkpoint.offsets if offset not in held]
        self._group_commit.commit_internal(lambda: self.table.done(popped, new))
        if self.table.next_ms == checkpoint.deadline_ms:
            self._delayed.plan()
        return stored

    def _finish(self, popped: Popped, done: Sequence[int]) -> None:
        """Acknowledge messages: in the revive queue if their checkpoint is there already, and then
        all of its messages when nothing is left."""
        checkpoint, due_ms = popped.checkpoint, popped.checkpoint.deadline_ms
        said = tuple(done)
        if popped.revive_offset != NO_OFFSET:
            due_ms = min(due_ms, self._clock.now_ms())
            if len(done) == len(popped.waiting):
                said = checkpoint.offsets
        record = Acknowledgement(checkpoint.key, said)
        self._append(record, record.tag, checkpoint.revive_queue, due_ms, {})
        self.table.done(popped, done)
        self._group_commit.commit_internal(lambda: self.table.reopen(popped, done))

    def _append(
        self, record: Checkpoint | Acknowledgement, tag: str, revive_queue: int, due_ms: int,
        more: dict[str, str],
    ) -> AppendResult:  # fmt: skip
        self.document.changed = True
        topic, group, *_ = record.key
        self.stored[topic, group, "CK" if tag == CHECKPOINT else "ACK"] += 1
        host = self._settings.store_host
        wall_due_ms = due_ms - self._clock.lead_ms  # what is stored has the time of the wall clock
        properties = {TAGS: tag, _DELIVER: str(wall_due_ms), UNIQ_KEY: record.unique_id, **more}
        now_ms = self._clock.now_ms()
        return self._intake.rewrite_and_append(
            MessageToStore(
                self.topic, revive_queue, record.encode(), properties, now_ms, host, host
            )
        )

    def _gate(self, record: Record) -> Callable[[int], None] | None:
        """The timer has a record for the revive topic: who is told of its offset there, None when
        it goes nowhere."""
        try:
            found = decode_record(record, 0, self._settings.broker.broker_name)
        except ProtocolError as error:
            log.error("a record for %s cannot be read: %s", self.topic, error)
            return lambda offset: None
        popped = self.table.table.get(found.key)
        if popped is None and found.key[-1] == self._settings.broker.broker_name:
            return None
        if popped is None or isinstance(found, Acknowledgement):
            return lambda offset: None
        return partial(self.table.delivered, popped)

    # ------------------------------------------------------------------------------- deadlines

    @property
    def next_ms(self) -> int | None:
        """The next deadline."""
        return self.table.next_ms

    def deliver(self, work: TimeSlice) -> None:
        """Give back what is due, as long as the slice lasts. Raises StoreError."""
        while not work.is_over and (popped := self.table.take(work.now_ms)) is not None:
            done: list[int] = []
            try:
                for offset in popped.waiting:
                    self._come_back(popped.checkpoint, offset)
                    done.append(offset)
                    work.count_done()
            finally:
                self.table.plan(popped)
                if done:
                    self._finish(popped, done)

    def record(self, topic: str, queue_id: int, offset: int) -> Record | None:
        """A message that was popped; None when it is deleted."""
        unit = self._store.reader.valid_units(topic, queue_id, offset, 1)
        position, size, _ = UNIT.unpack_from(unit) if len(unit) else (0, BLANK_SIZE, 0)
        return read_record(self._store.reader.view_at(position)) if size != BLANK_SIZE else None

    def _come_back(self, checkpoint: Checkpoint, offset: int) -> None:
        """Put one message into the retry topic, made when it is missing."""
        topic, group, queue_id = checkpoint.topic, checkpoint.group, checkpoint.queue_id
        record = self.record(topic, queue_id, offset)
        if record is None:
            log.warning(
                "message %d of %s:%d is deleted: it does not come back to group %s",
                offset, topic, queue_id, group,
            )  # fmt: skip
            return
        retry = topic
        if pop_kind(topic) == POP_NORMAL:
            is_v2 = self._settings.broker.pop_retry_v2
            retry = pop_retry_topic(group, topic, is_v2=is_v2)
            self._topics.ensure(retry, 1)
            if self._offsets.committed(group, retry, 0) < 0:
                self._offsets.put(group, retry, 0, 0)
        added = b""
        if not record.reconsume_times or not record.get_text(FIRST_POP_TIME):
            added = f"{FIRST_POP_TIME}\x01{checkpoint.pop_ms}\x02".encode()
        self._delayed.redelivery.append_copy(
            record, retry, 0, added,
            reconsume_times=min(
                record.reconsume_times + (not checkpoint.is_suspended), RECONSUME_TIMES_MAX
            ),
        )  # fmt: skip
        self.revived[topic, group] += 1

    def settle(self, *, is_stored: bool) -> None:
        """Hand on what is on disk meanwhile. What `deliver` put and is not stored is undone."""
        state = self._store.written_offset, self._store.synced_offset
        if state != self._looked_at:
            self._looked_at = state
            self._commit()
            self._follow()

    # -------------------------------------------------------------------------------- offsets

    @property
    def is_ahead(self) -> bool:
        """Are there pops that the table of offsets lacks, since they are not on disk?"""
        return bool(self._pending)

    def _commit(self) -> None:
        """Put those offsets into their table whose checkpoints are on disk."""
        synced = self._store.synced_offset
        for queue, pending in list(self._pending.items()):
            next_offset = NO_OFFSET
            while pending and pending[0].position < synced:
                next_offset = pending.popleft().next_offset
            if next_offset > self._offsets.committed(*queue):
                self._offsets.commit(*queue, next_offset)
            if not pending:
                del self._pending[queue]

    def _follow(self) -> None:
        """RocketMQ's group of the revive topic: as its scan has it, the last one that is done."""
        for queue_id, progress in self._progress.items():
            end = self._store.queue_offsets(self.topic, queue_id)[1]
            done = self.table.revive_start(queue_id, end) - 1
            if done > progress.value:
                progress.advance(done, self._store.written_offset)
            safe = progress.durable_value(self._store.synced_offset)
            if safe > self._offsets.committed(REVIVE_GROUP, self.topic, queue_id):
                self._offsets.put(REVIVE_GROUP, self.topic, queue_id, safe)

    # ------------------------------------------------------------------------------- the file

    def load(self) -> None:
        """Blocking: read back what is in flight, after topics, offsets and timers. Raises
        StoreDamagedError."""
        saved = self.document.load(Saved.parse)
        store, broker = self._store, self._settings.broker.broker_name
        start = Start(self.table, store, self._offsets, self.topic, broker)
        end = store.committed_offset(TIMER_TOPIC, 0)
        is_beyond = saved is not None and max(saved.timer, saved.covered) > end
        if is_beyond or self.document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last (removed, an older copy, or of another"
                " store): which pops are in flight is read from the log, and messages may come"
                " again. Nothing has to be done.", self.document.path,
            )  # fmt: skip
            saved = None
        if saved is None:
            start.read_foreign(self._delayed.timers.passed_ms)
            self._saved = self._saved._replace(covered=end)
            self.document.changed = True
        else:
            start.read_own(saved)
            self._saved = self._loaded = saved
            self._loaded_end = end
        for queue_id in range(self._queues):
            scanned = self._offsets.committed(REVIVE_GROUP, self.topic, queue_id)
            self._progress[queue_id] = Progress(scanned)
        if self.table:
            log.info("%d pops are in flight", len(self.table))

    def _render(self) -> str:
        """The newest that is good; when it is not up to date, the file is written again."""
        self._take_covered()
        self._take_snapshot()
        if self._snapshot is None:
            self._group_commit.commit()
            self._snapshot = self._store.written_offset, self._in_memory()
            self._take_snapshot()
        self.document.changed |= self._snapshot is not None
        return self._saved.text()

    def _in_memory(self) -> Saved:
        """What there is now; where other checkpoints begin that do not stand in it themselves."""
        end_of = self._store.committed_offset
        start = end_of(TIMER_TOPIC, 0)
        listed: list[Checkpoint] = []
        for popped in self.table:
            if popped.timer_offset != NO_OFFSET and len(listed) >= LISTED_MAX:
                start = popped.timer_offset
                break
            listed.append(popped.checkpoint._replace(offsets=popped.waiting))
        revive: Mapping[int, int] = {q: end_of(self.topic, q) for q in range(self._queues)}
        if start < self._loaded_end:  # what another broker has given back meanwhile
            revive = self._loaded.revive
        return Saved(start, 0, revive, listed)

    def _take_snapshot(self) -> None:
        if self._snapshot is not None and self._snapshot[0] <= self._store.synced_offset:
            self._saved = self._snapshot[1]._replace(covered=self._saved.covered)
            self._snapshot = None

    def _note_offsets(self) -> None:
        """The table of offsets is about to be written: what will that edition cover?"""
        self._commit()
        self._take_covered()
        # A record that is not on disk may be lost, and another one take its offset.
        covered = self._store.first_offset_from(TIMER_TOPIC, 0, self._store.synced_offset)
        self._covering = self._offsets.document.edition, covered

    def _take_covered(self) -> None:
        edition, covered = self._covering
        if edition and self._offsets.document.has_written(edition):
            self._saved = self._saved._replace(covered=covered)
