"""The unmodified mqadmin of rocketmq-tools 5.3.3 as an operator uses it, against our cluster.

All commands run in the JVM of the Java driver (a JVM a command would cost a second each). What is
checked is what the operator reads off: names, addresses, queue counts, offsets; the layout of its
tables is mqadmin's own affair.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from peer.clusters import Cluster
from peer.drivers import Driver

from thorough import ALL

KINDS = ["sluicemq", *(["rocketmq"] if ALL else [])]
COUNT = 30
TOPIC = "Tadmin"
GROUP = "Gadmin"


@dataclass
class Admin:
    """mqadmin and a cluster with the topic Tadmin (6 queues, 30 messages), group Gadmin."""

    driver: Driver
    cluster: Cluster

    def __call__(self, *words: str) -> str:
        (event,) = self.driver.call("admin", ns=self.cluster.name_server, words="\n".join(words))
        return str(event["text"])

    def rows(self, *words: str) -> list[list[str]]:
        """The words of each line that is not a heading."""
        return [
            line.split()
            for line in self(*words).splitlines()
            if line.strip() and not line.startswith("#")
        ]


@pytest.fixture(scope="module", params=KINDS)
def admin(
    request: pytest.FixtureRequest,
    cluster: Callable[[str], Cluster],
    driver: Callable[[str], Driver],
) -> Admin:
    found = Admin(driver("java-5.3.3"), cluster(request.param))
    made = found("updateTopic", "-b", found.cluster.broker, "-t", TOPIC, "-r", "6", "-w", "6")
    assert f"create topic to {found.cluster.broker} success." in made
    for _ in range(20):  # a broker registers a moment after it has answered
        if admin_knows(found, TOPIC):
            break
        time.sleep(0.25)
    where = {"ns": found.cluster.name_server, "topic": TOPIC}
    found.driver.call("send", count=COUNT, **where)
    found.driver.call("push", group=GROUP, expect=COUNT, **where)
    return found


def admin_knows(admin: Admin, topic: str) -> bool:
    return topic in admin("topicList").split()


def test_cluster_list_shows_the_broker(admin: Admin) -> None:
    (row,) = [row for row in admin.rows("clusterList") if admin.cluster.broker in row]
    assert row[2] == "0", "the broker id of a master"
    assert row[4].startswith("V"), f"a version in {row}"


def test_topic_list_has_the_topic_and_the_retry_topic_of_the_group(admin: Admin) -> None:
    topics = set(admin("topicList").split())
    assert {TOPIC, f"%RETRY%{GROUP}"} <= topics


def test_topic_route_has_the_queues_and_the_address(admin: Admin) -> None:
    route = admin("topicRoute", "-t", TOPIC)
    assert re.search(r'"readQueueNums":\s*6', route)
    assert re.search(r'"writeQueueNums":\s*6', route)
    assert admin.cluster.broker in route


def test_topic_status_has_an_offset_for_every_message(admin: Admin) -> None:
    rows = [
        row for row in admin.rows("topicStatus", "-t", TOPIC) if len(row) >= 4 and row[1].isdigit()
    ]
    assert sorted(int(row[1]) for row in rows) == list(range(6))
    assert sum(int(row[3]) - int(row[2]) for row in rows) == COUNT


def test_update_topic_changes_what_topic_route_shows(admin: Admin) -> None:
    admin("updateTopic", "-b", admin.cluster.broker, "-t", "Tgrows", "-r", "2", "-w", "2")
    admin("updateTopic", "-c", "DefaultCluster", "-t", "Tgrows", "-r", "9", "-w", "5")
    route = admin("topicRoute", "-t", "Tgrows")
    assert re.search(r'"readQueueNums":\s*9', route)
    assert re.search(r'"writeQueueNums":\s*5', route)


def test_consumer_progress_shows_a_group_that_is_up_to_date(admin: Admin) -> None:
    text = admin("consumerProgress", "-g", GROUP)
    rows = [row for row in (line.split() for line in text.splitlines()) if row and row[0] == TOPIC]
    assert sorted(int(row[2]) for row in rows) == list(range(6))
    assert sum(int(row[4]) for row in rows) == COUNT, "consumer offsets"
    assert [row[3] for row in rows] == [row[4] for row in rows], (
        "broker and consumer offsets are equal"
    )


def test_broker_status_counts_the_messages(admin: Admin) -> None:
    status = {
        key.strip(): value.strip()
        for key, colon, value in (
            line.partition(":")
            for line in admin("brokerStatus", "-b", admin.cluster.broker).splitlines()
        )
        if colon
    }
    assert int(status["msgPutTotalTodayNow"]) >= COUNT
    assert "brokerVersionDesc" in status
    assert int(status["commitLogMaxOffset"]) > 0


@pytest.mark.parametrize(
    "command", ["cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"]
)
def test_clean_up_can_be_asked_for(admin: Admin, command: str) -> None:
    (row,) = [row for row in admin.rows("clusterList") if admin.cluster.broker in row]
    assert "success" in admin(command, "-b", row[3])
    assert "success" in admin(command, "-c", "DefaultCluster")
    rows = [row for row in admin.rows("topicStatus", "-t", TOPIC) if row[1].isdigit()]
    assert sum(int(row[3]) - int(row[2]) for row in rows) == COUNT, "what is used stays"


def test_a_message_is_found_by_its_key_its_unique_key_and_its_id(admin: Admin) -> None:
    (row,) = admin.rows("queryMsgByKey", "-t", TOPIC, "-k", "k-7")
    unique_key, *place = row
    found = fields_of(admin("queryMsgByUniqueKey", "-t", TOPIC, "-i", unique_key))
    assert found["Keys"] == "[k-7]"
    assert [found["Queue ID"], found["Queue Offset"]] == place
    host, port = found["Store Host"].split(":")
    packed = bytes(map(int, host.split("."))) + int(port).to_bytes(4)
    identity = (packed + int(found["CommitLog Offset"]).to_bytes(8)).hex().upper()
    viewed = fields_of(admin("queryMsgById", "-t", TOPIC, "-i", identity))
    assert (viewed["OffsetID"], viewed["Keys"]) == (identity, "[k-7]")


def test_a_key_that_no_message_has_finds_none(admin: Admin) -> None:
    assert "no message" in admin("queryMsgByKey", "-t", TOPIC, "-k", "k-none")


def fields_of(text: str) -> dict[str, str]:
    """`Name:    value` lines."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def test_a_topic_that_is_not_there_is_named_in_the_error(admin: Admin) -> None:
    assert "Tnowhere" in admin("topicRoute", "-t", "Tnowhere")
