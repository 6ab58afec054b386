"""Processes inside one: who a task, a timer or a frame belongs to, and how to kill all of it.

A `Process` is a context (`contextvars`): every task and timer that is made in it carries it on. So
a kill finds them: timers are cancelled, tasks are cancelled, and what they do on their way out
reaches nobody, because the network no longer carries anything of a dead process and its files
were copied before.
"""

import asyncio
import contextvars
import inspect
from collections.abc import Coroutine
from typing import Any, TypeVar

from sluicemq.clock import Clock

T = TypeVar("T")
_current: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class NodeClock:
    """A machine's clock: it ticks as all do, but its wall time may be wrong."""

    def __init__(self, true: Clock) -> None:
        self._true = true
        self.wrong_ms = 0

    def now_ms(self) -> int:
        return self._true.now_ms() + self.wrong_ms

    def monotonic_s(self) -> float:
        return self._true.monotonic_s()


class Process:
    """Something that runs, until it ends or is killed."""

    def __init__(self, name: str, clock: NodeClock) -> None:
        self.name = name
        self.clock = clock
        self.is_alive = True
        self.tasks: set[asyncio.Task[Any]] = set()
        self.context = contextvars.copy_context()
        self.context.run(_current.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task of this process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, context=self.context.copy())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Does something in this process, and waits for it."""
        return await self.spawn(work)

    async def kill(self) -> None:
        """Ends it without giving it a chance."""
        self.is_alive = False
        self._stop_timers()
        tasks = [task for task in self.tasks if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        self._stop_timers()

    def _stop_timers(self) -> None:
        """asyncio's own loops keep timers in `_scheduled`; uvloop cannot run on virtual time."""
        loop: Any = asyncio.get_running_loop()
        for handle in tuple(loop._scheduled):
            if handle._context.get(_current) is self:
                handle.cancel()

    def __repr__(self) -> str:
        return f"<process {self.name}{'' if self.is_alive else ' dead'}>"


def task_factory(
    loop: asyncio.AbstractEventLoop, work: Any, *, context: Any = None, **rest: Any
) -> asyncio.Task[Any]:
    """Notes which process a task belongs to; for `loop.set_task_factory`."""
    process = _current.get() if context is None else context.get(_current)
    if process is not None and not process.is_alive:
        if inspect.iscoroutine(work):
            work.close()
        work = _nothing()
    task = asyncio.Task(work, loop=loop, context=context, **rest)
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
    return task


async def _nothing() -> None:
    """What the dead do."""
