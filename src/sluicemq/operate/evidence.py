"""What doctor has seen, stage by stage: name servers, brokers, topic, group, message.

Plain values: `doctor` collects them, `causes` judges them. None (of a text "", of a mapping an
empty one) is what could not be learned: no cause holds because of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final

from sluicemq.client.admin.groups import QueueLag, QueueProgress
from sluicemq.client.admin.rules import GroupExplained, MessageExplained
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import (
    MASTER_ID,
    PERM_READ,
    PERM_WRITE,
    RETRY_PREFIX,
    GroupConfig,
    TopicConfig,
    TopicRoute,
)
from sluicemq.net.probe import Reachability
from sluicemq.wire.bodies import ClusterInfo, RunningInfo

UNSUPPORTED: Final = 3
HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True)
class ServerSeen:
    """An address that was asked. `remark`: what it said instead of an answer, with `code`."""

    address: str
    reach: Reachability
    detail: str = ""
    code: int = 0
    remark: str = ""

    @property
    def is_up(self) -> bool:
        """Does it answer as what it should be?"""
        return self.reach is Reachability.RESPONDS and not self.code

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def place(self) -> str:
        """Of an address: wildcard, loopback, private or public; "" of a name."""
        try:
            address = ip_address(self.host)
        except ValueError:
            return "loopback" if self.host == "localhost" else ""
        if address.is_unspecified:
            return "wildcard"
        if address.is_loopback:
            return "loopback"
        return "private" if address.is_private else "public"


@dataclass(frozen=True, slots=True)
class NameServerSeen(ServerSeen):
    """`knows`: has it a route of the topic; `creates`: does a broker that registers with it create
    topics by itself (TBW102)."""

    cluster: ClusterInfo | None = None
    route: TopicRoute | None = None
    knows: bool | None = None
    creates: bool | None = None


@dataclass(frozen=True, slots=True)
class BrokerSeen(ServerSeen):
    """One replica, as the name servers name it (or, with `name` "", an address that the user gave).
    `config`, `runtime`: 26 and 28. `behind_bytes`: to its master. `replica`: a row of
    `Admin.replicas`, and what it says itself: `inSyncSize`; of a slave `isLinked` and `master`."""

    name: str = ""
    cluster: str = ""
    id: int = MASTER_ID
    vip: Reachability | None = None
    runtime: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    skew_ms: int | None = None
    topic: TopicConfig | None = None
    behind_bytes: int | None = None
    replica: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_other(self) -> bool:
        """Does another broker answer at its address?"""
        own = self.config.get("brokerName", self.name)
        return bool(self.name) and own != self.name

    def number(self, name: str, default: float = -1) -> float:
        """Of its counters or settings; `default` where there is none."""
        try:
            return float(self.runtime.get(name, self.config.get(name, "")))
        except ValueError:
            return default

    @property
    def is_sync_master(self) -> bool:
        """Do its sends wait for slaves, as its file says? Not where the consensus decides."""
        is_sync = self.config.get("brokerRole") == "SYNC_MASTER"
        return is_sync and not self.config.get("sluiceConsensus")

    @property
    def disk_percent(self) -> float:
        """How full the fullest disk is; below 0 when it does not tell."""
        names = [name for name in self.runtime if name.endswith("DiskRatio")]
        return max((self.number(name) for name in names), default=-1.0) * 100

    def percent(self, name: str, default: int) -> float:
        """A setting that is 75 or 0.75."""
        value = self.number(name, default)
        return value if value > 1 else value * 100

    @property
    def congested(self) -> Iterator[tuple[str, float]]:
        """Queues of requests, with how long their first one has waited, in ms."""
        for pool in ("send", "pull", "query", "ack"):
            yield pool, self.number(f"{pool}ThreadPoolQueueHeadWaitTimeMills")


def without_master(seen: Iterable[BrokerSeen]) -> list[str]:
    """Names of brokers of which no master answers: what they have is not known."""
    up = {one.name for one in seen if one.id == MASTER_ID and one.is_up}
    return sorted({one.name or one.address for one in seen if one.name not in up})


@dataclass(frozen=True, slots=True)
class FilterSeen:
    """What a group's filter takes of `rows` messages: `atoms` true of none, when it takes none."""

    topic: str
    expression: str
    rows: int
    matched: int
    atoms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A consumer that is online; `info` is what it says itself, `is_mute`: it did not answer."""

    client_id: str
    info: RunningInfo | None = None
    is_mute: bool = False
    model: str = ""
    ahead_ms: int = 0
    """So much its clock is ahead of ours, at least."""

    @property
    def failing(self) -> dict[str, float]:
        """Topics of which an ordered consumer fails on everything -> failures a second."""
        info = self.info
        if info is None or info.properties.get("PROP_CONSUMEORDERLY") != "true":
            return {}
        return {
            topic: rates.failed_per_second
            for topic, rates in info.rates.items()
            if rates.failed_per_second > 0 and rates.done_per_second == 0
        }


@dataclass(frozen=True, slots=True)
class GroupSeen:
    """A consumer group. `models`: message models that brokers tell; `dead`, `dead_time_ms`: dead
    letters and when the newest came; `retried`: message id -> how often, of those that wait for
    another try; `pops`: topics that it pops."""

    name: str
    config: GroupConfig | None = None
    explained: GroupExplained | None = None
    lags: Sequence[QueueLag] = ()
    progress: Sequence[QueueProgress] = ()
    members: Sequence[MemberSeen] = ()
    models: frozenset[str] = frozenset()
    dead: int = 0
    dead_time_ms: int = 0
    retried: Mapping[str, int] = field(default_factory=dict)
    filters: Sequence[FilterSeen] = ()
    pops: frozenset[str] = frozenset()

    @property
    def own_lags(self) -> list[QueueLag]:
        return [item for item in self.lags if not item.queue.topic.startswith(RETRY_PREFIX)]


@dataclass(frozen=True, slots=True)
class MessageSeen:
    """A message. `waiting`: delayed or half, while it is in no topic that consumers read;
    `offset_min` of its queue; `kind`: what was asked of it (its type)."""

    message_id: str
    stored: StoredMessage | None = None
    waiting: str = ""
    until_ms: int = 0
    offset_min: int = 0
    born_ms: int = 0
    earliest_ms: int = 0
    """The oldest message of the brokers that have deleted any."""
    explained: Sequence[MessageExplained] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was seen. `denied`: who refused what, as (address, remark); `unseen`: what could not
    be looked at, and why."""

    now_ms: int
    topic: str | None = None
    type: str | None = None
    names: Sequence[NameServerSeen] = ()
    brokers: Sequence[BrokerSeen] = ()
    denied: Sequence[tuple[str, str]] = ()
    group: GroupSeen | None = None
    message: MessageSeen | None = None
    unseen: Sequence[str] = ()

    @property
    def route(self) -> TopicRoute | None:
        return next((one.route for one in self.names if one.route is not None), None)

    @property
    def masters(self) -> list[BrokerSeen]:
        return [one for one in self.brokers if one.id == MASTER_ID]

    @property
    def is_known(self) -> bool | None:
        """Does any name server have a route of the topic? None: nobody was asked."""
        told = [one.knows for one in self.names if one.knows is not None]
        return any(told) if told else None

    @property
    def is_remote(self) -> bool:
        """Is a name server that answers on another machine than this?"""
        return any(one.is_up and one.place not in ("loopback", "wildcard") for one in self.names)

    def has_right(self, right: str) -> bool:
        """May any queue of the topic be read, or written? True while there is no route."""
        bit = PERM_READ if right == "read" else PERM_WRITE
        return self.route is None or any(data.perm & bit for data in self.route.queues)

    @property
    def ordered_brokers(self) -> set[str]:
        """Those that the order configuration of the topic names."""
        text = (self.route and self.route.order_topic_config) or ""
        return {part.partition(":")[0] for part in text.split(";") if part}
