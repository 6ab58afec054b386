"""The ready pipeline `dead-letters`: what a group gave up on: why, what to change, and back again.

    %DLQ%GROUP -> clusters                                             action: clusters
               -> where, edit -> judged by the group's filter          action: check
               -> STATE/plan (Parquet) -> steps (`steps`) -> topics,
                  STATE/report (a line a message)                      action: replay

A dead letter says by its properties where it comes from (RETRY_TOPIC) and how it was called there
(ORIGIN_MESSAGE_ID); why it failed is nowhere in RocketMQ's format, so `cause` is what the message
itself tells: a property that is named like an error, else a body that is no text or no JSON. A
cluster is an origin topic with a cause (and what else the user groups by). What distinguishes it
are property values that are common in it and rare in its topic: the newest messages of the topic
are the comparison, since a value that every message has explains nothing.

`check` writes nothing. `replay` settles first what will be sent, once and for all: places, edits,
verdicts and the new ids go to STATE/plan, and everything after works from there. So a replay that
is killed goes on with the same messages under the same ids, whatever has come to the dead letters,
or happened to filters, in between. A message that the group would not get is not sent, unless
`only_matching` is off; one that no broker would take never is.

    dead_letters(spark, {"nameServers": "127.0.0.1:9876"}, group="billing", action="check",
                 edit={"body": "replace(text, 'NaN', 'null')"})
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.client.admin.dead_letters import (
    FILTERED,
    INVALID,
    ORIGIN_IDS,
    ORIGIN_TOPICS,
    ReplayJudge,
    failure_reason,
    no_dead_letters,
    replay_id,
    undecodable_reason,
)
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError, RouteNotFoundError, SluiceError
from sluicemq.filter.check import check_subscription
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.message import (
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    SHARDING_KEY,
)
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.system_names import is_retry_topic
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX
from sluicemq.pipelines.archive import OWN_PROPERTIES
from sluicemq.pipelines.ready import (
    FLAG,
    INTEGER,
    LIST,
    MAPPING,
    TEXT,
    Field,
    Folder,
    ReadyPipeline,
    Report,
    Task,
    format_table,
    load_messages,
)
from sluicemq.pipelines.steps import (
    ORIGIN_COLUMNS,
    SENDING_FIELDS,
    JobState,
    describe_guarantee,
    rows_per_step,
    run_steps,
    write_step,
)
from sluicemq.spark.options import parse_options
from sluicemq.spark.schema import BAD_BODY_RAW, ERROR_NAME
from sluicemq.spark.sources.offsets import Bounds, fetch_bounds, offsets_to_table, open_admin

CLUSTERS, CHECK, REPLAY = "clusters", "check", "replay"
JSON_LINES, PARQUET = "jsonl", "parquet"
EDITABLE: Final = ("body", "topic", "tags", "keys", "sharding_key", "properties")
PLAN: Final = "plan"
REPORT: Final = "report"
TOPICS_MAX: Final = 1_000
REASONS_SHOWN_MAX: Final = 20
SAMPLE_MESSAGES: Final = 2_000
TOPICS_SAMPLED_MAX: Final = 5
VALUES_SHOWN: Final = 3
SHARE_MIN: Final = 0.3
_SETTINGS: Final = (
    "group",
    "where",
    "edit",
    "to",
    "filter_sql",
    "filter_tags",
    "only_matching",
    "delivery",
    "report",
)
_SOURCE_COLUMNS: Final = (
    "topic,broker,queue_id,queue_offset,msg_id,keys,tags,properties,body,born_time,store_time,"
    "reconsume_times," + ERROR_NAME
)
_REPORT_SCHEMA: Final = (
    "id string, origin struct<topic:string, broker:string, queue_id:int, queue_offset:bigint,"
    " origin_topic:string>, to string, verdict string, new_id string, error string"
)


# ---- dead letters as rows


def read_dead_letters(spark: Any, connection: Mapping[str, str], group: str) -> Any:
    """The dead letters of a group as a DataFrame: topic, broker, queue_id, queue_offset, msg_id,
    keys, tags, properties (the producer's own), body, text (the body as UTF-8), born_time,
    store_time, reconsume_times, origin_topic, origin_id, sharding_key, cause, _error. A body that
    cannot be decompressed is there as it is stored, with the reason in `_error`."""
    with open_admin(parse_options(connection)) as admin:
        return _letters(spark, connection, group, _bounds(admin, group))


def read_report(spark: Any, state: str) -> Any:
    """The report of a replay: a row a message with id, origin, to, verdict, new_id and error."""
    folder = Folder(spark, f"{state}/{REPORT}")
    steps = [folder.full_path(name) for name in folder.list_names() if name.startswith("step-")]
    if not steps:
        raise ConfigurationError(
            f"there is no report in {folder.path}.", fix="Run the pipeline with action: replay."
        )
    is_parquet = bool(folder.list_files("", ".parquet"))
    reader = spark.read.schema(_REPORT_SCHEMA)
    return reader.parquet(*steps) if is_parquet else reader.json(steps)


def _bounds(admin: Admin, group: str) -> Bounds:
    try:
        return fetch_bounds(admin, [DLQ_PREFIX + group])
    except RouteNotFoundError:
        raise no_dead_letters(group) from None


def _letters(spark: Any, connection: Mapping[str, str], group: str, bounds: Bounds) -> Any:
    starts = {queue: low for queue, (low, _) in bounds.items()}
    ends = {queue: high for queue, (_, high) in bounds.items()}
    rows = load_messages(
        spark,
        connection,
        topic=DLQ_PREFIX + group,
        columns=_SOURCE_COLUMNS,
        properties="all",
        badBody=BAD_BODY_RAW,
        startingOffsets=json.dumps(offsets_to_table(starts, by_topic=False)),
        endingOffsets=json.dumps(offsets_to_table(ends, by_topic=False)),
    )

    def causes(asked: pa.Array) -> pa.Array:
        told = [
            failure_reason(dict(one["own"] or ()), one["body"] or b"")
            if one["error"] is None
            else undecodable_reason(one["error"])
            for one in asked.to_pylist()
        ]
        return pa.array(told, pa.string())

    asked = f"struct(own, cast(body as binary) as body, {ERROR_NAME} as error)"
    cause = F.arrow_udf(causes, "string")(F.expr(asked))
    return (
        rows.withColumn("text", F.expr("make_valid_utf8(cast(body as string))"))
        .withColumn("own", F.expr(OWN_PROPERTIES))
        .withColumn("origin_topic", _either(*ORIGIN_TOPICS))
        .withColumn("origin_id", _either(*ORIGIN_IDS))
        .withColumn("sharding_key", _either(SHARDING_KEY))
        .withColumn("cause", cause)
        .drop("properties")
        .withColumnRenamed("own", "properties")
    )


def _either(*names: str) -> Any:
    return F.coalesce(*(F.expr(f"properties['{name}']") for name in names))


# ---- by cause


def format_clusters(
    letters: Any, admin: Admin, connection: Mapping[str, str], by: Sequence[str], top: int
) -> list[str]:
    """The largest clusters as lines: how many, since when, and what distinguishes each."""
    named = [f"by_{turn}" for turn in range(len(by))]
    keyed = letters.selectExpr(
        "*", *(f"cast({how} as string) as {name}" for how, name in zip(by, named, strict=True))
    )
    keys = ["origin_topic", "cause", *named]
    clusters = (
        keyed.groupBy(*keys)
        .agg(
            F.expr("count(1) as messages"),
            F.expr("min(store_time) as first"),
            F.expr("max(store_time) as last"),
            F.expr("max(reconsume_times) as retries"),
            F.expr("max_by(msg_id, store_time) as example"),
        )
        .orderBy(F.desc("messages"), *keys)
        .limit(top)
        .collect()
    )
    if not clusters:
        return ["no dead letters"]
    names = ["messages", "origin_topic", "cause", *by, "retries", "first", "last", "example"]
    shown = ["messages", *keys, "retries", "first", "last", "example"]
    table = [[row[name] for name in shown] for row in clusters]
    lines = format_table("Dead letters by cause", names, table)
    counts = [(*(row[key] for key in keys), row["messages"]) for row in clusters]
    for row in _distinguishing(keyed, keys, counts, admin, connection):
        usual = row["usual"]
        beside = "" if usual is None else f", {usual:.0%} of the topic's newest messages"
        lines.append(
            f"  {row['origin_topic']}, {row['cause']}: {row['name']} = {row['value']!r} in"
            f" {row['share']:.0%}{beside}"
        )
    return lines


def _distinguishing(
    keyed: Any,
    keys: list[str],
    counts: list[tuple[Any, ...]],
    admin: Admin,
    connection: Mapping[str, str],
) -> list[Any]:
    """Values that are common in a cluster, and at least twice as common as in its topic."""
    spark = keyed.sparkSession
    schema = ", ".join(f"{key} string" for key in keys) + ", messages long"
    sizes = F.broadcast(spark.createDataFrame(counts, schema).alias("s"))
    same = [F.col(f"s.{key}").eqNullSafe(F.col(f"l.{key}")) for key in keys]
    values = (
        _entries(keyed)
        .alias("l")
        .join(sizes, same)
        .select(*(F.col(f"s.{key}") for key in keys), "s.messages", "l.name", "l.value")
        .groupBy(*keys, "messages", "name", "value")
        .agg(F.expr("count(1) as n"))
        .where(f"n > 1 and n >= {SHARE_MIN} * messages")
        .withColumn("usual", F.expr("cast(null as double)"))
    )
    topics = sorted({str(row[0]) for row in counts if row[0]})[:TOPICS_SAMPLED_MAX]
    usual = {}
    for topic in topics:
        rows = _newest(spark, admin, connection, topic)
        total = 0 if rows is None else rows.count()
        if total:
            counted = (
                _entries(rows)
                .groupBy("name", "value")
                .agg((F.count(F.lit(1)) / total).alias("usual"))
            )
            usual[topic] = counted.withColumn("origin_topic", F.lit(topic))
    if usual:  # null stays where nothing of a topic could be read
        shares = reduce(lambda one, other: one.unionByName(other), usual.values())
        values = values.drop("usual").join(shares, ["origin_topic", "name", "value"], "left")
        share = F.when(F.col("origin_topic").isin(list(usual)), F.expr("coalesce(usual, 0.0)"))
        values = values.withColumn("usual", share)
    order = ", ".join(keys)
    found: list[Any] = (
        values.selectExpr("*", "n / messages as share")
        .where("usual is null or share > 2 * usual")
        .selectExpr(
            "*",
            f"row_number() over (partition by {order} order by share - coalesce(usual, 0)"
            " desc, name, value) as place",
        )
        .where(f"place <= {VALUES_SHOWN}")
        .orderBy(F.desc("messages"), *keys, "place")
        .collect()
    )
    return found


def _entries(rows: Any) -> Any:
    """A row for each property (and the tag) of each message: `name` and `value`."""
    own = "map_filter(properties, (name, value) -> name <> 'tag')"
    tag = "if(tags is null, cast(map() as map<string,string>), map('tag', tags))"
    exploded = rows.selectExpr("*", f"explode(map_entries(map_concat({own}, {tag}))) as entry")
    return exploded.selectExpr("*", "entry.key as name", "entry.value as value")


def _newest(spark: Any, admin: Admin, connection: Mapping[str, str], topic: str) -> Any | None:
    """The newest messages of a topic; None when they cannot be had."""
    try:
        bounds = {queue: admin.offsets(queue) for queue in admin.queues(topic)}
    except SluiceError:
        return None
    if not bounds:
        return None
    each = max(1, SAMPLE_MESSAGES // len(bounds))
    starts = {queue: max(low, high - each) for queue, (low, high) in bounds.items()}
    return load_messages(
        spark,
        connection,
        topic=topic,
        columns="tags,properties",
        startingOffsets=json.dumps(offsets_to_table(starts, by_topic=False)),
    )


# ---- edits and verdicts


def apply_edits(letters: Any, edits: Mapping[str, str], to: str, group: str) -> Any:
    """The letters as they would be sent: `new_body`, `new_tags`, `new_keys`, `new_properties`,
    `new_sharding_key`, and `target`. Raises ConfigurationError for what cannot be edited.

    `properties.NAME` sets one property, null takes it away; every expression sees the letter as it
    lies there.
    """

    def literal(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    names = {name: name for name in EDITABLE} | {"topic": "origin_topic"}
    single: dict[str, str] = {}
    for name, how in edits.items():
        part, _, rest = name.partition(".")
        if part == "properties" and rest:
            single[literal(rest)] = how
        elif name in EDITABLE:
            names[name] = how
        else:
            raise ConfigurationError(
                f"{name!r} cannot be edited.",
                fix=f"There are {', '.join(EDITABLE)}, and properties.NAME.",
            )
    target = {"origin": names["topic"], "retry": f"'%RETRY%{group}'"}.get(to, f"'{to}'")
    keys, properties = names["keys"], names["properties"]
    kind = letters.selectExpr(f"{keys} as it").schema["it"].dataType.simpleString()
    if single:
        set_ones = ", ".join(f"{name}, cast({how} as string)" for name, how in single.items())
        rest = f"map_filter({properties}, (name, value) -> name not in ({', '.join(single)}))"
        properties = (
            f"map_filter(map_concat({rest}, map({set_ones})), (name, value) -> value is not null)"
        )
    columns = {
        "new_body": f"cast({names['body']} as binary)",
        "new_tags": f"cast({names['tags']} as string)",
        "new_keys": f"array_join({keys}, ' ')"
        if kind.startswith("array")
        else f"cast({keys} as string)",
        "new_sharding_key": f"cast({names['sharding_key']} as string)",
        "new_properties": properties,
        "target": f"cast({target} as string)",
        "read_as": f"cast({names['topic'] if to == 'retry' else target} as string)",
        # An edit makes a new body; without one, stored bytes must not pass for what was sent.
        "body_error": "''" if "body" in edits else f"coalesce({ERROR_NAME}, '')",
    }
    return letters.selectExpr("*", *(f"{how} as {name}" for name, how in columns.items()))


def add_verdicts(rows: Any, judge: ReplayJudge) -> Any:
    """The rows with `verdict` and `reason`; bodies do not travel to Python for that."""

    def verdicts(asked: pa.Array) -> pa.Array:
        found = []
        for row in asked.to_pylist():
            row["properties"] = {name: text or "" for name, text in row["properties"] or ()}
            found.append("\x01".join(judge.verdict(row)))
        return pa.array(found, pa.string())

    asked = (
        "struct(target, read_as, new_tags as tags, new_keys as keys, new_properties as properties,"
        " new_id, octet_length(new_body) as size, body_error)"
    )
    said = F.arrow_udf(verdicts, "string")(F.expr(asked))
    return (
        rows.withColumn("said", said)
        .withColumn("verdict", F.expr("substring_index(said, '\\u0001', 1)"))
        .withColumn("reason", F.expr("nullif(substring_index(said, '\\u0001', -1), '')"))
        .drop("said")
    )


def add_new_ids(rows: Any) -> Any:
    """The rows with `new_id`: the id of a row follows from its place."""

    def ids(asked: pa.Array) -> pa.Array:
        found = [replay_id(**one) for one in asked.to_pylist()]
        return pa.array(found, pa.string())

    place = "struct(topic, broker, queue_id, queue_offset, unix_millis(store_time) as stored_ms)"
    return rows.withColumn("new_id", F.arrow_udf(ids, "string")(F.expr(place)))


def _wanted(task: Task, bounds: Bounds) -> Any:
    letters = _letters(task.spark, task.connection, task.options["group"], bounds)
    return letters.where(task.options["where"]) if task.options["where"] else letters


def _judged(task: Task, admin: Admin, letters: Any) -> Any:
    """The letters as they would be sent, each with its new id, verdict and reason."""
    options = task.options
    rows = apply_edits(letters, options["edit"], options["to"], options["group"])
    named = rows.select("target", "read_as").distinct().limit(TOPICS_MAX).collect()
    targets = {str(row["target"]) for row in named if row["target"]}
    topics = {str(row["read_as"]) for row in named if row["read_as"]}
    # A consumer's retry topic is created when it connects.
    checked = {target for target in targets if not is_retry_topic(target)}
    assumed = _assumed_subscriptions(task, topics)
    judge = admin.dead_letter_judge(options["group"], checked, topics, assumed)
    return add_verdicts(add_new_ids(rows), judge)


def _assumed_subscriptions(
    task: Task, topics: set[str]
) -> dict[str, tuple[Subscription, ...]] | None:
    """Return topic -> the subscription that the options name, None for those of the group."""
    options = task.options
    if options["filter_sql"] and options["filter_tags"]:
        raise ConfigurationError(
            "filter_sql and filter_tags are given together.", fix="Give one of them."
        )
    for option, kind in (("filter_sql", SQL92), ("filter_tags", TAG)):
        if options[option]:
            check_subscription(Subscription("", options[option], kind))
            return {topic: (subscribe(topic, options[option], kind),) for topic in topics}
    return None


# ---- the ready pipeline


def _look(task: Task, report: Report, *, check: bool) -> None:
    options = task.options
    with open_admin(parse_options(task.connection)) as admin:
        bounds = _bounds(admin, options["group"])
        letters = _wanted(task, bounds)
        by, top = list(options["cluster_by"]), int(options["top"])
        task.report_lines(report, *format_clusters(letters, admin, task.connection, by, top))
        report.figures["letters"] = letters.count()
        if not check:
            return
        # How many of each verdict and, values aside, of each reason; needs no body.
        values = "' is (\\'[^\\']*\\'|-?[0-9.]+)'"
        rows = _judged(task, admin, letters)
        found = (
            rows.withColumn("why", F.expr(f"regexp_replace(reason, {values}, ' is …')"))
            .groupBy("target", "verdict", "why")
            .agg(F.expr("count(1) as messages"), F.expr("min(msg_id) as example"))
            .orderBy("verdict", F.desc("messages"), "why")
            .limit(REASONS_SHOWN_MAX)
            .collect()
        )
    for row in found:
        report.figures[row["verdict"]] = report.figures.get(row["verdict"], 0) + row["messages"]
    names = ["messages", "verdict", "to", "example"]
    table = [[row["messages"], row["verdict"], row["target"], row["example"]] for row in found]
    task.report_lines(report, *format_table("If they were sent now", names, table))
    task.report_lines(report, *(f"  {row['verdict']}: {row['why']}" for row in found if row["why"]))


def _replay(task: Task, report: Report) -> None:
    options = task.options
    if not options["state"]:
        raise ConfigurationError(
            "the option 'state' is missing.", fix="Name a directory: it makes a replay resumable."
        )
    folder = Folder(task.spark, options["state"])
    ledger = JobState(folder, "job.json")
    settings = {name: options[name] for name in _SETTINGS}
    if not ledger.resume(f"dead letters of {options['group']}", settings):
        _settle(task, ledger)
    report.files += [folder.full_path(PLAN), folder.full_path(REPORT)]
    task.report_lines(report, describe_guarantee(task.connection, options["delivery"]))
    refused = (INVALID, FILTERED) if options["only_matching"] else (INVALID,)
    unsent = ", ".join(f"'{verdict}'" for verdict in refused)

    def send(number: int, some: Any) -> None:
        chosen = rows_to_send(some.where(f"verdict not in ({unsent})"))
        write_step(chosen, task.connection, ledger["query"], number, delivery=options["delivery"])
        lines = some.selectExpr(  # written again when the step is
            "msg_id as id",
            "struct(topic, broker, queue_id, queue_offset, origin_topic) as origin",
            "target as to",
            f"if(verdict in ({unsent}), verdict, 'sent') as verdict",
            f"if(verdict in ({unsent}), null, new_id) as new_id",
            "reason as error",
        )
        kind = "parquet" if options["report"] == PARQUET else "json"
        place = folder.full_path(f"{REPORT}/step-{number:08d}")
        lines.coalesce(1).write.mode("overwrite").format(kind).save(place)

    rows = task.spark.read.parquet(folder.full_path(PLAN))
    is_done = run_steps(task, ledger, report, rows, send)
    for row in read_report(task.spark, folder.path).groupBy("verdict").count().collect():
        report.figures[row["verdict"]] = row["count"]
    counted = ", ".join(
        f"{report.figures[name]:,} {name}"
        for name in ("sent", FILTERED, INVALID)
        if name in report.figures
    )
    ending = "" if is_done else "; stopped, run it again to go on"
    task.report_lines(
        report, f"{counted or 'nothing to send'}{ending}; report: {folder.full_path(REPORT)}"
    )


def _settle(task: Task, ledger: JobState) -> None:
    """Decides what every message becomes, before the first is sent."""
    folder, options = ledger.folder, task.options
    with open_admin(parse_options(task.connection)) as admin:
        bounds = _bounds(admin, options["group"])
        rows = _judged(task, admin, _wanted(task, bounds))
        kept = rows.selectExpr(
            "topic",
            "broker",
            "queue_id",
            "queue_offset",
            "store_time",
            "msg_id",
            "origin_topic",
            "origin_id",
            "target",
            "new_id",
            "verdict",
            "reason",
            "new_body",
            "new_tags",
            "new_keys",
            "new_sharding_key",
            "new_properties",
        )
        kept.write.mode("overwrite").parquet(folder.full_path(PLAN))
    name = secrets.token_hex(8)
    size = rows_per_step(float(options["rate"]), options["step"])
    ledger.start(query=f"dead-letters-{name}", step_rows=size)


def rows_to_send(plan: Any) -> Any:
    """Rows of a plan as the sink takes them."""
    system = (
        f"if(startswith(target, '{RETRY_PREFIX}'), map('{RETRY_TOPIC}', origin_topic,"
        f" '{ORIGIN_MESSAGE_ID}', coalesce(origin_id, msg_id)),"
        " cast(map() as map<string,string>))"
    )
    return plan.selectExpr(
        "target as topic",
        "new_body as body",
        "new_tags as tags",
        "new_keys as keys",
        "new_sharding_key as sharding_key",
        "new_properties as properties",
        "new_id as message_id",
        f"{system} as system_properties",
        *ORIGIN_COLUMNS,
    )


class DeadLetters(ReadyPipeline):
    """Dead letters of a group: clusters, check or replay. Raises ConfigurationError (also when a
    replay in this state was begun otherwise), RouteNotFoundError when the group has no dead
    letters, and the errors of the sink."""

    name = "dead-letters"
    description = (
        "Dead letters of a group: clusters by cause, edits, a dry run, a paced replay with a"
        " report."
    )
    fields = (
        Field("group", TEXT, "The consumer group whose dead letters these are."),
        Field(
            "action",
            TEXT,
            "Say why they died; or also what would become of each that is sent again; or send "
            "them.",
            CHECK,
            (CLUSTERS, CHECK, REPLAY),
        ),
        Field("where", TEXT, "Spark SQL predicate: which of them.", ""),
        Field("cluster_by", LIST, "Further expressions to group by, besides origin and cause.", ()),
        Field("top", INTEGER, "How many clusters are shown.", 10),
        Field(
            "edit",
            MAPPING,
            "What to change: body, topic, tags, keys, sharding_key, properties or "
            "properties.NAME, each with a Spark SQL expression.",
            {},
        ),
        Field(
            "to",
            TEXT,
            "`origin`: the topic each comes from, for all its readers; `retry`: the group's "
            "retry topic, for this group alone; or a topic.",
            "origin",
        ),
        Field("filter_sql", TEXT, "Judge by this SQL92 selector, not by the group's filter.", ""),
        Field("filter_tags", TEXT, "Judge by these tags, not by the group's filter.", ""),
        Field("only_matching", FLAG, "Send only what the group's filter lets through.", True),
        *SENDING_FIELDS,
        Field("state", TEXT, "Directory of plan, report and progress; needed to replay.", ""),
        Field("report", TEXT, "Form of the report.", JSON_LINES, (JSON_LINES, PARQUET)),
    )

    def plan(self, task: Task) -> list[str]:
        report = Report()
        quiet = Task(task.spark, task.options, task.connection, lambda line: None, task.stopping)
        _look(quiet, report, check=task.options["action"] != CLUSTERS)
        if task.options["action"] == REPLAY:
            report.lines.append(describe_guarantee(task.connection, task.options["delivery"]))
        return report.lines

    def run(self, task: Task) -> Report:
        report = Report()
        action = task.options["action"]
        if action == REPLAY:
            _replay(task, report)
        else:
            _look(task, report, check=action == CHECK)
        return report


dead_letters: Final = DeadLetters()
