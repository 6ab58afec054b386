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
    """Return whether a file that is not the last one is full and agrees with its header."""
    if file.free_entries:
        return False
    first_position = file.position_of(1)
    last_position = file.position_of(file.next_number - 1)
    if file.begin_offset != first_position or file.end_offset != last_position:
        return False
    return fits_log(file, log, file.next_number)


def fits_log(file: IndexFile, log: CommitLog, end_number: int) -> bool:
    """Return whether the first and last entry before `end_number` fit the records of the log.

    Records that retention has removed prove nothing, and count as fitting.
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

    `mark` is that of the last checkpoint, and `after_crash` says that the last run did not end
    cleanly.
    """
    end_number = file.next_number
    if file.name == mark.file and (after_crash or end_number < mark.entries):
        # The header may be older than the mark, because it is written later.
        end_number = min(mark.entries, file.geometry.entry_count)
    return end_number <= 1 or fits_log(file, log, end_number)


def is_last_of_mark(last_file: IndexFile | None, mark: IndexMark, *, after_crash: bool) -> bool:
    """Return whether the last file is the one that the mark describes, or there is none in both.

    Without a crash, it must not have more entries than the mark: another program added them.
    """
    if last_file is None:
        return mark.file == 0
    if last_file.name != mark.file:
        return False
    return after_crash or last_file.next_number <= mark.entries


def do_entries_end_at(files: Sequence[IndexFile], log: CommitLog, end: int, bytes_max: int) -> bool:
    """Return whether the last entries are those of the last records before position `end`.

    `files` are all files of the index. At most about `bytes_max` bytes of the log are read to find
    out; return False if that is not enough.
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

    # There must be as many keys from this record on.
    position = record_start
    while position < end:
        if position - record_start > bytes_max:
            return False
        key_count, position = count_keys(log, position, end)
        entry_count -= key_count
    return entry_count == 0


def count_keys(log: CommitLog, position: int, end: int) -> tuple[int, int]:
    """Count the keys of the records in a slice of the log, from `position` on.

    The slice ends behind the last record that begins before `end`, or is cut after about
    SLICE_BYTES or at the end of the file. Return (number of keys, position after the slice). If no
    file of the log contains `position`, return (0, `end`).
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
