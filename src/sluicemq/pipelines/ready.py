"""What ready pipelines are made of: declared fields, a plan, a run, and steps that can be resumed.

The fields under `with:` of a file, and the options of a Python call, are checked against the
declared ones (`Field`), so a ready pipeline gets values of the declared kinds, defaults filled in,
and nothing else. It talks to the user through `Task.say` alone, looks at `Task.stopping` between
steps, and ends with a `Report`. The sinks of a file declare their fields in the same way.

**Folders.** State goes through Hadoop's file systems, as Spark's writers do, so one path serves
both a disk, HDFS and an object store. What decides something is written in two steps: a whole file
under another name, then a rename that does not replace (`publish`), or does (`replace`). A reader
sees the old text or the new one.

**Steps.** Many messages are sent again in small, numbered steps: paced, told of, and resumed.

    rows ─ windows of offsets, oldest first ─ steps of about `rows` rows ─ one write each ─ ledger

A step is one Spark write of the rows of a few windows. What is in a step depends only on the rows,
which do not change (an archive up to fixed offsets, a plan on disk), so step 17 is the same rows
after a restart. The ledger, a small file, says how many steps are done. Which guarantee holds when
a step is cut in two by a kill:

    exactly-once    the step is an epoch of the query NAME (design/0007): repeated, no effect
    at-least-once   that one step is sent again, with the message ids it had, if it names them

Only window bounds come to the driver, one at a time.
"""

import importlib
import json
import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ConfigurationError
from sluicemq.hints import did_you_mean
from sluicemq.numbers import parse_duration_ms
from sluicemq.spark.classic import get_gateway, get_jvm, get_spark_context
from sluicemq.spark.options import AT_LEAST_ONCE, EXACTLY_ONCE, parse_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

JsonObject = dict[str, Any]
BATCH, STREAMING = "batch", "streaming"
AVAILABLE_NOW: Final = "available-now"
CHECK_S: Final = 0.1
FINISH_S: Final = 600.0
logger = logging.getLogger(__name__)
TEXT, INTEGER, NUMBER, FLAG, LIST, DURATION, MAPPING = (
    "text", "integer", "number", "flag", "list", "duration", "mapping",
)  # fmt: skip
"""Kinds of a field. A list is of texts, a duration (`90s`, `15m`, `6h`, `7d`) is seconds (float),
a mapping goes from text to text."""
_WIDTH_MAX: Final = 60


def duration_s(text: str) -> float:
    """Return the seconds that a text such as "500ms", "90s" or "7d" means. Raises ValueError."""
    duration_ms = parse_duration_ms(text.strip())
    if duration_ms is None:
        raise ValueError("write a number with a unit: 500ms, 90s, 15m, 6h or 7d")
    return duration_ms / 1_000


def trigger_s(text: str) -> float | None:
    """Seconds between the micro-batches of a stream; None: all that is there now. ValueError."""
    return None if text.strip() == AVAILABLE_NOW else duration_s(text)


def trigger_of(seconds: float | None) -> dict[str, Any]:
    """The same as Spark takes it."""
    if seconds is None:
        return {"availableNow": True}
    return {"processingTime": f"{int(seconds * 1000)} milliseconds"}


class _Required:
    """The default of a field that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


@dataclass(frozen=True, slots=True)
class Field:
    """One declared field of a ready pipeline; `words`: all it may say, when there are few."""

    name: str
    kind: str
    what: str
    default: Any = REQUIRED
    words: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """What a run did: numbers by name, files it wrote, lines for the user. `is_failure`: it came to
    its end, and what it found is to be the exit code 1. Of a file's own sinks: `rows` by sink (of a
    stream: rows read for it), and those that were `left` out when it was stopped."""

    figures: dict[str, int | float] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    is_failure: bool = False
    rows: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Task:
    """One run. `options`: every declared field by name. `connection`: options of the `rocketmq`
    source and sink that say where the cluster is and who asks (`nameServers`, `accessKey` …)."""

    spark: "SparkSession"
    options: Mapping[str, Any]
    connection: Mapping[str, str]
    say: Callable[[str], None] = print
    stopping: Callable[[], bool] = lambda: False

    def tell(self, report: Report, *lines: str) -> None:
        """Says the lines now, and reports them."""
        for line in lines:
            self.say(line)
        report.lines += lines


class Ready(ABC):
    """A ready pipeline, with what it is in a line, and its fields."""

    name: ClassVar[str]
    what: ClassVar[str]
    fields: ClassVar[tuple[Field, ...]] = ()

    @abstractmethod
    def plan(self, task: Task) -> list[str]:
        """What `run` would do, a line each. Reads at most."""

    @abstractmethod
    def run(self, task: Task) -> Report:
        """Does it. Raises what the pipeline's own page says."""

    def task(
        self,
        spark: Any,
        connection: Mapping[str, str],
        options: Mapping[str, Any],
        *,
        say: Callable[[str], None] = print,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Task:
        """A run with these options by name, defaults filled in. Raises ConfigurationError for one
        that is unknown, missing, or says what it may not."""
        known = {field.name: field for field in self.fields}
        for name in options:
            if name not in known:
                raise ConfigurationError(
                    f"there is no option {name!r}.",
                    fix=f"{did_you_mean(name, known)} There are: {', '.join(known)}.".lstrip(),
                )
        values = {}
        for name, one in known.items():
            value = options.get(name, one.default)
            if value is REQUIRED:
                raise ConfigurationError(f"the option {name!r} is missing.", fix=one.what)
            if one.words and value not in one.words:
                raise ConfigurationError(
                    f"the option {name!r} is {value!r}.", fix=f"It is {' or '.join(one.words)}."
                )
            values[name] = [value] if one.kind == LIST and isinstance(value, str) else value
        return Task(spark, values, connection, say, stopping)

    def __call__(
        self,
        spark: Any,
        connection: Mapping[str, str],
        *,
        say: Callable[[str], None] = print,
        stopping: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> Report:
        """Runs it as a Python function. `options` are the pipeline's fields by name. Raises as
        `task`, and what the pipeline raises."""
        return self.run(self.task(spark, connection, options, say=say, stopping=stopping))


_HOME: Final = {
    "archive": "archive:archive",
    "replay": "archive:replay",
    "dead-letters": "deadletters:dead_letters",
    "trace": "trace:TRACE",
    "audit": "audit:AUDIT",
    "dedup": "dedup:DEDUP",
}
NAMES: Final = tuple(_HOME)


def ready(name: str) -> Ready:
    """The ready pipeline of a name out of `NAMES`; imported when asked for. Raises KeyError."""
    module, _, attribute = _HOME[name].partition(":")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    assert isinstance(found, Ready)
    return found


def load_messages(
    spark: "SparkSession", connection: Mapping[str, str], **options: str
) -> "DataFrame":
    """Messages of topics, by the batch source. What the options mean: `spark.options`."""
    given = {"reportPushdown": "false", **connection, **options}
    return spark.read.format("rocketmq").options(**given).load()


# ---- tables


def table_lines(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    rows_max: int | None = None,
    where: str = "",
) -> list[str]:
    """A title, the names and the rows in columns, numbers to the right; of more than `rows_max` the
    first ones, and how many more there are (`where`)."""
    from rich.console import Console  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415

    def shown(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, datetime):
            return f"{value:%Y-%m-%d %H:%M}"
        if type(value) in (int, float):
            return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
        text = " ".join(str(value).splitlines())
        return text if len(text) <= _WIDTH_MAX else text[: _WIDTH_MAX - 1] + "…"

    left, rows = len(rows) - len(rows[:rows_max]), rows[:rows_max]
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="")
    for name, column in zip(names, zip(*rows, strict=True), strict=bool(rows)):
        is_number = all(value is None or type(value) in (int, float) for value in column)
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(shown, row))
    console = Console(width=10_000, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as printed:
        console.print(table)
    text = [line.rstrip() for line in printed.get().splitlines()]
    lines = [title, *text] if rows else [f"{title}: none"]
    return [*lines, f"  … and {left:,} more{where}"] if left else lines


# ---- streams and folders


def finish(query: "StreamingQuery") -> None:
    """Lets the micro-batch under way end, and no other begin; returns when the query is over.

    A query has no such thing: `stop()` interrupts the micro-batch, which is then done again after
    the restart. So the state of Spark's `StreamExecution` is set as if it had ended, which its loop
    looks at between micro-batches only; the one under way is committed. That is a look into Spark's
    inside: where it is not as expected the query is stopped between two triggers instead, or
    interrupted. All three lose nothing, as the checkpoint says what is done.
    """
    try:
        inner: Any = query._jsq
        execution = inner.streamingQuery()
        active = execution.state().get()
        if active.getClass().getSimpleName().startswith("ACTIVE"):
            name = active.getClass().getName().replace("ACTIVE", "TERMINATED")
            loader = active.getClass().getClassLoader()
            terminated = loader.loadClass(name).getField("MODULE$").get(None)
            execution.state().compareAndSet(active, terminated)
            thread = execution.queryExecutionThread()
            while thread.isAlive() and query.status["isTriggerActive"]:
                threading.Event().wait(CHECK_S)
    except Exception:
        logger.debug(
            "Spark's query is not as expected; it is stopped between triggers", exc_info=True
        )
    end_s = SYSTEM_CLOCK.monotonic_s() + FINISH_S
    while query.isActive and query.status["isTriggerActive"]:
        if SYSTEM_CLOCK.monotonic_s() > end_s:
            break
        threading.Event().wait(CHECK_S)
    query.stop()


class Folder:
    """A directory, with everything below it. Paths are relative to it. Driver only."""

    def __init__(self, spark: Any, path: str) -> None:
        if not path:
            raise ConfigurationError("the path is empty.", fix="Name a directory.")
        hadoop = get_jvm(spark).org.apache.hadoop.fs
        configuration = get_spark_context(spark)._jsc.hadoopConfiguration()
        self._path = hadoop.Path
        root = hadoop.Path(path)
        self._files = root.getFileSystem(configuration)
        self._root = self._files.makeQualified(root)
        self._context = hadoop.FileContext.getFileContext(self._root.toUri(), configuration)
        rename = hadoop.Options.Rename
        self._no_replace = get_gateway(spark).new_array(rename, 1)
        self._no_replace[0] = rename.NONE
        self._with_replace = get_gateway(spark).new_array(rename, 1)
        self._with_replace[0] = rename.OVERWRITE
        self._to_text = get_jvm(spark).org.apache.commons.io.IOUtils.toString

    @property
    def path(self) -> str:
        """The whole path, as Spark takes it."""
        return str(self._root.toString())

    def at(self, name: str) -> str:
        """The whole path of something below."""
        return str(self._full(name).toString())

    def _full(self, name: str) -> Any:
        return self._path(self._root, name) if name else self._root

    def exists(self, name: str = "") -> bool:
        return bool(self._files.exists(self._full(name)))

    def names(self, name: str = "") -> list[str]:
        """What lies directly in it, sorted; nothing when it is not there."""
        if not self.exists(name):
            return []
        return sorted(str(one.getPath().getName()) for one in self._files.listStatus(
            self._full(name)))  # fmt: skip

    def files(self, name: str, suffix: str) -> list[str]:
        """Files at any depth of a directory below, relative to that one."""
        if not self.exists(name):
            return []
        start = self._full(name)
        found, length = [], len(str(start.toString())) + 1
        listed = self._files.listFiles(start, True)
        while listed.hasNext():
            path = str(listed.next().getPath().toString())
            if path.endswith(suffix):
                found.append(path[length:])
        return sorted(found)

    def load(self, name: str) -> JsonObject | None:
        """A JSON object; None when there is no such file. Raises ConfigurationError."""
        if not self.exists(name):
            return None
        stream = self._files.open(self._full(name))
        try:
            text = str(self._to_text(stream, "UTF-8"))
        finally:
            stream.close()
        why = "no JSON object"
        try:
            found = json.loads(text)
        except ValueError as error:
            found, why = None, str(error)
        if not isinstance(found, dict):
            raise ConfigurationError(
                f"{self.at(name)} is not what it should be: {why}.",
                fix="Restore the file, or use another path.",
            )
        return found

    def publish(self, name: str, value: JsonObject) -> bool:
        """Writes a file that is not there yet; False when another process was first."""
        draft = self._draft(name, value)
        try:
            if not self.exists(name):
                self._context.rename(self._full(draft), self._full(name), self._no_replace)
                return True
        except Exception as error:
            if "FileAlreadyExists" not in str(error):
                raise
        self.remove(draft)
        return False

    def replace(self, name: str, value: JsonObject) -> None:
        """Writes a file, in the place of an older one."""
        draft = self._draft(name, value)
        self._context.rename(self._full(draft), self._full(name), self._with_replace)

    def _draft(self, name: str, value: JsonObject) -> str:
        folder, _, last = name.rpartition("/")
        draft = f"{folder}/.{last}.{uuid.uuid4().hex}".lstrip("/")
        stream = self._files.create(self._full(draft), True)
        try:
            stream.write(bytearray(json.dumps(value, indent=1).encode()))
            stream.hsync()
        finally:
            stream.close()
        return draft

    def move(self, old: str, new: str) -> None:
        """Moves a file, unless that is done already."""
        if not self.exists(old) and self.exists(new):
            return
        target = self._full(new)
        self._files.mkdirs(target.getParent())
        try:
            self._context.rename(self._full(old), target, self._with_replace)
        except Exception:
            if self.exists(old) or not self.exists(new):  # else another process was faster
                raise

    def remove(self, name: str) -> None:
        """A file, or a directory with what is in it; nothing when it is not there."""
        self._files.delete(self._full(name), True)


# ---- steps

STEP_ROWS_MAX: Final = 100_000
STEP_SECONDS: Final = 2.0
WINDOWS_OF_A_STEP: Final = 4
WINDOWS_MAX: Final = 64
SAY_PERIOD_S: Final = 5.0
_PLACE: Final = ("topic", "broker", "queue_id")


@dataclass(frozen=True, slots=True)
class Window:
    """Rows with start <= offset < end of one queue."""

    topic: str
    broker: str
    queue_id: int
    start: int
    end: int
    rows: int


FROM_PLACE: Final = tuple(f"{name} as from_{name}" for name in (*_PLACE, "queue_offset"))
"""Columns that `write_step` sorts by."""
SENDING: Final = (
    Field("rate", NUMBER, "Messages a second at most; 0: as fast as it goes.", 0.0),
    Field("step", INTEGER, "Messages of a step; 0: two seconds of the rate.", 0),
    Field("delivery", TEXT, "With exactly-once a kill doubles nothing (SluiceMQ brokers).",
          EXACTLY_ONCE, (EXACTLY_ONCE, AT_LEAST_ONCE)),
)  # fmt: skip
"""Fields of pipelines that send in steps."""


def step_rows(rate: float, asked: int) -> int:
    """Rows of a step: what is asked for, else two seconds of the rate."""
    if asked:
        return asked
    return STEP_ROWS_MAX if not rate else max(1, min(STEP_ROWS_MAX, int(rate * STEP_SECONDS)))


def windows_of(frame: Any, offsets: int) -> Iterator[Window]:
    """Windows with rows, in the order of their first store time."""
    part = F.expr(f"queue_offset div {offsets}").alias("part")
    found = frame.groupBy(*_PLACE, part).agg(
        F.expr("count(1)").alias("rows"), F.expr("min(store_time)").alias("first")
    )
    for row in found.orderBy("first", *_PLACE, "part").toLocalIterator():
        start = row["part"] * offsets
        yield Window(
            row["topic"], row["broker"], row["queue_id"], start, start + offsets, row["rows"]
        )


def steps_of(windows: Iterable[Window], rows_max: int) -> Iterator[tuple[Window, ...]]:
    """Windows that go together: about `rows_max` rows, never more unless one window has more."""
    held: list[Window] = []
    rows = 0
    for window in windows:
        if held and (rows + window.rows > rows_max or len(held) >= WINDOWS_MAX):
            yield tuple(held)
            held, rows = [], 0
        held.append(window)
        rows += window.rows
    if held:
        yield tuple(held)


def within(windows: Iterable[Window]) -> Any:
    """The predicate for the rows of some windows: simple, so that Parquet's statistics serve."""
    parts = [
        (F.col("topic") == F.lit(one.topic))
        & (F.col("broker") == F.lit(one.broker))
        & (F.col("queue_id") == one.queue_id)
        & (F.col("queue_offset") >= one.start)
        & (F.col("queue_offset") < one.end)
        for one in windows
    ]
    return reduce(lambda one, other: one | other, parts)


@dataclass(slots=True)
class Ledger:
    """How far a job is: `_sluice/jobs/NAME.json` of a folder, or another file of it."""

    folder: Folder
    file: str
    document: JsonObject = field(default_factory=dict)

    def open(self, name: str, settings: Mapping[str, Any]) -> bool:
        """Takes up the job, False when it is a new one (not written before `begin`).

        Raises ConfigurationError when it was begun with other settings: steps would be others.
        """
        found = self.folder.load(self.file)
        wanted = dict(settings)
        if found is None:
            self.document = {"name": name, "settings": wanted, "steps": 0, "rows": 0, "done": False}
            return False
        for key in sorted({*wanted, *found["settings"]}):
            if wanted.get(key) != found["settings"].get(key):
                raise ConfigurationError(
                    f"the job {name!r} was begun with {key}={found['settings'].get(key)!r}, now it"
                    f" is {wanted.get(key)!r}.",
                    fix=f"Use the same to go on, or another name (its state: "
                    f"{self.folder.at(self.file)}).",
                )
        self.document = found
        return True

    def begin(self, **more: Any) -> None:
        self.document |= more
        self.folder.replace(self.file, self.document)

    def step(self, rows: int) -> None:
        """One more step is done."""
        self.document["steps"] += 1
        self.document["rows"] += rows
        self.folder.replace(self.file, self.document)

    def finish(self) -> None:
        self.document["done"] = True
        self.folder.replace(self.file, self.document)

    def __getitem__(self, key: str) -> Any:
        return self.document[key]


class Pace:
    """Not more than `rate` rows a second on the whole; 0: as fast as it goes."""

    def __init__(self, rate: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._rate = rate
        self._clock = clock
        self._due_s = clock.monotonic_s()

    def wait(self, rows: int, stopping: Callable[[], bool]) -> None:
        """Until the next rows may go, after `rows` went."""
        if not self._rate:
            return
        now_s = self._clock.monotonic_s()
        self._due_s = max(self._due_s, now_s - 1.0) + rows / self._rate
        while (left_s := self._due_s - self._clock.monotonic_s()) > 0 and not stopping():
            threading.Event().wait(min(left_s, 0.5))


def run_steps(
    task: Task, ledger: Ledger, report: Report, rows: Any, send: Callable[[int, Any], None]
) -> bool:
    """Does the steps that are not done yet; False when it was stopped before the end. `rows` have
    a place each (topic, broker, queue_id, queue_offset, store_time); `send` writes the rows of a
    step, by its number."""
    if ledger["done"]:
        return True
    size = ledger["step_rows"]
    window = max(1, size // WINDOWS_OF_A_STEP)
    pace = Pace(float(task.options["rate"]))
    began_s = said_s = SYSTEM_CLOCK.monotonic_s()
    before = ledger["steps"]
    for number, windows in enumerate(steps_of(windows_of(rows, window), size)):
        if number < before:
            continue
        if task.stopping():
            return False
        count = sum(one.rows for one in windows)
        send(number, rows.where(within(windows)))
        ledger.step(count)
        report.figures["rows"] = report.figures.get("rows", 0) + count
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s - said_s >= SAY_PERIOD_S:
            said_s = now_s
            speed = report.figures["rows"] / max(now_s - began_s, 0.001)
            task.say(f"step {number + 1}: {ledger['rows']:,} rows so far, {speed:,.0f} rows/s")
        pace.wait(count, task.stopping)
    ledger.finish()
    return True


def write_step(
    frame: Any, connection: Mapping[str, str], query: str, number: int, **options: str
) -> None:
    """Writes the rows of a step, those of one queue in order and by one task. Columns `from_…` say
    where rows come from."""
    came_from = [f"from_{name}" for name in _PLACE]
    ordered = frame.repartition(*came_from).sortWithinPartitions("from_queue_offset")
    rows = ordered.drop(*came_from, "from_queue_offset")
    given = {**connection, **options}
    if given.get("delivery") == EXACTLY_ONCE:
        given |= {"queryId": query, "queryEpoch": str(number)}
    rows.write.format("rocketmq").options(**given).mode("append").save()


def guarantee(connection: Mapping[str, str], delivery: str) -> str:
    """What holds on this cluster, in words."""
    if delivery != EXACTLY_ONCE:
        return "at least once: a step that is cut in two by a kill is sent again"
    from sluicemq.spark.source import find_staging_brokers  # noqa: PLC0415 - heavy
    from sluicemq.spark.sources.offsets import open_admin  # noqa: PLC0415

    with open_admin(parse_options(connection)) as admin:
        if find_staging_brokers(admin):
            return "exactly once, also after a kill"
    return "at least once: these brokers have no epochs; a step cut in two is sent again"
