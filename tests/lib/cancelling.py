"""Cancelling a coroutine at each of its awaits in turn, and looking at what that leaves behind.

    async for point in points(world, act): ...

`Injected` drives a coroutine step by step. At its n-th suspension it cancels the task, in one of
three ways:

    WAITING   while the awaited future is pending: the future is cancelled, as by `task.cancel()`
    ANSWERED  when the future has its result and the task has not gone on yet: the result is lost
    TWICE     WAITING, and once more at the next suspension, while the coroutine cleans up
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, Final

WAITING: Final = "waiting"
ANSWERED: Final = "answered"
TWICE: Final = "twice"
WAYS: Final = (WAITING, ANSWERED, TWICE)
SETTLE_TURNS: Final = 60
"""Turns of the loop in which what was told to end has to have ended."""


class Injected:
    """A coroutine whose task is cancelled at the `at`-th suspension. `count` is the number of
    suspensions so far, `was_hit` whether the cancellation has happened."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, way: str) -> None:
        self._coroutine = coroutine
        self._at = at
        self._way = way
        self.count = 0
        self.was_hit = False

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                awaited = (
                    self._coroutine.send(None) if error is None else self._coroutine.throw(error)
                )
            except StopIteration as done:
                return done.value
            self.count += 1
            self._cancel(awaited)
            error = None
            try:
                yield awaited
            except BaseException as thrown:
                error = thrown

    def _cancel(self, awaited: Any) -> None:
        is_again = self._way == TWICE and self.was_hit and self.count == self._at + 1
        if self.count != self._at and not is_again:
            return
        task = asyncio.current_task()
        assert task is not None
        self.was_hit = True
        if self._way == ANSWERED and isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(lambda _: task.cancel())
        elif self._way == ANSWERED:
            asyncio.get_running_loop().call_soon(task.cancel)
        else:
            task.cancel()


class Outcome:
    """How an injected coroutine ended: its `result`, or the `error` that it raised."""

    def __init__(self, injected: Injected, result: Any, error: BaseException | None) -> None:
        self.was_hit = injected.was_hit
        self.count = injected.count
        self.result = result
        self.error = error

    @property
    def was_cancelled(self) -> bool:
        return isinstance(self.error, asyncio.CancelledError)


async def inject(coroutine: Coroutine[Any, Any, Any], at: int, way: str) -> Outcome:
    """Run a coroutine in a task of its own and cancel it so. Never raises what it raises."""
    injected = Injected(coroutine, at, way)

    async def run() -> Any:
        return await injected

    task = asyncio.get_running_loop().create_task(run(), name=f"injected {at} {way}")
    await asyncio.wait([task])
    if task.cancelled():
        return Outcome(injected, None, asyncio.CancelledError())
    error = task.exception()
    return Outcome(injected, None if error else task.result(), error)


async def settled(condition: Callable[[], object], turns: int = SETTLE_TURNS) -> bool:
    """Let the loop turn until the condition holds, without any time passing. Return whether it
    does."""
    for _ in range(turns):
        if condition():
            return True
        await asyncio.sleep(0)
    return bool(condition())


def coroutines_of(*classes: type) -> Iterator[tuple[str, str]]:
    """The public coroutines, asynchronous generators and talks of classes: (class, method)."""
    special = {"__aenter__", "__aexit__", "__aiter__"}
    for cls in classes:
        for name in dir(cls):
            if name.startswith("_") and name not in special:
                continue
            found = inspect.getattr_static(cls, name)
            function = inspect.unwrap(found) if callable(found) else None
            if (
                inspect.iscoroutinefunction(function)
                or inspect.isasyncgenfunction(function)
                or inspect.isgeneratorfunction(function)
            ):
                yield cls.__name__, name


Act = Callable[[], Awaitable[Any]]
