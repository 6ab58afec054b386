"""The lanes of a group as JSON: in the file `config/sluiceLanes.json`, and as tools show them.

Lanes share clauses, and clauses share chains of atoms. So the file has a table of the chains, and
one of the clauses, of each group. The number of an entry is its index in the table. The JSON keys
are older than the names in the code:

    group          GroupLanes.name
    lanes          GroupLanes.lanes: a list of objects
      subscription   Lane.key
      number         Lane.join_number
      isIdle, idleMs Lane.is_idle, Lane.idle_since_ms
      places         Lane.queues: a list of [topic, queue id, committed offset, start offset,
                     reader, spans]; each span is [first offset, end or null, number of the clause]
      offers         Lane.unoffered_queues: a list of [topic, queue id]
      orphans        Lane.abandoned_queues: a list of [topic, queue id]
    orders         the chains: a list of [number of the parent or -1, kind, text], with the kind and
                   text of the last atom. A parent has a lower number than its chain
    clauses        the clauses: a list of [required atoms, numbers of the excluded chains]; each
                   atom is [kind, text]
    movers         GroupLanes.assignments: a list of [client id, topic, queue id, key of a lane]
    resets         GroupLanes.resets (`Resets.to_objects`)
    forgotten      GroupLanes.forgotten_subscriptions
    unmatched      GroupLanes.unmatched_count

The members of a lane are not saved: they return with their heartbeats.
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
    get_matched_tags,
    split_key,
)
from sluicemq.model.message import TAGS
from sluicemq.model.subscription import SQL92, TAG


def describe_lanes(lanes: GroupLanes) -> list[dict[str, Any]]:
    """Return the lanes of a group as JSON objects for tools, in order of priority.

    The live lanes are first, the oldest of them at the beginning. The idle lane that became idle
    first is the last one.
    """
    live, idle = lanes.get_live_and_idle_keys()
    return [_describe_lane(lanes, lanes.lanes[key]) for key in (*live, *idle)]


def _describe_lane(lanes: GroupLanes, lane: Lane) -> dict[str, Any]:
    """Return one lane as a JSON object for tools.

    The value of "leftTimestamp", when the last member left, is 0 while the lane has members.
    """
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
    """Return [kind, expression] for tools, where the expression matches if one of the atoms does.

    The kind is TAG if all atoms are tag expressions. Otherwise it is SQL92, and tag expressions are
    translated to SQL92. A merged lane has several atoms, any other lane has one.
    """
    if all(atom.kind == TAG for atom in atoms):
        return [TAG, "||".join(atom.text for atom in atoms)]
    return [SQL92, " OR ".join(map(_describe_in_sql92, atoms))]


def _describe_in_sql92(atom: Atom) -> str:
    """Return the text of an atom, one filter expression.

    A tag expression is translated to SQL92: "a||b" becomes "TAGS IN ('a', 'b')", and a tag
    expression that matches all messages becomes "TRUE". Other texts are returned as they are.
    """
    if atom.kind != TAG:
        return atom.text
    tags = get_matched_tags(atom)
    if tags is None:  # it matches all messages
        return "TRUE"
    return format_in_expression(TAGS, sorted(tags))


class _ClauseTable:
    """The tables of the clauses and chains of one group, while the group is encoded."""

    def __init__(self) -> None:
        self._chains: dict[AtomChain, int] = {}
        """The number of each chain, in ascending order."""
        self._clauses: dict[Clause, int] = {}
        """The number of each clause, in ascending order."""

    def get_or_add_number(self, clause: Clause) -> int:
        """Return the number of a clause in the table. Add the clause if it is new.

        The chains that it excludes are added, too. A chain extends its parent by one filter
        expression, and is added after the parent.
        """
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
        """Return the JSON fields "clauses" and "orders" of the file, lists in the order of numbers.

        A clause is [[[kind, text], …], [number of a chain, …]]: its required atoms and its excluded
        chains. A chain, in "orders", is [number of its parent, kind, text]: the kind and the text
        are those of its last atom. The number is -1 if the chain has no parent.
        """
        encoded_clauses = []
        for required, excluded in self._clauses:
            chain_numbers = [self._chains[chain] for chain in excluded]
            encoded_clauses.append([sorted(map(list, required)), sorted(chain_numbers)])
        encoded_chains = []
        for chain in self._chains:
            parent_number = self._chains[chain.parent] if chain.parent is not None else -1
            encoded_chains.append([parent_number, *chain.atom])
        return {"clauses": encoded_clauses, "orders": encoded_chains}


def encode_group(lanes: GroupLanes) -> dict[str, Any]:
    """Return the lanes of a group as a JSON object for the file.

    The docstring of the module lists the keys. `decode_group` reads the object.
    """
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
    """Return a lane as a JSON object for the file; the module's docstring lists its keys.

    The clauses of its spans are added to `table`.
    """
    return {
        "idleMs": lane.idle_since_ms,
        "isIdle": lane.is_idle,
        "number": lane.join_number,
        "offers": sorted(lane.unoffered_queues),
        "orphans": sorted(lane.abandoned_queues),
        "places": [
            _encode_lane_queue(queue, lane_queue, table)
            for queue, lane_queue in lane.queues.items()
        ],
        "subscription": lane.key,
    }


def _encode_lane_queue(queue: QueueKey, lane_queue: LaneQueue, table: _ClauseTable) -> list[Any]:
    """Return the state of a lane in a queue as a JSON list for the file.

    It is [topic, queue id, committed offset, start offset, client id of the reader, spans]. A span
    is [start, end, number of its clause]. The clauses are added to `table`.
    """
    encoded_spans = []
    for start_offset, end_offset, clause in lane_queue.spans:
        encoded_spans.append([start_offset, end_offset, table.get_or_add_number(clause)])
    return [
        *queue,
        lane_queue.committed_offset,
        lane_queue.start_offset,
        lane_queue.reader,
        encoded_spans,
    ]


def decode_group(lanes: GroupLanes, group_object: Any) -> None:
    """Add the lanes in `group_object`, a result of `encode_group`, to the empty group `lanes`.

    The lanes have no members. Raises LookupError, TypeError or ValueError if the object is invalid.
    Some of the lanes may have been added then.
    """
    clauses = _decode_clauses(group_object)
    for lane_object in group_object["lanes"]:
        lane = _decode_lane(lanes, lane_object, clauses)
        lanes.lanes[lane.key] = lane
        lanes.last_join_number = max(lanes.last_join_number, lane.join_number)
    lanes.assignments.load(group_object.get("movers", ()))
    lanes.resets.load(group_object.get("resets", ()))
    lanes.forgotten_subscriptions.extend(group_object.get("forgotten", ()))
    lanes.unmatched_count = int(group_object.get("unmatched", 0))


def _decode_clauses(group_object: Any) -> list[Clause]:
    """Return the clauses in the JSON object of a group. The index of a clause is its number.

    Raises LookupError, TypeError or ValueError if the object is invalid.
    """
    chains = _decode_chains(group_object["orders"])
    clauses = []
    for required_atoms, chain_numbers in group_object["clauses"]:
        required = frozenset([Atom(*encoded_atom) for encoded_atom in required_atoms])
        excluded_or_none = [chains[chain_number] for chain_number in chain_numbers]
        excluded = frozenset([chain for chain in excluded_or_none if chain is not None])
        clauses.append(Clause(required, excluded))
    return clauses


def _decode_chains(encoded_chains: Any) -> list[AtomChain | None]:
    """Return the chains of atoms in the JSON object of a group. The index of a chain is its number.

    Each encoded chain is [number of an earlier chain, kind, text]. It extends that chain by the
    atom with this kind and text. If the number is -1, it has only this atom. Raises LookupError,
    TypeError or ValueError if a chain is invalid.
    """
    chains: list[AtomChain | None] = []
    for parent_number, atom_kind, expression in encoded_chains:
        parent = chains[parent_number] if parent_number >= 0 else None
        chains.append(extend_chain(parent, Atom(atom_kind, expression)))
    return chains


def _decode_lane(lanes: GroupLanes, lane_object: Any, clauses: list[Clause]) -> Lane:
    """Return the lane that a JSON object describes. It is not added to the group `lanes`.

    The lane has no members, and its last member counts as having left now. The index of a clause in
    `clauses` is its number in the object. Raises LookupError, TypeError or ValueError if the object
    is invalid.
    """
    now_ms = lanes.storage.clock.now_ms()
    lane = Lane(str(lane_object["subscription"]), int(lane_object["number"]), left_ms=now_ms)
    lane.is_idle = bool(lane_object["isIdle"])
    lane.idle_since_ms = int(lane_object["idleMs"])
    lane.unoffered_queues = _decode_queues(lane_object["offers"])
    lane.abandoned_queues = _decode_queues(lane_object.get("orphans", ()))
    for topic, queue_id, *state in lane_object["places"]:
        queue = (str(topic), int(queue_id))
        lane_queue = lane.queues[queue] = _decode_lane_queue(state, clauses)
        # The offset of the group is the lowest of its lanes, unless a broker without lanes has
        # run since the file was written. Then the messages before it are done for all lanes.
        group_offset = lanes.storage.offsets.committed(lanes.name, *queue)
        if group_offset > lane_queue.current_offset:
            lane_queue.commit(group_offset)
        if lane_queue.reader not in {"", NO_READER}:
            # The reader may have any message in flight. Its next pull tells how many it has.
            lane_queue.delivered_end = lanes.storage.get_end_offset(queue)
    get_atoms_by_topic(lane.key)  # raises an exception if the key is invalid
    return lane


def _decode_lane_queue(state: list[Any], clauses: list[Clause]) -> LaneQueue:
    """Return the state of a lane in a queue that a JSON list describes.

    `state` is [committed offset, start offset, client id of the reader, spans]. A span is [start,
    end, index of its clause in `clauses`]. Raises LookupError, TypeError or ValueError if the list
    is invalid.
    """
    committed_offset, start_offset, reader, encoded_spans = state
    return LaneQueue(
        committed_offset=int(committed_offset),
        start_offset=int(start_offset),
        spans=[
            Span(span_start, span_end, clauses[clause_number])
            for span_start, span_end, clause_number in encoded_spans
        ],
        reader=str(reader),
    )


def _decode_queues(queue_lists: Any) -> set[QueueKey]:
    """Return queues from a JSON list of topic and queue id. Raises TypeError or ValueError."""
    return {(str(topic), int(queue_id)) for topic, queue_id in queue_lists}
