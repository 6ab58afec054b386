"""Long work of a server, done in slices beside its other requests: answers that read millions of
messages, and decoding of large bodies.

A work item is a generator. At each `yield` other work may run. It yields None, or a job: a function
that runs on another thread (`offload`) and whose result the generator gets. If a job raises, the
generator is closed and the work item ends with that error. A work item runs in slices of about
`SLICE_S`, in the share of the connection that asked for it (`net.limits.Shares`). After a slice of
more than `LONG_S` it rests for as long as the slice took. So an answer over millions of messages
delays other connections by one slice at a time. A work item that ends within its first slice is
answered at once.

Offloaded jobs run one after the other; the next one is that of the connection that has used the
least time. A job may compute for seconds while the event loop goes on. CPython switches threads
every 5 ms, which is several times the p99 of a send; while a job computes, it switches every 0.1 ms
(`quick_switches`). A job must not call anything that holds the GIL for milliseconds.

`Background` needs no asyncio: without `call_later` and `offload`, all work runs in turns that a
test or a simulator drives.
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
from sluicemq.net.dispatch import Peer, finish_answer
from sluicemq.net.limits import INLINE_BYTES, Shares, check_plain, note_slow
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

T = TypeVar("T")
USUAL_SWITCH_S: Final = sys.getswitchinterval()
QUICK_SWITCH_S: Final = 0.0001
Job = Callable[[], Any]
Steps = Generator[Job | None, Any, T]
"""A work item: each step takes about a millisecond; longer computations are yielded as jobs."""
Offload = Callable[[Job, Callable[[Any], None]], None]


class Alarm(Protocol):
    """A scheduled call, as the event loop's `call_later` returns it."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Alarm]
_computing: list[None] = []
"""One entry for each running `quick_switches` block; the last one to end restores the interval."""


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Make Python switch threads every `QUICK_SWITCH_S` seconds while the block runs, because
    another thread computes. Blocks may overlap; the last one to end restores the interval of the
    start."""
    _computing.append(None)
    sys.setswitchinterval(QUICK_SWITCH_S)
    try:
        yield
    finally:
        _computing.pop()
        if not _computing:
            sys.setswitchinterval(USUAL_SWITCH_S)


def in_executor(executor: Executor, *, computes: bool = False) -> Offload:
    """Return an `Offload` that runs jobs on `executor` and calls back on the running event loop,
    with the result or the exception. `computes`: switch threads quickly meanwhile
    (`quick_switches`). A job that is cancelled is not called back."""

    def run(work: Job, done: Callable[[Any], None]) -> None:
        stack = contextlib.ExitStack()
        if computes:
            stack.enter_context(quick_switches())

        def finished(future: asyncio.Future[Any]) -> None:
            stack.close()
            if not future.cancelled():
                error = future.exception()
                done(error if error is not None else future.result())

        asyncio.get_running_loop().run_in_executor(executor, work).add_done_callback(finished)

    return run


def in_place(work: Job, done: Callable[[Any], None]) -> None:
    """Run `work` on this thread and pass `done` its result, or the SluiceError or OSError that it
    raises. This is the `Offload` of tests, which have no other thread."""
    try:
        found = work()
    except (SluiceError, OSError) as error:
        found = error
    done(found)


log = logging.getLogger(__name__)

SLICE_S: Final = 0.001
LONG_S: Final = 0.002
LONG_REQUESTS_MAX: Final = 64


@dataclass(slots=True, eq=False)
class _Work:
    """A work item: its steps, the connection that asked for it (None: the server itself), and the
    function that gets its outcome. `outcome` is what the next step gets: the result of the last
    job."""

    steps: Steps[Any]
    peer: Peer | None
    on_end: Callable[[Any], None]
    outcome: Any = None
    weight: int = 1


class Background:
    """Runs work items, one slice at a time."""

    def __init__(
        self,
        clock: Clock,
        shares: Shares,
        settle: Callable[[object, Command, Peer], None] | None = None,
        call_later: CallLater | None = None,
        offload: Offload | None = None,
    ) -> None:
        """Charge the time, measured by `clock`, to `shares`. `settle` takes outcomes that are no
        answers (`turns.py`). `call_later` schedules the rest after a long slice; without it there
        is none. `offload` runs a job on another thread and calls back on this one with its result
        or exception; without it jobs run within the slice."""
        self._clock = clock
        self._shares = shares
        self._settle = settle
        self.call_later = call_later
        self.offload = offload
        self._works: set[_Work] = set()
        self._jobs: deque[tuple[_Work, Job]] = deque()
        self._is_computing = False

    def __len__(self) -> int:
        return len(self._works)

    def answer(self, steps: Steps[Command], command: Command, peer: Peer) -> Command | None:
        """Run `steps` and return the answer to `command` if they end within the first slice. Return
        None otherwise; the answer is written to `peer` when they end. Raises RequestError
        (SYSTEM_BUSY) if LONG_REQUESTS_MAX work items are in progress, and what the steps raise
        within the first slice."""
        if len(self._works) >= LONG_REQUESTS_MAX:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"Too many long-running requests are in progress (limit {LONG_REQUESTS_MAX}). "
                "Try again later.",
            )
        found: list[Command | Exception] = []
        is_late = False
        begin_s = self._clock.monotonic_s()

        def ended(outcome: Command | Exception) -> None:
            self._note(command, peer, begin_s)
            if is_late:
                peer.write(finish_answer(_answer_of(outcome, command), command))
            else:
                found.append(outcome)

        self._begin(_Work(steps, peer, ended))
        is_late = True
        if not found:
            return None
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def run_request(self, steps: Steps[Any], command: Command, peer: Peer, weight: int = 1) -> None:
        """Run `steps` for `command` and deliver their outcome to `peer`: a Command or an exception
        as the answer, bytes as they are, None not at all, anything else by `settle`. No limit
        applies to the number of work items. `weight`: see `Shares.begin_work`."""
        begin_s = self._clock.monotonic_s()

        def ended(outcome: Any) -> None:
            self._note(command, peer, begin_s)
            if isinstance(outcome, Command | Exception):
                outcome = finish_answer(_answer_of(outcome, command), command)
            if isinstance(outcome, bytes):
                peer.write(b"" if command.is_oneway else outcome)
            elif outcome is not None and self._settle is not None:
                self._settle(outcome, command, peer)

        self._begin(_Work(steps, peer, ended, weight=weight))

    def run_in_background(self, steps: Steps[None], peer: Peer | None = None) -> None:
        """Run `steps`, whose result is not needed, in the share of `peer` (None: of the server
        itself). An exception that ends them is logged."""

        def ended(outcome: Exception | None) -> None:
            if outcome is not None:
                name = getattr(steps, "__qualname__", "steps")
                log.error("background work %s failed: %s", name, outcome, exc_info=outcome)

        self._begin(_Work(steps, peer, ended))

    def _note(self, command: Command, peer: Peer, begin_s: float) -> None:
        passed_s = self._clock.monotonic_s() - begin_s
        if passed_s > self._shares.slow_s:
            note_slow(command.code, peer, passed_s, "in the background")

    def _begin(self, work: _Work) -> None:
        self._works.add(work)
        self._shares.begin_work(work.peer, work.weight)
        if len(self._works) == 1:
            self._run(work)
        else:
            self._wait(work)

    # ---

    def _wait(self, work: _Work) -> None:
        peer = work.peer if work.peer is not None and not work.peer.closed else None
        self._shares.add(peer, partial(self._run, work))

    def _run(self, work: _Work) -> None:
        """Run one slice of `work`: advance its steps for about `SLICE_S` seconds, or until it ends
        or yields a job. Drop it if its connection is closed."""
        begin_s = self._clock.monotonic_s()
        if work.peer is not None and work.peer.closed:
            work.steps.close()
            self._end(work, None, is_wanted=False)
            return
        outcome, work.outcome = work.outcome, None
        passed_s = 0.0
        while passed_s < SLICE_S:
            try:
                job = work.steps.send(outcome)
                if job is not None and self.offload is not None:
                    self._jobs.append((work, job))
                    self._compute()
                    return
                outcome = None if job is None else job()
            except StopIteration as end:
                self._end(work, end.value)
                return
            except Exception as error:  # noqa: BLE001 -- whatever it is, the asker gets it
                self._end(work, error)
                return
            passed_s = self._clock.monotonic_s() - begin_s
        work.outcome = outcome
        if passed_s > LONG_S and self.call_later is not None:
            self.call_later(passed_s, lambda: self._wait(work))
        else:
            self._wait(work)

    def _end(self, work: _Work, outcome: object, *, is_wanted: bool = True) -> None:
        self._works.discard(work)
        self._shares.end_work(work.peer, work.weight)
        if is_wanted:
            work.on_end(outcome)

    def _compute(self) -> None:
        """Start the job of the connection that has used the least time, unless a job is running."""
        if self._is_computing or not self._jobs or self.offload is None:
            return
        work, job = min(self._jobs, key=lambda item: self._shares.spent_s(item[0].peer))
        self._jobs.remove((work, job))
        begin_s = self._clock.monotonic_s()
        self._is_computing = True

        def done(outcome: object) -> None:
            self._is_computing = False
            if work.peer is None or not work.peer.closed:
                self._shares.charge(work.peer, self._clock.monotonic_s() - begin_s)
            if isinstance(outcome, Exception):
                work.steps.close()
                self._end(work, outcome)
            else:
                work.outcome = outcome
                self._wait(work)
            self._compute()

        self.offload(job, done)


def _answer_of(outcome: Command | Exception, command: Command) -> Command:
    if isinstance(outcome, Command):
        return outcome
    if isinstance(outcome, RequestError):
        return Command(outcome.code, {}, remark=outcome.remark)
    if not isinstance(outcome, SluiceError):
        log.error("request code %d failed", command.code, exc_info=outcome)
    return Command(ResponseCode.SYSTEM_ERROR, {}, remark=str(outcome))


def decoding(decode: Callable[[bytes | memoryview], T], body: bytes | memoryview) -> Steps[T]:
    """Decode `body` by `decode` and return the result, as steps. A body of more than INLINE_BYTES
    is decoded on another thread. Raises RequestError if such a body is JSON that takes too long to
    parse (`check_plain`), and what `decode` raises."""
    if len(body) <= INLINE_BYTES:
        return decode(body)

    def job() -> T:
        check_plain(bytes(body))
        return decode(body)

    return (yield job)  # type: ignore[no-any-return]


def run_first_step(steps: Steps[T]) -> T | Steps[T]:
    """Run `steps` up to their first yield. Return the result if they end before it, else steps that
    go on from there. Raises what the first step raises."""
    try:
        job = next(steps)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    return _going_on(job, steps)


def _going_on(job: Job | None, steps: Steps[T]) -> Steps[T]:
    while True:
        outcome = yield job
        try:
            job = steps.send(outcome)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def run_now(steps: Steps[T]) -> T:
    """Run all of `steps` on this thread, their jobs included, and return the result. Raises what a
    step or a job raises."""
    outcome = None
    while True:
        try:
            job = steps.send(outcome)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        outcome = None if job is None else job()
