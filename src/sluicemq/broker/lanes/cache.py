"""A cache of function results whose size is limited in bytes."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

CACHE_BYTES_MAX: Final = 4 << 20
"""The default limit of a cache, in bytes."""
ENTRY_BYTES: Final = 512
"""The size that each entry has besides its arguments and result, in bytes."""


class ByteCache(Generic[T]):
    """A function whose results are cached.

    If the results exceed a limit in bytes, the least recently used ones are removed. Clients may
    name any expression, of any length, so a limit on the number of entries would not limit the
    memory. An instance is called with positional, hashable arguments.
    """

    def __init__(
        self, function: Callable[..., T], size_of: Callable[..., int], bytes_max: int
    ) -> None:
        """Cache the results of `function` up to an estimated size of `bytes_max`.

        `size_of(*arguments)` estimates the size of the entry for these arguments in bytes, without
        ENTRY_BYTES. An entry that is larger than `bytes_max` is not cached.
        """
        self._function = function
        self._size_of = size_of
        self._bytes_max = bytes_max
        self._entries: OrderedDict[tuple[object, ...], tuple[T, int]] = OrderedDict()
        """By arguments, the least recently used first: the result, and its size in bytes."""
        self.size_bytes = 0
        """The estimated size of all entries."""
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> T:
        """Return the function's result for these arguments. Call it only if none is cached.

        A new result is cached unless it alone is larger than the cache. Then the results that were
        not used for the longest time are removed until the others fit.
        """
        cached = self._entries.get(arguments)
        if cached is not None:
            self._entries.move_to_end(arguments)  # it was used last
            return cached[0]

        computed = self._function(*arguments)
        entry_bytes = ENTRY_BYTES + self._size_of(*arguments)
        if entry_bytes <= self._bytes_max:
            self._entries[arguments] = (computed, entry_bytes)
            self.size_bytes += entry_bytes
        while self.size_bytes > self._bytes_max:
            _, (_, removed_bytes) = self._entries.popitem(last=False)
            self.size_bytes -= removed_bytes
        return computed

    def __len__(self) -> int:
        """Return the number of cached results."""
        return len(self._entries)


def cache_by_size(
    size_of: Callable[..., int], bytes_max: int = CACHE_BYTES_MAX
) -> Callable[[Callable[..., T]], ByteCache[T]]:
    """Return a decorator that replaces a function by a `ByteCache` of its results.

    `size_of` and `bytes_max` are the arguments of `ByteCache`.
    """

    def decorate(function: Callable[..., T]) -> ByteCache[T]:
        return ByteCache(function, size_of, bytes_max)

    return decorate
