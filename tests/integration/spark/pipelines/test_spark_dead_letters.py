"""The ready pipeline `dead-letters`: causes, edits, the group's present filter, a replay with a
report that a kill does not repeat."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sluicemq.client.admin.dead_letters import DeadLetterEdit, prepare_replay
from sluicemq.client.core import requests
from sluicemq.client.core.requests import expect_success
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.errors import ConfigurationError, RouteNotFoundError
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.message import Message
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.pipelines.deadletters import dead_letters, read_report
from sluicemq.wire.bodies import ConsumerData, Heartbeat

pytestmark = pytest.mark.timeout(300)

GROUPS = count(1)
LETTERS = 24
EDITS = {
    "body": "replace(text, 'NaN', 'null')",
    "tags": "if(keys = 'o13', 'A|B', tags)",
    "properties.fixed": "concat('yes-', keys)",
    "properties.region": "null",
}


@pytest.fixture
def group(admin: Admin, producer: Producer, topic: str) -> Iterator[str]:
    """A group that gave up on every message of the topic, and wants `amount > 10` of it now.

    Every third body is no JSON, all those of the region eu; every fifth message says an error.
    """
    name = f"spark-dead-{next(GROUPS)}"
    admin.create_group(GroupConfig(name))
    queue = MessageQueue(topic, next(iter(admin.masters())), 0)
    producer.send_batch([letter(topic, index) for index in range(LETTERS)], queue=queue)
    address = admin.address(queue)
    for offset in range(LETTERS):
        (stored,) = admin.messages_by_key(topic, f"o{offset}")
        expect_success(admin.call(address, requests.send_back(name, stored, topic, -1, 16)))
    wanted = ConsumerData(name, subscriptions=(parse_subscription(topic, "amount > 10", "SQL92"),))
    admin.call(address, requests.heartbeat(Heartbeat(f"client-{name}", consumers=(wanted,))))
    yield name
    admin.call(address, requests.unregister(f"client-{name}", consumer=name))


def letter(topic: str, index: int) -> Message:
    bad = index % 3 == 0
    properties = {"amount": str(index), "region": "eu" if bad else "us"}
    if index % 5 == 0:
        properties["exception"] = f"TimeoutError: no answer within {index} ms"
    body = b'{"amount": NaN}' if bad else b'{"amount": 1}'
    return Message(topic, body, tag="A", keys=(f"o{index}",), properties=properties)


def test_causes_and_the_results_of_edits_are_shown(
    spark: Any, name_server: str, topic: str, group: str
) -> None:
    said: list[str] = []
    connection = {"nameServers": name_server}
    report = dead_letters(spark, connection, group=group, edit=EDITS, say=said.append)
    assert report.figures == {"letters": 24, "filtered": 11, "invalid": 1, "matches": 12}
    text = "\n".join(said)
    assert "exception: TimeoutError: no answer within # ms" in text
    assert (
        f"{topic}, the body is not JSON: region = 'eu' in 100%, 33% of the topic's newest" in text
    )
    assert (
        "filtered: The filter amount > 10 is false for the message: amount > 10 is false (amount is"
        in text
    )
    assert "invalid: the tag 'A|B' contains '|'" in text
    for wrong, why in (
        ({"edit": {"headers": "1"}}, "'headers' cannot be edited"),
        ({"action": "replay"}, "'state' is missing"),
        ({"filter_sql": "a = 1", "filter_tags": "A"}, "given together"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            dead_letters(spark, connection, group=group, **{"action": "check", **wrong}, say=str)
    with pytest.raises(RouteNotFoundError, match="'nobody' has no dead letters"):
        dead_letters(spark, connection, group="nobody")


@pytest.mark.thorough
def test_a_replay_sends_and_reports_each_edited_dead_letter_once(
    spark: Any, read: Any, admin: Admin, name_server: str, topic: str, group: str, tmp_path: Path
) -> None:
    """Killed between sending a step and noting it; the filter changes meanwhile, the plan not."""
    state = str(tmp_path / "job")
    connection = {"nameServers": name_server}
    options: dict[str, Any] = {
        "group": group, "action": "replay", "edit": EDITS, "state": state, "step": 8, "say": str,
    }  # fmt: skip
    asked = iter([False, False, True])
    dead_letters(spark, connection, **options, stopping=lambda: next(asked))
    job = tmp_path / "job" / "job.json"
    kept = json.loads(job.read_text())
    assert kept["steps"] == 2
    job.with_name(".job.json.crc").unlink(missing_ok=True)
    job.write_text(json.dumps(kept | {"steps": 1}))
    report = dead_letters(spark, connection, **options)
    assert {name: report.figures[name] for name in ("sent", "filtered", "invalid")} == {
        "sent": 12, "filtered": 11, "invalid": 1,
    }  # fmt: skip
    lines = {row.origin.queue_offset: row for row in read_report(spark, state).collect()}
    assert [lines[offset].verdict for offset in (0, 10, 11, 13, 23)] == [
        "filtered", "filtered", "sent", "invalid", "sent",
    ]  # fmt: skip
    assert "amount is '7', a String" in lines[7].error
    letters = admin.dead_letters(group).messages
    by_console = {prepare_replay(one, DeadLetterEdit(), group).message_id for one in letters}
    assert {line.new_id for line in lines.values() if line.new_id} < by_console
    again = read(columns="msg_id,keys,tags,properties,body").where("properties['fixed'] <> ''")
    found = {row.keys: row for row in again.collect()}
    assert len(found) == again.count() == 12
    assert found["o12"].properties["fixed"] == "yes-o12"
    assert "region" not in found["o12"].properties
    assert bytes(found["o12"].body) == b'{"amount": null}'
    assert found["o12"].msg_id == lines[12].new_id
    assert lines[12].id != lines[12].new_id
    done = dead_letters(spark, connection, **options)
    assert done.lines[-1].startswith("12 sent, 11 filtered, 1 invalid")
    assert again.count() == 12


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_dead_letter_is_sent_to_the_retry_topic_of_its_group(
    spark: Any, name_server: str, topic: str, group: str, tmp_path: Path, delivery: str
) -> None:
    """By the retry topic, as the group's consumers expect it there."""
    connection = {"nameServers": name_server}
    report = dead_letters(
        spark, connection, group=group, action="replay", to="retry", where="keys = 'o20'",
        state=str(tmp_path / "job"), delivery=delivery, report="parquet", say=str,
    )  # fmt: skip
    assert report.figures["sent"] == 1
    (line,) = read_report(spark, str(tmp_path / "job")).collect()
    source = spark.read.format("rocketmq").options(**connection, properties="all")
    (row,) = source.option("topic", f"%RETRY%{group}").load().collect()
    assert (row.msg_id, row.properties["RETRY_TOPIC"]) == (line.new_id, topic)
    assert (row.keys, row.properties["amount"]) == ("o20", "20")
