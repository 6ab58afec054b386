# ruff: noqa: SIM117 - nested blocks show the order of events
"""Consuming in order: queue locks with a manual clock, and consumers at a scripted broker."""

import asyncio
import threading

import pytest

from simulation.stepped import ManualClock
from sluicemq import Sluice
from sluicemq.client.aio.ordered import LEASE_S, TRUSTED_S, QueueLocks
from sluicemq.errors import RequestTimeoutError
from sluicemq.model.topic import MessageQueue
from sluicemq.wire.bodies import decode_lock_batch, encode_locked_queues
from sluicemq.wire.frames import Command
from waiting import limit, until

QUEUE = MessageQueue("t", "broker-a", 0)
OTHER = MessageQueue("t", "broker-a", 1)


class LockBroker:
    """A cluster that answers lock requests. `taken` are the queues of another client."""

    def __init__(self):
        self.clock = ManualClock()
        self.taken: set[MessageQueue] = set()
        self.is_away = False
        self.answer_s = 0.0
        self.calls: list[tuple[int, tuple[MessageQueue, ...]]] = []

    async def ask_master(self, queue, command):
        batch = decode_lock_batch(command.body)
        self.calls.append((command.code, batch.queues))
        if self.is_away:
            raise RequestTimeoutError("no response.")
        self.clock.advance(self.answer_s)
        held = [queue for queue in batch.queues if queue not in self.taken]
        return Command(0, body=encode_locked_queues(held))


@pytest.fixture
def lock_broker():
    return LockBroker()


@pytest.fixture
def locks(lock_broker):
    lost: list[MessageQueue] = []
    again: list[MessageQueue] = []
    made = QueueLocks(lock_broker, "me", "g", on_lost=lost.append, on_confirmed=again.append)
    made.lost, made.again = lost, again
    return made


# --- queue locks


async def test_a_queue_of_another_client_is_not_held(lock_broker, locks):
    lock_broker.taken = {QUEUE}
    assert not await locks.acquire(QUEUE)
    assert not locks.is_held(QUEUE)
    lock_broker.taken = set()
    assert await locks.acquire(QUEUE)
    assert locks.is_held(QUEUE)


async def test_a_lease_is_trusted_for_half_of_its_time_and_renewing_goes_on(lock_broker, locks):
    await locks.acquire(QUEUE)
    lock_broker.clock.advance(TRUSTED_S - 0.1)
    assert locks.is_held(QUEUE)
    lock_broker.clock.advance(0.1)
    assert not locks.is_held(QUEUE)
    assert await locks.renew()
    assert locks.is_held(QUEUE)
    assert locks.again == [QUEUE]
    assert locks.lost == []


async def test_a_lease_that_was_not_trusted_while_it_was_renewed_is_reported_as_confirmed(
    lock_broker, locks
):
    """Otherwise messages that were pulled meanwhile would wait for the next pull.

    Found by seed 77 of the cluster simulation.
    """
    await locks.acquire(QUEUE)
    lock_broker.clock.advance(TRUSTED_S - 0.1)
    lock_broker.answer_s = 0.2
    assert await locks.renew()
    assert locks.is_held(QUEUE)
    assert locks.again == [QUEUE]


async def test_a_lease_that_another_client_may_have_had_meanwhile_is_lost(lock_broker, locks):
    """The broker grants it again, but another client may have processed its messages."""
    await locks.acquire(QUEUE)
    lock_broker.clock.advance(LEASE_S)
    assert await locks.renew()
    assert not locks.is_held(QUEUE)
    assert locks.lost == [QUEUE]


async def test_a_broker_that_does_not_respond_loses_no_lock_until_its_lease_is_not_trusted(
    lock_broker, locks
):
    await locks.acquire(QUEUE)
    lock_broker.is_away = True
    lock_broker.clock.advance(20)
    assert not await locks.renew()
    assert locks.is_held(QUEUE)
    lock_broker.clock.advance(10)
    assert not locks.is_held(QUEUE)
    assert locks.lost == []


async def test_a_refused_lease_loses_its_queue_at_once_and_no_other(lock_broker, locks):
    await locks.acquire(QUEUE)
    await locks.acquire(OTHER)
    lock_broker.taken = {QUEUE}
    assert await locks.renew()
    assert locks.lost == [QUEUE]
    assert not locks.is_held(QUEUE)
    assert locks.is_held(OTHER)
    assert lock_broker.calls[-1] == (41, (QUEUE, OTHER)), "one request for each broker"


async def test_a_lease_begins_when_it_is_requested(lock_broker, locks):
    original = lock_broker.ask_master

    async def slow(queue, command):
        answer = await original(queue, command)
        lock_broker.clock.advance(5)
        return answer

    lock_broker.ask_master = slow
    await locks.acquire(QUEUE)
    lock_broker.clock.advance(TRUSTED_S - 5)
    assert not locks.is_held(QUEUE)


async def test_releasing_twice_unlocks_once(lock_broker, locks):
    await locks.acquire(QUEUE)
    await locks.release(QUEUE)
    await locks.release(QUEUE)
    assert [code for code, _ in lock_broker.calls] == [41, 42]
    assert not locks.is_held(QUEUE)


async def test_a_lock_whose_request_is_cancelled_is_given_back(lock_broker, locks):
    """The broker may have granted the lock although its response was not received."""
    original, may_answer = lock_broker.ask_master, asyncio.Event()

    async def slow_to_lock(queue, command):
        answer = await original(queue, command)
        if command.code == 41:
            await may_answer.wait()
        return answer

    lock_broker.ask_master = slow_to_lock
    acquiring = asyncio.ensure_future(locks.acquire(QUEUE))
    await until(lambda: lock_broker.calls)
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    assert lock_broker.calls == [(41, (QUEUE,)), (42, (QUEUE,))]
    assert not locks.is_held(QUEUE)


# --- with a broker


async def test_a_queue_is_locked_before_its_offset_is_read_and_unlocked_after_its_commit(fake):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"0")
    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="g", ordered=True) as stream:
            await (await stream.receive()).ack()
    codes = [code for code, fields in fake.broker.log if code in {41, 42, 14, 15}]
    assert codes[0] == 41
    assert codes.index(41) < codes.index(14)
    assert codes[-1] == 42
    assert fake.broker.committed["g", "t", 0] == 1
    assert fake.broker.locks == {}


async def test_a_queue_that_another_client_has_is_taken_within_a_second_of_its_release(fake):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"0")
    fake.broker.locks["g", QUEUE] = "another"
    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="g", ordered=True) as stream:
            assert await stream.receive_many(1, 0.3) == []
            pulls = [fields["topic"] for code, fields in fake.broker.log if code == 11]
            assert "t" not in pulls, "it is not read without its lock"
            del fake.broker.locks["g", QUEUE]
            async with asyncio.timeout(1.5):
                await (await stream.receive()).ack()


async def test_several_queues_are_consumed_in_parallel_and_each_hands_out_one_message(fake):
    fake.topics["t"] = 4
    for n in range(12):
        fake.broker.put("t", n % 4, b"%d" % n)
    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="g", ordered=True) as stream:
            out = [await stream.receive() for _ in range(4)]
            assert sorted(int(m.body) for m in out) == [0, 1, 2, 3]
            assert await stream.receive_many(10, 0.1) == []
            await out[0].ack()
            following = await stream.receive()
            assert following.queue == out[0].queue
            assert int(following.body) == int(out[0].body) + 4


async def test_a_stream_that_closes_puts_its_message_back_to_the_front(fake):
    fake.topics["t"] = 1
    for n in range(3):
        fake.broker.put("t", 0, b"%d" % n)
    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="g", ordered=True) as one:
            async with mq.subscribe("t", group="g", ordered=True) as two:
                await (await one.receive()).ack()
                assert (await one.receive()).body == b"1"
                assert await two.receive_many(5, 0.1) == []
                await one.close()
                message = await two.receive()
                assert message.body == b"1"


async def test_a_cancelled_receive_takes_no_message(fake):
    fake.topics["t"] = 2
    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="g", ordered=True) as stream:
            impatient = asyncio.ensure_future(stream.receive())
            patient = asyncio.ensure_future(stream.receive())
            await asyncio.sleep(0.05)
            impatient.cancel()
            fake.broker.put("t", 0, b"0")
            async with asyncio.timeout(limit(5)):
                assert (await patient).body == b"0"


async def test_a_queue_rests_after_a_failure_and_the_count_rises(fake, caplog):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"0")
    fake.broker.put("t", 0, b"1")
    seen = []
    loop = asyncio.get_running_loop()

    async def handler(message):
        seen.append((message.body, message.reconsume_times, loop.time()))
        assert message.attempt == message.reconsume_times + 1
        if message.reconsume_times < 2 and message.body == b"0":
            raise ValueError("not yet")

    async with Sluice(fake.name_server) as mq:
        consumer = mq.consumer("g", handler, ordered=True, suspend_s=0.2).subscribe("t")
        async with consumer:
            await until(lambda: len(seen) == 4)
    assert [(body, failures) for body, failures, _ in seen] == [
        (b"0", 0), (b"0", 1), (b"0", 2), (b"1", 0),
    ]  # fmt: skip
    assert [number for number in (1, 2, 3) if f"(failure {number})" in caplog.text] == [1, 2]
    assert seen[1][2] - seen[0][2] >= 0.2
    assert fake.broker.seen[36] == 0, "an ordered message is retried in its own queue"


async def test_a_dead_letter_that_cannot_be_stored_blocks_its_queue(fake):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"0")
    fake.broker.put("t", 0, b"1")
    fake.broker.script[310] = lambda command, peer: Command(14, remark="the disk is full")
    seen = []

    async def handler(message):
        seen.append(message.body)
        raise ValueError("never")

    async with Sluice(fake.name_server) as mq:
        consumer = mq.consumer("g", handler, ordered=True, suspend_s=0.05, max_reconsume_times=0)
        async with consumer.subscribe("t"):
            await until(lambda: len(seen) == 3)
            assert set(seen) == {b"0"}
            del fake.broker.script[310]
            await until(lambda: b"1" in seen)
    retries = [f for code, f in fake.broker.log if code == 310 and f["b"] == "%RETRY%g"]
    assert {fields["l"] for fields in retries} == {"0"}


async def test_a_running_handler_keeps_the_lock_until_it_is_done_when_the_queue_goes_away(fake):
    fake.topics["t"] = 2
    for n in range(4):
        fake.broker.put("t", n % 2, b"%d" % n)
    running, may_end = [], asyncio.Event()

    async def handler(message):
        running.append(message)
        await may_end.wait()

    async with Sluice(fake.name_server) as one, Sluice(fake.name_server) as two:
        first = one.consumer("g", handler, ordered=True).subscribe("t")
        async with first:
            await until(lambda: len(running) == 2)
            async with two.subscribe("t", group="g", ordered=True) as stream:
                readers = one._members["g"].readers
                await until(lambda: len([q for q in readers.queues if q.topic == "t"]) == 1)
                (gone,) = {QUEUE, OTHER} - readers.queues
                assert fake.broker.locks["g", gone] == one.client_id
                assert await stream.receive_many(1, 0.3) == []
                may_end.set()
                async with asyncio.timeout(limit(5)):
                    message = await stream.receive()
                assert (message.queue, message.queue_offset) == (gone, 1)
                assert fake.broker.locks["g", gone] == two.client_id


async def test_a_coroutine_that_does_not_end_is_cancelled_and_its_queue_goes_to_others(fake):
    fake.topics["t"] = 1
    for n in range(3):
        fake.broker.put("t", 0, b"%d" % n)
    stuck = asyncio.Event()

    async def handler(message):
        if message.body == b"1":
            stuck.set()
            await asyncio.sleep(60)

    async with Sluice(fake.name_server) as mq:
        consumer = mq.consumer("g", handler, ordered=True).subscribe("t")
        await consumer.start()
        await stuck.wait()
        await consumer.close(timeout_s=0.1)
    assert fake.broker.committed["g", "t", 0] == 1
    assert fake.broker.locks == {}


async def test_a_thread_that_does_not_end_keeps_the_lock_and_what_was_done_is_committed(
    fake, monkeypatch
):
    monkeypatch.setattr("sluicemq.client.aio.ordered.HANDLER_WAIT_S", 0.1)
    fake.topics["t"] = 1
    for n in range(3):
        fake.broker.put("t", 0, b"%d" % n)
    stuck, may_end = threading.Event(), threading.Event()

    def handler(message):
        if message.body == b"1":
            stuck.set()
            may_end.wait(limit(10))

    async with Sluice(fake.name_server) as mq:
        consumer = mq.consumer("g", handler, ordered=True).subscribe("t")
        await consumer.start()
        await until(stuck.is_set)
        await consumer.close(timeout_s=0.1)
    may_end.set()
    assert fake.broker.committed["g", "t", 0] == 1
    assert fake.broker.locks == {("g", QUEUE): mq.client_id}


async def test_a_message_that_always_fails_is_logged_with_a_traceback_less_and_less_often(
    fake, caplog
):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"poison")
    attempts = []

    async def handler(message):
        attempts.append(message.attempt)
        raise ValueError("poison")

    async with Sluice(fake.name_server) as mq:
        async with mq.consumer("g", handler, ordered=True, suspend_s=0.01).subscribe("t"):
            await until(lambda: len(attempts) >= 9)
    logged = [
        entry for entry in caplog.records if "handler of group g failed" in entry.getMessage()
    ][:8]
    assert [bool(entry.exc_info) for entry in logged] == [
        True,
        True,
        False,
        True,
        *[False] * 3,
        True,
    ]
    assert all(entry.getMessage().endswith("ValueError: poison") for entry in logged)
