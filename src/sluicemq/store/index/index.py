"""The key index: from `topic#key` to the places of messages in the log (docs/spec/store.md §4).

Built behind the log, never on the way of a send: `note` remembers that the log grew, `catch_up`
walks what was noted, in slices, and puts the keys into the last file in batches (`columns`). A
query catches up first, so that nobody sees the delay.

    log     ....................|=========noted=========|
                                position             goal
    files   20261121020310980 (full)   20261121031500001 (the last: entries are added here)

What makes it exact: entries lie in the order of the log, so "everything before `position` is in the
files, nothing else" is the whole state, and a crash is undone by going back to the last mark: file,
number of entries, position (`Mark`). The slots, which were overwritten meanwhile, are built again
from the entries. Without a mark (a store that Java wrote) the headers say where to go on, after
an orderly stop; after a crash files that RocketMQ's checkpoint does not vouch for are built again.
Holes in an index that others wrote (a crash can make them there), and files that are missing
though the mark counted them, are looked for in the background, and all is built again when a key is
missing.

A batch that is written as columns (`record.batch_columns`) has the table of its properties, so its
keys and places are known when it is appended. `KnownKeys` keeps both until the index comes there;
then it does not read the log. What is not there is read: after a restart, or when the index is far
behind.
"""

import logging
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.clock import Clock
from sluicemq.errors import StoreDamagedError
from sluicemq.files import Files
from sluicemq.store.index.file import NAME_DIGITS, Geometry, IndexFile, is_index_name
from sluicemq.store.index.hashes import key_hash, keys_of
from sluicemq.store.log import CommitLog

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import Columns as Batch
    from sluicemq.record.batch_columns import Laid
    from sluicemq.record.table import Positions
    from sluicemq.store.index.columns import Columns

logger = logging.getLogger(__name__)

BATCHES_MAX: Final = 256
"""The newest that are remembered: some ten megabytes."""
SLICE_BYTES: Final = 1 << 20
"""Of the log, in one go: some 3,000 small messages, two milliseconds. In smaller slices the
calls of NumPy, each with a price of its own, cost more than the work they do."""
STEP_COST_BYTES: Final = 1 << 19
"""What one step of getting ready counts for."""
QUERY_BACKLOG_MAX: Final = 16 << 20
"""A query waits for so much of the log to be indexed, not for more: the loop is held so long."""


class Known(NamedTuple):
    """The keys of all records from `start` to `end` of the log: record i begins at `starts[i]`."""

    start: int
    end: int
    starts: "Positions"
    columns: "Columns"


class KnownKeys:
    """The batches that were appended last, in the order of the log."""

    def __init__(self, *, is_wanted: bool = True) -> None:
        """`is_wanted`: there is an index."""
        self._is_wanted = is_wanted
        self._batches: deque[Known] = deque(maxlen=BATCHES_MAX)

    def note(self, topic: str, batch: "Batch", laid: "Laid", stored_ms: int) -> None:
        """A batch was appended."""
        if not self._is_wanted:
            return
        from sluicemq.store.index.columns import columns_of_batch  # noqa: PLC0415 - NumPy

        columns = columns_of_batch(topic, batch, stored_ms)
        if columns is not None:
            start = int(laid.positions[0])
            self._batches.append(Known(start, laid.end, laid.positions, columns))

    def take_back(self, position: int) -> None:
        """What was appended from there on has never been: its turn failed."""
        while self._batches and self._batches[-1].start >= position:
            self._batches.pop()

    def next_start(self, position: int) -> int | None:
        """Where the first batch begins at `position` or behind; None without one."""
        while self._batches and self._batches[0].start < position:
            self._batches.popleft()
        return self._batches[0].start if self._batches else None

    def take(self, position: int, goal: int, bytes_max: int) -> Known | None:
        """The batches that lie one behind the other from `position` on, as one; None when none
        begins there, or ends behind `goal`."""
        found: list[Known] = []
        end = position
        while self._batches and end - position < bytes_max:
            first = self._batches[0]
            if first.start != end or first.end > goal:
                break
            found.append(self._batches.popleft())
            end = first.end
        if len(found) < 2:
            return found[0] if found else None
        import numpy as np  # noqa: PLC0415 - it is there when there are batches

        before = np.cumsum([0] + [len(one.starts) for one in found[:-1]])
        hashes, records, times_ms = zip(*(one.columns for one in found), strict=True)
        columns = found[0].columns._replace(
            hashes=np.concatenate(hashes),
            records=np.concatenate([own + n for own, n in zip(records, before, strict=True)]),
            times_ms=np.concatenate(times_ms),
        )
        return Known(position, end, np.concatenate([one.starts for one in found]), columns)


class IndexMark(NamedTuple):
    """See `directory.Mark`; no offset where nothing is known."""

    offset: int = 0
    entries: int = 0
    file: int = 0
    files: int = -1


class KeyIndex:
    """The index of one store. Everything but `paths_to_sync`'s syncs happens in one thread.

    `known` is what the writer knows. `before_full` gets the last store time of a file that is
    full, before its header says so.
    """

    def __init__(
        self, files: Files, directory: str, log: CommitLog, geometry: Geometry, clock: Clock
    ) -> None:
        self._files = files
        self._directory = directory
        self._log = log
        self._geometry = geometry
        self._clock = clock
        self._index_files: list[IndexFile] = []
        self._unsynced: set[str] = set()
        self._preparing: deque[Iterator[None]] = deque()
        self._proof: Iterator[None] | None = None  # are the files that others wrote complete?
        self._position = self._goal = 0
        self._marked_name = 0  # the last file that the durable mark at our start speaks of
        self._skip = 0  # keys of the record at `position` that are in already
        self.known = KnownKeys()
        self.before_full: Callable[[int], None] = lambda end_ms: None

    @property
    def _last(self) -> IndexFile | None:
        return self._index_files[-1] if self._index_files else None

    # --- opening

    def load(
        self, mark: IndexMark, end: int, *, after_crash: bool = False, java_time_ms: int = 0
    ) -> None:
        """Find the files, and where to go on; the log has been recovered and ends at `end`.

        What takes time is left to `catch_up`. Raises StoreDamagedError when the size of a file is
        not known.
        """
        self._goal = end
        self._marked_name = mark.file
        names = [n for n in self._files.names(self._directory) if is_index_name(n)]
        while names:
            with closing(self._files.open(f"{self._directory}/{names[-1]}")) as file:
                if file.size():
                    break
            # Without any size: the trace of a crash, or an error, at its creation.
            self._files.remove(f"{self._directory}/{names.pop()}")
        if after_crash:
            names = self._drop_after_crash(names, mark, java_time_ms)
        self._index_files = [self._open(name) for name in names]
        last = self._last
        found = last.name if last is not None else 0
        # Fewer than the mark says: the last flush failed, after the entries were safe.
        is_torn = after_crash or (last is not None and last.count < mark.entries)
        if found != mark.file or not (last is None or is_torn or last.count == mark.entries):
            self._go_on_by_headers(end)
        else:
            self._position = mark.offset
            if is_torn and last is not None:
                self._restore(last, min(mark.entries, last.geometry.entries))
            if len(self._index_files) != mark.files:  # removed by retention, or missing?
                self._proof = self._look_for_holes()
        self._position = max(self._position, self._log.start)
        if self._position >= end:
            self._position, self._skip = end, 0

    def _open(self, name: str) -> IndexFile:
        return IndexFile.open(self._files, f"{self._directory}/{name}", self._geometry)

    def _drop_after_crash(self, names: list[str], mark: IndexMark, java_time_ms: int) -> list[str]:
        """Keep the files that the mark, or without one RocketMQ's checkpoint, vouches for."""

        def is_vouched_for(name: str) -> bool:
            if mark.offset:
                return int(name) <= mark.file
            try:
                file = self._open(name)
            except (StoreDamagedError, struct.error):
                return False
            return not file.is_empty and 0 < file.end_ms <= java_time_ms

        keep = list(takewhile(is_vouched_for, names))
        for name in reversed(names[len(keep) :]):
            self._files.remove(f"{self._directory}/{name}")
        if len(keep) < len(names):
            self._files.sync_directory(self._directory)
        return keep

    def _go_on_by_headers(self, end: int) -> None:
        """Others wrote the files: complete up to the last record that has an entry, or the log
        was brought back from a copy and is shorter than they say."""
        files = self._index_files
        while files and (files[-1].is_empty or files[-1].offset_of(1) >= end):
            self._remove_last()
        self._position = 0
        if not files:
            return
        last = files[-1]
        if last.end_offset >= end:
            self._restore(last, last.count_before(end))
            self._position = end
        else:
            self._position = last.end_offset
            self._skip = sum(file.count - file.count_before(self._position) for file in files)
        self._proof = self._look_for_holes()

    def _restore(self, file: IndexFile, count: int) -> None:
        file.count = count
        end_ms = 0
        if count > 1:
            offset = file.offset_of(count - 1)
            segment = self._log.segments.at(offset)
            end_ms = file.end_ms  # about it, when the record is gone
            if segment is not None:
                end_ms = keys_of(segment.view(), offset - segment.base).store_time_ms
        self._preparing.append(file.restore(count, end_ms))

    def _remove_last(self) -> None:
        file = self._index_files.pop()
        file.close()
        self._files.remove(file.path)
        self._unsynced.discard(file.path)
        self._unsynced.add(self._directory)

    # --- following the log

    def note(self, start: int, end: int) -> None:
        """The log was written up to `end`."""
        self._goal = end

    @property
    def backlog_bytes(self) -> int:
        """How much of the log is not indexed yet."""
        return self._goal - self._position

    @property
    def is_current(self) -> bool:
        """Whether everything that was noted is indexed."""
        return self._position >= self._goal and not self._preparing

    def catch_up(self, bytes_max: int | None = None) -> bool:
        """Index what was noted, about `bytes_max` of the log at most; True when all is done.

        Raises OSError when an entry cannot be written; the next call goes on where this one was.
        """
        left = bytes_max
        while self._preparing or self._position < self._goal or self._proof is not None:
            if left is not None and left <= 0:
                return False
            used = STEP_COST_BYTES
            if self._preparing:
                if next(self._preparing[0], self) is self:
                    self._preparing.popleft()
            elif self._position < self._goal:
                used = self._index_slice(SLICE_BYTES if left is None else min(left, SLICE_BYTES))
            elif self._proof is not None and next(self._proof, self) is self:
                self._proof = None
            left = None if left is None else left - used
        return True

    def catch_up_for_query(self) -> bool:
        """Index what is missing, when it is little; False when a query would wait too long."""
        if self.backlog_bytes <= QUERY_BACKLOG_MAX:
            self.catch_up(QUERY_BACKLOG_MAX)
        return self.is_current

    def _index_slice(self, bytes_max: int) -> int:
        """Index records from `position` on; returns how many bytes of the log that was."""
        before = self._position = max(self._position, self._log.start)
        segment, last = self._log.segments.at(before), self._last
        if segment is None:
            self._position = self._goal
            return self._goal - before
        if last is not None and not last.is_ready and last.room:
            self._preparing.append(last.load())  # its slots have to come into memory first
            return STEP_COST_BYTES
        following = self.known.next_start(before)
        if following == before and not self._skip:
            known = self.known.take(before, self._goal, bytes_max)
            if known is not None:
                self._put(known.columns, 0, known.starts)
                self._position = known.end
                return known.end - before
        from sluicemq.store.index import columns  # noqa: PLC0415 - NumPy when there is something

        view, base = segment.view(), segment.base
        ends = before + bytes_max, self._goal, segment.end, following or self._goal
        stop = max(min(ends), before + 1) - base
        starts, end = columns.walk(view, before - base, stop)
        if len(starts):
            self._put(columns.columns_of(view, starts), base, starts)
        self._position, self._skip = max(base + end, before), 0
        return self._position - before

    def _put(self, columns: "Columns", base: int, starts: "Positions") -> None:
        done = self._skip
        total = len(columns.hashes)
        try:
            while done < total:
                file = self._file_with_room()
                part = columns.part(done, file.room)
                file.append(part, base, starts)
                self._unsynced.add(file.path)
                done += len(part.hashes)
        except OSError:
            if done < total:  # go on at the first key that is missing
                record = int(columns.records[done])
                self._position = base + int(starts[record])
                self._skip = done - int((columns.records < record).sum())
            raise

    def _file_with_room(self) -> IndexFile:
        last = self._last
        if last is not None and last.room > 0:
            return last
        if last is not None:
            self.before_full(last.end_ms)
            last.flush()
            self._unsynced.add(last.path)
            last.release()
        if not self._files.exists(self._directory):
            self._files.make_directory(self._directory)
        # The local time in ms, as digits; later than the last one's whatever the clock says, and
        # than the one in the mark: after a crash the mark must not vouch for another file.
        now_ms = self._clock.now_ms()
        moment = datetime.fromtimestamp(now_ms // 1000, UTC).astimezone()
        name = int(f"{moment:%Y%m%d%H%M%S}{now_ms % 1000:03d}")
        name = max(name, self._marked_name + 1, 0 if last is None else last.name + 1)
        while self._files.exists(path := f"{self._directory}/{name:0{NAME_DIGITS}d}"):
            name += 1
        self._index_files.append(IndexFile.create(self._files, path, self._geometry, last))
        return self._index_files[-1]

    # --- proving what others wrote

    def _look_for_holes(self) -> Iterator[None]:
        """Is there a record with keys where the files say that there is none?"""
        offset = self._log.start
        for file in list(self._index_files):
            while offset < file.begin_offset:
                found, offset = self._look(offset, file.begin_offset)
                if found:
                    logger.warning(
                        "the key index in %s lacks messages at %d: building it anew",
                        self._directory, offset,
                    )  # fmt: skip
                    while self._index_files:
                        self._remove_last()
                    self._position, self._skip = self._log.start, 0
                    self._preparing.clear()
                    return
                yield
            if self._log.segments.at(file.end_offset) is None:
                offset = max(file.end_offset, self._log.start)
            else:  # behind the record that begins there
                offset = self._look(file.end_offset, file.end_offset + 1)[1]

    def _look(self, offset: int, end: int) -> tuple[bool, int]:
        """At a slice of the log: (whether a record there has keys, where it ended)."""
        segment = self._log.segments.at(offset)
        if segment is None:
            return False, end
        from sluicemq.store.index import columns  # noqa: PLC0415 - NumPy when there is something

        view, base = segment.view(), segment.base
        stop = min(offset + SLICE_BYTES, end, segment.end) - base
        starts, stop = columns.walk(view, offset - base, stop)
        found = len(starts) and len(columns.columns_of(view, starts).hashes)
        return bool(found), max(base + stop, offset + 1)

    # --- asking

    def query(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Places of messages that may have this key and time, newest first. Other keys of the same
        hash may be among them: check the record. Call `catch_up` before."""
        value = key_hash(topic, key)
        for file in reversed(self._index_files):
            if file.is_empty or file.begin_ms > end_ms or file.end_ms + 999 < begin_ms:
                continue
            yield from file.find(value, begin_ms, end_ms)
            if file.begin_ms < begin_ms:
                return

    @property
    def last(self) -> tuple[int, int]:
        """Store time (ms) and place of the newest message that has an entry; (0, 0): none."""
        file = self._last
        return (0, 0) if file is None else (file.end_ms, file.end_offset)

    # --- durability

    def mark(self) -> IndexMark:
        """What may be claimed once the paths of `paths_to_sync` are synced."""
        if self._proof is not None or self._skip:
            return IndexMark()
        last = self._last
        if last is None:
            return IndexMark(self._position, files=0)
        return IndexMark(self._position, last.count, last.name, len(self._index_files))

    @property
    def is_synced(self) -> bool:
        """Whether there is nothing to sync."""
        return not self._unsynced

    def paths_to_sync(self) -> list[str]:
        """Files (and maybe the directory) that were changed since the last call."""
        paths = sorted(self._unsynced)
        self._unsynced.clear()
        return paths

    def time_ms(self, log_time_ms: int) -> int:
        """Up to which store time all is indexed, when the log's last record is of `log_time_ms`."""
        return log_time_ms if self.is_current else self.last[0]

    @property
    def is_flushed(self) -> bool:
        """Whether slots and headers lie in the files as they are."""
        return self._last is None or self._last.is_flushed

    def flush(self) -> None:
        """Write slots and header of the last file, so that RocketMQ could go on with it.

        Raises OSError.
        """
        last = self._last
        if last is not None and not last.is_flushed:
            self._unsynced.add(last.path)  # before: of a write that fails something may arrive
            last.flush()

    def remove_before(self, log_offset: int) -> list[str]:
        """Let go of files whose messages all lie before `log_offset`, never of the last one.

        Returns the paths of those removed. Raises OSError.
        """
        removed = []
        while len(self._index_files) > 1 and self._index_files[0].end_offset < log_offset:
            file, *others = self._index_files
            self._files.remove(file.path)
            file.close()
            self._index_files = others
            self._unsynced.discard(file.path)
            removed.append(file.path)
        return removed

    def close(self) -> None:
        for file in self._index_files:
            file.close()
