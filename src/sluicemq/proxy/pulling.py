"""Queues read by offset: PullMessage, and where groups and queues are (spec/grpc.md §4).

The requests stand in the protocol, and RocketMQ's proxy serves none of them. Each names one queue
of one broker, as the route tells it. A pull is answered with a status, messages, and the next
offset:

    OK                 the messages
    MESSAGE_NOT_FOUND  none for as long as the client waits; behind what its filter does not want
    ILLEGAL_OFFSET     the queue has no such offset, or the group was sent elsewhere: the next one;
                       for an offset behind the end the first one, since the topic may have been
                       deleted and created again

A pull waits at the broker, which wakes it. What is woken and finds nothing that the client wants
goes on waiting, for the rest of the time. Lite topics are not served here, and that is said.
"""

from collections.abc import Iterable

from sluicemq.client.core import conversations as conversations
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.identity import restart_offset
from sluicemq.client.core.requests import PullStatus, expect_success, int_field, parse_pull_response
from sluicemq.config.proxying import ProxyLimits
from sluicemq.filter.subscriptions import tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import PERM_READ, MessageQueue
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, master_addresses
from sluicemq.proxy.clients import OK, Client
from sluicemq.proxy.convert import to_message, to_ms
from sluicemq.proxy.limits import Refusal, StatusError, checked_group, checked_topic
from sluicemq.proxy.messages import Code, QueryOffsetPolicy
from sluicemq.proxy.receiving import (
    BROKER_RESPONSE_S,
    BATCH_MAX,
    DEADLINE_MARGIN_MS,
    to_subscription,
)
from sluicemq.record.codec import decode_records


class Pulling:
    """The family of clients that read by offset."""

    def __init__(self, backend: Backend, limits: ProxyLimits) -> None:
        self._backend = backend
        self._limits = limits
        self._polling_calls: dict[Call, None] = {}

    def drain(self) -> None:
        """Who waits is told that nothing came."""
        for call in tuple(self._polling_calls):
            status = m.Status(
                code=Code.MESSAGE_NOT_FOUND, message="no new message: the proxy is about to end"
            )
            call.reply_all([m.PullMessageResponse(status=status).SerializeToString()])

    def pull(
        self, client: Client, request: m.PullMessageRequest, call: Call
    ) -> Conversation[list[m.PullMessageResponse]]:
        """PullMessage. Raises StatusError."""
        group = checked_group(request.group)
        queue, address = yield from self._resolve_queue(request.message_queue)
        wanted = to_subscription(queue.topic, request.filter_expression)
        count = min(request.batch_size, BATCH_MAX) if request.batch_size > 0 else BATCH_MAX
        clock, wait_ms = self._backend.clock, to_ms(request.long_polling_timeout)
        if call.remaining_s is not None:
            wait_ms = min(wait_ms, int(call.remaining_s * 1000) - DEADLINE_MARGIN_MS)
        until_s = clock.monotonic_s() + min(wait_ms, self._limits.poll_ms_longest) / 1000
        offset = request.offset
        while not call.is_closed:
            wait_ms = max(round((until_s - clock.monotonic_s()) * 1000), 0)
            command = requests.pull(
                group,
                queue,
                offset,
                count_max=count,
                subscription=wanted,
                suspend_timeout_ms=wait_ms,
            )
            self._polling_calls[call] = None
            try:
                reply = yield conversations.Call(
                    address, command, wait_ms / 1000 + BROKER_RESPONSE_S
                )
            finally:
                del self._polling_calls[call]
            answer = parse_pull_response(reply, address)
            next_offset = answer.next_offset
            if answer.status is PullStatus.OFFSET_ILLEGAL:
                beginning = restart_offset(answer, offset)
                if beginning is not None:
                    next_offset = beginning
                text = (
                    f"{queue.topic}:{queue.queue_id} on {queue.broker} has the offsets from "
                    f"{answer.offset_min} up to {answer.offset_max}; for {offset} go on at "
                    f"{next_offset}."
                )
                return _pull_responses(Code.ILLEGAL_OFFSET, text, next_offset)
            records = decode_records(answer.data, broker=queue.broker)
            found = [record for record in records if tag_matches(wanted, record.tag)]
            if found:
                return _pull_responses(Code.OK, "OK", next_offset, found)
            is_through = answer.status is PullStatus.NO_NEW_MSG or next_offset <= offset
            offset = next_offset
            if is_through or clock.monotonic_s() >= until_s:
                break
        return _pull_responses(Code.MESSAGE_NOT_FOUND, "no new message", offset)

    def update_offset(
        self, client: Client, request: m.UpdateOffsetRequest, call: Call
    ) -> Conversation[m.UpdateOffsetResponse]:
        """UpdateOffset: the group has done everything before. Raises StatusError."""
        group = checked_group(request.group)
        queue, address = yield from self._resolve_queue(request.message_queue)
        if request.offset < 0:
            raise StatusError(
                Refusal.OFFSET_NEGATIVE,
                f"the offset {request.offset} is below 0, where queues begin.",
            )
        command = requests.commit_offset(group, queue, request.offset)
        expect_success((yield conversations.Call(address, command)), address)
        return m.UpdateOffsetResponse(status=OK)

    def get_offset(
        self, client: Client, request: m.GetOffsetRequest, call: Call
    ) -> Conversation[m.GetOffsetResponse]:
        """GetOffset: where the group is. Raises StatusError."""
        group = checked_group(request.group)
        queue, address = yield from self._resolve_queue(request.message_queue)
        reply = yield conversations.Call(address, requests.offset_of_group(group, queue))
        offset = int_field(expect_success(reply, address), "offset")
        return m.GetOffsetResponse(status=OK, offset=offset)

    def query_offset(
        self, client: Client, request: m.QueryOffsetRequest, call: Call
    ) -> Conversation[m.QueryOffsetResponse]:
        """QueryOffset: where a queue begins, ends, or was at a time. Raises StatusError."""
        queue, address = yield from self._resolve_queue(request.message_queue)
        if request.query_offset_policy == QueryOffsetPolicy.BEGINNING:
            command = requests.offset_min(queue)
        elif request.query_offset_policy == QueryOffsetPolicy.END:
            command = requests.offset_max(queue)
        elif request.HasField("timestamp"):
            command = requests.offset_by_time(queue, to_ms(request.timestamp))
        else:
            raise StatusError(Refusal.OFFSET_POLICY, "the policy TIMESTAMP needs a timestamp.")
        offset = int_field(
            expect_success((yield conversations.Call(address, command)), address), "offset"
        )
        return m.QueryOffsetResponse(status=OK, offset=offset)

    def sync_lite_subscription(
        self, client: Client, request: m.SyncLiteSubscriptionRequest, call: Call
    ) -> Conversation[m.SyncLiteSubscriptionResponse]:
        """SyncLiteSubscription. Raises StatusError."""
        yield from ()
        raise StatusError(
            Refusal.LITE_TOPICS, "there are no lite topics here: subscribe to topics."
        )

    def _resolve_queue(self, asked: m.MessageQueue) -> Conversation[tuple[MessageQueue, str]]:
        """The queue, and the address of its broker. Raises StatusError, RouteNotFoundError."""
        topic, broker = checked_topic(asked.topic), asked.broker.name
        route = yield from self._backend.fetch_route(topic)
        address = master_addresses(route).get(broker)
        if address is None:
            raise StatusError(
                Refusal.QUEUE_BROKER, f"the broker {broker!r} does not have the topic {topic}."
            )
        counts = [
            data.read_queues
            for data in route.queues
            if data.broker == broker and data.perm & PERM_READ
        ]
        if not 0 <= asked.id < sum(counts):
            raise StatusError(
                Refusal.QUEUE_UNKNOWN if counts else Refusal.QUEUE_UNREADABLE,
                f"queue {asked.id} of {topic} cannot be read on {broker}: it has {sum(counts)} "
                "readable queues.",
            )
        return MessageQueue(topic, broker, asked.id), address


def _pull_responses(
    code: Code, text: str, next_offset: int, records: Iterable[StoredMessage] = ()
) -> list[m.PullMessageResponse]:
    answers = [m.PullMessageResponse(status=m.Status(code=code, message=text))]
    for record in records:
        answers.append(m.PullMessageResponse())
        to_message(record, into=answers[-1].message)
    return [*answers, m.PullMessageResponse(next_offset=next_offset)]
