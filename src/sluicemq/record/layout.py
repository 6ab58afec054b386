"""The layouts of everything that is stored: records, queue units, index files, properties.

Each layout is declared once. All code that reads or writes these bytes, one record at a time with
`struct` or thousands with NumPy, derives its format from the fields declared here. All integers are
big-endian and signed (spec/store.md, §2.1 records, §2.3 properties, §2.5 batches, §3 units, §4
index):

    record      RECORD_HEAD | body | topic length 1 (V1) or 2 (V2), topic
                | properties length 2, properties
    properties  name 0x01 value 0x02 name 0x01 value 0x02 …
    unit        UNIT; unit n belongs to queue offset n
    index file  INDEX_HEADER | slots of 4 bytes | INDEX_ENTRY …
    batch       BATCH_HEAD | body | properties length 2, properties; repeated for each message

A record contains two hosts, that of the producer (born) and that of the broker (store). A host is
an address of 4 or 16 bytes and a port of 4 bytes. Bits 0x10 (born) and 0x20 (store) of the system
flag are set for addresses of 16 bytes. V2 records are for topics of more than 127 bytes. A log file
ends with a blank record: BLANK, with the number of the remaining bytes as its size and a magic
number of its own.
"""

from functools import cached_property
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from sluicemq.model.ids import HOST_BYTES_IPV4, HOST_BYTES_IPV6
from sluicemq.model.message import BORN_HOST_IPV6, STORE_HOST_IPV6

if TYPE_CHECKING:
    import numpy as np

_STRUCT_CODES: Final = {"u1": "B", "i2": "h", "i4": "i", "i8": "q"}


def _find_struct_code(kind: str) -> str:
    """Return the code of the `struct` module for a kind of field, such as "i" for i4."""
    return _STRUCT_CODES.get(kind) or f"{kind[1:]}s"


class Layout:
    """A sequence of fields without gaps.

    `fields` are pairs of name and kind. Kinds are named as in NumPy: i4 is an integer of 4 bytes,
    and V8 stands for 8 bytes of any content. `size` is the size of all fields in bytes, and
    `struct` packs and unpacks their values.
    """

    def __init__(self, *fields: tuple[str, str]) -> None:
        """Create a layout of `fields`, pairs of a name and a kind, in the order of the bytes.

        A kind is i (signed), u (unsigned) or V (bytes), and the size in bytes, such as i4 or V8.
        """
        self.fields = fields
        names = [name for name, _ in fields]
        kinds = [kind for _, kind in fields]
        self.struct = Struct(">" + "".join(map(_find_struct_code, kinds)))
        self.size: int = self.struct.size
        # A kind ends with its size in bytes: i4, u2, V8.
        ends = accumulate(int(kind[1:]) for kind in kinds)
        self._ends = dict(zip(names, ends, strict=True))

    def describe_misfit(self, *values: object) -> str:
        """Describe the first integer that does not fit into its field; return "" if all fit.

        `values` has the values of all fields, in order. Fields of kind V are not examined. The
        result is a sentence for an error, because the error of `struct` names neither the field nor
        the value.
        """
        for (name, kind), value in zip(self.fields, values, strict=True):
            if kind[0] == "V" or not isinstance(value, int):
                continue
            bits = 8 * int(kind[1:])
            if kind[0] == "u":
                value_min = 0
                value_max = (1 << bits) - 1
            else:
                value_min = -(1 << (bits - 1))
                value_max = (1 << (bits - 1)) - 1
            if not value_min <= value <= value_max:
                noun = name.replace("_", " ")
                return (
                    f"The {noun} {value} does not fit into its field: {value_min} to {value_max}."
                )
        return ""

    def at(self, name: str) -> int:
        """Return the offset of a field from the start of the layout, in bytes."""
        return self._ends[name] - int(dict(self.fields)[name][1:])

    def fields_between(self, first_name: str, last_name: str) -> "Layout":
        """Return the layout of the fields from `first_name` up to and including `last_name`."""
        names = list(self._ends)
        return Layout(*self.fields[names.index(first_name) : names.index(last_name) + 1])

    def struct_of(self, *names: str) -> Struct:
        """Return a struct that unpacks only the fields `names`, which must be in order.

        It begins at the start of the layout, skips the bytes of other fields, and ends with the
        last of `names`.
        """
        codes = ">"
        end = 0
        for name in names:
            skipped_bytes = self.at(name) - end
            codes += f"{skipped_bytes}x{_find_struct_code(dict(self.fields)[name])}"
            end = self._ends[name]
        return Struct(codes)

    @cached_property
    def dtype(self) -> "np.dtype[Any]":
        """The structured data type of NumPy with the same fields."""
        import numpy as np  # noqa: PLC0415 - code that reads single records does not need NumPy

        big_endian_fields = []
        for name, kind in self.fields:
            is_bytes = kind[0] == "V"
            big_endian_fields.append((name, kind if is_bytes else f">{kind}"))
        return np.dtype(big_endian_fields)


HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6


def _record_head(host_bits: int) -> Layout:
    """Return the layout of a record's head, which comes before its body.

    The sizes of the two hosts depend on `host_bits`, the host bits of the system flag.
    """
    born_host_bytes = HOST_BYTES_IPV6 if host_bits & BORN_HOST_IPV6 else HOST_BYTES_IPV4
    store_host_bytes = HOST_BYTES_IPV6 if host_bits & STORE_HOST_IPV6 else HOST_BYTES_IPV4
    return Layout(
        ("size", "i4"),
        ("magic", "i4"),
        ("body_crc", "i4"),
        ("queue_id", "i4"),
        ("flag", "i4"),
        ("queue_offset", "i8"),
        ("physical_offset", "i8"),
        ("sys_flag", "i4"),
        ("born_time", "i8"),
        ("born_host", f"V{born_host_bytes}"),
        ("store_time", "i8"),
        ("store_host", f"V{store_host_bytes}"),
        ("reconsume_times", "i4"),
        ("prepared_offset", "i8"),
        ("body_length", "i4"),
    )


RECORD_HEADS: Final = {
    born | store: _record_head(born | store)
    for born in (0, BORN_HOST_IPV6)
    for store in (0, STORE_HOST_IPV6)
}
"""The layout of a record before its body, by the host bits of its system flag. It has 88 bytes, 100
with one IPv6 host, and 112 with two."""
RECORD_HEAD: Final = RECORD_HEADS[0]
"""The layout of a record before its body, with two IPv4 hosts."""
RECORD_BEGIN: Final = RECORD_HEAD.fields_between("size", "sys_flag")
"""The fields that are at the same offset in every record."""
RECORD_BYTES_MIN: Final = RECORD_HEAD.size + 1 + 2
"""The size of a V1 record with two IPv4 hosts and without body, topic and properties."""

MAGIC_V1: Final = 0xDAA320A7 - (1 << 32)
MAGIC_V2: Final = 0xDAA320AB - (1 << 32)
MAGIC_BLANK: Final = 0xCBD43194 - (1 << 32)
MAGICS: Final = (MAGIC_V1, MAGIC_V2)
"""The magic numbers of records with messages."""
BLANK: Final = RECORD_HEAD.fields_between("size", "magic")
"""The first fields of every record, and all fields of a blank record."""
CRC_MASK: Final = 0x7FFFFFFF
"""The bits of a CRC-32 that are stored."""
PROPERTIES_BYTES_MAX: Final = 32767
"""The largest size of encoded properties."""

NAME_END: Final = 1
"""The byte behind the name of a property."""
VALUE_END: Final = 2
"""The byte behind the value of a property."""

UNIT: Final = Layout(("position", "i8"), ("size", "i4"), ("code", "i8"))
"""A unit of a consume queue: position and size of a record, and the code of its tag."""
BATCH_UNIT: Final = Layout(
    *UNIT.fields,
    ("store_time", "i8"),
    ("first", "i8"),
    ("count", "i2"),
    ("compaction", "i4"),
    ("reserved", "i4"),
)
"""A unit of RocketMQ's batch consume queue."""

INDEX_HEADER: Final = Layout(
    ("begin_time", "i8"),
    ("end_time", "i8"),
    ("begin_position", "i8"),
    ("end_position", "i8"),
    ("slots_used", "i4"),
    ("entry_limit", "i4"),
)
"""The header of an index file. Times are in ms, positions are those of the log, and `entry_limit`
is the number of the last entry plus one."""
INDEX_ENTRY: Final = Layout(
    ("hash", "i4"), ("position", "i8"), ("seconds", "i4"), ("previous", "i4")
)
"""An entry of an index file."""

BATCH_HEAD: Final = Layout(
    ("size", "i4"), ("magic", "i4"), ("body_crc", "i4"), ("flag", "i4"), ("body_length", "i4")
)
"""The fields before the body of a message in a client batch. `magic` and `body_crc` are 0."""
