"""Facts about the servers of a cluster, as `sluice doctor` collects them.

A fact that could not be learned is None, "" or empty, and no rule holds because of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final

from sluicemq.client.admin.diagnose.findings import Fate, Finding, GroupExplained, MessageExplained
from sluicemq.client.admin.diagnose.group_facts import GroupFacts
from sluicemq.model.message import StoredMessage
from sluicemq.model.reachability import Reachability
from sluicemq.model.topic import MASTER_ID, PERM_READ, PERM_WRITE, TopicConfig, TopicRoute
from sluicemq.wire.bodies import ClusterInfo

UNSUPPORTED: Final = 3
"""The response code REQUEST_CODE_NOT_SUPPORTED."""
HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server, or whatever else is at the address that was asked.

    `detail` describes why the server could not be reached. `code` is the response code of a request
    that failed, with its `remark`; 0 otherwise.
    """

    address: str
    reach: Reachability
    detail: str = ""
    code: int = 0
    remark: str = ""

    @property
    def is_up(self) -> bool:
        """Whether the server answered as the kind of server that was expected."""
        return self.reach is Reachability.RESPONDS and not self.code

    @property
    def is_other_kind(self) -> bool:
        """Whether a RocketMQ server of another kind answered: it does not support the request."""
        return self.reach is Reachability.RESPONDS and self.code == UNSUPPORTED

    @property
    def host(self) -> str:
        """The host name or IP address, without port and brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def network(self) -> str:
        """The first three numbers of an IPv4 address: the name of its /24 network."""
        return self.host.rpartition(".")[0]

    @property
    def address_kind(self) -> str:
        """The kind of the address: "wildcard", "loopback", "private" or "public".

        It is "" for a host name other than "localhost".
        """
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
class NameServerFacts(ServerFacts):
    """A name server.

    `has_route` says whether it has a route for the topic, and `creates_topics` whether a broker
    that registers with it creates topics automatically (TBW102). Both are None without a topic.
    """

    cluster: ClusterInfo | None = None
    route: TopicRoute | None = None
    has_route: bool | None = None
    creates_topics: bool | None = None


@dataclass(frozen=True, slots=True)
class BrokerFacts(ServerFacts):
    """One replica of a broker, at the address that a name server has registered for it.

    `name` is "" for a broker at an address that the user gave. `runtime` and `config` are what the
    broker answered to GET_BROKER_RUNTIME_INFO (28) and GET_BROKER_CONFIG (26). `topic` is its
    configuration of the topic. `lag_bytes` is how far its log is behind that of its master.
    `vip_reach` is what was found at its VIP port, two below its port. `clock_ahead_ms` is by how
    much its clock is ahead of this machine's.

    `replica` contains the broker's row of `Admin.replicas` (inSync, role, state) and what it
    reports itself: inSyncSize, and for a slave isLinked and master.
    """

    name: str = ""
    cluster: str = ""
    id: int = MASTER_ID
    vip_reach: Reachability | None = None
    runtime: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    clock_ahead_ms: int | None = None
    topic: TopicConfig | None = None
    lag_bytes: int | None = None
    replica: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name of the broker, or its address if it has none."""
        return self.name or self.address

    @property
    def is_master(self) -> bool:
        """Whether the replica has the id of the master."""
        return self.id == MASTER_ID

    @property
    def is_other_broker(self) -> bool:
        """Whether a broker with another name answers at the address."""
        own_name = self.config.get("brokerName", self.name)
        return bool(self.name) and own_name != self.name

    def number(self, name: str, default: float = -1) -> float:
        """Return a counter or a setting of the broker as a number.

        The counter `name` is preferred to the setting of that name. `default` is returned if the
        broker has neither, or if the value is not a number.
        """
        try:
            return float(self.runtime.get(name, self.config.get(name, "")))
        except ValueError:
            return default

    def percent(self, name: str, default: int) -> float:
        """Return a setting in percent. Brokers accept 75 and 0.75 alike."""
        number = self.number(name, default)
        is_fraction = number <= 1
        return number * 100 if is_fraction else number

    @property
    def is_writable(self) -> bool:
        """Whether brokerPermission allows sends; True if it is unknown."""
        return bool(int(self.number("brokerPermission", 6)) & PERM_WRITE)

    @property
    def is_sync_master(self) -> bool:
        """Whether its sends wait for slaves because of its own configuration.

        It is False where the consensus decides about that (sluiceConsensus).
        """
        is_sync = self.config.get("brokerRole") == "SYNC_MASTER"
        return is_sync and not self.config.get("sluiceConsensus")

    @property
    def disk_percent(self) -> float:
        """How full the fullest disk is, in percent; negative if the broker does not report it."""
        names = [name for name in self.runtime if name.endswith("DiskRatio")]
        return max((self.number(name) for name in names), default=-1.0) * 100

    @property
    def request_waits_ms(self) -> Iterator[tuple[str, float]]:
        """(request queue, how long its first request has waited in ms), for each request queue."""
        for pool in ("send", "pull", "query", "ack"):
            yield pool, self.number(f"{pool}ThreadPoolQueueHeadWaitTimeMills")


def brokers_without_master(brokers: Iterable[BrokerFacts]) -> list[str]:
    """Return the names of the brokers of which no master answers; their messages are unknown."""
    brokers = list(brokers)
    up = {broker.name for broker in brokers if broker.is_master and broker.is_up}
    return sorted({broker.label for broker in brokers if broker.name not in up})


@dataclass(frozen=True, slots=True)
class MessageSearch:
    """The search for the message that `sluice doctor` was asked about.

    `stored` is the message, None if no broker has it; `offset_min` is the first offset of its
    queue. `waiting` is "delayed" or "half" while the message is only in a system topic. `born_ms`
    is the time in the message id, 0 if it has none. `earliest_ms` is the time of the oldest message
    of the brokers that have deleted messages, 0 if none has. `explained` says what happened to the
    message in each group.
    """

    message_id: str
    stored: StoredMessage | None = None
    waiting: str = ""
    offset_min: int = 0
    born_ms: int = 0
    earliest_ms: int = 0
    explained: Sequence[MessageExplained] = ()

    @property
    def is_expired(self) -> bool:
        """Whether the brokers have deleted the message because of its age.

        This is True if the message is older than the oldest stored message, or below the first
        offset of its queue. It is False while the message waits for its delivery time.
        """
        if self.waiting:
            return False
        if self.stored is None:
            return 0 < self.born_ms < self.earliest_ms
        return self.stored.queue_offset < self.offset_min

    @property
    def is_unknown(self) -> bool:
        """Whether no broker has the message, nor can have deleted it."""
        return self.stored is None and not self.waiting and not self.is_expired


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All that `sluice doctor` learned about a cluster and what it was asked about.

    `topic` and `type` are the topic and the type of the messages that producers send to it.
    `denied` contains refusals as (address, remark), and `unseen` a sentence for each fact that
    could not be learned. `known_topics` are the names of all topics. `explained_group` are the
    findings about `group`.
    """

    now_ms: int
    topic: str | None = None
    type: str | None = None
    name_servers: Sequence[NameServerFacts] = ()
    brokers: Sequence[BrokerFacts] = ()
    denied: Sequence[tuple[str, str]] = ()
    group: GroupFacts | None = None
    explained_group: GroupExplained | None = None
    message: MessageSearch | None = None
    unseen: Sequence[str] = ()
    known_topics: Sequence[str] = ()

    @property
    def servers(self) -> list[NameServerFacts | BrokerFacts]:
        """The name servers, then the brokers."""
        return [*self.name_servers, *self.brokers]

    @property
    def masters(self) -> list[BrokerFacts]:
        """The brokers with the id of the master."""
        return [broker for broker in self.brokers if broker.is_master]

    @property
    def route(self) -> TopicRoute | None:
        """The route of the topic, from the first name server that has one."""
        routes = (server.route for server in self.name_servers if server.route is not None)
        return next(routes, None)

    @property
    def has_route(self) -> bool | None:
        """Whether any name server has a route of the topic, None if none was asked for it."""
        answers = [server.has_route for server in self.name_servers if server.has_route is not None]
        return any(answers) if answers else None

    @property
    def is_remote(self) -> bool:
        """Whether a name server that answers is on another machine."""
        return any(
            server.is_up and server.address_kind not in ("loopback", "wildcard")
            for server in self.name_servers
        )

    @property
    def is_readable(self) -> bool:
        """Whether any queue of the topic can be read; True without a route."""
        return self._has_permission(PERM_READ)

    @property
    def is_writable(self) -> bool:
        """Whether any queue of the topic can be written; True without a route."""
        return self._has_permission(PERM_WRITE)

    def _has_permission(self, permission: int) -> bool:
        """Return whether any queue of the topic has a permission bit; True without a route."""
        return self.route is None or any(
            queue_data.perm & permission for queue_data in self.route.queues
        )

    @property
    def ordered_brokers(self) -> set[str]:
        """The names of the brokers in the topic's order configuration; empty without one."""
        if self.route is None:
            return set()
        # The configuration has the form `broker-a:4;broker-b:4`: the number of queues of each.
        entries = (self.route.order_topic_config or "").split(";")
        return {entry.partition(":")[0] for entry in entries if entry}

    @property
    def findings_of_explain(self) -> list[Finding]:
        """Findings about the group, and about the message in groups that did not consume it."""
        findings: list[Finding] = []
        if self.message is not None:
            for explained in self.message.explained:
                if explained.fate is not Fate.CONSUMED:
                    findings += explained.findings
        if self.explained_group is not None:
            findings += self.explained_group.findings
        return findings
