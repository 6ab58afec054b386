"""SQL92 selectors in Spark: as Spark SQL text, and as an Arrow function around the column engine.

    python benchmarks/spark_selectors.py [ROWS] [RUNS]

Counts the rows of a Parquet file that a selector matches, both ways, interleaved; prints the median
of the seconds (docs/design/0018-selectors-in-spark-sql.md). Map: `properties` holds the values;
columns: they are promoted.
"""

import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.record.columns import Column, ColumnBlock
from sluicemq.spark.selectors import column
from sluicemq.spark.session import spark_session

SELECTORS = ("origin = 'JFK'", "dep_delay > 60 AND origin IN ('JFK', 'LGA')",
             "dep_delay BETWEEN 10 AND 20 OR NOT (origin = 'EWR' AND dep_delay < 0)")  # fmt: skip
NAMES = ("dep_delay", "origin")
PLACES = {
    "map": ("", [f"properties['{name}']" for name in NAMES]),
    "columns": ("prop:dep_delay,prop:origin", list(NAMES)),
}


def by_columns(selector: str) -> Any:
    """The column engine as an Arrow function: texts -> does it match?"""

    def matches(*texts: pa.Array) -> pa.Array:
        columns = {}
        for name, one in zip(NAMES, texts, strict=True):
            encoded = one.dictionary_encode()
            codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            columns[name] = Column(codes.astype(np.int32), tuple(encoded.dictionary.to_pylist()))
        rows = len(texts[0])
        block = ColumnBlock(0, rows, columns, frozenset(), np.empty(0, np.int64))
        return pa.array(compile_sql92(selector).vectorised.verdicts(block) == 1)

    return F.arrow_udf(matches, "boolean")


def main(rows: int = 2_000_000, runs: int = 5) -> None:
    spark = spark_session("selectors", master="local[2]", log_level="error")
    with tempfile.TemporaryDirectory() as place:
        made = spark.range(rows).selectExpr(
            "cast(id % 180 - 30 as string) as dep_delay",
            "element_at(array('EWR', 'JFK', 'LGA'), cast(id % 3 + 1 as int)) as origin",
        )
        made = made.selectExpr(
            "*", "map('dep_delay', dep_delay, 'origin', origin, 'carrier', 'UA') as properties"
        )
        made.write.parquet(f"{place}/rows")
        frame = spark.read.parquet(f"{place}/rows")
        for where, (columns, texts) in PLACES.items():
            for selector in SELECTORS:
                ways = {
                    "text": frame.where(column(selector, columns=columns)),
                    "arrow": frame.where(by_columns(selector)(*map(F.expr, texts))),
                }
                spent: dict[str, list[float]] = {name: [] for name in ways}
                counts = set()
                for _ in range(runs + 1):
                    for name, query in ways.items():
                        began = time.perf_counter()
                        counts.add(query.count())
                        spent[name].append(time.perf_counter() - began)
                assert len(counts) == 1, counts
                text, arrow = (statistics.median(spent[name][1:]) for name in ("text", "arrow"))
                print(f"{where:8} {selector:75} text {text:.2f} s  arrow {arrow:.2f} s"
                      f"  {arrow / text:.1f} x", flush=True)  # fmt: skip
    spark.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
