"""Consume queues: where each message of a topic's queue lies in the commit log.

A queue is a sequence of units of 20 bytes (spec/store.md §3), unit n for queue offset n:

    | physical offset 8 | record size 4 | tag code 8 |

A queue that does not begin at 0 has blank units (0, 0x7FFFFFFF, 0) before its first one. Unused
room reads as zeros, and a unit of size 0 is the end.

Units are made in the append and stay in memory (`tail`) until `flush` writes them in one piece;
readers see file and tail as one. The files are derived data: what is missing in them is built
again from the commit log, so they may be written late, but never synced before the log is.

Offsets of one queue, from left to right:

    offset_min <= visible_offset <= committed_offset <= next_offset
                  readers see        survives a         of the turn that
                  what is before     failed turn        is being written
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from sluicemq.engine.state import QueueState
from sluicemq.errors import MessageIllegalError
from sluicemq.files import Files, text_names
from sluicemq.model.topic import RETRY_PREFIX, RETRY_TOPIC_LENGTH_MAX, TOPIC_LENGTH_MAX
from sluicemq.record import layout
from sluicemq.record.layout import MAGIC_V1, MAGIC_V2, RECORD_BYTES_MIN
from sluicemq.store.directory import DeletedTopics
from sluicemq.store.segments import SegmentFiles

UNIT: Final = layout.UNIT.struct
UNIT_BYTES: Final = UNIT.size
OFFSET_MAX: Final = 1 << 56
"""A larger queue offset in a record can only be damage."""
BLANK_SIZE: Final = 0x7FFFFFFF
BLANK_UNIT: Final = UNIT.pack(0, BLANK_SIZE, 0)
GAP_MAX: Final = 64
"""Blank units in a row that a search looks behind: a queue may lack some in its middle."""
UNITS_SINGLY: Final = 1024
"""So many at the end are looked at one by one, where damage is likely, before halves are taken."""
FILE_SIZE_SETTING: Final = "mappedFileSizeConsumeQueue"
Units = memoryview | bytearray | bytes
TAIL_BYTES_MAX: Final = 4096 * UNIT_BYTES
"""A tail is written when it is this long, whatever the clock says."""


def is_valid_key(key: tuple[str, int]) -> bool:
    """Whether there can be a directory for such a queue: what a record says may be damaged."""
    topic, queue_id = key
    is_name = topic not in ("", ".", "..") and "/" not in topic and "\0" not in topic
    return is_name and queue_id >= 0 and len(topic.encode()) <= RETRY_TOPIC_LENGTH_MAX


def check_topic(topic: str, *, long_topics: bool = True) -> None:
    """Raises MessageIllegalError when the topic cannot be stored (spec/store.md §2.1)."""
    is_retry = long_topics and topic.startswith(RETRY_PREFIX)
    limit = RETRY_TOPIC_LENGTH_MAX if is_retry else TOPIC_LENGTH_MAX
    size = len(topic.encode())
    if not 0 < size <= limit:
        raise MessageIllegalError(
            f"The topic has {size} bytes, the limit is {limit}.", fix="Use a shorter name."
        )
    if not is_valid_key((topic, 0)):
        raise MessageIllegalError(
            f"The topic {topic!r} cannot name a directory.",
            fix="Use letters, digits, and the characters _ - | %.",
        )


class Unit(NamedTuple):
    """Where one message lies: bytes [physical_offset, + size_bytes) of the commit log."""

    physical_offset: int
    size_bytes: int
    tag_code: int

    @property
    def end(self) -> int:
        return self.physical_offset + self.size_bytes

    @property
    def is_blank(self) -> bool:
        return self.size_bytes == BLANK_SIZE and self.physical_offset == 0

    @property
    def is_used(self) -> bool:
        return self.size_bytes > 0 and self.physical_offset >= 0


class Queue(QueueState):
    """One queue of one topic. The appending code reaches into its fields: see `writer`."""

    __slots__ = (
        "key", "offset_min", "segments", "tail_start", "topic", "unsynced", "visible_offset",
    )  # fmt: skip

    def __init__(
        self,
        files: Files,
        directory: str,
        file_bytes: int,
        key: tuple[str, int],
        unsynced: set[str] | None = None,
    ) -> None:
        self.key = key
        self.topic, self.queue_id = key
        self.unsynced = set() if unsynced is None else unsynced
        name = self.topic.encode()
        is_long = len(name) > TOPIC_LENGTH_MAX  # spec/store.md §2.1: V1's is a signed byte
        self.magic = MAGIC_V2 if is_long else MAGIC_V1
        self.topic_part = len(name).to_bytes(2 if is_long else 1, "big") + name
        self.fixed_bytes = RECORD_BYTES_MIN - 1 + len(self.topic_part)
        self.segments = SegmentFiles(
            files, directory, file_bytes, FILE_SIZE_SETTING, are_sparse=True
        )
        self.tail = bytearray()
        self.reset_to(0)

    def reset_to(self, offset: int) -> None:
        """Without units, beginning at `offset`; the files are not touched."""
        self.offset_min = offset
        self._set_end(offset)

    def _set_end(self, end: int) -> None:
        self.tail.clear()
        self.tail_start = self.next_offset = self.committed_offset = self.visible_offset = end

    # --- reading

    def units(self, start: int, count: int) -> Units:
        """Units from queue offset `start`, as they are stored: at least one, at most `count`.

        Fewer than asked where a file or the written part ends; the caller goes on from there.
        Empty when there is no such unit. Visibility is the caller's matter.
        """
        if start >= self.tail_start:
            begin = (start - self.tail_start) * UNIT_BYTES
            return self.tail[begin : begin + count * UNIT_BYTES]
        position = start * UNIT_BYTES
        segment = self.segments.at(position)
        if segment is None:
            return bytearray()
        stop = min((start + count) * UNIT_BYTES, self.tail_start * UNIT_BYTES, segment.end)
        return segment.view_or_read(position, stop - position)

    def unit(self, offset: int) -> Unit | None:
        """The unit of one queue offset; None when there is none."""
        data = self.units(offset, 1) if offset < self.next_offset else b""
        return Unit._make(UNIT.unpack_from(data)) if len(data) else None

    def read_unit(self, offset: int) -> Unit | None:
        """As `unit`, but read without a map: recovery looks into many files once."""
        segment = self.segments.at(offset * UNIT_BYTES)
        if segment is None or (self.tail and offset >= self.tail_start):
            return self.unit(offset)
        return Unit._make(UNIT.unpack(segment.read(offset * UNIT_BYTES, UNIT_BYTES)))

    def position_of(self, offset: int) -> int:
        """Where the record of a queue offset lies in the log; -1 without one. Makes no map."""
        unit = self.read_unit(offset) if self.segments.start <= offset * UNIT_BYTES else None
        self.segments.release()
        return -1 if unit is None or offset >= self.next_offset else unit.physical_offset

    def first_offset_from(self, log_offset: int) -> int:
        """The first offset whose record lies at `log_offset` or behind; the end when none does."""
        end = self.next_offset
        first = self.segments.start // UNIT_BYTES if len(self.segments) else self.tail_start

        def is_gone(unit: Unit) -> bool:
            return unit.is_blank or unit.physical_offset < log_offset

        def past_gap(offset: int) -> Unit | None:
            """The unit there; where it is blank the next one that is not, if it is near."""
            unit = self.read_unit(offset)
            for at in range(offset + 1, min(offset + GAP_MAX, end)):
                if unit is None or not unit.is_blank:
                    break
                unit = self.read_unit(at)
            return unit

        unit = self.read_unit(first) if first < end else None
        found = first  # as a rule; and a damaged unit in the middle cannot mislead
        if unit is None or is_gone(unit):
            found = _bisect(first, end, is_gone, past_gap)
            while found < end and (unit := self.read_unit(found)) is not None and unit.is_blank:
                found += 1
        self.segments.release()
        return found

    def end_offset_before(self, log_end: int) -> int:
        """The offset behind the last unit whose record ends at `log_end` or before."""
        offset = self.next_offset
        stop = max(self.offset_min, offset - UNITS_SINGLY)
        while offset > stop:
            unit = self.unit(offset - 1)
            if unit is None or (unit.is_used and unit.end <= log_end):
                return offset
            offset -= 1
        return _bisect(
            self.offset_min, offset, lambda unit: unit.is_blank or unit.end <= log_end, self.unit
        )

    def update_offset_min(self, log_start: int) -> None:
        """Set offset_min behind blank units and those whose records are deleted from the log."""
        self.offset_min = self.first_offset_from(log_start)

    # --- writing

    def flush(self) -> list[str]:
        """Write the committed part of the tail; returns the paths and directories to be synced.

        On OSError nothing is lost: the units stay in memory and the next flush writes them.
        """
        touched: list[str] = []
        segments = self.segments
        position, stop = self.tail_start * UNIT_BYTES, self.committed_offset * UNIT_BYTES
        done = 0
        while position + done < stop:
            segment = segments.at(position + done)
            if segment is None:
                if not len(segments):
                    segments.make_directory(touched)
                segment = segments.add(position + done - (position + done) % segments.file_bytes)
                touched.append(segments.directory)
                if position > segment.base:  # of a queue that does not begin at its file's start
                    blanks = (position - segment.base) // UNIT_BYTES
                    segment.write(BLANK_UNIT * blanks, segment.base)
            piece = bytes(self.tail[done : min(segment.end, stop) - position])
            segment.write(piece, position + done)
            segment.release()
            touched.append(segment.path)
            done += len(piece)
        if done:
            del self.tail[:done]
            self.tail_start = self.committed_offset
        return touched

    def overwrite_unit(self, offset: int, data: bytes) -> None:
        """Overwrite one unit that the files hold, and the tail if it has it. Raises OSError."""
        at = (offset - self.tail_start) * UNIT_BYTES
        if 0 <= at < len(self.tail):
            self.tail[at : at + UNIT_BYTES] = data
        segment = self.segments.at(offset * UNIT_BYTES)
        if segment is not None:
            segment.write(data, offset * UNIT_BYTES)
            segment.release()
            self.unsynced.add(segment.path)

    def truncate(self, offset: int) -> None:
        """Forget the units from `offset` on, in memory and in the files."""
        visible = min(self.visible_offset, offset)
        if offset >= self.tail_start:
            del self.tail[(offset - self.tail_start) * UNIT_BYTES :]
            self.next_offset = self.committed_offset = offset
        else:
            self._set_end(offset)
        self.visible_offset = visible
        self.offset_min = min(self.offset_min, offset)
        if offset * UNIT_BYTES < self.segments.end:
            self._cut(offset * UNIT_BYTES, keeps_file=True)

    def _cut(self, position: int, *, keeps_file: bool = False) -> None:
        """What was cut must not come back after an orderly stop: the next checkpoint syncs it."""
        if self.segments.truncate(position, keeps_file=keeps_file):
            self.unsynced.add(self.segments.directory)
            if self.segments.last is not None:
                self.unsynced.add(self.segments.last.path)
        self.segments.release()

    # --- recovery

    def load(
        self,
        *,
        after_crash: bool,
        before: int | None = None,
        removes: bool = True,
        log_start: int = 0,
        inspect: "Callable[[Queue], object]" = lambda queue: None,
    ) -> None:
        """Find the end in the files, of all units or of those `before` a place in the log, and
        the first unit whose record the log, which begins at `log_start`, still has.

        Takes a few reads, however long the queue is. After a crash what lies behind the end is
        removed. With `removes` the last unit is in the tail afterwards, where recovery asks for
        it; a flush writes it once more. `look` may look into the queue while what was read is
        there. Raises StoreDamagedError as `SegmentFiles.load`.
        """
        self.segments.load(is_derived=after_crash, removes=removes, keeps_open=True)
        first = self.segments.start // UNIT_BYTES
        self.reset_to(first)

        def is_kept(unit: Unit) -> bool:
            return unit.is_used and (
                before is None or unit.is_blank or unit.physical_offset < before
            )

        def is_end(number: int) -> bool:
            return not is_kept(Unit._make(UNIT.unpack_from(data, number * UNIT_BYTES)))

        # The end lies in the last block that was ever written, as a rule. That is the tail until
        # all is found: of a small queue it is everything, and one read is enough.
        position, data = self.segments.read_last_block(UNIT_BYTES)
        block, count = position // UNIT_BYTES, -(-len(data.rstrip(b"\0")) // UNIT_BYTES)
        end, used_end = block + count, position + len(data)  # what is between holds zeros
        if not count or is_end(0):
            count, end = 0, _bisect(first, block, is_kept, self.read_unit)
            used_end = end * UNIT_BYTES
        elif is_end(count - 1):
            count = bisect_left(range(count), True, key=is_end)
            end = block + count
            used_end = end * UNIT_BYTES
        self.tail += data[: count * UNIT_BYTES]
        self.tail_start, self.next_offset = end - len(self.tail) // UNIT_BYTES, end
        if after_crash and used_end < self.segments.end:
            self._cut(used_end, keeps_file=True)
        self.update_offset_min(log_start)
        inspect(self)
        last = bytes(self.tail[-UNIT_BYTES:])
        if not last and end > first:
            last = UNIT.pack(*(self.read_unit(end - 1) or Unit(0, 0, 0)))
        self._set_end(end)
        if removes and last:
            self.tail_start = end - 1
            self.tail += last
        self.segments.release()

    def put(self, offset: int, unit: Unit) -> bool:
        """Add a unit found in the log at recovery; True when it was not there yet.

        A gap is filled with blank units, so that offsets stay what the records say. An offset
        that is there already with a later place in the log means that the topic was deleted and
        made again: the queue begins anew there.
        """
        if offset < self.next_offset:
            known = self.unit(offset)
            if known is not None and known.physical_offset >= unit.physical_offset:
                return False
            self.truncate(offset)
        if offset != self.next_offset:
            if self.next_offset == self.offset_min:
                self._cut(0)
                self.reset_to(offset)
            self.tail += BLANK_UNIT * (offset - self.next_offset)
        self.tail += UNIT.pack(*unit)
        self.next_offset = self.committed_offset = self.visible_offset = offset + 1
        return True

    def extend(self, offset: int, data: bytes) -> int | None:
        """Add consecutive units found in the log at recovery, as `put` would one by one.

        Returns how many were not there yet; None, having done nothing, when they do not simply
        follow what is there: then `put` has to see each.
        """
        known = min((self.next_offset - offset) * UNIT_BYTES, len(data))
        if known < 0:
            return None
        at = 0
        while at < known:
            piece = self.units(offset + at // UNIT_BYTES, (known - at) // UNIT_BYTES)
            if not len(piece) or bytes(piece) != data[at : at + len(piece)]:
                return None
            at += len(piece)
        self.tail += data[known:]
        count = (len(data) - known) // UNIT_BYTES
        self.next_offset += count
        self.committed_offset = self.visible_offset = self.next_offset
        return count


def expired_units(
    files: Files, directory: str, file_bytes: int, log_start: int
) -> list[tuple[str, int, int, bytes]]:
    """(topic, queue id, offset, unit) of the last message of queues all of whose messages have
    expired, in a log that begins at `log_start`: where they go on, which the log does not say.

    By the files alone: in any thread, beside whoever writes them. Raises OSError.
    """
    queues = ConsumeQueues(files, directory, file_bytes)
    queues.load(after_crash=False, removes=False, log_start=log_start)
    found = []
    for queue in queues:
        last = queue.next_offset - 1
        unit = queue.read_unit(last) if queue.offset_min == queue.next_offset > 0 else None
        if unit is not None:
            found.append((*queue.key, last, UNIT.pack(*unit)))
    queues.close()
    return found


def _bisect(
    low: int, high: int, is_before: Callable[[Unit], bool], look: Callable[[int], Unit | None]
) -> int:
    """The first offset in [low, high) whose unit is not `is_before`; `high` when all are."""

    def is_end(offset: int) -> bool:
        unit = look(offset)
        return unit is None or not is_before(unit)

    return low + bisect_left(range(low, high), True, key=is_end)


class ConsumeQueues:
    """All queues of a store, by (topic, queue id).

    `dirty` queues have units that are not in their files, `unsynced` files and directories were
    written since the last checkpoint took them; `deleted` topics have records that do not count.
    `is_doubtful`: units were found wrong, the next start builds the queues anew.
    """

    def __init__(
        self,
        files: Files,
        directory: str,
        file_bytes: int,
        *,
        long_topics: bool = True,
        deleted: DeletedTopics | None = None,
    ) -> None:
        self._files = files
        self._directory = directory
        self._file_bytes = file_bytes
        self._long_topics = long_topics
        self.by_key: dict[tuple[str, int], Queue] = {}
        self.dirty: set[Queue] = set()
        self.unsynced: set[str] = set()
        self.deleted = deleted or DeletedTopics(files, "")
        self.is_doubtful = False

    def __iter__(self) -> Iterator[Queue]:
        return iter(self.by_key.values())

    def load(
        self,
        *,
        after_crash: bool,
        before: int | None = None,
        removes: bool = True,
        log_start: int = 0,
        wanted: Callable[[str, int], bool] | None = None,
        inspect: Callable[[Queue], object] = lambda queue: None,
    ) -> None:
        """Find all queues on disk and their ends (see `Queue.load`), or those that are `wanted`."""
        self.by_key.clear()
        self.dirty.clear()
        for key in self._on_disk():
            if wanted is None or wanted(*key):
                queue = self.get_unchecked(key)
                queue.load(
                    after_crash=after_crash, before=before, removes=removes, log_start=log_start,
                    inspect=inspect,
                )  # fmt: skip

    def may_have_other_file_size(self) -> bool:
        """Whether the files on disk, all of one other size, may well be of another setting."""
        sizes: set[int] = set()
        for topic, queue_id in self._on_disk():
            path = f"{self._directory}/{topic}/{queue_id}"
            sizes.update(
                SegmentFiles(self._files, path, self._file_bytes, FILE_SIZE_SETTING).sizes_on_disk()
            )
        is_other = self._file_bytes not in sizes
        return is_other and len(sizes) == 1 and all(s and not s % UNIT_BYTES for s in sizes)

    def _on_disk(self) -> Iterator[tuple[str, int]]:
        for topic in text_names(self._files, self._directory):
            for name in self._files.names(f"{self._directory}/{topic}"):
                if name.isascii() and name.isdigit():
                    yield topic, int(name)

    def get_or_create(self, key: tuple[str, int]) -> Queue:
        """The queue, made when it is new. Raises MessageIllegalError when the name cannot be."""
        queue = self.by_key.get(key)
        if queue is None:
            check_topic(key[0], long_topics=self._long_topics)
            if key[1] < 0:
                raise MessageIllegalError(
                    f"The queue id {key[1]} is negative.", fix="Queue ids begin at 0."
                )
            queue = self.get_unchecked(key)
        return queue

    def get_unchecked(self, key: tuple[str, int]) -> Queue:
        """As `get`, for names that come from the log itself: they are not checked."""
        queue = self.by_key.get(key)
        if queue is None:
            directory = f"{self._directory}/{key[0]}/{key[1]}"
            queue = Queue(self._files, directory, self._file_bytes, key, self.unsynced)
            self.by_key[key] = queue
        return queue

    def mark_dirty(self, queue: Queue) -> None:
        """The queue has new units in its tail: a later flush writes them, this one if many."""
        self.dirty.add(queue)
        if len(queue.tail) >= TAIL_BYTES_MAX:
            self.unsynced.update(queue.flush())

    def flush(self, queue: Queue) -> None:
        """Write a queue's tail to its files, unless that is done. OSError leaves what is left for
        the next time."""
        if queue in self.dirty:
            self.unsynced.update(queue.flush())
            self.dirty.discard(queue)

    def truncate_to_log(self, end: int) -> None:
        """Drop the units whose records lie at `end` or later: the log does not hold them."""
        for queue in self:
            offset = queue.end_offset_before(end)
            if offset < queue.next_offset:
                queue.truncate(offset)

    def delete_topic(self, topic: str) -> None:
        """Remove the queues of a topic with their files. Raises MessageIllegalError for a name that
        is no directory's: it was never one of ours."""
        check_topic(topic)
        self._remove(topic)

    def _remove(self, topic: str) -> None:
        """Remove the queues of a topic, whose name may be what a damaged record said, with their
        files."""
        for key in [key for key in self.by_key if key[0] == topic]:
            queue = self.by_key.pop(key)
            self.dirty.discard(queue)
            queue.segments.remove_all()
        directory = f"{self._directory}/{topic}"
        if self._files.exists(directory) and not self._files.names(directory):
            self._files.remove(directory)
            self._files.sync_directory(self._directory)

    def finish_deletions(self) -> None:
        """Remove the queues of deleted topics that a crash has left."""
        for (topic, _), queue in list(self.by_key.items()):
            if topic in self.deleted.end_by_topic:
                last = queue.unit(queue.next_offset - 1) if queue.next_offset else None
                if last is not None and not self.deleted.is_live(topic, last.physical_offset):
                    self._remove(topic)

    def remove_all(self) -> None:
        """Remove every queue with its files, loaded or not: they are built anew."""
        for key in self._on_disk():
            self.get_unchecked(key)
        for topic in {topic for topic, _ in self.by_key}:
            self._remove(topic)

    def digest(self, log_end: int | None = None) -> tuple[int, int]:
        """How many queues have units, and the sum of their ends: a digest for the checkpoint, of
        now or as it is when the log is cut to `log_end`. No start agrees with that of doubtful
        queues."""
        if self.is_doubtful:
            return -1, -1
        ends = [
            queue.committed_offset if log_end is None else queue.end_offset_before(log_end)
            for queue in self
        ]
        return len(ends) - ends.count(0), sum(ends)

    def find_last_unit(self, log_end: int | None = None) -> Unit | None:
        """Of all queues, the one that lies last in the log (before its new end)."""
        ends = [
            (q, q.next_offset if log_end is None else q.end_offset_before(log_end)) for q in self
        ]
        units = [queue.unit(end - 1) for queue, end in ends if end > 0]
        return max((unit for unit in units if unit is not None and not unit.is_blank), default=None)

    def close(self) -> None:
        for queue in self:
            queue.segments.close()
