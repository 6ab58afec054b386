"""Check whether a topic is still the one that a checkpoint or a planned read refers to.

RocketMQ gives a topic no identity. A topic that is deleted and created again begins at offset 0,
and the offsets of an old checkpoint may be valid in it: its first messages would never be read. So
a checkpoint holds an *anchor* of each queue (`client.core.identity`): the offset of a message
before the stream's offset, and when the broker stored it. If that offset has another store time
now, or a message where there was none any more, the topic is another one. The check works with any
broker: it pulls one message. An anchor is renewed before retention removes it. A check is needed

    once for each queue of the checkpoint with which a query begins;
    in each micro-batch, for queues with new messages that still begin at offset 0. If a queue
    begins at a higher offset, a topic that was created again shows by its bounds;
    once a second, for queues without new messages: the new topic may be as long as the old one.

What was planned is read later, in another process. So a partition carries an anchor, and its task
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
from sluicemq.spark.sources.offsets import (
    Anchors,
    Bounds,
    Offsets,
    QueueRange,
    RangePartition,
    ReadPlan,
    place,
)
from sluicemq.wire.codes import ResponseCode

logger = logging.getLogger(__name__)

SHOWN_MAX: Final = 5
"""Queues that an error or a warning names."""
NO_QUEUE: Final = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.INVALID_PARAMETER)
"""What brokers answer to a pull of a topic, or of a queue, that does not exist."""
_FIX: Final = (
    "Set failOnDataLoss=false to read the new topic from its beginning, or start with a new"
    " checkpointLocation."
)


def fetch_store_time(admin: Admin, group: str, queue: MessageQueue, offset: int) -> int | None:
    """Pull the message at `offset` and return when it was stored (milliseconds since 1970); None if
    there is no such message. Raises SluiceError."""
    seen = admin.run(probe_queue(admin.directory, group, queue, offset))
    if seen.reset_to is not None:  # so a RocketMQ broker answers once
        seen = admin.run(probe_queue(admin.directory, group, queue, offset))
    return None if seen.found is None else seen.found.stored_ms


class TopicIdentity:
    """The anchors of the queues that one running query reads. `group` is the consumer group that
    reads; `fails`: lost messages are an error (failOnDataLoss). Every method may raise the client's
    errors."""

    def __init__(self, group: str, *, fails: bool) -> None:
        self._group = group
        self._fails = fails
        self._compared: dict[MessageQueue, tuple[Anchor, int]] = {}
        """The anchor that was last found right, and where the queue began then."""
        self._looked_s: dict[MessageQueue, float] = {}
        self._recreated: dict[str, list[str]] = {}
        """By topic that was created again: what `warn` has to say of its queues."""
        self._gone: set[MessageQueue] = set()

    def is_same(
        self, admin: Admin, queue: MessageQueue, anchor: Anchor | None, bounds: tuple[int, int]
    ) -> bool | None:
        """Return whether the queue is still that of `anchor`. Return None if that is unknown: there
        is no anchor, its offset is not within `bounds` (first offset, end), or the queue has a hole
        there."""
        lowest, highest = bounds
        if anchor is None or not lowest <= anchor.offset < highest:
            return None
        if anchor.stored_ms is None:
            return False
        compared, began = self._compared.get(queue, (None, 0))
        if compared == anchor and 0 < began <= lowest:
            return True
        self._looked_s[queue] = SYSTEM_CLOCK.monotonic_s()
        found = fetch_store_time(admin, self._group, queue, anchor.offset)
        if found is None:  # a hole, such as a broker's compaction leaves
            return None
        if found == anchor.stored_ms:
            self._compared[queue] = anchor, lowest
        return found == anchor.stored_ms

    def resume_offset(
        self,
        admin: Admin,
        queue: MessageQueue,
        offset: int,
        bounds: tuple[int, int],
        anchor: Anchor | None,
    ) -> int:
        """Return the offset at which a stream at `offset` goes on: `offset` itself if the queue is
        the same. If loss is allowed, it is the beginning of a topic that was created again, or the
        end of a queue whose newest messages were lost. Raises OffsetOutOfRangeError if loss is an
        error."""
        lowest, highest = bounds
        if offset == highest:
            passed_s = SYSTEM_CLOCK.monotonic_s() - self._looked_s.get(queue, float("-inf"))
            if passed_s < CHECK_PERIOD_S:
                return offset
        is_same = self.is_same(admin, queue, anchor, bounds)
        if offset <= highest and is_same is not False:
            return offset
        if self._fails:
            raise recreated_error(queue, offset, bounds, anchor if is_same is False else None)
        if is_same:
            logger.warning(
                "%s of %r lost messages: the stream, which was at %d, goes on at %d",
                place(queue), queue.topic, offset, highest,
            )  # fmt: skip
            return highest
        self._recreated.setdefault(queue.topic, []).append(f"{offset} of {place(queue)}")
        return lowest

    def warn(self) -> None:
        """Log once for each topic that it was created again, naming the queues that `resume_offset`
        has found since the last call."""
        for topic, queues in self._recreated.items():
            more = f" and {len(queues) - SHOWN_MAX} more" if len(queues) > SHOWN_MAX else ""
            logger.warning(
                "the topic %r was deleted and created again: the stream, which was at %s%s, goes"
                " on at its beginning", topic, ", ".join(queues[:SHOWN_MAX]), more,
            )  # fmt: skip
        self._recreated.clear()

    def check_gone(self, gone: Offsets) -> None:
        """Log that the queues in `gone`, with the offsets up to which they were read, have
        disappeared; each queue is logged once. Raises OffsetOutOfRangeError instead if loss is an
        error."""
        news = {queue: offset for queue, offset in gone.items() if queue not in self._gone}
        if not news:
            return
        shown = ", ".join(
            f"{place(queue)} of {queue.topic!r} (read up to offset {offset})"
            for queue, offset in sorted(news.items())[:SHOWN_MAX]
        )
        more = f" and {len(news) - SHOWN_MAX} more" if len(news) > SHOWN_MAX else ""
        what = f"queues disappeared: {shown}{more}; messages behind these offsets may be unread"
        if self._fails:
            raise OffsetOutOfRangeError(
                f"{what}.",
                fix="Set failOnDataLoss=false to go on with the queues that are there, or start"
                " with a new checkpointLocation.",
            )
        logger.warning("%s; the stream goes on with the other queues", what)
        self._gone.update(news)

    def remaining_range(
        self,
        admin: Admin,
        one: QueueRange,
        bounds: tuple[int, int],
        anchors: Sequence[Anchor | None],
    ) -> QueueRange:
        """Return the part of the range `one` that can still be read, and log if something is
        missing. `anchors` are empty, or those of the end and of the start of the range, in this
        order. Raises OffsetOutOfRangeError if something is missing and loss is an error."""
        queue, (lowest, highest) = one.queue, bounds
        found = [self.is_same(admin, queue, anchor, bounds) for anchor in anchors]
        if self._fails:
            if False in found or one.end > highest:
                other = anchors[found.index(False)] if False in found else None
                raise recreated_error(queue, one.end, bounds, other)
            if one.start < lowest:
                raise OffsetOutOfRangeError(
                    f"retention passed the stream: {place(queue)} of {queue.topic!r} begins at"
                    f" {lowest} now, the stream was at {one.start}:"
                    f" {min(lowest, one.end) - one.start} messages are gone.",
                    fix="Set failOnDataLoss=false to go on with what is left.",
                )
        start, end = max(one.start, lowest), min(one.end, highest)
        if found[:1] == [False] or (one.end > highest and True not in found):
            start = end  # it was in a topic that is no more
        elif False in found:
            start = lowest  # it began in the topic before
        left = QueueRange(queue, start, max(start, end))
        if left != one:
            logger.warning(
                "%s: %d messages of the offsets %d to %d are left and read; the others are lost "
                "(failOnDataLoss=false)", place(queue), left.size, one.start, one.end,
            )  # fmt: skip
        return left

    def renew_anchors(self, admin: Admin, known: Anchors, moved: Bounds) -> Anchors:
        """Return `known` with new anchors for the queues that `moved`: for each it has the first
        offset and the offset behind the last message that was read. The new anchor is that last
        message. An old anchor stays while it lies in the newer half of the messages before it."""
        found = dict(known)
        for queue, (lowest, end) in moved.items():
            old, last = found.pop(queue, None), end - 1
            if old is not None and lowest <= old.offset and (
                (old.offset - lowest) * 2 >= last - lowest
            ):  # fmt: skip
                found[queue] = old
            elif 0 <= last < lowest:
                found[queue] = Anchor(last, None)
            elif last >= lowest:
                time_ms = fetch_store_time(admin, self._group, queue, last)
                if time_ms is not None:
                    self._looked_s[queue] = SYSTEM_CLOCK.monotonic_s()
                    found[queue] = Anchor(last, time_ms)
                    self._compared[queue] = found[queue], lowest
        return found


def recreated_error(
    queue: MessageQueue, offset: int, bounds: tuple[int, int], anchor: Anchor | None
) -> OffsetOutOfRangeError:
    """Return the error for a queue that is not the one that was read up to `offset`. `anchor` is
    the message that the queue does not hold any more; None: the queue ends before `offset`."""
    lowest, highest = bounds
    if anchor is None:
        what = (
            f"the stream is at {offset} of {place(queue)} of {queue.topic!r}, which ends at"
            f" {highest}: the topic was deleted and created again, or the broker lost messages."
        )
    else:
        what = (
            f"the topic {queue.topic!r} was deleted and created again: {place(queue)} holds another"
            f" message at offset {anchor.offset} than the one that was there; the read is at"
            f" {offset}, the new topic has the offsets {lowest} to {highest}."
        )
    return OffsetOutOfRangeError(what, fix=_FIX)


# ---- queues that are not there any more


def bounds_of(admin: Admin, topics: Collection[str]) -> tuple[Bounds, list[str]]:
    """Return the bounds of every readable queue, and the topics that no broker serves. Raises
    SluiceError."""
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


def existing_topics(admin: Admin, topics: Sequence[str], *, fails: bool) -> Sequence[str]:
    """Return the topics of a batch that exist, and log the others. Raises RouteNotFoundError for
    the first missing topic if none exists, or if `fails` is set."""
    missing = [topic for topic in topics if admin.find_route(topic) is None]
    if missing and (fails or len(missing) == len(topics)):
        admin.route(missing[0])  # raises, and says why
    if missing:
        logger.warning(
            "topics that do not exist are not read (failOnDataLoss=false): %s%s",
            ", ".join(missing[:SHOWN_MAX]),
            f" and {len(missing) - SHOWN_MAX} more" if len(missing) > SHOWN_MAX else "",
        )
    return [topic for topic in topics if topic not in missing]


def gone_queues(admin: Admin, known: Offsets, bounds: Bounds) -> Offsets:
    """Return the queues of `known` that have disappeared, with their offsets: they are not in
    `bounds`, although their broker is registered. A queue that still answers and ends at its offset
    does not count: its topic has fewer queues to read now. Raises SluiceError."""
    absent = {queue: offset for queue, offset in known.items() if queue not in bounds}
    if not absent:
        return {}
    registered = admin.cluster_info().brokers
    return {
        queue: offset
        for queue, offset in absent.items()
        if queue.broker in registered and not _is_read(admin, queue, offset)
    }


def _is_read(admin: Admin, queue: MessageQueue, offset: int) -> bool:
    try:
        return 0 < offset == admin.offsets(queue)[1]
    except SluiceError:
        return False


# ---- of what was planned


def anchors_at_end(admin: Admin, group: str, ranges: Sequence[QueueRange]) -> Anchors:
    """Return an anchor for each queue of a batch: the last message before the end of its ranges.
    Raises SluiceError."""
    ends: Offsets = {}
    for one in ranges:
        ends[one.queue] = max(one.end, ends.get(one.queue, 0))
    found = {
        queue: fetch_store_time(admin, group, queue, end - 1) for queue, end in ends.items() if end
    }
    return {
        queue: Anchor(ends[queue] - 1, time_ms)
        for queue, time_ms in found.items()
        if time_ms is not None
    }


def set_anchors(
    parts: Sequence[RangePartition], anchors: Anchors, *, is_batch: bool
) -> Sequence[RangePartition]:
    """Set the anchor of each partition's queue, in place, and return `parts`. In a batch, also mark
    the first partition of each queue: if loss is allowed, it reads a topic that was created again
    from its beginning."""
    begun: set[MessageQueue] = set()
    for part in parts:
        if part.queue is not None:
            part.anchor = anchors.get(part.queue)
            part.begins = is_batch and part.queue not in begun
            part.is_batch = is_batch
            begun.add(part.queue)
    return parts


def range_to_read(plan: ReadPlan, part: RangePartition) -> QueueRange | None:
    """Check, in a task, whether the queue of a partition is that of the plan. Return the range to
    read: the planned one if it is. If it is not and loss is allowed, return what the new topic has
    of the range in a batch, and None in a stream. Raises OffsetOutOfRangeError if loss is an error,
    and SluiceError if the broker does not answer."""
    assert part.queue is not None
    one = QueueRange(part.queue, part.start, part.end)
    bounds = _changed(plan, part)
    if bounds is None:
        return one
    if plan.fail_on_data_loss:
        raise recreated_error(part.queue, part.end, bounds, part.anchor)
    logger.warning(
        "the topic %r was deleted and created again after the read of %d to %d of %s was planned:"
        " %s", part.queue.topic, part.start, part.end, place(part.queue),
        "what it has there is read" if part.is_batch else "the next micro-batch reads it",
    )  # fmt: skip
    if not part.is_batch:
        return None
    lowest, highest = bounds
    start = lowest if part.begins else max(part.start, lowest)
    left = replace(one, start=start, end=max(start, min(part.end, highest)))
    return left if left.size else None


def check_part(plan: ReadPlan, part: RangePartition) -> None:
    """Check, after a task has read its partition, whether the topic was created again meanwhile. If
    it was, log that; raises OffsetOutOfRangeError instead if loss is an error, and SluiceError if
    the broker does not answer."""
    assert part.queue is not None
    bounds = _changed(plan, part)
    if bounds is not None and plan.fail_on_data_loss:
        raise recreated_error(part.queue, part.end, bounds, part.anchor)
    if bounds is not None:
        logger.warning(
            "the topic %r was deleted and created again while %s was read: rows of both may be"
            " among the result", part.queue.topic, place(part.queue),
        )  # fmt: skip


def _changed(plan: ReadPlan, part: RangePartition) -> tuple[int, int] | None:
    """Return the bounds of the partition's queue if it is not that of the anchor any more, else
    None. A queue that does not exist any more gives None: the pulls that follow report it. Raises
    SluiceError."""
    queue, anchor = part.queue, part.anchor
    if queue is None or anchor is None or anchor.stored_ms is None:
        return None
    channel = BlockingChannel(part.address, plan.timeout_s, plan.tls)
    try:
        command = sign_request(
            requests.probe_message(plan.group, queue, anchor.offset), plan.credentials
        )
        answer = parse_pull_response(channel.call(command), part.address)
    except RequestError as error:
        if error.code in NO_QUEUE:
            return None
        raise
    finally:
        channel.close()
    is_same = anchor.offset < answer.offset_max
    if answer.status is PullStatus.FOUND:
        found = make_anchor(answer.data)
        is_same = found.offset != anchor.offset or anchor.is_same_message(found)
    return None if is_same else (answer.offset_min, answer.offset_max)
