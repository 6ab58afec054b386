"""Convert stored records to Arrow columns without a Python object for each message.

The response to a pull (spec/store.md §2.1, spec/remoting.md §9) becomes a `pyarrow.RecordBatch`:

    table.find_record_starts     where the records begin
    table.Records                the 88 to 112 bytes before each body, by one gather
    properties.make_value_array  bodies, from positions to an Arrow array
    properties.read_properties   rows with equal names, handled together

Only requested columns are built: properties are not even examined unless a column needs them. Rows
that need special care are decoded by themselves: compressed bodies (`bodies.decode_body`) and odd
properties (`codec.decode_properties`). The result is that of `codec.decode_record` for each row;
property tests check that both are equal.

Measured on one core (bodies of 128 bytes, six properties, blocks of 4 MB): 0.29 µs a message for
all columns, 0.11 µs for offset and body, 0.09 µs for offsets only; 0.035 µs less if the starts are
known. The cost is mostly memory access: reading something of each record of a block takes 5 to 8 ns
for each message, so neighbouring fields are read together.

*Blocks.* The same functions build blocks of property columns from the units of a queue. Each
property becomes an Arrow dictionary array, which becomes a `Column` when that name is first read.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sluicemq.model.bodies import BODY_BYTES_MAX, COMPRESSED, Undecodable, decode_body
from sluicemq.model.ids import decode_host
from sluicemq.model.message import (
    KEYS,
    STORE_HOST_IPV6,
    TAGS,
    UNIQ_KEY,
)
from sluicemq.record.codec import CHECKSUM_NAME
from sluicemq.record.columns import Column, ColumnBlock, LazyColumns, Values
from sluicemq.record.layout import RECORD_BYTES_MIN, RECORD_HEAD
from sluicemq.record.properties import (
    Properties,
    RepeatedTexts,
    Shape,
    in_row_order,
    make_even_offsets,
    make_hex_array,
    make_text_array,
    make_value_array,
    read_properties,
    shape_arrays,
    text_column,
)
from sluicemq.record.table import (
    Bytes,
    Positions,
    Records,
    find_record_starts,
    gather,
    keep_freed_memory,
)

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
PROPERTIES: Final = pa.map_(pa.string(), pa.string())
COLUMNS: Final[dict[str, Any]] = {
    "topic": pa.string(),
    "broker": pa.string(),
    "queue_id": pa.int32(),
    "queue_offset": pa.int64(),
    "msg_id": pa.string(),
    "keys": pa.string(),
    "tags": pa.string(),
    "properties": PROPERTIES,
    "body": pa.binary(),
    "born_time": TIMESTAMP,
    "store_time": TIMESTAMP,
    "reconsume_times": pa.int32(),
}
"""The standard columns with their Arrow types, in the order of the schema."""
EXTRA_COLUMNS: Final[dict[str, Any]] = {
    "born_host": pa.string(),
    "store_host": pa.string(),
    "flag": pa.int32(),
    "sys_flag": pa.int32(),
    "physical_offset": pa.int64(),
    "prepared_offset": pa.int64(),
    "body_crc": pa.int32(),
    "size_bytes": pa.int32(),
}
"""Further columns (spec/store.md §2.1), which are built only if they are requested by name."""
BODY_ERROR: Final = "body_error"
"""The column with the reason why a body cannot be decoded; null if it can."""
_TYPES: Final = COLUMNS | EXTRA_COLUMNS | {BODY_ERROR: pa.string()}

BLOCK_ROWS_MAX: Final = 65_536
"""The most rows of a block or batch."""
BLOCK_BYTES_MAX: Final = 64 * 1024 * 1024
"""The most bytes of records that are decoded together."""
BATCH_BODY_BYTES_MAX: Final = 512 * 1024 * 1024
"""The most bytes of decompressed bodies in one batch. Arrow's offsets end at 2 GiB, and the memory
of a worker ends earlier."""
_KEPT_BYTES: Final = 31 * 1024 * 1024
"""The size of freed memory that is kept, just below the most that glibc adapts to."""
_POSITION_AT: Final = RECORD_HEAD.at("physical_offset")
_MILLISECONDS_MAX: Final = (1 << 63) // 1000 - 1


class _Rows(Records):
    """Valid records, with their properties, which are read when they are first needed."""

    def __init__(self, raw: Bytes, starts: Positions, base: int = 0) -> None:
        """Read the heads of the records. Raises ProtocolError if a record is not valid."""
        super().__init__(raw, starts, base)
        self.require_valid()

    @cached_property
    def properties(self) -> Properties:
        """The properties of all rows, sorted into shapes."""
        return read_properties(self.raw, self.property_starts, self.property_lengths)


class RecordDecoder:
    """Decodes records into Arrow batches with one schema.

    - `columns` are names in COLUMNS or EXTRA_COLUMNS, or BODY_ERROR.
    - `promoted` maps the names of further columns to property names. Each of them is a nullable
      string column.
    - `tags` selects rows by their tag; None keeps all rows. This is necessary because a broker
      selects by the hash of a tag (spec/filter.md §1).
    - `hidden` are property names that are left out of the column `properties`.
    - `keeps_raw` puts the stored bytes in `body` if the body cannot be decoded. Otherwise it is
      null.

    Bodies are decompressed only for `body` and BODY_ERROR. A body that cannot be decoded, or grows
    beyond `body_bytes_max` bytes, counts as undecodable.
    """

    def __init__(
        self,
        columns: Sequence[str] = tuple(COLUMNS),
        *,
        promoted: dict[str, str] | None = None,
        broker: str = "",
        tags: frozenset[str] | None = None,
        hidden: frozenset[str] = frozenset(),
        body_bytes_max: int = BODY_BYTES_MAX,
        keeps_raw: bool = False,
    ) -> None:
        self.columns = tuple(columns)
        self.promoted = dict(promoted or {})
        self.schema = pa.schema(
            [pa.field(name, _TYPES.get(name, pa.string())) for name in self.columns]
            + [pa.field(name, pa.string()) for name in self.promoted]
        )
        self._broker = broker.encode()
        self._hidden = hidden
        self._body_bytes_max = body_bytes_max
        self._keeps_raw = keeps_raw
        self._tags = None if tags is None else pa.array(sorted(tags), pa.string())
        self._repeated = RepeatedTexts()
        keep_freed_memory(_KEPT_BYTES)

    def decode(self, data: bytes | bytearray | memoryview) -> Iterator[Any]:
        """Yield batches of the records in `data`.

        Each has between 1 and BLOCK_ROWS_MAX rows. The batches do not refer to `data`. Raises
        ProtocolError if the bytes are not whole records.
        """
        raw = np.frombuffer(data, np.uint8)
        starts = find_record_starts(raw)
        begin = 0
        while begin < len(starts):
            limit = starts[begin] + BLOCK_BYTES_MAX
            end = min(begin + BLOCK_ROWS_MAX, int(np.searchsorted(starts, limit)))
            end = max(end, begin + 1)
            yield from self._batches(_Rows(raw, starts[begin:end]))
            begin = end

    def decode_at(self, data: bytes | memoryview, starts: Positions) -> Iterator[Any]:
        """Yield batches of the records that begin at `starts` in `data`, in ascending order.

        There may be at most BLOCK_ROWS_MAX records with BLOCK_BYTES_MAX bytes together. Each must
        be whole, according to its size. Raises ProtocolError if a record is not valid.
        """
        yield from self._batches(_Rows(np.frombuffer(data, np.uint8), starts))

    def _batches(self, block: _Rows) -> Iterator[Any]:
        """Yield the batches of a block: one, or several if decompressed bodies are large."""
        if self._tags is not None:
            wanted = np.asarray(
                pc.is_in(text_column(block.properties, TAGS), self._tags).fill_null(False)
            )
            if not wanted.all():
                block = block.take_rows(wanted)
        if not len(block):
            return
        decoded: dict[int, bytes | Undecodable] = {}
        if not {"body", BODY_ERROR}.isdisjoint(self.columns):
            size = 0
            for row in np.flatnonzero(block.sys_flag & COMPRESSED).tolist():
                start = block.body_starts[row]
                raw = block.raw[start : start + block.body_lengths[row]]
                found = decode_body(raw.data, int(block.sys_flag[row]), self._body_bytes_max)
                size += 0 if isinstance(found, Undecodable) else len(found)
                if size > BATCH_BODY_BYTES_MAX and row:
                    yield self._batch(block.take_rows(slice(0, row)), decoded)
                    yield from self._batches(block.take_rows(slice(row, None)))
                    return
                decoded[row] = found
        yield self._batch(block, decoded)

    def _batch(self, block: _Rows, decoded: dict[int, bytes | Undecodable]) -> Any:
        """Return one batch. `decoded` has the bodies of the rows that are compressed."""
        arrays = [self._column(name, block, decoded) for name in self.columns]
        arrays += [text_column(block.properties, name) for name in self.promoted.values()]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(self, name: str, block: _Rows, decoded: dict[int, bytes | Undecodable]) -> Any:
        if name == "properties":
            return self._properties(block)
        if name == "broker":
            return self._repeated.array((self._broker,), len(block))
        if name == "topic":
            if block.topic is not None:
                return self._repeated.array((_utf8(block.topic),), len(block))
            places = zip(block.topic_starts.tolist(), block.topic_lengths.tolist(), strict=True)
            topics = [_utf8(block.raw[at : at + size].tobytes()).decode() for at, size in places]
            return pa.array(topics, pa.string())
        if name == BODY_ERROR:
            reasons: list[str | None] = [None] * len(block)
            for row, found in decoded.items():
                reasons[row] = found.reason if isinstance(found, Undecodable) else None
            return pa.array(reasons, pa.string())
        if name == "body":
            return self._bodies(block, decoded)
        return _SIMPLE[name](block)

    def _bodies(self, block: _Rows, decoded: dict[int, bytes | Undecodable]) -> Any:
        starts, lengths = block.body_starts, block.body_lengths
        if not decoded:
            return make_value_array(block.raw, starts, lengths, pa.binary())
        raw_rows = {
            row
            for row, found in decoded.items()
            if self._keeps_raw and isinstance(found, Undecodable)
        }
        others = [row for row in decoded if row not in raw_rows]
        plain = np.delete(np.arange(len(block)), others)
        bodies = make_value_array(block.raw, starts[plain], lengths[plain], pa.binary())
        found_bodies = [
            None if isinstance(decoded[row], Undecodable) else decoded[row] for row in others
        ]
        rows = [plain, np.array(others, np.int64)]
        return in_row_order([bodies, pa.array(found_bodies, pa.binary())], rows, len(block))

    def _properties(self, block: _Rows) -> Any:
        def of_shape(shape: Shape) -> Any:
            shown = [
                pair
                for pair in zip(shape.names, shape.values, strict=True)
                if pair[0].decode() not in self._hidden
            ]
            rows, width = len(shape.starts), len(shown)
            values = make_text_array([places for _, places in shown], rows)
            offsets = pa.Array.from_buffers(
                pa.int32(), rows + 1, [None, make_even_offsets(rows, width)]
            )
            names = self._repeated.array(tuple(name for name, _ in shown), rows)
            return pa.MapArray.from_arrays(offsets, names, values)

        def of_odd(rows: list[dict[str, str]]) -> Any:
            shown = [
                [(name, value) for name, value in row.items() if name not in self._hidden]
                for row in rows
            ]
            return pa.array(shown, PROPERTIES)

        return shape_arrays(block.properties, of_shape, of_odd)


def _utf8(data: bytes) -> bytes:
    """Return text with bytes that are not UTF-8 replaced."""
    return data.decode(errors="replace").encode()


def _message_ids(block: _Rows) -> Any:
    """Return the message ids: UNIQ_KEY, or the offset message id if a message has none.

    The offset message id consists of store host and position in hexadecimal digits.
    """
    ids = text_column(block.properties, UNIQ_KEY)
    if not ids.null_count:
        return ids
    missing = np.flatnonzero(np.asarray(ids.is_null()))
    host_places = block.body_starts[missing] - 16
    wide = (block.sys_flag[missing] & STORE_HOST_IPV6) != 0
    parts, rows = [ids], [np.arange(len(block))]
    for width, some in ((8, ~wide), (20, wide)):
        if some.any():
            hosts = gather(block.raw, host_places[some] - width, f"V{width}")
            offsets = gather(block.raw, block.starts[missing[some]] + _POSITION_AT, "V8")
            parts.append(make_hex_array(np.concatenate((_bytes(hosts), _bytes(offsets)), axis=1)))
            rows.append(missing[some])
    return in_row_order(parts, rows, len(block))


def _bytes(values: NDArray[Any]) -> Bytes:
    """Return the values as a matrix of bytes."""
    return values.view(np.uint8).reshape(len(values), -1)


def _time(name: str, block: _Rows) -> Any:
    """Return a time in ms as a timestamp; null if its microseconds do not fit into 64 bits."""
    times = block.field(name)
    far = (times > _MILLISECONDS_MAX) | (times < -_MILLISECONDS_MAX)
    if far.any():
        return pa.array(np.where(far, 0, times) * 1000, pa.int64(), mask=far).cast(TIMESTAMP)
    return pa.Array.from_buffers(TIMESTAMP, len(times), [None, pa.py_buffer(times * 1000)])


def _host(name: str, block: _Rows) -> Any:
    """Return a host of each record as text."""
    places = np.empty(len(block), np.int64)
    texts: list[str] = []
    for rows, hosts in block.hosts(name):
        if not len(rows):
            continue
        words = np.ascontiguousarray(hosts).view(np.uint32).reshape(len(rows), -1)
        different, turns = np.unique(words, axis=0, return_inverse=True)
        places[rows] = len(texts) + turns.reshape(-1)
        texts += [str(decode_host(row.tobytes())) for row in different]
    return pa.array(texts, pa.string()).take(pa.array(places))


def _number(name: str, kind: Any, block: _Rows) -> Any:
    """Return an integer field of the head of each record."""
    return pa.array(block.field(name, np.dtype(f"i{kind.bit_width // 8}")))


def _property(name: str, block: _Rows) -> Any:
    """Return a property of each record as text."""
    return text_column(block.properties, name)


_SIMPLE: Final[dict[str, Callable[[_Rows], Any]]] = {
    **{
        name: partial(_number, {"size_bytes": "size"}.get(name, name), kind)
        for name, kind in _TYPES.items()
        if pa.types.is_integer(kind)
    },
    **{name: partial(_time, name) for name in ("born_time", "store_time")},
    **{name: partial(_host, name) for name in ("born_host", "store_host")},
    "keys": partial(_property, KEYS),
    "tags": partial(_property, TAGS),
    "msg_id": _message_ids,
}
"""Functions that build columns from a block alone."""


# --- blocks of property columns

NEVER_COLUMNS: Final = frozenset((UNIQ_KEY, KEYS, CHECKSUM_NAME))
"""Properties with a different value in every message. A column of them would be as large as the
values in the log."""
COLUMNS_MAX: Final = 64
"""The most columns of a block by default."""
UNIQUE_VALUE_BYTES: Final = 16
"""A property with longer values than this, on average, gets no column if most occur once."""
_UNIQUE_ROWS_MIN: Final = 256
"""A property with fewer values than this is not excluded because they occur once."""


class ArrowColumns(LazyColumns):
    """Columns that are stored as Arrow dictionary arrays, in `arrays`."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        def make(name: str) -> Column:
            values = Values(arrays[name].dictionary.to_pylist())
            codes = _codes(arrays[name]).astype(_code_type(len(values)), copy=False)
            return Column(codes, values)

        super().__init__(arrays.keys(), make)
        self.arrays = arrays


def _codes(array: Any) -> NDArray[Any]:
    """Return the codes of an Arrow dictionary array, with -1 for null."""
    return np.asarray(array.indices.fill_null(-1) if array.null_count else array.indices)


def _code_type(count: int) -> Any:
    """Return the smallest integer type for `count` codes."""
    return np.int8 if count <= 0x80 else np.int16 if count <= 0x8000 else np.int32


class LogPiece(NamedTuple):
    """Consecutive bytes of the log from position `base` on, usually of one file."""

    base: int
    data: Bytes


def build_block(
    first_offset: int,
    positions: Positions,
    sizes: Positions,
    pieces: Sequence[LogPiece],
    columns_max: int = COLUMNS_MAX,
    names: Collection[str] | None = None,
) -> ColumnBlock:
    """Return the block of the records with these positions in the log and these sizes.

    `first_offset` is the queue offset of the first row. A row is odd if its record is in none of
    `pieces`, or if its lengths do not agree. With `names`, the block has the columns of these
    names, whatever their values are, and no others. Otherwise it has at most `columns_max` columns.
    """
    rows = len(positions)
    found: list[tuple[Bytes, Positions, Positions, Positions]] = []
    for base, raw in pieces:
        members_here = np.flatnonzero((positions >= base) & (positions < base + len(raw)))
        at, wanted = positions[members_here] - base, sizes[members_here]
        good = (wanted >= RECORD_BYTES_MIN) & (at + wanted <= len(raw))
        if not good.any():
            continue
        records = Records(raw, at if good.all() else np.where(good, at, 0), base)
        good &= records.valid & (records.sizes == wanted)
        good &= records.field("physical_offset") == positions[members_here]
        starts, lengths = records.property_starts, records.property_lengths
        found.append((raw, starts[good], lengths[good], members_here[good]))
    raw, starts, lengths, members = _merge_pieces(found)
    properties = read_properties(raw, starts, lengths) if len(members) else None
    arrays: dict[str, Any] = {}
    excluded = frozenset[str]()
    if properties is not None and names is None:
        arrays, excluded = _make_column_arrays(properties, columns_max)
    elif properties is not None and names is not None:
        arrays = {name: text_column(properties, name).dictionary_encode() for name in names}
    odd = np.empty(0, np.int64)
    if len(members) != rows:
        odd = np.setdiff1d(np.arange(rows), members)
        for name, array in arrays.items():
            codes = np.full(rows, -1, np.int32)
            codes[members] = _codes(array)
            arrays[name] = make_dictionary_array(codes, array.dictionary)
    return ColumnBlock(first_offset, rows, ArrowColumns(arrays), excluded, odd)


def _merge_pieces(
    found: list[tuple[Bytes, Positions, Positions, Positions]],
) -> tuple[Bytes, Positions, Positions, Positions]:
    """Merge the property bytes of several pieces into one buffer.

    Return (buffer, starts, lengths, rows), sorted by row.
    """
    found = [part for part in found if len(part[3])]
    if not found:
        nothing = np.empty(0, np.int64)
        return np.empty(0, np.uint8), nothing, nothing, nothing
    if len(found) == 1:
        return found[0]
    runs, starts, filled = [], [], 0
    for raw, places, lengths, _ in found:
        _, offsets, data = make_value_array(raw, places, lengths, pa.binary()).buffers()
        bounds = np.frombuffer(offsets, np.int32, len(places) + 1).astype(np.int64)
        size = int(bounds[-1])
        runs.append(np.frombuffer(data, np.uint8, size) if size else np.empty(0, np.uint8))
        starts.append(bounds[:-1] + filled)
        filled += size
    rows = np.concatenate([part[3] for part in found])
    order = np.argsort(rows, kind="stable")
    all_lengths = np.concatenate([part[2] for part in found])
    # `read_properties` reads one byte behind the last value, whatever it is.
    joined = np.concatenate([*runs, np.zeros(1, np.uint8)])
    return joined, np.concatenate(starts)[order], all_lengths[order], rows[order]


def _make_column_arrays(
    found: Properties, columns_max: int
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return an array for each name that gets a column, and the names that occur and get none."""
    counts: Counter[str] = Counter()
    for shape in found.shapes:
        for raw_name in shape.names:
            counts[raw_name.decode()] += len(shape.starts)
    for row in found.odd:
        counts.update(row.keys())
    excluded = {name for name in counts if name in NEVER_COLUMNS}
    arrays: dict[str, Any] = {}
    for name, _ in counts.most_common():
        if name in excluded:
            continue
        if len(arrays) == columns_max:
            excluded.add(name)
            continue
        array = text_column(found, name).dictionary_encode()
        if _is_unique(array):
            excluded.add(name)
        else:
            arrays[name] = make_dictionary_array(_codes(array), array.dictionary)
    return arrays, frozenset(excluded)


def _is_unique(array: Any) -> bool:
    """Return whether most values are long and occur once, so that a column would be of no use."""
    distinct, rows = len(array.dictionary), len(array) - array.null_count
    if rows < _UNIQUE_ROWS_MIN or 2 * distinct < rows:
        return False
    return bool(array.dictionary.nbytes > (UNIQUE_VALUE_BYTES + 4) * distinct)


def make_dictionary_array(codes: NDArray[Any], values: Any) -> Any:
    """Return an Arrow dictionary array of the smallest code type. A code of -1 is null."""
    codes = np.ascontiguousarray(codes, _code_type(len(values)))
    present = codes >= 0
    bitmap = None
    if not present.all():
        bitmap = pa.py_buffer(np.packbits(present, bitorder="little"))
    # `pa.array` would load pandas if it is installed, which takes a quarter of a second.
    kind = {1: pa.int8(), 2: pa.int16(), 4: pa.int32()}[codes.itemsize]
    indices = pa.Array.from_buffers(kind, len(codes), [bitmap, pa.py_buffer(codes)])
    return pa.DictionaryArray.from_arrays(indices, values)


def merge_block_arrays(blocks: Sequence[ColumnBlock]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the columns of consecutive blocks as arrays by name, and the excluded names.

    A name that one of the blocks excludes is excluded. All blocks must come from `build_block`.
    """
    excluded = frozenset[str]().union(*(block.excluded for block in blocks))
    names = dict.fromkeys(name for block in blocks for name in block.columns)
    merged: dict[str, Any] = {}
    for name in (one for one in names if one not in excluded):
        found = [
            block.columns.arrays.get(name) if isinstance(block.columns, ArrowColumns) else None
            for block in blocks
        ]
        # The values of all dictionaries get new, common numbers.
        joined = pa.concat_arrays([array.dictionary for array in found if array is not None])
        numbered = joined.dictionary_encode()
        numbers = np.asarray(numbered.indices)
        parts, at = [], 0
        for block, array in zip(blocks, found, strict=True):
            if array is None:
                parts.append(np.full(block.rows, -1, np.int32))
                continue
            # The last entry is for the code -1.
            members_here = np.append(numbers[at : at + len(array.dictionary)], -1)
            at += len(array.dictionary)
            parts.append(members_here[_codes(array)])
        merged[name] = make_dictionary_array(np.concatenate(parts), numbered.dictionary)
    unique = {name for name, array in merged.items() if _is_unique(array)}
    kept = {name: array for name, array in merged.items() if name not in unique}
    return kept, excluded | unique
