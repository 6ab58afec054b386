"""The properties of many messages (NumPy), when all have the same names in the same order.

Who sends many messages at once nearly always gives them the same properties, and then one look at
the first message explains all of them:

    row 0    UNIQ_KEY 1 7F00… 2 TAGS 1 miss 2 price 1 10 2 0 0
    row 1    UNIQ_KEY 1 7F00… 2 TAGS 1 hit 2 price 1 1007 2 0
                      ^       ^      ^      ^       ^     ^     separators: of each row as many

Each row is a copy of a message's properties with zeros behind it. The table is there (not None)
only when it is proven that every row has the separators 1 and 2 in turn, ends with a 2, has no zero
byte, and has the names of the first. Then a value lies between two separators.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sluicemq.record.places import Bytes, Positions, gather
from sluicemq.record.spans import Spans, slices

WIDTH_MAX: Final = 1024
"""Longer properties make the table too large."""
_WORD_BYTES: Final = 8
_DISTINCT_MAX: Final = 8
"""So many different values are looked for column by column."""
_NAME_END: Final = 1
_VALUE_END: Final = 2
_MASKS: Final = np.array([(1 << 8 * size) - 1 for size in range(_WORD_BYTES + 1)], np.uint64)


class PropertyTable:
    """`names` of all rows in order (another name may be put in); `flat` holds the rows, `width`
    bytes each, and zeros behind them, so that as many bytes can be read from any place."""

    def __init__(
        self, names: tuple[bytes, ...], flat: Bytes, width: int, starts: Positions, ends: Positions
    ) -> None:
        self.names = names
        self.flat = flat
        self.width = width
        self._starts = starts  # turn, row -> where the property begins in flat
        self._ends = ends  # and where the 2 behind its value lies
        self._name_sizes = [len(name) for name in names]

    def __len__(self) -> int:
        """How many rows."""
        return int(self._ends.shape[1])

    def turn_of(self, name: bytes) -> int | None:
        """Which property of each row has this name; None when none has it. Of two the last one
        counts, as in a map that is filled in turn."""
        turns = [turn for turn, one in enumerate(self.names) if one == name]
        return turns[-1] if turns else None

    def values(self, turn: int) -> tuple[Positions, Positions]:
        """Where the value of one property begins and ends in `flat`, row by row."""
        return self._starts[turn] + (self._name_sizes[turn] + 1), self._ends[turn]

    def codes(self, turn: int, code_of: Callable[[bytes], int]) -> Positions:
        """`code_of` each value of a property, asked once for each different value."""
        starts, ends = self.values(turn)
        sizes = ends - starts
        if int(sizes.max()) > _WORD_BYTES:
            return np.array(list(map(code_of, slices(self.flat.tobytes(), starts, ends))), np.int64)
        words = gather(self.flat, starts, "<u8") & _MASKS[sizes]
        codes = np.empty(len(words), np.int64)
        left = np.ones(len(words), np.bool_)
        for _ in range(_DISTINCT_MAX):
            word = words[left.argmax()]
            same = words == word
            codes[same] = code_of(_text(word))
            left &= ~same
            if not left.any():
                return codes
        known = {word: code_of(_text(word)) for word in set(words.tolist())}
        return np.array([known[word] for word in words.tolist()], np.int64)


def _text(word: int) -> bytes:
    return int(word).to_bytes(_WORD_BYTES, "little").rstrip(b"\0")


def table_of(properties: Spans) -> PropertyTable | None:
    """The table of these properties, None when they are not alike."""
    sizes, count = properties.sizes, len(properties)
    width, least = int(sizes.max()), int(sizes.min())
    if width > WIDTH_MAX or least <= 0 or not properties.is_even():
        return None
    flat = np.zeros((count + 1) * width + _WORD_BYTES, np.uint8)
    matrix = flat[: count * width].reshape(count, width)
    matrix[...] = properties.windows(width)
    if least < width:
        matrix[:, least:] *= np.arange(least, width) < sizes[:, np.newaxis]
    found = np.flatnonzero(flat == _VALUE_END)
    turns = len(found) // count
    if not turns or len(found) != turns * count:
        return None
    ends = np.ascontiguousarray(found.reshape(count, turns).T)
    rows = np.arange(0, count * width, width)
    # They rise, so what lies between a row's first and last one does not belong to another.
    if (ends[0] < rows).any() or (ends[-1] != rows + sizes - 1).any():
        return None
    if np.count_nonzero(flat) != int(sizes.sum()):
        return None
    if np.count_nonzero(flat == _NAME_END) != len(found):
        return None
    starts = np.concatenate((rows[np.newaxis], ends[:-1] + 1))
    names = _names(flat, starts, int(ends[-1, 0]))
    return None if names is None else PropertyTable(names, flat, width, starts, ends)


def _names(flat: Bytes, starts: Positions, end: int) -> tuple[bytes, ...] | None:
    """The names of the first row when all rows have them, each ended by a 1. As there are as many
    1 as names, none is elsewhere."""
    properties = flat[:end].tobytes().split(b"\2")
    if any(one.count(b"\1") != 1 or one.startswith(b"\1") for one in properties):
        return None
    names = [one.partition(b"\1")[0] for one in properties]
    # Compared with the 1 behind it, as far as a word reaches; longer names once more, whole.
    sizes = np.array([min(len(name) + 1, _WORD_BYTES) for name in names])
    words = gather(flat, starts, "<u8") & _MASKS[sizes][:, np.newaxis]
    if (words != words[:, :1]).any():
        return None
    for turn, name in enumerate(names):
        if len(name) >= _WORD_BYTES and not _are_equal(flat, starts[turn], len(name) + 1):
            return None
    return tuple(names)


def _are_equal(flat: Bytes, starts: Positions, size: int) -> bool:
    found: NDArray[np.uint8] = gather(flat, starts, f"V{size}").view(np.uint8).reshape(-1, size)
    return bool((found == found[0]).all())
