"""`rocketmq_store` through Spark: found by name, equal to `rocketmq` on the same running broker."""

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from sluicemq.client.sync.admin import Admin
from sluicemq.spark.references import load_where
from sluicemq.spark.report import pushdown

pytestmark = pytest.mark.timeout(300)

GOLDEN = Path(__file__).parents[2] / "golden" / "store" / "golden1.tar.gz"


@pytest.fixture
def read_store(spark: Any, admin: Admin, topic: str, store_directory: Path) -> Callable[..., Any]:
    """A DataFrame of the topic out of the running broker's directory."""

    def load(**options: str) -> Any:
        given = {"topic": topic, "brokerName": admin.queues(topic)[0].broker}
        given |= {name.replace("__", "."): value for name, value in options.items()}
        return spark.read.format("rocketmq_store").options(**given).load(str(store_directory))

    return load


def rows(frame: Any) -> list[Any]:
    return sorted(map(tuple, frame.drop("properties").collect()), key=lambda row: (row[2], row[3]))


def test_rows_are_those_of_the_broker(
    read: Callable[..., Any], read_store: Callable[..., Any], publish: Callable[..., None]
) -> None:
    publish(0, 200)  # the broker has not written its queue files yet
    assert rows(read_store()) == rows(read())
    assert read_store().schema == read().schema
    options = {"columns": "queue_id,body,queue_offset,tags,prop:delay:int", "minPartitions": "5"}
    assert rows(read_store(**options)) == rows(read(**options))
    for given in ({"filter__tags": "A||C"}, {"filter__sql": "delay > 0 AND origin <> 'LGA'"}):
        found = rows(read_store(**given))
        assert found == rows(read(**given))
        assert 0 < len(found) < 200


def test_predicates_are_handed_to_the_reader(
    spark: Any, read: Callable[..., Any], read_store: Callable[..., Any],
    publish: Callable[..., None], store_directory: Path, topic: str,
) -> None:  # fmt: skip
    publish(0, 100)
    columns = "body,tags,queue_id,queue_offset,prop:delay:int,prop:origin"
    where = "delay > 5 and tags in ('A', 'B') and origin = 'JFK' and queue_offset >= 10"
    options = {"path": str(store_directory), "topic": topic, "columns": columns}
    frame = load_where(spark, where, format="rocketmq_store", **options)
    assert rows(frame) == rows(read(columns=columns).where(where))
    assert rows(frame) == rows(read_store(columns=columns).where(where))
    assert frame.count() > 0
    assert "GreaterThan(delay, 5)" in pushdown(frame).broker


def test_snapshot_of_a_java_broker_is_read(spark: Any, tmp_path: Path) -> None:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "golden1" / "store"
    reader = spark.read.format("rocketmq_store").option("topicsPattern", ".*")
    frame = reader.load(str(root))
    assert frame.count() == frame.dropDuplicates(["topic", "queue_id", "queue_offset"]).count() > 9
    tag = frame.where("tags is not null").first()
    assert frame.where(f"tags = '{tag.tags}' and topic = '{tag.topic}'").count() > 0
    shutil.rmtree(root / "commitlog")
    with pytest.raises(PySparkException, match="contains no commit log"):
        reader.load(str(root)).count()


def test_errors_stand_in_the_first_lines(
    spark: Any, read_store: Callable[..., Any], topic: str, publish: Callable[..., None],
    store_directory: Path,
) -> None:  # fmt: skip
    publish(0, 2)
    near = topic[:-1] + "x" if topic[-1] != "x" else topic + "y"
    with pytest.raises(PySparkException) as caught:
        read_store(topic=near).count()
    assert f"no topic '{near}'. Did you mean 'spark-test-" in str(caught.value)[:400]
    with pytest.raises(PySparkException) as caught:
        read_store(startingOffset="earliest")
    assert "Did you mean 'startingOffsets'?" in str(caught.value)[:400]
    stream = spark.readStream.format("rocketmq_store").option("topic", topic)
    with pytest.raises(PySparkException, match=r'readStream.format\("rocketmq"\)'):
        stream.load(str(store_directory)).writeStream.format("noop").start().awaitTermination(60)
