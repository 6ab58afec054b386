"""`config/timermetrics`: how many timed messages wait, by topic (spec/store.md §11)."""

from typing import Any

from sluicemq.broker.documents import Document
from sluicemq.clock import SteadyClock
from sluicemq.files import Files
from sluicemq.wire import fastjson


class TimerMetrics:
    """The number of timed messages that wait, for tools.

    No other part of the broker relies on these numbers. After a crash they may be wrong by the
    messages that were stored and delivered since the file was written.
    """

    def __init__(self, files: Files, root: str, clock: SteadyClock) -> None:
        """Create empty counts, whose file is config/timermetrics in the store's directory `root`.

        The file is not read before `load`. `clock` gives the time stamps in it.
        """
        self._clock = clock
        self.counts: dict[str, int] = {}
        """The number of waiting messages of each topic."""
        self._changed_ms: dict[str, int] = {}
        """The time stamp of each topic in the file, in ms since 1970."""
        self._has_changed = False
        """Whether a number has changed since the last save."""
        self._version: dict[str, Any] = {"counter": 0, "stateVersion": 0, "timestamp": 0}

        def render() -> str:
            """Return the text of the file, with a new version and time stamps after a change."""
            if self._has_changed:
                self._has_changed = False
                now_ms = self._clock.now_ms()
                self._version |= {"counter": self._version["counter"] + 1, "timestamp": now_ms}
                self._changed_ms |= dict.fromkeys(self.counts, now_ms)
            return self.encode()

        self.document = Document(files, f"{root}/config/timermetrics", render)

    def load(self) -> None:
        """Load the counts, time stamps and version in the file.

        Without a file, all counts stay 0. Raises StoreDamagedError if the file cannot be parsed.
        """
        metrics = self.document.load(fastjson.loads)
        if not isinstance(metrics, dict):
            return
        self._version |= metrics.get("dataVersion") or {}
        metrics_by_topic = metrics.get("timingCount") or {}
        for topic, topic_metrics in metrics_by_topic.items():
            self.counts[topic] = int(topic_metrics.get("count", 0))
            self._changed_ms[topic] = int(topic_metrics.get("timeStamp", 0))

    def add(self, topic: str, count: int) -> None:
        """Add `count`, which may be negative, to the number of messages of a topic.

        Called for each timed message: keep it cheap.
        """
        self.counts[topic] = self.counts.get(topic, 0) + count
        self.document.changed = self._has_changed = True

    @property
    def total_count(self) -> int:
        """The number of waiting messages of all topics, at least 0."""
        return max(sum(self.counts.values()), 0)

    def encode(self) -> str:
        """Return the text of the file, which is JSON in one line, without changing the version.

        It is RocketMQ's `{"dataVersion": {…}, "timingCount": {"<topic>": {"count": …,
        "timeStamp": …}}}`. A negative count, which is possible after a crash, is written as 0.
        """
        now_ms = self._clock.now_ms()
        counts = {
            topic: {"count": max(count, 0), "timeStamp": self._changed_ms.get(topic, now_ms)}
            for topic, count in sorted(self.counts.items())
        }
        return fastjson.dumps({"dataVersion": self._version, "timingCount": counts}).decode()
