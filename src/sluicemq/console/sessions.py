"""Who is signed in, and for how long; who has tried too often.

A session is known by a token that only its browser has; here its hash is the key. A new one is made
at each sign-in, so that nobody can know it before. What changes something has to bear the session's
second token (`form_token`), which other sites cannot read.
"""

import hashlib
import secrets
from dataclasses import dataclass, field, replace
from typing import Final

from sluicemq.clock import Clock
from sluicemq.console.accounts import Role

IDLE_S: Final = 8 * 3600.0
LIFE_S: Final = 24 * 3600.0
SESSIONS_MAX: Final = 1000
FAILURES_FREE: Final = 5
"""So many wrong secrets are answered at once; each one more doubles the wait."""
OF_ADDRESS: Final = 4
"""As many times more from one address, whatever the names."""
WAIT_MAX_S: Final = 300.0
REMEMBERED_MAX: Final = 10_000

Credentials = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Session:
    """`credentials` are those of a cluster's access key, None: the console's own. `is_local`: of an
    account of the console, whose secret had the hash `secret_hash`: with another one it ends."""

    account: str
    role: Role
    credentials: Credentials | None = field(default=None, repr=False)
    is_local: bool = False
    secret_hash: str = field(default="", repr=False)
    form_token: str = field(default="", repr=False)
    begun_s: float = 0.0
    seen_s: float = 0.0


def _key(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Sessions:
    """Of one console, in memory: with the console they end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._link = ""

    def begin(self, session: Session) -> str:
        """The token of a new session."""
        now_s, token = self._clock.monotonic_s(), secrets.token_urlsafe(32)
        made = replace(session, form_token=secrets.token_urlsafe(32), begun_s=now_s, seen_s=now_s)
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[_key(token)] = made
        return token

    def find(self, token: str, *, renews: bool = True) -> Session | None:
        """None when there is none, or no more. `renews`: somebody is there, and no page that asks
        by itself: idle time begins anew."""
        key, now_s = _key(token), self._clock.monotonic_s()
        session = self._sessions.get(key)
        if session is None:
            return None
        if now_s - session.begun_s > LIFE_S or now_s - session.seen_s > IDLE_S:
            del self._sessions[key]
            return None
        if renews:
            self._sessions[key] = session = replace(session, seen_s=now_s)
        return session

    def end(self, token: str) -> None:
        """Whether it was there or not."""
        self._sessions.pop(_key(token), None)

    def new_link(self) -> str:
        """A token that begins one session, once."""
        token = secrets.token_urlsafe(32)
        self._link = _key(token)
        return token

    def take_link(self, token: str) -> bool:
        """Was it the link's? It is none any more."""
        is_it = bool(self._link) and secrets.compare_digest(self._link, _key(token))
        self._link = "" if is_it else self._link
        return is_it


class Throttle:
    """Wrong secrets by name and address: the more there were, the longer the next one waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}

    def wait_s(self, name: str, address: str) -> float:
        """How long this one has to wait; 0.0: try."""
        now_s = self._clock.monotonic_s()
        ends = (self._failures.get(key, (0, 0.0))[1] for key in ((name, address), ("", address)))
        return max(0.0, *(end - now_s for end in ends))

    def failed(self, name: str, address: str) -> None:
        """One more."""
        now_s = self._clock.monotonic_s()
        for key, free in (
            ((name, address), FAILURES_FREE),
            (("", address), FAILURES_FREE * OF_ADDRESS),
        ):
            count = self._failures.pop(key, (0, 0.0))[0] + 1
            wait_s = min(2.0 ** min(count - free, 20), WAIT_MAX_S) if count >= free else 0.0
            while len(self._failures) >= REMEMBERED_MAX:
                del self._failures[next(iter(self._failures))]
            self._failures[key] = count, now_s + wait_s

    def succeeded(self, name: str, address: str) -> None:
        """The last one was none; the name's others are forgotten."""
        self._failures.pop((name, address), None)
        count, end_s = self._failures.pop(("", address), (0, 0.0))
        if count > 1:
            self._failures["", address] = count - 1, min(end_s, self._clock.monotonic_s())
