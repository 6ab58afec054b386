"""The table of who serves what: brokers, their addresses, their topics. Pure, in memory only.

    topic -> broker name -> QueueData            how many queues, which permission
    broker name -> cluster, id -> address        id 0 is the master
    (cluster, address) -> Registration, time     what it said of itself, and when

Times are handed in, in milliseconds of a clock that never goes back, so that a corrected wall clock
expires nobody; connections are opaque. Rules: spec/namesrv.md §2-§5. One rule
of the real name server is left out on purpose: it refuses for ever a broker whose whole table has
exactly one topic.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

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
from sluicemq.nameserver.reachable import Origin

TIMEOUT_MS = 120_000
"""How long a broker that does not say otherwise may stay silent."""
MEMBER_SYNC_PREFIX = "rmq_sys_SYNC_BROKER_MEMBER_"


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


@dataclass(frozen=True, slots=True)
class MasterAddresses:
    """What a slave is told when it registers; both None for a master."""

    ha_address: str | None = None
    address: str | None = None


@dataclass(slots=True)
class _Broker:
    cluster: str
    addresses: dict[int, str] = field(default_factory=dict)
    acting_master_enable: bool = False
    zone: str | None = None


class RouteTable:
    """All brokers and topics one name server knows."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._brokers: dict[str, _Broker] = {}
        self._clusters: dict[str, set[str]] = {}
        self._live: dict[tuple[str, str], tuple[Registration, int]] = {}

    # ---------------------------------------------------------------------------- brokers

    def register(self, new: Registration, now_ms: int) -> MasterAddresses:
        """Take over what a broker says of itself."""
        first = new.broker not in self._brokers
        broker = self._brokers.setdefault(new.broker, _Broker(new.cluster))
        self._clusters.setdefault(new.cluster, set()).add(new.broker)
        broker.acting_master_enable = bool(new.acting_master_enable)
        broker.zone = new.zone
        # A slave that became master (or the other way) keeps its address under one id only.
        for broker_id in [i for i, a in broker.addresses.items() if a == new.address]:
            if broker_id != new.broker_id:
                del broker.addresses[broker_id]
        holder = broker.addresses.get(new.broker_id)
        rival, _ = self._live.get((new.cluster, holder or ""), (new, 0))
        if rival.version.state_version > new.version.state_version and holder != new.address:
            self._live.pop((new.cluster, new.address), None)
            return MasterAddresses()
        first = first or new.broker_id not in broker.addresses
        broker.addresses[new.broker_id] = new.address
        is_prime_slave = (
            new.acting_master_enable is not None
            and new.broker_id != MASTER_ID
            and new.broker_id == min(broker.addresses)
        )
        if new.broker_id == MASTER_ID or is_prime_slave:
            self._take_topics(new, everything=first, read_only=is_prime_slave)
        self._live[new.cluster, new.address] = replace(new, topics={}), now_ms
        address = broker.addresses.get(MASTER_ID, "")
        master, _ = self._live.get((new.cluster, address), (None, 0))
        if new.broker_id == MASTER_ID or master is None:
            return MasterAddresses()
        return MasterAddresses(master.ha_address, address)

    def unregister(self, cluster: str, broker: str, address: str) -> None:
        """Forget an address; with its last one the broker and its topics go."""
        self._live.pop((cluster, address), None)
        entry = self._brokers.get(broker)
        if entry is None:
            return
        for broker_id in [i for i, a in entry.addresses.items() if a == address]:
            del entry.addresses[broker_id]
        if not entry.addresses:
            self._remove_broker(broker, entry)
        elif entry.acting_master_enable and MASTER_ID not in entry.addresses:
            self._change_permissions(broker, lambda perm: perm & ~PERM_WRITE)

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
        return self._change_permissions(broker, lambda perm: perm & ~PERM_WRITE)

    def add_write_permission(self, broker: str) -> int:
        """The inverse, which gives read and write whatever stood there before."""
        return self._change_permissions(broker, lambda _perm: PERM_READ | PERM_WRITE)

    # ---------------------------------------------------------------------------- topics

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> None:
        """Add or replace a topic's queues; stops at a broker that is not known."""
        for queue in queues:
            if queue.broker not in self._brokers:
                return
            self._topics.setdefault(topic, {})[queue.broker] = queue

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
        known = sorted(name for name in queues if name in self._brokers)
        if not known:
            return None
        brokers = tuple(self._broker_data(name) for name in known)
        if acting_master and not topic.startswith(MEMBER_SYNC_PREFIX):
            brokers = tuple(_with_acting_master(data, queues[data.broker]) for data in brokers)
        return TopicRoute(brokers, tuple(queues[name] for name in sorted(queues)))

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
        return [self._broker_data(name) for name in sorted(self._brokers)]

    def broker(self, name: str) -> BrokerData | None:
        return self._broker_data(name) if name in self._brokers else None

    # ---------------------------------------------------------------------------- inside

    def _take_topics(self, new: Registration, *, everything: bool, read_only: bool) -> None:
        changed = everything or self.version_of(new.cluster, new.address) != new.version
        wipe = read_only and bool(new.acting_master_enable)
        for topic, config in new.topics.items():
            queues = self._topics.setdefault(topic, {})
            if changed or new.broker not in queues:
                perm = config.perm & ~PERM_WRITE if wipe else config.perm
                queues[new.broker] = QueueData(
                    new.broker, config.read_queues, config.write_queues, perm, config.sys_flag
                )
        if new.is_complete:
            for topic in [t for t, q in self._topics.items() if new.broker in q]:
                if topic not in new.topics:
                    self._drop_queues(topic, new.broker)

    def _forget(self, is_gone: Callable[[Registration, int], bool]) -> list[Registration]:
        gone = [live for live, updated_ms in self._live.values() if is_gone(live, updated_ms)]
        for live in gone:
            self.unregister(live.cluster, live.broker, live.address)
        return gone

    def _remove_broker(self, name: str, entry: _Broker) -> None:
        del self._brokers[name]
        for cluster in (
            entry.cluster,
            *[c for c, names in self._clusters.items() if name in names],
        ):
            names = self._clusters.get(cluster, set())
            names.discard(name)
            if not names:
                self._clusters.pop(cluster, None)
        for topic in [t for t, queues in self._topics.items() if name in queues]:
            self._drop_queues(topic, name)

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

    def _broker_data(self, name: str) -> BrokerData:
        entry = self._brokers[name]
        return BrokerData(
            name, entry.cluster, dict(sorted(entry.addresses.items())),
            entry.acting_master_enable, entry.zone,
        )  # fmt: skip


def _with_acting_master(data: BrokerData, queue: QueueData) -> BrokerData:
    """The smallest id presented as 0, when the broker allows it and nobody may write there."""
    if not data.acting_master_enable or MASTER_ID in data.addresses or queue.perm & PERM_WRITE:
        return data
    smallest = min(data.addresses)
    addresses = {MASTER_ID: data.addresses[smallest]}
    addresses.update((i, a) for i, a in data.addresses.items() if i != smallest)
    return replace(data, addresses=addresses)


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
