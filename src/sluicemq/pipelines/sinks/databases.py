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


def _import_sqlalchemy() -> Any:
    """Return the module `sqlalchemy`, or raise ConfigurationError if it is not installed."""
    try:
        return import_module("sqlalchemy")
    except ImportError:
        raise ConfigurationError(
            "a table sink needs SQLAlchemy.", fix=install_extra("sql")
        ) from None


def check_url(url: str) -> None:
    """Raise ConfigurationError if `url` is not a database URL, or the database is in memory."""
    sqlalchemy = _import_sqlalchemy()
    fix = "Write postgresql://user@host/name or sqlite:///file.db."
    try:
        parsed = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise ConfigurationError("this is not the URL of a database.", fix=fix) from None
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigurationError("a database in memory only exists during one task.", fix=fix)


def absolute_url(url: str) -> str:
    """Return the URL of a database, in which the path of an SQLite file is absolute.

    Spark's tasks may run in another directory.
    """
    scheme, _, path = url.partition(":///")
    if scheme.startswith("sqlite") and path and not path.startswith("/"):
        return f"{scheme}:///{Path(path).absolute()}"
    return url


def url_without_password(url: str) -> str:
    """Return the URL with its password masked."""
    return str(_import_sqlalchemy().make_url(url).render_as_string(hide_password=True))


def create_engine(url: str) -> "sa.Engine":
    """Return an engine of SQLAlchemy, which the caller must dispose of.

    Raises ConfigurationError if the driver is not installed or the URL is invalid.
    """
    _import_sqlalchemy()
    from sluicemq.client.ledger import make_blocking_engine  # noqa: PLC0415 - needs SQLAlchemy

    return make_blocking_engine(url)


@contextmanager
def temporary_engine(url: str) -> "Iterator[sa.Engine]":
    """Return a context manager with an SQLAlchemy engine, which is disposed of at the end.

    Raises ConfigurationError if the driver is not installed or the URL is invalid.
    """
    engine = create_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


# ---- tables


def is_table_missing(engine: "sa.Engine", target: Target) -> bool:
    """Return whether the table of `target` does not exist in the database."""
    schema, name = target.schema_and_name
    return not _import_sqlalchemy().inspect(engine).has_table(name, schema=schema)


def create_table(engine: "sa.Engine", target: Target) -> None:
    """Create the table unless it exists."""
    build_table(target, engine.dialect.name).create(engine, checkfirst=True)


def check_table(engine: "sa.Engine", target: Target) -> None:
    """Raise ConfigurationError if the table lacks a column, or is not unique in the key columns.

    It is unique if it has a primary key, a unique constraint or a unique index of these columns.
    """
    inspector = _import_sqlalchemy().inspect(engine)
    schema, name = target.schema_and_name
    existing_columns = [column["name"] for column in inspector.get_columns(name, schema=schema)]
    missing_columns = [column for column, _ in target.columns if column not in existing_columns]
    if missing_columns:
        raise ConfigurationError(
            f"the table {target.table!r} has no column {', '.join(missing_columns)}.",
            fix=f"Give the transform's columns the names of the table:"
            f" {', '.join(existing_columns)}.",
        )
    if set(target.key) not in _find_unique_columns(inspector, target):
        raise ConfigurationError(
            f"the table {target.table!r} has no primary key or unique constraint of"
            f" {', '.join(target.key)}.",
            fix="Add one, or use the table's key; otherwise rows would be duplicated.",
        )


def _find_unique_columns(inspector: Any, target: Target) -> list[set[str]]:
    """Return the sets of columns whose values identify a row of the table.

    The primary key, each unique constraint and each unique index give one set. `inspector` is
    SQLAlchemy's inspector of the database.
    """
    schema, name = target.schema_and_name
    indexes = inspector.get_indexes(name, schema=schema)
    primary_key = inspector.get_pk_constraint(name, schema=schema)
    constraints = inspector.get_unique_constraints(name, schema=schema)
    unique_columns = [primary_key["constrained_columns"]]
    unique_columns += [constraint["column_names"] for constraint in constraints]
    unique_columns += [index["column_names"] for index in indexes if index["unique"]]
    return [set(column_names) for column_names in unique_columns]


def build_table(target: Target, dialect: str) -> "sa.Table":
    """Return an SQLAlchemy table with the name and columns of the target.

    `dialect` is the name of the database's dialect, such as "postgresql". Raises ConfigurationError
    for a Spark type that has no column type.
    """
    sqlalchemy = _import_sqlalchemy()
    schema, table_name = target.schema_and_name
    columns = []
    for column_name, spark_type in target.columns:
        is_key = column_name in target.key
        if spark_type == "string" and is_key and dialect not in NATIVE:
            column_type = sqlalchemy.types.String(KEY_LENGTH)
        else:
            column_type = _choose_column_type(spark_type)
        columns.append(
            sqlalchemy.Column(column_name, column_type, primary_key=is_key, autoincrement=False)
        )
    return sqlalchemy.Table(table_name, sqlalchemy.MetaData(), *columns, schema=schema)  # type: ignore[no-any-return]


def _choose_column_type(spark_type: str) -> Any:
    """Return SQLAlchemy's type for the values of a Spark type, such as "bigint".

    Raises ConfigurationError if there is none.
    """
    types = _import_sqlalchemy().types
    if spark_type == "string":
        return types.Text()
    if spark_type.startswith("decimal("):
        precision, _, scale = spark_type.removeprefix("decimal(").rstrip(")").partition(",")
        return types.Numeric(int(precision), int(scale))
    if spark_type.startswith(_NESTED):
        return types.JSON(none_as_null=True)
    if spark_type == "timestamp":
        return types.DateTime(timezone=True)
    if spark_type in _TYPES:
        return getattr(types, _TYPES[spark_type])()
    raise ConfigurationError(
        f"a table cannot have a column of type {spark_type!r}.",
        fix="Cast it in the transform.",
    )


# ---- replace rows by key


def upsert_rows(engine: "sa.Engine", target: Target, rows: Iterable[Row]) -> int:
    """Write rows to the table, replacing rows with the same keys. Return the number of rows.

    Each chunk of rows is one transaction. If several rows of a chunk have the same key, the row
    with the largest version is written, or the last one if the target has no version. Raises
    ConfigurationError for a row without a value in a key column.
    """
    table = build_table(target, engine.dialect.name)
    if engine.dialect.name in NATIVE:
        write_rows = _build_native_upsert(target, table, engine.dialect.name)
    else:
        write_rows = _build_portable_upsert(target, table)
    row_count = 0
    for chunk in _split_into_chunks(rows, target.chunk_rows):
        _require_keys(chunk, target, "Filter such rows out in the transform, or use another key.")
        row_count += len(chunk)
        newest_by_key = _find_newest_rows(chunk, target)
        # Sorted, so that two tasks with the same keys lock them in the same order.
        sorted_rows = [newest_by_key[key] for key in sorted(newest_by_key)]
        with engine.begin() as connection:
            write_rows(connection, sorted_rows)
    return row_count


def _find_newest_rows(rows: Iterable[Row], target: Target) -> dict[tuple[Any, ...], Row]:
    """Return one row for each key: the row with the largest version.

    A row without a version is older than every row with one. Among rows with the same version, and
    if the target has no version, the last row is returned. The dict is by the values of the key
    columns.
    """
    newest_by_key: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in target.key)
        previous_row = newest_by_key.get(key)
        if previous_row is not None and target.version is not None:
            version = row[target.version]
            previous_version = previous_row[target.version]
            is_older = previous_version is not None and (
                version is None or version < previous_version
            )
            if is_older:
                continue
        newest_by_key[key] = row
    return newest_by_key


def _split_into_chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
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

    A row replaces the row with the same key. If the target has a version column, the old row stays
    if its version is larger.
    """
    insert = _build_insert(table, dialect)
    excluded = insert.excluded  # the row that could not be inserted
    new_values = {
        column.name: excluded[column.name] for column in table.columns if not column.primary_key
    }
    is_newer = None
    if target.version is not None:
        old_version = table.c[target.version]
        is_newer = old_version.is_(None) | (old_version <= excluded[target.version])

    key = list(target.key)
    if new_values:
        statement = insert.on_conflict_do_update(
            index_elements=key, set_=new_values, where=is_newer
        )
    else:
        statement = insert.on_conflict_do_nothing(index_elements=key)

    def write_rows(connection: "sa.Connection", rows: Sequence[Row]) -> None:
        connection.execute(statement, rows)

    return write_rows


def _build_portable_upsert(target: Target, table: "sa.Table") -> RowWriter:
    """Return a function that writes rows with UPDATE and INSERT, for other databases.

    A row replaces the row with the same key, unless that has a larger version. For each row, UPDATE
    is tried first. If it changes nothing, the row is inserted. If the key exists after all, UPDATE
    is tried again.
    """
    integrity_error = _import_sqlalchemy().exc.IntegrityError
    update_row = _build_row_update(target, table)

    def write_rows(connection: "sa.Connection", rows: Sequence[Row]) -> None:
        """Update or insert each of the rows.

        An INSERT runs in a savepoint, so that the transaction survives a duplicate key.
        """
        for row in rows:
            if update_row(connection, row):
                continue
            try:
                with connection.begin_nested():
                    connection.execute(table.insert(), row)
            except integrity_error:
                # The row exists: it has a newer version, or another task has inserted it.
                update_row(connection, row)

    return write_rows


def _build_row_update(target: Target, table: "sa.Table") -> "Callable[[sa.Connection, Row], bool]":
    """Return a function that updates the row with the same key, unless it has a larger version.

    The function returns whether a row was changed.
    """
    value_columns = [column.name for column in table.columns if not column.primary_key]
    update = _build_update(target, table, value_columns)

    def update_row(connection: "sa.Connection", row: Row) -> bool:
        """Update the row with the same key, and return whether a row was changed.

        The result is False without an UPDATE if all columns belong to the key. If the target has a
        version column, a row with a larger version stays as it is.
        """
        if not value_columns:
            return False
        parameters = dict(row)
        for name in target.key:
            parameters[f"key_{name}"] = row[name]
        if target.version is not None:
            parameters["new_version"] = row[target.version]
        return bool(connection.execute(update, parameters).rowcount)

    return update_row


def _build_update(target: Target, table: "sa.Table", value_columns: Sequence[str]) -> Any:
    """Return the UPDATE statement that sets the columns `value_columns` of one row.

    Its parameters are the new values by the names of the columns, `key_NAME` for each column of the
    key, and `new_version` if the target has a version.
    """
    sqlalchemy = _import_sqlalchemy()
    key_conditions = [table.c[name] == sqlalchemy.bindparam(f"key_{name}") for name in target.key]
    update = table.update().where(sqlalchemy.and_(*key_conditions))
    if target.version is not None:
        old_version = table.c[target.version]
        new_version = sqlalchemy.bindparam("new_version")
        update = update.where(old_version.is_(None) | (old_version <= new_version))
    return update.values({name: sqlalchemy.bindparam(name) for name in value_columns})


# ---- insert rows with new keys


def prepare_table(target: Target, *, create: bool) -> None:
    """Check that the table is suitable for `insert_new_rows`, or create it.

    A missing table is created if `create` is True. Raises ConfigurationError if the database has no
    ON CONFLICT, or if the table is unsuitable or missing.
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
    """Insert the rows whose keys do not exist yet, and return the number of all and of new rows."""
    # Tasks with the same keys lock them in the same order: they wait, but do not deadlock.
    ordered = frame.sortWithinPartitions(*target.key)
    counts = ordered.rdd.mapPartitions(partial(insert_partition, target)).collect()
    return Written(
        rows=sum(row_count for row_count, _ in counts),
        new=sum(new_count for _, new_count in counts),
    )


def insert_partition(target: Target, rows: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Insert all rows of one task in one transaction, and yield one pair (rows, new rows).

    A row whose key exists is skipped. Nothing is yielded if there are no rows. Raises
    ConfigurationError for a row without a key.
    """
    type_by_column = dict(target.columns)
    database_rows = (to_database_row(row.asDict(recursive=True), type_by_column) for row in rows)
    chunks = _split_into_chunks(database_rows, target.chunk_rows)
    first_chunk = next(chunks, None)
    if first_chunk is None:
        return
    with temporary_engine(target.url) as engine:
        yield insert_chunks(engine, target, chain([first_chunk], chunks))


def insert_chunks(engine: Any, target: Target, chunks: Iterable[Sequence[Row]]) -> tuple[int, int]:
    """Insert chunks of rows in one transaction, and return (rows, new rows).

    Rows whose keys exist are left unchanged. Raises ConfigurationError for a row without a key.
    """
    table = build_table(target, engine.dialect.name)
    insert = _build_insert(table, engine.dialect.name)
    insert = insert.on_conflict_do_nothing(index_elements=list(target.key))
    # Drivers do not report the number of inserted rows reliably, so the statement returns them.
    insert = insert.returning(table.c[target.key[0]])
    row_count = new_count = 0
    with engine.begin() as connection:
        for chunk in chunks:
            _require_keys(
                chunk, target, "Use another key, or filter such messages out with filter.sql."
            )
            inserted_keys = connection.execute(insert, list(chunk)).all()
            row_count += len(chunk)
            new_count += len(inserted_keys)
    return row_count, new_count


def to_database_row(row: Row, type_by_column: Mapping[str, str]) -> Row:
    """Return a row of Spark with the values that database drivers accept.

    `type_by_column` has the Spark type of each column. Nested values become values of JSON,
    bytearrays become bytes, and values of the type `timestamp` get the time zone UTC.
    """
    return {
        column: _to_database_value(value, type_by_column[column]) for column, value in row.items()
    }


def _to_database_value(value: Any, spark_type: str) -> Any:
    """Return a value of a Spark type in a form that database drivers accept."""
    if spark_type.startswith(_NESTED):
        return _to_json_value(value)
    if isinstance(value, bytearray):  # rows of an RDD contain bytearrays
        return bytes(value)
    if isinstance(value, datetime.datetime) and spark_type == "timestamp":
        # A timestamp without a zone is in the time zone of the worker.
        return value.astimezone(datetime.UTC)
    return value


def _to_json_value(value: Any) -> Any:
    """Return a nested value of Spark as lists, dicts and scalars, for JSON.

    Arrow returns a map as a list of tuples; it becomes a dict.
    """
    if isinstance(value, list):
        is_map = bool(value) and all(isinstance(element, tuple) for element in value)
        if is_map:
            return {str(key): _to_json_value(inner) for key, inner in value}
        return [_to_json_value(element) for element in value]
    if isinstance(value, dict):
        return {key: _to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, datetime.date):
        return value.isoformat()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


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
        """Return the name of the sink, as `format` takes it."""
        return FORMAT

    def writer(self, schema: Any, overwrite: bool) -> "TableSink":
        """Return the writer to the table that the option `target` describes."""
        return TableSink(decode_target(self.options["target"]))


class TableSink(DataSourceArrowWriter):  # type: ignore[misc]
    """Writes the rows of tasks. On the driver it does nothing: each task commits by itself."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        """Write the rows of one task, given as Arrow batches, and replace rows with the same keys.

        Spark calls this in a Python worker.
        """
        type_by_column = dict(self.target.columns)
        with errors_without_traceback(), temporary_engine(self.target.url) as engine:
            rows = (
                to_database_row(row, type_by_column)
                for batch in iterator
                for row in batch.to_pylist()
            )
            return TaskResult(upsert_rows(engine, self.target, rows))

    def commit(self, messages: list[TaskResult | None]) -> None:
        """Do nothing: every task has committed its transactions."""

    def abort(self, messages: list[TaskResult | None]) -> None:
        """Do nothing: written rows remain, and are replaced when they are written again."""


def encode_target(target: Target) -> str:
    """Return the target as the text of the sink's option `target`."""
    return json.dumps(asdict(target))


def decode_target(encoded: str) -> Target:
    """Return the target that `encode_target` encoded."""
    fields = json.loads(encoded)
    fields["key"] = tuple(fields["key"])
    fields["columns"] = tuple((name, spark_type) for name, spark_type in fields["columns"])
    return Target(**fields)


def register_sink(spark: "SparkSession") -> None:
    """Register the sink `sluice_table` in a session and the sessions cloned from it."""
    spark.dataSource.register(TableSource)
