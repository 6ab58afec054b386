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
from sluicemq.store.segments import Segment, SegmentFiles

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
    bytes_max = RETRY_TOPIC_LENGTH_MAX if is_retry else TOPIC_LENGTH_MAX
    size_bytes = len(topic.encode())
    if not 0 < size_bytes <= bytes_max:
        raise MessageIllegalError(
            f"The topic name has {size_bytes} bytes, the limit is {bytes_max}.",
            fix="Use a shorter name.",
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
        """Create a queue without units; nothing is read or created. `load` finds those on disk.

        The files are in `directory`, with `file_bytes` bytes each. `key` is (topic, queue id).
        Paths that the next checkpoint must sync are added to the set `unsynced`, which all queues
        of a store share.
        """
        self.key = key
        self.topic, self.queue_id = key
        self.unsynced = set() if unsynced is None else unsynced
        encoded_topic = self.topic.encode()
        # In V1 records the length of the topic is a signed byte.
        is_long_topic = len(encoded_topic) > TOPIC_LENGTH_MAX
        self.magic = MAGIC_V2 if is_long_topic else MAGIC_V1
        length_bytes = 2 if is_long_topic else 1
        self.topic_part = len(encoded_topic).to_bytes(length_bytes, "big") + encoded_topic
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
        """Return up to `count` units (20-byte entries, joined) from queue offset `start` on. HOT.

        Returns fewer where a file ends or the tail begins; call again with the next offset. Returns
        an empty sequence if the queue has no unit at `start`. The messages of the units may not be
        visible yet.
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
        """Return the unit (entry) of one queue offset; None if the queue has none there.

        The unit may be blank: it then stands for an offset without a message.
        """
        if offset >= self.next_offset:
            return None
        stored = self.units(offset, 1)
        if not len(stored):
            return None
        return Unit._make(UNIT.unpack_from(stored))

    def read_unit(self, offset: int) -> Unit | None:
        """Return the unit (entry) of one queue offset; None if there is none. Reads with pread.

        Unlike `unit`, this maps no file, so recovery uses it to read a few units of many files.
        Call `segments.release()` afterwards. Behind the end of the queue, but within its file, the
        unit is what the file contains, for example zeros.
        """
        segment = self.segments.at(offset * UNIT_BYTES)
        if segment is None or (self.tail and offset >= self.tail_start):
            return self.unit(offset)
        return Unit._make(UNIT.unpack(segment.read(offset * UNIT_BYTES, UNIT_BYTES)))

    def position_of(self, offset: int) -> int:
        """Return the position in the log of the record of a queue offset; -1 if there is none.

        A blank unit counts as a record at position 0.
        """
        unit = None
        if self.segments.start <= offset * UNIT_BYTES:
            unit = self.read_unit(offset)
        self.segments.release()
        if unit is None or offset >= self.next_offset:
            return -1
        return unit.physical_offset

    def first_offset_from(self, log_offset: int) -> int:
        """Return the first offset whose record is at position `log_offset` of the log or later.

        Returns `next_offset` if there is no such offset. Blank units are skipped.
        """
        end = self.next_offset
        first_offset = self.segments.start // UNIT_BYTES if len(self.segments) else self.tail_start

        def is_before(unit: Unit) -> bool:
            return unit.is_blank or unit.physical_offset < log_offset

        # In most cases the first unit is the result. Then a damaged unit cannot mislead the search.
        offset = first_offset
        first_unit = self.read_unit(first_offset) if first_offset < end else None
        if first_unit is None or is_before(first_unit):
            offset = _bisect_offsets(first_offset, end, is_before, self._read_past_gap)
            offset = self._skip_gap(offset)  # the search ends at the beginning of a gap
        self.segments.release()
        return offset

    def _read_past_gap(self, offset: int) -> Unit | None:
        """Return the first unit from `offset` on that is not blank.

        If the next GAP_MAX units are all blank, the last of them is returned; None if there is no
        unit.
        """
        unit = self.read_unit(offset)
        for following_offset in range(offset + 1, min(offset + GAP_MAX, self.next_offset)):
            if unit is None or not unit.is_blank:
                break
            unit = self.read_unit(following_offset)
        return unit

    def _skip_gap(self, offset: int) -> int:
        """Return the first offset from `offset` on that has no blank unit."""
        while offset < self.next_offset:
            unit = self.read_unit(offset)
            if unit is None or not unit.is_blank:
                break
            offset += 1
        return offset

    def end_offset_before(self, log_end: int) -> int:
        """Return the offset behind the last unit whose record ends at `log_end` or before.

        Returns `offset_min` if there is no such unit. Zeros near the queue's end are not units.
        """
        offset = self.next_offset
        stop = max(self.offset_min, offset - LINEAR_SEARCH_UNITS)
        while offset > stop:
            unit = self.unit(offset - 1)
            if unit is None or (unit.is_used and unit.end <= log_end):
                return offset
            offset -= 1

        # The end of the log is far before the end of the queue.
        def is_before(unit: Unit) -> bool:
            return unit.is_blank or unit.end <= log_end

        return _bisect_offsets(self.offset_min, offset, is_before, self.unit)

    def update_offset_min(self, log_start: int) -> None:
        """Set `offset_min` to the first offset whose record is at `log_start` or behind."""
        self.offset_min = self.first_offset_from(log_start)

    # --- writing

    def flush(self) -> list[str]:
        """Write the committed part of the tail to the files, and remove it from memory.

        The tail contains the units (20-byte entries) that are in no file yet. Missing files and
        directories are created. Nothing is synced: the result lists the paths to sync, and is empty
        if there was nothing to write. If it raises OSError, the units stay in memory, and the next
        flush writes them.
        """
        touched: list[str] = []
        segments = self.segments
        # Positions are bytes from the beginning of the queue, as if it were one file.
        tail_position = self.tail_start * UNIT_BYTES
        committed_end = self.committed_offset * UNIT_BYTES
        position = tail_position
        while position < committed_end:
            segment = segments.at(position)
            if segment is None:
                segment = self._add_file(position, tail_position, touched)
            piece_end = min(segment.end, committed_end)
            piece = bytes(self.tail[position - tail_position : piece_end - tail_position])
            segment.write(piece, position)
            segment.release()
            touched.append(segment.path)
            position += len(piece)
        if position > tail_position:
            del self.tail[: position - tail_position]
            self.tail_start = self.committed_offset
        return touched

    def _add_file(self, position: int, tail_position: int, touched: list[str]) -> Segment:
        """Create the file that contains byte `position` of the queue, and return it.

        If the queue begins within this file, at `tail_position`, blank units fill the part before.
        Directories to sync are added to `touched`. Raises OSError.
        """
        segments = self.segments
        if not len(segments):
            segments.make_directory(touched)
        segment = segments.add(position - position % segments.file_bytes)
        touched.append(segments.directory)
        if tail_position > segment.base:
            blank_count = (tail_position - segment.base) // UNIT_BYTES
            segment.write(BLANK_UNIT * blank_count, segment.base)
        return segment

    def overwrite_unit(self, offset: int, stored_unit: bytes) -> None:
        """Overwrite the unit (entry) of an offset in the tail, the files, or both.

        `stored_unit` has the 20 bytes of the new unit. The next checkpoint syncs the file. Raises
        OSError.
        """
        tail_index = (offset - self.tail_start) * UNIT_BYTES
        if 0 <= tail_index < len(self.tail):
            self.tail[tail_index : tail_index + UNIT_BYTES] = stored_unit
        file_position = offset * UNIT_BYTES
        segment = self.segments.at(file_position)
        if segment is not None:
            segment.write(stored_unit, file_position)
            segment.release()
            self.unsynced.add(segment.path)

    def truncate(self, offset: int) -> None:
        """Remove the units (entries) from `offset` on, in memory and in the files.

        The queue then ends there; `visible_offset` and `offset_min` are lowered if they are
        greater. The next checkpoint syncs the files. Raises OSError.
        """
        visible_offset = min(self.visible_offset, offset)  # `_set_end` overwrites it
        if offset >= self.tail_start:  # all removed units are in memory only
            del self.tail[(offset - self.tail_start) * UNIT_BYTES :]
            self.next_offset = self.committed_offset = offset
        else:
            self._set_end(offset)
        self.visible_offset = visible_offset
        self.offset_min = min(self.offset_min, offset)

        # The files may be longer than the units that were written: they are filled with zeros.
        position = offset * UNIT_BYTES
        if position < self.segments.end:
            self._truncate_files(position, keeps_file=True)

    def _truncate_files(self, position: int, *, keeps_file: bool = False) -> None:
        """Remove everything from byte `position` of the queue on from the files.

        Later files are removed, and the rest of the file that contains `position` is zeroed. If
        `keeps_file`, this file stays even if it begins at `position`. The next checkpoint syncs the
        change; otherwise the units could come back after a power loss.
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

        Sets all offsets of the queue. The end is behind the last unit. If `before` is given, it is
        behind the last unit whose record begins before this position of the log. The log begins at
        `log_start`. This takes a few reads, however long the queue is.

        If `after_crash`, the units behind the end are removed from the files, and an empty or
        missing file ends the queue. If `removes`, the last unit is in the tail afterwards, because
        recovery reads it; a flush writes it again. `inspect(queue)` is called when the offsets are
        set and the units that were read are still in memory. Raises StoreDamagedError if the files
        do not fit together, and OSError.
        """
        self.segments.load(is_derived=after_crash, removes=removes, keeps_open=True)
        first_offset = self.segments.start // UNIT_BYTES
        self.reset_to(first_offset)

        def is_kept(unit: Unit) -> bool:
            return unit.is_used and (
                before is None or unit.is_blank or unit.physical_offset < before
            )

        used_end = self._find_end(first_offset, is_kept)
        if after_crash and used_end < self.segments.end:
            self._truncate_files(used_end, keeps_file=True)
        self.update_offset_min(log_start)
        inspect(self)
        self._drop_loaded_units(first_offset, keeps_last=removes)

    def _find_end(self, first_offset: int, is_kept: Callable[[Unit], bool]) -> int:
        """Find the end of the queue in its files. Set `next_offset` to it, and `tail`.

        `is_kept(unit)` must be true for all units before the end, and false for the others. The
        files begin with `first_offset`. Returns the byte position in the files from which on units
        may have to be removed. If the end is in the last block of the files, `tail` contains the
        units of that block.
        """
        # In most cases the end lies in the last block of the files.
        block_position, block = self.segments.read_last_block(UNIT_BYTES)
        block_offset = block_position // UNIT_BYTES
        written_count = -(-len(block.rstrip(b"\0")) // UNIT_BYTES)  # rounded up
        kept_count = _count_leading_units(block, written_count, is_kept)
        if kept_count:
            end = block_offset + kept_count
        else:
            end = _bisect_offsets(first_offset, block_offset, is_kept, self.read_unit)

        # The block stays in `tail` while `load` runs: a small queue needs no other read.
        self.tail += block[: kept_count * UNIT_BYTES]
        self.tail_start = end - kept_count
        self.next_offset = end

        # If all units of the block are kept, only zeros lie between the last one and its end.
        is_block_kept = 0 < kept_count == written_count
        if is_block_kept:
            return block_position + len(block)
        return end * UNIT_BYTES

    def _drop_loaded_units(self, first_offset: int, *, keeps_last: bool) -> None:
        """Drop the units in `tail`, which the files have. If `keeps_last`, keep the last one.

        `first_offset` is the first offset in the files.
        """
        end = self.next_offset
        last_unit = bytes(self.tail[-UNIT_BYTES:])
        if not last_unit and end > first_offset:
            last_unit = UNIT.pack(*(self.read_unit(end - 1) or Unit(0, 0, 0)))
        self._set_end(end)
        if keeps_last and last_unit:
            self.tail_start = end - 1
            self.tail += last_unit
        self.segments.release()

    def put(self, offset: int, unit: Unit) -> bool:
        """Add the unit (entry) of a record that was found in the log, and make it visible.

        Offsets between the queue's end and `offset` get blank units. But an empty queue begins at
        `offset`, and its files are removed. If the queue has a unit at `offset` whose record is
        earlier in the log, the topic was deleted and created again: the queue is truncated there
        first. If that record is the same or later, nothing changes, and False is returned. Raises
        OSError.
        """
        if offset < self.next_offset:
            present_unit = self.unit(offset)
            if present_unit is not None and present_unit.physical_offset >= unit.physical_offset:
                return False
            self.truncate(offset)
        if offset != self.next_offset:
            is_empty = self.next_offset == self.offset_min
            if is_empty:
                self._truncate_files(0)
                self.reset_to(offset)
            self.tail += BLANK_UNIT * (offset - self.next_offset)
        self.tail += UNIT.pack(*unit)
        self.next_offset = self.committed_offset = self.visible_offset = offset + 1
        return True

    def extend(self, offset: int, units: bytes) -> int | None:
        """Add consecutive units (20-byte entries, joined), the first of which has `offset`.

        Units at the beginning that the queue has already must be equal to its units. Returns the
        number of units that are new. Returns None, with nothing changed, if `offset` is behind the
        queue's end or a present unit differs: then call `put` for each.
        """
        present_bytes = min((self.next_offset - offset) * UNIT_BYTES, len(units))
        if present_bytes < 0:
            return None
        compared_bytes = 0
        while compared_bytes < present_bytes:
            units_left = (present_bytes - compared_bytes) // UNIT_BYTES
            present_units = self.units(offset + compared_bytes // UNIT_BYTES, units_left)
            if not len(present_units):
                return None
            if bytes(present_units) != units[compared_bytes : compared_bytes + len(present_units)]:
                return None
            compared_bytes += len(present_units)

        self.tail += units[present_bytes:]
        units_added = (len(units) - present_bytes) // UNIT_BYTES
        self.next_offset += units_added
        self.committed_offset = self.visible_offset = self.next_offset
        return units_added


def expired_units(
    files: Files, directory: str, file_bytes: int, log_start: int
) -> list[tuple[str, int, int, bytes]]:
    """Return (topic, queue id, offset, unit) for the last message of each fully expired queue.

    A queue is fully expired if all its records are before `log_start`, where the log begins. Then
    only its files say at which offset it continues. `unit` is the queue's entry, 20 bytes. Queues
    that never had a message are left out. Loads the queues without changing them, so any thread may
    call this while a broker writes them. Raises OSError.
    """
    queues = ConsumeQueues(files, directory, file_bytes)
    queues.load(after_crash=False, removes=False, log_start=log_start)
    expired = []
    for queue in queues:
        is_fully_expired = queue.offset_min == queue.next_offset
        if not is_fully_expired or queue.next_offset == 0:
            continue
        last_offset = queue.next_offset - 1
        unit = queue.read_unit(last_offset)
        if unit is not None:
            expired.append((*queue.key, last_offset, UNIT.pack(*unit)))
    queues.close()
    return expired


def _count_leading_units(block: Units, count: int, is_kept: Callable[[Unit], bool]) -> int:
    """Count the units at the start of a block for which `is_kept` is true.

    Only the first `count` units are considered. `is_kept(unit)` is true for the units before the
    end of the queue, and false for all others.
    """

    def is_behind_end(index: int) -> bool:
        return not is_kept(Unit._make(UNIT.unpack_from(block, index * UNIT_BYTES)))

    if not count or is_behind_end(0):
        return 0
    if not is_behind_end(count - 1):  # the common case, without a search
        return count
    return bisect_left(range(count), True, key=is_behind_end)


def _bisect_offsets(
    low: int, high: int, is_before: Callable[[Unit], bool], read: Callable[[int], Unit | None]
) -> int:
    """Return the first offset in [low, high) whose unit is not before the end; else `high`.

    `is_before(unit)` must be true for the units before some offset, and false from there on.
    `read(offset)` returns a unit, or None, which counts as not before.
    """

    def is_end(offset: int) -> bool:
        unit = read(offset)
        return unit is None or not is_before(unit)

    return low + bisect_left(range(low, high), True, key=is_end)


class ConsumeQueues:
    """All queues of a store, by (topic, queue id).

    The keys of `dirty` are the queues with units that are not in their files, in the order in
    which they became so. A set would order them by address, and a simulation would write its files
    in another order each time. `unsynced` are files and directories that were written since the
    last checkpoint. `deleted` says which records belong to
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

        `file_bytes` is the size of each file of a queue. `long_topics` allows retry topics to be
        longer than other topics. `deleted` None means that no topic was deleted.
        """
        self._files = files
        self._directory = directory
        self._file_bytes = file_bytes
        self._long_topics = long_topics
        self.by_key: dict[tuple[str, int], Queue] = {}
        self.dirty: dict[Queue, None] = {}
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
        is_wanted: Callable[[str, int], bool] | None = None,
        inspect: Callable[[Queue], object] = lambda queue: None,
    ) -> None:
        """Load the queues on disk, which replace those in memory.

        `is_wanted(topic, queue_id)` returns whether to load a queue; None loads all. `Queue.load`
        gets the other arguments: `before` is the position of the log at which queues are cut, and
        `log_start` the begin of the log. Raises StoreDamagedError if files do not fit together, and
        OSError.
        """
        self.by_key.clear()
        self.dirty.clear()
        for key in self._iter_keys_on_disk():
            if is_wanted is not None and not is_wanted(*key):
                continue
            queue = self.get_unchecked(key)
            queue.load(
                after_crash=after_crash,
                before=before,
                removes=removes,
                log_start=log_start,
                inspect=inspect,
            )

    def may_have_other_file_size(self) -> bool:
        """Return whether the configured file size is probably wrong, and not the files.

        That is so if all files on disk have the same other size, a multiple of `UNIT_BYTES`. Raises
        OSError.
        """
        sizes: set[int] = set()
        for topic, queue_id in self._iter_keys_on_disk():
            path = f"{self._directory}/{topic}/{queue_id}"
            segments = SegmentFiles(self._files, path, self._file_bytes, FILE_SIZE_SETTING)
            sizes.update(segments.sizes_on_disk())
        if len(sizes) != 1:
            return False
        (size,) = sizes
        return size != self._file_bytes and size > 0 and size % UNIT_BYTES == 0

    def _iter_keys_on_disk(self) -> Iterator[tuple[str, int]]:
        """Yield the keys of all queues that have a directory."""
        for topic in text_names(self._files, self._directory):
            for name in self._files.names(f"{self._directory}/{topic}"):
                if name.isascii() and name.isdigit():
                    yield topic, int(name)

    def get_or_create(self, key: tuple[str, int]) -> Queue:
        """Return a queue, and create it in memory if it does not exist.

        Raises MessageIllegalError if the topic or queue id is invalid.
        """
        queue = self.by_key.get(key)
        if queue is not None:
            return queue
        topic, queue_id = key
        check_topic(topic, long_topics=self._long_topics)
        if queue_id < 0:
            raise MessageIllegalError(
                f"The queue id {queue_id} is negative.", fix="Queue ids begin at 0."
            )
        return self.get_unchecked(key)

    def get_unchecked(self, key: tuple[str, int]) -> Queue:
        """Return a queue, and create it in memory if it does not exist. Its name is not checked."""
        queue = self.by_key.get(key)
        if queue is None:
            directory = f"{self._directory}/{key[0]}/{key[1]}"
            queue = Queue(self._files, directory, self._file_bytes, key, self.unsynced)
            self.by_key[key] = queue
        return queue

    def mark_dirty(self, queue: Queue) -> None:
        """Note that a queue has new units in its tail, for the next flush.

        Writes them at once if the tail has `TAIL_BYTES_MAX` or more, which raises OSError on
        failure.
        """
        self.dirty[queue] = None
        if len(queue.tail) >= TAIL_BYTES_MAX:
            self.unsynced.update(queue.flush())

    def flush(self, queue: Queue) -> None:
        """Write a queue's tail to its files if it has units that are not in them.

        If it raises OSError, the units that were not written stay in memory for the next call.
        """
        if queue in self.dirty:
            self.unsynced.update(queue.flush())
            self.dirty.pop(queue, None)

    def truncate_to_log(self, end: int) -> None:
        """Remove the units (entries) of records that end behind `end`, where the log now ends.

        Queues without such units do not change. Raises OSError.
        """
        for queue in self:
            offset = queue.end_offset_before(end)
            if offset < queue.next_offset:
                queue.truncate(offset)

    def delete_topic(self, topic: str) -> None:
        """Remove the queues of a topic and their files, and the topic's directory if it is empty.

        Does nothing if the topic has no queue. Raises MessageIllegalError if the topic is not a
        valid directory name, so that no queue can have it. Raises OSError.
        """
        check_topic(topic)
        self._remove_topic(topic)

    def _remove_topic(self, topic: str) -> None:
        """Remove the queues of a topic with any name, from memory and disk."""
        for key in list(self.by_key):
            queue_topic, _ = key
            if queue_topic == topic:
                queue = self.by_key.pop(key)
                self.dirty.pop(queue, None)
                queue.segments.remove_all()
        directory = f"{self._directory}/{topic}"
        if self._files.exists(directory) and not self._files.names(directory):
            self._files.remove(directory)
            self._files.sync_directory(self._directory)

    def finish_deletions(self) -> None:
        """Remove the topics whose deletion was interrupted by a crash, with their files.

        Such a topic is in `deleted`, and the last record of one of its queues is from before the
        deletion. A topic that was created again since stays. Raises OSError.
        """
        for (topic, _), queue in list(self.by_key.items()):
            if topic not in self.deleted.end_by_topic or not queue.next_offset:
                continue
            last_unit = queue.unit(queue.next_offset - 1)
            if last_unit is None:
                continue
            if not self.deleted.is_live(topic, last_unit.physical_offset):
                self._remove_topic(topic)

    def remove_all(self) -> None:
        """Remove all queues and their files, loaded or not, so that they can be built again."""
        for key in self._iter_keys_on_disk():
            self.get_unchecked(key)
        for topic in {topic for topic, _ in self.by_key}:
            self._remove_topic(topic)

    def digest(self, log_end: int | None = None) -> tuple[int, int]:
        """Return (number of queues that have units, sum of their end offsets), for checkpoints.

        Only committed units count. If `log_end` is given, returns the numbers after a truncation of
        the log there. Returns (-1, -1), which no start accepts, if `is_doubtful`.
        """
        if self.is_doubtful:
            return -1, -1
        if log_end is None:
            end_offsets = [queue.committed_offset for queue in self]
        else:
            end_offsets = [queue.end_offset_before(log_end) for queue in self]
        queues_with_units = len(end_offsets) - end_offsets.count(0)
        return queues_with_units, sum(end_offsets)

    def find_last_unit(self, log_end: int | None = None) -> Unit | None:
        """Return the unit (entry) whose record is last in the log; None if there is none.

        Only the last unit of each queue is examined; it does not count if it is blank. If `log_end`
        is given, the units whose records end behind it are ignored.
        """
        last_units = []
        for queue in self:
            end = queue.next_offset
            if log_end is not None:
                end = queue.end_offset_before(log_end)
            unit = queue.unit(end - 1) if end > 0 else None
            if unit is not None and not unit.is_blank:
                last_units.append(unit)
        return max(last_units, default=None)  # units compare by position first

    def close(self) -> None:
        for queue in self:
            queue.segments.close()
