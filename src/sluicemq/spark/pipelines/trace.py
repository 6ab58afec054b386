"""The ready pipeline `trace`: what clients traced, as latency, failures, slow and lost deliveries.

    trace topic -> events (a row a record) -> OUTPUT/events -> tables -> OUTPUT/…, lines, a chart

Reads the traces of Python and of Java clients. Events, sends and deliveries are written first and
the tables computed from those files, so the topic is read once; only aggregates come to the driver.
What the tables mean: `trace_tables`.

    tables = trace(spark, {"nameServers": "127.0.0.1:9876"}, output="out/trace")
    tables.latency.show()
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sluicemq.client.core.tracing import DEFAULT_TRACE_TOPIC
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import RequestError, RouteNotFoundError
from sluicemq.filter.subscriptions import is_tag_kind
from sluicemq.spark.cluster import open_admin
from sluicemq.spark.options import parse_options
from sluicemq.spark.pipelines.printing import table_lines
from sluicemq.spark.pipelines.ready import (
    DURATION,
    FLAG,
    INTEGER,
    LIST,
    REQUIRED,
    TEXT,
    Field,
    Ready,
    Report,
    Task,
)
from sluicemq.spark.pipelines.subscribed import SYSTEM_PREFIXES, subscriptions_of
from sluicemq.spark.pipelines.trace_chart import PANELS_MAX, Hour, draw_latency

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sluicemq.spark.pipelines.trace_tables import Pair, TraceTables

PAIRS_MAX: Final = 1_000
HOURS_SHOWN_MAX: Final = 24 * 31
ROWS_MAX: Final = 50_000
"""Of a table: all that ever comes to the driver."""
_FIGURES: Final = {
    "failures": {"failures": "failed"},
    "unconsumed": {"never": "never_delivered"},
    "consuming": {"slow": "slow_deliveries"},
}
_SHOWN: Final = ("latency", "failures", "consuming", "unconsumed")
_TITLES: Final = {
    "latency": "Delivery latency by topic, group and hour",
    "failures": "Failures by topic, group and cause",
    "consuming": "Cost of handlers by topic and group, the slow ones first",
    "unconsumed": "Sent and never delivered to the group",
}


def read_events(
    spark: "SparkSession",
    connection: Mapping[str, str],
    *,
    topic: str = DEFAULT_TRACE_TOPIC,
    begin: str | None = None,
    end: str | None = None,
) -> "DataFrame":
    """The events of a trace topic, one row each: `time` is the client's clock, `told` when the
    broker stored the trace. `begin` and `end` are store times, milliseconds since 1970 or ISO 8601.
    """
    from pyspark.sql import functions  # noqa: PLC0415 - not for a list of pipelines

    from sluicemq.spark.pipelines import trace_rows  # noqa: PLC0415 - pyarrow

    options = {"topic": topic, "columns": "body,store_time"} | dict(connection)
    options |= {"startingTimestamp": begin} if begin else {}
    options |= {"endingTimestamp": end} if end else {}
    messages = spark.read.format("rocketmq").options(**options).load()
    decode = functions.arrow_udf(trace_rows.decoded, trace_rows.SCHEMA)  # without pandas
    events = messages.select(functions.explode(decode("body")).alias("event"), "store_time")
    return events.selectExpr(
        "timestamp_millis(event.time_ms) as time", "event.*", "store_time as told"
    ).drop("time_ms")


def trace(
    spark: "SparkSession",
    connection: Mapping[str, str],
    *,
    output: str,
    topic: str = DEFAULT_TRACE_TOPIC,
    begin: str | None = None,
    end: str | None = None,
    groups: Sequence[str] = (),
    settle_s: float = 60.0,
    slow_s: float = 1.0,
) -> "TraceTables":
    """Writes the events under `output` and gives the tables over them, not computed yet.

    `groups`: only these are asked about unconsumed messages; without, all that traced a delivery.
    What was sent in the last `settle_s` before the newest event is not counted as unconsumed.
    """
    from sluicemq.spark.pipelines import trace_tables  # noqa: PLC0415 - pyspark

    def kept(frame: "DataFrame", name: str) -> "DataFrame":
        path = f"{output.rstrip('/')}/{name}"
        frame.write.mode("overwrite").parquet(path)
        return spark.read.schema(frame.schema).parquet(path)

    found = read_events(spark, connection, topic=topic, begin=begin, end=end)
    events = kept(found, "events")
    sends = kept(trace_tables.sends_of(events), "sends")
    deliveries = kept(trace_tables.deliveries_of(events, sends), "deliveries")
    newest = events.selectExpr("max(unix_millis(time))").collect()[0][0]
    told = trace_tables.traced_pairs(deliveries, PAIRS_MAX)
    wanted = [(topic, group) for topic, group in told if not groups or group in groups]
    return trace_tables.trace_tables(
        events, sends, deliveries, _with_filters(connection, wanted),
        until_ms=(newest or 0) - int(settle_s * 1000), slow_ms=int(slow_s * 1000),
    )  # fmt: skip


def _with_filters(connection: Mapping[str, str], pairs: Sequence[tuple[str, str]]) -> "list[Pair]":
    """With the filters that the groups have now, as far as brokers know them."""
    from sluicemq.spark.pipelines.trace_tables import Pair  # noqa: PLC0415 - pyspark

    with open_admin(parse_options(connection)) as admin:
        known = {
            one.group: one for one in subscriptions_of(admin, sorted({group for _, group in pairs}))
        }
    found = []
    for topic, group in pairs:
        said = known[group].wanted(topic)
        tags = {tag for one in said for tag in one.tags}
        is_by_tags = bool(said) and all(is_tag_kind(one.kind) and one.tags for one in said)
        expression = "; ".join(one.expression for one in said) or None
        found.append(Pair(topic, group, tuple(sorted(tags)) if is_by_tags else (), expression))
    return found


# ------------------------------------------------------------------------- the ready pipeline


def _run(task: Task) -> Report:
    options, say = task.options, task.say
    output = options["output"].rstrip("/")
    say(f"reading {options['topic']}, writing {output}")
    tables = trace(
        task.spark, task.connection, output=output, topic=options["topic"],
        begin=_begin(options), end=options["end"], groups=options["groups"],
        settle_s=options["settle"], slow_s=options["slow"],
    )  # fmt: skip
    report = Report(files=[f"{output}/{name}" for name in ("events", "sends", "deliveries")])
    counts = tables.events.groupBy("kind").count().collect()
    report.figures = {f"events_{kind}": count for kind, count in sorted(counts)}
    if not counts:
        report.lines.append(f"{options['topic']} has no traces of that time.")
    for name in _SHOWN:
        if not task.stopping():
            rows = _table(task, report, name, getattr(tables, name), output)
            if name == "latency" and options["chart"]:
                _chart(report, rows, output)
    if not task.stopping():
        tables.missing.write.mode("overwrite").parquet(f"{output}/missing")
        report.files.append(f"{output}/missing")
        _add_silent(task, report, tables)
    for line in report.lines:
        say(line)
    return report


def _begin(options: Mapping[str, Any]) -> str | None:
    if options["since"] is not None:
        return str(SYSTEM_CLOCK.now_ms() - int(options["since"] * 1000))
    found: str | None = options["begin"]
    return found


def _table(task: Task, report: Report, name: str, frame: "DataFrame", output: str) -> list[Any]:
    """Computes a table, writes and shows it; its rows, which are aggregates."""
    rows: list[Any] = frame.limit(ROWS_MAX).collect()
    path, kind = f"{output}/{name}", task.options["format"]
    written = task.spark.createDataFrame(rows, frame.schema).coalesce(1).write.mode("overwrite")
    (written.option("header", "true") if kind == "csv" else written).format(kind).save(path)
    report.files.append(path)
    shown = task.options["rows"]
    report.lines += table_lines(_TITLES[name], frame.columns, rows[:shown])
    if len(rows) > shown:
        report.lines.append(f"  … and {len(rows) - shown:,} more in {path}")
    report.figures[name] = len(rows)
    for column, figure in _FIGURES.get(name, {}).items():
        report.figures[figure] = sum(row[column] for row in rows)
    return rows


def _chart(report: Report, rows: Sequence[Any], output: str) -> None:
    if "://" in output:
        report.lines.append("The chart is not drawn: it can be written to a local path alone.")
        return
    panels: dict[str, list[Hour]] = defaultdict(list)
    for row in rows:
        panels[f"{row['topic']} -> {row['group']}"].append(
            Hour(*map(row.__getitem__, Hour._fields))
        )
    biggest = sorted(panels, key=lambda title: -sum(hour.messages for hour in panels[title]))
    path = f"{output}/latency.png"
    draw_latency(
        path, [(title, panels[title][-HOURS_SHOWN_MAX:]) for title in biggest[:PANELS_MAX]]
    )
    report.files.append(path)


def _add_silent(task: Task, report: Report, tables: "TraceTables") -> None:
    """Groups of the traced topics that have traced nothing: nothing can be said of them."""
    topics = tables.sends.select("topic").distinct().orderBy("topic").limit(PAIRS_MAX).collect()
    told = {
        row[0] for row in tables.deliveries.select("group").distinct().limit(PAIRS_MAX).collect()
    }
    with open_admin(parse_options(task.connection)) as admin:
        for topic in [row[0] for row in topics if row[0]]:
            silent = [name for name in _readers(admin, topic) if name not in told]
            if silent:
                report.lines.append(
                    f"Not known: whether {', '.join(silent)} got messages of {topic}: nothing was "
                    "traced (trace=True, in Java enableMsgTrace)."
                )


def _readers(admin: Admin, topic: str) -> list[str]:
    try:
        names = admin.groups_of_topic(topic)
    except (RouteNotFoundError, RequestError):
        return []
    return [name for name in names if not name.startswith(SYSTEM_PREFIXES)]


def _plan(task: Task) -> list[str]:
    options = task.options
    with open_admin(parse_options(task.connection)) as admin:
        queues = admin.queues(options["topic"])
        stored = sum(high - low for low, high in map(admin.offsets, queues))
    lines = [
        f"read {options['topic']}: {stored:,} trace messages in {len(queues)} queues",
        f"write {options['output']}/events, sends, deliveries, missing (Parquet)",
        f"write {options['output']}/{', '.join(_SHOWN)} ({options['format']})",
    ]
    return [*lines, f"draw {options['output']}/latency.png"] if options["chart"] else lines


TRACE: Final = Ready(
    "trace",
    "Delivery latency, failures, slow consumers and lost messages out of the traces of clients.",
    (
        Field("output", TEXT, "Directory of the results; what is there is replaced.", REQUIRED),
        Field("topic", TEXT, "Topic of the traces.", DEFAULT_TRACE_TOPIC),
        Field("since", DURATION, "Only what was traced in the last time, such as 24h.", None),
        Field("begin", TEXT, "First store time: milliseconds or ISO 8601.", None),
        Field("end", TEXT, "Store time where reading ends, exclusive.", None),
        Field("groups", LIST, "Only these groups are asked about lost messages.", ()),
        Field("settle", DURATION, "What was sent so shortly before the end is not lost yet.", 60.0),
        Field("slow", DURATION, "A handler that takes so long is slow.", 1.0),
        Field("format", TEXT, "Format of the tables.", "parquet", ("parquet", "csv")),
        Field("rows", INTEGER, "Rows shown of each table.", 20),
        Field("chart", FLAG, "Draw latency.png (matplotlib).", True),
    ),
    _plan,
    _run,
)
