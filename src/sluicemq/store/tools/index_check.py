"""Check the files of the key index against the commit log.

For every message the index contains an entry for its unique key, followed by one for each of its
keys, in the order of the log (spec/store.md §4). So a run of records determines which entries the
index must contain, and in which order, and `IndexCheck` compares them as columns. Only if they
differ are they compared one by one, to report missing, wrong and repeated entries.

Entries are numbered from 1, since entry 0 is never used. The header's `entry_limit` is the number
of entries plus one. An index file does not say how many slots it has. By default RocketMQ makes
four times as many entries as slots; for files with other settings, `find_slot_count` searches for
the first and the last entry.

While a SluiceMQ broker runs, or after it crashed, only the part of the index counts for which the
checkpoint vouches: the next start builds the rest again. RocketMQ writes its index through memory
maps. After a crash it does not trust the last file, so findings about that file are warnings.
"""

import struct
from collections import Counter
from contextlib import closing
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.files import File, Files
from sluicemq.record.layout import INDEX_ENTRY, INDEX_HEADER
from sluicemq.record.table import Mask, Positions
from sluicemq.store.directory import Checkpoint
from sluicemq.store.index.columns import Slots, key_columns_at
from sluicemq.store.tools.checks import ERROR, NOTE, WARNING, Findings
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.walk import InvalidRange, Run

HEADER: Final = INDEX_HEADER.struct
ENTRY: Final = INDEX_ENTRY.dtype
SLOT_BYTES: Final = 4
ENTRIES_PER_SLOT: Final = 4
_SECONDS_MAX: Final = (1 << 31) - 1
_SEARCHED_BYTES_MAX: Final = 1 << 29
"""Larger files are not searched for their entries."""
_PROBLEMS_MAX: Final = 20
"""`IndexFile.find_problems` describes at most this many problems of a kind."""


class IndexHeader(NamedTuple):
    """The header of an index file.

    Times are the store times in ms of the first and the last entry. Positions are the positions of
    their records in the log. `slots_used` is the number of slots that are not empty. `entry_limit`
    is the number of the last entry plus one.
    """

    begin_time_ms: int
    end_time_ms: int
    begin_position: int
    end_position: int
    slots_used: int
    entry_limit: int


class IndexFile:
    """An index file in memory: its header, its slots, and its entries as columns.

    The slots are the hash table of the file: slot `hash % number of slots` contains the number of
    the newest entry with such a hash, or 0.

    Entry number 1 is at index 0 of the columns. `hashes`, `positions` (in the log), `times`
    (seconds since the file's begin) and `previous` (number of the previous entry with the same
    slot) are those of the entries. If `is_cut` is set, only the first entries were loaded, and the
    header and the slots describe more than those.
    """

    def __init__(
        self,
        path: str,
        header: IndexHeader,
        slots: NDArray[Any],
        entries: NDArray[Any],
        *,
        is_cut: bool = False,
    ) -> None:
        """Split `entries`, an array of the type ENTRY, into columns.

        `slots` has the number of the newest entry of each slot, 0 for an empty slot. `is_cut` means
        that the file has more entries, which were not loaded.
        """
        self.path = path
        self.is_cut = is_cut
        self.header = header
        self.slots = slots
        self.hashes: Positions = entries["hash"].astype(np.int64)
        self.positions: Positions = entries["position"].astype(np.int64)
        self.times: Positions = entries["seconds"].astype(np.int64)
        self.previous: Positions = entries["previous"].astype(np.int64)

        # The median decides when the next file is loaded: the maximum may be a damaged entry.
        self.position_max = -1
        self.position_median = -1
        if len(self.positions):
            middle = len(self.positions) // 2
            self.position_max = int(self.positions.max())
            self.position_median = int(np.partition(self.positions, middle)[middle])

    def expected_times(self, store_times_ms: Positions) -> Positions:
        """Return the times that entries must have for messages with these store times."""
        return np.clip((store_times_ms - self.header.begin_time_ms) // 1000, 0, _SECONDS_MAX)

    def normalize_first_time(self, previous_file: "IndexFile | None") -> None:
        """Set the time of the first entry to 0 if it is valid.

        RocketMQ counts this time from the end of the previous file, and other times from the begin
        of this file (spec/store.md §4). The time is valid if it agrees with the end of
        `previous_file`. If `previous_file` is None, because retention may have removed it, any time
        is valid.
        """
        if not len(self.times):
            return
        if previous_file is None:
            self.times[0] = 0
            return
        gap_ms = self.header.begin_time_ms - previous_file.header.end_time_ms
        if self.times[0] == gap_ms // 1000:
            self.times[0] = 0

    def find_problems(self) -> list[str]:
        """Return a description of each inconsistency within the file, [] if there is none.

        The order of the entries, the chains of entries with the same slot, and the header are
        checked. If the file is cut, the header is not checked.
        """
        if not len(self.positions):
            has_used_slots = self.slots.any() and not self.is_cut
            if has_used_slots:
                return ["the file has no entries, but slots that are in use"]
            return []

        if self.is_cut:  # header and slots know entries that were not loaded
            return self._find_order_problems() + self._find_chain_problems()
        return [
            *self._find_header_problems(),
            *self._find_order_problems(),
            *self._find_chain_problems(),
        ]

    def _find_order_problems(self) -> list[str]:
        """Describe each entry whose log position is before the position of the previous entry.

        At most _PROBLEMS_MAX are described.
        """
        backward_rows = np.flatnonzero(np.diff(self.positions) < 0)[:_PROBLEMS_MAX]
        return [
            f"entry {row + 2} is for an earlier position of the log than entry {row + 1}"
            for row in backward_rows
        ]

    def _find_chain_problems(self) -> list[str]:
        """Describe the entries and slots that name another entry than they should.

        Every entry must name the previous entry of its slot, and the slot the newest entry. Slots
        are not checked if the file is cut. At most _PROBLEMS_MAX of each are described.
        """
        expected_links = Slots(len(self.slots)).link(self.hashes.astype(np.int32), 1)
        wrong_rows = np.flatnonzero(expected_links.previous != self.previous)[:_PROBLEMS_MAX]
        problems = [
            f"entry {row + 1} leads to entry {self.previous[row]}, but the previous entry of its"
            f" slot is {expected_links.previous[row]}"
            for row in wrong_rows.tolist()
        ]
        if self.is_cut:
            return problems

        newest_entries = np.zeros(len(self.slots), np.int64)
        newest_entries[expected_links.slots] = expected_links.newest
        wrong_slots = np.flatnonzero(newest_entries != self.slots)[:_PROBLEMS_MAX]
        problems += [
            f"slot {slot} leads to entry {self.slots[slot]} instead of {newest_entries[slot]}"
            for slot in wrong_slots.tolist()
        ]
        return problems

    def _find_header_problems(self) -> list[str]:
        """Describe each field of the header that does not agree with the slots or entries."""
        header = self.header
        problems = []
        first_and_last = (
            ("begins", header.begin_position, "first", 0),
            ("ends", header.end_position, "last", -1),
        )
        for verb, position, which, row in first_and_last:
            if position != self.positions[row]:
                problems.append(
                    f"the header says that the file {verb} at position {position} of the log, the"
                    f" {which} entry says {self.positions[row]}"
                )

        if self.times[0] != 0:
            problems.append(f"the first entry has time {self.times[0]} instead of 0")
        header_seconds = max((header.end_time_ms - header.begin_time_ms) // 1000, 0)
        if header_seconds != self.times[-1]:
            problems.append(
                f"the header spans {header_seconds} seconds, the last entry says {self.times[-1]}"
            )

        used_slots = int(np.count_nonzero(self.slots))
        if header.slots_used != used_slots:
            problems.append(
                f"the header counts {header.slots_used} used slots, there are {used_slots}"
            )
        return problems


def load_index(files: Files, path: str, entry_limit: int | None = None) -> IndexFile | None:
    """Read an index file, or only its entries before number `entry_limit`.

    Return None if it does not have the size or header of an index file. Raises OSError.
    """
    with closing(files.open(path)) as file:
        if file.size() < HEADER.size + SLOT_BYTES + ENTRY.itemsize:
            return None
        header = IndexHeader._make(HEADER.unpack(file.pread(HEADER.size, 0)))
        header = header._replace(entry_limit=max(header.entry_limit, 1))

        # The slots are counted before `entry_limit` is applied: the number of slots follows from
        # the place of the last entry that the file itself counts.
        slot_count = find_slot_count(file, header)
        if slot_count is None:
            return None
        is_cut = entry_limit is not None
        if entry_limit is not None:
            header = header._replace(entry_limit=max(entry_limit, 1))
        slots = np.frombuffer(file.pread(SLOT_BYTES * slot_count, HEADER.size), ">i4")
        entries = _read_entries(file, header, HEADER.size + SLOT_BYTES * slot_count)
        if entries is None:
            return None
        return IndexFile(path, header, slots, entries, is_cut=is_cut)


def _read_entries(file: File, header: IndexHeader, start: int) -> NDArray[Any] | None:
    """Read the entries that `header` counts. Return None if the file has fewer.

    `start` is the byte at which entry 0 begins. That entry is never used, and is left out.
    """
    if header.entry_limit > (file.size() - start) // ENTRY.itemsize:
        return None
    entries_bytes = file.pread(ENTRY.itemsize * (header.entry_limit - 1), start + ENTRY.itemsize)
    return np.frombuffer(entries_bytes, ENTRY)


def find_slot_count(file: File, header: IndexHeader) -> int | None:
    """Return the number of slots of an index file. It is not stored, so it must be derived.

    It is the number for which the first and the last entry are at the places that follow from it.
    If no number fits, assume RocketMQ's default proportion of entries to slots. Return None if the
    size of the file does not fit that proportion.
    """
    bytes_after_header = file.size() - HEADER.size
    usual_count, remainder = divmod(
        bytes_after_header, SLOT_BYTES + ENTRIES_PER_SLOT * ENTRY.itemsize
    )
    has_usual_size = not remainder
    has_entries = header.entry_limit > 1
    if has_usual_size and (not has_entries or _fits_entries(file, header, usual_count)):
        return usual_count

    if has_entries and bytes_after_header <= _SEARCHED_BYTES_MAX:
        slot_count = _search_slot_count(file, header)
        if slot_count is not None:
            return slot_count
    return usual_count if has_usual_size else None


def _search_slot_count(file: File, header: IndexHeader) -> int | None:
    """Search a file for its last entry, and derive the number of slots from the place.

    The header names the log position of the last entry. These bytes are searched, and may also
    occur elsewhere. So a place only counts if the first and the last entry fit the number of slots
    that follows from it. Return None if no place counts. The file must have an entry.
    """
    content = file.pread(file.size(), 0)
    bytes_after_header = len(content) - HEADER.size
    packed_position = struct.pack(">q", header.end_position)
    # The distance from the end of the slots to the position in the last entry, which follows the
    # entry's hash of 4 bytes.
    last_position_offset = (header.entry_limit - 1) * ENTRY.itemsize + 4

    match_index = content.find(packed_position, HEADER.size)
    while match_index >= 0:
        slot_bytes = match_index - last_position_offset - HEADER.size
        slot_count, slot_remainder = divmod(slot_bytes, SLOT_BYTES)
        entry_bytes = bytes_after_header - SLOT_BYTES * slot_count
        has_whole_slots = slot_count > 0 and not slot_remainder
        has_whole_entries = entry_bytes % ENTRY.itemsize == 0
        if has_whole_slots and has_whole_entries and _fits_entries(file, header, slot_count):
            return slot_count
        match_index = content.find(packed_position, match_index + 1)
    return None


def _fits_entries(file: File, header: IndexHeader, slot_count: int) -> bool:
    """Return whether the first and the last entry of the file have the positions of `header`.

    Their places in the file are computed for `slot_count` slots.
    """
    entries_start = HEADER.size + SLOT_BYTES * slot_count
    first_and_last = (
        (1, header.begin_position),
        (header.entry_limit - 1, header.end_position),
    )
    for entry_number, position in first_and_last:
        entry_bytes = file.pread(ENTRY.itemsize, entries_start + entry_number * ENTRY.itemsize)
        if len(entry_bytes) < ENTRY.itemsize:
            return False
        if np.frombuffer(entry_bytes, ENTRY)["position"][0] != position:
            return False
    return True


class IndexCheck:
    """The check of all index files of one store.

    Call `add_run` and `add_invalid_range` for the parts of the log in their order, then `finish`.
    `entry_count` is the number of entries in the files that were loaded.
    """

    def __init__(
        self, layout: StoreLayout, findings: Findings, checkpoint: Checkpoint | None
    ) -> None:
        """Prepare to check the index files in `layout`. Problems are added to `findings`.

        `checkpoint` is SluiceMQ's checkpoint, or None if there is none. It says which missing
        entries the next start of a broker adds. If the store was interrupted, index files that are
        newer than the checkpoint are not checked; each gets a note.
        """
        self._layout = layout
        self._findings = findings
        self._was_interrupted = layout.was_interrupted
        self._checkpoint = checkpoint

        # The files that are not loaded yet, oldest first.
        self._unread_paths = list(layout.indexes)
        if self._was_interrupted and checkpoint is not None:
            self._leave_out_unsettled_files(checkpoint)
        self._has_index = bool(self._unread_paths)
        # The file that the next start replaces, or "".
        self._unsettled_path = (
            layout.indexes[-1] if self._was_interrupted and layout.indexes else ""
        )
        # The files that have entries near the current position of the walk, oldest first.
        self._loaded_files: list[IndexFile] = []
        self.entry_count = 0

        # The greatest position of a record for which the index has an entry, or -1.
        self._last_indexed_position = -1
        # The missing entries, those of them that a start adds, and the positions of the first and
        # the last of them (-1 if none is missing).
        self._missing_count = 0
        self._missing_late_count = 0
        self._missing_first = -1
        self._missing_last = -1

    def _leave_out_unsettled_files(self, checkpoint: Checkpoint) -> None:
        """Leave out the files that are newer than the checkpoint, and add a note for each.

        A broker was building them when the store was interrupted. `_unread_paths` changes.
        """
        paths = self._unread_paths
        self._unread_paths = [
            path for path in paths if _parse_file_number(path) <= checkpoint.index_file
        ]
        for path in paths[len(self._unread_paths) :]:
            self._findings.add(
                NOTE,
                "unsettled-index",
                self._layout.shorten_path(path),
                "the file was being built when the store was interrupted: the next start"
                " builds it again",
            )

    def _choose_severity(self, path: str) -> str:
        """Return the severity of findings about a file: a warning if the next start replaces it."""
        return WARNING if path == self._unsettled_path else ERROR

    def _add_finding(self, file: IndexFile, text: str, entry_number: int | None = None) -> None:
        """Add a finding about a file, or about its entry with the number `entry_number`."""
        place = self._layout.shorten_path(file.path)
        if entry_number is not None:
            place += f" entry {entry_number}"
        self._findings.add(self._choose_severity(file.path), "index", place, text)

    # --- while the log is walked

    def add_run(self, run: Run) -> None:
        """Compare the entries of all records of a run with the index files.

        A run is a table of records that follow each other in the log without a gap.
        """
        expected = expected_entries(run)
        if not self._has_index:
            self._missing_count += len(expected.positions)
            return

        records = run.records
        start = records.base + int(records.starts[0])
        self._load_files_for(start, run.end)
        masks_by_file = self._select_entries(start, run.end)
        if not masks_by_file:
            self._count_missing(expected.positions)
            return

        # Usually one file has exactly the expected entries: then whole columns are compared.
        file, mask = masks_by_file[0]
        is_in_one_file = len(masks_by_file) == 1
        if not is_in_one_file or not _has_same_entries(file, mask, expected):
            self._compare_one_by_one(masks_by_file, expected)
            return
        self._last_indexed_position = int(expected.positions[-1])
        rows = np.flatnonzero(mask)
        self._check_header_times(file, rows, expected.times_ms)
        has_wrong_time = file.times[mask] != file.expected_times(expected.times_ms)
        for row in rows[has_wrong_time].tolist():
            self._add_wrong_time(file, row + 1)

    def _compare_one_by_one(
        self, masks_by_file: list[tuple[IndexFile, Mask]], expected: "Entries"
    ) -> None:
        """Compare the entries of some records with `expected`, one by one.

        `masks_by_file` contains index files, with a mask that selects their entries for these
        records. Wrong entries are added to the findings, and missing ones are counted. Used if the
        entries are in another order, or differ.
        """
        positions = expected.positions.tolist()
        # The entries, as (position, hash), that have not been found in a file yet.
        missing_counts = Counter(zip(positions, expected.hashes.tolist(), strict=True))
        expected_keys = set(missing_counts)
        times_ms = dict(zip(positions, expected.times_ms.tolist(), strict=True))
        for file, mask in masks_by_file:
            for row in np.flatnonzero(mask).tolist():
                position = int(file.positions[row])
                key_hash = int(file.hashes[row])
                if (position, key_hash) not in expected_keys:
                    self._add_finding(
                        file,
                        f"there is no message with a key of hash {key_hash} at position {position}"
                        " of the log",
                        row + 1,
                    )
                    continue

                self._check_entry_time(file, row, times_ms[position])
                # An entry may be repeated more often than expected, which does no harm.
                if missing_counts[position, key_hash] > 0:
                    missing_counts[position, key_hash] -= 1
                self._last_indexed_position = max(self._last_indexed_position, position)
        missing_positions = [position for position, _ in missing_counts.elements()]
        self._count_missing(np.array(missing_positions, np.int64))

    def _check_entry_time(self, file: IndexFile, row: int, stored_ms: int) -> None:
        """Compare the time of one entry, and of the header, with the store time of its record."""
        time_ms = np.array([stored_ms])
        self._check_header_times(file, np.array([row]), time_ms)
        if file.times[row] != file.expected_times(time_ms)[0]:
            self._add_wrong_time(file, row + 1)

    def add_invalid_range(self, invalid: InvalidRange) -> None:
        """Add one note if index entries point into a range of the log that has no valid record."""
        if not self._has_index or invalid.is_file_missing:
            return
        self._load_files_for(invalid.start, invalid.end)
        masks_by_file = self._select_entries(invalid.start, invalid.end)
        entry_count = sum(int(mask.sum()) for _, mask in masks_by_file)
        if entry_count:
            self._findings.add(
                NOTE,
                "index",
                f"commitlog {invalid.start}",
                f"{entry_count} index entries lead to damaged bytes",
            )

    def _load_files_for(self, start: int, end: int) -> None:
        """Load the index files that have entries before position `end` of the log.

        Files that end before position `start` are dropped, except the last one, because its end is
        compared with the next file. A dropped file is not loaded again, so the ranges of successive
        calls must ascend.
        """
        # Load files until at least half the entries of the last one are behind `end`.
        while self._unread_paths and (
            not self._loaded_files or self._loaded_files[-1].position_median < end
        ):
            self._load_file(self._unread_paths.pop(0))
        self._loaded_files = [
            file
            for file in self._loaded_files
            if file.position_max >= start or file is self._loaded_files[-1]
        ]

    def _select_entries(self, start: int, end: int) -> list[tuple[IndexFile, Mask]]:
        """Return (file, mask) of the loaded files that have entries for positions [start, end).

        The mask selects those entries.
        """
        masks_by_file = []
        for file in self._loaded_files:
            mask = (file.positions >= start) & (file.positions < end)
            if mask.any():
                masks_by_file.append((file, mask))
        return masks_by_file

    def _load_file(self, path: str) -> None:
        """Load an index file, and add its inconsistencies to the findings.

        If it cannot be read or is not an index file, it is not loaded, and a finding says so.
        """
        try:
            file = load_index(self._layout.files, path, self._find_entry_limit(path))
        except OSError as error:
            self._findings.add(ERROR, "unreadable", self._layout.shorten_path(path), str(error))
            return
        if file is None:
            self._findings.add(
                self._choose_severity(path),
                "index",
                self._layout.shorten_path(path),
                "its size or header is not that of an index file",
            )
            return

        self.entry_count += len(file.positions)
        # This must come before `find_problems`, which reports a first time that is not 0.
        previous_file = self._loaded_files[-1] if self._loaded_files else None
        file.normalize_first_time(previous_file)
        self._loaded_files.append(file)
        for problem in file.find_problems():
            self._add_finding(file, problem)

    def _find_entry_limit(self, path: str) -> int | None:
        """Return the number of the first entry of a file that must not be loaded; None loads all.

        After an interruption, only the entries that the checkpoint counts are durable in its last
        file.
        """
        checkpoint = self._checkpoint
        if not self._was_interrupted or checkpoint is None:
            return None
        if _parse_file_number(path) != checkpoint.index_file:
            return None
        return checkpoint.index_count

    def _check_header_times(self, file: IndexFile, rows: Positions, times_ms: Positions) -> None:
        """Compare the times in the header with the store times of the first and last message.

        `times_ms` are the store times of the messages whose entries are at `rows`. Nothing is
        compared if the first or last entry is not among them.
        """
        header = file.header
        if file.is_cut:
            return  # the header describes entries that were not loaded
        first_and_last = (
            (0, "begin", header.begin_time_ms),
            (len(file.hashes) - 1, "end", header.end_time_ms),
        )
        for row, name, header_ms in first_and_last:
            for stored_ms in times_ms[rows == row].tolist():
                if stored_ms != header_ms:
                    self._add_finding(
                        file,
                        f"its {name} time is {header_ms}, but its message there was stored at"
                        f" {stored_ms}",
                    )

    def _add_wrong_time(self, file: IndexFile, entry_number: int) -> None:
        """Add the finding that an entry has another time than its message."""
        row = entry_number - 1
        self._add_finding(
            file,
            f"its time, {file.times[row]} s after the begin of the file, is not that of its"
            f" message at {file.positions[row]}",
            entry_number,
        )

    def _count_missing(self, positions: Positions) -> None:
        """Count records that have no index entry. `positions` has one item for each missing entry.

        Also count the entries that the next start of a broker adds: for records from the
        checkpoint's position on. Without a checkpoint, a start adds the entries behind the last one
        if the store was interrupted, and otherwise none.
        """
        if not len(positions):
            return
        self._missing_count += len(positions)
        if self._checkpoint is not None:
            late_start = self._checkpoint.index_offset
        elif self._was_interrupted:
            late_start = self._last_indexed_position
        else:
            late_start = 1 << 62  # no record
        self._missing_late_count += int((positions >= late_start).sum())
        if self._missing_first < 0:
            self._missing_first = int(positions[0])
        self._missing_last = int(positions[-1])

    # --- at the end

    def finish(self, log_end: int) -> None:
        """Check the files that were not loaded yet, and report all missing entries.

        `log_end` is the position behind the last record of the log.
        """
        while self._unread_paths:
            self._load_file(self._unread_paths.pop(0))
            self._check_positions(self._loaded_files[-1:], log_end)
        self._check_positions(self._loaded_files, log_end)
        if self._missing_count:
            self._report_missing_entries()

    def _report_missing_entries(self) -> None:
        """Add one finding for all missing entries.

        The finding is a note if there is no index, or if the next start of a broker adds the
        entries; else a warning.
        """
        if not self._has_index:
            self._findings.add(
                NOTE,
                "no-index",
                "index",
                f"there is no index: messages cannot be queried by any of their"
                f" {self._missing_count} keys",
            )
            return

        # If RocketMQ has added records a second time, the checkpoint of SluiceMQ counts fewer of
        # them, but a broker still continues at the last one.
        is_behind_last_entry = (
            self._was_interrupted and self._missing_first >= self._last_indexed_position
        )
        will_be_added = is_behind_last_entry or self._missing_late_count == self._missing_count
        text = (
            f"{self._missing_count} keys of records from {self._missing_first} to"
            f" {self._missing_last} are in no index file: messages cannot be queried by them"
        )
        if will_be_added:
            text += "; a broker adds them when it starts"
        severity = NOTE if will_be_added else WARNING
        self._findings.add(severity, "not-indexed", f"commitlog {self._missing_first}", text)

    def _check_positions(self, files: list[IndexFile], log_end: int) -> None:
        """Report the entries whose positions are not in the log, which ends at `log_end`."""
        severity = WARNING if self._was_interrupted else ERROR
        for file in files:
            is_outside_log = (file.positions >= log_end) | (file.positions < 0)
            for row in np.flatnonzero(is_outside_log).tolist():
                place = f"{self._layout.shorten_path(file.path)} entry {row + 1}"
                text = (
                    f"the entry is for position {file.positions[row]}, but the log ends at"
                    f" {log_end}"
                )
                self._findings.add(severity, "index", place, text)


def _parse_file_number(path: str) -> int:
    """Return the name of an index file, a time, as a number."""
    return int(path.rpartition("/")[2])


class Entries(NamedTuple):
    """Entries of the index as columns, one row for each key of each message.

    `positions` are the positions of the records in the log, `hashes` the hashes of the keys, and
    `times_ms` the store times of the messages.
    """

    positions: Positions
    hashes: Positions
    times_ms: Positions


def expected_entries(run: Run) -> Entries:
    """Return the entries that the index must contain for the records of a run.

    A run is a table of records that follow each other in the log without a gap. The entries are in
    the order of the records.
    """
    records = run.records
    key_columns = key_columns_at(records.raw.data, records.starts)
    positions = records.starts[key_columns.records] + records.base
    return Entries(positions, key_columns.hashes.astype(np.int64), key_columns.times_ms)


def _has_same_entries(file: IndexFile, mask: Mask, expected: Entries) -> bool:
    """Return whether the entries that `mask` selects are equal to `expected`, in the same order.

    Times are not compared.
    """
    if int(mask.sum()) != len(expected.positions):
        return False
    has_same_positions = bool((file.positions[mask] == expected.positions).all())
    return has_same_positions and bool((file.hashes[mask] == expected.hashes).all())
