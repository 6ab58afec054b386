"""The order in which Java's hash maps and sets hand out what they hold.

RocketMQ writes its tables to files in that order (spec/store.md §11). It means nothing, but with it
our files equal RocketMQ's to the byte, which a test can check, and a user sees no changes in a diff
that are none.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

from sluicemq.model.ids import java_hash

K = TypeVar("K", str, int)
V = TypeVar("V")

DEFAULT_BUCKETS: Final = 16


def hash_ordered(keys: Iterable[K], buckets: int = DEFAULT_BUCKETS) -> list[K]:
    """The keys as a hash map hands them out that was made with so many buckets (a power of two).

    >>> hash_ordered([17, 3, 16])
    [16, 17, 3]
    """
    found = list(keys)
    if len(found) < 2:
        return found
    while len(found) * 4 > buckets * 3:  # a map grows at three quarters
        buckets *= 2

    return sorted(found, key=lambda key: _spread(key) & (buckets - 1))


@lru_cache(maxsize=65_536)
def _spread(key: str | int) -> int:
    code = (java_hash(key) if isinstance(key, str) else key) & 0xFFFFFFFF
    return code ^ code >> 16


def hash_map(values: Mapping[str, V], buckets: int = DEFAULT_BUCKETS) -> dict[str, V]:
    """The same mapping in that order."""
    return {key: values[key] for key in hash_ordered(values, buckets)}


def hash_map_of_integers(values: Mapping[int, Any], buckets: int) -> dict[int, Any]:
    """As `hash_map`, for integer keys."""
    if all(0 <= key < buckets for key in values) and len(values) * 4 <= buckets * 3:
        return dict(sorted(values.items()))
    return {key: values[key] for key in hash_ordered(values, buckets)}
