"""Stores that the real broker wrote, read by the data source `rocketmq_store` (without Spark).

The other reading of the same messages is the scalar codec over the log's records.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluicemq.model.message import TAGS, StoredMessage
from sluicemq.record.codec import decode_record
from sluicemq.spark.source import StoreSource
from sluicemq.store.readonly import StoreReader

STORES = Path(__file__).parent / "store"
ARCHIVES = {
    "golden1": "golden1.tar.gz", "golden2": "golden2.tar.gz", "golden3": "golden3_trans.tar.gz",
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(ARCHIVES))
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden")
    with tarfile.open(STORES / ARCHIVES[request.param]) as archive:
        archive.extractall(directory, filter="data")
    return directory / request.param / "store"


def read(root: Path, topic: str, **options: str) -> list[dict[str, Any]]:
    given = {name.replace("__", "."): value for name, value in options.items()}
    source = StoreSource({"path": str(root), "topic": topic} | given)
    reader = source.reader(source.schema())
    return [
        row
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]


def stored(root: Path) -> Iterator[tuple[str, StoredMessage]]:
    """(topic, message) for every unit of every queue."""
    reader = StoreReader.open(str(root))
    for topic, queue_id in reader.queues():
        low, high = reader.queue_offsets(topic, queue_id)
        for offset in range(low, high):
            unit = reader.units(topic, queue_id, offset, 1)
            record = reader.record_at(int.from_bytes(unit[:8], "big"))
            if record is not None:
                yield topic, decode_record(record)
    reader.close()


def test_every_message_of_every_topic_is_read(golden: Path) -> None:
    expected: dict[str, list[tuple[Any, ...]]] = {}
    for topic, message in stored(golden):
        expected.setdefault(topic, []).append(
            (message.queue_id, message.queue_offset, message.body, dict(message.properties))
        )
    assert len(expected) > 1
    before = {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()}
    for topic, messages in expected.items():
        rows = [
            (row["queue_id"], row["queue_offset"], row["body"], dict(row["properties"]))
            for row in read(golden, topic, properties="all")
        ]
        assert rows == messages, topic
    assert before == {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()}


def test_tags_choose_what_their_texts_say(golden: Path) -> None:
    """Also in `golden2`, whose queues hold addresses of their extension instead of codes."""
    tags = {
        (topic, tag)
        for topic, message in stored(golden)
        if (tag := message.properties.get(TAGS)) and "|" not in tag
    }
    for topic, tag in sorted(tags):
        expected = [
            message.body
            for name, message in stored(golden)
            if (name, message.properties.get(TAGS)) == (topic, tag)
        ]
        assert [row["body"] for row in read(golden, topic, filter__tags=tag)] == expected
        selector = "TAGS = '{}'".format(tag.replace("'", "''"))
        assert [row["body"] for row in read(golden, topic, filter__sql=selector)] == expected
