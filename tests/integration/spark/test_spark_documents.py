"""The Python examples of the pages about Spark run, page by page in their order."""

from pathlib import Path
from typing import Any

import pytest

from fences import ROOT, Fence, execute, python_pages
from sluicemq import Message
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer

pytestmark = [pytest.mark.spark, pytest.mark.slow]

NAME_SERVER = "127.0.0.1:9876"
PAGES = [page for page in python_pages(of_spark=True) if page[0].document.parent != ROOT]
"""But README and its translation: tests/house/test_readme.py runs them."""


@pytest.fixture(scope="module")
def flights(name_server: str, admin: Admin, producer: Producer) -> None:
    """Topics with a few messages each, and a group with a dead letter."""
    for topic in ("flights", "orders", "report", "copy", "late-report", "%DLQ%billing"):
        admin.create_topic(topic, queues=2)
    for number, delay in enumerate(["2", "101", "853", "-4"]):
        producer.send(
            Message(
                "flights",
                f"flight {number}".encode(),
                tag="UA",
                keys=(f"N{number}",),
                properties={"origin": "JFK", "dep_delay": delay},
            )
        )
    producer.send(Message("%DLQ%billing", b"order 1"))


@pytest.fixture(scope="module")
def query(spark: Any, name_server: str, flights: None, tmp_path_factory: Any) -> Any:
    """A stream that has had a micro-batch."""
    source = spark.readStream.format("rocketmq").options(nameServers=name_server, topic="flights")
    sink = source.load().writeStream.format("noop").trigger(availableNow=True)
    query = sink.option("checkpointLocation", str(tmp_path_factory.mktemp("query"))).start()
    assert query.awaitTermination(60)
    return query


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page[0].document.relative_to(ROOT)))
def test_the_examples_of_a_page_about_spark_run(
    page: list[Fence],
    spark: Any,
    name_server: str,
    flights: None,
    query: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    replaced = {
        NAME_SERVER: name_server,
        '"/data/': f'"{tmp_path}/',
        '"out/': f'"{tmp_path}/out/',  # Java does not know of the folder that the test is in
    }
    Path("out").mkdir()
    scope = stand_ins(spark, name_server) | {"query": query}
    for block in page:
        execute(block, scope, replaced)
    for running in spark.streams.active:
        running.stop()


def stand_ins(spark: Any, name_server: str) -> dict[str, Any]:
    """What pages leave to the reader: a session, and frames."""
    from pyspark.sql import datasource

    source = spark.read.format("rocketmq").options(nameServers=name_server, topic="flights")
    archive = source.load()
    archive.createOrReplaceTempView("flights")
    return {
        **vars(datasource),
        "spark": spark,
        "archive": archive,
        "df": spark.createDataFrame([("UA", "N1")], "carrier string, tailnum string"),
    }
