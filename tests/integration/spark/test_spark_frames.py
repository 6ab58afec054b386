"""One frame in many queries: each use gives the rows that DuckDB gives on the same messages.

Whatever the settings: with those of our session, and when the user lets Spark hand predicates to
Python sources, which Spark then keeps for the next use of the frame (docs/design/0010).
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from sluicemq.pipelines.file import load_pipeline
from sluicemq.pipelines.run import run
from sluicemq.pipelines.tables import Tables
from sluicemq.spark.references import load_where
from sluicemq.spark.session import fresh

pytestmark = pytest.mark.timeout(300)

TOPIC = "frames"
MESSAGES = 40
COLUMNS = "tags,queue_id,queue_offset,prop:number:int,prop:origin"
SWITCH = "spark.sql.python.filterPushdown.enabled"
ONE_AFTER_ANOTHER = [
    "select count(*) from t",
    "select number from t where tags = 'A'",
    "select count(*) from t",
    "select number from t where tags = 'B' and number > 10",
    "select number from t where origin = 'JFK'",
    "select count(*), sum(number) from t",
]
USED_TWICE = [
    "select number from t where tags = 'A' union all select number from t where tags = 'B'",
    "select number from t union all select number from t where tags = 'B'",
    "select a.number, b.number from t a join t b on a.number + 1 = b.number "
    "where a.tags = 'A' and b.tags = 'B'",
    "select t.number from t left join t b on t.number = b.number and b.tags = 'C' "
    "where b.number is null",
    "select (select count(*) from t where tags = 'A'), (select count(*) from t), "
    "(select count(*) from t where tags = 'B')",
    "select number from t where number in (select number + 1 from t where tags = 'A')",
    "select number from t where tags = 'A' and exists "
    "(select 1 from t b where b.number = t.number + 1 and b.queue_id = 1)",
    "with w as (select number, tags from t where number >= 4) select count(*) from w "
    "where tags = 'A' union all select count(*) from w where tags = 'B' "
    "union all select count(*) from w",
    "select number from t where tags = 'A' intersect select number from t where number < 20",
    "select number from t where queue_id = 0 except select number from t where tags = 'C'",
    "select number, (select max(number) from t b where b.tags = t.tags and b.queue_id = 1) from t",
]
REFERENCE = re.compile(r"\b(from|join) t\b(?: ([ab])\b)?")


def row_of(index: int) -> dict[str, Any]:
    """The numbered message: queue 0 has the even ones."""
    return {
        "tags": "ABC"[index % 3], "queue_id": index % 2, "queue_offset": index // 2,
        "number": index, "origin": ("EWR", "JFK", "LGA", "SFO")[index % 4],
    }  # fmt: skip


@pytest.fixture(scope="module")
def truth() -> Iterator[duckdb.DuckDBPyConnection]:
    """The same rows as the table t."""
    with duckdb.connect() as connection:
        connection.register("t", pa.Table.from_pylist([row_of(i) for i in range(MESSAGES)]))
        yield connection


@pytest.fixture(scope="module")
def flights(admin: Admin, producer: Producer) -> str:
    admin.create_topic(TOPIC, queues=2)
    for queue in producer.write_queues(TOPIC):
        rows = [row for row in map(row_of, range(MESSAGES)) if row["queue_id"] == queue.queue_id]
        properties = [{"number": str(row["number"]), "origin": row["origin"]} for row in rows]
        producer.send_batch(
            [
                Message(TOPIC, b"body", tag=row["tags"], properties=own)
                for row, own in zip(rows, properties, strict=True)
            ],
            queue=queue,
        )
    return TOPIC


@pytest.fixture
def session(spark: Any) -> Iterator[Any]:
    """The session of our own settings; each test begins and ends without views."""
    before = spark.conf.get(SWITCH)
    yield spark
    spark.conf.set(SWITCH, before)
    for view in ("t", "joined"):
        spark.catalog.dropTempView(view)


@pytest.fixture(params=["rocketmq", "rocketmq_store", "rocketmq, switched on"])
def frame(
    request: pytest.FixtureRequest, session: Any, name_server: str, store_directory: Path,
    flights: str,
) -> Any:  # fmt: skip
    """The topic; also where somebody has switched on by himself what Spark gets wrong."""
    source, _, switched = request.param.partition(", ")
    if switched:
        session.conf.set(SWITCH, "true")
    reader = session.read.format(source).options(topic=flights, columns=COLUMNS)
    if source == "rocketmq":
        return reader.option("nameServers", name_server).load()
    return reader.load(str(store_directory))


def rows(found: Any) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, found), key=repr)


def wanted(truth: duckdb.DuckDBPyConnection, query: str) -> list[tuple[Any, ...]]:
    return rows(truth.execute(query).fetchall())


def test_a_frame_gives_its_rows_in_every_query_that_uses_it(
    session: Any, frame: Any, truth: duckdb.DuckDBPyConnection
) -> None:
    frame.createOrReplaceTempView("t")
    for query in (*ONE_AFTER_ANOTHER, *USED_TWICE, *ONE_AFTER_ANOTHER):
        assert rows(session.sql(query).collect()) == wanted(truth, query), query


def test_a_cached_frame_is_whole_after_filtered_ones(
    frame: Any, truth: duckdb.DuckDBPyConnection
) -> None:
    part = frame.where("tags = 'A'").select("number")
    assert rows(part.collect()) == wanted(truth, "select number from t where tags = 'A'")
    kept = frame.cache()
    try:
        assert kept.count() == MESSAGES
        assert kept.where("tags = 'B'").count() == len(wanted(truth, "from t where tags = 'B'"))
        assert kept.union(frame.where("tags = 'C'")).count() == len(
            wanted(truth, "from t union all from t where tags = 'C'")
        )
    finally:
        kept.unpersist(blocking=True)
    assert frame.count() == MESSAGES


def test_a_stream_is_joined_with_whole_frames(
    session: Any, name_server: str, flights: str, frame: Any, tmp_path: Path,
    truth: duckdb.DuckDBPyConnection,
) -> None:  # fmt: skip
    source = session.readStream.format("rocketmq").options(
        nameServers=name_server, topic=flights, columns="prop:number:int as n",
        startingOffsets="earliest",
    )  # fmt: skip
    stream = source.load()
    some = stream.join(frame.where("tags = 'A'"), stream.n == frame.number)
    both = some.select("n").union(stream.join(frame, stream.n + 1 == frame.number).select("n"))
    query = (
        both.writeStream.format("memory").queryName("joined").outputMode("append")
        .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        .start()
    )  # fmt: skip
    query.awaitTermination()
    assert rows(session.table("joined").collect()) == wanted(
        truth, "select number from t where tags = 'A' union all select number from t "
        f"where number < {MESSAGES - 1}",
    )  # fmt: skip


@pytest.mark.thorough
def test_sql_on_topics_gives_the_rows_of_every_reference(
    session: Any, name_server: str, admin: Admin, flights: str, truth: duckdb.DuckDBPyConnection
) -> None:
    tables = Tables(session, {"nameServers": name_server, "reportPushdown": "false"}, admin.topics)
    columns = "tags, queue_id, int(properties['number']) number, properties['origin'] origin"
    for query in (*ONE_AFTER_ANOTHER, *USED_TWICE):
        asked = REFERENCE.sub(
            lambda found: f"{found[1]} (select {columns} from {flights}) {found[2] or 't'}", query
        )
        assert rows(tables.query(asked).collect()) == wanted(truth, query), asked
    named = f"with t as (select {columns} from {flights}) select * from "
    for query in USED_TWICE[:5]:
        assert rows(tables.query(f"{named} ({query})").collect()) == wanted(truth, query), query


THRICE = """\
select number, 'a' as part from source where tags = 'A'
union all select s.number, 'b' from source s where s.tags = 'B'
union all select count(*), 'all' from source
"""


@pytest.mark.parametrize("kind", ["rocketmq", "store"])
def test_a_transform_may_use_its_source_several_times(
    session: Any, name_server: str, store_directory: Path, flights: str, kind: str, tmp_path: Path,
    truth: duckdb.DuckDBPyConnection,
) -> None:  # fmt: skip
    where = f"path: {store_directory}" if kind == "store" else f'nameServers: "{name_server}"'
    text = f"""\
source: {{kind: {kind}, topic: {flights}, {where}, columns: [tags, "prop:number:int"]}}
transform: |
  {THRICE.replace(chr(10), chr(10) + "  ")}
sinks:
  - {{kind: parquet, path: {tmp_path}/out}}
"""
    (tmp_path / "p.yaml").write_text(text)
    outcome = run(load_pipeline(str(tmp_path / "p.yaml")), session)
    wanted_rows = wanted(truth, THRICE.replace("source", "t"))
    assert outcome.rows == {"parquet": len(wanted_rows)}
    assert rows(session.read.parquet(str(tmp_path / "out")).collect()) == wanted_rows


def test_what_no_reference_needs_does_not_leave_the_broker(
    spark: Any, name_server: str, admin: Admin, flights: str,
    bytes_out: Callable[[str], float], tmp_path: Path,
) -> None:  # fmt: skip
    tables = Tables(spark, {"nameServers": name_server, "reportPushdown": "false"}, admin.topics)
    connection = {"nameServers": name_server, "topic": flights, "columns": COLUMNS}

    def sent(work: Callable[[], object]) -> float:
        before = bytes_out(flights)
        work()
        return bytes_out(flights) - before

    def asked(query: str) -> float:
        return sent(tables.query(re.sub(r"\bt\b", flights, query)).collect)

    whole = asked("select body from t")
    assert whole > 0
    third = asked("select body from t where tags = 'A'")
    assert third < 0.4 * whole
    by_property = asked("select body from t where properties['origin'] = 'JFK'")
    assert by_property < 0.3 * whole
    both = "select body from t where tags = 'A' union all select body from t where tags = 'B'"
    assert asked(both) < 0.75 * whole
    joined = "select count(*) from t a join t b on a.keys = b.keys and b.tags = 'A'"
    assert asked(joined) == pytest.approx(whole + third)
    common = "with w as (select * from t where tags = 'A') select (select max(body) from w), "
    assert asked(common + "(select count(*) from w where queue_id = 0)") <= 2 * third
    assert sent(load_where(spark, "tags = 'A'", **connection).collect) == third
    del connection["columns"]
    assert sent(load_where(spark, "tags = 'A'", **connection).collect) == third
    frame = spark.read.format("rocketmq").options(**connection).load()
    assert sent(frame.where("tags = 'A'").collect) == whole, "Spark's own offer is not taken"

    (tmp_path / "p.yaml").write_text(f"""\
cluster: {{nameServers: "{name_server}"}}
source: {{topic: {flights}, columns: [tags, body]}}
transform: >
  select body from source where tags = 'A' union all
  select body from source s where s.tags = 'A' and tags <> ''
sinks:
  - {{kind: parquet, path: {tmp_path}/out}}
""")
    assert sent(lambda: run(load_pipeline(str(tmp_path / "p.yaml")), spark)) == 2 * third


def test_a_fresh_frame_reads_what_is_there_by_then(
    session: Any, name_server: str, read: Callable[..., Any], publish: Callable[..., None],
    admin: Admin, topic: str,
) -> None:  # fmt: skip
    tables = Tables(session, {"nameServers": name_server, "reportPushdown": "false"}, admin.topics)
    frame = read()
    joined = frame.where("tags = 'A'").join(frame.alias("other"), "queue_offset")
    for count in (10, 20, 30):
        publish(count - 10, 10)
        assert fresh(frame).count() == count
        assert len(fresh(frame).collect()) == count
        assert fresh(frame.where("queue_id = 1")).count() == count // 2
        assert fresh(joined).count() == 2 * fresh(frame).where("tags = 'A'").count()
        assert tables.query(f"select count(*) from `{topic}`").first()[0] == count
    rows_now = read().limit(100)
    rows_now.createOrReplaceTempView("t")
    nested = session.sql(
        "with w as (select * from t) select (select count(*) from w), count(*) from w"
    )
    assert tuple(nested.first()) == (30, 30)
    publish(30, 10)
    assert tuple(fresh(nested).first()) == (40, 40)
    assert fresh(session.range(3)).count() == 3
