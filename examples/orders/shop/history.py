"""Record the events of each order, in the order in which they happened."""

from collections.abc import Callable

import sqlalchemy as sa

from shop.events import TOPIC, order_of
from shop.tables import history
from sluicemq import ReceivedMessage, Sluice, idempotent


def historian(engine: sa.Engine) -> Callable[[ReceivedMessage], None]:
    """Return a handler for all events, for an ordered consumer."""

    @idempotent(engine)
    def note(message: ReceivedMessage, connection: sa.Connection) -> None:
        row = {"order_id": order_of(message).id, "event": message.tag}
        connection.execute(sa.insert(history).values(row))

    return note


async def start(mq: Sluice, engine: sa.Engine) -> None:
    """Start an ordered consumer that writes events into the history."""
    await mq.consumer("history", historian(engine), ordered=True).subscribe(TOPIC).start()
