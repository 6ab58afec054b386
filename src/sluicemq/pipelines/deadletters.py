"""The ready pipeline `dead-letters`: the causes of dead letters, edits, and sending them again.

    %DLQ%GROUP -> clusters                                                 action: clusters
               -> where, edit -> verdicts by the group's filter            action: check
               -> STATE/plan (Parquet) -> steps (`pipelines.steps`) -> topics,
                  STATE/report (one line for each message)                 action: replay

The properties of a dead letter say from which topic it comes (RETRY_TOPIC) and which message id it
had there (ORIGIN_MESSAGE_ID). RocketMQ's format does not contain why it failed. So `cause` is
derived from the message itself: a property whose name looks like an error, else a body that is not
UTF-8 or not JSON. Dead letters with the same origin topic, the same cause and the same values of
the user's further expressions are a cluster. Property values that are common in the cluster and
rare among the newest messages of the origin topic distinguish it. A value that every message has
explains nothing.

`check` writes nothing. `replay` first decides everything: topics, edits, verdicts and new ids are
written to STATE/plan, and all further work reads that plan. So a replay that is killed continues
with the same messages under the same ids, although new dead letters may have arrived and filters
may have changed. A message that the group's filter does not match is not sent, unless
`only_matching` is false. A message that brokers would refuse is never sent.

    dead_letters(spark, {"nameServers": "127.0.0.1:9876"}, group="billing", action="check",
                 edit={"body": "replace(text, 'NaN', 'null')"})
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - the usual name of this module

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
from sluicemq.filter.subscriptions import parse_subscription
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
from sluicemq.spark.sources.checkpoints import offsets_to_table
from sluicemq.spark.sources.offsets import Bounds, fetch_bounds, open_admin

CLUSTERS = "clusters"
CHECK = "check"
REPLAY = "replay"
"""The actions."""
JSON_LINES = "jsonl"
PARQUET = "parquet"
"""The formats of a report."""
EDITABLE: Final = ("body", "topic", "tags", "keys", "sharding_key", "properties")
"""The parts of a message that `edit` can change."""
PLAN: Final = "plan"
REPORT: Final = "report"
TOPICS_MAX: Final = 1_000
"""The number of target topics that are checked."""
REASONS_SHOWN_MAX: Final = 20
SAMPLE_MESSAGES: Final = 2_000
"""The number of newest messages of an origin topic with which its clusters are compared."""
TOPICS_SAMPLED_MAX: Final = 5
VALUES_SHOWN: Final = 3
"""The number of distinguishing values of a cluster."""
SHARE_MIN: Final = 0.3
"""The smallest share of a cluster's messages that have a distinguishing value."""
_FIXED_OPTIONS: Final = (
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
"""The options that must not change when a replay is resumed."""
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
    """Return the dead letters of a group as a DataFrame.

    The columns are topic, broker, queue_id, queue_offset, msg_id, keys, tags, properties (the
    producer's own), body, text (the body as UTF-8), born_time, store_time, reconsume_times,
    origin_topic, origin_id, sharding_key, cause and _error. A body that cannot be decompressed is
    returned as it is stored, with the reason in `_error`. Raises RouteNotFoundError if the group
    has no dead letters.
    """
    with open_admin(parse_options(connection)) as admin:
        return _load_dead_letters(spark, connection, group, _fetch_bounds(admin, group))


def read_report(spark: Any, state: str) -> Any:
    """Return the report of a replay as a DataFrame, with one row for each message.

    The columns are id, origin, to, verdict, new_id and error. `state` is the directory of the
    replay. Raises ConfigurationError if it has no report.
    """
    folder = Folder(spark, f"{state}/{REPORT}")
    steps = [folder.full_path(name) for name in folder.list_names() if name.startswith("step-")]
    if not steps:
        raise ConfigurationError(
            f"there is no report in {folder.path}.", fix="Run the pipeline with action: replay."
        )
    is_parquet = bool(folder.list_files("", ".parquet"))
    reader = spark.read.schema(_REPORT_SCHEMA)
    return reader.parquet(*steps) if is_parquet else reader.json(steps)


def _fetch_bounds(admin: Admin, group: str) -> Bounds:
    """Return the offsets of the group's dead-letter topic, or raise RouteNotFoundError."""
    try:
        return fetch_bounds(admin, [DLQ_PREFIX + group])
    except RouteNotFoundError:
        raise no_dead_letters(group) from None


def _load_dead_letters(
    spark: Any, connection: Mapping[str, str], group: str, bounds: Bounds
) -> Any:
    """Return the dead letters of a group between `bounds`, with the columns of `read_dead_letters`.

    `bounds` has the first and the end offset of each queue of the dead-letter topic.
    """
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

    def find_causes(letters: pa.Array) -> pa.Array:
        """Return the cause of each dead letter. This runs in Python workers."""
        causes = []
        for letter in letters.to_pylist():
            if letter["error"] is None:
                cause = failure_reason(dict(letter["own"] or ()), letter["body"] or b"")
            else:
                cause = undecodable_reason(letter["error"])
            causes.append(cause)
        return pa.array(causes, pa.string())

    letter_struct = f"struct(own, cast(body as binary) as body, {ERROR_NAME} as error)"
    cause_column = F.arrow_udf(find_causes, "string")(F.expr(letter_struct))
    return (
        rows.withColumn("text", F.expr("make_valid_utf8(cast(body as string))"))
        .withColumn("own", F.expr(OWN_PROPERTIES))
        .withColumn("origin_topic", _first_property(*ORIGIN_TOPICS))
        .withColumn("origin_id", _first_property(*ORIGIN_IDS))
        .withColumn("sharding_key", _first_property(SHARDING_KEY))
        .withColumn("cause", cause_column)
        .drop("properties")
        .withColumnRenamed("own", "properties")
    )


def _first_property(*names: str) -> Any:
    """Return the column with the first of the properties `names` that a message has, else null."""
    return F.coalesce(*(F.expr(f"properties['{name}']") for name in names))


# ---- by cause


def format_clusters(
    letters: Any, admin: Admin, connection: Mapping[str, str], by: Sequence[str], count_max: int
) -> list[str]:
    """Return a table of the largest clusters, and a line for each value that distinguishes one.

    `letters` are the dead letters. They are grouped by origin topic, cause and the Spark SQL
    expressions `by`. At most `count_max` clusters are shown. `admin` and `connection` are used to
    read the newest messages of the origin topics.
    """
    by_names = [f"by_{index}" for index in range(len(by))]
    by_columns = [
        f"cast({expression} as string) as {name}"
        for expression, name in zip(by, by_names, strict=True)
    ]
    keyed = letters.selectExpr("*", *by_columns)
    keys = ["origin_topic", "cause", *by_names]
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
        .limit(count_max)
        .collect()
    )
    if not clusters:
        return ["no dead letters"]
    titles = ["messages", "origin_topic", "cause", *by, "retries", "first", "last", "example"]
    columns = ["messages", *keys, "retries", "first", "last", "example"]
    table = [[row[name] for name in columns] for row in clusters]
    lines = format_table("Dead letters by cause", titles, table)

    cluster_sizes = [(*(row[key] for key in keys), row["messages"]) for row in clusters]
    for row in _find_distinguishing_values(keyed, keys, cluster_sizes, admin, connection):
        usual_share = row["usual"]
        comparison = ""
        if usual_share is not None:
            comparison = f", {usual_share:.0%} of the topic's newest messages"
        lines.append(
            f"  {row['origin_topic']}, {row['cause']}: {row['name']} = {row['value']!r} in"
            f" {row['share']:.0%}{comparison}"
        )
    return lines


def _find_distinguishing_values(
    keyed: Any,
    keys: list[str],
    cluster_sizes: list[tuple[Any, ...]],
    admin: Admin,
    connection: Mapping[str, str],
) -> list[Any]:
    """Return the property values that distinguish a cluster from the usual messages of its topic.

    A value distinguishes a cluster if at least two messages and a share of `SHARE_MIN` of the
    cluster have it, and if its share there is more than twice its share of the origin topic's
    newest messages. The second condition is left out for topics whose messages could not be read,
    and for all but `TOPICS_SAMPLED_MAX` topics. At most `VALUES_SHOWN` values of a cluster are
    returned, those with the largest difference of the shares first. The clusters are ordered by
    size.

    `keyed` are dead letters with the columns `keys`, which identify the cluster. `cluster_sizes`
    has the values of these columns and the number of messages of each cluster. A row of the result
    has the columns `keys`, messages, name, value, share (of the cluster) and usual (the share of
    the newest messages, null if they could not be read).
    """
    spark = keyed.sparkSession
    schema = ", ".join(f"{key} string" for key in keys) + ", messages long"
    clusters = F.broadcast(spark.createDataFrame(cluster_sizes, schema).alias("s"))
    is_same_cluster = [F.col(f"s.{key}").eqNullSafe(F.col(f"l.{key}")) for key in keys]
    values = (
        _explode_properties(keyed)
        .alias("l")
        .join(clusters, is_same_cluster)
        .select(*(F.col(f"s.{key}") for key in keys), "s.messages", "l.name", "l.value")
        .groupBy(*keys, "messages", "name", "value")
        .agg(F.expr("count(1) as n"))
        .where(f"n > 1 and n >= {SHARE_MIN} * messages")
        .withColumn("usual", F.expr("cast(null as double)"))
    )

    # For some origin topics: the share of the newest messages that have each value.
    topics = sorted({str(row[0]) for row in cluster_sizes if row[0]})[:TOPICS_SAMPLED_MAX]
    shares_by_topic = {}
    for topic in topics:
        newest_rows = _load_newest(spark, admin, connection, topic)
        newest_count = 0 if newest_rows is None else newest_rows.count()
        if newest_count:
            shares = (
                _explode_properties(newest_rows)
                .groupBy("name", "value")
                .agg((F.count(F.lit(1)) / newest_count).alias("usual"))
            )
            shares_by_topic[topic] = shares.withColumn("origin_topic", F.lit(topic))
    if shares_by_topic:
        # `usual` stays null for topics that could not be read, and is 0 for values that do not
        # occur in the others.
        all_shares = reduce(lambda left, right: left.unionByName(right), shares_by_topic.values())
        values = values.drop("usual").join(all_shares, ["origin_topic", "name", "value"], "left")
        is_sampled = F.col("origin_topic").isin(list(shares_by_topic))
        values = values.withColumn("usual", F.when(is_sampled, F.expr("coalesce(usual, 0.0)")))

    # Keep the values that are more than twice as common in the cluster as in its topic.
    cluster_columns = ", ".join(keys)
    distinguishing_values: list[Any] = (
        values.selectExpr("*", "n / messages as share")
        .where("usual is null or share > 2 * usual")
        .selectExpr(
            "*",
            f"row_number() over (partition by {cluster_columns} order by share - coalesce(usual, 0)"
            " desc, name, value) as place",
        )
        .where(f"place <= {VALUES_SHOWN}")
        .orderBy(F.desc("messages"), *keys, "place")
        .collect()
    )
    return distinguishing_values


def _explode_properties(rows: Any) -> Any:
    """Return one row for each property of each message, with the columns `name` and `value` added.

    The tag of a message counts as a property with the name "tag".
    """
    other_properties = "map_filter(properties, (name, value) -> name <> 'tag')"
    tag = "if(tags is null, cast(map() as map<string,string>), map('tag', tags))"
    entries = f"map_entries(map_concat({other_properties}, {tag}))"
    exploded = rows.selectExpr("*", f"explode({entries}) as entry")
    return exploded.selectExpr("*", "entry.key as name", "entry.value as value")


def _load_newest(spark: Any, admin: Admin, connection: Mapping[str, str], topic: str) -> Any | None:
    """Return about `SAMPLE_MESSAGES` newest messages of a topic, with tags and properties.

    Return None if the topic cannot be read or has no queue.
    """
    try:
        bounds = {queue: admin.offsets(queue) for queue in admin.queues(topic)}
    except SluiceError:
        return None
    if not bounds:
        return None
    count_per_queue = max(1, SAMPLE_MESSAGES // len(bounds))
    starts = {queue: max(low, high - count_per_queue) for queue, (low, high) in bounds.items()}
    return load_messages(
        spark,
        connection,
        topic=topic,
        columns="tags,properties",
        startingOffsets=json.dumps(offsets_to_table(starts, by_topic=False)),
    )


# ---- edits and verdicts


def apply_edits(letters: Any, edits: Mapping[str, str], to: str, group: str) -> Any:
    """Return the dead letters with further columns: what would be sent, and where.

    `edits` has a Spark SQL expression for each part to change. Its keys are those of `EDITABLE`, or
    `properties.NAME` for one property, which null removes. All expressions read the unedited dead
    letter. `to` is "origin", "retry" (the retry topic of `group`) or a topic. The new columns are
    `new_body`, `new_tags`, `new_keys`, `new_properties`, `new_sharding_key`, `target` (the topic),
    `read_as` (the topic whose subscription decides whether the group receives the message) and
    `body_error`. Raises ConfigurationError if `edits` has another key.
    """
    expressions = {name: name for name in EDITABLE} | {"topic": "origin_topic"}
    single_properties: dict[str, str] = {}
    for name, expression in edits.items():
        part, _, property_name = name.partition(".")
        if part == "properties" and property_name:
            single_properties[_to_sql_literal(property_name)] = expression
        elif name in EDITABLE:
            expressions[name] = expression
        else:
            raise ConfigurationError(
                f"{name!r} cannot be edited.",
                fix=f"Edit {', '.join(EDITABLE)} or properties.NAME.",
            )
    origin_topic = expressions["topic"]
    target = {"origin": origin_topic, "retry": f"'%RETRY%{group}'"}.get(to, f"'{to}'")
    # The group receives a message for its retry topic by its subscription to the origin topic.
    subscribed_topic = origin_topic if to == "retry" else target

    # Keys are stored as one text, but an edit may return an array of them.
    keys = expressions["keys"]
    keys_type = letters.selectExpr(f"{keys} as it").schema["it"].dataType.simpleString()
    is_array = keys_type.startswith("array")
    keys_text = f"array_join({keys}, ' ')" if is_array else f"cast({keys} as string)"
    columns = {
        "new_body": f"cast({expressions['body']} as binary)",
        "new_tags": f"cast({expressions['tags']} as string)",
        "new_keys": keys_text,
        "new_sharding_key": f"cast({expressions['sharding_key']} as string)",
        "new_properties": _set_properties(expressions["properties"], single_properties),
        "target": f"cast({target} as string)",
        "read_as": f"cast({subscribed_topic} as string)",
        # An edit of the body replaces stored bytes that cannot be decompressed. Without one, they
        # must not be sent, because they are not what the producer sent.
        "body_error": "''" if "body" in edits else f"coalesce({ERROR_NAME}, '')",
    }
    return letters.selectExpr("*", *(f"{value} as {name}" for name, value in columns.items()))


def _to_sql_literal(text: str) -> str:
    """Return the text as a string literal of Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _set_properties(properties: str, single_properties: Mapping[str, str]) -> str:
    """Return the SQL expression of a map of properties in which some properties are set.

    `properties` is the expression of the original map. `single_properties` maps SQL literals of
    names to expressions of values; a value of null removes the property.
    """
    if not single_properties:
        return properties
    names = ", ".join(single_properties)
    entries = ", ".join(
        f"{name}, cast({expression} as string)" for name, expression in single_properties.items()
    )
    others = f"map_filter({properties}, (name, value) -> name not in ({names}))"
    return f"map_filter(map_concat({others}, map({entries})), (name, value) -> value is not null)"


def add_verdicts(rows: Any, judge: ReplayJudge) -> Any:
    """Return the rows of `apply_edits` with the columns `verdict` and `reason`.

    `judge` decides, in Python workers. `reason` is null if there is none. Only the sizes of bodies
    are passed to the workers.
    """

    def find_verdicts(messages: pa.Array) -> pa.Array:
        """Return the verdict and the reason of each message, joined by the character U+0001."""
        verdicts = []
        for message in messages.to_pylist():
            message["properties"] = {name: text or "" for name, text in message["properties"] or ()}
            verdicts.append("\x01".join(judge.verdict(message)))
        return pa.array(verdicts, pa.string())

    message_struct = (
        "struct(target, read_as, new_tags as tags, new_keys as keys, new_properties as properties,"
        " new_id, octet_length(new_body) as size, body_error)"
    )
    joined = F.arrow_udf(find_verdicts, "string")(F.expr(message_struct))
    return (
        rows.withColumn("joined", joined)
        .withColumn("verdict", F.expr("substring_index(joined, '\\u0001', 1)"))
        .withColumn("reason", F.expr("nullif(substring_index(joined, '\\u0001', -1), '')"))
        .drop("joined")
    )


def add_new_ids(rows: Any) -> Any:
    """Return the rows with the column `new_id`, the message id with which a row would be sent.

    The id is computed from topic, broker, queue, offset and store time of the dead letter. So it is
    the same each time.
    """

    def make_ids(origins: pa.Array) -> pa.Array:
        ids = [replay_id(**origin) for origin in origins.to_pylist()]
        return pa.array(ids, pa.string())

    origin = "struct(topic, broker, queue_id, queue_offset, unix_millis(store_time) as stored_ms)"
    return rows.withColumn("new_id", F.arrow_udf(make_ids, "string")(F.expr(origin)))


def _select_dead_letters(task: Task, bounds: Bounds) -> Any:
    """Return the dead letters between `bounds` that the option `where` selects.

    Without the option, return all of them.
    """
    letters = _load_dead_letters(task.spark, task.connection, task.options["group"], bounds)
    return letters.where(task.options["where"]) if task.options["where"] else letters


def _add_replay_columns(task: Task, admin: Admin, letters: Any) -> Any:
    """Return the dead letters with the columns of what would be sent, new id, verdict and reason.

    The brokers are asked whether the target topics exist, and for the group's subscription. Raises
    ConfigurationError for wrong options, and the client's errors.
    """
    options = task.options
    rows = apply_edits(letters, options["edit"], options["to"], options["group"])
    topic_rows = rows.select("target", "read_as").distinct().limit(TOPICS_MAX).collect()
    targets = {str(row["target"]) for row in topic_rows if row["target"]}
    subscribed_topics = {str(row["read_as"]) for row in topic_rows if row["read_as"]}
    # A retry topic may be missing: it is created when a consumer connects.
    checked_targets = {target for target in targets if not is_retry_topic(target)}
    assumed = _assumed_subscriptions(task, subscribed_topics)
    judge = admin.dead_letter_judge(options["group"], checked_targets, subscribed_topics, assumed)
    return add_verdicts(add_new_ids(rows), judge)


def _assumed_subscriptions(
    task: Task, topics: set[str]
) -> dict[str, tuple[Subscription, ...]] | None:
    """Return the subscription that the options name, for each topic; None means the group's own.

    Raises ConfigurationError if the options name two, and FilterSyntaxError for an invalid one.
    """
    options = task.options
    if options["filter_sql"] and options["filter_tags"]:
        raise ConfigurationError(
            "filter_sql and filter_tags are given together.", fix="Set one of them."
        )
    for option, kind in (("filter_sql", SQL92), ("filter_tags", TAG)):
        if options[option]:
            check_subscription(Subscription("", options[option], kind))
            return {topic: (parse_subscription(topic, options[option], kind),) for topic in topics}
    return None


# ---- the ready pipeline


def _report_causes(task: Task, report: Report, *, check: bool) -> None:
    """Report the clusters of dead letters; with `check`, also what would become of each message.

    Lines and figures are added to `report`. Nothing is written or sent.
    """
    options = task.options
    with open_admin(parse_options(task.connection)) as admin:
        bounds = _fetch_bounds(admin, options["group"])
        letters = _select_dead_letters(task, bounds)
        lines = format_clusters(
            letters,
            admin,
            task.connection,
            by=list(options["cluster_by"]),
            count_max=int(options["top"]),
        )
        task.report_lines(report, *lines)
        report.figures["letters"] = letters.count()
        if not check:
            return

        # Count the messages of each verdict and reason. The values in reasons are left out, so
        # that reasons which only differ there are counted together.
        value_pattern = "' is (\\'[^\\']*\\'|-?[0-9.]+)'"
        rows = _add_replay_columns(task, admin, letters)
        verdict_counts = (
            rows.withColumn("why", F.expr(f"regexp_replace(reason, {value_pattern}, ' is …')"))
            .groupBy("target", "verdict", "why")
            .agg(F.expr("count(1) as messages"), F.expr("min(msg_id) as example"))
            .orderBy("verdict", F.desc("messages"), "why")
            .limit(REASONS_SHOWN_MAX)
            .collect()
        )
    table = []
    reason_lines = []
    for row in verdict_counts:
        verdict = row["verdict"]
        report.figures[verdict] = report.figures.get(verdict, 0) + row["messages"]
        table.append([row["messages"], verdict, row["target"], row["example"]])
        if row["why"]:
            reason_lines.append(f"  {verdict}: {row['why']}")
    titles = ["messages", "verdict", "to", "example"]
    task.report_lines(report, *format_table("If they were sent now", titles, table))
    task.report_lines(report, *reason_lines)


def _replay(task: Task, report: Report) -> None:
    """Send the dead letters again, or continue a replay that was stopped, and write the report.

    The plan is written first, unless the directory `state` has one. Lines and figures are added to
    `report`. Raises ConfigurationError if the option `state` is missing, or if the replay in that
    directory was started with other options, and the errors of the sink.
    """
    options = task.options
    if not options["state"]:
        raise ConfigurationError(
            "the option 'state' is missing.", fix="Name a directory; a replay is resumed from it."
        )
    folder = Folder(task.spark, options["state"])
    state = JobState(folder, "job.json")
    settings = {name: options[name] for name in _FIXED_OPTIONS}
    is_resumed = state.resume(f"dead letters of {options['group']}", settings)
    if not is_resumed:
        _write_plan(task, state)
    report.files += [folder.full_path(PLAN), folder.full_path(REPORT)]
    task.report_lines(report, describe_guarantee(task.connection, options["delivery"]))

    unsent_verdicts = (INVALID, FILTERED) if options["only_matching"] else (INVALID,)
    is_unsent = f"verdict in ({', '.join(map(_to_sql_literal, unsent_verdicts))})"

    def send_step(step_number: int, step_rows: Any) -> None:
        """Send the rows of a step, except those with a verdict that forbids it, and report all."""
        sent_rows = rows_to_send(step_rows.where(f"not ({is_unsent})"))
        write_step(
            sent_rows, task.connection, state["query"], step_number, delivery=options["delivery"]
        )
        # Write the report after the sending, so that it never lists a message as sent too early.
        # A step that is repeated replaces its part of the report.
        _write_step_report(folder, step_number, step_rows, is_unsent, options["report"])

    planned_rows = task.spark.read.parquet(folder.full_path(PLAN))
    is_complete = run_steps(task, state, report, planned_rows, send_step)
    _report_replay(task, report, folder, is_complete=is_complete)


def _write_step_report(
    folder: Folder, step_number: int, step_rows: Any, is_unsent: str, report_format: str
) -> None:
    """Write the part of the report about the rows of one step to `folder`, replacing an older one.

    `is_unsent` is the Spark SQL condition of the rows that were not sent. `report_format` is
    JSON_LINES or PARQUET.
    """
    reported_rows = step_rows.selectExpr(
        "msg_id as id",
        "struct(topic, broker, queue_id, queue_offset, origin_topic) as origin",
        "target as to",
        f"if({is_unsent}, verdict, 'sent') as verdict",
        f"if({is_unsent}, null, new_id) as new_id",
        "reason as error",
    )
    spark_format = "parquet" if report_format == PARQUET else "json"
    path = folder.full_path(f"{REPORT}/step-{step_number:08d}")
    reported_rows.coalesce(1).write.mode("overwrite").format(spark_format).save(path)


def _report_replay(task: Task, report: Report, folder: Folder, *, is_complete: bool) -> None:
    """Add the numbers of messages by verdict, and a line with them, to `report`.

    The numbers are counted in the report files in `folder`, so they include earlier runs.
    """
    for row in read_report(task.spark, folder.path).groupBy("verdict").count().collect():
        report.figures[row["verdict"]] = row["count"]
    counts = ", ".join(
        f"{report.figures[name]:,} {name}"
        for name in ("sent", FILTERED, INVALID)
        if name in report.figures
    )
    ending = "" if is_complete else "; stopped, run it again to continue"
    task.report_lines(
        report, f"{counts or 'nothing to send'}{ending}; report: {folder.full_path(REPORT)}"
    )


def _write_plan(task: Task, state: JobState) -> None:
    """Decide what to send for each dead letter, write that to STATE/plan, and start the job.

    An older plan there is replaced.
    """
    folder = state.folder
    options = task.options
    with open_admin(parse_options(task.connection)) as admin:
        bounds = _fetch_bounds(admin, options["group"])
        letters = _select_dead_letters(task, bounds)
        rows = _add_replay_columns(task, admin, letters)
        plan = rows.selectExpr(
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
        plan.write.mode("overwrite").parquet(folder.full_path(PLAN))
    query = f"dead-letters-{secrets.token_hex(8)}"
    rows_max = rows_per_step(float(options["rate"]), options["step"])
    state.start(query=query, step_rows=rows_max)


def rows_to_send(plan: Any) -> Any:
    """Return rows of a plan with the columns of the sink and `ORIGIN_COLUMNS`.

    A message for a retry topic gets the system properties by which the consumer finds its origin.
    """
    system_properties = (
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
        f"{system_properties} as system_properties",
        *ORIGIN_COLUMNS,
    )


class DeadLetters(ReadyPipeline):
    """Show the causes of a group's dead letters, check what a replay would do, or send them again.

    Raises ConfigurationError, also if a replay in this state was started with other options,
    RouteNotFoundError if the group has no dead letters, and the errors of the sink.
    """

    name = "dead-letters"
    description = (
        "Dead letters of a group: clusters by cause, edits, a dry run, a paced replay with a"
        " report."
    )
    fields = (
        Field("group", TEXT, "The consumer group that has the dead letters."),
        Field(
            "action",
            TEXT,
            "Show the causes; or also check what would become of each message; or send them.",
            CHECK,
            (CLUSTERS, CHECK, REPLAY),
        ),
        Field("where", TEXT, "Spark SQL predicate that selects dead letters.", ""),
        Field("cluster_by", LIST, "Further expressions to group by, besides origin and cause.", ()),
        Field("top", INTEGER, "Maximum number of clusters shown.", 10),
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
            "`origin`: the topic each message comes from, for all its groups; `retry`: the retry"
            " topic, for this group only; or a topic.",
            "origin",
        ),
        Field("filter_sql", TEXT, "Use this SQL92 filter instead of the group's filter.", ""),
        Field("filter_tags", TEXT, "Use these tags instead of the group's filter.", ""),
        Field("only_matching", FLAG, "Send only messages that match the filter.", True),
        *SENDING_FIELDS,
        Field("state", TEXT, "Directory of plan, report and progress; a replay needs it.", ""),
        Field("report", TEXT, "Format of the report.", JSON_LINES, (JSON_LINES, PARQUET)),
    )

    def plan(self, task: Task) -> list[str]:
        """Return the lines that `clusters` or `check` would report. Nothing is sent."""
        report = Report()
        quiet = Task(task.spark, task.options, task.connection, lambda line: None, task.stopping)
        _report_causes(quiet, report, check=task.options["action"] != CLUSTERS)
        if task.options["action"] == REPLAY:
            report.lines.append(describe_guarantee(task.connection, task.options["delivery"]))
        return report.lines

    def run(self, task: Task) -> Report:
        """Do what the option `action` says, and return the report."""
        report = Report()
        action = task.options["action"]
        if action == REPLAY:
            _replay(task, report)
        else:
            _report_causes(task, report, check=action == CHECK)
        return report


dead_letters: Final = DeadLetters()
