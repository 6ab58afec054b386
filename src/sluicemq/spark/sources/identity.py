"""Whether a topic is still the one that a checkpoint, or a planned read, is of.

RocketMQ gives a topic no identity. One that is deleted and created again begins at offset 0 again,
and the offsets of an old checkpoint are places in it like any others: its first messages would
never be read. So a checkpoint holds a witness of each queue, an *anchor* (`client.core.identity`):
the offset of a message before the stream's, and when the broker stored it. Another store time at
that offset, or a message where there was none any more, is another topic. Any broker can be asked:
it is a pull of one message. An anchor is renewed when retention comes near it, so a look is needed

    once for each queue of a checkpoint that a query begins with;
    in each micro-batch for queues that moved and still have their first message: a queue whose
    first message is gone cannot begin again without beginning lower, which its bounds tell;
    once a second for queues that did not move: the new topic may be as long as the old one.

What was planned is read later, in another process. So a partition travels with an anchor, and its
task looks before and after it reads: the topic may have been created again in between.

A queue that is not in the route any more is *gone* when its broker is registered without it. A
broker that is away keeps its queues.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.identity import PROOF_PERIOD_S, Anchor, anchor_of, look
from sluicemq.client.core.names import signed
from sluicemq.client.core.requests import PullStatus, pull_answer
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


def stored_ms(admin: Admin, group: str, queue: MessageQueue, offset: int) -> int | None:
    """Return when the message at `offset` was stored (milliseconds since 1970), None when there is
    no such message. Raises SluiceError."""
    seen = admin.run(look(admin.directory, group, queue, offset))
    if seen.reset_to is not None:  # so a RocketMQ broker answers once
        seen = admin.run(look(admin.directory, group, queue, offset))
    return None if seen.found is None else seen.found.stored_ms


class TopicIdentity:
    """Compares and makes anchors for one running query. `group` is who reads; `fails`: loss is an
    error (failOnDataLoss). Every method may raise the client's errors."""

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
        """Whether the topic is the anchor's; None when nobody can tell."""
        lowest, highest = bounds
        if anchor is None or not lowest <= anchor.offset < highest:
            return None
        if anchor.stored_ms is None:
            return False
        compared, began = self._compared.get(queue, (None, 0))
        if compared == anchor and 0 < began <= lowest:
            return True
        self._looked_s[queue] = SYSTEM_CLOCK.monotonic_s()
        found = stored_ms(admin, self._group, queue, anchor.offset)
        if found is None:  # a hole, such as a broker's compaction leaves
            return None
        if found == anchor.stored_ms:
            self._compared[queue] = anchor, lowest
        return found == anchor.stored_ms

    def resumed(
        self,
        admin: Admin,
        queue: MessageQueue,
        offset: int,
        bounds: tuple[int, int],
        anchor: Anchor | None,
    ) -> int:
        """Return where a stream at `offset` goes on: there, or at the beginning of a topic that was
        created again if loss is allowed. Raises OffsetOutOfRangeError."""
        lowest, highest = bounds
        if offset == highest:
            passed_s = SYSTEM_CLOCK.monotonic_s() - self._looked_s.get(queue, float("-inf"))
            if passed_s < PROOF_PERIOD_S:
                return offset
        is_same = self.is_same(admin, queue, anchor, bounds)
        if offset <= highest and is_same is not False:
            return offset
        if self._fails:
            raise recreated(queue, offset, bounds, anchor if is_same is False else None)
        if is_same:
            logger.warning(
                "%s of %r lost messages: the stream, which was at %d, goes on at %d",
                place(queue), queue.topic, offset, highest,
            )  # fmt: skip
            return highest
        self._recreated.setdefault(queue.topic, []).append(f"{offset} of {place(queue)}")
        return lowest

    def warn(self) -> None:
        """Say once for each topic that it was created again, of all queues that `resumed` has
        found since the last call."""
        for topic, queues in self._recreated.items():
            more = f" and {len(queues) - SHOWN_MAX} more" if len(queues) > SHOWN_MAX else ""
            logger.warning(
                "the topic %r was deleted and created again: the stream, which was at %s%s, goes"
                " on at its beginning", topic, ", ".join(queues[:SHOWN_MAX]), more,
            )  # fmt: skip
        self._recreated.clear()

    def check_gone(self, gone: Offsets) -> None:
        """Say that queues with these offsets disappeared. Raises OffsetOutOfRangeError if loss is
        an error."""
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
                cure="Set failOnDataLoss=false to go on with the queues that are there, or start"
                " with a new checkpointLocation.",
            )
        logger.warning("%s; the stream goes on with the other queues", what)
        self._gone.update(news)

    def left_of(
        self,
        admin: Admin,
        one: QueueRange,
        bounds: tuple[int, int],
        anchors: Sequence[Anchor | None],
    ) -> QueueRange:
        """The range, or what is left of it when loss is allowed. `anchors` are those of its end and
        of its start where they have to be compared. Raises OffsetOutOfRangeError."""
        queue, (lowest, highest) = one.queue, bounds
        found = [self.is_same(admin, queue, anchor, bounds) for anchor in anchors]
        if self._fails:
            if False in found or one.end > highest:
                other = anchors[found.index(False)] if False in found else None
                raise recreated(queue, one.end, bounds, other)
            if one.start < lowest:
                raise OffsetOutOfRangeError(
                    f"retention passed the stream: {place(queue)} of {queue.topic!r} begins at"
                    f" {lowest} now, the stream was at {one.start}:"
                    f" {min(lowest, one.end) - one.start} messages are gone.",
                    cure="Set failOnDataLoss=false to go on with what is left.",
                )
        start, end = max(one.start, lowest), min(one.end, highest)
        if found[:1] == [False] or (one.end > highest and True not in found):
            start = end  # it was in a topic that is no more
        elif False in found:
            start = lowest  # it began in the topic before
        left = QueueRange(queue, start, max(start, end))
        if left != one:
            logger.warning(
                "%s: of the messages from offset %d to %d %d are there and read",
                place(queue), one.start, one.end, left.size,
            )  # fmt: skip
        return left

    def anchored(self, admin: Admin, known: Anchors, moved: Bounds) -> Anchors:
        """`known` with the anchors of queues that `moved`: where each begins, and the offset behind
        the last message read of it. An anchor stays as long as it lies in the newer half of the
        messages before that offset."""
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
                time_ms = stored_ms(admin, self._group, queue, last)
                if time_ms is not None:
                    self._looked_s[queue] = SYSTEM_CLOCK.monotonic_s()
                    found[queue] = Anchor(last, time_ms)
                    self._compared[queue] = found[queue], lowest
        return found


def recreated(
    queue: MessageQueue, offset: int, bounds: tuple[int, int], anchor: Anchor | None
) -> OffsetOutOfRangeError:
    """Make the error for a queue that is not the one that was read up to `offset`. `anchor` is what
    it does not hold any more; None: it ends before `offset`."""
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
    return OffsetOutOfRangeError(what, cure=_FIX)


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


def served(admin: Admin, topics: Sequence[str], *, fails: bool) -> Sequence[str]:
    """Return the topics of a batch that there are. With `fails`, or if there is none at all, raises
    RouteNotFoundError for the first one that is missing."""
    missing = [topic for topic in topics if admin.find_route(topic) is None]
    if missing and (fails or len(missing) == len(topics)):
        admin.route(missing[0])  # raises, and says why
    if missing:
        logger.warning(
            "topics that do not exist are not read (failOnDataLoss=false): %s",
            ", ".join(missing[:SHOWN_MAX]),
        )
    return [topic for topic in topics if topic not in missing]


def gone_queues(admin: Admin, known: Offsets, bounds: Bounds) -> Offsets:
    """Return the queues of `known` that disappeared, with their offsets: those that are not among
    `bounds` though their broker is registered. A queue that still answers and holds nothing behind
    its offset (a topic with fewer queues to read) is none of them. Raises SluiceError."""
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
    found = {queue: stored_ms(admin, group, queue, end - 1) for queue, end in ends.items() if end}
    return {
        queue: Anchor(ends[queue] - 1, time_ms)
        for queue, time_ms in found.items()
        if time_ms is not None
    }


def anchored_parts(
    parts: Sequence[RangePartition], anchors: Anchors, *, is_batch: bool
) -> Sequence[RangePartition]:
    """Give each partition the anchor of its queue. In a batch the first partition of each queue
    reads a topic that was created again from its beginning, if loss is allowed."""
    begun: set[MessageQueue] = set()
    for part in parts:
        if part.queue is not None:
            part.anchor = anchors.get(part.queue)
            part.begins = is_batch and part.queue not in begun
            part.is_batch = is_batch
            begun.add(part.queue)
    return parts


def left_of_part(plan: ReadPlan, part: RangePartition) -> QueueRange | None:
    """Look, in a task, whether a partition's queue is the one of its plan. Return what has to be
    read: the range, or if loss is allowed what the new topic has of it, or None for nothing.
    Raises OffsetOutOfRangeError, and SluiceError when the broker does not answer."""
    assert part.queue is not None
    one = QueueRange(part.queue, part.start, part.end)
    bounds = _changed(plan, part)
    if bounds is None:
        return one
    if plan.fail_on_data_loss:
        raise recreated(part.queue, part.end, bounds, part.anchor)
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
    """Look, when a task has read its partition, whether the topic was created again meanwhile.
    Raises OffsetOutOfRangeError."""
    assert part.queue is not None
    bounds = _changed(plan, part)
    if bounds is not None and plan.fail_on_data_loss:
        raise recreated(part.queue, part.end, bounds, part.anchor)
    if bounds is not None:
        logger.warning(
            "the topic %r was deleted and created again while %s was read: rows of both may be"
            " among the result", part.queue.topic, place(part.queue),
        )  # fmt: skip


def _changed(plan: ReadPlan, part: RangePartition) -> tuple[int, int] | None:
    """The bounds of a queue that is not the anchor's any more, None when it is. A queue that does
    not exist any more is left to the pulls that follow."""
    queue, anchor = part.queue, part.anchor
    if queue is None or anchor is None or anchor.stored_ms is None:
        return None
    channel = BlockingChannel(part.address, plan.timeout_s, plan.tls)
    try:
        command = signed(requests.look(plan.group, queue, anchor.offset), plan.credentials)
        answer = pull_answer(channel.call(command), part.address)
    except RequestError as error:
        if error.code in NO_QUEUE:
            return None
        raise
    finally:
        channel.close()
    is_same = anchor.offset < answer.offset_max
    if answer.status is PullStatus.FOUND:
        found = anchor_of(answer.data)
        is_same = found.offset != anchor.offset or anchor.agrees(found)
    return None if is_same else (answer.offset_min, answer.offset_max)
