"""The ready pipeline `dead-letters`: the causes of dead letters, edits, and sending them again.

    %DLQ%GROUP -> clusters                                                 action: clusters
               -> where, edit -> verdicts by the group's filter            action: check
               -> STATE/plan (Parquet) -> steps (`pipelines.sinks.steps`) -> topics,
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
from sluicemq.errors import ConfigurationError, RouteNotFoundError
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
from sluicemq.pipelines.clusters import format_clusters
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
from sluicemq.pipelines.sinks.steps import (
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
_PLAN_COLUMNS: Final = (
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

    The columns are id, origin, to, verdict, new_id and error. The verdict is "sent" or why the
    message was not sent. `state` is the directory of the replay. Raises ConfigurationError if it
    has no report.
    """
    folder = Folder(spark, f"{state}/{REPORT}")
    step_names = [name for name in folder.list_names() if name.startswith("step-")]
    if not step_names:
        raise ConfigurationError(
            f"there is no report in {folder.path}.", fix="Run the pipeline with action: replay."
        )
    step_paths = [folder.full_path(name) for name in step_names]
    reader = spark.read.schema(_REPORT_SCHEMA)
    if folder.list_files("", ".parquet"):
        return reader.parquet(*step_paths)
    return reader.json(step_paths)


def _fetch_bounds(admin: Admin, group: str) -> Bounds:
    """Return (first offset, end offset) of each queue of the group's dead-letter topic.

    Raises RouteNotFoundError if the group has no such topic.
    """
    try:
        return fetch_bounds(admin, [DLQ_PREFIX + group])
    except RouteNotFoundError:
        raise no_dead_letters(group) from None


def _load_dead_letters(
    spark: Any, connection: Mapping[str, str], group: str, bounds: Bounds
) -> Any:
    """Return the dead letters of a group as a DataFrame, with the columns of `read_dead_letters`.

    `bounds` has the first and the end offset of each queue of the dead-letter topic. Only messages
    in between are read.
    """
    starts = {queue: lowest for queue, (lowest, _) in bounds.items()}
    ends = {queue: end for queue, (_, end) in bounds.items()}
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
    return (
        rows.withColumn("text", F.expr("make_valid_utf8(cast(body as string))"))
        .withColumn("own", F.expr(OWN_PROPERTIES))
        .withColumn("origin_topic", _first_property(*ORIGIN_TOPICS))
        .withColumn("origin_id", _first_property(*ORIGIN_IDS))
        .withColumn("sharding_key", _first_property(SHARDING_KEY))
        .withColumn("cause", _build_cause_column())
        .drop("properties")
        .withColumnRenamed("own", "properties")
    )


def _build_cause_column() -> Any:
    """Return a Spark column with the cause why each message became a dead letter.

    It is computed in Python workers, from the columns own (the producer's properties), body and
    _error.
    """

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
    return F.arrow_udf(find_causes, "string")(F.expr(letter_struct))


def _first_property(*names: str) -> Any:
    """Return the column with the first of the properties `names` that a message has, else null."""
    return F.coalesce(*(F.expr(f"properties['{name}']") for name in names))


# ---- edits and verdicts


def apply_edits(letters: Any, edits: Mapping[str, str], to: str, group: str) -> Any:
    """Return the dead letters with further columns: what would be sent, and to which topic.

    `edits` maps parts of a message to Spark SQL expressions of their new values. Its keys are those
    of `EDITABLE`, or `properties.NAME` for one property, which null removes. All expressions read
    the unedited dead letter. `to` is "origin", "retry" (the retry topic of `group`) or a topic.

    The new columns are `new_body`, `new_tags`, `new_keys`, `new_properties`, `new_sharding_key`,
    `target` (the topic), `read_as` (the topic whose subscription decides whether the group receives
    the message) and `body_error`. Raises ConfigurationError if `edits` has another key.
    """
    expressions, single_properties = _parse_edits(edits)
    origin_topic = expressions["topic"]
    target = {"origin": origin_topic, "retry": f"'%RETRY%{group}'"}.get(to, f"'{to}'")
    # The group receives a message for its retry topic by its subscription to the origin topic.
    subscribed_topic = origin_topic if to == "retry" else target
    # An edit of the body replaces stored bytes that cannot be decompressed. Without one, they must
    # not be sent, because they are not what the producer sent.
    body_error = "''" if "body" in edits else f"coalesce({ERROR_NAME}, '')"
    expression_by_column = {
        "new_body": f"cast({expressions['body']} as binary)",
        "new_tags": f"cast({expressions['tags']} as string)",
        "new_keys": _join_keys(letters, expressions["keys"]),
        "new_sharding_key": f"cast({expressions['sharding_key']} as string)",
        "new_properties": _set_properties(expressions["properties"], single_properties),
        "target": f"cast({target} as string)",
        "read_as": f"cast({subscribed_topic} as string)",
        "body_error": body_error,
    }
    new_columns = [
        f"{expression} as {column}" for column, expression in expression_by_column.items()
    ]
    return letters.selectExpr("*", *new_columns)


def _parse_edits(edits: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return (expressions of parts, expressions of single properties), both as dicts.

    A part that is not edited has the name of its column as its expression. The keys of the second
    dict are names of properties as SQL literals. Raises ConfigurationError if `edits` has a key
    that cannot be edited.
    """
    expressions = {part: part for part in EDITABLE} | {"topic": "origin_topic"}
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
    return expressions, single_properties


def _join_keys(letters: Any, keys_expression: str) -> str:
    """Return a Spark SQL expression of the keys as one text, separated by spaces.

    `keys_expression` may be a text or an array of keys. `letters` are used to find out its type.
    """
    selected = letters.selectExpr(f"{keys_expression} as it")
    keys_type = selected.schema["it"].dataType.simpleString()
    if keys_type.startswith("array"):
        return f"array_join({keys_expression}, ' ')"
    return f"cast({keys_expression} as string)"


def _to_sql_literal(text: str) -> str:
    """Return the text as a string literal of Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _set_properties(properties: str, single_properties: Mapping[str, str]) -> str:
    """Return a Spark SQL expression of a map of properties, in which some properties are changed.

    `properties` is the expression of the original map. `single_properties` maps names, as SQL
    literals, to expressions of new values. A value of null removes the property.
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
    """Return the rows with the columns `verdict` (whether a row would be sent) and `reason`.

    `rows` are the result of `apply_edits`, with the column new_id. `judge` decides in Python
    workers. `reason` says why a row would not be sent; null if there is no reason.
    """

    def find_verdicts(messages: pa.Array) -> pa.Array:
        """Return the verdict and the reason of each message, joined by the character U+0001.

        This runs in Python workers. A property without content counts as "".
        """
        joined_verdicts = []
        for message in messages.to_pylist():
            stored_properties = message["properties"] or ()
            message["properties"] = {name: content or "" for name, content in stored_properties}
            joined_verdicts.append("\x01".join(judge.verdict(message)))
        return pa.array(joined_verdicts, pa.string())

    # The workers get only the size of the body.
    message_struct = (
        "struct(target, read_as, new_tags as tags, new_keys as keys, new_properties as properties,"
        " new_id, octet_length(new_body) as size, body_error)"
    )
    joined_column = F.arrow_udf(find_verdicts, "string")(F.expr(message_struct))
    return (
        rows.withColumn("joined", joined_column)
        .withColumn("verdict", F.expr("substring_index(joined, '\\u0001', 1)"))
        .withColumn("reason", F.expr("nullif(substring_index(joined, '\\u0001', -1), '')"))
        .drop("joined")
    )


def add_new_ids(rows: Any) -> Any:
    """Return the rows with the column `new_id`, the message id that a sent row gets.

    The id is computed from topic, broker, queue, offset and store time of the dead letter, so it is
    the same each time.
    """

    def make_ids(origins: pa.Array) -> pa.Array:
        """Return the id of each struct of an origin. This runs in Python workers."""
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
    """Return the dead letters with what would be sent: edited parts, new id, verdict and reason.

    The brokers are asked whether the target topics exist, and for the group's subscription. Raises
    ConfigurationError for wrong options, and the client's errors.
    """
    options = task.options
    rows = apply_edits(letters, options["edit"], options["to"], options["group"])
    checked_targets = set()
    subscribed_topics = set()
    for row in rows.select("target", "read_as").distinct().limit(TOPICS_MAX).collect():
        # A retry topic may be missing: it is created when a consumer connects.
        if row["target"] and not is_retry_topic(str(row["target"])):
            checked_targets.add(str(row["target"]))
        if row["read_as"]:
            subscribed_topics.add(str(row["read_as"]))
    assumed = _assume_subscriptions(task, subscribed_topics)
    judge = admin.dead_letter_judge(options["group"], checked_targets, subscribed_topics, assumed)
    return add_verdicts(add_new_ids(rows), judge)


def _assume_subscriptions(
    task: Task, topics: set[str]
) -> dict[str, tuple[Subscription, ...]] | None:
    """Return the subscription to each topic that the options name, or None if they name none.

    None means that the group's own subscription is used. Raises ConfigurationError if the options
    name both tags and SQL92, and FilterSyntaxError for an invalid expression.
    """
    sql = task.options["filter_sql"]
    tags = task.options["filter_tags"]
    if sql and tags:
        raise ConfigurationError(
            "filter_sql and filter_tags are given together.", fix="Set one of them."
        )
    if not sql and not tags:
        return None
    expression = sql or tags
    kind = SQL92 if sql else TAG
    check_subscription(Subscription("", expression, kind))
    return {topic: (parse_subscription(topic, expression, kind),) for topic in topics}


# ---- the ready pipeline


def _report_causes(task: Task, report: Report, *, check: bool) -> None:
    """Report the dead letters, grouped by cause. Nothing is written or sent.

    With `check`, also report what would become of each message if it were sent now. Lines and
    figures are added to `report`.
    """
    options = task.options
    with open_admin(parse_options(task.connection)) as admin:
        bounds = _fetch_bounds(admin, options["group"])
        letters = _select_dead_letters(task, bounds)
        lines = format_clusters(
            letters,
            admin,
            task.connection,
            expressions=list(options["cluster_by"]),
            count_max=int(options["top"]),
        )
        task.report_lines(report, *lines)
        report.figures["letters"] = letters.count()
        if not check:
            return
        verdict_counts = _count_verdicts(_add_replay_columns(task, admin, letters))
    _report_verdicts(task, report, verdict_counts)


def _count_verdicts(rows: Any) -> list[Any]:
    """Return the number of messages by target, verdict and reason, as rows.

    A row has the columns target, verdict, why (the reason), messages and example (a message id).
    Values are removed from reasons, so that messages with a similar reason are counted together. At
    most `REASONS_SHOWN_MAX` rows are returned.
    """
    value_pattern = "' is (\\'[^\\']*\\'|-?[0-9.]+)'"
    verdict_counts: list[Any] = (
        rows.withColumn("why", F.expr(f"regexp_replace(reason, {value_pattern}, ' is …')"))
        .groupBy("target", "verdict", "why")
        .agg(F.expr("count(1) as messages"), F.expr("min(msg_id) as example"))
        .orderBy("verdict", F.desc("messages"), "why")
        .limit(REASONS_SHOWN_MAX)
        .collect()
    )
    return verdict_counts


def _report_verdicts(task: Task, report: Report, verdict_counts: Sequence[Any]) -> None:
    """Add a table of verdicts, a line for each reason, and a figure for each verdict to `report`.

    `verdict_counts` are the rows of `_count_verdicts`.
    """
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

    First a plan is written to the directory `state`, with what is sent for each dead letter, unless
    the directory has one. Lines and figures are added to `report`. Raises ConfigurationError if the
    option `state` is missing, or if the replay in that directory was started with other options,
    and the errors of the sink.
    """
    options = task.options
    delivery = options["delivery"]
    if not options["state"]:
        raise ConfigurationError(
            "the option 'state' is missing.", fix="Name a directory; a replay is resumed from it."
        )
    folder = Folder(task.spark, options["state"])
    state = JobState(folder, "job.json")
    fixed_options = {name: options[name] for name in _FIXED_OPTIONS}
    is_resumed = state.resume(f"dead letters of {options['group']}", fixed_options)
    if not is_resumed:
        _write_plan(task, state)
    report.files += [folder.full_path(PLAN), folder.full_path(REPORT)]
    task.report_lines(report, describe_guarantee(task.connection, delivery))

    is_unsent = _build_unsent_condition(only_matching=options["only_matching"])

    def send_step(step_number: int, step_rows: Any) -> None:
        """Send the rows of a step, except those with a verdict that forbids it, and report all."""
        sent_rows = rows_to_send(step_rows.where(f"not ({is_unsent})"))
        write_step(sent_rows, task.connection, state["query"], step_number, delivery=delivery)
        # Write the report after the sending, so that it never lists a message as sent too early.
        # A step that is repeated replaces its part of the report.
        _write_step_report(folder, step_number, step_rows, is_unsent, options["report"])

    planned_rows = task.spark.read.parquet(folder.full_path(PLAN))
    is_complete = run_steps(task, state, report, planned_rows, send_step)
    _report_replay(task, report, folder, is_complete=is_complete)


def _build_unsent_condition(*, only_matching: bool) -> str:
    """Return the Spark SQL condition of the planned rows that are not sent.

    With `only_matching`, they include the messages that the group's filter does not match.
    """
    unsent_verdicts = (INVALID, FILTERED) if only_matching else (INVALID,)
    return f"verdict in ({', '.join(map(_to_sql_literal, unsent_verdicts))})"


def _write_step_report(
    folder: Folder, step_number: int, step_rows: Any, is_unsent: str, report_format: str
) -> None:
    """Write the part of the report about the rows of one step, replacing an older one.

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
    """Add the number of messages with each verdict to `report`, as figures and as a line.

    They are counted in the report files in `folder`, so they include earlier runs.
    """
    for row in read_report(task.spark, folder.path).groupBy("verdict").count().collect():
        report.figures[row["verdict"]] = row["count"]
    counts = [
        f"{report.figures[verdict]:,} {verdict}"
        for verdict in ("sent", FILTERED, INVALID)
        if verdict in report.figures
    ]
    summary = ", ".join(counts) or "nothing to send"
    ending = "" if is_complete else "; stopped, run it again to continue"
    task.report_lines(report, f"{summary}{ending}; report: {folder.full_path(REPORT)}")


def _write_plan(task: Task, state: JobState) -> None:
    """Decide what to send for each dead letter, write it to STATE/plan, and start the job.

    An older plan is replaced.
    """
    options = task.options
    with open_admin(parse_options(task.connection)) as admin:
        bounds = _fetch_bounds(admin, options["group"])
        letters = _select_dead_letters(task, bounds)
        rows = _add_replay_columns(task, admin, letters)
        planned_rows = rows.select(*_PLAN_COLUMNS)
        planned_rows.write.mode("overwrite").parquet(state.folder.full_path(PLAN))
    query = f"dead-letters-{secrets.token_hex(8)}"
    rows_max = rows_per_step(float(options["rate"]), options["step"])
    state.start(query=query, step_rows=rows_max)


def rows_to_send(plan: Any) -> Any:
    """Return rows of a plan with the columns of the sink and `ORIGIN_COLUMNS`.

    A message for a retry topic gets system properties with its original topic and message id, which
    consumers need.
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
        """Return the lines of a report about what `run` would do. Nothing is sent."""
        report = Report()
        quiet = Task(task.spark, task.options, task.connection, lambda line: None, task.stopping)
        _report_causes(quiet, report, check=task.options["action"] != CLUSTERS)
        if task.options["action"] == REPLAY:
            report.lines.append(describe_guarantee(task.connection, task.options["delivery"]))
        return report.lines

    def run(self, task: Task) -> Report:
        """Do what the option `action` says: group by cause, check, or replay. Return the report."""
        report = Report()
        action = task.options["action"]
        if action == REPLAY:
            _replay(task, report)
        else:
            _report_causes(task, report, check=action == CHECK)
        return report


dead_letters: Final = DeadLetters()
