"""Where a topic lives, as a client of the proxy sees it: at the address by which it came in.

All brokers of a route have that one address, or those that the client named (spec/grpc.md §4): each
proxy serves all of them. Queue ids are the brokers' own, which PullMessage needs; RocketMQ's proxy
counts them anew when a topic has more queues of one kind.
"""

from collections.abc import Iterator
from typing import Final

from sluicemq.client.core.conversations import Conversation
from sluicemq.model.addresses import parse_address
from sluicemq.model.topic import (
    MASTER_ID,
    MESSAGE_TYPE,
    MESSAGE_TYPES,
    MIXED,
    PERM_READ,
    PERM_WRITE,
    QueueData,
    TopicConfig,
)
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend
from sluicemq.proxy.clients import OK, Client
from sluicemq.proxy.limits import Refusal, StatusError, group_of, topic_of
from sluicemq.proxy.messages import AddressScheme, MessageType, Permission

ANY_QUEUE: Final = -1
_PERMISSIONS: Final = {
    0: Permission.NONE, PERM_READ: Permission.READ, PERM_WRITE: Permission.WRITE,
    PERM_READ | PERM_WRITE: Permission.READ_WRITE,
}  # fmt: skip


def topic_type(config: TopicConfig | None) -> str:
    """The message type of a topic as its attribute says; NORMAL without one."""
    return (config and config.attributes.get(MESSAGE_TYPE)) or "NORMAL"


def accepted_types(config: TopicConfig | None) -> list[MessageType]:
    """What a topic takes, as its route tells producers."""
    kind = topic_type(config)
    if kind == MIXED:
        return [MessageType[name] for name in MESSAGE_TYPES]
    known = kind in MessageType.__members__
    return [MessageType[kind] if known else MessageType.MESSAGE_TYPE_UNSPECIFIED]


class Routing:
    """QueryRoute and QueryAssignment."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def query_route(
        self, client: Client, request: m.QueryRouteRequest, call: Call
    ) -> Conversation[m.QueryRouteResponse]:
        """A queue of the answer for each queue of the topic and each copy of its broker."""
        name = topic_of(request.topic)
        route = yield from self._backend.route(name)
        config = yield from self._backend.topic(name)
        types, endpoints = accepted_types(config), endpoints_of(request.endpoints, client)
        answer = m.QueryRouteResponse(status=OK)
        copies = {data.broker: sorted(data.addresses) for data in route.brokers}
        for data in route.queues:
            for broker_id in copies.get(data.broker, ()):
                broker = m.Broker(name=data.broker, id=broker_id, endpoints=endpoints)
                for queue_id, permission in permissions(data):
                    answer.message_queues.add(
                        topic=request.topic, id=queue_id, permission=permission, broker=broker,
                        accept_message_types=types,
                    )  # fmt: skip
        return answer

    def query_assignment(
        self, client: Client, request: m.QueryAssignmentRequest, call: Call
    ) -> Conversation[m.QueryAssignmentResponse]:
        """All of each readable broker, as one queue; of a group that consumes in order, each queue.
        Raises StatusError (FORBIDDEN) when nothing may be read."""
        name, group = topic_of(request.topic), group_of(request.group)
        route = yield from self._backend.route(name)
        config = yield from self._backend.group(group)
        endpoints = endpoints_of(request.endpoints, client)
        answer = m.QueryAssignmentResponse(status=OK)
        masters = {data.broker for data in route.brokers if MASTER_ID in data.addresses}
        for data in route.queues:
            if not data.perm & PERM_READ or data.broker not in masters:
                continue
            is_ordered = config is not None and config.consume_message_orderly
            queues = range(data.read_queues) if is_ordered else (ANY_QUEUE,)
            for queue_id in queues:
                answer.assignments.add(
                    message_queue=m.MessageQueue(
                        topic=request.topic, id=queue_id,
                        permission=_PERMISSIONS[data.perm & (PERM_READ | PERM_WRITE)],
                        broker=m.Broker(name=data.broker, id=MASTER_ID, endpoints=endpoints),
                    )
                )  # fmt: skip
        if not answer.assignments:
            raise StatusError(Refusal.NO_READABLE_QUEUE)
        return answer


def permissions(data: QueueData) -> Iterator[tuple[int, Permission]]:
    """The queues of a topic on one broker with what may be done there; one when nothing may be."""
    readable = data.read_queues if data.perm & PERM_READ else 0
    writable = data.write_queues if data.perm & PERM_WRITE else 0
    if not readable and not writable:
        for queue_id in range(max(1, data.read_queues, data.write_queues)):
            yield queue_id, Permission.NONE
    for queue_id in range(max(readable, writable)):
        bits = (PERM_READ if queue_id < readable else 0) | (
            PERM_WRITE if queue_id < writable else 0
        )
        yield queue_id, _PERMISSIONS[bits]


def endpoints_of(asked: m.Endpoints, client: Client) -> m.Endpoints:
    """Those that the client named, else the address by which it came in."""
    if asked.addresses:
        return asked
    address = parse_address(client.local.address)
    scheme = AddressScheme.IPv6 if address and address.version > 4 else AddressScheme.IPv4
    return m.Endpoints(
        scheme=scheme,
        addresses=[m.Address(host=client.local.address, port=client.local.port)],
    )
