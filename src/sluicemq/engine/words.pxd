# Inline functions with which the compiled modules search in encoded properties, eight bytes at a
# time. A word is eight bytes as a number, the first byte lowest.

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcmp, memcpy


cdef extern from *:
    int __builtin_ctzll(unsigned long long) nogil


cdef inline uint64_t word_at(const uint8_t *at, const uint8_t *limit) noexcept nogil:
    """Return the word at `at`, with zeros from `limit` on."""
    cdef uint64_t value = 0
    if limit - at >= 8:
        memcpy(&value, at, 8)
    elif limit > at:
        memcpy(&value, at, limit - at)
    return value


cdef inline const uint8_t *find_byte(const uint8_t *at, const uint8_t *end, const uint8_t *limit,
                                     uint64_t byte) noexcept nogil:
    """Return the position of the first `byte` in [at, end), or `end`.

    Bytes up to `limit` may be read.
    """
    cdef uint64_t zeros, marks
    cdef uint64_t ones = 0x0101010101010101
    cdef uint64_t highs = 0x8080808080808080
    cdef uint64_t repeated = byte * ones
    while at < end:
        zeros = word_at(at, limit) ^ repeated
        marks = (zeros - ones) & ~zeros & highs
        if marks:
            at += __builtin_ctzll(marks) >> 3
            return at if at < end else end
        at += 8
    return end


cdef struct Name:
    # The name of a property with the separator byte behind it, and its first eight bytes as `word`
    # under `mask`. `wanted` is the number of its column, -1 if no column of it is requested.
    uint64_t word
    uint64_t mask
    const uint8_t *text
    Py_ssize_t size
    int wanted


cdef inline void set_name(Name *name, const uint8_t *at, Py_ssize_t size, const uint8_t *limit,
                          int wanted) noexcept nogil:
    """Describe the name of `size` bytes, with its separator, at `at`."""
    name.word = word_at(at, limit)
    name.text = at
    name.size = size
    name.wanted = wanted
    name.mask = ~<uint64_t>0
    if size < 8:
        name.mask = (<uint64_t>1 << (size << 3)) - 1


cdef inline bint is_there(const Name *name, const uint8_t *at, const uint8_t *end,
                          uint64_t word) noexcept nogil:
    """Return whether the name is at `at`, where `word` is."""
    if (word ^ name.word) & name.mask or end - at < name.size:
        return False
    return name.size <= 8 or memcmp(at + 8, name.text + 8, name.size - 8) == 0
