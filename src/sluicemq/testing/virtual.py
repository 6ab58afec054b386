"""Time that a test owns: a clock, and the running asyncio loop driven by it.

    clock = VirtualClock()
    async with embedded(clock=clock) as mq:
        await clock.advance(hours=5)            # everything that is due in five hours has happened

A loop waits in its selector until the next timer is due. Under this clock it looks at the selector
without waiting, and when nothing is ready it *is* that time: the clock jumps to the next timer. So
`asyncio.sleep`, `asyncio.timeout` and everything of the client and the broker that waits take no
real time, in the same order as always. Two things keep that honest:

- While a thread works for the loop (`run_in_executor`, `to_thread`, handlers that are plain
  functions) time stands still: what has not ended yet must not be overtaken.
- Time that passes although nobody asked for it is limited (`patience`): a test that waits for what
  never comes finds the reason in its log and stands still, rather than burn the processor.

With `stands_still=True` time passes in `advance` only. The clock takes the loop over by its
attributes `time`, `_selector.select` and `run_in_executor`, which asyncio's own loops have and
uvloop has not; `release` gives it back with a time that has not gone backwards.
"""

import asyncio
import datetime
import heapq
import itertools
import logging
import math
import selectors
from collections.abc import Callable
from typing import Any, Final, cast

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError

PATIENCE: Final = datetime.timedelta(days=3)
BUSY_TURNS: Final = 1000
STALL_S: Final = 5.0
RESOLUTION_S: Final = 1e-6
"""Timers that differ by less are due at the same time: floats are no finer after some days."""
Select = Callable[[float | None], list[Any]]
_log = logging.getLogger("sluicemq.testing")


class VirtualClock:
    """A `Clock` that passes when everybody waits, or when it is told to."""

    def __init__(
        self,
        start: datetime.datetime | None = None,
        *,
        stands_still: bool = False,
        patience: datetime.timedelta = PATIENCE,
    ) -> None:
        """`start`: a time with its zone; by default this machine's time now. `patience`: how much
        time may pass between two calls of `advance` because everybody waits."""
        if start is not None and start.tzinfo is None:
            raise ConfigurationError(
                f"start={start.isoformat()} has no time zone.",
                fix="Write datetime(..., tzinfo=datetime.UTC).",
            )
        self._start_ms = SYSTEM_CLOCK.now_ms() if start is None else round(start.timestamp() * 1000)
        self._passed_s = 0.0
        self.stands_still = stands_still
        self._patience_s = patience.total_seconds()
        self._unasked_s = 0.0
        self._targets: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._threads = 0
        self._turns = 0
        self._said = False
        self._driven: _Driven | None = None

    def now_ms(self) -> int:
        return self._start_ms + int(self._passed_s * 1000 + 1e-6)

    def monotonic_s(self) -> float:
        return self._passed_s

    def now(self) -> datetime.datetime:
        """The same as `now_ms`, in UTC."""
        return datetime.datetime.fromtimestamp(self.now_ms() / 1000, datetime.UTC)

    async def advance(
        self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0
    ) -> None:
        """Lets so much time pass; what is due in it happens at its time, in order.

        Returns when everything has come to rest at the end of it. Raises ConfigurationError for a
        negative time, or when the clock drives no loop.
        """
        passing_s = seconds + 60 * (minutes + 60 * (hours + 24 * days))
        if passing_s < 0:
            raise ConfigurationError(f"time cannot go back by {-passing_s:g} s.", fix="Go on.")
        loop = asyncio.get_running_loop()
        if self._driven is None or self._driven.loop is not loop:
            raise ConfigurationError(
                "this clock does not drive the running loop.",
                fix="Call advance inside `async with embedded(clock=clock)`.",
            )
        self._unasked_s = 0.0
        reached: asyncio.Future[None] = loop.create_future()
        target = (self._passed_s + passing_s, next(self._numbers), reached)
        heapq.heappush(self._targets, target)
        try:
            await reached
        finally:
            if target in self._targets:
                self._targets.remove(target)
                heapq.heapify(self._targets)

    def set_wall_clock(self, seconds: float) -> None:
        """Set the wall clock forward by `seconds`, or back if negative, as an administrator or
        NTP does. No time passes: `monotonic_s`, and so every timer of the loop, is as before."""
        self._start_ms += round(seconds * 1000)

    async def settle(self) -> None:
        """Returns when nothing is left to do without time passing."""
        await self.advance(0)

    def drive(self) -> None:
        """Takes the running loop over. Raises ConfigurationError for loops that are not asyncio's,
        and when the clock drives a loop already."""
        if self._driven is not None:
            raise ConfigurationError(
                "this clock drives a loop already.",
                fix="One embedded cluster a clock: make another VirtualClock, or another client "
                "by `mq.servers.client()`.",
            )
        self._driven = _Driven(self, asyncio.get_running_loop())

    def release(self) -> None:
        """Gives the loop back to real time. A second call does nothing."""
        if self._driven is not None:
            self._driven.release()
            self._driven = None

    # ------------------------------------------------------------------------ told by the loop

    def idle(self, select: Select, timeout_s: float | None) -> list[Any]:
        """Nothing is ready; the next timer is due in `timeout_s`."""
        if self._threads:
            return select(STALL_S)
        if self._targets:
            left_s = self._targets[0][0] - self._passed_s
            if timeout_s is None or timeout_s > left_s + RESOLUTION_S:
                time_s, _, reached = heapq.heappop(self._targets)
                self._passed_s = max(self._passed_s, time_s)
                if not reached.done():
                    reached.set_result(None)
            else:
                self._pass(timeout_s)
            return []
        if timeout_s is None or self.stands_still or self._unasked_s > self._patience_s:
            return self._stand(select, timeout_s)
        self._pass(timeout_s)
        self._unasked_s += timeout_s
        return []

    def _pass(self, seconds: float) -> None:
        """To the next whole microsecond: sums of floats would end a hair before the timer. Some
        time always passes, or who is a billionth of a second early would wait for ever."""
        self._turns = 0
        later_s = math.ceil((self._passed_s + seconds) * 1e6 - 1e-3) / 1e6
        self._passed_s = later_s if later_s > self._passed_s else self._passed_s + RESOLUTION_S

    def busy(self) -> None:
        """A turn of the loop in which there is something to do. Work takes time: without that, who
        waits for a time that is off by the last bit of a float would wait in circles for ever."""
        self._turns += 1
        if self._turns == BUSY_TURNS:
            self._pass(RESOLUTION_S)

    def _stand(self, select: Select, timeout_s: float | None) -> list[Any]:
        """Only what comes from outside can go on here."""
        events = select(None if self._said else STALL_S)
        if not events and not self._said:
            self._said = True
            _log.warning(
                "Everything waits and virtual time stands still at %s; %s%s",
                self.now().isoformat(),
                "there is no timer at all." if timeout_s is None
                else f"the next timer is due in {timeout_s:g} s: `await clock.advance(...)`.",
                "" if self._unasked_s <= self._patience_s else
                f" {self._unasked_s:.0f} s have passed unasked, which is the clock's patience: "
                "what this test waits for does not come.",
            )  # fmt: skip
        return events

    def thread_began(self) -> None:
        self._threads += 1

    def thread_ended(self, _future: object) -> None:
        self._threads -= 1


class _Driven:
    """A loop whose time is a virtual clock's, and whose selector is asked without waiting."""

    def __init__(self, clock: VirtualClock, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._clock = clock
        self._raw = cast(Any, loop)
        selector = getattr(loop, "_selector", None)
        if not isinstance(selector, selectors.BaseSelector):
            raise ConfigurationError(
                f"a virtual clock cannot drive {type(loop).__module__}.{type(loop).__name__}.",
                fix="Use asyncio's own event loop in tests, or embedded() without a clock.",
            )
        if isinstance(getattr(loop.time, "__self__", None), _Driven):
            raise ConfigurationError(
                "another virtual clock drives this loop already.", fix="Use that one."
            )
        self._began_s = loop.time() - clock.monotonic_s()
        self._raw.time = self._time
        select: Select = selector.select
        self._select = select
        run: Callable[..., Any] = self._raw.run_in_executor

        def look(timeout: float | None = None) -> list[Any]:
            events = select(0)
            if events or (timeout is not None and timeout <= 0):
                clock.busy()
                return events
            return clock.idle(select, timeout)

        def run_in_executor(executor: Any, work: Callable[..., Any], *values: Any) -> Any:
            future = run(executor, work, *values)
            clock.thread_began()
            future.add_done_callback(clock.thread_ended)
            return future

        self._raw._selector.select = look
        self._raw.run_in_executor = run_in_executor

    def _time(self) -> float:
        return self._began_s + self._clock.monotonic_s()

    def release(self) -> None:
        ahead_s = self._time() - SYSTEM_CLOCK.monotonic_s()
        self._raw.time = lambda: SYSTEM_CLOCK.monotonic_s() + ahead_s
        self._raw._selector.select = self._select
        del self._raw.run_in_executor
