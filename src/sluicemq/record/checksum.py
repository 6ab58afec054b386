"""The checksum property: a CRC over a whole record, kept as its last property.

The CRC in a record's head covers the body alone. With `enabledAppendPropCRC` the properties end
with one more of 20 bytes (spec/store.md §2.4):

    | __CRC32# 8 | 0x01 | ten digits, the least significant first | 0x02 |

Its value is the CRC32 (31 bits of it) of all the bytes of the record before it, offsets and store
time included. The writer leaves its place while it lays the record out, then seals it.
"""

import zlib
from typing import Final

from sluicemq.record.codec import Buffer
from sluicemq.record.layout import CRC_MASK, VALUE_END

CHECKSUM_NAME: Final = "__CRC32#"
CHECKSUM_BYTES: Final = 20
_START: Final = f"{CHECKSUM_NAME}\x01".encode()
_END: Final = bytes((VALUE_END,))
_DIGITS: Final = 10
_PLACE: Final = _START + b"0" * _DIGITS + _END


def with_place(properties: bytes) -> bytes:
    """The properties with a place for the checksum behind them; one that a client sent is gone."""
    if _START in properties:
        pieces = properties.split(_END)
        properties = _END.join(piece for piece in pieces if not piece.startswith(_START))
    if properties and not properties.endswith(_END):
        properties += _END
    return properties + _PLACE


def seal(record: bytes) -> bytes:
    """The record with its checksum filled in; its properties have come from `with_place`."""
    content = record[:-CHECKSUM_BYTES]
    return content + _START + _digits(zlib.crc32(content)) + _END


def is_sealed(record: Buffer) -> bool:
    """Whether the record (all of it, nothing else) ends with a checksum that agrees."""
    content = memoryview(record)[:-CHECKSUM_BYTES]
    return bytes(record[len(content) :]) == _START + _digits(zlib.crc32(content)) + _END


def _digits(crc: int) -> bytes:
    return f"{crc & CRC_MASK:0{_DIGITS}d}"[::-1].encode()
