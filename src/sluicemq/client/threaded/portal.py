"""Run asyncio code on an event loop thread, and call it from other threads.

`Portal` is the event loop and its thread (the term is from anyio). `ThreadedClient` adds what every
blocking client needs on such a loop: a `Sluice`, one client made with it, and an orderly close. The
consumers of this package and the classes of `sluicemq.rocketmq` are built on it. `blocking` makes a
blocking method from a method of the asyncio client.

Only the thread of the portal touches the `Sluice` and its clients. Application threads hand work
over, and wait for it in `Portal.run` and `Portal.call`. An application that is interrupted while it
waits (Ctrl-C) must not lose messages: `Portal.run` therefore cancels the coroutine, and hands a
result that the coroutine had already produced to `on_undelivered`.
"""

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, overload

from sluicemq.client.affinity import ClientAffinity
from sluicemq.client.aio.sluice import Sluice
from sluicemq.errors import ClosedError, ConfigurationError

_log = logging.getLogger("sluicemq.client")
T = TypeVar("T")
C = TypeVar("C")
P = ParamSpec("P")
DEFAULT_THREAD_NAME: Final = "sluicemq client"
_JOIN_TIMEOUT_S: Final = 5.0


def _ignore(_result: object) -> None:
    """Do nothing with the result. The default of `on_undelivered`."""


class Portal:
    """An event loop that runs on a daemon thread of its own.

    Every method may be called from any other thread. After a fork, the methods raise
    ConfigurationError in the child process, because the thread runs in the parent process only.
    """

    def __init__(self, name: str = DEFAULT_THREAD_NAME) -> None:
        """Start a thread with an event loop, and wait until the loop runs.

        `name` is the name of the thread.
        """
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._affinity = ClientAffinity()
        is_ready = threading.Event()

        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            is_ready.set()
            await self._stop.wait()

        def run_loop() -> None:
            try:
                asyncio.run(main())
            except BaseException as error:  # noqa: BLE001 - SystemExit would end a thread silently
                self._failure = error
                _log.critical(
                    "the event loop of %s ended: its client cannot be used any more",
                    name,
                    exc_info=error,
                )

        self._thread = threading.Thread(target=run_loop, name=name, daemon=True)
        self._thread.start()
        is_ready.wait()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start `coroutine` on the portal's event loop, and return a future of its result.

        Raises ClosedError after `close` and after the event loop has failed, ConfigurationError
        after a fork. The coroutine is then closed.
        """
        try:
            self._affinity.check_process()
        except ConfigurationError:
            coroutine.close()
            raise
        loop = self._loop
        if loop is None or loop.is_closed():
            coroutine.close()
            cause = "" if self._failure is None else f" its event loop ended: {self._failure!r}."
            raise ClosedError(f"this client is closed.{cause}", fix="Create a new client.")
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        on_undelivered: Callable[[T], object] = _ignore,
    ) -> T:
        """Run `coroutine` on the event loop, wait until it ends, and return its result.

        If the caller is interrupted while it waits (KeyboardInterrupt), the coroutine is cancelled.
        If the coroutine had returned before, `on_undelivered(result)` is called on the event loop,
        so that the result is not lost.

        Raises what the coroutine raises, ClosedError after `close`, and ConfigurationError after a
        fork and on the thread of the portal itself, where waiting would never end.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ConfigurationError(
                "a blocking call on the client's own thread would wait for itself.",
                fix="Await the asyncio client there, or pass a plain function as the handler.",
            )
        kept_results: list[T] = []  # the result of the coroutine, as soon as it has returned

        async def keep_result() -> T:
            coroutine_result = await coroutine
            kept_results.append(coroutine_result)
            return coroutine_result

        def deliver_late() -> None:
            for kept_result in kept_results:
                on_undelivered(kept_result)

        try:
            future = self.submit(keep_result())
        except (ClosedError, ConfigurationError):
            coroutine.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            self.call_soon(deliver_late)
            raise

    def run_close(self, close: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `close()` of an asyncio client to its end, even if the caller is interrupted.

        The first KeyboardInterrupt or SystemExit cancels the coroutine, so that it stops waiting
        for handlers and sends. Then `close()` is called again and awaited, and the interrupt is
        raised. A second interrupt ends this wait as well. Raises what `run` raises.
        """
        try:
            return self.run(close())
        except (KeyboardInterrupt, SystemExit):
            self.run(close())
            raise

    @overload
    def call(
        self, function: Callable[P, Awaitable[T]], *arguments: P.args, **options: P.kwargs
    ) -> T: ...

    @overload
    def call(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T: ...

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `function(*arguments, **options)` on the event loop, and return its result.

        If the function returns an awaitable, it is awaited there and its result is returned. Raises
        what the function raises, and what `run` raises.
        """

        async def call_function() -> Any:
            returned = function(*arguments, **options)
            return await returned if inspect.isawaitable(returned) else returned

        return self.run(call_function())

    def call_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Schedule `function(*arguments)` on the event loop without waiting.

        Does nothing after `close`. Raises ConfigurationError after a fork.
        """
        self._affinity.check_process()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Stop the event loop, and wait up to 5 seconds until its thread has ended.

        Called on the thread of the portal itself, this does not wait. Safe to call twice.
        """
        self.call_soon(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)


class ThreadedClient(Generic[C]):
    """A `Sluice` and one client made with it, on the event loop of a `Portal`.

    `portal` is the event loop, `client` the asyncio client, `is_closed` whether `close` was called.
    """

    def __init__(
        self,
        make_sluice: Callable[[], Sluice],
        make_client: Callable[[Sluice], Awaitable[C]],
        thread_name: str = DEFAULT_THREAD_NAME,
    ) -> None:
        """Make a `Sluice` and a client on the event loop of a thread of their own.

        `make_sluice()` and `make_client(sluice)` are called on that thread, the portal. If one of
        them raises, or the caller is interrupted, everything is closed again and the error is
        raised.
        """
        self.portal: Portal = Portal(thread_name)
        self.is_closed: bool = False
        self._sluice: Sluice | None = None
        try:
            self._sluice = self.portal.call(make_sluice)
            self.client: C = self.portal.call(make_client, self._sluice)
        except BaseException:
            self.close()
            raise

    @property
    def sluice(self) -> Sluice:
        """The `Sluice` that the client was made with."""
        assert self._sluice is not None
        return self._sluice

    @overload
    def call(
        self,
        method: Callable[Concatenate[C, P], Awaitable[T]],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T: ...

    @overload
    def call(
        self, method: Callable[Concatenate[C, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T: ...

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `method(client, *arguments, **options)` on the event loop, and return its result.

        Raises as `Portal.call` does.
        """
        return self.portal.call(method, self.client, *arguments, **options)

    def close(self) -> None:
        """Close the `Sluice` with its clients, and end their thread. A second call is harmless.

        If the caller is interrupted, the `Sluice` is closed without waiting for its handlers and
        sends, and the interrupt is raised afterwards.
        """
        self.is_closed = True
        try:
            if self._sluice is not None:
                self.portal.run_close(self._sluice.close)
        finally:
            self.portal.close()


@overload
def blocking(
    method: Callable[Concatenate[C, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], T]: ...


@overload
def blocking(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[Any, P], T]: ...


def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a blocking method from a method of an asyncio client.

    The new method runs the other one on the event loop of `self._threaded`, a `ThreadedClient` of
    that client, and returns its result. Name, signature and docstring stay the same.
    """

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return self._threaded.call(method, *arguments, **options)

    return call
