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

`group_table.py` contains the table of lanes and the assignment of rules to them.
"""

import logging
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final

from sluicemq.broker.lanes.group_table import GroupLaneTable
from sluicemq.broker.lanes.lane import Lane
from sluicemq.broker.lanes.lane_queue import (
    LaneQueue,
    QueueKey,
    Span,
    create_spans,
    merge_spans,
)
from sluicemq.broker.lanes.rules import (
    MATCH_NOTHING,
    LaneRule,
    compute_rules,
    compute_wanted_chains,
    create_rule,
    get_atoms_by_topic,
    get_required_atoms,
    merge_keys,
    split_key,
)
from sluicemq.model.topic import RETRY_PREFIX

log = logging.getLogger(__name__)

IDLE_AFTER_MS: Final = 30_000
"""A lane without members becomes idle after this time."""
GO_BACK_WAIT_MS: Final = 30_000
"""Pulls wait this long for a lane to have nothing in flight, and are then let through as long."""
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


class GroupLanes(GroupLaneTable):
    """The lanes of one group, as members join, pull, commit and leave."""

    # ------------------------------------------------------------------------------- members

    def add_member(self, key: str, client_id: str) -> Lane:
        """Add a client to the lane with the subscription `key`, and return the lane.

        If the group has no such lane, the lane is split off from the idle lane that contains the
        subscription, or is created. An idle lane becomes live, as the youngest lane. In all three
        cases the rules of all lanes are assigned again, the idle lanes hand over their unread
        messages that the lane wants, and the rules are saved.

        A client that is new in the lane still reads the queues of which it was the last reader for
        the lanes for which it read them (`LaneAssignments.assume_reads`).
        """
        lane = self.lanes.get(key)
        is_lane_new = lane is None
        if lane is None:
            lane = self._split_off(key) or self._create_lane(key)
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
        if is_lane_new or lane.is_idle:
            if lane.is_idle:
                lane.is_idle = False
                lane.join_number = self.allocate_join_number()
                lane.unoffered_queues.clear()
            self.reassign_rules()
            self._offer_idle_messages_to(lane)
            self.process_idle_lanes()
            self.save_rules()
        return lane

    def _offer_idle_messages_to(self, lane: Lane) -> None:
        """Hand over to a lane that has become live the unread messages of idle lanes that it wants.

        Queues in `Lane.unoffered_queues` are left out, because `process_idle_lanes` will offer them
        to all live lanes. A queue whose hand-over must wait is added to them.
        """
        for idle_lane in self.get_idle_lanes():
            shared_queues = idle_lane.queues.keys() & lane.queues.keys()
            for queue in sorted(shared_queues - idle_lane.unoffered_queues):
                if not self._hand_over(idle_lane, queue, [lane.key]):
                    idle_lane.unoffered_queues.add(queue)

    def move_member(self, old_key: str, client_id: str) -> None:
        """Remove a member from the lane `old_key`, because its subscription has changed.

        The client must have been added to its new lane. The queues that it may have read become
        abandoned queues of the old lane. Its commits in them count for the old lane until it has
        committed all messages that it has in flight (`LaneAssignments.start_move`). If the client
        was the last member of the old lane, that lane becomes idle at the next
        `process_idle_lanes`, without waiting for IDLE_AFTER_MS. An unknown lane is ignored.
        """
        lane = self.lanes.get(old_key)
        if lane is not None:
            queues = [
                queue
                for queue, lane_queue in lane.queues.items()
                if lane_queue.may_have_reader(client_id)
            ]
            self.assignments.start_move(client_id, old_key, queues)
            lane.abandoned_queues.update(queues)
        self.remove_member(old_key, client_id, moved=True)

    def remove_member(self, key: str, client_id: str, *, moved: bool = False) -> None:
        """Remove a client that left the lane `key`. An unknown lane is ignored.

        `moved` says that the client is still a member of the group (`move_member`). If it is not,
        its assignments are forgotten, too. A lane without members becomes idle after IDLE_AFTER_MS,
        or at the next `process_idle_lanes` if its last member `moved`.
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

    def _create_lane(self, key: str) -> Lane:
        """Create a lane with the subscription `key`, add it to the group, and return it.

        In a queue of its topics, the lane begins at the join offset of the group. From there on, it
        gets the messages that its subscription matches and that no other lane wants. The caller
        must call `reassign_rules`, which replaces the rule from the end of each queue on. In the
        retry queues, the lane begins at the end: each message before it belongs to another lane.
        """
        queues = list(self.storage.iter_queues(self.name, key))
        # First, so that the other lanes get their states in new queues with rules that exclude each
        # other.
        for queue in queues:
            self.ensure_queue(queue)

        # By topic: the rule by which the lane gets what no other lane wants.
        live_keys, idle_keys = self.get_live_and_idle_keys()
        rules: dict[str, LaneRule] = {}
        for topic, atoms in get_atoms_by_topic(key).items():
            wanted_by_live = compute_wanted_chains(topic, live_keys)
            wanted_by_idle = compute_wanted_chains(topic, idle_keys)
            rules[topic] = create_rule(atoms, *wanted_by_live, *wanted_by_idle)

        lane = Lane(key, self.allocate_join_number())
        for queue in queues:
            topic, _ = queue
            end_offset = self.storage.get_end_offset(queue)
            if topic.startswith(RETRY_PREFIX):
                lane.queues[queue] = LaneQueue(end_offset, end_offset, read_end=end_offset)
                continue
            # -1 if the group has committed nothing. Then the lane has committed nothing, either,
            # and starts at offset 0.
            committed_offset = min(self.storage.get_join_offset(self.name, queue), end_offset)
            start_offset = max(committed_offset, 0)
            spans = create_spans(start_offset, rules.get(topic, MATCH_NOTHING))
            lane.queues[queue] = LaneQueue(
                committed_offset, start_offset, spans, read_end=start_offset
            )
        self.lanes[key] = lane
        log.info("group %s: new lane %s with the subscription %s", self.name, lane.id, key)
        return lane

    # ----------------------------------------------------------------------------- idle lanes

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
        if not any(lane.members for lane in self.lanes.values()):
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
            if self._is_empty(lane):
                self._remove_lane_and_save(lane)
            elif now_ms - lane.idle_since_ms > self.storage.retention_ms:
                self._forget_unread_lane(lane, "no member has returned in time")
        self._merge_idle_lanes()

    def _mark_idle_lanes(self, now_ms: int) -> None:
        """Mark as idle each lane whose last member left IDLE_AFTER_MS before `now_ms`, or earlier.

        All queues of such a lane become `unoffered_queues`. If there is such a lane, the rules are
        assigned again and saved.
        """
        lanes_to_mark = [
            lane
            for lane in self.lanes.values()
            if lane.left_ms is not None
            and not lane.is_idle
            and now_ms - lane.left_ms >= IDLE_AFTER_MS
        ]
        for lane in lanes_to_mark:
            lane.is_idle = True
            lane.idle_since_ms = now_ms
            lane.unoffered_queues = set(lane.queues)
            log.info("group %s: lane %s is idle, it has no members", self.name, lane.id)
        if lanes_to_mark:
            self.reassign_rules()
            self.save_rules()

    def _is_empty(self, lane: Lane) -> bool:
        """Return whether an idle lane has no unread messages and will not get any.

        A queue that has not been offered to other lanes counts as unread.
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
        """Commit the offset of the next message of an idle lane, in each of its queues.

        So the lane skips the messages before that offset, which are not its own. Without a next
        message, it skips all messages that were examined. The offset of the group follows. At most
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

        `takers` are the keys of these lanes; None means all live lanes. The idle lane keeps the
        messages that no live lane wants. A lane that has read further goes back to the current
        offset of the idle lane, and its reader is redirected. Parked pulls of the queue are
        retried.

        Return False, with nothing given, if it must be tried again later: a former member of the
        idle lane may have messages in flight, or a lane that must go back has some. In the latter
        case, pulls of the queue begin to wait (`go_back_since_ms`).
        """
        self.ensure_queue(queue)
        if self.may_be_in_flight_at_former_member(lane, queue):
            return False

        # Find what each lane gains.
        topic, _ = queue
        if topic not in self._topic_rules:
            self.reassign_rules()
        topic_rules = self._topic_rules[topic]
        taker_keys = topic_rules.hand_over if takers is None else takers
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

    def _find_gains(
        self,
        giver: Lane,
        queue: QueueKey,
        taker_keys: Iterable[str],
        rules: Mapping[str, LaneRule],
    ) -> list[tuple[Lane, list[Span]]]:
        """Return which live lanes want unread messages of the idle lane `giver` in a queue.

        The result has each lane of `taker_keys` that wants some, with the spans of these messages.
        `rules` are the rules of the live lanes for handed over messages, by key. Nothing is
        changed.
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
        """Add the spans `gained_spans` of an idle lane to those of the lane `taker`, in one queue.

        `giver_offset` is the current offset of the idle lane. If the taker has read further, it
        goes back to that offset, its reader is redirected, and the offset of the group is set. The
        caller has checked that this is possible (`LaneQueue.can_go_back_to`).
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
        now_ms = self.storage.clock.now_ms()
        unread_max = sum(
            self.storage.get_end_offset(queue) - lane_queue.current_offset
            for queue, lane_queue in lane.queues.items()
            if lane_queue.find_rule(lane_queue.current_offset) != (MATCH_NOTHING, None)
        )
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
        log.warning(
            "group %s: removed %d subscription(s) without members, because %s: %s%s. %d messages"
            " were not checked for them; those that only these subscriptions match are not"
            " delivered to the group.",
            self.name,
            len(subscription_keys),
            reason,
            ", ".join(subscription_keys[:SUBSCRIPTIONS_LOGGED]),
            ", ..." if len(subscription_keys) > SUBSCRIPTIONS_LOGGED else "",
            unread_max,
        )
        self._remove_lane_and_save(lane)

    def _merge_idle_lanes(self) -> None:
        """Merge idle lanes while there are more than IDLE_LANES_MAX.

        Of the pairs of lanes that became idle one after the other, the pair with the fewest
        subscriptions is merged. A lane of which a former member may have messages in flight is left
        out until it has been idle for UNCOMMITTED_WAIT_MS. At most MERGES_PER_TICK pairs are merged
        in one call.

        If the idle lanes have more than IDLE_SUBSCRIPTIONS_MAX subscriptions afterwards, the lanes
        that became idle first are removed with their unread messages.
        """
        idle_lanes = self.get_idle_lanes()
        if len(idle_lanes) > IDLE_LANES_MAX:
            idle_lanes = self._select_mergeable(idle_lanes)

        for _ in range(min(len(idle_lanes) - IDLE_LANES_MAX, MERGES_PER_TICK)):
            subscription_counts = [len(split_key(lane.key)) for lane in idle_lanes]
            pair_counts = [sum(pair) for pair in pairwise(subscription_counts)]
            index = pair_counts.index(min(pair_counts))
            # The second lane becomes the merged one, and takes the place of both.
            self._merge_lanes(idle_lanes[index], idle_lanes[index + 1])
            del idle_lanes[index]

        while sum(len(split_key(lane.key)) for lane in idle_lanes) > IDLE_SUBSCRIPTIONS_MAX:
            reason = f"more than {IDLE_SUBSCRIPTIONS_MAX} subscriptions left the group within a day"
            self._forget_unread_lane(idle_lanes.pop(0), reason)

    def _select_mergeable(self, idle_lanes: list[Lane]) -> list[Lane]:
        """Return the idle lanes of which no former member may have messages in flight.

        A lane that has been idle for more than UNCOMMITTED_WAIT_MS is included in any case.
        """
        queues_by_lane = self.assignments.get_queues_by_lane()
        now_ms = self.storage.clock.now_ms()
        mergeable = []
        for lane in idle_lanes:
            has_waited = now_ms - lane.idle_since_ms > UNCOMMITTED_WAIT_MS
            is_fully_committed = all(
                lane.queues[queue].is_fully_committed
                for queue in queues_by_lane.get(lane.key, ())
                if queue in lane.queues
            )
            if has_waited or is_fully_committed:
                mergeable.append(lane)
        return mergeable

    def _merge_lanes(self, first: Lane, second: Lane) -> None:
        """Replace two idle lanes by one: the object `second`, with the key and spans of both.

        In each queue, the merged lane continues at the lower one of the two current offsets. That
        offset counts as committed if either lane had committed one; otherwise the committed offset
        stays -1. In a queue that only one of the lanes has, its state is kept. No queue of the
        merged lane is abandoned. The rules are saved.
        """
        self._detach_lane(first)
        self._detach_lane(second)
        ids = f"{first.id} and {second.id}"
        for queue, lane_queue in first.queues.items():
            other = second.queues.get(queue)
            if other is None:
                second.queues[queue] = lane_queue
                continue
            lower_offset = min(lane_queue.current_offset, other.current_offset)
            spans = merge_spans(
                [
                    *lane_queue.slice_spans(lane_queue.current_offset),
                    *other.slice_spans(other.current_offset),
                ]
            )
            has_commits = max(lane_queue.committed_offset, other.committed_offset) >= 0
            committed_offset = lower_offset if has_commits else -1
            second.queues[queue] = LaneQueue(committed_offset, lower_offset, spans)
        second.key = merge_keys({*split_key(first.key), *split_key(second.key)})
        second.unoffered_queues |= first.unoffered_queues
        second.abandoned_queues.clear()
        self.lanes[second.key] = second
        self.save_rules()
        log.info("group %s: merged the idle lanes %s into %s", self.name, ids, second.id)

    def _split_off(self, key: str) -> Lane | None:
        """Split the subscription `key` off from the merged idle lane that contains it.

        Return a new live lane with this subscription; None if no idle lane contains it. In each
        queue, the new lane gets the spans whose clauses require an atom of the subscription, and
        continues at the first of them, or at the end of the queue if there is none. The merged lane
        keeps the other spans and subscriptions. The caller assigns and saves the rules.
        """
        merged = next((lane for lane in self.get_idle_lanes() if key in split_key(lane.key)), None)
        if merged is None:
            return None
        self._detach_lane(merged)

        # Divide the spans of each queue.
        lane = Lane(key, self.allocate_join_number())
        for queue, merged_queue in merged.queues.items():
            topic, _ = queue
            atoms = get_required_atoms(topic, key)
            if not atoms:  # the subscription does not include the topic
                continue
            split_spans = [
                span
                for span in merged_queue.slice_spans(merged_queue.current_offset)
                if span.clause.required & atoms
            ]
            merged_queue.spans = [
                span for span in merged_queue.spans if not span.clause.required & atoms
            ]
            end_offset = self.storage.get_end_offset(queue)
            start_offset = min((span.first for span in split_spans), default=end_offset)
            committed_offset = start_offset if merged_queue.committed_offset >= 0 else -1
            lane.queues[queue] = LaneQueue(
                committed_offset, start_offset, split_spans, read_end=start_offset
            )

        # Put both lanes into the table, the merged one under the key of what is left.
        other_keys = [part for part in split_key(merged.key) if part != key]
        merged.key = merge_keys(other_keys) if len(other_keys) > 1 else other_keys[0]
        self.lanes[merged.key] = merged
        self.lanes[key] = lane
        log.info("group %s: lane %s has members again: %s", self.name, lane.id, key)
        return lane

    # ------------------------------------------------------------------------------ a member

    def must_wait_to_go_back(self, lane_queue: LaneQueue, queue: QueueKey) -> bool:
        """Return whether pulls of a lane must wait, because a hand-over in the queue waits.

        `lane_queue` is the state of the lane in `queue`. The lane can go back as soon as it has no
        messages in flight, so its pulls do not wait then. Otherwise they wait for GO_BACK_WAIT_MS
        and are let through for the same time, alternately.
        """
        since_ms = self.go_back_since_ms.get(queue)
        if since_ms is None or lane_queue.is_fully_committed:
            return False
        # Periods of GO_BACK_WAIT_MS: pulls wait in the first, third and so on.
        period_number = (self.storage.clock.now_ms() - since_ms) // GO_BACK_WAIT_MS
        return period_number % 2 == 0

    def start_from_offset_query(
        self, key: str, client_id: str, queue: QueueKey
    ) -> LaneQueue | None:
        """Assign a queue to a member that has asked for its offset (QUERY_CONSUMER_OFFSET, 14).

        From now on, the client reads the queue for lane `key`, which is the lane that it is in. A
        redirect of the client in the queue is discarded if it read for another lane before. Return
        the state of the lane in the queue. Return None, with nothing changed, if the lane does not
        subscribe to the topic.
        """
        lane_queue = self.get_lane_queue(key, queue)
        if lane_queue is not None and self.assignments.lane_of(client_id, queue, "") != key:
            self.assignments.assign(client_id, queue, key)
            self.storage.mark_changed()
        return lane_queue

    def get_redirect(
        self, key: str, client_id: str, queue: QueueKey, offset: int, *, is_parked: bool = False
    ) -> int | None:
        """Return the offset to which a pull from `offset` must be redirected, None if it is right.

        The pull is of the client `client_id`, a member of lane `key`. `is_parked` says that the
        pull was parked before, so it proves nothing about what the client knows by now. The pull is
        redirected in three cases:

        1. The client reads the queue for lane `key` for the first time, and pulls from another
           offset than the lane's. The client is assigned to the lane by this call.
        2. The former reader of the queue changed to another lane, and has nothing in flight any
           more. The pull must continue at the committed offset. The queue is not abandoned any
           more.
        3. An offset reset of the lane is pending. It is removed if the pull follows it.

        While the client finishes messages of its old lane, the result is None.
        """
        assignments = self.assignments
        if assignments.lane_of(client_id, queue, key) != key:
            if self.is_finishing_old_lane(client_id, queue, key):
                return None
            self._assign(key, client_id, queue, offset)
        elif not is_parked and not assignments.has_read(client_id, queue):
            lane_queue = self.get_lane_queue(key, queue)
            # Only the client that read last may be ahead of its lane: the broker was restarted.
            is_offset_valid = (
                lane_queue is not None
                and lane_queue.may_have_reader(client_id)
                and offset >= lane_queue.current_offset
            )
            self._assign(key, client_id, queue, None if is_offset_valid else offset)
        redirect = assignments.get_redirect(client_id, queue, offset)
        if redirect is not None:
            return redirect

        lane = self.lanes.get(key)
        if (  # the former reader has nothing in flight any more
            lane is not None
            and queue in lane.abandoned_queues
            and not self.may_be_in_flight_at_former_member(lane, queue)
        ):
            # This client continues at the offset that the former reader has committed. If this
            # client was the last reader itself and has messages in flight, its offset is right.
            lane.abandoned_queues.discard(queue)
            lane_queue = lane.queues[queue]
            must_continue_at_commit = (
                lane_queue.is_fully_committed or not lane_queue.may_have_reader(client_id)
            )
            if must_continue_at_commit and 0 <= lane_queue.current_offset != offset:
                self.resets.add(lane.key, *queue, lane_queue.current_offset)
            self.storage.mark_changed()
        if not self.resets:
            return None
        if lane is not None and queue in lane.queues:
            self.resets.raise_offset(key, *queue, lane.queues[queue].current_offset)
        return self.resets.redirect(key, *queue, offset, client_id, is_parked=is_parked)

    def _assign(self, key: str, client_id: str, queue: QueueKey, offset: int | None) -> None:
        """Assign a queue to a member of lane `key`, so that its commits count for this lane.

        `offset` is the offset from which the client pulls. If it is not the current offset of the
        lane, the client is redirected to the current offset. None means that the client may
        continue where it is.
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
        """Return whether a member of lane `key` may have messages of its old lane in flight.

        That is the case until MOVE_WAIT_MS after its move, if the client reads the queue for
        another lane than `key`, and that lane has uncommitted messages there. The client may have
        them only if it was the last reader of that lane in the queue, or if no reader is known.
        """
        read_lane = self.lanes.get(self.assignments.lane_of(client_id, queue, key))
        if read_lane is None or read_lane.key == key:
            return False
        old_lane_queue = read_lane.queues.get(queue)
        return (
            old_lane_queue is not None
            and old_lane_queue.may_have_reader(client_id)
            and not old_lane_queue.is_fully_committed
            and self.assignments.is_moving(client_id)
        )

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
        # A client that was not the last reader has nothing in flight: the queue was another's.
        return any(
            client_id not in lane.members
            and lane_queue.may_have_reader(client_id)
            and self.assignments.is_moving(client_id)
            for client_id in self.assignments.iter_clients(queue, lane.key)
        )

    def commit(self, key: str, client_id: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit an offset of a client, which is a member of lane `key`.

        The commit counts for the lane for which the client reads the queue: its old lane while it
        finishes messages of that lane. The commit is ignored

        - if that lane does not exist any more, or does not subscribe to the topic;
        - while the client, or the lane, is to be redirected and the client does not know it;
        - if it goes back, and the queue is abandoned or the client has not read from it yet.

        Otherwise the offset of the group follows, and a hand-over that waits in the queue is tried
        again.
        """
        queue = (topic, queue_id)
        key = self.assignments.lane_of(client_id, queue, key)  # perhaps that of its old lane
        lane_queue = self.get_lane_queue(key, queue)
        if (
            lane_queue is None
            or self.resets.blocks_commits(key, *queue)
            or self.assignments.must_ignore_commits(client_id, queue)
        ):
            return
        goes_back = offset < lane_queue.current_offset
        is_abandoned = queue in self.lanes[key].abandoned_queues
        may_go_back = not is_abandoned and self.assignments.has_read(client_id, queue)
        if goes_back and not may_go_back:
            return

        # Before the commit, which changes the current offset of this lane.
        group_offset = self.storage.offsets.committed(self.name, *queue)
        is_another_lane_behind = 0 <= group_offset < lane_queue.current_offset
        lane_queue.commit(offset)
        self.storage.mark_changed()
        # The offset of the group is the lowest of its lanes. While another lane is behind this one,
        # a commit that goes forward does not change it, and a thousand lanes need not be compared.
        if not is_another_lane_behind or goes_back:
            self.publish_group_offset(queue)
        self.retry_hand_over(queue)

    def retry_hand_over(self, queue: QueueKey) -> None:
        """Call `process_idle_lanes` if a hand-over in the queue waits, otherwise do nothing."""
        if queue in self.go_back_since_ms:
            self.process_idle_lanes()

    def reset_queue(self, topic: str, queue_id: int, offset: int) -> None:
        """Move all lanes to `offset` in a queue, as after an offset reset of the group.

        Each lane gets the rule for new messages that follows from the present lanes, from `offset`
        on, so idle lanes lose unread messages that live lanes want. The readers of all lanes are to
        be redirected. A waiting hand-over in the queue is cancelled. The caller sets the committed
        offset of the group.
        """
        queue = (topic, queue_id)
        self.ensure_queue(queue)
        rules = compute_rules(topic, *self.get_live_and_idle_keys())
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

    # ---------------------------------------------------------------------------- statistics
