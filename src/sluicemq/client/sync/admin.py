"""Blocking administration: routes, offsets, topics, groups, clusters.

Every method is a conversation of `client.core.operations`, driven here with
blocking calls: what the Spark source, the command line and scripts need. Offsets are
positions in one queue, times are milliseconds since 1970.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from sluicemq.client.core.answers import expect_success
from sluicemq.client.core.explanations import inquiry
from sluicemq.client.core.explanations.facts import GroupExplained, MessageExplained, MessageFacts
from sluicemq.client.core.operations import contracts
from sluicemq.client.core.operations import filters as filtering
from sluicemq.client.core.operations import groups as moving
from sluicemq.client.core.operations import messages as finding
from sluicemq.client.core.operations import topics as operations
from sluicemq.client.core.operations.contracts import GroupContract
from sluicemq.client.core.operations.filters import BrokerTrial, Progress, TopicMatching
from sluicemq.client.core.operations.groups import ConsumerClient, OffsetChange
from sluicemq.client.core.operations.topics import (
    NAME_SERVER,
    Ask,
    GroupReport,
    QueueLag,
    QueueProgress,
    RouteOf,
    Talk,
)
from sluicemq.client.core.operations.traces import Timeline, find_trace
from sluicemq.client.core.tracing import DEFAULT_TRACE_TOPIC
from sluicemq.client.core.transactions import TransactionState
from sluicemq.client.sync.cluster import Cluster
from sluicemq.errors import SluiceError
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import SQL92
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.wire.bodies import (
    ClusterInfo,
    DirectResult,
    OpenTransaction,
    QueueStats,
    RunningInfo,
    WaitingMessage,
)

T = TypeVar("T")


class Admin(Cluster):
    """Administration over blocking connections. Use it in a `with` statement; any number of threads
    may share one. Raises the errors of `sluicemq.errors`."""

    def _drive(self, talk: Talk[T]) -> T:
        answer: Any = None
        failure: SluiceError | None = None
        while True:
            try:
                wanted = talk.send(answer) if failure is None else talk.throw(failure)
            except StopIteration as done:
                value: T = done.value
                return value
            try:
                answer, failure = self._answer(wanted), None
            except SluiceError as error:  # the conversation may go on, or say it better
                failure = error

    def _answer(self, wanted: Ask | RouteOf) -> Any:
        if isinstance(wanted, RouteOf):
            return self.route(wanted.topic)
        where = wanted.where
        if where == NAME_SERVER:
            answer, address = self.ask_name_server(wanted.command), ""
        else:
            address = where if isinstance(where, str) else self.address(where)
            answer = self.call(address, wanted.command)
        return expect_success(answer, address) if wanted.must_succeed else answer

    def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic, sorted."""
        return self._drive(operations.queues(topic))

    def offsets(self, queue: MessageQueue) -> tuple[int, int]:
        """(first stored offset, offset that the next message will get)."""
        return self._drive(operations.offsets(queue))

    def offset_by_time(self, queue: MessageQueue, time_ms: int, *, upper: bool = False) -> int:
        """The first offset stored at `time_ms` or later; `upper`: the last at or before it."""
        return self._drive(operations.offset_by_time(queue, time_ms, upper=upper))

    def offset_min(self, queue: MessageQueue) -> int:
        """The first offset that is still stored."""
        return self._drive(operations.offset_min(queue))

    def offset_max(self, queue: MessageQueue) -> int:
        """The offset that the next message will get."""
        return self._drive(operations.offset_max(queue))

    def earliest_time_ms(self, queue: MessageQueue) -> int:
        """When the first stored message was stored; -1 without one."""
        return self._drive(operations.earliest_time_ms(queue))

    def latest_time_ms(self, queue: MessageQueue) -> int:
        """When the last stored message was stored; -1 without one."""
        return self._drive(operations.latest_time_ms(queue))

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """The committed offset of a group, None when it never committed."""
        return self._drive(operations.committed_offset(group, queue))

    def commit_offset(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Sets the committed offset of a group, also backwards."""
        self._drive(operations.commit_offset(group, queue, offset))

    def cluster_info(self) -> ClusterInfo:
        """All clusters and brokers that the name server knows."""
        return self._drive(operations.cluster_info())

    def masters(self, cluster: str | None = None) -> dict[str, str]:
        """Broker name -> address of each master. Raises ConfigurationError for an unknown
        cluster."""
        return self._drive(operations.masters(cluster))

    def topics(self) -> list[str]:
        """All topic names, sorted."""
        return self._drive(operations.topics())

    def create_topic(
        self,
        name: str,
        *,
        queues: int = 8,
        write_queues: int | None = None,
        perm: int = 6,
        cluster: str | None = None,
        order: bool | None = None,
        type: str | None = None,  # noqa: A002 - what RocketMQ calls it
        attributes: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Creates or changes a topic on every master (of one cluster); returns the broker names.

        `type` is "normal", "fifo", "delay" or "transaction", the attribute message.type;
        `attributes` are others to be set. What is not given stays as it is.

        `order`: True makes it a topic of strict order: producers keep the number of its queues also
        while a broker is away (the name servers need orderMessageEnable=true); False ends that.
        Raises ConfigurationError for a bad name, count, type or cluster, RequestError when refused.
        """
        config = operations.topic_to_create(
            name, queues, write_queues, perm, order=order, message_type=type, attributes=attributes
        )
        made = self._drive(operations.create_topic(config, cluster, self.name_servers, order))
        self.routes.forget(name)
        return made

    def delete_topic(self, name: str, *, cluster: str | None = None) -> None:
        """Deletes a topic on every master, then on every name server."""
        self._drive(operations.delete_topic(name, cluster, self.name_servers))
        self.routes.drop(name)

    def topic_offsets(self, topic: str) -> dict[MessageQueue, QueueStats]:
        """Queue -> first offset, next offset, time of the last message."""
        return self._drive(operations.topic_offsets(topic))

    def groups_of_topic(self, topic: str) -> list[str]:
        """The groups that read a topic, or have offsets in it."""
        return self._drive(operations.groups_of_topic(topic))

    def delayed(
        self, topic: str | None = None, *, key: str | None = None, count_max: int = 10_000
    ) -> dict[str, list[WaitingMessage]]:
        """Messages that wait for their delivery, by broker address and time; of a topic, with a
        key or message id, or all. Only SluiceMQ brokers answer."""
        return self._drive(operations.delayed(topic, key, count_max))

    def cancel_delayed(self, address: str, handle: str) -> None:
        """Never deliver a message that `delayed` lists. Raises RequestError when it is too late."""
        self._drive(operations.cancel_delayed(address, handle))

    def access_status(self) -> dict[str, dict[str, Any]]:
        """How the access rules of each broker stand, by its address: `enabled`, since when they are
        in force (`sinceMs`), `accounts`, the last `error`, requests `refused` by access key."""
        return self._drive(operations.access_status())

    def transactions(
        self, *, group: str | None = None, topic: str | None = None, count_max: int = 10_000
    ) -> dict[str, list[OpenTransaction]]:
        """Undecided transactions by broker address, the oldest half messages first; of a producer
        group, of a topic, or all. Only SluiceMQ brokers answer."""
        return self._drive(operations.transactions(group, topic, count_max))

    def resolve_transaction(self, transaction_id: str, state: TransactionState) -> str | None:
        """Commit or roll back by hand; the broker's address, None when it is undecided nowhere.

        Only SluiceMQ brokers answer. Raises RequestError.
        """
        return self._drive(operations.resolve_transaction(transaction_id, int(state)))

    def groups(self) -> dict[str, GroupConfig]:
        """Every consumer group known to any master."""
        return self._drive(operations.groups())

    def create_group(self, config: GroupConfig, *, cluster: str | None = None) -> list[str]:
        """Creates or changes a consumer group on every master; returns the broker names."""
        return self._drive(operations.create_group(config, cluster))

    def members(self, group: str) -> list[str]:
        """Client ids of the members of a group that are online, over all masters."""
        return self._drive(operations.members(group))

    def progress(self, group: str, topic: str | None = None) -> list[QueueProgress]:
        """How far a group is in each queue it has offsets for."""
        return self._drive(operations.progress(group, topic))

    def lag(self, group: str | None = None) -> list[QueueLag]:
        """How many messages a group (None: every group) has before it in each queue, and how many
        of them are about to be deleted; how many of them the group's filter lets through."""
        return self._drive(filtering.lag(group))

    def group(self, name: str) -> GroupReport:
        """Members, their shares, who is idle and why, lag per queue."""
        return self._drive(operations.group(name))

    def plan_reset(self, group: str, topic: str, time_ms: int) -> list[OffsetChange]:
        """What `reset_offsets` would change; nothing is changed."""
        return self._drive(moving.plan_reset(group, topic, time_ms))

    def reset_offsets(self, group: str, topic: str, time_ms: int) -> list[OffsetChange]:
        """Sends a group to a time of a topic (ms since 1970; 0 the oldest message, -1 behind the
        last), also while it consumes. Raises RouteNotFoundError, GroupNotFoundError, RequestError.
        """
        return self._drive(moving.reset(group, topic, time_ms))

    def plan_clone(self, source: str, target: str, topic: str | None = None) -> list[OffsetChange]:
        """What `clone_offsets` would change; nothing is changed."""
        return self._drive(moving.plan_clone(source, target, topic))

    def clone_offsets(
        self, source: str, target: str, topic: str | None = None
    ) -> list[OffsetChange]:
        """Gives the target the offsets of the source, of one topic or of all. Raises as
        `reset_offsets`."""
        return self._drive(moving.clone(source, target, topic))

    def consumers(self, group: str) -> list[ConsumerClient]:
        """The members of a group that are online."""
        return self._drive(moving.consumers(group))

    def running_info(self, group: str, client_id: str, *, stack: bool = False) -> RunningInfo:
        """What a consumer is and does; with `stack` the stacks of its threads and tasks. Raises
        ConfigurationError when it is not online, RequestError when it does not answer."""
        return self._drive(moving.running_info(group, client_id, stack=stack))

    def consume_directly(
        self, message_id: str, group: str, client_id: str | None = None, *, topic: str | None = None
    ) -> tuple[StoredMessage, DirectResult]:
        """Lets a consumer (None: any) handle a stored message now; offsets stay as they are.
        Raises MessageNotFoundError, ConfigurationError, RequestError."""
        return self._drive(moving.consume_directly(message_id, group, client_id, topic))

    def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        begin_ms: int = 0,
        end_ms: int = finding.TIME_MAX_MS,
        count_max: int = finding.COUNT_MAX,
    ) -> list[StoredMessage]:
        """Messages of a topic that bear a key, stored from `begin_ms` to `end_ms`, newest first.

        Raises RequestError when a broker keeps no index, or is still building it.
        """
        return self._drive(finding.messages_by_key(topic, key, begin_ms, end_ms, count_max))

    def trace(self, message_id: str, *, trace_topic: str = DEFAULT_TRACE_TOPIC) -> Timeline:
        """What happened to a message, as far as clients have traced it.

        Raises MessageNotFoundError without a trace, RouteNotFoundError without the topic.
        """
        return self._drive(find_trace(message_id, trace_topic))

    def message_by_id(self, message_id: str, *, topic: str | None = None) -> StoredMessage:
        """The message with this id, that of its producer or that of its broker.

        Without `topic` the first kind is looked for in all topics. Raises MessageNotFoundError.
        """
        return self._drive(finding.message_by_id(message_id, topic))

    def runtime(self, address: str) -> dict[str, str]:
        """The counters of one broker."""
        return self._drive(operations.runtime(address))

    def contract(self, group: str) -> list[GroupContract]:
        """A group's contract, its lanes and whom it refused, by broker; none from RocketMQ."""
        return self._drive(contracts.show(group))

    def change_contract(self, group: str, contract: str) -> list[str]:
        """Sets it: compatible, strict or lanes; returns the brokers that know the group. Raises
        ConfigurationError, RequestError."""
        return self._drive(contracts.change(group, contract))

    def matching(self, group: str, topic: str | None = None) -> list[TopicMatching]:
        """What the filters of a group have let through, kept back and failed on, and how many
        messages before it match, exactly, by broker. A RocketMQ broker does not know."""
        return self._drive(filtering.matching(group, topic))

    def try_filter(
        self,
        topic: str,
        expression: str,
        kind: str | None = SQL92,
        *,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        group: str | None = None,
        count_max: int | None = None,
        progress: Progress | None = None,
    ) -> list[BrokerTrial]:
        """What an expression would do to messages stored from `begin_ms` to `end_ms`, by broker:
        nothing is consumed. With `group` beside what that one wants now.

        At most `count_max` messages are looked at, the newest of each queue; a RocketMQ broker's
        are read here, and `progress(read, of)` is told. Raises FilterSyntaxError,
        ConfigurationError, RouteNotFoundError.
        """
        talk = filtering.try_filter(
            topic, expression, kind, begin_ms=begin_ms, end_ms=end_ms, group=group,
            count_max=count_max, progress=progress,
        )  # fmt: skip
        return self._drive(talk)

    def explain_message(
        self,
        message_id: str,
        *,
        group: str | None = None,
        topic: str | None = None,
        trace_topic: str = DEFAULT_TRACE_TOPIC,
    ) -> tuple[MessageFacts, list[MessageExplained]]:
        """Where a message is stored, and what became of it in a group (None: in each that reads its
        topic), with the causes. Raises MessageNotFoundError."""
        now_ms = self.clock.now_ms()
        talk = inquiry.inquire_message(message_id, group, topic, trace_topic, now_ms)
        return self._drive(talk)

    def explain_group(self, name: str) -> GroupExplained:
        """Why a group is idle or behind; no findings when it is neither."""
        return self._drive(inquiry.inquire_group(name, self.clock.now_ms()))
