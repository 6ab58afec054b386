# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The keys of the records in a log file for the key index, compiled.

`read` does for one record after the other what `store.index.columns` does with NumPy for thousands
at once. It follows records by their sizes, finds UNIQ_KEY and the keys in KEYS among the
properties, and hashes `topic#key` as Java hashes strings. It returns None if a record is malformed;
the general path in `store.index.columns` then handles the file.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp

from sluicemq.engine.sends cimport get32, get64
from sluicemq.record import layout

ctypedef unsigned char byte

assert layout.RECORD_BYTES_MIN == 91

cdef enum:
    RECORD_BYTES_MIN = 91
    ROLLBACK = 0xC
    BORN_HOST_IPV6 = 0x10
    STORE_HOST_IPV6 = 0x20
    MORE_BYTES = 12  # an IPv6 host is longer than an IPv4 host by this

cdef unsigned int magic_v1 = layout.MAGIC_V1 & 0xFFFFFFFF
cdef unsigned int magic_v2 = layout.MAGIC_V2 & 0xFFFFFFFF
cdef unsigned int magic_blank = layout.MAGIC_BLANK & 0xFFFFFFFF


cdef int hash_on(unsigned int *value, const byte *text, Py_ssize_t size) noexcept nogil:
    """Continue a hash with a text, over its UTF-16 code units as Java does.

    `value` points to the hash, which is replaced. Return 0, or -1 if the text is not UTF-8.
    """
    cdef unsigned int found = value[0], point
    cdef Py_ssize_t at = 0, more, index
    cdef byte c
    while at < size:
        c = text[at]
        at += 1
        if c < 0x80:
            found = 31 * found + c
            continue
        if c < 0xC2 or c > 0xF4:
            return -1
        more = 1 if c < 0xE0 else 2 if c < 0xF0 else 3
        point = c & (0x3F >> more)
        if size - at < more:
            return -1
        for index in range(more):
            if text[at] & 0xC0 != 0x80:
                return -1
            point = point << 6 | (text[at] & 0x3F)
            at += 1
        if more == 2 and (point < 0x800 or 0xD800 <= point < 0xE000):
            return -1
        if more == 3:
            if point < 0x10000 or point > 0x10FFFF:
                return -1
            point -= 0x10000
            found = 31 * found + (0xD800 + (point >> 10))
            point = 0xDC00 + (point & 0x3FF)
        found = 31 * found + point
    value[0] = found
    return 0


cdef inline unsigned int unsigned_of(unsigned int value) noexcept nogil:
    """Return the absolute value of a hash as a signed number, as the key index stores it.

    The smallest signed number, which has no positive counterpart, becomes 0.
    """
    if value == <unsigned int>1 << 31:
        return 0
    return -value if value >> 31 else value


# The keys found so far, as columns: their hashes, the numbers of their records, and store times.
# `room` is the number of keys for which memory is allocated.
cdef struct Keys:
    int *hashes
    long long *records
    long long *times
    Py_ssize_t count, room


cdef int add(Keys *keys, unsigned int value, long long record, long long time) noexcept nogil:
    """Append a key. Return 0, or -1 if there is no room."""
    if keys.count == keys.room:
        return -1
    keys.hashes[keys.count] = <int>unsigned_of(value)
    keys.records[keys.count] = record
    keys.times[keys.count] = time
    keys.count += 1
    return 0


cdef int keys_of(
    const byte *record, Py_ssize_t size, long long number, Keys *keys, const byte **last_topic,
    Py_ssize_t *last_size, unsigned int *last_hash,
) noexcept nogil:
    """Append the keys of one record, whose number is `number`.

    `last_topic`, `last_size` and `last_hash` cache the hash of `topic#` of the last record with
    keys. Return 0, or -1 if lengths contradict each other, a text is not UTF-8, or there is no
    room.
    """
    cdef unsigned int flag = get32(record + 36), value, prefix
    cdef Py_ssize_t hosts = MORE_BYTES if flag & BORN_HOST_IPV6 else 0
    cdef const byte *p = record + 56 + hosts
    cdef const byte *end = record + size
    cdef const byte *topic
    cdef const byte *stop
    cdef const byte *unique = NULL
    cdef const byte *words = NULL
    cdef Py_ssize_t unique_size = 0, words_size = 0, topic_size, length
    cdef long long time = <long long>get64(p)
    hosts += MORE_BYTES if flag & STORE_HOST_IPV6 else 0
    if flag & ROLLBACK == ROLLBACK:
        return 0
    p = record + 84 + hosts
    if p + 4 > end:
        return -1
    length = <int>get32(p)
    p += 4
    if length < 0 or length > end - p - 2:
        return -1
    p += length
    topic_size = p[0]
    p += 1
    if get32(record + 4) == magic_v2:
        topic_size = topic_size << 8 | p[0]
        p += 1
    if topic_size > end - p - 2:
        return -1
    topic = p
    p += topic_size
    length = p[0] << 8 | p[1]
    p += 2
    if p + length != end:
        return -1
    while p < end:
        stop = p
        while stop < end and stop[0] != 2:
            stop += 1
        length = stop - p
        if length > 9 and not memcmp(p, b"UNIQ_KEY\x01", 9):
            unique, unique_size = p + 9, length - 9
        elif length > 5 and not memcmp(p, b"KEYS\x01", 5):
            words, words_size = p + 5, length - 5
        p = stop + 1
    if unique == NULL and words == NULL:
        return 0
    if topic_size != last_size[0] or memcmp(topic, last_topic[0], topic_size):
        prefix = 0
        if hash_on(&prefix, topic, topic_size):
            return -1
        last_topic[0], last_size[0], last_hash[0] = topic, topic_size, 31 * prefix + 0x23
    if unique != NULL:
        value = last_hash[0]
        if hash_on(&value, unique, unique_size) or add(keys, value, number, time):
            return -1
    p, end = words, words + words_size
    while words != NULL and p < end:
        stop = p
        while stop < end and stop[0] != 0x20:
            stop += 1
        if stop > p:
            value = last_hash[0]
            if hash_on(&value, p, stop - p) or add(keys, value, number, time):
                return -1
        p = stop + 1
    return 0


def read(const byte[::1] view, Py_ssize_t at, Py_ssize_t stop):
    """Return the keys of the records in a log file that begin in [at, stop).

    `at` and `stop` are indexes in `view`, which is the data of the file. The result is
    (starts, end, hashes, records, times_ms). `starts` are the indexes at which the records begin.
    `end` is the index behind the last of them, or the end of the file if its rest has no record.
    `hashes`, `records` and `times_ms` have an element for each key: its hash, the number of its
    record in `starts`, and the store time. All but `end` are bytes: hashes are 32-bit integers of
    the machine, all others 64-bit integers. Return None if the general path must read the file,
    because it is empty or a record is malformed. Raises MemoryError.
    """
    if not view.shape[0]:
        return None
    cdef const byte *data = &view[0]
    cdef Py_ssize_t limit = view.shape[0], end = 0, count = 0, size, room, last_size = -1
    cdef unsigned int magic, last_hash = 0
    cdef const byte *last_topic = NULL
    cdef Keys keys
    room = (min(stop, limit) - at) // RECORD_BYTES_MIN + 1
    keys.room, keys.count = 4 * room, 0
    cdef long long *starts = <long long *>malloc(room * 8)
    keys.hashes = <int *>malloc(keys.room * 4)
    keys.records = <long long *>malloc(keys.room * 8)
    keys.times = <long long *>malloc(keys.room * 8)
    try:
        if not starts or not keys.hashes or not keys.records or not keys.times:
            raise MemoryError
        while at < stop and limit - at >= 8:
            size, magic = <int>get32(data + at), get32(data + at + 4)
            if magic == magic_blank:
                end = limit
                break
            if magic != magic_v1 and magic != magic_v2:
                return None
            if size < RECORD_BYTES_MIN or size > limit - at:
                return None
            if keys_of(data + at, size, count, &keys, &last_topic, &last_size, &last_hash):
                return None
            starts[count] = at
            count += 1
            at += size
        if not end:
            end = at if at >= stop else limit
        return (
            PyBytes_FromStringAndSize(<char *>starts, 8 * count),
            end,
            PyBytes_FromStringAndSize(<char *>keys.hashes, 4 * keys.count),
            PyBytes_FromStringAndSize(<char *>keys.records, 8 * keys.count),
            PyBytes_FromStringAndSize(<char *>keys.times, 8 * keys.count),
        )
    finally:
        free(starts)
        free(keys.hashes)
        free(keys.records)
        free(keys.times)
