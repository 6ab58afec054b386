"""The virtual clock by itself: time that passes when everybody waits."""

import asyncio
import datetime
import threading
import time

import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.testing.virtual import VirtualClock
from waiting import limit


@pytest.fixture
def clock():
    return VirtualClock(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))


@pytest.fixture
async def driven(clock):
    clock.drive()
    yield clock
    clock.release()


async def test_a_day_of_sleep_takes_no_time(driven) -> None:
    began_s = time.perf_counter()
    await asyncio.sleep(86_400)
    assert time.perf_counter() - began_s < limit(1)
    assert driven.now() == datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert driven.monotonic_s() == pytest.approx(86_400)


async def test_timers_run_in_their_order_at_their_times(driven) -> None:
    order: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, round(driven.monotonic_s(), 3)))

    tasks = [asyncio.create_task(sleeper(*each)) for each in (("b", 20.5), ("c", 300), ("a", 0.1))]
    await driven.advance(minutes=1)
    assert order == [("a", 0.1), ("b", 20.5)]
    assert driven.monotonic_s() == pytest.approx(60)
    await asyncio.gather(*tasks)
    assert order[-1] == ("c", 300)


async def test_what_is_due_at_the_end_of_an_advance_has_happened(driven) -> None:
    done: list[int] = []
    loop = asyncio.get_running_loop()
    loop.call_later(10, lambda: loop.call_soon(done.append, 1))
    await driven.advance(10)
    assert done == [1]


async def test_sums_of_floats_do_not_end_a_hair_before_a_timer(driven) -> None:
    for _ in range(1000):
        due_ms = driven.now_ms() + 1
        await asyncio.sleep(0.001)
        assert driven.now_ms() >= due_ms


async def test_who_waits_for_the_last_bit_of_a_float_does_not_wait_for_ever(driven) -> None:
    await driven.advance(0.3)
    due_s, loop = driven.monotonic_s() + 1e-12, asyncio.get_running_loop()
    while driven.monotonic_s() < due_s:
        reached = loop.create_future()
        loop.call_later(due_s - driven.monotonic_s(), reached.set_result, None)
        await reached
    assert driven.monotonic_s() - due_s < 0.0001


async def test_advances_of_several_tasks_meet_their_own_ends(driven) -> None:
    ends: list[float] = []

    async def go(seconds: float) -> None:
        await driven.advance(seconds)
        ends.append(driven.monotonic_s())

    await asyncio.gather(go(30), go(10), go(20))
    assert ends == [10, 20, 30]


async def test_an_advance_that_is_cancelled_leaves_nothing(driven) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await driven.advance(hours=1)
    assert driven.monotonic_s() == pytest.approx(5)
    await driven.advance(1)
    assert driven.monotonic_s() == pytest.approx(6)


async def test_a_timeout_in_virtual_time_works(driven) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await asyncio.Event().wait()


async def test_time_stands_still_while_a_thread_works(driven) -> None:
    release = threading.Event()
    late = asyncio.create_task(asyncio.sleep(0.001))
    work = asyncio.create_task(asyncio.to_thread(release.wait, 10))
    threading.Timer(0.05, release.set).start()
    assert await work is True
    assert driven.monotonic_s() == 0
    await late
    assert driven.monotonic_s() == pytest.approx(0.001)


async def test_it_stands_still_but_for_advance_when_that_is_wanted() -> None:
    clock = VirtualClock(stands_still=True)
    clock.drive()
    try:
        nap = asyncio.create_task(asyncio.sleep(5))
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.02)
        await asyncio.sleep(0)
        assert not nap.done()
        await clock.advance(5)
        await nap
    finally:
        clock.release()


def test_a_clock_loses_its_patience_and_says_where_the_test_waits(monkeypatch) -> None:
    monkeypatch.setattr("sluicemq.testing.virtual.STALL_S", 0.05)
    clock = VirtualClock(patience=datetime.timedelta(hours=1))

    async def every_minute() -> None:
        while True:
            await asyncio.sleep(60)

    async def wait_in_vain() -> None:
        clock.drive()
        chores.append(asyncio.create_task(every_minute()))
        await asyncio.Event().wait()

    async def close() -> None:
        await asyncio.sleep(10)
        clock.release()

    chores: list[asyncio.Task[None]] = []
    with asyncio.Runner() as runner:
        with pytest.raises(TimeoutError, match=r"wait_in_vain waits at \S*test_virtual\.py:\d+\."):
            runner.run(wait_in_vain())
        assert 3600 <= clock.monotonic_s() <= 3720
        runner.run(close())


def test_patience_must_be_a_timedelta() -> None:
    with pytest.raises(ConfigurationError, match="must be a timedelta, got 60"):
        VirtualClock(patience=60)  # type: ignore[arg-type]


async def test_advance_gives_it_its_patience_back() -> None:
    clock = VirtualClock(patience=datetime.timedelta(seconds=50))
    clock.drive()
    try:
        for _ in range(5):
            await asyncio.sleep(40)
            await clock.advance(0)
        assert clock.monotonic_s() == pytest.approx(200)
    finally:
        clock.release()


async def test_what_makes_no_sense_is_refused(driven) -> None:
    with pytest.raises(ConfigurationError, match="cannot go back by 5 s"):
        await driven.advance(-5)
    with pytest.raises(ConfigurationError, match="does not drive the running loop"):
        await VirtualClock().advance(1)
    with pytest.raises(ConfigurationError, match="another virtual clock"):
        VirtualClock().drive()
    with pytest.raises(ConfigurationError, match="drives a loop already"):
        driven.drive()
    with pytest.raises(ConfigurationError, match="time zone"):
        VirtualClock(datetime.datetime(2026, 1, 1))  # noqa: DTZ001 - that is what is wrong


async def test_after_release_the_loop_has_real_time_that_has_not_gone_back(clock) -> None:
    loop = asyncio.get_running_loop()
    clock.drive()
    await clock.advance(days=1)
    virtual_s = loop.time()
    clock.release()
    clock.release()
    assert loop.time() >= virtual_s
    began_s = time.monotonic()
    await asyncio.sleep(0.02)
    assert time.monotonic() - began_s >= 0.015


def test_a_loop_without_a_selector_is_refused() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def go() -> None:
        with pytest.raises(ConfigurationError, match="uvloop"):
            VirtualClock().drive()

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(go())
    finally:
        loop.close()
