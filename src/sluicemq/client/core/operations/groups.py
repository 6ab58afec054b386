"""Consumer groups: settings, contract, members and their shares, how far they are, what they do;
reset one to a time, or give it the offsets of another.

A reset is asked of each broker with 222, which our broker (and RocketMQ 5 by default) does by
itself: whoever consumes goes on at the new place. A RocketMQ broker that leaves it to the consumers
answers 206 when none is online; then the offsets are committed for the group (15), as mqadmin does.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from sluicemq.client.core import requests
from sluicemq.client.core.answers import (
    GROUP_NOT_EXIST,
    SUCCESS,
    SYSTEM_ERROR,
    TOPIC_NOT_EXIST,
    expect_success,
    request_error,
)
from sluicemq.client.core.balance import allocate_average
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.names import check_group
from sluicemq.client.core.operations.messages import message_by_id
from sluicemq.client.core.operations.topics import (
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
from sluicemq.client.core.talks import Call, Talk
from sluicemq.errors import ConfigurationError, GroupNotFoundError
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import CONTRACT, CONTRACTS, RETRY_PREFIX, GroupConfig, MessageQueue
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode

NOTHING_THERE: Final = frozenset({SYSTEM_ERROR, GROUP_NOT_EXIST, TOPIC_NOT_EXIST})
"""What a broker answers that does not know the group, or has nothing of it."""
EARLIEST_MS: Final = 0
LATEST_MS: Final = -1
"""As a time: behind the last message."""


# -------------------------------------------------------------------------------- settings


def groups(directory: Directory) -> Talk[dict[str, GroupConfig]]:
    """Every consumer group known to any master."""
    found: dict[str, GroupConfig] = {}
    for _, _, answer in (yield from ask_masters(directory, requests.all_groups())):
        found |= tables.decode_group_table(answer.body).groups
    return dict(sorted(found.items()))


def create_group(
    directory: Directory, config: GroupConfig, *, cluster: str | None = None
) -> Talk[list[str]]:
    """Creates or changes a consumer group on every master; returns the broker names."""
    check_group(config.name)
    found = yield from masters(directory, cluster)
    yield from ask_each(found, requests.update_group(config))
    return sorted(found)


def expect_group(directory: Directory, name: str) -> Talk[GroupConfig]:
    """Its settings. Raises GroupNotFoundError."""
    known = yield from groups(directory)
    if name not in known:
        raise GroupNotFoundError(
            GROUP_NOT_EXIST,
            f"no broker knows the group {name!r}.",
            cure=f"They know: {', '.join(known) or 'none'}. `sluice group create` makes one.",
        )
    return known[name]


def unknown_group(name: str, known: Iterable[str]) -> ConfigurationError:
    """The error for a report on a group that no broker knows."""
    return ConfigurationError(
        f"no broker knows the group {name!r}.",
        cure=f"They know: {', '.join(known) or 'none'}.",
    )


@dataclass(frozen=True, slots=True)
class GroupContract:
    """A group's contract at one broker. `lanes` from the oldest on, as 900133 says them;
    `unmatched` messages that no lane wants; `refused` client id -> why; `forgotten` subscriptions
    that left and had to be given up, as 900133 says them."""

    broker: str
    contract: str
    lanes: tuple[dict[str, Any], ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    unmatched: int = 0
    forgotten: tuple[dict[str, Any], ...] = ()


def contract(directory: Directory, group: str) -> Talk[list[GroupContract]]:
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
            )
        )
    return found


def change_contract(directory: Directory, group: str, contract: str) -> Talk[list[str]]:
    """Sets it: compatible, strict or lanes; returns the brokers that know the group. Raises
    ConfigurationError, RequestError."""
    if contract not in CONTRACTS:
        raise ConfigurationError(
            f"{contract!r} is not a contract.", cure=f"Use one of {', '.join(CONTRACTS)}."
        )
    found = []
    for broker, address, answer in (yield from ask_masters(directory, requests.all_groups())):
        config = tables.decode_group_table(answer.body).groups.get(group)
        if config is not None:
            changed = replace(config, attributes={f"+{CONTRACT}": contract})
            yield from directory.ask(address, requests.update_group(changed))
            found.append(broker)
    if not found:
        raise ConfigurationError(
            f"no broker knows the group {group!r}.", cure=f"sluice group create {group}"
        )
    return sorted(found)


# -------------------------------------------------------------------- members and progress


def members(directory: Directory, group: str) -> Talk[list[str]]:
    """Client ids of the members of a group that are online, over all masters."""
    command = requests.consumer_list(group=group)
    found: set[str] = set()
    for _, _, answer in (yield from ask_masters(directory, command, absent={SYSTEM_ERROR})):
        found.update(bodies.decode_consumer_list(answer.body))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """One queue of a group: committed offset, next offset of the queue, time of the last consumed
    message (ms, 0 when unknown), how far it was fetched (None when the broker does not tell)."""

    queue: MessageQueue
    committed: int
    offset_max: int
    last_time_ms: int = 0
    messages_at_risk: int = 0
    loss_time_ms: int = 0
    fetched: int | None = None

    @property
    def lag(self) -> int:
        """Messages not yet committed; a filter's misses count until they are passed."""
        return max(0, self.offset_max - self.committed)


def progress(
    directory: Directory, group: str, topic: str | None = None
) -> Talk[list[QueueProgress]]:
    """How far a group is in each queue it has offsets for."""
    return (yield from progress_at((yield from masters(directory)), group, topic))


def progress_at(
    brokers: Mapping[str, str],
    group: str,
    topic: str | None = None,
    *,
    absent: Collection[int] | None = NOTHING_THERE,
) -> Talk[list[QueueProgress]]:
    """The same of brokers given by name and address; `absent` as in `ask_each`."""
    command = requests.consume_stats(group=group, topic=topic)
    found: dict[MessageQueue, QueueProgress] = {}
    for _, _, answer in (yield from ask_each(brokers, command, absent=absent)):
        for queue, item in bodies.decode_consume_stats(answer.body).queues.items():
            found[queue] = QueueProgress(
                queue, item.consumer_offset, item.broker_offset, item.last_time_ms,
                item.messages_at_risk, item.loss_time_ms, item.pull_offset or None,
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


def group(directory: Directory, name: str) -> Talk[GroupReport]:
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


def consumers(directory: Directory, group: str) -> Talk[list[ConsumerClient]]:
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


def _consumer(directory: Directory, group: str, client_id: str | None) -> Talk[ConsumerClient]:
    """One that is online; None: any."""
    online = yield from consumers(directory, group)
    for client in online:
        if client_id in (None, client.client_id):
            return client
    if client_id is None:
        raise ConfigurationError(
            f"no consumer of the group {group!r} is online.", cure="Start one."
        )
    names = ", ".join(client.client_id for client in online)
    raise ConfigurationError(
        f"no consumer {client_id!r} of the group {group!r} is online.",
        cure=f"Online: {names or 'none'}.",
    )


def running_info(
    directory: Directory, group: str, client_id: str, *, stack: bool = False
) -> Talk[bodies.RunningInfo]:
    """What a consumer is and does; with `stack` the stacks of its threads and tasks. Raises
    ConfigurationError when it is not online, RequestError when it does not answer."""
    client = yield from _consumer(directory, group, client_id)
    command = requests.running_info(group=group, client_id=client_id, stack_enable=stack)
    answer = yield from directory.ask(client.broker_address, command)
    return bodies.decode_running_info(answer.body)


def consume_directly(
    directory: Directory,
    message_id: str,
    group: str,
    client_id: str | None = None,
    *,
    topic: str | None = None,
) -> Talk[tuple[StoredMessage, bodies.DirectResult]]:
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
            cure="It reads from another broker: choose another client.",
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
    for address in (yield from masters_of_topic(directory, topic)).values():
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
        address = (yield from masters_of_topic(directory, queue.topic)).get(queue.broker, "")
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
