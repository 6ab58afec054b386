# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The properties of many messages as buffers of Arrow columns, compiled.

    scan     one pass over the properties of all rows: the buffers of a map column, and where the
             values of some properties are
    gather   values, from their positions to the offsets and data of an Arrow column
    numbers  the same values as whole numbers or doubles

A row without one of the names costs no more than the other rows, because rows are not sorted by
their names. The reference is `record.properties`; rows that it calls odd are reported here, and are
left to it. `tests/property/test_decoding_compiled.py` compares both.

No byte outside of the rows is read, except up to the end of `raw`. Each name is first compared with
the name that followed the previous name in earlier rows.
"""

from cpython.bytearray cimport (
    PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_Resize
)
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

import sys

from sluicemq.engine.words cimport Name, find_byte, is_there, set_name, word_at
from sluicemq.record import layout

cdef extern from "Python.h":
    double PyOS_string_to_double(const char *, char **, void *) except? -1.0

cdef extern from *:
    void __builtin_prefetch(const void *) nogil

if sys.byteorder != "little":
    raise ImportError("the compiled decoder counts bytes from the lowest one of a word")

assert (layout.NAME_END, layout.VALUE_END) == (1, 2)

cdef enum:
    NAME_END = 1
    VALUE_END = 2
    NAMES_MAX = 256  # rows with further names are odd
    SLACK = 16
    AHEAD = 8

MISSING, PARSED, COMPLEX = range(3)
"""The states of a number: there is no value, it is parsed, or only the reference can parse it."""


cdef inline void copy(uint8_t *to, const uint8_t *at, Py_ssize_t size,
                      const uint8_t *limit) noexcept nogil:
    """Copy `size` bytes. Up to `SLACK` bytes are written, even if there are fewer to copy."""
    if size <= SLACK and limit - at >= SLACK:
        memcpy(to, at, SLACK)
    else:
        memcpy(to, at, size)


cdef class _Growing:
    """A bytearray with room for a known number of bytes, which is cut to its content at the end."""

    cdef object array
    cdef uint8_t *data

    def __cinit__(self, Py_ssize_t room):
        self.array = PyByteArray_FromStringAndSize(NULL, room)
        self.data = <uint8_t *>PyByteArray_AS_STRING(self.array)

    cdef object cut(self, Py_ssize_t size):
        """Return the bytearray with only its first `size` bytes."""
        PyByteArray_Resize(self.array, size)
        return self.array


cdef class _Names:
    """The names that rows have, and in which order.

    `last_rows` is, for each name, the last row that has it. `is_hidden` says which names the map
    does not contain.
    """

    cdef Name *names
    cdef int32_t *last_rows
    cdef uint8_t *is_hidden
    cdef int count
    cdef tuple wanted
    cdef frozenset hidden

    def __cinit__(self, tuple wanted, frozenset hidden):
        self.wanted = wanted
        self.hidden = hidden
        self.names = <Name *>calloc(NAMES_MAX, sizeof(Name))
        self.last_rows = <int32_t *>calloc(NAMES_MAX, sizeof(int32_t))
        self.is_hidden = <uint8_t *>calloc(NAMES_MAX, 1)
        if not (self.names and self.last_rows and self.is_hidden):
            raise MemoryError

    def __dealloc__(self):
        free(self.names)
        free(self.last_rows)
        free(self.is_hidden)

    cdef int add(self, const uint8_t *at, Py_ssize_t size, const uint8_t *limit) except -2:
        """Add the name of `size` bytes, with its separator, and return its number.

        Return -1 if it is not UTF-8 or if there are too many names.
        """
        text = at[: size - 1]
        if self.count == NAMES_MAX:
            return -1
        try:
            text.decode()
        except UnicodeDecodeError:
            return -1
        wanted = self.wanted.index(text) if text in self.wanted else -1
        set_name(&self.names[self.count], at, size, limit, wanted)
        self.is_hidden[self.count] = text in self.hidden
        self.last_rows[self.count] = -1
        self.count += 1
        return self.count - 1

    cdef int find(self, const uint8_t *at, const uint8_t *end, const uint8_t *limit,
                  int expected) except -2:
        """Return the number of the name at `at`, which is added if it is new.

        `expected` is the number that is tried first, then those that follow. Return -1 if there is
        no valid name.
        """
        cdef uint64_t word = word_at(at, limit)
        cdef int number
        cdef const uint8_t *name_end
        for number in range(expected, self.count):
            if is_there(&self.names[number], at, end, word):
                return number
        for number in range(min(expected, self.count)):
            if is_there(&self.names[number], at, end, word):
                return number
        name_end = find_byte(at, end, limit, NAME_END)
        if name_end == end or name_end == at:
            return -1
        if find_byte(at, name_end, limit, VALUE_END) != name_end:
            return -1
        return self.add(at, name_end + 1 - at, limit)


def scan(
    const uint8_t[::1] raw, const int64_t[::1] starts, const int64_t[::1] lengths,
    tuple wanted, bint with_map, frozenset hidden,
):
    """Read the properties of all rows, which are `lengths[i]` bytes of `raw` from `starts[i]` on.

    The result is (map, spans, odd).

    - `map` is (entry offsets, name offsets, names, value offsets, values): the buffers of an Arrow
      map column without the names in `hidden`; offsets are int32. It is None unless `with_map`.
    - `spans` has (starts, lengths) for each of the names `wanted`, which are bytes: where the value
      of each row begins in `raw`, as int64, and its length, as int32. A row without the property
      has the start -1 and the length 0.
    - `odd` lists the rows that only the reference can read. They have no entries in the map and no
      values.

    Raises ValueError if a row is not inside of `raw`.
    """
    cdef Py_ssize_t rows = starts.shape[0], row, size = raw.shape[0], property_bytes = 0
    cdef Py_ssize_t entries_max, entry = 0, name_bytes = 0, value_bytes = 0
    cdef Py_ssize_t row_entry, row_name_bytes, row_value_bytes
    cdef int number, expected, column, column_count = <int>len(wanted)
    cdef const uint8_t *base
    cdef const uint8_t *limit
    cdef const uint8_t *at
    cdef const uint8_t *end
    cdef const uint8_t *value
    cdef Name *name
    cdef bint is_odd
    cdef int64_t **span_starts = NULL
    cdef int32_t **span_lengths = NULL

    if lengths.shape[0] != rows:
        raise ValueError("starts and lengths must have the same number of rows")
    for row in range(rows):
        if starts[row] < 0 or lengths[row] < 0 or starts[row] > size - lengths[row]:
            raise ValueError(f"row {row} is not inside of the buffer")
        property_bytes += lengths[row]
    entries_max = property_bytes // 4 + rows + 1  # an entry has at least four bytes, but the last
    if property_bytes + SLACK > 0x7FFFFFFF:
        raise ValueError("the properties have more bytes than Arrow's offsets can count")

    names = _Names(wanted, hidden)
    entry_offsets = _Growing(4 * (rows + 1))
    name_offsets = _Growing(4 * (entries_max + 1) if with_map else 4)
    value_offsets = _Growing(4 * (entries_max + 1) if with_map else 4)
    name_data = _Growing(property_bytes + SLACK if with_map else SLACK)
    value_data = _Growing(property_bytes + SLACK if with_map else SLACK)
    cdef int32_t *entry_offset = <int32_t *>entry_offsets.data
    cdef int32_t *name_offset = <int32_t *>name_offsets.data
    cdef int32_t *value_offset = <int32_t *>value_offsets.data
    cdef uint8_t *name_target = name_data.data
    cdef uint8_t *value_target = value_data.data
    spans = []
    odd = []
    span_starts = <int64_t **>calloc(column_count + 1, sizeof(int64_t *))
    span_lengths = <int32_t **>calloc(column_count + 1, sizeof(int32_t *))
    try:
        if not (span_starts and span_lengths):
            raise MemoryError
        for column in range(column_count):
            start_array = PyByteArray_FromStringAndSize(NULL, 8 * rows)
            length_array = PyByteArray_FromStringAndSize(NULL, 4 * rows)
            span_starts[column] = <int64_t *>PyByteArray_AS_STRING(start_array)
            span_lengths[column] = <int32_t *>PyByteArray_AS_STRING(length_array)
            memset(span_starts[column], 0xFF, 8 * rows)
            memset(span_lengths[column], 0, 4 * rows)
            spans.append((start_array, length_array))

        name_offset[0] = value_offset[0] = 0
        base = &raw[0] if size else NULL
        limit = base + size
        for row in range(rows):
            if row + AHEAD < rows:
                at = base + starts[row + AHEAD]
                __builtin_prefetch(at)
                if lengths[row + AHEAD] > 64:
                    __builtin_prefetch(at + 64)
                if lengths[row + AHEAD] > 128:
                    __builtin_prefetch(at + 128)
                if lengths[row + AHEAD] > 192:
                    __builtin_prefetch(at + 192)
            entry_offset[row] = <int32_t>entry
            row_entry, row_name_bytes, row_value_bytes = entry, name_bytes, value_bytes
            at = base + starts[row]
            end = at + lengths[row]
            expected = 0
            is_odd = False
            while at < end:
                number = names.find(at, end, limit, expected)
                if number < 0 or names.last_rows[number] == row:
                    is_odd = True
                    break
                names.last_rows[number] = <int32_t>row
                expected = number + 1
                name = &names.names[number]
                value = at + name.size
                at = find_byte(value, end, limit, VALUE_END)
                if at == value:
                    is_odd = True
                    break
                if name.wanted >= 0:
                    span_starts[name.wanted][row] = value - base
                    span_lengths[name.wanted][row] = <int32_t>(at - value)
                if with_map and not names.is_hidden[number]:
                    copy(name_target + name_bytes, name.text, name.size - 1, limit)
                    name_bytes += name.size - 1
                    copy(value_target + value_bytes, value, at - value, limit)
                    value_bytes += at - value
                    entry += 1
                    name_offset[entry] = <int32_t>name_bytes
                    value_offset[entry] = <int32_t>value_bytes
                at += 1
            if is_odd:
                odd.append(row)
                entry, name_bytes, value_bytes = row_entry, row_name_bytes, row_value_bytes
                for column in range(column_count):
                    span_starts[column][row] = -1
                    span_lengths[column][row] = 0
        entry_offset[rows] = <int32_t>entry
    finally:
        free(span_starts)
        free(span_lengths)
    if not with_map:
        return None, spans, odd
    map_buffers = (
        entry_offsets.array,
        name_offsets.cut(4 * (entry + 1)),
        name_data.cut(name_bytes),
        value_offsets.cut(4 * (entry + 1)),
        value_data.cut(value_bytes),
    )
    return map_buffers, spans, odd


def gather(
    const uint8_t[::1] raw, const int64_t[::1] starts, const int32_t[::1] lengths,
):
    """Copy values behind each other: value i is `lengths[i]` bytes of `raw` from `starts[i]` on.

    The result is (offsets, data, validity): buffers of an Arrow column, with int32 offsets and a
    bit for each value that is not null. A value with a negative start is null. `validity` is None
    if no value is null. Raises ValueError if a value is not inside of `raw`, or if there are more
    bytes than int32 can count.
    """
    cdef Py_ssize_t rows = starts.shape[0], row, size = raw.shape[0], nulls = 0
    cdef int64_t total = 0
    cdef const uint8_t *base = &raw[0] if size else NULL
    cdef const uint8_t *limit = base + size
    if lengths.shape[0] != rows:
        raise ValueError("starts and lengths must have the same number of rows")
    offset_array = PyByteArray_FromStringAndSize(NULL, 4 * (rows + 1))
    cdef int32_t *offsets = <int32_t *>PyByteArray_AS_STRING(offset_array)
    for row in range(rows):
        offsets[row] = <int32_t>total
        if starts[row] < 0:
            nulls += 1
            continue
        if lengths[row] < 0 or starts[row] > size - lengths[row]:
            raise ValueError(f"value {row} is not inside of the buffer")
        total += lengths[row]
        if total > 0x7FFFFFFF - SLACK:
            raise ValueError("the values have more bytes than Arrow's offsets can count")
    offsets[rows] = <int32_t>total

    data = _Growing(total + SLACK)
    cdef uint8_t *target = data.data
    for row in range(rows):
        if row + AHEAD < rows and starts[row + AHEAD] >= 0:
            __builtin_prefetch(base + starts[row + AHEAD])
        if starts[row] >= 0:
            copy(target + offsets[row], base + starts[row], lengths[row], limit)
    validity = None
    cdef uint8_t *bits
    if nulls:
        validity = PyByteArray_FromStringAndSize(NULL, (rows + 7) // 8)
        bits = <uint8_t *>PyByteArray_AS_STRING(validity)
        memset(bits, 0, (rows + 7) // 8)
        for row in range(rows):
            if starts[row] >= 0:
                bits[row >> 3] |= 1 << (row & 7)
    return offset_array, data.cut(total), validity


cdef enum:
    EXACT_DIGITS = 15  # whole numbers of up to 15 digits, and powers of ten up to 10**22, are exact
    TEXT_MAX = 40
    MINUS = 45
    POINT = 46
    ZERO = 48
    NINE = 57

cdef double POWERS[EXACT_DIGITS + 1]
POWERS[0] = 1.0
for _exponent in range(1, EXACT_DIGITS + 1):
    POWERS[_exponent] = POWERS[_exponent - 1] * 10.0


cdef inline bint is_digit(const uint8_t *at, const uint8_t *end) noexcept nogil:
    """Return whether there is a digit at `at`, which may be the end."""
    return at < end and ZERO <= at[0] <= NINE


cdef inline bint parse_whole(const uint8_t *at, const uint8_t *end, int digits_max,
                             int64_t *value) noexcept nogil:
    """Set `value` to the whole number in [at, end), and return whether there is a plain one.

    A plain one has a minus sign or none, and 1 to `digits_max` digits, at most 18.
    """
    cdef bint is_negative = at < end and at[0] == MINUS
    cdef int64_t number = 0
    at += is_negative
    if at == end or end - at > digits_max:
        return False
    while is_digit(at, end):
        number = number * 10 + (at[0] - ZERO)
        at += 1
    value[0] = -number if is_negative else number
    return at == end


cdef int parse_double(const uint8_t *at, const uint8_t *end, double *value) except -1:
    """Set `value` to the number in [at, end), and return whether there is a plain one.

    A plain one has a minus sign or none, digits, perhaps a decimal point and digits, perhaps an
    exponent, and at most TEXT_MAX bytes. The result is rounded correctly.
    """
    cdef char text[TEXT_MAX + 1]
    cdef const uint8_t *start = at
    cdef const uint8_t *part
    cdef bint is_negative = at < end and at[0] == MINUS
    cdef int64_t number = 0
    cdef Py_ssize_t digits, decimals = 0
    if end - at > TEXT_MAX:
        return False
    at += is_negative
    part = at
    while is_digit(at, end):
        if at - part < EXACT_DIGITS:
            number = number * 10 + (at[0] - ZERO)
        at += 1
    digits = at - part
    if not digits:
        return False
    if at < end and at[0] == POINT:
        at += 1
        part = at
        while is_digit(at, end):
            if digits + (at - part) < EXACT_DIGITS:
                number = number * 10 + (at[0] - ZERO)
            at += 1
        decimals = at - part
        if not decimals:
            return False
    if at == end and digits + decimals <= EXACT_DIGITS:
        value[0] = <double>number / POWERS[decimals]
        if is_negative:
            value[0] = -value[0]
        return True
    if at < end and at[0] in (69, 101):  # E or e
        at += 1
        if at < end and at[0] in (43, MINUS):  # a sign
            at += 1
        if not is_digit(at, end):
            return False
        while is_digit(at, end):
            at += 1
    if at != end:
        return False
    memcpy(text, start, end - start)
    text[end - start] = 0
    value[0] = PyOS_string_to_double(text, NULL, NULL)
    return True


def numbers(
    const uint8_t[::1] raw, const int64_t[::1] starts, const int32_t[::1] lengths,
    int digits_max, bint is_double,
):
    """Parse values as numbers: value i is `lengths[i]` bytes of `raw` from `starts[i]` on.

    The result is (values, states): float64 if `is_double`, else int64 numbers of at most
    `digits_max` digits, and a byte for each that is MISSING (the start is negative), PARSED or
    COMPLEX. What is not as plain as `parse_whole` and `parse_double` say is COMPLEX, and only the
    reference knows whether it is a number. Values that are not parsed are 0. Raises ValueError if a
    value is not inside of `raw`.
    """
    cdef Py_ssize_t rows = starts.shape[0], row, size = raw.shape[0]
    cdef const uint8_t *at
    if lengths.shape[0] != rows:
        raise ValueError("starts and lengths must have the same number of rows")
    value_array = PyByteArray_FromStringAndSize(NULL, 8 * rows)
    state_array = PyByteArray_FromStringAndSize(NULL, rows)
    cdef int64_t *whole_values = <int64_t *>PyByteArray_AS_STRING(value_array)
    cdef double *double_values = <double *>whole_values
    cdef uint8_t *states = <uint8_t *>PyByteArray_AS_STRING(state_array)
    for row in range(rows):
        states[row] = 0
        whole_values[row] = 0
        if starts[row] < 0:
            continue
        if lengths[row] < 0 or starts[row] > size - lengths[row]:
            raise ValueError(f"value {row} is not inside of the buffer")
        states[row] = 2
        if lengths[row] == 0:
            continue
        at = &raw[0] + starts[row]
        if is_double:
            if parse_double(at, at + lengths[row], &double_values[row]):
                states[row] = 1
        elif parse_whole(at, at + lengths[row], digits_max, &whole_values[row]):
            states[row] = 1
        else:
            whole_values[row] = 0
    return value_array, state_array
