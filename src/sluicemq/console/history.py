"""The last hours of the cluster, as the console itself has measured them.

A series has one point every `STEP_S` seconds for six hours, in memory. One series is about the
whole cluster: the rates of the brokers, disk usage and lag. There is also one for each group whose
page has been opened (`watch`); a cluster may have thousands of groups, so not all are measured. One
task sends the requests. A request that fails leaves a gap.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sluicemq.clock import Clock
from sluicemq.console.parts import fetch_part, fetch_parts
from sluicemq.console.shown import group_kind
from sluicemq.errors import SluiceError

if TYPE_CHECKING:
    from sluicemq.client.admin.groups import QueueLag
    from sluicemq.client.aio.cluster import Admin

STEP_S: Final = 10.0
POINTS_MAX: Final = 6 * 360
GROUPS_MAX: Final = 100
"""The number of groups whose lag is measured."""
GROUP_LIST_AGE_S: Final = 60.0
"""The list of groups is read again after this time."""
RATE_IN = "in"
RATE_OUT = "out"
DISK = "disk"
"""The values of the cluster: messages per second, and the usage of the fullest disk in percent."""
LAG = "lag"
MATCHING = "matching"
"""The values of a group; the cluster has LAG too."""

Values = Mapping[str, float]


def parse_rate(rates: str) -> float:
    """Return the first number of a text with three rates, such as "12.5 10.0 9.8", else 0.0.

    A broker reports the rates over 10 s, 1 min and 10 min like this (spec/admin.md §3).
    """
    try:
        return float(rates.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return 0.0


def summarize_lag(queues: "list[QueueLag] | None") -> dict[str, Any]:
    """Add up the lags of the queues of a group, and return the sums by name.

    - `lag`: messages that the group has not consumed; `matching`: those that its filter matches.
    - `eta_ms`: the time until the lag is 0.
    - `at_risk`: messages that will be deleted next; `lost`: messages that were deleted unread.

    `matching` and `eta_ms` are None if they are unknown. If `queues` is None, the lag is unknown
    and all values are None.
    """
    if queues is None:
        return dict.fromkeys((LAG, MATCHING, "eta_ms", "at_risk", "lost"))
    matching: int | None = 0
    eta_ms: int | None = 0
    for queue in queues:
        if not queue.lag:
            continue
        matching = _add_known(matching, queue.matching)
        if queue.matching != 0:
            eta_ms = _max_known(eta_ms, queue.eta_ms)
    return {
        LAG: sum(queue.lag for queue in queues),
        MATCHING: matching,
        "eta_ms": eta_ms,
        "at_risk": sum(queue.messages_at_risk for queue in queues),
        "lost": sum(queue.lost for queue in queues),
    }


def _add_known(total: int | None, count: int | None) -> int | None:
    """Return the sum of two numbers; None if one of them is unknown (None)."""
    return None if total is None or count is None else total + count


def _max_known(longest_ms: int | None, span_ms: int | None) -> int | None:
    """Return the longer of two durations; None if one of them is unknown (None)."""
    return None if longest_ms is None or span_ms is None else max(longest_ms, span_ms)


def summarize_runtimes(runtimes: "list[dict[str, str]]") -> dict[str, float]:
    """Return the sums of the brokers' message rates, and the use of the fullest disk in percent.

    `runtimes` are the counters that the brokers report. The key DISK is missing if no broker
    reports it.
    """
    point = {
        RATE_IN: sum(parse_rate(runtime.get("putTps", "")) for runtime in runtimes),
        RATE_OUT: sum(parse_rate(runtime.get("getTransferredTps", "")) for runtime in runtimes),
    }
    disk_ratios = [
        parse_rate(runtime["commitLogDiskRatio"])
        for runtime in runtimes
        if "commitLogDiskRatio" in runtime
    ]
    if disk_ratios:
        point[DISK] = max(disk_ratios) * 100
    return point


class TimeSeries:
    """The newest points of one subject: a time in seconds since 1970, and values by name."""

    def __init__(self) -> None:
        """Begin without points."""
        self._points: deque[tuple[float, Values]] = deque(maxlen=POINTS_MAX)

    def add(self, time_s: float, values: Values) -> None:
        """Add a point as the newest one. It replaces the last point if that is not older.

        The oldest point is dropped if there are more than `POINTS_MAX`.
        """
        if self._points and self._points[-1][0] >= time_s:
            self._points.pop()
        self._points.append((time_s, values))

    def chart_data(self, *names: str, since_s: float = 0.0) -> list[list[float | None]]:
        """Return a list of times, then a list of values for each name, as the chart library draws.

        Only points at `since_s` or later are returned. A value is None if a point lacks it.
        """
        points = [point for point in self._points if point[0] >= since_s]
        times: list[float | None] = [time_s for time_s, _ in points]
        return [times, *([values.get(name) for _, values in points] for name in names)]


class History:
    """The series of the console: `cluster`, and one in `groups` for each watched group."""

    def __init__(self, clock: Clock) -> None:
        """Begin without points, and without watched groups."""
        self._clock = clock
        self.cluster = TimeSeries()
        self.groups: dict[str, TimeSeries] = {}
        self.counted_groups: list[str] = []
        """The groups whose lags are added up for the cluster."""
        self._listed_s: float | None = None  # when the list of groups was read

    @property
    def now_s(self) -> float:
        """The present time in seconds since 1970."""
        return self._clock.now_ms() / 1000

    def watch(self, group: str, queues: "list[QueueLag]") -> TimeSeries:
        """Add the present lag of a group to its time series, and return the series.

        `queues` are the lags of the group's queues. A value that is unknown is left out. From now
        on `sample` measures the group, too. Beyond `GROUPS_MAX` groups, the one that was watched
        least recently is dropped.
        """
        series = self.groups.pop(group, None) or TimeSeries()
        while len(self.groups) >= GROUPS_MAX:
            least_recently_watched = next(iter(self.groups))
            del self.groups[least_recently_watched]
        self.groups[group] = series
        summary = summarize_lag(queues)
        point = {name: summary[name] for name in (LAG, MATCHING) if summary[name] is not None}
        series.add(self.now_s, point)
        return series

    async def sample(self, admin: "Admin") -> None:
        """Measure the cluster and the watched groups, and add a point to each of their time series.

        The cluster's point has the message rates, the disk usage and the lag, as far as they are
        known. A request that fails leaves a gap in the series.
        """
        try:
            masters = await admin.masters()
        except SluiceError:
            return
        runtime_parts = await fetch_parts(
            {name: admin.runtime(address) for name, address in masters.items()}
        )
        runtimes = [
            fetched.value for fetched in runtime_parts.values() if fetched.value is not None
        ]
        if runtimes:
            point = summarize_runtimes(runtimes)
            lag = await self.compute_total_lag(admin)
            if lag is not None:
                point[LAG] = float(lag)
            self.cluster.add(self.now_s, point)

        lags = await fetch_parts({group: admin.lag(group) for group in self.groups})
        for group, fetched in lags.items():
            # A group may have been dropped from `groups` in the meantime.
            if fetched.value is not None and group in self.groups:
                self.watch(group, fetched.value)

    async def compute_total_lag(self, admin: "Admin") -> int | None:
        """Return the sum of the lags of all groups, None if one of the lags is unknown.

        Groups of the system do not count. If there are more than `GROUPS_MAX` groups, only watched
        groups count, and the result is None if no group is watched.
        """
        if not await self._update_counted_groups(admin):
            return None
        progress_parts = await fetch_parts(
            {name: admin.progress(name) for name in self.counted_groups}
        )
        total_lag = 0
        for progress in progress_parts.values():
            if progress.value is None:
                return None
            total_lag += sum(max(0, queue.lag) for queue in progress.value)
        return total_lag

    async def _update_counted_groups(self, admin: "Admin") -> bool:
        """Choose the groups whose lags count, and return whether there are any to count.

        The list of groups is fetched again if it is older than `GROUP_LIST_AGE_S` seconds. If there
        are too many groups, only watched ones are chosen. Returns False if the list cannot be
        fetched, or if there are too many groups and none is watched.
        """
        is_list_outdated = self._listed_s is None or self.now_s - self._listed_s >= GROUP_LIST_AGE_S
        if is_list_outdated:
            listing = await fetch_part(admin.groups())
            if listing.value is None:
                return False
            self.counted_groups = [name for name in listing.value if group_kind(name) == "normal"]
            self._listed_s = self.now_s
        if len(self.counted_groups) <= GROUPS_MAX:
            return True
        self.counted_groups = [name for name in self.groups if name in self.counted_groups]
        return bool(self.counted_groups)

    async def run(self, admin: "Admin") -> None:
        """Take a sample every `STEP_S` seconds, until the task is cancelled."""
        while True:
            await self.sample(admin)
            await asyncio.sleep(STEP_S)
