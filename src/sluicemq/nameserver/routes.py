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

A broker may have a hundred thousand topics, so whatever changes them comes as an iterator that
changes SLICE of them at each step; between two steps other requests are answered. Methods with a
verb in -ing return one; `register`, `unregister` and others do all at once. Routes name no broker
that is gone, also while its topics are still there.

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
"""How long a broker that does not say otherwise may stay silent."""


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
        return is_loopback(self.source) or is_same_address(self.source, self.reached)

    def listens_at(self, address: str) -> bool:
        return any(is_same_address(address, own) for own in self.interfaces)


class Way(NamedTuple):
    """How a client came in."""

    remote: str
    local: str

    @property
    def on_this_host(self) -> bool:
        return is_loopback(self.remote) or is_same_address(self.remote, self.local)


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
    topics: dict[str, TopicConfig] = field(default_factory=dict)
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


SLICE: Final = 256
"""How many topics are changed at a step: about a third of a millisecond."""
SHRUNK_FROM: Final = 10_000
BROKERS_MAX: Final = 4096
"""The most addresses that may be registered."""
Slices = Generator[None, None, T]


def all_at_once(slices: Slices[T]) -> T:
    """Do all steps and return what the last one returns."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def drained(topics: dict[str, TopicConfig]) -> Slices[None]:
    """Empty a table of topics in steps: to free a hundred thousand objects takes time."""
    while topics:
        topics.popitem()
        if topics and len(topics) % SLICE == 0:
            yield


class RouteTable:
    """All brokers and topics that one name server knows.

    `on_smallest_changed` hears which replica of a broker name is the smallest now. `entries_max`
    bounds the topics of all brokers together.
    """

    def __init__(self, entries_max: int = 1_000_000) -> None:
        self.on_smallest_changed: Callable[[SmallestChanged], None] = lambda _change: None
        self._entries_max = entries_max
        self.entries = 0
        """Topics of all brokers: one that two brokers serve counts twice."""
        self._drained: set[str] = set()
        """Brokers whose write permission was wiped."""
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._served: dict[str, dict[str, QueueData]] = {}
        """The same by broker and topic."""
        self._brokers: dict[str, BrokerData] = {}
        self._clusters: dict[str, set[str]] = {}
        self._clusters_of: dict[str, set[str]] = {}
        self._live: dict[tuple[str, str], tuple[Registration, int]] = {}
        self._connections: dict[object, dict[tuple[str, str], None]] = {}
        """The (cluster, address) of those whose latest registration came over a connection."""
        self._unfinished: dict[str, Slices[None]] = {}
        """What is left to do of a broker's latest registration."""

    # ---------------------------------------------------------------------------- brokers

    def register(self, new: Registration, now_ms: int) -> RegisterBrokerResponse:
        """Take over what a broker says of itself. Raises ProtocolError above the limits."""
        return all_at_once(self.registering(new, now_ms))

    def registering(self, new: Registration, now_ms: int) -> Slices[RegisterBrokerResponse]:
        """The same in steps: at the first the broker is known, at the others its topics are."""
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
            self._drop_live(new.cluster, new.address)
            return RegisterBrokerResponse()
        is_prime_slave = (
            new.acting_master_enable is not None
            and new.broker_id != MASTER_ID
            and new.broker_id == min(addresses)
        )
        if new.broker_id == MASTER_ID and holder is None:
            self._drained.discard(new.broker)
        changed = holder is None or self.version_of(new.cluster, new.address) != new.version
        self._put_live(new, now_ms)
        if new.broker_id == MASTER_ID or is_prime_slave:
            yield from self._taking_topics(new, changed=changed, read_only=is_prime_slave)
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
        all_at_once(self.unregistering(cluster, broker, address))

    def unregistering(self, cluster: str, broker: str, address: str) -> Slices[None]:
        """The same in steps: at the first the broker is gone, at the others its topics go."""
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
                self.on_smallest_changed(SmallestChanged(*first, None, address, told))
            if entry.acting_master_enable and MASTER_ID not in left:
                yield from self._changing(broker, lambda perm: perm & ~PERM_WRITE)
            return
        yield from self._dropping(broker)

    def _dropping(self, broker: str) -> Slices[None]:
        """Forget a broker whose last address is gone, and its topics in steps."""
        del self._brokers[broker]
        self._drained.discard(broker)
        for name in self._clusters_of.pop(broker, ()):
            self._clusters[name].discard(broker)
            if not self._clusters[name]:
                del self._clusters[name]
        served = self._served.pop(broker, {})
        number = len(served)
        while served:  # emptied in steps: to free a hundred thousand objects takes time, too
            topic, queue = served.popitem()
            if self._topics.get(topic, {}).get(broker) is queue:  # it has not come back
                self._drop_queues(topic, broker)
            if served and len(served) % SLICE == 0:
                yield
        if number > SHRUNK_FROM and len(self._topics) < number // 4:
            self._topics = dict(self._topics)  # a dict keeps the room that it once needed

    def refresh(self, cluster: str, address: str, now_ms: int) -> None:
        """A sign of life without news."""
        if (cluster, address) in self._live:
            self._live[cluster, address] = self._live[cluster, address][0], now_ms

    def expire(self, now_ms: int) -> list[Registration]:
        """Return the brokers that have been silent too long. The caller has to unregister them."""
        return [
            live
            for live, updated_ms in self._live.values()
            if updated_ms + live.timeout_ms < now_ms
        ]

    def registered_by(self, connection: object) -> list[Registration]:
        """Return the brokers whose latest registration came over this connection."""
        return [self._live[key][0] for key in self._connections.get(connection, ())]

    def forgetting(self, gone: Iterable[Registration]) -> Slices[None]:
        """Unregister these brokers, in steps, unless they have registered again meanwhile."""
        for live in gone:
            if self._live.get((live.cluster, live.address), (None, 0))[0] is live:
                yield from self.unregistering(live.cluster, live.broker, live.address)
            yield

    def version_of(self, cluster: str, address: str) -> DataVersion | None:
        """The edition of its topics that a broker last registered."""
        live = self._live.get((cluster, address))
        return None if live is None else live[0].version

    def origin_of(self, cluster: str, address: str) -> Origin | None:
        """What is known about an address besides the address."""
        live = self._live.get((cluster, address))
        return None if live is None else live[0].origin

    def wiping_write_permission(self, broker: str) -> Slices[int]:
        """Take write permission from all topics of a broker, in steps, and return their number."""
        if broker in self._brokers:
            self._drained.add(broker)
        return self._changing(broker, lambda perm: perm & ~PERM_WRITE)

    def adding_write_permission(self, broker: str) -> Slices[int]:
        """Give all topics of a broker read and write permission, whatever they had, in steps.
        Return their number."""
        self._drained.discard(broker)
        return self._changing(broker, lambda _perm: PERM_READ | PERM_WRITE)

    # ---------------------------------------------------------------------------- topics

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> None:
        """Add or replace a topic's queues; stops at a broker that is not known."""
        for queue in queues:
            if queue.broker not in self._brokers:
                return
            perm = queue.perm & self._allowed(queue.broker)
            self._put_queues(topic, replace(queue, perm=perm))

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forget a topic, on one cluster's brokers or on all."""
        served_by = self._topics.get(topic, {})
        members = served_by if cluster is None else self._clusters.get(cluster, set())
        for broker in [name for name in served_by if name in members]:
            self._drop_queues(topic, broker)

    def route(self, topic: str, *, acting_master: bool = False) -> TopicRoute | None:
        """Where a topic lives; None when no broker that serves it is known.

        With `acting_master` a slave stands in for a missing master where its broker allows it.
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

    def topics(self) -> list[str]:
        return list(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """Return the topics of all brokers of a cluster."""
        found = dict[str, QueueData]()
        for broker in self._clusters.get(cluster, ()):
            found |= self._served.get(broker, {})
        return list(found)

    def looking_for_flags(self, wanted: Callable[[int], bool]) -> Slices[list[str]]:
        """Return, in steps, the topics whose system flags (those of any one broker) are wanted."""
        found = []
        for count, topic in enumerate(list(self._topics), 1):
            if any(wanted(queue.sys_flag) for queue in self._topics.get(topic, {}).values()):
                found.append(topic)
            if count % SLICE == 0:
                yield
        return found

    # ---------------------------------------------------------------------------- clusters

    def clusters(self) -> dict[str, list[str]]:
        """Cluster -> names of its brokers."""
        return {cluster: sorted(brokers) for cluster, brokers in sorted(self._clusters.items())}

    def brokers(self) -> list[BrokerData]:
        return [self._brokers[name] for name in sorted(self._brokers)]

    def broker(self, name: str) -> BrokerData | None:
        return self._brokers.get(name)

    # ---------------------------------------------------------------------------- inside

    def _check_room(self, new: Registration) -> None:
        """Raise ProtocolError if a registration is one too many, or has too many topics."""
        if (new.cluster, new.address) not in self._live and len(self._live) >= BROKERS_MAX:
            raise ProtocolError(f"{BROKERS_MAX} brokers are registered, which is the limit.")
        others = self.entries - len(self._served.get(new.broker, ()))
        if others + len(new.topics) > self._entries_max:
            raise ProtocolError(
                f"The other brokers have {others} topics, this one has {len(new.topics)}; together "
                f"they may have {self._entries_max}.",
                fix="Raise sluiceRegisteredTopicsMax of the name server.",
            )

    def _put_live(self, new: Registration, now_ms: int) -> None:
        self._drop_live(new.cluster, new.address)
        key = (new.cluster, new.address)
        self._live[key] = replace(new, topics={}), now_ms
        self._connections.setdefault(new.connection, {})[key] = None

    def _drop_live(self, cluster: str, address: str) -> None:
        held = self._live.pop((cluster, address), None)
        if held is not None:
            keys = self._connections[held[0].connection]
            keys.pop((cluster, address), None)
            if not keys:
                del self._connections[held[0].connection]

    def _taking_topics(self, new: Registration, *, changed: bool, read_only: bool) -> Slices[None]:
        """Take over the topics of a registration, after those that an earlier one of the same
        broker has left; stop when the broker is gone. The topics of the registration are taken out
        of it."""
        before = self._unfinished.get(new.broker)

        def steps() -> Slices[None]:
            if before is not None:
                yield from before
            yield from self._putting(new, changed=changed, read_only=read_only)

        self._unfinished[new.broker] = mine = steps()
        try:
            yield from mine
        finally:
            if self._unfinished.get(new.broker) is mine:
                del self._unfinished[new.broker]

    def _putting(self, new: Registration, *, changed: bool, read_only: bool) -> Slices[None]:
        is_wiped = read_only and bool(new.acting_master_enable)
        if new.is_complete:
            for count, topic in enumerate(list(self._served.get(new.broker, ())), 1):
                if topic not in new.topics:
                    self._drop_queues(topic, new.broker)
                if count % SLICE == 0:
                    yield
        topics = new.topics
        while topics:
            topic, config = topics.popitem()
            held = self._topics.get(topic, {}).get(new.broker)
            if changed or held is None:
                allowed = ~PERM_WRITE if is_wiped else self._allowed(new.broker)
                queue = QueueData(
                    new.broker, config.read_queues, config.write_queues, config.perm & allowed,
                    config.sys_flag,
                )  # fmt: skip
                self._put_queues(topic, queue)
            if topics and len(topics) % SLICE == 0:
                yield
                if new.broker not in self._brokers:
                    return

    def _allowed(self, broker: str) -> int:
        return ~PERM_WRITE if broker in self._drained else ~0

    def _put_queues(self, topic: str, queue: QueueData) -> None:
        queues = self._topics.setdefault(topic, {})
        self.entries += queue.broker not in queues
        queues[queue.broker] = queue
        self._served.setdefault(queue.broker, {})[topic] = queue

    def _drop_queues(self, topic: str, broker: str) -> None:
        queues = self._topics.get(topic, {})
        self.entries -= queues.pop(broker, None) is not None
        if not queues:
            self._topics.pop(topic, None)
        self._served.get(broker, {}).pop(topic, None)

    def _changing(self, broker: str, change: Callable[[int], int]) -> Slices[int]:
        topics = list(self._served.get(broker, ()))
        for count, topic in enumerate(topics, 1):
            queue = self._served.get(broker, {}).get(topic)
            if queue is not None:
                self._put_queues(topic, replace(queue, perm=change(queue.perm)))
            if count % SLICE == 0:
                yield
        return len(topics)


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
    if is_same_address(address, host.address):
        return registered, ""
    return format_address(str(parse_address(address) or address), host.port), reason


def _instead_of_local(address: str, origin: Origin, way: Way) -> tuple[str, str]:
    if not origin.on_this_host:
        return origin.source, "the broker's registration came from there"
    if is_loopback(address) and way.on_this_host:
        return address, ""
    return way.local, "the broker is on the name server's machine, which the client reached there"


def _instead_of_foreign(address: str, origin: Origin, way: Way) -> tuple[str, str]:
    if parse_address(address) is None or is_same_network(address, way.remote):
        return address, ""
    if origin.on_this_host:
        if origin.listens_at(way.local):
            return way.local, "the broker listens where the client reached the name server"
        return address, ""
    if not is_private(address) or is_same_address(origin.source, way.remote):
        return address, ""
    if is_same_network(origin.source, way.remote):
        return origin.source, "the broker's registration came from the client's own network"
    if origin.interfaces and not origin.listens_at(origin.source):
        return origin.source, "the broker is behind an address translation"
    return address, ""
