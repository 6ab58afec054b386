"""Rows of an Arrow batch as the bytes of a batch request, column by column.

Columns come as `plain_column` returns them. No Python object is made for a row. Properties are
pieces, columns and constants, that Arrow joins once; the fixed fields are one NumPy record, and one
last join lays all of it out, so that any run of rows is a slice of one buffer (layout:
`record.batch`; properties: spec/remoting.md §9):

    | size magic crc flag body length | body | properties length | id | properties |

The entries of a map column have the same names in every row nearly always; then each name is a
constant with a column of values behind it. What the client checks of a message is checked of each
different value (tags, property names), or by a search over the bytes of a whole column. A column
that is not plain (a null in a map, white space in keys) is done row by row, by the rules of
`client.core.messages`.

What no message can be made of is a `RowError` about the whole column; which rows they are, and what
becomes of them, is found in `senders`.

**Rows that were read from a topic** have properties in the map that RocketMQ reserves. `as_new`
says what they mean for the message that is written: those of its content and origin are taken over,
the sharding key chooses the queue again, and what its first delivery needed (a delay that is over,
a transaction that is committed, counters of consumption) stays behind (`model.properties`). A delay
or a transaction that was not carried out is refused: a row cannot ask for it in this way.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

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
from sluicemq.spark.schema import SET_FOR_ALL


class RowError(ConfigurationError):
    """A row that no message can be made of; `role`: what the column at fault means.

    When: Spark writes to a topic and a row has no topic, a body above the limit, a key with blanks.
    Then: the task fails before its rows are sent; with exactly-once delivery no row of the epoch
    is visible.
    Fix: correct the column that the text names, or filter such rows away.

        a row's queue_id is negative. Give 0 or more, or null for any.
    """

    def __init__(self, text: str, *, role: str, fix: str = "") -> None:
        super().__init__(text, fix=fix)
        self.role = role


@contextmanager
def of_column(role: str) -> Iterator[None]:
    """Within it, what is wrong with a value is a RowError of this column."""
    try:
        yield
    except RowError:
        raise
    except ConfigurationError as error:
        raise RowError(f"{error.fact}.", role=role, fix=error.fix) from None


_BATCH_BYTES_MAX: Final = 256 * 1024 * 1024
_LENGTH: Final = np.dtype(">i2")
_IDS_A_MS: Final = 1 << 16
_SEPARATORS: Final = "[\x01\x02]"
_NOT_PLAIN_KEYS: Final = r"^\s|\s\s|\s$|[^\S ]"
_ODD_KEY: Final = "^$|[\\s\x01\x02]"


def batches_of(batch: Any, bytes_max: int = _BATCH_BYTES_MAX) -> Iterator[Any]:
    """Yield an Arrow batch in runs of rows with at most `bytes_max` bytes each, or of one row.

    Offsets of 32 bits reach 2 GiB, in a column and in what is made of a batch; a batch of Spark may
    be larger when `spark.sql.execution.arrow.useLargeVarTypes` is set.
    """
    if batch.num_rows <= 1 or batch.nbytes <= bytes_max:
        yield batch
        return
    half = batch.num_rows // 2
    yield from batches_of(batch.slice(0, half), bytes_max)
    yield from batches_of(batch.slice(half), bytes_max)


def plain_column(column: Any) -> Any:
    """Return a column of an Arrow batch in the types that the functions below take: with 32-bit
    offsets, whether Spark made it with those (`string`) or with 64 bits (`large_string`)."""
    plain = _plain_type(column.type)
    return column if plain == column.type else column.cast(plain)


def _plain_type(kind: Any) -> Any:
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    return kind


class Encoded:
    """Rows laid out: row i is `data[offsets[i]:offsets[i + 1]]`; their bodies the same way."""

    def __init__(self, entries: Any, bodies: Any) -> None:
        self.data, self.offsets = _laid_out(entries)
        self._bodies, self._body_offsets = _laid_out(bodies)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def runs(self, count_max: int, bytes_max: int) -> Iterator[tuple[int, int]]:
        """Rows [start, stop) that go into one request; a larger row is alone."""
        start, end = 0, len(self)
        while start < end:
            limit = self.offsets[start] + bytes_max
            fits = int(np.searchsorted(self.offsets, limit, "right")) - 1
            stop = max(start + 1, min(fits, start + count_max, end))
            yield start, stop
            start = stop

    def request(self, start: int, stop: int) -> memoryview:
        """The request's body."""
        return self.data[self.offsets[start] : self.offsets[stop]]

    def bodies(self, start: int, stop: int) -> memoryview:
        """The bodies of these rows, one after the other."""
        return self._bodies[self._body_offsets[start] : self._body_offsets[stop]]


class UniqueIdColumns:
    """Message ids for many rows at once: as `client.keeper` makes them, in runs of 65,536."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._ids = make_unique_ids(clock)
        self._time = self._next = 0
        self._prefix = ""

    def take(self, count: int, name: str = UNIQ_KEY) -> Any:
        """So many ids, as `UNIQ_KEY U+0001 id U+0002`."""
        parts = []
        while count:
            if self._next in (0, _IDS_A_MS):
                # A run of ids has a time of its own, which no other run of this process has.
                one = self._ids.make_id()
                self._prefix, self._next = one[:20], 0
                self._time = max(int(one[20:28], 16), self._time + 1)
            step = min(count, _IDS_A_MS - self._next)
            endings = id_endings()[self._next : self._next + step]
            start = f"{name}\x01{self._prefix}{self._time:08X}".encode()
            parts.append(pc.binary_join_element_wise(start, endings, b"\x02", b""))
            self._next += step
            count -= step
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


@cache
def id_endings() -> Any:
    """What ids end with: four hex digits."""
    return pa.array([b"%04X" % number for number in range(_IDS_A_MS)], pa.binary())


def encoded(bodies: Any, *properties: Any, flags: Any | None = None) -> Encoded:
    """Binary columns as entries of a batch; `properties` stand behind each other in each, columns
    or constants. `flags` are those of the messages, 0 without.

    Raises RowError for a row too large.
    """
    body_sizes, sizes = checked_sizes(bodies, *properties)
    heads = np.zeros(len(body_sizes), BATCH_HEAD.dtype)
    heads["size"] = BATCH_FIXED_BYTES + body_sizes + sizes
    heads["body_length"] = body_sizes
    if flags is not None:
        heads["flag"] = flags.to_numpy()
    return Encoded(
        pc.binary_join_element_wise(
            _fixed(heads), bodies, _fixed(sizes.astype(_LENGTH)), *properties, b""
        ),
        bodies,
    )


def _fixed(values: Any) -> Any:
    size = values.dtype.itemsize
    buffers = [None, pa.py_buffer(values)]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(values), buffers).cast(
        pa.binary()
    )


def _laid_out(array: Any) -> tuple[memoryview, Any]:
    """The bytes of a binary column, and where its rows begin and end."""
    if not len(array):
        return memoryview(b""), np.zeros(1, np.int64)
    _, offsets, data = array.buffers()
    places = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return memoryview(data if data is not None else b"").cast("B"), places.astype(np.int64)


def checked_sizes(bodies: Any, *properties: Any) -> tuple[Any, Any]:
    """The bytes of each row's body and properties. Raises RowError."""
    body_sizes = pc.binary_length(bodies).to_numpy(zero_copy_only=False)
    sizes = np.zeros(len(bodies), np.int64)
    for column in properties:
        is_constant = isinstance(column, bytes)
        sizes += len(column) if is_constant else pc.binary_length(column).to_numpy()
    for role, name, values, limit, fix in (
        ("body", "body has", body_sizes, BODY_BYTES_MAX, "Split it, or store it elsewhere."),
        ("properties", "properties have", sizes, PROPERTIES_BYTES_MAX,
         "Put large values into the body."),
    ):  # fmt: skip
        if len(values) and values.max() > limit:
            raise RowError(
                f"a row's {name} {values.max():,} bytes, the limit is {limit:,}.",
                role=role, fix=fix,
            )  # fmt: skip
    return body_sizes, sizes


def id_column(given: Any | None, fresh: UniqueIdColumns, count: int, name: str = UNIQ_KEY) -> Any:
    """`name U+0001 id U+0002` of each row: the id that is given, a fresh one where none is."""
    if given is None:
        return fresh.take(count, name)
    texts = checked_ids(given)
    named = pc.binary_join_element_wise(f"{name}\x01", texts, "\x02", "").cast(pa.binary())
    return named if not texts.null_count else pc.coalesce(named, fresh.take(count, name))


def checked_ids(given: Any) -> Any:
    """Ids of messages, null where there is none. Raises RowError."""
    texts = _without_empty(given)
    with of_column("message_id"):
        _check_texts(texts)
    return texts


def body_column(column: Any) -> Any:
    """Bodies as binary. Raises RowError for a null."""
    if column.null_count:
        fix = "Filter such rows, or fill the column."
        raise RowError("a row has no body: it is null.", role="body", fix=fix)
    return column.cast(pa.binary())


def flag_column(column: Any) -> Any:
    """Flags as 32-bit numbers, 0 for null. Raises RowError for one that does not fit."""
    try:
        return pc.fill_null(column, 0).cast(pa.int32())
    except pa.ArrowInvalid:
        raise RowError(
            "a row's flag is no number of 32 bits.",
            role="flag",
            fix="Give one from -2147483648 to 2147483647, or null for 0.",
        ) from None


def property_column(values: Mapping[str, Any], count: int) -> Any:
    """The properties of each row as encoded, without its id. `values`: role -> column.

    Raises RowError for what a message may not have.
    """
    merged: list[Any] = [b"WAIT\x01true\x02"]
    for role, pieces_of in _PIECES.items():
        if role in values:
            with of_column(role):
                for piece in pieces_of(values[role]):
                    if isinstance(piece, bytes) and isinstance(merged[-1], bytes):
                        merged[-1] += piece  # constants that are neighbours are one
                    else:
                        merged.append(piece)
    if len(merged) == 1:
        return pa.array(merged * count, pa.binary())
    return pc.binary_join_element_wise(*merged, b"")


def delay_column(values: Mapping[str, Any]) -> Any | None:
    """When each row is delivered, as a stage says it (L3, M500, T1700000000000; null: at once);
    None when no row is delayed. Raises RowError for a row with more than one delay."""
    found = None
    for role, letter in (("delay_level", "L"), ("delay_ms", "M"), ("deliver_at", "T")):
        if role not in values:
            continue
        column = values[role]
        if role == "deliver_at":
            column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
        numbers = column.cast(pa.int64())
        if role == "delay_level":
            numbers = _null_where(pc.equal(numbers, 0), numbers)
        if numbers.null_count == len(numbers):
            continue
        if pc.min(numbers).as_py() < 0:
            raise RowError(
                f"a row's {role} is negative.", role=role, fix="Give 0 or more, or null for none."
            )
        texts = pc.binary_join_element_wise(letter, numbers.cast(pa.string()), "")
        if found is not None and pc.any(pc.and_(found.is_valid(), texts.is_valid())).as_py():
            raise RowError(
                "a row says in more than one way when to deliver it.",
                role=role,
                fix="Fill one of delay_level, delay_ms and deliver_at.",
            )
        found = texts if found is None else pc.coalesce(found, texts)
    return found


def _named(name: str, texts: Any) -> list[Any]:
    """Pieces that make `name U+0001 text U+0002` of each row, nothing of a null."""
    if texts.null_count == len(texts):
        return []
    pieces = [f"{name}\x01".encode(), texts.cast(pa.binary()), b"\x02"]
    if not texts.null_count:
        return pieces
    return [pc.fill_null(pc.binary_join_element_wise(*pieces, b""), b"")]


def _null_where(is_null: Any, column: Any) -> Any:
    """Return a column with nulls where `is_null` is true. An array of nulls, not the scalar: beside
    it the `if_else` of pyarrow 15 to 18, at least, garbles the last texts of a slice."""
    return pc.if_else(is_null, pa.nulls(len(column), column.type), column)


def _without_empty(texts: Any) -> Any:
    return _null_where(pc.equal(texts, ""), texts)


def _check_texts(texts: Any) -> Any:
    """The texts again, unless one holds a separator. Two bytes are looked for in the column's whole
    buffer first (behind a null, anything may stand)."""
    data, offsets = _laid_out(texts)
    raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    may_hold = bool((raw - np.uint8(1) < 2).any())  # 0 wraps around to 255
    if may_hold and pc.any(pc.match_substring_regex(texts, _SEPARATORS)).as_py():
        raise ConfigurationError(
            "a value holds U+0001 or U+0002, which separate properties on the wire.",
            fix="Leave those characters out.",
        )
    return texts


def tag_pieces(column: Any) -> list[Any]:
    texts = _without_empty(column)
    for tag in pc.unique(texts).to_pylist():
        if tag is not None:
            check_tag_cached(tag)
    return _named("TAGS", texts)


def key_pieces(column: Any) -> list[Any]:
    """Keys joined by one space."""
    if pa.types.is_string(column.type):
        texts = _check_texts(column)
        if pc.any(pc.match_substring_regex(column, _NOT_PLAIN_KEYS)).as_py():
            rows = [None if text is None else " ".join(text.split()) for text in texts.to_pylist()]
            texts = pa.array(rows, pa.string())
        return _named("KEYS", _without_empty(texts))
    flat = pc.list_flatten(column)
    if not flat.null_count and not pc.any(pc.match_substring_regex(flat, _ODD_KEY)).as_py():
        joined = pc.binary_join(column.cast(pa.list_(pa.string())), " ")
        return _named("KEYS", _without_empty(joined))
    lists = [tuple(key for key in keys or () if key) for keys in column.to_pylist()]
    return _named("KEYS", pa.array([" ".join(check_keys(k)) or None for k in lists], pa.string()))


_REQUESTS: Final = REFUSED_IN_BATCH
"""Properties that ask a broker for a delay or a transaction."""
_INSTEAD: Final = {
    DELAY: "the column delay_level", "TIMER_DELAY_SEC": "the column delay_ms",
    "TIMER_DELAY_MS": "the column delay_ms", "TIMER_DELIVER_MS": "the column deliver_at",
}  # fmt: skip


def as_new(values: Mapping[str, Any], now_ms: int) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return the columns of rows (role -> column) as new messages take them over, and the reserved
    names that are left out of the map column `properties`.

    `now_ms` tells which times of delivery are over. Raises RowError when a row has a property that
    asks for a delay or a transaction, and nothing says that it was carried out.
    """
    column = values.get("properties")
    if column is None or not len(column):
        return values, frozenset()
    offsets = column.offsets.to_numpy()
    start, stop = int(offsets[0]), int(offsets[-1])
    names = column.keys.slice(start, stop - start)
    found = {name for name in pc.unique(names).to_pylist() if name is not None}
    left_out = frozenset(name for name in found - SET_FOR_ALL if not is_copied(name))
    if not left_out and SHARDING_KEY not in found:
        return values, left_out
    texts = column.items.slice(start, stop - start)
    rows = np.repeat(np.arange(len(column)), np.diff(offsets))
    _check_requests(names, texts, rows, now_ms)
    result = dict(values)
    if SHARDING_KEY in found:
        at = np.flatnonzero(_is_one_of(names, {SHARDING_KEY}))
        place = np.full(len(column), -1)
        place[rows[at]] = at
        keys = texts.take(pa.array(place, mask=place < 0))
        given = values.get("sharding_key")
        result["sharding_key"] = keys if given is None else pc.coalesce(_without_empty(given), keys)
    kept = ~_is_one_of(names, {*left_out, SHARDING_KEY})
    counts = np.bincount(rows[kept], minlength=len(column))
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    mask = pa.array(kept)
    result["properties"] = pa.MapArray.from_arrays(
        pa.array(ends), names.filter(mask), texts.filter(mask)
    )
    return result, left_out


def _is_one_of(names: Any, wanted: Collection[str]) -> Any:
    found = pc.is_in(names, value_set=pa.array(sorted(wanted), pa.string()))
    return found.to_numpy(zero_copy_only=False)


def _check_requests(names: Any, texts: Any, rows: Any, now_ms: int) -> None:
    """Raise RowError for a delay or transaction that was not carried out. Of one that was, the
    broker has left REAL_TOPIC in the message."""
    done = rows[_is_one_of(names, {REAL_TOPIC})]
    asking = _is_one_of(names, _REQUESTS) & ~np.isin(rows, done)
    for index in np.flatnonzero(asking).tolist():
        name, text = names[index].as_py(), texts[index].as_py()
        if text is not None and not _asks_nothing(name, text, now_ms):
            instead = _INSTEAD.get(name)
            raise RowError(
                f"the property name {name!r} is reserved, and nothing says that what it asks for "
                "was carried out: the row has no property REAL_TOPIC.",
                role="properties",
                fix=f"Use {instead}, or leave the property out." if instead
                else "Leave the property out.",
            )  # fmt: skip


def _asks_nothing(name: str, text: str, now_ms: int) -> bool:
    if name == TRAN_MSG:
        return text.lower() != "true"
    if not text.lstrip("+-").isdigit():
        return False
    return int(text) <= (now_ms if name == TIMER_PROPERTIES[-1] else 0)


def own_pieces(column: Any) -> list[Any]:
    """The entries of a map column, without nulls and what others set. Raises ConfigurationError,
    for an empty value too."""
    offsets = column.offsets
    start, stop = offsets[0].as_py(), offsets[-1].as_py()
    names = column.keys.slice(start, stop - start)
    texts = column.items.slice(start, stop - start)
    found = [name for name in pc.unique(names).to_pylist() if name is not None]
    is_plain = not texts.null_count and SET_FOR_ALL.isdisjoint(found) and not (
        pc.any(pc.equal(pc.binary_length(texts), 0)).as_py()
    )  # fmt: skip
    if not is_plain or not len(names):
        rows = []
        for row in column.to_pylist():
            own = dict(_kept(row))
            check_properties(own, COPIED)
            rows.append("".join(f"{name}\x01{text}\x02" for name, text in own.items()).encode())
        return [pa.array(rows, pa.binary())]
    check_properties(dict.fromkeys(found, "x"), COPIED)
    _check_texts(texts)
    turns = same_names(column, names)
    if turns:
        pieces: list[Any] = []
        for turn, name in enumerate(names[:turns].to_pylist()):
            chosen = pa.array(np.arange(turn, len(names), turns))
            pieces += [f"{name}\x01".encode(), texts.take(chosen).cast(pa.binary()), b"\x02"]
        return pieces
    closed = pc.binary_join_element_wise(names, "\x01", texts, "\x02", "")
    lists = pa.ListArray.from_arrays(pc.subtract(offsets, offsets[0]), closed)  # nulls are empty
    return [pc.fill_null(pc.binary_join(lists, ""), "").cast(pa.binary())]


def same_names(column: Any, names: Any) -> int:
    """How many entries each row has when all have the same names in the same order, else 0."""
    turns, rest = divmod(len(names), len(column))
    if rest or column.null_count or (np.diff(column.offsets.to_numpy()) != turns).any():
        return 0
    data, offsets = _laid_out(names)
    sizes, raw = np.diff(offsets), np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    row_bytes = int(offsets[turns] - offsets[0])
    is_same = (sizes[turns:] == sizes[:-turns]).all() and (
        raw[row_bytes:] == raw[: len(raw) - row_bytes]
    ).all()
    return turns if is_same else 0


def system_pieces(column: Any) -> list[Any]:
    """Properties with reserved names; those that have columns of their own are left out."""
    rows = []
    for row in column.to_pylist():
        entries = _kept(row)
        text = "".join(f"{name}\x01{text}\x02" for name, text in entries)
        if text.count("\x01") != len(entries) or text.count("\x02") != len(entries):
            raise ConfigurationError(
                "a system property holds U+0001 or U+0002, which separate properties on the wire.",
                fix="Leave those characters out.",
            )
        rows.append(text.encode())
    return [pa.array(rows, pa.binary())]


def _kept(row: list[tuple[str, str | None]] | None) -> list[tuple[str, str]]:
    """The entries that are sent: null is no property. RocketMQ has no empty one: its readers drop
    it (spec/remoting.md §9), so that it would come back as null."""
    entries = [(name, text) for name, text in row or () if name not in SET_FOR_ALL]
    for name, text in entries:
        if text == "":
            raise ConfigurationError(
                f"the property {name!r} has an empty value, which RocketMQ does not keep.",
                fix="Make it null, which is no property, or another text:"
                " map_filter(properties, (k, v) -> v <> '').",
            )
    return [(name, text) for name, text in entries if text is not None]


_PIECES: Final[Mapping[str, Callable[[Any], list[Any]]]] = {
    "tags": tag_pieces,
    "sharding_key": lambda texts: _named("__SHARDINGKEY", _check_texts(_without_empty(texts))),
    "keys": key_pieces,
    "properties": own_pieces,
    "system_properties": system_pieces,
}
"""Role -> pieces of its column, in the order in which they stand behind each other."""
