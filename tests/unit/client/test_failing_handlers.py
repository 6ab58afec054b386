"""Whatever a handler raises rejects its message: it is redelivered, and no worker ends.

The tests use a real broker and client in this process, on virtual time.
"""

import asyncio
import concurrent.futures
import logging

import pytest

from sluicemq.client.tasks import RESTART_MAX_S
from sluicemq.testing.embedded import embedded
from sluicemq.testing.virtual import VirtualClock

pytestmark = pytest.mark.slow

WORKERS = 2
BAD = 5
"""The number of bad messages. It exceeds the workers: each message could end one."""


class OwnError(BaseException):
    """An error of a library that `except Exception` must not catch."""


async def cancelled_future(_message):
    shared = asyncio.get_running_loop().create_future()
    shared.cancel()  # like a pool that closes
    await shared


async def cancelled_task(_message):
    task = asyncio.get_running_loop().create_task(asyncio.sleep(10))
    task.cancel()
    await task


async def own_task(_message):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def group(_message):
    raise BaseExceptionGroup("both", [OwnError("inner"), ValueError("x")])


def raising(error, *, blocking):
    async def on_loop(_message):
        raise error

    def on_thread(_message):
        raise error

    return on_thread if blocking else on_loop


HANDLERS = {
    "a cancelled future": cancelled_future,
    "a cancelled task": cancelled_task,
    "the worker's own task": own_task,
    "a group": group,
    "StopIteration": raising(StopIteration(), blocking=False),
    "GeneratorExit": raising(GeneratorExit(), blocking=False),
    "CancelledError of threads": raising(concurrent.futures.CancelledError(), blocking=False),
    "an own BaseException": raising(OwnError("x"), blocking=False),
    "StopIteration, blocking": raising(StopIteration(), blocking=True),
    "StopAsyncIteration, blocking": raising(StopAsyncIteration(), blocking=True),
    "GeneratorExit, blocking": raising(GeneratorExit(), blocking=True),
    "CancelledError, blocking": raising(asyncio.CancelledError(), blocking=True),
    "CancelledError of threads, blocking": raising(
        concurrent.futures.CancelledError(), blocking=True
    ),
    "SystemExit, blocking": raising(SystemExit(1), blocking=True),
    "KeyboardInterrupt, blocking": raising(KeyboardInterrupt(), blocking=True),
    "an own BaseException, blocking": raising(OwnError("x"), blocking=True),
}
MODES = {
    "single": {},
    "batch": {"batch_max": 4},
    "ordered": {"ordered": True},
    "ordered batch": {"ordered": True, "batch_max": 4},
}


def failing_once(fail, seen):
    """A handler that fails on the first delivery of each bad message, and records its calls."""

    def note(given):
        messages = given if isinstance(given, list) else [given]
        is_bad = any(one.body.startswith(b"bad") and one.body not in tried for one in messages)
        tried.update(one.body for one in messages)
        if not is_bad:
            seen.extend(one.body for one in messages)
        return is_bad

    tried = set()
    if asyncio.iscoroutinefunction(fail):

        async def handle(given):
            if note(given):
                await fail(given)

    else:

        def handle(given):
            if note(given):
                fail(given)

    return handle


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", HANDLERS)
async def test_a_message_is_redelivered_and_no_worker_ends_whatever_its_handler_raises(
    kind, mode, caplog
):
    caplog.set_level(logging.WARNING, "sluicemq.client")
    bodies = {b"bad %d" % n for n in range(BAD)} | {b"good %d" % n for n in range(BAD)}
    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=1)
        seen = []
        consumer = mq.consumer(
            "g", failing_once(HANDLERS[kind], seen), concurrency=WORKERS, **MODES[mode]
        ).subscribe("t")
        await consumer.start()
        for body in sorted(bodies):
            await mq.send("t", body)
        await mq.clock.advance(seconds=BAD * RESTART_MAX_S)
        assert set(seen) == bodies
        assert consumer.live_workers == WORKERS
        assert "handler of group g failed" in caplog.text
        await consumer.close()
        (queue,) = await mq.queues("t")
        assert await mq.admin.committed_offset("g", queue) == 2 * BAD


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_coroutine_handler_on_the_main_thread_can_end_the_program(error):
    async def leave(_message):
        raise error

    async def main():
        async with embedded() as mq:
            await mq.admin.create_topic("t", queues=1)
            async with mq.consumer("g", leave).subscribe("t"):
                await mq.send("t", b"x")
                await asyncio.sleep(20)

    with pytest.raises(type(error)):
        asyncio.run(main())
