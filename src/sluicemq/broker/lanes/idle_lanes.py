"""The lanes of one group that have no members: the base of `group.GroupLanes`.

A lane is the members of a group that have the same subscription. It becomes *idle* when it has had
no members for IDLE_AFTER_MS, but keeps its unread messages until other lanes take them over, a
member returns, or its retention time is over. `group.py` describes these changes.
"""

import logging
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final

from sluicemq.broker.lanes.group_table import GroupLaneTable
from sluicemq.broker.lanes.lane import Lane, TopicRules
from sluicemq.broker.lanes.lane_queue import LaneQueue, QueueKey, Span, merge_spans
from sluicemq.broker.lanes.rules import (
    MATCH_NOTHING,
    Atom,
    LaneRule,
    get_required_atoms,
    merge_keys,
    split_key,
)
from sluicemq.model.topic import RETRY_PREFIX

log = logging.getLogger(__name__)

IDLE_AFTER_MS: Final = 30_000
"""A lane without members becomes idle after this time."""
LANE_OFFERS_PER_TICK: Final = 10_000
"""The most offers in one `process_idle_lanes`. Handing over one queue of an idle lane counts as one
offer to each lane of the group."""
IDLE_LANES_MAX: Final = 16
"""Idle lanes are merged if there are more than this."""
IDLE_SUBSCRIPTIONS_MAX: Final = 1000
"""Subscriptions of idle lanes are forgotten if there are more than this."""
UNCOMMITTED_WAIT_MS: Final = 300_000
"""A lane with messages in flight is not merged until it has been idle for this time. Later commits
of these messages are ignored."""
MERGES_PER_TICK: Final = 16
"""The most merges of two lanes in one `process_idle_lanes`."""
SCANS_PER_TICK: Final = 8
"""The most reads of one queue by which `process_idle_lanes` moves an idle lane."""
SUBSCRIPTIONS_LOGGED: Final = 8
"""The most forgotten subscriptions in one log line."""


class IdleLanes(GroupLaneTable):
    """The lanes of one group, as lanes without members become idle, are merged, and end."""

    def process_idle_lanes(self) -> None:
        """Do the work for lanes without members: called once a second, and after each change.

        - Lanes whose last member left IDLE_AFTER_MS ago become idle.
        - Each idle lane skips messages that are not its own, and hands over its unread messages to
          the live lanes that want them. What exceeds LANE_OFFERS_PER_TICK is left for later calls.
        - An idle lane that has no messages left is removed. An idle lane whose retention time is
          over is removed with its unread messages.
        - Surplus idle lanes are merged.

        While no lane of the group has a member, nothing is done, so nothing expires.
        """
        now_ms = self.storage.clock.now_ms()
        has_members = any(lane.members for lane in self.lanes.values())
        if not has_members:
            return
        self._mark_idle_lanes(now_ms)

        lane_offers_left = LANE_OFFERS_PER_TICK
        for lane in self.get_idle_lanes():
            self._skip_unwanted(lane)
            for queue in sorted(lane.unoffered_queues):
                # The time of a hand-over grows with the number of lanes to which it is offered.
                lane_offers_left -= len(self.lanes)
                if lane_offers_left > 0 and self._hand_over(lane, queue):
                    lane.unoffered_queues.discard(queue)
                    self.save_rules()

            # After the offers, which may have emptied the lane.
            if self._is_empty(lane):
                self._remove_lane_and_save(lane)
            elif now_ms - lane.idle_since_ms > self.storage.retention_ms:
                self._forget_unread_lane(lane, "no member has returned in time")
        self._merge_idle_lanes()

    def _mark_idle_lanes(self, now_ms: int) -> None:
        """Make each lane idle whose last member left IDLE_AFTER_MS before `now_ms`, or earlier.

        The unread messages in all its queues must then be offered to other lanes
        (`unoffered_queues`). If a lane has become idle, all lanes get new rules, which are saved.
        """
        has_marked_lanes = False
        for lane in self.lanes.values():
            if lane.is_idle or lane.left_ms is None or now_ms - lane.left_ms < IDLE_AFTER_MS:
                continue
            lane.is_idle = True
            lane.idle_since_ms = now_ms
            lane.unoffered_queues = set(lane.queues)
            log.info("group %s: lane %s is idle, it has no members", self.name, lane.id)
            has_marked_lanes = True
        if has_marked_lanes:
            self.reassign_rules()
            self.save_rules()

    def _is_empty(self, lane: Lane) -> bool:
        """Return whether an idle lane has no unread messages and will not get any.

        The result is False while a queue of the lane must still be offered to other lanes. In a
        retry topic, the lane must be at the end of the queue. In other topics, no rule may give it
        a message at or after its offset.
        """
        if lane.unoffered_queues:
            return False
        for queue, lane_queue in lane.queues.items():
            topic, _ = queue
            current_offset = lane_queue.current_offset
            if topic.startswith(RETRY_PREFIX):
                is_done = current_offset >= self.storage.get_end_offset(queue)
            else:
                is_done = lane_queue.find_rule(current_offset) == (MATCH_NOTHING, None)
            if not is_done:
                return False
        return True

    def _skip_unwanted(self, lane: Lane) -> None:
        """Advance an idle lane, in each of its queues, over messages that are not its own.

        The lane commits the offset of its next message. If no message of its own was found, it
        commits the end of what was examined. The committed offset of the group is updated. At most
        SCANS_PER_TICK reads are made in a queue; the next call continues there.
        """
        for queue, lane_queue in lane.queues.items():
            for _ in range(SCANS_PER_TICK):
                current_offset = lane_queue.current_offset
                if current_offset >= self.storage.get_end_offset(queue):
                    break
                rule, rule_end = lane_queue.find_rule(current_offset)
                scanned_offset, is_match = self.storage.find_match(
                    queue, current_offset, rule, rule_end
                )
                if scanned_offset > current_offset:
                    lane_queue.commit(scanned_offset)
                    self.publish_group_offset(queue)
                if is_match or scanned_offset <= current_offset:
                    break

    def _hand_over(self, lane: Lane, queue: QueueKey, takers: Iterable[str] | None = None) -> bool:
        """Give the unread messages of an idle lane in a queue to the live lanes that want them.

        A lane is the members of the group with the same subscription; an idle one has no members.
        `takers` are the keys of the lanes that may get messages; None means all live lanes. A lane
        that has read further goes back to the current offset of the idle lane, and its reader is
        redirected. The idle lane keeps the messages that no live lane wants. Pulls that wait in the
        queue are tried again.

        Return True when this is done. Return False, with nothing given, if it must be tried again
        later, in two cases: a former member of the idle lane may have messages in flight, or a lane
        that must go back has some. In the second case, pulls of the queue begin to wait, so that
        nothing is in flight soon.
        """
        self.ensure_queue(queue)
        if self.may_be_in_flight_at_former_member(lane, queue):
            return False

        # Find what each lane gains.
        topic_rules = self._get_topic_rules(queue)
        taker_keys: Iterable[str] = topic_rules.hand_over
        if takers is not None:
            taker_keys = takers
        gains = self._find_gains(lane, queue, taker_keys, topic_rules.hand_over)

        # All takers must be able to go back before any of them is changed.
        lane_queue = lane.queues[queue]
        giver_offset = lane_queue.current_offset
        if any(not taker.queues[queue].can_go_back_to(giver_offset) for taker, _ in gains):
            self.go_back_since_ms.setdefault(queue, self.storage.clock.now_ms())
            return False

        for taker, gained_spans in gains:
            self._give_messages(taker, queue, gained_spans, giver_offset)
        lane_queue.restrict_from(giver_offset, topic_rules.unwanted)
        self.go_back_since_ms.pop(queue, None)
        self.storage.wake_pulls(queue)
        return True

    def _get_topic_rules(self, queue: QueueKey) -> TopicRules:
        """Return the rules of the present lanes for the topic of a queue.

        If there are none yet, the rules of all lanes are computed first.
        """
        topic, _ = queue
        if topic not in self._topic_rules:
            self.reassign_rules()
        return self._topic_rules[topic]

    def _find_gains(
        self,
        giver: Lane,
        queue: QueueKey,
        taker_keys: Iterable[str],
        rules: Mapping[str, LaneRule],
    ) -> list[tuple[Lane, list[Span]]]:
        """Return which live lanes want unread messages of the idle lane `giver` in a queue.

        `taker_keys` are the keys of the lanes to examine, and `rules` their rules for such
        messages, by key. Return (lane, spans) for each lane that wants some. A span is a range of
        offsets with a condition that messages there must meet. Nothing is changed.
        """
        giver_queue = giver.queues[queue]
        giver_offset = giver_queue.current_offset
        end_offset = self.storage.get_end_offset(queue)
        if giver_offset >= end_offset:
            return []
        gains: list[tuple[Lane, list[Span]]] = []
        for key in taker_keys:
            taker = self.lanes[key]
            # A lane without state in the queue does not want it: another group's retry topic.
            if queue not in taker.queues:
                continue
            rule = rules.get(key, MATCH_NOTHING)
            gained_spans = giver_queue.find_shared_spans(giver_offset, end_offset, rule)
            if gained_spans:
                gains.append((taker, gained_spans))
        return gains

    def _give_messages(
        self, taker: Lane, queue: QueueKey, gained_spans: list[Span], giver_offset: int
    ) -> None:
        """Give the lane `taker` messages of an idle lane in one queue.

        `gained_spans` says which: each span is a range of offsets with a condition. `giver_offset`
        is the current offset of the idle lane. If the taker has read further, it goes back to that
        offset, its reader will be redirected, and the committed offset of the group is updated. The
        caller has checked that the taker can go back (`LaneQueue.can_go_back_to`).
        """
        taker_queue = taker.queues[queue]
        read_offset = max(taker_queue.read_end or 0, taker_queue.current_offset)
        if read_offset > giver_offset > taker_queue.current_offset:
            # All messages before it were read, and none is in flight (`can_go_back_to`).
            taker_queue.commit(giver_offset)
        taker_queue.add_spans(gained_spans)
        self.storage.mark_changed()
        if read_offset > giver_offset:
            taker_queue.go_back_to(giver_offset)
            self.resets.add(taker.key, *queue, giver_offset)
            self.publish_group_offset(queue)
            log.info(
                "group %s: lane %s goes back on %s:%d from offset %d to %d, to messages that"
                " another lane has left",
                self.name,
                taker.id,
                *queue,
                read_offset,
                giver_offset,
            )

    def _forget_unread_lane(self, lane: Lane, reason: str) -> None:
        """Remove an idle lane although it has unread messages. They go to no other lane.

        Each subscription of the lane is recorded with `reason` in `forgotten_subscriptions`, and a
        warning is logged. `reason` completes the sentence "The lane was removed, because …".
        """
        unread_max = self._count_unchecked(lane)
        now_ms = self.storage.clock.now_ms()
        subscription_keys = split_key(lane.key)
        for subscription_key in subscription_keys:
            self.forgotten_subscriptions.append(
                {
                    "messagesMax": unread_max,
                    "subscription": subscription_key,
                    "timestamp": now_ms,
                    "why": reason,
                }
            )
        listed_keys = ", ".join(subscription_keys[:SUBSCRIPTIONS_LOGGED])
        if len(subscription_keys) > SUBSCRIPTIONS_LOGGED:
            listed_keys += ", ..."
        log.warning(
            "group %s: removed %d subscription(s) without members, because %s: %s. %d messages"
            " were not checked for them; those that only these subscriptions match are not"
            " delivered to the group.",
            self.name,
            len(subscription_keys),
            reason,
            listed_keys,
            unread_max,
        )
        self._remove_lane_and_save(lane)

    def _count_unchecked(self, lane: Lane) -> int:
        """Return how many messages a lane may have unread at most.

        These are all messages from the lane's offset to the end of each queue. They have not been
        checked for the lane, so some are not its own. Queues where it wants nothing do not count.
        """
        unchecked_count = 0
        for queue, lane_queue in lane.queues.items():
            offset = lane_queue.current_offset
            wants_nothing = lane_queue.find_rule(offset) == (MATCH_NOTHING, None)
            if not wants_nothing:
                unchecked_count += self.storage.get_end_offset(queue) - offset
        return unchecked_count

    def _merge_idle_lanes(self) -> None:
        """Merge pairs of idle lanes while there are more than IDLE_LANES_MAX.

        A pair is two lanes that became idle one after the other. The pair with the fewest
        subscriptions is merged first. At most MERGES_PER_TICK pairs are merged in one call. A lane
        whose former members may have messages in flight is not merged until it has been idle for
        UNCOMMITTED_WAIT_MS.

        Then, while the idle lanes have more than IDLE_SUBSCRIPTIONS_MAX subscriptions together, the
        lane that became idle first is removed with its unread messages.
        """
        idle_lanes = self.get_idle_lanes()
        if len(idle_lanes) > IDLE_LANES_MAX:
            idle_lanes = self._select_mergeable(idle_lanes)

        merge_count = min(len(idle_lanes) - IDLE_LANES_MAX, MERGES_PER_TICK)
        for _ in range(merge_count):
            # Find the pair of neighbours with the fewest subscriptions.
            subscription_counts = _count_subscriptions(idle_lanes)
            pair_counts = [first + second for first, second in pairwise(subscription_counts)]
            index = pair_counts.index(min(pair_counts))
            # The second lane becomes the merged one, and takes the place of both.
            self._merge_lanes(idle_lanes[index], idle_lanes[index + 1])
            del idle_lanes[index]

        while sum(_count_subscriptions(idle_lanes)) > IDLE_SUBSCRIPTIONS_MAX:
            reason = f"more than {IDLE_SUBSCRIPTIONS_MAX} subscriptions left the group within a day"
            self._forget_unread_lane(idle_lanes.pop(0), reason)

    def _select_mergeable(self, idle_lanes: list[Lane]) -> list[Lane]:
        """Return the idle lanes that may be merged, in the same order.

        No former member of such a lane has messages of it in flight, as far as commits show. A lane
        that has been idle for more than UNCOMMITTED_WAIT_MS is included in any case.
        """
        queues_by_lane = self.assignments.get_queues_by_lane()
        now_ms = self.storage.clock.now_ms()
        mergeable = []
        for lane in idle_lanes:
            has_waited = now_ms - lane.idle_since_ms > UNCOMMITTED_WAIT_MS
            read_queues = lane.queues.keys() & queues_by_lane.get(lane.key, set())
            if has_waited or all(lane.queues[queue].is_fully_committed for queue in read_queues):
                mergeable.append(lane)
        return mergeable

    def _merge_lanes(self, first: Lane, second: Lane) -> None:
        """Replace two idle lanes by one: the object `second`, with the key and spans of both.

        An idle lane is a subscription without members, whose unread messages wait for them. Its
        spans say which messages of a queue are its own. In each queue, the merged lane continues at
        the lower one of the two current offsets. That offset counts as committed if either lane had
        committed one; otherwise the committed offset stays -1. In a queue that only one of the
        lanes has, its state is kept. No queue of the merged lane is abandoned. The rules are saved.
        """
        self._detach_lane(first)
        self._detach_lane(second)
        merged_ids = f"{first.id} and {second.id}"
        for queue, first_queue in first.queues.items():
            second_queue = second.queues.get(queue)
            if second_queue is None:
                second.queues[queue] = first_queue
            else:
                second.queues[queue] = _merge_lane_queues(first_queue, second_queue)
        second.key = merge_keys({*split_key(first.key), *split_key(second.key)})
        second.unoffered_queues |= first.unoffered_queues
        second.abandoned_queues.clear()
        self.lanes[second.key] = second
        self.save_rules()
        log.info("group %s: merged the idle lanes %s into %s", self.name, merged_ids, second.id)

    def _split_off(self, key: str) -> Lane | None:
        """Split the subscription `key` off from the merged idle lane that contains it.

        A merged lane has several subscriptions, whose members had all left the group. Its spans are
        ranges of offsets with the clauses by which messages are its own. Return a new live lane
        with this subscription; None if no idle lane contains it. In each queue, the new lane gets
        the spans whose clauses require an atom of the subscription, and continues at the first of
        them, or at the end of the queue if there is none. The merged lane keeps the other spans and
        subscriptions. The caller assigns and saves the rules.
        """
        merged = self._find_merged_lane(key)
        if merged is None:
            return None
        self._detach_lane(merged)

        # Divide the spans of each queue.
        lane = Lane(key, self.allocate_join_number())
        for queue, merged_queue in merged.queues.items():
            topic, _ = queue
            atoms = get_required_atoms(topic, key)
            if atoms:  # otherwise the subscription does not include the topic
                end_offset = self.storage.get_end_offset(queue)
                lane.queues[queue] = _split_lane_queue(merged_queue, atoms, end_offset)

        # Put both lanes into the table, the merged one under the key of what is left.
        merged.key = _remove_subscription(merged.key, key)
        self.lanes[merged.key] = merged
        self.lanes[key] = lane
        log.info("group %s: lane %s has members again: %s", self.name, lane.id, key)
        return lane

    def _find_merged_lane(self, key: str) -> Lane | None:
        """Return the idle lane that contains the subscription `key`, None if there is none."""
        for lane in self.get_idle_lanes():
            if key in split_key(lane.key):
                return lane
        return None

    def may_be_in_flight_at_former_member(self, lane: Lane, queue: QueueKey) -> bool:
        """Return whether a former member of a lane may have messages of the lane in flight.

        Only messages of `queue` count. A former member is a client that reads the queue for the
        lane but has changed to another one, at most MOVE_WAIT_MS ago (`move_member`). Return False
        if the queue is not one of the abandoned queues of the lane, or if all messages that the
        lane delivered there are committed.
        """
        lane_queue = lane.queues.get(queue)
        if (
            lane_queue is None
            or lane_queue.is_fully_committed
            or queue not in lane.abandoned_queues
        ):
            return False
        for client_id in self.assignments.iter_clients(queue, lane.key):
            is_moving = client_id not in lane.members and self.assignments.is_moving(client_id)
            # A client that was not the last reader has nothing in flight: the queue was another's.
            if is_moving and lane_queue.may_have_reader(client_id):
                return True
        return False


def _remove_subscription(merged_key: str, key: str) -> str:
    """Return the key of a merged lane without one of its subscriptions."""
    other_keys = [other_key for other_key in split_key(merged_key) if other_key != key]
    return other_keys[0] if len(other_keys) == 1 else merge_keys(other_keys)


def _count_subscriptions(lanes: Iterable[Lane]) -> list[int]:
    """Return the number of subscriptions of each lane."""
    return [len(split_key(lane.key)) for lane in lanes]


def _merge_lane_queues(first: LaneQueue, second: LaneQueue) -> LaneQueue:
    """Merge the states of two lanes in a queue, and return the state of the merged lane.

    It continues at the lower one of their current offsets, and has the messages of both.
    """
    lower_offset = min(first.current_offset, second.current_offset)
    first_spans = first.slice_spans(first.current_offset)
    second_spans = second.slice_spans(second.current_offset)
    has_commits = first.committed_offset >= 0 or second.committed_offset >= 0
    committed_offset = lower_offset if has_commits else -1
    return LaneQueue(committed_offset, lower_offset, merge_spans([*first_spans, *second_spans]))


def _split_lane_queue(
    merged_queue: LaneQueue, atoms: frozenset[Atom], end_offset: int
) -> LaneQueue:
    """Move a part of a merged lane's messages in a queue to a new lane, and return its state.

    The new lane gets the spans (ranges of offsets with a condition) whose conditions require one of
    `atoms`. `merged_queue`, the state of the merged lane, keeps the other spans. The new lane
    starts at the first of its spans, or at `end_offset`, the end of the queue, if it has none.
    """
    split_spans = [
        span
        for span in merged_queue.slice_spans(merged_queue.current_offset)
        if span.clause.required & atoms
    ]
    merged_queue.spans = [span for span in merged_queue.spans if not span.clause.required & atoms]
    start_offset = min((span.first for span in split_spans), default=end_offset)
    committed_offset = start_offset if merged_queue.committed_offset >= 0 else -1
    return LaneQueue(committed_offset, start_offset, split_spans, read_end=start_offset)
