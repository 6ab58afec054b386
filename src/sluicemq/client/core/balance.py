"""Who reads which queue: the allocation strategies of RocketMQ's clients.

Every member of a group sorts the same queues and the same member ids and computes the same shares;
nobody is asked. So all members of a group need the same strategy, and it must give what the Java
and Go clients compute, or a queue has two readers, or none (spec/remoting.md §15).

    average               runs of consecutive queues; the first `queues % members` get one more
    average_circle        queue i belongs to member i % members
    machine_room          average over the queues whose broker is named `room@…`, for given rooms
    machine_room_nearby   queues go to the members of their room; those of a room without members
                          are shared among all
    consistent_hash       the member next to the queue on a ring: few queues move when members
                          come and go
    config                exactly the queues that were configured

On the ring stand `virtual_nodes` points of each member, at the MD5 of `<client id>-<number>`; a
queue stands at the MD5 of its text as Java prints it; of an MD5 the first four bytes count.

A strategy is a function (client id, sorted queues, sorted member ids) -> its queues, so a user's
own function is one.
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
_ROOM_MARK: Final = "@"
_NEARBY_MARK: Final = "-"


@dataclass(frozen=True, slots=True)
class MachineRooms:
    """Only queues of brokers named `room@…` with a room of `rooms`; the rest goes after the runs of
    equal size, one to each of the first members."""

    rooms: frozenset[str]

    def __call__(
        self, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in members:
            return []
        # As Java splits: empty parts at the end do not count.
        parts = ((one, one.broker.rstrip(_ROOM_MARK).split(_ROOM_MARK)) for one in sorted(queues))
        near = [one for one, names in parts if len(names) == 2 and names[0] in self.rooms]
        index, count = sorted(members).index(client_id), len(members)
        size, more = divmod(len(near), count)
        own = near[index * size : (index + 1) * size]
        return own + ([near[size * count + index]] if index < more else [])


def room_before_dash(name: str) -> str:
    """`hz` of the broker `hz-broker-a` or the client id `hz-10.0.0.5@77`."""
    return name.partition(_NEARBY_MARK)[0]


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """`inner` within each room; queues of a room without members go by `inner` to all members.

    `broker_room` and `client_room` tell the room from a broker's name and a client id.
    """

    inner: Strategy = allocate_average
    broker_room: Callable[[str], str] = room_before_dash
    client_room: Callable[[str], str] = room_before_dash

    def __call__(
        self, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in members:
            return []
        by_room: dict[str, list[MessageQueue]] = {}
        for queue in sorted(queues):
            by_room.setdefault(_find_room(self.broker_room, queue.broker), []).append(queue)
        near: dict[str, list[str]] = {}
        for member in sorted(members):
            near.setdefault(_find_room(self.client_room, member), []).append(member)
        room = _find_room(self.client_room, client_id)
        own = list(self.inner(client_id, by_room.get(room, []), near[room]))
        for other in sorted(by_room.keys() - near.keys()):
            own += self.inner(client_id, by_room[other], sorted(members))
        return own


def _find_room(tell: Callable[[str], str], name: str) -> str:
    room = tell(name)
    if not room:
        raise ConfigurationError(
            f"the machine room of {name!r} is not known.",
            fix="Begin client ids and broker names with it (room-…), or give functions that tell.",
        )
    return room


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """The ring of Java's client. More `virtual_nodes` share more evenly."""

    virtual_nodes: int = VIRTUAL_NODES

    def __post_init__(self) -> None:
        if not 0 < self.virtual_nodes <= 100_000:
            raise ConfigurationError(
                f"a member shall have {self.virtual_nodes} points on the ring.",
                fix="Use 1 to 100,000; Java's default is 10.",
            )

    def __call__(
        self, client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in members:
            return []
        points, owners = _make_ring(tuple(sorted(members)), self.virtual_nodes)
        own = []
        for queue in sorted(queues):
            text = f"topic={queue.topic}, brokerName={queue.broker}, queueId={queue.queue_id}"
            index = bisect_left(points, hash_to_ring(f"MessageQueue [{text}]"))
            if owners[index % len(points)] == client_id:
                own.append(queue)
        return own


@lru_cache(maxsize=8)
def _make_ring(members: tuple[str, ...], virtual_nodes: int) -> tuple[list[int], list[str]]:
    """Points in rising order and who stands there; of two at one point the later member."""
    ring = {
        hash_to_ring(f"{member}-{number}"): member
        for member in members
        for number in range(virtual_nodes)
    }
    points = sorted(ring)
    return points, [ring[point] for point in points]


def hash_to_ring(text: str) -> int:
    """Where a text stands on the ring: 0 to 2**32 - 1."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


@dataclass(frozen=True, slots=True)
class ConfiguredQueues:
    """Exactly these queues, whoever else is there: the program sees to it that every queue is
    configured at one member."""

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
    """What a strategy may be told: each has its own."""

    virtual_nodes: int
    rooms: str | Iterable[str]
    queues: Iterable[MessageQueue]
    inner: Strategy
    broker_room: Callable[[str], str]
    client_room: Callable[[str], str]


def strategy(choice: str | Strategy, **settings: Unpack[StrategySettings]) -> Strategy:
    """A strategy by name with its settings, or a function as it is.

    Settings: `virtual_nodes` of consistent_hash, `rooms` of machine_room, `queues` of config,
    `inner`, `broker_room` and `client_room` of machine_room_nearby. Raises ConfigurationError.

    >>> strategy("machine_room", rooms=["hz"])
    MachineRooms(rooms=frozenset({'hz'}))
    """
    if callable(choice):
        return choice
    maker = _STRATEGY_FACTORIES.get(_JAVA_NAMES.get(choice, choice))
    if maker is None:
        raise ConfigurationError(
            f"there is no allocation strategy {choice!r:.60}.",
            fix=f"Use {', '.join(STRATEGY_NAMES)}, or a function.",
        )
    try:
        return maker(**settings)
    except TypeError:
        raise ConfigurationError(
            f"the allocation strategy {choice!r} cannot be made with "
            f"{', '.join(sorted(settings)) or 'none'}.",
            fix="machine_room wants rooms=, config wants queues=, consistent_hash takes "
            "virtual_nodes=, machine_room_nearby takes inner=, broker_room=, client_room=.",
        ) from None


def allocate(
    chosen: Strategy,
    client_id: str,
    queues: Sequence[MessageQueue],
    members: Sequence[str],
    group: str = "",
) -> list[MessageQueue]:
    """What the strategy gives of these queues, sorted; a queue that is none of them is left out.

    Both are sorted before it is asked, so that a user's function sees what every member sees.
    Raises ConfigurationError when that function fails.
    """
    try:
        own = chosen(client_id, sorted(queues), sorted(members))
    except Exception as error:
        raise ConfigurationError(
            f"the allocation strategy of {group!r} failed: {error!r}.",
            fix="It gets the client id, sorted queues and sorted members, and returns queues.",
        ) from error
    return sorted(set(own) & set(queues))
