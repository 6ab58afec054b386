"""Rows into a relational table exactly once: each has a key, and a key that is there is left alone.

A partition of rows is one transaction: `INSERT … ON CONFLICT (key) DO NOTHING`, the key being a
column of the row. So whatever Spark runs again (a task, a micro-batch, the whole job after its
driver was killed) finds its keys and changes nothing, and a task that dies has written nothing. Two
attempts of one task at the same time: the database lets the second wait for the first.

Unlike the table sink (`upsert`), a row that is there is never changed: what an application did to
it since stays.
"""

import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sluicemq.errors import ConfigurationError
from sluicemq.spark.pipelines.upsert import (
    NATIVE,
    Row,
    Target,
    as_row,
    check_table,
    make_table,
    missing_table,
    open_engine,
    table_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Written:
    """Rows that were handed over, and those of them that were new."""

    rows: int = 0
    new: int = 0


def prepare(target: Target, *, create: bool) -> None:
    """Makes or checks the table, on the driver. Raises ConfigurationError."""
    engine = open_engine(target.url)
    try:
        if engine.dialect.name not in NATIVE:
            raise ConfigurationError(
                f"{engine.dialect.name} has no INSERT … ON CONFLICT.",
                cure=f"Use {' or '.join(NATIVE)}, or the table sink of a pipeline file.",
            )
        if not missing_table(engine, target):
            check_table(engine, target)
        elif create:
            make_table(engine, target)
        else:
            raise ConfigurationError(
                f"there is no table {target.table!r}.", cure="Make it, or set create: true."
            )
    finally:
        engine.dispose()


def write_once(frame: "DataFrame", target: Target) -> Written:
    """Inserts the rows whose keys are not there yet; only counts come to the driver. Tasks that
    share keys take them in the same order, so they wait for each other and do not deadlock."""
    ordered = frame.sortWithinPartitions(*target.key)
    counts = ordered.rdd.mapPartitions(partial(insert_partition, target)).collect()
    return Written(sum(rows for rows, _ in counts), sum(new for _, new in counts))


def insert_partition(target: Target, rows: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """One task: all its rows or none of them; (rows, new rows)."""
    chunks = _chunks(rows, target)
    first = next(chunks, None)
    if first is None:
        return
    engine = open_engine(target.url)
    try:
        total, new = insert_new(engine, target, _chain(first, chunks))
    finally:
        engine.dispose()
    yield total, new


def insert_new(engine: Any, target: Target, chunks: Iterable[Sequence[Row]]) -> tuple[int, int]:
    """Inserts chunks of rows in one transaction; (rows, new rows). Raises ConfigurationError for a
    row without key."""
    table = table_of(target, engine.dialect.name)
    if engine.dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite as native  # noqa: PLC0415
    else:
        from sqlalchemy.dialects import postgresql as native  # type: ignore[no-redef]  # noqa: PLC0415
    statement = native.insert(table).on_conflict_do_nothing(index_elements=list(target.key))
    told = statement.returning(table.c[target.key[0]])  # a driver's row count is no fact
    total = new = 0
    with engine.begin() as connection:
        for chunk in chunks:
            _expect_keys(chunk, target)
            total += len(chunk)
            new += len(connection.execute(told, list(chunk)).all())
    return total, new


def _expect_keys(rows: Sequence[Row], target: Target) -> None:
    for name in target.key:
        if any(row[name] is None for row in rows):
            raise ConfigurationError(
                f"a row has no value in the key column {name!r}.",
                cure="Choose another key, or leave such messages out with filter.sql.",
            )


def _chain(first: list[Row], rest: Iterator[list[Row]]) -> Iterator[list[Row]]:
    yield first
    yield from rest


def _chunks(rows: Iterable[Any], target: Target) -> Iterator[list[Row]]:
    kinds = dict(target.columns)
    chunk: list[Row] = []
    for row in rows:
        chunk.append({
            name: _value(value, kinds[name])
            for name, value in as_row(row.asDict(recursive=True), kinds).items()
        })  # fmt: skip
        if len(chunk) == target.chunk_rows:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _value(value: Any, kind: str) -> Any:
    """Spark's rows hold bytes as bytearrays, and moments in the worker's own time zone."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, datetime.datetime) and kind == "timestamp":
        return value.astimezone(datetime.UTC)
    return value
