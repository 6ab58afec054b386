"""Declared headers of POP, as `headers.py` declares the others (spec/grpc.md §8).

What release 5.5 has added is read as well: `liteTopic` names a child of a
topic of light ones, `suspend` is a change of the invisible time that is no failed attempt.
"""

from typing import Final

from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import boolean, int32, int64, text
from sluicemq.wire.headers import answer, request

UNSET: Final = "not set any response code"
"""The remark of the real broker's answers that have no other."""


@request(Code.POLLING_INFO)
class PollingInfoRequest:
    group: str = text("consumerGroup")
    topic: str = text("topic")
    queue_id: int = int32("queueId")
    broker: str | None = text("bname", default=None)


@request(Code.PEEK_MESSAGE)
class PeekMessageRequest(PollingInfoRequest):
    count_max: int = int32("maxMsgNums")


@request(Code.POP_MESSAGE)
class PopMessageRequest(PeekMessageRequest):
    """`queue_id` below 0 is every queue; `born_time_ms` 0 is now; `init_mode` 0 begins with the
    first message and 1 behind the last one, where the group has no offset."""

    invisible_ms: int = int64("invisibleTime")
    poll_ms: int = int64("pollTime")
    born_time_ms: int = int64("bornTime", default=0)
    init_mode: int = int32("initMode", default=0)
    expression_kind: str | None = text("expType", default=None)
    expression: str | None = text("exp", default=None)
    order: bool = boolean("order", default=False)
    attempt_id: str | None = text("attemptId", default=None)


@answer(Code.POP_MESSAGE, Code.PEEK_MESSAGE)
class PopMessageResponse:
    """Every answer has the numbers, also one that says what is wrong; the texts only where queues
    were looked at."""

    pop_ms: int = int64("popTime", default=0)
    invisible_ms: int = int64("invisibleTime", default=0)
    revive_queue: int = int32("reviveQid", default=0)
    rest_count: int = int64("restNum", default=0)
    start_offset_info: str | None = text("startOffsetInfo", default=None)
    message_offset_info: str | None = text("msgOffsetInfo", default=None)
    order_count_info: str | None = text("orderCountInfo", default=None)


@request(Code.ACK_MESSAGE)
class AckMessageRequest(PollingInfoRequest):
    """`topic` is the one that the message is stored in, `handle` what its pop has given it."""

    handle: str = text("extraInfo")
    offset: int = int64("offset")
    lite_topic: str | None = text("liteTopic", default=None)


@request(Code.CHANGE_MESSAGE_INVISIBLETIME)
class ChangeInvisibleTimeRequest(AckMessageRequest):
    invisible_ms: int = int64("invisibleTime")
    suspend: bool = boolean("suspend", default=False)


@answer(Code.CHANGE_MESSAGE_INVISIBLETIME)
class ChangeInvisibleTimeResponse:
    """What differs in the message's new handle."""

    pop_ms: int = int64("popTime", default=0)
    invisible_ms: int = int64("invisibleTime", default=0)
    revive_queue: int = int32("reviveQid", default=0)


@answer(Code.POLLING_INFO)
class PollingInfoResponse:
    count: int = int32("pollingNum", default=0)


@request(Code.NOTIFICATION)
class NotificationRequest(PollingInfoRequest):
    """Is there something to pop?"""

    poll_ms: int = int64("pollTime")
    born_time_ms: int = int64("bornTime", default=0)
    order: bool = boolean("order", default=False)
    attempt_id: str | None = text("attemptId", default=None)
    expression_kind: str | None = text("expType", default=None)
    expression: str | None = text("exp", default=None)


@request(Code.SLUICE_IN_FLIGHT)
class InFlightRequest:
    """What a group has popped; None: of all topics, queues, offsets."""

    group: str = text("consumerGroup")
    topic: str | None = text("topic", default=None)
    queue_id: int | None = int32("queueId", default=None)
    offset: int | None = int64("queueOffset", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


@answer(Code.NOTIFICATION)
class NotificationResponse:
    has_messages: bool = boolean("hasMsg", default=False)
    is_full: bool = boolean("pollingFull", default=False)
