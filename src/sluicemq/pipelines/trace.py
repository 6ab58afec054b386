"""The ready pipeline `trace`: latency, failures, slow handlers and lost messages from traces.

    trace topic -> events (a row for each record) -> OUTPUT/events -> tables -> OUTPUT/…, lines,
    a chart

Traces of Python and of Java clients are read. Events, sends and deliveries are written first, and
the tables are computed from these files, so the topic is read once. Only aggregates come to the
driver.

    events      one row for each record
    sends       one for each message: when it was first sent, and when it was committed
    deliveries  one for each delivery: SubBefore and SubAfter with the same request and message
    journeys    one for each message and group: its first delivery, the number of deliveries, and
                whether it was consumed

    latency     journeys by topic, group and hour: from the send to the first delivery
    failures    sends and deliveries by topic, group and cause
    consuming   the duration of handlers, by topic and group, the slow ones first
    unconsumed  messages that were sent and never delivered to a group, by topic and group

A trace message contains up to a hundred records (`model.trace_records`). The Python workers of the
executors decode them, one Arrow array of bodies at a time. Java writes one `Pub` record for a whole
batch, with all message ids in one field; it becomes a row for each id. Records that cannot be
decoded become rows of the kind `Unread`, so that they are counted.

Clients may write an event twice (if they repeat the send of a trace message), and Java writes a
record for each attempt of a send. So everything is grouped by its ids before it is counted. Records
of consumers do not contain the topic. It is taken from the message's `Pub`, and null if the
producer does not trace. Latency leaves out delayed messages, and counts from the commit for
transactional ones. The clocks of two machines may differ: a delivery before its send is counted as
`before_sent`.

    tables = trace(spark, {"nameServers": "127.0.0.1:9876"}, output="out/trace")
    tables.latency.show()
"""

import importlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name of this module

from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, RequestError, RouteNotFoundError, install_extra
from sluicemq.filter.subscriptions import is_tag_kind
from sluicemq.model.subscription import Subscription
from sluicemq.model.system_names import TRACE_TOPIC, is_system_group
from sluicemq.model.trace_records import (
    ConsumeTrace,
    DeliveryTrace,
    RecallTrace,
    SendTrace,
    TraceRecord,
    TransactionTrace,
    decode_trace_records,
)
from sluicemq.pipelines.audit import fetch_subscriptions
from sluicemq.pipelines.ready import (
    DURATION,
    FLAG,
    INTEGER,
    LIST,
    REQUIRED,
    TEXT,
    Field,
    ReadyPipeline,
    Report,
    Task,
    format_table,
    load_messages,
)
from sluicemq.spark.options import parse_options
from sluicemq.spark.schema import BAD_BODY_RAW
from sluicemq.spark.sources.offsets import open_admin

PAIRS_MAX: Final = 1_000
"""The number of pairs of topic and group that are examined for lost messages."""
PANELS_MAX: Final = 6
"""The number of pairs of topic and group in the chart."""
HOURS_SHOWN_MAX: Final = 24 * 31
"""The number of hours in a panel of the chart, the newest ones."""
ROWS_MAX: Final = 50_000
"""The number of rows of a table that come to the driver and are written."""

# ---- events

UNREAD: Final = "Unread"
"""The kind of a record that cannot be decoded."""
_KINDS: Final = {
    SendTrace: "Pub",
    DeliveryTrace: "SubBefore",
    ConsumeTrace: "SubAfter",
    TransactionTrace: "EndTransaction",
    RecallTrace: "Recall",
}
"""The kind of each record, as RocketMQ names it in traces."""
_ARROW_TYPES: Final = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
}
_FIELDS: Final = {
    "kind": "string",
    "time_ms": "bigint",
    "topic": "string",
    "group": "string",
    "message_id": "string",
    "request_id": "string",
    "tags": "string",
    "keys": "string",
    "message_kind": "string",
    "success": "boolean",
    "outcome": "string",
    "cost_ms": "int",
    "retry_times": "int",
    "body_length": "int",
    "state": "string",
    "region": "string",
    "store_host": "string",
    "client_host": "string",
    "offset_message_id": "string",
}
"""The columns of an event with their Spark types.

`time_ms` is the time of the client's clock. Columns that a kind of event does not have are null.
"""
_EVENTS: Final = pa.list_(pa.struct([(name, _ARROW_TYPES[kind]) for name, kind in _FIELDS.items()]))
SCHEMA: Final = f"array<struct<{', '.join(f'`{name}`: {kind}' for name, kind in _FIELDS.items())}>>"
"""The Spark type of the result of `decode_bodies`, for each trace message."""


def decode_bodies(bodies: pa.Array) -> pa.Array:
    """Decode an array of trace messages' bodies, and return the list of events of each.

    An event is a dict, as `_to_event` returns it. Each record that cannot be decoded becomes an
    event of the kind UNREAD. A null body has no events. Spark calls this function as an Arrow UDF.
    """
    events_by_body = []
    for body in bodies.to_pylist():
        records, unread_count = decode_trace_records(body or b"")
        events: list[dict[str, Any]] = []
        for record in records:
            events += map(_to_event, _split_batch(record))
        events += [{"kind": UNREAD}] * unread_count
        events_by_body.append(events)
    return pa.array(events_by_body, _EVENTS)


def _split_batch(record: TraceRecord) -> list[TraceRecord]:
    """Return one record for each message of a batch that a Java client traced as one record.

    Such a record has several message ids, separated by commas. A message without an offset message
    id gets None as `offset_message_id`. Any other record is returned in a list of one.
    """
    if not isinstance(record, SendTrace) or "," not in (record.message_id or ""):
        return [record]
    message_ids = (record.message_id or "").split(",")
    offset_ids = (record.offset_message_id or "").split(",")
    # There may be fewer offset message ids than message ids.
    padding = [None] * len(message_ids)
    return [
        replace(record, message_id=message_id, offset_message_id=offset_id)
        for message_id, offset_id in zip(message_ids, [*offset_ids, *padding], strict=False)
    ]


def _to_event(record: TraceRecord) -> dict[str, Any]:
    """Return the record as an event, a dict with the columns of `_FIELDS`.

    Columns that this kind of record does not have are None.
    """
    event = {name: getattr(record, name, None) for name in _FIELDS}
    event |= {"kind": _KINDS[type(record)], "message_kind": None, "outcome": None}
    if isinstance(record, SendTrace | TransactionTrace):
        event["message_kind"] = record.kind.name.lower()
    if isinstance(record, ConsumeTrace):
        event["outcome"] = record.outcome.name.lower().replace("_", " ")
    return event


def read_events(
    spark: SparkSession,
    connection: Mapping[str, str],
    *,
    topic: str = TRACE_TOPIC,
    begin: str | None = None,
    end: str | None = None,
) -> DataFrame:
    """Return the events of a trace topic as a DataFrame with one row for each.

    The columns are `time` (by the client's clock), the fields of an event in `_FIELDS` except
    `time_ms`, and `told`, the time when the broker stored the trace. `begin` and `end` limit the
    store times. They are texts: milliseconds since 1970, or ISO 8601. The end is exclusive, and
    None means no limit.
    """
    # A body that cannot be decompressed cannot be decoded, and is counted as unread.
    options = {"badBody": BAD_BODY_RAW}
    if begin:
        options["startingTimestamp"] = begin
    if end:
        options["endingTimestamp"] = end
    messages = load_messages(spark, connection, topic=topic, columns="body,store_time", **options)
    decode = F.arrow_udf(decode_bodies, SCHEMA)
    events = messages.select(F.explode(decode("body")).alias("event"), "store_time")
    return events.selectExpr(
        "timestamp_millis(event.time_ms) as time", "event.*", "store_time as told"
    ).drop("time_ms")


# ---- tables

_SENDS: Final = """
select message_id, max(topic) as topic,
       max(if(kind = 'Pub', `group`, null)) as producer, max(tags) as tags, max(keys) as keys,
       max(if(kind = 'Pub', message_kind, null)) as message_kind,
       min(if(kind = 'Pub', time, null)) as sent,
       max(if(state = 'COMMIT_MESSAGE', time, null)) as committed,
       coalesce(bool_or(if(kind = 'Pub', success, null)), false) as stored,
       coalesce(bool_or(kind = 'Recall' and success), false) as recalled,
       count_if(kind = 'Pub' and not success) as failed_tries
from {events}
where kind in ('Pub', 'EndTransaction', 'Recall') and message_id is not null
group by message_id having sent is not null
"""
_DELIVERIES: Final = """
select d.*, s.topic, s.tags, s.message_kind,
       if(s.message_kind = 'half', s.committed, s.sent) as sent
from (
  select request_id, message_id, max(`group`) as `group`,
         min(if(kind = 'SubBefore', time, null)) as taken,
         max(if(kind = 'SubAfter', time, null)) as finished,
         count_if(kind = 'SubAfter') > 0 as is_finished,
         max(retry_times) as retry_times, max(cost_ms) as cost_ms,
         bool_or(success) as success, max(outcome) as outcome
  from {events}
  where kind in ('SubBefore', 'SubAfter') and request_id is not null and message_id is not null
  group by request_id, message_id
) d left join {sends} s using (message_id)
"""
_JOURNEYS: Final = """
select message_id, `group`, max(topic) as topic, max(tags) as tags,
       max(message_kind) as message_kind, max(sent) as sent, min(taken) as received,
       count(*) as deliveries, min(retry_times) as first_round,
       coalesce(bool_or(success), false) as consumed
from {deliveries} group by message_id, `group`
"""
_LATENCY: Final = """
select topic, `group`, hour, count(*) as messages,
       {percentiles}, max(latency_ms) as max_ms, count_if(latency_ms < 0) as before_sent
from (
  select topic, `group`, date_trunc('hour', sent) as hour,
         unix_millis(received) - unix_millis(sent) as latency_ms
  from {journeys}
  where sent is not null and received is not null and first_round = 0
    and message_kind <> 'delayed'
) group by topic, `group`, hour order by topic, `group`, hour
"""
_FAILURES: Final = """
select topic, `group`, cause, count(*) as failures, approx_count_distinct(message_id) as messages,
       max(time) as last, max_by(message_id, time) as example
from (
  select topic, `group`, message_id, coalesce(finished, taken) as time,
         if(is_finished, coalesce(outcome, 'failed'), 'no result') as cause
  from {deliveries}
  where if(is_finished, not success, unix_millis(taken) <= {until_ms})
  union all
  select topic, producer, message_id, sent, if(stored, 'send repeated', 'send failed')
  from {sends} where failed_tries > 0
) group by topic, `group`, cause order by failures desc, topic, `group`, cause
"""
_CONSUMING: Final = """
select topic, `group`, count(*) as deliveries, {percentiles}, max(cost_ms) as max_ms,
       count_if(cost_ms >= {slow_ms}) as slow
from {deliveries} where is_finished and cost_ms is not null
group by topic, `group` order by p95_ms desc, topic, `group`
"""
_WANTED: Final = """
select s.message_id, s.topic, p.`group`, s.tags, s.keys, s.sent, p.expression
from {sends} s join {pairs} p on s.topic = p.topic
where s.stored and not s.recalled and s.message_kind <> 'delayed'
  and if(s.message_kind = 'half', s.committed, s.sent) <= timestamp_millis({until_ms})
  and (size(p.tags) = 0 or array_contains(p.tags, s.tags))
"""
_MISSING: Final = """
select w.* from {wanted} w left anti join {journeys} j
on w.message_id = j.message_id and w.`group` = j.`group`
"""
_UNCONSUMED: Final = """
select w.topic, w.`group`, max(w.expression) as filter, count(*) as sent,
       count(j.message_id) as delivered, count_if(j.consumed) as consumed,
       count(*) - count(j.message_id) as never,
       min(if(j.message_id is null, w.message_id, null)) as example
from {wanted} w left join {journeys} j
on w.message_id = j.message_id and w.`group` = j.`group`
group by w.topic, w.`group` order by never desc, w.topic, w.`group`
"""
_ACCURACY: Final = 10_000
"""The accuracy of percentiles: the relative error of the rank is at most 1 / _ACCURACY."""


@dataclass(frozen=True, slots=True)
class TraceTables:
    """The tables over traces, as DataFrames that Spark computes when they are used.

    The module describes them. `missing` has a row for each message and group that `unconsumed`
    counts as `never`.
    """

    events: DataFrame
    sends: DataFrame
    deliveries: DataFrame
    journeys: DataFrame
    latency: DataFrame
    failures: DataFrame
    consuming: DataFrame
    unconsumed: DataFrame
    missing: DataFrame


def trace(
    spark: SparkSession,
    connection: Mapping[str, str],
    *,
    output: str,
    topic: str = TRACE_TOPIC,
    begin: str | None = None,
    end: str | None = None,
    groups: Sequence[str] = (),
    settle_s: float = 60.0,
    slow_s: float = 1.0,
) -> TraceTables:
    """Compute the tables of traces, write some of them under `output`, and return all.

    The events of the trace topic `topic` are read, with store times from `begin` up to, but not
    including, `end`. These are milliseconds since 1970 or ISO 8601, and None means no limit. The
    tables events, sends and deliveries are written as Parquet. The other tables are computed when
    they are used.

    `groups` are the groups that are examined for unconsumed messages; an empty list means all
    groups that traced a delivery. Messages that were sent less than `settle_s` seconds before the
    newest event do not count as unconsumed, because they may still be delivered. Consuming is slow
    if it takes at least `slow_s` seconds. Raises the client's errors.
    """

    def write_and_reload(frame: DataFrame, name: str) -> DataFrame:
        """Write the rows to OUTPUT/name, and return them as read from there."""
        path = f"{output.rstrip('/')}/{name}"
        frame.write.mode("overwrite").parquet(path)
        return spark.read.schema(frame.schema).parquet(path)

    traced_events = read_events(spark, connection, topic=topic, begin=begin, end=end)
    events = write_and_reload(traced_events, "events")
    sends = write_and_reload(spark.sql(_SENDS, events=events), "sends")
    deliveries = write_and_reload(spark.sql(_DELIVERIES, events=events, sends=sends), "deliveries")
    journeys = spark.sql(_JOURNEYS, deliveries=deliveries)

    newest_ms = events.selectExpr("max(unix_millis(time))").collect()[0][0] or 0
    until_ms = newest_ms - int(settle_s * 1000)
    slow_ms = int(slow_s * 1000)
    pairs = spark.createDataFrame(
        _fetch_filters(connection, _find_traced_pairs(deliveries, groups)),
        "topic string, `group` string, tags array<string>, expression string",
    )
    wanted = spark.sql(_WANTED, sends=sends, pairs=pairs, until_ms=until_ms)
    latency_query = _insert_percentiles(_LATENCY, "latency_ms")
    consuming_query = _insert_percentiles(_CONSUMING, "cost_ms")
    return TraceTables(
        events=events,
        sends=sends,
        deliveries=deliveries,
        journeys=journeys,
        latency=spark.sql(latency_query, journeys=journeys),
        failures=spark.sql(_FAILURES, deliveries=deliveries, sends=sends, until_ms=until_ms),
        consuming=spark.sql(consuming_query, deliveries=deliveries, slow_ms=slow_ms),
        unconsumed=spark.sql(_UNCONSUMED, wanted=wanted, journeys=journeys),
        missing=spark.sql(_MISSING, wanted=wanted, journeys=journeys),
    )


def _find_traced_pairs(deliveries: DataFrame, groups: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (topic, group) pairs that have traced a delivery, at most `PAIRS_MAX`.

    Only pairs whose group is in `groups` are returned; an empty list means all groups.
    """
    rows = (
        deliveries.where("topic is not null and `group` is not null")
        .select("topic", "group")
        .distinct()
        .orderBy("topic", "group")
        .limit(PAIRS_MAX)
        .collect()
    )
    return [(topic, group) for topic, group in rows if not groups or group in groups]


def _insert_percentiles(query: str, column: str) -> str:
    """Return a query in which {percentiles} is replaced by expressions for p50, p95 and p99.

    They are the percentiles of `column`.
    """
    expressions = [
        f"percentile_approx({column}, {share}, {_ACCURACY}) as {name}"
        for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99))
    ]
    return query.replace("{percentiles}", ", ".join(expressions))


def _fetch_filters(
    connection: Mapping[str, str], pairs: Sequence[tuple[str, str]]
) -> list[tuple[str, str, list[str], str | None]]:
    """Return (topic, group, tags, filter) for each pair of a topic and a group, in the same order.

    The present subscriptions are asked from brokers and members. `tags` are the tags that the group
    receives. It is empty if the group receives all tags, does not filter by tags, or its
    subscription is unknown. `filter` is the text of its expressions, or None if unknown. Raises the
    client's errors.
    """
    groups = sorted({group for _, group in pairs})
    with open_admin(parse_options(connection)) as admin:
        fetched_groups = fetch_subscriptions(admin, groups)
    subscriptions_by_group = {fetched.group: fetched for fetched in fetched_groups}
    filters = []
    for topic, group in pairs:
        subscriptions = subscriptions_by_group[group].all_of(topic)
        expressions = [subscription.expression for subscription in subscriptions]
        filters.append(
            (topic, group, _find_received_tags(subscriptions), "; ".join(expressions) or None)
        )
    return filters


def _find_received_tags(subscriptions: Sequence[Subscription]) -> list[str]:
    """Return the sorted tags that any of the subscriptions selects.

    Return [] if there is no subscription, or if one of them is not limited to tags.
    """
    tags: set[str] = set()
    for subscription in subscriptions:
        if not is_tag_kind(subscription.kind) or not subscription.tags:
            return []
        tags |= subscription.tags
    return sorted(tags)


# ---- the ready pipeline

_TABLES: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "latency": ("Delivery latency by topic, group and hour", {}),
    "failures": ("Failures by topic, group and cause", {"failures": "failed"}),
    "consuming": (
        "Duration of handlers by topic and group, the slow ones first",
        {"slow": "slow_deliveries"},
    ),
    "unconsumed": ("Sent and never delivered to the group", {"never": "never_delivered"}),
}
"""The tables that are written and shown: the title, and the figures that are sums of columns."""


def _write_table(task: Task, report: Report, name: str, frame: DataFrame, output: str) -> list[Any]:
    """Compute a table, write it to OUTPUT/name in one file, and return its rows.

    At most `ROWS_MAX` rows are computed. The path of the file, the lines of the table and its
    figures are added to `report`.
    """
    rows: list[Any] = frame.limit(ROWS_MAX).collect()
    path = f"{output}/{name}"
    file_format = task.options["format"]
    writer = task.spark.createDataFrame(rows, frame.schema).coalesce(1).write.mode("overwrite")
    if file_format == "csv":
        writer = writer.option("header", "true")
    writer.format(file_format).save(path)
    report.files.append(path)

    title, figure_by_column = _TABLES[name]
    lines = format_table(title, frame.columns, rows, task.options["rows"], f" in {path}")
    task.report_lines(report, *lines)
    report.figures[name] = len(rows)
    for column, figure in figure_by_column.items():
        report.figures[figure] = sum(row[column] for row in rows)
    return rows


def _report_untraced_groups(task: Task, report: Report, tables: TraceTables) -> None:
    """Report, for each traced topic, the groups that read it but have traced no delivery.

    It is not known whether such a group received messages. A line for each topic is added to
    `report`.
    """
    topic_rows = tables.sends.select("topic").distinct().orderBy("topic").limit(PAIRS_MAX).collect()
    group_rows = tables.deliveries.select("group").distinct().limit(PAIRS_MAX).collect()
    traced_groups = {row["group"] for row in group_rows}
    with open_admin(parse_options(task.connection)) as admin:
        for topic_row in topic_rows:
            topic = topic_row["topic"]
            untraced_groups = _find_untraced_groups(admin, topic, traced_groups)
            if untraced_groups:
                task.report_lines(
                    report,
                    f"Not known: whether {', '.join(untraced_groups)} received messages of {topic},"
                    " because they do not trace (set trace=True, or enableMsgTrace in Java).",
                )


def _find_untraced_groups(
    admin: Admin, topic: str | None, traced_groups: Collection[str]
) -> list[str]:
    """Return the groups that read a topic and are not in `traced_groups`.

    System groups are left out. Return an empty list if `topic` is None, or if no broker knows the
    groups.
    """
    if not topic:
        return []
    try:
        groups = admin.groups_of_topic(topic)
    except (RouteNotFoundError, RequestError):
        return []
    return [group for group in groups if group not in traced_groups and not is_system_group(group)]


def _draw_chart(task: Task, report: Report, rows: Sequence[Any], output: str) -> None:
    """Draw the latency of each topic and group to OUTPUT/latency.png.

    `rows` are the rows of the table `latency`. Only the `PANELS_MAX` pairs with the most messages
    are drawn. If `output` is a URL, nothing is drawn, and a line in the report says so. Raises
    ConfigurationError if matplotlib is not installed.
    """
    if "://" in output:
        task.report_lines(report, "The chart is not drawn: it needs a local output directory.")
        return
    figures, dates = _import_matplotlib()
    panels = _choose_panels(rows)
    panel_count = max(1, len(panels))
    figure = figures.Figure(figsize=(9, 1.2 + 2.2 * panel_count), layout="constrained")
    axes = figure.subplots(panel_count, 1, squeeze=False)[:, 0]
    for axis, (title, hours) in zip(axes, panels.items(), strict=False):
        _draw_panel(axis, title, hours[-HOURS_SHOWN_MAX:], dates)
    if not panels:
        axes[0].text(0.5, 0.5, "no deliveries were traced", ha="center", va="center")
        axes[0].set_axis_off()
    figure.suptitle("Delivery latency by hour (from the send to the first delivery)")
    path = f"{output}/latency.png"
    figure.savefig(path, dpi=110)
    report.files.append(path)


def _import_matplotlib() -> tuple[Any, Any]:
    """Return the modules `matplotlib.figure` and `matplotlib.dates`, or raise ConfigurationError.

    Matplotlib is set to draw to files only, so that it needs no display.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        figures = importlib.import_module("matplotlib.figure")
        dates = importlib.import_module("matplotlib.dates")
    except ImportError:
        raise ConfigurationError(
            "the chart needs matplotlib, which is not installed.",
            fix=f"Set chart: false. {install_extra('spark')}",
        ) from None
    return figures, dates


def _choose_panels(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the rows of each panel of the chart, by its title "TOPIC -> GROUP".

    `rows` are the rows of the table `latency`. The panels with the most messages come first, and
    there are at most `PANELS_MAX`.
    """
    rows_by_title: dict[str, list[Any]] = defaultdict(list)
    message_counts: Counter[str] = Counter()
    for row in rows:
        title = f"{row['topic']} -> {row['group']}"
        rows_by_title[title].append(row)
        message_counts[title] += row["messages"]
    titles = sorted(rows_by_title, key=lambda title: -message_counts[title])
    return {title: rows_by_title[title] for title in titles[:PANELS_MAX]}


def _draw_panel(axis: Any, title: str, hours: Sequence[Any], dates: Any) -> None:
    """Draw the percentiles of one topic and group.

    `hours` are rows of the table `latency`, one for each hour. `dates` is the module
    `matplotlib.dates`.
    """
    times = [hour["hour"] for hour in hours]
    for percentile, color in (("p50_ms", "#4477aa"), ("p95_ms", "#ccbb44"), ("p99_ms", "#ee6677")):
        # The scale is logarithmic and cannot show 0, so 0 ms is drawn as 0.5 ms.
        latencies_ms = [max(hour[percentile], 0.5) for hour in hours]
        axis.plot(times, latencies_ms, color=color, marker="o", markersize=3, label=percentile[:3])
    message_count = sum(hour["messages"] for hour in hours)
    axis.set_yscale("log")
    axis.set_ylabel("ms")
    axis.grid(visible=True, alpha=0.3)
    axis.set_title(f"{title}  ({message_count:,} messages)", fontsize=10)
    axis.legend(loc="upper right", fontsize=8, ncols=3)
    locator = dates.AutoDateLocator(minticks=1, maxticks=10)
    axis.xaxis.set_major_locator(locator)
    axis.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))


class Trace(ReadyPipeline):
    """Compute the tables over traces, write and show them, and draw a chart.

    Raises ConfigurationError and the client's errors.
    """

    name = "trace"
    description = (
        "Delivery latency, failures, slow consumers and lost messages from the traces of clients."
    )
    fields = (
        Field("output", TEXT, "Directory of the results; existing ones are replaced.", REQUIRED),
        Field("topic", TEXT, "Topic of the traces.", TRACE_TOPIC),
        Field("since", DURATION, "Age of the oldest traces that are read, such as 24h.", None),
        Field("begin", TEXT, "First store time: milliseconds or ISO 8601.", None),
        Field("end", TEXT, "Store time at which reading ends, exclusive.", None),
        Field("groups", LIST, "Only these groups are examined for lost messages.", ()),
        Field(
            "settle",
            DURATION,
            "Messages sent within this time before the newest event do not count as lost.",
            60.0,
        ),
        Field("slow", DURATION, "Duration from which on a handler is slow.", 1.0),
        Field("format", TEXT, "Format of the tables.", "parquet", ("parquet", "csv")),
        Field("rows", INTEGER, "Rows shown of each table.", 20),
        Field("chart", FLAG, "Draw latency.png (matplotlib).", True),
    )

    def plan(self, task: Task) -> list[str]:
        """Return lines that say which messages would be read and which files would be written."""
        options = task.options
        output = options["output"]
        message_count = 0
        with open_admin(parse_options(task.connection)) as admin:
            queues = admin.queues(options["topic"])
            for queue in queues:
                lowest, end = admin.offsets(queue)
                message_count += end - lowest
        lines = [
            f"read {options['topic']}: {message_count:,} trace messages in {len(queues)} queues",
            f"write {output}/events, sends, deliveries, missing (Parquet)",
            f"write {output}/{', '.join(_TABLES)} ({options['format']})",
        ]
        if options["chart"]:
            lines.append(f"draw {output}/latency.png")
        return lines

    def run(self, task: Task) -> Report:
        """Write the tables one after the other, and return the report.

        With the option `chart`, the chart is drawn after the table `latency`. At the end, the
        missing messages are written, and the groups that do not trace are reported. If the task is
        stopped, the rest is left out.
        """
        options = task.options
        output = options["output"].rstrip("/")
        task.say(f"reading {options['topic']}, writing {output}")
        begin = options["begin"]
        if options["since"] is not None:
            begin = str(SYSTEM_CLOCK.now_ms() - int(options["since"] * 1000))
        tables = trace(
            task.spark,
            task.connection,
            output=output,
            topic=options["topic"],
            begin=begin,
            end=options["end"],
            groups=options["groups"],
            settle_s=options["settle"],
            slow_s=options["slow"],
        )
        report = Report(files=[f"{output}/{name}" for name in ("events", "sends", "deliveries")])
        _report_event_counts(task, report, tables.events)
        for name in _TABLES:
            if not task.stopping():
                rows = _write_table(task, report, name, getattr(tables, name), output)
                if name == "latency" and options["chart"]:
                    _draw_chart(task, report, rows, output)
        if not task.stopping():
            tables.missing.write.mode("overwrite").parquet(f"{output}/missing")
            report.files.append(f"{output}/missing")
            _report_untraced_groups(task, report, tables)
        return report


def _report_event_counts(task: Task, report: Report, events: DataFrame) -> None:
    """Set the figures of `report` to the number of events of each kind, such as `events_send`.

    If there are no events, add a line that says so.
    """
    rows = events.groupBy("kind").count().collect()
    report.figures = {f"events_{kind}": count for kind, count in sorted(rows)}
    if not rows:
        task.report_lines(report, f"{task.options['topic']} has no traces of this period.")


TRACE: Final = Trace()
