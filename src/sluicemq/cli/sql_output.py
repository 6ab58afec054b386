"""The rows of `sluice sql`: a table, JSON lines, CSV, Parquet.

Table and lines come one by one to this process; Parquet is written by Spark's tasks.
"""

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from typing import IO, TYPE_CHECKING, Any, Final

import orjson

from sluicemq.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TABLE, JSON, CSV, PARQUET = FORMATS = ("table", "json", "csv", "parquet")
CELL_CHARACTERS_MAX: Final = 200


def file_of(form: str, output: str | None) -> str | None:
    """Where to write; None: stdout. Raises ConfigurationError when the format does not go there."""
    if form == PARQUET and output is None:
        raise ConfigurationError("parquet is no text.", cure="Name a directory with --output.")
    if form == TABLE and output is not None:
        raise ConfigurationError(
            "a table goes to the terminal.", cure="Add --format json, csv or parquet."
        )
    return output


def plain(value: Any) -> Any:
    """What JSON can hold: bytes as text, in hex digits where they are none; times in ISO 8601."""
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.hex()
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, date):
        return value.isoformat()
    if hasattr(value, "asDict"):
        value = value.asDict()
    if isinstance(value, dict):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def write_rows(
    columns: Sequence[str],
    rows: Sequence[Any],
    table: Callable[[str, Sequence[str], Sequence[Sequence[object]]], None],
) -> None:
    """As a table, long values cut."""
    table("", columns, [[_cell(value) for value in row] for row in rows])


def _cell(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, dict | list):
        value = orjson.dumps(value).decode()
    if isinstance(value, str) and len(value) > CELL_CHARACTERS_MAX:
        return value[:CELL_CHARACTERS_MAX] + "…"
    return value


def write_frame(frame: "DataFrame", form: str, target: str | None) -> int:
    """All rows; how many. Raises ConfigurationError when the file cannot be written."""
    if form == PARQUET:
        assert target is not None
        frame.write.parquet(target)
        return int(frame.sparkSession.read.parquet(target).count())
    count = 0
    with _opened(target) as file:
        line = _csv_line(file) if form == CSV else _json_line(file, frame.columns)
        if form == CSV:
            line(frame.columns)
        for row in frame.toLocalIterator(prefetchPartitions=True):
            line([plain(value) for value in row])
            count += 1
    return count


def _json_line(file: IO[str], columns: Sequence[str]) -> Callable[[Sequence[Any]], object]:
    def write(values: Sequence[Any]) -> None:
        file.write(orjson.dumps(dict(zip(columns, values, strict=True)), default=str).decode())
        file.write("\n")

    return write


def _csv_line(file: IO[str]) -> Callable[[Sequence[Any]], object]:
    writer = csv.writer(file, lineterminator="\n")

    def write(values: Sequence[Any]) -> None:
        writer.writerow(
            orjson.dumps(value).decode() if isinstance(value, dict | list) else value
            for value in values
        )

    return write


@contextmanager
def _opened(target: str | None) -> Iterator[IO[str]]:
    if target is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    try:
        file = open(target, "w", encoding="utf-8", newline="")  # noqa: PTH123, SIM115
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror}.") from None
    with file:
        yield file
