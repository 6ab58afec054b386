"""Members hear of every change of their group, and many changes at once cost few notices."""

import os
import random

import pytest

from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.broker.consume.notices import (
    NOTICES_BURST,
    NOTICES_PER_SECOND,
    WAIT_S_MAX,
    GroupChangeNotices,
)
from sluicemq.model.subscription import Subscription
from sluicemq.wire import bodies

NOTICE, HEARTBEAT, UNREGISTER = 40, 34, 35
SWEEP_S = 0.2
SEEDS = int(os.environ.get("SLUICEMQ_SEEDS", "0")) or 15


class Group:
    """The members of one group on a broker, and the times at which each heard of a change."""

    def __init__(self) -> None:
        self.broker = SteppedBroker()
        self.members: dict[str, SteppedClient] = {}
        self.heard_s: dict[str, list[float]] = {}
        self.count = 0
        self._swept_s = self.now_s

    @property
    def now_s(self) -> float:
        return self.broker.clock.monotonic_s()

    def join(self, name: str) -> None:
        client = self.members[name] = self.broker.connect()
        data = bodies.ConsumerData("G", subscriptions=(Subscription("T"),))
        beat = bodies.Heartbeat(name, consumers=(data,))
        assert client.call(HEARTBEAT, {}, bodies.encode_heartbeat(beat)).code == 0
        self.listen()

    def leave(self, name: str, *, breaks: bool = False) -> None:
        client = self.members.pop(name)
        if breaks:
            client.disconnect()
        else:
            client.call(UNREGISTER, {"clientID": name, "consumerGroup": "G"})
        self.listen()

    def listen(self) -> None:
        for name, client in self.members.items():
            found = sum(command.code == NOTICE for command in client.requests)
            client.requests.clear()
            self.count += found
            if found:
                self.heard_s.setdefault(name, []).append(self.now_s)

    def wait(self, seconds: float) -> None:
        """Time passes, and the sweep comes by five times a second."""
        until_s = self.now_s + seconds
        while (left_s := until_s - self.now_s) > 1e-9:
            self.broker.clock.advance(min(left_s, self._swept_s + SWEEP_S - self.now_s))
            if self.now_s >= self._swept_s + SWEEP_S - 1e-9:
                self._swept_s = self.now_s
                self.broker.core.sweep()
                self.listen()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("period_s", [0.0, 0.001, 0.01])
def test_300_members_that_join_or_leave_cost_few_notices(period_s: float, leaves: bool) -> None:
    """Each change told at once would be 45,150 notices, and as many for leaving."""
    group, size = Group(), 300
    for number in range(size):
        group.join(f"c{number}")
        group.wait(period_s)
    if leaves:
        group.wait(5)
        group.count = 0
        for number in range(size - 1):
            group.leave(f"c{number}")
            group.wait(period_s)
    changed_s = group.now_s - period_s
    group.wait(WAIT_S_MAX + SWEEP_S)
    assert (
        group.count
        <= NOTICES_BURST + NOTICES_PER_SECOND * (size * period_s + WAIT_S_MAX + SWEEP_S) + size
    )
    assert all(group.heard_s[name][-1] >= changed_s for name in group.members)
    counted = group.count
    group.wait(5)
    assert group.count == counted, "nothing has changed since"
    assert not group.broker.core.consumers.notices._budgets, "an idle group takes no memory"


def test_the_members_of_a_small_group_hear_of_each_change_at_once() -> None:
    group = Group()
    for size in range(1, 9):
        group.join(f"c{size}")
        assert group.count == sum(range(size + 1))
    group.leave("c1", breaks=True)
    assert group.count == 36 + 7


def test_one_change_of_a_large_group_is_told_at_once() -> None:
    group = Group()
    for number in range(100):
        group.join(f"c{number}")
    group.wait(5)
    group.count = 0
    group.leave("c1")
    assert group.count == 99


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_member_hears_of_every_change_soon(seed: int) -> None:
    """At most WAIT_S_MAX and a sweep after it, in any history of joins and leaves."""
    rng, group = random.Random(seed), Group()
    changes: list[tuple[float, set[str]]] = []
    for number in range(rng.choice([20, 120])):
        names = sorted(group.members)
        kind = rng.random()
        if kind < 0.6 or len(names) < 2:
            group.join(f"c{number}")
        else:
            group.leave(rng.choice(names), breaks=rng.random() < 0.5)
        changes.append((group.now_s, set(group.members)))
        group.wait(rng.choice([0, 0, 0.001, 0.05, 2]))
    group.wait(WAIT_S_MAX + SWEEP_S)
    for at_s, members in changes:
        for name in members & set(group.members):
            times = group.heard_s[name]
            assert any(at_s <= heard <= at_s + WAIT_S_MAX + SWEEP_S for heard in times), name


def test_changes_that_wait_are_told_to_the_members_of_all_of_them() -> None:
    group = Group()
    told: list[tuple[str, set[str] | None]] = []

    def send(name: str, keys: set[str] | None) -> int:
        told.append((name, keys))
        return 1000

    clock = group.broker.clock
    notices = GroupChangeNotices(clock, send)
    notices.notify_change("G", {"a"})
    for keys in ({"b"}, {"c"}):
        notices.notify_change("G", keys)
    notices.notify_change("H", {"x"})
    notices.send_due()
    assert told == [("G", {"a"}), ("H", {"x"})]
    clock.advance(WAIT_S_MAX + 0.01)
    notices.send_due()
    assert told[2:] == [("G", {"b", "c"})]
    for keys in ({"b"}, None, {"c"}):
        notices.notify_change("G", keys)
    clock.advance(WAIT_S_MAX + 0.01)
    notices.send_due()
    assert told[3:] == [("G", None)]
