"""Who serves what: brokers, their addresses, their topics. Pure, in memory only.

    topic -> broker name -> QueueData            how many queues, which permission
    broker name -> cluster, id -> address        id 0 is the master
    (cluster, address) -> Registration, time     what it said of itself, and when

Times are handed in, in milliseconds of a clock that never goes back, so that a corrected wall clock
expires nobody; connections are opaque. Rules: spec/namesrv.md §2-§5. One rule
of the real name server is left out on purpose: it refuses for ever a broker whose whole table has
exactly one topic. And a broker whose write permission an operator has wiped (205) keeps it wiped
until 327, or until its master comes anew: there the next topic that somebody creates gives it back,
and a broker that is being drained is written to again.

Which address of a broker a client is told (`reachable_address`): one that it can reach the way it
came in.
A broker that knows itself as 127.0.0.1, as 0.0.0.0, or by the address of another network (docker,
NAT, a second interface) is RocketMQ's classic trap: clients connect to the name server and then
hang on the broker. Two facts help: from where the broker's registration came (`Origin.source`),
and at which of our addresses the client reached us. Cases, the first that fits:

| the broker registered                   | and                                         | told    |
|-----------------------------------------|---------------------------------------------|---------|
| with brokerIP1 (our broker), or a name  |                                             | that    |
| and listens on loopback alone           |                                             | that    |
| loopback, from this host                | the client is on this host                  | that    |
| loopback or 0.0.0.0, from this host     |                                             | our own |
| loopback or 0.0.0.0, from elsewhere     |                                             | source  |
| a neighbour of the client               |                                             | that    |
| another network, from this host         | it listens where the client reached us      | our own |
| another private network, from elsewhere | the client comes from the same address      | that    |
| another private network, from elsewhere | the source is the client's neighbour, or    | source  |
|                                         | the source is none of its addresses (NAT)   |         |
| anything else                           |                                             | that    |

The port is kept. What cannot be known here (ports published by docker under another number, a NAT
between the client and us) is what brokerIP1 is for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.model.addresses import (
    is_loopback,
    is_private,
    is_wildcard,
    join,
    parse_address,
    same_address,
    same_network,
)
from sluicemq.model.ids import parse_host
from sluicemq.model.topic import (
    MASTER_ID,
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicRoute,
)
from sluicemq.wire.headers import RegisterBrokerResponse

TIMEOUT_MS = 120_000
"""How long a broker that does not say otherwise may stay silent."""
MEMBER_SYNC_PREFIX = "rmq_sys_SYNC_BROKER_MEMBER_"


class Origin(NamedTuple):
    """What a registration tells about an address besides the address."""

    source: str
    """The address it came from."""
    reached: str
    """The address of ours it came to."""
    fixed: bool = False
    interfaces: tuple[str, ...] = ()
    """Where our broker says that it listens; empty for others."""

    @property
    def on_this_host(self) -> bool:
        return is_loopback(self.source) or same_address(self.source, self.reached)

    def listens_at(self, address: str) -> bool:
        return any(same_address(address, own) for own in self.interfaces)


class Way(NamedTuple):
    """How a client came in."""

    remote: str
    local: str

    @property
    def on_this_host(self) -> bool:
        return is_loopback(self.remote) or same_address(self.remote, self.local)


@dataclass(frozen=True, slots=True)
class Registration:
    """What a broker says of itself. `acting_master_enable` None: a broker before 5.0.

    `topics` may hold only those that changed, unless `is_complete`: then the broker's other topics
    are forgotten.
    """

    cluster: str
    broker: str
    broker_id: int
    address: str
    ha_address: str = ""
    timeout_ms: int = TIMEOUT_MS
    acting_master_enable: bool | None = None
    zone: str | None = None
    topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    is_complete: bool = False
    version: DataVersion = field(default_factory=DataVersion)
    origin: Origin | None = None
    connection: object = None


class SmallestChanged(NamedTuple):
    """The smallest living id of a broker name is another one: what 905 says, and to whom.
    `ha_address` is that of one that came, `offline_address` that of one that left."""

    broker_id: int
    address: str
    ha_address: str | None
    offline_address: str | None
    told: tuple[str, ...]


class RouteTable:
    """All brokers and topics one name server knows. `on_smallest_changed` hears which replica
    of a broker name is the smallest now."""

    def __init__(self) -> None:
        self.on_smallest_changed: Callable[[SmallestChanged], None] = lambda _change: None
        self._drained: set[str] = set()
        """Brokers whose write permission was wiped."""
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._brokers: dict[str, BrokerData] = {}
        self._clusters: dict[str, set[str]] = {}
        self._live: dict[tuple[str, str], tuple[Registration, int]] = {}

    # ---------------------------------------------------------------------------- brokers

    def register(self, new: Registration, now_ms: int) -> RegisterBrokerResponse:
        """Take over what a broker says of itself."""
        known = self._brokers.get(new.broker)
        # A slave that became master (or the other way) keeps its address under one id only.
        addresses = {
            broker_id: address
            for broker_id, address in (known.addresses if known else {}).items()
            if address != new.address or broker_id == new.broker_id
        }
        holder = addresses.get(new.broker_id)
        rival, _ = self._live.get((new.cluster, holder or ""), (new, 0))
        is_late = rival.version.state_version > new.version.state_version and holder != new.address
        if not is_late:
            addresses[new.broker_id] = new.address
        self._clusters.setdefault(new.cluster, set()).add(new.broker)
        self._brokers[new.broker] = BrokerData(
            new.broker,
            known.cluster if known else new.cluster,
            dict(sorted(addresses.items())),
            bool(new.acting_master_enable),
            new.zone,
        )
        if is_late:
            self._live.pop((new.cluster, new.address), None)
            return RegisterBrokerResponse()
        is_prime_slave = (
            new.acting_master_enable is not None
            and new.broker_id != MASTER_ID
            and new.broker_id == min(addresses)
        )
        if new.broker_id == MASTER_ID and holder is None:
            self._drained.discard(new.broker)
        if new.broker_id == MASTER_ID or is_prime_slave:
            self._take_topics(new, everything=holder is None, read_only=is_prime_slave)
        self._live[new.cluster, new.address] = replace(new, topics={}), now_ms
        if known is not None and known.addresses and new.broker_id < min(known.addresses):
            others = tuple(one for one in addresses.values() if one != new.address)
            told = others or (new.address,)
            self.on_smallest_changed(
                SmallestChanged(new.broker_id, new.address, new.ha_address, None, told)
            )
        address = addresses.get(MASTER_ID, "")
        master, _ = self._live.get((new.cluster, address), (None, 0))
        if new.broker_id == MASTER_ID or master is None:
            return RegisterBrokerResponse()
        return RegisterBrokerResponse(ha_address=master.ha_address, master_address=address)

    def unregister(self, cluster: str, broker: str, address: str) -> None:
        """Forget an address; with its last one the broker and its topics go."""
        self._live.pop((cluster, address), None)
        entry = self._brokers.get(broker)
        if entry is None:
            return
        left = {number: one for number, one in entry.addresses.items() if one != address}
        if left:
            self._brokers[broker] = replace(entry, addresses=left)
            first, *_ = left.items()
            if entry.acting_master_enable and first[0] != min(entry.addresses):
                told = tuple(left.values())
                self.on_smallest_changed(SmallestChanged(*first, None, address, told))
            if entry.acting_master_enable and MASTER_ID not in left:
                self._change_permissions(broker, lambda perm: perm & ~PERM_WRITE)
            return
        del self._brokers[broker]
        self._drained.discard(broker)
        for name, brokers in tuple(self._clusters.items()):
            brokers.discard(broker)
            if not brokers:
                del self._clusters[name]
        for topic in self.topics():
            self._drop_queues(topic, broker)

    def refresh(self, cluster: str, address: str, now_ms: int) -> None:
        """A sign of life without news."""
        if (cluster, address) in self._live:
            self._live[cluster, address] = self._live[cluster, address][0], now_ms

    def expire(self, now_ms: int) -> list[Registration]:
        """Forget brokers that have been silent too long; they are returned."""
        return self._forget(lambda live, updated_ms: updated_ms + live.timeout_ms < now_ms)

    def connection_lost(self, connection: object) -> list[Registration]:
        """Forget the brokers whose latest registration came over this connection."""
        return self._forget(lambda live, _: live.connection is connection)

    def version_of(self, cluster: str, address: str) -> DataVersion | None:
        """The edition of its topics that a broker last registered."""
        live = self._live.get((cluster, address))
        return None if live is None else live[0].version

    def origin_of(self, cluster: str, address: str) -> Origin | None:
        """What is known about an address besides the address."""
        live = self._live.get((cluster, address))
        return None if live is None else live[0].origin

    def wipe_write_permission(self, broker: str) -> int:
        """Nobody writes to this broker any more; the number of its topics."""
        if broker in self._brokers:
            self._drained.add(broker)
        return self._change_permissions(broker, lambda perm: perm & ~PERM_WRITE)

    def add_write_permission(self, broker: str) -> int:
        """The inverse, which gives read and write whatever stood there before."""
        self._drained.discard(broker)
        return self._change_permissions(broker, lambda _perm: PERM_READ | PERM_WRITE)

    # ---------------------------------------------------------------------------- topics

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> None:
        """Add or replace a topic's queues; stops at a broker that is not known."""
        for queue in queues:
            if queue.broker not in self._brokers:
                return
            perm = queue.perm & self._allowed(queue.broker)
            self._topics.setdefault(topic, {})[queue.broker] = replace(queue, perm=perm)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forget a topic, on one cluster's brokers or on all."""
        if cluster is None:
            self._topics.pop(topic, None)
            return
        for broker in self._clusters.get(cluster, ()):
            self._drop_queues(topic, broker)

    def route(self, topic: str, *, acting_master: bool = False) -> TopicRoute | None:
        """Where a topic lives; None when no broker that serves it is known.

        With `acting_master` a slave stands in for a missing master where its broker allows it.
        """
        queues = self._topics.get(topic, {})
        acting_master = acting_master and not topic.startswith(MEMBER_SYNC_PREFIX)
        known = sorted(name for name in queues if name in self._brokers)
        if not known:
            return None
        brokers = []
        for name in known:
            data, addresses = self._brokers[name], self._brokers[name].addresses
            is_led = MASTER_ID in addresses or bool(queues[name].perm & PERM_WRITE)
            if acting_master and data.acting_master_enable and not is_led:
                first, *others = addresses.items()
                data = replace(data, addresses={MASTER_ID: first[1], **dict(others)})
            brokers.append(data)
        return TopicRoute(tuple(brokers), tuple(queues[name] for name in sorted(queues)))

    def topics(self) -> list[str]:
        return list(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        brokers = self._clusters.get(cluster, set())
        return [topic for topic, queues in self._topics.items() if not brokers.isdisjoint(queues)]

    def topics_with_flags(self, wanted: Callable[[int], bool]) -> list[str]:
        """The topics whose system flags (those of any one broker) are wanted."""
        return [
            topic
            for topic, queues in self._topics.items()
            if any(wanted(queue.sys_flag) for queue in queues.values())
        ]

    # ---------------------------------------------------------------------------- clusters

    def clusters(self) -> dict[str, list[str]]:
        """Cluster -> names of its brokers."""
        return {cluster: sorted(brokers) for cluster, brokers in sorted(self._clusters.items())}

    def brokers(self) -> list[BrokerData]:
        return [self._brokers[name] for name in sorted(self._brokers)]

    def broker(self, name: str) -> BrokerData | None:
        return self._brokers.get(name)

    # ---------------------------------------------------------------------------- inside

    def _take_topics(self, new: Registration, *, everything: bool, read_only: bool) -> None:
        changed = everything or self.version_of(new.cluster, new.address) != new.version
        is_wiped = read_only and bool(new.acting_master_enable)
        allowed = ~PERM_WRITE if is_wiped else self._allowed(new.broker)
        for topic, config in new.topics.items():
            queues = self._topics.setdefault(topic, {})
            if changed or new.broker not in queues:
                perm = config.perm & allowed
                queues[new.broker] = QueueData(
                    new.broker, config.read_queues, config.write_queues, perm, config.sys_flag
                )
        if new.is_complete:
            for topic in [t for t, q in self._topics.items() if new.broker in q]:
                if topic not in new.topics:
                    self._drop_queues(topic, new.broker)

    def _allowed(self, broker: str) -> int:
        return ~PERM_WRITE if broker in self._drained else ~0

    def _forget(self, is_gone: Callable[[Registration, int], bool]) -> list[Registration]:
        gone = [live for live, updated_ms in self._live.values() if is_gone(live, updated_ms)]
        for live in gone:
            self.unregister(live.cluster, live.broker, live.address)
        return gone

    def _drop_queues(self, topic: str, broker: str) -> None:
        queues = self._topics.get(topic, {})
        queues.pop(broker, None)
        if not queues:
            self._topics.pop(topic, None)

    def _change_permissions(self, broker: str, change: Callable[[int], int]) -> int:
        count = 0
        for queues in self._topics.values():
            if broker in queues:
                queues[broker] = replace(queues[broker], perm=change(queues[broker].perm))
                count += 1
        return count


def in_zone(route: TopicRoute, zone: str) -> TopicRoute:
    """Only the brokers of a zone and those without a master (zone mode, spec/namesrv.md §5)."""
    kept = tuple(
        data
        for data in route.brokers
        if MASTER_ID not in data.addresses or (data.zone or "").lower() == zone.lower()
    )
    left = {data.broker for data in route.brokers} - {data.broker for data in kept}
    return replace(
        route,
        brokers=kept,
        queues=tuple(queue for queue in route.queues if queue.broker not in left),
    )


def reachable_address(registered: str, origin: Origin | None, way: Way) -> tuple[str, str]:
    """`host:port` as registered -> (`host:port` for this client, why; "" when it stays)."""
    try:
        host = parse_host(registered)
    except ProtocolError:
        return registered, ""
    if origin is None or origin.fixed:
        return registered, ""
    if origin.interfaces and all(is_loopback(own) for own in origin.interfaces):
        return registered, ""
    is_local = is_loopback(host.address) or is_wildcard(host.address)
    instead = _instead_of_local if is_local else _instead_of_foreign
    address, reason = instead(host.address, origin, way)
    if same_address(address, host.address):
        return registered, ""
    return join(str(parse_address(address) or address), host.port), reason


def _instead_of_local(address: str, origin: Origin, way: Way) -> tuple[str, str]:
    if not origin.on_this_host:
        return origin.source, "the broker's registration came from there"
    if is_loopback(address) and way.on_this_host:
        return address, ""
    return way.local, "the broker is on the name server's machine, which the client reached there"


def _instead_of_foreign(address: str, origin: Origin, way: Way) -> tuple[str, str]:
    if parse_address(address) is None or same_network(address, way.remote):
        return address, ""
    if origin.on_this_host:
        if origin.listens_at(way.local):
            return way.local, "the broker listens where the client reached the name server"
        return address, ""
    if not is_private(address) or same_address(origin.source, way.remote):
        return address, ""
    if same_network(origin.source, way.remote):
        return origin.source, "the broker's registration came from the client's own network"
    if origin.interfaces and not origin.listens_at(origin.source):
        return origin.source, "the broker is behind an address translation"
    return address, ""
