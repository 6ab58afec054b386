"""Sessions of signed-in users, and the throttle for wrong secrets.

A session is identified by a token that only its browser has. The console stores the token's hash. A
new token is made at each sign-in, so that no other party can know it before. Requests that change
something must contain the session's second token (`form_token`), which other sites cannot read.
"""

import hashlib
import secrets
from dataclasses import dataclass, field, replace
from typing import Final

from sluicemq.clock import Clock
from sluicemq.console.accounts import Role

IDLE_S: Final = 8 * 3600.0
"""A session ends after this time without a request."""
LIFE_S: Final = 24 * 3600.0
"""A session ends this long after the sign-in."""
SESSIONS_MAX: Final = 1000
"""The number of sessions; a further one ends the oldest."""
FAILURES_FREE: Final = 5
"""The number of wrong secrets without a wait. The wait doubles with each further one."""
ADDRESS_FACTOR: Final = 4
"""One address may send this many times `FAILURES_FREE` wrong secrets, for all names together."""
WAIT_MAX_S: Final = 300.0
"""The longest wait after a wrong secret."""
REMEMBERED_MAX: Final = 10_000
"""The number of names and addresses with wrong secrets that are remembered."""

Credentials = tuple[str, str]
"""An access key and its secret."""


@dataclass(frozen=True, slots=True)
class Session:
    """A signed-in user.

    `credentials` are the access key of the cluster with which the user signed in; None means that
    requests are signed with the credentials of the console. `is_local` is True for an account of
    the console. `secret_hash` is the hash that its secret had, so that the session ends if the
    secret is changed. Times are those of the monotonic clock.
    """

    account: str
    role: Role
    credentials: Credentials | None = field(default=None, repr=False)
    is_local: bool = False
    secret_hash: str = field(default="", repr=False)
    form_token: str = field(default="", repr=False)
    started_s: float = 0.0
    used_s: float = 0.0


def _hash(token: str) -> str:
    """Return the SHA-256 hash of a token, under which it is stored, as hexadecimal digits."""
    return hashlib.sha256(token.encode()).hexdigest()


class Sessions:
    """The sessions of one console. They are kept in memory and end with the process."""

    def __init__(self, clock: Clock) -> None:
        """Begin without sessions and without a link. `clock` measures their ages."""
        self._clock = clock
        self._sessions: dict[str, Session] = {}  # by the hash of the token, the oldest first
        self._link = ""  # the hash of the link's token, or "" without a link

    def start(self, session: Session) -> str:
        """Store a copy of `session` that begins now, and return the token for its cookie.

        The copy has a new form token. Beyond `SESSIONS_MAX` sessions, the oldest one ends.
        """
        now_s = self._clock.monotonic_s()
        token = secrets.token_urlsafe(32)
        form_token = secrets.token_urlsafe(32)
        started_session = replace(session, form_token=form_token, started_s=now_s, used_s=now_s)
        while len(self._sessions) >= SESSIONS_MAX:
            oldest_key = next(iter(self._sessions))
            del self._sessions[oldest_key]
        self._sessions[_hash(token)] = started_session
        return token

    def find(self, token: str, *, renews: bool = True) -> Session | None:
        """Return the session of a token, None if there is none or it has ended.

        With `renews`, the idle time begins again. Use False for requests that a page sends by
        itself.
        """
        key = _hash(token)
        session = self._sessions.get(key)
        if session is None:
            return None

        now_s = self._clock.monotonic_s()
        is_too_old = now_s - session.started_s > LIFE_S
        is_idle_too_long = now_s - session.used_s > IDLE_S
        if is_too_old or is_idle_too_long:
            del self._sessions[key]
            return None
        if renews:
            self._sessions[key] = session = replace(session, used_s=now_s)
        return session

    def end(self, token: str) -> None:
        """End the session of a token, if there is one."""
        self._sessions.pop(_hash(token), None)

    def create_link(self) -> str:
        """Return a new token for a link, which can start one session. An earlier link ends."""
        token = secrets.token_urlsafe(32)
        self._link = _hash(token)
        return token

    def take_link(self, token: str) -> bool:
        """Return whether `token` belongs to the current link, which then cannot be used again.

        The result is False if there is no link.
        """
        if not self._link:
            return False
        # The comparison takes the same time for any token, so that its duration reveals nothing.
        is_current_link = secrets.compare_digest(self._link, _hash(token))
        if is_current_link:
            self._link = ""
        return is_current_link


class Throttle:
    """Counts wrong secrets by name and address, and makes further attempts wait."""

    def __init__(self, clock: Clock) -> None:
        """Begin without failures. `clock` measures the waits."""
        self._clock = clock
        # (name, address) -> (number of failures, end of the wait on the monotonic clock). The name
        # "" means all names at the address. The order of the items is that of the last failures.
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}

    def wait_s(self, name: str, address: str) -> float:
        """Return how many seconds this name must wait before another attempt; 0.0 means none.

        The failures of the name at this IP address count, and the failures of all names there.
        """
        _, name_wait_end_s = self._failures.get((name, address), (0, 0.0))
        _, address_wait_end_s = self._failures.get(("", address), (0, 0.0))
        wait_end_s = max(name_wait_end_s, address_wait_end_s)
        return max(0.0, wait_end_s - self._clock.monotonic_s())

    def add_failure(self, name: str, address: str) -> None:
        """Count a wrong secret for the name at this address, and for the address as a whole.

        From the `FAILURES_FREE`-th failure of a name on (`ADDRESS_FACTOR` times as many for an
        address), the next attempt must wait: 1 s at first, then twice as long each time, up to
        `WAIT_MAX_S`. Of more than `REMEMBERED_MAX` names and addresses, the oldest are dropped.
        """
        now_s = self._clock.monotonic_s()
        self._count_failure((name, address), FAILURES_FREE, now_s)
        self._count_failure(("", address), FAILURES_FREE * ADDRESS_FACTOR, now_s)

    def _count_failure(self, key: tuple[str, str], failures_free: int, now_s: float) -> None:
        """Count a failed attempt of `key`, which is (name, address).

        From `failures_free` failures on, each one makes the next attempt wait, twice as long each
        time. Beyond `REMEMBERED_MAX` keys, the oldest are dropped.
        """
        # The entry is removed and added again, so that the dict stays in the order of failures.
        earlier_failures, _ = self._failures.pop(key, (0, 0.0))
        failures = earlier_failures + 1
        wait_s = 0.0
        if failures >= failures_free:
            doublings = min(failures - failures_free, 20)  # keeps the power finite
            wait_s = min(2.0**doublings, WAIT_MAX_S)
        while len(self._failures) >= REMEMBERED_MAX:
            oldest_key = next(iter(self._failures))
            del self._failures[oldest_key]
        self._failures[key] = failures, now_s + wait_s

    def add_success(self, name: str, address: str) -> None:
        """Forget the failures of the name at this address, and one failure of the address.

        The attempt that succeeded had been counted as a failure before it was checked.
        """
        self._failures.pop((name, address), None)
        failures, wait_end_s = self._failures.pop(("", address), (0, 0.0))
        if failures > 1:
            now_s = self._clock.monotonic_s()
            self._failures["", address] = failures - 1, min(wait_end_s, now_s)
