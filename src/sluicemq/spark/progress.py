"""Read the progress of a stream from Spark's reports, by queue.

For each micro-batch, Spark reports the offsets at which a source began and ended, and its latest
offset. The difference between the latter two is the *lag*: the offsets that exist and were not
read. Each offset between beginning and end that gave no row was left out by the broker's filter.

    query = frame.writeStream...start()
    stream_progress(query.lastProgress).describe()
    spark.streams.addListener(progress_log())      # logs a line for every micro-batch
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluicemq.model.topic import MessageQueue
from sluicemq.spark.sources.checkpoints import parse_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """The progress of one micro-batch, summed over the sources `rocketmq` of a query.

    `batch` is its number, `rows` the number of its rows, `rows_per_second` the speed that Spark
    reports (0 if unknown), and `filtered` the number of offsets that the broker's filter left out.
    `lag_by_queue` is the number of offsets that each queue has left, or None if Spark does not
    report the latest offset (before Spark 4.2).
    """

    batch: int
    rows: int
    rows_per_second: float
    filtered: int
    lag_by_queue: Mapping[MessageQueue, int] | None

    @property
    def lag(self) -> int | None:
        """The number of offsets that all queues have left; None if it is unknown."""
        return None if self.lag_by_queue is None else sum(self.lag_by_queue.values())

    def describe(self) -> str:
        """Return the progress as one line: rows, speed, rows filtered at the broker, and lag."""
        lag = "lag unknown" if self.lag is None else f"lag {self.lag:,}"
        if self.lag and self.rows_per_second:
            lag += f" ({self.remaining_s():.0f} s left)"
        return (
            f"batch {self.batch}: {self.rows:,} rows, {self.rows_per_second:,.0f} rows/s,"
            f" {self.filtered:,} filtered at the broker, {lag}"
        )

    def remaining_s(self) -> float:
        """Return the seconds until the lag is read, at the speed of this micro-batch.

        Filtered messages count for the speed. Return 0 if the lag is 0, or if the lag or the speed
        is unknown.
        """
        if not self.lag or not self.rows_per_second:
            return 0.0
        offsets = self.rows + self.filtered
        offsets_per_second = self.rows_per_second
        if self.rows:
            offsets_per_second = self.rows_per_second * offsets / self.rows
        return self.lag / offsets_per_second


def stream_progress(progress: Any) -> StreamProgress:
    """Return the progress that Spark reports for a micro-batch.

    `progress` is a `StreamingQueryProgress`, or its JSON as a dict. Sources of other formats are
    ignored.
    """
    report = json.loads(progress.json) if hasattr(progress, "json") else progress
    rows = filtered = 0
    lags: dict[MessageQueue, int] | None = {}
    for source in report["sources"]:
        end = _parse_offsets(source.get("endOffset"))
        if end is None:
            continue

        source_rows = int(source["numInputRows"])
        rows += source_rows
        filtered += max(0, _count_read_messages(source, end) - source_rows)

        latest = _parse_offsets(source.get("latestOffset"))
        if latest is None:
            lags = None  # and it stays unknown, whatever other sources report
        elif lags is not None:
            for queue, latest_offset in latest.items():
                lags[queue] = max(0, latest_offset - end.get(queue, 0))
    rows_per_second = float(report.get("processedRowsPerSecond") or 0)
    return StreamProgress(int(report["batchId"]), rows, rows_per_second, filtered, lags)


def _count_read_messages(source: Mapping[str, Any], end: Mapping[MessageQueue, int]) -> int:
    """Return the number of messages in the offset range of a source's micro-batch.

    The range begins at the source's start offsets, and `end` has its end offsets.
    """
    start = _parse_offsets(source.get("startOffset")) or {}
    # Queues that are new in this micro-batch have their start in the part `from`.
    start |= _parse_offsets(source["endOffset"], "from") or {}
    return sum(max(0, offset - start.get(queue, offset)) for queue, offset in end.items())


def _parse_offsets(checkpoint: Any, section: str = "queues") -> dict[MessageQueue, int] | None:
    """Return the offsets in one section of a checkpoint, "queues" or "from".

    `checkpoint` is a dict, or JSON text. Return None if it is not a checkpoint of the source
    `rocketmq`.
    """
    if isinstance(checkpoint, str):
        try:
            checkpoint = json.loads(checkpoint)
        except ValueError:
            return None
    if not isinstance(checkpoint, dict) or "queues" not in checkpoint:
        return None
    return parse_checkpoint(checkpoint, None, section)


def progress_log(level: int = logging.INFO) -> Any:
    """Return a listener for `spark.streams.addListener` that logs every micro-batch at `level`.

    For each micro-batch, it logs a line with rows, speed and lag. It also logs when queries start
    and end.
    """
    from pyspark.sql.streaming.listener import (  # noqa: PLC0415 - heavy
        StreamingQueryListener,
    )

    class ProgressLog(StreamingQueryListener):  # type: ignore[misc]
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
            logger.log(level, "%s started", event.name or event.id)

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
            name = event.progress.name or event.progress.id
            logger.log(level, "%s %s", name, stream_progress(event.progress).describe())

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
            logger.debug("%s is idle", event.id)

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
            reason = f": {event.exception}" if event.exception else ""
            logger.log(level, "%s ended%s", event.id, reason)

    return ProgressLog()
