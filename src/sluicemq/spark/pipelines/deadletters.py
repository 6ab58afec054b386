"""The ready pipeline `dead-letters`: what a group gave up on: why, what to change, and back again.

    %DLQ%GROUP -> clusters (`dead_clusters`)                              action: clusters
               -> where, edit -> judged by the group's filter (`dead_rows`)  action: check
               -> STATE/plan (Parquet) -> steps (`steps`) -> topics,
                  STATE/report (a line a message)                          action: replay

`check` writes nothing. `replay` settles first what will be sent, once and for all: places, edits,
verdicts and the new ids go to STATE/plan, and everything after works from there. So a replay that
is killed goes on with the same messages under the same ids, whatever has come to the dead letters,
or happened to filters, in between. A message that the group would not get is not sent, unless
`only_matching` is off; one that no broker would take never is.

    dead_letters(spark, {"nameServers": "127.0.0.1:9876"}, group="billing", action="check",
                 edit={"body": "replace(text, 'NaN', 'null')"})
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.client.identity import MessageIds
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, RouteNotFoundError
from sluicemq.filter.check import check_subscription
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.message import ORIGIN_MESSAGE_ID, RETRY_TOPIC
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX
from sluicemq.spark.cluster import Bounds, open_admin, queue_bounds
from sluicemq.spark.offsets import to_table
from sluicemq.spark.options import AT_LEAST_ONCE, EXACTLY_ONCE, parse_options
from sluicemq.spark.pipelines.calling import task_of
from sluicemq.spark.pipelines.dead_clusters import cluster_lines
from sluicemq.spark.pipelines.dead_rows import (
    FILTERED,
    INVALID,
    SOURCE_COLUMNS,
    Judge,
    edited,
    judged,
    letters_of,
    numbered,
)
from sluicemq.spark.pipelines.folders import Folder
from sluicemq.spark.pipelines.printing import table_lines
from sluicemq.spark.pipelines.ready import (
    FLAG,
    INTEGER,
    LIST,
    MAPPING,
    NUMBER,
    TEXT,
    Field,
    Ready,
    Report,
    Task,
)
from sluicemq.spark.pipelines.steps import (
    Job,
    Ledger,
    guarantee,
    run_steps,
    step_rows,
    write_step,
)
from sluicemq.spark.pipelines.subscribed import GroupSubscriptions, subscriptions_of

CLUSTERS, CHECK, REPLAY = "clusters", "check", "replay"
JSON_LINES, PARQUET = "jsonl", "parquet"
TOPICS_MAX: Final = 1_000
REASONS_SHOWN_MAX: Final = 20
PLAN: Final = "plan"
REPORT: Final = "report"

FIELDS: Final = (
    Field("group", TEXT, "The consumer group whose dead letters these are."),
    Field(
        "action",
        TEXT,
        "Say why they died; or also what would become of each that is sent again; or send them.",
        CHECK,
        (CLUSTERS, CHECK, REPLAY),
    ),
    Field("where", TEXT, "Spark SQL predicate: which of them.", ""),
    Field("cluster_by", LIST, "Further expressions to group by, besides origin and cause.", ()),
    Field("top", INTEGER, "How many clusters are shown.", 10),
    Field(
        "edit",
        MAPPING,
        "What to change: body, topic, tags, keys, sharding_key, properties or properties.NAME, "
        "each with a Spark SQL expression.",
        {},
    ),
    Field(
        "to",
        TEXT,
        "`origin`: the topic each comes from, for all its readers; `retry`: the group's retry "
        "topic, for this group alone; or a topic.",
        "origin",
    ),
    Field("filter_sql", TEXT, "Judge by this SQL92 selector, not by the group's filter.", ""),
    Field("filter_tags", TEXT, "Judge by these tags, not by the group's filter.", ""),
    Field("only_matching", FLAG, "Send only what the group's filter lets through.", True),
    Field("rate", NUMBER, "Messages a second at most; 0: as fast as it goes.", 0.0),
    Field("step", INTEGER, "Messages of a step; 0: two seconds of the rate.", 0),
    Field(
        "delivery",
        TEXT,
        "With exactly-once a kill doubles nothing (SluiceMQ brokers).",
        EXACTLY_ONCE,
        (EXACTLY_ONCE, AT_LEAST_ONCE),
    ),
    Field("state", TEXT, "Directory of plan, report and progress; needed to replay.", ""),
    Field("report", TEXT, "Form of the report.", JSON_LINES, (JSON_LINES, PARQUET)),
)
_SETTINGS: Final = ("group", "where", "edit", "to", "filter_sql", "filter_tags", "only_matching",
                    "delivery", "report")  # fmt: skip


def dead_letters(
    spark: Any,
    connection: Mapping[str, str],
    *,
    say: Callable[[str], None] = print,
    stopping: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Report:
    """Dead letters of a group: clusters, check or replay. `options` are those of the pipeline.

    Raises ConfigurationError (also when a replay in this state was begun otherwise),
    RouteNotFoundError when the group has no dead letters, and the errors of the sink.
    """
    return _run(task_of(FIELDS, spark, connection, options, say=say, stopping=stopping))


def read_letters(spark: Any, connection: Mapping[str, str], group: str) -> Any:
    """The dead letters of a group as a DataFrame, with the columns of `dead_rows`."""
    with _admin(connection) as admin:
        return _letters(spark, connection, group, _bounds(admin, group))


def read_report(spark: Any, state: str) -> Any:
    """The report of a replay: a row a message with id, origin, to, verdict, new_id and error."""
    folder = Folder(spark, f"{state}/{REPORT}")
    steps = [folder.at(name) for name in folder.names() if name.startswith("step-")]
    if not steps:
        raise ConfigurationError(
            f"there is no report in {folder.path}.", cure="Run the pipeline with action: replay."
        )
    is_parquet = bool(folder.files("", ".parquet"))
    reader = spark.read.schema(_REPORT_SCHEMA)
    return reader.parquet(*steps) if is_parquet else reader.json(steps)


_REPORT_SCHEMA: Final = (
    "id string, origin struct<topic:string, broker:string, queue_id:int, queue_offset:bigint,"
    " origin_topic:string>, to string, verdict string, new_id string, error string"
)


def _plan(task: Task) -> list[str]:
    lines: list[str] = []
    quiet = Task(task.spark, task.options, task.connection, lines.append, task.stopping)
    _look(quiet, Report(), check=task.options["action"] != CLUSTERS)
    if task.options["action"] == REPLAY:
        lines.append(guarantee(task.connection, task.options["delivery"]))
    return lines


def _run(task: Task) -> Report:
    report = Report()
    action = task.options["action"]
    if action == REPLAY:
        _replay(task, report)
    else:
        _look(task, report, check=action == CHECK)
    return report


def _say(task: Task, report: Report, *lines: str) -> None:
    for line in lines:
        task.say(line)
    report.lines += lines


# ------------------------------------------------------------------------------ looking at them


def _look(task: Task, report: Report, *, check: bool) -> None:
    options = task.options
    with _admin(task.connection) as admin:
        bounds = _bounds(admin, options["group"])
        letters = _wanted(task, bounds)
        by, top = list(options["cluster_by"]), int(options["top"])
        _say(task, report, *cluster_lines(letters, admin, task.connection, by, top))
        report.figures["letters"] = letters.count()
        if check:
            rows = _judged(task, admin, letters, bounds, MessageIds(SYSTEM_CLOCK).next())
            _tell_verdicts(task, report, rows)


def _tell_verdicts(task: Task, report: Report, rows: Any) -> None:
    """How many of each verdict and, values aside, of each reason; needs no body."""
    values = "' is (\\'[^\\']*\\'|-?[0-9.]+)'"
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
    _say(task, report, *table_lines("If they were sent now", names, table))
    reasons = [row for row in found if row["why"]]
    _say(task, report, *(f"  {row['verdict']}: {row['why']}" for row in reasons))


def _admin(connection: Mapping[str, str]) -> Admin:
    return open_admin(parse_options(connection))


def _bounds(admin: Admin, group: str) -> Bounds:
    try:
        return queue_bounds(admin, [DLQ_PREFIX + group])
    except RouteNotFoundError:
        raise RouteNotFoundError(
            f"the group {group!r} has no dead letters: there is no topic {DLQ_PREFIX + group!r}.",
            cure="A group gets one with its first dead letter.",
        ) from None


def _letters(spark: Any, connection: Mapping[str, str], group: str, bounds: Bounds) -> Any:
    starts = {queue: low for queue, (low, _) in bounds.items()}
    ends = {queue: high for queue, (_, high) in bounds.items()}
    rows = (
        spark.read.format("rocketmq")
        .options(**connection)
        .options(
            topic=DLQ_PREFIX + group, columns=SOURCE_COLUMNS, properties="all",
            startingOffsets=json.dumps(to_table(starts, several=False)),
            endingOffsets=json.dumps(to_table(ends, several=False)), reportPushdown="false",
        )
        .load()
    )  # fmt: skip
    return letters_of(rows)


def _wanted(task: Task, bounds: Bounds) -> Any:
    letters = _letters(task.spark, task.connection, task.options["group"], bounds)
    return letters.where(task.options["where"]) if task.options["where"] else letters


# ----------------------------------------------------------------------------- judging them


def _judged(task: Task, admin: Admin, letters: Any, bounds: Bounds, first_id: str) -> Any:
    """The letters as they would be sent, each with its new id, verdict and reason."""
    options = task.options
    rows = edited(letters, options["edit"], options["to"], options["group"])
    named = rows.select("target", "read_as").distinct().limit(TOPICS_MAX).collect()
    targets = {str(row["target"]) for row in named if row["target"]}
    topics = {str(row["read_as"]) for row in named if row["read_as"]}
    missing = frozenset(
        one for one in targets
        if not one.startswith(RETRY_PREFIX) and admin.find_route(one) is None
    )  # fmt: skip
    bases, total = [], 0
    for queue, (low, high) in sorted(bounds.items()):
        bases.append((queue.broker, queue.queue_id, total - low))
        total += high - low
    judge = Judge(_subscriptions(task, admin, topics), missing)
    return judged(numbered(rows, bases, first_id), judge)


def _subscriptions(
    task: Task, admin: Admin, topics: set[str]
) -> dict[str, tuple[Subscription, ...]] | None:
    """Topic -> what the group wants of it now, or what is to be assumed; None is not known."""
    options = task.options
    if options["filter_sql"] and options["filter_tags"]:
        raise ConfigurationError(
            "filter_sql and filter_tags are given together.", cure="Give one of them."
        )
    for option, kind in (("filter_sql", SQL92), ("filter_tags", TAG)):
        if options[option]:
            check_subscription(Subscription("", options[option], kind))
            return {topic: (subscribe(topic, options[option], kind),) for topic in topics}
    (found,) = subscriptions_of(admin, [options["group"]])
    if not found.is_online and not found.kept:
        return None
    return {topic: _parsed(found, topic) for topic in topics}


def _parsed(found: GroupSubscriptions, topic: str) -> tuple[Subscription, ...]:
    """With their tags, which brokers do not tell."""
    return tuple(subscribe(topic, one.expression, one.kind) for one in found.wanted(topic))


# ---------------------------------------------------------------------------- sending them again


def _replay(task: Task, report: Report) -> None:
    options = task.options
    if not options["state"]:
        raise ConfigurationError(
            "the option 'state' is missing.", cure="Name a directory: it makes a replay resumable."
        )
    folder = Folder(task.spark, options["state"])
    ledger = Ledger(folder, "job.json")
    settings = {name: options[name] for name in _SETTINGS}
    if not ledger.open(f"dead letters of {options['group']}", settings):
        _settle(task, ledger)
    rows = task.spark.read.parquet(folder.at(PLAN))
    report.files += [folder.at(PLAN), folder.at(REPORT)]
    _say(task, report, guarantee(task.connection, options["delivery"]))

    def send(number: int, some: Any) -> None:
        chosen = rows_to_send(some, only_matching=options["only_matching"])
        write_step(chosen, task.connection, ledger["query"], number, delivery=options["delivery"])
        _write_report(some, folder, number, options)

    job = Job(rows, ledger["step_rows"], float(options["rate"]), send)
    is_done = ledger["done"] or run_steps(task, ledger, job, report)
    for row in read_report(task.spark, folder.path).groupBy("verdict").count().collect():
        report.figures[row["verdict"]] = row["count"]
    counted = ", ".join(
        f"{report.figures[name]:,} {name}" for name in ("sent", FILTERED, INVALID)
        if name in report.figures
    )  # fmt: skip
    ending = "" if is_done else "; stopped, run it again to go on"
    _say(task, report, f"{counted or 'nothing to send'}{ending}; report: {folder.at(REPORT)}")


def _settle(task: Task, ledger: Ledger) -> None:
    """Decides what every message becomes, before the first is sent."""
    folder, options = ledger.folder, task.options
    first_id = MessageIds(SYSTEM_CLOCK).next()
    with _admin(task.connection) as admin:
        bounds = _bounds(admin, options["group"])
        rows = _judged(task, admin, _wanted(task, bounds), bounds, first_id)
        kept = rows.selectExpr(
            "topic", "broker", "queue_id", "queue_offset", "store_time", "msg_id", "origin_topic",
            "origin_id", "target", "new_id", "verdict", "reason", "new_body", "new_tags",
            "new_keys", "new_sharding_key", "new_properties",
        )  # fmt: skip
        kept.write.mode("overwrite").parquet(folder.at(PLAN))
    name = hashlib.sha256(f"{folder.path} {first_id}".encode()).hexdigest()[:16]
    size = step_rows(float(options["rate"]), options["step"])
    ledger.begin(query=f"dead-letters-{name}", step_rows=size)


def rows_to_send(plan: Any, *, only_matching: bool) -> Any:
    """Rows of a plan as the sink takes them."""
    refused = f"'{INVALID}', '{FILTERED}'" if only_matching else f"'{INVALID}'"
    is_retry = f"startswith(target, '{RETRY_PREFIX}')"
    system = (
        f"if({is_retry}, map('{RETRY_TOPIC}', origin_topic, '{ORIGIN_MESSAGE_ID}',"
        " coalesce(origin_id, msg_id)), cast(map() as map<string,string>))"
    )
    return plan.where(f"verdict not in ({refused})").selectExpr(
        "target as topic", "new_body as body", "new_tags as tags", "new_keys as keys",
        "new_sharding_key as sharding_key", "new_properties as properties",
        "new_id as message_id", f"{system} as system_properties",
        *(f"{name} as from_{name}" for name in ("topic", "broker", "queue_id", "queue_offset")),
    )  # fmt: skip


def _write_report(some: Any, folder: Folder, number: int, options: Mapping[str, Any]) -> None:
    """A line a message of this step; written again when the step is."""
    unsent = f"'{INVALID}', '{FILTERED}'" if options["only_matching"] else f"'{INVALID}'"
    lines = some.selectExpr(
        "msg_id as id",
        "struct(topic, broker, queue_id, queue_offset, origin_topic) as origin",
        "target as to",
        f"if(verdict in ({unsent}), verdict, 'sent') as verdict",
        f"if(verdict in ({unsent}), null, new_id) as new_id",
        "reason as error",
    )
    writer = lines.coalesce(1).write.mode("overwrite")
    place = folder.at(f"{REPORT}/step-{number:08d}")
    if options["report"] == PARQUET:
        writer.parquet(place)
    else:
        writer.json(place)


DEAD_LETTERS: Final = Ready(
    "dead-letters",
    "Dead letters of a group: clusters by cause, edits, a dry run, a paced replay with a report.",
    FIELDS,
    _plan,
    _run,
)
