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
from sluicemq.proxy.backend import Backend, master_addresses
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
    if config is None:
        return "NORMAL"
    return config.attributes.get(MESSAGE_TYPE) or "NORMAL"


def accepted_types(config: TopicConfig | None) -> list[MessageType]:
    """Return the message types that a topic accepts. Producers check them.

    `config` has the settings of the topic; None means that the topic has no settings.
    """
    type_name = topic_type(config)
    if type_name == MIXED:
        return [MessageType[name] for name in MESSAGE_TYPES]
    if type_name in MessageType.__members__:
        return [MessageType[type_name]]
    return [MessageType.MESSAGE_TYPE_UNSPECIFIED]


class Routing:
    """The service object of QueryRoute and QueryAssignment."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def query_route(
        self, client: Client, request: m.QueryRouteRequest, call: Call
    ) -> Conversation[m.QueryRouteResponse]:
        """Serve QueryRoute: return an entry for each queue of a topic on each of its replicas.

        Raises StatusError for an invalid topic name, and RouteNotFoundError if the topic does not
        exist.
        """
        topic = checked_topic(request.topic)
        route = yield from self._backend.fetch_route(topic)
        config = yield from self._backend.fetch_topic_config(topic)
        types = accepted_types(config)
        endpoints = advertised_endpoints(request.endpoints, client)

        response = m.QueryRouteResponse(status=OK)
        # The ids of the replicas of each broker; the master has id 0.
        replica_ids = {
            broker_data.broker: sorted(broker_data.addresses) for broker_data in route.brokers
        }
        for queue_data in route.queues:
            for broker_id in replica_ids.get(queue_data.broker, ()):
                broker = m.Broker(name=queue_data.broker, id=broker_id, endpoints=endpoints)
                for queue_id, permission in iter_queue_permissions(queue_data):
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
        """Serve QueryAssignment: return an entry for each broker with readable queues of a topic.

        An entry means all queues of the topic on that broker. A group that consumes in order gets
        an entry for each queue instead. Raises StatusError for an invalid name, or (FORBIDDEN) if
        no queue is readable, and RouteNotFoundError if the topic does not exist.
        """
        topic = checked_topic(request.topic)
        group = checked_group(request.group)
        route = yield from self._backend.fetch_route(topic)
        config = yield from self._backend.fetch_group_config(group)
        endpoints = advertised_endpoints(request.endpoints, client)
        is_ordered = config is not None and config.consume_message_orderly

        response = m.QueryAssignmentResponse(status=OK)
        masters = master_addresses(route)
        for queue_data in route.queues:
            is_readable = bool(queue_data.perm & PERM_READ)
            if not is_readable or queue_data.broker not in masters:
                continue
            permission = _PERMISSIONS[queue_data.perm & (PERM_READ | PERM_WRITE)]
            broker = m.Broker(name=queue_data.broker, id=MASTER_ID, endpoints=endpoints)
            queue_ids = range(queue_data.read_queues) if is_ordered else (ANY_QUEUE,)
            for queue_id in queue_ids:
                queue = m.MessageQueue(
                    topic=request.topic, id=queue_id, permission=permission, broker=broker
                )
                response.assignments.add(message_queue=queue)
        if not response.assignments:
            raise StatusError(Refusal.NO_READABLE_QUEUE)
        return response


def iter_queue_permissions(queue_data: QueueData) -> Iterator[tuple[int, Permission]]:
    """Yield (queue id, permission) for each queue of a topic on one broker.

    If the topic is readable, the queues with the ids below `read_queues` are. If it is writable,
    the queues with the ids below `write_queues` are. A topic that allows neither has at least one
    queue, without permissions.
    """
    readable_count = queue_data.read_queues if queue_data.perm & PERM_READ else 0
    writable_count = queue_data.write_queues if queue_data.perm & PERM_WRITE else 0
    if not readable_count and not writable_count:
        queue_count = max(1, queue_data.read_queues, queue_data.write_queues)
        for queue_id in range(queue_count):
            yield queue_id, Permission.NONE
        return

    for queue_id in range(max(readable_count, writable_count)):
        read_bit = PERM_READ if queue_id < readable_count else 0
        write_bit = PERM_WRITE if queue_id < writable_count else 0
        yield queue_id, _PERMISSIONS[read_bit | write_bit]


def advertised_endpoints(requested: m.Endpoints, client: Client) -> m.Endpoints:
    """Return the endpoints that the client requested, or the address where it reached the proxy."""
    if requested.addresses:
        return requested
    # An address that is a host name counts as IPv4.
    address = parse_address(client.local.address)
    is_ipv6 = address is not None and address.version > 4
    scheme = AddressScheme.IPv6 if is_ipv6 else AddressScheme.IPv4
    return m.Endpoints(
        scheme=scheme,
        addresses=[m.Address(host=client.local.address, port=client.local.port)],
    )
