"""Messages that stay invisible while their clients work on them (spec/grpc.md §5).

A push consumer leaves it to the proxy how long its messages are invisible: a minute, and before
that is over longer and longer, until it is done with them, or for three hours. Each time a message
gets another handle, but its client goes on with the one that it knows: here stands which one
counts. That is in memory; another proxy takes the client's handle as long as it has not been
renewed. What comes after a client that is gone gets its messages a second later.

    kept -> due 10 s before its time -> renewed, and due again -> taken by what the client does

Requests go over a link of the proxy's own, some at a time.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sluicemq.client.core.conversations import Await, Conversation
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import SluiceError
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import PROXY_HOST, Backend, ConversationRunner, ClientSession
from sluicemq.proxy.clients import Client, Clients
from sluicemq.proxy.convert import to_ms
from sluicemq.proxy.limits import StatusError
from sluicemq.wire.popping import Handle

log = logging.getLogger(__name__)

MINUTE_MS: Final = 60_000
INVISIBLE_STEPS_MS: Final = tuple(minutes * MINUTE_MS for minutes in (1, 3, 5, 10, 30, 60))
"""The invisible time from each renewal on; before the first it is `ProxyLimits.invisible_ms`."""
PERIOD_MS: Final = 1_000
RETRY_PERIODS: Final = 3
"""Periods until what has failed is tried again: three reconsume_times before its time is over."""
IN_FLIGHT_MAX: Final = 100_000
CLIENT_IN_FLIGHT_MAX: Final = 25_000
REQUESTS_MAX: Final = 64
DEFAULT_BACKOFF_MS: Final = 10_000
BACKOFF_EXPONENT_MAX: Final = 32

ChangeHandle = Callable[[str, str, Handle, int], Conversation[Handle]]
"""Group, topic, handle, invisible time -> the handle that counts then. Raises StatusError where
there is no such message any more, SluiceError."""
_NO_MESSAGES: Final[Mapping[tuple[str, str], "InFlightMessage"]] = {}


@dataclass(slots=True, eq=False)
class InFlightMessage:
    """A message that a client works on. It knows the handle as `client_handle`; `handle` is what counts.
    `reconsume_times`: it was tried so often before."""

    client: Client
    group: str
    topic: str
    client_handle: str
    handle: Handle
    reconsume_times: int
    received_ms: int
    handle_received_ms: int
    """When `handle` was given, like `received_ms` on the monotonic clock."""
    due_period: int = 0
    renewals: int = 0
    failures: int = 0
    is_tracked: bool = False
    renewing: asyncio.Future[None] | None = None


class ReceiptHandleRenewer:
    """What all clients of this proxy hold."""

    def __init__(
        self, backend: Backend, clients: Clients, change: ChangeHandle, limits: ProxyLimits
    ) -> None:
        clients.on_removed.append(self.release_client)
        self._backend = backend
        self._clients = clients.by_id
        self._change = change
        self._limits = limits
        self._in_flight: dict[Client, dict[tuple[str, str], InFlightMessage]] = {}
        self._due: dict[int, dict[InFlightMessage, None]] = {}
        self._pending: deque[Conversation[None]] = deque()
        self._running_count = 0
        self._is_starting = False
        self._session: ClientSession | None = None
        self.count = 0

    def has_room(self, client: Client) -> bool:
        """May the client have more? HOT."""
        return (
            self.count < IN_FLIGHT_MAX
            and len(self._in_flight.get(client, ())) < CLIENT_IN_FLIGHT_MAX
        )

    def in_flight_count(self, client: Client) -> int:
        """How many messages it works on."""
        return len(self._in_flight.get(client, _NO_MESSAGES))

    def track(
        self,
        client: Client,
        group: str,
        topic: str,
        client_handle: str,
        handle: Handle,
        reconsume_times: int,
    ) -> None:
        """The client gets it now. HOT."""
        now_ms = self._now_ms()
        self.add(
            InFlightMessage(
                client, group, topic, client_handle, handle, reconsume_times, now_ms, now_ms
            )
        )

    def add(self, message: InFlightMessage) -> None:
        """Also one that was taken, when what the client wanted of it has failed. HOT."""
        if self._clients.get(message.client.id) is not message.client:  # it has gone meanwhile
            self._pending.append(self._return_message(message))
            self._start_requests()
            return
        message.is_tracked = True
        self.count += 1
        self._in_flight.setdefault(message.client, {})[message.group, message.client_handle] = (
            message
        )
        self._schedule(message)

    def _now_ms(self) -> int:
        """The monotonic clock's time: neither a wall clock that is set back nor one that differs
        from the broker's may delay a renewal."""
        return int(self._backend.clock.monotonic_s() * 1000)

    def _schedule(self, message: InFlightMessage, earliest: int = 0) -> None:
        due_ms = (
            message.handle_received_ms + message.handle.invisible_ms - self._limits.renew_ahead_ms
        )
        message.due_period = max(due_ms // PERIOD_MS, earliest)
        self._due.setdefault(message.due_period, {})[message] = None

    def take(
        self, client: Client, group: str, client_handle: str
    ) -> Conversation[InFlightMessage | None]:
        """The client does something with a message: it is renewed no more. None: it is not held
        here. HOT."""
        message = self._in_flight.get(client, _NO_MESSAGES).get((group, client_handle))
        if message is not None and message.renewing is not None:
            yield Await(message.renewing)
        if message is not None and message.is_tracked:
            self._remove(message)
        return message

    def _remove(self, message: InFlightMessage) -> None:
        message.is_tracked = False
        self.count -= 1
        client_messages = self._in_flight[message.client]
        del client_messages[message.group, message.client_handle]
        if not client_messages:
            del self._in_flight[message.client]
        self._due.get(message.due_period, {}).pop(message, None)

    def release_client(self, client: Client) -> None:
        """What it held, others get."""
        for message in [*self._in_flight.get(client, _NO_MESSAGES).values()]:
            self._remove(message)
            if message.renewing is None:
                self._pending.append(self._return_message(message))
        self._start_requests()

    def run(self) -> None:
        """Renews what is due."""
        now = self._now_ms() // PERIOD_MS
        for period in [it for it in self._due if it <= now]:
            for message in self._due.pop(period):
                message.renewing = asyncio.get_running_loop().create_future()
                self._pending.append(self._renew(message))
        self._start_requests()

    def _start_requests(self) -> None:
        """As much as may be under way."""
        if self._is_starting:
            return
        self._is_starting = True
        while self._pending and self._running_count < REQUESTS_MAX:
            self._running_count += 1
            if self._session is None:
                self._session = self._backend.open_session(
                    PROXY_HOST, PROXY_HOST, lambda _command, _answer: None
                )
            ConversationRunner(self._pending.popleft(), self._session.send, self._finish_request)
        self._is_starting = False

    def _finish_request(self, result: object) -> None:
        self._running_count -= 1
        if isinstance(result, Exception):
            log.error("a message was not renewed", exc_info=result)
        self._start_requests()

    def _renew(self, message: InFlightMessage) -> Conversation[None]:
        """Then it is due later, or nobody keeps it any more."""
        now_ms = self._now_ms()
        is_last = now_ms - message.received_ms >= self._limits.renew_ms_max
        time_ms = (
            backoff_ms(message)
            if is_last
            else INVISIBLE_STEPS_MS[min(message.renewals, len(INVISIBLE_STEPS_MS) - 1)]
        )
        try:
            message.handle = yield from self._change(
                message.group, message.topic, message.handle, time_ms
            )
        except SluiceError as error:
            message.failures += 1
            is_last |= (
                isinstance(error, StatusError)
                or message.failures >= self._limits.renew_attempts_max
            )
            log.warning(
                "message %s of group %s is not renewed: %s",
                message.client_handle,
                message.group,
                error,
            )
        else:
            message.handle_received_ms = now_ms
            message.renewals += 1
            message.failures = 0
        renewing, message.renewing = message.renewing, None
        if not message.is_tracked:
            yield from self._return_message(message)  # its client has gone meanwhile
        elif is_last:
            self._remove(message)
        else:
            self._schedule(message, now_ms // PERIOD_MS + RETRY_PERIODS)
        if renewing is not None:
            renewing.set_result(None)

    def _return_message(self, message: InFlightMessage) -> Conversation[None]:
        with suppress(SluiceError):  # then its own time brings it back
            yield from self._change(
                message.group, message.topic, message.handle, self._limits.given_back_ms
            )


def backoff_ms(message: InFlightMessage) -> int:
    """Before a message comes again that its client has had for too long, as its group wants it."""
    settings = message.client.settings
    policy = m.RetryPolicy() if settings is None else settings.backoff_policy
    if policy.WhichOneof("strategy") == "exponential_backoff":
        found = policy.exponential_backoff
        steps = found.multiplier ** min(message.reconsume_times, BACKOFF_EXPONENT_MAX)
        return int(min(to_ms(found.max), to_ms(found.initial) * steps))
    known = policy.customized_backoff.next
    return (
        to_ms(known[min(message.reconsume_times + 2, len(known) - 1)])
        if known
        else DEFAULT_BACKOFF_MS
    )
