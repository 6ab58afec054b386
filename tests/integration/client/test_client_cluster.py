"""The Python client against our own servers: exact sets of messages, restarts, fail-over."""

import asyncio
import itertools

import pytest

from sluicemq import (
    ConfigurationError,
    ConnectionLostError,
    GroupNotFoundError,
    Message,
    MessageQueue,
    PullStatus,
    RouteNotFoundError,
    SendError,
    Sluice,
)
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.client.sync.producer import Producer
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.record.codec import decode_records
from waiting import limit


async def collect(stream, count, *, ack=True, timeout_s=10.0):
    seen = []
    async with asyncio.timeout(timeout_s):
        while len(seen) < count:
            for message in await stream.receive_many(100, None):
                seen.append(message)
                if ack:
                    await message.ack()
    return seen


def bodies(messages):
    return sorted(int(message.body) for message in messages)


async def test_every_kind_of_send_arrives_exactly(cluster):
    async with Sluice(cluster.addresses) as mq:
        await asyncio.gather(*(mq.send("t", b"%d" % n, tag="A") for n in range(200)))
        await mq.send_batch([Message("t", b"%d" % n, tag="B") for n in range(200, 300)])
        for n in range(300, 310):
            await mq.send_oneway("t", b"%d" % n, tag="C")
        big = b"%d" % 310 + b" " * 100_000
        await mq.send("t", big, tag="D")
        async with mq.subscribe("t", group="g") as stream:
            messages = await collect(stream, 311)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await stream.receive()
    assert bodies(messages) == list(range(311))
    assert next(message for message in messages if message.tag == "D").body == big


async def test_messages_of_one_queue_come_in_their_order(cluster):
    async with Sluice(cluster.addresses) as mq:
        await mq.send("t", b"0")
        queue = (await mq.queues("t"))[1]
        for n in range(1, 100):
            await mq.send("t", b"%d" % n, queue=queue)
        async with mq.subscribe("t", group="g") as stream:
            messages = await collect(stream, 100)
    mine = [message for message in messages if message.queue == queue and message.body != b"0"]
    assert [int(message.body) for message in mine] == list(range(1, 100))


async def test_tags_and_sql_select_at_the_broker_what_they_say(cluster):
    async with Sluice(cluster.addresses) as mq:
        for n in range(120):
            await mq.send("t", b"%d" % n, tag="ABC"[n % 3], properties={"n": str(n), "k": "x'y"})
        for options, wanted in [
            ({"tags": "A||C"}, {n for n in range(120) if n % 3 != 1}),
            ({"tags": "B"}, set(range(1, 120, 3))),
            ({"where": "n BETWEEN 10 AND 19 AND TAGS IN ('A', 'B')"},
             {n for n in range(10, 20) if n % 3 < 2}),
            ({"where": "k = 'x''y' AND (n < 2 OR n > 117)"}, {0, 1, 118, 119}),
        ]:  # fmt: skip
            async with mq.subscribe("t", group=f"g{hash(str(options)) % 997}", **options) as stream:
                assert bodies(await collect(stream, len(wanted))) == sorted(wanted)
        assert {len(options) for options in ({"a": 1},)} == {1}


async def test_what_was_not_acknowledged_comes_again_after_a_restart_of_the_broker(cluster):
    async with Sluice(cluster.addresses) as mq:
        for n in range(20):
            await mq.send("t", b"%d" % n)
        async with mq.subscribe("t", group="g") as stream:
            messages = await collect(stream, 20, ack=False)
            done = [message for message in messages if int(message.body) < 15]
            for message in done:
                await message.ack()
    port = cluster.stop_broker()
    cluster.start_broker(port=port)
    async with Sluice(cluster.addresses) as mq:
        async with asyncio.timeout(limit(10)):
            while "t" not in await mq.admin.topics():
                await asyncio.sleep(0.05)
        async with mq.subscribe("t", group="g") as stream:
            again = await collect(stream, 5)
    assert {15, 16, 17, 18, 19} <= set(bodies(again))


async def test_a_restart_of_the_broker_under_load_loses_nothing_acknowledged(cluster):
    stored: set[int] = set()
    seen: set[int] = set()
    restarted = asyncio.Event()

    async def produce(mq):
        for n in itertools.count():
            try:
                await mq.send("t", b"%d" % n)
            except (SendError, ConnectionLostError, RouteNotFoundError):
                pass
            else:
                stored.add(n)
                if restarted.is_set() and len(stored) > 150:
                    return
            await asyncio.sleep(0.005)

    async def consume(mq):
        async for message in mq.subscribe("t", group="g"):
            seen.add(int(message.body))
            await message.ack()

    async with Sluice(cluster.addresses) as mq:
        await mq.send("t", b"-1")
        stored.add(-1)
        async with asyncio.TaskGroup() as group:
            consuming = group.create_task(consume(mq))
            producing = group.create_task(produce(mq))
            async with asyncio.timeout(limit(20)):
                while len(stored) < 50:
                    await asyncio.sleep(0.01)
            port = await asyncio.to_thread(cluster.stop_broker)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(cluster.start_broker, port=port)
            restarted.set()
            await producing
            async with asyncio.timeout(limit(20)):
                while not stored <= seen:
                    await asyncio.sleep(0.05)
            consuming.cancel()
    assert len(stored) > 100


async def test_sends_go_to_the_broker_that_is_left_and_come_back(empty_cluster):
    cluster = empty_cluster
    for name in ("broker-a", "broker-b"):
        cluster.start_broker(name)
    async with Sluice(cluster.addresses) as mq:
        await mq.admin.create_topic("t", queues=2)
        used = {(await mq.send("t", b"x")).queue.broker for _ in range(8)}
        assert used == {"broker-a", "broker-b"}
        await asyncio.to_thread(cluster.stop_broker, "broker-a")
        results = [await mq.send("t", b"x") for _ in range(20)]
        assert {result.queue.broker for result in results} == {"broker-b"}


async def test_one_of_several_name_servers_is_enough(cluster):
    async with Sluice(["127.0.0.1:1", *cluster.addresses]) as mq:
        await mq.send("t", b"0")
        async with mq.subscribe("t", group="g") as stream:
            assert bodies(await collect(stream, 1)) == [0]


async def test_members_share_the_queues_and_take_over_from_one_that_leaves(cluster):
    async with Sluice(cluster.addresses) as one, Sluice(cluster.addresses) as two:
        await one.admin.create_topic("t", queues=4)
        seen: dict[str, list[int]] = {"one": [], "two": []}

        async def consume(mq, name):
            async for message in mq.subscribe("t", group="g"):
                seen[name].append(int(message.body))
                await message.ack()

        async with asyncio.TaskGroup() as group:
            first = group.create_task(consume(one, "one"))
            second = group.create_task(consume(two, "two"))
            async with asyncio.timeout(limit(10)):
                while len(await one.admin.members("g")) != 2:
                    await asyncio.sleep(0.05)
                while [len(m.queues) for m in (await one.admin.group("g")).members] != [2, 2]:
                    await asyncio.sleep(0.1)
                await asyncio.sleep(0.3)
                for n in range(100):
                    await one.send("t", b"%d" % n)
                while len(seen["one"]) + len(seen["two"]) < 100:
                    await asyncio.sleep(0.05)
            assert sorted(seen["one"] + seen["two"]) == list(range(100))
            assert len(seen["one"]) == len(seen["two"]) == 50
            second.cancel()
            async with asyncio.timeout(limit(10)):
                while len(await one.admin.members("g")) != 1:
                    await asyncio.sleep(0.05)
                for n in range(100, 140):
                    await one.send("t", b"%d" % n)
                while len(seen["one"]) < 90:
                    await asyncio.sleep(0.05)
            first.cancel()
    assert sorted(seen["one"] + seen["two"]) == list(range(140))


async def test_idle_members_are_shown_with_the_reason(cluster):
    async with Sluice(cluster.addresses) as one, Sluice(cluster.addresses) as two:
        await one.admin.create_topic("t", queues=1)
        async with one.subscribe("t", group="g"), two.subscribe("t", group="g"):
            report = await one.admin.group("g")
    idle = [member for member in report.members if member.idle_because]
    assert len(idle) == 1
    assert "2 members share 1 queues" in idle[0].idle_because


async def test_missing_groups_topics_and_switches_are_said(empty_cluster):
    empty_cluster.start_broker(
        autoCreateSubscriptionGroup="false",
        autoCreateTopicEnable="false",
        enablePropertyFilter="false",
    )
    async with Sluice(empty_cluster.addresses) as mq:
        with pytest.raises(RouteNotFoundError, match="sluice topic create"):
            await mq.send("t", b"x")
        await mq.admin.create_topic("t", queues=2)
        with pytest.raises(GroupNotFoundError, match="autoCreateSubscriptionGroup"):
            await mq.subscribe("t", group="nosuch").receive()
        with pytest.raises(ConfigurationError, match="enablePropertyFilter=true"):
            await mq.subscribe("t", group="nosuch", where="n > 1").receive()
        with pytest.raises(RouteNotFoundError):
            await mq.subscribe("nosuch", group="g").receive()


async def test_lite_and_raw_pulls_read_what_is_there(cluster):
    async with Sluice(cluster.addresses) as mq:
        await mq.admin.create_topic("t", queues=1)
        for n in range(50):
            await mq.send("t", b"%d" % n, tag="AB"[n % 2])
        (queue,) = await mq.queues("t")
        raw = mq.pull_consumer()
        found = await raw.pull(queue, 10, count_max=5, tags="B")
        assert [int(message.body) for message in found.messages] == [11, 13, 15, 17, 19]
        assert (await raw.pull(queue, 50)).status is PullStatus.NO_NEW_MSG
        assert (await raw.pull(queue, 99)).next_offset == 50
        async with mq.lite_pull("g") as consumer:
            await consumer.subscribe("t", where="TAGS = 'A'")
            polled = []
            while len(polled) < 25:
                polled += await consumer.poll(2.0)
            assert bodies(polled) == list(range(0, 50, 2))
            await consumer.commit()
            assert await consumer.committed(queue) == 50
            await consumer.seek(queue, 48)
            assert bodies(await consumer.poll(2.0)) == [48]


async def test_a_group_begins_where_it_says(cluster):
    async with Sluice(cluster.addresses) as mq:
        await mq.admin.create_topic("t", queues=1)
        for n in range(5):
            await mq.send("t", b"%d" % n)
            await asyncio.sleep(0.02)
        (queue,) = await mq.queues("t")
        middle = (await mq.pull_consumer().pull(queue, 3)).messages[0].store_time_ms
        async with mq.subscribe("t", group="by-time", start=middle) as stream:
            assert bodies(await collect(stream, 2)) == [3, 4]
        async with mq.subscribe("t", group="last", start="last") as stream:
            await mq.send("t", b"5")
            assert bodies(await collect(stream, 1)) == [5]


def test_bulk_reading_gives_every_record_of_a_range_once(cluster):
    with Producer(cluster.addresses) as producer, Admin(cluster.addresses) as admin:
        admin.create_topic("t", queues=1)
        producer.send_batch(
            [Message("t", bytes(200), tag="AB"[n % 10 == 0]) for n in range(30_000)]
        )
        (queue,) = admin.queues("t")
        address = admin.address(queue)
        for subscription, wanted in [
            (None, list(range(100, 29_000))),
            (parse_subscription("t", "B"), list(range(100, 29_000, 10))),
        ]:
            with BulkReader(
                address, "t", 0, 100, 29_000, subscription, batch_bytes=1_000_000
            ) as bulk:
                offsets = [
                    record.queue_offset for chunk in bulk for record in decode_records(bytes(chunk))
                ]
                assert offsets == wanted
        assert queue == MessageQueue("t", "broker-a", 0)
