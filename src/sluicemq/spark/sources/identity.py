"""Check whether a topic is still the one that a checkpoint or a planned read refers to.

RocketMQ gives a topic no identity. A topic that is deleted and created again begins at offset 0,
and the offsets of an old checkpoint may be valid in it: its first messages would never be read. So
a checkpoint contains an *anchor* of each queue (`client.core.identity`): the offset of a message
before the stream's offset, and the time when the broker stored it. If that offset has another store
time now, or a message where there was none any more, the topic is another one. The check works with
any broker: it pulls one message. An anchor is renewed before retention removes its message. A check
is needed

    once for each queue of the checkpoint with which a query begins;
    in each micro-batch, for queues with new messages that still begin at offset 0. If a queue
    begins at a higher offset, a topic that was created again shows by its bounds;
    once a second, for queues without new messages: the new topic may be as long as the old one.

A planned range is read later, in another process. So a partition carries an anchor, and its task
checks the queue before and after it reads.

A queue that has left the route is *gone* if its broker is registered without it. A queue whose
broker is not registered is kept.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.identity import CHECK_PERIOD_S, Anchor, make_anchor, probe_queue
from sluicemq.client.core.names import sign_request
from sluicemq.client.core.requests import PullStatus, parse_pull_response
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import (
    OffsetOutOfRangeError,
    RequestError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.model.topic import MessageQueue
from sluicemq.net.blocking import BlockingChannel
from sluicemq.spark.sources.checkpoints import Anchors, Offsets
from sluicemq.spark.sources.offsets import Bounds, QueueRange, RangePartition, ReadPlan, queue_label
from sluicemq.wire.codes import ResponseCode

logger = logging.getLogger(__name__)

SHOWN_MAX: Final = 5
"""Queues that an error or a warning names."""
NO_QUEUE_CODES: Final = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.INVALID_PARAMETER)
"""The codes with which brokers refuse a pull from a topic or a queue that does not exist."""
_FIX: Final = (
    "Set failOnDataLoss=false to read the new topic from its beginning, or start with a new"
    " checkpointLocation."
)


def fetch_store_time(admin: Admin, group: str, queue: MessageQueue, offset: int) -> int | None:
    """Pull the message at `offset` and return when it was stored (milliseconds since 1970).

    Return None if there is no such message. Raises SluiceError.
    """
    probed = admin.run(probe_queue(admin.directory, group, queue, offset))
    if probed.reset_to is not None:  # a RocketMQ broker may answer the first pull like this
        probed = admin.run(probe_queue(admin.directory, group, queue, offset))
    return None if probed.found is None else probed.found.stored_ms


class TopicIdentity:
    """The anchors of the queues that one running query reads.

    Every method that takes an `admin` may raise the client's errors. In all methods, `bounds` is
    (first stored offset, next offset to be written) of a queue.
    """

    def __init__(self, group: str, *, fail_on_data_loss: bool) -> None:
        """Create it for a query that reads as the consumer group `group`.

        If `fail_on_data_loss` is True, the methods raise an error for lost messages; otherwise they
        log them.
        """
        self._group = group
        self._fail_on_data_loss = fail_on_data_loss
        self._verified: dict[MessageQueue, tuple[Anchor, int]] = {}
        """For each queue, the anchor that was last verified, and the first offset at that time."""
        self._checked_s: dict[MessageQueue, float] = {}
        """The time of each queue's last check, on the monotonic clock."""
        self._recreated: dict[str, list[str]] = {}
        """For each topic that was created again, texts about its queues for the log."""
        self._gone: set[MessageQueue] = set()
        """The queues whose disappearance was logged."""

    def is_same_queue(
        self, admin: Admin, queue: MessageQueue, anchor: Anchor | None, bounds: tuple[int, int]
    ) -> bool | None:
        """Return whether the queue still contains the message of `anchor`.

        True and False are results of a check; the last positive one is remembered, so that the
        broker is not asked again while the queue begins at a higher offset than 0. None means that
        the check is not possible: `anchor` is None, its offset is not within `bounds`, or the queue
        has a hole there.
        """
        lowest, highest = bounds
        if anchor is None or not lowest <= anchor.offset < highest:
            return None
        if anchor.stored_ms is None:
            return False  # retention had removed the message, and now there is another one
        verified_anchor, first_offset = self._verified.get(queue, (None, 0))
        # A topic that was created again begins at 0, so its first offset would be lower.
        if verified_anchor == anchor and 0 < first_offset <= lowest:
            return True

        self._checked_s[queue] = SYSTEM_CLOCK.monotonic_s()
        stored_ms = fetch_store_time(admin, self._group, queue, anchor.offset)
        if stored_ms is None:  # a hole, such as a broker's compaction leaves
            return None
        if stored_ms != anchor.stored_ms:
            return False
        self._verified[queue] = anchor, lowest
        return True

    def find_resume_offset(
        self,
        admin: Admin,
        queue: MessageQueue,
        offset: int,
        bounds: tuple[int, int],
        anchor: Anchor | None,
    ) -> int:
        """Return the offset at which a stream that is at `offset` continues in a queue.

        If the queue is the same, that is `offset`. If loss is allowed, it is the first offset of a
        topic that was created again, or the end of a queue whose newest messages were lost; the
        latter is logged here, the former by `log_recreated_topics`. At the end of the queue, the
        broker is asked at most once in `CHECK_PERIOD_S`. Raises OffsetOutOfRangeError if the queue
        is not the same and loss is an error.
        """
        lowest, highest = bounds
        if offset == highest:
            passed_s = SYSTEM_CLOCK.monotonic_s() - self._checked_s.get(queue, float("-inf"))
            if passed_s < CHECK_PERIOD_S:
                return offset
        is_same = self.is_same_queue(admin, queue, anchor, bounds)
        has_changed = is_same is False  # None means unknown
        if offset <= highest and not has_changed:
            return offset

        if self._fail_on_data_loss:
            raise recreated_error(queue, offset, bounds, anchor if has_changed else None)
        if is_same:
            logger.warning(
                "%s of %r lost messages: the stream, which was at %d, continues at %d",
                queue_label(queue),
                queue.topic,
                offset,
                highest,
            )
            return highest
        self._recreated.setdefault(queue.topic, []).append(f"{offset} of {queue_label(queue)}")
        return lowest

    def log_recreated_topics(self) -> None:
        """Log one warning for each topic that was created again, with the queues that are affected.

        The queues are those that `find_resume_offset` has found since the last call of this method.
        """
        for topic, positions in self._recreated.items():
            logger.warning(
                "the topic %r was deleted and created again: the stream, which was at %s,"
                " continues at its beginning",
                topic,
                _list_some(positions),
            )
        self._recreated.clear()

    def check_gone(self, gone: Offsets) -> None:
        """Log that the queues in `gone` have disappeared; each queue is logged once.

        `gone` has the offset up to which each queue was read. If loss is an error, raises
        OffsetOutOfRangeError instead. Does nothing if every queue was logged before.
        """
        unlogged = sorted(
            (queue, offset) for queue, offset in gone.items() if queue not in self._gone
        )
        if not unlogged:
            return
        descriptions = [
            f"{queue_label(queue)} of {queue.topic!r} (read up to offset {offset})"
            for queue, offset in unlogged
        ]
        problem = (
            f"queues disappeared: {_list_some(descriptions)}; messages after these offsets may be"
            " unread"
        )
        if self._fail_on_data_loss:
            raise OffsetOutOfRangeError(
                f"{problem}.",
                fix="Set failOnDataLoss=false to continue with the remaining queues, or start with"
                " a new checkpointLocation.",
            )
        logger.warning("%s; the stream continues with the other queues", problem)
        self._gone.update(queue for queue, _ in unlogged)

    def clip_range(
        self,
        admin: Admin,
        planned: QueueRange,
        bounds: tuple[int, int],
        anchors: Sequence[Anchor | None],
    ) -> QueueRange:
        """Return the part of the range `planned` that can still be read.

        `anchors` is empty, or contains two anchors: of the end of the micro-batch, then of its
        start. If the end anchor has changed, nothing of the range is left; if only the start anchor
        has, the range begins at the first offset of the new topic. What is lost is logged. Raises
        OffsetOutOfRangeError instead if loss is an error.
        """
        queue = planned.queue
        lowest, highest = bounds
        # True, False or None (unknown) for each anchor, in the same order.
        is_same = [self.is_same_queue(admin, queue, anchor, bounds) for anchor in anchors]
        if self._fail_on_data_loss:
            if False in is_same or planned.end > highest:
                changed_anchor = anchors[is_same.index(False)] if False in is_same else None
                raise recreated_error(queue, planned.end, bounds, changed_anchor)
            _check_retention(planned, lowest)

        remaining = _find_remaining_range(planned, bounds, is_same)
        if remaining != planned:
            logger.warning(
                "%s: %d messages of the offsets %d to %d are left and read; the others are lost"
                " (failOnDataLoss=false)",
                queue_label(queue),
                remaining.size,
                planned.start,
                planned.end,
            )
        return remaining

    def renew_anchors(self, admin: Admin, known_anchors: Anchors, moved: Bounds) -> Anchors:
        """Return the anchors `known_anchors`, renewed for the queues in `moved`.

        For each of these queues, `moved` has its first stored offset and the offset after the last
        message that was read. The new anchor is that last message. An old anchor stays if its
        offset is in the newer half of the stored messages before the last one. A queue of `moved`
        has no anchor in the result if it is empty, or if it has a hole at the last message.
        """
        anchors = dict(known_anchors)
        for queue, (lowest, end) in moved.items():
            last_offset = end - 1
            old_anchor = anchors.pop(queue, None)
            if old_anchor is not None and _is_recent(old_anchor, lowest, last_offset):
                anchors[queue] = old_anchor
            elif 0 <= last_offset < lowest:
                # Retention has removed the message: if there is one again, the topic is another.
                anchors[queue] = Anchor(last_offset, None)
            elif last_offset >= lowest:
                stored_ms = fetch_store_time(admin, self._group, queue, last_offset)
                if stored_ms is not None:
                    self._checked_s[queue] = SYSTEM_CLOCK.monotonic_s()
                    anchors[queue] = Anchor(last_offset, stored_ms)
                    self._verified[queue] = anchors[queue], lowest
        return anchors


def _find_remaining_range(
    planned: QueueRange, bounds: tuple[int, int], is_same: Sequence[bool | None]
) -> QueueRange:
    """Return the part of a planned range that exists, within the bounds of the queue.

    `is_same` is empty, or says for the anchors of the end and of the start of the micro-batch
    whether the queue still contains them; None means that this is unknown.
    """
    lowest, highest = bounds
    start = max(planned.start, lowest)
    end = min(planned.end, highest)
    has_end_changed = bool(is_same) and is_same[0] is False
    is_end_unproven = planned.end > highest and True not in is_same
    if has_end_changed or is_end_unproven:
        start = end  # the whole range belongs to a topic that does not exist any more
    elif False in is_same:
        start = lowest  # only the beginning of the range belongs to the deleted topic
    return QueueRange(planned.queue, start, max(start, end))


def _check_retention(planned: QueueRange, lowest: int) -> None:
    """Raise OffsetOutOfRangeError if a planned range begins before `lowest`, the first offset."""
    if planned.start >= lowest:
        return
    queue = planned.queue
    raise OffsetOutOfRangeError(
        f"retention deleted unread messages: {queue_label(queue)} of {queue.topic!r}"
        f" begins at {lowest} now, the stream was at {planned.start}:"
        f" {min(lowest, planned.end) - planned.start} messages are gone.",
        fix="Set failOnDataLoss=false to read what is left.",
    )


def _is_recent(anchor: Anchor, lowest: int, last_offset: int) -> bool:
    """Return whether an anchor is in the newer half of the offsets `lowest` to `last_offset`."""
    return anchor.offset >= lowest and (anchor.offset - lowest) * 2 >= last_offset - lowest


def _list_some(descriptions: Sequence[str]) -> str:
    """Return the first `SHOWN_MAX` texts, separated by commas, and how many more there are."""
    listed = ", ".join(descriptions[:SHOWN_MAX])
    if len(descriptions) > SHOWN_MAX:
        listed += f" and {len(descriptions) - SHOWN_MAX} more"
    return listed


def recreated_error(
    queue: MessageQueue, offset: int, bounds: tuple[int, int], anchor: Anchor | None
) -> OffsetOutOfRangeError:
    """Return the error for a queue that is not the one that was read up to `offset`.

    `anchor` is the message that the queue does not contain any more. None means that the queue ends
    before `offset`.
    """
    lowest, highest = bounds
    if anchor is None:
        problem = (
            f"the stream is at {offset} of {queue_label(queue)} of {queue.topic!r}, which ends at"
            f" {highest}: the topic was deleted and created again, or the broker lost messages."
        )
    else:
        problem = (
            f"the topic {queue.topic!r} was deleted and created again: {queue_label(queue)} has a"
            f" different message at offset {anchor.offset} than before; the read is at {offset},"
            f" the new topic has the offsets {lowest} to {highest}."
        )
    return OffsetOutOfRangeError(problem, fix=_FIX)


# ---- queues and topics that disappeared


def fetch_existing_bounds(admin: Admin, topics: Collection[str]) -> tuple[Bounds, list[str]]:
    """Return the bounds of every readable queue of the topics, and the topics that do not exist.

    Raises SluiceError.
    """
    bounds: Bounds = {}
    missing = []
    for topic in topics:
        try:
            queues = admin.queues(topic)
        except RouteNotFoundError:
            missing.append(topic)
            continue
        bounds.update({queue: admin.offsets(queue) for queue in queues})
    return bounds, missing


def find_existing_topics(
    admin: Admin, topics: Sequence[str], *, fail_on_data_loss: bool
) -> Sequence[str]:
    """Return the topics of a batch that exist, and log a warning about the others.

    Raises RouteNotFoundError for the first missing topic if `fail_on_data_loss` is True, or if none
    of the topics exists.
    """
    missing = [topic for topic in topics if admin.find_route(topic) is None]
    if missing and (fail_on_data_loss or len(missing) == len(topics)):
        admin.route(missing[0])  # raises RouteNotFoundError with the reason
    if missing:
        logger.warning(
            "topics that do not exist are not read (failOnDataLoss=false): %s", _list_some(missing)
        )
    return [topic for topic in topics if topic not in missing]


def find_gone_queues(admin: Admin, known_offsets: Offsets, bounds: Bounds) -> Offsets:
    """Return the queues of `known_offsets` that have disappeared, with their offsets.

    A queue has disappeared if it is not in `bounds`, although its broker is registered. A queue
    that still responds and ends at its offset does not count: everything in it was read, and its
    topic has fewer queues to read now. Raises SluiceError.
    """
    absent = {queue: offset for queue, offset in known_offsets.items() if queue not in bounds}
    if not absent:
        return {}
    registered_brokers = admin.cluster_info().brokers
    return {
        queue: offset
        for queue, offset in absent.items()
        if queue.broker in registered_brokers and not _is_completely_read(admin, queue, offset)
    }


def _is_completely_read(admin: Admin, queue: MessageQueue, offset: int) -> bool:
    """Return whether the queue still responds, is not empty, and ends at `offset`."""
    try:
        return 0 < offset == admin.offsets(queue)[1]
    except SluiceError:
        return False


# ---- planned partitions


def fetch_end_anchors(admin: Admin, group: str, ranges: Sequence[QueueRange]) -> Anchors:
    """Return an anchor for each queue of a batch: the last message before the end of its ranges.

    A queue has no anchor if there is no message at that offset. Raises SluiceError.
    """
    ends: Offsets = {}
    for queue_range in ranges:
        earlier_end = ends.get(queue_range.queue, 0)
        ends[queue_range.queue] = max(queue_range.end, earlier_end)

    anchors = {}
    for queue, end in ends.items():
        if not end:
            continue
        stored_ms = fetch_store_time(admin, group, queue, end - 1)
        if stored_ms is not None:
            anchors[queue] = Anchor(end - 1, stored_ms)
    return anchors


def set_anchors(
    partitions: Sequence[RangePartition], anchors: Anchors, *, is_batch: bool
) -> Sequence[RangePartition]:
    """Set `anchor`, `is_batch` and `is_first_of_queue` of each partition, and return `partitions`.

    The partitions are changed in place. A partition without a queue stays as it is. In a batch, the
    first partition of each queue is marked: if loss is allowed, it reads a topic that was created
    again from its beginning.
    """
    marked: set[MessageQueue] = set()
    for partition in partitions:
        queue = partition.queue
        if queue is not None:
            partition.anchor = anchors.get(queue)
            partition.is_first_of_queue = is_batch and queue not in marked
            partition.is_batch = is_batch
            marked.add(queue)
    return partitions


def find_range_to_read(plan: ReadPlan, partition: RangePartition) -> QueueRange | None:
    """Return the range that a task reads for a partition; None means that it reads nothing.

    If the queue is still that of the plan, this is the planned range. If it is not and loss is
    allowed, that is logged: a task of a batch reads what the new topic has of the range, and a task
    of a stream reads nothing, because the next micro-batch reads the new topic. Raises
    OffsetOutOfRangeError if loss is an error, and SluiceError if the broker does not respond.
    """
    assert partition.queue is not None
    planned = QueueRange(partition.queue, partition.start, partition.end)
    bounds = _find_changed_bounds(plan, partition)
    if bounds is None:
        return planned
    if plan.fail_on_data_loss:
        raise recreated_error(partition.queue, partition.end, bounds, partition.anchor)

    consequence = "the next micro-batch reads it"
    if partition.is_batch:
        consequence = "what it has there is read"
    logger.warning(
        "the topic %r was deleted and created again after the read of %d to %d of %s was planned:"
        " %s",
        partition.queue.topic,
        partition.start,
        partition.end,
        queue_label(partition.queue),
        consequence,
    )
    if not partition.is_batch:
        return None
    lowest, highest = bounds
    # The first partition of its queue also reads what the new topic has before the range.
    start = lowest if partition.is_first_of_queue else max(partition.start, lowest)
    end = min(partition.end, highest)
    return replace(planned, start=start, end=end) if start < end else None


def check_after_read(plan: ReadPlan, partition: RangePartition) -> None:
    """Log a warning if the topic was created again while a task has read its partition.

    The rows may then be of both topics. Does nothing if the queue is the same. Raises
    OffsetOutOfRangeError instead of the warning if loss is an error, and SluiceError if the broker
    does not respond.
    """
    assert partition.queue is not None
    bounds = _find_changed_bounds(plan, partition)
    if bounds is not None and plan.fail_on_data_loss:
        raise recreated_error(partition.queue, partition.end, bounds, partition.anchor)
    if bounds is not None:
        logger.warning(
            "the topic %r was deleted and created again while %s was read: the result may contain"
            " rows of both",
            partition.queue.topic,
            queue_label(partition.queue),
        )


def _find_changed_bounds(plan: ReadPlan, partition: RangePartition) -> tuple[int, int] | None:
    """Return the bounds of the partition's queue if the queue is not that of the anchor any more.

    Return None if the queue is the same, or if that cannot be checked: the partition has no anchor,
    or the queue does not exist any more (the pulls that follow report that). Raises SluiceError.
    """
    queue = partition.queue
    anchor = partition.anchor
    if queue is None or anchor is None or anchor.stored_ms is None:
        return None
    channel = BlockingChannel(partition.address, plan.timeout_s, plan.tls)
    try:
        command = sign_request(
            requests.make_probe_request(plan.group, queue, anchor.offset), plan.credentials
        )
        answer = parse_pull_response(channel.call(command), partition.address)
    except RequestError as error:
        if error.code in NO_QUEUE_CODES:
            return None
        raise
    finally:
        channel.close()

    if answer.status is PullStatus.FOUND:
        stored_message = make_anchor(answer.data)
        # A message at another offset means that the queue has a hole there.
        has_hole = stored_message.offset != anchor.offset
        is_same = has_hole or anchor.is_same_message(stored_message)
    else:
        is_same = anchor.offset < answer.offset_max
    return None if is_same else (answer.offset_min, answer.offset_max)
