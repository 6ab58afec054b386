"""QueryRoute and QueryAssignment: the routes of topics as clients of the proxy see them.

All brokers in a route have the same address: the endpoints that the client sent in its request, or
the address at which it reached the proxy (spec/grpc.md §4). Each proxy serves all brokers. Queue
ids are those of the broker, because PullMessage needs them. RocketMQ's proxy renumbers the queues
of a topic that has different numbers of readable and writable queues.
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
from sluicemq.proxy.limits import Refusal, StatusError, checked_group, checked_topic
from sluicemq.proxy.messages import AddressScheme, MessageType, Permission

ANY_QUEUE: Final = -1
"""The queue id of an assignment that means all queues of the broker."""
_PERMISSIONS: Final = {
    0: Permission.NONE,
    PERM_READ: Permission.READ,
    PERM_WRITE: Permission.WRITE,
    PERM_READ | PERM_WRITE: Permission.READ_WRITE,
}


def topic_type(config: TopicConfig | None) -> str:
    """Return the message type in the attributes of a topic, or NORMAL if there is none."""
    return (config and config.attributes.get(MESSAGE_TYPE)) or "NORMAL"


def accepted_types(config: TopicConfig | None) -> list[MessageType]:
    """Return the message types that a topic accepts, for producers to check."""
    kind = topic_type(config)
    if kind == MIXED:
        return [MessageType[name] for name in MESSAGE_TYPES]
    known = kind in MessageType.__members__
    return [MessageType[kind] if known else MessageType.MESSAGE_TYPE_UNSPECIFIED]


class Routing:
    """The service object of QueryRoute and QueryAssignment."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def query_route(
        self, client: Client, request: m.QueryRouteRequest, call: Call
    ) -> Conversation[m.QueryRouteResponse]:
        """Return an entry for each queue of the topic on each replica of its broker (QueryRoute).

        Raises StatusError for an invalid topic name, and RouteNotFoundError.
        """
        name = checked_topic(request.topic)
        route = yield from self._backend.fetch_route(name)
        config = yield from self._backend.fetch_topic_config(name)
        types, endpoints = accepted_types(config), advertised_endpoints(request.endpoints, client)
        response = m.QueryRouteResponse(status=OK)
        copies = {data.broker: sorted(data.addresses) for data in route.brokers}
        for data in route.queues:
            for broker_id in copies.get(data.broker, ()):
                broker = m.Broker(name=data.broker, id=broker_id, endpoints=endpoints)
                for queue_id, permission in queue_permissions(data):
                    response.message_queues.add(
                        topic=request.topic,
                        id=queue_id,
                        permission=permission,
                        broker=broker,
                        accept_message_types=types,
                    )
        return response

    def query_assignment(
        self, client: Client, request: m.QueryAssignmentRequest, call: Call
    ) -> Conversation[m.QueryAssignmentResponse]:
        """Return one entry for each readable broker, meaning all of its queues (QueryAssignment).

        A group that consumes in order gets an entry for each queue. Raises StatusError for an
        invalid name, or (FORBIDDEN) if no queue is readable, and RouteNotFoundError.
        """
        name, group = checked_topic(request.topic), checked_group(request.group)
        route = yield from self._backend.fetch_route(name)
        config = yield from self._backend.fetch_group_config(group)
        endpoints = advertised_endpoints(request.endpoints, client)
        response = m.QueryAssignmentResponse(status=OK)
        masters = {data.broker for data in route.brokers if MASTER_ID in data.addresses}
        for data in route.queues:
            if not data.perm & PERM_READ or data.broker not in masters:
                continue
            is_ordered = config is not None and config.consume_message_orderly
            queues = range(data.read_queues) if is_ordered else (ANY_QUEUE,)
            for queue_id in queues:
                response.assignments.add(
                    message_queue=m.MessageQueue(
                        topic=request.topic,
                        id=queue_id,
                        permission=_PERMISSIONS[data.perm & (PERM_READ | PERM_WRITE)],
                        broker=m.Broker(name=data.broker, id=MASTER_ID, endpoints=endpoints),
                    )
                )
        if not response.assignments:
            raise StatusError(Refusal.NO_READABLE_QUEUE)
        return response


def queue_permissions(data: QueueData) -> Iterator[tuple[int, Permission]]:
    """Yield each queue id of a topic on one broker, with the permission of the queue.

    A topic that can neither be read nor written has at least one queue, without permissions.
    """
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


def advertised_endpoints(asked: m.Endpoints, client: Client) -> m.Endpoints:
    """Return the endpoints that the client named, or the address at which it reached the proxy."""
    if asked.addresses:
        return asked
    address = parse_address(client.local.address)
    scheme = AddressScheme.IPv6 if address and address.version > 4 else AddressScheme.IPv4
    return m.Endpoints(
        scheme=scheme,
        addresses=[m.Address(host=client.local.address, port=client.local.port)],
    )
