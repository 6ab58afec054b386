"""HPACK (RFC 7541): header lists of HTTP/2 to bytes and back, without I/O.

A field stands in a block in one of these forms, told by its first bits:

    1       an entry of the tables, by number
    01      a name (by number or text) and a value, which become the newest entry of the table
    0000    a name and a value, kept nowhere; 0001 the same, and nobody may ever keep it
    001     the table's new size

Numbers below 62 are entries of the static table, those above of the connection's own, the newest
first. Texts may be written in a Huffman code. It is canonical: of all symbols sorted by the length
of their code and then by value each has the next code, so the lengths alone say it. It is read a
byte at a time: `(where in the code's tree, byte) -> (symbols, where then)`, worked out when first
needed.

Our own headers are few and small: what is written uses neither the table nor the code, so nothing
has to be remembered for a client.
"""

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Final

from sluicemq.wire.http2 import Code, Http2Error

TABLE_BYTES_MAX: Final = 4096
"""Of a connection's table: what both sides assume when nobody says anything."""
LIST_BYTES_MAX: Final = 64 * 1024
"""Of the fields of one request. Java's proxy takes 8 KiB."""
ENTRY_BYTES: Final = 32
"""What an entry counts beside its texts."""
RESIZES_MAX: Final = 2
"""A block begins with at most two new sizes of the table (RFC 7541 §4.2): each may empty it."""
NUMBER_MAX: Final = 1 << 30
CACHED_BYTES_MAX: Final = 256

_NAMES: Final = (
    ":authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https "
    ":status=200 :status=204 :status=206 :status=304 :status=400 :status=404 :status=500 "
    "accept-charset accept-encoding=gzip,+deflate accept-language accept-ranges accept "
    "access-control-allow-origin age allow authorization cache-control content-disposition "
    "content-encoding content-language content-length content-location content-range "
    "content-type cookie date etag expect expires from host if-match if-modified-since "
    "if-none-match if-range if-unmodified-since last-modified link location max-forwards "
    "proxy-authenticate proxy-authorization range referer refresh retry-after server set-cookie "
    "strict-transport-security transfer-encoding user-agent vary via www-authenticate"
)
Field = tuple[str, str]
STATIC: Final[tuple[Field, ...]] = (
    ("", ""),  # they are counted from 1
    *((n, v.replace("+", " ")) for n, _, v in (word.partition("=") for word in _NAMES.split())),
)
_FIRST_OWN: Final = len(STATIC)
_NUMBERS: Final = {field: number for number, field in enumerate(STATIC[1:], 1)}
_NAME_NUMBERS: Final = {name: number for number, (name, _) in reversed([*enumerate(STATIC[1:], 1)])}

CODE_BITS: Final = (
    "dnsssssssoussussssssssusssssssss6aacd68baa8b8666555666666678f6ca"
    "d67777777777777777777777878djde6f56565666577666567655677777fbeds"
    "kmkkmmmnmnnnnnonoomnonnnnlmnmnnomlkmmnnlnmmolmnnllmlnmnnkmmmnmmn"
    "qqkjmnmpqqqrrqopjlqrrqrollqqsrrrkoklmllnmmppooqnqrqqrrrrrsrrrrrq"
    "u"
)
"""The length of the code of each symbol, as a digit of base 36 (RFC 7541, appendix B)."""
_END: Final = 256
"""A symbol that marks the end of a text, and may not be in one."""
_PADDING_BITS_MAX: Final = 7


class _Steps(dict[int, tuple[bytes, int]]):
    """How the code is read: node << 8 | byte -> symbols, the next node << 8."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: list[list[int]] = [[0, 0]]  # children; a symbol is the complement of itself
        code = length = 0
        for bits, symbol in sorted((int(c, 36), n) for n, c in enumerate(CODE_BITS)):
            code <<= bits - length
            self._add(code, bits, symbol)
            code, length = code + 1, bits
        self.ends = {0}
        """Where a text may end: the padding is the beginning of the end's code, all ones."""
        node = 0
        for _ in range(_PADDING_BITS_MAX):
            node = self._nodes[node][1]
            self.ends.add(node << 8)

    def _add(self, code: int, bits: int, symbol: int) -> None:
        node = 0
        for shift in range(bits - 1, 0, -1):
            children, bit = self._nodes[node], code >> shift & 1
            if not children[bit]:
                children[bit] = len(self._nodes)
                self._nodes.append([0, 0])
            node = children[bit]
        self._nodes[node][code & 1] = ~symbol

    def __missing__(self, key: int) -> tuple[bytes, int]:
        node, symbols = key >> 8, bytearray()
        for shift in range(7, -1, -1):
            node = self._nodes[node][key >> shift & 1]
            if node == ~_END:
                raise Http2Error(Code.COMPRESSION_ERROR, "A header text has an end within.")
            if node < 0:
                symbols.append(~node)
                node = 0
        found = self[key] = (bytes(symbols), node << 8)
        return found


_steps: Final = cache(_Steps)


def _decoded(data: bytes) -> str:
    steps, node, found = _steps(), 0, bytearray()
    for byte in data:
        symbols, node = steps[node | byte]
        found += symbols
    if node not in steps.ends:
        raise Http2Error(Code.COMPRESSION_ERROR, "A header text ends within a symbol.")
    return found.decode("latin-1")


_decoded_short: Final = lru_cache(4096)(_decoded)
"""Of all connections: clients say the same again and again."""


class HeaderReader:
    """Reads the header blocks of one connection, in the order in which they come."""

    __slots__ = ("_entries", "_size", "_size_max", "list_bytes")

    def __init__(self) -> None:
        self._entries: list[Field] = []  # the newest last
        self._size = 0
        self._size_max = TABLE_BYTES_MAX
        self.list_bytes = 0
        """What the fields of the last block count together."""

    def read(self, block: bytes) -> dict[str, str]:
        """The fields of a block; of several values of one name the last, as grpc-java takes it: a
        Go client that tries again says all its metadata twice. HOT.

        Raises Http2Error: the table may be wrong from here on, so the connection has to end.
        """
        found: dict[str, str] = {}
        position, end, size, resizes = 0, len(block), 0, 0
        try:
            while position < end:
                byte = block[position]
                if byte & 0x80:
                    number, position = _number(block, position, 0x7F)
                    name, value = self._entry(number)
                elif byte & 0x60 == 0x20:
                    number, position = _number(block, position, 0x1F)
                    resizes += 1
                    self._resize(number, is_first=not found and resizes <= RESIZES_MAX)
                    continue
                else:
                    number, position = _number(block, position, 0x3F if byte & 0x40 else 0x0F)
                    if number:
                        name = self._entry(number)[0]
                    else:
                        name, position = _text(block, position)
                    value, position = _text(block, position)
                    if byte & 0x40:
                        self._keep(name, value)
                size += len(name) + len(value) + ENTRY_BYTES
                if size > LIST_BYTES_MAX:
                    raise Http2Error(
                        Code.ENHANCE_YOUR_CALM,
                        f"The headers of a request are above the limit of {LIST_BYTES_MAX} bytes.",
                    )
                found[name] = value
        except IndexError:
            raise Http2Error(Code.COMPRESSION_ERROR, "A header block is cut short.") from None
        self.list_bytes = size
        return found

    def _entry(self, number: int) -> Field:
        if 0 < number < _FIRST_OWN:
            return STATIC[number]
        place = number - _FIRST_OWN
        if not 0 <= place < len(self._entries):
            raise Http2Error(Code.COMPRESSION_ERROR, f"There is no header entry {number}.")
        return self._entries[-1 - place]

    def _keep(self, name: str, value: str) -> None:
        self._entries.append((name, value))
        self._size += len(name) + len(value) + ENTRY_BYTES
        if self._size > self._size_max:
            self._evict()

    def _evict(self) -> None:
        """The oldest go until the rest fits."""
        count = 0
        while self._size > self._size_max:
            name, value = self._entries[count]
            self._size -= len(name) + len(value) + ENTRY_BYTES
            count += 1
        del self._entries[:count]

    def _resize(self, size: int, *, is_first: bool) -> None:
        if size > TABLE_BYTES_MAX or not is_first:
            raise Http2Error(Code.COMPRESSION_ERROR, f"A header table may not become {size} now.")
        self._size_max = size
        self._evict()


def _number(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """A number whose first bits are those of `mask` in this byte, and where it ends."""
    number = block[position] & mask
    position += 1
    if number < mask:
        return number, position
    shift = 0
    while True:
        byte = block[position]
        position += 1
        number += (byte & 0x7F) << shift
        if number > NUMBER_MAX or shift > 28:
            raise Http2Error(Code.COMPRESSION_ERROR, "A number in a header block is too large.")
        if byte < 0x80:
            return number, position
        shift += 7


def _text(block: bytes, position: int) -> tuple[str, int]:
    """A text and where it ends."""
    is_coded = block[position] & 0x80
    size, position = _number(block, position, 0x7F)
    data = block[position : position + size]
    if len(data) < size:
        raise IndexError
    position += size
    if not is_coded:
        return data.decode("latin-1"), position
    return (_decoded_short if size <= CACHED_BYTES_MAX else _decoded)(data), position


# ------------------------------------------------------------------------------------ writing


def encode_headers(fields: Iterable[Field]) -> bytes:
    """A block that needs no table: whole entries of the static one, all else as it is."""
    parts = []
    for name, value in fields:
        if (number := _NUMBERS.get((name, value))) is not None:
            parts.append(_encode_number(number, 0x7F, 0x80))
        elif (number := _NAME_NUMBERS.get(name)) is not None:
            parts += (_encode_number(number, 0x0F, 0), _encode_text(value))
        else:
            parts += (b"\x00", _encode_text(name), _encode_text(value))
    return b"".join(parts)


def _encode_text(text: str) -> bytes:
    data = text.encode("latin-1", "replace")
    return _encode_number(len(data), 0x7F, 0) + data


def _encode_number(number: int, mask: int, first: int) -> bytes:
    if number < mask:
        return bytes((first | number,))
    found, number = bytearray((first | mask,)), number - mask
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
