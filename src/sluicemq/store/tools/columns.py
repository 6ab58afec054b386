"""Many records of the commit log at once, as columns of numbers and places.

`Columns` holds the records that begin at given places of a piece of the log, up to the first whose
parts do not agree with its size or that does not lie where it says (spec/store.md §2.1). Fields are
gathered straight out of the piece: a view of it with stride 1 turns "the number at each of these
places" into one indexing, whatever hosts (IPv4, IPv6) and versions are mixed.

`Texts` cuts the properties of all records at once: they are copied behind each other, every byte
0x02 ends a property, and a name is found by comparing the bytes at all beginnings of properties.
`java_hashes` is Java's String.hashCode of many texts at once: for those of one length a product
with powers of 31; texts that are not ASCII go one by one.
"""

from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sluicemq.model.ids import java_hash
from sluicemq.record.layout import MAGIC_V2, RECORD_BEGIN, RECORD_HEAD, VALUE_END

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]

_PADDING: Final = bytes([VALUE_END]) * 64
_ASCII_END: Final = 0x80
_GUESSES_MAX: Final = 32


def gather(raw: Bytes, places: Positions, dtype: str) -> NDArray[Any]:
    """The value of `dtype` at each place."""
    kind = np.dtype(dtype)
    view = np.ndarray((len(raw) - kind.itemsize + 1,), kind, raw.data, 0, (1,))
    return view[places]


class Columns:
    """Records of one piece of the log, `base` being the piece's position. See the module."""

    def __init__(self, raw: Bytes, base: int, starts: Positions) -> None:
        self.raw = raw
        self.base = base
        heads = gather(raw, starts, f"V{RECORD_BEGIN.size}").view(RECORD_BEGIN.dtype)
        self._fill(starts, heads)
        self.bad_row = self._first_bad()
        if self.bad_row is not None:
            self._fill(starts[: self.bad_row], heads[: self.bad_row])

    def _fill(self, starts: Positions, heads: NDArray[Any]) -> None:
        self.starts = starts
        self._heads = heads
        self.sizes = heads["size"].astype(np.int64)
        self.ends = starts + self.sizes
        self.sys_flag = heads["sys_flag"].astype(np.int32)
        self.queue_id = heads["queue_id"].astype(np.int64)
        self.queue_offset = heads["queue_offset"].astype(np.int64)
        self.positions = starts + self.base
        born = (self.sys_flag >> 4 & 1) * 12
        self.store_time = self._at(starts + RECORD_HEAD.at("store_time") + born, ">i8")
        self.body_starts = starts + RECORD_HEAD.size + born + (self.sys_flag >> 5 & 1) * 12
        self.body_lengths = self._at(self.body_starts - 4, ">i4")
        self.body_ends = self.body_starts + self.body_lengths
        version2 = heads["magic"] == MAGIC_V2
        short = self._at(self.body_ends, "u1")
        self.topic_lengths = np.where(version2, self._at(self.body_ends, ">i2"), short)
        self.topic_starts = self.body_ends + 1 + version2
        self.property_starts = self.topic_starts + self.topic_lengths + 2
        self.property_lengths = self._at(self.property_starts - 2, ">i2")

    def _at(self, places: Positions, dtype: str) -> Positions:
        """As `gather`, where a place may be nonsense: the row is found bad by then."""
        last = len(self.raw) - np.dtype(dtype).itemsize
        return gather(self.raw, np.clip(places, 0, last), dtype).astype(np.int64)

    def _first_bad(self) -> int | None:
        good = (self.body_lengths >= 0) & (self.topic_lengths >= 0) & (self.property_lengths >= 0)
        good &= self.property_starts + self.property_lengths == self.ends
        good &= self._heads["physical_offset"] == self.positions
        good &= self.store_time > 0
        return None if good.all() else int(good.argmin())

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def crc(self) -> Positions:
        return self._heads["body_crc"].astype(np.int64)

    @cached_property
    def texts(self) -> "Texts":
        return Texts(self.raw, self.property_starts, self.property_lengths)

    @cached_property
    def topics(self) -> tuple[Positions, list[bytes]]:
        """Which topic each row has (an index), and the topics."""
        return group_bytes(self.raw, self.topic_starts, self.topic_lengths)

    def part(self, row: int, what: str) -> bytes:
        """`body`, `topic` or `properties` of one row."""
        start = getattr(self, "property_starts" if what == "properties" else f"{what}_starts")[row]
        lengths = "property_lengths" if what == "properties" else f"{what}_lengths"
        return self.raw[start : start + getattr(self, lengths)[row]].tobytes()

    def record(self, row: int) -> memoryview:
        return self.raw.data[int(self.starts[row]) : int(self.ends[row])]


class Texts:
    """The properties of many records in one run: `text`, row n being [bounds[n], bounds[n + 1])."""

    def __init__(self, raw: Bytes, starts: Positions, lengths: Positions) -> None:
        view = raw.data
        ends = (starts + lengths).tolist()
        joined = b"".join([view[a:b] for a, b in zip(starts.tolist(), ends, strict=True)])
        self.bounds = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(lengths, out=self.bounds[1:])
        size = len(joined)
        self.text = np.frombuffer(joined + _PADDING, np.uint8)
        begins = np.zeros(size + 1, np.bool_)
        begins[1:] = self.text[:size] == VALUE_END
        begins[self.bounds] = True
        self.begins: Positions = np.flatnonzero(begins)
        self.stops = np.append(self.begins[1:], size)
        if size:
            self.stops -= (self.text[self.stops - 1] == VALUE_END) & (self.stops > self.begins)

    @property
    def has_zeros(self) -> bool:
        return bool((self.text == 0).any())

    def values(self, name: bytes) -> tuple[Positions, Positions, Positions]:
        """(rows, starts, ends) of the values of one property, empty ones left out, rows growing.

        A row that has the name twice is there twice; the last one counts.
        """
        pattern = name + b"\x01"
        here = gather(self.text, self.begins, f"V{len(pattern)}") == np.void(pattern)
        starts = self.begins[here] + len(pattern)
        ends = self.stops[here]
        some = ends > starts
        starts, ends = starts[some], ends[some]
        return np.searchsorted(self.bounds, starts, side="right") - 1, starts, ends


def group_bytes(raw: Bytes, starts: Positions, lengths: Positions) -> tuple[Positions, list[bytes]]:
    """Equal texts get equal numbers: (number of each row, the texts)."""
    ids = np.full(len(starts), -1, np.int64)
    found: list[bytes] = []
    left = np.arange(len(starts))
    while len(left) and len(found) < _GUESSES_MAX:
        first = int(starts[left[0]])
        size = int(lengths[left[0]])
        same = lengths[left] == size
        if size and same.any():
            wanted = np.void(raw[first : first + size].tobytes())
            same[same] = gather(raw, starts[left[same]], f"V{size}") == wanted
        ids[left[same]] = len(found)
        found.append(raw[first : first + size].tobytes())
        left = left[~same]
    known: dict[bytes, int] = {value: number for number, value in enumerate(found)}
    for row in left.tolist():
        value = raw[starts[row] : starts[row] + lengths[row]].tobytes()
        ids[row] = known.setdefault(value, len(known))
    return ids, list(known)


def java_hashes(
    text: Bytes, starts: Positions, ends: Positions, seeds: NDArray[Any] | int = 0
) -> NDArray[np.int32]:
    """String.hashCode of each text [start, end); `seeds` is that of what stands before it."""
    result = np.empty(len(starts), np.uint32)
    before = np.broadcast_to(np.asarray(seeds, np.int64).astype(np.uint32), result.shape)
    lengths = ends - starts
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        letters = gather(text, starts[rows], f"V{length}") if length else np.empty(len(rows), "V1")
        matrix = letters.view(np.uint8).reshape(len(rows), -1)[:, :length]
        powers = np.array([pow(31, length - 1 - n, 1 << 32) for n in range(length)], np.uint32)
        sums = matrix.astype(np.uint32) @ powers if length else np.zeros(len(rows), np.uint32)
        result[rows] = sums + before[rows] * np.uint32(pow(31, length, 1 << 32))
        for row in rows[(matrix >= _ASCII_END).any(axis=1)].tolist():
            result[row] = _hash_one(text[starts[row] : ends[row]].tobytes(), int(before[row]))
    return result.view(np.int32)


def _hash_one(data: bytes, seed: int) -> int:
    word = data.decode("utf-8", "replace")
    units = len(word.encode("utf-16-be")) // 2
    return (seed * pow(31, units, 1 << 32) + java_hash(word)) & 0xFFFFFFFF
