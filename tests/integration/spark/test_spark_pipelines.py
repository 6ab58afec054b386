"""Pipelines from a file: a batch, its dry run, a stream that is stopped and started again."""

import json
import os
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import dataset

from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError
from sluicemq.pipelines.file import Pipeline, load_pipeline
from sluicemq.pipelines.plan import plan
from sluicemq.pipelines.run import Event, StopRequest, run, stop_on_signals
from waiting import limit

pytestmark = pytest.mark.timeout(300)

Publish = Callable[[int, int], None]
Make = Callable[..., Pipeline]


@pytest.fixture
def make(name_server: str, topic: str, tmp_path: Path) -> Make:
    """Return a function that makes a pipeline from the text of a file about the test's topic."""

    def written(text: str) -> Pipeline:
        path = tmp_path / "p.yaml"
        head = f'name: {topic}\ncluster: {{nameServers: "{name_server}"}}\n'
        path.write_text(head + text.replace("TOPIC", topic).replace("DIR", str(tmp_path)))
        return load_pipeline(str(path))

    return written


BATCH = """\
source:
  topic: TOPIC
  filter.sql: number >= 20
  columns: [queue_offset, body, "prop:origin", "prop:number:int"]
transform: |
  select number, origin, cast(body as string) as text
  from source where number < 80
sinks:
  - {kind: topic, topic: TOPIC-copy, value: text, tag: origin, delivery: exactly-once}
  - {kind: parquet, path: DIR/out, partition_by: [origin]}
  - {kind: table, url: "sqlite:///DIR/t.db", table: late, key: [number], batch_rows: 7}
"""


def test_a_batch_writes_the_same_rows_to_every_sink_and_its_dry_run_none(
    spark: Any, make: Make, publish: Publish, admin: Admin, topic: str, tmp_path: Path,
    no_rows_at_the_driver: None,
) -> None:  # fmt: skip
    publish(0, 100)
    pipeline = make(BATCH)
    (trap,) = plan(make(BATCH.replace("number >= 20", "delay >= -99")), spark).figures["filter"][3:]
    assert "values of delay cannot be read as Integer ('late')" in trap
    found = plan(pipeline, spark)
    assert found.figures["messages"] == 100
    assert [(one["start"], one["end"]) for one in found.figures["queues"]] == [(0, 50), (0, 50)]
    assert found.figures["filter"][0] == "at the broker, by the file: SQL92 number >= 20"
    assert "LessThan(number, 80)" in found.figures["filter"][1]
    assert found.figures["filter"][2] == "by Spark: -"
    assert found.figures["columns"] == {"number": "int", "origin": "string", "text": "string"}
    assert "it would be created" in found.figures["sinks"][2]["what"]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "t.db").exists() or _tables(tmp_path) == []
    assert admin.find_route(f"{topic}-copy") is None

    events: list[Event] = []
    outcome = run(pipeline, spark, listener=events.append)
    assert outcome.rows == {f"topic-{topic}-copy": 60, "parquet": 60, "table-late": 60}
    assert {one.kind for one in events} >= {"started", "stage", "written", "done"}
    wanted = set(range(20, 80))
    parquet = dataset.dataset(tmp_path / "out", partitioning="hive").to_table()
    assert Counter(parquet.column("number").to_pylist()) == Counter(wanted)
    assert _numbers(tmp_path) == sorted(wanted)
    assert sum(admin.offsets(queue)[1] for queue in admin.queues(f"{topic}-copy")) == 60


def _tables(directory: Path) -> list[Any]:
    with sqlite3.connect(directory / "t.db") as database:
        found = database.execute("select name from sqlite_master").fetchall()
    database.close()
    return found


def _numbers(directory: Path) -> list[int]:
    database = sqlite3.connect(directory / "t.db")
    found = database.execute("select number from late order by number").fetchall()
    database.close()
    return [number for (number,) in found]


@pytest.fixture
def no_rows_at_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every method fail that brings rows to the driver."""
    from pyspark.core.rdd import RDD
    from pyspark.sql.classic.dataframe import DataFrame

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("rows were collected")

    for name in ("collect", "toPandas", "toArrow", "toLocalIterator", "take", "head", "tail"):
        monkeypatch.setattr(DataFrame, name, refused)
    for name in ("collect", "take", "toLocalIterator"):
        monkeypatch.setattr(RDD, name, refused)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("topic: TOPIC\n", "topic: TOPIC-x\n", ":3: source: the topic "),
        ("number, origin", "number,, origin", ":8: transform: at position"),
        ("number, origin", "numbr, origin", ":8: transform: at position"),
        ("select number, origin, cast(body as string) as text\n  from source where number < 80",
         "insert into t select * from source", ":8: transform: this is a command, not a query."),
        ("tag: origin", "tag: oregano", ":11: sinks[0].tag: "),
        ("partition_by: [origin]", "partition_by: [orgin]",
         ":12: sinks[1].partition_by: there is no column 'orgin'. Did you mean 'origin'?"),
        ("key: [number]", "key: [nr]", ":13: sinks[2].key: there is no column 'nr'."),
        ("value: text", "value: text, queue_id: text", ":11: sinks[0]: the column 'queue_id' has"),
    ],
)  # fmt: skip
def test_problems_that_spark_finds_are_reported_with_their_line(
    spark: Any, make: Make, old: str, new: str, expected: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan(make(BATCH.replace(old, new)), spark)
    assert f"p.yaml{expected}" in str(caught.value).splitlines()[0]
    assert "JVM" not in str(caught.value)


STREAM = """\
mode: streaming
trigger: TRIGGER
checkpoint: DIR/ck
source: {topic: TOPIC, startingOffsets: earliest, columns: [body, "prop:number:int"]}
transform: select number, body from source
sinks:
"""
TO_TOPIC = "  - {kind: topic, topic: TOPIC-copy, value: body, delivery: exactly-once}\n"
TO_PARQUET = "  - {kind: parquet, path: DIR/out}\n"
TO_TABLE = '  - {kind: table, url: "sqlite:///DIR/t.db", table: late, key: [number]}\n'


def test_a_signal_ends_a_stream_after_a_micro_batch_and_a_restart_continues(
    spark: Any, make: Make, publish: Publish, read: Any, topic: str, tmp_path: Path
) -> None:
    pipeline = make(STREAM.replace("TRIGGER", "200ms") + TO_TOPIC)
    told: list[Event] = []
    first = 0
    for _ in range(2):
        publish(first, 40)
        first += 40
        seen = threading.Event()

        def hear(event: Event, seen: threading.Event = seen) -> None:
            told.append(event)
            if event.kind == "batch":
                seen.set()

        def kill_when_seen(seen: threading.Event = seen) -> None:
            seen.wait(limit(100))
            os.kill(os.getpid(), signal.SIGTERM)

        publisher = threading.Thread(target=kill_when_seen)
        publisher.start()
        with stop_on_signals(stop := StopRequest()):
            run(pipeline, spark, listener=hear, stopping=stop)
        publisher.join()
        directory = tmp_path / "ck" / f"topic-{topic}-copy"
        assert _batches(directory / "offsets") == _batches(directory / "commits")
    rows = read(topic=f"{topic}-copy", columns="body").collect()
    assert Counter(bytes(row.body).decode() for row in rows) == Counter(
        f"body-{index}" for index in range(first)
    )
    batches = [one for one in told if one.kind == "batch"]
    assert sum(one.figures["rows"] for one in batches) == first
    assert "rows/s" in batches[0].text
    assert batches[0].figures["lag"] == 0
    json.dumps([one.as_json() for one in told])


def _batches(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("[0-9]*")}


@pytest.mark.thorough
def test_each_sink_of_a_stream_has_its_own_checkpoint_and_repeats_nothing(
    spark: Any, make: Make, publish: Publish, tmp_path: Path
) -> None:
    pipeline = make(STREAM.replace("TRIGGER", "available-now") + TO_PARQUET + TO_TABLE)
    for first in (0, 30):
        publish(first, 30)
        planned = plan(pipeline, spark).figures
        assert planned["messages"] == 30
        assert planned["filter"][-1].startswith("by Spark: the conditions of the transform")
        outcome = run(pipeline, spark)
        assert outcome.rows == {"parquet": 30, "table-late": 30}
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == ["parquet", "table-late"]
    assert _numbers(tmp_path) == list(range(60))
    found = dataset.dataset([str(one) for one in (tmp_path / "out").glob("*.parquet")])
    assert sorted(found.to_table().column("number").to_pylist()) == list(range(60))


def test_a_stream_that_fails_says_why_in_one_line(
    spark: Any, make: Make, publish: Publish, tmp_path: Path
) -> None:
    publish(0, 4)
    text = STREAM.replace("TRIGGER", "available-now") + TO_TABLE
    pipeline = make(text.replace("select number", "select if(number = 2, null, number) as number"))
    with pytest.raises(ConfigurationError) as caught:
        run(pipeline, spark)
    assert "a row has no value in the key column 'number'" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_stopped_batch_skips_the_remaining_sinks(
    spark: Any, make: Make, publish: Publish, tmp_path: Path
) -> None:
    publish(0, 10)
    started = time.monotonic()
    outcome = run(make(BATCH), spark, stopping=lambda: time.monotonic() >= started)
    assert len(outcome.skipped) == 3
    assert not (tmp_path / "out").exists()
