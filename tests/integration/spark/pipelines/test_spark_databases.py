"""Pipelines whose executors write to a PostgreSQL server; one reads a store directory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from sluicemq.client.sync.admin import Admin
from sluicemq.pipelines.dedup import write_table
from sluicemq.pipelines.file import Pipeline, parse_pipeline
from sluicemq.pipelines.plan import plan
from sluicemq.pipelines.run import run
from sluicemq.pipelines.sinks.databases import Written

pytestmark = pytest.mark.timeout(300)

COUNT = 60
FILE = """\
source:
  kind: store
  path: STORE
  topic: TOPIC
  brokerName: BROKER
  filter.sql: number >= 20
  columns: [queue_offset, body, store_time, "prop:number:int"]
transform: |
  select number % 20 as number, max_by(cast(body as string), number) as text,
         max(number) as version, max_by(store_time, number) as at
  from source where number < LIMIT group by number % 20
sinks:
  - {kind: table, url: "URL", table: latest, key: [number], version: version, batch_rows: 7}
"""


@pytest.fixture
def database(postgresql: sa.URL, topic: str) -> Iterator[sa.Engine]:
    """A schema of the test's own, first in the search path."""
    schema = topic.replace("-", "_")
    server = sa.create_engine(postgresql.set(drivername="postgresql+psycopg"))
    with server.begin() as connection:
        connection.execute(sa.schema.CreateSchema(schema))
    server.dispose()
    query = dict(postgresql.query) | {"options": f"-csearch_path={schema}"}
    engine = sa.create_engine(postgresql.set(drivername="postgresql+psycopg", query=query))
    yield engine
    engine.dispose()


def url_of(engine: sa.Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def rows(engine: sa.Engine, query: str) -> list[Any]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(query))]


def test_the_newest_row_of_a_key_remains_if_older_ones_are_read_again(
    spark: Any, admin: Admin, topic: str, publish: Callable[..., None], database: sa.Engine,
    store_directory: Path,
) -> None:  # fmt: skip
    """From the directory of a running broker; the second run brings older rows, the third none."""
    publish(0, COUNT)
    broker = admin.queues(topic)[0].broker
    names = {"STORE": str(store_directory), "TOPIC": topic, "BROKER": broker,
             "URL": url_of(database)}  # fmt: skip

    def pipeline(limit: int) -> Pipeline:
        text = FILE.replace("LIMIT", str(limit))
        for name, value in names.items():
            text = text.replace(name, value)
        made, problems = parse_pipeline(text, "latest.yaml", {})
        assert made is not None, problems
        return made

    told = plan(pipeline(COUNT), spark).describe()
    assert "it would be created" in told
    assert f"store {store_directory}" in told
    for limit in (COUNT, 40, 0):
        outcome = run(pipeline(limit), spark)
        assert outcome.rows == {"table-latest": 20 if limit else 0}
        found = rows(database, "select number, text, version from latest order by number")
        assert found == [(n, f"body-{n + 40}", n + 40) for n in range(20)]


def test_each_message_is_inserted_once(
    spark: Any, name_server: str, topic: str, publish: Callable[..., None], database: sa.Engine
) -> None:
    publish(0, COUNT)
    for expected in (Written(COUNT, COUNT), Written(COUNT, 0)):
        done = write_table(
            spark, {"nameServers": name_server}, topic=topic, table="orders", url=url_of(database),
            columns={"number": "cast(properties['number'] as int)", "raw": "body"},
        )  # fmt: skip
        assert done == expected
    found = rows(database, "select number, raw from orders order by number")
    assert [(number, bytes(raw)) for number, raw in found] == [
        (number, f"body-{number}".encode()) for number in range(COUNT)
    ]
