"""A virtual clock for tests: it drives the running asyncio event loop, and takes no real time.

    clock = VirtualClock()
    async with embedded(clock=clock) as mq:
        await clock.advance(hours=5)            # everything that is due in five hours has happened

An event loop waits in its selector until the next timer is due. Under this clock, the loop polls
the selector without waiting. If nothing is ready, the clock jumps to the time of the next timer. So
`asyncio.sleep`, `asyncio.timeout`, and everything in the client and the broker that waits, take no
real time, and happen in the same order as always. Two rules prevent wrong results:

- While a thread works for the loop (`run_in_executor`, `asyncio.to_thread`, handlers that are plain
  functions), virtual time does not pass. Otherwise a timer could overtake work that is not
  finished.
- The time that passes without a call of `advance` is limited by `patience`. A test that waits for
  something that never happens ends with a TimeoutError then, which says where it waits.

With `stands_still=True`, time passes in `advance` only.

The clock replaces the attributes `time`, `_selector.select` and `run_in_executor` of the loop. The
event loops of asyncio have them; uvloop does not. `release` restores the loop. Its time does not go
back then.
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
"""How much virtual time may pass between two calls of `advance`, by default."""
BUSY_ITERATIONS_MAX: Final = 1000
"""After this number of loop iterations without idling, `RESOLUTION_S` passes."""
STALL_S: Final = 5.0
"""How long, in real time, the clock waits for a thread or for I/O before it logs a warning."""
RESOLUTION_S: Final = 1e-6
"""Timers that differ by less are due at the same time.

After some days of virtual time, a float cannot represent smaller differences.
"""
Select = Callable[[float | None], list[Any]]
"""The `select` method of a selector: takes a timeout in seconds and returns ready events."""
_log = logging.getLogger("sluicemq.testing")


class VirtualClock:
    """A `Clock` whose time passes when every task waits, and in `advance`.

    Until `drive` is called, its time does not pass at all.
    """

    def __init__(
        self,
        start: datetime.datetime | None = None,
        *,
        stands_still: bool = False,
        patience: datetime.timedelta = PATIENCE,
    ) -> None:
        """Create a clock that shows `start`, by default the current time.

        If `stands_still`, time passes only in `advance`. Otherwise it passes when every task waits,
        but at most `patience` between two calls of `advance`. Then the running loop ends with a
        TimeoutError, which a test reports as its failure.

        Raises ConfigurationError if `start` has no time zone, or `patience` is not a timedelta.
        """
        if not isinstance(patience, datetime.timedelta):
            raise ConfigurationError(
                f"patience must be a timedelta, got {patience!r}.",
                fix="Write patience=timedelta(hours=1).",
            )
        if start is not None and start.tzinfo is None:
            raise ConfigurationError(
                f"start={start.isoformat()} has no time zone.",
                fix="Write datetime(..., tzinfo=datetime.UTC).",
            )
        if start is None:
            self._start_ms = SYSTEM_CLOCK.now_ms()
        else:
            self._start_ms = round(start.timestamp() * 1000)
        self._passed_s = 0.0
        self.stands_still = stands_still
        self._patience_s = patience.total_seconds()
        self._passed_unasked_s = 0.0
        """The time that has passed since the last call of `advance`."""
        self._targets: list[tuple[float, int, asyncio.Future[None]]] = []
        """A heap of calls of `advance`: their ends, numbers, and futures."""
        self._target_numbers = itertools.count()
        self._running_threads = 0
        self._busy_iterations = 0
        self._has_warned = False
        self._driver: _LoopDriver | None = None

    def now_ms(self) -> int:
        """Return the virtual time in milliseconds since 1970."""
        return self._start_ms + int(self._passed_s * 1000 + 1e-6)

    def monotonic_s(self) -> float:
        """Return how many seconds have passed since the clock was created."""
        return self._passed_s

    def now(self) -> datetime.datetime:
        """Return the virtual time as a datetime in UTC."""
        return datetime.datetime.fromtimestamp(self.now_ms() / 1000, datetime.UTC)

    async def advance(
        self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0
    ) -> None:
        """Let the sum of the given times pass. Everything that is due meanwhile happens in order.

        Returns at the end of that time, when every task waits again. Raises ConfigurationError for
        a negative time, and if the clock does not drive the running loop.
        """
        passing_s = seconds + 60 * (minutes + 60 * (hours + 24 * days))
        if passing_s < 0:
            raise ConfigurationError(
                f"time cannot go back by {-passing_s:g} s.", fix="Pass 0 or more."
            )
        loop = asyncio.get_running_loop()
        if self._driver is None or self._driver.loop is not loop:
            raise ConfigurationError(
                "this clock does not drive the running loop.",
                fix="Call advance inside `async with embedded(clock=clock)`.",
            )
        self._passed_unasked_s = 0.0
        reached: asyncio.Future[None] = loop.create_future()
        target = (self._passed_s + passing_s, next(self._target_numbers), reached)
        heapq.heappush(self._targets, target)
        try:
            await reached
        finally:
            if target in self._targets:
                self._targets.remove(target)
                heapq.heapify(self._targets)

    def set_wall_clock(self, seconds: float) -> None:
        """Set the wall clock forward by `seconds`, or back if negative, as an administrator does.

        No time passes by this: `monotonic_s`, and so every timer of the loop, stays the same.
        """
        self._start_ms += round(seconds * 1000)

    async def settle(self) -> None:
        """Wait until nothing is left to do unless time passes."""
        await self.advance(0)

    def drive(self) -> None:
        """Let this clock be the time of the running event loop.

        Raises ConfigurationError if the loop is not one of asyncio's, if this clock drives a loop
        already, or if another clock drives this loop.
        """
        if self._driver is not None:
            raise ConfigurationError(
                "this clock drives a loop already.",
                fix="Create a VirtualClock for each embedded cluster, or another client of one "
                "cluster with `mq.servers.client()`.",
            )
        self._driver = _LoopDriver(self, asyncio.get_running_loop())

    def release(self) -> None:
        """Return the loop to real time. Safe to call twice."""
        if self._driver is not None:
            self._driver.release()
            self._driver = None

    # ------------------------------------------------------------------------ called by the loop

    def on_idle(self, select: Select, timeout_s: float | None) -> list[Any]:
        """Let virtual time pass until the next timer or the end of `advance`; return ready events.

        The event loop calls this when it has nothing to do. Its next timer is due in `timeout_s`
        seconds; None means that it has none. If time must not pass, wait in real time with `select`
        instead.
        """
        if self._running_threads:
            return select(STALL_S)
        if self._targets:
            target_s, _, _ = self._targets[0]
            left_s = target_s - self._passed_s
            if timeout_s is None or timeout_s > left_s + RESOLUTION_S:
                self._end_advance()
            else:
                self._let_pass(timeout_s)
            return []
        if timeout_s is None or self.stands_still or self._passed_unasked_s > self._patience_s:
            return self._wait_in_real_time(select, timeout_s)
        self._let_pass(timeout_s)
        self._passed_unasked_s += timeout_s
        return []

    def _end_advance(self) -> None:
        """Set the time to the end of the call of `advance` that ends first, and let it return."""
        target_s, _, reached = heapq.heappop(self._targets)
        self._passed_s = max(self._passed_s, target_s)
        if not reached.done():
            reached.set_result(None)

    def _let_pass(self, seconds: float) -> None:
        """Let `seconds` pass, rounded up to whole microseconds, and at least one microsecond.

        Without rounding, a sum of floats could end just before the time of a timer, and the loop
        would wait for the rest again and again.
        """
        self._busy_iterations = 0
        rounded_s = math.ceil((self._passed_s + seconds) * 1e6 - 1e-3) / 1e6
        if rounded_s > self._passed_s:
            self._passed_s = rounded_s
        else:
            self._passed_s += RESOLUTION_S

    def on_busy(self) -> None:
        """Count a loop iteration that has something to do, and let a little time pass at times.

        Otherwise a task that polls for a time would run for ever if its time is off by the last bit
        of a float.
        """
        self._busy_iterations += 1
        if self._busy_iterations == BUSY_ITERATIONS_MAX:
            self._let_pass(RESOLUTION_S)

    def _wait_in_real_time(self, select: Select, timeout_s: float | None) -> list[Any]:
        """Wait for I/O while virtual time stands still, and return the ready events.

        If nothing happens within `STALL_S`, a warning is logged once. The loop's next timer is due
        in `timeout_s` seconds; None means that it has none. Raises TimeoutError instead if the
        patience is over.
        """
        is_patience_over = self._passed_unasked_s > self._patience_s
        if self._has_warned and not is_patience_over:
            return select(None)
        events = select(STALL_S)
        if not events and is_patience_over:
            raise self._make_patience_error()
        if not events:
            self._has_warned = True
            self._warn_of_stall(timeout_s)
        return events

    def _make_patience_error(self) -> TimeoutError:
        """Return the error for a test that waits in vain, and let time pass again.

        The code that runs the loop raises the error. It then uses the loop to close the cluster,
        for which time must pass.
        """
        passed_s, self._passed_unasked_s = self._passed_unasked_s, 0.0
        places = ""
        if self._driver is not None:
            places = "".join(f" {place}." for place in _find_waiting_callers(self._driver.loop))
        return TimeoutError(
            f"What this test waits for does not happen: {passed_s:.0f} s of virtual time have "
            f"passed without a call of advance (the clock's patience).{places}"
        )

    def _warn_of_stall(self, timeout_s: float | None) -> None:
        """Log that virtual time stands still while every task waits, and what may be the cause.

        The next timer is due in `timeout_s` seconds; None means that there is none.
        """
        if timeout_s is None:
            next_timer = "there is no timer."
        else:
            next_timer = f"the next timer is due in {timeout_s:g} s: `await clock.advance(...)`."
        _log.warning(
            "Every task waits, and virtual time stands still at %s; %s",
            self.now().isoformat(),
            next_timer,
        )

    def on_thread_started(self) -> None:
        """Stop the time while a thread works for the loop."""
        self._running_threads += 1

    def on_thread_ended(self, _future: object) -> None:
        """Let the time pass again when no thread works for the loop."""
        self._running_threads -= 1


class _LoopDriver:
    """The replaced attributes of an event loop that a virtual clock drives."""

    def __init__(self, clock: VirtualClock, loop: asyncio.AbstractEventLoop) -> None:
        """Replace methods of `loop`, so that it gets its time from `clock`.

        Raises ConfigurationError if the loop is not one of asyncio's, or if a clock drives it
        already.
        """
        self.loop = loop
        self._clock = clock
        self._untyped_loop = cast(Any, loop)
        selector = _require_undriven_selector(loop)
        self._offset_s = loop.time() - clock.monotonic_s()
        self._select: Select = selector.select
        self._run_in_original_executor: Callable[..., Any] = self._untyped_loop.run_in_executor
        self._untyped_loop.time = self._time
        self._untyped_loop._selector.select = self._poll
        self._untyped_loop.run_in_executor = self._run_in_executor

    def _poll(self, timeout: float | None = None) -> list[Any]:
        """Return the ready events of the loop. If there are none, let virtual time pass.

        The loop calls this instead of its selector's `select`. `timeout` is the time to its next
        timer; None means that it has none.
        """
        events = self._select(0)
        is_timer_due = timeout is not None and timeout <= 0
        if events or is_timer_due:
            self._clock.on_busy()
            return events
        return self._clock.on_idle(self._select, timeout)

    def _run_in_executor(self, executor: Any, work: Callable[..., Any], *values: Any) -> Any:
        """Run `work` in a thread, and stop the clock until it has ended.

        The loop calls this instead of its own `run_in_executor`.
        """
        future = self._run_in_original_executor(executor, work, *values)
        self._clock.on_thread_started()
        future.add_done_callback(self._clock.on_thread_ended)
        return future

    def _time(self) -> float:
        """Return the time of the loop. It continues from the real time at which it was replaced."""
        return self._offset_s + self._clock.monotonic_s()

    def release(self) -> None:
        """Restore the methods of the loop. Its time continues from the present value."""
        ahead_s = self._time() - SYSTEM_CLOCK.monotonic_s()
        self._untyped_loop.time = lambda: SYSTEM_CLOCK.monotonic_s() + ahead_s
        self._untyped_loop._selector.select = self._select
        del self._untyped_loop.run_in_executor


def _find_waiting_callers(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Return the places where tasks wait that were not started by SluiceMQ, such as the test."""
    frames = [frame for task in asyncio.all_tasks(loop) for frame in task.get_stack(limit=1)]
    return sorted(
        f"{frame.f_code.co_name} waits at {frame.f_code.co_filename}:{frame.f_lineno}"
        for frame in frames
        if not frame.f_globals.get("__name__", "").startswith("sluicemq.")
    )


def _require_undriven_selector(loop: asyncio.AbstractEventLoop) -> selectors.BaseSelector:
    """Return the selector of an event loop, if a clock can drive the loop.

    Raises ConfigurationError if the loop is not one of asyncio's, or if a clock drives it already.
    """
    selector = getattr(loop, "_selector", None)
    if not isinstance(selector, selectors.BaseSelector):
        raise ConfigurationError(
            f"a virtual clock cannot drive {type(loop).__module__}.{type(loop).__name__}.",
            fix="Use asyncio's own event loop in tests, or embedded() without a clock.",
        )
    if isinstance(getattr(loop.time, "__self__", None), _LoopDriver):
        raise ConfigurationError(
            "another virtual clock drives this loop already.", fix="Use that one."
        )
    return selector
