"""Move a reader to another offset when a broker says so, or when its queue has changed.

    reason      what happened                                     where the reader continues
    retention   the broker deleted the messages to read next      after the deleted messages
    reset       an operator reset the group's offset              at the offset of the reset
    recreated   the topic was deleted and created again           at the beginning of the queue
    cut         the broker lost messages that were read           after the last one that it has

Before the messages of a response are handed out, `core.identity` says whether the queue has to be
checked. Until the broker has answered that check, nothing is handed out.
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
"""What happened to the topic, as a phrase for the log."""
CUT_OR_RECREATED: Final = f"{RECREATED}, or its broker has lost messages"
"""What happened to the topic if it cannot be distinguished from a loss of messages."""


class RepositioningReader(ABC):
    """A base class of queue readers that checks the identity of the queue and moves the reader.

    `in_flight` are the messages that were pulled and not acknowledged. `committed_offset` is the
    offset that was committed last, None if that is unknown. `_pulls_from_master` says that the last
    request went to the master of the queue.
    """

    group: str
    queue: MessageQueue
    in_flight: InFlight
    committed_offset: int | None
    _cluster: Cluster
    _pulls_from_master: bool

    def __init__(self) -> None:
        """Begin without messages by which the reader recognises its queue."""
        self.identity: QueueIdentity = QueueIdentity()
        self.on_recreated: Callable[[int, str], None] = lambda old, why: None
        """Called with (old offset, reason) after the reader has moved to a new topic's beginning.

        The old offset is the reader's offset in the deleted topic. The reason is a phrase for the
        log.
        """
        self.is_recreation_reported: bool = False
        """Whether another reader has already reported that the topic was created again.

        It is True until this reader has checked its own queue.
        """

    @abstractmethod
    def move_to(self, position: int) -> None:
        """Continue at `position`. Messages that were pulled before are no longer current."""

    async def _check_queue(self) -> bool:
        """Check, before a pull, that the reader's offset still belongs to the queue.

        If messages may have been lost, the anchors (messages that were read before) are compared
        with the queue. If there is no anchor yet, a first one is fetched. Otherwise no request is
        sent. Returns False if the reader was moved to another offset. Raises SluiceError if the
        check fails.
        """
        identity = self.identity
        position = self.in_flight.position
        if identity.is_suspect and identity.proven:
            return await self._check_anchors()
        if identity.proven or identity.has_probed_start or not position:
            return True
        # `move_to` replaces `in_flight`, so another object later means that the reader was moved.
        in_flight = self.in_flight
        directory = self._cluster.directory
        reset_to = await self._cluster.run(
            identity.probe_start(directory, self.group, self.queue, position)
        )
        if in_flight is self.in_flight and reset_to is not None:
            self._reset_to(reset_to)
        return in_flight is self.in_flight

    async def _check_response(self, response: PullResponse) -> bool:
        """Check the queue if that is due, and return whether `response` may be used.

        It may not if the reader was moved to another offset. The response of a slave is always
        accepted: a slave may lag behind, so the bounds of its queue prove nothing. Raises
        SluiceError if the check fails.
        """
        if not self._pulls_from_master:
            return True
        now_s = self._cluster.clock.monotonic_s()
        if response.remark == OFFSET_RESET and response.status is PullStatus.OFFSET_ILLEGAL:
            return await self._follow_reset(response)
        if self.identity.needs_check(response, now_s) and not await self._check_anchors():
            return False
        self.identity.update_bounds(response)
        if response.status is not PullStatus.OFFSET_ILLEGAL:
            self.is_recreation_reported = False
        return True

    async def _check_anchors(self) -> bool:
        """Compare the queue with messages that were read from it, and react to the result.

        If the topic was created again, messages were lost or the group was reset, the reader is
        moved to another offset, and the result is False. It is also False if another task has moved
        the reader meanwhile. Raises SluiceError if the check fails.
        """
        # `move_to` replaces `in_flight`, so another object later means that the reader was moved.
        in_flight = self.in_flight
        requested_s = self._cluster.clock.monotonic_s()
        check_result = await self._find_verdict()
        if in_flight is not self.in_flight:
            return False
        verdict, offset = check_result
        if verdict is QueueVerdict.SAME:
            self.is_recreation_reported = False
            self.identity.record_same(requested_s)
        elif verdict is QueueVerdict.UNKNOWN:
            self.identity.record_unknown(requested_s)
        elif verdict is QueueVerdict.RESET:
            self._reset_to(offset)
        elif verdict is QueueVerdict.CUT:
            self.identity.drop_lost_anchors(offset)
            self._cut_to(min(in_flight.position, offset))
        else:
            self._restart_in_new_topic(in_flight.position, offset, RECREATED)
        return in_flight is self.in_flight

    async def _find_verdict(self) -> CheckResult:
        """Check the anchors at the broker and return the result."""
        directory = self._cluster.directory
        return await self._cluster.run(self.identity.check(directory, self.group, self.queue))

    async def _follow_reset(self, response: PullResponse) -> bool:
        """Move the reader to the offset of a group reset that the broker has sent.

        If the topic was also created again, that is reported. Otherwise the reset is logged. Always
        returns False, because the reader was moved.
        """
        # `move_to` replaces `in_flight`, so another object later means that the reader was moved.
        in_flight = self.in_flight
        old_offset = in_flight.position
        check_result = CheckResult(QueueVerdict.SAME)
        if self.identity.proven:
            with contextlib.suppress(SluiceError):  # follow the reset even if the check fails
                check_result = await self._find_verdict()
        if in_flight is not self.in_flight:
            return False
        if check_result.verdict is QueueVerdict.RECREATED:
            self._restart_in_new_topic(old_offset, response.next_offset, RECREATED)
        else:
            self._reset_to(response.next_offset)
        return False

    def _restart_in_new_topic(self, old_offset: int, new_offset: int, why: str) -> None:
        """Move the reader from `old_offset` of a deleted topic to `new_offset` of the new topic.

        Drop all anchors, and call `on_recreated` with `why`, a phrase for the log.
        """
        self.identity.clear()
        self._move_and_notify(old_offset, new_offset, 0)
        self.on_recreated(old_offset, why)

    def _follow_illegal_offset(self, response: PullResponse) -> None:
        """Move the reader after the response that its offset is not in the queue, and log that.

        Normally the reader goes on where the broker says, after messages that retention deleted. If
        its offset is beyond the end of the queue, messages before the end may be unread. Then it
        goes on after the newest message that it knows to be in the queue, or at the beginning of
        the queue if it knows none.
        """
        old_offset = self.in_flight.position
        new_offset = response.next_offset
        beginning = restart_offset(response, old_offset)
        if beginning is not None and self._pulls_from_master:
            newest_anchor = self.identity.newest
            if newest_anchor is None:
                self._restart_in_new_topic(old_offset, beginning, CUT_OR_RECREATED)
                return
            new_offset = min(newest_anchor.offset + 1, response.offset_max)
        is_deleted = old_offset < new_offset <= response.offset_min
        lost_count = new_offset - old_offset if is_deleted else 0
        consequence = _describe_move(old_offset, new_offset)
        if lost_count:
            consequence = (
                f"{lost_count} messages are lost: the broker deleted them before they were read; "
                "raise fileReservedTime or consume faster"
            )
        remark = f" [{response.remark}]" if response.remark else ""
        _log.warning(
            "group %s: offset %d of %s is not in the queue (%d to %d)%s; continuing at %d, %s",
            self.group,
            old_offset,
            self.queue,
            response.offset_min,
            response.offset_max,
            remark,
            new_offset,
            consequence,
        )
        self._move_and_notify(old_offset, new_offset, lost_count)

    def _reset_to(self, new_offset: int) -> None:
        """Move the reader to the offset of a group reset, and log that."""
        old_offset = self.in_flight.position
        level = logging.WARNING if new_offset != old_offset else logging.DEBUG
        _log.log(
            level,
            "group %s was reset on %s from offset %d to %d, %s",
            self.group,
            self.queue,
            old_offset,
            new_offset,
            _describe_move(old_offset, new_offset),
        )
        self._move_and_notify(old_offset, new_offset, 0)

    def _cut_to(self, new_offset: int) -> None:
        """Move the reader back to `new_offset`, because the broker has lost messages, and log that.

        The queue still has the messages before `new_offset`.
        """
        old_offset = self.in_flight.position
        _log.warning(
            "group %s: the broker has lost messages of %s that this client has read (an unclean "
            "failover); continuing at %d instead of %d",
            self.group,
            self.queue,
            new_offset,
            old_offset,
        )
        self._move_and_notify(old_offset, new_offset, 0)

    def _move_and_notify(self, old_offset: int, new_offset: int, lost_count: int) -> None:
        """Move the reader to `new_offset`, and call the client's `on_moved`.

        The committed offset is forgotten, so that the new one is committed. `lost_count` is the
        number of messages that retention deleted before they were read.
        """
        self.move_to(new_offset)
        self.committed_offset = None
        if self._cluster.on_moved is not None:
            notify(
                self._cluster.on_moved,
                OffsetMoved(self.group, self.queue, old_offset, new_offset, lost_count),
            )


def _describe_move(old_offset: int, new_offset: int) -> str:
    """Return what moving a reader between two offsets means for its messages, for the log."""
    if new_offset > old_offset:
        return f"{new_offset - old_offset} messages are skipped"
    return f"{old_offset - new_offset} messages are delivered again"
