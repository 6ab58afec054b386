"""Parts of a page that may be missing.

If a broker cannot answer a request, the part of the page has no value, and the template shows the
reason instead.
"""

import asyncio
from collections.abc import Awaitable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from sluicemq.errors import SluiceError

T = TypeVar("T")
REQUESTS_MAX: Final = 16
"""The number of requests of one page that are in progress at the same time."""


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """A part of a page: its value, or None and the reason."""

    value: T | None
    reason: str = ""


async def fetch_part(request: Awaitable[T]) -> Part[T]:
    """Await a request, and return its result or the text of its SluiceError as a `Part`.

    So one failing request does not make the whole page fail.
    """
    try:
        return Part(await request)
    except SluiceError as error:
        return Part(None, str(error))


async def fetch_parts(requests: Mapping[Hashable, Awaitable[T]]) -> dict[Any, Part[T]]:
    """Await several requests, up to `REQUESTS_MAX` at once; return name -> result or error text."""
    semaphore = asyncio.Semaphore(REQUESTS_MAX)

    async def fetch(request: Awaitable[T]) -> Part[T]:
        async with semaphore:
            return await fetch_part(request)

    parts = await asyncio.gather(*(fetch(request) for request in requests.values()))
    return dict(zip(requests, parts, strict=True))
