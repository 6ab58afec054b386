"""The pipeline `audit` on a cluster that has all kinds of findings."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluicemq.client.core.consuming import SubscriptionRegistry
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import PushConsumer
from sluicemq.model.message import Message
from sluicemq.pipelines.ready import Report, Task, find_ready_pipeline
from waiting import wait_for

TOPIC = "audited"
TAGS = ("A", "B", "Aa", "BB", "Z")
COUNT = 50


@pytest.fixture(scope="module")
def audited(
    spark: Any, name_server: str, admin: Admin, producer: Producer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Report, dict[str, Any], list[str]]]:  # fmt: skip
    """Ten messages of each tag (Aa and BB share a hash). Group `unequal` has a member for A and one
    for B, `dear` wants `price > 30` OR TAGS = 'BB', and three prices are no numbers; `gone` was
    there for everything of another topic."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "add_user",
            "remove_user",
        ):  # one process refuses it; two would not know of each other
            patch.setattr(SubscriptionRegistry, name, lambda *_, **__: None)
        admin.create_topic(TOPIC, queues=2)
        publish(producer)
        consumers = [
            PushConsumer(name_server, "unequal", lambda message: None).subscribe(TOPIC, tags="A"),
            PushConsumer(name_server, "unequal", lambda message: None).subscribe(TOPIC, tags="B"),
            PushConsumer(name_server, "dear", lambda message: None).subscribe(
                TOPIC, where="price > 30 OR TAGS = 'BB'"
            ),
        ]
        for consumer in consumers:
            consumer.start()
        try:
            wait_for(lambda: len(admin.members("unequal")) == 2 and admin.members("dear"))
            wait_for(lambda: {one.queue.topic for one in admin.lag("unequal")} >= {TOPIC})
            yield run(spark, name_server, tmp_path_factory.mktemp("audit") / "found.json")
        finally:
            for consumer in consumers:
                consumer.close()


def publish(producer: Producer) -> None:
    queues = producer.write_queues(TOPIC)
    for number in range(COUNT):
        price = "dear" if number < 3 else str(number)
        message = Message(TOPIC, b"x", tag=TAGS[number % 5], properties={"price": price})
        producer.send(message, queue=queues[number % 2])


def run(spark: Any, name_server: str, output: Path) -> tuple[Report, dict[str, Any], list[str]]:
    pipeline = find_ready_pipeline("audit")
    options = {field.name: field.default for field in pipeline.fields}
    options |= {"topics": [TOPIC], "groups": ["unequal", "dear"], "output": str(output)}
    lines: list[str] = []
    task = Task(spark, options, {"nameServers": name_server}, say=lines.append)
    assert "2 groups" in pipeline.plan(task)[0]
    report = pipeline.run(task)
    return report, json.loads(output.read_text()), lines


def test_unequal_members_are_reported_with_the_loss_that_lanes_prevent(audited: Any) -> None:
    report, found, lines = audited
    (loss,) = found["unequal"]
    assert (loss["group"], sorted(loss["members"].values())) == ("unequal", ["A", "B"])
    assert (loss["wanted"], loss["certain"]) == (20, 0)
    assert (loss["lost_min"], loss["lost_max"]) == (15, 15)
    assert loss["has_lanes"]
    assert (report.figures["unequal_groups"], report.figures["groups_with_lanes"]) == (0, 1)
    assert any("0 (lanes)" in line for line in lines)


def test_tags_that_any_expression_matches_are_not_unwanted(audited: Any) -> None:
    """`dear` matches Z and Aa with a price above 30, so every tag is matched by some expression."""
    _, found, _ = audited
    assert found["unwanted_tags"] == []


def test_tags_with_the_same_hash_are_found(audited: Any) -> None:
    (pair,) = audited[1]["collisions"]
    assert (pair["tags"], pair["code"], pair["messages"]) == (["Aa", "BB"], 2112, 20)


def test_a_filter_that_fails_on_messages_is_found(audited: Any) -> None:
    (one,) = audited[1]["failing"]
    assert (one["expression"], one["of"]) == ("price > 30 OR TAGS = 'BB'", COUNT)
    assert (one["messages"], one["groups"]) == (3, ["dear"])


def test_figures_count_the_findings(audited: Any) -> None:
    report, found, _ = audited
    assert report.figures == found["figures"]
    assert report.figures["findings"] == 2, "a collision and a failing filter"
    assert report.figures["messages"] == COUNT
    assert report.figures["groups"] == 2


def test_tags_that_no_group_matches_are_found(
    spark: Any, name_server: str, admin: Admin, producer: Producer
) -> None:
    from sluicemq.pipelines.audit import audit

    admin.create_topic("audited-tags", queues=1)
    with PushConsumer(name_server, "tags-of-one", lambda message: None).subscribe(
        "audited-tags", tags="A"
    ):
        for number in range(9):
            producer.send(Message("audited-tags", b"x", tag="AXY"[number % 3]))
        wait_for(lambda: admin.members("tags-of-one"))
        found = audit(spark, {"nameServers": name_server}, topics=["audited-tags"])
    assert [(one.tag, one.messages) for one in found.unwanted_tags] == [("X", 3), ("Y", 3)]
