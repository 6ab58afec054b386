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
    """Return the options of the source, with the columns that the key needs.

    `source` are further options, which override `connection`. `topic` may be None if `source` names
    the topic. `key` is a name in `KEYS`, or an expression, for which no columns are added.
    """
    options = {**connection, **source}
    if topic is not None:
        options["topic"] = topic
    columns = [name.strip() for name in options.get("columns", ",".join(BASE_TYPES)).split(",")]
    _, key_columns = KEYS.get(key, (key, ()))
    added_columns = [name for name in key_columns if name not in columns]
    options["columns"] = ",".join([*columns, *added_columns])
    return options


def select_table_rows(
    messages: "DataFrame", key: str, columns: Mapping[str, str] | None
) -> "DataFrame":
    """Return messages as rows of the table: a column with the key as text, and the other columns.

    `key` is a name in `KEYS` or a Spark SQL expression. `columns` maps names of columns to
    expressions; None means the default `COLUMNS`. Raises ConfigurationError if a column has the
    name of the key column.
    """
    if KEY_COLUMN in (columns or ()):
        raise ConfigurationError(
            f"the name {KEY_COLUMN!r} is reserved for the key column.",
            fix="Use another column name, or set key: to change the key.",
        )
    key_expression, _ = KEYS.get(key, (key, ()))
    key_column = F.expr(key_expression).cast("string").alias(KEY_COLUMN)
    expression_by_name = columns or COLUMNS
    value_columns = [
        F.expr(expression).alias(name) for name, expression in expression_by_name.items()
    ]
    return messages.select(key_column, *value_columns)


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
    """Insert the messages that a table does not have yet, as a batch.

    Return the number of messages and of new rows. `url` is the SQLAlchemy URL of the database.
    `connection` and `source` are options of the source `rocketmq`, which select the messages.
    `topic` may be None if `source` names it. `key` is the name of a key or an expression, and
    `columns` maps names of columns to expressions. Messages whose keys exist in the table are
    skipped. If `create` is True, a missing table is created. `batch_rows` is the number of rows of
    one statement. Raises ConfigurationError for wrong options, or if the table is unsuitable.
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
    """Start a stream that inserts the messages that a table does not have yet.

    Return its `StreamingQuery`. `checkpoint` is Spark's checkpoint directory. `trigger` is
    `available-now` or a time such as `10s`. `on_batch(number, written)` is called after each
    micro-batch, before Spark records it as complete. So after a crash, it may be called twice for
    one micro-batch. If no option names a start, the stream begins at the earliest messages. The
    other arguments have the same meaning as for `write_table`. Raises ConfigurationError.
    """
    options = build_source_options(connection, topic, key, source or {})
    if "startingTimestamp" not in options:
        options.setdefault("startingOffsets", "earliest")
    messages = spark.readStream.format("rocketmq").options(**options).load()
    rows = select_table_rows(messages, key, columns)
    target = _build_target(rows, url, table, batch_rows)
    prepare_table(target, create=create)

    def insert_micro_batch(batch: "DataFrame", number: int) -> None:
        """Insert the rows of micro-batch `number`, and report them to `on_batch`."""
        on_batch(number, insert_new_rows(batch, target))

    writer = rows.writeStream.foreachBatch(insert_micro_batch)
    writer = writer.option("checkpointLocation", checkpoint)
    return _set_trigger(writer, trigger).start()


def _set_trigger(writer: Any, trigger: str) -> Any:
    """Return the writer of a stream with a trigger; raise ConfigurationError if it is invalid."""
    try:
        return writer.trigger(**spark_trigger(parse_trigger_s(trigger)))
    except ValueError as error:
        raise ConfigurationError(
            f"the trigger {trigger!r} is invalid: {error}.", fix=f"Write {AVAILABLE_NOW} or 10s."
        ) from None


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
        """Return lines about the source, the key, the columns and the table.

        The source is loaded as a batch, so that Spark checks the expressions.
        """
        options = task.options
        key = options["key"]
        source = build_source_options(task.connection, options["topic"], key, options["source"])
        # Options such as maxOffsetsPerTrigger are only for streams.
        batch_options = {
            name: option for name, option in source.items() if not name.startswith("max")
        }
        messages = task.spark.read.format("rocketmq").options(**batch_options).load()
        rows = select_table_rows(messages, key, options["columns"] or None)

        key_expression, _ = KEYS.get(key, (key, ()))
        described_columns = [f"{name} {spark_type}" for name, spark_type in rows.dtypes[1:]]
        return [
            f"read {source.get('topic', 'the source')} as a {options['mode']}",
            f"key {KEY_COLUMN}: {key_expression}",
            f"columns {', '.join(described_columns)}",
            f"insert new rows into {options['table']} of {url_without_password(options['url'])}",
        ]

    def run(self, task: Task) -> Report:
        """Insert the messages, as a batch or a stream, and report the numbers of rows.

        A stream runs until it ends or the task is stopped.
        """
        options = task.options
        table_label = f"{options['table']} of {url_without_password(options['url'])}"
        names = ("url", "table", "topic", "key", "create", "batch_rows", "source")
        arguments = {name: options[name] for name in names}
        arguments["columns"] = options["columns"] or None
        if options["mode"] == BATCH:
            written = write_table(task.spark, task.connection, **arguments)
        elif not options["checkpoint"]:
            raise ConfigurationError(
                "a stream needs a checkpoint.", fix="Set checkpoint: DIRECTORY, or mode: batch."
            )
        else:
            written = _run_stream(task, arguments, table_label)

        repeated_count = written.rows - written.new
        report = Report({"rows": written.rows, "new": written.new, "repeated": repeated_count})
        task.report_lines(
            report,
            f"{written.rows:,} messages, {written.new:,} new rows in {table_label};"
            f" {repeated_count:,} existed already",
        )
        return report


def _run_stream(task: Task, arguments: Mapping[str, Any], table_label: str) -> Written:
    """Run a stream until it ends or the task is stopped, and return the sums of its micro-batches.

    `arguments` are arguments of `stream_table`, and `table_label` names the table in texts. Each
    micro-batch is reported by `task.say`. When the task is stopped, the current one is finished.
    """
    sums = Written()

    def add_batch(number: int, written: Written) -> None:
        """Add the numbers of one micro-batch to `sums`, and report them."""
        nonlocal sums
        sums = Written(sums.rows + written.rows, sums.new + written.new)
        task.say(
            f"micro-batch {number}: {written.rows:,} rows, {written.new:,} new in {table_label}"
        )

    query = stream_table(
        task.spark,
        task.connection,
        checkpoint=task.options["checkpoint"],
        trigger=task.options["trigger"],
        on_batch=add_batch,
        **arguments,
    )
    while query.isActive and not task.stopping():
        threading.Event().wait(STOP_CHECK_S)
    if query.isActive:
        finish_query(query)
    query.awaitTermination()
    return sums


DEDUP: Final = Dedup()
