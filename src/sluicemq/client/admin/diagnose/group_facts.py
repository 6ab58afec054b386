"""Facts about consumer groups and messages, as brokers and clients reported them.

A fact that could not be learned is None, or empty where the type has no None.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sluicemq.client.admin.groups import (
    GroupContract,
    QueueLag,
    QueueProgress,
    TopicMatching,
)
from sluicemq.client.admin.traces import GroupTrace
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import RETRY_PREFIX, GroupConfig, MessageQueue
from sluicemq.wire.bodies import (
    GroupMatching,
    InFlightMessage,
    LaneMatching,
    QueueState,
    RunningInfo,
)

_NAME_SERVERS = "PROP_NAMESERVER_ADDR"
"""The property that every client of the remoting protocol reports about itself."""


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A member of a consumer group that is online.

    `info` is what the member itself reported in response to GET_CONSUMER_RUNNING_INFO (307).
    `subscriptions` by topic and `queues` are parts of it. All three are None if the member did not
    answer. `queues` is also None for a member that may read any queue: a client of a proxy, or a
    member of a group that pops.

    `is_mute` is True if the request to the member timed out. `clock_ahead_ms` is by how much its
    clock is ahead of this machine's, at least.
    """

    client_id: str
    subscriptions: Mapping[str, Subscription] | None = None
    queues: Mapping[MessageQueue, QueueState] | None = None
    info: RunningInfo | None = None
    is_mute: bool = False
    clock_ahead_ms: int = 0

    @classmethod
    def from_info(cls, client_id: str, info: RunningInfo, clock_ahead_ms: int = 0) -> "MemberFacts":
        """Return the facts about a member from its own report `info`.

        `clock_ahead_ms` says how far the member's clock is ahead of the broker's. The queues are
        None for a gRPC client, because it may read from any queue.
        """
        # A proxy answers for its gRPC clients, each of which reads any queue.
        is_remoting = _NAME_SERVERS in info.properties
        subscriptions = {subscription.topic: subscription for subscription in info.subscriptions}
        return cls(
            client_id,
            subscriptions=subscriptions,
            queues=info.queues if is_remoting else None,
            info=info,
            clock_ahead_ms=clock_ahead_ms,
        )

    @property
    def message_model(self) -> str:
        """CLUSTERING or BROADCASTING, "" if the member does not report it."""
        return self.info.properties.get("messageModel", "") if self.info is not None else ""

    @property
    def failing_topics(self) -> frozenset[str]:
        """The topics in which every message that the member processed lately has failed.

        It is empty unless the member consumes in order.
        """
        running_info = self.info
        if running_info is None or running_info.properties.get("PROP_CONSUMEORDERLY") != "true":
            return frozenset()
        return frozenset(
            topic
            for topic, rates in running_info.rates.items()
            if rates.failed_per_second > 0 and rates.done_per_second == 0
        )


@dataclass(frozen=True, slots=True)
class FilterFacts:
    """A trial of a group's filter on the newest `rows` messages of a topic.

    `matched` of them match. `never_true` are the conditions of the expression that were true of no
    message.
    """

    topic: str
    expression: str
    rows: int
    matched: int
    never_true: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A consumer group.

    `config` is None if no broker knows the group. `subscriptions` by topic is the brokers' view: a
    broker keeps one subscription per group and topic, that of the newest heartbeat.
    `readable_brokers` contains, by topic, the brokers from which clients can read the topic, None
    for a topic without a route.
    """

    name: str
    config: GroupConfig | None = None
    members: Sequence[MemberFacts] = ()
    subscriptions: Mapping[str, Subscription] = field(default_factory=dict)
    progress: Sequence[QueueProgress] = ()
    readable_brokers: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    matching: Sequence[TopicMatching] = ()
    """What SluiceMQ brokers count of the group's filters; empty from RocketMQ brokers."""
    contracts: Sequence[GroupContract] = ()
    """Lanes, refused members and forgotten subscriptions, by SluiceMQ broker."""
    now_ms: int = 0

    # What only `sluice doctor` asks for.
    lags: Sequence[QueueLag] = ()
    message_models: frozenset[str] = frozenset()
    """The message models that brokers report."""
    dead_letter_count: int = 0
    dead_letter_time_ms: int = 0
    """The time at which the newest dead letter was stored, 0 without dead letters."""
    failed_messages: Mapping[str, int] = field(default_factory=dict)
    """Message id -> number of failed deliveries, of messages that wait for another retry."""
    filters: Sequence[FilterFacts] = ()

    @property
    def lag(self) -> int:
        """The number of messages that the group has not consumed."""
        return sum(queue_progress.lag for queue_progress in self.progress)

    @property
    def topics(self) -> list[str]:
        """The topics that the group subscribes or has offsets for, sorted."""
        return sorted(
            {*self.subscriptions, *(queue_progress.queue.topic for queue_progress in self.progress)}
        )

    @property
    def popped_topics(self) -> frozenset[str]:
        """The topics that the group pops."""
        return frozenset(topic for contract in self.contracts for topic in contract.pops)

    @property
    def filter_counts(self) -> list[tuple[str, GroupMatching]]:
        """Pairs (broker name, counts of one topic), for all topics and the group's retry topics."""
        counts_by_broker = []
        for broker_counts in self.matching:
            counts_by_broker += [(broker_counts.broker, counts) for counts in broker_counts.topics]
        return counts_by_broker

    @property
    def application_filter_counts(self) -> list[tuple[str, GroupMatching]]:
        """`filter_counts` without the group's retry topics."""
        return [
            (broker, counts)
            for broker, counts in self.filter_counts
            if not counts.topic.startswith(RETRY_PREFIX)
        ]

    @property
    def matching_lag(self) -> int | None:
        """The number of unread messages that match the group's filters; None if it is unknown.

        It is unknown if a broker does not count the messages of one of the queues.
        """
        matching_counts: list[int | None] = []
        for _, counts in self.application_filter_counts:
            matching_counts += [queue.matching for queue in counts.queues]
        if not matching_counts or None in matching_counts:
            return None
        return sum(count or 0 for count in matching_counts)

    @property
    def application_lags(self) -> list[QueueLag]:
        """The lags of the group's queues, without the queues of its retry topics."""
        return [
            queue_lag
            for queue_lag in self.lags
            if not queue_lag.queue.topic.startswith(RETRY_PREFIX)
        ]

    def has_lanes(self, topic: str) -> bool:
        """Return whether a broker reports lanes of the group in the topic."""
        return any(counts.topic == topic and counts.lanes for _, counts in self.filter_counts)


@dataclass(frozen=True, slots=True)
class GroupTopicFacts:
    """A consumer group in one of its topics.

    `has_lanes` is True if its members subscribe the topic in lanes.
    """

    group: GroupFacts
    topic: str
    has_lanes: bool = False

    @property
    def subscription(self) -> Subscription | None:
        """The brokers' view of the group's subscription, None without one."""
        return self.group.subscriptions.get(self.topic)

    @property
    def progress(self) -> list[QueueProgress]:
        """The group's progress in the queues of the topic."""
        return [
            queue_progress
            for queue_progress in self.group.progress
            if queue_progress.queue.topic == self.topic
        ]

    @property
    def readable_brokers(self) -> frozenset[str] | None:
        """The brokers from which clients can read the topic, None without a route."""
        return self.group.readable_brokers.get(self.topic)


@dataclass(frozen=True, slots=True)
class WaitingLaneFacts:
    """A lane for which messages of one topic wait at one broker."""

    group: GroupFacts
    broker: str
    topic: str
    lane: LaneMatching

    @property
    def matching(self) -> int:
        """The number of messages that wait for the lane."""
        return sum(queue.matching or 0 for queue in self.lane.queues)

    @property
    def as_group(self) -> GroupFacts:
        """The facts of the lane in the form of a group, with its members and its progress.

        Brokers report up to which offset a whole group has fetched, but not a lane. So the fetched
        offset is computed from the messages that the members of the lane hold.
        """
        members = [
            member for member in self.group.members if member.client_id in self.lane.client_ids
        ]
        progress = []
        for counts in self.lane.queues:
            queue = MessageQueue(self.topic, self.broker, counts.queue_id)
            committed = max(0, counts.committed)
            fetched = _find_end_of_held_messages(queue, members)
            progress.append(QueueProgress(queue, committed, counts.offset_max, fetched=fetched))
        name = f"lane {self.lane.lane}"
        return replace(self.group, name=name, members=members, progress=progress)


def _find_end_of_held_messages(queue: MessageQueue, members: Iterable[MemberFacts]) -> int | None:
    """Return the offset after the last message of a queue that a member has in memory.

    Such messages are fetched and not finished. Returns None if no member has any.
    """
    ends = []
    for member in members:
        state = (member.queues or {}).get(queue)
        if state is not None and state.cached_count:
            ends.append(state.cached_max + 1)
    return max(ends, default=None)


# -------------------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class MessageFacts:
    """A stored message and its queue, which contains the offsets [offset_min, offset_max).

    `readable_brokers` are the brokers from which clients can read the message's topic, None if the
    topic has no route.
    """

    message: StoredMessage
    offset_min: int
    offset_max: int
    readable_brokers: frozenset[str] | None

    @property
    def queue(self) -> MessageQueue:
        """The queue that contains the message."""
        return MessageQueue(self.message.topic, self.message.broker, self.message.queue_id)


@dataclass(frozen=True, slots=True)
class RetryFacts:
    """A copy of a message in a retry topic of a group, or on its way there.

    `times` is the number of the retry. `is_past` is True if the group's committed offset is beyond
    the copy. `due_ms` is the time at which a delayed copy will be delivered, None if it is not
    delayed or the time is unknown. `in_flight` describes a copy that is popped and not
    acknowledged. `is_popped` is True if the group pops, so that the retry follows an expired
    invisible time.
    """

    times: int
    is_past: bool
    due_ms: int | None = None
    in_flight: InFlightMessage | None = None
    is_popped: bool = False


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """A lane of a group at the broker of a message.

    `subscription` is the lane's subscription to the message's topic, None if the lane is one of
    another topic. `offset` is the lane's committed offset in the message's queue, None without one.
    """

    lane: str
    subscription: Subscription | None
    members: Sequence[str]
    offset: int | None

    def __str__(self) -> str:
        subscription = self.subscription
        if subscription is None:
            return f"lane {self.lane} (another topic)"
        return f"lane {self.lane} ({subscription.topic}: {subscription.expression})"


@dataclass(frozen=True, slots=True)
class DeliveryFacts:
    """What brokers and clients reported about one message in one group.

    `committed` and `fetched` are the group's offsets in the message's queue, None if there are
    none. `retries` are the copies that were or will be delivered again. `dead_letters` are the
    copies in the group's dead-letter topic. `trace` is None if no client traced a delivery.
    `lanes` are the group's lanes at the message's broker from the oldest on, empty while all
    members have the same subscription. `in_flight` is set while the message itself is popped.
    """

    message: MessageFacts
    group: GroupFacts
    committed: int | None = None
    fetched: int | None = None
    retries: Sequence[RetryFacts] = ()
    dead_letters: Sequence[StoredMessage] = ()
    trace: GroupTrace | None = None
    lanes: Sequence[LaneFacts] = ()
    in_flight: InFlightMessage | None = None

    @property
    def topic(self) -> str:
        """The topic of the message."""
        return self.message.message.topic

    @property
    def last_retry(self) -> RetryFacts | None:
        """The copy with the highest number of retries, None if no copy exists."""
        return max(self.retries, key=lambda retry: retry.times, default=None)

    @property
    def in_topic(self) -> GroupTopicFacts:
        """The facts about the group in the message's topic, limited to the message's queue."""
        progress = QueueProgress(
            self.message.queue, self.committed or 0, self.message.offset_max, fetched=self.fetched
        )
        group = replace(
            self.group,
            progress=[progress],
            readable_brokers={self.topic: self.message.readable_brokers},
        )
        return GroupTopicFacts(group, self.topic, has_lanes=bool(self.lanes))

    @property
    def popped(self) -> InFlightMessage | None:
        """The delivery of the message that is popped and not acknowledged yet; None without one.

        If the message was retried, this is about its last copy.
        """
        last_retry = self.last_retry
        if last_retry is None:
            return self.in_flight
        return last_retry.in_flight

    @property
    def is_known_consumed(self) -> bool:
        """Whether a copy or a trace shows that a handler processed the message."""
        is_traced = self.trace is not None and self.trace.consumed
        return self.last_retry is not None or is_traced

    @property
    def owner(self) -> str | None:
        """The member that reads the message's queue, as `owner_of` returns it."""
        return owner_of(self.message.queue, self.group.members)


def owner_of(queue: MessageQueue, members: Sequence[MemberFacts]) -> str | None:
    """Return the client id of the member that reads a queue.

    Returns "" if no member reads it, and None if that is unknown because a member did not report
    its queues.
    """
    for member in members:
        state = (member.queues or {}).get(queue)
        if state is not None and not state.dropped:
            return member.client_id
    return None if any(member.queues is None for member in members) else ""
