"""Errors as a Spark user meets them, and brokers that are away for seconds.

Spark puts what a Python worker raised into the JVM exception's message, traceback first, so that
"the topic does not exist" stands forty lines down. Its worker leaves the traceback out when an
environment variable is set in that process, which ends after the error. So our own errors, whose
text says everything, set it (`plain_errors`); all others keep their traceback.

Spark ends a query at the first error of its source or sink, and what a person starts again at night
should not have ended. So what the planner asks, what a task reads or sends and what the driver
commits is tried again, with pauses that double, until `timeoutMs` have passed without success
(`ride_out`). Each of them may be repeated: reading goes on at the offset it came to, at-least-once
rows may come twice, a staged batch whose answer is lost is in no epoch, and an epoch is committed
once. An error that another try cannot mend (refused, gone, malformed) is raised at once. So is an
outage at the start of a job, before it reached anything: there it is a wrong address.
"""

import gc
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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

logger = logging.getLogger(__name__)
T = TypeVar("T")

HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""Read by pyspark.util.handle_worker_exception (pyspark 4.0 and later)."""
MASK: Final = "***"
_URL_PASSWORD: Final = re.compile(r"://[^/@\s]*?:([^/\s]*)@")
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


@contextmanager
def plain_errors() -> Iterator[None]:
    """Within it, an error of SluiceMQ reaches the user as its text alone."""
    try:
        yield
    except SluiceError:
        os.environ[HIDE_TRACEBACK] = "1"
        raise


class Outage:
    """Failures in a row: `pause` after each, `over` when something has succeeded again."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end_s: float | None = None
        self._pause_s = PAUSE_FIRST_S

    def pause(self, error: SluiceError) -> None:
        """Waits before the next try. Raises `error` when another try cannot mend it, or the outage
        has lasted too long."""
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


# ---- places of a file, and what nobody may read


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What is wrong in a line, at a key, and what to do. A warning stops nothing."""

    line: int
    key: str
    what: str
    fix: str = ""
    is_error: bool = True

    def told(self, path: str) -> str:
        """`late.yaml:4: source.topik: there is no such key. Did you mean 'topic'?`"""
        kind = "" if self.is_error else "warning: "
        key = f"{self.key}: " if self.key else ""
        return f"{path}:{self.line}: {kind}{key}{self.what} {self.fix}".rstrip()


class PlaceError(Exception):
    """Carries a problem of a place of the file to where the file's name is known."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


@dataclass(slots=True)
class Secrets:
    """Texts that nobody may read, and what stands for each."""

    masks: dict[str, str] = field(default_factory=dict)

    def add(self, text: str, mask: str = MASK) -> None:
        if text:
            self.masks.setdefault(text, mask)

    def add_url(self, url: str) -> None:
        """The password of a URL, which a driver may write out with or without its escapes."""
        for password in _URL_PASSWORD.findall(url):
            self.add(password)

    def hidden(self, text: str) -> str:
        """The text without any of them; longest first, as one may hold another."""
        for secret in sorted(self.masks, key=len, reverse=True):
            text = text.replace(secret, self.masks[secret])
        return text


# ---- workers


@cache
def keep_imports() -> None:
    """Spark's Python worker collects garbage after everything it did, and looks at all that was
    ever imported: 40 ms, as much as reading 100,000 rows. What is there at its first work stays,
    and is not looked at again."""
    gc.freeze()
