"""Decide which member of a group reads which queues: RocketMQ's allocation strategies.

Every member of a group sorts the same queues and the same member ids and computes the same
allocation, without asking anybody. So all members of a group need the same strategy, and the result
must equal that of the Java and Go clients: otherwise a queue has two readers, or none
(spec/remoting.md §15).

    average               runs of consecutive queues; the first `queues % members` members get one
                          queue more
    average_circle        queue i belongs to member i % members
    machine_room          average, but only over queues of brokers named `room@…` in given rooms
    machine_room_nearby   queues belong to members of their room; queues of a room without members
                          are allocated to all members
    consistent_hash       the member next to the queue on a hash ring: few queues move when members
                          come and go
    config                exactly the configured queues

The hash ring has `virtual_nodes` points for each member, at the hash of `<client id>-<number>`. The
position of a queue is the hash of its text as Java prints it. The hash is the first four bytes of
the MD5.

A strategy is a function (client id, sorted queues, sorted member ids) -> queues of that client. So
an application can pass a function of its own.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypedDict, Unpack

from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue, Strategy, allocate_average, allocate_circle

VIRTUAL_NODES: Final = 10
"""The number of points of a member on the hash ring, by default."""
_ROOM_MARK: Final = "@"
_NEARBY_MARK: Final = "-"


@dataclass(frozen=True, slots=True)
class MachineRooms:
    """The strategy machine_room: allocates queues of brokers named `room@…` in one of `rooms`.

    Each member gets consecutive queues, and all members get equally many. The queues that are left
    over go to the first members, one each.
    """

    rooms: frozenset[str]

    def __call__(
        self, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in members:
            return []
        allowed_queues = [queue for queue in sorted(queues) if self._is_in_rooms(queue.broker)]

        # Each member gets `queues_each` consecutive queues.
        member_index = sorted(members).index(client_id)
        queues_each, leftover_count = divmod(len(allowed_queues), len(members))
        start = member_index * queues_each
        assigned = allowed_queues[start : start + queues_each]

        # The queues that are left over are at the end.
        if member_index < leftover_count:
            assigned.append(allowed_queues[queues_each * len(members) + member_index])
        return assigned

    def _is_in_rooms(self, broker: str) -> bool:
        """Return whether the name of a broker is `room@rest`, with one of the rooms.

        It is split as Java's String.split does: empty parts at the end do not count.
        """
        room_and_rest = broker.rstrip(_ROOM_MARK).split(_ROOM_MARK)
        return len(room_and_rest) == 2 and room_and_rest[0] in self.rooms


def room_before_dash(name: str) -> str:
    """Return the part of `name` before the first dash.

    For the broker `hz-broker-a` or the client id `hz-10.0.0.5@77` that is `hz`.
    """
    return name.partition(_NEARBY_MARK)[0]


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """The strategy machine_room_nearby: allocates queues to members of the same room.

    `inner` allocates the queues of each room to its members, and the queues of a room without
    members to all members. `broker_room` and `client_room` return the room of a broker name and of
    a client id.
    """

    inner: Strategy = allocate_average
    broker_room: Callable[[str], str] = room_before_dash
    client_room: Callable[[str], str] = room_before_dash

    def __call__(
        self, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in members:
            return []
        queues_by_room: dict[str, list[MessageQueue]] = {}
        for queue in sorted(queues):
            broker_room = _find_machine_room(self.broker_room, queue.broker)
            queues_by_room.setdefault(broker_room, []).append(queue)
        members_by_room: dict[str, list[str]] = {}
        for member in sorted(members):
            member_room = _find_machine_room(self.client_room, member)
            members_by_room.setdefault(member_room, []).append(member)

        client_room = _find_machine_room(self.client_room, client_id)
        queues_in_room = queues_by_room.get(client_room, [])
        assigned = list(self.inner(client_id, queues_in_room, members_by_room[client_room]))
        for room_without_members in sorted(queues_by_room.keys() - members_by_room.keys()):
            assigned += self.inner(client_id, queues_by_room[room_without_members], sorted(members))
        return assigned


def _find_machine_room(get_room: Callable[[str], str], name: str) -> str:
    """Return the machine room of the broker or client called `name`, by calling `get_room(name)`.

    Raises ConfigurationError if `get_room` returns "", which means that the room is unknown.
    """
    room_name = get_room(name)
    if not room_name:
        raise ConfigurationError(
            f"the machine room of {name!r} is unknown.",
            fix="Begin client ids and broker names with it (room-…), or pass the functions "
            "broker_room and client_room.",
        )
    return room_name


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """The strategy consistent_hash, with the same ring as Java's client.

    Each member has `virtual_nodes` points on the ring; more points distribute the queues more
    evenly. The constructor raises ConfigurationError unless there are 1 to 100,000.
    """

    virtual_nodes: int = VIRTUAL_NODES

    def __post_init__(self) -> None:
        if not 0 < self.virtual_nodes <= 100_000:
            raise ConfigurationError(
                f"virtual_nodes must be 1 to 100,000, got {self.virtual_nodes}.",
                fix="Use 1 to 100,000; Java's default is 10.",
            )

    def __call__(
        self, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in members:
            return []
        points, owners = _make_ring(tuple(sorted(members)), self.virtual_nodes)
        assigned = []
        for queue in sorted(queues):
            # The text of a queue in Java, whose hash Java's client uses.
            fields = f"topic={queue.topic}, brokerName={queue.broker}, queueId={queue.queue_id}"
            queue_position = hash_to_ring(f"MessageQueue [{fields}]")
            # The queue belongs to the next point on the ring; after the last point comes the first.
            point_index = bisect_left(points, queue_position) % len(points)
            if owners[point_index] == client_id:
                assigned.append(queue)
        return assigned


@lru_cache(maxsize=8)
def _make_ring(members: tuple[str, ...], virtual_nodes: int) -> tuple[list[int], list[str]]:
    """Return the hash ring of consistent hashing, with `virtual_nodes` points for each member.

    Returns (points in ascending order, the member at each of these points). A point is the hash of
    "member-0", "member-1" and so on. If two members have the same point, it belongs to the later of
    `members`.
    """
    owner_by_point = {}
    for member in members:
        for node_number in range(virtual_nodes):
            owner_by_point[hash_to_ring(f"{member}-{node_number}")] = member
    points = sorted(owner_by_point)
    return points, [owner_by_point[point] for point in points]


def hash_to_ring(ring_key: str) -> int:
    """Return the position of a text on the ring: 0 to 2**32 - 1."""
    digest = hashlib.md5(ring_key.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


@dataclass(frozen=True, slots=True)
class ConfiguredQueues:
    """The strategy config: allocates exactly these queues, whatever the other members do.

    The application must configure every queue at one member.
    """

    queues: frozenset[MessageQueue]

    def __call__(
        self, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        del client_id, members
        return [queue for queue in sorted(queues) if queue in self.queues]


_STRATEGY_FACTORIES: Final[dict[str, Callable[..., Strategy]]] = {
    "average": lambda: allocate_average,
    "average_circle": lambda: allocate_circle,
    "consistent_hash": ConsistentHash,
    "machine_room_nearby": MachineRoomNearby,
    "machine_room": lambda rooms: MachineRooms(
        frozenset([rooms] if isinstance(rooms, str) else rooms)
    ),
    "config": lambda queues: ConfiguredQueues(frozenset(queues)),
}
_JAVA_NAMES: Final = {
    "AVG": "average",
    "AVG_BY_CIRCLE": "average_circle",
    "CONSISTENT_HASH": "consistent_hash",
    "MACHINE_ROOM_NEARBY": "machine_room_nearby",
    "MACHINE_ROOM": "machine_room",
    "CONFIG": "config",
}
STRATEGY_NAMES: Final = tuple(sorted(_STRATEGY_FACTORIES))


class StrategySettings(TypedDict, total=False):
    """The settings of all strategies. Each strategy has its own; see `strategy`."""

    virtual_nodes: int
    rooms: str | Iterable[str]
    queues: Iterable[MessageQueue]
    inner: Strategy
    broker_room: Callable[[str], str]
    client_room: Callable[[str], str]


def strategy(choice: str | Strategy, **settings: Unpack[StrategySettings]) -> Strategy:
    """Return the allocation strategy called `choice`, with its settings.

    A strategy is a function that divides the queues of a topic among the members of a group. A
    function as `choice` is returned unchanged, and settings are ignored. Names are `STRATEGY_NAMES`
    or Java's (AVG, AVG_BY_CIRCLE …). Settings are `virtual_nodes` of consistent_hash, `rooms` of
    machine_room, `queues` of config, and `inner`, `broker_room` and `client_room` of
    machine_room_nearby.

    Raises ConfigurationError for an unknown name and for settings that the strategy does not have.

        >>> strategy("machine_room", rooms=["hz"])
        MachineRooms(rooms=frozenset({'hz'}))
    """
    if callable(choice):
        return choice
    maker = _STRATEGY_FACTORIES.get(_JAVA_NAMES.get(choice, choice))
    if maker is None:
        raise ConfigurationError(
            f"the allocation strategy {choice!r:.60} does not exist.",
            fix=f"Use {', '.join(STRATEGY_NAMES)}, or a function.",
        )
    try:
        return maker(**settings)
    except TypeError:
        raise ConfigurationError(
            f"the allocation strategy {choice!r} does not accept the settings: "
            f"{', '.join(sorted(settings)) or 'none'}.",
            fix="Pass rooms= to machine_room, queues= to config; optionally virtual_nodes= to "
            "consistent_hash, and inner=, broker_room=, client_room= to machine_room_nearby.",
        ) from None


def allocate(
    allocation: Strategy,
    client_id: str,
    queues: Sequence[MessageQueue],
    members: Sequence[str],
    group: str = "",
) -> list[MessageQueue]:
    """Return the queues that the member `client_id` of a group has to read, sorted.

    The strategy `allocation` is called as `allocation(client_id, queues, members)` with sorted
    lists, so that all members compute from the same input. Queues in its result that are not in
    `queues` are left out. `group` is used only in the text of errors.

    Raises ConfigurationError if the strategy raises an exception.
    """
    try:
        assigned = allocation(client_id, sorted(queues), sorted(members))
    except Exception as error:
        raise ConfigurationError(
            f"the allocation strategy of {group!r} failed: {error!r}.",
            fix="Use a function that takes the client id, sorted queues and sorted members, and "
            "returns queues.",
        ) from error
    return sorted(set(assigned) & set(queues))
