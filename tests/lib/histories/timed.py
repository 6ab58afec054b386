"""Timed messages of a history: their properties, the time at which each is due, and requests.

A message is delayed by its level (DELAY) or by one of RocketMQ's three timer properties. A history
draws all four, takes some messages back, and asks the master for the list of what is pending. The
simulation (`simulation.replicas.timed`) and the real processes (`histories.processes`) share this.
"""

import random
from collections.abc import Generator
from typing import Any, Final

from histories.history import History, Listed, Outcome, Queue, Timed
from sluicemq.client.core import requests
from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

LEVELS_S: Final = (1, 5, 10, 30)
"""Delays of the first levels of messageDelayLevel."""
TIMERS: Final = ("TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC")
KINDS: Final = ("DELAY", *TIMERS)
Asking = Generator[Command, Command, Any]
"""Yields requests to a master and is sent their answers."""


def delay_of(kind: str, due_ms: float, now_ms: int) -> tuple[int, float]:
    """Return the value of the property `kind` for a message that is to be due at `due_ms`, and the
    earliest time (ms) at which a broker may deliver a message with this value.

    The value is rounded to what the property can say: a level, a second, a millisecond.
    """
    delay_ms = max(due_ms - now_ms, 1)
    if kind == "DELAY":
        level = min(range(len(LEVELS_S)), key=lambda at: abs(LEVELS_S[at] * 1000 - delay_ms))
        return level + 1, now_ms + LEVELS_S[level] * 1000
    if kind == "TIMER_DELAY_SEC":
        seconds = max(round(delay_ms / 1000), 1)
        return seconds, now_ms + seconds * 1000
    if kind == "TIMER_DELIVER_MS":
        return int(due_ms), int(due_ms)
    return int(delay_ms), now_ms + int(delay_ms)


def draw(rng: random.Random, value: str, queue: MessageQueue, due_ms: float) -> Timed:
    """Return a timed message of a random kind."""
    return Timed(value, (queue.topic, queue.queue_id), due_ms, rng.choice(KINDS))


def send(timed: Timed, broker: str, now_ms: int, more: str = "") -> Command:
    """Return the request that sends `timed`, and set its `due_ms` to what the property says.

    `more` are further properties, joined.
    """
    number, timed.due_ms = delay_of(timed.kind, timed.due_ms, now_ms)
    topic, queue_id = timed.queue
    properties = f"UNIQ_KEY\1{timed.value}\2{timed.kind}\1{number}\2{more}"
    outgoing = OutgoingMessage(
        topic, timed.value.encode(), properties, "", 0, 0, wait_store_ok=True
    )
    return requests.send("senders", MessageQueue(topic, broker, queue_id), outgoing, now_ms)


def list_pending(topic: str) -> Asking:
    """Return all pages of a master's list of pending messages. Raises SluiceError."""
    found: list[bodies.WaitingMessage] = []
    cursor: str | None = None
    while True:
        command = requests.list_delayed(topic=topic, cursor=cursor)
        answer = requests.expect_success((yield command))
        found += bodies.decode_waiting(answer.body)
        cursor = (answer.fields or {}).get("cursor")
        if cursor is None:
            return found


def take_back(history: History, topic: str, rng: random.Random, now_ms: Any) -> Asking:
    """Take back one of the pending messages of `topic` that the history has sent.

    The message counts as taken back when the broker says so before the message may be delivered:
    `early_ms` of the history before it is due by `now_ms()`. Raises SluiceError.
    """
    found = yield from list_pending(topic)
    by_value = {timed.value: timed for timed in history.timed}
    if not found:
        return
    waiting = rng.choice(found)
    timed = by_value[waiting.unique_id]
    timed.recall = timed.recall or Outcome.UNSURE
    answer = yield requests.cancel_delayed(handle=waiting.handle)
    if answer.code == ResponseCode.SUCCESS and now_ms() < timed.due_ms - history.early_ms:
        timed.recall = Outcome.OK


def note_pending(history: History, topic: str, now_ms: int) -> Asking:
    """Add the master's list of pending messages to the history. Raises SluiceError."""
    found = yield from list_pending(topic)
    history.listed.append(Listed(now_ms, frozenset(waiting.unique_id for waiting in found)))


def undelivered(history: History, final: dict[Queue, dict[int, str]]) -> set[str]:
    """Return the acknowledged timed messages that nobody took back and that are not in `final`."""
    there = {value for values in final.values() for value in values.values()}
    return {
        timed.value
        for timed in history.timed
        if timed.outcome is Outcome.OK and timed.recall is None and timed.value not in there
    }
