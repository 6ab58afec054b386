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
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeVar

from sluicemq.errors import ProtocolError
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
from sluicemq.nameserver.reachable import Origin
from sluicemq.wire.registration import RegisterBrokerResponse

T = TypeVar("T")
TIMEOUT_MS = 120_000
"""The time after which a silent broker is removed, if its registration names no other time."""


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
    """The broker's zone (`filter_zone`); None if it has none."""
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    """The broker's topics, or only those that have changed."""
    is_complete: bool = False
    """Whether `topics` has all topics, so that the broker's other topics are removed."""
    version: DataVersion = field(default_factory=DataVersion)
    """The version of the broker's topic table."""
    origin: Origin | None = None
    """Where the registration came from; None if this is not known."""
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
    """Do all steps of the work at once, and return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def empty_in_slices(topics: dict[str, TopicConfig]) -> Slices[None]:
    """Remove all topics from the dict, SLICE_TOPICS in each step.

    Freeing a hundred thousand objects at once would delay other requests.
    """
    while topics:
        topics.popitem()
        if topics and len(topics) % SLICE_TOPICS == 0:
            yield


class RouteTable:
    """All brokers and topics that one name server knows."""

    def __init__(self, entries_max: int = 1_000_000) -> None:
        """Create an empty table.

        `entries_max` is the maximum number of topics of all brokers together. A topic of two
        brokers counts twice.
        """
        self.on_smallest_changed: Callable[[SmallestIdChange], None] = lambda _change: None
        """A callback that is called when another replica of a broker has the smallest id.

        It is called when a replica with a smaller id registers. It is also called when the
        replica with the smallest id leaves a broker that allows an acting master.
        """
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

    def register(self, registration: Registration, now_ms: int) -> RegisterBrokerResponse:
        """Apply a registration at once; see `register_in_slices`."""
        return run_all_slices(self.register_in_slices(registration, now_ms))

    def register_in_slices(
        self, registration: Registration, now_ms: int
    ) -> Slices[RegisterBrokerResponse]:
        """Apply a registration in steps, and return the answer to the broker.

        `now_ms` is the time at which the registration is renewed. The first step records the
        replica, so that routes contain it. The following steps apply the topics of the
        registration, and empty its dict of topics. Only the topics of a master, or of the slave
        with the smallest id of a broker without a master, are applied. At the end,
        `on_smallest_changed` is called if the replica has a smaller id than all others had before.

        A registration is dropped if another address has the same id and has registered a later
        state version. The answer names the master and its HA address if a slave registers and the
        master is known; otherwise its fields are empty.

        Raises ProtocolError, before anything is changed, if there would be too many brokers or
        topics.
        """
        self._check_room(registration)
        known = self._brokers.get(registration.broker)
        addresses = _addresses_beside(registration, known)
        # The address that has had this id until now: that of an earlier registration, or of
        # another process that uses the same id.
        holder = addresses.get(registration.broker_id)
        is_late = self._is_late(registration, holder)
        if not is_late:
            addresses[registration.broker_id] = registration.address
        self._put_broker(registration, known, addresses)
        if is_late:
            self._drop_live(registration.cluster, registration.address)
            return RegisterBrokerResponse()

        is_prime_slave = (
            registration.acting_master_enable is not None
            and registration.broker_id != MASTER_ID
            and registration.broker_id == min(addresses)
        )
        if registration.broker_id == MASTER_ID and holder is None:
            # The master has been absent, so the operator's wipe has ended (module docstring).
            self._write_wiped.discard(registration.broker)
        registered_version = self.version_of(registration.cluster, registration.address)
        is_changed = holder is None or registered_version != registration.version
        self._put_live(registration, now_ms)
        if registration.broker_id == MASTER_ID or is_prime_slave:
            yield from self._apply_topics_in_turn(
                registration, is_changed=is_changed, is_read_only=is_prime_slave
            )

        if known is not None and known.addresses and registration.broker_id < min(known.addresses):
            self._report_smaller_id(registration, addresses)
        return self._make_answer(registration, addresses)

    def _is_late(self, registration: Registration, holder: str | None) -> bool:
        """Return whether a registration comes from an old process and must be dropped.

        `holder` is the address that has its id now; None if the id is free. The registration is
        late if that is another address, which has registered a later state version.
        """
        if holder == registration.address:
            return False
        held, _ = self._live.get((registration.cluster, holder or ""), (registration, 0))
        return held.version.state_version > registration.version.state_version

    def _put_broker(
        self, registration: Registration, known: BrokerData | None, addresses: dict[int, str]
    ) -> None:
        """Record the broker of a registration, with these addresses by id, in its cluster.

        `known` is what was known about the broker before; None if it is new.
        """
        self._clusters.setdefault(registration.cluster, set()).add(registration.broker)
        self._clusters_of.setdefault(registration.broker, set()).add(registration.cluster)
        self._brokers[registration.broker] = BrokerData(
            registration.broker,
            known.cluster if known else registration.cluster,
            dict(sorted(addresses.items())),
            bool(registration.acting_master_enable),
            registration.zone,
        )

    def _report_smaller_id(self, registration: Registration, addresses: dict[int, str]) -> None:
        """Call `on_smallest_changed` for a registration with the smallest id of its broker."""
        others = tuple(address for address in addresses.values() if address != registration.address)
        self.on_smallest_changed(
            SmallestIdChange(
                broker_id=registration.broker_id,
                address=registration.address,
                ha_address=registration.ha_address,
                offline_address=None,
                notified_addresses=others or (registration.address,),
            )
        )

    def _make_answer(
        self, registration: Registration, addresses: dict[int, str]
    ) -> RegisterBrokerResponse:
        """Return the answer to a registration, which tells a slave the addresses of its master."""
        master_address = addresses.get(MASTER_ID, "")
        master, _ = self._live.get((registration.cluster, master_address), (None, 0))
        if registration.broker_id == MASTER_ID or master is None:
            return RegisterBrokerResponse()
        return RegisterBrokerResponse(ha_address=master.ha_address, master_address=master_address)

    def unregister(self, cluster: str, broker: str, address: str) -> None:
        """Remove an address of a broker at once; see `unregister_in_slices`."""
        run_all_slices(self.unregister_in_slices(cluster, broker, address))

    def unregister_in_slices(self, cluster: str, broker: str, address: str) -> Slices[None]:
        """Remove an address of a broker in steps. Does nothing if the address is unknown.

        The first step removes the address from routes. If it was the broker's last address, the
        following steps remove the broker's topics. If other addresses remain and the broker allows
        an acting master, `on_smallest_changed` is called if the smallest id has changed, and the
        following steps remove the write permission of the topics if no master remains.
        """
        self._drop_live(cluster, address)
        known = self._brokers.get(broker)
        if known is None:
            return
        remaining = {
            broker_id: known_address
            for broker_id, known_address in known.addresses.items()
            if known_address != address
        }
        if not remaining:
            yield from self._remove_broker(broker)
            return

        self._brokers[broker] = replace(known, addresses=remaining)
        if not known.acting_master_enable:
            return
        if min(remaining) != min(known.addresses):
            self._report_lost_id(remaining, address)
        if MASTER_ID not in remaining:
            yield from self._change_permissions(broker, lambda perm: perm & ~PERM_WRITE)

    def _report_lost_id(self, remaining: dict[int, str], lost_address: str) -> None:
        """Call `on_smallest_changed`, because the replica with the smallest id has left.

        `remaining` are the addresses of the other replicas by id, in the order of ids.
        """
        smallest_id, smallest_address = next(iter(remaining.items()))
        self.on_smallest_changed(
            SmallestIdChange(
                broker_id=smallest_id,
                address=smallest_address,
                ha_address=None,
                offline_address=lost_address,
                notified_addresses=tuple(remaining.values()),
            )
        )

    def _remove_broker(self, broker: str) -> Slices[None]:
        """Remove a broker whose last address is gone, and its topics in steps.

        The first step removes the broker from routes and clusters, and ends a wipe of its write
        permission. A topic that the broker registers again between two steps is not removed.
        """
        del self._brokers[broker]
        self._write_wiped.discard(broker)
        for name in self._clusters_of.pop(broker, ()):
            self._clusters[name].discard(broker)
            if not self._clusters[name]:
                del self._clusters[name]
        served = self._served.pop(broker, {})
        removed_count = len(served)
        while served:
            topic, queue = served.popitem()
            # If the broker has registered again between two steps, its queue is another object.
            if self._topics.get(topic, {}).get(broker) is queue:
                self._drop_queues(topic, broker)
            if served and len(served) % SLICE_TOPICS == 0:
                yield
        if removed_count > SHRINK_TOPICS_MIN and len(self._topics) < removed_count // 4:
            # A dict does not release memory when items are removed; a copy has the right size.
            self._topics = dict(self._topics)

    def record_heartbeat(self, cluster: str, address: str, now_ms: int) -> None:
        """Renew the registration of an address at the time `now_ms`.

        Does nothing if the address is not registered.
        """
        key = (cluster, address)
        if key in self._live:
            registration, _ = self._live[key]
            self._live[key] = registration, now_ms

    def find_expired(self, now_ms: int) -> list[Registration]:
        """Return the registrations that were not renewed within their timeouts.

        Nothing is removed; the caller must pass the registrations to `unregister_lost`.
        """
        return [
            registration
            for registration, renewed_ms in self._live.values()
            if renewed_ms + registration.timeout_ms < now_ms
        ]

    def registered_by(self, connection: object) -> list[Registration]:
        """Return the registrations that came over a connection.

        Only the latest registration of each address counts. The result is empty for a connection
        without registrations.
        """
        return [self._live[key][0] for key in self._connections.get(connection, ())]

    def unregister_lost(self, gone: Iterable[Registration]) -> Slices[None]:
        """Remove the addresses of the registrations `gone` in steps.

        An address that has registered again in the meantime is not removed.
        """
        for lost in gone:
            latest, _ = self._live.get((lost.cluster, lost.address), (None, 0))
            if latest is lost:
                yield from self.unregister_in_slices(lost.cluster, lost.broker, lost.address)
            yield

    def version_of(self, cluster: str, address: str) -> DataVersion | None:
        """Return the version of the topic table that an address last registered.

        Return None if the address is not registered.
        """
        live = self._live.get((cluster, address))
        return None if live is None else live[0].version

    def origin_of(self, cluster: str, address: str) -> Origin | None:
        """Return the origin of the latest registration of an address.

        Return None if the address is not registered, or its registration has no origin.
        """
        live = self._live.get((cluster, address))
        return None if live is None else live[0].origin

    def wipe_write_permission(self, broker: str) -> Slices[int]:
        """Remove the write permission of all topics of a broker, in steps.

        The permission stays removed, also for topics that are added later, until
        `add_write_permission` is called or the broker's master registers after an absence. The
        steps return the number of the broker's topics; 0 if the broker is unknown.
        """
        if broker in self._brokers:
            self._write_wiped.add(broker)
        return self._change_permissions(broker, lambda perm: perm & ~PERM_WRITE)

    def add_write_permission(self, broker: str) -> Slices[int]:
        """Give all topics of a broker read and write permission, in steps.

        The steps return the number of the broker's topics; 0 if the broker is unknown.
        """
        self._write_wiped.discard(broker)
        return self._change_permissions(broker, lambda _perm: PERM_READ | PERM_WRITE)

    # ---------------------------------------------------------------------------- topics

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> None:
        """Add or replace queues of a topic; each item names a broker and its number of queues.

        Stops at the first item whose broker is unknown; the items before it are applied. If the
        write permission of a broker is wiped, its queues get no write permission.
        """
        for queue in queues:
            if queue.broker not in self._brokers:
                return
            perm = queue.perm & self._permission_mask(queue.broker)
            self._put_queues(topic, replace(queue, perm=perm))

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic from the brokers of a cluster; None means from all brokers.

        Does nothing if the topic or cluster is unknown.
        """
        queues = self._topics.get(topic, {})
        members = queues if cluster is None else self._clusters.get(cluster, set())
        brokers = [name for name in queues if name in members]
        for broker in brokers:
            self._drop_queues(topic, broker)

    def find_route(self, topic: str, *, acting_master: bool = False) -> TopicRoute | None:
        """Return the route of a topic, with brokers and queues sorted by broker name.

        Return None if no known broker has the topic.

        `acting_master` makes a slave act for a missing master: its id in the route is 0. This is
        the slave with the smallest id, if the broker allows an acting master and its queues are
        read-only. The topics of SYNC_MEMBER_TOPIC_PREFIX get no acting master.
        """
        queues_by_broker = self._topics.get(topic, {})
        may_act = acting_master and not topic.startswith(SYNC_MEMBER_TOPIC_PREFIX)
        brokers = []
        queues = []
        for name in sorted(queues_by_broker):
            broker = self._brokers.get(name)
            if broker is None:
                continue
            if may_act:
                broker = _with_acting_master(broker, queues_by_broker[name])
            brokers.append(broker)
            queues.append(queues_by_broker[name])
        return TopicRoute(tuple(brokers), tuple(queues)) if brokers else None

    def list_topics(self) -> list[str]:
        """Return the names of all topics."""
        return list(self._topics)

    def list_topics_of_cluster(self, cluster: str) -> list[str]:
        """Return the names of the topics of all brokers of a cluster, each once.

        The result is empty if the cluster is unknown.
        """
        topics = dict[str, QueueData]()
        for broker in self._clusters.get(cluster, ()):
            topics |= self._served.get(broker, {})
        return list(topics)

    def find_topics_by_flags(self, is_wanted: Callable[[int], bool]) -> Slices[list[str]]:
        """Find the topics with certain system flags, in steps that return the topics' names.

        `is_wanted` is called with the system flags of a topic on one broker. A topic is returned if
        `is_wanted` returns True for one of its brokers.
        """
        matching_topics = []
        for count, topic in enumerate(list(self._topics), 1):
            queues_by_broker = self._topics.get(topic, {})
            if any(is_wanted(queues.sys_flag) for queues in queues_by_broker.values()):
                matching_topics.append(topic)
            if count % SLICE_TOPICS == 0:
                yield
        return matching_topics

    # ---------------------------------------------------------------------------- clusters

    def list_clusters(self) -> dict[str, list[str]]:
        """Return the sorted names of the brokers of each cluster, by cluster name."""
        return {cluster: sorted(brokers) for cluster, brokers in sorted(self._clusters.items())}

    def list_brokers(self) -> list[BrokerData]:
        """Return all brokers, sorted by name."""
        return [self._brokers[name] for name in sorted(self._brokers)]

    def get_broker(self, name: str) -> BrokerData | None:
        """Return the cluster and addresses of the broker with this name, or None."""
        return self._brokers.get(name)

    # ---------------------------------------------------------------------------- inside

    def _check_room(self, registration: Registration) -> None:
        """Raise ProtocolError if a registration would exceed the limit of addresses or topics.

        An address that is registered already may register again. The topics of the broker's
        earlier registration do not count, because the new ones replace them.
        """
        is_known = (registration.cluster, registration.address) in self._live
        if not is_known and len(self._live) >= BROKERS_MAX:
            raise ProtocolError(f"Too many brokers are registered (limit {BROKERS_MAX}).")
        other_count = self.entry_count - len(self._served.get(registration.broker, ()))
        new_count = len(registration.topics)
        if other_count + new_count > self._entries_max:
            raise ProtocolError(
                f"The other brokers have {other_count} topics and this one has {new_count}; "
                f"the limit for all together is {self._entries_max}.",
                fix="Increase sluiceRegisteredTopicsMax of the name server.",
            )

    def _put_live(self, registration: Registration, now_ms: int) -> None:
        """Record a registration as the latest of its address, renewed at the time `now_ms`.

        Its connection is recorded too. Its topics are not stored here.
        """
        self._drop_live(registration.cluster, registration.address)
        key = (registration.cluster, registration.address)
        self._live[key] = replace(registration, topics={}), now_ms
        self._connections.setdefault(registration.connection, {})[key] = None

    def _drop_live(self, cluster: str, address: str) -> None:
        """Remove the latest registration of an address, also from its connection.

        Does nothing if the address is not registered.
        """
        key = (cluster, address)
        live = self._live.pop(key, None)
        if live is None:
            return
        registration, _renewed_ms = live
        keys = self._connections[registration.connection]
        keys.pop(key, None)
        if not keys:
            del self._connections[registration.connection]

    def _apply_topics_in_turn(
        self, registration: Registration, *, is_changed: bool, is_read_only: bool
    ) -> Slices[None]:
        """Apply the topics of a registration in steps, in the order of registrations.

        If an earlier registration of the broker is not finished, its remaining steps are done
        first. The parameters and effects are those of `_apply_topics`.
        """
        earlier_steps = self._unfinished.get(registration.broker)

        def all_steps() -> Slices[None]:
            if earlier_steps is not None:
                yield from earlier_steps
            yield from self._apply_topics(
                registration, is_changed=is_changed, is_read_only=is_read_only
            )

        self._unfinished[registration.broker] = steps = all_steps()
        try:
            yield from steps
        finally:
            # A later registration may have taken the place of this one.
            if self._unfinished.get(registration.broker) is steps:
                del self._unfinished[registration.broker]

    def _apply_topics(
        self, registration: Registration, *, is_changed: bool, is_read_only: bool
    ) -> Slices[None]:
        """Apply the topics of a registration in steps, and remove them from `registration.topics`.

        If the registration is complete, the broker's other topics are removed first.
        `is_changed` False means that the broker has registered these topics before, so only topics
        that the table does not have are added. `is_read_only` means that a slave registers for a
        missing master, so the topics get no write permission. Stops if the broker is removed
        between two steps.
        """
        is_write_removed = is_read_only and bool(registration.acting_master_enable)
        if registration.is_complete:
            yield from self._drop_other_topics(registration)

        topics = registration.topics
        while topics:
            topic, config = topics.popitem()
            is_known = registration.broker in self._topics.get(topic, {})
            if is_changed or not is_known:
                mask = (
                    ~PERM_WRITE if is_write_removed else self._permission_mask(registration.broker)
                )
                queue = QueueData(
                    registration.broker,
                    config.read_queues,
                    config.write_queues,
                    config.perm & mask,
                    config.sys_flag,
                )
                self._put_queues(topic, queue)
            if topics and len(topics) % SLICE_TOPICS == 0:
                yield
                if registration.broker not in self._brokers:
                    return

    def _drop_other_topics(self, registration: Registration) -> Slices[None]:
        """Remove the topics of a registration's broker that it does not contain, in steps."""
        served_topics = list(self._served.get(registration.broker, ()))
        for count, topic in enumerate(served_topics, 1):
            if topic not in registration.topics:
                self._drop_queues(topic, registration.broker)
            if count % SLICE_TOPICS == 0:
                yield

    def _permission_mask(self, broker: str) -> int:
        """Return the mask of permission bits that topics of a broker may have.

        All bits are set, except PERM_WRITE if the broker's write permission is wiped.
        """
        return ~PERM_WRITE if broker in self._write_wiped else ~0

    def _put_queues(self, topic: str, queue: QueueData) -> None:
        """Add or replace the queues of a topic on the broker `queue.broker`; count a new entry."""
        queues = self._topics.setdefault(topic, {})
        self.entry_count += queue.broker not in queues
        queues[queue.broker] = queue
        self._served.setdefault(queue.broker, {})[topic] = queue

    def _drop_queues(self, topic: str, broker: str) -> None:
        """Remove the queues of a topic on one broker. Does nothing if there are none.

        The topic is removed when no broker has it any longer.
        """
        queues = self._topics.get(topic, {})
        self.entry_count -= queues.pop(broker, None) is not None
        if not queues:
            self._topics.pop(topic, None)
        self._served.get(broker, {}).pop(topic, None)

    def _change_permissions(self, broker: str, change: Callable[[int], int]) -> Slices[int]:
        """Change the permission of each topic of a broker, in steps.

        `change` is called with the permission bits of a topic, and returns the new ones. The steps
        return the number of topics that the broker had at the beginning; 0 if it is unknown.
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
    """Return a route with only the brokers of a zone, and the brokers without a master.

    The queues of the other brokers are left out too. This is the zone mode of RocketMQ
    (spec/namesrv.md §5). Zones are compared without regard to upper and lower case.
    """
    kept_brokers = []
    excluded_names = set()
    for broker in route.brokers:
        is_in_zone = (broker.zone or "").lower() == zone.lower()
        if is_in_zone or MASTER_ID not in broker.addresses:
            kept_brokers.append(broker)
        else:
            excluded_names.add(broker.broker)
    kept_queues = [queues for queues in route.queues if queues.broker not in excluded_names]
    return replace(route, brokers=tuple(kept_brokers), queues=tuple(kept_queues))


def _addresses_beside(registration: Registration, known: BrokerData | None) -> dict[int, str]:
    """Return the known addresses of a registration's broker by id, without an old id of its own.

    A slave that became master (or the other way) keeps its address under one id only. `known` is
    what is known about the broker; None if it is new.
    """
    if known is None:
        return {}
    return {
        broker_id: address
        for broker_id, address in known.addresses.items()
        if address != registration.address or broker_id == registration.broker_id
    }


def _with_acting_master(broker: BrokerData, queues: QueueData) -> BrokerData:
    """Return a broker with its slave of the smallest id as master, if that may act for the master.

    `queues` are those of the broker in the route. Otherwise return the broker as it is.
    """
    has_master = MASTER_ID in broker.addresses or bool(queues.perm & PERM_WRITE)
    if has_master or not broker.acting_master_enable:
        return broker
    # The addresses are sorted by id, so the first slave has the smallest one.
    (_, slave_address), *others = broker.addresses.items()
    return replace(broker, addresses={MASTER_ID: slave_address, **dict(others)})
