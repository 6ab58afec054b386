"""Consumers that are polled, pulls and administration at a scripted broker."""

import asyncio
import time

import pytest

from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.requests import PullStatus
from sluicemq.errors import ConfigurationError, GroupNotFoundError, RouteNotFoundError
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.wire.frames import Command
from waiting import limit


def fill(fake, queues, count):
    fake.topics["t"] = queues
    for index in range(count):
        fake.broker.put("t", index % queues, b"%d" % index, TAGS="AB"[index % 2])


async def drain(consumer, count):
    seen = []
    async with asyncio.timeout(limit(5)):
        while len(seen) < count:
            seen += await consumer.poll(1.0)
    return seen


async def test_polled_messages_are_acknowledged_by_the_next_poll_and_committed_at_close(fake):
    fill(fake, 1, 5)
    async with Sluice(fake.name_server) as mq, mq.lite_pull("g") as consumer:
        await consumer.subscribe("t")
        first = await consumer.poll(count_max=3)
        assert [message.queue_offset for message in first] == [0, 1, 2]
        second = await consumer.poll(count_max=3)
        assert [message.queue_offset for message in second] == [3, 4]
    assert fake.broker.committed["g", "t", 0] == 3, "nobody said that the second poll is done"
    assert not fake.broker.members["g"]


async def test_commit_covers_everything_polled(fake):
    fill(fake, 2, 10)
    async with Sluice(fake.name_server) as mq, mq.lite_pull("g", auto_commit=False) as consumer:
        await consumer.subscribe("t")
        await drain(consumer, 10)
        assert not fake.broker.committed
        await consumer.commit()
        assert fake.broker.committed == {("g", "t", 0): 5, ("g", "t", 1): 5}


async def test_a_poll_without_messages_ends_in_time(fake):
    fill(fake, 1, 0)
    async with Sluice(fake.name_server) as mq, mq.lite_pull("g") as consumer:
        await consumer.subscribe("t")
        began = time.monotonic()
        assert await consumer.poll(0.2) == []
        assert 0.15 < time.monotonic() - began < limit(1.0)


async def test_assigned_queues_are_read_without_joining_the_group(fake):
    fill(fake, 2, 10)
    async with Sluice(fake.name_server) as mq, mq.lite_pull("g") as consumer:
        queues = await consumer.queues("t")
        await consumer.assign([queues[1]], tags="B")
        assert {message.tag for message in await drain(consumer, 5)} == {"B"}
        assert consumer.assignment == [queues[1]]
        await consumer.assign([queues[0]])
        assert {message.tag for message in await drain(consumer, 5)} == {"A"}
    assert "g" not in fake.broker.members
    assert fake.broker.committed["g", "t", 1] >= 0


async def test_seeking_interrupts_a_long_poll_and_forgets_what_was_fetched(fake):
    fill(fake, 1, 5)
    async with Sluice(fake.name_server) as mq, mq.lite_pull("g") as consumer:
        await consumer.subscribe("t")
        await drain(consumer, 5)
        (queue,) = [queue for queue in consumer.assignment if queue.topic == "t"]
        while not fake.broker.parked:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await consumer.seek(queue, 3)
        assert [message.queue_offset for message in await drain(consumer, 2)] == [3, 4]
        await consumer.seek_to_begin(queue)
        assert (await drain(consumer, 5))[0].queue_offset == 0
        await consumer.seek_to_end(queue)
        fake.broker.put("t", 0, b"new")
        assert (await drain(consumer, 1))[0].body == b"new"
        assert time.monotonic() - began < limit(3.0)
        assert await consumer.offset_for_time(queue, 1002) == 2
        assert await consumer.committed(queue) is not None


async def test_wrong_use_of_a_lite_pull_consumer_is_an_error(fake):
    fill(fake, 1, 1)
    queue = MessageQueue("t", "broker-a", 0)
    async with Sluice(fake.name_server) as mq, mq.lite_pull("g") as consumer:
        with pytest.raises(ConfigurationError, match="subscribe or assign"):
            await consumer.seek(queue, 0)
        await consumer.subscribe("t")
        with pytest.raises(ConfigurationError, match="Use two consumers"):
            await consumer.assign([queue])
        with pytest.raises(ConfigurationError, match="does not read"):
            await consumer.seek(queue._replace(queue_id=7), 0)


async def test_a_missing_group_of_assigned_queues_is_raised_by_poll(fake):
    fill(fake, 1, 1)
    fake.broker.groups_known = set()
    async with Sluice(fake.name_server) as mq, mq.lite_pull("g") as consumer:
        await consumer.assign([MessageQueue("t", "broker-a", 0)])
        with pytest.raises(GroupNotFoundError):
            await consumer.poll()


async def test_a_pull_has_four_outcomes(fake):
    fill(fake, 1, 6)
    queue = MessageQueue("t", "broker-a", 0)
    async with Sluice(fake.name_server) as mq:
        consumer = mq.pull_consumer("g")
        found = await consumer.pull(queue, 1, count_max=2, tags="B")
        assert found.status is PullStatus.FOUND
        assert [message.queue_offset for message in found.messages] == [1, 3]
        assert (found.next_offset, found.offset_min, found.offset_max) == (4, 0, 6)
        none = await consumer.pull(queue, 0, tags="Z")
        assert none.status is PullStatus.NO_MATCHED_MSG
        assert none.next_offset == 6
        assert (await consumer.pull(queue, 6)).status is PullStatus.NO_NEW_MSG
        illegal = await consumer.pull(queue, 99)
        assert illegal.status is PullStatus.OFFSET_ILLEGAL
        assert illegal.next_offset == 6
        by_sql = await consumer.pull(queue, 0, where="TAGS = 'A'")
        assert len(by_sql.messages) == 3


async def test_a_pull_may_wait_for_a_message(fake):
    fill(fake, 1, 0)
    fake.broker.queues["t", 0] = []
    async with Sluice(fake.name_server) as mq:
        pulling = asyncio.gather(
            mq.pull_consumer().pull(MessageQueue("t", "broker-a", 0), 0, wait_s=5)
        )
        while not fake.broker.parked:
            await asyncio.sleep(0.01)
        fake.broker.put("t", 0, b"x")
        ((result,)) = await pulling
        assert result.messages[0].body == b"x"


async def test_administration_creates_shows_and_deletes(fake):
    async with Sluice(fake.name_server) as mq:
        admin = mq.admin
        assert await admin.create_topic("t", queues=3) == ["broker-a"]
        assert await admin.topics() == ["t"]
        fake.broker.put("t", 0, b"x")
        queue = (await admin.queues("t"))[0]
        assert len(await admin.queues("t")) == 3
        assert await admin.offsets(queue) == (0, 1)
        assert await admin.offset_by_time(queue, 1000) == 0
        assert await admin.committed_offset("g", queue) is None
        await admin.commit_offset("g", queue, 1)
        assert await admin.committed_offset("g", queue) == 1
        assert (await admin.topic_offsets("t"))[queue].offset_max == 1
        assert (await admin.progress("g"))[0].lag == 0
        assert await admin.masters() == {"broker-a": fake.broker.address}
        await admin.delete_topic("t")
        with pytest.raises(RouteNotFoundError):
            await admin.queues("t")


async def test_invalid_administration_is_refused_before_a_request():
    async with Sluice("127.0.0.1:1") as mq:
        for wrong in (
            {"queues": 0}, {"perm": 9}, {"queues": 1, "write_queues": 0}, {"type": "lite"},
            {"attributes": {"a": "b,+c=d"}}, {"attributes": {"a=b": "c"}},
            {"attributes": {"a": ""}},
        ):  # fmt: skip
            with pytest.raises(ConfigurationError):
                await mq.admin.create_topic("t", **wrong)


async def test_an_unknown_group_is_an_error_that_names_the_known_ones(fake):
    fill(fake, 2, 0)
    fake.broker.script[200] = lambda command, peer: Command(0)
    async with Sluice(fake.name_server) as mq:
        with pytest.raises(ConfigurationError, match="There are: none"):
            await mq.admin.group("nosuch")
        async with mq.subscribe("t", group="g"):
            report = await mq.admin.group("g")
            assert [len(member.queues) for member in report.members] == [2]
            assert await mq.admin.members("g") == [mq.client_id]
            assert list(await mq.admin.groups()) == ["g"]
    assert GroupConfig("g").retry_times_max == 16
