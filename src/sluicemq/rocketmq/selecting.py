"""Queue selectors in RocketMQ's words, for `DefaultMQProducer.send(message, selector=, arg=)`.

    producer.send(message, selector=SelectMessageQueueByHash(), arg=order_id)

The same argument leads to the same queue as with the Java class, as long as the topic has as many
queues: text and whole numbers are hashed as Java hashes them.
"""

from collections.abc import Sequence
from typing import Any

from sluicemq.errors import ConfigurationError
from sluicemq.model.ids import java_hash
from sluicemq.model.topic import MessageQueue
from sluicemq.rocketmq.values import Message


class SelectMessageQueueByHash:
    """The queue by the hash of `arg`: a text, or a whole number of 64 bits."""

    def __call__(self, queues: Sequence[MessageQueue], message: Message, arg: Any) -> MessageQueue:
        del message
        return queues[abs(_hash(arg)) % len(queues)]


def _hash(arg: Any) -> int:
    if isinstance(arg, str):
        return java_hash(arg)
    if not isinstance(arg, int) or not -(2**63) <= arg < 2**63:
        raise ConfigurationError(
            f"the selector's argument is {arg!r}.", cure="Use a text or a whole number."
        )
    if -(2**31) <= arg < 2**31:
        return int(arg)
    folded = (arg ^ (arg >> 32)) & 0xFFFFFFFF
    return folded - (1 << 32) if folded & 0x80000000 else folded
