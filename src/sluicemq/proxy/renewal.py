"""Renewal of the invisible duration of messages that clients are processing (spec/grpc.md §5).

A push consumer leaves the invisible duration to the proxy (`auto_renew`). The proxy hides a message
for a minute and renews it before that time ends, each time for longer, until the client has
acknowledged it or until three hours have passed. Each renewal creates another receipt handle, but
the client continues to use the first one. The proxy maps it to the current handle.

This mapping is in memory only. Another proxy accepts the client's handle until its first renewal.
When a client disconnects, its messages are returned to the broker, for delivery to other clients
after about a second.

    tracked -> due 10 s before its invisible duration ends -> renewed and due again
            -> taken when the client acknowledges or changes it

Requests are sent over one session of the proxy itself, at most `REQUESTS_MAX` at a time.
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
from sluicemq.proxy.backend import PROXY_HOST, Backend, ClientSession, ConversationRunner
from sluicemq.proxy.clients import Client, Clients
from sluicemq.proxy.convert import to_ms
from sluicemq.proxy.limits import StatusError
from sluicemq.wire.popping import ReceiptHandle

log = logging.getLogger(__name__)

MINUTE_MS: Final = 60_000
INVISIBLE_STEPS_MS: Final = tuple(minutes * MINUTE_MS for minutes in (1, 3, 5, 10, 30, 60))
"""The invisible duration from each renewal on, in ms. Before the first, it is set by `ProxyLimits`.
"""
PERIOD_MS: Final = 1_000
"""The interval of `ReceiptHandleRenewer.run`, and the granularity of due times, in ms."""
RETRY_PERIODS: Final = 3
"""The number of periods after which a failed renewal is retried.

This allows three attempts before the invisible duration ends.
"""
IN_FLIGHT_MAX: Final = 100_000
"""The maximum number of tracked messages of all clients."""
CLIENT_IN_FLIGHT_MAX: Final = 25_000
"""The maximum number of tracked messages of one client."""
REQUESTS_MAX: Final = 64
"""The maximum number of concurrent requests to brokers."""
DEFAULT_BACKOFF_MS: Final = 10_000
"""The time until redelivery of a message for a client without a retry policy, in ms."""
BACKOFF_EXPONENT_MAX: Final = 32
"""The maximum exponent of an exponential backoff."""

ChangeHandle = Callable[[str, str, ReceiptHandle, int], Conversation[ReceiptHandle]]
"""A function `(group, topic, handle, invisible_ms) -> new handle`, as a conversation.

It raises StatusError if the message does not exist any longer, and SluiceError if the broker fails.
"""
_NO_MESSAGES: Final[Mapping[tuple[str, str], "InFlightMessage"]] = {}


@dataclass(slots=True, eq=False)
class InFlightMessage:
    """A message that a client is processing.

    The client knows it by `client_handle`; `handle` is the current handle. `reconsume_times` is the
    number of earlier deliveries. Times are in ms of the monotonic clock.
    """

    client: Client
    group: str
    topic: str
    client_handle: str
    handle: ReceiptHandle
    reconsume_times: int
    received_ms: int
    handle_received_ms: int
    """The time at which `handle` was received."""
    due_period: int = 0
    """The period, as a number of `PERIOD_MS`, in which the message is to be renewed."""
    renewals: int = 0
    failures: int = 0
    is_tracked: bool = False
    """Whether the message will be renewed."""
    renewing: asyncio.Future[None] | None = None
    """A future that completes when the queued or running renewal ends; None without one."""


class ReceiptHandleRenewer:
    """The messages that all clients of this proxy are processing, and their renewal."""

    def __init__(
        self, backend: Backend, clients: Clients, change: ChangeHandle, limits: ProxyLimits
    ) -> None:
        """Create a renewer without messages.

        `clients` are the clients whose messages may be tracked. When a client is removed, its
        messages are returned to their brokers. `change` sets the invisible duration of a message at
        its broker. `limits` sets the times of renewals.
        """
        clients.on_removed.append(self.release_client)
        self._backend = backend
        self._clients = clients.by_id
        self._change = change
        self._limits = limits
        # The tracked messages of each client, by (group, client handle).
        self._in_flight: dict[Client, dict[tuple[str, str], InFlightMessage]] = {}
        # The tracked messages by the period in which they are due.
        self._due: dict[int, dict[InFlightMessage, None]] = {}
        # The requests that wait because REQUESTS_MAX are running.
        self._pending: deque[Conversation[None]] = deque()
        self._running_count = 0
        self._is_starting = False
        self._session: ClientSession | None = None
        self.count = 0
        """The number of tracked messages of all clients."""

    def can_track(self, client: Client) -> bool:
        """Return whether the client, and the proxy, may have one more tracked message. Hot path."""
        return (
            self.count < IN_FLIGHT_MAX
            and len(self._in_flight.get(client, ())) < CLIENT_IN_FLIGHT_MAX
        )

    def in_flight_count(self, client: Client) -> int:
        """Return the number of tracked messages of a client."""
        return len(self._in_flight.get(client, _NO_MESSAGES))

    def track(
        self,
        client: Client,
        group: str,
        topic: str,
        client_handle: str,
        handle: ReceiptHandle,
        reconsume_times: int,
    ) -> None:
        """Start to renew a message that the client gets now. Hot path.

        The message stays invisible to other clients as long as it is renewed. `client_handle` is
        the receipt handle as a text, as the client gets it, and `handle` the same handle decoded.
        `reconsume_times` is the number of earlier deliveries.
        """
        now_ms = self._now_ms()
        message = InFlightMessage(
            client=client,
            group=group,
            topic=topic,
            client_handle=client_handle,
            handle=handle,
            reconsume_times=reconsume_times,
            received_ms=now_ms,
            handle_received_ms=now_ms,
        )
        self.add(message)

    def add(self, message: InFlightMessage) -> None:
        """Track a message, so that it is renewed. Hot path.

        A message that was taken by `take` is added again if the client's request has failed. If the
        client has disconnected, the message is returned to the broker instead.
        """
        if self._clients.get(message.client.id) is not message.client:  # it has disconnected
            self._pending.append(self._return_message(message))
            self._start_requests()
            return
        message.is_tracked = True
        self.count += 1
        client_messages = self._in_flight.setdefault(message.client, {})
        client_messages[message.group, message.client_handle] = message
        self._schedule(message)

    def _now_ms(self) -> int:
        """Return the time of the monotonic clock in ms.

        A wall clock may be set back or differ from the broker's, which would delay renewals.
        """
        return int(self._backend.clock.monotonic_s() * 1000)

    def _schedule(self, message: InFlightMessage, earliest: int = 0) -> None:
        """Schedule the next renewal of a message, `renew_ahead_ms` before it becomes visible.

        Time is divided into periods of `PERIOD_MS`. The renewal is scheduled for a period, which is
        stored in `message.due_period`. It is at least `earliest`.
        """
        visible_ms = message.handle_received_ms + message.handle.invisible_ms
        due_ms = visible_ms - self._limits.renew_ahead_ms
        message.due_period = max(due_ms // PERIOD_MS, earliest)
        self._due.setdefault(message.due_period, {})[message] = None

    def take(
        self, client: Client, group: str, client_handle: str
    ) -> Conversation[InFlightMessage | None]:
        """Stop the renewal of a message that its client acknowledges or changes. Hot path.

        Return the message, or None if this proxy does not track it. A running renewal is awaited.
        If it has just stopped the tracking, the message is returned all the same.
        """
        message = self._in_flight.get(client, _NO_MESSAGES).get((group, client_handle))
        if message is not None and message.renewing is not None:
            yield Await(message.renewing)
        if message is not None and message.is_tracked:
            self._remove(message)
        return message

    def _remove(self, message: InFlightMessage) -> None:
        """Stop tracking a message, so that it is not renewed any more."""
        message.is_tracked = False
        self.count -= 1
        client_messages = self._in_flight[message.client]
        del client_messages[message.group, message.client_handle]
        if not client_messages:
            del self._in_flight[message.client]
        self._due.get(message.due_period, {}).pop(message, None)

    def release_client(self, client: Client) -> None:
        """Stop tracking the messages of a disconnected client, and return them to their brokers.

        If a renewal of a message is in progress, the message is returned when the renewal ends.
        """
        for message in [*self._in_flight.get(client, _NO_MESSAGES).values()]:
            self._remove(message)
            if message.renewing is None:
                self._pending.append(self._return_message(message))
        self._start_requests()

    def run(self) -> None:
        """Queue the renewals of all messages that are due, and start as many requests as allowed.

        The proxy calls this every `PERIOD_MS`. Each queued message gets a future in `renewing`.
        """
        current_period = self._now_ms() // PERIOD_MS
        due_periods = [period for period in self._due if period <= current_period]
        for period in due_periods:
            for message in self._due.pop(period):
                message.renewing = asyncio.get_running_loop().create_future()
                self._pending.append(self._renew(message))
        self._start_requests()

    def _start_requests(self) -> None:
        """Start queued requests, up to `REQUESTS_MAX` at a time.

        The proxy's own session is opened with the first request.
        """
        # A request may end at once and call this again; the loop below then goes on by itself.
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

    def _finish_request(self, outcome: object) -> None:
        """Count a request as ended, and start the next ones. An exception is logged."""
        self._running_count -= 1
        if isinstance(outcome, Exception):
            log.error("The renewal of a message failed because of a bug.", exc_info=outcome)
        self._start_requests()

    def _renew(self, message: InFlightMessage) -> Conversation[None]:
        """Renew a message, and schedule its next renewal or stop tracking it.

        To renew a message is to set its invisible duration again at the broker. A message is
        renewed for the last time when `ProxyLimits.renew_ms_max` have passed since the client
        received it. It then becomes visible after the time of the retry policy. It is also no
        longer tracked if it does not exist at the broker any more, or after too many failures. If
        its client has disconnected during the renewal, it is returned to the broker.
        """
        now_ms = self._now_ms()
        is_last = now_ms - message.received_ms >= self._limits.renew_ms_max
        invisible_ms = backoff_ms(message) if is_last else next_step_ms(message)
        try:
            message.handle = yield from self._change(
                message.group, message.topic, message.handle, invisible_ms
            )
        except SluiceError as error:
            can_succeed_later = self._record_failure(message, error)
            is_last = is_last or not can_succeed_later
        else:
            message.handle_received_ms = now_ms
            message.renewals += 1
            message.failures = 0

        # The message is untracked or scheduled before `take` resumes, which waits for `renewing`.
        renewing = message.renewing
        message.renewing = None
        if not message.is_tracked:
            yield from self._return_message(message)  # its client has disconnected
        elif is_last:
            self._remove(message)
        else:
            self._schedule(message, now_ms // PERIOD_MS + RETRY_PERIODS)
        if renewing is not None:
            renewing.set_result(None)

    def _record_failure(self, message: InFlightMessage, error: SluiceError) -> bool:
        """Count and log a failed renewal, and return whether a later renewal could succeed.

        It cannot if the message does not exist any more (`StatusError`), or if `renew_attempts_max`
        renewals have failed in a row.
        """
        message.failures += 1
        log.warning(
            "Cannot renew message %s of group %s: %s", message.client_handle, message.group, error
        )
        is_gone = isinstance(error, StatusError)
        return not is_gone and message.failures < self._limits.renew_attempts_max

    def _return_message(self, message: InFlightMessage) -> Conversation[None]:
        """Let the broker deliver a message to other clients soon. Errors are ignored."""
        with suppress(SluiceError):  # then its invisible duration ends by itself
            yield from self._change(
                message.group, message.topic, message.handle, self._limits.given_back_ms
            )


def next_step_ms(message: InFlightMessage) -> int:
    """Return the invisible duration of the next renewal in ms; each renewal takes the next step."""
    step = min(message.renewals, len(INVISIBLE_STEPS_MS) - 1)
    return INVISIBLE_STEPS_MS[step]


def backoff_ms(message: InFlightMessage) -> int:
    """Return the time in ms until the redelivery of a message that was not finished in time.

    The time comes from the retry policy of the client's group and the message's number of earlier
    deliveries. It is `DEFAULT_BACKOFF_MS` if there is no policy.
    """
    settings = message.client.settings
    policy = m.RetryPolicy() if settings is None else settings.backoff_policy
    if policy.WhichOneof("strategy") == "exponential_backoff":
        backoff = policy.exponential_backoff
        factor = backoff.multiplier ** min(message.reconsume_times, BACKOFF_EXPONENT_MAX)
        return int(min(to_ms(backoff.max), to_ms(backoff.initial) * factor))
    steps = policy.customized_backoff.next
    if not steps:
        return DEFAULT_BACKOFF_MS
    # The first two delays are not used for retries, as in RocketMQ.
    step = min(message.reconsume_times + 2, len(steps) - 1)
    return to_ms(steps[step])
