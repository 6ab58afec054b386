"""Blocks of columns kept in memory, the longest unused ones given up first."""

from collections import OrderedDict
from typing import Final

from sluicemq.record.columns import ColumnBlock
from sluicemq.record.columns_build import ArrowColumns

Key = tuple[str, int, str, int]
"""Topic, queue id, `sealed` or `slot`, its number."""
_VALUE_BYTES: Final = 24
"""What a distinct value takes beside its place in Arrow: some 70 bytes once a filter has read its
column, which happens to few of them."""


class BlockCache:
    """At most `bytes_max` of blocks, as far as that can be reckoned. A slot holds several."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[Key, tuple[ColumnBlock, ...]] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self.size_bytes = 0

    def get(self, key: Key) -> tuple[ColumnBlock, ...]:
        """Those of the key, in order; empty without any."""
        found = self._blocks.get(key)
        if found is None:
            return ()
        self._blocks.move_to_end(key)
        return found

    def put(self, key: Key, *blocks: ColumnBlock) -> None:
        self.drop(key)
        size = sum(map(memory_bytes, blocks))
        self._blocks[key] = blocks
        self._sizes[key] = size
        self.size_bytes += size
        while self.size_bytes > self._bytes_max and len(self._blocks) > 1:
            self.drop(next(iter(self._blocks)))

    def drop(self, key: Key) -> None:
        if self._blocks.pop(key, None) is not None:
            self.size_bytes -= self._sizes.pop(key)

    def drop_topic(self, topic: str) -> None:
        for key in [key for key in self._blocks if key[0] == topic]:
            self.drop(key)


def memory_bytes(block: ColumnBlock) -> int:
    """About what a block takes when all of its columns are in use."""
    if not isinstance(block.columns, ArrowColumns):
        return 0
    arrays = block.columns.arrays.values()
    return sum(array.nbytes + _VALUE_BYTES * len(array.dictionary) for array in arrays)
