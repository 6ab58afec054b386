"""Run a client's background tasks, application code, and cleanup that survives cancellation.

A `TaskGroup` cancels the body of its `async with` when a task fails. That is right for a function
and wrong for a client that runs beside the application's code. `Tasks` owns the tasks that it
starts and logs a task that fails, with its traceback. It starts a *supervised* task (a handler's
worker, a reader, a rebalance) again after a pause. `close` cancels the tasks and returns when all
have ended.

asyncio raises CancelledError in two cases: the current task is cancelled, or the future that it
awaits is cancelled (a future of the application, a call on a pool that is being closed). Only the
first case may end a task of the client. `failure_of` tells the two apart, and
`run_application_code` awaits application code by that rule. An error that does not derive from
Exception (CancelledError, GeneratorExit …) is wrapped in an `EscapedError`. So `except Exception`
catches every failure of the application, and no such failure looks like the end of a task.

A cancelled coroutine gets one CancelledError and must still release what it holds. `run_to_end`
runs that cleanup in a task of its own, which a cancellation of the caller does not reach.
`CloseOnce` is a close() that runs once, however many callers wait for it or are cancelled.
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
"""The pause in seconds before a supervised task is started again; it doubles each time."""
RESTART_MAX_S: Final = 30.0
"""The longest pause in seconds before a supervised task is started again."""
STEADY_S: Final = 60.0
"""A supervised task that ran for this long has recovered: its next pause is `RESTART_S` again."""

_owner: ContextVar["Tasks | None"] = ContextVar("sluicemq_task_owner", default=None)


# ------------------------------------------------------------------- code of the application


class EscapedError(RuntimeError):
    """An application error that cannot be raised as it is.

    Either it does not derive from Exception, or its type means something else to asyncio or to
    generators. `error` is the original exception.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error: BaseException = error
        self.__cause__ = error


def as_failure(error: BaseException) -> Exception:
    """Return `error` if a coroutine can raise it, else an `EscapedError` that contains it.

    Python or asyncio treats some errors specially when a coroutine raises them: errors that do not
    derive from Exception, StopIteration, StopAsyncIteration and concurrent.futures.CancelledError.
    """
    if isinstance(error, Exception) and not isinstance(
        error, StopIteration | StopAsyncIteration | ThreadCancelledError
    ):
        return error
    return EscapedError(error)


def ends_program(error: BaseException) -> bool:
    """Return whether `error` ends the program.

    That is a KeyboardInterrupt or SystemExit, raised on the main thread. On any other thread,
    Python ends only that thread.
    """
    is_request = isinstance(error, KeyboardInterrupt | SystemExit)
    return is_request and threading.current_thread() is threading.main_thread()


async def run_application_code(awaitable: Awaitable[T]) -> T:
    """Await code of the application, and return its result.

    A CancelledError is raised only if the current task is cancelled. If the application's code
    raises one by itself, or another error that does not derive from Exception, `EscapedError` is
    raised. KeyboardInterrupt and SystemExit on the main thread are raised unchanged, and so is the
    GeneratorExit of a coroutine that the garbage collector closes.
    """
    task = asyncio.current_task()
    cancellations_before = 0 if task is None else task.cancelling()
    try:
        return await awaitable
    except BaseException as error:
        failure = failure_of(error, task, cancellations_before)
        if failure is None or failure is error:
            raise
        raise failure from error


def failure_of(
    error: BaseException, task: "asyncio.Task[Any] | None", before: int
) -> Exception | None:
    """Decide how to treat `error`, which awaited code of the application has raised.

    Returns an Exception if the code has failed, and None if the caller must raise `error` again:
    the task itself was cancelled, the program ends, or the garbage collector closes the coroutine.
    `task` is the task that awaited, and `before` the value of its `cancelling()` before that. A
    higher value now means that the task was cancelled. Without a task, the result is None for every
    CancelledError and GeneratorExit.
    """
    if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > before):
        return None
    if isinstance(error, GeneratorExit) and (task is None or _current_task() is not task):
        return None  # the coroutine is being closed by the garbage collector, outside of its loop
    return None if ends_program(error) else as_failure(error)


def _current_task() -> "asyncio.Task[Any] | None":
    """Return the current task, or None outside of an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


async def run_on_thread(
    executor: Executor | None, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Call `function(*arguments)`, code of the application, on a thread; return its result.

    The thread belongs to `executor`; None means the event loop's default executor. If the result is
    awaitable, it is awaited on the event loop. An error that does not derive from Exception, such
    as a KeyboardInterrupt of the thread, is raised as `EscapedError`.
    """

    def call() -> tuple[Any, BaseException | None]:
        try:
            return function(*arguments), None
        except BaseException as error:  # noqa: BLE001 - handed over as a value
            return None, error

    thread_call = asyncio.get_running_loop().run_in_executor(executor, call)
    returned, error = await run_application_code(thread_call)  # its executor may cancel it
    if error is not None:
        raise as_failure(error)
    if inspect.isawaitable(returned):
        return await run_application_code(returned)
    return returned


def call_listener(listener: Callable[..., Any], *arguments: Any) -> None:
    """Call `listener(*arguments)`, code of the application, and log the error that it raises.

    Only KeyboardInterrupt and SystemExit on the main thread are raised.
    """
    try:
        listener(*arguments)
    except BaseException as error:
        if ends_program(error):
            raise
        _log.error("the listener %r raised an error, which is ignored", listener, exc_info=error)


def notify(listener: Callable[..., Any], *arguments: Any) -> None:
    """Schedule `call_listener(listener, *arguments)` for the next event loop iteration.

    Raises RuntimeError if no event loop runs.
    """
    asyncio.get_running_loop().call_soon(call_listener, listener, *arguments)


# --------------------------------------------------------------------------- background tasks


def is_shutting_down() -> bool:
    """Return whether the current task belongs to a `Tasks` that is being closed."""
    owner = _owner.get()
    return owner is not None and owner.is_closing and _current_task() in owner


class SupervisedTask:
    """A task that `Tasks` starts again when it ends unexpectedly.

    `task` is its current run, None before the first one. `timer` starts the next run after a pause
    of `pause_s` seconds, None while there is no such timer. `started_s` is the loop's time at the
    start of the current run.
    """

    __slots__ = (
        "_forget",
        "is_cancelled",
        "make_coroutine",
        "name",
        "pause_s",
        "started_s",
        "task",
        "timer",
    )

    def __init__(
        self,
        make_coroutine: Callable[[], Coroutine[Any, Any, Any]],
        name: str,
        forget: Callable[["SupervisedTask"], object],
    ) -> None:
        """Prepare a task that is started again when it fails.

        `make_coroutine()` returns the coroutine of each run. `forget(self)` is called if it is
        cancelled between two runs.
        """
        self._forget = forget
        self.make_coroutine: Callable[[], Coroutine[Any, Any, Any]] = make_coroutine
        self.name: str = name
        self.task: asyncio.Task[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.started_s: float = 0.0
        self.pause_s: float = RESTART_S
        self.is_cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the task, or its next start, for good."""
        self.is_cancelled = True
        if self.timer is not None:
            self.timer.cancel()
            self._forget(self)
        if self.task is not None:
            self.task.cancel()


class Tasks:
    """The background tasks of one part of a client."""

    __slots__ = ("_supervised", "_task_ended", "_tasks", "is_closing")

    def __init__(self) -> None:
        """Begin without tasks."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._supervised: dict[SupervisedTask, None] = {}  # in the order of their starts
        self._task_ended: asyncio.Event = asyncio.Event()
        self.is_closing: bool = False

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start `coroutine` as a task called `name`, and return the task.

        `close` cancels the task. If it ends with an exception, that is logged. Raises ClosedError
        after `close`.
        """
        task = self._start(coroutine, name)

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            self._task_ended.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("background task %s failed", task.get_name(), exc_info=error)

        task.add_done_callback(ended)
        return task

    def supervise(
        self, make_coroutine: Callable[[], Coroutine[Any, Any, Any]], name: str
    ) -> SupervisedTask:
        """Start `make_coroutine()` as a task, and start it again whenever it fails.

        It fails by an exception, which is logged, or if code outside of this client cancels it. It
        ends for good if it returns, or by `cancel` of the result, or by `close`. The pause before a
        start doubles from `RESTART_S` to `RESTART_MAX_S` seconds. After a run of `STEADY_S`
        seconds, it begins at `RESTART_S` again. Raises ClosedError after `close`.
        """
        supervised = SupervisedTask(make_coroutine, name, self._forget)
        self._run(supervised)
        self._supervised[supervised] = None
        return supervised

    def _start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start `coroutine` as a task called `name`, which `close` will cancel.

        Raises ClosedError after `close`; the coroutine is then closed.
        """
        if self.is_closing:
            coroutine.close()
            raise ClosedError(
                f"cannot start the task {name!r}: its client is closed.", fix="Make a new client."
            )
        # The new task inherits this context variable, so `is_shutting_down` finds its owner.
        outer = _owner.set(self)
        try:
            task = asyncio.get_running_loop().create_task(coroutine, name=name)
        finally:
            _owner.reset(outer)
        self._tasks.add(task)
        return task

    def _forget(self, supervised: SupervisedTask) -> None:
        """Drop a supervised task that is not started again."""
        self._supervised.pop(supervised, None)
        self._task_ended.set()

    def _run(self, supervised: SupervisedTask) -> None:
        """Start the next run of a supervised task."""
        supervised.timer = None
        supervised.started_s = asyncio.get_running_loop().time()
        supervised.task = self._start(supervised.make_coroutine(), supervised.name)
        supervised.task.add_done_callback(lambda task: self._on_supervised_end(supervised, task))

    def _on_supervised_end(self, supervised: SupervisedTask, task: asyncio.Task[Any]) -> None:
        """Schedule the next run of a supervised task that failed, or forget one that has ended."""
        self._tasks.discard(task)
        was_cancelled = task.cancelled()
        error = None if was_cancelled else task.exception()
        has_returned = error is None and not was_cancelled
        if has_returned or supervised.is_cancelled or self.is_closing:
            self._forget(supervised)
            if error is not None:
                _log.error("background task %s failed", supervised.name, exc_info=error)
            return

        loop = task.get_loop()
        if loop.time() - supervised.started_s >= STEADY_S:
            supervised.pause_s = RESTART_S
        if not was_cancelled:
            _log.error(
                "background task %s failed and is started again in %g s",
                supervised.name,
                supervised.pause_s,
                exc_info=error,
            )
        # By a timer: a loop that ends cancels all of its tasks, and would wait for a new one.
        supervised.timer = loop.call_later(
            supervised.pause_s, self._run_again, supervised, was_cancelled
        )
        supervised.pause_s = min(2 * supervised.pause_s, RESTART_MAX_S)

    def _run_again(self, supervised: SupervisedTask, was_cancelled: bool) -> None:
        """Start the next run of a supervised task after its pause.

        `was_cancelled` says that the last run was cancelled by code outside of this client, which
        is logged now.
        """
        if was_cancelled:  # Logged this late, so that the end of a program logs nothing.
            _log.error(
                "background task %s was cancelled by code outside of this client and is started "
                "again",
                supervised.name,
            )
        self._run(supervised)

    @property
    def running_count(self) -> int:
        """The number of tasks that run now. Tasks that wait to be started again do not count."""
        return len(self._tasks)

    def __bool__(self) -> bool:
        """Return whether a task runs, or waits to be started again."""
        return bool(self._tasks or self._supervised)

    def __contains__(self, task: object) -> bool:
        return task in self._tasks

    async def wait(self) -> None:
        """Wait until every task has ended and none will be started again."""
        while self:
            self._task_ended.clear()
            await self._task_ended.wait()

    async def close(self) -> None:
        """Cancel all tasks except the current one, and wait until they have ended.

        Supervised tasks are not started again. Later calls of `spawn` and `supervise` raise
        ClosedError. A second call is harmless.
        """
        self.is_closing = True
        for supervised in tuple(self._supervised):
            if supervised.timer is not None:
                supervised.timer.cancel()
                self._supervised.pop(supervised, None)
        tasks_to_cancel = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks_to_cancel:
            task.cancel()
        if tasks_to_cancel:
            await asyncio.wait(tasks_to_cancel)
        self._task_ended.set()


# ------------------------------------------------------------- cleanup in spite of cancellation


def _do_nothing() -> None:
    """Do nothing. The default of optional callbacks."""


async def run_to_end(
    work: "Coroutine[Any, Any, T] | asyncio.Task[T]", on_cancel: Callable[[], object] = _do_nothing
) -> T:
    """Run `work` to its end, even if the caller is cancelled, and return its result.

    `work` runs in a task of its own. If the caller is cancelled, `on_cancel` is called, the wait
    goes on, and CancelledError is raised at the end; an error of `work` is then logged. Raises what
    `work` raises.

    There is one exception: if the caller is a task that a `Tasks.close` is ending, CancelledError
    is raised at once and `work` runs on, because `work` may be waiting for that `close`.
    """
    task = work if isinstance(work, asyncio.Task) else _start_cleanup(work)
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
    """Await every step in order, even if one raises, and then raise the first error.

    Further errors are logged. A CancelledError counts as an error of its step, so a cancelled
    caller still awaits the other steps. Only GeneratorExit ends this function at once, so that the
    garbage collector can close it.
    """
    first_error: BaseException | None = None
    for step in steps:
        try:
            await step()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised or logged
            if first_error is None:
                first_error = error
            else:
                _log.error("%s failed too", _name_of(step), exc_info=error)
    if first_error is not None:
        raise first_error


def _name_of(step: Callable[..., object]) -> str:
    """Return a name of `step` for log lines."""
    return getattr(step, "__qualname__", None) or repr(step)


def _start_cleanup(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start `work` as a task that no `Tasks` owns."""
    name = getattr(work, "__qualname__", "cleaning up")
    return asyncio.get_running_loop().create_task(work, name=f"sluicemq {name}")


def _has_failed(task: asyncio.Task[Any]) -> bool:
    """Return whether a task has ended by an exception or a cancellation."""
    return task.done() and (task.cancelled() or task.exception() is not None)


class CloseOnce(Generic[T]):
    """A close() that runs once, although many callers may await it; every caller gets its result.

    When a caller is cancelled, `hurry` is called; the caller gets its CancelledError when the run
    has ended. If a run fails, the next caller starts another one.
    """

    def __init__(self, on_hurry: Callable[[], object] = _do_nothing) -> None:
        self._task: asyncio.Task[T] | None = None
        self._hurried = asyncio.Event()
        self._on_hurry = on_hurry

    @property
    def has_started(self) -> bool:
        """Whether `run` was called."""
        return self._task is not None

    def hurry(self) -> None:
        """End every present and later `wait_unless_hurried`, and call `on_hurry`.

        This works before `run` was called, too.
        """
        self._hurried.set()
        self._on_hurry()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Start `work()`, unless it is running or has succeeded, and return its result.

        All callers wait for the same run. If a caller is cancelled, `hurry` is called, and
        CancelledError is raised when the run has ended. Raises what `work` raises; the next call
        then starts it again.
        """
        close_task = self._task
        if close_task is None or _has_failed(close_task):
            close_task = self._task = _start_cleanup(work())
        return await run_to_end(close_task, self.hurry)

    async def wait_unless_hurried(self, event: asyncio.Event, timeout_s: float) -> bool:
        """Wait until `event` is set, `hurry` is called, or `timeout_s` seconds have passed.

        Returns whether `event` is set.
        """
        wait_tasks = [_start_cleanup(wait_task.wait()) for wait_task in (event, self._hurried)]
        try:
            await asyncio.wait(wait_tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait_task in wait_tasks:
                wait_task.cancel()
        return event.is_set()
