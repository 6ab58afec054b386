"""The asyncio client's connections to name servers and brokers.

One connection a server, shared by every producer and consumer of a `Sluice`; the frames of one loop
turn travel in one write. Heartbeats have connections of their own (`client.keeper`).
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from sluicemq.client.aio.offsets import INSTANCE, OffsetFiles
from sluicemq.client.core.consuming import SUSPEND_TIMEOUT_MS, OffsetMoved
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.names import Credentials, signed
from sluicemq.client.core.operations import topics
from sluicemq.client.core.replies import send_reply
from sluicemq.client.core.talks import AsyncioShell, Call, operation
from sluicemq.client.core.tracing import Tracing
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.model.topic import MessageQueue
from sluicemq.net.channel import Channel, ChannelPool, Dial
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
        connect: Dial | None = None,
        client_id: str = "",
    ) -> None:
        self.client_id = client_id
        """Said with requests that concern a member of a group: its heartbeats go another way."""
        self.directory = Directory(name_servers, clock)
        self.name_servers = self.directory.name_servers
        self.routes = self.directory.routes
        self.credentials = Credentials.of(credentials)
        self.timeout_s = timeout_s
        self.poll_s = SUSPEND_TIMEOUT_MS / 1000
        """How long a pull waits at the broker for messages."""
        self.clock = clock
        self._pool = ChannelPool(clock=clock, connect=connect)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.on_moved: Callable[[OffsetMoved], None] | None = None
        """Called when a broker has sent a consumer to another place of a queue."""
        self.offset_files = OffsetFiles(INSTANCE)
        """Where broadcasting groups keep their offsets."""
        self.trace: Tracing | None = None
        """Notes what producers and consumers do, when that is wanted."""

    ask_name_server = operation(Directory.ask_name_server)
    route = operation(Directory.route)
    write_queues = operation(Directory.write_queues)
    address = operation(Directory.address)
    ask = operation(Directory.ask)
    send_reply = operation(send_reply)
    queues = operation(topics.queues)
    offset_min = operation(topics.offset_min)
    offset_max = operation(topics.offset_max)
    offsets = operation(topics.offsets)
    offset_by_time = operation(topics.offset_by_time)

    def alone(self, key: str) -> asyncio.Lock:
        """One task at a time asks for the route of a topic."""
        return self._locks[key]

    async def channel(self, address: str) -> Channel:
        """The connection to an address, opened when there is none."""
        return await self._pool.get(address)

    async def exchange(self, call: Call) -> Command:
        """One request, one answer, whatever its code. Raises ConnectionLostError,
        RequestTimeoutError."""
        channel = await self._pool.get(call.address)
        command = self.signed(call.command)
        call.is_written = True
        if command.is_oneway:
            channel.oneway(command)
            return command
        timeout_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        return await channel.call(command, timeout_s)

    async def call(self, address: str, command: Command, timeout_s: float | None = None) -> Command:
        """`exchange` of a request to an address."""
        return await self.exchange(Call(address, command, timeout_s))

    def signed(self, command: Command) -> Command:
        """The command as this client's credentials sign it, with the client's name where a broker
        wants to know which member of a group it is from."""
        if self.client_id and command.code in OF_MEMBERS:
            command.fields = {**(command.fields or {}), CLIENT_FIELD: self.client_id}
        return signed(command, self.credentials)

    def master(self, queue: MessageQueue) -> str:
        """The address that takes messages for a queue. Raises ConnectionLostError when away."""
        return self.directory.master(queue)

    async def close(self) -> None:
        """Closes the data connections."""
        await self._pool.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {';'.join(self.name_servers)}>"
