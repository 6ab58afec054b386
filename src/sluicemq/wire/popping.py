"""The data of POP consuming (spec/delivery.md §7): receipt handles, stored records and headers.

    ReceiptHandle     the string by which a client acknowledges a popped message; opaque to clients
    Checkpoint        which messages one pop took, and until when they are invisible: tag `ck`
    Acknowledgement   which of them are acknowledged: tag `ack` for one, `bAck` for several
    PopAck            an acknowledgement in a request of a client, which may contain many

A checkpoint and an acknowledgement are stored as messages in the revive topic. Their bodies are the
same JSON as RocketMQ's: names are sorted, and offsets are differences to the first offset. An
acknowledgement belongs to the checkpoint with the same `key`. Decoding is as tolerant as Java's:
unknown fields are ignored, and absent ones are 0. An acknowledgement may have long field names. An
old checkpoint without differences means consecutive messages.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.wire import fastjson
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import boolean, int32, int64, text
from sluicemq.wire.fastjson import (
    JsonData,
    as_integer,
    as_object,
    load_object,
    take_integer,
    take_list,
    take_text,
)
from sluicemq.wire.headers import request, response

CHECKPOINT: Final = "ck"
ACKNOWLEDGEMENT: Final = "ack"
ACKNOWLEDGEMENTS: Final = "bAck"
NO_OFFSET: Final = -1
"""The value of an offset or position that is absent."""
ORDERED: Final = 999
"""The revive queue id of messages that are consumed in order. They have no checkpoint."""
_SEPARATOR: Final = " "
_HANDLE_FIELDS_MIN: Final = 7
_BROKER: Final = 5
_MESSAGES_MAX: Final = 127  # the count is a signed byte in Java
_KINDS: Final = ("0", "1", "2")
_BYTE_WITH_BITS: Final = re.compile(rb"[^\0]")

# The fields of checkpoints and acknowledgements as JSON. All of them have those of the key.
#
#     key              t topic   c group   q queue id   so first offset   pt time of the pop (ms)
#                      bn broker name
#     checkpoint       d   differences between the offsets and so; absent means 0, 1, …, n - 1
#                      n   number of messages          it  invisible time (ms)
#                      bm  bit i is set if message i is acknowledged
#                      ro  offset in the revive queue  reviveTime  pt + it
#                      sp  true if it is suspended
#     acknowledgement  ao  the offset, NO_OFFSET if there are several
#                      aol the offsets, if there are several
#     acknowledgement of a client (BATCH_ACK_MESSAGE), without bn
#                      b   base64 of bits, the lowest bit of the first byte first: bit i
#                          acknowledges offset so + i
#                      it  invisible time (ms)   r  kind of the topic   rq  revive queue id

PopKey = tuple[str, str, int, int, int, str]
"""What identifies one pop of one queue.

Its items are topic, group, queue id, first offset, time of the pop (ms since 1970) and broker name.
"""


class ReceiptHandle(NamedTuple):
    """Identifies a popped message, and the pop that took it.

    `kind` tells whether the message is in the topic itself or in a retry topic; see
    `model.topic.pop_kind`. `offset` is the offset of the message in its queue, NO_OFFSET in a
    handle for all messages of the pop. `physical_offset` is the position of the message in the
    commit log, which only the proxy adds.
    """

    start_offset: int
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    kind: int
    broker: str
    queue_id: int
    offset: int = NO_OFFSET
    physical_offset: int = NO_OFFSET

    def encode(self) -> str:
        """Return the handle as a string: its fields separated by blanks.

        Trailing fields that are NO_OFFSET are left out.
        """
        fields = self if self.physical_offset != NO_OFFSET else self[:-1]
        return _SEPARATOR.join(map(str, fields if self.offset != NO_OFFSET else fields[:-1]))

    @classmethod
    def parse(cls, handle_text: str) -> "ReceiptHandle":
        """Return the handle that a string contains.

        The string has seven to nine fields separated by blanks; further fields are ignored. Raises
        ProtocolError if it has fewer fields, no broker name, or another field that is not an
        integer.
        """
        words = handle_text.split(_SEPARATOR)[: len(cls._fields)]
        fields: list[Any]
        try:
            # All fields are integers except the broker name.
            fields = [word if index == _BROKER else int(word) for index, word in enumerate(words)]
        except ValueError:
            fields = []  # so that the error below is raised
        if len(fields) < _HANDLE_FIELDS_MIN or not fields[_BROKER]:
            raise ProtocolError(
                f"{handle_text!r} is not the receipt handle of a popped message.",
                fix="Pass the handle unchanged: it has seven to nine fields separated by blanks.",
            )
        return cls(*fields)

    @property
    def deadline_ms(self) -> int:
        """When the message becomes visible again unless it is acknowledged, in ms since 1970."""
        return self.pop_ms + self.invisible_ms

    @property
    def is_ordered(self) -> bool:
        """Whether the message is consumed in order."""
        return self.revive_queue == ORDERED


class Checkpoint(NamedTuple):
    """The messages that one pop took from one queue.

    `start_offset` is at most the first of `offsets`. `revive_queue` is the queue of the revive
    topic in which the record is stored; the record does not contain it. If `is_suspended`, the next
    delivery does not count as another attempt (since RocketMQ 5.5).
    """

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
    def key(self) -> PopKey:
        """The key that the acknowledgements of these messages have."""
        return self.topic, self.group, self.queue_id, self.start_offset, self.pop_ms, self.broker

    @property
    def deadline_ms(self) -> int:
        """When the messages become visible again unless acknowledged, in ms since 1970."""
        return self.pop_ms + self.invisible_ms

    @property
    def unique_id(self) -> str:
        """The message id of its record."""
        return _make_unique_id(self.key, self.start_offset, CHECKPOINT)

    def to_json(self) -> dict[str, Any]:
        """Return the checkpoint as a JSON object in RocketMQ's format.

        `so` is the first offset, and `d` has the difference of each offset to it.
        """
        return {
            "bm": 0,
            "n": len(self.offsets),
            "ro": 0,
            "reviveTime": self.deadline_ms,
            "d": [offset - self.start_offset for offset in self.offsets],
            "it": self.invisible_ms,
            **_key_to_json(self.key),
            **({"sp": True} if self.is_suspended else {}),
        }

    def encode(self) -> bytes:
        """Return the body of its record."""
        return fastjson.dumps(self.to_json())

    @classmethod
    def from_json(
        cls, json_object: Mapping[Any, Any], revive_queue: int, broker: str
    ) -> "Checkpoint":
        """Return the checkpoint that a JSON object contains.

        The object has a list `d` of differences, and the message `i` has the offset `so + d[i]`. If
        `d` is absent or empty, there are `n` messages with consecutive offsets from `so` on.
        Message `i` is acknowledged if bit `i` of `bm` is set. It is then left out of `offsets`.
        Brokers that buffer acknowledgements write such checkpoints.

        `revive_queue` is the queue that the record was read from. `broker` is used if the object
        has no broker name. Raises ProtocolError if a field has another type.
        """
        topic, group, queue_id, start_offset, pop_ms, broker = _read_key(json_object, broker)
        offsets = _read_unacknowledged_offsets(json_object, start_offset)
        return cls(
            topic=topic,
            group=group,
            queue_id=queue_id,
            broker=broker,
            start_offset=start_offset,
            pop_ms=pop_ms,
            invisible_ms=take_integer(json_object, "it"),
            offsets=offsets,
            revive_queue=revive_queue,
            is_suspended=json_object.get("sp") is True,
        )


def _read_unacknowledged_offsets(
    json_object: Mapping[Any, Any], start_offset: int
) -> tuple[int, ...]:
    """Return the offsets of the messages of a checkpoint that are not acknowledged.

    `d` has the difference of each offset to `start_offset`; without it, there are `n` consecutive
    offsets. Bit i of `bm` is set if message i is acknowledged.
    """
    differences = take_list(json_object, "d")
    message_count = min(take_integer(json_object, "n"), _MESSAGES_MAX)
    acknowledged_bits = take_integer(json_object, "bm")
    offsets = []
    for index, difference in enumerate(differences or range(message_count)):
        is_acknowledged = acknowledged_bits >> index & 1
        if not is_acknowledged:
            offsets.append(start_offset + as_integer(difference, "d"))
    return tuple(offsets)


class Acknowledgement(NamedTuple):
    """The acknowledgement of some messages of the checkpoint that has the same key."""

    key: PopKey
    offsets: tuple[int, ...]

    @property
    def tag(self) -> str:
        """The tag of its record: ACKNOWLEDGEMENT for one message, ACKNOWLEDGEMENTS for several."""
        return ACKNOWLEDGEMENT if len(self.offsets) == 1 else ACKNOWLEDGEMENTS

    @property
    def _single_offset(self) -> int:
        """The offset of the only acknowledged message, NO_OFFSET if there are several."""
        return self.offsets[0] if len(self.offsets) == 1 else NO_OFFSET

    @property
    def unique_id(self) -> str:
        """The message id of its record."""
        return _make_unique_id(self.key, self._single_offset, ACKNOWLEDGEMENT)

    def encode(self) -> bytes:
        """Return the body of the record that stores this acknowledgement, a JSON object.

        One offset is written to `ao`, and several to the list `aol`.
        """
        json_object = {"ao": self._single_offset, **_key_to_json(self.key)}
        if len(self.offsets) != 1:
            json_object["aol"] = list(self.offsets)
        return fastjson.dumps(json_object)


def decode_checkpoint(record_body: JsonData, revive_queue: int, broker: str) -> Checkpoint:
    """Return the checkpoint in the body of its record, as `Checkpoint.from_json`.

    Raises ProtocolError if the body is not a JSON object, or a field has another type.
    """
    return Checkpoint.from_json(load_object(record_body, "checkpoint"), revive_queue, broker)


def decode_acknowledgement(record_body: JsonData, broker: str) -> Acknowledgement:
    """Return the acknowledgement in the body of its record.

    The offsets are the list in `aol` or, if this is missing, the one offset in `ao`. `broker` is
    used if the body has no broker name. Raises ProtocolError if the body is not a JSON object, or a
    field has another type.
    """
    json_object = _add_short_names(load_object(record_body, "acknowledgement"))
    if "aol" in json_object:
        offsets = [as_integer(offset, "aol") for offset in take_list(json_object, "aol")]
    else:
        offsets = [take_integer(json_object, "ao")]
    return Acknowledgement(_read_key(json_object, broker), tuple(offsets))


_LONG_NAMES: Final = {
    "ackOffset": "ao",
    "ackOffsetList": "aol",
    "bitSet": "b",
    "brokerName": "bn",
    "consumerGroup": "c",
    "invisibleTime": "it",
    "popTime": "pt",
    "queueId": "q",
    "retry": "r",
    "reviveQueueId": "rq",
    "startOffset": "so",
    "topic": "t",
}
"""The short name for each long name of a field."""


def _add_short_names(json_object: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a JSON object with a short name for each field that has a long name.

    Some peers send long names, such as "consumerGroup" for "c".
    """
    short_fields = {
        short: json_object[name] for name, short in _LONG_NAMES.items() if name in json_object
    }
    return {**json_object, **short_fields}


def _read_key(json_object: Mapping[Any, Any], broker: str) -> PopKey:
    """Return the key of a checkpoint or acknowledgement: the fields that identify the pop.

    They are topic, group, queue id, start offset, time of the pop in ms, and broker name. `broker`
    is used if the object has no broker name.
    """
    return (
        take_text(json_object, "t"),
        take_text(json_object, "c"),
        take_integer(json_object, "q"),
        take_integer(json_object, "so"),
        take_integer(json_object, "pt"),
        take_text(json_object, "bn") or broker,
    )


def _key_to_json(key: PopKey) -> dict[str, Any]:
    """Return the JSON members that are the key of a checkpoint or acknowledgement."""
    return dict(zip(("t", "c", "q", "so", "pt", "bn"), key, strict=True))


def _make_unique_id(key: PopKey, offset: int, tag: str) -> str:
    """Return the message id of the record with this key, offset and tag.

    The parts are joined by `@`: topic, queue id, offset, group, pop time in ms, broker and tag.
    """
    topic, group, queue_id, _, pop_ms, broker = key
    return f"{topic}@{queue_id}@{offset}@{group}@{pop_ms}@{broker}@{tag}"


# ------------------------------------------------------------------------ requests and responses


class PopAck(NamedTuple):
    """One of the acknowledgements in a BATCH_ACK_MESSAGE (200151) request.

    It acknowledges messages of one pop and queue. `topic` is the topic that the consumer subscribed
    to, also for messages in the retry topic. The handle has no offset.
    """

    group: str
    topic: str
    handle: ReceiptHandle
    offsets: tuple[int, ...]


def decode_pop_acks(request_body: JsonData) -> list[PopAck]:
    """Return the acknowledgements in the body of BATCH_ACK_MESSAGE (200151), in order.

    Each one gets the broker name of the body. Raises ProtocolError if the body is malformed, or if
    an acknowledgement has more than 127 messages.
    """
    json_object = load_object(request_body, "batch of acknowledgements")
    broker = take_text(json_object, "brokerName")
    return [
        _read_pop_ack(_add_short_names(as_object(json_ack, "An acknowledgement")), broker)
        for json_ack in take_list(json_object, "acks")
    ]


def _read_pop_ack(json_object: Mapping[Any, Any], broker: str) -> PopAck:
    """Return the acknowledgement in one item of `acks`. Its handle gets the broker name `broker`.

    Raises ProtocolError if the item is malformed.
    """
    topic_kind = take_text(json_object, "r")
    if topic_kind not in _KINDS:
        raise ProtocolError(f"An acknowledgement has the topic kind {topic_kind!r}, not 0, 1 or 2.")
    start_offset = take_integer(json_object, "so")
    offsets = _decode_offset_bits(take_text(json_object, "b"), start_offset)
    handle = ReceiptHandle(
        start_offset=start_offset,
        pop_ms=take_integer(json_object, "pt"),
        invisible_ms=take_integer(json_object, "it"),
        revive_queue=take_integer(json_object, "rq"),
        kind=int(topic_kind),
        broker=broker,
        queue_id=take_integer(json_object, "q"),
    )
    return PopAck(take_text(json_object, "c"), take_text(json_object, "t"), handle, offsets)


def _decode_offset_bits(base64_bits: str, start_offset: int) -> tuple[int, ...]:
    """Return the offset `start_offset + i` for each bit i that is set in a set of bits.

    `base64_bits` contains the bytes in base64. The lowest bit of the first byte is bit 0. Raises
    ProtocolError if the text is not valid base64, or if more than 127 bits are set.
    """
    try:
        bit_bytes = b64decode(base64_bits, validate=True)
    except ValueError:
        raise ProtocolError("The bits of an acknowledgement are not valid base64.") from None
    # The bits may be mostly zeros, so search the bytes with a set bit. One byte more than messages
    # are allowed is enough to know that there are too many.
    bytes_with_bits = islice(_BYTE_WITH_BITS.finditer(bit_bytes), _MESSAGES_MAX + 1)
    offsets = []
    for match in bytes_with_bits:
        byte = match[0][0]
        first_offset = start_offset + 8 * match.start()
        offsets += [first_offset + bit for bit in range(8) if byte >> bit & 1]
    if len(offsets) > _MESSAGES_MAX:
        raise ProtocolError(
            f"An acknowledgement has more than {_MESSAGES_MAX} messages, the most that one pop can "
            "take from one queue."
        )
    return tuple(offsets)


def encode_pop_acks(broker: str, acks: Iterable[PopAck]) -> bytes:
    """Encode the body of BATCH_ACK_MESSAGE (200151).

    No offset of an acknowledgement may be below the `start_offset` of its handle.
    """
    return fastjson.dumps({"acks": [_pop_ack_to_json(ack) for ack in acks], "brokerName": broker})


def _pop_ack_to_json(ack: PopAck) -> dict[str, Any]:
    """Return one acknowledgement as a JSON object.

    Its member `b` is a set of bits in base64: bit i is set if the message with the offset `so + i`
    is acknowledged. The lowest bit of the first byte is bit 0, and the last byte is not zero.
    """
    handle = ack.handle
    acknowledged_bits = 0
    for offset in ack.offsets:
        bit_index = offset - handle.start_offset
        acknowledged_bits |= 1 << bit_index
    byte_count = (acknowledged_bits.bit_length() + 7) // 8
    bit_bytes = acknowledged_bits.to_bytes(byte_count, "little")
    return {
        "b": b64encode(bit_bytes).decode(),
        "c": ack.group,
        "it": handle.invisible_ms,
        "pt": handle.pop_ms,
        "q": handle.queue_id,
        "r": str(handle.kind),
        "rq": handle.revive_queue,
        "so": handle.start_offset,
        "t": ack.topic,
    }


def encode_queue_info(queue_values: Iterable[tuple[int, object, object]]) -> str:
    """Encode one of the `…_info` fields of `PopMessageResponse`.

    Each entry is (kind of the topic, queue id, value). The entries (0, 3, 17) and (0, 5, 9) become
    `0 3 17;0 5 9`. The value is the first offset of the pop, the offsets of its messages separated
    by commas, or the number of earlier deliveries, according to the field.
    """
    return ";".join(
        f"{topic_kind} {queue_id} {queue_value}"
        for topic_kind, queue_id, queue_value in queue_values
    )


# ------------------------------------------------------------------------------------- headers
#
# Declared like those in `headers.py` (spec/grpc.md §8). Two fields were added in RocketMQ 5.5:
# `liteTopic` is the child of a lite topic, and with `suspend` a change of the invisible time does
# not count as a failed attempt.

UNSET_REMARK: Final = "not set any response code"
"""The remark of RocketMQ's responses to pops that have no other remark."""


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
    """The header of POP_MESSAGE (200050).

    A `queue_id` below 0 means all queues. `born_time_ms` 0 means now. If the group has no committed
    offset, `init_mode` 0 begins with the first message, and 1 behind the last one.
    """

    invisible_ms: int = int64("invisibleTime")
    poll_ms: int = int64("pollTime")
    born_time_ms: int = int64("bornTime", default=0)
    init_mode: int = int32("initMode", default=0)
    expression_kind: str | None = text("expType", default=None)
    expression: str | None = text("exp", default=None)
    order: bool = boolean("order", default=False)
    attempt_id: str | None = text("attemptId", default=None)


@response(Code.POP_MESSAGE, Code.PEEK_MESSAGE)
class PopMessageResponse:
    """The header of the responses to POP_MESSAGE (200050) and PEEK_MESSAGE (200052).

    All responses have the integers, also those that report an error. Only responses to requests
    that read queues have the `…_info` fields.
    """

    pop_ms: int = int64("popTime", default=0)
    invisible_ms: int = int64("invisibleTime", default=0)
    revive_queue: int = int32("reviveQid", default=0)
    rest_count: int = int64("restNum", default=0)
    start_offset_info: str | None = text("startOffsetInfo", default=None)
    message_offset_info: str | None = text("msgOffsetInfo", default=None)
    order_count_info: str | None = text("orderCountInfo", default=None)


@request(Code.ACK_MESSAGE)
class AckMessageRequest(PollingInfoRequest):
    """The header of ACK_MESSAGE (200051).

    `topic` is the topic in which the message is stored. `handle` is its receipt handle.
    """

    handle: str = text("extraInfo")
    offset: int = int64("offset")
    lite_topic: str | None = text("liteTopic", default=None)


@request(Code.CHANGE_MESSAGE_INVISIBLETIME)
class ChangeInvisibleTimeRequest(AckMessageRequest):
    invisible_ms: int = int64("invisibleTime")
    suspend: bool = boolean("suspend", default=False)


@response(Code.CHANGE_MESSAGE_INVISIBLETIME)
class ChangeInvisibleTimeResponse:
    """The header of the response to CHANGE_MESSAGE_INVISIBLETIME (200053).

    The message has a new receipt handle, which has these values and otherwise equals the old one.
    """

    pop_ms: int = int64("popTime", default=0)
    invisible_ms: int = int64("invisibleTime", default=0)
    revive_queue: int = int32("reviveQid", default=0)


@response(Code.POLLING_INFO)
class PollingInfoResponse:
    count: int = int32("pollingNum", default=0)


@request(Code.NOTIFICATION)
class NotificationRequest(PollingInfoRequest):
    """The header of NOTIFICATION (200054), which waits until there are messages to pop."""

    poll_ms: int = int64("pollTime")
    born_time_ms: int = int64("bornTime", default=0)
    order: bool = boolean("order", default=False)
    attempt_id: str | None = text("attemptId", default=None)
    expression_kind: str | None = text("expType", default=None)
    expression: str | None = text("exp", default=None)


@request(Code.SLUICE_IN_FLIGHT)
class InFlightRequest:
    """The header of SLUICE_IN_FLIGHT (900134), which lists the messages a group has in flight.

    A field that is None does not restrict the list.
    """

    group: str = text("consumerGroup")
    topic: str | None = text("topic", default=None)
    queue_id: int | None = int32("queueId", default=None)
    offset: int | None = int64("queueOffset", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


@response(Code.NOTIFICATION)
class NotificationResponse:
    has_messages: bool = boolean("hasMsg", default=False)
    is_full: bool = boolean("pollingFull", default=False)
