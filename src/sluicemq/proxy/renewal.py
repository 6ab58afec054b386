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
from sluicemq.proxy.backend import ITSELF, Backend, ConversationRun, Link
from sluicemq.proxy.clients import Client, Clients
from sluicemq.proxy.convert import milliseconds
from sluicemq.proxy.limits import StatusError
from sluicemq.wire.popping import ReceiptHandle

log = logging.getLogger(__name__)

MINUTE_MS: Final = 60_000
NEXT_MS: Final = tuple(minutes * MINUTE_MS for minutes in (1, 3, 5, 10, 30, 60))
"""The invisible time from each renewal on; before the first it is `ProxyLimits.invisible_ms`."""
PERIOD_MS: Final = 1_000
AGAIN: Final = 3
"""Periods until what has failed is tried again: three times before its time is over."""
HELD_MAX: Final = 100_000
CLIENT_HELD_MAX: Final = 25_000
UNDER_WAY_MAX: Final = 64
WAIT_MS: Final = 10_000
TIMES_MAX: Final = 32

Change = Callable[[str, str, ReceiptHandle, int], Conversation[ReceiptHandle]]
"""Group, topic, handle, invisible time -> the handle that counts then. Raises StatusError where
there is no such message any more, SluiceError."""
NOTHING: Final[Mapping[tuple[str, str], "Held"]] = {}


@dataclass(slots=True, eq=False)
class Held:
    """A message that a client works on. It knows the handle as `text`; `handle` is what counts.
    `times`: it was tried so often before."""

    client: Client
    group: str
    topic: str
    text: str
    handle: ReceiptHandle
    times: int
    since_ms: int
    handle_ms: int
    """When `handle` was given, like `since_ms` on the monotonic clock."""
    due: int = 0
    renewals: int = 0
    failures: int = 0
    is_kept: bool = False
    renewing: asyncio.Future[None] | None = None


class Renewal:
    """What all clients of this proxy hold."""

    def __init__(
        self, backend: Backend, clients: Clients, change: Change, limits: ProxyLimits
    ) -> None:
        clients.on_gone.append(self.gone)
        self._backend = backend
        self._clients = clients.by_id
        self._change = change
        self._limits = limits
        self._held: dict[Client, dict[tuple[str, str], Held]] = {}
        self._due: dict[int, dict[Held, None]] = {}
        self._waiting: deque[Conversation[None]] = deque()
        self._under_way = 0
        self._is_beginning = False
        self._link: Link | None = None
        self.count = 0

    def has_room(self, client: Client) -> bool:
        """May the client have more? HOT."""
        return self.count < HELD_MAX and len(self._held.get(client, ())) < CLIENT_HELD_MAX

    def held_by(self, client: Client) -> int:
        """How many messages it works on."""
        return len(self._held.get(client, NOTHING))

    def keep(
        self, client: Client, group: str, topic: str, text: str, handle: ReceiptHandle, times: int
    ) -> None:
        """The client gets it now. HOT."""
        now_ms = self._now_ms()
        self.put(Held(client, group, topic, text, handle, times, now_ms, now_ms))

    def put(self, held: Held) -> None:
        """Also one that was taken, when what the client wanted of it has failed. HOT."""
        if self._clients.get(held.client.id) is not held.client:  # it has gone meanwhile
            self._waiting.append(self._give_back(held))
            self._begin()
            return
        held.is_kept = True
        self.count += 1
        self._held.setdefault(held.client, {})[held.group, held.text] = held
        self._plan(held)

    def _now_ms(self) -> int:
        """The monotonic clock's time: neither a wall clock that is set back nor one that differs
        from the broker's may delay a renewal."""
        return int(self._backend.clock.monotonic_s() * 1000)

    def _plan(self, held: Held, earliest: int = 0) -> None:
        due_ms = held.handle_ms + held.handle.invisible_ms - self._limits.renew_ahead_ms
        held.due = max(due_ms // PERIOD_MS, earliest)
        self._due.setdefault(held.due, {})[held] = None

    def take(self, client: Client, group: str, text: str) -> Conversation[Held | None]:
        """The client does something with a message: it is renewed no more. None: it is not held
        here. HOT."""
        held = self._held.get(client, NOTHING).get((group, text))
        if held is not None and held.renewing is not None:
            yield Await(held.renewing)
        if held is not None and held.is_kept:
            self._forget(held)
        return held

    def _forget(self, held: Held) -> None:
        held.is_kept = False
        self.count -= 1
        mine = self._held[held.client]
        del mine[held.group, held.text]
        if not mine:
            del self._held[held.client]
        self._due.get(held.due, {}).pop(held, None)

    def gone(self, client: Client) -> None:
        """What it held, others get."""
        for held in [*self._held.get(client, NOTHING).values()]:
            self._forget(held)
            if held.renewing is None:
                self._waiting.append(self._give_back(held))
        self._begin()

    def run(self) -> None:
        """Renews what is due."""
        now = self._now_ms() // PERIOD_MS
        for period in [it for it in self._due if it <= now]:
            for held in self._due.pop(period):
                held.renewing = asyncio.get_running_loop().create_future()
                self._waiting.append(self._renew(held))
        self._begin()

    def _begin(self) -> None:
        """As much as may be under way."""
        if self._is_beginning:
            return
        self._is_beginning = True
        while self._waiting and self._under_way < UNDER_WAY_MAX:
            self._under_way += 1
            if self._link is None:
                self._link = self._backend.link(ITSELF, ITSELF, lambda _command, _answer: None)
            ConversationRun(self._waiting.popleft(), self._link.ask, self._ended)
        self._is_beginning = False

    def _ended(self, result: object) -> None:
        self._under_way -= 1
        if isinstance(result, Exception):
            log.error("a message was not renewed", exc_info=result)
        self._begin()

    def _renew(self, held: Held) -> Conversation[None]:
        """Then it is due later, or nobody keeps it any more."""
        now_ms = self._now_ms()
        is_last = now_ms - held.since_ms >= self._limits.renew_ms_max
        time_ms = wait_ms(held) if is_last else NEXT_MS[min(held.renewals, len(NEXT_MS) - 1)]
        try:
            held.handle = yield from self._change(held.group, held.topic, held.handle, time_ms)
        except SluiceError as error:
            held.failures += 1
            is_last |= (
                isinstance(error, StatusError) or held.failures >= self._limits.renew_attempts_max
            )
            log.warning("message %s of group %s is not renewed: %s", held.text, held.group, error)
        else:
            held.handle_ms = now_ms
            held.renewals += 1
            held.failures = 0
        renewing, held.renewing = held.renewing, None
        if not held.is_kept:
            yield from self._give_back(held)  # its client has gone meanwhile
        elif is_last:
            self._forget(held)
        else:
            self._plan(held, now_ms // PERIOD_MS + AGAIN)
        if renewing is not None:
            renewing.set_result(None)

    def _give_back(self, held: Held) -> Conversation[None]:
        with suppress(SluiceError):  # then its own time brings it back
            yield from self._change(held.group, held.topic, held.handle, self._limits.given_back_ms)


def wait_ms(held: Held) -> int:
    """Before a message comes again that its client has had for too long, as its group wants it."""
    settings = held.client.settings
    policy = m.RetryPolicy() if settings is None else settings.backoff_policy
    if policy.WhichOneof("strategy") == "exponential_backoff":
        found = policy.exponential_backoff
        steps = found.multiplier ** min(held.times, TIMES_MAX)
        return int(min(milliseconds(found.max), milliseconds(found.initial) * steps))
    known = policy.customized_backoff.next
    return milliseconds(known[min(held.times + 2, len(known) - 1)]) if known else WAIT_MS
