"""The route table of a name server: brokers, their addresses and their topics.

The table is pure: it is in memory only and does no I/O.

    topic -> broker name -> QueueData            number of queues and permission
    broker name -> cluster, id -> address        id 0 is the master
    (cluster, address) -> Registration, time     the last registration, and when it was renewed

Times are passed in, in milliseconds of a monotonic clock, so that a correction of the wall clock
expires no broker. Connections are opaque objects. The rules are RocketMQ's (spec/namesrv.md §2-§5),
with two exceptions. RocketMQ's name server refuses for ever a broker whose whole table has exactly
one topic; this one does not. And if an operator wipes the write permission of a broker
(WIPE_WRITE_PERM_OF_BROKER, 205), it stays wiped until ADD_WRITE_PERM_OF_BROKER (327), or until the
broker's master registers after an absence. In RocketMQ the next topic that is created gives the
permission back, so that a broker which is being drained receives messages again.

A broker may have a hundred thousand topics. So methods that change them return a generator of the
type `Slices`, which changes SLICE_TOPICS topics in each step. The server answers other requests
between two steps. Routes never contain a broker that is gone, even while its topics are still being
removed.

`reachable_address` selects the address of a broker that a client is told. A broker that knows its
address as 127.0.0.1, as 0.0.0.0, or as an address in another network (docker, NAT, a second
interface) is a common problem of RocketMQ: clients connect to the name server, and then cannot
connect to the broker. Two facts help: the address from which the broker registered (its *source*,
`Origin.source_address`), and the local address at which the client reached the name server. The
first case that matches applies:

| the broker registered                   | and                                       | result     |
|-----------------------------------------|-------------------------------------------|------------|
| with brokerIP1 (SluiceMQ), or a name    |                                           | registered |
| and listens on loopback only            |                                           | registered |
| loopback, from this host                | the client is on this host                | registered |
| loopback or 0.0.0.0, from this host     |                                           | local      |
| loopback or 0.0.0.0, from elsewhere     |                                           | source     |
| an address in the client's network      |                                           | registered |
| another network, from this host         | it listens on the local address           | local      |
| another private network, from elsewhere | the client has the same source address    | registered |
| another private network, from elsewhere | the source is in the client's network, or | source     |
|                                         | is not an address of the broker (NAT)     |            |
| anything else                           |                                           | registered |

The port never changes. What the name server cannot know must be configured by brokerIP1: ports that
docker publishes under another number, and a NAT between clients and name server.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeVar

from sluicemq.errors import ProtocolError
from sluicemq.model.addresses import (
    format_address,
    is_loopback,
    is_private,
    is_same_address,
    is_same_network,
    is_wildcard,
    parse_address,
)
from sluicemq.model.ids import parse_host
from sluicemq.model.system_names import SYNC_MEMBER_TOPIC_PREFIX
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
from sluicemq.wire.registration import RegisterBrokerResponse

T = TypeVar("T")
TIMEOUT_MS = 120_000
"""The time after which a silent broker is removed, if its registration names no other time."""


class Origin(NamedTuple):
    """Where a registration came from, and what it says about the broker's address."""

    source_address: str
    """The address from which the broker connected."""
    local_address: str
    """The address of the name server to which the broker connected."""
    is_fixed: bool = False
    """Whether the broker's address is configured by brokerIP1, so that it must not be changed."""
    interfaces: tuple[str, ...] = ()
    """The addresses on which a SluiceMQ broker listens; empty for RocketMQ's brokers."""

    @property
    def is_on_this_host(self) -> bool:
        """Whether the broker runs on the name server's host."""
        return is_loopback(self.source_address) or is_same_address(
            self.source_address, self.local_address
        )

    def listens_on(self, address: str) -> bool:
        """Return whether the broker has said that it listens on `address`."""
        return any(is_same_address(address, own) for own in self.interfaces)


class ClientConnection(NamedTuple):
    """The two addresses of a client's connection to the name server."""

    remote_address: str
    """The client's address."""
    local_address: str
    """The address of the name server to which the client connected."""

    @property
    def is_on_this_host(self) -> bool:
        """Whether the client runs on the name server's host."""
        return is_loopback(self.remote_address) or is_same_address(
            self.remote_address, self.local_address
        )


@dataclass(frozen=True, slots=True)
class Registration:
    """What one replica of a broker registers about itself."""

    cluster: str
    broker: str
    """The broker name."""
    broker_id: int
    """The id of the replica; 0 for the master."""
    address: str
    """The host:port at which clients connect."""
    ha_address: str = ""
    """The host:port at which slaves connect."""
    timeout_ms: int = TIMEOUT_MS
    """The time after which the replica is removed if it stays silent."""
    acting_master_enable: bool | None = None
    """Whether a slave may act for a missing master; None for a broker before 5.0."""
    zone: str | None = None
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    """The broker's topics, or only those that have changed."""
    is_complete: bool = False
    """Whether `topics` has all topics, so that the broker's other topics are removed."""
    version: DataVersion = field(default_factory=DataVersion)
    """The version of the broker's topic table."""
    origin: Origin | None = None
    connection: object = None
    """The connection over which the registration came."""


class SmallestIdChange(NamedTuple):
    """A change of the smallest id among the live replicas of a broker name.

    Replicas are notified of it by NOTIFY_MIN_BROKER_ID_CHANGE (905).
    """

    broker_id: int
    """The smallest id now."""
    address: str
    """The address of the replica with that id."""
    ha_address: str | None
    """Its HA address if it has just registered; None if another replica has left."""
    offline_address: str | None
    """The address of the replica that has left; None if none has."""
    notified_addresses: tuple[str, ...]
    """The addresses of the replicas to notify."""


SLICE_TOPICS: Final = 256
"""The number of topics that one step changes. It takes about 0.3 ms."""

SHRINK_TOPICS_MIN: Final = 10_000
"""The number of topics of a removed broker from which on the topic table is copied to shrink it."""

BROKERS_MAX: Final = 4096
"""The number of addresses that may be registered."""

Slices = Generator[None, None, T]
"""Work that is done in steps, one at each `next`. It returns a T at its end."""


def run_all_slices(slices: Slices[T]) -> T:
    """Do all steps of the work, and return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def empty_in_slices(topics: dict[str, TopicConfig]) -> Slices[None]:
    """Empty a table of topics in steps, because freeing a hundred thousand objects takes time."""
    while topics:
        topics.popitem()
        if topics and len(topics) % SLICE_TOPICS == 0:
            yield


class RouteTable:
    """All brokers and topics that one name server knows."""

    def __init__(self, entries_max: int = 1_000_000) -> None:
        """Create an empty table for `entries_max` topics of all brokers together."""
        self.on_smallest_changed: Callable[[SmallestIdChange], None] = lambda _change: None
        """Called when another replica of a broker name has the smallest id."""
        self._entries_max = entries_max
        self.entry_count = 0
        """The number of topics of all brokers; a topic of two brokers counts twice."""
        self._write_wiped: set[str] = set()
        """The brokers whose write permission an operator has wiped."""
        self._topics: dict[str, dict[str, QueueData]] = {}
        """Queues by topic and broker."""
        self._served: dict[str, dict[str, QueueData]] = {}
        """The same queues by broker and topic."""
        self._brokers: dict[str, BrokerData] = {}
        self._clusters: dict[str, set[str]] = {}
        """The brokers of each cluster."""
        self._clusters_of: dict[str, set[str]] = {}
        """The clusters of each broker."""
        self._live: dict[tuple[str, str], tuple[Registration, int]] = {}
        """The latest registration of each (cluster, address), and the time of its last renewal."""
        self._connections: dict[object, dict[tuple[str, str], None]] = {}
        """For each connection: the (cluster, address) whose latest registration it has sent."""
        self._unfinished: dict[str, Slices[None]] = {}
        """For each broker: the steps of its latest registration that have not been done."""

    # ---------------------------------------------------------------------------- brokers

    def register(self, new: Registration, now_ms: int) -> RegisterBrokerResponse:
        """Apply a registration at once, and return the answer. Raises ProtocolError above limits.

        The answer names the master if a slave registers.
        """
        return run_all_slices(self.register_in_slices(new, now_ms))

    def register_in_slices(self, new: Registration, now_ms: int) -> Slices[RegisterBrokerResponse]:
        """Apply a registration in steps. After the first one the broker is known.

        The other steps apply its topics. Otherwise as `register`.
        """
        self._check_room(new)
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
        self._clusters_of.setdefault(new.broker, set()).add(new.cluster)
        self._brokers[new.broker] = BrokerData(
            new.broker,
            known.cluster if known else new.cluster,
            dict(sorted(addresses.items())),
            bool(new.acting_master_enable),
            new.zone,
        )
        if is_late:
            # The address that has the id now registered a later state, so `new` is an old process.
            self._drop_live(new.cluster, new.address)
            return RegisterBrokerResponse()
        is_prime_slave = (
            new.acting_master_enable is not None
            and new.broker_id != MASTER_ID
            and new.broker_id == min(addresses)
        )
        if new.broker_id == MASTER_ID and holder is None:
            self._write_wiped.discard(new.broker)
        is_changed = holder is None or self.version_of(new.cluster, new.address) != new.version
        self._put_live(new, now_ms)
        if new.broker_id == MASTER_ID or is_prime_slave:
            yield from self._apply_topics_in_turn(
                new, is_changed=is_changed, is_read_only=is_prime_slave
            )
        if known is not None and known.addresses and new.broker_id < min(known.addresses):
            others = tuple(one for one in addresses.values() if one != new.address)
            told = others or (new.address,)
            self.on_smallest_changed(
                SmallestIdChange(new.broker_id, new.address, new.ha_address, None, told)
            )
        address = addresses.get(MASTER_ID, "")
        master, _ = self._live.get((new.cluster, address), (None, 0))
        if new.broker_id == MASTER_ID or master is None:
            return RegisterBrokerResponse()
        return RegisterBrokerResponse(ha_address=master.ha_address, master_address=address)

    def unregister(self, cluster: str, broker: str, address: str) -> None:
        """Remove an address at once; with its last address a broker and its topics are removed."""
        run_all_slices(self.unregister_in_slices(cluster, broker, address))

    def unregister_in_slices(self, cluster: str, broker: str, address: str) -> Slices[None]:
        """Remove an address in steps. After the first step the address is gone from routes.

        The other steps change or remove the broker's topics. Otherwise as `unregister`.
        """
        self._drop_live(cluster, address)
        entry = self._brokers.get(broker)
        if entry is None:
            return
        left = {number: one for number, one in entry.addresses.items() if one != address}
        if left:
            self._brokers[broker] = replace(entry, addresses=left)
            first, *_ = left.items()
            if entry.acting_master_enable and first[0] != min(entry.addresses):
                told = tuple(left.values())
                self.on_smallest_changed(SmallestIdChange(*first, None, address, told))
            if entry.acting_master_enable and MASTER_ID not in left:
                yield from self._change_permissions(broker, lambda perm: perm & ~PERM_WRITE)
            return
        yield from self._remove_broker(broker)

    def _remove_broker(self, broker: str) -> Slices[None]:
        """Remove a broker whose last address is gone, and its topics in steps."""
        del self._brokers[broker]
        self._write_wiped.discard(broker)
        for name in self._clusters_of.pop(broker, ()):
            self._clusters[name].discard(broker)
            if not self._clusters[name]:
                del self._clusters[name]
        served = self._served.pop(broker, {})
        number = len(served)
        while served:
            topic, queue = served.popitem()
            # If the broker has registered again between two steps, its queue is another object.
            if self._topics.get(topic, {}).get(broker) is queue:
                self._drop_queues(topic, broker)
            if served and len(served) % SLICE_TOPICS == 0:
                yield
        if number > SHRINK_TOPICS_MIN and len(self._topics) < number // 4:
            # A dict never shrinks by itself.
            self._topics = dict(self._topics)

    def record_heartbeat(self, cluster: str, address: str, now_ms: int) -> None:
        """Renew the registration of an address. Do nothing if the address is not registered."""
        if (cluster, address) in self._live:
            self._live[cluster, address] = self._live[cluster, address][0], now_ms

    def find_expired(self, now_ms: int) -> list[Registration]:
        """Return registrations that were not renewed within their timeouts.

        The caller must pass them to `unregister_lost`.
        """
        return [
            live
            for live, updated_ms in self._live.values()
            if updated_ms + live.timeout_ms < now_ms
        ]

    def registered_by(self, connection: object) -> list[Registration]:
        """Return the registrations over a connection that are the latest of their addresses."""
        return [self._live[key][0] for key in self._connections.get(connection, ())]

    def unregister_lost(self, gone: Iterable[Registration]) -> Slices[None]:
        """Remove addresses in steps, except those that have registered again since."""
        for live in gone:
            if self._live.get((live.cluster, live.address), (None, 0))[0] is live:
                yield from self.unregister_in_slices(live.cluster, live.broker, live.address)
            yield

    def version_of(self, cluster: str, address: str) -> DataVersion | None:
        """Return the version of the topic table that an address last registered, or None."""
        live = self._live.get((cluster, address))
        return None if live is None else live[0].version

    def origin_of(self, cluster: str, address: str) -> Origin | None:
        """Return the origin of the latest registration of an address, or None."""
        live = self._live.get((cluster, address))
        return None if live is None else live[0].origin

    def wipe_write_permission(self, broker: str) -> Slices[int]:
        """Remove the write permission of all topics of a broker, in steps.

        The permission stays removed until `add_write_permission`, or until the broker's master
        registers after an absence. The steps return the number of topics.
        """
        if broker in self._brokers:
            self._write_wiped.add(broker)
        return self._change_permissions(broker, lambda perm: perm & ~PERM_WRITE)

    def add_write_permission(self, broker: str) -> Slices[int]:
        """Give all topics of a broker read and write permission, in steps.

        The steps return the number of topics.
        """
        self._write_wiped.discard(broker)
        return self._change_permissions(broker, lambda _perm: PERM_READ | PERM_WRITE)

    # ---------------------------------------------------------------------------- topics

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> None:
        """Add or replace queues of a topic. Stop at the first queue whose broker is unknown."""
        for queue in queues:
            if queue.broker not in self._brokers:
                return
            perm = queue.perm & self._permission_mask(queue.broker)
            self._put_queues(topic, replace(queue, perm=perm))

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic from the brokers of a cluster; None means from all brokers."""
        served_by = self._topics.get(topic, {})
        members = served_by if cluster is None else self._clusters.get(cluster, set())
        for broker in [name for name in served_by if name in members]:
            self._drop_queues(topic, broker)

    def find_route(self, topic: str, *, acting_master: bool = False) -> TopicRoute | None:
        """Return the route of a topic; None if no known broker has the topic.

        With `acting_master`, the slave with the smallest id has id 0 in the route if the master is
        missing and its broker allows an acting master.
        """
        queues = self._topics.get(topic, {})
        acting_master = acting_master and not topic.startswith(SYNC_MEMBER_TOPIC_PREFIX)
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
        return TopicRoute(tuple(brokers), tuple(queues[name] for name in known))

    def list_topics(self) -> list[str]:
        """Return the names of all topics."""
        return list(self._topics)

    def list_topics_of_cluster(self, cluster: str) -> list[str]:
        """Return the names of the topics of all brokers of a cluster."""
        found = dict[str, QueueData]()
        for broker in self._clusters.get(cluster, ()):
            found |= self._served.get(broker, {})
        return list(found)

    def find_topics_by_flags(self, wanted: Callable[[int], bool]) -> Slices[list[str]]:
        """Find, in steps, the topics whose system flags on any broker are `wanted`.

        The steps return the names of the topics.
        """
        found = []
        for count, topic in enumerate(list(self._topics), 1):
            if any(wanted(queue.sys_flag) for queue in self._topics.get(topic, {}).values()):
                found.append(topic)
            if count % SLICE_TOPICS == 0:
                yield
        return found

    # ---------------------------------------------------------------------------- clusters

    def list_clusters(self) -> dict[str, list[str]]:
        """Return the names of the brokers of each cluster, sorted."""
        return {cluster: sorted(brokers) for cluster, brokers in sorted(self._clusters.items())}

    def list_brokers(self) -> list[BrokerData]:
        """Return all brokers, sorted by name."""
        return [self._brokers[name] for name in sorted(self._brokers)]

    def get_broker(self, name: str) -> BrokerData | None:
        """Return the broker with this name, or None."""
        return self._brokers.get(name)

    # ---------------------------------------------------------------------------- inside

    def _check_room(self, new: Registration) -> None:
        """Raise ProtocolError if a registration would exceed the limit of brokers or topics."""
        if (new.cluster, new.address) not in self._live and len(self._live) >= BROKERS_MAX:
            raise ProtocolError(f"Too many brokers are registered (limit {BROKERS_MAX}).")
        others = self.entry_count - len(self._served.get(new.broker, ()))
        if others + len(new.topics) > self._entries_max:
            raise ProtocolError(
                f"The other brokers have {others} topics and this one has {len(new.topics)}; the "
                f"limit for all together is {self._entries_max}.",
                fix="Increase sluiceRegisteredTopicsMax of the name server.",
            )

    def _put_live(self, new: Registration, now_ms: int) -> None:
        """Make a registration the latest of its address. Its topics are not kept."""
        self._drop_live(new.cluster, new.address)
        key = (new.cluster, new.address)
        self._live[key] = replace(new, topics={}), now_ms
        self._connections.setdefault(new.connection, {})[key] = None

    def _drop_live(self, cluster: str, address: str) -> None:
        """Forget the latest registration of an address, if there is one."""
        held = self._live.pop((cluster, address), None)
        if held is not None:
            keys = self._connections[held[0].connection]
            keys.pop((cluster, address), None)
            if not keys:
                del self._connections[held[0].connection]

    def _apply_topics_in_turn(
        self, new: Registration, *, is_changed: bool, is_read_only: bool
    ) -> Slices[None]:
        """Apply the topics of a registration in steps, after those of the broker's earlier one.

        `is_changed` says whether topics that are known already must be replaced. `is_read_only`
        says that a slave registers for a missing master. Stop if the broker is removed between two
        steps. The topics are removed from `new`.
        """
        before = self._unfinished.get(new.broker)

        def steps() -> Slices[None]:
            if before is not None:
                yield from before
            yield from self._apply_topics(new, is_changed=is_changed, is_read_only=is_read_only)

        self._unfinished[new.broker] = mine = steps()
        try:
            yield from mine
        finally:
            if self._unfinished.get(new.broker) is mine:
                del self._unfinished[new.broker]

    def _apply_topics(
        self, new: Registration, *, is_changed: bool, is_read_only: bool
    ) -> Slices[None]:
        """Apply the topics of a registration in steps; see `_apply_topics_in_turn`."""
        is_wiped = is_read_only and bool(new.acting_master_enable)
        if new.is_complete:
            for count, topic in enumerate(list(self._served.get(new.broker, ())), 1):
                if topic not in new.topics:
                    self._drop_queues(topic, new.broker)
                if count % SLICE_TOPICS == 0:
                    yield
        topics = new.topics
        while topics:
            topic, config = topics.popitem()
            held = self._topics.get(topic, {}).get(new.broker)
            if is_changed or held is None:
                allowed = ~PERM_WRITE if is_wiped else self._permission_mask(new.broker)
                queue = QueueData(
                    new.broker,
                    config.read_queues,
                    config.write_queues,
                    config.perm & allowed,
                    config.sys_flag,
                )
                self._put_queues(topic, queue)
            if topics and len(topics) % SLICE_TOPICS == 0:
                yield
                if new.broker not in self._brokers:
                    return

    def _permission_mask(self, broker: str) -> int:
        """Return the permission bits that topics of a broker may have."""
        return ~PERM_WRITE if broker in self._write_wiped else ~0

    def _put_queues(self, topic: str, queue: QueueData) -> None:
        """Add or replace the queues of a topic on one broker."""
        queues = self._topics.setdefault(topic, {})
        self.entry_count += queue.broker not in queues
        queues[queue.broker] = queue
        self._served.setdefault(queue.broker, {})[topic] = queue

    def _drop_queues(self, topic: str, broker: str) -> None:
        """Remove the queues of a topic on one broker."""
        queues = self._topics.get(topic, {})
        self.entry_count -= queues.pop(broker, None) is not None
        if not queues:
            self._topics.pop(topic, None)
        self._served.get(broker, {}).pop(topic, None)

    def _change_permissions(self, broker: str, change: Callable[[int], int]) -> Slices[int]:
        """Apply `change` to the permission of each topic of a broker, in steps.

        The steps return the number of topics.
        """
        topics = list(self._served.get(broker, ()))
        for count, topic in enumerate(topics, 1):
            queue = self._served.get(broker, {}).get(topic)
            if queue is not None:
                self._put_queues(topic, replace(queue, perm=change(queue.perm)))
            if count % SLICE_TOPICS == 0:
                yield
        return len(topics)


def filter_zone(route: TopicRoute, zone: str) -> TopicRoute:
    """Return a route with only the brokers of a zone, and those without a master.

    This is the zone mode of RocketMQ (spec/namesrv.md §5). Upper and lower case are the same.
    """
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


def reachable_address(
    registered: str, origin: Origin | None, client: ClientConnection
) -> tuple[str, str]:
    """Return the host:port of a broker that a client is told, and the reason for a change.

    `registered` is the host:port that the broker has registered, `client` the client's connection.
    The module's docstring has the rules. The reason is "" if `registered` is returned.
    """
    try:
        host = parse_host(registered)
    except ProtocolError:
        return registered, ""
    if origin is None or origin.is_fixed:
        return registered, ""
    if origin.interfaces and all(is_loopback(own) for own in origin.interfaces):
        return registered, ""
    is_local = is_loopback(host.address) or is_wildcard(host.address)
    replacement = _replacement_of_local if is_local else _replacement_of_foreign
    address, reason = replacement(host.address, origin, client)
    if is_same_address(address, host.address):
        return registered, ""
    return format_address(str(parse_address(address) or address), host.port), reason


def _replacement_of_local(
    address: str, origin: Origin, client: ClientConnection
) -> tuple[str, str]:
    """Return the address to tell instead of a loopback or wildcard one, and the reason."""
    if not origin.is_on_this_host:
        return origin.source_address, "the broker's registration came from there"
    if is_loopback(address) and client.is_on_this_host:
        return address, ""
    return (
        client.local_address,
        "the broker is on the name server's machine, which the client reached there",
    )


def _replacement_of_foreign(
    address: str, origin: Origin, client: ClientConnection
) -> tuple[str, str]:
    """Return the address to tell instead of any other one, and the reason; "" if it stays."""
    if parse_address(address) is None or is_same_network(address, client.remote_address):
        return address, ""
    if origin.is_on_this_host:
        if origin.listens_on(client.local_address):
            return (
                client.local_address,
                "the broker listens where the client reached the name server",
            )
        return address, ""
    if not is_private(address) or is_same_address(origin.source_address, client.remote_address):
        return address, ""
    if is_same_network(origin.source_address, client.remote_address):
        return origin.source_address, "the broker's registration came from the client's own network"
    if origin.interfaces and not origin.listens_on(origin.source_address):
        return origin.source_address, "the broker is behind an address translation"
    return address, ""
