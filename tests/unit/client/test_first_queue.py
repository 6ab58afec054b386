"""A producer begins at a random queue: many short-lived ones send to all queues alike."""

from collections import Counter
from random import Random

import pytest

from sluicemq import Sluice
from sluicemq.client.core.sending import QueueChooser
from sluicemq.client.sync.producer import Producer
from sluicemq.model.topic import MessageQueue
from sluicemq.testing.embedded import embedded
from sluicemq.testing.virtual import VirtualClock

QUEUES, PRODUCERS = 8, 40
MOST = 15
"""Of 40 producers and 8 queues: with random queues, more than this at one has a chance of 1e-4."""


async def test_short_lived_clients_spread_over_all_queues():
    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=QUEUES)
        counts: Counter[int] = Counter()
        for _ in range(PRODUCERS):
            async with mq.servers.client() as client:
                counts[(await client.send("t", b"x")).queue.queue_id] += 1
        assert len(counts) >= QUEUES - 1
        assert max(counts.values()) <= MOST


async def test_batches_one_way_sends_and_transactions_begin_at_random_too():
    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=QUEUES)
        for _ in range(PRODUCERS):
            async with mq.servers.client() as client:
                await client.send_oneway("t", b"x")
        await mq.clock.settle()
        found = [await mq.admin.offset_max(queue) for queue in await mq.queues("t")]
        assert sum(found) == PRODUCERS
        assert max(found) <= MOST


def test_blocking_producers_spread_as_well(fake_thread):
    fake_thread.topics["t"] = QUEUES
    counts: Counter[int] = Counter()
    for seed in range(PRODUCERS):
        with Producer(fake_thread.name_server, rng=Random(seed)) as producer:
            counts[producer.send("t", b"x").queue.queue_id] += 1
    assert max(counts.values()) <= MOST


async def test_the_generator_that_is_given_says_which_queue_is_first(fake):
    fake.topics["t"] = QUEUES
    for seed in range(3):
        async with Sluice(fake.name_server, rng=Random(seed)) as mq:
            sent = await mq.send("t", b"x")
        assert sent.queue.queue_id == Random(seed).getrandbits(31) % QUEUES


@pytest.mark.parametrize("topics", [1, 2, 3])
def test_topics_that_take_turns_use_all_of_their_queues_alike(topics):
    """One counter for all topics would give a topic every second queue only."""
    chooser = QueueChooser(lambda: 5)
    queues = {
        f"t{n}": [MessageQueue(f"t{n}", "b", number) for number in range(4)] for n in range(topics)
    }
    counts: dict[str, Counter[int]] = {topic: Counter() for topic in queues}
    for _ in range(40):
        for topic, own in queues.items():
            counts[topic][chooser.choose(own, 0.0).queue_id] += 1
    assert all(set(found.values()) == {10} for found in counts.values())
