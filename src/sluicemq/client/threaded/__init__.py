"""Blocking consumers: loop over messages, have a handler called on threads, or poll.

    with Consumer("127.0.0.1:9876", "flights", group="late", where="dep_delay > 60") as messages:
        for message in messages:
            ...
            message.ack()

The blocking producer and the blocking administration are in `sluicemq.client.sync`.
"""

from sluicemq.client.threaded.consumers import (
    BlockingMessage,
    Consumer,
    LitePullConsumer,
    PushConsumer,
)
from sluicemq.client.threaded.portal import Portal, ThreadedClient

__all__ = [
    "BlockingMessage",
    "Consumer",
    "LitePullConsumer",
    "Portal",
    "PushConsumer",
    "ThreadedClient",
]
