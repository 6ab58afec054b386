"""Stored records in Arrow, in columns, no Python object a message: record batches, and blocks of
property columns.

What a pull answers (spec/store.md §2.1, spec/remoting.md §9) becomes a `pyarrow.RecordBatch`:

    table.record_starts  where the records begin
    table.Records        the 88 to 112 bytes before the body of every record, by one gather
    variable             bodies: places in the bytes -> Arrow arrays
    properties           rows of equal names handled together, found by following what the first
                         rows look like, and written as texts in words of 8 bytes

Only the columns asked for are built: without body, properties and keys the properties are not even
looked at. Rows that need care alone take the scalar way and nothing else does: compressed bodies
(`bodies.decode_body`) and odd properties (`codec.decode_properties`), so the result is that of
`codec.decode_record`, row by row; property tests hold both equal.

Measured on one core (128 B body, six properties, blocks of 4 MB): 0.29 µs a message for all
columns, 0.11 µs for offset and body, 0.09 µs for offsets alone; 0.035 µs less where the starts are
known. It is mostly memory: each look at all records of a block takes 5 to 8 ns a message, so what
lies side by side is taken by one.

*Blocks.* The same ways lead from the units of a queue, by the places of their properties, to an
Arrow dictionary array a name, which becomes a `Column` when somebody reads that name.
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
    Repeated,
    Shape,
    even_offsets,
    hexadecimal,
    in_row_order,
    read_properties,
    shape_arrays,
    text_column,
    texts,
    variable,
)
from sluicemq.record.table import (
    Bytes,
    Positions,
    Records,
    gather,
    keep_freed_memory,
    record_starts,
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
"""Every column, in the order of the whole schema, with its Arrow type."""
EXTRA: Final[dict[str, Any]] = {
    "born_host": pa.string(),
    "store_host": pa.string(),
    "flag": pa.int32(),
    "sys_flag": pa.int32(),
    "physical_offset": pa.int64(),
    "prepared_offset": pa.int64(),
    "body_crc": pa.int32(),
    "size_bytes": pa.int32(),
}
"""What a record holds besides (spec/store.md §2.1): built only when it is asked for by name."""
BODY_ERROR: Final = "body_error"
"""A column of its own: the reason why a body cannot be decoded, null where it can."""
_TYPES: Final = COLUMNS | EXTRA | {BODY_ERROR: pa.string()}

BLOCK_ROWS_MAX: Final = 65_536
BLOCK_BYTES_MAX: Final = 64 * 1024 * 1024
BATCH_BODY_BYTES_MAX: Final = 512 * 1024 * 1024
"""Decompressed bodies of one batch: Arrow's offsets end at 2 GiB, memory of a worker earlier."""
_KEPT_BYTES: Final = 31 * 1024 * 1024
"""Just below the most that glibc adapts to."""
_POSITION_AT: Final = RECORD_HEAD.at("physical_offset")
_MILLISECONDS_MAX: Final = (1 << 63) // 1000 - 1


class _Rows(Records):
    """Good records, with their properties, found when first asked for."""

    def __init__(self, raw: Bytes, starts: Positions, base: int = 0) -> None:
        super().__init__(raw, starts, base)
        self.require_good()

    @cached_property
    def properties(self) -> Properties:
        return read_properties(self.raw, self.property_starts, self.property_lengths)


class RecordDecoder:
    """Decodes runs of records into batches of one schema.

    `columns` are names of `COLUMNS` or `EXTRA`, or `BODY_ERROR`; `promoted` maps further column
    names to property names, each a nullable string column. Rows whose tag is not in `tags` are
    left out (None: keep all); a broker filters tags by hash, so a reader has to look again
    (spec/filter.md §1). Names in `hidden` are left out of the column `properties`, and only there.

    Bodies are decompressed for `body` and `BODY_ERROR` alone. One that cannot be decoded, or grows
    beyond `body_bytes_max` bytes, is null; with `keeps_raw` it is what is stored.
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
        self._repeated = Repeated()
        keep_freed_memory(_KEPT_BYTES)

    def decode(self, data: bytes | bytearray | memoryview) -> Iterator[Any]:
        """Batches of the records in `data`, at most BLOCK_ROWS_MAX rows each; none is empty.

        The batches do not refer to `data`. Raises ProtocolError when the bytes are not whole
        records.
        """
        raw = np.frombuffer(data, np.uint8)
        starts = record_starts(raw)
        begin = 0
        while begin < len(starts):
            limit = starts[begin] + BLOCK_BYTES_MAX
            end = min(begin + BLOCK_ROWS_MAX, int(np.searchsorted(starts, limit)))
            end = max(end, begin + 1)
            yield from self._batches(_Rows(raw, starts[begin:end]))
            begin = end

    def decode_at(self, data: bytes | memoryview, starts: Positions) -> Iterator[Any]:
        """Batches of the records that begin at `starts` (ascending) of `data`, wherever they lie.

        For who knows the places already: at most BLOCK_ROWS_MAX records of BLOCK_BYTES_MAX bytes
        together, each with the size that it says. Raises ProtocolError as `decode`.
        """
        yield from self._batches(_Rows(np.frombuffer(data, np.uint8), starts))

    def _batches(self, block: _Rows) -> Iterator[Any]:
        if self._tags is not None:
            wanted = np.asarray(
                pc.is_in(text_column(block.properties, TAGS), self._tags).fill_null(False)
            )
            if not wanted.all():
                block = block.part(wanted)
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
                    yield self._batch(block.part(slice(0, row)), decoded)
                    yield from self._batches(block.part(slice(row, None)))
                    return
                decoded[row] = found
        yield self._batch(block, decoded)

    def _batch(self, block: _Rows, small: dict[int, bytes | Undecodable]) -> Any:
        arrays = [self._column(name, block, small) for name in self.columns]
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
            return variable(block.raw, starts, lengths, pa.binary())
        kept = {
            row for row, found in decoded.items()
            if self._keeps_raw and isinstance(found, Undecodable)
        }  # fmt: skip
        others = [row for row in decoded if row not in kept]
        plain = np.delete(np.arange(len(block)), others)
        bodies = variable(block.raw, starts[plain], lengths[plain], pa.binary())
        found_bodies = [None if isinstance(decoded[row], Undecodable) else decoded[row]
                        for row in others]  # fmt: skip
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
            values = texts([places for _, places in shown], rows)
            offsets = pa.Array.from_buffers(pa.int32(), rows + 1, [None, even_offsets(rows, width)])
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
    return data.decode(errors="replace").encode()


def _message_ids(block: _Rows) -> Any:
    """UNIQ_KEY, or where the message lies: store host and commit-log offset in hex digits."""
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
            parts.append(hexadecimal(np.concatenate((_bytes(hosts), _bytes(offsets)), axis=1)))
            rows.append(missing[some])
    return in_row_order(parts, rows, len(block))


def _bytes(values: NDArray[Any]) -> Bytes:
    return values.view(np.uint8).reshape(len(values), -1)


def _time(name: str, block: _Rows) -> Any:
    """Milliseconds as a timestamp; null where microseconds do not fit 64 bits."""
    times = block.number(name)
    far = (times > _MILLISECONDS_MAX) | (times < -_MILLISECONDS_MAX)
    if far.any():
        return pa.array(np.where(far, 0, times) * 1000, pa.int64(), mask=far).cast(TIMESTAMP)
    return pa.Array.from_buffers(TIMESTAMP, len(times), [None, pa.py_buffer(times * 1000)])


def _host(name: str, block: _Rows) -> Any:
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
    return pa.array(block.number(name, np.dtype(f"i{kind.bit_width // 8}")))


def _property(name: str, block: _Rows) -> Any:
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
"""Columns that need nothing but the block."""


# --- blocks of property columns

NEVER_COLUMNS: Final = frozenset((UNIQ_KEY, KEYS, CHECKSUM_NAME))
"""Properties with another value in every message: a column of them would be the log once more."""
COLUMNS_MAX: Final = 64
UNIQUE_VALUE_BYTES: Final = 16
"""Values longer than this on average are no column when most of them occur once."""
_UNIQUE_ROWS_MIN: Final = 256


class ArrowColumns(LazyColumns):
    """Columns that lie in Arrow dictionary arrays."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        def make(name: str) -> Column:
            values = Values(arrays[name].dictionary.to_pylist())
            codes = _codes(arrays[name]).astype(_code_type(len(values)), copy=False)
            return Column(codes, values)

        super().__init__(arrays.keys(), make)
        self.arrays = arrays


def _codes(array: Any) -> NDArray[Any]:
    """The codes of an Arrow dictionary array, -1 for null."""
    return np.asarray(array.indices.fill_null(-1) if array.null_count else array.indices)


def _code_type(count: int) -> Any:
    """The smallest type that numbers so many values."""
    return np.int8 if count <= 0x80 else np.int16 if count <= 0x8000 else np.int32


class LogPiece(NamedTuple):
    """The bytes of the log from the position `base` on (of one file, as a rule)."""

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
    """The block of the records of `sizes` bytes at these positions of the log, row by row.

    A row whose record lies in none of the pieces, or whose lengths do not agree, is odd. With
    `names` it has the columns of these, whatever their values are, and of no others.
    """
    rows = len(positions)
    found: list[tuple[Bytes, Positions, Positions, Positions]] = []
    for base, raw in pieces:
        mine = np.flatnonzero((positions >= base) & (positions < base + len(raw)))
        at, wanted = positions[mine] - base, sizes[mine]
        good = (wanted >= RECORD_BYTES_MIN) & (at + wanted <= len(raw))
        if not good.any():
            continue
        records = Records(raw, at if good.all() else np.where(good, at, 0), base)
        good &= records.good & (records.sizes == wanted)
        good &= records.number("physical_offset") == positions[mine]
        starts, lengths = records.property_starts, records.property_lengths
        found.append((raw, starts[good], lengths[good], mine[good]))
    raw, starts, lengths, members = _joined(found)
    properties = read_properties(raw, starts, lengths) if len(members) else None
    arrays: dict[str, Any] = {}
    excluded = frozenset[str]()
    if properties is not None and names is None:
        arrays, excluded = _arrays(properties, columns_max)
    elif properties is not None and names is not None:
        arrays = {name: text_column(properties, name).dictionary_encode() for name in names}
    odd = np.empty(0, np.int64)
    if len(members) != rows:
        odd = np.setdiff1d(np.arange(rows), members)
        for name, array in arrays.items():
            codes = np.full(rows, -1, np.int32)
            codes[members] = _codes(array)
            arrays[name] = dictionary_array(codes, array.dictionary)
    return ColumnBlock(first_offset, rows, ArrowColumns(arrays), excluded, odd)


def _joined(
    found: list[tuple[Bytes, Positions, Positions, Positions]],
) -> tuple[Bytes, Positions, Positions, Positions]:
    """The properties of several pieces in one run of bytes, in the order of the rows."""
    found = [part for part in found if len(part[3])]
    if not found:
        nothing = np.empty(0, np.int64)
        return np.empty(0, np.uint8), nothing, nothing, nothing
    if len(found) == 1:
        return found[0]
    runs, starts, filled = [], [], 0
    for raw, places, lengths, _ in found:
        _, offsets, data = variable(raw, places, lengths, pa.binary()).buffers()
        bounds = np.frombuffer(offsets, np.int32, len(places) + 1).astype(np.int64)
        size = int(bounds[-1])
        runs.append(np.frombuffer(data, np.uint8, size) if size else np.empty(0, np.uint8))
        starts.append(bounds[:-1] + filled)
        filled += size
    rows = np.concatenate([part[3] for part in found])
    order = np.argsort(rows, kind="stable")
    all_lengths = np.concatenate([part[2] for part in found])
    # `read_properties` looks a byte behind the last value, whatever it is.
    joined = np.concatenate([*runs, np.zeros(1, np.uint8)])
    return joined, np.concatenate(starts)[order], all_lengths[order], rows[order]


def _arrays(found: Properties, columns_max: int) -> tuple[dict[str, Any], frozenset[str]]:
    """An array a name, and the names that occur and are none."""
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
            arrays[name] = dictionary_array(_codes(array), array.dictionary)
    return arrays, frozenset(excluded)


def _is_unique(array: Any) -> bool:
    """Whether most values are long and occur once: nothing is gained by a column."""
    distinct, rows = len(array.dictionary), len(array) - array.null_count
    if rows < _UNIQUE_ROWS_MIN or 2 * distinct < rows:
        return False
    return bool(array.dictionary.nbytes > (UNIQUE_VALUE_BYTES + 4) * distinct)


def dictionary_array(codes: NDArray[Any], values: Any) -> Any:
    """Codes (-1: null) and values as an Arrow dictionary array of the smallest code type."""
    codes = np.ascontiguousarray(codes, _code_type(len(values)))
    present = codes >= 0
    bitmap = None
    if not present.all():
        bitmap = pa.py_buffer(np.packbits(present, bitorder="little"))
    # Not `pa.array`, which looks for pandas: a quarter of a second when it is installed.
    kind = {1: pa.int8(), 2: pa.int16(), 4: pa.int32()}[codes.itemsize]
    indices = pa.Array.from_buffers(kind, len(codes), [bitmap, pa.py_buffer(codes)])
    return pa.DictionaryArray.from_arrays(indices, values)


def merged_arrays(blocks: Sequence[ColumnBlock]) -> tuple[dict[str, Any], frozenset[str]]:
    """The columns of consecutive blocks as one array a name, and the names that are none.

    What one of the blocks leaves out is left out. All must have been made by `build_block`.
    """
    excluded = frozenset[str]().union(*(block.excluded for block in blocks))
    names = dict.fromkeys(name for block in blocks for name in block.columns)
    merged: dict[str, Any] = {}
    for name in (one for one in names if one not in excluded):
        found = [
            block.columns.arrays.get(name) if isinstance(block.columns, ArrowColumns) else None
            for block in blocks
        ]
        # The dictionaries are numbered anew, all together.
        joined = pa.concat_arrays([array.dictionary for array in found if array is not None])
        numbered = joined.dictionary_encode()
        numbers = np.asarray(numbered.indices)
        parts, at = [], 0
        for block, array in zip(blocks, found, strict=True):
            if array is None:
                parts.append(np.full(block.rows, -1, np.int32))
                continue
            # One more at the end, for the code -1.
            mine = np.append(numbers[at : at + len(array.dictionary)], -1)
            at += len(array.dictionary)
            parts.append(mine[_codes(array)])
        merged[name] = dictionary_array(np.concatenate(parts), numbered.dictionary)
    unique = {name for name, array in merged.items() if _is_unique(array)}
    kept = {name: array for name, array in merged.items() if name not in unique}
    return kept, excluded | unique
