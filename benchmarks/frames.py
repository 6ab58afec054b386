"""Request frames as the Java client 5.3.3 writes them, built beforehand so that making load costs
next to nothing.

A load generator in Python can only outrun a broker in Python when it does no work a message: frames
of one length lie end to end in one buffer, and a burst of k requests is one slice of it. Only what
has to differ does: opaque, unique key, queue, body mark. The shapes are those of recorded traffic
(keys in alphabetical order, one-letter names of SEND_MESSAGE_V2).
"""

import json
import struct
from collections.abc import Iterator, Sequence

SEND_MESSAGE_V2 = 310
SEND_BATCH_MESSAGE = 320
PULL_MESSAGE = 11
HEART_BEAT = 34
UPDATE_AND_CREATE_TOPIC = 17
UPDATE_AND_CREATE_TOPIC_LIST = 18

OPAQUE_FIRST = 1_000_000_000  # ten digits, always
QUEUES = 4
LEVELS = 100
RING_FRAMES = 65_536
BROKER = "broker-a"
BORN_TIME_MS = 1_795_231_161_761

SUSPEND = 2
SUBSCRIPTION = 4


class Ring:
    """Frames of one length, taken in turn, over and over."""

    def __init__(self, frames: Sequence[bytes], messages_per_frame: int = 1) -> None:
        self._length = len(frames[0])
        assert all(len(frame) == self._length for frame in frames), "frames of one length"
        self._count = len(frames)
        self._bytes = memoryview(b"".join(frames))
        self._next = 0
        self.messages_per_frame = messages_per_frame

    @property
    def frames(self) -> int:
        return self._count

    def take(self, count: int) -> Iterator[memoryview]:
        """The next `count` frames, as few slices as possible."""
        while count > 0:
            got = min(count, self._count - self._next)
            start = self._next * self._length
            yield self._bytes[start : start + got * self._length]
            self._next = (self._next + got) % self._count
            count -= got


def frame(code: int, fields: dict[str, str], opaque: int, body: bytes = b"") -> bytes:
    header = json.dumps(
        {
            "code": code,
            "extFields": fields,
            "flag": 0,
            "language": "JAVA",
            "opaque": opaque,
            "serializeTypeCurrentRPC": "JSON",
            "version": 479,
        },
        separators=(",", ":"),
    ).encode()
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def single_sends(topic: str, *, size_bytes: int = 128, count: int = RING_FRAMES) -> Ring:
    """SEND_MESSAGE_V2 requests, one message each, over four queues in turn.

    So many that the unique keys fall all over a key index, as those of real producers do.
    """
    body = b"x" * size_bytes
    first = _send_fields(topic, 0)
    template = frame(SEND_MESSAGE_V2, first, OPAQUE_FIRST, body)
    marks = (_unique_key(0).encode(), b'"e":"0"', str(OPAQUE_FIRST).encode())
    at_key, at_queue, at_opaque = (template.index(mark) for mark in marks)
    made = bytearray(template)
    ring = []
    for number in range(count):
        made[at_key : at_key + 32] = _unique_key(number * 2_654_435_761 & 0xFFFFFFFF).encode()
        made[at_queue + 5] = ord("0") + number % QUEUES
        made[at_opaque : at_opaque + 10] = b"%d" % (OPAQUE_FIRST + number)
        ring.append(bytes(made))
    return Ring(ring)


def spread_sends(topics: Sequence[str], *, size_bytes: int = 128) -> Ring:
    """A message to each of the topics, whose names have one length, in turn."""
    body = b"x" * size_bytes
    return Ring(
        [
            frame(SEND_MESSAGE_V2, _send_fields(topic, number), OPAQUE_FIRST + number, body)
            for number, topic in enumerate(topics)
        ]
    )


def batch_sends(
    topic: str, *, batch: int, size_bytes: int = 128, count: int = 64, tagged: bool = False
) -> Ring:
    """SEND_BATCH_MESSAGE requests; `tagged`: 10 % have the tag T10, 1 % T01, the rest Oth, and each
    has a property `level` of 100 values. Whole thousands of messages have exactly these shares."""
    frames = []
    for i in range(count):
        parts = (_part(i * batch + j, size_bytes, tagged) for j in range(batch))
        frames.append(
            frame(
                SEND_BATCH_MESSAGE,
                _send_fields(topic, i, batch=True),
                OPAQUE_FIRST + i,
                b"".join(parts),
            )
        )
    return Ring(frames, batch)


def batch_send(topic: str, number: int, queue: int, parts: bytes) -> bytes:
    """One SEND_BATCH_MESSAGE request of encoded messages."""
    fields = _send_fields(topic, number, batch=True) | {"e": str(queue)}
    return frame(SEND_BATCH_MESSAGE, fields, OPAQUE_FIRST + number, parts)


def pull(
    topic: str,
    queue: int,
    offset: int,
    opaque: int,
    *,
    expression: str = "*",
    kind: str = "TAG",
    suspend: bool = False,
    group: str = "bench",
) -> bytes:
    """A pull that carries its own subscription, so that no heartbeat is needed."""
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": str(queue),
        "queueOffset": str(offset),
        "maxMsgNums": "32",
        "maxMsgBytes": "262144",
        "sysFlag": str(SUBSCRIPTION | (SUSPEND if suspend else 0)),
        "commitOffset": "0",
        "suspendTimeoutMillis": "15000",
        "subscription": expression,
        "subVersion": str(BORN_TIME_MS),
        "expressionType": kind,
    }
    return frame(PULL_MESSAGE, fields, opaque)


def create_topic(topic: str) -> bytes:
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": str(QUEUES),
        "writeQueueNums": str(QUEUES),
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
    }
    return frame(UPDATE_AND_CREATE_TOPIC, fields, OPAQUE_FIRST)


def create_topics(topics: Sequence[str]) -> bytes:
    """All of them by one request."""
    configs = [
        {"topicName": topic, "readQueueNums": QUEUES, "writeQueueNums": QUEUES, "perm": 6,
         "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False, "attributes": {}}
        for topic in topics
    ]  # fmt: skip
    body = json.dumps({"topicConfigList": configs}).encode()
    return frame(UPDATE_AND_CREATE_TOPIC_LIST, {}, OPAQUE_FIRST, body)


def marked_send(topic: str, queue: int, mark: bytes) -> bytes:
    """A single send whose body begins with `mark`."""
    fields = _send_fields(topic, queue) | {"e": str(queue)}
    return frame(SEND_MESSAGE_V2, fields, OPAQUE_FIRST, mark.ljust(128, b"x"))


def _send_fields(topic: str, number: int, *, batch: bool = False) -> dict[str, str]:
    properties = (
        "WAIT\x01true\x02" if batch else f"UNIQ_KEY\x01{_unique_key(number)}\x02WAIT\x01true\x02"
    )
    return {
        "a": "bench",
        "b": topic,
        "c": "TBW102",
        "d": str(QUEUES),
        "e": str(number % QUEUES),
        "f": "0",
        "g": str(BORN_TIME_MS),
        "h": "0",
        "i": properties,
        "j": "0",
        "k": "false",
        "m": "true" if batch else "false",
        "n": BROKER,
    }


def _part(number: int, size_bytes: int, tagged: bool) -> bytes:
    properties = f"UNIQ_KEY\x01{_unique_key(number)}\x02WAIT\x01true\x02".encode()
    if tagged:
        # 619 is prime to 1000, 37 to 100: every tag and level gets its share, evenly spread. Values
        # of one length keep frames of one length.
        draw = number * 619 % 1000
        tag = b"T10" if draw < 100 else b"T01" if draw < 110 else b"Oth"
        properties += b"TAGS\x01%b\x02level\x01%02d\x02" % (tag, number * 37 % LEVELS)
    total = 4 * 5 + size_bytes + 2 + len(properties)
    return struct.pack(">IIIII", total, 0, 0, 0, size_bytes) + b"x" * size_bytes + struct.pack(
        ">H", len(properties)
    ) + properties  # fmt: skip


def _unique_key(number: int) -> str:
    return f"7F0000010001251A69D73C5E{number:08X}"
