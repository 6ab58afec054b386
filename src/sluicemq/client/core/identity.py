"""Check whether a queue is still the one that was read before.

RocketMQ gives a topic no identity. A topic that is deleted and created again begins at offset 0,
and an old offset may be valid in it: the messages before that offset would never be read. So a
reader remembers *anchors*: messages that it has read, by offset, store time and position in the
commit log. If the queue has another message at the offset of an anchor, its history has changed.
The check works with any broker: it pulls one message (`probe_queue`).

    verdict     what the check found                     where the reader continues
    SAME        the newest anchor is in its place,       at its offset
                or retention has removed it
    RECREATED   no anchor is in its place                at the beginning of the queue
    CUT         only older anchors are in their places:  after the newest of those
                an unclean failover lost the others
    RESET       the broker has a reset for the group     at the offset of the reset
    UNKNOWN     a slave responded, which may be behind   at its offset, until a master responds

Retention only removes messages from the head of a queue, so an anchor below the first offset of the
queue proves nothing. An anchor at or behind the end of the queue is missing, like one that was
replaced.

A reader checks before it hands out a response, at most once in `CHECK_PERIOD_S` seconds. It checks
at once after an error, or when the bounds of the queue have moved backwards. Between two checks, a
topic can be created again and grow beyond the old offset. So anchors that were read since the last
check may belong to the new topic, and prove nothing until an older one is found in its place. The
next check then notices the new topic; messages above the old offset are delivered twice, and none
is lost.

Without any anchor (the first request of a program), an offset behind the end of the queue cannot be
distinguished from an offset in a deleted topic. `restart_offset` chooses the beginning of the
queue: repeated messages can be recognised, lost ones cannot.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.requests import PullResponse, PullStatus, parse_pull_response
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import parse_head

CHECK_PERIOD_S: Final = 1.0
"""The shortest time in seconds between two checks of a queue.

One second is added for each MiB of the message that was read last: a check may transfer it.
"""
ANCHORS_MAX: Final = 8
"""The number of proven, and of fresh, anchors that a reader keeps for a queue."""
OFFSET_RESET: Final = "OFFSET_RESET"
"""The remark of a PULL_OFFSET_MOVED (21) response that carries out an operator's offset reset."""
RESET_ATTEMPTS: Final = 4
_MIB: Final = 1 << 20


class Anchor(NamedTuple):
    """A message that a reader has read, by which it recognises the queue.

    `stored_ms` is the store time in milliseconds since 1970, None if retention had removed the
    message before it was probed. `position` is its position in the commit log, None if unknown.
    """

    offset: int
    stored_ms: int | None
    position: int | None = None

    def is_same_message(self, present: "Anchor") -> bool:
        """Return whether `present`, the message that is now at the same offset, is this message.

        The store times must be equal, and so must the positions unless one of them is unknown.
        """
        if self.stored_ms != present.stored_ms:
            return False
        return None in (self.position, present.position) or self.position == present.position


def make_anchor(record: bytes | memoryview | StoredMessage) -> Anchor:
    """Return an anchor: the offset, store time and position by which a message is recognised later.

    `record` is the message as stored bytes or decoded. Raises ProtocolError for damaged bytes.
    """
    if isinstance(record, StoredMessage):
        return Anchor(record.queue_offset, record.store_time_ms, record.physical_offset)
    head = parse_head(record)
    return Anchor(head.queue_offset, head.store_time_ms, head.physical_offset)


class QueueProbe(NamedTuple):
    """The result of `probe_queue`.

    The queue has the offsets from `offset_min` up to, not including, `offset_max`. `found` is the
    message at the requested offset, or None if there is no message at that offset. `is_refused`
    says that the broker rejected the offset as out of range. `reset_to` is the offset of a group
    reset if the response contained one, else None.
    """

    found: Anchor | None
    offset_min: int
    offset_max: int
    is_refused: bool = False
    reset_to: int | None = None


def probe_queue(
    directory: Directory, group: str, queue: MessageQueue, offset: int
) -> Conversation[QueueProbe]:
    """Pull the one message at `offset`, and return it with the bounds of the queue.

    The message is None if the queue has none at this offset, for example because retention has
    deleted it. If the broker refuses the offset, `is_refused` is True; if it answers with an offset
    reset of the group, `reset_to` is the new offset.

    Raises RouteNotFoundError, RequestError (TOPIC_NOT_EXIST (17) for a deleted topic),
    ConnectionLostError, RequestTimeoutError, and ProtocolError for a record that cannot be parsed.
    """
    command = requests.make_probe_request(group, queue, offset)
    address = yield from directory.get_read_address(queue)
    answer = yield Call(address, command)
    response = parse_pull_response(answer, address)
    bounds = response.offset_min, response.offset_max
    if response.status is PullStatus.OFFSET_ILLEGAL:
        is_group_reset = response.remark == OFFSET_RESET
        reset_to = response.next_offset if is_group_reset else None
        return QueueProbe(None, *bounds, is_refused=True, reset_to=reset_to)
    if response.status is not PullStatus.FOUND:
        return QueueProbe(None, *bounds)
    first_message = make_anchor(response.data)
    if first_message.offset != offset:  # a hole: the broker returned a later message
        return QueueProbe(None, *bounds)
    return QueueProbe(first_message, *bounds)


class QueueVerdict(Enum):
    """The verdict of a check; the table in the module docstring explains each."""

    SAME = "same"
    RECREATED = "recreated"
    CUT = "cut"
    RESET = "reset"
    UNKNOWN = "unknown"


class CheckResult(NamedTuple):
    """The result of a check: the verdict and the offset at which the reader continues.

    `offset` is -1 for SAME and UNKNOWN, where the reader stays at its offset.
    """

    verdict: QueueVerdict
    offset: int = -1


def compare_with_anchors(
    directory: Directory,
    group: str,
    queue: MessageQueue,
    anchors: Iterable[Anchor],
) -> Conversation[CheckResult]:
    """Find out whether a queue still has messages that were read from it before.

    An anchor is such a message: its offset, store time and position. Each anchor is compared with
    the message that is now at its offset, from the newest to the oldest. The result is one of:

    - SAME: the messages are there, as far as retention has not deleted them. Also without anchors.
    - CUT: newer messages were lost or replaced; the offset is the one after the newest message that
      is still there.
    - RECREATED: all messages that were compared were replaced, so the queue is a new one; the
      offset is its first one.
    - RESET: a response has an offset reset of the group, with its offset.
    - UNKNOWN: a slave responded that may get the messages later.

    An offset without a message inside the queue (a hole that compaction leaves) proves nothing, so
    that anchor is skipped. Raises what `probe_queue` raises.
    """
    has_changed_anchor = False
    offset_min = 0
    for anchor in sorted(anchors, reverse=True):
        probe = yield from probe_queue(directory, group, queue, anchor.offset)
        offset_min = probe.offset_min
        if probe.reset_to is not None:
            return CheckResult(QueueVerdict.RESET, probe.reset_to)
        if anchor.offset < offset_min:
            break  # retention has removed this message and all older ones
        if anchor.offset >= probe.offset_max:
            # A master refuses an offset behind the end, but not the end itself, so the next offset
            # is probed. A slave refuses neither, because it may still get the messages.
            if anchor.offset == probe.offset_max:
                probe = yield from probe_queue(directory, group, queue, anchor.offset + 1)
            if not probe.is_refused:
                return CheckResult(QueueVerdict.UNKNOWN)
            has_changed_anchor = True  # a master's queue ends before the anchor
        elif probe.found is None:
            continue  # a hole, such as a broker's compaction leaves
        elif anchor.is_same_message(probe.found):
            if has_changed_anchor:  # a newer anchor is lost
                return CheckResult(QueueVerdict.CUT, anchor.offset + 1)
            return CheckResult(QueueVerdict.SAME)
        else:
            has_changed_anchor = True
    recreated = CheckResult(QueueVerdict.RECREATED, offset_min)
    return recreated if has_changed_anchor else CheckResult(QueueVerdict.SAME)


class QueueIdentity:
    """The anchors that one reader has for its queue.

    `proven` anchors were in their places at the last check, `fresh` ones were read since.
    """

    __slots__ = (
        "_bounds",
        "_checked_s",
        "_size_bytes",
        "fresh",
        "has_probed_start",
        "is_suspect",
        "proven",
    )

    def __init__(self, anchors: Iterable[Anchor] = ()) -> None:
        """Begin with `anchors`, messages by which a reader recognises its queue later.

        They were read before, so they count as proven, which means found in the queue by a check.
        But the queue must be checked before the next response is used.
        """
        self.proven: list[Anchor] = sorted(anchors)
        self.fresh: list[Anchor] = []
        self.is_suspect: bool = bool(self.proven)
        """Whether the next response needs a check, however recent the last one is.

        True after an error, and when the queue has lost something.
        """
        self.has_probed_start: bool = False
        """Whether the message before the first position has been looked for."""
        self._bounds = (0, 0)
        self._checked_s = float("-inf")
        self._size_bytes = 0

    @property
    def newest(self) -> Anchor | None:
        """The proven anchor with the highest offset; None without a proven anchor."""
        return self.proven[-1] if self.proven else None

    def add_anchor(self, anchor: Anchor, size_bytes: int, now_s: float) -> None:
        """Add the last message of a response as an anchor, by which the queue is recognised later.

        The first anchor counts as proven, that is, as found in the queue by a check at `now_s`
        (monotonic seconds). Later ones are fresh until the next check. `size_bytes` is the size of
        the message; the period between checks grows with it.
        """
        if self.proven:
            self.fresh.append(anchor)
            self.fresh = _thin_out(self.fresh)
        else:
            self.proven.append(anchor)
            self._checked_s = now_s
        self._size_bytes = size_bytes

    def needs_check(self, response: PullResponse, now_s: float) -> bool:
        """Return whether the queue must be checked before the messages of `response` are used.

        This is so if the last check is too long ago, or if something suggests that messages were
        lost: the broker refused the offset, or a bound of the queue moved backwards. `is_suspect`
        then becomes True and stays so until a check. Returns False if there are no proven anchors
        to check with.
        """
        if not self.proven:
            return False
        offset_min, offset_max = self._bounds
        self.is_suspect |= (
            response.status is PullStatus.OFFSET_ILLEGAL
            or response.offset_min < offset_min
            or response.offset_max < offset_max
        )
        since_check_s = now_s - self._checked_s
        period_s = CHECK_PERIOD_S + self._size_bytes / _MIB
        return self.is_suspect or since_check_s >= period_s

    def update_bounds(self, response: PullResponse) -> None:
        """Remember the bounds of the queue from a response that was accepted."""
        self._bounds = response.offset_min, response.offset_max

    def record_unknown(self, asked_s: float) -> None:
        """Record that the check at `asked_s` (monotonic seconds) gave no verdict.

        The queue is no longer suspect, so the next check comes after the usual period.
        """
        self.is_suspect = False
        self._checked_s = asked_s

    def record_same(self, asked_s: float) -> None:
        """Record that a check, begun at `asked_s` (monotonic seconds), found the queue unchanged.

        Anchors are messages by which the queue is recognised. Fresh ones, which were read since the
        last check, become proven. `is_suspect` becomes False.
        """
        self.proven = _thin_out(sorted({*self.proven, *self.fresh}))
        self.fresh.clear()
        self.is_suspect = False
        self._checked_s = asked_s

    def drop_lost_anchors(self, offset: int) -> None:
        """Drop what is known about the messages from `offset` on, which the broker has lost.

        These are the proven anchors (messages that a check has found) from `offset` on, and all
        fresh anchors, which were read since that check. The bounds of the queue are forgotten.
        `is_suspect` does not change.
        """
        self.proven = [anchor for anchor in self.proven if anchor.offset < offset]
        self.fresh.clear()
        self._bounds = (0, 0)

    def clear(self) -> None:
        """Drop all anchors and the bounds, because the topic was deleted and created again.

        Anchors are messages by which the queue was recognised.
        """
        self.proven.clear()
        self.fresh.clear()
        self.is_suspect = False
        self._bounds = (0, 0)

    def probe_start(
        self, directory: Directory, group: str, queue: MessageQueue, position: int
    ) -> Conversation[int | None]:
        """Pull the message before `position`, to recognise the queue by it later.

        `position` is the next offset to read. The message becomes the first proven anchor. If
        retention has deleted it, the anchor has no store time. No anchor is added if the queue has
        a hole there or ends before `position`. Sets `has_probed_start`.

        Returns the new offset if the broker responds with an offset reset of the group, and then
        adds no anchor. Otherwise returns None. Raises what `probe_queue` raises.
        """
        offset_before = position - 1
        probe = yield from probe_queue(directory, group, queue, offset_before)
        self.has_probed_start = True
        is_behind_end = position > probe.offset_max
        if probe.reset_to is not None or is_behind_end:
            return probe.reset_to

        if probe.found is not None:
            self.proven.append(probe.found)
        elif offset_before < probe.offset_min:  # retention has removed the message
            self.proven.append(Anchor(offset_before, None))
        return None

    def check(
        self, directory: Directory, group: str, queue: MessageQueue
    ) -> Conversation[CheckResult]:
        """Compare the queue with messages that were read from it, and return what happened to it.

        The result is that of `compare_with_anchors` for the proven anchors: SAME, CUT, RECREATED,
        RESET or UNKNOWN. If it is SAME and the queue is suspect, the newest fresh anchor, a message
        read since the last check, is compared as well. If that one is lost or replaced, the result
        is CUT, with the offset after the newest proven anchor. If a slave answers about it, the
        result is UNKNOWN. No anchor is changed. Raises what `probe_queue` raises.
        """
        # The broker responds between the steps below. Choose the fresh anchor before them, because
        # the reader may change the anchors meanwhile.
        newest_fresh = self.fresh[-1:] if self.is_suspect else []

        proven_result = yield from compare_with_anchors(directory, group, queue, self.proven)
        if proven_result.verdict is not QueueVerdict.SAME or not newest_fresh:
            return proven_result

        # The proven anchors are in place. Find out whether only newer messages were lost.
        fresh_result = yield from compare_with_anchors(directory, group, queue, newest_fresh)
        if fresh_result.verdict is QueueVerdict.SAME:
            return proven_result
        if fresh_result.verdict is QueueVerdict.UNKNOWN:
            return fresh_result
        return CheckResult(QueueVerdict.CUT, self.proven[-1].offset + 1)


def _thin_out(anchors: Sequence[Anchor]) -> list[Anchor]:
    """Return at most ANCHORS_MAX of `anchors`, messages by which a queue is recognised.

    `anchors` are sorted by offset. The first and the last remain. Of the others, those remain whose
    distances to the last one grow evenly, like 1, 2, 4, 8. So a reader that goes back to an anchor
    repeats few messages, however much was lost.
    """
    remaining = list(anchors)
    last_offset = remaining[-1].offset if remaining else 0

    def removal_cost(index: int) -> float:
        """Return the gap that removing an anchor leaves, relative to its distance to the last."""
        offset_before = remaining[index - 1].offset
        gap = remaining[index + 1].offset - offset_before
        return gap / max(last_offset - offset_before, 1)

    while len(remaining) > ANCHORS_MAX:
        inner_indexes = range(1, len(remaining) - 1)
        del remaining[min(inner_indexes, key=removal_cost)]
    return remaining


def restart_offset(response: PullResponse, offset: int) -> int | None:
    """Return the offset where a reader goes on that knows no message of its queue, else None.

    If the broker refused `offset` because it is beyond the end of the queue, the reader goes on at
    the first offset of the queue. None means that it goes on at `offset`. A refusal with an offset
    reset of the group is handled elsewhere and gives None.
    """
    if (
        response.status is not PullStatus.OFFSET_ILLEGAL
        or response.remark == OFFSET_RESET
        or offset <= response.offset_max
    ):
        return None
    return response.offset_min
