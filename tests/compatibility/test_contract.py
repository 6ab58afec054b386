"""Members of one group that subscribe to different things, with the unmodified Java client: what
each contract makes of it, and what the real broker makes of it (seed 003, RMQ#2954)."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peer.clusters import Cluster
from peer.drivers import Driver, Event, java_driver
from peer.names import own
from peer.toolchain import HERE

from conftest import missing_tool_is_a_reason
from sluicemq.client.sync.admin import Admin
from sluicemq.model.topic import CONTRACT, GroupConfig

TAGS = ("tag1", "tag2", "tag3")
MEMBERS = ("tag1 || tag2", "tag3")


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with missing_tool_is_a_reason():
        made = java_driver(
            "client-5.3.3", tmp_path_factory.mktemp("contract"), source=HERE / "java/Contract.java"
        )
    yield made
    made.close()


class Story:
    """What came of one run."""

    def __init__(self, events: list[Event], count: int) -> None:
        self.got = Counter(event["body"] for event in events if event["event"] == "got")
        self.by_member = Counter(event["member"] for event in events if event["event"] == "got")
        self.refused = [event for event in events if event["event"] == "refused"]
        self.sent = {f"{TAGS[i % 3]}-{i}" for i in range(3 * count)}

    @property
    def lost(self) -> int:
        return len(self.sent - self.got.keys())

    @property
    def doubled(self) -> int:
        return sum(count - 1 for count in self.got.values())

    def line(self, name: str) -> str:
        return (
            f"{name:<24} sent {len(self.sent):4}  delivered {len(self.got):4}  lost {self.lost:4}"
            f"  doubled {self.doubled}  by member {dict(sorted(self.by_member.items()))}"
            f"  refused {len(self.refused)}"
        )


@pytest.fixture
def tell(java: Driver, cluster: Callable[[str], Cluster]) -> Callable[..., Story]:
    def told(kind: str, name: str, count: int, *, contract: str = "", **options: object) -> Story:
        running = cluster(kind)
        group, topic = own(f"G_{name}_{count}"), own(f"T_{name}_{count}")
        with Admin(running.name_server) as admin:
            admin.create_topic(topic, queues=4)
            if contract:
                admin.create_group(GroupConfig(group, attributes={f"+{CONTRACT}": contract}))
        events = java.call(
            "story",
            **{
                "ns": running.name_server, "group": group, "topic": topic,
                "members": "\n".join(MEMBERS), "tags": ",".join(TAGS), "count": count, **options,
            },
        )  # fmt: skip
        story = Story(events, count)
        print(story.line(f"{kind} {contract or 'default'}"))
        return story

    return told


@pytest.mark.parametrize(
    ("contract", "count"),
    [("lanes", 67), *(pytest.param(*it, marks=pytest.mark.thorough)
                      for it in [("lanes", 10), ("", 10), ("", 67)])],
)  # fmt: skip
def test_every_message_comes_once_whatever_the_members_want(
    tell: Callable[..., Story], contract: str, count: int
) -> None:
    story = tell("sluicemq", contract or "compatible", count, contract=contract)
    assert (story.lost, story.doubled) == (0, 0)
    assert story.by_member == {0: 2 * count, 1: count}


@pytest.mark.thorough
def test_a_strict_group_keeps_its_first_subscription(tell: Callable[..., Story]) -> None:
    story = tell("sluicemq", "strict", 10, contract="strict")
    assert story.doubled == 0
    assert story.by_member == {0: 20}, "the second member is refused, the first gets all it wants"


def test_a_strict_group_refuses_sql92_at_the_start_of_the_java_client(
    tell: Callable[..., Story],
) -> None:
    story = tell("sluicemq", "strictsql", 10, contract="strict", members="tag1 || tag2\nsql:n > 3")
    (refused,) = story.refused
    for part in (own("G_strictsql_10"), "strict", "tag1||tag2", "n > 3"):
        assert part in str(refused["error"])


@pytest.mark.thorough
def test_the_real_broker_loses_messages(tell: Callable[..., Story]) -> None:
    story = tell("rocketmq", "peer", 10)
    assert story.lost > 0


@pytest.mark.thorough
def test_java_keeps_the_contract_and_the_offsets_of_a_store(tmp_path: Path) -> None:
    from peer.stores import NORMAL, house

    with missing_tool_is_a_reason(), house(tmp_path, "5.3.3") as home:
        with home.sluice(NORMAL), Admin(home.name_server) as admin:
            admin.create_group(GroupConfig(own("G_kept"), attributes={f"+{CONTRACT}": "lanes"}))
        with home.java(NORMAL), Admin(home.name_server) as admin:
            assert admin.groups()[own("G_kept")].attributes == {CONTRACT: "lanes"}
            admin.create_group(GroupConfig(own("G_other")))  # so that it writes the file
        text = (home.store / "config/subscriptionGroup.json").read_text()
        assert f'"{CONTRACT}":"lanes"' in text.replace(" ", "")
        with home.sluice(NORMAL), Admin(home.name_server) as admin:
            assert admin.groups()[own("G_kept")].attributes == {CONTRACT: "lanes"}
