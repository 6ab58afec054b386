"""The lanes of one group: which lane gets which messages.

Each lane has its own state in each queue (`lane_queue.py`): an offset and, from there on, the rules
that say which messages are its own (`rules.py`). At each offset of a queue, the rules of a group's
lanes exclude each other, so that no message is delivered twice. Together they cover all messages
that a lane wants, so that none is lost. Lanes change in these ways (design/0009):

    join       From the end of each queue on, a new lane gets the messages that no older lane
               wants. Of the messages of the last half minute, it gets those that no lane wants
    leave      A lane without members keeps its offsets. After IDLE_AFTER_MS it is *idle*: its
               unread messages are offered to the other lanes, the oldest first. Messages that no
               other lane wants wait for it, for a day
    return     An idle lane whose member is back continues at its offsets, as the youngest lane
    merge      An idle lane costs some time for each of its queues every second. So of more than
               IDLE_LANES_MAX idle lanes, two that became idle one after the other become one, with
               the spans of both. When a member is back, its lane is split off again, with the
               clauses that require its subscription. Of more than IDLE_SUBSCRIPTIONS_MAX
               subscriptions in idle lanes, the lane that became idle first is forgotten

A lane that gets messages before its current offset goes back to them. That is only possible when
it has no messages in flight in that queue, so its pulls wait for a moment, and then its reader is
redirected with PULL_OFFSET_MOVED (21), as after an offset reset. The broker itself moves a lane
without members past messages that are not its own.

A group in which all members have the same subscription has no lanes, and behaves as in RocketMQ.
The lanes of a group end when one lane is left whose rules are those of an only lane.
"""

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from sluicemq.broker.lanes.assignments import LaneAssignments
from sluicemq.broker.lanes.lane import Lane, TopicRules
from sluicemq.broker.lanes.lane_queue import (
    LaneQueue,
    QueueKey,
    Span,
    create_spans,
    merge_spans,
)
from sluicemq.broker.lanes.rules import (
    MATCH_NOTHING,
    AtomChain,
    compute_rules,
    compute_sole_rule,
    compute_wanted_chains,
    create_rule,
    get_atoms_by_topic,
    get_required_atoms,
    merge_keys,
    split_key,
)
from sluicemq.broker.lanes.storage import LaneStorage
from sluicemq.broker.offsets import Resets
from sluicemq.model.topic import RETRY_PREFIX

log = logging.getLogger(__name__)

IDLE_AFTER_MS: Final = 30_000
"""A lane without members becomes idle after this time."""
GO_BACK_WAIT_MS: Final = 30_000
"""Pulls wait this long for a lane to have nothing in flight, and are then let through as long."""
HAND_OVERS_PER_TICK: Final = 10_000
"""The most hand-overs in one `run`: one for each queue of an idle lane, and each lane."""
FORGOTTEN_LISTED_MAX: Final = 16
"""The most forgotten subscriptions that tools list."""
IDLE_LANES_MAX: Final = 16
"""Idle lanes are merged if there are more than this."""
IDLE_SUBSCRIPTIONS_MAX: Final = 1000
"""Subscriptions of idle lanes are forgotten if there are more than this."""
UNCOMMITTED_WAIT_MS: Final = 300_000
"""A lane with messages in flight is not merged until it has been idle for this time. Later commits
of these messages are ignored."""
MERGES_PER_TICK: Final = 16
"""The most merges in one `run`."""
SCANS_PER_TICK: Final = 8
"""The most reads by which one `run` moves an idle lane in one queue."""
SUBSCRIPTIONS_LOGGED: Final = 8
"""The most forgotten subscriptions in one log line."""
EVALUATIONS_MAX: Final = 4096
"""The most evaluations of expressions, per second and queue, to count messages no lane wants. The
count may lag behind."""


class GroupLanes:
    """The lanes of one group."""

    def __init__(self, name: str, storage: LaneStorage) -> None:
        """Create the lanes of the group `name`, without any lane."""
        self.name = name
        self.storage = storage
        self.lanes: dict[str, Lane] = {}
        """By subscription key."""
        self.resets = Resets(storage.mark_changed)
        """The offsets to which readers must be redirected, with the key of a lane as group."""
        self.unmatched_count = 0
        """The number of messages that all lanes have passed and none wanted."""
        self.last_join_number = 0
        self.counted_offsets: dict[QueueKey, int] = {}
        """By queue: the offset up to which `unmatched_count` is known."""
        self.assignments = LaneAssignments(storage.clock, storage.mark_changed)
        self.go_back_since_ms: dict[QueueKey, int] = {}
        """Queues in which a lane has to go back, and since when it has been waited for."""
        self._topic_rules: dict[str, TopicRules] = {}
        self.forgotten_subscriptions: deque[dict[str, Any]] = deque(maxlen=FORGOTTEN_LISTED_MAX)
        """The subscriptions that were forgotten with unread messages, for tools."""

    # ------------------------------------------------------------------------------- members

    def get_ordered_keys(self) -> tuple[list[str], list[str]]:
        """Return the keys of live lanes, the oldest first, and of idle ones, the latest first.

        Each lane wants what none before it does. So the lane that became idle last is first: lanes
        that have been idle for longer do not change when another one becomes idle.
        """
        lanes = self.lanes.values()
        live = [lane for lane in lanes if not lane.is_idle]
        live.sort(key=lambda lane: lane.join_number)
        return [lane.key for lane in live], [lane.key for lane in self.get_idle_lanes()[::-1]]

    def get_idle_lanes(self) -> list[Lane]:
        """Return the idle lanes, in the order in which they became idle."""
        idle = [lane for lane in self.lanes.values() if lane.is_idle]
        return sorted(idle, key=lambda lane: (lane.idle_since_ms, lane.join_number))

    def get_lane_queues(self, queue: QueueKey) -> list[LaneQueue]:
        """Return the states of all lanes that have one in the queue."""
        return [lane.queues[queue] for lane in self.lanes.values() if queue in lane.queues]

    def add_member(self, key: str, client_id: str) -> Lane:
        """Add a client to the lane with the subscription `key`, and return the lane.

        The lane is created if necessary. An idle lane is live again.
        """
        known = self.lanes.get(key)
        lane = known or self._split_off(key) or self._create_lane(key)
        lane.left_ms = None
        if client_id not in lane.members:
            # A client that was away for a moment may have another subscription now.
            read_before = [
                (queue, other.key)
                for other in self.lanes.values()
                for queue, lane_queue in other.queues.items()
                if lane_queue.reader == client_id
            ]
            self.assignments.assume_reads(client_id, read_before)
        lane.members.add(client_id)
        self.storage.mark_changed()
        if known is None or lane.is_idle:
            if lane.is_idle:
                lane.is_idle = False
                lane.join_number = self.allocate_join_number()
                lane.unoffered_queues.clear()
            self.reassign_rules()
            for other in self.get_idle_lanes():
                for queue in sorted(
                    other.queues.keys() & lane.queues.keys() - other.unoffered_queues
                ):
                    if not self._hand_over(other, queue, [key]):
                        other.unoffered_queues.add(queue)
            self.run()
            self.save_rules()
        return lane

    def move_member(self, old_key: str, client_id: str) -> None:
        """Remove a member from the lane `old_key`, because it has another subscription now.

        The messages that it has in flight count for the old lane until it has committed them
        (`LaneAssignments`). If it was the last member, the lane becomes idle without delay.
        """
        lane = self.lanes.get(old_key)
        if lane is not None:
            queues = [
                queue
                for queue, lane_queue in lane.queues.items()
                if lane_queue.reader in {"", client_id}
            ]
            self.assignments.start_move(client_id, old_key, queues)
            lane.abandoned_queues.update(queues)
        self.remove_member(old_key, client_id, moved=True)

    def remove_member(self, key: str, client_id: str, *, moved: bool = False) -> None:
        """Remove a client that left the lane `key`.

        `moved` says that it is still a member of the group, see `move_member`.
        """
        lane = self.lanes.get(key)
        if lane is None:
            return
        lane.members.discard(client_id)
        if not moved:
            self.assignments.remove_client(client_id)
        if not lane.members and lane.left_ms is None:
            now_ms = self.storage.clock.now_ms()
            lane.left_ms = now_ms - IDLE_AFTER_MS if moved else now_ms
            self.storage.mark_changed()

    def save_rules(self) -> None:
        """Save the changed rules. Pulls of the group wait until they are on disk."""

        def wake_pulls() -> None:
            for queue in {queue for lane in self.lanes.values() for queue in lane.queues}:
                self.storage.wake_pulls(queue)

        self.storage.save_rules(self.name, wake_pulls)

    def allocate_join_number(self) -> int:
        """Return the number of the next lane that joins."""
        self.last_join_number += 1
        return self.last_join_number

    def _create_lane(self, key: str) -> Lane:
        """Create a lane that begins at the join offsets, with the messages no other lane wants."""
        queues = list(self.storage.iter_queues(self.name, key))
        for queue in queues:
            self.ensure_queue(queue)
        lane = Lane(key, self.allocate_join_number())
        live, idle = self.get_ordered_keys()
        atoms = get_atoms_by_topic(key)
        wanted: dict[str, tuple[AtomChain | None, ...]] = {
            topic: (*compute_wanted_chains(topic, live), *compute_wanted_chains(topic, idle))
            for topic in atoms
        }
        for queue in queues:
            topic, end = queue[0], self.storage.get_end_offset(queue)
            if topic.startswith(RETRY_PREFIX):
                lane.queues[queue] = LaneQueue(end, end, read_end=end)
                continue
            start = min(self.storage.get_join_offset(self.name, queue), end)
            rule = create_rule(atoms[topic], *wanted[topic]) if atoms.get(topic) else MATCH_NOTHING
            first = max(start, 0)
            lane.queues[queue] = LaneQueue(start, first, create_spans(first, rule), read_end=first)
        self.lanes[key] = lane
        log.info("group %s: new lane %s with the subscription %s", self.name, lane.id, key)
        return lane

    def ensure_queue(self, queue: QueueKey) -> None:
        """Create the state in a queue of all lanes that subscribe to its topic and have none.

        All lanes get it at the same time, because their rules might not exclude each other
        otherwise.
        """
        topic = queue[0]
        is_retry = topic == RETRY_PREFIX + self.name
        missing = [
            lane
            for lane in self.lanes.values()
            if queue not in lane.queues and (is_retry or topic in get_atoms_by_topic(lane.key))
        ]
        if missing:
            rules = compute_rules(topic, *self.get_ordered_keys())
            is_known = any(queue in lane.queues for lane in self.lanes.values())
            offset = (
                self.storage.get_end_offset(queue)
                if is_known
                else self.storage.get_join_offset(self.name, queue)
            )
            first = max(offset, 0)
            for lane in missing:
                rule = rules.get(lane.key, MATCH_NOTHING)
                spans = create_spans(first, rule)
                lane.queues[queue] = LaneQueue(offset, first, spans, read_end=first)

    def reassign_rules(self) -> None:
        """Assign the messages behind each queue's end to the lanes as they are now.

        Idle lanes keep of their messages those that no live lane wants.
        """
        live, idle = self.get_ordered_keys()
        retry_topic = RETRY_PREFIX + self.name
        topics = {topic for lane in self.lanes.values() for topic, _ in lane.queues}
        before = self._topic_rules
        self._topic_rules = {}
        for topic in topics:
            # Computed first: it keeps alive the chains from which those of the rules grow.
            unwanted = create_rule([], *compute_wanted_chains(topic, live))
            known = before[topic].hand_over if topic in before else None
            hand_over = compute_rules(topic, live, (), known)
            is_retry = topic == retry_topic
            future = compute_rules(topic, live, idle) if is_retry and idle else hand_over
            self._topic_rules[topic] = TopicRules(future, hand_over, unwanted)
        ends: dict[QueueKey, int] = {}
        for lane in self.lanes.values():
            for queue, lane_queue in lane.queues.items():
                end = ends.get(queue)
                if end is None:
                    end = ends[queue] = self.storage.get_end_offset(queue)
                new, old = self._topic_rules[queue[0]], before.get(queue[0])
                if lane.is_idle:
                    lane_queue.restrict_from(end, new.unwanted)
                    continue
                rule = new.future.get(lane.key, MATCH_NOTHING)
                if old is None or lane.key not in old.hand_over or old.future[lane.key] != rule:
                    lane_queue.set_rule_from(end, rule)

    # ----------------------------------------------------------------------------- idle lanes

    def run(self) -> None:
        """Let lanes become idle, hand over their messages, and merge or end idle lanes.

        Called once a second, and after each change. While no lane has a member, nothing is done.
        """
        now_ms = self.storage.clock.now_ms()
        if not any(lane.members for lane in self.lanes.values()):
            return
        gone = [
            lane
            for lane in self.lanes.values()
            if lane.left_ms is not None
            and not lane.is_idle
            and now_ms - lane.left_ms >= IDLE_AFTER_MS
        ]
        for lane in gone:
            lane.is_idle = True
            lane.idle_since_ms = now_ms
            lane.unoffered_queues = set(lane.queues)
            log.info("group %s: lane %s is idle, it has no members", self.name, lane.id)
        if gone:
            self.reassign_rules()
            self.save_rules()

        hand_overs_left = HAND_OVERS_PER_TICK
        for lane in self.get_idle_lanes():
            self._skip_unwanted(lane)
            for queue in sorted(lane.unoffered_queues):
                hand_overs_left -= len(self.lanes)
                if hand_overs_left > 0 and self._hand_over(lane, queue):
                    lane.unoffered_queues.discard(queue)
                    self.save_rules()
            if self._is_empty(lane):
                self._end_lane(lane)
            elif now_ms - lane.idle_since_ms > self.storage.retention_ms:
                self._forget_lane(lane, "no member has returned in time")
        self._merge_idle_lanes()

    def _is_empty(self, lane: Lane) -> bool:
        """Return whether no message is left for an idle lane, now or later."""
        return not lane.unoffered_queues and all(
            lane_queue.current_offset >= self.storage.get_end_offset(queue)
            if queue[0].startswith(RETRY_PREFIX)
            else lane_queue.find_rule(lane_queue.current_offset) == (MATCH_NOTHING, None)
            for queue, lane_queue in lane.queues.items()
        )

    def _skip_unwanted(self, lane: Lane) -> None:
        """Move an idle lane past messages that are not its own, up to its next message."""
        for queue, lane_queue in lane.queues.items():
            for _ in range(SCANS_PER_TICK):
                current, end = lane_queue.current_offset, self.storage.get_end_offset(queue)
                if current >= end:
                    break
                rule, until = lane_queue.find_rule(current)
                following, is_match = self.storage.find_match(queue, current, rule, until)
                if following > current:
                    lane_queue.commit(following)
                    self.publish_group_offset(queue)
                if is_match or following <= current:
                    break

    def _hand_over(self, lane: Lane, queue: QueueKey, takers: Iterable[str] | None = None) -> bool:
        """Give the unread messages of an idle lane in a queue to the lanes that want them.

        `takers` are the keys of these lanes; None means all live ones. Return False, with nothing
        changed, if it must be tried again later, because a lane has messages in flight.
        """
        self.ensure_queue(queue)
        if self.awaits_former_member(lane, queue):
            return False
        lane_queue = lane.queues[queue]
        current, end = lane_queue.current_offset, self.storage.get_end_offset(queue)
        if queue[0] not in self._topic_rules:
            self.reassign_rules()
        _, rules, unwanted = self._topic_rules[queue[0]]
        gains: list[tuple[Lane, LaneQueue, list[Span]]] = []
        for key in (rules if takers is None else takers) if current < end else ():
            other = self.lanes[key]
            # A lane without state in the queue does not want it: another group's retry topic.
            if queue in other.queues and (
                gained := lane_queue.find_shared_spans(current, end, rules.get(key, MATCH_NOTHING))
            ):
                gains.append((other, other.queues[queue], gained))
        if any(not taker.can_go_back_to(current) for _, taker, _ in gains):
            self.go_back_since_ms.setdefault(queue, self.storage.clock.now_ms())
            return False

        for other, taker, gained in gains:
            before = max(taker.read_end or 0, taker.current_offset)
            if before > current > taker.current_offset:
                taker.commit(current)  # all of that was read, and nothing of it is in flight
            taker.add_spans(gained)
            self.storage.mark_changed()
            if before > current:
                taker.go_back_to(current)
                self.resets.add(other.key, *queue, current)
                self.publish_group_offset(queue)
                log.info(
                    "group %s: lane %s goes back on %s:%d from offset %d to %d, to messages that"
                    " another lane has left",
                    self.name,
                    other.id,
                    *queue,
                    before,
                    current,
                )
        lane_queue.restrict_from(current, unwanted)
        self.go_back_since_ms.pop(queue, None)
        self.storage.wake_pulls(queue)
        return True

    def _end_lane(self, lane: Lane) -> None:
        """Remove a lane whose messages are read or belong to other lanes."""
        self._remove_lane(lane)
        for queue in lane.queues:
            self.publish_group_offset(queue)
        self.reassign_rules()
        self.save_rules()

    def _remove_lane(self, lane: Lane) -> None:
        """Remove a lane with its resets and assignments."""
        del self.lanes[lane.key]
        self.resets.forget(group=lane.key)
        self.assignments.forget_lane(lane.key)

    def _forget_lane(self, lane: Lane, reason: str) -> None:
        """Remove an idle lane with unread messages, which no lane gets, and log a warning."""
        now_ms = self.storage.clock.now_ms()
        unread_max = sum(
            self.storage.get_end_offset(queue) - lane_queue.current_offset
            for queue, lane_queue in lane.queues.items()
            if lane_queue.find_rule(lane_queue.current_offset) != (MATCH_NOTHING, None)
        )
        parts = split_key(lane.key)
        for part in parts:
            self.forgotten_subscriptions.append(
                {
                    "messagesMax": unread_max,
                    "subscription": part,
                    "timestamp": now_ms,
                    "why": reason,
                }
            )
        log.warning(
            "group %s: removed %d subscription(s) without members, because %s: %s%s. %d messages"
            " were not checked for them; those that only these subscriptions match are not"
            " delivered to the group.",
            self.name,
            len(parts),
            reason,
            ", ".join(parts[:SUBSCRIPTIONS_LOGGED]),
            ", ..." if len(parts) > SUBSCRIPTIONS_LOGGED else "",
            unread_max,
        )
        self._end_lane(lane)

    def _merge_idle_lanes(self) -> None:
        """Merge idle lanes while there are more than IDLE_LANES_MAX, and forget surplus ones.

        Of the pairs of lanes that became idle one after the other, the pair with the fewest
        subscriptions is merged. A lane of which a former member may have messages in flight is not
        merged until UNCOMMITTED_WAIT_MS are over.
        """
        idle = self.get_idle_lanes()
        if len(idle) > IDLE_LANES_MAX:
            read = self.assignments.get_queues_by_lane()
            now_ms = self.storage.clock.now_ms()
            idle = [
                lane
                for lane in idle
                if now_ms - lane.idle_since_ms > UNCOMMITTED_WAIT_MS
                or all(
                    lane.queues[queue].is_fully_committed
                    for queue in read.get(lane.key, ())
                    if queue in lane.queues
                )
            ]
        for _ in range(min(len(idle) - IDLE_LANES_MAX, MERGES_PER_TICK)):
            counts = [len(split_key(lane.key)) for lane in idle]
            index = min(range(len(idle) - 1), key=lambda i: counts[i] + counts[i + 1])
            self._merge_lanes(idle[index], idle[index + 1])
            del idle[index]
        while sum(len(split_key(lane.key)) for lane in idle) > IDLE_SUBSCRIPTIONS_MAX:
            reason = f"more than {IDLE_SUBSCRIPTIONS_MAX} subscriptions left the group within a day"
            self._forget_lane(idle.pop(0), reason)

    def _merge_lanes(self, first: Lane, second: Lane) -> None:
        """Merge two idle lanes: `second` gets the messages and subscriptions of both."""
        self._remove_lane(first)
        self._remove_lane(second)
        ids = f"{first.id} and {second.id}"
        for queue, lane_queue in first.queues.items():
            other = second.queues.get(queue)
            if other is None:
                second.queues[queue] = lane_queue
                continue
            start = min(lane_queue.current_offset, other.current_offset)
            spans = merge_spans(
                [
                    *lane_queue.slice_spans(lane_queue.current_offset),
                    *other.slice_spans(other.current_offset),
                ]
            )
            has_commits = max(lane_queue.committed_offset, other.committed_offset) >= 0
            second.queues[queue] = LaneQueue(start if has_commits else -1, start, spans)
        second.key = merge_keys({*split_key(first.key), *split_key(second.key)})
        second.unoffered_queues |= first.unoffered_queues
        second.abandoned_queues.clear()
        self.lanes[second.key] = second
        self.save_rules()
        log.info("group %s: merged the idle lanes %s into %s", self.name, ids, second.id)

    def _split_off(self, key: str) -> Lane | None:
        """Create a lane again whose subscription was merged into an idle lane, and return it.

        Return None if no lane has the subscription. The new lane gets the spans that require it.
        """
        shared = next((lane for lane in self.get_idle_lanes() if key in split_key(lane.key)), None)
        if shared is None:
            return None
        self._remove_lane(shared)
        lane = Lane(key, self.allocate_join_number())
        for queue, lane_queue in shared.queues.items():
            atoms = get_required_atoms(queue[0], key)
            if atoms:
                spans = [
                    span
                    for span in lane_queue.slice_spans(lane_queue.current_offset)
                    if span.clause.required & atoms
                ]
                lane_queue.spans = [
                    span for span in lane_queue.spans if not span.clause.required & atoms
                ]
                end = self.storage.get_end_offset(queue)
                start = min((span.first for span in spans), default=end)
                committed = start if lane_queue.committed_offset >= 0 else -1
                lane.queues[queue] = LaneQueue(committed, start, spans, read_end=start)
        rest = [part for part in split_key(shared.key) if part != key]
        shared.key = merge_keys(rest) if len(rest) > 1 else rest[0]
        self.lanes[shared.key] = shared
        self.lanes[key] = lane
        log.info("group %s: lane %s has members again: %s", self.name, lane.id, key)
        return lane

    # ------------------------------------------------------------------------------ a member

    def is_pulled(self, topic: str) -> bool:
        """Return whether a member has pulled the topic for a lane."""
        return any(
            lane_queue.reader
            for lane in self.lanes.values()
            for queue, lane_queue in lane.queues.items()
            if queue[0] == topic
        )

    def get_lane_queue(self, key: str, queue: QueueKey) -> LaneQueue | None:
        """Return the state of a lane in a queue; None if it does not subscribe to the topic."""
        lane = self.lanes.get(key)
        if lane is None:
            return None
        if queue not in lane.queues:
            self.ensure_queue(queue)
        return lane.queues.get(queue)

    def must_wait_to_go_back(self, lane_queue: LaneQueue, queue: QueueKey) -> bool:
        """Return whether pulls of a lane must wait, because it must go back in the queue.

        It goes back as soon as it has no messages in flight. Pulls wait for GO_BACK_WAIT_MS and are
        let through for the same time, alternately.
        """
        since_ms = self.go_back_since_ms.get(queue)
        if since_ms is None or lane_queue.is_fully_committed:
            return False
        return (self.storage.clock.now_ms() - since_ms) // GO_BACK_WAIT_MS % 2 == 0

    def start_from_offset_query(
        self, key: str, client_id: str, queue: QueueKey
    ) -> LaneQueue | None:
        """Let a member of lane `key` that asks for its offset (14) read the queue for this lane.

        Return the state of the lane in the queue; None if it does not subscribe to the topic.
        """
        lane_queue = self.get_lane_queue(key, queue)
        if lane_queue is not None and self.assignments.lane_of(client_id, queue, "") != key:
            self.assignments.assign(client_id, queue, key)
            self.storage.mark_changed()
        return lane_queue

    def get_redirect(
        self, key: str, client_id: str, queue: QueueKey, offset: int, *, is_parked: bool = False
    ) -> int | None:
        """Return the offset to which a pull of a member of lane `key` must be redirected.

        Return None if it may pull from `offset`. `is_parked` says that the pull was parked before.
        """
        assignments = self.assignments
        if assignments.lane_of(client_id, queue, key) != key:
            if self.is_finishing_old_lane(client_id, queue, key):
                return None
            self._assign(key, client_id, queue, offset)
        elif not is_parked and not assignments.has_read(client_id, queue):
            lane_queue = self.get_lane_queue(key, queue)
            # Only the client that read last may be ahead of its lane: the broker was restarted.
            is_reader = lane_queue is not None and lane_queue.reader in {"", client_id}
            is_valid = lane_queue is not None and is_reader and offset >= lane_queue.current_offset
            self._assign(key, client_id, queue, None if is_valid else offset)
        redirect = assignments.get_redirect(client_id, queue, offset)
        if redirect is not None:
            return redirect

        lane = self.lanes.get(key)
        if (
            lane is not None
            and queue in lane.abandoned_queues
            and not self.awaits_former_member(lane, queue)
        ):
            # The former reader changed lanes: this one continues where that one has committed.
            lane.abandoned_queues.discard(queue)
            lane_queue = lane.queues[queue]
            is_final = lane_queue.is_fully_committed or lane_queue.reader not in {"", client_id}
            if is_final and 0 <= lane_queue.current_offset != offset:
                self.resets.add(lane.key, *queue, lane_queue.current_offset)
            self.storage.mark_changed()
        if not self.resets:
            return None
        if lane is not None and queue in lane.queues:
            self.resets.raise_offset(key, *queue, lane.queues[queue].current_offset)
        return self.resets.redirect(key, *queue, offset, client_id, is_parked=is_parked)

    def _assign(self, key: str, client_id: str, queue: QueueKey, offset: int | None) -> None:
        """Let a member read a queue for a lane from now on.

        If it pulls from another `offset` than the lane's current one, it is redirected there.
        `offset` None means that it may continue where it is.
        """
        lane_queue = self.get_lane_queue(key, queue)
        if (
            offset is not None
            and lane_queue is not None
            and 0 <= lane_queue.current_offset != offset
        ):
            self.assignments.redirect(client_id, queue, key, lane_queue.current_offset)
        else:
            self.assignments.assign(client_id, queue, key)
        self.storage.mark_changed()

    def is_finishing_old_lane(self, client_id: str, queue: QueueKey, key: str) -> bool:
        """Return whether a member of lane `key` has messages of another lane in flight."""
        lane = self.lanes.get(self.assignments.lane_of(client_id, queue, key))
        lane_queue = lane.queues.get(queue) if lane is not None and lane.key != key else None
        return (
            lane_queue is not None
            and lane_queue.reader in {"", client_id}
            and not lane_queue.is_fully_committed
            and self.assignments.is_moving(client_id)
        )

    def awaits_former_member(self, lane: Lane, queue: QueueKey) -> bool:
        """Return whether a client that left the lane may have its messages of a queue in flight."""
        lane_queue = lane.queues.get(queue)
        if (
            lane_queue is None
            or lane_queue.is_fully_committed
            or queue not in lane.abandoned_queues
        ):
            return False
        return any(
            client_id not in lane.members
            and lane_queue.reader in {"", client_id}
            and self.assignments.is_moving(client_id)
            for client_id in self.assignments.iter_clients(queue, lane.key)
        )

    def commit(self, key: str, client_id: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit an offset of a member of lane `key`, for the lane for which it reads the queue.

        The commit is ignored while the client does not know of a reset or redirect.
        """
        queue = (topic, queue_id)
        key = self.assignments.lane_of(client_id, queue, key)
        lane_queue = self.get_lane_queue(key, queue)
        if (
            lane_queue is None
            or self.resets.blocks_commits(key, *queue)
            or self.assignments.must_ignore_commits(client_id, queue)
        ):
            return
        is_abandoned = queue in self.lanes[key].abandoned_queues
        may_go_back = not is_abandoned and self.assignments.has_read(client_id, queue)
        if offset < lane_queue.current_offset and not may_go_back:
            return
        group_offset = self.storage.offsets.committed(self.name, *queue)
        is_another_behind = 0 <= group_offset < lane_queue.current_offset
        is_behind = offset < lane_queue.current_offset
        lane_queue.commit(offset)
        self.storage.mark_changed()
        if not is_another_behind or is_behind:
            self.publish_group_offset(queue)
        self.retry_hand_over(queue)

    def retry_hand_over(self, queue: QueueKey) -> None:
        """Hand over messages again if that was waiting for the messages in flight of a queue."""
        if queue in self.go_back_since_ms:
            self.run()

    def publish_group_offset(self, queue: QueueKey) -> None:
        """Set the committed offset of the group to the lowest offset of its lanes.

        From there, a broker without lanes can continue.
        """
        lane_queues = self.get_lane_queues(queue)
        if any(lane_queue.committed_offset >= 0 for lane_queue in lane_queues):
            offset = min(lane_queue.current_offset for lane_queue in lane_queues)
            self.storage.offsets.put(self.name, *queue, offset)

    def reset_queue(self, topic: str, queue_id: int, offset: int) -> None:
        """Move all lanes to an offset of a queue, and assign the messages from there on again.

        Unread messages of idle lanes are no longer theirs.
        """
        queue = (topic, queue_id)
        self.ensure_queue(queue)
        rules = compute_rules(topic, *self.get_ordered_keys())
        for lane in self.lanes.values():
            if queue in lane.queues:
                lane.unoffered_queues.discard(queue)
                lane.abandoned_queues.discard(queue)
                rule = rules.get(lane.key, MATCH_NOTHING)
                spans = create_spans(offset, rule)
                lane.queues[queue] = LaneQueue(offset, offset, spans, read_end=offset)
                self.resets.add(lane.key, topic, queue_id, offset)
        self.go_back_since_ms.pop(queue, None)
        self.storage.mark_changed()

    # ----------------------------------------------------------------------------- the rest

    def count_unmatched(self) -> None:
        """Count messages that all lanes have passed and none wanted, some of each queue.

        As in RocketMQ they are not delivered to the group. A new lane that wants them in the
        meantime is considered.
        """
        live, idle = self.get_ordered_keys()
        for topic in {topic for key in (*live, *idle) for topic in get_atoms_by_topic(key)}:
            chains = [
                chain
                for keys in (live, idle)
                for chain in compute_wanted_chains(topic, keys)
                if chain
            ]
            rule = create_rule([], *chains)
            atom_count = sum(1 for chain in chains for _ in chain.iter_general_atoms())
            count_max = EVALUATIONS_MAX // (1 + atom_count) + 1
            queues = {
                queue for lane in self.lanes.values() for queue in lane.queues if queue[0] == topic
            }
            for queue in sorted(queues):
                passed = min(one.current_offset for one in self.get_lane_queues(queue))
                offset = self.counted_offsets.setdefault(queue, passed)
                if offset < passed:
                    if rule:
                        until = min(passed, offset + count_max)
                        offset, found = self.storage.count_matches(queue, offset, rule, until)
                        self.unmatched_count += found
                    else:
                        offset = passed
                    self.counted_offsets[queue] = offset

    @property
    def is_obsolete(self) -> bool:
        """Whether the group needs no lanes: one is left, and gets all messages that it wants."""
        if len(self.lanes) != 1 or self.resets:
            return False
        (lane,) = self.lanes.values()
        return all(
            lane_queue.find_rule(lane_queue.current_offset)
            == (compute_sole_rule(topic, lane.key), None)
            for (topic, _), lane_queue in lane.queues.items()
        )
