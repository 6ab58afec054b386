"""A history of processes on virtual time: a loop, a clock and a network of its own, step by step.

A world says what its steps do (`do_KIND`), what is looked at after each (`_look`) and what must
hold at the end (`finish`).
"""

import asyncio
import contextlib
import datetime
import random
from collections.abc import Coroutine
from typing import Any, Final

from simulation.cluster.network import FaultyNetwork
from simulation.cluster.processes import task_factory
from simulation.crashes.plan import Violation
from sluicemq.testing.virtual import VirtualClock

ENDING_ROUNDS_MAX: Final = 1000
START: Final = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)


BUSY_TURNS_MAX: Final = 200_000


class BusyWatch(VirtualClock):
    """A virtual clock that ends a history whose loop never waits: some job asks to be run again at
    once, and has nothing to do. A real broker would take a whole core for that."""

    _busy_turns = 0

    def idle(self, select: Any, timeout_s: float | None) -> list[Any]:
        """Let time pass."""
        self._busy_turns = 0
        return super().on_idle(select, timeout_s)

    def busy(self) -> None:
        """Count a turn. Raises Violation when there were too many without a wait."""
        self._busy_turns += 1
        if self._busy_turns > BUSY_TURNS_MAX:
            self._busy_turns = 0
            raise Violation(f"the loop has turned {BUSY_TURNS_MAX} times without waiting")
        super().on_busy()


class World:
    """One history. `is_over` is never true: it ends with its steps."""

    is_over = False

    def __init__(self, rng: random.Random) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(task_factory)
        self.clock = BusyWatch(START, patience=datetime.timedelta(days=30))
        self.network = FaultyNetwork(self.clock, random.Random(rng.getrandbits(32)))
        self._failure: BaseException | None = None
        self.loop.set_exception_handler(self._failed)

    def take(self, kind: str, rng: random.Random) -> str:
        """One step; then what is looked at. Raises what a callback of the product has raised, and
        Violation."""
        text: str = self._run(getattr(self, f"do_{kind}")(rng))
        self._run(self.clock.settle())
        self._look()
        return f"{self.clock.monotonic_s():8.3f}  {text}"

    def close(self) -> None:
        """End everything, well or not. Each task is cancelled until it has ended: one that clean-up
        keeps alive would be closed by the garbage collector, which awaits nothing."""
        self.clock.release()
        for _ in range(ENDING_ROUNDS_MAX):
            left = asyncio.all_tasks(self.loop)
            if not left:
                break
            for task in left:
                task.cancel()
            with contextlib.suppress(Exception):
                self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The clock stays with the loop: in real time between two steps timers would come near."""
        return self.loop.run_until_complete(work)

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of the product raised; what tasks raise is not looked at when it is late."""
        error = context.get("exception")
        if error is not None and "handle" in context:
            self._failure = error

    def _look(self) -> None:
        if self._failure is not None:
            raise self._failure
