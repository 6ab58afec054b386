"""The fields that the fast path reads and writes for each message, in one class for each owner.

The owners are subclasses: `store.queues.Queue`, `broker.topics.Topic` and `store.writer.Writer`. If
`sends.pyx` is compiled, its classes of the same names are used, which have the same attributes as C
numbers. Otherwise the classes here are used.
"""

from typing import TYPE_CHECKING, Any

from sluicemq import engine

if TYPE_CHECKING or engine.sends is None:

    class QueueState:
        """The end of a queue.

        `next_offset` is the offset of the next message; messages before `committed_offset` are
        committed. `tail` contains the units that are not in a file yet. `magic` and `topic_part`
        are the magic number and the topic field of the queue's records, and `fixed_bytes` is the
        size of a record without body and properties.
        """

        __slots__ = (
            "committed_offset",
            "fixed_bytes",
            "magic",
            "next_offset",
            "queue_id",
            "tail",
            "topic_part",
        )

        committed_offset: int
        fixed_bytes: int
        magic: int
        next_offset: int
        queue_id: int
        tail: bytearray
        topic_part: bytes

    class TopicState:
        """The counters of a topic, and what a send must know about it.

        `messages_in` and `bytes_in` count the stored messages and their bytes. Sends to a topic
        with `is_special` take the general path. Queue ids below `queues` are valid in a send.
        `record_bytes` is the size of a record without body and properties.
        """

        __slots__ = ("bytes_in", "is_special", "messages_in", "queues", "record_bytes")

        bytes_in: int
        is_special: bool
        messages_in: int
        queues: int
        record_bytes: int

    class TurnState:
        """The position of the next record, and the commit group so far.

        The group begins at `turn_start`; the next record begins at `position` and must end at
        `room_end` or before. `parts` are the records of the group as bytes, and `touched` are the
        queues with new messages. `now_ms` is the store time of all its messages.
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
