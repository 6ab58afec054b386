"""The ready pipeline `replay`: an archive -> topics, resumable and paced.

A message comes back with its body, tags, keys, sharding key and its own properties; to its own
queue (`queues: same`) and under its own id (`ids: same`) when that is asked for. Times and hosts
are those of the new sending, and properties by which RocketMQ itself steers (delay, retry,
transaction, trace) do not come back: they would be acted upon.

    replay(spark, {"nameServers": "127.0.0.1:9876"}, path="/data/archive", name="again-1",
           topics=["flights"], to="flights-again", where="tags = 'UA'")

How it is resumed, and with which guarantee: `steps`. The state is in the archive itself,
`_sluice/replays/NAME.json`, or in `state`; it holds up to where the archive went when the replay
began, so runs that are archived meanwhile do not come in between.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.errors import ConfigurationError
from sluicemq.model.message import RESERVED_PROPERTIES, SHARDING_KEY
from sluicemq.spark.options import AT_LEAST_ONCE, EXACTLY_ONCE, moment
from sluicemq.spark.pipelines.archive import Runs, offsets_of, read_archive
from sluicemq.spark.pipelines.ready import (
    INTEGER,
    LIST,
    NUMBER,
    TEXT,
    Field,
    Ready,
    Report,
    Task,
    task_of,
)
from sluicemq.spark.pipelines.steps import (
    Folder,
    Job,
    Ledger,
    guarantee,
    run_steps,
    step_rows,
    write_step,
)
from sluicemq.spark.sources.offsets import to_table

REPLAYS: Final = "_sluice/replays"
_RESERVED: Final = ", ".join(f"'{name}'" for name in sorted(RESERVED_PROPERTIES))
OWN_PROPERTIES: Final = (
    f"map_filter(properties, (name, value) -> name not in ({_RESERVED})"
    " and not startswith(name, '__RMQ.'))"
)
"""The properties that a producer may set itself."""

FIELDS: Final = (
    Field("path", TEXT, "The archive."),
    Field("name", TEXT, "Name of this replay: run again under it, it goes on where it was."),
    Field("topics", LIST, "Topics to replay; all of the archive without it.", ()),
    Field("to", TEXT, "Topic to send to; without it each message goes to its own topic.", ""),
    Field("where", TEXT, "Spark SQL predicate on the columns of the archive.", ""),
    Field("since", TEXT, "First store time: ISO 8601 or milliseconds.", ""),
    Field("until", TEXT, "First store time not to replay any more.", ""),
    Field("queues", TEXT, "Any queue, or the one it had.", "any", ("any", "same")),
    Field("ids", TEXT, "New message ids, or those they had.", "new", ("new", "same")),
    Field("rate", NUMBER, "Messages a second at most; 0: as fast as it goes.", 0.0),
    Field("step", INTEGER, "Messages of a step; 0: two seconds of the rate.", 0),
    Field(
        "delivery",
        TEXT,
        "With exactly-once a kill doubles nothing (SluiceMQ brokers).",
        EXACTLY_ONCE,
        (EXACTLY_ONCE, AT_LEAST_ONCE),
    ),
    Field("state", TEXT, "Directory of the replay's state; the archive's without it.", ""),
)
_SETTINGS: Final = ("path", "topics", "to", "where", "since", "until", "queues", "ids", "delivery")
"""What a replay that goes on must have in common with its beginning."""


def replay(
    spark: Any,
    connection: Mapping[str, str],
    *,
    say: Callable[[str], None] = print,
    stopping: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Report:
    """Sends messages of an archive again. `options` are those of the pipeline (docs).

    Raises ConfigurationError (also when a replay of this name was begun otherwise), and the
    errors of the sink; run it again to go on.
    """
    return _run(task_of(FIELDS, spark, connection, options, say=say, stopping=stopping))


def _plan(task: Task) -> list[str]:
    ledger, rows = _opened(task)
    found = rows.groupBy("topic").agg(
        F.expr("count(1)").alias("n"), F.expr("min(store_time)").alias("first"),
        F.expr("max(store_time)").alias("last"),
    )  # fmt: skip
    lines = [
        f"send {row['n']:,} messages of {row['topic']!r}, stored {row['first']:%Y-%m-%d %H:%M:%S}"
        f" to {row['last']:%Y-%m-%d %H:%M:%S}, to {task.options['to'] or row['topic']!r}"
        for row in found.orderBy("topic").limit(100).collect()
    ]
    if ledger["steps"]:
        lines.append(f"{ledger['rows']:,} of them are sent already, in {ledger['steps']} steps")
    return [
        *(lines or ["no message to send"]),
        guarantee(task.connection, task.options["delivery"]),
    ]


def _run(task: Task) -> Report:
    ledger, rows = _opened(task)
    if not ledger["steps"]:
        ledger.begin()
    report = Report(figures={"rows": 0}, files=[ledger.folder.at(ledger.file)])
    report.lines.append(guarantee(task.connection, task.options["delivery"]))
    task.say(report.lines[0])
    options = {"delivery": task.options["delivery"]}
    if task.options["to"]:
        options["topic"] = task.options["to"]

    def send(number: int, some: Any) -> None:
        chosen = some.selectExpr(*_columns(task))
        write_step(chosen, task.connection, ledger["query"], number, **options)

    job = Job(rows, ledger["step_rows"], float(task.options["rate"]), send)
    is_done = run_steps(task, ledger, job, report)
    ending = "all is sent" if is_done else "stopped; run it again to go on"
    report.lines.append(f"sent {report.figures['rows']:,} messages; {ending}")
    task.say(report.lines[-1])
    return report


def _columns(task: Task) -> list[str]:
    columns = [
        "body", "tags", "keys", f"{OWN_PROPERTIES} as properties",
        f"properties['{SHARDING_KEY}'] as sharding_key",
        *(f"{name} as from_{name}" for name in ("topic", "broker", "queue_id", "queue_offset")),
    ]  # fmt: skip
    if not task.options["to"]:
        columns.append("topic")
    if task.options["queues"] == "same":
        columns.append("queue_id")
    if task.options["ids"] == "same":
        columns.append("msg_id as message_id")
    return columns


def _opened(task: Task) -> tuple[Ledger, Any]:
    """The replay's state, and all its rows, sent or not."""
    options = task.options
    archived = read_archive(task.spark, options["path"])
    last = Runs(Folder(task.spark, options["path"])).last
    assert last is not None
    name = options["name"]
    if "/" in name or not name:
        raise ConfigurationError(f"the name is {name!r}.", cure="Use letters, digits and -.")
    home = Folder(task.spark, options["state"] or options["path"])
    ledger = Ledger(home, f"{name}.json" if options["state"] else f"{REPLAYS}/{name}.json")
    settings = {key: _plain(options[key]) for key in _SETTINGS}
    if not ledger.open(name, settings):
        ledger.document |= {
            "limits": to_table(last.following, several=True), "query": f"replay-{name}",
            "step_rows": step_rows(float(options["rate"]), options["step"]),
        }  # fmt: skip
    return ledger, _chosen(task, archived, ledger["limits"])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _chosen(task: Task, archived: Any, limits: Mapping[str, Any]) -> Any:
    """The rows of the archive that are asked for, up to where it went at the beginning."""
    options = task.options
    rows = archived
    if options["topics"]:
        rows = rows.where(F.col("topic").isin(list(options["topics"])))
    for option, sign in (("since", ">="), ("until", "<")):
        if options[option]:
            time_ms = _time(option, options[option])
            rows = rows.where(f"store_time {sign} timestamp_millis({time_ms})")
            rows = rows.where(
                f"day {sign if sign == '>=' else '<='} date_from_unix_date({time_ms // 86_400_000})"
            )
    if options["where"]:
        rows = rows.where(options["where"])
    ends = [(*queue, end) for queue, end in sorted(offsets_of(limits).items())]
    known = task.spark.createDataFrame(
        ends, "topic string, broker string, queue_id int, range_end long"
    )
    joined = rows.join(known.hint("broadcast"), ["topic", "broker", "queue_id"])
    return joined.where("queue_offset < range_end").drop("range_end")


def _time(option: str, text: str) -> int:
    try:
        return int(moment(str(text)))
    except ValueError as error:
        raise ConfigurationError(f"the option {option!r} is {text!r}: {error}.") from None


REPLAY: Final = Ready(
    "replay",
    "An archive back into topics: ranges and filters, paced, resumable, exactly once.",
    FIELDS,
    _plan,
    _run,
)
