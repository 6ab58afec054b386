"""The checks of a pull: whether it is allowed, and which filter and limits apply to it.

`pull.py` calls `PullChecks.prepare` for every pull.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from sluicemq.broker.consume.clients import ConsumerGroup, Consumers
from sluicemq.broker.consume.contracts import STRICT
from sluicemq.broker.consume.delivery import DeliveryState, DeliveryStates
from sluicemq.broker.consume.filters import CompiledSubscription, RequestFilters
from sluicemq.broker.lanes.group import GroupLanes
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import (
    FAQ,
    Groups,
    Topic,
    Topics,
    make_no_queue_error,
    make_no_topic_error,
)
from sluicemq.errors import RequestError
from sluicemq.filter.subscriptions import SQL92_DISABLED, is_tag_kind
from sluicemq.model.subscription import MessageFilter
from sluicemq.model.topic import CONTRACT, PERM_READ, GroupConfig
from sluicemq.net.dispatch import Peer
from sluicemq.wire.bodies import BROADCASTING
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.headers import CLIENT_ID_FIELD, PullMessageRequest

ANY_SPAN_FIELD: Final = "sluiceAnySpan"
"""The request field of a SluiceMQ client, which lacks the limits of Java's consumers.

The matches that such a client holds unprocessed may be any number of offsets apart (see
`delivery`), and an answer from memory holds up to `sluicePullCountMax` messages. Without this field
no answer holds more messages than RocketMQ's limit.
"""
PROBE_FIELD: Final = "sluiceLook"
"""The request field that makes a pull a probe: see `PullHandlers._answer_probe`."""
FLAG_COMMIT_OFFSET: Final = 0x1
"""Bit of `sysFlag`: `commitOffset` is to be committed."""
FLAG_SUSPEND: Final = 0x2
"""Bit of `sysFlag`: the pull may be parked if it finds no messages."""
FLAG_SUBSCRIPTION: Final = 0x4
"""Bit of `sysFlag`: the pull brings its own filter expression."""
BULK_BYTES_MIN: Final = 65_536
"""The smallest limit in bytes for a bulk answer, even if the connection has used up its share."""


class PullRefusedError(RequestError):
    """A pull that is answered with an error code.

    When: inside a broker: the topic, group or filter of a pull does not exist or is not allowed.
    Then: nothing was read. The consumer receives the answer as a `RequestError` with its code.
    Fix: that of the code.
    """

    def __init__(self, code: int, remark: str, forbidden_kind: int | None = None) -> None:
        """Keep `forbidden_kind`, RocketMQ's number for the reason of a NO_PERMISSION, or None."""
        super().__init__(code, remark)
        self.forbidden_kind = forbidden_kind

    @classmethod
    def from_error(cls, error: RequestError) -> "PullRefusedError":
        """Return a PullRefusedError with the code and remark of `error`."""
        return cls(error.code, error.remark)


class PullContext:
    """One pull in progress: what the client asked for, and what the checks added.

    A parked pull keeps its context and is retried with it.

    `offset` is the requested queue offset and `count_max` the requested number of messages. `queue`
    is (topic, queue id). `PullChecks.prepare` sets `filter` (None if every message matches),
    `sys_flags` (the sysFlag of the group and of the topic), `bytes_max` (the limit of a bulk
    answer, None for an ordinary pull) and `delivery`. `commit_offset` is the offset that the client
    has committed with this pull, None without one.
    """

    __slots__ = (
        "bytes_max",
        "commit_offset",
        "count_max",
        "delivery",
        "fields",
        "filter",
        "group",
        "lane_key",
        "offset",
        "peer",
        "queue",
        "queue_id",
        "sys_flag",
        "sys_flags",
        "topic",
    )

    filter: MessageFilter | None
    sys_flags: tuple[int, int]
    bytes_max: int | None
    delivery: DeliveryState
    commit_offset: int | None
    lane_key: str
    """The subscription key of the lane for which the pull reads, "" without a lane."""

    def __init__(self, fields: Mapping[str, str] | None, peer: Peer) -> None:
        """Read the fields that every pull needs; other fields are read when they are needed.

        Raises KeyError, TypeError or ValueError for a missing or malformed field. Called for every
        pull: keep it cheap.
        """
        self.fields: Mapping[str, str] = fields  # type: ignore[assignment]
        self.group = self.fields["consumerGroup"]
        self.topic = self.fields["topic"]
        self.queue_id = int(self.fields["queueId"])
        self.offset = int(self.fields["queueOffset"])
        self.count_max = int(self.fields["maxMsgNums"])
        self.sys_flag = int(self.fields["sysFlag"])
        self.queue = (self.topic, self.queue_id)
        self.lane_key = ""
        self.peer = peer


@dataclass(slots=True, eq=False)
class PullChecks:
    """The checks of pulls, in the order of RocketMQ's broker."""

    settings: Settings
    topics: Topics
    groups: Groups
    consumers: Consumers
    deliveries: DeliveryStates
    filters: RequestFilters
    call_soon: Callable[[Callable[[], None]], object]
    _bulk_bytes_reserved: dict[Peer, int] = field(default_factory=dict)
    """The bytes of bulk answers promised to each connection in this event loop iteration."""
    _lanes: dict[str, GroupLanes] = field(init=False)

    def __post_init__(self) -> None:
        """Keep the table of lanes, which is read for every pull."""
        self._lanes = self.consumers.lanes.table

    def prepare(self, context: PullContext) -> None:
        """Check whether a pull is allowed, in RocketMQ's order, and complete `context`.

        Its attributes `filter`, `sys_flags`, `bytes_max` and `delivery` are set. A missing group is
        created if that is allowed. Raises PullRefusedError, or PostponedError if the filter of the
        request takes long to compile. Called for every pull: keep it cheap.
        """
        # Every pull passes here, so one condition finds out whether there may be a reason to refuse
        # it. `_raise_refusal` then finds the reason in RocketMQ's order.
        group = self.groups.table.get(context.group) or self.groups.get_or_create(context.group)
        topic = self.topics.get(context.topic)
        if (
            group is None
            or topic is None
            or not group.consume_enable
            or not self.settings.broker.broker_permission & topic.config.perm & PERM_READ
            or not 0 <= context.queue_id < topic.config.read_queues
            or context.group in self.groups.forbidden
        ):
            self._raise_refusal(context, group, topic)
        assert group is not None
        assert topic is not None

        # In most cases the group's filter by tags applies. `_find_group_filter` handles the others.
        members = self.consumers.groups.get(context.group)
        compiled = None if members is None else members.subscriptions.get(context.topic)
        if context.sys_flag & FLAG_SUBSCRIPTION:
            context.filter = self._find_request_filter(context)
        elif (
            members is None
            or compiled is None
            or not compiled.is_tag_type
            or members.message_model == BROADCASTING
            or group.attributes
            or context.group in self._lanes
            or compiled.subscription.version < int(context.fields["subVersion"])
        ):
            context.filter = self._find_group_filter(context, group, members)
        else:
            context.filter = compiled.filter
        context.sys_flags = (group.sys_flag, topic.config.sys_flag)
        context.bytes_max = None
        if "sluiceBulk" in context.fields:
            context.bytes_max = self._reserve_bulk_bytes(context)
        context.delivery = self.deliveries[context.topic, context.group]

    def _raise_refusal(
        self, context: PullContext, group: GroupConfig | None, topic: Topic | None
    ) -> None:
        """Raise PullRefusedError for the first reason to refuse the pull, in RocketMQ's order.

        `group` or `topic` is None if it does not exist. Return if there is no reason: a group that
        is forbidden to read some topics may still read this one.
        """
        config = self.settings.broker
        group_name = context.group
        if not config.broker_permission & PERM_READ:
            remark = f"the broker[{config.broker_name}] pulling message is forbidden"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, remark, 1)
        if group is None:
            remark = f"subscription group [{group_name}] does not exist, {FAQ}"
            raise PullRefusedError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if not group.consume_enable:
            remark = f"subscription group no permission, {group_name}"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, remark, 2)
        if topic is None:
            raise PullRefusedError.from_error(make_no_topic_error(context.topic))
        if not topic.is_readable:
            remark = f"the topic[{context.topic}] pulling message is forbidden"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, remark, 3)
        if not self.groups.can_read(group_name, context.topic):
            remark = f"the consumer group[{group_name}] is forbidden for topic[{context.topic}]"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, remark, 5)
        if not 0 <= context.queue_id < topic.config.read_queues:
            remote = context.peer.remote
            code = ResponseCode.INVALID_PARAMETER
            raise PullRefusedError.from_error(
                make_no_queue_error(topic, context.queue_id, remote, code)
            )

    def _find_request_filter(self, context: PullContext) -> MessageFilter | None:
        """Return the filter of the expression in the request; None if every message matches.

        Raises PullRefusedError if the expression is invalid or SQL92 is disabled, and
        PostponedError if it takes long to compile.
        """
        expression_kind = context.fields.get("expressionType")
        if not is_tag_kind(expression_kind) and not self.settings.broker.enable_property_filter:
            raise PullRefusedError(ResponseCode.SYSTEM_ERROR, SQL92_DISABLED)
        try:
            return self.filters.get_filter(expression_kind, context.fields.get("subscription"))
        except RequestError as error:
            raise PullRefusedError.from_error(error) from error

    def _find_group_filter(
        self, context: PullContext, config: GroupConfig, group: ConsumerGroup | None
    ) -> MessageFilter | None:
        """Return the filter of the group's subscription in its heartbeats; None matches everything.

        In a group with lanes, it is the filter of the member's subscription, which the rule of the
        lane replaces later. Raises PullRefusedError if the group has no such subscription, has an
        older version of it than the client, or may not use it.
        """
        if group is None:
            raise PullRefusedError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist\n{FAQ}"
            )
        if context.group in self._lanes or config.attributes.get(CONTRACT) == STRICT:
            compiled = self._find_member_subscription(context, group)
            if compiled is not None:
                return compiled.filter
        if group.message_model == BROADCASTING and not config.consume_broadcast_enable:
            remark = f"the consumer group[{context.group}] can not consume by broadcast way"
            raise PullRefusedError(ResponseCode.NO_PERMISSION, remark, 4)
        compiled = group.subscriptions.get(context.topic)
        if compiled is None:
            raise _make_not_exist_error()
        if compiled.subscription.version < int(context.fields["subVersion"]):
            raise _make_not_latest_error()
        if not compiled.is_tag_type:
            if not self.settings.broker.enable_property_filter:
                raise PullRefusedError(ResponseCode.SYSTEM_ERROR, SQL92_DISABLED)
            if compiled.is_broken:
                raise PullRefusedError(
                    ResponseCode.FILTER_DATA_NOT_EXIST,
                    "The broker's consumer filter data is not exist! The SQL92 expression does "
                    "not compile: `sluice filter check` says why.",
                )
        return compiled.filter

    def _find_member_subscription(
        self, context: PullContext, group: ConsumerGroup
    ) -> CompiledSubscription | None:
        """Return the group's subscription to the topic, if the client is a member with a lane.

        Return None if the member has no lane. Raises PullRefusedError if the client is not a
        member, if the member does not subscribe to the topic, or if the client knows a newer
        version of the subscription than its last heartbeat had. Without this check, a client that
        has sent no heartbeat since the broker restarted would read with the filter of other
        members, and skip its own messages.
        """
        member = group.find_member(context.peer, context.fields)
        if member is None:
            client_id = context.fields.get(CLIENT_ID_FIELD)
            contracts = self.consumers.contracts
            reason = contracts.refusal_reason(context.group, context.peer, client_id)
            if not reason:
                reason = "no heartbeat of this client has arrived yet"
            raise _make_not_exist_error(f": {reason}")
        lanes = self._lanes.get(context.group)
        if lanes is None or member.subscription_key not in lanes.lanes:
            return None
        subscription = member.subscriptions.get(context.topic)
        if subscription is None:
            raise _make_not_exist_error()
        if subscription.version < int(context.fields["subVersion"]):
            raise _make_not_latest_error()
        return group.subscriptions.get(context.topic)

    def _reserve_bulk_bytes(self, context: PullContext) -> int | None:
        """Return the size limit of a bulk answer in bytes, or None if the usual limit applies.

        A client asks for bulk answers, which may have megabytes. The limit is counted for the
        connection until the next iteration of the event loop. If the connection sends several pulls
        in one iteration, their limits become smaller, but not below BULK_BYTES_MIN.
        """
        header = decode_header(PullMessageRequest, context.fields)
        if not header.bulk:
            return None
        config = self.settings.broker
        if not self._bulk_bytes_reserved:
            self.call_soon(self._bulk_bytes_reserved.clear)
        reserved_bytes = self._bulk_bytes_reserved.get(context.peer, 0)
        bytes_left = config.write_buffer_bytes_max + config.bulk_pull_bytes_max - reserved_bytes
        limit_bytes = min(
            header.message_bytes_max or bytes_left, bytes_left, config.bulk_pull_bytes_max
        )
        limit_bytes = max(limit_bytes, BULK_BYTES_MIN)
        self._bulk_bytes_reserved[context.peer] = reserved_bytes + limit_bytes
        return limit_bytes


def _make_not_exist_error(why: str = "") -> PullRefusedError:
    """Return the error for a client whose subscription the broker does not know."""
    return PullRefusedError(
        ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist{why}\n{FAQ}"
    )


def _make_not_latest_error() -> PullRefusedError:
    """Return the error for a client whose subscription is newer than the one the broker knows."""
    return PullRefusedError(
        ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest"
    )
