"""Stopping in good order: the first signal asks, the second does not wait.

A stream's query has no such thing: `stop()` interrupts the micro-batch, which is then done again
after the restart. `finish` sets the query's state as if it had ended, which its loop looks at
between micro-batches only; the one under way is committed. That is a look into Spark's inside, so
where it is not as expected the query is stopped between two triggers instead, or interrupted: all
three lose nothing, as the checkpoint says what is done.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sluicemq.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

logger = logging.getLogger(__name__)
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
CHECK_S: Final = 0.1
TELL_S: Final = 0.2


class Stop:
    """Whether somebody asked to stop."""

    def __init__(self, told: Callable[[str], None] = lambda text: None) -> None:
        self._asked = threading.Event()
        self._told = told

    def __call__(self) -> bool:
        return self._asked.is_set()

    def ask(self, number: int = signal.SIGTERM, _frame: Any = None) -> None:
        """The handler of a signal."""
        if self._asked.is_set():
            self._tell("stopped hard")
            os._exit(128 + number)
        self._asked.set()
        self._tell("stopping: what is under way is finished first; once more stops at once")

    def _tell(self, text: str) -> None:
        """In a thread of its own: a signal can come while a line is being printed, and Python
        prints no other one within that."""
        teller = threading.Thread(target=self._told, args=(text,), daemon=True)
        teller.start()
        teller.join(TELL_S)


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """Within it SIGINT and SIGTERM ask `stop`. After the session is made: Spark sets its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop.ask) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(query: "StreamingQuery") -> None:
    """Lets the micro-batch under way end, and no other begin; returns when the query is over."""
    if not _ended_inside(query):
        end_s = SYSTEM_CLOCK.monotonic_s() + 600
        while query.isActive and query.status["isTriggerActive"]:
            if SYSTEM_CLOCK.monotonic_s() > end_s:
                break
            threading.Event().wait(CHECK_S)
    query.stop()


def _ended_inside(query: "StreamingQuery") -> bool:
    """Sets the state of Spark's `StreamExecution` to TERMINATED and waits for its trigger to end.

    False when Spark is made differently (or the query has not begun to run).
    """
    try:
        inner: Any = query._jsq
        execution = inner.streamingQuery()
        state = execution.state()
        active = state.get()
        if not active.getClass().getSimpleName().startswith("ACTIVE"):
            return not query.isActive
        name = active.getClass().getName().replace("ACTIVE", "TERMINATED")
        loader = active.getClass().getClassLoader()
        terminated = loader.loadClass(name).getField("MODULE$").get(None)
        state.compareAndSet(active, terminated)
        thread = execution.queryExecutionThread()
        while thread.isAlive() and query.status["isTriggerActive"]:
            threading.Event().wait(CHECK_S)
    except Exception:
        logger.debug(
            "Spark's query is not as expected; it is stopped between triggers", exc_info=True
        )
        return False
    return True
