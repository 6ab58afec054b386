"""The ready pipelines `archive` and `replay`: topics to Parquet by topic and day, and back again.

**Archive.** Each run takes the messages since the last one, in one Spark job over all topics. A
task reads a range of one queue, so memory does not grow with the archive. A row has every column of
the source and the further fields of a record (`schema.EXTRA_TYPES`); `day` is the UTC day of the
store time. A body that cannot be decompressed is archived as it is stored, with the reason in the
column `_error`. A replay leaves such messages out and reports their number, because their bytes are
not what the producer sent.

    PATH/topic=T/day=D/part-….parquet     committed rows
    PATH/_sluice/runs/00000007.json       the commit of run 7: its ranges, its files, and the
                                          offsets where run 8 begins
    PATH/_sluice/staging/00000007-…/      rows of a run that is not committed, or was just now

A run writes its Parquet files to a staging directory, where readers do not look, and verifies them.
If its rows differ from those at the brokers, the run fails and leaves nothing. The run file is the
commit. Before it exists, the rows do not count, and a later run removes them. After that, they
count, and the run moves them to their final paths; if it dies, the next run does so. So a crash at
any point neither loses nor duplicates a row. If two runs overlap, the second one fails to commit,
and its rows do not count.

**Replay.** A replayed message has the body, tags, keys, sharding key and user properties of the
archived one. It goes to the queue of the same number with `queues: same`, and has the same message
id with `ids: same`. Times and hosts are those of the new sending. Properties that control RocketMQ
itself (delay, retry, transaction, trace) are left out, because brokers would act upon them. See
`pipelines.sinks.steps` for how a replay is resumed, and its guarantee. Its state is in the archive,
`_sluice/replays/NAME.json`, or in the directory `state`. The state contains the end offsets of the
archive when the replay began, so that later runs of the archive do not change its steps.

    archive(spark, {"nameServers": "127.0.0.1:9876"}, path="/data/archive", topics=["flights"])
    read_archive(spark, "/data/archive").where("topic = 'flights' and tags = 'UA'").show()
    replay(spark, {"nameServers": "127.0.0.1:9876"}, path="/data/archive", name="again-1",
           topics=["flights"], to="flights-again", where="tags = 'UA'")
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name of this module

from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, OffsetOutOfRangeError
from sluicemq.model.message import SHARDING_KEY
from sluicemq.model.properties import REFUSED_PROPERTIES
from sluicemq.pipelines.ready import (
    DURATION,
    INTEGER,
    LIST,
    TEXT,
    Field,
    Folder,
    ReadyPipeline,
    Report,
    Task,
    load_messages,
)
from sluicemq.pipelines.sinks.archive_runs import SCHEMA, ArchiveRun, ArchiveRuns
from sluicemq.pipelines.sinks.steps import (
    ORIGIN_COLUMNS,
    SENDING_FIELDS,
    JobState,
    describe_guarantee,
    rows_per_step,
    run_steps,
    write_step,
)
from sluicemq.pipelines.sinks.verify import COLUMNS, rows_in_ranges, verify_rows
from sluicemq.spark.options import parse_options, parse_timestamp
from sluicemq.spark.schema import BAD_BODY_RAW, ERROR_NAME
from sluicemq.spark.sources.checkpoints import Offsets, iterate_table, offsets_to_table
from sluicemq.spark.sources.offsets import (
    Bounds,
    QueueRange,
    fetch_bounds,
    open_admin,
    parse_topics,
    queue_label,
)

REPLAYS: Final = "_sluice/replays"
NEW = "new"
ALL = "all"
NONE = "none"
"""What a run verifies."""
DAY: Final = "date_from_unix_date(cast(unix_millis(store_time) div 86400000 as int)) as day"
"""The expression of the column `day`."""
TASK_ROWS_MAX: Final = 250_000
"""The most offsets that one task reads."""
GAPS_SHOWN_MAX: Final = 5
MS_PER_DAY: Final = 86_400_000
_SESSION_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Keep one writer open for each directory instead of sorting the rows of each task: the rows of
    # a queue have few different days.
    "spark.sql.optimizer.plannedWrite.enabled": "false",
    "spark.sql.maxConcurrentOutputFileWriters": "32",
}


def read_archive(spark: Any, path: str) -> Any:
    """Return the messages of the archive at `path` as a DataFrame with the columns of `SCHEMA`.

    Files of the last run that are still staged are moved first. Raises ConfigurationError if the
    archive does not exist.
    """
    folder = Folder(spark, path)
    runs = ArchiveRuns(folder)
    if runs.last is None:
        raise ConfigurationError(
            f"there is no archive at {folder.path}.", fix="Run the pipeline `archive` first."
        )
    runs.finish_last_run()
    return spark.read.schema(SCHEMA).parquet(folder.path)


# ---- archiving


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """What a run reads from the brokers.

    `ranges` are the offsets of each queue that has some. `bounds` are the lowest and highest offset
    of every queue of the topics. `gaps` are offsets that were deleted before they were archived.
    """

    ranges: tuple[QueueRange, ...]
    bounds: Bounds
    gaps: tuple[QueueRange, ...] = ()

    @classmethod
    def create(cls, task: Task, next_offsets: Offsets) -> "ArchivePlan":
        """Return the plan of a run that continues at `next_offsets`: which offsets it archives.

        A queue that is not in `next_offsets` begins at its first stored offset. Messages that were
        deleted before they were archived are listed as gaps. Raises ConfigurationError if the
        options name no topic, or if an offset is beyond the end of its queue, which means that the
        topic was created again, and the client's errors.
        """
        options = parse_options({**task.connection, **_select_topics(task)})
        with open_admin(options) as admin:
            bounds = fetch_bounds(admin, parse_topics(options).resolve(admin))
        ranges = []
        gaps = []
        for queue, (lowest, end) in sorted(bounds.items()):
            start = next_offsets.get(queue, lowest)
            if start > end:
                raise ConfigurationError(
                    f"the archive contains {queue_label(queue)} of {queue.topic!r} up to offset"
                    f" {start}, but the queue at the broker ends at {end}: the topic was created"
                    " again, or messages were lost.",
                    fix="Archive it to another path.",
                )
            if start < lowest:
                # The broker has deleted messages that were not archived yet.
                gaps.append(QueueRange(queue, start, lowest))
                start = lowest
            if start < end:
                ranges.append(QueueRange(queue, start, end))
        return cls(tuple(ranges), bounds, tuple(gaps))

    @classmethod
    def for_verification(cls, runs: ArchiveRuns, bounds: Bounds) -> "ArchivePlan":
        """Return a plan that reads the messages which are archived and still at the brokers.

        `bounds` are the first and the end offset of each queue at the brokers.
        """
        ranges = []
        for queue, archived_end in sorted(runs.next_offsets.items()):
            lowest, broker_end = bounds.get(queue, (0, 0))
            start = max(lowest, runs.first_offsets[queue])
            end = min(archived_end, broker_end)
            if start < end:
                ranges.append(QueueRange(queue, start, end))
        return cls(tuple(ranges), bounds)

    @property
    def topics(self) -> list[str]:
        """The sorted topics that have a range."""
        return sorted({planned.queue.topic for planned in self.ranges})

    @property
    def offset_count(self) -> int:
        """The number of offsets in all ranges."""
        return sum(planned.size for planned in self.ranges)

    def ranges_of(self, topic: str) -> list[QueueRange]:
        """Return the ranges of the queues of a topic."""
        return [planned for planned in self.ranges if planned.queue.topic == topic]

    def describe_gaps(self) -> str:
        """Return a text with the number of messages that were deleted before they were archived.

        It also lists the first gaps, ranges of offsets of a queue.
        """
        listed = ", ".join(
            f"{queue_label(gap.queue)} of {gap.queue.topic!r} offsets {gap.start} to {gap.end - 1}"
            for gap in self.gaps[:GAPS_SHOWN_MAX]
        )
        count = sum(gap.size for gap in self.gaps)
        return f"{count:,} messages were deleted before they were archived: {listed}"

    def load_rows(self, task: Task, spark: Any) -> Any:
        """Return the planned messages as a DataFrame with the columns `COLUMNS`.

        `spark` is the session that reads them. A body that cannot be decompressed is returned as it
        is stored.
        """
        topics = self.topics
        starts: Offsets = {}
        ends: Offsets = {}
        for queue, (_, end) in self.bounds.items():
            if queue.topic in topics:
                # The source needs offsets of every queue. One without a range is read from its end
                # to its end.
                starts[queue] = end
                ends[queue] = end
        for planned in self.ranges:
            starts[planned.queue] = planned.start
            ends[planned.queue] = planned.end
        return load_messages(
            spark,
            task.connection,
            topics=",".join(topics),
            columns=",".join(COLUMNS),
            properties="all",
            badBody=BAD_BODY_RAW,
            startingOffsets=json.dumps(offsets_to_table(starts, by_topic=True)),
            endingOffsets=json.dumps(offsets_to_table(ends, by_topic=True)),
            maxRecordsPerPartition=str(TASK_ROWS_MAX),
        )


def _select_topics(task: Task) -> dict[str, str]:
    """Return the options of the source that select the topics to archive.

    Raises ConfigurationError if the task names neither topics nor a pattern.
    """
    topic_names = ",".join(task.options["topics"])
    pattern = task.options["pattern"]
    if not topic_names and not pattern:
        raise ConfigurationError(
            "no topic is named.", fix="Set topics, or a pattern that their names match."
        )
    source_options = {}
    if topic_names:
        source_options["topics"] = topic_names
    if pattern:
        source_options["topicsPattern"] = pattern
    return source_options


def _run_once(task: Task) -> Report:
    """Archive the messages since the last run, verify them, and return the report.

    The option `verify` says which rows are compared with the brokers. Raises OffsetOutOfRangeError
    if messages were deleted before they were archived and `on_gap` is "fail", StoreDamagedError if
    the verification finds a difference, and ConfigurationError for wrong options.
    """
    spark = task.spark.newSession()
    for setting, setting_value in _SESSION_SETTINGS.items():
        spark.conf.set(setting, setting_value)
    runs = ArchiveRuns(Folder(task.spark, task.options["path"]))
    runs.recover()
    report = Report(figures={"rows": 0, "verified": 0}, files=[runs.folder.path])
    planned = ArchivePlan.create(task, runs.next_offsets)
    if planned.gaps:
        _report_gaps(task, planned, report)
    if planned.offset_count:
        _write_run(spark, task, runs, planned, report)
    else:
        task.report_lines(report, "nothing new: the archive is complete")
    if task.options["verify"] == ALL:
        _verify_archive(spark, task, runs, planned.bounds, report)
    return report


def _report_gaps(task: Task, planned: ArchivePlan, report: Report) -> None:
    """Report the messages that were deleted before they were archived.

    Their number becomes the figure `lost`. If the option `on_gap` is "fail", raise
    OffsetOutOfRangeError instead.
    """
    if task.options["on_gap"] == "fail":
        raise OffsetOutOfRangeError(
            f"{planned.describe_gaps()}.",
            fix="Set on_gap: note to continue with the remaining messages, and archive more often.",
        )
    task.say(planned.describe_gaps())
    report.figures["lost"] = sum(gap.size for gap in planned.gaps)


def _verify_archive(
    spark: Any, task: Task, runs: ArchiveRuns, bounds: Bounds, report: Report
) -> None:
    """Compare the whole archive with the messages that are still at the brokers.

    `bounds` are the first and the end offset of each queue at the brokers. The number of compared
    rows is added to `report`. Raises StoreDamagedError if they differ.
    """
    comparable = ArchivePlan.for_verification(runs, bounds)
    if not comparable.ranges:
        task.report_lines(report, "no message of the archive is still at the brokers")
        return
    ranges = [(*verified.queue, verified.start, verified.end) for verified in comparable.ranges]
    archived_rows = spark.read.schema(SCHEMA).parquet(runs.folder.path)
    archived_rows = rows_in_ranges(archived_rows, ranges)
    row_count = verify_rows(comparable.load_rows(task, spark), archived_rows)
    report.figures["verified"] = row_count
    task.report_lines(
        report, f"verified {row_count:,} rows: all that are archived and still at the brokers"
    )


def _write_run(
    spark: Any, task: Task, runs: ArchiveRuns, planned: ArchivePlan, report: Report
) -> None:
    """Write the planned messages to a staging directory, verify them, and commit the run.

    The option `verify` may switch the verification off. If it finds a difference, StoreDamagedError
    is raised, and nothing is committed. Raises ConfigurationError if another run has committed
    meanwhile. Lines and figures are added to `report`.
    """
    started_s = SYSTEM_CLOCK.monotonic_s()
    run_number, staging = runs.new_staging()
    files, staged_rows = _stage_rows(spark, task, runs.folder, planned, staging)

    # Verify before the commit: if the rows differ, this raises, and the staged rows never count.
    is_verified = task.options["verify"] != NONE
    if is_verified:
        row_count = verify_rows(planned.load_rows(task, spark), staged_rows)
    else:
        row_count = staged_rows.count()

    first_offsets, next_offsets = _advance_offsets(runs, planned)
    committed_run = ArchiveRun(
        number=run_number,
        time=datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).isoformat(),
        ranges=planned.ranges,
        first_offsets=first_offsets,
        next_offsets=next_offsets,
        rows=row_count,
        is_verified=is_verified,
        files=files,
        staging=staging,
        gaps=planned.gaps,
    )
    runs.commit(committed_run)
    _report_run(task, report, committed_run, planned, SYSTEM_CLOCK.monotonic_s() - started_s)


def _stage_rows(
    spark: Any, task: Task, folder: Folder, planned: ArchivePlan, staging: str
) -> tuple[tuple[str, ...], Any]:
    """Write the planned messages to the directory `staging` of the archive `folder`.

    Return (names of the Parquet files, DataFrame that reads them). The names are relative to
    `staging`.
    """
    staging_path = folder.full_path(staging)
    writer = planned.load_rows(task, spark).selectExpr("*", DAY).write.partitionBy("topic", "day")
    writer = writer.option("compression", task.options["compression"])
    writer = writer.option("maxRecordsPerFile", str(task.options["rows_per_file"]))
    writer.parquet(staging_path)

    files = tuple(folder.list_files(staging, ".parquet"))
    if not files:
        return files, spark.createDataFrame([], SCHEMA)
    return files, spark.read.schema(SCHEMA).parquet(staging_path)


def _advance_offsets(runs: ArchiveRuns, planned: ArchivePlan) -> tuple[Offsets, Offsets]:
    """Return the first archived offset and the next offset of each queue after the planned run."""
    first_offsets = dict(runs.first_offsets)
    next_offsets = dict(runs.next_offsets)
    for archived in planned.ranges:
        first_offsets.setdefault(archived.queue, archived.start)
        next_offsets[archived.queue] = archived.end
    return first_offsets, next_offsets


def _report_run(
    task: Task, report: Report, run: ArchiveRun, planned: ArchivePlan, duration_s: float
) -> None:
    """Add the lines and figures of a committed run to `report`.

    `duration_s` is the time that the run took.
    """
    report.figures["rows"] += run.rows
    verification = "not verified"
    if run.is_verified:
        report.figures["verified"] += run.rows
        verification = f"verified {run.rows:,} rows"
    rows_per_s = run.rows / max(duration_s, 0.001)
    task.report_lines(
        report,
        f"run {run.number}: archived {run.rows:,} rows of {len(planned.topics)} topics in"
        f" {len(run.files)} files, {verification} ({rows_per_s:,.0f} rows/s)",
    )
    empty_count = planned.offset_count - run.rows
    if empty_count > 0:
        task.report_lines(report, f"{empty_count:,} offsets contained no message")


# ---- replaying

_REFUSED: Final = ", ".join(f"'{name}'" for name in sorted(REFUSED_PROPERTIES))
OWN_PROPERTIES: Final = (
    f"map_filter(properties, (name, value) -> name not in ({_REFUSED})"
    " and not startswith(name, '__RMQ.'))"
)
"""The expression of the properties that a producer may set itself."""
_FIXED_OPTIONS: Final = (
    "path",
    "topics",
    "to",
    "where",
    "since",
    "until",
    "queues",
    "ids",
    "delivery",
)
"""The options that must not change when a replay is resumed."""


def _open_replay(task: Task) -> tuple[JobState, Any]:
    """Return the state of a replay, and a DataFrame of all its rows, whether sent or not.

    A replay sends archived messages to topics. The state file of a new replay is not written yet.
    Raises ConfigurationError if the name or a time is invalid, if there is no archive, or if the
    replay was started with other options.
    """
    archive_path = task.options["path"]
    rows = read_archive(task.spark, archive_path)
    archive_ends = ArchiveRuns(Folder(task.spark, archive_path)).next_offsets
    state = _resume_replay(task, archive_ends)
    rows = _select_replay_rows(task, rows)
    # The limits are the end offsets of the archive when the replay began.
    limits = sorted(iterate_table(state["limits"]))
    return state, rows_in_ranges(rows, [(*queue, 0, end) for queue, end in limits])


def _resume_replay(task: Task, archive_ends: Offsets) -> JobState:
    """Return the state of the replay that the task names, from its file if there is one.

    A new replay is limited to `archive_ends`, the present end offsets of the archive. Its state
    file is not written yet. Raises ConfigurationError if the name is invalid, or if the replay was
    started with other options.
    """
    options = task.options
    replay_name = options["name"]
    if "/" in replay_name or not replay_name:
        raise ConfigurationError(
            f"the name {replay_name!r} is invalid.", fix="Use letters, digits and -."
        )
    if options["state"]:
        state = JobState(Folder(task.spark, options["state"]), f"{replay_name}.json")
    else:
        state = JobState(Folder(task.spark, options["path"]), f"{REPLAYS}/{replay_name}.json")

    fixed_options = {key: options[key] for key in _FIXED_OPTIONS}
    fixed_options["topics"] = list(options["topics"])
    is_resumed = state.resume(replay_name, fixed_options)
    if not is_resumed:
        state.document |= {
            "limits": offsets_to_table(archive_ends, by_topic=True),
            "query": f"replay-{replay_name}",
            "step_rows": rows_per_step(float(options["rate"]), options["step"]),
        }
    return state


def _select_replay_rows(task: Task, rows: Any) -> Any:
    """Return the rows of an archive that `topics`, `since`, `until` and `where` select.

    An option that is not set selects all rows. `since` is the first store time that is selected,
    and `until` the first one after it that is not. Raises ConfigurationError if one of the times is
    invalid.
    """
    options = task.options
    if options["topics"]:
        rows = rows.where(F.col("topic").isin(list(options["topics"])))
    # The day is a directory, so its condition lets Spark skip whole directories. `until` needs <=
    # there, because a part of its day may be before it.
    if options["since"]:
        since_ms = _parse_time_option(task, "since")
        rows = rows.where(f"store_time >= timestamp_millis({since_ms})")
        rows = rows.where(f"day >= date_from_unix_date({since_ms // MS_PER_DAY})")
    if options["until"]:
        until_ms = _parse_time_option(task, "until")
        rows = rows.where(f"store_time < timestamp_millis({until_ms})")
        rows = rows.where(f"day <= date_from_unix_date({until_ms // MS_PER_DAY})")
    if options["where"]:
        rows = rows.where(options["where"])
    return rows


def _parse_time_option(task: Task, option: str) -> int:
    """Return the time in an option, in milliseconds since 1970.

    Raises ConfigurationError if the time is invalid.
    """
    try:
        return parse_timestamp(str(task.options[option]))
    except ValueError as error:
        raise ConfigurationError(
            f"the option {option!r} has the invalid value {task.options[option]!r}: {error}."
        ) from None


def _split_off_undecodable(rows: Any) -> tuple[Any, int]:
    """Return the rows whose bodies could be decoded, and the number of the other rows."""
    return rows.where(f"{ERROR_NAME} is null"), rows.where(f"{ERROR_NAME} is not null").count()


def _describe_undecodable(message_count: int) -> str:
    """Return the line about messages that are not sent, because their bodies cannot be decoded."""
    return (
        f"left out: {message_count:,} messages whose bodies cannot be decoded; the archive has"
        f" their stored bytes ({ERROR_NAME} is not null)"
    )


def _build_step_sender(task: Task, state: JobState) -> Callable[[int, Any], None]:
    """Return a function (step number, rows) that sends the rows of one step."""
    columns = _choose_sink_columns(task)
    sink_options = {"delivery": task.options["delivery"]}
    if task.options["to"]:
        sink_options["topic"] = task.options["to"]

    def send_step(step_number: int, step_rows: Any) -> None:
        sink_rows = step_rows.selectExpr(*columns)
        write_step(sink_rows, task.connection, state["query"], step_number, **sink_options)

    return send_step


def _choose_sink_columns(task: Task) -> list[str]:
    """Return the expressions of the columns that are sent, for the options of the replay.

    The topic is a column only if the option `to` names no topic. The queue and the message id are
    columns only if the options ask for the same ones as before.
    """
    columns = [
        "body",
        "tags",
        "keys",
        f"{OWN_PROPERTIES} as properties",
        f"properties['{SHARDING_KEY}'] as sharding_key",
        *ORIGIN_COLUMNS,
    ]
    if not task.options["to"]:
        columns.append("topic")
    if task.options["queues"] == "same":
        columns.append("queue_id")
    if task.options["ids"] == "same":
        columns.append("msg_id as message_id")
    return columns


# ---- the ready pipelines


def _pause(task: Task, pause_s: float) -> None:
    """Wait `pause_s` seconds, or until the task is stopped, which is checked every 0.5 s."""
    end_s = SYSTEM_CLOCK.monotonic_s() + pause_s
    while SYSTEM_CLOCK.monotonic_s() < end_s and not task.stopping():
        threading.Event().wait(min(0.5, pause_s))


class Archive(ReadyPipeline):
    """Archive the messages of topics since the last run.

    Raises ConfigurationError, OffsetOutOfRangeError if messages were deleted before they were
    archived and `on_gap` is "fail", StoreDamagedError if verification finds a difference (the rows
    of the run are discarded then), and the client's errors.
    """

    name = "archive"
    description = "Topics to partitioned Parquet, whole messages, incremental, verified row by row."
    fields = (
        Field("path", TEXT, "Directory of the archive, on any file system that Spark writes to."),
        Field("topics", LIST, "Topics to archive.", ()),
        Field(
            "pattern",
            TEXT,
            "Archive all topics whose whole name matches; `%DLQ%.*` is dead letters.",
            "",
        ),
        Field(
            "verify",
            TEXT,
            "Rows to compare with the brokers: those of this run before they count, all that are"
            " still at the brokers, or none.",
            NEW,
            (NEW, ALL, NONE),
        ),
        Field(
            "on_gap",
            TEXT,
            "If messages were deleted before they were archived: fail, or note them and continue.",
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
        Field("rows_per_file", INTEGER, "Maximum number of rows of one file.", 1_000_000),
        Field(
            "every", DURATION, "Pause between runs, repeated until stopped; 0 means one run.", 0.0
        ),
    )

    def plan(self, task: Task) -> list[str]:
        """Return lines about what `run` would archive: one for each topic with new messages.

        If messages were deleted before they were archived, the first line is about these.
        """
        runs = ArchiveRuns(Folder(task.spark, task.options["path"]))
        planned = ArchivePlan.create(task, runs.next_offsets)
        lines = []
        if planned.gaps:
            lines.append(planned.describe_gaps())
        for topic in planned.topics:
            sizes = [planned_range.size for planned_range in planned.ranges_of(topic)]
            lines.append(f"archive {sum(sizes):,} messages of {len(sizes)} queues of {topic!r}")
        return lines or ["nothing new: the archive is complete"]

    def run(self, task: Task) -> Report:
        """Archive once, or repeat it with the option `every`, and return the report.

        A repetition begins after a pause of `every` seconds, until the task is stopped. The report
        has the lines of the last run, and the sums of the figures of all runs.
        """
        report = _run_once(task)
        pause_s = float(task.options["every"])
        while pause_s and not task.stopping():
            _pause(task, pause_s)
            if not task.stopping():
                next_report = _run_once(task)
                report.lines = next_report.lines
                for name, figure in next_report.figures.items():
                    report.figures[name] = report.figures.get(name, 0) + figure
        return report


class Replay(ReadyPipeline):
    """Send messages of an archive again. A replay that was stopped is resumed under its name.

    Raises ConfigurationError, also if a replay of this name was started with other options, and the
    errors of the sink.
    """

    name = "replay"
    description = "An archive back into topics: ranges and filters, paced, resumable, exactly once."
    fields = (
        Field("path", TEXT, "The archive."),
        Field("name", TEXT, "Name of this replay; running it again under this name resumes it."),
        Field("topics", LIST, "Topics to replay; the default is all of the archive.", ()),
        Field("to", TEXT, "Topic to send to; the default is the topic of each message.", ""),
        Field("where", TEXT, "Spark SQL predicate on the columns of the archive.", ""),
        Field("since", TEXT, "First store time: ISO 8601 or milliseconds.", ""),
        Field("until", TEXT, "Store time at which the replay ends, exclusive.", ""),
        Field("queues", TEXT, "Any queue, or the same queue id as before.", "any", ("any", "same")),
        Field("ids", TEXT, "New message ids, or the same as before.", "new", ("new", "same")),
        *SENDING_FIELDS,
        Field("state", TEXT, "Directory of the replay's state; the default is the archive.", ""),
    )

    def plan(self, task: Task) -> list[str]:
        """Return lines about what `run` would send: one for each topic with messages to send.

        Further lines say what was sent already, what is left out, and the delivery guarantee.
        """
        state, rows = _open_replay(task)
        rows, undecodable_count = _split_off_undecodable(rows)
        topic_counts = rows.groupBy("topic").agg(
            F.expr("count(1) as n"),
            F.expr("min(store_time) as first"),
            F.expr("max(store_time) as last"),
        )
        lines = [
            f"send {row['n']:,} messages of {row['topic']!r}, stored"
            f" {row['first']:%Y-%m-%d %H:%M:%S} to {row['last']:%Y-%m-%d %H:%M:%S}, to"
            f" {task.options['to'] or row['topic']!r}"
            for row in topic_counts.orderBy("topic").limit(100).collect()
        ]
        if state["steps"]:
            lines.append(f"{state['rows']:,} of them have been sent, in {state['steps']} steps")
        lines = lines or ["no message to send"]
        if undecodable_count:
            lines.append(_describe_undecodable(undecodable_count))
        return [*lines, describe_guarantee(task.connection, task.options["delivery"])]

    def run(self, task: Task) -> Report:
        """Send the messages that are not sent yet, step by step, and return the report.

        The run ends when all are sent or the task is stopped. A later run continues.
        """
        state, rows = _open_replay(task)
        if not state["steps"]:
            state.start()
        rows, undecodable_count = _split_off_undecodable(rows)
        report = Report(figures={"rows": 0}, files=[state.folder.full_path(state.file_name)])
        if undecodable_count:
            report.figures["undecodable"] = undecodable_count
            task.report_lines(report, _describe_undecodable(undecodable_count))
        task.report_lines(report, describe_guarantee(task.connection, task.options["delivery"]))

        all_sent = run_steps(task, state, report, rows, _build_step_sender(task, state))
        ending = "all messages are sent" if all_sent else "stopped; run it again to continue"
        task.report_lines(report, f"sent {report.figures['rows']:,} messages; {ending}")
        return report


archive: Final = Archive()
replay: Final = Replay()
