"""A backup of a store that a broker may run on, brought forward at each run, and the way back.

    BACKUP/backup.json          what the files below are worth: written last, at once
    BACKUP/commitlog/…          the log, up to the newest moment; older files stay when retention
                                removes them from the store
    BACKUP/state/END/config/…   tables, journals and marks, as they were when the log ended at END

A run reads the state first, twice, until it is the same both times, and then looks for the end of
the log. So the state is what a broker that is killed at that moment leaves (of what it had not
written down yet it says less, never more), and a restore is a start after `kill -9`, which every
table survives. Of a replica only what is confirmed is taken: another master may cut the rest.

Every record is checked, CRC included, when it is taken. Files of the log that are full are shared
with the store where the file system can (a clone, else a hard link: nobody writes to them any
more), the last one is copied and goes on at the next run. Consume queues, index and columns are
derived: a restore builds them anew. What they alone know is kept: where queues are, all of whose
messages have expired.

A restore that is interrupted leaves a mark that keeps brokers of ours out, and is begun anew by
running it again. It may stop at any place of the log. Its state is the newest one from before, so
consumers go on where they were at that moment, or a little earlier. The timer wheel and the timer
log hold what waited at that place of the log, whatever the state says (`timers.build`).
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final, NamedTuple

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.files import SYSTEM_FILES, Files, clone, link, load_text, overwrite_text
from sluicemq.files.identity import read_identity
from sluicemq.store.directory import RESTORING_FILE, detect_file_sizes, read_checkpoint, write_abort
from sluicemq.store.dispatch import sweep_records
from sluicemq.store.index.file import Geometry, fit_geometry, is_index_name
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import expired_units
from sluicemq.store.segments import NAME_DIGITS, Segment, is_segment_name
from sluicemq.store.store import Store
from sluicemq.store.timers.build import build_timer_files

logger = logging.getLogger(__name__)

MANIFEST: Final = "backup.json"
VERSION: Final = 1
LOOKS_MAX: Final = 20
MOMENTS_MAX: Final = 1000
"""Older ones go, with their state; the log stays."""
COMPARED_BYTES: Final = 1 << 20
"""So much at the backup's end has to be what the store has there."""
OWN_STATE: Final = ("sluiceReplicas.json", "sluiceSnapshot")
"""What says which replica of a broker a directory is: a restored one is a new one."""
_CHUNK_BYTES: Final = 1 << 20
Progress = Callable[[int, int], None]
Share = Callable[[str, str], bool]
"""Makes the second path hold what the first does without copying; False where that cannot be."""


class Moment(NamedTuple):
    """The log ended at `end` when a backup was made, at `time_ms` (since 1970)."""

    end: int
    time_ms: int


class Manifest(NamedTuple):
    """`index_file_bytes` is 0 without an index. `units`: (topic, queue id, offset, unit) of the
    last message of queues without any. `timer_log_file_bytes` and `timer_precision_ms` are 0 where
    they are not known.
    """

    log_file_bytes: int
    queue_file_bytes: int
    index_file_bytes: int
    moments: list[Moment]
    units: list[tuple[str, int, int, bytes]]
    timer_log_file_bytes: int = 0
    timer_precision_ms: int = 0

    def to_text(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "logFileBytes": self.log_file_bytes,
                "queueFileBytes": self.queue_file_bytes,
                "indexFileBytes": self.index_file_bytes,
                "moments": [{"end": end, "timeMs": time_ms} for end, time_ms in self.moments],
                "timerLogFileBytes": self.timer_log_file_bytes,
                "timerPrecisionMs": self.timer_precision_ms,
                "units": [[*place, unit.hex()] for *place, unit in self.units],
            },
            indent=1,
        )

    @classmethod
    def of_text(cls, text: str) -> "Manifest":
        found = json.loads(text)
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}, not {VERSION}")
        moments = [Moment(one["end"], one["timeMs"]) for one in found["moments"]]
        units = [(*place, bytes.fromhex(unit)) for *place, unit in found["units"]]
        log, queue, index = (found[f"{part}FileBytes"] for part in ("log", "queue", "index"))
        timer_log = found.get("timerLogFileBytes", 0)
        return cls(log, queue, index, moments, units, timer_log, found.get("timerPrecisionMs", 0))

    def config(self, root: str, delay_levels: str) -> StoreConfig:
        """Of a store in `root` with the same sizes."""
        config = StoreConfig(
            root=root, commit_log_file_bytes=self.log_file_bytes,
            consume_queue_file_bytes=self.queue_file_bytes,
        )  # fmt: skip
        config = replace(config, delay_levels=delay_levels) if delay_levels else config
        if self.timer_log_file_bytes:
            config = replace(config, timer_log_file_bytes=self.timer_log_file_bytes)
        if self.timer_precision_ms:
            config = replace(config, timer_precision_ms=self.timer_precision_ms)
        if not self.index_file_bytes:
            return replace(config, index_enable=False)
        sizes = fit_geometry(f"{root}/index", self.index_file_bytes, Geometry(0, 0))
        return replace(config, index_slots=sizes.slot_count, index_entries=sizes.entry_count)


class BackedUp(NamedTuple):
    """The backup holds the log from `start` to `end`, of which this run took `new_bytes`: it copied
    `copied_bytes` and shared the rest with the store.
    """

    start: int
    end: int
    new_bytes: int
    copied_bytes: int
    moments: int

    @property
    def shared_bytes(self) -> int:
        return self.new_bytes - self.copied_bytes


class Restored(NamedTuple):
    """The store holds the log from `start` to `end`; its tables are those of `moment`."""

    start: int
    end: int
    moment: Moment
    messages: int
    timed_messages: int = 0
    """Of those that wait for their time."""


# ---------------------------------------------------------------------------------- making one


def back_up(
    root: str,
    target: str,
    *,
    commit_log_path: str = "",
    consume_queue_path: str = "",
    files: Files = SYSTEM_FILES,
    clock: Clock = SYSTEM_CLOCK,
    shares: Sequence[Share] = (clone, link),
    progress: Progress = lambda done, total: None,
) -> BackedUp:
    """Make a backup of the store in `root` in the directory `target`, or bring it forward.

    Takes no lock and writes nothing into the store. Raises StoreError when `target` is the backup
    of another store, StoreDamagedError when the store is damaged; OSError.
    """
    config = StoreConfig(
        root=root, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path
    )
    config = detect_file_sizes(config, files, "--commit-log")
    manifest = _read_manifest(files, target) if files.exists(target) else None
    if manifest is None and files.names(target):
        raise StoreError(f"{target} is not empty, and no backup.", fix="Name another directory.")
    state = _read_state(files, f"{root}/config")
    log = CommitLog(files, config.commit_log_path, config.commit_log_file_bytes)
    log.segments.load(removes=False)
    begin = log.start
    if manifest is not None:
        begin = manifest.moments[-1].end
        _check_same(log, f"{target}/commitlog", begin, manifest)
    end = _sound_end(log, begin, config, progress)
    copied = 0
    for segment in log.segments:
        if segment.end > begin and segment.base < end:
            copied += _take(files, segment, f"{target}/commitlog", begin, end, shares)
    files.make_directory(f"{target}/commitlog")
    place = f"{target}/state/{end:0{NAME_DIGITS}d}"
    remove_tree(files, place)
    _write_state(files, place, state)
    moments = [] if manifest is None else [one for one in manifest.moments if one.end < end]
    moments.append(Moment(end, clock.now_ms()))
    queue_file_bytes = config.consume_queue_file_bytes
    units = expired_units(files, config.consume_queue_path, queue_file_bytes, log.start)
    index_file_bytes = 0
    for name in filter(is_index_name, files.names(f"{root}/index")):
        with closing(files.open(f"{root}/index/{name}")) as file:
            index_file_bytes = index_file_bytes or file.size()
    kept = Manifest(
        config.commit_log_file_bytes, queue_file_bytes, index_file_bytes,
        moments[-MOMENTS_MAX:], units, *_timer_settings(files, root),
    )  # fmt: skip
    overwrite_text(files, f"{target}/{MANIFEST}", kept.to_text())
    for name in files.names(f"{target}/state"):
        if int(name) not in [one.end for one in kept.moments]:
            remove_tree(files, f"{target}/state/{name}")
    log.close()
    start = int(files.names(f"{target}/commitlog")[0]) if end > log.start else end
    return BackedUp(start, end, end - begin, copied, len(kept.moments))


def _timer_settings(files: Files, root: str) -> tuple[int, int]:
    """Return mappedFileSizeTimerLog and timerPrecisionMs as far as the store shows them, else 0."""
    file_bytes = 0
    for name in filter(is_segment_name, files.names(f"{root}/timerlog")):
        with closing(files.open(f"{root}/timerlog/{name}")) as file:
            file_bytes = file_bytes or file.size()
    identity = read_identity(files, f"{root}/timerwheel")
    precision_ms = identity.details.get("precisionMs", 0) if identity is not None else 0
    return file_bytes, int(precision_ms)


def _read_manifest(files: Files, target: str) -> Manifest | None:
    return load_text(files, f"{target}/{MANIFEST}", Manifest.of_text)


def _read_state(files: Files, directory: str) -> dict[str, bytes]:
    """Name -> content of the small files, all of one moment."""
    before: dict[str, bytes] | None = None
    for _ in range(LOOKS_MAX):
        try:
            found = {}
            for path in walk(files, directory):
                with closing(files.open(path)) as file:
                    found[path[len(directory) + 1 :]] = file.pread(file.size(), 0)
        except FileNotFoundError:  # replaced meanwhile
            before = None
            continue
        if found == before:
            return {name: data for name, data in found.items() if not name.startswith(OWN_STATE)}
        before = found
    raise StoreError(
        f"The files in {directory} changed each of the {LOOKS_MAX} times they were read.",
        fix="Try it again when fewer topics and groups are being changed.",
    )


def walk(files: Files, path: str) -> Iterator[str]:
    """Paths of the files below a directory, which may be missing."""
    for name in files.names(path):
        below = f"{path}/{name}"
        try:
            files.open(below).close()
        except IsADirectoryError:
            yield from walk(files, below)
        else:
            yield below


def _check_same(log: CommitLog, directory: str, end: int, manifest: Manifest) -> None:
    """Does the store have, where the backup ends, what the backup has?"""
    backup = CommitLog(log.segments.files, directory, manifest.log_file_bytes)
    backup.segments.load(removes=False)
    place = max(end - COMPARED_BYTES, log.start, backup.start)
    fact = ""
    if manifest.log_file_bytes != log.segments.file_bytes or end > log.segments.end:
        fact = f"the store in {log.segments.directory} is another one, or was cut"
    elif end < log.start:
        fact = f"the store in {log.segments.directory} begins at {log.start} by now"
    while not fact and place < end:
        mine, theirs = backup.segments.at(place), log.segments.at(place)
        assert mine is not None
        assert theirs is not None
        stop = min(mine.end, end)
        if mine.read(place, stop - place) != theirs.read(place, stop - place):
            fact = f"the store in {log.segments.directory} has other bytes from {place} on"
        place = stop
    backup.close()
    if fact:
        raise StoreError(
            f"{directory} holds a log that ends at {end}, and {fact}.",
            fix="Begin a new backup in an empty directory.",
        )


def _sound_end(log: CommitLog, begin: int, config: StoreConfig, progress: Progress) -> int:
    """Behind the last record that is whole and, on a replica, confirmed."""
    files, stop = log.segments.files, log.segments.end
    confirmed = load_text(
        files,
        f"{config.root}/config/{OWN_STATE[0]}",
        lambda text: int(json.loads(text)["confirmed"]),
    )
    if confirmed is not None:
        stop = min(stop, max(confirmed, begin))
    end = begin
    for found in sweep_records(log, begin, stop):
        end = found.end
        progress(end - begin, stop - begin)
    end = min(log.skip_blank(end), max(stop, end))
    mark = read_checkpoint(files, f"{config.root}/checkpoint").latest
    if mark is not None and end < min(mark.log_offset, stop):
        raise StoreDamagedError(
            f"The log in {log.segments.directory} holds no whole record at {end}, and the"
            f" checkpoint says that it is whole up to {mark.log_offset}.",
            fix=f"See `sluice store verify {config.root}`; `sluice store repair` saves the rest."
            " What was backed up before is as it was.",
        )
    return end


def _take(
    files: Files, segment: Segment, directory: str, begin: int, end: int, shares: Sequence[Share]
) -> int:
    """The bytes from `begin` to `end` of one file of a log; returns how many were copied."""
    files.make_directory(directory)
    path = f"{directory}/{segment.base:0{NAME_DIGITS}d}"
    is_new = begin <= segment.base
    if is_new and files.exists(path):  # of a run that was interrupted
        files.remove(path)
    if is_new and segment.end <= end and any(share(segment.path, path) for share in shares):
        files.sync_directory(directory)
        return 0
    position, stop = max(begin, segment.base), min(end, segment.end)
    with closing(files.open(path, create=True)) as file:
        file.truncate(segment.size)
        for at in range(position, stop, _CHUNK_BYTES):
            data = segment.read(at, min(_CHUNK_BYTES, stop - at))
            file.pwrite(data, at - segment.base)
        file.sync()
    files.sync_directory(directory)  # after each: no power loss leaves a gap
    segment.release()
    return stop - position


def _write_state(files: Files, directory: str, state: dict[str, bytes]) -> None:
    for name, data in {"": b"", **state}.items():
        path = f"{directory}/config/{name}".rstrip("/")
        files.make_directory(path.rpartition("/")[0] if name else path)
        if name:
            with closing(files.open(path, create=True)) as file:
                file.pwrite(data, 0)
                file.sync()
            files.sync_directory(path.rpartition("/")[0])


def remove_tree(files: Files, path: str) -> None:
    """A directory with what lies in it, if it is there."""
    for name in files.names(path):
        remove_tree(files, f"{path}/{name}")
    if files.exists(path):
        files.remove(path)


# ---------------------------------------------------------------------------------- and back


def restore(
    source: str,
    root: str,
    *,
    at: int | None = None,
    delay_levels: str = "",
    files: Files = SYSTEM_FILES,
    clock: Clock = SYSTEM_CLOCK,
    shares: Sequence[Share] = (clone,),
    progress: Progress = lambda done, total: None,
) -> Restored:
    """Make a store in `root`, which must be empty, of the backup in `source`: whole, or up to the
    last record that ends `at` a place of the log or before.

    Any broker, Java's too, may open it. `delay_levels` is messageDelayLevel where it is not the
    default. Raises StoreError, OSError.
    """
    manifest = _read_manifest(files, source)
    if manifest is None:
        raise StoreError(f"{source} is no backup.", fix="Name what `sluice store backup` made.")
    if files.names(root) and not files.exists(f"{root}/{RESTORING_FILE}"):
        raise StoreError(f"{root} is not empty.", fix="Name a directory that is not there yet.")
    log = CommitLog(files, f"{source}/commitlog", manifest.log_file_bytes)
    log.segments.load(removes=False)
    last = manifest.moments[-1].end
    end = last if at is None else at
    if not log.start <= end <= last:
        raise StoreError(
            f"The backup in {source} holds the log from {log.start} to {last}, not {end}.",
            fix="Name a place between.",
        )
    before = [one for one in manifest.moments if one.end <= end]
    moment = before[-1] if before else manifest.moments[0]
    state = _read_state(files, f"{source}/state/{moment.end:0{NAME_DIGITS}d}/config")
    for name in set(files.names(root)) - {RESTORING_FILE}:
        remove_tree(files, f"{root}/{name}")
    files.make_directory(root)
    overwrite_text(files, f"{root}/{RESTORING_FILE}", source)
    _write_state(files, root, state)
    for segment in log.segments:
        if segment.base < end:
            _take(files, segment, f"{root}/commitlog", 0, end, shares)
            progress(segment.end - log.start, end - log.start)
    log.close()
    config = manifest.config(root, delay_levels)
    # Let a start make queues and index: it looks at all, and builds what is missing.
    write_abort(files, f"{root}/abort")
    store = Store(config, files, clock, files.lock(f"{root}/lock"))
    for topic, queue_id, offset, unit in manifest.units:
        store.begin_queue(topic, queue_id, offset, unit)
    while config.index_enable and not store.keys.catch_up():
        pass
    ranges = [store.queue_offsets(*key) for key in store.queues()]
    messages = sum(high - low for low, high in ranges)
    timers = build_timer_files(store, files, config, clock.now_ms())
    result = Restored(store.log_start, store.written_offset, moment, messages, timers.waiting)
    store.close()
    if not config.index_enable:  # whoever opens it makes one if he wants one, Java's too
        write_abort(files, f"{root}/abort")
    files.remove(f"{root}/{RESTORING_FILE}")
    files.sync_directory(root)
    return result
