"""Effects exactly once, with a real broker that delivers again and again, on SQLite and
PostgreSQL."""

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from sluicemq import RetryLaterError, idempotent
from sluicemq.client.ledger import AsyncLedger, Ledger
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from waiting import limit, until

sys.path.insert(0, str(Path(__file__).parent))

import effects

COUNT = 40
SOON = {"messageDelayLevel": "1s 1s 1s 1s 1s 1s 1s 1s"}
ORDERS = sorted(f"order-{index}" for index in range(COUNT))


async def send_orders(mq: EmbeddedSluice, *, times: int = 1) -> None:
    for order in ORDERS * times:
        await mq.send("orders", order.encode(), properties={"order_id": order})


async def test_a_storm_of_redeliveries_has_its_effects_once(database: sa.URL) -> None:
    """Three rounds of everything; handlers fail after their work, which is undone, and after it was
    committed."""
    effects.prepare(database)
    deliveries: Counter[str] = Counter()
    settled: Counter[str] = Counter()
    ledger = AsyncLedger(database)

    @idempotent(ledger)
    async def work(message, connection):
        for statement in effects.book(message.body.decode()):
            await connection.execute(statement)
        if deliveries[message.message_id] % 3 == 1:
            raise RetryLaterError("the work is rolled back", delay_level=1)

    async def handle(message):
        deliveries[message.message_id] += 1
        await work(message)
        if deliveries[message.message_id] % 5 == 2:
            raise RetryLaterError("the work is committed", delay_level=1)
        settled[message.message_id] += 1

    async with embedded(settings=SOON) as mq:
        await send_orders(mq)
        for storm in range(1, 4):
            async with mq.consumer("billing", handle).subscribe("orders"):
                await until(lambda: len(settled) == COUNT and min(settled.values()) >= storm)  # noqa: B023
            for queue in await mq.admin.queues("orders"):
                await mq.admin.commit_offset("billing", queue, 0)
    await ledger.close()
    assert sum(deliveries.values()) >= 5 * COUNT, "the storm was a breeze"
    assert effects.result(database) == (COUNT, ORDERS)


async def test_two_consumers_that_have_the_same_message_at_once_do_its_work_once(
    database: sa.URL,
) -> None:
    """Two groups with one name for their work, one of coroutines and one of threads, and every
    order sent three times: the same business key in messages with ids of their own."""
    effects.prepare(database)
    seen: Counter[str] = Counter()
    done: Counter[str] = Counter()
    ledgers = AsyncLedger(database), Ledger(database)

    @idempotent(ledgers[0], key="order_id", consumer="billing")
    async def on_loop(message, connection):
        done["loop"] += 1
        for statement in effects.book(message.properties["order_id"]):
            await connection.execute(statement)
            await asyncio.sleep(0)

    @idempotent(ledgers[1], key=lambda message: message.body.decode(), consumer="billing")
    def on_threads(message, connection):
        done["threads"] += 1
        for statement in effects.book(message.properties["order_id"]):
            connection.execute(statement)

    async def first(message):
        await on_loop(message)
        seen["first"] += 1

    def second(message):
        on_threads(message)
        seen["second"] += 1

    async with embedded() as mq:
        await mq.admin.create_topic("orders")
        async with (
            mq.consumer("one", first).subscribe("orders"),
            mq.consumer("two", second).subscribe("orders"),
        ):
            await send_orders(mq, times=3)
            await until(lambda: seen == {"first": 3 * COUNT, "second": 3 * COUNT})
    await ledgers[0].close()
    ledgers[1].close()
    assert effects.result(database) == (COUNT, ORDERS)
    assert done.total() == COUNT


@pytest.mark.timeout(180)
async def test_a_process_that_is_killed_before_the_commit_or_before_the_acknowledgement(
    database: sa.URL, tmp_path: Path
) -> None:
    effects.prepare(database)
    delivered: list[str] = []

    def consume(name_server: str, crash: str, after: int) -> int:
        url = database.render_as_string(hide_password=False)
        words = [effects.__file__, name_server, url, crash, str(after)]
        ended = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=limit(60), check=False
        )
        delivered.extend(ended.stdout.split())
        assert ended.returncode in (0, -9), ended.stderr
        return ended.returncode

    async with embedded(tcp=True, store=tmp_path / "store", settings=SOON) as mq:
        await send_orders(mq)
        name_server = mq.servers.name_server_address
        for crash, after in [("working", 7), ("done", 1), ("done", 12), ("working", 3)]:
            assert await asyncio.to_thread(consume, name_server, crash, after) == -9
            balance, booked = effects.result(database)
            assert balance == len(booked) == len(set(booked)), f"after {crash} {after}"
        assert await asyncio.to_thread(consume, name_server, "never", 0) == 0
    assert len(delivered) > COUNT, "nothing came twice"
    assert effects.result(database) == (COUNT, ORDERS)
