"""Is a topic still the one that a checkpoint is of?

RocketMQ gives a topic no identity. One that is deleted and made anew begins at offset 0 again, and
the offsets of an old checkpoint are places in it like any others: its first messages would never be
read. So a checkpoint holds a witness of each queue, an *anchor*: the offset of a message before the
stream's, and when the broker stored it. Another store time at that offset, or a message where there
was none any more, is another topic. Any broker can be asked: it is a pull of one message.

An anchor is renewed when retention comes near it, so a look is needed

    once for each queue of a checkpoint that a query begins with, and
    in each micro-batch for queues that moved and still have their first message: a queue whose
    first message is gone cannot begin anew without beginning lower, which its bounds tell.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import PullStatus, pull_answer
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import OffsetOutOfRangeError
from sluicemq.model.subscription import ALL, Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records
from sluicemq.spark.offsets import Anchor, Anchors, QueueRange, place

logger = logging.getLogger(__name__)
_BYTES_MAX: Final = 1024
"""A broker gives one message at least, however large."""


def stored_ms(admin: Admin, group: str, queue: MessageQueue, offset: int) -> int | None:
    """When the message at `offset` was stored, in ms since 1970; None when there is none."""
    command = requests.pull(
        group, queue, offset, count_max=1, bytes_max=_BYTES_MAX,
        subscription=Subscription(queue.topic, ALL),
    )  # fmt: skip
    address = admin.address(queue)
    answer = pull_answer(admin.call(address, command), address)
    if answer.status is not PullStatus.FOUND:
        return None
    first = next(iter(decode_records(answer.data, broker=queue.broker)), None)
    return None if first is None or first.queue_offset != offset else first.store_time_ms


class TopicIdentity:
    """Compares and makes anchors for one running query. `group` is who reads; `fails`: loss is an
    error (failOnDataLoss). Every method may raise the client's errors."""

    def __init__(self, group: str, *, fails: bool) -> None:
        self._group = group
        self._fails = fails
        self._compared: dict[MessageQueue, tuple[Anchor, int]] = {}
        """The anchor that was last found right, and where the queue began then."""

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
        """Where a stream at `offset` goes on: there, or in a topic made anew at its beginning when
        loss is allowed. Raises OffsetOutOfRangeError."""
        lowest, highest = bounds
        if offset == highest:
            return offset
        is_same = self.is_same(admin, queue, anchor, bounds)
        if offset <= highest and is_same is not False:
            return offset
        if self._fails:
            raise _made_anew(queue, offset, highest, anchor if is_same is False else None)
        goes_on = highest if is_same else lowest
        logger.warning(
            "%s of %r %s: the stream, which was at %d, goes on at %d", place(queue), queue.topic,
            "lost messages" if is_same else "was deleted and made anew", offset, goes_on,
        )  # fmt: skip
        return goes_on

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
        told = [self.is_same(admin, queue, anchor, bounds) for anchor in anchors]
        if self._fails:
            if False in told or one.end > highest:
                other = anchors[told.index(False)] if False in told else None
                raise _made_anew(queue, one.end, highest, other)
            if one.start < lowest:
                raise OffsetOutOfRangeError(
                    f"retention passed the stream: {place(queue)} of {queue.topic!r} begins at"
                    f" {lowest} now, the stream was at {one.start}:"
                    f" {min(lowest, one.end) - one.start} messages are gone.",
                    cure="Set failOnDataLoss=false to go on with what is left.",
                )
        start, end = max(one.start, lowest), min(one.end, highest)
        if told[:1] == [False] or (one.end > highest and True not in told):
            start = end  # it was in a topic that is no more
        elif False in told:
            start = lowest  # it began in the topic before
        left = QueueRange(queue, start, max(start, end))
        if left != one:
            logger.warning(
                "%s: of the messages from offset %d to %d %d are there and read",
                place(queue), one.start, one.end, left.size,
            )  # fmt: skip
        return left

    def anchored(
        self, admin: Admin, known: Anchors, moved: Mapping[MessageQueue, tuple[int, int]]
    ) -> Anchors:
        """`known` with the anchors of queues that `moved`: where each begins, and the offset behind
        the last message read of it."""
        made = {queue: self._anchor(admin, queue, known.get(queue), *of)
                for queue, of in moved.items()}  # fmt: skip
        return {queue: one for queue, one in (known | made).items() if one is not None}

    def _anchor(
        self, admin: Admin, queue: MessageQueue, known: Anchor | None, lowest: int, end: int
    ) -> Anchor | None:
        """`known` as long as it lies in the newer half of the messages before `end`."""
        last = end - 1
        if known is not None and lowest <= known.offset and (
            (known.offset - lowest) * 2 >= last - lowest
        ):  # fmt: skip
            return known
        if last < lowest:
            return Anchor(last, None) if last >= 0 else None
        found = stored_ms(admin, self._group, queue, last)
        if found is None:
            return None
        made = Anchor(last, found)
        self._compared[queue] = made, lowest
        return made


def _made_anew(
    queue: MessageQueue, offset: int, highest: int, anchor: Anchor | None
) -> OffsetOutOfRangeError:
    """`anchor` is what the topic does not hold any more; None: it ends before the stream."""
    if anchor is None:
        what = (
            f"the stream is at {offset} of {place(queue)} of {queue.topic!r}, which ends at"
            f" {highest}: the topic was deleted and made anew, or the broker lost messages."
        )
    else:
        what = (
            f"the topic {queue.topic!r} was deleted and made anew: {place(queue)} holds another"
            f" message at offset {anchor.offset} than the one that the stream has seen there."
        )
    return OffsetOutOfRangeError(
        what,
        cure="Set failOnDataLoss=false to read the new topic from its beginning, or start with a"
        " new checkpointLocation.",
    )
