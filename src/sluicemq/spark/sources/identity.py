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
    """Pull the message at `offset`, and return the time when it was stored (ms since 1970).

    Return None if there is no such message. Raises SluiceError if the broker fails.
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
        """Create the checks of a query that reads as the consumer group `group`.

        If `fail_on_data_loss` is True, the methods raise an error for lost messages. Otherwise they
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
        """Return whether the queue still contains a known message, the anchor.

        If its topic was deleted and created again, it contains another message or none at this
        offset. `bounds` are (first offset, end offset) of the queue. None means that the check is
        not possible: `anchor` is None, its offset is not within `bounds`, or the queue has no
        message there.

        The last positive result is remembered. The broker is not asked again for the same anchor as
        long as the queue does not begin at a lower offset.
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

        Normally, this is `offset`. There are two exceptions, for which OffsetOutOfRangeError is
        raised if loss is an error. If the topic was deleted and created again, the stream continues
        at the first offset. This is logged later, by `log_recreated_topics`. If the queue has lost
        its newest messages and ends before `offset`, the stream continues at its end, and this is
        logged.

        `anchor` is the known message that shows whether the topic is still the same. If `offset` is
        the end of the queue, the broker is asked for it at most once in `CHECK_PERIOD_S` seconds.
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
        """Log one warning for each topic that was deleted and created again, with its queues.

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
        """Log that the queues in `gone` have disappeared, each queue once.

        `gone` has the offset up to which each queue was read. If loss is an error, raise
        OffsetOutOfRangeError instead. Do nothing if every queue was logged before.
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

        `anchors` is empty, or contains a known message at the end of the micro-batch, and then one
        at its start; None if there is none. If the message at the end has changed, nothing of the
        range is left. If only the message at the start has changed, the range begins at the first
        offset of the new topic.

        Lost messages are logged. If loss is an error, OffsetOutOfRangeError is raised instead.
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
        """Return the anchors of a stream after a micro-batch.

        An anchor is a message that shows later whether the queue is still the same. `moved` has,
        for each queue that has advanced, its first stored offset and the offset after the last
        message that was read. This last message becomes the new anchor. An old anchor stays if it
        is recent: its offset is in the newer half of the stored messages before the last one. A
        queue of `moved` has no anchor in the result if it is empty, or if it has a hole at the last
        message. Other queues keep their `known_anchors`.
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

    The topic may have been deleted and created again since the range was planned. `is_same` is
    empty, or has two items: whether the queue still contains the known message at the end of the
    micro-batch, and the same for its start. None means that this is unknown. The result is empty if
    the end is not of the present topic.
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
    """Return the error for a queue that is not the queue that was read before.

    `offset` is the position of the read, and `bounds` are (first offset, end offset) of the queue.
    `anchor` is the known message that the queue does not contain any more. None means that the
    queue ends before `offset`.
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
    """Return (bounds of every readable queue of the topics, topics that do not exist).

    The bounds of a queue are its first offset and the end of its offsets. Raises SluiceError.
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
    """Return the queues of `known_offsets` that do not exist any more, with their offsets.

    A queue is gone if it is not in `bounds`, although its broker is registered. It is not gone if
    it still responds and ends at its known offset. Then everything in it was read, and only the
    number of readable queues of its topic was reduced. Raises SluiceError if a server fails.
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
        _, end = admin.offsets(queue)
    except SluiceError:
        return False
    return 0 < offset == end


# ---- planned partitions


def fetch_end_anchors(admin: Admin, group: str, ranges: Sequence[QueueRange]) -> Anchors:
    """Return the last message before the end of each queue of a batch, as an anchor.

    A task recognises the queue by this message. A queue has no anchor if there is no message at
    that offset. Raises SluiceError if a broker fails.
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

    The partitions are changed in place. A partition without a queue is not changed. In a batch, the
    first partition of each queue gets `is_first_of_queue`. If its topic is created again and loss
    is allowed, it reads the new topic from its beginning.
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
    """Return the range that a task reads for a partition, or None if it reads nothing.

    If the queue is still the same, this is the planned range. If it is not and loss is an error,
    OffsetOutOfRangeError is raised. If loss is allowed, the change is logged. A task of a batch
    then reads the part of the range that the new topic has. A task of a stream reads nothing,
    because the next micro-batch reads the new topic. Raises SluiceError if the broker does not
    respond.
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
    """Check that a topic was not deleted and created again while a task has read its partition.

    If it was, the rows may be of both topics. Then log a warning, or raise OffsetOutOfRangeError if
    loss is an error. Raises SluiceError if the broker does not respond.
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
    """Return the bounds of a partition's queue if the queue is not the same as when it was planned.

    Return None if the queue contains the partition's anchor, and so is the same. Return None too if
    the partition has no anchor, or if the queue does not exist any more, which the following pulls
    report. Raises SluiceError if the broker fails.
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
