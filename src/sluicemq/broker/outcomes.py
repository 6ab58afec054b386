"""What a handler may return besides an answer: four ways to answer later.

None of them waits by itself. `turns.py` writes `Durable` answers after the commit (and the fsync,
where asked), `longpoll.py` keeps `Parked` requests, `announcing.py` holds `Announced` answers until
the change is on disk and the name servers know of it, `background.py` goes through the steps of a
`Postponed` one.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from sluicemq.errors import StoreFullError
from sluicemq.protocol.codec import SERVER_LANGUAGE, decode, encode
from sluicemq.protocol.codes import ResponseCode
from sluicemq.protocol.command import FLAG_RESPONSE, Command


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


class Postponed(NamedTuple):
    """A request that takes long: work in steps (`background.Steps`) that return its outcome."""

    steps: Generator[Callable[[], Any] | None, Any, Any]


class Parked:
    """A pull that waits for messages.

    `scan_offset` is where the next look at the queue begins: it moves on over messages that the
    filter does not want, so that each is looked at once. `look(parked, is_last)` returns the
    answer, or None to go on waiting; with `is_last` it always answers. While `is_looking` it is
    about to look.
    """

    __slots__ = (
        "command", "deadline_s", "is_done", "is_looking", "look", "queue_id", "scan_offset",
        "topic",
    )  # fmt: skip

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
        self.is_looking = False


def failed(answer: bytes, error: BaseException, remark: str) -> bytes:
    """What leaves instead of an encoded answer whose change did not reach the disk."""
    full = isinstance(error, StoreFullError)
    code = ResponseCode.SERVICE_NOT_AVAILABLE if full else ResponseCode.SYSTEM_ERROR
    opaque = decode(answer[4:]).opaque
    return encode(Command(code, {}, b"", opaque, FLAG_RESPONSE, remark, SERVER_LANGUAGE))
