"""The dispatch table of a broker: for each request code its header, its handler and its fast path.

A row with a header class has a handler `(header, command, peer)`, for which the header is decoded
here. The handler of a row without a header class is called with `(command, peer)`, and reads fields
or body itself. A fast path takes common requests without creating a `Command` (`net/dispatch.py`).

The right that a code requires is declared in `acl.verdict.NEEDS` instead, because the name server
uses the same table, and because it covers codes that have no handler. A code that is not in the
table is answered with REQUEST_CODE_NOT_SUPPORTED.
"""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Final, NamedTuple

from sluicemq.broker.admin import readonly
from sluicemq.broker.admin.access import AccessHandlers
from sluicemq.broker.admin.metadata import MetadataHandlers
from sluicemq.broker.admin.queries import QueryHandlers
from sluicemq.broker.admin.refused import ALTERNATIVES, UnsupportedHandlers
from sluicemq.broker.admin.retention import RetentionHandlers
from sluicemq.broker.admin.statistics import StatisticsHandlers
from sluicemq.broker.admin.status import StatusHandlers
from sluicemq.broker.consume.filter_diagnostics import FilterHandlers
from sluicemq.broker.consume.heartbeat import HeartbeatHandlers
from sluicemq.broker.consume.offset_admin import GroupOffsetHandlers
from sluicemq.broker.consume.pull import PullHandlers
from sluicemq.broker.epochs.epochs import Epochs
from sluicemq.broker.pop.acknowledge import InFlightHandlers, PopAckHandlers
from sluicemq.broker.pop.assignment import Assignments
from sluicemq.broker.pop.pop import PopHandlers
from sluicemq.broker.produce.relays import RelayHandlers, ReplyHandlers
from sluicemq.broker.produce.send import SendHandlers
from sluicemq.broker.produce.send_back import SendBackHandlers
from sluicemq.broker.replication.requests import (
    ReplicaRequests,
    make_slave_handlers,
    refuse_unsafe_sends,
)
from sluicemq.broker.replication.status import ReplicaAdmin
from sluicemq.broker.state import BrokerState
from sluicemq.broker.transactions.requests import TransactionRequests
from sluicemq.broker.waiting.requests import DelayHandlers
from sluicemq.net.dispatch import Dispatcher, FastHandler, Handler, Outcome, RunEngine
from sluicemq.net.limits import CODES_WITH_MESSAGES
from sluicemq.wire import headers as h
from sluicemq.wire import popping as p
from sluicemq.wire import replicas as r
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import decode_header
from sluicemq.wire.staging import CommitEpochRequest


class Row(NamedTuple):
    """How the requests of one code are handled."""

    header: type | None
    """The class of the header that the handler gets; None if it gets no header."""
    handler: Callable[..., Outcome]
    """A method of one of the classes in `make_handler_objects`."""
    fast_path: Callable[..., bool | bytes] | None = None
    """A method `(header, body, peer)` that handles common requests. It returns False for others,
    which go to the handler."""


TABLE: Final[dict[int, Row]] = {
    # --- producers
    Code.SEND_MESSAGE: Row(h.SendMessageRequest, SendHandlers.send),
    Code.SEND_MESSAGE_V2: Row(
        h.SendMessageRequestV2, SendHandlers.send, SendHandlers.send_fast_path
    ),
    Code.SEND_BATCH_MESSAGE: Row(h.SendMessageRequestV2, SendHandlers.send_batch),
    Code.SEND_REPLY_MESSAGE: Row(h.SendMessageRequest, ReplyHandlers.send_reply),
    Code.SEND_REPLY_MESSAGE_V2: Row(h.SendMessageRequestV2, ReplyHandlers.send_reply),
    Code.CONSUMER_SEND_MSG_BACK: Row(h.SendBackRequest, SendBackHandlers.send_back),
    Code.END_TRANSACTION: Row(h.EndTransactionRequest, TransactionRequests.end_transaction),
    Code.SLUICE_LIST_TRANSACTIONS: Row(h.ListTransactionsRequest, TransactionRequests.list_open),
    Code.SLUICE_RESOLVE_TRANSACTION: Row(h.ResolveTransactionRequest, TransactionRequests.resolve),
    Code.SLUICE_COMMIT_EPOCH: Row(CommitEpochRequest, Epochs.commit_epoch),
    Code.RECALL_MESSAGE: Row(h.RecallMessageRequest, DelayHandlers.recall),
    Code.SLUICE_LIST_DELAYED: Row(h.ListDelayedRequest, DelayHandlers.list_waiting),
    Code.SLUICE_CANCEL_DELAYED: Row(h.CancelDelayedRequest, DelayHandlers.cancel),
    Code.GET_ALL_DELAY_OFFSET: Row(None, DelayHandlers.get_delay_offsets),
    Code.GET_TIMER_CHECK_POINT: Row(None, DelayHandlers.get_timer_checkpoint),
    Code.GET_TIMER_METRICS: Row(None, DelayHandlers.get_timer_metrics),
    # --- consumers
    Code.PULL_MESSAGE: Row(None, PullHandlers.pull, PullHandlers.pull_fast_path),
    Code.LITE_PULL_MESSAGE: Row(None, PullHandlers.pull),
    Code.POP_MESSAGE: Row(p.PopMessageRequest, PopHandlers.pop),
    Code.PEEK_MESSAGE: Row(p.PeekMessageRequest, PopHandlers.peek),
    Code.NOTIFICATION: Row(p.NotificationRequest, PopHandlers.notify),
    Code.POLLING_INFO: Row(p.PollingInfoRequest, PopHandlers.count_parked),
    Code.ACK_MESSAGE: Row(p.AckMessageRequest, PopAckHandlers.acknowledge),
    Code.BATCH_ACK_MESSAGE: Row(None, PopAckHandlers.acknowledge_batch),
    Code.CHANGE_MESSAGE_INVISIBLETIME: Row(
        p.ChangeInvisibleTimeRequest, PopAckHandlers.change_invisible_time
    ),
    Code.SLUICE_IN_FLIGHT: Row(p.InFlightRequest, InFlightHandlers.list_in_flight),
    Code.HEART_BEAT: Row(None, HeartbeatHandlers.heartbeat, HeartbeatHandlers.heartbeat_fast_path),
    Code.UNREGISTER_CLIENT: Row(h.UnregisterClientRequest, HeartbeatHandlers.unregister),
    Code.GET_CONSUMER_LIST_BY_GROUP: Row(h.ConsumerGroupRequest, HeartbeatHandlers.list_members),
    Code.CHECK_CLIENT_CONFIG: Row(None, HeartbeatHandlers.check_subscription),
    Code.QUERY_ASSIGNMENT: Row(None, Assignments.query_assignment),
    Code.SET_MESSAGE_REQUEST_MODE: Row(None, Assignments.set_mode),
    Code.GET_ALL_MESSAGE_REQUEST_MODE: Row(None, Assignments.list_modes),
    Code.QUERY_CONSUMER_OFFSET: Row(
        h.QueryConsumerOffsetRequest, QueryHandlers.query_committed_offset
    ),
    Code.UPDATE_CONSUMER_OFFSET: Row(h.UpdateConsumerOffsetRequest, QueryHandlers.commit_offset),
    Code.LOCK_BATCH_MQ: Row(None, QueryHandlers.lock_queues),
    Code.UNLOCK_BATCH_MQ: Row(None, QueryHandlers.unlock_queues),
    # --- queues and messages
    Code.GET_MAX_OFFSET: Row(h.GetMaxOffsetRequest, QueryHandlers.get_max_offset),
    Code.GET_MIN_OFFSET: Row(h.QueueRequest, QueryHandlers.get_min_offset),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: Row(
        h.SearchOffsetRequest, QueryHandlers.search_offset_by_time
    ),
    Code.GET_EARLIEST_MSG_STORETIME: Row(h.QueueRequest, QueryHandlers.get_earliest_time),
    Code.QUERY_MESSAGE: Row(h.QueryMessageRequest, QueryHandlers.query_messages),
    Code.VIEW_MESSAGE_BY_ID: Row(h.ViewMessageRequest, QueryHandlers.view_message),
    # --- topics and groups
    Code.UPDATE_AND_CREATE_TOPIC: Row(h.CreateTopicRequest, MetadataHandlers.create_topic),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: Row(None, MetadataHandlers.create_topics),
    Code.DELETE_TOPIC_IN_BROKER: Row(h.TopicRequest, MetadataHandlers.delete_topic),
    Code.GET_ALL_TOPIC_CONFIG: Row(h.GetAllTopicsRequest, MetadataHandlers.list_topics),
    Code.GET_TOPIC_CONFIG: Row(h.GetTopicConfigRequest, MetadataHandlers.get_topic),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: Row(None, MetadataHandlers.list_system_topics),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Row(None, MetadataHandlers.create_group),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: Row(None, MetadataHandlers.create_groups),
    Code.DELETE_SUBSCRIPTIONGROUP: Row(h.DeleteGroupRequest, MetadataHandlers.delete_group),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Row(h.GetAllGroupsRequest, MetadataHandlers.list_groups),
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: Row(h.GetGroupConfigRequest, MetadataHandlers.get_group),
    Code.GET_ALL_CONSUMER_OFFSET: Row(None, MetadataHandlers.list_offsets),
    # --- offsets, filters and lanes of groups
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
    Code.UPDATE_BROKER_CONFIG: Row(None, StatusHandlers.change_config),
    Code.GET_BROKER_CONFIG: Row(None, StatusHandlers.get_config),
    Code.GET_BROKER_RUNTIME_INFO: Row(None, StatusHandlers.get_runtime_info),
    Code.GET_TOPIC_STATS_INFO: Row(h.TopicRequest, StatusHandlers.get_topic_stats),
    Code.GET_CONSUMER_CONNECTION_LIST: Row(
        h.ConsumerGroupRequest, StatusHandlers.list_consumer_connections
    ),
    Code.GET_PRODUCER_CONNECTION_LIST: Row(
        h.GetProducerConnectionsRequest, StatusHandlers.list_producer_connections
    ),
    Code.GET_CONSUME_STATS: Row(h.GetConsumeStatsRequest, StatusHandlers.get_consume_stats),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: Row(h.TopicRequest, StatusHandlers.list_groups_of_topic),
    Code.GET_CONSUMER_RUNNING_INFO: Row(
        h.GetConsumerRunningInfoRequest, RelayHandlers.get_running_info
    ),
    Code.CONSUME_MESSAGE_DIRECTLY: Row(
        h.ConsumeMessageDirectlyRequest, RelayHandlers.consume_directly
    ),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: Row(
        h.GetConsumerStatusRequest, RelayHandlers.get_consumer_offsets
    ),
    Code.CLEAN_EXPIRED_CONSUMEQUEUE: Row(None, RetentionHandlers.clean_queues),
    Code.CLEAN_UNUSED_TOPIC: Row(None, RetentionHandlers.clean_topics),
    Code.DELETE_EXPIRED_COMMITLOG: Row(None, RetentionHandlers.clean_log),
    # --- replicas
    Code.SLUICE_REPLICA_STATUS: Row(None, ReplicaAdmin.status),
    Code.SLUICE_SWITCH_MASTER: Row(None, ReplicaAdmin.switch),
    Code.SLUICE_ELECT_MASTER: Row(None, ReplicaAdmin.elect),
    Code.NOTIFY_MIN_BROKER_ID_CHANGE: Row(
        r.MinBrokerIdChangedRequest, ReplicaRequests.change_min_broker_id
    ),
    Code.EXCHANGE_BROKER_HA_INFO: Row(r.ExchangeHaInfoRequest, ReplicaRequests.exchange_ha_info),
    Code.GET_BROKER_HA_STATUS: Row(None, ReplicaRequests.ha_status),
    Code.RESET_MASTER_FLUSH_OFFSET: Row(None, ReplicaRequests.reset_flushed_offset),
    Code.SLUICE_FOLLOW_STATE: Row(r.FollowStateRequest, ReplicaRequests.follow_state),
    Code.SLUICE_HAND_BACK: Row(None, ReplicaRequests.hand_back),
    Code.SLUICE_SPEAK_FOR: Row(r.ForwardedForRequest, ReplicaRequests.set_forwarded_client),
    # --- access rules
    Code.UPDATE_AND_CREATE_ACL_CONFIG: Row(h.UpdateAccountRequest, AccessHandlers.update_account),
    Code.DELETE_ACL_CONFIG: Row(h.DeleteAccountRequest, AccessHandlers.delete_account),
    Code.GET_BROKER_CLUSTER_ACL_INFO: Row(None, AccessHandlers.get_versions),
    Code.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: Row(
        h.UpdateWhiteAddressesRequest, AccessHandlers.update_white_addresses
    ),
    Code.GET_BROKER_CLUSTER_ACL_CONFIG: Row(None, AccessHandlers.list_rules),
    Code.SLUICE_ACCESS_STATUS: Row(None, AccessHandlers.get_status),
    # --- statistics, and requests that this broker refuses
    Code.VIEW_BROKER_STATS_DATA: Row(h.StatisticsRequest, StatisticsHandlers.view_counter),
    Code.GET_BROKER_CONSUME_STATS: Row(
        h.GetConsumeStatsOfBrokerRequest, StatisticsHandlers.get_consume_stats_of_broker
    ),
    Code.GET_ALL_PRODUCER_INFO: Row(None, StatisticsHandlers.list_producers),
    Code.QUERY_TOPICS_BY_CONSUMER: Row(
        h.GetGroupConfigRequest, StatisticsHandlers.list_topics_of_group
    ),
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER: Row(
        h.TopicGroupRequest, StatisticsHandlers.get_subscription
    ),
    Code.UPDATE_AND_GET_GROUP_FORBIDDEN: Row(
        h.GroupForbiddenRequest, StatisticsHandlers.update_forbidden
    ),
    Code.POP_ROLLBACK: Row(None, UnsupportedHandlers.accept_pop_export),
    **{code: Row(None, UnsupportedHandlers.refuse) for code in ALTERNATIVES},
}


def make_handler_objects(core: BrokerState) -> tuple[object, ...]:
    """Return the objects whose methods answer requests, one of each class that `TABLE` names.

    Some are components of `core`. The others are created here.
    """
    settings = core.settings
    topics = core.topics
    store = core.store
    return (
        # Components that answer requests themselves.
        core.send,
        core.retries,
        core.replies,
        core.epochs,
        core.pull,
        core.retention,
        core.assignments,
        core.filter_watch,
        core.in_flight,
        # Handlers over the components.
        *_make_consumer_handlers(core),
        *_make_admin_handlers(core),
        TransactionRequests(settings, core.transactions, core.clock, core.access),
        RelayHandlers(core.context, consumers=core.consumers, client_requests=core.client_requests),
        DelayHandlers(settings, topics, core.delayed, core.intake, core.steady_clock),
        ReplicaAdmin(
            settings,
            core.in_sync,
            core.role_controller,
            lambda: store.written_offset,
            core.replica_lag,
        ),
        ReplicaRequests(settings, store, core.in_sync, core.replication_side),
    )


def _make_consumer_handlers(core: BrokerState) -> Iterator[object]:
    """Yield the handlers of requests that consumers send."""
    yield PopHandlers(
        core.context,
        checkpoints=core.checkpoints,
        order=core.order,
        polls=core.polls,
        delivered=core.delivered,
        filters=core.request_filters,
        random=core.random,
        consumers=core.consumers,
        admit=core.assignments.admit_pop,
    )
    yield PopAckHandlers(
        core.context,
        checkpoints=core.checkpoints,
        order=core.order,
        delivered=core.delivered,
    )
    yield HeartbeatHandlers(core.context, consumers=core.consumers, producers=core.producers)
    yield QueryHandlers(
        core.context, locks=core.locks, consumers=core.consumers, access=core.access
    )


def _make_admin_handlers(core: BrokerState) -> Iterator[object]:
    """Yield the handlers of requests that tools and consoles send."""
    status = StatusHandlers(
        core.context,
        consumers=core.consumers,
        producers=core.producers,
        runtime=core.runtime,
        rates=core.rates,
        unread_monitor=core.unread_monitor,
        unfinished=core.in_flight.count_unfinished,
    )
    yield status
    yield StatisticsHandlers(
        core.context,
        consumers=core.consumers,
        producers=core.producers,
        runtime=core.runtime,
        status=status,
    )
    yield GroupOffsetHandlers(core.context, consumers=core.consumers, polls=core.polls)
    yield MetadataHandlers(core.context)
    yield AccessHandlers(
        core.settings, core.guard, core.files, core.clock, core.offload, core.handle_outcome
    )
    yield UnsupportedHandlers()


def make_dispatcher(core: BrokerState) -> Dispatcher:
    """Return a dispatcher that answers the requests of `TABLE` with the components of `core`.

    A slave and a read-only broker refuse the requests that they must not handle. A slave with
    failover passes requests on to its master. With access control, each request is checked first.
    """
    handlers, fast_paths = _bind_table(core)

    # What a broker in this role must refuse, or handle in another way.
    if core.in_sync is not None and core.settings.is_gated:
        handlers, fast_paths = refuse_unsafe_sends(core.in_sync, handlers, fast_paths)
    if core.settings.is_read_only:
        fast_paths = {}
        handlers |= readonly.make_refusing_handlers(core.settings.store.root)
    if core.role_controller is not None:
        handlers = core.role_controller.handlers(handlers, is_slave=core.settings.is_slave)
    elif core.settings.is_slave:
        handlers |= make_slave_handlers(core.settings, handlers)
    if core.settings.is_slave:
        fast_paths = {}
    if core.guard is not None or core.role_controller is not None:
        # Each of these requests must be checked, or be passed on to the master.
        fast_paths.pop(Code.HEART_BEAT, None)
        fast_paths.pop(Code.PULL_MESSAGE, None)

    return Dispatcher(
        handlers,
        fast_handlers=fast_paths,
        run_engine=_compile(core, fast_paths),
        handle_outcome=core.handle_outcome,
        authorize=core.guard.refuse_command if core.guard is not None else None,
        authorize_fast=core.guard.admits_send if core.guard is not None else None,
        codes_with_messages=CODES_WITH_MESSAGES,
        scheduler=core.scheduler,
    )


def _bind_table(core: BrokerState) -> tuple[dict[int, Handler], dict[int, FastHandler]]:
    """Return two dicts by request code: the handlers of `TABLE`, and its fast paths.

    `TABLE` has plain functions of classes. Each is bound to the object of its class here. A handler
    with a header class gets the decoded header as its first argument. Only codes with a fast path
    are in the second dict.
    """
    objects_by_class = {
        type(handler_object).__name__: handler_object
        for handler_object in make_handler_objects(core)
    }

    def bind(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        class_name, _, _ = function.__qualname__.partition(".")  # "Class.method"
        return MethodType(function, objects_by_class[class_name])

    handlers: dict[int, Handler] = {}
    fast_paths: dict[int, FastHandler] = {}
    for code, table_row in TABLE.items():
        handle = bind(table_row.handler)
        if table_row.header is not None:
            handle = _decode_before(handle, table_row.header)
        handlers[int(code)] = handle
        if table_row.fast_path is not None:
            fast_paths[int(code)] = bind(table_row.fast_path)
    return handlers, fast_paths


def _decode_before(handle: Callable[..., Outcome], header_class: type[Any]) -> Handler:
    """Return a handler that decodes the fields of a request and passes the header to `handle`."""
    return lambda command, peer: handle(decode_header(header_class, command.fields), command, peer)


def _compile(core: BrokerState, fast_paths: dict[int, FastHandler]) -> RunEngine | None:
    """Return the entry point of the compiled engine, or None if it cannot be used.

    The compiled engine handles plain sends and pulls in native code. If it is used, the fast path
    of pulls is removed from `fast_paths`. It cannot be used with access control, if sends have
    another fast path or none, or if the compiled modules are not installed.
    """
    is_plain = (
        fast_paths.get(Code.SEND_MESSAGE_V2) == core.send.send_fast_path and core.guard is None
    )
    sends = core.send.compiled
    if not is_plain or sends is None:
        return None
    fast_paths.pop(Code.PULL_MESSAGE, None)
    return core.pull.make_frame_runner(sends.run)
