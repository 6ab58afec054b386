"""What a customer sees of an order: its events, in the order in which they happened."""

from collections.abc import Callable

import sqlalchemy as sa

from shop.events import order_of
from shop.tables import history
from sluicemq import ReceivedMessage, idempotent


def historian(engine: sa.Engine) -> Callable[[ReceivedMessage], None]:
    """A handler of all events, for a consumer that is `ordered`."""

    @idempotent(engine)
    def note(message: ReceivedMessage, connection: sa.Connection) -> None:
        row = {"order_id": order_of(message).id, "event": message.tag}
        connection.execute(sa.insert(history).values(row))

    return note
