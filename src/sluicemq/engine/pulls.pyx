# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Pulls that a consumer repeats, from the bytes of a socket to the answer, compiled.

A consumer's pulls of a queue differ in three numbers: `opaque`, `queueOffset` and `commitOffset`.
The rest of their header, without the numbers, is the key of a *plan*. A plan is what the general
path in `broker/consume/pull.py` found when it checked the first such pull; `_save_plan` makes it.
`Pulls.run` removes the numbers from a header, looks for the plan, checks that everything on which
the plan relies is unchanged, reads the messages, and answers.

If a pull has no plan, or cannot be answered by it, `run` stops before it. The general path then
handles the pull, and may save a plan for the next one.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memchr, memcmp, memcpy

from bisect import bisect_left
from time import monotonic

from sluicemq.engine.sends cimport crc32, get32, get64, put32, put_bytes, put_number
from sluicemq.record import layout

ctypedef unsigned char byte

cdef enum:
    HEADER_MAX = 2048
    UNIT_BYTES = 20
    BLANK_SIZE = 0x7FFFFFFF
    PLANS_MAX = 2048  # the most plans in one generation
    PLANS_S = 300  # the longest time of one generation, in seconds
    PULL = 11
    CHUNK_UNITS_MIN = 1024  # the same limits as in `store.bulk`
    CHUNK_UNITS_MAX = 16384
    COUNT_MAX = 256  # the general path reads more messages than this without copying them
    ANSWER_MAX = 1024
    RECORD_BYTES_MIN = 91

count_max = COUNT_MAX
cdef unsigned int magic_v1 = layout.MAGIC_V1 & 0xFFFFFFFF

# The header of a pull: its bytes without the three numbers, the numbers, and how often each occurs.
# `consumed` is the commitOffset, -1 without one.
cdef struct Cut:
    byte[HEADER_MAX] key
    Py_ssize_t size
    long long opaque, offset, consumed
    int opaques, offsets, commits


cdef const byte *cut_number(const byte *p, const byte *end, long long *value, int *times) noexcept:
    """Parse the non-negative integer at `p` into `value`, and increment `times`.

    Return the position behind its digits. Return `p`, with nothing changed, if there is no such
    integer of at most 18 digits without leading zeros, followed by another byte.
    """
    cdef const byte *first = p
    cdef long long found = 0
    while p < end and 0x30 <= p[0] <= 0x39 and p - first < 18:
        found = found * 10 + (p[0] - 0x30)
        p += 1
    if p == first or p == end or 0x30 <= p[0] <= 0x39 or (first[0] == 0x30 and p - first > 1):
        return first
    value[0] = found
    times[0] += 1
    return p


cdef bint cut(const byte *p, Py_ssize_t size, Cut *into) noexcept:
    """Split the header of a pull into its three numbers and the rest. HOT.

    Return False if it is not the header of a PULL_MESSAGE (11) with exactly one opaque and one
    queueOffset, and at most one commitOffset.
    """
    # Quotes in a JSON string are escaped by a backslash, which the patterns below do not contain.
    # So a pattern that begins behind a quote and contains quotes matches only the name of a member.

    cdef const byte *end = p + size
    cdef const byte *begin = p
    cdef const byte *first
    cdef Py_ssize_t length
    into.size = into.opaques = into.offsets = into.commits = 0
    into.consumed = -1
    if size > HEADER_MAX or size < 12 or memcmp(p, b'{"code":11,', 11):
        return False
    while True:
        p = <const byte *>memchr(p, 0x22, end - p)
        if p == NULL or end - p < 18:
            break
        p += 1
        if p[0] == 0x6F and not memcmp(p, b'opaque":', 8):
            first = p + 8
            p = cut_number(first, end, &into.opaque, &into.opaques)
        elif p[0] == 0x71 and not memcmp(p, b'queueOffset":"', 14):
            first = p + 14
            p = cut_number(first, end, &into.offset, &into.offsets)
        elif p[0] == 0x63 and not memcmp(p, b'commitOffset":"', 15):
            first = p + 15
            p = cut_number(first, end, &into.consumed, &into.commits)
        else:
            continue
        length = first - begin
        memcpy(into.key + into.size, begin, length)
        into.size += length
        begin = p
    length = end - begin
    memcpy(into.key + into.size, begin, length)
    into.size += length
    return into.opaques == 1 and into.offsets == 1 and into.commits <= 1 and into.opaque <= 0x7FFFFFFF


cdef class Plan:
    """The result of the general path's checks for one key, by which further pulls are answered.

    `answer` are the pieces of the answer's header around next offset, end and begin of the queue,
    and opaque. `codes` are the tag codes to select, or None for all messages; with a `scan` of
    columns, `codes` is a filter of blocks instead. `commits` says whether a pull commits its
    commitOffset. `any_span` says that the consumer accepts any span between unprocessed messages.
    The objects from `config` to `model` are those that must be unchanged; see `Pulls.holds`.
    """

    cdef public object group, topic, queue, config, found_topic, topic_config, members, watch
    cdef public object model, broker, delivered, codes, scan
    cdef public long long count_max, bytes_max, scan_max
    cdef public bint commits, any_span
    cdef public tuple answer


cdef class Given:
    """The part of a `ReadResult` that `SpanEstimator.record_answer` reads."""

    cdef readonly long long next_offset, count, held_from, span
    cdef readonly bint is_out_of_reach


cdef bint is_whole(
    const byte *at, long long size, long long position, queue, long long offset
):
    """Return whether an intact record of the common form is at `at`.

    The record must have this size and position in the commit log, belong to this queue and offset,
    have IPv4 hosts, and match its checksum. `store.gather` makes the same checks on records that
    this process has not written, and also accepts records of other forms.
    """
    cdef const byte *end = at + size
    cdef const byte *p
    cdef long long length
    cdef bytes topic = queue.topic_part
    if size < RECORD_BYTES_MIN or get32(at) != size or get32(at + 4) != magic_v1:
        return False
    if <long long>get64(at + 28) != position or get32(at + 12) != <unsigned int>queue.queue_id:
        return False
    if <long long>get64(at + 20) != offset or get32(at + 36) & 0x30 or not get64(at + 56):
        return False
    length = get32(at + 84)
    if length > size - RECORD_BYTES_MIN or crc32(at + 88, length) & 0x7FFFFFFF != get32(at + 8):
        return False
    p = at + 88 + length
    length = PyBytes_GET_SIZE(topic)
    if length > end - p - 2 or memcmp(p, PyBytes_AS_STRING(topic), length):
        return False
    p += length
    if p + 2 + (p[0] << 8 | p[1]) != end:
        return False
    return memchr(p + 2, 0, end - p - 2) == NULL


def are_whole(units, offsets, segment, queue, long long lost_code) -> bool:
    """Return whether the records of all units are intact, of the common form, and in one file.

    `offsets` are the queue offsets of the units, and `segment` is the file that contains the first
    record. Units with the tag code `lost_code` belong to lost messages. False means that the
    general path must check the records.
    """
    cdef Py_buffer view, found
    cdef long long position, size, base = segment.base
    cdef const byte *unit
    cdef Py_ssize_t index
    PyObject_GetBuffer(units, &found, PyBUF_SIMPLE)
    unit = <const byte *>found.buf + found.len - UNIT_BYTES
    try:  # the file has a hole behind its data, which must not be read through the map
        PyObject_GetBuffer(
            segment.data_view(<long long>get64(unit) + <int>get32(unit + 8)), &view, PyBUF_SIMPLE
        )
    except BaseException:
        PyBuffer_Release(&found)
        raise
    try:
        for index in range(found.len // UNIT_BYTES):
            unit = <const byte *>found.buf + index * UNIT_BYTES
            position, size = get64(unit), <int>get32(unit + 8)
            if <long long>get64(unit + 12) == lost_code or size < RECORD_BYTES_MIN:
                return False
            if position < base or position > base + view.len - size:
                return False
            if not is_whole(
                <const byte *>view.buf + (position - base), size, position, queue, offsets[index]
            ):
                return False
        return True
    finally:
        PyBuffer_Release(&view)
        PyBuffer_Release(&found)


cdef class Pulls:
    """The fast path of pulls, with the parts of a broker that it uses.

    `pull` is the broker's `PullHandlers`. `sends(data, position, peer)` handles the sends between
    the pulls, and returns the position where it stopped. `plans` and `older` are the plans of two
    generations by key. A plan that no pull uses during two generations is dropped, because it keeps
    filters and tables of its group in memory.
    """

    cdef object pull, reader, segments, log, sound, settings, sends, put
    cdef dict groups, topics, members, lanes, resets, queues, plans, older
    cdef Cut header
    cdef object missed
    cdef long long lost_code
    cdef double generation_end_s
    cdef byte[COUNT_MAX * UNIT_BYTES] units
    cdef long long[COUNT_MAX] offsets

    def __init__(self, pull, reader, dict queues, log, sends, long long lost_code):
        self.pull, self.reader, self.queues, self.log, self.sends = pull, reader, queues, log, sends
        self.lost_code = lost_code
        self.segments, self.sound, self.settings = log.segments, reader.soundness, pull.settings
        self.groups, self.topics = pull.groups.table, pull.topics.table
        self.members, self.lanes = pull.consumers.groups, pull.consumers.lanes.table
        self.resets, self.put = pull.offsets.resets.table, pull.offsets.put
        self.plans, self.older, self.missed = {}, {}, None
        self.generation_end_s = monotonic() + PLANS_S

    def __len__(self):
        """Return the number of plans."""
        return len(self.plans) + len(self.older)

    def claim(self):
        """Return (key, header) of the pull before which `run` just stopped, or None.

        A second call returns None.
        """
        missed, self.missed = self.missed, None
        return missed

    def remember(self, bytes key, Plan plan):
        """Save the plan of all further pulls with this key."""
        now_s = monotonic()
        if len(self.plans) >= PLANS_MAX or now_s >= self.generation_end_s:
            self.older, self.plans, self.generation_end_s = self.plans, {}, now_s + PLANS_S
        self.plans[key] = plan

    def run(self, bytes data, Py_ssize_t position, peer, shares) -> int:
        """Handle the plain sends and repeated pulls in `data`, from index `position` on. HOT.

        Answers are written to `peer`. `shares` is the fair scheduler. Return the index at which the
        first frame begins that is incomplete or needs the general path, or whose peer must wait.
        """
        cdef const byte *frame
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data), before
        cdef unsigned int total, header_size
        begin_s = self.missed = None
        while size - position >= 8:
            frame = <const byte *>PyBytes_AS_STRING(data) + position
            total, header_size = get32(frame), get32(frame + 4)
            if (
                total != header_size + 4 or header_size > HEADER_MAX
                or size - position < <Py_ssize_t>total + 4
                or not cut(frame + 8, header_size, &self.header)
            ):
                before = position
                position = self.sends(data, position, peer)
                if position == before:
                    break
                continue
            if begin_s is None:
                begin_s = shares.now_s()
            if shares.is_tight and shares.has_to_wait(peer):
                break
            key = PyBytes_FromStringAndSize(<char *>self.header.key, self.header.size)
            plan = self.plans.get(key)
            if plan is None and self.older:
                plan = self.older.pop(key, None)
                if plan is not None:
                    self.plans[key] = plan
            answer = None if plan is None else self.answer(<Plan>plan)
            if answer is None:
                self.missed = key, PyBytes_FromStringAndSize(<char *>frame + 8, header_size)
                break
            peer.write(answer)
            position += total + 4
        if begin_s is not None:
            shares.spent(peer, begin_s, PULL)
        return position

    cdef bint holds(self, Plan plan):
        """Return whether everything on which the plan relies is unchanged.

        Settings and configurations are replaced as a whole when they change, so comparing
        identities is enough.
        """
        if self.lanes or self.pull.groups.forbidden:
            return False
        if self.resets and (plan.group, plan.topic, plan.queue[1]) in self.resets:
            return False
        if self.settings.broker is not plan.broker or self.settings.is_slave:
            return False
        if self.groups.get(plan.group) is not plan.config:
            return False
        topic = self.topics.get(plan.topic)
        if topic is not plan.found_topic or topic.config is not plan.topic_config:
            return False
        if plan.watch is None:
            return True
        members = self.members.get(plan.group)
        return (
            members is plan.members and members.message_model is plan.model
            and members.subscriptions.get(plan.topic) is plan.watch
        )

    cdef object answer(self, Plan plan):
        """Return the answer to the pull in `header`, or None if the general path must answer. HOT.

        The answer contains messages. The commit and the statistics of the pull are recorded.
        """
        cdef long long offset = self.header.offset, low, high, next_offset
        cdef long long consumed = self.header.consumed if plan.commits else -1
        cdef int count
        cdef Given given
        if not self.holds(plan):
            return None
        queue = self.queues.get(plan.queue)
        if queue is None:
            return None
        low, high = queue.offset_min, queue.visible_offset
        if not low <= offset < high or not self.reader.is_all_near:
            return None
        if plan.codes is None:
            count = self.take(queue, offset, min(plan.count_max, high - offset))
            count = self.fitting(plan, count)
            next_offset, given = offset + count, None
        else:
            given = self.choose(plan, queue, offset, consumed, low, high)
            if given is None:
                return None
            count, next_offset = given.count, given.next_offset
        if not count:
            return None
        answer = self.laid_out(plan, queue, count, next_offset, low, high)
        if answer is None:
            return None
        if consumed >= 0:
            self.put(plan.group, plan.topic, plan.queue[1], consumed)
        delivered = plan.delivered
        if given is not None:
            delivered.filtered_count += next_offset - offset - count
            if not plan.any_span:
                delivered.span_estimator.record_answer(plan.queue[1], given, self.pull.clock.monotonic_s())
        delivered.fetched_offsets[plan.queue[1]] = next_offset
        delivered.messages_out += count
        delivered.bytes_out += PyBytes_GET_SIZE(answer) - 8 - get32(<byte *>PyBytes_AS_STRING(answer) + 4)
        self.pull.found_count += 1
        return answer

    cdef int take(self, queue, long long offset, long long count) except -1:
        """Copy up to `count` units from `offset` on into `units`. Return how many were copied."""
        cdef Py_buffer found
        cdef int done = 0, more, index
        while done < count:
            PyObject_GetBuffer(queue.units(offset + done, count - done), &found, PyBUF_SIMPLE)
            more = <int>(found.len // UNIT_BYTES)
            memcpy(self.units + done * UNIT_BYTES, found.buf, more * UNIT_BYTES)
            PyBuffer_Release(&found)
            if not more:
                break
            done += more
        for index in range(done):
            self.offsets[index] = offset + index
        return done

    cdef int fitting(self, Plan plan, int count) noexcept:
        """Return how many of the first `count` units fit in one answer, at least one."""
        cdef long long total = 0
        cdef int index
        for index in range(count):
            total += <int>get32(self.units + index * UNIT_BYTES + 8)
            if total > plan.bytes_max and index:
                return index
        return count

    cdef Given choose(
        self, Plan plan, queue, long long offset, long long consumed, long long low, long long high
    ):
        """Copy the units that match the filter of the plan into `units`, as `store.read` does.

        Units are limited by the span limit of the consumer, the count and the bytes of the plan.
        `consumed` is the commitOffset, -1 without one; `low` and `high` are the begin and the end
        of the queue. Return None if the general path must read.
        """
        cdef long long position = offset, next_offset = -1, held = -1, span, stop, at
        cdef long long end = min(high, offset + plan.scan_max)
        cdef Py_ssize_t index, size
        cdef int count = 0
        cdef list offsets
        cdef bytes units
        cdef Given given
        estimator, queue_id = plan.delivered.span_estimator, plan.queue[1]
        at, span, reach = offset, <long long>1 << 62, None
        if not plan.any_span:
            estimator.record_pull(queue_id, self.pull.clock.monotonic_s())
            reach = estimator.make_span_limit(queue_id, offset, consumed if consumed >= 0 else None, False)
            at, span = reach[0], reach[1]
        source, chunk = plan.scan or self.reader.tag_hits, CHUNK_UNITS_MIN
        if low <= at < offset and plan.scan is not None:
            hits = source.at(queue, plan.codes, at, end, chunk)
            if hits is None:
                return None
            offsets = hits.offsets
            index = bisect_left(offsets, at)
            if index < len(offsets) and <long long>offsets[index] == at:
                held = at
        elif low <= at < offset and self.take(queue, at, 1):
            if <long long>get64(self.units + 12) in plan.codes:
                held = at
        while position < end and next_offset < 0:
            hits = source.at(queue, plan.codes, position, end, chunk)
            if hits is None:
                return None
            offsets, units, stop = hits.offsets, hits.units, min(<long long>hits.stop, end)
            size = len(offsets)
            index = bisect_left(offsets, position)
            while index < size:
                at = offsets[index]
                if at >= stop:
                    break
                if not count and (held < 0 or at - held > span):
                    if held >= 0 and reach[2]:
                        return None  # the general path delays the pull
                    held = at
                if count == plan.count_max or at > held + span:
                    next_offset = at
                    break
                memcpy(
                    self.units + count * UNIT_BYTES,
                    PyBytes_AS_STRING(units) + index * UNIT_BYTES, UNIT_BYTES,
                )
                self.offsets[count] = at
                count += 1
                index += 1
            position = stop
            chunk = min(4 * chunk, CHUNK_UNITS_MAX)
        stop = self.fitting(plan, count)
        if stop < count:
            count, next_offset = stop, self.offsets[stop]
        given = Given.__new__(Given)
        given.next_offset = position if next_offset < 0 else next_offset
        given.count, given.held_from, given.is_out_of_reach = count, held, False
        given.span = self.offsets[count - 1] - held if count else 0
        return given

    cdef object laid_out(
        self, Plan plan, queue, int count, long long next_offset, long long low, long long high
    ):
        """Return the answer with the records of the first `count` units.

        Return None if the records are not all intact and in one file of the log, or are too large
        for one answer.
        """
        cdef long long first = get64(self.units), base, position, size, total = 0
        cdef bint is_trusted = self.sound.trusted_from <= first < self.log.written_offset
        if not is_trusted and self.log.requires_checksum:
            return None
        cdef Py_buffer view
        cdef int index
        cdef byte[ANSWER_MAX] head
        cdef byte *out
        cdef bytes answer
        segment = self.segments.at(first)
        if segment is None:
            return None
        base = segment.base
        # The file has a hole behind its data, which must not be read through the map.
        position = get64(self.units + (count - 1) * UNIT_BYTES)
        size = <int>get32(self.units + (count - 1) * UNIT_BYTES + 8)
        PyObject_GetBuffer(segment.data_view(position + size), &view, PyBUF_SIMPLE)
        try:
            for index in range(count):
                position = get64(self.units + index * UNIT_BYTES)
                size = <int>get32(self.units + index * UNIT_BYTES + 8)
                if size < RECORD_BYTES_MIN or size == BLANK_SIZE or position < base:
                    return None
                if position > base + view.len - size:
                    return None
                if <long long>get64(self.units + index * UNIT_BYTES + 12) == self.lost_code:
                    return None
                if not is_trusted and not is_whole(
                    <const byte *>view.buf + (position - base), size, position, queue,
                    self.offsets[index],
                ):
                    return None
                total += size
            if total > plan.bytes_max:
                return None
            out = put_number(put_bytes(head + 8, plan.answer[0]), next_offset)
            out = put_number(put_bytes(out, plan.answer[1]), high)
            out = put_number(put_bytes(out, plan.answer[2]), low)
            out = put_number(put_bytes(out, plan.answer[3]), self.header.opaque)
            out = put_bytes(out, plan.answer[4])
            put32(head, <unsigned int>(out - head - 4 + total))
            put32(head + 4, <unsigned int>(out - head - 8))
            answer = PyBytes_FromStringAndSize(NULL, out - head + total)
            size = out - head
            out = <byte *>PyBytes_AS_STRING(answer)
            memcpy(out, head, size)
            out += size
            for index in range(count):
                position = get64(self.units + index * UNIT_BYTES)
                size = get32(self.units + index * UNIT_BYTES + 8)
                memcpy(out, <const byte *>view.buf + (position - base), size)
                out += size
            return answer
        finally:
            PyBuffer_Release(&view)
