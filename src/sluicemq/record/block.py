"""Some stored records as columns of numbers and places: what the column decoder works on.

A record's fixed part (spec/store.md §2.1) is 88 bytes with two IPv4 hosts and 12 more for each
IPv6 host. One gather takes the fixed parts of all records with the same hosts as a NumPy struct;
field by field it would take five times as long (spec/spark.md). Another one takes what lies
between body and properties, as long as all have one topic. Everything is found when first asked
for.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sluicemq.errors import ProtocolError
from sluicemq.record.layout import HOST_BITS, MAGIC_V2, RECORD_HEAD, RECORD_HEADS
from sluicemq.record.places import Bytes, Positions, column_of, equal_rows, gather, rows_at

Rows = slice | Positions


class Block:
    """Some records of one run of bytes, with what is known about them, found when first asked."""

    def __init__(self, raw: Bytes, starts: Positions) -> None:
        self.raw = raw
        self.starts = starts
        heads = _gather_heads(raw, starts, RECORD_HEAD.dtype)
        self.sys_flag = heads["sys_flag"].astype(np.int32)
        kinds = self.sys_flag & HOST_BITS
        self._parts: list[tuple[Rows, NDArray[Any]]] = [(slice(None), heads)]
        if kinds.any():
            self._parts = _heads_by_kind(raw, starts, kinds)

    def __len__(self) -> int:
        return len(self.starts)

    def number(self, name: str, dtype: Any = np.int64) -> NDArray[Any]:
        """One field of the head, of all rows."""
        if len(self._parts) == 1:
            return self._parts[0][1][name].astype(dtype)
        numbers = np.empty(len(self), dtype)
        for rows, heads in self._parts:
            numbers[rows] = heads[name]
        return numbers

    def hosts(self, name: str) -> Iterator[tuple[Positions, Bytes]]:
        """`born_host` or `store_host` as (rows, their bytes), those of one length together."""
        for rows, heads in self._parts:
            found = np.ascontiguousarray(heads[name])
            yield np.arange(len(self))[rows], found.view(np.uint8).reshape(len(found), -1)

    @cached_property
    def body_starts(self) -> Positions:
        if len(self._parts) == 1:
            return self.starts + self._parts[0][1].dtype.itemsize
        starts = self.starts.copy()
        for rows, heads in self._parts:
            starts[rows] += heads.dtype.itemsize
        return starts

    @cached_property
    def body_lengths(self) -> Positions:
        return self.number("body_length")

    @cached_property
    def _ends(self) -> Positions:
        ends: Positions = self.starts + self.number("size")
        return ends

    @cached_property
    def _body_ends(self) -> Positions:
        lengths = self.body_lengths
        ends: Positions = self.body_starts + lengths
        self._check((lengths < 0) | (ends + 3 > self._ends))
        return ends

    @cached_property
    def _is_second(self) -> NDArray[np.bool_]:
        second: NDArray[np.bool_] = self.number("magic", np.int32) == MAGIC_V2
        return second

    @cached_property
    def _same_topic(self) -> tuple[bytes, Positions] | None:
        """The topic of all records, and the lengths that follow it; None when topics differ."""
        if not len(self) or self._is_second.any():
            return None
        at = self._body_ends
        length = int(self.raw[at[0]])
        tails = rows_at(self.raw, at, length + 3)
        text = tails[0, : length + 1].tobytes()
        if not equal_rows(tails, text).all():
            return None
        return text[1:], column_of(tails, length + 1, ">i2").astype(np.int64)

    @property
    def topic(self) -> bytes | None:
        """The topic, when it is the same in all records."""
        return None if self._same_topic is None else self._same_topic[0]

    @cached_property
    def topic_places(self) -> tuple[Positions, Positions]:
        """Starts and lengths of the topics; the length takes 1 byte in V1, 2 in V2."""
        at, second = self._body_ends, self._is_second
        lengths = self.raw[at].astype(np.int64)
        lengths[second] = gather(self.raw, at[second], ">i2")
        return at + 1 + second, lengths

    @cached_property
    def property_places(self) -> tuple[Positions, Positions]:
        """Starts and lengths of the properties. Raises ProtocolError when a record's lengths differ
        from its size."""
        if self._same_topic is not None:
            topic, lengths = self._same_topic
            starts = self._body_ends + len(topic) + 3
        else:
            topic_starts, topic_lengths = self.topic_places
            starts = topic_starts + topic_lengths + 2
            self._check((topic_lengths < 0) | (starts > self._ends))
            lengths = gather(self.raw, starts - 2, ">i2").astype(np.int64)
        self._check((lengths < 0) | (starts + lengths != self._ends))
        return starts, lengths

    def _check(self, bad: NDArray[np.bool_]) -> None:
        if bad.any():
            raise _damaged(self, bad)

    def part(self, rows: slice | NDArray[np.bool_]) -> Self:
        """Some of the rows as a block of their own."""
        return type(self)(self.raw, self.starts[rows])


def _heads_by_kind(
    raw: Bytes, starts: Positions, kinds: NDArray[np.int32]
) -> list[tuple[Rows, NDArray[Any]]]:
    """The heads of records whose hosts have one length, together: which rows, and their heads."""
    found = [(np.flatnonzero(kinds == kind), head.dtype) for kind, head in RECORD_HEADS.items()]
    return [(rows, _gather_heads(raw, starts[rows], head)) for rows, head in found if len(rows)]


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
