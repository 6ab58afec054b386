"""Conversations about where a group stands and what its members do: reset, skip, clone, look in.

A reset is asked of each broker with 222, which our broker (and RocketMQ 5 by default) does by
itself: whoever consumes goes on at the new place. A RocketMQ broker that leaves it to the consumers
answers 206 when none is online; then the offsets are committed for the group (15), as mqadmin does.
What was planned before is shown beside what the brokers say.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import (
    GROUP_NOT_EXIST,
    SUCCESS,
    SYSTEM_ERROR,
    expect_success,
    request_error,
)
from sluicemq.client.core.names import check_group
from sluicemq.client.core.operations.messages import message_by_id
from sluicemq.client.core.operations.topics import (
    Ask,
    RouteOf,
    Talk,
    committed_offset,
    create_group,
    groups,
    masters,
    offset_by_time,
    offset_max,
    offset_min,
    progress,
    queues,
)
from sluicemq.errors import ConfigurationError, GroupNotFoundError
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import (
    MASTER_ID,
    RETRY_PREFIX,
    GroupConfig,
    MessageQueue,
    TopicRoute,
)
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


@dataclass(frozen=True, slots=True)
class ConsumerClient:
    """A consumer that is online, and the broker that knows it."""

    client_id: str
    address: str
    language: str
    version: int
    broker_address: str
    consume_type: str
    message_model: str


# ------------------------------------------------------------------------------ reset and skip


def plan_reset(group: str, topic: str, time_ms: int) -> Talk[list[OffsetChange]]:
    """What a reset would change: EARLIEST_MS, LATEST_MS, or ms since 1970. Raises
    RouteNotFoundError, GroupNotFoundError."""
    check_group(group)
    yield from _expect_group(group)
    found = []
    for queue in (yield from queues(topic)):
        old = yield from committed_offset(group, queue)
        first = yield from offset_min(queue)
        end = yield from offset_max(queue)
        if time_ms == LATEST_MS:
            new = end
        elif time_ms == EARLIEST_MS:
            new = first
        else:
            new = yield from offset_by_time(queue, time_ms, upper=False)
        found.append(OffsetChange(queue, old, new, first, end))
    return found


def reset(group: str, topic: str, time_ms: int) -> Talk[list[OffsetChange]]:
    """Does it; the changes as the brokers have made them. Raises as `plan_reset`, RequestError."""
    planned = {change.queue: change for change in (yield from plan_reset(group, topic, time_ms))}
    for address in (yield from _masters_of_topic(topic)).values():
        command = requests.reset_offsets(group, topic, time_ms)
        answer = yield Ask(address, command, must_succeed=False)
        if answer.code == GROUP_NOT_EXIST:  # it has never consumed there
            config = (yield from groups())[group]
            yield Ask(address, requests.update_group(config))
            answer = yield Ask(address, command, must_succeed=False)
        if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
            continue
        made = bodies.decode_queue_offsets(expect_success(answer, address).body)
        for queue, offset in made.items():
            if queue in planned:
                planned[queue] = _at(planned[queue], offset)
    yield from _commit_where_needed(group, planned)
    return [planned[queue] for queue in sorted(planned)]


def _at(change: OffsetChange, offset: int) -> OffsetChange:
    return OffsetChange(change.queue, change.old, offset, change.offset_min, change.offset_max)


def _commit_where_needed(group: str, changes: Mapping[MessageQueue, OffsetChange]) -> Talk[None]:
    """Where the brokers' own table does not say it yet, and nobody is there to do it."""
    for queue, change in changes.items():
        if (yield from committed_offset(group, queue)) == change.new:
            continue
        route: TopicRoute = yield RouteOf(queue.topic)
        address = next(
            b.addresses.get(MASTER_ID, "") for b in route.brokers if b.broker == queue.broker
        )
        answer = yield Ask(address, requests.consumer_list(group), must_succeed=False)
        if answer.code != SUCCESS:
            yield Ask(queue, requests.commit_offset(group, queue, change.new))


def _masters_of_topic(topic: str) -> Talk[dict[str, str]]:
    route: TopicRoute = yield RouteOf(topic)
    return {
        data.broker: data.addresses[MASTER_ID]
        for data in route.brokers
        if MASTER_ID in data.addresses
    }


def _expect_group(group: str) -> Talk[None]:
    known = yield from groups()
    if group not in known:
        raise GroupNotFoundError(
            GROUP_NOT_EXIST,
            f"no broker knows the group {group!r}.",
            cure=f"They know: {', '.join(known) or 'none'}. `sluice group create` makes one.",
        )


# --------------------------------------------------------------------------------------- clone


def plan_clone(source: str, target: str, topic: str | None) -> Talk[list[OffsetChange]]:
    """What a clone would change in the target. Raises GroupNotFoundError, ConfigurationError."""
    check_group(target)
    if source == target:
        raise ConfigurationError(
            f"the group {source!r} is to be cloned to itself.", cure="Name two groups."
        )
    yield from _expect_group(source)
    found = []
    for item in (yield from progress(source, topic)):
        if item.queue.topic.startswith(RETRY_PREFIX):
            continue
        standing = yield from committed_offset(source, item.queue)
        if standing is None:
            continue
        old = yield from committed_offset(target, item.queue)
        first = yield from offset_min(item.queue)
        found.append(OffsetChange(item.queue, old, standing, first, item.offset_max))
    if not found:
        raise ConfigurationError(
            f"the group {source!r} has no offsets{f' of topic {topic!r}' if topic else ''}.",
            cure="See sluice group show.",
        )
    return found


def clone(source: str, target: str, topic: str | None) -> Talk[list[OffsetChange]]:
    """Does it. Raises as `plan_clone`, RequestError."""
    planned = yield from plan_clone(source, target, topic)
    for broker, address in (yield from masters()).items():
        if any(change.queue.broker == broker for change in planned):
            yield Ask(address, requests.clone_offsets(source, target, topic))
    if target not in (yield from groups()):
        yield from create_group(GroupConfig(target), None)
    yield from _commit_where_needed(target, {change.queue: change for change in planned})
    return planned


# ----------------------------------------------------------------------------- into consumers


def consumers(group: str) -> Talk[list[ConsumerClient]]:
    """The members that are online, each with one broker that knows it."""
    found: dict[str, ConsumerClient] = {}
    for address in (yield from masters()).values():
        answer = yield Ask(address, requests.consumer_connections(group), must_succeed=False)
        if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
            continue
        value = bodies.decode_consumer_connections(expect_success(answer, address).body)
        for one in value.connections:
            client = ConsumerClient(
                one.client_id, one.address, one.language, one.version, address,
                value.consume_type, value.message_model,
            )  # fmt: skip
            found.setdefault(one.client_id, client)
    if not found:
        yield from _expect_group(group)
    return [found[client_id] for client_id in sorted(found)]


def running_info(group: str, client_id: str, *, stack: bool) -> Talk[bodies.RunningInfo]:
    """What a consumer is and does. Raises ConfigurationError when it is not online, RequestError
    when it does not answer."""
    client = yield from _client(group, client_id)
    command = requests.running_info(group, client_id, stack=stack)
    answer = yield Ask(client.broker_address, command)
    return bodies.decode_running_info(answer.body)


def _client(group: str, client_id: str) -> Talk[ConsumerClient]:
    online = yield from consumers(group)
    for client in online:
        if client.client_id == client_id:
            return client
    names = ", ".join(client.client_id for client in online)
    raise ConfigurationError(
        f"no consumer {client_id!r} of the group {group!r} is online.",
        cure=f"Online: {names or 'none'}.",
    )


def consume_directly(
    message_id: str, group: str, client_id: str | None, topic: str | None
) -> Talk[tuple[StoredMessage, bodies.DirectResult]]:
    """Lets a consumer handle a stored message now, and tells how that went. None: any member.
    Raises MessageNotFoundError, ConfigurationError, RequestError."""
    message = yield from message_by_id(message_id, topic)
    if client_id is None:
        online = yield from consumers(group)
        if not online:
            raise ConfigurationError(
                f"no consumer of the group {group!r} is online.", cure="Start one."
            )
        client_id = online[0].client_id
    yield from _client(group, client_id)
    address = yield from _master_by_store(message)
    command = requests.consume_directly(group, client_id, message.offset_message_id, message.topic)
    answer = yield Ask(address, command, must_succeed=False)
    if answer.code == SYSTEM_ERROR and "not online" in (answer.remark or ""):
        raise ConfigurationError(
            f"the broker at {address}, which has the message, does not know the consumer "
            f"{client_id!r}.",
            cure="It reads from another broker: choose another client.",
        )
    if answer.code != SUCCESS:
        raise request_error(answer, address)
    return message, bodies.decode_direct_result(answer.body)


def _master_by_store(message: StoredMessage) -> Talk[str]:
    """The broker that has it: by its name, or by the address that stored it."""
    known = yield from masters()
    if message.broker in known:
        return known[message.broker]
    host = str(message.store_host)
    return next((address for address in known.values() if address == host), host)
