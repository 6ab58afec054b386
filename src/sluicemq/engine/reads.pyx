# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The values of the properties that a filter reads, compiled.

`columns` follows units to the records in one mapped file of the log, finds the values of a few
properties, gives each distinct value a number, and reports odd rows. Its rules for a valid record
are those of `record.arrow.build_block`, and its rules for a property are those of
`record.codec.decode_properties`. They are the reference of this module.

The content of a record is not trusted. No byte is read before it is certain that it is in the map:
position and size in the unit are compared with the map first, and the lengths in a record are
compared with that size. Words of eight bytes are read up to the end of the map.

The properties of a record are read once. Messages of one topic usually have the same names in the
same order. So a name is first compared with the name at the same place in earlier records, usually
by one word of eight bytes; all known names are searched only if that fails. The end of a value is
found eight bytes at a time.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp

import sys

from sluicemq.engine.sends cimport get32, get64
from sluicemq.engine.words cimport Name, find_byte, is_there, set_name, word_at
from sluicemq.record import layout

cdef extern from "Python.h":
    bint PyUnicode_IS_ASCII(object)

cdef extern from *:
    void __builtin_prefetch(const void *) nogil

if sys.byteorder != "little":
    raise ImportError("the compiled reads count bytes from the lowest one of a word")

HEAD = ["size", "magic", "sys_flag", "physical_offset", "body_length"]
assert [layout.RECORD_HEAD.at(name) for name in HEAD] == [0, 4, 36, 28, 84]
assert (layout.RECORD_HEAD.size, layout.UNIT.size, layout.RECORD_BYTES_MIN) == (88, 20, 91)
assert (layout.NAME_END, layout.VALUE_END) == (1, 2)

cdef enum:
    UNIT_BYTES = 20
    HEAD_BYTES = 88
    IPV6_BYTES = 12
    RECORD_BYTES_MIN = 91
    KNOWN_MAX = 64
    AHEAD = 16
    VALUE_END = 2

cdef uint32_t MAGIC_V1 = layout.MAGIC_V1 & 0xFFFFFFFF
cdef uint32_t MAGIC_V2 = layout.MAGIC_V2 & 0xFFFFFFFF
cdef uint64_t FACTOR = 0x9E3779B97F4A7C15


cdef inline int16_t short_at(const uint8_t *at) noexcept nogil:
    return <int16_t>(at[0] << 8 | at[1])


# --- properties


cdef struct Column:
    # The values of one property. `codes` is the number of the value by row. `slots` is a hash table
    # of numbers of values, each plus one. `keys`, `values` and `sizes` describe the distinct values
    # by number.
    int32_t *codes
    int32_t *slots
    uint64_t *keys
    const uint8_t **values
    int32_t *sizes
    int32_t count


cdef inline const uint8_t *properties_of(const uint8_t *at, int32_t size, int64_t position,
                                         Py_ssize_t *length) noexcept nogil:
    """Return the position of the properties of a record, and set `length` to their size.

    `size` and `position` are those in the unit. Return NULL if there is no valid record at `at`.
    """
    cdef const uint8_t *end = at + size
    cdef uint32_t magic = get32(at + 4)
    cdef int32_t flags = <int32_t>get32(at + 36), body
    cdef int topic
    if <int32_t>get32(at) != size or <int64_t>get64(at + 28) != position:
        return NULL
    cdef Py_ssize_t head = HEAD_BYTES
    head += (IPV6_BYTES if flags & 0x10 else 0) + (IPV6_BYTES if flags & 0x20 else 0)
    if size < head + 3:
        return NULL
    body = <int32_t>get32(at + head - 4)
    if body < 0 or body > size - head - 3:
        return NULL
    at += head + body
    if magic == MAGIC_V1:
        topic = at[0]
        at += 1
    elif magic == MAGIC_V2:
        topic = short_at(at)
        at += 2
    else:
        return NULL
    if topic < 0 or end - at < topic + 2:
        return NULL
    at += topic
    length[0] = short_at(at)
    at += 2
    return at if length[0] >= 0 and end - at == length[0] else NULL


cdef inline void number(Column *column, Py_ssize_t row, uint32_t mask, const uint8_t *value,
                        Py_ssize_t size, const uint8_t *limit) noexcept nogil:
    """Set the code of a row to the number of its value, which gets the next number if it is new."""
    cdef uint64_t key = word_at(value, limit), mixed
    cdef Py_ssize_t at
    cdef uint32_t slot
    cdef int32_t known
    if size < 8:
        key &= (<uint64_t>1 << (size << 3)) - 1
    else:
        for at in range(8, size - 7, 8):
            key = (key ^ (key >> 29)) * FACTOR ^ word_at(value + at, limit)
        if size & 7:  # the last word overlaps the word before it
            key = (key ^ (key >> 29)) * FACTOR ^ word_at(value + size - 8, limit)
    mixed = (key ^ <uint64_t>size) * FACTOR
    slot = <uint32_t>(mixed >> 32) & mask
    while True:
        known = column.slots[slot] - 1
        if known < 0:
            break
        if column.keys[known] == key and column.sizes[known] == size and (
            size <= 8 or memcmp(column.values[known], value, size) == 0
        ):
            column.codes[row] = known
            return
        slot = (slot + 1) & mask
    known = column.count
    column.slots[slot] = known + 1
    column.keys[known] = key
    column.values[known] = value
    column.sizes[known] = <int32_t>size
    column.codes[row] = known
    column.count = known + 1


cdef class _Walk:
    """The columns that are being filled, and the known names in the order of records.

    At most `KNOWN_MAX` names are known. `mask` is the number of slots of each hash table minus one.
    """

    cdef Column *wanted
    cdef Name names[KNOWN_MAX]
    cdef int count, known
    cdef uint32_t mask
    cdef tuple texts
    cdef list arrays

    def __cinit__(self, tuple texts, Py_ssize_t rows):
        cdef uint32_t slots = 16
        cdef int turn
        cdef Column *column
        self.texts, self.arrays = texts, []
        self.count = <int>len(texts)
        while slots < 2 * rows:
            slots *= 2
        self.mask = slots - 1
        self.wanted = <Column *>calloc(self.count, sizeof(Column))
        if self.wanted == NULL:
            raise MemoryError
        # A name may occur twice in a record, and both values may be new. So each table has more
        # slots than there are rows; `walk` raises OverflowError before a table is full.
        for turn in range(self.count):
            column = &self.wanted[turn]
            codes = PyByteArray_FromStringAndSize(b"\xff" * (4 * rows), 4 * rows)
            self.arrays.append(codes)
            column.codes = <int32_t *>PyByteArray_AS_STRING(codes)
            column.slots = <int32_t *>calloc(slots, sizeof(int32_t))
            column.keys = <uint64_t *>malloc(slots * sizeof(uint64_t))
            column.values = <const uint8_t **>malloc(slots * sizeof(void *))
            column.sizes = <int32_t *>malloc(slots * sizeof(int32_t))
            if not (column.slots and column.keys and column.values and column.sizes):
                raise MemoryError

    def __dealloc__(self):
        cdef int turn
        if self.wanted != NULL:
            for turn in range(self.count):
                free(self.wanted[turn].slots)
                free(self.wanted[turn].keys)
                free(self.wanted[turn].values)
                free(self.wanted[turn].sizes)
            free(self.wanted)

    cdef int meet(self, const uint8_t *at, Py_ssize_t size, const uint8_t *limit) except -2:
        """Add a name, of `size` bytes with its separator, to the known names if there is room.

        Return the number of its column, or -1 if the filter does not read it.
        """
        cdef int found = -1
        text = at[: size - 1]
        if text in self.texts:
            found = <int>self.texts.index(text)
        if self.known < KNOWN_MAX:
            set_name(&self.names[self.known], at, size, limit, found)
            self.known += 1
        return found

    cdef int walk(self, Py_ssize_t row, const uint8_t *at, const uint8_t *end,
                  const uint8_t *limit) except -1:
        """Read the properties of one record, which are in [at, end), into the columns.

        Raises OverflowError if repeated names fill a hash table.
        """
        cdef int turn = 0, other, wanted
        cdef const uint8_t *behind
        cdef uint64_t word
        while at < end:
            word = word_at(at, limit)
            if turn >= self.known or not is_there(&self.names[turn], at, end, word):
                turn = self.known
                for other in range(self.known):
                    if is_there(&self.names[other], at, end, word):
                        turn = other
                        break
            if turn < self.known:
                wanted = self.names[turn].wanted
                at += self.names[turn].size
                turn += 1
            else:
                behind = at
                while behind < end and behind[0] > 2 or behind < end and behind[0] == 0:
                    behind += 1
                if behind == end or behind[0] == 2:  # a property without a value
                    at = behind + 1
                    turn = 0
                    continue
                wanted = -1
                if behind > at:
                    wanted = self.meet(at, behind + 1 - at, limit)
                at = behind + 1
                turn = self.known
            behind = find_byte(at, end, limit, VALUE_END)
            if wanted >= 0 and behind > at:
                if self.wanted[wanted].count > <int32_t>self.mask // 2 + 1:
                    raise OverflowError  # names occur twice in too many rows
                number(&self.wanted[wanted], row, self.mask, at, behind - at, limit)
            at = behind + 1
        return 0

    def found(self):
        """Return (codes, values, whether all values are ASCII), with an element for each name."""
        cdef int turn
        cdef int32_t code
        cdef Column *column
        cdef bint is_ascii = True
        values = []
        for turn in range(self.count):
            column, texts = &self.wanted[turn], []
            for code in range(column.count):
                text = PyUnicode_DecodeUTF8(
                    <const char *>column.values[code], column.sizes[code], "replace"
                )
                is_ascii = is_ascii and PyUnicode_IS_ASCII(text)
                texts.append(text)
            values.append(texts)
        return self.arrays, values, is_ascii


def columns(
    const uint8_t[::1] units, const uint8_t[::1] view, int64_t base, tuple names,
):
    """Return the values of the properties `names` for the records of `units`.

    `view` is the data of a log file that begins at position `base`. `names` are bytes. The result
    is (codes, values, is_ascii, odd). For each name, `codes` contains a bytearray with an int32 by
    row, the number of its value or -1 for none, and `values` contains the list of values by
    number. If `is_ascii` is false, different numbers may have equal values, because bytes that are
    not UTF-8 were replaced. `odd` are the rows without a valid record in the file. Raises
    OverflowError if names occur twice in too many rows.
    """
    cdef Py_ssize_t rows = units.shape[0] // UNIT_BYTES, row, length = 0, ahead
    cdef int64_t position, room = view.shape[0]
    cdef int32_t size
    cdef const uint8_t *log
    cdef const uint8_t *found
    cdef _Walk walk = _Walk(names, rows)
    odd = []
    if not rows or not room:
        return (*walk.found(), list(range(rows)))
    log = &view[0]
    for row in range(rows):
        ahead = row + AHEAD
        if ahead < rows:
            position = <int64_t>get64(&units[ahead * UNIT_BYTES]) - base
            size = <int32_t>get32(&units[ahead * UNIT_BYTES + 8])
            if 0 <= position <= room - 256 and RECORD_BYTES_MIN <= size < room - position:
                __builtin_prefetch(log + position)
                __builtin_prefetch(log + position + 84)
                __builtin_prefetch(log + position + size - 64)
                __builtin_prefetch(log + position + size - 128)
                if size > 256:
                    __builtin_prefetch(log + position + size - 192)
                    __builtin_prefetch(log + position + size - 256)
        position = <int64_t>get64(&units[row * UNIT_BYTES])
        size = <int32_t>get32(&units[row * UNIT_BYTES + 8])
        found = NULL
        if size >= RECORD_BYTES_MIN and base <= position and position - base <= room - size:
            found = properties_of(log + (position - base), size, position, &length)
        if found == NULL:
            odd.append(row)
        else:
            walk.walk(row, found, found + length, log + room)
    return (*walk.found(), odd)
