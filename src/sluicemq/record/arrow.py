"""Convert stored records to Arrow columns without a Python object for each message.

The response to a pull (spec/store.md §2.1, spec/remoting.md §9) becomes a `pyarrow.RecordBatch`:

    table.find_record_starts         where the records begin
    table.Records                    the 88 to 112 bytes before each body, by one gather
    property_columns                 bodies and properties, by the compiled engine or the reference

Only requested columns are built: properties are not even examined unless a column needs them. Rows
that need special care are decoded by themselves: compressed bodies (`bodies.decode_body`) and odd
properties (`codec.decode_properties`). The result is that of `codec.decode_record` for each row;
property tests check that both are equal. The cost is mostly
memory access: reading something of each record of a block takes 5 to 8 ns for each message, so
neighbouring fields are read together.

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
    in_row_order,
    join_values,
    make_hex_array,
    read_properties,
    text_column,
)
from sluicemq.record.property_columns import (
    PROPERTIES,
    PropertyRequest,
    RequestedProperties,
    make_binary_column,
    read_property_columns,
)
from sluicemq.record.table import (
    Bytes,
    Mask,
    Positions,
    Records,
    find_record_starts,
    gather,
    keep_freed_memory,
)

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
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
    """Valid records, with their properties, which are read when they are first needed.

    Creating it raises ProtocolError if a record is not valid.
    """

    def __init__(
        self, raw: Bytes, starts: Positions, request: PropertyRequest, repeated: RepeatedTexts
    ) -> None:
        """Read the heads of the records that begin at `starts` in `raw`.

        `request` are the columns of properties that may be read. `repeated` is a cache of texts
        that blocks of one topic have in common.
        """
        super().__init__(raw, starts)
        self._request = request
        self._repeated = repeated
        self.require_valid()

    @cached_property
    def properties(self) -> RequestedProperties:
        """The requested columns of the properties."""
        return read_property_columns(
            self.raw, self.property_starts, self.property_lengths, self._request, self._repeated
        )

    def take_rows(self, rows: slice | Mask) -> "_Rows":
        """Return the records that `rows`, a slice or a mask, selects; reads their heads again."""
        return _Rows(self.raw, self.starts[rows], self._request, self._repeated)


class RecordDecoder:
    """Decodes records into Arrow batches with one schema.

    - `columns` are the names of the columns: names in COLUMNS or EXTRA_COLUMNS, or BODY_ERROR.
    - `promoted` maps the names of further columns to property names. Each of these columns contains
      the values of one property: strings, null if a message lacks it.
    - `broker` is the value of the column `broker`.
    - `tags` keeps only rows with one of these tags; None keeps all rows. This is necessary because
      a broker selects by the hash of a tag (spec/filter.md §1).
    - `hidden` are property names that are left out of the column `properties`.
    - `body_bytes_max` is the largest size of a decompressed body. A body that grows beyond it
      counts as undecodable.
    - `keeps_raw` says what `body` contains if a body is undecodable: the stored bytes if true, else
      null.

    Bodies are decompressed only for the columns `body` and BODY_ERROR.
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
        """Prepare the schema of the batches, which have the columns `columns` and `promoted`.

        - `promoted` maps the names of further columns to names of properties.
        - `broker` is the value of the column `broker`.
        - Rows without one of `tags` are left out; None keeps all rows.
        - `hidden` are names of properties that the column `properties` leaves out.
        - A body that has more than `body_bytes_max` bytes when decompressed is undecodable.
        - An undecodable body is null, or its stored bytes if `keeps_raw`.
        """
        self.columns = tuple(columns)
        self.promoted = dict(promoted or {})
        schema_fields = [pa.field(name, _TYPES.get(name, pa.string())) for name in self.columns]
        schema_fields += [pa.field(name, pa.string()) for name in self.promoted]
        self.schema = pa.schema(schema_fields)
        self._broker = broker.encode()
        self._hidden = hidden
        self._body_bytes_max = body_bytes_max
        self._keeps_raw = keeps_raw
        # The wanted tags as an Arrow array, or None if all rows are kept.
        self._tags = None if tags is None else pa.array(sorted(tags), pa.string())
        self._repeated = RepeatedTexts()
        self._request = self._make_request()
        keep_freed_memory(_KEPT_BYTES)

    def _make_request(self) -> PropertyRequest:
        """Return which columns of properties the batches need."""
        names = [_PROPERTY_OF_COLUMN[name] for name in self.columns if name in _PROPERTY_OF_COLUMN]
        if self._tags is not None:
            names.append(TAGS)
        return PropertyRequest(
            (*names, *self.promoted.values()), "properties" in self.columns, self._hidden
        )

    def decode(self, data: bytes | bytearray | memoryview) -> Iterator[Any]:
        """Yield `pyarrow.RecordBatch` objects with the records in `data`, in order.

        Each has between 1 and BLOCK_ROWS_MAX rows. Nothing is yielded for records that `tags`
        excludes. The batches do not refer to `data`. Raises ProtocolError if the bytes are not
        whole records.
        """
        raw = np.frombuffer(data, np.uint8)
        starts = find_record_starts(raw)
        first_row = 0
        while first_row < len(starts):
            # A block has at least one record, even if that is larger than BLOCK_BYTES_MAX.
            end_by_bytes = int(np.searchsorted(starts, starts[first_row] + BLOCK_BYTES_MAX))
            end_row = max(min(first_row + BLOCK_ROWS_MAX, end_by_bytes), first_row + 1)
            yield from self._decode_block(
                _Rows(raw, starts[first_row:end_row], self._request, self._repeated)
            )
            first_row = end_row

    def decode_at(self, data: bytes | memoryview, starts: Positions) -> Iterator[Any]:
        """Yield batches of the records that begin at `starts` in `data`, in ascending order.

        The batches have the same form as the batches of `decode`. There may be at most
        BLOCK_ROWS_MAX records with BLOCK_BYTES_MAX bytes together. Each record must be whole,
        according to its size. Raises ProtocolError if a record is not valid.
        """
        yield from self._decode_block(
            _Rows(np.frombuffer(data, np.uint8), starts, self._request, self._repeated)
        )

    def _decode_block(self, block: _Rows) -> Iterator[Any]:
        """Yield the batches of a block of records.

        There is no batch if `tags` excludes all rows. There are several if the decompressed bodies
        have more than BATCH_BODY_BYTES_MAX bytes together.
        """
        if self._tags is not None:
            tags = block.properties.make_text_column(TAGS)
            is_wanted = np.asarray(pc.is_in(tags, self._tags).fill_null(False))
            if not is_wanted.all():
                block = block.take_rows(is_wanted)
        if not len(block):
            return

        # Decode compressed bodies. If they become too large, decode the remaining rows by another
        # call.
        decoded: dict[int, bytes | Undecodable] = {}
        if not {"body", BODY_ERROR}.isdisjoint(self.columns):
            decoded_bytes = 0
            for row in np.flatnonzero(block.sys_flag & COMPRESSED).tolist():
                start = block.body_starts[row]
                stored_body = block.raw[start : start + block.body_lengths[row]]
                body = decode_body(stored_body.data, int(block.sys_flag[row]), self._body_bytes_max)
                if not isinstance(body, Undecodable):
                    decoded_bytes += len(body)
                if decoded_bytes > BATCH_BODY_BYTES_MAX and row:
                    yield self._make_batch(block.take_rows(slice(0, row)), decoded)
                    yield from self._decode_block(block.take_rows(slice(row, None)))
                    return
                decoded[row] = body
        yield self._make_batch(block, decoded)

    def _make_batch(self, block: _Rows, decoded: dict[int, bytes | Undecodable]) -> Any:
        """Return all rows of `block` as one batch.

        `decoded` maps the index of each compressed row to its decoded body. It may be empty if
        neither `body` nor BODY_ERROR is requested.
        """
        arrays = [self._make_column(name, block, decoded) for name in self.columns]
        arrays += [block.properties.make_text_column(name) for name in self.promoted.values()]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _make_column(self, name: str, block: _Rows, decoded: dict[int, bytes | Undecodable]) -> Any:
        """Return the Arrow array of the column `name`.

        `decoded` has the decoded body, or why it could not be decoded, of each row whose stored
        body is compressed.
        """
        if name == "properties":
            return block.properties.make_map_column()
        if name == "broker":
            return self._repeated.array((self._broker,), len(block))
        if name == "topic":
            return self._make_topic_column(block)
        if name == BODY_ERROR:
            reasons: list[str | None] = [None] * len(block)
            for row, body in decoded.items():
                if isinstance(body, Undecodable):
                    reasons[row] = body.reason
            return pa.array(reasons, pa.string())
        if name == "body":
            return self._make_body_column(block, decoded)
        return _COLUMN_BUILDERS[name](block)

    def _make_topic_column(self, block: _Rows) -> Any:
        """Return the topics of the records. Bytes that are not UTF-8 are replaced."""
        if block.topic is not None:
            return self._repeated.array((_replace_invalid_utf8(block.topic),), len(block))
        bounds = zip(block.topic_starts.tolist(), block.topic_lengths.tolist(), strict=True)
        encoded = [block.raw[start : start + size].tobytes() for start, size in bounds]
        return pa.array([topic.decode(errors="replace") for topic in encoded], pa.string())

    def _make_body_column(self, block: _Rows, decoded: dict[int, bytes | Undecodable]) -> Any:
        """Return the bodies of the records as an Arrow array.

        `decoded` has the decoded bodies by row. Other rows get their stored bytes. A row whose body
        cannot be decoded is null, or its stored bytes if `keeps_raw` was set.
        """
        starts = block.body_starts
        lengths = block.body_lengths
        if not decoded:
            return make_binary_column(block.raw, starts, lengths)

        # The rows that do not have their stored bytes, and what they have.
        decoded_rows: list[int] = []
        decoded_bodies: list[bytes | None] = []
        for row, body in decoded.items():
            if not isinstance(body, Undecodable):
                decoded_rows.append(row)
                decoded_bodies.append(body)
            elif not self._keeps_raw:
                decoded_rows.append(row)
                decoded_bodies.append(None)

        stored_rows = np.delete(np.arange(len(block)), decoded_rows)
        stored_bodies = make_binary_column(block.raw, starts[stored_rows], lengths[stored_rows])
        arrays = [stored_bodies, pa.array(decoded_bodies, pa.binary())]
        rows_of_arrays = [stored_rows, np.array(decoded_rows, np.int64)]
        return in_row_order(arrays, rows_of_arrays, len(block))


def _replace_invalid_utf8(encoded_text: bytes) -> bytes:
    """Return encoded text in which bytes that are not UTF-8 are replaced by U+FFFD."""
    return encoded_text.decode(errors="replace").encode()


def _make_message_id_column(block: _Rows) -> Any:
    """Return the message ids: UNIQ_KEY, or for a message without it the offset message id.

    The offset message id consists of the store host and the position in the log, in hexadecimal.
    """
    ids = block.properties.make_text_column(UNIQ_KEY)
    if not ids.null_count:
        return ids
    missing = np.flatnonzero(np.asarray(ids.is_null()))
    # 16 bytes follow the store host in the head: number of retries 4, prepared offset 8, body
    # length 4. The host has 8 or 20 bytes, with its port.
    host_ends = block.body_starts[missing] - 16
    is_ipv6 = (block.sys_flag[missing] & STORE_HOST_IPV6) != 0
    id_arrays = [ids]
    rows_of_arrays = [np.arange(len(block))]
    for host_bytes, has_host_bytes in ((8, ~is_ipv6), (20, is_ipv6)):
        if has_host_bytes.any():
            hosts = gather(block.raw, host_ends[has_host_bytes] - host_bytes, f"V{host_bytes}")
            record_starts = block.starts[missing[has_host_bytes]]
            positions = gather(block.raw, record_starts + _POSITION_AT, "V8")
            id_bytes = np.concatenate(
                (_view_as_byte_matrix(hosts), _view_as_byte_matrix(positions)), axis=1
            )
            id_arrays.append(make_hex_array(id_bytes))
            rows_of_arrays.append(missing[has_host_bytes])
    return in_row_order(id_arrays, rows_of_arrays, len(block))


def _view_as_byte_matrix(values: NDArray[Any]) -> Bytes:
    """Return a matrix whose row i contains the bytes of `values[i]`."""
    return values.view(np.uint8).reshape(len(values), -1)


def _make_time_column(name: str, block: _Rows) -> Any:
    """Return a time field of the records as a timestamp column in microseconds.

    The field `name` contains milliseconds. A time is null if its microseconds do not fit into 64
    bits.
    """
    times = block.field(name)
    too_far = (times > _MILLISECONDS_MAX) | (times < -_MILLISECONDS_MAX)
    if too_far.any():
        microseconds = np.where(too_far, 0, times) * 1000
        return pa.array(microseconds, pa.int64(), mask=too_far).cast(TIMESTAMP)
    return pa.Array.from_buffers(TIMESTAMP, len(times), [None, pa.py_buffer(times * 1000)])


def _make_host_column(name: str, block: _Rows) -> Any:
    """Return a host field of the records as a string column. Decode each different host once."""
    indices = np.empty(len(block), np.int64)
    host_texts: list[str] = []
    for rows, hosts in block.hosts(name):
        if not len(rows):
            continue
        host_words = np.ascontiguousarray(hosts).view(np.uint32).reshape(len(rows), -1)
        distinct_hosts, codes = np.unique(host_words, axis=0, return_inverse=True)
        indices[rows] = len(host_texts) + codes.reshape(-1)
        host_texts += [str(decode_host(row.tobytes())) for row in distinct_hosts]
    return pa.array(host_texts, pa.string()).take(pa.array(indices))


def _make_number_column(name: str, arrow_type: Any, block: _Rows) -> Any:
    """Return an integer field of the heads as a column of the Arrow type `arrow_type`."""
    return pa.array(block.field(name, np.dtype(f"i{arrow_type.bit_width // 8}")))


def _make_property_column(name: str, block: _Rows) -> Any:
    """Return the values of a property as a string column, null if a message lacks it."""
    return block.properties.make_text_column(name)


_PROPERTY_OF_COLUMN: Final = {"keys": KEYS, "tags": TAGS, "msg_id": UNIQ_KEY}
"""The properties from which standard columns are made."""
_COLUMN_BUILDERS: Final[dict[str, Callable[[_Rows], Any]]] = {
    **{
        name: partial(_make_number_column, {"size_bytes": "size"}.get(name, name), kind)
        for name, kind in _TYPES.items()
        if pa.types.is_integer(kind)
    },
    **{name: partial(_make_time_column, name) for name in ("born_time", "store_time")},
    **{name: partial(_make_host_column, name) for name in ("born_host", "store_host")},
    "keys": partial(_make_property_column, KEYS),
    "tags": partial(_make_property_column, TAGS),
    "msg_id": _make_message_id_column,
}
"""The functions that build a column from a block alone, by the name of the column."""


# --- blocks of property columns

NEVER_COLUMNS: Final = frozenset((UNIQ_KEY, KEYS, CHECKSUM_NAME))
"""Properties with a different value in every message. A column of them would be as large as the
values in the log."""
COLUMNS_MAX: Final = 64
"""The most columns of a block by default."""
UNIQUE_VALUE_BYTES: Final = 16
"""A property whose values are longer than this on average gets no column if most of its values
occur once."""
_UNIQUE_ROWS_MIN: Final = 256
"""A property that fewer rows have than this is never excluded for its unique values."""


class ArrowColumns(LazyColumns):
    """Columns that are stored as Arrow dictionary arrays.

    `arrays` contains them by name. Each is converted to a `Column` when it is first read.
    """

    __slots__ = ("arrays",)

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Create columns from Arrow dictionary arrays, given by name.

        Each is converted to a `Column` when it is first read.
        """

        def make(name: str) -> Column:
            values = Values(arrays[name].dictionary.to_pylist())
            codes = _get_codes(arrays[name]).astype(_choose_code_type(len(values)), copy=False)
            return Column(codes, values)

        super().__init__(arrays.keys(), make)
        self.arrays = arrays


def _get_codes(array: Any) -> NDArray[Any]:
    """Return the indices of an Arrow dictionary array as a NumPy array, with -1 for null."""
    codes = array.indices
    if array.null_count:
        codes = codes.fill_null(-1)
    return np.asarray(codes)


def _choose_code_type(count: int) -> Any:
    """Return the smallest signed integer type for the codes -1 to `count` - 1."""
    if count <= 0x80:
        return np.int8
    if count <= 0x8000:
        return np.int16
    return np.int32


class LogPiece(NamedTuple):
    """Consecutive bytes of the log from position `base` on, usually of one file."""

    base: int
    data: Bytes


class _PropertyRows(NamedTuple):
    """Where the encoded properties of some rows of a block are.

    Those of row `rows[i]` have `lengths[i]` bytes and begin at `starts[i]` in `raw`.
    """

    raw: Bytes
    starts: Positions
    lengths: Positions
    rows: Positions


def build_block(
    first_offset: int,
    positions: Positions,
    sizes: Positions,
    pieces: Sequence[LogPiece],
    columns_max: int = COLUMNS_MAX,
    names: Collection[str] | None = None,
) -> ColumnBlock:
    """Make a block of property columns from the records at these positions of the log.

    Row i is the record of `sizes[i]` bytes at `positions[i]`. `first_offset` is the queue offset of
    the first row, and `pieces` are the files of the log. A row is odd, and its columns are null, if
    its record is in none of `pieces`, or has another size or position, or if its lengths do not
    agree.

    If `names` is given, the block has exactly the columns of these properties. Otherwise it has the
    properties that most rows have, at most `columns_max`. Properties with mostly unique long values
    are left out; their names are in `excluded` of the block.
    """
    row_count = len(positions)
    located = _merge_pieces([_locate_properties(piece, positions, sizes) for piece in pieces])

    arrays: dict[str, Any] = {}
    excluded = frozenset[str]()
    if len(located.rows):
        properties = read_properties(located.raw, located.starts, located.lengths)
        if names is None:
            arrays, excluded = _make_column_arrays(properties, columns_max)
        else:
            arrays = {name: text_column(properties, name).dictionary_encode() for name in names}

    odd_rows = np.empty(0, np.int64)
    if len(located.rows) != row_count:
        odd_rows = np.setdiff1d(np.arange(row_count), located.rows)
        arrays = {
            name: _insert_null_rows(array, located.rows, row_count)
            for name, array in arrays.items()
        }
    return ColumnBlock(first_offset, row_count, ArrowColumns(arrays), excluded, odd_rows)


def _insert_null_rows(array: Any, rows: Positions, row_count: int) -> Any:
    """Return a dictionary array of `row_count` rows with the values of `array` in `rows`.

    Other rows are null, which is the code -1.
    """
    codes = np.full(row_count, -1, np.int32)
    codes[rows] = _get_codes(array)
    return make_dictionary_array(codes, array.dictionary)


def _locate_properties(piece: LogPiece, positions: Positions, sizes: Positions) -> _PropertyRows:
    """Find the properties of the records that are valid and in `piece`.

    Row i of the block is the record of `sizes[i]` bytes at `positions[i]` of the log. A record is
    valid if it is whole, its lengths agree, and its head has the same position and size.
    """
    base, raw = piece
    rows = np.flatnonzero((positions >= base) & (positions < base + len(raw)))
    starts = positions[rows] - base
    record_sizes = sizes[rows]
    is_valid = (record_sizes >= RECORD_BYTES_MIN) & (starts + record_sizes <= len(raw))
    if not is_valid.any():
        no_rows = np.empty(0, np.int64)
        return _PropertyRows(raw, no_rows, no_rows, no_rows)
    # `Records` reads a whole head at each start. The starts of invalid rows are replaced by 0, as
    # there are enough bytes at 0. The rows stay invalid whatever these bytes are.
    readable_starts = starts
    if not is_valid.all():
        readable_starts = np.where(is_valid, starts, 0)
    records = Records(raw, readable_starts, base)
    is_valid &= records.valid & (records.sizes == record_sizes)
    is_valid &= records.field("physical_offset") == positions[rows]
    return _PropertyRows(
        raw,
        records.property_starts[is_valid],
        records.property_lengths[is_valid],
        rows[is_valid],
    )


def _merge_pieces(located_pieces: list[_PropertyRows]) -> _PropertyRows:
    """Join the property bytes of several pieces into one buffer, sorted by row.

    If only one piece has rows, it is returned as it is.
    """
    located_pieces = [located for located in located_pieces if len(located.rows)]
    if not located_pieces:
        no_rows = np.empty(0, np.int64)
        return _PropertyRows(np.empty(0, np.uint8), no_rows, no_rows, no_rows)
    if len(located_pieces) == 1:
        return located_pieces[0]

    # Copy the properties of all pieces behind each other.
    buffers = []
    starts = []
    buffered_bytes = 0
    for located in located_pieces:
        joined, joined_starts = join_values(located.raw, located.starts, located.lengths)
        buffers.append(joined)
        starts.append(joined_starts + buffered_bytes)
        buffered_bytes += len(joined)

    # Sort them by row.
    rows = np.concatenate([located.rows for located in located_pieces])
    order = np.argsort(rows, kind="stable")
    lengths = np.concatenate([located.lengths for located in located_pieces])
    # `read_properties` reads one byte behind the last value, whatever it is.
    raw = np.concatenate([*buffers, np.zeros(1, np.uint8)])
    return _PropertyRows(raw, np.concatenate(starts)[order], lengths[order], rows[order])


def _make_column_arrays(
    properties: Properties, columns_max: int
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return (columns by name, names that occur but get no column).

    A property gets no column if it is in NEVER_COLUMNS, if most of its values are long and unique,
    or if `columns_max` properties that occur in more rows have a column already.
    """
    row_counts: Counter[str] = Counter()  # the number of rows that have each name
    for shape in properties.shapes:
        for encoded_name in shape.names:
            row_counts[encoded_name.decode()] += len(shape.starts)
    for odd_properties in properties.odd:
        row_counts.update(odd_properties.keys())

    excluded = {name for name in row_counts if name in NEVER_COLUMNS}
    arrays: dict[str, Any] = {}
    for name, _ in row_counts.most_common():
        if name in excluded:
            continue
        if len(arrays) == columns_max:
            excluded.add(name)
            continue
        array = text_column(properties, name).dictionary_encode()
        if _is_unique(array):
            excluded.add(name)
        else:
            arrays[name] = make_dictionary_array(_get_codes(array), array.dictionary)
    return arrays, frozenset(excluded)


def _is_unique(array: Any) -> bool:
    """Return whether most values of a dictionary array are long and occur only once.

    Such a column would be of no use.
    """
    distinct = len(array.dictionary)
    rows = len(array) - array.null_count
    if rows < _UNIQUE_ROWS_MIN or 2 * distinct < rows:
        return False
    return bool(array.dictionary.nbytes > (UNIQUE_VALUE_BYTES + 4) * distinct)


def make_dictionary_array(codes: NDArray[Any], values: Any) -> Any:
    """Make an Arrow dictionary array: element i is `values[codes[i]]`, or null if the code is -1.

    The codes are stored in the smallest integer type that is sufficient for `values`.
    """
    codes = np.ascontiguousarray(codes, _choose_code_type(len(values)))
    has_value = codes >= 0
    bitmap = None
    if not has_value.all():
        bitmap = pa.py_buffer(np.packbits(has_value, bitorder="little"))
    # `pa.array` would load pandas if it is installed, which takes a quarter of a second.
    index_type = {1: pa.int8(), 2: pa.int16(), 4: pa.int32()}[codes.itemsize]
    indices = pa.Array.from_buffers(index_type, len(codes), [bitmap, pa.py_buffer(codes)])
    return pa.DictionaryArray.from_arrays(indices, values)


def merge_block_arrays(blocks: Sequence[ColumnBlock]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return (columns by name, excluded names) of consecutive blocks joined into one.

    Each column is an Arrow array with the rows of all blocks. A name is excluded if a block
    excludes it, or if most values of the joined column are long and unique. The blocks must be made
    by `build_block`.
    """
    excluded: set[str] = set()
    names: dict[str, None] = {}  # in the order in which they first occur
    for block in blocks:
        excluded |= block.excluded
        names |= dict.fromkeys(block.columns)

    arrays: dict[str, Any] = {}
    for name in names:
        if name in excluded:
            continue
        array = _merge_column(name, blocks)
        if _is_unique(array):
            excluded.add(name)
        else:
            arrays[name] = array
    return arrays, frozenset(excluded)


def _merge_column(name: str, blocks: Sequence[ColumnBlock]) -> Any:
    """Join a column of several blocks into one Arrow dictionary array.

    At least one block must have the column. Rows of blocks without it are null.
    """
    arrays = []
    for block in blocks:
        array = None
        if isinstance(block.columns, ArrowColumns):
            array = block.columns.arrays.get(name)
        arrays.append(array)

    # All dictionaries, one behind the other, are encoded as one new dictionary without repetitions.
    joined = pa.concat_arrays([array.dictionary for array in arrays if array is not None])
    encoded = joined.dictionary_encode()
    new_codes = np.asarray(encoded.indices)  # of the entries of `joined`

    # Replace the codes of each block by those of the new dictionary.
    merged_codes = []
    entries_start = 0
    for block, array in zip(blocks, arrays, strict=True):
        if array is None:
            merged_codes.append(np.full(block.rows, -1, np.int32))
            continue
        entries_end = entries_start + len(array.dictionary)
        # The last entry is for the code -1.
        new_code_by_code = np.append(new_codes[entries_start:entries_end], -1)
        merged_codes.append(new_code_by_code[_get_codes(array)])
        entries_start = entries_end
    return make_dictionary_array(np.concatenate(merged_codes), encoded.dictionary)
