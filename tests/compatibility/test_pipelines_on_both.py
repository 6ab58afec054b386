"""The ready pipelines audit, trace, dedup and dead letters on our broker and on the real RocketMQ
5.3.3: the same findings, and what a Java broker cannot say is said to be unknown."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peer import clusters

from sluicemq.client.core import requests
from sluicemq.client.core.consuming import SubscriptionRegistry
from sluicemq.client.core.requests import expect_success
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import PushConsumer
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.message import Message
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.pipelines.audit import audit
from sluicemq.pipelines.deadletters import dead_letters, read_report
from sluicemq.pipelines.dedup import write_table
from sluicemq.pipelines.sinks.databases import Written
from sluicemq.pipelines.trace import trace
from sluicemq.wire.bodies import ConsumerData, Heartbeat
from waiting import wait_for

# py4j leaves sockets to the garbage collector: no fault of the test that it runs in.
pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]

TOPIC, TRACES = "pipelines-on-both", "pipelines-traces"
DEAD = "pipelines-dead"
TAGS = ("A", "B", "Z")
COUNT = 30


@pytest.fixture(scope="module", params=["sluicemq", "rocketmq"])
def busy(request: pytest.FixtureRequest, cluster: Any) -> Iterator[clusters.Cluster]:
    """Two members of one group that want A and B, traced like their producer."""
    running: clusters.Cluster = cluster(request.param)
    server = running.name_server
    with pytest.MonkeyPatch.context() as patch:
        # One process refuses it; two would not know of each other.
        for name in ("add_user", "remove_user"):
            patch.setattr(SubscriptionRegistry, name, lambda *_, **__: None)
        with Admin(server) as admin, Producer(server, trace=TRACES) as producer:
            for topic in (TOPIC, TRACES):
                admin.create_topic(topic, queues=2)
            members = [
                PushConsumer(server, "unequal", lambda message: None, trace=TRACES).subscribe(
                    TOPIC, tags=tag
                )
                for tag in "AB"
            ]
            for member in members:
                member.start()
            try:
                wait_for(lambda: len(admin.members("unequal")) == 2)
                for number in range(COUNT):
                    producer.send(Message(TOPIC, f"{number}".encode(), tag=TAGS[number % 3]))
                wait_for(lambda: stored(admin, TOPIC) == COUNT and stored(admin, TRACES) > 1)
                yield running
            finally:
                for member in members:
                    member.close()


def stored(admin: Admin, topic: str) -> int:
    return sum(admin.offset_max(queue) for queue in admin.queues(topic))


@pytest.mark.thorough
def test_audit_finds_the_same(spark: Any, busy: clusters.Cluster) -> None:
    found = audit(spark, {"nameServers": busy.name_server}, topics=[TOPIC], groups=["unequal"])
    (loss,) = found.unequal
    assert sorted(loss.members.values()) == ["A", "B"]
    assert (loss.wanted, loss.lost_min, loss.lost_max) == (20, 15, 15)
    assert loss.has_lanes is (busy.kind == "sluicemq")
    assert [(one.tag, one.messages) for one in found.unwanted_tags] == [("Z", 10)]
    assert not any("no answer" in line for line in found.not_known)


@pytest.mark.thorough
def test_dedup_writes_each_message_once(spark: Any, busy: clusters.Cluster, tmp_path: Path) -> None:
    for expected in (Written(COUNT, COUNT), Written(COUNT, 0)):
        done = write_table(
            spark, {"nameServers": busy.name_server}, topic=TOPIC, table="rows",
            url=f"sqlite:///{tmp_path / 'rows.db'}", columns={"body": "cast(body as string)"},
        )  # fmt: skip
        assert done == expected
    with sqlite3.connect(tmp_path / "rows.db") as connection:
        found = sorted(int(row[0]) for row in connection.execute("select body from rows"))
    assert found == list(range(COUNT))


@pytest.mark.thorough
def test_traces_are_read_from_it(spark: Any, busy: clusters.Cluster, tmp_path: Path) -> None:
    tables = trace(
        spark, {"nameServers": busy.name_server}, output=str(tmp_path / "trace"), topic=TRACES,
        settle_s=0,
    )  # fmt: skip
    sends = tables.sends.where(f"topic = '{TOPIC}' and stored")
    assert 0 < sends.count() <= COUNT
    assert tables.events.where("kind = 'Unread'").count() == 0


@pytest.fixture
def given_up(busy: clusters.Cluster) -> Iterator[str]:
    """A group that gave up on six messages, and wants those with the tag A now."""
    name = "given-up"
    with Admin(busy.name_server) as admin, Producer(busy.name_server) as producer:
        admin.create_topic(DEAD, queues=1)
        admin.create_group(GroupConfig(name))
        queue = MessageQueue(DEAD, next(iter(admin.masters())), 0)
        address = admin.address(queue)
        for number in range(6):
            key = f"k{number}"
            producer.send(Message(DEAD, b"{", tag=TAGS[number % 3], keys=(key,)), queue=queue)
            wait_for(lambda: admin.messages_by_key(DEAD, key))  # noqa: B023 - called at once
            found = admin.messages_by_key(DEAD, key)[0]
            expect_success(admin.call(address, requests.send_back(name, found, DEAD, -1, 16)))
        wanted = ConsumerData(name, subscriptions=(parse_subscription(DEAD, "A"),))
        admin.call(address, requests.heartbeat(Heartbeat("given-up@1", consumers=(wanted,))))
        yield name


@pytest.mark.thorough
def test_dead_letters_are_judged_and_sent_again(
    spark: Any, busy: clusters.Cluster, given_up: str, tmp_path: Path
) -> None:
    connection, state = {"nameServers": busy.name_server}, str(tmp_path / "replay")
    report = dead_letters(spark, connection, group=given_up, action="check", say=str)
    assert report.figures == {"letters": 6, "filtered": 4, "matches": 2}
    options: dict[str, Any] = {"group": given_up, "action": "replay", "state": state, "say": str}
    options |= {"delivery": "at-least-once", "edit": {"body": "'{}'"}}
    for _ in range(2):  # the second time there is nothing left to do
        report = dead_letters(spark, connection, **options)
        assert report.figures["sent"] == 2
        with Admin(busy.name_server) as admin:
            assert stored(admin, DEAD) == 8
    lines = read_report(spark, state).collect()
    assert sorted(line.verdict for line in lines) == ["filtered"] * 4 + ["sent"] * 2
