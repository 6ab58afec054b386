"""Supervision: a job that fails is logged once, counted, retried more and more rarely, and the
others go on."""

import asyncio
import gc
import logging

import pytest

from simulation.stepped import ManualClock
from sluicemq.errors import RequestError, StoreError
from sluicemq.supervision import PAUSE_MAX_S, PAUSE_S, Supervisor, start_shared
from sluicemq.testing.virtual import VirtualClock

log = logging.getLogger("sluicemq.test")


def fail() -> None:
    raise ZeroDivisionError("no")


def test_a_failure_is_logged_once_with_its_traceback_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    jobs = Supervisor(clock, log)
    for _ in range(20):
        assert not jobs.run_unless_pausing("a", fail)
        clock.advance(PAUSE_MAX_S)
    assert jobs.failures == {"a": 20}
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert (
        record.getMessage()
        == "Background job 'a' failed; it is retried after a pause: ZeroDivisionError: no"
    )


def test_an_error_of_ours_has_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise StoreError("full.", fix="Free space.")

    Supervisor(ManualClock(), log).run_unless_pausing("a", refuse)
    (record,) = caplog.records
    assert record.exc_info is None
    assert "full." in record.getMessage()


def test_the_pause_doubles_up_to_a_limit_and_ends_with_a_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    jobs = Supervisor(clock, log)
    pauses = []
    for _ in range(10):
        jobs.run_unless_pausing("a", fail)
        pauses.append(round(jobs.resume_s("a") - clock.monotonic_s(), 6))
        assert not jobs.run_unless_pausing("a", lambda: pytest.fail("it pauses"))
        clock.advance(pauses[-1])
    assert pauses == [min(PAUSE_S * 2**n, PAUSE_MAX_S) for n in range(10)]
    assert jobs.run_unless_pausing("a", int)
    assert "works again after 10 failures" in caplog.text
    assert jobs.resume_s("a") == 0.0
    jobs.run_unless_pausing("a", fail)
    assert jobs.resume_s("a") - clock.monotonic_s() == pytest.approx(PAUSE_S)


def test_a_job_that_must_be_done_does_not_pause() -> None:
    jobs = Supervisor(ManualClock(), log)
    done: list[int] = []
    jobs.run_unless_pausing("a", fail)
    assert jobs.run_now("a", lambda: done.append(1))
    assert done == [1]


def test_other_jobs_go_on() -> None:
    jobs = Supervisor(ManualClock(), log)
    done: list[str] = []
    for _ in range(3):
        jobs.run_unless_pausing("a", fail)
        jobs.run_unless_pausing("b", lambda: done.append("b"))
    assert done == ["b", "b", "b"]


async def test_a_repeated_job_goes_on_after_failures_of_all_kinds() -> None:
    clock = VirtualClock(stands_still=True)
    clock.drive()
    try:
        jobs = Supervisor(clock, log)
        times: list[float] = []

        async def work() -> None:
            times.append(round(clock.monotonic_s(), 3))
            match len(times):
                case 1:
                    raise ValueError("x")
                case 2:
                    raise asyncio.CancelledError
                case 3:
                    cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    cancelled.cancel()
                    await cancelled

        task = asyncio.get_running_loop().create_task(jobs.repeat("a", lambda: 0.1, work))
        await clock.advance(seconds=2)
        assert times[:5] == [0.1, 0.2, 0.4, 0.8, 0.9]
        assert jobs.failures["a"] == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        clock.release()


async def test_a_kept_coroutine_begins_again_until_it_returns() -> None:
    clock = VirtualClock()
    clock.drive()
    try:
        jobs = Supervisor(clock, log)
        begun: list[float] = []

        async def work() -> None:
            begun.append(round(clock.monotonic_s(), 3))
            await asyncio.sleep(1)
            if len(begun) < 3:
                raise OSError("gone")

        await jobs.retry_until_success("a", work)
        assert begun == [0.0, 1.1, 2.3]
    finally:
        clock.release()


async def test_a_shared_task_that_nobody_awaits_any_more_fails_in_silence() -> None:
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    end = asyncio.Event()

    async def work() -> None:
        await end.wait()
        raise RequestError(14, "no replica is master now")

    async def asks(task: "asyncio.Task[None]") -> None:
        await asyncio.shield(task)

    shared = start_shared(work())
    cancelled, waits = asyncio.ensure_future(asks(shared)), asyncio.ensure_future(asks(shared))
    await asyncio.sleep(0)
    cancelled.cancel()
    end.set()
    with pytest.raises(RequestError, match="no replica is master now"):
        await waits
    alone = start_shared(work())
    await asyncio.wait([alone])
    del shared, alone, cancelled, waits
    gc.collect()
    assert reports == []
