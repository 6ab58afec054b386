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
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def empty_in_slices(topics: dict[str, TopicConfig]) -> Slices[None]:
    """Remove all topics from the dict, SLICE_TOPICS at each step of the generator.

    To free a hundred thousand objects at once would delay other requests.
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
        """Apply a registration, which arrived at `now_ms`, at once, and return the answer.

        This is `register_in_slices` without pauses.
        """
        return run_all_slices(self.register_in_slices(registration, now_ms))

    def register_in_slices(
        self, registration: Registration, now_ms: int
    ) -> Slices[RegisterBrokerResponse]:
        """Apply a registration in steps, and return the answer to the broker.

        `now_ms` is the time of the registration. The first step adds the replica to the routes. The
        following steps apply its topics, and remove them from the registration's dict. Topics are
        applied only for a master, or for the slave with the smallest id if there is no master. At
        the end, `on_smallest_changed` is called if the replica has a smaller id than all others had
        before.

        A registration is ignored if another address has the same id and has registered a later
        state version. The answer to a slave has the address and the HA address of its master, if it
        is known. Any other answer has empty fields.

        Raises ProtocolError, before anything is changed, if there would be too many brokers or
        topics.
        """
        self._check_limits(registration)
        known = self._brokers.get(registration.broker)
        addresses = _list_other_addresses(registration, known)
        # The address that has had this id until now. It may be the broker's own address, or the
        # address of another process that uses the same id.
        holder = addresses.get(registration.broker_id)
        is_outdated = self._is_outdated(registration, holder)
        if not is_outdated:
            addresses[registration.broker_id] = registration.address
        self._put_broker(registration, known, addresses)
        if is_outdated:
            self._remove_registration(registration.cluster, registration.address)
            return RegisterBrokerResponse()

        is_prime_slave = (
            registration.acting_master_enable is not None
            and registration.broker_id != MASTER_ID
            and registration.broker_id == min(addresses)
        )
        if registration.broker_id == MASTER_ID and holder is None:
            # The master has been absent. That ends the operator's removal of the write permission.
            self._write_wiped.discard(registration.broker)
        registered_version = self.version_of(registration.cluster, registration.address)
        is_changed = holder is None or registered_version != registration.version
        self._store_registration(registration, now_ms)
        if registration.broker_id == MASTER_ID or is_prime_slave:
            yield from self._apply_topics_in_turn(
                registration, is_changed=is_changed, is_read_only=is_prime_slave
            )

        if known is not None and known.addresses and registration.broker_id < min(known.addresses):
            self._report_smaller_id(registration, addresses)
        return self._make_answer(registration, addresses)

    def _is_outdated(self, registration: Registration, holder: str | None) -> bool:
        """Return whether a registration comes from an old process and must be ignored.

        `holder` is the address that has the registration's replica id now; None if the id is free.
        The registration is outdated if `holder` is another address and has registered a later state
        version.
        """
        if holder == registration.address:
            return False
        registration_of_holder, _ = self._live.get(
            (registration.cluster, holder or ""), (registration, 0)
        )
        return registration_of_holder.version.state_version > registration.version.state_version

    def _put_broker(
        self, registration: Registration, known: BrokerData | None, addresses: dict[int, str]
    ) -> None:
        """Add or replace the broker of a registration, and add it to its cluster.

        `addresses` are the addresses of the broker's replicas by id. `known` is the broker's
        earlier entry; None if the broker is new.
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
        """Call `on_smallest_changed`, because a replica with the smallest id has registered.

        `addresses` are the addresses of all replicas by id. The callback is to notify all others,
        or the replica itself if it is the only one.
        """
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
        """Return the answer to a registration.

        A slave gets the address and the HA (replication) address of its master, if the master is
        registered. Any other answer has empty fields.
        """
        master_address = addresses.get(MASTER_ID, "")
        master, _ = self._live.get((registration.cluster, master_address), (None, 0))
        if registration.broker_id == MASTER_ID or master is None:
            return RegisterBrokerResponse()
        return RegisterBrokerResponse(ha_address=master.ha_address, master_address=master_address)

    def unregister(self, cluster: str, broker: str, address: str) -> None:
        """Remove an address of a broker and, after the last one, the broker's topics, at once.

        An unknown address changes nothing. This is `unregister_in_slices` without pauses.
        """
        run_all_slices(self.unregister_in_slices(cluster, broker, address))

    def unregister_in_slices(self, cluster: str, broker: str, address: str) -> Slices[None]:
        """Remove an address of a broker in steps. Do nothing if the address is unknown.

        The first step removes the address from the routes. If it was the broker's last address, the
        next steps remove the broker's topics.

        A broker that allows an acting master has a slave that stands in for a missing master. If
        such a broker has other addresses, `on_smallest_changed` is called if the smallest id has
        changed. If no master remains, the next steps remove the write permission of its topics.
        """
        self._remove_registration(cluster, address)
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
        `lost_address` is the address of the replica that has left.
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
        """Remove a broker whose last address has gone, and then its topics in steps.

        The first step removes the broker from routes and clusters. It also forgets that an operator
        has removed the broker's write permission. A topic is not removed if the broker has
        registered it again between two steps.
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

        Do nothing if the address is not registered.
        """
        key = (cluster, address)
        if key in self._live:
            registration, _ = self._live[key]
            self._live[key] = registration, now_ms

    def find_expired(self, now_ms: int) -> list[Registration]:
        """Return the registrations that were not renewed within their timeouts.

        Nothing is removed. The caller passes the registrations to `unregister_lost`.
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
        """Remove the addresses of the registrations in `gone`, in steps.

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
        """Add or replace queues of a topic. Each item has the queues on one broker.

        If a broker is unknown, its item and all following ones are ignored. If an operator has
        removed a broker's write permission, its queues get no write permission.
        """
        for queue in queues:
            if queue.broker not in self._brokers:
                return
            perm = queue.perm & self._permission_mask(queue.broker)
            self._put_queues(topic, replace(queue, perm=perm))

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic from the brokers of a cluster; None means from all brokers.

        Do nothing if the topic or cluster is unknown.
        """
        queues = self._topics.get(topic, {})
        members = queues if cluster is None else self._clusters.get(cluster, set())
        brokers = [name for name in queues if name in members]
        for broker in brokers:
            self._drop_queues(topic, broker)

    def find_route(self, topic: str, *, acting_master: bool = False) -> TopicRoute | None:
        """Return the brokers and queues of a topic, sorted by broker name.

        Return None if no known broker has the topic.

        With `acting_master`, a slave stands in for a missing master: it gets the id 0 in the route.
        It is the slave with the smallest id, if the broker allows this and its queues are
        read-only. Topics with the prefix SYNC_MEMBER_TOPIC_PREFIX are an exception.
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
        """Find the topics with certain system flags, in steps, and return their names.

        `is_wanted(flags)` is called with the system flags of a topic on each broker. A topic is
        returned if the result is True for at least one broker.
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

    def _check_limits(self, registration: Registration) -> None:
        """Raise ProtocolError if a registration would exceed the limit of addresses or topics.

        A registered address may always register again. The topics of the broker's earlier
        registration are not counted, because the new ones replace them.
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

    def _store_registration(self, registration: Registration, now_ms: int) -> None:
        """Store a registration as the latest of its address, renewed at the time `now_ms`.

        It is stored without its topics, and also recorded under its connection.
        """
        self._remove_registration(registration.cluster, registration.address)
        key = (registration.cluster, registration.address)
        self._live[key] = replace(registration, topics={}), now_ms
        self._connections.setdefault(registration.connection, {})[key] = None

    def _remove_registration(self, cluster: str, address: str) -> None:
        """Remove the latest registration of an address, also from the list of its connection.

        Do nothing if the address is not registered.
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
        """Apply the topics of a registration in steps, after the broker's earlier registrations.

        If an earlier registration of the broker is not finished, its remaining steps are done
        first. With `is_changed`, all topics are replaced, and otherwise only missing topics are
        added. With `is_read_only`, the topics get no write permission.
        """
        earlier_steps = self._unfinished.get(registration.broker)

        def all_steps() -> Slices[None]:
            """Yield the remaining steps of the earlier registration, then those of this one."""
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

        If the registration is complete, the broker's other topics are removed first. With
        `is_changed`, all topics are replaced. Without it, the broker has registered the same topics
        before, so only missing topics are added. `is_read_only` means that a slave registers for a
        missing master, so the topics get no write permission. The work ends if the broker is
        removed between two steps.
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
        """Remove the topics of a broker that its new registration does not contain, in steps."""
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
        """Add or replace the queues of a topic on the broker `queue.broker`."""
        queues = self._topics.setdefault(topic, {})
        is_new = queue.broker not in queues
        if is_new:
            self.entry_count += 1
        queues[queue.broker] = queue
        self._served.setdefault(queue.broker, {})[topic] = queue

    def _drop_queues(self, topic: str, broker: str) -> None:
        """Remove the queues of a topic on one broker. Do nothing if there are none.

        The topic is removed when no broker has it any longer.
        """
        queues = self._topics.get(topic, {})
        if queues.pop(broker, None) is not None:
            self.entry_count -= 1
        if not queues:
            self._topics.pop(topic, None)
        self._served.get(broker, {}).pop(topic, None)

    def _change_permissions(self, broker: str, change: Callable[[int], int]) -> Slices[int]:
        """Change the permission of each topic of a broker, in steps.

        `change(perm)` gets the permission bits of a topic, and returns the new ones. The steps
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
    """Return a route without the brokers of other zones, and without their queues.

    A broker without a master stays, whatever its zone. This is the zone mode of RocketMQ
    (spec/namesrv.md §5). Upper and lower case are not distinguished.
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


def _list_other_addresses(registration: Registration, known: BrokerData | None) -> dict[int, str]:
    """Return the addresses of the replicas of a registration's broker by id, before it is applied.

    An address has one id only. If the registration's address is known under another id, because a
    slave became master or the other way, that entry is left out. `known` is what is known about the
    broker; None if it is new.
    """
    if known is None:
        return {}
    return {
        broker_id: address
        for broker_id, address in known.addresses.items()
        if address != registration.address or broker_id == registration.broker_id
    }


def _with_acting_master(broker: BrokerData, queues: QueueData) -> BrokerData:
    """Return a broker in which the slave with the smallest id stands in for a missing master.

    In the result, this slave has the id of the master. `queues` are the broker's queues in the
    route. The broker is returned unchanged if it has a master or a writable queue, or does not
    allow an acting master.
    """
    has_master = MASTER_ID in broker.addresses or bool(queues.perm & PERM_WRITE)
    if has_master or not broker.acting_master_enable:
        return broker
    # The addresses are sorted by id, so the first slave has the smallest one.
    (_, slave_address), *others = broker.addresses.items()
    return replace(broker, addresses={MASTER_ID: slave_address, **dict(others)})
