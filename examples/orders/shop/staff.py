"""Everybody at work: which consumer group reads what."""

import sqlalchemy as sa

from shop.books import bookkeeper
from shop.desk import Desk
from shop.events import REMINDERS, TOPIC
from shop.history import historian
from shop.parcels import RETRIES_MAX, Carrier, shipper, undertaker
from shop.reminders import planner, quitter, reminder
from sluicemq import Sluice


async def make_topics(mq: Sluice) -> None:
    """Consumers do not create topics."""
    for topic in (TOPIC, REMINDERS, "%DLQ%parcels"):
        await mq.admin.create_topic(topic)


async def open_shop(mq: Sluice, engine: sa.Engine, carrier: Carrier) -> Desk:
    """Starts all consumers; they end when `mq` is closed."""
    desk = Desk(mq, engine)
    await make_topics(mq)
    await desk.open()
    await mq.consumer("books", bookkeeper(engine)).subscribe(TOPIC, tags="paid").start()
    await mq.consumer("planner", planner(mq)).subscribe(TOPIC, tags="placed").start()
    await mq.consumer("reminder", reminder(engine)).subscribe(REMINDERS, tags="remind").start()
    await mq.consumer("quitter", quitter(desk)).subscribe(REMINDERS, tags="give_up").start()
    await mq.consumer("history", historian(engine), ordered=True).subscribe(TOPIC).start()
    parcels = mq.consumer("parcels", shipper(carrier, desk), max_reconsume_times=RETRIES_MAX)
    await parcels.subscribe(TOPIC, tags="paid").start()
    await mq.consumer("undertaker", undertaker(engine)).subscribe("%DLQ%parcels").start()
    return desk
