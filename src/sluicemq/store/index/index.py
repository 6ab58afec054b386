"""The key index: from `topic#key` to the places of messages in the log (spec/store.md §4).

Built behind the log, never on the way of a send: `catch_up` walks what was written, in slices, and
puts the keys into the last file in batches (`columns`). A query catches up first, so that nobody
sees the delay, unless so much is missing that nobody would wait for it.

    log     ....................|======not indexed======|
                                position             its end
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

Slots and headers, which only RocketMQ reads again from the files, are written once a minute, up to
20 MB of them: by `flush_due` in the thread that waits for the disk, so that the loop does not. It
alone works beside the others; until it is done the index stands still, and a query waits.

The files know hashes and seconds. What `find` answers has the topic, the key itself, and a store
time within the range to the millisecond; only what readers may see is found. An index that cannot
be written (the disk is full) stops nothing: it falls behind, and goes on from there as soon as it
can. When it is switched off its files stay as they are, and so does its mark.
"""

import importlib
import logging
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.clock import Clock
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError
from sluicemq.files import Files
from sluicemq.outages import Outages, kind_of
from sluicemq.record.codec import hash_key, hash_keys, read_keys
from sluicemq.store.directory import CheckpointFile
from sluicemq.store.index.file import (
    NAME_DIGITS,
    Geometry,
    IndexFile,
    is_index_name,
)
from sluicemq.store.log import CommitLog

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import BatchColumns as Batch
    from sluicemq.record.batch_columns import EncodedRecords
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
FLUSH_S: Final = 60.0
"""How often slots and headers are written: only RocketMQ would miss them after a crash."""
CLOSE_BACKLOG_MAX: Final = 256 << 20
"""A stop indexes what is left, but does not wait for an index that is built anew."""
CANDIDATES_MAX: Final = 4096
"""Records that one query reads: keys of equal hash are rare, hot keys are within their limit."""
_COLUMNS: Final = "sluicemq.store.index.columns"
_WRITES: Final = "key index writes"


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

    def note(self, topic: str, batch: "Batch", laid: "EncodedRecords", stored_ms: int) -> None:
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


class Found(NamedTuple):
    """Records, newest first. `last_time_ms` and `last_offset` are how far the index is, 0 when it
    had nothing of that hash; `behind_bytes` is how much of the log is not indexed yet, when that
    is too much to wait for: then nothing was looked up."""

    records: list[bytes]
    last_time_ms: int = 0
    last_offset: int = 0
    behind_bytes: int = 0


class KeyIndex:
    """The index of one store; everything but `flush_due` in the thread that appends."""

    def __init__(
        self,
        config: StoreConfig,
        files: Files,
        clock: Clock,
        log: CommitLog,
        durable: CheckpointFile,
        *,
        after_crash: bool,
    ) -> None:
        """Load; the log has been recovered. Raises StoreDamagedError for files of unknown sizes."""
        self._files = files
        self._directory = f"{config.root}/index"
        self._durable = durable
        self._log = log
        self._geometry = Geometry(config.index_slots, config.index_entries)
        self._clock = clock
        self.is_on = config.index_enable
        self._lock = threading.Lock()  # to change the index or to look into it
        self._index_files: list[IndexFile] = []
        self._unsynced: set[str] = set()
        self._preparing: deque[Iterator[None]] = deque()
        self._proof: Iterator[None] | None = None  # are the files that others wrote complete?
        self._position = log.records_end
        self._skip = 0  # keys of the record at `position` that are in already
        self._flush_s = clock.monotonic_s()
        self._flush_due_ms: int | None = None
        self._outages = Outages(clock, logger)
        self.follows_ticks = True
        """Whether `tick` lets the index catch up; false when somebody else does it more often."""
        self.record_at: Callable[[int], bytes | None] = lambda offset: None
        """Reads what is visible."""
        self.known = KnownKeys(is_wanted=self.is_on)
        """For the writer to fill."""
        checkpoint = durable.initial
        mark = checkpoint.latest
        self._found_mark = IndexMark() if mark is None else IndexMark(*mark[5:9])
        if self.is_on:
            # With a mark of ours RocketMQ's field is no proof: it is written before the files.
            java_time_ms = checkpoint.index_time_ms if mark is None else 0
            self._load(self._found_mark, after_crash=after_crash, java_time_ms=java_time_ms)
            if not after_crash:  # RocketMQ says this time only when a file is full
                self._durable.index_time_ms = max(self._durable.index_time_ms, self._newest[0])
        else:
            durable.index_time_ms = 0
        self.has_news = self.is_on and self._durable.index_time_ms != checkpoint.index_time_ms
        """Whether the checkpoint says less of the index than is known: RocketMQ would throw it away
        when it finds the store after a kill."""

    @property
    def _last(self) -> IndexFile | None:
        return self._index_files[-1] if self._index_files else None

    @property
    def _newest(self) -> tuple[int, int]:
        """Store time (ms) and place of the newest message that has an entry; (0, 0): none."""
        file = self._last
        return (0, 0) if file is None else (file.end_ms, file.end_offset)

    # --- opening

    def _load(self, mark: IndexMark, *, after_crash: bool, java_time_ms: int) -> None:
        """Find the files, and where to go on. What takes time is left to `catch_up`."""
        end = self._log.records_end
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
        self._drop_unproved(mark, after_crash=after_crash)
        last = self._last
        found = last.name if last is not None else 0
        # Fewer than the mark says: the last flush failed, after the entries were safe.
        is_torn = after_crash or (last is not None and last.count < mark.entries)
        if found != mark.file or not (last is None or is_torn or last.count == mark.entries):
            self._go_on_by_headers(end)
        else:
            self._position = mark.offset
            if is_torn and last is not None:
                last.count = min(mark.entries, last.geometry.entries)
                if not self._ends_at(mark.offset):
                    self._position = last.offset_of(last.count - 1)
                    last.count = last.count_before(self._position)
                self._restore(last, last.count)
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

    def _drop_unproved(self, mark: IndexMark, *, after_crash: bool) -> None:
        """Remove the first file that is not an index of this log, and all behind it: they are built
        again. A file that is zeroed, an older copy or of another store looks complete."""
        for number, file in enumerate(self._index_files):
            is_last = number == len(self._index_files) - 1
            count = file.count
            if is_last and file.name == mark.file and (after_crash or count < mark.entries):
                count = min(mark.entries, file.geometry.entries)  # headers are written late
            if (count <= 1 or self._proves(file, count)) if is_last else self._is_whole(file):
                continue
            logger.warning(
                "%s is not an index of this log (zeroed, an older copy, or of another store): it is"
                " built again, and so are the %d files behind it",
                file.path, len(self._index_files) - number - 1,
            )  # fmt: skip
            while len(self._index_files) > number:
                self._remove_last()
            return

    def _is_whole(self, file: IndexFile) -> bool:
        """Return whether a file that has others behind it is full, as its header says."""
        return (
            not file.room
            and file.begin_offset == file.offset_of(1)
            and file.end_offset == file.offset_of(file.count - 1)
            and self._proves(file, file.count)
        )

    def _proves(self, file: IndexFile, count: int) -> bool:
        """Return whether the first and the last of `count - 1` entries name keys of records of this
        log. Records that retention has removed prove nothing, and count as right."""
        for entry in (1, count - 1):
            offset, segment = file.offset_of(entry), None
            if offset < self._log.start:
                continue
            if offset < self._log.records_end:
                segment = self._log.segments.at(offset)
            if segment is None:
                return False
            known = hash_keys(segment.view(), offset - segment.base)
            if file.hash_of(entry) not in known.hashes:
                return False
        return True

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

    def _ends_at(self, offset: int) -> bool:
        """Do the files end with the keys of the last record before that place? A mark counts others
        where RocketMQ had the store until it was killed: it goes on at an older header, and enters
        the last record there once more."""
        *full, last = self._index_files
        if last.count <= 1:
            return True
        at = first = last.offset_of(last.count - 1)
        of_first = takewhile(lambda file: file.end_offset >= first, reversed(full))
        entries = sum(file.count - file.count_before(first) for file in (last, *of_first))
        while at < offset:
            if at - first > QUERY_BACKLOG_MAX:
                return False
            keys, at = self._look(at, offset)
            entries -= keys
        return entries == 0

    def _restore(self, file: IndexFile, count: int) -> None:
        file.count = count
        end_ms = 0
        if count > 1:
            offset = file.offset_of(count - 1)
            segment = self._log.segments.at(offset)
            end_ms = file.end_ms  # about it, when the record is gone
            if segment is not None:
                end_ms = read_keys(segment.view(), offset - segment.base).store_time_ms
        self._preparing.append(file.restore(count, end_ms))

    def _remove_last(self) -> None:
        file = self._index_files.pop()
        file.close()
        self._files.remove(file.path)
        self._unsynced.discard(file.path)
        self._unsynced.add(self._directory)

    # --- following the log

    @property
    def backlog_bytes(self) -> int:
        """How much of the log is not indexed yet."""
        return self._log.records_end - self._position if self.is_on else 0

    @property
    def is_close(self) -> bool:
        """Whether only what just came is missing, not an index that is built anew."""
        return self.backlog_bytes <= QUERY_BACKLOG_MAX

    @property
    def _is_current(self) -> bool:
        return not self.backlog_bytes and not self._preparing

    def catch_up(self, bytes_max: int = SLICE_BYTES) -> bool:
        """Index about so many bytes of the log; True when nothing is left (or nothing can be
        done)."""
        if not self.is_on or not self._lock.acquire(blocking=False):
            return True
        try:
            done = self._try(lambda: self._advance(bytes_max))
        finally:
            self._lock.release()
        return done or _WRITES in self._outages.current

    def _advance(self, left: int) -> bool:
        """Index about so many bytes; True when all is done. Raises OSError when an entry cannot be
        written; the next call goes on where this one was."""
        while self._preparing or self.backlog_bytes or self._proof is not None:
            if left <= 0:
                return False
            used = STEP_COST_BYTES
            if self._preparing:
                if next(self._preparing[0], self) is self:
                    self._preparing.popleft()
            elif self.backlog_bytes:
                used = self._index_slice(min(left, SLICE_BYTES))
            elif self._proof is not None and next(self._proof, self) is self:
                self._proof = None
            left -= used
        return True

    @property
    def is_warm(self) -> bool:
        """Whether NumPy is there: loading it takes a tenth of a second."""
        return _COLUMNS in sys.modules

    def warm_up(self) -> None:
        """Load it. In any thread."""
        importlib.import_module(_COLUMNS)

    def tick(self, log_time_ms: int) -> None:
        """Now and then: a slice of work, and whether the flush for RocketMQ is due. `log_time_ms`
        is the store time of the last record."""
        if self.follows_ticks:
            self.catch_up()
        now_s = self._clock.monotonic_s()
        is_first = not self._durable.index_time_ms and self.backlog_bytes == 0
        if is_first or now_s - self._flush_s >= FLUSH_S:
            self._flush_s = now_s
            if not self._is_flushed(log_time_ms):
                self._flush_due_ms = log_time_ms

    def finish(self, log_time_ms: int) -> None:
        """Before the last mark: everything into the files."""
        self.catch_up(CLOSE_BACKLOG_MAX)
        self._flush_due_ms = log_time_ms
        self.flush_due()

    def _try(self, work: Callable[[], bool]) -> bool:
        """Return what `work` returns, or False when the disk refuses it (logged once)."""
        try:
            done = work()
        except OSError as error:
            text = "writing the key index failed: %s"
            self._outages.report_failure(_WRITES, text, error, kind=kind_of(error))
            return False
        self._outages.report_success(_WRITES)
        return done

    def _index_slice(self, bytes_max: int) -> int:
        """Index records from `position` on; returns how many bytes of the log that was."""
        before = self._position = max(self._position, self._log.start)
        segment, last = self._log.segments.at(before), self._last
        if segment is None:
            self._position = self._log.records_end
            return self._position - before
        if last is not None and not last.is_ready and last.room:
            self._preparing.append(last.load())  # its slots have to come into memory first
            return STEP_COST_BYTES
        following = self.known.next_start(before)
        if following == before and not self._skip:
            known = self.known.take(before, self._log.records_end, bytes_max)
            if known is not None:
                self._put(known.columns, 0, known.starts)
                self._position = known.end
                return known.end - before
        from sluicemq.store.index import columns  # noqa: PLC0415 - NumPy when there is something

        view, base, goal = segment.view(), segment.base, self._log.records_end
        ends = before + bytes_max, goal, segment.end, following or goal
        stop = max(min(ends), before + 1) - base
        found, starts, end = columns.read(view, before - base, stop)
        if len(starts):
            self._put(found, base, starts)
        self._position, self._skip = max(base + end, before), 0
        return self._position - before

    def _put(self, columns: "Columns", base: int, starts: "Positions") -> None:
        done = self._skip
        total = len(columns.hashes)
        try:
            while done < total:
                file = last = self._last
                if last is not None and last.room <= 0:
                    self._durable.write_index_time(last.end_ms)
                    last.flush()
                    self._unsynced.add(last.path)
                    last.release()
                    file = None
                if file is None:
                    if not self._files.exists(self._directory):
                        self._files.make_directory(self._directory)
                    # The local time in ms, as digits; later than the last one's whatever the clock
                    # says, and than the one in the mark: after a crash the mark must not vouch for
                    # another file.
                    now_ms = self._clock.now_ms()
                    moment = datetime.fromtimestamp(now_ms // 1000, UTC).astimezone()
                    name = int(f"{moment:%Y%m%d%H%M%S}{now_ms % 1000:03d}")
                    before = max(self._found_mark.file, 0 if last is None else last.name)
                    name = max(name, before + 1)
                    while self._files.exists(path := f"{self._directory}/{name:0{NAME_DIGITS}d}"):
                        name += 1
                    file = IndexFile.create(self._files, path, self._geometry, last)
                    self._index_files.append(file)
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

    # --- proving what others wrote

    def _look_for_holes(self) -> Iterator[None]:
        """Is there a record with keys where the files say that there is none?"""
        offset = self._log.start
        for file in list(self._index_files):
            while offset < file.begin_offset:
                keys, offset = self._look(offset, file.begin_offset)
                if keys:
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

    def _look(self, offset: int, end: int) -> tuple[int, int]:
        """At a slice of the log: (how many keys its records have, where it ended)."""
        segment = self._log.segments.at(offset)
        if segment is None:
            return 0, end
        from sluicemq.store.index import columns  # noqa: PLC0415 - NumPy when there is something

        view, base = segment.view(), segment.base
        stop = min(offset + SLICE_BYTES, end, segment.end) - base
        starts, stop = columns.walk(view, offset - base, stop)
        keys = len(columns.columns_of(view, starts).hashes) if len(starts) else 0
        return keys, max(base + stop, offset + 1)

    # --- asking

    def find(
        self,
        topic: str,
        key: str,
        count_max: int,
        begin_ms: int,
        end_ms: int,
        *,
        is_unique: bool = False,
    ) -> Found | None:
        """Messages with this unique key or, unless `is_unique`, with this word among their keys,
        stored from `begin_ms` to `end_ms`. None when there is no index."""
        if not self.is_on:
            return None

        def catch_up() -> bool:
            if self.is_close:
                self._advance(QUERY_BACKLOG_MAX)
            return self._is_current

        with self._lock:
            if not self._try(catch_up):
                return Found([], behind_bytes=max(self.backlog_bytes, 1))
            records: list[bytes] = []
            seen: set[int] = set()
            for offset in islice(self.query(topic, key, begin_ms, end_ms), CANDIDATES_MAX):
                if len(records) >= count_max:
                    break
                record = None if offset in seen else self.record_at(offset)
                seen.add(offset)
                if record is None:
                    continue
                found = read_keys(record)
                if (
                    found.topic == topic
                    and begin_ms <= found.store_time_ms <= end_ms
                    and (found.unique_key == key or (not is_unique and key in found.keys))
                ):
                    records.append(record)
            return Found(records, *(self._newest if seen else (0, 0)))

    def query(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Places of messages that may have this key and time, newest first. Other keys of the same
        hash may be among them."""
        value = hash_key(topic, key)
        for file in reversed(self._index_files):
            if file.is_empty or file.begin_ms > end_ms or file.end_ms + 999 < begin_ms:
                continue
            yield from file.find(value, begin_ms, end_ms)
            if file.begin_ms < begin_ms:
                return

    # --- durability

    @property
    def is_flush_due(self) -> bool:
        """Whether `flush_due` has something to do."""
        return self._flush_due_ms is not None

    def flush_due(self) -> None:
        """Write slots and headers of the last file if it is time, so that RocketMQ could go on with
        it. In any thread."""
        due_ms, self._flush_due_ms = self._flush_due_ms, None
        if due_ms is None:
            return

        def flush() -> bool:
            # What came since the flush became due may be indexed already.
            self._durable.write_index_time(max(self._time_ms(due_ms), self._newest[0]))
            last = self._last
            if last is not None and not last.is_flushed:
                self._unsynced.add(last.path)  # before: of a write that fails something may arrive
                last.flush()
            return True

        with self._lock:
            if not self._is_flushed(due_ms):
                self._try(flush)

    def _time_ms(self, log_time_ms: int) -> int:
        """Up to which store time all is indexed, when the log's last record is of `log_time_ms`."""
        return log_time_ms if self._is_current else self._newest[0]

    def _is_flushed(self, log_time_ms: int) -> bool:
        last = self._last
        is_written = last is None or last.is_flushed
        return not self.is_on or (
            is_written and self._time_ms(log_time_ms) == self._durable.index_time_ms
        )

    def mark(self) -> IndexMark:
        """What the next checkpoint may say when `paths_to_sync` are synced before."""
        if not self.is_on:
            return self._found_mark
        with self._lock:
            if self._proof is not None or self._skip:
                return IndexMark()
            last = self._last
            if last is None:
                return IndexMark(self._position, files=0)
            return IndexMark(self._position, last.count, last.name, len(self._index_files))

    @property
    def is_synced(self) -> bool:
        """Whether `paths_to_sync` has nothing to give."""
        return not self._unsynced

    def paths_to_sync(self) -> list[str]:
        """Files (and maybe the directory) that were changed since the last call."""
        with self._lock:
            paths = sorted(self._unsynced)
            self._unsynced.clear()
            return paths

    def mark_before(self, end: int) -> IndexMark:
        """The mark of what `cut` leaves; all is synced."""
        mark = self.mark()
        if not self.is_on or mark.offset <= end:
            return mark
        kept = [f for f in self._index_files if not f.is_empty and f.offset_of(1) < end]
        if not kept:
            return IndexMark(end, files=0)
        return IndexMark(end, kept[-1].count_before(end), kept[-1].name, len(kept))

    def cut(self, end: int) -> None:
        """The log ends there now: later entries go. Raises OSError."""
        with self._lock:
            if not self.is_on or self._position <= end:
                return
            self._preparing.clear()
            while (last := self._last) and (last.is_empty or last.offset_of(1) >= end):
                self._remove_last()
            if last is not None:
                self._restore(last, last.count_before(end))
            if self._proof is not None:
                self._proof = self._look_for_holes()
            self._position, self._skip = end, 0

    def begin(self, log_start: int) -> None:
        """The log begins there, empty."""
        self.cut(0)
        self._position = log_start

    def start_moved(self, log_start: int) -> None:
        """Let go of files whose messages all lie before, never of the last one."""

        def remove() -> bool:
            while len(self._index_files) > 1 and self._index_files[0].end_offset < log_start:
                file, *others = self._index_files
                self._files.remove(file.path)
                file.close()
                self._index_files = others
                self._unsynced.discard(file.path)
            return True

        with self._lock:
            self._try(remove)

    def close(self) -> None:
        for file in self._index_files:
            file.close()
