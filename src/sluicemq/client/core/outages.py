"""Outages of the servers that one client uses, each logged once when it begins and once when it
ends.

Every part of a client meets the outage of a broker again and again: each reader, commit, rebalance,
heartbeat and rejected message. Each reports it here under the name of what does not respond, as a
rule the broker's address. The first report is logged as a warning and later ones at DEBUG. The
first success is logged as a warning, with the number of reports at DEBUG.

When a broker is back, some requests still fail for a moment, on connections that are being opened
again. So an outage that begins within `FLAP_S` seconds after the end of the one before is logged at
DEBUG at first, and as a warning only when it has lasted longer than `FLAP_S`.
"""

import logging
from dataclasses import dataclass
from typing import Final

from sluicemq.clock import Clock
from sluicemq.errors import ConnectionLostError, NameServerUnreachableError, RequestTimeoutError

_log = logging.getLogger("sluicemq.client")
NAME_SERVERS: Final = "the name servers"
FLAP_S: Final = 10.0
ENDED_MAX: Final = 1000
CAUSES_MAX: Final = 5
_AWAY: Final = (ConnectionLostError, RequestTimeoutError, NameServerUnreachableError)


def is_outage(error: BaseException | None) -> bool:
    """Return whether `error`, or one of the errors that caused it (`__cause__`, up to `CAUSES_MAX`
    levels), means that a server does not respond: ConnectionLostError, RequestTimeoutError or
    NameServerUnreachableError."""
    for _ in range(CAUSES_MAX):  # an error may be its own cause
        if isinstance(error, _AWAY):
            return True
        error = None if error is None else error.__cause__
    return False


@dataclass(slots=True)
class _Outage:
    """An outage in progress: the monotonic time of its first failure, whether a warning was logged
    for it, and the number of further failures that were logged at DEBUG."""

    since_s: float
    is_logged: bool
    quiet_count: int = 0


class Outages:
    """The outages of one client. Methods may be called from any thread: one dictionary operation
    decides which thread begins or ends an outage."""

    __slots__ = ("_clock", "_ended_s", "open")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended_s: dict[str, float] = {}
        self.open: dict[str, _Outage] = {}
        """By the name of what is away; empty while everything works."""

    def failed(self, what: str, text: str, *arguments: object) -> None:
        """Count a failure of `what` and log `text % arguments`. It is a warning if it begins an
        outage; if that outage began within `FLAP_S` seconds of the one before, the warning comes
        when it has lasted longer than `FLAP_S`. Every other failure is logged at DEBUG."""
        if self._is_first(what):
            suffix = " [until it works again, failures of %s are logged at DEBUG]"
            _log.warning(text + suffix, *arguments, what)
        else:
            _log.debug(text, *arguments)

    def _is_first(self, what: str) -> bool:
        """Count a failure of `what`. Return whether it has to be logged as a warning."""
        now_s = self._clock.monotonic_s()
        ended_s = self._ended_s.get(what)
        is_logged = ended_s is None or now_s - ended_s > FLAP_S
        new = _Outage(now_s, is_logged, quiet_count=0 if is_logged else 1)
        known = self.open.setdefault(what, new)
        if known is new:
            return new.is_logged
        if not known.is_logged and now_s - known.since_s > FLAP_S:
            known.is_logged = True
            return True
        known.quiet_count += 1
        return False

    def worked(self, what: str) -> None:
        """Note that `what` responds. If it had an outage for which a warning was logged, log the
        end with its length in seconds and the number of failures at DEBUG."""
        if what not in self.open:
            return
        over = self.open.pop(what, None)
        now_s = self._clock.monotonic_s()
        if len(self._ended_s) >= ENDED_MAX:
            self._ended_s.clear()
        self._ended_s[what] = now_s
        if over is not None and over.is_logged:
            _log.warning(
                "the outage of %s is over after %.0f s; %d more failures were logged at DEBUG",
                what, now_s - over.since_s, over.quiet_count,
            )  # fmt: skip
