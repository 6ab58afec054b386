"""How far a stream is: what Spark's progress says, in the words of a queue.

Spark reports, for each micro-batch, where a source began and ended and what its latest offset is.
From that follow the *lag* (offsets there are, and not read yet) and the rows that the broker left
out: every offset in between that gave no row, by its filter.

    query = frame.writeStream...start()
    stream_progress(query.lastProgress).told()
    spark.streams.addListener(progress_log())      # a line of the log for every micro-batch
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluicemq.model.topic import MessageQueue
from sluicemq.spark.sources.offsets import from_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """One micro-batch: `rows` came, `filtered` offsets gave none, `lag` offsets are left by queue
    (None while Spark does not say the latest offset: before 4.2)."""

    batch: int
    rows: int
    rows_per_second: float
    filtered: int
    lag_by_queue: Mapping[MessageQueue, int] | None

    @property
    def lag(self) -> int | None:
        return None if self.lag_by_queue is None else sum(self.lag_by_queue.values())

    def told(self) -> str:
        """One line."""
        lag = "lag unknown" if self.lag is None else f"lag {self.lag:,}"
        if self.lag and self.rows_per_second:
            lag += f" ({self.rest_s():.0f} s left)"
        return (
            f"batch {self.batch}: {self.rows:,} rows, {self.rows_per_second:,.0f} rows/s,"
            f" {self.filtered:,} filtered at the broker, {lag}"
        )

    def rest_s(self) -> float:
        """Until the lag is read, at the pace of this micro-batch, filtered offsets included;
        0 without a lag or a pace."""
        if not self.lag or not self.rows_per_second:
            return 0.0
        offsets = self.rows + self.filtered
        pace = self.rows_per_second * offsets / self.rows if self.rows else self.rows_per_second
        return self.lag / pace


def stream_progress(progress: Any) -> StreamProgress:
    """Of a `StreamingQueryProgress` or its JSON; sources of other formats are left out."""
    found = json.loads(progress.json) if hasattr(progress, "json") else progress
    rows = filtered = 0
    lags: dict[MessageQueue, int] | None = {}
    for source in found["sources"]:
        end = _offsets(source.get("endOffset"))
        if end is None:
            continue
        count = int(source["numInputRows"])
        rows += count
        begin = (_offsets(source.get("startOffset")) or {}) | (
            _offsets(source["endOffset"], "from") or {}
        )
        moved = sum(max(0, offset - begin.get(queue, offset)) for queue, offset in end.items())
        filtered += max(0, moved - count)
        latest = _offsets(source.get("latestOffset"))
        if latest is None or lags is None:
            lags = None
        else:
            lags |= {queue: max(0, top - end.get(queue, 0)) for queue, top in latest.items()}
    pace = float(found.get("processedRowsPerSecond") or 0)
    return StreamProgress(int(found["batchId"]), rows, pace, filtered, lags)


def _offsets(text: Any, part: str = "queues") -> dict[MessageQueue, int] | None:
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return None
    if not isinstance(found, dict) or "queues" not in found:
        return None
    return from_checkpoint(found, None, part)


def progress_log(level: int = logging.INFO) -> Any:
    """A listener for `spark.streams.addListener` that logs `StreamProgress.told` each time."""
    from pyspark.sql.streaming.listener import StreamingQueryListener  # noqa: PLC0415

    class ProgressLog(StreamingQueryListener):  # type: ignore[misc]
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
            logger.log(level, "%s started", event.name or event.id)

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            name = event.progress.name or event.progress.id
            logger.log(level, "%s %s", name, stream_progress(event.progress).told())

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802
            logger.debug("%s is idle", event.id)

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            logger.log(
                level, "%s ended%s", event.id, f": {event.exception}" * bool(event.exception)
            )

    return ProgressLog()
