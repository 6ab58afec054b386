"""The ready pipeline `dedup`: a topic into a relational table, each message exactly once.

    topic (batch or stream) -> key and columns, by Spark SQL -> INSERT … ON CONFLICT DO NOTHING

The key says what "the same message" is:

    position     where it lies: topic/broker/queue/offset@store time (the time, so that a topic that
                 was deleted and made anew has other keys)
    message-id   the producer's id: a send that was repeated is one message
    dedup-key    SLUICE_DEDUP_KEY, which the sink writes into a Java cluster, else the message id
    anything     a Spark SQL expression over the source's columns: properties['order_id']

A stream has its checkpoint besides, so what was read is not read again; the keys make the rest
exact: the micro-batch that was written when the driver died is written again and changes nothing.

    write_table(spark, {"nameServers": …}, topic="orders", url="sqlite:///shop.db", table="orders",
                columns={"id": "properties['order_id']", "note": "cast(body as string)"})
"""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.errors import ConfigurationError
from sluicemq.spark.pipelines.ready import (
    AVAILABLE_NOW,
    BATCH,
    FLAG,
    INTEGER,
    MAPPING,
    STREAMING,
    TEXT,
    Field,
    Ready,
    Report,
    Task,
    duration_s,
)
from sluicemq.spark.pipelines.run import finish
from sluicemq.spark.schema import BASE
from sluicemq.spark.sinks.databases import (
    Target,
    Written,
    prepare,
    shown_url,
    whole_url,
    write_once,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEY_COLUMN: Final = "sluice_key"
POSITION, MESSAGE_ID, DEDUP_KEY = "position", "message-id", "dedup-key"
KEYS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    POSITION: (
        "concat(topic, '/', broker, '/', queue_id, '/', queue_offset, '@',"
        " unix_millis(store_time))",
        ("topic", "broker", "queue_id", "queue_offset", "store_time"),
    ),
    MESSAGE_ID: ("msg_id", ("msg_id",)),
    DEDUP_KEY: (
        "coalesce(`SLUICE_DEDUP_KEY`, msg_id)", ("prop:SLUICE_DEDUP_KEY", "msg_id"),
    ),
}  # fmt: skip
"""Name -> expression, and the columns that it needs."""
COLUMNS: Final = {
    "topic": "topic", "tags": "tags", "message_keys": "keys", "properties": "to_json(properties)",
    "body": "cast(body as string)", "born_time": "born_time", "store_time": "store_time",
}  # fmt: skip
"""Column of the table -> expression, when nothing else is said."""


def source_options(
    connection: Mapping[str, str], topic: str | None, key: str, source: Mapping[str, str]
) -> dict[str, str]:
    """Options of the source, with the columns that the key needs."""
    options = {**connection, **source} | ({} if topic is None else {"topic": topic})
    wanted = [part.strip() for part in options.get("columns", ",".join(BASE)).split(",")]
    _, needed = KEYS.get(key, (key, ()))
    options["columns"] = ",".join([*wanted, *(name for name in needed if name not in wanted)])
    return options


def rows_of(messages: "DataFrame", key: str, columns: Mapping[str, str] | None) -> "DataFrame":
    """Messages as rows of the table: its columns by their expressions, and the key."""
    if KEY_COLUMN in (columns or ()):
        raise ConfigurationError(
            f"the column {KEY_COLUMN!r} is the key's.", cure="Give yours another name, or say key:."
        )
    chosen = [F.expr(text).alias(name) for name, text in (columns or COLUMNS).items()]
    expression, _ = KEYS.get(key, (key, ()))
    return messages.select(F.expr(expression).cast("string").alias(KEY_COLUMN), *chosen)


def _target(rows: "DataFrame", url: str, table: str, batch_rows: int) -> Target:
    columns = tuple(rows.dtypes)
    return Target(whole_url(url), table, (KEY_COLUMN,), columns, chunk_rows=batch_rows)


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
    """A batch: what the source's offsets say goes into the table, unless it is there. Raises
    ConfigurationError."""
    options = source_options(connection, topic, key, source or {})
    rows = rows_of(spark.read.format("rocketmq").options(**options).load(), key, columns)
    target = _target(rows, url, table, batch_rows)
    prepare(target, create=create)
    return write_once(rows, target)


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
    """A stream; the `StreamingQuery`. `trigger`: `available-now` or a time such as `10s`.
    `on_batch` is told each micro-batch that is in the table, before Spark notes it as done."""
    options = {"startingOffsets": "earliest"}
    options |= source_options(connection, topic, key, source or {})
    messages = spark.readStream.format("rocketmq").options(**options).load()
    rows = rows_of(messages, key, columns)
    target = _target(rows, url, table, batch_rows)
    prepare(target, create=create)

    def write(batch: "DataFrame", number: int) -> None:
        on_batch(number, write_once(batch, target))

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    if trigger == AVAILABLE_NOW:
        return writer.trigger(availableNow=True).start()
    try:
        period_ms = int(duration_s(trigger) * 1000)
    except ValueError as error:
        raise ConfigurationError(
            f"the trigger is {trigger!r}: {error}.", cure=f"Write {AVAILABLE_NOW} or 10s."
        ) from None
    return writer.trigger(processingTime=f"{period_ms} milliseconds").start()


# ---- the ready pipeline


class Dedup(Ready):
    name = "dedup"
    what = "A topic into a relational table, each message exactly once."
    fields = (
        Field("url", TEXT, "Of the database: sqlite:///shop.db or postgresql://user@host/name."),
        Field("table", TEXT, "The table, with its schema where there are several."),
        Field("topic", TEXT, "The topic; or topics in source:.", None),
        Field(
            "key", TEXT,
            "What is the same message: position, message-id, dedup-key, or a Spark SQL expression.",
            POSITION,
        ),
        Field("columns", MAPPING, "Column of the table -> Spark SQL expression.", {}),
        Field("source", MAPPING, "Further options of the source: filter.sql, columns …", {}),
        Field("mode", TEXT, "Once from start to end, or a stream.", BATCH, (BATCH, STREAMING)),
        Field("checkpoint", TEXT, "Directory where a stream remembers how far it is.", None),
        Field("trigger", TEXT, "Of a stream: available-now, or how often: 10s.", AVAILABLE_NOW),
        Field("create", FLAG, "Make the table when it is missing.", True),
        Field("batch_rows", INTEGER, "Rows of one statement.", 1_000),
    )  # fmt: skip

    def plan(self, task: Task) -> list[str]:
        options, key = task.options, task.options["key"]
        source = source_options(task.connection, options["topic"], key, options["source"])
        batch = {name: text for name, text in source.items() if not name.startswith("max")}
        messages = task.spark.read.format("rocketmq").options(**batch).load()
        rows = rows_of(messages, key, options["columns"] or None)
        expression, _ = KEYS.get(key, (key, ()))
        return [
            f"read {source.get('topic', 'the source')} as a {options['mode']}",
            f"key {KEY_COLUMN}: {expression}",
            f"columns {', '.join(f'{name} {kind}' for name, kind in rows.dtypes[1:])}",
            f"insert into {options['table']} of {shown_url(options['url'])} what is not there",
        ]

    def run(self, task: Task) -> Report:
        options = task.options
        place = f"{options['table']} of {shown_url(options['url'])}"
        names = ("url", "table", "topic", "key", "create", "batch_rows", "source")
        given = {name: options[name] for name in names} | {"columns": options["columns"] or None}
        done = Written()
        if options["mode"] == BATCH:
            done = write_table(task.spark, task.connection, **given)
        elif not options["checkpoint"]:
            raise ConfigurationError(
                "a stream needs a checkpoint.", cure="Say checkpoint: DIRECTORY, or mode: batch."
            )
        else:

            def tell(number: int, written: Written) -> None:
                nonlocal done
                done = Written(done.rows + written.rows, done.new + written.new)
                task.say(
                    f"micro-batch {number}: {written.rows:,} rows, {written.new:,} new in {place}"
                )

            query = stream_table(
                task.spark, task.connection, checkpoint=options["checkpoint"],
                trigger=options["trigger"], on_batch=tell, **given,
            )  # fmt: skip
            while query.isActive and not task.stopping():
                threading.Event().wait(0.2)
            if query.isActive:  # the micro-batch under way is the last
                finish(query)
            query.awaitTermination()
        repeated = done.rows - done.new
        report = Report({"rows": done.rows, "new": done.new, "repeated": repeated})
        task.tell(
            report, f"{done.rows:,} messages, {done.new:,} new rows in {place};"
            f" {repeated:,} were there already",
        )  # fmt: skip
        return report


DEDUP: Final = Dedup()
