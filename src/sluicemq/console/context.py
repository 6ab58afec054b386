"""The input and the output of a page: `Context` and `Answer`.

A page is a coroutine `(Context) -> Answer` and does not depend on HTTP. It reaches the cluster
through `context.admin`, or through `context.mq` to send. Both sign with the credentials of the
signed-in user.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast

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
"""The number of rows on one page of a list."""
LISTING_S: Final = 10.0
"""The age up to which a cached result is used."""


class Cache:
    """Results of requests, which are used again for `LISTING_S` seconds.

    Callers of the same key wait for the same request.
    """

    def __init__(self, clock: Clock) -> None:
        """Begin without results. `clock` measures their ages."""
        self._clock = clock
        self._results: dict[Hashable, tuple[float, Any]] = {}  # time of the request, result
        self._locks: dict[Hashable, asyncio.Lock] = {}

    async def get(self, key: Hashable, request: Callable[[], Awaitable[T]]) -> T:
        """Return the cached result of a key, or await `request()` and cache its result.

        A result is used for `LISTING_S` seconds. Callers that want the same key at the same time
        share one request. Errors are raised and not cached.
        """
        async with self._locks.setdefault(key, asyncio.Lock()):
            requested_s, result = self._results.get(key, (-math.inf, None))
            if self._clock.monotonic_s() - requested_s > LISTING_S:
                requested_s = self._clock.monotonic_s()
                result = await request()
                self._results[key] = (requested_s, result)
            return cast("T", result)

    def clear(self) -> None:
        """Forget all results, after a change."""
        self._results.clear()


@dataclass(frozen=True, slots=True)
class Paged(Generic[T]):
    """One page of a list of `count` rows. `number` is counted from 1, and `pages` is the total."""

    rows: list[T]
    number: int
    pages: int
    count: int


@dataclass(frozen=True, slots=True)
class Context:
    """One request for a page.

    `path`, `query` and `form` have the texts of the request by name. If `is_live` is True, only the
    part of the page that is fetched repeatedly is needed. `pipelines` are the directories of
    progress files of pipelines. `proxies` are the addresses of proxies that report their clients.
    """

    mq: "Sluice"
    session: Session
    cache: Cache
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
        """The admin interface of the client, which signs with the user's credentials."""
        return self.mq.admin

    async def get_cached(self, name: str, request: Callable[[], Awaitable[T]]) -> T:
        """Return the cached result of a request, or await it.

        Results are cached for each user separately, because access control may hide parts.
        """
        return await self.cache.get((self.session.credentials, name), request)

    def parse_number(self, name: str, default: int) -> int:
        """Return the field `name` of the form or query as an integer; `default` if it is empty.

        Raises ConfigurationError for any other text.
        """
        field_text = self._field_text(name)
        if not field_text:
            return default
        try:
            return int(field_text)
        except ValueError:
            raise ConfigurationError(
                f"{name} must be a number, got {field_text!r}.", fix="Enter a number."
            ) from None

    def _field_text(self, name: str) -> str:
        """Return the field `name` of the form, else of the query; "" if neither has one."""
        return self.form.get(name) or self.query.get(name) or ""

    def parse_time(self, name: str, default_ms: int) -> int:
        """Return the field `name` as a time in ms since 1970; `default_ms` if it is empty.

        The text is as browsers write it, 2026-11-23T20:04, and in UTC unless it has a time zone.
        Raises ConfigurationError for any other text.
        """
        field_text = self._field_text(name)
        if not field_text:
            return default_ms
        try:
            time = datetime.fromisoformat(field_text)
        except ValueError:
            raise ConfigurationError(
                f"{name} must be a time, got {field_text!r}.", fix="Write it as 2026-11-23T20:04."
            ) from None
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        return round(time.timestamp() * 1000)

    def paginate(self, rows: list[T]) -> Paged[T]:
        """Return one page of `rows`, of up to `PAGE_ROWS` rows.

        The query field `page` is its number, from 1; by default 1. A number that is too low or too
        high means the first or last page. Without rows there is one empty page. Raises
        ConfigurationError if the field is not a number.
        """
        page_count = max(1, math.ceil(len(rows) / PAGE_ROWS))
        page_number = min(max(1, self.parse_number("page", 1)), page_count)
        first_row = (page_number - 1) * PAGE_ROWS
        rows_of_page = rows[first_row : first_row + PAGE_ROWS]
        return Paged(rows_of_page, page_number, page_count, len(rows))


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a page: the values of its template, or the address to redirect to.

    `audit_values` are added to the line of the audit log about a change that is done.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    redirect: str = ""
    audit_values: Mapping[str, Any] = field(default_factory=dict)


Handler = Callable[[Context], Coroutine[Any, Any, Answer]]


class Page(NamedTuple):
    """A row of `console.table`.

    `role` is the lowest role that may use the page. `entry` is the key of its text in the
    navigation, or "" if it is not there. `audit_event` is the name of a change in the audit log, or
    "" for a page that changes nothing.
    """

    path: str
    handler: Handler
    role: Role
    template: str
    entry: str = ""
    audit_event: str = ""

    @property
    def method(self) -> str:
        """The HTTP method of the page."""
        return "POST" if self.audit_event else "GET"
