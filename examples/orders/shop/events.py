"""What happens to orders, as messages.

One topic for all of it. The tag says what happened, the key finds the messages of an order, the
properties are what a filter may ask for, and the sharding key keeps the events of an order in line.
"""

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from sluicemq import Message

TOPIC = "orders"
REMINDERS = "reminders"


@dataclass(frozen=True)
class Order:
    """What was ordered, for how much, and where it goes."""

    id: str
    region: str
    cents: int


def event(name: str, order: Order) -> Message:
    """The message that says `name` (placed, paid, shipped, cancelled) of an order."""
    return Message(
        TOPIC,
        json.dumps(asdict(order)).encode(),
        tag=name,
        keys=(order.id,),
        properties={"region": order.region, "cents": str(order.cents)},
        sharding_key=order.id,
    )


class HasBody(Protocol):
    @property
    def body(self) -> bytes: ...


def order_of(message: HasBody) -> Order:
    """The order that a message is about."""
    return Order(**json.loads(message.body))
