"""Which request goes where: code -> header, handler, quick twin.

A row with a header has a handler `(header, command, peer)`, and the header is decoded here; one
without has `(command, peer)`, and reads fields or body itself. A quick twin takes plain requests
past all that (`net/dispatch.py`). What right a code needs stands in `acl.verdict.NEEDS` and not
here: the name server asks the same table, and it decides codes that no handler has yet. What is not
here is answered with REQUEST_CODE_NOT_SUPPORTED.
"""

from collections.abc import Callable
from types import MethodType
from typing import Final, NamedTuple

from sluicemq.broker.admin import readonly
from sluicemq.broker.admin.access import AccessAdmin
from sluicemq.broker.admin.metadata import Metadata
from sluicemq.broker.admin.queries import Queries
from sluicemq.broker.admin.refused import SENTENCES, Refused
from sluicemq.broker.admin.retention import Cleaning
from sluicemq.broker.admin.statistics import Statistics
from sluicemq.broker.admin.status import Admin
from sluicemq.broker.consume.filter_diagnostics import FilterHandlers
from sluicemq.broker.consume.heartbeat import HeartbeatHandlers
from sluicemq.broker.consume.offset_admin import GroupOffsetHandlers
from sluicemq.broker.consume.pull import PullHandlers
from sluicemq.broker.epochs.epochs import Epochs
from sluicemq.broker.pop.acknowledge import Acknowledge, InFlight
from sluicemq.broker.pop.assignment import Assignments
from sluicemq.broker.pop.pop import Pop
from sluicemq.broker.produce.relays import Relays, Replies
from sluicemq.broker.produce.send import Retries, Send
from sluicemq.broker.replication.requests import ReplicaRequests, refusals, while_enough
from sluicemq.broker.replication.status import ReplicaAdmin
from sluicemq.broker.state import BrokerState
from sluicemq.broker.transactions.requests import TransactionRequests
from sluicemq.broker.waiting.requests import DelayRequests
from sluicemq.net.dispatch import Dispatcher, Handler, Outcome, Quick, Run
from sluicemq.net.limits import WITH_MESSAGES
from sluicemq.wire import headers as h
from sluicemq.wire import popping as p
from sluicemq.wire import replicas as r
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import decode_header


class Row(NamedTuple):
    """Where a request goes."""

    header: type | None
    handler: Callable[..., Outcome]
    quick: Callable[..., bool | bytes] | None = None


TABLE: Final[dict[int, Row]] = {
    # --- producers
    Code.SEND_MESSAGE: Row(h.SendMessageRequest, Send.send),
    Code.SEND_MESSAGE_V2: Row(h.SendMessageRequestV2, Send.send, Send.send_quick),
    Code.SEND_BATCH_MESSAGE: Row(h.SendMessageRequestV2, Send.send_batch),
    Code.SEND_REPLY_MESSAGE: Row(h.SendMessageRequest, Replies.reply),
    Code.SEND_REPLY_MESSAGE_V2: Row(h.SendMessageRequestV2, Replies.reply),
    Code.CONSUMER_SEND_MSG_BACK: Row(h.SendBackRequest, Retries.send_back),
    Code.END_TRANSACTION: Row(h.EndTransactionRequest, TransactionRequests.end),
    Code.SLUICE_LIST_TRANSACTIONS: Row(h.ListTransactionsRequest, TransactionRequests.listed),
    Code.SLUICE_RESOLVE_TRANSACTION: Row(h.ResolveTransactionRequest, TransactionRequests.resolve),
    Code.SLUICE_COMMIT_EPOCH: Row(h.CommitEpochRequest, Epochs.commit),
    Code.RECALL_MESSAGE: Row(h.RecallMessageRequest, DelayRequests.recall),
    Code.SLUICE_LIST_DELAYED: Row(h.ListDelayedRequest, DelayRequests.listed),
    Code.SLUICE_CANCEL_DELAYED: Row(h.CancelDelayedRequest, DelayRequests.cancel),
    Code.GET_ALL_DELAY_OFFSET: Row(None, DelayRequests.delay_offsets),
    Code.GET_TIMER_CHECK_POINT: Row(None, DelayRequests.timer_checkpoint),
    Code.GET_TIMER_METRICS: Row(None, DelayRequests.timer_metrics),
    # --- consumers
    Code.PULL_MESSAGE: Row(None, PullHandlers.pull, PullHandlers.pull_fast_path),
    Code.LITE_PULL_MESSAGE: Row(None, PullHandlers.pull),
    Code.POP_MESSAGE: Row(p.PopMessageRequest, Pop.pop),
    Code.PEEK_MESSAGE: Row(p.PeekMessageRequest, Pop.peek),
    Code.NOTIFICATION: Row(p.NotificationRequest, Pop.notify),
    Code.POLLING_INFO: Row(p.PollingInfoRequest, Pop.polling),
    Code.ACK_MESSAGE: Row(p.AckMessageRequest, Acknowledge.one),
    Code.BATCH_ACK_MESSAGE: Row(None, Acknowledge.many),
    Code.CHANGE_MESSAGE_INVISIBLETIME: Row(p.ChangeInvisibleTimeRequest, Acknowledge.change),
    Code.SLUICE_IN_FLIGHT: Row(p.InFlightRequest, InFlight.listed),
    Code.HEART_BEAT: Row(None, HeartbeatHandlers.heartbeat, HeartbeatHandlers.heartbeat_fast_path),
    Code.UNREGISTER_CLIENT: Row(h.UnregisterClientRequest, HeartbeatHandlers.unregister),
    Code.GET_CONSUMER_LIST_BY_GROUP: Row(h.ConsumerGroupRequest, HeartbeatHandlers.list_members),
    Code.CHECK_CLIENT_CONFIG: Row(None, HeartbeatHandlers.check_subscription),
    Code.QUERY_ASSIGNMENT: Row(None, Assignments.query),
    Code.SET_MESSAGE_REQUEST_MODE: Row(None, Assignments.set_mode),
    Code.GET_ALL_MESSAGE_REQUEST_MODE: Row(None, Assignments.modes),
    Code.QUERY_CONSUMER_OFFSET: Row(h.QueryConsumerOffsetRequest, Queries.committed_offset),
    Code.UPDATE_CONSUMER_OFFSET: Row(h.UpdateConsumerOffsetRequest, Queries.commit_offset),
    Code.LOCK_BATCH_MQ: Row(None, Queries.lock),
    Code.UNLOCK_BATCH_MQ: Row(None, Queries.unlock),
    # --- queues and messages
    Code.GET_MAX_OFFSET: Row(h.GetMaxOffsetRequest, Queries.max_offset),
    Code.GET_MIN_OFFSET: Row(h.QueueRequest, Queries.min_offset),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: Row(h.SearchOffsetRequest, Queries.offset_by_time),
    Code.GET_EARLIEST_MSG_STORETIME: Row(h.QueueRequest, Queries.earliest_time),
    Code.QUERY_MESSAGE: Row(h.QueryMessageRequest, Queries.query_message),
    Code.VIEW_MESSAGE_BY_ID: Row(h.ViewMessageRequest, Queries.view_message),
    # --- topics and groups
    Code.UPDATE_AND_CREATE_TOPIC: Row(h.CreateTopicRequest, Metadata.create_topic),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: Row(None, Metadata.create_topics),
    Code.DELETE_TOPIC_IN_BROKER: Row(h.TopicRequest, Metadata.delete_topic),
    Code.GET_ALL_TOPIC_CONFIG: Row(h.GetAllTopicsRequest, Metadata.all_topics),
    Code.GET_TOPIC_CONFIG: Row(h.GetTopicConfigRequest, Metadata.topic),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: Row(None, Metadata.system_topics),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Row(None, Metadata.create_group),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: Row(None, Metadata.create_groups),
    Code.DELETE_SUBSCRIPTIONGROUP: Row(h.DeleteGroupRequest, Metadata.delete_group),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Row(h.GetAllGroupsRequest, Metadata.all_groups),
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: Row(h.GetGroupConfigRequest, Metadata.group),
    Code.GET_ALL_CONSUMER_OFFSET: Row(None, Metadata.all_offsets),
    # --- offsets of whole groups, filters, lanes
    Code.INVOKE_BROKER_TO_RESET_OFFSET: Row(
        h.ResetOffsetRequest, GroupOffsetHandlers.reset_offsets
    ),
    Code.QUERY_CONSUME_TIME_SPAN: Row(h.TopicGroupRequest, GroupOffsetHandlers.query_time_spans),
    Code.QUERY_CORRECTION_OFFSET: Row(
        h.QueryCorrectionOffsetRequest, GroupOffsetHandlers.query_correction_offsets
    ),
    Code.CLONE_GROUP_OFFSET: Row(h.CloneGroupOffsetRequest, GroupOffsetHandlers.clone_offsets),
    Code.QUERY_CONSUME_QUEUE: Row(
        h.QueryConsumeQueueRequest, GroupOffsetHandlers.query_consume_queue
    ),
    Code.SLUICE_FILTERED_LAG: Row(h.FilteredLagRequest, FilterHandlers.report_filtered_lag),
    Code.SLUICE_TRY_FILTER: Row(h.TryFilterRequest, FilterHandlers.try_filter),
    Code.SLUICE_GROUP_LANES: Row(h.ConsumerGroupRequest, FilterHandlers.report_lanes),
    # --- the broker, its clients and its files
    Code.UPDATE_BROKER_CONFIG: Row(None, Admin.change_config),
    Code.GET_BROKER_CONFIG: Row(None, Admin.config),
    Code.GET_BROKER_RUNTIME_INFO: Row(None, Admin.runtime_info),
    Code.GET_TOPIC_STATS_INFO: Row(h.TopicRequest, Admin.topic_stats),
    Code.GET_CONSUMER_CONNECTION_LIST: Row(h.ConsumerGroupRequest, Admin.consumer_connections),
    Code.GET_PRODUCER_CONNECTION_LIST: Row(
        h.GetProducerConnectionsRequest, Admin.producer_connections
    ),
    Code.GET_CONSUME_STATS: Row(h.GetConsumeStatsRequest, Admin.consume_stats),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: Row(h.TopicRequest, Admin.groups_of_topic),
    Code.GET_CONSUMER_RUNNING_INFO: Row(h.GetConsumerRunningInfoRequest, Relays.running_info),
    Code.CONSUME_MESSAGE_DIRECTLY: Row(h.ConsumeMessageDirectlyRequest, Relays.consume_directly),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: Row(
        h.GetConsumerStatusRequest, Relays.consumer_status
    ),
    Code.CLEAN_EXPIRED_CONSUMEQUEUE: Row(None, Cleaning.clean_queues),
    Code.CLEAN_UNUSED_TOPIC: Row(None, Cleaning.clean_topics),
    Code.DELETE_EXPIRED_COMMITLOG: Row(None, Cleaning.clean_log),
    # --- replicas
    Code.SLUICE_REPLICA_STATUS: Row(None, ReplicaAdmin.status),
    Code.SLUICE_SWITCH_MASTER: Row(None, ReplicaAdmin.switch),
    Code.SLUICE_ELECT_MASTER: Row(None, ReplicaAdmin.elect),
    Code.NOTIFY_MIN_BROKER_ID_CHANGE: Row(r.SmallestIdChangedRequest, ReplicaRequests.smallest_id),
    Code.EXCHANGE_BROKER_HA_INFO: Row(r.ExchangeReplicaRequest, ReplicaRequests.exchange),
    Code.GET_BROKER_HA_STATUS: Row(None, ReplicaRequests.ha_status),
    Code.RESET_MASTER_FLUSH_OFFSET: Row(None, ReplicaRequests.reset_flushed),
    Code.SLUICE_FOLLOW_STATE: Row(r.FollowStateRequest, ReplicaRequests.follow_state),
    Code.SLUICE_HAND_BACK: Row(None, ReplicaRequests.hand_back),
    Code.SLUICE_SPEAK_FOR: Row(r.SpeakForRequest, ReplicaRequests.speak_for),
    # --- access rules
    Code.UPDATE_AND_CREATE_ACL_CONFIG: Row(h.UpdateAccountRequest, AccessAdmin.update_account),
    Code.DELETE_ACL_CONFIG: Row(h.DeleteAccountRequest, AccessAdmin.delete_account),
    Code.GET_BROKER_CLUSTER_ACL_INFO: Row(None, AccessAdmin.versions),
    Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: Row(
        h.UpdateWhiteAddressesRequest, AccessAdmin.update_white_addresses
    ),
    Code.GET_BROKER_CLUSTER_ACL_CONFIG: Row(None, AccessAdmin.listed),
    Code.SLUICE_ACCESS_STATUS: Row(None, AccessAdmin.status),
    # --- lists and counts over all, and what only other brokers have
    Code.VIEW_BROKER_STATS_DATA: Row(h.StatisticsRequest, Statistics.view),
    Code.GET_BROKER_CONSUME_STATS: Row(h.GetConsumeStatsOfBrokerRequest, Statistics.of_broker),
    Code.GET_ALL_PRODUCER_INFO: Row(None, Statistics.all_producers),
    Code.QUERY_TOPICS_BY_CONSUMER: Row(h.GetGroupConfigRequest, Statistics.topics_of_group),
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER: Row(h.TopicGroupRequest, Statistics.subscription),
    Code.UPDATE_AND_GET_GROUP_FORBIDDEN: Row(h.GroupForbiddenRequest, Statistics.forbidden),
    Code.POP_ROLLBACK: Row(None, Refused.nothing_to_move),
    **{code: Row(None, Refused.refuse) for code in SENTENCES},
}
"""A handler belongs to the family of its class; see `families`."""


def families(b: BrokerState) -> tuple[object, ...]:
    """What has handlers in one broker."""
    settings, topics, groups, offsets, store = b.settings, b.topics, b.groups, b.offsets, b.store
    clock, consumers = b.clock, b.consumers
    admin = Admin(
        settings, topics, offsets, consumers, b.producers, store, b.runtime, b.rates, b.watch,
        b.in_flight.unfinished, b.files, clock,
    )  # fmt: skip
    return (
        b.send, b.retries, b.replies, b.epochs, b.pull, b.cleaning, b.assignments,
        b.filter_watch, b.in_flight,
        Pop(
            settings, topics, groups, offsets, b.checkpoints, b.order, b.polls, store, b.steady,
            b.background, b.delivered, b.request_filters, b.random, consumers,
            b.assignments.admit,
        ),
        Acknowledge(
            topics, offsets, b.checkpoints, b.order, store, b.turns, b.steady, b.delivered,
        ),
        TransactionRequests(settings, b.transactions, clock, b.access),
        HeartbeatHandlers(settings, topics, groups, consumers, b.producers, clock),
        Queries(settings, topics, groups, offsets, b.locks, consumers, store, b.access),
        Metadata(settings, topics, groups, offsets, store, b.turns.commit),
        admin, Refused(),
        Statistics(
            settings, topics, groups, offsets, consumers, b.producers, b.runtime, admin,
        ),
        GroupOffsetHandlers(
            settings, topics, groups, offsets, consumers, b.polls, store, clock, b.turns,
        ),
        Relays(settings, topics, groups, consumers, store, b.questions),
        DelayRequests(settings, topics, b.delayed, b.intake, b.steady),
        AccessAdmin(settings, b.guard, b.files, clock, b.offload, b.deferred),
        ReplicaAdmin(settings, b.in_sync, b.steering, lambda: store.written_offset, b.behind),
        ReplicaRequests(settings, store, b.in_sync, b.side),
    )  # fmt: skip


def dispatcher(b: BrokerState) -> Dispatcher:
    """Requests to answers, past the guard when there is one."""
    by_class = {type(family).__name__: family for family in families(b)}

    def bound(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        return MethodType(function, by_class[function.__qualname__.partition(".")[0]])

    def handler(row: Row) -> Handler:
        header, handle = row.header, bound(row.handler)
        if header is None:
            return handle
        return lambda command, peer: handle(decode_header(header, command.fields), command, peer)

    handlers = {int(code): handler(row) for code, row in TABLE.items()}
    quick = {int(code): bound(row.quick) for code, row in TABLE.items() if row.quick is not None}
    if b.in_sync is not None and b.settings.is_gated:
        handlers, quick = while_enough(b.in_sync, handlers, quick)
    if b.settings.is_read_only:
        quick = {}
        handlers |= readonly.refusals(b.settings.store.root)
    if b.steering is not None:
        handlers = b.steering.handlers(handlers, is_slave=b.settings.is_slave)
    elif b.settings.is_slave:
        handlers |= refusals(b.settings, handlers)
    if b.settings.is_slave:
        quick = {}
    if b.guard is not None or b.steering is not None:  # each is looked at, or passed on
        quick.pop(Code.HEART_BEAT, None)
        quick.pop(Code.PULL_MESSAGE, None)
    return Dispatcher(
        handlers,
        quick=quick,
        run=_compiled(b, quick),
        deferred=b.deferred,
        before=b.guard.before if b.guard is not None else None,
        admit=b.guard.admit if b.guard is not None else None,
        with_messages=WITH_MESSAGES,
        shares=b.shares,
    )


def _compiled(b: BrokerState, quick: dict[int, Quick]) -> Run | None:
    """What the compiled engine takes, where sends are plain."""
    is_plain = quick.get(Code.SEND_MESSAGE_V2) == b.send.send_quick and b.guard is None
    sends = b.send.compiled
    if not is_plain or sends is None:
        return None
    quick.pop(Code.PULL_MESSAGE, None)
    return b.pull.make_frame_runner(sends.run)
