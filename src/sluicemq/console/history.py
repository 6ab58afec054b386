"""The last hours, kept by the console alone: one point each ten seconds for six hours, in memory.

A series has a name: what the brokers take and give, and the lag of each group that somebody has
looked at (`watch`), for a cluster has thousands of groups. One task asks; a question that fails
leaves a gap.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sluicemq.clock import Clock
from sluicemq.console.parts import part, parts
from sluicemq.console.shown import group_kind
from sluicemq.errors import SluiceError

if TYPE_CHECKING:
    from sluicemq.client.admin.groups import QueueLag
    from sluicemq.client.aio.cluster import Admin

STEP_S: Final = 10.0
POINTS_MAX: Final = 6 * 360
GROUPS_MAX: Final = 100
NAMES_S: Final = 60.0
"""How old the list of groups may be."""
RATE_IN, RATE_OUT, DISK = "in", "out", "disk"
LAG, MATCHING = "lag", "matching"

Values = Mapping[str, float]


def rate(text: str) -> float:
    """The first of three rates: over 10 s, 1 min, 10 min (spec/admin.md §3)."""
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return 0.0


def lag_of(queues: "list[QueueLag] | None") -> dict[str, Any]:
    """What a group has before it: `lag`, `matching` of it (None: not known), `eta_ms` until
    nothing is left (None: not known, or never), `at_risk` and `lost` messages. Of queues that
    nobody told, all None: that is not 0."""
    if queues is None:
        return dict.fromkeys((LAG, MATCHING, "eta_ms", "at_risk", "lost"))
    counts = [one.matching if one.lag else 0 for one in queues]
    spans = [one.eta_ms for one in queues if one.lag and one.matching != 0]
    return {
        LAG: sum(one.lag for one in queues),
        MATCHING: None if None in counts else sum(count or 0 for count in counts),
        "eta_ms": None if None in spans else max((span or 0 for span in spans), default=0),
        "at_risk": sum(one.messages_at_risk for one in queues),
        "lost": sum(one.lost for one in queues),
    }


class Ring:
    """Points of one subject: a time (s since 1970) and values by name."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, Values]] = deque(maxlen=POINTS_MAX)

    def add(self, time_s: float, values: Values) -> None:
        """The newest point; one of the same moment is replaced."""
        if self._points and self._points[-1][0] >= time_s:
            self._points.pop()
        self._points.append((time_s, values))

    def chart(self, *names: str, since_s: float = 0.0) -> list[list[float | None]]:
        """Times, then the values of each name: what the chart library draws."""
        points = [point for point in self._points if point[0] >= since_s]
        times: list[float | None] = [time_s for time_s, _ in points]
        return [times, *([values.get(name) for _, values in points] for name in names)]


class History:
    """The rings of the console: `cluster`, and one a group that is watched."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.cluster = Ring()
        self.groups: dict[str, Ring] = {}
        self.counted: list[str] = []
        """The groups whose lag is summed up for the cluster."""
        self._counted_s: float | None = None

    @property
    def now_s(self) -> float:
        return self._clock.now_ms() / 1000

    def watch(self, group: str, queues: "list[QueueLag]") -> Ring:
        """The ring of a group, with this point; from now on it is asked for."""
        ring = self.groups.pop(group, None) or Ring()
        while len(self.groups) >= GROUPS_MAX:
            del self.groups[next(iter(self.groups))]
        self.groups[group] = ring
        known = lag_of(queues)
        point = {name: known[name] for name in (LAG, MATCHING)}
        ring.add(self.now_s, {name: one for name, one in point.items() if one is not None})
        return ring

    async def look(self, admin: "Admin") -> None:
        """One point of everything."""
        try:
            masters = await admin.masters()
        except SluiceError:
            return
        told = await parts({name: admin.runtime(at) for name, at in masters.items()})
        known = [one.value for one in told.values() if one.value is not None]
        if known:
            point = {
                RATE_IN: sum(rate(one.get("putTps", "")) for one in known),
                RATE_OUT: sum(rate(one.get("getTransferredTps", "")) for one in known),
            }
            disks = [
                rate(one["commitLogDiskRatio"]) for one in known if "commitLogDiskRatio" in one
            ]
            point |= {DISK: max(disks) * 100} if disks else {}
            lag = await self.lag(admin)
            point |= {} if lag is None else {LAG: float(lag)}
            self.cluster.add(self.now_s, point)
        found = await parts({group: admin.lag(group) for group in self.groups})
        for group, one in found.items():
            if one.value is not None and group in self.groups:
                self.watch(group, one.value)

    async def lag(self, admin: "Admin") -> int | None:
        """Of all groups; of those that are watched, when there are more than `GROUPS_MAX`. None
        when one of them cannot say."""
        if self._counted_s is None or self.now_s - self._counted_s >= NAMES_S:
            names = (await part(admin.groups())).value
            if names is None:
                return None
            self.counted = [name for name in names if group_kind(name) == "normal"]
            self._counted_s = self.now_s
        if len(self.counted) > GROUPS_MAX:
            self.counted = [name for name in self.groups if name in self.counted]
            if not self.counted:
                return None
        reached = await parts({name: admin.progress(name) for name in self.counted})
        queues = [one.value for one in reached.values()]
        if None in queues:
            return None
        return sum(max(0, queue.lag) for own in queues for queue in own or ())

    async def run(self, admin: "Admin") -> None:
        """Looks again and again, until it is cancelled."""
        while True:
            await self.look(admin)
            await asyncio.sleep(STEP_S)
