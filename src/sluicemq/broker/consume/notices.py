"""Tell members that their group has changed (NOTIFY_CONSUMER_IDS_CHANGED, 40), coalesced.

A member that joins, leaves or changes its topics makes every member of its group balance again. Of
n members that come one after the other, RocketMQ's broker sends n * n / 2 notices: 45,000 of 300,
and each makes a client ask every broker for the members. Here a group has an allowance of notices,
which grows by `RATE` a second up to `BURST`. While it lasts, a change is told at once, before the
answer to the heartbeat that made it (spec/traffic, item 2). A change beyond it waits until the
allowance has grown again, at most `WAIT_S_MAX` and a sweep, and all changes that wait are told
together. If n members change within s seconds, the broker sends about n + RATE * s notices.

A notice says only that there was a change, so none is lost when one notice stands for several.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sluicemq.clock import Clock

BURST: Final = 64
RATE: Final = 500
"""Notices of one group a second, once it has used its burst."""
WAIT_S_MAX: Final = 1.0

Keys = set[str] | None
"""The subscriptions whose members are told; None: all members."""


@dataclass(slots=True)
class Allowance:
    """The notices that one group may be sent now: at most BURST, below 0 after a large group was
    told. `keys` of the changes that wait, while any does (`is_due`)."""

    left: float
    at_s: float
    keys: Keys = field(default_factory=set)
    is_due: bool = False

    def grow(self, now_s: float) -> None:
        """Add what has become allowed since the last call."""
        self.left = min(self.left + RATE * (now_s - self.at_s), float(BURST))
        self.at_s = now_s


@dataclass(slots=True, eq=False)
class Notices:
    """The notices of all groups. `send(group, keys)` tells the members with these subscriptions
    (None: all), and returns their number."""

    clock: Clock
    send: Callable[[str, Keys], int]
    _groups: dict[str, Allowance] = field(default_factory=dict)

    def changed(self, group: str, keys: Keys) -> None:
        """Tell the members of `group` that it has changed, now or with the changes to come."""
        now_s = self.clock.monotonic_s()
        allowance = self._groups.get(group)
        if allowance is None:
            allowance = self._groups[group] = Allowance(BURST, now_s)
        allowance.grow(now_s)
        if allowance.left > 0 and not allowance.is_due:
            self._tell(group, allowance, keys)
        elif keys is None or not allowance.is_due:
            allowance.keys, allowance.is_due = None if keys is None else set(keys), True
        elif allowance.keys is not None:
            allowance.keys |= keys

    def run(self) -> None:
        """Send the notices that have waited long enough. Called at each sweep."""
        now_s = self.clock.monotonic_s()
        for group, allowance in tuple(self._groups.items()):
            allowance.grow(now_s)
            if allowance.is_due and allowance.left > 0:
                allowance.is_due = False
                self._tell(group, allowance, allowance.keys)
            elif not allowance.is_due and allowance.left >= BURST:
                del self._groups[group]

    def _tell(self, group: str, allowance: Allowance, keys: Keys) -> None:
        allowance.left = max(allowance.left - self.send(group, keys), -RATE * WAIT_S_MAX)
