"""Every place that separates users' topics and groups from system ones decides alike."""

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.cli import main
from sluicemq.cli.output import Access
from sluicemq.client.admin.groups import QueueLag
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.console.pages import groups as groups_page
from sluicemq.console.pages import topics as topics_page
from sluicemq.model.system_names import revealed_names
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.mqadmin import exports
from sluicemq.pipelines import audit, tables
from sluicemq.spark.sources.offsets import TopicSelection

CLUSTER, BROKER = "East", "broker-a"
NAMED_BY_CLUSTER = CLUSTER, BROKER, f"{CLUSTER}_REPLY_TOPIC"
"""A topic of the name of each cluster and broker, and one of each cluster's replies."""
SYSTEM_TOPICS = (
    # RocketMQ's TopicValidator
    "TBW102", "SCHEDULE_TOPIC_XXXX", "BenchmarkTest", "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRACE_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "CHECKPOINT_TOPIC", "rmq_sys_wheel_timer",
    "rmq_sys_REVIVE_LOG_East", "rmq_sys_SYNC_BROKER_MEMBER_broker-a", "rmq_sys_anything",
    # SluiceMQ's
    "rmq_sys_sluice_staging", "rmq_sys_sluice_epochs",
    *NAMED_BY_CLUSTER,
)  # fmt: skip
TOOLS_HIDE_TOPICS = ("RMQ_SYS_ANYTHING", "DefaultHeartBeatSyncerTopic")
"""System topics for tools, although a RocketMQ broker lets users create them: the first by its
prefix, the second is made by RocketMQ's proxy."""
GROUPS_TOPICS = ("%RETRY%shop", "%DLQ%shop")
USERS_TOPICS = (
    "shop", "sluice_sys_shop", "rmq_sys", "TBW1022", "SHOP_REPLY_TOPIC", "Eastern", "SYS_shop",
    "RETRY", "MY_RMQ_SYS_TOPIC",
)  # fmt: skip

SYSTEM_GROUPS = (
    # RocketMQ's MixAll
    "DEFAULT_CONSUMER", "DEFAULT_PRODUCER", "TOOLS_CONSUMER", "SCHEDULE_CONSUMER",
    "FILTERSRV_CONSUMER", "__MONITOR_CONSUMER", "CLIENT_INNER_PRODUCER", "SELF_TEST_P_GROUP",
    "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY", "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER",
    "CID_ONSAPI_PULL", "CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_REVIVE_GROUP", "CID_RMQ_SYS_anything",
)  # fmt: skip
TOOLS_HIDE_GROUPS = ("CID_SYS_RMQ_TRANS", "CID_DefaultHeartBeatSyncerTopic", "LOCK_CONSUMER")
USERS_GROUPS = (
    "shop", "CID_shop", "CID_ONSHORE", "SELF_TEST_shop", "TOOLS_CONSUMERS", "__MONITOR_shop",
    "LOCK_CONSUMERS", "TBW102", "BenchmarkTest",
)  # fmt: skip

ALL_TOPICS = (*SYSTEM_TOPICS, *TOOLS_HIDE_TOPICS, *GROUPS_TOPICS, *USERS_TOPICS)
ALL_GROUPS = (*SYSTEM_GROUPS, *TOOLS_HIDE_GROUPS, *USERS_GROUPS)


class Admin:
    """A cluster that has all names of the tables above."""

    def topics(self) -> list[str]:
        return list(ALL_TOPICS)

    def groups(self) -> dict[str, GroupConfig]:
        return {name: GroupConfig(name) for name in ALL_GROUPS}

    def cluster_info(self) -> Any:
        return SimpleNamespace(brokers={BROKER: 1}, clusters={CLUSTER: {BROKER}})

    def find_route(self, _topic: str) -> None:
        return None

    def members(self, _group: str) -> list[str]:
        return []

    def progress(self, _group: str) -> list[Any]:
        return []

    def lag(self, _group: str | None) -> list[QueueLag]:
        return [QueueLag(name, MessageQueue("t", BROKER, 0), 0, 0, 1) for name in ALL_GROUPS]

    def system_topics(self, _address: str) -> tuple[str, ...]:
        return SYSTEM_TOPICS

    def group_table(self, _address: str) -> Any:
        return SimpleNamespace(groups=self.groups())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command of `sluice` against the cluster; return its output."""

    class Open:
        def __enter__(self) -> Admin:
            return Admin()

        def __exit__(self, *_error: object) -> None:
            pass

    monkeypatch.setattr(Access, "admin", lambda _self: Open())

    def run(*words: str) -> str:
        result = CliRunner().invoke(main, [*words, "--json"])
        assert result.exit_code == 0, result.output
        return result.output

    return run


def of_console(page: Any, kind: str) -> set[str]:
    """Return the names that a page of the console lists as `kind`."""

    class Context:
        query = {"kind": kind}  # noqa: RUF012
        is_live = False
        admin = Admin()

        async def get_cached(self, _key: str, ask: Callable[[], Any]) -> Any:
            return ask()

        def paginate(self, rows: list[str]) -> Any:
            return SimpleNamespace(rows=rows)

    answer = asyncio.run(page.show_all(Context()))
    return set(answer.values["paged"].rows)


def named(text: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if f'"{name}"' in text}


# ---- topics


def test_sluice_topic_list(run: Callable[..., str]) -> None:
    assert named(run("topic", "list"), ALL_TOPICS) == set(USERS_TOPICS)
    assert named(run("topic", "list", "--all"), ALL_TOPICS) == set(ALL_TOPICS)


def test_topics_of_the_console() -> None:
    assert of_console(topics_page, "normal") == set(USERS_TOPICS)
    assert of_console(topics_page, "system") == {*SYSTEM_TOPICS, *TOOLS_HIDE_TOPICS}
    assert of_console(topics_page, "retry") | of_console(topics_page, "dead") == set(GROUPS_TOPICS)


def test_a_pattern_of_the_spark_source() -> None:
    assert set(TopicSelection(pattern=".*").resolve(Admin())) == set(USERS_TOPICS)  # type: ignore[arg-type]
    assert TopicSelection(pattern="%.*").resolve(Admin()) == list(GROUPS_TOPICS)  # type: ignore[arg-type]


def test_topics_that_sluice_sql_offers() -> None:
    offered = tables._unknown_topic("qqqqqqq", ALL_TOPICS).fix
    assert set(offered.removeprefix("There are: ").rstrip(".").split(", ")) == set(USERS_TOPICS)


def test_the_broker_decides_as_rocketmq_does() -> None:
    config = BrokerConfig(cluster_name=CLUSTER, broker_name=BROKER)
    topics = Topics(Settings(config, StoreConfig("/x")), None, None)  # type: ignore[arg-type]
    assert [name for name in ALL_TOPICS if topics.is_system(name)] == list(SYSTEM_TOPICS)


# ---- groups


def test_sluice_group_list(run: Callable[..., str]) -> None:
    for command in ("list", "lag"):
        assert named(run("group", command), ALL_GROUPS) == set(USERS_GROUPS)
        assert named(run("group", command, "--all"), ALL_GROUPS) == set(ALL_GROUPS)


def test_groups_of_the_console() -> None:
    assert of_console(groups_page, "normal") == set(USERS_GROUPS)
    assert of_console(groups_page, "system") == {*SYSTEM_GROUPS, *TOOLS_HIDE_GROUPS}


def test_groups_of_an_audit() -> None:
    assert audit.list_groups(Admin()) == sorted(USERS_GROUPS)  # type: ignore[arg-type]


def test_mqadmin_exports_the_groups_that_rocketmqs_exports() -> None:
    session = SimpleNamespace(admin=Admin())
    exported = exports._fetch_user_groups(session, "")  # type: ignore[arg-type]
    assert list(exported) == [*TOOLS_HIDE_GROUPS, *USERS_GROUPS]


def test_system_topics_reveal_their_cluster_and_broker() -> None:
    assert revealed_names(ALL_TOPICS) == {CLUSTER, BROKER}
    assert revealed_names(USERS_TOPICS) == set()
