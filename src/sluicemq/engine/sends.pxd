# Declarations that the compiled modules share. Numbers are big-endian, as in files and frames.

cdef unsigned int crc32(const unsigned char *data, Py_ssize_t size) noexcept nogil


# `plain_text` returns the position of the closing quote of a JSON string whose characters begin at
# `p`, or NULL if it contains escapes or characters beyond ASCII. `number_text` parses an integer of
# at most 18 digits, and returns the position behind it, or NULL.
cdef const unsigned char *plain_text(const unsigned char *p, const unsigned char *end) noexcept
cdef const unsigned char *number_text(
    const unsigned char *p, const unsigned char *end, long long *value
) noexcept

# Write a number in decimal, or all bytes of a text. Return the position behind them.
cdef unsigned char *put_number(unsigned char *out, unsigned long long value) noexcept
cdef unsigned char *put_bytes(unsigned char *out, bytes text) noexcept


cdef inline unsigned int get32(const unsigned char *at) noexcept nogil:
    return (<unsigned int>at[0] << 24) | (<unsigned int>at[1] << 16) | (<unsigned int>at[2] << 8) | at[3]


cdef inline unsigned long long get64(const unsigned char *at) noexcept nogil:
    return (<unsigned long long>get32(at) << 32) | get32(at + 4)


cdef inline void put32(unsigned char *at, unsigned int value) noexcept nogil:
    at[0], at[1], at[2], at[3] = value >> 24, (value >> 16) & 255, (value >> 8) & 255, value & 255


cdef inline void put64(unsigned char *at, unsigned long long value) noexcept nogil:
    put32(at, <unsigned int>(value >> 32))
    put32(at + 4, <unsigned int>value)


cdef class QueueState:
    cdef public long long committed_offset, next_offset
    cdef public Py_ssize_t fixed_bytes
    cdef public int magic
    cdef public long long queue_id
    cdef public object tail, topic_part


cdef class TopicState:
    cdef public long long bytes_in, messages_in
    cdef public Py_ssize_t queues, record_bytes
    cdef public bint is_special


cdef class TurnState:
    cdef public long long now_ms, position, room_end, turn_start
    cdef public list parts, touched
