"""Two sets of messages compared: counts and checksums by queue and offset range, then row by row.

Both sides are summed up where they are read: for each range of 10,000 offsets of a queue the number
of rows, and two sums of a 64-bit hash over every column (an exclusive or, and a sum of its upper
half). Only these sums are shuffled, and only ranges that differ are looked at by row, so equal
archives cost two reads. A hash covers which columns are null, since Spark's own passes nulls over.
"""

from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.errors import StoreDamagedError
from sluicemq.spark.schema import BASE, EXTRA

RANGE_OFFSETS: Final = 10_000
RANGES_SHOWN_MAX: Final = 100
ROWS_SHOWN_MAX: Final = 10
KEYS: Final = ("topic", "broker", "queue_id")
_VALUES: Final = tuple(name for name in (*BASE, *EXTRA) if name not in (*KEYS, "queue_offset"))
_SHOWN: Final = {name: name for name in _VALUES} | {"properties": "map_entries(properties)"}
_MISSING: Final = "not in the archive"
_EXTRA: Final = "only in the archive"
_TWICE: Final = "more than once in the archive"


def verify_rows(brokers: Any, archived: Any) -> int:
    """How many rows were compared. Raises StoreDamagedError naming rows that differ."""
    compared = _compared(brokers, archived).persist()
    try:
        different = "broker_rows <> archive_rows or parity <> 0 or balance <> 0"
        totals = compared.selectExpr(
            "sum(archive_rows) as archived", "sum(broker_rows) as stored",
            f"count_if({different}) as different",
        ).first()  # fmt: skip
        if not totals["different"]:
            return int(totals["archived"] or 0)
        ranges = compared.where(different).select(*KEYS, "part").limit(RANGES_SHOWN_MAX)
        found = _differences(brokers, archived, ranges)
    finally:
        compared.unpersist()
    listed = "; ".join(found) or "rows that have changed since"
    raise StoreDamagedError(
        f"{totals['different']} ranges of {RANGE_OFFSETS:,} offsets differ: {totals['stored']:,}"
        f" rows at the brokers, {totals['archived']:,} in the archive. {listed}.",
        cure="Rows of this run are not kept; for older ones restore the named files.",
    )


def _compared(brokers: Any, archived: Any) -> Any:
    """A row for each range of offsets: the rows of both sides, and 0 where hashes agree."""
    sums = _sums(brokers).selectExpr("*", "rows as broker_rows", "0L as archive_rows")
    other = _sums(archived).selectExpr("*", "0L as broker_rows", "rows as archive_rows")
    other = other.withColumn("balance", -F.col("balance"))
    return (
        sums.unionByName(other)
        .groupBy(*KEYS, "part")
        .agg(
            F.expr("sum(broker_rows)").alias("broker_rows"),
            F.expr("sum(archive_rows)").alias("archive_rows"),
            F.expr("bit_xor(parity)").alias("parity"),
            F.expr("sum(balance)").alias("balance"),
        )
    )


def _sums(frame: Any) -> Any:
    nulls = ", ".join(f"int({name} is null)" for name in _VALUES)
    hashed = f"xxhash64(queue_offset, concat({nulls}), {', '.join(_SHOWN.values())})"
    parted = frame.selectExpr(*KEYS, f"queue_offset div {RANGE_OFFSETS} as part", f"{hashed} as h")
    return parted.groupBy(*KEYS, "part").agg(
        F.expr("count(1)").alias("rows"),
        F.expr("bit_xor(h)").alias("parity"),
        F.expr("sum(shiftright(h, 32))").alias("balance"),
    )


def _differences(brokers: Any, archived: Any, ranges: Any) -> list[str]:
    """Some rows of the ranges that differ, each with what is wrong."""
    one, other = _chosen(brokers, ranges), _chosen(archived, ranges)
    keys = [*KEYS, "queue_offset"]
    other = other.groupBy(*keys).agg(F.expr("first(row)").alias("kept"), F.expr("count(1) as n"))
    columns = ", ".join(f"if(row.{name} <=> kept.{name}, null, '{name}')" for name in _VALUES)
    reason = (
        f"case when n is null then '{_MISSING}' when row is null then '{_EXTRA}' "
        f"when n > 1 then '{_TWICE}' else concat_ws(', ', array_compact(array({columns}))) end"
    )
    rows = one.join(other, keys, "full_outer").selectExpr(*keys, f"{reason} as reason")
    shown = rows.where("reason <> ''").orderBy(*keys).limit(ROWS_SHOWN_MAX).collect()
    return [_told(row) for row in shown]


def _chosen(frame: Any, ranges: Any) -> Any:
    values = ", ".join(f"{how} as {name}" for name, how in _SHOWN.items())
    keyed = frame.withColumn("part", F.expr(f"queue_offset div {RANGE_OFFSETS}"))
    chosen = keyed.join(ranges.hint("broadcast"), [*KEYS, "part"], "left_semi")
    return chosen.selectExpr(*KEYS, "queue_offset", f"struct({values}) as row")


def _told(row: Any) -> str:
    reason = row["reason"]
    is_difference = reason not in (_MISSING, _EXTRA, _TWICE)
    where = f"{row['broker']}:{row['queue_id']} of {row['topic']!r} offset {row['queue_offset']}"
    return f"{where}: {reason}{' differs' if is_difference else ''}"
