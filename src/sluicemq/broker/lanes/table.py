"""The groups that have lanes: the only interface between lanes and the rest of the broker.

The rest of the broker asks for which lane a request is (`Consumers.lane_of`). The answer is None if
the group has no lanes, otherwise a `LaneMember`, by which the request is processed.
"""

import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, NamedTuple

import orjson

from sluicemq.broker.context import BrokerContext
from sluicemq.broker.lanes.group import GroupLanes
from sluicemq.broker.lanes.lane import Lane
from sluicemq.broker.lanes.lane_queue import LaneQueue, QueueKey, create_spans
from sluicemq.broker.lanes.lanes_file import decode_group, encode_group
from sluicemq.broker.lanes.rules import compute_sole_rule
from sluicemq.broker.lanes.storage import LaneStorage, find_end_offset
from sluicemq.net.work.background import Offload
from sluicemq.store.read import ReadResult, ReadStatus

log = logging.getLogger(__name__)

QUICK_WRITE_QUEUES_MAX: Final = 2000
"""A file with more states of lanes in queues is written at most once a second: its text takes more
than a few milliseconds."""


class PullAction(Enum):
    """What a pull must do next."""

    READ = auto()
    """Read messages."""
    WAIT = auto()
    """Wait, because a lane has messages in flight, or its rules are not on disk."""
    RETRY = auto()
    """Be sent again by the client."""
    REDIRECT = auto()
    """Continue at another offset."""


class PullDecision(NamedTuple):
    """What a pull must do next, with the details of the action."""

    action: PullAction
    lane_key: str = ""
    """The key of the lane for which a parked pull waits; "" if none is known."""
    offset: int = -1
    """Where the pull must continue (REDIRECT), or be sent again (RETRY)."""


READ: Final = PullDecision(PullAction.READ)


class LaneMember(NamedTuple):
    """A member of a group with lanes that has sent a request."""

    lanes: GroupLanes
    client_id: str
    key: str
    """The key of the lane that it is in."""

    def commit(self, queue: QueueKey, offset: int) -> None:
        """Commit an offset of the member; see `GroupLanes.commit` for which lane it counts."""
        self.lanes.commit(self.key, self.client_id, *queue, offset)

    def start_from_offset_query(self, queue: QueueKey) -> LaneQueue | None:
        """Assign a queue to the member, which has asked for its offset there.

        The request was QUERY_CONSUMER_OFFSET (14). From now on, the member reads the queue for its
        present lane. Return the state of this lane in the queue; None if the lane does not
        subscribe to the topic.
        """
        return self.lanes.start_from_offset_query(self.key, self.client_id, queue)

    def get_lane_queue(self, queue: QueueKey) -> LaneQueue | None:
        """Return the state of the member's present lane in a queue.

        Return None if the lane does not subscribe to the topic.
        """
        return self.lanes.get_lane_queue(self.key, queue)

    def start_pull(self, queue: QueueKey, offset: int) -> PullDecision:
        """Decide what a new pull of this member from `offset` must do: READ, WAIT or REDIRECT.

        The pull is also recorded in the lane, for example that this member reads the queue now. The
        commit that came with the pull must have been applied before.
        """
        lanes, client_id, key = self
        redirect = lanes.get_redirect(key, client_id, queue, offset)
        if redirect is not None:
            return PullDecision(PullAction.REDIRECT, offset=redirect)
        decision = self._check_pull(queue, offset)
        if decision.action is PullAction.READ:
            return decision

        # The pull may have proved that nothing is in flight, so that the lane went back just now.
        redirect = lanes.get_redirect(key, client_id, queue, offset)
        if redirect is not None:
            return PullDecision(PullAction.REDIRECT, offset=redirect)
        return decision

    def _check_pull(self, queue: QueueKey, offset: int) -> PullDecision:
        """Decide whether a pull from `offset` may READ or must WAIT, and record it in the lane.

        The pull must wait in these cases:

        - The member is finishing messages of its old lane. The pull is recorded in the old lane.
        - A former member of the lane may have messages in flight, or the rules of the group are not
          on disk. Nothing is recorded.
        - The lane is about to go back to earlier messages, or its reader must be redirected.

        In the third case, and if the pull may read, the member becomes the reader of the queue, and
        a hand-over of messages that waits in the queue is tried again.
        """
        lanes, client_id, key = self
        lane_queue = lanes.get_lane_queue(key, queue)
        if lane_queue is None:
            return READ
        if lanes.is_finishing_old_lane(client_id, queue, key):
            old_key = lanes.assignments.lane_of(client_id, queue, key)
            lanes.lanes[old_key].queues[queue].note_pull(offset)
            return PullDecision(PullAction.WAIT)
        if lanes.may_be_in_flight_at_former_member(lanes.lanes[key], queue):
            return PullDecision(PullAction.WAIT)
        if lanes.storage.has_unsaved_rules(lanes.name):
            return PullDecision(PullAction.WAIT)

        if lane_queue.reader != client_id:
            lane_queue.set_reader(client_id, lanes.get_lane_queues(queue))
            lanes.storage.mark_changed()
        lane_queue.note_pull(offset)
        if lane_queue.read_end is None:
            # The first pull since the start: it tells what was delivered before.
            lane_queue.read_end = lane_queue.delivered_end = offset
        lanes.retry_hand_over(queue)
        is_redirected_next = lanes.resets.blocks_commits(key, *queue)
        if is_redirected_next or lanes.must_wait_to_go_back(lane_queue, queue):
            return PullDecision(PullAction.WAIT, key)
        return PullDecision(PullAction.READ, key)

    def retry_pull(self, queue: QueueKey, offset: int, lane_key: str) -> PullDecision:
        """Decide what a pull from `offset` must do that has waited in the broker and is retried.

        The result is READ, WAIT, REDIRECT or RETRY. RETRY means that the member is in another lane
        now, so the client must pull again. `lane_key` is the `PullDecision.lane_key` with which the
        pull began to wait.
        """
        lanes, client_id, key = self
        lane_queue = lanes.get_lane_queue(key, queue)
        # If another member has pulled since, this client does not read the queue any more, so it
        # is not redirected.
        if lane_queue is None or lane_queue.may_have_reader(client_id):
            redirect = lanes.get_redirect(key, client_id, queue, offset, is_parked=True)
            if redirect is not None:
                return PullDecision(PullAction.REDIRECT, offset=redirect)
        if lane_queue is None:  # the lane does not subscribe to the topic
            return READ

        must_wait = (
            lanes.must_wait_to_go_back(lane_queue, queue)
            or lanes.storage.has_unsaved_rules(lanes.name)
            or lanes.is_finishing_old_lane(client_id, queue, key)
            or lanes.may_be_in_flight_at_former_member(lanes.lanes[key], queue)
        )
        if must_wait:
            return PullDecision(PullAction.WAIT)
        if key != lane_key:
            # As a pull for another lane, it may have skipped messages that the new lane wants.
            return PullDecision(PullAction.RETRY, offset=offset)
        return READ


def note_delivery(lane_queue: LaneQueue, offset: int, read_result: ReadResult) -> None:
    """Record the messages that a pull from `offset` delivers to the reader of a lane.

    `lane_queue` is the state of the lane in the queue, and `read_result` what was read. This sets
    `delivered_end`, if messages were found, and `read_end`.
    """
    if read_result.status is ReadStatus.FOUND:
        end_offset = find_end_offset(read_result.data)
        lane_queue.delivered_end = max(lane_queue.delivered_end, end_offset)
    lane_queue.read_end = max(read_result.next_offset, offset)


class Lanes:
    """The groups that have lanes, and their file `config/sluiceLanes.json`."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        wake: Callable[[str, int], None],
        offload: Offload,
    ) -> None:
        """Create an empty table. `load` reads the file.

        `wake(topic, queue_id)` is called to retry the parked pulls of a queue. `offload(job,
        on_done)` runs a blocking job in another thread.
        """
        self.table: dict[str, GroupLanes] = {}
        """By group name."""
        self.offsets = context.offsets

        self.storage = LaneStorage(context, wake=wake, offload=offload, render=self._render_file)
        self.document = self.storage.document

    def _render_file(self) -> str:
        """Return the JSON text of the file. If it is large, the next write of rules is delayed."""
        queue_count = 0
        group_objects = []
        for lanes in self.table.values():
            queue_count += sum(len(lane.queues) for lane in lanes.lanes.values())
            group_objects.append(encode_group(lanes))
        if queue_count > QUICK_WRITE_QUEUES_MAX:
            self.storage.delay_next_write()
        return orjson.dumps({"groups": group_objects}).decode()

    # -------------------------------------------------------------------------------- members

    def add_member(
        self, group: str, key: str, client_id: str, old_key: str, other_keys: dict[str, str]
    ) -> bool:
        """Add a member to the lane `key`, and remove it from the lane `old_key`.

        `key` is the subscription key of the member, and `old_key` the one before this heartbeat,
        "" if it had none. If the group has no lanes yet, they are created: `other_keys`, the
        subscription keys of the other members by client id, must not be empty then. The first of
        them becomes the key of the oldest lane, which gets all messages of the group that it wants.

        Return whether the member is new in the lane `key`.
        """
        lanes = self.table.get(group)
        if lanes is None:
            lanes = self._create_group_of_members(group, other_keys)
        is_new = key not in lanes.lanes or client_id not in lanes.lanes[key].members
        if is_new:
            lanes.add_member(key, client_id)
        if old_key and old_key != key:
            # The member has changed its subscription. After it was added: see `move_member`.
            lanes.move_member(old_key, client_id)
            lanes.process_idle_lanes()
        return is_new

    def _create_group_of_members(self, group: str, keys: dict[str, str]) -> GroupLanes:
        """Add a group, create the lanes of its members, and return the group.

        `keys` are the subscription keys of the members by client id. The first one is the key of
        the oldest lane, which has priority.
        """
        first_key = next(iter(keys.values()))
        lanes = self._create_group(group, first_key)
        for client_id, key in keys.items():
            lanes.add_member(key, client_id)
        return lanes

    def _create_group(self, group: str, key: str) -> GroupLanes:
        """Add a group with one lane, whose subscription key is `key`, and return the group.

        The lane has no members yet, and gets all messages of its subscription. It continues at the
        committed offsets of the group. In a queue without one, it begins at the join offset. All
        messages that the group has pulled and not committed count as in flight.
        """
        lanes = self.table[group] = GroupLanes(group, self.storage)
        lane = lanes.lanes[key] = Lane(key, lanes.allocate_join_number())
        for queue in self.storage.iter_queues(group, key):
            committed = self.offsets.committed(group, *queue)  # -1 if there is none
            start = committed
            if committed < 0:
                start = max(self.storage.get_join_offset(group, queue), 0)
            lanes.counted_offsets[queue] = start
            lane.queues[queue] = LaneQueue(
                committed_offset=committed,
                start_offset=start,
                spans=create_spans(start, compute_sole_rule(queue[0], key)),
                delivered_end=self.offsets.fetched(group, *queue),
            )
        self.storage.mark_changed()
        return lanes

    def get_lock_name(self, group: str, client_id: str) -> str:
        """Return the name under which a client locks queues.

        It is `GROUP@LANE_ID` for a member of a lane, because each lane has locks of its own,
        otherwise the group.
        """
        lanes = self.table.get(group)
        if lanes is not None:
            for lane in lanes.lanes.values():
                if client_id in lane.members:
                    return f"{group}@{lane.id}"
        return group

    def reset_queue(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Set the offsets of all lanes of a group, and of the group, in a queue to `offset`.

        The readers of all lanes are redirected. Return False, with nothing changed, if the group
        has no lanes.
        """
        lanes = self.table.get(group)
        if lanes is not None:
            lanes.reset_queue(topic, queue_id, offset)
            self.offsets.put(group, topic, queue_id, offset)
        return lanes is not None

    def forget_group(self, group: str) -> None:
        """Remove the lanes of a group, if it has any."""
        if self.table.pop(group, None) is not None:
            self.storage.mark_changed()

    def run_periodic_work(self) -> None:
        """Do what all groups with lanes need once a second.

        Rules that were not written because of `LaneStorage.delay_next_write` are written, and join
        offsets are advanced. In each group, idle lanes are processed and unmatched messages are
        counted. The lanes of a group end if it needs none any more.
        """
        self.storage.schedule_unsaved()
        self.storage.advance_join_offsets()
        for lanes in list(self.table.values()):
            lanes.process_idle_lanes()
            lanes.count_unmatched()
            if lanes.is_obsolete:
                log.info("group %s has one subscription again: its lanes end", lanes.name)
                self.forget_group(lanes.name)

    # ------------------------------------------------------------------------------ the file

    def load(self) -> None:
        """Load the lanes of all groups from the file. Raises StoreDamagedError if it is invalid.

        Committed offsets must have been loaded before. If this broker did not write the file last,
        it is ignored, and a warning is logged.
        """
        loaded_groups = self.document.load(self._parse_file) or {}
        if self.document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last (removed, an older copy, or from another"
                " store). The lanes in it end. Groups continue at their committed offsets, which"
                " are the lowest of their lanes, so messages may be repeated. No action is needed.",
                self.document.path,
            )
            loaded_groups = {}
            self.document.changed = True
        self.table.update(loaded_groups)

    def _parse_file(self, content: str) -> dict[str, GroupLanes]:
        """Parse the text of the file, and return the lanes of each group by the group's name.

        Raises ValueError if the text is invalid.
        """
        groups = {}
        try:
            for group_object in orjson.loads(content)["groups"]:
                name = str(group_object["group"])
                lanes = groups[name] = GroupLanes(name, self.storage)
                decode_group(lanes, group_object)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a lane has a missing or invalid field: {error}") from error
        return groups
