"""Where a group stands: reset it to a time, give it the offsets of another group.

A reset is asked of each broker with 222, which our broker (and RocketMQ 5 by default) does by
itself: whoever consumes goes on at the new place. A RocketMQ broker that leaves it to the consumers
answers 206 when none is online; then the offsets are committed for the group (15), as mqadmin does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import GROUP_NOT_EXIST, SUCCESS, expect_success
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.names import check_group
from sluicemq.client.core.operations.groups import create_group, expect_group, groups, progress
from sluicemq.client.core.operations.topics import (
    ask_each,
    committed_offset,
    masters,
    masters_of_topic,
    offset_by_time,
    offset_max,
    offset_min,
    queues,
)
from sluicemq.client.core.talks import Call, Talk
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import RETRY_PREFIX, GroupConfig, MessageQueue
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode

EARLIEST_MS: Final = 0
LATEST_MS: Final = -1
"""As a time: behind the last message."""


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """One queue of a group that goes to another place. `old` is None when it had no offset; the
    queue holds `offset_min` up to, not including, `offset_max`."""

    queue: MessageQueue
    old: int | None
    new: int
    offset_min: int
    offset_max: int

    @property
    def again(self) -> int:
        """Messages that come again."""
        return max(0, (self.old or 0) - max(self.new, self.offset_min)) if self.old else 0

    @property
    def skipped(self) -> int:
        """Messages that the group will not see."""
        begin = self.offset_min if self.old is None else max(self.old, self.offset_min)
        return max(0, self.new - begin)


def plan_reset(
    directory: Directory, group: str, topic: str, time_ms: int
) -> Talk[list[OffsetChange]]:
    """What `reset_offsets` would change; nothing is changed."""
    check_group(group)
    yield from expect_group(directory, group)
    found = []
    for queue in (yield from queues(directory, topic)):
        old = yield from committed_offset(directory, group, queue)
        first = yield from offset_min(directory, queue)
        end = yield from offset_max(directory, queue)
        if time_ms == LATEST_MS:
            new = end
        elif time_ms == EARLIEST_MS:
            new = first
        else:
            new = yield from offset_by_time(directory, queue, time_ms)
        found.append(OffsetChange(queue, old, new, first, end))
    return found


def reset_offsets(
    directory: Directory, group: str, topic: str, time_ms: int
) -> Talk[list[OffsetChange]]:
    """Sends a group to a time of a topic (ms since 1970; 0 the oldest message, -1 behind the
    last), also while it consumes. Raises RouteNotFoundError, GroupNotFoundError, RequestError.
    """
    planned = yield from plan_reset(directory, group, topic, time_ms)
    changes = {change.queue: change for change in planned}
    route = yield from directory.route(topic)
    for address in masters_of_topic(route).values():
        command = requests.reset_offsets(group, topic, time_ms)
        answer = yield Call(address, command)
        if answer.code == GROUP_NOT_EXIST:  # it has never consumed there
            config = yield from expect_group(directory, group)
            yield from directory.ask(address, requests.update_group(config))
            answer = yield Call(address, command)
        if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
            continue
        changed = bodies.decode_queue_offsets(expect_success(answer, address).body)
        for queue in changed.keys() & changes.keys():
            changes[queue] = replace(changes[queue], new=changed[queue])
    yield from _commit_where_needed(directory, group, changes)
    return [changes[queue] for queue in sorted(changes)]


def _commit_where_needed(
    directory: Directory, group: str, changes: Mapping[MessageQueue, OffsetChange]
) -> Talk[None]:
    """Where the brokers' own table does not say it yet, and nobody is there to do it."""
    for queue, change in changes.items():
        if (yield from committed_offset(directory, group, queue)) == change.new:
            continue
        route = yield from directory.route(queue.topic)
        address = masters_of_topic(route).get(queue.broker, "")
        answer = yield Call(address, requests.consumer_list(group=group))
        if answer.code != SUCCESS:
            yield from directory.ask(queue, requests.commit_offset(group, queue, change.new))


def plan_clone(
    directory: Directory, source: str, target: str, topic: str | None = None
) -> Talk[list[OffsetChange]]:
    """What `clone_offsets` would change; nothing is changed."""
    check_group(target)
    if source == target:
        raise ConfigurationError(
            f"the group {source!r} is to be cloned to itself.", cure="Name two groups."
        )
    yield from expect_group(directory, source)
    found = []
    for item in (yield from progress(directory, source, topic)):
        if item.queue.topic.startswith(RETRY_PREFIX):
            continue
        standing = yield from committed_offset(directory, source, item.queue)
        if standing is not None:
            old = yield from committed_offset(directory, target, item.queue)
            first = yield from offset_min(directory, item.queue)
            found.append(OffsetChange(item.queue, old, standing, first, item.offset_max))
    if not found:
        raise ConfigurationError(
            f"the group {source!r} has no offsets{f' of topic {topic!r}' if topic else ''}.",
            cure="See sluice group show.",
        )
    return found


def clone_offsets(
    directory: Directory, source: str, target: str, topic: str | None = None
) -> Talk[list[OffsetChange]]:
    """Gives the target the offsets of the source, of one topic or of all. Raises as
    `reset_offsets`."""
    planned = yield from plan_clone(directory, source, target, topic)
    known = yield from masters(directory)
    involved = {change.queue.broker for change in planned}
    brokers = {name: address for name, address in known.items() if name in involved}
    command = requests.clone_offsets(
        source_group=source, target_group=target, topic=topic, offline=False
    )
    yield from ask_each(brokers, command)
    if target not in (yield from groups(directory)):
        yield from create_group(directory, GroupConfig(target))
    yield from _commit_where_needed(directory, target, {one.queue: one for one in planned})
    return planned
