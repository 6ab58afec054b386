"""Background tasks, code of the application, and work that ends however its caller ends."""

import asyncio
import concurrent.futures
from itertools import pairwise

import pytest

from cancelling import inject
from sluicemq.client.tasks import (
    RESTART_MAX_S,
    RESTART_S,
    STEADY_S,
    CloseOnce,
    EscapedError,
    Tasks,
    call_listener,
    notify,
    run_application_code,
    run_each,
    run_on_thread,
    run_to_end,
)
from sluicemq.errors import ClosedError
from sluicemq.testing.virtual import VirtualClock


@pytest.fixture
async def clock():
    clock = VirtualClock()
    clock.drive()
    yield clock
    clock.release()


# ----------------------------------------------------------------------------- kept tasks


def failing(times, error, began):
    """A coroutine function that fails so often and then waits."""

    async def work():
        began.append(asyncio.get_running_loop().time())
        if len(began) <= times:
            raise error
        await asyncio.Event().wait()

    return work


@pytest.mark.parametrize("error", [ValueError("x"), asyncio.CancelledError(), GeneratorExit()])
async def test_a_kept_task_that_ends_unexpectedly_is_logged_and_started_again(clock, caplog, error):
    tasks, began = Tasks(), []
    tasks.supervise(failing(2, error, began), "chore")
    await clock.advance(seconds=1)
    assert len(began) == 3
    assert tasks.running_count == 1
    assert caplog.text.count("background task chore") == 2
    await tasks.close()
    assert not tasks


async def test_the_pause_before_a_restart_doubles_up_to_a_limit_and_is_forgotten(clock):
    tasks, began = Tasks(), []
    tasks.supervise(failing(12, ValueError("x"), began), "chore")
    await clock.advance(seconds=400)
    pauses = [round(later - earlier, 3) for earlier, later in pairwise(began)]
    assert pauses == [min(RESTART_S * 2**n, RESTART_MAX_S) for n in range(12)]
    await tasks.close()

    steady, tasks = [], Tasks()

    async def work():
        steady.append(asyncio.get_running_loop().time())
        await asyncio.sleep(STEADY_S)
        raise ValueError("x")

    tasks.supervise(work, "chore")
    await clock.advance(seconds=3 * (STEADY_S + 1))
    assert [round(b - a, 3) for a, b in pairwise(steady)][:2] == [STEADY_S + RESTART_S] * 2
    await tasks.close()


async def test_a_kept_task_that_other_code_cancels_is_started_again(clock, caplog):
    tasks, began = Tasks(), []
    kept = tasks.supervise(failing(0, ValueError(), began), "chore")
    await asyncio.sleep(0)
    kept.task.cancel()
    await clock.advance(seconds=1)
    assert len(began) == 2
    assert "cancelled by code outside of this client" in caplog.text
    await tasks.close()


async def test_a_kept_task_that_returns_or_is_cancelled_by_its_owner_is_over(clock):
    tasks = Tasks()
    tasks.supervise(lambda: asyncio.sleep(0), "short")
    waiting = tasks.supervise(lambda: asyncio.sleep(99), "long")
    await clock.advance(seconds=1)
    assert tasks.running_count == 1
    waiting.cancel()
    await tasks.wait()
    assert not tasks


async def test_wait_goes_on_while_a_task_waits_to_be_started_again(clock):
    tasks, began = Tasks(), []

    async def work():
        began.append(1)
        if len(began) == 1:
            raise ValueError("x")

    tasks.supervise(work, "chore")
    await tasks.wait()
    assert len(began) == 2


async def test_closing_ends_a_task_that_waits_to_be_started_again(clock):
    tasks, began = Tasks(), []
    tasks.supervise(failing(99, ValueError("x"), began), "chore")
    await asyncio.sleep(0)
    await tasks.close()
    await clock.advance(seconds=60)
    assert len(began) == 1
    with pytest.raises(ClosedError):
        tasks.supervise(failing(0, ValueError(), began), "late")


def test_the_end_of_a_loop_is_neither_logged_nor_waited_for(caplog):
    """asyncio.run cancels all tasks at its end, and waits for each."""
    tasks = Tasks()

    async def main():
        tasks.supervise(lambda: asyncio.sleep(99), "chore")
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not caplog.records


async def test_a_task_that_is_not_kept_is_logged_when_it_fails(caplog):
    async def fail():
        raise ValueError("x")

    tasks = Tasks()
    tasks.spawn(fail(), "once")
    await tasks.wait()
    assert "background task once failed" in caplog.text


# ----------------------------------------------------------------- code of the application


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(), GeneratorExit(), concurrent.futures.CancelledError(),
        BaseExceptionGroup("two", [asyncio.CancelledError()]),
    ],
    ids=repr,
)  # fmt: skip
async def test_what_is_no_failure_to_asyncio_becomes_one(error):
    async def fail():
        raise error

    with pytest.raises(EscapedError) as found:
        await run_application_code(fail())
    assert found.value.error is error
    assert type(error).__name__ in str(found.value)


@pytest.mark.parametrize(
    "error",
    [
        StopIteration(), StopAsyncIteration(), SystemExit(1), KeyboardInterrupt(), GeneratorExit(),
        asyncio.CancelledError(), concurrent.futures.CancelledError(),
    ],
    ids=repr,
)  # fmt: skip
async def test_whatever_a_function_raises_on_a_thread_is_a_failure(error):
    def fail():
        raise error

    with pytest.raises(EscapedError) as found:
        await run_on_thread(None, fail)
    assert found.value.error is error


async def test_an_executor_that_drops_its_work_is_a_failure_and_no_cancellation():
    class Dropping(concurrent.futures.Executor):
        def submit(self, *_work, **_named):
            future = concurrent.futures.Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    with pytest.raises(EscapedError, match="CancelledError"):
        await run_on_thread(Dropping(), int)


async def test_an_ordinary_failure_and_a_result_pass_as_they_are():
    async def fail():
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await run_application_code(fail())
    assert await run_application_code(asyncio.sleep(0, 5)) == 5
    assert await run_on_thread(None, lambda: asyncio.sleep(0, 6)) == 6


async def test_the_cancellation_of_the_task_itself_passes():
    task = asyncio.get_running_loop().create_task(run_application_code(asyncio.sleep(9)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


@pytest.mark.parametrize("error", [ValueError("x"), asyncio.CancelledError(), GeneratorExit()])
async def test_what_a_listener_raises_is_logged(caplog, error):
    def listen(_event):
        raise error

    call_listener(listen, 1)
    notify(listen, 1)
    await asyncio.sleep(0)
    assert caplog.text.count("the listener") == 2


# --------------------------------------------------------------------------- to its end


async def test_what_runs_to_its_end_is_complete_at_every_await_of_its_caller():
    async def steps(done):
        for number in range(4):
            await asyncio.sleep(0)
            done.append(number)
        return "result"

    for at in range(1, 9):
        done: list[int] = []
        outcome = await inject(run_to_end(steps(done)), at, "twice")
        assert done == [0, 1, 2, 3]
        assert outcome.was_cancelled == outcome.was_hit
        assert outcome.was_hit or outcome.result == "result"


async def test_what_fails_while_its_caller_is_cancelled_is_logged(caplog):
    async def fail():
        await asyncio.sleep(0)
        raise ValueError("x")

    outcome = await inject(run_to_end(fail()), 1, "waiting")
    assert outcome.was_cancelled
    assert "failed while its caller was cancelled" in caplog.text


async def test_a_close_runs_once_and_all_callers_get_its_result():
    closing, runs = CloseOnce(), []

    async def work():
        runs.append(1)
        await asyncio.sleep(0)
        return len(runs)

    found = await asyncio.gather(closing.run(work), closing.run(work))
    assert found == [1, 1]
    assert await closing.run(work) == 1


async def test_a_close_that_failed_is_repeated():
    closing, runs = CloseOnce(), []

    async def work():
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await closing.run(work)
    await closing.run(work)
    assert len(runs) == 2


async def test_a_cancelled_caller_ends_the_wait_of_a_close(clock):
    closing, hurried = CloseOnce(), []
    closing = CloseOnce(lambda: hurried.append(1))
    told = []

    async def work():
        told.append(await closing.wait_unless_hurried(asyncio.Event(), 30.0))

    began_s = clock.monotonic_s()
    outcome = await inject(closing.run(work), 1, "waiting")
    assert outcome.was_cancelled
    assert told == [False]
    assert hurried == [1]
    assert clock.monotonic_s() - began_s < 1


async def test_a_worker_that_closes_its_own_owner_does_not_wait_for_itself(clock):
    tasks, closing = Tasks(), CloseOnce()

    async def work():
        await closing.run(tasks.close)

    tasks.supervise(work, "closes")
    await clock.advance(seconds=1)
    assert not tasks
    assert closing.has_started


async def test_a_kept_task_that_is_cancelled_during_its_pause_is_not_waited_for(clock):
    tasks = Tasks()

    async def fail():
        raise ValueError

    kept = tasks.supervise(fail, "fails")
    await clock.advance(seconds=RESTART_S / 2)
    assert tasks
    kept.cancel()
    assert not tasks
    await tasks.wait()


# ------------------------------------------------------------------------------ run_each


async def test_every_step_is_awaited_and_the_first_error_raised(caplog):
    done = []

    async def step(name, error=None):
        done.append(name)
        if error is not None:
            raise error

    steps = [
        lambda: step("a"),
        lambda: step("b", ValueError("first")),
        lambda: step("c", asyncio.CancelledError()),
        lambda: step("d"),
    ]
    with pytest.raises(ValueError, match="first"):
        await run_each(steps)
    assert done == ["a", "b", "c", "d"]
    assert "failed too" in caplog.text


def test_steps_that_the_garbage_collector_closes_end_at_once():
    """As when a loop is thrown away in the middle of a close(), which tests do."""
    begun = []

    class Waiting:
        def __await__(self):
            begun.append(1)
            yield

    work = run_each([Waiting, Waiting])
    work.send(None)
    work.close()  # RuntimeError if it awaited another step
    assert begun == [1]
