"""Lags of queues in the form in which a broker reports them.

A group whose members subscribe differently reads a topic in lanes. Then each lane reports the lag
of the queues that it reads.
"""

from collections.abc import Iterator

from sluicemq.broker.consume.matching import QueueLag
from sluicemq.broker.lanes.lane import Lane
from sluicemq.broker.lanes.lanes_file import describe_atoms
from sluicemq.broker.lanes.rules import get_atoms_by_topic
from sluicemq.wire import bodies


def list_queues_of_lane(lane: Lane, queues: list[QueueLag]) -> list[QueueLag]:
    """Return the entries of `queues` for the queues of one lane, with the lag of this lane only."""
    lane_queues = []
    for queue in queues:
        for queue_lane, tally in queue.lanes:
            if queue_lane is lane:
                lane_queues.append(queue._replace(committed=tally.start, tally=tally))
    return lane_queues


def iter_lane_lags(topic: str, queues: list[QueueLag]) -> Iterator[bodies.LaneMatching]:
    """Yield the lag of each lane in all queues, as the body of an answer describes it.

    Live lanes come before idle ones, and the oldest first. `queues` are the queues of `topic`.
    """
    lanes: dict[str, Lane] = {}
    for queue in queues:
        for lane, _ in queue.lanes:
            lanes[lane.key] = lane
    for lane in sorted(lanes.values(), key=lambda lane: (lane.is_idle, lane.join_number)):
        kind, expression = describe_atoms(get_atoms_by_topic(lane.key).get(topic, ()))
        yield bodies.LaneMatching(
            lane=lane.id,
            kind=kind,
            expression=expression,
            client_ids=tuple(sorted(lane.members)),
            queues=tuple(map(encode_queue_lag, list_queues_of_lane(lane, queues))),
        )


def encode_queue_lag(queue: QueueLag) -> bodies.QueueMatching:
    """Return the lag of a queue as the part of an answer's body that describes it.

    In the body the tally is called `matching`; it is None if the filter is unknown.
    """
    match_count: int | None = None
    eta_ms: int | None = None
    if queue.tally is not None:
        match_count = queue.tally.count
        eta_s = queue.tally.eta_s
        if eta_s is not None:
            eta_ms = round(eta_s * 1000)
    return bodies.QueueMatching(
        queue_id=queue.queue_id,
        committed=queue.committed,
        offset_min=queue.offset_min,
        offset_max=queue.offset_max,
        matching=match_count,
        eta_ms=eta_ms,
        in_flight=queue.in_flight,
        extra=queue.extra,
    )
