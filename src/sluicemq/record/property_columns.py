"""The properties of many messages as Arrow columns, by the compiled decoder or by the reference.

`read_property_columns` chooses. Both implementations have the same result, which does not refer to
the bytes of the records:

    ScannedColumns     the compiled decoder (`engine.decoding`): one pass over all rows, whatever
                       names they have
    ShapeColumns       the reference (`record.properties`): rows with equal names, handled together

Rows whose properties are malformed or repeated are *odd*. Both leave them to
`codec.decode_properties`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from sluicemq import engine
from sluicemq.record.codec import decode_properties
from sluicemq.record.properties import (
    Properties,
    RepeatedTexts,
    Shape,
    ValueSpans,
    in_row_order,
    make_even_offsets,
    make_text_array,
    make_valid_text_array,
    make_value_array,
    read_properties,
    shape_arrays,
    text_column,
)
from sluicemq.record.table import Bytes, Positions

PROPERTIES: Final = pa.map_(pa.string(), pa.string())
"""The type of the column with all properties of a message."""


class PropertyRequest(NamedTuple):
    """Which columns of properties are read.

    `names` are the properties that get a column each. If `with_map` is true, there is also a column
    with all properties except those in `hidden`.
    """

    names: tuple[str, ...] = ()
    with_map: bool = False
    hidden: frozenset[str] = frozenset()


class RequestedProperties(Protocol):
    """The columns of a request. Each has a value for each row, in order."""

    def make_text_column(self, name: str) -> Any:
        """Return the values of a requested property as strings; null if a row lacks it."""

    def make_map_column(self) -> Any:
        """Return the requested map column, of the type PROPERTIES."""


def read_property_columns(
    raw: Bytes,
    starts: Positions,
    lengths: Positions,
    request: PropertyRequest,
    repeated: RepeatedTexts,
) -> RequestedProperties:
    """Read the properties of all rows.

    Those of row i have `lengths[i]` bytes and begin at `starts[i]` in `raw`. `repeated` is a cache
    that blocks of one topic have in common.
    """
    if engine.decoding is not None:
        return ScannedColumns(raw, starts, lengths, request)
    return ShapeColumns(read_properties(raw, starts, lengths), request, repeated)


class ShapeColumns:
    """Columns made by the reference from rows that are sorted into shapes."""

    def __init__(
        self, properties: Properties, request: PropertyRequest, repeated: RepeatedTexts
    ) -> None:
        """Take sorted rows. Columns are made when they are requested."""
        self._properties = properties
        self._hidden = request.hidden
        self._repeated = repeated

    def make_text_column(self, name: str) -> Any:
        """Return the values of a property as strings; null if a row lacks it."""
        return text_column(self._properties, name)

    def make_map_column(self) -> Any:
        """Return a map column with all properties except the hidden ones."""
        return shape_arrays(self._properties, self._make_map_of_shape, self._make_map_of_odd_rows)

    def _make_map_of_shape(self, shape: Shape) -> Any:
        """Return the map column of rows that have the same names in the same order."""
        visible_names: list[bytes] = []
        visible_values: list[ValueSpans] = []
        for name, values in zip(shape.names, shape.values, strict=True):
            if name.decode() not in self._hidden:
                visible_names.append(name)
                visible_values.append(values)
        row_count = len(shape.starts)
        value_array = make_text_array(visible_values, row_count)
        name_array = self._repeated.array(tuple(visible_names), row_count)
        offsets = make_even_offsets(row_count, len(visible_names))
        offset_array = pa.Array.from_buffers(pa.int32(), row_count + 1, [None, offsets])
        return pa.MapArray.from_arrays(offset_array, name_array, value_array)

    def _make_map_of_odd_rows(self, odd_rows: Sequence[Mapping[str, str]]) -> Any:
        return make_map_array(odd_rows, self._hidden)


class ScannedColumns:
    """Columns made by the compiled decoder in one pass over all rows."""

    def __init__(
        self, raw: Bytes, starts: Positions, lengths: Positions, request: PropertyRequest
    ) -> None:
        """Read the rows. Values of single properties are copied when they are requested."""
        assert engine.decoding is not None
        self._decoding = engine.decoding
        self._raw = raw
        self._row_count = len(starts)
        self._hidden = request.hidden
        names = tuple(dict.fromkeys(request.names))
        encoded_names = tuple(name.encode() for name in names)
        encoded_hidden = frozenset(name.encode() for name in request.hidden)
        self._map_buffers, spans, odd_rows = self._decoding.scan(
            raw.data, starts, lengths, encoded_names, request.with_map, encoded_hidden
        )
        self._spans_by_name = dict(zip(names, spans, strict=True))
        self._odd_rows = np.array(odd_rows, np.int64)
        self._odd = [
            decode_properties(raw[starts[row] : starts[row] + lengths[row]].data)
            for row in odd_rows
        ]

    def make_text_column(self, name: str) -> Any:
        """Return the values of a requested property as strings; null if a row lacks it."""
        start_bytes, length_bytes = self._spans_by_name[name]
        starts = np.frombuffer(start_bytes, np.int64)
        lengths = np.frombuffer(length_bytes, np.int32)
        offsets, values, validity = self._decoding.gather(self._raw.data, starts, lengths)
        column = make_valid_text_array(
            self._row_count, offsets, np.frombuffer(values, np.uint8), validity
        )
        odd_values = pa.array([properties.get(name) for properties in self._odd], pa.string())
        return self._replace_odd_rows(column, odd_values)

    def make_map_column(self) -> Any:
        """Return the map column with all properties except the hidden ones."""
        entry_offsets, name_offsets, names, value_offsets, values = self._map_buffers
        entry_count = len(name_offsets) // 4 - 1
        name_buffers = [None, pa.py_buffer(name_offsets), pa.py_buffer(names)]
        name_array = pa.Array.from_buffers(pa.string(), entry_count, name_buffers)
        value_array = make_valid_text_array(
            entry_count, value_offsets, np.frombuffer(values, np.uint8)
        )
        offset_buffers = [None, pa.py_buffer(entry_offsets)]
        offset_array = pa.Array.from_buffers(pa.int32(), self._row_count + 1, offset_buffers)
        column = pa.MapArray.from_arrays(offset_array, name_array, value_array)
        return self._replace_odd_rows(column, make_map_array(self._odd, self._hidden))

    def _replace_odd_rows(self, column: Any, odd_values: Any) -> Any:
        """Return `column` with `odd_values` in place of the values of the odd rows."""
        if not self._odd:
            return column
        rows = [np.arange(self._row_count), self._odd_rows]
        return in_row_order([column, odd_values], rows, self._row_count)


def make_map_array(rows: Sequence[Mapping[str, str]], hidden: frozenset[str]) -> Any:
    """Return a map column of decoded properties, without the names in `hidden`."""
    visible_pairs = []
    for properties in rows:
        pairs = [(name, value) for name, value in properties.items() if name not in hidden]
        visible_pairs.append(pairs)
    return pa.array(visible_pairs, PROPERTIES)


def make_binary_column(raw: Bytes, starts: Positions, lengths: Positions) -> Any:
    """Return a pa.binary() column: value i is the `lengths[i]` bytes of `raw` from `starts[i]` on.

    The column does not refer to `raw`.
    """
    if engine.decoding is None:
        return make_value_array(raw, starts, lengths, pa.binary())
    offsets, values, _ = engine.decoding.gather(raw.data, starts, lengths.astype(np.int32))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), len(starts), buffers)


def get_data_and_offsets(column: Any) -> tuple[memoryview, Positions]:
    """Return the data of a binary or string column, and the offsets of its rows in the data.

    The bytes of row i are `data[offsets[i] : offsets[i + 1]]`. The offsets are a NumPy array of
    int64.
    """
    if not len(column):
        return memoryview(b""), np.zeros(1, np.int64)
    _, offset_buffer, data_buffer = column.buffers()
    # The column may be a slice of its buffers.
    all_offsets = np.frombuffer(offset_buffer, np.int32)
    row_offsets = all_offsets[column.offset : column.offset + len(column) + 1]
    data = memoryview(data_buffer if data_buffer is not None else b"")
    return data.cast("B"), row_offsets.astype(np.int64)
