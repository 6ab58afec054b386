"""Long answers: work that reads millions of messages, done beside everything else.

Such work is a generator. What it yields is where others may have their turn: None, or a job that
another thread does (`offload`), whose result it gets. It runs in slices of about a
millisecond, in the share of who asked for it (`net.shares`), and rests after a slice that took
longer. So an answer over millions of messages costs nobody else more than a slice. What ends within
its first slice is answered at once.

Offloaded jobs are done one after the other, first for whoever has used least: one may compute for
seconds, and the loop goes on beside it. Python hands over between threads after 5 ms, which is
several times the p99 of a send; while another thread computes it hands over after a tenth of a
millisecond (`quick_switches`).

`Background` needs no asyncio: without `call_later` and `offload` everything happens in turns
that a test or a simulator steps.

What the broker does by itself on the loop's thread is sliced as well (`Slice`, `Worker`): a slice
lasts so long, or does so many things. A part with a hundred thousand things to do asks `is_over`
between two of them. The clock is read only now and then; under one that stands still (a test's) the
count is the limit. What delivers delayed messages, or marks transactions as done, remembers where
to go on. That place may be written to disk only when everything before it is on disk; otherwise a
crash would leave a place behind messages that are gone. So each place goes with the end of the log
at that time (`Progress`).
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
from sluicemq.net.limits import Shares, note_slow
from sluicemq.store.gather import Judgement
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

T = TypeVar("T")
USUAL_SWITCH_S: Final = sys.getswitchinterval()
QUICK_SWITCH_S: Final = 0.0001
Job = Callable[[], Any]
Steps = Generator[Job | None, Any, T]
"""Work in small steps: each takes a millisecond or so, but for the jobs that it yields."""
Offload = Callable[[Job, Callable[[Any], None]], None]


class Alarm(Protocol):
    """What a loop's `call_later` returns."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Alarm]
_computing: list[None] = []
"""One for each that computes now: of several the last one switches back."""


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """For the time of the block another thread computes."""
    _computing.append(None)
    sys.setswitchinterval(QUICK_SWITCH_S)
    try:
        yield
    finally:
        _computing.pop()
        if not _computing:
            sys.setswitchinterval(USUAL_SWITCH_S)


def in_executor(executor: Executor, *, computes: bool = False) -> Offload:
    """Does in an executor what blocks, or what `computes`; calls back in the loop's thread, with
    the result or the exception."""

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
    """Offloads to this thread: for tests."""
    try:
        found = work()
    except (SluiceError, OSError) as error:
        found = error
    done(found)


log = logging.getLogger(__name__)

SLICE_S: Final = 0.001
LONG_S: Final = 0.002
WORKS_MAX: Final = 64
LOOK_EVERY: Final = 16
_MARKS_MAX: Final = 4096


@dataclass(slots=True, eq=False)
class _Work:
    """`outcome`: of the job that it waits for."""

    steps: Steps[Any]
    peer: Peer | None
    on_end: Callable[[Any], None]
    outcome: Any = None


class Background:
    """Runs works, a slice at a time."""

    def __init__(
        self,
        clock: Clock,
        shares: Shares,
        settle: Callable[[object, Command, Peer], None] | None = None,
        call_later: CallLater | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`offload` does a job in another thread and calls back in this one with its result,
        perhaps an exception; `settle` takes what is no answer (`turns.py`)."""
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
        """The answer to a request, or None when it will be written later. Raises RequestError when
        too many wait, or what the work raises within its first slice."""
        if len(self._works) >= WORKS_MAX:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY, f"{WORKS_MAX} long questions are being worked at already."
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

    def take(self, steps: Steps[Any], command: Command, peer: Peer) -> None:
        """A request whose handler needs steps; what they return is its outcome."""
        begin_s = self._clock.monotonic_s()

        def ended(outcome: Any) -> None:
            self._note(command, peer, begin_s)
            if isinstance(outcome, Command | Exception):
                outcome = finish_answer(_answer_of(outcome, command), command)
            if isinstance(outcome, bytes):
                peer.write(b"" if command.is_oneway else outcome)
            elif outcome is not None and self._settle is not None:
                self._settle(outcome, command, peer)

        self._begin(_Work(steps, peer, ended))

    def add(self, steps: Steps[None], peer: Peer | None = None) -> None:
        """Work that nobody waits for, in the share of `peer`; what it raises is logged."""

        def ended(outcome: Exception | None) -> None:
            if outcome is not None:
                log.error("work in the background failed: %s", outcome, exc_info=outcome)

        self._begin(_Work(steps, peer, ended))

    def _note(self, command: Command, peer: Peer, begin_s: float) -> None:
        passed_s = self._clock.monotonic_s() - begin_s
        if passed_s > self._shares.slow_s:
            note_slow(command.code, peer, passed_s, "in the background")

    def _begin(self, work: _Work) -> None:
        self._works.add(work)
        self._shares.begin_work(work.peer)
        if len(self._works) == 1:
            self._run(work)
        else:
            self._wait(work)

    # ---

    def _wait(self, work: _Work) -> None:
        peer = work.peer if work.peer is not None and not work.peer.closed else None
        self._shares.add(peer, partial(self._run, work))

    def _run(self, work: _Work) -> None:
        """One slice."""
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
        self._shares.end_work(work.peer)
        if is_wanted:
            work.on_end(outcome)

    def _compute(self) -> None:
        """The next job, of whoever has used least."""
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


def after(judgement: Judgement, again: Callable[[], T]) -> Steps[T]:
    """The same once more, when what a read has to know first is known."""
    judgement.keep((yield judgement.run))
    return again()


def _answer_of(outcome: Command | Exception, command: Command) -> Command:
    if isinstance(outcome, Command):
        return outcome
    if isinstance(outcome, RequestError):
        return Command(outcome.code, {}, remark=outcome.remark)
    if not isinstance(outcome, SluiceError):
        log.error("request code %d failed", command.code, exc_info=outcome)
    return Command(ResponseCode.SYSTEM_ERROR, {}, remark=str(outcome))


class Slice:
    """Begins now. `now_ms` is the time at which it began."""

    __slots__ = ("_clock", "_end_s", "_next_look", "left", "now_ms")

    def __init__(self, clock: Clock, seconds: float, count_max: int) -> None:
        self._clock = clock
        self._end_s = clock.monotonic_s() + seconds
        self._next_look = count_max - LOOK_EVERY
        self.left = count_max
        """How many things may still be done."""
        self.now_ms = clock.now_ms()

    @property
    def is_over(self) -> bool:
        return self.left <= 0

    def done(self, count: int = 1) -> None:
        """So many things are done."""
        self.left = max(self.left - count, 0)
        if self.left <= self._next_look:
            self._next_look = self.left - LOOK_EVERY
            if self._clock.monotonic_s() >= self._end_s:
                self.left = 0


class Worker:
    """Work that is done a slice at a time: `soon`, or after a pause when something went wrong."""

    PAUSE_S: Final = 0.1

    def __init__(
        self,
        run: Callable[[], None],
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._run = run
        self._clock = clock
        self._call_soon = call_soon
        self._is_coming = False
        self._complaint = ""
        self.is_on = False
        self.paused_until_s = 0.0

    def soon(self) -> None:
        """A slice in the loop's next turn."""
        if self.is_on and not self._is_coming:
            self._is_coming = True

            def come() -> None:
                self._is_coming = False
                self._run()

            self._call_soon(come)

    @property
    def is_paused(self) -> bool:
        return self._clock.monotonic_s() < self.paused_until_s

    def failed(self, what: str) -> None:
        """Pause; log what is wrong unless that was the last thing said."""
        self.paused_until_s = self._clock.monotonic_s() + self.PAUSE_S
        if what != self._complaint:
            self._complaint = what
            log.error("%s", what)

    def succeeded(self) -> None:
        self._complaint = ""


class Progress:
    """`value` is where to go on now; `safe` where to go on after a crash."""

    __slots__ = ("_marks", "_safe", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self._safe = value
        self._marks: deque[tuple[int, int]] = deque()

    def advance(self, value: int, log_end: int) -> None:
        """Everything before `value` is stored, and the log ends at `log_end`."""
        self.value = value
        marks = self._marks
        if len(marks) == _MARKS_MAX:  # nobody asks: a later place says the same
            marks.pop()
        marks.append((value, log_end))

    def safe(self, synced_offset: int) -> int:
        """The newest value whose log is on disk up to `synced_offset`."""
        marks = self._marks
        while marks and marks[0][1] <= synced_offset:
            self._safe = marks.popleft()[0]
        return self._safe
