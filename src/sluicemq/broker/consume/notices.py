"""Notices to members that their group has changed, NOTIFY_CONSUMER_IDS_CHANGED (40), coalesced.

A member that joins, leaves or changes its topics makes every member of its group rebalance. When n
members join one after the other, RocketMQ's broker sends n * n / 2 notices: 45,000 for 300 members,
and each makes a client ask every broker for the members.

Here each group has a token bucket, which is filled with NOTICES_PER_SECOND tokens a second up to
NOTICES_BURST. While it has tokens, members are notified at once, before the answer to the heartbeat
that made the change (spec/traffic, item 2). Later changes wait until the bucket has tokens again,
at most WAIT_S_MAX and the time until the next `send_due`, and are then announced together. If n
members change within s seconds, the broker sends about n + NOTICES_PER_SECOND * s notices.

A notice says only that there was a change, so nothing is lost when one notice stands for several.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sluicemq.clock import Clock

NOTICES_BURST: Final = 64
"""The size of a group's token bucket: notices that are sent at once."""
NOTICES_PER_SECOND: Final = 500
"""Notices that one group is sent per second once its bucket is empty."""
WAIT_S_MAX: Final = 1.0
"""The longest time in seconds until an empty bucket has tokens again."""

SubscriptionKeys = set[str] | None
"""The subscription keys of the members to notify. None means all members."""


@dataclass(slots=True)
class NoticeBudget:
    """The token bucket of one group, and the changes that wait for it.

    `tokens` is at most NOTICES_BURST, and negative after a large group was notified. `is_pending`
    says whether changes wait; `pending_keys` are the keys of the members to notify about them.
    """

    tokens: float
    refilled_s: float
    pending_keys: SubscriptionKeys = field(default_factory=set)
    is_pending: bool = False

    def refill(self, now_s: float) -> None:
        """Add the tokens for the time from the last call to `now_s`, up to NOTICES_BURST."""
        refilled = self.tokens + NOTICES_PER_SECOND * (now_s - self.refilled_s)
        self.tokens = min(refilled, float(NOTICES_BURST))
        self.refilled_s = now_s


@dataclass(slots=True, eq=False)
class GroupChangeNotices:
    """The notices of all groups.

    `send(group, keys)` notifies the members with these subscription keys, or all members if `keys`
    is None, and returns their number.
    """

    clock: Clock
    send: Callable[[str, SubscriptionKeys], int]
    _budgets: dict[str, NoticeBudget] = field(default_factory=dict)

    def notify_change(self, group: str, keys: SubscriptionKeys) -> None:
        """Notify members of `group` that the group has changed, now or soon.

        `keys` are the subscription keys of these members; None means all members. The number of
        notices of a group is limited. If the limit is not reached and no notice waits, they are
        notified now. Otherwise `send_due` notifies them later, together with others that wait.
        """
        now_s = self.clock.monotonic_s()
        budget = self._budgets.get(group)
        if budget is None:
            budget = self._budgets[group] = NoticeBudget(NOTICES_BURST, now_s)
        budget.refill(now_s)
        if budget.tokens > 0 and not budget.is_pending:
            self._send_now(group, budget, keys)
        elif keys is None or not budget.is_pending:
            budget.pending_keys = None if keys is None else set(keys)
            budget.is_pending = True
        elif budget.pending_keys is not None:  # else all members are notified anyway
            budget.pending_keys |= keys

    def send_due(self) -> None:
        """Send the waiting notices of all groups that may send one again.

        Groups without waiting notices that have not sent one for a while are forgotten. Called
        several times a second.
        """
        now_s = self.clock.monotonic_s()
        for group, budget in tuple(self._budgets.items()):
            budget.refill(now_s)
            if budget.is_pending and budget.tokens > 0:
                budget.is_pending = False
                self._send_now(group, budget, budget.pending_keys)
            elif not budget.is_pending and budget.tokens >= NOTICES_BURST:
                del self._budgets[group]

    def _send_now(self, group: str, budget: NoticeBudget, keys: SubscriptionKeys) -> None:
        """Send a notice to each member now, at the cost of one token per member.

        The number of tokens is limited below, so that the group waits at most WAIT_S_MAX.
        """
        tokens_min = -NOTICES_PER_SECOND * WAIT_S_MAX
        budget.tokens = max(budget.tokens - self.send(group, keys), tokens_min)
