"""A part of a page: what a broker cannot answer is a part without a value, which the template greys
with the reason.
"""

import asyncio
from collections.abc import Awaitable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from sluicemq.errors import SluiceError

T = TypeVar("T")
TOGETHER_MAX: Final = 16
"""So many questions of one page are on their way at once."""


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """A part of a page: its value, or why there is none."""

    value: T | None
    reason: str = ""


async def part(question: Awaitable[T]) -> Part[T]:
    """The answer, or the sentence of the error."""
    try:
        return Part(await question)
    except SluiceError as error:
        return Part(None, str(error))


async def parts(questions: Mapping[Hashable, Awaitable[T]]) -> dict[Any, Part[T]]:
    """The same of several, together."""
    turn = asyncio.Semaphore(TOGETHER_MAX)

    async def ask(question: Awaitable[T]) -> Part[T]:
        async with turn:
            return await part(question)

    found = await asyncio.gather(*(ask(question) for question in questions.values()))
    return dict(zip(questions, found, strict=True))
