"""How far a run is, without asking the data: Spark's own numbers, once in a while.

A stream's micro-batches come from `recentProgress`. A batch write is watched by a thread that
looks at Spark's status store: tasks done and rows read of each running stage, so the driver never
holds a row. The time left is reckoned from the share of tasks (or, unfiltered, of messages) done.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.spark.pipelines.narrate import Narrator
from sluicemq.spark.progress import stream_progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

logger = logging.getLogger(__name__)
PERIOD_S: Final = 2.0


@dataclass(slots=True)
class QueryWatch:
    """Tells each micro-batch of one query once."""

    query: "StreamingQuery"
    sink: str
    narrator: Narrator
    of_topics: bool = True
    told: int = -1
    rows: int = 0

    def tell_new(self) -> None:
        """Lines for the micro-batches since the last call; empty triggers are not worth one."""
        last: Any = self.query.lastProgress
        if last is None or int(last["batchId"]) <= self.told:
            return
        for progress in self.query.recentProgress:
            if int(progress["batchId"]) > self.told and "addBatch" in progress["durationMs"]:
                self.told = int(progress["batchId"])
                self._tell(progress)

    def _tell(self, progress: Any) -> None:
        found = stream_progress(progress)
        figures: dict[str, Any] = {"rows": int(progress["numInputRows"])}
        text = f"batch {found.batch}: {figures['rows']:,} rows, {found.rows_per_second:,.0f} rows/s"
        if self.of_topics:
            text = found.told()
            eta_s = None if found.lag is None else round(found.rest_s(), 1)
            figures |= {"filtered": found.filtered, "lag": found.lag, "eta_s": eta_s}
        self.rows += figures["rows"]
        self.narrator.tell(
            "batch", text, sink=self.sink, batch=found.batch,
            rows_per_second=round(found.rows_per_second, 1), **figures,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """One stage as the status store has it."""

    stage: int
    tasks: int
    done: int
    rows: int

    @property
    def share(self) -> float:
        return self.done / self.tasks if self.tasks else 0.0


class BatchWatch:
    """Tells how far the jobs of one group are, every `period_s`, and when a stage is done."""

    def __init__(
        self,
        spark: "SparkSession",
        narrator: Narrator,
        sink: str,
        group: str,
        messages: int | None,
        *,
        period_s: float = PERIOD_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._context = spark.sparkContext
        self._narrator, self._sink, self._group = narrator, sink, group
        self._messages = messages
        self._period_s, self._clock = period_s, clock
        self._began_s: dict[int, float] = {}
        self._last: dict[int, StageNumbers] = {}
        self._told: set[int] = set()
        self._over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it a thread looks; at the end what is untold is told."""
        thread = threading.Thread(target=self._look_on, name=f"watch {self._sink}", daemon=True)
        self._context.setJobGroup(self._group, f"pipeline {self._group}", interruptOnCancel=True)
        thread.start()
        try:
            yield
            self.look(at_end=True)
        finally:
            self._over.set()
            thread.join()
            self._context.setLocalProperty("spark.jobGroup.id", None)
            self._context.setLocalProperty("spark.job.description", None)

    def _look_on(self) -> None:
        while not self._over.wait(self._period_s):
            self.look()

    def look(self, *, at_end: bool = False) -> None:
        """Tells what changed. Never raises: a job is not to fail of being watched."""
        try:
            for numbers in self._stages():
                is_over = numbers.tasks > 0 and numbers.done == numbers.tasks
                if numbers.stage in self._told or numbers == self._last.get(numbers.stage):
                    continue
                self._last[numbers.stage] = numbers
                if is_over or (numbers.rows and not at_end):
                    self._tell(numbers)
                if is_over:
                    self._told.add(numbers.stage)
        except Exception:
            logger.debug("the progress of %s cannot be read", self._group, exc_info=True)

    def _stages(self) -> list[StageNumbers]:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
        stages = sorted({stage for job in jobs if job is not None for stage in job.stageIds})
        store: Any = self._context._jsc.sc().statusStore()
        found = []
        for stage in stages:
            if stage in self._told or tracker.getStageInfo(stage) is None:
                continue
            data = store.lastStageAttempt(stage)
            if str(data.status().toString()) not in ("PENDING", "SKIPPED"):
                began_ms = data.submissionTime().get().getTime()
                self._began_s.setdefault(stage, began_ms / 1000)
                found.append(
                    StageNumbers(
                        stage, int(data.numTasks()), int(data.numCompleteTasks()),
                        max(int(data.inputRecords()), int(data.shuffleReadRecords())),
                    )
                )  # fmt: skip
        return found

    def _tell(self, numbers: StageNumbers) -> None:
        spent_s = max(0.001, self._clock.now_ms() / 1000 - self._began_s[numbers.stage])
        pace = numbers.rows / spent_s
        share = numbers.share
        if self._messages and numbers.rows <= self._messages:
            share = max(share, numbers.rows / self._messages)
        eta_s = None if share == 0 else round(spent_s * (1 - share) / share, 1)
        left = "" if eta_s is None or share == 1 else f", {eta_s:.0f} s left"
        self._narrator.tell(
            "stage",
            f"stage {numbers.stage}: {numbers.done} of {numbers.tasks} tasks,"
            f" {numbers.rows:,} rows, {pace:,.0f} rows/s{left}",
            sink=self._sink, stage=numbers.stage, tasks=numbers.tasks, tasks_done=numbers.done,
            rows=numbers.rows, rows_per_second=round(pace, 1), eta_s=eta_s,
        )  # fmt: skip
