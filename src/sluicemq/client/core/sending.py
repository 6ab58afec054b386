"""Which queue next, whether to try again, and what to say when it failed.

`QueueChooser` goes round robin over the write queues and avoids brokers that were slow or away:
RocketMQ's latency table, by which a broker that took 550 ms is left alone for 2 s, and so on up to
30 s. `Attempts` owns one send: its deadline over all attempts, the retries left, and the story that
the final error tells. A time-out is never retried, because the message may be stored.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

from sluicemq.errors import (
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    SendError,
    SendUnknownError,
    SluiceError,
)
from sluicemq.model.ids import java_hash
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue

SEND_TIMEOUT_MS: Final = 10_000
RETRIES: Final = 2
RETRY_CODES: Final = frozenset({17, 14, 1, 2, 16, 204, 205, 1500})
"""spec/remoting.md §7.3: the answers after which another broker may do better."""

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""A user's choice: the write queues of the topic and the message -> one of the queues."""

_LATENCY_S: Final = (0.05, 0.1, 0.55, 1.8, 3.0, 5.0, 15.0)
_AVOID_S: Final = (0.0, 0.0, 2.0, 5.0, 6.0, 10.0, 30.0)
UNREACHABLE_LATENCY_S: Final = 10.0
"""What a broken connection counts as: 10 s of latency, so the broker is avoided for 10 s."""


def avoid_s(latency_s: float) -> float:
    """How long to leave a broker alone after an answer that took `latency_s` seconds."""
    index = bisect_right(_LATENCY_S, latency_s)
    return _AVOID_S[index - 1] if index else 0.0


class QueueChooser:
    """Round robin over queues, past the brokers to be avoided. Times are monotonic seconds."""

    __slots__ = ("_avoid_until_s", "_next")

    def __init__(self, start: int = 0) -> None:
        self._avoid_until_s: dict[str, float] = {}
        self._next = start

    def choose(
        self, queues: Sequence[MessageQueue], now_s: float, last_broker: str | None = None
    ) -> MessageQueue:
        """The next queue; `last_broker` (of a failed attempt) only when there is no other."""
        self._next = start = (self._next + 1) & 0x7FFFFFFF
        count = len(queues)
        if not self._avoid_until_s and last_broker is None:
            return queues[start % count]
        others = None
        for step in range(count):
            queue = queues[(start + step) % count]
            if queue.broker != last_broker:
                if self._avoid_until_s.get(queue.broker, 0.0) <= now_s:
                    return queue
                others = others or queue
        return others or queues[start % count]

    def answered(self, broker: str, latency_s: float, now_s: float) -> None:
        """Takes note of how long a broker took."""
        if latency_s < 0.55 and broker not in self._avoid_until_s:
            return
        pause = avoid_s(latency_s)
        if pause:
            self._avoid_until_s[broker] = now_s + pause
        else:
            self._avoid_until_s.pop(broker, None)

    def failed(self, broker: str, now_s: float) -> None:
        """The connection to a broker broke, or it refused the message."""
        self.answered(broker, UNREACHABLE_LATENCY_S, now_s)

    def is_avoided(self, broker: str, now_s: float) -> bool:
        """Whether another broker is preferred at the moment."""
        return self._avoid_until_s.get(broker, 0.0) > now_s


def choose_by(selector: Selector, queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """The user's choice, checked. Raises SendError when it is not one of the queues."""
    queue = selector(queues, message)
    if queue not in queues:
        raise SendError(
            f"the selector chose {queue!r}, which is not one of the {len(queues)} queues of "
            f"{message.topic!r}. Nothing was sent.",
            cure="Return one element of the sequence it is given.",
        )
    return queue


def choose_by_key(queues: Sequence[MessageQueue], sharding_key: str) -> MessageQueue:
    """The queue of a key: the one that a Java producer's SelectMessageQueueByHash chooses for this
    text, so that producers of both kinds keep one order. It is another queue as soon as the number
    of queues changes: strict order topics keep it (docs/ordering.md)."""
    return queues[abs(java_hash(sharding_key)) % len(queues)]


class Attempts:
    """One send from the first attempt to the verdict. Times are monotonic seconds."""

    __slots__ = ("_deadline_s", "_left", "_story", "_timeout_ms", "_unknown", "last_broker")

    def __init__(self, now_s: float, timeout_ms: int = SEND_TIMEOUT_MS, retries: int = RETRIES):
        self._deadline_s = now_s + timeout_ms / 1000
        self._timeout_ms = timeout_ms
        self._left = retries
        self._story: list[str] = []
        self._unknown = False
        self.last_broker: str | None = None

    def remaining_s(self, now_s: float) -> float:
        """Seconds until the deadline of all attempts together."""
        return self._deadline_s - now_s

    def failed(self, broker: str, error: SluiceError, now_s: float, *, written: bool) -> bool:
        """Notes a failed attempt; True when the next one may be made.

        `written` says that the request was (or may have been) handed to the network: then a broken
        connection leaves the outcome open.
        """
        self.last_broker = broker
        self._story.append(f"{broker}: {error.fact}")
        if written and isinstance(error, ConnectionLostError | RequestTimeoutError):
            self._unknown = True
        if isinstance(error, RequestTimeoutError) and written:
            return False
        if isinstance(error, RequestError) and error.code not in RETRY_CODES:
            return False
        if self._left <= 0 or self.remaining_s(now_s) <= 0:
            return False
        self._left -= 1
        return True

    def verdict(self, topic: str, message_id: str, error: SluiceError) -> SluiceError:
        """The exception to raise after the last attempt; chain it with `from error`."""
        story = "; ".join(self._story)
        if self._unknown:
            return SendUnknownError(
                f"no answer for message {message_id} to {topic!r} (time for all attempts "
                f"{self._timeout_ms} ms): it may be stored or not [{story}].",
                cure="Do not simply send it again unless consumers tolerate duplicates; look it "
                "up by its id first.",
            )
        if isinstance(error, RequestError):
            return error
        return SendError(
            f"message {message_id} to {topic!r} was not stored [{story}].",
            cure="See sluice cluster list, and whether the brokers' addresses are reachable.",
        )
