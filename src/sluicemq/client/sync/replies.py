"""Requests of the blocking producer, and the replies to them.

Replies come on a connection that heartbeats (326), so the first request starts a keeper's thread;
programs without requests have none.
"""

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future

from sluicemq.client.core.answers import SendResult
from sluicemq.client.core.messages import Outgoing
from sluicemq.client.core.replies import Reply, as_request, no_reply, take_reply
from sluicemq.client.identity import make_client_id
from sluicemq.client.keeper import Keeper
from sluicemq.client.sync.transactions import Brokers
from sluicemq.errors import ProtocolError
from sluicemq.model.message import StoredMessage
from sluicemq.net.network import Sockets
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command


class Requester:
    """The open requests of one blocking producer. Safe to share among threads."""

    def __init__(self, brokers: Brokers, group: str) -> None:
        self._brokers = brokers
        self._group = group
        self._lock = threading.Lock()
        self._keeper: Keeper | None = None
        self._known: set[str] = set()
        self._open: dict[str, Reply] = {}

    def request(
        self, outgoing: Outgoing, send: Callable[[Outgoing], SendResult], timeout_s: float
    ) -> StoredMessage:
        """The reply. Raises RequestTimeoutError, and what `send` raises."""
        began_s = self._brokers.clock.monotonic_s()
        keeper = self._introduce(outgoing.topic)
        correlation_id = secrets.token_hex(16)
        request = as_request(outgoing, keeper.client_id, correlation_id, int(timeout_s * 1000))
        future: Future[StoredMessage] = Future()
        self._open[correlation_id] = future
        where = ""
        try:
            result = send(request)
            where = f"queue {result.queue.queue_id} of {result.queue.broker}"
            left_s = timeout_s - (self._brokers.clock.monotonic_s() - began_s)
            return future.result(max(0.0, left_s))
        except TimeoutError as error:
            raise no_reply(request.topic, request.message_id, where, timeout_s) from error
        finally:
            self._open.pop(correlation_id, None)

    def _introduce(self, topic: str) -> Keeper:
        """The brokers of the topic have to know our connection before a reply comes."""
        self._brokers.route(topic, create=True)
        with self._lock:
            if self._keeper is None:
                self._keeper = Keeper(
                    make_client_id(self._brokers.clock),
                    credentials=self._brokers.credentials,
                    connect=Sockets(self._brokers.tls).dial,
                    on_ask=self._on_ask,
                )
            keeper = self._keeper
        if topic not in self._known:
            keeper.produce(self._group)
            keeper.use(self._brokers.routes.addresses([topic]))
            keeper.beat().result(self._brokers.timeout_s)
            self._known.add(topic)
        return keeper

    def _on_ask(self, command: Command, answer: Callable[[Command], None]) -> bool:
        """Called on the keeper's thread."""
        if command.code != RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            return False
        try:
            answer(take_reply(command, self._open))
        except ProtocolError as error:
            answer(Command(ResponseCode.SYSTEM_ERROR, remark=str(error)))
        return True

    def close(self) -> None:
        """Takes no replies any more."""
        if self._keeper is not None:
            self._keeper.close()
