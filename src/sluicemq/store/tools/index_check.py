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

    Times are store times in ms, positions are those of the log, of the first and the last entry.
    `slots_used` is the number of slots that are not empty. `entry_limit` is the number of the last
    entry plus one.
    """

    begin_time_ms: int
    end_time_ms: int
    begin_position: int
    end_position: int
    slots_used: int
    entry_limit: int


class IndexFile:
    """An index file in memory: its header, its slots, and its entries as columns.

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
        self.path = path
        self.is_cut = is_cut
        self.header = header
        self.slots = slots
        self.hashes: Positions = entries["hash"].astype(np.int64)
        self.positions: Positions = entries["position"].astype(np.int64)
        self.times: Positions = entries["seconds"].astype(np.int64)
        self.previous: Positions = entries["previous"].astype(np.int64)
        count = len(self.positions)
        self.position_max = int(self.positions.max()) if count else -1
        # The median decides when the next file is loaded: the maximum may be a damaged entry.
        self.position_median = (
            int(np.partition(self.positions, count // 2)[count // 2]) if count else -1
        )

    def expected_times(self, store_times_ms: Positions) -> Positions:
        """Return the times that entries must have for messages with these store times."""
        return np.clip((store_times_ms - self.header.begin_time_ms) // 1000, 0, _SECONDS_MAX)

    def normalize_first_time(self, previous_file: "IndexFile | None") -> None:
        """Replace the time of the first entry with 0 if it is valid.

        That time may be counted from the end of the previous file instead of the begin of this one
        (spec/store.md §4). Without `previous_file`, which retention may have removed, any time is
        valid.
        """
        if not len(self.times):
            return
        gap_ms = (
            0
            if previous_file is None
            else self.header.begin_time_ms - previous_file.header.end_time_ms
        )
        if previous_file is None or self.times[0] == gap_ms // 1000:
            self.times[0] = 0

    def find_problems(self) -> list[str]:
        """Return descriptions of what is inconsistent in the file itself.

        The order of the entries, the chains of entries with the same slot, and the header are
        checked.
        """
        if not len(self.positions):
            has_slots = self.slots.any() and not self.is_cut
            return ["the file has no entries, but slots that are in use"] if has_slots else []
        backward_rows = np.flatnonzero(np.diff(self.positions) < 0)[:_PROBLEMS_MAX]
        order_problems = [
            f"entry {row + 2} is for an earlier position of the log than entry {row + 1}"
            for row in backward_rows
        ]
        # Every entry leads to the previous entry of its slot, and the slot leads to the newest.
        linked = Slots(len(self.slots)).link(self.hashes.astype(np.int32), 1)
        chain_problems = [
            f"entry {row + 1} leads to entry {self.previous[row]}, but the previous entry of its"
            f" slot is {linked.previous[row]}"
            for row in np.flatnonzero(linked.previous != self.previous)[:_PROBLEMS_MAX].tolist()
        ]
        if self.is_cut:
            return order_problems + chain_problems
        newest_entries = np.zeros(len(self.slots), np.int64)
        newest_entries[linked.slots] = linked.newest
        chain_problems += [
            f"slot {slot} leads to entry {self.slots[slot]} instead of {newest_entries[slot]}"
            for slot in np.flatnonzero(newest_entries != self.slots)[:_PROBLEMS_MAX].tolist()
        ]
        return [*self._find_header_problems(), *order_problems, *chain_problems]

    def _find_header_problems(self) -> list[str]:
        """Return descriptions of what the header says otherwise than slots and entries."""
        header, problems = self.header, []
        ends = (
            ("begins", header.begin_position, "first", 0),
            ("ends", header.end_position, "last", -1),
        )
        for verb, position, which, row in ends:
            if position != self.positions[row]:
                problems.append(
                    f"the header says that the file {verb} at position {position} of the log, the"
                    f" {which} entry says {self.positions[row]}"
                )
        if self.times[0] != 0:
            problems.append(f"the first entry has time {self.times[0]} instead of 0")
        seconds = max((header.end_time_ms - header.begin_time_ms) // 1000, 0)
        if seconds != self.times[-1]:
            problems.append(
                f"the header spans {seconds} seconds, the last entry says {self.times[-1]}"
            )
        used_slots = int(np.count_nonzero(self.slots))
        if header.slots_used != used_slots:
            problems.append(
                f"the header counts {header.slots_used} used slots, there are {used_slots}"
            )
        return problems


def load_index(files: Files, path: str, entry_limit: int | None = None) -> IndexFile | None:
    """Read an index file, or only its entries before number `entry_limit`.

    Returns None if its size or header is not that of an index file. Raises OSError.
    """
    file = files.open(path)
    try:
        size = file.size()
        if size < HEADER.size + SLOT_BYTES + ENTRY.itemsize:
            return None
        header = IndexHeader._make(HEADER.unpack(file.pread(HEADER.size, 0)))
        header = header._replace(entry_limit=max(header.entry_limit, 1))
        is_cut = entry_limit is not None
        slot_count = find_slot_count(file, header)
        if entry_limit is not None:
            header = header._replace(entry_limit=max(entry_limit, 1))
        if slot_count is None:
            return None
        slots_end = HEADER.size + SLOT_BYTES * slot_count
        if header.entry_limit > (size - slots_end) // ENTRY.itemsize:
            return None
        slots = np.frombuffer(file.pread(SLOT_BYTES * slot_count, HEADER.size), ">i4")
        entries = file.pread(ENTRY.itemsize * (header.entry_limit - 1), slots_end + ENTRY.itemsize)
        return IndexFile(path, header, slots, np.frombuffer(entries, ENTRY), is_cut=is_cut)
    finally:
        file.close()


def find_slot_count(file: File, header: IndexHeader) -> int | None:
    """Return the number of slots of an index file.

    That is the number for which the first and the last entry are where `header` says. If there is
    no such number, return the one of a file of this size with RocketMQ's default proportion of
    entries to slots, or None if the size does not fit that proportion.
    """
    room = file.size() - HEADER.size
    usual_count, remainder = divmod(room, SLOT_BYTES + ENTRIES_PER_SLOT * ENTRY.itemsize)
    if not remainder and (header.entry_limit <= 1 or _fits_entries(file, header, usual_count)):
        return usual_count
    if room <= _SEARCHED_BYTES_MAX and header.entry_limit > 1:
        # Find the position of the last entry in the file, and derive the number of slots from it.
        data = file.pread(file.size(), 0)
        wanted = struct.pack(">q", header.end_position)
        last_entry_offset = (header.entry_limit - 1) * ENTRY.itemsize + 4
        at = data.find(wanted, HEADER.size)
        while at >= 0:
            count, slot_remainder = divmod(at - last_entry_offset - HEADER.size, SLOT_BYTES)
            entry_room = room - SLOT_BYTES * count
            is_whole = not slot_remainder and count > 0 and entry_room % ENTRY.itemsize == 0
            if is_whole and _fits_entries(file, header, count):
                return count
            at = data.find(wanted, at + 1)
    return None if remainder else usual_count


def _fits_entries(file: File, header: IndexHeader, slot_count: int) -> bool:
    """Return whether the first and the last entry of the file have the positions of `header`.

    Their places in the file are computed for `slot_count` slots.
    """
    entries_start = HEADER.size + SLOT_BYTES * slot_count
    ends = ((1, header.begin_position), (header.entry_limit - 1, header.end_position))
    for number, position in ends:
        data = file.pread(ENTRY.itemsize, entries_start + number * ENTRY.itemsize)
        if len(data) < ENTRY.itemsize or np.frombuffer(data, ENTRY)["position"][0] != position:
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
        self._layout = layout
        self._findings = findings
        self._was_interrupted = layout.was_interrupted
        self._checkpoint = checkpoint
        self._paths = paths = list(layout.indexes)
        if self._was_interrupted and checkpoint is not None:
            # Files that a broker was building do not count.
            self._paths = [path for path in paths if _file_number(path) <= checkpoint.index_file]
            for path in paths[len(self._paths) :]:
                findings.add(
                    NOTE,
                    "unsettled-index",
                    layout.shorten_path(path),
                    "the file was being built when the store was interrupted: the next start"
                    " builds it again",
                )
        self._unsettled_path = (
            layout.indexes[-1] if self._was_interrupted and layout.indexes else ""
        )
        self._loaded: list[IndexFile] = []
        self._has_index = bool(self._paths)
        self.entry_count = 0
        self._indexed_end = -1
        self._missing_count = 0
        self._missing_late_count = 0
        self._missing_first = self._missing_last = -1

    def _severity_of(self, path: str) -> str:
        """Return the severity of findings about a file: a warning if the next start replaces it."""
        return WARNING if path == self._unsettled_path else ERROR

    def _add_finding(self, file: IndexFile, text: str, entry: int | None = None) -> None:
        """Add a finding about a file, or about the entry of that number."""
        place = self._layout.shorten_path(file.path)
        if entry is not None:
            place += f" entry {entry}"
        self._findings.add(self._severity_of(file.path), "index", place, text)

    # --- while the log is walked

    def add_run(self, run: Run) -> None:
        """Compare the entries of all records of a run with the index files."""
        keys = expected_entries(run)
        if not self._has_index:
            self._missing_count += len(keys.positions)
            return
        records = run.records
        found = self._find_entries(records.base + int(records.starts[0]), run.end)
        if not found:
            self._add_missing(keys.positions)
            return
        file, mask = found[0]
        agrees = len(found) == 1 and int(mask.sum()) == len(keys.positions)
        agrees = agrees and bool((file.positions[mask] == keys.positions).all())
        if not agrees or not (file.hashes[mask] == keys.hashes).all():
            self._compare_entries(found, keys)
            return
        self._indexed_end = int(keys.positions[-1])
        rows = np.flatnonzero(mask)
        self._check_header_times(file, rows, keys.times_ms)
        wrong = file.times[mask] != file.expected_times(keys.times_ms)
        for number in (rows[wrong] + 1).tolist():
            self._add_wrong_time(file, number)

    def _compare_entries(self, found: list[tuple[IndexFile, Mask]], keys: "Entries") -> None:
        """Compare entries one by one, where the files contain others than `keys` or in other order.

        `found` contains the index files, and which of their entries belong to the records of
        `keys`.
        """
        positions = keys.positions.tolist()
        wanted = Counter(zip(positions, keys.hashes.tolist(), strict=True))
        times = dict(zip(positions, keys.times_ms.tolist(), strict=True))
        known = set(wanted)
        for file, mask in found:
            for row in np.flatnonzero(mask).tolist():
                entry = (int(file.positions[row]), int(file.hashes[row]))
                if entry not in known:
                    self._add_finding(
                        file,
                        f"there is no message with a key of hash {entry[1]} at position {entry[0]}"
                        " of the log",
                        row + 1,
                    )
                    continue
                time_ms = np.array([times[entry[0]]])
                self._check_header_times(file, np.array([row]), time_ms)
                if file.times[row] != file.expected_times(time_ms)[0]:
                    self._add_wrong_time(file, row + 1)
                wanted[entry] = max(wanted[entry] - 1, 0)
                self._indexed_end = max(self._indexed_end, entry[0])
        missing = [position for (position, _), count in wanted.items() for _ in range(count)]
        self._add_missing(np.array(missing, np.int64))

    def add_invalid_range(self, invalid: InvalidRange) -> None:
        """Add one note if entries lead to the bytes of an invalid range."""
        if self._has_index and not invalid.is_file_missing:
            found = self._find_entries(invalid.start, invalid.end)
            count = sum(int(mask.sum()) for _, mask in found)
            if count:
                self._findings.add(
                    NOTE,
                    "index",
                    f"commitlog {invalid.start}",
                    f"{count} index entries lead to damaged bytes",
                )

    def _find_entries(self, start: int, end: int) -> list[tuple[IndexFile, Mask]]:
        """Return (file, mask) of the index files that have entries for positions [start, end).

        The mask selects those entries. Files are loaded when the walk reaches them, and dropped
        behind it.
        """
        while self._paths and (not self._loaded or self._loaded[-1].position_median < end):
            self._load(self._paths.pop(0))
        self._loaded = [
            file for file in self._loaded if file.position_max >= start or file is self._loaded[-1]
        ]
        found = []
        for file in self._loaded:
            mask = (file.positions >= start) & (file.positions < end)
            if mask.any():
                found.append((file, mask))
        return found

    def _load(self, path: str) -> None:
        """Load an index file, and add what is inconsistent in it to the findings."""
        checkpoint, entry_limit = self._checkpoint, None
        if (
            self._was_interrupted
            and checkpoint is not None
            and _file_number(path) == checkpoint.index_file
        ):
            entry_limit = checkpoint.index_count
        try:
            file = load_index(self._layout.files, path, entry_limit)
        except OSError as error:
            self._findings.add(ERROR, "unreadable", self._layout.shorten_path(path), str(error))
            return
        if file is None:
            self._findings.add(
                self._severity_of(path),
                "index",
                self._layout.shorten_path(path),
                "its size or header is not that of an index file",
            )
            return
        self.entry_count += len(file.positions)
        file.normalize_first_time(self._loaded[-1] if self._loaded else None)
        self._loaded.append(file)
        for text in file.find_problems():
            self._add_finding(file, text)

    def _check_header_times(self, file: IndexFile, rows: Positions, times_ms: Positions) -> None:
        """Check that the header has the times of the first and the last message.

        `times_ms` are the store times of the messages of the entries at `rows`.
        """
        header = file.header
        if file.is_cut:
            return
        ends = (
            (0, "begin", header.begin_time_ms),
            (len(file.hashes) - 1, "end", header.end_time_ms),
        )
        for row, name, header_ms in ends:
            for stored_ms in times_ms[rows == row].tolist():
                if stored_ms != header_ms:
                    self._add_finding(
                        file,
                        f"its {name} time is {header_ms}, but its message there was stored at"
                        f" {stored_ms}",
                    )

    def _add_wrong_time(self, file: IndexFile, number: int) -> None:
        self._add_finding(
            file,
            f"its time, {file.times[number - 1]} s after the begin of the file, is not that of its"
            f" message at {file.positions[number - 1]}",
            number,
        )

    def _add_missing(self, positions: Positions) -> None:
        """Count the records at `positions` (once for each key) as missing in the index."""
        if not len(positions):
            return
        self._missing_count += len(positions)
        # A start of a broker adds the keys of records from here on.
        late_from = self._indexed_end if self._was_interrupted else 1 << 62
        if self._checkpoint is not None:
            late_from = self._checkpoint.index_offset
        self._missing_late_count += int((positions >= late_from).sum())
        if self._missing_first < 0:
            self._missing_first = int(positions[0])
        self._missing_last = int(positions[-1])

    # --- at the end

    def finish(self, log_end: int) -> None:
        """Check the remaining files, and report missing entries.

        `log_end` is the position behind the last record.
        """
        while self._paths:
            self._load(self._paths.pop(0))
            self._check_positions(self._loaded[-1:], log_end)
        self._check_positions(self._loaded, log_end)
        if not self._missing_count:
            return
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
        is_behind = self._was_interrupted and self._missing_first >= self._indexed_end
        is_late = is_behind or self._missing_late_count == self._missing_count
        text = (
            f"{self._missing_count} keys of records from {self._missing_first} to"
            f" {self._missing_last} are in no index file: messages cannot be queried by them"
        )
        if is_late:
            text += "; a broker adds them when it starts"
        severity = NOTE if is_late else WARNING
        self._findings.add(severity, "not-indexed", f"commitlog {self._missing_first}", text)

    def _check_positions(self, files: list[IndexFile], log_end: int) -> None:
        """Report the entries whose positions are not in the log, which ends at `log_end`."""
        for file in files:
            outside = (file.positions >= log_end) | (file.positions < 0)
            for row in np.flatnonzero(outside).tolist():
                self._findings.add(
                    WARNING if self._was_interrupted else ERROR,
                    "index",
                    f"{self._layout.shorten_path(file.path)} entry {row + 1}",
                    f"the entry is for position {file.positions[row]}, but the log ends at"
                    f" {log_end}",
                )


def _file_number(path: str) -> int:
    """Return the name of an index file, a time, as a number."""
    return int(path.rpartition("/")[2])


class Entries(NamedTuple):
    """Entries of the index as columns, one row for each key of each message.

    `positions` are those of the records in the log, `hashes` those of the keys, and `times_ms` the
    store times of the messages.
    """

    positions: Positions
    hashes: Positions
    times_ms: Positions


def expected_entries(run: Run) -> Entries:
    """Return the entries that the index must contain for the records of a run, in its order."""
    records = run.records
    found = key_columns_at(records.raw.data, records.starts)
    positions = records.starts[found.records] + records.base
    return Entries(positions, found.hashes.astype(np.int64), found.times_ms)
