"""Some stored records as columns of numbers and places: what the column decoder works on.

A record's fixed part (spec/store.md §2.1) is 88 bytes with two IPv4 hosts and 12 more for each
IPv6 host. One gather takes the fixed parts of all records with the same hosts as a NumPy struct;
field by field it would take five times as long (bench/spark.md). Everything is found when first
asked for.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sluicemq.errors import ProtocolError
from sluicemq.model.message import BORN_HOST_IPV6, STORE_HOST_IPV6
from sluicemq.record.buffers import Bytes, Positions, gather
from sluicemq.record.shapes import Properties, read_properties
from sluicemq.record.walk import MAGIC_V2

_HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6


def _head_type(born_host_bytes: int, store_host_bytes: int) -> np.dtype[Any]:
    """A record up to and with its body length (spec/store.md §2.1)."""
    return np.dtype([
        ("size", ">i4"), ("magic", ">u4"), ("crc", ">i4"), ("queue_id", ">i4"), ("flag", ">i4"),
        ("queue_offset", ">i8"), ("physical_offset", ">i8"), ("sys_flag", ">i4"),
        ("born_time", ">i8"), ("born_host", f"V{born_host_bytes}"),
        ("store_time", ">i8"), ("store_host", f"V{store_host_bytes}"),
        ("reconsume_times", ">i4"), ("prepared_offset", ">i8"), ("body_length", ">i4"),
    ])  # fmt: skip


_HEADS: Final = {
    0: _head_type(8, 8),
    BORN_HOST_IPV6: _head_type(20, 8),
    STORE_HOST_IPV6: _head_type(8, 20),
    _HOST_BITS: _head_type(20, 20),
}


class Block:
    """Some records of one run of bytes, with what is known about them, found when first asked."""

    def __init__(self, raw: Bytes, starts: Positions) -> None:
        self.raw = raw
        self.starts = starts
        bits = gather(raw, starts + 36, ">i4").astype(np.int32)
        self.sys_flag = bits
        kinds = np.unique(bits & _HOST_BITS)
        self._heads = [
            (None if len(kinds) == 1 else np.flatnonzero(bits & _HOST_BITS == kind), int(kind))
            for kind in kinds
        ]
        self._parts = [
            (rows, _gather_heads(raw, starts if rows is None else starts[rows], _HEADS[kind]))
            for rows, kind in self._heads
        ]

    def __len__(self) -> int:
        return len(self.starts)

    def number(self, name: str, dtype: Any = np.int64) -> NDArray[Any]:
        """One field of the head, of all rows."""
        if len(self._parts) == 1 and self._parts[0][0] is None:
            return self._parts[0][1][name].astype(dtype)
        numbers = np.empty(len(self), dtype)
        for rows, heads in self._parts:
            numbers[rows] = heads[name]
        return numbers

    def hosts(self, name: str) -> Iterator[tuple[NDArray[np.intp], Bytes]]:
        """`born_host` or `store_host` as (rows, their bytes), those of one length together."""
        for rows, heads in self._parts:
            found = np.ascontiguousarray(heads[name])
            places = np.arange(len(self)) if rows is None else rows
            yield places, found.view(np.uint8).reshape(len(found), -1)

    @cached_property
    def body_starts(self) -> Positions:
        if len(self._parts) == 1 and self._parts[0][0] is None:
            return self.starts + self._parts[0][1].dtype.itemsize
        starts = self.starts.copy()
        for rows, heads in self._parts:
            starts[rows] += heads.dtype.itemsize
        return starts

    @cached_property
    def body_lengths(self) -> Positions:
        return self.number("body_length")

    @cached_property
    def topic_places(self) -> tuple[Positions, Positions]:
        """Starts and lengths of the topics; the length takes 1 byte in V1, 2 in V2."""
        lengths = self.body_lengths
        ends = self.starts + self.number("size")
        at = self.body_starts + lengths
        if (lengths < 0).any() or (at + 3 > ends).any():
            raise _damaged(self, (lengths < 0) | (at + 3 > ends))
        topic_lengths = self.raw[at].astype(np.int64)
        second = self.number("magic") == MAGIC_V2
        if not second.any():
            return at + 1, topic_lengths
        topic_lengths[second] = gather(self.raw, at[second], ">i2")
        return at + 1 + second, topic_lengths

    @cached_property
    def property_places(self) -> tuple[Positions, Positions]:
        """Starts and lengths of the properties. Raises ProtocolError when a record's lengths differ
        from its size."""
        topic_starts, topic_lengths = self.topic_places
        at = topic_starts + topic_lengths
        ends = self.starts + self.number("size")
        bad = (topic_lengths < 0) | (at + 2 > ends)
        if bad.any():
            raise _damaged(self, bad)
        lengths = gather(self.raw, at, ">i2").astype(np.int64)
        bad = (lengths < 0) | (at + 2 + lengths != ends)
        if bad.any():
            raise _damaged(self, bad)
        return at + 2, lengths

    @cached_property
    def properties(self) -> Properties:
        return read_properties(self.raw, *self.property_places)

    def part(self, rows: slice | NDArray[np.bool_]) -> "Block":
        """Some of the rows as a block of their own."""
        return Block(self.raw, self.starts[rows])


def _gather_heads(raw: Bytes, starts: Positions, kind: np.dtype[Any]) -> NDArray[Any]:
    if len(starts) and int(starts[-1]) + kind.itemsize > len(raw):
        raise ProtocolError(f"the record at byte {starts[-1]} is cut off.")
    return gather(raw, starts, f"V{kind.itemsize}").view(kind)


def _damaged(block: Block, bad: NDArray[np.bool_]) -> ProtocolError:
    row = int(np.flatnonzero(bad)[0])
    offset = int(block.number("queue_offset")[row])
    return ProtocolError(
        f"the record at byte {block.starts[row]} (queue offset {offset}) is damaged:"
        " its lengths do not agree with its size."
    )
