"""Many messages at once, as columns (NumPy): a client batch taken apart, records put together.

What stands between the bodies and properties of a batch has fixed sizes, and so it has in the log:

    batch      head 20 | body | length 2 | properties | head 20 | body | …
    log        head 88 | body | topic, length | before, properties, behind | head 88 | body | …

So numbers are columns, which NumPy reads and writes a thousand at a time. Bodies and properties are
`Spans` of one buffer: those nearly as long as each other are moved as if all had the size of the
longest, in order, so that what a shorter piece brought too much lies behind it, where the next
write covers it; others are slices that one join puts in between.

What a batch needs beyond that is proven for all of it: lengths agree, properties end with U+0002,
no name stands in it that needs care. Most senders give all messages the same names, and then one
look at the first message explains all of them (`PropertyTable`); else whatever may be a name is
looked at:

    row 0    UNIQ_KEY 1 7F00… 2 TAGS 1 miss 2 price 1 10 2 0 0
    row 1    UNIQ_KEY 1 7F00… 2 TAGS 1 hit 2 price 1 1007 2 0
                      ^       ^      ^      ^       ^     ^     separators: of each row as many

A batch that is not so is not split (None). `take_apart` decodes a large one message by message, in
steps, and `codec.decode_batch` a small one; both say what is wrong. The tests hold all ways equal,
byte by byte.
"""

import struct
import zlib
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.model.properties import ACTED_ON_SEND
from sluicemq.record.codec import BATCH_FIXED_BYTES, BATCH_MESSAGES_MAX, batch_entries
from sluicemq.record.layout import (
    BATCH_HEAD,
    CRC_MASK,
    NAME_END,
    PROPERTIES_BYTES_MAX,
    RECORD_HEAD,
    VALUE_END,
)
from sluicemq.record.table import (
    UNIT_COLUMNS,
    Bytes,
    Positions,
    gather,
    keep_freed_memory,
    rows_at,
    view_of,
)

_COPIED_BYTES_MAX: Final = 1024
"""Pieces that are larger, on the average, stay views."""
_SPARE_BYTES: Final = 64


class Spans:
    """Pieces of `data`, in its order."""

    __slots__ = ("data", "sizes", "starts")

    def __init__(self, data: bytes, starts: Positions, sizes: Positions) -> None:
        self.data = data
        self.starts = starts
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> bytes:
        start = int(self.starts[index])
        return self.data[start : start + int(self.sizes[index])]

    def slices(self) -> list[Any]:
        """Each piece as bytes, or as a view where that saves copying much."""
        data: Any = self.data
        width = int(self.sizes[0])
        if len(data) > len(self.starts) * _COPIED_BYTES_MAX:
            data = memoryview(data)
        elif width and (self.sizes == width).all():
            found: list[Any] = gather(_raw(data), self.starts, f"V{width}").tolist()
            return found
        return slices(data, self.starts, self.starts + self.sizes)

    def begin_with(self, text: bytes) -> bool:
        """Do all of them?"""
        size = len(text)
        if int(self.sizes.min()) < size:
            return False
        return bool((self.windows(size) == np.frombuffer(text, np.uint8)).all())

    def joined(self) -> Any:
        """All pieces, one behind the other."""
        width = int(self.sizes[0])
        if (self.sizes == width).all():
            return self.windows(width).data
        return b"".join(self.slices())

    def windows(self, width: int) -> Bytes:
        """So many bytes from the start of each piece, one row each; zeros behind the data's end."""
        return rows_at(_raw(self.data), self.starts, width)

    def is_even(self, slack_bytes: int | None = None) -> bool:
        """Are the pieces alike in size, so that `spread` moves little in vain? `slack_bytes`: how
        much longer the longest may be than the shortest."""
        longest = int(self.sizes.max())
        if slack_bytes is not None and longest - int(self.sizes.min()) > slack_bytes:
            return False
        return (longest - _SPARE_BYTES) * len(self.sizes) <= 2 * int(self.sizes.sum())

    def spread(self, target: Bytes, places: Positions) -> None:
        """Copy each piece to its place in `target`; behind a shorter one lies something else."""
        width = int(self.sizes.max())
        if not width:
            return
        raw = _raw(self.data)
        # So many windows of this width end within the data: the starts rise.
        count = int(np.searchsorted(self.starts, len(raw) - width, "right"))
        kind = f"V{width}"
        view_of(target, kind)[places[:count]] = gather(raw, self.starts[:count], kind)
        for start, size, place in zip(
            *(column[count:].tolist() for column in (self.starts, self.sizes, places)), strict=True
        ):
            target[place : place + size] = raw[start : start + size]


def slices(data: Any, starts: Positions, ends: Positions) -> list[Any]:
    """The bytes from each start to its end."""
    return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _raw(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


WIDTH_MAX: Final = 1024
"""Longer properties make the table too large."""
_WORD_BYTES: Final = 8
_DISTINCT_MAX: Final = 8
"""So many different values are looked for column by column."""
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
    found = np.flatnonzero(flat == VALUE_END)
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
    if np.count_nonzero(flat == NAME_END) != len(found):
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
        if len(name) >= _WORD_BYTES:
            same = rows_at(flat, starts[turn], len(name) + 1)
            if (same != same[0]).any():
                return None
    return tuple(names)


HEAD: Final = RECORD_HEAD.dtype
HEAD_BYTES: Final = RECORD_HEAD.size
COUNT_MIN: Final = 160
"""For fewer messages the plain way is faster: columns take half a millisecond to begin."""
STEP_MESSAGES: Final = 500
"""The number of messages that `take_apart` decodes in a step, which takes about a millisecond."""
_FLAG_AT: Final = BATCH_HEAD.at("flag")
_LENGTH_AT: Final = BATCH_HEAD.at("body_length")
_ZEROS: Final = bytes(16)
_unpack_size: Final = struct.Struct(">i").unpack_from

_KEPT_BYTES: Final = 8 * 1024 * 1024
keep_freed_memory(_KEPT_BYTES)  # of one batch for the next

Part = tuple[int, bytes | memoryview, bytes, int]


class Columns(NamedTuple):
    """Messages on their way into the log. `heads` say what the queue and the place do not: CRC,
    flags, time and host of birth, host of the store, body length, zeros. The stored properties are
    `before` + those of the message + `behind`."""

    heads: NDArray[Any]
    bodies: Spans
    properties: Spans
    property_sizes: Positions
    tag_codes: Positions
    before: bytes = b""
    behind: bytes = b""
    table: PropertyTable | None = None
    """Of `properties`, when they are alike."""

    def parts(self) -> list[Part]:
        """The same, message by message: flag, body, stored properties, tag code."""
        before, behind = self.before, self.behind
        stored = [b"".join((before, own, behind)) for own in self.properties.slices()]
        flags, codes = self.heads["flag"].tolist(), self.tag_codes.tolist()
        return list(zip(flags, self.bodies.slices(), stored, codes, strict=True))

    def body_sizes(self) -> dict[int, int]:
        """How many bodies have which size."""
        sizes, counts = np.unique(self.heads["body_length"], return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))


class Laid(NamedTuple):
    """Records and units as they are written, and where each record begins."""

    pieces: list[Any]
    units: bytes
    positions: Positions
    end: int


def starts_of(data: bytes) -> list[int] | None:
    """Where the entries of a batch begin; None when they do not end where it does. HOT."""
    starts: list[int] = []
    add, at, last = starts.append, 0, len(data) - BATCH_FIXED_BYTES
    while at <= last:
        add(at)
        (size,) = _unpack_size(data, at)
        if size < BATCH_FIXED_BYTES:
            return None
        at += size
    return starts if at == len(data) else None


def split(data: bytes, behind: bytes, code_of: Callable[[bytes], int]) -> Columns | None:
    """A batch as columns, but for what its request says of all messages. `code_of`: of a tag."""
    (first,) = _unpack_size(data, 0)
    if first * COUNT_MIN > 2 * len(data):  # too few, if the first one is no giant
        return None
    listed = starts_of(data)
    if listed is None or not COUNT_MIN <= len(listed) <= BATCH_MESSAGES_MAX:
        return None
    starts = np.array(listed, np.int64)
    raw = np.frombuffer(data, np.uint8)
    integers = view_of(raw, ">i4")
    sizes = integers[starts]
    body_sizes = integers[starts + _LENGTH_AT].astype(np.int64)
    body_ends = starts + BATCH_HEAD.size + body_sizes
    ends = starts + sizes
    if body_sizes.min() < 0 or (body_ends + 2 > ends).any():
        return None
    own_sizes = view_of(raw, ">i2")[body_ends].astype(np.int64)
    if (body_ends + 2 + own_sizes != ends).any() or own_sizes.min() <= 0:
        return None
    if int(own_sizes.max()) + len(behind) > PROPERTIES_BYTES_MAX:
        return None
    properties = Spans(data, body_ends + 2, own_sizes)
    table = table_of(properties)
    if table is None:
        codes = _codes_of_names(properties, code_of)
    elif not _NEEDS_CARE.isdisjoint(table.names):
        codes = None
    else:
        turn = table.turn_of(b"TAGS")
        codes = np.zeros(len(table), np.int64) if turn is None else table.codes(turn, code_of)
    if codes is None:
        return None
    bodies = Spans(data, starts + BATCH_HEAD.size, body_sizes)
    heads = np.zeros(len(listed), HEAD)
    heads["flag"] = integers[starts + _FLAG_AT]
    heads["body_length"] = body_sizes
    heads["body_crc"] = np.array(list(map(zlib.crc32, bodies.slices())), np.int64) & CRC_MASK
    return Columns(heads, bodies, properties, own_sizes + len(behind), codes, b"", behind, table)


def has_more(data: bytes, count: int) -> bool:
    """Has the batch more than `count` messages, as far as their sizes are right?"""
    at, last = 0, len(data) - BATCH_FIXED_BYTES
    for _ in range(count):
        if at > last:
            return False
        (size,) = _unpack_size(data, at)
        if size < BATCH_FIXED_BYTES:
            return False
        at += size
    return at <= last


def take_apart(
    data: bytes, stored_of: Callable[[bytes], bytes], code_of: Callable[[bytes], int]
) -> Generator[None, None, Columns]:
    """Decode any batch message by message, in steps of STEP_MESSAGES messages, and return its
    columns. `stored_of` returns the properties to store for those that a message was sent with;
    `code_of`, the tag code of such properties.

    Raises ProtocolError as `codec.batch_entries`, and what `stored_of` raises.
    """
    flags: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    checksums: list[int] = []
    codes: list[int] = []
    stored: list[bytes] = []
    view = memoryview(data)
    for number, (flag, start, body_end, end) in enumerate(batch_entries(data), 1):
        own = data[body_end + 2 : end]
        flags.append(flag)
        starts.append(start)
        ends.append(body_end)
        checksums.append(zlib.crc32(view[start:body_end]))
        codes.append(code_of(own))
        stored.append(stored_of(own))
        if number % STEP_MESSAGES == 0:
            yield
    yield
    body_starts = np.array(starts, np.int64)
    bodies = Spans(data, body_starts, np.array(ends, np.int64) - body_starts)
    sizes = np.array(list(map(len, stored)), np.int64)
    properties = Spans(b"".join(stored), np.cumsum(sizes) - sizes, sizes)
    heads = np.zeros(len(flags), HEAD)
    heads["flag"] = flags
    heads["body_length"] = bodies.sizes
    heads["body_crc"] = np.array(checksums, np.int64) & CRC_MASK
    tag_codes = np.array(codes, np.int64)
    yield
    return Columns(heads, bodies, properties, sizes, tag_codes)


def _codes_of_names(properties: Spans, code_of: Callable[[bytes], int]) -> Positions | None:
    """The tag codes of properties that are not alike: what may be a name are the eight bytes before
    each U+0001. None when they are not plain: one does not end, is full of zeros, may have a name
    that needs care; or neither all of them have a tag, not as their first property, nor none."""
    data, starts = properties.data, properties.starts
    ends = starts + properties.sizes
    raw = _raw(data)
    found = np.flatnonzero(raw == NAME_END)
    name_ends = found[int(np.searchsorted(found, 8)) :]
    last = view_of(raw, ">u8")[name_ends - 8]
    if np.isin(last, _CARE).any() or any((last & mask == name).any() for mask, name in _CARE_SHORT):
        return None
    if (raw[ends - 1] != VALUE_END).any():
        return None
    if _ZEROS in data and any(_ZEROS in own for own in properties.slices()):
        return None
    at = name_ends[last & _FIVE == _TAGS] + 1
    if len(at) not in (0, len(starts)) or len(at) != (last & _FOUR == _TAGS_FIRST).sum():
        return None
    if not len(at):
        return np.zeros(len(starts), np.int64)
    if (at < starts).any() or (at >= ends).any():
        return None
    tags = [data[start : data.find(b"\x02", start)] for start in at.tolist()]
    return np.array(list(map(code_of, tags)), np.int64)


_NEEDS_CARE: Final = frozenset(name.encode() for name in ACTED_ON_SEND)
"""Names that the ordinary way has to look at."""
_CARE: Final = np.frombuffer(
    b"".join(name[-_WORD_BYTES:] for name in _NEEDS_CARE if len(name) >= _WORD_BYTES), ">u8"
)
"""The ends of those of eight bytes and more."""
_CARE_SHORT: Final = [
    (np.uint64((1 << 8 * len(name)) - 1), np.uint64(int.from_bytes(name, "big")))
    for name in sorted(_NEEDS_CARE)
    if len(name) < _WORD_BYTES
]
"""The others, each with a mask of its size."""
_TAGS: Final = np.uint64(int.from_bytes(b"\x02TAGS", "big"))
_TAGS_FIRST: Final = np.uint64(int.from_bytes(b"TAGS", "big"))
_FIVE: Final = np.uint64((1 << 40) - 1)
_FOUR: Final = np.uint64((1 << 32) - 1)


def lay_out(
    columns: Columns,
    *,
    fixed_bytes: int,
    topic_part: bytes,
    magic: int,
    queue_id: int,
    queue_offset: int,
    position: int,
    stored_ms: int,
) -> Laid:
    """The records of messages from `position` of the log on; fills in `heads`."""
    heads, count = columns.heads, len(columns.heads)
    sizes = fixed_bytes + heads["body_length"] + columns.property_sizes
    ends = position + np.cumsum(sizes)
    positions = ends - sizes
    heads["size"] = sizes
    heads["magic"] = magic
    heads["queue_id"] = queue_id
    heads["queue_offset"] = np.arange(queue_offset, queue_offset + count)
    heads["physical_offset"] = positions
    heads["store_time"] = stored_ms
    units = np.empty(count, UNIT_COLUMNS)
    units["position"], units["size"], units["code"] = positions, sizes, columns.tag_codes
    starts = positions - position
    pieces: list[Any]
    gaps, middles = _between(columns, topic_part)
    # Can bodies and properties be copied as if they had one size? What a shorter one brings too
    # much has to lie before the next body, for that is written first.
    if columns.bodies.is_even() and columns.properties.is_even(HEAD_BYTES):
        pieces = [_spread(columns, starts, gaps, middles)]
    else:
        pieces = [b""] * (4 * count + 1)
        pieces[0:-1:4] = _rows(gaps)
        pieces[0] = pieces[0][len(columns.behind) :]
        pieces[1::4] = columns.bodies.slices()
        pieces[2::4] = _rows(middles)
        pieces[3::4] = columns.properties.slices()
        pieces[-1] = columns.behind
    return Laid(pieces, units.tobytes(), positions, int(ends[-1]))


def _between(columns: Columns, topic_part: bytes) -> tuple[Bytes, Bytes]:
    """What lies before the body of each message, from the properties of the one before on, and what
    lies between its body and its properties, row by row."""
    heads, before, behind, size = columns.heads, columns.before, columns.behind, len(topic_part)
    gaps = np.empty((len(heads), len(behind) + HEAD_BYTES), np.uint8)
    gaps[:, : len(behind)] = np.frombuffer(behind, np.uint8)
    gaps[:, len(behind) :] = heads.view(np.uint8).reshape(-1, HEAD_BYTES)
    middles = np.empty((len(heads), size + 2 + len(before)), np.uint8)
    middles[:, :size] = np.frombuffer(topic_part, np.uint8)
    lengths = columns.property_sizes.astype(">i2")
    middles[:, size : size + 2] = lengths.view(np.uint8).reshape(-1, 2)
    middles[:, size + 2 :] = np.frombuffer(before, np.uint8)
    return gaps, middles


def _spread(columns: Columns, starts: Positions, gaps: Bytes, middles: Bytes) -> memoryview:
    """The records in one buffer. Bodies first, then properties, then what lies between them: each
    covers what came too much before it."""
    heads, behind = columns.heads, columns.behind
    gap = len(behind)
    total = int(starts[-1]) + int(heads["size"][-1])
    slack = int(columns.bodies.sizes.max()) + int(columns.properties.sizes.max())
    target = np.empty(gap + total + slack, np.uint8)
    at = starts + gap
    middles_at = at + HEAD_BYTES + heads["body_length"]
    columns.bodies.spread(target, at + HEAD_BYTES)
    columns.properties.spread(target, middles_at + middles.shape[1])
    for rows, places in (middles, middles_at), (gaps, starts):
        kind = f"V{rows.shape[1]}"
        view_of(target, kind)[places] = rows.view(kind)[:, 0]
    target[total : total + gap] = np.frombuffer(behind, np.uint8)
    return target[gap : gap + total].data


def _rows(matrix: Bytes) -> list[bytes]:
    data, size = matrix.tobytes(), matrix.shape[1]
    return [data[at : at + size] for at in range(0, len(data), size)]
