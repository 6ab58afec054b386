"""Topics, consumer groups, queues and routes; and which member of a group reads which queues.

Permissions are bits: 4 read, 2 write, 1 inherit (a topic that others may be created from).
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
DEFAULT_CLUSTER = "DefaultCluster"
ORDER_TOPICS = "ORDER_TOPIC_CONFIG"
"""The name servers' namespace of strict order topics: topic -> `broker:queues;…`."""
TOPIC_LENGTH_MAX = 127
RETRY_TOPIC_LENGTH_MAX = 255
GROUP_LENGTH_MAX = 120
MESSAGE_TYPE = "message.type"
MESSAGE_TYPES = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")
"""A topic's attribute and its values: which messages it is for. Only RocketMQ's proxy holds senders
to it; brokers, ours too, take every message."""
MIXED = "MIXED"
"""The value of a topic that takes all of them."""
QUEUE_TYPE = "queue.type"
CLEANUP_POLICY = "cleanup.policy"
COMPACTION = "COMPACTION"
CONTRACT = "sluice.contract"
CONTRACTS = ("compatible", "strict", "lanes")
"""A group's attribute and its values: may members of the group want different messages?"""


POP_NORMAL, POP_RETRY, POP_RETRY_V2 = 0, 1, 2
"""Of which kind a topic is for POP, by its name."""
_POP_RETRY_SEPARATORS = "_", "+"


def pop_retry_topic(group: str, topic: str, *, is_v2: bool) -> str:
    """Where messages come again that the group has popped from the topic and not acknowledged."""
    return f"{RETRY_PREFIX}{group}{_POP_RETRY_SEPARATORS[is_v2]}{topic}"


def pop_kind(topic: str) -> int:
    """Whether a topic is one of retries, and of which form."""
    if not topic.startswith(RETRY_PREFIX):
        return POP_NORMAL
    return POP_RETRY_V2 if "+" in topic else POP_RETRY


def pop_origin(topic: str, group: str) -> str:
    """The topic whose messages come again in this retry topic of the group; any other is its own
    origin. Names with `_` can be read in several ways, so the group has to be known."""
    for separator in _POP_RETRY_SEPARATORS:
        prefix = f"{RETRY_PREFIX}{group}{separator}"
        if topic.startswith(prefix):
            return topic.removeprefix(prefix)
    return topic


def pop_topic(topic: str, group: str, kind: int) -> str:
    """Of a topic, as a consumer names it, the one of this kind."""
    return topic if kind == POP_NORMAL else pop_retry_topic(group, topic, is_v2=kind > POP_RETRY)


class MessageQueue(NamedTuple):
    """One queue of a topic on one broker. Sorts by topic, broker, queue id, as clients must."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker}/{self.queue_id}"


@dataclass(frozen=True, slots=True, order=True)
class DataVersion:
    """Which edition of a table this is; equal only when all three are."""

    counter: int = 0
    timestamp_ms: int = 0
    state_version: int = 0

    def next(self, now_ms: int) -> "DataVersion":
        """That of the table after a change."""
        return DataVersion(self.counter + 1, now_ms, self.state_version)


@with_hints
@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic as a broker keeps it."""

    name: str
    read_queues: int = 8
    write_queues: int = 8
    perm: int = PERM_READ | PERM_WRITE
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    order: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        queues = f"{self.read_queues} queues"
        if self.read_queues != self.write_queues:
            queues = f"{self.read_queues} queues to read, {self.write_queues} to write"
        words = [queues, permission_name(self.perm), *["strict order"] * self.order]
        return _told(self.name, words, self.attributes)


@with_hints
@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A consumer group as a broker keeps it."""

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
    """RocketMQ's JSON of it; None is the standard one."""

    def __str__(self) -> str:
        words = [f"{self.retry_times_max} retries"]
        words += ["may not consume"] * (not self.consume_enable)
        words += ["in order"] * self.consume_message_orderly
        return _told(self.name, words, self.attributes)


def permission_name(perm: int) -> str:
    """Bits as text: `read+write`."""
    names = [name for bit, name in ((4, "read"), (2, "write"), (1, "inherit")) if perm & bit]
    return "+".join(names) or "none"


def _told(name: str, words: list[str], attributes: Mapping[str, str]) -> str:
    return f"{name} ({', '.join([*words, *(f'{k}={v}' for k, v in attributes.items())])})"


@dataclass(frozen=True, slots=True)
class QueueData:
    """How many queues of a topic one broker has."""

    broker: str
    read_queues: int
    write_queues: int
    perm: int
    sys_flag: int = 0


@dataclass(frozen=True, slots=True)
class BrokerData:
    """The addresses of one broker by id; 0 is the master."""

    broker: str
    cluster: str
    addresses: Mapping[int, str]
    acting_master_enable: bool = False
    zone: str | None = None


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """Where a topic lives. `order_topic_config` is `broker:queues;…` when strict order is set."""

    brokers: tuple[BrokerData, ...]
    queues: tuple[QueueData, ...]
    order_topic_config: str | None = None


# -------------------------------------------------------------------------- who reads which queues
#
# By RocketMQ's two usual ways. Each member computes it for itself (`client.core.balance`), or the
# broker for all (400); both have to come to the same.

Strategy = Callable[[str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]
"""(client id, queues, members) -> the queues of that client. Pure: every member computes it."""


def read_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """The queues a consumer group shares, sorted as all clients sort them."""
    return sorted(
        MessageQueue(topic, data.broker, queue_id)
        for data in route.queues
        if data.perm & PERM_READ
        for queue_id in range(data.read_queues)
    )


def allocate_average(
    client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
) -> list[MessageQueue]:
    """The queues of one member; [] when it is not a member, or there are more members than queues.

    `queues` and `members` may come in any order.
    """
    if client_id not in members or not queues:
        return []
    ordered, ids = sorted(queues), sorted(members)
    index, count = ids.index(client_id), len(ids)
    size, more = divmod(len(ordered), count)
    start = index * size + min(index, more)
    return ordered[start : start + size + (1 if index < more else 0)]


def allocate_circle(
    client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
) -> list[MessageQueue]:
    """Dealt out like cards. Any order; [] for a stranger."""
    if client_id not in members:
        return []
    return sorted(queues)[sorted(members).index(client_id) :: len(members)]
