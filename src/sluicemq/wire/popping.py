"""What POP says: handles, the records of what is in flight (spec/delivery.md §7), headers.

    Handle            by which a client names a message that it holds; a text, opaque to it
    Checkpoint        which messages one pop has given away, and until when: tag `ck`
    Acknowledgement   which of them are done: tag `ack` for one, `bAck` for several
    PopAck            the same as a client asks for it, many in one request

Checkpoint and acknowledgement are the bodies of messages in the revive topic, JSON as RocketMQ
writes it: names sorted, offsets of messages as differences to the first. A checkpoint is known by
its `key`; an acknowledgement means the one whose key it has. Reading follows Java: unknown fields
are ignored, absent ones are 0, an acknowledgement may have the long names, and old checkpoints
without differences mean messages that follow one another.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.wire import fastjson
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import (
    Data,
    as_integer,
    as_object,
    boolean,
    int32,
    int64,
    load_object,
    take_integer,
    take_list,
    take_text,
    text,
)
from sluicemq.wire.headers import answer, request

CHECKPOINT: Final = "ck"
ACKNOWLEDGEMENT: Final = "ack"
ACKNOWLEDGEMENTS: Final = "bAck"
NONE: Final = -1
ORDERED: Final = 999
"""In the place of a revive queue: messages in order, which have no checkpoint."""
_SEPARATOR: Final = " "
_HANDLE_FIELDS_MIN: Final = 7
_BROKER: Final = 5
_MESSAGES_MAX: Final = 127  # the count is a signed byte in Java
_KINDS: Final = ("0", "1", "2")
_BYTE_WITH_BITS: Final = re.compile(rb"[^\0]")

Key = tuple[str, str, int, int, int, str]
"""Topic, group, queue id, first offset, time of the pop (ms), broker."""


class Handle(NamedTuple):
    """Which message, and which pop gave it away.

    `kind` says of which topic: `model.topic.pop_kind`. `offset` is that of the message in its
    queue, NONE in the short form; `physical_offset`, its place in the log, is what a proxy adds.
    """

    start_offset: int
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    kind: int
    broker: str
    queue_id: int
    offset: int = NONE
    physical_offset: int = NONE

    def text(self) -> str:
        """Its fields between blanks, without those at the end that are NONE."""
        fields = self if self.physical_offset != NONE else self[:-1]
        return _SEPARATOR.join(map(str, fields if self.offset != NONE else fields[:-1]))

    @classmethod
    def parse(cls, text: str) -> "Handle":
        """The inverse. Raises ProtocolError."""
        parts = text.split(_SEPARATOR)
        fields: list[Any] = parts[: len(cls._fields)]
        try:
            fields = [part if i == _BROKER else int(part) for i, part in enumerate(fields)]
        except ValueError:
            fields = []
        if len(fields) < _HANDLE_FIELDS_MIN or not fields[_BROKER]:
            raise ProtocolError(
                f"{text!r} is no handle of a popped message.",
                fix="It has seven to nine fields between blanks; give back what the pop gave.",
            )
        return cls(*fields)

    @property
    def deadline_ms(self) -> int:
        """When the message is given again, unless it is acknowledged."""
        return self.pop_ms + self.invisible_ms

    @property
    def is_ordered(self) -> bool:
        return self.revive_queue == ORDERED


class Checkpoint(NamedTuple):
    """The messages of one queue that one pop has given away. `start_offset` is not above the first
    of `offsets`. `revive_queue` is where the record stands, not part of it. `is_suspended`: when
    they come again, that is no further attempt (since release 5.5)."""

    topic: str
    group: str
    queue_id: int
    broker: str
    start_offset: int
    pop_ms: int
    invisible_ms: int
    offsets: tuple[int, ...]
    revive_queue: int
    is_suspended: bool = False

    @property
    def key(self) -> Key:
        return self.topic, self.group, self.queue_id, self.start_offset, self.pop_ms, self.broker

    @property
    def deadline_ms(self) -> int:
        """When the messages are given again, unless they are acknowledged."""
        return self.pop_ms + self.invisible_ms

    @property
    def unique_id(self) -> str:
        """The message id of its record."""
        return _unique_id(self.key, self.start_offset, CHECKPOINT)

    def values(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "bm": 0, "n": len(self.offsets), "ro": 0, "reviveTime": self.deadline_ms,
            "d": [offset - self.start_offset for offset in self.offsets],
            "it": self.invisible_ms, **_key_objects(self.key),
            **({"sp": True} if self.is_suspended else {}),
        }  # fmt: skip

    def body(self) -> bytes:
        """Of its record."""
        return fastjson.dumps(self.values())

    @classmethod
    def of(cls, values: Mapping[Any, Any], revive_queue: int, broker: str) -> "Checkpoint":
        """From a JSON object; `broker` is whose it is when it does not say. Raises ProtocolError.

        Messages that its bits call done are left out: a broker that buffers may write some.
        """
        topic, group, queue_id, start, pop_ms, broker = _key_of(values, broker)
        differences = take_list(values, "d")
        count = min(take_integer(values, "n"), _MESSAGES_MAX)
        done = take_integer(values, "bm")
        offsets = tuple(
            start + as_integer(difference, "d")
            for index, difference in enumerate(differences or range(count))
            if not done >> index & 1
        )
        invisible_ms = take_integer(values, "it")
        return cls(
            topic, group, queue_id, broker, start, pop_ms, invisible_ms, offsets, revive_queue,
            values.get("sp") is True,
        )  # fmt: skip


class Acknowledgement(NamedTuple):
    """Messages of the checkpoint with this key that are done."""

    key: Key
    offsets: tuple[int, ...]

    @property
    def tag(self) -> str:
        return ACKNOWLEDGEMENT if len(self.offsets) == 1 else ACKNOWLEDGEMENTS

    @property
    def _named_offset(self) -> int:
        """The one in the place where a single one stands."""
        return self.offsets[0] if len(self.offsets) == 1 else NONE

    @property
    def unique_id(self) -> str:
        """The message id of its record."""
        return _unique_id(self.key, self._named_offset, ACKNOWLEDGEMENT)

    def body(self) -> bytes:
        """Of its record."""
        values = {"ao": self._named_offset, **_key_objects(self.key)}
        if len(self.offsets) != 1:
            values["aol"] = list(self.offsets)
        return fastjson.dumps(values)


def decode_checkpoint(data: Data, revive_queue: int, broker: str) -> Checkpoint:
    """The body of a record that stands in a revive queue, written by `broker` when it does not say
    whose it is. Raises ProtocolError."""
    return Checkpoint.of(load_object(data, "checkpoint"), revive_queue, broker)


def decode_acknowledgement(data: Data, broker: str) -> Acknowledgement:
    """The same of an acknowledgement, of either tag. Raises ProtocolError."""
    values = _shortened(load_object(data, "acknowledgement"))
    several = take_list(values, "aol")
    offsets = several if "aol" in values else [take_integer(values, "ao")]
    return Acknowledgement(
        _key_of(values, broker), tuple(as_integer(offset, "aol") for offset in offsets)
    )


_LONG_NAMES: Final = {
    "ackOffset": "ao", "ackOffsetList": "aol", "bitSet": "b", "brokerName": "bn",
    "consumerGroup": "c", "invisibleTime": "it", "popTime": "pt", "queueId": "q", "retry": "r",
    "reviveQueueId": "rq", "startOffset": "so", "topic": "t",
}  # fmt: skip


def _shortened(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """With the short names where it has the long ones."""
    found = {short: values[name] for name, short in _LONG_NAMES.items() if name in values}
    return {**values, **found}


def _key_of(values: Mapping[Any, Any], broker: str) -> Key:
    return (
        take_text(values, "t"), take_text(values, "c"), take_integer(values, "q"),
        take_integer(values, "so"), take_integer(values, "pt"), take_text(values, "bn") or broker,
    )  # fmt: skip


def _key_objects(key: Key) -> dict[str, Any]:
    return dict(zip(("t", "c", "q", "so", "pt", "bn"), key, strict=True))


def _unique_id(key: Key, offset: int, tag: str) -> str:
    topic, group, queue_id, _, pop_ms, broker = key
    return f"{topic}@{queue_id}@{offset}@{group}@{pop_ms}@{broker}@{tag}"


# ------------------------------------------------------------------------- requests and answers


class PopAck(NamedTuple):
    """One of many acknowledgements in one request (200151): messages of one pop and queue. `topic`
    is the consumer's, not that of retries; the handle has no offset."""

    group: str
    topic: str
    handle: Handle
    offsets: tuple[int, ...]


def decode_pop_acks(data: Data) -> list[PopAck]:
    """The body of 200151. The offsets are bits, counted from the first offset of the checkpoint.
    Raises ProtocolError."""
    values = load_object(data, "batch of acknowledgements")
    broker = take_text(values, "brokerName")
    return [
        _pop_ack(_shortened(as_object(one, "An acknowledgement")), broker)
        for one in take_list(values, "acks")
    ]


def _pop_ack(values: Mapping[Any, Any], broker: str) -> PopAck:
    kind = take_text(values, "r")
    if kind not in _KINDS:
        raise ProtocolError(f"An acknowledgement has the kind of topic {kind!r}, not 0, 1 or 2.")
    start = take_integer(values, "so")
    try:
        bits = b64decode(take_text(values, "b"), validate=True)
    except ValueError:
        raise ProtocolError("The bits of an acknowledgement are not base64.") from None
    offsets = tuple(
        start + 8 * found.start() + bit
        for found in islice(_BYTE_WITH_BITS.finditer(bits), _MESSAGES_MAX + 1)
        for bit in range(8)
        if found[0][0] >> bit & 1
    )
    if len(offsets) > _MESSAGES_MAX:
        raise ProtocolError(
            f"An acknowledgement is of more than {_MESSAGES_MAX} messages, and no pop gives so "
            "many of one queue."
        )
    handle = Handle(
        start, take_integer(values, "pt"), take_integer(values, "it"), take_integer(values, "rq"),
        int(kind), broker, take_integer(values, "q"),
    )  # fmt: skip
    return PopAck(take_text(values, "c"), take_text(values, "t"), handle, offsets)


def encode_pop_acks(broker: str, acks: Iterable[PopAck]) -> bytes:
    """The inverse. The offsets are not below the first one of their pop."""
    return fastjson.dumps({"acks": [_pop_ack_object(ack) for ack in acks], "brokerName": broker})


def _pop_ack_object(ack: PopAck) -> dict[str, Any]:
    handle, bits = ack.handle, 0
    for offset in ack.offsets:
        bits |= 1 << offset - handle.start_offset
    data = bits.to_bytes(-(-bits.bit_length() // 8), "little")
    return {
        "b": b64encode(data).decode(), "c": ack.group, "it": handle.invisible_ms,
        "pt": handle.pop_ms, "q": handle.queue_id, "r": str(handle.kind),
        "rq": handle.revive_queue, "so": handle.start_offset, "t": ack.topic,
    }  # fmt: skip


def queue_info(entries: Iterable[tuple[int, object, object]]) -> str:
    """One of the texts by which the answer to a pop tells what it is about: the kind of the topic,
    the queue, and what holds for it. That is the offset at which the pop began, the offsets of its
    messages with commas between them, or how often they were consumed before."""
    return ";".join(f"{kind} {queue} {value}" for kind, queue, value in entries)


# ------------------------------------------------------------------------------------- headers
#
# As `headers.py` declares the others (spec/grpc.md §8). What release 5.5 has added is read as well:
# `liteTopic` names a child of a topic of light ones, `suspend` is a change of the invisible time
# that is no failed attempt.

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
