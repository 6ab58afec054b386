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
from sluicemq.model.system_names import is_system_group
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
    """Return group name -> settings, for each consumer group that a master knows, sorted."""
    configs: dict[str, GroupConfig] = {}
    for _, _, answer in (yield from ask_masters(directory, requests.all_groups())):
        configs |= tables.decode_group_table(answer.body).groups
    return dict(sorted(configs.items()))


def create_group(
    directory: Directory, config: GroupConfig, *, cluster: str | None = None
) -> Conversation[list[str]]:
    """Create a consumer group or change its settings, and return the names of the brokers, sorted.

    `cluster` limits this to the masters of one cluster; None means every master. Raises
    ConfigurationError for an invalid name or an unknown cluster.
    """
    check_group(config.name)
    brokers = yield from masters(directory, cluster)
    yield from ask_each(brokers, requests.update_group(config))
    return sorted(brokers)


def expect_group(directory: Directory, name: str) -> Conversation[GroupConfig]:
    """Return the settings of a group. Raises GroupNotFoundError if no broker knows it."""
    known_groups = yield from groups(directory)
    if name not in known_groups:
        raise GroupNotFoundError(
            GROUP_NOT_EXIST,
            f"no broker knows the group {name!r}.",
            fix=f"{_suggest_group(name, known_groups)} `sluice group create` makes one.",
        )
    return known_groups[name]


def _suggest_group(name: str, known_names: Iterable[str]) -> str:
    """Return a sentence with the group whose name is like `name`, or with all groups.

    Groups that RocketMQ or SluiceMQ creates for itself are left out.
    """
    return suggest(name, [known for known in known_names if not is_system_group(known)])


def unknown_group(name: str, known_names: Iterable[str]) -> ConfigurationError:
    """Return the error for a question about a group that no broker knows.

    `known_names` are the names of the existing groups; the error suggests a similar one.
    """
    return ConfigurationError(
        f"no broker knows the group {name!r}.",
        fix=_suggest_group(name, known_names),
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
    """Return the contract of a group at each broker, with the lanes and the refused members.

    The contract says what happens if members have different filters: "compatible", "strict" or
    "lanes". RocketMQ brokers do not have contracts and are left out, as are brokers that do not
    know the group.
    """
    ignored_codes = {GROUP_NOT_EXIST, ResponseCode.REQUEST_CODE_NOT_SUPPORTED}
    answers = yield from ask_masters(
        directory, requests.group_lanes(group=group), ignored_codes=ignored_codes
    )
    contracts = []
    for broker, _, answer in answers:
        report = orjson.loads(bytes(answer.body))
        contracts.append(
            GroupContract(
                broker,
                report["contract"],
                lanes=tuple(report["lanes"]),
                refused=report["refused"],
                unmatched=report["unmatched"],
                forgotten=tuple(report.get("forgotten", ())),
                pops={
                    topic: (expression_kind, expression)
                    for topic, expression_kind, expression in report.get("pops", ())
                },
            )
        )
    return contracts


def change_contract(directory: Directory, group: str, contract: str) -> Conversation[list[str]]:
    """Set the contract of a group at every master that knows it, and return these brokers' names.

    The contract says what brokers do if members have different filters. It is "compatible",
    "strict" or "lanes".

    Raises ConfigurationError for another contract and for an unknown group, RequestError if a
    broker refuses.
    """
    if contract not in CONTRACTS:
        raise ConfigurationError(
            f"{contract!r} is not a contract.", fix=f"Use one of {', '.join(CONTRACTS)}."
        )
    changed_brokers = []
    for broker, address, answer in (yield from ask_masters(directory, requests.all_groups())):
        config = tables.decode_group_table(answer.body).groups.get(group)
        if config is not None:
            changed = replace(config, attributes={f"+{CONTRACT}": contract})
            yield from directory.call(address, requests.update_group(changed))
            changed_brokers.append(broker)
    if not changed_brokers:
        raise ConfigurationError(
            f"no broker knows the group {group!r}.",
            fix=f'Create it with "sluice group create {group}".',
        )
    return sorted(changed_brokers)


# -------------------------------------------------------------------- members and progress


def members(directory: Directory, group: str) -> Conversation[list[str]]:
    """Return the client ids of the members that are online at any master, sorted.

    The result is empty if no broker knows the group, or if it has no members.
    """
    command = requests.consumer_list(group=group)
    client_ids: set[str] = set()
    for _, _, answer in (yield from ask_masters(directory, command, ignored_codes={SYSTEM_ERROR})):
        client_ids.update(bodies.decode_consumer_list(answer.body))
    return sorted(client_ids)


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
    ignored_codes: Collection[int] | None = NOTHING_THERE,
) -> Conversation[list[QueueProgress]]:
    """Return the progress of a group in each queue of some brokers, sorted by queue.

    `brokers` maps names to addresses. `topic` limits the result to one topic; None means all.
    Brokers that answer with a code in `ignored_codes` know nothing of the group and are left out;
    None means any code.
    """
    command = requests.consume_stats(group=group, topic=topic)
    progress_by_queue: dict[MessageQueue, QueueProgress] = {}
    for _, _, answer in (yield from ask_each(brokers, command, ignored_codes=ignored_codes)):
        for queue, queue_stats in bodies.decode_consume_stats(answer.body).queues.items():
            progress_by_queue[queue] = QueueProgress(
                queue,
                queue_stats.consumer_offset,
                queue_stats.broker_offset,
                last_time_ms=queue_stats.last_time_ms,
                messages_at_risk=queue_stats.messages_at_risk,
                loss_time_ms=queue_stats.loss_time_ms,
                fetched=queue_stats.pull_offset or None,
                in_flight=queue_stats.in_flight,
                extra=queue_stats.extra,
            )
    return [progress_by_queue[queue] for queue in sorted(progress_by_queue)]


# -------------------------------------------------------------------------------------- lag


@dataclass(frozen=True, slots=True)
class TopicMatching:
    """What the filters of a group count at one broker, by topic."""

    broker: str
    topics: tuple[bodies.GroupMatching, ...]


def matching(
    directory: Directory, group: str, topic: str | None = None
) -> Conversation[list[TopicMatching]]:
    """Return what the filters of a group have matched, dropped and failed on, for each broker.

    The result also has the exact number of messages in the lag that match the filters. `topic`
    limits it to one topic; None means all. RocketMQ brokers do not count this and are left out.
    """
    command = requests.filtered_lag(group=group, topic=topic)
    ignored_codes = {GROUP_NOT_EXIST, TOPIC_NOT_EXIST, ResponseCode.REQUEST_CODE_NOT_SUPPORTED}
    answers = yield from ask_masters(directory, command, ignored_codes=ignored_codes)
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
        if self.committed <= 0:
            return 0
        return max(0, self.offset_min - self.committed)

    @property
    def beyond_end(self) -> int:
        """How far the committed offset is beyond the end of the queue."""
        return max(0, self.committed - self.offset_max)


def lag(directory: Directory, group: str | None = None) -> Conversation[list[QueueLag]]:
    """Return the lag of a group in each queue, or of every group if `group` is None.

    The result includes how many unread messages will be deleted next, and how many match the filter
    of the group. It is empty for a group that exists and has no offsets. Raises ConfigurationError
    if no broker knows the group.
    """
    names: Iterable[str] = [group] if group is not None else (yield from groups(directory))
    brokers = yield from masters(directory)
    first_offsets_by_topic: dict[str, dict[MessageQueue, int]] = {}
    lags: list[QueueLag] = []
    for name in names:
        lags += yield from _find_lag_of_group(directory, name, brokers, first_offsets_by_topic)
    if group is not None and not lags:
        known_groups = yield from groups(directory)
        if group not in known_groups:
            raise unknown_group(group, known_groups)
    return lags


_CountsByQueue = dict[MessageQueue, tuple[bodies.GroupMatching, bodies.QueueMatching]]


def _find_lag_of_group(
    directory: Directory,
    group: str,
    brokers: Mapping[str, str],
    first_offsets_by_topic: dict[str, dict[MessageQueue, int]],
) -> Conversation[list[QueueLag]]:
    """Return the lag of a group in each queue for which it has an offset.

    `brokers` maps names to addresses. `first_offsets_by_topic` caches the first offset of each
    queue by topic. The function adds the topics that it requests.
    """
    progress_of_queues = yield from progress_at(brokers, group)
    counts_by_queue: _CountsByQueue = {}
    if progress_of_queues:
        counts_by_queue = yield from _fetch_counts(directory, group)
    lags = []
    for queue_progress in progress_of_queues:
        queue = queue_progress.queue
        if queue in counts_by_queue:
            lags.append(_make_counted_lag(group, queue_progress, *counts_by_queue[queue]))
            continue
        if queue.topic not in first_offsets_by_topic:
            first_offsets = yield from _fetch_first_offsets(brokers, queue.topic)
            first_offsets_by_topic[queue.topic] = first_offsets
        first_offset = first_offsets_by_topic[queue.topic].get(queue, 0)
        lags.append(_make_uncounted_lag(group, queue_progress, first_offset))
    return lags


def _fetch_counts(directory: Directory, group: str) -> Conversation[_CountsByQueue]:
    """Return queue -> (counts of its topic, counts of the queue) that brokers keep for a group.

    Queues of RocketMQ brokers are left out.
    """
    counts_by_queue = {}
    for broker_counts in (yield from matching(directory, group)):
        for topic_counts in broker_counts.topics:
            for queue_counts in topic_counts.queues:
                queue = MessageQueue(
                    topic_counts.topic, broker_counts.broker, queue_counts.queue_id
                )
                counts_by_queue[queue] = topic_counts, queue_counts
    return counts_by_queue


def _make_uncounted_lag(group: str, progress: QueueProgress, first_offset: int) -> QueueLag:
    """Return the lag of a group in a queue whose broker does not count matching messages.

    `progress` has the offsets of the group, and `first_offset` is the lowest offset of the queue.
    The number of matching messages stays None.
    """
    return QueueLag(
        group,
        progress.queue,
        progress.committed,
        first_offset,
        progress.offset_max,
        messages_at_risk=progress.messages_at_risk,
        loss_time_ms=progress.loss_time_ms,
        in_flight=progress.in_flight,
        extra=progress.extra,
    )


def _make_counted_lag(
    group: str,
    progress: QueueProgress,
    topic_counts: bodies.GroupMatching,
    queue_counts: bodies.QueueMatching,
) -> QueueLag:
    """Return the lag in a queue from the counts of its SluiceMQ broker.

    `topic_counts` are those of the whole topic, which include the lanes, and `queue_counts` those
    of the queue. The broker took all offsets and counts of the result at the same moment. A missing
    committed offset, which is negative, becomes 0.
    """
    queue_id = progress.queue.queue_id
    lanes: list[LaneLag] = []
    for lane in topic_counts.lanes:
        lanes += [
            _make_lane_lag(lane, queue) for queue in lane.queues if queue.queue_id == queue_id
        ]
    return QueueLag(
        group,
        progress.queue,
        max(queue_counts.committed, 0),
        queue_counts.offset_min,
        queue_counts.offset_max,
        messages_at_risk=progress.messages_at_risk,
        loss_time_ms=progress.loss_time_ms,
        matching=queue_counts.matching,
        eta_ms=queue_counts.eta_ms,
        lanes=tuple(lanes),
        in_flight=queue_counts.in_flight,
        extra=queue_counts.extra,
    )


def _make_lane_lag(lane: bodies.LaneMatching, lane_queue: bodies.QueueMatching) -> LaneLag:
    """Return the lag of a lane (members with the same filter) in one of its queues."""
    return LaneLag(
        lane.lane,
        lane.expression,
        lane_queue.committed,
        lane_queue.offset_max,
        lane_queue.matching,
    )


def _fetch_first_offsets(
    brokers: Mapping[str, str], topic: str
) -> Conversation[dict[MessageQueue, int]]:
    """Return queue -> lowest stored offset, for the queues of a topic at some brokers.

    `brokers` maps names to addresses. Brokers that do not have the topic are left out.
    """
    command = requests.topic_stats(topic=topic)
    first_offsets: dict[MessageQueue, int] = {}
    for _, _, answer in (yield from ask_each(brokers, command, ignored_codes=NOTHING_THERE)):
        for queue, stats in bodies.decode_topic_stats(answer.body).queues.items():
            first_offsets[queue] = stats.offset_min
    return first_offsets


def popped(
    brokers: Mapping[str, str],
    group: str,
    topic: str | None = None,
    queue_id: int | None = None,
    offset: int | None = None,
) -> Conversation[list[bodies.InFlightMessage]]:
    """Return the messages that a group has popped from some brokers and not acknowledged yet.

    `brokers` maps names to addresses. `topic`, `queue_id` and `offset` select messages; None means
    all. RocketMQ brokers do not report such messages.
    """
    command = requests.in_flight(group=group, topic=topic, queue_id=queue_id, offset=offset)
    messages = []
    for _, _, answer in (yield from ask_each(brokers, command, ignored_codes=None)):
        messages += bodies.decode_in_flight(answer.body)
    return messages


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
    """Return the members of a group that are connected to a master, sorted by client id.

    The list is empty if the group exists and no member is online. Raises GroupNotFoundError if no
    broker knows the group.
    """
    command = requests.consumer_connections(group=group)
    ignored_codes = {ResponseCode.CONSUMER_NOT_ONLINE}
    clients_by_id: dict[str, ConsumerClient] = {}
    for _, address, answer in (
        yield from ask_masters(directory, command, ignored_codes=ignored_codes)
    ):
        connections_at_broker = bodies.decode_consumer_connections(answer.body)
        for connection in connections_at_broker.connections:
            client = ConsumerClient(
                connection.client_id,
                connection.address,
                connection.language,
                connection.version,
                broker_address=address,
                consume_type=connections_at_broker.consume_type,
                message_model=connections_at_broker.message_model,
            )
            clients_by_id.setdefault(connection.client_id, client)
    if not clients_by_id:
        yield from expect_group(directory, group)
    return [clients_by_id[client_id] for client_id in sorted(clients_by_id)]


def _find_consumer(
    directory: Directory, group: str, client_id: str | None
) -> Conversation[ConsumerClient]:
    """Return the member of a group with a client id, or any member if `client_id` is None.

    Raises ConfigurationError if no such member is online.
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
    """Ask a consumer for a report about itself: its settings, subscriptions, queues and counters.

    With `stack`, the report also has the stacks of its threads. Raises ConfigurationError if the
    consumer is not online, RequestError if it does not answer.
    """
    client = yield from _find_consumer(directory, group, client_id)
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
    """Let a consumer process a stored message now, without a change of committed offsets.

    `client_id` selects the consumer; None means any member of the group that is online. `topic` is
    where to search for the message; None means all topics. Returns (message, result of the
    consumer's handler).

    Raises MessageNotFoundError, ConfigurationError if the consumer is not connected to the
    message's broker, and RequestError if the broker refuses.
    """
    message = yield from message_by_id(directory, message_id, topic=topic)
    client = yield from _find_consumer(directory, group, client_id)
    master_addresses = yield from masters(directory)
    address = master_addresses.get(message.broker, str(message.store_host))
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
