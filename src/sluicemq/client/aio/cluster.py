"""The asyncio client's access to name servers and brokers: routes, data connections, signing.

One connection a server, shared by every producer and consumer of a `Sluice`; the frames of one loop
turn travel in one write. Heartbeats have connections of their own (`client.keeper`).
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from sluicemq.client.aio.localoffsets import INSTANCE, OffsetFiles
from sluicemq.client.core import requests
from sluicemq.client.core.answers import SUCCESS, TOPIC_NOT_EXIST, expect_success, request_error
from sluicemq.client.core.consuming import SUSPEND_TIMEOUT_MS, OffsetMoved
from sluicemq.client.core.directory import (
    Routes,
    as_created,
    broker_address,
    master_address,
    no_route,
    no_writable_queue,
)
from sluicemq.client.core.names import Credentials, parse_name_servers, signed, unreachable
from sluicemq.client.core.tracing import Tracing
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import (
    ConnectionLostError,
    NameServerUnreachableError,
    RequestTimeoutError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue, TopicRoute
from sluicemq.net.channel import Channel, ChannelPool, Dial
from sluicemq.wire.bodies import decode_cluster_info, decode_topic_route
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

CLIENT_FIELD: Final = "sluiceClientId"
OF_MEMBERS: Final = frozenset(
    {
        RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    }
)  # fmt: skip

CALL_TIMEOUT_S = 5.0


class Cluster:
    """Name servers, routes and data connections of one `Sluice`."""

    def __init__(
        self,
        name_servers: str | list[str] | tuple[str, ...],
        *,
        credentials: Credentials | tuple[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
        connect: Dial | None = None,
        client_id: str = "",
    ) -> None:
        self.client_id = client_id
        """Said with requests that concern a member of a group: its heartbeats go another way."""
        self.name_servers = parse_name_servers(name_servers)
        self.credentials = Credentials.of(credentials)
        self.timeout_s = timeout_s
        self.poll_s = SUSPEND_TIMEOUT_MS / 1000
        """How long a pull waits at the broker for messages."""
        self.clock = clock
        self.routes = Routes()
        self._pool = ChannelPool(clock=clock, connect=connect)
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._first = 0
        self.on_route: Callable[[str], None] = lambda topic: None
        """Called when the route of a topic has changed."""
        self.on_moved: Callable[[OffsetMoved], None] | None = None
        """Called when a broker has sent a consumer to another place of a queue."""
        self.offset_files = OffsetFiles(INSTANCE)
        """Where broadcasting groups keep their offsets."""
        self.trace: Tracing | None = None
        """Notes what producers and consumers do, when that is wanted."""

    async def channel(self, address: str) -> Channel:
        """The connection to an address, opened when there is none."""
        return await self._pool.get(address)

    async def call(self, address: str, command: Command, timeout_s: float | None = None) -> Command:
        """One request, one answer, whatever its code.

        Raises ConnectionLostError, RequestTimeoutError.
        """
        channel = await self._pool.get(address)
        return await channel.call(
            self.signed(command), self.timeout_s if timeout_s is None else timeout_s
        )

    def signed(self, command: Command) -> Command:
        """The command as this client's credentials sign it, with the client's name where a broker
        wants to know which member of a group it is from."""
        if self.client_id and command.code in OF_MEMBERS:
            command.fields = {**(command.fields or {}), CLIENT_FIELD: self.client_id}
        return signed(command, self.credentials)

    async def ask_name_server(self, command: Command) -> Command:
        """The first name server that answers, starting with the one that answered last.

        Raises NameServerUnreachableError naming all of them.
        """
        failures: list[tuple[str, SluiceError]] = []
        count = len(self.name_servers)
        for step in range(count):
            index = (self._first + step) % count
            address = self.name_servers[index]
            try:
                answer = await self.call(address, command)
            except (ConnectionLostError, RequestTimeoutError) as error:
                failures.append((address, error))
            else:
                self._first = index
                return answer
        raise unreachable(failures)

    async def find_route(self, topic: str) -> TopicRoute | None:
        """The route as the name servers know it now; None when they know no such topic."""
        answer = await self.ask_name_server(requests.route(topic))
        if answer.code == TOPIC_NOT_EXIST:
            return None
        if answer.code != SUCCESS:
            raise request_error(answer)
        return decode_topic_route(answer.body)

    async def _broker_names(self) -> list[str] | None:
        """For an error's text: the brokers that are registered, None when that is not told."""
        try:
            answer = await self.ask_name_server(requests.cluster_info())
            return (
                list(decode_cluster_info(answer.body).brokers) if answer.code == SUCCESS else None
            )
        except SluiceError:
            return None

    async def route(self, topic: str, *, create: bool = False) -> TopicRoute:
        """The route of a topic, at most 30 s old; concurrent callers share one question.

        With `create` an unknown topic takes the route of TBW102, from which brokers create topics
        on the first send. A name server that cannot be reached does not matter while an older
        route is known. Raises RouteNotFoundError, NameServerUnreachableError.
        """
        if self.routes.is_fresh(topic, self.clock.monotonic_s()):
            known = self.routes.get(topic)
            if known is not None:
                return known
        async with self._asking[topic]:
            if not self.routes.is_fresh(topic, self.clock.monotonic_s()):
                await self._refresh(topic, create=create)
        known = self.routes.get(topic)
        if known is None:
            self.routes.forget(topic)
            brokers = await self._broker_names()
            raise no_route(topic, self.name_servers, brokers, auto_create_tried=create)
        return known

    async def _refresh(self, topic: str, *, create: bool) -> None:
        known = self.routes.get(topic)
        try:
            found = await self.find_route(topic)
            if found is None and create and known is None:
                default = await self.find_route(DEFAULT_TOPIC)
                found = as_created(default) if default else None
        except NameServerUnreachableError:
            if known is None:
                raise
            found = None
        if self.routes.put(topic, found, self.clock.monotonic_s()):
            self.on_route(topic)

    async def write_queues(self, topic: str) -> list[MessageQueue]:
        """The queues that a message of the topic may go to. Raises RouteNotFoundError."""
        await self.route(topic, create=True)
        queues = self.routes.writers(topic)
        if not queues:
            self.routes.forget(topic)
            raise no_writable_queue(topic)
        return queues

    def master(self, queue: MessageQueue) -> str:
        """The address that takes messages for a queue. Raises ConnectionLostError when away."""
        route = self.routes.get(queue.topic)
        address = master_address(route, queue.broker) if route else None
        if address is None:
            raise ConnectionLostError(
                f"the master of {queue.broker!r} is not in the route of {queue.topic!r}.",
                cure="See sluice cluster list.",
            )
        return address

    async def address(self, queue: MessageQueue, broker_id: int = 0) -> str:
        """Where to read a queue: that broker id, or another one of the broker."""
        address = broker_address(await self.route(queue.topic), queue.broker, broker_id)
        if address is None:
            self.routes.forget(queue.topic)
            raise RouteNotFoundError(
                f"the broker {queue.broker!r} is not in the route of {queue.topic!r}.",
                cure="See sluice cluster list.",
            )
        return address

    async def ask(self, queue: MessageQueue, command: Command) -> Command:
        """A request to a queue's broker that must succeed."""
        address = await self.address(queue)
        return expect_success(await self.call(address, command), address)

    async def close(self) -> None:
        """Closes the data connections."""
        await self._pool.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {';'.join(self.name_servers)}>"
