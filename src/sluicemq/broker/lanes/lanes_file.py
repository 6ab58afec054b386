"""The lanes of a group as JSON: in the file `config/sluiceLanes.json`, and as tools show them.

Lanes share clauses, and clauses share chains of atoms. So the file has a table of the chains, and
one of the clauses, of each group. Spans refer to a clause by its number, and a chain refers to its
parent by its number, which is lower.
"""

from typing import Any

from sluicemq.broker.lanes.filters import format_in_expression
from sluicemq.broker.lanes.group import GroupLanes
from sluicemq.broker.lanes.lane import Lane
from sluicemq.broker.lanes.lane_queue import NO_READER, LaneQueue, QueueKey, Span
from sluicemq.broker.lanes.rules import (
    Atom,
    AtomChain,
    Clause,
    extend_chain,
    get_atoms_by_topic,
    get_tags,
    split_key,
)
from sluicemq.model.message import TAGS
from sluicemq.model.subscription import SQL92, TAG


def describe_lanes(lanes: GroupLanes) -> list[dict[str, Any]]:
    """Return the lanes as JSON objects for tools, live ones first, the oldest first."""
    live, idle = lanes.get_ordered_keys()
    return [_describe_lane(lanes, lanes.lanes[key]) for key in (*live, *idle)]


def _describe_lane(lanes: GroupLanes, lane: Lane) -> dict[str, Any]:
    """Return one lane as a JSON object for tools."""
    return {
        "clientIds": sorted(lane.members),
        "isIdle": lane.is_idle,
        "lane": lane.id,
        "leftTimestamp": lane.left_ms or 0,
        "queues": [
            {
                "offset": lane_queue.current_offset,
                "maxOffset": lanes.storage.get_end_offset(queue),
                "queueId": queue[1],
                "topic": queue[0],
            }
            for queue, lane_queue in sorted(lane.queues.items())
        ],
        "subscriptions": {
            topic: describe_atoms(atoms) for topic, atoms in get_atoms_by_topic(lane.key).items()
        },
        "subscriptionCount": len(split_key(lane.key)),
    }


def describe_atoms(atoms: tuple[Atom, ...]) -> list[str]:
    """Return [kind, expression] for tools; one expression for all atoms of a merged lane."""
    if all(kind == TAG for kind, _ in atoms):
        return [TAG, "||".join(text for _, text in atoms)]
    texts = []
    for atom in atoms:
        if atom.kind != TAG:
            texts.append(atom.text)
        elif (tags := get_tags(atom)) is None:
            texts.append("TRUE")
        else:
            texts.append(format_in_expression(TAGS, sorted(tags)))
    return [SQL92, " OR ".join(texts)]


class _ClauseTable:
    """The clauses and chains of one group, each with a number."""

    def __init__(self) -> None:
        self._chains: dict[AtomChain, int] = {}
        self._clauses: dict[Clause, int] = {}

    def get_number(self, clause: Clause) -> int:
        """Return the number of a clause. A new clause, and its chains, are added to the table."""
        if clause not in self._clauses:
            for chain in clause.excluded:
                missing: list[AtomChain] = []
                node: AtomChain | None = chain
                while node is not None and node not in self._chains:
                    missing.append(node)
                    node = node.parent
                for node in reversed(missing):
                    self._chains[node] = len(self._chains)
            self._clauses[clause] = len(self._clauses)
        return self._clauses[clause]

    def to_objects(self) -> dict[str, Any]:
        """Return the fields of the file that contain both tables."""
        chains = self._chains
        return {
            "clauses": [
                [sorted(map(list, required)), sorted(chains[chain] for chain in excluded)]
                for required, excluded in self._clauses
            ],
            "orders": [
                [chains[chain.parent] if chain.parent is not None else -1, *chain.atom]
                for chain in chains
            ],
        }


def encode_group(lanes: GroupLanes) -> dict[str, Any]:
    """Return a group as a JSON object for the file."""
    table = _ClauseTable()
    members = {key: lane.members for key, lane in lanes.lanes.items()}
    return {
        "forgotten": list(lanes.forgotten_subscriptions),
        "group": lanes.name,
        "lanes": [_encode_lane(lane, table) for lane in lanes.lanes.values()],
        "movers": lanes.assignments.to_objects(members),
        "resets": lanes.resets.to_objects(),
        "unmatched": lanes.unmatched_count,
        **table.to_objects(),
    }


def _encode_lane(lane: Lane, table: _ClauseTable) -> dict[str, Any]:
    """Return a lane as a JSON object for the file."""
    return {
        "idleMs": lane.idle_since_ms,
        "isIdle": lane.is_idle,
        "number": lane.join_number,
        "offers": sorted(lane.unoffered_queues),
        "orphans": sorted(lane.abandoned_queues),
        "places": [
            [
                *queue,
                lane_queue.committed_offset,
                lane_queue.start_offset,
                lane_queue.reader,
                [[first, end, table.get_number(clause)] for first, end, clause in lane_queue.spans],
            ]
            for queue, lane_queue in lane.queues.items()
        ],
        "subscription": lane.key,
    }


def decode_group(lanes: GroupLanes, value: Any) -> None:
    """Add the lanes of a JSON object that `encode_group` returned to a group without lanes.

    A broker without lanes may have run since then, from the committed offsets of the group. Then
    the messages before these offsets are done. Raises KeyError, TypeError or ValueError for an
    invalid object.
    """
    now_ms = lanes.storage.clock.now_ms()
    chains: list[AtomChain | None] = []
    for parent, kind, text in value["orders"]:
        chains.append(extend_chain(chains[parent] if parent >= 0 else None, Atom(kind, text)))
    clauses = [
        Clause(
            frozenset(Atom(*atom) for atom in required),
            frozenset(chain for number in excluded if (chain := chains[number])),
        )
        for required, excluded in value["clauses"]
    ]
    for item in value["lanes"]:
        lane = Lane(str(item["subscription"]), int(item["number"]), left_ms=now_ms)
        lane.is_idle, lane.idle_since_ms = bool(item["isIdle"]), int(item["idleMs"])
        lane.unoffered_queues = _decode_queues(item["offers"])
        lane.abandoned_queues = _decode_queues(item.get("orphans", ()))
        for topic, queue_id, offset, start, reader, spans in item["places"]:
            queue = (str(topic), int(queue_id))
            lane_queue = lane.queues[queue] = LaneQueue(
                committed_offset=int(offset),
                start_offset=int(start),
                spans=[Span(first, end, clauses[number]) for first, end, number in spans],
                reader=str(reader),
            )
            committed = lanes.storage.offsets.committed(lanes.name, *queue)
            if committed > lane_queue.current_offset:
                lane_queue.commit(committed)
            if lane_queue.reader not in {"", NO_READER}:
                # The next pull of the reader tells how much it has in flight.
                lane_queue.delivered_end = lanes.storage.get_end_offset(queue)
        get_atoms_by_topic(lane.key)  # raises an exception if the key is invalid
        lanes.lanes[lane.key] = lane
        lanes.last_join_number = max(lanes.last_join_number, lane.join_number)
    lanes.assignments.load(value.get("movers", ()))
    lanes.resets.load(value.get("resets", ()))
    lanes.forgotten_subscriptions.extend(value.get("forgotten", ()))
    lanes.unmatched_count = int(value.get("unmatched", 0))


def _decode_queues(items: Any) -> set[QueueKey]:
    """Return queues from a JSON list of topic and queue id. Raises TypeError or ValueError."""
    return {(str(topic), int(queue_id)) for topic, queue_id in items}
