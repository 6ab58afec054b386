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


def parse_rate(text: str) -> float:
    """Return the first of three rates in a text (over 10 s, 1 min, 10 min; spec/admin.md §3).

    Return 0.0 if the text has none.
    """
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return 0.0


def summarize_lag(queues: "list[QueueLag] | None") -> dict[str, Any]:
    """Return the sums over the queues of a group.

    `lag` is the number of messages that the group has not consumed, and `matching` those that its
    filter matches (None means unknown). `eta_ms` is the time until the lag is 0 (None means unknown
    or never). `at_risk` messages will be deleted next, and `lost` messages were deleted. If
    `queues` is None, all values are None, because the lag is unknown and not 0.
    """
    if queues is None:
        return dict.fromkeys((LAG, MATCHING, "eta_ms", "at_risk", "lost"))
    counts = [one.matching if one.lag else 0 for one in queues]
    spans_ms = [one.eta_ms for one in queues if one.lag and one.matching != 0]
    return {
        LAG: sum(one.lag for one in queues),
        MATCHING: None if None in counts else sum(count or 0 for count in counts),
        "eta_ms": None if None in spans_ms else max((span or 0 for span in spans_ms), default=0),
        "at_risk": sum(one.messages_at_risk for one in queues),
        "lost": sum(one.lost for one in queues),
    }


class TimeSeries:
    """The newest points of one subject: a time in seconds since 1970, and values by name."""

    def __init__(self) -> None:
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
        self._clock = clock
        self.cluster = TimeSeries()
        self.groups: dict[str, TimeSeries] = {}
        self.counted_groups: list[str] = []
        """The groups whose lags are added up for the cluster."""
        self._listed_s: float | None = None

    @property
    def now_s(self) -> float:
        """The present time in seconds since 1970."""
        return self._clock.now_ms() / 1000

    def watch(self, group: str, queues: "list[QueueLag]") -> TimeSeries:
        """Add a point to the series of a group, and return the series.

        `queues` are the present lags of the group's queues; an unknown value is left out of the
        point. The group is measured from now on. If there are more than `GROUPS_MAX` groups, the
        series of the group that was watched least recently is dropped.
        """
        series = self.groups.pop(group, None) or TimeSeries()
        while len(self.groups) >= GROUPS_MAX:
            del self.groups[next(iter(self.groups))]
        self.groups[group] = series
        known = summarize_lag(queues)
        point = {name: known[name] for name in (LAG, MATCHING)}
        series.add(self.now_s, {name: one for name, one in point.items() if one is not None})
        return series

    async def sample(self, admin: "Admin") -> None:
        """Measure the cluster, and add a point to its series and to those of the watched groups.

        The point of the cluster has the rates, the disk usage and the lag, as far as they are
        known. Failing requests leave gaps: nothing is added if the masters are unknown, no point of
        the cluster if no broker responds, and no point of a group if its lag is unknown.
        """
        try:
            masters = await admin.masters()
        except SluiceError:
            return
        runtimes = await fetch_parts(
            {name: admin.runtime(address) for name, address in masters.items()}
        )
        known = [one.value for one in runtimes.values() if one.value is not None]
        if known:
            point = {
                RATE_IN: sum(parse_rate(one.get("putTps", "")) for one in known),
                RATE_OUT: sum(parse_rate(one.get("getTransferredTps", "")) for one in known),
            }
            disks = [
                parse_rate(one["commitLogDiskRatio"])
                for one in known
                if "commitLogDiskRatio" in one
            ]
            point |= {DISK: max(disks) * 100} if disks else {}
            lag = await self.compute_total_lag(admin)
            point |= {} if lag is None else {LAG: float(lag)}
            self.cluster.add(self.now_s, point)
        found = await fetch_parts({group: admin.lag(group) for group in self.groups})
        for group, one in found.items():
            if one.value is not None and group in self.groups:
                self.watch(group, one.value)

    async def compute_total_lag(self, admin: "Admin") -> int | None:
        """Return the sum of the lags of all groups, or None if one of the lags is unknown.

        System groups do not count. If there are more than `GROUPS_MAX` groups, only the watched
        groups count, and the result is None if no group is watched. The list of groups is stored in
        `counted_groups`, and read again after `GROUP_LIST_AGE_S`.
        """
        if self._listed_s is None or self.now_s - self._listed_s >= GROUP_LIST_AGE_S:
            names = (await fetch_part(admin.groups())).value
            if names is None:
                return None
            self.counted_groups = [name for name in names if group_kind(name) == "normal"]
            self._listed_s = self.now_s
        if len(self.counted_groups) > GROUPS_MAX:
            self.counted_groups = [name for name in self.groups if name in self.counted_groups]
            if not self.counted_groups:
                return None
        progress = await fetch_parts({name: admin.progress(name) for name in self.counted_groups})
        queues_by_group = [one.value for one in progress.values()]
        if None in queues_by_group:
            return None
        return sum(max(0, queue.lag) for queues in queues_by_group for queue in queues or ())

    async def run(self, admin: "Admin") -> None:
        """Take a sample every `STEP_S` seconds, until the task is cancelled."""
        while True:
            await self.sample(admin)
            await asyncio.sleep(STEP_S)
