"""Many messages at once, as columns (NumPy): a batch taken apart, records put together.

What stands between the bodies and properties of a batch has fixed sizes, and so it has in the log:

    batch      head 20 | body | length 2 | properties | head 20 | body | …
    log        head 88 | body | topic, length | before, properties, behind | head 88 | body | …

So numbers are columns, which NumPy reads and writes a thousand at a time, and bodies and properties
are slices that one join puts between them. What a batch needs beyond that is proven by a look at
all of it: lengths agree, properties end with U+0002, no name stands in it that needs care. A batch
that is not so is not for here (None): `record.batch` takes it apart, message by message, and says
what is wrong. The tests hold both ways equal, byte by byte.
"""

import struct
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.record.batch import FIXED_BYTES
from sluicemq.record.codec import CRC_MASK, PROPERTIES_BYTES_MAX, RECORD_HEAD

HEAD: Final = np.dtype([
    ("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("queue_id", ">i4"), ("flag", ">i4"),
    ("queue_offset", ">i8"), ("position", ">i8"), ("sys_flag", ">i4"), ("born_ms", ">i8"),
    ("born_host", "V8"), ("stored_ms", ">i8"), ("store_host", "V8"), ("reconsumed", ">i4"),
    ("prepared", ">i8"), ("body_bytes", ">i4"),
])  # fmt: skip
"""`record.codec.RECORD_HEAD`."""
UNIT: Final = np.dtype([("position", ">i8"), ("size", ">i4"), ("code", ">i8")])
HEAD_BYTES: Final = RECORD_HEAD.size
COUNT_MIN: Final = 32
"""For fewer messages the plain way is faster: setting up columns costs a hundred microseconds."""
_COPIED_BYTES_MAX: Final = 1024
"""Bodies that are larger, on the average, stay views."""
_ENTRY_HEAD_BYTES: Final = 20
_FLAG_AT: Final = 12
_LENGTH_AT: Final = 16
_VALUE_END: Final = 2
_ZEROS: Final = bytes(16)
_unpack_size: Final = struct.Struct(">i").unpack_from
_pack_length: Final = struct.Struct(">h").pack

Integers = NDArray[np.int64]
Part = tuple[int, bytes | memoryview, bytes, int]


class Columns(NamedTuple):
    """Messages on their way into the log. `heads` say what the queue and the place do not: CRC,
    flags, time and host of birth, host of the store, body length, zeros. The stored properties are
    `before` + those of the message + `behind`."""

    heads: NDArray[Any]
    bodies: list[bytes | memoryview]
    properties: list[bytes]
    property_sizes: Integers
    tag_codes: Integers
    before: bytes = b""
    behind: bytes = b""

    def parts(self) -> list[Part]:
        """The same, message by message: flag, body, stored properties, tag code."""
        before, behind = self.before, self.behind
        stored = [before + own + behind for own in self.properties]
        flags, codes = self.heads["flag"].tolist(), self.tag_codes.tolist()
        return list(zip(flags, self.bodies, stored, codes, strict=True))


class Laid(NamedTuple):
    """Records and units as they are written, and where each record begins."""

    pieces: list[bytes | memoryview]
    units: bytes
    positions: Integers
    end: int


def starts_of(data: bytes) -> list[int] | None:
    """Where the entries of a batch begin; None when they do not end where it does. HOT."""
    starts: list[int] = []
    add, at, last = starts.append, 0, len(data) - FIXED_BYTES
    while at <= last:
        add(at)
        (size,) = _unpack_size(data, at)
        if size < FIXED_BYTES:
            return None
        at += size
    return starts if at == len(data) else None


def split(data: bytes, behind: bytes, code_of: Callable[[bytes], int]) -> Columns | None:
    """A batch as columns, but for what its request says of all messages. `code_of`: of a tag."""
    listed = starts_of(data)
    if listed is None or len(listed) < COUNT_MIN:
        return None
    starts = np.array(listed, np.int64)
    raw = np.frombuffer(data, np.uint8)
    integers = _view(raw, ">i4")
    sizes = integers[starts]
    body_sizes = integers[starts + _LENGTH_AT].astype(np.int64)
    body_ends = starts + _ENTRY_HEAD_BYTES + body_sizes
    ends = starts + sizes
    if body_sizes.min() < 0 or (body_ends + 2 > ends).any():
        return None
    own_sizes = _view(raw, ">i2")[body_ends].astype(np.int64)
    if (body_ends + 2 + own_sizes != ends).any() or own_sizes.min() <= 0:
        return None
    names = Names(raw)
    if (raw[ends - 1] != _VALUE_END).any() or names.need_care():
        return None
    if int(own_sizes.max()) + len(behind) > PROPERTIES_BYTES_MAX:
        return None
    property_starts = body_ends + 2
    properties = slices(data, property_starts, ends)
    if _ZEROS in data and any(_ZEROS in own for own in properties):
        return None
    source = data if len(data) <= len(listed) * _COPIED_BYTES_MAX else memoryview(data)
    bodies = slices(source, starts + _ENTRY_HEAD_BYTES, body_ends)
    codes = _tag_codes(data, names, property_starts, ends, code_of)
    if codes is None:
        return None
    heads = np.zeros(len(listed), HEAD)
    heads["flag"] = integers[starts + _FLAG_AT]
    heads["body_bytes"] = body_sizes
    heads["crc"] = np.array(list(map(zlib.crc32, bodies)), np.int64) & CRC_MASK
    return Columns(heads, bodies, properties, own_sizes + len(behind), codes, b"", behind)


def _view(raw: NDArray[np.uint8], kind: str) -> NDArray[Any]:
    """A number at each byte."""
    dtype = np.dtype(kind)
    return np.ndarray((max(len(raw) - dtype.itemsize + 1, 0),), dtype, raw.data, strides=(1,))


def slices(data: Any, starts: Integers, ends: Integers) -> list[Any]:
    """The bytes from each start to its end."""
    return [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


class Names:
    """Whatever may be the name of a property: the eight bytes before each U+0001."""

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        found = np.flatnonzero(raw == 1)
        self._ends = found[int(np.searchsorted(found, 8)) :]
        self._last = _view(raw, ">u8")[self._ends - 8]

    def need_care(self) -> bool:
        """May one be of those that no message of a batch can have? The ends of TRAN_MSG, DELAY,
        TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS, TIMER_DEL_UNIQKEY tell."""
        return bool(np.isin(self._last, _CARE).any() or (self._last & _FIVE == _DELAY).any())

    def tags(self) -> tuple[Integers, bool]:
        """Where the values of tags begin, when all of them have another property before them."""
        behind = self._last & _FIVE == _TAGS
        is_all = int(behind.sum()) == int((self._last & _FOUR == _TAGS_FIRST).sum())
        return self._ends[behind] + 1, is_all


_CARE: Final = np.frombuffer(b"TRAN_MSGELAY_SECDELAY_MSLIVER_MS_UNIQKEY", ">u8")
_DELAY: Final = np.uint64(int.from_bytes(b"DELAY", "big"))
_TAGS: Final = np.uint64(int.from_bytes(b"\x02TAGS", "big"))
_TAGS_FIRST: Final = np.uint64(int.from_bytes(b"TAGS", "big"))
_FIVE: Final = np.uint64((1 << 40) - 1)
_FOUR: Final = np.uint64((1 << 32) - 1)


def _tag_codes(
    data: bytes, names: Names, starts: Integers, ends: Integers, code_of: Callable[[bytes], int]
) -> Integers | None:
    """The tag codes when no message has a tag, or each has one, not as its first property."""
    at, is_all = names.tags()
    if not is_all or len(at) not in (0, len(starts)):
        return None
    if not len(at):
        return np.zeros(len(starts), np.int64)
    if (at < starts).any() or (at >= ends).any():
        return None
    find = data.find
    tags = [data[start : find(b"\x02", start)] for start in at.tolist()]
    return np.array(list(map(code_of, tags)), np.int64)


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
    sizes = fixed_bytes + heads["body_bytes"] + columns.property_sizes
    ends = position + np.cumsum(sizes)
    positions = ends - sizes
    heads["size"] = sizes
    heads["magic"] = magic
    heads["queue_id"] = queue_id
    heads["queue_offset"] = np.arange(queue_offset, queue_offset + count)
    heads["position"] = positions
    heads["stored_ms"] = stored_ms
    units = np.empty(count, UNIT)
    units["position"], units["size"], units["code"] = positions, sizes, columns.tag_codes
    lengths = columns.property_sizes.tolist()
    middles = {
        size: topic_part + _pack_length(size) + columns.before for size in set(lengths)
    }  # fmt: skip
    pieces: list[bytes | memoryview] = [b""] * (4 * count + 1)
    pieces[0:-1:4] = _gaps(heads, columns.behind)
    pieces[1::4] = columns.bodies
    pieces[2::4] = map(middles.__getitem__, lengths)
    pieces[3::4] = columns.properties
    pieces[-1] = columns.behind
    return Laid(pieces, units.tobytes(), positions, int(ends[-1]))


def _gaps(heads: NDArray[Any], behind: bytes) -> list[bytes]:
    """What lies between the properties of one message and the body of the next."""
    size = len(behind) + HEAD_BYTES
    gaps = np.empty((len(heads), size), np.uint8)
    gaps[:, : len(behind)] = np.frombuffer(behind, np.uint8)
    gaps[:, len(behind) :] = heads.view(np.uint8).reshape(-1, HEAD_BYTES)
    data = gaps.tobytes()
    found = [data[at : at + size] for at in range(0, len(data), size)]
    found[0] = found[0][len(behind) :]
    return found


_HEX: Final = np.frombuffer(b"".join(b"%02X" % byte for byte in range(256)), "V2")


def ids_of(prefix: bytes, positions: Integers) -> bytes:
    """Message ids, joined by commas: `prefix` and a position as 16 hex digits each."""
    size = len(prefix) + 17
    ids = np.empty((len(positions), size), np.uint8)
    ids[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
    digits = positions.astype(">i8").view(np.uint8)
    ids[:, len(prefix) : -1] = _HEX[digits].view(np.uint8).reshape(-1, 16)
    ids[:, -1] = ord(",")
    return ids.tobytes()[:-1]
