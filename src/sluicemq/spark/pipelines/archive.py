"""What an archive knows of itself: a small JSON file a run, written when its rows are all there.

    PATH/topic=T/day=D/part-….parquet     committed rows
    PATH/_sluice/runs/00000007.json       run 7 is committed: its ranges, its files, where 8 begins
    PATH/_sluice/staging/00000007-…/      rows of a run that is not committed, or just has been

A run writes its Parquet files into a staging directory, where no reader looks, and verifies them.
The run file is the commit: before it the rows do not count and the next run removes them; after it
they do, and are moved to their places, by the next run too if this one dies in between. So a
crash at any point neither loses nor doubles a row. Two runs at once: the one that is second to
commit fails, and its rows do not count.

Two sets of messages compared: counts and checksums by queue and offset range, then row by row.

Both sides are summed up where they are read: for each range of 10,000 offsets of a queue the number
of rows, and two sums of a 64-bit hash over every column (an exclusive or, and a sum of its upper
half). Only these sums are shuffled, and only ranges that differ are looked at by row, so equal
archives cost two reads. A hash covers which columns are null, since Spark's own passes nulls over.

The ready pipeline `archive`: topics -> Parquet by topic and day, whole messages, verified.

    brokers -> staging Parquet -> compared with the brokers -> run file (the commit) -> in place

Each run takes what came since the last one (`runs`), in one Spark job over all topics: a task is a
range of one queue, so memory does not grow with the archive. A row has every column of the source
and all a record holds (`schema.EXTRA`); `day` is the UTC day of the store time. Rows are verified
before they count (`verify`): a run whose rows differ from the brokers' fails and leaves nothing.

    archive(spark, {"nameServers": "127.0.0.1:9876"}, path="/data/archive", topics=["flights"])
    read_archive(spark, "/data/archive").where("topic = 'flights' and tags = 'UA'").show()
"""

import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import DateType, StructField, StructType

from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, OffsetOutOfRangeError, StoreDamagedError
from sluicemq.model.topic import MessageQueue
from sluicemq.spark.options import parse_options
from sluicemq.spark.pipelines.ready import (
    DURATION,
    INTEGER,
    LIST,
    TEXT,
    Field,
    Ready,
    Report,
    Task,
    task_of,
)
from sluicemq.spark.pipelines.steps import Folder
from sluicemq.spark.schema import BASE, EXTRA
from sluicemq.spark.sources.offset_reader import Bounds, open_admin, queue_bounds
from sluicemq.spark.sources.offsets import Offsets, QueueRange, place, to_table, topics_of

VERSION: Final = 1
RUNS: Final = "_sluice/runs"
STAGING: Final = "_sluice/staging"


@dataclass(frozen=True, slots=True)
class Run:
    """One committed run. `following` says of every queue ever archived where the next begins,
    `first` where its archive begins; `files` are relative to the archive."""

    number: int
    time: str
    ranges: tuple[QueueRange, ...]
    first: Offsets
    following: Offsets
    rows: int
    verified: bool
    files: tuple[str, ...]
    staging: str
    gaps: tuple[QueueRange, ...] = ()


@dataclass(slots=True)
class Runs:
    """The runs of an archive, the last one in memory."""

    folder: Folder
    last: Run | None = field(init=False)

    def __post_init__(self) -> None:
        names = [name for name in self.folder.names(RUNS) if name.endswith(".json")]
        self.last = None
        if names and not names[-1].startswith("."):
            found = self.folder.load(f"{RUNS}/{names[-1]}")
            self.last = _parsed_run(found or {}, self.folder.path)

    @property
    def following(self) -> Offsets:
        """Where the next run begins, by queue; empty before the first."""
        return {} if self.last is None else self.last.following

    def settle(self) -> None:
        """Completes what a run that died has committed, and removes what can never be.

        What a run of the next number has staged stays: it may be at work. When that number is
        committed, by itself or by another, the rest of it goes.
        """
        self.settle_last()
        number = 0 if self.last is None else self.last.number
        for name in self.folder.names(STAGING):
            if name.partition("-")[0].isdigit() and int(name.partition("-")[0]) <= number:
                self.folder.remove(f"{STAGING}/{name}")

    def settle_last(self) -> None:
        """Completes what the last run has committed; readers may do so at any time."""
        if self.last is not None:
            self._move(self.last)

    def begin(self) -> tuple[int, str]:
        """Number and staging directory of a new run."""
        number = 1 if self.last is None else self.last.number + 1
        return number, f"{STAGING}/{number:08d}-{uuid.uuid4().hex[:8]}"

    def commit(self, run: Run) -> None:
        """From now on its rows are in the archive. Raises ConfigurationError when another run
        has committed since this one began."""
        if not self.folder.publish(f"{RUNS}/{run.number:08d}.json", _document(run)):
            self.folder.remove(run.staging)
            raise ConfigurationError(
                f"another run has archived into {self.folder.path} meanwhile; nothing of this one"
                " is kept, and nothing is lost.",
                cure="Let one run at a time write an archive.",
            )
        self.last = run
        self.settle()

    def _move(self, run: Run) -> None:
        if not self.folder.exists(run.staging):
            return
        for name in run.files:
            self.folder.move(f"{run.staging}/{name}", name)


def _document(run: Run) -> dict[str, Any]:
    return {
        "version": VERSION, "run": run.number, "time": run.time, "rows": run.rows,
        "verified": run.verified, "first": to_table(run.first, several=True),
        "next": to_table(run.following, several=True),
        "ranges": _range_list(run.ranges), "gaps": _range_list(run.gaps),
        "staging": run.staging, "files": list(run.files),
    }  # fmt: skip


def _parsed_run(found: Mapping[str, Any], path: str) -> Run:
    try:
        if found["version"] != VERSION:
            raise ConfigurationError(
                f"the archive {path} is of version {found['version']!r}, not {VERSION}.",
                cure="Use the SluiceMQ that wrote it, or a newer one.",
            )
        return Run(
            found["run"], found["time"], _as_ranges(found["ranges"]), offsets_of(found["first"]),
            offsets_of(found["next"]), found["rows"], found["verified"], tuple(found["files"]),
            found["staging"], _as_ranges(found["gaps"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the last run of the archive {path} cannot be read: {error!r}.",
            cure="Restore the file, or use another path.",
        ) from None


def offsets_of(table: Mapping[str, Any]) -> Offsets:
    """The inverse of `to_table(…, several=True)`."""
    return {
        MessageQueue(topic, broker, int(queue_id)): int(offset)
        for topic, brokers in table.items()
        for broker, queues in brokers.items()
        for queue_id, offset in queues.items()
    }


def _range_list(ranges: tuple[QueueRange, ...]) -> list[list[Any]]:
    return [[*one.queue, one.start, one.end] for one in ranges]


def _as_ranges(listed: list[list[Any]]) -> tuple[QueueRange, ...]:
    return tuple(
        QueueRange(MessageQueue(topic, broker, queue_id), start, end)
        for topic, broker, queue_id, start, end in listed
    )


RANGE_OFFSETS: Final = 10_000
RANGES_SHOWN_MAX: Final = 100
ROWS_SHOWN_MAX: Final = 10
KEYS: Final = ("topic", "broker", "queue_id")
_VALUES: Final = tuple(name for name in (*BASE, *EXTRA) if name not in (*KEYS, "queue_offset"))
_SHOWN: Final = {name: name for name in _VALUES} | {"properties": "map_entries(properties)"}
_MISSING: Final = "not in the archive"
_EXTRA: Final = "only in the archive"
_TWICE: Final = "more than once in the archive"


def verify_rows(brokers: Any, archived: Any) -> int:
    """How many rows were compared. Raises StoreDamagedError naming rows that differ."""
    compared = _compared(brokers, archived).persist()
    try:
        different = "broker_rows <> archive_rows or parity <> 0 or balance <> 0"
        totals = compared.selectExpr(
            "sum(archive_rows) as archived", "sum(broker_rows) as stored",
            f"count_if({different}) as different",
        ).first()  # fmt: skip
        if not totals["different"]:
            return int(totals["archived"] or 0)
        ranges = compared.where(different).select(*KEYS, "part").limit(RANGES_SHOWN_MAX)
        found = _differences(brokers, archived, ranges)
    finally:
        compared.unpersist()
    listed = "; ".join(found) or "rows that have changed since"
    raise StoreDamagedError(
        f"{totals['different']} ranges of {RANGE_OFFSETS:,} offsets differ: {totals['stored']:,}"
        f" rows at the brokers, {totals['archived']:,} in the archive. {listed}.",
        cure="Rows of this run are not kept; for older ones restore the named files.",
    )


def _compared(brokers: Any, archived: Any) -> Any:
    """A row for each range of offsets: the rows of both sides, and 0 where hashes agree."""
    sums = _sums(brokers).selectExpr("*", "rows as broker_rows", "0L as archive_rows")
    other = _sums(archived).selectExpr("*", "0L as broker_rows", "rows as archive_rows")
    other = other.withColumn("balance", -F.col("balance"))
    return (
        sums.unionByName(other)
        .groupBy(*KEYS, "part")
        .agg(
            F.expr("sum(broker_rows)").alias("broker_rows"),
            F.expr("sum(archive_rows)").alias("archive_rows"),
            F.expr("bit_xor(parity)").alias("parity"),
            F.expr("sum(balance)").alias("balance"),
        )
    )


def _sums(frame: Any) -> Any:
    nulls = ", ".join(f"int({name} is null)" for name in _VALUES)
    hashed = f"xxhash64(queue_offset, concat({nulls}), {', '.join(_SHOWN.values())})"
    parted = frame.selectExpr(*KEYS, f"queue_offset div {RANGE_OFFSETS} as part", f"{hashed} as h")
    return parted.groupBy(*KEYS, "part").agg(
        F.expr("count(1)").alias("rows"),
        F.expr("bit_xor(h)").alias("parity"),
        F.expr("sum(shiftright(h, 32))").alias("balance"),
    )


def _differences(brokers: Any, archived: Any, ranges: Any) -> list[str]:
    """Some rows of the ranges that differ, each with what is wrong."""
    one, other = _chosen(brokers, ranges), _chosen(archived, ranges)
    keys = [*KEYS, "queue_offset"]
    other = other.groupBy(*keys).agg(F.expr("first(row)").alias("kept"), F.expr("count(1) as n"))
    columns = ", ".join(f"if(row.{name} <=> kept.{name}, null, '{name}')" for name in _VALUES)
    reason = (
        f"case when n is null then '{_MISSING}' when row is null then '{_EXTRA}' "
        f"when n > 1 then '{_TWICE}' else concat_ws(', ', array_compact(array({columns}))) end"
    )
    rows = one.join(other, keys, "full_outer").selectExpr(*keys, f"{reason} as reason")
    shown = rows.where("reason <> ''").orderBy(*keys).limit(ROWS_SHOWN_MAX).collect()
    return [_told(row) for row in shown]


def _chosen(frame: Any, ranges: Any) -> Any:
    values = ", ".join(f"{how} as {name}" for name, how in _SHOWN.items())
    keyed = frame.withColumn("part", F.expr(f"queue_offset div {RANGE_OFFSETS}"))
    chosen = keyed.join(ranges.hint("broadcast"), [*KEYS, "part"], "left_semi")
    return chosen.selectExpr(*KEYS, "queue_offset", f"struct({values}) as row")


def _told(row: Any) -> str:
    reason = row["reason"]
    is_difference = reason not in (_MISSING, _EXTRA, _TWICE)
    where = f"{row['broker']}:{row['queue_id']} of {row['topic']!r} offset {row['queue_offset']}"
    return f"{where}: {reason}{' differs' if is_difference else ''}"


NEW, ALL, NONE = "new", "all", "none"
COLUMNS: Final = (*BASE, *EXTRA)
SCHEMA: Final = StructType(
    [StructField(name, (BASE | EXTRA)[name]) for name in COLUMNS if name != "topic"]
    + [StructField("topic", BASE["topic"]), StructField("day", DateType())]
)
"""Columns of an archive; the last two are directories."""
DAY: Final = "date_from_unix_date(cast(unix_millis(store_time) div 86400000 as int)) as day"
TASK_ROWS_MAX: Final = 250_000
_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # One writer a directory instead of a sort of every task's rows: a queue has few days.
    "spark.sql.optimizer.plannedWrite.enabled": "false",
    "spark.sql.maxConcurrentOutputFileWriters": "32",
}

FIELDS: Final = (
    Field("path", TEXT, "Directory of the archive, on any file system that Spark writes to."),
    Field("topics", LIST, "Topics to archive.", ()),
    Field("pattern", TEXT, "Or: all topics whose whole name matches; `%DLQ%.*` dead letters.", ""),
    Field(
        "verify",
        TEXT,
        "What is compared with the brokers row by row: the rows of this run before they count, "
        "the whole archive as far as brokers still have it, nothing.",
        NEW,
        (NEW, ALL, NONE),
    ),
    Field(
        "on_gap",
        TEXT,
        "When retention was faster than the archive: an error, or go on and note what is missing.",
        "fail",
        ("fail", "note"),
    ),
    Field(
        "compression",
        TEXT,
        "Codec of the Parquet files.",
        "zstd",
        ("zstd", "snappy", "gzip", "lz4", "none"),
    ),
    Field("rows_per_file", INTEGER, "Largest number of rows of one file.", 1_000_000),
    Field("every", DURATION, "Run again so long after each run, until stopped; 0: once.", 0.0),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """What a run will archive: `ranges` of queues of topics with something new; `bounds` of all."""

    ranges: tuple[QueueRange, ...]
    bounds: Bounds
    gaps: tuple[QueueRange, ...]

    @property
    def topics(self) -> list[str]:
        return sorted({one.queue.topic for one in self.ranges})

    @property
    def offsets(self) -> int:
        return sum(one.size for one in self.ranges)

    def table(self, ends: bool) -> str:
        """The option startingOffsets or endingOffsets: every queue of the topics."""
        known = {one.queue: one for one in self.ranges}
        wanted = {
            queue: (known[queue].end if ends else known[queue].start) if queue in known else high
            for queue, (_, high) in self.bounds.items()
            if queue.topic in self.topics
        }
        return json.dumps(to_table(wanted, several=True))


def archive(
    spark: Any,
    connection: Mapping[str, str],
    *,
    say: Callable[[str], None] = print,
    stopping: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Report:
    """Archives what came since the last run. `options` are those of the pipeline (docs).

    Raises ConfigurationError, OffsetOutOfRangeError when retention was faster, StoreDamagedError
    when verification finds a difference (nothing of the run is kept), and the client's errors.
    """
    return _run(task_of(FIELDS, spark, connection, options, say=say, stopping=stopping))


def read_archive(spark: Any, path: str) -> Any:
    """The archive as a DataFrame. Raises ConfigurationError when there is none."""
    folder = Folder(spark, path)
    runs = Runs(folder)
    if runs.last is None:
        raise ConfigurationError(
            f"there is no archive at {folder.path}.", cure="Run the pipeline `archive` first."
        )
    runs.settle_last()
    return spark.read.schema(SCHEMA).parquet(folder.path)


def _plan(task: Task) -> list[str]:
    planned = _planned(task, Runs(Folder(task.spark, task.options["path"])))
    lines = [_gap_text(planned.gaps)] if planned.gaps else []
    for topic in planned.topics:
        ranges = [one for one in planned.ranges if one.queue.topic == topic]
        count = sum(one.size for one in ranges)
        lines.append(f"archive {count:,} messages of {len(ranges)} queues of {topic!r}")
    return lines or ["nothing new: the archive is complete"]


def _run(task: Task) -> Report:
    report = _run_once(task)
    pause_s = float(task.options["every"])
    while pause_s and not task.stopping():
        end_s = SYSTEM_CLOCK.monotonic_s() + pause_s
        while SYSTEM_CLOCK.monotonic_s() < end_s and not task.stopping():
            threading.Event().wait(min(0.5, pause_s))
        if not task.stopping():
            later = _run_once(task)
            report.lines = later.lines
            for name, number in later.figures.items():
                report.figures[name] = report.figures.get(name, 0) + number
    return report


def _run_once(task: Task) -> Report:
    spark = task.spark.newSession()
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)
    runs = Runs(Folder(spark, task.options["path"]))
    runs.settle()
    report = Report(figures={"rows": 0, "verified": 0}, files=[runs.folder.path])
    planned = _planned(task, runs)
    if planned.gaps:
        _tell_gaps(task, planned.gaps)
        report.figures["lost"] = sum(one.size for one in planned.gaps)
    if planned.offsets:
        _write(spark, task, runs, planned, report)
    else:
        _say(task, report, "nothing new: the archive is complete")
    if task.options["verify"] == ALL:
        _verify_all(spark, task, runs, planned.bounds, report)
    return report


def _say(task: Task, report: Report, line: str) -> None:
    task.say(line)
    report.lines.append(line)


def _write(spark: Any, task: Task, runs: Runs, planned: Planned, report: Report) -> None:
    began_s = SYSTEM_CLOCK.monotonic_s()
    number, staging = runs.begin()
    rows = source_rows(spark, task.connection, planned).selectExpr("*", DAY)
    writer = rows.write.partitionBy("topic", "day")
    writer = writer.option("compression", task.options["compression"])
    writer = writer.option("maxRecordsPerFile", str(task.options["rows_per_file"]))
    writer.parquet(runs.folder.at(staging))
    files = tuple(runs.folder.files(staging, ".parquet"))
    written = _rows_of(spark, runs.folder, staging, files)
    verified = task.options["verify"] != NONE
    if verified:
        count = verify_rows(source_rows(spark, task.connection, planned), written)
        report.figures["verified"] += count
    else:
        count = written.count()
    runs.commit(_new_run(runs.last, number, staging, planned, files, count, verified=verified))
    seconds = SYSTEM_CLOCK.monotonic_s() - began_s
    report.figures["rows"] += count
    ending = f", verified {count:,} rows" if verified else ", not verified"
    rate = count / max(seconds, 0.001)
    text = f"run {number}: archived {count:,} rows of {len(planned.topics)} topics"
    _say(task, report, f"{text} in {len(files)} files{ending} ({rate:,.0f} rows/s)")
    if count < planned.offsets:
        _say(task, report, f"{planned.offsets - count:,} offsets held no message")


def _rows_of(spark: Any, folder: Folder, where: str, files: Sequence[str]) -> Any:
    if not files:
        return spark.createDataFrame([], SCHEMA)
    return spark.read.schema(SCHEMA).parquet(folder.at(where))


def source_rows(spark: Any, connection: Mapping[str, str], planned: Planned) -> Any:
    """What the brokers hold of the planned ranges, with every column."""
    return (
        spark.read.format("rocketmq")
        .options(**connection)
        .options(
            topics=",".join(planned.topics), columns=",".join(COLUMNS), properties="all",
            startingOffsets=planned.table(ends=False), endingOffsets=planned.table(ends=True),
            maxRecordsPerPartition=str(TASK_ROWS_MAX), reportPushdown="false",
        )
        .load()
    )  # fmt: skip


def _new_run(
    last: Run | None, number: int, staging: str, planned: Planned, files: tuple[str, ...],
    count: int, *, verified: bool,
) -> Run:  # fmt: skip
    first: Offsets = {} if last is None else dict(last.first)
    following: Offsets = {} if last is None else dict(last.following)
    for one in planned.ranges:
        first.setdefault(one.queue, one.start)
        following[one.queue] = one.end
    time = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).isoformat()
    return Run(
        number, time, planned.ranges, first, following, count, verified, files, staging,
        planned.gaps,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ planning


def _planned(task: Task, runs: Runs) -> Planned:
    topics = ",".join(task.options["topics"])
    given = {"topics": topics} if topics else {}
    if task.options["pattern"]:
        given["topicsPattern"] = task.options["pattern"]
    if not given:
        raise ConfigurationError(
            "no topic is named.", cure="Give topics, or a pattern that their names match."
        )
    options = parse_options({**task.connection, **given})
    with open_admin(options) as admin:
        return _new_ranges(admin, topics_of(options).found(admin), runs.following)


def _new_ranges(admin: Admin, topics: Sequence[str], following: Offsets) -> Planned:
    bounds = queue_bounds(admin, topics)
    ranges, gaps = [], []
    for queue, (low, high) in sorted(bounds.items()):
        start = following.get(queue, low)
        if start > high:
            raise _made_anew(queue, start, high)
        if start < low:
            gaps.append(QueueRange(queue, start, low))
            start = low
        if start < high:
            ranges.append(QueueRange(queue, start, high))
    return Planned(tuple(ranges), bounds, tuple(gaps))


def _made_anew(queue: MessageQueue, start: int, high: int) -> ConfigurationError:
    return ConfigurationError(
        f"the archive holds {place(queue)} of {queue.topic!r} up to offset {start}, and the broker"
        f" only reaches {high}: the topic was made anew, or messages were lost.",
        cure="Archive it into another path.",
    )


def _gap_text(gaps: Sequence[QueueRange]) -> str:
    listed = ", ".join(
        f"{place(one.queue)} of {one.queue.topic!r} offsets {one.start} to {one.end - 1}"
        for one in gaps[:5]
    )
    count = sum(one.size for one in gaps)
    return f"{count:,} messages were deleted before they were archived: {listed}"


def _tell_gaps(task: Task, gaps: Sequence[QueueRange]) -> None:
    if task.options["on_gap"] == "fail":
        raise OffsetOutOfRangeError(
            f"{_gap_text(gaps)}.",
            cure="Set on_gap: note to go on with what is left, and archive more often.",
        )
    task.say(_gap_text(gaps))


def _verify_all(spark: Any, task: Task, runs: Runs, bounds: Bounds, report: Report) -> None:
    """Compares everything that is archived and still at the brokers."""
    last = runs.last
    ranges = []
    for queue, end in ({} if last is None else last.following).items():
        low, high = bounds.get(queue, (0, 0))
        start = max(low, 0 if last is None else last.first[queue])
        if start < min(end, high):
            ranges.append(QueueRange(queue, start, min(end, high)))
    if not ranges:
        _say(task, report, "nothing of the archive is at the brokers any more")
        return
    planned = Planned(tuple(sorted(ranges, key=lambda one: one.queue)), bounds, ())
    wanted = [(*one.queue, one.start, one.end) for one in ranges]
    names = "topic string, broker string, queue_id int, range_start long, range_end long"
    listed = spark.createDataFrame(wanted, names)
    archived = spark.read.schema(SCHEMA).parquet(runs.folder.path)
    kept = archived.join(listed.hint("broadcast"), ["topic", "broker", "queue_id"]).where(
        "queue_offset >= range_start and queue_offset < range_end"
    )
    count = verify_rows(source_rows(spark, task.connection, planned), kept)
    report.figures["verified"] = count
    _say(task, report, f"verified {count:,} rows: all that is archived and still at the brokers")


ARCHIVE: Final = Ready(
    "archive",
    "Topics to partitioned Parquet, whole messages, incremental, verified row by row.",
    FIELDS,
    _plan,
    _run,
)
