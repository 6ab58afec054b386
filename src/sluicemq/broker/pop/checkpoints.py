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
deadline, an acknowledgement at the deadline. When the timer delivers such a record,
`_admit_to_revive_topic` decides whether it is appended to the revive topic. Records of a closed
checkpoint are dropped, because nothing would read them. Once a checkpoint is in the revive topic,
its acknowledgements go there at once, and the last one names all its messages. So a revive queue
alone tells RocketMQ which checkpoints are closed, and the committed offset of its scan
(REVIVE_GROUP) can follow.

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
        """Create an empty table. `load` recovers the messages in flight.

        `intake` appends the records of pops. The object registers itself in three places: as the
        first source of `delayed`, to deliver messages again; as the gate of the revive topic, which
        decides which due records are appended there; and as a function to call before the table of
        offsets is saved.
        """
        settings = context.settings
        offsets = context.offsets
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
        """By revive queue: the offset of the record before that of the first open checkpoint."""
        self._confirmed_log_ends = (0, 0)
        """The written and the synced end of the log at the last `confirm_deliveries`."""
        self._saved = self._loaded = SavedPops(0, 0, {}, [])
        """The newest content that may be written to the file, and the content that was loaded."""
        self._loaded_end = 0
        """The end offset of the timer queue when the file was loaded."""
        self._snapshot: tuple[int, SavedPops] | None = None
        """A position of the log, and content that may be written to the file once the log is synced
        up to this position. None if no content waits."""
        self._pending_covered_end = (0, 0)
        """An edition of the table of offsets, and the `covered_end` that is valid once this edition
        is on disk. Edition 0 means that there is none."""
        path = f"{settings.store.root}/config/sluicePop.json"
        self.document = Document(context.files, path, self._render)
        self.stored_record_counts: Counter[tuple[str, str, str]] = Counter()
        """The number of records stored since the start, by topic, group, and "CK" or "ACK"."""
        self.revived_counts: Counter[tuple[str, str]] = Counter()
        """The number of messages put into the retry topic since the start, by topic and group."""
        offsets.on_save = self._prepare_offsets_save
        # First: the timer need not deliver the records of checkpoints that are closed here.
        delayed.sources.insert(0, self)
        delayed.redelivery.gates[self.topic] = self._admit_to_revive_topic

    # ------------------------------------------------------------------------------- requests

    def resolve_next_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the offset at which a pop of the group begins in a queue.

        Return NO_OFFSET if the group has neither popped nor committed there. If an operator has
        reset the offset, the pending reset and the uncommitted offsets of earlier pops are removed,
        because this pop follows the reset. Called for each queue of a pop.
        """
        queue = group, topic, queue_id
        if queue in self._offsets.resets.table:
            self._offsets.resets.discard(*queue)
            self._pending_commits.pop(queue, None)
        return self.get_next_offset(*queue)

    def get_next_offset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the offset at which the group's next pop from a queue begins, to show it.

        This is the committed offset, or that of a later pop whose checkpoint is not on disk yet.
        Return NO_OFFSET if the group has neither popped nor committed there. Pending resets are
        ignored and not changed.
        """
        pending = self._pending_commits.get((group, topic, queue_id))
        committed = self._offsets.committed(group, topic, queue_id)
        return max(pending[-1].next_offset, committed) if pending else committed

    def get_uncommitted_offsets(self) -> dict[GroupQueue, int]:
        """Return the offset up to which each group has popped a queue, if it is not committed yet.

        The keys are (group, topic, queue id). The returned dict is a copy, and another thread may
        call this method.
        """
        copies = [
            (queue, tuple(pending)) for queue, pending in self._pending_commits.copy().items()
        ]
        return {queue: pending[-1].next_offset for queue, pending in copies if pending}

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

        A checkpoint is a record in the log that says which messages a pop has in flight. The
        messages are invisible until `pop_ms + invisible_ms` (ms since 1970). `popped_by` is the
        client id or address of the consumer. The group's next pop begins at `next_offset`, which is
        committed when the checkpoint is on disk. The pop becomes valid with the next group commit;
        if that fails, everything is undone.

        Return the id of the revive queue, which is the same for all queues of one pop. Raises
        StoreError or RequestError if the checkpoint cannot be appended; then nothing is changed.
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
        remove_last_pending = pending.pop
        self._group_commit.commit_internal(undo=remove_last_pending)
        return revive_queue

    def skip_to(self, group: str, topic: str, queue_id: int, next_offset: int) -> None:
        """Let the group's next pop begin at `next_offset`, without taking the messages before it.

        A pop calls this for messages that its filter rejects, and to set the group's first offset.
        The offset is committed at once, or with that of the last pop if its checkpoint is not on
        disk yet. Called for each queue of a pop.
        """
        queue = group, topic, queue_id
        pending = self._pending_commits.get(queue)
        if pending:
            # Committed now, the offset would skip the messages of the last pop if a power loss took
            # its checkpoint. If the commit of that checkpoint fails, both offsets are removed.
            pending.append(pending[-1]._replace(next_offset=next_offset))
            remove_last_pending = pending.pop
            self._group_commit.commit_internal(undo=remove_last_pending)
        else:
            self._offsets.commit(*queue, next_offset)

    def acknowledge(
        self, group: str, topic: str, handle: ReceiptHandle, offsets: Collection[int]
    ) -> None:
        """Acknowledge the messages at `offsets` of the pop that `handle` identifies.

        `handle.offset` is not used. Messages that are not in flight after this pop are ignored. The
        acknowledgement becomes valid with the next group commit; if that fails, it is undone, and
        the messages are in flight again. Raises StoreError or RequestError if it cannot be
        appended.
        """
        open_checkpoint = self._find_open_checkpoint(group, topic, handle)
        if open_checkpoint is None:
            return
        acknowledged_offsets = [
            offset for offset in open_checkpoint.pending_offsets if offset in offsets
        ]
        if acknowledged_offsets:
            self._append_acknowledgement(open_checkpoint, acknowledged_offsets)

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

        A new checkpoint of this message is appended, and the message is acknowledged in the old
        one. If `is_suspended`, the next delivery does not count as another attempt. Return the new
        handle of the message; the old one is invalid. If the next group commit fails, both changes
        are undone.

        Raises RequestError if the message is not in flight, or StoreError if the checkpoint cannot
        be appended.
        """
        offset = handle.offset
        open_checkpoint = self._find_open_checkpoint(group, topic, handle)
        if open_checkpoint is None or offset not in open_checkpoint.pending_offsets:
            raise RequestError(
                ResponseCode.NO_MESSAGE,
                f"Message {offset} of {topic}:{handle.queue_id} is no longer in flight with the "
                f"receipt handle {handle.encode()!r}: it was acknowledged, or it became visible "
                "again. Use the newest handle of the message.",
            )
        old_checkpoint = open_checkpoint.checkpoint
        # The times must differ, or both checkpoints would have the same key.
        pop_ms = max(self._clock.now_ms(), old_checkpoint.pop_ms + 1)
        new_checkpoint = old_checkpoint._replace(
            start_offset=offset,
            pop_ms=pop_ms,
            invisible_ms=invisible_ms,
            offsets=(offset,),
            is_suspended=is_suspended,
        )
        # The new checkpoint first: if a crash loses the second record, the message is delivered
        # again, but never lost.
        self._append_checkpoint(new_checkpoint, 0, open_checkpoint.popped_by)
        self._append_acknowledgement(open_checkpoint, [offset])
        return handle._replace(
            start_offset=offset,
            pop_ms=pop_ms,
            invisible_ms=invisible_ms,
            revive_queue=old_checkpoint.revive_queue,
        )

    def count_in_flight(self, group: str, topic: str, queue_id: int | None = None) -> int:
        """Return the number of messages of a queue that are in flight after pops of the group.

        `queue_id` None means all queues of the topic.
        """
        counts = self.open_checkpoints.in_flight_counts
        if queue_id is not None:
            return counts.get((group, topic, queue_id), 0)
        return sum(count for queue, count in counts.items() if queue[:2] == (group, topic))

    def forget_deleted(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Forget the messages in flight of a deleted topic or group.

        They are not delivered again. Uncommitted offsets of pops are forgotten, too.
        """
        for opened in [*self.open_checkpoints]:
            if opened.checkpoint.topic == topic or opened.checkpoint.group == group:
                self.open_checkpoints.remove_messages(opened, opened.pending_offsets)
        for queue in [*self._pending_commits]:
            queue_group, queue_topic, _ = queue
            if queue_group == group or queue_topic == topic:
                del self._pending_commits[queue]
        self.document.changed = True

    def _find_open_checkpoint(
        self, group: str, topic: str, handle: ReceiptHandle
    ) -> OpenCheckpoint | None:
        """Return the open checkpoint of the pop that `handle` identifies.

        Return None if the checkpoint is closed or never existed.
        """
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
        """Append the record of a pop, its checkpoint, and count its messages as in flight.

        `next_offset` is stored in the record: the offset from which the group continues, or 0 if
        that does not change. If the next group commit fails, the messages are no longer in flight.
        If the checkpoint has the earliest deadline of all, the next delivery is scheduled for it.
        Return where the record was stored.
        """
        existing = self.open_checkpoints.by_key.get(checkpoint.key)
        existing_offsets: Collection[int] = ()
        if existing is not None:
            existing_offsets = existing.pending_offsets
        # A time that has come would not delay the record. But each record must be stored in the
        # timer queue, whose order is that of all checkpoints.
        due_ms = max(checkpoint.deadline_ms - REVIVE_LEAD_MS, self._clock.now_ms() + 1)
        stored = self._append_record(
            checkpoint,
            CHECKPOINT,
            checkpoint.revive_queue,
            due_ms,
            {NEXT_OFFSET_PROPERTY: str(next_offset)},
        )
        added = self.open_checkpoints.add(checkpoint, stored.queue_offset, popped_by)
        added_offsets = [offset for offset in checkpoint.offsets if offset not in existing_offsets]
        self._group_commit.commit_internal(
            undo=lambda: self.open_checkpoints.remove_messages(added, added_offsets)
        )
        if self.open_checkpoints.next_deadline_ms == checkpoint.deadline_ms:
            self._delayed.schedule_run()
        return stored

    def _append_acknowledgement(
        self, open_checkpoint: OpenCheckpoint, offsets: Sequence[int]
    ) -> None:
        """Append an acknowledgement of the messages at `offsets`, which must be in flight.

        A checkpoint is the record of a pop and of its messages. The messages are removed from the
        checkpoint, which is closed by the last of them. If the next group commit fails, they are
        restored. If the checkpoint's record is in its revive queue, the acknowledgement is due now,
        and the last one contains all messages of the checkpoint, so that the revive queue alone
        says that the checkpoint is closed.
        """
        checkpoint = open_checkpoint.checkpoint
        due_ms = checkpoint.deadline_ms
        listed_offsets = tuple(offsets)
        is_in_revive_queue = open_checkpoint.revive_offset != NO_OFFSET
        if is_in_revive_queue:
            due_ms = min(due_ms, self._clock.now_ms())
            closes_checkpoint = len(offsets) == len(open_checkpoint.pending_offsets)
            if closes_checkpoint:
                listed_offsets = checkpoint.offsets
        record = Acknowledgement(checkpoint.key, listed_offsets)
        self._append_record(record, record.tag, checkpoint.revive_queue, due_ms, {})
        self.open_checkpoints.remove_messages(open_checkpoint, offsets)
        self._group_commit.commit_internal(
            undo=lambda: self.open_checkpoints.restore_messages(open_checkpoint, offsets)
        )

    def _append_record(
        self,
        record: Checkpoint | Acknowledgement,
        tag: str,
        revive_queue: int,
        due_ms: int,
        added_properties: dict[str, str],
    ) -> AppendResult:
        """Append a record to the log, as a timed message for the revive topic.

        At `due_ms` of the steady clock, the timer delivers it to the queue `revive_queue`. `tag` is
        its tag. `added_properties` are stored in addition to those that RocketMQ reads. Return
        where the record is in the timer queue.

        Raises StoreError or RequestError if it cannot be appended.
        """
        self.document.changed = True
        topic, group, *_ = record.key
        counted_as = "CK" if tag == CHECKPOINT else "ACK"
        self.stored_record_counts[topic, group, counted_as] += 1
        host = self._settings.store_host
        wall_due_ms = due_ms - self._clock.lead_ms  # stored times are those of the wall clock
        properties = {
            TAGS: tag,
            _DELIVER_TIME: str(wall_due_ms),
            UNIQ_KEY: record.unique_id,
            **added_properties,
        }
        now_ms = self._clock.now_ms()
        return self._intake.rewrite_and_append(
            MessageToStore(
                self.topic, revive_queue, record.encode(), properties, now_ms, host, host
            )
        )

    def _admit_to_revive_topic(self, record: Record) -> Callable[[int], None] | None:
        """Decide whether the timer appends a due record to the revive topic.

        Return None to drop the record: it belongs to a pop of this broker whose messages are all
        acknowledged. Otherwise return a function that the timer calls with the offset in the revive
        queue at which it has appended the record. If the record is the checkpoint of a pop, the
        function stores that offset. A record that cannot be decoded is logged and appended.
        """
        broker_name = self._settings.broker.broker_name
        try:
            content = decode_record(record, 0, broker_name)
        except ProtocolError as error:
            log.error("cannot decode a record for %s: %s", self.topic, error)
            return _ignore_offset
        open_checkpoint = self.open_checkpoints.by_key.get(content.key)
        if open_checkpoint is None:
            *_, popping_broker = content.key
            is_closed = popping_broker == broker_name
            return None if is_closed else _ignore_offset
        if isinstance(content, Acknowledgement):
            return _ignore_offset
        return partial(self.open_checkpoints.note_revive_offset, open_checkpoint)

    # ------------------------------------------------------------------------------- deadlines

    @property
    def next_due_ms(self) -> int | None:
        """The earliest deadline of a message in flight in ms since 1970; None without one."""
        return self.open_checkpoints.next_deadline_ms

    def deliver(self, work: TimeSlice) -> None:
        """Append messages that were not acknowledged in time to the retry topic.

        From there they are delivered again. In the same commit, they are acknowledged in the
        checkpoint of their pop. Continue until the slice `work` is over; each message counts as one
        step, and a pop is not left half done.

        Raises StoreError if a message cannot be appended. The messages of the pop before it are
        then acknowledged, and the others are tried again later.
        """
        while not work.is_over:
            due_checkpoint = self.open_checkpoints.take_due(work.now_ms)
            if due_checkpoint is None:
                break
            revived_offsets: list[int] = []
            try:
                for offset in due_checkpoint.pending_offsets:
                    self._revive(due_checkpoint.checkpoint, offset)
                    revived_offsets.append(offset)
                    work.count_done()
            finally:
                # Also after an error, so that no message is put into the retry topic twice.
                self.open_checkpoints.schedule(due_checkpoint)
                if revived_offsets:
                    self._append_acknowledgement(due_checkpoint, revived_offsets)

    def read_message(self, topic: str, queue_id: int, offset: int) -> Record | None:
        """Return the message at an offset of a queue; None if it does not exist any more."""
        # A unit is the 20-byte entry of a queue that locates one record.
        unit = self._store.reader.valid_units(topic, queue_id, offset, 1)
        if not len(unit):
            return None
        position, size, _ = UNIT.unpack_from(unit)
        if size == BLANK_SIZE:
            return None
        return read_record(self._store.reader.view_at(position))

    def _revive(self, checkpoint: Checkpoint, offset: int) -> None:
        """Append a copy of the message at `offset` to the retry topic, to be delivered again.

        The retry topic is created if necessary, and the group gets offset 0 there if it has none. A
        message that is in a retry topic already is appended to the same topic. The number of
        attempts of the copy is one higher, unless the checkpoint `is_suspended`. The time of the
        first pop is added as a property if the message does not have it. The message is counted in
        `revived_counts`. If the message was deleted, only a warning is logged.
        """
        topic = checkpoint.topic
        group = checkpoint.group
        queue_id = checkpoint.queue_id
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

        # Append the copy.
        added_properties = b""
        if not record.reconsume_times or not record.get_text(FIRST_POP_TIME):
            added_properties = f"{FIRST_POP_TIME}\x01{checkpoint.pop_ms}\x02".encode()
        attempt_count = record.reconsume_times
        if not checkpoint.is_suspended:
            attempt_count += 1
        self._delayed.redelivery.append_copy(
            record,
            self._find_or_create_retry_topic(group, topic),
            0,
            added_properties,
            reconsume_times=min(attempt_count, RECONSUME_TIMES_MAX),
        )
        self.revived_counts[topic, group] += 1

    def _find_or_create_retry_topic(self, group: str, topic: str) -> str:
        """Return the name of the group's retry topic for messages of `topic`. Create it if missing.

        If `topic` is a retry topic itself, it is returned. If the group has no committed offset in
        the retry topic, it gets offset 0.
        """
        is_retry_topic = pop_kind(topic) != POP_NORMAL
        if is_retry_topic:
            return topic
        is_v2 = self._settings.broker.pop_retry_v2
        retry_topic = pop_retry_topic(group, topic, is_v2=is_v2)
        self._topics.ensure(retry_topic, 1)
        if self._offsets.committed(group, retry_topic, 0) < 0:
            self._offsets.put(group, retry_topic, 0, 0)
        return retry_topic

    def confirm_deliveries(self, *, is_stored: bool) -> None:
        """Commit the offsets of pops whose records are on disk now.

        Called after each commit of delayed messages. Nothing is done if the log has not been
        written or synced any further since the last call. `is_stored`, whether the messages of
        `deliver` were stored, is not used: if they were not, the undo functions of the group commit
        have made them in flight again.
        """
        log_ends = self._store.written_offset, self._store.synced_offset
        if log_ends != self._confirmed_log_ends:
            self._confirmed_log_ends = log_ends
            self._commit_offsets()
            self._commit_revive_offsets()

    # -------------------------------------------------------------------------------- offsets

    @property
    def has_uncommitted_offsets(self) -> bool:
        """Whether the offset of some pop is not committed yet, as its checkpoint is not on disk."""
        return bool(self._pending_commits)

    def _commit_offsets(self) -> None:
        """Commit for each group the `next_offset` of its last pop whose checkpoint is on disk.

        The committed offset of a group does not go back.
        """
        synced_position = self._store.synced_offset
        for queue, pending in list(self._pending_commits.items()):
            next_offset = NO_OFFSET
            while pending and pending[0].position < synced_position:
                next_offset = pending.popleft().next_offset
            if next_offset > self._offsets.committed(*queue):
                self._offsets.commit(*queue, next_offset)
            if not pending:
                del self._pending_commits[queue]

    def _commit_revive_offsets(self) -> None:
        """Commit, for the group REVIVE_GROUP, up to where each revive queue needs no more reading.

        A RocketMQ broker that takes over the store reads the revive queues from these offsets, to
        find pops with unacknowledged messages. In each queue, the offset of the record before the
        first open checkpoint is committed. First, the log must be synced up to where it ended when
        that record was reached. Otherwise a power loss could lose acknowledgements and keep the
        offset, and RocketMQ would never deliver the messages again. The offset does not go back.
        """
        for queue_id, progress in self._revive_progress.items():
            _, end = self._store.queue_offsets(self.topic, queue_id)
            scanned_offset = self.open_checkpoints.first_open_revive_offset(queue_id, end) - 1
            if scanned_offset > progress.value:
                progress.advance(scanned_offset, self._store.written_offset)
            durable_offset = progress.durable_value(self._store.synced_offset)
            if durable_offset > self._offsets.committed(REVIVE_GROUP, self.topic, queue_id):
                self._offsets.put(REVIVE_GROUP, self.topic, queue_id, durable_offset)

    # ------------------------------------------------------------------------------- the file

    def load(self) -> None:
        """Recover the messages in flight from the file and the log. Blocking.

        These are the messages that were popped and not acknowledged. If the file does not exist, or
        is not what this broker wrote last (which is logged), they are recovered from the log alone.
        Committed offsets of groups may move forward. Topics, offsets and timers must have been
        loaded before.

        Raises StoreDamagedError if the file cannot be parsed.
        """
        # Fill the table of open checkpoints.
        timer_end = self._store.committed_offset(TIMER_TOPIC, 0)
        saved = self._load_file(timer_end)
        recovery = PopRecovery(
            self.open_checkpoints,
            self._store,
            self._offsets,
            self.topic,
            self._settings.broker.broker_name,
        )
        if saved is None:
            recovery.recover_from_log(self._delayed.timers.delivered_before_ms)
            self._saved = self._saved._replace(covered_end=timer_end)
            self.document.changed = True
        else:
            recovery.recover_from_file(saved)
            self._saved = self._loaded = saved
            self._loaded_end = timer_end

        for queue_id in range(self._revive_queue_count):
            scanned_offset = self._offsets.committed(REVIVE_GROUP, self.topic, queue_id)
            self._revive_progress[queue_id] = Progress(scanned_offset)
        if self.open_checkpoints:
            log.info("%d pops are in flight", len(self.open_checkpoints))

    def _load_file(self, timer_end: int) -> SavedPops | None:
        """Return the content of the file, or None if it does not exist or cannot be used.

        It cannot be used if this broker did not write it last, or if it has an offset greater than
        `timer_end`, the end of the timer queue. Then a warning is logged.
        """
        saved = self.document.load(SavedPops.parse)
        is_beyond_queue = (
            saved is not None and max(saved.timer_start, saved.covered_end) > timer_end
        )
        if is_beyond_queue or self.document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last: it was removed, is an older copy, or"
                " belongs to another store. The messages in flight are recovered from the log, and"
                " some may be delivered again. No action is needed.",
                self.document.path,
            )
            return None
        return saved

    def _render(self) -> str:
        """Return the text of the file: the newest content whose records are on disk.

        The content has offsets of queues. A power loss could remove records that are not on disk,
        and other records would get their offsets. So a snapshot of the present state is made, and
        is returned only when the log is synced up to its end at that time. Until then, the previous
        content is returned, and the document stays marked as changed. Messages that were appended
        so far are committed.
        """
        self._update_covered_end()
        self._adopt_synced_snapshot()  # that of an earlier call
        if self._snapshot is None:
            self._group_commit.commit()
            self._snapshot = self._store.written_offset, self._create_snapshot()
            self._adopt_synced_snapshot()  # at once if the commit has synced the log
        is_snapshot_waiting = self._snapshot is not None
        self.document.changed |= is_snapshot_waiting
        return self._saved.encode()

    def _create_snapshot(self) -> SavedPops:
        """Return the present state as content of the file, with a `covered_end` of 0.

        Open checkpoints are the records of pops with messages in flight. They are stored in the
        timer queue, and move to a revive queue shortly before their deadline. At most
        LISTED_CHECKPOINTS_MAX open checkpoints of the timer queue are listed. A start reads the
        timer queue from the first one that is not listed.
        """
        # `committed_offset` of the store is the end offset of a queue.
        timer_start = self._store.committed_offset(TIMER_TOPIC, 0)
        listed_checkpoints: list[Checkpoint] = []
        for open_checkpoint in self.open_checkpoints:
            is_list_full = len(listed_checkpoints) >= LISTED_CHECKPOINTS_MAX
            if is_list_full and open_checkpoint.timer_offset != NO_OFFSET:
                timer_start = open_checkpoint.timer_offset
                break
            listed_checkpoints.append(
                open_checkpoint.checkpoint._replace(offsets=open_checkpoint.pending_offsets)
            )

        revive_starts = self._find_revive_ends()
        if timer_start < self._loaded_end:
            # Another broker may have scanned checkpoints that a start would read again.
            revive_starts = self._loaded.revive_starts
        return SavedPops(
            timer_start=timer_start,
            covered_end=0,
            revive_starts=revive_starts,
            open_checkpoints=listed_checkpoints,
        )

    def _find_revive_ends(self) -> Mapping[int, int]:
        """Return the end offset of each revive queue, by queue id."""
        return {
            queue_id: self._store.committed_offset(self.topic, queue_id)
            for queue_id in range(self._revive_queue_count)
        }

    def _adopt_synced_snapshot(self) -> None:
        """Make the snapshot the content to be written, if there is one and the log is synced to it.

        `covered_end` does not change. Afterwards there is no snapshot.
        """
        if self._snapshot is not None and self._snapshot[0] <= self._store.synced_offset:
            self._saved = self._snapshot[1]._replace(covered_end=self._saved.covered_end)
            self._snapshot = None

    def _prepare_offsets_save(self) -> None:
        """Record which pops are included in the table of offsets that is about to be saved.

        Called before the table is copied for the file. The offsets of pops whose checkpoints are on
        disk are committed first.
        """
        self._commit_offsets()
        self._update_covered_end()
        # A record that is not on disk may be lost, and another one take its offset.
        covered_end = self._store.first_offset_from(TIMER_TOPIC, 0, self._store.synced_offset)
        self._pending_covered_end = self._offsets.document.edition, covered_end

    def _update_covered_end(self) -> None:
        """Set `covered_end` in the content to be written, if the table of offsets is on disk.

        The value is the one that `_prepare_offsets_save` recorded. If that edition of the table has
        not been written, nothing changes.
        """
        edition, covered_end = self._pending_covered_end
        if edition and self._offsets.document.has_written(edition):
            self._saved = self._saved._replace(covered_end=covered_end)


def _ignore_offset(offset: int) -> None:
    """Do nothing: the callback of a record whose offset in the revive queue is not needed."""
