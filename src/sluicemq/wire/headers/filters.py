"""Headers of our own requests about filters: exact lag, and an expression tried on stored messages.

Only SluiceMQ brokers know them; docs/requests.md describes the bodies.
"""

from sluicemq.wire.declare import header, int32, int64, text


@header
class FilteredLagRequest:
    """900131: of one topic, or of all that the group reads; with an expression, as if the group
    subscribed to it."""

    group: str = text("consumerGroup")
    topic: str | None = text("topic", default=None)
    expression: str | None = text("subscription", default=None)
    kind: str | None = text("expressionType", default=None)


@header
class TryFilterRequest:
    """900132: messages stored from `begin_ms` to `end_ms`, at most `count_max` of them, the newest
    of each queue; beside the filter of a group, when one is named."""

    topic: str = text("topic")
    expression: str = text("subscription")
    kind: str | None = text("expressionType", default=None)
    group: str | None = text("consumerGroup", default=None)
    begin_ms: int | None = int64("beginTimestamp", default=None)
    end_ms: int | None = int64("endTimestamp", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)
