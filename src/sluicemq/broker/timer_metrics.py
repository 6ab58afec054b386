"""`config/timermetrics`: how many timed messages wait, by topic (spec/store.md §11).

For tools alone: nothing relies on it. After a crash the numbers may differ from the truth by what
was stored and delivered since the file was written.
"""

from typing import Any

from sluicemq.broker.documents import Document
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.wire import fastjson


class TimerMetrics:
    """Counts by topic."""

    def __init__(self, files: Files, root: str, clock: Clock) -> None:
        self._clock = clock
        self.counts: dict[str, int] = {}
        self._changed_ms: dict[str, int] = {}
        self._has_news = False
        self._version: dict[str, Any] = {"counter": 0, "stateVersion": 0, "timestamp": 0}
        self.document = Document(files, f"{root}/config/timermetrics", self._render)

    def load(self) -> None:
        """Raises StoreDamagedError."""
        values = self.document.load(fastjson.loads)
        if not isinstance(values, dict):
            return
        self._version |= values.get("dataVersion") or {}
        for topic, item in (values.get("timingCount") or {}).items():
            self.counts[topic] = int(item.get("count", 0))
            self._changed_ms[topic] = int(item.get("timeStamp", 0))

    def add(self, topic: str, count: int) -> None:
        """So many more wait, or fewer. HOT."""
        self.counts[topic] = self.counts.get(topic, 0) + count
        self.document.changed = self._has_news = True

    @property
    def total(self) -> int:
        """Of all topics."""
        return max(sum(self.counts.values()), 0)

    def text(self) -> str:
        """The file's text in one line, which request 61 answers too."""
        now_ms = self._clock.now_ms()
        counting = {
            topic: {"count": max(count, 0), "timeStamp": self._changed_ms.get(topic, now_ms)}
            for topic, count in sorted(self.counts.items())
        }
        return fastjson.dumps({"dataVersion": self._version, "timingCount": counting}).decode()

    def _render(self) -> str:
        if not self._has_news:
            return self.text()
        self._has_news = False
        now_ms = self._clock.now_ms()
        self._version = {
            **self._version, "counter": self._version["counter"] + 1, "timestamp": now_ms,
        }  # fmt: skip
        self._changed_ms |= dict.fromkeys(self.counts, now_ms)
        return self.text()
