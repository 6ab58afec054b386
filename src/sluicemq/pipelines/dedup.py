"""Rows into a table of a relational database, by key: written twice, they are there once. And the
ready pipeline `dedup`: a topic into such a table, each message exactly once.

Two ways, for pipelines: `put_rows` replaces a row with a key that is there, with `version` only
when its version is not smaller, so that what is read again never takes the place of something
newer; `write_once` leaves a row that is there alone, whatever an application did to it since.

    put_rows     each chunk of rows is one transaction, sorted by key: two tasks that change the
                 same rows lock them in the same order. Spark's sink `sluice_table`
    write_once   a partition of rows is one transaction: whatever Spark runs again (a task, a
                 micro-batch, the whole job after its driver was killed) finds its keys and changes
                 nothing, and a task that dies has written nothing. Of two attempts of one task at
                 the same time the database lets the second wait for the first

    SQLite, PostgreSQL   INSERT … ON CONFLICT (key) DO UPDATE, or DO NOTHING
    any other            UPDATE; if no row had the key, INSERT; if another was faster, UPDATE

The table is made by the driver, before the first row, with the key as primary key; one that is
there needs the columns and a primary key or unique constraint of just the key's columns.

| Spark | column |
|---|---|
| string | Text (String(255) as a key) |
| tinyint, smallint; int; bigint | SmallInteger; Integer; BigInteger |
| float, double; decimal(p, s) | Float, Double; Numeric(p, s) |
| boolean, date, binary | Boolean, Date, LargeBinary |
| timestamp; timestamp_ntz | DateTime with time zone (UTC where the database has none); without |
| array, map, struct | JSON |

**dedup**

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

import datetime
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from sluicemq.errors import ConfigurationError, install_extra
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
from sluicemq.spark.errors import errors_without_traceback
from sluicemq.spark.schema import BASE_TYPES

if TYPE_CHECKING:
    import sqlalchemy as sa
    from pyspark.sql import DataFrame, SparkSession

Row = dict[str, Any]
Putter = Callable[["sa.Connection", Sequence[Row]], object]
FORMAT: Final = "sluice_table"
NATIVE: Final = ("sqlite", "postgresql")
KEY_LENGTH: Final = 255
_NESTED: Final = ("array<", "map<", "struct<")
_TYPES: Final = {
    "tinyint": "SmallInteger",
    "smallint": "SmallInteger",
    "int": "Integer",
    "bigint": "BigInteger",
    "float": "Float",
    "double": "Double",
    "boolean": "Boolean",
    "date": "Date",
    "binary": "LargeBinary",
    "timestamp_ntz": "DateTime",
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where rows go. `columns`: name and Spark type (`simpleString`) of each, in order."""

    url: str
    table: str
    key: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    version: str | None = None
    chunk_rows: int = 1_000

    @property
    def schema_and_name(self) -> tuple[str | None, str]:
        schema, _, name = self.table.rpartition(".")
        return schema or None, name


@dataclass(frozen=True, slots=True)
class Written:
    """Rows that were handed over, and those of them that were new."""

    rows: int = 0
    new: int = 0


# ---- databases


def _sqlalchemy() -> Any:
    try:
        return import_module("sqlalchemy")
    except ImportError:
        raise ConfigurationError(
            "a table sink needs SQLAlchemy.", fix=install_extra("sql")
        ) from None


def check_url(url: str) -> None:
    """Raises ConfigurationError when it is no URL of a database that outlives the process."""
    sqlalchemy = _sqlalchemy()
    fix = "Write postgresql://user@host/name or sqlite:///file.db."
    try:
        parsed = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise ConfigurationError("it is no URL of a database.", fix=fix) from None
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigurationError("it is a database in memory, which ends with each task.", fix=fix)


def absolute_url(url: str) -> str:
    """With a file of SQLite by its whole path: tasks run in other directories."""
    scheme, _, path = url.partition(":///")
    if scheme.startswith("sqlite") and path and not path.startswith("/"):
        return f"{scheme}:///{Path(path).absolute()}"
    return url


def url_without_password(url: str) -> str:
    """The URL without its password."""
    return str(_sqlalchemy().make_url(url).render_as_string(hide_password=True))


def create_engine(url: str) -> "sa.Engine":
    """Raises ConfigurationError when the driver is missing or the URL is none."""
    _sqlalchemy()
    from sluicemq.client.ledger import make_blocking_engine  # noqa: PLC0415 - SQLAlchemy

    return make_blocking_engine(url)


@contextmanager
def temporary_engine(url: str) -> "Iterator[sa.Engine]":
    """An engine for as long as it is needed; errors as `open_engine`."""
    engine = create_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


# ---- tables


def is_table_missing(engine: "sa.Engine", target: Target) -> bool:
    schema, name = target.schema_and_name
    return not _sqlalchemy().inspect(engine).has_table(name, schema=schema)


def create_table(engine: "sa.Engine", target: Target) -> None:
    """Creates the table; does nothing when it is there."""
    build_table(target, engine.dialect.name).create(engine, checkfirst=True)


def check_table(engine: "sa.Engine", target: Target) -> None:
    """Raises ConfigurationError when the table lacks a column, or uniqueness of the key."""
    inspector = _sqlalchemy().inspect(engine)
    schema, name = target.schema_and_name
    there = [one["name"] for one in inspector.get_columns(name, schema=schema)]
    lacking = [column for column, _ in target.columns if column not in there]
    if lacking:
        raise ConfigurationError(
            f"the table {target.table!r} has no column {', '.join(lacking)}.",
            fix=f"It has {', '.join(there)}; name the transform's columns like them.",
        )
    indexes = inspector.get_indexes(name, schema=schema)
    unique = [inspector.get_pk_constraint(name, schema=schema)["constrained_columns"]]
    unique += [one["column_names"] for one in inspector.get_unique_constraints(name, schema=schema)]
    unique += [one["column_names"] for one in indexes if one["unique"]]
    if set(target.key) not in [set(columns) for columns in unique]:
        raise ConfigurationError(
            f"the table {target.table!r} has no primary key or unique constraint of"
            f" {', '.join(target.key)}.",
            fix="Add one, or choose its key: without it rows would be doubled.",
        )


def build_table(target: Target, dialect: str) -> "sa.Table":
    """The table as Spark's schema has it."""
    sqlalchemy = _sqlalchemy()
    types = sqlalchemy.types
    schema, name = target.schema_and_name
    columns = []
    for column, kind in target.columns:
        is_key = column in target.key
        if kind == "string":
            is_short = is_key and dialect not in NATIVE
            found = types.String(KEY_LENGTH) if is_short else types.Text()
        elif kind.startswith("decimal("):
            precision, _, scale = kind.removeprefix("decimal(").rstrip(")").partition(",")
            found = types.Numeric(int(precision), int(scale))
        elif kind.startswith(_NESTED):
            found = types.JSON(none_as_null=True)
        elif kind == "timestamp":
            found = types.DateTime(timezone=True)
        elif kind in _TYPES:
            found = getattr(types, _TYPES[kind])()
        else:
            raise ConfigurationError(
                f"a column of type {kind!r} cannot go into a table.",
                fix="Cast it in the transform.",
            )
        columns.append(sqlalchemy.Column(column, found, primary_key=is_key, autoincrement=False))
    return sqlalchemy.Table(name, sqlalchemy.MetaData(), *columns, schema=schema)  # type: ignore[no-any-return]


# ---- rows that replace others


def upsert_rows(engine: "sa.Engine", target: Target, rows: Iterable[Row]) -> int:
    """Writes the rows in chunks, a transaction each; how many there were. Of rows with one key that
    of the largest version stays, else the last one. Raises ConfigurationError for a row without
    key."""
    dialect = engine.dialect.name
    table = build_table(target, dialect)
    put = _portable(target, table)
    if dialect in NATIVE:
        statement = _insert(table, dialect)
        changed = {c.name: statement.excluded[c.name] for c in table.columns if not c.primary_key}
        key, where = list(target.key), None
        if target.version is not None:
            old, new = table.c[target.version], statement.excluded[target.version]
            where = old.is_(None) | (old <= new)
        once = statement.on_conflict_do_nothing(index_elements=key)
        if changed:
            once = statement.on_conflict_do_update(index_elements=key, set_=changed, where=where)
        put = lambda connection, rows: connection.execute(once, rows)  # noqa: E731
    total = 0
    for chunk in _chunks(rows, target.chunk_rows):
        _expect_keys(chunk, target, "Leave such rows out in the transform, or choose another key.")
        total += len(chunk)
        newest: dict[tuple[Any, ...], Row] = {}
        for row in chunk:
            place = tuple(row[name] for name in target.key)
            before = newest.get(place)
            if before is not None and target.version is not None:
                new, old = row[target.version], before[target.version]
                if old is not None and (new is None or new < old):
                    continue
            newest[place] = row
        with engine.begin() as connection:
            put(connection, [newest[place] for place in sorted(newest)])
    return total


def _chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _expect_keys(rows: Iterable[Row], target: Target, fix: str) -> None:
    for row in rows:
        for name in target.key:
            if row[name] is None:
                raise ConfigurationError(f"a row has no value in the key column {name!r}.", fix=fix)


def _insert(table: "sa.Table", dialect: str) -> Any:
    """INSERT of SQLite or PostgreSQL, which can say ON CONFLICT."""
    return import_module(f"sqlalchemy.dialects.{dialect}").insert(table)


def _portable(target: Target, table: "sa.Table") -> Putter:
    """UPDATE, else INSERT, for databases without ON CONFLICT."""
    sqlalchemy = _sqlalchemy()
    same = sqlalchemy.and_(
        *(table.c[name] == sqlalchemy.bindparam(f"key_{name}") for name in target.key)
    )
    rest = [column.name for column in table.columns if not column.primary_key]
    update = table.update().where(same)
    if target.version is not None:
        old = table.c[target.version]
        update = update.where(old.is_(None) | (old <= sqlalchemy.bindparam("new_version")))
    update = update.values({name: sqlalchemy.bindparam(name) for name in rest})

    def change(connection: "sa.Connection", row: Row) -> bool:
        if not rest:
            return False
        values = row | {f"key_{name}": row[name] for name in target.key}
        if target.version is not None:
            values["new_version"] = row[target.version]
        return bool(connection.execute(update, values).rowcount)

    def put(connection: "sa.Connection", rows: Sequence[Row]) -> None:
        for row in rows:
            if change(connection, row):
                continue
            try:
                with connection.begin_nested():
                    connection.execute(table.insert(), row)
            except sqlalchemy.exc.IntegrityError:  # it is there: newer, or from another task
                change(connection, row)

    return put


# ---- rows that leave others alone


def prepare_table(target: Target, *, create: bool) -> None:
    """Makes or checks the table for `write_once`, on the driver. Raises ConfigurationError."""
    with temporary_engine(target.url) as engine:
        if engine.dialect.name not in NATIVE:
            raise ConfigurationError(
                f"{engine.dialect.name} has no INSERT … ON CONFLICT.",
                fix=f"Use {' or '.join(NATIVE)}, or the table sink of a pipeline file.",
            )
        if not is_table_missing(engine, target):
            check_table(engine, target)
        elif create:
            create_table(engine, target)
        else:
            raise ConfigurationError(
                f"there is no table {target.table!r}.", fix="Make it, or set create: true."
            )


def insert_new_rows(frame: "DataFrame", target: Target) -> Written:
    """Inserts the rows whose keys are not there yet; only counts come to the driver. Tasks that
    share keys take them in the same order, so they wait for each other and do not deadlock."""
    ordered = frame.sortWithinPartitions(*target.key)
    counts = ordered.rdd.mapPartitions(partial(insert_partition, target)).collect()
    return Written(sum(rows for rows, _ in counts), sum(new for _, new in counts))


def insert_partition(target: Target, rows: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """One task: all its rows or none of them; (rows, new rows)."""
    kinds = dict(target.columns)
    values = (to_database_row(row.asDict(recursive=True), kinds) for row in rows)
    chunks = _chunks(values, target.chunk_rows)
    for first in chunks:  # none, of an empty partition
        with temporary_engine(target.url) as engine:
            yield insert_chunks(engine, target, chain([first], chunks))


def insert_chunks(engine: Any, target: Target, chunks: Iterable[Sequence[Row]]) -> tuple[int, int]:
    """Inserts chunks of rows in one transaction; (rows, new rows). Raises ConfigurationError for a
    row without key."""
    table = build_table(target, engine.dialect.name)
    statement = _insert(table, engine.dialect.name)
    statement = statement.on_conflict_do_nothing(index_elements=list(target.key))
    counted = statement.returning(table.c[target.key[0]])  # a driver's row count is no fact
    total = new = 0
    with engine.begin() as connection:
        for chunk in chunks:
            _expect_keys(
                chunk, target, "Choose another key, or leave such messages out with filter.sql."
            )
            total += len(chunk)
            new += len(connection.execute(counted, list(chunk)).all())
    return total, new


def to_database_row(values: Row, kinds: Mapping[str, str]) -> Row:
    """What Spark gave, as a database driver takes it: nested values as JSON takes them, bytes as
    such (rows of an RDD hold bytearrays), moments with a zone (there in the worker's own one)."""

    def converted(value: Any, kind: str) -> Any:
        if kind.startswith(_NESTED):
            return _as_json(value)
        if isinstance(value, bytearray):
            return bytes(value)
        if isinstance(value, datetime.datetime) and kind == "timestamp":
            return value.astimezone(datetime.UTC)
        return value

    return {name: converted(value, kinds[name]) for name, value in values.items()}


def _as_json(value: Any) -> Any:
    """Maps become mappings."""
    if isinstance(value, list) and value and all(isinstance(one, tuple) for one in value):
        return {str(name): _as_json(inner) for name, inner in value}
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    if isinstance(value, dict):
        return {name: _as_json(inner) for name, inner in value.items()}
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, datetime.date):
        return value.isoformat()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


# ---- Spark's sink


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):  # type: ignore[misc]
    """Rows of one task."""

    rows: int


class TableSource(DataSource):  # type: ignore[misc]
    """`df.write.format("sluice_table").option("target", target_text(…)).mode("append").save()`.

    A data source of its own, as it takes Arrow batches without pandas (`mapInArrow` asks for it)
    and Spark counts what it writes. A task that Spark runs again writes its rows again, by key.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: Any, overwrite: bool) -> "TableSink":
        found = json.loads(self.options["target"])
        columns = tuple((name, kind) for name, kind in found["columns"])
        return TableSink(Target(**found | {"key": tuple(found["key"]), "columns": columns}))


class TableSink(DataSourceArrowWriter):  # type: ignore[misc]
    """Writes in tasks; the driver has nothing to do."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        kinds = dict(self.target.columns)
        with errors_without_traceback(), temporary_engine(self.target.url) as engine:
            rows = (to_database_row(row, kinds) for batch in iterator for row in batch.to_pylist())
            return TaskResult(upsert_rows(engine, self.target, rows))

    def commit(self, messages: list[TaskResult | None]) -> None:
        """Every task has committed its transactions."""

    def abort(self, messages: list[TaskResult | None]) -> None:
        """What is written stays, and is replaced when it is written again."""


def encode_target(target: Target) -> str:
    """The option `target`."""
    return json.dumps(asdict(target))


def register_sink(spark: "SparkSession") -> None:
    """Makes the format known to a session and those cloned from it."""
    spark.dataSource.register(TableSource)


# ---- messages as rows

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
        "coalesce(`SLUICE_DEDUP_KEY`, msg_id)",
        ("prop:SLUICE_DEDUP_KEY", "msg_id"),
    ),
}
"""Name -> expression, and the columns that it needs."""
COLUMNS: Final = {
    "topic": "topic",
    "tags": "tags",
    "message_keys": "keys",
    "properties": "to_json(properties)",
    "body": "cast(body as string)",
    "born_time": "born_time",
    "store_time": "store_time",
}
"""Column of the table -> expression, when nothing else is said."""


def build_source_options(
    connection: Mapping[str, str], topic: str | None, key: str, source: Mapping[str, str]
) -> dict[str, str]:
    """Options of the source, with the columns that the key needs."""
    options = {**connection, **source} | ({} if topic is None else {"topic": topic})
    wanted = [part.strip() for part in options.get("columns", ",".join(BASE_TYPES)).split(",")]
    _, needed = KEYS.get(key, (key, ()))
    options["columns"] = ",".join([*wanted, *(name for name in needed if name not in wanted)])
    return options


def select_table_rows(
    messages: "DataFrame", key: str, columns: Mapping[str, str] | None
) -> "DataFrame":
    """Messages as rows of the table: its columns by their expressions, and the key."""
    if KEY_COLUMN in (columns or ()):
        raise ConfigurationError(
            f"the column {KEY_COLUMN!r} is the key's.", fix="Give yours another name, or say key:."
        )
    chosen = [F.expr(text).alias(name) for name, text in (columns or COLUMNS).items()]
    expression, _ = KEYS.get(key, (key, ()))
    return messages.select(F.expr(expression).cast("string").alias(KEY_COLUMN), *chosen)


def _target(rows: "DataFrame", url: str, table: str, batch_rows: int) -> Target:
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
    """A batch: what the source's offsets say goes into the table, unless it is there. Raises
    ConfigurationError."""
    options = build_source_options(connection, topic, key, source or {})
    rows = select_table_rows(spark.read.format("rocketmq").options(**options).load(), key, columns)
    target = _target(rows, url, table, batch_rows)
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
    """A stream; the `StreamingQuery`. `trigger`: `available-now` or a time such as `10s`.
    `on_batch` is told each micro-batch that is in the table, before Spark notes it as done."""
    options = build_source_options(connection, topic, key, source or {})
    if "startingTimestamp" not in options:
        options.setdefault("startingOffsets", "earliest")
    messages = spark.readStream.format("rocketmq").options(**options).load()
    rows = select_table_rows(messages, key, columns)
    target = _target(rows, url, table, batch_rows)
    prepare_table(target, create=create)

    def write(batch: "DataFrame", number: int) -> None:
        on_batch(number, insert_new_rows(batch, target))

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    try:
        writer = writer.trigger(**spark_trigger(parse_trigger_s(trigger)))
    except ValueError as error:
        raise ConfigurationError(
            f"the trigger is {trigger!r}: {error}.", fix=f"Write {AVAILABLE_NOW} or 10s."
        ) from None
    return writer.start()


# ---- the ready pipeline


class Dedup(ReadyPipeline):
    name = "dedup"
    description = "A topic into a relational table, each message exactly once."
    fields = (
        Field("url", TEXT, "Of the database: sqlite:///shop.db or postgresql://user@host/name."),
        Field("table", TEXT, "The table, with its schema where there are several."),
        Field("topic", TEXT, "The topic; or topics in source:.", None),
        Field(
            "key",
            TEXT,
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
    )

    def plan(self, task: Task) -> list[str]:
        options, key = task.options, task.options["key"]
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
        place = f"{options['table']} of {url_without_password(options['url'])}"
        names = ("url", "table", "topic", "key", "create", "batch_rows", "source")
        given = {name: options[name] for name in names} | {"columns": options["columns"] or None}
        done = Written()
        if options["mode"] == BATCH:
            done = write_table(task.spark, task.connection, **given)
        elif not options["checkpoint"]:
            raise ConfigurationError(
                "a stream needs a checkpoint.", fix="Say checkpoint: DIRECTORY, or mode: batch."
            )
        else:

            def tell(number: int, written: Written) -> None:
                nonlocal done
                done = Written(done.rows + written.rows, done.new + written.new)
                task.say(
                    f"micro-batch {number}: {written.rows:,} rows, {written.new:,} new in {place}"
                )

            query = stream_table(
                task.spark,
                task.connection,
                checkpoint=options["checkpoint"],
                trigger=options["trigger"],
                on_batch=tell,
                **given,
            )
            while query.isActive and not task.stopping():
                threading.Event().wait(0.2)
            if query.isActive:  # the micro-batch under way is the last
                finish_query(query)
            query.awaitTermination()
        repeated = done.rows - done.new
        report = Report({"rows": done.rows, "new": done.new, "repeated": repeated})
        task.report_lines(
            report,
            f"{done.rows:,} messages, {done.new:,} new rows in {place};"
            f" {repeated:,} were there already",
        )
        return report


DEDUP: Final = Dedup()
