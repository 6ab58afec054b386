"""The ready pipeline `dedup`: the messages of a topic as rows of a table, each message once.

    topic (batch or stream) -> key and columns, by Spark SQL -> INSERT … ON CONFLICT DO NOTHING

The key defines which messages are the same:

    position     the place of the message: topic/broker/queue/offset@store time. The time makes the
                 keys different if a topic was deleted and created again.
    message-id   the producer's id: a send that was repeated is one message
    dedup-key    SLUICE_DEDUP_KEY, which the sink writes to clusters of RocketMQ, else the message
                 id
    other        a Spark SQL expression over the source's columns: properties['order_id']

A stream also has a checkpoint, so that it does not read messages again. The keys do the rest: if
the driver dies, the micro-batch that it was writing is written again and changes nothing.

    write_table(spark, {"nameServers": …}, topic="orders", url="sqlite:///shop.db", table="orders",
                columns={"id": "properties['order_id']", "note": "cast(body as string)"})
"""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name of this module

from sluicemq.errors import ConfigurationError
from sluicemq.pipelines.ready import (
    AVAILABLE_NOW,
    BATCH,
    FLAG,
    INTEGER,
    MAPPING,
    STREAMING,
    TEXT,
    Field,
    ReadyPipeline,
    Report,
    Task,
    finish_query,
    parse_trigger_s,
    spark_trigger,
)
from sluicemq.pipelines.sinks.databases import (
    Target,
    Written,
    absolute_url,
    insert_new_rows,
    prepare_table,
    url_without_password,
)
from sluicemq.spark.schema import BASE_TYPES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STOP_CHECK_S: Final = 0.2
"""The interval at which a running stream checks whether it was asked to stop."""
KEY_COLUMN: Final = "sluice_key"
"""The column of the table that contains the key."""
POSITION = "position"
MESSAGE_ID = "message-id"
DEDUP_KEY = "dedup-key"
KEYS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    POSITION: (
        "concat(topic, '/', broker, '/', queue_id, '/', queue_offset, '@',"
        " unix_millis(store_time))",
        ("topic", "broker", "queue_id", "queue_offset", "store_time"),
    ),
    MESSAGE_ID: ("msg_id", ("msg_id",)),
    DEDUP_KEY: ("coalesce(`SLUICE_DEDUP_KEY`, msg_id)", ("prop:SLUICE_DEDUP_KEY", "msg_id")),
}
"""For each named key: its expression, and the columns that the source must read for it."""
COLUMNS: Final = {
    "topic": "topic",
    "tags": "tags",
    "message_keys": "keys",
    "properties": "to_json(properties)",
    "body": "cast(body as string)",
    "born_time": "born_time",
    "store_time": "store_time",
}
"""The default columns of the table, each with its expression."""


def build_source_options(
    connection: Mapping[str, str], topic: str | None, key: str, source: Mapping[str, str]
) -> dict[str, str]:
    """Return the options of the source, including the columns that the key needs.

    `source` are further options, and override `connection`. `topic` None means that they name it.
    """
    options = {**connection, **source} | ({} if topic is None else {"topic": topic})
    wanted = [part.strip() for part in options.get("columns", ",".join(BASE_TYPES)).split(",")]
    _, needed = KEYS.get(key, (key, ()))
    options["columns"] = ",".join([*wanted, *(name for name in needed if name not in wanted)])
    return options


def select_table_rows(
    messages: "DataFrame", key: str, columns: Mapping[str, str] | None
) -> "DataFrame":
    """Return messages as rows of the table: the key as text, and the columns.

    `key` is a name in `KEYS` or a Spark SQL expression. `columns` maps names to expressions; None
    means `COLUMNS`. Raises ConfigurationError if a column has the name of the key column.
    """
    if KEY_COLUMN in (columns or ()):
        raise ConfigurationError(
            f"the name {KEY_COLUMN!r} is reserved for the key column.",
            fix="Use another column name, or set key: to change the key.",
        )
    chosen = [F.expr(text).alias(name) for name, text in (columns or COLUMNS).items()]
    expression, _ = KEYS.get(key, (key, ()))
    return messages.select(F.expr(expression).cast("string").alias(KEY_COLUMN), *chosen)


def _build_target(rows: "DataFrame", url: str, table: str, batch_rows: int) -> Target:
    """Return the table with the columns of `rows`, whose key is `KEY_COLUMN`."""
    columns = tuple(rows.dtypes)
    return Target(absolute_url(url), table, (KEY_COLUMN,), columns, chunk_rows=batch_rows)


def write_table(
    spark: "SparkSession",
    connection: Mapping[str, str],
    *,
    url: str,
    table: str,
    topic: str | None = None,
    key: str = POSITION,
    columns: Mapping[str, str] | None = None,
    source: Mapping[str, str] | None = None,
    create: bool = True,
    batch_rows: int = 1_000,
) -> Written:
    """Insert messages into a table, as a batch, and return the number of rows and of new ones.

    `url` is the SQLAlchemy URL of the database, `connection` and `source` are options of the source
    `rocketmq`, which select the messages, and `topic` None means that `source` names it. `key` and
    `columns` are those of `select_table_rows`. Messages whose keys exist in the table are skipped.
    If `create` is True, a missing table is created. `batch_rows` is the number of rows of one
    statement. Raises ConfigurationError.
    """
    options = build_source_options(connection, topic, key, source or {})
    rows = select_table_rows(spark.read.format("rocketmq").options(**options).load(), key, columns)
    target = _build_target(rows, url, table, batch_rows)
    prepare_table(target, create=create)
    return insert_new_rows(rows, target)


def stream_table(
    spark: "SparkSession",
    connection: Mapping[str, str],
    *,
    url: str,
    table: str,
    checkpoint: str,
    topic: str | None = None,
    key: str = POSITION,
    columns: Mapping[str, str] | None = None,
    source: Mapping[str, str] | None = None,
    trigger: str = AVAILABLE_NOW,
    create: bool = True,
    batch_rows: int = 1_000,
    on_batch: Callable[[int, Written], None] = lambda number, written: None,
) -> Any:
    """Start a stream that inserts messages into a table, and return its `StreamingQuery`.

    `checkpoint` is Spark's checkpoint directory. `trigger` is `available-now` or a time such as
    `10s`. `on_batch(number, written)` is called after each micro-batch, before Spark records it as
    complete; so it may be called twice for one micro-batch after a crash. If no option names a
    start, the stream begins at the earliest messages. The other arguments are those of
    `write_table`. Raises ConfigurationError.
    """
    options = build_source_options(connection, topic, key, source or {})
    if "startingTimestamp" not in options:
        options.setdefault("startingOffsets", "earliest")
    messages = spark.readStream.format("rocketmq").options(**options).load()
    rows = select_table_rows(messages, key, columns)
    target = _build_target(rows, url, table, batch_rows)
    prepare_table(target, create=create)

    def write(batch: "DataFrame", number: int) -> None:
        on_batch(number, insert_new_rows(batch, target))

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    try:
        writer = writer.trigger(**spark_trigger(parse_trigger_s(trigger)))
    except ValueError as error:
        raise ConfigurationError(
            f"the trigger {trigger!r} is invalid: {error}.", fix=f"Write {AVAILABLE_NOW} or 10s."
        ) from None
    return writer.start()


# ---- the ready pipeline


class Dedup(ReadyPipeline):
    """Insert the messages of a topic into a table, each message once.

    Raises ConfigurationError and the client's errors.
    """

    name = "dedup"
    description = "A topic into a relational table, each message exactly once."
    fields = (
        Field("url", TEXT, "Database URL: sqlite:///shop.db or postgresql://user@host/name."),
        Field("table", TEXT, "The table, or schema.table."),
        Field("topic", TEXT, "The topic; or set topics in source:.", None),
        Field(
            "key",
            TEXT,
            "Identity of a message: position, message-id, dedup-key, or a Spark SQL expression.",
            POSITION,
        ),
        Field("columns", MAPPING, "Column of the table -> Spark SQL expression.", {}),
        Field("source", MAPPING, "Further options of the source: filter.sql, columns …", {}),
        Field("mode", TEXT, "A batch from start to end, or a stream.", BATCH, (BATCH, STREAMING)),
        Field("checkpoint", TEXT, "Checkpoint directory of a stream.", None),
        Field("trigger", TEXT, "Of a stream: available-now, or an interval: 10s.", AVAILABLE_NOW),
        Field("create", FLAG, "Create the table if it is missing.", True),
        Field("batch_rows", INTEGER, "Rows of one statement.", 1_000),
    )

    def plan(self, task: Task) -> list[str]:
        options = task.options
        key = task.options["key"]
        source = build_source_options(task.connection, options["topic"], key, options["source"])
        batch = {name: text for name, text in source.items() if not name.startswith("max")}
        messages = task.spark.read.format("rocketmq").options(**batch).load()
        rows = select_table_rows(messages, key, options["columns"] or None)
        expression, _ = KEYS.get(key, (key, ()))
        return [
            f"read {source.get('topic', 'the source')} as a {options['mode']}",
            f"key {KEY_COLUMN}: {expression}",
            f"columns {', '.join(f'{name} {kind}' for name, kind in rows.dtypes[1:])}",
            f"insert new rows into {options['table']} of {url_without_password(options['url'])}",
        ]

    def run(self, task: Task) -> Report:
        options = task.options
        table = f"{options['table']} of {url_without_password(options['url'])}"
        names = ("url", "table", "topic", "key", "create", "batch_rows", "source")
        given = {name: options[name] for name in names} | {"columns": options["columns"] or None}
        if options["mode"] == BATCH:
            done = write_table(task.spark, task.connection, **given)
        elif not options["checkpoint"]:
            raise ConfigurationError(
                "a stream needs a checkpoint.", fix="Set checkpoint: DIRECTORY, or mode: batch."
            )
        else:
            done = _run_stream(task, given, table)
        repeated = done.rows - done.new
        report = Report({"rows": done.rows, "new": done.new, "repeated": repeated})
        task.report_lines(
            report,
            f"{done.rows:,} messages, {done.new:,} new rows in {table};"
            f" {repeated:,} existed already",
        )
        return report


def _run_stream(task: Task, given: Mapping[str, Any], table: str) -> Written:
    """Run a stream until it ends or the task is stopped; return the sums of all its micro-batches.

    `given` are arguments of `stream_table`, and `table` names the table in texts. Each micro-batch
    is reported by `task.say`. When the task is stopped, the current one is finished.
    """
    done = Written()

    def add_batch(number: int, written: Written) -> None:
        nonlocal done
        done = Written(done.rows + written.rows, done.new + written.new)
        task.say(f"micro-batch {number}: {written.rows:,} rows, {written.new:,} new in {table}")

    query = stream_table(
        task.spark,
        task.connection,
        checkpoint=task.options["checkpoint"],
        trigger=task.options["trigger"],
        on_batch=add_batch,
        **given,
    )
    while query.isActive and not task.stopping():
        threading.Event().wait(STOP_CHECK_S)
    if query.isActive:
        finish_query(query)
    query.awaitTermination()
    return done


DEDUP: Final = Dedup()
