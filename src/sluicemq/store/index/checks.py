"""Comparing the files of the key index with the records of the log.

A start uses these checks to find out whether files are an index of this log (`index.KeyIndex`).
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from sluicemq.record.codec import hash_keys
from sluicemq.store.index.file import IndexFile, IndexMark
from sluicemq.store.log import CommitLog

SLICE_BYTES: Final = 1 << 20
"""The number of bytes of the log that are indexed together: some 3,000 small messages, which take
2 ms. In smaller slices the fixed cost of calls to NumPy outweighs the work."""


def is_whole(file: IndexFile, log: CommitLog) -> bool:
    """Return whether an index file that is not the last one is complete.

    It is complete if it has no free entry, its header names the records of its first and last
    entry, and these two entries fit the records of the log.
    """
    if file.free_entries:
        return False
    first_position = file.position_of(1)
    last_position = file.position_of(file.next_number - 1)
    if file.begin_offset != first_position or file.end_offset != last_position:
        return False
    return fits_log(file, log, file.next_number)


def fits_log(file: IndexFile, log: CommitLog, end_number: int) -> bool:
    """Return whether the first and last entry before `end_number` fit the records of the log.

    An entry (the hash of a key and the position of a record) fits if the record at its position has
    a key with that hash. It also fits if retention has already removed the record from the log.
    """
    for entry_number in (1, end_number - 1):
        position = file.position_of(entry_number)
        if position < log.start:
            continue
        if position >= log.records_end:
            return False
        segment = log.segments.at(position)
        if segment is None:
            return False
        keys = hash_keys(segment.view(), position - segment.base)
        if file.hash_of(entry_number) not in keys.hashes:
            return False
    return True


def does_last_fit_log(
    file: IndexFile, log: CommitLog, mark: IndexMark, *, after_crash: bool
) -> bool:
    """Return whether the last file is empty, or its entries fit the records of the log.

    `mark` is the state of the index that the last checkpoint noted. `after_crash` means that the
    last run did not end cleanly; then only the entries that the mark counts are checked.
    """
    end_number = file.next_number
    if file.name == mark.file and (after_crash or end_number < mark.entries):
        # The header may be older than the mark, because it is written later.
        end_number = min(mark.entries, file.geometry.entry_count)
    return end_number <= 1 or fits_log(file, log, end_number)


def is_last_of_mark(last_file: IndexFile | None, mark: IndexMark, *, after_crash: bool) -> bool:
    """Return whether `last_file` is the last file that the last checkpoint noted in `mark`.

    `last_file` is None if the index has no file; then the mark must have none either. Without a
    crash, return False also if the file has more entries than the mark: another program has added
    them.
    """
    if last_file is None:
        return mark.file == 0
    if last_file.name != mark.file:
        return False
    return after_crash or last_file.next_number <= mark.entries


def do_entries_end_at(files: Sequence[IndexFile], log: CommitLog, end: int, bytes_max: int) -> bool:
    """Return whether the index is complete up to position `end` of the log, judging by its end.

    `files` are all files of the index. The records from the last indexed one up to `end` must have
    exactly as many keys as the index has entries for them. An empty last file counts as complete.

    At most about `bytes_max` bytes of the log are read. Return False if that is not enough.
    """
    *full_files, last_file = files
    if last_file.next_number <= 1:
        return True

    # Count the entries of the last indexed record, which several files may contain.
    record_start = last_file.position_of(last_file.next_number - 1)
    files_of_record = takewhile(lambda file: file.end_offset >= record_start, reversed(full_files))
    entry_count = 0
    for file in (last_file, *files_of_record):
        entry_count += file.next_number - file.first_number_at(record_start)

    # The records from this one on must have as many keys. Each key that is found takes one entry
    # off the count.
    position = record_start
    while position < end:
        if position - record_start > bytes_max:
            return False
        key_count, position = count_keys(log, position, end)
        entry_count -= key_count
    return entry_count == 0


def count_keys(log: CommitLog, position: int, end: int) -> tuple[int, int]:
    """Count the keys of the records in a slice of the log that begins at `position`.

    The slice has about SLICE_BYTES. It never goes beyond `end` or the end of the log file, except
    that the record that begins before `end` is included as a whole.

    Return (number of keys, position after the slice). If no file of the log contains `position`,
    return (0, `end`).
    """
    segment = log.segments.at(position)
    if segment is None:
        return 0, end
    from sluicemq.store.index import columns  # noqa: PLC0415 - imports NumPy

    view = segment.view()
    stop = min(position + SLICE_BYTES, end, segment.end) - segment.base
    starts, slice_end = columns.find_record_starts(view, position - segment.base, stop)
    key_count = 0
    if len(starts):
        key_count = len(columns.key_columns_at(view, starts).hashes)
    return key_count, max(segment.base + slice_end, position + 1)
