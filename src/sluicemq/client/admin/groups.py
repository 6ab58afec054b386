"""Consumer groups: settings, contract, members and their shares, how far they are, what they do;
reset one to a time, or give it the offsets of another.

A reset is asked of each broker with 222, which our broker (and RocketMQ 5 by default) does by
itself: whoever consumes goes on at the new place. A RocketMQ broker that leaves it to the consumers
answers 206 when none is online; then the offsets are committed for the group (15), as mqadmin does.

A SluiceMQ broker counts by itself what a group's filters let through (900131). A RocketMQ broker
cannot know how many messages match (its lag counts those that the filter will drop).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from sluicemq.client.admin.messages import message_by_id
from sluicemq.client.admin.topics import (
    ask_each,
    ask_masters,
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
from sluicemq.client.core.requests import (
    GROUP_NOT_EXIST,
    SUCCESS,
    SYSTEM_ERROR,
    TOPIC_NOT_EXIST,
    expect_success,
    request_error,
)
from sluicemq.errors import ConfigurationError, GroupNotFoundError
from sluicemq.hints import suggest
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import (
    CONTRACT,
    CONTRACTS,
    RETRY_PREFIX,
    GroupConfig,
    MessageQueue,
    allocate_average,
)
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode

NOTHING_THERE: Final = frozenset({SYSTEM_ERROR, GROUP_NOT_EXIST, TOPIC_NOT_EXIST})
"""What a broker answers that does not know the group, or has nothing of it."""
EARLIEST_MS: Final = 0
LATEST_MS: Final = -1
"""As a time: behind the last message."""


# -------------------------------------------------------------------------------- settings


def groups(directory: Directory) -> Conversation[dict[str, GroupConfig]]:
    """Every consumer group known to any master."""
    found: dict[str, GroupConfig] = {}
    for _, _, answer in (yield from ask_masters(directory, requests.all_groups())):
        found |= tables.decode_group_table(answer.body).groups
    return dict(sorted(found.items()))


def create_group(
    directory: Directory, config: GroupConfig, *, cluster: str | None = None
) -> Conversation[list[str]]:
    """Creates or changes a consumer group on every master; returns the broker names."""
    check_group(config.name)
    found = yield from masters(directory, cluster)
    yield from ask_each(found, requests.update_group(config))
    return sorted(found)


def expect_group(directory: Directory, name: str) -> Conversation[GroupConfig]:
    """Its settings. Raises GroupNotFoundError."""
    known = yield from groups(directory)
    if name not in known:
        raise GroupNotFoundError(
            GROUP_NOT_EXIST,
            f"no broker knows the group {name!r}.",
            fix=f"{suggest(name, known)} `sluice group create` makes one.",
        )
    return known[name]


def unknown_group(name: str, known: Iterable[str]) -> ConfigurationError:
    """The error for a report on a group that no broker knows."""
    return ConfigurationError(
        f"no broker knows the group {name!r}.",
        fix=suggest(name, known),
    )


@dataclass(frozen=True, slots=True)
class GroupContract:
    """A group's contract at one broker. `lanes` from the oldest on, as 900133 says them;
    `unmatched` messages that no lane wants; `refused` client id -> why; `forgotten` subscriptions
    that left and had to be given up, as 900133 says them; `pops` topic -> kind and expression."""

    broker: str
    contract: str
    lanes: tuple[dict[str, Any], ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    unmatched: int = 0
    forgotten: tuple[dict[str, Any], ...] = ()
    pops: dict[str, tuple[str, str]] = field(default_factory=dict)


def contract(directory: Directory, group: str) -> Conversation[list[GroupContract]]:
    """A group's contract, its lanes and whom it refused, by broker; none from RocketMQ."""
    absent = {GROUP_NOT_EXIST, ResponseCode.REQUEST_CODE_NOT_SUPPORTED}
    answers = yield from ask_masters(directory, requests.group_lanes(group=group), absent=absent)
    found = []
    for broker, _, answer in answers:
        known = orjson.loads(bytes(answer.body))
        found.append(
            GroupContract(
                broker,
                known["contract"],
                tuple(known["lanes"]),
                known["refused"],
                known["unmatched"],
                tuple(known.get("forgotten", ())),
                {topic: (kind, text) for topic, kind, text in known.get("pops", ())},
            )
        )
    return found


def change_contract(directory: Directory, group: str, contract: str) -> Conversation[list[str]]:
    """Sets it: compatible, strict or lanes; returns the brokers that know the group. Raises
    ConfigurationError, RequestError."""
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
            f"no broker knows the group {group!r}.", fix=f"sluice group create {group}"
        )
    return sorted(found)


# -------------------------------------------------------------------- members and progress


def members(directory: Directory, group: str) -> Conversation[list[str]]:
    """Client ids of the members of a group that are online, over all masters."""
    command = requests.consumer_list(group=group)
    found: set[str] = set()
    for _, _, answer in (yield from ask_masters(directory, command, absent={SYSTEM_ERROR})):
        found.update(bodies.decode_consumer_list(answer.body))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """One queue of a group: committed offset, next offset of the queue, time of the last consumed
    message (ms, 0 when unknown), how far it was fetched (None when the broker does not tell). Of a
    group that pops: how many messages are in flight, and how many there are besides those from
    `committed` on (`extra`; of what is popped in order some may be done, then it is below 0)."""

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
        """Messages not yet committed, or popped and not acknowledged; a filter's misses count until
        they are passed."""
        return max(0, self.offset_max - self.committed + self.extra)

    @property
    def beyond_end(self) -> int:
        """How far the committed offset lies behind the end of the queue; 0 as a rule. The topic was
        deleted and created again, or the broker lost messages."""
        return max(0, self.committed - self.offset_max)


def progress(
    directory: Directory, group: str, topic: str | None = None
) -> Conversation[list[QueueProgress]]:
    """How far a group is in each queue it has offsets for."""
    return (yield from progress_at((yield from masters(directory)), group, topic))


def progress_at(
    brokers: Mapping[str, str],
    group: str,
    topic: str | None = None,
    *,
    absent: Collection[int] | None = NOTHING_THERE,
) -> Conversation[list[QueueProgress]]:
    """The same of brokers given by name and address; `absent` as in `ask_each`."""
    command = requests.consume_stats(group=group, topic=topic)
    found: dict[MessageQueue, QueueProgress] = {}
    for _, _, answer in (yield from ask_each(brokers, command, absent=absent)):
        for queue, item in bodies.decode_consume_stats(answer.body).queues.items():
            found[queue] = QueueProgress(
                queue, item.consumer_offset, item.broker_offset, item.last_time_ms,
                item.messages_at_risk, item.loss_time_ms, item.pull_offset or None,
                item.in_flight, item.extra,
            )  # fmt: skip
    return [found[queue] for queue in sorted(found)]


@dataclass(frozen=True, slots=True)
class MemberShare:
    """What one member of a group gets, by the average allocation that clients agree on."""

    client_id: str
    queues: tuple[MessageQueue, ...]
    idle_because: str = ""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group at one moment."""

    name: str
    members: tuple[MemberShare, ...]
    progress: tuple[QueueProgress, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def lag(self) -> int:
        return sum(item.lag for item in self.progress)


def group(directory: Directory, name: str) -> Conversation[GroupReport]:
    """Members, their shares, who is idle and why, lag per queue."""
    reached = yield from progress(directory, name)
    online = yield from members(directory, name)
    if not reached and not online and name not in (known := (yield from groups(directory))):
        raise unknown_group(name, known)
    own: dict[str, list[MessageQueue]] = {}
    for topic in sorted({item.queue.topic for item in reached}):
        if not topic.startswith(RETRY_PREFIX):
            own[topic] = yield from queues(directory, topic)
    return group_report(name, online, reached, own)


def group_report(
    name: str,
    members: Sequence[str],
    progress: Sequence[QueueProgress],
    queues: Mapping[str, Sequence[MessageQueue]],
) -> GroupReport:
    """Shares by average allocation of `queues` (topic -> its queues), idle members with the
    reason."""
    notes = []
    if not members:
        notes.append(
            "No member is online: nobody consumes. Either no consumer runs, or it was refused "
            "(its log says why), or it is connected to other brokers."
        )
    missing = [topic for topic, own in queues.items() if not own]
    notes.extend(f"The topic {topic} has no readable queue." for topic in missing)
    duplicates = {member for member in members if list(members).count(member) > 1}
    notes.extend(
        f"The client id {member} is used by two members, which then share one part."
        for member in sorted(duplicates)
    )
    count = max((len(topic_queues) for topic_queues in queues.values()), default=0)
    if not queues:
        why = "the group has no offsets yet, so its topics are not known to the brokers"
    elif count < len(members):
        why = (
            f"{len(members)} members share {count} queues, a queue has one reader: "
            f"give the topic {len(members)} queues or stop {len(members) - count} members"
        )
    else:
        why = "no queue of its topics is readable"
    shares = []
    for member in sorted(members):
        shared = (allocate_average(member, own, members) for own in queues.values())
        own_queues = tuple(queue for some in shared for queue in some)
        shares.append(MemberShare(member, own_queues, "" if own_queues else why))
    return GroupReport(name, tuple(shares), tuple(progress), tuple(notes))


# ------------------------------------------------------------------- what is before a group


@dataclass(frozen=True, slots=True)
class TopicMatching:
    """What the filters of a group do on one broker, by topic."""

    broker: str
    topics: tuple[bodies.GroupMatching, ...]


def matching(
    directory: Directory, group: str, topic: str | None = None
) -> Conversation[list[TopicMatching]]:
    """What the filters of a group have let through, kept back and failed on, and how many
    messages before it match, exactly, by broker. A RocketMQ broker does not know."""
    command = requests.filtered_lag(group=group, topic=topic)
    absent = {GROUP_NOT_EXIST, TOPIC_NOT_EXIST, ResponseCode.REQUEST_CODE_NOT_SUPPORTED}
    answers = yield from ask_masters(directory, command, absent=absent)
    return [
        TopicMatching(broker, tuple(bodies.decode_group_matching(answer.body)))
        for broker, _, answer in answers
    ]


@dataclass(frozen=True, slots=True)
class LaneLag:
    """What one lane of a group has before it in one queue: `matching` messages from its own
    `committed` on are its."""

    lane: str
    expression: str
    committed: int
    offset_max: int
    matching: int | None


@dataclass(frozen=True, slots=True)
class QueueLag:
    """What a group has before it in one queue: the queue holds `offset_min` up to, not including,
    `offset_max`.

    `messages_at_risk` of the unread ones are deleted next, from `loss_time_ms` on (ms since 1970;
    both 0 when none is in danger, or when the broker is not ours and does not tell).
    `matching` of them get through the group's filter, exactly; None when it is not known: on a
    RocketMQ broker, or of a group that is away and subscribed by tags. `eta_ms`: in how long none
    will be left at the present pace; None when not known, or never. `in_flight` and `extra` as in
    `QueueProgress`: `matching` has them.
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
    """Of a group whose members want different things: then `committed` is the least of them, and
    `matching` the sum."""
    in_flight: int = 0
    extra: int = 0

    @property
    def lag(self) -> int:
        """Messages that are there and not committed, or popped and not acknowledged; a filter's
        misses count until passed."""
        return max(0, self.offset_max - max(self.committed, self.offset_min) + self.extra)

    @property
    def lost(self) -> int:
        """Messages that were deleted before the group committed them; a group that has committed
        nothing begins where it wants, and has lost none."""
        return max(0, self.offset_min - self.committed) if self.committed > 0 else 0

    @property
    def beyond_end(self) -> int:
        """How far the committed offset lies behind the end of the queue, as in `QueueProgress`."""
        return max(0, self.committed - self.offset_max)


def lag(directory: Directory, group: str | None = None) -> Conversation[list[QueueLag]]:
    """How many messages a group (None: every group) has before it in each queue, and how many
    of them are about to be deleted; how many of them the group's filter lets through."""
    names = list((yield from groups(directory))) if group is None else [group]
    brokers = yield from masters(directory)
    first: dict[str, dict[MessageQueue, int]] = {}
    found: list[QueueLag] = []
    for name in names:
        reached = yield from progress_at(brokers, name)
        known = {
            (item.broker, of_topic.topic, of_queue.queue_id): (of_topic, of_queue)
            for item in ((yield from matching(directory, name)) if reached else ())
            for of_topic in item.topics
            for of_queue in of_topic.queues
        }
        for item in reached:
            topic, broker, queue_id = item.queue
            risk = item.messages_at_risk, item.loss_time_ms
            if (counted := known.get((broker, topic, queue_id))) is not None:
                of_topic, of_queue = counted  # offsets and count of one moment
                lanes = tuple(
                    LaneLag(lane.lane, lane.expression, one.committed, one.offset_max, one.matching)
                    for lane in of_topic.lanes
                    for one in lane.queues
                    if one.queue_id == queue_id
                )
                found.append(
                    QueueLag(
                        name, item.queue, max(of_queue.committed, 0), of_queue.offset_min,
                        of_queue.offset_max, *risk, of_queue.matching, of_queue.eta_ms, lanes,
                        of_queue.in_flight, of_queue.extra,
                    )
                )  # fmt: skip
                continue
            if topic not in first:  # the first stored offset of each queue
                first[topic] = {}
                command = requests.topic_stats(topic=topic)
                for _, _, answer in (yield from ask_each(brokers, command, absent=NOTHING_THERE)):
                    for queue, stats in bodies.decode_topic_stats(answer.body).queues.items():
                        first[topic][queue] = stats.offset_min
            low = first[topic].get(item.queue, 0)
            found.append(
                QueueLag(
                    name, item.queue, item.committed, low, item.offset_max, *risk,
                    in_flight=item.in_flight, extra=item.extra,
                )
            )  # fmt: skip
    if group is not None and not found:
        known_groups = yield from groups(directory)
        if group not in known_groups:
            raise unknown_group(group, known_groups)
    return found


def popped(
    brokers: Mapping[str, str],
    group: str,
    topic: str | None = None,
    queue_id: int | None = None,
    offset: int | None = None,
) -> Conversation[list[bodies.InFlightMessage]]:
    """What a group has popped and not acknowledged at brokers, given by name and address; None: of
    any. A RocketMQ broker does not tell."""
    command = requests.in_flight(group=group, topic=topic, queue_id=queue_id, offset=offset)
    answers = yield from ask_each(brokers, command, absent=None)
    return [one for _, _, answer in answers for one in bodies.decode_in_flight(answer.body)]


# ------------------------------------------------------------------------------- consumers


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


def consumers(directory: Directory, group: str) -> Conversation[list[ConsumerClient]]:
    """The members of a group that are online, each with one broker that knows it."""
    command = requests.consumer_connections(group=group)
    absent = {ResponseCode.CONSUMER_NOT_ONLINE}
    found: dict[str, ConsumerClient] = {}
    for _, address, answer in (yield from ask_masters(directory, command, absent=absent)):
        value = bodies.decode_consumer_connections(answer.body)
        for one in value.connections:
            client = ConsumerClient(
                one.client_id, one.address, one.language, one.version, address,
                value.consume_type, value.message_model,
            )  # fmt: skip
            found.setdefault(one.client_id, client)
    if not found:
        yield from expect_group(directory, group)
    return [found[client_id] for client_id in sorted(found)]


def _consumer(
    directory: Directory, group: str, client_id: str | None
) -> Conversation[ConsumerClient]:
    """One that is online; None: any."""
    online = yield from consumers(directory, group)
    for client in online:
        if client_id in (None, client.client_id):
            return client
    if client_id is None:
        raise ConfigurationError(f"no consumer of the group {group!r} is online.", fix="Start one.")
    names = ", ".join(client.client_id for client in online)
    raise ConfigurationError(
        f"no consumer {client_id!r} of the group {group!r} is online.",
        fix=f"Online: {names or 'none'}.",
    )


def running_info(
    directory: Directory, group: str, client_id: str, *, stack: bool = False
) -> Conversation[bodies.RunningInfo]:
    """What a consumer is and does; with `stack` the stacks of its threads and tasks. Raises
    ConfigurationError when it is not online, RequestError when it does not answer."""
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
    """Lets a consumer (None: any) handle a stored message now; offsets stay as they are.
    Raises MessageNotFoundError, ConfigurationError, RequestError."""
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
            fix="It reads from another broker: choose another client.",
        )
    if answer.code != SUCCESS:
        raise request_error(answer, address)
    return message, bodies.decode_direct_result(answer.body)


# --------------------------------------------------------------------------------- offsets


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
) -> Conversation[list[OffsetChange]]:
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
) -> Conversation[list[OffsetChange]]:
    """Sends a group to a time of a topic (ms since 1970; 0 the oldest message, -1 behind the
    last), also while it consumes. Raises RouteNotFoundError, GroupNotFoundError, RequestError.
    """
    planned = yield from plan_reset(directory, group, topic, time_ms)
    changes = {change.queue: change for change in planned}
    for address in (yield from masters_of_topic(directory, topic)).values():
        command = requests.reset_offsets(group, topic, time_ms)
        answer = yield Call(address, command)
        if answer.code == GROUP_NOT_EXIST:  # it has never consumed there
            config = yield from expect_group(directory, group)
            yield from directory.call(address, requests.update_group(config))
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
) -> Conversation[None]:
    """Where the brokers' own table does not say it yet, and nobody is there to do it."""
    for queue, change in changes.items():
        if (yield from committed_offset(directory, group, queue)) == change.new:
            continue
        address = (yield from masters_of_topic(directory, queue.topic)).get(queue.broker, "")
        answer = yield Call(address, requests.consumer_list(group=group))
        if answer.code != SUCCESS:
            yield from directory.call(queue, requests.commit_offset(group, queue, change.new))


def plan_clone(
    directory: Directory, source: str, target: str, topic: str | None = None
) -> Conversation[list[OffsetChange]]:
    """What `clone_offsets` would change; nothing is changed."""
    check_group(target)
    if source == target:
        raise ConfigurationError(
            f"the group {source!r} is to be cloned to itself.", fix="Name two groups."
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
            fix="See sluice group show.",
        )
    return found


def clone_offsets(
    directory: Directory, source: str, target: str, topic: str | None = None
) -> Conversation[list[OffsetChange]]:
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
