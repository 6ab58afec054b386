"""The history of the console: series are limited, and a failed request leaves a gap."""

from typing import Any

from sluicemq.client.admin.groups import QueueLag, QueueProgress
from sluicemq.console.history import (
    GROUP_LIST_AGE_S,
    GROUPS_MAX,
    POINTS_MAX,
    History,
    TimeSeries,
    parse_rate,
    summarize_lag,
)
from sluicemq.errors import RequestTimeoutError
from sluicemq.model.topic import MessageQueue

QUEUE = MessageQueue("flights", "broker-a", 0)


class HandClock:
    """A clock that the test moves."""

    now_s = 1000.0

    def now_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s


def queue_lag(matching: int | None, eta_ms: int | None = None) -> QueueLag:
    return QueueLag("late", QUEUE, 10, 0, 30, matching=matching, eta_ms=eta_ms)


class Scripted:
    """The admin interface of a cluster with one broker. `is_there` is whether it answers."""

    is_there = True
    names: tuple[str, ...] = ("late", "early")

    async def masters(self) -> dict[str, str]:
        return {"broker-a": "127.0.0.1:1"}

    async def runtime(self, _address: str) -> dict[str, str]:
        if not self.is_there:
            raise RequestTimeoutError("no answer within 5 s.")
        return {
            "putTps": "3.0 2.0 1.0", "getTransferredTps": "7.5 0 0", "commitLogDiskRatio": "0.25",
        }  # fmt: skip

    async def groups(self) -> dict[str, None]:
        return dict.fromkeys([*self.names, "CID_ONSAPI_PULL"])

    async def progress(self, group: str) -> list[QueueProgress]:
        if group == "forbidden":
            raise RequestTimeoutError("no answer within 5 s.")
        return [QueueProgress(QUEUE, 3, 10), QueueProgress(QUEUE, 12, 10)]

    async def lag(self, _group: str) -> list[QueueLag]:
        return [queue_lag(4)]


def test_a_time_series_drops_its_oldest_points() -> None:
    ring = TimeSeries()
    for second in range(POINTS_MAX + 5):
        ring.add(second, {"in": second})
    times, values = ring.chart_data("in")
    assert len(times) == POINTS_MAX
    assert times[0] == values[0] == 5
    assert ring.chart_data("in", since_s=POINTS_MAX)[0] == list(range(POINTS_MAX, POINTS_MAX + 5))
    assert ring.chart_data("other")[1][0] is None


def test_rates_and_lag() -> None:
    assert parse_rate("3.5 2 1") == 3.5
    assert parse_rate("") == parse_rate("none") == 0
    known = summarize_lag([queue_lag(3, 2000), queue_lag(5, 4000)])
    assert (known["lag"], known["matching"], known["eta_ms"]) == (40, 8, 4000)
    assert summarize_lag([queue_lag(3), queue_lag(None)])["matching"] is None
    assert summarize_lag([queue_lag(3)])["eta_ms"] is None
    assert summarize_lag([queue_lag(None)])["eta_ms"] is None  # unknown
    assert summarize_lag([])["eta_ms"] == 0
    assert set(summarize_lag(None).values()) == {None}
    passed = QueueLag("late", QUEUE, 30, 0, 30)
    assert summarize_lag([passed, queue_lag(3)])["matching"] == 3  # nothing of nothing


async def test_a_sample_measures_the_cluster_and_the_watched_groups() -> None:
    clock, cluster = HandClock(), Scripted()
    admin: Any = cluster
    history = History(clock)
    history.watch("late", [queue_lag(9)])
    clock.now_s += 10
    await history.sample(admin)
    cluster.is_there = False
    clock.now_s += 10
    await history.sample(admin)
    assert history.cluster.chart_data("in", "out") == [[1010.0], [3.0], [7.5]]
    assert history.groups["late"].chart_data("lag", "matching") == [
        [1000.0, 1010.0, 1020.0], [20, 20, 20], [9, 4, 4],
    ]  # fmt: skip


async def test_the_lag_of_all_groups_and_the_fullest_disk() -> None:
    clock, cluster = HandClock(), Scripted()
    admin: Any = cluster
    history = History(clock)
    await history.sample(admin)
    assert history.counted_groups == ["late", "early"]
    cluster.names = ("late", "forbidden")
    clock.now_s += GROUP_LIST_AGE_S - 1
    await history.sample(admin)  # the list may be a minute old
    clock.now_s += 1
    await history.sample(admin)  # one of them cannot say
    assert history.cluster.chart_data("lag", "disk")[1:] == [[14.0, 14.0, None], [25.0, 25.0, 25.0]]


async def test_of_many_groups_only_the_watched_ones_count() -> None:
    clock, cluster = HandClock(), Scripted()
    cluster.names = tuple(f"group-{number}" for number in range(GROUPS_MAX + 1))
    admin: Any = cluster
    history = History(clock)
    history.watch("group-7", [])
    await history.sample(admin)
    assert history.counted_groups == ["group-7"]
    assert history.cluster.chart_data("lag")[1] == [7.0]


def test_the_groups_watched_least_recently_are_dropped() -> None:
    history = History(HandClock())
    for number in range(GROUPS_MAX + 1):
        history.watch(f"group {number}", [])
        history.watch("always", [])
    assert "always" in history.groups
    assert "group 0" not in history.groups
    assert len(history.groups) == GROUPS_MAX
