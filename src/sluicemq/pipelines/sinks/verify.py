"""Compare the rows of an archive with the messages at the brokers.

Both sides are summed up where they are read. For each range of `RANGE_OFFSETS` offsets of a queue,
the sums are the number of rows, the exclusive or of a 64-bit hash over all columns, and the sum of
the hash's upper half. Spark only shuffles these sums, and only ranges whose sums differ are
compared row by row. So verifying an equal archive costs two reads.

Spark's hash function ignores nulls, so the hash also covers which columns are null.
"""

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name of this module

from sluicemq.errors import StoreDamagedError
from sluicemq.spark.schema import BASE_TYPES, ERROR_NAME, EXTRA_TYPES

COLUMNS: Final = (*BASE_TYPES, *EXTRA_TYPES, ERROR_NAME)
"""The columns of messages in an archive: all that the source has, and the error of a body."""
RANGE_OFFSETS: Final = 10_000
RANGES_COMPARED_MAX: Final = 100
"""The number of different ranges whose rows are compared."""
ROWS_SHOWN_MAX: Final = 10
"""The number of different rows in the text of an error."""
_QUEUE_COLUMNS: Final = ("topic", "broker", "queue_id")
_KEY_COLUMNS: Final = (*_QUEUE_COLUMNS, "queue_offset")
_VALUE_COLUMNS: Final = tuple(name for name in COLUMNS if name not in _KEY_COLUMNS)
_VALUE_EXPRESSIONS: Final = {name: name for name in _VALUE_COLUMNS} | {
    "properties": "map_entries(properties)",
    # Another version of SluiceMQ may write another reason, so only its presence is compared.
    ERROR_NAME: f"{ERROR_NAME} is not null",
}
"""For each column, the expression that is compared."""
_MISSING: Final = "not in the archive"
_EXTRA: Final = "only in the archive"
_REPEATED: Final = "more than once in the archive"


def rows_in_ranges(rows: Any, ranges: Sequence[tuple[Any, ...]]) -> Any:
    """Return the rows whose offset is in any of the ranges.

    A range is (topic, broker, queue id, start offset, end offset). The end offset is exclusive.
    """
    names = "topic string, broker string, queue_id int, range_start long, range_end long"
    range_rows = rows.sparkSession.createDataFrame(ranges, names).hint("broadcast")
    is_inside = "queue_offset >= range_start and queue_offset < range_end"
    joined = rows.join(range_rows, list(_QUEUE_COLUMNS)).where(is_inside)
    return joined.drop("range_start", "range_end")


def verify_rows(brokers: Any, archived: Any) -> int:
    """Compare the rows at the brokers with the rows of the archive. Return the number of rows.

    Both DataFrames have the columns `COLUMNS`. Raises StoreDamagedError if they differ. Its text
    names up to `ROWS_SHOWN_MAX` rows.
    """
    compared = _compare_sums(brokers, archived).persist()
    try:
        is_different = "broker_rows <> archive_rows or parity <> 0 or balance <> 0"
        totals = compared.selectExpr(
            "sum(archive_rows) as archived",
            "sum(broker_rows) as stored",
            f"count_if({is_different}) as different",
        ).first()
        if not totals["different"]:
            return int(totals["archived"] or 0)
        different_ranges = compared.where(is_different).select(*_QUEUE_COLUMNS, "part")
        differences = _find_differences(
            brokers, archived, different_ranges.limit(RANGES_COMPARED_MAX)
        )
    finally:
        compared.unpersist()
    examples = "; ".join(differences) or "the rows have changed since"
    raise StoreDamagedError(
        f"{totals['different']} ranges of {RANGE_OFFSETS:,} offsets differ: {totals['stored']:,}"
        f" rows at the brokers, {totals['archived']:,} in the archive. {examples}.",
        fix="The rows of this run are discarded; if older ones differ, restore the named files.",
    )


def _compare_sums(brokers: Any, archived: Any) -> Any:
    """Return the sums of both sides for each range of offsets, as a DataFrame.

    The columns are topic, broker, queue_id, part (the number of the range), broker_rows,
    archive_rows, parity and balance. The rows of a range are equal on both sides if its parity and
    balance are 0.
    """
    broker_sums = _sum_rows(brokers).selectExpr("*", "rows as broker_rows", "0L as archive_rows")
    archive_sums = _sum_rows(archived).selectExpr("*", "0L as broker_rows", "rows as archive_rows")
    return (
        broker_sums.unionByName(archive_sums.withColumn("balance", -F.col("balance")))
        .groupBy(*_QUEUE_COLUMNS, "part")
        .agg(
            F.expr("sum(broker_rows) as broker_rows"),
            F.expr("sum(archive_rows) as archive_rows"),
            F.expr("bit_xor(parity) as parity"),
            F.expr("sum(balance) as balance"),
        )
    )


def _sum_rows(frame: Any) -> Any:
    """Return the sums of the rows in each range of `RANGE_OFFSETS` offsets of a queue.

    The columns are topic, broker, queue_id, part (the number of the range), rows, parity and
    balance. Each row has a hash. Parity is the exclusive or of the hashes, and balance the sum of
    their upper halves.
    """
    nulls = ", ".join(f"int({name} is null)" for name in _VALUE_COLUMNS)
    values = ", ".join(_VALUE_EXPRESSIONS.values())
    hashed = f"xxhash64(queue_offset, concat({nulls}), {values})"
    parted = frame.selectExpr(
        *_QUEUE_COLUMNS, f"queue_offset div {RANGE_OFFSETS} as part", f"{hashed} as h"
    )
    return parted.groupBy(*_QUEUE_COLUMNS, "part").agg(
        F.expr("count(1) as rows"),
        F.expr("bit_xor(h) as parity"),
        F.expr("sum(shiftright(h, 32)) as balance"),
    )


def _find_differences(brokers: Any, archived: Any, ranges: Any) -> list[str]:
    """Return texts about rows that differ, at most `ROWS_SHOWN_MAX`.

    Only rows in `ranges` are compared, a DataFrame with the columns topic, broker, queue_id and
    part. A text says that a row is missing, extra or repeated in the archive, or which columns
    differ.
    """
    archived_rows = (
        _select_rows(archived, ranges)
        .groupBy(*_KEY_COLUMNS)
        .agg(F.expr("first(row) as archived_row"), F.expr("count(1) as n"))
    )
    different_columns = ", ".join(
        f"if(row.{name} <=> archived_row.{name}, null, '{name}')" for name in _VALUE_COLUMNS
    )
    reason = (
        f"case when n is null then '{_MISSING}' when row is null then '{_EXTRA}' "
        f"when n > 1 then '{_REPEATED}' "
        f"else concat_ws(', ', array_compact(array({different_columns}))) end"
    )
    joined = _select_rows(brokers, ranges).join(archived_rows, list(_KEY_COLUMNS), "full_outer")
    explained = joined.selectExpr(*_KEY_COLUMNS, f"{reason} as reason").where("reason <> ''")
    first_rows = explained.orderBy(*_KEY_COLUMNS).limit(ROWS_SHOWN_MAX).collect()
    return list(map(_describe_difference, first_rows))


def _select_rows(frame: Any, ranges: Any) -> Any:
    """Return the rows in `ranges`: their key columns, and a struct `row` of all other values."""
    values = ", ".join(f"{expression} as {name}" for name, expression in _VALUE_EXPRESSIONS.items())
    parted = frame.withColumn("part", F.expr(f"queue_offset div {RANGE_OFFSETS}"))
    in_ranges = parted.join(ranges.hint("broadcast"), [*_QUEUE_COLUMNS, "part"], "left_semi")
    return in_ranges.selectExpr(*_KEY_COLUMNS, f"struct({values}) as row")


def _describe_difference(row: Any) -> str:
    """Return a text about a row that differs, such as `a:0 of 'orders' offset 7: body differs`.

    `row` has the key columns and the column `reason`, which is _MISSING, _EXTRA or _REPEATED, or a
    list of the columns that differ.
    """
    difference = row["reason"]
    if difference not in (_MISSING, _EXTRA, _REPEATED):
        difference = f"{difference} differs"
    queue = f"{row['broker']}:{row['queue_id']} of {row['topic']!r}"
    return f"{queue} offset {row['queue_offset']}: {difference}"
