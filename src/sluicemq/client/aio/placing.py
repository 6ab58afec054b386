"""Where a reader goes on after an answer that moves it, or when its queue is not what it was.

    cause       what happened                                     where the reader goes on
    retention   the broker deleted what the reader wanted         behind it
    reset       an operator or a broker sent the group elsewhere  where the reset says
    recreated   the topic was deleted and created again           at the beginning
    cut         the broker lost messages that were read here      behind what it still has

Before an answer is handed out, `core.identity` says whether a check of the queue is due. Until the
broker has answered that check, nothing is handed out.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.core.consuming import InFlight, OffsetMoved
from sluicemq.client.core.identity import (
    OFFSET_RESET,
    CheckResult,
    QueueIdentity,
    QueueVerdict,
    restart_offset,
)
from sluicemq.client.core.requests import PullResponse, PullStatus
from sluicemq.client.tasks import notify
from sluicemq.errors import SluiceError
from sluicemq.model.topic import MessageQueue

_log = logging.getLogger("sluicemq.client")

RECREATED: Final = "deleted and created again"
CUT_OR_RECREATED: Final = f"{RECREATED}, or its broker has lost messages"


class MovableReader(ABC):
    """Base class of queue readers that checks the identity of the queue and moves the reader's
    offset."""

    group: str
    queue: MessageQueue
    in_flight: InFlight
    committed: int | None
    _cluster: Cluster
    _is_at_master: bool

    def __init__(self) -> None:
        self.identity: QueueIdentity = QueueIdentity()
        self.on_recreated: Callable[[int, str], None] = lambda old, why: None
        """Called after the reader has moved to the beginning of the new topic, with its offset in
        the deleted topic and a phrase for the log that says what happened."""
        self.is_warned: bool = False
        """Whether another reader has reported that the topic was created again, and this reader has
        not checked its own queue yet."""

    @abstractmethod
    def move(self, position: int) -> None:
        """Go on from `position`; what was handed out before no longer counts."""

    async def _check_queue(self) -> bool:
        """Make sure, before a pull, that the offset of the reader belongs to the queue as it is
        now: take a first anchor, or check the known ones after an error. Return False if the reader
        was moved. Raises SluiceError."""
        identity, position = self.identity, self.in_flight.position
        if identity.is_suspect and identity.proven:
            return await self._check_anchors()
        if identity.proven or identity.has_probed_start or not position:
            return True
        in_flight, directory = self.in_flight, self._cluster.directory
        reset_to = await self._cluster.run(
            identity.probe_start(directory, self.group, self.queue, position)
        )
        if in_flight is self.in_flight and reset_to is not None:
            self._reset_to(reset_to)
        return in_flight is self.in_flight

    async def _check_answer(self, answer: PullResponse) -> bool:
        """Check an answer before it is handed out. Return True if it may be: the check succeeded or
        is not due, or a slave answered, whose bounds prove nothing. Return False if the reader was
        moved. Raises SluiceError."""
        is_at_master, now_s = self._is_at_master, self._cluster.clock.monotonic_s()
        if not is_at_master:  # a slave may be behind: nothing follows from its bounds
            return True
        if answer.remark == OFFSET_RESET and answer.status is PullStatus.OFFSET_ILLEGAL:
            return await self._follow_reset(answer)
        if self.identity.needs_check(answer, now_s) and not await self._check_anchors():
            return False
        self.identity.update_bounds(answer)
        if answer.status is not PullStatus.OFFSET_ILLEGAL:
            self.is_warned = False
        return True

    async def _check_anchors(self) -> bool:
        """Check the anchors of the queue and act on the verdict. Return False if the reader was
        moved. Raises SluiceError."""
        in_flight, asked_s = self.in_flight, self._cluster.clock.monotonic_s()
        judgement = await self._find_verdict()
        if in_flight is not self.in_flight:
            return False
        position, (verdict, offset) = in_flight.position, judgement
        if verdict is QueueVerdict.SAME:
            self.is_warned = False
            self.identity.record_same(asked_s)
        elif verdict is QueueVerdict.UNKNOWN:
            self.identity.record_unknown(asked_s)
        elif verdict is QueueVerdict.RESET:
            self._reset_to(offset)
        elif verdict is QueueVerdict.CUT:
            self.identity.drop_lost_anchors(offset)
            self._cut_to(min(position, offset))
        else:
            self._begins_anew(position, offset, RECREATED)
        return in_flight is self.in_flight

    async def _find_verdict(self) -> CheckResult:
        directory = self._cluster.directory
        return await self._cluster.run(self.identity.check(directory, self.group, self.queue))

    async def _follow_reset(self, answer: PullResponse) -> bool:
        """Move the reader where a reset of the group says. If the anchors show that the topic was
        created again, report that; otherwise, and if they cannot be checked, log a reset. Return
        False: the reader was moved."""
        in_flight, position = self.in_flight, self.in_flight.position
        judgement = CheckResult(QueueVerdict.SAME)
        if self.identity.proven:
            with contextlib.suppress(SluiceError):  # it is obeyed all the same
                judgement = await self._find_verdict()
        if in_flight is not self.in_flight:
            return False
        if judgement.verdict is QueueVerdict.RECREATED:
            self._begins_anew(position, answer.next_offset, RECREATED)
        else:
            self._reset_to(answer.next_offset)
        return False

    def _begins_anew(self, old: int, new: int, why: str) -> None:
        """Move the reader from offset `old` of a deleted topic to offset `new` of the topic that
        was created again. Forget the anchors, and report `why`, a phrase for the log."""
        self.identity.clear()
        self._move_on(old, new, 0)
        self.on_recreated(old, why)

    def _follow_refusal(self, answer: PullResponse) -> None:
        """Move the reader after an answer that refuses its offset, and log that. Go where the
        broker says: behind what retention deleted. But if the offset is behind the end of the
        queue, messages before the end may be unread; then go on behind the newest proven anchor, or
        at the beginning if there is none."""
        old, new = self.in_flight.position, answer.next_offset
        beginning = restart_offset(answer, old)
        if beginning is not None and self._is_at_master:
            newest = self.identity.newest
            if newest is None:
                self._begins_anew(old, beginning, CUT_OR_RECREATED)
                return
            new = min(newest.offset + 1, answer.offset_max)
        lost = new - old if old < new <= answer.offset_min else 0
        if lost:
            what = (
                f"{lost} messages are lost: the broker deleted them before they were read; raise "
                "fileReservedTime or consume faster"
            )
        else:
            what = f"{new - old} messages are skipped"
            if new <= old:
                what = f"{old - new} messages are delivered again"
        _log.warning(
            "group %s: offset %d of %s is not in the queue (%d to %d)%s; going on at %d, %s",
            self.group, old, self.queue, answer.offset_min, answer.offset_max,
            f" [{answer.remark}]" if answer.remark else "", new, what,
        )  # fmt: skip
        self._move_on(old, new, lost)

    def _reset_to(self, new: int) -> None:
        """Move the reader to `new`, the offset of a group reset, and log that."""
        old = self.in_flight.position
        what = f"{new - old} messages are skipped" if new > old else f"{old - new} come again"
        level = logging.WARNING if new != old else logging.DEBUG
        _log.log(
            level, "group %s was reset on %s from offset %d to %d, %s",
            self.group, self.queue, old, new, what,
        )  # fmt: skip
        self._move_on(old, new, 0)

    def _cut_to(self, new: int) -> None:
        """Move the reader to `new`, behind the newest message that the queue still has, and log the
        loss."""
        old = self.in_flight.position
        _log.warning(
            "group %s: the broker has lost messages of %s that were read here (an unclean "
            "failover); going on at %d instead of %d", self.group, self.queue, new, old,
        )  # fmt: skip
        self._move_on(old, new, 0)

    def _move_on(self, old: int, new: int, lost: int) -> None:
        self.move(new)
        self.committed = None
        if self._cluster.on_moved is not None:
            notify(self._cluster.on_moved, OffsetMoved(self.group, self.queue, old, new, lost))
