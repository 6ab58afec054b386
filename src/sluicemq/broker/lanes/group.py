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

`group_table.py` contains the table of lanes and the assignment of rules to them, and
`idle_lanes.py` what happens to lanes without members.
"""

import logging
from typing import Final

from sluicemq.broker.lanes.idle_lanes import IDLE_AFTER_MS, IdleLanes
from sluicemq.broker.lanes.lane import Lane
from sluicemq.broker.lanes.lane_queue import (
    LaneQueue,
    QueueKey,
    create_spans,
)
from sluicemq.broker.lanes.rules import (
    MATCH_NOTHING,
    LaneRule,
    compute_rules,
    compute_wanted_chains,
    create_rule,
    get_atoms_by_topic,
)
from sluicemq.model.topic import RETRY_PREFIX

log = logging.getLogger(__name__)

GO_BACK_WAIT_MS: Final = 30_000
"""Pulls wait this long for a lane to have nothing in flight, and are then let through as long."""


class GroupLanes(IdleLanes):
    """The lanes of one group, as members join, pull, commit and leave."""

    # ------------------------------------------------------------------------------- members

    def add_member(self, key: str, client_id: str) -> Lane:
        """Add a client to the lane with the subscription key `key`, and return the lane.

        A lane is the members of the group that have the same subscription. If the group has no such
        lane, a new one is created, or the subscription is split off from a merged idle lane. An
        idle lane, which has no members, becomes live, as the youngest lane. In these three cases,
        new rules say which lane gets which messages, the idle lanes hand over their unread messages
        that the lane wants, and the rules are saved.

        If the client was the last reader of a queue for some lane, it still reads the queue for
        that lane.
        """
        lane = self.lanes.get(key)
        is_lane_new = lane is None
        if lane is None:
            lane = self._split_off(key) or self._create_lane(key)
        lane.left_ms = None
        if client_id not in lane.members:
            # A client that was away for a moment may have another subscription now.
            self.assignments.assume_reads(client_id, self._find_queues_of_reader(client_id))
        lane.members.add(client_id)
        self.storage.mark_changed()

        was_idle = lane.is_idle
        if was_idle:
            lane.is_idle = False
            lane.join_number = self.allocate_join_number()
            lane.unoffered_queues.clear()
        if is_lane_new or was_idle:
            self.reassign_rules()
            self._offer_idle_messages_to(lane)
            self.process_idle_lanes()
            self.save_rules()
        return lane

    def _find_queues_of_reader(self, client_id: str) -> list[tuple[QueueKey, str]]:
        """Return (queue, key of the lane) for each queue that the client was the last to read."""
        queues_read = []
        for lane in self.lanes.values():
            for queue, lane_queue in lane.queues.items():
                if lane_queue.reader == client_id:
                    queues_read.append((queue, lane.key))
        return queues_read

    def _offer_idle_messages_to(self, lane: Lane) -> None:
        """Give `lane`, which has become live, the unread messages of idle lanes that it wants.

        Queues in `unoffered_queues` of an idle lane are left out, because `process_idle_lanes` will
        offer them to all live lanes. A queue whose hand-over must wait is added to them.
        """
        for idle_lane in self.get_idle_lanes():
            shared_queues = idle_lane.queues.keys() & lane.queues.keys()
            for queue in sorted(shared_queues - idle_lane.unoffered_queues):
                if not self._hand_over(idle_lane, queue, [lane.key]):
                    idle_lane.unoffered_queues.add(queue)

    def move_member(self, old_key: str, client_id: str) -> None:
        """Remove a client from the lane `old_key`, because its subscription has changed.

        The client must have been added to its new lane before. The queues that it may have read are
        marked as abandoned in the old lane. Its commits in them count for the old lane until it has
        committed all messages that it has in flight.

        If the client was the last member of the old lane, the next `process_idle_lanes` makes that
        lane idle, without waiting for IDLE_AFTER_MS. An unknown lane is ignored.
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

        `moved` says that the client has changed to another lane of the group. If it has not, all
        that is known about the client is forgotten. A lane without members becomes idle after
        IDLE_AFTER_MS, or at the next `process_idle_lanes` if its last member has moved.
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
        """Create a lane with the subscription key `key`, add it to the group, and return it.

        A lane is the members of the group that have the same subscription. In a queue of its
        topics, the lane begins at the join offset of the group, which is half a minute old. It gets
        the messages there that its subscription matches and that no other lane wants. In the queues
        of the retry topic, the lane begins at the end, because each earlier message belongs to
        another lane. The caller must call `reassign_rules`, which gives all lanes their rules for
        new messages.
        """
        queues = list(self.storage.iter_queues(self.name, key))
        # First, so that the other lanes get their states in new queues with rules that exclude each
        # other.
        for queue in queues:
            self.ensure_queue(queue)

        rules = self._compute_rules_of_rest(key)
        lane = Lane(key, self.allocate_join_number())
        for queue in queues:
            topic, _ = queue
            lane.queues[queue] = self._create_lane_queue(queue, rules.get(topic, MATCH_NOTHING))
        self.lanes[key] = lane
        log.info("group %s: new lane %s with the subscription %s", self.name, lane.id, key)
        return lane

    def _compute_rules_of_rest(self, key: str) -> dict[str, LaneRule]:
        """Return, for each topic, the rule of a new lane for messages that are stored already.

        `key` is the subscription key of the new lane. The rule matches the messages that the
        subscription matches and that no other lane wants.
        """
        live_keys, idle_keys = self.get_live_and_idle_keys()
        rules: dict[str, LaneRule] = {}
        for topic, atoms in get_atoms_by_topic(key).items():
            wanted_by_live = compute_wanted_chains(topic, live_keys)
            wanted_by_idle = compute_wanted_chains(topic, idle_keys)
            rules[topic] = create_rule(atoms, *wanted_by_live, *wanted_by_idle)
        return rules

    def _create_lane_queue(self, queue: QueueKey, rule: LaneRule) -> LaneQueue:
        """Return the state of a new lane in a queue: where it starts, and what it gets there.

        The lane starts at the join offset of the group, and gets the messages that `rule` matches.
        In a queue of a retry topic, it starts at the end, and has no rule yet.
        """
        topic, _ = queue
        end_offset = self.storage.get_end_offset(queue)
        if topic.startswith(RETRY_PREFIX):
            return LaneQueue(end_offset, end_offset, read_end=end_offset)
        # -1 if the group has committed nothing. Then the lane has committed nothing, either, and
        # starts at offset 0.
        committed_offset = min(self.storage.get_join_offset(self.name, queue), end_offset)
        start_offset = max(committed_offset, 0)
        spans = create_spans(start_offset, rule)
        return LaneQueue(committed_offset, start_offset, spans, read_end=start_offset)

    # ------------------------------------------------------------------------------ a member

    def must_wait_to_go_back(self, lane_queue: LaneQueue, queue: QueueKey) -> bool:
        """Return whether pulls of a lane must wait now, so that the lane can go back to messages.

        Another lane wants to hand over messages that are before the offset of this lane. The lane
        can go back to them when it has no messages in flight. Until then, its pulls wait for
        GO_BACK_WAIT_MS, are let through for the same time, wait again, and so on. The result is
        False if no hand-over waits, or if nothing is in flight. `lane_queue` is the state of the
        lane in `queue`.
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
        """Let a client, which has asked for the offset of a queue, read it for the lane `key`.

        The client is a member of the lane. It asks with QUERY_CONSUMER_OFFSET (14) before it reads
        a queue. If it read the queue for another lane before, its redirect there is discarded.
        Return the state of the lane in the queue. Return None, with nothing changed, if the lane
        does not subscribe to the topic.
        """
        lane_queue = self.get_lane_queue(key, queue)
        if lane_queue is not None and self.assignments.lane_of(client_id, queue, "") != key:
            self.assignments.assign(client_id, queue, key)
            self.storage.mark_changed()
        return lane_queue

    def get_redirect(
        self, key: str, client_id: str, queue: QueueKey, offset: int, *, is_parked: bool = False
    ) -> int | None:
        """Return the offset to which a pull from `offset` must be redirected, or None.

        The client `client_id` sent the pull. It is a member of the lane `key`. `is_parked` says
        that the pull has waited in the broker, so it does not show what the client knows now. The
        pull is redirected in three cases:

        1. The client reads the queue for lane `key` for the first time, and pulls from another
           offset than the lane's. The client is assigned to the lane by this call.
        2. The former reader of the queue changed to another lane, and has nothing in flight any
           more. The pull must continue at the committed offset. The queue is not abandoned any
           more.
        3. An offset reset of the lane is pending. It is removed if the pull follows it.

        While the client finishes messages of its old lane, the result is None.
        """
        # Case 1: a client that has not read for the lane.
        assignments = self.assignments
        if assignments.lane_of(client_id, queue, key) != key:
            if self.is_finishing_old_lane(client_id, queue, key):
                return None
            self._assign_or_redirect(key, client_id, queue, offset)
        elif not is_parked and not assignments.has_read(client_id, queue):
            if self._may_read_ahead(key, client_id, queue, offset):
                self._assign_or_redirect(key, client_id, queue, None)
            else:
                self._assign_or_redirect(key, client_id, queue, offset)
        redirect = assignments.get_redirect(client_id, queue, offset)
        if redirect is not None:
            return redirect

        # Case 2: it becomes a reset of the lane, and thus case 3.
        lane = self.lanes.get(key)
        if (
            lane is not None
            and queue in lane.abandoned_queues
            and not self.may_be_in_flight_at_former_member(lane, queue)
        ):
            self._take_over_abandoned(lane, client_id, queue, offset)

        # Case 3.
        if not self.resets:
            return None
        if lane is not None and queue in lane.queues:
            self.resets.raise_offset(key, *queue, lane.queues[queue].current_offset)
        return self.resets.redirect(key, *queue, offset, client_id, is_parked=is_parked)

    def _may_read_ahead(self, key: str, client_id: str, queue: QueueKey, offset: int) -> bool:
        """Return whether the first pull of a client may begin at `offset`, after the lane's offset.

        That is right if the client was the last reader of the queue for the lane `key`: it has read
        on, and the broker was restarted meanwhile. The result is False if `offset` is before the
        current offset of the lane.
        """
        lane_queue = self.get_lane_queue(key, queue)
        return (
            lane_queue is not None
            and lane_queue.may_have_reader(client_id)
            and offset >= lane_queue.current_offset
        )

    def _take_over_abandoned(
        self, lane: Lane, client_id: str, queue: QueueKey, offset: int
    ) -> None:
        """Let a client, which pulls from `offset`, take over a queue that its reader has abandoned.

        The former reader has changed to another lane and has nothing in flight any more. The client
        must continue at the offset that the former reader has committed. If it pulls from another
        offset, a reset is added, which redirects it. But if the client was the last reader itself,
        and has messages in flight, it may continue where it is.
        """
        lane.abandoned_queues.discard(queue)
        lane_queue = lane.queues[queue]
        must_continue_at_commit = lane_queue.is_fully_committed or not lane_queue.may_have_reader(
            client_id
        )
        if must_continue_at_commit and 0 <= lane_queue.current_offset != offset:
            self.resets.add(lane.key, *queue, lane_queue.current_offset)
        self.storage.mark_changed()

    def _assign_or_redirect(
        self, key: str, client_id: str, queue: QueueKey, offset: int | None
    ) -> None:
        """Let a member of the lane `key` read a queue for this lane, or redirect it first.

        `offset` is the offset from which the client pulls. If it is the current offset of the lane,
        or None, the commits of the client count for the lane from now on. Otherwise the client must
        first follow a redirect to the current offset.
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
        """Return whether a member of the lane `key` may have messages of its old lane in flight.

        All of these must hold: the client still reads the queue for another lane than `key`; that
        lane has uncommitted messages in the queue; the client was the last reader for that lane, or
        the reader is unknown; and the client has moved less than MOVE_WAIT_MS ago.
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
        read_key = self.assignments.lane_of(client_id, queue, key)  # perhaps that of its old lane
        lane_queue = self.get_lane_queue(read_key, queue)
        if (
            lane_queue is None
            or self.resets.blocks_commits(read_key, *queue)
            or self.assignments.must_ignore_commits(client_id, queue)
        ):
            return
        goes_back = offset < lane_queue.current_offset
        is_abandoned = queue in self.lanes[read_key].abandoned_queues
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
        """Set all lanes to `offset` in a queue, because an operator has reset the group.

        From `offset` on, each lane gets the messages that its rule for new messages matches. So an
        idle lane loses unread messages that a live lane wants. The readers of all lanes will be
        redirected. A waiting hand-over in the queue is cancelled. The committed offset of the group
        does not change; the caller sets it.
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
