"""A Spark driver as a process of its own: archives a topic and replays it, and may kill itself.

    python archive_driver.py NAME_SERVER TOPIC PATH NAME KILL_AT

KILL_AT: the step before which the driver dies (SIGKILL): `commit`, the rows are written and the run
is not there; `move`, it is there and its files stand beside; `step`, the first step of the replay
is sent and not noted; `none`. The replay NAME goes into the topic TOPIC-again.
"""

import os
import signal
import sys
from typing import Any

from sluicemq.pipelines.archive import Runs, archive, replay
from sluicemq.pipelines.ready import Folder, Ledger
from sluicemq.spark.session import spark_session

SETTINGS = {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "1"}


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(name_server: str, topic: str, path: str, name: str, kill_at: str) -> None:
    for owner in (Runs, Folder, Ledger):
        if hasattr(owner, kill_at):
            setattr(owner, kill_at, die)
    spark = spark_session("archive", master="local[1]", settings=SETTINGS)
    connection = {"nameServers": name_server}
    archive(spark, connection, path=path, topics=[topic], verify="none")
    replay(spark, connection, path=path, name=name, to=f"{topic}-again", step=20, ids="same")
    print("done", flush=True)
    os._exit(0)  # the JVM ends with its parent's pipe


if __name__ == "__main__":
    main(*sys.argv[1:6])
