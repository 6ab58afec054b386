"""Who computes next: a fair share of the loop's time for each connection.

One request may take a millisecond, and somebody may ask a thousand at once. The loop's turn has a
budget: when the requests of a turn have used it up, further ones wait for the next turn, and there
the connection goes first that has used least (start-time fair queueing: who comes back after a
pause begins a little before the others, and has saved nothing else). So whoever asks little waits
for one slice of somebody else, however many ask for much, and alone one may use everything.

Sends do not wait here (`dispatch`: quick handlers), nor does what has been begun: a slice is as
long as its handler makes it. What may take longer is cut into slices by `broker.background`.
"""

import heapq
import logging
from collections import deque
from collections.abc import Callable, Hashable
from itertools import count
from typing import Final

from sluicemq.clock import Clock

log = logging.getLogger(__name__)

TURN_S: Final = 0.002
"""So much of a turn goes to requests; then those that are left have to wait for the next one."""
CREDIT_S: Final = 0.005
"""So far ahead of the others begins who has asked for nothing."""
NOTED_S: Final = 0.000_05
"""What takes less goes on no account, as long as nobody waits: an ordinary pull."""
SERVED_MAX: Final = 64
"""So many of those who wait are served in a turn, under a clock that stands still."""
WORKS_MAX: Final = 16
"""So many works of one connection may be under way; until one ends, its next request waits."""

Run = Callable[[], None]


class NoShares:
    """For who cannot let anybody wait."""

    is_tight = False

    def now_s(self) -> float:
        return 0.0

    def has_to_wait(self, who: Hashable) -> bool:
        return False

    def spent(self, who: Hashable, begin_s: float) -> float:
        return 0.0

    def wait(self, who: Hashable, run: Run) -> None:
        run()


NOBODY_WAITS: Final = NoShares()


class _Account:
    """What somebody has used, and what he waits for: slices of his works, and to be read from."""

    __slots__ = ("is_waiting", "request", "slices", "spent_s", "works")

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.slices: deque[Run] = deque()
        self.request: Run | None = None
        self.works = 0
        self.is_waiting = False  # in the order of `Shares._waiting`

    @property
    def has_something(self) -> bool:
        """Is there something that he could do?"""
        return bool(self.slices) or self.can_be_read

    @property
    def can_be_read(self) -> bool:
        return self.request is not None and self.works < WORKS_MAX

    def take(self) -> Run:
        """What he does next."""
        if not self.can_be_read or self.request is None:
            return self.slices.popleft() if self.slices else _nothing
        run, self.request = self.request, None
        return run


def _nothing() -> None:
    """He has become full since he stood in line."""


class Shares:
    """The time of one loop. Who uses it may be anything; connections are peers."""

    def __init__(self, clock: Clock, call_soon: Callable[[Run], object]) -> None:
        self.now_s = clock.monotonic_s
        self._call_soon = call_soon
        self._accounts: dict[Hashable, _Account] = {}
        self._waiting: list[tuple[float, int, _Account]] = []
        self._numbers = count()
        self._begun_s = 0.0  # what the one who was served last had used
        self._used_s = 0.0  # of this turn
        self.is_tight = False
        """Does anybody have to wait? Then `has_to_wait` says who."""
        self._is_over = False
        self._is_scheduled = False
        self._full: set[Hashable] = set()
        self.before_turn: Run = lambda: None
        """What must not wait for a turn: the answers of sends."""

    def has_to_wait(self, who: Hashable) -> bool:
        """Is the turn's budget used up, or has this one too many works under way?"""
        return self._is_over or who in self._full

    def spent(self, who: Hashable, begin_s: float) -> float:
        """Somebody has computed since `begin_s`. Returns the time. HOT."""
        now_s = self.now_s()
        passed_s = now_s - begin_s
        self._used_s += passed_s
        if passed_s > NOTED_S:
            self.charge(who, passed_s)
        if self._used_s >= TURN_S and not self._is_over:
            self._is_over = self.is_tight = True
            self._schedule()
        return now_s

    def charge(self, who: Hashable, seconds: float) -> None:
        """Somebody has used time, of another thread too."""
        account = self._account(who)
        account.spent_s = max(account.spent_s, self._begun_s - CREDIT_S) + seconds

    def spent_s(self, who: Hashable) -> float:
        """By which to order those who wait for something else than the loop."""
        return max(self._account(who).spent_s, self._begun_s - CREDIT_S)

    def wait(self, who: Hashable, run: Run) -> None:
        """A connection is read on when it is its turn."""
        account = self._account(who)
        account.request = run
        self._stand(account)

    def add(self, who: Hashable, run: Run) -> None:
        """A slice of a work, when it is its turn."""
        account = self._account(who)
        account.slices.append(run)
        self._stand(account)

    def begin_work(self, who: Hashable) -> None:
        """Something is under way; the requests behind it need not wait, up to WORKS_MAX."""
        account = self._account(who)
        account.works += 1
        if account.works >= WORKS_MAX:
            self._full.add(who)
            self.is_tight = True

    def end_work(self, who: Hashable) -> None:
        account = self._accounts.get(who)
        if account is not None:
            account.works -= 1
            if account.works < WORKS_MAX:
                self._full.discard(who)
                self.is_tight = self._is_over or bool(self._full)
                self._stand(account)

    def forget(self, who: Hashable) -> None:
        """The connection is gone."""
        self._accounts.pop(who, None)
        self._full.discard(who)
        self.is_tight = self._is_over or bool(self._full)

    def _account(self, who: Hashable) -> _Account:
        account = self._accounts.get(who)
        if account is None:
            account = self._accounts[who] = _Account()
        return account

    def _stand(self, account: _Account) -> None:
        if account.is_waiting or not account.has_something:
            return
        account.is_waiting = True
        account.spent_s = max(account.spent_s, self._begun_s - CREDIT_S)
        heapq.heappush(self._waiting, (account.spent_s, next(self._numbers), account))
        self._schedule()

    def _schedule(self) -> None:
        """One iteration of the loop lies between two turns, in which others read and write."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._let_others)

    def _let_others(self) -> None:
        self._call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """A new budget, for those first who wait."""
        self._is_scheduled = self._is_over = False
        self.is_tight = bool(self._full)
        self._used_s = 0.0
        self.before_turn()
        for _ in range(SERVED_MAX):
            if not self._waiting or self._used_s >= TURN_S:
                break
            spent_s, _, account = heapq.heappop(self._waiting)
            self._begun_s = max(self._begun_s, spent_s)
            begin_s, used_s = self.now_s(), self._used_s
            try:
                account.take()()
            except Exception:  # the others must go on
                log.exception("a request that had waited failed")
            passed_s = self.now_s() - begin_s
            self._used_s = max(self._used_s, used_s + passed_s)
            account.spent_s = max(account.spent_s, spent_s + passed_s)
            account.is_waiting = False  # from here on: it stands where what it has used puts it
            self._stand(account)
        self._is_over = self._used_s >= TURN_S
        self.is_tight = self._is_over or bool(self._full)
        if self._is_over or self._waiting:
            self._schedule()


AnyShares = Shares | NoShares
