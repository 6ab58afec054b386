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
    """A function whose results are cached, the least recently used ones being removed first.

    Clients may name any expression, of any length, so a limit on the number of entries would not
    limit the memory.
    """

    def __init__(
        self, function: Callable[..., T], size_of: Callable[..., int], bytes_max: int
    ) -> None:
        """Cache the results of `function` up to an estimated size of `bytes_max`.

        `size_of`, called with the arguments, estimates the size of the entry in bytes. A result
        that is larger than the whole cache is not cached.
        """
        self._function = function
        self._size_of = size_of
        self._bytes_max = bytes_max
        self._found: OrderedDict[tuple[object, ...], tuple[T, int]] = OrderedDict()
        self.size_bytes = 0
        """The estimated size of all entries."""
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> T:
        known = self._found.get(arguments)
        if known is not None:
            self._found.move_to_end(arguments)
            return known[0]
        result = self._function(*arguments)
        size_bytes = ENTRY_BYTES + self._size_of(*arguments)
        if size_bytes <= self._bytes_max:
            self._found[arguments] = (result, size_bytes)
            self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max:
            _, (_, removed_bytes) = self._found.popitem(last=False)
            self.size_bytes -= removed_bytes
        return result

    def __len__(self) -> int:
        return len(self._found)


def cache_by_size(
    size_of: Callable[..., int], bytes_max: int = CACHE_BYTES_MAX
) -> Callable[[Callable[..., T]], ByteCache[T]]:
    """Return a decorator that caches the results of a function; see `ByteCache`."""

    def decorate(function: Callable[..., T]) -> ByteCache[T]:
        return ByteCache(function, size_of, bytes_max)

    return decorate
