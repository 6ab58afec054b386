"""The ready pipelines `archive` and `replay`: topics -> Parquet by topic and day, and back again.

    brokers -> staging Parquet -> compared with the brokers -> run file (the commit) -> in place

Each run takes what came since the last one, in one Spark job over all topics: a task is a range of
one queue, so memory does not grow with the archive. A row has every column of the source and all a
record holds (`schema.EXTRA`); `day` is the UTC day of the store time. A body that cannot be
decompressed is archived as it is stored, with the reason in the column `_error`; a replay leaves
such messages out, and says how many, because their bytes alone are not what the producer sent.

    PATH/topic=T/day=D/part-….parquet     committed rows
    PATH/_sluice/runs/00000007.json       run 7 is committed: its ranges, its files, where 8 begins
    PATH/_sluice/staging/00000007-…/      rows of a run that is not committed, or just has been

A run writes its Parquet files into a staging directory, where no reader looks, and verifies them:
a run whose rows differ from the brokers' fails and leaves nothing. The run file is the commit:
before it the rows do not count and the next run removes them; after it they do, and are moved to
their places, by the next run too if this one dies in between. So a crash at any point neither loses
nor doubles a row. Two runs at once: the one that is second to commit fails, and its rows do not
count.

A replayed message comes back with its body, tags, keys, sharding key and its own properties; to its
own queue (`queues: same`) and under its own id (`ids: same`) when that is asked for. Times and
hosts are those of the new sending, and properties by which RocketMQ itself steers (delay, retry,
transaction, trace) do not come back: they would be acted upon. How it is resumed, and with which
guarantee: `steps`. The state is in the archive itself, `_sluice/replays/NAME.json`, or in `state`;
it holds up to where the archive went when the replay began, so runs that are archived meanwhile do
not come in between.

    archive(spark, {"nameServers": "127.0.0.1:9876"}, path="/data/archive", topics=["flights"])
    read_archive(spark, "/data/archive").where("topic = 'flights' and tags = 'UA'").show()
    replay(spark, {"nameServers": "127.0.0.1:9876"}, path="/data/archive", name="again-1",
           topics=["flights"], to="flights-again", where="tags = 'UA'")
"""

import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import DateType, StringType, StructField, StructType

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, OffsetOutOfRangeError, StoreDamagedError
from sluicemq.model.message import SHARDING_KEY
from sluicemq.model.properties import REFUSED_PROPERTIES
from sluicemq.model.topic import MessageQueue
from sluicemq.pipelines.ready import (
    DURATION,
    FROM_PLACE,
    INTEGER,
    LIST,
    SENDING,
    TEXT,
    Field,
    Folder,
    Ledger,
    Ready,
    Report,
    Task,
    guarantee,
    load_messages,
    run_steps,
    step_rows,
    write_step,
)
from sluicemq.spark.options import parse_options, parse_timestamp
from sluicemq.spark.schema import BAD_BODY_RAW, BASE_TYPES, ERROR_NAME, EXTRA_TYPES
from sluicemq.spark.sources.offsets import (
    Bounds,
    Offsets,
    QueueRange,
    fetch_bounds,
    iterate_table,
    offsets_to_table,
    open_admin,
    parse_topics,
    queue_label,
)

VERSION: Final = 1
RUNS: Final = "_sluice/runs"
STAGING: Final = "_sluice/staging"
REPLAYS: Final = "_sluice/replays"
NEW, ALL, NONE = "new", "all", "none"
COLUMNS: Final = (*BASE_TYPES, *EXTRA_TYPES, ERROR_NAME)
_TYPES: Final = BASE_TYPES | EXTRA_TYPES | {ERROR_NAME: StringType()}
SCHEMA: Final = StructType(
    [StructField(name, _TYPES[name]) for name in COLUMNS if name != "topic"]
    + [StructField("topic", BASE_TYPES["topic"]), StructField("day", DateType())]
)
"""Columns of an archive; the last two are directories."""
DAY: Final = "date_from_unix_date(cast(unix_millis(store_time) div 86400000 as int)) as day"
TASK_ROWS_MAX: Final = 250_000
_SESSION: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # One writer a directory instead of a sort of every task's rows: a queue has few days.
    "spark.sql.optimizer.plannedWrite.enabled": "false",
    "spark.sql.maxConcurrentOutputFileWriters": "32",
}


# ---- what an archive knows of itself


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

    def document(self) -> dict[str, Any]:
        """As the run file holds it."""

        def listed(ranges: tuple[QueueRange, ...]) -> list[list[Any]]:
            return [[*one.queue, one.start, one.end] for one in ranges]

        return {
            "version": VERSION, "run": self.number, "time": self.time, "rows": self.rows,
            "verified": self.verified, "first": offsets_to_table(self.first, by_topic=True),
            "next": offsets_to_table(self.following, by_topic=True), "ranges": listed(self.ranges),
            "gaps": listed(self.gaps), "staging": self.staging, "files": list(self.files),
        }  # fmt: skip

    @classmethod
    def of(cls, found: Mapping[str, Any], path: str) -> "Run":
        """The inverse. Raises ConfigurationError for what is none of ours."""

        def ranges(listed: list[list[Any]]) -> tuple[QueueRange, ...]:
            return tuple(QueueRange(MessageQueue(*one[:3]), *one[3:]) for one in listed)

        try:
            if found["version"] != VERSION:
                raise ConfigurationError(
                    f"the archive {path} is of version {found['version']!r}, not {VERSION}.",
                    fix="Use the SluiceMQ that wrote it, or a newer one.",
                )
            return cls(
                found["run"], found["time"], ranges(found["ranges"]),
                dict(iterate_table(found["first"])), dict(iterate_table(found["next"])),
                found["rows"],
                found["verified"], tuple(found["files"]), found["staging"], ranges(found["gaps"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the last run of the archive {path} cannot be read: {error!r}.",
                fix="Restore the file, or use another path.",
            ) from None


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
            self.last = Run.of(found or {}, self.folder.path)

    @property
    def number(self) -> int:
        return 0 if self.last is None else self.last.number

    @property
    def first(self) -> Offsets:
        return {} if self.last is None else self.last.first

    @property
    def following(self) -> Offsets:
        return {} if self.last is None else self.last.following

    def settle(self) -> None:
        """Completes what a run that died has committed, and removes what can never be.

        What a run of the next number has staged stays: it may be at work. When that number is
        committed, by itself or by another, the rest of it goes.
        """
        self.settle_last()
        for name in self.folder.names(STAGING):
            if name.partition("-")[0].isdigit() and int(name.partition("-")[0]) <= self.number:
                self.folder.remove(f"{STAGING}/{name}")

    def settle_last(self) -> None:
        """Completes what the last run has committed; readers may do so at any time."""
        if self.last is not None and self.folder.exists(self.last.staging):
            for name in self.last.files:
                self.folder.move(f"{self.last.staging}/{name}", name)

    def begin(self) -> tuple[int, str]:
        """Number and staging directory of a new run."""
        number = self.number + 1
        return number, f"{STAGING}/{number:08d}-{uuid.uuid4().hex[:8]}"

    def commit(self, run: Run) -> None:
        """From now on its rows are in the archive. Raises ConfigurationError when another run
        has committed since this one began."""
        if not self.folder.publish(f"{RUNS}/{run.number:08d}.json", run.document()):
            self.folder.remove(run.staging)
            raise ConfigurationError(
                f"another run has archived into {self.folder.path} meanwhile; nothing of this one"
                " is kept, and nothing is lost.",
                fix="Let one run at a time write an archive.",
            )
        self.last = run
        self.settle()


def read_archive(spark: Any, path: str) -> Any:
    """The archive as a DataFrame. Raises ConfigurationError when there is none."""
    folder = Folder(spark, path)
    runs = Runs(folder)
    if runs.last is None:
        raise ConfigurationError(
            f"there is no archive at {folder.path}.", fix="Run the pipeline `archive` first."
        )
    runs.settle_last()
    return spark.read.schema(SCHEMA).parquet(folder.path)


# ---- archiving


@dataclass(frozen=True, slots=True)
class Planned:
    """What a run will archive: `ranges` of queues of topics with something new; `bounds` of all."""

    ranges: tuple[QueueRange, ...]
    bounds: Bounds
    gaps: tuple[QueueRange, ...] = ()

    @classmethod
    def of(cls, task: Task, following: Offsets) -> "Planned":
        """Raises ConfigurationError when no topic is named, or one was made anew."""
        topics, pattern = ",".join(task.options["topics"]), task.options["pattern"]
        given = {"topics": topics} if topics else {}
        given |= {"topicsPattern": pattern} if pattern else {}
        if not given:
            raise ConfigurationError(
                "no topic is named.", fix="Give topics, or a pattern that their names match."
            )
        options = parse_options({**task.connection, **given})
        with open_admin(options) as admin:
            bounds = fetch_bounds(admin, parse_topics(options).resolve(admin))
        ranges, gaps = [], []
        for queue, (low, high) in sorted(bounds.items()):
            start = following.get(queue, low)
            if start > high:
                raise ConfigurationError(
                    f"the archive holds {queue_label(queue)} of {queue.topic!r} up to offset"
                    f" {start}, and"
                    f" the broker only reaches {high}: the topic was made anew, or messages were"
                    " lost.",
                    fix="Archive it into another path.",
                )
            if start < low:
                gaps.append(QueueRange(queue, start, low))
            if max(start, low) < high:
                ranges.append(QueueRange(queue, max(start, low), high))
        return cls(tuple(ranges), bounds, tuple(gaps))

    @classmethod
    def of_archive(cls, runs: Runs, bounds: Bounds) -> "Planned":
        """What is archived already, and still at the brokers."""
        ranges = []
        for queue, end in sorted(runs.following.items()):
            low, high = bounds.get(queue, (0, 0))
            start = max(low, runs.first[queue])
            if start < min(end, high):
                ranges.append(QueueRange(queue, start, min(end, high)))
        return cls(tuple(ranges), bounds)

    @property
    def topics(self) -> list[str]:
        return sorted({one.queue.topic for one in self.ranges})

    @property
    def offsets(self) -> int:
        return sum(one.size for one in self.ranges)

    def gap_text(self) -> str:
        listed = ", ".join(
            f"{queue_label(one.queue)} of {one.queue.topic!r} offsets {one.start} to {one.end - 1}"
            for one in self.gaps[:5]
        )
        count = sum(one.size for one in self.gaps)
        return f"{count:,} messages were deleted before they were archived: {listed}"

    def rows(self, task: Task, spark: Any) -> Any:
        """What the brokers hold of the ranges, with every column."""
        topics = self.topics
        ends = {queue: high for queue, (_, high) in self.bounds.items() if queue.topic in topics}
        starts = ends | {one.queue: one.start for one in self.ranges}
        ends |= {one.queue: one.end for one in self.ranges}
        return load_messages(
            spark, task.connection, topics=",".join(topics), columns=",".join(COLUMNS),
            properties="all", badBody=BAD_BODY_RAW,
            startingOffsets=json.dumps(offsets_to_table(starts, by_topic=True)),
            endingOffsets=json.dumps(offsets_to_table(ends, by_topic=True)),
            maxRecordsPerPartition=str(TASK_ROWS_MAX),
        )  # fmt: skip


def _run_once(task: Task) -> Report:
    spark = task.spark.newSession()
    for name, value in _SESSION.items():
        spark.conf.set(name, value)
    runs = Runs(Folder(spark, task.options["path"]))
    runs.settle()
    report = Report(figures={"rows": 0, "verified": 0}, files=[runs.folder.path])
    planned = Planned.of(task, runs.following)
    if planned.gaps:
        if task.options["on_gap"] == "fail":
            raise OffsetOutOfRangeError(
                f"{planned.gap_text()}.",
                fix="Set on_gap: note to go on with what is left, and archive more often.",
            )
        task.say(planned.gap_text())
        report.figures["lost"] = sum(one.size for one in planned.gaps)
    if planned.offsets:
        _write(spark, task, runs, planned, report)
    else:
        task.tell(report, "nothing new: the archive is complete")
    if task.options["verify"] == ALL:
        kept = Planned.of_archive(runs, planned.bounds)
        ending = "nothing of the archive is at the brokers any more"
        if kept.ranges:
            archived = spark.read.schema(SCHEMA).parquet(runs.folder.path)
            within = _within(archived, [(*one.queue, one.start, one.end) for one in kept.ranges])
            count = verify_rows(kept.rows(task, spark), within)
            report.figures["verified"] = count
            ending = f"verified {count:,} rows: all that is archived and still at the brokers"
        task.tell(report, ending)
    return report


def _write(spark: Any, task: Task, runs: Runs, planned: Planned, report: Report) -> None:
    began_s = SYSTEM_CLOCK.monotonic_s()
    number, staging = runs.begin()
    writer = planned.rows(task, spark).selectExpr("*", DAY).write.partitionBy("topic", "day")
    writer = writer.option("compression", task.options["compression"])
    writer = writer.option("maxRecordsPerFile", str(task.options["rows_per_file"]))
    writer.parquet(runs.folder.at(staging))
    files = tuple(runs.folder.files(staging, ".parquet"))
    written = spark.createDataFrame([], SCHEMA)
    if files:
        written = spark.read.schema(SCHEMA).parquet(runs.folder.at(staging))
    verified = task.options["verify"] != NONE
    count = verify_rows(planned.rows(task, spark), written) if verified else written.count()
    first, following = dict(runs.first), dict(runs.following)
    for one in planned.ranges:
        first.setdefault(one.queue, one.start)
        following[one.queue] = one.end
    time = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).isoformat()
    runs.commit(Run(
        number, time, planned.ranges, first, following, count, verified, files, staging,
        planned.gaps,
    ))  # fmt: skip
    report.figures["rows"] += count
    report.figures["verified"] += count * verified
    ending = f", verified {count:,} rows" if verified else ", not verified"
    rate = count / max(SYSTEM_CLOCK.monotonic_s() - began_s, 0.001)
    text = f"run {number}: archived {count:,} rows of {len(planned.topics)} topics"
    task.tell(report, f"{text} in {len(files)} files{ending} ({rate:,.0f} rows/s)")
    if count < planned.offsets:
        task.tell(report, f"{planned.offsets - count:,} offsets held no message")


# ---- verification

RANGE_OFFSETS: Final = 10_000
RANGES_SHOWN_MAX: Final = 100
ROWS_SHOWN_MAX: Final = 10
_QUEUE: Final = ("topic", "broker", "queue_id")
_VALUES: Final = tuple(name for name in COLUMNS if name not in (*_QUEUE, "queue_offset"))
_COMPARED: Final = {name: name for name in _VALUES} | {
    "properties": "map_entries(properties)",
    ERROR_NAME: f"{ERROR_NAME} is not null",  # another version may give another reason
}
_MISSING: Final = "not in the archive"
_EXTRA: Final = "only in the archive"
_TWICE: Final = "more than once in the archive"


def _within(rows: Any, ranges: Sequence[tuple[Any, ...]]) -> Any:
    """The rows in ranges of offsets (topic, broker, queue, start, end)."""
    names = "topic string, broker string, queue_id int, range_start long, range_end long"
    listed = rows.sparkSession.createDataFrame(ranges, names).hint("broadcast")
    inside = "queue_offset >= range_start and queue_offset < range_end"
    return rows.join(listed, list(_QUEUE)).where(inside).drop("range_start", "range_end")


def verify_rows(brokers: Any, archived: Any) -> int:
    """How many rows were compared. Raises StoreDamagedError naming rows that differ.

    Both sides are summed up where they are read: for each range of 10,000 offsets of a queue the
    number of rows, and two sums of a 64-bit hash over every column (an exclusive or, and a sum of
    its upper half). Only these sums are shuffled, and only ranges that differ are looked at by row,
    so equal archives cost two reads. A hash covers which columns are null, since Spark's own passes
    nulls over.
    """
    sums = _sums(brokers).selectExpr("*", "rows as broker_rows", "0L as archive_rows")
    other = _sums(archived).selectExpr("*", "0L as broker_rows", "rows as archive_rows")
    compared = (  # hashes agree where parity and balance are 0
        sums.unionByName(other.withColumn("balance", -F.col("balance")))
        .groupBy(*_QUEUE, "part")
        .agg(
            F.expr("sum(broker_rows) as broker_rows"), F.expr("sum(archive_rows) as archive_rows"),
            F.expr("bit_xor(parity) as parity"), F.expr("sum(balance) as balance"),
        )
        .persist()
    )  # fmt: skip
    try:
        different = "broker_rows <> archive_rows or parity <> 0 or balance <> 0"
        totals = compared.selectExpr(
            "sum(archive_rows) as archived", "sum(broker_rows) as stored",
            f"count_if({different}) as different",
        ).first()  # fmt: skip
        if not totals["different"]:
            return int(totals["archived"] or 0)
        ranges = compared.where(different).select(*_QUEUE, "part").limit(RANGES_SHOWN_MAX)
        found = _differences(brokers, archived, ranges)
    finally:
        compared.unpersist()
    listed = "; ".join(found) or "rows that have changed since"
    raise StoreDamagedError(
        f"{totals['different']} ranges of {RANGE_OFFSETS:,} offsets differ: {totals['stored']:,}"
        f" rows at the brokers, {totals['archived']:,} in the archive. {listed}.",
        fix="Rows of this run are not kept; for older ones restore the named files.",
    )


def _sums(frame: Any) -> Any:
    nulls = ", ".join(f"int({name} is null)" for name in _VALUES)
    hashed = f"xxhash64(queue_offset, concat({nulls}), {', '.join(_COMPARED.values())})"
    parted = frame.selectExpr(
        *_QUEUE, f"queue_offset div {RANGE_OFFSETS} as part", f"{hashed} as h"
    )
    return parted.groupBy(*_QUEUE, "part").agg(
        F.expr("count(1) as rows"), F.expr("bit_xor(h) as parity"),
        F.expr("sum(shiftright(h, 32)) as balance"),
    )  # fmt: skip


def _differences(brokers: Any, archived: Any, ranges: Any) -> list[str]:
    """Some rows of the ranges that differ, each with what is wrong."""

    def chosen(frame: Any) -> Any:
        values = ", ".join(f"{how} as {name}" for name, how in _COMPARED.items())
        keyed = frame.withColumn("part", F.expr(f"queue_offset div {RANGE_OFFSETS}"))
        found = keyed.join(ranges.hint("broadcast"), [*_QUEUE, "part"], "left_semi")
        return found.selectExpr(*_QUEUE, "queue_offset", f"struct({values}) as row")

    keys = [*_QUEUE, "queue_offset"]
    other = (
        chosen(archived).groupBy(*keys).agg(F.expr("first(row) as kept"), F.expr("count(1) as n"))
    )
    columns = ", ".join(f"if(row.{name} <=> kept.{name}, null, '{name}')" for name in _VALUES)
    reason = (
        f"case when n is null then '{_MISSING}' when row is null then '{_EXTRA}' "
        f"when n > 1 then '{_TWICE}' else concat_ws(', ', array_compact(array({columns}))) end"
    )
    rows = chosen(brokers).join(other, keys, "full_outer").selectExpr(*keys, f"{reason} as reason")
    lines = []
    for row in rows.where("reason <> ''").orderBy(*keys).limit(ROWS_SHOWN_MAX).collect():
        reason = row["reason"]
        differs = "" if reason in (_MISSING, _EXTRA, _TWICE) else " differs"
        queue = f"{row['broker']}:{row['queue_id']} of {row['topic']!r}"
        lines.append(f"{queue} offset {row['queue_offset']}: {reason}{differs}")
    return lines


# ---- replaying

_REFUSED: Final = ", ".join(f"'{name}'" for name in sorted(REFUSED_PROPERTIES))
OWN_PROPERTIES: Final = (
    f"map_filter(properties, (name, value) -> name not in ({_REFUSED})"
    " and not startswith(name, '__RMQ.'))"
)
"""The properties that a producer may set itself."""
_FIXED: Final = ("path", "topics", "to", "where", "since", "until", "queues", "ids", "delivery")
"""What a replay that goes on must have in common with its beginning."""


def _opened(task: Task) -> tuple[Ledger, Any]:
    """The replay's state, and all its rows, sent or not."""
    options, name = task.options, task.options["name"]
    rows = read_archive(task.spark, options["path"])
    following = Runs(Folder(task.spark, options["path"])).following
    if "/" in name or not name:
        raise ConfigurationError(f"the name is {name!r}.", fix="Use letters, digits and -.")
    home = Folder(task.spark, options["state"] or options["path"])
    ledger = Ledger(home, f"{name}.json" if options["state"] else f"{REPLAYS}/{name}.json")
    settings = {key: options[key] for key in _FIXED} | {"topics": list(options["topics"])}
    if not ledger.open(name, settings):
        ledger.document |= {
            "limits": offsets_to_table(following, by_topic=True), "query": f"replay-{name}",
            "step_rows": step_rows(float(options["rate"]), options["step"]),
        }  # fmt: skip
    if options["topics"]:
        rows = rows.where(F.col("topic").isin(list(options["topics"])))
    for option, sign, day_sign in (("since", ">=", ">="), ("until", "<", "<=")):
        if options[option]:
            try:
                time_ms = parse_timestamp(str(options[option]))
            except ValueError as error:
                raise ConfigurationError(
                    f"the option {option!r} is {options[option]!r}: {error}."
                ) from None
            rows = rows.where(f"store_time {sign} timestamp_millis({time_ms})")
            rows = rows.where(f"day {day_sign} date_from_unix_date({time_ms // 86_400_000})")
    if options["where"]:
        rows = rows.where(options["where"])
    limits = sorted(iterate_table(ledger["limits"]))  # where the archive went at the beginning
    return ledger, _within(rows, [(*queue, 0, end) for queue, end in limits])


def _sendable(rows: Any) -> tuple[Any, int]:
    """Split off the messages whose body cannot be decoded. Return the others, and how many there
    are of the former."""
    return rows.where(f"{ERROR_NAME} is null"), rows.where(f"{ERROR_NAME} is not null").count()


def _left_out(count: int) -> str:
    return (
        f"left out: {count:,} messages whose bodies cannot be decoded; the archive has their"
        f" stored bytes ({ERROR_NAME} is not null)"
    )


# ---- the ready pipelines


class Archive(Ready):
    """Archives what came since the last run. Raises ConfigurationError, OffsetOutOfRangeError when
    retention was faster, StoreDamagedError when verification finds a difference (nothing of the run
    is kept), and the client's errors."""

    name = "archive"
    what = "Topics to partitioned Parquet, whole messages, incremental, verified row by row."
    fields = (
        Field("path", TEXT, "Directory of the archive, on any file system that Spark writes to."),
        Field("topics", LIST, "Topics to archive.", ()),
        Field("pattern", TEXT,
              "Or: all topics whose whole name matches; `%DLQ%.*` dead letters.", ""),
        Field("verify", TEXT,
              "What is compared with the brokers row by row: the rows of this run before they "
              "count, the whole archive as far as brokers still have it, nothing.",
              NEW, (NEW, ALL, NONE)),
        Field("on_gap", TEXT,
              "When retention was faster than the archive: an error, or go on and note what is "
              "missing.", "fail", ("fail", "note")),
        Field("compression", TEXT, "Codec of the Parquet files.", "zstd",
              ("zstd", "snappy", "gzip", "lz4", "none")),
        Field("rows_per_file", INTEGER, "Largest number of rows of one file.", 1_000_000),
        Field("every", DURATION, "Run again so long after each run, until stopped; 0: once.", 0.0),
    )  # fmt: skip

    def plan(self, task: Task) -> list[str]:
        runs = Runs(Folder(task.spark, task.options["path"]))
        planned = Planned.of(task, runs.following)
        lines = [planned.gap_text()] if planned.gaps else []
        for topic in planned.topics:
            ranges = [one for one in planned.ranges if one.queue.topic == topic]
            count = sum(one.size for one in ranges)
            lines.append(f"archive {count:,} messages of {len(ranges)} queues of {topic!r}")
        return lines or ["nothing new: the archive is complete"]

    def run(self, task: Task) -> Report:
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


class Replay(Ready):
    """Sends messages of an archive again. Raises ConfigurationError (also when a replay of this
    name was begun otherwise), and the errors of the sink; run it again to go on."""

    name = "replay"
    what = "An archive back into topics: ranges and filters, paced, resumable, exactly once."
    fields = (
        Field("path", TEXT, "The archive."),
        Field("name", TEXT, "Name of this replay: run again under it, it goes on where it was."),
        Field("topics", LIST, "Topics to replay; all of the archive without it.", ()),
        Field("to", TEXT, "Topic to send to; without it each message goes to its own topic.", ""),
        Field("where", TEXT, "Spark SQL predicate on the columns of the archive.", ""),
        Field("since", TEXT, "First store time: ISO 8601 or milliseconds.", ""),
        Field("until", TEXT, "First store time not to replay any more.", ""),
        Field("queues", TEXT, "Any queue, or the one it had.", "any", ("any", "same")),
        Field("ids", TEXT, "New message ids, or those they had.", "new", ("new", "same")),
        *SENDING,
        Field("state", TEXT, "Directory of the replay's state; the archive's without it.", ""),
    )  # fmt: skip

    def plan(self, task: Task) -> list[str]:
        ledger, rows = _opened(task)
        rows, undecodable = _sendable(rows)
        found = rows.groupBy("topic").agg(
            F.expr("count(1) as n"), F.expr("min(store_time) as first"),
            F.expr("max(store_time) as last"),
        )  # fmt: skip
        lines = [
            f"send {row['n']:,} messages of {row['topic']!r}, stored"
            f" {row['first']:%Y-%m-%d %H:%M:%S} to {row['last']:%Y-%m-%d %H:%M:%S}, to"
            f" {task.options['to'] or row['topic']!r}"
            for row in found.orderBy("topic").limit(100).collect()
        ]
        if ledger["steps"]:
            lines.append(f"{ledger['rows']:,} of them are sent already, in {ledger['steps']} steps")
        lines = lines or ["no message to send"]
        if undecodable:
            lines.append(_left_out(undecodable))
        return [*lines, guarantee(task.connection, task.options["delivery"])]

    def run(self, task: Task) -> Report:
        options = task.options
        ledger, rows = _opened(task)
        if not ledger["steps"]:
            ledger.begin()
        rows, undecodable = _sendable(rows)
        report = Report(figures={"rows": 0}, files=[ledger.folder.at(ledger.file)])
        if undecodable:
            report.figures["undecodable"] = undecodable
            task.tell(report, _left_out(undecodable))
        task.tell(report, guarantee(task.connection, options["delivery"]))
        columns = [
            "body", "tags", "keys", f"{OWN_PROPERTIES} as properties",
            f"properties['{SHARDING_KEY}'] as sharding_key", *FROM_PLACE,
        ]  # fmt: skip
        given = {"delivery": options["delivery"]}
        if options["to"]:
            given["topic"] = options["to"]
        else:
            columns.append("topic")
        if options["queues"] == "same":
            columns.append("queue_id")
        if options["ids"] == "same":
            columns.append("msg_id as message_id")

        def send(number: int, some: Any) -> None:
            chosen = some.selectExpr(*columns)
            write_step(chosen, task.connection, ledger["query"], number, **given)

        is_done = run_steps(task, ledger, report, rows, send)
        ending = "all is sent" if is_done else "stopped; run it again to go on"
        task.tell(report, f"sent {report.figures['rows']:,} messages; {ending}")
        return report


archive: Final = Archive()
replay: Final = Replay()
