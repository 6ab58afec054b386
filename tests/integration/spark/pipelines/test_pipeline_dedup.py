"""The pipeline `dedup`: repeated batches and micro-batches, and killed drivers.

SLUICEMQ_SEEDS (default 1): how many histories of kills (SIGKILL of the driver).
"""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.pipelines.dedup import stream_table, write_table
from sluicemq.pipelines.ready import Task, find_ready_pipeline
from sluicemq.pipelines.sinks.databases import Written
from thorough import seeds
from waiting import limit

ROOT = Path(__file__).parents[4]
SEEDS = seeds(1)
COUNT = 100
NUMBER = {"number": "cast(properties['number'] as int)"}


def numbers(path: Path) -> list[int]:
    with sqlite3.connect(path) as connection:
        return [row[0] for row in connection.execute("select number from orders order by number")]


def test_a_repeated_batch_changes_nothing(
    spark: Any, name_server: str, topic: str, publish: Callable[..., None], tmp_path: Path
) -> None:
    publish(0, COUNT)
    pipeline = find_ready_pipeline("dedup")
    options = {field.name: field.default for field in pipeline.fields}
    options |= {
        "topic": topic, "url": f"sqlite:///{tmp_path / 'shop.db'}", "table": "orders",
        "columns": NUMBER | {"sent": "born_time", "raw": "body", "props": "properties"},
    }  # fmt: skip
    lines: list[str] = []
    task = Task(spark, options, {"nameServers": name_server}, say=lines.append)
    assert "key sluice_key: concat(topic" in pipeline.plan(task)[1]
    assert not (tmp_path / "shop.db").exists(), "a plan writes nothing"
    assert pipeline.run(task).figures == {"rows": COUNT, "new": COUNT, "repeated": 0}
    publish(COUNT, 10)
    assert pipeline.run(task).figures == {"rows": COUNT + 10, "new": 10, "repeated": COUNT}
    assert numbers(tmp_path / "shop.db") == list(range(COUNT + 10))
    assert "10 new rows in orders of sqlite:///" in lines[-1]
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        row = connection.execute(
            "select sluice_key, raw, props from orders where number = 1"
        ).fetchone()
    assert row[0].startswith(f"{topic}/")
    assert row[1] == b"body-1"
    assert '"origin": "JFK"' in row[2]


def test_an_expression_can_be_the_key(
    spark: Any, name_server: str, topic: str, publish: Callable[..., None], tmp_path: Path
) -> None:
    publish(0, 9)
    where = {"url": f"sqlite:///{tmp_path / 'shop.db'}", "topic": topic}
    connection = {"nameServers": name_server}
    done = write_table(spark, connection, table="orders", key="tags", columns=NUMBER, **where)
    assert done == Written(9, 3)
    with pytest.raises(Exception, match="no value in the key column 'sluice_key'"):
        write_table(
            spark, connection, table="other", key="properties['nothing']", columns=NUMBER, **where
        )
    with pytest.raises(ConfigurationError, match=r"the table 'third' does not exist.*create: true"):
        write_table(spark, connection, table="third", create=False, **where)


def test_a_repeated_micro_batch_changes_nothing(
    spark: Any, name_server: str, topic: str, publish: Callable[..., None], tmp_path: Path
) -> None:
    """The query fails after micro-batch 1 is in the table and before Spark's commit log has it."""
    publish(0, COUNT)
    told: list[tuple[int, Written]] = []

    def start(fail_at: int) -> Any:
        def tell(number: int, written: Written) -> None:
            told.append((number, written))
            if number == fail_at:
                raise OSError("the driver is gone")

        return stream_table(
            spark, {"nameServers": name_server}, topic=topic, table="orders", columns=NUMBER,
            url=f"sqlite:///{tmp_path / 'shop.db'}", checkpoint=str(tmp_path / "checkpoint"),
            source={"maxOffsetsPerTrigger": "40"}, on_batch=tell,
        )  # fmt: skip

    with pytest.raises(Exception, match="the driver is gone"):
        start(1).awaitTermination()
    start(-1).awaitTermination()
    assert [number for number, _ in told] == [0, 1, 1, 2]
    assert told[1][1] == Written(40, 40)
    assert told[2][1] == Written(40, 0), "the same epoch again: nothing new"
    assert numbers(tmp_path / "shop.db") == list(range(COUNT))


@pytest.mark.simulation
@pytest.mark.timeout(600 * max(SEEDS, 1))
def test_killed_drivers_neither_lose_nor_duplicate_rows(
    name_server: str, topic: str, publish: Callable[..., None], tmp_path: Path
) -> None:
    publish(0, COUNT)
    repeated = 0
    for seed in range(SEEDS):
        place = tmp_path / str(seed)
        place.mkdir()
        kills = random.Random(seed).sample((0, 1, 2), k=1 if SEEDS == 1 else 2)
        for kill_at in sorted(kills):
            output = run_driver(name_server, topic, place, kill_at)
            assert "done" not in output
        output = run_driver(name_server, topic, place, -1)
        assert "done" in output
        repeated += sum(", 0 new" in line for line in output.splitlines())
        assert numbers(place / "shop.db") == list(range(COUNT)), f"seed {seed}, kills {kills}"
    assert repeated >= SEEDS, "each last kill left a micro-batch to be written again"


def run_driver(name_server: str, topic: str, place: Path, kill_at: int) -> str:
    """Its output; its process group (the JVM and its workers) is gone afterwards."""
    driver = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "dedup_driver.py"), name_server, topic,
         f"sqlite:///{place / 'shop.db'}", str(place / "checkpoint"), str(kill_at)],
        stdout=subprocess.PIPE, stderr=(place / "errors").open("wb"), text=True,
        start_new_session=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    try:
        code = driver.wait(limit(280))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.stdout is not None
    with driver.stdout:
        output = driver.stdout.read()
    expected = -signal.SIGKILL if kill_at >= 0 else 0
    assert code == expected, (place / "errors").read_text()[-3000:]
    return output
