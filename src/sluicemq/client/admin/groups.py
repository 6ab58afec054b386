"""Operations on consumer groups: settings, contract, members, progress and lag.

A SluiceMQ broker counts how many messages match the filters of a group (900131). A RocketMQ broker
does not know it: its lag includes messages that the filters will drop.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from sluicemq.client.admin.messages import message_by_id
from sluicemq.client.admin.topics import (
    ask_each,
    ask_masters,
    masters,
)
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.names import check_group
from sluicemq.client.core.requests import (
    GROUP_NOT_EXIST,
    SUCCESS,
    SYSTEM_ERROR,
    TOPIC_NOT_EXIST,
    request_error,
)
from sluicemq.errors import ConfigurationError, GroupNotFoundError
from sluicemq.hints import suggest
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import (
    CONTRACT,
    CONTRACTS,
    GroupConfig,
    MessageQueue,
)
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode

NOTHING_THERE: Final = frozenset({SYSTEM_ERROR, GROUP_NOT_EXIST, TOPIC_NOT_EXIST})
"""The response codes of a broker that does not know the group, or has nothing of it."""


# -------------------------------------------------------------------------------- settings


def groups(directory: Directory) -> Conversation[dict[str, GroupConfig]]:
    """Return group name -> settings of every consumer group that any master knows."""
    found: dict[str, GroupConfig] = {}
    for _, _, answer in (yield from ask_masters(directory, requests.all_groups())):
        found |= tables.decode_group_table(answer.body).groups
    return dict(sorted(found.items()))


def create_group(
    directory: Directory, config: GroupConfig, *, cluster: str | None = None
) -> Conversation[list[str]]:
    """Create or change a consumer group on every master, or on those of one cluster.

    Return the broker names.
    """
    check_group(config.name)
    found = yield from masters(directory, cluster)
    yield from ask_each(found, requests.update_group(config))
    return sorted(found)


def expect_group(directory: Directory, name: str) -> Conversation[GroupConfig]:
    """Return the settings of a group. Raises GroupNotFoundError if no broker knows it."""
    known = yield from groups(directory)
    if name not in known:
        raise GroupNotFoundError(
            GROUP_NOT_EXIST,
            f"no broker knows the group {name!r}.",
            fix=f"{suggest(name, known)} `sluice group create` makes one.",
        )
    return known[name]


def unknown_group(name: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for a question about a group that no broker knows.

    `known` are the names of the existing groups; the error suggests a similar one.
    """
    return ConfigurationError(
        f"no broker knows the group {name!r}.",
        fix=suggest(name, known),
    )


@dataclass(frozen=True, slots=True)
class GroupContract:
    """The contract of a group at one broker, and its effects.

    `lanes` from the oldest on and `forgotten`, the subscriptions without members that the broker no
    longer remembers, have the fields of the response (900133). `refused` contains, by client id,
    why the broker refused a member. `unmatched` is the number of messages that no lane matches.
    `pops` contains, by topic, the (kind, expression) with which the group pops it.
    """

    broker: str
    contract: str
    lanes: tuple[dict[str, Any], ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    unmatched: int = 0
    forgotten: tuple[dict[str, Any], ...] = ()
    pops: dict[str, tuple[str, str]] = field(default_factory=dict)


def contract(directory: Directory, group: str) -> Conversation[list[GroupContract]]:
    """Return the contract of a group with its lanes and refused members, by broker.

    RocketMQ brokers do not have contracts and are left out.
    """
    absent = {GROUP_NOT_EXIST, ResponseCode.REQUEST_CODE_NOT_SUPPORTED}
    answers = yield from ask_masters(directory, requests.group_lanes(group=group), absent=absent)
    found = []
    for broker, _, answer in answers:
        known = orjson.loads(bytes(answer.body))
        found.append(
            GroupContract(
                broker,
                known["contract"],
                lanes=tuple(known["lanes"]),
                refused=known["refused"],
                unmatched=known["unmatched"],
                forgotten=tuple(known.get("forgotten", ())),
                pops={topic: (kind, text) for topic, kind, text in known.get("pops", ())},
            )
        )
    return found


def change_contract(directory: Directory, group: str, contract: str) -> Conversation[list[str]]:
    """Set the contract of a group: compatible, strict or lanes.

    Return the brokers that know the group.

    Raises ConfigurationError for another contract and for an unknown group, RequestError if a
    broker refuses.
    """
    if contract not in CONTRACTS:
        raise ConfigurationError(
            f"{contract!r} is not a contract.", fix=f"Use one of {', '.join(CONTRACTS)}."
        )
    found = []
    for broker, address, answer in (yield from ask_masters(directory, requests.all_groups())):
        config = tables.decode_group_table(answer.body).groups.get(group)
        if config is not None:
            changed = replace(config, attributes={f"+{CONTRACT}": contract})
            yield from directory.call(address, requests.update_group(changed))
            found.append(broker)
    if not found:
        raise ConfigurationError(
            f"no broker knows the group {group!r}.",
            fix=f'Create it with "sluice group create {group}".',
        )
    return sorted(found)


# -------------------------------------------------------------------- members and progress


def members(directory: Directory, group: str) -> Conversation[list[str]]:
    """Return the client ids of the members that are online at any master, sorted.

    The result is empty if no broker knows the group, or if it has no members.
    """
    command = requests.consumer_list(group=group)
    found: set[str] = set()
    for _, _, answer in (yield from ask_masters(directory, command, absent={SYSTEM_ERROR})):
        found.update(bodies.decode_consumer_list(answer.body))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """The progress of a group in one queue.

    `committed` is the committed offset, `offset_max` the offset of the next message. `last_time_ms`
    is the time of the last consumed message, 0 if it is unknown. `fetched` is the offset up to
    which members have fetched, None if the broker does not report it. `messages_at_risk` of the
    unread messages will be deleted next, from `loss_time_ms` on; both are 0 if none will, or if the
    broker does not report it.

    Of a group that pops, `in_flight` is the number of popped messages that are not acknowledged.
    `extra` is added to the messages from `committed` on to get the lag. It is negative if messages
    that are popped in order were acknowledged behind `committed`.
    """

    queue: MessageQueue
    committed: int
    offset_max: int
    last_time_ms: int = 0
    messages_at_risk: int = 0
    loss_time_ms: int = 0
    fetched: int | None = None
    in_flight: int = 0
    extra: int = 0

    @property
    def lag(self) -> int:
        """The number of messages that are not committed, or that are popped and not acknowledged.

        Messages that the filter drops count until the group has passed them.
        """
        return max(0, self.offset_max - self.committed + self.extra)

    @property
    def beyond_end(self) -> int:
        """How far the committed offset is beyond the end of the queue, usually 0.

        It is positive after the topic was deleted and created again, or after the broker lost
        messages.
        """
        return max(0, self.committed - self.offset_max)


def progress(
    directory: Directory, group: str, topic: str | None = None
) -> Conversation[list[QueueProgress]]:
    """Return the progress of a group in each queue for which it has an offset, sorted by queue."""
    return (yield from progress_at((yield from masters(directory)), group, topic))


def progress_at(
    brokers: Mapping[str, str],
    group: str,
    topic: str | None = None,
    *,
    absent: Collection[int] | None = NOTHING_THERE,
) -> Conversation[list[QueueProgress]]:
    """Return the progress of a group at some brokers, given as name -> address.

    `absent` is that of `ask_each`.
    """
    command = requests.consume_stats(group=group, topic=topic)
    found: dict[MessageQueue, QueueProgress] = {}
    for _, _, answer in (yield from ask_each(brokers, command, absent=absent)):
        for queue, item in bodies.decode_consume_stats(answer.body).queues.items():
            found[queue] = QueueProgress(
                queue,
                item.consumer_offset,
                item.broker_offset,
                last_time_ms=item.last_time_ms,
                messages_at_risk=item.messages_at_risk,
                loss_time_ms=item.loss_time_ms,
                fetched=item.pull_offset or None,
                in_flight=item.in_flight,
                extra=item.extra,
            )
    return [found[queue] for queue in sorted(found)]


# -------------------------------------------------------------------------------------- lag


@dataclass(frozen=True, slots=True)
class TopicMatching:
    """What the filters of a group count at one broker, by topic."""

    broker: str
    topics: tuple[bodies.GroupMatching, ...]


def matching(
    directory: Directory, group: str, topic: str | None = None
) -> Conversation[list[TopicMatching]]:
    """Return what the filters of a group have matched, dropped and failed on, by broker.

    The result also says how many messages of the lag match, exactly. RocketMQ brokers do not know
    it and are left out.
    """
    command = requests.filtered_lag(group=group, topic=topic)
    absent = {GROUP_NOT_EXIST, TOPIC_NOT_EXIST, ResponseCode.REQUEST_CODE_NOT_SUPPORTED}
    answers = yield from ask_masters(directory, command, absent=absent)
    return [
        TopicMatching(broker, tuple(bodies.decode_group_matching(answer.body)))
        for broker, _, answer in answers
    ]


@dataclass(frozen=True, slots=True)
class LaneLag:
    """The lag of one lane of a group in one queue.

    `matching` messages from the lane's own committed offset on belong to the lane, None if the
    number is unknown.
    """

    lane: str
    expression: str
    committed: int
    offset_max: int
    matching: int | None


@dataclass(frozen=True, slots=True)
class QueueLag:
    """The lag of a group in one queue, which contains the offsets [offset_min, offset_max).

    `messages_at_risk` of the unread messages will be deleted next, from `loss_time_ms` on; both are
    0 if none will, or if a RocketMQ broker does not report it. `matching` messages of the lag match
    the group's filter, exactly; None if the number is unknown: on a RocketMQ broker, or for a group
    without members that subscribed by tags. `eta_ms` is the time until the lag is 0 at the present
    rate, None if it is unknown or never. `in_flight` and `extra` are those of `QueueProgress`;
    `matching` includes them.
    """

    group: str
    queue: MessageQueue
    committed: int
    offset_min: int
    offset_max: int
    messages_at_risk: int = 0
    loss_time_ms: int = 0
    matching: int | None = None
    eta_ms: int | None = None
    lanes: tuple[LaneLag, ...] = ()
    """The lanes of a group whose members have different subscriptions.

    `committed` is then the lowest of their offsets, and `matching` the sum.
    """
    in_flight: int = 0
    extra: int = 0

    @property
    def lag(self) -> int:
        """The number of stored messages that are not committed, or popped and not acknowledged.

        Messages that the filter drops count until the group has passed them.
        """
        return max(0, self.offset_max - max(self.committed, self.offset_min) + self.extra)

    @property
    def lost(self) -> int:
        """The number of messages that were deleted before the group committed them.

        It is 0 for a group that has committed nothing, because such a group may start anywhere.
        """
        return max(0, self.offset_min - self.committed) if self.committed > 0 else 0

    @property
    def beyond_end(self) -> int:
        """How far the committed offset is beyond the end of the queue."""
        return max(0, self.committed - self.offset_max)


def lag(directory: Directory, group: str | None = None) -> Conversation[list[QueueLag]]:
    """Return the lag of a group, or of every group if `group` is None, in each queue.

    The result includes how many messages will be deleted next, and how many match the group's
    filter. Raises ConfigurationError if no broker knows the group.
    """
    names = list((yield from groups(directory))) if group is None else [group]
    brokers = yield from masters(directory)
    first_offsets: dict[str, dict[MessageQueue, int]] = {}
    found: list[QueueLag] = []
    for name in names:
        reached = yield from progress_at(brokers, name)
        counted = {
            (item.broker, of_topic.topic, of_queue.queue_id): (of_topic, of_queue)
            for item in ((yield from matching(directory, name)) if reached else ())
            for of_topic in item.topics
            for of_queue in of_topic.queues
        }
        for item in reached:
            topic, broker, queue_id = item.queue
            counts = counted.get((broker, topic, queue_id))
            if counts is not None:
                found.append(_counted_lag(name, item, *counts))
                continue
            if topic not in first_offsets:
                first_offsets[topic] = yield from _first_offsets(brokers, topic)
            found.append(
                QueueLag(
                    name,
                    item.queue,
                    item.committed,
                    first_offsets[topic].get(item.queue, 0),
                    item.offset_max,
                    messages_at_risk=item.messages_at_risk,
                    loss_time_ms=item.loss_time_ms,
                    in_flight=item.in_flight,
                    extra=item.extra,
                )
            )
    if group is not None and not found:
        known_groups = yield from groups(directory)
        if group not in known_groups:
            raise unknown_group(group, known_groups)
    return found


def _counted_lag(
    group: str,
    progress: QueueProgress,
    of_topic: bodies.GroupMatching,
    of_queue: bodies.QueueMatching,
) -> QueueLag:
    """Return the lag in a queue that a SluiceMQ broker has counted.

    The offsets and the counts of the result are of the same moment.
    """
    queue_id = progress.queue.queue_id
    lanes = tuple(
        LaneLag(lane.lane, lane.expression, one.committed, one.offset_max, one.matching)
        for lane in of_topic.lanes
        for one in lane.queues
        if one.queue_id == queue_id
    )
    return QueueLag(
        group,
        progress.queue,
        max(of_queue.committed, 0),
        of_queue.offset_min,
        of_queue.offset_max,
        messages_at_risk=progress.messages_at_risk,
        loss_time_ms=progress.loss_time_ms,
        matching=of_queue.matching,
        eta_ms=of_queue.eta_ms,
        lanes=lanes,
        in_flight=of_queue.in_flight,
        extra=of_queue.extra,
    )


def _first_offsets(brokers: Mapping[str, str], topic: str) -> Conversation[dict[MessageQueue, int]]:
    """Return queue -> first stored offset of a topic at some brokers, given as name -> address."""
    command = requests.topic_stats(topic=topic)
    found: dict[MessageQueue, int] = {}
    for _, _, answer in (yield from ask_each(brokers, command, absent=NOTHING_THERE)):
        for queue, stats in bodies.decode_topic_stats(answer.body).queues.items():
            found[queue] = stats.offset_min
    return found


def popped(
    brokers: Mapping[str, str],
    group: str,
    topic: str | None = None,
    queue_id: int | None = None,
    offset: int | None = None,
) -> Conversation[list[bodies.InFlightMessage]]:
    """Return the messages that a group has popped and not acknowledged at some brokers.

    `brokers` are given as name -> address. `topic`, `queue_id` and `offset` select messages; None
    means all. RocketMQ brokers do not report it.
    """
    command = requests.in_flight(group=group, topic=topic, queue_id=queue_id, offset=offset)
    answers = yield from ask_each(brokers, command, absent=None)
    return [one for _, _, answer in answers for one in bodies.decode_in_flight(answer.body)]


# ------------------------------------------------------------------------------- consumers


@dataclass(frozen=True, slots=True)
class ConsumerClient:
    """A consumer that is online, and the address of a broker that knows it."""

    client_id: str
    address: str
    language: str
    version: int
    broker_address: str
    consume_type: str
    message_model: str


def consumers(directory: Directory, group: str) -> Conversation[list[ConsumerClient]]:
    """Return the members of a group that are online, sorted by client id.

    Raises GroupNotFoundError if no member is online and no broker knows the group.
    """
    command = requests.consumer_connections(group=group)
    absent = {ResponseCode.CONSUMER_NOT_ONLINE}
    found: dict[str, ConsumerClient] = {}
    for _, address, answer in (yield from ask_masters(directory, command, absent=absent)):
        value = bodies.decode_consumer_connections(answer.body)
        for one in value.connections:
            client = ConsumerClient(
                one.client_id,
                one.address,
                one.language,
                one.version,
                broker_address=address,
                consume_type=value.consume_type,
                message_model=value.message_model,
            )
            found.setdefault(one.client_id, client)
    if not found:
        yield from expect_group(directory, group)
    return [found[client_id] for client_id in sorted(found)]


def _consumer(
    directory: Directory, group: str, client_id: str | None
) -> Conversation[ConsumerClient]:
    """Return a member of a group that is online, any one if `client_id` is None.

    Raises ConfigurationError if it is not online.
    """
    online = yield from consumers(directory, group)
    for client in online:
        if client_id in (None, client.client_id):
            return client
    if client_id is None:
        raise ConfigurationError(
            f"no consumer of the group {group!r} is online.", fix="Start a consumer."
        )
    names = ", ".join(client.client_id for client in online)
    raise ConfigurationError(
        f"no consumer {client_id!r} of the group {group!r} is online.",
        fix=f"Use one that is online: {names or 'none'}.",
    )


def running_info(
    directory: Directory, group: str, client_id: str, *, stack: bool = False
) -> Conversation[bodies.RunningInfo]:
    """Return what a consumer reports about itself, with its threads' stacks if `stack` is set.

    Raises ConfigurationError if the consumer is not online, RequestError if it does not answer.
    """
    client = yield from _consumer(directory, group, client_id)
    command = requests.running_info(group=group, client_id=client_id, stack_enable=stack)
    answer = yield from directory.call(client.broker_address, command)
    return bodies.decode_running_info(answer.body)


def consume_directly(
    directory: Directory,
    message_id: str,
    group: str,
    client_id: str | None = None,
    *,
    topic: str | None = None,
) -> Conversation[tuple[StoredMessage, bodies.DirectResult]]:
    """Let a consumer process a stored message now. Committed offsets do not change.

    `client_id` selects the consumer; None means any member of the group. `topic` is that of
    `message_by_id`. Returns (message, result of the handler). Raises MessageNotFoundError,
    ConfigurationError if the consumer is not online at the message's broker, and RequestError.
    """
    message = yield from message_by_id(directory, message_id, topic=topic)
    client = yield from _consumer(directory, group, client_id)
    known = yield from masters(directory)
    address = known.get(message.broker, str(message.store_host))
    command = requests.consume_directly(
        group=group,
        client_id=client.client_id,
        message_id=message.offset_message_id,
        topic=message.topic,
    )
    answer = yield Call(address, command)
    if answer.code == SYSTEM_ERROR and "not online" in (answer.remark or ""):
        raise ConfigurationError(
            f"the broker at {address}, which has the message, does not know the consumer "
            f"{client.client_id!r}.",
            fix="Choose another consumer: this one reads from other brokers.",
        )
    if answer.code != SUCCESS:
        raise request_error(answer, address)
    return message, bodies.decode_direct_result(answer.body)
