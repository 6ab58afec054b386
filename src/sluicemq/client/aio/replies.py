"""Replies that a client waits for, and those it sends."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.core.answers import SendResult, expect_success
from sluicemq.client.core.messages import Outgoing
from sluicemq.client.core.replies import (
    ANSWER_TIMEOUT_S,
    CORRELATION_ID,
    as_request,
    no_reply,
    pushed_reply,
    reply_command,
)
from sluicemq.client.keeper import Keeper
from sluicemq.model.message import StoredMessage
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")


class Replies:
    """The open requests of one client, by correlation id. Loop thread only."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[StoredMessage]] = {}

    def expect(self, correlation_id: str) -> "asyncio.Future[StoredMessage]":
        """The reply, when it has come; `forget` it in the end."""
        future: asyncio.Future[StoredMessage] = asyncio.get_running_loop().create_future()
        self._open[correlation_id] = future
        return future

    def forget(self, correlation_id: str) -> None:
        """Nobody waits any more."""
        self._open.pop(correlation_id, None)

    def arrived(self, command: Command) -> Command:
        """326: the answer for the broker. A reply that nobody waits for is taken as well, as Java
        does: it came too late."""
        reply = pushed_reply(command)
        future = self._open.get(reply.properties.get(CORRELATION_ID, ""))
        if future is not None and not future.done():
            future.set_result(reply)
        else:
            _log.info("a reply came that nobody waits for (any more): %s", reply.message_id)
        return Command(ResponseCode.SUCCESS)


class Requester:
    """Sends requests for the producers of one client."""

    def __init__(self, cluster: Cluster, keeper: Keeper, replies: Replies) -> None:
        self._cluster = cluster
        self._keeper = keeper
        self._replies = replies
        self._known: set[tuple[str, str]] = set()

    async def request(
        self,
        group: str,
        outgoing: Outgoing,
        send: Callable[[Outgoing], Awaitable[SendResult]],
        timeout_s: float,
    ) -> StoredMessage:
        """The reply. Raises RequestTimeoutError, and what `send` raises."""
        correlation_id = secrets.token_hex(16)
        client_id, ttl_ms = self._keeper.client_id, int(timeout_s * 1000)
        request = as_request(outgoing, client_id, correlation_id, ttl_ms)
        future, where = self._replies.expect(correlation_id), ""
        try:
            async with asyncio.timeout(timeout_s):
                await self._introduce(group, request.topic)
                result = await send(request)
                where = f"queue {result.queue.queue_id} of {result.queue.broker}"
                return await future
        except TimeoutError as error:
            raise no_reply(request.topic, request.message_id, where, timeout_s) from error
        finally:
            self._replies.forget(correlation_id)

    async def _introduce(self, group: str, topic: str) -> None:
        """The brokers of the topic have to know our connection before a reply comes."""
        await self._cluster.route(topic, create=True)
        addresses = self._cluster.routes.addresses([topic])
        if (group, topic) not in self._known:
            self._keeper.produce(group)
            self._keeper.use(addresses)
            await asyncio.wrap_future(self._keeper.beat())
            self._known.add((group, topic))


async def send_reply(
    cluster: Cluster, record: StoredMessage, body: bytes, message_id: str
) -> dict[str, Any]:
    """Sends a reply; returns when the requester has it. Raises ConfigurationError (nobody asked),
    RequestError (the requester is gone), ConnectionLostError, RequestTimeoutError."""
    queue, command = reply_command(record, body, message_id, cluster.clock.now_ms())
    await cluster.route(queue.topic)
    address = cluster.master(queue)
    answer = await cluster.call(address, command, ANSWER_TIMEOUT_S)
    return dict(expect_success(answer, address).fields or {})
