"""Reading a store directory into Spark without a broker (`rocketmq_store`), beside the ceiling.

    python benchmarks/spark_store.py [--messages 2000000] [--repeat 3]

The rows of `spark_read.py`: 128 B bodies and three properties of the user in four queues, local[2],
in a store that our `Store` writes. `store_frame` and `store_figures` are for `spark_read.py`, whose
broker's directory they read while it runs. What is timed is what is timed there; *ceiling* is a
Python source that has the decoded rows in memory.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from spark_read import (
    HIT_EVERY,
    QUEUES,
    ROOT,
    TOPIC,
    Timing,
    measure,
    rows,
    save_rows,
    show,
    sum_of_bodies,
)

from sluicemq.config import StoreConfig
from sluicemq.model.ids import Host, encode_host, tag_code
from sluicemq.model.message import TAGS, UNIQ_KEY
from sluicemq.record.codec import encode_properties
from sluicemq.spark.session import spark_session
from sluicemq.store.store import Store

BATCH = 2_000
HOST = encode_host(Host("127.0.0.1", 10911))


def store_frame(spark: Any, directory: Path | str, **options: str) -> Any:
    """The topic of the benchmarks out of a store directory, its broker running or not."""
    reader = spark.read.format("rocketmq_store").option("topic", TOPIC).options(**options)
    return reader.load(str(directory))


def store_figures(
    spark: Any,
    store: Path | str,
    messages: int,
    repeat: int,
    directory: Path,
    ceiling: dict[str, Timing],
) -> dict[str, dict[str, Timing]]:
    """Measures and prints the rows of the table; `ceiling` are the timings of all rows there."""
    sum_of_bodies(store_frame(spark, store))  # warm
    figures = {"store": measure(store_frame(spark, store), repeat, directory, messages)}
    show("store", messages, figures["store"], ceiling)
    hits = -(-messages // HIT_EVERY)
    for title, option in (
        ("store, tag 1 %", {"filter.tags": "hit"}),
        ("store, SQL92 1 %", {"filter.sql": "TAGS = 'hit'"}),
    ):
        figures[title] = measure(store_frame(spark, store, **option), repeat, directory, hits)
        show(title, messages, figures[title], {})
    return figures


def write_store(directory: Path, messages: int) -> None:
    """The rows as a broker stores them: batches of 2,000 into the queues in turn."""
    store = Store.open(StoreConfig(root=str(directory)))
    for turn, first in enumerate(range(0, messages, BATCH)):
        count = min(BATCH, messages - first)
        for index, (body, tag, properties) in enumerate(rows(first, count), first):
            named = {UNIQ_KEY: f"7F0000010000000000000000{index:08X}", "WAIT": "true", TAGS: tag}
            store.writer.append(
                TOPIC, turn % QUEUES, body, encode_properties(named | properties), tag_code(tag),
                0, 0, 1_795_000_000_000 + index, HOST, HOST,
            )  # fmt: skip
        store.commit()
        store.tick()
    store.close()


def memory_frame(spark: Any, store: Path, messages: int, directory: Path) -> Any:
    """The same rows, which a Python source holds in memory."""
    import spark_ceiling

    frame = store_frame(spark, store)
    path = directory / "rows.arrow"
    save_rows(frame, messages, path)
    spark.dataSource.register(spark_ceiling.Ceiling)
    given = {"path": str(path), "schema": frame.schema.json(), "partitions": str(QUEUES),
             "rows": str(messages)}  # fmt: skip
    return spark.read.format("ceiling").options(**given).load()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    messages, repeat = arguments.messages, arguments.repeat
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), str(ROOT / "src")))
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as text:
        directory = Path(text)
        write_store(directory / "store", messages)
        settings = {"spark.driver.memory": "4g", "spark.log.level": "ERROR"}
        spark = spark_session("bench-store", master="local[2]", settings=settings)
        try:
            top = memory_frame(spark, directory / "store", messages, directory)
            sum_of_bodies(top)  # warm
            figures = {"ceiling": measure(top, repeat, directory, messages)}
            show("ceiling", messages, figures["ceiling"], {})
            figures |= store_figures(
                spark, directory / "store", messages, repeat, directory, figures["ceiling"]
            )
        finally:
            spark.stop()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
