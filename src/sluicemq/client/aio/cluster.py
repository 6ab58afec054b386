"""The asyncio client's connections to name servers and brokers, and administration over them.

One connection a server, shared by every producer and consumer of a `Sluice`; the frames of one loop
turn travel in one write. Heartbeats have connections of their own (`client.keeper`).
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final

from sluicemq.client.admin import topics
from sluicemq.client.admin.operations import AdminOperations
from sluicemq.client.affinity import ClientAffinity, get_running_loop_or_none
from sluicemq.client.aio.offsets import INSTANCE, OffsetFiles
from sluicemq.client.core.consuming import SUSPEND_TIMEOUT_MS, OffsetMoved
from sluicemq.client.core.conversations import CALL_TIMEOUT_S, AsyncioShell, Call, operation
from sluicemq.client.core.directory import Directory, RouteCache
from sluicemq.client.core.names import Credentials, sign_request
from sluicemq.client.core.replies import send_reply
from sluicemq.client.core.sending import FIRST_QUEUE_BITS
from sluicemq.client.core.tracing import Tracing
from sluicemq.client.tasks import run_application_code
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.net.channel import ChannelPool, Dialer
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.headers import CLIENT_ID_FIELD

OF_MEMBERS: Final = frozenset(
    {
        RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    }
)  # fmt: skip


class Cluster(AsyncioShell):
    """Name servers, routes and data connections of one `Sluice`."""

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
        """`rng` chooses the queue that a producer begins with."""
        self.affinity: ClientAffinity = ClientAffinity()
        self.rng: Random = rng or Random()
        self.client_id = client_id
        """Said with requests that concern a member of a group: its heartbeats go another way."""
        self.directory = Directory(name_servers, clock)
        self.name_servers: tuple[str, ...] = self.directory.name_servers
        self.routes: RouteCache = self.directory.routes
        self.credentials: Credentials | None = Credentials.from_value(credentials)
        self.timeout_s = timeout_s
        self.poll_s: float = SUSPEND_TIMEOUT_MS / 1000
        """How long a pull waits at the broker for messages."""
        self.clock = clock
        self._pool = ChannelPool(clock=clock, connect=connect)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.on_moved: Callable[[OffsetMoved], None] | None = None
        """Called when a broker has sent a consumer to another place of a queue."""
        self.offset_files: OffsetFiles = OffsetFiles(INSTANCE)
        """Where broadcasting groups keep their offsets."""
        self.trace: Tracing | None = None
        """Notes what producers and consumers do, when that is wanted."""

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
        """One task at a time asks for the route of a topic."""
        return self._locks[key]

    def send_request(self, call: Call) -> Awaitable[Command]:
        """One request, one answer, whatever its code. HOT: no coroutine where the channel is open.
        Raises ConnectionLostError, RequestTimeoutError, now or later."""
        if get_running_loop_or_none() is not self.affinity.loop:
            self.affinity.check_loop()
        channel = self._pool.channels.get(call.address)
        if channel is None or channel.closed or call.command.flag & FLAG_ONEWAY:
            return self._exchange(call)
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        if call.command.code in OF_MEMBERS or self.credentials is not None:
            self._complete(call.command)
        call.is_written = True
        return channel.start_call(call.command, timeout_s)

    async def _exchange(self, call: Call) -> Command:
        channel = await self._pool.get(call.address)
        if call.command.flag & FLAG_ONEWAY:
            self._complete(call.command)
            call.is_written = True
            channel.send_oneway(call.command)
            return call.command
        return await self.send_request(call)

    def _complete(self, command: Command) -> None:
        """Says who asks, where that is wanted."""
        if self.client_id and command.code in OF_MEMBERS:
            command.fields = {**(command.fields or {}), CLIENT_ID_FIELD: self.client_id}
        sign_request(command, self.credentials)

    async def sleep(self, seconds: float) -> None:
        """Beside everything else of the loop."""
        await asyncio.sleep(seconds)

    async def await_value(self, value: Awaitable[Any]) -> Any:
        """Await what a listener of the application returned. Raises as `run_application_code`."""
        return await run_application_code(value)

    async def call(self, address: str, command: Command, timeout_s: float | None = None) -> Command:
        """`exchange` of a request to an address."""
        return await self.send_request(Call(address, command, timeout_s))

    def first_queue(self) -> int:
        """A random number for a `QueueChooser` to begin with."""
        return self.rng.getrandbits(FIRST_QUEUE_BITS)

    async def close(self) -> None:
        """Closes the data connections."""
        await self._pool.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {';'.join(self.name_servers)}>"


class Admin(AdminOperations, AsyncioShell):
    """Administration over the connections of a `Sluice`. Raises the errors of `sluicemq.errors`."""

    route: Final = operation(Directory.get_route)

    def __init__(self, cluster: Cluster) -> None:
        self.directory: Directory = cluster.directory
        self._cluster = cluster

    async def send_request(self, call: Call) -> Command:
        """One request over the connections of the `Sluice`."""
        return await self._cluster.send_request(call)

    async def sleep(self, seconds: float) -> None:
        """As its `Sluice` does."""
        await asyncio.sleep(seconds)

    def exclusive(self, key: str) -> asyncio.Lock:
        """As its `Sluice` does."""
        return self._cluster.exclusive(key)

    def __repr__(self) -> str:
        return f"<Admin at {self._cluster!r}>"
