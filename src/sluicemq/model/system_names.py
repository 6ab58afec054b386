"""Names of topics and groups that RocketMQ and SluiceMQ create for themselves.

Several questions look alike and have different answers, so each has its own function:

- `is_system_topic` and `is_system_group`: does the topic or group belong to the system, not to a
  user? Tools that list, count or read "all topics" ask this.
- `is_rocketmq_system_topic`, `is_rocketmq_system_group`, `is_reserved_group` and
  `is_send_forbidden_topic`: the rules of RocketMQ's brokers, proxies and mqadmin, which SluiceMQ's
  servers follow exactly. A name that these rules do not cover can be created by users.
- `is_broker_written_topic` and `stores_other_topics_messages`: what clients may do with the
  contents of a system topic.
- `is_retry_topic`, `is_dead_letter_topic` and `is_group_topic`: topics that a broker creates for a
  consumer group. They belong to the group, so they are not system topics.

The names come from RocketMQ 5 (`TopicValidator`, `MixAll`, `TopicConfigManager`, `ProxyConfig`)
except those that contain `sluice`.
"""

from collections.abc import Collection, Iterable
from typing import Final

from sluicemq.model.topic import DEFAULT_TOPIC, DLQ_PREFIX, RETRY_PREFIX

# ---- topics

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
"""Messages with a delay level wait here. Queue n - 1 belongs to level n."""
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
"""Timed messages wait here."""
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
"""Prepared messages of transactions wait here."""
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""Records that end prepared messages (op messages)."""
CHECK_MAX_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Prepared messages that a broker has checked the maximum number of times."""
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
"""The traces that clients write. The default of the setting `msgTraceTopicName`."""
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
CHECKPOINT_TOPIC: Final = "CHECKPOINT_TOPIC"
"""RocketMQ's name for the offsets of its RocksDB store. SluiceMQ does not create it."""
STAGING_TOPIC: Final = "rmq_sys_sluice_staging"
"""SluiceMQ's: rows that the exactly-once sink of Spark has sent and not yet committed."""
EPOCH_TOPIC: Final = "rmq_sys_sluice_epochs"
"""SluiceMQ's: the commits of the exactly-once sink of Spark."""
HEARTBEAT_SYNC_TOPIC: Final = "DefaultHeartBeatSyncerTopic"
"""RocketMQ's proxies announce their clients to other proxies here (`heartbeatSyncerTopicName`)."""

SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
REVIVE_TOPIC_PREFIX: Final = f"{SYSTEM_TOPIC_PREFIX}REVIVE_LOG_"
SYNC_MEMBER_TOPIC_PREFIX: Final = f"{SYSTEM_TOPIC_PREFIX}SYNC_BROKER_MEMBER_"
_CONSTANT_PREFIX: Final = "RMQ_SYS_"
REPLY_TOPIC_SUFFIX: Final = "_REPLY_TOPIC"

_SEND_FORBIDDEN_TOPICS: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        CHECK_MAX_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
    }
)
_ROCKETMQ_SYSTEM_TOPICS: Final = _SEND_FORBIDDEN_TOPICS | {
    DEFAULT_TOPIC,
    BENCHMARK_TOPIC,
    TRACE_TOPIC,
    CHECKPOINT_TOPIC,
}
_BROKER_WRITTEN_TOPICS: Final = _SEND_FORBIDDEN_TOPICS | {TIMER_TOPIC, EPOCH_TOPIC}
_STORING_TOPICS: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        TIMER_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        CHECK_MAX_TOPIC,
        STAGING_TOPIC,
        EPOCH_TOPIC,
    }
)


def reply_topic(cluster: str) -> str:
    """Return the name of the topic that stores replies to requests in a cluster."""
    return cluster + REPLY_TOPIC_SUFFIX


def revive_topic(cluster: str) -> str:
    """Return the name of the topic that stores checkpoints and acknowledgements of POP."""
    return REVIVE_TOPIC_PREFIX + cluster


def sync_member_topic(broker: str) -> str:
    """Return the name of RocketMQ's topic for the members of a broker's replica group."""
    return SYNC_MEMBER_TOPIC_PREFIX + broker


def revealed_names(topics: Iterable[str]) -> set[str]:
    """Return the names of clusters and brokers that occur in the names of system topics.

    `topics` are all topics. The result is a substitute for asking the cluster, for example with a
    store directory. Brokers of RocketMQ 4 do not create these system topics.
    """
    names = set()
    for topic in topics:
        for prefix in (REVIVE_TOPIC_PREFIX, SYNC_MEMBER_TOPIC_PREFIX):
            if topic.startswith(prefix):
                names.add(topic.removeprefix(prefix))
    return names


def is_system_topic(name: str, own_names: Collection[str] = ()) -> bool:
    """Return whether the topic belongs to RocketMQ or SluiceMQ itself, not to a user.

    Each cluster and broker has a system topic of its name, and each cluster a reply topic.
    `own_names` are these names. Without them, such topics count as topics of users.

    Every name with the prefix "RMQ_SYS_" is a system topic, because other versions of RocketMQ have
    further topics with it. Retry and dead-letter topics are not system topics.
    """
    return (
        is_rocketmq_system_topic(name)
        or name.startswith(_CONSTANT_PREFIX)
        or name == HEARTBEAT_SYNC_TOPIC
        or name.removesuffix(REPLY_TOPIC_SUFFIX) in own_names
    )


def is_rocketmq_system_topic(name: str) -> bool:
    """Return whether `TopicValidator.isSystemTopic` of RocketMQ accepts the name.

    RocketMQ's proxy refuses these topics, and its brokers do not let users change them. A broker
    adds the names of its cluster, itself, its trace topic and its reply topic: see
    `Topics.is_system`.
    """
    return name in _ROCKETMQ_SYSTEM_TOPICS or name.startswith(SYSTEM_TOPIC_PREFIX)


def is_send_forbidden_topic(name: str) -> bool:
    """Return whether `TopicValidator.isNotAllowedSendTopic` of RocketMQ accepts the name.

    Brokers refuse to store messages for these topics, and clients refuse to send them.
    """
    return name in _SEND_FORBIDDEN_TOPICS


def is_broker_written_topic(name: str) -> bool:
    """Return whether only the broker itself writes to the topic.

    These are the topics of `is_send_forbidden_topic`, and those whose messages decide what is
    delivered: timed messages, and commits of the exactly-once sink. The revive topic of POP is not
    among them, because an acting master hands its records on to another broker. Access control
    keeps accounts away from the revive topic.
    """
    return name in _BROKER_WRITTEN_TOPICS


def stores_other_topics_messages(name: str) -> bool:
    """Return whether a record of the topic names the topic for which it waits (`REAL_TOPIC`).

    An account needs a permission for such a topic by name, because a default permission for all
    topics would show it messages of topics that are closed to it.
    """
    return name in _STORING_TOPICS


def is_revive_topic(name: str) -> bool:
    """Return whether the topic stores checkpoints and acknowledgements of POP of a cluster."""
    return name.startswith(REVIVE_TOPIC_PREFIX)


def is_retry_topic(name: str) -> bool:
    """Return whether the topic stores messages that a group will receive again: %RETRY%GROUP."""
    return name.startswith(RETRY_PREFIX)


def is_dead_letter_topic(name: str) -> bool:
    """Return whether the topic stores the dead letters of a group: %DLQ%GROUP."""
    return name.startswith(DLQ_PREFIX)


def is_group_topic(name: str) -> bool:
    """Return whether the topic is the retry topic or the dead-letter topic of a group."""
    return name.startswith((RETRY_PREFIX, DLQ_PREFIX))


# ---- groups

TOOLS_GROUP: Final = "TOOLS_CONSUMER"
"""The group under whose name readers without a group of their own pull messages.

Every broker knows it, even if it does not create groups automatically (spec/admin.md §2)."""
INNER_PRODUCER_GROUP: Final = "CLIENT_INNER_PRODUCER"
"""The producer group under whose name clients and brokers send messages of the system."""
TRANSACTION_GROUP: Final = "CID_RMQ_SYS_TRANS"
"""The group whose offsets say how far a broker has processed its transactions."""
REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
"""The group whose offsets say how far a broker has processed its revive topic."""
RESERVED_GROUP_PREFIX: Final = "CID_RMQ_SYS_"

BROKER_GROUPS: Final = (
    TOOLS_GROUP,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    TRANSACTION_GROUP,
)
"""The groups that every broker has from its first start (RocketMQ's `SubscriptionGroupManager`)."""
_PREDEFINED_GROUPS: Final = frozenset(
    {
        *BROKER_GROUPS,
        "DEFAULT_CONSUMER",
        "DEFAULT_PRODUCER",
        "SCHEDULE_CONSUMER",
        "__MONITOR_CONSUMER",
        INNER_PRODUCER_GROUP,
        "SELF_TEST_P_GROUP",
    }
)
_OTHER_SYSTEM_GROUPS: Final = frozenset(
    {
        f"CID_{HEARTBEAT_SYNC_TOPIC}",
        "CID_SYS_RMQ_TRANS",
        "LOCK_CONSUMER",
    }
)


def is_system_group(name: str) -> bool:
    """Return whether the group belongs to RocketMQ or SluiceMQ itself, not to a user.

    Besides the groups of `is_rocketmq_system_group` these are the group of RocketMQ's proxies, and
    two names that are not in RocketMQ 5 but occur in older clusters: CID_SYS_RMQ_TRANS (the name of
    the constant that holds "CID_RMQ_SYS_TRANS") and LOCK_CONSUMER.
    """
    return is_rocketmq_system_group(name) or name in _OTHER_SYSTEM_GROUPS


def is_rocketmq_system_group(name: str) -> bool:
    """Return whether `MixAll.isSysConsumerGroup` or `isPredefinedGroup` of RocketMQ accepts it.

    RocketMQ's mqadmin leaves these groups out of what it exports.
    """
    return name in _PREDEFINED_GROUPS or is_reserved_group(name)


def is_reserved_group(name: str) -> bool:
    """Return whether `MixAll.isSysConsumerGroup` of RocketMQ accepts the name.

    RocketMQ's proxy refuses these groups. The other system groups are open to its clients.
    """
    return name.startswith(RESERVED_GROUP_PREFIX)
