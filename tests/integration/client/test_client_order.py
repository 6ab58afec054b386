"""Ordered sending and consuming against our own servers: one at a time, locks, brokers that go."""

import asyncio
import dataclasses
from collections import Counter, defaultdict

import pytest

from sluicemq import ConfigurationError, RetryLaterError, SendError, Sluice
from sluicemq.client.aio import ordered
from sluicemq.client.sync.admin import Admin
from sluicemq.client.threaded import Consumer
from sluicemq.model.ids import java_hash
from sluicemq.model.topic import MessageQueue
from sluicemq.rocketmq import (
    ConsumeFromWhere,
    ConsumeOrderlyStatus,
    DefaultMQProducer,
    DefaultMQPushConsumer,
    Message,
    MessageListenerOrderly,
    SelectMessageQueueByHash,
)
from waiting import limit, until


async def send_orders(mq, orders=10, steps=8):
    for step in range(steps):
        for order in range(orders):
            await mq.send("t", b"%d %d" % (order, step), sharding_key=f"order {order}")


def in_order(seen, orders=10, steps=8):
    by_order = defaultdict(list)
    for order, step in seen:
        by_order[order].append(step)
    return dict(by_order) == {order: list(range(steps)) for order in range(orders)}


def parsed(message):
    return tuple(map(int, message.body.split()))


async def test_a_key_leads_to_one_queue_and_an_ordered_handler_sees_its_messages_in_order(cluster):
    seen = []
    running = Counter()
    failed = set()

    async def handler(message):
        running[message.queue] += 1
        assert running[message.queue] == 1, "one message of a queue at a time"
        await asyncio.sleep(0.001)
        running[message.queue] -= 1
        order, step = parsed(message)
        if step == 3 and order not in failed:
            failed.add(order)
            raise ValueError("the first time")
        seen.append((order, step))

    async with Sluice(cluster.addresses) as mq:
        await send_orders(mq)
        consumer = mq.consumer("g", handler, ordered=True, suspend_s=0.05).subscribe("t")
        async with consumer:
            await until(lambda: len(seen) == 80)
    assert len(failed) == 10
    assert in_order(seen)


async def test_two_members_share_the_queues_and_keep_the_order_when_one_leaves(cluster):
    seen = []

    async def handler(message):
        await asyncio.sleep(0.002)
        seen.append(parsed(message))

    async with Sluice(cluster.addresses) as one, Sluice(cluster.addresses) as two:
        await send_orders(one, steps=20)
        first = one.consumer("g", handler, ordered=True).subscribe("t")
        await first.start()
        await until(lambda: len(seen) > 10)
        second = two.consumer("g", handler, ordered=True).subscribe("t")
        await second.start()
        await until(lambda: len(seen) > 100)
        await first.close()
        await until(lambda: len(set(seen)) == 200)
        await second.close()
    distinct = list(dict.fromkeys(seen))
    assert in_order(distinct, steps=20)
    assert len(seen) == 200, "nothing was handled twice: every lock was given up after the commit"


async def test_a_stream_hands_out_the_next_message_of_a_queue_after_an_acknowledgement(
    cluster,
):
    async with Sluice(cluster.addresses) as mq:
        queue = (await mq.send("t", b"0")).queue
        for n in range(1, 4):
            await mq.send("t", b"%d" % n, queue=queue)
        async with mq.subscribe("t", group="g", ordered=True, suspend_s=0.05) as stream:
            first = await stream.receive()
            assert await stream.receive_many(10, 0.2) == []
            await first.ack()
            second = await stream.receive()
            await second.reject()
            again = await stream.receive()
            assert (again.body, again.attempt, again.reconsume_times) == (b"1", 2, 1)
            await again.ack()
            assert (await stream.receive()).body == b"2"


async def test_an_ordered_message_that_fails_too_often_is_a_dead_letter_and_its_queue_continues(
    cluster,
):
    seen = []

    async def handler(message):
        seen.append(message.body)
        if message.body == b"bad":
            raise RetryLaterError(suspend_s=0.02)

    async with Sluice(cluster.addresses) as mq:
        queue = (await mq.send("t", b"bad")).queue
        await mq.send("t", b"good", queue=queue)
        consumer = mq.consumer("g", handler, ordered=True, max_reconsume_times=3).subscribe("t")
        async with consumer:
            await until(lambda: b"good" in seen)
            assert seen == [b"bad"] * 4 + [b"good"]
            async with mq.subscribe("%DLQ%g", group="u") as dead:
                async with asyncio.timeout(limit(10)):
                    assert (await dead.receive()).body == b"bad"


async def test_a_lost_lock_stops_the_queue_at_once_and_nothing_is_committed_after_it(
    cluster, monkeypatch
):
    monkeypatch.setattr(ordered, "RENEW_PERIOD_S", 0.1)
    seen = []
    go_on = asyncio.Event()

    async def handler(message):
        seen.append(message.body)
        await go_on.wait()

    broker = cluster.brokers["broker-a"]
    async with Sluice(cluster.addresses) as mq:
        queue = (await mq.send("t", b"0")).queue
        for n in range(1, 5):
            await mq.send("t", b"%d" % n, queue=queue)
        consumer = mq.consumer("g", handler, ordered=True).subscribe("t")
        async with consumer:
            await until(lambda: seen)
            # As if the broker had restarted and another client had been quicker.
            locks = broker.core.locks
            locks.unlock("g", mq.client_id, [queue])
            assert locks.lock("g", "another", [queue]) == {queue}
            member = mq._members["g"]
            await until(lambda: queue not in member.readers.queues)
            go_on.set()
            await asyncio.sleep(0.3)
            assert seen == [b"0"], "nothing was handed out without the lock"
            assert await mq.admin.committed_offset("g", queue) == 0
            locks.unlock("g", "another", [queue])
            await until(lambda: len(seen) == 6)
            assert seen == [b"0", b"0", b"1", b"2", b"3", b"4"]


async def test_a_group_is_ordered_or_not_but_not_both(cluster):
    async with Sluice(cluster.addresses) as mq:
        await mq.send("t", b"0")
        async with mq.subscribe("t", group="g", ordered=True):
            with pytest.raises(ConfigurationError, match="ordered"):
                await mq.subscribe("t", group="g").start()


def test_a_blocking_consumer_reads_in_order(cluster):
    async def send():
        async with Sluice(cluster.addresses) as mq:
            await send_orders(mq, orders=3, steps=5)

    asyncio.run(send())
    seen = []
    with Consumer(cluster.addresses, "t", group="g", ordered=True) as stream:
        while len(seen) < 15:
            message = stream.receive(10)
            assert message is not None
            seen.append(parsed(message))
            message.ack()
    assert in_order(seen, orders=3, steps=5)


def test_an_orderly_listener_in_rocketmqs_words(cluster):
    seen = []

    class Listener(MessageListenerOrderly):
        def consume_message(self, messages, context):
            step = tuple(map(int, messages[0].body.split()))
            if step not in seen and messages[0].reconsume_times == 0:
                context.suspend_current_queue_time_millis = 10
                return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
            seen.append(step)
            return ConsumeOrderlyStatus.SUCCESS

    with DefaultMQProducer("p", namesrv_addr=cluster.addresses[0]) as producer:
        queues = set()
        for step in range(5):
            message = Message("t", f"0 {step}")
            sent = producer.send(message, selector=SelectMessageQueueByHash(), arg="key")
            queues.add(sent.message_queue)
    assert {queue.queue_id for queue in queues} == {abs(java_hash("key")) % 4}
    consumer = DefaultMQPushConsumer("g", namesrv_addr=cluster.addresses[0])
    consumer.set_consume_from_where(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    consumer.subscribe("t")
    consumer.register_message_listener(Listener())
    with consumer:
        asyncio.run(until(lambda: len(seen) == 5))
    assert in_order(seen, orders=1, steps=5)


# --- strict order and its opposite, with two brokers


async def test_without_strict_order_the_other_broker_takes_over_and_the_key_changes_its_queue(
    empty_cluster,
):
    empty_cluster.start_broker("broker-a")
    empty_cluster.start_broker("broker-b")
    with Admin(empty_cluster.addresses) as admin:
        admin.create_topic("t", queues=2)
    async with Sluice(empty_cluster.addresses) as mq:
        places = {f"key {n}": await where(mq, f"key {n}") for n in range(20)}
        assert {queue.broker for queue in places.values()} == {"broker-a", "broker-b"}
        key = next(key for key, queue in places.items() if queue.broker == "broker-b")
        await asyncio.to_thread(empty_cluster.stop_broker, "broker-b")
        moved = await where(mq, key)
        assert moved.broker == "broker-a"
        assert len(await mq.default_producer.queues("t")) == 2


async def where(mq, key) -> MessageQueue:
    return (await mq.send("t", key, sharding_key=key)).queue


async def where_at_last(mq, key) -> MessageQueue:
    """A broker that was away is tried again after a growing pause."""
    async with asyncio.timeout(limit(15)):
        while True:
            try:
                return await where(mq, key)
            except SendError:
                await asyncio.sleep(0.1)


async def test_a_topic_of_strict_order_keeps_its_queues_while_a_broker_is_away(empty_cluster):
    parts = empty_cluster.name_servers[0].requests
    parts.config = dataclasses.replace(parts.config, order_message_enable=True)
    empty_cluster.start_broker("broker-a")
    empty_cluster.start_broker("broker-b")
    with Admin(empty_cluster.addresses) as admin:
        admin.create_topic("t", queues=2, order=True)
        route = admin.find_route("t")
        assert route is not None
        assert route.order_topic_config == "broker-a:2;broker-b:2"
    async with Sluice(empty_cluster.addresses, send_timeout_ms=3000) as mq:
        places = {f"key {n}": await where(mq, f"key {n}") for n in range(20)}
        assert len({*places.values()}) == 4
        for broker in empty_cluster.brokers.values():
            assert broker.core.topics.table["t"].config.order
        port = await asyncio.to_thread(empty_cluster.stop_broker, "broker-b")
        for key, queue in places.items():
            if queue.broker == "broker-a":
                assert await where(mq, key) == queue
            else:
                with pytest.raises(SendError):
                    await where(mq, key)
                break
        assert len(await mq.default_producer.queues("t")) == 4
        await asyncio.to_thread(empty_cluster.start_broker, "broker-b", port)
        for key, queue in places.items():
            assert await where_at_last(mq, key) == queue
    with Admin(empty_cluster.addresses) as admin:
        admin.create_topic("t", queues=2, order=False)
        route = admin.find_route("t")
        assert route is not None
        assert not route.order_topic_config
