"""What a handler may return besides an answer: three ways to answer later.

None of them waits by itself. `turns.py` writes `Durable` answers after the commit (and the fsync,
where asked), `longpoll.py` keeps `Parked` requests, `server.py` holds `Announced` answers until
the change is on disk and the name servers know of it.
"""

from collections.abc import Callable
from typing import NamedTuple

from sluicemq.protocol.command import Command


class Durable(NamedTuple):
    """An answer that may leave when the turn's messages are safe.

    `answer` is the encoded frame for the request it belongs to, b"" for one that wants none.
    `waits` is False when the producer does not want to wait for the fsync (property WAIT=false).
    `announces` is True when the send created a topic, which the name servers have to know first.
    """

    answer: bytes
    waits: bool = True
    announces: bool = False


class Announced:
    """An answer that leaves when a change of topics or groups is saved and registered."""

    __slots__ = ("answer",)

    def __init__(self, answer: Command) -> None:
        self.answer = answer


class Parked:
    """A pull that waits for messages.

    `scan_offset` is where the next look at the queue begins: it moves on over messages that the
    filter does not want, so that each is looked at once. `look(parked, is_last)` returns the
    answer, or None to go on waiting; with `is_last` it always answers.
    """

    __slots__ = ("command", "deadline_s", "is_done", "look", "queue_id", "scan_offset", "topic")

    def __init__(
        self,
        command: Command,
        topic: str,
        queue_id: int,
        scan_offset: int,
        deadline_s: float,
        look: "Callable[[Parked, bool], bytes | None]",
    ) -> None:
        self.command = command
        self.topic = topic
        self.queue_id = queue_id
        self.scan_offset = scan_offset
        self.deadline_s = deadline_s
        self.look = look
        self.is_done = False
