"""What a page is given and what it gives: `Context` and `Answer`.

A page is a coroutine `(Context) -> Answer`, without a word about HTTP. It reaches the cluster
through `context.admin` (or `context.mq`, to send), which signs as whoever is signed in.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from sluicemq.clock import Clock
from sluicemq.console.accounts import Role
from sluicemq.console.history import History
from sluicemq.console.sessions import Session
from sluicemq.errors import ConfigurationError

if TYPE_CHECKING:
    from sluicemq.client.aio.cluster import Admin
    from sluicemq.client.aio.sluice import Sluice

T = TypeVar("T")
PAGE_ROWS: Final = 50
LISTING_S: Final = 10.0


class Cached:
    """Answers that may be `LISTING_S` old; who asks meanwhile waits for the same one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[Hashable, tuple[float, Any]] = {}
        self._locks: dict[Hashable, asyncio.Lock] = {}

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """What is known under the key, else what `ask` brings."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            known = self._known.get(key)
            if known is None or self._clock.monotonic_s() - known[0] > LISTING_S:
                self._known[key] = known = self._clock.monotonic_s(), await ask()
            value: T = known[1]
            return value

    def forget(self) -> None:
        """After a change."""
        self._known.clear()


@dataclass(frozen=True, slots=True)
class Paged(Generic[T]):
    """One page of a list; pages count from 1."""

    rows: list[T]
    number: int
    pages: int
    count: int


@dataclass(frozen=True, slots=True)
class Context:
    """One request. `path`, `query` and `form` are texts by name; `is_live`: only the part of the
    page that is fetched again and again is wanted. `pipelines`: directories where runs of pipelines
    leave how far they are; `proxies`: those that tell which members came to them."""

    mq: "Sluice"
    session: Session
    cached: Cached
    history: History
    clock: Clock
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)
    is_live: bool = False
    pipelines: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()

    @property
    def admin(self) -> "Admin":
        return self.mq.admin

    async def listed(self, name: str, ask: Callable[[], Awaitable[T]]) -> T:
        """A listing of the cluster, as this account may see it."""
        return await self.cached.get((self.session.credentials, name), ask)

    def number(self, name: str, default: int) -> int:
        """Of the query or form. Raises ConfigurationError for another text."""
        text = self.form.get(name) or self.query.get(name) or ""
        try:
            return int(text) if text else default
        except ValueError:
            raise ConfigurationError(f"{name} is {text!r}.", fix="Give a number.") from None

    def time(self, name: str, default_ms: int) -> int:
        """Of the query or form: UTC, as browsers write it (2026-11-23T20:04). ms since 1970.
        Raises ConfigurationError."""
        text = self.form.get(name) or self.query.get(name) or ""
        try:
            told = datetime.fromisoformat(text) if text else None
        except ValueError:
            raise ConfigurationError(
                f"{name} is {text!r}.", fix="Write a time as 2026-11-23T20:04."
            ) from None
        if told is None:
            return default_ms
        return round((told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp() * 1000)

    def paged(self, rows: list[T]) -> Paged[T]:
        """The page that `page` of the query says, or the nearest one."""
        pages = max(1, -(-len(rows) // PAGE_ROWS))
        number = min(max(1, self.number("page", 1)), pages)
        return Paged(rows[(number - 1) * PAGE_ROWS :][:PAGE_ROWS], number, pages, len(rows))


@dataclass(frozen=True, slots=True)
class Answer:
    """Values of the template, or the address to go on at. `noted`: what the audit log says besides
    of a change that is done."""

    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    redirect: str = ""
    noted: Mapping[str, Any] = field(default_factory=dict)


Handler = Callable[[Context], Coroutine[Any, Any, Answer]]


class Page(NamedTuple):
    """A row of `console.table`. `entry`: the sentence it stands under in the navigation, "" for
    none; `event`: of what changes something, its name in the audit log."""

    path: str
    handler: Handler
    role: Role
    template: str
    entry: str = ""
    event: str = ""

    @property
    def method(self) -> str:
        return "POST" if self.event else "GET"
