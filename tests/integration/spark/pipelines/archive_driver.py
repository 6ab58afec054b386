"""A Spark driver in a separate process: it archives a topic, replays it, and may kill itself.

    python archive_driver.py NAME_SERVER TOPIC PATH NAME KILL_AT

KILL_AT is the method before which the driver kills itself with SIGKILL: `commit`, the rows are
staged and the run is not committed; `move`, it is committed and its files are still staged;
`finish_step`, the first step of the replay is sent and not counted; or `none`. The replay NAME
sends to the topic TOPIC-again.
"""

import os
import signal
import sys
from typing import Any

from sluicemq.pipelines.archive import archive, replay
from sluicemq.pipelines.ready import (
    Folder,
)
from sluicemq.pipelines.sinks.archive_runs import ArchiveRuns
from sluicemq.pipelines.sinks.steps import (
    JobState,
)
from sluicemq.spark.session import spark_session

SETTINGS = {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "1"}


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(name_server: str, topic: str, path: str, name: str, kill_at: str) -> None:
    for owner in (ArchiveRuns, Folder, JobState):
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
