"""Failing handlers against our own servers: retries, dead letters, and that nothing is lost.

The levels of the broker are all one second here: the ladder itself is walked by a manual clock in
tests/unit/broker/test_sendback.py.
"""

import asyncio
import contextlib

from sluicemq import ConnectionLostError, RetryLaterError, Sluice
from sluicemq.client.threaded import Consumer, PushConsumer
from sluicemq.rocketmq import (
    ConsumeConcurrentlyContext,
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    DefaultMQPushConsumer,
    MessageExt,
)
from waiting import until

QUICK = {"messageDelayLevel": " ".join(["1s"] * 18)}


async def take(stream, count, timeout_s=15.0):
    async with asyncio.timeout(timeout_s):
        return [await stream.receive() for _ in range(count)]


async def test_a_failing_message_is_redelivered_by_the_broker_and_becomes_a_dead_letter(
    empty_cluster,
):
    empty_cluster.start_broker(**QUICK)
    seen: list[tuple[str, str, int, str | None]] = []

    async def handler(message):
        seen.append((message.topic, message.body.decode(), message.reconsume_times, message.tag))
        if message.body == b"bad":
            raise ValueError("no")

    async with Sluice(empty_cluster.addresses) as mq:
        await mq.send("t", b"bad", tag="A")
        await mq.send("t", b"good", tag="A")
        consumer = mq.consumer("g", handler, max_reconsume_times=2).subscribe("t", tags="A")
        async with consumer:
            await until(lambda: len(seen) >= 4)
            assert sorted(seen) == [("t", "bad", n, "A") for n in range(3)] + [
                ("t", "good", 0, "A")
            ]
        async with mq.subscribe("%DLQ%g", group="undertaker") as dead:
            (letter,) = await take(dead, 1)
            assert (letter.topic, letter.body, letter.reconsume_times) == ("%DLQ%g", b"bad", 3)
            await letter.ack()
        lag = await mq.admin.lag("g")
        assert {item.queue.topic: 0 for item in lag} == {
            item.queue.topic: item.offset_max - item.committed for item in lag
        }, "originals and retries count as done"


async def test_a_group_of_dead_letters_has_retries_and_dead_letters_of_its_own(empty_cluster):
    empty_cluster.start_broker(**QUICK)
    seen = []

    async def handler(message):
        seen.append((message.topic, message.reconsume_times))
        raise RetryLaterError

    async with Sluice(empty_cluster.addresses) as mq:
        await mq.send("t", b"x")
        async with mq.subscribe("t", group="g") as stream:
            (message,) = await take(stream, 1)
            assert await message.reject(-1)
            assert not await message.ack(), "it is done"
        undertaker = mq.consumer("u", handler, max_reconsume_times=1).subscribe("%DLQ%g")
        async with undertaker:
            await until(lambda: len(seen) == 2)
        assert seen == [("%DLQ%g", 1), ("%DLQ%g", 1)]
        async with mq.subscribe("%DLQ%u", group="last") as stream:
            (last,) = await take(stream, 1)
            assert last.body == b"x"


async def test_a_rejected_message_of_a_stream_is_redelivered_and_the_others_do_not_wait(
    empty_cluster,
):
    empty_cluster.start_broker(**QUICK)
    async with Sluice(empty_cluster.addresses) as mq:
        queue = None
        for n in range(5):
            queue = (await mq.send("t", b"%d" % n, queue=queue)).queue
        async with mq.subscribe("t", group="g") as stream:
            first = await take(stream, 5)
            await first[1].reject(delay_level=1)
            for message in (first[0], *first[2:]):
                await message.ack()
            (again,) = await take(stream, 1)
            assert (again.body, again.topic, again.reconsume_times) == (b"1", "t", 1)
            await again.ack()


async def test_a_message_is_processed_again_if_no_broker_can_store_it(empty_cluster):
    """Neither 36 nor a copy can be stored: nothing is committed past it, nothing is lost."""
    empty_cluster.start_broker(**QUICK)
    calls = []
    fail = asyncio.Event()

    async def handler(message):
        calls.append(message.attempt)
        if not fail.is_set():
            await fail.wait()
            raise ValueError("after the broker went away")

    async with Sluice(empty_cluster.addresses, send_timeout_ms=1000) as mq:
        await mq.send("t", b"x")
        consumer = mq.consumer("g", handler).subscribe("t")
        async with consumer:
            await until(lambda: calls)
            port = await asyncio.to_thread(empty_cluster.stop_broker)
            fail.set()
            await until(lambda: len(calls) == 2, 30)
            assert calls == [1, 2]
            await asyncio.to_thread(empty_cluster.start_broker, "broker-a", port, **QUICK)
        queues = await mq.queues("t")
        offsets: list[int | None] = []
        while len(offsets) < len(queues):  # for a moment the client does not ask it again
            with contextlib.suppress(ConnectionLostError):
                offsets = [await mq.admin.committed_offset("g", queue) for queue in queues]
            await asyncio.sleep(0.05)
        assert sum(offset or 0 for offset in offsets) <= 1


def test_blocking_consumers_reject_and_raise(empty_cluster):
    empty_cluster.start_broker(**QUICK)
    seen = []

    def handler(message):
        seen.append(message.reconsume_times)
        if message.reconsume_times == 0:
            raise RetryLaterError(delay_level=2)

    async def send():
        async with Sluice(empty_cluster.addresses) as mq:
            await mq.send("t", b"x")

    asyncio.run(send())
    with Consumer(empty_cluster.addresses, "t", group="g1") as stream:
        message = stream.receive(10)
        assert message is not None
        assert message.reject(1)
        again = stream.receive(10)
        assert again is not None
        assert again.reconsume_times == 1
        again.ack()
    with PushConsumer(empty_cluster.addresses, "g2", handler).subscribe("t"):
        asyncio.run(until(lambda: seen == [0, 1]))


def test_a_listener_in_rocketmqs_words_says_when_it_wants_the_message_again(empty_cluster):
    empty_cluster.start_broker(**QUICK)
    seen = []

    def listener(messages: list[MessageExt], context: ConsumeConcurrentlyContext):
        seen.append((messages[0].topic, messages[0].reconsume_times))
        context.delay_level_when_next_consume = -1 if messages[0].reconsume_times else 1
        return ConsumeConcurrentlyStatus.RECONSUME_LATER

    async def send():
        async with Sluice(empty_cluster.addresses) as mq:
            await mq.send("t", b"x")

    asyncio.run(send())
    consumer = DefaultMQPushConsumer("g", namesrv_addr=empty_cluster.addresses[0])
    consumer.set_consume_from_where(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    consumer.subscribe("t")
    consumer.register_message_listener(listener)
    with consumer:
        asyncio.run(until(lambda: len(seen) == 2))
    with Consumer(empty_cluster.addresses, "%DLQ%g", group="u") as dead:
        assert dead.receive(10) is not None
    assert seen == [("t", 0), ("t", 1)]
