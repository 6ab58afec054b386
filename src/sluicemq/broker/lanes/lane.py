"""One lane of a group, and the rules of all lanes for one topic."""

from dataclasses import dataclass, field
from typing import NamedTuple

from sluicemq.broker.lanes.lane_queue import LaneQueue, QueueKey
from sluicemq.broker.lanes.rules import LaneRule, compute_lane_id


@dataclass(slots=True, eq=False)
class Lane:
    """Members of a group that have the same subscription.

    An idle lane has no members. Idle lanes are merged if there are too many of them, so an idle
    lane may have several subscriptions.
    """

    key: str
    """Its subscription key, or the key of several subscriptions (`rules.merge_keys`)."""
    join_number: int
    """Its age: the lane that has been live for the longest time has the lowest number."""
    members: set[str] = field(default_factory=set)
    """The client ids of its members."""
    left_ms: int | None = None
    """When its last member left, in ms since 1970; None while it has members."""
    is_idle: bool = False
    """Whether other lanes get its unread messages, as its last member left some time ago."""
    queues: dict[QueueKey, LaneQueue] = field(default_factory=dict)
    """By queue: the offsets and rules of the lane."""
    unoffered_queues: set[QueueKey] = field(default_factory=set)
    """Queues whose unread messages have not been offered to other lanes since it became idle."""
    abandoned_queues: set[QueueKey] = field(default_factory=set)
    """Queues whose reader has changed to another lane (`assignments.py`)."""
    idle_since_ms: int = 0
    """When the lane became idle, in ms since 1970. Only used while `is_idle`."""

    @property
    def id(self) -> str:
        """The short name by which tools and messages refer to the lane."""
        return compute_lane_id(self.key)


class TopicRules(NamedTuple):
    """Which lanes get which messages of one topic, as computed by `reassign_rules`.

    `future` and `hand_over` are the same dict, except for the retry topic of a group with idle
    lanes. A message of a retry topic that no live lane wants goes to the oldest live lane. By
    `future`, it is left to an idle lane if an idle lane wants it. By `hand_over`, idle lanes do not
    count.
    """

    future: dict[str, LaneRule]
    """By key of a lane: the rule of each live lane for messages that are stored from now on."""
    hand_over: dict[str, LaneRule]
    """By key of a lane: the rule of each live lane for stored messages that an idle lane has not
    read. They are handed over to the live lane whose rule matches them."""
    unwanted: LaneRule
    """Matches the messages that no live lane wants. Idle lanes keep only these messages."""
