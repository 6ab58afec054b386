# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Plain sends and batches, from the bytes of the socket to record, unit and answer.

`Sends.run` takes frame after frame as long as each is a plain 310 or 320: its JSON header is read
where it lies, properties are written out without their escapes, records and units are laid out, and
the answer is put together from pieces that do not change. The records of a run are one part of the
turn, its answers are handed over once.

What is not plain is not touched: `run` ends before it, and the reference decides (`broker.produce.send`, `broker.produce.intake`, `store.writer`), whose rules these are. Its
layouts are those of `record.layout`; loading this module compares them.
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
    BATCH_MAX = 16384  # messages of a batch
    HEADER_MAX = 1 << 20
    ONEWAY = 2
    FLAGS_MAX = 3  # of a batch, as `broker.produce.intake` has it
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
    const char *text  # with the 1 behind it
    Py_ssize_t size
    int next_one  # with the same first letter; -1: none

cdef enum:
    NAMES_MAX = 64

cdef Name[NAMES_MAX] care_names
cdef int[256] care_first  # by first letter: a name, -1 for none
care_bytes = sorted(f"{name}\x01".encode() for name in ACTED_ON_SEND)  # kept: `text` points there


cdef int index_names() except -1:
    """`care_names`: what the ordinary way has to look at (`model.properties`)."""
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
cdef unsigned int uncommon_flags = 0x80 | 0x10 | 0x20  # several in one record, IPv6 hosts

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
    """That of zlib, eight bytes a step."""
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
    """The end of a queue: `store.queues`."""


cdef class TopicState:
    """Counters, and what a send has to know: `broker.topics`."""


cdef class TurnState:
    """Where the next record goes and what the turn has so far: `store.writer`."""


# ---------------------------------------------------------------------------------- JSON headers

cdef struct Header:
    unsigned int seen
    long long code, flag, opaque, queue_id, sys_flag, born, message_flag
    const byte *topic
    Py_ssize_t topic_size
    bint has_names, is_batch, is_brief

cdef struct Properties:
    byte *data          # PROPERTIES_MAX and some more
    Py_ssize_t size
    int is_wide         # beyond ASCII
    Py_ssize_t tag, tag_size, unique, unique_size

cdef byte[256] is_odd  # what ends a string's plain part: quote, backslash, control characters


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
    """The text behind a quote, without its escapes (\\u0001, \\u0002); returns what is behind the other
    quote. NULL for what is too long, or escaped in another way."""
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
    """The extFields of a 310, behind their brace; returns what is behind the other one. NULL when
    they are not plain. Letters: `wire.headers.SendMessageRequestV2`."""
    cdef byte letter
    cdef const byte *first
    cdef unsigned int bit
    cdef long long *target
    while True:
        p = skip_spaces(p, end)
        if end - p < 8 or p[0] != 0x22:
            return NULL
        letter = p[1]
        if p[2] != 0x22:  # a longer name: none that we read, but it may change an answer
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
            if letter == 0x6A and (p - first != 1 or first[0] != 0x30):  # j: it was retried
                return NULL
            if letter == 0x6D and (p - first != 5 or memcmp(first, b"false", 5)):  # m
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
    """Is it the header of a plain 310 or 320?"""
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
            if header.code == SEND_BATCH:  # it may have no properties of its own
                return p + 1 == end and header.seen | PROPERTIES_FIELD == EVERYTHING
            return p + 1 == end and header.seen == EVERYTHING and not header.is_batch
        if p[0] != 0x2C:
            return False
        p += 1


# ------------------------------------------------------------------------------------ properties


cdef inline bint begins(const byte *at, Py_ssize_t size, const char *name, Py_ssize_t name_size) noexcept:
    return size >= name_size and not memcmp(at, name, name_size)


cdef bint look_at(Properties *own, bint is_batch) noexcept:
    """Finds tag and unique id; False when a name stands there that needs care. Each property ends
    with a 2."""
    cdef const byte *p = own.data
    cdef const byte *end = own.data + own.size
    cdef const byte *next_one
    cdef Py_ssize_t size
    cdef int name
    own.tag = own.unique = -1
    own.tag_size = own.unique_size = 0
    while p < end:
        next_one = p
        while next_one[0] != 2:  # there is one: the last byte
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
    """`model.ids.tag_code`: the hash that Java's strings have."""
    cdef unsigned int value = 0
    cdef Py_ssize_t index
    for index in range(size):
        if tag[index] >= 0x80:
            return tag_code(PyUnicode_DecodeUTF8(<char *>tag, size, "replace"))
        value = 31 * value + tag[index]
    return <int>value


cdef bint is_id(const byte *at, Py_ssize_t size) noexcept:
    """Letters and digits, at least one."""
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
    """Sixteen digits."""
    cdef const char *letters = "0123456789ABCDEF"
    cdef int index
    for index in range(15, -1, -1):
        out[index] = letters[value & 15]
        value >>= 4
    return out + 16


cdef inline int bits(Py_ssize_t size) noexcept:
    """(size - 1).bit_length(): in which count of body sizes a message is."""
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
    try:
        PyUnicode_DecodeUTF8(<char *>own.data, own.size, NULL)
    except UnicodeDecodeError:
        return False
    return True


cdef class Sends:
    """What plain sends and batches need of a broker.

    `turn` is the store's writer, whose `begin` may refuse a turn; `topics` and `queues` are the
    tables of both; `sizes` counts bodies by size; `hold(peer, answers)` keeps answers until the
    turn is safe.
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
        """What settings give to every message: properties behind its own, the host that stores it,
        and the pieces of an answer around queue id, identity, ids, queue offset and opaque."""
        self.suffix, self.store_host, self.id_prefix = suffix, store_host, id_prefix
        (
            self.answer_begin, self.answer_identity, self.answer_ids, self.answer_offset,
            self.answer_opaque, self.answer_end,
        ) = answer
        self.answer_bytes = sum(map(len, answer))
        self.properties_max = min(properties_max, PROPERTIES_MAX)
        self.frame_max = frame_max

    cdef int reserve(self, Py_ssize_t used, Py_ssize_t more) except -1:
        """Room for so many bytes behind those used."""
        if used + more <= self.room:
            return 0
        cdef Py_ssize_t room = 2 * (used + more)
        cdef byte *grown = <byte *>PyMem_Realloc(self.records, room)
        if grown == NULL:
            raise MemoryError
        self.records, self.room = grown, room
        return 0

    cdef str text_of(self, const byte *name, Py_ssize_t size):
        """A topic's name as the tables have it, the one before without being made again."""
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
        """A record up to its properties, for the end of the queue and of the turn."""
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
        """The record just laid out stands in its queue, and the turn goes on behind it."""
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
        """With the ids of the messages whose `places` are known."""
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
        """The records laid out become a part of the turn, their bodies are counted."""
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
        cdef int index = bits(size)
        self.counts[index] += 1
        if index > self.longest:
            self.longest = index

    cdef Py_ssize_t single(
        self, TopicState topic, QueueState queue, Header *header, const byte *body,
        Py_ssize_t body_size, const byte *born_host, Py_ssize_t used,
    ) except -2:
        """Lays out a message behind what is `used`; returns what is used then, -1 when it has no
        room here."""
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
        """Lays out the messages of a batch, all or none, behind what is `used`; returns how many,
        and their `places`. -1 when it is not plain, or has no room here."""
        cdef const byte *at = data
        cdef const byte *end = data + data_size
        cdef Py_ssize_t suffix_size = PyBytes_GET_SIZE(self.suffix)
        cdef Py_ssize_t needed = 0, count = 0, index, last_size = 0
        cdef Py_ssize_t size, body_size, own_size, stored_size
        cdef Properties each
        cdef const byte *last_tag = NULL
        cdef long long tag = 0
        cdef long long *grown
        while at < end:  # does everything agree, and is it plain?
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
        """May the request be answered from here?"""
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
        """Takes the plain sends that stand in `data` from `position` on; returns where it stopped.
        HOT."""
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
                count = 1 if header.is_brief else count  # of the ids
                answers.append(b"" if header.flag else self.answer_to(&header, count, offset))
                position += total + 4
        finally:  # whatever happens, what has its units is written
            if used:
                self.finish(used)
                self.hold(peer, answers)
        return position
