"""Encode the rows of an Arrow batch as the bytes of batch requests, column by column.

Columns come as `normalize_column` returns them. No Python object is made for a row. Each role's
encoder returns pieces: columns and constants that, joined row by row, are the encoded properties.
Arrow joins all pieces once. The fixed fields of an entry are one NumPy record, and a last join
puts everything into one buffer, in which any run of rows is a slice (layout: `record.batch`;
properties: spec/remoting.md §9):

    | size magic crc flag body length | body | properties length | id | properties |

The entries of a map column nearly always have the same names in every row. Then each name is a
constant, followed by a column of values. What the client checks for each message is checked here
for each distinct value (tags, property names) or by one search over the bytes of a whole column. A
column that is not this simple (a null in a map, white space in keys) is encoded row by row with the
rules of `client.core.messages`.

A `RowError` says what is wrong with a column as a whole. `bad_rows` finds the rows at fault.

**Replayed rows**, which were read from a topic, have properties in their map that RocketMQ
reserves. `adapt_replayed_columns` decides what they mean for the new message. Properties of the
content and origin are copied. The sharding key selects the queue again. Properties that only the
first delivery needed are dropped: a delay that has passed, a transaction that has committed,
counters of consumption (`model.properties`). A delay or transaction that was not carried out is an
error, because a row cannot request one in this way.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluicemq.client.core.messages import BODY_BYTES_MAX, PROPERTIES_BYTES_MAX, check_tag_cached
from sluicemq.client.core.names import check_keys, check_properties
from sluicemq.client.heartbeat_thread import make_unique_ids
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import (
    DELAY,
    REAL_TOPIC,
    SHARDING_KEY,
    TIMER_PROPERTIES,
    TRAN_MSG,
    UNIQ_KEY,
)
from sluicemq.model.properties import COPIED, REFUSED_IN_BATCH, is_copied
from sluicemq.record.codec import BATCH_FIXED_BYTES
from sluicemq.record.layout import BATCH_HEAD
from sluicemq.record.property_columns import get_data_and_offsets
from sluicemq.spark.schema import AUTOMATIC_PROPERTIES


class RowError(ConfigurationError):
    """A row that cannot be sent. `role` is the role of the column at fault.

    When: Spark writes to a topic and a row has no topic, a body above the limit, a key with blanks.
    Then: the task fails before its rows are sent; with exactly-once delivery no row of the epoch
    is visible.
    Fix: correct the column that the text names, or filter such rows away.

        a row's queue_id is negative. Use 0 or more, or null for any queue.
    """

    def __init__(self, fact: str, *, role: str, fix: str = "") -> None:
        super().__init__(fact, fix=fix)
        self.role = role


@contextmanager
def row_errors_for(role: str) -> Iterator[None]:
    """Return a context manager that replaces a ConfigurationError by a RowError of `role`.

    A RowError is not changed.
    """
    try:
        yield
    except RowError:
        raise
    except ConfigurationError as error:
        raise RowError(f"{error.fact}.", role=role, fix=error.fix) from None


_BATCH_BYTES_MAX: Final = 256 * 1024 * 1024
_LENGTH_TYPE: Final = np.dtype(">i2")
_IDS_PER_MS: Final = 1 << 16
_SEPARATORS: Final = "[\x01\x02]"
_UNNORMALIZED_KEYS: Final = r"^\s|\s\s|\s$|[^\S ]"
"""Keys with white space other than single spaces between them."""
_INVALID_KEY: Final = "^$|[\\s\x01\x02]"


# ---- columns of Spark


def split_batch(batch: Any, bytes_max: int = _BATCH_BYTES_MAX) -> Iterator[Any]:
    """Split an Arrow batch into parts of at most `bytes_max` bytes, and yield them.

    A part with a single row may be larger. The limit exists because Arrow's 32-bit offsets reach
    only 2 GiB. With `spark.sql.execution.arrow.useLargeVarTypes`, a batch of Spark may be larger.
    """
    if batch.num_rows <= 1 or batch.nbytes <= bytes_max:
        yield batch
        return
    half = batch.num_rows // 2
    yield from split_batch(batch.slice(0, half), bytes_max)
    yield from split_batch(batch.slice(half), bytes_max)


def normalize_column(column: Any) -> Any:
    """Return a column of an Arrow batch in the type that the other functions take.

    That type has 32-bit offsets (`string`), even if Spark made the column with 64-bit offsets
    (`large_string`).
    """
    normalized = _normalized_type(column.type)
    return column if normalized == column.type else column.cast(normalized)


def _normalized_type(arrow_type: Any) -> Any:
    """Return an Arrow type with 32-bit offsets in place of 64-bit ones, also in maps and lists."""
    if pa.types.is_large_string(arrow_type):
        return pa.string()
    if pa.types.is_large_binary(arrow_type):
        return pa.binary()
    if pa.types.is_map(arrow_type):
        key_type = _normalized_type(arrow_type.key_type)
        return pa.map_(key_type, _normalized_type(arrow_type.item_type))
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        element_type = _normalized_type(arrow_type.value_type)
        return pa.list_(arrow_type.value_field.with_type(element_type))
    return arrow_type


def convert_bodies(column: Any) -> Any:
    """Return the column of bodies as a binary column. Raises RowError if a body is null."""
    if column.null_count:
        fix = "Filter such rows, or fill the column."
        raise RowError("a row has no body: it is null.", role="body", fix=fix)
    return column.cast(pa.binary())


def convert_flags(column: Any) -> Any:
    """Return the column of flags as int32, with 0 for null.

    Raises RowError if a flag does not fit into 32 bits.
    """
    try:
        return pc.fill_null(column, 0).cast(pa.int32())
    except pa.ArrowInvalid:
        raise RowError(
            "a row's flag does not fit into 32 bits.",
            role="flag",
            fix="Use a number from -2147483648 to 2147483647, or null for 0.",
        ) from None


# ---- entries of a batch


class EncodedRows:
    """Rows encoded as entries of batch requests, in one buffer.

    Row i is `data[offsets[i]:offsets[i + 1]]`. The bodies of the rows are kept in a second buffer
    of the same form.
    """

    def __init__(self, encoded_entries: Any, bodies: Any) -> None:
        """Take two binary columns with one value for each row: entries, and message bodies."""
        self.data, self.offsets = get_data_and_offsets(encoded_entries)
        self._bodies, self._body_offsets = get_data_and_offsets(bodies)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def split_requests(self, count_max: int, bytes_max: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) for each request, which contains the rows [start, stop).

        A request has at most `count_max` rows and `bytes_max` bytes. A row that is larger than
        `bytes_max` is alone in its request.
        """
        start = 0
        end = len(self)
        while start < end:
            # The last row whose end is not behind the limit of bytes.
            limit = self.offsets[start] + bytes_max
            fitting_stop = int(np.searchsorted(self.offsets, limit, "right")) - 1
            stop = max(start + 1, min(fitting_stop, start + count_max, end))
            yield start, stop
            start = stop

    def request_body(self, start: int, stop: int) -> memoryview:
        """Return the body of a batch request with the rows [start, stop)."""
        return self.data[self.offsets[start] : self.offsets[stop]]

    def message_bodies(self, start: int, stop: int) -> memoryview:
        """Return the message bodies of the rows [start, stop), concatenated."""
        return self._bodies[self._body_offsets[start] : self._body_offsets[stop]]


class UniqueIdColumns:
    """Generates message ids for many rows at once.

    The ids have the format of `client.heartbeat_thread`. A run of up to 65,536 ids has the same
    time; no other run of the process has that time.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        """Create a generator of columns of message ids. No id is generated yet."""
        self._ids = make_unique_ids(clock)
        # An id is a prefix of 20 digits, 8 digits of the run's time, and the number in the run.
        self._prefix = ""
        self._time = 0
        self._next_number = 0  # 0 before the first run

    def generate(self, count: int, name: str = UNIQ_KEY) -> Any:
        """Return a binary column of `count` new ids, each encoded as `NAME U+0001 ID U+0002`.

        `name` is the property that contains the id.
        """
        columns = []
        while count:
            if self._next_number in (0, _IDS_PER_MS):
                self._start_run()
            run_count = min(count, _IDS_PER_MS - self._next_number)
            suffixes = id_suffixes()[self._next_number : self._next_number + run_count]
            start = f"{name}\x01{self._prefix}{self._time:08X}".encode()
            columns.append(pc.binary_join_element_wise(start, suffixes, b"\x02", b""))
            self._next_number += run_count
            count -= run_count
        return columns[0] if len(columns) == 1 else pa.concat_arrays(columns)

    def _start_run(self) -> None:
        """Begin a new run of ids: ids with the same time and consecutive numbers.

        No other run has its time.
        """
        unique_id = self._ids.make_id()
        self._prefix = unique_id[:20]
        self._next_number = 0
        # Long runs may be ahead of the clock, so the clock's time may have been used already.
        self._time = max(int(unique_id[20:28], 16), self._time + 1)


@cache
def id_suffixes() -> Any:
    """Return a binary column of the last four hexadecimal digits of the ids of one run."""
    return pa.array([b"%04X" % number for number in range(_IDS_PER_MS)], pa.binary())


def encode_rows(bodies: Any, *properties: Any, flags: Any | None = None) -> EncodedRows:
    """Encode messages as entries of a batch, in the layout of the module's docstring.

    `bodies` is a binary column. Each of `properties` is a binary column, or bytes for all rows;
    they are concatenated in each row. `flags` is an int32 column; None means 0 in each row. Raises
    RowError if a row is too large.
    """
    body_sizes, property_sizes = check_sizes(bodies, *properties)
    heads = np.zeros(len(body_sizes), BATCH_HEAD.dtype)
    heads["size"] = BATCH_FIXED_BYTES + body_sizes + property_sizes
    heads["body_length"] = body_sizes
    if flags is not None:
        heads["flag"] = flags.to_numpy()
    property_lengths = _fixed_width_column(property_sizes.astype(_LENGTH_TYPE))
    encoded_entries = pc.binary_join_element_wise(
        _fixed_width_column(heads), bodies, property_lengths, *properties, b""
    )
    return EncodedRows(encoded_entries, bodies)


def _fixed_width_column(values: Any) -> Any:
    """Return a binary column with the bytes of each item of a NumPy array."""
    size = values.dtype.itemsize
    buffers = [None, pa.py_buffer(values)]
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(values), buffers)
    return fixed.cast(pa.binary())


def check_sizes(bodies: Any, *properties: Any) -> tuple[Any, Any]:
    """Return the sizes of messages, after comparing them with RocketMQ's limits.

    `bodies` is a binary column. `properties` are binary columns or constants that are concatenated
    in each row. The result is two NumPy arrays: the bytes of each body, and of each row's
    properties. Raises RowError if a row exceeds a limit.
    """
    body_sizes = pc.binary_length(bodies).to_numpy(zero_copy_only=False)
    property_sizes = np.zeros(len(bodies), np.int64)
    for column in properties:
        if isinstance(column, bytes):
            property_sizes += len(column)
        else:
            property_sizes += pc.binary_length(column).to_numpy()

    if not len(bodies):
        return body_sizes, property_sizes
    body_bytes = body_sizes.max()
    if body_bytes > BODY_BYTES_MAX:
        raise RowError(
            f"a row's body has {body_bytes:,} bytes, the limit is {BODY_BYTES_MAX:,}.",
            role="body",
            fix="Split it, or store it elsewhere.",
        )
    property_bytes = property_sizes.max()
    if property_bytes > PROPERTIES_BYTES_MAX:
        raise RowError(
            f"a row's properties have {property_bytes:,} bytes, the limit is"
            f" {PROPERTIES_BYTES_MAX:,}.",
            role="properties",
            fix="Put large values into the body.",
        )
    return body_sizes, property_sizes


def encode_ids(
    row_ids: Any | None, fresh_ids: UniqueIdColumns, count: int, name: str = UNIQ_KEY
) -> Any:
    """Return a binary column with the message id of each row, encoded as `NAME U+0001 ID U+0002`.

    `row_ids` is a string column of `count` ids, or None if the rows have no ids. A row whose id is
    null or empty gets one from `fresh_ids`. Raises RowError for an invalid id.
    """
    if row_ids is None:
        return fresh_ids.generate(count, name)
    valid_ids = validate_ids(row_ids)
    encoded = pc.binary_join_element_wise(f"{name}\x01", valid_ids, "\x02", "").cast(pa.binary())
    if valid_ids.null_count:
        encoded = pc.coalesce(encoded, fresh_ids.generate(count, name))
    return encoded


def validate_ids(row_ids: Any) -> Any:
    """Return message ids with null for empty ones. Raises RowError for an id with a separator."""
    ids_or_null = _null_if_empty(row_ids)
    with row_errors_for("message_id"):
        _check_separators(ids_or_null)
    return ids_or_null


def encode_delays(columns: Mapping[str, Any]) -> Any | None:
    """Return a string column that says when each row is delivered, or None if no row is delayed.

    A value is `L3` for delay level 3, `M500` for a delay of 500 ms, `T1700000000000` for a time in
    milliseconds since 1970, or null for no delay. `columns` maps roles to columns. Raises RowError
    for a negative value, and for a row with several delays.
    """
    delays = None
    for role, letter in (("delay_level", "L"), ("delay_ms", "M"), ("deliver_at", "T")):
        if role not in columns:
            continue
        numbers = _to_delay_numbers(role, columns[role])
        if numbers.null_count == len(numbers):
            continue
        if pc.min(numbers).as_py() < 0:
            raise RowError(
                f"a row's {role} is negative.", role=role, fix="Use 0 or more, or null for none."
            )
        role_delays = pc.binary_join_element_wise(letter, numbers.cast(pa.string()), "")
        delays = role_delays if delays is None else _merge_delays(delays, role_delays, role)
    return delays


def _merge_delays(delays: Any, role_delays: Any, role: str) -> Any:
    """Return the delays of two columns as one. Raises RowError if a row has a delay in both.

    `role` is the role of the second column.
    """
    has_both = pc.and_(delays.is_valid(), role_delays.is_valid())
    if pc.any(has_both).as_py():
        raise RowError(
            "a row says in more than one way when to deliver it.",
            role=role,
            fix="Fill one of delay_level, delay_ms and deliver_at.",
        )
    return pc.coalesce(delays, role_delays)


def _to_delay_numbers(role: str, column: Any) -> Any:
    """Return the column of a delay role as int64, with null for no delay.

    A time becomes milliseconds since 1970. The delay level 0 means no delay.
    """
    if role == "deliver_at":
        column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
    numbers = column.cast(pa.int64())
    if role == "delay_level":
        numbers = _null_where(pc.equal(numbers, 0), numbers)
    return numbers


# ---- properties


def encode_properties(columns: Mapping[str, Any], count: int) -> Any:
    """Return a binary column with the encoded properties of each of `count` rows, without ids.

    `columns` maps roles to columns. Raises RowError for a value that a message may not have.
    """
    # Columns, and constants for all rows, that are concatenated in each row.
    pieces: list[Any] = [b"WAIT\x01true\x02"]
    for role, encode_role in _ENCODERS.items():
        if role not in columns:
            continue
        with row_errors_for(role):
            for role_piece in encode_role(columns[role]):
                if isinstance(role_piece, bytes) and isinstance(pieces[-1], bytes):
                    pieces[-1] += role_piece
                else:
                    pieces.append(role_piece)
    if len(pieces) == 1:
        return pa.array(pieces * count, pa.binary())
    return pc.binary_join_element_wise(*pieces, b"")


def _encode_property(name: str, texts: Any) -> list[Any]:
    """Return the pieces of one property: columns and constants that are joined in each row.

    Joined, they are `NAME U+0001 TEXT U+0002`, or nothing in a row whose text is null. If all texts
    are null, the list is empty.
    """
    if texts.null_count == len(texts):
        return []
    pieces = [f"{name}\x01".encode(), texts.cast(pa.binary()), b"\x02"]
    if not texts.null_count:
        return pieces
    return [pc.fill_null(pc.binary_join_element_wise(*pieces, b""), b"")]


def _null_where(is_null: Any, column: Any) -> Any:
    """Return `column` with nulls where the boolean column `is_null` is true."""
    # An array of nulls, not a null scalar: with a scalar, `if_else` of pyarrow 15 to 18 (at least)
    # garbles the last texts of a slice.
    return pc.if_else(is_null, pa.nulls(len(column), column.type), column)


def _null_if_empty(texts: Any) -> Any:
    """Return the string column with null in place of empty texts."""
    return _null_where(pc.equal(texts, ""), texts)


def _check_separators(texts: Any) -> Any:
    """Return the string column unchanged.

    Raises ConfigurationError if a text contains U+0001 or U+0002, the separators of properties.
    """
    # A search for the two bytes in the whole buffer comes first, because it is fast. It may also
    # find bytes that a null hides, which are not part of any text; the regular expression decides.
    text_bytes, offsets = get_data_and_offsets(texts)
    used_bytes = np.frombuffer(text_bytes, np.uint8)[offsets[0] : offsets[-1]]
    may_contain = bool((used_bytes - np.uint8(1) < 2).any())  # 0 wraps around to 255
    if may_contain and pc.any(pc.match_substring_regex(texts, _SEPARATORS)).as_py():
        raise ConfigurationError(
            "a value contains U+0001 or U+0002, which separate properties on the wire.",
            fix="Remove those characters.",
        )
    return texts


def encode_tags(column: Any) -> list[Any]:
    """Return the pieces of the property TAGS: columns and constants that are joined in each row.

    Raises ConfigurationError for an invalid tag.
    """
    texts = _null_if_empty(column)
    for tag in pc.unique(texts).to_pylist():
        if tag is not None:
            check_tag_cached(tag)
    return _encode_property("TAGS", texts)


def encode_sharding_keys(column: Any) -> list[Any]:
    """Return the pieces of the property for the sharding key.

    Raises ConfigurationError for a key with a separator.
    """
    return _encode_property("__SHARDINGKEY", _check_separators(_null_if_empty(column)))


def encode_keys(column: Any) -> list[Any]:
    """Return the pieces of the property KEYS: columns and constants that are joined in each row.

    `column` contains strings of keys, separated by any white space, or lists of keys. In the
    property, they are separated by one space. Raises ConfigurationError for an invalid key.
    """
    if pa.types.is_string(column.type):
        joined_keys = _normalize_key_strings(column)
    else:
        joined_keys = _join_key_lists(column)
    return _encode_property("KEYS", _null_if_empty(joined_keys))


def _normalize_key_strings(column: Any) -> Any:
    """Return a string column of keys with one space between the keys of a row.

    Raises ConfigurationError for a key with a separator.
    """
    _check_separators(column)
    if not pc.any(pc.match_substring_regex(column, _UNNORMALIZED_KEYS)).as_py():
        return column
    normalized = [
        None if row_keys is None else " ".join(row_keys.split()) for row_keys in column.to_pylist()
    ]
    return pa.array(normalized, pa.string())


def _join_key_lists(column: Any) -> Any:
    """Return a string column with the keys of each row's list, with one space between them.

    Null and empty keys are left out. Raises ConfigurationError for an invalid key.
    """
    keys = pc.list_flatten(column)
    if not keys.null_count and not pc.any(pc.match_substring_regex(keys, _INVALID_KEY)).as_py():
        return pc.binary_join(column.cast(pa.list_(pa.string())), " ")
    # Row by row, with the rules of the client.
    joined_keys = []
    for row_keys in column.to_pylist():
        present_keys = tuple(key for key in row_keys or () if key)
        joined_keys.append(" ".join(check_keys(present_keys)))
    return pa.array(joined_keys, pa.string())


def encode_map_entries(column: Any) -> list[Any]:
    """Return the pieces of the map column `properties`, which are joined in each row.

    Entries with a null value and automatic properties are left out. Raises ConfigurationError for a
    wrong name, an empty value, and a value with a separator.
    """
    names, texts = _flatten_map(column)
    distinct_names = [name for name in pc.unique(names).to_pylist() if name is not None]
    is_simple = (
        not texts.null_count
        and AUTOMATIC_PROPERTIES.isdisjoint(distinct_names)
        and not pc.any(pc.equal(pc.binary_length(texts), 0)).as_py()
    )
    if not is_simple or not len(names):
        return [_encode_maps_by_row(column)]

    check_properties(dict.fromkeys(distinct_names, "x"), COPIED)
    _check_separators(texts)
    entry_count = count_shared_names(column, names)
    if entry_count:
        shared_names = names[:entry_count].to_pylist()
        return _encode_shared_names(shared_names, texts)
    encoded_entries = pc.binary_join_element_wise(names, "\x01", texts, "\x02", "")
    # A null row has an empty list here, and becomes an empty text.
    row_offsets = pc.subtract(column.offsets, column.offsets[0])
    entries_by_row = pa.ListArray.from_arrays(row_offsets, encoded_entries)
    return [pc.fill_null(pc.binary_join(entries_by_row, ""), "").cast(pa.binary())]


def _flatten_map(column: Any) -> tuple[Any, Any]:
    """Return the names and the values of all entries of a map column, row after row."""
    start = column.offsets[0].as_py()
    stop = column.offsets[-1].as_py()
    return column.keys.slice(start, stop - start), column.items.slice(start, stop - start)


def _encode_maps_by_row(column: Any) -> Any:
    """Return a binary column with the encoded entries of a map column, converted row by row.

    Raises ConfigurationError for a name or value that a message may not have.
    """
    encoded_rows = []
    for row in column.to_pylist():
        properties = dict(_entries_to_send(row))
        check_properties(properties, COPIED)
        encoded_row = "".join(f"{name}\x01{text}\x02" for name, text in properties.items())
        encoded_rows.append(encoded_row.encode())
    return pa.array(encoded_rows, pa.binary())


def _encode_shared_names(shared_names: Sequence[str], texts: Any) -> list[Any]:
    """Return the pieces of a map column whose rows all have the entries `shared_names`, in order.

    `texts` are the values of all entries, row after row. Each name is a constant, followed by the
    column of its values.
    """
    pieces: list[Any] = []
    for index, name in enumerate(shared_names):
        positions = pa.array(np.arange(index, len(texts), len(shared_names)))
        column = texts.take(positions).cast(pa.binary())
        pieces += [f"{name}\x01".encode(), column, b"\x02"]
    return pieces


def count_shared_names(column: Any, names: Any) -> int:
    """Return how many entries each row has, if all rows have the same names in the same order.

    Return 0 if the names differ, or if a row is null. `column` is a map column, and `names` are the
    names of all its entries.
    """
    entry_count = len(names) // len(column)
    entry_counts = np.diff(column.offsets.to_numpy())
    if column.null_count or (entry_counts != entry_count).any():
        return 0
    # The names of each row are compared with those of the row before: first lengths, then bytes.
    data, offsets = get_data_and_offsets(names)
    lengths = np.diff(offsets)
    if (lengths[entry_count:] != lengths[:-entry_count]).any():
        return 0
    name_bytes = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    bytes_per_row = int(offsets[entry_count] - offsets[0])
    if (name_bytes[bytes_per_row:] != name_bytes[: len(name_bytes) - bytes_per_row]).any():
        return 0
    return entry_count


def encode_system_properties(column: Any) -> list[Any]:
    """Return the pieces of the map column `system_properties`, which are joined in each row.

    Automatic properties are left out. Raises ConfigurationError for an empty value, and for a name
    or value with a separator.
    """
    encoded_rows = []
    for row in column.to_pylist():
        properties = _entries_to_send(row)
        encoded_row = "".join(f"{name}\x01{text}\x02" for name, text in properties)
        count = len(properties)
        if encoded_row.count("\x01") != count or encoded_row.count("\x02") != count:
            raise ConfigurationError(
                "a system property contains U+0001 or U+0002, which separate properties on the"
                " wire.",
                fix="Remove those characters.",
            )
        encoded_rows.append(encoded_row.encode())
    return [pa.array(encoded_rows, pa.binary())]


def _entries_to_send(row: list[tuple[str, str | None]] | None) -> list[tuple[str, str]]:
    """Return the entries of a row's map, without automatic properties and null values.

    Raises ConfigurationError for an empty value: RocketMQ's readers drop such a property
    (spec/remoting.md §9), so that it would come back as null.
    """
    entries = []
    for name, text in row or ():
        if text is None or name in AUTOMATIC_PROPERTIES:
            continue
        if text == "":
            raise ConfigurationError(
                f"the property {name!r} has an empty value, which RocketMQ does not keep.",
                fix="Make it null, which means no property, or use another text:"
                " map_filter(properties, (k, v) -> v <> '').",
            )
        entries.append((name, text))
    return entries


_ENCODERS: Final[Mapping[str, Callable[[Any], list[Any]]]] = {
    "tags": encode_tags,
    "sharding_key": encode_sharding_keys,
    "keys": encode_keys,
    "properties": encode_map_entries,
    "system_properties": encode_system_properties,
}
"""The encoder of each role's column, in the order of the properties in a message."""


# ---- replayed rows

_REQUEST_PROPERTIES: Final = REFUSED_IN_BATCH
"""Properties that ask a broker for a delay or a transaction."""
_COLUMN_INSTEAD: Final = {
    DELAY: "the column delay_level",
    "TIMER_DELAY_SEC": "the column delay_ms",
    "TIMER_DELAY_MS": "the column delay_ms",
    "TIMER_DELIVER_MS": "the column deliver_at",
}
"""The column to use in place of a property that asks for a delay."""


def adapt_replayed_columns(
    columns: Mapping[str, Any], now_ms: int
) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return (columns, names of dropped properties) for rows that may have been read from a topic.

    `columns` maps roles to columns. `now_ms` is the current time. In the column `properties`,
    reserved properties that a new message must not have are dropped. The sharding key moves to its
    own column, unless the row has one there. Raises RowError if a property asks for a delay or
    transaction that was not carried out.
    """
    column = columns.get("properties")
    if column is None or not len(column):
        return columns, frozenset()
    names, texts = _flatten_map(column)
    distinct_names = {name for name in pc.unique(names).to_pylist() if name is not None}
    dropped = frozenset(
        name for name in distinct_names - AUTOMATIC_PROPERTIES if not is_copied(name)
    )
    if not dropped and SHARDING_KEY not in distinct_names:
        return columns, dropped

    rows = np.repeat(np.arange(len(column)), np.diff(column.offsets.to_numpy()))
    entries = _MapEntries(names, texts, rows, len(column))
    _check_pending_requests(entries, now_ms)
    adapted = dict(columns)
    if SHARDING_KEY in distinct_names:
        replayed_keys = _extract_sharding_keys(entries)
        column_keys = columns.get("sharding_key")
        if column_keys is None:
            adapted["sharding_key"] = replayed_keys
        else:
            adapted["sharding_key"] = pc.coalesce(_null_if_empty(column_keys), replayed_keys)
    adapted["properties"] = _drop_entries(entries, {*dropped, SHARDING_KEY})
    return adapted, dropped


class _MapEntries(NamedTuple):
    """All entries of a map column, row after row.

    `names` and `texts` are string columns, and `rows` is a NumPy array with the row of each entry.
    The column has `row_count` rows; some of them may have no entry.
    """

    names: Any
    texts: Any
    rows: Any
    row_count: int


def _extract_sharding_keys(entries: _MapEntries) -> Any:
    """Return a string column with the property SHARDING_KEY of each row, null if it has none."""
    key_entries = np.flatnonzero(_is_one_of(entries.names, {SHARDING_KEY}))
    entry_of_row = np.full(entries.row_count, -1)
    entry_of_row[entries.rows[key_entries]] = key_entries
    return entries.texts.take(pa.array(entry_of_row, mask=entry_of_row < 0))


def _drop_entries(entries: _MapEntries, dropped_names: Collection[str]) -> Any:
    """Return a map column without the entries whose names are in `dropped_names`."""
    is_kept = ~_is_one_of(entries.names, dropped_names)
    kept_counts = np.bincount(entries.rows[is_kept], minlength=entries.row_count)
    kept_offsets = np.concatenate(([0], np.cumsum(kept_counts))).astype(np.int32)
    mask = pa.array(is_kept)
    return pa.MapArray.from_arrays(
        pa.array(kept_offsets), entries.names.filter(mask), entries.texts.filter(mask)
    )


def _is_one_of(names: Any, accepted: Collection[str]) -> Any:
    """Return a NumPy array that says for each of `names` whether it is one of `accepted`."""
    is_accepted = pc.is_in(names, value_set=pa.array(sorted(accepted), pa.string()))
    return is_accepted.to_numpy(zero_copy_only=False)


def _check_pending_requests(entries: _MapEntries, now_ms: int) -> None:
    """Raise RowError if a property asks for a delay or transaction that was not carried out.

    `now_ms` is the current time. A broker that has carried out such a request leaves the property
    REAL_TOPIC in the message.
    """
    completed_rows = entries.rows[_is_one_of(entries.names, {REAL_TOPIC})]
    is_completed = np.isin(entries.rows, completed_rows)
    is_pending = _is_one_of(entries.names, _REQUEST_PROPERTIES) & ~is_completed
    for index in np.flatnonzero(is_pending).tolist():
        name = entries.names[index].as_py()
        property_value = entries.texts[index].as_py()
        if property_value is None or _has_no_effect(name, property_value, now_ms):
            continue
        fix = "Remove the property."
        if name in _COLUMN_INSTEAD:
            fix = f"Use {_COLUMN_INSTEAD[name]}, or remove the property."
        raise RowError(
            f"the property name {name!r} is reserved, and the row has no property REAL_TOPIC, which"
            " would show that its request was carried out.",
            role="properties",
            fix=fix,
        )


def _has_no_effect(name: str, property_value: str, now_ms: int) -> bool:
    """Return whether a request property asks a broker for nothing.

    That is so for a transaction other than "true", a delay of 0 or less, and a delivery time that
    is not after `now_ms`. Text that is not a whole number has an effect.
    """
    if name == TRAN_MSG:
        return property_value.lower() != "true"
    if not property_value.lstrip("+-").isdigit():
        return False
    is_delivery_time = name == TIMER_PROPERTIES[-1]
    return int(property_value) <= (now_ms if is_delivery_time else 0)
