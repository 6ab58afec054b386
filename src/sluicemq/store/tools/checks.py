"""What `verify` collects, and its checks of files: names, sizes, checkpoint, documents in config/,
and those of the key index.

    error     messages are lost, unreadable, or found at the wrong place
    warning   not as it should be; no message is lost, or the next start of a broker mends it
    note      worth knowing, and in order

Of each kind as many findings are kept as anyone will read; all are counted. Sizes are compared with
each other, since the settings are not known: a broker does not start when a file has another size
than it expects (spec/store.md §1).

Index files are held against the log (`IndexCheck`): chains, headers, and every entry against its
message's keys. An index holds, for every message, its unique key first and then each of its keys,
in the order of the log (spec/store.md §4). So a run of records says exactly which entries must
stand in the index, in which order: the comparison is one of columns. Only when it fails the two are
compared as sets, to say what is missing and what does not belong.

Entry 0 is never used, so the header's limit is one more than there are entries. A file does not say
how many slots it has: in RocketMQ's default there are four times as many entries; a file of other
settings tells by where its first and its last entry stand.

While a broker of ours runs, or after it crashed, only that part of the index counts which the mark
in the checkpoint vouches for: the next start builds the rest anew. RocketMQ writes its index into
maps; after a crash of it the last file is not trusted either, so what is wrong there is a warning.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluicemq.errors import ProtocolError
from sluicemq.files import File, Files, read_text
from sluicemq.files.identity import is_last_text, read_identity
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.record.layout import INDEX_ENTRY, INDEX_HEADER
from sluicemq.record.table import Mask, Positions
from sluicemq.store.directory import CHECKPOINT_BYTES, SLOTS, Checkpoint, parse_slots
from sluicemq.store.index.columns import Slots, key_columns_at
from sluicemq.store.segments import is_segment_name
from sluicemq.store.tools.layout import (
    Hole,
    QueueKey,
    Run,
    Series,
    StoreLayout,
    file_size,
    read_file,
    usual_size,
)
from sluicemq.wire.fastjson import loads

ERROR: Final = "error"
WARNING: Final = "warning"
NOTE: Final = "note"
KEPT_PER_KIND: Final = 100


class Finding(NamedTuple):
    """`place` is a file, a position in the log, or a queue; `kind` is a word for scripts."""

    severity: str
    kind: str
    place: str
    text: str


class Findings:
    """A collection that stays small."""

    def __init__(self, kept_per_kind: int = KEPT_PER_KIND) -> None:
        self.kept: list[Finding] = []
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self._kept_per_kind = kept_per_kind

    def add(self, severity: str, kind: str, place: str, text: str) -> None:
        self.by_kind[severity, kind] += 1
        if self.by_kind[severity, kind] <= self._kept_per_kind:
            self.kept.append(Finding(severity, kind, place, text))

    def has_room(self, severity: str, kind: str) -> bool:
        """False when one more would only be counted: no need to make up its text."""
        return self.by_kind[severity, kind] < self._kept_per_kind

    def count(self, severity: str, kind: str, number: int) -> None:
        """So many more that are not described."""
        self.by_kind[severity, kind] += number

    def total(self, severity: str) -> int:
        return sum(count for (of, _), count in self.by_kind.items() if of == severity)

    @property
    def is_clean(self) -> bool:
        """Notes do not count."""
        return not self.total(ERROR) and not self.total(WARNING)

    @property
    def hidden(self) -> dict[str, int]:
        """How many of each kind are counted and not kept."""
        return {
            kind: count - self._kept_per_kind
            for (_, kind), count in self.by_kind.items()
            if count > self._kept_per_kind
        }


JSON_DOCUMENTS: Final = ("transactionMetrics", "timermetrics")
"""Documents in config/ that are JSON without saying so in their names."""
_LONG_BYTES: Final = 8
_SLOT_BYTES: Final = 1024


def check_series(layout: StoreLayout, findings: Findings) -> None:
    """Sizes and names of all files of log and queues."""
    for directory in layout.log_paths:
        for name in layout.files.names(directory):
            path = f"{directory}/{name}"
            if is_segment_name(name) and not file_size(layout.files, path):
                findings.add(
                    NOTE, "empty-file", layout.name_of(path),
                    "it has no bytes: the trace of a crash at its creation",
                )  # fmt: skip
    _check_sizes(layout, findings, "commitlog", [layout.log], gaps=False)
    for kind, queues in (
        ("consumequeue", layout.queues),
        ("batchconsumequeue", layout.batch_queues),
        ("consumequeue_ext", layout.extensions),
    ):
        _check_sizes(layout, findings, kind, queues.values(), gaps=True)


def _check_sizes(
    layout: StoreLayout, findings: Findings, kind: str, all_series: Iterable[Series], *, gaps: bool
) -> None:
    """`gaps`: say where files are missing (of the log the walk says it)."""
    every = list(all_series)
    usual = usual_size(every)
    for series in every:
        end = None
        for item in series.items:
            name = layout.name_of(item.path)
            if item.size != usual:
                findings.add(
                    ERROR, "file-size", name,
                    f"it has {item.size} bytes, files of {kind} have {usual}: no broker starts",
                )  # fmt: skip
            if item.base % usual:
                findings.add(
                    ERROR, "file-name", name,
                    f"its name is no multiple of the size of its kind, {usual}",
                )  # fmt: skip
            if gaps and end is not None and item.base > end:
                findings.add(
                    ERROR, "missing-file", name, f"the file {end:020d} before it is missing"
                )
            if end is not None and item.base < end:
                findings.add(ERROR, "file-name", name, "it begins inside the file before it")
            end = item.end


def check_checkpoint(
    layout: StoreLayout, findings: Findings, log_end: int, last_time_ms: int
) -> None:
    """`log_end` is where the log goes on, `last_time_ms` the latest store time in it (0: none)."""
    data = read_file(layout.files, layout.checkpoint_path)
    if data is None:
        findings.add(NOTE, "checkpoint", "checkpoint", "there is none: the next start scans more")
        return
    if len(data) != CHECKPOINT_BYTES:
        findings.add(
            WARNING, "checkpoint", "checkpoint",
            f"it has {len(data)} bytes instead of {CHECKPOINT_BYTES}",
        )  # fmt: skip
        data = data.ljust(CHECKPOINT_BYTES, b"\0")
    for number, name in enumerate(("log", "queue", "index")):
        time_ms = int.from_bytes(data[number * _LONG_BYTES :][:_LONG_BYTES], "big", signed=True)
        if time_ms < 0 or (last_time_ms and time_ms > last_time_ms):
            findings.add(
                WARNING, "checkpoint", "checkpoint",
                f"its {name} time {time_ms} is later than the last record ({last_time_ms}):"
                " the next start may trust too much",
            )  # fmt: skip
    marks = parse_slots(data)
    for at, mark in zip(SLOTS, marks, strict=True):
        if mark is None and any(data[at : at + _SLOT_BYTES]):
            findings.add(
                WARNING, "checkpoint", f"checkpoint byte {at}",
                "the mark there is torn; the other one counts" if any(marks)
                else "the marks there are damaged: the next start scans more",
            )  # fmt: skip
    mark = max((mark for mark in marks if mark is not None), default=None)
    if mark is not None and 0 <= mark.log_start < layout.log.start:
        findings.add(
            ERROR, "missing-file", "commitlog",
            f"the log begins at {layout.log.start}, but no retention has deleted what lies before:"
            f" at the last checkpoint it began at {mark.log_start}",
        )  # fmt: skip
    if mark is not None and mark.log_offset > log_end:
        findings.add(
            ERROR, "checkpoint", "checkpoint",
            f"it says that everything before {mark.log_offset} was safely on disk, but the log"
            f" ends at {log_end}",
        )  # fmt: skip


def read_document(layout: StoreLayout, path: str) -> Any:
    """The value of a JSON document, None when it is not there or empty. Raises ProtocolError."""
    data = read_file(layout.files, path)
    return loads(data) if data and data.strip() else None


def known_topics(layout: StoreLayout) -> set[str] | None:
    """The topics in topics.json; None when it cannot be read."""
    for edition in ("", ".bak"):
        try:
            value = read_document(layout, f"{layout.root}/config/topics.json{edition}")
        except ProtocolError:
            continue
        if isinstance(value, dict) and isinstance(value.get("topicConfigTable"), dict):
            return set(value["topicConfigTable"])
    return None


def check_documents(layout: StoreLayout, findings: Findings, ends: Mapping[QueueKey, int]) -> None:
    """Check that each document can be read, that it is the one that our broker wrote last, and
    that no progress in it lies behind the end of its queue, which `ends` has.
    """
    for path in layout.documents():
        name = layout.name_of(path)
        if not name.endswith((".json", *JSON_DOCUMENTS)):
            continue
        try:
            value = read_document(layout, path)
        except ProtocolError as error:
            try:
                has_backup = read_document(layout, f"{path}.bak") is not None
            except ProtocolError:
                has_backup = False
            backup = "its .bak can be read" if has_backup else "there is no .bak that can be read"
            severity = WARNING if has_backup else ERROR
            findings.add(severity, "document", name, f"{error.fact}; {backup}")
            continue
        identity = read_identity(layout.files, path)
        if identity is not None and not is_last_text(identity, read_text(layout.files, path)):
            text = (
                "it is not what our broker wrote last: RocketMQ has had the store since, or this is"
                " an older copy, or the file of another store"
            )
            findings.add(NOTE, "document", name, text)  # the first is usual, and harmless
        for who, queue, offset in _progress(name, value):
            end = ends.get(queue)
            if end is not None and isinstance(offset, int) and offset > end:
                text = f"{who} is at {offset} of {queue[0]}/{queue[1]}, which ends at {end}"
                findings.add(WARNING, "progress", name, text)


def _progress(name: str, value: Any) -> Iterator[tuple[str, QueueKey, Any]]:
    """(who, queue, offset) of the documents that say how far somebody is."""
    table = value.get("offsetTable") if isinstance(value, dict) else None
    if not isinstance(table, dict):
        return
    if name.endswith("/consumerOffset.json"):
        for key, offsets in table.items():
            topic, _, group = str(key).partition("@")
            for queue_id, offset in offsets.items() if isinstance(offsets, dict) else ():
                yield f"group {group}", (topic, int(queue_id)), offset
    elif name.endswith("/delayOffset.json"):
        for level, offset in table.items():
            yield f"delay level {level}", (SCHEDULE_TOPIC, int(level) - 1), offset


HEADER: Final = INDEX_HEADER.struct
ENTRY: Final = INDEX_ENTRY.dtype
SLOT_BYTES: Final = 4
ENTRIES_PER_SLOT: Final = 4
_SECONDS_MAX: Final = (1 << 31) - 1
_SEARCH_BYTES_MAX: Final = 1 << 29


class IndexHeader(NamedTuple):
    begin_time_ms: int
    end_time_ms: int
    begin_position: int
    end_position: int
    slots_used: int
    entry_limit: int
    """One more than the number of the last entry."""


class IndexFile:
    """A file's entries, number 1 at index 0, and its slots."""

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
        """Only the first entries are there: neither header nor slots speak of them alone."""
        self.header = header
        self.slots = slots
        self.hashes: Positions = entries["hash"].astype(np.int64)
        self.positions: Positions = entries["position"].astype(np.int64)
        self.times: Positions = entries["seconds"].astype(np.int64)
        self.previous: Positions = entries["previous"].astype(np.int64)
        count = len(self.positions)
        self.last = int(self.positions.max()) if count else -1
        # A damaged entry must not keep the next file from being read.
        self.nearly_last = (
            int(np.partition(self.positions, count // 2)[count // 2]) if count else -1
        )

    def expected_times(self, store_times: Positions) -> Positions:
        """Seconds after the file's begin, as an entry holds them."""
        return np.clip((store_times - self.header.begin_time_ms) // 1000, 0, _SECONDS_MAX)

    def follow(self, former: "IndexFile | None") -> None:
        """The first entry may count from the end of the file before (spec/store.md §4): then its
        time is as good as 0. Without that file, which retention may have removed, any is.
        """
        if not len(self.times):
            return
        gap_ms = 0 if former is None else self.header.begin_time_ms - former.header.end_time_ms
        if former is None or self.times[0] == gap_ms // 1000:
            self.times[0] = 0

    def problems(self) -> list[str]:
        """What in the file does not agree with itself."""
        if not len(self.positions):
            return ["it has no entry, but slots"] if self.slots.any() and not self.is_cut else []
        back = np.flatnonzero(np.diff(self.positions) < 0)[:20]
        order = [f"entry {at + 2} lies before entry {at + 1} in the log" for at in back]
        # Every entry leads to the one before it in its slot, the slot to the newest.
        linked = Slots(len(self.slots)).link(self.hashes.astype(np.int32), 1)
        chains = [
            f"entry {at + 1} leads to entry {self.previous[at]}, but {linked.previous[at]} is the"
            " one before it in its slot"
            for at in np.flatnonzero(linked.previous != self.previous)[:20].tolist()
        ]
        if self.is_cut:
            return order + chains
        heads = np.zeros(len(self.slots), np.int64)
        heads[linked.slots] = linked.newest
        chains += [
            f"slot {at} begins with entry {self.slots[at]} instead of {heads[at]}"
            for at in np.flatnonzero(heads != self.slots)[:20].tolist()
        ]
        header, found = self.header, []
        ends = (
            ("begins", header.begin_position, "first", 0),
            ("ends", header.end_position, "last", -1),
        )
        for verb, position, which, at in ends:
            if position != self.positions[at]:
                found.append(
                    f"its header says that it {verb} at {position} of the log, its {which} entry"
                    f" says {self.positions[at]}"
                )
        if self.times[0] != 0:
            found.append(f"its first entry has time {self.times[0]} instead of 0")
        seconds = max((header.end_time_ms - header.begin_time_ms) // 1000, 0)
        if seconds != self.times[-1]:
            found.append(
                f"its header spans {seconds} seconds, its last entry says {self.times[-1]}"
            )
        used = int(np.count_nonzero(self.slots))
        if header.slots_used != used:
            found.append(f"its header counts {header.slots_used} used slots, there are {used}")
        return [*found, *order, *chains]


def load_index(files: Files, path: str, entry_limit: int | None = None) -> IndexFile | None:
    """The file in memory, or only its entries before number `entry_limit`.

    None when it cannot be an index file. Raises OSError.
    """
    file = files.open(path)
    try:
        size = file.size()
        if size < HEADER.size + SLOT_BYTES + ENTRY.itemsize:
            return None
        header = IndexHeader._make(HEADER.unpack(file.pread(HEADER.size, 0)))
        header = header._replace(entry_limit=max(header.entry_limit, 1))
        is_cut = entry_limit is not None
        slots = slot_count(file, header)
        if entry_limit is not None:
            header = header._replace(entry_limit=max(entry_limit, 1))
        if slots is None or header.entry_limit > (size - HEADER.size - SLOT_BYTES * slots) // 20:
            return None
        table = np.frombuffer(file.pread(SLOT_BYTES * slots, HEADER.size), ">i4")
        entries = file.pread(
            ENTRY.itemsize * (header.entry_limit - 1),
            HEADER.size + SLOT_BYTES * slots + ENTRY.itemsize,
        )
        return IndexFile(path, header, table, np.frombuffer(entries, ENTRY), is_cut=is_cut)
    finally:
        file.close()


def slot_count(file: File, header: IndexHeader) -> int | None:
    """How many slots the file has; None when no number fits."""
    rest = file.size() - HEADER.size
    usual, odd = divmod(rest, SLOT_BYTES + ENTRIES_PER_SLOT * ENTRY.itemsize)
    if not odd and (header.entry_limit <= 1 or _fits(file, header, usual)):
        return usual
    if rest <= _SEARCH_BYTES_MAX and header.entry_limit > 1:
        data = file.pread(file.size(), 0)  # where do both ends of the entries fit?
        wanted = struct.pack(">q", header.end_position)
        last = (header.entry_limit - 1) * ENTRY.itemsize + 4
        at = data.find(wanted, HEADER.size)
        while at >= 0:
            slots, beside = divmod(at - last - HEADER.size, SLOT_BYTES)
            room = rest - SLOT_BYTES * slots
            is_whole = not beside and slots > 0 and room % ENTRY.itemsize == 0
            if is_whole and _fits(file, header, slots):
                return slots
            at = data.find(wanted, at + 1)
    return None if odd else usual


def _fits(file: File, header: IndexHeader, slots: int) -> bool:
    """Whether the first and the last entry stand where they would with so many slots."""
    entries = HEADER.size + SLOT_BYTES * slots
    ends = ((1, header.begin_position), (header.entry_limit - 1, header.end_position))
    for number, position in ends:
        data = file.pread(ENTRY.itemsize, entries + number * ENTRY.itemsize)
        if len(data) < ENTRY.itemsize or np.frombuffer(data, ENTRY)["position"][0] != position:
            return False
    return True


class IndexCheck:
    """Give it each run of records and each damage in the order of the log, then call `finish`."""

    def __init__(self, layout: StoreLayout, findings: Findings, mark: Checkpoint | None) -> None:
        self._layout = layout
        self._findings = findings
        self._interrupted = layout.was_interrupted
        self._mark = mark
        self._paths = paths = list(layout.indexes)
        if self._interrupted and mark is not None:  # what a broker was making does not count
            self._paths = [path for path in paths if _number(path) <= mark.index_file]
            for path in paths[len(self._paths) :]:
                findings.add(
                    NOTE, "unsettled-index", layout.name_of(path),
                    "it was being made when the store was interrupted: the next start makes it"
                    " anew",
                )  # fmt: skip
        self._unsettled = layout.indexes[-1] if self._interrupted and layout.indexes else ""
        self._loaded: list[IndexFile] = []
        self._has_index = bool(self._paths)
        self.entries = 0
        self._indexed_end = -1
        self._missing = 0
        self._missing_late = 0
        self._missing_first = self._missing_last = -1
        self._repeated = 0

    def _severity(self, path: str) -> str:
        return WARNING if path == self._unsettled else ERROR

    # --- while walking

    def add(self, run: Run) -> None:
        """Compare the entries of all records of a run."""
        keys = expected_entries(run)
        if not self._has_index:
            self._missing += len(keys.positions)
            return
        records = run.records
        found = self._take(records.base + int(records.starts[0]), run.end)
        if not found:
            self._note_missing(keys.positions)
            return
        file, mask = found[0]
        agrees = len(found) == 1 and int(mask.sum()) == len(keys.positions)
        agrees = agrees and bool((file.positions[mask] == keys.positions).all())
        if agrees and (file.hashes[mask] == keys.hashes).all():  # as a rule
            self._indexed_end = int(keys.positions[-1])
            numbers = np.flatnonzero(mask)
            self._check_ends(file, numbers, keys.times_ms)
            wrong = file.times[mask] != file.expected_times(keys.times_ms)
            for number in (numbers[wrong] + 1).tolist():
                self._wrong_time(file, number)
            return
        # Entry by entry, where files or orders differ.
        positions = keys.positions.tolist()
        wanted = Counter(zip(positions, keys.hashes.tolist(), strict=True))
        times = dict(zip(positions, keys.times_ms.tolist(), strict=True))
        known = set(wanted)
        for file, mask in found:
            for at in np.flatnonzero(mask).tolist():
                entry = (int(file.positions[at]), int(file.hashes[at]))
                if entry not in known:
                    self._findings.add(
                        self._severity(file.path), "index",
                        f"{self._layout.name_of(file.path)} entry {at + 1}",
                        f"no message with a key of hash {entry[1]} is at {entry[0]}",
                    )  # fmt: skip
                    continue
                time_ms = np.array([times[entry[0]]])
                self._check_ends(file, np.array([at]), time_ms)
                if file.times[at] != file.expected_times(time_ms)[0]:
                    self._wrong_time(file, at + 1)
                self._repeated += not wanted[entry]
                wanted[entry] = max(wanted[entry] - 1, 0)
                self._indexed_end = max(self._indexed_end, entry[0])
        missing = [position for (position, _), n in wanted.items() for _ in range(n)]
        self._note_missing(np.array(missing, np.int64))

    def damage(self, hole: Hole) -> None:
        """Entries that lead into damaged bytes are told as one."""
        if self._has_index and not hole.is_missing:
            count = sum(int(mask.sum()) for _, mask in self._take(hole.start, hole.end))
            if count:
                self._findings.add(
                    NOTE, "index", f"commitlog {hole.start}",
                    f"{count} entries of the index lead into damaged bytes",
                )  # fmt: skip

    def _take(self, start: int, end: int) -> list[tuple[IndexFile, Mask]]:
        """The files with entries for [start, end), and which entries those are."""
        while self._paths and (not self._loaded or self._loaded[-1].nearly_last < end):
            self._load(self._paths.pop(0))
        self._loaded = [
            file for file in self._loaded if file.last >= start or file is self._loaded[-1]
        ]
        found = []
        for file in self._loaded:
            mask = (file.positions >= start) & (file.positions < end)
            if mask.any():
                found.append((file, mask))
        return found

    def _load(self, path: str) -> None:
        mark, limit = self._mark, None
        if self._interrupted and mark is not None and _number(path) == mark.index_file:
            limit = mark.index_count
        try:
            file = load_index(self._layout.files, path, limit)
        except OSError as error:
            self._findings.add(ERROR, "unreadable", self._layout.name_of(path), str(error))
            return
        if file is None:
            self._findings.add(
                self._severity(path), "index", self._layout.name_of(path),
                "its size or header is no index file's",
            )  # fmt: skip
            return
        self.entries += len(file.positions)
        file.follow(self._loaded[-1] if self._loaded else None)
        self._loaded.append(file)
        for text in file.problems():
            self._findings.add(self._severity(path), "index", self._layout.name_of(path), text)

    def _check_ends(self, file: IndexFile, numbers: Positions, times: Positions) -> None:
        """The header's times are those of the first and the last message."""
        header = file.header
        if file.is_cut:
            return
        ends = (
            (0, "begin", header.begin_time_ms),
            (len(file.hashes) - 1, "end", header.end_time_ms),
        )
        for number, name, time_ms in ends:
            for found in times[numbers == number].tolist():
                if found != time_ms:
                    self._findings.add(
                        self._severity(file.path), "index", self._layout.name_of(file.path),
                        f"its {name} time is {time_ms}, its message there was stored at {found}",
                    )  # fmt: skip

    def _wrong_time(self, file: IndexFile, number: int) -> None:
        self._findings.add(
            self._severity(file.path), "index",
            f"{self._layout.name_of(file.path)} entry {number}",
            f"its time, {file.times[number - 1]} s after the file's first, is not that of its"
            f" message at {file.positions[number - 1]}",
        )  # fmt: skip

    def _note_missing(self, positions: Positions) -> None:
        if not len(positions):
            return
        self._missing += len(positions)
        # What has no entry from here on gets one when a broker starts.
        late_from = self._indexed_end if self._interrupted else 1 << 62
        if self._mark is not None:
            late_from = self._mark.index_offset
        self._missing_late += int((positions >= late_from).sum())
        if self._missing_first < 0:
            self._missing_first = int(positions[0])
        self._missing_last = int(positions[-1])

    # --- at the end

    def finish(self, log_end: int) -> None:
        while self._paths:
            self._load(self._paths.pop(0))
            self._check_places(self._loaded[-1:], log_end)
        self._check_places(self._loaded, log_end)
        if not self._missing:
            return
        if not self._has_index:
            self._findings.add(
                NOTE, "no-index", "index",
                f"there is no index: none of the {self._missing} keys can be looked up",
            )  # fmt: skip
            return
        # Where RocketMQ has entered records once more, a mark of ours counts fewer of them: a
        # broker goes on at the last one.
        is_behind = self._interrupted and self._missing_first >= self._indexed_end
        late = is_behind or self._missing_late == self._missing
        self._findings.add(
            NOTE if late else WARNING, "not-indexed", f"commitlog {self._missing_first}",
            f"{self._missing} keys of records from {self._missing_first} to {self._missing_last}"
            " are in no index file: they cannot be looked up"
            + ("; a broker adds them when it starts" if late else ""),
        )  # fmt: skip

    def _check_places(self, files: list[IndexFile], log_end: int) -> None:
        for file in files:
            for at in np.flatnonzero((file.positions >= log_end) | (file.positions < 0)).tolist():
                self._findings.add(
                    WARNING if self._interrupted else ERROR,
                    "index", f"{self._layout.name_of(file.path)} entry {at + 1}",
                    f"it says {file.positions[at]}, the log ends at {log_end}",
                )  # fmt: skip


def _number(path: str) -> int:
    return int(path.rpartition("/")[2])


class Entries(NamedTuple):
    """What the index must hold, a row an entry: where the record lies, the key's hash, its time."""

    positions: Positions
    hashes: Positions
    times_ms: Positions


def expected_entries(run: Run) -> Entries:
    """Of these records, in the order of the index."""
    records = run.records
    found = key_columns_at(records.raw.data, records.starts)
    positions = records.starts[found.records] + records.base
    return Entries(positions, found.hashes.astype(np.int64), found.times_ms)
