"""Dead letters as rows, their edits, and what would become of each that is sent again.

A dead letter says by its properties where it comes from (RETRY_TOPIC) and how it was called there
(ORIGIN_MESSAGE_ID); why it failed is nowhere in RocketMQ's format, so `cause` is what the message
itself tells: a property that is named like an error, else a body that is no text or no JSON.

    columns of the view: topic, broker, queue_id, queue_offset, msg_id, keys, tags, properties
    (the producer's own), body, text (the body as UTF-8), born_time, store_time, reconsume_times,
    origin_topic, origin_id, sharding_key, cause

The ready pipeline `dead-letters`: what a group gave up on: why, what to change, and back again.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.client.core.explanations.rules import verdict_on
from sluicemq.client.core.messages import BODY_BYTES_MAX, PROPERTIES_BYTES_MAX
from sluicemq.client.core.names import (
    check_keys,
    check_properties,
    check_tag,
    check_topic_to_send,
)
from sluicemq.client.identity import MessageIds
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, RouteNotFoundError, SluiceError
from sluicemq.filter.check import check_subscription
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.ids import Host
from sluicemq.model.message import (
    KEYS,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    StoredMessage,
)
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX
from sluicemq.spark.options import AT_LEAST_ONCE, EXACTLY_ONCE, parse_options
from sluicemq.spark.pipelines.audit import GroupSubscriptions, subscriptions_of
from sluicemq.spark.pipelines.dead_clusters import cluster_lines
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
    table_lines,
    task_of,
)
from sluicemq.spark.pipelines.replay import OWN_PROPERTIES
from sluicemq.spark.pipelines.steps import (
    Folder,
    Job,
    Ledger,
    guarantee,
    run_steps,
    step_rows,
    write_step,
)
from sluicemq.spark.sources.offset_reader import Bounds, open_admin, queue_bounds
from sluicemq.spark.sources.offsets import to_table

MATCHES, UNCHECKED, FILTERED, INVALID = "matches", "unchecked", "filtered", "invalid"
NO_HINT: Final = "no hint in the message"
_HINT: Final = "(?i)exception|error|cause|reason|fail|stack"
_TEXT_MAX: Final = 100
_NOWHERE: Final = Host("0.0.0.0", 0)
EDITABLE: Final = ("body", "topic", "tags", "keys", "sharding_key", "properties")
SOURCE_COLUMNS: Final = (
    "topic,broker,queue_id,queue_offset,msg_id,keys,tags,properties,body,born_time,store_time,"
    "reconsume_times"
)


def letters_of(rows: Any) -> Any:
    """The view of messages of a dead-letter topic, read with `SOURCE_COLUMNS`, properties=all."""
    named = f"filter(map_entries(own), one -> one.key rlike '{_HINT}' and one.value <> '')"
    told = f"array_sort({named})[0]"
    first_line = f"substring_index({told}.value, '\\n', 1)"
    numbers = r"\\b0x[0-9a-fA-F]+|[0-9a-fA-F-]{16,}|[0-9]+"
    hint = (
        f"concat({told}.key, ': ', left(regexp_replace({first_line}, '{numbers}', '#'),"
        f" {_TEXT_MAX}))"
    )
    cause = (
        f"coalesce(if(size({named}) > 0, {hint}, null), "
        "case when not is_valid_utf8(cast(body as string)) then 'the body is not UTF-8' "
        "when text rlike '^\\\\s*[\\\\[{]' and try_parse_json(text) is null "
        f"then 'the body is no JSON' else '{NO_HINT}' end)"
    )
    return (
        rows.withColumn("text", F.expr("make_valid_utf8(cast(body as string))"))
        .withColumn("own", F.expr(OWN_PROPERTIES))
        .withColumn("origin_topic", F.expr(_either(RETRY_TOPIC, "DLQ_ORIGIN_TOPIC")))
        .withColumn("origin_id", F.expr(_either(ORIGIN_MESSAGE_ID, "DLQ_ORIGIN_MESSAGE_ID")))
        .withColumn("sharding_key", F.expr(f"properties['{SHARDING_KEY}']"))
        .withColumn("cause", F.expr(cause))
        .drop("properties")
        .withColumnRenamed("own", "properties")
    )


def _either(*names: str) -> str:
    looked_up = ", ".join(f"properties['{name}']" for name in names)
    return f"coalesce({looked_up})"


def edited(letters: Any, edits: Mapping[str, str], to: str, group: str) -> Any:
    """The letters as they would be sent: `new_body`, `new_tags`, `new_keys`, `new_properties`,
    `new_sharding_key`, and `target`. Raises ConfigurationError for what cannot be edited.

    `properties.NAME` sets one property, null takes it away; every expression sees the letter as it
    lies there.
    """
    known = dict.fromkeys(EDITABLE) | {"topic": "origin_topic", "keys": "keys"}
    names = {name: how or name for name, how in known.items()}
    single: dict[str, str] = {}
    for name, how in edits.items():
        part, _, rest = name.partition(".")
        if part == "properties" and rest:
            single[rest] = how
        elif name in EDITABLE:
            names[name] = how
        else:
            raise ConfigurationError(
                f"{name!r} cannot be edited.",
                cure=f"There are {', '.join(EDITABLE)}, and properties.NAME.",
            )
    target = {"origin": names["topic"], "retry": f"'%RETRY%{group}'"}.get(to, f"'{to}'")
    columns = {
        "new_body": f"cast({names['body']} as binary)",
        "new_tags": f"cast({names['tags']} as string)",
        "new_keys": _key_text(letters, names["keys"]),
        "new_sharding_key": f"cast({names['sharding_key']} as string)",
        "new_properties": _properties(names["properties"], single),
        "target": f"cast({target} as string)",
        "read_as": f"cast({names['topic'] if to == 'retry' else target} as string)",
    }
    return letters.selectExpr("*", *(f"{how} as {name}" for name, how in columns.items()))


def _key_text(letters: Any, how: str) -> str:
    kind = letters.selectExpr(f"{how} as it").schema["it"].dataType.simpleString()
    return f"array_join({how}, ' ')" if kind.startswith("array") else f"cast({how} as string)"


def _properties(whole: str, single: Mapping[str, str]) -> str:
    """The map with single entries set, or taken away by a null."""
    if not single:
        return whole
    names = ", ".join(_literal(name) for name in single)
    entries = ", ".join(f"{_literal(name)}, cast({how} as string)" for name, how in single.items())
    rest = f"map_filter({whole}, (name, value) -> name not in ({names}))"
    return f"map_filter(map_concat({rest}, map({entries})), (name, value) -> value is not null)"


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@dataclass(frozen=True, slots=True)
class Judge:
    """What becomes of a message that is sent: `subscriptions` of the group by topic (None: not
    known), and the topics that are not there."""

    subscriptions: Mapping[str, tuple[Subscription, ...]] | None
    missing: frozenset[str] = frozenset()

    def verdict(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """(verdict, reason). Never raises a SluiceError."""
        try:
            self._check(row)
        except SluiceError as error:
            return INVALID, str(error)
        if self.subscriptions is None:
            return UNCHECKED, "no member of the group is online, and its filter is not known"
        wanted = self.subscriptions.get(row["read_as"], ())
        if not wanted:
            return FILTERED, f"the group does not subscribe to {row['read_as']!r}"
        message = _as_stored(row)
        for said in wanted:
            _, finding = verdict_on(message, said)
            if finding is not None:
                return FILTERED, finding.what
        return MATCHES, ""

    def _check(self, row: Mapping[str, Any]) -> None:
        target, size = row["target"], row["size"]
        if not target:
            raise ConfigurationError("its origin topic is not known.", cure="Edit its topic.")
        check_topic_to_send(target)
        if target in self.missing:
            raise ConfigurationError(f"the topic {target!r} does not exist.", cure="Create it.")
        if not size or size > BODY_BYTES_MAX:
            raise ConfigurationError(
                f"the body has {size or 0:,} bytes.", cure=f"It takes 1 to {BODY_BYTES_MAX:,}."
            )
        if row["tags"]:
            check_tag(row["tags"])
        check_keys(tuple((row["keys"] or "").split()))
        check_properties(row["properties"])
        total = sum(len(f"{name}{text}".encode()) + 2 for name, text in row["properties"].items())
        if total > PROPERTIES_BYTES_MAX:
            raise ConfigurationError(
                f"the properties have {total:,} bytes.", cure=f"At most {PROPERTIES_BYTES_MAX:,}."
            )


def _as_stored(row: Mapping[str, Any]) -> StoredMessage:
    """The message as a filter will see it."""
    named = {TAGS: row["tags"], KEYS: row["keys"], UNIQ_KEY: row["new_id"], "WAIT": "true"}
    properties = {**row["properties"], **{name: text for name, text in named.items() if text}}
    return StoredMessage(
        row["read_as"], 0, 0, 0, 0, b"", properties, 0, 0, 0, _NOWHERE, 0, _NOWHERE, 0, 0, 0
    )


def judged(rows: Any, judge: Judge) -> Any:
    """The rows with `verdict` and `reason`; bodies do not travel to Python for that."""

    def verdicts(asked: pa.Array) -> pa.Array:
        found = []
        for row in asked.to_pylist():
            row["properties"] = {name: text or "" for name, text in row["properties"] or ()}
            found.append("\x01".join(judge.verdict(row)))
        return pa.array(found, pa.string())

    asked = (
        "struct(target, read_as, new_tags as tags, new_keys as keys, new_properties as properties,"
        " new_id, octet_length(new_body) as size)"
    )
    said = F.arrow_udf(verdicts, "string")(F.expr(asked))
    return (
        rows.withColumn("said", said)
        .withColumn("verdict", F.expr("substring_index(said, '\\u0001', 1)"))
        .withColumn("reason", F.expr("nullif(substring_index(said, '\\u0001', -1), '')"))
        .drop("said")
    )


def numbered(rows: Any, bases: Iterable[tuple[str, int, int]], first_id: str) -> Any:
    """The rows with `new_id`: the id of a row is settled by its place. `bases`: (broker, queue,
    what to add to an offset); `first_id` as `client.identity` makes it."""
    prefix, time = first_id[:20], int(first_id[20:28], 16)
    known = rows.sparkSession.createDataFrame(list(bases), "broker string, queue_id int, base long")
    number = "(queue_offset + base)"
    new_id = (
        f"concat('{prefix}', lpad(hex({time} + {number} div 65536), 8, '0'),"
        f" lpad(hex({number} % 65536), 4, '0'))"
    )
    joined = rows.join(known.hint("broadcast"), ["broker", "queue_id"])
    return joined.withColumn("new_id", F.expr(new_id)).drop("base")


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
