"""Many messages at once, as columns (NumPy): split a client batch, and encode records.

What is between the bodies and properties of a batch has a fixed size, and the same is true in the
log:

    batch      head 20 | body | length 2 | properties | head 20 | body | …
    log        head 88 | body | topic, length | before, properties, behind | head 88 | body | …

Numbers are therefore columns, which NumPy reads and writes for thousands of messages at once.
Bodies and properties are `Spans` of one buffer. Spans of nearly equal sizes are copied as if all
had the size of the longest one, in order: the surplus bytes behind a shorter one are overwritten by
the next write. Other spans become slices, which one join puts between the numbers.

Everything else that a batch must fulfil is checked for all of it: lengths agree, properties end
with 0x02, and no property has a name that needs special care. Most senders give all messages the
same names. Then it is enough to examine the first message (`PropertyTable`). Otherwise everything
that may be a name is examined:

    row 0    UNIQ_KEY 1 7F00… 2 TAGS 1 miss 2 price 1 10 2 0 0
    row 1    UNIQ_KEY 1 7F00… 2 TAGS 1 hit 2 price 1 1007 2 0
                      ^       ^      ^      ^       ^     ^     as many separators in each row

`split_batch` returns None for a batch that does not fulfil this. `decode_in_steps` decodes a large
one message by message, in steps, and `codec.decode_batch` a small one; both report what is wrong.
Tests check that all ways have equal results, byte by byte.
"""

import struct
import zlib
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.model.properties import ACTED_ON_SEND
from sluicemq.record.codec import BATCH_FIXED_BYTES, BATCH_MESSAGES_MAX, iter_batch
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
    unaligned_view,
)

_COPIED_BYTES_MAX: Final = 1024
"""Spans that are larger than this on average are returned as views."""
_SPARE_BYTES: Final = 64
"""The surplus that is copied for each span, in bytes, may be at least this much."""


class Spans:
    """Pieces of the buffer `data`, in ascending order."""

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
        """Return each piece as bytes, or as a view if copying would be expensive."""
        data: Any = self.data
        width = int(self.sizes[0])
        if len(data) > len(self.starts) * _COPIED_BYTES_MAX:
            data = memoryview(data)
        elif width and (self.sizes == width).all():
            found: list[Any] = gather(_raw(data), self.starts, f"V{width}").tolist()
            return found
        return slices(data, self.starts, self.starts + self.sizes)

    def all_begin_with(self, text: bytes) -> bool:
        """Return whether all pieces begin with `text`."""
        size = len(text)
        if int(self.sizes.min()) < size:
            return False
        return bool((self.read_rows(size) == np.frombuffer(text, np.uint8)).all())

    def join(self) -> Any:
        """Return all pieces, one behind the other, as bytes or as another buffer."""
        width = int(self.sizes[0])
        if (self.sizes == width).all():
            return self.read_rows(width).data
        return b"".join(self.slices())

    def read_rows(self, width: int) -> Bytes:
        """Return `width` bytes from the start of each piece, as the rows of a matrix.

        Bytes behind the end of `data` are zeros.
        """
        return rows_at(_raw(self.data), self.starts, width)

    def is_nearly_even(self, slack_bytes: int | None = None) -> bool:
        """Return whether the sizes differ so little that `copy_to` copies few surplus bytes.

        `slack_bytes` is the largest allowed difference between the longest and the shortest piece;
        None means no limit.
        """
        longest = int(self.sizes.max())
        if slack_bytes is not None and longest - int(self.sizes.min()) > slack_bytes:
            return False
        return (longest - _SPARE_BYTES) * len(self.sizes) <= 2 * int(self.sizes.sum())

    def copy_to(self, target: Bytes, target_starts: Positions) -> None:
        """Copy each piece to its place in `target`.

        Other bytes may be written behind a shorter piece.
        """
        width = int(self.sizes.max())
        if not width:
            return
        raw = _raw(self.data)
        # The starts ascend: this many rows of this width are inside of the data.
        count = int(np.searchsorted(self.starts, len(raw) - width, "right"))
        kind = f"V{width}"
        unaligned_view(target, kind)[target_starts[:count]] = gather(raw, self.starts[:count], kind)
        for start, size, target_start in zip(
            *(column[count:].tolist() for column in (self.starts, self.sizes, target_starts)),
            strict=True,
        ):
            target[target_start : target_start + size] = raw[start : start + size]


def slices(data: Any, starts: Positions, ends: Positions) -> list[Any]:
    """Return the bytes from each start to its end."""
    return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _raw(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


WIDTH_MAX: Final = 1024
"""Longer properties, in bytes, would make the table too large."""
_WORD_BYTES: Final = 8
_DISTINCT_MAX: Final = 8
"""Up to this many different values are searched for column by column."""
_MASKS: Final = np.array([(1 << 8 * size) - 1 for size in range(_WORD_BYTES + 1)], np.uint64)
"""The masks of words by the number of bytes that count."""


class PropertyTable:
    """Properties of messages that all have the same names in the same order.

    `names` are the names of each row; another name may be inserted. `flat` contains the rows, of
    `width` bytes each, followed by zeros, so that a word can be read at every offset.
    """

    def __init__(
        self, names: tuple[bytes, ...], flat: Bytes, width: int, starts: Positions, ends: Positions
    ) -> None:
        self.names = names
        self.flat = flat
        self.width = width
        self._starts = starts  # [index, row]: where the property begins in flat
        self._ends = ends  # [index, row]: where the 0x02 behind its value is
        self._name_sizes = [len(name) for name in names]

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends.shape[1])

    def index_of(self, name: bytes) -> int | None:
        """Return the index of a property in each row; None if there is no property with this name.

        Of several properties with one name the last one counts, as in a dict that is filled in
        order.
        """
        indices = [index for index, one in enumerate(self.names) if one == name]
        return indices[-1] if indices else None

    def value_bounds(self, index: int) -> tuple[Positions, Positions]:
        """Return where the values of a property begin and end in `flat`, for each row."""
        return self._starts[index] + (self._name_sizes[index] + 1), self._ends[index]

    def map_values(self, index: int, code_of: Callable[[bytes], int]) -> Positions:
        """Return `code_of(value)` for each row. It is called once for each different value."""
        starts, ends = self.value_bounds(index)
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
    """Return the bytes of a word without trailing zeros."""
    return int(word).to_bytes(_WORD_BYTES, "little").rstrip(b"\0")


def make_property_table(properties: Spans) -> PropertyTable | None:
    """Return the table of these properties, or None if their names differ or they are malformed."""
    sizes, count = properties.sizes, len(properties)
    width, least = int(sizes.max()), int(sizes.min())
    if width > WIDTH_MAX or least <= 0 or not properties.is_nearly_even():
        return None
    flat = np.zeros((count + 1) * width + _WORD_BYTES, np.uint8)
    matrix = flat[: count * width].reshape(count, width)
    matrix[...] = properties.read_rows(width)
    if least < width:
        matrix[:, least:] *= np.arange(least, width) < sizes[:, np.newaxis]
    found = np.flatnonzero(flat == VALUE_END)
    count_per_row = len(found) // count
    if not count_per_row or len(found) != count_per_row * count:
        return None
    ends = np.ascontiguousarray(found.reshape(count, count_per_row).T)
    rows = np.arange(0, count * width, width)
    # The ends ascend, so those between the first and last of a row belong to this row.
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
    """Return the names of the first row, or None if not all rows have these names.

    Each name ends with 0x01. There are as many 0x01 as names, so there is none elsewhere.
    """
    properties = flat[:end].tobytes().split(b"\2")
    if any(one.count(b"\1") != 1 or one.startswith(b"\1") for one in properties):
        return None
    names = [one.partition(b"\1")[0] for one in properties]
    # Compare names with the 0x01 behind them, as far as a word reaches. Longer names follow.
    sizes = np.array([min(len(name) + 1, _WORD_BYTES) for name in names])
    words = gather(flat, starts, "<u8") & _MASKS[sizes][:, np.newaxis]
    if (words != words[:, :1]).any():
        return None
    for index, name in enumerate(names):
        if len(name) >= _WORD_BYTES:
            same = rows_at(flat, starts[index], len(name) + 1)
            if (same != same[0]).any():
                return None
    return tuple(names)


HEAD: Final = RECORD_HEAD.dtype
HEAD_BYTES: Final = RECORD_HEAD.size
COUNT_MIN: Final = 160
"""With fewer messages, decoding them one by one is faster: columns take half a millisecond to
start."""
STEP_MESSAGES: Final = 500
"""The messages that `decode_in_steps` decodes in a step, which takes about a millisecond."""
_FLAG_AT: Final = BATCH_HEAD.at("flag")
_LENGTH_AT: Final = BATCH_HEAD.at("body_length")
_ZEROS: Final = bytes(16)
_unpack_size: Final = struct.Struct(">i").unpack_from

_KEPT_BYTES: Final = 8 * 1024 * 1024
keep_freed_memory(_KEPT_BYTES)  # of one batch for the next


class BatchColumns(NamedTuple):
    """Messages to be stored, as columns.

    `heads` are the heads of the records, as far as they do not depend on queue and position: CRC,
    flags, birth time, hosts and body length. Other fields are zero. The stored properties of a
    message are `before` + its entry of `properties` + `behind`. `property_sizes` are the sizes of
    all three.
    """

    heads: NDArray[Any]
    bodies: Spans
    properties: Spans
    property_sizes: Positions
    tag_codes: Positions
    before: bytes = b""
    behind: bytes = b""
    table: PropertyTable | None = None
    """The table of `properties` if all messages have the same names."""

    def count_body_sizes(self) -> dict[int, int]:
        """Return the number of bodies by size in bytes."""
        sizes, counts = np.unique(self.heads["body_length"], return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))


class EncodedRecords(NamedTuple):
    """Records and units as they are written.

    `pieces` are buffers that make up the records when joined, `positions` are those of the records
    in the log, and `end` is the position behind the last one.
    """

    pieces: list[Any]
    units: bytes
    positions: Positions
    end: int


def find_message_starts(data: bytes) -> list[int] | None:
    """Return where the messages of a batch begin; None if their sizes do not add up.

    Called for every batch: keep it cheap.
    """
    starts: list[int] = []
    add, at, last = starts.append, 0, len(data) - BATCH_FIXED_BYTES
    while at <= last:
        add(at)
        (size,) = _unpack_size(data, at)
        if size < BATCH_FIXED_BYTES:
            return None
        at += size
    return starts if at == len(data) else None


def split_batch(data: bytes, behind: bytes, code_of: Callable[[bytes], int]) -> BatchColumns | None:
    """Return the messages of a batch as columns, or None if it must be decoded message by message.

    `behind` are properties that are added to each message. `code_of` returns the code of a tag.
    Fields that the request gives for all messages are not set.
    """
    (first,) = _unpack_size(data, 0)
    if first * COUNT_MIN > 2 * len(data):  # too few messages, unless the first is very large
        return None
    listed = find_message_starts(data)
    if listed is None or not COUNT_MIN <= len(listed) <= BATCH_MESSAGES_MAX:
        return None
    starts = np.array(listed, np.int64)
    raw = np.frombuffer(data, np.uint8)
    integers = unaligned_view(raw, ">i4")
    sizes = integers[starts]
    body_sizes = integers[starts + _LENGTH_AT].astype(np.int64)
    body_ends = starts + BATCH_HEAD.size + body_sizes
    ends = starts + sizes
    if body_sizes.min() < 0 or (body_ends + 2 > ends).any():
        return None
    encoded_sizes = unaligned_view(raw, ">i2")[body_ends].astype(np.int64)
    if (body_ends + 2 + encoded_sizes != ends).any() or encoded_sizes.min() <= 0:
        return None
    if int(encoded_sizes.max()) + len(behind) > PROPERTIES_BYTES_MAX:
        return None
    properties = Spans(data, body_ends + 2, encoded_sizes)
    table = make_property_table(properties)
    if table is None:
        codes = _codes_of_names(properties, code_of)
    elif not _NEEDS_CARE.isdisjoint(table.names):
        codes = None
    else:
        index = table.index_of(b"TAGS")
        codes = (
            np.zeros(len(table), np.int64) if index is None else table.map_values(index, code_of)
        )
    if codes is None:
        return None
    bodies = Spans(data, starts + BATCH_HEAD.size, body_sizes)
    heads = np.zeros(len(listed), HEAD)
    heads["flag"] = integers[starts + _FLAG_AT]
    heads["body_length"] = body_sizes
    heads["body_crc"] = np.array(list(map(zlib.crc32, bodies.slices())), np.int64) & CRC_MASK
    return BatchColumns(
        heads, bodies, properties, encoded_sizes + len(behind), codes, b"", behind, table
    )


def has_more_messages(data: bytes, count: int) -> bool:
    """Return whether a batch has more than `count` messages, according to their sizes."""
    at, last = 0, len(data) - BATCH_FIXED_BYTES
    for _ in range(count):
        if at > last:
            return False
        (size,) = _unpack_size(data, at)
        if size < BATCH_FIXED_BYTES:
            return False
        at += size
    return at <= last


def decode_in_steps(
    data: bytes, stored_of: Callable[[bytes], bytes], code_of: Callable[[bytes], int]
) -> Generator[None, None, BatchColumns]:
    """Decode any batch message by message, in steps, and return its columns.

    It yields after each STEP_MESSAGES messages.

    `stored_of` returns the properties to store for those that a message was sent with. `code_of`
    returns the tag code of such properties. Raises ProtocolError as `codec.iter_batch` does, and
    what `stored_of` raises.
    """
    flags: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    checksums: list[int] = []
    codes: list[int] = []
    stored: list[bytes] = []
    view = memoryview(data)
    for number, (flag, start, body_end, end) in enumerate(iter_batch(data), 1):
        encoded = data[body_end + 2 : end]
        flags.append(flag)
        starts.append(start)
        ends.append(body_end)
        checksums.append(zlib.crc32(view[start:body_end]))
        codes.append(code_of(encoded))
        stored.append(stored_of(encoded))
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
    return BatchColumns(heads, bodies, properties, sizes, tag_codes)


def _codes_of_names(properties: Spans, code_of: Callable[[bytes], int]) -> Positions | None:
    """Return the tag codes of properties whose names differ, or None if they are not plain.

    The eight bytes before each 0x01 may be a name. The properties are not plain if one of them does
    not end with 0x02, has many zeros, or may have a name that needs special care. Nor are they if
    only some messages have a tag, or if a message has it as its first property.
    """
    data, starts = properties.data, properties.starts
    ends = starts + properties.sizes
    raw = _raw(data)
    found = np.flatnonzero(raw == NAME_END)
    name_ends = found[int(np.searchsorted(found, 8)) :]
    last = unaligned_view(raw, ">u8")[name_ends - 8]
    if np.isin(last, _CARE).any() or any((last & mask == name).any() for mask, name in _CARE_SHORT):
        return None
    if (raw[ends - 1] != VALUE_END).any():
        return None
    if _ZEROS in data and any(_ZEROS in encoded for encoded in properties.slices()):
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
"""Names of properties that change how a message is stored."""
_CARE: Final = np.frombuffer(
    b"".join(name[-_WORD_BYTES:] for name in _NEEDS_CARE if len(name) >= _WORD_BYTES), ">u8"
)
"""The last eight bytes of the names in _NEEDS_CARE that have eight bytes or more."""
_CARE_SHORT: Final = [
    (np.uint64((1 << 8 * len(name)) - 1), np.uint64(int.from_bytes(name, "big")))
    for name in sorted(_NEEDS_CARE)
    if len(name) < _WORD_BYTES
]
"""The other names in _NEEDS_CARE, each with a mask of its size."""
_TAGS: Final = np.uint64(int.from_bytes(b"\x02TAGS", "big"))
_TAGS_FIRST: Final = np.uint64(int.from_bytes(b"TAGS", "big"))
_FIVE: Final = np.uint64((1 << 40) - 1)
_FOUR: Final = np.uint64((1 << 32) - 1)


def encode_records(
    columns: BatchColumns,
    *,
    fixed_bytes: int,
    topic_part: bytes,
    magic: int,
    queue_id: int,
    queue_offset: int,
    position: int,
    stored_ms: int,
) -> EncodedRecords:
    """Return the records of messages, which begin at `position` in the log, and their units.

    This sets the remaining fields of `columns.heads`. `fixed_bytes` is the size of a record without
    body and properties, `topic_part` are its bytes from behind the body up to the length of the
    properties, and `stored_ms` is the store time.
    """
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
    # Bodies and properties can be copied as if each had one size if the surplus of shorter
    # properties ends before the next body, because bodies are written first.
    if columns.bodies.is_nearly_even() and columns.properties.is_nearly_even(HEAD_BYTES):
        pieces = [_spread(columns, starts, gaps, middles)]
    else:
        pieces = [b""] * (4 * count + 1)
        pieces[0:-1:4] = _rows(gaps)
        pieces[0] = pieces[0][len(columns.behind) :]
        pieces[1::4] = columns.bodies.slices()
        pieces[2::4] = _rows(middles)
        pieces[3::4] = columns.properties.slices()
        pieces[-1] = columns.behind
    return EncodedRecords(pieces, units.tobytes(), positions, int(ends[-1]))


def _between(columns: BatchColumns, topic_part: bytes) -> tuple[Bytes, Bytes]:
    """Return the bytes before each body and those between body and properties, as two matrices.

    The bytes before a body begin with `behind` of the message before.
    """
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


def _spread(columns: BatchColumns, starts: Positions, gaps: Bytes, middles: Bytes) -> memoryview:
    """Return the records in one buffer.

    Bodies are copied first, then properties, then what is between them. Each copy overwrites the
    surplus of the one before it.
    """
    heads, behind = columns.heads, columns.behind
    gap = len(behind)
    total = int(starts[-1]) + int(heads["size"][-1])
    slack = int(columns.bodies.sizes.max()) + int(columns.properties.sizes.max())
    target = np.empty(gap + total + slack, np.uint8)
    at = starts + gap
    middles_at = at + HEAD_BYTES + heads["body_length"]
    columns.bodies.copy_to(target, at + HEAD_BYTES)
    columns.properties.copy_to(target, middles_at + middles.shape[1])
    for rows, places in (middles, middles_at), (gaps, starts):
        kind = f"V{rows.shape[1]}"
        unaligned_view(target, kind)[places] = rows.view(kind)[:, 0]
    target[total : total + gap] = np.frombuffer(behind, np.uint8)
    return target[gap : gap + total].data


def _rows(matrix: Bytes) -> list[bytes]:
    """Return the rows of a matrix as bytes."""
    data, size = matrix.tobytes(), matrix.shape[1]
    return [data[at : at + size] for at in range(0, len(data), size)]
