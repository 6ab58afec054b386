"""ReceiveMessage, AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue.

A receive is a pop from all queues of one broker (spec/grpc.md §5). The broker parks it as a long
poll. Each message gets a receipt handle, which contains the pop, the message, and its position in
the commit log. Every proxy can therefore acknowledge or change it, also one that did not deliver
it.

The proxy filters the messages of a pop again, because the broker compares tags only by hash: a
message that has only the same hash is acknowledged for the client. A message that was delivered the
maximum number of times becomes a dead letter. If the client has ended its call when messages
arrive, they are returned to the broker.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from sluicemq.client.core import conversations, requests
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.requests import expect_success, header_fields, request_error
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import ProtocolError, RequestError, SluiceError
from sluicemq.filter.subscriptions import tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import PERM_READ, POP_NORMAL, GroupConfig, pop_kind, pop_topic
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, master_addresses
from sluicemq.proxy.clients import OK, Client, Clients
from sluicemq.proxy.convert import (
    checked_invisible_ms,
    parse_handle,
    set_timestamp,
    to_message,
    to_ms,
    to_subscription,
)
from sluicemq.proxy.limits import Refusal, StatusError, checked_group, checked_topic
from sluicemq.proxy.messages import Code
from sluicemq.proxy.renewal import InFlightMessage, ReceiptHandleRenewer
from sluicemq.proxy.service import to_status
from sluicemq.record.codec import decode_records
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import SendBackRequest
from sluicemq.wire.popping import (
    NO_OFFSET,
    ChangeInvisibleTimeResponse,
    PopAck,
    PopMessageResponse,
    ReceiptHandle,
    encode_pop_acks,
)

BATCH_MAX: Final = 32
"""The maximum number of messages of one receive or pull."""
DEADLINE_MARGIN_MS: Final = 500
"""The time before the client's deadline at which the broker has to respond to a long poll, in ms.

A broker checks its parked requests every 200 ms.
"""
BROKER_RESPONSE_S: Final = 3.0
"""The time in seconds that a broker may take to respond, in addition to a long poll."""
INIT_FROM_END: Final = "1"
"""The init mode of a pop by which a new group begins at the end of each queue."""
ENTRIES_MAX: Final = 1024
"""The maximum number of entries of one AckMessage, which limits the work of one call."""
BATCH_SPAN_MAX: Final = 4096
"""The distance from the first offset of a pop from which a message is acknowledged by itself.

A batch acknowledgement has one bit for each offset in between.
"""
ANY_QUEUE: Final = "-1"
"""The queue id of a pop that means all queues of the broker."""
DEFAULT_ATTEMPTS_MAX: Final = GroupConfig("").retry_times_max + 1
"""The maximum number of deliveries in a group that has no settings."""
POLLING_TIME_SINCE: Final = "5.0.3"
"""The first client version that knows the code ILLEGAL_POLLING_TIME."""
_UNKNOWN_HANDLE: Final = (
    ResponseCode.NO_MESSAGE,
    ResponseCode.MESSAGE_ILLEGAL,
    ResponseCode.TOPIC_NOT_EXIST,
)
"""The response codes of brokers for a handle whose message does not exist."""
_OK_RESPONSE: Final = m.ReceiveMessageResponse(status=OK)
_FINAL_CODES: Final = (Code.OK, Code.INVALID_RECEIPT_HANDLE)
"""The status codes of an acknowledgement after which the message is not renewed any longer."""


class PoppedMessage(NamedTuple):
    """A message of a pop with its receipt handle, and the number of its earlier deliveries."""

    stored: StoredMessage
    handle: ReceiptHandle
    reconsume_times: int


class Receiving:
    """The service object of consumers that receive messages by pop."""

    def __init__(self, backend: Backend, clients: Clients, limits: ProxyLimits) -> None:
        """Create the object that serves receives from brokers of `backend`, within `limits`."""
        self._backend = backend
        self._limits = limits
        self._clock = backend.clock
        self._broker_turn = 0  # the counter of the round robin over brokers
        # The calls whose pop a broker may park, in the order of their pops.
        self._polling_calls: dict[Call, None] = {}
        self.renewal = ReceiptHandleRenewer(backend, clients, self._change_handle, limits)

    def run(self) -> None:
        """Start the renewals of the messages in flight that are due. Called periodically."""
        self.renewal.run()

    def in_flight_count(self, client: Client) -> int:
        """Return the number of messages of a client whose invisible duration the proxy renews."""
        return self.renewal.in_flight_count(client)

    def drain(self) -> None:
        """End all parked receives with the responses of a receive without messages."""
        for call in tuple(self._polling_calls):
            responses = self._empty_response("no new message: the proxy is shutting down")
            call.reply_all([response.SerializeToString() for response in responses])

    # -------------------------------------------------------------------------------- receive

    def receive(
        self, client: Client, request: m.ReceiveMessageRequest, call: Call
    ) -> Conversation[list[m.ReceiveMessageResponse]]:
        """Serve ReceiveMessage: return a status, the messages, and the delivery time. Hot path.

        If the client has ended the call, the messages are returned to the broker and the result is
        empty. If the client asks for renewal and the proxy allows it, the proxy renews the messages
        from now on.

        Raises StatusError for an invalid request, or if the client has too many renewed messages.
        Raises SluiceError if the broker fails.
        """
        poll_ms = poll_timeout_ms(client, request, call.remaining_s, self._limits)
        topic = checked_topic(request.message_queue.topic)
        group = checked_group(request.group)
        is_renewed = request.auto_renew and self._limits.renews
        if is_renewed:
            self._check_renewal_limit(client)
            invisible_ms = self._limits.invisible_ms
        else:
            invisible_ms = checked_invisible_ms(
                request.invisible_duration,
                self._limits.invisible_ms_min,
                self._limits.invisible_ms_longest,
            )
        subscription = to_subscription(topic, request.filter_expression)
        broker, address = yield from self._choose_broker(topic, request.message_queue.broker.name)
        config = yield from self._backend.fetch_group_config(group)
        pop = pop_request(
            group,
            subscription,
            broker,
            min(request.batch_size, BATCH_MAX),
            invisible_ms,
            poll_ms,
            request.attempt_id,
            is_order=config is not None and config.consume_message_orderly,
        )

        # While the broker parks the pop, `drain` may end the call.
        self._polling_calls[call] = None
        try:
            response = yield conversations.Call(address, pop, poll_ms / 1000 + BROKER_RESPONSE_S)
        finally:
            del self._polling_calls[call]
        if response.code != ResponseCode.SUCCESS:
            return self._empty_response_for(response)

        popped = list(decode_popped(response, broker))
        if call.is_closed:
            yield from self._return_messages(group, topic, address, popped)
            return []
        times_max = DEFAULT_ATTEMPTS_MAX if config is None else config.retry_times_max + 1
        deliverable = yield from self._filter_popped(
            group, subscription, times_max, address, popped
        )
        if not deliverable:
            return self._empty_response("no match message")

        responses = [_OK_RESPONSE]
        for stored, handle, times in deliverable:
            response_with_message = m.ReceiveMessageResponse()
            client_handle = handle.encode()
            to_message(
                stored,
                client_handle,
                topic=topic,
                reconsume_times=times,
                into=response_with_message.message,
            )
            responses.append(response_with_message)
            if is_renewed:
                self.renewal.track(client, group, topic, client_handle, handle, times)
        responses.append(self._delivery_time())
        return responses

    def _check_renewal_limit(self, client: Client) -> None:
        """Raise StatusError if the client or the proxy has as many messages in work as allowed."""
        if not self.renewal.can_track(client):
            raise StatusError(
                Refusal.MESSAGES_HELD_TOO_MANY,
                f"there are {self.renewal.count} messages that clients of this proxy work on, and "
                "this client has too many of them. Acknowledge some.",
            )

    def _choose_broker(self, topic: str, preferred: str) -> Conversation[tuple[str, str]]:
        """Return the name and address of the broker to pop from.

        It is `preferred` if that has readable queues of the topic. Otherwise the brokers take
        turns. Raises StatusError if no broker has readable queues, and RouteNotFoundError if the
        topic does not exist.
        """
        route = yield from self._backend.fetch_route(topic)
        masters = master_addresses(route)
        readable_brokers = [
            queue_data.broker
            for queue_data in route.queues
            if queue_data.perm & PERM_READ and queue_data.broker in masters
        ]
        if not readable_brokers:
            raise StatusError(Refusal.NO_READABLE_QUEUE)
        if preferred in readable_brokers:
            return preferred, masters[preferred]
        self._broker_turn += 1
        broker = readable_brokers[self._broker_turn % len(readable_brokers)]
        return broker, masters[broker]

    def _empty_response_for(self, response: Command) -> list[m.ReceiveMessageResponse]:
        """Return the responses to a client for a broker's response without messages.

        Their status is MESSAGE_NOT_FOUND if no message arrived in time, and TOO_MANY_REQUESTS if
        too many requests wait at the broker. Raises StatusError for an invalid filter, else
        RequestError.
        """
        if response.code == ResponseCode.POLLING_FULL:
            return self._empty_response("polling full", Code.TOO_MANY_REQUESTS)
        if response.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
            raise StatusError(Refusal.FILTER, response.remark or "the filter does not compile.")
        if response.code not in (ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND):
            raise request_error(response)
        return self._empty_response("no new message")

    def _empty_response(
        self, status_message: str, code: Code = Code.MESSAGE_NOT_FOUND
    ) -> list[m.ReceiveMessageResponse]:
        """Return the responses to a receive without messages: a status and the delivery time."""
        status = m.Status(code=code, message=status_message)
        return [m.ReceiveMessageResponse(status=status), self._delivery_time()]

    def _delivery_time(self) -> m.ReceiveMessageResponse:
        """Return a response with the current time as delivery time."""
        response = m.ReceiveMessageResponse()
        set_timestamp(response.delivery_timestamp, self._clock.now_ms())
        return response

    # -------------------------------------------- popped messages that the client does not get

    def _return_messages(
        self, group: str, topic: str, address: str, popped: list[PoppedMessage]
    ) -> Conversation[None]:
        """Make messages visible to other clients after `given_back_ms`.

        The client has ended its call before it got them. The responses of the broker are ignored.
        """
        for message in popped:
            command = change_invisible_request(
                group, topic, message.handle, self._limits.given_back_ms
            )
            yield conversations.Call(address, command)

    def _filter_popped(
        self,
        group: str,
        subscription: Subscription,
        times_max: int,
        address: str,
        popped: list[PoppedMessage],
    ) -> Conversation[list[PoppedMessage]]:
        """Return the messages that the client is to get. Hot path.

        `popped` are the messages from the broker at `address`. The broker compares tags only by
        their hash, so a message with another tag of the same hash is acknowledged and left out. A
        message that was delivered `times_max` times is stored in the dead-letter topic,
        acknowledged, and left out. If the broker refuses to store it there, it is not acknowledged,
        and the broker delivers it again.
        """
        deliverable = []
        topic = subscription.topic
        for message in popped:
            if not tag_matches(subscription, message.stored.tag):
                yield conversations.Call(address, ack_request(group, topic, message.handle))
            elif message.reconsume_times < times_max:
                deliverable.append(message)
            else:
                forward = dead_letter_request(
                    group, topic, message.handle, message.stored.message_id
                )
                response = yield conversations.Call(address, forward)
                if response.code == ResponseCode.SUCCESS:  # otherwise it is delivered again
                    yield conversations.Call(address, ack_request(group, topic, message.handle))
        return deliverable

    # ----------------------------------------------------------- acknowledgements and changes

    def acknowledge(
        self, client: Client, request: m.AckMessageRequest, call: Call
    ) -> Conversation[m.AckMessageResponse]:
        """Serve AckMessage: return a status for each entry, and one for all. Hot path.

        Messages that are close together in one pop are acknowledged by one request to the broker.
        The proxy stops renewing the messages of the request, but renews those again whose broker
        failed. Raises StatusError if the request is invalid. An invalid entry gets a status
        instead.
        """
        topic = checked_topic(request.topic)
        group = checked_group(request.group)
        if len(request.entries) > ENTRIES_MAX:
            raise StatusError(
                Refusal.ENTRIES_TOO_MANY,
                f"{len(request.entries)} entries are more than {ENTRIES_MAX}; send some at a time.",
            )
        masters = master_addresses((yield from self._backend.fetch_route(topic)))
        # All of these refer to an entry by its index in the request.
        statuses: dict[int, m.Status] = {}
        renewed_messages: dict[int, InFlightMessage] = {}
        acks: list[tuple[int, str, ReceiptHandle]] = []
        for index, entry in enumerate(request.entries):
            try:
                # The proxy does not renew a message while it is being acknowledged.
                in_flight = yield from self.renewal.take(client, group, entry.receipt_handle)
                handle = self._valid_handle(entry.receipt_handle, in_flight)
                acks.append((index, broker_address(masters, handle), handle))
            except StatusError as error:
                statuses[index] = to_status(error)
            else:
                if in_flight is not None:
                    renewed_messages[index] = in_flight

        single_acks, batches = split_acks(acks)
        for (address, broker), batch in batches.items():
            handles = [handle for _, handle in batch]
            status = yield from self._acknowledge_at_broker(
                address, batch_ack_request(group, topic, broker, handles)
            )
            statuses.update((index, status) for index, _ in batch)
        for index, address, handle in single_acks:
            statuses[index] = yield from self._acknowledge_at_broker(
                address, ack_request(group, topic, handle)
            )

        for index, in_flight in renewed_messages.items():
            if statuses[index].code not in _FINAL_CODES:
                self.renewal.add(in_flight)
        return to_ack_response(request, statuses)

    def _acknowledge_at_broker(self, address: str, command: Command) -> Conversation[m.Status]:
        """Send an acknowledgement to a broker, and return the status for the client.

        Errors are not raised. They become the returned status.
        """
        try:
            response = yield conversations.Call(address, command)
            if response.code == ResponseCode.SUCCESS:
                return OK
            raise to_handle_error(response)
        except SluiceError as error:
            return to_status(error)

    def change_invisible_duration(
        self, client: Client, request: m.ChangeInvisibleDurationRequest, call: Call
    ) -> Conversation[m.ChangeInvisibleDurationResponse]:
        """Serve ChangeInvisibleDuration: return the new receipt handle of the message.

        Raises StatusError if the request or the handle is invalid, and SluiceError if the broker
        fails.
        """
        topic = checked_topic(request.topic)
        group = checked_group(request.group)
        invisible_ms = checked_invisible_ms(
            request.invisible_duration, 0, self._limits.invisible_ms_longest
        )
        in_flight = yield from self.renewal.take(client, group, request.receipt_handle)
        handle = self._valid_handle(request.receipt_handle, in_flight)
        try:
            new_handle = yield from self._change_handle(
                group, topic, handle, invisible_ms, suspend=request.suspend
            )
        except SluiceError as error:
            if in_flight is not None and not isinstance(error, StatusError):
                self.renewal.add(in_flight)
            raise
        return m.ChangeInvisibleDurationResponse(status=OK, receipt_handle=new_handle.encode())

    def _change_handle(
        self, group: str, topic: str, handle: ReceiptHandle, time_ms: int, *, suspend: bool = False
    ) -> Conversation[ReceiptHandle]:
        """Change the invisible duration of a message at its broker, and return its new handle.

        The message is invisible for `time_ms` from now on. `suspend` means that this is not counted
        as a failed attempt. If an ordered group has consumed past the message, its handle is
        returned unchanged. Raises StatusError if the message does not exist any longer, and
        SluiceError if the broker fails.
        """
        masters = master_addresses((yield from self._backend.fetch_route(topic)))
        address = broker_address(masters, handle)
        command = change_invisible_request(group, topic, handle, time_ms, suspend=suspend)
        response = yield conversations.Call(address, command, BROKER_RESPONSE_S)
        if response.code != ResponseCode.SUCCESS:
            raise to_handle_error(response)
        header = decode_header(ChangeInvisibleTimeResponse, header_fields(response))
        if not header.pop_ms:  # an ordered group has passed the message: nothing changed
            return handle
        return handle._replace(
            start_offset=handle.offset,
            pop_ms=header.pop_ms,
            invisible_ms=header.invisible_ms,
            revive_queue=header.revive_queue,
        )

    def forward_to_dead_letter_queue(
        self, client: Client, request: m.ForwardMessageToDeadLetterQueueRequest, call: Call
    ) -> Conversation[m.ForwardMessageToDeadLetterQueueResponse]:
        """Serve ForwardMessageToDeadLetterQueue: store a message as a dead letter.

        Then it is acknowledged, and the proxy stops renewing it. If the broker fails, the proxy
        renews it again. An expired handle is accepted, as in RocketMQ, because the client would
        otherwise retry forever. Raises StatusError if the request or handle is invalid, and
        SluiceError if the broker fails.
        """
        topic = checked_topic(request.topic)
        group = checked_group(request.group)
        in_flight = yield from self.renewal.take(client, group, request.receipt_handle)
        handle = parse_handle(request.receipt_handle) if in_flight is None else in_flight.handle
        if handle.physical_offset < 0:
            raise StatusError(
                Refusal.HANDLE_WITHOUT_PLACE,
                f"the handle {request.receipt_handle!r} does not contain the position of the "
                "message.",
            )
        masters = master_addresses((yield from self._backend.fetch_route(topic)))
        address = broker_address(masters, handle)
        command = dead_letter_request(group, topic, handle, request.message_id)
        try:
            expect_success((yield conversations.Call(address, command)), address)
        except SluiceError:
            if in_flight is not None:
                self.renewal.add(in_flight)
            raise
        yield from self._acknowledge_at_broker(address, ack_request(group, topic, handle))
        return m.ForwardMessageToDeadLetterQueueResponse(status=OK)

    def _valid_handle(self, client_handle: str, in_flight: InFlightMessage | None) -> ReceiptHandle:
        """Return the current receipt handle of a message, for the `client_handle` of its client.

        `in_flight` is the message if the proxy renews it, else None. Each renewal gives a message a
        new handle, so the handle of `in_flight` is returned if possible. Raises StatusError if the
        current handle is malformed or expired.
        """
        handle = parse_handle(client_handle) if in_flight is None else in_flight.handle
        late_ms = self._clock.now_ms() - handle.deadline_ms
        if late_ms >= 0:
            raise StatusError(
                Refusal.HANDLE_EXPIRED,
                f"the handle {client_handle!r} expired {late_ms} ms ago. The message will be "
                "delivered again.",
            )
        return handle


# ------------------------------------------------------------- parts of the clients' requests


def poll_timeout_ms(
    client: Client, request: m.ReceiveMessageRequest, remaining_s: float | None, limits: ProxyLimits
) -> int:
    """Return the time in milliseconds that a broker may wait for messages.

    `remaining_s` is the time until the deadline of the call; None means that it has no deadline.
    The result is the polling time of the request. If it has none, it is the time until the deadline
    without half of the client's request timeout, or the maximum if there is no deadline either.
    Then it is limited by the minimum and maximum of `limits`, and by the deadline minus
    DEADLINE_MARGIN_MS.

    Raises StatusError (ILLEGAL_POLLING_TIME) if the deadline is earlier than the minimum.
    """
    least_ms = limits.poll_ms_min
    longest_ms = limits.poll_ms_longest
    remaining_ms = None if remaining_s is None else int(remaining_s * 1000)
    if request.HasField("long_polling_timeout"):
        wait_ms = to_ms(request.long_polling_timeout)
    elif remaining_ms is None:
        wait_ms = longest_ms
    else:
        settings = client.settings
        request_timeout_ms = 0 if settings is None else to_ms(settings.request_timeout)
        wait_ms = remaining_ms - request_timeout_ms // 2
    wait_ms = min(max(wait_ms, least_ms), longest_ms)

    if remaining_ms is None:
        return wait_ms
    if remaining_ms < wait_ms and remaining_ms < least_ms:
        refusal = Refusal.POLLING_TIME
        if client.version < POLLING_TIME_SINCE:
            refusal = Refusal.POLLING_TIME_OLD_CLIENT
        raise StatusError(
            refusal,
            f"the call ends in {remaining_ms} ms, and a receive waits for at least {least_ms} ms. "
            "Set a later deadline.",
        )
    return max(min(wait_ms, remaining_ms - DEADLINE_MARGIN_MS), 0)


def broker_address(masters: dict[str, str], handle: ReceiptHandle) -> str:
    """Return the address of the broker that issued a handle.

    Raises StatusError (INVALID_RECEIPT_HANDLE) if that broker does not serve the topic.
    """
    address = masters.get(handle.broker)
    if address is None:
        raise StatusError(
            Refusal.HANDLE_BROKER,
            "the handle names this broker, which does not serve the topic.",
            broker=handle.broker,
        )
    return address


# ------------------------------------------------------------------------ requests to brokers


def pop_request(
    group: str,
    subscription: Subscription,
    broker: str,
    count_max: int,
    invisible_ms: int,
    poll_ms: int,
    attempt_id: str,
    *,
    is_order: bool,
) -> Command:
    """Return a request that pops messages from all queues of a topic on a broker. Hot path.

    The broker returns up to `count_max` messages, which are then invisible for `invisible_ms`. It
    waits up to `poll_ms` for a message. `attempt_id` identifies the attempt of an ordered consumer;
    "" means none. `is_order` is True for an ordered group. A new group begins at the end of each
    queue.
    """
    # The fields of a PopMessageRequest, written out because that is faster than to encode one.
    fields = {
        "consumerGroup": group,
        "topic": subscription.topic,
        "queueId": ANY_QUEUE,
        "bname": broker,
        "maxMsgNums": str(count_max),
        "invisibleTime": str(invisible_ms),
        "pollTime": str(poll_ms),
        "bornTime": "0",
        "initMode": INIT_FROM_END,
        "expType": subscription.kind,
        "exp": subscription.expression,
        "order": "true" if is_order else "false",
    }
    if attempt_id:
        fields["attemptId"] = attempt_id
    return Command(RequestCode.POP_MESSAGE, fields)


def ack_request(group: str, topic: str, handle: ReceiptHandle) -> Command:
    """Return a request that acknowledges one message. Hot path."""
    return Command(RequestCode.ACK_MESSAGE, _handle_fields(group, topic, handle))


def _handle_fields(group: str, topic: str, handle: ReceiptHandle) -> dict[str, str]:
    """Return the header fields that identify a popped message to its broker."""
    return {
        "consumerGroup": group,
        "topic": pop_topic(topic, group, handle.kind),
        "queueId": str(handle.queue_id),
        "bname": handle.broker,
        "extraInfo": handle.encode(),
        "offset": str(handle.offset),
    }


def batch_ack_request(group: str, topic: str, broker: str, handles: list[ReceiptHandle]) -> Command:
    """Return one request that acknowledges several messages of a broker."""
    offsets_by_pop: dict[ReceiptHandle, list[int]] = {}
    for handle in handles:
        # The handles of one pop from one queue differ only in these two fields.
        pop = handle._replace(offset=NO_OFFSET, physical_offset=NO_OFFSET)
        offsets_by_pop.setdefault(pop, []).append(handle.offset)
    acks = [PopAck(group, topic, pop, tuple(offsets)) for pop, offsets in offsets_by_pop.items()]
    body = encode_pop_acks(broker, acks)
    return requests.make_request(RequestCode.BATCH_ACK_MESSAGE, body=body)


def change_invisible_request(
    group: str, topic: str, handle: ReceiptHandle, invisible_ms: int, *, suspend: bool = False
) -> Command:
    """Return a request that makes a message invisible for `invisible_ms` from now on.

    `suspend` means that this is not a failed attempt; only newer brokers know it.
    """
    fields = _handle_fields(group, topic, handle)
    fields |= {"invisibleTime": str(invisible_ms), "suspend": "true" if suspend else "false"}
    return Command(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, fields)


def dead_letter_request(group: str, topic: str, handle: ReceiptHandle, message_id: str) -> Command:
    """Return a request that stores a message as a dead letter, however often it was delivered.

    `message_id` is the id of the message. The request does not acknowledge the message. `handle`
    must contain the message's position in the commit log.
    """
    header = SendBackRequest(
        physical_offset=handle.physical_offset,
        group=group,
        delay_level=-1,  # dead letter instead of redelivery
        origin_message_id=message_id,
        origin_topic=pop_topic(topic, group, handle.kind),
        reconsume_times_max=0,
        broker=handle.broker,
    )
    return requests.make_request(RequestCode.CONSUMER_SEND_MSG_BACK, header)


def split_acks(
    acks: list[tuple[int, str, ReceiptHandle]],
) -> tuple[
    list[tuple[int, str, ReceiptHandle]], dict[tuple[str, str], list[tuple[int, ReceiptHandle]]]
]:
    """Split acknowledgements into single ones, and batches for one broker each.

    An acknowledgement is (index of the entry in the client's request, address of the broker,
    handle). The first result are those that are too far from the first offset of their pop, or
    would be alone in a batch. The second result maps (address, broker name) to a list of (index,
    handle).
    """
    single_acks = []
    batches = dict[tuple[str, str], list[tuple[int, ReceiptHandle]]]()
    for index, address, handle in acks:
        if 0 <= handle.offset - handle.start_offset < BATCH_SPAN_MAX:
            batches.setdefault((address, handle.broker), []).append((index, handle))
        else:
            single_acks.append((index, address, handle))

    for (address, broker), batch in list(batches.items()):
        if len(batch) == 1:
            index, handle = batch[0]
            single_acks.append((index, address, handle))
            del batches[address, broker]
    return single_acks, batches


# ---------------------------------------------------------------------- responses of brokers


def decode_popped(response: Command, broker: str) -> Iterator[PoppedMessage]:
    """Yield the messages in the response to a pop, each with its receipt handle. Hot path.

    `broker` is the name of the broker that responded. The handle is built from the header. The
    number of earlier deliveries comes from the record of the message, or from the header for an
    ordered group. Raises ProtocolError for a malformed response.
    """
    # The property POP_CK of a record is never used as its handle, because the producer of the
    # message may have written it.
    header = decode_header(PopMessageResponse, response.fields)
    topic_kinds = _TopicKinds(header.message_offset_info)
    start_offsets = _parse_numbers_by_queue(header.start_offset_info)
    ordered_counts = _parse_numbers_by_queue(header.order_count_info)
    pop_ms = header.pop_ms
    invisible_ms = header.invisible_ms
    revive_queue = header.revive_queue
    for stored in decode_records(response.body):
        queue_id = stored.queue_id
        offset = stored.queue_offset
        topic_kind = topic_kinds.take(stored)
        handle = ReceiptHandle(
            start_offsets.get(f"{topic_kind} {queue_id}", offset),
            pop_ms,
            invisible_ms,
            revive_queue,
            topic_kind,
            broker,
            queue_id,
            offset,
            stored.physical_offset,
        )
        reconsume_times = stored.reconsume_times
        if ordered_counts:
            # An ordered group counts by message, or else by queue.
            ordered_count = ordered_counts.get(
                f"{topic_kind} qo{queue_id}%{offset}"
            ) or ordered_counts.get(f"{topic_kind} {queue_id}")
            reconsume_times = ordered_count or reconsume_times
        yield PoppedMessage(stored, handle, reconsume_times)


class _TopicKinds:
    """The kinds of topic (subscribed topic or retry topic) from which a pop took its messages.

    The messages of a retry topic have the name of the subscribed topic.
    """

    def __init__(self, offset_info: str | None) -> None:
        """Parse the kind of topic of each message from a header field of a pop response.

        `offset_info` is `kind queue offset,offset,…;kind queue offset,…`, in the order of the
        messages. None and "" mean that there are no messages. Raises ProtocolError if the text is
        malformed.
        """
        # The kinds of the messages that `take` has not returned yet, by (queue id, offset).
        self._left: dict[tuple[int, int], deque[int]] = {}
        if not offset_info:
            return
        try:
            for queue_info in offset_info.split(";"):
                kind, queue_id, offsets = queue_info.split(" ")
                for offset in offsets.split(","):
                    kinds = self._left.setdefault((int(queue_id), int(offset)), deque())
                    kinds.append(int(kind))
        except ValueError:
            raise ProtocolError(
                f"Malformed header field of a pop response: {offset_info!r}."
            ) from None

    def take(self, stored: StoredMessage) -> int:
        """Return the topic kind of the message `stored`, the next one of the response. Hot path.

        This is the kind that the topic of the record itself shows; otherwise the one in the header,
        or POP_NORMAL if the header does not list the message.
        """
        kinds = self._left.get((stored.queue_id, stored.queue_offset))
        listed = kinds.popleft() if kinds else POP_NORMAL
        return pop_kind(stored.topic) or listed


def _parse_numbers_by_queue(queue_infos: str | None) -> dict[str, int]:
    """Return the numbers in a header field of a pop response.

    The field `0 3 17;0 5 9` has (kind of topic, queue, number) and becomes {"0 3": 17, "0 5": 9}.
    None and "" mean no entries. Raises ProtocolError if the field is malformed.
    """
    numbers: dict[str, int] = {}
    if not queue_infos:
        return numbers
    try:
        for queue_info in queue_infos.split(";"):
            queue, _, number = queue_info.rpartition(" ")
            numbers[queue] = int(number)
    except ValueError:
        raise ProtocolError(f"Malformed header field of a pop response: {queue_infos!r}.") from None
    return numbers


def to_handle_error(response: Command) -> StatusError | RequestError:
    """Return the error for a broker's response that refuses a handle.

    A client retries forever unless the status says that the handle is wrong (spec/grpc.md §7).
    """
    if response.code in _UNKNOWN_HANDLE:
        return StatusError(Refusal.HANDLE_UNKNOWN, response.remark or "no such message")
    return request_error(response)


def to_ack_response(
    request: m.AckMessageRequest, statuses: Mapping[int, m.Status]
) -> m.AckMessageResponse:
    """Return the response to an acknowledgement of several messages.

    `statuses` has the status of each entry of the request, by its index. The status of the response
    is the common code of all entries, or MULTIPLE_RESULTS if they differ. Raises StatusError if
    there are no entries.
    """
    if not statuses:
        raise StatusError(Refusal.ENTRIES_NONE, "Name the messages to acknowledge.")
    response = m.AckMessageResponse()
    for index, entry in enumerate(request.entries):
        entry_result = response.entries.add(
            message_id=entry.message_id, receipt_handle=entry.receipt_handle
        )
        entry_result.status.code = statuses[index].code
        entry_result.status.message = statuses[index].message

    codes = {status.code for status in statuses.values()}
    code = Code.MULTIPLE_RESULTS
    if len(codes) == 1:
        code = Code(codes.pop())
    response.status.code = code
    response.status.message = code.name
    return response
