"""Errors as a Spark user meets them: their text first, not a Python traceback.

Spark puts what a Python worker raised into the JVM exception's message, traceback first, so that
"the topic does not exist" stands forty lines down. Its worker leaves the traceback out when the
environment variable below is set in that process, which ends after the error. So our own errors,
whose text says everything, set it; all others keep their traceback.

Riding out a broker that is away for seconds: it restarts, its machine moves, a network blinks.

Spark ends a query at the first error of its source or sink, and what a person starts again at night
should not have ended. So what the planner asks, what a task reads or sends and what the driver
commits is tried again, with pauses that double, until `timeoutMs` have passed without success. Each
of them may be repeated: reading goes on at the offset it came to, at-least-once rows may come
twice, a staged batch whose answer is lost is in no epoch, and an epoch is committed once.

An error that another try cannot mend (refused, gone, malformed) is raised at once. So is an outage
at the start of a job, before it reached anything: there it is a wrong address.

What is peculiar to the Python workers of Spark, which read and write.
"""

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final, TypeVar

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import (
    ConnectionLostError,
    NameServerUnreachableError,
    RequestError,
    RequestTimeoutError,
    RouteNotFoundError,
    SendError,
    SluiceError,
)
from sluicemq.wire.codes import ResponseCode

HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""Read by pyspark.util.handle_worker_exception (pyspark 4.0 and later)."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Within it, an error of SluiceMQ reaches the user as its text alone."""
    try:
        yield
    except SluiceError:
        os.environ[HIDE_TRACEBACK] = "1"
        raise


logger = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 2.0
_PASSING: Final = (
    ConnectionLostError,
    NameServerUnreachableError,
    RequestTimeoutError,
    RouteNotFoundError,  # a broker that restarts is in no route for a moment
    SendError,
)
_PASSING_CODES: Final = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.FLUSH_DISK_TIMEOUT}
)


class Outage:
    """Failures in a row: `pause` after each, `over` when something has succeeded again."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end_s: float | None = None
        self._pause_s = PAUSE_FIRST_S

    def pause(self, error: SluiceError) -> None:
        """Waits before the next try. Raises `error` when it is none that passes, or has lasted
        too long."""
        code = error.code if isinstance(error, RequestError) else None
        if code not in _PASSING_CODES and not isinstance(error, _PASSING):
            raise error
        now_s = SYSTEM_CLOCK.monotonic_s()
        if self._end_s is None:
            self._end_s = now_s + self._timeout_s
            logger.warning("tried again for up to %g s (timeoutMs): %s", self._timeout_s, error)
        if now_s + self._pause_s > self._end_s:
            raise error
        threading.Event().wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    def over(self) -> None:
        """It succeeded: a later failure is the first of another outage."""
        self._end_s, self._pause_s = None, PAUSE_FIRST_S


def ride_out(work: Callable[[], T], timeout_s: float) -> T:
    """What `work` returns, which is called again through an outage of at most `timeout_s`."""
    outage = Outage(timeout_s)
    while True:
        try:
            return work()
        except SluiceError as error:
            outage.pause(error)


@cache
def keep_imports() -> None:
    """A worker collects garbage after everything it did, and looks at all that was ever imported:
    40 ms, as much as reading 100,000 rows. What is there at its first work stays, and is not looked
    at again."""
    gc.freeze()
