"""The broker's runtime information (28): every key that RocketMQ's tools read (spec/admin.md §3).

Numbers of thread pools are there because clusterList fails without them; we have none, so queues
are empty and waits are 0.

How fast something counts is shown as a rate over the last 10, 60 and 600 s: once a second `sample`
remembers the counters, and a rate is a difference of two samples. Nothing happens where the
counting is done.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.consume.pull import Pull
from sluicemq.broker.produce.send import Send
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.broker.turns import LATENCY_BOUNDS_S, Turns
from sluicemq.store.store import Store
from sluicemq.wire.frames import VERSION

WINDOWS_S: Final = (10, 60, 600)


class Rates:
    """What named counters were when they changed."""

    __slots__ = ("_histories", "_times")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=WINDOWS_S[-1] + 1)
        self._histories: dict[str, deque[tuple[float, int]]] = {}

    def sample(self, now_s: float, counters: Mapping[str, int]) -> None:
        """Call this once a second. Only those that have changed take room."""
        self._times.append(now_s)
        histories, oldest_s = self._histories, self._times[0]
        for name, value in counters.items():
            history = histories.get(name)
            if history is None:
                histories[name] = deque([(now_s, value)])
            elif history[-1][1] != value:
                history.append((now_s, value))
                while history[1][0] <= oldest_s:
                    history.popleft()
        if len(histories) > len(counters):
            for name in histories.keys() - counters.keys():
                del histories[name]

    def rate(self, name: str, window_s: int) -> float:
        """Counts a second over the last `window_s` seconds, 0.0 before there are two samples."""
        history = self._histories.get(name)
        if history is None or len(self._times) < 2:
            return 0.0
        begin_s = self._times[max(0, len(self._times) - 1 - window_s)]
        index = bisect_right(history, begin_s, key=itemgetter(0))
        counted = history[-1][1] - (history[index - 1][1] if index else 0)
        seconds = self._times[-1] - begin_s
        return counted / seconds if seconds > 0 else 0.0

    def text(self, *names: str) -> str:
        """Three rates of the sum of the counters, as in code 28: `10s 60s 600s`."""
        return " ".join(str(sum(self.rate(n, window) for n in names)) for window in WINDOWS_S)


class Days:
    """What a counter was at the last two midnights (UTC): code 28's "today" and "yesterday"."""

    __slots__ = ("_day", "morning", "yesterday")

    def __init__(self) -> None:
        self._day = -1
        self.morning: dict[str, int] = {}
        self.yesterday: dict[str, int] = {}

    def sample(self, now_ms: int, counters: Mapping[str, int]) -> None:
        day = now_ms // 86_400_000
        if day != self._day:
            self.yesterday = self.morning if self._day >= 0 else {}
            self.morning = dict(counters) if self._day >= 0 else {}
            self._day = day


VERSION_NAME: Final = "V5_3_3"
# name in the keys, capacity that the real broker shows
_POOLS: Final = (
    ("send", 10_000), ("pull", 100_000), ("litePull", 100_000), ("query", 20_000), ("ack", 100_000),
)  # fmt: skip
_TIMES: Final = (
    ("<=0ms", 0.0), ("0~10ms", 0.01), ("10~50ms", 0.05), ("50~100ms", 0.1), ("100~200ms", 0.2),
    ("200~500ms", 0.5), ("500ms~1s", 1.0), ("1~2s", 2.0), ("2~3s", 3.0), ("3~4s", 4.0),
    ("4~5s", 5.0), ("5~10s", 10.0), ("10s~", float("inf")),
)  # fmt: skip
_FEATURES: Final = "sluiceBulk"
"""What only we have, for clients that ask (docs/design/0001)."""


@dataclass(slots=True, eq=False)
class RuntimeInfo:
    """Collects the table when somebody asks. `more`: parts of it that others know."""

    settings: Settings
    topics: Topics
    send: Send
    pull: Pull
    polls: LongPolls
    turns: Turns
    store: Store
    rates: Rates
    days: Days
    more: Collection[Callable[[], dict[str, str]]] = ()

    def counters(self) -> dict[str, int]:
        """The counters that rates and day sums are made of; sampled once a second."""
        found = {"found": self.pull.found, "miss": self.pull.missed}
        put = put_bytes = 0
        for topic in self.topics:
            put += topic.messages_in
            put_bytes += topic.bytes_in
            if topic.messages_in:
                found[f"in:{topic.name}"] = topic.messages_in
        got = 0
        for (name, group), delivered in self.pull.delivered.items():
            got += delivered.messages_out
            found[f"out:{name}@{group}"] = delivered.messages_out
        return found | {"put": put, "put_bytes": put_bytes, "get": got}

    def table(self) -> dict[str, str]:
        """All keys."""
        from sluicemq import __version__  # noqa: PLC0415 - the package imports nothing of ours

        counters, rates = self.counters(), self.rates
        put, times = counters["put"], self.turns.latency_counts
        table = {
            "brokerActive": "true",
            "brokerVersion": str(VERSION),
            "brokerVersionDesc": VERSION_NAME,
            "sluiceVersion": __version__,
            "sluiceFeatures": _FEATURES,
            "startAcceptSendRequestTimeStamp": "0",
            "EndTransactionQueueSize": "0",
            "EndTransactionThreadPoolQueueCapacity": "100000",
            "timerReadBehind": "0",
            "timerOffsetBehind": "0",
            "timerCongestNum": "0",
            "timerEnqueueTps": "0.0",
            "timerDequeueTps": "0.0",
            "sluiceParkedPulls": str(len(self.polls)),
            "putTps": rates.text("put"),
            "getFoundTps": rates.text("found"),
            "getMissTps": rates.text("miss"),
            "getTotalTps": rates.text("found", "miss"),
            "getTransferredTps": rates.text("get"),
            "putMessageTimesTotal": str(put),
            "putMessageFailedTimes": str(self.send.failures),
            "putMessageSizeTotal": str(counters["put_bytes"]),
            "putMessageAverageSize": str(counters["put_bytes"] / put if put else 0.0),
            "putMessageEntireTimeMax": str(round(_quantile_s(times, 1.0) * 1000)),
            "getMessageEntireTimeMax": "0",
            "putMessageDistributeTime": _distribution(times),
            "putLatency99": f"{_quantile_s(times, 0.99) * 1000:.2f}",
            "putLatency999": f"{_quantile_s(times, 0.999) * 1000:.2f}",
        }
        for name, capacity in _POOLS:
            table[f"{name}ThreadPoolQueueSize"] = "0"
            table[f"{name}ThreadPoolQueueCapacity"] = str(capacity)
            table[f"{name}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        for word, name in (("Put", "put"), ("Get", "get")):
            table[f"msg{word}TotalYesterdayMorning"] = str(self.days.yesterday.get(name, 0))
            table[f"msg{word}TotalTodayMorning"] = str(self.days.morning.get(name, 0))
            table[f"msg{word}TotalTodayNow"] = str(counters[name])
        for part in self.more:
            table |= part()
        return table | self.store.runtime()


def _quantile_s(counts: list[int], share: float) -> float:
    """The upper bound of the bucket in which this share of all is reached; 0.0 without any."""
    wanted, seen = sum(counts) * share, 0
    for bound, count in zip((*LATENCY_BOUNDS_S, 10.0), counts, strict=True):
        seen += count
        if count and seen >= wanted:
            return bound
    return 0.0


def _distribution(counts: list[int]) -> str:
    """As the real broker writes it: `[<=0ms]:0 [0~10ms]:5 …`."""
    shown = [0] * len(_TIMES)
    for bound, count in zip((*LATENCY_BOUNDS_S, 10.0), counts, strict=True):
        shown[next(index for index, (_, limit) in enumerate(_TIMES) if bound <= limit)] += count
    return "".join(f"[{name}]:{count} " for (name, _), count in zip(_TIMES, shown, strict=True))
