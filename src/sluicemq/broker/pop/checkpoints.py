"""The checkpoints and acknowledgements of pops: stored in the log, evaluated in memory.

A pop takes messages from a queue and makes them invisible until its deadline. `PopCheckpoints`
stores what happens to them as records that RocketMQ understands (spec/delivery.md §7,
design/0020):

    record_pop              appends a checkpoint: which messages a pop took. The next pop of the
                            group begins behind them
    acknowledge             appends an acknowledgement of some of them
    change_invisible_time   appends a new checkpoint for one message, and acknowledges the old one
    deliver                 at the deadline, to the millisecond: appends the messages that are still
                            in flight to the retry topic, and acknowledges them in the same commit.
                            So each of them is delivered again once, whatever crashes

The records are timed messages for the revive topic. A checkpoint is due one second before its
deadline, an acknowledgement at the deadline. When the timer delivers such a record, `_gate` decides
whether it is appended to the revive topic. Records of a closed checkpoint are dropped, because
nothing would read them. Once a checkpoint is in the revive topic, its acknowledgements go there at
once, and the last one names all its messages. So a revive queue alone tells RocketMQ which
checkpoints are closed, and the committed offset of its scan (REVIVE_GROUP) can follow.

A group's committed offset moves when the log is on disk up to the checkpoint, because a power loss
must not lose the checkpoint and keep the offset. Until then the next pop continues from an offset
that is only in memory (`PendingCommit`).

The file `config/sluicePop.json` contains what a start needs besides the log; `popped.py` describes
it. Each part of it is written when everything that it refers to is on disk.

All methods are called on the event loop thread, except `get_uncommitted_offsets`.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from sluicemq.broker.background import Progress, TimeSlice
from sluicemq.broker.context import BrokerContext
from sluicemq.broker.documents import Document
from sluicemq.broker.pop.popped import (
    NEXT_OFFSET_PROPERTY,
    GroupQueue,
    OpenCheckpoint,
    OpenCheckpoints,
    PopRecovery,
    SavedPops,
    decode_record,
)
from sluicemq.broker.produce.intake import (
    AppendResult,
    MessageIntake,
    MessageToStore,
    Record,
    read_record,
)
from sluicemq.broker.topics import REVIVE_QUEUES
from sluicemq.broker.waiting.delivery import DelayedDelivery
from sluicemq.errors import ProtocolError, RequestError
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
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.popping import CHECKPOINT, NO_OFFSET, Acknowledgement, Checkpoint, ReceiptHandle

log = logging.getLogger(__name__)

REVIVE_LEAD_MS: Final = 1000
"""A checkpoint's record is due this long before the deadline of its messages."""
LISTED_CHECKPOINTS_MAX: Final = 500
"""The most open checkpoints that the file lists. A start reads the others from the log."""
_DELIVER_TIME: Final = TIMER_PROPERTIES[-1]
"""The property with the time at which a timed message is due."""


class PendingCommit(NamedTuple):
    """An offset that is committed for a group once the checkpoint of its pop is on disk."""

    next_offset: int
    """The offset from which the group continues."""
    position: int
    """The position of the checkpoint's record in the commit log."""
    timer_offset: int
    """The offset of the checkpoint's record in the timer queue."""


class PopCheckpoints:
    """The messages that are in flight after unordered pops, of all groups of a broker.

    It is one of the sources of `DelayedDelivery`, which calls `deliver` at the next deadline.
    """

    name: Final = "POP revival"

    def __init__(
        self,
        context: BrokerContext,
        *,
        intake: MessageIntake,
        delayed: DelayedDelivery,
    ) -> None:
        """Register the checkpoints with `delayed`, and with the table of offsets for its saves."""
        settings, offsets = context.settings, context.offsets
        self._settings = settings
        self._topics = context.topics
        self._offsets = offsets
        self._store = context.store
        self._intake = intake
        self._group_commit = context.group_commit
        self._delayed = delayed
        self._clock = context.steady_clock
        self.topic = revive_topic(settings.broker.cluster_name)
        """The revive topic."""
        self.open_checkpoints = OpenCheckpoints()
        self._pending_commits: dict[GroupQueue, deque[PendingCommit]] = {}
        """By group and queue: the offsets to commit, in the order of the log."""
        self._revive_progress: dict[int, Progress] = {}
        """By revive queue: the last offset before the first open checkpoint."""
        self._confirmed_at = (0, 0)
        """The written and the synced end of the log at the last `confirm_deliveries`."""
        self._saved = self._loaded = SavedPops(0, 0, {}, [])
        """The newest content that may be written to the file, and the content that was loaded."""
        self._loaded_end = 0
        """The end offset of the timer queue when the file was loaded."""
        self._snapshot: tuple[int, SavedPops] | None = None
        """Content that may be written to the file once the log is synced up to a position."""
        self._covering = (0, 0)
        """An edition of the table of offsets, and the `covered_end` once it is written."""
        path = f"{settings.store.root}/config/sluicePop.json"
        self.document = Document(context.files, path, self._render)
        self.stored_record_counts: Counter[tuple[str, str, str]] = Counter()
        """The number of records stored since the start, by topic, group, and "CK" or "ACK"."""
        self.revived_counts: Counter[tuple[str, str]] = Counter()
        """The number of messages put into the retry topic since the start, by topic and group."""
        offsets.on_save = self._prepare_offsets_save
        # First: the timer need not deliver the records of checkpoints that are closed here.
        delayed.sources.insert(0, self)
        delayed.redelivery.gates[self.topic] = self._gate

    # ------------------------------------------------------------------------------- requests

    def resolve_next_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the offset at which the group's next pop from a queue begins.

        Return NO_OFFSET if the group has neither popped nor committed there. If the offset was
        reset, the pop follows the reset, which is thereby known to the consumers.
        """
        queue = group, topic, queue_id
        if queue in self._offsets.resets.table:
            self._offsets.resets.discard(*queue)
            self._pending_commits.pop(queue, None)
        return self.get_next_offset(*queue)

    def get_next_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the offset behind the last message of the queue that the group popped.

        Return NO_OFFSET if the group has neither popped nor committed there.
        """
        pending = self._pending_commits.get((group, topic, queue_id))
        committed = self._offsets.committed(group, topic, queue_id)
        return max(pending[-1].next_offset, committed) if pending else committed

    def get_uncommitted_offsets(self) -> dict[GroupQueue, int]:
        """Return the offsets up to which groups have popped and that are not committed yet.

        The returned dict is a copy, and another thread may call this method.
        """
        found = [(queue, tuple(pending)) for queue, pending in self._pending_commits.copy().items()]
        return {queue: pending[-1].next_offset for queue, pending in found if pending}

    def record_pop(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offsets: Sequence[int],
        next_offset: int,
        pop_ms: int,
        invisible_ms: int,
        popped_by: str = "",
    ) -> int:
        """Append the checkpoint of a pop that takes the messages at `offsets` (at least one).

        The group's next pop begins at `next_offset`. `popped_by` is the client id or address of the
        consumer. The pop becomes valid with the next group commit; if that fails, it is undone.

        Return the id of the revive queue, which is the same for all queues of one pop. Raises
        StoreError or RequestError if the checkpoint cannot be appended.
        """
        revive_queue = pop_ms % self._revive_queue_count
        checkpoint = Checkpoint(
            topic=topic,
            group=group,
            queue_id=queue_id,
            broker=self._settings.broker.broker_name,
            start_offset=offsets[0],
            pop_ms=pop_ms,
            invisible_ms=invisible_ms,
            offsets=tuple(offsets),
            revive_queue=revive_queue,
        )
        stored = self._append_checkpoint(checkpoint, next_offset, popped_by)
        pending = self._pending_commits.setdefault((group, topic, queue_id), deque())
        pending.append(PendingCommit(next_offset, stored.physical_offset, stored.queue_offset))
        self._group_commit.commit_internal(pending.pop)
        return revive_queue

    def skip_to(self, group: str, topic: str, queue_id: int, next_offset: int) -> None:
        """Let the group's next pop begin at `next_offset`, without taking the messages before it.

        A pop calls this for messages that its filter rejects, and to set the group's first offset.
        """
        queue = group, topic, queue_id
        pending = self._pending_commits.get(queue)
        if pending:
            pending.append(pending[-1]._replace(next_offset=next_offset))
            self._group_commit.commit_internal(pending.pop)
        else:
            self._offsets.commit(*queue, next_offset)

    def acknowledge(
        self, group: str, topic: str, handle: ReceiptHandle, offsets: Collection[int]
    ) -> None:
        """Acknowledge the messages at `offsets` of the pop that `handle` identifies.

        Messages that are not in flight are ignored. The acknowledgement becomes valid with the next
        group commit; if that fails, it is undone. Raises StoreError or RequestError if it cannot
        be appended.
        """
        entry = self._find(group, topic, handle)
        done = [one for one in entry.pending_offsets if one in offsets] if entry is not None else ()
        if entry is not None and done:
            self._append_acknowledgement(entry, done)

    def change_invisible_time(
        self,
        group: str,
        topic: str,
        handle: ReceiptHandle,
        invisible_ms: int,
        *,
        is_suspended: bool = False,
    ) -> ReceiptHandle:
        """Make the message of `handle` invisible for `invisible_ms` from now on.

        Return the new handle of the message; the old one is invalid. If `is_suspended`, the next
        delivery does not count as another attempt.

        Raises RequestError if the message is not in flight, or StoreError if the checkpoint cannot
        be appended.
        """
        entry, offset = self._find(group, topic, handle), handle.offset
        if entry is None or offset not in entry.pending_offsets:
            raise RequestError(
                ResponseCode.NO_MESSAGE,
                f"Message {offset} of {topic}:{handle.queue_id} is no longer in flight with the "
                f"receipt handle {handle.encode()!r}: it was acknowledged, or it became visible "
                "again. Use the newest handle of the message.",
            )
        old = entry.checkpoint
        # The times must differ, or both checkpoints would have the same key.
        pop_ms = max(self._clock.now_ms(), old.pop_ms + 1)
        changed = old._replace(
            start_offset=offset,
            pop_ms=pop_ms,
            invisible_ms=invisible_ms,
            offsets=(offset,),
            is_suspended=is_suspended,
        )
        self._append_checkpoint(changed, 0, entry.popped_by)
        self._append_acknowledgement(entry, [offset])
        return handle._replace(
            start_offset=offset,
            pop_ms=pop_ms,
            invisible_ms=invisible_ms,
            revive_queue=old.revive_queue,
        )

    def count_in_flight(self, group: str, topic: str, queue_id: int | None = None) -> int:
        """Return the number of the group's messages in flight in a queue; None means all queues."""
        counts = self.open_checkpoints.in_flight_counts
        if queue_id is not None:
            return counts.get((group, topic, queue_id), 0)
        return sum(count for queue, count in counts.items() if queue[:2] == (group, topic))

    def forget_deleted(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Remove the messages in flight of a deleted topic or group: they are not revived."""
        for entry in [*self.open_checkpoints]:
            if entry.checkpoint.topic == topic or entry.checkpoint.group == group:
                self.open_checkpoints.remove_messages(entry, entry.pending_offsets)
        queues = [one for one in self._pending_commits if one[0] == group or one[1] == topic]
        for queue in queues:
            del self._pending_commits[queue]
        self.document.changed = True

    def _find(self, group: str, topic: str, handle: ReceiptHandle) -> OpenCheckpoint | None:
        """Return the open checkpoint of the pop that `handle` identifies; None if it is closed."""
        key = topic, group, handle.queue_id, handle.start_offset, handle.pop_ms, handle.broker
        return self.open_checkpoints.by_key.get(key)

    # -------------------------------------------------------------------------------- records

    @property
    def _revive_queue_count(self) -> int:
        """The number of queues of the revive topic, which is created if it does not exist."""
        return max(self._topics.ensure(self.topic, REVIVE_QUEUES).config.write_queues, 1)

    def _append_checkpoint(
        self, checkpoint: Checkpoint, next_offset: int, popped_by: str
    ) -> AppendResult:
        """Append the record of a checkpoint, and add it to the open ones.

        `next_offset` is the offset from which the group continues, 0 if it does not move.
        """
        known = self.open_checkpoints.by_key.get(checkpoint.key)
        known_offsets = known.pending_offsets if known is not None else ()
        # A time that has come would not delay the record. But each record must be stored in the
        # timer queue, whose order is that of all checkpoints.
        due_ms = max(checkpoint.deadline_ms - REVIVE_LEAD_MS, self._clock.now_ms() + 1)
        stored = self._append(
            checkpoint,
            CHECKPOINT,
            checkpoint.revive_queue,
            due_ms,
            {NEXT_OFFSET_PROPERTY: str(next_offset)},
        )
        entry = self.open_checkpoints.add(checkpoint, stored.queue_offset, popped_by)
        new = [offset for offset in checkpoint.offsets if offset not in known_offsets]
        self._group_commit.commit_internal(
            lambda: self.open_checkpoints.remove_messages(entry, new)
        )
        if self.open_checkpoints.next_deadline_ms == checkpoint.deadline_ms:
            self._delayed.schedule_run()
        return stored

    def _append_acknowledgement(self, entry: OpenCheckpoint, done: Sequence[int]) -> None:
        """Append an acknowledgement of the messages at offsets `done`, which are in flight.

        If the checkpoint's record is in its revive queue, the acknowledgement is due now, and the
        last one contains all messages of the checkpoint.
        """
        checkpoint, due_ms = entry.checkpoint, entry.checkpoint.deadline_ms
        acknowledged = tuple(done)
        if entry.revive_offset != NO_OFFSET:
            due_ms = min(due_ms, self._clock.now_ms())
            if len(done) == len(entry.pending_offsets):
                acknowledged = checkpoint.offsets
        record = Acknowledgement(checkpoint.key, acknowledged)
        self._append(record, record.tag, checkpoint.revive_queue, due_ms, {})
        self.open_checkpoints.remove_messages(entry, done)
        self._group_commit.commit_internal(
            lambda: self.open_checkpoints.restore_messages(entry, done)
        )

    def _append(
        self,
        record: Checkpoint | Acknowledgement,
        tag: str,
        revive_queue: int,
        due_ms: int,
        added: dict[str, str],
    ) -> AppendResult:
        """Append a record that is due at `due_ms`, with the additional properties `added`."""
        self.document.changed = True
        topic, group, *_ = record.key
        self.stored_record_counts[topic, group, "CK" if tag == CHECKPOINT else "ACK"] += 1
        host = self._settings.store_host
        wall_due_ms = due_ms - self._clock.lead_ms  # stored times are those of the wall clock
        properties = {
            TAGS: tag,
            _DELIVER_TIME: str(wall_due_ms),
            UNIQ_KEY: record.unique_id,
            **added,
        }
        now_ms = self._clock.now_ms()
        return self._intake.rewrite_and_append(
            MessageToStore(
                self.topic, revive_queue, record.encode(), properties, now_ms, host, host
            )
        )

    def _gate(self, record: Record) -> Callable[[int], None] | None:
        """Decide whether the timer appends a due record to the revive topic.

        Return None to drop the record, or a function that the timer calls with the offset at which
        it has appended the record.
        """
        try:
            found = decode_record(record, 0, self._settings.broker.broker_name)
        except ProtocolError as error:
            log.error("cannot decode a record for %s: %s", self.topic, error)
            return lambda offset: None
        entry = self.open_checkpoints.by_key.get(found.key)
        if entry is None and found.key[-1] == self._settings.broker.broker_name:
            return None
        if entry is None or isinstance(found, Acknowledgement):
            return lambda offset: None
        return partial(self.open_checkpoints.note_revive_offset, entry)

    # ------------------------------------------------------------------------------- deadlines

    @property
    def next_due_ms(self) -> int | None:
        """The earliest deadline of a message in flight in ms since 1970; None without one."""
        return self.open_checkpoints.next_deadline_ms

    def deliver(self, work: TimeSlice) -> None:
        """Put messages whose deadline has passed into the retry topic until the slice is over.

        Raises StoreError if a message cannot be appended.
        """
        while not work.is_over and (
            (entry := self.open_checkpoints.take_due(work.now_ms)) is not None
        ):
            done: list[int] = []
            try:
                for offset in entry.pending_offsets:
                    self._revive(entry.checkpoint, offset)
                    done.append(offset)
                    work.count_done()
            finally:
                self.open_checkpoints.schedule(entry)
                if done:
                    self._append_acknowledgement(entry, done)

    def read_message(self, topic: str, queue_id: int, offset: int) -> Record | None:
        """Return the message at an offset of a queue; None if it was deleted."""
        unit = self._store.reader.valid_units(topic, queue_id, offset, 1)
        position, size, _ = UNIT.unpack_from(unit) if len(unit) else (0, BLANK_SIZE, 0)
        return read_record(self._store.reader.view_at(position)) if size != BLANK_SIZE else None

    def _revive(self, checkpoint: Checkpoint, offset: int) -> None:
        """Append a copy of one message to the retry topic, which is created if necessary.

        A message that was deleted is logged and skipped.
        """
        topic, group, queue_id = checkpoint.topic, checkpoint.group, checkpoint.queue_id
        record = self.read_message(topic, queue_id, offset)
        if record is None:
            log.warning(
                "message %d of %s:%d was deleted: it is not delivered again to group %s",
                offset,
                topic,
                queue_id,
                group,
            )
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
        attempts = record.reconsume_times + (not checkpoint.is_suspended)
        self._delayed.redelivery.append_copy(
            record, retry, 0, added, reconsume_times=min(attempts, RECONSUME_TIMES_MAX)
        )
        self.revived_counts[topic, group] += 1

    def confirm_deliveries(self, *, is_stored: bool) -> None:
        """Commit the offsets whose checkpoints are on disk by now.

        `is_stored` is not used: if the commit of the messages that `deliver` appended failed, the
        undo functions of the group commit have reopened their checkpoints.
        """
        log_ends = self._store.written_offset, self._store.synced_offset
        if log_ends != self._confirmed_at:
            self._confirmed_at = log_ends
            self._commit_offsets()
            self._commit_revive_offsets()

    # -------------------------------------------------------------------------------- offsets

    @property
    def has_uncommitted_offsets(self) -> bool:
        """Whether the offsets of some pops are not committed, as their checkpoint is not synced."""
        return bool(self._pending_commits)

    def _commit_offsets(self) -> None:
        """Commit the offsets of groups whose checkpoints are on disk."""
        synced = self._store.synced_offset
        for queue, pending in list(self._pending_commits.items()):
            next_offset = NO_OFFSET
            while pending and pending[0].position < synced:
                next_offset = pending.popleft().next_offset
            if next_offset > self._offsets.committed(*queue):
                self._offsets.commit(*queue, next_offset)
            if not pending:
                del self._pending_commits[queue]

    def _commit_revive_offsets(self) -> None:
        """Commit the offsets of RocketMQ's scan of the revive queues (REVIVE_GROUP).

        As in RocketMQ, the committed offset is that of the last record that is done, not the one
        behind it.
        """
        for queue_id, progress in self._revive_progress.items():
            end = self._store.queue_offsets(self.topic, queue_id)[1]
            done = self.open_checkpoints.first_open_revive_offset(queue_id, end) - 1
            if done > progress.value:
                progress.advance(done, self._store.written_offset)
            durable = progress.durable_value(self._store.synced_offset)
            if durable > self._offsets.committed(REVIVE_GROUP, self.topic, queue_id):
                self._offsets.put(REVIVE_GROUP, self.topic, queue_id, durable)

    # ------------------------------------------------------------------------------- the file

    def load(self) -> None:
        """Recover the messages in flight. Blocking.

        Topics, offsets and timers must have been loaded before. Raises StoreDamagedError if the
        file cannot be parsed.
        """
        saved = self.document.load(SavedPops.parse)
        store, broker = self._store, self._settings.broker.broker_name
        recovery = PopRecovery(self.open_checkpoints, store, self._offsets, self.topic, broker)
        end = store.committed_offset(TIMER_TOPIC, 0)
        is_beyond_queue = saved is not None and max(saved.timer_start, saved.covered_end) > end
        if is_beyond_queue or self.document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last: it was removed, is an older copy, or"
                " belongs to another store. The messages in flight are recovered from the log, and"
                " some may be delivered again. No action is needed.",
                self.document.path,
            )
            saved = None
        if saved is None:
            recovery.recover_from_log(self._delayed.timers.delivered_before_ms)
            self._saved = self._saved._replace(covered_end=end)
            self.document.changed = True
        else:
            recovery.recover_from_file(saved)
            self._saved = self._loaded = saved
            self._loaded_end = end
        for queue_id in range(self._revive_queue_count):
            scanned = self._offsets.committed(REVIVE_GROUP, self.topic, queue_id)
            self._revive_progress[queue_id] = Progress(scanned)
        if self.open_checkpoints:
            log.info("%d pops are in flight", len(self.open_checkpoints))

    def _render(self) -> str:
        """Return the newest content whose records are on disk.

        If that is not the present state, the document stays marked as changed, so that it is
        written again later.
        """
        self._apply_covered()
        self._apply_snapshot()
        if self._snapshot is None:
            self._group_commit.commit()
            self._snapshot = self._store.written_offset, self._create_snapshot()
            self._apply_snapshot()
        self.document.changed |= self._snapshot is not None
        return self._saved.encode()

    def _create_snapshot(self) -> SavedPops:
        """Return the present state as content of the file, without `covered_end`."""
        end_of = self._store.committed_offset
        timer_start = end_of(TIMER_TOPIC, 0)
        listed: list[Checkpoint] = []
        for entry in self.open_checkpoints:
            if entry.timer_offset != NO_OFFSET and len(listed) >= LISTED_CHECKPOINTS_MAX:
                timer_start = entry.timer_offset
                break
            listed.append(entry.checkpoint._replace(offsets=entry.pending_offsets))
        revive: Mapping[int, int] = {
            queue_id: end_of(self.topic, queue_id) for queue_id in range(self._revive_queue_count)
        }
        if timer_start < self._loaded_end:
            # Another broker may have scanned checkpoints that a start would read again.
            revive = self._loaded.revive_starts
        return SavedPops(timer_start, 0, revive, listed)

    def _apply_snapshot(self) -> None:
        """Let the file get the content of the snapshot if the log is synced up to it."""
        if self._snapshot is not None and self._snapshot[0] <= self._store.synced_offset:
            self._saved = self._snapshot[1]._replace(covered_end=self._saved.covered_end)
            self._snapshot = None

    def _prepare_offsets_save(self) -> None:
        """Note which checkpoints the table of offsets includes that is about to be written."""
        self._commit_offsets()
        self._apply_covered()
        # A record that is not on disk may be lost, and another one take its offset.
        covered = self._store.first_offset_from(TIMER_TOPIC, 0, self._store.synced_offset)
        self._covering = self._offsets.document.edition, covered

    def _apply_covered(self) -> None:
        """Let the file get the new `covered_end` if the edition of the offsets was written."""
        edition, covered = self._covering
        if edition and self._offsets.document.has_written(edition):
            self._saved = self._saved._replace(covered_end=covered)
