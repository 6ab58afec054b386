"""What does not work at the moment, so that an outage is logged once, and its end once.

Every part of a client meets the outage of a broker again and again: each reader, commit, balance
and heartbeat, each message that is given back. They report it here by the name of what is away, as
a rule the broker's address. The first report is a warning, further ones are logged at DEBUG, and
the first success is a warning with their number.

When a broker comes back, some requests still fail for a moment, from connections that are being
opened again. So failures within `FLAP_S` of the end of an outage are logged at DEBUG, unless they
last longer than that.
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
    """Return whether `error`, or what it was raised from, says that a server is away, and nothing
    about the request."""
    for _ in range(CAUSES_MAX):  # an error may be its own cause
        if isinstance(error, _AWAY):
            return True
        error = None if error is None else error.__cause__
    return False


@dataclass(slots=True)
class _Outage:
    since_s: float
    is_logged: bool
    quiet_count: int = 0


class Outages:
    """The outages of one client. Its methods may be called from any thread: an outage begins and
    ends by one operation of a dictionary, of which one thread is the first."""

    __slots__ = ("_clock", "_ended_s", "open")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended_s: dict[str, float] = {}
        self.open: dict[str, _Outage] = {}
        """By the name of what is away; empty while everything works."""

    def failed(self, what: str, text: str, *arguments: object) -> None:
        """Log `text % arguments`: as a warning if it is the first failure of an outage of `what`,
        else at DEBUG."""
        if self._is_first(what):
            suffix = " [until it works again, failures of %s are logged at DEBUG]"
            _log.warning(text + suffix, *arguments, what)
        else:
            _log.debug(text, *arguments)

    def _is_first(self, what: str) -> bool:
        """Whether this failure is the one to be logged as a warning."""
        now_s = self._clock.monotonic_s()
        ended_s = self._ended_s.get(what)
        new = _Outage(now_s, is_logged=ended_s is None or now_s - ended_s > FLAP_S)
        known = self.open.setdefault(what, new)
        if known is new:
            return new.is_logged
        if not known.is_logged and now_s - known.since_s > FLAP_S:
            known.is_logged = True
            return True
        known.quiet_count += 1
        return False

    def worked(self, what: str) -> None:
        """Note that `what` works, and log the end of its outage if there was one."""
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
