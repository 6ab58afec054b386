"""Background tasks with an owner, code of the application, and work that ends however its caller
ends.

A `TaskGroup` cancels the body of its `async with` when a task fails, which is right for a function
and wrong for a client that lives beside the application's code. `Tasks` owns what it started: a
task that fails is logged with its traceback, a *kept* one (a handler's worker, a reader, a balance)
is started again after a pause, and `close` returns when all have ended.

asyncio uses an exception, CancelledError, for two things: "this task is cancelled" and "what this
task awaits is cancelled" (a future of the application, a call of a pool that is being closed). Only
the first may end a task of ours. `run_application_code` is the one place where code of the
application is awaited; it tells them apart, and turns what is no Exception (CancelledError,
GeneratorExit …) into an `EscapedError`, so that `except Exception` sees every failure of the
application, and no failure of the application looks like the end of a task.

A coroutine that is cancelled gets one CancelledError, and must still give back what it took.
`run_to_end` awaits cleaning up in a task of its own, which no cancellation of the caller reaches;
`Closing` is a close() that runs once, however many callers wait for it or are cancelled.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError as ThreadCancelledError
from concurrent.futures import Executor
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar

from sluicemq.errors import ClosedError

_log = logging.getLogger("sluicemq.client")
T = TypeVar("T")
RESTART_S: Final = 0.1
"""The pause before a kept task that ended unexpectedly is started again; it doubles each time."""
RESTART_MAX_S: Final = 30.0
STEADY_S: Final = 60.0
"""A kept task that ran for this long has recovered: its next pause is `RESTART_S` again."""

_owner: ContextVar["Tasks | None"] = ContextVar("sluicemq_task_owner", default=None)


# ------------------------------------------------------------------- code of the application


class EscapedError(RuntimeError):
    """An exception of the application that is no Exception, or that has another meaning to asyncio
    or to generators. `error` is the exception as it was raised."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error: BaseException = error
        self.__cause__ = error


def as_failure(error: BaseException) -> Exception:
    """Return `error`, or an `EscapedError` that holds it if raising it in a coroutine would not
    look like a failure: what is no Exception, StopIteration, and the CancelledError of threads,
    which asyncio turns into its own."""
    if isinstance(error, Exception) and not isinstance(
        error, StopIteration | StopAsyncIteration | ThreadCancelledError
    ):
        return error
    return EscapedError(error)


def ends_program(error: BaseException) -> bool:
    """Return whether `error` asks for the end of the program and can have it: KeyboardInterrupt or
    SystemExit on the main thread. On any other thread Python only ends that thread."""
    is_request = isinstance(error, KeyboardInterrupt | SystemExit)
    return is_request and threading.current_thread() is threading.main_thread()


async def run_application_code(awaitable: Awaitable[T]) -> T:
    """Await code of the application and return its result.

    Raises CancelledError only if the current task is cancelled; a CancelledError that `awaitable`
    raises by itself, and everything else that is no Exception, comes out as `EscapedError`.
    KeyboardInterrupt and SystemExit on the main thread pass, because they end the program.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        return await awaitable
    except BaseException as error:
        failure = failure_of(error, task, before)
        if failure is None or failure is error:
            raise
        raise failure from error


def failure_of(
    error: BaseException, task: "asyncio.Task[Any] | None", before: int
) -> Exception | None:
    """Return the failure that an error of awaited application code is, as an Exception; None if
    `error` has to pass because it ends the program or `task`.

    `task` is the task that awaited, and `before` what its `cancelling()` was then: a number that
    has grown since tells the cancellation of the task from a CancelledError of what it awaited.
    """
    if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > before):
        return None
    if isinstance(error, GeneratorExit) and (task is None or _current_task() is not task):
        return None  # the coroutine is being closed by the garbage collector, outside of its loop
    return None if ends_program(error) else as_failure(error)


def _current_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


async def run_on_thread(
    executor: Executor | None, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Call `function` of the application on a thread of `executor` and return its result, awaited
    on the loop if it is awaitable. Raises as `run_application_code`; KeyboardInterrupt and
    SystemExit of a thread end nothing and come out as `EscapedError`."""

    def call() -> tuple[Any, BaseException | None]:
        try:
            return function(*arguments), None
        except BaseException as error:  # noqa: BLE001 - handed over as a value
            return None, error

    called = asyncio.get_running_loop().run_in_executor(executor, call)
    result, error = await run_application_code(called)  # its executor may cancel it
    if error is not None:
        raise as_failure(error)
    return await run_application_code(result) if inspect.isawaitable(result) else result


def call_listener(listener: Callable[..., Any], *arguments: Any) -> None:
    """Call `listener` of the application. What it raises is logged and has no other effect, unless
    it ends the program (`ends_program`)."""
    try:
        listener(*arguments)
    except BaseException as error:
        if ends_program(error):
            raise
        _log.error("the listener %r failed", listener, exc_info=error)


def notify(listener: Callable[..., Any], *arguments: Any) -> None:
    """Call `listener` of the application as `call_listener` does, in the next turn of the loop."""
    asyncio.get_running_loop().call_soon(call_listener, listener, *arguments)


# --------------------------------------------------------------------------- background tasks


def is_shutting_down() -> bool:
    """Return whether the current task belongs to a `Tasks` that is being closed."""
    owner = _owner.get()
    return owner is not None and owner.is_closing and _current_task() in owner


class _Kept:
    """A task that is started again when it ends unexpectedly."""

    __slots__ = ("began_s", "is_cancelled", "make", "name", "pause_s", "task", "timer")

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]], name: str) -> None:
        self.make: Callable[[], Coroutine[Any, Any, Any]] = make
        self.name: str = name
        self.task: asyncio.Task[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.began_s: float = 0.0
        self.pause_s: float = RESTART_S
        self.is_cancelled: bool = False

    def cancel(self) -> None:
        """End the task for good."""
        self.is_cancelled = True
        if self.timer is not None:
            self.timer.cancel()
        if self.task is not None:
            self.task.cancel()


KeptTask = _Kept


class Tasks:
    """The background tasks of one part of a client."""

    __slots__ = ("_ended", "_kept", "_tasks", "is_closing")

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._kept: set[_Kept] = set()
        self._ended: asyncio.Event = asyncio.Event()
        self.is_closing: bool = False

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task that lives until it ends or `close` cancels it; an exception that ends it is
        logged. Raises ClosedError after `close`."""
        task = self._start(coroutine, name)

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            self._ended.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("background task %s failed", task.get_name(), exc_info=error)

        task.add_done_callback(ended)
        return task

    def keep(self, make: Callable[[], Coroutine[Any, Any, Any]], name: str) -> KeptTask:
        """Start a task for `make()`, and another one after a pause when it ends in any other way
        than by returning, by `cancel` of the result, or by `close`: by an exception, which is
        logged with its traceback, or because code outside of this client cancelled it. Raises
        ClosedError after `close`."""
        kept = _Kept(make, name)
        self._run(kept)
        self._kept.add(kept)
        return kept

    def _start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        if self.is_closing:
            coroutine.close()
            raise ClosedError(f"the owner of the task {name!r} is closed.")
        outer = _owner.set(self)
        try:
            task = asyncio.get_running_loop().create_task(coroutine, name=name)
        finally:
            _owner.reset(outer)
        self._tasks.add(task)
        return task

    def _run(self, kept: _Kept) -> None:
        kept.timer = None
        kept.began_s = asyncio.get_running_loop().time()
        kept.task = self._start(kept.make(), kept.name)
        kept.task.add_done_callback(lambda task: self._kept_ended(kept, task))

    def _kept_ended(self, kept: _Kept, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None or kept.is_cancelled or self.is_closing:
            self._kept.discard(kept)
            self._ended.set()
            if error is not None and not isinstance(error, asyncio.CancelledError):
                _log.error("background task %s failed", kept.name, exc_info=error)
            return
        loop = task.get_loop()
        if loop.time() - kept.began_s >= STEADY_S:
            kept.pause_s = RESTART_S
        if not task.cancelled():
            _log.error(
                "background task %s failed and is started again in %g s",
                kept.name, kept.pause_s, exc_info=error,
            )  # fmt: skip
        # By a timer: a loop that ends cancels all of its tasks, and would wait for a new one.
        kept.timer = loop.call_later(kept.pause_s, self._run_again, kept, task.cancelled())
        kept.pause_s = min(2 * kept.pause_s, RESTART_MAX_S)

    def _run_again(self, kept: _Kept, was_cancelled: bool) -> None:
        if was_cancelled:  # Said now: at the end of a program nobody wants to know.
            _log.error(
                "background task %s was cancelled by code outside of this client and is started "
                "again", kept.name,
            )  # fmt: skip
        self._run(kept)

    @property
    def live(self) -> int:
        """The number of tasks that run now; one that waits to be started again does not count."""
        return len(self._tasks)

    def __bool__(self) -> bool:
        """Return whether a task runs, or waits to be started again."""
        return bool(self._tasks or self._kept)

    def __contains__(self, task: object) -> bool:
        return task in self._tasks

    async def wait(self) -> None:
        """Return when every task has ended and none will be started again."""
        while self:
            self._ended.clear()
            await self._ended.wait()

    async def close(self) -> None:
        """Cancel all tasks but the current one and return when they have ended. Safe to call
        twice."""
        self.is_closing = True
        for kept in tuple(self._kept):
            if kept.timer is not None:
                kept.timer.cancel()
                self._kept.discard(kept)
        left = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        self._ended.set()


# ---------------------------------------------------------------------- whatever the caller does


async def run_to_end(
    work: "Coroutine[Any, Any, T] | asyncio.Task[T]", on_cancel: Callable[[], object] = bool
) -> T:
    """Await `work` in a task of its own and return its result, also when the caller is cancelled.

    A cancellation calls `on_cancel`, and CancelledError is raised when `work` has ended; what
    `work` raised then is logged. A task that its own `Tasks` cancels does not wait: `work` may be
    what closes them.
    """
    task = work if isinstance(work, asyncio.Task) else _task_of(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            if is_shutting_down():
                raise
            cancelled = error
            on_cancel()
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        _log.error("%s failed while its caller was cancelled", task.get_name(), exc_info=failure)
    raise cancelled


async def run_each(steps: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Await every step, in order, whatever the steps before raised; then raise the first error.
    The other errors are logged. A coroutine that the garbage collector closes ends at once, which
    that of an `AsyncExitStack` does not."""
    first: BaseException | None = None
    for step in steps:
        try:
            await step()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised or logged
            if first is None:
                first = error
            else:
                _log.error("%s failed too", _name_of(step), exc_info=error)
    if first is not None:
        raise first


def _name_of(step: Callable[..., object]) -> str:
    return getattr(step, "__qualname__", None) or repr(step)


def _task_of(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    name = getattr(work, "__qualname__", "cleaning up")
    return asyncio.get_running_loop().create_task(work, name=f"sluicemq {name}")


class Closing(Generic[T]):
    """The one run of a close(): each caller waits for it and gets its result.

    A caller that is cancelled ends the waiting for others (`patience`), and gets its CancelledError
    when the run has ended. A run that failed is repeated by the next caller.
    """

    def __init__(self, on_hurry: Callable[[], object] = bool) -> None:
        self._run: asyncio.Task[T] | None = None
        self._hurried = asyncio.Event()
        self._on_hurry = on_hurry

    @property
    def has_begun(self) -> bool:
        """Whether close() was called."""
        return self._run is not None

    def hurry(self) -> None:
        """Let the run wait for others no more, also one that has not begun."""
        self._hurried.set()
        self._on_hurry()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Begin `work()` if it has not begun, and return its result when it has ended."""
        run = self._run
        if run is None or (run.done() and (run.cancelled() or run.exception() is not None)):
            run = self._run = _task_of(work())
        return await run_to_end(run, self.hurry)

    async def patience(self, awaited: asyncio.Event, timeout_s: float) -> bool:
        """Wait until the event is set and return True; return False after `timeout_s` seconds, or
        as soon as a caller is cancelled."""
        waits = [_task_of(event.wait()) for event in (awaited, self._hurried)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        return awaited.is_set()
