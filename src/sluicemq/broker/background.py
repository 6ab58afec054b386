"""Long answers: work that reads millions of messages, done beside everything else.

Such work is a generator. What it yields is where others may have their turn: None, or a job that
another thread does (`run_elsewhere`). It runs in slices of about a millisecond, one for each turn
of the loop, and rests after a slice that took longer; several works take turns. So an answer over
millions of messages costs nobody else more than a slice. What ends within its first slice is
answered at once.

No asyncio here: without `call_later` and `run_elsewhere`, which a server sets, everything happens
in turns that a test or a simulator steps.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

from sluicemq.clock import Clock
from sluicemq.errors import RequestError, SluiceError
from sluicemq.net.dispatch import finish_answer
from sluicemq.net.server import Peer
from sluicemq.protocol.codes import ResponseCode
from sluicemq.protocol.command import Command

log = logging.getLogger(__name__)

T = TypeVar("T")
Job = Callable[[], object]
Steps = Generator[Job | None, None, T]
"""Work in small steps: each takes a millisecond or so, but for what it yields for elsewhere."""
SLICE_S: Final = 0.001
LONG_S: Final = 0.002
WORKS_MAX: Final = 64


class _Work:
    __slots__ = ("on_end", "peer", "steps")

    def __init__(self, steps: Steps[Any], peer: Peer | None, on_end: Callable[[Any], None]) -> None:
        self.steps = steps
        self.peer = peer
        self.on_end = on_end


class Background:
    """Runs works, a slice at a time."""

    def __init__(self, clock: Clock, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._clock = clock
        self._call_soon = call_soon
        self._works: deque[_Work] = deque()
        self._is_scheduled = False
        self.call_later: Callable[[float, Callable[[], None]], object] | None = None
        self.run_elsewhere: Callable[[Job, Callable[[object], None]], None] | None = None
        """Does a job in another thread and calls back in this one, perhaps with an exception."""

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

        def ended(outcome: Command | Exception) -> None:
            if is_late:
                peer.write(finish_answer(_answer_of(outcome, command), command))
            else:
                found.append(outcome)

        self._add(_Work(steps, peer, ended))
        is_late = True
        if not found:
            return None
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def add(self, steps: Steps[None]) -> None:
        """Work that nobody waits for; what it raises is logged."""

        def ended(outcome: Exception | None) -> None:
            if outcome is not None:
                log.error("work in the background failed: %s", outcome, exc_info=outcome)

        self._add(_Work(steps, None, ended))

    def _add(self, work: _Work) -> None:
        self._works.append(work)
        if len(self._works) == 1:
            self._run(work)

    # ---

    def _schedule(self, pause_s: float = 0.0) -> None:
        if self._is_scheduled or not self._works:
            return
        self._is_scheduled = True
        if pause_s and self.call_later is not None:
            self.call_later(pause_s, self._turn)
        else:
            self._call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        if self._works:
            self._run(self._works[0])

    def _run(self, work: _Work) -> None:
        """One slice of the first work, which then goes behind the others."""
        begin_s = self._clock.monotonic_s()
        if work.peer is not None and work.peer.closed:
            work.steps.close()
            self._works.remove(work)
            self._schedule()
            return
        passed_s = 0.0
        while passed_s < SLICE_S:
            try:
                job = next(work.steps)
                if job is not None and self.run_elsewhere is not None:
                    self._works.remove(work)
                    self.run_elsewhere(job, lambda outcome: self._resume(work, outcome))
                    break
                if job is not None:
                    job()
            except StopIteration as end:
                self._end(work, end.value)
                break
            except Exception as error:  # noqa: BLE001 -- whatever it is, the asker gets it
                self._end(work, error)
                break
            passed_s = self._clock.monotonic_s() - begin_s
        else:
            self._works.rotate(-1)
        passed_s = self._clock.monotonic_s() - begin_s
        self._schedule(passed_s if passed_s > LONG_S else 0.0)

    def _end(self, work: _Work, outcome: object) -> None:
        self._works.remove(work)
        work.on_end(outcome)

    def _resume(self, work: _Work, outcome: object) -> None:
        if isinstance(outcome, Exception):
            work.steps.close()
            work.on_end(outcome)
        else:
            self._works.append(work)
        self._schedule()


def _answer_of(outcome: Command | Exception, command: Command) -> Command:
    if isinstance(outcome, Command):
        return outcome
    if isinstance(outcome, RequestError):
        return Command(outcome.code, {}, remark=outcome.remark)
    if not isinstance(outcome, SluiceError):
        log.error("request code %d failed", command.code, exc_info=outcome)
    return Command(ResponseCode.SYSTEM_ERROR, {}, remark=str(outcome))
