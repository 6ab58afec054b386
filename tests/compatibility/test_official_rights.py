"""The official gRPC clients before our proxy with access control: who signs may do what the rules
say, others nothing.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from peer import drivers, official
from peer.clusters import Cluster, sluice_cluster
from peer.names import own
from peer.official import named, texts

from conftest import missing_tool_is_a_reason
from sluicemq.client.sync.admin import Admin

RULES = """\
accounts:
- accessKey: RocketMQ
  secretKey: 12345678
  defaultTopicPerm: PUB|SUB
  defaultGroupPerm: SUB
  topicPerms:
  - closed=DENY
- accessKey: rocketmq2
  secretKey: 12345678
  admin: true
"""
ADMIN = ("rocketmq2", "12345678")
RIGHT = {"ak": "RocketMQ", "sk": "12345678"}
CLIENTS = dict.fromkeys(client for client, _ in official.PAIRS)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "plain_acl.yml").write_text(RULES)
    with contextlib.ExitStack() as stack:
        with missing_tool_is_a_reason():
            cluster = sluice_cluster(directory, proxy=True, aclEnable="true")
            found = stack.enter_context(cluster)
        with Admin(found.name_server, credentials=ADMIN) as admin:
            admin.create_topic("closed", queues=4)
            admin.create_topic("open", queues=4)
        yield found


@pytest.mark.parametrize("client", CLIENTS)
def test_who_signs_sends_and_consumes(
    guarded: Cluster, driver: Callable[[str], drivers.Driver], client: str
) -> None:
    running = driver(f"official-{client}")
    topic, group = own(f"T_rights_{client}"), own(f"G_rights_{client}")
    with Admin(guarded.name_server, credentials=ADMIN) as admin:
        admin.create_topic(topic, queues=4)
    options: dict[str, object] = {"ep": guarded.endpoint, "topic": topic, **RIGHT}
    assert len(named(running.call("send", count=3, **options), "sent")) == 3
    running.call("open", name="r", group=group, **options)
    got: set[str] = set()
    while got != set(texts(3)):
        fresh = {event["body"] for event in running.call("receive", name="r")}
        assert fresh, f"of three messages only {got} came"
        running.call("ack", name="r", bodies=",".join(fresh))
        got |= fresh
    running.call("close", name="r")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("keys", "topic"),
    [({**RIGHT, "sk": "12345679"}, "open"), ({}, "open"), (RIGHT, "closed")],
    ids=["wrong-key", "no-key", "closed-topic"],
)
def test_who_may_not_send_is_refused(
    guarded: Cluster,
    driver: Callable[[str], drivers.Driver],
    client: str,
    keys: dict[str, str],
    topic: str,
) -> None:
    running = driver(f"official-{client}")
    with pytest.raises(drivers.DriverFailedError) as caught:
        running.call("send", count=1, ep=guarded.endpoint, topic=topic, **keys)
    if topic == "closed":
        assert "No permission for topic:closed" in str(caught.value)
