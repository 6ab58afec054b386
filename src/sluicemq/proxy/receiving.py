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

from sluicemq.client.core import conversations as talks
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
from sluicemq.proxy.backend import Backend, masters_of
from sluicemq.proxy.clients import OK, Client, Clients
from sluicemq.proxy.convert import message_of, milliseconds, put_time
from sluicemq.proxy.limits import Refusal, StatusError, group_of, topic_of
from sluicemq.proxy.messages import Code, FilterType
from sluicemq.proxy.renewal import Held, Renewal
from sluicemq.proxy.service import status_of
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
RESERVE_MS: Final = 500
"""So long before the client's deadline the broker is told to answer: it looks every 200 ms."""
ANSWER_S: Final = 3.0
"""So long a broker may take for an answer besides its waiting."""
FROM_END: Final = "1"
HANDLE_LENGTH_MAX: Final = 512
ENTRIES_MAX: Final = 1024
"""Of one AckMessage: what one client may ask of a turn."""
SPAN_MAX: Final = 4096
"""Messages so far from the first of their pop are acknowledged alone: of a batch's bits each offset
between them takes one."""
ANY_QUEUE: Final = "-1"
ATTEMPTS_MAX: Final = GroupConfig("").retry_times_max + 1
POLLING_TIME_SINCE: Final = "5.0.3"
"""Clients before that do not know the code ILLEGAL_POLLING_TIME."""
_UNKNOWN_HANDLE: Final = (
    ResponseCode.NO_MESSAGE, ResponseCode.MESSAGE_ILLEGAL, ResponseCode.TOPIC_NOT_EXIST,
)  # fmt: skip
"""What brokers say of a handle that names nothing."""
_FOUND: Final = m.ReceiveMessageResponse(status=OK)
_SETTLED: Final = (Code.OK, Code.INVALID_RECEIPT_HANDLE)


class Popped(NamedTuple):
    """A message as a pop gave it: `handle` names it, `times` says how often it was tried before."""

    stored: StoredMessage
    handle: ReceiptHandle
    times: int


class Receiving:
    """The family of consumers that receive."""

    def __init__(self, backend: Backend, clients: Clients, limits: ProxyLimits) -> None:
        self._backend = backend
        self._limits = limits
        self._clock = backend.clock
        self._turn = 0
        self._waiting: dict[Call, None] = {}
        self.renewal = Renewal(backend, clients, self._changed, limits)

    def run(self) -> None:
        """What clients work on stays invisible."""
        self.renewal.run()

    def held_by(self, client: Client) -> int:
        """How many messages it works on that are renewed for it."""
        return self.renewal.held_by(client)

    def drain(self) -> None:
        """Who waits is told that nothing came."""
        for call in tuple(self._waiting):
            answers = self._nothing("no new message: the proxy is about to end")
            call.reply_all([answer.SerializeToString() for answer in answers])

    # -------------------------------------------------------------------------------- receive

    def receive(
        self, client: Client, request: m.ReceiveMessageRequest, call: Call
    ) -> Conversation[list[m.ReceiveMessageResponse]]:
        """ReceiveMessage: status, messages, time. Raises StatusError. HOT."""
        limits = self._limits
        poll_ms = polling_ms(client, request, call.remaining_s, limits)
        topic, group = topic_of(request.message_queue.topic), group_of(request.group)
        invisible_ms = limits.invisible_ms
        is_renewed = request.auto_renew and limits.renews
        if not is_renewed:
            least_ms, longest_ms = limits.invisible_ms_min, limits.invisible_ms_longest
            invisible_ms = invisible_ms_of(request.invisible_duration, least_ms, longest_ms)
        elif not self.renewal.has_room(client):
            raise StatusError(
                Refusal.MESSAGES_HELD_TOO_MANY,
                f"there are {self.renewal.count} messages that clients of this proxy work on, too "
                "many of them this one's: acknowledge some.",
            )
        wanted = wanted_of(topic, request.filter_expression)
        broker, address = yield from self._broker(topic, request.message_queue.broker.name)
        config = yield from self._backend.group(group)
        pop = pop_request(
            group, wanted, broker, min(request.batch_size, BATCH_MAX), invisible_ms, poll_ms,
            request.attempt_id, is_order=config is not None and config.consume_message_orderly,
        )  # fmt: skip
        self._waiting[call] = None
        try:
            answer = yield talks.Call(address, pop, poll_ms / 1000 + ANSWER_S)
        finally:
            del self._waiting[call]
        if answer.code != ResponseCode.SUCCESS:
            return self._nothing_of(answer)
        found = list(popped_in(answer, broker))
        if call.is_closed:
            yield from self._give_back(group, topic, address, found)
            return []
        times_max = config.retry_times_max + 1 if config is not None else ATTEMPTS_MAX
        kept = yield from self._wanted(group, wanted, times_max, address, found)
        if not kept:
            return self._nothing("no match message")
        answers = [_FOUND]
        for stored, handle, times in kept:
            one, text = m.ReceiveMessageResponse(), handle.encode()
            message_of(stored, text, topic=topic, reconsume_times=times, into=one.message)
            answers.append(one)
            if is_renewed:
                self.renewal.keep(client, group, topic, text, handle, times)
        answers.append(self._time())
        return answers

    def _broker(self, topic: str, wanted: str) -> Conversation[tuple[str, str]]:
        """Name and address of the broker to ask: the one that is wanted, or the next one in turn.
        Raises StatusError, RouteNotFoundError."""
        route = yield from self._backend.route(topic)
        masters = masters_of(route)
        names = [it.broker for it in route.queues if it.perm & PERM_READ and it.broker in masters]
        if not names:
            raise StatusError(Refusal.NO_READABLE_QUEUE)
        if wanted not in names:
            self._turn += 1
            wanted = names[self._turn % len(names)]
        return wanted, masters[wanted]

    def _nothing_of(self, answer: Command) -> list[m.ReceiveMessageResponse]:
        """What a client is told of an answer without messages. Raises StatusError, RequestError."""
        if answer.code == ResponseCode.POLLING_FULL:
            return self._nothing("polling full", Code.TOO_MANY_REQUESTS)
        if answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
            raise StatusError(Refusal.FILTER, answer.remark or "the filter does not compile.")
        if answer.code not in (ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND):
            raise request_error(answer)
        return self._nothing("no new message")

    def _nothing(
        self, text: str, code: Code = Code.MESSAGE_NOT_FOUND
    ) -> list[m.ReceiveMessageResponse]:
        status = m.Status(code=code, message=text)
        return [m.ReceiveMessageResponse(status=status), self._time()]

    def _time(self) -> m.ReceiveMessageResponse:
        answer = m.ReceiveMessageResponse()
        put_time(answer.delivery_timestamp, self._clock.now_ms())
        return answer

    # ----------------------------------------------------------- what the client does not get

    def _give_back(
        self, group: str, topic: str, address: str, found: list[Popped]
    ) -> Conversation[None]:
        """Nobody waits for them any more."""
        for one in found:
            command = change_request(group, topic, one.handle, self._limits.given_back_ms)
            yield talks.Call(address, command)

    def _wanted(
        self, group: str, wanted: Subscription, times_max: int, address: str, found: list[Popped]
    ) -> Conversation[list[Popped]]:
        """What the client gets of them. One that has the hash of a tag that is wanted, and not the
        tag, is done; one that was tried too often is a dead letter. HOT."""
        kept, topic = [], wanted.topic
        for one in found:
            if not tag_matches(wanted, one.stored.tag):
                yield talks.Call(address, ack_request(group, topic, one.handle))
            elif one.times < times_max:
                kept.append(one)
            else:
                bury = bury_request(group, topic, one.handle, one.stored.message_id)
                answer = yield talks.Call(address, bury)
                if answer.code == ResponseCode.SUCCESS:  # else it comes again
                    yield talks.Call(address, ack_request(group, topic, one.handle))
        return kept

    # -------------------------------------------------------------------- what becomes of them

    def acknowledge(
        self, client: Client, request: m.AckMessageRequest, call: Call
    ) -> Conversation[m.AckMessageResponse]:
        """AckMessage: a status for each entry, and one for all. Raises StatusError. HOT."""
        topic, group = topic_of(request.topic), group_of(request.group)
        if len(request.entries) > ENTRIES_MAX:
            raise StatusError(
                Refusal.ENTRIES_TOO_MANY,
                f"{len(request.entries)} entries are more than {ENTRIES_MAX}: send some at a time.",
            )
        masters = masters_of((yield from self._backend.route(topic)))
        statuses: dict[int, m.Status] = {}
        taken: dict[int, Held] = {}
        single: list[tuple[int, str, ReceiptHandle]] = []
        for number, entry in enumerate(request.entries):
            try:
                held = yield from self.renewal.take(client, group, entry.receipt_handle)
                handle = self._current(entry.receipt_handle, held)
                single.append((number, address_of(masters, handle), handle))
            except StatusError as error:
                statuses[number] = status_of(error)
            else:
                if held is not None:
                    taken[number] = held
        single, batches = divided(single)
        for (address, broker), batch in batches.items():
            handles = [handle for _, handle in batch]
            status = yield from self._asked(address, batch_request(group, topic, broker, handles))
            statuses.update((number, status) for number, _ in batch)
        for number, address, handle in single:
            statuses[number] = yield from self._asked(address, ack_request(group, topic, handle))
        for number, held in taken.items():
            if statuses[number].code not in _SETTLED:
                self.renewal.put(held)
        return acknowledged(request, statuses)

    def _asked(self, address: str, command: Command) -> Conversation[m.Status]:
        """How an acknowledgement went."""
        try:
            answer = yield talks.Call(address, command)
            if answer.code == ResponseCode.SUCCESS:
                return OK
            raise refused(answer)
        except SluiceError as error:
            return status_of(error)

    def change(
        self, client: Client, request: m.ChangeInvisibleDurationRequest, call: Call
    ) -> Conversation[m.ChangeInvisibleDurationResponse]:
        """ChangeInvisibleDuration: the message has another handle then. Raises StatusError."""
        topic, group = topic_of(request.topic), group_of(request.group)
        time_ms = invisible_ms_of(request.invisible_duration, 0, self._limits.invisible_ms_longest)
        held = yield from self.renewal.take(client, group, request.receipt_handle)
        handle = self._current(request.receipt_handle, held)
        try:
            changed = yield from self._changed(
                group, topic, handle, time_ms, suspend=request.suspend
            )
        except SluiceError as error:
            if held is not None and not isinstance(error, StatusError):
                self.renewal.put(held)
            raise
        return m.ChangeInvisibleDurationResponse(status=OK, receipt_handle=changed.encode())

    def _changed(
        self, group: str, topic: str, handle: ReceiptHandle, time_ms: int, *, suspend: bool = False
    ) -> Conversation[ReceiptHandle]:
        """The handle that counts now. Raises StatusError, SluiceError."""
        address = address_of(masters_of((yield from self._backend.route(topic))), handle)
        command = change_request(group, topic, handle, time_ms, suspend=suspend)
        answer = yield talks.Call(address, command, ANSWER_S)
        if answer.code != ResponseCode.SUCCESS:
            raise refused(answer)
        header = decode_header(ChangeInvisibleTimeResponse, header_fields(answer))
        if not header.pop_ms:  # its group is beyond it, in order: nothing has changed
            return handle
        return handle._replace(
            start_offset=handle.offset, pop_ms=header.pop_ms, invisible_ms=header.invisible_ms,
            revive_queue=header.revive_queue,
        )  # fmt: skip

    def forward(
        self, client: Client, request: m.ForwardMessageToDeadLetterQueueRequest, call: Call
    ) -> Conversation[m.ForwardMessageToDeadLetterQueueResponse]:
        """ForwardMessageToDeadLetterQueue: stored there, then acknowledged. Also with a handle
        whose time is over, as RocketMQ has it: the client would ask for ever. Raises
        StatusError."""
        topic, group = topic_of(request.topic), group_of(request.group)
        held = yield from self.renewal.take(client, group, request.receipt_handle)
        handle = parse_handle(request.receipt_handle) if held is None else held.handle
        if handle.physical_offset < 0:
            raise StatusError(
                Refusal.HANDLE_WITHOUT_PLACE,
                f"the handle {request.receipt_handle!r} does not say where the message lies.",
            )
        address = address_of(masters_of((yield from self._backend.route(topic))), handle)
        command = bury_request(group, topic, handle, request.message_id)
        try:
            expect_success((yield talks.Call(address, command)), address)
        except SluiceError:
            if held is not None:
                self.renewal.put(held)
            raise
        yield from self._asked(address, ack_request(group, topic, handle))
        return m.ForwardMessageToDeadLetterQueueResponse(status=OK)

    def _current(self, text: str, held: Held | None) -> ReceiptHandle:
        """The handle that counts of the one that the client has. Raises StatusError, also when its
        time is over."""
        handle = parse_handle(text) if held is None else held.handle
        late_ms = self._clock.now_ms() - handle.deadline_ms
        if late_ms >= 0:
            raise StatusError(
                Refusal.HANDLE_EXPIRED,
                f"the handle {text!r} is expired since {late_ms} ms: the message comes again.",
            )
        return handle


# --------------------------------------------------------------------------- what a client asks


def polling_ms(
    client: Client, request: m.ReceiveMessageRequest, remaining_s: float | None, limits: ProxyLimits
) -> int:
    """Return for how many ms a broker may wait for messages. Raises StatusError
    (ILLEGAL_POLLING_TIME) if the client will not wait for as long as `limits` say at least."""
    least_ms, longest_ms = limits.poll_ms_min, limits.poll_ms_longest
    left_ms = None if remaining_s is None else int(remaining_s * 1000)
    if request.HasField("long_polling_timeout"):
        wait_ms = milliseconds(request.long_polling_timeout)
    elif left_ms is None:
        wait_ms = longest_ms
    else:
        settings = client.settings
        timeout_ms = 0 if settings is None else milliseconds(settings.request_timeout)
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
    return max(min(wait_ms, left_ms - RESERVE_MS), 0)


def wanted_of(topic: str, expression: m.FilterExpression) -> Subscription:
    """The filter of a receive. Its SQL92 is left to the broker to compile. Raises StatusError
    (ILLEGAL_FILTER_EXPRESSION)."""
    text = expression.expression
    if expression.type != FilterType.SQL:
        return _tags_of(topic, text)
    if not text:
        raise StatusError(Refusal.FILTER_EMPTY, "write one, or filter by tags.")
    return Subscription(topic, text, SQL92)


def _tags_of(topic: str, text: str) -> Subscription:
    """Return a subscription to tags; those of usual lengths are kept."""
    made = _made_of if len(topic) + len(text) <= CACHED_LENGTH_MAX else _made_of.__wrapped__
    return made(topic, text)


@lru_cache(maxsize=1024)
def _made_of(topic: str, text: str) -> Subscription:
    try:
        return subscribe(topic, text, TAG)
    except FilterSyntaxError as error:
        raise StatusError(Refusal.FILTER, str(error)) from error


def invisible_ms_of(duration: m.Duration, least_ms: int, longest_ms: int) -> int:
    """Return an invisible time in ms. Raises StatusError (ILLEGAL_INVISIBLE_TIME) if it is not from
    `least_ms` to `longest_ms`."""
    time_ms = milliseconds(duration)
    text = f"the call asks for {time_ms} ms"
    if time_ms < least_ms:
        raise StatusError(Refusal.INVISIBLE_TIME_TOO_SMALL, text, limit=least_ms)
    if time_ms > longest_ms:
        raise StatusError(Refusal.INVISIBLE_TIME_TOO_LARGE, text, limit=longest_ms)
    return time_ms


def parse_handle(text: str) -> ReceiptHandle:
    """Of one message. Raises StatusError (INVALID_RECEIPT_HANDLE)."""
    try:
        handle = ReceiptHandle.parse(text[: HANDLE_LENGTH_MAX + 1])
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


def address_of(masters: dict[str, str], handle: ReceiptHandle) -> str:
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
    group: str, wanted: Subscription, broker: str, count_max: int, invisible_ms: int, poll_ms: int,
    attempt_id: str, *, is_order: bool,
) -> Command:  # fmt: skip
    """Messages of any queue of the broker; a group that begins has those that come from now on.
    HOT: a literal of a PopMessageRequest."""
    fields = {
        "consumerGroup": group, "topic": wanted.topic, "queueId": ANY_QUEUE, "bname": broker,
        "maxMsgNums": str(count_max), "invisibleTime": str(invisible_ms),
        "pollTime": str(poll_ms), "bornTime": "0", "initMode": FROM_END,
        "expType": wanted.kind, "exp": wanted.expression, "order": "true" if is_order else "false",
    }  # fmt: skip
    if attempt_id:
        fields["attemptId"] = attempt_id
    return Command(RequestCode.POP_MESSAGE, fields)


def ack_request(group: str, topic: str, handle: ReceiptHandle) -> Command:
    """The message is done. HOT: a literal of an AckMessageRequest."""
    return Command(RequestCode.ACK_MESSAGE, _place(group, topic, handle))


def _place(group: str, topic: str, handle: ReceiptHandle) -> dict[str, str]:
    return {
        "consumerGroup": group, "topic": pop_topic(topic, group, handle.kind),
        "queueId": str(handle.queue_id), "bname": handle.broker, "extraInfo": handle.encode(),
        "offset": str(handle.offset),
    }  # fmt: skip


def batch_request(group: str, topic: str, broker: str, handles: list[ReceiptHandle]) -> Command:
    """Several messages of one broker are done."""
    pops: dict[ReceiptHandle, list[int]] = {}
    for handle in handles:
        pops.setdefault(handle._replace(offset=NO_OFFSET, physical_offset=NO_OFFSET), []).append(
            handle.offset
        )
    acks = [PopAck(group, topic, handle, tuple(offsets)) for handle, offsets in pops.items()]
    body = encode_pop_acks(broker, acks)
    return requests.make_request(RequestCode.BATCH_ACK_MESSAGE, body=body)


def change_request(
    group: str, topic: str, handle: ReceiptHandle, invisible_ms: int, *, suspend: bool = False
) -> Command:
    """The message is invisible for another time, from now on. `suspend`: this is no failed attempt;
    for brokers that know it."""
    fields = _place(group, topic, handle)
    fields |= {"invisibleTime": str(invisible_ms), "suspend": "true" if suspend else "false"}
    return Command(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, fields)


def bury_request(group: str, topic: str, handle: ReceiptHandle, message_id: str) -> Command:
    """The message becomes a dead letter, whatever its group allows."""
    header = SendBackRequest(
        physical_offset=handle.physical_offset, group=group, delay_level=-1,
        origin_message_id=message_id, origin_topic=pop_topic(topic, group, handle.kind),
        reconsume_times_max=0, broker=handle.broker,
    )  # fmt: skip
    return requests.make_request(RequestCode.CONSUMER_SEND_MSG_BACK, header)


def divided(
    items: list[tuple[int, str, ReceiptHandle]],
) -> tuple[
    list[tuple[int, str, ReceiptHandle]], dict[tuple[str, str], list[tuple[int, ReceiptHandle]]]
]:
    """Acknowledgements (a number, an address, a handle): those to be sent alone, and those that go
    together, by address and broker."""
    single, batches = [], dict[tuple[str, str], list[tuple[int, ReceiptHandle]]]()
    for item in items:
        number, address, handle = item
        if 0 <= handle.offset - handle.start_offset < SPAN_MAX:
            batches.setdefault((address, handle.broker), []).append((number, handle))
        else:
            single.append(item)
    for (address, _), batch in [*batches.items()]:
        if len(batch) == 1:
            ((number, handle),) = batches.pop((address, batch[0][1].broker))
            single.append((number, address, handle))
    return single, batches


# ----------------------------------------------------------------------------- what they answer


def popped_in(answer: Command, broker: str) -> Iterator[Popped]:
    """Yield the messages of a pop, each with its handle. Raises ProtocolError. HOT.

    The handle is made of what the answer's header says. The property POP_CK is never one: in a
    stored message anybody may have written it.
    """
    header = decode_header(PopMessageResponse, answer.fields)
    kinds = _Kinds(header.message_offset_info)
    starts, times = _by_queue(header.start_offset_info), _by_queue(header.order_count_info)
    pop_ms, invisible_ms, revive = header.pop_ms, header.invisible_ms, header.revive_queue
    for stored in decode_records(answer.body):
        queue_id, offset, count = stored.queue_id, stored.queue_offset, stored.reconsume_times
        place, kind = stored.physical_offset, kinds.take(stored)
        start = starts.get(f"{kind} {queue_id}", offset)
        handle = ReceiptHandle(
            start, pop_ms, invisible_ms, revive, kind, broker, queue_id, offset, place
        )
        if times:
            known = times.get(f"{kind} qo{queue_id}%{offset}") or times.get(f"{kind} {queue_id}")
            count = known or count
        yield Popped(stored, handle, count)


class _Kinds:
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


def _by_queue(info: str | None) -> dict[str, int]:
    """`kind queue number;…` as kind and queue -> number."""
    if not info:
        return {}
    try:
        pairs = [part.rpartition(" ") for part in info.split(";")]
        return {place: int(number) for place, _, number in pairs}
    except ValueError:
        raise ProtocolError(f"{info!r} does not say what a pop has found.") from None


def refused(answer: Command) -> StatusError | RequestError:
    """What a broker says against a handle. Clients ask again for ever, unless the handle is what is
    wrong (spec/grpc.md §7)."""
    if answer.code in _UNKNOWN_HANDLE:
        return StatusError(Refusal.HANDLE_UNKNOWN, answer.remark or "no such message")
    return request_error(answer)


def acknowledged(
    request: m.AckMessageRequest, statuses: Mapping[int, m.Status]
) -> m.AckMessageResponse:
    """The answer: of each entry its status, by number. Raises StatusError when there are none."""
    if not statuses:
        raise StatusError(Refusal.ENTRIES_NONE, "name the messages to acknowledge.")
    answer = m.AckMessageResponse()
    for number, entry in enumerate(request.entries):
        status = statuses[number]
        one = answer.entries.add(
            message_id=entry.message_id, receipt_handle=entry.receipt_handle
        )  # fmt: skip
        one.status.code, one.status.message = status.code, status.message
    codes = {status.code for status in statuses.values()}
    code = Code(codes.pop()) if len(codes) == 1 else Code.MULTIPLE_RESULTS
    answer.status.code, answer.status.message = code, code.name
    return answer
