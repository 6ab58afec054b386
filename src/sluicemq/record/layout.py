"""THE layouts of what is stored, each declared once: records, queue units, index files, properties.

Whoever reads or writes these bytes, one at a time with `struct` or a thousand with NumPy, derives
its form from the fields declared here. All integers are big-endian and signed (spec/store.md,
§2.1 records, §2.3 properties, §2.5 batches, §3 units, §4 index):

    record      RECORD_HEAD | body | topic length 1 (V1) or 2 (V2), topic
                | properties length 2, properties
    properties  name 0x01 value 0x02 name 0x01 value 0x02 …
    unit        UNIT, the n-th for queue offset n
    index file  INDEX_HEADER | slots of 4 bytes | INDEX_ENTRY …
    batch       BATCH_HEAD | body | properties length 2, properties, once for each message

Both hosts of a record are an address of 4 or 16 bytes and the port as 4; the sys flag's bits 0x10
(born) and 0x20 (store) say which. V2 is for topics longer than 127 bytes. The end of a log file is
a blank record: BLANK, the bytes that are left and a magic of its own.
"""

from functools import cached_property
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from sluicemq.model.ids import HOST_BYTES_IPV4, HOST_BYTES_IPV6
from sluicemq.model.message import BORN_HOST_IPV6, STORE_HOST_IPV6

if TYPE_CHECKING:
    import numpy as np

_LETTERS: Final = {"u1": "B", "i2": "h", "i4": "i", "i8": "q"}


class Layout:
    """Fields side by side: (name, kind), a kind as NumPy names it (i4, i8, V8 for 8 bytes)."""

    def __init__(self, *fields: tuple[str, str]) -> None:
        self.fields = fields
        letters = (_LETTERS.get(kind) or f"{kind[1:]}s" for _, kind in fields)
        self.struct = Struct(">" + "".join(letters))
        self.size: int = self.struct.size
        ends = accumulate(int(kind[1:]) for _, kind in fields)
        self._ends = dict(zip((name for name, _ in fields), ends, strict=True))

    def misfit(self, *values: object) -> str:
        """Say which of the values of all fields does not fit, with the range of its field; "" if
        all of them do. `struct` says neither which nor what."""
        for (name, kind), value in zip(self.fields, values, strict=True):
            if kind[0] == "V" or not isinstance(value, int):
                continue
            bits = 8 * int(kind[1:])
            low, high = (0, 1 << bits) if kind[0] == "u" else (-1 << bits - 1, 1 << bits - 1)
            if not low <= value < high:
                words = name.replace("_", " ")
                return f"The {words} {value} does not fit into its field: {low} to {high - 1}."
        return ""

    def at(self, name: str) -> int:
        """Where a field begins."""
        return self._ends[name] - int(dict(self.fields)[name][1:])

    def part(self, first: str, last: str) -> "Layout":
        """The fields from one to another."""
        names = list(self._ends)
        return Layout(*self.fields[names.index(first) : names.index(last) + 1])

    def only(self, *names: str) -> Struct:
        """Some fields, read from where the whole begins; the bytes between them are passed over."""
        letters, end = ">", 0
        for name in names:
            kind = dict(self.fields)[name]
            letters += f"{self.at(name) - end}x{_LETTERS.get(kind) or kind[1:] + 's'}"
            end = self._ends[name]
        return Struct(letters)

    @cached_property
    def dtype(self) -> "np.dtype[Any]":
        """The same for NumPy, which is loaded now."""
        import numpy as np  # noqa: PLC0415 - whoever reads one record at a time does without

        return np.dtype(
            [(name, kind if kind[0] == "V" else f">{kind}") for name, kind in self.fields]
        )


HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
RECORD_HEADS: Final = {
    born | store: Layout(
        ("size", "i4"), ("magic", "i4"), ("body_crc", "i4"), ("queue_id", "i4"), ("flag", "i4"),
        ("queue_offset", "i8"), ("physical_offset", "i8"), ("sys_flag", "i4"), ("born_time", "i8"),
        ("born_host", f"V{HOST_BYTES_IPV6 if born else HOST_BYTES_IPV4}"), ("store_time", "i8"),
        ("store_host", f"V{HOST_BYTES_IPV6 if store else HOST_BYTES_IPV4}"),
        ("reconsume_times", "i4"), ("prepared_offset", "i8"), ("body_length", "i4"),
    )
    for born in (0, BORN_HOST_IPV6)
    for store in (0, STORE_HOST_IPV6)
}  # fmt: skip
"""By the host bits of the sys flag: 88 bytes, 100 with one IPv6 host, 112 with two."""
RECORD_HEAD: Final = RECORD_HEADS[0]
RECORD_BEGIN: Final = RECORD_HEAD.part("size", "sys_flag")
"""What comes before the first host, at the same place in every record."""
RECORD_BYTES_MIN: Final = RECORD_HEAD.size + 1 + 2
"""A V1 record with two IPv4 hosts, without body, topic and properties."""

MAGIC_V1: Final = 0xDAA320A7 - (1 << 32)
MAGIC_V2: Final = 0xDAA320AB - (1 << 32)
MAGIC_BLANK: Final = 0xCBD43194 - (1 << 32)
MAGICS: Final = (MAGIC_V1, MAGIC_V2)
BLANK: Final = RECORD_HEAD.part("size", "magic")
"""How every record begins, and all of a blank one."""
CRC_MASK: Final = 0x7FFFFFFF
PROPERTIES_BYTES_MAX: Final = 32767

NAME_END: Final = 1
VALUE_END: Final = 2
"""The bytes that separate properties."""

UNIT: Final = Layout(("position", "i8"), ("size", "i4"), ("code", "i8"))
BATCH_UNIT: Final = Layout(
    *UNIT.fields, ("store_time", "i8"), ("first", "i8"), ("count", "i2"), ("compaction", "i4"),
    ("reserved", "i4"),
)  # fmt: skip
"""A unit of RocketMQ's batch consume queue."""

INDEX_HEADER: Final = Layout(
    ("begin_time", "i8"), ("end_time", "i8"), ("begin_position", "i8"), ("end_position", "i8"),
    ("slots_used", "i4"), ("entry_limit", "i4"),
)  # fmt: skip
"""Times in ms, positions in the log; the limit is one more than the last entry's number."""
INDEX_ENTRY: Final = Layout(
    ("hash", "i4"), ("position", "i8"), ("seconds", "i4"), ("previous", "i4")
)

BATCH_HEAD: Final = Layout(
    ("size", "i4"), ("magic", "i4"), ("body_crc", "i4"), ("flag", "i4"), ("body_length", "i4")
)
"""A message in the body of a client batch; magic and CRC are 0."""
