"""Streams and handlers of the asyncio client."""

import asyncio
from datetime import UTC, datetime

from sluicemq import (
    MessageStream,
    OffsetMoved,
    PushConsumer,
    ReceivedMessage,
    RetryLaterError,
    Sluice,
    Subscription,
)


def moved(event: OffsetMoved) -> None:
    print(event.group, event.queue.queue_id, event.new - event.old, event.lost)


async def book(message: ReceivedMessage) -> None:
    if message.tag is None:
        raise RetryLaterError("not now", delay_level=3)
    print(message.topic, message.keys[0], message.properties["amount"], message.body.decode())
    print(message.reconsume_times, message.attempt, message.queue.broker, message.queue_offset)
    print(message.message_id, message.born_time_ms, message.store_time_ms, message.group)


def book_on_a_thread(message: ReceivedMessage) -> None:
    print(message.body)


async def book_many(messages: list[ReceivedMessage]) -> None:
    print(sum(len(message.body) for message in messages))


async def answer(message: ReceivedMessage) -> None:
    if message.wants_reply:
        await message.reply("12 EUR")


async def main() -> None:
    async with Sluice(["a:9876", "b:9876"], on_moved=moved, credentials=("key", "secret")) as mq:
        stream: MessageStream = mq.subscribe(
            "orders",
            group="audit",
            where="amount > 10 AND TAGS IN ('paid', 'sent')",
            start=datetime(2026, 1, 1, tzinfo=UTC),
            prefetch_count=100,
            prefetch_bytes=1 << 20,
            ordered=False,
            max_reconsume_times=3,
            retry_delay_level=2,
            suspend_s=2.0,
            broadcast=False,
            allocate="consistent_hash",
            span_max=2000,
            topic_count_max=500,
            topic_bytes_max=None,
            commit_period_s=1.0,
            balance_period_s=10.0,
            pull_count=64,
            young_from_first=True,
        )
        async for message in stream:
            done: bool = await message.ack()
            print(message, done)
            break
        async with mq.subscribe("orders", group="other", tags="paid||sent", start="last") as some:
            one: ReceivedMessage = await some.receive()
            await one.reject()
            await one.reject(3, suspend_s=1.0)
            for more in await some.receive_many(50, timeout_s=1.5):
                await more.ack()
            await some.change(where="amount > 20")
            expression: Subscription = some.subscription
            print(expression.expression)

        consumer: PushConsumer = mq.consumer("billing", book, concurrency=8, ordered=True)
        await consumer.subscribe("orders", tags="paid").subscribe("bills").start()
        await consumer.change("orders", where="amount > 3")
        await consumer.unsubscribe("bills")
        await consumer.close(timeout_s=5.0)
        await mq.consumer("threads", handler=book_on_a_thread).subscribe("orders").start()
        await mq.consumer("lists", book_many, batch_max=32).subscribe("orders").start()
        await mq.consumer("prices", answer, start="first").subscribe("prices").run()


asyncio.run(main())
