"""Test the shop with a real broker and virtual time. Run: pytest."""

from shop import place, start_shipping
from sluicemq.testing.embedded import EmbeddedSluice


async def test_an_order_is_shipped(sluicemq: EmbeddedSluice) -> None:
    shipped: list[str] = []
    await place(sluicemq, "order-1")
    await start_shipping(sluicemq, shipped.append)
    # Returns when client and broker are idle, so that the test neither sleeps nor polls.
    await sluicemq.clock.settle()
    assert shipped == ["order-1"]


async def test_a_reminder_comes_after_half_an_hour(sluicemq: EmbeddedSluice) -> None:
    await place(sluicemq, "order-2")
    began = sluicemq.clock.now()
    async for message in sluicemq.subscribe("reminders", group="reminding"):
        assert message.body == b"order-2"
        await message.ack()
        break
    assert round((sluicemq.clock.now() - began).total_seconds()) == 30 * 60


async def test_an_order_that_cannot_be_shipped_ends_in_the_dead_letters(
    sluicemq: EmbeddedSluice,
) -> None:
    tried: list[str] = []

    def ship(order: str) -> None:
        tried.append(order)
        raise RuntimeError("no truck")

    await place(sluicemq, "order-3")
    await start_shipping(sluicemq, ship)
    await sluicemq.clock.advance(hours=5)  # virtual time, for all retries of the broker
    assert len(tried) == 1 + 16
    async for message in sluicemq.subscribe("%DLQ%shipping", group="lost-parcels"):
        assert message.body == b"order-3"
        break


async def test_a_restart_of_the_broker_loses_no_order(sluicemq: EmbeddedSluice) -> None:
    shipped: list[str] = []
    await place(sluicemq, "order-4")
    await sluicemq.servers.restart_broker()
    await start_shipping(sluicemq, shipped.append)
    await sluicemq.clock.settle()
    assert shipped == ["order-4"]
