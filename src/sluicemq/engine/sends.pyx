# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Plain sends and batches, from the bytes of a socket to record, unit and answer, compiled.

`Sends.run` handles frame after frame while each is a plain SEND_MESSAGE_V2 (310) or
SEND_BATCH_MESSAGE (320). It reads the JSON header in place, writes the properties without their
escapes, lays out records and units, and composes the answer from constant pieces. The records of
one run are one part of the commit group, and its answers are passed on together.

A frame is plain if its header is JSON in which only the properties contain escapes, if it belongs
to no transaction and was not redelivered, if its hosts are IPv4, and if none of its properties
needs the general path (`ACTED_ON_SEND` in `model.properties`). Its topic and queue must exist.

If a frame is not plain, `run` stops before it, and the general path handles it:
`broker.produce.send`, `broker.produce.intake` and `store.writer`. The rules here are theirs. The
layouts are those of `record.layout`; importing this module fails if they differ.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.unicode cimport PyUnicode_DecodeASCII, PyUnicode_DecodeUTF8
from libc.string cimport memcmp, memcpy

from sluicemq.errors import StoreError
from sluicemq.model.ids import tag_code
from sluicemq.model.message import TRANSACTION_MASK
from sluicemq.model.properties import ACTED_ON_SEND
from sluicemq.record import codec, layout

ctypedef unsigned char byte

HEAD = [
    ("size", 0), ("magic", 4), ("body_crc", 8), ("queue_id", 12), ("flag", 16),
    ("queue_offset", 20), ("physical_offset", 28), ("sys_flag", 36), ("born_time", 40),
    ("born_host", 48), ("store_time", 56), ("store_host", 64), ("reconsume_times", 72),
    ("prepared_offset", 76), ("body_length", 84),
]
assert [(name, layout.RECORD_HEAD.at(name)) for name, _ in layout.RECORD_HEAD.fields] == HEAD
assert (layout.RECORD_HEAD.size, layout.UNIT.size, layout.BATCH_HEAD.size) == (88, 20, 20)
assert [layout.BATCH_HEAD.at(name) for name in ("size", "flag", "body_length")] == [0, 12, 16]
assert codec.BATCH_MESSAGES_MAX == 16384

cdef enum:
    HEAD_BYTES = 88
    UNIT_BYTES = 20
    BATCH_HEAD_BYTES = 20
    HOST_BYTES = 8
    PROPERTIES_MAX = 32767
    BATCH_MAX = 16384  # the most messages in a batch
    HEADER_MAX = 1 << 20
    ONEWAY = 2
    FLAGS_MAX = 3  # the largest system flag of a batch, as in `broker.produce.intake`
    SEND = 310
    SEND_BATCH = 320
    TOPIC_FIELD = 1
    QUEUE_FIELD = 2
    SYS_FLAG_FIELD = 4
    BORN_FIELD = 8
    FLAG_FIELD = 16
    PROPERTIES_FIELD = 32
    CODE = 64
    FLAG = 128
    OPAQUE = 256
    EVERYTHING = 511

cdef struct Name:
    const char *text  # with the byte 1 behind it, which separates name and value
    Py_ssize_t size
    int next_one  # the next name with the same first letter, or -1

cdef enum:
    NAMES_MAX = 64

cdef Name[NAMES_MAX] care_names
cdef int[256] care_first  # the number of a name by its first letter, or -1
# `Name.text` points into these objects, so they must stay in memory.
care_bytes = sorted(f"{name}\x01".encode() for name in ACTED_ON_SEND)


cdef int index_names() except -1:
    """Fill `care_names` with the names of properties that only the general path handles."""
    cdef int letter, number
    cdef bytes name
    if len(care_bytes) > NAMES_MAX:
        raise AssertionError("more reserved names than NAMES_MAX")
    for letter in range(256):
        care_first[letter] = -1
    for number, name in enumerate(care_bytes):
        care_names[number].text = PyBytes_AS_STRING(name)
        care_names[number].size = PyBytes_GET_SIZE(name)
        care_names[number].next_one = care_first[<byte>name[0]]
        care_first[<byte>name[0]] = number
    return 0


index_names()

cdef unsigned int transactions = TRANSACTION_MASK
cdef unsigned int uncommon_flags = 0x80 | 0x10 | 0x20  # a batch in one record, IPv6 hosts

# ---------------------------------------------------------------------------------- checksums

cdef unsigned int[8][256] crc_tables


cdef void make_tables() noexcept:
    cdef unsigned int number, value
    cdef int row, bit
    for number in range(256):
        value = number
        for bit in range(8):
            value = (value >> 1) ^ (0xEDB88320 if value & 1 else 0)
        crc_tables[0][number] = value
    for number in range(256):
        for row in range(1, 8):
            value = crc_tables[row - 1][number]
            crc_tables[row][number] = (value >> 8) ^ crc_tables[0][value & 255]


make_tables()


cdef unsigned int crc32(const byte *data, Py_ssize_t size) noexcept nogil:
    """Return the same checksum as `zlib.crc32`. It is computed eight bytes at a time."""
    cdef unsigned int crc = ~(<unsigned int>0), low, high
    while size >= 8:
        memcpy(&low, data, 4)
        memcpy(&high, data + 4, 4)
        low ^= crc
        crc = (
            crc_tables[7][low & 255] ^ crc_tables[6][(low >> 8) & 255]
            ^ crc_tables[5][(low >> 16) & 255] ^ crc_tables[4][low >> 24]
            ^ crc_tables[3][high & 255] ^ crc_tables[2][(high >> 8) & 255]
            ^ crc_tables[1][(high >> 16) & 255] ^ crc_tables[0][high >> 24]
        )
        data += 8
        size -= 8
    while size > 0:
        crc = (crc >> 8) ^ crc_tables[0][(crc ^ data[0]) & 255]
        data += 1
        size -= 1
    return ~crc


# ------------------------------------------------------------------------------------- structs


cdef class QueueState:
    """The end of a queue. `engine/state.py` describes the attributes."""


cdef class TopicState:
    """The counters of a topic. `engine/state.py` describes the attributes."""


cdef class TurnState:
    """The position of the next record, and the commit group so far.

    `engine/state.py` describes the attributes.
    """


# ---------------------------------------------------------------------------------- JSON headers

# The fields of a send that have been read. `seen` is a set of the bits above. `has_names` says that
# extFields has a long name other than sluiceBrief, which sets `is_brief`: the answer to a batch then
# contains only its first id.
cdef struct Header:
    unsigned int seen
    long long code, flag, opaque, queue_id, sys_flag, born, message_flag
    const byte *topic
    Py_ssize_t topic_size
    bint has_names, is_batch, is_brief

cdef struct Properties:
    byte *data          # a buffer of PROPERTIES_MAX + 16 bytes
    Py_ssize_t size
    int is_wide         # whether it contains bytes beyond ASCII
    Py_ssize_t tag, tag_size, unique, unique_size

cdef byte[256] is_odd  # whether a byte is a quote, a backslash or a control character


cdef void mark_odd() noexcept:
    cdef int number
    for number in range(256):
        is_odd[number] = number < 0x20 or number == 0x22 or number == 0x5C


mark_odd()


cdef inline const byte *skip_spaces(const byte *p, const byte *end) noexcept:
    while p < end and p[0] == 0x20:
        p += 1
    return p


cdef const byte *plain_text(const byte *p, const byte *end) noexcept:
    while p < end and not is_odd[p[0]] and p[0] < 0x80:
        p += 1
    return p if p < end and p[0] == 0x22 else NULL


cdef const byte *number_text(const byte *p, const byte *end, long long *value) noexcept:
    cdef long long found = 0
    cdef bint is_negative = p < end and p[0] == 0x2D
    cdef const byte *first
    if is_negative:
        p += 1
    first = p
    while p < end and 0x30 <= p[0] <= 0x39 and p - first < 19:
        found = found * 10 + (p[0] - 0x30)
        p += 1
    if p == first or p - first > 18 or (first[0] == 0x30 and p - first > 1):
        return NULL
    value[0] = -found if is_negative else found
    return p


cdef int hex_digit(byte c) noexcept:
    if 0x30 <= c <= 0x39:
        return c - 0x30
    c |= 0x20
    return c - 0x57 if 0x61 <= c <= 0x66 else -1


cdef const byte *unescape(const byte *p, const byte *end, Properties *into) noexcept:
    """Copy the JSON string whose characters begin at `p` into `into`, without its escapes.

    Return the position behind its closing quote, or NULL if it is too long, or contains other
    escapes than those of the form \\u00XX for a character from 1 to 7F.
    """
    cdef byte *out = into.data
    cdef byte *limit = into.data + PROPERTIES_MAX
    cdef byte c
    cdef int high, low
    cdef bint is_wide = False
    while p < end and out < limit:
        c = p[0]
        if not is_odd[c]:
            is_wide |= c >= 0x80
            out[0] = c
            out += 1
            p += 1
            continue
        if c == 0x22:
            into.size = out - into.data
            into.is_wide = is_wide
            return p + 1
        if c != 0x5C or end - p < 6 or memcmp(p + 1, b"u00", 3):
            return NULL
        high, low = hex_digit(p[4]), hex_digit(p[5])
        if high < 0 or high > 7 or low < 0 or high + low == 0:
            return NULL
        out[0] = high << 4 | low
        p += 6
        out += 1
    return NULL


cdef const byte *read_fields(const byte *p, const byte *end, Header *header, Properties *own) noexcept:
    """Read the extFields of a SEND_MESSAGE_V2 (310), which begin at `p` behind their brace.

    The letters are declared in `wire.headers.SendMessageRequestV2`. Return the position behind the
    closing brace, or NULL if the fields are not plain.
    """
    cdef byte letter
    cdef const byte *first
    cdef unsigned int bit
    cdef long long *target
    while True:
        p = skip_spaces(p, end)
        if end - p < 8 or p[0] != 0x22:
            return NULL
        letter = p[1]
        if p[2] != 0x22:  # a longer name, which may change the answer of the general path
            first = p + 1
            p = plain_text(first, end)
            if p == NULL:
                return NULL
            header.is_brief = p - first == 11 and not memcmp(first, b"sluiceBrief", 11)
            header.has_names = header.has_names or not header.is_brief
            letter = 0
            p += 1
        elif is_odd[letter] or letter >= 0x80:
            return NULL
        else:
            p += 3
        p = skip_spaces(p, end)
        if p >= end or p[0] != 0x3A:
            return NULL
        p = skip_spaces(p + 1, end)
        if p >= end or p[0] != 0x22:
            return NULL
        p += 1
        bit, target = 0, NULL
        if letter == 0x62:  # b
            bit = TOPIC_FIELD
            header.topic = p
            p = plain_text(p, end)
            if p == NULL:
                return NULL
            header.topic_size = p - header.topic
            p += 1
        elif letter == 0x69:  # i
            bit = PROPERTIES_FIELD
            p = unescape(p, end, own)
        elif letter == 0x65:  # e
            bit, target = QUEUE_FIELD, &header.queue_id
        elif letter == 0x66:  # f
            bit, target = SYS_FLAG_FIELD, &header.sys_flag
        elif letter == 0x67:  # g
            bit, target = BORN_FIELD, &header.born
        elif letter == 0x68:  # h
            bit, target = FLAG_FIELD, &header.message_flag
        else:
            first = p
            p = plain_text(p, end)
            if p == NULL:
                return NULL
            if letter == 0x6A and (p - first != 1 or first[0] != 0x30):  # j: the number of redeliveries
                return NULL
            if letter == 0x6D and (p - first != 5 or memcmp(first, b"false", 5)):  # m: whether it is a batch
                header.is_batch = True
            p += 1
        if target != NULL:
            p = number_text(p, end, target)
            if p == NULL or p >= end or p[0] != 0x22:
                return NULL
            p += 1
        if p == NULL or header.seen & bit:
            return NULL
        header.seen |= bit
        p = skip_spaces(p, end)
        if p >= end:
            return NULL
        if p[0] == 0x7D:
            return p + 1
        if p[0] != 0x2C:
            return NULL
        p += 1


cdef bint read_header(const byte *p, const byte *end, Header *header, Properties *own) noexcept:
    """Read a JSON header into `header` and the properties of the request into `own`.

    Return whether it is the header of a plain SEND_MESSAGE_V2 (310) or SEND_BATCH_MESSAGE (320).
    """
    cdef const byte *name
    cdef Py_ssize_t size
    cdef unsigned int bit
    cdef long long *target
    cdef long long ignored
    header.seen = 0
    header.has_names = header.is_batch = header.is_brief = False
    own.size = own.is_wide = 0
    if p >= end or p[0] != 0x7B:
        return False
    p += 1
    while True:
        p = skip_spaces(p, end)
        if p >= end or p[0] != 0x22:
            return False
        name = p + 1
        p = plain_text(name, end)
        if p == NULL:
            return False
        size = p - name
        p = skip_spaces(p + 1, end)
        if p >= end or p[0] != 0x3A:
            return False
        p = skip_spaces(p + 1, end)
        if p >= end:
            return False
        bit, target = 0, &ignored
        if size == 9 and not memcmp(name, b"extFields", 9):
            if p[0] != 0x7B or header.seen & TOPIC_FIELD:
                return False
            p = read_fields(p + 1, end, header, own)
        else:
            if size == 4 and not memcmp(name, b"code", 4):
                bit, target = CODE, &header.code
            elif size == 4 and not memcmp(name, b"flag", 4):
                bit, target = FLAG, &header.flag
            elif size == 6 and not memcmp(name, b"opaque", 6):
                bit, target = OPAQUE, &header.opaque
            if p[0] == 0x22 and not bit:
                p = plain_text(p + 1, end)
                if p != NULL:
                    p += 1
            else:
                p = number_text(p, end, target)
        if p == NULL or header.seen & bit:
            return False
        if bit == CODE and header.code != SEND and header.code != SEND_BATCH:
            return False
        header.seen |= bit
        p = skip_spaces(p, end)
        if p >= end:
            return False
        if p[0] == 0x7D:
            if header.code == SEND_BATCH:  # a batch may be without properties of the request
                return p + 1 == end and header.seen | PROPERTIES_FIELD == EVERYTHING
            return p + 1 == end and header.seen == EVERYTHING and not header.is_batch
        if p[0] != 0x2C:
            return False
        p += 1


# ------------------------------------------------------------------------------------ properties


cdef inline bint begins(const byte *at, Py_ssize_t size, const char *name, Py_ssize_t name_size) noexcept:
    """Return whether the `size` bytes at `at` begin with a name."""
    return size >= name_size and not memcmp(at, name, name_size)


cdef bint look_at(Properties *own, bint is_batch) noexcept:
    """Find the tag in properties and, unless they are of a message of a batch, the unique id.

    Return False if there is a property that only the general path handles. The last byte of the
    properties must be the value separator, 2.
    """
    cdef const byte *p = own.data
    cdef const byte *end = own.data + own.size
    cdef const byte *next_one
    cdef Py_ssize_t size
    cdef int name
    own.tag = own.unique = -1
    own.tag_size = own.unique_size = 0
    while p < end:
        next_one = p
        while next_one[0] != 2:  # the last byte is 2
            if not next_one[0]:
                return False
            next_one += 1
        size = next_one - p
        name = care_first[p[0]]
        while name >= 0:
            if begins(p, size, care_names[name].text, care_names[name].size):
                return False
            name = care_names[name].next_one
        if p[0] == 0x54:
            if begins(p, size, b"TAGS\x01", 5):
                own.tag, own.tag_size = p - own.data + 5, size - 5
        elif is_batch:
            pass
        elif p[0] == 0x55:
            if begins(p, size, b"UNIQ_KEY\x01", 9):
                own.unique, own.unique_size = p - own.data + 9, size - 9
        elif p[0] == 0x57:
            if begins(p, size, b"WAIT\x01", 5) and (size != 9 or memcmp(p + 5, b"true", 4)):
                return False
        elif p[0] == 0x5F and begins(p, size, b"__SHARDINGKEY\x01", 14):
            return False
        p = next_one + 1
    return True


cdef long long code_of_tag(const byte *tag, Py_ssize_t size) except? -1:
    """Return the tag code of a tag, as `model.ids.tag_code` does: the hash of Java's strings."""
    cdef unsigned int value = 0
    cdef Py_ssize_t index
    for index in range(size):
        if tag[index] >= 0x80:
            return tag_code(PyUnicode_DecodeUTF8(<char *>tag, size, "replace"))
        value = 31 * value + tag[index]
    return <int>value


cdef bint is_id(const byte *at, Py_ssize_t size) noexcept:
    """Return whether a text consists of ASCII letters and digits, and is not empty."""
    cdef Py_ssize_t index
    cdef byte c
    for index in range(size):
        c = at[index]
        if not (0x30 <= c <= 0x39 or 0x41 <= c <= 0x5A or 0x61 <= c <= 0x7A):
            return False
    return size > 0


# ----------------------------------------------------------------------------------------- output


cdef inline byte *put_text(byte *out, const byte *text, Py_ssize_t size) noexcept:
    memcpy(out, text, size)
    return out + size


cdef byte *put_number(byte *out, unsigned long long value) noexcept:
    cdef byte[20] digits
    cdef int count = 0
    while True:
        digits[count] = 0x30 + value % 10
        count += 1
        value //= 10
        if not value:
            break
    while count:
        count -= 1
        out[0] = digits[count]
        out += 1
    return out


cdef byte *put_hex(byte *out, unsigned long long value) noexcept:
    """Write a number as sixteen hexadecimal digits. Return the position behind them."""
    cdef const char *letters = "0123456789ABCDEF"
    cdef int index
    for index in range(15, -1, -1):
        out[index] = letters[value & 15]
        value >>= 4
    return out + 16


cdef inline int bits(Py_ssize_t size) noexcept:
    """Return the index of the counter for bodies of this size, which is (size - 1).bit_length()."""
    cdef unsigned long long value = size - 1 if size else 1
    cdef int count = 0
    while value:
        count += 1
        value >>= 1
    return count


cdef byte *put_bytes(byte *out, bytes text) noexcept:
    cdef Py_ssize_t size = PyBytes_GET_SIZE(text)
    memcpy(out, PyBytes_AS_STRING(text), size)
    return out + size


cdef bint is_utf8(Properties *own):
    """Return whether the properties are valid UTF-8."""
    try:
        PyUnicode_DecodeUTF8(<char *>own.data, own.size, NULL)
    except UnicodeDecodeError:
        return False
    return True


cdef class Sends:
    """The fast path of sends, with the parts of a broker that it uses.

    `turn` is the store's writer. `begin()` begins a commit group, and raises StoreError or OSError
    if the store refuses messages. `topics` is name -> topic, and `queues` is (topic, queue id) ->
    queue. `sizes` counts bodies by the index of `bits`. `hold(peer, answers)` sends answers once
    the commit group is durable. Bodies of more than `body_max` bytes take the general path.
    """

    cdef TurnState turn
    cdef dict topics, queues
    cdef list sizes
    cdef object begin, hold
    cdef bytes suffix, store_host, id_prefix
    cdef bytes answer_begin, answer_identity, answer_ids, answer_offset, answer_opaque, answer_end
    cdef Py_ssize_t answer_bytes, properties_max, body_max, frame_max
    cdef byte *records
    cdef byte *properties
    cdef long long *places
    cdef Py_ssize_t room, places_max
    cdef Properties own
    cdef bytes name_bytes
    cdef str name
    cdef long long[65] counts
    cdef int longest

    def __cinit__(self):
        self.records, self.room, self.longest = NULL, 0, 0
        self.own.data = self.properties = <byte *>PyMem_Realloc(NULL, PROPERTIES_MAX + 16)
        self.places_max = 64
        self.places = <long long *>PyMem_Realloc(NULL, self.places_max * sizeof(long long))
        if self.properties == NULL or self.places == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.records)
        PyMem_Free(self.properties)
        PyMem_Free(self.places)

    def __init__(
        self, TurnState turn, dict topics, dict queues, list sizes, begin, hold, Py_ssize_t body_max
    ):
        self.turn, self.topics, self.queues, self.sizes = turn, topics, queues, sizes
        self.begin, self.hold, self.body_max = begin, hold, body_max
        self.name_bytes, self.name = b"", ""
        cdef int index
        for index in range(65):
            self.counts[index] = 0

    def prepare(
        self, bytes suffix, bytes store_host, bytes id_prefix, list answer,
        Py_ssize_t properties_max, Py_ssize_t frame_max,
    ):
        """Set everything that depends on settings. Call it before `run`, and after each change.

        `suffix` are the properties that the broker appends to those of each message. `store_host`
        is the broker's host, and `id_prefix` is how offset message ids begin. `answer` are the
        pieces of an answer around queue id, identity, ids, queue offset and opaque. Larger
        properties than `properties_max` and larger frames than `frame_max` take the general path.
        """
        self.suffix, self.store_host, self.id_prefix = suffix, store_host, id_prefix
        (
            self.answer_begin, self.answer_identity, self.answer_ids, self.answer_offset,
            self.answer_opaque, self.answer_end,
        ) = answer
        self.answer_bytes = sum(map(len, answer))
        self.properties_max = min(properties_max, PROPERTIES_MAX)
        self.frame_max = frame_max

    cdef int reserve(self, Py_ssize_t used, Py_ssize_t more) except -1:
        """Make room in `records` for `more` bytes behind the first `used` ones."""
        if used + more <= self.room:
            return 0
        cdef Py_ssize_t room = 2 * (used + more)
        cdef byte *grown = <byte *>PyMem_Realloc(self.records, room)
        if grown == NULL:
            raise MemoryError
        self.records, self.room = grown, room
        return 0

    cdef str text_of(self, const byte *name, Py_ssize_t size):
        """Return a topic name as a string. The string of the last topic is cached."""
        if size != PyBytes_GET_SIZE(self.name_bytes) or memcmp(
            name, PyBytes_AS_STRING(self.name_bytes), size
        ):
            self.name_bytes = PyBytes_FromStringAndSize(<char *>name, size)
            self.name = PyUnicode_DecodeASCII(<char *>name, size, NULL)
        return self.name

    cdef void lay_out(
        self, Py_ssize_t at, QueueState queue, Py_ssize_t size, const byte *body,
        Py_ssize_t body_size, Py_ssize_t stored_size, unsigned int flag, unsigned int sys_flag,
        long long born, const byte *born_host,
    ) noexcept:
        """Write a record up to its properties into `records`, at index `at`.

        It gets the next offset of the queue and the next position of the commit log. `size` is the
        size of the record, and `stored_size` that of its properties.
        """
        cdef byte *out = self.records + at
        cdef Py_ssize_t topic_size = PyBytes_GET_SIZE(queue.topic_part)
        put32(out, <unsigned int>size)
        put32(out + 4, <unsigned int>queue.magic)
        put32(out + 8, crc32(body, body_size) & 0x7FFFFFFF)
        put32(out + 12, <unsigned int>queue.queue_id)
        put32(out + 16, flag)
        put64(out + 20, queue.next_offset)
        put64(out + 28, self.turn.position)
        put32(out + 36, sys_flag)
        put64(out + 40, born)
        memcpy(out + 48, born_host, HOST_BYTES)
        put64(out + 56, self.turn.now_ms)
        memcpy(out + 64, PyBytes_AS_STRING(self.store_host), HOST_BYTES)
        put32(out + 72, 0)
        put64(out + 76, 0)
        put32(out + 84, <unsigned int>body_size)
        out = put_text(out + HEAD_BYTES, body, body_size)
        out = put_text(out, <byte *>PyBytes_AS_STRING(queue.topic_part), topic_size)
        out[0], out[1] = stored_size >> 8, stored_size & 255

    cdef int add_unit(self, QueueState queue, Py_ssize_t size, long long tag) except -1:
        """Append the unit of the record just laid out to its queue, and advance the positions."""
        cdef Py_ssize_t at = PyByteArray_GET_SIZE(queue.tail)
        PyByteArray_Resize(queue.tail, at + UNIT_BYTES)
        cdef byte *unit = <byte *>PyByteArray_AS_STRING(queue.tail) + at
        put64(unit, self.turn.position)
        put32(unit + 8, <unsigned int>size)
        put64(unit + 12, tag)
        if queue.next_offset == queue.committed_offset:
            self.turn.touched.append(queue)
        queue.next_offset += 1
        self.turn.position += size
        return 0

    cdef bytes answer_to(self, Header *header, Py_ssize_t count, long long offset):
        """Return the frame that answers a send with the first `count` messages in `places`.

        `offset` is the queue offset of the first message.
        """
        cdef Py_ssize_t id_size = PyBytes_GET_SIZE(self.id_prefix) + 17
        cdef Py_ssize_t room = self.answer_bytes + self.own.unique_size + count * id_size + 128
        cdef byte[1024] local
        cdef byte *start = local
        cdef Py_ssize_t index
        if room > 1024:
            start = <byte *>PyMem_Realloc(NULL, room)
            if start == NULL:
                raise MemoryError
        cdef byte *out = put_number(put_bytes(start + 8, self.answer_begin), header.queue_id)
        out = put_bytes(out, self.answer_identity)
        if self.own.unique_size:
            out = put_text(out, b'"transactionId":"', 17)
            out = put_text(out, self.own.data + self.own.unique, self.own.unique_size)
            out = put_text(out, b'",', 2)
        out = put_bytes(out, self.answer_ids)
        for index in range(count):
            if index:
                out = put_text(out, b",", 1)
            out = put_hex(put_bytes(out, self.id_prefix), self.places[index])
        out = put_number(put_bytes(out, self.answer_offset), offset)
        out = put_number(put_bytes(out, self.answer_opaque), header.opaque)
        out = put_bytes(out, self.answer_end)
        put32(start, <unsigned int>(out - start - 4))
        put32(start + 4, <unsigned int>(out - start - 8))
        cdef bytes answer = PyBytes_FromStringAndSize(<char *>start, out - start)
        if start != local:
            PyMem_Free(start)
        return answer

    cdef int finish(self, Py_ssize_t used) except -1:
        """Add the first `used` bytes of `records` to the commit group, and count the bodies."""
        cdef int index
        if used:
            self.turn.parts.append(PyBytes_FromStringAndSize(<char *>self.records, used))
        for index in range(self.longest + 1):
            if self.counts[index]:
                self.sizes[index] += self.counts[index]
                self.counts[index] = 0
        self.longest = 0
        return 0

    cdef inline void count(self, Py_ssize_t size) noexcept:
        """Count a body of this size. `finish` adds the counts to `sizes`."""
        cdef int index = bits(size)
        self.counts[index] += 1
        if index > self.longest:
            self.longest = index

    cdef Py_ssize_t single(
        self, TopicState topic, QueueState queue, Header *header, const byte *body,
        Py_ssize_t body_size, const byte *born_host, Py_ssize_t used,
    ) except -2:
        """Lay out one message behind the first `used` bytes of `records`.

        Return the number of used bytes afterwards. Return -1, with nothing changed, if its
        properties are too large, or the log file has no room for it.
        """
        cdef Properties *own = &self.own
        cdef Py_ssize_t stored_size = own.size + PyBytes_GET_SIZE(self.suffix)
        cdef Py_ssize_t size = queue.fixed_bytes + body_size + stored_size
        if stored_size > self.properties_max or self.turn.position + size > self.turn.room_end:
            return -1
        cdef long long tag = code_of_tag(own.data + own.tag, own.tag_size) if own.tag_size else 0
        self.reserve(used, size)
        self.lay_out(
            used, queue, size, body, body_size, stored_size, <unsigned int>header.message_flag,
            <unsigned int>header.sys_flag, header.born, born_host,
        )
        used += size
        put_bytes(put_text(self.records + used - stored_size, own.data, own.size), self.suffix)
        self.places[0] = self.turn.position
        self.add_unit(queue, size, tag)
        topic.messages_in += 1
        topic.bytes_in += body_size + stored_size + topic.record_bytes
        self.count(body_size)
        return used

    cdef Py_ssize_t several(
        self, TopicState topic, QueueState queue, const byte *data, Py_ssize_t data_size,
        unsigned int sys_flag, long long born, const byte *born_host, Py_ssize_t *used,
    ) except -2:
        """Lay out the messages of a batch, all or none, behind the first `used` bytes of `records`.

        `data` is the body of the request. Return the number of messages, whose positions are in
        `places`. Return -1, with nothing laid out, if the batch is malformed or not plain, or the
        log file has no room for it.
        """
        cdef const byte *at = data
        cdef const byte *end = data + data_size
        cdef Py_ssize_t suffix_size = PyBytes_GET_SIZE(self.suffix)
        cdef Py_ssize_t needed = 0, count = 0, index, last_size = 0
        cdef Py_ssize_t size, body_size, own_size, stored_size
        cdef Properties each
        cdef const byte *last_tag = NULL
        cdef long long tag = 0
        cdef long long *grown
        while at < end:  # check all messages before any is laid out
            if end - at < BATCH_HEAD_BYTES + 2:
                return -1
            size, body_size = <int>get32(at), <int>get32(at + 16)
            if size > end - at or body_size < 0 or body_size > size - BATCH_HEAD_BYTES - 2:
                return -1
            own_size = get32(at + BATCH_HEAD_BYTES + body_size - 2) & 0xFFFF
            if size != BATCH_HEAD_BYTES + body_size + 2 + own_size:
                return -1
            each.data, each.size = <byte *>at + size - own_size, own_size
            if own_size and (at[size - 1] != 2 or not look_at(&each, True)):
                return -1
            if own_size + suffix_size > self.properties_max:
                return -1
            needed += queue.fixed_bytes + body_size + own_size + suffix_size
            count += 1
            at += size
        if not count or count > BATCH_MAX or data_size > self.body_max:
            return -1
        if self.turn.position + needed > self.turn.room_end:
            return -1
        self.reserve(used[0], needed)
        if count > self.places_max:
            grown = <long long *>PyMem_Realloc(self.places, 2 * count * sizeof(long long))
            if grown == NULL:
                raise MemoryError
            self.places, self.places_max = grown, 2 * count
        at = data
        for index in range(count):
            size, body_size = <int>get32(at), <int>get32(at + 16)
            own_size = size - BATCH_HEAD_BYTES - body_size - 2
            stored_size = own_size + suffix_size
            each.data, each.size = <byte *>at + size - own_size, own_size
            look_at(&each, True)
            if each.tag_size != last_size or (
                last_size and memcmp(each.data + each.tag, last_tag, last_size)
            ):
                last_tag, last_size = each.data + each.tag, each.tag_size
                tag = code_of_tag(last_tag, last_size) if last_size else 0
            needed = queue.fixed_bytes + body_size + stored_size
            self.lay_out(
                used[0], queue, needed, at + BATCH_HEAD_BYTES, body_size, stored_size,
                get32(at + 12), sys_flag, born, born_host,
            )
            used[0] += needed
            put_bytes(
                put_text(self.records + used[0] - stored_size, each.data, own_size), self.suffix
            )
            self.places[index] = self.turn.position
            self.add_unit(queue, needed, tag)
            topic.bytes_in += body_size + stored_size + topic.record_bytes
            self.count(body_size)
            at += size
        topic.messages_in += count
        return count

    cdef bint is_plain(self, Header *header):
        """Return whether the fast path may handle the request whose header has been read."""
        cdef Properties *own = &self.own
        cdef bint is_batch = header.code == SEND_BATCH
        if own.size and own.data[own.size - 1] != 2:
            own.data[own.size] = 2
            own.size += 1
        if not look_at(own, False):
            return False
        if own.unique_size if is_batch else True:
            if not is_id(own.data + own.unique, own.unique_size):
                return False
        return (
            0 <= header.opaque <= 0x7FFFFFFF
            and (not header.flag or header.flag == ONEWAY)
            and 0 <= header.sys_flag <= (FLAGS_MAX if is_batch else 0x7FFFFFFF)
            and not header.sys_flag & (transactions | uncommon_flags)
            and -0x80000000 <= header.message_flag <= 0x7FFFFFFF
            and not (is_batch and (header.has_names or header.born < 0))
            and (not own.is_wide or is_utf8(own))
        )

    def run(self, bytes data, Py_ssize_t position, peer) -> int:
        """Handle the plain sends in `data`, from index `position` on. HOT.

        Their answers are passed to `hold` together. Return the index at which the first frame
        begins that is incomplete or needs the general path.
        """
        cdef const byte *frame
        cdef const byte *body
        cdef const byte *born_host
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data), used = 0, done
        cdef unsigned int total, header_size
        cdef Py_ssize_t body_size, count
        cdef long long offset
        cdef Header header
        cdef TurnState turn = self.turn
        cdef TopicState topic
        cdef QueueState queue
        cdef bytes hosts = peer.remote_bytes
        cdef list answers = []
        cdef object found
        if PyBytes_GET_SIZE(hosts) != HOST_BYTES or PyBytes_GET_SIZE(self.store_host) != HOST_BYTES:
            return position
        born_host = <const byte *>PyBytes_AS_STRING(hosts)
        try:
            while size - position >= 8:
                frame = <const byte *>PyBytes_AS_STRING(data) + position
                total, header_size = get32(frame), get32(frame + 4)
                if total > self.frame_max or header_size > HEADER_MAX or header_size + 4 > total:
                    break
                if total + 4 > size - position:
                    break
                body = frame + 8 + header_size
                body_size = total - 4 - header_size
                if body_size > self.body_max or not read_header(frame + 8, body, &header, &self.own):
                    break
                if not self.is_plain(&header):
                    break
                found = self.topics.get(self.text_of(header.topic, header.topic_size))
                if found is None:
                    break
                topic = found
                if topic.is_special or not 0 <= header.queue_id < topic.queues:
                    break
                found = self.queues.get((self.name, header.queue_id))
                if found is None:
                    break
                queue = found
                if turn.position == turn.turn_start:
                    try:
                        self.begin()
                    except (StoreError, OSError):
                        break
                offset, count = queue.next_offset, 1
                if header.code == SEND:
                    done = self.single(topic, queue, &header, body, body_size, born_host, used)
                    if done < 0:
                        break
                    used = done
                else:
                    count = self.several(
                        topic, queue, body, body_size, <unsigned int>header.sys_flag, header.born,
                        born_host, &used,
                    )
                    if count < 0:
                        break
                count = 1 if header.is_brief else count  # the number of ids in the answer
                answers.append(b"" if header.flag else self.answer_to(&header, count, offset))
                position += total + 4
        finally:  # records that have units must be written, also after an error
            if used:
                self.finish(used)
                self.hold(peer, answers)
        return position
