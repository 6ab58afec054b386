"""Errors as Spark users see them, retries during outages, and what several Spark modules share.

Spark puts the error of a Python worker into the message of a JVM exception, traceback first, so
that "the topic does not exist" appears forty lines further down. The worker leaves the traceback
out if an environment variable is set in its process, which ends after the error. SluiceMQ's own
errors say everything in their text, so `errors_without_traceback` sets the variable for them. All
other errors keep their traceback.

Spark ends a query at the first error of its source or sink. An outage of some seconds should not
end a query that an operator then has to start again. So `retry_during_outage` repeats the requests
of the planner, the reads and sends of a task and the commits of the driver, with pauses that
double, until `timeoutMs` have passed without success. Each of these may be repeated: reading
continues at the offset that it has reached, at-least-once rows may be stored twice, a staged batch
whose acknowledgement is lost is part of no epoch, and an epoch is committed once. An error that a
retry cannot resolve (refused, gone, malformed) is raised at once. So is an outage at the start of a
job, before anything was reached; there it means a wrong address.
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
_SPARK_DETAILS: Final = re.compile(
    r"(;? ?\(?line \d+,? pos \d+\)?|SQLSTATE: \w+|== SQL.*|JVM stacktrace:.*"
    r"|;\n'.*|;\n\w.*)",
    re.DOTALL,
)
"""The parts of Spark's error texts to leave out: position, SQL state, query and stack trace."""
_AWAIT_FAILED: Final = "Exception thrown in awaitResult"
_CAUSE: Final = re.compile(r"^Caused by: [\w.$]+: (.+?)(?=\n\tat |\Z)", re.DOTALL | re.MULTILINE)
_ERROR_CHARACTERS_MAX: Final = 600
_URL_PASSWORD: Final = re.compile(r"://[^/@\s]*?:([^/\s]*)@")
PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 2.0
_TRANSIENT_ERRORS: Final = (
    ConnectionLostError,
    NameServerUnreachableError,
    RequestTimeoutError,
    RouteNotFoundError,  # while a broker restarts, no route contains it
    SendError,
)
_TRANSIENT_CODES: Final = frozenset(
    {ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.FLUSH_DISK_TIMEOUT}
)


@contextmanager
def errors_without_traceback() -> Iterator[None]:
    """Return a context manager that lets Spark show a SluiceError without its traceback.

    The error is raised again. An environment variable is set for Spark, and never reset, because
    the worker's process ends after the error.
    """
    try:
        yield
    except SluiceError:
        os.environ[HIDE_TRACEBACK] = "1"
        raise


class Outage:
    """A series of failures of one operation, without a success in between.

    Call `wait_before_retry` after each failure, and `reset` after a success.
    """

    def __init__(self, timeout_s: float) -> None:
        """Allow retries until `timeout_s` seconds after the first failure."""
        self._timeout_s = timeout_s
        self._end_s: float | None = None
        self._pause_s = PAUSE_FIRST_S

    def wait_before_retry(self, error: SluiceError) -> None:
        """Wait before the next attempt of work that has failed with `error`.

        The wait doubles with each failure, up to `PAUSE_MAX_S` seconds. The first failure of an
        outage is logged as a warning. Raises `error` at once if a retry cannot resolve it, or if
        the next attempt would begin later than `timeout_s` seconds after the first failure.
        """
        code = error.code if isinstance(error, RequestError) else None
        is_transient = code in _TRANSIENT_CODES or isinstance(error, _TRANSIENT_ERRORS)
        if not is_transient:
            raise error
        now_s = SYSTEM_CLOCK.monotonic_s()
        if self._end_s is None:
            self._end_s = now_s + self._timeout_s
            logger.warning("retrying for up to %g s (timeoutMs): %s", self._timeout_s, error)
        if now_s + self._pause_s > self._end_s:
            raise error
        threading.Event().wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    def reset(self) -> None:
        """Record a success: the next failure is the first of another outage."""
        self._end_s = None
        self._pause_s = PAUSE_FIRST_S


def retry_during_outage(work: Callable[[], T], timeout_s: float) -> T:
    """Call `work` until it succeeds, and return its result.

    After a SluiceError that a retry can resolve, such as a lost connection, the call is repeated
    after a pause. The pauses grow. Raises the error of `work` if a retry cannot resolve it, or if
    `work` fails for more than `timeout_s` seconds.
    """
    outage = Outage(timeout_s)
    while True:
        try:
            return work()
        except SluiceError as error:
            outage.wait_before_retry(error)


# ---- errors of Spark as texts


def summarize_spark_error(error: BaseException) -> str:
    """Return the essential part of an exception's text, in one line of at most 600 characters.

    If the text contains a SluiceMQ error from a Python worker, return only the text of that error,
    uncut. If the text says only that a result could not be fetched, as after `toLocalIterator`,
    return the text of the cause. If the text is empty, return the name of the exception's class.
    """
    text = str(error)
    own_error = re.search(r"sluicemq\.errors\.\w+: (.+)", text)
    if own_error is not None:
        return own_error[1].strip()
    if _AWAIT_FAILED in text:
        causes = [cause for cause in _CAUSE.findall(text) if not cause.startswith(_AWAIT_FAILED)]
        # Errors of Spark SQL begin with their condition, such as [CAST_INVALID_INPUT].
        named_causes = [cause for cause in causes if cause.startswith("[")]
        text = next(iter(named_causes + causes), text)
    plain = re.search(r"(?:PySparkRuntimeError|\[PYTHON_DATA_SOURCE_ERROR\])[^\n]*\n?(.*)", text)
    cut = _SPARK_DETAILS.sub("", text if plain is None else plain[0]).strip()
    return " ".join(cut.split())[:_ERROR_CHARACTERS_MAX] or type(error).__name__


# ---- problems in a file, and secrets


@dataclass(frozen=True, slots=True, order=True)
class FileProblem:
    """A problem in a file that a user wrote: its line, the key, the message and a fix.

    `key` is empty if the problem is not about one key. If `is_error` is False, the problem is only
    a warning.
    """

    line: int
    key: str
    message: str
    fix: str = ""
    is_error: bool = True

    def describe(self, path: str) -> str:
        """Return the problem as one line, for the file at `path`.

        An example is `late.yaml:4: source.topik: there is no such key. Did you mean 'topic'?`
        """
        severity = "" if self.is_error else "warning: "
        key = f"{self.key}: " if self.key else ""
        return f"{path}:{self.line}: {severity}{key}{self.message} {self.fix}".rstrip()


class PlaceError(Exception):
    """A problem in a file, raised by code that does not know the name of the file."""

    def __init__(self, problem: FileProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(slots=True)
class Secrets:
    """Texts that must not be shown, such as passwords. `masks` has the replacement of each text."""

    masks: dict[str, str] = field(default_factory=dict)

    def add(self, secret: str, mask: str = MASK) -> None:
        """Replace `secret` by `mask` from now on.

        An empty secret is ignored. A secret that was added before keeps its first mask.
        """
        if secret:
            self.masks.setdefault(secret, mask)

    def add_url(self, url: str) -> None:
        """Add the passwords in the URLs that `url` contains, as they are written there.

        Does nothing if there is no password, as in `mysql://host/db`.
        """
        for password in _URL_PASSWORD.findall(url):
            self.add(password)

    def mask(self, text: str) -> str:
        """Return `text` with every secret replaced by its mask."""
        # The longest come first, because one secret may contain another.
        for secret in sorted(self.masks, key=len, reverse=True):
            text = text.replace(secret, self.masks[secret])
        return text


# ---- workers


@cache
def freeze_imports() -> None:
    """Exclude all objects that exist now from garbage collection. Only the first call has effect.

    Spark's Python worker collects garbage after each task, and examines all imported modules. That
    takes 40 ms, as long as reading 100,000 rows.
    """
    gc.freeze()
