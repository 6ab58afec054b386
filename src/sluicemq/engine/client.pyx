# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The client's side of plain sends, and decoding of pulled records, compiled.

`start` writes the frame of a send up to its body. `settle` completes the calls that wait for the
answers of sends. `decode` decodes a record. For any other form of their input they return None, or
stop before it, and the general path handles it: `client.core.messages`, `client.core.requests`,
`wire.frames` and `record.codec`.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII, PyUnicode_DecodeUTF8
from libc.string cimport memchr, memcmp, memcpy

import orjson

from sluicemq.engine.sends cimport (
    get32, get64, number_text, plain_text, put32, put_bytes, put_number,
)
from sluicemq.model.bodies import BODY_BYTES_MAX
from sluicemq.model.ids import decode_host
from sluicemq.model.message import StoredMessage
from sluicemq.record import layout

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL
    int PyObject_GenericSetAttr(object owner, object name, object value) except -1

ctypedef unsigned char byte

assert (layout.RECORD_HEAD.size, layout.RECORD_HEAD.at("body_length")) == (88, 84)

cdef enum:
    HEAD_BYTES = 88
    ODD_FLAGS = 0x31  # a compressed body, or IPv6 hosts
    FRAME_BYTES_MAX = 16777216
    DIGITS_MAX = 20
    SEND = 310
    RESPONSE = 1
    CODE = 1, FLAG = 2, LANGUAGE = 4, OPAQUE = 8, VERSION = 16
    PLACE = 32, QUEUE_ID = 64, QUEUE_OFFSET = 128, FIELDS = 256
    NEEDED = 511, HANDLE = 512

cdef unsigned int magic_v1 = layout.MAGIC_V1 & 0xFFFFFFFF

# --------------------------------------------------------------------------------------- sending


def start(tuple around, long long born_time_ms, str properties, long long opaque, Py_ssize_t size):
    """Return the same bytes as `client.core.messages.encode_send_start`, or None.

    None also means that the properties contain characters with other escapes than \\u0001 and
    \\u0002, or that a number is negative.
    """
    cdef bytes before = around[0], behind = around[1], end = around[2], made
    cdef Py_ssize_t length, index, room
    cdef const char *text
    cdef byte *to
    cdef byte *first
    cdef byte c
    try:
        text = PyUnicode_AsUTF8AndSize(properties, &length)
    except UnicodeEncodeError:
        return None
    if born_time_ms < 0 or opaque < 0:
        return None
    room = PyBytes_GET_SIZE(before) + PyBytes_GET_SIZE(behind) + PyBytes_GET_SIZE(end)
    room += 8 + 2 * DIGITS_MAX + 16 + 6 * length
    made = PyBytes_FromStringAndSize(NULL, room)
    first = <byte *>PyBytes_AS_STRING(made)
    to = put_number(put_bytes(first + 8, before), born_time_ms)
    memcpy(to, b'","h":"0","i":"', 15)
    to += 15
    for index in range(length):
        c = <byte>text[index]
        if c >= 32 and c != 34 and c != 92:
            to[0] = c
            to += 1
        elif c == 1 or c == 2:
            memcpy(to, b"\\u000", 5)
            to[5] = 48 + c
            to += 6
        else:
            return None
    to[0] = 34
    to = put_bytes(put_number(put_bytes(to + 1, behind), opaque), end)
    length = to - first - 8
    if 4 + length + size > FRAME_BYTES_MAX:
        return None
    put32(first, 4 + length + size)
    put32(first + 4, length)
    return PyBytes_FromStringAndSize(<char *>first, 8 + length)


# --------------------------------------------------------------------------------------- answers

# The parts of an answer that have been read. `seen` is a set of the bits above; `place` is the
# offset message id, and `handle` the recall handle. Pointers point into the data that was read.

cdef struct Found:
    int seen
    long long code, flag, opaque, version, queue_id, queue_offset
    const byte *place
    Py_ssize_t place_size
    const byte *handle
    Py_ssize_t handle_size


@cython.no_gc
@cython.freelist(256)
cdef class Answer:
    """The successful response to a send, with the attributes of `wire.frames.Command`.

    `fields` are parsed when they are read.
    """

    cdef public int code, flag, opaque, version, serialization
    cdef readonly bint is_response, is_oneway
    cdef public object remark, language, body
    cdef bytes data
    cdef Py_ssize_t begin, end
    cdef Found found

    def start(self):
        """Return None, as `wire.frames.Command.start` does for a request without cached bytes."""
        return None

    @property
    def fields(self):
        return orjson.loads(self.data[self.begin:self.end])["extFields"]

    def result(self, kind, status, message_id, queue):
        """Return the `SendResult` of the one message that was sent.

        `kind` is the class SendResult. `queue` is the queue that the client selected; the result
        has the queue id that the broker reports.
        """
        cdef Found *found = &self.found
        if found.queue_id != queue.queue_id:
            queue = queue._replace(queue_id=found.queue_id)
        place = PyUnicode_DecodeASCII(<char *>found.place, found.place_size, NULL)
        handle = None
        if found.seen & HANDLE:
            handle = PyUnicode_DecodeASCII(<char *>found.handle, found.handle_size, NULL)
        values = status, message_id, place, queue, found.queue_offset, handle
        return filled(kind, kind.__slots__, values)


cdef object filled(kind, tuple names, tuple values):
    """Return an instance of the frozen dataclass `kind` with slots, whose fields are `values`."""
    cdef Py_ssize_t index
    made = kind.__new__(kind)
    for index in range(len(values)):
        PyObject_GenericSetAttr(made, names[index], values[index])
    return made


cdef inline int is_key(const byte *key, Py_ssize_t size, const char *name, Py_ssize_t length) noexcept:
    return size == length and memcmp(key, name, length) == 0


cdef const byte *take_fields(const byte *at, const byte *end, Found *found) noexcept:
    """Read the extFields, which begin at `at` behind their brace, into `found`.

    Return the position behind their closing brace, or NULL if they are not plain.
    """
    cdef const byte *key
    cdef const byte *value
    cdef const byte *number
    cdef Py_ssize_t size
    cdef int bit
    while True:
        if at >= end or at[0] != 34:
            return NULL
        key = at + 1
        at = plain_text(key, end)
        if at == NULL or end - at < 4 or at[1] != 58 or at[2] != 34:
            return NULL
        size, value = at - key, at + 3
        at = plain_text(value, end)
        if at == NULL or end - at < 2:
            return NULL
        bit, number = 0, at
        if is_key(key, size, "msgId", 5):
            bit, found.place, found.place_size = PLACE, value, at - value
            if memchr(value, 44, at - value) != NULL:
                return NULL  # the ids of a batch, joined by commas
        elif is_key(key, size, "queueId", 7):
            bit, number = QUEUE_ID, number_text(value, end, &found.queue_id)
        elif is_key(key, size, "queueOffset", 11):
            bit, number = QUEUE_OFFSET, number_text(value, end, &found.queue_offset)
        elif is_key(key, size, "recallHandle", 12):
            bit, found.handle, found.handle_size = HANDLE, value, at - value
        if found.seen & bit or number != at:
            return NULL
        found.seen |= bit
        if at[1] == 125:
            return at + 2
        if at[1] != 44:
            return NULL
        at += 2


cdef int take(const byte *at, const byte *end, Found *found) noexcept:
    """Read a JSON header into `found`.

    Return whether it is the header of a plain, successful answer to a send.
    """
    cdef const byte *key
    cdef Py_ssize_t size
    cdef int bit
    cdef long long number
    found.seen = 0
    if at >= end or at[0] != 123:
        return 0
    while True:
        at += 1  # skip the brace or comma
        if at >= end or at[0] != 34:
            return 0
        key = at + 1
        at = plain_text(key, end)
        if at == NULL or end - at < 4 or at[1] != 58:
            return 0
        size, bit = at - key, 0
        at += 2
        if at[0] == 123:
            if not is_key(key, size, "extFields", 9):
                return 0
            bit, at = FIELDS, take_fields(at + 1, end, found)
        elif at[0] == 34:
            if is_key(key, size, "language", 8):
                if end - at < 7 or memcmp(at, b'"JAVA"', 6) != 0:
                    return 0
                bit = LANGUAGE
            elif not is_key(key, size, "serializeTypeCurrentRPC", 23):
                return 0
            at = plain_text(at + 1, end)
            if at != NULL:
                at += 1
        else:
            at = number_text(at, end, &number)
            if is_key(key, size, "code", 4):
                bit, found.code = CODE, number
            elif is_key(key, size, "flag", 4):
                bit, found.flag = FLAG, number
            elif is_key(key, size, "opaque", 6):
                bit, found.opaque = OPAQUE, number
            elif is_key(key, size, "version", 7):
                bit, found.version = VERSION, number
            else:
                return 0
            if number > 0x7FFFFFFF:
                return 0
        if at == NULL or at >= end or found.seen & bit:
            return 0
        found.seen |= bit
        if at[0] == 125:
            break
        if at[0] != 44:
            return 0
    is_plain = found.seen & NEEDED == NEEDED and found.code == 0 and found.flag == RESPONSE
    return is_plain and at + 1 == end


def settle(bytes data, dict calls):
    """Complete the calls of the plain send answers at the beginning of `data`.

    `calls` is opaque -> call of `net.channel`; completed calls are removed. Return the index in
    `data` at which the first other or incomplete frame begins.
    """
    cdef const byte *first = <const byte *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t at = 0, size = PyBytes_GET_SIZE(data), total
    cdef Found found
    cdef Answer answer
    cdef tuple call
    while size - at >= 8:
        total = get32(first + at)
        if total > size - at - 4 or get32(first + at + 4) + 4 != total:
            break  # an incomplete frame, a header that is not JSON, or a body
        if not take(first + at + 8, first + at + 4 + total, &found):
            break
        waiting = calls.get(found.opaque)
        if waiting is None:
            break
        call = waiting
        if call[1] != SEND:
            break
        del calls[found.opaque]
        answer = Answer.__new__(Answer)
        answer.flag, answer.is_response, answer.opaque = RESPONSE, True, found.opaque
        answer.version, answer.language, answer.body = found.version, "JAVA", b""
        answer.data, answer.begin, answer.end = data, at + 8, at + 4 + total
        answer.found = found
        at += 4 + total
        future = call[0]
        if not future.done():
            future.set_result(answer)
    return at


# --------------------------------------------------------------------------------------- records


cdef Py_ssize_t plain_size(const byte *at, Py_ssize_t left) noexcept:
    """Return the size of the record at `at`, or 0 if it is not plain or not whole.

    `left` is the number of bytes from `at` on. A plain record has a topic of at most 255 bytes, an
    uncompressed body, and IPv4 hosts.
    """
    cdef Py_ssize_t size, topic, properties, length
    if left < HEAD_BYTES + 3 or get32(at + 4) != magic_v1 or get32(at + 36) & ODD_FLAGS:
        return 0
    size, length = get32(at), get32(at + 84)
    if size > left or length > size - HEAD_BYTES - 3:
        return 0
    topic = HEAD_BYTES + length + 1
    properties = topic + at[topic - 1] + 2
    if properties > size:
        return 0
    length = at[properties - 2] << 8 | at[properties - 1]
    return size if length < 32768 and properties + length == size else 0


cdef dict properties_of(const byte *at, const byte *end):
    """Return the properties in [at, end), as `record.codec.decode_properties` does."""
    cdef dict found = {}
    cdef const byte *stop
    cdef const byte *middle
    while at < end:
        stop = <const byte *>memchr(at, 2, end - at)
        if stop == NULL:
            stop = end
        middle = <const byte *>memchr(at, 1, stop - at)
        if middle != NULL and middle > at and middle + 1 < stop:
            name = PyUnicode_DecodeUTF8(<char *>at, middle - at, "replace")
            found[name] = PyUnicode_DecodeUTF8(<char *>middle + 1, stop - middle - 1, "replace")
        at = stop + 1
    return found


def decode(bytes data, str broker):
    """Return the message of a whole record, as `record.codec.decode_record` does.

    `broker` is the name of the broker that stored it. Return None if the record is not plain.
    """
    cdef const byte *at = <const byte *>PyBytes_AS_STRING(data)
    cdef const byte *topic
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), length
    if not size or plain_size(at, size) != size:
        return None
    length = get32(at + 84)
    topic = at + HEAD_BYTES + length + 1
    return filled(
        StoredMessage, StoredMessage.__slots__, (
            PyUnicode_DecodeUTF8(<char *>topic, (topic - 1)[0], "replace"),
            <int>get32(at + 12), <long long>get64(at + 20), <long long>get64(at + 28), size,
            PyBytes_FromStringAndSize(<char *>at + HEAD_BYTES, length),
            properties_of(topic + (topic - 1)[0] + 2, at + size),
            <int>get32(at + 16), <int>get32(at + 36),
            <long long>get64(at + 40), decode_host(data[48:56]),
            <long long>get64(at + 56), decode_host(data[64:72]),
            <int>get32(at + 72), <long long>get64(at + 76), <int>get32(at + 8), broker,
            BODY_BYTES_MAX, None,
        )
    )
