"""What the hot path reads and writes for each message, in one struct for each owner: a queue's end,
a topic's counters, the turn that is being written.

When `sends` is compiled the classes are its own, which have the same attributes as C numbers.
"""

from typing import TYPE_CHECKING, Any

from sluicemq import engine

if TYPE_CHECKING or engine.sends is None:

    class QueueState:
        """Offsets and tail: `store.queues`. `fixed_bytes`: a record without body and properties."""

        __slots__ = (
            "committed_offset", "fixed_bytes", "magic", "next_offset", "queue_id", "tail",
            "topic_part",
        )  # fmt: skip

        committed_offset: int
        fixed_bytes: int
        magic: int
        next_offset: int
        queue_id: int
        tail: bytearray
        topic_part: bytes

    class TopicState:
        """Counters, and what a send has to know: `broker.topics`."""

        __slots__ = ("bytes_in", "is_special", "messages_in", "queues", "record_bytes")

        bytes_in: int
        is_special: bool
        messages_in: int
        queues: int
        record_bytes: int

    class TurnState:
        """Where the next record goes and what the turn has so far: `store.writer`. A record ends
        before `room_end`; all that the turn stores it stores at `now_ms`.
        """

        __slots__ = ("now_ms", "parts", "position", "room_end", "touched", "turn_start")

        now_ms: int
        parts: list[bytes | bytearray | memoryview]
        position: int
        room_end: int
        touched: list[Any]
        turn_start: int

else:
    QueueState = engine.sends.QueueState
    TopicState = engine.sends.TopicState
    TurnState = engine.sends.TurnState
