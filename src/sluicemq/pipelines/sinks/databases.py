"""Write rows to a table of a relational database by key.

There are two ways to write. Rows that are written twice are in the table once in both.
`upsert_rows` replaces the row with the same key. With `version`, it only does so if the new version
is not smaller, so that rows which are read again never replace newer ones. `insert_new_rows` leaves
an existing row unchanged, whatever an application has done to it since.

    upsert_rows        Each chunk of rows is one transaction, sorted by key. So two tasks that
                       change the same rows lock them in the same order. Spark's sink
                       `sluice_table` uses it.
    insert_new_rows    Each partition of rows is one transaction. If Spark repeats a task, a
                       micro-batch, or the whole job after its driver was killed, the keys exist
                       and nothing changes. A task that dies has written nothing. If two attempts
                       of one task run at the same time, the database makes the second one wait.

    SQLite, PostgreSQL   INSERT … ON CONFLICT (key) DO UPDATE, or DO NOTHING
    any other            UPDATE; INSERT if no row has the key; UPDATE if another task was faster

The driver creates the table before the first row, with the key as its primary key. An existing
table needs the columns, and a primary key or unique constraint of exactly the key's columns.

| Spark | column |
|---|---|
| string | Text (String(255) as a key of other databases than SQLite and PostgreSQL) |
| tinyint, smallint; int; bigint | SmallInteger; Integer; BigInteger |
| float, double; decimal(p, s) | Float, Double; Numeric(p, s) |
| boolean, date, binary | Boolean, Date, LargeBinary |
| timestamp; timestamp_ntz | DateTime with time zone (UTC where the database has none); without |
| array, map, struct | JSON |
"""

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from sluicemq.errors import ConfigurationError, install_extra
from sluicemq.spark.errors import errors_without_traceback

if TYPE_CHECKING:
    import sqlalchemy as sa
    from pyspark.sql import DataFrame, SparkSession

Row = dict[str, Any]
"""The values of a row by column name."""
RowWriter = Callable[["sa.Connection", Sequence[Row]], object]
"""Writes rows within the transaction of a connection."""
FORMAT: Final = "sluice_table"
"""The name of Spark's sink."""
NATIVE: Final = ("sqlite", "postgresql")
"""The databases that have ON CONFLICT."""
KEY_LENGTH: Final = 255
"""The length of a text column that is a key, in other databases."""
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
    """A table to write rows to.

    `url` is the URL of the database, as SQLAlchemy defines it. `table` may contain a schema
    (`schema.table`). `key` are the columns that identify a row. `columns` has the name and Spark
    type (`simpleString`) of each column, in order. `version` is the column that decides whether a
    row is replaced, or None. Rows are written in chunks of `chunk_rows`.
    """

    url: str
    table: str
    key: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    version: str | None = None
    chunk_rows: int = 1_000

    @property
    def schema_and_name(self) -> tuple[str | None, str]:
        """The schema of the table, None if `table` names none, and its name."""
        schema, _, name = self.table.rpartition(".")
        return schema or None, name


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a write: how many rows were passed to it, and how many were inserted."""

    rows: int = 0
    new: int = 0


# ---- databases


def _sqlalchemy() -> Any:
    """Return the module `sqlalchemy`, or raise ConfigurationError if it is not installed."""
    try:
        return import_module("sqlalchemy")
    except ImportError:
        raise ConfigurationError(
            "a table sink needs SQLAlchemy.", fix=install_extra("sql")
        ) from None


def check_url(url: str) -> None:
    """Raise ConfigurationError if `url` is not a database URL, or the database is in memory."""
    sqlalchemy = _sqlalchemy()
    fix = "Write postgresql://user@host/name or sqlite:///file.db."
    try:
        parsed = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise ConfigurationError("this is not the URL of a database.", fix=fix) from None
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigurationError("a database in memory only exists during one task.", fix=fix)


def absolute_url(url: str) -> str:
    """Return the URL; the path of an SQLite file becomes absolute, because tasks run elsewhere."""
    scheme, _, path = url.partition(":///")
    if scheme.startswith("sqlite") and path and not path.startswith("/"):
        return f"{scheme}:///{Path(path).absolute()}"
    return url


def url_without_password(url: str) -> str:
    """Return the URL with its password masked."""
    return str(_sqlalchemy().make_url(url).render_as_string(hide_password=True))


def create_engine(url: str) -> "sa.Engine":
    """Return an engine of SQLAlchemy, which the caller must dispose of.

    Raises ConfigurationError if the driver is not installed or the URL is invalid.
    """
    _sqlalchemy()
    from sluicemq.client.ledger import make_blocking_engine  # noqa: PLC0415 - needs SQLAlchemy

    return make_blocking_engine(url)


@contextmanager
def temporary_engine(url: str) -> "Iterator[sa.Engine]":
    """Return a context manager with an engine of `create_engine`; the end disposes of it."""
    engine = create_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


# ---- tables


def is_table_missing(engine: "sa.Engine", target: Target) -> bool:
    """Return whether the table of `target` does not exist in the database."""
    schema, name = target.schema_and_name
    return not _sqlalchemy().inspect(engine).has_table(name, schema=schema)


def create_table(engine: "sa.Engine", target: Target) -> None:
    """Create the table unless it exists."""
    build_table(target, engine.dialect.name).create(engine, checkfirst=True)


def check_table(engine: "sa.Engine", target: Target) -> None:
    """Raise ConfigurationError if the table lacks a column, or a unique constraint of the key."""
    inspector = _sqlalchemy().inspect(engine)
    schema, name = target.schema_and_name
    existing = [one["name"] for one in inspector.get_columns(name, schema=schema)]
    lacking = [column for column, _ in target.columns if column not in existing]
    if lacking:
        raise ConfigurationError(
            f"the table {target.table!r} has no column {', '.join(lacking)}.",
            fix=f"Give the transform's columns the names of the table: {', '.join(existing)}.",
        )
    indexes = inspector.get_indexes(name, schema=schema)
    unique = [inspector.get_pk_constraint(name, schema=schema)["constrained_columns"]]
    unique += [one["column_names"] for one in inspector.get_unique_constraints(name, schema=schema)]
    unique += [one["column_names"] for one in indexes if one["unique"]]
    if set(target.key) not in [set(columns) for columns in unique]:
        raise ConfigurationError(
            f"the table {target.table!r} has no primary key or unique constraint of"
            f" {', '.join(target.key)}.",
            fix="Add one, or use the table's key; otherwise rows would be duplicated.",
        )


def build_table(target: Target, dialect: str) -> "sa.Table":
    """Return the SQLAlchemy table with the columns of the target.

    `dialect` is the name of the database's dialect. Raises ConfigurationError for a Spark type that
    has no column type.
    """
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
                f"a table cannot have a column of type {kind!r}.",
                fix="Cast it in the transform.",
            )
        columns.append(sqlalchemy.Column(column, found, primary_key=is_key, autoincrement=False))
    return sqlalchemy.Table(name, sqlalchemy.MetaData(), *columns, schema=schema)  # type: ignore[no-any-return]


# ---- replace rows by key


def upsert_rows(engine: "sa.Engine", target: Target, rows: Iterable[Row]) -> int:
    """Write rows, and replace those with the same keys. Return the number of rows that were passed.

    Each chunk is one transaction. If several rows of a chunk have the same key, the one with the
    largest version remains, or the last one if the target has no version. Raises ConfigurationError
    for a row without a value in a key column.
    """
    table = build_table(target, engine.dialect.name)
    if engine.dialect.name in NATIVE:
        write_rows = _build_native_upsert(target, table, engine.dialect.name)
    else:
        write_rows = _build_portable_upsert(target, table)
    total = 0
    for chunk in _chunks(rows, target.chunk_rows):
        _require_keys(chunk, target, "Filter such rows out in the transform, or use another key.")
        total += len(chunk)
        newest: dict[tuple[Any, ...], Row] = {}
        for row in chunk:
            key = tuple(row[name] for name in target.key)
            previous = newest.get(key)
            if previous is not None and target.version is not None:
                # A row without a version is older than every row with one.
                new = row[target.version]
                old = previous[target.version]
                if old is not None and (new is None or new < old):
                    continue
            newest[key] = row
        with engine.begin() as connection:
            # Sorted, so that two tasks with the same keys lock them in the same order.
            write_rows(connection, [newest[key] for key in sorted(newest)])
    return total


def _chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Yield the rows in lists of `size` rows; the last one may be shorter."""
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _require_keys(rows: Iterable[Row], target: Target, fix: str) -> None:
    """Raise ConfigurationError, with this fix, if a row has a null in a key column."""
    for row in rows:
        for name in target.key:
            if row[name] is None:
                raise ConfigurationError(f"a row has no value in the key column {name!r}.", fix=fix)


def _build_insert(table: "sa.Table", dialect: str) -> Any:
    """Return the INSERT of SQLite or PostgreSQL, which has methods for ON CONFLICT."""
    return import_module(f"sqlalchemy.dialects.{dialect}").insert(table)


def _build_native_upsert(target: Target, table: "sa.Table", dialect: str) -> RowWriter:
    """Return a function that writes rows with INSERT … ON CONFLICT, for SQLite and PostgreSQL.

    A row replaces the row with the same key. With a version, it only does so if the old version is
    null or not larger than the new one.
    """
    insert = _build_insert(table, dialect)
    excluded = insert.excluded  # the row that could not be inserted
    new_values = {one.name: excluded[one.name] for one in table.columns if not one.primary_key}
    key = list(target.key)
    rule = None
    if target.version is not None:
        old = table.c[target.version]
        new = excluded[target.version]
        rule = old.is_(None) | (old <= new)
    statement = insert.on_conflict_do_nothing(index_elements=key)
    if new_values:
        statement = insert.on_conflict_do_update(index_elements=key, set_=new_values, where=rule)

    def write_rows(connection: "sa.Connection", rows: Sequence[Row]) -> None:
        connection.execute(statement, rows)

    return write_rows


def _build_portable_upsert(target: Target, table: "sa.Table") -> RowWriter:
    """Return a function that writes rows with UPDATE and INSERT, for databases without ON CONFLICT.

    The rule is that of `_build_native_upsert`. Each row: UPDATE the row with the key unless it has
    a larger version; if that changed nothing, INSERT; if the key exists after all, UPDATE again.
    """
    sqlalchemy = _sqlalchemy()
    has_key = sqlalchemy.and_(
        *(table.c[name] == sqlalchemy.bindparam(f"key_{name}") for name in target.key)
    )
    value_columns = [column.name for column in table.columns if not column.primary_key]
    update = table.update().where(has_key)
    if target.version is not None:
        old = table.c[target.version]
        update = update.where(old.is_(None) | (old <= sqlalchemy.bindparam("new_version")))
    update = update.values({name: sqlalchemy.bindparam(name) for name in value_columns})

    def update_row(connection: "sa.Connection", row: Row) -> bool:
        """Update the row with the same key, and return whether a row was changed."""
        if not value_columns:
            return False
        values = row | {f"key_{name}": row[name] for name in target.key}
        if target.version is not None:
            values["new_version"] = row[target.version]
        return bool(connection.execute(update, values).rowcount)

    def write_rows(connection: "sa.Connection", rows: Sequence[Row]) -> None:
        for row in rows:
            if update_row(connection, row):
                continue
            try:
                with connection.begin_nested():
                    connection.execute(table.insert(), row)
            except sqlalchemy.exc.IntegrityError:
                # The row exists: it has a newer version, or another task has inserted it.
                update_row(connection, row)

    return write_rows


# ---- insert rows with new keys


def prepare_table(target: Target, *, create: bool) -> None:
    """Check the table for `insert_new_rows`. If it is missing and `create` is True, create it.

    Raises ConfigurationError if the database has no ON CONFLICT, or the table is unsuitable or
    missing.
    """
    with temporary_engine(target.url) as engine:
        if engine.dialect.name not in NATIVE:
            raise ConfigurationError(
                f"{engine.dialect.name} does not support INSERT … ON CONFLICT.",
                fix=f"Use {' or '.join(NATIVE)}, or the table sink of a pipeline file.",
            )
        if not is_table_missing(engine, target):
            check_table(engine, target)
        elif create:
            create_table(engine, target)
        else:
            raise ConfigurationError(
                f"the table {target.table!r} does not exist.",
                fix="Create it, or set create: true.",
            )


def insert_new_rows(frame: "DataFrame", target: Target) -> Written:
    """Insert the rows whose keys do not exist yet; return the number of rows and of new ones."""
    # Tasks with the same keys lock them in the same order: they wait, but do not deadlock.
    ordered = frame.sortWithinPartitions(*target.key)
    counts = ordered.rdd.mapPartitions(partial(insert_partition, target)).collect()
    return Written(sum(rows for rows, _ in counts), sum(new for _, new in counts))


def insert_partition(target: Target, rows: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Insert all rows of one task in one transaction, and yield one pair (rows, new rows).

    Nothing is yielded if there are no rows. Raises ConfigurationError for a row without a key.
    """
    kinds = dict(target.columns)
    values = (to_database_row(row.asDict(recursive=True), kinds) for row in rows)
    chunks = _chunks(values, target.chunk_rows)
    for first in chunks:  # at most once, because `insert_chunks` consumes all chunks
        with temporary_engine(target.url) as engine:
            yield insert_chunks(engine, target, chain([first], chunks))


def insert_chunks(engine: Any, target: Target, chunks: Iterable[Sequence[Row]]) -> tuple[int, int]:
    """Insert chunks of rows in one transaction, and return (rows, new rows).

    Rows whose keys exist are left unchanged. Raises ConfigurationError for a row without a key.
    """
    table = build_table(target, engine.dialect.name)
    insert = _build_insert(table, engine.dialect.name)
    insert = insert.on_conflict_do_nothing(index_elements=list(target.key))
    # Drivers do not report the number of inserted rows reliably, so the statement returns them.
    counted = insert.returning(table.c[target.key[0]])
    total = new = 0
    with engine.begin() as connection:
        for chunk in chunks:
            _require_keys(
                chunk, target, "Use another key, or filter such messages out with filter.sql."
            )
            total += len(chunk)
            new += len(connection.execute(counted, list(chunk)).all())
    return total, new


def to_database_row(values: Row, kinds: Mapping[str, str]) -> Row:
    """Return a row of Spark with the values that database drivers accept.

    `kinds` has the Spark type of each column. Nested values become values of JSON, bytearrays
    become bytes, and values of the type `timestamp` get the time zone UTC.
    """

    def convert(value: Any, kind: str) -> Any:
        if kind.startswith(_NESTED):
            return _to_json_value(value)
        if isinstance(value, bytearray):  # rows of an RDD contain bytearrays
            return bytes(value)
        if isinstance(value, datetime.datetime) and kind == "timestamp":
            # A timestamp without a zone is in the time zone of the worker.
            return value.astimezone(datetime.UTC)
        return value

    return {name: convert(value, kinds[name]) for name, value in values.items()}


def _to_json_value(value: Any) -> Any:
    """Return a nested value of Spark as lists, mappings and scalars of JSON.

    A list of tuples is a map, as Arrow returns it.
    """
    if isinstance(value, list) and value and all(isinstance(one, tuple) for one in value):
        return {str(name): _to_json_value(inner) for name, inner in value}
    if isinstance(value, list):
        return [_to_json_value(one) for one in value]
    if isinstance(value, dict):
        return {name: _to_json_value(inner) for name, inner in value.items()}
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, datetime.date):
        return value.isoformat()
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


# ---- Spark's sink


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):  # type: ignore[misc]
    """The number of rows that one task has written."""

    rows: int


class TableSource(DataSource):  # type: ignore[misc]
    """Spark's sink `sluice_table`, which upserts rows into a table.

    Use: `df.write.format("sluice_table").option("target", encode_target(…)).mode("append").save()`.
    It is a data source because a data source gets Arrow batches without pandas, which `mapInArrow`
    needs, and because Spark counts the rows that it writes. A task that Spark repeats writes its
    rows again, by key.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: Any, overwrite: bool) -> "TableSink":
        found = json.loads(self.options["target"])
        columns = tuple((name, kind) for name, kind in found["columns"])
        return TableSink(Target(**found | {"key": tuple(found["key"]), "columns": columns}))


class TableSink(DataSourceArrowWriter):  # type: ignore[misc]
    """Writes the rows of tasks. On the driver it does nothing: each task commits by itself."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        kinds = dict(self.target.columns)
        with errors_without_traceback(), temporary_engine(self.target.url) as engine:
            rows = (to_database_row(row, kinds) for batch in iterator for row in batch.to_pylist())
            return TaskResult(upsert_rows(engine, self.target, rows))

    def commit(self, messages: list[TaskResult | None]) -> None:
        """Do nothing: every task has committed its transactions."""

    def abort(self, messages: list[TaskResult | None]) -> None:
        """Do nothing: written rows remain, and are replaced when they are written again."""


def encode_target(target: Target) -> str:
    """Return the target as the text of the sink's option `target`."""
    return json.dumps(asdict(target))


def register_sink(spark: "SparkSession") -> None:
    """Register the sink `sluice_table` in a session and the sessions cloned from it."""
    spark.dataSource.register(TableSource)
