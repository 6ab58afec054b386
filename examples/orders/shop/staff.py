"""Start everything."""

import sqlalchemy as sa

from shop import books, history, parcels, reminders
from shop.desk import Desk
from shop.events import REMINDERS, TOPIC
from sluicemq import Sluice


async def make_topics(mq: Sluice) -> None:
    """Create the topics. Consumers do not create any."""
    for topic in (TOPIC, REMINDERS, parcels.LOST):
        await mq.admin.create_topic(topic)


async def open_shop(mq: Sluice, engine: sa.Engine, carrier: parcels.Carrier) -> Desk:
    """Start all consumers, and return the desk. They end when `mq` is closed."""
    desk = Desk(mq, engine)
    await make_topics(mq)
    await desk.open()
    await books.start(mq, engine)
    await reminders.start(mq, engine, desk)
    await history.start(mq, engine)
    await parcels.start(mq, engine, carrier, desk)
    return desk
