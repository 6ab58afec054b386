"""Long work of a server, in slices beside its other requests.

Examples are responses that read millions of messages, and the decoding of large bodies.

A work item is a generator. At each `yield` other work may run. It yields None, or a job: a function
that runs on another thread (`Offload`) and whose result the generator receives. If a job raises,
the generator is closed and the work item ends with that error. A work item runs in slices of about
`SLICE_S`, which are charged to the connection that asked for it (`net.limits.FairScheduler`). After
a slice of more than `LONG_SLICE_S` it pauses for as long as the slice took. So a response over
millions of messages delays other connections by one slice at a time. A work item that ends within
its first slice is answered at once.

Offloaded jobs run one after the other; the next one is that of the connection that has used the
least time. A job may compute for seconds while the event loop goes on. CPython switches threads
every 5 ms, which is several times the p99 of a send, so while a job computes, it switches every
0.1 ms (`fast_thread_switching`). A job must not call anything that holds the GIL for milliseconds.

`Background` does not need asyncio: without `call_later` and `offload`, all work runs in scheduling
rounds that a test or a simulator drives.
"""

import asyncio
import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from sluicemq.clock import Clock
from sluicemq.errors import RequestError, SluiceError
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.net.limits import (
    INLINE_DECODE_BYTES,
    FairScheduler,
    check_fastjson_extensions,
    log_slow_request,
)
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

T = TypeVar("T")
DEFAULT_SWITCH_INTERVAL_S: Final = sys.getswitchinterval()
FAST_SWITCH_INTERVAL_S: Final = 0.0001
Job = Callable[[], Any]
WorkItem = Generator[Job | None, Any, T]
"""Each step takes about a millisecond; longer computations are yielded as jobs."""
Offload = Callable[[Job, Callable[[Any], None]], None]
"""Run a job on another thread, and call the function on this one with its result or exception."""


class TimerHandle(Protocol):
    """A scheduled call, as the event loop's `call_later` returns it."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], TimerHandle]
_fast_blocks: list[None] = []
"""One entry for each running `fast_thread_switching` block."""


@contextlib.contextmanager
def fast_thread_switching() -> Iterator[None]:
    """Let Python switch threads every FAST_SWITCH_INTERVAL_S seconds while the block runs.

    Blocks may overlap. When the last one ends, the default interval is set again.
    """
    _fast_blocks.append(None)
    sys.setswitchinterval(FAST_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        _fast_blocks.pop()
        if not _fast_blocks:
            sys.setswitchinterval(DEFAULT_SWITCH_INTERVAL_S)


def offload_to_executor(executor: Executor, *, computes: bool = False) -> Offload:
    """Return a function that runs jobs on `executor`, and reports on the running event loop.

    The function is `offload(job, on_done)`: `on_done` is called with the result or exception of
    `job`, but not if the job is cancelled. `computes` means that jobs compute rather than wait;
    then Python switches threads faster while they run.
    """

    def offload(job: Job, on_done: Callable[[Any], None]) -> None:
        stack = contextlib.ExitStack()
        if computes:
            stack.enter_context(fast_thread_switching())

        def report_outcome(future: asyncio.Future[Any]) -> None:
            stack.close()
            if not future.cancelled():
                error = future.exception()
                on_done(error if error is not None else future.result())

        future = asyncio.get_running_loop().run_in_executor(executor, job)
        future.add_done_callback(report_outcome)

    return offload


def offload_inline(job: Job, on_done: Callable[[Any], None]) -> None:
    """Run `job` on this thread, and call `on_done` with its result, SluiceError or OSError.

    Tests use it, because they have no other thread. Other exceptions are raised.
    """
    try:
        outcome = job()
    except (SluiceError, OSError) as error:
        outcome = error
    on_done(outcome)


log = logging.getLogger(__name__)

SLICE_S: Final = 0.001
LONG_SLICE_S: Final = 0.002
LONG_REQUESTS_MAX: Final = 64


@dataclass(slots=True, eq=False)
class _RunningItem:
    """The state of a work item.

    `peer` is the connection that asked for it, None for the server itself. `on_end` receives its
    result or exception. `sent_value` is what the generator receives next: the result of its last
    job. `weight` is that of `FairScheduler.begin_work`.
    """

    work_item: WorkItem[Any]
    peer: Peer | None
    on_end: Callable[[Any], None]
    sent_value: Any = None
    weight: int = 1


class Background:
    """Runs work items, one slice at a time."""

    def __init__(
        self,
        clock: Clock,
        scheduler: FairScheduler,
        deliver_outcome: Callable[[object, Command, Peer], None] | None = None,
        call_later: CallLater | None = None,
        offload: Offload | None = None,
    ) -> None:
        """Create a runner of work items, which run in slices between requests.

        `scheduler` decides when a slice runs, and is told the time that `clock` measures.
        `deliver_outcome` receives results that are not responses. `call_later` delays the rest of a
        work item after a long slice; None means no delay. `offload` runs a job on another thread;
        None means that jobs run within the slice.
        """
        self._clock = clock
        self._scheduler = scheduler
        self._deliver_outcome = deliver_outcome
        self.call_later = call_later
        self.offload = offload
        self._running: set[_RunningItem] = set()
        self._jobs: deque[tuple[_RunningItem, Job]] = deque()
        self._is_computing = False

    def __len__(self) -> int:
        """Return the number of work items that have not ended."""
        return len(self._running)

    def answer(self, work_item: WorkItem[Command], command: Command, peer: Peer) -> Command | None:
        """Run a work item, and return the response to `command` if it ends within the first slice.

        Otherwise return None; the response is written to `peer` when the work item ends. Raise
        RequestError (SYSTEM_BUSY) if LONG_REQUESTS_MAX work items are running, and what `work_item`
        raises within the first slice.
        """
        if len(self._running) >= LONG_REQUESTS_MAX:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"Too many long-running requests are in progress (limit {LONG_REQUESTS_MAX}). "
                "Try again later.",
            )
        early_outcomes: list[Command | Exception] = []
        is_late = False  # `on_end` reads it: False during the first slice, then True
        begin_s = self._clock.monotonic_s()

        def on_end(outcome: Command | Exception) -> None:
            self._log_if_slow(command, peer, begin_s)
            if is_late:
                peer.write(encode_response_to(_make_response(outcome, command), command))
            else:
                early_outcomes.append(outcome)

        self._begin_item(_RunningItem(work_item, peer, on_end))
        is_late = True
        if not early_outcomes:
            return None
        outcome = early_outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def run_request(
        self, work_item: WorkItem[Any], command: Command, peer: Peer, weight: int = 1
    ) -> None:
        """Run a work item for the request `command`, and deliver its result to `peer`.

        A Command or an exception becomes the response, bytes are written unchanged, None is not
        written, and any other result goes to `deliver_outcome`. The number of work items is not
        limited. `weight` says how much the item counts against the limit of its client.
        """
        begin_s = self._clock.monotonic_s()

        def on_end(outcome: Any) -> None:
            self._log_if_slow(command, peer, begin_s)
            if isinstance(outcome, Command | Exception):
                outcome = encode_response_to(_make_response(outcome, command), command)
            if isinstance(outcome, bytes):
                peer.write(b"" if command.is_oneway else outcome)
            elif outcome is not None and self._deliver_outcome is not None:
                self._deliver_outcome(outcome, command, peer)

        self._begin_item(_RunningItem(work_item, peer, on_end, weight=weight))

    def run_in_background(self, work_item: WorkItem[None], peer: Peer | None = None) -> None:
        """Run a work item whose result is not needed. Its time is charged to `peer`.

        `peer` None means the server itself. An exception that ends the work item is logged.
        """

        def on_end(outcome: Exception | None) -> None:
            if outcome is not None:
                name = getattr(work_item, "__qualname__", "work item")
                log.error("background work %s failed: %s", name, outcome, exc_info=outcome)

        self._begin_item(_RunningItem(work_item, peer, on_end))

    def _log_if_slow(self, command: Command, peer: Peer, begin_s: float) -> None:
        """Log the request if more than the scheduler's `slow_s` have passed since `begin_s`."""
        passed_s = self._clock.monotonic_s() - begin_s
        if passed_s > self._scheduler.slow_s:
            log_slow_request(command.code, peer, passed_s, "in the background")

    def _begin_item(self, running: _RunningItem) -> None:
        """Register a work item. Run its first slice now if no other is running, else later."""
        self._running.add(running)
        self._scheduler.begin_work(running.peer, running.weight)
        if len(self._running) == 1:
            self._run_slice(running)
        else:
            self._schedule_slice(running)

    # ------------------------------------------------------------------------ slices and jobs

    def _schedule_slice(self, running: _RunningItem) -> None:
        """Let the scheduler run the next slice, for the item's connection if that is open."""
        peer = running.peer if running.peer is not None and not running.peer.closed else None
        self._scheduler.schedule_slice(peer, partial(self._run_slice, running))

    def _run_slice(self, running: _RunningItem) -> None:
        """Run a work item for about `SLICE_S` seconds, or until it ends or yields a job.

        With `offload`, a job runs on another thread, and its end schedules the next slice.
        Otherwise the job runs within this slice. If the connection is closed, the item is closed,
        and its `on_end` is not called.
        """
        begin_s = self._clock.monotonic_s()
        if running.peer is not None and running.peer.closed:
            running.work_item.close()
            self._end_item(running, None, is_wanted=False)
            return
        job_result = running.sent_value
        running.sent_value = None
        passed_s = 0.0
        while passed_s < SLICE_S:
            try:
                job = running.work_item.send(job_result)
                if job is not None and self.offload is not None:
                    self._jobs.append((running, job))
                    self._start_next_job()
                    return
                job_result = None if job is None else job()
            except StopIteration as end:
                self._end_item(running, end.value)
                return
            except Exception as error:  # noqa: BLE001 - it becomes the response to the request
                self._end_item(running, error)
                return
            passed_s = self._clock.monotonic_s() - begin_s
        running.sent_value = job_result
        if passed_s > LONG_SLICE_S and self.call_later is not None:
            self.call_later(passed_s, lambda: self._schedule_slice(running))
        else:
            self._schedule_slice(running)

    def _end_item(self, running: _RunningItem, outcome: object, *, is_wanted: bool = True) -> None:
        """Remove a work item that has ended, and call its `on_end` if `is_wanted`.

        `outcome` is its result or exception.
        """
        self._running.discard(running)
        self._scheduler.end_work(running.peer, running.weight)
        if is_wanted:
            running.on_end(outcome)

    def _start_next_job(self) -> None:
        """Start a job on another thread, unless one is running.

        It is the job of the connection that has used the least time. When the job ends, its time is
        charged to the connection, its result goes to the work item with the next slice, and the
        next job starts. An exception ends the work item.
        """
        if self._is_computing or not self._jobs or self.offload is None:
            return

        def used_time_s(waiting: tuple[_RunningItem, Job]) -> float:
            waiting_item, _job = waiting
            return self._scheduler.used_time_s(waiting_item.peer)

        running, job = min(self._jobs, key=used_time_s)
        self._jobs.remove((running, job))
        begin_s = self._clock.monotonic_s()
        self._is_computing = True

        def on_done(outcome: object) -> None:
            self._is_computing = False
            if running.peer is None or not running.peer.closed:
                self._scheduler.charge(running.peer, self._clock.monotonic_s() - begin_s)
            if isinstance(outcome, Exception):
                running.work_item.close()
                self._end_item(running, outcome)
            else:
                running.sent_value = outcome
                self._schedule_slice(running)
            self._start_next_job()

        self.offload(job, on_done)


def _make_response(outcome: Command | Exception, command: Command) -> Command:
    """Return the response to `command` for a result or exception of a work item.

    A Command is returned as it is. An exception becomes a code and a remark; it is logged unless it
    is a SluiceError.
    """
    if isinstance(outcome, Command):
        return outcome
    if isinstance(outcome, RequestError):
        return Command(outcome.code, {}, remark=outcome.remark)
    if not isinstance(outcome, SluiceError):
        log.error("request code %d failed", command.code, exc_info=outcome)
    return Command(ResponseCode.SYSTEM_ERROR, {}, remark=str(outcome))


def decode_body(decode: Callable[[bytes | memoryview], T], body: bytes | memoryview) -> WorkItem[T]:
    """Decode `body` with `decode`, on another thread if it is large, and return the result.

    This is a work item: a generator that yields the job for the other thread. A body of at most
    INLINE_DECODE_BYTES is decoded at once. Raise RequestError if a larger body is JSON that takes
    too long to decode, and what `decode` raises.
    """
    if len(body) <= INLINE_DECODE_BYTES:
        return decode(body)

    def job() -> T:
        check_fastjson_extensions(bytes(body))
        return decode(body)

    return (yield job)  # type: ignore[no-any-return]


def run_first_step(work_item: WorkItem[T]) -> T | WorkItem[T]:
    """Run a work item up to its first yield.

    If it ends before, return its result. Otherwise return a work item that does the rest. Raise
    what the first step raises.
    """
    try:
        job = next(work_item)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    return _continue_after(job, work_item)


def _continue_after(job: Job | None, work_item: WorkItem[T]) -> WorkItem[T]:
    """Return a work item that continues `work_item`, which has already yielded `job`."""
    while True:
        job_result = yield job
        try:
            job = work_item.send(job_result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def run_now(work_item: WorkItem[T]) -> T:
    """Run a work item completely on this thread, with its jobs, and return its result.

    Raise what a step or a job raises.
    """
    job_result = None
    while True:
        try:
            job = work_item.send(job_result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        job_result = None if job is None else job()
