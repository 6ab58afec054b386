"""A whole cluster inside a test, on virtual time: what `sluicemq.testing.embedded` promises."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import sluicemq
from sluicemq import Message, RetryLaterError, Sluice, TransactionState
from sluicemq.client.core.transactions import TransactionListener
from sluicemq.client.sync.producer import Producer
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.testing.embedded import embedded
from sluicemq.testing.virtual import VirtualClock
from thorough import ALL
from waiting import limit

LADDER_S = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
LADDER_REAL_S_MAX = 3.0
"""0.6 on a quiet machine; the tests of three processes share two cores."""


@pytest.fixture
async def mq():
    async with embedded(clock=VirtualClock()) as mq:
        yield mq


class Recorder:
    """A handler that notes what it got and when (virtual seconds)."""

    def __init__(self, mq, *, fails: bool = False) -> None:
        self.clock = mq.clock
        self.fails = fails
        self.got: list[tuple[float, bytes, int]] = []

    async def __call__(self, message) -> None:
        self.got.append((self.clock.monotonic_s(), message.body, message.reconsume_times))
        if self.fails:
            raise RuntimeError("not today")

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, body, _ in self.got]

    @property
    def times_s(self) -> list[float]:
        return [at_s for at_s, _, _ in self.got]


async def read_all(mq, topic: str, group: str = "reader") -> list:
    stream = mq.subscribe(topic, group=group)
    got = []
    while messages := await stream.receive_many(100, timeout_s=2):
        got += messages
        for message in messages:
            await message.ack()
    await stream.close()
    return got


async def walk_the_ladder() -> tuple[Recorder, float, list]:
    """A message that always fails; (its deliveries, seconds of processor time that its five hours
    take, the dead letters)."""
    async with embedded(clock=VirtualClock()) as mq:
        await mq.send("orders", b"no")
        handler = Recorder(mq, fails=True)
        consumer = mq.consumer("shipping", handler).subscribe("orders")
        began_s = time.process_time()  # one thread, no waiting: real time but for what else runs
        await consumer.start()
        await mq.clock.advance(hours=5)
        passed_s = time.process_time() - began_s
        return handler, passed_s, await read_all(mq, "%DLQ%shipping")


async def test_a_failing_message_walks_through_all_retries_into_the_dead_letters_in_a_moment(
    record_property, capsys
) -> None:
    measured = []
    for _ in range(3):  # the best of three: this machine has other things to do
        handler, passed_s, dead = await walk_the_ladder()
        first_s = handler.times_s[0]
        expected = [first_s + sum(LADDER_S[:count]) for count in range(17)]
        assert handler.times_s == pytest.approx(expected, abs=0.002)
        assert [times for _, _, times in handler.got] == list(range(17))
        assert [message.body for message in dead] == [b"no"]
        measured.append(passed_s)
        if passed_s < limit(LADDER_REAL_S_MAX) / 3:
            break
    with capsys.disabled():
        print(f" [retry ladder: {min(measured):.2f} s]", end="")
    record_property("retry_ladder_s", min(measured))
    assert min(measured) < limit(LADDER_REAL_S_MAX)


async def test_a_delayed_message_comes_at_its_time_to_the_millisecond(mq) -> None:
    await mq.admin.create_topic("t")
    handler = Recorder(mq)
    await mq.consumer("g", handler).subscribe("t").start()
    await mq.clock.settle()
    sent_s = mq.clock.monotonic_s()
    for level in (1, 5, 18):
        await mq.send("t", str(level).encode(), delay_level=level)
    await mq.clock.advance(hours=1, minutes=59, seconds=59.9)
    assert handler.bodies == [b"1", b"5"]
    await mq.clock.advance(seconds=0.2)
    assert handler.bodies == [b"1", b"5", b"18"]
    assert [at_s - sent_s for at_s in handler.times_s] == pytest.approx([1, 60, 7200], abs=0.002)


async def test_timed_messages_come_in_their_order_and_can_be_taken_back(mq) -> None:
    await mq.servers.restart_broker(recallMessageEnable="true")
    await mq.admin.create_topic("t")
    handler = Recorder(mq)
    await mq.consumer("g", handler).subscribe("t").start()
    start_s = mq.clock.monotonic_s()
    hours_each = (30, 2, 71) if ALL else (5, 2, 9)
    for hours in hours_each:
        await mq.send("t", b"%d" % hours, delay=hours * 3600)
    taken_back = await mq.send("t", b"never", delay=3600)
    await mq.recall(taken_back.recall_handle)
    await mq.clock.advance(hours=max(hours_each) + 1)
    assert handler.bodies == [b"%d" % hours for hours in sorted(hours_each)]
    late_s = [
        at_s - start_s - hours * 3600
        for at_s, hours in zip(handler.times_s, sorted(hours_each), strict=True)
    ]
    assert late_s == pytest.approx([0, 0, 0], abs=0.002)


async def test_a_handler_says_when_a_message_comes_again(mq) -> None:
    times = []

    async def handler(message) -> None:
        times.append(mq.clock.monotonic_s())
        if len(times) < 3:
            raise RetryLaterError(delay_level=5)

    await mq.send("t", b"1")
    await mq.consumer("g", handler).subscribe("t").start()
    await mq.clock.advance(minutes=10)
    assert [at_s - times[0] for at_s in times] == pytest.approx([0, 60, 120], abs=0.002)


class Undecided(TransactionListener):
    """Knows the outcome at the second question."""

    def __init__(self, clock) -> None:
        self.clock = clock
        self.asked_s: list[float] = []

    def execute_local(self, message, transaction_id, argument):
        return TransactionState.UNKNOWN

    def check(self, message):
        self.asked_s.append(self.clock.monotonic_s())
        return TransactionState.UNKNOWN if len(self.asked_s) < 2 else TransactionState.COMMIT


async def test_an_undecided_transaction_is_asked_about_until_it_is_decided(mq) -> None:
    listener = Undecided(mq.clock)
    producer = mq.producer("payers", listener=listener)
    await mq.admin.create_topic("t")
    handler = Recorder(mq)
    await mq.consumer("g", handler).subscribe("t").start()
    sent_s = mq.clock.monotonic_s()
    await producer.send_in_transaction(Message("t", b"paid"))
    await mq.clock.advance(seconds=5)
    assert handler.bodies == []
    await mq.clock.advance(minutes=3)
    assert handler.bodies == [b"paid"]
    first_s, second_s = (at_s - sent_s for at_s in listener.asked_s)
    assert 6 <= first_s <= 37, "transactionTimeOut, then the next round of checks (30 s)"
    assert second_s - first_s == pytest.approx(30, abs=1)


async def test_a_transaction_commits_or_rolls_back_as_its_block_ends(mq) -> None:
    async with mq.transaction("t", b"yes"):
        pass
    with contextlib.suppress(ZeroDivisionError):
        async with mq.transaction("t", b"no"):
            raise ZeroDivisionError
    await mq.clock.advance(hours=1)
    assert [message.body for message in await read_all(mq, "t")] == [b"yes"]


async def test_the_members_of_a_group_share_the_queues_and_one_takes_over(mq) -> None:
    await mq.admin.create_topic("t")
    workers = [mq.servers.client() for _ in range(3)]
    handlers = [Recorder(mq) for _ in workers]
    for worker, handler in zip(workers, handlers, strict=True):
        await worker.consumer("g", handler).subscribe("t").start()
    await mq.clock.advance(seconds=5)
    for number in range(60):
        await mq.send("t", b"%d" % number)
    await mq.clock.settle()
    assert all(handler.got for handler in handlers)
    assert Counter(body for handler in handlers for body in handler.bodies) == Counter(
        b"%d" % number for number in range(60)
    )
    await workers[0].close()
    await workers[1].close()
    await mq.clock.advance(seconds=5)
    for number in range(60, 80):
        await mq.send("t", b"%d" % number)
    await mq.clock.settle()
    assert sorted(handlers[2].bodies[-20:]) == sorted(b"%d" % n for n in range(60, 80))


async def test_an_orderly_consumer_gets_each_queue_in_order_past_a_failure(mq) -> None:
    await mq.admin.create_topic("t")
    seen: list[bytes] = []

    async def handler(message) -> None:
        seen.append(message.body)
        if message.body == b"2" and seen.count(b"2") < 4:
            raise RuntimeError("again")

    await mq.consumer("g", handler, ordered=True).subscribe("t").start()
    for number in range(5):
        await mq.send("t", b"%d" % number, sharding_key="one")
    await mq.clock.advance(minutes=1)
    assert seen == [b"0", b"1", b"2", b"2", b"2", b"2", b"3", b"4"]


async def test_a_restart_of_the_broker_keeps_messages_offsets_and_what_is_delayed(mq) -> None:
    await mq.send("t", b"1")
    handler = Recorder(mq)
    consumer = mq.consumer("g", handler).subscribe("t")
    await consumer.start()
    await mq.send("t", b"2")
    await mq.send("t", b"3", delay_level=9)
    await mq.clock.settle()
    await consumer.close()
    await mq.servers.restart_broker()
    again = Recorder(mq)
    await mq.consumer("g", again).subscribe("t").start()
    await mq.clock.advance(minutes=10)
    assert (handler.bodies, again.bodies) == ([b"1", b"2"], [b"3"])


async def test_a_consumer_lives_through_a_restart_of_broker_and_name_server(mq) -> None:
    await mq.send("t", b"1")
    handler = Recorder(mq)
    await mq.consumer("g", handler).subscribe("t").start()
    await mq.clock.settle()
    await mq.servers.stop_name_server()
    await mq.servers.stop_broker()
    await mq.clock.advance(minutes=2)
    with pytest.raises(SluiceError):
        await mq.send("t", b"lost")
    await mq.servers.start_name_server()
    await mq.servers.start_broker()
    await mq.clock.advance(minutes=1)
    await mq.send("t", b"2")
    await mq.clock.advance(minutes=1)
    assert handler.bodies == [b"1", b"2"]


async def test_a_second_broker_takes_part(mq) -> None:
    await mq.servers.start_broker("broker-b")
    assert sorted(await mq.admin.masters()) == ["broker-a", "broker-b"]
    await mq.admin.create_topic("t", queues=2)
    used = {(await mq.send("t", b"x")).queue.broker for _ in range(8)}
    assert used == {"broker-a", "broker-b"}
    await mq.servers.stop_broker("broker-a")
    assert len([m for m in await read_all(mq, "t") if m.record.broker == "broker-b"]) == 4


async def test_over_tcp_any_process_or_thread_can_use_it() -> None:
    async with embedded(tcp=True) as mq:

        def in_a_thread() -> str:
            with Producer(mq.servers.name_server_address) as producer:
                return str(producer.send("t", b"from a thread").status.name)

        assert await asyncio.to_thread(in_a_thread) == "OK"
        async with Sluice(mq.servers.name_server_address) as other:
            stream = other.subscribe("t", group="g")
            assert [m.body for m in await stream.receive_many(1, 20)] == [b"from a thread"]
            await stream.close()


async def test_files_may_lie_in_a_directory(tmp_path) -> None:
    async with embedded(clock=VirtualClock(), store=tmp_path) as mq:
        await mq.send("t", b"1")
    assert (tmp_path / "broker-a" / "commitlog").is_dir()
    async with embedded(clock=VirtualClock(), store=tmp_path) as mq:
        assert [message.body for message in await read_all(mq, "t")] == [b"1"]


async def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigurationError, match="autoCreatTopic"):
        async with embedded(clock=VirtualClock(), settings={"autoCreatTopicEnable": "true"}):
            raise AssertionError
    async with embedded(clock=VirtualClock()) as mq:
        with pytest.raises(ConfigurationError, match="is running already"):
            await mq.servers.start_broker()
        with pytest.raises(ConfigurationError, match="drives a loop already"):
            async with embedded(clock=mq.clock):
                raise AssertionError
        with pytest.raises(ConfigurationError, match="drives this loop already"):
            async with embedded(clock=VirtualClock()):
                raise AssertionError
        await mq.send("t", b"the first cluster is none the worse")
        await mq.clock.advance(1)


async def test_after_the_block_time_is_real_again_and_nothing_runs_on() -> None:
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    async with embedded(clock=VirtualClock()) as mq:
        await mq.send("t", b"1")
        await mq.consumer("g", Recorder(mq)).subscribe("t").start()
        await mq.clock.advance(hours=1)
        virtual_s = loop.time()
    assert asyncio.all_tasks() == before
    began_s = time.monotonic()
    assert loop.time() >= virtual_s
    await asyncio.sleep(0.05)
    assert time.monotonic() - began_s >= 0.045


def test_hops_prints_the_functions_of_a_message_wherever_the_package_is_installed(tmp_path):
    package = Path(sluicemq.__file__).parent
    unused = shutil.ignore_patterns("__pycache__", "static", "console", "pipelines", "spark")
    shutil.copytree(package, tmp_path / "sluicemq", ignore=unused)
    tool = Path(__file__).parents[2] / "tools" / "hops.py"
    printed = subprocess.run(
        [sys.executable, tool, "--messages", "2"], env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=limit(60),
    ).stdout  # fmt: skip
    assert "sluicemq/broker/" in printed
