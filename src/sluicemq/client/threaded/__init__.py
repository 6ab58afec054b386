"""Blocking use of the asyncio client: an event loop on a thread, and its methods as blocking ones.

Consumers pull ahead, balance and commit while the program does other things, so their blocking form
is the asyncio one on a thread of its own: `call` runs a coroutine there and waits for its result.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from sluicemq.errors import ClosedError

T = TypeVar("T")
C = TypeVar("C")
P = ParamSpec("P")


class Portal:
    """A running loop on a daemon thread. Its methods may be called from any other thread."""

    def __init__(self, name: str = "sluicemq client") -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name=name, daemon=True
        )
        self._thread.start()
        self._ready.wait()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts a coroutine there. Raises ClosedError after `close`."""
        loop = self._loop
        if loop is None or loop.is_closed():
            coroutine.close()
            raise ClosedError("this client is closed.", cure="Make a new one.")
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine there and waits; an interrupt of the waiting cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @overload
    def run(self, function: Callable[P, Awaitable[T]], *args: P.args, **options: P.kwargs) -> T: ...

    @overload
    def run(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T: ...

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls a function there, awaits what it returns where that is to be awaited, and waits."""

        async def work() -> Any:
            found = function(*args, **options)
            return await found if inspect.isawaitable(found) else found

        return self.call(work())

    def soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Runs a function there without waiting; does nothing after `close`."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Ends the loop and its thread. Safe to call twice."""
        if self._stop is not None:
            self.soon(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)


@overload
def blocking(
    method: Callable[Concatenate[C, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], T]: ...


@overload
def blocking(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[Any, P], T]: ...


def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an asyncio client as one that blocks, of a class whose `_on_loop()` gives a
    `Portal` and that client. Signature and docstring are those of the asyncio one."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        portal, client = self._on_loop()
        return portal.run(method, client, *args, **options)

    return call
