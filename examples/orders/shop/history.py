"""What a customer sees of an order: its events, in the order in which they happened."""

from collections.abc import Callable

import sqlalchemy as sa

from shop.events import TOPIC, order_of
from shop.tables import history
from sluicemq import ReceivedMessage, Sluice, idempotent


def historian(engine: sa.Engine) -> Callable[[ReceivedMessage], None]:
    """A handler of all events, for a consumer that is `ordered`."""

    @idempotent(engine)
    def note(message: ReceivedMessage, connection: sa.Connection) -> None:
        row = {"order_id": order_of(message).id, "event": message.tag}
        connection.execute(sa.insert(history).values(row))

    return note


async def start(mq: Sluice, engine: sa.Engine) -> None:
    """Events go into the history, those of an order one after the other."""
    await mq.consumer("history", historian(engine), ordered=True).subscribe(TOPIC).start()
