"""Back up a store, even while a broker runs on it, and restore a store from a backup.

    BACKUP/backup.json          the manifest: file sizes and moments. Written last, atomically
    BACKUP/commitlog/…          the commit log up to the newest moment. Files that retention has
                                removed from the store stay in the backup
    BACKUP/state/END/config/…   the documents of the broker, as they were when the log ended at END

Each run extends the backup up to a new *moment*: the position at which the log ends.

A run first reads the documents repeatedly, until two reads give the same, and then looks for the
end of the log. So the documents are those that a broker leaves if it is killed at that moment. What
the broker had not yet written is missing, but nothing is newer than the log. A restore is therefore
like a start after `kill -9`, which every document survives. Of a replica, only the confirmed part
of the log is backed up, because another master may remove the rest.

Every record is checked, including its CRC, before it is backed up. Complete files of the log, which
are never written again, share their blocks with the store if the file system supports that (a
clone, or a hard link). The last file is copied, and extended by the next run. Consume queues, key
index and columns are derived from the log, and a restore builds them. The manifest contains what
only the consume queues know: the offsets of queues whose messages have all expired.

A file marks a store that is being restored, so that no SluiceMQ broker opens it. If a restore is
interrupted, running it again starts from the beginning. A restore may end at any position of the
log. It uses the documents of the newest moment before that position, so consumers continue where
they were then, or a little earlier. Timer wheel and timer log contain the messages that wait at
that position of the log, whatever the documents say (`timers.build`).
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
from sluicemq.files import SYSTEM_FILES, File, Files, clone, link, load_text, overwrite_text
from sluicemq.files.identity import read_identity
from sluicemq.store.directory import RESTORING_FILE, detect_file_sizes, read_checkpoint, write_abort
from sluicemq.store.dispatch import sweep_records
from sluicemq.store.index.file import Geometry, fit_geometry, is_index_name
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import expired_units
from sluicemq.store.segments import NAME_DIGITS, Segment, is_segment_name
from sluicemq.store.store import Store
from sluicemq.store.timers.build import build_timer_files
from sluicemq.store.tools.layout import MANIFEST

logger = logging.getLogger(__name__)

VERSION: Final = 1
"""The version of the manifest's format."""
STATE_READS_MAX: Final = 20
MOMENTS_MAX: Final = 1000
"""The oldest moments beyond this number are removed with their documents. Their log stays."""
COMPARED_BYTES: Final = 1 << 20
"""This many bytes at the end of the backup are compared with the store, to recognize it."""
REPLICA_STATE_FILES: Final = ("sluiceReplicas.json", "sluiceSnapshot")
"""Names in config/ that say which replica a store is. A restored store is a new replica."""
_CHUNK_BYTES: Final = 1 << 20
Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and approximately the bytes in total."""
ShareFile = Callable[[str, str], bool]
"""Called with an existing and a new path. Makes the new file share the blocks of the existing one,
and returns whether the file system supports that."""


class Moment(NamedTuple):
    """A position of the log to which a backup was made: its `end`, at `time_ms` since 1970."""

    end: int
    time_ms: int


class Manifest(NamedTuple):
    """The content of backup.json.

    `index_file_bytes` is 0 if the store has no key index. `units` contains (topic, queue id,
    offset, unit) of the last message of each queue whose messages have all expired.
    `timer_log_file_bytes` and `timer_precision_ms` are 0 if they are not known.
    """

    log_file_bytes: int
    queue_file_bytes: int
    index_file_bytes: int
    moments: list[Moment]
    units: list[tuple[str, int, int, bytes]]
    timer_log_file_bytes: int = 0
    timer_precision_ms: int = 0

    def to_text(self) -> str:
        """Return the manifest as the JSON text of its file. Units are written in hexadecimal."""
        return json.dumps(
            {
                "version": VERSION,
                "logFileBytes": self.log_file_bytes,
                "queueFileBytes": self.queue_file_bytes,
                "indexFileBytes": self.index_file_bytes,
                "moments": [{"end": end, "timeMs": time_ms} for end, time_ms in self.moments],
                "timerLogFileBytes": self.timer_log_file_bytes,
                "timerPrecisionMs": self.timer_precision_ms,
                "units": [
                    [topic, queue_id, offset, unit.hex()]
                    for topic, queue_id, offset, unit in self.units
                ],
            },
            indent=1,
        )

    @classmethod
    def from_text(cls, text: str) -> "Manifest":
        """Parse the JSON text of a manifest file.

        Raises ValueError if its version is another one, and ValueError, KeyError or TypeError if
        the text has another form.
        """
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise ValueError(f"version {fields['version']}, not {VERSION}")
        moments = [Moment(moment["end"], moment["timeMs"]) for moment in fields["moments"]]
        units = [
            (topic, queue_id, offset, bytes.fromhex(unit_hex))
            for topic, queue_id, offset, unit_hex in fields["units"]
        ]
        return cls(
            log_file_bytes=fields["logFileBytes"],
            queue_file_bytes=fields["queueFileBytes"],
            index_file_bytes=fields["indexFileBytes"],
            moments=moments,
            units=units,
            timer_log_file_bytes=fields.get("timerLogFileBytes", 0),
            timer_precision_ms=fields.get("timerPrecisionMs", 0),
        )

    def store_config(self, root: str, delay_levels: str) -> StoreConfig:
        """Return the configuration of a store in `root` with the file sizes of this backup.

        `delay_levels` is the setting messageDelayLevel; "" means the default. The index is disabled
        if the backed-up store had none.
        """
        config = StoreConfig(
            root=root,
            commit_log_file_bytes=self.log_file_bytes,
            consume_queue_file_bytes=self.queue_file_bytes,
        )
        if delay_levels:
            config = replace(config, delay_levels=delay_levels)
        if self.timer_log_file_bytes:
            config = replace(config, timer_log_file_bytes=self.timer_log_file_bytes)
        if self.timer_precision_ms:
            config = replace(config, timer_precision_ms=self.timer_precision_ms)
        if not self.index_file_bytes:
            return replace(config, index_enable=False)
        sizes = fit_geometry(f"{root}/index", self.index_file_bytes, Geometry(0, 0))
        return replace(config, index_slots=sizes.slot_count, index_entries=sizes.entry_count)


class BackupReport(NamedTuple):
    """The result of a backup. The names of the fields are keys of the JSON output.

    The backup contains the log from position `start` to `end`. This run has added `new_bytes` of
    it. It has copied `copied_bytes` of them, and shared the rest with the store. The backup has
    `moments` moments.
    """

    start: int
    end: int
    new_bytes: int
    copied_bytes: int
    moments: int

    @property
    def shared_bytes(self) -> int:
        """The number of new bytes that share their blocks with the store."""
        return self.new_bytes - self.copied_bytes


class RestoreReport(NamedTuple):
    """The result of a restore. The names of the fields are keys of the JSON output.

    The store contains the log from position `start` to `end`, and the documents of `moment`. Its
    queues have `messages` messages, and `timed_messages` timed messages wait for their delivery.
    """

    start: int
    end: int
    moment: Moment
    messages: int
    timed_messages: int = 0


# ------------------------------------------------------------------------------------ backup


def back_up(
    root: str,
    target: str,
    *,
    commit_log_path: str = "",
    consume_queue_path: str = "",
    files: Files = SYSTEM_FILES,
    clock: Clock = SYSTEM_CLOCK,
    shares: Sequence[ShareFile] = (clone, link),
    progress: Progress = lambda done, total: None,
) -> BackupReport:
    """Back up the store in the directory `root` to `target`, or extend the backup there.

    The function takes no lock and writes nothing into the store, so a broker may be running.
    `shares` are functions that make a copy of a file without copying bytes, such as a hard link.
    They are tried in order for each complete file of the log; if none succeeds, the file is copied.
    `progress` is called with (bytes done, bytes in total).

    Raises StoreError if `target` is not empty and not a backup, or a backup of another store,
    StoreDamagedError if the log is damaged, and OSError.
    """
    config = StoreConfig(
        root=root, commit_log_path=commit_log_path, consume_queue_path=consume_queue_path
    )
    config = detect_file_sizes(config, files, "--commit-log")
    manifest = _read_manifest_to_extend(files, target)

    # The documents are read before the end of the log is searched. So none is newer than the log.
    state = _read_state(files, f"{root}/config")
    log = _load_log(files, config.commit_log_path, config.commit_log_file_bytes)
    begin = log.start
    if manifest is not None:
        begin = manifest.moments[-1].end
        _check_same_store(log, f"{target}/commitlog", begin, manifest)
    end = _find_backup_end(log, begin, config, progress)

    # Copy the log and the documents.
    log_directory = f"{target}/commitlog"
    copied_bytes = 0
    for segment in log.segments:
        if segment.end > begin and segment.base < end:
            copied_bytes += _copy_segment(files, segment, log_directory, begin, end, shares)
    files.make_directory(log_directory)
    state_directory = _make_state_path(target, end)
    remove_tree(files, state_directory)
    _write_state(files, state_directory, state)

    # Write the manifest last, because it makes the new moment a part of the backup.
    moments = _add_moment(manifest, Moment(end, clock.now_ms()))
    new_manifest = _make_manifest(files, config, log.start, moments)
    overwrite_text(files, f"{target}/{MANIFEST}", new_manifest.to_text())
    _remove_old_states(files, f"{target}/state", moments)
    log.close()

    start = end
    if end > log.start:
        start = int(files.names(log_directory)[0])
    return BackupReport(
        start=start,
        end=end,
        new_bytes=end - begin,
        copied_bytes=copied_bytes,
        moments=len(moments),
    )


def _read_manifest_to_extend(files: Files, target: str) -> Manifest | None:
    """Return the manifest of the backup in the directory `target`.

    Return None if the directory is empty or does not exist: then a new backup begins. Raises
    StoreError if it contains something other than a backup.
    """
    manifest = _read_manifest(files, target) if files.exists(target) else None
    if manifest is None and files.names(target):
        raise StoreError(
            f"{target} is not empty, and is not a backup.", fix="Specify another directory."
        )
    return manifest


def _load_log(files: Files, directory: str, file_bytes: int) -> CommitLog:
    """Return the commit log in a directory. Its files are not changed."""
    log = CommitLog(files, directory, file_bytes)
    log.segments.load(removes=False)
    return log


def _make_state_path(backup: str, end: int) -> str:
    """Return the directory in a backup with the documents of the moment that ends at `end`."""
    return f"{backup}/state/{end:0{NAME_DIGITS}d}"


def _add_moment(manifest: Manifest | None, moment: Moment) -> list[Moment]:
    """Return the moments of a manifest and the new one, but at most the last MOMENTS_MAX.

    A moment is a state that can be restored: an end of the log, and its time. The new one replaces
    moments with the same or a later end. `manifest` is None for a new backup.
    """
    earlier_moments = manifest.moments if manifest is not None else []
    moments = [earlier for earlier in earlier_moments if earlier.end < moment.end]
    moments.append(moment)
    return moments[-MOMENTS_MAX:]


def _remove_old_states(files: Files, directory: str, moments: list[Moment]) -> None:
    """Remove the saved documents that belong to none of `moments`.

    `directory` has one subdirectory for each moment, whose name is the moment's end in the log.
    """
    moment_ends = {moment.end for moment in moments}
    for name in files.names(directory):
        if int(name) not in moment_ends:
            remove_tree(files, f"{directory}/{name}")


def _make_manifest(
    files: Files, config: StoreConfig, log_start: int, moments: list[Moment]
) -> Manifest:
    """Make the manifest of a backup of the store with this configuration.

    `log_start` is the first position of its log, and `moments` are the states that can be restored.
    """
    queue_file_bytes = config.consume_queue_file_bytes
    units = expired_units(files, config.consume_queue_path, queue_file_bytes, log_start)
    timer_log_file_bytes, timer_precision_ms = _read_timer_settings(files, config.root)
    return Manifest(
        log_file_bytes=config.commit_log_file_bytes,
        queue_file_bytes=queue_file_bytes,
        index_file_bytes=_read_index_file_bytes(files, f"{config.root}/index"),
        moments=moments,
        units=units,
        timer_log_file_bytes=timer_log_file_bytes,
        timer_precision_ms=timer_precision_ms,
    )


def _read_index_file_bytes(files: Files, directory: str) -> int:
    """Return the size in bytes of the first index file in a directory; skip empty ones.

    Return 0 if there is none.
    """
    for name in filter(is_index_name, files.names(directory)):
        with closing(files.open(f"{directory}/{name}")) as file:
            file_bytes = file.size()
        if file_bytes:
            return file_bytes
    return 0


def _read_timer_settings(files: Files, root: str) -> tuple[int, int]:
    """Return (mappedFileSizeTimerLog, timerPrecisionMs), derived from the timer files of the store.

    The first is the size of a timer log file, and the second is noted in the identity file. Each is
    0 if its file does not exist.
    """
    file_bytes = 0
    for name in filter(is_segment_name, files.names(f"{root}/timerlog")):
        with closing(files.open(f"{root}/timerlog/{name}")) as file:
            file_bytes = file_bytes or file.size()
    identity = read_identity(files, f"{root}/timerwheel")
    precision_ms = identity.details.get("precisionMs", 0) if identity is not None else 0
    return file_bytes, int(precision_ms)


def _read_manifest(files: Files, target: str) -> Manifest | None:
    """Return the manifest of the backup in `target`, or None if there is none."""
    return load_text(files, f"{target}/{MANIFEST}", Manifest.from_text)


def _read_state(files: Files, directory: str) -> dict[str, bytes]:
    """Return the contents of all files below `directory` by their relative names.

    REPLICA_STATE_FILES are left out. The broker may be changing files, so they are read until two
    successive reads give the same. Raises StoreError if that does not happen within STATE_READS_MAX
    reads.
    """
    last_contents: dict[str, bytes] | None = None
    for _ in range(STATE_READS_MAX):
        try:
            contents = {}
            for path in iter_files(files, directory):
                with closing(files.open(path)) as file:
                    contents[path[len(directory) + 1 :]] = file.pread(file.size(), 0)
        except FileNotFoundError:  # the broker has replaced a file meanwhile
            last_contents = None
            continue
        if contents == last_contents:
            for name in list(contents):
                if name.startswith(REPLICA_STATE_FILES):
                    del contents[name]
            return contents
        last_contents = contents
    raise StoreError(
        f"The files in {directory} changed each of the {STATE_READS_MAX} times they were read.",
        fix="Try again when fewer topics and groups are being changed.",
    )


def iter_files(files: Files, path: str) -> Iterator[str]:
    """Yield the paths of all files below a directory, which may be missing."""
    for name in files.names(path):
        below = f"{path}/{name}"
        try:
            files.open(below).close()
        except IsADirectoryError:
            yield from iter_files(files, below)
        else:
            yield below


def _check_same_store(log: CommitLog, directory: str, end: int, manifest: Manifest) -> None:
    """Raise StoreError if the backup in `directory` is not of the store with this log.

    `end` is the position at which the backup ends. The store must have the same file size, must
    still contain position `end`, and must have the same bytes before it as the backup
    (COMPARED_BYTES of them are compared).
    """
    backup = _load_log(log.segments.files, directory, manifest.log_file_bytes)
    fact = ""
    if manifest.log_file_bytes != log.segments.file_bytes or end > log.segments.end:
        fact = f"the store in {log.segments.directory} is another one, or was truncated"
    elif end < log.start:
        fact = f"the store in {log.segments.directory} now begins at {log.start}"

    # Compare the last bytes of the backup, file by file.
    position = max(end - COMPARED_BYTES, log.start, backup.start)
    while not fact and position < end:
        backed_up = backup.segments.at(position)
        stored = log.segments.at(position)
        assert backed_up is not None
        assert stored is not None
        compared_end = min(backed_up.end, end)
        size = compared_end - position
        if backed_up.read(position, size) != stored.read(position, size):
            fact = f"the store in {log.segments.directory} has other bytes from {position} on"
        position = compared_end
    backup.close()
    if fact:
        raise StoreError(
            f"{directory} contains a log that ends at {end}, but {fact}.",
            fix="Begin a new backup in an empty directory.",
        )


def _find_backup_end(log: CommitLog, begin: int, config: StoreConfig, progress: Progress) -> int:
    """Return the position at which the backup must end: behind the last valid record.

    On a replica, records that are not confirmed are left out. Records are checked from position
    `begin` on; `progress` is called with (bytes checked, bytes in total).

    Raises StoreDamagedError if the checkpoint says that the log is complete up to a later position.
    """
    files = log.segments.files
    log_end = log.segments.end
    confirmed_position = load_text(
        files,
        f"{config.root}/config/{REPLICA_STATE_FILES[0]}",
        lambda text: int(json.loads(text)["confirmed"]),
    )
    if confirmed_position is not None:
        log_end = min(log_end, max(confirmed_position, begin))

    end = begin
    for sweep in sweep_records(log, begin, log_end):
        end = sweep.end
        progress(end - begin, log_end - begin)
    end = min(log.skip_blank(end), max(log_end, end))

    checkpoint = read_checkpoint(files, f"{config.root}/checkpoint").latest
    if checkpoint is not None and end < min(checkpoint.log_offset, log_end):
        raise StoreDamagedError(
            f"The log in {log.segments.directory} contains no whole record at {end}, but the"
            f" checkpoint says that it is complete up to {checkpoint.log_offset}.",
            fix=f"Run `sluice store verify {config.root}` for details. `sluice store repair` saves"
            " the other records. The earlier backup is unchanged.",
        )
    return end


def _copy_segment(
    files: Files,
    segment: Segment,
    directory: str,
    begin: int,
    end: int,
    shares: Sequence[ShareFile],
) -> int:
    """Copy the bytes from position `begin` to `end` that are in one file of a log.

    The file in `directory` gets the same name and size. If the whole file is needed, the functions
    `shares` are tried first; they make a copy without copying bytes. Return the number of bytes
    that were copied, 0 if the file was shared.
    """
    files.make_directory(directory)
    path = f"{directory}/{segment.base:0{NAME_DIGITS}d}"
    is_new = begin <= segment.base
    if is_new and files.exists(path):  # an interrupted run has left it
        files.remove(path)
    is_needed_completely = is_new and segment.end <= end
    if is_needed_completely and any(share(segment.path, path) for share in shares):
        files.sync_directory(directory)
        return 0

    copy_start = max(begin, segment.base)
    copy_end = min(end, segment.end)
    with closing(files.open(path, create=True)) as file:
        file.truncate(segment.size)
        _copy_bytes(segment, file, copy_start, copy_end)
        file.sync()
    # The directory is synced after each file, so that a power loss leaves no gap between files.
    files.sync_directory(directory)
    segment.release()
    return copy_end - copy_start


def _copy_bytes(segment: Segment, file: File, start: int, end: int) -> None:
    """Copy the positions [start, end) of a log into a file that has the base of `segment`."""
    for chunk_start in range(start, end, _CHUNK_BYTES):
        chunk = segment.read(chunk_start, min(_CHUNK_BYTES, end - chunk_start))
        file.pwrite(chunk, chunk_start - segment.base)


def _write_state(files: Files, directory: str, state: dict[str, bytes]) -> None:
    """Write files with these names and contents below `directory`/config, and sync them.

    `state` maps relative names to contents. The directory is created even if it is empty.
    """
    files.make_directory(f"{directory}/config")
    for name, content in state.items():
        path = f"{directory}/config/{name}"
        parent = path.rpartition("/")[0]
        files.make_directory(parent)
        with closing(files.open(path, create=True)) as file:
            file.pwrite(content, 0)
            file.sync()
        files.sync_directory(parent)


def remove_tree(files: Files, path: str) -> None:
    """Remove a file, or a directory with everything in it, if it exists."""
    for name in files.names(path):
        remove_tree(files, f"{path}/{name}")
    if files.exists(path):
        files.remove(path)


# ----------------------------------------------------------------------------------- restore


def restore(
    source: str,
    root: str,
    *,
    at: int | None = None,
    delay_levels: str = "",
    files: Files = SYSTEM_FILES,
    clock: Clock = SYSTEM_CLOCK,
    shares: Sequence[ShareFile] = (clone,),
    progress: Progress = lambda done, total: None,
) -> RestoreReport:
    """Create a store in `root` from the backup in the directory `source`.

    `root` must be empty, or contain what an interrupted restore has left. `at` is a position in the
    log: records that end behind it are left out. None restores all. `delay_levels` is the broker's
    messageDelayLevel; "" means the default. `shares` are functions that copy a file without copying
    bytes. `progress` is called with (bytes done, bytes in total). Brokers of SluiceMQ and RocketMQ
    can open the store.

    Raises StoreError if `source` is not a backup, `root` is not empty or the backup does not
    contain position `at`, and OSError.
    """
    manifest = _read_manifest_to_restore(files, source)
    if files.names(root) and not files.exists(f"{root}/{RESTORING_FILE}"):
        raise StoreError(
            f"{root} is not empty.", fix="Specify a directory that does not exist yet."
        )

    log = _load_log(files, f"{source}/commitlog", manifest.log_file_bytes)
    backup_end = manifest.moments[-1].end
    end = backup_end if at is None else at
    if not log.start <= end <= backup_end:
        raise StoreError(
            f"The backup in {source} contains the log from {log.start} to {backup_end}, not {end}.",
            fix="Specify a position in that range.",
        )

    moment = _choose_moment(manifest, end)
    state = _read_state(files, f"{_make_state_path(source, moment.end)}/config")

    # From here until it is removed, RESTORING_FILE prevents that a broker opens the store.
    for name in set(files.names(root)) - {RESTORING_FILE}:
        remove_tree(files, f"{root}/{name}")
    files.make_directory(root)
    overwrite_text(files, f"{root}/{RESTORING_FILE}", source)
    _write_state(files, root, state)
    for segment in log.segments:
        if segment.base < end:
            _copy_segment(files, segment, f"{root}/commitlog", 0, end, shares)
            progress(segment.end - log.start, end - log.start)
    log.close()

    config = manifest.store_config(root, delay_levels)
    report = _build_derived_files(files, clock, manifest, moment, config)
    files.remove(f"{root}/{RESTORING_FILE}")
    files.sync_directory(root)
    return report


def _read_manifest_to_restore(files: Files, source: str) -> Manifest:
    """Return the manifest of the backup in a directory. Raises StoreError if it is not a backup."""
    manifest = _read_manifest(files, source)
    if manifest is None:
        raise StoreError(
            f"{source} is not a backup.",
            fix="Specify a directory that `sluice store backup` has written.",
        )
    return manifest


def _choose_moment(manifest: Manifest, end: int) -> Moment:
    """Return the moment whose documents are restored with the log up to position `end`.

    That is the newest moment that does not end behind `end`, or the first one if all do.
    """
    chosen = manifest.moments[0]
    for moment in manifest.moments:
        if moment.end <= end:
            chosen = moment
    return chosen


def _build_derived_files(
    files: Files, clock: Clock, manifest: Manifest, moment: Moment, config: StoreConfig
) -> RestoreReport:
    """Build queues, index and timer files of a restored store, and describe the result.

    The store has only a log and documents yet. `moment` is the state of the backup that the
    documents are from; it is only reported.
    """
    # The file `abort` makes the store examine the whole log and build what is missing.
    write_abort(files, f"{config.root}/abort")
    store = Store(config, files, clock, files.lock(f"{config.root}/lock"))
    for topic, queue_id, offset, unit in manifest.units:
        store.begin_queue(topic, queue_id, offset, unit)
    while config.index_enable and not store.keys.catch_up():
        pass

    message_count = 0
    for key in store.queues():
        offset_min, offset_end = store.queue_offsets(*key)
        message_count += offset_end - offset_min
    timed_messages = build_timer_files(store, files, config, clock.now_ms())
    report = RestoreReport(
        start=store.log_start,
        end=store.written_offset,
        moment=moment,
        messages=message_count,
        timed_messages=timed_messages,
    )
    store.close()
    if not config.index_enable:
        # A broker with an index, also RocketMQ's, then builds one at its first start.
        write_abort(files, f"{config.root}/abort")
    return report
