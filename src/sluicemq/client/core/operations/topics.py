"""What administration tells: clusters, progress of a group, idle members and why.

Pure: the shells ask the servers and hand the answers in.

Administration as conversations: which questions to ask, what the answers mean; no waiting here.

An operation is a generator: it yields what it wants to ask (`Ask`, or `RouteOf` a topic) and is
sent the answer; its return value is the result. The asyncio shell drives it with `await`, the
blocking shell with plain calls, so both have the same operations and no line twice.

    talk = members("late")
    answer = cluster.call(...)          # for the Ask that next(talk) gave
    talk.send(answer)                   # ... until StopIteration brings the value
    talk.throw(error)                   # when the answer is an error: it may catch it
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from sluicemq.client.core import requests
from sluicemq.client.core.answers import (
    GROUP_NOT_EXIST,
    QUERY_NOT_FOUND,
    SUCCESS,
    SYSTEM_ERROR,
    TOPIC_NOT_EXIST,
    expect_success,
    is_refused,
    number,
    request_error,
)
from sluicemq.client.core.balance import allocate_average
from sluicemq.client.core.directory import read_queues
from sluicemq.client.core.names import check_group, check_topic
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import (
    MASTER_ID,
    MESSAGE_TYPE,
    MESSAGE_TYPES,
    RETRY_PREFIX,
    GroupConfig,
    MessageQueue,
    TopicConfig,
    TopicRoute,
)
from sluicemq.wire import bodies, fastjson
from sluicemq.wire.bodies import ClusterInfo
from sluicemq.wire.frames import Command


def masters_of(info: ClusterInfo, cluster: str | None = None) -> dict[str, str]:
    """Broker name -> master address. Raises ConfigurationError for a cluster that is not there."""
    if cluster is not None and cluster not in info.clusters:
        raise ConfigurationError(
            f"there is no cluster {cluster!r}.",
            cure=f"The name server knows: {', '.join(sorted(info.clusters)) or 'none'}.",
        )
    wanted = set(info.brokers) if cluster is None else set(info.clusters[cluster])
    return {
        name: data.addresses[MASTER_ID]
        for name, data in sorted(info.brokers.items())
        if name in wanted and MASTER_ID in data.addresses
    }


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """One queue of a group: committed offset, next offset of the queue, time of the last consumed
    message (ms, 0 when unknown)."""

    queue: MessageQueue
    committed: int
    offset_max: int
    last_time_ms: int = 0
    messages_at_risk: int = 0
    loss_time_ms: int = 0

    @property
    def lag(self) -> int:
        """Messages not yet committed; a filter's misses count until they are passed."""
        return max(0, self.offset_max - self.committed)


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
    will be left at the present pace; None when not known, or never.
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

    @property
    def lag(self) -> int:
        """Messages that are there and not committed; a filter's misses count until passed."""
        return max(0, self.offset_max - max(self.committed, self.offset_min))

    @property
    def lost(self) -> int:
        """Messages that were deleted before the group committed them; a group that has committed
        nothing begins where it wants, and has lost none."""
        return max(0, self.offset_min - self.committed) if self.committed > 0 else 0


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


def group_report(
    name: str,
    members: Sequence[str],
    progress: Sequence[QueueProgress],
    queues: Mapping[str, Sequence[MessageQueue]],
) -> GroupReport:
    """Shares by average allocation of `queues` (topic -> its queues), idle members with the
    reason."""
    shares = [_share(member, members, queues) for member in sorted(members)]
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
    return GroupReport(name, tuple(shares), tuple(progress), tuple(notes))


def _share(
    member: str, members: Sequence[str], queues: Mapping[str, Sequence[MessageQueue]]
) -> MemberShare:
    own = [
        queue
        for topic_queues in queues.values()
        for queue in allocate_average(member, topic_queues, members)
    ]
    if own:
        return MemberShare(member, tuple(own))
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
    return MemberShare(member, (), why)


T = TypeVar("T")
NAME_SERVER: Final = ""
DELAYED_PAGE: Final = 1000
TRANSACTIONS_PAGE: Final = 1000
_NOTHING_THERE: Final = frozenset({SYSTEM_ERROR, GROUP_NOT_EXIST, TOPIC_NOT_EXIST})


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `where`: an address, a queue (its broker), or NAME_SERVER (any of them). With
    `must_succeed` the shell raises for every code but success."""

    where: str | MessageQueue
    command: Command = field(repr=False)
    must_succeed: bool = True


@dataclass(frozen=True, slots=True)
class RouteOf:
    """A route is wanted; the answer is a TopicRoute."""

    topic: str


Talk = Generator[Ask | RouteOf, Any, T]


# ------------------------------------------------------------------------------- offsets


def offset_min(queue: MessageQueue) -> Talk[int]:
    answer = yield Ask(queue, requests.offset_min(queue))
    return number(answer, "offset")


def offset_max(queue: MessageQueue) -> Talk[int]:
    answer = yield Ask(queue, requests.offset_max(queue))
    return number(answer, "offset")


def offsets(queue: MessageQueue) -> Talk[tuple[int, int]]:
    first = yield from offset_min(queue)
    following = yield from offset_max(queue)
    return first, following


def offset_by_time(queue: MessageQueue, time_ms: int, *, upper: bool) -> Talk[int]:
    answer = yield Ask(queue, requests.offset_by_time(queue, time_ms, upper=upper))
    return number(answer, "offset")


def earliest_time_ms(queue: MessageQueue) -> Talk[int]:
    answer = yield Ask(queue, requests.earliest_time(queue))
    return number(answer, "timestamp")


def latest_time_ms(queue: MessageQueue) -> Talk[int]:
    answer = yield Ask(queue, requests.topic_stats(queue.topic))
    stats = bodies.decode_topic_stats(answer.body).queues.get(queue)
    return stats.last_time_ms if stats is not None and stats.last_time_ms > 0 else -1


def committed_offset(group: str, queue: MessageQueue) -> Talk[int | None]:
    answer = yield Ask(queue, requests.offset_of_group(group, queue), must_succeed=False)
    if answer.code == QUERY_NOT_FOUND:
        return None
    return number(expect_success(answer), "offset")


def commit_offset(group: str, queue: MessageQueue, offset: int) -> Talk[None]:
    yield Ask(queue, requests.commit_offset(group, queue, offset))


# ------------------------------------------------------------------- clusters and topics


def cluster_info() -> Talk[bodies.ClusterInfo]:
    answer = yield Ask(NAME_SERVER, requests.cluster_info())
    return bodies.decode_cluster_info(answer.body)


def masters(cluster: str | None = None) -> Talk[dict[str, str]]:
    info = yield from cluster_info()
    return masters_of(info, cluster)


def topics() -> Talk[list[str]]:
    answer = yield Ask(NAME_SERVER, requests.topic_list())
    return sorted(set(bodies.decode_topic_list(answer.body)))


def queues(topic: str) -> Talk[list[MessageQueue]]:
    route: TopicRoute = yield RouteOf(topic)
    return read_queues(topic, route)


def topic_to_create(
    name: str,
    queue_count: int,
    write_queues: int | None,
    perm: int,
    *,
    order: bool | None,
    message_type: str | None = None,
    attributes: Mapping[str, str] | None = None,
) -> TopicConfig:
    """Raises ConfigurationError for a name, count, permission or type that cannot be, and for
    attributes that a request cannot carry. Which there are the brokers say."""
    check_topic(name)
    writers = queue_count if write_queues is None else write_queues
    if min(queue_count, writers) < 1:
        raise ConfigurationError(
            f"{min(queue_count, writers)} queues are asked for.", cure="A topic has at least one."
        )
    if not 0 <= perm <= 7:
        raise ConfigurationError(
            f"the permission is {perm}.", cure="It is 2 (write), 4 (read) or 6 (both)."
        )
    changes = dict(attributes or {})
    for key, value in changes.items():
        if not key or {",", "="} & set(key) or not value or "," in value:
            raise ConfigurationError(
                f"the attribute {key!r} = {value!r} cannot be sent.",
                cure="Neither is empty or holds a comma, a name no equals sign.",
            )
    if message_type is not None:
        if message_type.upper() not in MESSAGE_TYPES:
            types = ", ".join(one.lower() for one in MESSAGE_TYPES)
            raise ConfigurationError(
                f"the type of topic {name} is {message_type!r}.", cure=f"It is one of {types}."
            )
        changes[MESSAGE_TYPE] = message_type.upper()
    return TopicConfig(name, queue_count, writers, perm, order=bool(order), attributes=changes)


def create_topic(
    config: TopicConfig,
    cluster: str | None,
    name_servers: tuple[str, ...] = (),
    order: bool | None = None,
) -> Talk[list[str]]:
    """`order`: True puts the topic into the order table of every name server, which hands it out
    with the route; False takes it out; None leaves the table alone."""
    found = yield from masters(cluster)
    if not found:
        raise ConfigurationError("no broker is registered.", cure="Start one: sluice broker.")
    if order is not None:  # first, so that the brokers hear of it when they register the topic
        value = ";".join(f"{broker}:{config.write_queues}" for broker in sorted(found))
        table = requests.put_order(config.name, value) if order else None
        for server in name_servers:
            yield Ask(server, table or requests.delete_order(config.name))
    for address in found.values():
        yield Ask(address, requests.update_topic(config))
    return sorted(found)


def delete_topic(name: str, cluster: str | None, name_servers: tuple[str, ...]) -> Talk[None]:
    info = yield from cluster_info()
    for address in masters_of(info, cluster).values():
        yield Ask(address, requests.delete_topic_on_broker(name))
    for server in name_servers:
        for cluster_name in info.clusters if cluster is None else [cluster]:
            yield Ask(server, requests.delete_topic_on_name_server(name, cluster_name))
        if cluster is None:
            yield Ask(server, requests.delete_order(name), must_succeed=False)


def topic_offsets(topic: str) -> Talk[dict[MessageQueue, bodies.QueueStats]]:
    route: TopicRoute = yield RouteOf(topic)
    found: dict[MessageQueue, bodies.QueueStats] = {}
    for data in route.brokers:
        address = data.addresses.get(MASTER_ID)
        if address is not None:
            answer = yield Ask(address, requests.topic_stats(topic))
            found.update(bodies.decode_topic_stats(answer.body).queues)
    return dict(sorted(found.items()))


def groups_of_topic(topic: str) -> Talk[list[str]]:
    route: TopicRoute = yield RouteOf(topic)
    found: set[str] = set()
    for data in route.brokers:
        address = data.addresses.get(MASTER_ID)
        if address is not None:
            answer = yield Ask(address, requests.groups_of_topic(topic))
            found.update(bodies.decode_group_list(answer.body))
    return sorted(found - {topic})  # A Java broker lists the topic itself (spec/traffic, item 29).


def runtime(address: str) -> Talk[dict[str, str]]:
    answer = yield Ask(address, requests.runtime_info())
    return bodies.decode_kv_table(answer.body)


# --------------------------------------------------------------------- delayed messages


def delayed(
    topic: str | None, key: str | None, count_max: int
) -> Talk[dict[str, list[bodies.WaitingMessage]]]:
    """By broker address, each list by the time of delivery."""
    found: dict[str, list[bodies.WaitingMessage]] = {}
    for address in (yield from masters()).values():
        mine: list[bodies.WaitingMessage] = []
        cursor: str | None = None
        while len(mine) < count_max:
            page = min(count_max - len(mine), DELAYED_PAGE)
            answer = yield Ask(address, requests.list_delayed(topic, key, cursor, page))
            mine += bodies.decode_waiting(answer.body)
            cursor = (answer.fields or {}).get("cursor")
            if not cursor:
                break
        found[address] = sorted(mine, key=lambda item: item.due_ms)
    return found


def cancel_delayed(address: str, handle: str) -> Talk[None]:
    yield Ask(address, requests.cancel_delayed(handle))


# -------------------------------------------------------------------------- transactions


def transactions(
    group: str | None, topic: str | None, count_max: int
) -> Talk[dict[str, list[bodies.OpenTransaction]]]:
    """Undecided ones by broker address, each list with the oldest halves first."""
    found: dict[str, list[bodies.OpenTransaction]] = {}
    for address in (yield from masters()).values():
        mine: list[bodies.OpenTransaction] = []
        after: int | None = None
        while len(mine) < count_max:
            page = min(count_max - len(mine), TRANSACTIONS_PAGE)
            answer = yield Ask(address, requests.list_transactions(group, topic, after, page))
            mine += bodies.decode_open_transactions(answer.body)
            text = (answer.fields or {}).get("after")
            if not text:
                break
            after = int(text)
        found[address] = mine
    return found


def access_status() -> Talk[dict[str, dict[str, Any]]]:
    """How the access rules stand, by broker address."""
    found: dict[str, dict[str, Any]] = {}
    for address in (yield from masters()).values():
        answer = yield Ask(address, requests.access_status())
        found[address] = fastjson.loads(answer.body)
    return found


def resolve_transaction(transaction_id: str, outcome: int) -> Talk[str | None]:
    """The address of the broker that had it; None when it is undecided nowhere."""
    for address in (yield from masters()).values():
        request = requests.resolve_transaction(transaction_id, outcome)
        answer = yield Ask(address, request, must_succeed=False)
        if answer.code != QUERY_NOT_FOUND:
            expect_success(answer, address)
            return address
    return None


# -------------------------------------------------------------------------------- groups


def groups() -> Talk[dict[str, GroupConfig]]:
    found: dict[str, GroupConfig] = {}
    for address in (yield from masters()).values():
        answer = yield Ask(address, requests.all_groups())
        found.update(bodies.decode_group_table(answer.body).groups)
    return dict(sorted(found.items()))


def create_group(config: GroupConfig, cluster: str | None) -> Talk[list[str]]:
    check_group(config.name)
    found = yield from masters(cluster)
    for address in found.values():
        yield Ask(address, requests.update_group(config))
    return sorted(found)


def members(group: str) -> Talk[list[str]]:
    found: set[str] = set()
    for address in (yield from masters()).values():
        answer = yield Ask(address, requests.consumer_list(group), must_succeed=False)
        if answer.code == SUCCESS:
            found.update(bodies.decode_consumer_list(answer.body))
        elif answer.code != SYSTEM_ERROR or is_refused(answer):
            raise request_error(answer, address)
    return sorted(found)


def progress(group: str, topic: str | None = None) -> Talk[list[QueueProgress]]:
    found: dict[MessageQueue, QueueProgress] = {}
    for address in (yield from masters()).values():
        answer = yield Ask(address, requests.consume_stats(group, topic), must_succeed=False)
        if answer.code in _NOTHING_THERE and not is_refused(answer):
            continue
        expect_success(answer, address)
        for queue, item in bodies.decode_consume_stats(answer.body).queues.items():
            found[queue] = QueueProgress(
                queue, item.consumer_offset, item.broker_offset, item.last_time_ms,
                item.messages_at_risk, item.loss_time_ms,
            )  # fmt: skip
    return [found[queue] for queue in sorted(found)]


def lag(name: str | None = None) -> Talk[list[QueueLag]]:
    """Of one group, or of all."""
    names = list((yield from groups())) if name is None else [name]
    addresses = list((yield from masters()).values())
    first: dict[str, dict[MessageQueue, int]] = {}
    found: list[QueueLag] = []
    for group_name in names:
        for item in (yield from progress(group_name)):
            topic = item.queue.topic
            if topic not in first:
                first[topic] = yield from _first_offsets(topic, addresses)
            found.append(
                QueueLag(
                    group_name,
                    item.queue,
                    item.committed,
                    first[topic].get(item.queue, 0),
                    item.offset_max,
                    item.messages_at_risk,
                    item.loss_time_ms,
                )
            )
    if name is not None and not found and name not in (known := (yield from groups())):
        raise _unknown_group(name, known)
    return found


def _first_offsets(topic: str, addresses: list[str]) -> Talk[dict[MessageQueue, int]]:
    """The first stored offset of each queue of a topic that the brokers have."""
    found: dict[MessageQueue, int] = {}
    for address in addresses:
        answer = yield Ask(address, requests.topic_stats(topic), must_succeed=False)
        if answer.code in _NOTHING_THERE and not is_refused(answer):
            continue
        stats = bodies.decode_topic_stats(expect_success(answer, address).body)
        found |= {queue: item.offset_min for queue, item in stats.queues.items()}
    return found


def _unknown_group(name: str, known: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        f"no broker knows the group {name!r}.",
        cure=f"They know: {', '.join(known) or 'none'}.",
    )


def group(name: str) -> Talk[GroupReport]:
    made = yield from progress(name)
    online = yield from members(name)
    if not made and not online:
        known = yield from groups()
        if name not in known:
            raise _unknown_group(name, known)
    own: dict[str, list[MessageQueue]] = {}
    for topic in sorted({item.queue.topic for item in made}):
        if not topic.startswith(RETRY_PREFIX):
            own[topic] = yield from queues(topic)
    return group_report(name, online, made, own)
