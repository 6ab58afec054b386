"""Listeners in RocketMQ's words: concurrent or orderly, a function or an object.

    consumer.register_message_listener(listener)

A listener is an object of one of the two classes, or a function (then it is a concurrent one, or
an orderly one with `orderly=True`) of the messages, or of the messages and a context.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.errors import RetryLaterError
from sluicemq.model.topic import MessageQueue
from sluicemq.rocketmq.values import ConsumeConcurrentlyStatus, MessageExt


class ConsumeOrderlyStatus(Enum):
    """What an orderly listener returns; None counts as success."""

    SUCCESS = 0
    SUSPEND_CURRENT_QUEUE_A_MOMENT = 1


@dataclass(slots=True)
class ConsumeConcurrentlyContext:
    """`delay_level_when_next_consume`: 0 the ladder, n a level of the broker, -1 dead letters.
    `ack_index`: after CONSUME_SUCCESS the index of the last message that is done; those behind it
    come again."""

    message_queue: MessageQueue
    delay_level_when_next_consume: int = 0
    ack_index: int = 2**31 - 1


@dataclass(slots=True)
class ConsumeOrderlyContext:
    """`suspend_current_queue_time_millis`: how long the queue rests; -1 as the consumer says."""

    message_queue: MessageQueue
    suspend_current_queue_time_millis: int = -1


class MessageListenerConcurrently:
    """Messages of a queue in any order, several at a time."""

    def consume_message(
        self, messages: list[MessageExt], context: ConsumeConcurrentlyContext
    ) -> ConsumeConcurrentlyStatus | None:
        raise NotImplementedError


class MessageListenerOrderly:
    """Messages of a queue one after the other."""

    def consume_message(
        self, messages: list[MessageExt], context: ConsumeOrderlyContext
    ) -> ConsumeOrderlyStatus | None:
        raise NotImplementedError


Listener = MessageListenerConcurrently | MessageListenerOrderly | Callable[..., Any]
_AGAIN = frozenset({
    ConsumeConcurrentlyStatus.RECONSUME_LATER, ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT,
})  # fmt: skip


class Listening:
    """A listener as the handler of a consumer."""

    def __init__(self, listener: Listener, *, orderly: bool) -> None:
        self.is_orderly = orderly or isinstance(listener, MessageListenerOrderly)
        if isinstance(listener, MessageListenerConcurrently | MessageListenerOrderly):
            self._function: Callable[..., Any] = listener.consume_message
        else:
            self._function = listener
        self._takes_context = _takes_two(self._function)

    def __call__(self, messages: list[ReceivedMessage]) -> None:
        """Raises RetryLaterError when the listener wants messages again."""
        context = self._context(messages[0].queue)
        given = [MessageExt(message) for message in messages]
        status = self._function(given, context) if self._takes_context else self._function(given)
        if status in _AGAIN:
            raise _later(context)
        if isinstance(context, ConsumeConcurrentlyContext):
            done = max(0, context.ack_index + 1)
            if done < len(messages):
                raise _later(context, done)

    def _context(self, queue: MessageQueue) -> ConsumeConcurrentlyContext | ConsumeOrderlyContext:
        return ConsumeOrderlyContext(queue) if self.is_orderly else (
            ConsumeConcurrentlyContext(queue)
        )  # fmt: skip


def _later(
    context: ConsumeConcurrentlyContext | ConsumeOrderlyContext, done: int = 0
) -> RetryLaterError:
    if isinstance(context, ConsumeConcurrentlyContext):
        return RetryLaterError(delay_level=context.delay_level_when_next_consume, done=done)
    time_ms = context.suspend_current_queue_time_millis
    # Java's bounds: 10 ms to 30 s.
    suspend_s = None if time_ms == -1 else min(max(time_ms, 10), 30_000) / 1000
    return RetryLaterError(suspend_s=suspend_s)


def _takes_two(function: Callable[..., Any]) -> bool:
    """May it be called with the messages and a context?"""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True
