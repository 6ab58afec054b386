"""PullMessage, UpdateOffset, GetOffset and QueryOffset: reads by offset (spec/grpc.md §4).

The protocol defines these calls, but RocketMQ's proxy serves none of them. Each call names one
queue of one broker, as in the route. The response to a pull is a status, the messages, and the next
offset:

    OK                 There are messages.
    MESSAGE_NOT_FOUND  No message arrived within the polling time. The next offset is behind the
                       messages that do not match the filter.
    ILLEGAL_OFFSET     The queue does not have this offset, or the group's offset was reset. The
                       next offset is where to continue. If the offset was behind the end, this is
                       the first offset, since the topic may have been deleted and created again.

The broker parks a pull without messages. If new messages do not match the filter, the proxy pulls
again for the rest of the polling time. Lite topics are not supported; their call is refused.
"""

from collections.abc import Iterable

from sluicemq.client.core import conversations, requests
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.identity import restart_offset
from sluicemq.client.core.requests import (
    PullResponse,
    PullStatus,
    expect_success,
    int_field,
    parse_pull_response,
)
from sluicemq.config.proxying import ProxyLimits
from sluicemq.filter.subscriptions import tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import PERM_READ, MessageQueue
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, master_addresses
from sluicemq.proxy.clients import OK, Client
from sluicemq.proxy.convert import to_message, to_ms, to_subscription
from sluicemq.proxy.limits import Refusal, StatusError, checked_group, checked_topic
from sluicemq.proxy.messages import Code, QueryOffsetPolicy
from sluicemq.proxy.receiving import (
    BATCH_MAX,
    BROKER_RESPONSE_S,
    DEADLINE_MARGIN_MS,
)
from sluicemq.record.codec import decode_records


class Pulling:
    """The service object of clients that read queues by offset."""

    def __init__(self, backend: Backend, limits: ProxyLimits) -> None:
        """Create the object that serves pulls from the brokers of `backend`, within `limits`."""
        self._backend = backend
        self._limits = limits
        # The calls whose pull a broker may park, in the order of their pulls.
        self._polling_calls: dict[Call, None] = {}

    def drain(self) -> None:
        """End all pulls that wait for messages, with the status MESSAGE_NOT_FOUND."""
        for call in tuple(self._polling_calls):
            status = m.Status(
                code=Code.MESSAGE_NOT_FOUND, message="no new message: the proxy is shutting down"
            )
            call.reply_all([m.PullMessageResponse(status=status).SerializeToString()])

    def pull(
        self, client: Client, request: m.PullMessageRequest, call: Call
    ) -> Conversation[list[m.PullMessageResponse]]:
        """Serve PullMessage: return a status, the messages, and the next offset to pull.

        Requests are sent to the broker until a message matches the filter, until all messages of
        the queue are read, or until the polling time is over. The status is OK, MESSAGE_NOT_FOUND,
        or ILLEGAL_OFFSET if the queue does not have the offset. Raises StatusError if the request
        is invalid, and SluiceError if the broker fails.
        """
        group = checked_group(request.group)
        queue, address = yield from self._resolve_queue(request.message_queue)
        subscription = to_subscription(queue.topic, request.filter_expression)
        count_max = min(request.batch_size, BATCH_MAX) if request.batch_size > 0 else BATCH_MAX
        clock = self._backend.clock
        until_s = clock.monotonic_s() + self._compute_poll_ms(request, call) / 1000

        offset = request.offset
        while not call.is_closed:
            wait_ms = max(round((until_s - clock.monotonic_s()) * 1000), 0)
            command = requests.pull(
                group,
                queue,
                offset,
                count_max=count_max,
                subscription=subscription,
                suspend_timeout_ms=wait_ms,
            )
            self._polling_calls[call] = None
            try:
                response = yield conversations.Call(
                    address, command, wait_ms / 1000 + BROKER_RESPONSE_S
                )
            finally:
                del self._polling_calls[call]
            pulled = parse_pull_response(response, address)
            if pulled.status is PullStatus.OFFSET_ILLEGAL:
                return _illegal_offset_responses(queue, offset, pulled)

            next_offset = pulled.next_offset
            records = decode_records(pulled.data, broker=queue.broker)
            # The broker compares tags only by hash.
            matching = [record for record in records if tag_matches(subscription, record.tag)]
            if matching:
                return _pull_responses(Code.OK, "OK", next_offset, matching)

            has_read_all = pulled.status is PullStatus.NO_NEW_MSG or next_offset <= offset
            offset = next_offset
            if has_read_all or clock.monotonic_s() >= until_s:
                break
        return _pull_responses(Code.MESSAGE_NOT_FOUND, "no new message", offset)

    def _compute_poll_ms(self, request: m.PullMessageRequest, call: Call) -> int:
        """Return the polling time of a request in ms.

        It is limited by the maximum of the proxy, and by the time until the call's deadline minus a
        margin. The result is negative if the deadline is too near.
        """
        poll_ms = min(to_ms(request.long_polling_timeout), self._limits.poll_ms_longest)
        if call.remaining_s is None:
            return poll_ms
        return min(poll_ms, int(call.remaining_s * 1000) - DEADLINE_MARGIN_MS)

    def update_offset(
        self, client: Client, request: m.UpdateOffsetRequest, call: Call
    ) -> Conversation[m.UpdateOffsetResponse]:
        """Serve UpdateOffset: commit the offset of a group in a queue.

        Raises StatusError if the request is invalid, and SluiceError if the broker fails.
        """
        group = checked_group(request.group)
        queue, address = yield from self._resolve_queue(request.message_queue)
        if request.offset < 0:
            raise StatusError(
                Refusal.OFFSET_NEGATIVE,
                f"the offset {request.offset} is negative. Commit 0 or more.",
            )
        command = requests.commit_offset(group, queue, request.offset)
        expect_success((yield conversations.Call(address, command)), address)
        return m.UpdateOffsetResponse(status=OK)

    def get_offset(
        self, client: Client, request: m.GetOffsetRequest, call: Call
    ) -> Conversation[m.GetOffsetResponse]:
        """Serve GetOffset: return the committed offset of a group in a queue.

        Raises StatusError if the request is invalid. Raises SluiceError if the broker has no
        committed offset, or fails.
        """
        group = checked_group(request.group)
        queue, address = yield from self._resolve_queue(request.message_queue)
        response = yield conversations.Call(address, requests.offset_of_group(group, queue))
        offset = int_field(expect_success(response, address), "offset")
        return m.GetOffsetResponse(status=OK, offset=offset)

    def query_offset(
        self, client: Client, request: m.QueryOffsetRequest, call: Call
    ) -> Conversation[m.QueryOffsetResponse]:
        """Serve QueryOffset: return the first or next offset of a queue, or the offset at a time.

        Raises StatusError if the request is invalid, and SluiceError if the broker fails.
        """
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
        """Refuse SyncLiteSubscription with a StatusError (UNSUPPORTED)."""
        yield from ()  # makes this a generator, as every handler is
        raise StatusError(
            Refusal.LITE_TOPICS, "there are no lite topics here. Subscribe to normal topics."
        )

    def _resolve_queue(self, requested: m.MessageQueue) -> Conversation[tuple[MessageQueue, str]]:
        """Return the queue that a request names, and the address of its broker.

        Raises StatusError if the queue does not exist or is not readable, and RouteNotFoundError if
        the topic does not exist.
        """
        topic = checked_topic(requested.topic)
        broker = requested.broker.name
        route = yield from self._backend.fetch_route(topic)
        address = master_addresses(route).get(broker)
        if address is None:
            raise StatusError(
                Refusal.QUEUE_BROKER,
                f"the broker {broker!r} does not have the topic {topic}. Query its route.",
            )

        is_readable = False
        readable_count = 0
        for queue_data in route.queues:
            if queue_data.broker == broker and queue_data.perm & PERM_READ:
                is_readable = True
                readable_count += queue_data.read_queues
        if not 0 <= requested.id < readable_count:
            raise StatusError(
                Refusal.QUEUE_UNKNOWN if is_readable else Refusal.QUEUE_UNREADABLE,
                f"queue {requested.id} of {topic} cannot be read on {broker}: it has "
                f"{readable_count} readable queues.",
            )
        return MessageQueue(topic, broker, requested.id), address


def _illegal_offset_responses(
    queue: MessageQueue, offset: int, pulled: PullResponse
) -> list[m.PullMessageResponse]:
    """Return the responses to a pull from an offset that the queue does not have.

    Their status is ILLEGAL_OFFSET. They contain the offset at which the client should go on.
    """
    next_offset = pulled.next_offset
    beginning = restart_offset(pulled, offset)
    if beginning is not None:
        next_offset = beginning
    status_message = (
        f"{queue.topic}:{queue.queue_id} on {queue.broker} has the offsets from "
        f"{pulled.offset_min} up to {pulled.offset_max}; instead of {offset} go on at "
        f"{next_offset}."
    )
    return _pull_responses(Code.ILLEGAL_OFFSET, status_message, next_offset)


def _pull_responses(
    code: Code, status_message: str, next_offset: int, records: Iterable[StoredMessage] = ()
) -> list[m.PullMessageResponse]:
    """Return the responses to a pull, in the order in which they are sent.

    The first one has the status, the next ones a message each, and the last one the next offset.
    """
    responses = [m.PullMessageResponse(status=m.Status(code=code, message=status_message))]
    for record in records:
        responses.append(m.PullMessageResponse())
        to_message(record, into=responses[-1].message)
    return [*responses, m.PullMessageResponse(next_offset=next_offset)]
