"""A Spark driver in a separate process: it runs a stream into a table, and may kill itself.

    python dedup_driver.py NAME_SERVER TOPIC URL CHECKPOINT KILL_AT

KILL_AT is the number of a micro-batch. The driver kills itself with SIGKILL after it is
in the table, and before Spark notes it. -1 means never.
"""

import os
import signal
import sys

from sluicemq.pipelines.dedup import stream_table
from sluicemq.spark.session import spark_session


def main(name_server: str, topic: str, url: str, checkpoint: str, kill_at: int) -> None:
    spark = spark_session("dedup", master="local[1]", settings={"spark.log.level": "ERROR"})

    def tell(number, written) -> None:
        print(f"micro-batch {number}: {written.rows} rows, {written.new} new", flush=True)
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    query = stream_table(
        spark, {"nameServers": name_server}, topic=topic, url=url, table="orders",
        checkpoint=checkpoint, columns={"number": "cast(properties['number'] as int)"},
        source={"maxOffsetsPerTrigger": "40"}, on_batch=tell,
    )  # fmt: skip
    query.awaitTermination()
    print("done", flush=True)
    os._exit(0)  # the JVM ends with its parent's pipe


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
