"""Messages for consumers: received by pops, acknowledged, hidden for longer, given up.

A receive is a pop of all queues of one broker (spec/grpc.md §5): it waits there, not here. A
message goes to the client with a handle, which names the pop and the message, and the place in the
log as well: so every proxy can do with it what the client wants, without having seen it before.

What the broker gives is looked at once more: it knows tags by their hash only, so one that only has
the same hash is acknowledged in the client's stead; and what has been tried too often goes to the
dead letters. A client that does not wait any more when messages come gives them back.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from sluicemq.client.core import conversations as conversations
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.requests import expect_success, header_fields, request_error
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import FilterSyntaxError, ProtocolError, RequestError, SluiceError
from sluicemq.filter.subscriptions import subscribe, tag_matches
from sluicemq.model.ids import CACHED_LENGTH_MAX
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import PERM_READ, POP_NORMAL, GroupConfig, pop_kind, pop_topic
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, master_addresses
from sluicemq.proxy.clients import OK, Client, Clients
from sluicemq.proxy.convert import to_message, to_ms, set_timestamp
from sluicemq.proxy.limits import Refusal, StatusError, checked_group, checked_topic
from sluicemq.proxy.messages import Code, FilterType
from sluicemq.proxy.renewal import InFlightMessage, ReceiptHandleRenewer
from sluicemq.proxy.service import to_status
from sluicemq.record.codec import decode_records
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import SendBackRequest
from sluicemq.wire.popping import (
    NONE,
    ChangeInvisibleTimeResponse,
    Handle,
    PopAck,
    PopMessageResponse,
    encode_pop_acks,
)

BATCH_MAX: Final = 32
DEADLINE_MARGIN_MS: Final = 500
"""So long before the client's deadline the broker is told to answer: it looks every 200 ms."""
BROKER_RESPONSE_S: Final = 3.0
"""So long a broker may take for an answer besides its waiting."""
INIT_FROM_END: Final = "1"
HANDLE_LENGTH_MAX: Final = 512
ENTRIES_MAX: Final = 1024
"""Of one AckMessage: what one client may ask of a turn."""
BATCH_SPAN_MAX: Final = 4096
"""Messages so far from the first of their pop are acknowledged alone: of a batch's bits each offset
between them takes one."""
ANY_QUEUE: Final = "-1"
DEFAULT_ATTEMPTS_MAX: Final = GroupConfig("").retry_times_max + 1
POLLING_TIME_SINCE: Final = "5.0.3"
"""Clients before that do not know the code ILLEGAL_POLLING_TIME."""
_UNKNOWN_HANDLE: Final = (
    ResponseCode.NO_MESSAGE,
    ResponseCode.MESSAGE_ILLEGAL,
    ResponseCode.TOPIC_NOT_EXIST,
)
"""What brokers say of a handle that names nothing."""
_OK_RESPONSE: Final = m.ReceiveMessageResponse(status=OK)
_FINAL_CODES: Final = (Code.OK, Code.INVALID_RECEIPT_HANDLE)


class PoppedMessage(NamedTuple):
    """A message as a pop gave it: `handle` names it, `times` says how often it was tried before."""

    stored: StoredMessage
    handle: Handle
    reconsume_times: int


class Receiving:
    """The family of consumers that receive."""

    def __init__(self, backend: Backend, clients: Clients, limits: ProxyLimits) -> None:
        self._backend = backend
        self._limits = limits
        self._clock = backend.clock
        self._broker_turn = 0
        self._polling_calls: dict[Call, None] = {}
        self.renewal = ReceiptHandleRenewer(backend, clients, self._change_handle, limits)

    def run(self) -> None:
        """What clients work on stays invisible."""
        self.renewal.run()

    def in_flight_count(self, client: Client) -> int:
        """How many messages it works on that are renewed for it."""
        return self.renewal.in_flight_count(client)

    def drain(self) -> None:
        """Who waits is told that nothing came."""
        for call in tuple(self._polling_calls):
            answers = self._empty_response("no new message: the proxy is about to end")
            call.reply_all([answer.SerializeToString() for answer in answers])

    # -------------------------------------------------------------------------------- receive

    def receive(
        self, client: Client, request: m.ReceiveMessageRequest, call: Call
    ) -> Conversation[list[m.ReceiveMessageResponse]]:
        """ReceiveMessage: status, messages, time. Raises StatusError. HOT."""
        limits = self._limits
        poll_ms = poll_timeout_ms(client, request, call.remaining_s, limits)
        topic, group = checked_topic(request.message_queue.topic), checked_group(request.group)
        invisible_ms = limits.invisible_ms
        is_renewed = request.auto_renew and limits.renews
        if not is_renewed:
            least_ms, longest_ms = limits.invisible_ms_min, limits.invisible_ms_longest
            invisible_ms = checked_invisible_ms(request.invisible_duration, least_ms, longest_ms)
        elif not self.renewal.has_room(client):
            raise StatusError(
                Refusal.MESSAGES_HELD_TOO_MANY,
                f"there are {self.renewal.count} messages that clients of this proxy work on, too "
                "many of them this one's: acknowledge some.",
            )
        wanted = to_subscription(topic, request.filter_expression)
        broker, address = yield from self._choose_broker(topic, request.message_queue.broker.name)
        config = yield from self._backend.fetch_group_config(group)
        pop = pop_request(
            group,
            wanted,
            broker,
            min(request.batch_size, BATCH_MAX),
            invisible_ms,
            poll_ms,
            request.attempt_id,
            is_order=config is not None and config.consume_message_orderly,
        )
        self._polling_calls[call] = None
        try:
            answer = yield conversations.Call(address, pop, poll_ms / 1000 + BROKER_RESPONSE_S)
        finally:
            del self._polling_calls[call]
        if answer.code != ResponseCode.SUCCESS:
            return self._empty_response_for(answer)
        found = list(decode_popped(answer, broker))
        if call.is_closed:
            yield from self._return_messages(group, topic, address, found)
            return []
        times_max = config.retry_times_max + 1 if config is not None else DEFAULT_ATTEMPTS_MAX
        kept = yield from self._filter_popped(group, wanted, times_max, address, found)
        if not kept:
            return self._empty_response("no match message")
        answers = [_OK_RESPONSE]
        for stored, handle, times in kept:
            one, text = m.ReceiveMessageResponse(), handle.text()
            to_message(stored, text, topic=topic, reconsume_times=times, into=one.message)
            answers.append(one)
            if is_renewed:
                self.renewal.track(client, group, topic, text, handle, times)
        answers.append(self._delivery_time())
        return answers

    def _choose_broker(self, topic: str, wanted: str) -> Conversation[tuple[str, str]]:
        """Name and address of the broker to ask: the one that is wanted, or the next one in turn.
        Raises StatusError, RouteNotFoundError."""
        route = yield from self._backend.fetch_route(topic)
        masters = master_addresses(route)
        names = [it.broker for it in route.queues if it.perm & PERM_READ and it.broker in masters]
        if not names:
            raise StatusError(Refusal.NO_READABLE_QUEUE)
        if wanted not in names:
            self._broker_turn += 1
            wanted = names[self._broker_turn % len(names)]
        return wanted, masters[wanted]

    def _empty_response_for(self, answer: Command) -> list[m.ReceiveMessageResponse]:
        """What a client is told of an answer without messages. Raises StatusError, RequestError."""
        if answer.code == ResponseCode.POLLING_FULL:
            return self._empty_response("polling full", Code.TOO_MANY_REQUESTS)
        if answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
            raise StatusError(Refusal.FILTER, answer.remark or "the filter does not compile.")
        if answer.code not in (ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND):
            raise request_error(answer)
        return self._empty_response("no new message")

    def _empty_response(
        self, text: str, code: Code = Code.MESSAGE_NOT_FOUND
    ) -> list[m.ReceiveMessageResponse]:
        status = m.Status(code=code, message=text)
        return [m.ReceiveMessageResponse(status=status), self._delivery_time()]

    def _delivery_time(self) -> m.ReceiveMessageResponse:
        answer = m.ReceiveMessageResponse()
        set_timestamp(answer.delivery_timestamp, self._clock.now_ms())
        return answer

    # ----------------------------------------------------------- what the client does not get

    def _return_messages(
        self, group: str, topic: str, address: str, found: list[PoppedMessage]
    ) -> Conversation[None]:
        """Nobody waits for them any more."""
        for one in found:
            command = change_invisible_request(group, topic, one.handle, self._limits.given_back_ms)
            yield conversations.Call(address, command)

    def _filter_popped(
        self,
        group: str,
        wanted: Subscription,
        times_max: int,
        address: str,
        found: list[PoppedMessage],
    ) -> Conversation[list[PoppedMessage]]:
        """What the client gets of them. One that has the hash of a tag that is wanted, and not the
        tag, is done; one that was tried too often is a dead letter. HOT."""
        kept, topic = [], wanted.topic
        for one in found:
            if not tag_matches(wanted, one.stored.tag):
                yield conversations.Call(address, ack_request(group, topic, one.handle))
            elif one.reconsume_times < times_max:
                kept.append(one)
            else:
                bury = dead_letter_request(group, topic, one.handle, one.stored.message_id)
                answer = yield conversations.Call(address, bury)
                if answer.code == ResponseCode.SUCCESS:  # else it comes again
                    yield conversations.Call(address, ack_request(group, topic, one.handle))
        return kept

    # -------------------------------------------------------------------- what becomes of them

    def acknowledge(
        self, client: Client, request: m.AckMessageRequest, call: Call
    ) -> Conversation[m.AckMessageResponse]:
        """AckMessage: a status for each entry, and one for all. Raises StatusError. HOT."""
        topic, group = checked_topic(request.topic), checked_group(request.group)
        if len(request.entries) > ENTRIES_MAX:
            raise StatusError(
                Refusal.ENTRIES_TOO_MANY,
                f"{len(request.entries)} entries are more than {ENTRIES_MAX}: send some at a time.",
            )
        masters = master_addresses((yield from self._backend.fetch_route(topic)))
        statuses: dict[int, m.Status] = {}
        taken: dict[int, InFlightMessage] = {}
        single: list[tuple[int, str, Handle]] = []
        for number, entry in enumerate(request.entries):
            try:
                in_flight = yield from self.renewal.take(client, group, entry.receipt_handle)
                handle = self._valid_handle(entry.receipt_handle, in_flight)
                single.append((number, broker_address(masters, handle), handle))
            except StatusError as error:
                statuses[number] = to_status(error)
            else:
                if in_flight is not None:
                    taken[number] = in_flight
        single, batches = split_acks(single)
        for (address, broker), batch in batches.items():
            handles = [handle for _, handle in batch]
            status = yield from self._acknowledge_at_broker(
                address, batch_ack_request(group, topic, broker, handles)
            )
            statuses.update((number, status) for number, _ in batch)
        for number, address, handle in single:
            statuses[number] = yield from self._acknowledge_at_broker(
                address, ack_request(group, topic, handle)
            )
        for number, in_flight in taken.items():
            if statuses[number].code not in _FINAL_CODES:
                self.renewal.add(in_flight)
        return to_ack_response(request, statuses)

    def _acknowledge_at_broker(self, address: str, command: Command) -> Conversation[m.Status]:
        """How an acknowledgement went."""
        try:
            answer = yield conversations.Call(address, command)
            if answer.code == ResponseCode.SUCCESS:
                return OK
            raise to_handle_error(answer)
        except SluiceError as error:
            return to_status(error)

    def change_invisible_duration(
        self, client: Client, request: m.ChangeInvisibleDurationRequest, call: Call
    ) -> Conversation[m.ChangeInvisibleDurationResponse]:
        """ChangeInvisibleDuration: the message has another handle then. Raises StatusError."""
        topic, group = checked_topic(request.topic), checked_group(request.group)
        time_ms = checked_invisible_ms(
            request.invisible_duration, 0, self._limits.invisible_ms_longest
        )
        in_flight = yield from self.renewal.take(client, group, request.receipt_handle)
        handle = self._valid_handle(request.receipt_handle, in_flight)
        try:
            changed = yield from self._change_handle(
                group, topic, handle, time_ms, suspend=request.suspend
            )
        except SluiceError as error:
            if in_flight is not None and not isinstance(error, StatusError):
                self.renewal.add(in_flight)
            raise
        return m.ChangeInvisibleDurationResponse(status=OK, receipt_handle=changed.text())

    def _change_handle(
        self, group: str, topic: str, handle: Handle, time_ms: int, *, suspend: bool = False
    ) -> Conversation[Handle]:
        """The handle that counts now. Raises StatusError, SluiceError."""
        address = broker_address(
            master_addresses((yield from self._backend.fetch_route(topic))), handle
        )
        command = change_invisible_request(group, topic, handle, time_ms, suspend=suspend)
        answer = yield conversations.Call(address, command, BROKER_RESPONSE_S)
        if answer.code != ResponseCode.SUCCESS:
            raise to_handle_error(answer)
        header = decode_header(ChangeInvisibleTimeResponse, header_fields(answer))
        if not header.pop_ms:  # its group is beyond it, in order: nothing has changed
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
        """ForwardMessageToDeadLetterQueue: stored there, then acknowledged. Also with a handle
        whose time is over, as RocketMQ has it: the client would ask for ever. Raises
        StatusError."""
        topic, group = checked_topic(request.topic), checked_group(request.group)
        in_flight = yield from self.renewal.take(client, group, request.receipt_handle)
        handle = parse_handle(request.receipt_handle) if in_flight is None else in_flight.handle
        if handle.physical_offset < 0:
            raise StatusError(
                Refusal.HANDLE_WITHOUT_PLACE,
                f"the handle {request.receipt_handle!r} does not say where the message lies.",
            )
        address = broker_address(
            master_addresses((yield from self._backend.fetch_route(topic))), handle
        )
        command = dead_letter_request(group, topic, handle, request.message_id)
        try:
            expect_success((yield conversations.Call(address, command)), address)
        except SluiceError:
            if in_flight is not None:
                self.renewal.add(in_flight)
            raise
        yield from self._acknowledge_at_broker(address, ack_request(group, topic, handle))
        return m.ForwardMessageToDeadLetterQueueResponse(status=OK)

    def _valid_handle(self, text: str, in_flight: InFlightMessage | None) -> Handle:
        """The handle that counts of the one that the client has. Raises StatusError, also when its
        time is over."""
        handle = parse_handle(text) if in_flight is None else in_flight.handle
        late_ms = self._clock.now_ms() - handle.deadline_ms
        if late_ms >= 0:
            raise StatusError(
                Refusal.HANDLE_EXPIRED,
                f"the handle {text!r} is expired since {late_ms} ms: the message comes again.",
            )
        return handle


# --------------------------------------------------------------------------- what a client asks


def poll_timeout_ms(
    client: Client, request: m.ReceiveMessageRequest, remaining_s: float | None, limits: ProxyLimits
) -> int:
    """Return for how many ms a broker may wait for messages. Raises StatusError
    (ILLEGAL_POLLING_TIME) if the client will not wait for as long as `limits` say at least."""
    least_ms, longest_ms = limits.poll_ms_min, limits.poll_ms_longest
    left_ms = None if remaining_s is None else int(remaining_s * 1000)
    if request.HasField("long_polling_timeout"):
        wait_ms = to_ms(request.long_polling_timeout)
    elif left_ms is None:
        wait_ms = longest_ms
    else:
        settings = client.settings
        timeout_ms = 0 if settings is None else to_ms(settings.request_timeout)
        wait_ms = left_ms - timeout_ms // 2
    wait_ms = min(max(wait_ms, least_ms), longest_ms)
    if left_ms is None:
        return wait_ms
    if wait_ms > left_ms < least_ms:
        is_known = client.version >= POLLING_TIME_SINCE
        raise StatusError(
            Refusal.POLLING_TIME if is_known else Refusal.POLLING_TIME_OLD_CLIENT,
            f"the call ends in {left_ms} ms, and a receive waits for at least {least_ms} ms: "
            "give it a later deadline.",
        )
    return max(min(wait_ms, left_ms - DEADLINE_MARGIN_MS), 0)


def to_subscription(topic: str, expression: m.FilterExpression) -> Subscription:
    """The filter of a receive. Its SQL92 is left to the broker to compile. Raises StatusError
    (ILLEGAL_FILTER_EXPRESSION)."""
    text = expression.expression
    if expression.type != FilterType.SQL:
        return _tag_subscription(topic, text)
    if not text:
        raise StatusError(Refusal.FILTER_EMPTY, "write one, or filter by tags.")
    return Subscription(topic, text, SQL92)


def _tag_subscription(topic: str, text: str) -> Subscription:
    """Return a subscription to tags; those of usual lengths are kept."""
    made = (
        _cached_tag_subscription
        if len(topic) + len(text) <= CACHED_LENGTH_MAX
        else _cached_tag_subscription.__wrapped__
    )
    return made(topic, text)


@lru_cache(maxsize=1024)
def _cached_tag_subscription(topic: str, text: str) -> Subscription:
    try:
        return subscribe(topic, text, TAG)
    except FilterSyntaxError as error:
        raise StatusError(Refusal.FILTER, str(error)) from error


def checked_invisible_ms(duration: m.Duration, least_ms: int, longest_ms: int) -> int:
    """Return an invisible time in ms. Raises StatusError (ILLEGAL_INVISIBLE_TIME) if it is not from
    `least_ms` to `longest_ms`."""
    time_ms = to_ms(duration)
    text = f"the call asks for {time_ms} ms"
    if time_ms < least_ms:
        raise StatusError(Refusal.INVISIBLE_TIME_TOO_SMALL, text, limit=least_ms)
    if time_ms > longest_ms:
        raise StatusError(Refusal.INVISIBLE_TIME_TOO_LARGE, text, limit=longest_ms)
    return time_ms


def parse_handle(text: str) -> Handle:
    """Of one message. Raises StatusError (INVALID_RECEIPT_HANDLE)."""
    try:
        handle = Handle.parse(text[: HANDLE_LENGTH_MAX + 1])
    except ProtocolError as error:
        raise StatusError(Refusal.HANDLE_MALFORMED, str(error)) from error
    numbers = [it for it in handle if isinstance(it, int)]
    if (
        len(text) > HANDLE_LENGTH_MAX
        or max(numbers) >= 1 << 63
        or handle.queue_id >= 1 << 31
        or min(handle.offset, handle.queue_id, handle.pop_ms, handle.invisible_ms) < 0
    ):
        raise StatusError(
            Refusal.HANDLE_MALFORMED,
            f"the handle {text[:HANDLE_LENGTH_MAX]!r} names no message.",
        )
    return handle


def broker_address(masters: dict[str, str], handle: Handle) -> str:
    """Of the broker that has given it. Raises StatusError (INVALID_RECEIPT_HANDLE)."""
    address = masters.get(handle.broker)
    if address is None:
        raise StatusError(
            Refusal.HANDLE_BROKER,
            "the handle names this broker, which does not serve the topic.",
            broker=handle.broker,
        )
    return address


# ---------------------------------------------------------------------- what brokers are asked


def pop_request(
    group: str,
    wanted: Subscription,
    broker: str,
    count_max: int,
    invisible_ms: int,
    poll_ms: int,
    attempt_id: str,
    *,
    is_order: bool,
) -> Command:
    """Messages of any queue of the broker; a group that begins has those that come from now on.
    HOT: a literal of a PopMessageRequest."""
    fields = {
        "consumerGroup": group,
        "topic": wanted.topic,
        "queueId": ANY_QUEUE,
        "bname": broker,
        "maxMsgNums": str(count_max),
        "invisibleTime": str(invisible_ms),
        "pollTime": str(poll_ms),
        "bornTime": "0",
        "initMode": INIT_FROM_END,
        "expType": wanted.kind,
        "exp": wanted.expression,
        "order": "true" if is_order else "false",
    }
    if attempt_id:
        fields["attemptId"] = attempt_id
    return Command(RequestCode.POP_MESSAGE, fields)


def ack_request(group: str, topic: str, handle: Handle) -> Command:
    """The message is done. HOT: a literal of an AckMessageRequest."""
    return Command(RequestCode.ACK_MESSAGE, _handle_fields(group, topic, handle))


def _handle_fields(group: str, topic: str, handle: Handle) -> dict[str, str]:
    return {
        "consumerGroup": group,
        "topic": pop_topic(topic, group, handle.kind),
        "queueId": str(handle.queue_id),
        "bname": handle.broker,
        "extraInfo": handle.text(),
        "offset": str(handle.offset),
    }


def batch_ack_request(group: str, topic: str, broker: str, handles: list[Handle]) -> Command:
    """Several messages of one broker are done."""
    pops: dict[Handle, list[int]] = {}
    for handle in handles:
        pops.setdefault(handle._replace(offset=NONE, physical_offset=NONE), []).append(
            handle.offset
        )
    acks = [PopAck(group, topic, handle, tuple(offsets)) for handle, offsets in pops.items()]
    body = encode_pop_acks(broker, acks)
    return requests.make_request(RequestCode.BATCH_ACK_MESSAGE, body=body)


def change_invisible_request(
    group: str, topic: str, handle: Handle, invisible_ms: int, *, suspend: bool = False
) -> Command:
    """The message is invisible for another time, from now on. `suspend`: this is no failed attempt;
    for brokers that know it."""
    fields = _handle_fields(group, topic, handle)
    fields |= {"invisibleTime": str(invisible_ms), "suspend": "true" if suspend else "false"}
    return Command(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, fields)


def dead_letter_request(group: str, topic: str, handle: Handle, message_id: str) -> Command:
    """The message becomes a dead letter, whatever its group allows."""
    header = SendBackRequest(
        physical_offset=handle.physical_offset,
        group=group,
        delay_level=-1,
        origin_message_id=message_id,
        origin_topic=pop_topic(topic, group, handle.kind),
        reconsume_times_max=0,
        broker=handle.broker,
    )
    return requests.make_request(RequestCode.CONSUMER_SEND_MSG_BACK, header)


def split_acks(
    items: list[tuple[int, str, Handle]],
) -> tuple[list[tuple[int, str, Handle]], dict[tuple[str, str], list[tuple[int, Handle]]]]:
    """Acknowledgements (a number, an address, a handle): those to be sent alone, and those that go
    together, by address and broker."""
    single, batches = [], dict[tuple[str, str], list[tuple[int, Handle]]]()
    for item in items:
        number, address, handle = item
        if 0 <= handle.offset - handle.start_offset < BATCH_SPAN_MAX:
            batches.setdefault((address, handle.broker), []).append((number, handle))
        else:
            single.append(item)
    for (address, _), batch in [*batches.items()]:
        if len(batch) == 1:
            ((number, handle),) = batches.pop((address, batch[0][1].broker))
            single.append((number, address, handle))
    return single, batches


# ----------------------------------------------------------------------------- what they answer


def decode_popped(answer: Command, broker: str) -> Iterator[PoppedMessage]:
    """Yield the messages of a pop, each with its handle. Raises ProtocolError. HOT.

    The handle is made of what the answer's header says. The property POP_CK is never one: in a
    stored message anybody may have written it.
    """
    header = decode_header(PopMessageResponse, answer.fields)
    kinds = _TopicKinds(header.message_offset_info)
    starts, times = (
        _parse_numbers_by_queue(header.start_offset_info),
        _parse_numbers_by_queue(header.order_count_info),
    )
    pop_ms, invisible_ms, revive = header.pop_ms, header.invisible_ms, header.revive_queue
    for stored in decode_records(answer.body):
        queue_id, offset, count = stored.queue_id, stored.queue_offset, stored.reconsume_times
        place, kind = stored.physical_offset, kinds.take(stored)
        start = starts.get(f"{kind} {queue_id}", offset)
        handle = Handle(start, pop_ms, invisible_ms, revive, kind, broker, queue_id, offset, place)
        if times:
            known = times.get(f"{kind} qo{queue_id}%{offset}") or times.get(f"{kind} {queue_id}")
            count = known or count
        yield PoppedMessage(stored, handle, count)


class _TopicKinds:
    """From which kind of topic each message of a pop was taken: the subscribed one, or that of
    retries, whose messages come under the name of the subscribed one."""

    def __init__(self, info: str | None) -> None:
        """`info` lists `kind queue offset,…` in the order of the messages, joined by `;`. Raises
        ProtocolError."""
        self._left: dict[tuple[int, int], deque[int]] = {}
        try:
            for part in (info or "").split(";") if info else ():
                kind, queue_id, offsets = part.split(" ")
                for offset in offsets.split(","):
                    self._left.setdefault((int(queue_id), int(offset)), deque()).append(int(kind))
        except ValueError:
            raise ProtocolError(f"{info!r} does not say what a pop has found.") from None

    def take(self, stored: StoredMessage) -> int:
        """Return the kind of the next message of an answer. HOT."""
        kinds = self._left.get((stored.queue_id, stored.queue_offset))
        listed = kinds.popleft() if kinds else POP_NORMAL
        return pop_kind(stored.topic) or listed


def _parse_numbers_by_queue(info: str | None) -> dict[str, int]:
    """`kind queue number;…` as kind and queue -> number."""
    if not info:
        return {}
    try:
        pairs = [part.rpartition(" ") for part in info.split(";")]
        return {place: int(number) for place, _, number in pairs}
    except ValueError:
        raise ProtocolError(f"{info!r} does not say what a pop has found.") from None


def to_handle_error(answer: Command) -> StatusError | RequestError:
    """What a broker says against a handle. Clients ask again for ever, unless the handle is what is
    wrong (spec/grpc.md §7)."""
    if answer.code in _UNKNOWN_HANDLE:
        return StatusError(Refusal.HANDLE_UNKNOWN, answer.remark or "no such message")
    return request_error(answer)


def to_ack_response(
    request: m.AckMessageRequest, statuses: Mapping[int, m.Status]
) -> m.AckMessageResponse:
    """The answer: of each entry its status, by number. Raises StatusError when there are none."""
    if not statuses:
        raise StatusError(Refusal.ENTRIES_NONE, "name the messages to acknowledge.")
    answer = m.AckMessageResponse()
    for number, entry in enumerate(request.entries):
        status = statuses[number]
        one = answer.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle)
        one.status.code, one.status.message = status.code, status.message
    codes = {status.code for status in statuses.values()}
    code = Code(codes.pop()) if len(codes) == 1 else Code.MULTIPLE_RESULTS
    answer.status.code, answer.status.message = code, code.name
    return answer
