"""Consume queues: the position of each message of a topic's queue in the commit log.

A queue is a sequence of units of 20 bytes (spec/store.md §3). Unit n belongs to queue offset n:

    | physical offset 8 | record size 4 | tag code 8 |

A queue that does not begin at offset 0 has blank units (0, 0x7FFFFFFF, 0) before its first one.
Unused room reads as zeros, and a unit of size 0 is the end.

`append` creates units, and they stay in memory (`tail`) until `flush` writes them in one piece.
Readers see file and tail as one sequence. The files are derived from the commit log: recovery
builds missing units from it. So units may be written late, but must not be synced before the log.

Offsets of one queue, in ascending order:

    offset_min         the first message
    visible_offset     readers see the messages before it
    committed_offset   messages before it are committed
    next_offset        the next message, behind those of the commit group that is being written
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
"""A record that contains a larger queue offset is damaged."""
BLANK_SIZE: Final = 0x7FFFFFFF
BLANK_UNIT: Final = UNIT.pack(0, BLANK_SIZE, 0)
GAP_MAX: Final = 64
"""A search looks behind this many blank units in a row: a queue may lack units in its middle."""
LINEAR_SEARCH_UNITS: Final = 1024
"""A search examines this many units at the end one by one before it bisects the rest.

Damage is more likely at the end.
"""
FILE_SIZE_SETTING: Final = "mappedFileSizeConsumeQueue"
"""The setting that says how large the files of queues are."""
Units = memoryview | bytearray | bytes
"""Consecutive units as they are stored."""
TAIL_BYTES_MAX: Final = 4096 * UNIT_BYTES
"""A tail of this length is written at once, without waiting for `tick`."""


def is_valid_key(key: tuple[str, int]) -> bool:
    """Return whether a queue with this topic and id can exist and have a directory.

    A damaged record may contain any name and number.
    """
    topic, queue_id = key
    is_name = topic not in ("", ".", "..") and "/" not in topic and "\0" not in topic
    return is_name and queue_id >= 0 and len(topic.encode()) <= RETRY_TOPIC_LENGTH_MAX


def check_topic(topic: str, *, long_topics: bool = True) -> None:
    """Raise MessageIllegalError if the topic cannot be stored (spec/store.md §2.1).

    `long_topics` allows retry topics to be longer than other topics.
    """
    is_retry = long_topics and topic.startswith(RETRY_PREFIX)
    limit = RETRY_TOPIC_LENGTH_MAX if is_retry else TOPIC_LENGTH_MAX
    size = len(topic.encode())
    if not 0 < size <= limit:
        raise MessageIllegalError(
            f"The topic name has {size} bytes, the limit is {limit}.", fix="Use a shorter name."
        )
    if not is_valid_key((topic, 0)):
        raise MessageIllegalError(
            f"Topic {topic!r} is not a valid directory name.",
            fix="Use letters, digits, and the characters _ - | %.",
        )


class Unit(NamedTuple):
    """Where one message is: the bytes [physical_offset, + size_bytes) of the commit log."""

    physical_offset: int
    size_bytes: int
    tag_code: int

    @property
    def end(self) -> int:
        """The position behind the record."""
        return self.physical_offset + self.size_bytes

    @property
    def is_blank(self) -> bool:
        """Whether the unit stands for an offset without a message."""
        return self.size_bytes == BLANK_SIZE and self.physical_offset == 0

    @property
    def is_used(self) -> bool:
        """Whether the unit has been written, be it blank or with a possible position and size."""
        return self.size_bytes > 0 and self.physical_offset >= 0


class Queue(QueueState):
    """One queue of one topic. The writer accesses its attributes directly."""

    __slots__ = (
        "key",
        "offset_min",
        "segments",
        "tail_start",
        "topic",
        "unsynced",
        "visible_offset",
    )

    def __init__(
        self,
        files: Files,
        directory: str,
        file_bytes: int,
        key: tuple[str, int],
        unsynced: set[str] | None = None,
    ) -> None:
        """Create a queue without units. `key` is (topic, queue id).

        `unsynced` collects the files that the next checkpoint must sync.
        """
        self.key = key
        self.topic, self.queue_id = key
        self.unsynced = set() if unsynced is None else unsynced
        name = self.topic.encode()
        is_long = len(name) > TOPIC_LENGTH_MAX  # in V1 records the length is a signed byte
        self.magic = MAGIC_V2 if is_long else MAGIC_V1
        self.topic_part = len(name).to_bytes(2 if is_long else 1, "big") + name
        self.fixed_bytes = RECORD_BYTES_MIN - 1 + len(self.topic_part)
        self.segments = SegmentFiles(
            files, directory, file_bytes, FILE_SIZE_SETTING, are_sparse=True
        )
        self.tail = bytearray()
        self.reset_to(0)

    def reset_to(self, offset: int) -> None:
        """Empty the queue in memory, and let it begin at `offset`. The files do not change."""
        self.offset_min = offset
        self._set_end(offset)

    def _set_end(self, end: int) -> None:
        """Drop all units in memory, and let the queue end at offset `end`."""
        self.tail.clear()
        self.tail_start = self.next_offset = self.committed_offset = self.visible_offset = end

    # --- reading

    def units(self, start: int, count: int) -> Units:
        """Return units from queue offset `start` on, as they are stored: at most `count`.

        Returns fewer where a file ends or the tail begins; call again with the next offset. Returns
        none if the queue has no unit at `start`. The units may be of messages that are not visible
        yet.
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
        """Return the unit of one queue offset; None if there is none."""
        data = self.units(offset, 1) if offset < self.next_offset else b""
        return Unit._make(UNIT.unpack_from(data)) if len(data) else None

    def read_unit(self, offset: int) -> Unit | None:
        """Return the unit of one queue offset like `unit`, without a map.

        Recovery uses this to read a few units of many files.
        """
        segment = self.segments.at(offset * UNIT_BYTES)
        if segment is None or (self.tail and offset >= self.tail_start):
            return self.unit(offset)
        return Unit._make(UNIT.unpack(segment.read(offset * UNIT_BYTES, UNIT_BYTES)))

    def position_of(self, offset: int) -> int:
        """Return the position in the log of the record of a queue offset; -1 if there is none."""
        unit = self.read_unit(offset) if self.segments.start <= offset * UNIT_BYTES else None
        self.segments.release()
        return -1 if unit is None or offset >= self.next_offset else unit.physical_offset

    def first_offset_from(self, log_offset: int) -> int:
        """Return the first offset whose record is at `log_offset` or behind; else the end."""
        end = self.next_offset
        first = self.segments.start // UNIT_BYTES if len(self.segments) else self.tail_start

        def is_before(unit: Unit) -> bool:
            return unit.is_blank or unit.physical_offset < log_offset

        def read_past_gap(offset: int) -> Unit | None:
            """Return the unit at `offset`, or, if it is blank, the next one that is not."""
            unit = self.read_unit(offset)
            for following in range(offset + 1, min(offset + GAP_MAX, end)):
                if unit is None or not unit.is_blank:
                    break
                unit = self.read_unit(following)
            return unit

        # In most cases the first unit is the result. Then a damaged unit cannot mislead the search.
        result = first
        unit = self.read_unit(first) if first < end else None
        if unit is None or is_before(unit):
            result = _bisect(first, end, is_before, read_past_gap)
            while result < end and (unit := self.read_unit(result)) is not None and unit.is_blank:
                result += 1
        self.segments.release()
        return result

    def end_offset_before(self, log_end: int) -> int:
        """Return the offset behind the last unit whose record ends at `log_end` or before."""
        offset = self.next_offset
        stop = max(self.offset_min, offset - LINEAR_SEARCH_UNITS)
        while offset > stop:
            unit = self.unit(offset - 1)
            if unit is None or (unit.is_used and unit.end <= log_end):
                return offset
            offset -= 1
        return _bisect(
            self.offset_min, offset, lambda unit: unit.is_blank or unit.end <= log_end, self.unit
        )

    def update_offset_min(self, log_start: int) -> None:
        """Set `offset_min` to the first offset whose record is at `log_start` or behind."""
        self.offset_min = self.first_offset_from(log_start)

    # --- writing

    def flush(self) -> list[str]:
        """Write the committed part of the tail; return the files and directories to sync.

        If it raises OSError nothing is lost: the units stay in memory, and the next flush writes
        them.
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
                if position > segment.base:  # the queue begins within its first file
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
        """Overwrite the unit of an offset in the files and in the tail. Raises OSError."""
        at = (offset - self.tail_start) * UNIT_BYTES
        if 0 <= at < len(self.tail):
            self.tail[at : at + UNIT_BYTES] = data
        segment = self.segments.at(offset * UNIT_BYTES)
        if segment is not None:
            segment.write(data, offset * UNIT_BYTES)
            segment.release()
            self.unsynced.add(segment.path)

    def truncate(self, offset: int) -> None:
        """Remove the units from `offset` on, in memory and in the files. Raises OSError."""
        visible = min(self.visible_offset, offset)
        if offset >= self.tail_start:
            del self.tail[(offset - self.tail_start) * UNIT_BYTES :]
            self.next_offset = self.committed_offset = offset
        else:
            self._set_end(offset)
        self.visible_offset = visible
        self.offset_min = min(self.offset_min, offset)
        if offset * UNIT_BYTES < self.segments.end:
            self._truncate_files(offset * UNIT_BYTES, keeps_file=True)

    def _truncate_files(self, position: int, *, keeps_file: bool = False) -> None:
        """Remove everything from byte `position` on from the files.

        The next checkpoint syncs them. Otherwise the units could come back after a power loss.
        """
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
        """Find the end of the queue in its files, and its first unit whose record still exists.

        The end is behind the last unit, or with `before` behind the last unit whose record begins
        before this position of the log. The log begins at `log_start`. This takes a few reads,
        however long the queue is.

        After a crash, units behind the end are removed from the files. With `removes` the last unit
        is in the tail afterwards, because recovery reads it; a flush writes it again. `inspect` is
        called with the queue while the units that were read are still in memory. Raises
        StoreDamagedError like `SegmentFiles.load`.
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

        # In most cases the end lies in the last block that was ever written. The block is kept in
        # `tail` while this method runs: a small queue needs no other read.
        position, data = self.segments.read_last_block(UNIT_BYTES)
        block, count = position // UNIT_BYTES, -(-len(data.rstrip(b"\0")) // UNIT_BYTES)
        end, used_end = block + count, position + len(data)  # zeros lie between the two
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
            self._truncate_files(used_end, keeps_file=True)
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
        """Add the unit of a record that recovery found in the log.

        Returns False if the queue had it already. A gap is filled with blank units, so that offsets
        stay what the records say. If the queue has the offset already, with an earlier position in
        the log, then the topic was deleted and created again: the queue is cut off at this offset.
        """
        if offset < self.next_offset:
            known = self.unit(offset)
            if known is not None and known.physical_offset >= unit.physical_offset:
                return False
            self.truncate(offset)
        if offset != self.next_offset:
            if self.next_offset == self.offset_min:
                self._truncate_files(0)
                self.reset_to(offset)
            self.tail += BLANK_UNIT * (offset - self.next_offset)
        self.tail += UNIT.pack(*unit)
        self.next_offset = self.committed_offset = self.visible_offset = offset + 1
        return True

    def extend(self, offset: int, data: bytes) -> int | None:
        """Add consecutive units, the first of which has `offset`, as `put` would one by one.

        Returns how many units were not there yet. Returns None, with nothing changed, if the units
        do not simply follow those of the queue: then call `put` for each.
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
    """Return (topic, queue id, offset, unit) of the last message of each fully expired queue.

    The log begins at `log_start`. No record of such a queue is in the log, so only its files say at
    which offset it continues. Reads the files alone, in any thread, while a broker may write them.
    Raises OSError.
    """
    queues = ConsumeQueues(files, directory, file_bytes)
    queues.load(after_crash=False, removes=False, log_start=log_start)
    expired = []
    for queue in queues:
        last = queue.next_offset - 1
        unit = queue.read_unit(last) if queue.offset_min == queue.next_offset > 0 else None
        if unit is not None:
            expired.append((*queue.key, last, UNIT.pack(*unit)))
    queues.close()
    return expired


def _bisect(
    low: int, high: int, is_before: Callable[[Unit], bool], read: Callable[[int], Unit | None]
) -> int:
    """Return the first offset in [low, high) whose unit is not `is_before`; else `high`."""

    def is_end(offset: int) -> bool:
        unit = read(offset)
        return unit is None or not is_before(unit)

    return low + bisect_left(range(low, high), True, key=is_end)


class ConsumeQueues:
    """All queues of a store, by (topic, queue id).

    `dirty` are the queues with units that are not in their files. `unsynced` are files and
    directories that were written since the last checkpoint. `deleted` says which records belong to
    deleted topics. `is_doubtful` is set when units were found to be wrong; the next start then
    builds all queues again.
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
        """Create an empty collection for the queues in `directory`; `load` finds those on disk.

        `long_topics` allows retry topics to be longer than other topics. `deleted` None means that
        no topic was deleted.
        """
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
        """Load all queues on disk (see `Queue.load`), or those for which `wanted` is true."""
        self.by_key.clear()
        self.dirty.clear()
        for key in self._keys_on_disk():
            if wanted is None or wanted(*key):
                queue = self.get_unchecked(key)
                queue.load(
                    after_crash=after_crash,
                    before=before,
                    removes=removes,
                    log_start=log_start,
                    inspect=inspect,
                )

    def may_have_other_file_size(self) -> bool:
        """Return whether the files on disk fit another setting of the file size.

        That is the case if all of them have one other size that is a multiple of the unit's.
        """
        sizes: set[int] = set()
        for topic, queue_id in self._keys_on_disk():
            path = f"{self._directory}/{topic}/{queue_id}"
            sizes.update(
                SegmentFiles(self._files, path, self._file_bytes, FILE_SIZE_SETTING).sizes_on_disk()
            )
        is_other = self._file_bytes not in sizes
        return (
            is_other and len(sizes) == 1 and all(size and not size % UNIT_BYTES for size in sizes)
        )

    def _keys_on_disk(self) -> Iterator[tuple[str, int]]:
        """Yield the keys of all queues that have a directory."""
        for topic in text_names(self._files, self._directory):
            for name in self._files.names(f"{self._directory}/{topic}"):
                if name.isascii() and name.isdigit():
                    yield topic, int(name)

    def get_or_create(self, key: tuple[str, int]) -> Queue:
        """Return a queue, and create it if it does not exist.

        Raises MessageIllegalError if the topic or queue id is invalid.
        """
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
        """Return a queue, and create it if it does not exist, without checking its name.

        For names that come from the log or the disk.
        """
        queue = self.by_key.get(key)
        if queue is None:
            directory = f"{self._directory}/{key[0]}/{key[1]}"
            queue = Queue(self._files, directory, self._file_bytes, key, self.unsynced)
            self.by_key[key] = queue
        return queue

    def mark_dirty(self, queue: Queue) -> None:
        """Note that a queue has new units in its tail. Write them at once if there are many.

        Raises OSError.
        """
        self.dirty.add(queue)
        if len(queue.tail) >= TAIL_BYTES_MAX:
            self.unsynced.update(queue.flush())

    def flush(self, queue: Queue) -> None:
        """Write a queue's tail to its files if it has units that are not in them.

        If it raises OSError, the units that were not written stay in memory for the next call.
        """
        if queue in self.dirty:
            self.unsynced.update(queue.flush())
            self.dirty.discard(queue)

    def truncate_to_log(self, end: int) -> None:
        """Remove the units whose records end behind `end`, where the log ends."""
        for queue in self:
            offset = queue.end_offset_before(end)
            if offset < queue.next_offset:
                queue.truncate(offset)

    def delete_topic(self, topic: str) -> None:
        """Remove the queues of a topic and their files.

        Raises MessageIllegalError if the topic is not a valid directory name, so no queue can have
        it.
        """
        check_topic(topic)
        self._remove_topic(topic)

    def _remove_topic(self, topic: str) -> None:
        """Remove the queues of a topic and their files. Any name is allowed."""
        for key in [key for key in self.by_key if key[0] == topic]:
            queue = self.by_key.pop(key)
            self.dirty.discard(queue)
            queue.segments.remove_all()
        directory = f"{self._directory}/{topic}"
        if self._files.exists(directory) and not self._files.names(directory):
            self._files.remove(directory)
            self._files.sync_directory(self._directory)

    def finish_deletions(self) -> None:
        """Remove the queues of deleted topics that were left by a crash."""
        for (topic, _), queue in list(self.by_key.items()):
            if topic in self.deleted.end_by_topic:
                last = queue.unit(queue.next_offset - 1) if queue.next_offset else None
                if last is not None and not self.deleted.is_live(topic, last.physical_offset):
                    self._remove_topic(topic)

    def remove_all(self) -> None:
        """Remove all queues and their files, loaded or not, so that they can be built again."""
        for key in self._keys_on_disk():
            self.get_unchecked(key)
        for topic in {topic for topic, _ in self.by_key}:
            self._remove_topic(topic)

    def digest(self, log_end: int | None = None) -> tuple[int, int]:
        """Return the number of queues that have units, and the sum of their end offsets.

        With `log_end`, return what the numbers will be when the log is cut off there. Returns (-1,
        -1), which no start accepts, if the queues are doubtful.
        """
        if self.is_doubtful:
            return -1, -1
        ends = [
            queue.committed_offset if log_end is None else queue.end_offset_before(log_end)
            for queue in self
        ]
        return len(ends) - ends.count(0), sum(ends)

    def find_last_unit(self, log_end: int | None = None) -> Unit | None:
        """Return the unit whose record is last in the log, of all queues; None if there are none.

        With `log_end`, only units whose records end at that position or before count.
        """
        ends = [
            (q, q.next_offset if log_end is None else q.end_offset_before(log_end)) for q in self
        ]
        units = [queue.unit(end - 1) for queue, end in ends if end > 0]
        return max((unit for unit in units if unit is not None and not unit.is_blank), default=None)

    def close(self) -> None:
        for queue in self:
            queue.segments.close()
