"""Long answers: work that reads millions of messages, or decodes what a peer has sent, done beside
everything else.

Such work is a generator. What it yields is where others may have their turn: None, or a job that
another thread does (`offload`), whose result it gets. It runs in slices of about a
millisecond, in the share of who asked for it (`net.limits.Shares`), and rests after a slice that
took longer. So an answer over millions of messages costs nobody else more than a slice. What ends
within its first slice is answered at once.

Offloaded jobs are done one after the other, first for whoever has used least: one may compute for
seconds, and the loop goes on beside it. Python hands over between threads after 5 ms, which is
several times the p99 of a send; while another thread computes it hands over after a tenth of a
millisecond (`quick_switches`). A job calls nothing that takes milliseconds without handing over.

`Background` needs no asyncio: without `call_later` and `offload` everything happens in turns
that a test or a simulator steps.
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


@dataclass(slots=True, eq=False)
class _Work:
    """`outcome`: of the job that it waits for."""

    steps: Steps[Any]
    peer: Peer | None
    on_end: Callable[[Any], None]
    outcome: Any = None
    weight: int = 1


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

    def take(self, steps: Steps[Any], command: Command, peer: Peer, weight: int = 1) -> None:
        """Do the steps of a request; what they return is its outcome. `weight`: see
        `Shares.begin_work`."""
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
        self._shares.end_work(work.peer, work.weight)
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


def _answer_of(outcome: Command | Exception, command: Command) -> Command:
    if isinstance(outcome, Command):
        return outcome
    if isinstance(outcome, RequestError):
        return Command(outcome.code, {}, remark=outcome.remark)
    if not isinstance(outcome, SluiceError):
        log.error("request code %d failed", command.code, exc_info=outcome)
    return Command(ResponseCode.SYSTEM_ERROR, {}, remark=str(outcome))


def decoding(decode: Callable[[bytes | memoryview], T], body: bytes | memoryview) -> Steps[T]:
    """Decode the body of a request: in another thread when it has more than INLINE_BYTES. Raises
    RequestError for JSON that is too dear there too."""
    if len(body) <= INLINE_BYTES:
        return decode(body)

    def job() -> T:
        check_plain(bytes(body))
        return decode(body)

    return (yield job)  # type: ignore[no-any-return]


def begun(steps: Steps[T]) -> T | Steps[T]:
    """Do the first step of a work. Return its result if it has ended, else the rest of the work."""
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
    """Do the whole work in this thread, jobs too, and return what it returns."""
    outcome = None
    while True:
        try:
            job = steps.send(outcome)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        outcome = None if job is None else job()
