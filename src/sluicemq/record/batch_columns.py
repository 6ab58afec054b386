"""Many messages at once, as columns (NumPy): split a client batch, and encode records.

What is between the bodies and properties of a batch has a fixed size, and the same is true in the
log:

    batch      head 20 | body | length 2 | properties | head 20 | body | …
    log        head 88 | body | topic, length | prefix, properties, suffix | head 88 | body | …

Numbers are therefore columns, which NumPy reads and writes for thousands of messages at once.
Bodies and properties are `Spans` of one buffer. Spans of nearly equal sizes are copied in order, as
if all had the size of the longest one. The surplus bytes behind a shorter one are overwritten by a
later write. Other spans become slices, which one join puts between the numbers.

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
    """Pieces of the buffer `data`. Piece i has `sizes[i]` bytes and begins at `starts[i]`.

    `starts` is in ascending order. Most methods need at least one piece.
    """

    __slots__ = ("data", "sizes", "starts")

    def __init__(self, data: bytes, starts: Positions, sizes: Positions) -> None:
        """Describe pieces of `data`. Nothing is copied."""
        self.data = data
        self.starts = starts
        self.sizes = sizes

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.starts)

    def __getitem__(self, index: int) -> bytes:
        """Return a copy of one piece."""
        start = int(self.starts[index])
        return self.data[start : start + int(self.sizes[index])]

    def slices(self) -> list[Any]:
        """Return all pieces as a list.

        A piece is a copy (bytes), or a memoryview of `data` if `data` has more than
        `_COPIED_BYTES_MAX` bytes for each piece.
        """
        data: Any = self.data
        common_size = int(self.sizes[0])
        if len(data) > len(self.starts) * _COPIED_BYTES_MAX:
            data = memoryview(data)
        elif common_size and (self.sizes == common_size).all():
            pieces: list[Any] = gather(
                _view_as_array(data), self.starts, f"V{common_size}"
            ).tolist()
            return pieces
        return slices(data, self.starts, self.starts + self.sizes)

    def all_begin_with(self, prefix: bytes) -> bool:
        """Return whether all pieces begin with `prefix`."""
        prefix_bytes = len(prefix)
        if int(self.sizes.min()) < prefix_bytes:
            return False
        return bool((self.read_rows(prefix_bytes) == np.frombuffer(prefix, np.uint8)).all())

    def join(self) -> Any:
        """Join all pieces into one buffer: a memoryview if all have the same size, else bytes."""
        width = int(self.sizes[0])
        if (self.sizes == width).all():
            return self.read_rows(width).data
        return b"".join(self.slices())

    def read_rows(self, width: int) -> Bytes:
        """Return a matrix whose row i has the `width` bytes of `data` from `starts[i]` on.

        The sizes of the pieces do not matter: a row behind a shorter piece continues with what
        follows it in `data`. Bytes behind the end of `data` are zeros.
        """
        return rows_at(_view_as_array(self.data), self.starts, width)

    def is_nearly_even(self, slack_bytes: int | None = None) -> bool:
        """Return whether the sizes are similar enough to copy all pieces with the longest size.

        They are if that copies at most twice the bytes of the pieces, plus `_SPARE_BYTES` for each.
        If `slack_bytes` is given, the longest piece must also exceed the shortest one by at most
        this number.
        """
        longest = int(self.sizes.max())
        if slack_bytes is not None and longest - int(self.sizes.min()) > slack_bytes:
            return False
        return (longest - _SPARE_BYTES) * len(self.sizes) <= 2 * int(self.sizes.sum())

    def copy_to(self, target: Bytes, target_starts: Positions) -> None:
        """Copy piece i to `target[target_starts[i]:]`, for all pieces, in order.

        Every piece is copied with the size of the longest one, which is faster. So surplus bytes
        follow a shorter piece, and the next piece overwrites them. `target` must have room for the
        surplus of the last piece.
        """
        width = int(self.sizes.max())
        if not width:
            return
        raw = _view_as_array(self.data)
        row_type = f"V{width}"

        # As the starts ascend, `width` bytes can be read from each of the first `wide_count` starts
        # without reading beyond the end of the data. The few pieces after them are copied with
        # their real sizes.
        wide_count = int(np.searchsorted(self.starts, len(raw) - width, "right"))
        wide_rows = gather(raw, self.starts[:wide_count], row_type)
        unaligned_view(target, row_type)[target_starts[:wide_count]] = wide_rows
        remaining_pieces = zip(
            self.starts[wide_count:].tolist(),
            self.sizes[wide_count:].tolist(),
            target_starts[wide_count:].tolist(),
            strict=True,
        )
        for start, size, target_start in remaining_pieces:
            target[target_start : target_start + size] = raw[start : start + size]


def slices(data: Any, starts: Positions, ends: Positions) -> list[Any]:
    """Return the list of `data[starts[i]:ends[i]]` for all i."""
    return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _view_as_array(data: bytes) -> Bytes:
    """Return a NumPy view of `data`, one byte for each element."""
    return np.frombuffer(data, np.uint8)


WIDTH_MAX: Final = 1024
"""Longer properties, in bytes, would make the table too large."""
_WORD_BYTES: Final = 8
_DISTINCT_MAX: Final = 8
"""Up to this many different values are found by comparing the words of all rows at once."""
_MASKS: Final = np.array([(1 << 8 * size) - 1 for size in range(_WORD_BYTES + 1)], np.uint64)
"""`_MASKS[n]` keeps the first n bytes of a little-endian word."""


class PropertyTable:
    """Properties of messages that all have the same names in the same order.

    - `names` are the names that every row has. `broker.epochs.columns` replaces the first one.
    - `flat` contains the encoded properties of the rows, filled up with zeros to `width` bytes
      each. More zeros follow, so that a word of 8 bytes can be read at every offset of a row.
    - `starts[index, row]` is the offset in `flat` of the name of property `index`.
    - `ends[index, row]` is the offset of the 0x02 behind its value.
    """

    def __init__(
        self, names: tuple[bytes, ...], flat: Bytes, width: int, starts: Positions, ends: Positions
    ) -> None:
        """Create a table of properties: one column for each of `names`, one row for each message.

        The row of a message has `width` bytes in `flat`. `starts[k, i]` and `ends[k, i]` are the
        bounds in `flat` of property k of message i. Nothing is checked.
        """
        self.names = names
        self.flat = flat
        self.width = width
        self._starts = starts
        self._ends = ends
        self._name_sizes = [len(name) for name in names]

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends.shape[1])

    def index_of(self, name: bytes) -> int | None:
        """Return the index of `name` in `names`; None if no property has this name.

        If several properties have this name, the index is that of the last one, because a decoder
        that fills a dict in order would keep its value.
        """
        indices = [index for index, other_name in enumerate(self.names) if other_name == name]
        return indices[-1] if indices else None

    def value_bounds(self, index: int) -> tuple[Positions, Positions]:
        """Return the offsets in `flat` where the values of property `index` begin and end.

        The result is two arrays with one entry for each row.
        """
        return self._starts[index] + (self._name_sizes[index] + 1), self._ends[index]

    def map_values(self, index: int, code_of: Callable[[bytes], int]) -> Positions:
        """Return an array with `code_of(value)` for the value of one property in each row.

        `index` is the column of the property. `code_of` must return the same code for equal values.
        It is called for each row if a value is longer than 8 bytes, else at most twice for each
        different value.
        """
        starts, ends = self.value_bounds(index)
        sizes = ends - starts
        if int(sizes.max()) > _WORD_BYTES:
            values = slices(self.flat.tobytes(), starts, ends)
            return np.array(list(map(code_of, values)), np.int64)

        # Values of up to 8 bytes are compared as words, which are filled up with zeros.
        return _map_words(gather(self.flat, starts, "<u8") & _MASKS[sizes], code_of)


def _map_words(words: NDArray[np.uint64], code_of: Callable[[bytes], int]) -> Positions:
    """Return an array with `code_of(value)` for each word.

    A word has 8 bytes: the value, filled up with zeros.
    """
    codes = np.empty(len(words), np.int64)
    has_no_code = np.ones(len(words), np.bool_)
    for _ in range(_DISTINCT_MAX):
        word = words[has_no_code.argmax()]  # that of the first row without a code
        is_equal = words == word
        codes[is_equal] = code_of(_decode_word(word))
        has_no_code &= ~is_equal
        if not has_no_code.any():
            return codes

    # There are many different words: find the code of each in a dict.
    code_by_word = {word: code_of(_decode_word(word)) for word in set(words.tolist())}
    return np.array([code_by_word[word] for word in words.tolist()], np.int64)


def _decode_word(number: int) -> bytes:
    """Return the bytes of a little-endian word without trailing zeros."""
    return int(number).to_bytes(_WORD_BYTES, "little").rstrip(b"\0")


def make_property_table(properties: Spans) -> PropertyTable | None:
    """Make a table of the encoded properties of several messages.

    Return None if

    - the messages do not all have the same names in the same order,
    - a message has no properties, or they are malformed, contain a zero byte, or do not end with
      0x02,
    - a message has more than `WIDTH_MAX` bytes of properties, or their sizes differ too much.
    """
    sizes = properties.sizes
    count = len(properties)
    width = int(sizes.max())
    if width > WIDTH_MAX or int(sizes.min()) <= 0 or not properties.is_nearly_even():
        return None

    flat = _copy_into_rows(properties, width)
    all_ends = np.flatnonzero(flat == VALUE_END)
    ends_per_row = len(all_ends) // count
    if not ends_per_row or len(all_ends) != ends_per_row * count:
        return None
    # One row for each property, and one column for each message.
    ends = np.ascontiguousarray(all_ends.reshape(count, ends_per_row).T)
    row_starts = np.arange(0, count * width, width)
    # The ends ascend. If the first and last end of a row are in this row, all of them are.
    if (ends[0] < row_starts).any() or (ends[-1] != row_starts + sizes - 1).any():
        return None
    has_zero_byte = np.count_nonzero(flat) != int(sizes.sum())
    if has_zero_byte or np.count_nonzero(flat == NAME_END) != len(all_ends):
        return None

    starts = np.concatenate((row_starts[np.newaxis], ends[:-1] + 1))
    names = _read_common_names(flat, starts, int(ends[-1, 0]))
    if names is None:
        return None
    return PropertyTable(names, flat, width, starts, ends)


def _copy_into_rows(properties: Spans, width: int) -> Bytes:
    """Copy the properties of each message into a row of `width` bytes, filled up with zeros.

    The rows are joined. More zeros follow the last one, so that words can be read there.
    """
    count = len(properties)
    flat = np.zeros((count + 1) * width + _WORD_BYTES, np.uint8)
    matrix = flat[: count * width].reshape(count, width)
    matrix[...] = properties.read_rows(width)
    shortest = int(properties.sizes.min())
    if shortest < width:  # clear what follows shorter properties in the batch
        matrix[:, shortest:] *= np.arange(shortest, width) < properties.sizes[:, np.newaxis]
    return flat


def _read_common_names(
    flat: Bytes, starts: Positions, first_row_end: int
) -> tuple[bytes, ...] | None:
    """Return the property names of the first message, or None if another message has other names.

    `starts[k, i]` is where name k of message i begins in `flat`, and `first_row_end` is the end of
    the first message's properties. `flat` must contain as many 0x01 as names. As each name is
    checked to be followed by 0x01, no value contains 0x01.
    """
    properties = flat[:first_row_end].tobytes().split(b"\2")
    if any(encoded.count(b"\1") != 1 or encoded.startswith(b"\1") for encoded in properties):
        return None
    names = [encoded.partition(b"\1")[0] for encoded in properties]

    # Compare the first 8 bytes of each name, or all of a shorter name and the 0x01 behind it.
    sizes = np.array([min(len(name) + 1, _WORD_BYTES) for name in names])
    words = gather(flat, starts, "<u8") & _MASKS[sizes][:, np.newaxis]
    if (words != words[:, :1]).any():
        return None
    for index, name in enumerate(names):
        if len(name) >= _WORD_BYTES:
            name_rows = rows_at(flat, starts[index], len(name) + 1)
            if (name_rows != name_rows[0]).any():
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
"""After a crash, properties with these bytes could not be told from bytes that were not written
(`store.writer` checks properties that contain them)."""
_unpack_size: Final = struct.Struct(">i").unpack_from

_KEPT_BYTES: Final = 8 * 1024 * 1024
keep_freed_memory(_KEPT_BYTES)  # of one batch for the next


class BatchColumns(NamedTuple):
    """Messages to be stored, as columns with one entry for each message.

    `heads` are the heads of the records, as far as they do not depend on queue and position: CRC,
    flags, birth time, hosts and body length. Other fields are zero until `encode_records` sets
    them.

    The stored properties of message i are `properties_prefix + properties[i] + properties_suffix`,
    and `property_sizes[i]` is the size of all three in bytes. Prefix and suffix are encoded
    properties that all messages get, such as those that the broker adds.
    """

    heads: NDArray[Any]
    bodies: Spans
    properties: Spans
    property_sizes: Positions
    tag_codes: Positions
    """The code of each message's tag; 0 if it has no tag."""
    properties_prefix: bytes = b""
    properties_suffix: bytes = b""
    table: PropertyTable | None = None
    """The table of `properties` if all messages have the same names, else None."""

    def count_body_sizes(self) -> dict[int, int]:
        """Return how many bodies have each size: size in bytes -> number of bodies."""
        sizes, counts = np.unique(self.heads["body_length"], return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))


class EncodedRecords(NamedTuple):
    """Records, and their units of the consume queue, as they are written.

    `pieces` are buffers that make up the records when joined. `units` are the encoded units.
    `positions` are those of the records in the log, and `end` is the position behind the last one.
    """

    pieces: list[Any]
    units: bytes
    positions: Positions
    end: int


def find_message_starts(batch: bytes) -> list[int] | None:
    """Return the offsets at which the messages of a batch begin. HOT.

    Return None if the sizes of the messages do not add up to the size of `batch`, or if one is
    smaller than an empty message. Nothing else is checked.
    """
    starts: list[int] = []
    add_start = starts.append
    start = 0
    last_start = len(batch) - BATCH_FIXED_BYTES
    while start <= last_start:
        add_start(start)
        (message_bytes,) = _unpack_size(batch, start)
        if message_bytes < BATCH_FIXED_BYTES:
            return None
        start += message_bytes
    return starts if start == len(batch) else None


def split_batch(
    batch: bytes, suffix: bytes, code_of: Callable[[bytes], int]
) -> BatchColumns | None:
    """Split a batch into columns; return None if it must be decoded message by message.

    `suffix` contains encoded properties that are added to each message. `code_of` returns the code
    of an encoded tag. The heads get flag, body length and CRC. The caller sets the fields that are
    the same for all messages: birth time, hosts and system flag.

    None is returned if there are fewer than `COUNT_MIN` or more than `BATCH_MESSAGES_MAX` messages,
    if lengths do not agree, or if a message has no properties, too long ones, or properties that
    need special care. `decode_in_steps` or `codec.decode_batch` then raises the error, if there is
    one.
    """
    (first_size,) = _unpack_size(batch, 0)
    if first_size * COUNT_MIN > 2 * len(batch):
        # If the others have about this size, there are fewer than COUNT_MIN messages.
        return None
    message_starts = find_message_starts(batch)
    if message_starts is None or not COUNT_MIN <= len(message_starts) <= BATCH_MESSAGES_MAX:
        return None

    # Read the sizes of all messages and of their parts, and check that they agree.
    starts = np.array(message_starts, np.int64)
    raw = np.frombuffer(batch, np.uint8)
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
    if int(encoded_sizes.max()) + len(suffix) > PROPERTIES_BYTES_MAX:
        return None

    properties = Spans(batch, body_ends + 2, encoded_sizes)
    table = make_property_table(properties)
    tag_codes = _read_tag_codes(properties, table, code_of)
    if tag_codes is None:
        return None

    bodies = Spans(batch, starts + BATCH_HEAD.size, body_sizes)
    heads = np.zeros(len(message_starts), HEAD)
    heads["flag"] = integers[starts + _FLAG_AT]
    heads["body_length"] = body_sizes
    heads["body_crc"] = np.array(list(map(zlib.crc32, bodies.slices())), np.int64) & CRC_MASK
    return BatchColumns(
        heads=heads,
        bodies=bodies,
        properties=properties,
        property_sizes=encoded_sizes + len(suffix),
        tag_codes=tag_codes,
        properties_suffix=suffix,
        table=table,
    )


def _read_tag_codes(
    properties: Spans, table: PropertyTable | None, code_of: Callable[[bytes], int]
) -> Positions | None:
    """Return the tag code of each message; 0 for a message without a tag.

    `table` is the table of `properties`, or None if there is none. `code_of` returns the code of an
    encoded tag. Return None if a message has, or may have, a property that changes how it is stored
    (`_NEEDS_CARE`), or if the properties cannot be examined in columns.
    """
    if table is None:
        return _search_tag_codes(properties, code_of)
    if not _NEEDS_CARE.isdisjoint(table.names):
        return None
    index = table.index_of(b"TAGS")
    if index is None:
        return np.zeros(len(table), np.int64)
    return table.map_values(index, code_of)


def has_more_messages(batch: bytes, count: int) -> bool:
    """Return whether a batch has more than `count` messages, according to their sizes.

    Return False if one of the first `count` messages has an impossible size.
    """
    start = 0
    last_start = len(batch) - BATCH_FIXED_BYTES
    for _ in range(count):
        if start > last_start:
            return False
        (message_bytes,) = _unpack_size(batch, start)
        if message_bytes < BATCH_FIXED_BYTES:
            return False
        start += message_bytes
    return start <= last_start


def decode_in_steps(
    batch: bytes, stored_of: Callable[[bytes], bytes], code_of: Callable[[bytes], int]
) -> Generator[None, None, BatchColumns]:
    """Decode any batch message by message. The generator returns its columns.

    It yields None after each STEP_MESSAGES messages and before the last two steps, so that the
    caller can do other work.

    Both functions take the encoded properties with which a message was sent: `stored_of(sent)`
    returns the properties to store, and `code_of(sent)` the tag code. Raises ProtocolError if the
    batch is malformed or has too many messages, and what `stored_of` raises.
    """
    flags: list[int] = []
    body_start_list: list[int] = []
    body_end_list: list[int] = []
    checksums: list[int] = []
    code_list: list[int] = []
    stored_properties: list[bytes] = []
    view = memoryview(batch)
    messages = enumerate(iter_batch(batch), 1)
    for message_number, (flag, body_start, body_end, message_end) in messages:
        sent_properties = batch[body_end + 2 : message_end]
        flags.append(flag)
        body_start_list.append(body_start)
        body_end_list.append(body_end)
        checksums.append(zlib.crc32(view[body_start:body_end]))
        code_list.append(code_of(sent_properties))
        stored_properties.append(stored_of(sent_properties))
        if message_number % STEP_MESSAGES == 0:
            yield

    yield
    body_starts = np.array(body_start_list, np.int64)
    bodies = Spans(batch, body_starts, np.array(body_end_list, np.int64) - body_starts)
    sizes = np.array(list(map(len, stored_properties)), np.int64)
    properties = Spans(b"".join(stored_properties), np.cumsum(sizes) - sizes, sizes)
    heads = np.zeros(len(flags), HEAD)
    heads["flag"] = flags
    heads["body_length"] = bodies.sizes
    heads["body_crc"] = np.array(checksums, np.int64) & CRC_MASK
    tag_codes = np.array(code_list, np.int64)
    yield
    return BatchColumns(heads, bodies, properties, sizes, tag_codes)


def _search_tag_codes(properties: Spans, code_of: Callable[[bytes], int]) -> Positions | None:
    """Return the tag code of each message in a batch whose property names differ.

    `code_of` returns the code of an encoded tag. All codes are 0 if no message has a tag. Return
    None, so that the batch is decoded message by message, if

    - the properties of a message do not end with 0x02, or contain 16 zero bytes in a row,
    - a message may have a property that changes how it is stored (`_NEEDS_CARE`),
    - only some messages have a tag, or a message has it as its first property.

    The whole batch is searched: bytes before a 0x01 in a body count as a name, too.
    """
    data = properties.data
    starts = properties.starts
    ends = starts + properties.sizes
    raw = _view_as_array(data)

    # Each word has the 8 bytes before a 0x01, as a big-endian number: its lowest byte is the last
    # byte of the name. Masks of the lowest bytes therefore compare the end of a name.
    separators = np.flatnonzero(raw == NAME_END)
    name_ends = separators[int(np.searchsorted(separators, 8)) :]
    last_bytes = unaligned_view(raw, ">u8")[name_ends - 8]

    if _may_need_care(last_bytes) or (raw[ends - 1] != VALUE_END).any():
        return None
    if _ZEROS in data and any(_ZEROS in encoded for encoded in properties.slices()):
        return None

    tag_starts = name_ends[last_bytes & _FIVE == _TAGS] + 1
    has_each_message_a_tag = len(tag_starts) == len(starts)
    # Names that end with TAGS, but do not follow a 0x02: the first property, or a longer name.
    has_other_tag_names = len(tag_starts) != (last_bytes & _FOUR == _TAGS_FIRST).sum()
    if has_other_tag_names or (len(tag_starts) and not has_each_message_a_tag):
        return None
    if not len(tag_starts):
        return np.zeros(len(starts), np.int64)
    if (tag_starts < starts).any() or (tag_starts >= ends).any():
        return None  # one message has two tags, and another has none

    tags = [data[start : data.find(b"\x02", start)] for start in tag_starts.tolist()]
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
"""The other names in _NEEDS_CARE as pairs: a mask of the name's size, and the name as a number."""
_TAGS: Final = np.uint64(int.from_bytes(b"\x02TAGS", "big"))
_TAGS_FIRST: Final = np.uint64(int.from_bytes(b"TAGS", "big"))
_FIVE: Final = np.uint64((1 << 40) - 1)
_FOUR: Final = np.uint64((1 << 32) - 1)


def _may_need_care(last_bytes: NDArray[np.uint64]) -> bool:
    """Return whether a name may be one of `_NEEDS_CARE`, by the last 8 bytes of all names."""
    if np.isin(last_bytes, _CARE).any():
        return True
    return any((last_bytes & mask == name).any() for mask, name in _CARE_SHORT)


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
    """Encode the records of the messages in `columns`, and their units (queue entries).

    The records follow each other: the first one has `queue_offset` and begins at `position` in the
    log. Sets the fields of `columns.heads` that depend on queue, position and time.

    - `fixed_bytes` is the size of a record of this queue without body and properties.
    - `topic_part` is what follows the body in each record: the length of the topic, and the topic.
    - `magic` is the magic number of the records, V1 or V2.
    - `stored_ms` is the store time.
    """
    heads = columns.heads
    count = len(columns.heads)
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
    units["position"] = positions
    units["size"] = sizes
    units["code"] = columns.tag_codes

    record_starts = positions - position
    fixed_parts = _build_fixed_parts(columns, topic_part)

    # All bodies may be copied with the longest size: what is copied too much is overwritten by the
    # next body, and by the parts that are copied after the bodies. Properties are copied after the
    # bodies, so their surplus must not reach the next body: it must end within the next head.
    record_pieces: list[Any]
    if columns.bodies.is_nearly_even() and columns.properties.is_nearly_even(HEAD_BYTES):
        record_pieces = [_copy_into_one_buffer(columns, record_starts, fixed_parts)]
    else:
        record_pieces = _list_pieces(columns, fixed_parts)
    return EncodedRecords(record_pieces, units.tobytes(), positions, int(ends[-1]))


def _list_pieces(columns: BatchColumns, fixed_parts: "_FixedParts") -> list[Any]:
    """Return the records as a list of bytes objects, which form the records when joined."""
    # Each message has four pieces: the suffix of the message before it and its head, its body, its
    # topic with the length of the properties, and its properties. The last suffix follows alone.
    pieces: list[Any] = [b""] * (4 * len(columns.heads) + 1)
    pieces[0:-1:4] = _list_rows(fixed_parts.before_bodies)
    # No message precedes the first one, so its row begins with a suffix too many.
    pieces[0] = pieces[0][len(columns.properties_suffix) :]
    pieces[1::4] = columns.bodies.slices()
    pieces[2::4] = _list_rows(fixed_parts.before_properties)
    pieces[3::4] = columns.properties.slices()
    pieces[-1] = columns.properties_suffix
    return pieces


class _FixedParts(NamedTuple):
    """The bytes of records that are neither bodies nor properties, as two matrices.

    Both have one row for each message, and all rows of a matrix have one size:

        before_bodies      properties_suffix of the message before | head
        before_properties  topic part | length of the properties 2 | properties_prefix

    The suffix of a message is in the row of the next one, so that both are copied in one step.
    """

    before_bodies: Bytes
    before_properties: Bytes


def _build_fixed_parts(columns: BatchColumns, topic_part: bytes) -> _FixedParts:
    """Build the parts of the records other than bodies and properties, which have fixed sizes.

    The heads of `columns` must be complete.
    """
    heads = columns.heads
    prefix = columns.properties_prefix
    suffix = columns.properties_suffix
    before_bodies = np.empty((len(heads), len(suffix) + HEAD_BYTES), np.uint8)
    before_bodies[:, : len(suffix)] = np.frombuffer(suffix, np.uint8)
    before_bodies[:, len(suffix) :] = heads.view(np.uint8).reshape(-1, HEAD_BYTES)

    length_at = len(topic_part)
    prefix_at = length_at + 2
    lengths = columns.property_sizes.astype(">i2")
    before_properties = np.empty((len(heads), prefix_at + len(prefix)), np.uint8)
    before_properties[:, :length_at] = np.frombuffer(topic_part, np.uint8)
    before_properties[:, length_at:prefix_at] = lengths.view(np.uint8).reshape(-1, 2)
    before_properties[:, prefix_at:] = np.frombuffer(prefix, np.uint8)
    return _FixedParts(before_bodies, before_properties)


def _copy_into_one_buffer(
    columns: BatchColumns, starts: Positions, fixed_parts: _FixedParts
) -> memoryview:
    """Copy all records into one buffer. Record i begins at `starts[i]` in the result.

    Bodies are copied first, then properties, then the fixed parts. Each copy overwrites the surplus
    bytes of the copies before it.
    """
    heads = columns.heads
    suffix = columns.properties_suffix
    total_bytes = int(starts[-1]) + int(heads["size"][-1])
    surplus_bytes = int(columns.bodies.sizes.max()) + int(columns.properties.sizes.max())

    # The buffer begins with the suffix too many in row 0 of `before_bodies`. It is not returned.
    # The row of message i therefore begins at starts[i], and its head behind the suffix.
    target = np.empty(len(suffix) + total_bytes + surplus_bytes, np.uint8)
    body_starts = starts + len(suffix) + HEAD_BYTES
    body_ends = body_starts + heads["body_length"]
    columns.bodies.copy_to(target, body_starts)
    columns.properties.copy_to(target, body_ends + fixed_parts.before_properties.shape[1])
    for fixed_rows, target_starts in (
        (fixed_parts.before_properties, body_ends),
        (fixed_parts.before_bodies, starts),
    ):
        row_type = f"V{fixed_rows.shape[1]}"
        unaligned_view(target, row_type)[target_starts] = fixed_rows.view(row_type)[:, 0]
    target[total_bytes : total_bytes + len(suffix)] = np.frombuffer(suffix, np.uint8)
    return target[len(suffix) : len(suffix) + total_bytes].data


def _list_rows(matrix: Bytes) -> list[bytes]:
    """Return the rows of a matrix as bytes."""
    flat = matrix.tobytes()
    row_bytes = matrix.shape[1]
    return [flat[row_start : row_start + row_bytes] for row_start in range(0, len(flat), row_bytes)]
