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
    """Return an anchor for a stored message; `record` is its bytes or the decoded message.

    Raises ProtocolError for damaged bytes.
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
    """Pull the message at `offset` from the broker of a queue, and return the probe.

    `QueueProbe` says which message and which bounds were found. Raises RouteNotFoundError,
    RequestError (TOPIC_NOT_EXIST (17) for a deleted topic), ConnectionLostError,
    RequestTimeoutError, and ProtocolError for a record that cannot be parsed.
    """
    command = requests.make_probe_request(group, queue, offset)
    address = yield from directory.get_read_address(queue)
    response = parse_pull_response((yield Call(address, command)), address)
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
    """Compare a queue with messages that were read from it before, and return the verdict.

    Each of `anchors` is such a message (see `Anchor`). The message at its offset is pulled, from
    the newest anchor to the oldest. An anchor has *changed* if another message is at its offset, or
    if a master's queue ends before it. The first of these that is the case decides:

    - RESET: a response carries an offset reset of the group.
    - UNKNOWN: the offset is not before the end of the queue, and the broker accepts to read there.
      The broker is a slave then, which may get the message later.
    - SAME or CUT: an anchor's message is in its place. If a newer anchor has changed, the verdict
      is CUT, with the offset after this anchor.
    - SAME or RECREATED: retention has removed the message, or all anchors were compared. If an
      anchor has changed, the verdict is RECREATED, with the first stored offset.

    An offset inside the queue without a message (a hole, such as a broker's compaction leaves)
    proves nothing, so that anchor is skipped. Without anchors the verdict is SAME. Raises what
    `probe_queue` raises.
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
            has_changed_anchor = True
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
        """Add `anchor`, the last message of a response, as a fresh anchor.

        Its record has `size_bytes` bytes, and it was read at `now_s` (monotonic seconds). If there
        are no proven anchors so far, it counts as proven, and as checked at `now_s`.
        """
        if self.proven:
            self.fresh.append(anchor)
            self.fresh = _thin_out(self.fresh)
        else:
            self.proven.append(anchor)
            self._checked_s = now_s
        self._size_bytes = size_bytes

    def needs_check(self, response: PullResponse, now_s: float) -> bool:
        """Return whether the queue has to be checked before `response` is handed out.

        It has to be checked if it is suspect, or if the last check is longer ago than the period. A
        response that shows a loss makes the queue suspect here (`is_suspect` becomes True): the
        broker refused the offset, or a bound of the queue moved backwards. Return False while no
        anchor is proven.
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
        """Record that the check at `asked_s` (monotonic seconds) found the queue unchanged.

        All fresh anchors become proven.
        """
        self.proven = _thin_out(sorted({*self.proven, *self.fresh}))
        self.fresh.clear()
        self.is_suspect = False
        self._checked_s = asked_s

    def drop_lost_anchors(self, offset: int) -> None:
        """Drop the proven anchors from `offset` on, all fresh anchors, and the bounds.

        The reader calls this when the broker has lost the messages from `offset` on. The queue
        stays suspect if it was.
        """
        self.proven = [anchor for anchor in self.proven if anchor.offset < offset]
        self.fresh.clear()
        self._bounds = (0, 0)

    def clear(self) -> None:
        """Drop all anchors and the bounds, because the queue belongs to a new topic."""
        self.proven.clear()
        self.fresh.clear()
        self.is_suspect = False
        self._bounds = (0, 0)

    def probe_start(
        self, directory: Directory, group: str, queue: MessageQueue, position: int
    ) -> Conversation[int | None]:
        """Look for the message before `position`, and take it as the first proven anchor.

        `position` is the offset that is read next. If retention has removed the message before it,
        the anchor has no store time. If `position` is behind the end of the queue, or the queue has
        a hole before it, no anchor is added. Sets `has_probed_start`. Return the offset of a group
        reset if the broker responded with one (then no anchor is added), else None. Raises what
        `probe_queue` raises.
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
        """Check the proven anchors at the broker, and return the result. No anchor is changed.

        Anchors are messages that were read before: proven ones were in place at the last check,
        fresh ones were read since. The verdict says what happened to the queue (`QueueVerdict`).

        If the proven anchors are in place and the queue is suspect, the newest fresh anchor is
        compared as well. If it has changed, the verdict is CUT with the offset after the newest
        proven anchor, because another broker may have taken over without the fresh messages. If a
        slave responds to that second comparison, the verdict is UNKNOWN. Raises what `probe_queue`
        raises.
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
    """Return at most ANCHORS_MAX of `anchors`, which are sorted by offset.

    The first and the last anchor stay. Between them those stay whose distances to the last one grow
    most evenly, so that few messages repeat after a cut of any length.
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
    """Return where a reader without anchors continues, or None if it continues at `offset`.

    If the broker refused `offset` because it is behind the end of the queue, that is the first
    offset of the queue. A refusal that carries out an offset reset does not count.
    """
    if (
        response.status is not PullStatus.OFFSET_ILLEGAL
        or response.remark == OFFSET_RESET
        or offset <= response.offset_max
    ):
        return None
    return response.offset_min
