"""Topics, consumer groups, queues and routes, and the strategies that distribute queues to members.

Permissions are bits: 4 read, 2 write, 1 inherit. A topic with the last one is a template from which
brokers create other topics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sluicemq.hints import with_hints

PERM_PRIORITY = 8
PERM_READ = 4
PERM_WRITE = 2
PERM_INHERIT = 1

MASTER_ID = 0
RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"
LMQ_PREFIX = "%LMQ%"
"""The prefix of a light message queue, which has no topic (spec/store.md §3.1)."""
DEFAULT_TOPIC = "TBW102"
"""The topic that is the template of topics that are created by their first send."""
DEFAULT_CLUSTER = "DefaultCluster"
ORDER_TOPICS = "ORDER_TOPIC_CONFIG"
"""The name servers' namespace for strict order topics. It maps a topic to `broker:queues;…`."""
TOPIC_LENGTH_MAX = 127
RETRY_TOPIC_LENGTH_MAX = 255
GROUP_LENGTH_MAX = 120
MESSAGE_TYPE = "message.type"
MESSAGE_TYPES = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")
"""An attribute of topics and its values: the type of messages that may be sent to the topic.

Proxies enforce it. Brokers, RocketMQ's and SluiceMQ's, accept messages of every type.
"""
MIXED = "MIXED"
"""The value of `MESSAGE_TYPE` for a topic that accepts messages of all types."""
QUEUE_TYPE = "queue.type"
CLEANUP_POLICY = "cleanup.policy"
COMPACTION = "COMPACTION"
CONTRACT = "sluice.contract"
CONTRACTS = ("compatible", "strict", "lanes")
"""An attribute of groups and its values: what happens if members have different subscriptions. See
`broker/consume/clients.py`."""


POP_NORMAL = 0
POP_RETRY = 1
POP_RETRY_V2 = 2
"""The kinds of topics that a group reads with POP: a user's topic, or a topic of messages that come
again, named in RocketMQ's first or second form."""
_POP_RETRY_SEPARATORS = "_", "+"


def pop_retry_topic(group: str, topic: str, *, is_v2: bool) -> str:
    """Return the name of the retry topic for messages that a group popped and did not acknowledge.

    The name is `%RETRY%group_topic`, or `%RETRY%group+topic` if `is_v2`.
    """
    return f"{RETRY_PREFIX}{group}{_POP_RETRY_SEPARATORS[is_v2]}{topic}"


def pop_kind(topic: str) -> int:
    """Return POP_RETRY or POP_RETRY_V2 for a retry topic, by its name, else POP_NORMAL.

    The name of a retry topic of the version 2 contains a "+".
    """
    if not topic.startswith(RETRY_PREFIX):
        return POP_NORMAL
    return POP_RETRY_V2 if "+" in topic else POP_RETRY


def pop_origin(topic: str, group: str) -> str:
    """Return the original topic of messages in `topic`, if that is a retry topic of the group.

    Return `topic` itself otherwise. The group must be known, because a name with several `_` could
    be split in several ways.
    """
    for separator in _POP_RETRY_SEPARATORS:
        prefix = f"{RETRY_PREFIX}{group}{separator}"
        if topic.startswith(prefix):
            return topic.removeprefix(prefix)
    return topic


def pop_topic(topic: str, group: str, topic_kind: int) -> str:
    """Return the topic of a kind that belongs to the user's topic `topic` and the group.

    `topic_kind` is POP_NORMAL, POP_RETRY or POP_RETRY_V2.
    """
    if topic_kind == POP_NORMAL:
        return topic
    return pop_retry_topic(group, topic, is_v2=topic_kind > POP_RETRY)


class MessageQueue(NamedTuple):
    """One queue of a topic on one broker.

    Queues sort by topic, broker and queue id. All clients must use this order, because each member
    of a group computes by itself which queues it reads.
    """

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker}/{self.queue_id}"


@dataclass(frozen=True, slots=True, order=True)
class DataVersion:
    """The version of a table. Two versions are equal only if all three fields are."""

    counter: int = 0
    timestamp_ms: int = 0
    state_version: int = 0

    def incremented(self, now_ms: int) -> "DataVersion":
        """Return the version of the table after a change at `now_ms`."""
        return DataVersion(self.counter + 1, now_ms, self.state_version)


@with_hints
@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings of a topic on one broker."""

    name: str
    read_queues: int = 8
    """The number of queues that consumers read, those with the ids 0 to `read_queues` - 1."""
    write_queues: int = 8
    """The number of queues that producers send to, those with the ids 0 to `write_queues` - 1."""
    perm: int = PERM_READ | PERM_WRITE
    """The sum of PERM_READ, PERM_WRITE and PERM_INHERIT for what clients may do."""
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    order: bool = False
    """Whether the topic has strict order."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Further settings by name, such as `message.type`."""

    def __str__(self) -> str:
        """Return a line with the name, the queue counts, the permission and the attributes."""
        if self.read_queues == self.write_queues:
            queue_counts = f"{self.read_queues} queues"
        else:
            queue_counts = f"{self.read_queues} queues to read, {self.write_queues} to write"
        facts = [queue_counts, permission_name(self.perm)]
        if self.order:
            facts.append("strict order")
        return _describe(self.name, facts, self.attributes)


@with_hints
@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The settings of a consumer group on one broker."""

    name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queues: int = 1
    retry_times_max: int = 16
    broker_id: int = MASTER_ID
    broker_id_when_slow: int = 1
    notify_changes_enable: bool = True
    sys_flag: int = 0
    consume_timeout_minutes: int = 15
    attributes: Mapping[str, str] = field(default_factory=dict)
    retry_policy: Mapping[str, Any] | None = None
    """The retry policy as RocketMQ's JSON, or None for the default policy."""

    def __str__(self) -> str:
        """Return a line with the name, the number of retries, what differs, and the attributes."""
        facts = [f"{self.retry_times_max} retries"]
        if not self.consume_enable:
            facts.append("may not consume")
        if self.consume_message_orderly:
            facts.append("in order")
        return _describe(self.name, facts, self.attributes)


def permission_name(perm: int) -> str:
    """Return the bits of a permission as text, such as "read+write", or "none"."""
    names = [name for bit, name in ((4, "read"), (2, "write"), (1, "inherit")) if perm & bit]
    return "+".join(names) or "none"


def _describe(name: str, facts: list[str], attributes: Mapping[str, str]) -> str:
    """Return the name with the facts and attributes in brackets, separated by commas."""
    attribute_facts = [f"{key}={text}" for key, text in attributes.items()]
    details = ", ".join([*facts, *attribute_facts])
    return f"{name} ({details})"


@dataclass(frozen=True, slots=True)
class QueueData:
    """The numbers of queues of a topic on one broker, with the permission of the topic there."""

    broker: str
    """The name of the broker."""
    read_queues: int
    """The number of queues that consumers read, those with the ids 0 to `read_queues` - 1."""
    write_queues: int
    """The number of queues that producers send to, those with the ids 0 to `write_queues` - 1."""
    perm: int
    """The sum of PERM_READ, PERM_WRITE and PERM_INHERIT for what clients may do."""
    sys_flag: int = 0


@dataclass(frozen=True, slots=True)
class BrokerData:
    """The replicas of one broker name: their addresses by broker id. The master has id 0."""

    broker: str
    cluster: str
    addresses: Mapping[int, str]
    acting_master_enable: bool = False
    zone: str | None = None


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The brokers and queues of a topic.

    `order_topic_config` is `broker:queues;…` if the topic has strict order, else None.
    """

    brokers: tuple[BrokerData, ...]
    queues: tuple[QueueData, ...]
    order_topic_config: str | None = None


# ---------------------------------------------------------------------- distribution of queues
#
# RocketMQ's two usual strategies. Each member computes its own queues (`client.core.balance`), or
# the broker computes them for all members (QUERY_ASSIGNMENT, 400). Both must have the same result.

Strategy = Callable[[str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]
"""A function (client id, queues, members) that returns the queues of that client. It must be pure,
because every member computes it by itself."""


def readable_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """Return the queues that consumers of a topic read, sorted as all clients sort them.

    They are the queues 0 to `read_queues` - 1 of each broker in `route` whose permission for the
    topic includes PERM_READ.
    """
    message_queues: list[MessageQueue] = []
    for queues in route.queues:
        if queues.perm & PERM_READ:
            message_queues += [
                MessageQueue(topic, queues.broker, queue_id)
                for queue_id in range(queues.read_queues)
            ]
    return sorted(message_queues)


def allocate_average(
    client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
) -> list[MessageQueue]:
    """Return the queues of one member of a group: a consecutive part of the sorted queues.

    With 5 queues and 2 members, the first member gets 3 queues and the second one 2. The result is
    empty if the client is not a member, or if there are more members than queues and none is left
    for it. The order of `queues` and `members` does not matter.
    """
    if client_id not in members or not queues:
        return []
    sorted_queues = sorted(queues)
    member_index = sorted(members).index(client_id)

    # If the queues cannot be divided evenly, each of the first members gets one queue more.
    size, remainder = divmod(len(sorted_queues), len(members))
    start = member_index * size + min(member_index, remainder)
    end = start + size + (1 if member_index < remainder else 0)
    return sorted_queues[start:end]


def allocate_circle(
    client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
) -> list[MessageQueue]:
    """Return the queues of one member of a group: every n-th of the sorted queues, for n members.

    With 2 members, the first member gets the queues 0, 2, 4. The result is empty if the client is
    not a member. The order of `queues` and `members` does not matter.
    """
    if client_id not in members:
        return []
    member_index = sorted(members).index(client_id)
    return sorted(queues)[member_index :: len(members)]
