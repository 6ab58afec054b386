"""What the lanes of all groups use of the broker: queues, committed offsets, and their file.

A lane is the members of a group that have the same subscription. The rules of a group, that is,
which lane gets which messages, are on disk before a member reads by them
(`LaneStorage.has_unsaved_rules`): a reader must not be ahead of rules that a crash has undone.

A new lane of a group begins at the *join offset* of each queue: the offset that the group had
committed JOIN_OFFSET_AGE_MS before. So the messages of the last half minute that no lane wanted
are not lost for the new lane.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.documents import Document
from sluicemq.broker.lanes.filters import get_rule_filter
from sluicemq.broker.lanes.lane_queue import QueueKey
from sluicemq.broker.lanes.rules import LaneRule, parse_key
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.net.work.background import Offload
from sluicemq.record.layout import RECORD_BEGIN
from sluicemq.store.read import ReadStatus

log = logging.getLogger(__name__)

JOIN_OFFSET_AGE_MS: Final = 30_000
"""The time after which the committed offsets of a group become its join offsets."""
_SIZE_AND_OFFSET: Final = RECORD_BEGIN.struct_of("size", "queue_offset")


@dataclass(slots=True)
class JoinOffsets:
    """The offsets at which a new lane of a group begins, by queue."""

    offsets: dict[QueueKey, int]
    """The offsets at which a lane begins that is created now."""
    next_offsets: dict[QueueKey, int]
    """The committed offsets at `time_ms`. They replace `offsets` after JOIN_OFFSET_AGE_MS."""
    time_ms: int
    """When `next_offsets` was set, in ms since 1970."""


class LaneStorage(BrokerComponent):
    """The queues, committed offsets and file that the lanes of all groups use."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        wake: Callable[[str, int], None],
        offload: Offload,
        render: Callable[[], str],
    ) -> None:
        """Create a storage for the lanes of all groups. No file is read.

        `render()` returns the text of the file. It is called on the thread of the event loop.
        `wake(topic, queue_id)` is called to retry the pulls that wait for a queue. `offload(job,
        on_done)` runs a blocking job on another thread, and calls `on_done` with its result or
        exception.
        """
        super().__init__(context)
        self.clock = context.steady_clock
        self.call_soon = context.call_soon
        self.wake = wake
        self.offload = offload
        path = f"{self.settings.store.root}/config/sluiceLanes.json"
        self.document = Document(context.files, path, render)
        self._is_writing = False
        self._last_change = 0
        """The number of the last change of rules."""
        self._unsaved: dict[str, tuple[int, Callable[[], None]]] = {}
        """For each group whose rules are not on disk: the number of the last change, and the
        function to call when it is saved."""
        self._next_write_s = 0.0
        """The monotonic time before which the file is not written."""
        self._join_offsets: dict[str, JoinOffsets] = {}
        """By group."""

    @property
    def retention_ms(self) -> int:
        """The time for which the unread messages of an idle lane wait for it, in ms."""
        return self.settings.broker.filter_kept_ms

    # ------------------------------------------------------------------------------- the file

    def mark_changed(self) -> None:
        """Mark the file as changed, so that it is written with the offsets."""
        self.document.changed = True

    def save_rules(self, group: str, on_saved: Callable[[], None]) -> None:
        """Write the file soon, because the rules of a group have changed.

        `on_saved()` is called when the rules are on disk. It is also called if writing failed,
        which is logged: the pulls of the group must not wait for ever. If the rules of the group
        change again before that, only the last `on_saved` is called. All changes of one iteration
        of the event loop are one write.
        """
        self._last_change += 1
        self._unsaved[group] = self._last_change, on_saved
        self.schedule_write()

    def has_unsaved_rules(self, group: str) -> bool:
        """Return whether the rules of the group are not on disk, so that its pulls must wait."""
        return group in self._unsaved

    def schedule_write(self) -> None:
        """Write the file in the next iteration of the event loop, if it has changed.

        Do nothing while the file is being written, or before the time that `delay_next_write` has
        set. In both cases this method is called again later if rules are unsaved.

        After the write, `on_saved` is called for each group whose last change is in the file. It is
        called even if the write failed, which is logged.
        """
        is_due = self.clock.monotonic_s() >= self._next_write_s
        has_changes = bool(self._unsaved) or self.document.changed
        if self._is_writing or not is_due or not has_changes:
            return
        self._is_writing = True
        self.call_soon(self._start_write)

    def _start_write(self) -> None:
        """Start to write the file on another thread. At its end, `_handle_written` is called."""
        # The regular save of documents may have prepared these changes, but not written them
        # yet. They are written here again in any case, so `prepare_write` never returns None.
        self.document.changed = True
        write_file = self.document.prepare_write()
        written_change = self._last_change
        if write_file is not None:
            self.offload(write_file, lambda outcome: self._handle_written(written_change, outcome))

    def _handle_written(self, written_change: int, outcome: object) -> None:
        """Handle the end of a write that contains the changes up to the number `written_change`.

        `on_saved` is called for each group whose last change is among them. `outcome` is an
        exception if the write failed, which is logged. If rules of other groups are unsaved, the
        next write is scheduled.
        """
        if isinstance(outcome, Exception):
            log.error("cannot write %s: %s", self.document.path, outcome)
        self._is_writing = False
        for group, (change, on_saved) in list(self._unsaved.items()):
            if change <= written_change:
                del self._unsaved[group]
                on_saved()
        if self._unsaved:
            self.schedule_write()

    def schedule_unsaved(self) -> None:
        """Call `schedule_write` if rules are unsaved. Called once a second.

        So rules are written whose write was put off by `delay_next_write`.
        """
        if self._unsaved:
            self.schedule_write()

    def delay_next_write(self) -> None:
        """Let `schedule_write` do nothing for one second, because the file is large."""
        self._next_write_s = self.clock.monotonic_s() + 1

    # --------------------------------------------------------------------------------- queues

    def get_end_offset(self, queue: QueueKey) -> int:
        """Return the offset behind the last visible message of a queue."""
        return self.store.queue_offsets(*queue)[1]

    def iter_queues(self, group: str, key: str) -> Iterator[QueueKey]:
        """Yield (topic, queue id) for each readable queue of the topics in the subscription `key`.

        The queues of the group's retry topic come last. Topics that do not exist are left out.
        """
        for name in (*parse_key(key), RETRY_PREFIX + group):
            topic = self.topics.get(name)
            if topic is not None:
                for queue_id in range(topic.config.read_queues):
                    yield name, queue_id

    def wake_pulls(self, queue: QueueKey) -> None:
        """Retry the pulls that are parked for a queue."""
        self.wake(*queue)

    def find_match(
        self, queue: QueueKey, offset: int, rule: LaneRule, until: int | None
    ) -> tuple[int, bool]:
        """Find the first message that a rule matches, from `offset` up to but excluding `until`.

        `until` None means the end of the queue. Return (offset of the message, True) if one was
        found. Otherwise return (scanned offset, False): no message before the scanned offset
        matches. One call examines a limited number of messages, so the scanned offset may be before
        `until`; it is `offset` if nothing could be examined.
        """
        matches_nothing = not rule
        if matches_nothing:
            scanned_offset = self.get_end_offset(queue) if until is None else until
            return scanned_offset, False

        examined_max = None if until is None else until - offset
        read_result = self.store.reader.read(
            *queue, offset, 1, None, get_rule_filter(rule), examined_max
        )
        if read_result.status is ReadStatus.FOUND:
            _, matching_offset = _SIZE_AND_OFFSET.unpack_from(read_result.data[0])
            return matching_offset, True
        return max(read_result.next_offset, offset), False

    def count_matches(
        self, queue: QueueKey, offset: int, rule: LaneRule, until: int
    ) -> tuple[int, int]:
        """Count the messages that a rule matches, from `offset` up to but excluding `until`.

        Return (scanned offset, number of matches before it). One call reads a limited amount, so
        the scanned offset may be before `until`; it is always greater than `offset`. If the
        messages at `offset` were deleted, or cannot be read, the whole range counts as scanned
        without a match.
        """
        count_max = until - offset
        bytes_max = 1 << 16
        read_result = self.store.reader.read(
            *queue, offset, count_max, bytes_max, get_rule_filter(rule), scan_max=count_max
        )
        if read_result.status in {ReadStatus.FOUND, ReadStatus.NO_MATCHED_MESSAGE}:
            return max(read_result.next_offset, offset + 1), read_result.count
        return until, 0

    # --------------------------------------------------------------------------- join offsets

    def get_join_offset(self, group: str, queue: QueueKey) -> int:
        """Return the offset at which a new lane of the group begins in a queue.

        It is the join offset of the group, an offset that the group had committed some time ago. If
        there is none, it is the present committed offset of the group. Return -1 if the group has
        committed nothing in the queue.
        """
        join_offsets = self._join_offsets.get(group)
        if join_offsets is not None:
            offset = join_offsets.offsets.get(queue, -1)
            if offset >= 0:
                return offset
        return self.offsets.committed(group, *queue)

    def start_join_offsets(self, group: str, key: str, *, from_first: bool) -> None:
        """Set the join offsets of a group, at which its next new lane will begin.

        Call this when a group comes online or changes its only subscription, whose key is `key`. In
        each queue, the join offset is the offset that the group has committed or fetched, the
        greater one. If the group has done neither, it is the offset of the first message, if
        `from_first` is true or if no message of the queue was deleted. Otherwise it is the end of
        the queue.
        """
        offsets = {}
        for queue in self.iter_queues(group, key):
            first_offset, end_offset = self.store.queue_offsets(*queue)
            fetched_offset = min(self.offsets.fetched(group, *queue), end_offset)
            # -1 if the group has neither committed nor fetched.
            group_offset = max(self.offsets.committed(group, *queue), fetched_offset)
            if group_offset >= 0:
                offsets[queue] = min(group_offset, end_offset)
            elif from_first or first_offset == 0:
                offsets[queue] = first_offset
            else:
                offsets[queue] = end_offset
        self._join_offsets[group] = JoinOffsets(offsets, offsets, self.clock.now_ms())

    def forget_join_offsets(self, group: str) -> None:
        """Forget the join offsets of a group whose last member has left."""
        self._join_offsets.pop(group, None)

    def advance_join_offsets(self) -> None:
        """Replace the join offsets that were set JOIN_OFFSET_AGE_MS ago. Called once a second.

        The offsets that the group had committed at that time become its join offsets, and the
        present committed offsets become the next ones. So a join offset is one to two times
        JOIN_OFFSET_AGE_MS old.
        """
        now_ms = self.clock.now_ms()
        for group, join_offsets in self._join_offsets.items():
            if now_ms - join_offsets.time_ms >= JOIN_OFFSET_AGE_MS:
                join_offsets.offsets = join_offsets.next_offsets
                join_offsets.time_ms = now_ms
                join_offsets.next_offsets = {
                    queue: max(self.offsets.committed(group, *queue), offset)
                    for queue, offset in join_offsets.offsets.items()
                }


def find_end_offset(data: list[memoryview]) -> int:
    """Return the queue offset of the last record of a read, plus 1.

    `data` is the content of a `ReadResult`: pieces of memory, each with one or more whole records.
    Called for each pull of a lane that finds messages.
    """
    last_piece = data[-1]
    position = 0
    while True:
        record_bytes, offset = _SIZE_AND_OFFSET.unpack_from(last_piece, position)
        if position + record_bytes >= len(last_piece) or not record_bytes:
            return int(offset) + 1
        position += record_bytes
