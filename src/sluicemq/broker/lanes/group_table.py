"""The lanes of one group in memory, and their rules: the base of `group.GroupLanes`.

A lane is the members of a group that have the same subscription. Its rule says which messages it
gets (`rules.py`), and the state of a lane in a queue is a `LaneQueue` (`lane_queue.py`).

Everything here treats all lanes of the group alike. How lanes come and go, and what a request of a
member does, is in `group.py`.
"""

from collections import deque
from typing import Any, Final

from sluicemq.broker.lanes.assignments import LaneAssignments
from sluicemq.broker.lanes.lane import Lane, TopicRules
from sluicemq.broker.lanes.lane_queue import LaneQueue, QueueKey, create_spans
from sluicemq.broker.lanes.rules import (
    MATCH_NOTHING,
    AtomChain,
    LaneRule,
    compute_rules,
    compute_sole_rule,
    compute_wanted_chains,
    create_rule,
    get_atoms_by_topic,
)
from sluicemq.broker.lanes.storage import LaneStorage
from sluicemq.broker.offsets import Resets
from sluicemq.model.topic import RETRY_PREFIX

FORGOTTEN_LISTED_MAX: Final = 16
"""The most forgotten subscriptions that tools list."""
EVALUATIONS_MAX: Final = 4096
"""The most evaluations of expressions, per second and queue, to count messages no lane wants. The
count may lag behind."""


class GroupLaneTable:
    """The lanes of one group, with the rules that divide the messages among them."""

    def __init__(self, name: str, storage: LaneStorage) -> None:
        """Create the table of the lanes of the group `name`, without any lane.

        A lane is the members of the group that have the same subscription. `storage` is shared with
        all other groups.
        """
        self.name = name
        self.storage = storage
        self.lanes: dict[str, Lane] = {}
        """By subscription key."""
        self.resets = Resets(storage.mark_changed)
        """The offsets to which readers must be redirected, with the key of a lane as group."""
        self.unmatched_count = 0
        """The number of messages that all lanes have passed and none wanted."""
        self.last_join_number = 0
        """The highest `Lane.join_number` that was allocated."""
        self.counted_offsets: dict[QueueKey, int] = {}
        """By queue: the offset up to which `unmatched_count` is known."""
        self.assignments = LaneAssignments(storage.clock, storage.mark_changed)
        self.go_back_since_ms: dict[QueueKey, int] = {}
        """By queue in which a hand-over waits until nothing is in flight: since when, in ms since
        1970."""
        self._topic_rules: dict[str, TopicRules] = {}
        """By topic: the rules at the last `reassign_rules`."""
        self.forgotten_subscriptions: deque[dict[str, Any]] = deque(maxlen=FORGOTTEN_LISTED_MAX)
        """The subscriptions that were forgotten with unread messages, for tools."""

    def get_live_and_idle_keys(self) -> tuple[list[str], list[str]]:
        """Return (keys of the live lanes, keys of the idle lanes), each in order of priority.

        A message belongs to the first lane that matches it. Live lanes have members; the oldest one
        comes first. Idle lanes have none; the one that became idle last comes first.
        """
        lanes = self.lanes.values()
        live_lanes = [lane for lane in lanes if not lane.is_idle]
        live_lanes.sort(key=lambda lane: lane.join_number)
        latest_idle_first = self.get_idle_lanes()[::-1]
        return [lane.key for lane in live_lanes], [lane.key for lane in latest_idle_first]

    def get_idle_lanes(self) -> list[Lane]:
        """Return the idle lanes, in the order in which they became idle."""
        idle_lanes = [lane for lane in self.lanes.values() if lane.is_idle]
        return sorted(idle_lanes, key=lambda lane: (lane.idle_since_ms, lane.join_number))

    def get_lane_queues(self, queue: QueueKey) -> list[LaneQueue]:
        """Return the states of all lanes that have one in the queue."""
        return [lane.queues[queue] for lane in self.lanes.values() if queue in lane.queues]

    def get_lane_queue(self, key: str, queue: QueueKey) -> LaneQueue | None:
        """Return the state of the lane `key` in a queue. Create it first if it is missing.

        Return None if no such lane exists, or if the lane does not subscribe to the topic.
        """
        lane = self.lanes.get(key)
        if lane is None:
            return None
        if queue not in lane.queues:
            self.ensure_queue(queue)
        return lane.queues.get(queue)

    def is_pulled(self, topic: str) -> bool:
        """Return whether a client has pulled a queue of the topic since the group has lanes."""
        return any(
            lane_queue.reader
            for lane in self.lanes.values()
            for queue, lane_queue in lane.queues.items()
            if queue[0] == topic
        )

    def allocate_join_number(self) -> int:
        """Increment `last_join_number` and return it, for a lane that becomes live."""
        self.last_join_number += 1
        return self.last_join_number

    def ensure_queue(self, queue: QueueKey) -> None:
        """Create the missing states in a queue, for all lanes that subscribe to its topic.

        A lane is the members of the group that have the same subscription. Its state in a queue is
        an offset and the rules that say which messages are its own. A new state begins at the end
        of the queue if another lane has a state there already, otherwise at the join offset of the
        group. All missing states are created in one call, so that their rules exclude each other.
        """
        topic, _ = queue
        lanes_without_state = [
            lane for lane in self.lanes.values() if self._is_state_missing(lane, queue)
        ]
        if not lanes_without_state:
            return

        is_read_by_others = any(queue in lane.queues for lane in self.lanes.values())
        if is_read_by_others:
            committed_offset = self.storage.get_end_offset(queue)
        else:
            # -1 if the group has committed nothing.
            committed_offset = self.storage.get_join_offset(self.name, queue)
        start_offset = max(committed_offset, 0)
        rules = compute_rules(topic, *self.get_live_and_idle_keys())
        for lane in lanes_without_state:
            rule = rules.get(lane.key, MATCH_NOTHING)
            spans = create_spans(start_offset, rule)
            lane.queues[queue] = LaneQueue(
                committed_offset, start_offset, spans, read_end=start_offset
            )

    def _is_state_missing(self, lane: Lane, queue: QueueKey) -> bool:
        """Return whether a lane has no state in a queue, although it subscribes to the topic.

        All lanes subscribe to the group's retry topic.
        """
        topic, _ = queue
        is_retry = topic == RETRY_PREFIX + self.name
        return queue not in lane.queues and (is_retry or topic in get_atoms_by_topic(lane.key))

    def reassign_rules(self) -> None:
        """Replace the rules of all lanes for the messages that will be stored from now on.

        The new rules hold from the current end of each queue on; stored messages keep their lanes.
        A live lane gets the rule that follows from the present live and idle lanes. An idle lane
        keeps only the messages that no live lane wants. Live lanes whose rule has not changed since
        the last call are not changed. The rules are kept in `_topic_rules`.
        """
        previous_rules = self._topic_rules
        self._topic_rules = self._compute_topic_rules(previous_rules)
        end_offsets: dict[QueueKey, int] = {}
        for lane in self.lanes.values():
            for queue, lane_queue in lane.queues.items():
                if queue not in end_offsets:
                    end_offsets[queue] = self.storage.get_end_offset(queue)
                topic, _ = queue
                topic_rules = self._topic_rules[topic]
                if lane.is_idle:
                    lane_queue.restrict_from(end_offsets[queue], topic_rules.unwanted)
                    continue
                rule = topic_rules.future.get(lane.key, MATCH_NOTHING)
                if rule != _find_live_rule(previous_rules.get(topic), lane.key):
                    lane_queue.set_rule_from(end_offsets[queue], rule)

    def _compute_topic_rules(self, previous_rules: dict[str, TopicRules]) -> dict[str, TopicRules]:
        """Return the rules of the present lanes for each topic that a lane reads.

        `previous_rules` is the result of the last call. Rules that have not changed are taken from
        it, which saves time.
        """
        live_keys, idle_keys = self.get_live_and_idle_keys()
        topics = {topic for lane in self.lanes.values() for topic, _ in lane.queues}
        rules_by_topic: dict[str, TopicRules] = {}
        for topic in topics:
            # Computed first, because it keeps the chains alive (`AtomChain`) that the rules extend.
            unwanted = create_rule([], *compute_wanted_chains(topic, live_keys))
            reusable_rules = None
            if topic in previous_rules:
                reusable_rules = previous_rules[topic].hand_over
            hand_over = compute_rules(topic, live_keys, (), reusable_rules)
            future = hand_over
            is_retry = topic == RETRY_PREFIX + self.name
            if is_retry and idle_keys:
                future = compute_rules(topic, live_keys, idle_keys)
            rules_by_topic[topic] = TopicRules(future, hand_over, unwanted)
        return rules_by_topic

    def save_rules(self) -> None:
        """Write the rules of the group to disk, on another thread. Its pulls wait for that.

        When the rules are on disk, the parked pulls of all queues of the group are retried.
        """

        def wake_pulls() -> None:
            for queue in {queue for lane in self.lanes.values() for queue in lane.queues}:
                self.storage.wake_pulls(queue)

        self.storage.save_rules(self.name, wake_pulls)

    def _detach_lane(self, lane: Lane) -> None:
        """Remove a lane from `lanes`, with its resets and assignments, and nothing else.

        The caller assigns the rules again, or adds the lane under another key.
        """
        del self.lanes[lane.key]
        self.resets.forget(group=lane.key)
        self.assignments.forget_lane(lane.key)

    def _remove_lane_and_save(self, lane: Lane) -> None:
        """Remove a lane. Its unread messages go to no other lane.

        In the queues of the lane, the offset of the group becomes the lowest offset of the other
        lanes. The other lanes get new rules, which are saved.
        """
        self._detach_lane(lane)
        for queue in lane.queues:
            self.publish_group_offset(queue)
        self.reassign_rules()
        self.save_rules()

    def publish_group_offset(self, queue: QueueKey) -> None:
        """Set the committed offset of the group in a queue to the lowest offset of its lanes.

        Do nothing if no lane has committed one. A broker without lanes can continue at that offset
        without losing messages.
        """
        lane_queues = self.get_lane_queues(queue)
        if any(lane_queue.committed_offset >= 0 for lane_queue in lane_queues):
            offset = min(lane_queue.current_offset for lane_queue in lane_queues)
            self.storage.offsets.put(self.name, *queue, offset)

    def count_unmatched(self) -> None:
        """Add to `unmatched_count` the messages that all lanes have passed and none wanted.

        Such messages are not delivered to the group, as in RocketMQ. They are found by the
        subscriptions of the present lanes. In each queue, one call examines a limited number of
        messages, and the next call continues after them (`counted_offsets`). The first call begins
        at the lowest offset of the lanes. Called once a second.
        """
        live_keys, idle_keys = self.get_live_and_idle_keys()
        queues_by_topic: dict[str, set[QueueKey]] = {}
        for lane in self.lanes.values():
            for topic in get_atoms_by_topic(lane.key):
                queues_by_topic.setdefault(topic, set())
        for lane in self.lanes.values():
            for queue in lane.queues:
                topic, _ = queue
                if topic in queues_by_topic:  # it is not a retry topic
                    queues_by_topic[topic].add(queue)

        for topic, queues in queues_by_topic.items():
            # The rule that matches what no lane wants, and how many messages it may examine.
            wanted_by_live = compute_wanted_chains(topic, live_keys)
            wanted_by_idle = compute_wanted_chains(topic, idle_keys)
            unwanted = create_rule([], *wanted_by_live, *wanted_by_idle)
            atom_count = _count_general_atoms(*wanted_by_live, *wanted_by_idle)
            count_max = EVALUATIONS_MAX // (1 + atom_count) + 1
            for queue in sorted(queues):
                self._count_unmatched_in_queue(queue, unwanted, count_max)

    def _count_unmatched_in_queue(
        self, queue: QueueKey, unwanted: LaneRule, count_max: int
    ) -> None:
        """Add to `unmatched_count` the messages of one queue that the rule `unwanted` matches.

        At most `count_max` messages are examined, from the offset in `counted_offsets` up to the
        lowest current offset of the lanes. `counted_offsets` is advanced over them.
        """
        lowest_offset = min(lane_queue.current_offset for lane_queue in self.get_lane_queues(queue))
        counted_offset = self.counted_offsets.setdefault(queue, lowest_offset)
        if counted_offset >= lowest_offset:
            return
        if unwanted:
            until = min(lowest_offset, counted_offset + count_max)
            counted_offset, match_count = self.storage.count_matches(
                queue, counted_offset, unwanted, until
            )
            self.unmatched_count += match_count
        else:  # the lanes want all messages
            counted_offset = lowest_offset
        self.counted_offsets[queue] = counted_offset

    @property
    def is_obsolete(self) -> bool:
        """Whether the group needs no lanes any more.

        That is the case if one lane is left that gets all messages of its subscription in each of
        its queues, and if no reset is pending.
        """
        if len(self.lanes) != 1 or self.resets:
            return False
        (lane,) = self.lanes.values()
        for (topic, _), lane_queue in lane.queues.items():
            rule, rule_end = lane_queue.find_rule(lane_queue.current_offset)
            if rule_end is not None or rule != compute_sole_rule(topic, lane.key):
                return False
        return True


def _find_live_rule(topic_rules: TopicRules | None, key: str) -> LaneRule | None:
    """Return the rule for new messages that the lane `key` had at an earlier `reassign_rules`.

    Return None if the topic had no rules then, or the lane was not live.
    """
    # In `hand_over` are only lanes that were live.
    if topic_rules is None or key not in topic_rules.hand_over:
        return None
    return topic_rules.future[key]


def _count_general_atoms(*chains: AtomChain | None) -> int:
    """Return the number of atoms in `chains` that must be evaluated one by one."""
    atom_count = 0
    for chain in chains:
        if chain is not None:
            atom_count += len(list(chain.iter_general_atoms()))
    return atom_count
