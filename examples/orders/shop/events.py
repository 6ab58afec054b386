"""The events of orders, as messages of one topic.

The tag says what happened, the key finds all messages of an order, filters can use the properties,
and the sharding key keeps the events of an order in their order.
"""

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from sluicemq import Message

TOPIC = "shop-orders"
REMINDERS = "shop-reminders"


@dataclass(frozen=True)
class Order:
    """An order: its number, the region it is sent to, and its price."""

    id: str
    region: str
    cents: int


def event(name: str, order: Order) -> Message:
    """Return the message for an event of an order: placed, paid, shipped or cancelled."""
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
    """Return the order in the body of a message."""
    return Order(**json.loads(message.body))
