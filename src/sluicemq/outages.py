"""Outages, each logged once when it begins and once when it ends, however often work is retried.

Many parts of a program meet the same trouble again and again. Each reader, commit and heartbeat of
a client meets a broker that does not respond; each tick of a store meets a full disk. They report
to an `Outages` under the *name* of what does not work: a broker's address, or "key index writes".
The first failure is logged as a warning, and later ones at DEBUG. The first success is logged as a
warning with the length of the outage and the number of failures at DEBUG.

Failures of one name can have *kinds*: for a disk, the error number (`kind_of`). Within an outage
the first failure of each kind is a warning, because each kind asks for another fix. Failures
without a kind are all alike.

When a broker is back, some requests still fail for a moment, on connections that are being opened
again. So if an outage begins within `FLAP_S` seconds after the end of the last one that was logged,
and with a kind of that one, it is logged at DEBUG at first, and as a warning only when it has
lasted longer than `FLAP_S`. A disk that fails and works in turns is logged again after `FLAP_S`.
"""

import logging
import threading
from dataclasses import dataclass, field
from typing import Final

from sluicemq.clock import Clock
from sluicemq.errors import ConnectionLostError, NameServerUnreachableError, RequestTimeoutError

FLAP_S: Final = 10.0
ENDED_MAX: Final = 1000
"""The number of names whose last end is remembered, for `FLAP_S`."""
KINDS_MAX: Final = 20
"""The number of kinds of one outage that are logged."""
CAUSES_MAX: Final = 5
_UNRESPONSIVE: Final = (ConnectionLostError, RequestTimeoutError, NameServerUnreachableError)


def is_outage(error: BaseException | None) -> bool:
    """Return whether `error`, or an error that caused it, means that a server does not respond.

    Such an error is a ConnectionLostError, RequestTimeoutError or NameServerUnreachableError.
    Causes are followed by `__cause__`, up to `CAUSES_MAX` levels.
    """
    for _ in range(CAUSES_MAX):  # an error may be its own cause
        if isinstance(error, _UNRESPONSIVE):
            return True
        error = None if error is None else error.__cause__
    return False


def kind_of(error: OSError) -> int | str:
    """Return the kind of a disk error: its error number, or its text if it has none."""
    return error.errno or str(error)


@dataclass(slots=True)
class _Outage:
    """An outage in progress.

    `since_s` is the monotonic time of its first failure, `is_logged` says whether a warning was
    logged for it, and `quiet_count` is the number of failures that were logged at DEBUG.
    """

    since_s: float
    is_logged: bool
    kinds: set[object] = field(default_factory=set)
    quiet_count: int = 0


class Outages:
    """The outages that the parts of one client, or of one store, report.

    Methods may be called from any thread.
    """

    __slots__ = ("_clock", "_ended", "_lock", "_logger", "current")

    def __init__(self, clock: Clock, logger: logging.Logger) -> None:
        """Create an object without outages. Warnings are written to `logger`."""
        self._clock = clock
        self._logger = logger
        self._lock = threading.Lock()
        self._ended: dict[str, tuple[float, set[object]]] = {}
        """For each name: the monotonic end of its last logged outage, and the kinds of failures."""
        self.current: dict[str, _Outage] = {}
        """The outages in progress by name: empty while everything works."""

    def report_failure(self, name: str, text: str, *arguments: object, kind: object = None) -> None:
        """Count a failure of `name`, and log `text % arguments` as a warning or at DEBUG.

        An outage is the time from a failure of `name` to its next success. The first failure of
        each `kind` in an outage is a warning. But if the last outage ended less than `FLAP_S`
        seconds ago and had the same kind, the warning comes only when the new outage has lasted
        longer than `FLAP_S`. All other failures are logged at DEBUG.
        """
        if self._count_failure(name, kind):
            warning = f"{text} [until it works again, failures of %s are logged at DEBUG]"
            self._logger.warning(warning, *arguments, name)
        else:
            self._logger.debug(text, *arguments)

    def _count_failure(self, name: str, kind: object) -> bool:
        """Count a failure of `name`, and return whether it must be logged as a warning.

        It must if it is the first of its kind in the outage and the last outage did not end a
        moment ago, or if nothing was logged for the outage although it has lasted longer than
        `FLAP_S` seconds.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            outage = self.current.get(name)
            if outage is None:
                outage = self.current[name] = _Outage(now_s, is_logged=False)

            is_new_kind = kind not in outage.kinds and len(outage.kinds) < KINDS_MAX
            if is_new_kind:
                outage.kinds.add(kind)
            is_due = is_new_kind and not self._is_flap(name, kind, now_s)
            has_lasted = not outage.is_logged and now_s - outage.since_s > FLAP_S
            if is_due or has_lasted:
                outage.is_logged = True
                return True
            outage.quiet_count += 1
            return False

    def _is_flap(self, name: str, kind: object, now_s: float) -> bool:
        """Return whether an outage of `name` with this kind of failure ended a moment ago.

        A moment is at most `FLAP_S` seconds.
        """
        ended = self._ended.get(name)
        if ended is None:
            return False
        ended_s, kinds = ended
        return now_s - ended_s <= FLAP_S and kind in kinds

    def report_success(self, name: str) -> None:
        """End the outage of `name`, if there is one.

        If a warning was logged for it, log its end, with its length in seconds and the number of
        failures that were logged at DEBUG.
        """
        if name not in self.current:
            return
        now_s = self._clock.monotonic_s()
        with self._lock:
            ended = self.current.pop(name, None)
            if ended is None or not ended.is_logged:  # None: another thread was faster
                return
            if len(self._ended) >= ENDED_MAX:
                self._ended.clear()
            self._ended[name] = now_s, ended.kinds
        self._logger.warning(
            "the outage of %s is over after %.0f s; %d more failures were logged at DEBUG",
            name,
            now_s - ended.since_s,
            ended.quiet_count,
        )
