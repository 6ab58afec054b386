"""The key index: it finds messages in the log by topic and key (spec/store.md §4).

The index is built behind the log, never while a send is handled. `catch_up` reads what was appended
to the log, in slices, and adds the keys to the last file in batches (`columns.py`). A query catches
up first, so that it finds all messages, unless too much of the log is missing.

    log     ....................|======not indexed======|
                                _position                its end
    files   20261121020310980 (full)   20261121031500001 (the last: entries are appended here)

Invariant: entries are in the order of the log. So "the files contain everything before `_position`
and nothing else" describes the whole state, and a crash is undone by going back to the last mark
(`IndexMark`): file, number of entries, position. The slots may have been overwritten since the
mark; they are rebuilt from the entries. Without a mark (the store was written by Java's broker) the
headers of the files say where to continue after an orderly stop. After a crash, files that
RocketMQ's checkpoint does not vouch for are built again. An index written by another program may
have holes after a crash, or may lack files that the mark counts. A background job looks for such
holes, and the whole index is built again if a key is missing.

A batch that is written as columns (`record.batch_columns`) has the table of its properties, so its
keys and positions are known when it is appended. `KnownKeys` keeps both until the index gets there,
which then need not read the log. Everything else is read: after a restart, or when the index is far
behind.

Slots and headers are read only by RocketMQ. They are written once a minute, up to 20 MB of them, by
`flush_due` in the thread that waits for the disk, so that the event loop does not wait. Only
`flush_due` runs beside the other methods; until it is done the index does not advance and queries
wait.

The files contain hashes and seconds. `find` reads the records and compares topic, key and store
time (to the millisecond), and finds only visible records. If the index cannot be written (the disk
is full), nothing else stops: the index falls behind and continues as soon as it can. When the index
is switched off, its files and its mark remain as they are.
"""

import importlib
import logging
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Final

from sluicemq.clock import Clock
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError
from sluicemq.files import Files
from sluicemq.outages import Outages, kind_of
from sluicemq.record.codec import hash_key, read_keys
from sluicemq.store.directory import CheckpointFile
from sluicemq.store.index.checks import (
    SLICE_BYTES,
    count_keys,
    do_entries_end_at,
    does_last_fit_log,
    is_last_of_mark,
    is_whole,
)
from sluicemq.store.index.file import (
    Geometry,
    IndexFile,
    IndexMark,
    KeyQueryResult,
    choose_path,
    list_index_names,
)
from sluicemq.store.index.known import KnownKeys
from sluicemq.store.log import CommitLog

if TYPE_CHECKING:
    from sluicemq.record.table import Positions
    from sluicemq.store.index.columns import KeyColumns
    from sluicemq.store.segments import Segment

logger = logging.getLogger(__name__)

STEP_COST_BYTES: Final = 1 << 19
"""The number of bytes of the log that take as long as one step of loading or rebuilding slots."""

QUERY_BACKLOG_MAX: Final = 16 << 20
"""The number of bytes of the log that a query indexes at most, while the event loop waits."""

FLUSH_S: Final = 60.0
"""The interval at which slots and headers are written. Only RocketMQ would miss them."""

CLOSE_BACKLOG_MAX: Final = 256 << 20
"""The number of bytes of the log that a stop indexes at most. It does not wait for an index that
is being built again."""

CANDIDATES_MAX: Final = 4096
"""The number of records that one query reads at most. Different keys with the same hash are rare,
so that only a very frequent key is limited by it."""

_COLUMNS: Final = "sluicemq.store.index.columns"
_WRITES: Final = "key index writes"
_ENDED: Final = object()


class KeyIndex:
    """The key index of one store.

    All methods except `flush_due` and `load_numpy` must be called in the thread that appends to the
    log.
    """

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
        """Open the files of the index, and find out at which record to continue.

        The log must have been recovered. `durable` is the checkpoint file of the store, which also
        receives RocketMQ's index time. `after_crash` means that the last run did not end cleanly;
        then files and entries that the last checkpoint does not count are dropped. If
        `config.index_enable` is False, nothing is opened.

        Raises StoreDamagedError if the size or header of a file is not valid, and OSError.
        """
        self._files = files
        self._directory = f"{config.root}/index"
        self._durable = durable
        self._log = log
        self._geometry = Geometry(config.index_slots, config.index_entries)
        self._clock = clock
        self.is_enabled = config.index_enable
        self._lock = threading.Lock()
        """Held to change or read the index, because `flush_due` runs in another thread."""
        self._index_files: list[IndexFile] = []
        self._unsynced: set[str] = set()
        """Paths that were changed since `paths_to_sync` returned them."""
        self._preparing: deque[Iterator[None]] = deque()
        """Loads or rebuilds of slots that must end before the index advances."""
        self._hole_search: Iterator[None] | None = None
        """The search for holes in files that another program wrote; None if it has ended."""
        self._position = log.records_end
        """The position before which the log is indexed."""
        self._skip = 0
        """The number of keys of the record at `_position` that have entries already."""
        self._flush_s = clock.monotonic_s()
        self._flush_due_ms: int | None = None
        self._outages = Outages(clock, logger)
        self.catches_up_on_tick = True
        """Whether `tick` calls `catch_up`; False if a background job calls it more often."""
        self.read_visible_record: Callable[[int], bytes | None] = lambda offset: None
        """Returns the visible record at a position, or None. The store sets it."""
        self.known_keys = KnownKeys(is_wanted=self.is_enabled)
        """The keys of appended batches, which the writer of the log notes."""
        checkpoint = durable.initial
        mark = checkpoint.latest
        self._found_mark = IndexMark() if mark is None else IndexMark(*mark[5:9])
        self.has_newer_index_time = False
        """Whether the checkpoint has an older index time than the files. Then RocketMQ would
        discard the newer files if it opened the store after a kill."""
        if not self.is_enabled:
            durable.index_time_ms = 0
            return

        # If there is a mark, RocketMQ's field proves nothing: it is written before the files.
        java_time_ms = checkpoint.index_time_ms if mark is None else 0
        self._load_files(self._found_mark, after_crash=after_crash, java_time_ms=java_time_ms)
        if not after_crash:
            # RocketMQ sets this time only when a file is full.
            newest_ms, _ = self._newest
            durable.index_time_ms = max(durable.index_time_ms, newest_ms)
        self.has_newer_index_time = durable.index_time_ms != checkpoint.index_time_ms

    @property
    def _last(self) -> IndexFile | None:
        """The file to which entries are added; None if there is none."""
        if not self._index_files:
            return None
        return self._index_files[-1]

    @property
    def _newest(self) -> tuple[int, int]:
        """The store time (ms) and position of the newest indexed record; (0, 0) if none is."""
        last_file = self._last
        if last_file is None:
            return 0, 0
        return last_file.end_ms, last_file.end_offset

    # --- opening

    def _load_files(self, mark: IndexMark, *, after_crash: bool, java_time_ms: int) -> None:
        """Open the files, and set `_position` and `_skip` to where indexing must continue.

        Removes an empty last file, files that are not of this log, and after a crash files that are
        newer than the last checkpoint. `mark` is the state that the checkpoint noted, and
        `java_time_ms` the store time up to which RocketMQ's checkpoint says that the index is
        durable. Slow work is left to `catch_up`.
        """
        end = self._log.records_end
        names = list_index_names(self._files, self._directory)
        if after_crash:
            names = self._drop_after_crash(names, mark, java_time_ms)
        self._index_files = [self._open_file(name) for name in names]
        self._drop_foreign_files(mark, after_crash=after_crash)

        if is_last_of_mark(self._last, mark, after_crash=after_crash):
            self._continue_from_mark(mark, after_crash=after_crash)
        else:
            self._continue_from_headers(end)
        self._position = max(self._position, self._log.start)
        if self._position >= end:
            self._position = end
            self._skip = 0

    def _continue_from_mark(self, mark: IndexMark, *, after_crash: bool) -> None:
        """Continue at the position that the last checkpoint noted in `mark`.

        Drop entries behind it if the header cannot be trusted. Schedule a search for holes if the
        number of files differs.
        """
        self._position = mark.offset
        last_file = self._last
        if last_file is not None:
            # If the header has fewer entries than the mark, the last flush failed after the entries
            # had been synced.
            is_torn = after_crash or last_file.next_number < mark.entries
            if is_torn:
                self._go_back_to_mark(last_file, mark)
        if len(self._index_files) != mark.files:
            # Files were removed by retention, or are missing.
            self._hole_search = self._search_holes()

    def _go_back_to_mark(self, last_file: IndexFile, mark: IndexMark) -> None:
        """Drop the entries behind the mark from the last file, and schedule a rebuild.

        `catch_up` then rebuilds the slots.
        """
        last_file.next_number = min(mark.entries, last_file.geometry.entry_count)
        # The number in the mark is wrong if RocketMQ has opened the store since, and was killed:
        # RocketMQ continues from an older header, and adds the last record again.
        if not do_entries_end_at(self._index_files, self._log, mark.offset, QUERY_BACKLOG_MAX):
            self._position = last_file.position_of(last_file.next_number - 1)
            last_file.next_number = last_file.first_number_at(self._position)
        self._schedule_rebuild(last_file, last_file.next_number)

    def _open_file(self, name: str) -> IndexFile:
        """Open the file with this name. Raises StoreDamagedError."""
        return IndexFile.open(self._files, f"{self._directory}/{name}", self._geometry)

    def _drop_after_crash(self, names: list[str], mark: IndexMark, java_time_ms: int) -> list[str]:
        """Remove the files that may not have reached the disk. Return the names that are left.

        A file is durable if the last checkpoint's mark names it or a later file. If there is no
        mark, a file is durable if it ends before RocketMQ's index time. The first file that is not
        durable and all files behind it are removed, durably.
        """

        def is_vouched_for(name: str) -> bool:
            if mark.offset:
                return int(name) <= mark.file
            try:
                file = self._open_file(name)
            except (StoreDamagedError, struct.error):
                return False
            return not file.is_empty and 0 < file.end_ms <= java_time_ms

        kept_names = list(takewhile(is_vouched_for, names))
        for name in reversed(names[len(kept_names) :]):
            self._files.remove(f"{self._directory}/{name}")
        if len(kept_names) < len(names):
            self._files.sync_directory(self._directory)
        return kept_names

    def _drop_foreign_files(self, mark: IndexMark, *, after_crash: bool) -> None:
        """Remove the first file that is not an index of this log, and all files after it.

        They are built again. A file of zeros, an older copy or a file of another store would look
        complete otherwise.
        """
        for index, file in enumerate(self._index_files):
            is_last = index == len(self._index_files) - 1
            if is_last:
                is_of_log = does_last_fit_log(file, self._log, mark, after_crash=after_crash)
            else:
                is_of_log = is_whole(file, self._log)
            if is_of_log:
                continue
            logger.warning(
                "%s is not an index of this log: it was zeroed, is an older copy, or is of another"
                " store. Building it and the %d files after it again",
                file.path,
                len(self._index_files) - index - 1,
            )
            while len(self._index_files) > index:
                self._remove_last()
            return

    def _continue_from_headers(self, end: int) -> None:
        """Continue behind the last entry of files that another program wrote.

        If the log was restored from a copy, it may end before the files do. Then the entries from
        `end`, the end of the log, on are dropped. Otherwise `_position` becomes the last indexed
        record, and `_skip` the number of its entries, because it may have more keys. A search for
        holes begins.
        """
        files = self._index_files
        while files and (files[-1].is_empty or files[-1].position_of(1) >= end):
            self._remove_last()
        self._position = 0
        if not files:
            return
        last_file = files[-1]
        if last_file.end_offset >= end:
            self._schedule_rebuild(last_file, last_file.first_number_at(end))
            self._position = end
        else:
            self._position = last_file.end_offset
            # Several files may contain entries of the last indexed record.
            self._skip = 0
            for file in files:
                self._skip += file.next_number - file.first_number_at(self._position)
        self._hole_search = self._search_holes()

    def _schedule_rebuild(self, file: IndexFile, end_number: int) -> None:
        """Drop the entries of `file` from `end_number` on; `catch_up` will rebuild its slots.

        No record is indexed before that is done.
        """
        file.next_number = end_number
        end_ms = 0
        if end_number > 1:
            last_position = file.position_of(end_number - 1)
            segment = self._log.segments.at(last_position)
            end_ms = file.end_ms  # approximately, if retention has removed the record
            if segment is not None:
                end_ms = read_keys(segment.view(), last_position - segment.base).store_time_ms
        self._preparing.append(file.rebuild_slots(end_number, end_ms))

    def _remove_last(self) -> None:
        """Remove the last file from the index and from the disk.

        The next checkpoint syncs the directory. Raises OSError.
        """
        file = self._index_files.pop()
        file.close()
        self._files.remove(file.path)
        self._unsynced.discard(file.path)
        self._unsynced.add(self._directory)

    # --- following the log

    @property
    def backlog_bytes(self) -> int:
        """The number of bytes of the log that are not indexed; 0 if the index is disabled."""
        if not self.is_enabled:
            return 0
        return self._log.records_end - self._position

    @property
    def is_nearly_current(self) -> bool:
        """Whether a query may wait until the index has caught up."""
        return self.backlog_bytes <= QUERY_BACKLOG_MAX

    @property
    def _is_current(self) -> bool:
        """Whether the index contains all keys of the log and its slots are ready."""
        return not self.backlog_bytes and not self._preparing

    def catch_up(self, bytes_max: int = SLICE_BYTES) -> bool:
        """Index about `bytes_max` bytes of the log. Call it again while it returns False.

        First loads or rebuilds slots if necessary, and at the end searches for holes (records that
        other programs forgot to index). Return True if nothing remains to be done, or if nothing
        can be done now: the index is disabled, another thread uses it, or it cannot be written
        (logged once).
        """
        if not self.is_enabled or not self._lock.acquire(blocking=False):
            return True
        try:
            is_done = self._try_to_write(lambda: self._advance(bytes_max))
        finally:
            self._lock.release()
        return is_done or _WRITES in self._outages.current

    def _advance(self, bytes_max: int) -> bool:
        """Do work that takes as long as indexing `bytes_max` bytes of the log.

        Return whether nothing remains to be done. Raises OSError if an entry cannot be written; the
        next call continues with it.
        """
        bytes_left = bytes_max
        while self._preparing or self.backlog_bytes or self._hole_search is not None:
            if bytes_left <= 0:
                return False
            cost_bytes = STEP_COST_BYTES
            if self._preparing:
                if _has_ended(self._preparing[0]):
                    self._preparing.popleft()
            elif self.backlog_bytes:
                cost_bytes = self._index_slice(min(bytes_left, SLICE_BYTES))
            elif self._hole_search is not None and _has_ended(self._hole_search):
                self._hole_search = None
            bytes_left -= cost_bytes
        return True

    @property
    def is_numpy_loaded(self) -> bool:
        """Whether NumPy and `columns` are imported, which takes 0.1 s."""
        return _COLUMNS in sys.modules

    def load_numpy(self) -> None:
        """Import NumPy and `columns`. May be called in any thread."""
        importlib.import_module(_COLUMNS)

    def tick(self, log_time_ms: int) -> None:
        """Index a slice of the log, and every FLUSH_S seconds note that a flush is due.

        `flush_due` then writes, in another thread. `log_time_ms` is the store time of the last
        record of the log. Called periodically.
        """
        if self.catches_up_on_tick:
            self.catch_up()
        now_s = self._clock.monotonic_s()
        is_first = not self._durable.index_time_ms and self.backlog_bytes == 0
        if is_first or now_s - self._flush_s >= FLUSH_S:
            self._flush_s = now_s
            if not self._is_flushed(log_time_ms):
                self._flush_due_ms = log_time_ms

    def finish(self, log_time_ms: int) -> None:
        """Index the rest of the log and flush the files, before the last checkpoint is written.

        If more than CLOSE_BACKLOG_MAX bytes are left, the next start indexes the others.
        """
        self.catch_up(CLOSE_BACKLOG_MAX)
        self._flush_due_ms = log_time_ms
        self.flush_due()

    def _try_to_write(self, work: Callable[[], bool]) -> bool:
        """Return the result of `work()`, or False if it raises OSError.

        The first error of an outage is logged, and then the first success.
        """
        try:
            result = work()
        except OSError as error:
            message = "cannot write the key index: %s"
            self._outages.report_failure(_WRITES, message, error, kind=kind_of(error))
            return False
        self._outages.report_success(_WRITES)
        return result

    def _index_slice(self, bytes_max: int) -> int:
        """Index about `bytes_max` bytes of records, and move `_position` behind them.

        Returns the number of bytes that were indexed. If the slots of the last file must be loaded
        first, only schedules that, and returns STEP_COST_BYTES. Raises OSError.
        """
        start = self._position = max(self._position, self._log.start)
        segment = self._log.segments.at(start)
        if segment is None:
            self._position = self._log.records_end
            return self._position - start
        last_file = self._last
        if last_file is not None and not last_file.has_slots and last_file.free_entries:
            # Entries can be added only when the slots are in memory.
            self._preparing.append(last_file.load_slots())
            return STEP_COST_BYTES

        known_start = self.known_keys.next_start(start)
        if known_start == start and not self._skip:
            batch = self.known_keys.take(start, self._log.records_end, bytes_max)
            if batch is not None:
                self._add_entries(batch.columns, 0, batch.record_starts)
                self._position = batch.end
                return batch.end - start

        # Read the keys from the log, up to the next batch whose keys are known.
        end = min(start + bytes_max, self._log.records_end, segment.end)
        if known_start:
            end = min(end, known_start)
        self._index_records(segment, start, max(end, start + 1))
        return self._position - start

    def _index_records(self, segment: "Segment", start: int, end: int) -> None:
        """Index the records of a file that begin in [start, end). Set `_position` to their end.

        All positions count in the log, not in the file. Raises OSError.
        """
        from sluicemq.store.index import columns  # noqa: PLC0415 - imports NumPy

        base = segment.base
        keys, record_starts, slice_end = columns.read_keys(segment.view(), start - base, end - base)
        if len(record_starts):
            self._add_entries(keys, base, record_starts)
        self._position = max(base + slice_end, start)
        self._skip = 0

    def _add_entries(self, columns: "KeyColumns", base: int, starts: "Positions") -> None:
        """Add entries for keys, except the first `_skip` ones. Create files as necessary.

        Record i begins at position `base` + `starts[i]`. Raises OSError; then `_position` and
        `_skip` name the first key that has no entry.
        """
        added_count = self._skip
        key_count = len(columns.hashes)
        try:
            while added_count < key_count:
                file = self._last
                if file is None or file.free_entries <= 0:
                    file = self._begin_file(file)
                fitting = columns.slice_rows(added_count, file.free_entries)
                file.append(fitting, base, starts)
                self._unsynced.add(file.path)
                added_count += len(fitting.hashes)
        except OSError:
            if added_count < key_count:
                # Continue with the first key that has no entry.
                record_number = int(columns.records[added_count])
                self._position = base + int(starts[record_number])
                self._skip = added_count - int((columns.records < record_number).sum())
            raise

    def _begin_file(self, last_file: IndexFile | None) -> IndexFile:
        """Create the next file, and return it. `last_file` is full, or None if there is no file.

        First writes slots and header of `last_file` and RocketMQ's index time. Raises OSError.
        """
        if last_file is not None:
            self._durable.write_index_time(last_file.end_ms)
            last_file.flush()
            self._unsynced.add(last_file.path)
            last_file.release_slots()
        if not self._files.exists(self._directory):
            self._files.make_directory(self._directory)
        # The name is later than that of the last file, whatever the clock says, and than the one in
        # the mark: after a crash the mark must not vouch for another file.
        last_name = 0 if last_file is None else last_file.name
        name_min = max(self._found_mark.file, last_name) + 1
        path = choose_path(self._files, self._directory, self._clock.now_ms(), name_min)
        file = IndexFile.create(self._files, path, self._geometry, last_file)
        self._index_files.append(file)
        return file

    # --- holes in files of other programs

    def _search_holes(self) -> Iterator[None]:
        """Search the gaps between files for records with keys; if there are any, drop all files.

        The log is then indexed from its start. The work is done while the caller iterates.
        """
        offset = self._log.start
        for file in list(self._index_files):
            while offset < file.begin_offset:
                key_count, offset = count_keys(self._log, offset, file.begin_offset)
                if key_count:
                    logger.warning(
                        "the key index in %s lacks messages before position %d; building it again",
                        self._directory,
                        offset,
                    )
                    while self._index_files:
                        self._remove_last()
                    self._position = self._log.start
                    self._skip = 0
                    self._preparing.clear()
                    return
                yield
            if self._log.segments.at(file.end_offset) is None:
                offset = max(file.end_offset, self._log.start)
            else:
                # Continue after the record that begins at `end_offset`.
                _, offset = count_keys(self._log, file.end_offset, file.end_offset + 1)

    # --- queries

    def find(
        self,
        topic: str,
        key: str,
        count_max: int,
        begin_ms: int,
        end_ms: int,
        *,
        is_unique: bool = False,
    ) -> KeyQueryResult | None:
        """Return up to `count_max` visible messages of a topic with this key, or None if disabled.

        If `is_unique`, `key` must be the unique key of a message; otherwise it may also be one of
        its keys. The messages were stored from `begin_ms` to `end_ms`, both included. If the index
        lags too far behind the log, the result has no messages, and `behind_bytes` says how far.
        """
        if not self.is_enabled:
            return None

        def is_match(record: bytes) -> bool:
            stored = read_keys(record)
            if stored.topic != topic or not begin_ms <= stored.store_time_ms <= end_ms:
                return False
            return stored.unique_key == key or (not is_unique and key in stored.keys)

        with self._lock:
            if not self._try_to_write(self._catch_up_for_query):
                return KeyQueryResult([], behind_bytes=max(self.backlog_bytes, 1))
            records: list[bytes] = []
            seen: set[int] = set()  # a record may have several entries with the same hash
            candidates = self.find_candidates(topic, key, begin_ms, end_ms)
            for position in islice(candidates, CANDIDATES_MAX):
                if len(records) >= count_max:
                    break
                if position in seen:
                    continue
                seen.add(position)
                record = self.read_visible_record(position)
                if record is not None and is_match(record):
                    records.append(record)
            if not seen:
                return KeyQueryResult(records)
            newest_ms, newest_position = self._newest
            return KeyQueryResult(records, newest_ms, newest_position)

    def _catch_up_for_query(self) -> bool:
        """Index the rest of the log if it is short. Return whether all of it is indexed."""
        if self.is_nearly_current:
            self._advance(QUERY_BACKLOG_MAX)
        return self._is_current

    def find_candidates(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Yield the positions of records that may have this key and time, the newest first.

        Some may have another key with the same hash, or a time up to 999 ms outside the range.
        """
        key_hash = hash_key(topic, key)
        for file in reversed(self._index_files):
            if file.is_empty or file.begin_ms > end_ms or file.end_ms + 999 < begin_ms:
                continue
            yield from file.find_positions(key_hash, begin_ms, end_ms)
            if file.begin_ms < begin_ms:
                return

    # --- durability

    @property
    def is_flush_due(self) -> bool:
        """Whether `flush_due` has anything to do."""
        return self._flush_due_ms is not None

    def flush_due(self) -> None:
        """Write slots and header of the last file, and the index time, if a flush is due.

        RocketMQ needs them if it opens the store next. The files are not synced; `paths_to_sync`
        names them. An OSError is only logged. May be called in any thread.
        """
        due_ms = self._flush_due_ms
        self._flush_due_ms = None
        if due_ms is None:
            return

        def flush() -> bool:
            # Records that were appended after the flush became due may be indexed already.
            newest_ms, _ = self._newest
            self._durable.write_index_time(max(self._find_indexed_time_ms(due_ms), newest_ms))
            last_file = self._last
            if last_file is not None and not last_file.is_flushed:
                # Noted first: a write that fails may have changed the file.
                self._unsynced.add(last_file.path)
                last_file.flush()
            return True

        with self._lock:
            if not self._is_flushed(due_ms):
                self._try_to_write(flush)

    def _find_indexed_time_ms(self, log_time_ms: int) -> int:
        """Return the store time of the last record up to which all records are indexed.

        `log_time_ms` is the store time of the last record of the log.
        """
        if self._is_current:
            return log_time_ms
        newest_ms, _ = self._newest
        return newest_ms

    def _is_flushed(self, log_time_ms: int) -> bool:
        """Return whether a flush would write nothing, or the index is disabled."""
        if not self.is_enabled:
            return True
        last_file = self._last
        if last_file is not None and not last_file.is_flushed:
            return False
        return self._find_indexed_time_ms(log_time_ms) == self._durable.index_time_ms

    def current_mark(self) -> IndexMark:
        """Return the state of the index for the next checkpoint. First sync `paths_to_sync`.

        While holes are searched, or only some keys of a record are indexed, return `IndexMark()`,
        which means unknown. If the index is disabled, return the mark of the last checkpoint.
        """
        if not self.is_enabled:
            return self._found_mark
        with self._lock:
            if self._hole_search is not None or self._skip:
                return IndexMark()
            last_file = self._last
            if last_file is None:
                return IndexMark(self._position, files=0)
            return IndexMark(
                self._position, last_file.next_number, last_file.name, len(self._index_files)
            )

    @property
    def is_synced(self) -> bool:
        """Whether `paths_to_sync` would return nothing."""
        return not self._unsynced

    def paths_to_sync(self) -> list[str]:
        """Return the paths that were changed since the last call, sorted, and forget them.

        They are paths of files, and of the directory if files were removed.
        """
        with self._lock:
            paths = sorted(self._unsynced)
            self._unsynced.clear()
            return paths

    def mark_after_truncation(self, end: int) -> IndexMark:
        """Return the mark of the index after `truncate(end)`, without changing anything.

        All changes of the index must have been synced before.
        """
        mark = self.current_mark()
        if not self.is_enabled or mark.offset <= end:
            return mark

        def is_kept(file: IndexFile) -> bool:
            return not file.is_empty and file.position_of(1) < end

        kept_files = list(filter(is_kept, self._index_files))
        if not kept_files:
            return IndexMark(end, files=0)
        last_file = kept_files[-1]
        return IndexMark(end, last_file.first_number_at(end), last_file.name, len(kept_files))

    def truncate(self, end: int) -> None:
        """Drop the entries of records from position `end` on, where the log now ends.

        Files that have only such entries are removed. `catch_up` rebuilds the slots of the last
        file that is left. Does nothing if the index is disabled, or ends before `end`. Raises
        OSError.
        """
        with self._lock:
            if not self.is_enabled or self._position <= end:
                return
            self._preparing.clear()
            last_file = self._last
            while last_file is not None and (last_file.is_empty or last_file.position_of(1) >= end):
                self._remove_last()
                last_file = self._last
            if last_file is not None:
                self._schedule_rebuild(last_file, last_file.first_number_at(end))
            if self._hole_search is not None:
                self._hole_search = self._search_holes()
            self._position = end
            self._skip = 0

    def restart_at(self, log_start: int) -> None:
        """Drop all entries; the log is empty and begins at position `log_start`. Raises OSError."""
        self.truncate(0)
        self._position = log_start

    def drop_files_before(self, log_start: int) -> None:
        """Delete files whose records are all before position `log_start`, except the last file.

        An OSError is only logged; the next call tries again.
        """

        def remove() -> bool:
            while len(self._index_files) > 1 and self._index_files[0].end_offset < log_start:
                first_file, *remaining_files = self._index_files
                self._files.remove(first_file.path)
                first_file.close()
                self._index_files = remaining_files
                self._unsynced.discard(first_file.path)
            return True

        with self._lock:
            self._try_to_write(remove)

    def close(self) -> None:
        """Close the files, without a flush."""
        for file in self._index_files:
            file.close()


def _has_ended(steps: Iterator[None]) -> bool:
    """Do the next step of some work, and return whether there was none left."""
    return next(steps, _ENDED) is _ENDED
