"""Send rows of messages again in small, numbered steps that can be resumed.

    rows -> windows of offsets, oldest first -> steps of about `rate * 2 s` rows -> one write each

A step is one Spark write of the rows of a few windows. The rows do not change (they are an archive
up to fixed offsets, or a plan on disk), and what a step contains depends on them only. So step 17
has the same rows after a restart. `JobState` is a small file that says how many steps are complete.
If a process is killed during a step, the step is repeated:

    exactly-once    the step is an epoch of a query (design/0007), so repeating it has no effect
    at-least-once   the messages of that step are sent again, with the message ids of the first
                    attempt if the rows name them

Only the bounds of windows come to the driver, one at a time.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name of this module

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ConfigurationError
from sluicemq.pipelines.ready import (
    INTEGER,
    NUMBER,
    TEXT,
    Field,
    Folder,
    JsonObject,
    Report,
    Task,
)
from sluicemq.spark.options import AT_LEAST_ONCE, EXACTLY_ONCE, parse_options

STEP_ROWS_MAX: Final = 100_000
"""The rows of a step if the rate is unlimited, and the limit of a step at any rate."""
STEP_SECONDS: Final = 2.0
"""The time that one step takes at the given rate."""
WINDOWS_PER_STEP: Final = 4
"""A window has at most 1/WINDOWS_PER_STEP of the rows of a step."""
WINDOWS_MAX: Final = 64
"""The most windows of one step, which limits the size of the step's predicate."""
SAY_PERIOD_S: Final = 5.0
"""The shortest time between two lines about the progress."""
_QUEUE_COLUMNS: Final = ("topic", "broker", "queue_id")


@dataclass(frozen=True, slots=True)
class OffsetWindow:
    """The rows of one queue with start <= offset < end. `rows` is their number."""

    topic: str
    broker: str
    queue_id: int
    start: int
    end: int
    rows: int


ORIGIN_COLUMNS: Final = tuple(
    f"{name} as from_{name}" for name in (*_QUEUE_COLUMNS, "queue_offset")
)
"""Expressions of the columns `from_…` by which `write_step` sorts: where a row was stored."""
SENDING_FIELDS: Final = (
    Field("rate", NUMBER, "Maximum messages per second; 0 means unlimited.", 0.0),
    Field("step", INTEGER, "Messages of a step; 0 means two seconds at the rate.", 0),
    Field(
        "delivery",
        TEXT,
        "With exactly-once, a killed run leaves no duplicates (SluiceMQ brokers).",
        EXACTLY_ONCE,
        (EXACTLY_ONCE, AT_LEAST_ONCE),
    ),
)
"""The fields of pipelines that send in steps."""


def rows_per_step(rate: float, requested: int) -> int:
    """Return the number of rows of a step: the rows that are sent and recorded together.

    It is `requested`, unless that is 0. Otherwise it is the number of rows that can be sent in
    `STEP_SECONDS` at `rate` rows per second, at least 1 and at most `STEP_ROWS_MAX`. A rate of 0
    means unlimited.
    """
    if requested:
        return requested
    if not rate:
        return STEP_ROWS_MAX
    rows = int(rate * STEP_SECONDS)
    return max(1, min(rows, STEP_ROWS_MAX))


def iterate_windows(frame: Any, window_size: int) -> Iterator[OffsetWindow]:
    """Yield the windows of offsets that contain rows, ordered by the store time of their first row.

    A window is `window_size` offsets of a queue, and begins at a multiple of `window_size`. `frame`
    has the columns topic, broker, queue_id, queue_offset and store_time. The windows come to the
    driver one at a time.
    """
    window_number = F.expr(f"queue_offset div {window_size}").alias("part")
    windows = frame.groupBy(*_QUEUE_COLUMNS, window_number).agg(
        F.expr("count(1)").alias("rows"), F.expr("min(store_time)").alias("first")
    )
    for row in windows.orderBy("first", *_QUEUE_COLUMNS, "part").toLocalIterator():
        start = row["part"] * window_size
        yield OffsetWindow(
            row["topic"], row["broker"], row["queue_id"], start, start + window_size, row["rows"]
        )


def group_into_steps(
    windows: Iterable[OffsetWindow], rows_max: int
) -> Iterator[tuple[OffsetWindow, ...]]:
    """Divide windows of offsets into steps, and yield the windows of each step.

    A step has at most `rows_max` rows and `WINDOWS_MAX` windows. A window with more rows is a step
    of its own.
    """
    step: list[OffsetWindow] = []
    rows = 0
    for window in windows:
        is_full = rows + window.rows > rows_max or len(step) >= WINDOWS_MAX
        if step and is_full:
            yield tuple(step)
            step = []
            rows = 0
        step.append(window)
        rows += window.rows
    if step:
        yield tuple(step)


def windows_predicate(windows: Iterable[OffsetWindow]) -> Any:
    """Return a Spark predicate that is true for the rows in any of the windows.

    It consists of simple comparisons, so that Spark can skip parts of Parquet files by their
    statistics.
    """
    predicates = [
        (F.col("topic") == F.lit(window.topic))
        & (F.col("broker") == F.lit(window.broker))
        & (F.col("queue_id") == window.queue_id)
        & (F.col("queue_offset") >= window.start)
        & (F.col("queue_offset") < window.end)
        for window in windows
    ]
    return reduce(lambda left, right: left | right, predicates)


@dataclass(slots=True)
class JobState:
    """The progress of a job in steps, kept as a JSON file of a folder.

    The document has the keys `name`, `settings`, `steps` and `rows` (how many are complete), `done`
    and the values that were passed to `start`.
    """

    folder: Folder
    file_name: str
    document: JsonObject = field(default_factory=dict)

    def resume(self, name: str, settings: Mapping[str, Any]) -> bool:
        """Read the state file of the job into `document`, and return whether there is one.

        Without a file the job is new, and `document` has no complete steps. Raises
        ConfigurationError if the job was started with other settings, because its steps would have
        other rows.
        """
        stored_document = self.folder.read_json(self.file_name)
        if stored_document is None:
            self.document = {
                "name": name,
                "settings": dict(settings),
                "steps": 0,
                "rows": 0,
                "done": False,
            }
            return False

        stored_settings = stored_document["settings"]
        for key in sorted({*settings, *stored_settings}):
            if settings.get(key) != stored_settings.get(key):
                raise ConfigurationError(
                    f"the job {name!r} was started with {key}={stored_settings.get(key)!r}, and"
                    f" now has {key}={settings.get(key)!r}.",
                    fix="Use the same value to continue, or another name for a new job (state file:"
                    f" {self.folder.full_path(self.file_name)}).",
                )
        self.document = stored_document
        return True

    def start(self, **values: Any) -> None:
        """Add `values` to the document, and write the file."""
        self.document |= values
        self.folder.replace(self.file_name, self.document)

    def finish_step(self, rows: int) -> None:
        """Count one more complete step of `rows` rows, and write the file."""
        self.document["steps"] += 1
        self.document["rows"] += rows
        self.folder.replace(self.file_name, self.document)

    def finish(self) -> None:
        """Record that all steps are complete, and write the file."""
        self.document["done"] = True
        self.folder.replace(self.file_name, self.document)

    def __getitem__(self, key: str) -> Any:
        return self.document[key]


class Pacer:
    """Limits the average rate at which rows are sent."""

    def __init__(self, rate: float, clock: Clock = SYSTEM_CLOCK) -> None:
        """Allow `rate` rows per second; 0 means unlimited."""
        self._rate = rate
        self._clock = clock
        self._due_s = clock.monotonic_s()

    def wait(self, rows: int, stopping: Callable[[], bool]) -> None:
        """Wait until the next rows may be sent. `rows` is the number of rows that were just sent.

        Return at once if the rate is unlimited, and early if `stopping()` becomes True. After a
        slow period, at most one second of unused time can be made up for.
        """
        if not self._rate:
            return
        now_s = self._clock.monotonic_s()
        self._due_s = max(self._due_s, now_s - 1.0) + rows / self._rate
        while (left_s := self._due_s - self._clock.monotonic_s()) > 0 and not stopping():
            threading.Event().wait(min(left_s, 0.5))


def run_steps(
    task: Task, state: JobState, report: Report, rows: Any, send_step: Callable[[int, Any], None]
) -> bool:
    """Send the rows of all steps that are not complete, and return whether all are complete.

    The result is False if the task was stopped. `rows` has the columns topic, broker, queue_id,
    queue_offset and store_time. `send_step(number, rows)` sends the rows of one step, a DataFrame;
    numbers begin at 0. After that the step is recorded in `state`. `report.figures["rows"]` counts
    the sent rows. `state` needs the entry `step_rows`, and the task the option `rate`.
    """
    if state["done"]:
        return True
    rows_max = state["step_rows"]
    window_size = max(1, rows_max // WINDOWS_PER_STEP)
    pacer = Pacer(float(task.options["rate"]))
    reporter = _SpeedReporter(task, SYSTEM_CLOCK.monotonic_s())
    complete_steps = state["steps"]
    steps = group_into_steps(iterate_windows(rows, window_size), rows_max)
    for step_number, windows in enumerate(steps):
        if step_number < complete_steps:
            continue
        if task.stopping():
            return False

        # Record the step after it was sent: if the run is killed in between, the step is repeated.
        row_count = sum(window.rows for window in windows)
        send_step(step_number, rows.where(windows_predicate(windows)))
        state.finish_step(row_count)
        report.figures["rows"] = report.figures.get("rows", 0) + row_count

        reporter.say_progress(step_number, state["rows"], report.figures["rows"])
        pacer.wait(row_count, task.stopping)
    state.finish()
    return True


class _SpeedReporter:
    """Says the progress of the steps of one run, at most once per `SAY_PERIOD_S`."""

    def __init__(self, task: Task, started_s: float) -> None:
        """Say lines by `task.say`. `started_s` is the time at which the run started."""
        self._task = task
        self._started_s = started_s
        self._last_line_s = started_s

    def say_progress(self, step_number: int, all_rows: int, rows_of_run: float) -> None:
        """Report the number of rows of all runs, and the speed of this one.

        Do nothing if the last report was less than `SAY_PERIOD_S` seconds ago.
        """
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s - self._last_line_s < SAY_PERIOD_S:
            return
        self._last_line_s = now_s
        speed = rows_of_run / max(now_s - self._started_s, 0.001)
        self._task.say(f"step {step_number + 1}: {all_rows:,} rows so far, {speed:,.0f} rows/s")


def write_step(
    frame: Any, connection: Mapping[str, str], query: str, step_number: int, **options: str
) -> None:
    """Send the rows of a step to the sink. All rows of a queue are sent by one task, in order.

    `frame` has the columns of the sink and `ORIGIN_COLUMNS`, which say from where each row comes.
    If the option `delivery` is exactly-once, `query` and `step_number` identify the epoch, so that
    a repeated step does not repeat its messages.
    """
    origin_columns = [f"from_{name}" for name in _QUEUE_COLUMNS]
    ordered = frame.repartition(*origin_columns).sortWithinPartitions("from_queue_offset")
    sink_rows = ordered.drop(*origin_columns, "from_queue_offset")
    sink_options = {**connection, **options}
    if sink_options.get("delivery") == EXACTLY_ONCE:
        sink_options["queryId"] = query
        sink_options["queryEpoch"] = str(step_number)
    sink_rows.write.format("rocketmq").options(**sink_options).mode("append").save()


def describe_guarantee(connection: Mapping[str, str], delivery: str) -> str:
    """Return a text about the delivery guarantee of a job: exactly once or at least once.

    `delivery` is the option of the pipeline. The brokers are asked whether they support exactly
    once.
    """
    if delivery != EXACTLY_ONCE:
        return "at least once: if a run is killed during a step, that step is sent again"
    from sluicemq.spark.source import find_staging_brokers  # noqa: PLC0415 - a slow import
    from sluicemq.spark.sources.offsets import open_admin  # noqa: PLC0415 - as above

    with open_admin(parse_options(connection)) as admin:
        if find_staging_brokers(admin):
            return "exactly once, even if a run is killed"
    return (
        "at least once: these brokers do not support epochs; if a run is killed during a step, that"
        " step is sent again"
    )
