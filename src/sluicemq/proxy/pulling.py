"""Where groups and queues are, for clients that read by offset (spec/grpc.md §4).

The requests stand in the protocol, and RocketMQ's proxy serves none of them. Each names one queue
of one broker, as the route tells it. Lite topics are not served here, and that is said.
"""

from sluicemq.client.core import requests, talks
from sluicemq.client.core.requests import expect_success, number
from sluicemq.client.core.talks import Talk
from sluicemq.model.topic import PERM_READ, MessageQueue
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, masters_of
from sluicemq.proxy.clients import Client, StatusError
from sluicemq.proxy.limits import group_of, topic_of
from sluicemq.proxy.messages import Code, QueryOffsetPolicy


class Pulling:
    """The family of clients that read by offset."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def update(
        self, client: Client, request: m.UpdateOffsetRequest, call: Call
    ) -> Talk[m.UpdateOffsetResponse]:
        """UpdateOffset: the group has done everything before. Raises StatusError."""
        group = group_of(request.group)
        queue, address = yield from self._queue(request.message_queue)
        if request.offset < 0:
            raise StatusError(
                Code.ILLEGAL_OFFSET, f"the offset {request.offset} is below 0, where queues begin."
            )
        command = requests.commit_offset(group, queue, request.offset)
        expect_success((yield talks.Call(address, command)), address)
        return m.UpdateOffsetResponse(status=m.Status(code=Code.OK))

    def get(
        self, client: Client, request: m.GetOffsetRequest, call: Call
    ) -> Talk[m.GetOffsetResponse]:
        """GetOffset: where the group is. Raises StatusError."""
        group = group_of(request.group)
        queue, address = yield from self._queue(request.message_queue)
        reply = yield talks.Call(address, requests.offset_of_group(group, queue))
        offset = number(expect_success(reply, address), "offset")
        return m.GetOffsetResponse(status=m.Status(code=Code.OK), offset=offset)

    def query(
        self, client: Client, request: m.QueryOffsetRequest, call: Call
    ) -> Talk[m.QueryOffsetResponse]:
        """QueryOffset: where a queue begins, ends, or was at a time. Raises StatusError."""
        queue, address = yield from self._queue(request.message_queue)
        if request.query_offset_policy == QueryOffsetPolicy.BEGINNING:
            command = requests.offset_min(queue)
        elif request.query_offset_policy == QueryOffsetPolicy.END:
            command = requests.offset_max(queue)
        elif request.HasField("timestamp"):
            time = request.timestamp
            command = requests.offset_by_time(queue, time.seconds * 1000 + time.nanos // 1_000_000)
        else:
            raise StatusError(Code.BAD_REQUEST, "the policy TIMESTAMP needs a timestamp.")
        offset = number(expect_success((yield talks.Call(address, command)), address), "offset")
        return m.QueryOffsetResponse(status=m.Status(code=Code.OK), offset=offset)

    def sync_lite(
        self, client: Client, request: m.SyncLiteSubscriptionRequest, call: Call
    ) -> Talk[m.SyncLiteSubscriptionResponse]:
        """SyncLiteSubscription. Raises StatusError."""
        yield from ()
        raise StatusError(Code.UNSUPPORTED, "there are no lite topics here: subscribe to topics.")

    def _queue(self, asked: m.MessageQueue) -> Talk[tuple[MessageQueue, str]]:
        """The queue, and the address of its broker. Raises StatusError, RouteNotFoundError."""
        topic, broker = topic_of(asked.topic), asked.broker.name
        route = yield from self._backend.route(topic)
        address = masters_of(route).get(broker)
        if address is None:
            raise StatusError(
                Code.BAD_REQUEST, f"the broker {broker!r} does not have the topic {topic}."
            )
        counts = [
            data.read_queues
            for data in route.queues
            if data.broker == broker and data.perm & PERM_READ
        ]
        if not 0 <= asked.id < sum(counts):
            raise StatusError(
                Code.BAD_REQUEST if counts else Code.FORBIDDEN,
                f"queue {asked.id} of {topic} cannot be read on {broker}: it has {sum(counts)} "
                "readable queues.",
            )
        return MessageQueue(topic, broker, asked.id), address
