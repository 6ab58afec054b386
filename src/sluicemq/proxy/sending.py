"""SendMessage, EndTransaction and RecallMessage: what producers ask (spec/grpc.md §4).

    one message      310 by letters: with a broker in this process, its quick way
    several          one remoting batch (320), stored all or nothing
    end, recall      37, 370: to the broker that the client's text names

A message with a group goes to the queue that RocketMQ's proxy chooses, so that producers behind
both keep one order; any other goes round robin, past brokers that were slow or away. The proxy does
not try again: clients do.

A transaction is known by a text that says where its prepared message lies:

    message id, broker, offset in the queue of prepared messages, offset in the log

The client gives it back, to this proxy or to another one, before or after a restart: nobody has to
remember it. RocketMQ's proxy gives the bare message id and keeps the rest for 30 s.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sluicemq.client.core import requests
from sluicemq.client.core.directory import write_queues
from sluicemq.client.core.messages import Outgoing, join
from sluicemq.client.core.requests import SendResult, SendStatus, expect_success, fields_of
from sluicemq.client.core.sending import QueueChooser
from sluicemq.client.core.talks import Call as Ask
from sluicemq.client.core.talks import Talk
from sluicemq.client.core.transactions import (
    HalfPlace,
    TransactionState,
    end_transaction,
    place_of,
)
from sluicemq.errors import ConnectionLostError, RequestTimeoutError
from sluicemq.model.ids import java_hash, parse_recall_handle
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
from sluicemq.model.topic import MessageQueue, TopicConfig, TopicRoute
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, masters_of
from sluicemq.proxy.clients import Client, StatusError
from sluicemq.proxy.limits import (
    BORN_HOST,
    BORN_TIMESTAMP,
    LITE_TOPIC,
    PRIORITY,
    body_of,
    check_delivery,
    check_lite_topic,
    check_recovery,
    check_texts,
    check_type,
    topic_of,
)
from sluicemq.proxy.messages import Code, MessageType
from sluicemq.proxy.routes import type_of
from sluicemq.record.codec import as_text
from sluicemq.wire import headers
from sluicemq.wire.codes import RequestCode

TRACE_CONTEXT: Final = "TRACE_CONTEXT"
DELIVER_MS: Final = TIMER_PROPERTIES[-1]
_STATUSES: Final = {
    SendStatus.OK: Code.OK,
    SendStatus.FLUSH_DISK_TIMEOUT: Code.MASTER_PERSISTENCE_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: Code.SLAVE_PERSISTENCE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: Code.HA_NOT_AVAILABLE,
}
_ALONE: Final = frozenset({MessageType.DELAY.name, MessageType.TRANSACTION.name})
_STATES: Final[Mapping[int, TransactionState]] = {
    m.TransactionResolution.COMMIT: TransactionState.COMMIT,
    m.TransactionResolution.ROLLBACK: TransactionState.ROLLBACK,
}


class Target(NamedTuple):
    """A topic as senders need it; `route` and `config` are what it was made of."""

    route: TopicRoute
    config: TopicConfig | None
    kind: str
    queues: Sequence[MessageQueue]
    masters: dict[str, str]


class Sending:
    """SendMessage, EndTransaction, RecallMessage."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._clock = backend.clock
        self._chooser = QueueChooser()
        self._targets: dict[str, Target] = {}

    # -------------------------------------------------------------------------------- sends

    def send_message(
        self, client: Client, request: m.SendMessageRequest, call: Call
    ) -> Talk[m.SendMessageResponse]:
        """An entry for each message. HOT.

        Raises StatusError (MESSAGE_CORRUPTED, FORBIDDEN "no writable queue", the limits).
        """
        messages = request.messages
        if not messages:
            raise StatusError(Code.MESSAGE_CORRUPTED, "no message to send")
        resource = messages[0].topic
        target = yield from self._target(resource)
        topic, began_ms = resource.name, self._clock.now_ms()
        made: list[Outgoing] = []
        for message in messages:
            if message.topic != resource:
                raise StatusError(Code.MESSAGE_CORRUPTED, "topic in message is not same")
            properties = properties_of(message, str(client.remote), began_ms)
            kind = message_type(properties)
            check_type(target.kind, kind)
            if len(messages) > 1 and kind in _ALONE:
                raise StatusError(
                    Code.BAD_REQUEST, f"a batch has no messages of type {kind}: send it by itself"
                )
            made.append(
                Outgoing(
                    topic, body_of(message), as_text(properties), properties[UNIQ_KEY],
                    sys_flag_of(message), 0, True, sharding_key=properties.get(SHARDING_KEY),
                )
            )  # fmt: skip
        is_batch = len(made) > 1
        outgoing = join(made, made[0].message_id) if is_batch else made[0]
        began_s = self._clock.monotonic_s()
        queue = self._queue(target, {one.sharding_key for one in made}, began_s)
        born_ms = _ms(messages[0].system_properties.born_timestamp) or began_ms
        command = requests.send(topic, queue, outgoing, born_ms, batch=is_batch, is_brief=is_batch)
        address = target.masters[queue.broker]
        try:
            answer = yield Ask(address, command)
        except (ConnectionLostError, RequestTimeoutError):
            self._chooser.failed(queue.broker, self._clock.monotonic_s())
            raise
        now_s = self._clock.monotonic_s()
        self._chooser.answered(queue.broker, now_s - began_s, now_s)
        ids = tuple([one.message_id for one in made])
        results = requests.send_results(answer, queue, ids, address)
        is_prepared = outgoing.sys_flag & PREPARED and not is_batch
        transaction_id = fields_of(answer).get("transactionId", "")
        if is_prepared and results[0].status is SendStatus.OK:
            transaction_id = transaction_id_of(place_of(results[0], topic))
        return answer_of(results, transaction_id)

    def _target(self, resource: m.Resource) -> Talk[Target]:
        """Raises StatusError (ILLEGAL_TOPIC), RouteNotFoundError. HOT."""
        name = resource.name
        found = self._targets.get(name)
        if found is None:
            topic_of(resource)
        route = yield from self._backend.route(name)
        config = yield from self._backend.topic(name)
        if found is None or found.route is not route or found.config is not config:
            masters = masters_of(route)
            queues = sorted(it for it in write_queues(name, route) if it.broker in masters)
            found = Target(route, config, type_of(config), queues, masters)
            self._targets[name] = found
        return found

    def _queue(self, target: Target, groups: set[str | None], now_s: float) -> MessageQueue:
        """Where messages of these groups go. Raises StatusError (FORBIDDEN)."""
        queues = target.queues
        if not queues:
            raise StatusError(Code.FORBIDDEN, "no writable queue")
        group = groups.pop() if len(groups) == 1 else None
        if group:
            return queues[bucket_of(java_hash(group), len(queues))]
        return self._chooser.choose(queues, now_s)

    # ------------------------------------------------------------------ transactions, recalls

    def end_transaction(
        self, client: Client, request: m.EndTransactionRequest, call: Call
    ) -> Talk[m.EndTransactionResponse]:
        """Commits or rolls back. What the broker refuses is said; the answer to its own question,
        and what is undecided, it does not answer."""
        place = place_in(request.transaction_id, topic_of(request.topic))
        route = yield from self._backend.route(place.queue.topic)
        address = _master(masters_of(route), place.queue.broker, Code.INVALID_TRANSACTION_ID)
        state = _STATES.get(request.resolution, TransactionState.UNKNOWN)
        is_check = request.source == m.TransactionSource.SOURCE_SERVER_CHECK
        command = end_transaction(place, state, is_check=is_check)
        answer = yield Ask(address, command)
        if not command.is_oneway:
            expect_success(answer, address)
        return m.EndTransactionResponse(status=_status(Code.OK))

    def recall_message(
        self, client: Client, request: m.RecallMessageRequest, call: Call
    ) -> Talk[m.RecallMessageResponse]:
        """Takes a delayed message back."""
        target = yield from self._target(request.topic)
        check_type(target.kind, MessageType.DELAY.name)
        handle = parse_recall_handle(request.recall_handle)
        if handle is None:
            raise StatusError(Code.INTERNAL_SERVER_ERROR, "recall handle is invalid")
        topic = request.topic.name
        header = headers.RecallMessageRequest(
            group=topic, topic=topic, recall_handle=request.recall_handle, broker=handle.broker
        )
        address = _master(target.masters, handle.broker, Code.BAD_REQUEST)
        answer = yield Ask(address, requests.request(RequestCode.RECALL_MESSAGE, header))
        message_id = fields_of(expect_success(answer, address)).get("msgId", handle.unique_id)
        return m.RecallMessageResponse(status=_status(Code.OK), message_id=message_id)


def _master(masters: dict[str, str], broker: str, code: Code) -> str:
    """Where the broker is that a client's text names."""
    if broker not in masters:
        raise StatusError(code, f"no broker {broker!r} serves this topic")
    return masters[broker]


# ------------------------------------------------------------------------------------- messages


def properties_of(message: m.Message, peer: str, now_ms: int) -> dict[str, str]:
    """Those that a message is stored with, checked (spec/grpc.md §3, §4); `peer` sent it. HOT."""
    system = message.system_properties
    properties = dict(message.user_properties)
    check_texts(properties, system)
    topic = message.topic.name
    properties[UNIQ_KEY] = system.message_id
    properties[TAGS] = system.tag
    properties[KEYS] = " ".join(system.keys)
    properties[PRODUCER_GROUP] = topic  # the checks of transactions find their producers by it
    properties[RECONSUME_TIME] = str(system.delivery_attempt)
    properties[BORN_HOST] = system.born_host.strip() or peer
    properties[BORN_TIMESTAMP] = str(_ms(system.born_timestamp) or now_ms)
    if system.message_group:
        properties[SHARDING_KEY] = system.message_group
    if system.trace_context:
        properties[TRACE_CONTEXT] = system.trace_context
    if system.HasField("delivery_timestamp"):
        deliver_ms = _ms(system.delivery_timestamp)
        check_delivery(deliver_ms, now_ms)
        properties[DELIVER_MS] = str(deliver_ms)
    if system.message_type == MessageType.TRANSACTION:
        properties[TRAN_MSG] = "true"
        if system.HasField("orphaned_transaction_recovery_duration"):
            seconds = system.orphaned_transaction_recovery_duration.seconds
            check_recovery(seconds)
            properties[CHECK_IMMUNITY] = str(seconds)
    if system.lite_topic:
        check_lite_topic(system.lite_topic)
        properties[LITE_TOPIC] = system.lite_topic
    if system.HasField("priority"):
        properties[PRIORITY] = str(system.priority)
    return properties


def message_type(properties: dict[str, str]) -> str:
    """As RocketMQ's proxy tells it from the properties."""
    if TRAN_MSG in properties:
        return MessageType.TRANSACTION.name
    if DELIVER_MS in properties:
        return MessageType.DELAY.name
    if SHARDING_KEY in properties:
        return MessageType.FIFO.name
    if LITE_TOPIC in properties:
        return MessageType.LITE.name
    if PRIORITY in properties:
        return MessageType.PRIORITY.name
    return MessageType.NORMAL.name


def sys_flag_of(message: m.Message) -> int:
    """Prepared or not; bodies are stored plain."""
    is_prepared = message.system_properties.message_type == MessageType.TRANSACTION
    return PREPARED if is_prepared else 0


def _ms(moment: m.Timestamp) -> int:
    return moment.seconds * 1000 + moment.nanos // 1_000_000


# ------------------------------------------------------------------------------------- answers


def _status(code: Code, text: str = "") -> m.Status:
    return m.Status(code=code, message=text or code.name)


def answer_of(results: Sequence[SendResult], transaction_id: str) -> m.SendMessageResponse:
    """All of one request are stored alike, so there is one status. HOT."""
    code = _STATUSES[results[0].status]
    answer = m.SendMessageResponse(status=_status(code))
    for result in results:
        if code == Code.OK:
            answer.entries.add(
                status=answer.status, message_id=result.message_id, offset=result.queue_offset,
                transaction_id=transaction_id, recall_handle=result.recall_handle,
            )  # fmt: skip
        else:
            text = f"send message failed, sendStatus={result.status.name}"
            answer.entries.add(status=_status(code, text))
    return answer


# ------------------------------------------------------------------------------ queues, places

_MULTIPLIER: Final = 2862933555777941757
_MASK: Final = (1 << 64) - 1


def bucket_of(key: int, buckets: int) -> int:
    """Jump consistent hash of Lamping and Veach, as Guava's Hashing.consistentHash of a Java int
    computes it: a queue more takes its share from all others and nothing moves among them."""
    state, bucket = key & _MASK, 0
    while True:
        state = (state * _MULTIPLIER + 1) & _MASK
        draw = (state >> 33) + 1
        following = int((bucket + 1) / (draw / (1 << 31)))
        if following >= buckets or draw == 1 << 31:  # Java's int overflows there
            return bucket
        bucket = following


_PLACE: Final = re.compile(r"(.+) (\S+) (\d{1,18}) (\d{1,18})", re.ASCII)


def transaction_id_of(place: HalfPlace) -> str:
    """What a client is told of a transaction."""
    return (
        f"{place.message_id} {place.queue.broker} {place.half_queue_offset} {place.physical_offset}"
    )


def place_in(transaction_id: str, topic: str) -> HalfPlace:
    """The inverse, for a transaction of the topic. Raises StatusError (INVALID_TRANSACTION_ID)."""
    if not transaction_id.strip():
        raise StatusError(Code.INVALID_TRANSACTION_ID, "transaction id cannot be empty")
    found = _PLACE.fullmatch(transaction_id)
    if found is None:
        raise StatusError(
            Code.INVALID_TRANSACTION_ID,
            f"the transaction id {transaction_id!r} names no prepared message: give back the one "
            "that the answer to the send has",
        )
    message_id, broker, queue_offset, physical_offset = found.groups()
    return HalfPlace(
        topic, MessageQueue(topic, broker, 0), int(queue_offset), int(physical_offset),
        message_id, message_id,
    )  # fmt: skip
