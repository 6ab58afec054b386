"""`sluice store repair`: what is whole in a damaged store is kept, at its place, and read on.

    1. walk      the whole log, behind damage too: good records, and holes between (`LogWalk`)
    2. count     which messages were in the holes, from offsets that are missing and from the units
                 of the queues (`lost`)
    3. bridge    each hole is filled with records that brokers accept and readers pass over; files
                 that are missing or short are made whole
    4. requeue   the log is walked again, and the queues are made to say what it says (`Requeue`)
    5. mark      a new durable mark: nothing before it is bad

Without `write` the first two are done and nothing is changed. Every byte that is overwritten is
copied first (`edits`). Running it again after it was interrupted does the rest.

A replica whose log is mended is not what the others know any more. What says which replica it is,
and what it has, goes to the copies too (CLAIMS): so it is in nobody's in-sync set, and does not
follow a master as if it had its bytes.

Bytes behind the last good record are damage only as far as the durable mark says that they were
safely on disk; else they are the torn tail of a crash, which the next start cuts off by itself.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple

import orjson

from sluicemq.errors import StoreError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.store.directory import (
    Checkpoint,
    CheckpointContent,
    read_checkpoint,
    write_checkpoint,
)
from sluicemq.store.log import DELAYS_MS
from sluicemq.store.queues import ConsumeQueues
from sluicemq.store.tools.checks import known_topics
from sluicemq.store.tools.edits import Edits, Requeue
from sluicemq.store.tools.layout import (
    Blank,
    Hole,
    LogWalk,
    Run,
    StoreLayout,
    last_data,
    usual_size,
)
from sluicemq.store.tools.lost import Inventory, Lost, build_bridge


class LostRange(NamedTuple):
    """Messages of a queue that cannot be brought back: offsets `first` to `last`."""

    topic: str
    queue_id: int
    first: int
    last: int

    @property
    def messages(self) -> int:
        return self.last - self.first + 1


class DamagedRange(NamedTuple):
    """Bytes [start, end) of the log that hold no whole record."""

    file: str
    start: int
    end: int
    reason: str
    messages_lost: int


@dataclass(slots=True)
class RepairReport:
    """What was found, and what was done when `is_written`."""

    root: str
    records: int = 0
    log_end: int = 0
    damaged: list[DamagedRange] = field(default_factory=list)
    lost: list[LostRange] = field(default_factory=list)
    not_placed: list[LostRange] = field(default_factory=list)
    """Lost ones that found no room for a place holder: brokers that build queues anew will move
    the offsets behind them."""
    tail_bytes: int = 0
    """What lies behind the end and was never safe: the next start cuts it off."""
    bad_files: list[str] = field(default_factory=list)
    """Files that are missing or have another size."""
    mended: int = 0
    """Records that were whole but for their queue offset, which a queue's unit knows."""
    wrong_units: int = 0
    missing_queues: int = 0
    is_written: bool = False
    backup: str = ""
    bytes_changed: int = 0

    @property
    def is_sound(self) -> bool:
        found = (self.damaged, self.bad_files, self.mended, self.wrong_units, self.missing_queues)
        return not any(found)

    @property
    def messages_lost(self) -> int:
        return sum(lost.messages for lost in self.lost)

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        for name in ("damaged", "lost", "not_placed"):
            facts[name] = [item._asdict() for item in getattr(self, name)]
        return facts | {"is_sound": self.is_sound, "messages_lost": self.messages_lost}


Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""
QUEUE_FILE_BYTES: Final = 6_000_000
CLAIMS: Final = ("replica.json", "epochFileCheckpoint", "config/sluiceReplicas.json")
"""Which disk it is, who wrote what of the log, and what is known to be confirmed."""
OFFSET_AT: Final = 20
"""Where in a record its queue offset stands (spec/store.md §2.1)."""


@dataclass(slots=True)
class _Found:
    """The outcome of the first walk."""

    holes: list[Hole]
    tail: list[Hole]
    """Behind the end, and never safe."""
    lost: list[list[Lost]]
    end: int
    times: list[int]
    """The store time of the last good record before each hole."""
    last_time_ms: int
    fixes: dict[int, int] = field(default_factory=dict)
    """Records (by position) that get another queue offset."""
    doubtful: set[int] = field(default_factory=set)


def repair(
    root: str,
    *,
    write: bool = False,
    stamp: str = "",
    commit_log_path: str = "",
    consume_queue_path: str = "",
    log_file_bytes: int | None = None,
    queue_file_bytes: int | None = None,
    delay_levels_ms: Sequence[int] = DELAYS_MS,
    files: Files = SYSTEM_FILES,
    progress: Progress | None = None,
) -> RepairReport:
    """Look for damage in the store below `root`; mend it when `write` is set.

    `stamp` names the backup (`repair-<stamp>`). The sizes of the files are taken from the files
    where they are not given. `delay_levels_ms` (messageDelayLevel) counts for units of delayed
    messages that are missing: the others keep their times. Raises StoreError when there is no
    store, StoreLockedError when a broker runs on it (only with `write`).
    """
    with ExitStack() as stack:
        if write:
            stack.callback(files.lock(f"{root.rstrip('/')}/lock"))

        def find() -> StoreLayout:
            return StoreLayout.find(
                root, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path,
                files=files,
            )  # fmt: skip

        work = _Repair(
            find, log_file_bytes, queue_file_bytes, delay_levels_ms, progress or (lambda *_: None)
        )
        stack.callback(work.close)
        work.look()
        if write and not work.report.is_sound:
            work.mend(f"{work.layout.root}/repair-{stamp or 'backup'}")
        return work.report


class _Repair:
    """One repair: `look`, then `mend`."""

    def __init__(
        self,
        find: Callable[[], StoreLayout],
        log_file_bytes: int | None,
        queue_file_bytes: int | None,
        delays_ms: Sequence[int],
        progress: Progress,
    ) -> None:
        self._delays_ms = delays_ms
        self._find = find
        self._progress = progress
        self.layout = layout = find()
        if len(layout.log_paths) > 1:
            raise StoreError(
                f"The log lies in {len(layout.log_paths)} directories.",
                fix="Copy its files into one directory, and repair that.",
            )
        self._files = layout.files
        self._log_bytes = log_file_bytes or layout.log.file_bytes
        self._queue_bytes = (
            queue_file_bytes or usual_size(layout.queues.values()) or QUEUE_FILE_BYTES
        )
        self._checkpoint = _checkpoint(layout)
        self._log = layout.log
        for item in layout.log.items:
            if item.base % self._log_bytes or item.size > self._log_bytes:
                raise StoreError(
                    f"{item.path} has {item.size} bytes, files of this log should have"
                    f" {self._log_bytes}.",
                    fix="Say the size with --log-file-bytes (mappedFileSizeCommitLog), or move"
                    " the file away if it does not belong here.",
                )
        self._found = _Found([], [], [], 0, [], 0)
        self.report = RepairReport(layout.root)

    def close(self) -> None:
        self.layout.close()

    # --- looking

    def look(self) -> None:
        report, layout = self.report, self.layout
        self._note_files()
        inventory = Inventory(self._log.start, layout.queues)
        mark = self._checkpoint.latest
        safe_end = (mark.log_offset if mark is not None else 0) if layout.was_interrupted else None
        requeue = Requeue(
            layout.queues, layout.queue_path, self._queue_bytes, known_topics(layout), None,
            safe_end,
        )  # fmt: skip
        holes: list[Hole] = []
        times: list[int] = []
        time_ms = 0
        walk = self._walk()
        for found in self._steps(walk):
            if isinstance(found, Hole):
                if holes and holes[-1].end == found.start and found.start % self._log_bytes:
                    holes[-1] = holes[-1]._replace(end=found.end)
                    continue
                holes.append(found)
                times.append(time_ms)
            else:
                inventory.add(found)
                requeue.add(found)
                time_ms = found.store_time_ms
        requeue.finish(walk.end)
        inventory.finish(layout.queues)
        for hole in inventory.contradicted:
            at = bisect_left(holes, hole)
            holes.insert(at, hole)
            times.insert(at, times[at - 1] if at else time_ms)
        self._sort_out(walk.end, holes, times, time_ms, inventory)
        report.log_end = walk.end
        report.wrong_units = requeue.wrong_units
        report.missing_queues = len(requeue.missing_queues)

    def _walk(self) -> LogWalk:
        """As far as the files, or the mark, say that the log goes."""
        size, mark = self._log_bytes, self._checkpoint.latest
        stop = max(self._log.items[-1].base + 1, mark.log_offset if mark is not None else 0)
        extents = [(base, base + size) for base in range(self._log.start, stop, size)]
        return LogWalk(self._log, extents, self._delays_ms, is_forgiving=True)

    def _steps(self, walk: LogWalk) -> Iterator[Run | Hole]:
        told = begin = walk.position
        # About where the log ends: the last file counts as far as the mark says.
        mark = self._checkpoint.latest
        end = max(self._log.items[-1].base, mark.log_offset if mark is not None else 0)
        total = max(end - begin, 1)
        for found in walk:
            if not isinstance(found, Blank):
                yield found
            if walk.position - told > 1 << 22:
                told = walk.position
                self._progress(min(told - begin, total), total)
        self._progress(total, total)

    def _note_files(self) -> None:
        report = self.report
        items = self._log.items
        mark = self._checkpoint.latest
        if mark is not None and 0 <= mark.log_start < items[0].base:
            report.bad_files.append(
                f"{self._log_path(mark.log_start)} is missing, and what follows up to"
                f" {items[0].base:020d}"
            )
        expected = items[0].base
        for item in items:
            while expected < item.base:
                report.bad_files.append(f"{self._log_path(expected)} is missing")
                expected += self._log_bytes
            if item.size != self._log_bytes:
                report.bad_files.append(f"{item.path} has {item.size} of {self._log_bytes} bytes")
            expected += self._log_bytes
        for series in self.layout.queues.values():
            for item in series.items:
                if item.size != self._queue_bytes:
                    report.bad_files.append(
                        f"{item.path} has {item.size} of {self._queue_bytes} bytes"
                    )

    def _sort_out(
        self, end: int, holes: list[Hole], times: list[int], last_time_ms: int, inventory: Inventory
    ) -> None:
        """Tell damage from a torn tail, and find out what was lost."""
        mark = self._checkpoint.latest
        safe_end = mark.log_offset if mark is not None else 0
        real = [n for n, hole in enumerate(holes) if hole.start < max(end, safe_end)]
        tail = holes[len(real) :]
        used = last_data(self._log, tail[0].start) if tail else None
        self.report.tail_bytes = max((used or 0) - max(end, safe_end), 0)
        holes, times = [holes[n] for n in real], [times[n] for n in real]
        lost = inventory.lost(holes, self.layout.queues)
        whole = {hole.start: key for hole, key in inventory.contradicted.items()}
        fixes = {
            item.position: item.offset for item in lost if whole.get(item.position) == item.key
        }
        lost = [item for item in lost if item.position not in fixes]
        kept = [n for n, hole in enumerate(holes) if hole.start not in fixes]
        holes, times = [holes[n] for n in kept], [times[n] for n in kept]
        self.report.mended = len(fixes)
        self.report.records = inventory.records - len(inventory.contradicted) + len(fixes)
        if holes and holes[-1].start >= end:  # at the end: only what the mark vouches for
            lost = [item for item in lost if item.position < max(end, safe_end)]
        by_hole = [
            [item for item in lost if hole.start <= item.position < hole.end] for hole in holes
        ]
        at_end = [number for number, hole in enumerate(holes) if hole.start >= end]
        for number in at_end[1:]:  # the log goes on in the first of them alone
            by_hole[at_end[0]] += by_hole[number]
            by_hole[number] = []
        self._found = _Found(
            holes, tail, by_hole, end, times, last_time_ms, fixes, inventory.doubtful
        )
        self.report.damaged = [
            DamagedRange(
                self._log_path(hole.start - hole.start % self._log_bytes), hole.start,
                min(hole.end, max(end, safe_end)), hole.reason, len(items),
            )
            for hole, items in zip(holes, by_hole, strict=True)
        ]  # fmt: skip
        self.report.lost = _ranges(lost)

    def _log_path(self, base: int) -> str:
        return f"{self.layout.log_paths[0]}/{base:020d}"

    # --- mending

    def mend(self, backup: str) -> None:
        self._progress(0, 1)
        if self.report.damaged or self.report.mended or self.report.bad_files:
            self._take_claims(backup)
        edits = Edits(self._files, self.layout.root, backup)
        left_out, end, time_ms = self._bridge(edits)
        self._log.close()
        self.layout.close()
        self.layout = self._find()
        self._log = self.layout.log
        self._requeue(edits, end)
        edits.close()
        # From now on everything before the end counts as safe, as it is.
        queues = ConsumeQueues(self._files, self.layout.queue_path, self._queue_bytes)
        queues.load(after_crash=False, removes=False)
        old = self._checkpoint.latest or Checkpoint(0, 0, 0, 0, 0)
        count, units = queues.digest()
        queues.close()
        mark = old._replace(
            sequence=old.sequence + 1, log_offset=end, queues=count, units=units,
            store_time_ms=time_ms, log_start=self._log.start,
        )  # fmt: skip
        if mark.index_offset > end:
            mark = Checkpoint(*mark[:5], log_start=mark.log_start)
        write_checkpoint(
            self._files, self.layout.checkpoint_path, mark,
            index_time_ms=self._checkpoint.index_time_ms,
        )  # fmt: skip
        report = self.report
        report.not_placed = _ranges(left_out)
        report.log_end = end
        report.is_written = True
        report.backup = backup
        report.bytes_changed = edits.changed_bytes
        self._files.make_directory(backup)
        with closing(self._files.open(f"{backup}/report.json", create=True)) as file:
            data = orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2)
            file.truncate(len(data))
            file.pwrite(data, 0)
            file.sync()
        self._files.sync_directory(backup)

    def _take_claims(self, backup: str) -> None:
        """Durably, before a byte of the log is another."""
        files, root = self._files, self.layout.root
        for name in CLAIMS:
            if files.exists(path := f"{root}/{name}"):
                files.make_directory(backup)
                files.rename(path, f"{backup}/{name.rpartition('/')[2]}")
                files.sync_directory(backup)
                files.sync_directory(path.rpartition("/")[0])

    def _bridge(self, edits: Edits) -> tuple[list[Lost], int, int]:
        """Close the holes; returns the lost ones without a place, the log's end, its last time."""
        found = self._found
        end, time_ms = found.end, found.last_time_ms
        left_out: list[Lost] = []
        sizes = {item.base: item.size for item in self._log.items}
        last = max([*sizes, *(hole.start for hole in found.holes)])
        for base in range(self._log.start, last + 1, self._log_bytes):
            if sizes.get(base) != self._log_bytes:
                edits.make_file(self._log_path(base), self._log_bytes)
        for hole, lost, before_ms in zip(found.holes, found.lost, found.times, strict=True):
            is_last = hole.start >= found.end
            file_base = hole.start - hole.start % self._log_bytes
            bridge = build_bridge(
                hole, file_base + self._log_bytes, lost, before_ms or time_ms or 1, is_last=is_last
            )
            left_out += bridge.left_out
            path, at = self._log_path(file_base), hole.start
            for position, data in bridge.pieces:  # and zeros between them
                edits.zero(path, at - file_base, position - file_base)
                edits.write(path, position - file_base, data)
                at = position + len(data)
            edits.zero(path, at - file_base, hole.end - file_base)
            end = max(end, bridge.end if bridge.placed or not is_last else end)
        for position, offset in found.fixes.items():
            base = position - position % self._log_bytes
            edits.write(self._log_path(base), position - base + OFFSET_AT, offset.to_bytes(8))
        for hole in found.tail:
            base = hole.start - hole.start % self._log_bytes
            edits.zero(self._log_path(base), hole.start - base, hole.end - base)
        edits.flush()
        return left_out, end, time_ms

    def _requeue(self, edits: Edits, end: int) -> None:
        layout = self.layout
        for series in layout.queues.values():
            for item in series.items:
                if item.size != self._queue_bytes:
                    edits.make_file(item.path, self._queue_bytes)
        layout.close()
        self.layout = layout = self._find()
        self._log = layout.log
        requeue = Requeue(
            layout.queues, layout.queue_path, self._queue_bytes, known_topics(layout), edits
        )  # fmt: skip
        requeue.skip = self._found.doubtful
        walk = self._walk()
        for found in self._steps(walk):
            if isinstance(found, Hole):
                if found.start < end:
                    raise StoreError(
                        f"The log is still damaged at {found.start} after its repair:"
                        f" {found.reason}.",
                        fix="The disk may be failing: copy the store to another one and repair"
                        " it there.",
                    )
                continue
            requeue.add(found)
        requeue.finish(end)


def _checkpoint(layout: StoreLayout) -> CheckpointContent:
    try:
        return read_checkpoint(layout.files, layout.checkpoint_path)
    except OSError:
        return CheckpointContent(0, None)


def _ranges(lost: list[Lost]) -> list[LostRange]:
    """The lost messages as runs of offsets, by topic and queue."""
    runs = []
    by_queue = sorted((item.key, item.offset) for item in lost)
    for _, run in groupby(enumerate(by_queue), lambda pair: (pair[1][0], pair[1][1] - pair[0])):
        items = [item for _, item in run]
        (topic, queue_id), first = items[0]
        runs.append(LostRange(topic, queue_id, first, items[-1][1]))
    return runs
