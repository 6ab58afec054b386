"""Background tasks with an owner.

A `TaskGroup` cancels the body of its `async with` when a task fails, which is right for a function
and wrong for a client that lives beside the user's code. `Tasks` owns what it spawned: a task that
dies of an unexpected exception is logged at once, and `close` returns when all have ended.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger("sluicemq.client")


class Tasks:
    """The background tasks of one part of a client."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a task that lives until it ends or `close`."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task %s died", task.get_name(), exc_info=error)

    async def wait(self) -> None:
        """Returns when every task has ended by itself."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def close(self) -> None:
        """Cancels what is left and waits until all have ended. Safe to call twice."""
        left = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
