"""The asyncio client's connections to name servers and brokers, and administration over them.

All producers and consumers of a `Sluice` share one connection to each server; the requests of one
event loop iteration leave in one write. Heartbeats use connections of their own
(`client.heartbeat_thread`).
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

from sluicemq.client.admin import topics
from sluicemq.client.admin.operations import AdminOperations
from sluicemq.client.affinity import ClientAffinity, get_running_loop_or_none
from sluicemq.client.aio.offsets import DEFAULT_INSTANCE, OffsetFiles
from sluicemq.client.core.consuming import SUSPEND_TIMEOUT_MS, OffsetMoved
from sluicemq.client.core.conversations import CALL_TIMEOUT_S, AsyncioShell, Call, operation
from sluicemq.client.core.directory import Directory, RouteCache
from sluicemq.client.core.names import Credentials, sign_request
from sluicemq.client.core.replies import send_reply
from sluicemq.client.core.sending import FIRST_QUEUE_BITS
from sluicemq.client.core.tracing import Tracing
from sluicemq.client.tasks import run_application_code
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ConfigurationError
from sluicemq.net.channel import ChannelPool, Dialer
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.headers import CLIENT_ID_FIELD

MEMBER_REQUESTS: Final = frozenset(
    {
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    }
)
"""Codes of the requests that concern a member of a consumer group.

They contain the client id, because the broker knows the member from another connection: the one of
its heartbeats.
"""


class Cluster(AsyncioShell):
    """The name servers, routes and data connections of one `Sluice`."""

    directory: Directory

    def __init__(
        self,
        name_servers: str | list[str] | tuple[str, ...],
        *,
        credentials: Credentials | tuple[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
        connect: Dialer | None = None,
        client_id: str = "",
        rng: Random | None = None,
    ) -> None:
        """Prepare the connections to servers; nothing is connected yet.

        `name_servers` are addresses as text or as a list. `timeout_s` is the default time limit in
        seconds of a request. `connect` opens a connection; None means TCP. `client_id` is added to
        requests of group members; "" adds nothing. `rng` chooses the queue with which each producer
        begins.

        Raises ConfigurationError if `name_servers` or `credentials` are invalid.
        """
        self.affinity: ClientAffinity = ClientAffinity()
        """The process and the event loop to which the client belongs."""
        self.rng: Random = rng or Random()
        self.client_id = client_id
        """The client id that `MEMBER_REQUESTS` contain, empty for none."""
        self.directory = Directory(name_servers, clock)
        self.name_servers: tuple[str, ...] = self.directory.name_servers
        """The addresses of the name servers."""
        self.routes: RouteCache = self.directory.routes
        """The cached routes of topics."""
        self.credentials: Credentials | None = Credentials.from_value(credentials)
        """The credentials that sign requests, None for unsigned requests."""
        self.timeout_s = timeout_s
        """The default time limit in seconds of a request."""
        self.long_poll_s: float = SUSPEND_TIMEOUT_MS / 1000
        """How many seconds a pull waits at the broker for messages."""
        self.clock = clock
        self._pool = ChannelPool(clock=clock, connect=connect)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Maps a topic to the lock under which its route is fetched."""
        self.on_moved: Callable[[OffsetMoved], None] | None = None
        """Called when a broker has moved a consumer to another offset of a queue.

        None calls nothing.
        """
        self.offset_files: OffsetFiles = OffsetFiles(DEFAULT_INSTANCE)
        """The files in which broadcasting groups keep their offsets."""
        self.trace: Tracing | None = None
        """Collects the trace records of producers and consumers. None means that tracing is off."""

    route: Final = operation(Directory.get_route)
    write_queues: Final = operation(Directory.get_write_queues)
    ask: Final = operation(Directory.call)
    ask_master: Final = operation(Directory.call_master)
    send_reply: Final = operation(send_reply)
    queues: Final = operation(topics.queues)
    offset_min: Final = operation(topics.offset_min)
    offset_max: Final = operation(topics.offset_max)
    offsets: Final = operation(topics.offsets)
    offset_by_time: Final = operation(topics.offset_by_time)

    def exclusive(self, key: str) -> asyncio.Lock:
        """Return the lock under which one task at a time fetches the route of a topic."""
        return self._locks[key]

    def send_request(self, call: Call) -> Awaitable[Command]:
        """Send one request, and return an awaitable of its response, whatever its code. HOT.

        If the connection is open, no coroutine is created. Raises ConfigurationError in another
        event loop or process than the client's. Raises ConnectionLostError and RequestTimeoutError,
        either here or when the result is awaited.
        """
        if get_running_loop_or_none() is not self.affinity.loop:
            self.affinity.check_loop()
        channel = self._pool.channels.get(call.address)
        if channel is None or channel.closed or call.command.flag & FLAG_ONEWAY:
            return self._exchange(call)
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        if call.command.code in MEMBER_REQUESTS or self.credentials is not None:
            self._add_identity(call.command)
        call.is_written = True
        return channel.start_call(call.command, timeout_s)

    async def _exchange(self, call: Call) -> Command:
        """Connect if needed, send the request and return the response.

        A one-way request has no response, and the request itself is returned.
        """
        channel = await self._pool.get(call.address)
        if call.command.flag & FLAG_ONEWAY:
            self._add_identity(call.command)
            call.is_written = True
            channel.send_oneway(call.command)
            return call.command
        return await self.send_request(call)

    def _add_identity(self, command: Command) -> None:
        """Add the client id to a request of a group's member, and sign the request."""
        if self.client_id and command.code in MEMBER_REQUESTS:
            command.fields = {**(command.fields or {}), CLIENT_ID_FIELD: self.client_id}
        sign_request(command, self.credentials)

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` seconds."""
        await asyncio.sleep(seconds)

    async def await_value(self, awaitable: Awaitable[Any]) -> Any:
        """Await what a listener of the application returned, and return its result.

        Raises as `run_application_code` does.
        """
        return await run_application_code(awaitable)

    async def call(self, address: str, command: Command, timeout_s: float | None = None) -> Command:
        """Send `command` to the server at `address` and return its response, whatever its code.

        `timeout_s` limits the call; None means the cluster's default. Raises as `send_request`
        does.
        """
        return await self.send_request(Call(address, command, timeout_s))

    def choose_first_queue(self) -> int:
        """Return the random number with which a `QueueChooser` begins."""
        return self.rng.getrandbits(FIRST_QUEUE_BITS)

    async def close(self) -> None:
        """Close the data connections."""
        await self._pool.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {';'.join(self.name_servers)}>"


def expect_cluster(cluster: object, name: str, method: str, blocking_class: str) -> Cluster:
    """Return `cluster`, the first argument of the class `name`, if it is a Cluster.

    Otherwise raise ConfigurationError: the application has probably passed an address, as to the
    blocking class. The text names that class, and the method of `Sluice` to call instead.
    """
    if isinstance(cluster, Cluster):
        return cluster
    raise ConfigurationError(
        f"{name} cannot be created from {cluster!r:.60}: a Sluice creates it.",
        fix=f"Use Sluice(…).{method}. Without asyncio, use {blocking_class}.",
    )


class Admin(AdminOperations, AsyncioShell):
    """Administration of a cluster over the connections of a `Sluice`, as `Sluice.admin`.

        async with Sluice("127.0.0.1:9876") as mq:
            await mq.admin.create_topic("orders", queues=8)
            lag = await mq.admin.lag("billing")

    `AdminOperations` lists the operations, and each says its own errors. All of them raise
    subclasses of SluiceError: NameServerUnreachableError, ConnectionLostError and
    RequestTimeoutError if a server does not respond, RequestError if it refuses
    (PermissionDeniedError without the permission), RouteNotFoundError if a topic does not exist,
    and ConfigurationError if an argument is invalid.
    """

    route: Final = operation(Directory.get_route)

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = expect_cluster(
            cluster, "Admin", "admin", "sluicemq.client.sync.admin.Admin"
        )
        self.directory: Directory = cluster.directory

    async def send_request(self, call: Call) -> Command:
        """Send one request over the connections of the `Sluice`, and return its response."""
        return await self._cluster.send_request(call)

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` seconds."""
        await asyncio.sleep(seconds)

    def exclusive(self, key: str) -> asyncio.Lock:
        """Return the lock under which one task at a time fetches the route of a topic.

        It is the lock of the `Sluice`.
        """
        return self._cluster.exclusive(key)

    def __repr__(self) -> str:
        return f"<Admin at {self._cluster!r}>"
