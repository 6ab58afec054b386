"""SendMessage, EndTransaction and RecallMessage: the calls of producers (spec/grpc.md §4).

    one message            SEND_MESSAGE_V2 (310); with a broker in this process, on its fast path
    several messages       SEND_BATCH_MESSAGE (320), stored all or nothing
    end of a transaction   END_TRANSACTION (37), to the broker that the transaction id names
    recall                 RECALL_MESSAGE (370), to the broker that the recall handle names

A message with a message group goes to the queue that RocketMQ's proxy selects too, so that
producers at both proxies keep one order. Any other message goes round robin, avoiding brokers that
were slow or unreachable. The proxy does not retry; clients do.

A transaction id contains the location of the prepared message:

    message id, broker, offset in the queue of prepared messages, position in the commit log

The client sends it back, to this proxy or to another one, before or after a restart, so no proxy
stores transactions. RocketMQ's proxy uses the message id alone and keeps the rest for 30 s.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final, NamedTuple

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call as BrokerCall
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import list_write_queues
from sluicemq.client.core.messages import OutgoingMessage, join_batch
from sluicemq.client.core.requests import SUCCESS, SendStatus, expect_success, header_fields
from sluicemq.client.core.sending import FIRST_QUEUE_BITS, QueueChooser
from sluicemq.client.core.transactions import (
    PreparedMessageLocation,
    TransactionState,
    locate_prepared,
    make_end_request,
)
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import ConnectionLostError, RequestTimeoutError
from sluicemq.model.bodies import COMPRESSED
from sluicemq.model.ids import Host, java_hash, parse_recall_handle
from sluicemq.model.message import (
    CHECK_IMMUNITY,
    KEYS,
    PREPARED,
    PRODUCER_GROUP,
    RECONSUME_TIME,
    SHARDING_KEY,
    TAGS,
    TIMER_PROPERTIES,
    TRAN_MSG,
    UNIQ_KEY,
)
from sluicemq.model.properties import (
    BORN_HOST,
    BORN_TIMESTAMP,
    LITE_TOPIC,
    PRIORITY,
    TRACE_CONTEXT,
)
from sluicemq.model.topic import MessageQueue, TopicConfig, TopicRoute
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, master_addresses
from sluicemq.proxy.clients import OK, Client
from sluicemq.proxy.convert import message_type_of, to_ms
from sluicemq.proxy.limits import (
    Refusal,
    StatusError,
    check_delivery_time,
    check_lite_topic,
    check_message_texts,
    check_recovery_time,
    check_type,
    checked_topic,
    to_stored_body,
)
from sluicemq.proxy.messages import Code, MessageType
from sluicemq.proxy.routes import topic_type
from sluicemq.record.codec import format_property_text
from sluicemq.wire import headers
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

DELIVERY_TIME_PROPERTY: Final = TIMER_PROPERTIES[-1]
"""The property with the delivery time of a message, in ms since 1970."""
CACHED_TOPICS_MAX: Final = 10_000
"""The number of cached topics at which the cache is cleared."""
_TRANSACTION: Final = int(MessageType.TRANSACTION)
_CODE_BY_UNSAFE_STATUS: Final[Mapping[int, Code]] = {
    SendStatus.FLUSH_DISK_TIMEOUT.value: Code.MASTER_PERSISTENCE_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT.value: Code.SLAVE_PERSISTENCE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE.value: Code.HA_NOT_AVAILABLE,
}
"""The codes for messages that are stored, but may be lost after a crash."""
_STATE_BY_RESOLUTION: Final[Mapping[int, TransactionState]] = {
    m.TransactionResolution.COMMIT: TransactionState.COMMIT,
    m.TransactionResolution.ROLLBACK: TransactionState.ROLLBACK,
}


class TopicQueues(NamedTuple):
    """What a send needs to know about a topic: its message type, writable queues and masters.

    It is derived from `route` and `config`, and valid while these are current. `masters` has the
    address of each broker's master.
    """

    route: TopicRoute
    config: TopicConfig | None
    message_type: str
    queues: Sequence[MessageQueue]
    masters: dict[str, str]


class Sending:
    """The service object of SendMessage, EndTransaction and RecallMessage."""

    def __init__(self, backend: Backend, limits: ProxyLimits) -> None:
        """Create the object that serves sends, to the brokers of `backend` and within `limits`."""
        self._backend = backend
        self._limits = limits
        self._clock = backend.clock
        self._chooser = QueueChooser(partial(Random().getrandbits, FIRST_QUEUE_BITS))
        self._topics: dict[str, TopicQueues] = {}  # by name; see `_find_topic`

    # -------------------------------------------------------------------------------- sends

    def send_message(
        self, client: Client, request: m.SendMessageRequest, call: Call
    ) -> Conversation[m.SendMessageResponse]:
        """Serve SendMessage: send one message or a batch, and return an entry for each. Hot path.

        Raises StatusError if there is no message, if the topic has no writable queue, or if a
        message breaks a limit. Raises RouteNotFoundError if the topic does not exist, and
        SluiceError if the broker fails.
        """
        messages = request.messages
        if not messages:
            raise StatusError(Refusal.NO_MESSAGE)
        topic_queues = yield from self._find_topic(messages[0].topic)
        began_ms = self._clock.now_ms()
        is_batch = len(messages) > 1  # a batch is stored as one unit, in one queue
        peer = call.connection.peer.remote
        outgoing_messages = [
            to_outgoing_message(message, topic_queues.message_type, peer, began_ms, self._limits)
            for message in messages
        ]
        outgoing = outgoing_messages[0]
        if is_batch:
            outgoing = to_batch(messages, outgoing_messages)

        topic = outgoing.topic
        began_s = self._clock.monotonic_s()
        queue = self._choose_queue(topic_queues, outgoing.sharding_key, began_s)
        born_ms = to_ms(messages[0].system_properties.born_timestamp) or began_ms
        command = requests.send(topic, queue, outgoing, born_ms, batch=is_batch, is_brief=is_batch)
        address = topic_queues.masters[queue.broker]
        try:
            response = yield BrokerCall(address, command)
        except (ConnectionLostError, RequestTimeoutError):
            self._chooser.record_failure(queue.broker, self._clock.monotonic_s())
            raise
        now_s = self._clock.monotonic_s()
        self._chooser.record_latency(queue.broker, now_s - began_s, now_s)

        transaction_id = header_fields(response).get("transactionId", "")
        if outgoing.sys_flag & PREPARED and response.code == SUCCESS:
            transaction_id = _make_transaction_id(response, queue, outgoing, address)
        message_ids = [message.message_id for message in outgoing_messages]
        return to_send_response(response, message_ids, transaction_id, address)

    def _find_topic(self, resource: m.Resource) -> Conversation[TopicQueues]:
        """Return the route, the settings and the writable queues of a topic. Hot path.

        The result is cached until the route or the settings of the topic change. Raises StatusError
        (ILLEGAL_TOPIC) for an invalid name, and RouteNotFoundError if the topic does not exist.
        """
        name = resource.name
        cached = self._topics.get(name)
        if cached is None:  # a cached name was checked before
            checked_topic(resource)
        route = yield from self._backend.fetch_route(name)
        config = yield from self._backend.fetch_topic_config(name)
        # The backend returns the same objects until their values change.
        if cached is not None and cached.route is route and cached.config is config:
            return cached

        masters = master_addresses(route)
        queues = [queue for queue in list_write_queues(name, route) if queue.broker in masters]
        topic_queues = TopicQueues(route, config, topic_type(config), sorted(queues), masters)
        if len(self._topics) >= CACHED_TOPICS_MAX:
            self._topics.clear()
        self._topics[name] = topic_queues
        return topic_queues

    def _choose_queue(
        self, topic_queues: TopicQueues, group: str | None, now_s: float
    ) -> MessageQueue:
        """Return the queue to send a message to.

        All messages of the message group `group` go to one queue. Messages without a group (None or
        "") go to all queues in turn, but not to brokers that were slow or failed recently. `now_s`
        is the monotonic time. Raises StatusError (FORBIDDEN) if the topic has no writable queue.
        """
        queues = topic_queues.queues
        if not queues:
            raise StatusError(Refusal.NO_WRITABLE_QUEUE)
        if group:
            return queues[consistent_hash(java_hash(group), len(queues))]
        return self._chooser.choose(queues, now_s)

    # ------------------------------------------------------------------ transactions, recalls

    def end_transaction(
        self, client: Client, request: m.EndTransactionRequest, call: Call
    ) -> Conversation[m.EndTransactionResponse]:
        """Serve EndTransaction: commit or roll back a transaction.

        An unknown state, and an answer to the broker's check of a transaction, are sent one-way,
        because the broker does not respond to them. Raises RequestError if the broker refuses, and
        StatusError for an invalid transaction id.
        """
        location = parse_transaction_id(request.transaction_id, checked_topic(request.topic))
        route = yield from self._backend.fetch_route(location.queue.topic)
        address = _master_address(
            master_addresses(route), location.queue.broker, Refusal.TRANSACTION_UNKNOWN
        )
        state = _STATE_BY_RESOLUTION.get(request.resolution, TransactionState.UNKNOWN)
        is_check = request.source == m.TransactionSource.SOURCE_SERVER_CHECK
        command = make_end_request(location, state, is_check=is_check)
        response = yield BrokerCall(address, command)
        if not command.is_oneway:
            expect_success(response, address)
        return m.EndTransactionResponse(status=OK)

    def recall_message(
        self, client: Client, request: m.RecallMessageRequest, call: Call
    ) -> Conversation[m.RecallMessageResponse]:
        """Serve RecallMessage: cancel a delayed message, and return its message id.

        Raises StatusError if the handle is invalid or its broker does not serve the topic, and
        SluiceError if the broker refuses or fails.
        """
        topic_queues = yield from self._find_topic(request.topic)
        if self._limits.checks_type:
            check_type(topic_queues.message_type, "DELAY")
        handle = parse_recall_handle(request.recall_handle)
        if handle is None:
            raise StatusError(Refusal.RECALL_HANDLE)
        topic = request.topic.name
        header = headers.RecallMessageRequest(
            group=topic, topic=topic, recall_handle=request.recall_handle, broker=handle.broker
        )
        address = _master_address(topic_queues.masters, handle.broker, Refusal.RECALL_BROKER)
        response = yield BrokerCall(
            address, requests.make_request(RequestCode.RECALL_MESSAGE, header)
        )
        message_id = header_fields(expect_success(response, address)).get("msgId", handle.unique_id)
        return m.RecallMessageResponse(status=OK, message_id=message_id)


def _make_transaction_id(
    response: Command, queue: MessageQueue, outgoing: OutgoingMessage, address: str
) -> str:
    """Return the id by which any proxy finds the prepared message that a broker has stored."""
    (sent,) = requests.parse_send_response(response, queue, (outgoing.message_id,), address)
    return format_transaction_id(locate_prepared(sent, outgoing.topic))


def _master_address(masters: dict[str, str], broker: str, refusal: Refusal) -> str:
    """Return the address of the broker that an id or handle names.

    Raises StatusError with `refusal` if that broker does not serve the topic.
    """
    if broker not in masters:
        raise StatusError(refusal, f"no broker {broker!r} serves this topic", broker=broker)
    return masters[broker]


# ------------------------------------------------------------------------------------- messages


def to_outgoing_message(
    message: m.Message, expected: str, peer: Host, now_ms: int, limits: ProxyLimits
) -> OutgoingMessage:
    """Return a gRPC message in the form in which it is sent to a broker. Hot path.

    `expected` is the message type that the topic accepts. `peer` is the client's address. `now_ms`
    is the current time, for a message without a creation time. Raises StatusError if the message
    breaks a limit or has another type.
    """
    system = message.system_properties
    topic = message.topic.name
    properties = dict(message.user_properties)
    check_message_texts(properties, system, limits)

    # Properties that each message has, then those of special messages.
    message_id = properties[UNIQ_KEY] = system.message_id
    if system.tag:
        properties[TAGS] = system.tag
    if keys := " ".join(system.keys):
        properties[KEYS] = keys
    properties[PRODUCER_GROUP] = topic  # transaction checks find their producers by it
    properties[RECONSUME_TIME] = str(system.delivery_attempt)
    properties[BORN_HOST] = system.born_host.strip() or str(peer)
    properties[BORN_TIMESTAMP] = str(to_ms(system.born_timestamp) or now_ms)
    if system.message_group:
        properties[SHARDING_KEY] = system.message_group
    if system.trace_context:
        properties[TRACE_CONTEXT] = system.trace_context
    if system.HasField("delivery_timestamp"):
        deliver_ms = to_ms(system.delivery_timestamp)
        check_delivery_time(deliver_ms, now_ms, limits)
        properties[DELIVERY_TIME_PROPERTY] = str(deliver_ms)
    if system.lite_topic:
        check_lite_topic(system.lite_topic)
        properties[LITE_TOPIC] = system.lite_topic
    if system.HasField("priority"):
        properties[PRIORITY] = str(system.priority)
    sys_flag = 0
    if system.message_type == _TRANSACTION:
        sys_flag = PREPARED
        _set_transaction_properties(properties, system, limits)
    if limits.checks_type:  # after all properties are set, because they decide the type
        check_type(expected, message_type_of(properties).name)

    body, compression_flag = to_stored_body(message.body, system.body_encoding, limits)
    return OutgoingMessage(
        topic,
        body,
        format_property_text(properties),
        message_id,
        sys_flag | compression_flag,
        flag=0,
        wait_store_ok=True,
        sharding_key=properties.get(SHARDING_KEY),
    )


def _set_transaction_properties(
    properties: dict[str, str], system: m.SystemProperties, limits: ProxyLimits
) -> None:
    """Add the properties of a message that belongs to a transaction to `properties`.

    `system` has the message's other values. Raises StatusError if the message is delayed, or if its
    time until the first transaction check exceeds the limit.
    """
    if system.HasField("delivery_timestamp"):
        raise StatusError(
            Refusal.TRANSACTION_DELAYED,
            "a message of a transaction cannot be delayed. Remove the delivery timestamp, or "
            "send it without a transaction.",
        )
    properties[TRAN_MSG] = "true"
    if system.HasField("orphaned_transaction_recovery_duration"):
        seconds = system.orphaned_transaction_recovery_duration.seconds
        check_recovery_time(seconds, limits)
        properties[CHECK_IMMUNITY] = str(seconds)


def to_batch(
    messages: Sequence[m.Message], outgoing_messages: Sequence[OutgoingMessage]
) -> OutgoingMessage:
    """Join messages into one batch, which is stored in one queue.

    `outgoing_messages` are the converted `messages`, in the same order. Messages without a message
    group may be in a batch with messages of one group. The batch then goes to the queue of this
    group.

    The batch is marked as compressed only if all bodies have this mark: bodies with the encoding
    GZIP that could not be decompressed.

    Raises StatusError if the messages have different topics or different message groups, or if one
    of them is delayed or belongs to a transaction.
    """
    for message, outgoing in zip(messages, outgoing_messages, strict=True):
        if message.topic != messages[0].topic:
            raise StatusError(Refusal.TOPICS_DIFFER)
        _check_can_be_batched(message, outgoing)

    sharding_keys = (outgoing.sharding_key for outgoing in outgoing_messages)
    groups = list(dict.fromkeys(key for key in sharding_keys if key))
    if len(groups) > 1:
        raise StatusError(
            Refusal.BATCH_OF_GROUPS,
            f"the batch has messages of the groups {groups[0]!r} and {groups[1]!r}, but is stored "
            "in one queue. Send each message group in a batch of its own.",
        )
    joined = join_batch(outgoing_messages, outgoing_messages[0].message_id)
    is_compressed = all(outgoing.sys_flag & COMPRESSED for outgoing in outgoing_messages)
    return replace(
        joined,
        sharding_key=groups[0] if groups else None,
        sys_flag=COMPRESSED if is_compressed else 0,
    )


def _check_can_be_batched(message: m.Message, outgoing: OutgoingMessage) -> None:
    """Raise StatusError if a message is delayed or belongs to a transaction."""
    is_delayed = message.system_properties.HasField("delivery_timestamp")
    if is_delayed or outgoing.sys_flag & PREPARED:
        raise StatusError(
            Refusal.BATCH_OF_SPECIAL,
            "a message that is delayed or of a transaction cannot be in a batch. Send it by "
            "itself.",
        )


# ----------------------------------------------------------------------------------- responses


def _make_status(code: Code, message: str = "") -> m.Status:
    """Return a status with a message, or with the name of the code as message."""
    return m.Status(code=code, message=message or code.name)


def to_send_response(
    response: Command, message_ids: Sequence[str], transaction_id: str, address: str
) -> m.SendMessageResponse:
    """Return the response to a send, with an entry for each message. Hot path.

    `response` is the response of the broker at `address`. `message_ids` are the ids of the messages
    in the order of the request. `transaction_id` is "" unless the message belongs to a transaction.

    All messages of one request are stored together, so they have one status. The status is an error
    if the messages are stored, but may be lost in a crash. Raises RequestError if they are not
    stored.
    """
    if response.code == SUCCESS:
        first_offset = requests.int_field(response, "queueOffset")
        recall_handle = header_fields(response).get("recallHandle")
        send_response = m.SendMessageResponse(status=OK)
        add_entry = send_response.entries.add
        for index, message_id in enumerate(message_ids):
            add_entry(
                status=OK,
                message_id=message_id,
                offset=first_offset + index,
                transaction_id=transaction_id,
                recall_handle=recall_handle,
            )
        return send_response

    code = _CODE_BY_UNSAFE_STATUS.get(response.code)
    if code is None:
        raise requests.request_error(response, address)
    status_message = f"send message failed, sendStatus={SendStatus(response.code).name}"
    entry = m.SendResultEntry(status=_make_status(code, status_message))
    return m.SendMessageResponse(status=_make_status(code), entries=[entry] * len(message_ids))


# ------------------------------------------------------------------- queues, transaction ids

_MULTIPLIER: Final = 2862933555777941757
_MASK: Final = (1 << 64) - 1


def consistent_hash(key: int, buckets: int) -> int:
    """Return the bucket of a key, from 0 to `buckets` - 1, by a jump consistent hash.

    The result equals Guava's Hashing.consistentHash of a Java int. When a bucket is added, keys
    move only into the new bucket, and never between the others. The algorithm is by Lamping and
    Veach.
    """
    state = key & _MASK
    bucket = 0
    while True:
        state = (state * _MULTIPLIER + 1) & _MASK
        draw = (state >> 33) + 1
        following = int((bucket + 1) / (draw / (1 << 31)))
        if following >= buckets or draw == 1 << 31:  # Java's int overflows there
            return bucket
        bucket = following


_TRANSACTION_ID: Final = re.compile(r"(.+) (\S+) (\d{1,18}) (\d{1,18})", re.ASCII)


def format_transaction_id(location: PreparedMessageLocation) -> str:
    """Return the transaction id that a client gets for a message of a transaction.

    It has four parts, separated by spaces: message id, broker name, offset in the queue of prepared
    messages, and position in the commit log.
    """
    return (
        f"{location.message_id} {location.queue.broker} {location.half_queue_offset} "
        f"{location.physical_offset}"
    )


def parse_transaction_id(transaction_id: str, topic: str) -> PreparedMessageLocation:
    """Return where the message of a transaction is stored, from the transaction id.

    The id has the form that `format_transaction_id` gives it, and `topic` is the topic of the
    message. Raises StatusError (INVALID_TRANSACTION_ID) for a malformed id.
    """
    if not transaction_id.strip():
        raise StatusError(Refusal.TRANSACTION_ID_EMPTY)
    match = _TRANSACTION_ID.fullmatch(transaction_id)
    if match is None:
        raise StatusError(
            Refusal.TRANSACTION_UNKNOWN,
            f"the transaction id {transaction_id!r} does not identify a prepared message. Use the "
            "one in the response to the send.",
        )
    message_id, broker, queue_offset, physical_offset = match.groups()
    queue = MessageQueue(topic, broker, 0)
    return PreparedMessageLocation(
        topic, queue, int(queue_offset), int(physical_offset), message_id, message_id
    )
