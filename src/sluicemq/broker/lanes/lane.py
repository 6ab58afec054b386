"""One lane of a group, and the rules of all lanes for one topic."""

from dataclasses import dataclass, field
from typing import NamedTuple

from sluicemq.broker.lanes.lane_queue import LaneQueue, QueueKey
from sluicemq.broker.lanes.rules import LaneRule, compute_lane_id


@dataclass(slots=True, eq=False)
class Lane:
    """Members of a group that have the same subscription. An idle lane may be of several ones."""

    key: str
    """Its subscription key, or the key of several subscriptions (`rules.merge_keys`)."""
    join_number: int
    """Its age: the oldest lane has the lowest number."""
    members: set[str] = field(default_factory=set)
    """The client ids of its members."""
    left_ms: int | None = None
    """When its last member left, in ms since 1970; None while it has members."""
    is_idle: bool = False
    """Whether its unread messages are offered to other lanes."""
    queues: dict[QueueKey, LaneQueue] = field(default_factory=dict)
    unoffered_queues: set[QueueKey] = field(default_factory=set)
    """Queues whose unread messages have not been offered to other lanes since it became idle."""
    abandoned_queues: set[QueueKey] = field(default_factory=set)
    """Queues whose reader has changed to another lane (`assignments.py`)."""
    idle_since_ms: int = 0

    @property
    def id(self) -> str:
        """The short name by which tools and messages refer to the lane."""
        return compute_lane_id(self.key)


class TopicRules(NamedTuple):
    """The rules that decide which lane gets which messages of a topic.

    On a retry topic, messages that no live lane wants belong to idle lanes by `future`, but not by
    `hand_over`. Otherwise the two are equal.
    """

    future: dict[str, LaneRule]
    """By key: the rule of each lane for messages that are stored from now on."""
    hand_over: dict[str, LaneRule]
    """By key: the rule of each live lane for messages that idle lanes have not read."""
    unwanted: LaneRule
    """Matches the messages that no live lane wants."""
