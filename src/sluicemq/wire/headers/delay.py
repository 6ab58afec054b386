"""Headers of our own requests about messages that wait: who waits, and taking one back.

Only SluiceMQ brokers know them; docs/requests.md describes the bodies.
"""

from sluicemq.wire.declare import header, int32, text


@header
class ListDelayedRequest:
    """900101: a page of what waits; `cursor` from the answer before, absent at first."""

    topic: str | None = text("topic", default=None)
    key: str | None = text("key", default=None)
    cursor: str | None = text("cursor", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


@header
class ListDelayedResponse:
    """Answer to 900101: without `cursor` there is no further page. The body lists the messages."""

    cursor: str | None = text("cursor", default=None)


@header
class CancelDelayedRequest:
    """900102: `handle` of a listed message."""

    handle: str = text("handle")
