"""What was made of texts that clients name, kept while it fits into so many bytes.

A client may name any expression, of any length: a number of entries bounds nothing. Sizes are
reckoned from the arguments, by who knows what is made of them.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")
BYTES_MAX: Final = 4 << 20
ENTRY_BYTES: Final = 512


class ByteCache(Generic[T]):
    """A function that keeps what it found; the one that was not asked for longest goes first."""

    def __init__(
        self, function: Callable[..., T], size_of: Callable[..., int], bytes_max: int
    ) -> None:
        self._function = function
        self._size_of = size_of
        self._bytes_max = bytes_max
        self._found: OrderedDict[tuple[object, ...], tuple[T, int]] = OrderedDict()
        self.size_bytes = 0
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> T:
        known = self._found.get(arguments)
        if known is not None:
            self._found.move_to_end(arguments)
            return known[0]
        made = self._function(*arguments)
        size_bytes = ENTRY_BYTES + self._size_of(*arguments)
        if size_bytes <= self._bytes_max:
            self._found[arguments] = (made, size_bytes)
            self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max:
            _, (_, gone_bytes) = self._found.popitem(last=False)
            self.size_bytes -= gone_bytes
        return made

    def __len__(self) -> int:
        return len(self._found)


def kept(
    size_of: Callable[..., int], bytes_max: int = BYTES_MAX
) -> Callable[[Callable[..., T]], ByteCache[T]]:
    """Keeps what a function finds; `size_of` its arguments: about so many bytes is it."""

    def decorate(function: Callable[..., T]) -> ByteCache[T]:
        return ByteCache(function, size_of, bytes_max)

    return decorate
