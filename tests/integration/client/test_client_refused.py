"""Consumers that access control refuses: an error of `start()`, in every form of the client, as for
bad SQL and an unknown group; and rights that are taken away and given back while they run."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq import PermissionDeniedError, Sluice, rocketmq
from sluicemq.acl import verdict
from sluicemq.client import threaded
from sluicemq.client.sync.admin import Admin
from sluicemq.model.topic import GroupConfig
from sluicemq.wire.codes import RequestCode
from waiting import until

ACCOUNT = ("reader12", "secret-of-reader")
OPERATOR = ("operator", "secret-of-operator")
RULES = """\
accounts:
- accessKey: reader12
  secretKey: secret-of-reader
  defaultTopicPerm: DENY
  defaultGroupPerm: DENY
  topicPerms: [T=SUB]
  groupPerms: [good=SUB, other=SUB]
- accessKey: operator
  secretKey: secret-of-operator
  admin: true
"""
Keys = tuple[str, str] | None


class Guarded:
    """A broker with access control, the topic T, and its rules."""

    def __init__(self, cluster: Any, directory: Path) -> None:
        self.rules = directory / "plain_acl.yml"
        self.rules.write_text(RULES)
        self.broker = cluster.start_broker(
            aclEnable="true", plainAclFile=str(self.rules), metricsExporterType="DISABLE"
        )
        self.address = cluster.addresses[0]
        with Admin(self.address, credentials=OPERATOR) as admin:
            admin.create_topic("T", queues=1)
            admin.create_topic("Secret", queues=1)

    @property
    def groups(self) -> dict[str, GroupConfig]:
        return self.broker.core.groups.table

    def members(self, group: str) -> int:
        found = self.broker.core.consumers.groups.get(group)
        return 0 if found is None else len(found.members)

    async def change(self, old: str, new: str) -> None:
        """Edit the rules and wait until they are in force."""
        loads = self.broker.core.guard.load_count
        self.rules.write_text(self.rules.read_text().replace(old, new))
        await until(lambda: self.broker.core.guard.load_count > loads)


@pytest.fixture
def guarded(empty_cluster: Any, tmp_path: Path) -> Guarded:
    return Guarded(empty_cluster, tmp_path)


# ----------------------------------------------------------------------- the forms of a consumer


def ignore(_message: Any) -> None:
    pass


def by_push(address: str, group: str, topic: str, keys: Keys) -> None:
    async def use() -> None:
        async with Sluice(address, credentials=keys) as mq:
            await mq.consumer(group, ignore).subscribe(topic).start()

    asyncio.run(use())


def by_ordered_push(address: str, group: str, topic: str, keys: Keys) -> None:
    async def use() -> None:
        async with Sluice(address, credentials=keys) as mq:
            await mq.consumer(group, ignore, ordered=True).subscribe(topic, tags="A").start()

    asyncio.run(use())


def by_sql(address: str, group: str, topic: str, keys: Keys) -> None:
    async def use() -> None:
        async with Sluice(address, credentials=keys) as mq:
            await mq.consumer(group, ignore).subscribe(topic, where="a > 1").start()

    asyncio.run(use())


def by_stream(address: str, group: str, topic: str, keys: Keys) -> None:
    async def use() -> None:
        async with Sluice(address, credentials=keys) as mq:
            await mq.subscribe(topic, group=group).start()

    asyncio.run(use())


def by_lite_pull(address: str, group: str, topic: str, keys: Keys) -> None:
    async def use() -> None:
        async with Sluice(address, credentials=keys) as mq:
            await mq.lite_pull(group).subscribe(topic)

    asyncio.run(use())


def by_threads(address: str, group: str, topic: str, keys: Keys) -> None:
    with threaded.PushConsumer(address, group, ignore, credentials=keys).subscribe(topic):
        pass


def by_blocking_stream(address: str, group: str, topic: str, keys: Keys) -> None:
    with threaded.Consumer(address, topic, group=group, credentials=keys) as consumer:
        consumer.receive(timeout_s=0.01)


def by_names(address: str, group: str, topic: str, keys: Keys) -> None:
    consumer = rocketmq.DefaultMQPushConsumer(group, namesrv_addr=address, credentials=keys)
    consumer.subscribe(topic)
    consumer.register_message_listener(ignore)
    with consumer:
        pass


def by_named_lite_pull(address: str, group: str, topic: str, keys: Keys) -> None:
    consumer = rocketmq.DefaultLitePullConsumer(group, namesrv_addr=address, credentials=keys)
    consumer.subscribe(topic)
    with consumer:
        pass


FORMS = [
    by_push, by_ordered_push, by_sql, by_stream, by_lite_pull, by_threads, by_blocking_stream,
    by_names, by_named_lite_pull,
]  # fmt: skip
CASES = {
    "group": ("bad", "T", ACCOUNT, "No default permission for group:bad", "reader12"),
    "topic": ("good", "Secret", ACCOUNT, "No default permission for topic:Secret", "reader12"),
    "account": ("good", "T", ("nobody12", "secret-of-nobody"), "No acl config for", "nobody12"),
    "secret": ("good", "T", (ACCOUNT[0], "another-secret"), "Check signature failed", "reader12"),
    "none": ("good", "T", None, "No accessKey is configured", "no account"),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_refused_consumer_fails_in_start_with_account_resource_and_fix(
    form: Callable[..., None], guarded: Guarded
) -> None:
    form(guarded.address, "good", "T", ACCOUNT)  # what is allowed starts
    for group, topic, keys, reason, account in CASES.values():
        with pytest.raises(PermissionDeniedError) as caught:
            form(guarded.address, group, topic, keys)
        text = str(caught.value)
        assert reason in text, text
        assert account in text, text
        assert guarded.broker.address in text, text
        assert f"topic {topic} in group {group}" in text, text
        assert f"topicPerms {topic}=SUB and groupPerms {group}=SUB" in text, text
        assert guarded.members(group) == 0, "it has left"
    assert "bad" not in guarded.groups, "a refused group is not created automatically"


@pytest.mark.parametrize("form", [by_push, by_names, by_lite_pull], ids=lambda form: form.__name__)
def test_a_refusal_of_heartbeats_alone_is_raised_too(
    form: Callable[..., None], guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocketMQ's brokers check no rights for CHECK_CLIENT_CONFIG (46)."""
    monkeypatch.setitem(verdict.REQUIREMENTS, RequestCode.CHECK_CLIENT_CONFIG, verdict.ANY_ACCOUNT)
    for group, topic, what in (("bad", "T", "group:bad"), ("good", "Secret", "topic:Secret")):
        with pytest.raises(PermissionDeniedError, match=f"No .*permission for {what}"):
            form(guarded.address, group, topic, ACCOUNT)
        assert guarded.members(group) == 0


async def test_a_group_that_the_broker_creates_by_itself_needs_its_permission_first(
    guarded: Guarded,
) -> None:
    async with Sluice(guarded.address, credentials=ACCOUNT) as mq:
        consumer = mq.consumer("fresh", ignore).subscribe("T")
        with pytest.raises(PermissionDeniedError, match="group:fresh"):
            await consumer.start()
        assert "fresh" not in guarded.groups
        await guarded.change("defaultGroupPerm: DENY", "defaultGroupPerm: SUB")
        await consumer.start()  # the same one, once the account may
        await until(lambda: guarded.members("fresh") == 1)
        assert "fresh" in guarded.groups
        await consumer.close()


async def test_another_expression_or_topic_that_is_refused_changes_nothing(
    guarded: Guarded,
) -> None:
    async with Sluice(guarded.address, credentials=ACCOUNT) as mq:
        consumer = mq.consumer("good", ignore).subscribe("T")
        await consumer.start()
        with pytest.raises(PermissionDeniedError, match="topic:Secret"):
            await consumer.change("Secret", tags="*")
        assert guarded.members("good") == 1
        await guarded.change("T=SUB", "T=DENY")
        with pytest.raises(PermissionDeniedError, match="topic:T"):
            await consumer.change("T", tags="A")
        assert mq._members["good"].subscriptions["T"].expression == "*"
        await consumer.close()


async def test_a_revoked_permission_stops_only_its_group_until_it_is_granted_again(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """A heartbeat names all groups of a client, and a server refuses it as a whole: the others must
    stay members."""
    got: dict[str, list[bytes]] = {"good": [], "other": []}

    def keep(group: str) -> Callable[[Any], None]:
        return lambda message: got[group].append(message.body)

    async with (
        Sluice(guarded.address, credentials=ACCOUNT) as mq,
        Sluice(guarded.address, credentials=OPERATOR) as producer,
    ):
        for group in got:
            await mq.consumer(group, keep(group)).subscribe("T").start()
        await producer.send("T", b"1")
        await until(lambda: got == {"good": [b"1"], "other": [b"1"]})

        await guarded.change("good=SUB", "good=DENY")
        for _ in range(2):
            await asyncio.wrap_future(mq._heartbeat_thread.send_heartbeats())
        told = [one.getMessage() for one in caplog.records if "refuses the members" in one.message]
        assert len(told) == 1, told
        assert "No permission for group:good" in told[0]
        address = guarded.broker.address
        assert mq._heartbeat_thread.find_access_error("good", [address]) is not None
        assert mq._heartbeat_thread.find_access_error("other", [address]) is None, (
            "its own heartbeat was accepted"
        )
        await producer.send("T", b"2")
        await until(lambda: got["other"] == [b"1", b"2"])

        await guarded.change("good=DENY", "good=SUB")
        await asyncio.wrap_future(mq._heartbeat_thread.send_heartbeats())
        await until(lambda: got["good"] == [b"1", b"2"])
