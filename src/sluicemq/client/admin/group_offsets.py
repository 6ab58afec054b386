"""Resetting the committed offsets of a group, and cloning those of another group.

Brokers reset a group themselves when they are asked (222), and consumers continue at the new
offsets. A RocketMQ broker that leaves the reset to its consumers answers with code 206 if none is
online; then the offsets are committed for the group (15), as mqadmin does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from sluicemq.client.admin.groups import create_group, expect_group, groups, progress
from sluicemq.client.admin.topics import (
    ask_each,
    committed_offset,
    masters,
    masters_of_topic,
    offset_by_time,
    offset_max,
    offset_min,
    queues,
)
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.names import check_group
from sluicemq.client.core.requests import GROUP_NOT_EXIST, SUCCESS, expect_success
from sluicemq.errors import ConfigurationError
from sluicemq.model.positions import check_position
from sluicemq.model.topic import RETRY_PREFIX, GroupConfig, MessageQueue
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode

EARLIEST_MS: Final = 0
"""As a time of a reset: the oldest message."""
LATEST_MS: Final = -1
"""As a time of a reset: behind the last message."""


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """The change of a group's committed offset in a queue, which contains [offset_min, offset_max).

    `old` is None if the group had no offset.
    """

    queue: MessageQueue
    old: int | None
    new: int
    offset_min: int
    offset_max: int

    @property
    def again(self) -> int:
        """The number of messages that will be delivered again."""
        if not self.old:
            return 0
        return max(0, self.old - max(self.new, self.offset_min))

    @property
    def skipped(self) -> int:
        """The number of stored messages that the group will never receive because of this change.

        It is 0 if the group goes back.
        """
        first_unread = self.offset_min
        if self.old is not None:
            first_unread = max(self.old, self.offset_min)
        return max(0, self.new - first_unread)


def _to_time_ms(time: datetime | int | str) -> int:
    """Return the time for a reset, in milliseconds since 1970.

    "first" becomes EARLIEST_MS and "last" LATEST_MS. LATEST_MS is returned unchanged. Raises
    ConfigurationError for what `check_position` refuses.
    """
    if isinstance(time, int) and time == LATEST_MS:
        return LATEST_MS
    position = check_position(time, "time_ms")
    if isinstance(position, int):
        return position
    return EARLIEST_MS if position == "first" else LATEST_MS


def plan_reset(
    directory: Directory, group: str, topic: str, time_ms: datetime | int | str
) -> Conversation[list[OffsetChange]]:
    """Return the changes that `reset_offsets` would make, one for each queue, without making them.

    `time_ms` is what `reset_offsets` accepts. Raises RouteNotFoundError if the topic does not
    exist, GroupNotFoundError if the group does not exist, ConfigurationError for another `time_ms`.
    """
    check_group(group)
    reset_ms = _to_time_ms(time_ms)
    yield from expect_group(directory, group)
    changes = []
    for queue in (yield from queues(directory, topic)):
        committed = yield from committed_offset(directory, group, queue)
        first_offset = yield from offset_min(directory, queue)
        end_offset = yield from offset_max(directory, queue)
        if reset_ms == LATEST_MS:
            new_offset = end_offset
        elif reset_ms == EARLIEST_MS:
            new_offset = first_offset
        else:
            new_offset = yield from offset_by_time(directory, queue, reset_ms)
        changes.append(OffsetChange(queue, committed, new_offset, first_offset, end_offset))
    return changes


def reset_offsets(
    directory: Directory, group: str, topic: str, time_ms: datetime | int | str
) -> Conversation[list[OffsetChange]]:
    """Set the offsets of a group to a time of a topic, and return the change of each queue.

    `time_ms` is "first" (or 0) for the oldest message, "last" (or -1) for the end, or a time: a
    datetime (local if it has no time zone), or milliseconds since 1970. Consumers of the group may
    run meanwhile: their broker moves them. If no consumer is online, the offsets are committed
    here.

    Raises RouteNotFoundError if the topic does not exist, GroupNotFoundError if the group does not
    exist, RequestError if a broker refuses, ConfigurationError for another `time_ms`.
    """
    reset_ms = _to_time_ms(time_ms)
    planned = yield from plan_reset(directory, group, topic, time_ms)
    changes = {change.queue: change for change in planned}
    masters_by_name = yield from masters_of_topic(directory, topic)
    for address in masters_by_name.values():
        command = requests.reset_offsets(group, topic, reset_ms)
        answer = yield Call(address, command)
        if answer.code == GROUP_NOT_EXIST:  # the group has never consumed at this broker
            config = yield from expect_group(directory, group)
            yield from directory.call(address, requests.update_group(config))
            answer = yield Call(address, command)
        if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
            continue
        new_offsets = bodies.decode_queue_offsets(expect_success(answer, address).body)
        for queue in new_offsets.keys() & changes.keys():
            changes[queue] = replace(changes[queue], new=new_offsets[queue])
    yield from _commit_where_needed(directory, group, changes)
    return [changes[queue] for queue in sorted(changes)]


def _commit_where_needed(
    directory: Directory, group: str, changes: Mapping[MessageQueue, OffsetChange]
) -> Conversation[None]:
    """Commit the new offset of each queue that does not have it yet, if no member is online.

    Members that are online commit their new offsets themselves.
    """
    for queue, change in changes.items():
        if (yield from committed_offset(directory, group, queue)) == change.new:
            continue
        masters_by_name = yield from masters_of_topic(directory, queue.topic)
        address = masters_by_name.get(queue.broker, "")
        answer = yield Call(address, requests.consumer_list(group=group))
        if answer.code != SUCCESS:
            yield from directory.call(queue, requests.commit_offset(group, queue, change.new))


def plan_clone(
    directory: Directory, source: str, target: str, topic: str | None = None
) -> Conversation[list[OffsetChange]]:
    """Return the changes that `clone_offsets` would make, one for each queue, without making them.

    Raises GroupNotFoundError if the source does not exist, ConfigurationError if it has no offsets
    or is the target.
    """
    check_group(target)
    if source == target:
        raise ConfigurationError(
            f"the group {source!r} cannot be cloned to itself.", fix="Use another target group."
        )
    yield from expect_group(directory, source)
    changes = []
    for queue_progress in (yield from progress(directory, source, topic)):
        queue = queue_progress.queue
        if queue.topic.startswith(RETRY_PREFIX):
            continue
        new_offset = yield from committed_offset(directory, source, queue)
        if new_offset is not None:
            old_offset = yield from committed_offset(directory, target, queue)
            first_offset = yield from offset_min(directory, queue)
            end_offset = queue_progress.offset_max
            changes.append(OffsetChange(queue, old_offset, new_offset, first_offset, end_offset))
    if not changes:
        in_topic = f" of topic {topic!r}" if topic else ""
        raise ConfigurationError(
            f"the group {source!r} has no offsets{in_topic}.",
            fix='See its offsets with "sluice group show".',
        )
    return changes


def clone_offsets(
    directory: Directory, source: str, target: str, topic: str | None = None
) -> Conversation[list[OffsetChange]]:
    """Copy the committed offsets of the group `source` to the group `target`.

    `topic` limits this to one topic; None means all topics. The target is created if it does not
    exist. Returns the change of each queue.

    Raises GroupNotFoundError if the source does not exist, ConfigurationError if it has no offsets
    or is the target, RequestError if a broker refuses.
    """
    planned = yield from plan_clone(directory, source, target, topic)
    broker_names = {change.queue.broker for change in planned}
    addresses = yield from masters(directory)
    brokers = {name: address for name, address in addresses.items() if name in broker_names}
    command = requests.clone_offsets(
        source_group=source, target_group=target, topic=topic, offline=False
    )
    yield from ask_each(brokers, command)
    if target not in (yield from groups(directory)):
        yield from create_group(directory, GroupConfig(target))
    changes = {change.queue: change for change in planned}
    yield from _commit_where_needed(directory, target, changes)
    return planned
