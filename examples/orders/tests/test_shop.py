"""The shop in a test: real servers in this process, hours of virtual time in a second."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from shop.desk import Desk, WrongStateError
from shop.events import TOPIC, Order, event
from shop.parcels import CarrierAwayError
from shop.review import large_orders
from shop.staff import make_topics, open_shop
from shop.tables import announced, bookings, history, letters, open_database, orders
from sqlalchemy.exc import IntegrityError

LAMP = Order("17", "north", 2_500)
PIANO = Order("18", "north", 240_000)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = open_database(tmp_path / "shop.db")
    yield engine
    engine.dispose()


async def takes_all(order: Order) -> None:
    """A carrier that is always there."""


def rows(engine: sa.Engine, *columns: Any) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.select(*columns))]


async def received(mq, count, **filters):
    """The first messages of the topic that a new group gets."""
    async with mq.subscribe(TOPIC, group="a-look", **filters) as stream:
        return [await stream.receive() for _ in range(count)]


async def test_a_tag_chooses_events_and_an_expression_chooses_orders(sluicemq):
    for order in (LAMP, PIANO):
        await sluicemq.send(event("placed", order))
    await sluicemq.send(event("paid", PIANO))

    (paid,) = await received(sluicemq, 1, tags="paid")
    assert paid.keys == ("18",)
    assert paid.properties["cents"] == "240000"

    async for order in large_orders(sluicemq):
        assert order == PIANO
        break


async def test_an_order_goes_its_way(sluicemq, engine):
    desk = await open_shop(sluicemq, engine, takes_all)
    await desk.place(LAMP)
    await desk.move(LAMP, "placed", "paid")
    await sluicemq.clock.settle()
    assert rows(engine, orders.c.state) == [("shipped",)]
    assert rows(engine, bookings) == [("north", 2_500)]
    assert rows(engine, history.c.event) == [("placed",), ("paid",), ("shipped",)]


async def test_a_change_that_fails_is_not_announced(sluicemq, engine):
    desk = Desk(sluicemq, engine)
    await make_topics(sluicemq)
    await desk.place(LAMP)
    with pytest.raises(IntegrityError):
        await desk.place(LAMP)
    with pytest.raises(WrongStateError):
        await desk.move(PIANO, "placed", "paid")
    await desk.move(LAMP, "placed", "cancelled")
    assert [message.tag for message in await received(sluicemq, 2)] == ["placed", "cancelled"]


async def test_the_broker_asks_when_a_desk_dies(sluicemq, engine):
    await make_topics(sluicemq)
    client = sluicemq.servers.client()
    dying = Desk(client, engine)
    row = sa.insert(orders).values(id="17", region="north", cents=2_500, state="placed")
    async with dying.producer.transaction(event("placed", LAMP), check_after_s=60) as transaction:
        dying.write(LAMP, row, transaction.transaction_id)
        transaction.unknown()  # the row is stored, but the commit is never sent
    await client.close()

    await Desk(sluicemq, engine).open()
    await sluicemq.clock.advance(minutes=2)
    (placed,) = await received(sluicemq, 1)
    assert placed.tag == "placed"


async def test_a_payment_is_booked_once(sluicemq, engine):
    await open_shop(sluicemq, engine, takes_all)
    for _ in range(3):
        await sluicemq.send(event("paid", LAMP))
    await sluicemq.clock.settle()
    assert rows(engine, bookings) == [("north", 2_500)]


async def test_who_does_not_pay_gets_a_letter_and_loses_the_order(sluicemq, engine):
    desk = await open_shop(sluicemq, engine, takes_all)
    await desk.place(LAMP)
    await desk.place(PIANO)
    await sluicemq.clock.advance(minutes=20)
    await desk.move(PIANO, "placed", "paid")
    await sluicemq.clock.advance(minutes=5)
    assert rows(engine, letters) == []
    await sluicemq.clock.advance(minutes=10)
    assert rows(engine, letters) == [("17", "25.00 are due")]
    await sluicemq.clock.advance(hours=2)
    assert rows(engine, orders.c.id, orders.c.state) == [("17", "cancelled"), ("18", "shipped")]


async def test_a_parcel_waits_for_the_carrier(sluicemq, engine):
    tries = []

    async def comes_back_in_a_minute(order: Order) -> None:
        tries.append(sluicemq.clock.now())
        if (tries[-1] - tries[0]).total_seconds() < 60:
            raise CarrierAwayError

    desk = await open_shop(sluicemq, engine, comes_back_in_a_minute)
    await desk.place(LAMP)
    await desk.move(LAMP, "placed", "paid")
    await sluicemq.clock.advance(minutes=3)
    assert [round((time - tries[0]).total_seconds()) for time in tries] == [0, 10, 40, 100]
    assert rows(engine, orders.c.state) == [("shipped",)]


async def test_a_parcel_that_cannot_leave_ends_in_the_dead_letters(sluicemq, engine):
    async def is_gone(order: Order) -> None:
        raise CarrierAwayError

    desk = await open_shop(sluicemq, engine, is_gone)
    await desk.place(LAMP)
    await desk.move(LAMP, "placed", "paid")
    await sluicemq.clock.advance(minutes=10)
    assert rows(engine, letters) == [("17", "staff: not shipped after 5 retries")]
    assert rows(engine, orders.c.state) == [("paid",)]


async def test_the_row_of_an_event_bears_the_id_of_its_message(sluicemq, engine):
    desk = Desk(sluicemq, engine)
    await make_topics(sluicemq)
    await desk.place(LAMP)
    (placed,) = await received(sluicemq, 1)
    assert rows(engine, announced) == [(placed.message_id, "17")]
