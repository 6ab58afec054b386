"""HPACK, the encoding of HTTP/2 header fields (RFC 7541). Nothing here does I/O.

The first bits of a field in a header block determine its representation (RFC 7541 §6):

    1       indexed field: an entry of the static or dynamic table
    01      literal field with incremental indexing: it becomes the newest dynamic entry
    0000    literal field without indexing; 0001 is a literal field that must never be indexed
    001     dynamic table size update

Indexes below 62 are entries of the static table. Larger ones are entries of the connection's
dynamic table, the newest first. The name of a literal field is an index or a string.

Strings may be Huffman coded. The code is canonical: if the symbols are sorted by the length of
their code and then by value, their codes are consecutive. Therefore the lengths alone define the
code (HUFFMAN_CODE_LENGTHS). The decoder is a state machine that takes one byte at a time. Its state
is a node of the code tree: the bits since the last complete symbol lead from the root to this node.
The table of transitions maps (state, byte) to (symbols that the byte completes, next state). A
transition is computed when it is first needed.

The header lists that SluiceMQ encodes are few and small. They use neither the dynamic table nor the
Huffman code, so an encoder has no state.
"""

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Final

from sluicemq.wire.http2 import ErrorCode, Http2Error

DYNAMIC_TABLE_BYTES_MAX: Final = 4096
"""The size of the dynamic table, as RFC 7541 counts it: the default of
SETTINGS_HEADER_TABLE_SIZE."""
HEADER_LIST_BYTES_MAX: Final = 64 * 1024
"""The largest header list of one request, as RFC 9113 counts it. Java's proxy accepts 8 KiB."""
ENTRY_OVERHEAD_BYTES: Final = 32
"""The bytes that a table entry counts in addition to its name and value (RFC 7541 §4.1)."""
RESIZES_MAX: Final = 2
"""The most dynamic table size updates at the start of a block (RFC 7541 §4.2)."""
INTEGER_MAX: Final = 1 << 30
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
HeaderField = tuple[str, str]
STATIC_TABLE: Final[tuple[HeaderField, ...]] = (
    ("", ""),  # indexes begin at 1
    *((n, v.replace("+", " ")) for n, _, v in (word.partition("=") for word in _NAMES.split())),
)
_DYNAMIC_START: Final = len(STATIC_TABLE)
_NUMBERS: Final = {field: number for number, field in enumerate(STATIC_TABLE[1:], 1)}
_NAME_NUMBERS: Final = {
    name: number for number, (name, _) in reversed([*enumerate(STATIC_TABLE[1:], 1)])
}

HUFFMAN_CODE_LENGTHS: Final = (
    "dnsssssssoussussssssssusssssssss6aacd68baa8b8666555666666678f6ca"
    "d67777777777777777777777878djde6f56565666577666567655677777fbeds"
    "kmkkmmmnmnnnnnonoomnonnnnlmnmnnomlkmmnnlnmmolmnnllmlnmnnkmmmnmmn"
    "qqkjmnmpqqqrrqopjlqrrqrollqqsrrrkoklmllnmmppooqnqrqqrrrrrsrrrrrq"
    "u"
)
"""For each symbol the length of its Huffman code in bits, as a digit of base 36 (RFC 7541,
appendix B)."""
_EOS: Final = 256
"""The symbol that marks the end of a string. A string must not contain it."""
_PADDING_BITS_MAX: Final = 7


class _HuffmanTransitions(dict[int, tuple[bytes, int]]):
    """The transitions of the Huffman decoder: state | byte -> (symbols, next state).

    A state is the index of a node of the code tree, shifted left by 8 bits to make room for the
    byte. The root has the state 0. Transitions are computed when they are first looked up.
    """

    def __init__(self) -> None:
        """Build the tree of HPACK's Huffman code.

        The dict itself is empty. A transition is computed and stored when it is first looked up.
        """
        super().__init__()
        # For each node, its two children, for bit 0 and bit 1. A child is the index of a node,
        # ~symbol for a leaf, or 0 for none.
        self._nodes: list[list[int]] = [[0, 0]]
        self._build_tree()
        self.end_states = self._find_end_states()
        """The states in which a string may end: the root, and those after valid padding."""

    def _build_tree(self) -> None:
        """Add all symbols of HPACK's Huffman code to the tree.

        The code is canonical: codes are ascending numbers, in the order of their length and then of
        the symbol. So they are computed from their lengths, which `HUFFMAN_CODE_LENGTHS` has in
        base 36.
        """
        code = 0
        previous_length = 0
        symbols_by_length = sorted(
            (int(digit, 36), symbol) for symbol, digit in enumerate(HUFFMAN_CODE_LENGTHS)
        )
        for length, symbol in symbols_by_length:
            code <<= length - previous_length
            self._add_symbol(code, length, symbol)
            code += 1
            previous_length = length

    def _find_end_states(self) -> set[int]:
        """Return the states in which a string may end.

        They are the root and the states after valid padding, which consists of up to seven bits of
        the code of EOS, all ones. A state is the index of a node, shifted left by 8 bits.
        """
        end_states = {0}
        node = 0
        for _ in range(_PADDING_BITS_MAX):
            node = self._nodes[node][1]
            end_states.add(node << 8)
        return end_states

    def _add_symbol(self, code: int, length: int, symbol: int) -> None:
        """Add a symbol to the tree. Its code is the lowest `length` bits of `code`.

        Nodes on the path to the symbol are created if they do not exist.
        """
        node = 0
        for shift in range(length - 1, 0, -1):
            children = self._nodes[node]
            bit = code >> shift & 1
            if not children[bit]:
                children[bit] = len(self._nodes)
                self._nodes.append([0, 0])
            node = children[bit]
        self._nodes[node][code & 1] = ~symbol  # negative, which marks a leaf

    def __missing__(self, key: int) -> tuple[bytes, int]:
        """Compute, store and return the transition for `key`, which is state | byte.

        A transition is (symbols that the 8 bits complete, next state). A state is a node of the
        tree, shifted left by 8 bits. Raises Http2Error if the byte completes the code of EOS.
        """
        node = key >> 8
        symbols = bytearray()
        for shift in range(7, -1, -1):
            # An inner node is its index, 0 for the root. The leaf of a symbol is ~symbol.
            node = self._nodes[node][key >> shift & 1]
            if node == ~_EOS:
                raise Http2Error(
                    ErrorCode.COMPRESSION_ERROR, "A header string contains the symbol EOS."
                )
            if node < 0:
                symbols.append(~node)
                node = 0
        transition = self[key] = (bytes(symbols), node << 8)
        return transition


_huffman_transitions: Final = cache(_HuffmanTransitions)
"""Return the transitions, which all connections share. They are created at the first call."""


def _huffman_decode(coded: bytes) -> str:
    """Decode a Huffman-coded string to a string of Latin-1 characters.

    Raises Http2Error if the string contains EOS, ends within a symbol, or has wrong padding.
    """
    # The decoder reads whole bytes: each state and byte give the completed symbols and a new state.
    transitions = _huffman_transitions()
    state = 0
    symbols_of_string = bytearray()
    for byte in coded:
        symbols, state = transitions[state | byte]
        symbols_of_string += symbols
    if state not in transitions.end_states:
        raise Http2Error(ErrorCode.COMPRESSION_ERROR, "A header string ends within a symbol.")
    return symbols_of_string.decode("latin-1")


_huffman_decode_cached: Final = lru_cache(4096)(_huffman_decode)
"""All connections share this cache, because clients send the same strings again and again."""


class HeaderDecoder:
    """Decodes the header blocks of one connection, in the order in which they arrive.

    It contains the dynamic table of the connection.
    """

    __slots__ = ("_entries", "_size", "_size_max", "list_bytes")

    def __init__(self) -> None:
        """Create a decoder whose dynamic table is empty."""
        self._entries: list[HeaderField] = []  # the newest last
        self._size = 0
        self._size_max = DYNAMIC_TABLE_BYTES_MAX
        self.list_bytes = 0
        """The size of the last block's header list, as RFC 9113 counts it, in bytes."""

    def decode(self, block: bytes) -> dict[str, str]:
        """Return the header fields of a block by name. This runs for every request.

        If several fields have one name, the last one counts, as in grpc-java. A Go client that
        retries a call sends all its metadata twice.

        Raises Http2Error if the block is malformed, or if its header list exceeds
        HEADER_LIST_BYTES_MAX. The dynamic table may be wrong afterwards, so the caller must close
        the connection.
        """
        # The first bits of each field's first byte say how it is represented (RFC 7541 §6).
        fields: dict[str, str] = {}
        position = 0
        end = len(block)
        list_bytes = 0
        resize_count = 0
        try:
            while position < end:
                byte = block[position]
                if byte & 0x80:
                    # An indexed field.
                    index, position = _decode_integer(block, position, 0x7F)
                    name, value = self._get_entry(index)
                elif byte & 0x60 == 0x20:
                    # A size update, which adds no field.
                    table_bytes_max, position = _decode_integer(block, position, 0x1F)
                    resize_count += 1
                    is_first = not fields and resize_count <= RESIZES_MAX
                    self._resize_table(table_bytes_max, is_first=is_first)
                    continue
                else:
                    # A literal field. Index 0 means that its name is literal too.
                    is_indexed_from_now_on = byte & 0x40
                    prefix_mask = 0x3F if is_indexed_from_now_on else 0x0F
                    index, position = _decode_integer(block, position, prefix_mask)
                    if index:
                        name = self._get_entry(index)[0]
                    else:
                        name, position = _decode_string(block, position)
                    value, position = _decode_string(block, position)
                    if is_indexed_from_now_on:
                        self._insert_entry(name, value)

                list_bytes += len(name) + len(value) + ENTRY_OVERHEAD_BYTES
                if list_bytes > HEADER_LIST_BYTES_MAX:
                    raise _headers_too_large_error()
                fields[name] = value
        except IndexError:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, "A header block ends early.") from None
        self.list_bytes = list_bytes
        return fields

    def _get_entry(self, index: int) -> HeaderField:
        """Return the (name, value) entry with this index in the static or dynamic table.

        The dynamic table begins after the last index of the static table. Raises Http2Error if
        there is no such entry.
        """
        if 0 < index < _DYNAMIC_START:
            return STATIC_TABLE[index]
        age = index - _DYNAMIC_START  # 0 for the newest entry of the dynamic table
        if not 0 <= age < len(self._entries):
            raise Http2Error(
                ErrorCode.COMPRESSION_ERROR, f"The header tables have no entry {index}."
            )
        return self._entries[-1 - age]

    def _insert_entry(self, name: str, value: str) -> None:
        """Add an entry to the dynamic table, and remove the oldest ones if it exceeds its limit."""
        self._entries.append((name, value))
        self._size += len(name) + len(value) + ENTRY_OVERHEAD_BYTES
        if self._size > self._size_max:
            self._evict_entries()

    def _evict_entries(self) -> None:
        """Remove the oldest entries until the dynamic table is not larger than its limit."""
        evicted_count = 0
        while self._size > self._size_max:
            name, value = self._entries[evicted_count]
            self._size -= len(name) + len(value) + ENTRY_OVERHEAD_BYTES
            evicted_count += 1
        # The oldest entries are at the beginning of the list.
        del self._entries[:evicted_count]

    def _resize_table(self, size: int, *, is_first: bool) -> None:
        """Set the limit of the dynamic table to `size` bytes, and remove entries beyond it.

        `is_first` is True if no field comes before this update in its block. Raises Http2Error if
        it is False, or if the size is above DYNAMIC_TABLE_BYTES_MAX.
        """
        if size > DYNAMIC_TABLE_BYTES_MAX or not is_first:
            raise Http2Error(
                ErrorCode.COMPRESSION_ERROR,
                f"The size update of the header table to {size} bytes is not allowed.",
            )
        self._size_max = size
        self._evict_entries()


def _headers_too_large_error() -> Http2Error:
    """Return the error for a header list above HEADER_LIST_BYTES_MAX."""
    return Http2Error(
        ErrorCode.ENHANCE_YOUR_CALM,
        f"The headers of a request are above the limit of {HEADER_LIST_BYTES_MAX} bytes.",
    )


def _decode_integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Decode an integer with a prefix (RFC 7541 §5.1), and return it with the position behind it.

    `mask` has the bits of the first byte that belong to the prefix. Raises Http2Error if the
    integer is above INTEGER_MAX, and IndexError if the block ends within it.
    """
    integer = block[position] & mask
    position += 1
    if integer < mask:
        return integer, position
    # All bits of the prefix are set: more bytes follow, with 7 bits each, the lowest bits first.
    shift = 0
    while True:
        byte = block[position]
        position += 1
        integer += (byte & 0x7F) << shift
        if integer > INTEGER_MAX or shift > 28:
            raise Http2Error(
                ErrorCode.COMPRESSION_ERROR, "An integer in a header block is too large."
            )
        if byte < 0x80:
            return integer, position
        shift += 7


def _decode_string(block: bytes, position: int) -> tuple[str, int]:
    """Decode a string (RFC 7541 §5.2), and return it with the position behind it.

    Raises Http2Error if its Huffman code is malformed, and IndexError if the block ends within it.
    """
    is_coded = block[position] & 0x80
    size, position = _decode_integer(block, position, 0x7F)
    string_bytes = block[position : position + size]
    if len(string_bytes) < size:
        raise IndexError
    position += size
    if not is_coded:
        return string_bytes.decode("latin-1"), position
    if size <= CACHED_BYTES_MAX:
        return _huffman_decode_cached(string_bytes), position
    return _huffman_decode(string_bytes), position


# ------------------------------------------------------------------------------------ writing


def encode_headers(fields: Iterable[HeaderField]) -> bytes:
    """Encode a header block without using the dynamic table.

    A field or name that is in the static table is written as its index. All others are written as
    strings without Huffman code.
    """
    encoded_fields = []
    for name, value in fields:
        if (table_index := _NUMBERS.get((name, value))) is not None:
            encoded_fields.append(_encode_integer(table_index, 0x7F, 0x80))
        elif (table_index := _NAME_NUMBERS.get(name)) is not None:
            encoded_fields += (_encode_integer(table_index, 0x0F, 0), _encode_string(value))
        else:
            encoded_fields += (b"\x00", _encode_string(name), _encode_string(value))
    return b"".join(encoded_fields)


def _encode_string(string: str) -> bytes:
    """Encode a string literally. Characters outside of Latin-1 become `?`."""
    string_bytes = string.encode("latin-1", "replace")
    return _encode_integer(len(string_bytes), 0x7F, 0) + string_bytes


def _encode_integer(integer: int, prefix_mask: int, other_bits: int) -> bytes:
    """Encode an integer with a prefix (RFC 7541 §5.1).

    `prefix_mask` has the bits of the first byte that belong to the prefix. `other_bits` are the
    values of the other bits of this byte.
    """
    if integer < prefix_mask:
        return bytes((other_bits | integer,))
    encoded = bytearray((other_bits | prefix_mask,))
    integer = integer - prefix_mask
    while integer >= 0x80:
        encoded.append(integer & 0x7F | 0x80)
        integer >>= 7
    encoded.append(integer)
    return bytes(encoded)
