"""What the lanes of all groups use of the broker: queues, committed offsets, and their file.

The rules of a group, that is, who gets which messages, are on disk before a member reads by them
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
    next_offsets: dict[QueueKey, int]
    """The committed offsets at `time_ms`. They replace `offsets` after JOIN_OFFSET_AGE_MS."""
    time_ms: int


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
        """Create an empty storage.

        `render` returns the text of the file. `wake(topic, queue_id)` retries the pulls that are
        parked for a queue. `offload` runs blocking work in another thread.
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

        `on_saved` is called when they are on disk, or could not be written. All changes of one
        iteration of the event loop are one write.
        """
        self._last_change += 1
        self._unsaved[group] = self._last_change, on_saved
        self.schedule_write()

    def has_unsaved_rules(self, group: str) -> bool:
        """Return whether the rules of the group are not on disk, so that its pulls must wait."""
        return group in self._unsaved

    def schedule_write(self) -> None:
        """Write the file soon if it has changed, unless it is being written or must wait.

        See `delay_next_write`.
        """
        is_due = self.clock.monotonic_s() >= self._next_write_s
        if self._is_writing or not is_due or not (self._unsaved or self.document.changed):
            return

        def write() -> None:
            self.document.changed = True
            work, written_change = self.document.prepare_write(), self._last_change

            def handle_written(outcome: object) -> None:
                if isinstance(outcome, Exception):
                    log.error("cannot write %s: %s", self.document.path, outcome)
                self._is_writing = False
                for group, (change, on_saved) in list(self._unsaved.items()):
                    if change <= written_change:
                        del self._unsaved[group]
                        on_saved()
                if self._unsaved:
                    self.schedule_write()

            if work is not None:
                self.offload(work, handle_written)

        self._is_writing = True
        self.call_soon(write)

    def schedule_unsaved(self) -> None:
        """Write the rules that had to wait for their time. Called once a second."""
        if self._unsaved:
            self.schedule_write()

    def delay_next_write(self) -> None:
        """Do not write the file again within a second, because it is large."""
        self._next_write_s = self.clock.monotonic_s() + 1

    # --------------------------------------------------------------------------------- queues

    def get_end_offset(self, queue: QueueKey) -> int:
        """Return the offset behind the last visible message of a queue."""
        return self.store.queue_offsets(*queue)[1]

    def iter_queues(self, group: str, key: str) -> Iterator[QueueKey]:
        """Yield the queues of the topics in a subscription key, and those of the retry topic."""
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
        """Find the first message from `offset` on, and before `until`, that a rule matches.

        `until` None means the end of the queue. Return (offset of the message, True), or (offset up
        to which messages were examined, False): one call examines a limited number of messages.
        """
        if not rule:
            return (self.get_end_offset(queue) if until is None else until), False
        count_max = None if until is None else until - offset
        found = self.store.reader.read(*queue, offset, 1, None, get_rule_filter(rule), count_max)
        if found.status is ReadStatus.FOUND:
            return _SIZE_AND_OFFSET.unpack_from(found.data[0])[1], True
        return max(found.next_offset, offset), False

    def count_matches(
        self, queue: QueueKey, offset: int, rule: LaneRule, until: int
    ) -> tuple[int, int]:
        """Count the messages from `offset` on, and before `until`, that a rule matches.

        Return the offset up to which messages were counted, and their number.
        """
        count_max = until - offset
        result = self.store.reader.read(
            *queue, offset, count_max, 1 << 16, get_rule_filter(rule), count_max
        )
        if result.status in {ReadStatus.FOUND, ReadStatus.NO_MATCHED_MESSAGE}:
            return max(result.next_offset, offset + 1), result.count
        return until, 0

    # --------------------------------------------------------------------------- join offsets

    def get_join_offset(self, group: str, queue: QueueKey) -> int:
        """Return the offset at which a new lane of the group begins; -1 if the group has none."""
        known = self._join_offsets.get(group)
        found = known.offsets.get(queue, -1) if known is not None else -1
        return found if found >= 0 else self.offsets.committed(group, *queue)

    def start_join_offsets(self, group: str, key: str, *, from_first: bool) -> None:
        """Note the offsets of a group that has come online, or changes its only subscription.

        `key` is its subscription key. A queue without offset begins at the first message if
        `from_first`, or if the queue has lost no message, otherwise at its end.
        """
        offsets = {}
        for queue in self.iter_queues(group, key):
            low, high = self.store.queue_offsets(*queue)
            fetched = min(self.offsets.fetched(group, *queue), high)
            known = max(self.offsets.committed(group, *queue), fetched)
            unknown = low if from_first or low == 0 else high
            offsets[queue] = min(known, high) if known >= 0 else unknown
        self._join_offsets[group] = JoinOffsets(offsets, offsets, self.clock.now_ms())

    def forget_join_offsets(self, group: str) -> None:
        """Forget the join offsets of a group whose last member has left."""
        self._join_offsets.pop(group, None)

    def advance_join_offsets(self) -> None:
        """Replace join offsets that are JOIN_OFFSET_AGE_MS old. Called once a second."""
        now_ms = self.clock.now_ms()
        for group, known in self._join_offsets.items():
            if now_ms - known.time_ms >= JOIN_OFFSET_AGE_MS:
                known.offsets, known.time_ms = known.next_offsets, now_ms
                known.next_offsets = {
                    queue: max(self.offsets.committed(group, *queue), offset)
                    for queue, offset in known.offsets.items()
                }


def find_end_offset(data: list[memoryview]) -> int:
    """Return the offset behind the last record of a read.

    `data` are pieces of memory in each of which records follow each other.
    """
    piece, position = data[-1], 0
    while True:
        size, offset = _SIZE_AND_OFFSET.unpack_from(piece, position)
        if position + size >= len(piece) or not size:
            return int(offset) + 1
        position += size
